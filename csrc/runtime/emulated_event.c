/* SPDX-License-Identifier: Apache-2.0 */
/* Events: each remembers the item it was recorded as, so that what waits for it is not
 * moved by recording it again. Handles are never used twice: a stale one is always
 * seen. */
#include <stdlib.h>

#include "runtime/emulated_line.h"

enum {
    EVENT_INTERPROCESS = 4,
    EVENT_FLAGS = CM_EVENT_BLOCKING_SYNC | CM_EVENT_DISABLE_TIMING | EVENT_INTERPROCESS,
};

typedef struct event {
    int device;
    unsigned flags;
    uint64_t capture;       /* number of the capture that recorded it last; 0: none */
    cm_emulated_item *item; /* held; NULL: never recorded */
} event;

int32_t
cm_emulated_events_open(cm_emulated_streams *streams, int device, unsigned flags,
                        uint64_t *out)
{
    if ((flags & ~(unsigned)EVENT_FLAGS) != 0
        || ((flags & EVENT_INTERPROCESS) != 0
            && (flags & CM_EVENT_DISABLE_TIMING) == 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    event *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->device = device;
    made->flags = flags;
    cm_mutex_lock(&streams->lock);
    uint64_t handle = streams->next_event;
    bool good = cm_emulated_handles_add(&streams->events, handle, made);
    if (good) {
        streams->next_event += 2; /* odd: never one of a stream */
        *out = handle;
    }
    cm_mutex_unlock(&streams->lock);
    if (!good) {
        free(made);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    return 0;
}

int32_t
cm_emulated_events_close(cm_emulated_streams *streams, uint64_t handle)
{
    cm_mutex_lock(&streams->lock);
    event *gone = cm_emulated_handles_remove(&streams->events, handle);
    if (gone != NULL) {
        cm_emulated_item_release_locked(gone->item);
    }
    cm_mutex_unlock(&streams->lock);
    free(gone);
    return gone != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

void
cm_emulated_events_reset_locked(cm_emulated_streams *streams, int device)
{
    size_t kept = 0;
    for (size_t i = 0; i < streams->events.count; i++) {
        event *each = streams->events.items[i].object;
        if (each->device == device) {
            cm_emulated_item_release_locked(each->item);
            free(each);
        }
        else {
            streams->events.items[kept++] = streams->events.items[i];
        }
    }
    streams->events.count = kept;
}

bool
cm_emulated_streams_forbid_locked(const cm_emulated_streams *streams,
                                  const cm_emulated_thread *thread)
{
    if (streams->capturing == 0 || thread->capture_mode == CM_CAPTURE_RELAXED) {
        return false;
    }
    if (thread->capture_mode == 0) {
        return true;
    }
    const cm_list *lines = &streams->lines;
    for (const cm_list *n = lines->next; n != lines; n = n->next) {
        const cm_emulated_line *line = CM_LIST_ENTRY(n, cm_emulated_line, node);
        if (line->capture != 0 && line->capturer == thread) {
            return true;
        }
    }
    return false;
}

/* True while the capture that recorded the event goes on. */
static bool
is_captured_locked(const cm_emulated_streams *streams, const event *each)
{
    const cm_list *lines = &streams->lines;
    for (const cm_list *n = lines->next; each->capture != 0 && n != lines;
         n = n->next) {
        if (CM_LIST_ENTRY(n, cm_emulated_line, node)->capture == each->capture) {
            return true;
        }
    }
    return false;
}

static int32_t
record_locked(cm_emulated_line *line, event *each)
{
    if (each->device != line->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    int32_t code = cm_emulated_streams_fault(line->streams, line->device);
    if (code == 0) {
        code = cm_emulated_line_check_capture_locked(line);
    }
    cm_emulated_item *item = NULL;
    if (line->capture == 0) {
        if (code == 0) {
            code = cm_emulated_line_push_locked(line, NULL, NULL, &item);
        }
        if (code != 0) {
            return code;
        }
    }
    cm_emulated_item_release_locked(each->item);
    each->item = item;
    each->capture = line->capture;
    return 0;
}

int32_t
cm_emulated_events_record(cm_emulated_streams *streams, cm_emulated_thread *thread,
                          uint64_t handle, uint64_t stream)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    event *each = cm_emulated_handles_find(&streams->events, handle);
    int32_t code = each == NULL
                       ? CM_CUDA_INVALID_HANDLE
                       : cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0) {
        code = record_locked(line, each);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_events_record_device(cm_emulated_streams *streams, int device,
                                 uint64_t handle)
{
    int32_t code = 0;
    cm_mutex_lock(&streams->lock);
    event *each = cm_emulated_handles_find(&streams->events, handle);
    if (each == NULL) {
        code = CM_CUDA_INVALID_HANDLE;
    }
    else if (streams->fence[device] == NULL) {
        code = cm_emulated_line_open_locked(streams, CM_LINE_FENCE, device,
                                            &streams->fence[device]);
    }
    for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
        const cm_emulated_line *line = CM_LIST_ENTRY(n, cm_emulated_line, node);
        if (line->capture != 0 && line->device == device) {
            code = CM_CUDA_CAPTURE_UNSUPPORTED;
        }
    }
    if (code == 0) {
        code = record_locked(streams->fence[device], each);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

static int32_t
await_locked(cm_emulated_line *line, const event *each)
{
    cm_emulated_streams *streams = line->streams;
    int32_t code = cm_emulated_streams_fault(streams, line->device);
    if (code != 0) {
        return code;
    }
    if (is_captured_locked(streams, each)) {
        return line->capture == each->capture ? 0 : CM_CUDA_CAPTURED_EVENT;
    }
    if (line->capture != 0) {
        return each->item == NULL ? 0 : CM_CUDA_CAPTURE_ISOLATION;
    }
    code = cm_emulated_line_check_capture_locked(line);
    if (code != 0 || each->item == NULL || each->item->done) {
        return code;
    }
    return cm_emulated_line_push_locked(line, NULL, each->item, NULL);
}

int32_t
cm_emulated_events_await(cm_emulated_streams *streams, cm_emulated_thread *thread,
                         uint64_t stream, uint64_t handle)
{
    cm_emulated_line *line;
    cm_mutex_lock(&streams->lock);
    const event *each = cm_emulated_handles_find(&streams->events, handle);
    int32_t code = each == NULL
                       ? CM_CUDA_INVALID_HANDLE
                       : cm_emulated_line_find_locked(streams, thread, stream, &line);
    if (code == 0) {
        code = await_locked(line, each);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

/* The event, if the host may ask about it now. */
static int32_t
find_for_host_locked(cm_emulated_streams *streams, const cm_emulated_thread *thread,
                     uint64_t handle, event **out)
{
    *out = cm_emulated_handles_find(&streams->events, handle);
    if (*out == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    if (cm_emulated_streams_forbid_locked(streams, thread)) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    if (is_captured_locked(streams, *out)) {
        return CM_CUDA_CAPTURED_EVENT;
    }
    return cm_emulated_streams_fault(streams, (*out)->device);
}

int32_t
cm_emulated_events_query(cm_emulated_streams *streams, const cm_emulated_thread *thread,
                         uint64_t handle, bool *done)
{
    event *each;
    cm_mutex_lock(&streams->lock);
    int32_t code = find_for_host_locked(streams, thread, handle, &each);
    if (code == 0) {
        *done = each->item == NULL || each->item->done;
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_events_wait(cm_emulated_streams *streams, const cm_emulated_thread *thread,
                        uint64_t handle)
{
    event *each;
    cm_mutex_lock(&streams->lock);
    int32_t code = find_for_host_locked(streams, thread, handle, &each);
    if (code == 0 && each->item != NULL) {
        int device = each->device;
        cm_emulated_item *item = each->item; /* the event may be destroyed meanwhile */
        item->refs++;
        cm_emulated_item_wait_locked(streams, item);
        cm_emulated_item_release_locked(item);
        code = cm_emulated_streams_fault(streams, device);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}

int32_t
cm_emulated_events_elapsed(cm_emulated_streams *streams, uint64_t start, uint64_t end,
                           float *milliseconds)
{
    int32_t code = 0;
    cm_mutex_lock(&streams->lock);
    const event *first = cm_emulated_handles_find(&streams->events, start);
    const event *second = cm_emulated_handles_find(&streams->events, end);
    if (first == NULL || second == NULL || first->device != second->device
        || ((first->flags | second->flags) & CM_EVENT_DISABLE_TIMING) != 0
        || first->item == NULL || second->item == NULL) {
        code = CM_CUDA_INVALID_HANDLE;
    }
    else if (!first->item->done || !second->item->done) {
        code = CM_CUDA_NOT_READY;
    }
    else {
        double ns = (double)second->item->end_ns - (double)first->item->end_ns;
        *milliseconds = (float)(ns / 1e6);
    }
    cm_mutex_unlock(&streams->lock);
    return code;
}
