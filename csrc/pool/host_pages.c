/* SPDX-License-Identifier: Apache-2.0 */
/* Populating is done with several threads: clearing pages is the larger part of what
 * page-locked memory costs, and the driver does it with one. */
#include "pool/host_pages.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked_math.h"
#include "base/cpu_count.h"
#include "base/fresh_pages.h"
#include "base/thread.h"

#ifndef MADV_POPULATE_WRITE
#    define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* What one thread is worth starting for. */
#define NBYTES_PER_THREAD (UINT64_C(16) << 20)

enum { SLICE = 8 << 20 };

/* [0, next) is taken by some thread; whoever takes a slice populates it. */
typedef struct work {
    const cm_populate *of; /* borrowed */
    _Atomic uint64_t next;
    atomic_bool must_touch;
    atomic_bool has_failed;
} work;

static void
touch(char *start, uint64_t nbytes)
{
    uint64_t page_nbytes = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t i = 0; i < nbytes; i += page_nbytes) {
        *(volatile char *)(start + i) = 0; /* fresh pages: they hold zeros anyway */
    }
}

/* One byte of each huge page: faults of several threads run side by side, calls of
 * MADV_POPULATE_WRITE get in each other's way (benchmarks/driver_calls.py measures
 * both). Where pages are small this does little. */
static void
touch_huge(char *start, uint64_t nbytes)
{
    for (uint64_t i = 0; i < nbytes; i += CM_HUGE_PAGE_NBYTES) {
        *(volatile char *)(start + i) = 0;
    }
}

static bool
populate_slice(work *w, char *start, uint64_t nbytes)
{
    touch_huge(start, nbytes);
    while (!atomic_load(&w->must_touch)) {
        if (madvise(start, nbytes, MADV_POPULATE_WRITE) == 0) {
            return true;
        }
        if (errno == EINVAL) {
            atomic_store(&w->must_touch, true); /* an older kernel */
        }
        else if (errno != EAGAIN && errno != EINTR) {
            return false;
        }
    }
    touch(start, nbytes);
    return true;
}

static void
populate_slices(work *w)
{
    uint64_t nbytes = w->of->nbytes;
    while (!atomic_load(&w->has_failed)) {
        uint64_t at = atomic_fetch_add(&w->next, SLICE);
        if (at >= nbytes) {
            return;
        }
        uint64_t length = nbytes - at < SLICE ? nbytes - at : SLICE;
        if (w->of->from != NULL) {
            memcpy((char *)w->of->start + at, (const char *)w->of->from + at, length);
        }
        else if (!populate_slice(w, (char *)w->of->start + at, length)) {
            atomic_store(&w->has_failed, true);
        }
    }
}

static void *
helper_run(void *context)
{
    work *w = context;
    if (w->of->cpus != NULL) {
        /* Where it is refused the pages may come from elsewhere: placement tells. */
        (void)sched_setaffinity(0, sizeof(*w->of->cpus), w->of->cpus->sets);
    }
    populate_slices(w);
    return NULL;
}

unsigned
cm_populate_threads(const char *root, uint64_t nbytes)
{
    uint64_t count = nbytes / NBYTES_PER_THREAD;
    count = count < CM_POPULATE_MAX_THREADS ? count : CM_POPULATE_MAX_THREADS;
    if (count > 1) {
        unsigned usable = cm_usable_cpu_count(root);
        count = usable < count ? usable : count;
    }
    return count > 1 ? (unsigned)count : 1;
}

cm_status
cm_populate_run(const cm_populate *populate)
{
    cm_thread helpers[CM_POPULATE_MAX_THREADS];
    unsigned count = 0;
    unsigned wanted = populate->thread_count - (populate->only_helpers ? 0 : 1);
    work w = {.of = populate};
    atomic_init(&w.next, 0);
    atomic_init(&w.must_touch, populate->can_not_populate);
    atomic_init(&w.has_failed, false);
    while (count < wanted && count < CM_POPULATE_MAX_THREADS
           && cm_is_ok(cm_thread_start(&helpers[count], helper_run, &w))) {
        count++;
    }
    if (!populate->only_helpers || count == 0) {
        populate_slices(&w);
    }
    for (unsigned i = 0; i < count; i++) {
        cm_thread_join(helpers[i]);
    }
    return atomic_load(&w.has_failed) ? cm_fail(CM_ENOMEM, populate->nbytes) : cm_ok();
}

cm_status
cm_host_map(uint64_t nbytes, char **out)
{
    uint64_t whole;
    uint64_t start;
    if (!cm_add_u64(nbytes, CM_HUGE_PAGE_NBYTES, &whole)) {
        return cm_fail(CM_ENOMEM, nbytes);
    }
    char *raw =
        mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED
        || !cm_round_up_u64((uint64_t)(uintptr_t)raw, CM_HUGE_PAGE_NBYTES, &start)) {
        return cm_fail(CM_ENOMEM, nbytes);
    }
    uint64_t before = start - (uint64_t)(uintptr_t)raw;
    if (before != 0) {
        (void)munmap(raw, before);
    }
    (void)munmap(raw + before + nbytes, CM_HUGE_PAGE_NBYTES - before);
    *out = raw + before;
    return cm_ok();
}

void
cm_host_unmap(char *start, uint64_t nbytes)
{
    if (munmap(start, nbytes) != 0) {
        /* The process has no mapping to spare for the split: keep the addresses. */
        (void)madvise(start, nbytes, MADV_DONTNEED);
    }
}

bool
cm_host_hide(void *start, uint64_t nbytes)
{
    if (madvise(start, nbytes, MADV_WIPEONFORK) == 0
        && madvise(start, nbytes, MADV_DOFORK) == 0) {
        return true;
    }
    (void)madvise(start, nbytes, MADV_DONTFORK);
    return false;
}
