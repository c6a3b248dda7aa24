/* SPDX-License-Identifier: Apache-2.0 */
/* Pools as objects: how they are made, lent to calls, closed, and all of them found. */
#include "python/pool/pool_object.h"

#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"

/* -- one ---------------------------------------------------------------------------- */

PyObject *
cm_pool_object_new(cm_state *state, cm_pool *pool, uint64_t number)
{
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

/* The state is entered: a collection may run Python code while this is made. */
static PyObject *
find_default(cm_state *state, cm_kind kind, int device)
{
    unsigned flags = cm_buffer_default_flags(kind);
    cm_pool *pool = cm_state_pool(state, kind, flags, device);
    if (pool == NULL) {
        return NULL;
    }
    if (state->default_pools == NULL) {
        state->default_pools = PyDict_New();
    }
    PyObject *key = Py_BuildValue("(ii)", (int)kind, device);
    PyObject *op = NULL;
    if (state->default_pools != NULL && key != NULL) {
        op = Py_XNewRef(PyDict_GetItemWithError(state->default_pools, key));
        if (op == NULL && !PyErr_Occurred()) {
            op = cm_pool_object_new(state, pool, 0);
            if (op != NULL && PyDict_SetItem(state->default_pools, key, op) < 0) {
                Py_CLEAR(op);
            }
        }
    }
    Py_XDECREF(key);
    return op;
}

PyObject *
cm_pool_object_default(cm_state *state, cm_kind kind, int device)
{
    cm_state_enter(state);
    PyObject *op = find_default(state, kind, device);
    cm_state_leave(state);
    return op;
}

cm_pool *
cm_pool_object_take(PyObject *op)
{
    cm_pool_object *self = (cm_pool_object *)(void *)op;
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
        return NULL;
    }
    if (cm_state_runtime(self->state) == NULL) {
        return NULL;
    }
    if (self->pool == NULL) { /* what was deferred closed it */
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
        return NULL;
    }
    cm_state_enter(self->state);
    return cm_pool_hold(self->pool);
}

/* The last release frees what is cached and waits for what is in flight. In a forked
 * child it does nothing. */
static void
release(cm_state *state, cm_pool *pool)
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
        release(state, pool);
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
        release(self->state, pool);
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
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (Py_TYPE(object) != state->pool_type) {
        return cm_arg_refuse(object, "pool", "a Pool or None");
    }
    *out = (cm_pool_object *)(void *)object;
    return 0;
}

int
cm_pool_object_check(const cm_pool_object *self, cm_kind kind, unsigned flags,
                     int device)
{
    const cm_pool_config *config = &self->config;
    if (config->kind != kind) {
        PyErr_Format(PyExc_ValueError,
                     "pool is one of %s memory, but %s memory is asked for",
                     cm_kind_name(config->kind), cm_kind_name(kind));
        return -1;
    }
    if (config->device != device) {
        PyErr_Format(PyExc_ValueError,
                     "pool is of device %d, but memory of device %d is asked for",
                     config->device, device);
        return -1;
    }
    if (flags != config->flags && flags != cm_buffer_default_flags(kind)) {
        PyErr_SetString(PyExc_ValueError,
                        "pool was made with other values of portable, write_combined "
                        "or attach: leave them out beside pool=");
        return -1;
    }
    return 0;
}

/* -- all of them -------------------------------------------------------------------- */

typedef struct collection {
    cm_pool_entry *entries;
    size_t count;
    size_t room;
} collection;

static int
add(collection *all, cm_pool *pool, uint64_t number)
{
    if (all->count == all->room) {
        size_t room = all->room == 0 ? 16 : all->room * 2;
        cm_pool_entry *entries = realloc(all->entries, room * sizeof(*entries));
        if (entries == NULL) {
            return -1;
        }
        all->entries = entries;
        all->room = room;
    }
    all->entries[all->count++] = (cm_pool_entry){cm_pool_hold(pool), number};
    return 0;
}

static bool
has(const collection *all, const cm_pool *pool)
{
    for (size_t i = all->count; i > 0; i--) { /* the last found is the likeliest */
        if (all->entries[i - 1].pool == pool) {
            return true;
        }
    }
    return false;
}

/* Default pools, then those of objects, in the order in which they were made. */
static int
add_known(cm_state *state, collection *all)
{
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        for (int flags = 0; flags < CM_POOL_FLAG_SLOTS; flags++) {
            for (int device = 0; device < CM_MAX_DEVICES; device++) {
                cm_pool *pool = state->pools[kind][flags][device];
                if (pool != NULL && add(all, pool, 0) < 0) {
                    return -1;
                }
            }
        }
    }
    for (cm_list *n = state->pool_objects.next; n != &state->pool_objects;
         n = n->next) {
        cm_pool_object *object = CM_LIST_ENTRY(n, cm_pool_object, node);
        if (object->number != 0 && add(all, object->pool, object->number) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Pools that were closed or dropped and still keep a live block. */
static int
add_dropped(cm_state *state, collection *all)
{
    size_t known = all->count;
    for (cm_list *n = state->storages.next; n != &state->storages; n = n->next) {
        cm_storage *storage = CM_LIST_ENTRY(n, cm_storage, node);
        if (storage->pool != NULL && !has(all, storage->pool)
            && add(all, storage->pool, UINT64_MAX) < 0) {
            return -1;
        }
    }
    state->pools_were_dropped = all->count > known;
    return 0;
}

int
cm_pools_take_all(cm_state *state, cm_pool_entry **out, size_t *count)
{
    collection all = {0};
    int result = add_known(state, &all);
    if (result == 0 && state->pools_were_dropped) {
        result = add_dropped(state, &all);
    }
    cm_state_enter(state);
    if (result < 0) {
        cm_pools_give_all(state, all.entries, all.count);
        PyErr_NoMemory();
        return -1;
    }
    *out = all.entries;
    *count = all.count;
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
