/* SPDX-License-Identifier: Apache-2.0 */
/* One copy within the host that is over in microseconds, shared with those threads of
 * the workers that are awake: they take parts without a lock, which would cost them
 * more than a part. Knows nothing of devices: its owner asks for piece after piece.
 * Locks: none. */
#ifndef CM_TRANSFER_HOST_SHORT_TASK_H
#define CM_TRANSFER_HOST_SHORT_TASK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { CM_SHORT_TASK_PIECES = 8 };

/* The number of the short task and of its next part, in one: a thread late from one
 * takes nothing of the next. */
#define CM_SHORT_TASK_CLOSED UINT32_MAX /* no part: between two of them */

/* Parts below `ready` may be taken; left[i] = parts of piece i that are not copied;
 * open > 0 only while parts are left to take, or in a moment. The plain fields change
 * only while `next` is closed and all parts that were taken are copied: the holder of a
 * part may read them, and nobody else but the owner does. */
typedef struct cm_short_task {
    atomic_bool taken;             /* by its owner, from begin to end */
    _Atomic uint32_t open;         /* threads with a lower index may come in */
    _Atomic uint64_t next;         /* which brief copy << 32 | part to take */
    _Atomic uint32_t ready;        /* parts whose bytes are there */
    _Atomic uint32_t copied_count; /* parts that were taken and are over */
    _Atomic uint32_t left[CM_SHORT_TASK_PIECES];
    char *dst;
    const char *src;
    uint64_t nbytes;
    uint64_t piece_nbytes;
    uint64_t part_nbytes;
    uint32_t part_count;
    uint32_t piece_parts;
    bool packs;
} cm_short_task;

void cm_short_task_init(cm_short_task *short_task);
/* From now on threads with an index below `thread_limit` may help to copy. Pieces are
 * of `piece_nbytes`, at most CM_SHORT_TASK_PIECES of them. `packs`: their bytes are
 * there, and it is a device that reads the target, which is written past the caches:
 * those of others had its lines before. Else cm_short_task_make_ready says when there
 * are bytes. False: another has it. */
bool cm_short_task_begin(cm_short_task *short_task, void *dst, const void *src,
                         uint64_t nbytes, uint64_t piece_nbytes, uint32_t thread_limit,
                         bool packs);
/* The bytes of the first `piece_count` pieces are there. */
void cm_short_task_make_ready(cm_short_task *short_task, uint32_t piece_count);
/* Blocks until the piece, which is ready, is copied; copies parts meanwhile. */
void cm_short_task_finish_piece(cm_short_task *short_task, uint32_t piece);
/* Takes back what nobody has taken, and blocks until what was taken is copied: nobody
 * touches either end then. */
void cm_short_task_end(cm_short_task *short_task);

/* By one of the workers: stay and help while parts are left to take. */
void cm_short_task_join(cm_short_task *short_task, uint32_t thread_index);

static inline bool
cm_short_task_is_open(const cm_short_task *short_task, uint32_t thread_index)
{
    return thread_index < atomic_load(&short_task->open);
}

#endif
