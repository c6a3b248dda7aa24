/* SPDX-License-Identifier: Apache-2.0 */
/* The threads behind the streams, and what each piece of work must wait for. */
#include "runtime/emulated_line.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

static void
sleep_ns(uint64_t delay_ns)
{
    struct timespec left = {
        .tv_sec = (time_t)(delay_ns / 1000000000u),
        .tv_nsec = (long)(delay_ns % 1000000000u),
    };
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

/* xorshift64*: the delays of a stream depend on the seed and its id alone. */
static uint64_t
next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545F4914F6CDD1D);
}

void
cm_emulated_item_release_locked(cm_emulated_item *item)
{
    if (item != NULL && --item->refs == 0) {
        free(item);
    }
}

static void
item_drop_deps_locked(cm_emulated_item *item)
{
    for (uint32_t i = 0; i < item->dep_count; i++) {
        cm_emulated_item_release_locked(item->deps[i]);
    }
    item->dep_count = 0;
}

static bool
item_is_free(const cm_emulated_item *item)
{
    for (uint32_t i = 0; i < item->dep_count; i++) {
        if (!item->deps[i]->done) {
            return false;
        }
    }
    return true;
}

void
cm_emulated_item_wait_locked(cm_emulated_streams *streams, const cm_emulated_item *item)
{
    while (!item->done) {
        cm_cond_wait(&streams->progress, &streams->lock);
    }
}

/* Wait for the next item that may run; NULL when the line has ended. */
static cm_emulated_item *
next_item_locked(cm_emulated_line *line)
{
    cm_emulated_streams *streams = line->streams;
    for (;;) {
        if (cm_list_is_empty(&line->queue)) {
            if (line->is_closed) {
                return NULL;
            }
            cm_cond_wait(&line->work, &streams->lock);
        }
        else if (line->is_shut) {
            cm_cond_wait(&line->work, &streams->lock);
        }
        else {
            cm_emulated_item *item =
                CM_LIST_ENTRY(line->queue.next, cm_emulated_item, node);
            if (item_is_free(item)) {
                cm_list_remove(&item->node);
                return item;
            }
            cm_cond_wait(&streams->progress, &streams->lock);
        }
    }
}

static int32_t
run_item(cm_emulated_line *line, cm_emulated_item *item)
{
    cm_emulated_streams *streams = line->streams;
    uint64_t most_ns = (uint64_t)streams->config.max_delay_us * 1000u;
    if (most_ns != 0 && !item->is_prompt) {
        sleep_ns(next_random(&line->random) % (most_ns + 1));
    }
    int32_t code = 0;
    if (item->job != NULL) {
        code = item->job->run(streams->context, item->job);
        item->job->drop(item->job);
        item->job = NULL;
    }
    return code;
}

static void *
line_main(void *arg)
{
    cm_emulated_line *line = arg;
    cm_emulated_streams *streams = line->streams;
    cm_mutex_lock(&streams->lock);
    cm_emulated_item *item;
    while ((item = next_item_locked(line)) != NULL) {
        item_drop_deps_locked(item);
        cm_mutex_unlock(&streams->lock);
        int32_t code = run_item(line, item);
        cm_mutex_lock(&streams->lock);
        if (code != 0) {
            atomic_store(&streams->faults[line->device], code);
        }
        item->end_ns = cm_now_ns();
        item->done = true;
        streams->queued--;
        cm_emulated_item_release_locked(item);
        cm_cond_signal_all(&streams->progress);
    }
    line->is_finished = true;
    cm_mutex_unlock(&streams->lock);
    return NULL;
}

int32_t
cm_emulated_line_open_locked(cm_emulated_streams *streams, cm_emulated_line_kind kind,
                             int device, cm_emulated_line **out)
{
    cm_emulated_line *line = calloc(1, sizeof(*line));
    if (line == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    line->streams = streams;
    line->kind = kind;
    line->device = device;
    line->id = streams->next_id++;
    line->random =
        (streams->config.seed ^ (line->id * UINT64_C(0x9E3779B97F4A7C15))) | 1u;
    cm_list_init(&line->queue);
    if (!cm_is_ok(cm_cond_init(&line->work))) {
        free(line);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    if (!cm_is_ok(cm_thread_start(&line->thread, line_main, line))) {
        cm_cond_fini(&line->work);
        free(line);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    cm_list_push_back(&streams->lines, &line->node);
    *out = line;
    return 0;
}

int32_t
cm_emulated_line_find_locked(cm_emulated_streams *streams, cm_emulated_thread *thread,
                             uint64_t stream, cm_emulated_line **out)
{
    cm_emulated_line **slot;
    cm_emulated_line_kind kind = CM_LINE_LEGACY;
    if (stream > CM_STREAM_PER_THREAD) {
        *out = cm_emulated_handles_find(&streams->by_handle, stream);
        return *out != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
    }
    if (stream == CM_STREAM_PER_THREAD) {
        slot = &thread->own[thread->device];
        kind = CM_LINE_PER_THREAD;
    }
    else {
        slot = &streams->legacy[thread->device];
    }
    if (*slot == NULL) {
        int32_t code =
            cm_emulated_line_open_locked(streams, kind, thread->device, slot);
        if (code != 0) {
            return code;
        }
    }
    *out = *slot;
    return 0;
}

/* Whether an item of `line` comes after what is now last on `other`. */
static bool
must_follow(const cm_emulated_line *line, const cm_emulated_line *other)
{
    if (line == other || line->device != other->device) {
        return false;
    }
    switch (line->kind) {
    case CM_LINE_FENCE:
        return true;
    case CM_LINE_LEGACY:
        return cm_emulated_line_is_blocking(other);
    default:
        return other->kind == CM_LINE_LEGACY && cm_emulated_line_is_blocking(line);
    }
}

static void
item_add_dep(cm_emulated_item *item, cm_emulated_item *dep)
{
    if (dep != NULL && !dep->done) {
        dep->refs++;
        item->deps[item->dep_count++] = dep;
    }
}

int32_t
cm_emulated_line_push_locked(cm_emulated_line *line, cm_emulated_job *job,
                             cm_emulated_item *after, cm_emulated_item **out)
{
    cm_emulated_streams *streams = line->streams;
    size_t most = 1;
    for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
        most += must_follow(line, CM_LIST_ENTRY(n, cm_emulated_line, node));
    }
    cm_emulated_item *item = calloc(1, sizeof(*item) + most * sizeof(item->deps[0]));
    if (item == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    item->refs = 2; /* the worker and line->last */
    item->job = job;
    item->is_prompt = after != NULL;
    item_add_dep(item, after);
    for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
        cm_emulated_line *other = CM_LIST_ENTRY(n, cm_emulated_line, node);
        if (must_follow(line, other)) {
            item_add_dep(item, other->last);
        }
    }
    cm_list_push_back(&line->queue, &item->node);
    cm_emulated_item_release_locked(line->last);
    line->last = item;
    streams->queued++;
    if (out != NULL) {
        item->refs++;
        *out = item;
    }
    cm_cond_signal_all(&line->work);
    return 0;
}

int32_t
cm_emulated_line_check_capture_locked(const cm_emulated_line *line)
{
    if (line->capture != 0) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    if (line->streams->capturing == 0 || line->kind != CM_LINE_LEGACY) {
        return 0;
    }
    const cm_list *lines = &line->streams->lines;
    for (const cm_list *n = lines->next; n != lines; n = n->next) {
        const cm_emulated_line *other = CM_LIST_ENTRY(n, cm_emulated_line, node);
        if (other->capture != 0 && must_follow(line, other)) {
            return CM_CUDA_CAPTURE_IMPLICIT;
        }
    }
    return 0;
}

void
cm_emulated_line_reap(cm_emulated_streams *streams)
{
    for (;;) {
        cm_emulated_line *ended = NULL;
        cm_mutex_lock(&streams->lock);
        for (cm_list *n = streams->lines.next; n != &streams->lines; n = n->next) {
            cm_emulated_line *line = CM_LIST_ENTRY(n, cm_emulated_line, node);
            if (line->is_finished) {
                ended = line;
                cm_list_remove(&line->node);
                cm_emulated_item_release_locked(line->last);
                break;
            }
        }
        cm_mutex_unlock(&streams->lock);
        if (ended == NULL) {
            return;
        }
        cm_thread_join(ended->thread);
        cm_cond_fini(&ended->work);
        free(ended);
    }
}
