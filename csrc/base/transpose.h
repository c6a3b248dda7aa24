/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of short elements turned into columns. Knows the processor, nothing else. */
#ifndef CM_BASE_TRANSPOSE_H
#define CM_BASE_TRANSPOSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CM_TRANSPOSE_ROWS = 16, CM_TRANSPOSE_ROW_NBYTES = 64 };

/* Each column of the 16 packed rows at `src`, 64 bytes each, becomes 16 packed
 * elements; the first at `dst`, the next ones `stride` bytes apart. False, with nothing
 * done, if elements of `itemsize` bytes are not known here. The two must not overlap.
 */
bool cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize);

#endif
