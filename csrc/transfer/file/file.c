/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/file/file.h"

#include <stdlib.h>

#include "transfer/file/job.h"
#include "transfer/host/host_copy.h"

static cm_file_chunk *
chunk_at(cm_file_job *job, uint64_t index)
{
    return &job->chunks[index % job->tuning.file_slot_count];
}

/* In place by the host: the file's half is all there is. */
static bool
is_in_place(const cm_file_chunk *chunk)
{
    return chunk->device < 0 && !chunk->is_strided;
}

/* Between the chunk's memory and the host's own, by the workers. */
static cm_status
post_copy(cm_file_chunk *chunk)
{
    cm_file_job *job = chunk->job;
    char *memory = cm_file_chunk_memory(chunk) + chunk->pieces[0].at;
    char *host = chunk->host;
    bool writes = job->request->writes;
    CM_TRY(cm_host_look(&chunk->layout, writes ? NULL : host, writes ? host : NULL,
                        CM_LOOK_NBYTES));
    cm_task_group_post(&job->group, &chunk->task, &chunk->layout,
                       writes ? memory : host, writes ? host : memory, !writes);
    return cm_ok();
}

/* The half that is not the file's. */
static cm_status
begin_other_half(cm_file_chunk *chunk)
{
    if (is_in_place(chunk)) {
        return cm_ok();
    }
    if (chunk->device < 0) {
        return post_copy(chunk);
    }
    return chunk->job->request->writes ? cm_file_fetch(chunk) : cm_file_send(chunk);
}

static cm_status
look_at_other_half(cm_file_chunk *chunk, bool *out)
{
    *out =
        is_in_place(chunk) || (chunk->device < 0 && cm_copy_task_is_done(&chunk->task));
    return chunk->device < 0 ? cm_ok() : cm_file_look(chunk, out);
}

static cm_status
look(cm_file_chunk *chunk, bool at_file, bool *out)
{
    *out = at_file && cm_copy_task_is_done(&chunk->task);
    return at_file ? cm_ok() : look_at_other_half(chunk, out);
}

static cm_status
wait_for(cm_file_chunk *chunk, bool at_file)
{
    cm_file_job *job = chunk->job;
    if (!at_file && chunk->device >= 0) {
        return cm_file_wait_event(job, chunk->device, chunk->event);
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
            cm_file_give_memory(chunk);
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
    if (!is_in_place(chunk)) {
        CM_TRY(cm_file_take_memory(job, chunk, &ready));
    }
    if (!ready) {
        return cm_ok();
    }
    if (job->request->writes) {
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
        CM_TRY(cm_file_ask(job));
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
    uint64_t size = request->writes
                        ? UINT64_MAX
                        : job->calls->size(job->calls->context, request->fd);
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
    CM_TRY(cm_file_begin_order(job));
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
        bool on_device = range->kind == CM_KIND_DEVICE || range->host == NULL;
        device = on_device && range->nbytes > 0 ? range->device : -1;
    }
    cm_device_guard guard;
    bool entered =
        device >= 0 && cm_is_ok(cm_device_enter(job->engine->rt, device, &guard));
    /* Where it cannot be entered, the step that needs it says so. */
    cm_status status = run(job);
    cm_file_end_order(job, status);
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
    job->calls = request->calls == NULL ? &cm_file_system_calls : request->calls;
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
        cm_file_drop_keeps(request);
    }
    return status;
}
