/* SPDX-License-Identifier: Apache-2.0 */
/* The limits of the kinds: at first, from the environment, and set by the user. */
#include "python/pool/limits.h"

#include <stdlib.h>

#include "base/host_memory.h"
#include "base/numa.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"

/* -- budgets ----------------------------------------------------------------------- */

void
cm_limits_init(cm_state *state)
{
    cm_limits *limits = &state->limits;
    cm_budget_init(&limits->host, UINT64_MAX, NULL);
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        cm_budget *parent = cm_kind_is_host((cm_kind)kind) ? &limits->host : NULL;
        for (int device = 0; device < CM_MAX_DEVICES; device++) {
            cm_budget_init(&limits->kinds[kind][device], UINT64_MAX, parent);
            limits->set_nbytes[kind][device] = UINT64_MAX;
        }
    }
}

static uint64_t
limit_of(const cm_budget *budget)
{
    return atomic_load(&budget->limit_nbytes);
}

/* Put in force what the open block says, or else what was set. */
static void
apply_limit_of(cm_state *state, cm_kind kind, int device)
{
    const cm_limits *limits = &state->limits;
    uint64_t nbytes = limits->has_block[kind][device]
                          ? limits->block_nbytes[kind][device]
                          : limits->set_nbytes[kind][device];
    atomic_store(&cm_limits_budget(state, kind, device)->limit_nbytes, nbytes);
    uint64_t pinned = limit_of(&state->limits.kinds[CM_KIND_PINNED][0]);
    uint64_t mapped = limit_of(&state->limits.kinds[CM_KIND_MAPPED][0]);
    uint64_t most = state->limits.half_nbytes;
    most = pinned > most ? pinned : most;
    most = mapped > most ? mapped : most;
    atomic_store(&state->limits.host.limit_nbytes, most);
}

static void
set_limit_of(cm_state *state, cm_kind kind, int device, uint64_t nbytes)
{
    state->limits.set_nbytes[kind][device] = nbytes;
    apply_limit_of(state, kind, device);
}

/* What a share of the kind is one of; UINT64_MAX: not known. 0, or -1 with CudaError.
 */
static int
read_whole(cm_state *state, cm_runtime *runtime, cm_kind kind, int device,
           uint64_t *out)
{
    if (cm_kind_is_host(kind)) {
        cm_host_memory memory;
        cm_host_memory_read(NULL, &memory);
        *out = memory.limit_nbytes;
        return 0;
    }
    if (runtime == NULL) { /* looking at an argument ran a shutdown */
        return cm_py_raise_int(state, cm_fail(CM_ECLOSED, 0), NULL);
    }
    cm_device_info info;
    cm_status status;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = cm_rt_device_describe(runtime, device, &info);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while reading the device's memory size");
    }
    *out = info.total_nbytes;
    return 0;
}

/* -- the environment --------------------------------------------------------------- */

static int
read_variable(cm_state *state, cm_runtime *runtime, cm_kind kind, const char *name)
{
    const char *text = getenv(name);
    if (text == NULL || text[0] == '\0') {
        return 0;
    }
    int device_count = cm_kind_is_host(kind) ? 1 : runtime->device_count;
    for (int device = 0; device < device_count; device++) {
        uint64_t whole = UINT64_MAX;
        uint64_t nbytes;
        if (cm_size_is_share(text)
            && read_whole(state, runtime, kind, device, &whole) < 0) {
            return -1;
        }
        if (!cm_size_parse(text, whole, &nbytes)) {
            PyErr_Format(PyExc_ValueError, "%s must be %s, not '%.100s'", name,
                         CM_SIZE_EXPECTED, text);
            return -1;
        }
        set_limit_of(state, kind, device, nbytes);
    }
    return 0;
}

int
cm_limits_open(cm_state *state, cm_runtime *runtime)
{
    static const struct {
        cm_kind kind;
        const char *name;
    } variables[] = {
        {CM_KIND_PINNED, "CUMEM_LIMIT_PINNED"},
        {CM_KIND_MAPPED, "CUMEM_LIMIT_MAPPED"},
        {CM_KIND_MANAGED, "CUMEM_LIMIT_MANAGED"},
        {CM_KIND_DEVICE, "CUMEM_LIMIT_DEVICE"},
    };
    cm_host_memory memory;
    cm_host_memory_read(NULL, &memory);
    uint64_t usable = memory.limit_nbytes;
    uint64_t half = usable == UINT64_MAX ? UINT64_MAX : usable / 2;
    state->limits.half_nbytes = half;
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        set_limit_of(state, CM_KIND_MANAGED, device, UINT64_MAX);
        set_limit_of(state, CM_KIND_DEVICE, device, UINT64_MAX);
    }
    set_limit_of(state, CM_KIND_PINNED, 0, half);
    set_limit_of(state, CM_KIND_MAPPED, 0, half);
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        if (read_variable(state, runtime, variables[i].kind, variables[i].name) < 0) {
            return -1;
        }
    }
    return 0;
}

/* -- functions --------------------------------------------------------------------- */

PyObject *
cm_limit_to_object(uint64_t limit_nbytes)
{
    return limit_nbytes == UINT64_MAX ? Py_NewRef(Py_None)
                                      : PyLong_FromUnsignedLongLong(limit_nbytes);
}

/* The kind and the devices meant: from *first to before *end. */
static int
parse_place(cm_state *state, PyObject *kind_object, PyObject *device_object,
            cm_kind *kind, int *first, int *end)
{
    bool given = device_object != NULL && device_object != Py_None;
    if (cm_arg_kind(kind_object, "kind", kind) < 0) {
        return -1;
    }
    cm_runtime *runtime = cm_state_runtime(state);
    if (runtime == NULL) {
        return -1;
    }
    *first = 0;
    *end = cm_kind_is_host(*kind) ? 1 : runtime->device_count;
    if (given && cm_kind_is_host(*kind)) {
        PyErr_Format(
            PyExc_ValueError,
            "the limit of %s memory is the whole process's: it takes no device",
            cm_kind_name(*kind));
        return -1;
    }
    if (given) {
        if (cm_arg_device(state, device_object, "device", first) < 0) {
            return -1;
        }
        *end = *first + 1;
    }
    return 0;
}

/* What a limit is asked for: of a kind, on the devices from first to before end. */
typedef struct wish {
    cm_kind kind;
    int first;
    int end;
    uint64_t nbytes[CM_MAX_DEVICES];
} wish;

static int
parse_wish(cm_state *state, PyObject *args, wish *out)
{
    PyObject *kind;
    PyObject *limit;
    PyObject *place;
    if (!PyArg_ParseTuple(args, "OOO", &kind, &limit, &place)
        || parse_place(state, kind, place, &out->kind, &out->first, &out->end) < 0) {
        return -1;
    }
    for (int device = out->first; device < out->end; device++) {
        uint64_t whole = UINT64_MAX;
        out->nbytes[device] = UINT64_MAX;
        if (limit == Py_None) {
            continue;
        }
        if ((cm_arg_size_is_share(limit)
             && read_whole(state, state->runtime, out->kind, device, &whole) < 0)
            || cm_arg_size(limit, "limit", whole, &out->nbytes[device]) < 0) {
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(read_limit_doc,
"_read_limit($module, kind, limit, device, /)\n--\n\n"
"What set_limit() would set: a list of (index of the device, bytes or None).");

static PyObject *
read_limit(PyObject *module, PyObject *args)
{
    wish w;
    if (parse_wish(cm_state_of_module(module), args, &w) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int device = w.first; list != NULL && device < w.end; device++) {
        PyObject *pair =
            Py_BuildValue("(iN)", device, cm_limit_to_object(w.nbytes[device]));
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(pair);
    }
    return list;
}

/* The kind, and the index of a device, of the limit that is meant; opens no driver. */
static int
parse_index(PyObject *kind_object, int device, cm_kind *kind)
{
    if (cm_arg_kind(kind_object, "kind", kind) < 0) {
        return -1;
    }
    if (device < 0 || device >= CM_MAX_DEVICES) {
        PyErr_Format(PyExc_ValueError, "device %d does not exist", device);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(put_limit_doc,
"_put_limit($module, kind, device, limit, block, /)\n--\n\n"
"Have a limit in force, bytes or None: that of an open block (True), that which counts\n"
"when no block is open (None), or again the latter, since no block is open (False).");

static PyObject *
put_limit(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *kind_object;
    PyObject *limit;
    PyObject *block;
    cm_kind kind;
    int device;
    uint64_t nbytes = UINT64_MAX;
    if (!PyArg_ParseTuple(args, "OiOO", &kind_object, &device, &limit, &block)
        || parse_index(kind_object, device, &kind) < 0
        || (limit != Py_None && cm_arg_size(limit, "limit", UINT64_MAX, &nbytes) < 0)) {
        return NULL;
    }
    if (block == Py_None) {
        state->limits.set_nbytes[kind][device] = nbytes;
    }
    else {
        state->limits.has_block[kind][device] = block == Py_True;
        state->limits.block_nbytes[kind][device] = nbytes;
    }
    apply_limit_of(state, kind, device);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(limit_in_force_doc,
"_limit_in_force($module, kind, device, /)\n--\n\n"
"Bytes, or None.");

static PyObject *
limit_in_force(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *kind_object;
    cm_kind kind;
    int device;
    if (!PyArg_ParseTuple(args, "Oi", &kind_object, &device)
        || parse_index(kind_object, device, &kind) < 0) {
        return NULL;
    }
    return cm_limit_to_object(limit_of(cm_limits_budget(state, kind, device)));
}

PyDoc_STRVAR(host_memory_doc,
"_host_memory($module, /)\n--\n\n"
"Bytes of the host: in all, available, allowed by the control group, RLIMIT_MEMLOCK; None\n"
"for what is not limited or not known.");

static PyObject *
host_memory(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    cm_host_memory memory;
    cm_host_memory_read(NULL, &memory);
    return Py_BuildValue("(NNNN)", cm_limit_to_object(memory.total_nbytes),
                         cm_limit_to_object(memory.available_nbytes),
                         cm_limit_to_object(memory.cgroup_nbytes),
                         cm_limit_to_object(memory.memlock_nbytes));
}

PyDoc_STRVAR(numa_nodes_doc,
"_numa_nodes($module, /)\n--\n\n"
"The NUMA nodes that have memory, one bit for each.");

static PyObject *
numa_nodes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLongLong(cm_numa_read_nodes(NULL));
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_limit_methods[] = {
    {"_read_limit", read_limit, METH_VARARGS, read_limit_doc},
    {"_put_limit", put_limit, METH_VARARGS, put_limit_doc},
    {"_limit_in_force", limit_in_force, METH_VARARGS, limit_in_force_doc},
    {"_host_memory", host_memory, METH_NOARGS, host_memory_doc},
    {"_numa_nodes", numa_nodes, METH_NOARGS, numa_nodes_doc},
    {NULL, NULL, 0, NULL},
};
