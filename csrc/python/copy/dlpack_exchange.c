/* SPDX-License-Identifier: Apache-2.0 */
/* The attribute `__dlpack_c_exchange_api__` of the buffer types offers DLPack as a
 * table of C functions, for libraries that exchange tensors without calling methods. */
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/device/objects.h"
#include "python/pool/allocate.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/protocols.h"

/* Return the state of the extension in this interpreter. It is looked up in the module,
 * since DLPack's functions get no object that leads to the state. The module keeps the
 * state alive, and stays loaded as long as there are buffers. Returns NULL with an
 * exception if it fails. */
static cm_state *
find_state(void)
{
    PyObject *module = PyImport_ImportModule("cumem._core");
    cm_state *state = module == NULL ? NULL : cm_state_of_module(module);
    Py_XDECREF(module);
    return state;
}

/* Take the tensor out of a new capsule of ours, and drop the caller's reference to the
 * capsule. Returns 0, or -1 with an exception, which has been set already if the
 * capsule is NULL. */
static int
open_own(PyObject *capsule, cm_dl_versioned **out)
{
    *out = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, CM_DL_VERSIONED_NAME);
    int result = *out == NULL ? -1 : PyCapsule_SetName(capsule, CM_DL_VERSIONED_USED);
    Py_XDECREF(capsule);
    return result;
}

/* Tell the caller which exception was raised and what it says, and clear it. Callers
 * know only Python's own exceptions by name, so every exception that means a lack of
 * memory is reported as a MemoryError. */
static void
report_exception(void *context, cm_dl_set_error set_error)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    bool is_memory = PyErr_GivenExceptionMatches(type, PyExc_MemoryError) != 0;
    PyObject *name =
        PyType_GetName((PyTypeObject *)(void *)(is_memory ? PyExc_MemoryError : type));
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    const char *kind = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);
    const char *message = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
    PyErr_Clear();
    set_error(context, kind == NULL ? "RuntimeError" : kind,
              message == NULL ? "cumem could not allocate this" : message);
    Py_XDECREF(name);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* Allocate memory from a pool for a tensor with the shape, the dtype and the device of
 * `like`, and make a capsule that exports the memory. Returns NULL with an exception if
 * it fails. */
static PyObject *
allocate(const cm_dl_tensor *like)
{
    cm_region layout;
    cm_kind kind;
    cm_state *state = find_state();
    cm_runtime *rt = state == NULL ? NULL : cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    PyObject *capsule = NULL;
    PyObject *buffer = NULL;
    PyObject *shape = NULL;
    PyObject *dtype = cm_dlpack_to_dtype(like->dtype);
    if (dtype == NULL || cm_dlpack_check_device(rt, like->device, &kind) < 0) {
        goto done;
    }
    shape = cm_tuple_from(like->shape, like->ndim);
    if (shape == NULL || cm_arg_shape(shape, "shape", &layout.ndim, layout.shape) < 0) {
        goto done;
    }
    kind = cm_kind_is_pageable(kind) ? CM_KIND_PINNED : kind; /* no pool is pageable */
    int device =
        like->device.type == CM_DL_CUDA ? like->device.id : cm_state_device(state);
    buffer = cm_buffer_allocate_kind(state, kind, cm_kinds[kind].flags, device, dtype,
                                     &layout, 'C');
    if (buffer != NULL) {
        capsule = cm_dlpack_fresh(buffer, like->device);
    }
done:
    Py_XDECREF(buffer);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return capsule;
}

/* Make a new tensor like `like`, in memory of its own. The caller need not hold the
 * GIL. Returns 0, or -1 after telling the caller by `set_error` what was wrong. */
static int
give_memory(const cm_dl_tensor *like, cm_dl_versioned **out, void *context,
            cm_dl_set_error set_error)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *capsule = allocate(like);
    int result = open_own(capsule, out);
    if (result < 0) {
        report_exception(context, set_error);
    }
    PyGILState_Release(gil);
    return result;
}

/* Export a buffer, and make the current stream wait for earlier work on it. Returns 0,
 * or -1 with an exception.
 */
static int
give_tensor(void *object, cm_dl_versioned **out)
{
    return open_own(cm_dlpack_current(object), out);
}

/* Describe a buffer without exporting it. The shape, the strides and the memory stay
 * the buffer's, so the caller may use them only while it holds the buffer. Returns 0,
 * or -1 with an exception, such as BufferError for a read-only buffer. */
static int
lend_tensor(void *object, cm_dl_tensor *out)
{
    const cm_buffer *buffer = object;
    cm_dl_versioned *managed;
    if (give_tensor(object, &managed) < 0) {
        return -1;
    }
    *out = managed->tensor;
    out->shape = buffer->extents;
    out->strides = buffer->extents + 2 * buffer->ndim;
    memcpy(out->strides, managed->tensor.strides, sizeof(int64_t) * (size_t)out->ndim);
    managed->deleter(managed);
    if (buffer->readonly) {
        PyErr_SetString(PyExc_BufferError,
                        "the buffer is read-only, which a lent tensor cannot say");
    }
    return buffer->readonly ? -1 : 0;
}

/* Make a buffer of a tensor. Returns 0, or -1 with an exception. After a failure the
 * tensor still belongs to the caller and is not deleted, which is what PyTorch does
 * too. */
static int
take_tensor(cm_dl_versioned *managed, void **out)
{
    cm_state *state = find_state();
    PyObject *capsule =
        state == NULL ? NULL : PyCapsule_New(managed, CM_DL_VERSIONED_NAME, NULL);
    PyObject *buffer = capsule == NULL ? NULL : cm_asbuffer(state, capsule, NULL);
    Py_XDECREF(capsule);
    cm_kind kind =
        buffer == NULL ? CM_KIND_PAGEABLE : cm_buffer_kind((cm_buffer *)(void *)buffer);
    if (cm_kind_is_on_device(kind) || cm_kind_migrates(kind)) {
        /* Work on the current stream is going to use the memory. So record the stream
         * with the buffer, and the memory is not freed before that work is done. */
        PyObject *done = PyObject_CallMethod(buffer, "record_stream", "O", Py_None);
        if (done == NULL) {
            /* Dropping the buffer would call the deleter of the tensor, but after a
             * failure the tensor still belongs to the caller. So the buffer must not
             * find the deleter. */
            void (*deleter)(cm_dl_versioned *) = managed->deleter;
            managed->deleter = NULL;
            Py_CLEAR(buffer);
            managed->deleter = deleter;
        }
        Py_XDECREF(done);
    }
    *out = buffer;
    return buffer == NULL ? -1 : 0;
}

/* Store the handle of the current stream of a DLPack device, or 0 for memory on which
 * no stream orders the work. Returns 0, or -1 with an exception. */
static int
get_current_stream(int32_t type, int32_t id, void **out)
{
    cm_kind kind;
    cm_state *state = find_state();
    cm_runtime *rt = state == NULL ? NULL : cm_state_runtime(state);
    *out = NULL;
    if (rt == NULL
        || cm_dlpack_check_device(rt, (cm_dl_device){.type = type, .id = id}, &kind)
               < 0) {
        return -1;
    }
    if (!cm_kind_is_on_device(kind) && !cm_kind_migrates(kind)) {
        return 0;
    }
    int device = type == CM_DL_CUDA ? id : cm_state_device(state);
    cm_stream *stream = cm_stream_from_object(state, Py_None, device);
    if (stream == NULL) {
        return -1;
    }
    uint64_t handle = cm_stream_export_handle(stream);
    *out = (void *)(uintptr_t)(handle == 0 ? CM_STREAM_LEGACY : handle);
    cm_stream_give(state, stream);
    return 0;
}

/* This puts the attribute into the dictionary of the type, since these types do not let
 * their attributes be set. */
int
cm_dlpack_add_exchange(PyTypeObject *type)
{
    static const cm_dl_exchange table = {
        {CM_DL_MAJOR, CM_DL_MINOR},
        NULL,
        give_memory,
        give_tensor,
        take_tensor,
        lend_tensor,
        get_current_stream,
    };
    PyObject *capsule =
        PyCapsule_New((void *)(uintptr_t)&table, CM_DL_EXCHANGE_NAME, NULL);
    PyObject *names = PyObject_GenericGetDict((PyObject *)(void *)type, NULL);
    int result = -1;
    if (capsule != NULL && names != NULL) {
        result = PyDict_SetItemString(names, "__dlpack_c_exchange_api__", capsule);
    }
    Py_XDECREF(names);
    Py_XDECREF(capsule);
    PyType_Modified(type);
    return result;
}
