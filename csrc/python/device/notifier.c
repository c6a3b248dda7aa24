/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers and event loops: one eventfd per loop, written by the engine when a
 * transfer is done, read by the loop, which then settles the futures of all that are. A
 * notifier knows its loop only through the futures that wait, so that an idle one keeps
 * no loop alive. */
#include <stddef.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "python/core/errors.h"
#include "python/device/notifier.h"
#include "python/device/objects.h"

typedef struct waiter {
    cm_ticket *ticket; /* held */
    PyObject *future;  /* owned */
} waiter;

typedef struct notifier_object {
    PyObject_HEAD
    cm_state *state;
    int fd;          /* owned; -1: none */
    bool is_reading; /* the loop watches fd */
    Py_ssize_t count;
    Py_ssize_t capacity;
    waiter *waiters; /* owned */
} notifier_object;

/* -- life -------------------------------------------------------------------------------- */

static int
notifier_traverse(PyObject *op, visitproc visit, void *arg)
{
    notifier_object *self = (notifier_object *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->waiters[i].future);
    }
    return 0;
}

static int
notifier_clear(PyObject *op)
{
    notifier_object *self = (notifier_object *)(void *)op;
    while (self->count > 0) {
        waiter last = self->waiters[--self->count];
        cm_ticket_release(last.ticket);
        Py_DECREF(last.future);
    }
    return 0;
}

static void
notifier_dealloc(PyObject *op)
{
    notifier_object *self = (notifier_object *)(void *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)notifier_clear(op);
    PyMem_Free(self->waiters);
    if (self->fd >= 0) {
        (void)close(self->fd);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
}

static PyObject *
notifier_new(cm_state *state)
{
    PyObject *op = PyType_GenericAlloc(state->notifier_type, 0);
    if (op == NULL) {
        return NULL;
    }
    notifier_object *self = (notifier_object *)(void *)op;
    self->state = state;
    self->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(op);
        return NULL;
    }
    return op;
}

/* -- waiters ----------------------------------------------------------------------------- */

/* 1 done (or cancelled), 0 not, -1 exception. */
static int
is_future_done(PyObject *future)
{
    PyObject *answer = PyObject_CallMethod(future, "done", NULL);
    int done = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return done;
}

/* Give the future the outcome of its transfer, which is done. 0 or -1. */
static int
settle_future(cm_state *state, const waiter *waiting)
{
    PyObject *answer;
    cm_status status = cm_ticket_wait(waiting->ticket, 0);
    if (cm_is_ok(status)) {
        answer = PyObject_CallMethod(waiting->future, "set_result", "O", Py_None);
    }
    else {
        PyObject *type, *error, *traceback;
        cm_py_raise(state, status, "while copying");
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        answer = PyObject_CallMethod(waiting->future, "set_exception", "O", error);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Let go of a waiter, first looked for at `hint`. False: it has gone. */
static bool
forget_future(notifier_object *self, const PyObject *future, Py_ssize_t hint)
{
    Py_ssize_t i = hint;
    if (hint >= self->count || self->waiters[hint].future != future) {
        for (i = self->count - 1; i >= 0 && self->waiters[i].future != future; i--) {
        }
    }
    if (i < 0) {
        return false;
    }
    waiter found = self->waiters[i];
    self->waiters[i] = self->waiters[--self->count];
    cm_ticket_release(found.ticket);
    Py_DECREF(found.future);
    return true;
}

/* `waiting` was at `index`. 0 or -1. */
static int
settle_waiter(notifier_object *self, const waiter *waiting, Py_ssize_t index)
{
    cm_ticket_info info;
    int over = is_future_done(waiting->future);
    if (over < 0) {
        return -1;
    }
    cm_ticket_look(waiting->ticket, &info);
    if ((!over && !info.done) || !forget_future(self, waiting->future, index)) {
        return 0; /* not yet, or settled by what done() called */
    }
    return over ? 0 : settle_future(self->state, waiting);
}

/* Settle and forget what is over. 0 or -1; those that are left stay. A future may be
 * Python code that comes back here: after each call waiters may have gone and come, and
 * the array may be another. */
static int
settle_waiters(notifier_object *self)
{
    int result = 0;
    for (Py_ssize_t i = self->count; i-- > 0 && result == 0;) {
        if (i >= self->count) {
            continue; /* what we called took some out */
        }
        waiter waiting = {.ticket = cm_ticket_hold(self->waiters[i].ticket),
                          .future = Py_NewRef(self->waiters[i].future)};
        result = settle_waiter(self, &waiting, i);
        cm_ticket_release(waiting.ticket);
        Py_DECREF(waiting.future);
    }
    return result;
}

static int
set_reading(notifier_object *self, PyObject *op, PyObject *loop, bool on)
{
    PyObject *answer;
    if (self->is_reading == on) {
        return 0;
    }
    if (on) {
        PyObject *wake = PyObject_GetAttrString(op, "_wake");
        answer = wake == NULL
                     ? NULL
                     : PyObject_CallMethod(loop, "add_reader", "iO", self->fd, wake);
        Py_XDECREF(wake);
    }
    else {
        answer = PyObject_CallMethod(loop, "remove_reader", "i", self->fd);
    }
    if (answer == NULL) {
        return -1;
    }
    Py_DECREF(answer);
    self->is_reading = on;
    return 0;
}

static PyObject *
running_loop(void)
{
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    if (asyncio == NULL) {
        return NULL;
    }
    PyObject *loop = PyObject_CallMethod(asyncio, "get_running_loop", NULL);
    Py_DECREF(asyncio);
    return loop;
}

/* Called by the loop when fd is readable, and when a future is done for another reason
 * (which then is the argument). */
static PyObject *
notifier_wake(PyObject *op, PyObject *args CM_UNUSED)
{
    notifier_object *self = (notifier_object *)(void *)op;
    uint64_t count;
    ssize_t got = read(self->fd, &count, sizeof(count));
    (void)got; /* nothing there: a future was cancelled */
    if (settle_waiters(self) < 0) {
        return NULL;
    }
    if (self->count == 0 && self->is_reading) {
        PyObject *loop = running_loop();
        int result = loop == NULL ? -1 : set_reading(self, op, loop, false);
        Py_XDECREF(loop);
        if (result < 0) {
            return NULL;
        }
    }
    return Py_NewRef(Py_None);
}

static int
add_waiter(notifier_object *self, cm_ticket *ticket, PyObject *future)
{
    if (self->count == self->capacity) {
        Py_ssize_t capacity = self->capacity == 0 ? 4 : 2 * self->capacity;
        waiter *larger =
            PyMem_Realloc(self->waiters, (size_t)capacity * sizeof(*larger));
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->waiters = larger;
        self->capacity = capacity;
    }
    self->waiters[self->count++] =
        (waiter){.ticket = cm_ticket_hold(ticket), .future = Py_NewRef(future)};
    return 0;
}

/* -- await ------------------------------------------------------------------------------- */

/* New reference. */
static PyObject *
notifier_of_loop(cm_state *state, PyObject *loop)
{
    PyObject *notifier = PyObject_GetItem(state->notifiers, loop);
    if (notifier != NULL || !PyErr_ExceptionMatches(PyExc_KeyError)) {
        return notifier;
    }
    PyErr_Clear();
    notifier = notifier_new(state);
    if (notifier != NULL && PyObject_SetItem(state->notifiers, loop, notifier) < 0) {
        Py_CLEAR(notifier);
    }
    return notifier;
}

/* A future of `loop` that the notifier settles, as what `await` iterates over. */
static PyObject *
await_future(PyObject *op, cm_ticket *ticket, PyObject *loop)
{
    notifier_object *self = (notifier_object *)(void *)op;
    PyObject *iterator = NULL;
    PyObject *wake = PyObject_GetAttrString(op, "_wake");
    PyObject *future =
        wake == NULL ? NULL : PyObject_CallMethod(loop, "create_future", NULL);
    if (future != NULL && set_reading(self, op, loop, true) == 0
        && add_waiter(self, ticket, future) == 0) {
        cm_status status = cm_ticket_notify(ticket, self->fd);
        PyObject *added =
            cm_is_ok(status)
                ? PyObject_CallMethod(future, "add_done_callback", "O", wake)
                : cm_py_raise(self->state, status, "while awaiting a transfer");
        iterator =
            added == NULL ? NULL : PyObject_CallMethod(future, "__await__", NULL);
        Py_XDECREF(added);
        if (iterator == NULL) {
            (void)forget_future(self, future, 0);
        }
    }
    Py_XDECREF(wake);
    Py_XDECREF(future);
    return iterator;
}

PyObject *
cm_notifier_await(cm_state *state, cm_ticket *ticket)
{
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_ticket_wait(ticket, 0);
    Py_END_ALLOW_THREADS
    if (cm_is_ok(status)) {
        PyObject *nothing = PyTuple_New(0);
        PyObject *iterator = nothing == NULL ? NULL : PyObject_GetIter(nothing);
        Py_XDECREF(nothing);
        return iterator;
    }
    if (status.code != CM_ETIMEOUT) {
        return cm_py_raise(state, status, "while copying");
    }
    PyObject *loop = running_loop();
    PyObject *notifier = loop == NULL ? NULL : notifier_of_loop(state, loop);
    PyObject *iterator = notifier == NULL ? NULL : await_future(notifier, ticket, loop);
    Py_XDECREF(notifier);
    Py_XDECREF(loop);
    return iterator;
}

/* -- tables ------------------------------------------------------------------------------ */

static PyMethodDef notifier_methods[] = {
    {"_wake", notifier_wake, METH_VARARGS,
     "_wake($self, /, *args)\n--\n\nSettle the futures of transfers that are done."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot notifier_slots[] = {
    {Py_tp_doc, (void *)"Wakes an event loop when transfers are done."},
    {Py_tp_traverse, notifier_traverse},
    {Py_tp_clear, notifier_clear},
    {Py_tp_dealloc, notifier_dealloc},
    {Py_tp_methods, notifier_methods},
    {0, NULL},
};

static PyType_Spec notifier_spec = {
    .name = "cumem._core._Notifier",
    .basicsize = sizeof(notifier_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = notifier_slots,
};

int
cm_register_notifier_type(PyObject *module, cm_state *state)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &notifier_spec, NULL);
    state->notifier_type = (PyTypeObject *)(void *)type;
    PyObject *weakref = type == NULL ? NULL : PyImport_ImportModule("weakref");
    if (weakref == NULL) {
        return -1;
    }
    state->notifiers = PyObject_CallMethod(weakref, "WeakKeyDictionary", NULL);
    Py_DECREF(weakref);
    return state->notifiers == NULL ? -1 : 0;
}
