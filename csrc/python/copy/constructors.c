/* SPDX-License-Identifier: Apache-2.0 */
/* New buffers: of the kind that is asked for, of one kind each. Those with values are
 * cumem/constructors.py's. */
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/buffer_methods.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/pool/allocate.h"

/* -- arguments ---------------------------------------------------------------------------- */

/* What all of them are asked for, with what it takes to keep it. */
typedef struct request {
    cm_state *state;
    cm_kind kind;
    unsigned flags;
    int device;
    char order;
    PyObject *dtype;      /* owned; NULL: not given */
    cm_pool_object *pool; /* borrowed of the arguments; NULL: the current one */
    cm_stream *stream;    /* on loan; NULL for kinds that no stream orders */
    cm_stream *lent;      /* in its place where only memory is taken */
    int ndim;
    int64_t shape[CM_MAX_NDIM];
} request;

/* The shape, which is long, is not cleared. */
static void
request_init(request *self, PyObject *module, cm_kind kind)
{
    self->state = cm_state_of_module(module);
    self->kind = kind;
    self->flags = cm_kinds[kind].flags;
    self->dtype = NULL;
    self->pool = NULL;
    self->stream = NULL;
    self->lent = NULL;
}

static void
request_fini(request *self)
{
    Py_XDECREF(self->dtype);
    cm_stream_give(self->state, self->stream);
}

static PyObject *
or_none(PyObject *value)
{
    return value == NULL ? Py_None : value;
}

static int
request_set_dtype(request *self, PyObject *dtype)
{
    self->dtype = cm_numpy_dtype(or_none(dtype));
    return self->dtype == NULL ? -1 : 0;
}

/* The arguments `shape, dtype, order`; absent ones are NULL, here and below. */
static int
request_set_shape(request *self, PyObject *shape, PyObject *dtype, PyObject *order)
{
    return cm_arg_shape(shape, "shape", &self->ndim, self->shape) < 0
                   || cm_arg_order(or_none(order), "order", false, 'C', &self->order)
                          < 0
                   || request_set_dtype(self, dtype) < 0
               ? -1
               : 0;
}

/* The device is that of the pool where one is given alone. */
static int
request_set_place(request *self, PyObject *device, PyObject *pool)
{
    if (cm_arg_pool(self->state, pool, &self->pool) < 0
        || cm_arg_device(self->state, or_none(device), "device", &self->device) < 0) {
        return -1;
    }
    if (self->pool != NULL && !cm_arg_is_given(device)) {
        self->device = self->pool->config.device;
    }
    return 0;
}

/* `may_lend`: no Python code runs until the memory is there, which is all that the
 * stream is needed for. */
static int
request_set_stream(request *self, PyObject *stream, bool may_lend)
{
    bool ordered = cm_kind_is_ordered(self->kind);
    if (!cm_arg_is_given(stream) && may_lend && ordered
        && cm_override_is_empty(&self->state->current_pool)) { /* else Python code may
                                                                  run */
        self->lent = cm_stream_lent(self->state, self->device);
    }
    if (cm_arg_is_given(stream) || (ordered && self->lent == NULL)) {
        stream = or_none(stream);
        self->stream = ordered
                           ? cm_stream_for_device(self->state, stream, self->device)
                           : cm_stream_from_object(self->state, stream, self->device);
        return self->stream == NULL ? -1 : 0;
    }
    return 0;
}

/* Place and stream of those that take a kind, which stays as it is where none is given,
 * unless a pool says which. */
static int
request_set_kind(request *self, PyObject *kind, PyObject *device, PyObject *stream,
                 PyObject *pool, bool may_lend)
{
    if (request_set_place(self, device, pool) < 0) {
        return -1;
    }
    if (self->pool != NULL) {
        self->kind = self->pool->config.kind;
    }
    if (kind != NULL && cm_arg_kind(kind, &self->kind) < 0) {
        return -1;
    }
    self->flags = cm_kinds[self->kind].flags;
    return request_set_stream(self, stream, may_lend);
}

/* A stream that was named is used for filling; host kinds are not allocated on one. */
static PyObject *
request_allocate(const request *self)
{
    cm_stream *stream = !cm_kind_is_ordered(self->kind) ? NULL
                        : self->lent != NULL            ? self->lent
                                                        : self->stream;
    return cm_buffer_allocate(self->state, self->pool, self->kind, self->flags,
                              self->device, self->dtype, self->ndim, self->shape,
                              self->order, stream);
}

/* The layout and dtype of an array or a Buffer. Nothing else of `like` matters. */
static int
request_take_layout(request *self, PyObject *prototype, cm_region *like)
{
    if (cm_buffer_check(self->state, prototype)) {
        cm_buffer_region((const cm_buffer *)prototype, like);
    }
    else {
        cm_numpy_layout(prototype, like);
    }
    if (self->dtype != NULL) {
        return 0;
    }
    PyObject *dtype = PyObject_GetAttrString(prototype, "dtype");
    int result = dtype == NULL ? -1 : request_set_dtype(self, dtype);
    Py_XDECREF(dtype);
    return result;
}

/* -- empty ------------------------------------------------------------------------------ */

static PyObject *
empty(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *warm = cm_fast_any(cm_state_of_module(module), args, nargs, kwnames);
    if (CM_LIKELY(warm != NULL)) {
        return warm;
    }
    static const char *const names[] = {"shape",  "dtype",  "kind", "order",
                                        "device", "stream", "pool", NULL};
    PyObject *values[7];
    request self;
    PyObject *buffer = NULL;
    request_init(&self, module, CM_KIND_DEVICE);
    if (cm_args_parse("empty", args, nargs, kwnames, names, 3, 1, values) == 0
        && request_set_shape(&self, values[0], values[1], values[3]) == 0
        && request_set_kind(&self, values[2], values[4], values[5], values[6], true)
               == 0) {
        buffer = request_allocate(&self);
    }
    request_fini(&self);
    return buffer;
}

/* -- empty_like ------------------------------------------------------------------------- */

/* A new object for the device of a buffer that has one, else `device` itself. */
static PyObject *
device_like(cm_state *state, PyObject *prototype, PyObject *device)
{
    if (!cm_arg_is_given(device) && cm_buffer_check(state, prototype)) {
        const cm_storage *storage = ((const cm_buffer *)prototype)->storage;
        if (!cm_kind_is_pageable(storage->kind)) {
            return PyLong_FromLong(storage->device);
        }
    }
    return Py_NewRef(or_none(device));
}

static cm_kind
kind_like(const cm_state *state, PyObject *prototype)
{
    if (!cm_buffer_check(state, prototype)) {
        return CM_KIND_DEVICE;
    }
    const cm_buffer *buffer = (const cm_buffer *)prototype;
    cm_kind kind = buffer->storage->kind;
    return cm_kind_is_pageable(kind) || buffer->as_device ? CM_KIND_DEVICE : kind;
}

static PyObject *
allocate_like(request *self, PyObject *prototype, PyObject *kind)
{
    PyObject *layout;
    bool is_buffer = cm_buffer_check(self->state, prototype);
    if (is_buffer || cm_numpy_is_array(prototype)) {
        layout = Py_NewRef(prototype);
    }
    else if (cm_object_is_exporter(prototype)) {
        layout = cm_import_object(self->state, prototype, self->stream, 0);
    }
    else {
        layout = cm_numpy_as_array(prototype, NULL);
    }
    if (layout == NULL) {
        return NULL;
    }
    if (is_buffer && !cm_arg_is_given(kind) && self->pool == NULL) { /* its flags */
        const cm_buffer *buffer = (const cm_buffer *)prototype;
        bool pooled = buffer->storage->pool != NULL && !buffer->as_device;
        self->flags = pooled ? buffer->storage->flags : self->flags;
    }
    cm_region like;
    PyObject *buffer = NULL;
    if (request_take_layout(self, layout, &like) == 0) {
        cm_stream *stream = cm_kind_is_ordered(self->kind) ? self->stream : NULL;
        buffer = cm_buffer_allocate_like(self->state, self->pool, self->kind,
                                         self->flags, self->device, self->dtype, &like,
                                         self->order, stream);
    }
    Py_DECREF(layout);
    return buffer;
}

static PyObject *
empty_like(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"prototype", "dtype",  "kind", "order",
                                        "device",    "stream", "pool", NULL};
    PyObject *values[7];
    request self;
    PyObject *buffer = NULL;
    request_init(&self, module, CM_KIND_DEVICE);
    if (cm_args_parse("empty_like", args, nargs, kwnames, names, 3, 1, values) == 0
        && (!cm_arg_is_given(values[1]) || request_set_dtype(&self, values[1]) == 0)) {
        self.kind = kind_like(self.state, values[0]);
        PyObject *kind = cm_arg_is_given(values[2]) ? values[2] : NULL;
        PyObject *device = cm_arg_is_given(values[6])
                               ? Py_NewRef(or_none(values[4]))
                               : device_like(self.state, values[0], values[4]);
        if (device != NULL
            && cm_arg_order(or_none(values[3]), "order", true, 'K', &self.order) == 0
            && request_set_kind(&self, kind, device, values[5], values[6], false)
                   == 0) {
            buffer = allocate_like(&self, values[0], kind);
        }
        Py_XDECREF(device);
    }
    request_fini(&self);
    return buffer;
}

/* -- of one kind ------------------------------------------------------------------------ */

static int
parse_attach(PyObject *object, unsigned *out)
{
    bool is_text = PyUnicode_Check(object);
    if (is_text && PyUnicode_CompareWithASCIIString(object, "host") == 0) {
        *out = CM_MANAGED_HOST;
        return 0;
    }
    return is_text && PyUnicode_CompareWithASCIIString(object, "global") == 0
               ? 0
               : cm_arg_refuse_choice(object, "attach", "\"global\" or \"host\"");
}

/* Absent ones leave the usual flags. */
static int
request_set_flags(request *self, PyObject *portable, PyObject *write_combined,
                  PyObject *attach)
{
    bool stays = true;
    bool combines = false;
    if ((portable != NULL && cm_arg_bool(portable, "portable", &stays) < 0)
        || (write_combined != NULL
            && cm_arg_bool(write_combined, "write_combined", &combines) < 0)) {
        return -1;
    }
    self->flags &= stays ? ~0u : ~(unsigned)CM_HOST_ALLOC_PORTABLE;
    self->flags |= combines ? CM_HOST_ALLOC_WRITE_COMBINED : 0u;
    return attach == NULL ? 0 : parse_attach(attach, &self->flags);
}

/* What a function takes beside shape, dtype and order. */
enum { PORTABLE, WRITE_COMBINED, ATTACH, DEVICE, STREAM, POOL, OPTION_COUNT };

static PyObject *
empty_kind(const char *function, cm_kind kind, const int *options, PyObject *module,
           PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const texts[] = {"portable", "write_combined", "attach",
                                        "device",   "stream",         "pool"};
    const char *names[3 + OPTION_COUNT + 1] = {"shape", "dtype", "order"};
    PyObject *values[3 + OPTION_COUNT];
    PyObject *found[OPTION_COUNT] = {NULL};
    int count = 0;
    for (; options[count] != OPTION_COUNT; count++) {
        names[3 + count] = texts[options[count]];
    }
    request self;
    PyObject *buffer = NULL;
    request_init(&self, module, kind);
    if (cm_args_parse(function, args, nargs, kwnames, names, 2, 1, values) == 0) {
        for (int i = 0; i < count; i++) {
            found[options[i]] = values[3 + i];
        }
        if (request_set_flags(&self, found[PORTABLE], found[WRITE_COMBINED],
                              found[ATTACH])
                == 0
            && request_set_place(&self, found[DEVICE], found[POOL]) == 0
            && request_set_shape(&self, values[0], values[1], values[2]) == 0
            && request_set_stream(&self, found[STREAM], true) == 0) {
            buffer = request_allocate(&self);
        }
    }
    request_fini(&self);
    return buffer;
}

#define EMPTY(name, kind, ...)                                                         \
    static PyObject *empty_##name(PyObject *module, PyObject *const *args,             \
                                  Py_ssize_t nargs, PyObject *kwnames)                 \
    {                                                                                  \
        static const int options[] = {__VA_ARGS__, OPTION_COUNT};                      \
        PyObject *warm =                                                               \
            cm_fast_kind(cm_state_of_module(module), kind, args, nargs, kwnames);      \
        return CM_LIKELY(warm != NULL) ? warm                                          \
                                       : empty_kind("empty_" #name, kind, options,     \
                                                    module, args, nargs, kwnames);     \
    }

EMPTY(pinned, CM_KIND_PINNED, PORTABLE, WRITE_COMBINED, DEVICE, POOL)
EMPTY(mapped, CM_KIND_MAPPED, PORTABLE, WRITE_COMBINED, DEVICE, POOL)
EMPTY(managed, CM_KIND_MANAGED, ATTACH, DEVICE, POOL)
EMPTY(device, CM_KIND_DEVICE, DEVICE, STREAM, POOL)

/* -- table ------------------------------------------------------------------------------ */

#define CONSTRUCTOR(name) {#name, CM_METHOD(name), CM_KEYWORDS, CM_DOC_##name}

PyMethodDef cm_constructor_methods[] = {
    CONSTRUCTOR(empty),        CONSTRUCTOR(empty_like),    CONSTRUCTOR(empty_pinned),
    CONSTRUCTOR(empty_mapped), CONSTRUCTOR(empty_managed), CONSTRUCTOR(empty_device),
    {NULL, NULL, 0, NULL},
};
