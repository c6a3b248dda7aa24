/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's clockwork: streams that are threads and really late, the order
 * between them, events, gates and captures, and what each host thread has current. What
 * a job does is not known here. A stream handle is one that `stream_create` gave, or 0
 * and 1 (the device's legacy stream) or 2 (the thread's own), on the device that is
 * current for the thread. */
#ifndef CM_RUNTIME_EMULATED_STREAM_H
#define CM_RUNTIME_EMULATED_STREAM_H

#include "runtime/emulated/private.h"

/* What the calling thread has current; makes the record, but no context. Fails: out of
 * memory. */
int32_t cm_emulated_self(cm_runtime *rt, cm_emulated_thread **out);
/* The same for calls that need a context: like CUDA's runtime they make device 0
 * current for a thread that has none. */
int32_t cm_emulated_enter(cm_runtime *rt, cm_emulated_thread **out);
/* Enter for a call that a capture forbids. */
int32_t cm_emulated_enter_unsafe(cm_runtime *rt, cm_emulated_thread **out);
/* Enter for a call that a failed device refuses, too. */
int32_t cm_emulated_enter_healthy(cm_runtime *rt, cm_emulated_thread **out);
/* Enter for work on a stream, whose device is *device. */
int32_t cm_emulated_enter_stream(cm_runtime *rt, uint64_t stream,
                                 cm_emulated_thread **out, int *device);
/* True when a capture forbids the thread calls that may synchronise. */
bool cm_emulated_is_forbidden(const cm_emulated *emulated,
                              const cm_emulated_thread *thread);

void cm_emulated_streams_init(cm_emulated *emulated);
/* Opens every gate, waits for all work, joins the threads. Called without the lock,
 * when nobody calls any more. */
void cm_emulated_streams_fini(cm_emulated *emulated);

/* Queue the job (dropped on failure too); with `wait` until it has run. On a capturing
 * stream it becomes part of the graph, which here means: it never runs. */
int32_t cm_emulated_submit(cm_emulated *emulated, cm_emulated_thread *thread,
                           uint64_t stream, cm_emulated_job *job, bool wait);
/* `drop` of a job that owns nothing else. */
void cm_emulated_job_free(cm_emulated_job *job);

/* Wait for everything on the device, non-blocking streams too. */
int32_t cm_emulated_wait_device(cm_emulated *emulated, int device);
/* Destroy the device's streams and events and forget its fault; its work was waited
 * for. */
void cm_emulated_streams_reset(cm_emulated *emulated, int device);

int32_t cm_emulated_gate(cm_emulated *emulated, cm_emulated_thread *thread,
                         uint64_t stream, bool shut);
int32_t cm_emulated_capture(cm_emulated *emulated, cm_emulated_thread *thread,
                            uint64_t stream, bool on);

#endif
