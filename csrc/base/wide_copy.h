/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of long runs past the caches: for targets that nobody reads soon. Knows the
 * processor, nothing else. */
#ifndef CM_BASE_WIDE_COPY_H
#define CM_BASE_WIDE_COPY_H

#include <stddef.h>

/* What the copy is made with on this processor: "avx512", "avx2", "sse2", "neon" or
 * "memcpy". */
const char *cm_wide_copy_name(void);

/* As memcpy; worth it from some KiB on. The stores are ordered before what follows. */
void cm_wide_copy(void *dst, const void *src, size_t nbytes);

#endif
