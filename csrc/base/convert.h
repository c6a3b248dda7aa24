/* SPDX-License-Identifier: Apache-2.0 */
/* Converts numbers of one type to another on the processor, many at a time, as NumPy
 * casts them. */
#pragma once

#include <stddef.h>

#include "base/dtypes.h"

/* Converts elements whose types are not among CM_NUMBERS. The code that knows these
 * types has a struct that begins with this one, and makes sure that the struct outlives
 * the copy. `run` converts element (i, j, ...), which lies at src + i*src_strides[0] +
 * j*src_strides[1] + ..., and stores it at the same indices of the target. The two do
 * not overlap. Several threads may call `run` at a time, without any lock. It returns
 * false if some element could not be converted; `number` then tells which cast failed,
 * so that the code that made the cast can find out why. */
typedef struct cm_cast {
    bool (*run)(const struct cm_cast *cast, int ndim, const int64_t *shape, void *dst,
                const int64_t *dst_strides, const void *src,
                const int64_t *src_strides);
    uint64_t number;
} cm_cast;

enum { CM_CAST_MAX_NDIM = 8 }; /* the most dimensions that `run` can take */

/* A conversion. Each value becomes value * scale + offset, computed in float64 if that
 * is one of the two types and else in float32. Without `scales` the value stays the
 * same, as far as the target's type can express it. Complex numbers are not scaled. */
typedef struct cm_convert {
    cm_number from; /* CM_NUMBER_NONE if `cast` converts, or nothing does */
    cm_number to;
    bool scales;
    double scale;
    double offset;
    /* The bytes of each element are in the order opposite to the processor's. */
    bool from_swapped;
    bool to_swapped;
    const cm_cast *cast; /* borrowed; NULL if the types are numbers */
} cm_convert;

static inline bool
cm_convert_is_on(const cm_convert *convert)
{
    return convert->from != CM_NUMBER_NONE || convert->cast != NULL;
}

/* True if the device's kernel can do this conversion as well. The kernel converts to
 * float32 from each type whose row in dtypes.h says DEVICE, and its results have the
 * same bits as those of cm_convert_run(). It swaps no bytes. It scales only integers,
 * by finite numbers, so that no NaN can arise. */
bool cm_convert_has_kernel(const cm_convert *convert);

/* True if complex numbers are converted to a real type, for which only their real parts
 * are read. (A bool is made of both parts, so it does not count.) */
bool cm_convert_drops_imaginary(const cm_convert *convert);

/* Convert `count` numbers, which lie `src_step` and `dst_step` bytes apart. They need
 * not be aligned. Source and target must not overlap. Floats round to the nearest, ties
 * to even, whatever the thread's settings are, with the infinities, the subnormals and
 * the bits of NaN that NumPy gives. Integers wrap round into shorter ones. A float that
 * becomes an integer loses its fraction; if it is out of range it becomes the nearest
 * integer, and NaN becomes 0. Each part of a complex number is converted by itself. A
 * real number that becomes complex has the imaginary part 0. A complex number that
 * becomes a bool is true if either part is. */
void cm_convert_run(const cm_convert *convert, void *dst, int64_t dst_step,
                    const void *src, int64_t src_step, int64_t count);
