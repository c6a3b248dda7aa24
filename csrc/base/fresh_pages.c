/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fresh_pages.h"

#include <errno.h>
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

cm_status
cm_pages_look(const void *p, uint64_t nbytes, bool writes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t last = (uintptr_t)p + (uintptr_t)nbytes - 1;
    int advice = writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    if (nbytes == 0 || madvise((void *)(last - last % page), page, advice) == 0
        || (errno != EFAULT && errno != ENOMEM && errno != EHWPOISON)) {
        return cm_ok();
    }
    return cm_fail(CM_EFAULT, (uint64_t)errno);
}
