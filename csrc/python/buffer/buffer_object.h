/* SPDX-License-Identifier: Apache-2.0 */
/* The struct behind all buffer types: a view of a storage. Its module state is with it,
 * as with every object (types are final). GIL held throughout. */
#pragma once

#include "python/buffer/storage.h"
#include "python/core/numpy_bridge.h"

enum { CM_FEW_NDIM = 4 };

typedef struct cm_buffer {
    PyObject_HEAD
    cm_state *state;     /* borrowed */
    cm_storage *storage; /* held; never NULL */
    PyObject *dtype;     /* owned: numpy.dtype */
    PyObject *base;      /* owned: the buffer this is a view of; NULL for none */
    PyObject *weakrefs;
    int64_t offset; /* of element 0 from the storage's first byte */
    int64_t itemsize;
    int ndim;
    bool readonly;
    bool deferred;  /* left its `with` block: closed, whatever becomes of the storage */
    bool as_device; /* made by as_device(): device type over mapped or managed memory */
    int64_t *extents; /* shape[ndim], strides[ndim] in bytes, and room for those that
                         DLPack borrows: `few`, or owned beyond CM_FEW_NDIM */
    int64_t few[3 * CM_FEW_NDIM];
} cm_buffer;

/* A buffer over memory of its own, in one piece with its storage. The storage may live
 * longer; both go with it. */
typedef struct cm_inline_buffer {
    cm_buffer buffer;
    cm_storage storage;
} cm_inline_buffer;

/* A buffer with storage and room for its extents; memory, extents and itemsize are the
 * caller's to fill in. NULL with MemoryError. */
cm_inline_buffer *cm_inline_buffer_new(cm_state *state, cm_kind kind, int device,
                                       PyObject *dtype, int ndim);
/* One that was kept, of one dimension and no dtype, or NULL without an exception. */
static inline cm_inline_buffer *
cm_inline_buffer_take(cm_state *state, cm_kind kind)
{
    cm_inline_list *list = &state->free_inline[kind];
    cm_inline_buffer *root = list->first;
    if (CM_LIKELY(root != NULL)) {
        list->first = (cm_inline_buffer *)root->buffer.base;
        list->room++;
        root->buffer.base = NULL;
        Py_INCREF((PyObject *)root); /* from 0, where its last owner left it */
    }
    return root;
}

/* At the module's end: kept ones go, and none is kept any more. */
void cm_inline_buffers_clear(cm_state *state);

static inline int64_t *
cm_buffer_shape(const cm_buffer *buffer)
{
    return buffer->extents;
}

static inline int64_t *
cm_buffer_strides(const cm_buffer *buffer)
{
    return buffer->extents + buffer->ndim;
}

bool cm_buffer_check(const cm_state *state, PyObject *object);

/* What consumers may do with it: an as_device() view is device memory. */
static inline cm_kind
cm_buffer_kind(const cm_buffer *buffer)
{
    return buffer->as_device ? CM_KIND_DEVICE : buffer->storage->kind;
}

/* A new buffer of `type` over `storage` (held). dtype and base are held too; shape and
 * strides (bytes) are copied. Trusts its arguments: callers check that
 * they lie inside the storage. NULL with an exception. */
PyObject *cm_buffer_new(cm_state *state, PyTypeObject *type, cm_storage *storage,
                        int64_t offset, PyObject *dtype, int ndim, const int64_t *shape,
                        const int64_t *strides, bool readonly, PyObject *base);
/* Address of element 0: for the host (NULL on device memory) and for the device. A
 * buffer with no bytes answers 0. On the emulated device the host address of device
 * memory is NULL too. */
void *cm_buffer_host(const cm_buffer *buffer);
cm_address cm_buffer_address(const cm_buffer *buffer);
uint64_t cm_buffer_nbytes(const cm_buffer *buffer);
int64_t cm_buffer_size(const cm_buffer *buffer); /* elements */
/* Do elements lie side by side, in C's or in Fortran's order? */
bool cm_buffer_is_contiguous(const cm_buffer *buffer, bool fortran);
/* In Fortran's order alone: what has one axis, or no elements, is in both. */
static inline bool
cm_buffer_is_fortran(const cm_buffer *buffer)
{
    return cm_buffer_is_contiguous(buffer, true)
           && !cm_buffer_is_contiguous(buffer, false);
}
/* Has its `with` block ended, or that of the buffer it is a view of? */
static inline bool
cm_buffer_is_left(const cm_buffer *buffer)
{
    const cm_buffer *base = (const cm_buffer *)buffer->base;
    return buffer->deferred || (base != NULL && base->deferred);
}
/* Closed storage or left `with` block: 0, or -1 with ValueError. */
int cm_buffer_check_open(const cm_buffer *buffer);
/* RuntimeError in a forked child that did not get the bytes. 0 or -1. */
int cm_buffer_check_inherited(const cm_buffer *buffer);
/* The buffer as a region. */
void cm_buffer_region(const cm_buffer *buffer, cm_region *out);

void cm_buffer_dealloc(PyObject *object);

/* Shape and strides of the package's, tuples of ints. 0, or -1 with an exception. */
int cm_extents_read(PyObject *lengths, PyObject *steps, int *ndim, int64_t *shape,
                    int64_t *strides);

/* From the lowest to past the highest element, in bytes from the first. Equal when
 * there are none. 0, or -1 with an exception. */
int cm_buffer_bounds(const cm_buffer *buffer, int64_t *low, int64_t *high);

/* A view of `parent`, of its type unless `type` is given: it holds the storage, and as
 * its base the buffer that parent itself is a view of, if any. */
PyObject *cm_buffer_new_view(cm_buffer *parent, PyTypeObject *type, int64_t offset,
                             PyObject *dtype, int ndim, const int64_t *shape,
                             const int64_t *strides);
