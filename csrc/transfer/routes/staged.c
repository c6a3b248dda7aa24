/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between a device and host memory that the runtime cannot take as it is, in
 * pieces through page-locked blocks: packed on one side, unpacked on the other. Packing
 * and unpacking on the host is shared out among threads while the copy engine works on
 * other pieces; all runtime calls are made by the thread that runs the job. A broadcast
 * source travels once. */
#include "base/checked_math.h"
#include "transfer/host/backoff.h"
#include "transfer/routes/pieces.h"
#include "transfer/routes/routes.h"
#include "transfer/routes/several.h"

static cm_status
end_device_part(const cm_job *job, const cm_slot *s)
{
    return cm_rt_event_record(job->engine->rt, s->event, job->stream->handle);
}

/* -- to the device ---------------------------------------------------------------------- */

/* While the kernel places one piece, the next is on its way, on a stream of its own. */
static cm_status
open_gather_stream(cm_job *job)
{
    if (!job->has_pair || job->gather_stream != NULL) {
        return cm_ok();
    }
    cm_stream *stream;
    CM_TRY(cm_cache_take_side(job->engine, job->plan.device, job->stream, &stream));
    cm_status status = cm_job_chain_streams(job, job->stream, stream);
    if (!cm_is_ok(status)) {
        cm_cache_give_side(job->engine, stream, true);
        return status;
    }
    job->gather_stream = stream;
    job->gather_is_joined = true;
    return cm_ok();
}

/* Packed bytes to memory there, from which a kernel puts them in their places. */
static cm_status
fill_block(cm_job *job, cm_address from, uint64_t nbytes, cm_address *block)
{
    cm_runtime *rt = job->engine->rt;
    cm_staging *staging = job->staging;
    CM_TRY(cm_job_take_device_block(job, block));
    CM_TRY(open_gather_stream(job));
    cm_stream *side = job->gather_stream;
    if (side == NULL) {
        return cm_rt_copy_async(rt, *block, from, nbytes, job->stream->handle);
    }
    if (staging->passed >= 2) { /* the last kernel that reads this half */
        const cm_slot *before = cm_slot_at(staging, staging->passed - 2);
        CM_TRY(cm_stream_wait_event(side, before->event));
    }
    *block += staging->passed % 2 * cm_job_pair_pitch(job);
    job->gather_is_joined = false;
    CM_TRY(cm_rt_copy_async(rt, *block, from, nbytes, side->handle));
    CM_TRY(cm_job_chain_streams(job, side, job->stream));
    job->gather_is_joined = true;
    return cm_ok();
}

/* Packed bytes on the host to their places on the device, or in host memory that the
 * device writes for us. What is repeated is read again and again: not over the bus. */
static cm_status
send_piece(cm_job *job, const cm_layout *unpack, const cm_slot *s, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_address from = (uintptr_t)s->host;
    bool repeats = cm_layout_nbytes(unpack) > nbytes;
    if (!cm_region_is_on_device(&job->dst) && !repeats) {
        if (s->pinned == NULL) {
            return job->staging->refused;
        }
        return cm_kernels_launch(&job->engine->kernels, job->plan.device, unpack,
                                 job->dst.address, s->pinned->address,
                                 job->stream->handle);
    }
    if (unpack->ndim == 0) {
        return cm_rt_copy_async(rt, job->dst.address + (uint64_t)unpack->dst_offset,
                                from, nbytes, job->stream->handle);
    }
    cm_address block;
    CM_TRY(fill_block(job, from, nbytes, &block));
    return cm_kernels_launch(&job->engine->kernels, job->plan.device, unpack,
                             job->dst.address, block, job->stream->handle);
}

/* The runs of a slot. Between two copies the link stands still for some microseconds:
 * several go in one, and a kernel places them while the next slot is on its way. */
static cm_status
send_runs(cm_job *job, const cm_slot *s)
{
    cm_address block = 0;
    bool together = s->pinned != NULL && cm_many_can_go_by_block(job->many, s);
    if (together) {
        CM_TRY(cm_job_try_pair(job));
    }
    if (together && job->has_pair) {
        CM_TRY(fill_block(job, (uintptr_t)s->host, s->piece.run_nbytes, &block));
    }
    return cm_many_send(job, s, block);
}

static cm_status
send_slot(cm_job *job, cm_slot *s)
{
    if (job->many != NULL) {
        CM_TRY(send_runs(job, s));
        return end_device_part(job, s);
    }
    cm_layout unpack = s->piece;
    cm_layout_pack_src(&unpack);
    cm_layout_put_repeats(&unpack, &job->staging->repeats);
    CM_TRY(send_piece(job, &unpack, s, cm_layout_nbytes(&s->piece)));
    if (job->fan != NULL) {
        return cm_fan_send(job, &unpack, s, cm_layout_nbytes(&s->piece));
    }
    return end_device_part(job, s);
}

/* Turning it on the device takes memory there; where there is none the host does it. */
static cm_status
turn_where_there_is_memory(cm_job *job)
{
    cm_address block;
    cm_status status =
        job->plan.is_turned ? cm_job_take_device_block(job, &block) : cm_ok();
    if (cm_is_ok(status) || status.code == CM_ECANCELLED) {
        return status;
    }
    cm_layout_sort_by_dst(&job->plan.layout);
    job->plan.is_turned = false;
    job->plan.route = CM_ROUTE_STAGED;
    cm_plan_count_pieces(&job->plan, &job->tuning);
    cm_mutex_lock(&job->engine->lock);
    job->ticket->route = job->plan.route;
    cm_mutex_unlock(&job->engine->lock);
    return cm_ok();
}

static cm_copy_way
choose_way(const cm_job *job, const cm_layout *pack)
{
    if (cm_layout_is_scattered(pack)) {
        return CM_COPY_PLAIN_ALL;
    }
    bool by_all = job->fan != NULL || job->is_file;
    if (job->plan.is_cached) {
        return by_all ? CM_COPY_PLAIN_ALL : CM_COPY_PLAIN;
    }
    return by_all ? CM_COPY_WIDE_ALL : CM_COPY_WIDE;
}

enum { MORE_THREADS = 4 };

/* The device was through with all before this piece was packed: it waits for the host,
 * where other work has its part of the memory's speed. */
static cm_status
note_if_behind(cm_job *job)
{
    cm_staging *staging = job->staging;
    bool behind = staging->passed > 0 && job->many == NULL && job->fan == NULL;
    if (behind && staging->ended < staging->passed) {
        CM_TRY(cm_staging_look(job, cm_slot_at(staging, staging->passed - 1), &behind));
    }
    if (behind && staging->group.more < MORE_THREADS) {
        staging->group.more++;
    }
    return cm_ok();
}

/* Pieces go by in the order: packed by the workers, sent, over. */
static cm_status
upload(cm_job *job)
{
    if (cm_job_src_is_ordered(job) && job->staging == NULL) {
        /* Streams may still write it: the host reads only after them. */
        CM_TRY(cm_job_wait_stream(job));
    }
    CM_TRY(cm_job_begin(job));
    if (job->staging == NULL) {
        CM_TRY(turn_where_there_is_memory(job));
    }
    CM_TRY(cm_staging_begin(job));
    cm_staging *staging = job->staging;
    for (;;) {
        CM_TRY(cm_staging_ask(job));
        cm_slot *s;
        while (staging->passed < staging->begun
               && cm_copy_task_is_done(&cm_slot_at(staging, staging->passed)->task)) {
            CM_TRY(cm_job_moved_status(job));
            CM_TRY(note_if_behind(job));
            CM_TRY(send_slot(job, cm_slot_at(staging, staging->passed)));
            staging->passed++;
        }
        if (staging->begun - staging->ended == staging->slot_count
            && staging->ended < staging->passed && !staging->cut.done) {
            s = cm_slot_at(staging, staging->ended);
            bool over = false;
            if (staging->passed == staging->begun) {
                CM_TRY(cm_job_wait_event(job, job->stream->device, s->event));
                over = true; /* the only wait that may park */
            }
            else {
                CM_TRY(cm_staging_look(job, s, &over));
            }
            if (over) {
                cm_staging_end_piece(job);
            }
        }
        CM_TRY(cm_staging_begin_piece(job, &s));
        if (s != NULL) {
            cm_layout pack = s->piece;
            cm_layout_pack_dst(&pack);
            CM_TRY(job->many == NULL ? cm_job_look(job, &s->piece) : cm_ok());
            cm_task_group_post(&staging->group, &s->task, &pack, s->host, job->src.host,
                               choose_way(job, &pack));
            continue;
        }
        if (staging->passed == staging->begun) {
            if (staging->cut.done) {
                return cm_ok();
            }
            continue;
        }
        cm_task_group_rest(&staging->group,
                           &cm_slot_at(staging, staging->passed)->task);
    }
}

/* -- from the device -------------------------------------------------------------------- */

/* Bytes from their places to the packed block on the host. */
static cm_status
fetch_piece(cm_job *job, const cm_layout *pack, const cm_slot *s, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_address to = (uintptr_t)s->host;
    if (!cm_region_is_on_device(&job->src)) {
        if (s->pinned == NULL) {
            return job->staging->refused;
        }
        return cm_kernels_launch(&job->engine->kernels, job->plan.device, pack,
                                 s->pinned->address, job->src.address,
                                 job->stream->handle);
    }
    if (pack->ndim == 0) {
        return cm_rt_copy_async(rt, to, job->src.address + (uint64_t)pack->src_offset,
                                nbytes, job->stream->handle);
    }
    cm_address block;
    CM_TRY(cm_job_take_device_block(job, &block));
    CM_TRY(cm_kernels_launch(&job->engine->kernels, job->plan.device, pack, block,
                             job->src.address, job->stream->handle));
    return cm_rt_copy_async(rt, to, block, nbytes, job->stream->handle);
}

static cm_status
fetch_slot(cm_job *job, cm_slot *s)
{
    if (job->many != NULL) {
        CM_TRY(cm_many_fetch(job, s));
        return end_device_part(job, s);
    }
    cm_layout pack = s->piece;
    cm_layout_pack_dst(&pack);
    CM_TRY(fetch_piece(job, &pack, s, cm_layout_nbytes(&s->piece)));
    return end_device_part(job, s);
}

static cm_copy_way
choose_way_back(const cm_job *job, const cm_layout *unpack)
{
    if (job->plan.is_fresh) {
        return CM_COPY_FRESH;
    }
    return cm_layout_is_scattered(unpack) || job->is_file ? CM_COPY_WIDE_ALL
                                                          : CM_COPY_WIDE;
}

/* What came down goes to where it belongs. */
static cm_status
post_unpacking(cm_job *job, cm_slot *s)
{
    cm_staging *staging = job->staging;
    cm_layout unpack = s->piece;
    cm_layout_pack_src(&unpack);
    cm_layout_put_repeats(&unpack, &staging->repeats);
    if (job->many == NULL && !job->plan.is_fresh) {
        CM_TRY(cm_job_look(job, &unpack));
    }
    cm_task_group_post(&staging->group, &s->task, &unpack, job->dst.host, s->host,
                       choose_way_back(job, &unpack));
    return cm_ok();
}

/* Pieces go by in the order: fetched, unpacked by the workers, over. Up to where all is
 * fetched, or (`drain`) all is over. */
static cm_status
download(cm_job *job, bool drain)
{
    cm_staging *staging = job->staging;
    for (;;) {
        CM_TRY(cm_staging_ask(job));
        cm_slot *s;
        while (staging->ended < staging->passed
               && cm_copy_task_is_done(&cm_slot_at(staging, staging->ended)->task)) {
            CM_TRY(cm_job_moved_status(job));
            cm_staging_end_piece(job);
        }
        CM_TRY(cm_staging_begin_piece(job, &s));
        if (s != NULL) {
            CM_TRY(fetch_slot(job, s));
            continue;
        }
        if (staging->cut.done && (!drain || staging->ended == staging->begun)) {
            return cm_ok();
        }
        if (staging->passed < staging->begun) {
            s = cm_slot_at(staging, staging->passed);
            bool over = false;
            if (staging->ended == staging->passed) {
                CM_TRY(cm_job_wait_event(job, job->stream->device, s->event));
                over = true; /* the only wait that may park */
            }
            else {
                CM_TRY(cm_staging_look(job, s, &over));
            }
            if (over) {
                CM_TRY(post_unpacking(job, s));
                staging->passed++;
                continue;
            }
        }
        cm_task_group_rest(&staging->group,
                           staging->ended < staging->passed
                               ? &cm_slot_at(staging, staging->ended)->task
                               : NULL);
    }
}

cm_status
cm_job_drain(cm_job *job)
{
    return job->staging == NULL ? cm_ok() : download(job, true);
}

cm_status
cm_job_copy_staged(cm_job *job)
{
    if (!job->plan.is_download) {
        return upload(job);
    }
    CM_TRY(cm_staging_begin(job));
    return download(job, false);
}
