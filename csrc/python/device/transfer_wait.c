/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for a Transfer, and letting streams wait for it: in slices, so that signals
 * are seen and progress is told. */
#include <math.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/progress.h"
#include "python/device/transfer_type.h"

#define SLICE_NS UINT64_C(50000000) /* how soon Ctrl-C is seen */

/* NULL and None: for ever. 0, or -1 with TypeError or ValueError. */
static int
parse_timeout(PyObject *object, uint64_t *out)
{
    *out = UINT64_MAX;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    double seconds = PyFloat_AsDouble(object);
    if (seconds == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            return cm_arg_refuse(object, "timeout", "a number of seconds or None");
        }
        return -1;
    }
    if (isnan(seconds) || seconds < 0) {
        PyErr_Format(PyExc_ValueError, "timeout must be at least 0 seconds, not %R",
                     object);
        return -1;
    }
    if (seconds < 1e9) {
        *out = (uint64_t)(seconds * 1e9);
    }
    return 0;
}

typedef cm_status (*wait_function)(cm_ticket *ticket, uint64_t timeout_ns);

/* Wait in slices, so that signals are seen. False with an exception, of a signal
 * handler or of who is told of the progress. */
static bool
wait_in_slices(cm_ticket *ticket, wait_function wait, uint64_t timeout,
               const cm_progress *progress, uint64_t nbytes, cm_status *status)
{
    uint64_t start = cm_now_ns();
    for (;;) {
        uint64_t spent = cm_now_ns() - start;
        uint64_t left = timeout > spent ? timeout - spent : 0;
        bool last = left <= SLICE_NS;
        Py_BEGIN_ALLOW_THREADS
        *status = wait(ticket, last ? left : SLICE_NS);
        Py_END_ALLOW_THREADS
        if (status->code != CM_ETIMEOUT) {
            return true;
        }
        if (PyErr_CheckSignals() < 0
            || cm_progress_tell(progress, cm_ticket_count_moved(ticket), nbytes) < 0) {
            return false;
        }
        if (last) {
            return true;
        }
    }
}

void
cm_transfer_defer(const cm_transfer_object *self)
{
    const cm_runtime *rt = self->state->runtime;
    if (rt != NULL && !cm_runtime_is_forked(rt)) {
        cm_state_enter(self->state);
        cm_state_drop_deferred(self->state);
        cm_state_leave(self->state);
    }
}

/* False with an exception. */
static bool
wait_and_tell(const cm_transfer_object *self, PyObject *timeout_object,
              const cm_progress *progress)
{
    uint64_t timeout;
    cm_status status;
    cm_ticket_info info = {.nbytes = 0};
    if (progress->tell != NULL) {
        cm_ticket_look(self->ticket, &info);
    }
    if (parse_timeout(timeout_object, &timeout) < 0
        || !wait_in_slices(self->ticket, cm_ticket_wait, timeout, progress, info.nbytes,
                           &status)) {
        return false;
    }
    if (status.code == CM_ETIMEOUT) {
        PyErr_Format(PyExc_TimeoutError, "the transfer is not done after %R s",
                     timeout_object);
        return false;
    }
    if (!cm_is_ok(status)) {
        (void)cm_py_raise(self->state, status, "while copying");
        return false;
    }
    cm_transfer_defer(self);
    return cm_progress_tell(progress, info.nbytes, info.nbytes) == 0;
}

PyObject *
cm_transfer_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const char *const names[] = {"timeout", "progress", NULL};
    const cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    PyObject *values[2];
    cm_progress progress;
    if (cm_args_parse("wait", args, nargs, kwnames, names, 1, 0, values) < 0
        || cm_progress_open(self->state, values[1], "copy", &progress) < 0) {
        return NULL;
    }
    (void)wait_and_tell(self, values[0], &progress);
    return cm_progress_close(&progress) < 0 ? NULL : Py_NewRef(Py_None);
}

int
cm_transfer_order(const cm_transfer_object *transfer, cm_stream *stream)
{
    cm_status status;
    const cm_progress nobody = {.tell = NULL};
    if (!wait_in_slices(transfer->ticket, cm_ticket_settle, UINT64_MAX, &nobody, 0,
                        &status)) {
        return -1;
    }
    if (cm_is_ok(status)) {
        Py_BEGIN_ALLOW_THREADS
        status = cm_ticket_order(transfer->ticket, stream);
        Py_END_ALLOW_THREADS
    }
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(transfer->state, status,
                                              "while ordering a stream after a copy");
}
