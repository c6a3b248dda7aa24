/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the CRC-32 of ZIP archives and zlib for messages of which many threads have
 * a part each.
 *
 * The checksum of a message is the remainder of a division of polynomials over the
 * integers modulo 2, in which addition is XOR. So it is a sum, to which each part of
 * the message adds something that depends only on the bytes of the part and on how many
 * bytes of the message come behind it. The order of the parts does not matter. One
 * further term depends only on the length of the message: it is the checksum of that
 * many zeros.
 *
 * Example: the checksum of 1,000 bytes, of which one thread has the first 600.
 *
 *   sum = cm_crc32_of_zeros(1000)
 *   sum ^= cm_crc32_of_part(bytes, 600, 400)        in one thread
 *   sum ^= cm_crc32_of_part(bytes + 600, 400, 0)    in another
 *
 * Any thread may call these functions, and none of them blocks. */
#pragma once

#include <stdint.h>

/* Return the checksum of `nbytes` bytes that are 0. */
uint32_t cm_crc32_of_zeros(uint64_t nbytes);

/* Return what a part of a message adds to its checksum, if `nbytes_behind` bytes of the
 * message come behind the part. */
uint32_t cm_crc32_of_part(const void *part, uint64_t nbytes, uint64_t nbytes_behind);
