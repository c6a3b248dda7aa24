/* SPDX-License-Identifier: Apache-2.0 */
/* What a Pool does: hand out, tell, give back, be current, end. */
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"
#include "python/device/wait.h"
#include "python/pool/allocate.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(allocate_doc,
"allocate($self, /, nbytes, stream=None)\n--\n\n"
"Allocate a one-dimensional buffer of bytes.\n\n"
"Parameters\n----------\n"
"nbytes : int\n    Its length in bytes; 0 is fine.\n"
"stream : Stream or other stream object, optional\n"
"    The stream to use it on first; default: the current one for device memory, none for\n"
"    the other kinds.\n\n"
"Returns\n-------\n"
"Buffer\n    Of dtype uint8 and of the pool's kind. Its bytes are not set.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n"
"    If `nbytes` is negative or does not fit in 63 bits, `stream` is of another device, or\n"
"    the pool is closed.\n"
"OutOfMemoryError\n"
"    If there is no room, also after waiting for freed memory and trimming pools.\n"
"CudaError\n    If a call to CUDA failed.\n\n"
"Notes\n-----\n"
"**Blocks** only when the pool has nothing that fits, GIL released.\n"
"**Ordered after**: device memory may be used at once on `stream`; on another stream the\n"
"user orders it.");

PyDoc_STRVAR(stats_doc,
"stats($self, /)\n--\n\n"
"Read all counters at one moment.\n\n"
"Returns\n-------\nPoolStats\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");

PyDoc_STRVAR(snapshot_doc,
"snapshot($self, /)\n--\n\n"
"List all segments and blocks at one moment.\n\n"
"Returns\n-------\nSnapshot\n    ``print()`` draws it as a map.\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");

PyDoc_STRVAR(trim_doc,
"trim($self, /, keep=0, wait=True)\n--\n\n"
"Give cached memory back to the driver.\n\n"
"Parameters\n----------\n"
"keep : int or str\n"
             "    So many bytes stay cached, as ``1 << 20`` or ``\"1MiB\"``: memory goes back in\n"
             "    whole pieces while so much is left.\n"
             "wait : bool\n"
"    Wait first for work on memory that was freed, so that it goes back as well.\n\n"
"Returns\n-------\nint\n    Bytes given back.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n    If `keep` cannot be read or the pool is closed.\n"
"CudaError\n    If the driver refuses; the rest is still given back.\n\n"
"Notes\n-----\n**Blocks** while it waits and while the driver frees, GIL released.");

PyDoc_STRVAR(reset_peaks_doc,
"reset_peaks($self, /)\n--\n\n"
"Let the peaks start again from what is held now.\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");

PyDoc_STRVAR(close_doc,
"close($self, /)\n--\n\n"
"Allocate no more, and give back what is not in use; doing it twice is no error.\n\n"
"Buffers stay valid: their memory goes back when the last of them dies.\n\n"
"Raises\n------\nValueError\n    If it is a default pool; nothing is done then.\n\n"
"Notes\n-----\n"
"**Blocks** until work on memory that was freed is done, if no buffer is left; GIL\n"
"released. Ctrl-C ends the wait and leaves the pool open: close it again. Not so where the\n"
"pool is dropped instead, or where the last of its buffers dies after close(): that waits\n"
"to the end.");

PyDoc_STRVAR(enter_doc,
"__enter__($self, /)\n--\n\n"
"Make it current for its kind and device in this thread or task.\n\n"
"Blocks may end in any order, as those of generators do: the innermost of those still open\n"
"is current. Tasks started inside and contexts copied inside keep it after the block.\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");
PyDoc_STRVAR(exit_doc,
"__exit__($self, exc_type, exc, tb, /)\n--\n\n"
"End the block that was entered here: the others stay as they are, and the pool stays\n"
"open.\n\n"
"Raises\n------\nRuntimeError\n"
"    If the block was entered in another thread or context, as that of a generator may be\n"
"    that another thread closes: it is over there and here; or if it was not entered.");

/* -- methods ----------------------------------------------------------------------- */

static PyObject *
allocate_on(cm_pool_object *self, int64_t nbytes, cm_stream *stream)
{
    cm_state *state = self->state;
    const cm_pool_config *config = &self->config;
    return cm_buffer_allocate(state, self, config->kind, config->flags, config->device,
                              state->uint8_dtype, 1, &nbytes, 'C', stream);
}

static PyObject *
pool_allocate(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"nbytes", "stream", NULL};
    PyObject *values[2];
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (CM_UNLIKELY(kwnames != NULL || nargs < 1 || nargs > 2)) {
        if (cm_args_parse("allocate", args, nargs, kwnames, names, 2, 1, values) < 0) {
            return NULL;
        }
        args = values;
        nargs = values[1] == NULL ? 1 : 2;
    }
    int64_t nbytes;
    if (CM_UNLIKELY(!cm_arg_try_length(args[0], &nbytes))
        && cm_arg_int64(args[0], "nbytes", &nbytes) < 0) {
        return NULL;
    }
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must not be negative, got %lld",
                     (long long)nbytes);
        return NULL;
    }
    PyObject *stream_object = nargs == 2 ? args[1] : Py_None;
    PyObject *warm = cm_fast_bytes(self->state, self, nbytes,
                                   stream_object == Py_None ? NULL : stream_object);
    if (CM_LIKELY(warm != NULL)) {
        return warm;
    }
    if (stream_object == Py_None && self->config.kind != CM_KIND_DEVICE) {
        return allocate_on(self, nbytes, NULL);
    }
    cm_stream *stream =
        cm_stream_for_device(self->state, stream_object, self->config.device);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *buffer = allocate_on(self, nbytes, stream);
    cm_stream_give(self->state, stream);
    return buffer;
}

static PyObject *
pool_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = cm_pool_object_take(op);
    PyObject *result = pool == NULL ? NULL : cm_pool_read_stats(pool, self->number);
    cm_pool_object_give(op, pool);
    return result;
}

static PyObject *
pool_snapshot(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = cm_pool_object_take(op);
    PyObject *result =
        pool == NULL ? NULL : cm_pool_read_snapshot(self->state, pool, self->number);
    cm_pool_object_give(op, pool);
    return result;
}

static PyObject *
pool_trim(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"keep", "wait", NULL};
    PyObject *values[2];
    uint64_t keep = 0;
    bool wait = true;
    if (cm_args_parse("trim", args, nargs, kwnames, names, 2, 0, values) < 0
        || (values[0] != NULL && cm_arg_size_whole(values[0], "keep", &keep) < 0)
        || (values[1] != NULL && cm_arg_bool(values[1], "wait", &wait) < 0)) {
        return NULL;
    }
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    uint64_t released = 0;
    cm_status status;
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status waited = wait ? cm_pool_await(pool, &hooks) : cm_ok();
    status = cm_is_ok(waited) ? cm_pool_trim(pool, keep, wait, &released) : waited;
    PyEval_RestoreThread(waiter.thread);
    cm_pool_object_give(op, pool);
    if (!cm_is_ok(waited)) {
        return NULL; /* with the exception of a signal's handler */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, "while trimming a pool");
    }
    return PyLong_FromUnsignedLongLong(released);
}

static PyObject *
pool_reset_peaks(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    cm_pool_reset_peaks(pool);
    cm_pool_object_give(op, pool);
    Py_RETURN_NONE;
}

/* Cached memory goes at once, what live blocks hold with the last of them. */
static PyObject *
pool_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self->pool == NULL) {
        Py_RETURN_NONE;
    }
    if (self->number == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "a default pool cannot be closed: trim() it, or shutdown()");
        return NULL;
    }
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status waited = cm_pool_await(pool, &hooks); /* while it is open */
    PyEval_RestoreThread(waiter.thread);
    if (!cm_is_ok(waited)) {
        cm_pool_object_give(op, pool);
        return NULL; /* with the exception of a signal's handler */
    }
    cm_pool_object_close(self);
    uint64_t released = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_pool_trim(pool, 0, true, &released);
    Py_END_ALLOW_THREADS
    cm_pool_object_give(op, pool);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, "while closing a pool");
    }
    Py_RETURN_NONE;
}

static PyObject *
pool_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
        return NULL;
    }
    return cm_override_enter(&self->state->current_pool, op) < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
pool_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_state *state = ((cm_pool_object *)(void *)op)->state;
    if (cm_override_exit(&state->current_pool, op, "pool") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- table ------------------------------------------------------------------------- */

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

PyMethodDef cm_pool_object_methods[] = {
    {"allocate", FAST(pool_allocate), METH_FASTCALL | METH_KEYWORDS, allocate_doc},
    {"stats", pool_stats, METH_NOARGS, stats_doc},
    {"snapshot", pool_snapshot, METH_NOARGS, snapshot_doc},
    {"trim", FAST(pool_trim), METH_FASTCALL | METH_KEYWORDS, trim_doc},
    {"reset_peaks", pool_reset_peaks, METH_NOARGS, reset_peaks_doc},
    {"close", pool_close, METH_NOARGS, close_doc},
    {"__enter__", pool_enter, METH_NOARGS, enter_doc},
    {"__exit__", pool_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};
