/* SPDX-License-Identifier: Apache-2.0 */
/* What the buffer files share beyond objects.h. GIL held throughout. */
#ifndef CM_PYTHON_BUFFER_OBJECT_H
#define CM_PYTHON_BUFFER_OBJECT_H

#include "base/checked_math.h"
#include "python/numpy_bridge.h"
#include "python/pool_object.h"

void cm_buffer_dealloc(PyObject *object);
/* Room for shape and strides. 0, or -1 with MemoryError. */
int cm_buffer_make_extents(cm_buffer *self, int ndim);

static inline void
cm_buffer_set_c_strides(int ndim, int64_t itemsize, const int64_t *shape,
                        int64_t *strides)
{
    int64_t step = itemsize;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = step;
        (void)cm_mul_i64(step, shape[i] > 0 ? shape[i] : 1, &step); /* if empty: any */
    }
}

/* From the lowest to past the highest element, in bytes from the first. Equal when
 * there are none. 0, or -1 with an exception. */
int cm_buffer_bounds(const cm_buffer *buffer, int64_t *low, int64_t *high);

/* A view of `parent`, of its type unless `type` is given: it holds the storage, and as
 * its base the buffer that parent itself is a view of, if any. */
PyObject *cm_buffer_new_view(cm_buffer *parent, PyTypeObject *type, int64_t offset,
                             PyObject *dtype, int ndim, const int64_t *shape,
                             const int64_t *strides);

/* A new buffer of memory of `kind` in C or F `order`, from `pool` (NULL: the current
 * one, see cm_pool_choose()); of PAGEABLE kind it is over a fresh NumPy array. `stream`
 * (NULL: any) is the first to use it. */
PyObject *cm_buffer_allocate(cm_state *state, cm_pool_object *pool, cm_kind kind,
                             unsigned flags, int device, PyObject *dtype, int ndim,
                             const int64_t *shape, char order, cm_stream *stream);

/* The same with the lengths of `like`, and its order where `order` is A (F if it is
 * only Fortran-contiguous, else C) or K (its axes by falling stride). */
PyObject *cm_buffer_allocate_like(cm_state *state, cm_pool_object *pool, cm_kind kind,
                                  unsigned flags, int device, PyObject *dtype,
                                  const cm_region *like, char order, cm_stream *stream);

/* What the constructors give a kind when no flag is asked for. */
static inline unsigned
cm_buffer_default_flags(cm_kind kind)
{
    switch (kind) {
    case CM_KIND_PINNED:
        return CM_HOST_ALLOC_PORTABLE;
    case CM_KIND_MAPPED:
        return CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED;
    case CM_KIND_MANAGED:
        return CM_MANAGED_GLOBAL;
    default:
        return 0;
    }
}

#endif
