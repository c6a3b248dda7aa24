/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Transfer is a copy that may still be running. */
#include <errno.h>

#include "base/nvtx.h"
#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

/* -- life -------------------------------------------------------------------------------- */

PyObject *
cm_transfer_object_new(cm_state *state, cm_ticket *ticket, PyObject *dst, PyObject *src,
                       int device)
{
    PyObject *module = PyType_GetModule(state->transfer_type);
    PyObject *op = module == NULL ? NULL : PyType_GenericAlloc(state->transfer_type, 0);
    if (op == NULL) {
        cm_py_report(state, cm_ticket_abandon(ticket), NULL);
        return NULL;
    }
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    self->state = state;
    self->ticket = ticket;
    self->dst = Py_NewRef(dst);
    self->src = Py_NewRef(src);
    self->module = Py_NewRef(module);
    self->device = device;
    return op;
}

void
cm_transfer_watch(PyObject *transfer, PyObject *watched,
                  int (*check)(cm_state *state, PyObject *watched))
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)transfer;
    self->watched = Py_NewRef(watched);
    self->check = check;
}

void
cm_transfer_name_file(PyObject *transfer, PyObject *name)
{
    ((cm_transfer_object *)(void *)transfer)->file_name = Py_NewRef(name);
}

static int
transfer_traverse(PyObject *op, visitproc visit, void *arg)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->dst);
    Py_VISIT(self->src);
    Py_VISIT(self->watched);
    Py_VISIT(self->file_name);
    Py_VISIT(self->module);
    return 0;
}

static int
transfer_clear(PyObject *op)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    Py_CLEAR(self->dst);
    Py_CLEAR(self->src);
    Py_CLEAR(self->watched);
    return 0;
}

static void
transfer_dealloc(PyObject *op)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    if (self->ticket != NULL) {
        /* After shutdown() there is no engine that would report a failure. */
        cm_py_report(self->state, cm_ticket_abandon(self->ticket),
                     (PyObject *)(void *)Py_TYPE(op));
    }
    (void)transfer_clear(op);
    Py_CLEAR(self->file_name);
    /* The module is dropped last, since the interpreter's last garbage collection
     * clears objects in any order. */
    PyObject *module = self->module;
    cm_object_free(op);
    Py_XDECREF(module);
}

static cm_ticket_info
read_info(PyObject *op)
{
    cm_ticket *ticket = ((cm_transfer_object *)(void *)op)->ticket;
    cm_ticket_info info;
    cm_ticket_peek(ticket, &info);
    if (!info.done) {
        Py_BEGIN_ALLOW_THREADS
        cm_ticket_query(ticket, &info);
        Py_END_ALLOW_THREADS
    }
    return info;
}

/* -- memory that was moved meanwhile ------------------------------------------------------ */

/* Check, once the copy is done, that the memory of its ends is still where it was when
 * the copy began. If it moved before anybody saw the end of the copy, it may have moved
 * before the end, so this counts as a failure. From now on the memory may move. Returns
 * 0, or -1 with BufferError, in each later call too. */
static int
check_memory(cm_transfer_object *self)
{
    PyObject *watched = self->watched == NULL ? NULL : Py_NewRef(self->watched);
    int result = watched == NULL ? 0 : self->check(self->state, watched);
    Py_XDECREF(watched);
    if (result == 0) {
        Py_CLEAR(self->watched);
    }
    return result;
}

/* -- waiting ----------------------------------------------------------------------------- */

/* Raise the failure of the copy. If the system has refused to write a file, the error
 * is that of Python's own functions, with the name of the file. Returns -1. */
static int
raise_failure(const cm_transfer_object *self, cm_status status)
{
    if (self->file_name == NULL || status.code != CM_ESYSTEM) {
        return cm_py_raise_int(self->state, status, "while copying");
    }
    errno = (int)status.arg;
    (void)PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->file_name);
    return -1;
}

/* Wait for the copy of `nbytes`, and report to `progress` how far it is. `progress` is
 * NULL if nobody wants to know. Returns 0, or -1 with an exception. */
static int
wait_for_end(cm_transfer_object *self, PyObject *timeout_object,
             const cm_progress *progress, uint64_t nbytes)
{
    uint64_t timeout;
    cm_status status;
    if (cm_arg_timeout(timeout_object, "timeout", &timeout) < 0
        || !cm_wait_for_ticket(self->ticket, cm_ticket_wait, timeout, progress, nbytes,
                               &status)) {
        return -1;
    }
    if (status.code == CM_ETIMEOUT) {
        PyErr_Format(PyExc_TimeoutError, "the transfer is not done after %R s",
                     timeout_object);
        return -1;
    }
    if (!cm_is_ok(status)) {
        return raise_failure(self, status);
    }
    cm_state_drop_own(self->state); /* frees now the objects that were dropped
                                       meanwhile */
    return check_memory(self);
}

/* Do the same, and report to `progress_object`, the argument progress=, which is called
 * at the end as well. */
static int
wait_and_report(cm_transfer_object *self, PyObject *timeout_object,
                PyObject *progress_object)
{
    cm_progress progress;
    cm_ticket_info info;
    if (cm_progress_open(progress_object, "copy", &progress) < 0) {
        return -1;
    }
    cm_ticket_peek(self->ticket, &info);
    if (wait_for_end(self, timeout_object, &progress, info.nbytes) == 0) {
        (void)cm_progress_report(&progress, info.nbytes, info.nbytes);
    }
    return cm_progress_close(&progress); /* keeps an exception that is set */
}

static PyObject *
transfer_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"timeout", "progress", NULL};
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    PyObject *values[2];
    if (cm_args_parse("wait", args, nargs, kwnames, names, 1, 0, values) < 0) {
        return NULL;
    }
    CM_NVTX("wait for copy", read_info(op).nbytes);
    int result = cm_arg_is_given(values[1])
                     ? wait_and_report(self, values[0], values[1])
                     : wait_for_end(self, values[0], NULL, 0);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

int
cm_transfer_order(const cm_transfer_object *transfer, cm_stream *stream)
{
    cm_status status;
    if (!cm_wait_for_ticket(transfer->ticket, cm_ticket_wait_submitted, UINT64_MAX,
                            NULL, 0, &status)) {
        return -1;
    }
    if (cm_is_ok(status)) {
        status = CM_WITHOUT_GIL(cm_ticket_order(transfer->ticket, stream));
    }
    return cm_py_check(transfer->state, status, "while ordering a stream after a copy");
}

/* -- methods ----------------------------------------------------------------------------- */

static PyObject *
transfer_order(PyObject *op, PyObject *object)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    cm_stream *stream = cm_stream_from_object(self->state, object, self->device);
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
    bool cancelled = CM_WITHOUT_GIL(cm_ticket_cancel(self->ticket));
    if (cancelled) {
        (void)transfer_clear(op);
        cm_state_drop_own(self->state);
    }
    return PyBool_FromLong(cancelled);
}

/* End the copy early, even if it has begun. cumem/transfers/multi_device.py calls
 * this. */
static PyObject *
transfer_stop(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_ticket_stop(((cm_transfer_object *)(void *)op)->ticket);
    return Py_NewRef(Py_None);
}

static PyObject *
transfer_await(PyObject *op)
{
    return cm_package_call("devices.awaiting", "await_transfer", PyTuple_Pack(1, op));
}

static const char bell_name[] = "cumem.bell";

static void
bell_destroy(PyObject *capsule)
{
    cm_bell_release(PyCapsule_GetPointer(capsule, bell_name));
}

/* Make a bell of the eventfd whose number is given, as a capsule. Any transfer can ring
 * it. */
static PyObject *
transfer_make_bell(PyObject *op, PyObject *object)
{
    cm_bell *bell = NULL;
    int64_t fd;
    if (cm_arg_int64(object, "fd", &fd) < 0) {
        return NULL;
    }
    cm_status status = cm_bell_create((int)fd, &bell);
    if (!cm_is_ok(status)) {
        return cm_py_raise(((cm_transfer_object *)(void *)op)->state, status,
                           "while awaiting a transfer");
    }
    PyObject *capsule = PyCapsule_New(bell, bell_name, bell_destroy);
    if (capsule == NULL) {
        cm_bell_release(bell);
    }
    return capsule;
}

/* Ring a bell of _make_bell() when the copy is done. `await` and callbacks wait for it.
 */
static PyObject *
transfer_notify(PyObject *op, PyObject *object)
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    cm_bell *bell = PyCapsule_GetPointer(object, bell_name);
    if (bell == NULL) {
        return NULL;
    }
    return cm_py_answer(self->state, cm_ticket_notify(self->ticket, bell),
                        "while awaiting a transfer", Py_NewRef(Py_None));
}

/* Call fn(transfer), a callback of the user. If it raises, the error goes to the
 * unraisable hook, since there is no caller any more who could get it. This is a C
 * function because Python itself offers no way to hand an error to the hook. */
static PyObject *
transfer_call_back(PyObject *op, PyObject *fn)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(fn, op, NULL);
    if (answer == NULL) {
        PyErr_WriteUnraisable(fn);
    }
    Py_XDECREF(answer);
    return Py_NewRef(Py_None);
}

static PyObject *
transfer_repr(PyObject *op)
{
    const cm_state *state = ((cm_transfer_object *)(void *)op)->state;
    cm_ticket_info info = read_info(op);
    return cm_package_call("buffers.texts", "transfer_repr",
                           Py_BuildValue("(OiiN)", op, info.done, cm_is_ok(info.status),
                                         PyBool_FromLong(cm_state_is_emulated(state))));
}

/* Make the HTML by which a notebook shows the transfer. */
static PyObject *
transfer_html(PyObject *op, PyObject *Py_UNUSED(unused))
{
    bool is_emulated = cm_state_is_emulated(((cm_transfer_object *)(void *)op)->state);
    return cm_package_call("tools.notebook.objects", "_repr_html_",
                           Py_BuildValue("(ON)", op, PyBool_FromLong(is_emulated)));
}

/* -- getters ----------------------------------------------------------------------------- */

static PyObject *
transfer_get_done(PyObject *op, void *Py_UNUSED(closure))
{
    cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    cm_ticket_info info = read_info(op);
    /* The runtime is read after read_info() and not before, since read_info() let other
     * threads run. */
    const cm_runtime *rt = self->state->runtime;
    bool in_child = rt != NULL && (cm_runtime_is_forked(rt) || rt->is_host_only);
    if (!info.done && in_child) {
        /* Threads of the parent end the copy, which a loop in this child would never
         * see. */
        return cm_py_raise(self->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    if (info.done && cm_is_ok(info.status) && check_memory(self) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_BufferError)) {
            return NULL;
        }
        PyErr_Clear(); /* wait() raises it */
    }
    return PyBool_FromLong(info.done);
}

static PyObject *
transfer_get_progress(PyObject *op, void *Py_UNUSED(closure))
{
    const cm_transfer_object *self = (cm_transfer_object *)(void *)op;
    return PyLong_FromUnsignedLongLong(cm_ticket_count_moved(self->ticket));
}

/* The size has been known since the copy was planned, so the device is not asked. */
static PyObject *
transfer_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    cm_ticket_info info;
    cm_ticket_peek(((cm_transfer_object *)(void *)op)->ticket, &info);
    return PyLong_FromUnsignedLongLong(info.nbytes);
}

enum fact { FACT_cancelled, FACT_seconds, FACT_gbps, FACT_route };

static PyObject *
transfer_get(PyObject *op, void *fact)
{
    cm_ticket_info info = read_info(op);
    bool is_measured = info.done && cm_is_ok(info.status) && info.seconds > 0;
    switch ((uintptr_t)fact) {
    case FACT_cancelled:
        return PyBool_FromLong(info.cancelled);
    case FACT_seconds:
        return PyFloat_FromDouble(info.seconds);
    case FACT_gbps:
        return PyFloat_FromDouble(
            is_measured ? (double)info.nbytes * 1e-9 / info.seconds : 0.0);
    default:
        return PyUnicode_FromString(cm_route_text(info.row));
    }
}

CM_PACKAGED(Transfer, "base.answer", to_dict)
CM_PACKAGED(Transfer, "devices.awaiting", add_done_callback)
CM_PACKAGED(Transfer, "interchange.listing", list_names)

/* -- tables ------------------------------------------------------------------------------ */

static PyMethodDef transfer_methods[] = {
    {"wait", CM_METHOD(transfer_wait), CM_KEYWORDS, CM_DOC_Transfer_wait},
    {"cancel", transfer_cancel, METH_NOARGS, CM_DOC_Transfer_cancel},
    {"order", transfer_order, METH_O, CM_DOC_Transfer_order},
    {"_make_bell", transfer_make_bell, METH_O, NULL},
    {"_notify", transfer_notify, METH_O, NULL},
    {"_call_back", transfer_call_back, METH_O, NULL},
    {"_stop", transfer_stop, METH_NOARGS, NULL},
    CM_PACKAGED_METHOD(Transfer, add_done_callback)
        CM_PACKAGED_METHOD(Transfer, to_dict){"_repr_html_", transfer_html, METH_NOARGS,
                                              CM_DOC_Transfer__repr_html_},
    {"__dir__", CM_METHOD(Transfer_list_names), METH_VARARGS | METH_KEYWORDS,
     CM_DOC_Transfer___dir__},
    {NULL, NULL, 0, NULL},
};

#define FACT(name)                                                                     \
    {#name, transfer_get, NULL, CM_DOC_Transfer_##name, (void *)FACT_##name}

static PyGetSetDef transfer_getset[] = {
    {"done", transfer_get_done, NULL, CM_DOC_Transfer_done, NULL},
    {"nbytes", transfer_get_nbytes, NULL, CM_DOC_Transfer_nbytes, NULL},
    {"progress", transfer_get_progress, NULL, CM_DOC_Transfer_progress, NULL},
    FACT(cancelled),
    FACT(seconds),
    FACT(gbps),
    FACT(route),
    CM_HINT(get) CM_HINT(query) CM_HINT(result)
        CM_HINT(synchronize){NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef transfer_members[] = CM_WEAKREFS(cm_transfer_object);

static PyType_Slot transfer_slots[] = {
    {Py_tp_doc, (void *)CM_DOC_Transfer}, {Py_tp_traverse, transfer_traverse},
    {Py_tp_clear, transfer_clear},        {Py_tp_dealloc, transfer_dealloc},
    {Py_tp_repr, transfer_repr},          {Py_am_await, transfer_await},
    {Py_tp_methods, transfer_methods},    {Py_tp_getset, transfer_getset},
    {Py_tp_members, transfer_members},    {0, NULL},
};

int
cm_register_transfer_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, "cumem.Transfer", sizeof(cm_transfer_object),
                       Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                       transfer_slots, NULL, &state->transfer_type);
}
