/* SPDX-License-Identifier: Apache-2.0 */
/* Pools as objects: how they are made, lent to calls and closed, the current one, and
 * all of them. */
#include "python/pool/pool_object.h"

#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/wait.h"

/* -- one ---------------------------------------------------------------------------- */

PyObject *
cm_pool_object_new(cm_state *state, cm_pool *pool, uint64_t number)
{
    if (state->pool_type == NULL) { /* it is told of as it is made */
        PyObject *pools = cm_package_load("pools");
        Py_XDECREF(pools);
        if (pools == NULL) {
            return NULL;
        }
    }
    PyObject *op = PyType_GenericAlloc(state->pool_type, 0);
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->pool = cm_pool_hold(pool);
    self->config = *cm_pool_get_config(pool);
    self->config.budget = NULL;
    self->generation = state->generation;
    self->number = number;
    cm_list_init(&self->node);
    cm_list_push_back(&state->pool_objects, &self->node);
    return op;
}

/* Borrowed; NULL with ValueError where it is closed. */
static cm_pool *
get_open(cm_pool_object *self)
{
    if (self->pool != NULL && cm_state_runtime(self->state) == NULL) {
        return NULL;
    }
    if (self->pool == NULL) { /* also when what was deferred just now closed it */
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
    Py_BEGIN_ALLOW_THREADS
    cm_pool_release(pool);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
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
        self->state->pools_were_dropped = true;
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
    state->pools_were_dropped = false;
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

/* -- all of them -------------------------------------------------------------------- */

static bool
has(const cm_pool_entry *entries, size_t count, const cm_pool *pool)
{
    while (count > 0 && entries[count - 1].pool != pool) { /* the last is likeliest */
        count--;
    }
    return count > 0;
}

/* Default pools, those of objects in the order in which they were made, and those that
 * were closed or dropped and still keep a live block. */
int
cm_pools_take_all(cm_state *state, cm_pool_entry **out, size_t *count)
{
    bool looks = state->pools_were_dropped;
    size_t most = CM_DEFAULT_POOL_COUNT + cm_list_count(&state->pool_objects)
                  + (looks ? cm_list_count(&state->storages) : 0);
    cm_pool_entry *entries = malloc(most * sizeof(*entries));
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t found = 0;
    for (int i = 0; i < CM_DEFAULT_POOL_COUNT; i++) {
        if (state->pools[i] != NULL) {
            entries[found++] =
                (cm_pool_entry){cm_pool_hold(state->pools[i]),
                                i < CM_STAGING_POOLS ? 0 : UINT64_MAX - 1};
        }
    }
    const cm_list *objects = &state->pool_objects;
    for (const cm_list *n = objects->next; n != objects; n = n->next) {
        const cm_pool_object *object = CM_LIST_ENTRY(n, cm_pool_object, node);
        if (object->number != 0) {
            entries[found++] =
                (cm_pool_entry){cm_pool_hold(object->pool), object->number};
        }
    }
    size_t known = found;
    const cm_list *storages = &state->storages;
    for (const cm_list *n = storages->next; looks && n != storages; n = n->next) {
        cm_pool *pool = CM_LIST_ENTRY(n, cm_storage, node)->pool;
        if (pool != NULL && !has(entries, found, pool)) {
            entries[found++] = (cm_pool_entry){cm_pool_hold(pool), UINT64_MAX};
        }
    }
    state->pools_were_dropped = found > known;
    cm_state_enter(state);
    *out = entries;
    *count = found;
    return 0;
}

void
cm_pools_give_all(cm_state *state, cm_pool_entry *entries, size_t count)
{
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count; i++) {
        cm_pool_release(entries[i].pool);
    }
    Py_END_ALLOW_THREADS
    free(entries);
    cm_state_leave(state);
}

/* -- the one that serves a request --------------------------------------------------- */

/* `flags` other than the kind's usual ones are served by pools that have them alone. */
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
        (void)cm_package_refuse("pools", "refuse_request",
                                Py_BuildValue("(ssii)", cm_kinds[own->kind].text,
                                              cm_kinds[kind].text, own->device,
                                              device));
        return NULL;
    }
    if (wanted != NULL) {
        cm_pool *pool = get_open(wanted);
        return pool == NULL ? NULL : cm_pool_hold(pool);
    }
    if (CM_UNLIKELY(!cm_override_is_empty(&state->current_pool))) {
        cm_pool *current = cm_pool_find_current(state, kind, flags, device);
        if (current != NULL || PyErr_Occurred()) {
            return current;
        }
    }
    cm_pool *pool = cm_state_pool(state, kind, flags, device);
    return pool == NULL ? NULL : cm_pool_hold(pool);
}

int
cm_pools_trim(cm_state *state, cm_pools_trim_request *r)
{
    cm_pool_entry *entries;
    size_t count;
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        return -1;
    }
    bool cancelled = false;
    cm_pool_waiter waiter = {state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    for (size_t i = 0; i < count && !cancelled; i++) {
        cm_pool *pool = entries[i].pool;
        if (r->wants != NULL && !r->wants(r, pool)) {
            continue;
        }
        uint64_t released = 0;
        cm_status status =
            cm_pool_trim(pool, r->keep_nbytes, r->wait ? &hooks : NULL, &released);
        cancelled = status.code == CM_ECANCELLED;
        r->refused = cm_first_failure(r->refused, status);
        r->released_nbytes += released;
        r->count++;
        if (r->keep_nbytes > 0) {
            cm_pool_counters counters;
            cm_pool_read(pool, &counters);
            uint64_t kept = counters.cached_nbytes;
            r->keep_nbytes = kept < r->keep_nbytes ? r->keep_nbytes - kept : 0;
        }
    }
    PyEval_RestoreThread(waiter.thread);
    cm_pools_give_all(state, entries, count);
    return cancelled ? -1 : 0; /* with the exception of a signal's handler */
}

/* -- peers: a device that has got a context reaches the memory of all pools ------------- */

void
cm_pools_admit_peers(cm_state *state)
{
    cm_pool_entry *entries;
    size_t count;
    state->context_count = atomic_load(&state->runtime->context_count);
    if (state->runtime->device_count < 2) {
        return;
    }
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        PyErr_WriteUnraisable(NULL);
        return;
    }
    cm_status first = cm_ok();
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count; i++) {
        first = cm_first_failure(first, cm_pool_admit_peers(entries[i].pool));
    }
    Py_END_ALLOW_THREADS
    cm_pools_give_all(state, entries, count);
    cm_py_report(state, first, NULL); /* the call that noticed is about another thing */
}
