/* SPDX-License-Identifier: Apache-2.0 */
/* The usual allocation, from a warm pool with the usual arguments, at the cost of a few
 * dozen instructions. Whatever is unusual takes the long way through constructors.c and
 * kind_constructors.c, which does the same. */
#include "python/arguments.h"
#include "python/buffer_object.h"
#include "python/constructors.h"
#include "python/pool_object.h"

/* Shape and dtype by place or name. False: there is more, or something else. */
static CM_INLINE bool
find_arguments(const cm_state *state, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames, PyObject **shape, PyObject **dtype)
{
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_Size(kwnames);
    if (nargs + named > 2 || nargs + named == 0) {
        return false;
    }
    *shape = nargs > 0 ? args[0] : NULL;
    *dtype = nargs > 1 ? args[1] : Py_None;
    for (Py_ssize_t i = 0; i < named; i++) {
        const PyObject *name = PyTuple_GetItem(kwnames, i);
        if (name == state->dtype_name) {
            *dtype = args[nargs + i];
        }
        else if (name == state->shape_name && nargs == 0) {
            *shape = args[nargs + i];
        }
        else {
            return false;
        }
    }
    return *shape != NULL;
}

/* What a new buffer is made of. */
typedef struct warm_plan {
    cm_pool *pool;
    cm_stream *stream; /* borrowed; NULL: none orders this kind */
    PyObject *dtype;   /* borrowed */
    int64_t itemsize;
    uint64_t nbytes; /* not 0 */
    int ndim;
    int64_t shape[CM_FEW_NDIM];
} warm_plan;

static CM_INLINE bool
plan_size(warm_plan *plan)
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

/* A root that nothing but its list has seen since it was kept, over `block`. */
static CM_INLINE void
fill_root(cm_state *state, cm_root *root, const warm_plan *plan, cm_block *block)
{
    cm_storage *storage = &root->storage;
    storage->generation = state->generation;
    const cm_pool_config *config = cm_pool_get_config(plan->pool);
    storage->device = config->device;
    storage->flags = config->flags;
    storage->nbytes = plan->nbytes;
    storage->pool = plan->pool;
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    if (plan->stream != NULL) {
        storage->first_use = plan->stream;
        storage->first_is_lent = true;
        storage->uses = &storage->first_use;
        storage->use_count = storage->use_capacity = 1;
    }
    cm_list_push_back(&state->storages, &storage->node);
    cm_buffer *buffer = &root->buffer;
    buffer->dtype = Py_NewRef(plan->dtype);
    buffer->itemsize = plan->itemsize;
    buffer->ndim = plan->ndim;
    int64_t stride = plan->itemsize;
    for (int i = plan->ndim - 1; i >= 0; i--) {
        buffer->few[i] = plan->shape[i];
        buffer->few[plan->ndim + i] = stride;
        stride *= plan->shape[i];
    }
}

/* From plan->pool, which nobody closes meanwhile. NULL without an exception: it takes
 * more. */
static CM_INLINE PyObject *
make(cm_state *state, cm_kind kind, warm_plan *plan)
{
    plan->stream = NULL;
    if (!cm_state_is_quiet(state) || state->free_roots[kind].first == NULL
        || !plan_size(plan)) {
        return NULL;
    }
    if (kind == CM_KIND_DEVICE) {
        plan->stream = cm_stream_lent(state, cm_pool_get_config(plan->pool)->device);
        if (plan->stream == NULL) {
            return NULL;
        }
    }
    cm_block *block = cm_pool_quick_alloc(plan->pool, plan->nbytes, plan->stream);
    if (CM_UNLIKELY(block == NULL)) {
        return NULL;
    }
    cm_root *root = cm_root_take(state, kind);
    fill_root(state, root, plan, block);
    return (PyObject *)root;
}

static CM_INLINE PyObject *
make_from(cm_state *state, cm_kind kind, cm_pool *pool, PyObject *shape,
          PyObject *dtype)
{
    warm_plan plan = {.pool = pool};
    if (pool == NULL || !cm_arg_try_shape(shape, CM_FEW_NDIM, &plan.ndim, plan.shape)) {
        return NULL;
    }
    plan.dtype = cm_numpy_known_dtype(dtype, &plan.itemsize);
    return plan.dtype == NULL ? NULL : make(state, kind, &plan);
}

/* The same inside a `with pool:` block. */
CM_COLD static PyObject *
make_current(cm_state *state, cm_kind kind, PyObject *shape, PyObject *dtype)
{
    unsigned flags = cm_buffer_default_flags(kind);
    int device = state->current_device;
    /* first of all: Python code may run */
    cm_pool *pool = cm_pool_find_current(state, kind, flags, device);
    if (pool == NULL) {
        if (PyErr_Occurred()) {
            PyErr_Clear(); /* the long way asks again */
            return NULL;
        }
        return make_from(state, kind, state->pools[kind][flags][device], shape, dtype);
    }
    PyObject *buffer = make_from(state, kind, pool, shape, dtype);
    cm_pool_release(pool); /* never the last: its Pool is open */
    return buffer;
}

static CM_INLINE PyObject *
warm_empty(cm_state *state, cm_kind kind, PyObject *const *args, Py_ssize_t nargs,
           PyObject *kwnames)
{
    PyObject *shape;
    PyObject *dtype;
    if (!find_arguments(state, args, nargs, kwnames, &shape, &dtype)) {
        return NULL;
    }
    if (CM_UNLIKELY(!cm_override_is_empty(&state->current_pool))) {
        return make_current(state, kind, shape, dtype);
    }
    unsigned flags = cm_buffer_default_flags(kind);
    cm_pool *pool = state->pools[kind][flags][state->current_device];
    return make_from(state, kind, pool, shape, dtype);
}

PyObject *
cm_warm_bytes(cm_state *state, cm_pool *pool, int64_t nbytes)
{
    warm_plan plan = {.pool = pool,
                      .dtype = state->uint8_dtype,
                      .itemsize = 1,
                      .ndim = 1,
                      .shape = {nbytes}};
    return make(state, cm_pool_get_config(pool)->kind, &plan);
}

#define WARM(name, kind)                                                               \
    PyObject *cm_warm_##name(cm_state *state, PyObject *const *args, Py_ssize_t nargs, \
                             PyObject *kwnames)                                        \
    {                                                                                  \
        return warm_empty(state, kind, args, nargs, kwnames);                          \
    }

WARM(pinned, CM_KIND_PINNED)
WARM(mapped, CM_KIND_MAPPED)
WARM(managed, CM_KIND_MANAGED)
WARM(device, CM_KIND_DEVICE)
