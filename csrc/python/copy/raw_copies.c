/* SPDX-License-Identifier: Apache-2.0 */
/* _raw_copies(): the runtime's own asynchronous copy in a loop, without cumem's engine.
 * What `python -m cumem bench` holds against cumem's copies. */
#include "base/thread.h"
#include "python/copy/copy_functions.h"
#include "python/core/errors.h"

enum { LEAST = 5, MOST = 400 };

typedef struct loop {
    cm_runtime *rt;
    cm_address dst;
    cm_address src;
    uint64_t nbytes;
    const cm_stream *stream;
    uint64_t budget_ns;
    int count; /* of spent_ns */
    uint64_t spent_ns[MOST];
} loop;

static cm_address
address_of(const cm_buffer *buffer)
{
    void *host = cm_buffer_host(buffer);
    return host != NULL ? (cm_address)(uintptr_t)host : cm_buffer_address(buffer);
}

/* GIL released. One copy before those that count wakes up what sleeps. */
static cm_status
run_loop(loop *self)
{
    uint64_t deadline_ns = 0;
    for (;;) {
        uint64_t start_ns = cm_now_ns();
        CM_TRY(cm_rt_copy_async(self->rt, self->dst, self->src, self->nbytes,
                                self->stream->handle));
        CM_TRY(cm_rt_stream_synchronize(self->rt, self->stream->handle));
        uint64_t end_ns = cm_now_ns();
        if (deadline_ns == 0) {
            deadline_ns = end_ns + self->budget_ns;
            continue;
        }
        self->spent_ns[self->count++] = end_ns - start_ns;
        bool enough = self->count >= LEAST && end_ns >= deadline_ns;
        if (enough || self->count == MOST) {
            return cm_ok();
        }
    }
}

static cm_status
run_on_device(loop *self)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(self->rt, self->stream->device, &guard));
    cm_status status = run_loop(self);
    cm_device_leave(self->rt, &guard);
    return status;
}

static PyObject *
list_of_seconds(const loop *self)
{
    PyObject *list = PyList_New(self->count);
    for (int i = 0; list != NULL && i < self->count; i++) {
        PyObject *seconds = PyFloat_FromDouble((double)self->spent_ns[i] / 1e9);
        if (seconds == NULL || PyList_SetItem(list, i, seconds) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
measure(cm_state *state, const cm_buffer *dst, const cm_buffer *src, cm_stream *stream,
        uint64_t budget_ns)
{
    loop self = {.rt = cm_state_runtime(state),
                 .dst = address_of(dst),
                 .src = address_of(src),
                 .nbytes = cm_buffer_nbytes(dst),
                 .stream = stream,
                 .budget_ns = budget_ns};
    if (self.rt == NULL || cm_buffer_check_open(dst) < 0
        || cm_buffer_check_open(src) < 0 || cm_storage_add_use(dst->storage, stream) < 0
        || cm_storage_add_use(src->storage, stream) < 0) {
        return NULL;
    }
    cm_status status;
    cm_storage_pin(dst->storage);
    cm_storage_pin(src->storage);
    Py_BEGIN_ALLOW_THREADS
    status = run_on_device(&self);
    Py_END_ALLOW_THREADS
    cm_storage_unpin(src->storage);
    cm_storage_unpin(dst->storage);
    return cm_is_ok(status)
               ? list_of_seconds(&self)
               : cm_py_raise(state, status, "while measuring the runtime's own copies");
}

static bool
is_contiguous(const cm_buffer *buffer)
{
    cm_region region;
    cm_buffer_region(buffer, &region);
    return cm_region_is_c_contiguous(&region);
}

static PyObject *
raw_copies(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    cm_state *state = cm_state_of_module(module);
    if (nargs != 4 || !cm_buffer_check(state, args[0])
        || !cm_buffer_check(state, args[1])) {
        PyErr_SetString(PyExc_TypeError,
                        "_raw_copies() takes two buffers, a stream and seconds");
        return NULL;
    }
    const cm_buffer *dst = (const cm_buffer *)(void *)args[0];
    const cm_buffer *src = (const cm_buffer *)(void *)args[1];
    double budget = PyFloat_AsDouble(args[3]);
    if (budget == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (!(budget >= 0 && budget < 1e6) || !is_contiguous(dst) || !is_contiguous(src)
        || dst->readonly || cm_buffer_nbytes(dst) != cm_buffer_nbytes(src)) {
        PyErr_SetString(PyExc_ValueError,
                        "_raw_copies(): contiguous buffers of the same size, of which "
                        "the first may be written, and up to a million seconds");
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, args[2], -1);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *result = measure(state, dst, src, stream, (uint64_t)(budget * 1e9));
    cm_stream_give(state, stream);
    return result;
}

PyDoc_STRVAR(raw_copies_doc,
             "_raw_copies($module, dst, src, stream, budget, /)\n"
             "--\n"
             "\n"
             "Seconds of each of 5 to 400 copies by the CUDA runtime's cudaMemcpyAsync, "
             "waited for\n"
             "one by one, that take about `budget` seconds together.");

PyMethodDef cm_raw_copy_methods[] = {
    {"_raw_copies", (PyCFunction)(void (*)(void))raw_copies, METH_FASTCALL,
     raw_copies_doc},
    {NULL, NULL, 0, NULL},
};
