/* SPDX-License-Identifier: Apache-2.0 */
/* _raw_copy() makes a copy with a single asynchronous call of the runtime, without
 * cumem's engine. `python -m cumem bench` and the doctor compare cumem's copies with
 * it. _flush_cache() takes the memory of an object out of the processor's caches, so
 * that the next measurement reads from memory. */
#include "base/simd_copy.h"
#include "base/thread.h"
#include "python/copy/copy_functions.h"
#include "python/core/errors.h"
#include "runtime/scope.h"

static cm_status
copy_and_wait(cm_address dst, cm_address src, uint64_t nbytes, const cm_stream *stream,
              uint64_t *spent_ns)
{
    uint64_t start_ns = cm_now_ns();
    CM_TRY(cm_rt_copy_async(stream->rt, dst, src, nbytes, stream->handle));
    CM_TRY(cm_rt_stream_synchronize(stream->rt, stream->handle));
    *spent_ns = cm_now_ns() - start_ns;
    return cm_ok();
}

PyObject *
cm_raw_copy(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    unsigned long long dst, src, nbytes;
    PyObject *object;
    if (!PyArg_ParseTuple(args, "KKKO", &dst, &src, &nbytes, &object)) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, object, -1);
    if (stream == NULL) {
        return NULL;
    }
    uint64_t spent_ns = 0;
    cm_state_enter(state);
    cm_status status =
        CM_WITHOUT_GIL(CM_ASKING(stream->rt, stream->device,
                                 copy_and_wait(dst, src, nbytes, stream, &spent_ns)));
    cm_state_leave(state);
    cm_stream_give(state, stream);
    return cm_is_ok(status)
               ? PyFloat_FromDouble((double)spent_ns / 1e9)
               : cm_py_raise(state, status, "while measuring the runtime's own copies");
}

PyObject *
cm_flush_cache(PyObject *module CM_UNUSED, PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    cm_cache_flush(view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}
