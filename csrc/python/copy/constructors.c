/* SPDX-License-Identifier: Apache-2.0 */
/* New buffers: of the kind that is asked for, of one kind each. Those with values are
 * cumem/constructors.py's. */
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/pool/allocate.h"

/* -- arguments ---------------------------------------------------------------------------- */

/* What they take, each a few of these. */
enum {
    SHAPE,
    LAYOUT,
    DTYPE,
    KIND,
    ORDER,
    PORTABLE,
    WRITE_COMBINED,
    ATTACH,
    DEVICE,
    STREAM,
    POOL,
    LIKE,
    SLOT_COUNT
};

/* One of the functions; its parameters end with SLOT_COUNT. */
typedef struct form {
    const char *name;
    int positional;
    cm_kind kind;
    int slots[SLOT_COUNT];
} form;

/* What it is asked for, with what it takes to keep it. */
typedef struct request {
    cm_state *state;
    cm_kind kind;
    unsigned flags;
    int device;
    char order;
    PyObject *values[SLOT_COUNT]; /* borrowed; NULL: not given */
    PyObject *dtype;              /* owned; NULL: not given */
    cm_pool_object *pool;         /* borrowed of the arguments; NULL: the current one */
    cm_stream *stream;            /* on loan; NULL for kinds that no stream orders */
    cm_stream *lent;              /* in its place where only memory is taken */
    int ndim;
    int64_t shape[CM_MAX_NDIM];
} request;

/* The shape, which is long, is not cleared. */
static void
request_init(request *self, PyObject *module, cm_kind kind)
{
    self->state = cm_state_of_module(module);
    self->kind = kind;
    memset(self->values, 0, sizeof(self->values));
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
or_else(PyObject *value, PyObject *absent)
{
    return value == NULL ? absent : value;
}

static int
request_set_dtype(request *self, PyObject *dtype)
{
    self->dtype = cm_numpy_dtype(or_else(dtype, Py_None));
    return self->dtype == NULL ? -1 : 0;
}

/* Order, and shape and dtype where they are not those of a layout. */
static int
request_set_shape(request *self)
{
    PyObject *const *values = self->values;
    bool like = values[LAYOUT] != NULL;
    if ((!like && cm_arg_shape(values[SHAPE], "shape", &self->ndim, self->shape) < 0)
        || cm_arg_order(or_else(values[ORDER], Py_None), "order", like,
                        like ? 'K' : 'C', &self->order)
               < 0) {
        return -1;
    }
    return like && !cm_arg_is_given(values[DTYPE])
               ? 0
               : request_set_dtype(self, values[DTYPE]);
}

/* The device is that of the pool where one is given alone. */
static int
request_set_place(request *self)
{
    PyObject *device = self->values[DEVICE];
    if (cm_arg_pool(self->state, self->values[POOL], &self->pool) < 0
        || cm_arg_device(self->state, device, "device", &self->device) < 0) {
        return -1;
    }
    if (!cm_arg_is_given(device) && self->pool != NULL) {
        self->device = self->pool->config.device;
    }
    return 0;
}

/* Where any may be given: else the pool's. The flags may be those of another buffer. */
static int
request_set_kind(request *self, bool is_any)
{
    PyObject *kind = self->values[KIND];
    bool is_given = self->values[LAYOUT] == NULL ? kind != NULL : cm_arg_is_given(kind);
    if (is_any && self->pool != NULL) {
        self->kind = self->pool->config.kind;
    }
    if (is_given && cm_arg_kind(kind, &self->kind) < 0) {
        return -1;
    }
    const cm_buffer *like =
        cm_arg_is_given(self->values[LIKE]) ? (cm_buffer *)self->values[LIKE] : NULL;
    self->flags = like != NULL && like->storage->pool != NULL
                      ? like->storage->flags
                      : cm_kinds[self->kind].flags;
    return 0;
}

/* Absent ones leave the usual flags; the package reads the others. */
static int
request_set_flags(request *self)
{
    PyObject *const *values = self->values;
    if (values[PORTABLE] == NULL && values[WRITE_COMBINED] == NULL
        && values[ATTACH] == NULL) {
        return 0;
    }
    PyObject *flags = cm_package_call(
        "extension.arguments", "read_flags",
        Py_BuildValue("(IOOO)", self->flags, or_else(values[PORTABLE], Py_Ellipsis),
                      or_else(values[WRITE_COMBINED], Py_Ellipsis),
                      or_else(values[ATTACH], Py_Ellipsis)));
    self->flags = flags == NULL ? 0 : (unsigned)PyLong_AsUnsignedLong(flags);
    Py_XDECREF(flags);
    return flags == NULL ? -1 : 0;
}

/* Lent where no Python code runs until the memory is there, which is all that it is
 * needed for. */
static int
request_set_stream(request *self)
{
    PyObject *stream = self->values[STREAM];
    bool ordered = cm_kind_is_ordered(self->kind);
    if (!cm_arg_is_given(stream) && ordered && self->values[LAYOUT] == NULL
        && cm_override_is_empty(&self->state->current_pool)) { /* else Python code may
                                                                  run */
        self->lent = cm_stream_lent(self->state, self->device);
    }
    if (cm_arg_is_given(stream) || (ordered && self->lent == NULL)) {
        stream = or_else(stream, Py_None);
        self->stream = ordered
                           ? cm_stream_for_device(self->state, stream, self->device)
                           : cm_stream_from_object(self->state, stream, self->device);
        return self->stream == NULL ? -1 : 0;
    }
    return 0;
}

/* -- memory ------------------------------------------------------------------------------- */

/* Of an array or a Buffer, of which nothing else matters. */
static int
request_take_layout(request *self, cm_region *like)
{
    PyObject *layout = self->values[LAYOUT];
    if (cm_buffer_check(self->state, layout)) {
        cm_buffer_region((const cm_buffer *)layout, like);
    }
    else {
        cm_numpy_layout(layout, like);
    }
    if (self->dtype != NULL) {
        return 0;
    }
    PyObject *dtype = PyObject_GetAttrString(layout, "dtype");
    int result = dtype == NULL ? -1 : request_set_dtype(self, dtype);
    Py_XDECREF(dtype);
    return result;
}

/* A stream that was named is used for filling; host kinds are not allocated on one. */
static PyObject *
request_allocate(request *self)
{
    cm_stream *stream = !cm_kind_is_ordered(self->kind) ? NULL
                        : self->lent != NULL            ? self->lent
                                                        : self->stream;
    if (self->values[LAYOUT] == NULL) {
        return cm_buffer_allocate(self->state, self->pool, self->kind, self->flags,
                                  self->device, self->dtype, self->ndim, self->shape,
                                  self->order, stream);
    }
    cm_region like;
    return request_take_layout(self, &like) < 0
               ? NULL
               : cm_buffer_allocate_like(self->state, self->pool, self->kind,
                                         self->flags, self->device, self->dtype, &like,
                                         self->order, stream);
}

/* -- the functions ------------------------------------------------------------------------ */

static PyObject *
make(const form *own, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
     PyObject *kwnames)
{
    static const char *const texts[] = {
        "shape",          "layout", "dtype",  "kind",   "order", "portable",
        "write_combined", "attach", "device", "stream", "pool",  "like"};
    const char *names[SLOT_COUNT];
    PyObject *values[SLOT_COUNT];
    int count = 0;
    for (; own->slots[count] != SLOT_COUNT; count++) {
        names[count] = texts[own->slots[count]];
    }
    names[count] = NULL;
    request self;
    PyObject *buffer = NULL;
    request_init(&self, module, own->kind);
    if (cm_args_parse(own->name, args, nargs, kwnames, names, own->positional, 1,
                      values)
        == 0) {
        for (int i = 0; i < count; i++) {
            self.values[own->slots[i]] = values[i];
        }
        if (request_set_shape(&self) == 0 && request_set_place(&self) == 0
            && request_set_kind(&self, own->slots[2] == KIND) == 0
            && request_set_flags(&self) == 0 && request_set_stream(&self) == 0) {
            buffer = request_allocate(&self);
        }
    }
    request_fini(&self);
    return buffer;
}

/* `warm` is tried first. */
#define MAKER(name, warm, positional, ...)                                             \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs,   \
                          PyObject *kwnames)                                           \
    {                                                                                  \
        static const form own = {#name, positional, __VA_ARGS__};                      \
        PyObject *made = warm;                                                         \
        return CM_LIKELY(made != NULL) ? made                                          \
                                       : make(&own, module, args, nargs, kwnames);     \
    }
#define FAST_ANY cm_fast_any(cm_state_of_module(module), args, nargs, kwnames)
#define FAST(kind) cm_fast_kind(cm_state_of_module(module), kind, args, nargs, kwnames)
#define HOST_SLOTS                                                                     \
    {SHAPE, DTYPE, ORDER, PORTABLE, WRITE_COMBINED, DEVICE, POOL, SLOT_COUNT}

MAKER(empty, FAST_ANY, 3, CM_KIND_DEVICE,
      {SHAPE, DTYPE, KIND, ORDER, DEVICE, STREAM, POOL, SLOT_COUNT})
MAKER(empty_like, NULL, 8, CM_KIND_DEVICE,
      {LAYOUT, DTYPE, KIND, ORDER, DEVICE, STREAM, POOL, LIKE, SLOT_COUNT})
MAKER(empty_pinned, FAST(CM_KIND_PINNED), 2, CM_KIND_PINNED, HOST_SLOTS)
MAKER(empty_mapped, FAST(CM_KIND_MAPPED), 2, CM_KIND_MAPPED, HOST_SLOTS)
MAKER(empty_managed, FAST(CM_KIND_MANAGED), 2, CM_KIND_MANAGED,
      {SHAPE, DTYPE, ORDER, ATTACH, DEVICE, POOL, SLOT_COUNT})
MAKER(empty_device, FAST(CM_KIND_DEVICE), 2, CM_KIND_DEVICE,
      {SHAPE, DTYPE, ORDER, DEVICE, STREAM, POOL, SLOT_COUNT})

/* -- table ------------------------------------------------------------------------------ */

#define CONSTRUCTOR(name) {#name, CM_METHOD(name), CM_KEYWORDS, CM_DOC_##name}

PyMethodDef cm_constructor_methods[] = {
    CONSTRUCTOR(empty),
    CONSTRUCTOR(empty_pinned),
    CONSTRUCTOR(empty_mapped),
    CONSTRUCTOR(empty_managed),
    CONSTRUCTOR(empty_device),
    {"_empty_like", CM_METHOD(empty_like), CM_KEYWORDS, CM_DOC__empty_like},
    {NULL, NULL, 0, NULL},
};
