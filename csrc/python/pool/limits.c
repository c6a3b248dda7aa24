/* SPDX-License-Identifier: Apache-2.0 */
/* Sets the limits on how much memory of each kind may be reserved. A limit is a
 * default, or comes from an environment variable, or is set by the user. */
#include "python/pool/limits.h"

#include "base/machine.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/wait.h"

/* -- budgets ----------------------------------------------------------------------- */

void
cm_limits_init(cm_state *state)
{
    cm_limits *limits = &state->limits;
    cm_budget_init(&limits->host, UINT64_MAX, NULL);
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        cm_budget *parent =
            cm_kind_is_page_locked((cm_kind)kind) ? &limits->host : NULL;
        for (int device = 0; device < CM_MAX_DEVICES; device++) {
            cm_budget_init(&limits->kinds[kind][device], UINT64_MAX, parent);
        }
    }
}

static uint64_t
limit_of(const cm_budget *budget)
{
    return atomic_load(&budget->limit_nbytes);
}

/* Set one limit, and the joint limit of page-locked memory that follows from it. */
static void
put_in_force(cm_state *state, cm_kind kind, int device, uint64_t nbytes)
{
    const cm_limits *limits = &state->limits;
    atomic_store(&cm_limits_budget(state, kind, device)->limit_nbytes, nbytes);
    uint64_t most = limits->default_nbytes;
    for (int each = 0; each < CM_KIND_COUNT; each++) {
        uint64_t limit = limit_of(&limits->kinds[each][0]);
        most = cm_kind_is_page_locked((cm_kind)each) && limit > most ? limit : most;
    }
    atomic_store(&state->limits.host.limit_nbytes, most);
}

/* -- reading and setting a limit --------------------------------------------------- */

PyObject *
cm_limit_to_object(uint64_t limit_nbytes)
{
    return limit_nbytes == UINT64_MAX ? Py_NewRef(Py_None)
                                      : PyLong_FromUnsignedLongLong(limit_nbytes);
}

int
cm_limit_from_object(PyObject *object, uint64_t *out)
{
    *out = object == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(object);
    return PyErr_Occurred() ? -1 : 0;
}

int
cm_limit_resolve(cm_state *state, int device, uint64_t *limit_nbytes)
{
    cm_runtime *runtime = state->runtime;
    cm_device_info info;
    if (!cm_limit_is_share(*limit_nbytes) || runtime == NULL
        || !cm_runtime_is_awake(runtime)) {
        return 0;
    }
    cm_state_enter(state);
    cm_status status = CM_WITHOUT_GIL(cm_rt_device_describe(runtime, device, &info));
    cm_state_leave(state);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while reading the device's memory size");
    }
    *limit_nbytes = cm_limit_in_bytes(*limit_nbytes, info.total_nbytes);
    return 0;
}

/* Make the pools return to the driver what they keep in excess of a limit. The limit
 * also holds for all memory that is handed out from now on. Releases the GIL. */
static void
obey(cm_state *state)
{
    const cm_runtime *rt = state->runtime;
    if (rt == NULL) {
        return; /* without a runtime nothing is held */
    }
    cm_state_enter(state);
    bool may_fence = !cm_library_captures();
    PyThreadState *thread = cm_gil_give();
    cm_pools_obey_limits(rt, may_fence);
    cm_gil_take(thread);
    cm_state_leave(state);
}

/* Put a limit in force, and let pools obey it. Returns 0, or -1 with an exception. */
static int
put(cm_state *state, cm_kind kind, int device, uint64_t nbytes)
{
    if (cm_limit_resolve(state, device, &nbytes) < 0) {
        return -1;
    }
    put_in_force(state, kind, device, nbytes);
    state->limits.was_put = true;
    obey(state);
    return 0;
}

/* -- the environment --------------------------------------------------------------- */

/* Put limits in force that the package has found. `limits` maps the name of a kind to a
 * dict from the index of a device to its limit. Returns 0, or -1 with an exception. */
static int
put_all(cm_state *state, PyObject *limits)
{
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        PyObject *places = PyDict_GetItemString(limits, cm_kinds[kind].text);
        Py_ssize_t place = 0;
        PyObject *index;
        PyObject *limit;
        while (places != NULL && PyDict_Next(places, &place, &index, &limit)) {
            uint64_t nbytes;
            int device = (int)PyLong_AsLong(index);
            if (PyErr_Occurred() || cm_limit_from_object(limit, &nbytes) < 0
                || cm_arg_check_range(device, "device", 0, CM_MAX_DEVICES) < 0
                || put(state, (cm_kind)kind, device, nbytes) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Find the default limit of page-locked memory, which is half of the memory that this
 * process may use, or half of its share if other ranks use that memory too. Returns 0,
 * or -1 with an exception. */
static int
find_default(const cm_host_memory *memory, uint64_t *out)
{
    uint64_t share = UINT64_MAX;
    PyObject *answer =
        cm_package_call("base.ranks", "find_share",
                        Py_BuildValue("(NN)", cm_limit_to_object(memory->limit_nbytes),
                                      cm_limit_to_object(memory->total_nbytes)));
    int result = answer == NULL ? -1 : cm_limit_from_object(answer, &share);
    Py_XDECREF(answer);
    *out = share == UINT64_MAX ? UINT64_MAX : share / 2;
    return result;
}

int
cm_limits_open(cm_state *state, cm_runtime *runtime)
{
    cm_host_memory memory;
    cm_host_memory_read(NULL, &memory);
    uint64_t most;
    if (find_default(&memory, &most) < 0) {
        return -1;
    }
    state->limits.default_nbytes = most;
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        bool is_host = cm_kind_is_page_locked((cm_kind)kind);
        for (int device = 0; device < (is_host ? 1 : CM_MAX_DEVICES); device++) {
            put_in_force(state, (cm_kind)kind, device, is_host ? most : UINT64_MAX);
        }
    }
    if (!state->limits.was_put && !cm_package_has_variables("CUMEM_LIMIT_")) {
        return 0;
    }
    PyObject *limits =
        cm_package_call("pools.limits", "begin",
                        Py_BuildValue("(NiN)", cm_limit_to_object(memory.limit_nbytes),
                                      runtime->device_count, cm_limit_to_object(most)));
    int result = limits == NULL ? -1 : put_all(state, limits);
    Py_XDECREF(limits);
    return result;
}

int
cm_limits_find_groups(void)
{
    int result = -1;
    PyObject *quota = NULL;
    PyObject *folders =
        cm_package_call("base.control_groups", "memory_folders", PyTuple_New(0));
    const char *lines = folders == NULL ? NULL : PyBytes_AsString(folders);
    if (lines == NULL) {
        goto fail;
    }
    quota = cm_package_call("base.control_groups", "cpu_quota", PyTuple_New(0));
    uint64_t cpu_count = quota == NULL ? 0 : PyLong_AsUnsignedLongLong(quota);
    if (PyErr_Occurred()) {
        goto fail;
    }
    if (!cm_control_groups_set(lines, cpu_count)) {
        (void)PyErr_NoMemory();
        goto fail;
    }
    result = 0;
fail:
    Py_XDECREF(quota);
    Py_XDECREF(folders);
    return result;
}

/* -- functions --------------------------------------------------------------------- */

PyObject *
cm_limits_list(const cm_budget *budget)
{
    PyObject *list = PyList_New(0);
    for (; list != NULL && budget != NULL; budget = budget->parent) {
        uint64_t limit = atomic_load(&budget->limit_nbytes);
        /* It is not known yet how much memory the limit is a share of. */
        limit = cm_limit_is_share(limit) ? UINT64_MAX : limit;
        cm_append(&list,
                  Py_BuildValue("(NK)", cm_limit_to_object(limit),
                                (unsigned long long)atomic_load(&budget->used_nbytes)));
    }
    return list;
}

/* This is the Python function _limit(kind, device[, new]). Returns the limit that is in
 * force afterwards. */
PyObject *
cm_limit(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *kind_object;
    PyObject *new = NULL;
    cm_kind kind;
    int device;
    uint64_t nbytes;
    if (!PyArg_ParseTuple(args, "Oi|O", &kind_object, &device, &new)
        || cm_arg_kind(kind_object, &kind) < 0
        || cm_arg_check_range(device, "device", 0, CM_MAX_DEVICES) < 0
        || (new != NULL && cm_limit_from_object(new, &nbytes) < 0)) {
        return NULL;
    }
    if (new != NULL && put(state, kind, device, nbytes) < 0) {
        return NULL;
    }
    return cm_limit_to_object(limit_of(cm_limits_budget(state, kind, device)));
}

PyObject *
cm_host_memory_info(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_host_memory memory;
    cm_host_memory_read(NULL, &memory);
    PyObject *members[CM_HostMemory_COUNT] = {
        [CM_HostMemory_total_nbytes] = cm_limit_to_object(memory.total_nbytes),
        [CM_HostMemory_available_nbytes] = cm_limit_to_object(memory.available_nbytes),
        [CM_HostMemory_cgroup_nbytes] = cm_limit_to_object(memory.cgroup_nbytes),
        [CM_HostMemory_usable_nbytes] = cm_limit_to_object(memory.limit_nbytes),
    };
    return cm_structseq_new(cm_state_of_module(module), CM_STRUCTSEQ_HostMemory,
                            members);
}

PyObject *
cm_processors(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("(IK)", cm_usable_cpu_count(),
                         (unsigned long long)cm_numa_read_nodes(NULL));
}
