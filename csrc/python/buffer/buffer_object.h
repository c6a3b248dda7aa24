/* SPDX-License-Identifier: Apache-2.0 */
/* All buffer types have the same struct, which is a view of a storage. Each object has
 * a pointer to the state of its module. The GIL is held throughout. */
#pragma once

#include "python/buffer/storage.h"
#include "python/core/numpy_bridge.h"

enum { CM_FEW_NDIM = 4 };

typedef struct cm_buffer {
    PyObject_HEAD
    cm_state *state;     /* borrowed */
    cm_storage *storage; /* held; never NULL */
    PyObject *dtype;     /* owned: a numpy.dtype */
    PyObject *base;      /* owned: the buffer that this is a view of, or NULL */
    PyObject *weakrefs;
    int64_t offset; /* of element 0, in bytes from the first byte of the storage */
    int64_t itemsize;
    int ndim;
    bool readonly;
    /* The buffer's `with` block has ended. The buffer then counts as closed, even if
     * its storage is still open. */
    bool with_ended;
    /* as_device() made this view. It has the type of device buffers, and its memory is
     * mapped or managed. */
    bool as_device;
    /* shape[ndim], strides[ndim] in bytes, and room for strides[ndim] in elements,
     * which DLPack borrows. Points to `few`, or is owned beyond CM_FEW_NDIM. */
    int64_t *extents;
    int64_t few[3 * CM_FEW_NDIM];
} cm_buffer;

/* A buffer over memory of its own. The two structs are allocated together and freed
 * together, once both have ended. The storage may end after the buffer. */
typedef struct cm_inline_buffer {
    cm_buffer buffer;
    cm_storage storage;
} cm_inline_buffer;

/* Make a buffer with a storage and room for its extents. The caller fills in the
 * memory, the extents and the itemsize. Returns NULL with MemoryError if there is no
 * memory. */
cm_inline_buffer *cm_inline_buffer_new(cm_state *state, cm_kind kind, int device,
                                       PyObject *dtype, int ndim);
/* Take a struct that free_inline() has kept for reuse. It has one dimension and no
 * dtype. Returns NULL, without an exception, if there is none. */
static inline cm_inline_buffer *
cm_inline_buffer_take(cm_state *state, cm_kind kind)
{
    cm_inline_list *list = &state->free_inline[kind];
    cm_inline_buffer *root = list->first;
    if (CM_LIKELY(root != NULL)) {
        list->first = (cm_inline_buffer *)root->buffer.base;
        list->room++;
        root->buffer.base = NULL;
        Py_INCREF((PyObject *)root); /* from 0, where its last owner left the count */
    }
    return root;
}

/* Free all structs that were kept for reuse, and keep none from now on. Called when the
 * module ends. */
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

/* Return the kind that consumers see. An as_device() view is device memory. */
static inline cm_kind
cm_buffer_kind(const cm_buffer *buffer)
{
    return buffer->as_device ? CM_KIND_DEVICE : buffer->storage->kind;
}

/* Make a buffer of `type` over `storage`. The buffer holds the storage, the dtype and
 * the base, and copies the shape and the strides (in bytes). The caller makes sure that
 * all elements lie inside the storage, which is not checked. Returns NULL with an
 * exception if it fails. */
PyObject *cm_buffer_new(cm_state *state, PyTypeObject *type, cm_storage *storage,
                        int64_t offset, PyObject *dtype, int ndim, const int64_t *shape,
                        const int64_t *strides, bool readonly, PyObject *base);
/* These return the address of element 0, for the host and for the device. Device memory
 * has no address for the host, which is then NULL, on the emulated device too. A buffer
 * without bytes has no address, so both return 0. */
void *cm_buffer_host(const cm_buffer *buffer);
cm_address cm_buffer_address(const cm_buffer *buffer);
uint64_t cm_buffer_nbytes(const cm_buffer *buffer);
int64_t cm_buffer_size(const cm_buffer *buffer); /* in elements */
/* True if the elements lie side by side, in C's or in Fortran's order. */
bool cm_buffer_is_contiguous(const cm_buffer *buffer, bool fortran);
/* True if the elements lie side by side in Fortran's order alone. A buffer with one
 * axis, or without elements, is in both orders. */
static inline bool
cm_buffer_is_fortran(const cm_buffer *buffer)
{
    return cm_buffer_is_contiguous(buffer, true)
           && !cm_buffer_is_contiguous(buffer, false);
}
/* True if the buffer's `with` block has ended, or the block of the buffer of which it
 * is a view. */
static inline bool
cm_buffer_with_ended(const cm_buffer *buffer)
{
    const cm_buffer *base = (const cm_buffer *)buffer->base;
    return buffer->with_ended || (base != NULL && base->with_ended);
}
/* Check that the buffer can be used. Returns 0, or -1 with ValueError if its `with`
 * block has ended, or with the exception of cm_storage_check_open(). */
int cm_buffer_check_open(const cm_buffer *buffer);
/* Check the same as cm_buffer_check_open(), but do not wake memory that was spilled,
 * and do not note a use. */
int cm_buffer_check_there(const cm_buffer *buffer);
/* Check that this process has the bytes. Returns 0, or -1 with RuntimeError in a forked
 * child that did not get them. */
int cm_buffer_check_inherited(const cm_buffer *buffer);
/* Describe the buffer as a region. */
void cm_buffer_region(const cm_buffer *buffer, cm_region *out);

void cm_buffer_dealloc(PyObject *object);

/* Find the offsets, in bytes from the first element, of the lowest element and of the
 * end of the highest. They are equal if there are no elements. Returns 0, or -1 with an
 * exception. */
int cm_buffer_bounds(const cm_buffer *buffer, int64_t *low, int64_t *high);

/* Make a view of `parent`, of its type unless `type` is given. The view holds the
 * storage and, as its base, the buffer of which `parent` itself is a view. If `parent`
 * is no view, it is the base. Returns NULL with an exception if it fails. */
PyObject *cm_buffer_new_view(cm_buffer *parent, PyTypeObject *type, int64_t offset,
                             PyObject *dtype, int ndim, const int64_t *shape,
                             const int64_t *strides);
