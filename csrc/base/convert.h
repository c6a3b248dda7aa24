/* SPDX-License-Identifier: Apache-2.0 */
/* Converts numbers of one type to numbers of another, many at a time, as NumPy casts
 * them. This file knows the processor and nothing else. */
#pragma once

#include <stddef.h>

#include "base/dtypes.h"

/* Converts elements whose types are not among CM_NUMBERS. The code that knows the types
 * has a struct that begins with this one, and keeps it until the copy has ended. `run`
 * takes element (i, j, ...) from src + i*src_strides[0] + j*src_strides[1] + ... to the
 * same place of the target; the two do not overlap. It is called from any thread, from
 * several at a time, without any lock. It returns false if some element could not be
 * converted. The reason is then stored elsewhere under `number`. */
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
    /* The elements are in the byte order that the processor does not use. */
    bool from_swapped;
    bool to_swapped;
    const cm_cast *cast; /* borrowed; NULL: the types are numbers */
} cm_convert;

static inline bool
cm_convert_is_on(const cm_convert *convert)
{
    return convert->from != CM_NUMBER_NONE || convert->cast != NULL;
}

/* True if the kernel of the device can do the conversion as well. It converts numbers
 * to float32 if the row of their type in cm_dtypes says so, and gives the same bits as
 * the functions here. A conversion whose scaling could turn a number into NaN is not
 * one of these. */
bool cm_convert_widens(const cm_convert *convert);

/* True if only the real parts of complex numbers are read, because they become real. A
 * bool is made of both parts. */
bool cm_convert_drops_imaginary(const cm_convert *convert);

/* Convert `count` numbers. They may lie at any addresses, and a step is the distance in
 * bytes from one to the next. Source and target must not overlap. Floats round to the
 * nearest, ties to even, whatever the thread's settings are, with the infinities, the
 * subnormals and the bits of NaN that NumPy gives. Integers wrap round into shorter
 * ones. Floats are truncated to integers; one that is out of range becomes the nearest
 * integer, and NaN becomes 0. Each part of a complex number is converted as a number of
 * its own; the imaginary part of what was real is 0; a complex number is true if either
 * part is. */
void cm_convert_run(const cm_convert *convert, void *dst, int64_t dst_step,
                    const void *src, int64_t src_step, int64_t count);
