/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Pool: memory of one kind on one device, kept for reuse, as a Python object. */
#include <stddef.h>

#include "base/numa.h"
#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"
#include "python/pool/limits.h"
#include "python/pool/pool_object.h"

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

/* -- construction and end ---------------------------------------------------------- */

/* What Pool() is asked for, as given. */
typedef struct wishes {
    PyObject *kind;
    PyObject *device;
    PyObject *limit;
    PyObject *numa_node;
    PyObject *segments;
    PyObject *idle_trim;
    PyObject *portable;
    PyObject *write_combined;
    PyObject *attach;
} wishes;

static int
refuse_for_kind(const char *name, cm_kind kind, const char *of)
{
    PyErr_Format(PyExc_ValueError, "%s is for %s memory, not for %s memory", name, of,
                 cm_kind_name(kind));
    return -1;
}

/* One of two words; *second says which. */
static int
parse_word(PyObject *object, const char *name, const char *first_word,
           const char *second_word, bool *second)
{
    *second = false;
    if (object != NULL && PyUnicode_Check(object)) {
        *second = PyUnicode_CompareWithASCIIString(object, second_word) == 0;
        if (*second || PyUnicode_CompareWithASCIIString(object, first_word) == 0) {
            return 0;
        }
        PyErr_Format(PyExc_ValueError, "%s must be '%s' or '%s', not %R", name,
                     first_word, second_word, object);
        return -1;
    }
    return object == NULL ? 0 : cm_arg_refuse(object, name, "a str");
}

static int
parse_flags(const wishes *w, cm_pool_config *config)
{
    bool portable = true;
    bool write_combined = false;
    bool attach_host;
    bool is_host = cm_kind_is_host(config->kind);
    if ((w->portable != NULL && cm_arg_bool(w->portable, "portable", &portable) < 0)
        || (w->write_combined != NULL
            && cm_arg_bool(w->write_combined, "write_combined", &write_combined) < 0)
        || parse_word(w->attach, "attach", "global", "host", &attach_host) < 0) {
        return -1;
    }
    if (!is_host && (!portable || write_combined)) {
        return refuse_for_kind(write_combined ? "write_combined" : "portable",
                               config->kind, "pinned and mapped");
    }
    if (attach_host && config->kind != CM_KIND_MANAGED) {
        return refuse_for_kind("attach", config->kind, "managed");
    }
    config->flags = cm_buffer_default_flags(config->kind);
    if (!portable) {
        config->flags &= ~(unsigned)CM_HOST_ALLOC_PORTABLE;
    }
    config->flags |= write_combined ? (unsigned)CM_HOST_ALLOC_WRITE_COMBINED : 0u;
    config->flags = attach_host ? CM_MANAGED_HOST : config->flags;
    return 0;
}

static int
refuse_node(int64_t node, uint64_t nodes)
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < CM_NUMA_MAX_NODES; i++) {
        PyObject *number = (nodes >> i & 1) != 0 ? PyLong_FromLong(i) : NULL;
        if (number != NULL && PyList_Append(list, number) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(number);
    }
    if (list != NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "numa_node %lld does not exist, or has no memory: the nodes with "
                     "memory are %R",
                     (long long)node, list);
    }
    Py_XDECREF(list);
    return -1;
}

static int
parse_numa_node(PyObject *object, cm_pool_config *config)
{
    int64_t node = -1;
    if (object != NULL && object != Py_None) {
        if (!cm_kind_is_host(config->kind)) {
            return refuse_for_kind("numa_node", config->kind, "pinned and mapped");
        }
        if (PyBool_Check(object)) {
            return cm_arg_refuse(object, "numa_node", "an int or None");
        }
        if (cm_arg_int64(object, "numa_node", &node) < 0) {
            return -1;
        }
        uint64_t nodes = cm_numa_read_nodes(NULL);
        if (node < 0 || node >= CM_NUMA_MAX_NODES || (nodes >> node & 1) == 0) {
            return refuse_node(node, nodes);
        }
    }
    config->numa_node = (int)node;
    return 0;
}

/* None: 0. */
static int
parse_idle_trim(PyObject *object, uint64_t *ns)
{
    *ns = 0;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    double seconds = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return cm_arg_refuse(object, "idle_trim", "a number of seconds or None");
    }
    if (!(seconds > 0 && seconds <= 1e9)) {
        PyErr_Format(PyExc_ValueError,
                     "idle_trim must be a number of seconds above 0, not %R", object);
        return -1;
    }
    *ns = (uint64_t)(seconds * 1e9);
    *ns += *ns == 0;
    return 0;
}

/* None: UINT64_MAX. */
static int
parse_limit(cm_state *state, PyObject *object, const cm_pool_config *config,
            uint64_t *out)
{
    uint64_t whole = UINT64_MAX;
    *out = UINT64_MAX;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (cm_arg_size_is_share(object)) {
        cm_runtime *runtime = cm_state_runtime(state);
        if (runtime == NULL
            || cm_limits_whole(state, runtime, config->kind, config->device, &whole)
                   < 0) {
            return -1;
        }
    }
    return cm_arg_size(object, "limit", whole, out);
}

static int
parse(cm_state *state, const wishes *w, cm_pool_config *config, uint64_t *limit)
{
    bool plain;
    config->kind = CM_KIND_DEVICE;
    config->fence_limit_nbytes = CM_FENCE_LIMIT_NBYTES;
    if ((w->kind != NULL && cm_arg_kind(w->kind, "kind", &config->kind) < 0)
        || cm_arg_device(state, w->device, "device", &config->device) < 0
        || parse_flags(w, config) < 0 || parse_numa_node(w->numa_node, config) < 0
        || parse_word(w->segments, "segments", "auto", "malloc", &plain) < 0
        || parse_idle_trim(w->idle_trim, &config->idle_trim_ns) < 0
        || parse_limit(state, w->limit, config, limit) < 0) {
        return -1;
    }
    config->segments = plain ? CM_SEGMENTS_PLAIN : CM_SEGMENTS_AUTO;
    config->budget = cm_limits_budget(state, config->kind, config->device);
    return 0;
}

static PyObject *
pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"kind",     "device",    "limit",    "numa_node",
                               "segments", "idle_trim", "portable", "write_combined",
                               "attach",   NULL};
    cm_state *state = cm_state_of_module(PyType_GetModule(type));
    wishes w = {0};
    cm_pool_config config = {0};
    uint64_t limit;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$OOOOOOOO:Pool", keywords,
                                     &w.kind, &w.device, &w.limit, &w.numa_node,
                                     &w.segments, &w.idle_trim, &w.portable,
                                     &w.write_combined, &w.attach)
        || parse(state, &w, &config, &limit) < 0) {
        return NULL;
    }
    cm_runtime *runtime = cm_state_runtime(state);
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
    PyTypeObject *type = Py_TYPE(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    cm_pool_object_close(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
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
    if (parse_idle_trim(value, &ns) < 0) {
        return -1;
    }
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
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
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
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
    if (parse_limit(self->state, value, &self->config, &limit) < 0) {
        return -1;
    }
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
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
    PyObject *name = cm_pool_name(config, self->number);
    if (name == NULL) {
        return NULL;
    }
    PyObject *text = NULL;
    if (self->pool == NULL) {
        text = PyUnicode_FromFormat("<cumem.Pool %R of %s memory, device %d, closed>",
                                    name, cm_kind_name(config->kind), config->device);
    }
    else {
        cm_pool_counters counters;
        cm_pool_read(self->pool, &counters);
        const cm_runtime *rt = self->state->runtime;
        bool emulated = rt != NULL && rt->backend == CM_BACKEND_EMULATED;
        text = PyUnicode_FromFormat(
            "<cumem.Pool %R of %s memory, device %d%s: %llu bytes live, %llu reserved>",
            name, cm_kind_name(config->kind), config->device,
            emulated ? ", emulated" : "", (unsigned long long)counters.live_nbytes,
            (unsigned long long)counters.reserved_nbytes);
    }
    Py_DECREF(name);
    return text;
}

/* -- tables ------------------------------------------------------------------------ */

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

static PyMemberDef pool_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_pool_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, (void *)pool_doc},           {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},           {Py_tp_repr, pool_repr},
    {Py_tp_methods, cm_pool_object_methods}, {Py_tp_getset, pool_getset},
    {Py_tp_members, pool_members},           {0, NULL},
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
    PyObject *type = PyType_FromModuleAndSpec(module, &pool_spec, NULL);
    state->pool_type = (PyTypeObject *)(void *)type;
    return type == NULL ? -1 : PyModule_AddType(module, state->pool_type);
}
