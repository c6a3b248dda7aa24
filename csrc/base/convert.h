/* SPDX-License-Identifier: Apache-2.0 */
/* Converts numbers of one type to numbers of another, many at a time, as NumPy casts
 * them. This file knows the processor and nothing else. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The lists of number types: X(name, its text, its type in C, how it is read, what the
 * caller adds). The names are those of NumPy's dtypes. A complex number is two real
 * numbers, the real part before the imaginary one; in place of how it is read stands
 * the type of its parts. */
/* clang-format off */
#define CM_INTEGERS(X, ...)                                                              \
    X(BOOL, "bool", uint8_t, BOOL, __VA_ARGS__)                                          \
    X(INT8, "int8", int8_t, PLAIN, __VA_ARGS__)                                          \
    X(UINT8, "uint8", uint8_t, PLAIN, __VA_ARGS__)                                       \
    X(INT16, "int16", int16_t, PLAIN, __VA_ARGS__)                                       \
    X(UINT16, "uint16", uint16_t, PLAIN, __VA_ARGS__)                                    \
    X(INT32, "int32", int32_t, PLAIN, __VA_ARGS__)                                       \
    X(UINT32, "uint32", uint32_t, PLAIN, __VA_ARGS__)                                    \
    X(INT64, "int64", int64_t, PLAIN, __VA_ARGS__)                                       \
    X(UINT64, "uint64", uint64_t, PLAIN, __VA_ARGS__)
#define CM_FLOATS(X, ...)                                                                \
    X(FLOAT16, "float16", uint16_t, FLOAT16, __VA_ARGS__)                                \
    X(BFLOAT16, "bfloat16", uint16_t, BFLOAT16, __VA_ARGS__)                             \
    X(FLOAT32, "float32", float, PLAIN, __VA_ARGS__)                                     \
    X(FLOAT64, "float64", double, PLAIN, __VA_ARGS__)
#define CM_REALS(X, ...)                                                                 \
    CM_INTEGERS(X, __VA_ARGS__)                                                          \
    CM_FLOATS(X, __VA_ARGS__)
#define CM_COMPLEX_NUMBERS(X, ...)                                                       \
    X(COMPLEX64, "complex64", cm_complex64, FLOAT32, __VA_ARGS__)                        \
    X(COMPLEX128, "complex128", cm_complex128, FLOAT64, __VA_ARGS__)
#define CM_NUMBERS(X, ...)                                                               \
    CM_REALS(X, __VA_ARGS__)                                                             \
    CM_COMPLEX_NUMBERS(X, __VA_ARGS__)
/* clang-format on */

typedef struct cm_complex64 {
    float real;
    float imaginary;
} cm_complex64;

typedef struct cm_complex128 {
    double real;
    double imaginary;
} cm_complex128;

typedef enum cm_number {
    CM_NUMBER_NONE,
#define CM_NUMBER_NAME(name, ...) CM_##name,
    CM_NUMBERS(CM_NUMBER_NAME)
#undef CM_NUMBER_NAME
        CM_NUMBER_COUNT
} cm_number;

/* The classes of numbers. A number can be converted to its own class and to those after
 * it without losing its meaning. */
typedef enum cm_number_class {
    CM_CLASS_INTEGER, /* bool too */
    CM_CLASS_FLOAT,
    CM_CLASS_COMPLEX,
} cm_number_class;

/* Converts elements whose types are not among the numbers above. Whoever knows the
 * types has a struct that begins with this one, and sees to it that it outlives the
 * copy. `run` takes element (i, j, ...) from src + i*src_strides[0] + j*src_strides[1]
 * + ... to the same place of the target; the two do not overlap. It is called from any
 * thread, from several at a time, without any lock. False: some element could not be
 * converted; whoever hears of that finds out why by `number`. */
typedef struct cm_cast {
    bool (*run)(const struct cm_cast *cast, int ndim, const int64_t *shape, void *dst,
                const int64_t *dst_strides, const void *src,
                const int64_t *src_strides);
    uint64_t number;
} cm_cast;

enum { CM_CAST_MAX_NDIM = 8 }; /* dimensions of one call of `run` */

/* A conversion. Each value becomes value * scale + offset, in float64 if that is one of
 * the two types and else in float32. Without `scales` the value stays the same, as far
 * as the type can express it. Complex numbers are not scaled. */
typedef struct cm_convert {
    cm_number from; /* NONE: nothing is converted, or `cast` does it */
    cm_number to;
    bool scales;
    double scale;
    double offset;
    /* The bytes of each element are in the order that is not the processor's. */
    bool from_swapped;
    bool to_swapped;
    const cm_cast *cast; /* borrowed; NULL: the types are numbers */
} cm_convert;

static inline bool
cm_convert_is_on(const cm_convert *convert)
{
    return convert->from != CM_NUMBER_NONE || convert->cast != NULL;
}

/* True if a shorter number becomes a float32, in a way that has one answer on every
 * processor: no NaN comes out that was not in it. */
bool cm_convert_widens(const cm_convert *convert);

/* True if only the real parts of complex numbers are read, because they become real. A
 * bool is made of both parts. */
bool cm_convert_drops_imaginary(const cm_convert *convert);

const char *cm_number_text(cm_number number);
uint64_t cm_number_nbytes(cm_number number);
cm_number_class cm_number_class_of(cm_number number);
/* The number with that text; NONE: there is no such number. */
cm_number cm_number_find(const char *text);

/* Convert `count` numbers that lie so many bytes apart, at any addresses; source and
 * target must not overlap. Floats round to the nearest, ties to even, whatever the
 * thread's settings are, with the infinities, the subnormals and the bits of NaN that
 * NumPy gives. Integers wrap round into shorter ones. Floats are cut to integers; one
 * that is out of range becomes the nearest integer, and NaN becomes 0. Each part of a
 * complex number is converted as a number of its own; the imaginary part of what was
 * real is 0; a complex number is true if either part is. */
void cm_convert_run(const cm_convert *convert, void *dst, int64_t dst_step,
                    const void *src, int64_t src_step, int64_t count);
