/* SPDX-License-Identifier: Apache-2.0 */
/* Everything cumem asks of NumPy's C API: dtypes, views and strides of arrays. Only
 * numpy_bridge.c includes NumPy's headers. GIL held throughout, but by a cast, which
 * takes it. */
#pragma once

#include "base/convert.h"
#include "python/core/state.h"

int cm_numpy_import(void); /* at module exec; 0 or -1 */
/* Where a function of NumPy's is: in the shared object that holds numpy.array(). */
uintptr_t cm_numpy_code(void);

/* Anything numpy.dtype() accepts (None: float64) to a new numpy.dtype. TypeError for
 * dtypes with objects in them and for itemsize 0. */
PyObject *cm_numpy_dtype(PyObject *object);
/* Is it a numpy.dtype? The functions below take nothing else for one, unchecked. */
bool cm_numpy_is_dtype(PyObject *object);
int64_t cm_numpy_itemsize(PyObject *dtype);
int64_t cm_numpy_alignment(PyObject *dtype); /* bytes, a power of two */
/* The dtype and its itemsize at a look, borrowed, where cm_numpy_dtype() was asked for
 * the same object before; else NULL without an exception. */
PyObject *cm_numpy_known_dtype(PyObject *object, int64_t *itemsize);
/* May it hold on to objects of the user's, who gave it a dict of them? */
bool cm_numpy_has_metadata(PyObject *dtype);
/* The same bytes and meaning? */
bool cm_numpy_dtype_equal(PyObject *a, PyObject *b);
/* PEP 3118 format, as NumPy's own arrays of it export ("<f4", "T{…}"): new str, or
 * ValueError where there is none, as of datetime64. */
PyObject *cm_numpy_format(PyObject *dtype);

/* numpy.dtype.kind ('b' 'i' 'u' 'f' 'c' 'm' 'M' 'S' 'U' 'V' …) where that and the
 * itemsize say all of it; 0 for those in the other byte order, with fields, of another
 * package, long double and a complex of two. */
char cm_numpy_plain_kind(PyObject *dtype);
/* The native dtype of kind 'b', 'i', 'u', 'f' or 'c' with `itemsize` bytes; NULL
 * without an exception when there is none. New reference. */
PyObject *cm_numpy_dtype_of_kind(char kind, int64_t itemsize);

/* A view of host memory; holds `owner` as its base. */
PyObject *cm_numpy_view(PyObject *owner, void *host, PyObject *dtype, int ndim,
                        const int64_t *shape, const int64_t *strides, bool readonly);
/* A fresh array in C order. */
PyObject *cm_numpy_empty(PyObject *dtype, int ndim, const int64_t *shape);

/* The first element of an array that has one, as ndarray.item() answers it. */
PyObject *cm_numpy_item(PyObject *array);

bool cm_numpy_is_array(PyObject *object);
/* Is it an array whose dtype has the same bytes and meaning as `dtype`? */
bool cm_numpy_is_array_of(PyObject *object, PyObject *dtype);
int cm_numpy_ndim(PyObject *array);
/* Where element 0 of an array is. */
void *cm_numpy_data(PyObject *array);
/* An array of a subclass that could say of elements that they are none, as
 * numpy.ma.MaskedArray does; of arrays of NumPy's own type the answer costs nothing. */
bool cm_numpy_may_be_masked(PyObject *array);
bool cm_numpy_is_scalar(PyObject *object); /* numpy.generic, not an array */
bool cm_numpy_is_bool(PyObject *object);   /* numpy.bool, which some NumPy index with */
/* The object that owns an array's memory: its last base that is no array, looking
 * through a memoryview. New reference; NULL without an exception: the array owns it. */
PyObject *cm_numpy_owner(PyObject *array);
/* The array at the root of views of views. New reference. */
PyObject *cm_numpy_root(PyObject *array);
/* Where the bytes of an array without gaps are. */
void cm_numpy_place(PyObject *array, uint64_t *address, uint64_t *nbytes);
/* Of a region only shape, strides and itemsize, of any dtype. */
void cm_numpy_layout(PyObject *array, cm_region *out);
/* Fill a region (kind PAGEABLE) from an ndarray; *readonly when it is not writeable.
 * *dtype is a new reference. TypeError for object dtypes. */
int cm_numpy_region(PyObject *array, cm_region *out, PyObject **dtype, bool *readonly);
/* Which number of the engine's an element of `dtype` is, and whether its bytes are in
 * the order that is not the processor's. NONE: it is none of them. */
cm_number cm_numpy_number(PyObject *dtype, bool *swapped);
/* The bytes of a NumPy scalar that is one of the engine's numbers, of which none has
 * more than 16, in the processor's order. NONE: it is none of them, and nothing was
 * written. */
cm_number cm_numpy_read_scalar(PyObject *scalar, void *out);

/* What converts elements of dtype `from` to `to` in copies: it calls `function` with an
 * array of the target's memory and one of the source's. New object, which `out` lives
 * as long as. */
PyObject *cm_numpy_cast_new(PyObject *function, PyObject *from, PyObject *to,
                            const cm_cast **out);

/* -- where the bytes of new arrays come from (NEP 49) --------------------------------- */

#define CM_NUMPY_HANDLER "mem_handler" /* name of a capsule of the second struct */

/* NumPy's PyDataMemAllocator and PyDataMem_Handler. Called with the GIL. */
typedef struct cm_numpy_allocator {
    void *ctx;
    void *(*malloc)(void *ctx, size_t nbytes);
    void *(*calloc)(void *ctx, size_t count, size_t item_nbytes);
    void *(*realloc)(void *ctx, void *host, size_t nbytes);
    void (*free)(void *ctx, void *host, size_t nbytes);
} cm_numpy_allocator;
typedef struct cm_numpy_handler {
    char name[127];
    uint8_t version;
    cm_numpy_allocator allocator;
} cm_numpy_handler;

/* The one that contexts without one of their own have; may be written to. */
cm_numpy_handler *cm_numpy_default_handler(void);
/* This context's capsule from now on (NULL: the default one); its last one, a new
 * reference, or NULL with an exception. */
PyObject *cm_numpy_exchange_handler(PyObject *capsule);
