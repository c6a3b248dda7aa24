/* SPDX-License-Identifier: Apache-2.0 */
/* Makes buffers, finds where their bytes are, and ends buffers. A buffer is allocated
 * alone, or in one piece with its storage.
 *
 * Like NumPy arrays, buffers take no part in garbage collection. What a storage keeps
 * alive is shared by all its buffers, so no single buffer could visit it. A cycle could
 * only arise if the owner of foreign memory stored the buffer that was made of that
 * memory. */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/core/errors.h"

bool
cm_buffer_check(const cm_state *state, PyObject *object)
{
    return PyObject_TypeCheck(object, state->buffer_type);
}

/* Make room for shape and strides. Returns 0, or -1 with MemoryError. */
static int
make_extents(cm_buffer *self, int ndim)
{
    self->extents = self->few;
    if (CM_UNLIKELY(ndim > CM_FEW_NDIM)) {
        self->extents = PyMem_Malloc(3 * (size_t)ndim * sizeof(*self->extents));
        if (self->extents == NULL) {
            self->extents = self->few;
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

PyObject *
cm_buffer_new(cm_state *state, PyTypeObject *type, cm_storage *storage, int64_t offset,
              PyObject *dtype, int ndim, const int64_t *shape, const int64_t *strides,
              bool readonly, PyObject *base)
{
    cm_buffer *self = PyObject_New(cm_buffer, type);
    if (self == NULL) {
        return NULL;
    }
    if (make_extents(self, ndim) < 0) {
        PyObject_Free(self);
        Py_DECREF(type);
        return NULL;
    }
    if (ndim > 0) {
        memcpy(self->extents, shape, (size_t)ndim * sizeof(*shape));
        memcpy(self->extents + ndim, strides, (size_t)ndim * sizeof(*strides));
    }
    self->state = state;
    self->storage = cm_storage_hold(storage);
    self->dtype = Py_NewRef(dtype);
    self->base = Py_XNewRef(base);
    self->weakrefs = NULL;
    self->offset = offset;
    self->itemsize = cm_numpy_itemsize(dtype);
    self->ndim = ndim;
    self->readonly = readonly || storage->readonly;
    self->with_ended = false;
    self->as_device = base != NULL && type == state->buffer_types[CM_KIND_DEVICE]
                      && !cm_kind_is_on_device(storage->kind);
    return (PyObject *)self;
}

PyObject *
cm_buffer_new_view(cm_buffer *parent, PyTypeObject *type, int64_t offset,
                   PyObject *dtype, int ndim, const int64_t *shape,
                   const int64_t *strides)
{
    PyObject *base = parent->base != NULL ? parent->base : (PyObject *)parent;
    return cm_buffer_new(
        parent->state, type != NULL ? type : Py_TYPE((PyObject *)parent),
        parent->storage, offset, dtype, ndim, shape, strides, parent->readonly, base);
}

void
cm_buffer_dealloc(PyObject *object)
{
    cm_buffer *self = (cm_buffer *)object;
    if (CM_UNLIKELY(self->weakrefs != NULL)) {
        PyObject_ClearWeakRefs(object);
    }
    if (CM_UNLIKELY(self->extents != self->few)) {
        PyMem_Free(self->extents);
    }
    cm_storage *storage = self->storage;
    PyObject *dtype = self->dtype;
    if (storage == &((cm_inline_buffer *)self)->storage) {
        cm_storage_release(storage, true); /* the object ends with its storage */
        Py_DECREF(dtype);
        return;
    }
    PyTypeObject *type = Py_TYPE(object);
    PyObject *base = self->base;
    PyObject_Free(self);
    /* Releasing the storage may release the GIL. The object is gone by then, so that no
     * other thread sees it. */
    cm_storage_release(storage, true);
    Py_DECREF(dtype);
    Py_XDECREF(base);
    Py_DECREF(type);
}

uint64_t
cm_buffer_nbytes(const cm_buffer *buffer)
{
    const int64_t *shape = cm_buffer_shape(buffer);
    uint64_t nbytes = (uint64_t)buffer->itemsize;
    for (int i = 0; i < buffer->ndim; i++) {
        nbytes *= (uint64_t)shape[i];
    }
    return nbytes;
}

int64_t
cm_buffer_size(const cm_buffer *buffer)
{
    const int64_t *shape = cm_buffer_shape(buffer);
    int64_t size = 1;
    for (int i = 0; i < buffer->ndim; i++) {
        size *= shape[i];
    }
    return size;
}

bool
cm_buffer_is_contiguous(const cm_buffer *buffer, bool fortran)
{
    int64_t nearest = buffer->itemsize;
    bool is_dense = true;
    for (int place = 0; place < buffer->ndim; place++) {
        int axis = fortran ? place : buffer->ndim - 1 - place;
        int64_t length = cm_buffer_shape(buffer)[axis];
        if (length == 0) {
            return true;
        }
        if (length > 1) {
            is_dense = is_dense && cm_buffer_strides(buffer)[axis] == nearest;
            nearest *= length;
        }
    }
    return is_dense;
}

void *
cm_buffer_host(const cm_buffer *buffer)
{
    const cm_storage *storage = buffer->storage;
    if (storage->host == NULL || cm_kind_is_on_device(storage->copy_kind)
        || buffer->as_device || cm_buffer_nbytes(buffer) == 0) {
        return NULL;
    }
    return (char *)storage->host + buffer->offset;
}

cm_address
cm_buffer_address(const cm_buffer *buffer)
{
    const cm_storage *storage = buffer->storage;
    if (storage->address == 0 || cm_buffer_nbytes(buffer) == 0) {
        return 0;
    }
    return storage->address + (uint64_t)buffer->offset;
}

static int
refuse_ended(void)
{
    PyErr_SetString(PyExc_ValueError, "the buffer is closed: its with block has ended");
    return -1;
}

int
cm_buffer_check_open(const cm_buffer *buffer)
{
    return CM_UNLIKELY(cm_buffer_with_ended(buffer))
               ? refuse_ended()
               : cm_storage_check_open(buffer->storage);
}

int
cm_buffer_check_there(const cm_buffer *buffer)
{
    return cm_buffer_with_ended(buffer) ? refuse_ended()
                                        : cm_storage_check_there(buffer->storage);
}

int
cm_buffer_check_inherited(const cm_buffer *buffer)
{
    const cm_runtime *runtime = buffer->state->runtime;
    const cm_block *block = buffer->storage->block;
    if (block != NULL && runtime != NULL && cm_runtime_is_forked(runtime)
        && !cm_block_is_inherited(block)) {
        return cm_py_raise_int(buffer->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    return 0;
}

int
cm_buffer_bounds(const cm_buffer *buffer, int64_t *low, int64_t *high)
{
    cm_region region;
    cm_buffer_region(buffer, &region);
    cm_status status = cm_region_bounds(&region, low, high);
    return cm_py_check(buffer->state, status, NULL);
}

void
cm_buffer_region(const cm_buffer *buffer, cm_region *out)
{
    const cm_storage *storage = buffer->storage;
    bool empty = cm_buffer_nbytes(buffer) == 0;
    bool on_host = storage->host != NULL && !cm_kind_is_on_device(storage->copy_kind);
    out->host = empty || !on_host ? NULL : (char *)storage->host + buffer->offset;
    out->address = cm_buffer_address(buffer);
    out->kind = storage->copy_kind;
    out->device = cm_kind_is_pageable(storage->copy_kind) ? -1 : storage->device;
    out->ndim = buffer->ndim;
    out->is_heap = false;
    out->is_file = storage->is_file;
    out->itemsize = buffer->itemsize;
    if (buffer->ndim > 0) {
        size_t nbytes = (size_t)buffer->ndim * sizeof(int64_t);
        memcpy(out->shape, cm_buffer_shape(buffer), nbytes);
        memcpy(out->strides, cm_buffer_strides(buffer), nbytes);
    }
}

/* -- in one piece with its storage -------------------------------------------------------- */

/* Pieces that have ended are kept in a list for the next buffer of their type. Such a
 * piece keeps its memory and its reference to its type, so taking it again costs only a
 * few stores. */

/* Reset a buffer to the state of a new one, except for members that every use sets. */
static inline void
reset_buffer(cm_buffer *buffer)
{
    buffer->weakrefs = NULL;
    buffer->offset = 0;
    buffer->readonly = false;
    buffer->with_ended = false;
    buffer->as_device = false;
    buffer->extents = buffer->few;
}

static inline void
reset_storage(cm_storage *storage)
{
    atomic_store_explicit(&storage->refs, 1, memory_order_relaxed);
    atomic_store_explicit(&storage->holds, 0, memory_order_relaxed);
    atomic_store_explicit(&storage->closed, false, memory_order_relaxed);
    atomic_store_explicit(&storage->deferring, false, memory_order_relaxed);
    storage->readonly = false;
    storage->was_exported = false;
    storage->address_was_exported = false;
    storage->address_was_read = false;
    storage->is_kept = false;
    storage->was_captured = false;
    storage->is_advised = false;
    storage->side_high = 0;
    storage->holds_locked_pages = false;
    storage->lasting_count = 0;
    storage->stream_fill_count = 0;
    storage->awaited_fill_count = 0;
    storage->view_count = 0;
    storage->foreign_argument = NULL;
}

CM_COLD static void
destroy(cm_inline_buffer *root)
{
    PyTypeObject *type = Py_TYPE((PyObject *)root);
    PyObject_Free(root);
    Py_DECREF(type);
}

/* Called at the end of the storage: keep the piece for another buffer, or free it. */
static void
free_inline(cm_storage *storage)
{
    cm_inline_buffer *root = CM_LIST_ENTRY(storage, cm_inline_buffer, storage);
    cm_inline_list *list =
        storage->state == NULL ? NULL : &storage->state->free_inline[storage->kind];
    if (CM_UNLIKELY(list == NULL || list->room == 0)) {
        destroy(root);
        return;
    }
    reset_storage(storage);
    reset_buffer(&root->buffer);
    root->buffer.base = (PyObject *)list->first;
    list->first = root;
    list->room--;
}

cm_inline_buffer *
cm_inline_buffer_new(cm_state *state, cm_kind kind, int device, PyObject *dtype,
                     int ndim)
{
    cm_inline_buffer *root = cm_inline_buffer_take(state, kind);
    bool fresh = root == NULL;
    if (CM_UNLIKELY(fresh)) {
        root = PyObject_Malloc(sizeof(*root));
        if (root == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        (void)PyObject_Init((PyObject *)root, state->buffer_types[kind]);
        root->buffer.state = state;
        root->buffer.storage = &root->storage;
        root->buffer.base = NULL;
        reset_buffer(&root->buffer);
    }
    cm_storage_init(&root->storage, state, kind, device, fresh);
    root->storage.free_struct = free_inline;
    root->buffer.dtype = Py_NewRef(dtype);
    root->buffer.ndim = ndim;
    if (make_extents(&root->buffer, ndim) < 0) {
        Py_DECREF((PyObject *)root);
        return NULL;
    }
    return root;
}

void
cm_inline_buffers_clear(cm_state *state)
{
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        cm_inline_list *list = &state->free_inline[kind];
        list->room = 0;
        while (list->first != NULL) {
            cm_inline_buffer *root = list->first;
            list->first = (cm_inline_buffer *)root->buffer.base;
            destroy(root);
        }
    }
}
