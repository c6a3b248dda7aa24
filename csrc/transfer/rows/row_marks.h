/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps a set of rows of one array, which shows whether a row is named twice.
 *
 * Unless the array has many times as many rows as are marked, the set is a bitmap with
 * a bit for each row of the array. To clear the bitmap of a much longer array would
 * take more time than to look up all numbers in a hash table. So for such an array the
 * set is a hash table of the marked rows, each of which lies in the first free slot
 * from its hash on.
 *
 * Everything is pure. There are no locks. */
#pragma once

#include "base/status.h"

/* A bitmap has its bits in `words`, and a hash table its slots. A slot holds the number
 * of its row plus 1, so that 0 means a free slot. */
typedef struct cm_row_marks {
    uint64_t *words;     /* owned */
    uint64_t slot_mask;  /* the number of slots less 1; 0 if the set is a bitmap */
    uint32_t hash_shift; /* a hash is the bits of a product from this one on */
} cm_row_marks;

/* Make an empty set for at most `count` marks in an array of `row_count` rows.
 * Fails: CM_ENOMEM; cm_row_marks_fini() may still be called. */
CM_NODISCARD cm_status cm_row_marks_init(cm_row_marks *self, uint64_t row_count,
                                         uint64_t count);
void cm_row_marks_fini(cm_row_marks *self);

/* Return the slot that has the row, or the free one where it belongs. */
static inline uint64_t *
cm_row_marks_slot(const cm_row_marks *self, uint64_t row)
{
    /* The upper bits of a product with 2^64 / phi differ for neighbouring rows. */
    uint64_t at = (row * UINT64_C(0x9e3779b97f4a7c15)) >> self->hash_shift;
    while (self->words[at] != 0 && self->words[at] != row + 1) {
        at = (at + 1) & self->slot_mask;
    }
    return &self->words[at];
}

/* Mark a row of the array. Returns true if it was marked before. */
static inline bool
cm_row_marks_add(cm_row_marks *self, uint64_t row)
{
    if (self->slot_mask != 0) {
        uint64_t *slot = cm_row_marks_slot(self, row);
        bool was_there = *slot != 0;
        *slot = row + 1;
        return was_there;
    }
    uint64_t *word = &self->words[row / 64];
    uint64_t before = *word;
    *word = before | UINT64_C(1) << (row % 64);
    return (before >> (row % 64) & 1) != 0;
}

/* Return true if the row has been marked. */
static inline bool
cm_row_marks_has(const cm_row_marks *self, uint64_t row)
{
    if (self->slot_mask != 0) {
        return *cm_row_marks_slot(self, row) != 0;
    }
    return (self->words[row / 64] >> (row % 64) & 1) != 0;
}
