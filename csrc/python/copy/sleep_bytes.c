/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/sleep_bytes.h"

#include <stdlib.h>

#include "python/pool/handover.h"
#include "runtime/stream.h"

/* -- page-locked memory ----------------------------------------------------------------- */

/* The copies of all saved runs of a pool between the device and page-locked memory. A
 * saved run is a run of bytes of the pool that have to survive its sleep. Runs lie in
 * parts, each of which is one page-locked block (pool.h). They are copied part by part,
 * as sleep_bytes.h explains. */
typedef struct cm_sleep_copy {
    cm_engine *engine;
    cm_pool *pool;
    const cm_wait_hooks *hooks;
    bool to_host;
    cm_stream *stream;        /* held; it does nothing but make these copies */
    const cm_saved_run *runs; /* borrowed from the pool */
    uint64_t run_count;
    cm_ticket *ticket; /* of the part whose copies are under way; NULL if there is
                          none */
    cm_address end;    /* the end of the last run whose copy to the host was begun; 0
                          before the first part */
} cm_sleep_copy;

/* The run with index `first` is the first one of a part. Return the index of the first
 * run that lies in the next part. */
static uint64_t
end_of_part(const cm_sleep_copy *self, uint64_t first)
{
    uint64_t i = first;
    while (i < self->run_count && self->runs[i].part == self->runs[first].part) {
        i++;
    }
    return i;
}

/* Make the piece that copies a run. Runs that follow one another without a gap form a
 * stretch, and `stretch` points to the first run of the stretch that `run` is in. The
 * pointer serves as the owner of the device's memory: the engine takes pieces that have
 * the same owner for pieces of one allocation. If there is a gap between two runs, they
 * must not have the same owner, since there may be no memory in the gap. */
static cm_piece
make_piece(const cm_sleep_copy *self, const cm_saved_run *run,
           const cm_saved_run *stretch)
{
    const cm_block *block = cm_pool_part_block(self->pool, run->part);
    int16_t device = (int16_t)self->stream->device;
    const cm_piece_end far = {.address = run->address,
                              .owner = stretch,
                              .kind = CM_KIND_DEVICE,
                              .device = device};
    const cm_piece_end near = {.host = (char *)block->host + run->at,
                               .address = block->address + run->at,
                               .owner = block,
                               .kind = CM_KIND_PINNED,
                               .device = device};
    return (cm_piece){.dst = self->to_host ? near : far,
                      .src = self->to_host ? far : near,
                      .nbytes = run->nbytes};
}

/* Begin the copies of the runs from `first` up to `end`, in one batch. */
static cm_status
begin_copies(const cm_sleep_copy *self, uint64_t first, uint64_t end, cm_ticket **out)
{
    uint64_t count = end - first;
    cm_piece *pieces = calloc(count, sizeof(*pieces));
    CM_TRY(cm_allocated(pieces != NULL, count * sizeof(*pieces)));
    const cm_saved_run *stretch = &self->runs[first];
    for (uint64_t i = 0; i < count; i++) {
        const cm_saved_run *run = &self->runs[first + i];
        if (i > 0 && run[-1].address + run[-1].nbytes != run->address) {
            stretch = run;
        }
        pieces[i] = make_piece(self, run, stretch);
        pieces[i].index = i;
    }
    cm_status status =
        cm_handover_begin(self->engine, self->stream, pieces, count, self->hooks, out);
    free(pieces);
    return status;
}

/* Wait for the copies of the part that was begun last, if any are under way. */
static cm_status
end_part(cm_sleep_copy *self)
{
    cm_ticket *ticket = self->ticket;
    if (ticket == NULL) {
        return cm_ok();
    }
    self->ticket = NULL;
    return cm_handover_end(self->stream, ticket, self->hooks);
}

/* Begin to copy the part that has the runs from `first` up to `end`. Then wait for the
 * copies of the part before it, and unmap the chunks of that earlier part. In this
 * order the device always has work. */
static cm_status
save_part(cm_sleep_copy *self, uint64_t first, uint64_t end)
{
    cm_ticket *ticket = NULL;
    cm_address copied = self->end;
    CM_TRY(begin_copies(self, first, end, &ticket));
    cm_status status = end_part(self);
    self->ticket = ticket;
    self->end = self->runs[end - 1].address + self->runs[end - 1].nbytes;
    CM_TRY(status);
    return copied == 0 ? status : cm_pool_unmap_until(self->pool, copied);
}

/* Find page-locked memory for a part. If there is none, other pools give back the
 * memory that they have cached, and this function tries once more. */
static cm_status
take_part(const cm_sleep_copy *self, uint32_t part)
{
    cm_status status = cm_pool_take_part(self->pool, part, self->hooks);
    if (cm_pool_is_short(status)) {
        cm_trim_request r = {.kind = CM_KIND_PINNED, .device = -1};
        CM_TRY(cm_pools_trim(self->stream->rt, &r, self->hooks));
        status = cm_pool_take_part(self->pool, part, self->hooks);
    }
    return status;
}

static cm_status
save_parts(cm_sleep_copy *self)
{
    uint64_t end;
    for (uint64_t first = 0; first < self->run_count; first = end) {
        end = end_of_part(self, first);
        CM_TRY(take_part(self, self->runs[first].part));
        CM_TRY(save_part(self, first, end));
    }
    return cm_ok();
}

static cm_status
save_all(cm_sleep_copy *self)
{
    cm_pool_expect_parts(self->pool, true);
    cm_status status = save_parts(self);
    cm_pool_expect_parts(self->pool, false);
    CM_TRY(status);
    return end_part(self);
}

/* Map the memory of the part that has the runs from `first` up to `end`, while the
 * device still fills the part before it. Then begin to fill the part, and wait until
 * the device has filled the part before it. */
static cm_status
restore_part(cm_sleep_copy *self, uint64_t first, uint64_t end)
{
    cm_ticket *ticket = NULL;
    const cm_saved_run *last = &self->runs[end - 1];
    CM_TRY(cm_pool_map_until(self->pool, last->address + last->nbytes));
    CM_TRY(begin_copies(self, first, end, &ticket));
    cm_status status = end_part(self);
    self->ticket = ticket;
    return status;
}

static cm_status
restore_all(cm_sleep_copy *self)
{
    uint64_t end;
    for (uint64_t first = 0; first < self->run_count; first = end) {
        end = end_of_part(self, first);
        CM_TRY(restore_part(self, first, end));
    }
    CM_TRY(cm_pool_map_until(self->pool, UINT64_MAX));
    return end_part(self);
}

/* Copy all saved runs, and return when nothing is under way any more. */
static cm_status
copy_all(cm_engine *engine, cm_runtime *rt, cm_pool *pool, bool to_host,
         const cm_wait_hooks *hooks)
{
    cm_sleep_copy self = {
        .engine = engine, .pool = pool, .hooks = hooks, .to_host = to_host};
    self.runs = cm_pool_saved_runs(pool, &self.run_count);
    if (self.run_count == 0) {
        return to_host ? cm_ok() : restore_all(&self);
    }
    CM_TRY(cm_stream_create(rt, cm_pool_get_config(pool)->device,
                            CM_STREAM_NON_BLOCKING, 0, &self.stream));
    cm_status status = to_host ? save_all(&self) : restore_all(&self);
    if (self.ticket != NULL) { /* a failure has left copies under way */
        static const cm_wait_hooks nobody = {.interrupted = NULL};
        cm_ignore(cm_handover_end(self.stream, self.ticket, &nobody));
    }
    cm_stream_release(self.stream);
    return status;
}

cm_status
cm_sleep_save(cm_state *state, cm_engine *engine, cm_pool *pool,
              const cm_wait_hooks *hooks)
{
    return copy_all(engine, state->runtime, pool, true, hooks);
}

cm_status
cm_sleep_restore(cm_state *state, cm_engine *engine, cm_pool *pool,
                 const cm_wait_hooks *hooks)
{
    return copy_all(engine, state->runtime, pool, false, hooks);
}

/* -- files -------------------------------------------------------------------------------- */

/* Make the file range of each saved run. Part p of the saved bytes lies in file
 * p % file_count, behind the earlier parts of that file. In the array the ranges of one
 * file follow one another. Returns the array, which the caller frees, or NULL if there
 * is no memory. */
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

/* Write all ranges to the files, or read them. The device's copies are made on
 * `stream`. */
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
        cm_handover_wait(stream);
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
