/* SPDX-License-Identifier: Apache-2.0 */
/* A job is one copy while it is being made.
 *
 * The ticket (ticket.h) is what the rest of the program sees of a copy. The job makes
 * the copy: it has the plan, the streams, events, blocks and the ring that the plan
 * needs, and the step that has been reached. It is destroyed when all is queued or
 * done, while the ticket lives on until the last holder lets go of it.
 *
 * A job that has to wait in the background leaves its thread to other jobs. The
 * function that would have to wait stores in job->wait what the job waits for, and
 * returns CM_ETIMEOUT, which each of its callers passes on. When the job can go on,
 * some job thread calls cm_job_run() again, which starts at job->step. That step then
 * calls its functions again, so each function that can wait must allow a second call.
 *
 * Locks: none; a job belongs to one thread at a time, or lies in a list of the
 * engine. */
#pragma once

#include "transfer/engine/ticket.h"

struct cm_ring;
typedef struct cm_targets cm_targets;
struct cm_many;
struct cm_kernel_rows;

/* An event that was recorded behind work that must come first. */
typedef struct cm_after {
    uint64_t event;
    int device;
} cm_after;

/* What a job waits for after it has left its thread to others. */
typedef enum cm_job_wait {
    CM_WAIT_NONE,  /* nothing, because it runs, or has not run yet */
    CM_WAIT_TURN,  /* its turn, which comes when a job thread takes it; nothing else
                      holds it up */
    CM_WAIT_ORDER, /* the tickets that its own ticket comes after */
    CM_WAIT_EVENT, /* the event `awaited` */
} cm_job_wait;

/* The steps of a job, in their order. A job that has waited goes on at the step that it
 * had reached. */
typedef enum cm_job_step {
    CM_JOB_ORDER,    /* it waits for what must come first */
    CM_JOB_FINALIZE, /* it makes the decisions that had to wait until its turn came (see
                        routes/replan.c) */
    CM_JOB_MOVE,     /* it moves its bytes */
    CM_JOB_DRAIN,    /* all is queued; a job thread unpacks what arrives at the host */
    CM_JOB_END, /* all is queued; a blocking job waits until the queued work is done */
    CM_JOB_SUBMITTED, /* all is queued, and the ticket finds out when the queued work
                         ends */
    CM_JOB_DETACHED,  /* all is queued, and nobody asks when the queued work ends */
} cm_job_step;

/* A value of lost_error that is not an errno: a cast could not convert an element. */
enum { CM_LOST_CAST = -1 };

/* How far a copy by the route HOST has come. */
typedef struct cm_host_run {
    cm_cut cut;        /* the pieces that are left */
    cm_copy_way way;   /* how threads copy each piece */
    uint64_t asked_ns; /* when the caller was last asked whether to go on; 0 if it was
                          not asked yet */
} cm_host_run;

/* A second stream of a job, which works on one device beside job->stream, and a block
 * on that device. */
typedef struct cm_device_side {
    cm_stream *stream; /* held; NULL until needed */
    bool is_ahead;     /* `stream` has work, and job->stream does not wait for it yet */
    cm_block *block; /* owned; has the packed bytes of a piece. Unused on the device of
                        the job's own stream, where job->block has them */
} cm_device_side;

typedef struct cm_job {
    cm_list node;      /* in engine->short_jobs, engine->long_jobs or a lane */
    cm_engine *engine; /* borrowed, since the ticket holds a reference to it */
    cm_ticket *ticket; /* held */
    cm_region dst;
    cm_region src;
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    bool converts; /* elements are converted on the way, as `convert` says */
    cm_convert convert;
    cm_plan plan;
    cm_tuning tuning; /* as cm_tuning_resolve() left it */
    bool blocking;    /* the thread that runs the job waits until the job has ended */
    bool overlaps;    /* the ends may share bytes, so their order matters */
    bool is_two_maps; /* the ends overlap because both are maps of one file; their
                         addresses do not show which bytes are the same */
    bool has_more_targets; /* what the host packs is sent to other devices as well */
    bool capturing;     /* request_stream is being captured, so the job only queues its
                           work, and must not ask the device about anything */
    bool is_fill;       /* a fill; unless it blocks, nobody asks when it is done */
    bool in_background; /* a job thread runs the job, which must not keep that thread
                           waiting for long */
    bool has_queued;    /* the stream may be working for this job */
    bool is_populated[2]; /* indexed by cm_side: this end maps a file, whose pages were
                             brought in before the copy began */
    bool lost_track;      /* a wait for the device failed: nobody knows what still
                             runs */
    /* Why a thread of the host could not move its part: the errno of the file or of
     * pages that could not be populated, or CM_LOST_CAST; 0 if all went well. */
    atomic_int lost_error;
    cm_job_step step;
    cm_job_wait wait;
    cm_after awaited; /* borrowed; what the job waits for if `wait` is CM_WAIT_EVENT */
    struct cm_lane *lane;  /* see scheduler.c; NULL for a job that needs none */
    bool is_in_lane;       /* the job has entered `lane`, in which it is alone */
    bool counts_slots;     /* lane->slots_nbytes includes the job's slots_nbytes */
    uint64_t slots_nbytes; /* the bytes of the page-locked slots that the job has */
    uint64_t train_nbytes; /* the bytes of this job and of all jobs that it follows in
                              its lane without a gap */
    uint64_t lane_nbytes;  /* the bytes that the job has worked on since it entered its
                              lane */
    uint64_t turn_nbytes; /* the bytes that the job has worked on since its last turn */
    uint64_t moved_nbytes; /* the bytes of the pieces that are over, as
                              cm_layout_nbytes() counts them */
    cm_wait_hooks hooks; /* of the caller's thread, if that thread waits in the call */
    /* Borrowed; the request of a call that waits for the end of the copy and keeps the
     * ends alive itself (see take_keeps). NULL if the ticket keeps them alive. */
    const cm_copy_request *keeps_source;
    cm_stream *request_stream; /* held; NULL in the background */
    cm_stream *stream;         /* held; the stream that works: request_stream, or one
                                  lent by the engine */
    uint64_t start_event; /* lent, of stream->device; reached when the device begins the
                             copy */
    uint64_t idle_event;  /* lent, of stream->device, while cm_job_wait_stream() waits
                             for it; otherwise 0 */
    uint32_t after_count;
    cm_after *afters;     /* owned array of lent events: what must come first */
    void *host_temporary; /* owned; a copy of a source that overlaps its target */
    cm_block *temporary;  /* owned; such a copy in memory of the device */
    cm_block *block;      /* owned; has the packed bytes of one piece or of two, on the
                             device */
    bool has_pair;        /* `block` is for two pieces */
    cm_status block_status; /* why there is no `block`; the pool is asked only once */
    cm_block *row_numbers; /* owned; numbers of rows that a kernel reads: page-locked in
                              routes/numbered.c, on the device in
                              routes/kernel_rows.c; NULL until needed */
    cm_device_side *sides; /* owned; an array with one side for each device; NULL while
                              none is needed */
    cm_host_run host;
    struct cm_many *many; /* owned; runs to copy together, in place of dst and src */
    struct cm_kernel_rows *rows; /* owned; rows for a kernel, in place of dst and src */
    struct cm_file_job *file;    /* ranges of a file, in place of dst and src; borrowed
                                    unless it is written in the background */
    struct cm_ring *ring; /* owned; see routes/ring.h; made for the first piece */
    cm_targets *targets;  /* owned; see routes/broadcast.c; NULL if there are no further
                             targets */
} cm_job;

/* dependencies.c: mark the ticket as started, so that it can no longer be cancelled.
 * Calling it again is harmless.
 * Fails: CM_ECANCELLED, if it was cancelled before. */
CM_NODISCARD cm_status cm_job_begin(cm_job *job);
/* scheduler.c: say that a job in the background is about to work on `nbytes` more. If
 * other jobs need the job thread more urgently this job is suspended until its next
 * turn, and the answer is CM_ETIMEOUT. */
CM_NODISCARD cm_status cm_job_take_turn(cm_job *job, uint64_t nbytes);
/* scheduler.c: let the next job into the lane of this one. This does nothing for a job
 * that is not in a lane. */
void cm_job_leave_lane(cm_job *job);
/* scheduler.c: ask whether the job may take one more page-locked slot now, or is to
 * wait until another job of its lane has given one back. */
bool cm_job_may_take_slot(const cm_job *job, uint64_t nbytes);
/* scheduler.c: count a slot of `nbytes` that the job takes or, if `nbytes` is negative,
 * one of -nbytes that the job gives back. */
void cm_job_count_slot(cm_job *job, int64_t nbytes);

/* -- dependencies.c: what a job waits for, before it begins and between its pieces. All
 * of these are called by the thread that runs the job -- */

/* Record what must come before the copy: an event behind each stream of request->after,
 * and a reference to each ticket.
 * Fails: CM_ENOMEM, CM_ECAPTURING (one of the streams captures), event_create,
 * event_record. */
CM_NODISCARD cm_status cm_job_record_after(cm_job *job, const cm_copy_request *request);
/* Wait for what was recorded, or make the job's stream wait for it if there is one.
 * Fails: as cm_ticket_depend, cm_job_wait_event; with the failure of the transfer that
 * the copy is chained to. */
CM_NODISCARD cm_status cm_job_wait_after(cm_job *job);
/* True if cm_job_wait_after() would block now. */
bool cm_job_must_wait_after(const cm_job *job);
/* True if the thread that runs the job has to move bytes itself, or to wait for the
 * device. */
bool cm_job_uses_host(const cm_job *job);
/* Set job->capturing, which says whether the request's stream is being captured. */
CM_NODISCARD cm_status cm_job_check_capturing(cm_job *job);
/* Check, once the copy is planned, that a stream that captures can take it.
 * Fails: CM_ECAPTURING, if it cannot. */
CM_NODISCARD cm_status cm_job_check_capture(cm_job *job,
                                            const cm_copy_request *request);
/* True if the job's stream is one that the engine has lent to it. */
static inline bool
cm_job_has_lent_stream(const cm_job *job)
{
    return job->stream != NULL && job->stream != job->request_stream;
}

/* True if the request's own stream can do the work. */
bool cm_job_fits_stream(const cm_job *job);

/* Wait for an event of `device`, or for all that the job's stream has been given. In
 * the background a long wait suspends the job.
 * Fails: CM_ECANCELLED, if the caller or cm_ticket_stop() ends it; CM_ETIMEOUT, if the
 * job is suspended; event_query, stream_query and, for a stream, event_create and
 * event_record. */
CM_NODISCARD cm_status cm_job_wait_event(cm_job *job, int device, uint64_t event);
CM_NODISCARD cm_status cm_job_wait_stream(cm_job *job);
/* Suspend the job until what `wait` names has happened. Its thread goes on to other
 * jobs meanwhile. Returns CM_ETIMEOUT. */
static inline cm_status
cm_job_suspend(cm_job *job, cm_job_wait wait)
{
    job->wait = wait;
    return cm_fail(CM_ETIMEOUT, 0);
}

/* Ask whether the job is to go on. Each call checks whether the ticket was stopped. The
 * hook `interrupted`, which asks the thread that waits for the copy, is called only if
 * its last call, at *asked_ns, was long enough ago (cm_wait_check_interrupted).
 * Fails: CM_ECANCELLED, if the job is not to go on. */
CM_NODISCARD static inline cm_status
cm_job_check_cancelled(const cm_job *job, uint64_t *asked_ns)
{
    return cm_ticket_is_stopped(job->ticket)
               ? cm_fail(CM_ECANCELLED, 0)
               : cm_wait_check_interrupted(&job->hooks, asked_ns);
}

/* True if this end is ordinary memory that is known to map a file. The host populates
 * the pages that it touches there. */
static inline bool
cm_job_is_file(const cm_region *region, cm_end_facts facts)
{
    return region->is_file && cm_kind_is_pageable(region->kind) && !facts.locked;
}

/* True if threads of the host convert the elements. */
static inline bool
cm_job_converts(const cm_job *job)
{
    return job->converts && !job->plan.converts_on_device;
}

static inline bool
cm_job_has_file(const cm_job *job)
{
    return cm_job_is_file(&job->dst, job->dst_facts)
           || cm_job_is_file(&job->src, job->src_facts);
}

/* True if streams may write the source behind the host's back, because it is at least
 * partly page-locked. The host must then wait for them before it reads. */
static inline bool
cm_job_src_is_ordered(const cm_job *job)
{
    return !cm_kind_is_pageable(job->src.kind) || job->src_facts.locked
           || !job->src_facts.whole;
}
