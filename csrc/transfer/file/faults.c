/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/file/faults.h"

#include <errno.h>

/* Count the call; false: it fails, errno set, or moves nothing. */
static bool
enter(cm_file_faults *faults, int fd, uint64_t *nbytes)
{
    const cm_file_plan *plan = &faults->plan;
    cm_mutex_lock(&faults->lock);
    uint64_t number = ++faults->count;
    faults->direct_count += fd == faults->direct_fd;
    if (plan->held != 0 && number >= plan->held && faults->is_shut) {
        faults->is_waiting = true;
        cm_cond_signal_all(&faults->changed);
        while (faults->is_shut) {
            cm_cond_wait(&faults->changed, &faults->lock);
        }
    }
    cm_mutex_unlock(&faults->lock);
    if (plan->most != 0 && *nbytes > plan->most) {
        *nbytes = plan->most;
    }
    errno = plan->error;
    return plan->nth == 0 || number < plan->nth
           || (number > plan->nth && !plan->repeat);
}

static int64_t
read_or_fail(void *context, int fd, void *to, uint64_t nbytes, uint64_t offset)
{
    cm_file_faults *faults = context;
    if (!enter(faults, fd, &nbytes)) {
        return faults->plan.error == 0 ? 0 : -1;
    }
    return cm_file_system_calls.read(NULL, fd, to, nbytes, offset);
}

static int64_t
write_or_fail(void *context, int fd, const void *from, uint64_t nbytes, uint64_t offset)
{
    cm_file_faults *faults = context;
    if (!enter(faults, fd, &nbytes)) {
        return faults->plan.error == 0 ? 0 : -1;
    }
    return cm_file_system_calls.write(NULL, fd, from, nbytes, offset);
}

static uint64_t
size_of(void *context CM_UNUSED, int fd)
{
    return cm_file_system_calls.size(NULL, fd);
}

static int
open_direct(void *context, int fd, bool writes)
{
    cm_file_faults *faults = context;
    if (faults->plan.no_direct) {
        return -1;
    }
    int direct = cm_file_system_calls.open_direct(NULL, fd, writes);
    cm_mutex_lock(&faults->lock);
    faults->direct_fd = direct;
    faults->open_count += direct >= 0;
    cm_mutex_unlock(&faults->lock);
    return direct;
}

static void
close_direct(void *context, int fd)
{
    cm_file_faults *faults = context;
    cm_mutex_lock(&faults->lock);
    faults->direct_fd = -1;
    faults->open_count--;
    cm_mutex_unlock(&faults->lock);
    cm_file_system_calls.close(NULL, fd);
}

static bool
is_cached(void *context, int fd, uint64_t offset, uint64_t nbytes)
{
    const cm_file_faults *faults = context;
    return !faults->plan.is_cold
           && cm_file_system_calls.is_cached(NULL, fd, offset, nbytes);
}

static void
advise(void *context, int fd, uint64_t offset, uint64_t nbytes)
{
    cm_file_faults *faults = context;
    cm_mutex_lock(&faults->lock);
    faults->advised_count++;
    cm_mutex_unlock(&faults->lock);
    cm_file_system_calls.advise(NULL, fd, offset, nbytes);
}

cm_status
cm_file_faults_init(cm_file_faults *faults)
{
    *faults = (cm_file_faults){
        .calls = {.read = read_or_fail,
                  .write = write_or_fail,
                  .size = size_of,
                  .open_direct = open_direct,
                  .close = close_direct,
                  .is_cached = is_cached,
                  .advise = advise,
                  .context = faults},
        .direct_fd = -1,
    };
    CM_TRY(cm_mutex_init(&faults->lock));
    cm_status status = cm_cond_init(&faults->changed);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&faults->lock);
    }
    return status;
}

void
cm_file_faults_fini(cm_file_faults *faults)
{
    cm_cond_fini(&faults->changed);
    cm_mutex_fini(&faults->lock);
}

void
cm_file_faults_set(cm_file_faults *faults, const cm_file_plan *plan)
{
    cm_mutex_lock(&faults->lock);
    faults->plan = *plan;
    faults->count = 0;
    faults->direct_count = 0;
    faults->advised_count = 0;
    faults->is_shut = plan->held != 0;
    faults->is_waiting = false;
    cm_mutex_unlock(&faults->lock);
}

void
cm_file_faults_await(cm_file_faults *faults)
{
    cm_mutex_lock(&faults->lock);
    while (!faults->is_waiting) {
        cm_cond_wait(&faults->changed, &faults->lock);
    }
    cm_mutex_unlock(&faults->lock);
}

void
cm_file_faults_open(cm_file_faults *faults)
{
    cm_mutex_lock(&faults->lock);
    faults->is_shut = false;
    cm_cond_signal_all(&faults->changed);
    cm_mutex_unlock(&faults->lock);
}
