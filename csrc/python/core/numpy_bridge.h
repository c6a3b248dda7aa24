/* SPDX-License-Identifier: Apache-2.0 */
/* Everything that cumem asks of NumPy's C API: dtypes, views and strides of arrays.
 * Only numpy_bridge.c includes NumPy's headers. The GIL is held throughout, except by a
 * cast, which takes it. */
#pragma once

#include "base/convert.h"
#include "python/core/state.h"

int cm_numpy_import(void); /* called when the module is executed; 0 or -1 */
/* The address of some function of NumPy's, in the shared object that holds
 * numpy.array(). */
uintptr_t cm_numpy_code(void);

/* Make a numpy.dtype of anything that numpy.dtype() accepts (None: float64). A new
 * reference. TypeError for dtypes that hold objects, and for an itemsize of 0. */
PyObject *cm_numpy_dtype(PyObject *object);
/* As cm_numpy_dtype(), of any dtype that NumPy has, those too that no buffer can be of.
 */
PyObject *cm_numpy_read_dtype(PyObject *object);
/* True if it is a numpy.dtype. The functions below take nothing else for a dtype, and
 * do not check. */
bool cm_numpy_is_dtype(PyObject *object);
int64_t cm_numpy_itemsize(PyObject *dtype);
int64_t cm_numpy_alignment(PyObject *dtype); /* in bytes; a power of two */
/* The dtype and its itemsize at a look, borrowed, if cm_numpy_dtype() was asked for the
 * same object before; else NULL, without an exception. */
PyObject *cm_numpy_known_dtype(PyObject *object, int64_t *itemsize);
char cm_numpy_letter(PyObject *dtype); /* numpy.dtype.kind */
bool cm_numpy_has_fields(PyObject *dtype);
bool cm_numpy_is_extended(PyObject *dtype); /* of long doubles */
/* True if another package has registered the dtype with NumPy, as ml_dtypes does. */
bool cm_numpy_is_registered(PyObject *dtype);
/* True if the dtype may hold objects of the user's, who gave it a dict of them. */
bool cm_numpy_has_metadata(PyObject *dtype);
/* True if both have the same bytes and meaning. */
bool cm_numpy_dtype_equal(PyObject *a, PyObject *b);
/* The PEP 3118 format that NumPy's own arrays of the dtype export ("<f4", "T{…}"). A
 * new str, or ValueError if there is none, as for datetime64. */
PyObject *cm_numpy_format(PyObject *dtype);

/* numpy.dtype.kind ('b' 'i' 'u' 'f' 'c' 'm' 'M' 'S' 'U' 'V' …) if that and the itemsize
 * say everything about the dtype. 0 for dtypes in the other byte order, with fields, or
 * of another package, and for long double and a complex of two. */
char cm_numpy_plain_kind(PyObject *dtype);
/* The row that a dtype has in the list of base/dtypes.h. CM_NUMBER_NONE: it is in none,
 * its bytes are in the other order, or it has fields. A dtype of another package may be
 * asked for its name, which may run Python code. */
cm_dtype cm_numpy_listed(PyObject *dtype);
/* The dtype of a row, which is not CM_NUMBER_NONE. Returns a new reference, or NULL
 * with ImportError or AttributeError where it takes ml_dtypes, which is not there or
 * too old. */
PyObject *cm_numpy_dtype_listed(cm_dtype dtype);

/* A block of numpy.errstate(all="ignore"), entered, and what leaves it, which takes it
 * over and keeps the exception that is set. Returns a new reference, or NULL with an
 * exception. */
PyObject *cm_numpy_enter_quiet_block(void);
void cm_numpy_leave_quiet_block(PyObject *block);

/* A new array over host memory, which holds `owner` as its base. */
PyObject *cm_numpy_view(PyObject *owner, void *host, PyObject *dtype, int ndim,
                        const int64_t *shape, const int64_t *strides, bool readonly);
/* A new array in C order, whose elements are not set. */
PyObject *cm_numpy_empty(PyObject *dtype, int ndim, const int64_t *shape);

/* The array that NumPy makes of any object, which may be that object itself, as
 * numpy.asarray(object, dtype) does; `dtype` NULL: of the dtype that NumPy chooses.
 * With `keeps_subclass` an array of a subclass stays one, as in numpy.asanyarray().
 * Returns a new reference, or NULL with an exception. */
PyObject *cm_numpy_from_any(PyObject *object, PyObject *dtype, bool keeps_subclass);
/* The elements of an array in C order as another dtype, which NumPy calls by this
 * letter: 'g' and 'G' are long doubles, 'q' is int64. A new array. */
PyObject *cm_numpy_cast_array(PyObject *array, char letter);
/* The dtype that NumPy calls by a letter, 'O', 'M' and 'm' included. A new reference.
 */
PyObject *cm_numpy_dtype_of_letter(char letter);
/* A new array of NumPy's own type with the shape and the order of another, whose
 * elements are not set. */
PyObject *cm_numpy_empty_like(PyObject *array, PyObject *dtype);
/* A new array in C order with the shape of another, whose bytes are zero. */
PyObject *cm_numpy_zeros_like(PyObject *array, PyObject *dtype);
/* Convert all elements of one array into those of another of its shape, by whatever
 * rule it takes. 0 or -1. */
int cm_numpy_copy_into(PyObject *to, PyObject *from);
PyObject *cm_numpy_dtype_of(PyObject *array); /* borrowed */
int64_t cm_numpy_size(PyObject *array);       /* in elements */
bool cm_numpy_same_shape(PyObject *a, PyObject *b);
bool cm_numpy_is_c_contiguous(PyObject *array);
/* The bytes of an array that is one run in C's order; 0 if it is not. */
uint64_t cm_numpy_run_nbytes(PyObject *array);
/* True if the elements of an array are, or hold, Python objects. */
bool cm_numpy_has_objects(PyObject *array);

/* The first element of an array that has one, as ndarray.item() returns it. */
PyObject *cm_numpy_item(PyObject *array);

bool cm_numpy_is_array(PyObject *object);
/* True if it is an array whose dtype has the same bytes and meaning as `dtype`. */
bool cm_numpy_is_array_of(PyObject *object, PyObject *dtype);
int cm_numpy_ndim(PyObject *array);
/* The address of element 0 of an array. */
void *cm_numpy_data(PyObject *array);
/* True if the array is of a subclass that can mark elements as missing, as
 * numpy.ma.MaskedArray does. For arrays of NumPy's own type the answer costs
 * nothing. */
bool cm_numpy_may_be_masked(PyObject *array);
bool cm_numpy_is_scalar(PyObject *object); /* a numpy.generic, not an array */
/* Scalars of NumPy: an integer or a bool, a float, a complex number. */
bool cm_numpy_is_integer_scalar(PyObject *object);
bool cm_numpy_is_real_scalar(PyObject *object);
bool cm_numpy_is_complex_scalar(PyObject *object);
/* A numpy.bool, which some versions of NumPy index with. */
bool cm_numpy_is_bool(PyObject *object);
/* The object that owns an array's memory: its last base that is not an array, looking
 * through a memoryview. A new reference; NULL without an exception: the array itself
 * owns it. */
PyObject *cm_numpy_owner(PyObject *array);
/* The array at the root of views of views. A new reference. */
PyObject *cm_numpy_root(PyObject *array);
/* The address and number of the bytes of an array without gaps. */
void cm_numpy_place(PyObject *array, uint64_t *address, uint64_t *nbytes);
/* Fill in only shape, strides and itemsize of a region, from an array of any dtype. */
void cm_numpy_layout(PyObject *array, cm_region *out);
/* Fill in a region (of kind PAGEABLE) from an array; *readonly says whether it is not
 * writeable. *dtype is a new reference. TypeError for dtypes of objects. */
int cm_numpy_region(PyObject *array, cm_region *out, PyObject **dtype, bool *readonly);
/* Which of the engine's numbers an element of `dtype` is, and whether its bytes are in
 * the order that is not the processor's. NONE: it is none of them. */
cm_number cm_numpy_number(PyObject *dtype, bool *swapped);
/* Write the bytes of a NumPy scalar to `out`, in the processor's order, if it is one of
 * the engine's numbers, none of which has more than 16 bytes. NONE: it is none of them,
 * and nothing was written. */
cm_number cm_numpy_read_scalar(PyObject *scalar, void *out);

/* -- from one dtype to another ----------------------------------------------------------- */

/* What a conversion may do to elements, from the strictest rule on. */
typedef enum cm_casting_rule {
    CM_RULE_NO,
    CM_RULE_EQUIV,
    CM_RULE_SAFE,
    CM_RULE_SAME_KIND,
    CM_RULE_UNSAFE,
    CM_RULE_COUNT
} cm_casting_rule;

/* The number that the integers of a dtype stand for, where the package has noted one in
 * its metadata because NumPy has no dtype for it without ml_dtypes. NONE: they stand
 * for themselves. */
cm_number cm_numpy_stands_for(PyObject *dtype);
/* As cm_numpy_number(), but what integers stand for goes before what they are. */
cm_number cm_numpy_number_meant(PyObject *dtype, bool *swapped);
/* True if the rule allows it, as numpy.can_cast() says. Integers that stand for numbers
 * are judged as those numbers. */
bool cm_numpy_can_cast(PyObject *from, PyObject *to, cm_casting_rule rule);
/* True if only the real parts of complex elements are converted. */
bool cm_numpy_drops_imaginary(PyObject *from, PyObject *to);
/* The dtype that NumPy is to read elements of `from` as: with `drops_imaginary` that of
 * the real parts of NumPy's own complex numbers, so that NumPy does not warn again. A
 * new reference. */
PyObject *cm_numpy_part_read(PyObject *from, bool drops_imaginary);
/* 0 if NumPy converts such elements; or -1 with its TypeError. */
int cm_numpy_try_cast(PyObject *from, PyObject *to);
/* Make a cast by which NumPy converts elements of dtype `from` to `to` in copies. A new
 * object, for as long as which *out is valid. */
PyObject *cm_numpy_cast_new(PyObject *from, PyObject *to, const cm_cast **out);

/* -- where the bytes of new arrays come from (NEP 49) --------------------------------- */

/* The name of a capsule that holds a cm_numpy_handler. */
#define CM_NUMPY_HANDLER "mem_handler"

/* NumPy's PyDataMemAllocator and PyDataMem_Handler. Their functions are called with the
 * GIL. */
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

/* The handler that contexts have which have none of their own. It may be written to. */
cm_numpy_handler *cm_numpy_default_handler(void);
/* Make `capsule` the handler of this context from now on (NULL: the default one).
 * Returns the one before, a new reference, or NULL with an exception. */
PyObject *cm_numpy_exchange_handler(PyObject *capsule);
