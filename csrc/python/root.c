/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers in one piece with their storage. Ended ones are kept for the next of their
 * type: a freed object with its type still held, so that taking it again costs a few
 * stores. GIL held throughout. */
#include "python/buffer_object.h"

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
    atomic_store_explicit(&storage->burying, false, memory_order_relaxed);
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

cm_root *
cm_root_new(cm_state *state, cm_kind kind, int device, PyObject *dtype, int ndim)
{
    cm_root *root = cm_root_take(state, kind);
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
    root->storage.in_root = true;
    root->buffer.dtype = Py_NewRef(dtype);
    root->buffer.ndim = ndim;
    if (cm_buffer_make_extents(&root->buffer, ndim) < 0) {
        Py_DECREF((PyObject *)root);
        return NULL;
    }
    return root;
}

CM_COLD static void
destroy(cm_root *root)
{
    PyTypeObject *type = Py_TYPE((PyObject *)root);
    PyObject_Free(root);
    Py_DECREF(type);
}

void
cm_root_free(cm_root *root)
{
    const cm_storage *storage = &root->storage;
    cm_root_list *list =
        storage->state == NULL ? NULL : &storage->state->free_roots[storage->kind];
    if (CM_UNLIKELY(list == NULL || list->room == 0)) {
        destroy(root);
        return;
    }
    reset_storage(&root->storage);
    reset_buffer(&root->buffer);
    root->buffer.base = (PyObject *)list->first;
    list->first = root;
    list->room--;
}

void
cm_roots_clear(cm_state *state)
{
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        cm_root_list *list = &state->free_roots[kind];
        list->room = 0;
        while (list->first != NULL) {
            cm_root *root = list->first;
            list->first = (cm_root *)root->buffer.base;
            destroy(root);
        }
    }
}
