/* SPDX-License-Identifier: Apache-2.0 */
/* Loops that check and copy arrays of row numbers, as fast as the processor can. This
 * file knows the processor and nothing else.
 *
 * A kernel moves a short row in less time than a careful look at its number takes. So
 * the loops here have no branch for a number, and there is a copy of each for
 * processors with wider vectors, which is chosen when it is called. They say what is
 * true of all numbers together. Which number is wrong is for the caller to find out. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What has been found of the numbers of an array, so far. */
typedef struct cm_numbers_seen {
    bool has_outside; /* one of them names no row, since it is not in [-row_count,
                         row_count) */
    bool has_negative;
} cm_numbers_seen;

/* Write `count` numbers of 8 or of 4 bytes, which may lie at any address, to `to`,
 * where each takes `to_nbytes`: 8, or 4, which is enough for arrays of at most
 * INT32_MAX rows. Numbers of 4 bytes become numbers of 4 bytes. Negative numbers stay
 * as they are. What is found is added to *seen. Each number is read once, so that what
 * is written has been checked even if another thread changes the numbers meanwhile. If
 * `has_outside` is set, what has been written is of no use. */
void cm_numbers_write_64(const void *from, void *to, uint32_t to_nbytes, uint64_t count,
                         int64_t row_count, cm_numbers_seen *seen);
void cm_numbers_write_32(const void *from, int32_t *to, uint64_t count,
                         int64_t row_count, cm_numbers_seen *seen);

/* Look at `count` numbers as cm_numbers_write_64() does, and write nothing. */
void cm_numbers_look_64(const int64_t *numbers, uint64_t count, int64_t row_count,
                        cm_numbers_seen *seen);

/* True if each number is larger than the one before. None may be negative. */
bool cm_numbers_rise_32(const int32_t *numbers, uint64_t count);

/* Set the bit of each number in a bitmap, which has bit i in word i / 64. None may be
 * negative. Returns true if one of the bits was set before. */
bool cm_numbers_mark_32(uint64_t *bits, const int32_t *numbers, uint64_t count);

/* Set the bits of `more` in `bits`, which have `words` words each. Returns true if one
 * of the bits was set in both. */
bool cm_numbers_join_marks(uint64_t *bits, const uint64_t *more, uint64_t words);
