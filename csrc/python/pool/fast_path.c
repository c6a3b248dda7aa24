/* SPDX-License-Identifier: Apache-2.0 */
/* Makes allocations whose arguments have the usual forms. There are three ways, and
 * each gives the same result as the next one would:
 *
 *   make_warm()    the usual one, in a few dozen instructions: a dtype that is known,
 *                  few dimensions, a block that the pool has at hand, and a buffer that
 *                  was dropped before
 *   make_cold()    the rest of what comes here; the pool may have to grow or to wait,
 *                  in cm_buffer_allocate() (allocate.c)
 *   the long way   any other argument, and a pool that is not there yet: NULL without
 *                  an exception sends the caller to copy/constructors.c, which ends in
 *                  cm_buffer_allocate() as well
 *
 * make_current() comes before the first two where a `with` block, a device or a pool
 * says which pool is meant. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/storage.h"
#include "python/core/arguments.h"
#include "python/pool/allocate.h"

/* -- arguments -------------------------------------------------------------------------- */

enum { SLOT_COUNT = CM_WORD_pool + 1 }; /* the words that name parameters */

/* Put arguments into the slots of their names. The first `positional` may be given by
 * position. Returns false for arguments of any other form. */
static CM_INLINE bool
find_arguments(const cm_state *state, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames, Py_ssize_t positional, PyObject **values)
{
    for (int i = 0; i < SLOT_COUNT; i++) {
        values[i] = NULL;
    }
    if (nargs > positional) {
        return false;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        values[i] = args[i];
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_Size(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        const PyObject *name = PyTuple_GetItem(kwnames, i);
        Py_ssize_t slot = nargs;
        while (slot < SLOT_COUNT && name != state->words[slot]) {
            slot++;
        }
        if (slot == SLOT_COUNT) {
            return false;
        }
        values[slot] = args[nargs + i];
    }
    return values[CM_WORD_shape] != NULL;
}

static CM_INLINE bool
find_kind(const cm_state *state, PyObject *value, cm_kind *out)
{
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        if (value == state->kind_words[kind]) {
            *out = (cm_kind)kind;
            return !cm_kind_is_pageable((cm_kind)kind);
        }
    }
    /* a name that was read from a file or a command line is not the interned object */
    return cm_arg_try_kind(value, out);
}

static CM_INLINE bool
find_device(const cm_state *state, PyObject *value, int *out)
{
    int64_t index = 0;
    int count = state->runtime == NULL ? 0 : state->runtime->device_count;
    if (!cm_arg_try_length(value, &index)) {
        while (index < count && value != state->devices[index]) {
            index++;
        }
    }
    *out = (int)index;
    return index < count;
}

/* -- making ----------------------------------------------------------------------------- */

/* The parts of which a new buffer is made. */
typedef struct fast_plan {
    cm_pool *pool;
    cm_stream *stream; /* borrowed; NULL if no stream orders this kind */
    PyObject *dtype;   /* borrowed */
    int64_t itemsize;
    uint64_t nbytes; /* never 0 */
    bool fortran;
    int ndim;
    const int64_t *shape; /* borrowed */
} fast_plan;

static CM_INLINE bool
plan_order(const cm_state *state, const PyObject *order, fast_plan *plan)
{
    plan->fortran = order == state->words[CM_WORD_F];
    return plan->fortran || !cm_arg_is_given(order) || order == state->words[CM_WORD_C];
}

/* Plan the stream. If no stream orders the kind, a call with an argument `stream` takes
 * the long way. */
static CM_INLINE bool
plan_stream(const cm_state *state, cm_kind kind, PyObject *object, fast_plan *plan)
{
    plan->stream = NULL;
    if (!cm_kind_is_ordered(kind)) {
        return object == NULL;
    }
    int device = cm_pool_get_config(plan->pool)->device;
    if (!cm_arg_is_given(object)) {
        plan->stream = cm_stream_lent(state, device);
        return plan->stream != NULL;
    }
    if (Py_TYPE(object) != state->stream_type) {
        return false;
    }
    plan->stream = ((cm_stream_object *)(void *)object)->stream;
    return plan->stream != NULL && plan->stream->device == device;
}

static CM_INLINE bool
plan_size(fast_plan *plan)
{
    int64_t nbytes = plan->itemsize;
    for (int i = 0; i < plan->ndim; i++) {
        if (__builtin_mul_overflow(nbytes, plan->shape[i], &nbytes)) {
            return false;
        }
    }
    plan->nbytes = (uint64_t)nbytes;
    return nbytes != 0;
}

static CM_INLINE void
fill_extents(cm_buffer *buffer, const fast_plan *plan)
{
    int64_t stride = plan->itemsize;
    for (int i = plan->ndim - 1; i >= 0; i--) {
        int axis = plan->fortran ? plan->ndim - 1 - i : i;
        buffer->few[axis] = plan->shape[axis];
        buffer->few[plan->ndim + axis] = stride;
        stride *= plan->shape[axis];
    }
}

/* Turn a root that was kept for reuse into a buffer over `block`. Nobody else knows of
 * the root. */
static CM_INLINE void
fill_root(cm_state *state, cm_inline_buffer *root, const fast_plan *plan,
          cm_block *block)
{
    cm_storage *storage = &root->storage;
    const cm_pool_config *config = cm_pool_get_config(plan->pool);
    storage->device = config->device;
    storage->flags = config->flags;
    storage->nbytes = plan->nbytes;
    storage->pool = plan->pool;
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    cm_storage_enrol(storage, config);
    if (plan->stream != NULL) {
        cm_storage_set_first_use(storage, plan->stream);
    }
    cm_storage_trace(storage);
    cm_list_push_back(&state->storages, &storage->node);
    cm_buffer *buffer = &root->buffer;
    buffer->dtype = Py_NewRef(plan->dtype);
    buffer->itemsize = plan->itemsize;
    buffer->ndim = plan->ndim;
    fill_extents(buffer, plan);
}

/* Make the buffer from plan->pool, which nobody closes meanwhile. Returns NULL without
 * an exception if the call has to take the long way. */
static CM_INLINE PyObject *
take_planned(cm_state *state, cm_kind kind, const fast_plan *plan)
{
    if (!cm_state_is_quiet(state) || state->free_inline[kind].first == NULL) {
        return NULL;
    }
    cm_block *block = cm_pool_try_alloc(plan->pool, plan->nbytes, plan->stream, 0);
    if (CM_UNLIKELY(block == NULL)) {
        return NULL;
    }
    cm_inline_buffer *root = cm_inline_buffer_take(state, kind);
    fill_root(state, root, plan, block);
    return (PyObject *)root;
}

/* A request: the arguments in the slots of their names, and the shape, which has been
 * read. Reading it may run Python code (an __index__()), so it is done before anything
 * is read that such code could change. */
typedef struct fast_request {
    PyObject *values[SLOT_COUNT];
    int ndim;
    int64_t shape[CM_MAX_NDIM];
} fast_request;

/* Do the same as make_warm() for a request that it cannot serve: for any dtype or
 * number of dimensions, for a size of which the pool has no free block, or if no spare
 * struct of a buffer is left. This may run Python code, so it holds everything that it
 * uses. */
CM_COLD static PyObject *
make_cold(cm_state *state, cm_kind kind, cm_pool *pool, const fast_request *asked)
{
    cm_region like;
    fast_plan plan = {.pool = pool};
    if (!plan_order(state, asked->values[CM_WORD_order], &plan)
        || !plan_stream(state, kind, asked->values[CM_WORD_stream], &plan)) {
        return NULL;
    }
    like.ndim = asked->ndim;
    for (int i = 0; i < asked->ndim; i++) {
        like.shape[i] = asked->shape[i];
    }
    cm_state_enter(state);
    pool = cm_pool_hold(pool);
    cm_stream *stream = plan.stream == NULL ? NULL : cm_stream_take(state, plan.stream);
    PyObject *buffer = NULL;
    PyObject *dtype = cm_numpy_dtype(asked->values[CM_WORD_dtype]);
    if (dtype != NULL && cm_state_runtime(state) != NULL) {
        buffer = cm_buffer_allocate(state, pool, dtype, &like, plan.fortran ? 'F' : 'C',
                                    stream);
    }
    else {
        cm_pool_let_go(state, pool);
    }
    Py_XDECREF(dtype);
    cm_stream_give(state, stream);
    cm_state_leave(state);
    return buffer;
}

static CM_INLINE PyObject *
make_warm(cm_state *state, cm_kind kind, cm_pool *pool, const fast_request *asked)
{
    fast_plan plan = {.pool = pool, .ndim = asked->ndim, .shape = asked->shape};
    if (asked->ndim > CM_FEW_NDIM
        || !plan_order(state, asked->values[CM_WORD_order], &plan)
        || !plan_stream(state, kind, asked->values[CM_WORD_stream], &plan)) {
        return NULL;
    }
    PyObject *dtype = asked->values[CM_WORD_dtype];
    plan.dtype = cm_numpy_known_dtype(dtype == NULL ? Py_None : dtype, &plan.itemsize);
    if (plan.dtype == NULL || !plan_size(&plan)) {
        return NULL;
    }
    return take_planned(state, kind, &plan);
}

static CM_INLINE PyObject *
make_from(cm_state *state, cm_kind kind, cm_pool *pool, const fast_request *asked)
{
    if (pool == NULL) {
        return NULL;
    }
    PyObject *made = make_warm(state, kind, pool, asked);
    if (CM_LIKELY(made != NULL)) {
        return made;
    }
    return make_cold(state, kind, pool, asked);
}

/* Do the same as fast_empty() if `with` blocks were entered, or if a device or a pool
 * is given. It first looks up what is current in this context, since that may run
 * Python code. */
CM_COLD static PyObject *
make_current(cm_state *state, cm_kind kind, const cm_pool_object *given,
             fast_request *asked)
{
    PyObject **values = asked->values;
    int device = given != NULL ? given->config.device : 0;
    PyObject *place = values[CM_WORD_device];
    if (cm_arg_is_given(place)) {
        if (!find_device(state, place, &device)
            || (given != NULL && device != given->config.device)) {
            return NULL;
        }
    }
    else if (given == NULL) {
        device = cm_state_device(state);
    }
    PyObject *stream = NULL;
    if (cm_kind_is_ordered(kind) && !cm_arg_is_given(values[CM_WORD_stream])
        && cm_state_has_blocks(state)
        && !cm_override_is_empty(&state->current_stream)) {
        stream = cm_current_stream(state, device);
        values[CM_WORD_stream] = stream;
    }
    unsigned flags = cm_kinds[kind].flags;
    cm_pool *current = NULL;
    if (given == NULL && cm_state_has_blocks(state)
        && !cm_override_is_empty(&state->current_pool)) {
        current = cm_pool_find_current(state, kind, flags, device);
    }
    PyObject *buffer = NULL;
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* the long way asks again */
    }
    else {
        cm_pool *pool = current;
        if (given != NULL) {
            pool = given->pool;
        }
        else if (pool == NULL) {
            pool = *cm_state_pool_slot(state, kind, flags, device);
        }
        buffer = make_from(state, kind, pool, asked);
    }
    if (current != NULL) {
        cm_pool_release(current); /* never the last hold: its Pool is open */
    }
    Py_XDECREF(stream);
    return buffer;
}

static CM_INLINE PyObject *
fast_empty(cm_state *state, cm_kind kind, fast_request *asked)
{
    PyObject *const *values = asked->values;
    PyObject *object = values[CM_WORD_pool];
    const cm_pool_object *given = NULL;
    if (CM_UNLIKELY(cm_arg_is_given(object))) {
        given = (const cm_pool_object *)(void *)object;
        if (Py_TYPE(object) != state->pool_type || given->config.kind != kind) {
            return NULL;
        }
    }
    if (CM_UNLIKELY(given != NULL || cm_arg_is_given(values[CM_WORD_device])
                    || cm_state_has_blocks(state))) {
        return make_current(state, kind, given, asked);
    }
    unsigned flags = cm_kinds[kind].flags;
    cm_pool *pool = *cm_state_pool_slot(state, kind, flags, cm_state_device(state));
    return make_from(state, kind, pool, asked);
}

static CM_INLINE int
read_shape(fast_request *asked)
{
    PyObject *shape = asked->values[CM_WORD_shape];
    if (CM_LIKELY(cm_arg_try_shape(shape, &asked->ndim, asked->shape))) {
        return 0;
    }
    return cm_arg_shape(shape, "shape", &asked->ndim, asked->shape);
}

/* -- entries ---------------------------------------------------------------------------- */

PyObject *
cm_fast_kind(cm_state *state, cm_kind kind, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    fast_request asked;
    if (!find_arguments(state, args, nargs, kwnames, 2, asked.values)
        || asked.values[CM_WORD_kind] != NULL || read_shape(&asked) < 0) {
        return NULL;
    }
    return fast_empty(state, kind, &asked);
}

/* Do the same as fast_empty(), with the kind as one of the arguments. */
static CM_INLINE PyObject *
fast_any(cm_state *state, fast_request *asked)
{
    cm_kind kind = CM_KIND_DEVICE;
    PyObject *given = asked->values[CM_WORD_pool];
    if (asked->values[CM_WORD_kind] != NULL) {
        if (!find_kind(state, asked->values[CM_WORD_kind], &kind)) {
            return NULL;
        }
    }
    else if (cm_arg_is_given(given) && Py_TYPE(given) == state->pool_type) {
        kind = ((const cm_pool_object *)(void *)given)->config.kind;
    }
    return fast_empty(state, kind, asked);
}

PyObject *
cm_fast_any(cm_state *state, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    fast_request asked;
    if (!find_arguments(state, args, nargs, kwnames, 3, asked.values)
        || read_shape(&asked) < 0) {
        return NULL;
    }
    return fast_any(state, &asked);
}

PyObject *
cm_fast_read(cm_state *state, PyObject *const *values)
{
    fast_request asked;
    for (int i = 0; i < SLOT_COUNT; i++) {
        asked.values[i] = values[i];
    }
    return read_shape(&asked) < 0 ? NULL : fast_any(state, &asked);
}

PyObject *
cm_fast_bytes(cm_state *state, const cm_pool_object *self, int64_t nbytes,
              PyObject *stream)
{
    cm_kind kind = self->config.kind;
    PyObject *current = NULL;
    if (cm_kind_is_ordered(kind) && stream == NULL && cm_state_has_blocks(state)
        && !cm_override_is_empty(&state->current_stream)) {
        current = cm_current_stream(state, self->config.device);
        if (current == NULL) {
            PyErr_Clear(); /* the long way asks again */
            return NULL;
        }
        stream = current;
    }
    fast_plan plan = {.pool = self->pool,
                      .dtype = state->uint8_dtype,
                      .itemsize = 1,
                      .nbytes = (uint64_t)nbytes,
                      .ndim = 1,
                      .shape = &nbytes};
    PyObject *buffer = NULL;
    if (plan.pool != NULL && nbytes != 0 && plan_stream(state, kind, stream, &plan)) {
        buffer = take_planned(state, kind, &plan);
    }
    Py_XDECREF(current);
    return buffer;
}
