/* SPDX-License-Identifier: Apache-2.0 */
/* One copy being made: what it needs, what it has borrowed and how far it is. Locks: none; a
 * job belongs to one thread at a time. */
#pragma once

#include "transfer/engine/ticket.h"

struct cm_ring;
typedef struct cm_targets cm_targets;
struct cm_many;

typedef struct cm_after {
    uint64_t event;
    int device;
} cm_after;

/* What a job waits for that has left its thread to others. */
typedef enum cm_job_wait {
    CM_WAIT_NONE,  /* it runs, or has not yet */
    CM_WAIT_TURN,  /* for a job thread */
    CM_WAIT_ORDER, /* for what its ticket comes after */
    CM_WAIT_EVENT, /* for `awaited` */
} cm_job_wait;

/* How far a job is, where it goes on after it has waited so. */
typedef enum cm_job_step {
    CM_JOB_ORDER,     /* waits for what comes first */
    CM_JOB_SETTLE,    /* decides what its turn has to come for */
    CM_JOB_MOVE,      /* moves its bytes */
    CM_JOB_DRAIN,     /* all is queued: a job thread unpacks what comes to the host */
    CM_JOB_END,       /* all is queued; over, unless it still waits for that */
    CM_JOB_SUBMITTED, /* all is queued, and the ticket has the rest */
    CM_JOB_DETACHED,  /* all is queued, and nobody asks for the end */
} cm_job_step;

/* In the place of an errno: a cast could not convert an element. */
enum { CM_LOST_CAST = -1 };

/* HOST: how far it is. */
typedef struct cm_host_run {
    cm_cut cut; /* what is left */
    cm_copy_way way;
    uint64_t asked_ns; /* when it was last asked whether to go on; 0: not yet */
} cm_host_run;

/* What a job works in on a device beside its ends and its stream. */
typedef struct cm_device_side {
    cm_stream *stream; /* held; NULL until needed */
    bool is_ahead;     /* it was given what the job's stream does not come after */
    cm_block *block;   /* owned: packed bytes of a piece; not of the stream's device */
} cm_device_side;

typedef struct cm_job {
    cm_list node;      /* in the engine's lists of those that can go on */
    cm_engine *engine; /* borrowed: the ticket holds it */
    cm_ticket *ticket; /* held */
    cm_region dst;
    cm_region src;
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    bool converts;      /* elements become others: */
    cm_convert convert; /* what the host does to them as it moves them */
    cm_plan plan;
    cm_tuning tuning; /* resolved */
    bool blocking;    /* the thread that runs it waits for the end */
    bool overlaps;
    bool is_two_maps;      /* ... as the ends are two maps of one file: their addresses
                              do not tell which byte is in the way of which */
    bool has_more_targets; /* on other devices: what the host packs goes to all */
    bool capturing;        /* request_stream is: queue and return, look at nothing */
    bool is_fill;          /* nobody asks when it is done, unless blocking */
    bool in_background;    /* a job thread runs it, which others need */
    bool has_queued;       /* the stream may be working for us */
    bool is_there[2];      /* by cm_side: of a mapped file, populated ahead */
    bool lost_track;       /* waiting for it failed: nobody knows what still runs */
    atomic_int lost_error; /* errno of pages that could not be populated, or of the
                              file; CM_LOST_CAST; 0: none */
    cm_job_step step;
    cm_job_wait wait;
    cm_after awaited;              /* borrowed */
    uint64_t turn_nbytes;          /* worked on since it was a job thread's turn */
    uint64_t moved_nbytes;         /* in pieces that are over, repeats included */
    cm_wait_hooks hooks;           /* of a caller's thread that waits */
    const cm_copy_request *unkept; /* borrowed: that of a call which waits for the end
                                      and keeps the ends itself
                                      (cm_request_take_keeps()); NULL: the ticket has
                                      the keeps */
    cm_stream *request_stream;     /* held; NULL in the background */
    cm_stream *stream;    /* held: works on it, request_stream or one lent to us */
    uint64_t start_event; /* lent, of stream->device */
    uint64_t idle_event;  /* the same, while cm_job_wait_stream() runs */
    uint32_t after_count;
    cm_after *afters;     /* owned array; events lent */
    void *host_temporary; /* owned: the source of an overlapping copy, read whole */
    cm_block *temporary;  /* the same on the device */
    cm_block *block;      /* owned: packed bytes on the device, of a piece or of two */
    bool has_pair;        /* ... of two */
    cm_status block_status; /* why there is none; asked for once */
    cm_device_side *sides;  /* owned: one for each device; NULL: none is needed yet */
    cm_host_run host;
    struct cm_many *many;     /* owned; runs that go together, instead of dst and src */
    struct cm_file_job *file; /* borrowed; ranges of a file, in the same way */
    struct cm_ring *ring;     /* owned; ring.c's, from the first piece on */
    cm_targets *targets;      /* owned; broadcast.c's: further ones; NULL: none */
} cm_job;

/* dependencies.c: from here on it cannot be cancelled; again and again is harmless. Fails:
 * CM_ECANCELLED. */
CM_NODISCARD cm_status cm_job_begin(cm_job *job);
/* scheduler.c: a job in the background is about to work on `nbytes` more. CM_ETIMEOUT:
 * other jobs need its thread more, so it is suspended until its next turn. */
CM_NODISCARD cm_status cm_job_take_turn(cm_job *job, uint64_t nbytes);

/* -- what a job waits for, before it begins and between its pieces: by the thread that
 * runs it -- */

/* dependencies.c: what must come first. */
CM_NODISCARD cm_status cm_job_record_after(cm_job *job, const cm_copy_request *request);
CM_NODISCARD cm_status cm_job_wait_after(cm_job *job);
/* True when that would have to wait before it can queue work on a stream. */
bool cm_job_must_wait_after(const cm_job *job);
/* True when the thread that runs it has to wait for the device or works itself. */
bool cm_job_uses_host(const cm_job *job);
/* Sets job->capturing. */
CM_NODISCARD cm_status cm_job_look_for_capture(cm_job *job);
/* Fails: CM_ECAPTURING when a stream captures and the copy, planned, cannot be captured. */
CM_NODISCARD cm_status cm_job_check_capture(cm_job *job,
                                            const cm_copy_request *request);
/* `stream` is one lent to the job. */
static inline bool
cm_job_has_own_stream(const cm_job *job)
{
    return job->stream != NULL && job->stream != job->request_stream;
}

/* True when the request's own stream can do the work. */
bool cm_job_fits_stream(const cm_job *job);

/* dependencies.c: waits of the thread that runs the job; CM_ECANCELLED when
 * interrupted. */
CM_NODISCARD cm_status cm_job_wait_event(cm_job *job, int device, uint64_t event);
CM_NODISCARD cm_status cm_job_wait_stream(cm_job *job);
/* Leave the thread to others until that is there; the same is called again then.
 * Returns CM_ETIMEOUT. */
static inline cm_status
cm_job_suspend(cm_job *job, cm_job_wait wait)
{
    job->wait = wait;
    return cm_fail(CM_ETIMEOUT, 0);
}

/* Is it to go on? Looks each time whether it was stopped, and asks the caller now and
 * then (cm_wait_ask). Fails: CM_ECANCELLED. */
CM_NODISCARD static inline cm_status
cm_job_ask(const cm_job *job, uint64_t *asked_ns)
{
    return cm_ticket_is_stopped(job->ticket) ? cm_fail(CM_ECANCELLED, 0)
                                             : cm_wait_ask(&job->hooks, asked_ns);
}

/* An end that is ordinary memory, known to be a mapped file's: the host populates what
 * it touches there. */
static inline bool
cm_job_is_file(const cm_region *region, cm_end_facts facts)
{
    return region->is_file && cm_kind_is_pageable(region->kind) && !facts.locked;
}

/* By the threads of the host. */
static inline bool
cm_job_converts(const cm_job *job)
{
    return job->converts && !job->plan.widens;
}

static inline bool
cm_job_has_file(const cm_job *job)
{
    return cm_job_is_file(&job->dst, job->dst_facts)
           || cm_job_is_file(&job->src, job->src_facts);
}

/* Streams may write the source on their own: it is page-locked, in part at least. */
static inline bool
cm_job_src_is_ordered(const cm_job *job)
{
    return !cm_kind_is_pageable(job->src.kind) || job->src_facts.locked
           || !job->src_facts.whole;
}
