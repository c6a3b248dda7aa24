/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated_stream.h"

#include <stdlib.h>

#include "runtime/emulated_line.h"

enum { HANDLE_STEP = 16 };

static int
clamp_priority(int priority)
{
    if (priority > CM_EMULATED_PRIORITY_LEAST) {
        return CM_EMULATED_PRIORITY_LEAST;
    }
    return priority < CM_EMULATED_PRIORITY_GREATEST ? CM_EMULATED_PRIORITY_GREATEST
                                                    : priority;
}

cm_status
cm_emulated_streams_create(const cm_emulated_config *config, void *context,
                           cm_emulated_streams **out)
{
    cm_emulated_streams *streams = calloc(1, sizeof(*streams));
    if (streams == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*streams));
    }
    cm_status status = cm_mutex_init(&streams->lock);
    if (!cm_is_ok(status)) {
        free(streams);
        return status;
    }
    status = cm_cond_init(&streams->progress);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&streams->lock);
        free(streams);
        return status;
    }
    streams->config = *config;
    streams->context = context;
    streams->next_handle = 0x10000;
    streams->next_event = 0x20000001;
    streams->next_id = CM_STREAM_PER_THREAD + 1;
    streams->next_capture = 1;
    cm_list_init(&streams->lines);
    *out = streams;
    return cm_ok();
}

static void
line_close_locked(cm_emulated_line *line)
{
    cm_emulated_streams *streams = line->streams;
    if (line->capture != 0) {
        line->capture = 0;
        streams->capturing--;
    }
    if (line->kind == CM_LINE_USER && !line->is_closed) {
        (void)cm_emulated_handles_remove(&streams->by_handle, line->handle);
        streams->reused_handle = line->handle;
        streams->stream_count--;
    }
    line->is_shut = false;
    line->is_closed = true;
    cm_cond_signal_all(&line->work);
}

void
cm_emulated_streams_destroy(cm_emulated_streams *streams)
{
    cm_mutex_lock(&streams->lock);
    for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
        line_close_locked(CM_LIST_ENTRY(n, cm_emulated_line, node));
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_emulated_events_reset_locked(streams, device);
    }
    cm_mutex_unlock(&streams->lock);
    /* Nobody else calls any more, so the list is ours; only `last` needs the lock,
     * because the lines still running may drop what they waited for. */
    for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
        cm_thread_join(CM_LIST_ENTRY(n, cm_emulated_line, node)->thread);
    }
    while (!cm_list_is_empty(&streams->lines)) {
        cm_list *node = cm_list_pop_front(&streams->lines);
        cm_emulated_line *line = CM_LIST_ENTRY(node, cm_emulated_line, node);
        cm_emulated_item_release_locked(line->last);
        cm_cond_fini(&line->work);
        free(line);
    }
    cm_emulated_handles_fini(&streams->by_handle);
    cm_emulated_handles_fini(&streams->events);
    cm_cond_fini(&streams->progress);
    cm_mutex_fini(&streams->lock);
    free(streams);
}

/* Handles come back, as on a real device: who keeps one past its stream hits another.
 */
static uint64_t
take_handle_locked(cm_emulated_streams *streams)
{
    uint64_t handle = streams->reused_handle;
    streams->reused_handle = 0;
    if (handle == 0) {
        handle = streams->next_handle;
        streams->next_handle += HANDLE_STEP;
    }
    return handle;
}

int32_t
cm_emulated_streams_open(cm_emulated_streams *streams, int device, unsigned flags,
                         int priority, uint64_t *out)
{
    if ((flags & ~(unsigned)CM_STREAM_NON_BLOCKING) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_line_reap(streams);
    cm_mutex_lock(&streams->lock);
    cm_emulated_line *line;
    int32_t code = cm_emulated_line_open_locked(streams, CM_LINE_USER, device, &line);
    if (code == 0) {
        line->flags = flags;
        line->priority = clamp_priority(priority);
        line->handle = take_handle_locked(streams);
        if (cm_emulated_handles_add(&streams->by_handle, line->handle, line)) {
            streams->stream_count++;
            *out = line->handle;
        }
        else {
            line->kind = CM_LINE_FENCE; /* has no handle to take back */
            line_close_locked(line);
            code = CM_CUDA_OUT_OF_MEMORY;
        }
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_streams_close(cm_emulated_streams *streams, uint64_t stream)
{
    cm_mutex_lock(&streams->lock);
    cm_emulated_line *line = cm_emulated_handles_find(&streams->by_handle, stream);
    if (line != NULL) {
        line_close_locked(line);
    }
    cm_mutex_unlock(&streams->lock);
    cm_emulated_line_reap(streams);
    return line != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

static int32_t
submit_locked(cm_emulated_streams *streams, cm_emulated_thread *thread, uint64_t stream,
              cm_emulated_job *job, bool wait, bool *queued)
{
    cm_emulated_line *line;
    int32_t code = cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code != 0) {
        return code;
    }
    int device = line->device;
    code = cm_emulated_streams_fault(streams, device);
    if (code != 0) {
        return code;
    }
    code = cm_emulated_line_check_capture_locked(line);
    if (code != 0) {
        return line->capture != 0 ? 0 : code;
    }
    cm_emulated_item *item = NULL;
    code = cm_emulated_line_push_locked(line, job, NULL, wait ? &item : NULL);
    *queued = code == 0;
    if (item != NULL) {
        cm_emulated_item_wait_locked(streams, item);
        cm_emulated_item_release_locked(item);
        code = cm_emulated_streams_fault(streams, device);
    }
    return code;
}

int32_t
cm_emulated_streams_submit(cm_emulated_streams *streams, cm_emulated_thread *thread,
                           uint64_t stream, cm_emulated_job *job, bool wait)
{
    bool queued = false;
    cm_mutex_lock(&streams->lock);
    int32_t code = submit_locked(streams, thread, stream, job, wait, &queued);
    cm_mutex_unlock(&streams->lock);
    if (!queued) {
        job->drop(job);
    }
    return code;
}

static bool
line_is_done(const cm_emulated_line *line)
{
    return line->last == NULL || line->last->done;
}

int32_t
cm_emulated_streams_query(cm_emulated_streams *streams, cm_emulated_thread *thread,
                          uint64_t stream, bool *done)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    int32_t code = cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0) {
        code = cm_emulated_line_check_capture_locked(line);
    }
    if (code == 0) {
        code = cm_emulated_streams_fault(streams, line->device);
    }
    if (code == 0) {
        bool all = line_is_done(line);
        for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
            const cm_emulated_line *other = CM_LIST_ENTRY(n, cm_emulated_line, node);
            if (line->kind == CM_LINE_LEGACY && other->device == line->device
                && cm_emulated_line_is_blocking(other)) {
                all = all && line_is_done(other);
            }
        }
        *done = all;
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

/* Queue a mark and wait for it: on the legacy stream it stands behind all that block.
 */
static int32_t
wait_line_locked(cm_emulated_line *line)
{
    cm_emulated_streams *streams = line->streams;
    int device = line->device;
    cm_emulated_item *item = line->last;
    if (line->kind == CM_LINE_USER || line->kind == CM_LINE_PER_THREAD) {
        if (item == NULL) {
            return cm_emulated_streams_fault(streams, device);
        }
        item->refs++;
    }
    else {
        int32_t code = cm_emulated_line_push_locked(line, NULL, NULL, &item);
        if (code != 0) {
            return code;
        }
    }
    cm_emulated_item_wait_locked(streams, item);
    cm_emulated_item_release_locked(item);
    return cm_emulated_streams_fault(streams, device);
}

int32_t
cm_emulated_streams_wait(cm_emulated_streams *streams, cm_emulated_thread *thread,
                         uint64_t stream)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    int32_t code = cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0) {
        code = cm_emulated_line_check_capture_locked(line);
    }
    if (code == 0) {
        code = wait_line_locked(line);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_streams_wait_device(cm_emulated_streams *streams, int device)
{
    int32_t code = 0;
    cm_mutex_lock(&streams->lock);
    if (streams->fence[device] == NULL) {
        code = cm_emulated_line_open_locked(streams, CM_LINE_FENCE, device,
                                            &streams->fence[device]);
    }
    if (code == 0) {
        code = wait_line_locked(streams->fence[device]);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_streams_read(cm_emulated_streams *streams, cm_emulated_thread *thread,
                         uint64_t stream, cm_emulated_stream_info *out)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    int32_t code = cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0) {
        *out = (cm_emulated_stream_info){
            .id = line->id,
            .device = line->device,
            .priority = line->priority,
            .capturing = line->capture != 0,
            .implicit =
                cm_emulated_line_check_capture_locked(line) == CM_CUDA_CAPTURE_IMPLICIT,
        };
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_streams_gate(cm_emulated_streams *streams, cm_emulated_thread *thread,
                         uint64_t stream, bool shut)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    int32_t code = cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0) {
        line->is_shut = shut;
        cm_cond_signal_all(&line->work);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_streams_capture(cm_emulated_streams *streams, cm_emulated_thread *thread,
                            uint64_t stream, bool on)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    int32_t code = cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0 && on && line->kind == CM_LINE_LEGACY) {
        code = CM_CUDA_CAPTURE_UNSUPPORTED; /* the legacy stream cannot be captured */
    }
    if (code == 0 && on != (line->capture != 0)) {
        line->capture = on ? streams->next_capture++ : 0;
        line->capturer = on ? thread : NULL;
        streams->capturing = on ? streams->capturing + 1 : streams->capturing - 1;
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

bool
cm_emulated_streams_forbid(cm_emulated_streams *streams,
                           const cm_emulated_thread *thread)
{
    cm_mutex_lock(&streams->lock);
    bool forbidden = cm_emulated_streams_forbid_locked(streams, thread);
    cm_mutex_unlock(&streams->lock);
    return forbidden;
}

bool
cm_emulated_streams_leave(cm_emulated_streams *streams, cm_emulated_thread *thread)
{
    bool idle = true;
    cm_mutex_lock(&streams->lock);
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        const cm_emulated_line *line = thread->own[device];
        idle = idle
               && (line == NULL
                   || (line_is_done(line) && !line->is_shut && line->capture == 0));
    }
    for (int device = 0; idle && device < CM_MAX_DEVICES; device++) {
        if (thread->own[device] != NULL) {
            line_close_locked(thread->own[device]);
            thread->own[device] = NULL;
        }
    }
    for (cm_list *n = streams->lines.next; idle && n != &streams->lines; n = n->next) {
        cm_emulated_line *line = CM_LIST_ENTRY(n, cm_emulated_line, node);
        line->capturer = line->capturer == thread ? NULL : line->capturer;
    }
    cm_mutex_unlock(&streams->lock);
    if (idle) {
        cm_emulated_line_reap(streams);
    }
    return idle;
}

int32_t
cm_emulated_streams_fault(cm_emulated_streams *streams, int device)
{
    return atomic_load(&streams->faults[device]);
}

void
cm_emulated_streams_reset(cm_emulated_streams *streams, int device)
{
    cm_mutex_lock(&streams->lock);
    for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
        cm_emulated_line *line = CM_LIST_ENTRY(n, cm_emulated_line, node);
        if (line->device == device && line->kind == CM_LINE_USER && !line->is_closed) {
            line_close_locked(line);
        }
    }
    cm_emulated_events_reset_locked(streams, device);
    atomic_store(&streams->faults[device], 0);
    cm_mutex_unlock(&streams->lock);
    cm_emulated_line_reap(streams);
}

void
cm_emulated_streams_count(cm_emulated_streams *streams, cm_emulated_counts *out)
{
    cm_mutex_lock(&streams->lock);
    out->streams = streams->stream_count;
    out->events = streams->events.count;
    out->queued = streams->queued;
    cm_mutex_unlock(&streams->lock);
}
