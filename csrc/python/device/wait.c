/* SPDX-License-Identifier: Apache-2.0 */
/* Waits for events, streams and devices so that Ctrl-C is noticed: in slices of time,
 * or in a thread of their own. It also has the hooks by which pools wait. */
#include "python/device/wait.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/backoff.h"
#include "base/nvtx.h"
#include "python/core/errors.h"
#include "runtime/scope.h"

/* -- signals ----------------------------------------------------------------------- */

/* The main thread, or 0 if it is not known. There is one for the process, as there is
 * one set of signal handlers. After a fork, the thread that forked is the main one. */
static _Atomic unsigned long main_thread;
static _Atomic pid_t main_process;

void
cm_signals_init(void)
{
    PyObject *module = PyImport_ImportModule("_signal");
    /* In the main thread this raises TypeError, because None is not a handler; other
     * threads get ValueError, because they may set none at all. */
    PyObject *old = module == NULL
                        ? NULL
                        : PyObject_CallMethod(module, "signal", "iO", SIGINT, Py_None);
    bool is_main = old == NULL && PyErr_ExceptionMatches(PyExc_TypeError);
    PyErr_Clear();
    Py_XDECREF(old);
    Py_XDECREF(module);
    atomic_store(&main_process, getpid());
    atomic_store(&main_thread, is_main ? PyThread_get_thread_ident() : 0);
}

bool
cm_sees_signals(void)
{
    unsigned long main = atomic_load(&main_thread);
    return main == 0 || main == PyThread_get_thread_ident()
           || atomic_load(&main_process) != getpid();
}

/* -- streams and events ------------------------------------------------------------ */

/* Ask again and again for at most one slice of time, without the GIL. The first
 * questions follow each other quickly. */
static cm_status
poll_slice(cm_runtime *rt, int device, cm_wait_query query, uint64_t handle, bool naps,
           uint64_t start, bool *done)
{
    uint64_t end = cm_now_ns() + CM_SIGNAL_SLICE_NS;
    cm_scope scope; /* handles of default streams mean those of the current device */
    CM_TRY(cm_scope_enter(rt, device, CM_CAPTURE_THREAD_LOCAL, &scope));
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
    cm_scope_leave(&scope);
    return status;
}

bool
cm_wait_polling(cm_runtime *rt, int device, cm_wait_query query, uint64_t handle,
                bool naps, cm_status *out)
{
    bool done = false;
    uint64_t start = cm_now_ns();
    *out = cm_ok();
    while (!done) {
        *out =
            CM_WITHOUT_GIL(poll_slice(rt, device, query, handle, naps, start, &done));
        if (!cm_is_ok(*out)) {
            return true;
        }
        if (!done && PyErr_CheckSignals() < 0) {
            return false;
        }
    }
    return true;
}

bool
cm_wait_for(cm_runtime *rt, int device, cm_wait_query query,
            cm_status (*synchronize)(cm_runtime *rt, uint64_t handle), uint64_t handle,
            bool naps, cm_status *out)
{
    CM_NVTX("wait", 0);
    *out = cm_ok();
    if (cm_sees_signals() && !cm_wait_polling(rt, device, query, handle, naps, out)) {
        return false;
    }
    if (cm_is_ok(*out)) {
        *out = CM_WITHOUT_GIL(CM_ASKING(rt, device, synchronize(rt, handle)));
    }
    return true;
}

/* -- transfers --------------------------------------------------------------------- */

bool
cm_wait_for_ticket(cm_ticket *ticket,
                   cm_status (*wait)(cm_ticket *ticket, uint64_t timeout_ns),
                   uint64_t timeout_ns, const cm_progress *progress, uint64_t nbytes,
                   cm_status *out)
{
    uint64_t start = cm_now_ns();
    for (;;) {
        uint64_t spent = cm_now_ns() - start;
        uint64_t left = timeout_ns > spent ? timeout_ns - spent : 0;
        bool last = left <= CM_SIGNAL_SLICE_NS;
        *out = CM_WITHOUT_GIL(wait(ticket, last ? left : CM_SIGNAL_SLICE_NS));
        if (out->code != CM_ETIMEOUT) {
            return true;
        }
        if (PyErr_CheckSignals() < 0
            || (progress != NULL
                && cm_progress_report(progress, cm_ticket_count_moved(ticket), nbytes)
                       < 0)) {
            return false;
        }
        if (last) {
            return true;
        }
    }
}

/* -- whole devices ----------------------------------------------------------------- */

/* A wait for a device in a thread of its own. It belongs to the call that began it,
 * until a signal ends that call. */
typedef struct device_wait {
    /* In state->device_waits once the call has ended; guarded by the GIL. */
    cm_list node;
    cm_runtime *rt;
    int device;
    cm_thread thread;
    cm_mutex lock;
    cm_cond ended;
    /* guarded by `lock`: */
    bool has_ended;
    cm_status status;
} device_wait;

static cm_status
wait_plainly(cm_runtime *rt, int device)
{
    return CM_ASKING(rt, device, cm_rt_device_synchronize(rt));
}

static void *
run_wait(void *argument)
{
    device_wait *wait = argument;
    cm_status status = wait_plainly(wait->rt, wait->device);
    cm_mutex_lock(&wait->lock);
    wait->status = status;
    wait->has_ended = true;
    cm_cond_signal_all(&wait->ended);
    cm_mutex_unlock(&wait->lock);
    return NULL;
}

/* Begin to wait for a device in a thread. Returns NULL if there is no memory, or if no
 * thread can be started. */
static device_wait *
begin_wait(cm_runtime *rt, int device)
{
    device_wait *wait = calloc(1, sizeof(*wait));
    if (wait == NULL) {
        return NULL;
    }
    wait->rt = rt;
    wait->device = device;
    cm_cond_init(&wait->ended);
    if (!cm_is_ok(cm_thread_start(&wait->thread, run_wait, wait))) {
        free(wait);
        return NULL;
    }
    return wait;
}

/* Give `wait` at most `most_ns` to end. Returns false if it goes on after that. */
static bool
await_end(device_wait *wait, uint64_t most_ns)
{
    uint64_t end = cm_now_ns() + most_ns;
    cm_mutex_lock(&wait->lock);
    while (!wait->has_ended && cm_cond_wait_until(&wait->ended, &wait->lock, end)) {
    }
    bool ended = wait->has_ended;
    cm_mutex_unlock(&wait->lock);
    return ended;
}

/* Wait in slices until `wait` has ended. Returns 0, or -1 with what a signal handler
 * raised; then cm_device_waits_join() waits for the rest. */
static int
end_wait(cm_state *state, device_wait *wait, cm_status *out)
{
    while (!CM_WITHOUT_GIL(await_end(wait, CM_SIGNAL_SLICE_NS))) {
        if (PyErr_CheckSignals() < 0) {
            cm_list_push_back(&state->device_waits, &wait->node);
            return -1;
        }
        /* A signal handler forked, and this child has no such thread. */
        if (cm_runtime_is_forked(wait->rt)) {
            *out = cm_fail(CM_EFORKED, 0);
            return 0;
        }
    }
    *out = wait->status;
    cm_thread_join(wait->thread); /* the thread is about to end */
    free(wait);
    return 0;
}

bool
cm_wait_for_device(cm_state *state, cm_runtime *rt, int device, cm_status *out)
{
    CM_NVTX("wait for device", 0);
    *out = cm_ok();
    device_wait *wait = cm_sees_signals() ? begin_wait(rt, device) : NULL;
    if (wait == NULL) {
        *out = CM_WITHOUT_GIL(wait_plainly(rt, device));
        return true;
    }
    return end_wait(state, wait, out) == 0;
}

int
cm_device_waits_join(cm_state *state)
{
    int result = 0;
    cm_status ignored;
    cm_list *node;
    cm_state_enter(state); /* a signal handler must not close the runtime */
    while (result == 0 && (node = cm_list_pop_front(&state->device_waits)) != NULL) {
        result = end_wait(state, CM_LIST_ENTRY(node, device_wait, node), &ignored);
    }
    cm_state_leave(state);
    return result;
}

/* -- pools ------------------------------------------------------------------------- */

static bool
is_interrupted(void *argument)
{
    cm_pool_waiter *waiter = argument;
    cm_gil_take(waiter->thread);
    bool interrupted = PyErr_Occurred() != NULL || PyErr_CheckSignals() < 0;
    waiter->thread = cm_gil_give();
    return interrupted;
}

static bool
wait_for_device(void *argument, int device, cm_status *out)
{
    cm_pool_waiter *waiter = argument;
    cm_gil_take(waiter->thread);
    /* The runtime stays open while the state is entered. */
    cm_runtime *rt = waiter->state->runtime;
    bool done =
        PyErr_Occurred() == NULL && cm_wait_for_device(waiter->state, rt, device, out);
    waiter->thread = cm_gil_give();
    return done;
}

/* -- an exception that comes beside a result ------------------------------------------ */

static int
raise_postponed(void *argument)
{
    cm_kept_error *kept = argument;
    cm_error_restore(*kept);
    free(kept);
    return -1;
}

/* Let the pending exception, if there is one, be raised by the next instruction that
 * Python executes in this thread. When this function returns, no exception is pending.
 * Signal handlers run in the main thread, and so do pending calls. In another thread
 * the exception is one that a debugger or a timeout has sent
 * (PyThreadState_SetAsyncExc), and it is sent again. */
static void
postpone_error(void)
{
    if (PyErr_Occurred() == NULL) {
        return;
    }
    if (!cm_sees_signals()) {
        cm_kept_error sent = cm_error_keep();
        (void)PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), sent.type);
        cm_error_restore(sent);
        PyErr_Clear();
        return;
    }
    cm_kept_error *kept = malloc(sizeof(*kept));
    if (kept == NULL) {
        PyErr_WriteUnraisable(NULL);
        return;
    }
    *kept = cm_error_keep();
    /* This fails if too many pending calls are queued already. */
    if (Py_AddPendingCall(raise_postponed, kept) < 0) {
        (void)raise_postponed(kept);
        PyErr_WriteUnraisable(NULL);
    }
}

/* Ask PyTorch and CuPy whether they are capturing. A library that was never imported is
 * not asked, and one that cannot be asked does not capture. This runs Python code, and
 * with it the handlers of signals that came while nobody had the GIL. An exception that
 * a handler raises stays set, since it must not be lost. The exception ends the wait,
 * so the answer is then true, which keeps the pool from doing work that would only
 * prolong the wait. If an exception was set before, that one is kept and the second one
 * is dropped. */
static bool
ask_libraries(void)
{
    cm_kept_error kept = cm_error_keep();
    bool raised = PyErr_CheckSignals() < 0;
    PyObject *answer = raised ? NULL
                              : cm_package_call("interchange.foreign_stream",
                                                "is_captured", PyTuple_New(0));
    bool captures = answer == Py_True;
    if (answer == NULL && !raised) {
        /* An ImportError does not count, since nothing can be imported at exit. */
        raised = !PyErr_ExceptionMatches(PyExc_ImportError);
    }
    Py_XDECREF(answer);
    if (kept.type != NULL || !raised) {
        PyErr_Clear();
        cm_error_restore(kept);
    }
    return captures || raised;
}

static bool
others_capture(void *argument)
{
    cm_pool_waiter *waiter = argument;
    cm_gil_take(waiter->thread);
    bool captures = ask_libraries();
    waiter->thread = cm_gil_give();
    return captures;
}

bool
cm_library_captures(void)
{
    bool captures = ask_libraries();
    postpone_error();
    return captures;
}

void
cm_pool_waiter_end(const cm_pool_waiter *waiter, cm_status status)
{
    cm_gil_take(waiter->thread);
    if (status.code != CM_ECANCELLED) {
        postpone_error();
    }
}

cm_wait_hooks
cm_wait_hooks_of(cm_pool_waiter *waiter)
{
    cm_wait_hooks hooks = {.argument = waiter, .others_capture = others_capture};
    if (cm_sees_signals()) {
        hooks.interrupted = is_interrupted;
        hooks.wait_device = wait_for_device;
    }
    return hooks;
}
