/* SPDX-License-Identifier: Apache-2.0 */
/* From kind, shape, order and dtype to a buffer over fresh memory. */
#include "python/pool/allocate.h"

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/pool/out_of_memory.h"

/* -- order ---------------------------------------------------------------------------- */

/* Strides without gaps in which axes[0] runs slowest and the last of `axes` fastest. */
static void
set_strides(int ndim, int64_t itemsize, const int64_t *shape, const int *axes,
            int64_t *strides)
{
    int64_t step = itemsize;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[axes[i]] = step;
        step *= shape[axes[i]] > 0 ? shape[axes[i]] : 1;
    }
}

static void
set_order(int ndim, char order, int *axes)
{
    for (int i = 0; i < ndim; i++) {
        axes[i] = order == 'F' ? ndim - 1 - i : i;
    }
}

static uint64_t
distance(int64_t stride)
{
    return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
}

/* The axes by falling distance of their elements; equals as in C order. */
static void
sort_axes(const cm_region *like, int *axes)
{
    set_order(like->ndim, 'C', axes);
    for (int i = 1; i < like->ndim; i++) {
        int axis = axes[i];
        int place = i;
        while (place > 0
               && distance(like->strides[axes[place - 1]])
                      < distance(like->strides[axis])) {
            axes[place] = axes[place - 1];
            place--;
        }
        axes[place] = axis;
    }
}

/* -- allocation ----------------------------------------------------------------------- */

/* Over a NumPy array of our own making: ordinary memory has no pool. */
static PyObject *
allocate_pageable(cm_state *state, PyObject *dtype, int ndim, const int64_t *shape,
                  const int *axes)
{
    uint64_t nbytes;
    int64_t itemsize = cm_numpy_itemsize(dtype);
    if (cm_arg_nbytes(ndim, shape, itemsize, &nbytes) < 0) {
        return NULL;
    }
    int64_t strides[CM_MAX_NDIM];
    set_strides(ndim, itemsize, shape, axes, strides);
    PyObject *array = cm_numpy_empty(dtype, ndim, shape, 'C');
    if (array == NULL) {
        return NULL;
    }
    cm_region region;
    PyObject *same_dtype = NULL;
    bool readonly;
    if (cm_numpy_region(array, &region, &same_dtype, &readonly) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    Py_DECREF(same_dtype);
    cm_storage *storage = cm_storage_new(state, CM_KIND_PAGEABLE, 0);
    if (storage == NULL) {
        Py_DECREF(array);
        return NULL;
    }
    storage->foreign = array;
    storage->host = region.host;
    storage->nbytes = nbytes;
    PyObject *buffer = cm_buffer_new(state, state->host_type, storage, 0, dtype, ndim,
                                     shape, ndim > 0 ? strides : NULL, false, NULL);
    cm_storage_release(storage, true);
    return buffer;
}

/* The last holder of a pool waits in the runtime; beside a storage one is never the
 * last.
 */
static void
let_go(cm_state *state, cm_pool *pool, bool perhaps_last)
{
    if (!perhaps_last) {
        cm_pool_release(pool);
        return;
    }
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    cm_pool_release(pool);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
}

/* Memory from `pool` for a new storage, first used on `stream` (NULL: any); nbytes 0
 * takes no block: host and address stay NULL. When there is not enough, all that cumem
 * knows is tried before OutOfMemoryError. 0 or -1. The caller keeps the pool meanwhile.
 */
static int
fill_storage(cm_storage *storage, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    storage->flags = cm_pool_get_config(pool)->flags;
    storage->nbytes = nbytes;
    if (CM_UNLIKELY(nbytes == 0)) {
        storage->pool = cm_pool_hold(pool);
        return 0;
    }
    cm_block *block = cm_pool_quick_alloc(pool, nbytes, stream);
    if (CM_UNLIKELY(block == NULL)) {
        block = cm_block_alloc(storage->state, pool, nbytes, stream);
        if (block == NULL) {
            return -1;
        }
    }
    storage->pool = pool;
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    if (stream != NULL) {
        cm_storage_set_first_use(storage, stream);
    }
    return 0;
}

/* `axes` as for set_strides(); NULL: C order. */
static PyObject *
allocate_from(cm_state *state, cm_pool *pool, PyObject *dtype, int ndim,
              const int64_t *shape, const int *axes, cm_stream *stream)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    int64_t itemsize = cm_numpy_itemsize(dtype);
    uint64_t nbytes;
    if (cm_arg_nbytes(ndim, shape, itemsize, &nbytes) < 0) {
        return NULL;
    }
    cm_inline_buffer *root =
        cm_inline_buffer_new(state, config->kind, config->device, dtype, ndim);
    if (CM_UNLIKELY(root == NULL)) {
        return NULL;
    }
    root->buffer.itemsize = itemsize;
    int64_t *extents = root->buffer.extents;
    for (int i = 0; i < ndim; i++) {
        extents[i] = shape[i];
    }
    if (axes != NULL) {
        set_strides(ndim, itemsize, shape, axes, extents + ndim);
    }
    else {
        cm_buffer_set_c_strides(ndim, itemsize, shape, extents + ndim);
    }
    if (CM_UNLIKELY(fill_storage(&root->storage, pool, nbytes, stream) < 0)) {
        Py_DECREF((PyObject *)root);
        return NULL;
    }
    return (PyObject *)root;
}

static PyObject *
allocate(cm_state *state, cm_pool_object *wanted, cm_kind kind, unsigned flags,
         int device, PyObject *dtype, int ndim, const int64_t *shape, const int *axes,
         cm_stream *stream)
{
    cm_pool *pool = cm_pool_choose(state, wanted, kind, flags, device);
    if (pool == NULL) {
        return NULL;
    }
    PyObject *buffer = allocate_from(state, pool, dtype, ndim, shape, axes, stream);
    let_go(state, pool, buffer == NULL);
    return buffer;
}

PyObject *
cm_buffer_allocate(cm_state *state, cm_pool_object *pool, cm_kind kind, unsigned flags,
                   int device, PyObject *dtype, int ndim, const int64_t *shape,
                   char order, cm_stream *stream)
{
    int axes[CM_MAX_NDIM];
    if (kind == CM_KIND_PAGEABLE) {
        set_order(ndim, order, axes);
        return allocate_pageable(state, dtype, ndim, shape, axes);
    }
    const int *given = NULL;
    if (order == 'F' && ndim > 1) {
        set_order(ndim, order, axes);
        given = axes;
    }
    return allocate(state, pool, kind, flags, device, dtype, ndim, shape, given,
                    stream);
}

PyObject *
cm_buffer_allocate_like(cm_state *state, cm_pool_object *pool, cm_kind kind,
                        unsigned flags, int device, PyObject *dtype,
                        const cm_region *like, char order, cm_stream *stream)
{
    int axes[CM_MAX_NDIM] = {0};
    bool is_c = cm_region_is_c_contiguous(like);
    if (order == 'A' || order == 'K') {
        bool only_f = cm_region_is_f_contiguous(like) && !is_c;
        order = only_f ? 'F' : (order == 'A' || is_c) ? 'C' : 'K';
    }
    if (order == 'K') {
        sort_axes(like, axes);
    }
    else {
        set_order(like->ndim, order, axes);
    }
    if (kind == CM_KIND_PAGEABLE) {
        return allocate_pageable(state, dtype, like->ndim, like->shape, axes);
    }
    return allocate(state, pool, kind, flags, device, dtype, like->ndim, like->shape,
                    axes, stream);
}
