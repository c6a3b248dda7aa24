/* SPDX-License-Identifier: Apache-2.0 */
/* Checks and copies arrays of row numbers, as fast as the processor can. This file
 * knows the processor and nothing else.
 *
 * A GPU kernel moves a short row faster than the host can check its number with a
 * branch. So the loops here have no branch that depends on a number. On x86-64 each
 * loop is compiled twice, and the version with wider vectors runs on processors that
 * have them. A loop reports only whether any number is wrong. The caller finds out
 * which one it is. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What the loops have found so far in the numbers of an array. */
typedef struct cm_numbers_seen {
    bool has_outside; /* some number is not in [-row_count, row_count) */
    bool has_negative;
} cm_numbers_seen;

/* Check `count` numbers and copy them to `to`. cm_numbers_write_64() reads numbers of 8
 * bytes and writes numbers of `to_nbytes` bytes: 8, or 4 if the array has at most
 * INT32_MAX rows. cm_numbers_write_32() reads and writes numbers of 4 bytes. `from`
 * need not be aligned, and negative numbers stay negative. The functions set the flags
 * in *seen that apply, and clear none. Each number is read only once, so that even if
 * another thread changes the numbers meanwhile, the written ones have been checked. If
 * `has_outside` is set, the numbers in `to` must not be used. */
void cm_numbers_write_64(const void *from, void *to, uint32_t to_nbytes, uint64_t count,
                         int64_t row_count, cm_numbers_seen *seen);
void cm_numbers_write_32(const void *from, int32_t *to, uint64_t count,
                         int64_t row_count, cm_numbers_seen *seen);

/* Check `count` numbers as cm_numbers_write_64() does, but write nothing except
 * *seen. */
void cm_numbers_look_64(const int64_t *numbers, uint64_t count, int64_t row_count,
                        cm_numbers_seen *seen);

/* True if each number is larger than the one before. No number may be negative. */
bool cm_numbers_rise_32(const int32_t *numbers, uint64_t count);

/* Set the bit of each number in a bitmap, which has bit i in word i / 64. No number may
 * be negative. Returns true if one of the bits was set before. */
bool cm_numbers_mark_32(uint64_t *bits, const int32_t *numbers, uint64_t count);

/* Set the bits of `more` in `bits`, which have `words` words each. Returns true if one
 * of the bits was set in both. */
bool cm_numbers_join_marks(uint64_t *bits, const uint64_t *more, uint64_t words);
