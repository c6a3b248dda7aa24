/* SPDX-License-Identifier: Apache-2.0 */
/* Maps pages of ordinary memory, populates them, and hides them from forked children.
 * Some of this memory will be page-locked later. The kernel gives a fresh page its
 * memory when the page is first written, and is several times as fast with huge pages.
 * If a mapped file is cut short, its pages beyond the new end are gone, and touching
 * one of them ends the process. No locks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/machine.h"
#include "base/status.h"

#define CM_HUGE_PAGE_NBYTES ((uintptr_t)2 << 20)

/* True if the range is long enough for huge pages and, as far as a look at a few pages
 * tells, most of its pages are not there yet. */
bool cm_pages_are_fresh(const void *p, uint64_t nbytes);
/* Ask for huge pages in a range that is about to be written, wherever a whole huge page
 * fits into it. A refusal changes nothing. */
void cm_pages_ask_huge(void *p, uint64_t nbytes);
/* Bring in the pages of memory that is about to be read, or written (`writes`), and
 * that may belong to a mapped file. If a page is no longer in the file, or cannot be
 * read from the disk, the call fails, whereas touching the page would raise a signal.
 * This takes time for each page, even for those that are there. With kernels before
 * 5.14, and for memory of devices, missing pages are not noticed, and the call does not
 * fail.
 * Fails: CM_EFAULT (errno). */
CM_NODISCARD cm_status cm_pages_populate(const void *p, uint64_t nbytes, bool writes);
/* Do the same as cm_pages_populate() for the page of the last byte alone. That shows
 * whether a file was cut short, and costs the same however long the memory is. */
CM_NODISCARD cm_status cm_pages_probe(const void *p, uint64_t nbytes, bool writes);

/* Map `nbytes` of fresh memory that begins at a huge page, and ask for huge pages where
 * the kernel has any. With `is_shared` forked children share the memory.
 * Fails: CM_ENOMEM. */
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
    const void *from;    /* what the pages are to hold; NULL if that does not matter */
    const cm_cpus *cpus; /* the CPUs that helper threads run on; NULL for any */
    /* The largest number of threads. If this is 0, the number depends on `nbytes` and
     * on the CPUs. */
    unsigned thread_count;
    /* The calling thread may run on another node, so it helps only if no thread could
     * be started. */
    bool only_helpers;
    bool can_not_populate; /* the kernel has no MADV_POPULATE_WRITE */
} cm_populate;

/* Let the pages come from `node` as far as the kernel allows it, and let helper threads
 * run on its CPUs. This writes the set of these CPUs to `cpus`, which the caller keeps
 * until the pages are populated. Tests pass their own `root`. They pass false for
 * `can_bind` to act as a kernel that refuses to bind memory. */
void cm_populate_on_node(cm_populate *populate, const char *root, int node,
                         bool can_bind, cm_cpus *cpus);

/* Give every page of the range its memory.
 * Blocks: until all threads are done.
 * Fails:  CM_ENOMEM; some pages may then have their memory, and others not. */
CM_NODISCARD cm_status cm_populate_run(const cm_populate *populate);

/* Keep page-locked memory out of forked children. Otherwise a child would share it, or
 * the first write to a page after the fork would give the writer a new page, while the
 * device goes on with the old one. Returns true if children have the addresses, with
 * zeros behind them, or false if they do not even have the addresses, as is usual for a
 * mapping of the driver. */
bool cm_host_hide(void *start, uint64_t nbytes);
/* Keep memory out of forked children altogether: not even the addresses are there, so
 * that no child reads zeros, however it was forked. */
void cm_host_omit(void *start, uint64_t nbytes);
/* In a child: reserve the addresses of memory that was kept out, so that nobody can
 * touch them. Returns false if other memory lies there by now, which is left alone. */
bool cm_host_reserve(void *start, uint64_t nbytes);
