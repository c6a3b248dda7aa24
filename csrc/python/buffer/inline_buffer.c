/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers in one piece with their storage. Ended ones are kept for the next of their
 * type: a freed object with its type still held, so that taking it again costs a few
 * stores. GIL held throughout. */
#include "python/buffer/buffer_object.h"

/* As new but for what every use sets. */
static inline void
reset_buffer(cm_buffer *buffer)
{
    buffer->weakrefs = NULL;
    buffer->offset = 0;
    buffer->readonly = false;
    buffer->deferred = false;
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
    storage->was_named = false;
    storage->was_captured = false;
    storage->unlocks = false;
    storage->lasting_count = 0;
    storage->late_count = 0;
    storage->seen_count = 0;
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

/* By the storage's end. */
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
        (void)PyObject_Init((PyObject *)root, cm_buffer_type_of(state, kind));
        root->buffer.state = state;
        root->buffer.storage = &root->storage;
        root->buffer.base = NULL;
        reset_buffer(&root->buffer);
    }
    cm_storage_init(&root->storage, state, kind, device, fresh);
    root->storage.free_struct = free_inline;
    root->buffer.dtype = Py_NewRef(dtype);
    root->buffer.ndim = ndim;
    if (cm_buffer_make_extents(&root->buffer, ndim) < 0) {
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
