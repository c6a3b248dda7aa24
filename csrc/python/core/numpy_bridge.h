/* SPDX-License-Identifier: Apache-2.0 */
/* This header has everything that cumem asks of NumPy's C API, such as dtypes, views
 * and strides of arrays. Only numpy_bridge.c includes NumPy's headers. All functions
 * need the GIL, except a cast (cm_numpy_cast_new()), which runs without it and takes
 * it. */
#pragma once

#include "base/convert.h"
#include "python/core/state.h"

int cm_numpy_import(void); /* called when the module is executed; returns 0, or -1 with
                              an exception */
/* Return the address of some function of NumPy's. It lies in the shared object that
 * holds numpy.array(). */
uintptr_t cm_numpy_code(void);

/* Make a numpy.dtype of anything that numpy.dtype() accepts; None gives float64.
 * Returns a new reference, or NULL with an exception, which is a TypeError for dtypes
 * that hold objects and for an itemsize of 0. */
PyObject *cm_numpy_dtype(PyObject *object);
/* Do the same as cm_numpy_dtype(), but also accept those dtypes of NumPy's that no
 * buffer can have. */
PyObject *cm_numpy_read_dtype(PyObject *object);
/* True if the object is a numpy.dtype. The functions below accept nothing else as a
 * dtype, and do not check that. */
bool cm_numpy_is_dtype(PyObject *object);
int64_t cm_numpy_itemsize(PyObject *dtype);
int64_t cm_numpy_alignment(PyObject *dtype); /* in bytes; a power of two */
/* Return the dtype that cm_numpy_dtype() made of the same object before, borrowed, and
 * write its itemsize. Returns NULL without an exception if that dtype is not known any
 * more. This only looks into a small table. */
PyObject *cm_numpy_known_dtype(PyObject *object, int64_t *itemsize);
char cm_numpy_letter(PyObject *dtype); /* numpy.dtype.kind */
bool cm_numpy_has_fields(PyObject *dtype);
bool cm_numpy_is_extended(PyObject *dtype); /* its parts are long doubles */
/* True if another package has registered the dtype with NumPy, as ml_dtypes does. */
bool cm_numpy_is_registered(PyObject *dtype);
/* True if the dtype has metadata, a dict in which a user may have put any objects. */
bool cm_numpy_has_metadata(PyObject *dtype);
/* True if elements of both dtypes have the same bytes and the same meaning. */
bool cm_numpy_dtype_equal(PyObject *a, PyObject *b);
/* Make the PEP 3118 format that NumPy's own arrays of the dtype export, such as "<f4"
 * or "T{…}". Returns a new str, or NULL with an exception, which is a ValueError if
 * there is no such format, as for datetime64. */
PyObject *cm_numpy_format(PyObject *dtype);

/* Return numpy.dtype.kind ('b' 'i' 'u' 'f' 'c' 'm' 'M' 'S' 'U' 'V' …) if that and the
 * itemsize say everything about the dtype. Returns 0 for dtypes in the other byte
 * order, with fields, or of another package, for long double, and for a complex number
 * of two long doubles. */
char cm_numpy_plain_kind(PyObject *dtype);
/* Return the row that a dtype has in the list of base/dtypes.h. Returns CM_NUMBER_NONE
 * if it has no row, its bytes are in the other order, or it has fields. A dtype of
 * another package may be asked for its name, which may run Python code. */
cm_dtype cm_numpy_listed(PyObject *dtype);
/* Return the dtype of a row, which must not be CM_NUMBER_NONE. Returns a new reference,
 * or NULL with an exception, which is ImportError or AttributeError if the dtype comes
 * from ml_dtypes and that package is missing or too old. */
PyObject *cm_numpy_dtype_listed(cm_dtype dtype);

/* Enter a block of numpy.errstate(all="ignore"). Returns a new reference to the block,
 * or NULL with an exception. cm_numpy_leave_quiet_block() leaves the block, takes over
 * the reference and keeps an exception that is set. */
PyObject *cm_numpy_enter_quiet_block(void);
void cm_numpy_leave_quiet_block(PyObject *block);

/* Make an array over host memory, which holds `owner` as its base. Returns a new
 * reference, or NULL with an exception. */
PyObject *cm_numpy_view(PyObject *owner, void *host, PyObject *dtype, int ndim,
                        const int64_t *shape, const int64_t *strides, bool readonly);
/* Make an array in C order, whose elements are not set. Returns a new reference, or
 * NULL with an exception. */
PyObject *cm_numpy_empty(PyObject *dtype, int ndim, const int64_t *shape);

/* Make an array of any object, as numpy.asarray(object, dtype) does, which may return
 * the object itself. If `dtype` is NULL, NumPy chooses the dtype. With `keeps_subclass`
 * an array of a subclass stays one, as with numpy.asanyarray(). Returns a new
 * reference, or NULL with an exception. */
PyObject *cm_numpy_from_any(PyObject *object, PyObject *dtype, bool keeps_subclass);
/* Copy the elements of an array to a new array in C order, and convert them to the
 * dtype that NumPy calls by `letter`: 'g' and 'G' are long doubles, and 'q' is int64.
 * Returns a new reference, or NULL with an exception. */
PyObject *cm_numpy_cast_array(PyObject *array, char letter);
/* Make the dtype that NumPy calls by a letter, which may be 'O', 'M' or 'm'. Returns a
 * new reference, or NULL with an exception. */
PyObject *cm_numpy_dtype_of_letter(char letter);
/* Make an array of NumPy's own type with the shape and the order of another. Its
 * elements are not set. Returns a new reference, or NULL with an exception. */
PyObject *cm_numpy_empty_like(PyObject *array, PyObject *dtype);
/* Make an array in C order with the shape of another, whose bytes are zero. Returns a
 * new reference, or NULL with an exception. */
PyObject *cm_numpy_zeros_like(PyObject *array, PyObject *dtype);
/* Convert all elements of one array into those of another of its shape, by whichever
 * casting rule that takes. Returns 0, or -1 with an exception. */
int cm_numpy_copy_into(PyObject *to, PyObject *from);
PyObject *cm_numpy_dtype_of(PyObject *array); /* borrowed */
int64_t cm_numpy_size(PyObject *array);       /* in elements */
bool cm_numpy_same_shape(PyObject *a, PyObject *b);
bool cm_numpy_is_c_contiguous(PyObject *array);
/* Return the number of bytes of an array that is one run in C's order, or 0 for any
 * other array. */
uint64_t cm_numpy_run_nbytes(PyObject *array);
/* True if the elements of an array are, or hold, Python objects. */
bool cm_numpy_has_objects(PyObject *array);

/* Return the first element of an array that is not empty, as ndarray.item() does.
 * Returns a new reference, or NULL with an exception. */
PyObject *cm_numpy_item(PyObject *array);

bool cm_numpy_is_array(PyObject *object);
/* True if it is an array whose dtype has the same bytes and meaning as `dtype`. */
bool cm_numpy_is_array_of(PyObject *object, PyObject *dtype);
int cm_numpy_ndim(PyObject *array);
/* Return the address of element 0 of an array. */
void *cm_numpy_data(PyObject *array);
/* True if the array is of a subclass that can mark elements as missing, as
 * numpy.ma.MaskedArray does. For arrays of NumPy's own type the answer costs
 * nothing. */
bool cm_numpy_may_be_masked(PyObject *array);
bool cm_numpy_is_scalar(PyObject *object); /* a numpy.generic, not an array */
/* These three are true for a scalar of NumPy's that is an integer or a bool, a float,
 * or a complex number. */
bool cm_numpy_is_integer_scalar(PyObject *object);
bool cm_numpy_is_real_scalar(PyObject *object);
bool cm_numpy_is_complex_scalar(PyObject *object);
/* True for a numpy.bool, which some versions of NumPy accept as an index. */
bool cm_numpy_is_bool(PyObject *object);
/* Return the object that owns an array's memory. The owner ends the chain of bases, and
 * is not itself an array. If the chain ends in a memoryview, the owner is the
 * memoryview's object. Returns a new reference. Returns NULL without an exception if
 * the array owns its memory itself, or if the memoryview was released. */
PyObject *cm_numpy_owner(PyObject *array);
/* Return the array that an array is a view of, or a view of a view of, and so on.
 * Returns a new reference. */
PyObject *cm_numpy_root(PyObject *array);
/* Find the address and the number of the bytes of an array that has no gaps. */
void cm_numpy_place(PyObject *array, uint64_t *address, uint64_t *nbytes);
/* Fill in only shape, strides and itemsize of a region, from an array of any dtype. */
void cm_numpy_layout(PyObject *array, cm_region *out);
/* Fill in a region, of kind PAGEABLE, from an array. *dtype is a new reference, and
 * *readonly says whether the array refuses to be written. Returns 0, or -1 with an
 * exception, which is a TypeError for dtypes of objects. */
int cm_numpy_region(PyObject *array, cm_region *out, PyObject **dtype, bool *readonly);
/* Return the type of number, out of those that the engine converts, that the elements
 * of `dtype` have, or CM_NUMBER_NONE if they have none of these. *swapped says whether
 * their bytes are in the order opposite to the processor's. */
cm_number cm_numpy_number(PyObject *dtype, bool *swapped);
/* Write the bytes of a NumPy scalar to `out`, in the processor's order, and return its
 * type of number, out of those that the engine converts. No such number has more than
 * 16 bytes. Returns CM_NUMBER_NONE, and writes nothing, if the scalar is of another
 * type. */
cm_number cm_numpy_read_scalar(PyObject *scalar, void *out);

/* -- from one dtype to another ----------------------------------------------------------- */

/* The rules for what a conversion may do to elements, the strictest first. */
typedef enum cm_casting_rule {
    CM_RULE_NO,
    CM_RULE_EQUIV,
    CM_RULE_SAFE,
    CM_RULE_SAME_KIND,
    CM_RULE_UNSAFE,
    CM_RULE_COUNT
} cm_casting_rule;

/* Return the type of number, such as bfloat16, that the integers of a dtype stand for.
 * The package notes that type in the dtype's metadata, because NumPy has no dtype for
 * it without ml_dtypes. Returns CM_NUMBER_NONE if the integers stand for themselves. */
cm_number cm_numpy_stands_for(PyObject *dtype);
/* Do the same as cm_numpy_number(), but if integers stand for another type of number,
 * return that type. */
cm_number cm_numpy_number_meant(PyObject *dtype, bool *swapped);
/* True if the rule allows `from` to be converted to `to`, as numpy.can_cast() says.
 * Integers that stand for another type of number are judged as that type. */
bool cm_numpy_can_cast(PyObject *from, PyObject *to, cm_casting_rule rule);
/* True if only the real parts of complex elements are converted. */
bool cm_numpy_drops_imaginary(PyObject *from, PyObject *to);
/* Return the dtype by which NumPy is to read the elements of an array of dtype `from`.
 * That is `from`, or with `drops_imaginary` the dtype of the real parts of NumPy's own
 * complex numbers. Then NumPy does not repeat the warning of dropped imaginary parts
 * that copy/casting.c has given. Returns a new reference. */
PyObject *cm_numpy_part_read(PyObject *from, bool drops_imaginary);
/* Check that NumPy can convert such elements. Returns 0, or -1 with NumPy's
 * TypeError. */
int cm_numpy_try_cast(PyObject *from, PyObject *to);
/* Make a cast by which NumPy converts elements of dtype `from` to `to` in copies.
 * Returns a new object, or NULL with an exception. *out is valid as long as that object
 * lives. */
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

/* Return the handler that NumPy uses in every context that has no handler of its own.
 * It may be written to. */
cm_numpy_handler *cm_numpy_default_handler(void);
/* Make `capsule` the handler of this context from now on; NULL means the default
 * handler. Returns a new reference to the handler before it, or NULL with an
 * exception. */
PyObject *cm_numpy_exchange_handler(PyObject *capsule);
