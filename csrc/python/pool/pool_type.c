/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Pool: memory of one kind on one device, kept for reuse, as a Python object; and
 * the module's functions about pools. */
#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"
#include "python/core/types.h"
#include "python/device/wait.h"
#include "python/pool/allocate.h"
#include "python/pool/limits.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(pool_doc,
"Pool(kind='device', *, device=None, limit=None, numa_node=None, segments='auto', "
"idle_trim=None, portable=True, write_combined=False, attach='global')\n--\n\n"
"Memory of one kind on one device, cut into blocks of exactly the size asked for and kept\n"
"for reuse.\n\n"
"In a ``with`` block it is what constructors of its kind and device take memory from, in\n"
"this thread or task alone. Buffers keep the memory they have when the pool is closed or\n"
"dropped.\n\n"
"Parameters\n----------\n"
"kind : {'device', 'pinned', 'mapped', 'managed'}\n"
"device : Device, int or str, optional\n"
"    Whose memory, or whose context page-locks it; default: cumem's current one.\n"
"limit : int or str, optional\n"
"    Most that it may hold, cached memory included: bytes, a text such as ``\"4GiB\"``, or a\n"
"    share such as ``\"50%\"`` of what `set_limit` takes a share of. It counts against the\n"
"    limit of its kind as well.\n"
"numa_node : int, optional\n"
"    Where pages of pinned and mapped memory are to lie; default: near the\n"
"    device. The node must have memory.\n"
"segments : {'auto', 'malloc'}\n"
"    'malloc' takes every segment by one allocation of the CUDA runtime, as ``cudaIpc`` and\n"
"    older MPI libraries need it; 'auto' may map memory piece by piece, which wastes less.\n"
"idle_trim : float, optional\n"
"    Seconds after which cached memory that was not needed goes back, looked at when\n"
"    memory is allocated; default: never.\n"
"portable, write_combined : bool\n"
"    Of pinned and mapped memory, as in `empty_pinned`.\n"
"attach : {'global', 'host'}\n"
"    Of managed memory, as in `empty_managed`.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n"
"    If a value is none of those that exist, or belongs to another kind of memory.\n"
"CudaError\n    If the driver cannot be opened.\n\n"
"Notes\n-----\n"
"Takes no memory until the first allocation.");

PyDoc_STRVAR(allocate_doc,
"allocate($self, /, nbytes, stream=None)\n--\n\n"
"Allocate a one-dimensional buffer of bytes.\n\n"
"Parameters\n----------\n"
"nbytes : int\n    Its length in bytes; 0 is fine.\n"
"stream : Stream or other stream object, optional\n"
"    The stream to use it on first; default: the current one for device memory, none for\n"
"    the other kinds.\n\n"
"Returns\n-------\n"
"Buffer\n    Of dtype uint8 and of the pool's kind. Its bytes are not set.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n"
"    If `nbytes` is negative or does not fit in 63 bits, `stream` is of another device, or\n"
"    the pool is closed.\n"
"OutOfMemoryError\n"
"    If there is no room, also after waiting for freed memory and trimming pools.\n"
"CudaError\n    If a call to CUDA failed.\n\n"
"Notes\n-----\n"
"**Blocks** only when the pool has nothing that fits, GIL released.\n"
"**Ordered after**: device memory may be used at once on `stream`; on another stream the\n"
"user orders it.");

PyDoc_STRVAR(stats_doc,
"stats($self, /)\n--\n\n"
"Read all counters at one moment.\n\n"
"Returns\n-------\nPoolStats\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");

PyDoc_STRVAR(snapshot_doc,
"snapshot($self, /)\n--\n\n"
"List all segments and blocks at one moment.\n\n"
"Returns\n-------\nSnapshot\n    ``print()`` draws it as a map.\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");

PyDoc_STRVAR(trim_doc,
"trim($self, /, keep=0, wait=True)\n--\n\n"
"Give cached memory back to the driver.\n\n"
"Parameters\n----------\n"
"keep : int or str\n"
"    So many bytes stay cached, as ``1 << 20`` or ``\"1MiB\"``: memory goes back in\n"
"    whole pieces while so much is left.\n"
"wait : bool\n"
"    Wait first for work on memory that was freed, so that it goes back as well.\n\n"
"Returns\n-------\nint\n    Bytes given back.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n    If `keep` cannot be read or the pool is closed.\n"
"CudaError\n    If the driver refuses; the rest is still given back.\n\n"
"Notes\n-----\n**Blocks** while it waits and while the driver frees, GIL released.");

PyDoc_STRVAR(reset_peaks_doc,
"reset_peaks($self, /)\n--\n\n"
"Let the peaks start again from what is held now.\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");

PyDoc_STRVAR(close_doc,
"close($self, /)\n--\n\n"
"Allocate no more, and give back what is not in use; doing it twice is no error.\n\n"
"Buffers stay valid: their memory goes back when the last of them dies.\n\n"
"Raises\n------\nValueError\n    If it is a default pool; nothing is done then.\n\n"
"Notes\n-----\n"
"**Blocks** until work on memory that was freed is done, if no buffer is left; GIL\n"
"released. Ctrl-C ends the wait and leaves the pool open: close it again. Not so where the\n"
"pool is dropped instead, or where the last of its buffers dies after close(): that waits\n"
"to the end.");

PyDoc_STRVAR(enter_doc,
"__enter__($self, /)\n--\n\n"
"Make it current for its kind and device in this thread or task.\n\n"
"Blocks may end in any order, as those of generators do: the innermost of those still open\n"
"is current. Tasks started inside and contexts copied inside keep it after the block.\n\n"
"Raises\n------\nValueError\n    If the pool is closed.");
PyDoc_STRVAR(exit_doc,
"__exit__($self, exc_type, exc, tb, /)\n--\n\n"
"End the block that was entered here: the others stay as they are, and the pool stays\n"
"open.\n\n"
"Raises\n------\nRuntimeError\n"
"    If the block was entered in another thread or context, as that of a generator may be\n"
"    that another thread closes: it is over there and here; or if it was not entered.");

/* -- construction and end ---------------------------------------------------------- */

/* What the package makes of an argument, a number or None for UINT64_MAX; takes over
 * the arguments. 0, or -1 with an exception. */
static int
read_number(const char *function, PyObject *arguments, uint64_t *out)
{
    PyObject *number = cm_package_call("pool_options", function, arguments);
    if (number == NULL) {
        return -1;
    }
    *out = number == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* What cumem.pool_options.read() answers: see there. */
static int
read_options(cm_state *state, PyObject *options, cm_pool_config *config,
             uint64_t *limit)
{
    PyObject *kind;
    PyObject *limit_object;
    int plain;
    unsigned long long idle_trim_ns;
    if (!PyArg_ParseTuple(options, "OiIipKO", &kind, &config->device, &config->flags,
                          &config->numa_node, &plain, &idle_trim_ns, &limit_object)
        || cm_arg_kind(kind, "kind", &config->kind) < 0) {
        return -1;
    }
    config->fence_limit_nbytes = CM_FENCE_LIMIT_NBYTES;
    config->segments = plain ? CM_SEGMENTS_PLAIN : CM_SEGMENTS_AUTO;
    config->idle_trim_ns = idle_trim_ns;
    config->budget = cm_limits_budget(state, config->kind, config->device);
    *limit =
        limit_object == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(limit_object);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    cm_state *state = cm_state_of_module(PyType_GetModule(type));
    cm_pool_config config = {0};
    uint64_t limit;
    PyObject *given = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    PyObject *options =
        cm_package_call("pool_options", "read",
                        given == NULL ? NULL : Py_BuildValue("(ON)", args, given));
    int result = options == NULL ? -1 : read_options(state, options, &config, &limit);
    Py_XDECREF(options);
    cm_runtime *runtime = result < 0 ? NULL : cm_state_runtime(state);
    if (runtime == NULL) {
        return NULL;
    }
    cm_pool *pool = NULL;
    cm_status status = cm_pool_create(runtime, &config, &pool);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while making a pool");
    }
    atomic_store(&cm_pool_get_config(pool)->budget->limit_nbytes, limit);
    PyObject *self = cm_pool_object_new(state, pool, ++state->pool_count);
    cm_pool_release(pool); /* the object holds it; without one it was never used */
    return self;
}

static void
pool_dealloc(PyObject *op)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    cm_pool_object_close(self);
    cm_object_free(op);
}

/* -- methods ----------------------------------------------------------------------- */

static int
check_open(const cm_pool_object *self)
{
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
        return -1;
    }
    return 0;
}

static PyObject *
allocate_on(cm_pool_object *self, int64_t nbytes, cm_stream *stream)
{
    cm_state *state = self->state;
    const cm_pool_config *config = &self->config;
    return cm_buffer_allocate(state, self, config->kind, config->flags, config->device,
                              state->uint8_dtype, 1, &nbytes, 'C', stream);
}

static PyObject *
pool_allocate(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"nbytes", "stream", NULL};
    PyObject *values[2];
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (CM_UNLIKELY(kwnames != NULL || nargs < 1 || nargs > 2)) {
        if (cm_args_parse("allocate", args, nargs, kwnames, names, 2, 1, values) < 0) {
            return NULL;
        }
        args = values;
        nargs = values[1] == NULL ? 1 : 2;
    }
    int64_t nbytes;
    if (CM_UNLIKELY(!cm_arg_try_length(args[0], &nbytes))
        && cm_arg_int64(args[0], "nbytes", &nbytes) < 0) {
        return NULL;
    }
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must not be negative, got %lld",
                     (long long)nbytes);
        return NULL;
    }
    PyObject *stream_object = nargs == 2 ? args[1] : Py_None;
    PyObject *warm = cm_fast_bytes(self->state, self, nbytes,
                                   stream_object == Py_None ? NULL : stream_object);
    if (CM_LIKELY(warm != NULL)) {
        return warm;
    }
    if (stream_object == Py_None && self->config.kind != CM_KIND_DEVICE) {
        return allocate_on(self, nbytes, NULL);
    }
    cm_stream *stream =
        cm_stream_for_device(self->state, stream_object, self->config.device);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *buffer = allocate_on(self, nbytes, stream);
    cm_stream_give(self->state, stream);
    return buffer;
}

static PyObject *
pool_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = cm_pool_object_take(op);
    PyObject *result =
        pool == NULL ? NULL
                     : cm_package_call("pool_stats", "pool_stats",
                                       cm_pool_describe(pool, self->number, false));
    cm_pool_object_give(op, pool);
    return result;
}

static PyObject *
pool_snapshot(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = cm_pool_object_take(op);
    PyObject *result =
        pool == NULL ? NULL : cm_pool_read_snapshot(self->state, pool, self->number);
    cm_pool_object_give(op, pool);
    return result;
}

static PyObject *
pool_trim(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"keep", "wait", NULL};
    PyObject *values[2];
    uint64_t keep = 0;
    bool wait = true;
    if (cm_args_parse("trim", args, nargs, kwnames, names, 2, 0, values) < 0
        || (values[0] != NULL && cm_arg_size_whole(values[0], "keep", &keep) < 0)
        || (values[1] != NULL && cm_arg_bool(values[1], "wait", &wait) < 0)) {
        return NULL;
    }
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    uint64_t released = 0;
    cm_status status;
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status waited = wait ? cm_pool_await(pool, &hooks) : cm_ok();
    status = cm_is_ok(waited) ? cm_pool_trim(pool, keep, wait, &released) : waited;
    PyEval_RestoreThread(waiter.thread);
    cm_pool_object_give(op, pool);
    if (!cm_is_ok(waited)) {
        return NULL; /* with the exception of a signal's handler */
    }
    return cm_py_answer(self->state, status, "while trimming a pool",
                        PyLong_FromUnsignedLongLong(released));
}

static PyObject *
pool_reset_peaks(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    cm_pool_reset_peaks(pool);
    cm_pool_object_give(op, pool);
    Py_RETURN_NONE;
}

/* Cached memory goes at once, what live blocks hold with the last of them. */
static PyObject *
pool_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self->pool == NULL) {
        Py_RETURN_NONE;
    }
    if (self->number == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "a default pool cannot be closed: trim() it, or shutdown()");
        return NULL;
    }
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status waited = cm_pool_await(pool, &hooks); /* while it is open */
    PyEval_RestoreThread(waiter.thread);
    if (!cm_is_ok(waited)) {
        cm_pool_object_give(op, pool);
        return NULL; /* with the exception of a signal's handler */
    }
    cm_pool_object_close(self);
    uint64_t released = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_pool_trim(pool, 0, true, &released);
    Py_END_ALLOW_THREADS
    cm_pool_object_give(op, pool);
    return cm_py_answer(self->state, status, "while closing a pool",
                        Py_NewRef(Py_None));
}

static PyObject *
pool_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (check_open(self) < 0) {
        return NULL;
    }
    return cm_override_enter(&self->state->current_pool, op) < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
pool_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_state *state = ((cm_pool_object *)(void *)op)->state;
    int result = cm_override_exit(&state->current_pool, op, "pool");
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- getters ----------------------------------------------------------------------- */

static const cm_pool_config *
config_of(PyObject *op)
{
    return &((cm_pool_object *)(void *)op)->config;
}

static PyObject *
pool_get_kind(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(cm_kind_name(config_of(op)->kind));
}

static PyObject *
pool_get_device(PyObject *op, void *Py_UNUSED(closure))
{
    return cm_device_object_new(((cm_pool_object *)(void *)op)->state,
                                config_of(op)->device);
}

static PyObject *
pool_get_numa_node(PyObject *op, void *Py_UNUSED(closure))
{
    int node = config_of(op)->numa_node;
    return node < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(node);
}

static PyObject *
pool_get_segments(PyObject *op, void *Py_UNUSED(closure))
{
    bool plain = config_of(op)->segments == CM_SEGMENTS_PLAIN;
    return PyUnicode_FromString(plain ? "malloc" : "auto");
}

static PyObject *
pool_get_idle_trim(PyObject *op, void *Py_UNUSED(closure))
{
    uint64_t ns = config_of(op)->idle_trim_ns;
    return ns == 0 ? Py_NewRef(Py_None) : PyFloat_FromDouble((double)ns * 1e-9);
}

static int
pool_set_idle_trim(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    uint64_t ns;
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "idle_trim cannot be deleted: set it to None");
        return -1;
    }
    if (read_number("idle_trim_ns", PyTuple_Pack(1, value), &ns) < 0
        || check_open(self) < 0) {
        return -1;
    }
    cm_pool_set_idle_trim(self->pool, ns);
    self->config.idle_trim_ns = ns;
    return 0;
}

static PyObject *
pool_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((cm_pool_object *)(void *)op)->pool == NULL);
}

static PyObject *
pool_get_limit(PyObject *op, void *Py_UNUSED(closure))
{
    const cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (check_open(self) < 0) {
        return NULL;
    }
    const cm_budget *budget = cm_pool_get_config(self->pool)->budget;
    return cm_limit_to_object(atomic_load(&budget->limit_nbytes));
}

static int
pool_set_limit(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    uint64_t limit;
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "limit cannot be deleted: set it to None");
        return -1;
    }
    if (check_open(self) < 0) {
        return -1;
    }
    PyObject *arguments = Py_BuildValue("(siO)", cm_kind_name(self->config.kind),
                                        self->config.device, value);
    if (read_number("limit_nbytes", arguments, &limit) < 0 || check_open(self) < 0) {
        return -1;
    }
    atomic_store(&cm_pool_get_config(self->pool)->budget->limit_nbytes, limit);
    return 0;
}

static PyObject *
pool_repr(PyObject *op)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    const cm_pool_config *config = &self->config;
    const cm_runtime *rt = self->state->runtime;
    PyObject *row =
        self->pool != NULL
            ? cm_pool_describe(self->pool, self->number, false)
            : Py_BuildValue("(KIsizz)", (unsigned long long)self->number, config->flags,
                            cm_kind_name(config->kind), config->device, NULL, NULL);
    bool emulated = rt != NULL && rt->backend == CM_BACKEND_EMULATED;
    return cm_package_call("pool_stats", "pool_repr",
                           row == NULL ? NULL : Py_BuildValue("(iN)", emulated, row));
}

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef pool_methods[] = {
    {"allocate", CM_METHOD(pool_allocate), CM_KEYWORDS, allocate_doc},
    {"stats", pool_stats, METH_NOARGS, stats_doc},
    {"snapshot", pool_snapshot, METH_NOARGS, snapshot_doc},
    {"trim", CM_METHOD(pool_trim), CM_KEYWORDS, trim_doc},
    {"reset_peaks", pool_reset_peaks, METH_NOARGS, reset_peaks_doc},
    {"close", pool_close, METH_NOARGS, close_doc},
    {"__enter__", pool_enter, METH_NOARGS, enter_doc},
    {"__exit__", pool_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_getset[] = {
    {"kind", pool_get_kind, NULL, "\"device\", \"pinned\", \"mapped\" or \"managed\".",
     NULL},
    {"device", pool_get_device, NULL,
     "Device whose memory it is, or whose context page-locks it.", NULL},
    {"limit", pool_get_limit, pool_set_limit,
     "Most bytes that it may hold, or None; may be set, also to \"4GiB\" or \"50%\". "
     "What\n"
     "it holds already stays. Raises ValueError after close().",
     NULL},
    {"numa_node", pool_get_numa_node, NULL,
     "Where the pages were asked to lie, or None: near the device.", NULL},
    {"segments", pool_get_segments, NULL, "\"auto\" or \"malloc\".", NULL},
    {"idle_trim", pool_get_idle_trim, pool_set_idle_trim,
     "Seconds after which cached memory that was not needed goes back, or None; may be "
     "set,\nalso of a default pool. Raises ValueError if set after close().",
     NULL},
    {"closed", pool_get_closed, NULL,
     "True after close() or shutdown(): nothing is allocated any more.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef pool_members[] = CM_WEAKREFS(cm_pool_object);

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, (void *)pool_doc}, {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc}, {Py_tp_repr, pool_repr},
    {Py_tp_methods, pool_methods}, {Py_tp_getset, pool_getset},
    {Py_tp_members, pool_members}, {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "cumem.Pool",
    .basicsize = sizeof(cm_pool_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pool_slots,
};

int
cm_register_pool_type(PyObject *module, cm_state *state)
{
    cm_list_init(&state->pool_objects);
    state->out_of_memory_callbacks = PyList_New(0);
    PyObject *name = PyUnicode_FromString("u1");
    state->uint8_dtype = name == NULL ? NULL : cm_numpy_dtype(name);
    Py_XDECREF(name);
    if (state->out_of_memory_callbacks == NULL || state->uint8_dtype == NULL
        || PyModule_AddObjectRef(module, "_out_of_memory_callbacks",
                                 state->out_of_memory_callbacks)
               < 0) {
        return -1;
    }
    return cm_type_add(module, &pool_spec, NULL, &state->pool_type);
}

/* -- functions of the module -------------------------------------------------------------------- */

PyDoc_STRVAR(default_pool_doc,
"default_pool($module, /, kind, device=None)\n--\n\n"
"The pool that constructors take memory from when no other is asked for.\n\n"
"Parameters\n----------\n"
"kind : {'pinned', 'mapped', 'managed', 'device'}\n"
"device : Device, int or str, optional\n"
"    Whose memory, or whose context page-locks it; default: cumem's current one.\n\n"
"Returns\n-------\nPool\n    Always the same until `shutdown`. It cannot be closed.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n    If the kind or the device does not exist.\n"
"CudaError\n    If the driver cannot be opened.\n\n"
"Notes\n-----\n"
"Memory made with ``write_combined=True``, ``portable=False`` or ``attach=\"host\"`` has\n"
"default pools of its own, which `stats` lists.");

PyDoc_STRVAR(all_trim_doc,
"trim($module, /, kind=None, *, device=None, keep=0, wait=True)\n--\n\n"
"Give memory that the pools keep for reuse back to the driver.\n\n"
"Call it when another library runs out of memory, PyTorch for instance.\n\n"
"Parameters\n----------\n"
"kind : {'pinned', 'mapped', 'managed', 'device'}, optional\n"
"    Which pools; default: all.\n"
"device : Device, int or str, optional\n    Only pools of this device; default: all.\n"
"keep : int or str\n"
"    So many bytes stay cached in all of them together, as ``1 << 20`` or\n"
"    ``\"1MiB\"``: memory goes back in whole pieces while so much is left.\n"
"wait : bool\n"
"    Wait first for work on memory that was freed, so that it goes back as well.\n\n"
"Returns\n-------\nint\n    Bytes given back.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n    If the kind or the device does not exist or `keep` cannot be read.\n"
"CudaError\n    If the driver refuses; the rest is still given back.\n\n"
"Notes\n-----\n"
"**Blocks** while it waits and while the driver frees, GIL released. Buffers that are in\n"
"use and memory that belongs to a captured graph stay.");

static PyObject *
default_pool(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    static const char *const names[] = {"kind", "device", NULL};
    PyObject *values[2];
    cm_state *state = cm_state_of_module(module);
    cm_kind kind;
    int device;
    if (cm_args_parse("default_pool", args, nargs, kwnames, names, 2, 1, values) < 0
        || cm_arg_kind(values[0], "kind", &kind) < 0
        || cm_arg_device(state, values[1], "device", &device) < 0) {
        return NULL;
    }
    return cm_pool_object_default(state, kind, device);
}

static bool
is_asked_for(const cm_pools_trim_request *r, const cm_pool *pool)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    return (r->kind == CM_KIND_PAGEABLE || r->kind == config->kind)
           && (r->device < 0 || r->device == config->device);
}

static PyObject *
trim_all(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"kind", "device", "keep", "wait", NULL};
    PyObject *values[4];
    cm_state *state = cm_state_of_module(module);
    cm_pools_trim_request r = {
        .wants = is_asked_for, .kind = CM_KIND_PAGEABLE, .device = -1, .wait = true};
    if (cm_args_parse("trim", args, nargs, kwnames, names, 1, 0, values) < 0
        || (values[0] != NULL && values[0] != Py_None
            && cm_arg_kind(values[0], "kind", &r.kind) < 0)
        || (values[1] != NULL && values[1] != Py_None
            && cm_arg_device(state, values[1], "device", &r.device) < 0)
        || (values[2] != NULL
            && cm_arg_size_whole(values[2], "keep", &r.keep_nbytes) < 0)
        || (values[3] != NULL && cm_arg_bool(values[3], "wait", &r.wait) < 0)) {
        return NULL;
    }
    if (state->runtime == NULL) {
        return PyLong_FromLong(0); /* not worth opening a driver for */
    }
    if (cm_state_runtime(state) == NULL /* also lets go of what is done */
        || cm_pools_trim(state, &r) < 0) {
        return NULL;
    }
    return cm_py_answer(state, r.refused, "while trimming the pools",
                        PyLong_FromUnsignedLongLong(r.released_nbytes));
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_pool_methods[] = {
    {"default_pool", CM_METHOD(default_pool), CM_KEYWORDS, default_pool_doc},
    {"trim", CM_METHOD(trim_all), CM_KEYWORDS, all_trim_doc},
    {NULL, NULL, 0, NULL},
};
