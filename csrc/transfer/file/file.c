/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/file/file.h"

#include <stdlib.h>

#include "transfer/file/job.h"
#include "transfer/host/backoff.h"
#include "transfer/host/host_copy.h"

static cm_file_chunk *
chunk_at(cm_file_job *job, uint64_t index)
{
    return &job->chunks[index % job->tuning.file_slot_count];
}

/* -- memory: of the engine's ring, kept to the end ---------------------------------- */

/* Room for a chunk that begins anywhere in a page, itself at a page's beginning. */
static uint64_t
memory_nbytes(const cm_file_job *job)
{
    return job->tuning.file_chunk_nbytes + 2 * (uint64_t)CM_FILE_PAGE_NBYTES;
}

/* One more, if it is to be had or the first: then of ordinary memory, where there is no
 * other at all. */
static cm_status
add_memory(cm_file_job *job, cm_file_chunk *chunk)
{
    bool first = job->memory_count == 0;
    uint64_t most = first ? UINT64_MAX : job->tuning.ring_nbytes;
    cm_wait_hooks hooks = {.interrupted = job->request->interrupted,
                           .argument = job->request->interrupted_argument};
    cm_status status = cm_cache_take_pinned(job->engine, memory_nbytes(job), most,
                                            &hooks, &chunk->pinned);
    bool is_short = cm_pool_is_short(status) || status.code == CM_EINVALID;
    if (!cm_is_ok(status)) {
        job->memory_is_full = true;
        if (!is_short || !first) {
            return is_short ? cm_ok() : status;
        }
        chunk->plain = malloc((size_t)memory_nbytes(job));
        if (chunk->plain == NULL) {
            return cm_fail(CM_ENOMEM, memory_nbytes(job));
        }
    }
    chunk->memory =
        cm_file_align(chunk->pinned != NULL ? chunk->pinned->host : chunk->plain);
    job->memory_count++;
    return cm_ok();
}

/* The memory of another chunk, through which nothing goes now. */
static void
take_over_memory(cm_file_job *job, cm_file_chunk *chunk)
{
    uint64_t count = job->tuning.file_slot_count;
    for (uint64_t i = job->begun + 1; i < job->ended + count; i++) {
        cm_file_chunk *other = chunk_at(job, i);
        if (other->memory != NULL) {
            chunk->memory = other->memory;
            chunk->pinned = other->pinned;
            chunk->plain = other->plain;
            other->memory = NULL;
            other->pinned = NULL;
            other->plain = NULL;
            return;
        }
    }
}

/* Memory for the chunk that is begun next; *out false: none now. Fails: CM_ENOMEM, the
 * pinned pool where it is not short. */
static cm_status
take_memory(cm_file_job *job, cm_file_chunk *chunk, bool *out)
{
    if (chunk->memory == NULL && !job->memory_is_full) {
        CM_TRY(add_memory(job, chunk));
    }
    if (chunk->memory == NULL) {
        take_over_memory(job, chunk);
    }
    *out = chunk->memory != NULL;
    return cm_ok();
}

static void
free_memory(cm_file_job *job)
{
    cm_engine *engine = job->engine;
    cm_stream *uses[CM_MAX_DEVICES];
    uint32_t use_count = 0;
    for (int device = 0; device < CM_MAX_DEVICES && job->in_flight; device++) {
        if (job->has_queued[device]) {
            uses[use_count++] = job->streams[device];
        }
    }
    unsigned flags = job->lost_track ? CM_POOL_FREE_FENCE : 0u;
    for (int i = 0; i < CM_SLOT_MAX; i++) {
        cm_file_chunk *chunk = &job->chunks[i];
        if (chunk->pinned != NULL) {
            cm_pool_free(engine->pinned_pool, chunk->pinned, uses, use_count, flags);
            cm_cache_leave_ring(job->engine, memory_nbytes(job));
        }
        free(chunk->plain); /* the runtime is through with ordinary memory on return */
        cm_cache_give_event(engine, chunk->event_device, chunk->event);
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (job->device_blocks[device] != NULL) {
            cm_pool_free(engine->device_pools[device], job->device_blocks[device], uses,
                         use_count, flags);
        }
    }
}

/* -- the device --------------------------------------------------------------------- */

/* Asks now and then whether to go on. Fails: CM_ECANCELLED. */
static cm_status
ask(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    uint64_t now_ns = cm_now_ns();
    if (request->interrupted == NULL || now_ns - job->asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool interrupted = request->interrupted(request->interrupted_argument);
    job->asked_ns = cm_now_ns();
    return interrupted ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

static cm_status
poll_event(cm_file_job *job, uint64_t event)
{
    uint64_t begin_ns = cm_now_ns();
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(job->engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        CM_TRY(ask(job));
        uint64_t now_ns = cm_now_ns();
        cm_pause_until(now_ns + cm_backoff_ns(now_ns - begin_ns));
    }
}

/* Fails: event_query, CM_ECANCELLED. */
static cm_status
wait_event(cm_file_job *job, int device, uint64_t event)
{
    cm_status status;
    CM_ON_DEVICE(status, job->engine->rt, device, poll_event(job, event));
    return status;
}

static cm_status
get_event(cm_file_chunk *chunk)
{
    cm_engine *engine = chunk->job->engine;
    if (chunk->event != 0 && chunk->event_device != chunk->device) {
        cm_cache_give_event(engine, chunk->event_device, chunk->event);
        chunk->event = 0;
    }
    if (chunk->event != 0) {
        return cm_ok();
    }
    chunk->event_device = chunk->device;
    return cm_cache_take_event(engine, chunk->device, &chunk->event);
}

/* All that the stream was given so far is over. With ordinary memory the runtime's call
 * would wait for that, and could not be ended. */
static cm_status
drain(cm_file_chunk *chunk)
{
    cm_file_job *job = chunk->job;
    CM_TRY(cm_rt_event_record(job->engine->rt, chunk->event,
                              job->streams[chunk->device]->handle));
    return wait_event(job, chunk->device, chunk->event);
}

static cm_status
get_device_block(cm_file_job *job, int device, cm_address *out)
{
    if (job->device_blocks[device] == NULL) {
        cm_mutex_lock(&job->engine->lock);
        cm_pool *pool = job->engine->device_pools[device];
        cm_mutex_unlock(&job->engine->lock);
        if (pool == NULL) {
            return cm_fail(CM_EINVALID, (uint64_t)device);
        }
        uint64_t nbytes = job->tuning.file_chunk_nbytes;
        cm_stream *stream = job->streams[device];
        cm_status status =
            cm_pool_alloc(pool, nbytes, stream, &job->device_blocks[device]);
        if (job->request->interrupted != NULL) {
            status = cm_engine_relieve(job->engine, pool, nbytes, stream, status,
                                       &job->device_blocks[device]);
        }
        CM_TRY(status);
    }
    *out = job->device_blocks[device]->address;
    return cm_ok();
}

/* By way of a block on the device, unless it is one run there as well. */
static cm_status
copy_strided(const cm_file_chunk *chunk, bool sends)
{
    cm_file_job *job = chunk->job;
    cm_runtime *rt = job->engine->rt;
    uint64_t stream = job->streams[chunk->device]->handle;
    const cm_layout *layout = &chunk->layout;
    const cm_file_piece *piece = &chunk->pieces[0];
    cm_address there = chunk->address;
    cm_address here = (uintptr_t)chunk->memory + piece->at;
    cm_address block;
    CM_TRY(get_device_block(job, chunk->device, &block));
    if (sends) {
        CM_TRY(cm_rt_copy_async(rt, block, here, piece->nbytes, stream));
        return cm_kernels_launch(&job->engine->kernels, chunk->device, layout, there,
                                 block, stream);
    }
    CM_TRY(cm_kernels_launch(&job->engine->kernels, chunk->device, layout, block, there,
                             stream));
    return cm_rt_copy_async(rt, here, block, piece->nbytes, stream);
}

static cm_status
copy_runs(const cm_file_chunk *chunk, bool sends)
{
    cm_file_job *job = chunk->job;
    cm_address memory = (uintptr_t)chunk->memory;
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        cm_address here = memory + piece->at;
        CM_TRY(cm_rt_copy_async(job->engine->rt, sends ? piece->address : here,
                                sends ? here : piece->address, piece->nbytes,
                                job->streams[chunk->device]->handle));
    }
    return cm_ok();
}

/* Queue the device's half of a chunk and record its event. The device is current. */
static cm_status
copy_on_device(cm_file_chunk *chunk, bool sends)
{
    cm_file_job *job = chunk->job;
    CM_TRY(get_event(chunk));
    if (chunk->pinned == NULL) {
        CM_TRY(drain(chunk));
    }
    job->has_queued[chunk->device] = true;
    CM_TRY(chunk->is_strided ? copy_strided(chunk, sends) : copy_runs(chunk, sends));
    return cm_rt_event_record(job->engine->rt, chunk->event,
                              job->streams[chunk->device]->handle);
}

/* -- streams, and what comes first -------------------------------------------------- */

static cm_status
open_stream(cm_file_job *job, int device)
{
    if (device < 0 || device >= CM_MAX_DEVICES) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)device);
    }
    if (job->streams[device] != NULL) {
        return cm_ok();
    }
    cm_stream *given = job->request->streams[device];
    if (given == NULL) {
        CM_TRY(cm_cache_take_stream(job->engine, device, &job->lent[device]));
        given = job->lent[device];
    }
    job->streams[device] = cm_stream_hold(given);
    return cm_stream_check_not_capturing(given);
}

static cm_status
open_streams(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    for (uint64_t i = 0; i < request->range_count; i++) {
        const cm_file_range *range = &request->ranges[i];
        bool on_host = cm_file_range_device(range) < 0 && range->host != NULL;
        if (range->nbytes > 0 && !on_host) {
            CM_TRY(open_stream(job, range->device));
        }
        job->has_host_end = job->has_host_end || (range->nbytes > 0 && on_host);
    }
    return cm_ok();
}

static cm_status
wait_for_ticket(cm_file_job *job, cm_ticket *ticket)
{
    for (;;) {
        cm_status status = cm_ticket_depend(ticket, NULL, CM_ASK_NS);
        if (status.code != CM_ETIMEOUT) {
            return status;
        }
        CM_TRY(ask(job));
    }
}

/* Our streams come after it, and the host where that touches the memory. */
static cm_status
come_after(cm_file_job *job, const cm_stream *stream, uint64_t event)
{
    CM_TRY(cm_stream_record(stream, event));
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (job->streams[device] != NULL && job->streams[device] != stream) {
            job->has_queued[device] = true;
            CM_TRY(cm_stream_wait_event(job->streams[device], event));
        }
    }
    return job->has_host_end ? wait_event(job, stream->device, event) : cm_ok();
}

static cm_status
begin_order(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    CM_TRY(open_streams(job));
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        CM_TRY(wait_for_ticket(job, request->after_tickets[i]));
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *stream = request->after[i];
        uint64_t event;
        CM_TRY(cm_cache_take_event(job->engine, stream->device, &event));
        cm_status status = come_after(job, stream, event);
        cm_cache_give_event(job->engine, stream->device, event);
        CM_TRY(status);
    }
    return cm_ok();
}

/* -- what is left at the end -------------------------------------------------------- */

/* The keeps, for the tickets of several devices. */
typedef struct shared_keep {
    atomic_uint refs;
    cm_file_request request; /* of which only they are used */
} shared_keep;

static void
drop_keeps(const cm_file_request *request)
{
    for (uint32_t i = 0; i < request->keep_count; i++) {
        request->keep[i].drop(request->keep[i].object);
    }
}

static void
drop_shared(void *object)
{
    shared_keep *shared = object;
    if (atomic_fetch_sub(&shared->refs, 1) == 1) {
        drop_keeps(&shared->request);
        free(shared);
    }
}

/* What the stream was given keeps its ends until it is done. False: it could not be
 * arranged. */
static bool
leave_to_ticket(cm_file_job *job, int device, shared_keep *shared, cm_status status)
{
    cm_engine *engine = job->engine;
    cm_copy_request request = {.keep = {{shared, drop_shared}}, .keep_count = 1};
    uint64_t event;
    if (!cm_is_ok(cm_cache_take_event(engine, device, &event))) {
        return false;
    }
    cm_ticket *ticket = NULL;
    if (cm_is_ok(cm_stream_record(job->streams[device], event))) {
        ticket = cm_ticket_create(engine, &request);
    }
    if (ticket == NULL) {
        cm_cache_give_event(engine, device, event);
        return false;
    }
    atomic_fetch_add(&shared->refs, 1);
    cm_ticket_submit(ticket, device, 0, event, job->lent[device], NULL, status);
    job->lent[device] = NULL;
    job->in_flight = true;
    cm_status untold = cm_ticket_abandon(ticket);
    (void)untold; /* nothing: the call tells */
    return true;
}

static void
wait_for_stream(cm_file_job *job, int device)
{
    cm_runtime *rt = job->engine->rt;
    cm_status status;
    CM_ON_DEVICE(status, rt, device,
                 cm_rt_stream_synchronize(rt, job->streams[device]->handle));
    if (!cm_is_ok(status)) {
        job->lost_track = true;
        job->in_flight = true;
    }
}

/* A stream that the user gave other work may keep an interrupted call for long. */
static shared_keep *
share_keep(const cm_file_job *job, cm_status status)
{
    if (status.code != CM_ECANCELLED
        || !cm_is_ok(cm_engine_need_watcher(job->engine))) {
        return NULL;
    }
    shared_keep *shared = malloc(sizeof(*shared));
    if (shared != NULL) {
        atomic_init(&shared->refs, 1);
        shared->request = *job->request;
    }
    return shared;
}

/* Nothing of a failed transfer is in flight, or behind a ticket. Drops the keeps,
 * unless that has them. */
static void
end_order(cm_file_job *job, cm_status status)
{
    cm_engine *engine = job->engine;
    shared_keep *shared = share_keep(job, status);
    for (int device = 0; device < CM_MAX_DEVICES && !cm_is_ok(status); device++) {
        if (job->has_queued[device]
            && (shared == NULL || !leave_to_ticket(job, device, shared, status))) {
            wait_for_stream(job, device);
        }
    }
    if (shared != NULL) {
        drop_shared(shared);
    }
    else {
        drop_keeps(job->request);
    }
    free_memory(job);
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_cache_give_stream(engine, job->lent[device]);
        if (job->streams[device] != NULL) {
            cm_stream_release(job->streams[device]);
        }
    }
}

/* -- the chunks, in turn ------------------------------------------------------------ */

/* The half that is not the file's; memory of the host has none. */
static cm_status
begin_other_half(cm_file_chunk *chunk)
{
    const cm_file_job *job = chunk->job;
    cm_status status = cm_ok();
    if (chunk->device >= 0) {
        CM_ON_DEVICE(status, job->engine->rt, chunk->device,
                     copy_on_device(chunk, !job->request->writes));
    }
    return status;
}

static cm_status
look(const cm_file_chunk *chunk, bool at_file, bool *out)
{
    cm_status status = cm_ok();
    *out = !at_file || cm_copy_task_is_done(&chunk->task);
    if (!at_file && chunk->device >= 0) {
        CM_ON_DEVICE(status, chunk->job->engine->rt, chunk->device,
                     cm_rt_event_query(chunk->job->engine->rt, chunk->event, out));
    }
    return status;
}

static cm_status
wait_for(cm_file_chunk *chunk, bool at_file)
{
    cm_file_job *job = chunk->job;
    if (!at_file && chunk->device >= 0) {
        return wait_event(job, chunk->device, chunk->event);
    }
    cm_task_group_wait(&job->group, &chunk->task);
    return cm_ok();
}

static void
tell_moved(const cm_file_job *job, const cm_file_chunk *chunk)
{
    uint64_t *moved = job->request->moved;
    for (uint32_t i = 0; moved != NULL && i < chunk->piece_count; i++) {
        *moved += chunk->pieces[i].nbytes;
    }
}

/* Take over what is ready; *out: something was. */
static cm_status
advance(cm_file_job *job, bool *out)
{
    bool reads = !job->request->writes;
    bool over = true;
    while (job->ended < job->passed && over) {
        cm_file_chunk *chunk = chunk_at(job, job->ended);
        CM_TRY(look(chunk, !reads, &over));
        if (over) {
            tell_moved(job, chunk);
            job->ended++;
            *out = true;
        }
    }
    over = true;
    while (job->passed < job->begun && over) {
        cm_file_chunk *chunk = chunk_at(job, job->passed);
        CM_TRY(look(chunk, reads, &over));
        if (over && reads) {
            CM_TRY(begin_other_half(chunk));
        }
        else if (over) {
            cm_file_post(chunk);
        }
        job->passed += over;
        *out = *out || over;
    }
    return cm_ok();
}

/* Before the host itself copies from or to it. */
static cm_status
look_at_host(const cm_file_chunk *chunk)
{
    bool writes = chunk->job->request->writes;
    cm_layout run = {.run_nbytes = chunk->nbytes - chunk->pieces[0].at};
    char *host = chunk->is_strided ? chunk->host : chunk->pieces[0].host;
    return cm_host_look(chunk->is_strided ? &chunk->layout : &run, writes ? NULL : host,
                        writes ? host : NULL, CM_LOOK_NBYTES);
}

/* One more chunk, if there is one and room for it. It is cut once and waits for memory
 * if need be. */
static cm_status
begin_chunk(cm_file_job *job, bool *out)
{
    if (job->begun - job->ended == job->tuning.file_slot_count) {
        return cm_ok();
    }
    cm_file_chunk *chunk = chunk_at(job, job->begun);
    if (!job->has_cut) {
        CM_TRY(cm_file_cut_next(job, chunk, &job->has_cut));
    }
    if (!job->has_cut) {
        return cm_ok();
    }
    bool ready = true;
    bool writes = job->request->writes;
    if (chunk->device >= 0) {
        CM_TRY(take_memory(job, chunk, &ready));
    }
    if (!ready) {
        return cm_ok();
    }
    if (chunk->device < 0 && (chunk->is_strided || chunk->bounces)) {
        CM_TRY(look_at_host(chunk));
    }
    if (writes) {
        CM_TRY(begin_other_half(chunk));
    }
    else {
        cm_file_post(chunk);
    }
    job->has_cut = false;
    job->begun++;
    *out = true;
    return cm_ok();
}

/* There is nothing to do but to wait, for the workers rather than for the device. */
static cm_status
wait_for_something(cm_file_job *job)
{
    bool reads = !job->request->writes;
    uint64_t at_file = reads ? job->passed : job->ended;
    uint64_t end = reads ? job->begun : job->passed;
    if (cm_task_group_help(&job->group)) {
        return cm_ok();
    }
    if (at_file < end) {
        return wait_for(chunk_at(job, at_file), true);
    }
    return wait_for(chunk_at(job, reads ? job->ended : job->passed), false);
}

static cm_status
move(cm_file_job *job)
{
    for (;;) {
        CM_TRY(ask(job));
        if (atomic_load(&job->failed)) {
            return cm_fail(CM_ESYSTEM, (uint64_t)job->failure.error);
        }
        bool moved = false;
        CM_TRY(advance(job, &moved));
        CM_TRY(begin_chunk(job, &moved));
        if (moved) {
            continue;
        }
        if (job->ended == job->begun && !job->has_cut) {
            return cm_ok();
        }
        CM_TRY(wait_for_something(job));
    }
}

/* Told before anything is written. */
static cm_status
check_size(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    uint64_t size = request->writes ? UINT64_MAX : cm_file_size(request->fd);
    if (!request->writes && size == UINT64_MAX && job->had_size) {
        size = 0; /* it has lost all of it */
    }
    job->had_size = size != UINT64_MAX;
    for (uint64_t i = 0; i < request->range_count; i++) {
        const cm_file_range *range = &request->ranges[i];
        job->nbytes += range->nbytes;
        if (range->nbytes > 0
            && (range->nbytes > size || range->offset > size - range->nbytes)) {
            job->failure =
                (cm_file_failure){.at_end = true, .offset = size, .range_index = i};
            return cm_fail(CM_ESYSTEM, 0);
        }
    }
    return cm_ok();
}

/* Which part found the end first is chance; the file says where it is, if it can. */
static void
settle_failure(cm_file_job *job)
{
    if (job->failure.at_end) {
        cm_file_failure found = job->failure;
        job->nbytes = 0;
        if (cm_is_ok(check_size(job)) || job->failure.offset > found.offset) {
            job->failure = found;
        }
    }
}

static cm_status
run(cm_file_job *job)
{
    CM_TRY(check_size(job));
    CM_TRY(begin_order(job));
    cm_task_group_open(&job->group, &job->engine->workers, &job->tuning);
    cm_status status = move(job);
    cm_task_group_close(&job->group);
    cm_file_close_direct(job);
    settle_failure(job);
    return status;
}

/* Entered once here, the device is current for all that follows: each step enters it
 * too, which then costs next to nothing. With several it is the first one's. */
static cm_status
run_on_device(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    int device = -1;
    for (uint64_t i = 0; i < request->range_count && device < 0; i++) {
        const cm_file_range *range = &request->ranges[i];
        device = range->nbytes > 0 ? cm_file_range_device(range) : -1;
    }
    cm_device_guard guard;
    bool entered =
        device >= 0 && cm_is_ok(cm_device_enter(job->engine->rt, device, &guard));
    /* Where it cannot be entered, the step that needs it says so. */
    cm_status status = run(job);
    end_order(job, status);
    if (entered) {
        cm_device_leave(job->engine->rt, &guard);
    }
    return status;
}

/* Where there is little to read the first piece is on its way early all the same, and
 * every thread has a part of it. */
static void
fit_tuning(cm_file_job *job)
{
    enum { CHUNKS = 16, PARTS = 8, LEAST_CHUNK = 1 << 20, LEAST_PART = 256 << 10 };
    const uint64_t whole_pages = ~(uint64_t)(CM_FILE_PAGE_NBYTES - 1);
    uint64_t total = 0;
    for (uint64_t i = 0; i < job->request->range_count && total < INT64_MAX; i++) {
        total += job->request->ranges[i].nbytes; /* none is longer than that */
    }
    cm_tuning *tuning = &job->tuning;
    uint64_t chunk = total / CHUNKS > LEAST_CHUNK ? total / CHUNKS : LEAST_CHUNK;
    if (chunk < tuning->file_chunk_nbytes) {
        tuning->file_chunk_nbytes = chunk;
    }
    tuning->file_chunk_nbytes &= whole_pages;
    uint64_t part = tuning->file_chunk_nbytes / PARTS & whole_pages;
    part = part > LEAST_PART ? part : LEAST_PART;
    if (part < tuning->file_part_nbytes) {
        tuning->file_part_nbytes = part;
    }
}

static cm_status
transfer(cm_engine *engine, const cm_file_request *request, const cm_tuning *tuning,
         cm_file_failure *failure, bool *dropped)
{
    cm_file_job *job = calloc(1, sizeof(*job));
    if (job == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*job));
    }
    cm_status status = cm_mutex_init(&job->lock);
    if (!cm_is_ok(status)) {
        free(job);
        return status;
    }
    atomic_init(&job->failed, false);
    atomic_init(&job->direct_refused, false);
    job->engine = engine;
    job->tuning = *tuning;
    cm_engine_resolve_tuning(engine, &job->tuning);
    job->request = request;
    fit_tuning(job);
    job->asked_ns = cm_now_ns();
    for (int i = 0; i < CM_SLOT_MAX; i++) {
        job->chunks[i].job = job;
    }
    *dropped = true;
    status = run_on_device(job);
    *failure = job->failure;
    cm_mutex_fini(&job->lock);
    free(job);
    return status;
}

cm_status
cm_engine_transfer_file(cm_engine *engine, const cm_file_request *request,
                        cm_file_failure *failure)
{
    *failure = (cm_file_failure){.at_end = false};
    bool dropped = false;
    cm_tuning tuning;
    cm_status status = cm_engine_begin_call(engine, &tuning);
    if (cm_is_ok(status)) {
        status = transfer(engine, request, &tuning, failure, &dropped);
        cm_engine_end_call(engine);
    }
    if (!dropped) {
        drop_keeps(request);
    }
    return status;
}
