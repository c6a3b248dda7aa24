/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's clockwork: streams that are threads and really late, the order
 * between them, events, gates and captures. What a job does is not known here. Answers
 * bare codes: 0 or a cudaError_t.
 * Locks: one mutex over all of it, never held while a job runs. A stream handle is one that
 * `stream_create` gave, or 0 and 1 (the device's legacy stream) or 2 (the thread's
 * own), on the device that is current for `thread`. */
#ifndef CM_RUNTIME_EMULATED_STREAM_H
#define CM_RUNTIME_EMULATED_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "runtime/emulated.h"
#include "runtime/runtime.h"

/* What one host thread has current; made by emulated.c, used by the thread alone. */
typedef struct cm_emulated_thread {
    struct cm_emulated_thread *next; /* owned by the runtime */
    pid_t id;                        /* the kernel's */
    int device;                      /* -1: no context */
    int capture_mode;
    struct cm_emulated_line *own[CM_MAX_DEVICES]; /* per-thread streams; borrowed */
} cm_emulated_thread;

/* A piece of work: embed it first in a struct of your own. */
typedef struct cm_emulated_job {
    int32_t (*run)(void *context, struct cm_emulated_job *job); /* on the stream's
                                                                   thread */
    void (*drop)(struct cm_emulated_job *job); /* once, whatever happened */
} cm_emulated_job;

typedef struct cm_emulated_streams cm_emulated_streams;

/* As on real devices: the lower number is the more urgent. */
enum { CM_EMULATED_PRIORITY_LEAST = 0, CM_EMULATED_PRIORITY_GREATEST = -5 };

/* What a call answers that a capture elsewhere forbids; the rest is in runtime.h. */
enum {
    CM_CUDA_CAPTURE_ISOLATION = 905,
    CM_CUDA_CAPTURED_EVENT = 907,
};

/* `context` is handed to jobs. Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_emulated_streams_create(const cm_emulated_config *config,
                                                  void *context,
                                                  cm_emulated_streams **out);
/* Opens every gate, waits for all work, joins the threads. */
void cm_emulated_streams_destroy(cm_emulated_streams *streams);

int32_t cm_emulated_streams_open(cm_emulated_streams *streams, int device,
                                 unsigned flags, int priority, uint64_t *out);
/* Work queued on it still runs; a shut gate is opened for that. */
int32_t cm_emulated_streams_close(cm_emulated_streams *streams, uint64_t stream);

/* Queue the job (dropped on failure too); with `wait` until it has run. On a capturing
 * stream it becomes part of the graph, which here means: it never runs. */
int32_t cm_emulated_streams_submit(cm_emulated_streams *streams,
                                   cm_emulated_thread *thread, uint64_t stream,
                                   cm_emulated_job *job, bool wait);
int32_t cm_emulated_streams_query(cm_emulated_streams *streams,
                                  cm_emulated_thread *thread, uint64_t stream,
                                  bool *done);
int32_t cm_emulated_streams_wait(cm_emulated_streams *streams,
                                 cm_emulated_thread *thread, uint64_t stream);
/* Everything on the device, non-blocking streams too. */
int32_t cm_emulated_streams_wait_device(cm_emulated_streams *streams, int device);

typedef struct cm_emulated_stream_info {
    uint64_t id;
    int device;
    int priority;
    bool capturing;
    bool implicit; /* a legacy stream whose blocking sibling captures */
} cm_emulated_stream_info;

int32_t cm_emulated_streams_read(cm_emulated_streams *streams,
                                 cm_emulated_thread *thread, uint64_t stream,
                                 cm_emulated_stream_info *out);
int32_t cm_emulated_streams_gate(cm_emulated_streams *streams,
                                 cm_emulated_thread *thread, uint64_t stream,
                                 bool shut);
int32_t cm_emulated_streams_capture(cm_emulated_streams *streams,
                                    cm_emulated_thread *thread, uint64_t stream,
                                    bool on);
/* True when a capture forbids the thread calls that may synchronise. */
bool cm_emulated_streams_forbid(cm_emulated_streams *streams,
                                const cm_emulated_thread *thread);

/* A thread that has gone leaves its own streams. False, and nothing was done, while one
 * of them has work, is shut or captures. */
bool cm_emulated_streams_leave(cm_emulated_streams *streams,
                               cm_emulated_thread *thread);

/* The failure of a job of the device, if there was one; it sticks until reset. */
int32_t cm_emulated_streams_fault(cm_emulated_streams *streams, int device);
/* Destroy the device's streams and events and forget its fault; its work was waited
 * for. */
void cm_emulated_streams_reset(cm_emulated_streams *streams, int device);
void cm_emulated_streams_count(cm_emulated_streams *streams, cm_emulated_counts *out);

/* -- emulated_event.c ---------------------------------------------------------------- */
int32_t cm_emulated_events_open(cm_emulated_streams *streams, int device,
                                unsigned flags, uint64_t *out);
int32_t cm_emulated_events_close(cm_emulated_streams *streams, uint64_t event);
int32_t cm_emulated_events_record(cm_emulated_streams *streams,
                                  cm_emulated_thread *thread, uint64_t event,
                                  uint64_t stream);
/* All work of the device so far. */
int32_t cm_emulated_events_record_device(cm_emulated_streams *streams, int device,
                                         uint64_t event);
int32_t cm_emulated_events_await(cm_emulated_streams *streams,
                                 cm_emulated_thread *thread, uint64_t stream,
                                 uint64_t event);
int32_t cm_emulated_events_query(cm_emulated_streams *streams,
                                 const cm_emulated_thread *thread, uint64_t event,
                                 bool *done);
int32_t cm_emulated_events_wait(cm_emulated_streams *streams,
                                const cm_emulated_thread *thread, uint64_t event);
int32_t cm_emulated_events_elapsed(cm_emulated_streams *streams, uint64_t start,
                                   uint64_t end, float *milliseconds);

#endif
