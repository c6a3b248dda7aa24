/* SPDX-License-Identifier: Apache-2.0 */
/* One copy being made: what it needs, what it has borrowed and how far it is. Locks: none; a
 * job belongs to one thread at a time. */
#ifndef CM_TRANSFER_ENGINE_JOB_H
#define CM_TRANSFER_ENGINE_JOB_H

#include "transfer/engine/ticket.h"

/* A piece on its way between two devices. */
typedef struct cm_stage {
    cm_block *blocks[2]; /* packed on the source's and on the target's device */
    cm_block *pinned;    /* and between them, where the devices are apart */
    uint64_t event;      /* lent; recorded after the last use */
    bool busy;
} cm_stage;

struct cm_staging;
typedef struct cm_fan cm_fan;
struct cm_many;

typedef struct cm_after {
    uint64_t event;
    int device;
} cm_after;

/* Where a job is that no thread has in hand. */
typedef enum cm_job_place {
    CM_JOB_IN_JOBS,    /* of the engine: for the next worker */
    CM_JOB_IN_PARKED,  /* of the engine: the watcher looks at its event */
    CM_JOB_IN_WAITERS, /* of a ticket, which hands it on */
} cm_job_place;

/* How far a job is that was parked and goes on from there. */
typedef enum cm_job_step {
    CM_JOB_ORDER, /* waits for what comes first */
    CM_JOB_MOVE,
    CM_JOB_END,
} cm_job_step;

typedef struct cm_job {
    cm_list node;
    cm_list bin_node; /* while in engine->jobs */
    int bin;
    cm_engine *engine; /* borrowed: the ticket holds it */
    cm_ticket *ticket; /* held */
    cm_region dst;
    cm_region src;
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    cm_plan plan;
    cm_tuning tuning; /* resolved */
    bool blocking;    /* the thread that runs it waits for the end */
    bool overlaps;
    bool capturing; /* request_stream is: queue and return, look at nothing */
    bool submitted; /* the ticket has the rest */
    bool detached;  /* all is queued and nobody asks for the end */
    bool draining;  /* all is queued; what is left is to unpack on the host */
    bool is_fill;   /* nobody asks when it is done, unless blocking */
    bool may_park; /* a job thread runs it, which others need: nothing waits for long */
    bool is_parked;    /* ... and what it waits for is parked_ticket or parked_event */
    bool is_yielding;  /* ... nothing: others are to have the job thread first */
    bool begun;        /* its ends may have been read or written */
    bool leaves_waits; /* `lent` may still wait for other work, and for nothing of ours
                        */
    bool is_chained;   /* the first of after_tickets must not have failed */
    bool is_file;      /* an end is a mapped file: the host populates what it touches */
    bool has_queued;   /* the stream may be working for us */
    bool has_pair;     /* device_block is for two pieces; counted in the engine */
    bool gather_is_joined; /* `stream` comes after all that it was given */
    bool gather_is_passed; /* gather_stream is held here, and lent to the ticket */
    bool lost_track;       /* waiting for it failed: nobody knows what still runs */
    atomic_int lost_error; /* errno of pages that could not be populated; 0: none */
    unsigned char pattern[4];
    uint32_t pattern_nbytes;
    cm_job_step step;
    cm_job_place place; /* under engine->lock, while ticket->job */
    int parked_device;
    cm_cut host_cut;       /* HOST: what is left */
    cm_copy_way host_way;  /* ... and how it is copied */
    uint64_t turn_nbytes;  /* worked on since it was a job thread's turn */
    uint64_t asked_nbytes; /* HOST: since it was last asked whether to go on */
    uint64_t moved_nbytes; /* in pieces that are over, repeats included */
    uint32_t after_count;
    uint32_t after_ticket_count;
    uint32_t waited_count; /* of them, the first */
    uint32_t looked_count; /* ... that were found far enough: at least these */
    uint32_t next_stage;
    uint32_t stage_count;     /* in use */
    cm_ticket *parked_ticket; /* borrowed from after_tickets; NULL: parked_event */
    uint64_t parked_event;
    bool (*interrupted)(void *argument);
    void *interrupted_argument;
    cm_stream *request_stream; /* held; NULL in the background */
    cm_stream *stream;         /* held: works on it, request_stream or `lent` */
    cm_stream *lent;           /* ours until given back or passed to the ticket */
    cm_stream *gather_stream;  /* lent, beside `stream`; PEER, and pairs of pieces */
    uint64_t start_event;      /* lent, of stream->device */
    uint64_t wait_event;       /* the same, while cm_job_wait_stream() runs */
    cm_after *afters;          /* owned array; events lent */
    cm_ticket **after_tickets; /* owned array, held */
    void *host_temporary;   /* owned: the source of an overlapping copy, read whole */
    cm_block *temporary;    /* the same on the device */
    cm_block *device_block; /* packed bytes of a piece, or of two */
    struct cm_many *many;   /* owned; runs that go together, instead of dst and src */
    struct cm_staging *staging;   /* owned; staging.c's, from the first piece on */
    cm_fan *fan;                  /* owned; fan.c's: further targets; NULL: none */
    const atomic_bool *cancelled; /* borrowed; NULL: never */
    cm_stage stages[CM_STAGE_COUNT];
} cm_job;

/* dependencies.c: from here on it cannot be cancelled; again and again is harmless. Fails:
 * CM_ECANCELLED. */
CM_NODISCARD cm_status cm_job_begin(cm_job *job);
/* scheduler.c: `nbytes` more are to be worked on. CM_ETIMEOUT: by a job thread, which
 * others need more, so the job is parked until it is its turn again. */
CM_NODISCARD cm_status cm_job_take_turn(cm_job *job, uint64_t nbytes);

/* -- what a job waits for, before it begins and between its pieces: by the thread that
 * runs it -- */

/* dependencies.c: what must come first. */
CM_NODISCARD cm_status cm_job_record_after(cm_job *job, const cm_copy_request *request);
CM_NODISCARD cm_status cm_job_wait_after(cm_job *job);
/* At its end: whoever comes after the job's ticket comes after those of its own that
 * are not over. */
void cm_job_leave_order(cm_job *job);
/* True when that would have to wait before it can queue work on a stream. */
bool cm_job_must_wait_after(const cm_job *job);
/* Sets job->capturing. */
CM_NODISCARD cm_status cm_job_look_for_capture(cm_job *job);
/* Fails: CM_ECAPTURING when a stream captures and the copy, planned, cannot be captured. */
CM_NODISCARD cm_status cm_job_check_capture(cm_job *job,
                                            const cm_copy_request *request);
/* True when the request's own stream can do the work. */
bool cm_job_fits_stream(const cm_job *job);

/* dependencies.c: waits of the thread that runs the job; CM_ECANCELLED when
 * interrupted. */
CM_NODISCARD cm_status cm_job_wait_event(cm_job *job, int device, uint64_t event);
CM_NODISCARD cm_status cm_job_wait_stream(cm_job *job);
static inline bool
cm_job_is_interrupted(cm_job *job)
{
    return (job->cancelled != NULL && atomic_load(job->cancelled))
           || (job->interrupted != NULL && job->interrupted(job->interrupted_argument));
}

/* Streams may write the source on their own: it is page-locked, in part at least. */
static inline bool
cm_job_src_is_ordered(const cm_job *job)
{
    return job->src.kind != CM_KIND_PAGEABLE || job->src_facts.locked
           || !job->src_facts.whole;
}

/* Such a source is waited for before the copy begins. */
static inline bool
cm_job_waits_for_source(const cm_job *job)
{
    return cm_routes[job->plan.route].packs && !job->plan.is_download
           && cm_job_src_is_ordered(job);
}

/* scheduler.c: leave the thread to others until the ticket or the event is done.
 * Returns CM_ETIMEOUT. */
CM_NODISCARD cm_status cm_job_park_on_ticket(cm_job *job, cm_ticket *ticket);
CM_NODISCARD cm_status cm_job_park_on_event(cm_job *job, int device, uint64_t event);

#endif
