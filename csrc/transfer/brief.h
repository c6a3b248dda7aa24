/* SPDX-License-Identifier: Apache-2.0 */
/* One copy within the host that is over in microseconds, shared with those threads of
 * the crew that are awake: they take parts without a lock, which would cost them more
 * than a part. Knows nothing of devices: its owner asks for piece after piece.
 * Locks: none. */
#ifndef CM_TRANSFER_BRIEF_H
#define CM_TRANSFER_BRIEF_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { CM_BRIEF_PIECES = 8 };

/* next <= ready <= part_count; left[i] = parts of piece i that are not copied; open > 0
 * only while parts are left to take. The plain fields change only while `open` is 0 and
 * nobody who saw it otherwise is inside. */
typedef struct cm_brief {
    atomic_bool taken;             /* by its owner, from begin to end */
    _Atomic uint32_t open;         /* threads with a lower index may come in */
    _Atomic uint32_t inside_count; /* who has come in, or looks whether it may */
    _Atomic uint32_t next;         /* part to take */
    _Atomic uint32_t ready;        /* parts whose bytes are there */
    _Atomic uint32_t left[CM_BRIEF_PIECES];
    char *dst;
    const char *src;
    uint64_t nbytes;
    uint64_t piece_nbytes;
    uint64_t part_nbytes;
    uint32_t part_count;
    uint32_t piece_parts;
} cm_brief;

/* From now on threads with an index below `thread_limit` may help to copy. Pieces are
 * of `piece_nbytes`, at most CM_BRIEF_PIECES of them. `ready`: their bytes are there;
 * else cm_brief_make_ready says when. False: another has it. */
bool cm_brief_begin(cm_brief *brief, void *dst, const void *src, uint64_t nbytes,
                    uint64_t piece_nbytes, uint32_t thread_limit, bool ready);
/* The bytes of the first `piece_count` pieces are there. */
void cm_brief_make_ready(cm_brief *brief, uint32_t piece_count);
/* Blocks until the piece, which is ready, is copied; copies parts meanwhile. */
void cm_brief_finish_piece(cm_brief *brief, uint32_t piece);
/* Blocks until nobody touches either end; what is not copied by then stays so. */
void cm_brief_end(cm_brief *brief);

/* By a thread of the crew: stay and help while parts are left to take. False: it may
 * not come in. */
bool cm_brief_join(cm_brief *brief, uint32_t thread_index);

static inline bool
cm_brief_is_open(const cm_brief *brief, uint32_t thread_index)
{
    return thread_index < atomic_load(&brief->open);
}

#endif
