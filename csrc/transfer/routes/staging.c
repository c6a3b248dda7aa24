/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/staging.h"
#include "transfer/routes/routes.h"

#include <stdlib.h>

#include "base/fresh_pages.h"
#include "transfer/routes/pieces.h"

/* A target whose pages are still to come gets huge ones. */
static void
prepare_target(const cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    if (job->plan.is_fresh) {
        cm_pages_ask_huge((char *)job->dst.host + layout->dst_offset,
                          layout->run_nbytes);
    }
}

cm_status
cm_staging_begin(cm_job *job)
{
    if (job->staging != NULL) {
        return cm_ok();
    }
    CM_TRY(job->many != NULL ? cm_many_look(job->many)
                             : cm_job_look(job, &job->plan.layout));
    size_t slot_room = (size_t)cm_plan_slot_count(&job->plan, &job->tuning);
    size_t nbytes = sizeof(cm_staging) + slot_room * sizeof(cm_slot);
    cm_staging *staging = calloc(1, nbytes);
    if (staging == NULL) {
        return cm_fail(CM_ENOMEM, nbytes);
    }
    cm_layout_take_repeats(&job->plan.layout, &staging->repeats);
    cm_plan_cut(&job->plan, &job->tuning, &job->plan.layout, &staging->cut);
    prepare_target(job);
    staging->slot_room = (uint32_t)slot_room;
    staging->slot_count = staging->slot_room;
    staging->asked_ns = cm_now_ns();
    cm_task_group_open(&staging->group, &job->engine->workers, &job->tuning);
    if (job->many != NULL) {
        staging->group.move = cm_many_move_part;
        staging->group.context = job->many;
    }
    if (job->is_file) {
        staging->group.move = cm_job_move_part;
        staging->group.context = job;
    }
    job->staging = staging;
    return cm_ok();
}

void
cm_job_stop_staging(cm_job *job)
{
    if (job->staging != NULL && !job->staging->stopped) {
        cm_task_group_close(&job->staging->group);
        job->staging->stopped = true;
    }
}

void
cm_job_end_staging(cm_job *job, void (*give_block)(const cm_job *job, cm_pool *pool,
                                                   cm_block *block))
{
    cm_engine *engine = job->engine;
    cm_staging *staging = job->staging;
    if (staging == NULL) {
        return;
    }
    cm_job_stop_staging(job);
    uint64_t nbytes = 0;
    atomic_fetch_add_explicit(&engine->piece_count, staging->begun,
                              memory_order_relaxed);
    for (uint32_t i = 0; i < staging->slot_room; i++) {
        cm_slot *s = &staging->slots[i];
        nbytes += s->pinned != NULL ? job->plan.piece_nbytes : 0;
        give_block(job, engine->pinned_pool, s->pinned);
        free(s->plain); /* the runtime is through with ordinary memory on return */
        if (s->event != 0) {
            cm_cache_give_event(engine, job->stream->device, s->event);
        }
    }
    cm_cache_leave_ring(engine, nbytes);
    free(staging);
    job->staging = NULL;
}

/* Give a free slot what it needs. False: no more blocks, and slot_count is less now. */
static cm_status
equip_slot(cm_job *job, cm_slot *s, bool *out)
{
    cm_engine *engine = job->engine;
    cm_staging *staging = job->staging;
    *out = true;
    if (s->event == 0) {
        CM_TRY(cm_cache_take_event(engine, job->stream->device, &s->event));
    }
    if (s->host != NULL) {
        return cm_ok();
    }
    uint64_t nbytes = job->plan.piece_nbytes;
    bool first = s == staging->slots;
    /* Each transfer has one block, whatever others have; more as far as the ring goes.
     */
    cm_pool *pool = cm_cache_enter_ring(engine, nbytes,
                                        first ? UINT64_MAX : job->tuning.ring_nbytes);
    cm_status status = pool == NULL ? cm_fail(CM_EINVALID, 0)
                                    : cm_pool_alloc_now(pool, nbytes, NULL, &s->pinned);
    if (pool != NULL && !cm_is_ok(status)) {
        cm_cache_leave_ring(engine, nbytes);
    }
    if (!cm_is_ok(status) && !first) {
        /* The ring is full, or the pool gives no more: those there are will do. Only
         * while slots are used for the first time, so that begun is the index. */
        staging->slot_count = (uint32_t)(s - staging->slots);
        *out = false;
        return cm_ok();
    }
    if (pool != NULL && cm_pool_is_short(status)) {
        staging->refused = status;
        staging->slot_count = 1;
        s->plain = malloc((size_t)nbytes);
        s->host = s->plain;
        return s->plain == NULL ? status : cm_ok();
    }
    s->host = s->pinned == NULL ? NULL : s->pinned->host;
    return status;
}

cm_status
cm_staging_begin_piece(cm_job *job, cm_slot **out)
{
    cm_staging *staging = job->staging;
    *out = NULL;
    if (staging->cut.done || staging->begun - staging->ended >= staging->slot_count) {
        return cm_ok();
    }
    bool equipped;
    cm_slot *s = cm_slot_at(staging, staging->begun);
    CM_TRY(equip_slot(job, s, &equipped));
    if (s->plain != NULL) {
        /* The runtime's call would wait for the stream and cannot be ended. */
        CM_TRY(cm_job_wait_stream(job));
    }
    if (equipped) {
        CM_TRY(cm_job_take_turn(job, job->plan.piece_nbytes));
        (void)cm_cut_next(&staging->cut, &s->piece);
        staging->begun++;
        *out = s;
    }
    return cm_ok();
}

cm_status
cm_staging_look(cm_job *job, const cm_slot *s, bool *out)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(job->engine->rt, job->stream->device, &guard));
    cm_status status = cm_rt_event_query(job->engine->rt, s->event, out);
    cm_device_leave(job->engine->rt, &guard);
    return status;
}

cm_status
cm_staging_ask(cm_job *job)
{
    cm_staging *staging = job->staging;
    if (job->cancelled != NULL && atomic_load(job->cancelled)) {
        return cm_fail(CM_ECANCELLED, 0); /* a look that costs nothing */
    }
    uint64_t now_ns = cm_now_ns();
    if (now_ns - staging->asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool interrupted = cm_job_is_interrupted(job);
    staging->asked_ns = cm_now_ns();
    return interrupted ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}
