/* SPDX-License-Identifier: Apache-2.0 */
/* The thresholds of the engine that can be set, in one plain struct. Other thresholds
 * are constants of the one file that uses them. Each copy takes a copy of the struct
 * when it begins, so the settings may be changed at any time. This file knows neither
 * the engine nor a runtime. */
#pragma once

#include <stdint.h>

enum { CM_SLOT_MAX = 32, CM_THREAD_MAX = 16, CM_LINKS_THREAD_MAX = 20 };
/* This value of staged_up_nbytes or staged_down_nbytes means that no run is long enough
 * to be staged. */
#define CM_TUNING_NEVER (UINT64_C(1) << 40)

/* X(name, default, least, most). The defaults suit an H200 with 16 cores. */
/* clang-format off */
#define CM_TUNING(X)                                                                     \
    /* How many threads pack and unpack, the one that runs the copy included; 0 for as   \
     * many as the process may use, up to 8. */                                          \
    X(thread_count, 0, 0, CM_THREAD_MAX)                                                 \
    /* How many threads work on a copy whose speed memory does not limit, because the    \
     * pages of the target do not exist yet or its elements are scattered. 0 means       \
     * thread_count if that is set, and otherwise as many as the process may use. */     \
    X(fresh_thread_count, 0, 0, CM_THREAD_MAX)                                           \
    /* How many threads work while copies go to or from several devices at once, all     \
     * links together. 0 means thread_count if that is set, and otherwise as many as the \
     * process may use, up to 20. */                                                     \
    X(links_thread_count, 0, 0, CM_LINKS_THREAD_MAX)                                     \
    /* A copy through page-locked blocks goes in pieces. Each is 1 / chunk_share of the  \
     * copy, so that the first is on its way early, but at most chunk_nbytes and at      \
     * least chunk_min_nbytes, since smaller pieces cost more in calls than they gain    \
     * by overlapping. */                                                                \
    X(chunk_nbytes, 8 << 20, 64 << 10, 1 << 30)                                          \
    X(chunk_min_nbytes, 512 << 10, 4 << 10, 1 << 30)                                     \
    X(chunk_share, 8, 1, 64)                                                             \
    /* An upload of at least cached_nbytes, packed by at least cached_thread_count       \
     * threads, uses ordinary stores and blocks of cached_ring_nbytes together. From     \
     * the second round on the blocks are in the caches, where the device reads them,    \
     * so memory is read once and never written. With fewer threads it is not memory     \
     * that limits the packing, and stores past the caches cost them less. */            \
    X(cached_nbytes, 128 << 20, 0, INT64_C(1) << 40)                                     \
    X(cached_thread_count, 8, 1, CM_THREAD_MAX)                                          \
    X(cached_ring_nbytes, 32 << 20, 1 << 20, 1 << 30)                                    \
    /* slot_count is the most pieces of one copy that are in flight; ring_nbytes         \
     * limits the page-locked blocks of one copy, and of all copies together. */         \
    X(slot_count, 8, 2, CM_SLOT_MAX)                                                     \
    X(ring_nbytes, 256 << 20, 1 << 20, INT64_C(1) << 40)                                 \
    /* Shorter runs of ordinary memory are left to the runtime, which copies them        \
     * faster. */                                                                        \
    X(staged_up_nbytes, 4 << 20, 0, CM_TUNING_NEVER)                                     \
    X(staged_down_nbytes, 1 << 20, 0, CM_TUNING_NEVER)                                   \
    /* Between devices that do not reach each other the runtime goes through the host    \
     * by itself, at two thirds of the link's speed. Shorter copies are left to it,      \
     * since a pipeline of ours would gain nothing. */                                   \
    X(staged_peer_nbytes, 8 << 20, 0, INT64_C(1) << 40)                                  \
    /* Shorter runs are packed before another device reads them. */                      \
    X(pulled_run_nbytes, 128, 1, 1 << 20)                                                \
    /* Up to quick_nbytes a copy is made without a job, the cost of which shows only     \
     * in short copies (routes/short_copy.c). Through a page-locked block it goes in a   \
     * few pieces of at least quick_piece_nbytes. */                                     \
    X(quick_nbytes, 16 << 20, 0, 256 << 20)                                              \
    X(quick_piece_nbytes, 128 << 10, 4 << 10, 256 << 20)                                 \
    /* Shorter uploads from ordinary memory are left to the runtime, which is no slower  \
     * than a page-locked block of ours. */                                              \
    X(bounce_nbytes, 64 << 10, 0, 1 << 30)                                               \
    /* How many threads besides the caller's help with a copy without a job; more get    \
     * in each other's way. A copy of less than wake_nbytes wakes none, since it is      \
     * over before a sleeping thread is awake. */                                        \
    X(quick_thread_count, 7, 0, CM_THREAD_MAX - 1)                                       \
    X(wake_nbytes, 256 << 10, 0, 1 << 30)                                                \
    /* Shorter rows cost the copy engine more than they cost the kernel. */              \
    X(row_min_nbytes, 32, 1, 1 << 20)                                                    \
    /* How much one thread packs or unpacks at a time. */                                \
    X(part_min_nbytes, 16 << 10, 1 << 10, 1 << 30)                                       \
    X(part_max_nbytes, 256 << 10, 1 << 10, 1 << 30)                                      \
    /* Files. A page-locked chunk has at most file_chunk_nbytes, and at most             \
     * file_slot_count chunks of one transfer are in flight. One call reads or writes at \
     * most file_part_nbytes. A transfer of direct_nbytes or more goes past the page     \
     * cache, if its pages are not in it. */                                             \
    X(file_chunk_nbytes, 8 << 20, 64 << 10, 256 << 20)                                   \
    X(file_slot_count, 16, 2, CM_SLOT_MAX)                                               \
    X(file_part_nbytes, 1 << 20, 4 << 10, 1 << 30)                                       \
    X(direct_nbytes, 64 << 20, 0, INT64_C(1) << 40)                                      \
    /* How long an idle thread looks for work before it sleeps: about as long as it      \
     * takes to wake a thread. */                                                        \
    X(spin_ns, 50 * 1000, 0, 1000 * 1000)                                                \
    /* How long a thread that waits for the last parts spins before it sleeps: parts     \
     * are short. */                                                                     \
    X(wait_spin_ns, 200 * 1000, 0, 1000 * 1000)
/* clang-format on */

typedef struct cm_tuning {
#define CM_TUNING_FIELD(name, value, least, most) uint64_t name;
    CM_TUNING(CM_TUNING_FIELD)
#undef CM_TUNING_FIELD
} cm_tuning;

enum { CM_TUNING_COUNT = sizeof(cm_tuning) / sizeof(uint64_t) };

/* One row of CM_TUNING. cm_tuning_rows has them in the order of the list. */
typedef struct cm_tuning_row {
    const char *name;
    uint64_t value; /* the default */
    uint64_t least;
    uint64_t most;
} cm_tuning_row;

extern const cm_tuning_row cm_tuning_rows[CM_TUNING_COUNT];

static inline uint64_t *
cm_tuning_at(cm_tuning *tuning, int index)
{
    return (uint64_t *)tuning + index;
}

/* Store the default of each row. */
void cm_tuning_init(cm_tuning *tuning);
/* Store the defaults for a process of which `cpu_count` threads can run at once. If
 * those are fewer than four, pieces are smaller, since they then stay in the caches. If
 * they are fewer than three, more runs are left to the runtime, since packing them
 * would be slower than its own copy. */
void cm_tuning_init_for(cm_tuning *tuning, unsigned cpu_count);

/* Replace values that stand for "as many as there are" by numbers, where `cpu_count`
 * threads can run at once. Afterwards thread_count is not 0, and nobody spins where
 * that would keep other threads from working. */
void cm_tuning_resolve(cm_tuning *tuning, unsigned cpu_count);

/* Return how many threads work on one piece, the one that runs the copy included. */
uint32_t cm_tuning_piece_threads(const cm_tuning *tuning, uint64_t piece_nbytes);
