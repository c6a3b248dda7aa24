/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the functions that make new buffers. empty() takes the kind of memory
 * as an argument, and there is one function for each kind, such as empty_pinned().
 * empty_like() takes the shape and, by default, also the dtype, the order, the kind and
 * the device from another array. zeros(), full(), zeros_like() and full_like() also
 * give the elements a value (fill.c). All of them but the three whose names end in
 * _like first try fast_path.c of the folder pool, which answers the usual calls. This
 * file reads the arguments of all other calls. array() and asarray() make a buffer of
 * anything that is like an array, and are in cumem/buffers/constructors.py. */
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/core/values.h"
#include "python/device/objects.h"
#include "python/pool/allocate.h"
#include "python/protocols/protocols.h"

/* -- from arguments to memory ------------------------------------------------------------ */

/* The arguments of a call. All are borrowed; NULL and None mean that one is not
 * given. */
typedef struct request {
    PyObject *shape;
    PyObject *like; /* a Buffer or an array, given in place of a shape; the new buffer
                       gets its layout */
    PyObject *dtype;
    PyObject *order;
    PyObject *device;
    PyObject *stream;
    PyObject *pool;
    cm_kind kind;
    unsigned flags;
} request;

/* Read the layout of the new buffer. It is the shape that was given or, if `like` was
 * given, the shape and the strides of `like`. Returns 0, or -1 with an exception. */
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

/* Read order=. If `like` was given, order= may have more values and has another
 * default. Returns 0, or -1 with an exception. */
static int
read_order(const request *asked, char *out)
{
    if (cm_arg_is_given(asked->like)) {
        return cm_arg_order(asked->order, "order", "CFAK", 'K', out);
    }
    return cm_arg_order(asked->order, "order", "CF", 'C', out);
}

/* Read the device. If no device was given, it is the device of the pool or, if no pool
 * was given either, the current device. Returns 0, or -1 with an exception. */
static int
read_place(cm_state *state, PyObject *object, const cm_pool_object *pool, int *out)
{
    if (!cm_arg_is_given(object) && pool != NULL) {
        *out = pool->config.device;
        return cm_state_runtime(state) == NULL ? -1 : 0;
    }
    return cm_arg_device(state, object, "device", out);
}

/* Read the stream on which the memory is allocated. *out is NULL for host memory, which
 * is not allocated on a stream. If a stream was given for host memory, only the fill
 * after the allocation uses the stream, but a wrong argument is refused here all the
 * same. Returns 0, or -1 with an exception. */
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

/* The parameters of empty(), in the order of the words that fast_path.c knows. */
enum {
    AT_SHAPE,
    AT_DTYPE,
    AT_KIND,
    AT_ORDER,
    AT_DEVICE,
    AT_STREAM,
    AT_POOL,
    NEW_COUNT
};

/* Read the kind. If no kind was given, it is the kind of the pool or, if no pool was
 * given either, device memory. Returns 0, or -1 with an exception. */
static int
read_kind(PyObject *given, const cm_pool_object *pool, cm_kind *out)
{
    *out = pool != NULL ? pool->config.kind : CM_KIND_DEVICE;
    return given == NULL ? 0 : cm_arg_kind(given, out);
}

/* Allocate what the arguments of empty() ask for. `values` has one place for each
 * parameter. Returns a new buffer, or NULL with an exception. */
static PyObject *
allocate_any(cm_state *state, PyObject *const *values)
{
    PyObject *made = cm_fast_read(state, values);
    if (made != NULL || PyErr_Occurred()) {
        return made;
    }
    request asked = {.shape = values[AT_SHAPE],
                     .dtype = values[AT_DTYPE],
                     .order = values[AT_ORDER],
                     .device = values[AT_DEVICE],
                     .stream = values[AT_STREAM],
                     .pool = values[AT_POOL]};
    cm_pool_object *pool;
    if (cm_arg_pool(state, asked.pool, &pool) < 0
        || read_kind(values[AT_KIND], pool, &asked.kind) < 0) {
        return NULL;
    }
    asked.flags = cm_kinds[asked.kind].flags;
    return allocate(state, &asked);
}

/* -- like another array -------------------------------------------------------------------- */

/* The parameters of empty_like(). */
enum {
    LIKE_PROTOTYPE,
    LIKE_DTYPE,
    LIKE_KIND,
    LIKE_ORDER,
    LIKE_DEVICE,
    LIKE_STREAM,
    LIKE_POOL,
    LIKE_COUNT
};

/* Turn the prototype into a Buffer or an array. It may be one already, an object that
 * offers its memory by a protocol (an exporter), or a list. Returns a new reference, or
 * NULL with an exception. */
static PyObject *
read_prototype(cm_state *state, PyObject *prototype, PyObject *stream)
{
    if (cm_buffer_check(state, prototype) || cm_numpy_is_array(prototype)) {
        return Py_NewRef(prototype);
    }
    return cm_is_exporter(state, prototype) ? cm_asbuffer_on(state, prototype, stream)
                                            : cm_value_read_array(prototype);
}

/* Return the dtype of a Buffer or an array, borrowed. */
static PyObject *
dtype_of(const cm_state *state, PyObject *memory)
{
    if (cm_buffer_check(state, memory)) {
        return ((cm_buffer *)(void *)memory)->dtype;
    }
    return cm_numpy_dtype_of(memory);
}

/* Find the device for a call of empty_like() that names no pool. A device that was
 * given is taken. Otherwise a Buffer that is not pageable gives the device that it is
 * on, and a PyTorch tensor gives PyTorch's current device. In all other cases the
 * answer is None, which stands for the current device. Returns a new reference, or NULL
 * with an exception. */
static PyObject *
device_of(cm_state *state, PyObject *prototype, PyObject *device)
{
    int index;
    if (cm_buffer_check(state, prototype)) {
        const cm_storage *storage = ((cm_buffer *)(void *)prototype)->storage;
        if (!cm_arg_is_given(device) && !cm_kind_is_pageable(storage->kind)) {
            return PyLong_FromLong(storage->device);
        }
    }
    else if (!cm_numpy_is_array(prototype)) {
        int status = cm_arg_device_about(state, device, "device", prototype, &index);
        return status < 0 ? NULL : PyLong_FromLong(index);
    }
    return Py_NewRef(device == NULL ? Py_None : device);
}

/* Read the kind and the flags with which its memory is allocated. If neither a kind nor
 * a pool was given, and the prototype is a buffer of ours that is not pageable, the new
 * buffer has the kind of the prototype. If the prototype then has memory of a pool and
 * is not device memory, the new buffer also has the flags of the prototype. Otherwise
 * it has the usual flags of the kind. Returns 0, or -1 with an exception. */
static int
read_kind_like(const cm_state *state, PyObject *const *values,
               const cm_pool_object *pool, request *asked)
{
    PyObject *named = cm_arg_is_given(values[LIKE_KIND]) ? values[LIKE_KIND] : NULL;
    if (read_kind(named, pool, &asked->kind) < 0) {
        return -1;
    }
    asked->flags = cm_kinds[asked->kind].flags;
    if (named != NULL || pool != NULL
        || !cm_buffer_check(state, values[LIKE_PROTOTYPE])) {
        return 0;
    }
    const cm_buffer *like = (const cm_buffer *)(void *)values[LIKE_PROTOTYPE];
    if (cm_kind_is_pageable(like->storage->kind)) {
        return 0;
    }
    asked->kind = cm_buffer_kind(like);
    asked->flags = cm_kinds[asked->kind].flags;
    if (like->storage->pool != NULL && !cm_kind_is_on_device(asked->kind)) {
        asked->flags = like->storage->flags;
    }
    return 0;
}

/* Allocate what the arguments of empty_like() ask for. `values` has one place for each
 * parameter. Returns a new buffer, or NULL with an exception. */
static PyObject *
allocate_like(cm_state *state, PyObject *const *values)
{
    request asked = {.order = values[LIKE_ORDER],
                     .stream = values[LIKE_STREAM],
                     .pool = values[LIKE_POOL]};
    cm_pool_object *pool;
    PyObject *prototype = values[LIKE_PROTOTYPE];
    PyObject *device = NULL;
    PyObject *made = NULL;
    if (cm_arg_pool(state, asked.pool, &pool) < 0) {
        return NULL;
    }
    PyObject *like = read_prototype(state, prototype, values[LIKE_STREAM]);
    if (like == NULL) {
        return NULL;
    }
    device = pool == NULL ? device_of(state, prototype, values[LIKE_DEVICE])
                          : Py_XNewRef(values[LIKE_DEVICE]);
    if ((device == NULL && PyErr_Occurred())
        || read_kind_like(state, values, pool, &asked) < 0) {
        goto leave;
    }
    asked.like = like;
    asked.device = device;
    asked.dtype = values[LIKE_DTYPE];
    if (!cm_arg_is_given(asked.dtype)) {
        asked.dtype = dtype_of(state, like);
    }
    made = allocate(state, &asked);
leave:
    Py_XDECREF(device);
    Py_DECREF(like);
    return made;
}

/* -- values of new buffers ----------------------------------------------------------------- */

/* zeroed() fills a new buffer with zeros, and filled() fills it with a value. Both take
 * over the reference to `made`, which may be NULL with an exception. They return this
 * reference or, if they fail, drop it and return NULL with an exception. */
static PyObject *
zeroed(PyObject *made, PyObject *stream)
{
    if (made != NULL && cm_buffer_zero(made, stream) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

static PyObject *
filled(PyObject *made, PyObject *value, PyObject *stream, PyObject *casting)
{
    if (made != NULL && cm_buffer_fill_new(made, value, stream, casting) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

/* Find the stream on which full() reads its value if the value is memory of another
 * library. If a stream was given, it is that stream. If none was given and the new
 * buffer is device memory, it is the device's current stream, which also fills the
 * buffer. *out is a new reference to the stream, or NULL if any stream will do. Returns
 * 0, or -1 with an exception.
 */
static int
find_reading_stream(cm_state *state, PyObject *const *values, PyObject **out)
{
    cm_pool_object *pool;
    cm_kind kind;
    int device;
    *out = NULL;
    if (cm_arg_is_given(values[AT_STREAM])) {
        *out = Py_NewRef(values[AT_STREAM]);
        return 0;
    }
    if (cm_arg_pool(state, values[AT_POOL], &pool) < 0
        || read_kind(values[AT_KIND], pool, &kind) < 0) {
        return -1;
    }
    if (!cm_kind_is_on_device(kind)) {
        return 0;
    }
    if (read_place(state, values[AT_DEVICE], pool, &device) < 0) {
        return -1;
    }
    *out = cm_current_stream(state, device);
    return *out == NULL ? -1 : 0;
}

/* Read the value of full() as a Buffer, or as the array that NumPy makes of it. This is
 * for calls in which the value determines the dtype as well. Returns a new reference,
 * or NULL with an exception. */
static PyObject *
read_value_with_dtype(cm_state *state, PyObject *value, PyObject *const *values)
{
    PyObject *stream;
    if (!cm_is_exporter(state, value)) {
        return cm_buffer_check(state, value) ? Py_NewRef(value)
                                             : cm_value_read_array(value);
    }
    if (find_reading_stream(state, values, &stream) < 0) {
        return NULL;
    }
    PyObject *source = cm_asbuffer_on(state, value, stream);
    Py_XDECREF(stream);
    return source;
}

/* -- the functions ------------------------------------------------------------------------ */

#define KEYWORDED(name)                                                                \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs,   \
                          PyObject *kwnames)

KEYWORDED(empty)
{
    static const char *const names[] = {"shape",  "dtype",  "kind", "order",
                                        "device", "stream", "pool", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[NEW_COUNT];
    PyObject *made = cm_fast_any(state, args, nargs, kwnames);
    if (CM_LIKELY(made != NULL) || PyErr_Occurred()) {
        return made;
    }
    if (cm_args_parse("empty", args, nargs, kwnames, names, 3, 1, values) < 0) {
        return NULL;
    }
    return allocate_any(state, values);
}

KEYWORDED(zeros)
{
    static const char *const names[] = {"shape",  "dtype",  "kind", "order",
                                        "device", "stream", "pool", NULL};
    PyObject *values[NEW_COUNT];
    if (cm_args_parse("zeros", args, nargs, kwnames, names, 3, 1, values) < 0) {
        return NULL;
    }
    PyObject *made = allocate_any(cm_state_of_module(module), values);
    return zeroed(made, values[AT_STREAM]);
}

KEYWORDED(full)
{
    static const char *const names[] = {"shape",   "fill_value", "dtype",  "kind",
                                        "order",   "device",     "stream", "pool",
                                        "casting", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *given[9];
    if (cm_args_parse("full", args, nargs, kwnames, names, 4, 2, given) < 0) {
        return NULL;
    }
    PyObject *value = given[1];
    PyObject *values[NEW_COUNT] = {given[0], given[2], given[3], given[4],
                                   given[5], given[6], given[7]};
    PyObject *source = NULL;
    if (!cm_arg_is_given(values[AT_DTYPE])) {
        source = read_value_with_dtype(state, value, values);
        if (source == NULL) {
            return NULL;
        }
        value = source;
        values[AT_DTYPE] = dtype_of(state, source);
    }
    PyObject *made =
        filled(allocate_any(state, values), value, values[AT_STREAM], given[8]);
    Py_XDECREF(source);
    return made;
}

static const char *const like_names[] = {"prototype", "dtype",  "kind", "order",
                                         "device",    "stream", "pool", NULL};

KEYWORDED(empty_like)
{
    PyObject *values[LIKE_COUNT];
    if (cm_args_parse("empty_like", args, nargs, kwnames, like_names, 3, 1, values)
        < 0) {
        return NULL;
    }
    return allocate_like(cm_state_of_module(module), values);
}

KEYWORDED(zeros_like)
{
    PyObject *values[LIKE_COUNT];
    if (cm_args_parse("zeros_like", args, nargs, kwnames, like_names, 3, 1, values)
        < 0) {
        return NULL;
    }
    PyObject *made = allocate_like(cm_state_of_module(module), values);
    return zeroed(made, values[LIKE_STREAM]);
}

KEYWORDED(full_like)
{
    static const char *const names[] = {"prototype", "fill_value", "dtype",  "kind",
                                        "order",     "device",     "stream", "pool",
                                        "casting",   NULL};
    PyObject *given[9];
    if (cm_args_parse("full_like", args, nargs, kwnames, names, 4, 2, given) < 0) {
        return NULL;
    }
    PyObject *values[LIKE_COUNT] = {given[0], given[2], given[3], given[4],
                                    given[5], given[6], given[7]};
    PyObject *made = allocate_like(cm_state_of_module(module), values);
    return filled(made, given[1], values[LIKE_STREAM], given[8]);
}

/* Do the work of empty_pinned() and empty_mapped(), which differ only in the kind. */
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

/* Read attach=, which says which devices may use managed memory at first: by default
 * all of them ("global"), and with "host" none. Returns 0, or -1 with an exception. */
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
    CONSTRUCTOR(empty),         CONSTRUCTOR(empty_pinned), CONSTRUCTOR(empty_mapped),
    CONSTRUCTOR(empty_managed), CONSTRUCTOR(empty_device), CONSTRUCTOR(empty_like),
    CONSTRUCTOR(zeros),         CONSTRUCTOR(zeros_like),   CONSTRUCTOR(full),
    CONSTRUCTOR(full_like),     {NULL, NULL, 0, NULL},
};
