/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events of the emulated device: who asks, then the clockwork's answer.
 * Even calls that name a handle make a context for a thread that has none, as CUDA's
 * do. */
#include "runtime/emulated_private.h"

static int32_t
enter(cm_runtime *rt, cm_emulated_streams **streams, cm_emulated_thread **self)
{
    *streams = cm_emulated_of(rt)->streams;
    return cm_emulated_enter(cm_emulated_of(rt), self);
}

int32_t
cm_emulated_op_stream_priority_range(cm_runtime *rt, int *least, int *greatest)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    if (code == 0) {
        *least = CM_EMULATED_PRIORITY_LEAST;
        *greatest = CM_EMULATED_PRIORITY_GREATEST;
    }
    return code;
}

int32_t
cm_emulated_op_stream_create(cm_runtime *rt, unsigned flags, int priority,
                             uint64_t *out)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    if (code == 0) {
        code = cm_emulated_streams_fault(streams, self->device);
    }
    return code != 0
               ? code
               : cm_emulated_streams_open(streams, self->device, flags, priority, out);
}

int32_t
cm_emulated_op_stream_destroy(cm_runtime *rt, uint64_t stream)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_streams_close(streams, stream);
}

int32_t
cm_emulated_op_stream_query(cm_runtime *rt, uint64_t stream, bool *done)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_streams_query(streams, self, stream, done);
}

int32_t
cm_emulated_op_stream_synchronize(cm_runtime *rt, uint64_t stream)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_streams_wait(streams, self, stream);
}

int32_t
cm_emulated_op_stream_wait_event(cm_runtime *rt, uint64_t stream, uint64_t event)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_events_await(streams, self, stream, event);
}

static int32_t
read_info(cm_runtime *rt, uint64_t stream, cm_emulated_stream_info *out)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_streams_read(streams, self, stream, out);
}

int32_t
cm_emulated_op_stream_get_id(cm_runtime *rt, uint64_t stream, uint64_t *out)
{
    cm_emulated_stream_info info;
    int32_t code = read_info(rt, stream, &info);
    if (code == 0) {
        *out = info.id;
    }
    return code;
}

int32_t
cm_emulated_op_stream_get_device(cm_runtime *rt, uint64_t stream, int *out)
{
    cm_emulated_stream_info info;
    int32_t code = read_info(rt, stream, &info);
    if (code == 0) {
        *out = info.device;
    }
    return code;
}

int32_t
cm_emulated_op_stream_get_priority(cm_runtime *rt, uint64_t stream, int *out)
{
    cm_emulated_stream_info info;
    int32_t code = read_info(rt, stream, &info);
    if (code == 0) {
        *out = info.priority;
    }
    return code;
}

int32_t
cm_emulated_op_stream_is_capturing(cm_runtime *rt, uint64_t stream, bool *out)
{
    cm_emulated_stream_info info;
    int32_t code = read_info(rt, stream, &info);
    if (code == 0 && info.implicit) {
        code = CM_CUDA_CAPTURE_IMPLICIT;
    }
    if (code == 0) {
        *out = info.capturing;
    }
    return code;
}

int32_t
cm_emulated_op_event_create(cm_runtime *rt, unsigned flags, uint64_t *out)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    if (code == 0) {
        code = cm_emulated_streams_fault(streams, self->device);
    }
    return code != 0 ? code
                     : cm_emulated_events_open(streams, self->device, flags, out);
}

int32_t
cm_emulated_op_event_destroy(cm_runtime *rt, uint64_t event)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_events_close(streams, event);
}

int32_t
cm_emulated_op_event_record(cm_runtime *rt, uint64_t event, uint64_t stream)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_events_record(streams, self, event, stream);
}

int32_t
cm_emulated_op_event_query(cm_runtime *rt, uint64_t event, bool *done)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_events_query(streams, self, event, done);
}

int32_t
cm_emulated_op_event_synchronize(cm_runtime *rt, uint64_t event)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code : cm_emulated_events_wait(streams, self, event);
}

int32_t
cm_emulated_op_event_elapsed(cm_runtime *rt, uint64_t start, uint64_t end,
                             float *milliseconds)
{
    cm_emulated_streams *streams;
    cm_emulated_thread *self;
    int32_t code = enter(rt, &streams, &self);
    return code != 0 ? code
                     : cm_emulated_events_elapsed(streams, start, end, milliseconds);
}
