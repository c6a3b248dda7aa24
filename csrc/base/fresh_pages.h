/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of ordinary memory, also before it is page-locked: mapping, populating and
 * hiding them. Fresh pages get their memory when they are first written, which is
 * several times as fast for huge ones; those of a mapped file that was cut short are
 * gone, and touching them ends the process. No locks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/machine.h"
#include "base/status.h"

#define CM_HUGE_PAGE_NBYTES ((uintptr_t)2 << 20)

/* The range is long enough for huge pages, and by a look at a few of them most pages
 * are not there yet. */
bool cm_pages_are_fresh(const void *p, uint64_t nbytes);
/* That the pages of a range about to be written become huge ones, where whole ones lie
 * in it; a refusal changes nothing. */
void cm_pages_ask_huge(void *p, uint64_t nbytes);
/* Bring in the pages of memory that is about to be read, or written, and may be a
 * mapped file's: what is not in the file any more, or cannot be read from the disk, is
 * a failure here, where touching it raises a signal. Takes time for each page, also
 * where it is there. Kernels before 5.14, and memory of devices, cannot tell: no
 * failure. Fails: CM_EFAULT (errno). */
CM_NODISCARD cm_status cm_pages_populate(const void *p, uint64_t nbytes, bool writes);
/* The same for the page of the last byte, which tells for all of a file that was cut
 * short and costs the same whatever memory it is. */
CM_NODISCARD cm_status cm_pages_look(const void *p, uint64_t nbytes, bool writes);

/* Addresses for `nbytes` of huge pages, where the kernel has any; `is_shared`: of
 * memory
 * that forked children share. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_host_map_as(uint64_t nbytes, bool is_shared, char **out);
CM_NODISCARD static inline cm_status
cm_host_map(uint64_t nbytes, char **out)
{
    return cm_host_map_as(nbytes, false, out);
}
void cm_host_unmap(char *start, uint64_t nbytes);

typedef struct cm_populate {
    void *start; /* aligned to 2 MiB */
    uint64_t nbytes;
    const void *from;      /* what the pages shall hold; NULL: nothing in particular */
    const cm_cpus *cpus;   /* NULL: anywhere; else where helper threads run */
    unsigned thread_count; /* fewer are fine; 0: as many as are worth starting */
    bool only_helpers;     /* the calling thread, which may run elsewhere, helps only
                              where no thread could be started */
    bool can_not_populate; /* the kernel has no MADV_POPULATE_WRITE */
} cm_populate;

/* Give every page of the range its memory. Blocks: until all threads are done.
 * Fails: CM_ENOMEM; some pages may then have theirs. */
CM_NODISCARD cm_status cm_populate_run(const cm_populate *populate);

/* Leave page-locked memory out of forked children, which would share it or, page by
 * page, take it away from the device. True: they have the addresses all the same, with
 * nothing but zeros behind; false: not even these, as usual for a driver's mapping. */
bool cm_host_hide(void *start, uint64_t nbytes);
/* Leave it out altogether: not even the addresses are there, so that no child reads
 * zeros, however it was forked. */
void cm_host_omit(void *start, uint64_t nbytes);
/* In a child: take addresses that were left out, which nobody may touch. False: other
 * memory lies there by now, and is left alone. */
bool cm_host_reserve(void *start, uint64_t nbytes);
