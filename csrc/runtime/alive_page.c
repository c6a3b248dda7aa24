/* SPDX-License-Identifier: Apache-2.0 */
/* The page that tells a forked child from its parent: the kernel wipes it on fork. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/runtime.h"

static size_t
page_nbytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

cm_status
cm_alive_page_create(const volatile uint32_t **out)
{
    void *page = mmap(NULL, page_nbytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return cm_fail(CM_ESYSTEM, (uint64_t)errno);
    }
    if (madvise(page, page_nbytes(), MADV_WIPEONFORK) != 0) {
        uint64_t error = (uint64_t)errno;
        (void)munmap(page, page_nbytes());
        return cm_fail(CM_ESYSTEM, error);
    }
    *(volatile uint32_t *)page = 1;
    /* From here on nobody writes it, which makes reading it without a lock safe. */
    (void)mprotect(page, page_nbytes(), PROT_READ);
    *out = (const volatile uint32_t *)page;
    return cm_ok();
}

void
cm_alive_page_destroy(const volatile uint32_t *page)
{
    if (page != NULL) {
        (void)munmap((void *)(uintptr_t)page, page_nbytes());
    }
}
