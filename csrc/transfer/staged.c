/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between a device and host memory that the runtime cannot take as it is, in
 * pieces through page-locked blocks: packed on one side, unpacked on the other. Packing
 * and unpacking on the host is shared out among threads while the copy engine works on
 * other pieces; all runtime calls are made by the thread that runs the job. A broadcast
 * source travels once. */
#include <stdlib.h>

#include "transfer/host_copy.h"
#include "transfer/job.h"

enum {
    PIECE_MIN = 512 << 10, /* smaller ones cost more in calls than they overlap */
    PIECE_SHARE = 4,       /* the first piece is on its way early */
};

typedef enum slot_state {
    SLOT_FREE,
    SLOT_HOST,   /* the crew packs it (upload), unpacks it (download) */
    SLOT_DEVICE, /* its copy is queued; `event` tells when it is over */
} slot_state;

typedef struct slot {
    slot_state state;
    cm_block *pinned; /* owned; NULL until needed */
    uint64_t event;   /* lent */
    cm_layout piece;
    cm_load load;
} slot;

/* Slots are used in turn, so that in the order of the pieces those of the host come
 * after those of the device (upload), or before (download). Indices count up for ever:
 * slot i is slots[i % slot_count]. */
typedef struct cm_staging {
    cm_gang gang;
    cm_layout repeats;
    cm_cut cut;
    uint32_t slot_count; /* in use: fewer than CM_SLOT_COUNT when the ring is full */
    uint64_t begun;      /* pieces that have a slot */
    uint64_t passed;     /* of those, with the host's part (upload) or the device's
                            (download) over */
    uint64_t ended;      /* of those, with both over */
    uint64_t asked_ns;   /* when it was last asked whether to go on */
    bool stopped;
    slot slots[CM_SLOT_COUNT];
} cm_staging;

uint64_t
cm_job_piece_limit(const cm_job *job)
{
    uint64_t share = job->plan.nbytes / PIECE_SHARE;
    share = share < PIECE_MIN ? PIECE_MIN : share;
    share = share > CM_STAGE_NBYTES ? CM_STAGE_NBYTES : share;
    return job->plan.nbytes < share ? job->plan.nbytes : share;
}

cm_status
cm_job_alloc_block(cm_job *job, int device, uint64_t nbytes, cm_stream *stream,
                   cm_block **out)
{
    cm_mutex_lock(&job->engine->lock);
    cm_pool *pool = job->engine->device_pools[device];
    cm_mutex_unlock(&job->engine->lock);
    if (pool == NULL) {
        return cm_fail(CM_EINVALID, (uint64_t)device);
    }
    return cm_pool_alloc(pool, nbytes, stream, out);
}

static cm_status
get_device_block(cm_job *job, cm_address *out)
{
    if (job->device_block == NULL) {
        CM_TRY(cm_job_alloc_block(job, job->plan.device, cm_job_piece_limit(job),
                                  job->stream, &job->device_block));
    }
    *out = job->device_block->address;
    return cm_ok();
}

/* -- slots ------------------------------------------------------------------------------ */

static slot *
slot_at(cm_staging *staging, uint64_t index)
{
    return &staging->slots[index % staging->slot_count];
}

/* Unless that was done before the job was parked. */
static cm_status
begin_staging(cm_job *job)
{
    if (job->staging != NULL) {
        return cm_ok();
    }
    cm_staging *staging = calloc(1, sizeof(*staging));
    if (staging == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*staging));
    }
    cm_layout_take_repeats(&job->plan.layout, &staging->repeats);
    cm_cut_init(&staging->cut, &job->plan.layout, cm_job_piece_limit(job));
    staging->slot_count = CM_SLOT_COUNT;
    staging->asked_ns = cm_now_ns();
    cm_gang_open(&staging->gang, &job->engine->crew);
    job->staging = staging;
    return cm_ok();
}

void
cm_job_stop_staging(cm_job *job)
{
    if (job->staging != NULL && !job->staging->stopped) {
        cm_gang_close(&job->staging->gang);
        job->staging->stopped = true;
    }
}

void
cm_job_end_staging(cm_job *job, void (*free_block)(const cm_job *job, cm_pool *pool,
                                                   cm_block *block))
{
    cm_engine *engine = job->engine;
    cm_staging *staging = job->staging;
    if (staging == NULL) {
        return;
    }
    cm_job_stop_staging(job);
    uint64_t nbytes = 0;
    for (int i = 0; i < CM_SLOT_COUNT; i++) {
        slot *s = &staging->slots[i];
        nbytes += s->pinned != NULL ? cm_job_piece_limit(job) : 0;
        free_block(job, engine->pinned_pool, s->pinned);
        if (s->event != 0) {
            cm_loan_give_event(engine, job->stream->device, s->event);
        }
    }
    cm_mutex_lock(&engine->lock);
    engine->ring_nbytes -= nbytes;
    cm_mutex_unlock(&engine->lock);
    free(staging);
    job->staging = NULL;
}

/* Each transfer has one block, whatever others have; more as far as the ring goes. */
static cm_pool *
enter_ring(cm_engine *engine, uint64_t nbytes, bool first)
{
    cm_mutex_lock(&engine->lock);
    bool fits = first || engine->ring_nbytes + nbytes <= CM_RING_NBYTES;
    engine->ring_nbytes += fits ? nbytes : 0;
    cm_pool *pool = fits ? engine->pinned_pool : NULL;
    cm_mutex_unlock(&engine->lock);
    return pool;
}

/* Give a free slot what it needs. False: the ring is full, and slot_count is less now.
 */
static cm_status
equip_slot(cm_job *job, slot *s, bool *out)
{
    cm_engine *engine = job->engine;
    cm_staging *staging = job->staging;
    *out = true;
    if (s->event == 0) {
        CM_TRY(cm_loan_take_event(engine, job->stream->device, &s->event));
    }
    if (s->pinned != NULL) {
        return cm_ok();
    }
    uint64_t nbytes = cm_job_piece_limit(job);
    bool first = s == staging->slots;
    cm_pool *pool = enter_ring(engine, nbytes, first);
    if (pool == NULL && !first) {
        /* Only while slots are used for the first time, so that begun is the index. */
        staging->slot_count = (uint32_t)(s - staging->slots);
        *out = false;
        return cm_ok();
    }
    cm_status status = pool == NULL ? cm_fail(CM_EINVALID, 0)
                                    : cm_pool_alloc(pool, nbytes, NULL, &s->pinned);
    if (!cm_is_ok(status)) {
        cm_mutex_lock(&engine->lock);
        engine->ring_nbytes -= nbytes;
        cm_mutex_unlock(&engine->lock);
    }
    return status;
}

/* The slot for the next piece, cut. NULL: none is free now, or all is cut. */
static cm_status
begin_piece(cm_job *job, slot **out)
{
    cm_staging *staging = job->staging;
    *out = NULL;
    if (staging->cut.done || staging->begun - staging->ended >= staging->slot_count) {
        return cm_ok();
    }
    bool equipped;
    slot *s = slot_at(staging, staging->begun);
    CM_TRY(equip_slot(job, s, &equipped));
    if (equipped) {
        (void)cm_cut_next(&staging->cut, &s->piece);
        staging->begun++;
        *out = s;
    }
    return cm_ok();
}

static cm_status
end_device_part(cm_job *job, slot *s)
{
    CM_TRY(cm_rt_event_record(job->engine->rt, s->event, job->stream->handle));
    s->state = SLOT_DEVICE;
    return cm_ok();
}

/* Has the oldest copy on the device ended? */
static cm_status
look_at_device(cm_job *job, const slot *s, bool *out)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(job->engine->rt, job->stream->device, &guard));
    cm_status status = cm_rt_event_query(job->engine->rt, s->event, out);
    cm_device_leave(job->engine->rt, &guard);
    return status;
}

/* Waits of the host and the crew are short, but there may be many. */
static cm_status
ask_to_go_on(cm_job *job)
{
    cm_staging *staging = job->staging;
    uint64_t now_ns = cm_now_ns();
    if (now_ns - staging->asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool interrupted = cm_job_is_interrupted(job);
    staging->asked_ns = cm_now_ns();
    return interrupted ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

/* -- to the device ---------------------------------------------------------------------- */

/* Packed bytes on the host to their places on the device, or in host memory that the
 * device writes for us. What is repeated is read again and again: not over the bus. */
static cm_status
send_piece(cm_job *job, const cm_layout *unpack, const slot *s, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_address from = (uintptr_t)s->pinned->host;
    bool repeats = cm_layout_nbytes(unpack) > nbytes;
    if (!cm_region_is_on_device(&job->dst) && !repeats) {
        return cm_kernels_launch(&job->engine->kernels, job->plan.device, unpack,
                                 job->dst.address, s->pinned->address,
                                 job->stream->handle);
    }
    if (unpack->ndim == 0) {
        return cm_rt_copy_async(rt, job->dst.address + (uint64_t)unpack->dst_offset,
                                from, nbytes, job->stream->handle);
    }
    cm_address block;
    CM_TRY(get_device_block(job, &block));
    CM_TRY(cm_rt_copy_async(rt, block, from, nbytes, job->stream->handle));
    return cm_kernels_launch(&job->engine->kernels, job->plan.device, unpack,
                             job->dst.address, block, job->stream->handle);
}

static cm_status
send_slot(cm_job *job, slot *s)
{
    cm_layout unpack = s->piece;
    cm_layout_pack_src(&unpack);
    cm_layout_put_repeats(&unpack, &job->staging->repeats);
    CM_TRY(send_piece(job, &unpack, s, cm_layout_nbytes(&s->piece)));
    return end_device_part(job, s);
}

/* Pieces go by in the order: packed by the crew, sent, over. */
cm_status
cm_job_upload(cm_job *job)
{
    if (job->src.kind != CM_KIND_PAGEABLE && job->staging == NULL) {
        /* Streams may still write it: the host reads only after them. */
        CM_TRY(cm_job_wait_stream(job));
    }
    CM_TRY(begin_staging(job));
    cm_staging *staging = job->staging;
    for (;;) {
        CM_TRY(ask_to_go_on(job));
        slot *s;
        while (staging->passed < staging->begun
               && cm_load_is_done(&slot_at(staging, staging->passed)->load)) {
            CM_TRY(send_slot(job, slot_at(staging, staging->passed)));
            staging->passed++;
        }
        if (staging->begun - staging->ended == staging->slot_count
            && staging->ended < staging->passed && !staging->cut.done) {
            s = slot_at(staging, staging->ended);
            bool over = false;
            if (staging->passed == staging->begun) {
                CM_TRY(cm_job_wait_event(job, job->stream->device, s->event));
                over = true; /* the only wait that may park */
            }
            else {
                CM_TRY(look_at_device(job, s, &over));
            }
            staging->ended += over;
            s->state = over ? SLOT_FREE : s->state;
        }
        CM_TRY(begin_piece(job, &s));
        if (s != NULL) {
            cm_layout pack = s->piece;
            cm_layout_pack_dst(&pack);
            s->state = SLOT_HOST;
            cm_gang_post(&staging->gang, &s->load, &pack, s->pinned->host,
                         job->src.host, false);
            continue;
        }
        if (staging->passed == staging->begun) {
            if (staging->cut.done) {
                return cm_ok();
            }
            continue;
        }
        if (!cm_gang_help(&staging->gang)) {
            cm_gang_wait(&staging->gang, &slot_at(staging, staging->passed)->load);
        }
    }
}

/* -- from the device -------------------------------------------------------------------- */

/* Bytes from their places to the packed block on the host. */
static cm_status
fetch_piece(cm_job *job, const cm_layout *pack, const slot *s, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_address to = (uintptr_t)s->pinned->host;
    if (!cm_region_is_on_device(&job->src)) {
        return cm_kernels_launch(&job->engine->kernels, job->plan.device, pack,
                                 s->pinned->address, job->src.address,
                                 job->stream->handle);
    }
    if (pack->ndim == 0) {
        return cm_rt_copy_async(rt, to, job->src.address + (uint64_t)pack->src_offset,
                                nbytes, job->stream->handle);
    }
    cm_address block;
    CM_TRY(get_device_block(job, &block));
    CM_TRY(cm_kernels_launch(&job->engine->kernels, job->plan.device, pack, block,
                             job->src.address, job->stream->handle));
    return cm_rt_copy_async(rt, to, block, nbytes, job->stream->handle);
}

static cm_status
fetch_slot(cm_job *job, slot *s)
{
    cm_layout pack = s->piece;
    cm_layout_pack_dst(&pack);
    CM_TRY(fetch_piece(job, &pack, s, cm_layout_nbytes(&s->piece)));
    return end_device_part(job, s);
}

/* What came down goes to where it belongs. */
static void
post_unpacking(cm_job *job, slot *s)
{
    cm_staging *staging = job->staging;
    cm_layout unpack = s->piece;
    cm_layout_pack_src(&unpack);
    cm_layout_put_repeats(&unpack, &staging->repeats);
    s->state = SLOT_HOST;
    cm_gang_post(&staging->gang, &s->load, &unpack, job->dst.host, s->pinned->host,
                 true);
}

/* Pieces go by in the order: fetched, unpacked by the crew, over. Up to where all is
 * fetched, or (`drain`) all is over. */
static cm_status
download(cm_job *job, bool drain)
{
    cm_staging *staging = job->staging;
    for (;;) {
        CM_TRY(ask_to_go_on(job));
        slot *s;
        while (staging->ended < staging->passed
               && cm_load_is_done(&slot_at(staging, staging->ended)->load)) {
            slot_at(staging, staging->ended)->state = SLOT_FREE;
            staging->ended++;
        }
        CM_TRY(begin_piece(job, &s));
        if (s != NULL) {
            CM_TRY(fetch_slot(job, s));
            continue;
        }
        if (staging->cut.done && (!drain || staging->ended == staging->begun)) {
            return cm_ok();
        }
        if (staging->passed < staging->begun) {
            s = slot_at(staging, staging->passed);
            bool over = false;
            if (staging->ended == staging->passed) {
                CM_TRY(cm_job_wait_event(job, job->stream->device, s->event));
                over = true; /* the only wait that may park */
            }
            else {
                CM_TRY(look_at_device(job, s, &over));
            }
            if (over) {
                post_unpacking(job, s);
                staging->passed++;
                continue;
            }
        }
        if (!cm_gang_help(&staging->gang) && staging->ended < staging->passed) {
            cm_gang_wait(&staging->gang, &slot_at(staging, staging->ended)->load);
        }
    }
}

cm_status
cm_job_download(cm_job *job)
{
    CM_TRY(begin_staging(job));
    return download(job, false);
}

cm_status
cm_job_drain(cm_job *job)
{
    return job->staging == NULL ? cm_ok() : download(job, true);
}
