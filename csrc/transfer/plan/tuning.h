/* SPDX-License-Identifier: Apache-2.0 */
/* The thresholds of the engine that may be set, in one plain struct; others are
 * constants of the one file that uses them. Each copy has its own copy of it, taken at
 * the beginning: another may be set at any time. Knows of no engine, no runtime. */
#pragma once

#include <stdint.h>

enum { CM_SLOT_MAX = 32, CM_THREAD_MAX = 16 };
#define CM_TUNING_NEVER (UINT64_C(1) << 40) /* of staged_…_nbytes */

/* X(name, default, least, most). Defaults are those of an H200 with 16 cores. */
/* clang-format off */
#define CM_TUNING(X)                                                                     \
    /* Threads that pack and unpack, the one that runs the copy among them; 0: as many   \
     * as the process may use. */                                                        \
    X(thread_count, 0, 0, CM_THREAD_MAX)                                                 \
    /* The same where pages of the target come into being. */                            \
    X(fresh_thread_count, 0, 0, CM_THREAD_MAX)                                           \
    /* A copy through page-locked blocks goes in pieces of at most chunk_nbytes, of a    \
     * chunk_share-th of it if that is less, so that the first one is on its way early,  \
     * but not of less than chunk_min_nbytes: smaller ones cost more in calls than they  \
     * overlap. */                                                                       \
    X(chunk_nbytes, 8 << 20, 64 << 10, 1 << 30)                                          \
    X(chunk_min_nbytes, 512 << 10, 4 << 10, 1 << 30)                                     \
    X(chunk_share, 8, 1, 64)                                                             \
    /* Up, as long as this and packed by so many threads, a copy goes by ordinary stores \
     * through blocks of so many bytes: from the second time round they are in the       \
     * caches, where the device reads them, and memory is read once and never written.   \
     * Fewer threads are themselves the limit, and stores past the caches cost less. */  \
    X(cached_nbytes, 128 << 20, 0, INT64_C(1) << 40)                                     \
    X(cached_thread_count, 8, 1, CM_THREAD_MAX)                                          \
    X(cached_ring_nbytes, 32 << 20, 1 << 20, 1 << 30)                                    \
    /* Pieces of one copy in flight; bytes of page-locked blocks, of all together. */    \
    X(slot_count, 8, 2, CM_SLOT_MAX)                                                     \
    X(ring_nbytes, 256 << 20, 1 << 20, INT64_C(1) << 40)                                 \
    /* Shorter runs of ordinary memory the runtime copies sooner. */                     \
    X(staged_up_nbytes, 4 << 20, 0, CM_TUNING_NEVER)                                     \
    X(staged_down_nbytes, 1 << 20, 0, CM_TUNING_NEVER)                                   \
    /* Between devices that do not reach each other the runtime goes through the host by \
     * itself, at two thirds of the link; less is not worth a pipeline of ours. */       \
    X(staged_peer_nbytes, 8 << 20, 0, INT64_C(1) << 40)                                  \
    /* Shorter runs are packed before another device reads them. */                      \
    X(pulled_run_nbytes, 128, 1, 1 << 20)                                                \
    /* Longer copies do not notice a job; shorter ones go in a few pieces. */            \
    X(quick_nbytes, 16 << 20, 0, 256 << 20)                                              \
    X(quick_piece_nbytes, 128 << 10, 4 << 10, 256 << 20)                                 \
    /* Up from ordinary memory: what is shorter goes in the runtime's own command. */    \
    X(bounce_nbytes, 64 << 10, 0, 1 << 30)                                               \
    /* Threads beside the caller's that help with those; more get in each other's way.   \
     * Shorter copies are over before a sleeping thread is awake. */                     \
    X(quick_thread_count, 7, 0, CM_THREAD_MAX - 1)                                       \
    X(wake_nbytes, 256 << 10, 0, 1 << 30)                                                \
    /* Shorter rows cost the copy engine more than the kernel. */                        \
    X(row_min_nbytes, 32, 1, 1 << 20)                                                    \
    /* What one thread packs or unpacks at a time. */                                    \
    X(part_min_nbytes, 16 << 10, 1 << 10, 1 << 30)                                       \
    X(part_max_nbytes, 256 << 10, 1 << 10, 1 << 30)                                      \
    /* Files: most bytes of a page-locked chunk, and how many of one transfer are in     \
     * flight; most of one call that reads or writes; from how many on it goes past the  \
     * page cache if they are not in that. */                                            \
    X(file_chunk_nbytes, 8 << 20, 64 << 10, 256 << 20)                                   \
    X(file_slot_count, 16, 2, CM_SLOT_MAX)                                               \
    X(file_part_nbytes, 1 << 20, 4 << 10, 1 << 30)                                       \
    X(direct_nbytes, 64 << 20, 0, INT64_C(1) << 40)                                      \
    /* How long an idle thread looks for work before it sleeps: about what waking one    \
     * takes. */                                                                         \
    X(spin_ns, 50 * 1000, 0, 1000 * 1000)                                                \
    /* Parts are short: a wait for the last ones spins. */                               \
    X(wait_spin_ns, 200 * 1000, 0, 1000 * 1000)
/* clang-format on */

typedef struct cm_tuning {
#define CM_TUNING_FIELD(name, value, least, most) uint64_t name;
    CM_TUNING(CM_TUNING_FIELD)
#undef CM_TUNING_FIELD
} cm_tuning;

enum { CM_TUNING_COUNT = sizeof(cm_tuning) / sizeof(uint64_t) };

/* One value of it, by its place in the list. */
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

void cm_tuning_init(cm_tuning *tuning);
/* The defaults where `cpu_count` threads can run at once: below four of them smaller
 * pieces stay in the caches, and packing is slower than the runtime's own copy. */
void cm_tuning_init_for(cm_tuning *tuning, unsigned cpu_count);

/* What it comes to where `cpu_count` threads can run at once: thread_count is not 0,
 * and nobody spins where that would keep others from working. */
void cm_tuning_resolve(cm_tuning *tuning, unsigned cpu_count);

/* Threads that work on one piece, the one that runs the copy among them. */
uint32_t cm_tuning_piece_threads(const cm_tuning *tuning, uint64_t piece_nbytes);
