/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the streams and events of the emulated device.
 *
 * Queues and items
 * ----------------
 * A queue is the thread behind a stream, and an item is one piece of work in it. An
 * item runs when it is the first of its queue, the queue's gate is open, and everything
 * that CUDA's order puts before it is done. Items are numbered in the order in which
 * they were queued, over all queues. That makes CUDA's legacy rule one comparison: an
 * item on the legacy stream waits for each earlier item on a blocking stream of its
 * device, and the other way round (must_follow()).
 *
 * Example: blocking stream A has items 5 and 8, and the legacy stream has item 7.
 *
 *   5 runs    first in A, nothing is earlier
 *   7 runs    waits while A's first item is 5, and not for 8, which is later
 *   8 runs    waits while the legacy stream's first item is 7
 *
 * A fence is a queue of our own for each device. It follows all streams of the device,
 * so an item on it is done when everything before it is. Events over a context and
 * cudaDeviceSynchronize() are items on it.
 *
 * Events
 * ------
 * Recording an event queues an item, and the event remembers the last such item. Work
 * that waits for the event waits for that item, so recording the event again does not
 * change what is waited for. A handle of an event is never used twice, so that a stale
 * one is noticed. Handles of streams are used again, as on a real device.
 *
 * Gates and delays
 * ----------------
 * A queue whose gate is shut runs nothing until the gate is opened. Random delays
 * (max_delay_us) make streams late in ways that no test planned; a gate makes a stream
 * late for certain.
 *
 * Captures
 * --------
 * A capture is a number that all its streams carry. Work on a capturing stream is
 * checked and then dropped: here the graph never runs. A wait for an event that a
 * capture recorded takes the waiting stream into the capture. Calls that CUDA forbids
 * during a capture fail, and mark the capture as broken. */
#include "runtime/emulated/private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As on real devices, the lower number is the more urgent. */
enum { PRIORITY_LEAST = 0, PRIORITY_GREATEST = -5 };

typedef enum cm_stream_thread_kind {
    CM_QUEUE_USER,
    CM_QUEUE_LEGACY,
    CM_QUEUE_PER_THREAD,
    CM_QUEUE_FENCE, /* our own, for events over a whole device */
} cm_stream_thread_kind;

typedef struct cm_emulated_item {
    cm_list node; /* in queue->items until it is done */
    /* How many hold it: its queue, events, waits of the host, and items that wait for
     * it. */
    unsigned refs;
    bool done;
    uint64_t number; /* items that were queued before it have lower numbers */
    uint64_t end_ns; /* valid once it is done */
    /* Held; if the item is just a wait, the item for which it waits, else NULL. */
    struct cm_emulated_item *after;
    /* Points to `bytes`; NULL if the item is a mark, or if its job was dropped. */
    cm_emulated_job *job;
    max_align_t bytes[];
} cm_emulated_item;

typedef struct cm_stream_thread {
    int device;   /* first */
    cm_list node; /* in streams->queues */
    cm_emulated *emulated;
    cm_stream_thread_kind kind;
    uint64_t handle; /* of user streams only */
    uint64_t id;
    int priority;
    bool is_blocking; /* it is ordered with the legacy stream of its device */
    bool is_shut;
    /* No more work will come. The thread frees the queue after the last item. */
    bool is_closed;
    uint64_t capture;         /* number of the capture that it is in, or 0 */
    uint64_t capturer;        /* number of the thread that began the capture */
    bool is_broken;           /* the capture was broken by a call that it forbids */
    cm_emulated_thread owner; /* the thread whose own stream it is; else no thread */
    cm_list items;
    cm_cond work;
    unsigned random; /* state of its random delays; used by its own thread alone */
} cm_stream_thread;

enum { EVENT_FLAGS = CM_EVENT_BLOCKING_SYNC | CM_EVENT_DISABLE_TIMING };

typedef struct event {
    int device; /* first */
    unsigned flags;
    /* The number of the capture that recorded it last, or 0 if none did. */
    uint64_t capture;
    cm_emulated_item *item; /* held; NULL if it was never recorded */
} event;

#define EACH_QUEUE(emulated, queue)                                                    \
    cm_stream_thread *queue =                                                          \
        CM_LIST_ENTRY((emulated)->streams.queues.next, cm_stream_thread, node);        \
    &queue->node != &(emulated)->streams.queues;                                       \
    queue = CM_LIST_ENTRY(queue->node.next, cm_stream_thread, node)

#define ITEM(at) CM_LIST_ENTRY(at, cm_emulated_item, node)

/* ---- the threads behind the streams, and what each piece of work must wait for --------- */

static void
item_release(cm_emulated_item *item)
{
    if (item != NULL && --item->refs == 0) {
        free(item);
    }
}

void
cm_emulated_job_drop(cm_emulated *emulated, const cm_emulated_job *job)
{
    cm_emulated_range *const held[] = {job->dst.held, job->src.held};
    for (int i = 0; i < 2; i++) {
        if (held[i] != NULL && --held[i]->waiting == 0) {
            cm_cond_signal_all(&emulated->changed);
        }
    }
    free(job->owned);
}

/* True if work of `queue` has to follow work that was queued on `other` earlier. */
static bool
must_follow(const cm_stream_thread *queue, const cm_stream_thread *other)
{
    return queue != other && queue->device == other->device
           && (queue->kind == CM_QUEUE_FENCE
               || (queue->kind == CM_QUEUE_LEGACY && other->is_blocking)
               || (other->kind == CM_QUEUE_LEGACY && queue->is_blocking));
}

/* True if all work that CUDA's order puts before the queue's first item is done. */
static bool
item_is_free(const cm_stream_thread *queue, const cm_emulated_item *item)
{
    for (EACH_QUEUE(queue->emulated, other)) {
        if (must_follow(queue, other) && !cm_list_is_empty(&other->items)
            && ITEM(other->items.next)->number < item->number) {
            return false;
        }
    }
    return item->after == NULL || item->after->done;
}

/* Wait until the item is done, and release it. Returns the device's fault. */
static int32_t
item_await(cm_emulated *emulated, cm_emulated_item *item, int device)
{
    while (!item->done) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
    item_release(item);
    return emulated->streams.faults[device];
}

/* Wait for the next item that may run, and return it, or NULL if the queue has
 * ended. */
static cm_emulated_item *
next_item(cm_stream_thread *queue)
{
    cm_emulated *emulated = queue->emulated;
    for (;;) {
        bool is_empty = cm_list_is_empty(&queue->items);
        if (is_empty && queue->is_closed) {
            return NULL;
        }
        cm_emulated_item *item = ITEM(queue->items.next);
        if (is_empty || queue->is_shut) {
            cm_cond_wait(&queue->work, &emulated->lock);
        }
        else if (item_is_free(queue, item)) {
            return item;
        }
        else {
            cm_cond_wait(&emulated->changed, &emulated->lock);
        }
    }
}

/* Run an item after its random delay, and mark it as done. If its job fails, the code
 * becomes the fault of the device. */
static void
run_item(cm_stream_thread *queue, cm_emulated_item *item)
{
    cm_emulated *emulated = queue->emulated;
    uint64_t most_ns = (uint64_t)emulated->config.max_delay_us * 1000u;
    if (most_ns != 0 && item->after == NULL) {
        cm_mutex_unlock(&emulated->lock);
        cm_sleep_ns((uint64_t)rand_r(&queue->random) % (most_ns + 1));
        cm_mutex_lock(&emulated->lock);
    }
    if (item->job != NULL) {
        int32_t code = item->job->run(emulated, item->job);
        if (code != 0) {
            emulated->streams.faults[queue->device] = code;
        }
        cm_emulated_job_drop(emulated, item->job);
        item->job = NULL;
        emulated->streams.queued_jobs--;
    }
    item_release(item->after);
    item->after = NULL;
    cm_list_remove(&item->node);
    item->end_ns = cm_now_ns();
    item->done = true;
    item_release(item);
    cm_cond_signal_all(&emulated->changed);
}

/* The thread of a queue, which runs items until the queue is closed, and then frees
 * it. */
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
    cm_list_remove(&queue->node);
    cm_cond_signal_all(&emulated->changed);
    free(queue);
    cm_mutex_unlock(&emulated->lock);
    return NULL;
}

/* Make a queue and start its thread. Returns CM_CUDA_OUT_OF_MEMORY if that fails. */
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
    queue->id = CM_STREAM_PER_THREAD + ++emulated->streams.opened;
    queue->random = (unsigned)(emulated->config.seed + 0x9E3779B9u * queue->id);
    cm_list_init(&queue->items);
    cm_cond_init(&queue->work);
    cm_thread thread;
    if (!cm_is_ok(cm_thread_start(&thread, queue_main, queue))) {
        free(queue);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    (void)pthread_detach(thread);
    cm_list_push_back(&emulated->streams.queues, &queue->node);
    *out = queue;
    return 0;
}

static void
queue_close(cm_stream_thread *queue)
{
    cm_emulated_streams *streams = &queue->emulated->streams;
    queue->capture = 0;
    if (queue->kind == CM_QUEUE_USER && !queue->is_closed) {
        (void)cm_emulated_table_remove(&streams->by_handle, queue->handle);
        streams->reused_handle = queue->handle;
    }
    queue->is_shut = false;
    queue->is_closed = true;
    cm_cond_signal_all(&queue->work);
}

/* ---- what a host thread has current, and its own streams ------------------------------- */

cm_emulated_thread *
cm_emulated_self(cm_emulated *emulated)
{
    static _Thread_local cm_emulated_thread self;
    if (CM_UNLIKELY(self.runtime != emulated->number)) {
        self = (cm_emulated_thread){
            .runtime = emulated->number,
            .number = ++emulated->last_number,
            .id = (pid_t)syscall(SYS_gettid),
            .device = -1,
        };
    }
    return &self;
}

bool
cm_emulated_is_forbidden(const cm_emulated *emulated, const cm_emulated_thread *thread)
{
    bool is_forbidden = false;
    for (EACH_QUEUE(emulated, queue)) {
        if (queue->capture != 0
            && (thread->capture_mode == 0
                || (thread->capture_mode != CM_CAPTURE_RELAXED
                    && queue->capturer == thread->number))) {
            queue->is_broken = true;
            is_forbidden = true;
        }
    }
    return is_forbidden;
}

/* Close the per-thread streams of threads that have ended, except those that have work,
 * are shut or capture. `self` is the thread that looks. A thread does not do this at
 * its own end, since the device may be closing at that time. */
static void
close_abandoned(cm_emulated *emulated, const cm_emulated_thread *self)
{
    for (EACH_QUEUE(emulated, queue)) {
        const cm_emulated_thread *owner = &queue->owner;
        if (owner->number != 0 && owner->number != self->number
            && cm_list_is_empty(&queue->items) && !queue->is_shut && queue->capture == 0
            && (owner->id == self->id
                || (syscall(SYS_tgkill, getpid(), owner->id, 0) != 0
                    && errno == ESRCH))) {
            queue_close(queue);
        }
    }
}

/* Find the queue of a kind on a device, and open it on first use. If `owner` is not
 * NULL the queue is that thread's own. */
static int32_t
default_find(cm_emulated *emulated, cm_stream_thread_kind kind, int device,
             const cm_emulated_thread *owner, cm_stream_thread **out)
{
    uint64_t number = owner != NULL ? owner->number : 0;
    for (EACH_QUEUE(emulated, queue)) {
        if (queue->kind == kind && queue->device == device
            && queue->owner.number == number && !queue->is_closed) {
            *out = queue;
            return 0;
        }
    }
    CM_TRY_CODE(queue_open(emulated, kind, device, out));
    if (owner != NULL) {
        (*out)->owner = *owner;
        (*out)->is_blocking = true;
        close_abandoned(emulated, owner);
    }
    return 0;
}

/* Find the queue behind a handle. Only the hooks for tests may call this in a thread
 * without a context, for which device 0 counts as current. */
static int32_t
queue_find(cm_emulated *emulated, uint64_t stream, cm_stream_thread **out)
{
    const cm_emulated_thread *self = cm_emulated_self(emulated);
    int device = self->device < 0 ? 0 : self->device;
    if (stream > CM_STREAM_PER_THREAD) {
        *out = cm_emulated_table_find(&emulated->streams.by_handle, stream);
        return *out != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
    }
    return stream == CM_STREAM_PER_THREAD
               ? default_find(emulated, CM_QUEUE_PER_THREAD, device, self, out)
               : default_find(emulated, CM_QUEUE_LEGACY, device, NULL, out);
}

/* ---- work is queued and waited for ------------------------------------------------------ */

/* Queue a copy of the job, a struct of `nbytes`. If the job is NULL this queues a mark,
 * an item without a job, which waits for the item `after` unless that is NULL. If `out`
 * is not NULL, *out is the item, held for the caller. */
static int32_t
queue_push(cm_stream_thread *queue, const cm_emulated_job *job, size_t nbytes,
           cm_emulated_item *after, cm_emulated_item **out)
{
    cm_emulated *emulated = queue->emulated;
    cm_emulated_item *item = calloc(1, sizeof(*item) + nbytes);
    if (item == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    item->refs = 1;
    item->number = ++emulated->last_number;
    item->job = job != NULL ? memcpy(item->bytes, job, nbytes) : NULL;
    item->after = after;
    if (after != NULL) {
        after->refs++;
    }
    cm_list_push_back(&queue->items, &item->node);
    emulated->streams.queued_jobs += job != NULL;
    if (out != NULL) {
        item->refs++;
        *out = item;
    }
    cm_cond_signal_all(&queue->work);
    return 0;
}

/* Return 0, or the code to fail with because the queue takes part in a capture or would
 * break one. */
static int32_t
check_capture(const cm_stream_thread *queue)
{
    if (queue->capture != 0) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    for (EACH_QUEUE(queue->emulated, other)) {
        if (other->capture != 0 && must_follow(queue, other)) {
            return queue->kind == CM_QUEUE_FENCE ? CM_CUDA_CAPTURE_UNSUPPORTED
                                                 : CM_CUDA_CAPTURE_IMPLICIT;
        }
    }
    return 0;
}

/* Wait for the last item of a queue. For the legacy stream and the fence a mark is
 * queued, which comes behind everything that they follow. */
static int32_t
queue_wait(cm_stream_thread *queue)
{
    cm_emulated_item *item = ITEM(queue->items.prev);
    if (queue->kind == CM_QUEUE_LEGACY || queue->kind == CM_QUEUE_FENCE) {
        CM_TRY_CODE(queue_push(queue, NULL, 0, NULL, &item));
    }
    else if (cm_list_is_empty(&queue->items)) {
        return queue->emulated->streams.faults[queue->device];
    }
    else {
        item->refs++;
    }
    return item_await(queue->emulated, item, queue->device);
}

/* Queue the job. *item is held for the caller. It stays NULL if the job was not
 * queued. */
static int32_t
submit(cm_stream_thread *queue, const cm_emulated_job *job, size_t nbytes,
       cm_emulated_item **item)
{
    CM_TRY_CODE(queue->emulated->streams.faults[queue->device]);
    if (queue->capture != 0) {
        return 0;
    }
    CM_TRY_CODE(check_capture(queue));
    return queue_push(queue, job, nbytes, NULL, item);
}

int32_t
cm_emulated_submit(cm_emulated *emulated, uint64_t stream, cm_emulated_job *job,
                   size_t nbytes, bool wait)
{
    cm_stream_thread *queue;
    cm_emulated_item *item = NULL;
    job->stamp = emulated->memory.serial;
    int32_t code = queue_find(emulated, stream, &queue);
    if (code == 0) {
        code = submit(queue, job, nbytes, &item);
    }
    if (item == NULL) {
        cm_emulated_job_drop(emulated, job);
    }
    else if (wait) {
        code = item_await(emulated, item, queue->device);
    }
    else {
        item_release(item);
    }
    return code;
}

/* This waits for non-blocking streams too. */
int32_t
cm_emulated_op_device_synchronize(cm_emulated *emulated)
{
    cm_stream_thread *fence;
    CM_TRY_CODE(default_find(emulated, CM_QUEUE_FENCE,
                             cm_emulated_self(emulated)->device, NULL, &fence));
    return queue_wait(fence);
}

/* ---- what only tests may do with streams ----------------------------------------------- */

static int32_t
set_gate(cm_stream_thread *queue, bool shut)
{
    queue->is_shut = shut;
    cm_cond_signal_all(&queue->work);
    return 0;
}

/* Begin a capture of the queue's stream, or end the one that it is in. Returns
 * CM_CUDA_CAPTURE_INVALIDATED at the end of a capture that was broken. */
static int32_t
set_capture(cm_stream_thread *queue, bool on)
{
    cm_emulated *emulated = queue->emulated;
    if (on && queue->kind == CM_QUEUE_LEGACY) {
        return CM_CUDA_CAPTURE_UNSUPPORTED; /* the legacy stream cannot be captured */
    }
    if (on && queue->capture == 0) {
        queue->capture = ++emulated->last_number;
        queue->capturer = cm_emulated_self(emulated)->number;
    }
    if (on) {
        return 0;
    }
    bool was_broken = queue->is_broken;
    uint64_t capture = queue->capture;
    for (EACH_QUEUE(emulated, each)) { /* including the streams that joined the
                                          capture */
        if (each->capture == capture) {
            each->capture = 0;
            each->is_broken = false;
        }
    }
    return was_broken ? CM_CUDA_CAPTURE_INVALIDATED : 0;
}

static cm_status
with_queue(cm_runtime *rt, uint64_t stream, bool on,
           int32_t (*set)(cm_stream_thread *, bool))
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_stream_thread *queue;
    cm_mutex_lock(&emulated->lock);
    int32_t code = rt->device_count == 0 ? CM_CUDA_NO_DEVICE
                                         : queue_find(emulated, stream, &queue);
    code = code == 0 ? set(queue, on) : code;
    cm_mutex_unlock(&emulated->lock);
    return cm_fail(code, stream);
}

cm_status
cm_emulated_gate_close(cm_runtime *rt, uint64_t stream)
{
    return with_queue(rt, stream, true, set_gate);
}

cm_status
cm_emulated_gate_open(cm_runtime *rt, uint64_t stream)
{
    return with_queue(rt, stream, false, set_gate);
}

void
cm_emulated_shut_new(cm_runtime *rt, bool on)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_mutex_lock(&emulated->lock);
    emulated->streams.begin_shut = on;
    for (EACH_QUEUE(emulated, queue)) {
        if (!on && queue->kind == CM_QUEUE_USER) {
            (void)set_gate(queue, false);
        }
    }
    cm_mutex_unlock(&emulated->lock);
}

cm_status
cm_emulated_set_capturing(cm_runtime *rt, uint64_t stream, bool on)
{
    return with_queue(rt, stream, on, set_capture);
}

/* ---- streams --------------------------------------------------------------------------- */

void
cm_emulated_streams_end(cm_emulated *emulated)
{
    for (EACH_QUEUE(emulated, queue)) {
        queue_close(queue);
    }
    while (!cm_list_is_empty(&emulated->streams.queues)) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
}

void
cm_emulated_streams_reset(cm_emulated *emulated, int device)
{
    cm_emulated_streams *streams = &emulated->streams;
    const cm_emulated_entry *left;
    while ((left = cm_emulated_table_of_device(&streams->by_handle, device)) != NULL) {
        queue_close(left->object);
    }
    while ((left = cm_emulated_table_of_device(&streams->events, device)) != NULL) {
        (void)cm_emulated_op_event_destroy(emulated, left->key);
    }
    streams->faults[device] = 0;
}

int32_t
cm_emulated_op_stream_priority_range(cm_emulated *emulated CM_UNUSED, int *least,
                                     int *greatest)
{
    *least = PRIORITY_LEAST;
    *greatest = PRIORITY_GREATEST;
    return 0;
}

int32_t
cm_emulated_op_stream_create(cm_emulated *emulated, unsigned flags, int priority,
                             uint64_t *out)
{
    cm_emulated_streams *streams = &emulated->streams;
    if ((flags & ~(unsigned)CM_STREAM_NON_BLOCKING) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_open(emulated, CM_QUEUE_USER, cm_emulated_self(emulated)->device,
                           &queue));
    queue->is_blocking = (flags & CM_STREAM_NON_BLOCKING) == 0;
    queue->is_shut = streams->begin_shut;
    queue->priority = priority;
    if (priority > PRIORITY_LEAST) {
        queue->priority = PRIORITY_LEAST;
    }
    else if (priority < PRIORITY_GREATEST) {
        queue->priority = PRIORITY_GREATEST;
    }
    /* Handles are used again, as on a real device, so a handle that is kept too long
     * means another stream. */
    queue->handle = streams->reused_handle != 0 ? streams->reused_handle
                                                : cm_emulated_new_handle(emulated);
    streams->reused_handle = 0;
    if (!cm_emulated_table_add(&streams->by_handle, queue->handle, queue)) {
        queue->kind = CM_QUEUE_FENCE; /* so that queue_close() takes no handle back */
        queue_close(queue);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *out = queue->handle;
    return 0;
}

/* Work that is queued on the stream still runs; a shut gate is opened for that. */
int32_t
cm_emulated_op_stream_destroy(cm_emulated *emulated, uint64_t stream)
{
    cm_stream_thread *queue =
        cm_emulated_table_find(&emulated->streams.by_handle, stream);
    if (queue == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    queue_close(queue);
    return 0;
}

int32_t
cm_emulated_op_stream_query(cm_emulated *emulated, uint64_t stream, bool *done)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, stream, &queue));
    CM_TRY_CODE(check_capture(queue));
    CM_TRY_CODE(emulated->streams.faults[queue->device]);
    *done = cm_list_is_empty(&queue->items);
    for (EACH_QUEUE(emulated, other)) {
        if (queue->kind == CM_QUEUE_LEGACY && must_follow(queue, other)) {
            *done = *done && cm_list_is_empty(&other->items);
        }
    }
    return 0;
}

int32_t
cm_emulated_op_stream_synchronize(cm_emulated *emulated, uint64_t stream)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, stream, &queue));
    CM_TRY_CODE(check_capture(queue));
    return queue_wait(queue);
}

int32_t
cm_emulated_device_of(cm_emulated *emulated, uint64_t stream, int *out)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, stream, &queue));
    *out = queue->device;
    return 0;
}

/* Asking a stream that captures breaks the capture, whatever the mode. */
#define STREAM_GETTER(name, type)                                                      \
    int32_t cm_emulated_op_stream_get_##name(cm_emulated *emulated, uint64_t stream,   \
                                             type *out)                                \
    {                                                                                  \
        static const cm_emulated_thread strict = {.capture_mode = 0};                  \
        cm_stream_thread *queue;                                                       \
        CM_TRY_CODE(queue_find(emulated, stream, &queue));                             \
        *out = queue->name;                                                            \
        return queue->capture != 0 && cm_emulated_is_forbidden(emulated, &strict)      \
                   ? CM_CUDA_CAPTURE_UNSUPPORTED                                       \
                   : 0;                                                                \
    }
STREAM_GETTER(id, uint64_t)
STREAM_GETTER(device, int)
STREAM_GETTER(priority, int)

int32_t
cm_emulated_op_stream_is_capturing(cm_emulated *emulated, uint64_t stream, bool *out)
{
    cm_stream_thread *queue;
    CM_TRY_CODE(queue_find(emulated, stream, &queue));
    if (check_capture(queue) == CM_CUDA_CAPTURE_IMPLICIT) {
        return CM_CUDA_CAPTURE_IMPLICIT; /* a blocking stream of the device captures */
    }
    *out = queue->capture != 0;
    return 0;
}

int32_t
cm_emulated_op_capture_mode_exchange(cm_emulated *emulated, int *mode)
{
    if (*mode < 0 || *mode > CM_CAPTURE_RELAXED) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_thread *self = cm_emulated_self(emulated);
    int before = self->capture_mode;
    self->capture_mode = *mode;
    *mode = before;
    return 0;
}

/* ---- events ---------------------------------------------------------------------------- */

int32_t
cm_emulated_op_event_create(cm_emulated *emulated, unsigned flags, uint64_t *out)
{
    if ((flags & ~(unsigned)EVENT_FLAGS) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    uint64_t handle = cm_emulated_new_handle(emulated);
    event *made =
        cm_emulated_table_new(&emulated->streams.events, handle, sizeof(*made));
    if (made == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->device = cm_emulated_self(emulated)->device;
    made->flags = flags;
    *out = handle;
    return 0;
}

int32_t
cm_emulated_op_event_destroy(cm_emulated *emulated, uint64_t handle)
{
    event *gone = cm_emulated_table_remove(&emulated->streams.events, handle);
    if (gone == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    item_release(gone->item);
    free(gone);
    return 0;
}

static int32_t
event_find(cm_emulated *emulated, uint64_t handle, event **out)
{
    *out = cm_emulated_table_find(&emulated->streams.events, handle);
    return *out != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

/* Return a stream of the capture that recorded the event if that capture is still under
 * way, else NULL. */
static const cm_stream_thread *
find_capture(const cm_emulated *emulated, const event *each)
{
    for (EACH_QUEUE(emulated, queue)) {
        if (each->capture != 0 && queue->capture == each->capture) {
            return queue;
        }
    }
    return NULL;
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
        CM_TRY_CODE(queue_push(queue, NULL, 0, NULL, &item));
    }
    item_release(each->item);
    each->item = item;
    each->capture = queue->capture;
    return 0;
}

int32_t
cm_emulated_op_event_record(cm_emulated *emulated, uint64_t handle, uint64_t stream)
{
    cm_stream_thread *queue;
    event *each;
    CM_TRY_CODE(event_find(emulated, handle, &each));
    CM_TRY_CODE(queue_find(emulated, stream, &queue));
    return record(queue, each);
}

/* CUDA's own function is one of the driver's, so it makes no context by itself. */
int32_t
cm_emulated_op_context_record_event(cm_emulated *emulated, uint64_t handle)
{
    cm_emulated_thread *self = cm_emulated_self(emulated);
    const cm_emulated_thread strict = {.capture_mode = 0};
    cm_stream_thread *fence;
    event *each;
    if (self->device < 0) {
        return CM_CUDA_DEVICE_UNINITIALIZED;
    }
    if (cm_emulated_is_forbidden(emulated, &strict)) { /* whatever the mode */
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    CM_TRY_CODE(event_find(emulated, handle, &each));
    CM_TRY_CODE(default_find(emulated, CM_QUEUE_FENCE, self->device, NULL, &fence));
    return record(fence, each);
}

int32_t
cm_emulated_op_stream_wait_event(cm_emulated *emulated, uint64_t stream,
                                 uint64_t handle)
{
    cm_stream_thread *queue;
    event *each;
    CM_TRY_CODE(event_find(emulated, handle, &each));
    CM_TRY_CODE(queue_find(emulated, stream, &queue));
    CM_TRY_CODE(emulated->streams.faults[queue->device]);
    const cm_stream_thread *captured = find_capture(emulated, each);
    if (captured != NULL && queue->kind == CM_QUEUE_LEGACY) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    if (captured != NULL && queue->capture == 0) { /* the stream joins the capture */
        queue->capture = captured->capture;
        queue->capturer = captured->capturer;
        queue->is_broken = captured->is_broken;
    }
    if (captured != NULL) {
        return queue->capture == each->capture ? 0 : CM_CUDA_CAPTURE_MERGE;
    }
    if (queue->capture != 0) {
        return each->item == NULL ? 0 : CM_CUDA_CAPTURE_ISOLATION;
    }
    CM_TRY_CODE(check_capture(queue));
    if (each->item == NULL || each->item->done) {
        return 0;
    }
    return queue_push(queue, NULL, 0, each->item, NULL);
}

/* Find an event that the host may ask about now. */
static int32_t
find_for_host(cm_emulated *emulated, uint64_t handle, event **out)
{
    CM_TRY_CODE(event_find(emulated, handle, out));
    if (find_capture(emulated, *out) != NULL) {
        return CM_CUDA_CAPTURED_EVENT;
    }
    return emulated->streams.faults[(*out)->device];
}

int32_t
cm_emulated_op_event_query(cm_emulated *emulated, uint64_t handle, bool *done)
{
    event *each;
    CM_TRY_CODE(find_for_host(emulated, handle, &each));
    *done = each->item == NULL || each->item->done;
    return 0;
}

int32_t
cm_emulated_op_event_synchronize(cm_emulated *emulated, uint64_t handle)
{
    event *each;
    CM_TRY_CODE(find_for_host(emulated, handle, &each));
    if (each->item == NULL) {
        return 0;
    }
    each->item->refs++; /* the event may be destroyed meanwhile */
    return item_await(emulated, each->item, each->device);
}

int32_t
cm_emulated_op_event_elapsed(cm_emulated *emulated, uint64_t start, uint64_t end,
                             float *milliseconds)
{
    event *first, *second;
    CM_TRY_CODE(event_find(emulated, start, &first));
    CM_TRY_CODE(event_find(emulated, end, &second));
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
