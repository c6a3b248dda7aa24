/* SPDX-License-Identifier: Apache-2.0 */
/* Listing every segment and block of a pool at one moment. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/pool_private.h"

static uint64_t
count_spans_locked(const cm_pool *pool)
{
    uint64_t count = 0;
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next) {
        for (const cm_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            count++;
        }
    }
    return count;
}

static cm_block_state
state_of(const cm_span *span)
{
    switch (span->state) {
    case CM_SPAN_LIVE:
        return CM_BLOCK_LIVE;
    case CM_SPAN_FLIGHT:
        return CM_BLOCK_IN_FLIGHT;
    case CM_SPAN_FREE:
    case CM_SPAN_READY:
    case CM_SPAN_BUSY:
        return CM_BLOCK_CACHED;
    case CM_SPAN_GAP:
        break;
    }
    return CM_BLOCK_GAP;
}

/* The end of what was written: free memory in fewer rows than there are spans. */
static cm_block_row *
write_rows_locked(const cm_pool *pool, cm_block_row *rows)
{
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    uint32_t segment = 0;
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next, segment++) {
        for (const cm_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            bool held = s->state == CM_SPAN_LIVE || s->state == CM_SPAN_FLIGHT;
            cm_block_row *row = rows++;
            *row = (cm_block_row){segment, s->block.address, s->block.nbytes,
                                  held ? s->requested_nbytes : 0, state_of(s)};
            if (cm_span_is_free(s)) {
                s = cm_heap_follow_run(s, &view, &row->nbytes);
            }
        }
    }
    return rows;
}

cm_status
cm_pool_list(cm_pool *pool, cm_block_row **out, uint64_t *count)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_fast_lock_take(&pool->lock);
    uint64_t room = count_spans_locked(pool);
    cm_fast_lock_give(&pool->lock);
    for (;;) { /* until the room found still does when the lock is held again */
        cm_block_row *rows = calloc(room + 64, sizeof(*rows));
        if (rows == NULL) {
            return cm_fail(CM_ENOMEM, (room + 64) * sizeof(*rows));
        }
        room += 64;
        cm_fast_lock_take(&pool->lock);
        uint64_t now = count_spans_locked(pool);
        bool enough = now <= room;
        if (enough) {
            *count = (uint64_t)(write_rows_locked(pool, rows) - rows);
        }
        cm_fast_lock_give(&pool->lock);
        if (enough) {
            *out = rows;
            return cm_ok();
        }
        free(rows);
        room = now;
    }
}
