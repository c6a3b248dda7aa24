/* SPDX-License-Identifier: Apache-2.0 */
/* The constructors of one kind each, with the flags that only this kind has. */
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/allocate.h"

#define SHAPE_PARAMETERS                                                               \
    "shape : int or sequence of int\n"                                                 \
    "    Lengths in elements; 0 and ``()`` are fine.\n"                                \
    "dtype : dtype_like\n"                                                             \
    "    Any NumPy dtype without Python objects.\n"                                    \
    "order : {'C', 'F'}\n"                                                             \
    "    Whether the last or the first index runs fastest.\n"
#define POOL_PARAMETER                                                                 \
    "pool : Pool, optional\n"                                                          \
    "    Where to take it from; default: the pool of the innermost ``with pool:`` "    \
    "block\n"                                                                          \
    "    that fits, else the kind's default pool. Without `device` it says that as "   \
    "well.\n"
#define HOST_PARAMETERS                                                                \
    "portable : bool\n"                                                                \
    "    Page-locked for every device, not only for `device`.\n"                       \
    "write_combined : bool\n"                                                          \
    "    Uncached: fast for devices to read and for the host to write in order, "      \
    "very\n"                                                                           \
    "    slow for the host to read.\n"                                                 \
    "device : Device, int or str, optional\n"                                          \
    "    Whose context page-locks it; default: cumem's current one.\n" POOL_PARAMETER
#define RAISES                                                                         \
    "\n"                                                                               \
    "Raises\n"                                                                         \
    "------\n"                                                                         \
    "ValueError\n"                                                                     \
    "    A length is negative, the size does not fit in 63 bits, or an argument is "   \
    "none\n"                                                                           \
    "    of its choices.\n"                                                            \
    "TypeError\n"                                                                      \
    "    An argument has the wrong type, or the dtype holds Python objects.\n"         \
    "OutOfMemoryError\n"                                                               \
    "    There is no room, also after waiting for freed memory and trimming pools.\n"  \
    "CudaError\n"                                                                      \
    "    A call to CUDA failed.\n"                                                     \
    "RuntimeError\n"                                                                   \
    "    In a child made by ``fork``.\n"                                               \
    "\n"                                                                               \
    "Notes\n"                                                                          \
    "-----\n"                                                                          \
    "Blocks: only when the pool has nothing that fits (GIL released).\n"

/* What every kind is asked for. */
typedef struct plain {
    PyObject *dtype; /* owned */
    char order;
    int ndim;
    int64_t shape[CM_MAX_NDIM];
} plain;

static int
plain_parse(plain *self, PyObject *shape, PyObject *dtype, PyObject *order)
{
    if (cm_arg_shape(shape, "shape", &self->ndim, self->shape) < 0
        || cm_arg_order(order == NULL ? Py_None : order, "order", &self->order) < 0) {
        return -1;
    }
    self->dtype = cm_numpy_dtype(dtype == NULL ? Py_None : dtype);
    return self->dtype == NULL ? -1 : 0;
}

static PyObject *
plain_allocate(const plain *self, cm_state *state, cm_pool_object *pool, cm_kind kind,
               unsigned flags, int device, cm_stream *stream)
{
    return cm_buffer_allocate(state, pool, kind, flags, device, self->dtype, self->ndim,
                              self->shape, self->order, stream);
}

/* Allocate with flags and device known, for no stream. The rest as given. */
static PyObject *
allocate(cm_state *state, cm_pool_object *pool, cm_kind kind, unsigned flags,
         PyObject *const *values, int device)
{
    plain request;
    if (plain_parse(&request, values[0], values[1], values[2]) < 0) {
        return NULL;
    }
    PyObject *buffer = plain_allocate(&request, state, pool, kind, flags, device, NULL);
    Py_DECREF(request.dtype);
    return buffer;
}

/* The device, which is that of the pool where one is given alone. */
static int
parse_place(cm_state *state, PyObject *device, PyObject *pool_object, int *out,
            cm_pool_object **pool)
{
    bool given = device != NULL && device != Py_None;
    if (cm_arg_pool(state, pool_object, pool) < 0
        || cm_arg_device(state, given ? device : Py_None, "device", out) < 0) {
        return -1;
    }
    if (*pool != NULL && !given) {
        *out = (*pool)->config.device;
    }
    return 0;
}

/* -- pinned and mapped ------------------------------------------------------------------ */

static PyObject *
empty_host(const char *function, PyObject *module, PyObject *const *args,
           Py_ssize_t nargs, PyObject *kwnames, cm_kind kind, unsigned flags)
{
    static const char *const names[] = {"shape",          "dtype",  "order", "portable",
                                        "write_combined", "device", "pool",  NULL};
    PyObject *values[7];
    cm_pool_object *pool;
    cm_state *state = cm_state_of_module(module);
    bool portable = true;
    bool write_combined = false;
    int device;
    if (cm_args_parse(function, args, nargs, kwnames, names, 2, 1, values) < 0
        || (values[3] != NULL && cm_arg_bool(values[3], "portable", &portable) < 0)
        || (values[4] != NULL
            && cm_arg_bool(values[4], "write_combined", &write_combined) < 0)
        || parse_place(state, values[5], values[6], &device, &pool) < 0) {
        return NULL;
    }
    flags |= portable ? CM_HOST_ALLOC_PORTABLE : 0u;
    flags |= write_combined ? CM_HOST_ALLOC_WRITE_COMBINED : 0u;
    return allocate(state, pool, kind, flags, values, device);
}

PyDoc_STRVAR(empty_pinned_doc,
             "empty_pinned($module, /, shape, dtype='float64', *, order='C', "
             "portable=True, write_combined=False, device=None, pool=None)\n"
             "--\n"
             "\n"
             "Allocate page-locked host memory from its pool.\n"
             "\n"
             "Parameters\n"
             "----------\n" SHAPE_PARAMETERS HOST_PARAMETERS "\n"
             "Returns\n"
             "-------\n"
             "PinnedBuffer\n"
             "    Its bytes are not set.\n" RAISES
             "Ordered after: nothing; memory is handed out when no device uses it.\n");

static PyObject *
empty_pinned(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    PyObject *warm = cm_fast_pinned(cm_state_of_module(module), args, nargs, kwnames);
    return CM_LIKELY(warm != NULL) ? warm
                                   : empty_host("empty_pinned", module, args, nargs,
                                                kwnames, CM_KIND_PINNED, 0);
}

PyDoc_STRVAR(empty_mapped_doc,
             "empty_mapped($module, /, shape, dtype='float64', *, order='C', "
             "portable=True, write_combined=False, device=None, pool=None)\n"
             "--\n"
             "\n"
             "Allocate page-locked host memory that devices read and write in place.\n"
             "\n"
             "Parameters\n"
             "----------\n" SHAPE_PARAMETERS HOST_PARAMETERS "\n"
             "Returns\n"
             "-------\n"
             "MappedBuffer\n"
             "    Its bytes are not set; `device_ptr` is its address for devices.\n" RAISES
             "Ordered after: nothing; memory is handed out when no device uses it.\n");

static PyObject *
empty_mapped(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    PyObject *warm = cm_fast_mapped(cm_state_of_module(module), args, nargs, kwnames);
    return CM_LIKELY(warm != NULL)
               ? warm
               : empty_host("empty_mapped", module, args, nargs, kwnames,
                            CM_KIND_MAPPED, CM_HOST_ALLOC_MAPPED);
}

/* -- managed ---------------------------------------------------------------------------- */

PyDoc_STRVAR(empty_managed_doc,
             "empty_managed($module, /, shape, dtype='float64', *, order='C', "
             "attach='global', device=None, pool=None)\n"
             "--\n"
             "\n"
             "Allocate unified memory, whose pages move to whoever uses them.\n"
             "\n"
             "Parameters\n"
             "----------\n" SHAPE_PARAMETERS "attach : {'global', 'host'}\n"
             "    Who may use it at first: any stream of any device, or no device.\n"
             "device : Device, int or str, optional\n"
             "    Whose context allocates it; default: cumem's current one.\n" POOL_PARAMETER
             "\n"
             "Returns\n"
             "-------\n"
             "ManagedBuffer\n"
             "    Its bytes are not set.\n" RAISES
             "Ordered after: nothing; memory is handed out when no device uses it.\n");

static int
parse_attach(PyObject *object, unsigned *out)
{
    *out = CM_MANAGED_GLOBAL;
    if (object == NULL) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        return cm_arg_refuse(object, "attach", "\"global\" or \"host\"");
    }
    if (PyUnicode_CompareWithASCIIString(object, "host") == 0) {
        *out = CM_MANAGED_HOST;
        return 0;
    }
    if (PyUnicode_CompareWithASCIIString(object, "global") == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "attach must be \"global\" or \"host\", not %R",
                 object);
    return -1;
}

static PyObject *
empty_managed(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    PyObject *warm = cm_fast_managed(cm_state_of_module(module), args, nargs, kwnames);
    if (CM_LIKELY(warm != NULL)) {
        return warm;
    }
    static const char *const names[] = {"shape",  "dtype", "order", "attach",
                                        "device", "pool",  NULL};
    PyObject *values[6];
    cm_pool_object *pool;
    cm_state *state = cm_state_of_module(module);
    unsigned flags;
    int device;
    if (cm_args_parse("empty_managed", args, nargs, kwnames, names, 2, 1, values) < 0
        || parse_attach(values[3], &flags) < 0
        || parse_place(state, values[4], values[5], &device, &pool) < 0) {
        return NULL;
    }
    return allocate(state, pool, CM_KIND_MANAGED, flags, values, device);
}

/* -- device ----------------------------------------------------------------------------- */

PyDoc_STRVAR(empty_device_doc,
             "empty_device($module, /, shape, dtype='float64', *, order='C', device=None, "
             "stream=None, pool=None)\n"
             "--\n"
             "\n"
             "Allocate memory of a device from its pool.\n"
             "\n"
             "Parameters\n"
             "----------\n" SHAPE_PARAMETERS "device : Device, int or str, optional\n"
             "    Which; default: cumem's current one.\n"
             "stream : Stream or other stream object, optional\n"
             "    The stream of that device to use it on first; default: the current one.\n"
             POOL_PARAMETER
             "\n"
             "Returns\n"
             "-------\n"
             "DeviceBuffer\n"
             "    Its bytes are not set.\n" RAISES
             "Ordered after: it may be used at once on `stream`; on another stream the user\n"
             "orders it.\n");

static PyObject *
empty_device(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    PyObject *warm = cm_fast_device(cm_state_of_module(module), args, nargs, kwnames);
    if (CM_LIKELY(warm != NULL)) {
        return warm;
    }
    static const char *const names[] = {"shape",  "dtype", "order", "device",
                                        "stream", "pool",  NULL};
    PyObject *values[6];
    cm_pool_object *pool;
    cm_state *state = cm_state_of_module(module);
    int device;
    if (cm_args_parse("empty_device", args, nargs, kwnames, names, 2, 1, values) < 0
        || parse_place(state, values[3], values[5], &device, &pool) < 0) {
        return NULL;
    }
    plain request;
    if (plain_parse(&request, values[0], values[1], values[2]) < 0) {
        return NULL;
    }
    bool given = values[4] != NULL && values[4] != Py_None;
    bool may_lend = !given && cm_override_is_empty(&state->current_pool); /* no Python
                                                                             code runs
                                                                           */
    cm_stream *lent = may_lend ? cm_stream_lent(state, device) : NULL;
    cm_stream *stream =
        lent != NULL ? lent
                     : cm_stream_for_device(state, given ? values[4] : Py_None, device);
    PyObject *buffer = NULL;
    if (stream != NULL) {
        buffer =
            plain_allocate(&request, state, pool, CM_KIND_DEVICE, 0, device, stream);
    }
    if (stream != lent) {
        cm_stream_give(state, stream);
    }
    Py_DECREF(request.dtype);
    return buffer;
}

/* -- table ------------------------------------------------------------------------------ */

#define CONSTRUCTOR(name)                                                              \
    {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS,          \
     name##_doc}

PyMethodDef cm_kind_constructor_methods[] = {
    CONSTRUCTOR(empty_pinned), CONSTRUCTOR(empty_mapped), CONSTRUCTOR(empty_managed),
    CONSTRUCTOR(empty_device), {NULL, NULL, 0, NULL},
};
