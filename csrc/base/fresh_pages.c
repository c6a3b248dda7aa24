/* SPDX-License-Identifier: Apache-2.0 */
/* Handles pages by mmap, madvise and mincore, and runs the threads that populate
 * them. */
#include "base/fresh_pages.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/thread.h"

#ifndef MAP_FIXED_NOREPLACE
#    define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif
#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#    define MADV_POPULATE_READ 22
#    define MADV_POPULATE_WRITE 23
#endif

/* -- memory that is read or written --------------------------------------------------------- */

enum { LOOK_COUNT = 8 };

bool
cm_pages_are_fresh(const void *p, uint64_t nbytes)
{
    if (nbytes < 2 * CM_HUGE_PAGE_NBYTES) {
        return false;
    }
    uintptr_t page = cm_page_nbytes();
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
cm_pages_populate(const void *p, uint64_t nbytes, bool writes)
{
    uintptr_t page = cm_page_nbytes();
    uintptr_t begin = (uintptr_t)p - (uintptr_t)p % page;
    size_t length = (size_t)((uintptr_t)p + (uintptr_t)nbytes - begin);
    int advice = writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    bool fails = nbytes != 0 && madvise((void *)begin, length, advice) != 0
                 && (errno == EFAULT || errno == ENOMEM || errno == EHWPOISON);
    return fails ? cm_fail(CM_EFAULT, (uint64_t)errno) : cm_ok();
}

cm_status
cm_pages_probe(const void *p, uint64_t nbytes, bool writes)
{
    return cm_pages_populate((const char *)p + nbytes - (nbytes != 0), nbytes != 0,
                             writes);
}

/* -- memory that is about to be page-locked ------------------------------------------------- */
/* Several threads populate the memory, since clearing pages takes most of the time that
 * making page-locked memory takes, and the driver clears them with one thread. */

/* At most one thread is started for each part of this size. */
#define NBYTES_PER_THREAD (UINT64_C(4) << 20)

enum { SLICE = 4 << 20, MAX_THREADS = 16 };

/* Work that threads share. The slices in [0, next) have been taken. A thread that takes
 * a slice populates it. */
typedef struct work {
    const cm_populate *of; /* borrowed */
    _Atomic uint64_t next;
    atomic_bool has_failed;
} work;

static void
touch(char *start, uint64_t nbytes, uint64_t step)
{
    for (uint64_t i = 0; i < nbytes; i += step) {
        *(volatile char *)(start + i) = 0; /* fresh pages hold zeros anyway */
    }
}

/* Populate a slice. One byte of each huge page is touched first: page faults of several
 * threads run side by side, while calls of MADV_POPULATE_WRITE get in each other's way
 * (benchmarks/driver_calls.py measures both). If pages are small the touching has
 * little effect. */
static bool
populate_slice(const cm_populate *of, char *start, uint64_t nbytes)
{
    int error = EINVAL;
    touch(start, nbytes, CM_HUGE_PAGE_NBYTES);
    if (!of->can_not_populate) {
        do {
            error = madvise(start, nbytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
        } while (error == EAGAIN || error == EINTR);
    }
    if (error == EINVAL) { /* the kernel is older than MADV_POPULATE_WRITE */
        touch(start, nbytes, cm_page_nbytes());
    }
    return error == 0 || error == EINVAL;
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
        uint64_t length = cm_least(nbytes - at, SLICE);
        if (w->of->from != NULL) {
            memcpy((char *)w->of->start + at, (const char *)w->of->from + at, length);
        }
        else if (!populate_slice(w->of, (char *)w->of->start + at, length)) {
            atomic_store(&w->has_failed, true);
        }
    }
}

static void *
helper_run(void *context)
{
    work *w = context;
    if (w->of->cpus != NULL) {
        /* If the kernel refuses this, the pages may come from another node. A caller
         * that needs to know looks where they are. */
        (void)sched_setaffinity(0, sizeof(*w->of->cpus), w->of->cpus->sets);
    }
    populate_slices(w);
    return NULL;
}

static unsigned
choose_thread_count(const cm_populate *populate)
{
    if (populate->thread_count != 0) {
        return populate->thread_count;
    }
    uint64_t count = cm_least(populate->nbytes / NBYTES_PER_THREAD, MAX_THREADS);
    if (count > 1) {
        count = cm_least(count, cm_usable_cpu_count());
    }
    if (count > 1 && populate->cpus != NULL) {
        count = cm_least(count, cm_cpus_count(populate->cpus));
    }
    return count > 1 ? (unsigned)count : 1;
}

void
cm_populate_on_node(cm_populate *populate, const char *root, int node, bool can_bind,
                    cm_cpus *cpus)
{
    bool is_bound = can_bind && cm_numa_prefer(populate->start, populate->nbytes, node);
    if (cm_numa_read_cpus(root, node, cpus)) {
        populate->cpus = cpus;
        populate->only_helpers = !is_bound;
    }
}

cm_status
cm_populate_run(const cm_populate *populate)
{
    cm_thread helpers[MAX_THREADS];
    unsigned count = 0;
    unsigned wanted = choose_thread_count(populate) - (populate->only_helpers ? 0 : 1);
    work w = {.of = populate};
    atomic_init(&w.next, 0);
    atomic_init(&w.has_failed, false);
    while (count < wanted && count < MAX_THREADS
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
cm_host_map_as(uint64_t nbytes, bool is_shared, char **out)
{
    uint64_t whole;
    uint64_t start;
    if (!cm_add_u64(nbytes, CM_HUGE_PAGE_NBYTES, &whole)) {
        return cm_fail(CM_ENOMEM, nbytes);
    }
    int sharing = is_shared ? MAP_SHARED : MAP_PRIVATE;
    char *raw =
        mmap(NULL, whole, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
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
    (void)madvise(*out, nbytes, MADV_HUGEPAGE);
    return cm_ok();
}

void
cm_host_unmap(char *start, uint64_t nbytes)
{
    if (munmap(start, nbytes) != 0) {
        /* Unmapping can split a mapping in two, and the process may have as many
         * mappings as the kernel allows. Give the memory back and keep the
         * addresses. */
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

void
cm_host_omit(void *start, uint64_t nbytes)
{
    (void)madvise(start, nbytes, MADV_DONTFORK);
}

bool
cm_host_reserve(void *start, uint64_t nbytes)
{
    void *at =
        mmap(start, nbytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    /* A kernel before 4.17 treats the address as a hint only. */
    if (at != start && at != MAP_FAILED) {
        (void)munmap(at, nbytes);
    }
    return at == start;
}
