/* SPDX-License-Identifier: Apache-2.0 */
#include "python/device_wait.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "transfer/backoff.h"

bool
cm_sees_signals(void)
{
    return syscall(SYS_gettid) == (long)getpid();
}

/* -- streams and events ------------------------------------------------------------ */

/* No GIL. At most a slice; the first questions follow each other quickly. */
static cm_status
poll_slice(cm_runtime *rt, int device, cm_wait_query query, uint64_t handle, bool naps,
           uint64_t start, bool *done)
{
    uint64_t end = cm_now_ns() + CM_SIGNAL_SLICE_NS;
    cm_device_guard guard; /* the default streams mean those of the current device */
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status;
    for (;;) {
        status = query(rt, handle, done);
        uint64_t now = cm_now_ns();
        if (!cm_is_ok(status) || *done || now >= end) {
            break;
        }
        if (naps) {
            cm_nap_after(now - start);
        }
        else {
            cm_pause_until(now + cm_backoff_ns(now - start));
        }
    }
    cm_device_leave(rt, &guard);
    return status;
}

bool
cm_wait_polling(cm_runtime *rt, int device, cm_wait_query query, uint64_t handle,
                bool naps, cm_status *out)
{
    bool done = !cm_sees_signals();
    uint64_t start = cm_now_ns();
    *out = cm_ok();
    while (!done) {
        Py_BEGIN_ALLOW_THREADS
        *out = poll_slice(rt, device, query, handle, naps, start, &done);
        Py_END_ALLOW_THREADS
        if (!cm_is_ok(*out)) {
            return true;
        }
        if (!done && PyErr_CheckSignals() < 0) {
            return false;
        }
    }
    return true;
}

/* -- whole devices ----------------------------------------------------------------- */

typedef struct device_wait {
    cm_list node; /* in state->device_waits once its caller has gone; GIL */
    cm_runtime *rt;
    int device;
    cm_thread thread;
    cm_mutex lock;
    cm_cond ended;
    bool done; /* lock */
    cm_status status;
} device_wait;

static cm_status
wait_plainly(cm_runtime *rt, int device)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = cm_rt_device_synchronize(rt);
    cm_device_leave(rt, &guard);
    return status;
}

static void *
run_wait(void *argument)
{
    device_wait *wait = argument;
    cm_status status = wait_plainly(wait->rt, wait->device);
    cm_mutex_lock(&wait->lock);
    wait->status = status;
    wait->done = true;
    cm_cond_signal_all(&wait->ended);
    cm_mutex_unlock(&wait->lock);
    return NULL;
}

/* NULL: neither memory nor a thread to be had. */
static device_wait *
start_wait(cm_runtime *rt, int device)
{
    device_wait *wait = calloc(1, sizeof(*wait));
    if (wait == NULL) {
        return NULL;
    }
    *wait = (device_wait){.rt = rt, .device = device};
    if (!cm_is_ok(cm_mutex_init(&wait->lock))) {
        goto no_lock;
    }
    if (!cm_is_ok(cm_cond_init(&wait->ended))) {
        goto no_condition;
    }
    if (cm_is_ok(cm_thread_start(&wait->thread, run_wait, wait))) {
        return wait;
    }
    cm_cond_fini(&wait->ended);
no_condition:
    cm_mutex_fini(&wait->lock);
no_lock:
    free(wait);
    return NULL;
}

/* No GIL. */
static cm_status
end_wait(device_wait *wait)
{
    cm_thread_join(wait->thread);
    cm_status status = wait->status;
    cm_cond_fini(&wait->ended);
    cm_mutex_fini(&wait->lock);
    free(wait);
    return status;
}

/* No GIL. At most a slice. */
static bool
await_slice(device_wait *wait)
{
    uint64_t end = cm_now_ns() + CM_SIGNAL_SLICE_NS;
    cm_mutex_lock(&wait->lock);
    while (!wait->done && cm_cond_wait_until(&wait->ended, &wait->lock, end)) {
    }
    bool done = wait->done;
    cm_mutex_unlock(&wait->lock);
    return done;
}

bool
cm_wait_for_device(cm_state *state, cm_runtime *rt, int device, cm_status *out)
{
    device_wait *wait = NULL;
    bool done = false;
    Py_BEGIN_ALLOW_THREADS
    wait = cm_sees_signals() ? start_wait(rt, device) : NULL;
    if (wait == NULL) {
        *out = wait_plainly(rt, device);
    }
    Py_END_ALLOW_THREADS
    while (wait != NULL && !done) {
        Py_BEGIN_ALLOW_THREADS
        done = await_slice(wait);
        if (done) {
            *out = end_wait(wait);
        }
        Py_END_ALLOW_THREADS
        if (!done && PyErr_CheckSignals() < 0) {
            cm_list_push_back(&state->device_waits, &wait->node);
            return false;
        }
    }
    return true;
}

/* True: it has ended, and is gone. At most a slice, unless `forever`. */
static bool
try_join(device_wait *wait, bool forever)
{
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = forever || await_slice(wait);
    if (done) {
        cm_status status = end_wait(wait);
        (void)status; /* its caller has heard of the signal instead */
    }
    Py_END_ALLOW_THREADS
    return done;
}

int
cm_device_waits_join(cm_state *state)
{
    cm_list *node;
    int result = 0;
    cm_state_enter(state); /* a signal's handler must not close the runtime */
    while (result == 0 && (node = cm_list_pop_front(&state->device_waits)) != NULL) {
        device_wait *wait = CM_LIST_ENTRY(node, device_wait, node);
        while (result == 0 && !try_join(wait, !cm_sees_signals())) {
            result = PyErr_CheckSignals();
        }
        if (result < 0) {
            cm_list_push_back(&state->device_waits, &wait->node);
        }
    }
    cm_state_leave(state);
    return result;
}

/* -- pools ------------------------------------------------------------------------- */

static bool
is_interrupted(void *argument)
{
    cm_pool_waiter *waiter = argument;
    PyEval_RestoreThread(waiter->thread);
    bool interrupted = PyErr_CheckSignals() < 0;
    waiter->thread = PyEval_SaveThread();
    return interrupted;
}

static bool
wait_device(void *argument, int device, cm_status *out)
{
    cm_pool_waiter *waiter = argument;
    PyEval_RestoreThread(waiter->thread);
    cm_runtime *rt = waiter->state->runtime; /* stays while the state is entered */
    bool done = cm_wait_for_device(waiter->state, rt, device, out);
    waiter->thread = PyEval_SaveThread();
    return done;
}

cm_patience
cm_patience_of(cm_pool_waiter *waiter)
{
    return cm_sees_signals() ? (cm_patience){is_interrupted, waiter, wait_device}
                             : (cm_patience){NULL, NULL, NULL};
}
