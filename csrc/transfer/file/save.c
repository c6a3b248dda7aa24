/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/file/save.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* -- life -------------------------------------------------------------------------------- */

void
cm_file_save_destroy(cm_file_save *save)
{
    if (save->temporary != NULL) {
        (void)unlink(save->temporary);
    }
    if (save->fd >= 0) {
        (void)close(save->fd);
    }
    free(save->temporary);
    free(save->target);
    free(save->ranges);
    free(save->regions);
    free(save);
}

/* Copy the ranges, and the regions that they borrow. */
static cm_status
copy_ranges(cm_file_save *save, const cm_file_request *request)
{
    size_t count = (size_t)request->range_count + 1;
    save->ranges = calloc(count, sizeof(*save->ranges));
    save->regions = calloc(count, sizeof(*save->regions));
    if (save->ranges == NULL || save->regions == NULL) {
        return cm_fail(CM_ENOMEM, count * sizeof(*save->regions));
    }
    for (uint64_t i = 0; i < request->range_count; i++) {
        save->ranges[i] = request->ranges[i];
        if (request->ranges[i].region != NULL) {
            save->regions[i] = *request->ranges[i].region;
            save->ranges[i].region = &save->regions[i];
        }
    }
    save->request.ranges = save->ranges;
    return cm_ok();
}

/* Copy everything that the request borrows. The temporary file still belongs to the
 * caller afterwards. */
static cm_status
init(cm_file_save *save, const cm_file_request *request)
{
    save->request = *request;
    save->fd = fcntl(request->fds[0], F_DUPFD_CLOEXEC, 0);
    if (save->fd < 0) {
        return cm_fail(CM_ESYSTEM, (uint64_t)errno);
    }
    save->request.fds[0] = save->fd;
    return copy_ranges(save, request);
}

/* Take over the temporary file, which cm_file_save_destroy() then removes. No later
 * step of the creation can fail, so a failure leaves the file to the caller. */
static cm_status
take_file(cm_file_save *save, const cm_file_place *place)
{
    char *temporary = strdup(place->temporary);
    save->target = strdup(place->target);
    if (temporary == NULL || save->target == NULL) {
        free(temporary);
        return cm_fail(CM_ENOMEM, strlen(place->temporary));
    }
    save->temporary = temporary;
    save->mode = place->mode;
    return cm_ok();
}

cm_status
cm_file_save_create(const cm_file_request *request, const cm_file_place *place,
                    cm_file_save **out)
{
    cm_file_save *save = calloc(1, sizeof(*save));
    CM_TRY(cm_allocated(save != NULL, sizeof(*save)));
    cm_status status = init(save, request);
    if (cm_is_ok(status) && place != NULL) {
        status = take_file(save, place);
    }
    if (!cm_is_ok(status)) {
        cm_file_save_destroy(save);
        return status;
    }
    *out = save;
    return cm_ok();
}

/* -- the file's name --------------------------------------------------------------------- */

/* Wait until the folder of the target is on the disk, since the folder holds the
 * target's name. */
static cm_status
sync_folder(const cm_file_save *save)
{
    char *slash = strrchr(save->target, '/');
    *slash = 0; /* this cuts off the file's own name, which nobody needs any more */
    int fd = open(slash == save->target ? "/" : save->target,
                  O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = fd < 0 || fsync(fd) != 0 ? errno : 0;
    if (fd >= 0) {
        (void)close(fd);
    }
    /* A file system that cannot flush folders answers with EINVAL. */
    return error == 0 || error == EINVAL ? cm_ok()
                                         : cm_fail(CM_ESYSTEM, (uint64_t)error);
}

cm_status
cm_file_save_place(cm_file_save *save)
{
    if (save->temporary == NULL) {
        return cm_ok();
    }
    if (fchmod(save->fd, (mode_t)save->mode) != 0 || fsync(save->fd) != 0
        || rename(save->temporary, save->target) != 0) {
        return cm_fail(CM_ESYSTEM, (uint64_t)errno);
    }
    free(save->temporary);
    save->temporary = NULL;
    return sync_folder(save);
}
