/* SPDX-License-Identifier: Apache-2.0 */
/* _raw_copy(): the runtime's own asynchronous copy, without cumem's engine. What
 * `python -m cumem bench` holds against cumem's copies, and calibrate() against pieces.
 * _flush_cache(): so that what is measured is memory. */
#include "base/simd_copy.h"
#include "base/thread.h"
#include "docstrings.h"
#include "python/copy/copy_functions.h"
#include "python/core/errors.h"

static cm_address
address_of(const cm_buffer *buffer)
{
    void *host = cm_buffer_host(buffer);
    return host != NULL ? (cm_address)(uintptr_t)host : cm_buffer_address(buffer);
}

/* GIL released. */
static cm_status
copy_and_wait(cm_runtime *rt, const cm_buffer *dst, const cm_buffer *src,
              const cm_stream *stream, uint64_t *spent_ns)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, stream->device, &guard));
    uint64_t start_ns = cm_now_ns();
    cm_status status = cm_rt_copy_async(rt, address_of(dst), address_of(src),
                                        cm_buffer_nbytes(dst), stream->handle);
    if (cm_is_ok(status)) {
        status = cm_rt_stream_synchronize(rt, stream->handle);
    }
    *spent_ns = cm_now_ns() - start_ns;
    cm_device_leave(rt, &guard);
    return status;
}

static PyObject *
measure(cm_state *state, const cm_buffer *dst, const cm_buffer *src, cm_stream *stream)
{
    cm_runtime *rt = cm_state_runtime(state);
    uint64_t spent_ns = 0;
    if (rt == NULL || cm_buffer_check_open(dst) < 0 || cm_buffer_check_open(src) < 0
        || cm_storage_add_use(dst->storage, stream) < 0
        || cm_storage_add_use(src->storage, stream) < 0) {
        return NULL;
    }
    cm_storage_pin(dst->storage);
    cm_storage_pin(src->storage);
    cm_status status = CM_WITHOUT_GIL(copy_and_wait(rt, dst, src, stream, &spent_ns));
    cm_storage_unpin(src->storage);
    cm_storage_unpin(dst->storage);
    return cm_is_ok(status)
               ? PyFloat_FromDouble((double)spent_ns / 1e9)
               : cm_py_raise(state, status, "while measuring the runtime's own copies");
}

static PyObject *
raw_copy(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *ends[2], *stream_object;
    if (!PyArg_ParseTuple(args, "O!O!O", state->buffer_type, &ends[0],
                          state->buffer_type, &ends[1], &stream_object)) {
        return NULL;
    }
    const cm_buffer *dst = (const cm_buffer *)(void *)ends[0];
    const cm_buffer *src = (const cm_buffer *)(void *)ends[1];
    cm_stream *stream = cm_stream_from_object(state, stream_object, -1);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *seconds = measure(state, dst, src, stream);
    cm_stream_give(state, stream);
    return seconds;
}

static PyObject *
flush_cache(PyObject *module CM_UNUSED, PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    cm_cache_flush(view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

PyMethodDef cm_raw_copy_methods[] = {
    {"_raw_copy", raw_copy, METH_VARARGS, CM_DOC__raw_copy},
    {"_flush_cache", flush_cache, METH_O, CM_DOC__flush_cache},
    {NULL, NULL, 0, NULL},
};
