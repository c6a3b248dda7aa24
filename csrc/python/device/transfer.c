/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Transfer: a copy that may still be running. */
#include <math.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

/* -- docstrings -------------------------------------------------------------------------- */

PyDoc_STRVAR(transfer_doc,
"A copy that may still be running, made by `copy_async`.\n\n"
"It keeps both ends alive. Dropping it neither blocks nor cancels: the ends then live\n"
"until the copy is done, and a failure that nobody asked for goes to\n"
"`sys.unraisablehook`. `await` it in a coroutine, or call `wait`; a task of it is made\n"
"by ``asyncio.ensure_future``, since it is no coroutine, which ``create_task`` wants.\n\n"
"Raises\n------\n"
"CudaError\n    By `wait`, `order` and `await`: the copy failed.\n"
"CancelledError\n    By the same: it was cancelled.");

PyDoc_STRVAR(cancel_doc,
"cancel($self, /)\n--\n\n"
"Cancel the copy if it has not begun.\n\n"
"Only a copy in the background can still be cancelled (one made without `stream=`), and\n"
"only while it waits for a thread or for what has to come before it. What the driver has\n"
"been given cannot be called back.\n\n"
"Returns\n-------\n"
"bool\n"
"    True if the copy is cancelled, now or by an earlier call: nothing was or will be\n"
"    read or written, the transfer is done, both ends are let go, and `wait`, `order`\n"
"    and `await` raise `CancelledError`. False if it has begun or is done: nothing\n"
"    changes.\n\n"
"Notes\n-----\n"
"Copies that were to come after it go ahead. Cancelling a task that awaits a transfer\n"
"does not cancel the transfer. It returns within a moment, GIL released.");

PyDoc_STRVAR(wait_doc,
"wait($self, /, timeout=None, *, progress=None)\n--\n\n"
"Wait until the data is there.\n\n"
"Parameters\n----------\n"
"timeout : float, optional\n    Seconds; None waits as long as it takes.\n"
"progress : bool or callable, optional\n"
"    True shows a bar if it takes long (tqdm, of the extra ``cumem[progress]``). A\n"
"    callable is called now and then, and once more when all is done, with the bytes that\n"
"    have arrived and those in all; what it raises ends the waiting.\n\n"
"Raises\n------\n"
"TimeoutError\n    If the time has passed; the copy goes on.\n"
"ValueError\n    If `timeout` is negative or not a number.\n"
"TypeError\n    If `timeout` is no number or `progress` cannot be called.\n"
"ImportError\n    If `progress` is True and there is no tqdm.\n"
"CancelledError\n    If the copy was cancelled.\n"
"CudaError\n    If the copy failed.\n"
"OSError\n    If an end is a mapped file that was cut short or cannot be read.\n\n"
"Notes\n-----\n"
"**Blocks** until then, GIL released; Ctrl-C interrupts the waiting, not the copy.");

PyDoc_STRVAR(order_doc,
"order($self, stream, /)\n--\n\n"
"Let a stream wait for the copy.\n\n"
"Parameters\n----------\n"
"stream : stream\n    Anything `Stream.from_external` takes; None is the current stream.\n\n"
"Raises\n------\n"
"TypeError\n    If `stream` is no stream.\n"
"CancelledError\n    If the copy was cancelled.\n"
"CudaError\n    If the copy has failed, or the driver refuses.\n\n"
"Notes\n-----\n"
"**Blocks**, GIL released, until the last piece is queued (for a target that the host has\n"
"to write, until it is written). Work queued on `stream` afterwards is\n"
"**ordered after** the copy.");

/* -- life -------------------------------------------------------------------------------- */

void
cm_transfer_end_ticket(cm_ticket *ticket)
{
    PyThreadState *thread = PyEval_SaveThread();
    (void)!cm_is_ok(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_release(ticket);
    PyEval_RestoreThread(thread);
}

PyObject *
cm_transfer_object_new(cm_state *state, cm_ticket *ticket, PyObject *dst, PyObject *src)
{
    PyObject *op = PyType_GenericAlloc(state->transfer_type, 0);
    if (op == NULL) {
        cm_py_report(state, cm_ticket_abandon(ticket), NULL);
        return NULL;
    }
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    self->state = state;
    self->ticket = ticket;
    self->dst = Py_NewRef(dst);
    self->src = Py_NewRef(src);
    return op;
}

static int
transfer_traverse(PyObject *op, visitproc visit, void *arg)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->dst);
    Py_VISIT(self->src);
    return 0;
}

static int
transfer_clear(PyObject *op)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    Py_CLEAR(self->dst);
    Py_CLEAR(self->src);
    return 0;
}

static void
transfer_dealloc(PyObject *op)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    if (self->ticket != NULL) {
        /* after shutdown() there is no engine that would tell of a failure */
        cm_py_report(self->state, cm_ticket_abandon(self->ticket),
                     (PyObject *)(void *)Py_TYPE(op));
    }
    (void)transfer_clear(op);
    cm_object_free(op);
}

static cm_ticket_info
read_info(PyObject *op)
{
    cm_ticket *ticket = ((cm_transfer_object *)(void *)op)->ticket;
    cm_ticket_info info;
    cm_ticket_look(ticket, &info);
    if (!info.done) {
        Py_BEGIN_ALLOW_THREADS
        cm_ticket_read(ticket, &info);
        Py_END_ALLOW_THREADS
    }
    return info;
}

/* -- waiting ----------------------------------------------------------------------------- */

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

/* What was freed meanwhile by threads without the GIL goes back now. */
static void
drop_deferred(const cm_transfer_object *self)
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
        || !cm_wait_for_ticket(self->ticket, cm_ticket_wait, timeout, progress,
                               info.nbytes, &status)) {
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
    drop_deferred(self);
    return cm_progress_tell(progress, info.nbytes, info.nbytes) == 0;
}

static PyObject *
transfer_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"timeout", "progress", NULL};
    const cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    PyObject *values[2];
    cm_progress progress;
    if (cm_args_parse("wait", args, nargs, kwnames, names, 1, 0, values) < 0
        || cm_progress_open(values[1], "copy", &progress) < 0) {
        return NULL;
    }
    (void)wait_and_tell(self, values[0], &progress);
    return cm_progress_close(&progress) < 0 ? NULL : Py_NewRef(Py_None);
}

int
cm_transfer_order(const cm_transfer_object *transfer, cm_stream *stream)
{
    cm_status status;
    if (!cm_wait_for_ticket(transfer->ticket, cm_ticket_settle, UINT64_MAX, NULL, 0,
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

/* -- methods ----------------------------------------------------------------------------- */

static PyObject *
transfer_order(PyObject *op, PyObject *object)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    cm_stream *stream = cm_stream_from_object(self->state, object, -1);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_transfer_order(self, stream);
    cm_stream_give(self->state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
transfer_cancel(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    bool cancelled;
    Py_BEGIN_ALLOW_THREADS
    cancelled = cm_ticket_cancel(self->ticket);
    Py_END_ALLOW_THREADS
    if (cancelled) {
        (void)transfer_clear(op);
        drop_deferred(self);
    }
    return PyBool_FromLong(cancelled);
}

static PyObject *
transfer_await(PyObject *op)
{
    return cm_package_call("awaiting", "await_transfer", PyTuple_Pack(1, op));
}

/* For that: write to an eventfd when it is done. */
static PyObject *
transfer_notify(PyObject *op, PyObject *object)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    int64_t fd;
    if (cm_arg_int64(object, "fd", &fd) < 0) {
        return NULL;
    }
    return cm_py_answer(self->state, cm_ticket_notify(self->ticket, (int)fd),
                        "while awaiting a transfer", Py_NewRef(Py_None));
}

static PyObject *
transfer_repr(PyObject *op)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    const cm_runtime *rt = self->state->runtime;
    cm_ticket_info info = read_info(op);
    return PyUnicode_FromFormat(
        "<cumem.Transfer of %llu bytes, %s, %s%s>", (unsigned long long)info.nbytes,
        cm_routes[info.route].text,
        info.cancelled          ? "cancelled"
        : !info.done            ? "running"
        : cm_is_ok(info.status) ? "done"
                                : "failed",
        rt != NULL && rt->backend == CM_BACKEND_EMULATED ? ", emulated" : "");
}

/* -- getters ----------------------------------------------------------------------------- */

static PyObject *
transfer_get_done(PyObject *op, void *Py_UNUSED(closure))
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    const cm_runtime *rt = self->state->runtime;
    cm_ticket_info info = read_info(op);
    if (!info.done && rt != NULL && cm_runtime_is_forked(rt)) {
        /* the parent's threads end it, and a loop here would never see that */
        return cm_py_raise(self->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    return PyBool_FromLong(info.done);
}

static PyObject *
transfer_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(read_info(op).nbytes);
}

static PyObject *
transfer_get_progress(PyObject *op, void *Py_UNUSED(closure))
{
    const cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    return PyLong_FromUnsignedLongLong(cm_ticket_count_moved(self->ticket));
}

static PyObject *
transfer_get_cancelled(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(read_info(op).cancelled);
}

static PyObject *
transfer_get_seconds(PyObject *op, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(read_info(op).seconds);
}

static PyObject *
transfer_get_gbps(PyObject *op, void *Py_UNUSED(closure))
{
    cm_ticket_info info = read_info(op);
    bool known = info.done && cm_is_ok(info.status) && info.seconds > 0;
    return PyFloat_FromDouble(known ? (double)info.nbytes * 1e-9 / info.seconds : 0.0);
}

static PyObject *
transfer_get_route(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(cm_routes[read_info(op).route].text);
}

/* -- tables ------------------------------------------------------------------------------ */

static PyMethodDef transfer_methods[] = {
    {"wait", CM_METHOD(transfer_wait), CM_KEYWORDS, wait_doc},
    {"cancel", transfer_cancel, METH_NOARGS, cancel_doc},
    {"order", transfer_order, METH_O, order_doc},
    {"_notify", transfer_notify, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transfer_getset[] = {
    {"done", transfer_get_done, NULL,
     "True when the copy is over, also when it failed. Never blocks. RuntimeError in "
     "a\n"
     "child made by ``fork`` if it was not over by then.",
     NULL},
    {"nbytes", transfer_get_nbytes, NULL,
     "Payload in bytes; a source that is repeated to fit counts once.", NULL},
    {"progress", transfer_get_progress, NULL,
     "Bytes of `nbytes` that have arrived, in whole pieces; it never falls, and is\n"
     "`nbytes` just when all is done without a failure. What one call of the driver\n"
     "moves is nothing until then. Never blocks.",
     NULL},
    {"cancelled", transfer_get_cancelled, NULL,
     "True when `cancel` has cancelled it. Never blocks.", NULL},
    {"seconds", transfer_get_seconds, NULL,
     "Time from start to end, in seconds: by the device's clock for what a stream did\n"
     "alone, else by the host's; 0.0 while it is not done.",
     NULL},
    {"gbps", transfer_get_gbps, NULL,
     "Payload per time, in 1e9 bytes a second; 0.0 while it is not done.", NULL},
    {"route", transfer_get_route, NULL,
     "How the bytes went: \"nothing\", \"host\", \"direct\", \"direct-2d\", \"peer\",\n"
     "\"peer-staged\", \"kernel\", \"staged\" or \"staged-kernel\".",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef transfer_members[] = CM_WEAKREFS(cm_transfer_object);

static PyType_Slot transfer_slots[] = {
    {Py_tp_doc, (void *)transfer_doc}, {Py_tp_traverse, transfer_traverse},
    {Py_tp_clear, transfer_clear},     {Py_tp_dealloc, transfer_dealloc},
    {Py_tp_repr, transfer_repr},       {Py_am_await, transfer_await},
    {Py_tp_methods, transfer_methods}, {Py_tp_getset, transfer_getset},
    {Py_tp_members, transfer_members}, {0, NULL},
};

static PyType_Spec transfer_spec = {
    .name = "cumem.Transfer",
    .basicsize = sizeof(cm_transfer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = transfer_slots,
};

int
cm_register_transfer_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, &transfer_spec, NULL, &state->transfer_type);
}
