/* SPDX-License-Identifier: Apache-2.0 */
/* `__cuda_array_interface__` version 3 of mapped, managed and device buffers. */
#include "python/buffer/buffer_object.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/tuples.h"
#include "python/protocols/protocols.h"

/* Store `value` (stolen; NULL passes its exception on). */
static int
put(PyObject *dict, const char *key, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    int result = PyDict_SetItemString(dict, key, value);
    Py_DECREF(value);
    return result;
}

/* Bring all that is left onto one stream: a single one is that stream, else the first
 * of them (the current one when only background transfers are left) waits for the
 * others. *joined is held. */
static cm_status
join(const cm_pending *pending, cm_stream *current, cm_stream **joined)
{
    cm_stream *stream = pending->stream_count > 0 ? pending->streams[0] : current;
    CM_TRY(cm_pending_order(pending, stream));
    *joined = cm_stream_hold(stream);
    return cm_ok();
}

/* The stream a consumer must wait for: 0 and *joined (held) or NULL when nothing is
 * pending, or -1. Consumers block on every import that names one, hence NULL if we can.
 */
static int
find_stream(cm_state *state, cm_storage *storage, cm_stream **joined)
{
    *joined = NULL;
    if (storage->use_count == 0 && storage->writer_count == 0) {
        return 0;
    }
    cm_pending pending;
    if (cm_pending_take(storage, &pending) < 0) {
        return -1;
    }
    cm_status status;
    cm_stream *current = NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cm_pending_prune(&pending, false);
    Py_END_ALLOW_THREADS
    storage->was_captured = storage->was_captured || pending.captured;
    bool any = pending.stream_count > 0 || pending.ticket_count > 0;
    if (cm_is_ok(status) && any && pending.stream_count == 0) {
        current = cm_stream_from_object(state, Py_None, storage->device);
        if (current == NULL) {
            cm_pending_give(&pending);
            return -1;
        }
    }
    if (cm_is_ok(status) && any) {
        Py_BEGIN_ALLOW_THREADS
        status = join(&pending, current, joined);
        Py_END_ALLOW_THREADS
    }
    cm_pending_give(&pending);
    int result = 0;
    if (!cm_is_ok(status)) {
        result = cm_py_raise_int(state, status, "while ordering pending work");
    }
    else if (current != NULL) {
        /* it stands for the transfers from now on, and must outlive the consumer */
        result = cm_storage_add_lasting_use(storage, current);
    }
    cm_stream_give(state, current);
    if (result < 0 && *joined != NULL) {
        cm_stream_release(*joined);
        *joined = NULL;
    }
    return result;
}

static PyObject *
stream_entry(cm_state *state, cm_storage *storage)
{
    cm_stream *joined;
    cm_state_enter(state);
    int failed = find_stream(state, storage, &joined);
    cm_state_leave(state);
    if (failed < 0) {
        return NULL;
    }
    if (joined == NULL) {
        return Py_NewRef(Py_None);
    }
    /* 0 is forbidden in the interface: the legacy default stream is written as 1 */
    uint64_t handle = cm_stream_tell_handle(joined);
    handle = handle == 0 ? CM_STREAM_LEGACY : handle;
    cm_stream_release(joined);
    return PyLong_FromUnsignedLongLong(handle);
}

static PyObject *
strides_entry(const cm_buffer *buffer)
{
    cm_region region;
    cm_buffer_region(buffer, &region);
    if (cm_region_is_c_contiguous(&region)) {
        return Py_NewRef(Py_None);
    }
    return cm_tuple_from(cm_buffer_strides(buffer), buffer->ndim);
}

static PyObject *
data_entry(const cm_buffer *buffer)
{
    return Py_BuildValue("KN", (unsigned long long)cm_buffer_address(buffer),
                         PyBool_FromLong(buffer->readonly));
}

/* typestr; and descr where the dtype has fields that it can describe. */
static int
put_dtype(PyObject *dict, PyObject *dtype)
{
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(dtype, &traits);
    if (put(dict, "typestr", PyObject_GetAttrString(dtype, "str")) < 0) {
        return -1;
    }
    if (!traits.fields) {
        return 0;
    }
    PyObject *descr = PyObject_GetAttrString(dtype, "descr");
    if (descr == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear(); /* overlapping or out-of-order fields: bytes only */
        return 0;
    }
    return put(dict, "descr", descr);
}

static int
fill(const cm_buffer *buffer, PyObject *dict)
{
    bool empty = cm_buffer_nbytes(buffer) == 0;
    if (put(dict, "shape", cm_tuple_from(cm_buffer_shape(buffer), buffer->ndim)) < 0
        || put_dtype(dict, buffer->dtype) < 0
        || put(dict, "data", data_entry(buffer)) < 0
        || put(dict, "version", PyLong_FromLong(3)) < 0
        || put(dict, "strides", strides_entry(buffer)) < 0) {
        return -1;
    }
    return put(dict, "stream",
               empty ? Py_NewRef(Py_None)
                     : stream_entry(buffer->state, buffer->storage));
}

/* Over them PyTorch ends the process here too. AttributeError, so that hasattr()
 * answers no and a consumer goes on to DLPack, which says why. */
static int
refuse_negative_strides(const cm_buffer *buffer)
{
    bool empty = cm_buffer_nbytes(buffer) == 0;
    for (int i = 0; i < buffer->ndim && !empty; i++) {
        if (cm_buffer_strides(buffer)[i] < 0 && cm_buffer_shape(buffer)[i] > 1) {
            PyErr_SetString(PyExc_AttributeError,
                            "__cuda_array_interface__: this view has negative strides, "
                            "over which PyTorch ends the process; hand over copy() of "
                            "it, or the buffer before it is reversed");
            return -1;
        }
    }
    return 0;
}

PyObject *
cm_array_interface_dict(PyObject *self)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    if (refuse_negative_strides(buffer) < 0) {
        return NULL;
    }
    /* the consumer's work cannot be seen from here on */
    buffer->storage->was_exported = true;
    buffer->storage->was_named = true;
    PyObject *dict = PyDict_New();
    if (dict == NULL || fill(buffer, dict) < 0
        || cm_buffer_check_open(buffer) < 0) { /* freed while it was read */
        Py_XDECREF(dict);
        return NULL;
    }
    return dict;
}

PyObject *
cm_buffer_array_interface(PyObject *self, void *closure)
{
    (void)closure;
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    if (cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    cm_runtime *rt = cm_state_runtime(buffer->state);
    if (rt == NULL) {
        return NULL;
    }
    if (rt->backend == CM_BACKEND_EMULATED) {
        PyErr_SetString(PyExc_AttributeError,
                        "__cuda_array_interface__: this buffer lives on the emulated "
                        "device, whose addresses no CUDA library can use");
        return NULL;
    }
    return cm_array_interface_dict(self);
}
