/* SPDX-License-Identifier: Apache-2.0 */
/* Which file a piece of memory is a shared mapping of, as /proc/self/maps tells. Knows
 * nothing of what the memory is for. No locks; nothing is kept between calls. */
#ifndef CM_BASE_MAPPING_H
#define CM_BASE_MAPPING_H

#include <stdbool.h>
#include <stdint.h>

/* Open, for reading, the file whose bytes from *offset on are those of [begin, begin +
 * nbytes), nbytes > 0: all of it is mapped from that file, shared and in order, and the
 * path still leads to it. -1 where that is not so or not known. Reads all that the
 * process has mapped: takes up to a millisecond. The descriptor is the caller's. */
int cm_mapping_open(const void *begin, uint64_t nbytes, uint64_t *offset);

#endif
