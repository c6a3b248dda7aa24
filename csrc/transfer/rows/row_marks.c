/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/row_marks.h"

#include <stdlib.h>

/* A bitmap of more than BITS_BESIDES bits, and BITS_A_MARK more for each mark, takes
 * longer to clear than a hash table. */
enum { BITS_A_MARK = 256, BITS_BESIDES = 1 << 16 };

enum { HASH_BITS = 64 };

/* Choose between a bitmap and a hash table, and return how many words it takes. At
 * least half of a hash table stays free, so that a search soon meets a free slot. */
static uint64_t
choose_size(cm_row_marks *self, uint64_t row_count, uint64_t count)
{
    if (row_count / BITS_A_MARK <= count + BITS_BESIDES / BITS_A_MARK) {
        return row_count / 64 + 1;
    }
    uint64_t slots = 2;
    self->hash_shift = HASH_BITS - 1;
    while (slots / 2 < count) {
        slots *= 2;
        self->hash_shift--;
    }
    self->slot_mask = slots - 1;
    return slots;
}

cm_status
cm_row_marks_init(cm_row_marks *self, uint64_t row_count, uint64_t count)
{
    *self = (cm_row_marks){.words = NULL};
    CM_TRY(cm_allocated(count <= SIZE_MAX / (4 * sizeof(*self->words)), UINT64_MAX));
    size_t words = (size_t)choose_size(self, row_count, count);
    self->words = calloc(words, sizeof(*self->words));
    return cm_allocated(self->words != NULL, words * sizeof(*self->words));
}

void
cm_row_marks_fini(cm_row_marks *self)
{
    free(self->words);
    self->words = NULL;
}
