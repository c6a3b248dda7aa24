/* SPDX-License-Identifier: Apache-2.0 */
#include "base/bell.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

struct cm_bell {
    atomic_uint refs;
    int fd; /* owned */
};

cm_status
cm_bell_create(int fd, cm_bell **out)
{
    cm_bell *bell = malloc(sizeof(*bell));
    CM_TRY(cm_allocated(bell != NULL, sizeof(*bell)));
    atomic_init(&bell->refs, 1);
    bell->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (bell->fd < 0) {
        uint64_t error = (uint64_t)errno;
        free(bell);
        return cm_fail(CM_ESYSTEM, error);
    }
    *out = bell;
    return cm_ok();
}

cm_bell *
cm_bell_hold(cm_bell *bell)
{
    atomic_fetch_add_explicit(&bell->refs, 1, memory_order_relaxed);
    return bell;
}

void
cm_bell_ring(const cm_bell *bell)
{
    uint64_t one = 1;
    ssize_t written = write(bell->fd, &one, sizeof(one));
    (void)written; /* the write fails if the counter is full, but then its reader wakes
                      anyway */
}

void
cm_bell_release(cm_bell *bell)
{
    if (atomic_fetch_sub_explicit(&bell->refs, 1, memory_order_acq_rel) == 1) {
        (void)close(bell->fd);
        free(bell);
    }
}
