/* SPDX-License-Identifier: Apache-2.0 */
/* Makes Pools as C objects, lends them to calls, closes them, finds out which Pool is
 * current, and does what concerns all Pools. */
#include "python/pool/pool_object.h"

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/wait.h"

/* -- one ---------------------------------------------------------------------------- */

static PyObject *
alloc_object(cm_state *state)
{
    if (state->pool_type == NULL) { /* loading the module sets it */
        PyObject *pools = cm_package_load("pools.pool");
        Py_XDECREF(pools);
        if (pools == NULL) {
            return NULL;
        }
    }
    return PyType_GenericAlloc(state->pool_type, 0);
}

PyObject *
cm_pool_object_new(cm_state *state, cm_pool *pool)
{
    /* Loading a module runs Python code, and so does a garbage collection. That code
     * must not shut cumem down meanwhile. */
    cm_state_enter(state);
    PyObject *op = alloc_object(state);
    cm_state_leave(state);
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->pool = cm_pool_hold(pool);
    self->config = *cm_pool_get_config(pool);
    self->config.budget = NULL;
    self->generation = state->generation;
    cm_list_init(&self->node);
    cm_list_push_back(&state->pool_objects, &self->node);
    return op;
}

/* Return the pool of an open Pool, borrowed, or NULL with ValueError if the Pool is
 * closed. */
static cm_pool *
get_open(cm_pool_object *self)
{
    if (self->pool != NULL && cm_state_runtime(self->state) == NULL) {
        return NULL;
    }
    /* Dropping deferred references may just have closed it. */
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
    }
    return self->pool;
}

cm_pool *
cm_pool_object_take(PyObject *op)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    cm_pool *pool = get_open(self);
    if (pool == NULL) {
        return NULL;
    }
    cm_state_enter(self->state);
    return cm_pool_hold(pool);
}

void
cm_pool_let_go(cm_state *state, cm_pool *pool)
{
    cm_state_enter(state);
    PyThreadState *thread = cm_gil_give();
    cm_pool_release(pool);
    cm_gil_take(thread);
    cm_state_leave(state);
}

cm_pool *
cm_pool_find_host(cm_state *state, cm_pool *pool, uint64_t limit_nbytes,
                  const char *what)
{
    cm_pool *made = cm_pool_get_host(pool);
    if (made != NULL) {
        return made;
    }
    const cm_pool_config config = {
        .kind = CM_KIND_PINNED,
        .device = cm_pool_get_config(pool)->device,
        .flags = cm_kinds[CM_KIND_PINNED].flags,
        .fork = CM_FORK_OMIT,
        .numa_node = -1,
        .fence_limit_nbytes = CM_FENCE_LIMIT_NBYTES,
        .serial = ++state->pool_serial,
        .number = ++state->pool_count,
        .budget = cm_limits_budget(state, CM_KIND_PINNED, 0),
    };
    cm_status status = cm_pool_create(state->runtime, &config, &made);
    if (cm_py_check(state, status, what) < 0) {
        return NULL;
    }
    atomic_store(&cm_pool_get_config(made)->budget->limit_nbytes, limit_nbytes);
    cm_pool_set_host(pool, made);
    cm_pool_release(made); /* the pool holds it from now on */
    return made;
}

void
cm_pool_object_give(PyObject *op, cm_pool *pool)
{
    if (pool != NULL) {
        cm_state *state = ((cm_pool_object *)(void *)op)->state;
        cm_pool_let_go(state, pool);
        cm_state_leave(state);
    }
}

void
cm_pool_object_close(cm_pool_object *self)
{
    cm_pool *pool = self->pool;
    if (pool != NULL) {
        self->pool = NULL;
        cm_list_remove(&self->node);
        if (self->config.number != 0) {
            cm_pool_set_number(pool, CM_NUMBER_CLOSED);
        }
        cm_pool_let_go(self->state, pool);
    }
}

size_t
cm_pool_objects_collect(cm_state *state, cm_pool **out)
{
    size_t count = 0;
    while (!cm_list_is_empty(&state->pool_objects)) {
        cm_pool_object *self =
            CM_LIST_ENTRY(state->pool_objects.next, cm_pool_object, node);
        cm_list_remove(&self->node);
        out[count++] = self->pool;
        self->pool = NULL;
    }
    return count;
}

/* -- as an argument ----------------------------------------------------------------- */

int
cm_arg_pool(const cm_state *state, PyObject *object, cm_pool_object **out)
{
    *out = NULL;
    if (!cm_arg_is_given(object)) {
        return 0;
    }
    if (Py_TYPE(object) != state->pool_type) {
        return cm_arg_refuse(object, "pool", "a Pool or None");
    }
    *out = (cm_pool_object *)(void *)object;
    return 0;
}

/* -- which pool serves a request ----------------------------------------------------- */

/* True if the pool can serve the request. `flags` other than the kind's usual ones are
 * served only by pools that have them. */
static bool
can_serve(const cm_pool_object *self, cm_kind kind, unsigned flags, int device)
{
    const cm_pool_config *config = &self->config;
    return config->kind == kind && config->device == device
           && (flags == config->flags || flags == cm_kinds[kind].flags);
}

cm_pool *
cm_pool_find_current(cm_state *state, cm_kind kind, unsigned flags, int device)
{
    PyObject *chain = cm_override_read(&state->current_pool);
    cm_pool *found = NULL;
    PyObject *object;
    PyObject *at = chain;
    while (found == NULL && (object = cm_override_step(&at)) != NULL) {
        const cm_pool_object *self = (const cm_pool_object *)(const void *)object;
        if (self->pool != NULL && can_serve(self, kind, flags, device)) {
            found = cm_pool_hold(self->pool);
        }
    }
    Py_XDECREF(chain);
    return found;
}

cm_pool *
cm_pool_choose(cm_state *state, cm_pool_object *wanted, cm_kind kind, unsigned flags,
               int device)
{
    if (wanted != NULL && !can_serve(wanted, kind, flags, device)) {
        const cm_pool_config *own = &wanted->config;
        (void)cm_package_refuse("pools.pool", "refuse_request",
                                Py_BuildValue("(ssii)", cm_kinds[own->kind].text,
                                              cm_kinds[kind].text, own->device,
                                              device));
        return NULL;
    }
    if (wanted != NULL) {
        cm_pool *pool = get_open(wanted);
        return pool == NULL ? NULL : cm_pool_hold(pool);
    }
    if (cm_state_has_blocks(state) && !cm_override_is_empty(&state->current_pool)) {
        cm_pool *current = cm_pool_find_current(state, kind, flags, device);
        if (current != NULL || PyErr_Occurred()) {
            return current;
        }
    }
    cm_pool *pool = cm_state_pool(state, kind, flags, device);
    return pool == NULL ? NULL : cm_pool_hold(pool);
}

/* Parse the arguments of a function, which are a device and a number of bytes, by
 * `format`, and hold the pool that is current for that device. Returns NULL with an
 * exception. */
static cm_pool *
read_device_pool(cm_state *state, PyObject *args, const char *format, uint64_t *nbytes)
{
    int device;
    unsigned long long given;
    if (!PyArg_ParseTuple(args, format, &device, &given)
        || cm_arg_check_range(device, "device", 0, CM_MAX_DEVICES) < 0) {
        return NULL;
    }
    *nbytes = given;
    return cm_pool_choose(state, NULL, CM_KIND_DEVICE, 0, device);
}

PyObject *
cm_is_memory_in_flight(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    uint64_t nbytes;
    cm_pool *pool = read_device_pool(state, args, "iK:_is_memory_in_flight", &nbytes);
    if (pool == NULL) {
        return NULL;
    }
    bool fits_after_flight = cm_pool_fits_after_flight(pool, nbytes);
    cm_pool_let_go(state, pool);
    return PyBool_FromLong(fits_after_flight);
}

PyObject *
cm_reserve_memory(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    uint64_t nbytes;
    cm_pool *pool = read_device_pool(state, args, "iK:_reserve", &nbytes);
    if (pool == NULL) {
        return NULL;
    }
    cm_state_enter(state);
    PyThreadState *thread = cm_gil_give();
    cm_pool_reserve(pool, nbytes);
    cm_gil_take(thread);
    cm_state_leave(state);
    cm_pool_let_go(state, pool);
    Py_RETURN_NONE;
}

int
cm_state_trim(cm_state *state, cm_trim_request *r, bool wait)
{
    const cm_runtime *rt = state->runtime;
    cm_state_enter(state);
    cm_pool_waiter waiter = {state, cm_gil_give()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    r->only_looks = !wait;
    cm_status status = cm_pools_trim(rt, r, &hooks);
    cm_pool_waiter_end(&waiter, status);
    cm_state_leave(state);
    return cm_is_ok(status) ? 0 : -1; /* a signal handler has raised */
}

/* -- peers: a device that has got a context reaches the memory of all pools ------------- */

void
cm_pools_admit_peers(cm_state *state)
{
    const cm_runtime *rt = state->runtime;
    state->context_count = atomic_load(&rt->context_count);
    cm_status first = cm_ok();
    cm_pool *pool = NULL;
    if (rt->device_count < 2) {
        return;
    }
    PyThreadState *thread = cm_gil_give();
    while ((pool = cm_pool_next(rt, pool)) != NULL) {
        first = cm_first_failure(first, cm_pool_admit_peers(pool));
    }
    cm_gil_take(thread);
    /* The failure is only reported, since the call that noticed the new context is
     * about something else. */
    cm_py_report(state, first, NULL);
}
