/* SPDX-License-Identifier: Apache-2.0 */
/* The functions that make new buffers: empty(), whose kind is an argument, and one
 * function for each kind. Usual calls are answered by fast_path.c, which each function
 * tries first. Calls with any other arguments are read here. Functions that also give
 * the elements values are in cumem/buffers/constructors.py. */
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/pool/allocate.h"

/* -- from arguments to memory ------------------------------------------------------------ */

/* The arguments of a call. All are borrowed; NULL and None mean that one is not
 * given. */
typedef struct request {
    PyObject *shape;
    PyObject *like; /* a Buffer or an array whose layout it gets, in place of a shape */
    PyObject *dtype;
    PyObject *order;
    PyObject *device;
    PyObject *stream;
    PyObject *pool;
    cm_kind kind;
    unsigned flags;
} request;

/* Read the shape, or else the shape and the strides of `like`; nothing else of that
 * matters. */
static int
read_layout(const cm_state *state, const request *asked, cm_region *out)
{
    if (!cm_arg_is_given(asked->like)) {
        return cm_arg_shape(asked->shape, "shape", &out->ndim, out->shape);
    }
    if (cm_buffer_check(state, asked->like)) {
        cm_buffer_region((const cm_buffer *)asked->like, out);
        return 0;
    }
    if (!cm_numpy_is_array(asked->like)) {
        return cm_arg_refuse(asked->like, "like", "a Buffer, an array or None");
    }
    cm_numpy_layout(asked->like, out);
    return 0;
}

/* Read order=, whose values and default differ if there is a `like`. */
static int
read_order(const request *asked, char *out)
{
    if (cm_arg_is_given(asked->like)) {
        return cm_arg_order(asked->order, "order", "CFAK", 'K', out);
    }
    return cm_arg_order(asked->order, "order", "CF", 'C', out);
}

/* Read the device. A pool that is given has one, so nobody need ask which is
 * current. */
static int
read_place(cm_state *state, PyObject *object, const cm_pool_object *pool, int *out)
{
    if (!cm_arg_is_given(object) && pool != NULL) {
        *out = pool->config.device;
        return cm_state_runtime(state) == NULL ? -1 : 0;
    }
    return cm_arg_device(state, object, "device", out);
}

/* Read the stream on which the memory is allocated. Host memory is not allocated on a
 * stream, which is then only for filling it; but a wrong argument is refused all the
 * same. 0, or -1 with an exception. */
static int
read_stream(cm_state *state, const request *asked, int device, cm_stream **out)
{
    PyObject *given = asked->stream == NULL ? Py_None : asked->stream;
    *out = NULL;
    if (cm_kind_is_ordered(asked->kind)) {
        *out = cm_stream_for_device(state, given, device);
        return *out == NULL ? -1 : 0;
    }
    if (given == Py_None) {
        return 0;
    }
    cm_stream *looked_at = cm_stream_from_object(state, given, device);
    if (looked_at == NULL) {
        return -1;
    }
    cm_stream_give(state, looked_at);
    return 0;
}

static PyObject *
allocate(cm_state *state, const request *asked)
{
    cm_region layout;
    cm_pool_object *pool;
    cm_stream *stream = NULL;
    PyObject *buffer = NULL;
    int device;
    char order;
    if (read_layout(state, asked, &layout) < 0 || read_order(asked, &order) < 0
        || cm_arg_pool(state, asked->pool, &pool) < 0
        || read_place(state, asked->device, pool, &device) < 0) {
        return NULL;
    }
    PyObject *dtype = cm_numpy_dtype(asked->dtype);
    if (dtype == NULL) {
        return NULL;
    }
    if (read_stream(state, asked, device, &stream) == 0) {
        cm_pool *from = cm_pool_choose(state, pool, asked->kind, asked->flags, device);
        buffer = cm_buffer_allocate(state, from, dtype, &layout, order, stream);
        cm_stream_give(state, stream);
    }
    Py_DECREF(dtype);
    return buffer;
}

/* -- for the package ----------------------------------------------------------------- */

/* Read the flags: an int; or a Buffer of that kind, whose flags are taken if it has a
 * pool; or None. Otherwise they are the usual flags of the kind. */
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
    /* The flags are also the index of the default pool for them. */
    return cm_arg_check_range((int)*out, "flags", 0, CM_POOL_FLAG_SLOTS);
}

/* _allocate(shape, like, dtype, order, kind, flags, device, stream, pool) */
static PyObject *
allocate_for_package(PyObject *module, PyObject *args)
{
    PyObject *kind_object, *flags_object;
    request asked;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "OOOOOOOOO", &asked.shape, &asked.like, &asked.dtype,
                          &asked.order, &kind_object, &flags_object, &asked.device,
                          &asked.stream, &asked.pool)
        || cm_arg_kind(kind_object, &asked.kind) < 0
        || read_flags(state, flags_object, asked.kind, &asked.flags) < 0) {
        return NULL;
    }
    return allocate(state, &asked);
}

/* -- the functions: each tries the fast path first ---------------------------------------- */

#define KEYWORDED(name)                                                                \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs,   \
                          PyObject *kwnames)

KEYWORDED(empty)
{
    static const char *const names[] = {"shape",  "dtype",  "kind", "order",
                                        "device", "stream", "pool", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[7];
    PyObject *made = cm_fast_any(state, args, nargs, kwnames);
    if (CM_LIKELY(made != NULL) || PyErr_Occurred()) {
        return made;
    }
    if (cm_args_parse("empty", args, nargs, kwnames, names, 3, 1, values) < 0) {
        return NULL;
    }
    request asked = {.shape = values[0],
                     .dtype = values[1],
                     .order = values[3],
                     .device = values[4],
                     .stream = values[5],
                     .pool = values[6],
                     .kind = CM_KIND_DEVICE};
    cm_pool_object *pool;
    if (cm_arg_pool(state, asked.pool, &pool) < 0) {
        return NULL;
    }
    if (values[2] != NULL) {
        if (cm_arg_kind(values[2], &asked.kind) < 0) {
            return NULL;
        }
    }
    else if (pool != NULL) {
        asked.kind = pool->config.kind;
    }
    asked.flags = cm_kinds[asked.kind].flags;
    return allocate(state, &asked);
}

/* empty_pinned() and empty_mapped(), which differ in the kind only. */
static PyObject *
empty_on_host(PyObject *module, const char *function, cm_kind kind,
              PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"shape",          "dtype",  "order", "portable",
                                        "write_combined", "device", "pool",  NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[7];
    bool is_portable;
    bool is_combined;
    PyObject *made = cm_fast_kind(state, kind, args, nargs, kwnames);
    if (CM_LIKELY(made != NULL) || PyErr_Occurred()) {
        return made;
    }
    if (cm_args_parse(function, args, nargs, kwnames, names, 2, 1, values) < 0
        || cm_arg_flag(values[3], "portable", true, &is_portable) < 0
        || cm_arg_flag(values[4], "write_combined", false, &is_combined) < 0) {
        return NULL;
    }
    request asked = {.shape = values[0],
                     .dtype = values[1],
                     .order = values[2],
                     .device = values[5],
                     .pool = values[6],
                     .kind = kind,
                     .flags = cm_kinds[kind].flags};
    if (!is_portable) {
        asked.flags &= ~(unsigned)CM_HOST_ALLOC_PORTABLE;
    }
    if (is_combined) {
        asked.flags |= CM_HOST_ALLOC_WRITE_COMBINED;
    }
    return allocate(state, &asked);
}

KEYWORDED(empty_pinned)
{
    return empty_on_host(module, "empty_pinned", CM_KIND_PINNED, args, nargs, kwnames);
}

KEYWORDED(empty_mapped)
{
    return empty_on_host(module, "empty_mapped", CM_KIND_MAPPED, args, nargs, kwnames);
}

/* Read attach=, which says to whom managed memory is attached at first; by default to
 * all. */
static int
read_attach(PyObject *object, unsigned *out)
{
    *out = CM_MANAGED_GLOBAL;
    if (object == NULL) {
        return 0;
    }
    if (PyUnicode_Check(object)) {
        if (PyUnicode_CompareWithASCIIString(object, "global") == 0) {
            return 0;
        }
        if (PyUnicode_CompareWithASCIIString(object, "host") == 0) {
            *out = CM_MANAGED_HOST;
            return 0;
        }
    }
    return cm_package_refuse(
        "buffers.arguments", "refuse_choice",
        Py_BuildValue("(Oss)", object, "attach", "\"global\" or \"host\""));
}

KEYWORDED(empty_managed)
{
    static const char *const names[] = {"shape",  "dtype", "order", "attach",
                                        "device", "pool",  NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[6];
    PyObject *made = cm_fast_kind(state, CM_KIND_MANAGED, args, nargs, kwnames);
    if (CM_LIKELY(made != NULL) || PyErr_Occurred()) {
        return made;
    }
    request asked = {.kind = CM_KIND_MANAGED};
    if (cm_args_parse("empty_managed", args, nargs, kwnames, names, 2, 1, values) < 0
        || read_attach(values[3], &asked.flags) < 0) {
        return NULL;
    }
    asked.shape = values[0];
    asked.dtype = values[1];
    asked.order = values[2];
    asked.device = values[4];
    asked.pool = values[5];
    return allocate(state, &asked);
}

KEYWORDED(empty_device)
{
    static const char *const names[] = {"shape",  "dtype", "order", "device",
                                        "stream", "pool",  NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[6];
    PyObject *made = cm_fast_kind(state, CM_KIND_DEVICE, args, nargs, kwnames);
    if (CM_LIKELY(made != NULL) || PyErr_Occurred()) {
        return made;
    }
    if (cm_args_parse("empty_device", args, nargs, kwnames, names, 2, 1, values) < 0) {
        return NULL;
    }
    request asked = {.shape = values[0],
                     .dtype = values[1],
                     .order = values[2],
                     .device = values[3],
                     .stream = values[4],
                     .pool = values[5],
                     .kind = CM_KIND_DEVICE,
                     .flags = cm_kinds[CM_KIND_DEVICE].flags};
    return allocate(state, &asked);
}

/* -- table ------------------------------------------------------------------------------ */

#define CONSTRUCTOR(name) {#name, CM_METHOD(name), CM_KEYWORDS, CM_DOC_##name}

PyMethodDef cm_constructor_methods[] = {
    CONSTRUCTOR(empty),
    CONSTRUCTOR(empty_pinned),
    CONSTRUCTOR(empty_mapped),
    CONSTRUCTOR(empty_managed),
    CONSTRUCTOR(empty_device),
    {"_allocate", allocate_for_package, METH_VARARGS, CM_DOC__allocate},
    {NULL, NULL, 0, NULL},
};
