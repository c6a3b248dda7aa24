/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the memory behind chunks of placed memory away and brings it back, while the
 * chunks keep their addresses.
 *
 * sleep.c does this to all chunks of a pool, and spill.c to those inside one block. A
 * chunk loses its memory in two steps: it is unmapped, and then its handle is released.
 * Between the two it can be mapped again with its contents. */
#include "pool/private.h"

cm_chunk *
cm_chunk_from(const cm_pool *pool, cm_address from)
{
    const cm_arena *range = pool->range;
    uint64_t count = range->nbytes / range->granule;
    uint64_t first = from <= range->base ? 0 : (from - range->base) / range->granule;
    for (uint64_t i = first; i < count; i++) {
        if (range->chunk_at[i] != NULL) {
            return range->chunk_at[i];
        }
    }
    return NULL;
}

/* Go through the chunks that begin in [from, to), in order of address. */
#define EACH_CHUNK(pool, chunk, from, to)                                              \
    cm_chunk *chunk = cm_chunk_from(pool, from);                                       \
    chunk != NULL && chunk->address < (to);                                            \
    chunk = cm_chunk_from(pool, cm_chunk_end(chunk))

uint64_t
cm_chunks_count_bare(const cm_pool *pool, cm_address from, cm_address to)
{
    uint64_t nbytes = 0;
    for (EACH_CHUNK(pool, chunk, from, to)) {
        nbytes += cm_chunk_has_memory(chunk) ? 0 : chunk->nbytes;
    }
    return nbytes;
}

cm_status
cm_chunks_unmap(const cm_pool *pool, cm_address from, cm_address to)
{
    cm_source *source = pool->source;
    for (EACH_CHUNK(pool, chunk, from, to)) {
        bool is_inside = cm_chunk_end(chunk) <= to;
        if (is_inside && chunk->handle != 0 && !chunk->is_unmapped) {
            CM_TRY(source->ops->unmap_chunk(source, chunk));
        }
    }
    return cm_ok();
}

bool
cm_chunks_try_map_back(const cm_pool *pool, cm_address from, cm_address to)
{
    cm_source *source = pool->source;
    bool is_back = true;
    for (EACH_CHUNK(pool, chunk, from, to)) {
        if (chunk->is_unmapped) {
            is_back = CM_TRY_TWICE(source->ops->map_chunk(source, chunk)) && is_back;
        }
    }
    return is_back;
}

/* Give one chunk's memory back. Each call is tried twice. */
static cm_status
drop(cm_source *source, cm_chunk *chunk)
{
    if (!chunk->is_unmapped && !cm_is_ok(source->ops->unmap_chunk(source, chunk))) {
        CM_TRY(source->ops->unmap_chunk(source, chunk));
    }
    cm_status status = source->ops->drop_chunk(source, chunk);
    return cm_is_ok(status) ? status : source->ops->drop_chunk(source, chunk);
}

cm_status
cm_chunks_drop(cm_pool *pool, cm_address from, cm_address to)
{
    cm_status first = cm_ok();
    for (EACH_CHUNK(pool, chunk, from, to)) {
        cm_status status = drop(pool->source, chunk);
        first = cm_first_failure(first, status);
        atomic_fetch_add(&pool->lost_count, !cm_is_ok(status));
    }
    return first;
}

cm_status
cm_chunks_map(const cm_pool *pool, cm_address from, cm_address to)
{
    cm_source *source = pool->source;
    for (EACH_CHUNK(pool, chunk, from, to)) {
        if (chunk->is_unmapped) {
            CM_TRY(source->ops->map_chunk(source, chunk));
        }
    }
    return cm_ok();
}
