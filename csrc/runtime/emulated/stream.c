/* SPDX-License-Identifier: Apache-2.0 */
/* A queue is the thread behind a stream, an item is one piece of work in it. An event
 * remembers the item it was recorded as, so that what waits for it is not moved by
 * recording it again. Handles of events are never used twice: a stale one is always
 * seen. */
#include "runtime/emulated/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* As on real devices: the lower number is the more urgent. */
enum { PRIORITY_LEAST = 0, PRIORITY_GREATEST = -5 };

typedef enum cm_stream_thread_kind {
    CM_QUEUE_USER,
    CM_QUEUE_LEGACY,
    CM_QUEUE_PER_THREAD,
    CM_QUEUE_FENCE, /* our own, for events over a whole device */
} cm_stream_thread_kind;

typedef struct cm_emulated_item {
    cm_list node;  /* in queue->items until it runs */
    unsigned refs; /* queue or worker, `last`, events, items that depend on it */
    bool done;
    bool is_prompt;       /* no delay of its own: a mere wait */
    uint64_t end_ns;      /* valid once done */
    cm_emulated_job *job; /* owned; NULL: a mark */
    uint32_t dep_count;
    struct cm_emulated_item *deps[]; /* held; must be done before it runs */
} cm_emulated_item;

typedef struct cm_stream_thread {
    cm_list node; /* in streams->queues */
    cm_emulated *emulated;
    cm_stream_thread_kind kind;
    uint64_t handle; /* user streams only */
    uint64_t id;
    int device;
    unsigned flags;
    int priority;
    bool is_shut;
    bool is_closed;   /* no more work will come */
    bool is_finished; /* its thread is about to end; may be joined */
    uint64_t capture; /* number of the capture under way; 0: none */
    const cm_emulated_thread *capturer;
    cm_list items;
    cm_emulated_item *last; /* held: the newest, maybe done; NULL: never any */
    cm_cond work;
    cm_thread thread;
    uint64_t random; /* used by its own thread alone */
} cm_stream_thread;

enum {
    EVENT_INTERPROCESS = 4,
    EVENT_FLAGS = CM_EVENT_BLOCKING_SYNC | CM_EVENT_DISABLE_TIMING | EVENT_INTERPROCESS,
    HANDLE_STEP = 16,
};

typedef struct event {
    int device;
    unsigned flags;
    uint64_t capture;       /* number of the capture that recorded it last; 0: none */
    cm_emulated_item *item; /* held; NULL: never recorded */
} event;

#define EACH_QUEUE(emulated, queue)                                                    \
    cm_stream_thread *queue = FIRST_QUEUE(emulated);                                   \
    &queue->node != &(emulated)->streams.queues;                                       \
    queue = CM_LIST_ENTRY(queue->node.next, cm_stream_thread, node)
#define FIRST_QUEUE(emulated)                                                          \
    CM_LIST_ENTRY((emulated)->streams.queues.next, cm_stream_thread, node)

/* ---- the threads behind the streams, and what each piece of work must wait for --------- */

/* True when the queue takes part in the order with its device's legacy stream. */
static bool
is_blocking(const cm_stream_thread *queue)
{
    return (queue->kind == CM_QUEUE_USER
            && (queue->flags & CM_STREAM_NON_BLOCKING) == 0)
           || queue->kind == CM_QUEUE_PER_THREAD;
}

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

static void
item_release(cm_emulated_item *item)
{
    if (item != NULL && --item->refs == 0) {
        free(item);
    }
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

/* Wait until the item is done, and let go of it; the device's fault. */
static int32_t
item_await(cm_emulated *emulated, cm_emulated_item *item, int device)
{
    while (!item->done) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
    item_release(item);
    return emulated->streams.faults[device];
}

/* Wait for the next item that may run; NULL when the queue has ended. */
static cm_emulated_item *
next_item(cm_stream_thread *queue)
{
    cm_emulated *emulated = queue->emulated;
    for (;;) {
        cm_emulated_item *item =
            CM_LIST_ENTRY(queue->items.next, cm_emulated_item, node);
        if (cm_list_is_empty(&queue->items) || queue->is_shut) {
            if (cm_list_is_empty(&queue->items) && queue->is_closed) {
                return NULL;
            }
            cm_cond_wait(&queue->work, &emulated->lock);
        }
        else if (item_is_free(item)) {
            cm_list_remove(&item->node);
            return item;
        }
        else {
            cm_cond_wait(&emulated->changed, &emulated->lock);
        }
    }
}

static void
run_item(cm_stream_thread *queue, cm_emulated_item *item)
{
    cm_emulated *emulated = queue->emulated;
    for (uint32_t i = 0; i < item->dep_count; i++) {
        item_release(item->deps[i]);
    }
    item->dep_count = 0;
    uint64_t most_ns = (uint64_t)emulated->config.max_delay_us * 1000u;
    if (most_ns != 0 && !item->is_prompt) {
        cm_mutex_unlock(&emulated->lock);
        sleep_ns(next_random(&queue->random) % (most_ns + 1));
        cm_mutex_lock(&emulated->lock);
    }
    if (item->job != NULL) {
        int32_t code = item->job->run(emulated, item->job);
        if (code != 0) {
            emulated->streams.faults[queue->device] = code;
        }
        item->job->drop(item->job);
        item->job = NULL;
    }
    item->end_ns = cm_now_ns();
    item->done = true;
    emulated->streams.queued--;
    item_release(item);
    cm_cond_signal_all(&emulated->changed);
}

static void *
queue_main(void *arg)
{
    cm_stream_thread *queue = arg;
    cm_emulated *emulated = queue->emulated;
    cm_mutex_lock(&emulated->lock);
    cm_emulated_item *item;
    while ((item = next_item(queue)) != NULL) {
        run_item(queue, item);
    }
    queue->is_finished = true;
    cm_mutex_unlock(&emulated->lock);
    return NULL;
}

static int32_t
queue_open(cm_emulated *emulated, cm_stream_thread_kind kind, int device,
           cm_stream_thread **out)
{
    cm_stream_thread *queue = calloc(1, sizeof(*queue));
    if (queue == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    queue->emulated = emulated;
    queue->kind = kind;
    queue->device = device;
    queue->id = emulated->streams.next_id++;
    queue->random =
        (emulated->config.seed ^ (queue->id * UINT64_C(0x9E3779B97F4A7C15))) | 1u;
    cm_list_init(&queue->items);
    if (!cm_is_ok(cm_cond_init(&queue->work))) {
        free(queue);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    if (!cm_is_ok(cm_thread_start(&queue->thread, queue_main, queue))) {
        cm_cond_fini(&queue->work);
        free(queue);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    cm_list_push_back(&emulated->streams.queues, &queue->node);
    *out = queue;
    return 0;
}

static void
queue_close(cm_stream_thread *queue)
{
    cm_emulated_streams *streams = &queue->emulated->streams;
    if (queue->capture != 0) {
        queue->capture = 0;
        streams->capturing--;
    }
    if (queue->kind == CM_QUEUE_USER && !queue->is_closed) {
        (void)cm_emulated_handles_remove(&streams->by_handle, queue->handle);
        streams->reused_handle = queue->handle;
    }
    queue->is_shut = false;
    queue->is_closed = true;
    cm_cond_signal_all(&queue->work);
}

/* Join and free a queue that has ended, or is about to. */
static void
queue_free(cm_stream_thread *queue)
{
    cm_list_remove(&queue->node);
    cm_thread_join(queue->thread);
    item_release(queue->last);
    cm_cond_fini(&queue->work);
    free(queue);
}

/* Join and free the queues that have ended; their threads need no lock any more. */
static void
reap(cm_emulated *emulated)
{
    cm_list *queues = &emulated->streams.queues;
    for (cm_list *n = queues->next, *next; n != queues; n = next) {
        cm_stream_thread *queue = CM_LIST_ENTRY(n, cm_stream_thread, node);
        next = n->next;
        if (queue->is_finished) {
            queue_free(queue);
        }
    }
}

/* The queue behind a handle; makes default queues on first use. */
static int32_t
queue_find(cm_emulated *emulated, cm_emulated_thread *thread, uint64_t stream,
           cm_stream_thread **out)
{
    cm_stream_thread **slot = &emulated->streams.legacy[thread->device];
    cm_stream_thread_kind kind = CM_QUEUE_LEGACY;
    if (stream > CM_STREAM_PER_THREAD) {
        *out = cm_emulated_handles_find(&emulated->streams.by_handle, stream);
        return *out != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
    }
    if (stream == CM_STREAM_PER_THREAD) {
        slot = &thread->own[thread->device];
        kind = CM_QUEUE_PER_THREAD;
    }
    if (*slot == NULL) {
        CM_TRY_CODE(queue_open(emulated, kind, thread->device, slot));
    }
    *out = *slot;
    return 0;
}

/* The same, of a call that the thread makes: it gets a context. */
static int32_t
queue_enter(cm_runtime *rt, uint64_t stream, cm_stream_thread **out)
{
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    return queue_find(cm_emulated_of(rt), self, stream, out);
}

static int32_t
fence_find(cm_emulated *emulated, int device, cm_stream_thread **out)
{
    cm_stream_thread **fence = &emulated->streams.fence[device];
    if (*fence == NULL) {
        CM_TRY_CODE(queue_open(emulated, CM_QUEUE_FENCE, device, fence));
    }
    *out = *fence;
    return 0;
}

/* Whether an item of `queue` comes after what is now last on `other`. */
static bool
must_follow(const cm_stream_thread *queue, const cm_stream_thread *other)
{
    if (queue == other || queue->device != other->device) {
        return false;
    }
    switch (queue->kind) {
    case CM_QUEUE_FENCE:
        return true;
    case CM_QUEUE_LEGACY:
        return is_blocking(other);
    default:
        return other->kind == CM_QUEUE_LEGACY && is_blocking(queue);
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

/* Queue `job` (owned on success) or a mark behind what CUDA's order puts before it,
 * `after` (may be NULL) included. *out is held for the caller unless `out` is NULL. */
static int32_t
queue_push(cm_stream_thread *queue, cm_emulated_job *job, cm_emulated_item *after,
           cm_emulated_item **out)
{
    cm_emulated *emulated = queue->emulated;
    size_t most = 1;
    for (EACH_QUEUE(emulated, other)) {
        most += must_follow(queue, other);
    }
    cm_emulated_item *item = calloc(1, sizeof(*item) + most * sizeof(item->deps[0]));
    if (item == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    item->refs = 2; /* the worker and queue->last */
    item->job = job;
    item->is_prompt = after != NULL;
    item_add_dep(item, after);
    for (EACH_QUEUE(emulated, other)) {
        if (must_follow(queue, other)) {
            item_add_dep(item, other->last);
        }
    }
    cm_list_push_back(&queue->items, &item->node);
    item_release(queue->last);
    queue->last = item;
    emulated->streams.queued++;
    if (out != NULL) {
        item->refs++;
        *out = item;
    }
    cm_cond_signal_all(&queue->work);
    return 0;
}

/* The capture that the queue takes part in or would break: 0 or the code to answer. */
static int32_t
check_capture(const cm_stream_thread *queue)
{
    if (queue->capture != 0) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    if (queue->emulated->streams.capturing == 0 || queue->kind != CM_QUEUE_LEGACY) {
        return 0;
    }
    for (EACH_QUEUE(queue->emulated, other)) {
        if (other->capture != 0 && must_follow(queue, other)) {
            return CM_CUDA_CAPTURE_IMPLICIT;
        }
    }
    return 0;
}

static bool
queue_is_done(const cm_stream_thread *queue)
{
    return queue->last == NULL || queue->last->done;
}

/* Queue a mark and wait for it: on the legacy stream it stands behind all that block.
 */
static int32_t
queue_wait(cm_stream_thread *queue)
{
    cm_emulated_item *item = queue->last;
    if (queue->kind == CM_QUEUE_LEGACY || queue->kind == CM_QUEUE_FENCE) {
        CM_TRY_CODE(queue_push(queue, NULL, NULL, &item));
    }
    else if (item == NULL) {
        return queue->emulated->streams.faults[queue->device];
    }
    else {
        item->refs++;
    }
    return item_await(queue->emulated, item, queue->device);
}

void
cm_emulated_job_free(cm_emulated_job *job)
{
    free(job);
}

/* *queued: the job belongs to the queue. */
static int32_t
submit(cm_emulated *emulated, cm_emulated_thread *thread, uint64_t stream,
       cm_emulated_job *job, bool wait, bool *queued)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, thread, stream, &queue));
    int device = queue->device;
    CM_TRY_CODE(emulated->streams.faults[device]);
    int32_t code = check_capture(queue);
    if (code != 0) {
        return queue->capture != 0 ? 0 : code;
    }
    cm_emulated_item *item = NULL;
    CM_TRY_CODE(queue_push(queue, job, NULL, wait ? &item : NULL));
    *queued = true;
    return wait ? item_await(emulated, item, device) : 0;
}

int32_t
cm_emulated_submit(cm_emulated *emulated, cm_emulated_thread *thread, uint64_t stream,
                   cm_emulated_job *job, bool wait)
{
    bool queued = false;
    int32_t code = submit(emulated, thread, stream, job, wait, &queued);
    if (!queued) {
        job->drop(job);
    }
    return code;
}

int32_t
cm_emulated_wait_device(cm_emulated *emulated, int device)
{
    cm_stream_thread *fence;
    CM_TRY_CODE(fence_find(emulated, device, &fence));
    return queue_wait(fence);
}

int32_t
cm_emulated_gate(cm_emulated *emulated, cm_emulated_thread *thread, uint64_t stream,
                 bool shut)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, thread, stream, &queue));
    queue->is_shut = shut;
    cm_cond_signal_all(&queue->work);
    return 0;
}

int32_t
cm_emulated_capture(cm_emulated *emulated, cm_emulated_thread *thread, uint64_t stream,
                    bool on)
{
    cm_emulated_streams *streams = &emulated->streams;
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, thread, stream, &queue));
    if (on && queue->kind == CM_QUEUE_LEGACY) {
        return CM_CUDA_CAPTURE_UNSUPPORTED; /* the legacy stream cannot be captured */
    }
    if (on != (queue->capture != 0)) {
        queue->capture = on ? streams->next_capture++ : 0;
        queue->capturer = on ? thread : NULL;
        streams->capturing = on ? streams->capturing + 1 : streams->capturing - 1;
    }
    return 0;
}

/* ---- what a host thread has current, and what stands before its calls ------------------ */

/* Leave the own streams of a thread that has gone. False, and nothing was done, while
 * one of them has work, is shut or captures. */
static bool
leave(cm_emulated *emulated, cm_emulated_thread *thread)
{
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        const cm_stream_thread *queue = thread->own[device];
        if (queue != NULL
            && (!queue_is_done(queue) || queue->is_shut || queue->capture != 0)) {
            return false;
        }
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (thread->own[device] != NULL) {
            queue_close(thread->own[device]);
            thread->own[device] = NULL;
        }
    }
    for (EACH_QUEUE(emulated, queue)) {
        queue->capturer = queue->capturer == thread ? NULL : queue->capturer;
    }
    reap(emulated);
    return true;
}

/* The record of a thread that has gone, out of the list; NULL: none. The key has no
 * destructor for it, which could run while the device is closed. */
static cm_emulated_thread *
take_left(cm_emulated *emulated, pid_t self)
{
    pid_t process = getpid();
    cm_emulated_thread **at = &emulated->threads;
    while (*at != NULL && (*at)->id != self /* the thread that had the number before has
                                               ended */
           && (syscall(SYS_tgkill, process, (*at)->id, 0) == 0 || errno != ESRCH)) {
        at = &(*at)->next;
    }
    cm_emulated_thread *left = *at;
    if (left != NULL) {
        *at = left->next;
    }
    return left;
}

/* Last, so that the next search finds others before it. */
static void
put_last(cm_emulated *emulated, cm_emulated_thread *thread)
{
    thread->next = NULL;
    cm_emulated_thread **at = &emulated->threads;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = thread;
}

static int32_t
make_record(cm_emulated *emulated, cm_emulated_thread **out)
{
    pid_t id = (pid_t)syscall(SYS_gettid);
    cm_emulated_thread *self = take_left(emulated, id);
    if (self != NULL && !leave(emulated, self)) {
        put_last(emulated, self);
        self = NULL;
    }
    if (self == NULL) {
        self = calloc(1, sizeof(*self));
    }
    if (self == NULL || pthread_setspecific(emulated->key, self) != 0) {
        free(self);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    self->id = id;
    self->device = -1;
    self->capture_mode = 0;
    put_last(emulated, self);
    *out = self;
    return 0;
}

int32_t
cm_emulated_self(cm_runtime *rt, cm_emulated_thread **out)
{
    *out = pthread_getspecific(cm_emulated_of(rt)->key);
    return CM_LIKELY(*out != NULL) ? 0 : make_record(cm_emulated_of(rt), out);
}

int32_t
cm_emulated_enter(cm_runtime *rt, cm_emulated_thread **out)
{
    if (rt->device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    CM_TRY_CODE(cm_emulated_self(rt, out));
    (*out)->device = (*out)->device < 0 ? 0 : (*out)->device;
    return 0;
}

int32_t
cm_emulated_enter_unsafe(cm_runtime *rt, cm_emulated_thread **out)
{
    CM_TRY_CODE(cm_emulated_enter(rt, out));
    return cm_emulated_is_forbidden(cm_emulated_of(rt), *out)
               ? CM_CUDA_CAPTURE_UNSUPPORTED
               : 0;
}

int32_t
cm_emulated_enter_healthy(cm_runtime *rt, cm_emulated_thread **out)
{
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, out));
    return cm_emulated_of(rt)->streams.faults[(*out)->device];
}

int32_t
cm_emulated_enter_stream(cm_runtime *rt, uint64_t stream, cm_emulated_thread **out,
                         int *device)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(cm_emulated_enter(rt, out));
    CM_TRY_CODE(queue_find(cm_emulated_of(rt), *out, stream, &queue));
    *device = queue->device;
    return 0;
}

bool
cm_emulated_is_forbidden(const cm_emulated *emulated, const cm_emulated_thread *thread)
{
    if (emulated->streams.capturing == 0
        || thread->capture_mode == CM_CAPTURE_RELAXED) {
        return false;
    }
    if (thread->capture_mode == 0) {
        return true;
    }
    for (EACH_QUEUE(emulated, queue)) {
        if (queue->capture != 0 && queue->capturer == thread) {
            return true;
        }
    }
    return false;
}

/* ---- streams --------------------------------------------------------------------------- */

void
cm_emulated_streams_init(cm_emulated *emulated)
{
    cm_emulated_streams *streams = &emulated->streams;
    streams->next_handle = 0x10000;
    streams->next_event = 0x20000001;
    streams->next_id = CM_STREAM_PER_THREAD + 1;
    streams->next_capture = 1;
    cm_list_init(&streams->queues);
}

static void
reset_events(cm_emulated *emulated, int device)
{
    cm_emulated_handles *events = &emulated->streams.events;
    size_t kept = 0;
    for (size_t i = 0; i < events->count; i++) {
        event *each = events->items[i].object;
        if (each->device == device) {
            item_release(each->item);
            free(each);
        }
        else {
            events->items[kept++] = events->items[i];
        }
    }
    events->count = kept;
}

void
cm_emulated_streams_fini(cm_emulated *emulated)
{
    cm_emulated_streams *streams = &emulated->streams;
    cm_mutex_lock(&emulated->lock);
    for (EACH_QUEUE(emulated, queue)) {
        queue_close(queue);
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        reset_events(emulated, device);
    }
    /* A queue that ends may be waited for by others, so all end before one is freed. */
    while (streams->queued != 0) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
    cm_mutex_unlock(&emulated->lock);
    while (!cm_list_is_empty(&streams->queues)) {
        queue_free(FIRST_QUEUE(emulated));
    }
    cm_emulated_handles_fini(&streams->by_handle);
    cm_emulated_handles_fini(&streams->events);
}

/* Handles come back, as on a real device: one that is kept past its stream names
 * another.
 */
static uint64_t
take_handle(cm_emulated_streams *streams)
{
    uint64_t handle = streams->reused_handle;
    streams->reused_handle = 0;
    if (handle == 0) {
        handle = streams->next_handle;
        streams->next_handle += HANDLE_STEP;
    }
    return handle;
}

void
cm_emulated_streams_reset(cm_emulated *emulated, int device)
{
    for (EACH_QUEUE(emulated, queue)) {
        if (queue->device == device && queue->kind == CM_QUEUE_USER
            && !queue->is_closed) {
            queue_close(queue);
        }
    }
    reset_events(emulated, device);
    emulated->streams.faults[device] = 0;
    reap(emulated);
}

int32_t
cm_emulated_op_stream_priority_range(cm_runtime *rt, int *least, int *greatest)
{
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    *least = PRIORITY_LEAST;
    *greatest = PRIORITY_GREATEST;
    return 0;
}

static int
clamp_priority(int priority)
{
    priority = priority > PRIORITY_LEAST ? PRIORITY_LEAST : priority;
    return priority < PRIORITY_GREATEST ? PRIORITY_GREATEST : priority;
}

int32_t
cm_emulated_op_stream_create(cm_runtime *rt, unsigned flags, int priority,
                             uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_streams *streams = &emulated->streams;
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    CM_TRY_CODE(streams->faults[self->device]);
    if ((flags & ~(unsigned)CM_STREAM_NON_BLOCKING) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    reap(emulated);
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_open(emulated, CM_QUEUE_USER, self->device, &queue));
    queue->flags = flags;
    queue->priority = clamp_priority(priority);
    queue->handle = take_handle(streams);
    if (!cm_emulated_handles_add(&streams->by_handle, queue->handle, queue)) {
        queue->kind = CM_QUEUE_FENCE; /* has no handle to take back */
        queue_close(queue);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *out = queue->handle;
    return 0;
}

/* Work queued on it still runs; a shut gate is opened for that. */
int32_t
cm_emulated_op_stream_destroy(cm_runtime *rt, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    cm_stream_thread *queue =
        cm_emulated_handles_find(&emulated->streams.by_handle, stream);
    if (queue == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    queue_close(queue);
    reap(emulated);
    return 0;
}

int32_t
cm_emulated_op_stream_query(cm_runtime *rt, uint64_t stream, bool *done)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_enter(rt, stream, &queue));
    CM_TRY_CODE(check_capture(queue));
    CM_TRY_CODE(emulated->streams.faults[queue->device]);
    bool all = queue_is_done(queue);
    for (EACH_QUEUE(emulated, other)) {
        if (queue->kind == CM_QUEUE_LEGACY && other->device == queue->device
            && is_blocking(other)) {
            all = all && queue_is_done(other);
        }
    }
    *done = all;
    return 0;
}

int32_t
cm_emulated_op_stream_synchronize(cm_runtime *rt, uint64_t stream)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_enter(rt, stream, &queue));
    CM_TRY_CODE(check_capture(queue));
    return queue_wait(queue);
}

int32_t
cm_emulated_op_stream_get_id(cm_runtime *rt, uint64_t stream, uint64_t *out)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_enter(rt, stream, &queue));
    *out = queue->id;
    return 0;
}

int32_t
cm_emulated_op_stream_get_device(cm_runtime *rt, uint64_t stream, int *out)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_enter(rt, stream, &queue));
    *out = queue->device;
    return 0;
}

int32_t
cm_emulated_op_stream_get_priority(cm_runtime *rt, uint64_t stream, int *out)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_enter(rt, stream, &queue));
    *out = queue->priority;
    return 0;
}

int32_t
cm_emulated_op_stream_is_capturing(cm_runtime *rt, uint64_t stream, bool *out)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_enter(rt, stream, &queue));
    if (check_capture(queue) == CM_CUDA_CAPTURE_IMPLICIT) {
        return CM_CUDA_CAPTURE_IMPLICIT; /* a blocking sibling captures */
    }
    *out = queue->capture != 0;
    return 0;
}

int32_t
cm_emulated_op_capture_mode_exchange(cm_runtime *rt, int *mode)
{
    if (*mode < 0 || *mode > CM_CAPTURE_RELAXED) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_self(rt, &self));
    int before = self->capture_mode;
    self->capture_mode = *mode;
    *mode = before;
    return 0;
}

/* ---- events ---------------------------------------------------------------------------- */

int32_t
cm_emulated_op_event_create(cm_runtime *rt, unsigned flags, uint64_t *out)
{
    cm_emulated_streams *streams = &cm_emulated_of(rt)->streams;
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    CM_TRY_CODE(streams->faults[self->device]);
    if ((flags & ~(unsigned)EVENT_FLAGS) != 0
        || ((flags & EVENT_INTERPROCESS) != 0
            && (flags & CM_EVENT_DISABLE_TIMING) == 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    event *made = calloc(1, sizeof(*made));
    uint64_t handle = streams->next_event;
    if (made == NULL || !cm_emulated_handles_add(&streams->events, handle, made)) {
        free(made);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->device = self->device;
    made->flags = flags;
    streams->next_event += 2; /* odd: never one of a stream */
    *out = handle;
    return 0;
}

int32_t
cm_emulated_op_event_destroy(cm_runtime *rt, uint64_t handle)
{
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    event *gone =
        cm_emulated_handles_remove(&cm_emulated_of(rt)->streams.events, handle);
    if (gone == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    item_release(gone->item);
    free(gone);
    return 0;
}

static int32_t
event_find(cm_runtime *rt, uint64_t handle, event **out)
{
    *out = cm_emulated_handles_find(&cm_emulated_of(rt)->streams.events, handle);
    return *out != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

/* True while the capture that recorded the event goes on. */
static bool
is_captured(const cm_emulated *emulated, const event *each)
{
    for (EACH_QUEUE(emulated, queue)) {
        if (each->capture != 0 && queue->capture == each->capture) {
            return true;
        }
    }
    return false;
}

static int32_t
record(cm_stream_thread *queue, event *each)
{
    if (each->device != queue->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    cm_emulated_item *item = NULL;
    if (queue->capture == 0) {
        CM_TRY_CODE(queue->emulated->streams.faults[queue->device]);
        CM_TRY_CODE(check_capture(queue));
        CM_TRY_CODE(queue_push(queue, NULL, NULL, &item));
    }
    item_release(each->item);
    each->item = item;
    each->capture = queue->capture;
    return 0;
}

int32_t
cm_emulated_op_event_record(cm_runtime *rt, uint64_t handle, uint64_t stream)
{
    cm_emulated_thread *self;
    cm_stream_thread *queue;
    event *each;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    CM_TRY_CODE(event_find(rt, handle, &each));
    CM_TRY_CODE(queue_find(cm_emulated_of(rt), self, stream, &queue));
    return record(queue, each);
}

/* A driver call: makes no context by itself. */
int32_t
cm_emulated_op_context_record_event(cm_runtime *rt, uint64_t handle)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    cm_stream_thread *fence;
    event *each;
    CM_TRY_CODE(cm_emulated_self(rt, &self));
    if (self->device < 0) {
        return CM_CUDA_DEVICE_UNINITIALIZED;
    }
    for (EACH_QUEUE(emulated, queue)) {
        if (queue->capture != 0 && queue->device == self->device) {
            return CM_CUDA_CAPTURE_UNSUPPORTED;
        }
    }
    CM_TRY_CODE(event_find(rt, handle, &each));
    CM_TRY_CODE(fence_find(emulated, self->device, &fence));
    return record(fence, each);
}

int32_t
cm_emulated_op_stream_wait_event(cm_runtime *rt, uint64_t stream, uint64_t handle)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    cm_stream_thread *queue;
    event *each;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    CM_TRY_CODE(event_find(rt, handle, &each));
    CM_TRY_CODE(queue_find(emulated, self, stream, &queue));
    CM_TRY_CODE(emulated->streams.faults[queue->device]);
    if (is_captured(emulated, each)) {
        return queue->capture == each->capture ? 0 : CM_CUDA_CAPTURED_EVENT;
    }
    if (queue->capture != 0) {
        return each->item == NULL ? 0 : CM_CUDA_CAPTURE_ISOLATION;
    }
    CM_TRY_CODE(check_capture(queue));
    return each->item == NULL || each->item->done
               ? 0
               : queue_push(queue, NULL, each->item, NULL);
}

/* The event, if the host may ask about it now. */
static int32_t
find_for_host(cm_runtime *rt, uint64_t handle, event **out)
{
    const cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    CM_TRY_CODE(event_find(rt, handle, out));
    if (cm_emulated_is_forbidden(emulated, self)) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    if (is_captured(emulated, *out)) {
        return CM_CUDA_CAPTURED_EVENT;
    }
    return emulated->streams.faults[(*out)->device];
}

int32_t
cm_emulated_op_event_query(cm_runtime *rt, uint64_t handle, bool *done)
{
    event *each;
    CM_TRY_CODE(find_for_host(rt, handle, &each));
    *done = each->item == NULL || each->item->done;
    return 0;
}

int32_t
cm_emulated_op_event_synchronize(cm_runtime *rt, uint64_t handle)
{
    event *each;
    CM_TRY_CODE(find_for_host(rt, handle, &each));
    if (each->item == NULL) {
        return 0;
    }
    each->item->refs++; /* the event may be destroyed meanwhile */
    return item_await(cm_emulated_of(rt), each->item, each->device);
}

int32_t
cm_emulated_op_event_elapsed(cm_runtime *rt, uint64_t start, uint64_t end,
                             float *milliseconds)
{
    cm_emulated_thread *self;
    event *first, *second;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    CM_TRY_CODE(event_find(rt, start, &first));
    CM_TRY_CODE(event_find(rt, end, &second));
    if (first->device != second->device
        || ((first->flags | second->flags) & CM_EVENT_DISABLE_TIMING) != 0
        || first->item == NULL || second->item == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    if (!first->item->done || !second->item->done) {
        return CM_CUDA_NOT_READY;
    }
    *milliseconds =
        (float)(((double)second->item->end_ns - (double)first->item->end_ns) / 1e6);
    return 0;
}
