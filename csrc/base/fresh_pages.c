/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fresh_pages.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#    define MADV_POPULATE_READ 22
#    define MADV_POPULATE_WRITE 23
#endif

enum { LOOK_COUNT = 8 };

bool
cm_pages_are_fresh(const void *p, uint64_t nbytes)
{
    if (nbytes < 2 * CM_HUGE_PAGE_NBYTES) {
        return false;
    }
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    unsigned missing = 0;
    for (unsigned i = 0; i < LOOK_COUNT; i++) {
        uintptr_t at = (uintptr_t)p + (uintptr_t)(nbytes / LOOK_COUNT * i);
        unsigned char there = 1;
        if (mincore((void *)(at - at % page), page, &there) == 0) {
            missing += (there & 1) == 0;
        }
    }
    return missing > LOOK_COUNT / 2;
}

void
cm_pages_ask_huge(void *p, uint64_t nbytes)
{
    uintptr_t begin = (uintptr_t)p + CM_HUGE_PAGE_NBYTES - 1;
    uintptr_t end = (uintptr_t)p + (uintptr_t)nbytes;
    begin -= begin % CM_HUGE_PAGE_NBYTES;
    end -= end % CM_HUGE_PAGE_NBYTES;
    if (begin < end) {
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    }
}

/* Known only after a refusal; what else is refused is memory of another sort. */
static bool
can_populate(uintptr_t page)
{
    uintptr_t own = (uintptr_t)&page;
    return madvise((void *)(own - own % page), page, MADV_POPULATE_READ) == 0;
}

cm_status
cm_pages_populate(const void *p, uint64_t nbytes, bool writes)
{
    static atomic_bool is_old; /* the kernel: not asked again */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)p - (uintptr_t)p % page;
    size_t length = (size_t)((uintptr_t)p + (uintptr_t)nbytes - begin);
    int advice = writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    if (nbytes == 0 || atomic_load_explicit(&is_old, memory_order_relaxed)
        || madvise((void *)begin, length, advice) == 0) {
        return cm_ok();
    }
    int error = errno;
    if (error == EFAULT || error == ENOMEM || error == EHWPOISON) {
        return cm_fail(CM_EFAULT, (uint64_t)error);
    }
    if ((error == EINVAL || error == ENOSYS) && !can_populate(page)) {
        atomic_store_explicit(&is_old, true, memory_order_relaxed);
    }
    return cm_ok();
}

cm_status
cm_pages_look(const void *p, uint64_t nbytes, bool writes)
{
    return cm_pages_populate((const char *)p + nbytes - (nbytes != 0), nbytes != 0,
                             writes);
}
