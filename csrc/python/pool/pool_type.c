/* SPDX-License-Identifier: Apache-2.0 */
/* Has the base of cumem.Pool, which keeps memory of one kind on one device for reuse,
 * and the module's functions about pools. */
#include <stdlib.h>

#include "base/array.h"
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/wait.h"
#include "python/pool/allocate.h"
#include "python/pool/lending.h"
#include "python/pool/limits.h"
#include "python/pool/spilling.h"

/* -- as Python values ---------------------------------------------------------------- */

static PyObject *
dict_of(const cm_pool_counters *counters)
{
#define COUNTER_FORMAT(name) "sK"
#define COUNTER_VALUE(name) , #name, (unsigned long long)counters->name
    return Py_BuildValue(
        "{" CM_POOL_COUNTERS(COUNTER_FORMAT) "}" CM_POOL_COUNTERS(COUNTER_VALUE));
#undef COUNTER_VALUE
#undef COUNTER_FORMAT
}

/* Make a _PoolFacts, which says what a pool is and what it holds. `address`
 * distinguishes pools that exist at the same time. It is 0 if the facts are not those
 * of a pool. */
static PyObject *
describe(cm_state *state, uint64_t address, const cm_pool_config *config,
         uint64_t limit_nbytes, const cm_pool_counters *counters)
{
    PyObject *members[CM_PoolFacts_COUNT] = {
        [CM_PoolFacts_address] = PyLong_FromUnsignedLongLong(address),
        [CM_PoolFacts_serial] = PyLong_FromUnsignedLongLong(config->serial),
        [CM_PoolFacts_number] = PyLong_FromUnsignedLongLong(config->number),
        [CM_PoolFacts_flags] = PyLong_FromUnsignedLong(config->flags),
        [CM_PoolFacts_kind] = Py_NewRef(state->kind_words[config->kind]),
        [CM_PoolFacts_device] = PyLong_FromLong(config->device),
        [CM_PoolFacts_limit] = cm_limit_to_object(limit_nbytes),
        [CM_PoolFacts_counters] = dict_of(counters),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_PoolFacts, members);
}

/* Describe a pool. With `window` the peaks are those since the last call with
 * `window`. */
static PyObject *
describe_pool(cm_state *state, cm_pool *pool, bool window)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    cm_pool_counters counters;
    if (window) {
        cm_pool_read_window(pool, &counters);
    }
    else {
        cm_pool_read(pool, &counters);
    }
    return describe(state, (uintptr_t)pool, config,
                    atomic_load(&config->budget->limit_nbytes), &counters);
}

/* Describe the memory that register() has locked, as if it were a pool all of whose
 * memory is handed out. After a shutdown() this counts as another pool, so the serial
 * number depends on the generation. Returns NULL without an exception if nothing was
 * ever locked. */
static PyObject *
describe_registered(cm_state *state, bool window)
{
    cm_registry_counters locked;
    cm_registry_read(state->registry, window, &locked);
    if (locked.locked_count == 0) {
        return NULL;
    }
    const cm_pool_counters counters = {
        .live_nbytes = locked.nbytes,
        .live_count = locked.count,
        .requested_nbytes = locked.nbytes,
        .reserved_nbytes = locked.nbytes,
        .peak_live_nbytes = locked.peak_nbytes,
        .peak_requested_nbytes = locked.peak_nbytes,
        .peak_reserved_nbytes = locked.peak_nbytes,
        .segment_count = locked.count,
        .allocation_count = locked.locked_count,
        .free_count = locked.locked_count - locked.count,
        .miss_count = locked.locked_count,
    };
    const cm_pool_config config = {
        .number = CM_NUMBER_REGISTERED,
        .serial = UINT64_MAX - state->generation,
        .kind = CM_KIND_PINNED,
    };
    return describe(state, 0, &config, UINT64_MAX, &counters);
}

static PyObject *
list_blocks(cm_state *state, cm_pool *pool)
{
    cm_block_row *rows = NULL;
    uint64_t count = 0;
    cm_status status = cm_pool_list(pool, &rows, &count);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while listing a pool");
    }
    PyObject *list = PyList_New(0);
    for (uint64_t i = 0; list != NULL && i < count; i++) {
        PyObject *members[CM_PoolBlock_COUNT] = {
            [CM_PoolBlock_segment] = PyLong_FromUnsignedLong(rows[i].segment),
            [CM_PoolBlock_address] = PyLong_FromUnsignedLongLong(rows[i].address),
            [CM_PoolBlock_nbytes] = PyLong_FromUnsignedLongLong(rows[i].nbytes),
            [CM_PoolBlock_requested_nbytes] =
                PyLong_FromUnsignedLongLong(rows[i].requested_nbytes),
            [CM_PoolBlock_state] = PyLong_FromLong(rows[i].state),
        };
        cm_append(&list, cm_structseq_new(state, CM_STRUCTSEQ_PoolBlock, members));
    }
    free(rows);
    return list;
}

/* -- construction and end ---------------------------------------------------------- */

/* Start the engine's thread for idle trims if this pool has a time for them. Returns 0,
 * or -1 with an exception. */
static int
see_to_idle_trims(cm_state *state, uint64_t idle_trim_ns)
{
    if (idle_trim_ns == 0 || state->engine == NULL) {
        return 0;
    }
    return cm_py_check(state, cm_engine_need_idle_trims(state->engine),
                       "while starting the thread that sees to idle trims");
}

/* The constructor, whose arguments cumem/pools/pool.py has read. */
static PyObject *
pool_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *module = PyType_GetModule(PyType_GetSlot(type, Py_tp_base));
    cm_pool_config config = {.fence_limit_nbytes = CM_FENCE_LIMIT_NBYTES};
    PyObject *kind;
    PyObject *limit_object;
    int plain;
    int fork;
    unsigned long long idle_trim_ns;
    unsigned long long granule_nbytes;
    int spills = 0;
    PyObject *spill_limit_object = Py_None;
    uint64_t limit;
    if (module == NULL /* the base itself was called, and not a subclass */
        || !PyArg_ParseTuple(args, "OiIipiKOK|pO", &kind, &config.device, &config.flags,
                             &config.numa_node, &plain, &fork, &idle_trim_ns,
                             &limit_object, &granule_nbytes, &spills,
                             &spill_limit_object)
        || cm_arg_kind(kind, &config.kind) < 0
        || cm_arg_check_range(config.device, "device", 0, CM_MAX_DEVICES) < 0
        || cm_arg_check_range(fork, "fork", CM_FORK_COPY, CM_FORK_OMIT + 1) < 0
        || cm_limit_from_object(limit_object, &limit) < 0
        || cm_limit_from_object(spill_limit_object, &config.spill_limit_nbytes) < 0) {
        return NULL;
    }
    cm_state *state = cm_state_of_module(module);
    config.spills = spills != 0;
    state->wake_storage = cm_spill_wake;
    config.segments = plain ? CM_SEGMENTS_PLAIN : CM_SEGMENTS_AUTO;
    config.fork = (cm_fork)fork;
    config.idle_trim_ns = idle_trim_ns;
    config.granule_nbytes = granule_nbytes;
    config.serial = ++state->pool_serial;
    config.budget = cm_limits_budget(state, config.kind, config.device);
    cm_runtime *runtime = cm_state_runtime(state);
    if (runtime == NULL || cm_limit_resolve(state, config.device, &limit) < 0) {
        return NULL;
    }
    config.number = ++state->pool_count;
    cm_pool *pool = NULL;
    PyObject *self = NULL;
    /* Making the object may run a garbage collection, and with it Python code. A
     * shutdown() in that code would not find the pool, and would take its runtime
     * away. */
    cm_state_enter(state);
    cm_status status = cm_pool_create(runtime, &config, &pool);
    if (cm_is_ok(status)) {
        atomic_store(&cm_pool_get_config(pool)->budget->limit_nbytes, limit);
        self = cm_pool_object_new(state, pool);
        /* The object holds the pool. If there is no object, this ends the pool, which
         * was never used. */
        cm_pool_release(pool);
    }
    if (self != NULL && see_to_idle_trims(state, idle_trim_ns) < 0) {
        Py_CLEAR(self);
    }
    cm_state_leave(state);
    return cm_is_ok(status) ? self : cm_py_raise(state, status, "while making a pool");
}

static void
pool_dealloc(PyObject *op)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    PyObject_ClearWeakRefs(op);
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
    const cm_pool_config *config = &self->config;
    cm_stream *stream = NULL;
    if (stream_object != Py_None || cm_kind_is_ordered(config->kind)) {
        stream = cm_stream_for_device(self->state, stream_object, config->device);
        if (stream == NULL) {
            return NULL;
        }
    }
    const cm_region like = {.ndim = 1, .shape = {nbytes}};
    PyObject *buffer = cm_buffer_allocate(
        self->state,
        cm_pool_choose(self->state, self, config->kind, config->flags, config->device),
        self->state->uint8_dtype, &like, 'C', stream);
    cm_stream_give(self->state, stream);
    return buffer;
}

/* This is the method _describe(). */
static PyObject *
pool_describe(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_state *state = ((cm_pool_object *)(void *)op)->state;
    cm_pool *pool = cm_pool_object_take(op);
    PyObject *answer = pool == NULL ? NULL : describe_pool(state, pool, false);
    cm_pool_object_give(op, pool);
    return answer;
}

/* This is the method _list_blocks(). */
static PyObject *
pool_list_blocks(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_state *state = ((cm_pool_object *)(void *)op)->state;
    cm_pool *pool = cm_pool_object_take(op);
    PyObject *answer = pool == NULL ? NULL : list_blocks(state, pool);
    cm_pool_object_give(op, pool);
    return answer;
}

/* This is the method _reset_peaks(). */
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

/* This is the method _close(). Cached memory goes back at once, and the memory of live
 * blocks goes back with the last of them. */
static PyObject *
pool_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self->pool == NULL) {
        Py_RETURN_NONE;
    }
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    cm_pool_waiter waiter = {self->state, cm_gil_give()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    uint64_t released;
    /* This trim may wait for the device. The pool stays open meanwhile, so that a
     * signal handler can still end the call. */
    cm_status status = cm_pool_trim(pool, 0, &hooks, &released);
    cm_pool_waiter_end(&waiter, status);
    if (status.code == CM_ECANCELLED) {
        cm_pool_object_give(op, pool);
        return NULL; /* a signal handler has raised */
    }
    cm_pool_object_close(self);
    status = cm_first_failure(status,
                              CM_WITHOUT_GIL(cm_pool_trim(pool, 0, NULL, &released)));
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
    /* Refuse a pool of another device. In its block, a constructor that names no device
     * would not use this pool, and would ignore its limit. */
    int current = cm_state_device(self->state);
    if (self->config.device != current) {
        (void)cm_package_refuse("pools.pool", "refuse_block",
                                Py_BuildValue("(sii)", cm_kinds[self->config.kind].text,
                                              self->config.device, current));
        return NULL;
    }
    return cm_override_enter(&self->state->current_pool, op);
}

static PyObject *
pool_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_state *state = ((cm_pool_object *)(void *)op)->state;
    return cm_override_exit(&state->current_pool, op, "pool");
}

/* -- getters ----------------------------------------------------------------------- */

static PyObject *
pool_get_config(PyObject *op, void *Py_UNUSED(closure))
{
    const cm_pool_object *self = (cm_pool_object *)(void *)op;
    const cm_pool_config *config = &self->config;
    PyObject *members[CM_PoolConfig_COUNT] = {
        [CM_PoolConfig_kind] = Py_NewRef(self->state->kind_words[config->kind]),
        [CM_PoolConfig_device] = cm_device_object_new(self->state, config->device),
        [CM_PoolConfig_flags] = PyLong_FromUnsignedLong(config->flags),
        [CM_PoolConfig_numa_node] = PyLong_FromLong(config->numa_node),
        [CM_PoolConfig_is_plain] =
            PyBool_FromLong(config->segments == CM_SEGMENTS_PLAIN),
        [CM_PoolConfig_fork] = PyLong_FromLong(config->fork),
        [CM_PoolConfig_idle_trim_ns] =
            PyLong_FromUnsignedLongLong(config->idle_trim_ns),
        [CM_PoolConfig_is_closed] = PyBool_FromLong(self->pool == NULL),
        [CM_PoolConfig_number] = PyLong_FromUnsignedLongLong(config->number),
        [CM_PoolConfig_spills] = PyBool_FromLong(config->spills),
        [CM_PoolConfig_spill_limit] = cm_limit_to_object(config->spill_limit_nbytes),
    };
    return cm_structseq_new(self->state, CM_STRUCTSEQ_PoolConfig, members);
}

static PyObject *
pool_set_idle_trim(PyObject *op, PyObject *number)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    uint64_t ns = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() || check_open(self) < 0) {
        return NULL;
    }
    cm_pool_set_idle_trim(self->pool, ns);
    self->config.idle_trim_ns = ns;
    return see_to_idle_trims(self->state, ns) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
pool_set_limit(PyObject *op, PyObject *value)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    uint64_t limit;
    if (check_open(self) < 0 || cm_limit_from_object(value, &limit) < 0
        || cm_limit_resolve(self->state, self->config.device, &limit) < 0) {
        return NULL;
    }
    cm_pool *pool = cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    atomic_store(&cm_pool_get_config(pool)->budget->limit_nbytes, limit);
    bool may_fence = !cm_library_captures();
    PyThreadState *thread = cm_gil_give();
    cm_pool_obey_limits(pool, may_fence);
    cm_gil_take(thread);
    cm_pool_object_give(op, pool);
    Py_RETURN_NONE;
}

CM_PACKAGED(Pool, "interchange.listing", list_names)

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef pool_methods[] = {
    {"allocate", CM_METHOD(pool_allocate), CM_KEYWORDS, CM_DOC__Pool_allocate},
    {"_describe", pool_describe, METH_NOARGS, CM_DOC__Pool__describe},
    {"_list_blocks", pool_list_blocks, METH_NOARGS, CM_DOC__Pool__list_blocks},
    {"_reset_peaks", pool_reset_peaks, METH_NOARGS, CM_DOC__Pool__reset_peaks},
    {"_set_idle_trim", pool_set_idle_trim, METH_O, CM_DOC__Pool__set_idle_trim},
    {"_set_limit", pool_set_limit, METH_O, CM_DOC__Pool__set_limit},
    {"_close", pool_close, METH_NOARGS, CM_DOC__Pool__close},
    {"__enter__", pool_enter, METH_NOARGS, CM_DOC__Pool___enter__},
    {"__exit__", pool_exit, METH_VARARGS, CM_DOC__Pool___exit__},
    {"__dir__", CM_METHOD(Pool_list_names), METH_VARARGS | METH_KEYWORDS,
     CM_DOC__Pool___dir__},
    /* Type checkers know which buffers a pool makes: Pool[PinnedBuffer] is an
     * annotation. */
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "See PEP 585."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_getset[] = {
    {"_config", pool_get_config, NULL, CM_DOC__Pool__config, NULL},
    CM_HINT(free_all_blocks) CM_HINT(malloc) CM_HINT(set_limit) CM_HINT(total_bytes)
        CM_HINT(used_bytes){NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef pool_members[] = CM_WEAKREFS(cm_pool_object);

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, (void *)CM_DOC__Pool},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_getset},
    {Py_tp_members, pool_members},
    {0, NULL},
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
    return cm_type_add(module, "cumem._core._Pool", sizeof(cm_pool_object),
                       Py_TPFLAGS_BASETYPE, pool_slots, NULL, &state->pool_base);
}

/* This is the Python function _set_pool_type(cls). A method of the class itself is
 * called faster than an inherited one, so the class gets allocate() as a method of its
 * own. */
static PyObject *
set_pool_type(PyObject *module, PyObject *type)
{
    cm_state *state = cm_state_of_module(module);
    if (!PyType_Check(type)
        || !PyType_IsSubtype((PyTypeObject *)(void *)type, state->pool_base)) {
        (void)cm_arg_refuse(type, "cls", "a class of pools");
        return NULL;
    }
    PyObject *allocate = PyDescr_NewMethod((PyTypeObject *)(void *)type, pool_methods);
    int result =
        allocate == NULL ? -1 : PyObject_SetAttrString(type, "allocate", allocate);
    Py_XDECREF(allocate);
    if (result < 0) {
        return NULL;
    }
    cm_replace((PyObject **)(void *)&state->pool_type, Py_NewRef(type));
    Py_RETURN_NONE;
}

/* -- functions of the module -------------------------------------------------------------------- */

/* This is the Python function _default_pool(kind, device). It makes a new Pool around
 * the default pool; cumem/pools/pool.py keeps one of them. */
static PyObject *
default_pool(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *name;
    cm_kind kind;
    int device;
    if (!PyArg_ParseTuple(args, "Oi", &name, &device) || cm_arg_kind(name, &kind) < 0
        || cm_arg_check_range(device, "device", 0, CM_MAX_DEVICES) < 0) {
        return NULL;
    }
    /* Making the object may run a garbage collection, and with it Python code, which
     * must not shut cumem down meanwhile. */
    cm_state_enter(state);
    cm_pool *pool = cm_state_pool(state, kind, cm_kinds[kind].flags, device);
    PyObject *made = pool == NULL ? NULL : cm_pool_object_new(state, pool);
    cm_state_leave(state);
    return made;
}

static PyObject *
trim(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    cm_trim_request r = {.kind = CM_KIND_PAGEABLE};
    PyObject *object;
    PyObject *kind;
    unsigned long long keep;
    int wait;
    cm_pool_object *self;
    if (!PyArg_ParseTuple(args, "OOiKp:_trim", &object, &kind, &r.device, &keep, &wait)
        || (kind != Py_None && cm_arg_kind(kind, &r.kind) < 0)
        || cm_arg_pool(state, object, &self) < 0) {
        return NULL;
    }
    if (self == NULL && state->runtime == NULL) {
        return PyLong_FromLong(0); /* not worth opening a driver for */
    }
    cm_pool *pool = self == NULL ? NULL : cm_pool_object_take(object);
    if (self == NULL ? cm_state_runtime(state) == NULL : pool == NULL) {
        return NULL; /* the call has also dropped deferred references, whose memory can
                        then be trimmed */
    }
    r.only = pool;
    r.keep_nbytes = keep;
    int result = cm_state_trim(state, &r, wait != 0);
    cm_pool_object_give(object, pool);
    return result < 0 ? NULL
                      : cm_py_answer(state, r.refused, "while trimming the pools",
                                     PyLong_FromUnsignedLongLong(r.released_nbytes));
}

/* Hold all pools until give_all(). The release that ends a pool may wait, and
 * give_all() makes it without the GIL. Returns false with an exception if not all could
 * be held. */
static bool
hold_all(cm_state *state, cm_pool ***held, uint32_t *count)
{
    uint32_t room = 0;
    cm_pool *pool = NULL;
    cm_state_enter(state);
    while ((room = cm_array_reserve(held, sizeof(cm_pool *), NULL, *count, room)) > 0
           && (pool = cm_pool_after(state->runtime, pool)) != NULL) {
        (*held)[(*count)++] = pool;
    }
    return room > 0 || PyErr_NoMemory() != NULL;
}

static void
give_all(cm_state *state, cm_pool **held, uint32_t count)
{
    PyThreadState *thread = cm_gil_give();
    while (count > 0) {
        cm_pool_release(held[--count]);
    }
    cm_gil_take(thread);
    free(held);
    cm_state_leave(state);
}

static PyObject *
pools(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    cm_state *state = cm_state_of_module(module);
    bool window = nargs > 0 && args[0] == Py_True;
    PyObject *registered = NULL;
    cm_pool **held = NULL;
    uint32_t count = 0;
    PyObject *list = hold_all(state, &held, &count) ? PyList_New(0) : NULL;
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        cm_append(&list, describe_pool(state, held[i], window));
    }
    if (list != NULL && state->registry != NULL) {
        registered = describe_registered(state, window);
    }
    if (registered != NULL) {
        cm_append(&list, registered);
    }
    else if (PyErr_Occurred()) {
        Py_CLEAR(list);
    }
    give_all(state, held, count);
    return list;
}

/* A range of pages that register() has locked. */
typedef struct locked_row {
    const void *first;
    uint64_t nbytes;
    int device;
} locked_row;

/* List all of these ranges without making a Python object. Making one could run a
 * garbage collection, and that could end a storage that the loop was about to visit.
 * The caller frees *out. Returns 0, or -1 with MemoryError. */
static int
list_registered(const cm_state *state, locked_row **out, size_t *count)
{
    *count = 0;
    *out = calloc(cm_list_count(&state->storages) + 1, sizeof(**out));
    if (*out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (const cm_list *n = state->storages.next; n != &state->storages; n = n->next) {
        const cm_storage *s = CM_LIST_ENTRY(n, cm_storage, node);
        if (s->registration != NULL) {
            (*out)[(*count)++] = (locked_row){s->host, s->nbytes, s->device};
        }
    }
    return 0;
}

/* Make a _LivingBlock of a block that is handed out, or of locked pages. */
static PyObject *
make_living(cm_state *state, uint64_t address, uint64_t nbytes,
            uint64_t requested_nbytes, uint64_t pool_serial, int kind, int device)
{
    PyObject *members[CM_LivingBlock_COUNT] = {
        [CM_LivingBlock_address] = PyLong_FromUnsignedLongLong(address),
        [CM_LivingBlock_nbytes] = PyLong_FromUnsignedLongLong(nbytes),
        [CM_LivingBlock_requested_nbytes] =
            PyLong_FromUnsignedLongLong(requested_nbytes),
        [CM_LivingBlock_pool_serial] = PyLong_FromUnsignedLongLong(pool_serial),
        [CM_LivingBlock_kind] = PyLong_FromLong(kind),
        [CM_LivingBlock_device] = PyLong_FromLong(device),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_LivingBlock, members);
}

/* This is the Python function _living(). It lists all blocks that are handed out, and
 * then the pages of other owners that are locked. */
static PyObject *
living(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_pool **held = NULL;
    uint32_t count = 0;
    if (state->runtime == NULL) {
        return PyList_New(0);
    }
    cm_status status = cm_ok();
    PyObject *list = hold_all(state, &held, &count) ? PyList_New(0) : NULL;
    for (uint32_t i = 0; list != NULL && i < count && cm_is_ok(status); i++) {
        const cm_pool_config *config = cm_pool_get_config(held[i]);
        int kind =
            config->is_staging ? CM_EVENT_STAGING : cm_kind_in_event(config->kind);
        cm_block_row *rows = NULL;
        uint64_t row_count = 0;
        status = cm_pool_list(held[i], &rows, &row_count);
        for (uint64_t k = 0; cm_is_ok(status) && k < row_count; k++) {
            const cm_block_row *r = &rows[k];
            if (r->state == CM_BLOCK_LIVE) {
                uint64_t address = r->host != NULL ? (uintptr_t)r->host : r->address;
                cm_append(&list,
                          make_living(state, address, r->nbytes, r->requested_nbytes,
                                      config->serial, kind, config->device));
            }
        }
        free(rows);
    }
    give_all(state, held, count);
    locked_row *registered = NULL;
    size_t registered_count = 0;
    if (list_registered(state, &registered, &registered_count) < 0) {
        Py_CLEAR(list);
    }
    for (size_t i = 0; list != NULL && i < registered_count; i++) {
        const locked_row *r = &registered[i];
        cm_append(&list, make_living(state, (uintptr_t)r->first, r->nbytes, r->nbytes,
                                     0, CM_EVENT_REGISTERED, r->device));
    }
    free(registered);
    return cm_py_answer(state, status, "while listing what lives", list);
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_pool_methods[] = {
    {"_default_pool", default_pool, METH_VARARGS, CM_DOC__default_pool},
    {"_set_pool_type", set_pool_type, METH_O, CM_DOC__set_pool_type},
    {"_trim", trim, METH_VARARGS, CM_DOC__trim},
    {"_lend", cm_lend_pool, METH_O, CM_DOC__lend},
    {"_open_desk", cm_open_desk, METH_O, CM_DOC__open_desk},
    {"_close_desk", cm_close_desk, METH_O, CM_DOC__close_desk},
    {"_retry", cm_shortage_retry, METH_VARARGS, CM_DOC__retry},
    {"_is_memory_in_flight", cm_is_memory_in_flight, METH_VARARGS,
     CM_DOC__is_memory_in_flight},
    {"_reserve", cm_reserve_memory, METH_VARARGS, CM_DOC__reserve},
    {"_pools", CM_METHOD(pools), METH_FASTCALL, CM_DOC__pools},
    {"_living", living, METH_NOARGS, CM_DOC__living},
    {"_limit", cm_limit, METH_VARARGS, CM_DOC__limit},
    {"_host_memory", cm_host_memory_info, METH_NOARGS, CM_DOC__host_memory},
    {"_processors", cm_processors, METH_NOARGS, CM_DOC__processors},
    {NULL, NULL, 0, NULL},
};
