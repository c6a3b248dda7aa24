/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/sleep_bytes.h"

#include <stdlib.h>

#include "runtime/scope.h"
#include "runtime/stream.h"
#include "transfer/batch/batch.h"

/* -- page-locked memory ----------------------------------------------------------------- */

/* Make a piece of each saved run, which goes to the host or comes back. Returns an
 * array that the caller frees, or NULL if there is no memory. */
static cm_piece *
make_pieces(const cm_pool *pool, bool to_host, uint64_t *count)
{
    const cm_saved_run *runs = cm_pool_saved_runs(pool, count);
    cm_piece *pieces = calloc(*count + 1, sizeof(*pieces));
    int16_t device = (int16_t)cm_pool_get_config(pool)->device;
    for (uint64_t i = 0; pieces != NULL && i < *count; i++) {
        const cm_saved_run *run = &runs[i];
        const cm_block *block = cm_pool_part_block(pool, run->part);
        const cm_piece_end far = {.address = run->address,
                                  .owner = pool,
                                  .kind = CM_KIND_DEVICE,
                                  .device = device};
        const cm_piece_end near = {.host = (char *)block->host + run->at,
                                   .address = block->address + run->at,
                                   .owner = block,
                                   .kind = CM_KIND_PINNED,
                                   .device = device};
        pieces[i] = (cm_piece){.dst = to_host ? near : far,
                               .src = to_host ? far : near,
                               .nbytes = run->nbytes,
                               .index = i};
    }
    return pieces;
}

/* Copy all saved runs in one batch. */
static cm_status
copy_runs(cm_engine *engine, const cm_pool *pool, bool to_host,
          const cm_wait_hooks *hooks)
{
    uint64_t count;
    cm_piece *pieces = make_pieces(pool, to_host, &count);
    CM_TRY(cm_allocated(pieces != NULL, (count + 1) * sizeof(*pieces)));
    const cm_many_request request = {
        .common = {.blocking = true,
                   .interrupted = hooks->interrupted,
                   .interrupted_argument = hooks->argument},
        .pieces = pieces,
        .piece_count = count,
        .is_apart = true,
    };
    cm_ticket *ticket = NULL;
    cm_status status = cm_ok();
    if (count > 0) {
        status = cm_engine_copy_many(engine, &request, &ticket);
    }
    if (ticket != NULL) {
        /* What the device has begun must end before the memory changes hands. */
        cm_ignore(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_release(ticket);
    }
    free(pieces);
    return status;
}

cm_status
cm_sleep_save(cm_engine *engine, cm_pool *pool, const cm_wait_hooks *hooks)
{
    uint64_t count;
    const cm_saved_run *runs = cm_pool_saved_runs(pool, &count);
    for (uint64_t i = 0; i < count; i++) {
        CM_TRY(cm_pool_take_part(pool, runs[i].part, hooks));
    }
    return copy_runs(engine, pool, true, hooks);
}

cm_status
cm_sleep_restore(cm_engine *engine, cm_pool *pool, const cm_wait_hooks *hooks)
{
    return copy_runs(engine, pool, false, hooks);
}

/* -- files -------------------------------------------------------------------------------- */

/* Make a range of each saved run, those of a file one after the other. Returns an array
 * that the caller frees, or NULL if there is no memory. */
static cm_file_range *
make_ranges(const cm_pool *pool, uint32_t file_count, uint64_t *count)
{
    const cm_saved_run *runs = cm_pool_saved_runs(pool, count);
    cm_file_range *ranges = calloc(*count + 1, sizeof(*ranges));
    uint64_t made = 0;
    for (uint32_t file = 0; ranges != NULL && file < file_count; file++) {
        for (uint64_t i = 0; i < *count; i++) {
            const cm_saved_run *run = &runs[i];
            if (run->part % file_count != file) {
                continue;
            }
            uint64_t begin = run->part / file_count * CM_SAVED_PART_NBYTES;
            ranges[made++] =
                (cm_file_range){.file = file,
                                .offset = begin + run->at,
                                .nbytes = run->nbytes,
                                .address = run->address,
                                .kind = CM_KIND_DEVICE,
                                .device = cm_pool_get_config(pool)->device};
        }
    }
    return ranges;
}

/* Move all ranges by way of `stream`. */
static cm_status
transfer_ranges(cm_state *state, cm_engine *engine, const cm_file_range *ranges,
                uint64_t count, cm_sleep_files *files, bool writes, cm_stream *stream,
                const cm_wait_hooks *hooks)
{
    cm_file_request request = {
        .file_count = files->count,
        .writes = writes,
        .direct = CM_FILE_DIRECT_AUTO,
        .ranges = ranges,
        .range_count = count,
        .copy = {.blocking = true,
                 .interrupted = hooks->interrupted,
                 .interrupted_argument = hooks->argument},
        .faults = &state->file_faults,
    };
    request.streams[stream->device] = stream;
    for (uint32_t i = 0; i < files->count; i++) {
        request.fds[i] = files->fds[i];
    }
    cm_status status = cm_engine_transfer_file(engine, &request, &files->failure);
    if (!cm_is_ok(status)) {
        /* What the device has begun must end before the memory changes hands. */
        cm_ignore(
            CM_ON_DEVICE(state->runtime, stream->device,
                         cm_rt_stream_synchronize(state->runtime, stream->handle)));
    }
    return status;
}

cm_status
cm_sleep_transfer_files(cm_state *state, cm_engine *engine, cm_pool *pool,
                        cm_sleep_files *files, bool writes, const cm_wait_hooks *hooks)
{
    uint64_t count;
    cm_file_range *ranges = make_ranges(pool, files->count, &count);
    CM_TRY(cm_allocated(ranges != NULL, (count + 1) * sizeof(*ranges)));
    cm_stream *stream = NULL;
    cm_status status = cm_ok();
    if (count > 0) {
        status = cm_stream_create(state->runtime, cm_pool_get_config(pool)->device,
                                  CM_STREAM_NON_BLOCKING, 0, &stream);
    }
    if (stream != NULL) {
        status =
            transfer_ranges(state, engine, ranges, count, files, writes, stream, hooks);
        cm_stream_release(stream);
    }
    free(ranges);
    return status;
}
