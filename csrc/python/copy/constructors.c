/* SPDX-License-Identifier: Apache-2.0 */
/* The constructors that take a kind. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/buffer_methods.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/pool/allocate.h"

/* -- docstrings -------------------------------------------------------------------- */

#define KIND_PARAMETER                                                                 \
    "kind : {'device', 'pinned', 'mapped', 'managed'}\n"                               \
    "    What memory; default device memory.\n"
#define PLACE_PARAMETERS                                                               \
    "order : {'C', 'F'}\n"                                                             \
    "    Whether the last or the first index runs fastest.\n" DEVICE_PARAMETERS
#define LIKE_PARAMETERS                                                                \
    "order : {'C', 'F', 'A', 'K'}\n"                                                   \
    "    As in NumPy: 'C' and 'F' say whether the last or the first index runs\n"      \
    "    fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', "   \
    "and\n"                                                                            \
    "    'K' keeps the order of its strides.\n" DEVICE_PARAMETERS
#define DEVICE_PARAMETERS                                                              \
    "device : Device, int or str, optional\n"                                          \
    "    Whose memory, or whose context page-locks it, as ``0`` or ``\"cuda:0\"``; "   \
    "default:\n"                                                                       \
    "    cumem's current one.\n"                                                       \
    "stream : Stream or other stream object, optional\n"                               \
    "    The stream to use it on first, for device memory one of `device`; default:\n" \
    "    the current stream.\n"                                                        \
    "pool : Pool, optional\n"                                                          \
    "    Where to take it from; default: the pool of the innermost ``with pool:`` "    \
    "block\n"                                                                          \
    "    that fits, else the kind's default pool. Without `kind` and `device` it "     \
    "says these as well.\n"
#define RETURNS                                                                        \
    "\n"                                                                               \
    "Returns\n"                                                                        \
    "-------\n"                                                                        \
    "Buffer\n"                                                                         \
    "    A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.\n"       \
    "\n"
#define RAISES                                                                         \
    "Raises\n"                                                                         \
    "------\n"                                                                         \
    "ValueError\n"                                                                     \
    "    A length is negative, the size does not fit in 63 bits, kind, order or "      \
    "device\n"                                                                         \
    "    is none of those that exist, or `stream` is of another device.\n"             \
    "TypeError\n"                                                                      \
    "    An argument has the wrong type, or the dtype holds Python objects.\n"         \
    "OutOfMemoryError\n"                                                               \
    "    There is no room, also after waiting for freed memory and trimming pools.\n"  \
    "CudaError\n"                                                                      \
    "    A call to CUDA failed.\n"                                                     \
    "RuntimeError\n"                                                                   \
    "    In a child made by ``fork``.\n"                                               \
    "\n"

static const char empty_doc[] =
    "empty($module, /, shape, dtype='float64', kind='device', *, order='C', "
    "device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer from the pool of its kind, without setting its bytes.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    Lengths in elements; 0 and ``()`` are fine.\n"
    "dtype : dtype_like\n"
    "    Any NumPy dtype without Python objects.\n" KIND_PARAMETER PLACE_PARAMETERS
        RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: only when the pool has nothing that fits (GIL released).\n"
    "Ordered after: device memory may be used at once on `stream`; on another stream "
    "the\n"
    "user orders it.\n";

static const char zeros_doc[] =
    "zeros($module, /, shape, dtype='float64', kind='device', *, order='C', "
    "device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer and set all its bytes to zero.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    Lengths in elements.\n"
    "dtype : dtype_like\n"
    "    Any NumPy dtype without Python objects.\n" KIND_PARAMETER PLACE_PARAMETERS
        RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: for memory the host can read, until it is zero; device memory, and "
    "mapped\n"
    "and managed memory with `stream`, is set on the stream.\n"
    "Ordered after: work on `stream`.\n";

static const char full_doc[] =
    "full($module, /, shape, fill_value, dtype=None, kind='device', *, order='C', "
    "device=None, stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer and set all its elements to a value.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    Lengths in elements.\n"
    "fill_value : array_like, Buffer, or exporter of DLPack or the CUDA array "
    "interface\n"
    "    A scalar, or an array that broadcasts to the shape; also on a device.\n"
    "dtype : dtype_like, optional\n"
    "    Default: the dtype that `fill_value` has or NumPy gives it.\n" KIND_PARAMETER
        PLACE_PARAMETERS RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: for memory the host can read, until it is filled; device memory, and "
    "mapped\n"
    "and managed memory with `stream`, is filled on the stream.\n"
    "Ordered after: work on `stream`.\n";

static const char array_doc[] =
    "array($module, /, obj, dtype=None, kind='device', *, order='K', device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Copy anything array-like into a new buffer.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "obj : array_like, Buffer, or exporter of DLPack or the CUDA array interface\n"
    "    Where the values come from.\n"
    "dtype : dtype_like, optional\n"
    "    Default: the dtype of `obj`. Values that the host can read take another one "
    "as "
    "in\n"
    "    `fill`: they stay the same kind and come back equal, floats rounded. Else it "
    "is "
    "a\n"
    "    TypeError (reals for integers) or an OverflowError (300 in "
    "``uint8``).\n" KIND_PARAMETER LIKE_PARAMETERS RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: until the values are there (GIL released).\n"
    "Ordered after: work on `stream`, and what the exporter of `obj` says is "
    "pending.\n";

static const char empty_like_doc[] =
    "empty_like($module, /, prototype, dtype=None, kind=None, *, order='K', "
    "device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer with the shape and dtype of another array.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "prototype : Buffer or array_like\n"
    "    Gives shape, dtype and, if it is a buffer, kind, flags and device.\n"
    "dtype : dtype_like, optional\n"
    "    Instead of the prototype's.\n"
    "kind : {'device', 'pinned', 'mapped', 'managed'}, optional\n"
    "    Instead of the prototype's; device memory for what is no buffer and for "
    "ordinary\n"
    "    memory.\n" LIKE_PARAMETERS RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: only when the pool has nothing that fits (GIL released).\n"
    "Ordered after: as `empty`.\n";

/* -- arguments --------------------------------------------------------------------- */

/* What all of them are asked for, with what it takes to keep it. */
typedef struct request {
    cm_state *state;
    cm_kind kind;
    unsigned flags;
    int device;
    char order;
    PyObject *dtype;      /* owned; NULL: not given */
    cm_pool_object *pool; /* borrowed of the arguments; NULL: the current one */
    cm_stream *stream;    /* owned; NULL for kinds that no stream orders */
    cm_stream *lent;      /* in its place where only memory is taken */
    int ndim;
    int64_t shape[CM_MAX_NDIM];
} request;

static void
request_fini(request *self)
{
    Py_XDECREF(self->dtype);
    self->dtype = NULL;
    if (self->stream != NULL) {
        cm_stream_give(self->state, self->stream);
        self->stream = NULL;
    }
}

static int
request_set_order(request *self, PyObject *order, bool has_prototype)
{
    PyObject *object = order == NULL ? Py_None : order;
    return has_prototype ? cm_arg_order_like(object, "order", 'K', &self->order)
                         : cm_arg_order(object, "order", &self->order);
}

static bool
is_given(PyObject *value)
{
    return value != NULL && value != Py_None;
}

/* Everything but shape, dtype and order. Absent arguments are NULL; `kind` stays as it
 * is then, unless a pool says which. `may_lend`: no Python code runs until the memory
 * is there, which is all that the stream is needed for. */
static int
request_parse(request *self, PyObject *kind, PyObject *device, PyObject *stream,
              PyObject *pool, bool may_lend)
{
    if (cm_arg_pool(self->state, pool, &self->pool) < 0) {
        return -1;
    }
    if (self->pool != NULL) {
        self->kind = self->pool->config.kind;
    }
    if ((kind != NULL && cm_arg_kind(kind, "kind", &self->kind) < 0)
        || cm_arg_device(self->state, device == NULL ? Py_None : device, "device",
                         &self->device)
               < 0) {
        return -1;
    }
    if (self->pool != NULL && !is_given(device)) {
        self->device = self->pool->config.device;
    }
    self->flags = cm_buffer_default_flags(self->kind);
    if (self->pool != NULL
        && cm_pool_object_check(self->pool, self->kind, self->flags, self->device)
               < 0) {
        return -1;
    }
    bool given = stream != NULL && stream != Py_None;
    if (!given && may_lend && self->kind == CM_KIND_DEVICE
        && cm_override_is_empty(&self->state->current_pool)) { /* else Python code may
                                                                  run */
        self->lent = cm_stream_lent(self->state, self->device);
    }
    if (given || (self->kind == CM_KIND_DEVICE && self->lent == NULL)) {
        PyObject *object = stream == NULL ? Py_None : stream;
        self->stream = self->kind == CM_KIND_DEVICE
                           ? cm_stream_for_device(self->state, object, self->device)
                           : cm_stream_from_object(self->state, object, self->device);
        if (self->stream == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
request_set_dtype(request *self, PyObject *dtype)
{
    self->dtype = cm_numpy_dtype(dtype == NULL ? Py_None : dtype);
    return self->dtype == NULL ? -1 : 0;
}

/* A stream that was named is used for filling; host kinds are not allocated on one. */
static PyObject *
request_allocate(const request *self)
{
    cm_stream *stream = self->kind != CM_KIND_DEVICE ? NULL
                        : self->lent != NULL         ? self->lent
                                                     : self->stream;
    return cm_buffer_allocate(self->state, self->pool, self->kind, self->flags,
                              self->device, self->dtype, self->ndim, self->shape,
                              self->order, stream);
}

static PyObject *
request_allocate_like(const request *self, const cm_region *like)
{
    cm_stream *stream = self->kind == CM_KIND_DEVICE ? self->stream : NULL;
    return cm_buffer_allocate_like(self->state, self->pool, self->kind, self->flags,
                                   self->device, self->dtype, like, self->order,
                                   stream);
}

/* The strides and the itemsize of an array or a Buffer of as many dimensions. */
static int
take_strides(PyObject *prototype, cm_region *like)
{
    PyObject *strides = PyObject_GetAttrString(prototype, "strides");
    PyObject *itemsize =
        strides == NULL ? NULL : PyObject_GetAttrString(prototype, "itemsize");
    int result =
        itemsize == NULL ? -1 : cm_arg_int64(itemsize, "itemsize", &like->itemsize);
    for (int i = 0; result == 0 && i < like->ndim; i++) {
        PyObject *stride = PyTuple_GetItem(strides, i);
        result =
            stride == NULL ? -1 : cm_arg_int64(stride, "strides", &like->strides[i]);
    }
    Py_XDECREF(itemsize);
    Py_XDECREF(strides);
    return result;
}

/* The layout and dtype of any array-like: of a Buffer or of what NumPy makes of it.
 * Nothing else of `like` is written. */
static int
request_take_layout(request *self, PyObject *prototype, cm_region *like)
{
    PyObject *shape = PyObject_GetAttrString(prototype, "shape");
    if (shape == NULL) {
        return -1;
    }
    int result = cm_arg_shape(shape, "shape", &like->ndim, like->shape);
    Py_DECREF(shape);
    if (result == 0) {
        result = take_strides(prototype, like);
    }
    if (result == 0 && self->dtype == NULL) {
        PyObject *dtype = PyObject_GetAttrString(prototype, "dtype");
        result = dtype == NULL ? -1 : request_set_dtype(self, dtype);
        Py_XDECREF(dtype);
    }
    return result;
}

/* -- empty, zeros ----------------------------------------------------------------------- */

/* Parse "shape, dtype, kind, *, order, device, stream" and allocate. `self` must be
 * finished in any case. */
static PyObject *
allocate_plain(const char *function, PyObject *module, PyObject *const *args,
               Py_ssize_t nargs, PyObject *kwnames, request *self, PyObject **stream)
{
    static const char *const names[] = {"shape",  "dtype",  "kind", "order",
                                        "device", "stream", "pool", NULL};
    PyObject *values[7];
    self->state = cm_state_of_module(module);
    self->kind = CM_KIND_DEVICE;
    self->dtype = NULL; /* the shape, which is long, is not cleared */
    self->pool = NULL;
    self->stream = NULL;
    self->lent = NULL;
    if (cm_args_parse(function, args, nargs, kwnames, names, 3, 1, values) < 0
        || cm_arg_shape(values[0], "shape", &self->ndim, self->shape) < 0
        || request_set_dtype(self, values[1]) < 0
        || request_set_order(self, values[3], false) < 0
        || request_parse(self, values[2], values[4], values[5], values[6], true) < 0) {
        return NULL;
    }
    *stream = values[5];
    return request_allocate(self);
}

static PyObject *
empty(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *warm = cm_fast_any(cm_state_of_module(module), args, nargs, kwnames);
    if (CM_LIKELY(warm != NULL)) {
        return warm;
    }
    request self;
    PyObject *stream;
    PyObject *buffer =
        allocate_plain("empty", module, args, nargs, kwnames, &self, &stream);
    request_fini(&self);
    return buffer;
}

/* Fill a fresh buffer and hand it on; NULL (and the buffer gone) on failure. */
static PyObject *
filled(PyObject *buffer, PyObject *value, PyObject *stream)
{
    if (buffer != NULL
        && cm_buffer_fill_value((cm_buffer *)buffer, value, stream) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

static PyObject *
zeros(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    request self;
    PyObject *stream;
    PyObject *buffer =
        allocate_plain("zeros", module, args, nargs, kwnames, &self, &stream);
    if (buffer != NULL && cm_buffer_zero((cm_buffer *)buffer, stream) < 0) {
        Py_CLEAR(buffer);
    }
    request_fini(&self);
    return buffer;
}

/* -- full ------------------------------------------------------------------------------- */

/* The dtype of a Buffer, or the one that NumPy gives the value. */
static int
request_infer_dtype(request *self, PyObject *value)
{
    PyObject *array = cm_buffer_check(self->state, value)
                          ? Py_NewRef(value)
                          : cm_numpy_as_array(value, NULL);
    if (array == NULL) {
        return -1;
    }
    PyObject *dtype = PyObject_GetAttrString(array, "dtype");
    Py_DECREF(array);
    int result = dtype == NULL ? -1 : request_set_dtype(self, dtype);
    Py_XDECREF(dtype);
    return result;
}

/* Allocate and fill; the request is parsed but for its dtype. */
static PyObject *
make_full(request *self, PyObject *value, PyObject *dtype, PyObject *stream)
{
    PyObject *source = cm_fill_source(self->state, value, self->stream);
    PyObject *buffer = NULL;
    if (source != NULL
        && (is_given(dtype) ? request_set_dtype(self, dtype)
                            : request_infer_dtype(self, source))
               == 0) {
        buffer = filled(request_allocate(self), source, stream);
    }
    Py_XDECREF(source);
    return buffer;
}

static PyObject *
full(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"shape",  "fill_value", "dtype",
                                        "kind",   "order",      "device",
                                        "stream", "pool",       NULL};
    PyObject *values[8];
    request self = {.state = cm_state_of_module(module), .kind = CM_KIND_DEVICE};
    PyObject *buffer = NULL;
    if (cm_args_parse("full", args, nargs, kwnames, names, 4, 2, values) == 0
        && cm_arg_shape(values[0], "shape", &self.ndim, self.shape) == 0
        && request_set_order(&self, values[4], false) == 0
        && request_parse(&self, values[3], values[5], values[6], values[7], false)
               == 0) {
        buffer = make_full(&self, values[1], values[2], values[6]);
    }
    request_fini(&self);
    return buffer;
}

/* -- array ------------------------------------------------------------------------------ */

/* What to copy from: a Buffer or a NumPy array, converted to the dtype asked for where
 * the host can do that and no value changes. New reference. */
static PyObject *
array_source(const request *self, PyObject *object, PyObject *dtype)
{
    PyObject *source;
    if (cm_buffer_check(self->state, object)) {
        source = Py_NewRef(object);
    }
    else if (cm_object_is_exporter(object)) {
        source = cm_import_object(self->state, object, self->stream);
    }
    else {
        return dtype == NULL ? cm_numpy_as_array(object, NULL)
                             : cm_numpy_as_value(object, dtype);
    }
    if (source == NULL || dtype == NULL) {
        return source;
    }
    cm_buffer *buffer = (cm_buffer *)source;
    int same = cm_numpy_dtype_equal(buffer->dtype, dtype);
    if (same != 0) {
        if (same < 0) {
            Py_CLEAR(source);
        }
        return source;
    }
    PyObject *converted = NULL;
    if (Py_TYPE(source) == self->state->device_buffer_type) {
        PyErr_Format(PyExc_TypeError,
                     "dtype %S is asked for but the source on the device has %S, and "
                     "nothing there converts",
                     dtype, buffer->dtype);
    }
    else {
        PyObject *array = cm_buffer_numpy(source, NULL);
        converted = array == NULL ? NULL : cm_numpy_as_value(array, dtype);
        Py_XDECREF(array);
    }
    Py_DECREF(source);
    return converted;
}

static PyObject *
copy_to_new(request *self, PyObject *source)
{
    cm_region like;
    if (request_take_layout(self, source, &like) < 0) {
        return NULL;
    }
    PyObject *buffer = request_allocate_like(self, &like);
    if (buffer == NULL) {
        return NULL;
    }
    PyObject *done = cm_copy_objects(self->state, buffer, source, self->stream, true);
    if (done == NULL) {
        Py_CLEAR(buffer);
    }
    Py_XDECREF(done);
    return buffer;
}

static PyObject *
array(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj",    "dtype",  "kind", "order",
                                        "device", "stream", "pool", NULL};
    PyObject *values[7];
    request self = {.state = cm_state_of_module(module), .kind = CM_KIND_DEVICE};
    PyObject *buffer = NULL;
    if (cm_args_parse("array", args, nargs, kwnames, names, 3, 1, values) == 0
        && (!is_given(values[1]) || request_set_dtype(&self, values[1]) == 0)
        && request_set_order(&self, values[3], true) == 0
        && request_parse(&self, values[2], values[4], values[5], values[6], false)
               == 0) {
        PyObject *source = array_source(&self, values[0], self.dtype);
        buffer = source == NULL ? NULL : copy_to_new(&self, source);
        Py_XDECREF(source);
    }
    request_fini(&self);
    return buffer;
}

/* -- empty_like ------------------------------------------------------------------------- */

/* A new object for the device of a buffer that has one, else `device` itself. */
static PyObject *
device_like(cm_state *state, PyObject *prototype, PyObject *device)
{
    if (!is_given(device) && cm_buffer_check(state, prototype)) {
        const cm_storage *storage = ((const cm_buffer *)prototype)->storage;
        if (storage->kind != CM_KIND_PAGEABLE) {
            return PyLong_FromLong(storage->device);
        }
    }
    return Py_NewRef(device == NULL ? Py_None : device);
}

static cm_kind
kind_like(const cm_state *state, PyObject *prototype)
{
    if (!cm_buffer_check(state, prototype)) {
        return CM_KIND_DEVICE;
    }
    const cm_buffer *buffer = (const cm_buffer *)prototype;
    cm_kind kind = buffer->storage->kind;
    return kind == CM_KIND_PAGEABLE || buffer->as_device ? CM_KIND_DEVICE : kind;
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
        layout = cm_import_object(self->state, prototype, self->stream);
    }
    else {
        layout = cm_numpy_as_array(prototype, NULL);
    }
    if (layout == NULL) {
        return NULL;
    }
    if (is_buffer && !is_given(kind) && self->pool == NULL) { /* its flags */
        const cm_buffer *buffer = (const cm_buffer *)prototype;
        bool pooled = buffer->storage->pool != NULL && !buffer->as_device;
        self->flags = pooled ? buffer->storage->flags : self->flags;
    }
    cm_region like;
    PyObject *buffer = NULL;
    if (request_take_layout(self, layout, &like) == 0) {
        buffer = request_allocate_like(self, &like);
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
    request self = {.state = cm_state_of_module(module)};
    PyObject *buffer = NULL;
    if (cm_args_parse("empty_like", args, nargs, kwnames, names, 3, 1, values) == 0
        && (!is_given(values[1]) || request_set_dtype(&self, values[1]) == 0)) {
        self.kind = kind_like(self.state, values[0]);
        PyObject *kind = is_given(values[2]) ? values[2] : NULL;
        PyObject *device = is_given(values[6])
                               ? Py_NewRef(values[4] == NULL ? Py_None : values[4])
                               : device_like(self.state, values[0], values[4]);
        if (device != NULL && request_set_order(&self, values[3], true) == 0
            && request_parse(&self, kind, device, values[5], values[6], false) == 0) {
            buffer = allocate_like(&self, values[0], kind);
        }
        Py_XDECREF(device);
    }
    request_fini(&self);
    return buffer;
}

/* -- table ------------------------------------------------------------------------------ */

#define CONSTRUCTOR(name)                                                              \
    {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS,          \
     name##_doc}

PyMethodDef cm_constructor_methods[] = {
    CONSTRUCTOR(empty), CONSTRUCTOR(zeros),      CONSTRUCTOR(full),
    CONSTRUCTOR(array), CONSTRUCTOR(empty_like), {NULL, NULL, 0, NULL},
};
