/* SPDX-License-Identifier: Apache-2.0 */
/* What is tried, in which order, before an allocation fails. */
#include "python/pool/out_of_memory.h"

#include <stdio.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/wait.h"

/* Callbacks and finalisers may allocate, and run out of memory as well: then nothing is
 * called a second time. */
static _Thread_local int depth;

typedef struct attempt {
    cm_state *state;
    cm_pool *pool;
    uint64_t nbytes;
    cm_stream *stream;
    cm_block *block;
    cm_status status;
    PyObject *tried; /* owned: list of str; NULL until something is */
} attempt;

static bool
is_shortage(cm_status status)
{
    return status.code == CM_CUDA_OUT_OF_MEMORY || status.code == CM_ELIMIT
           || status.code == CM_EHOSTMEMORY;
}

/* True when there is nothing left to try: a block, or an error of another sort. */
static bool
try_again(attempt *self)
{
    cm_status status;
    cm_block *block = NULL;
    cm_state_enter(self->state);
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    status =
        cm_pool_alloc_asking(self->pool, self->nbytes, self->stream, &hooks, &block);
    PyEval_RestoreThread(waiter.thread);
    cm_state_leave(self->state);
    self->status = status;
    self->block = cm_is_ok(status) ? block : NULL;
    return !is_shortage(status);
}

/* Takes over `text`. 0, or -1 with an exception, also that of a signal's handler. */
static int
note(attempt *self, PyObject *text)
{
    if (PyErr_Occurred()) {
        Py_XDECREF(text);
        return -1;
    }
    if (self->tried == NULL) {
        self->tried = PyList_New(0);
    }
    int result =
        text == NULL || self->tried == NULL ? -1 : PyList_Append(self->tried, text);
    Py_XDECREF(text);
    return result;
}

/* -- the steps: 0, or -1 with an exception; *done when nothing is left to try ---------- */

/* Do two pools take their memory from the same place, or count against the same limit?
 */
static bool
shares_memory(const cm_pool_config *a, const cm_pool_config *b)
{
    if (cm_kind_is_host(a->kind) || cm_kind_is_host(b->kind)) {
        return cm_kind_is_host(a->kind) && cm_kind_is_host(b->kind);
    }
    return a->device == b->device;
}

/* Is it the pool's own limit that is met? What other pools give back is no use then. */
static bool
is_own_limit(const attempt *self)
{
    return self->status.code == CM_ELIMIT
           && cm_budget_left(cm_pool_get_config(self->pool)->budget) < self->status.arg;
}

static int
trim_others(attempt *self, bool *done)
{
    if (is_own_limit(self)) {
        return 0;
    }
    cm_pool_entry *entries;
    size_t count;
    if (cm_pools_take_all(self->state, &entries, &count) < 0) {
        return -1;
    }
    uint64_t released = 0;
    int trimmed = 0;
    cm_status waited = cm_ok();
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    for (size_t i = 0; i < count; i++) {
        cm_pool *other = entries[i].pool;
        if (other != self->pool
            && shares_memory(cm_pool_get_config(other),
                             cm_pool_get_config(self->pool))) {
            uint64_t nbytes = 0;
            waited = cm_pool_await(other, &hooks);
            if (!cm_is_ok(waited)) {
                break;
            }
            cm_status refused = cm_pool_trim(other, 0, true, &nbytes);
            (void)refused; /* the allocation is what must succeed: it is tried again */
            released += nbytes;
            trimmed++;
        }
    }
    PyEval_RestoreThread(waiter.thread);
    cm_pools_give_all(self->state, entries, count);
    if (!cm_is_ok(waited)) {
        return -1;
    }
    if (trimmed == 0) {
        return 0;
    }
    *done = released > 0 && try_again(self);
    return note(self, PyUnicode_FromFormat("trimmed %d other pool%s, %llu bytes",
                                           trimmed, trimmed == 1 ? "" : "s",
                                           (unsigned long long)released));
}

/* An Exception of a callback must not hide that memory is short; what is none (Ctrl-C)
 * must not be lost. */
static int
call_back(attempt *self, PyObject *callback)
{
    const cm_pool_config *config = cm_pool_get_config(self->pool);
    PyObject *answer =
        PyObject_CallFunction(callback, "siK", cm_kind_name(config->kind),
                              config->device, (unsigned long long)self->nbytes);
    Py_XDECREF(answer);
    if (answer == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_WriteUnraisable(callback);
    }
    return 0;
}

static int
run_callbacks(attempt *self, bool *done)
{
    PyObject *callbacks = PyList_AsTuple(self->state->out_of_memory_callbacks);
    if (callbacks == NULL) {
        return -1;
    }
    int result = 0;
    Py_ssize_t count = PyTuple_Size(callbacks);
    for (Py_ssize_t i = 0; i < count && result == 0 && !*done; i++) {
        result = call_back(self, PyTuple_GetItem(callbacks, i));
        if (result == 0) {
            *done = try_again(self);
            result = note(
                self, PyUnicode_FromFormat("called callback %zd of %zd", i + 1, count));
        }
    }
    Py_DECREF(callbacks);
    return result;
}

static int
collect_garbage(attempt *self, bool *done)
{
    PyObject *gc = PyImport_ImportModule("gc"); /* PyGC_Collect() obeys gc.disable() */
    PyObject *count = gc == NULL ? NULL : PyObject_CallMethod(gc, "collect", NULL);
    Py_XDECREF(gc);
    if (count == NULL) {
        return -1;
    }
    Py_DECREF(count);
    cm_state_drop_deferred(self->state);
    *done = try_again(self);
    return note(self, PyUnicode_FromString("collected garbage"));
}

/* -- the chain ------------------------------------------------------------------------- */

static int
run_steps(attempt *self)
{
    bool done = false;
    if (note(self, PyUnicode_FromString("waited for memory in flight and trimmed the "
                                        "pool"))
            < 0
        || trim_others(self, &done) < 0) {
        return -1;
    }
    if (done || depth > 0) {
        return 0;
    }
    depth++;
    int result = run_callbacks(self, &done);
    if (result == 0 && !done) {
        result = collect_garbage(self, &done);
    }
    depth--;
    return result;
}

static void
raise(attempt *self)
{
    if (is_shortage(self->status)) {
        cm_shortage shortage = {self->pool, self->nbytes, self->status, self->tried};
        cm_shortage_raise(self->state, &shortage);
        return;
    }
    const cm_pool_config *config = cm_pool_get_config(self->pool);
    char doing[128];
    (void)snprintf(
        doing, sizeof(doing), "while allocating %llu bytes of %s memory for device %d",
        (unsigned long long)self->nbytes, cm_kind_name(config->kind), config->device);
    (void)cm_py_raise(self->state, self->status, doing);
}

/* 0, or -1 with an exception, and then without a block. */
static int
take_steps(attempt *self)
{
    cm_state_enter(self->state); /* Python code runs: no shutdown below it */
    int result = run_steps(self);
    cm_state_leave(self->state);
    if (result < 0 && self->block != NULL) {
        cm_pool_free(self->pool, self->block, NULL, 0, 0);
        self->block = NULL;
    }
    return result;
}

cm_status
cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                    cm_status status, cm_block **out)
{
    attempt self = {.state = state,
                    .pool = pool,
                    .nbytes = nbytes,
                    .stream = stream,
                    .status = status};
    PyGILState_STATE gil = PyGILState_Ensure();
    if (take_steps(&self) < 0) {
        self.status = cm_fail(CM_ECANCELLED, 0);
    }
    Py_XDECREF(self.tried);
    PyGILState_Release(gil);
    *out = self.block;
    return self.status;
}

cm_block *
cm_block_alloc(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    attempt self = {.state = state, .pool = pool, .nbytes = nbytes, .stream = stream};
    if (!try_again(&self)) {
        (void)take_steps(&self);
    }
    if (self.block == NULL && !PyErr_Occurred()) {
        raise(&self);
    }
    Py_XDECREF(self.tried);
    return self.block;
}
