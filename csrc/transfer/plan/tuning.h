/* SPDX-License-Identifier: Apache-2.0 */
/* This plain struct has the thresholds of the engine that can be set
 * (cm_engine_set_tuning()). Every other threshold is a constant in the one file that
 * uses it. Each transfer copies the struct when it begins, so the settings may be
 * changed at any time. This file knows neither the engine nor a runtime. */
#pragma once

#include <stdint.h>

enum { CM_SLOT_MAX = 32, CM_THREAD_MAX = 16, CM_LINKS_THREAD_MAX = 20 };
/* This value of staged_up_nbytes or staged_down_nbytes means that no run is long enough
 * to be staged. */
#define CM_TUNING_NEVER (UINT64_C(1) << 40)

/* X(name, default, least, most). The defaults suit an H200 with 16 cores. */
/* clang-format off */
#define CM_TUNING(X)                                                                     \
    /* How many threads pack and unpack, including the thread that runs the copy. 0      \
     * means as many as the process may use, up to 8. */                                 \
    X(thread_count, 0, 0, CM_THREAD_MAX)                                                 \
    /* How many threads work on a copy if the pages of its target do not exist yet or    \
     * its elements are scattered. The speed of memory is not the limit then. 0 means    \
     * thread_count if that is set, and otherwise as many as the process may use. */     \
    X(fresh_thread_count, 0, 0, CM_THREAD_MAX)                                           \
    /* While copies go to or from several devices at once, this many threads work for    \
     * all links together. 0 means thread_count if that is set, and otherwise as many    \
     * as the process may use, up to 20. */                                              \
    X(links_thread_count, 0, 0, CM_LINKS_THREAD_MAX)                                     \
    /* A copy through page-locked blocks goes in pieces. The length of a piece is        \
     * 1 / chunk_share of the copy, so that the link gets the first piece early. But it  \
     * is at most chunk_nbytes, and at least chunk_min_nbytes, since shorter pieces cost \
     * more in calls than they gain by overlapping. */                                   \
    X(chunk_nbytes, 8 << 20, 64 << 10, 1 << 30)                                          \
    X(chunk_min_nbytes, 512 << 10, 4 << 10, 1 << 30)                                     \
    X(chunk_share, 8, 1, 64)                                                             \
    /* If at least cached_thread_count threads pack an upload of at least cached_nbytes, \
     * they use ordinary stores, and the blocks have cached_ring_nbytes together. Once   \
     * each block has been used, the blocks are in the caches, and the device reads them \
     * there. So the copy reads memory once and never writes to it. Fewer threads pack   \
     * more slowly than memory allows, and are faster with stores past the caches. */    \
    X(cached_nbytes, 128 << 20, 0, INT64_C(1) << 40)                                     \
    X(cached_thread_count, 8, 1, CM_THREAD_MAX)                                          \
    X(cached_ring_nbytes, 32 << 20, 1 << 20, 1 << 30)                                    \
    /* At most slot_count pieces of one copy are in flight. The page-locked blocks of    \
     * one copy have at most ring_nbytes, and so have the blocks of all copies together, \
     * except that each copy may always have one block. */                               \
    X(slot_count, 8, 2, CM_SLOT_MAX)                                                     \
    X(ring_nbytes, 256 << 20, 1 << 20, INT64_C(1) << 40)                                 \
    /* If an upload or a download is a run of ordinary memory shorter than this, it is   \
     * left to the runtime, which copies it faster. */                                   \
    X(staged_up_nbytes, 4 << 20, 0, CM_TUNING_NEVER)                                     \
    X(staged_down_nbytes, 1 << 20, 0, CM_TUNING_NEVER)                                   \
    /* If two devices do not reach each other, a copy of the runtime between them goes   \
     * through the host, at two thirds of the link's speed. Copies shorter than this are \
     * left to the runtime, since a pipeline of ours would not make them faster. */      \
    X(staged_peer_nbytes, 8 << 20, 0, INT64_C(1) << 40)                                  \
    /* Shorter runs are packed before another device reads them. */                      \
    X(pulled_run_nbytes, 128, 1, 1 << 20)                                                \
    /* A copy of at most quick_nbytes is made without a job (routes/short_copy.c),       \
     * because in a short copy the cost of a job shows. If the copy goes through a       \
     * page-locked block, it goes in a few pieces of at least quick_piece_nbytes. */     \
    X(quick_nbytes, 16 << 20, 0, 256 << 20)                                              \
    X(quick_piece_nbytes, 128 << 10, 4 << 10, 256 << 20)                                 \
    /* Shorter uploads from ordinary memory are left to the runtime, which is no slower  \
     * than a page-locked block of ours. */                                              \
    X(bounce_nbytes, 64 << 10, 0, 1 << 30)                                               \
    /* How many threads help the caller's thread with a copy that has no job. More       \
     * threads would get in each other's way. A copy of less than wake_nbytes wakes no   \
     * thread, since it is over before a sleeping thread is awake. */                    \
    X(quick_thread_count, 7, 0, CM_THREAD_MAX - 1)                                       \
    X(wake_nbytes, 256 << 10, 0, 1 << 30)                                                \
    /* Shorter rows cost the copy engine more than they cost the kernel. */              \
    X(row_min_nbytes, 32, 1, 1 << 20)                                                    \
    /* How much one thread packs or unpacks at a time. */                                \
    X(part_min_nbytes, 16 << 10, 1 << 10, 1 << 30)                                       \
    X(part_max_nbytes, 256 << 10, 1 << 10, 1 << 30)                                      \
    /* Files. A page-locked chunk has at most file_chunk_nbytes, and at most             \
     * file_slot_count chunks of one transfer are in flight. One call of the system      \
     * reads or writes at most file_part_nbytes. A transfer of direct_nbytes or more     \
     * goes past the page cache, if the page cache does not have its bytes. */           \
    X(file_chunk_nbytes, 8 << 20, 64 << 10, 256 << 20)                                   \
    X(file_slot_count, 16, 2, CM_SLOT_MAX)                                               \
    X(file_part_nbytes, 1 << 20, 4 << 10, 1 << 30)                                       \
    X(direct_nbytes, 64 << 20, 0, INT64_C(1) << 40)                                      \
    /* How long an idle thread looks for work before it sleeps: about as long as it      \
     * takes to wake a thread. */                                                        \
    X(spin_ns, 50 * 1000, 0, 1000 * 1000)                                                \
    /* How long a thread that waits for the last parts spins before it sleeps. It may    \
     * spin for long, because parts are short. */                                        \
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
/* Store the defaults for a process that can run `cpu_count` threads at once. If these
 * are fewer than four threads, pieces are smaller, so that they stay in the caches. If
 * they are fewer than three threads, more runs are left to the runtime, since it would
 * take longer to pack these runs than the runtime takes to copy them. */
void cm_tuning_init_for(cm_tuning *tuning, unsigned cpu_count);

/* Replace each number of threads that is 0, which stands for "as many as there are", by
 * the number that this means if `cpu_count` threads can run at once. Afterwards
 * thread_count is not 0. If `cpu_count` is so small that a spinning thread would keep
 * another one from working, the times for spinning become 0. */
void cm_tuning_resolve(cm_tuning *tuning, unsigned cpu_count);

/* Return how many threads work on one piece, including the thread that runs the
 * copy. */
uint32_t cm_tuning_piece_threads(const cm_tuning *tuning, uint64_t piece_nbytes);
