/* SPDX-License-Identifier: Apache-2.0 */
/* New buffers: of the kind that is asked for, of one kind each. The usual calls are
 * fast_path.c's, others cumem/extension/allocating.py's, which come back to
 * _allocate(). Those with values are cumem/constructors.py's. */
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/pool/allocate.h"

/* -- by the package ------------------------------------------------------------------ */

/* An int, the flags of a Buffer (of such a kind) that has a pool, or the kind's usual
 * ones. */
static int
read_flags(const cm_state *state, PyObject *object, cm_kind kind, unsigned *out)
{
    const cm_buffer *like = (const cm_buffer *)object;
    *out = cm_kinds[kind].flags;
    if (cm_buffer_check(state, object)) {
        *out = like->storage->pool != NULL ? like->storage->flags : *out;
    }
    else if (object != Py_None) {
        unsigned long flags = PyLong_AsUnsignedLong(object);
        if (PyErr_Occurred()) {
            return -1;
        }
        *out = flags < CM_POOL_FLAG_SLOTS ? (unsigned)flags : CM_POOL_FLAG_SLOTS;
    }
    /* They are the place of the default pool that serves them. */
    return cm_arg_check_range((int)*out, "flags", 0, CM_POOL_FLAG_SLOTS);
}

/* A shape, or that of an array or a Buffer, with its strides; of it nothing else
 * matters.
 */
static int
read_layout(const cm_state *state, PyObject *shape, PyObject *like, cm_region *out)
{
    if (cm_buffer_check(state, like)) {
        cm_buffer_region((const cm_buffer *)like, out);
    }
    else if (like != Py_None && !cm_numpy_is_array(like)) {
        return cm_arg_refuse(like, "like", "a Buffer, an array or None");
    }
    else if (like != Py_None) {
        cm_numpy_layout(like, out);
    }
    return like != Py_None ? 0 : cm_arg_shape(shape, "shape", &out->ndim, out->shape);
}

/* A pool that is given says where, without a question which device is current. */
static int
read_place(cm_state *state, PyObject *object, const cm_pool_object *pool, int *out)
{
    if (object == Py_None && pool != NULL) {
        *out = pool->config.device;
        return cm_state_runtime(state) == NULL ? -1 : 0;
    }
    return cm_arg_device(state, object, "device", out);
}

/* _allocate(shape, like, dtype, order, kind, flags, device, stream, pool) */
static PyObject *
allocate(PyObject *module, PyObject *args)
{
    PyObject *shape, *like, *dtype_object, *order_object, *kind_object, *flags_object;
    PyObject *device_object, *stream_object, *pool_object;
    cm_region layout;
    cm_kind kind;
    cm_pool_object *pool;
    unsigned flags;
    int device;
    char order;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "OOOOOOOOO", &shape, &like, &dtype_object,
                          &order_object, &kind_object, &flags_object, &device_object,
                          &stream_object, &pool_object)) {
        return NULL;
    }
    bool is_like = like != Py_None;
    if (read_layout(state, shape, like, &layout) < 0
        || cm_arg_order(order_object, "order", is_like ? "CFAK" : "CF",
                        is_like ? 'K' : 'C', &order)
               < 0
        || cm_arg_pool(state, pool_object, &pool) < 0
        || read_place(state, device_object, pool, &device) < 0
        || cm_arg_kind(kind_object, &kind) < 0
        || read_flags(state, flags_object, kind, &flags) < 0) {
        return NULL;
    }
    PyObject *dtype = cm_numpy_dtype(dtype_object);
    bool ordered = cm_kind_is_ordered(kind);
    cm_stream *stream = NULL;
    if (dtype != NULL && (ordered || stream_object != Py_None)) {
        stream = (ordered ? cm_stream_for_device
                          : cm_stream_from_object)(state, stream_object, device);
    }
    PyObject *buffer = NULL;
    if (dtype != NULL && (stream != NULL || !ordered) && !PyErr_Occurred()) {
        /* host kinds are not allocated on the stream, which is for filling them */
        buffer =
            cm_buffer_allocate(state, cm_pool_choose(state, pool, kind, flags, device),
                               dtype, &layout, order, ordered ? stream : NULL);
    }
    cm_stream_give(state, stream);
    Py_XDECREF(dtype);
    return buffer;
}

/* -- the functions ------------------------------------------------------------------------ */

/* `warm` is tried first. */
#define MAKER(name, warm)                                                              \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs,   \
                          PyObject *kwnames)                                           \
    {                                                                                  \
        PyObject *made = warm;                                                         \
        return CM_LIKELY(made != NULL) || PyErr_Occurred()                             \
                   ? made                                                              \
                   : cm_package_pass("extension.allocating", #name, args, nargs,       \
                                     kwnames);                                         \
    }
#define FAST(kind) cm_fast_kind(cm_state_of_module(module), kind, args, nargs, kwnames)

MAKER(empty, cm_fast_any(cm_state_of_module(module), args, nargs, kwnames))
MAKER(empty_pinned, FAST(CM_KIND_PINNED))
MAKER(empty_mapped, FAST(CM_KIND_MAPPED))
MAKER(empty_managed, FAST(CM_KIND_MANAGED))
MAKER(empty_device, FAST(CM_KIND_DEVICE))

/* -- table ------------------------------------------------------------------------------ */

#define CONSTRUCTOR(name) {#name, CM_METHOD(name), CM_KEYWORDS, CM_DOC_##name}

PyMethodDef cm_constructor_methods[] = {
    CONSTRUCTOR(empty),        CONSTRUCTOR(empty_pinned),
    CONSTRUCTOR(empty_mapped), CONSTRUCTOR(empty_managed),
    CONSTRUCTOR(empty_device), {"_allocate", allocate, METH_VARARGS, CM_DOC__allocate},
    {NULL, NULL, 0, NULL},
};
