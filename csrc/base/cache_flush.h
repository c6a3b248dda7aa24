/* SPDX-License-Identifier: Apache-2.0 */
/* Having the processor forget memory that it has in its caches, so that what is
 * measured next is the memory. Where there is no such instruction nothing is done. */
#ifndef CM_BASE_CACHE_FLUSH_H
#define CM_BASE_CACHE_FLUSH_H

#include <stddef.h>

static inline void
cm_cache_flush(const void *start, size_t nbytes)
{
    const char *p = start;
    for (size_t at = 0; at < nbytes; at += 64) {
#if defined(__x86_64__)
        __builtin_ia32_clflush(p + at);
#elif defined(__aarch64__)
        __asm__ volatile("dc civac, %0" ::"r"(p + at) : "memory");
#else
        (void)p;
#endif
    }
}

#endif
