/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/written_numbers.h"

#include <stdlib.h>
#include <string.h>

#include "base/row_numbers.h"
#include "transfer/engine/private.h"

enum {
    PART_NUMBERS = 4096,
    PART_NBYTES = PART_NUMBERS * sizeof(int64_t),
    JOIN_NBYTES = 4096, /* how much of each bitmap one part of the joining takes */
    MOST_THREADS = 8,
    WORD_BITS = 64,
    /* The unit of costs is the time that it takes to write a number of 4 bytes. To mark
     * a number in a bitmap, as written_numbers.h tells, takes three times as long. To
     * write a number of 8 bytes takes as long as a mark, since the pages to which it is
     * written may not exist yet. */
    MARK_COST = 3,
    WIDE_COST = 3,
    /* Work that costs less than this is over before other threads are awake. */
    LEAST_COST = 200 * 1000,
    /* A bitmap has a bit for each row of the target. If it has more bits than this for
     * each number to be marked, it takes longer to clear and join the bitmaps than the
     * threads save. */
    BITS_A_NUMBER = 16,
};

/* One call of cm_numbers_write_both(). Any thread may set the atomic members. */
typedef struct shared_pass {
    const cm_numbers_side *sides;
    uint64_t *bitmaps; /* owned; one behind the other; NULL if no number is marked */
    size_t words;      /* of each bitmap */
    _Atomic uint32_t unused;     /* has a bit for each bitmap that no thread has now */
    _Atomic uint32_t begun;      /* has a bit for each bitmap that has been cleared */
    atomic_bool has_outside;     /* a number names no row */
    atomic_bool has_negative[2]; /* indexed by cm_side */
    atomic_bool is_twice;        /* a row of the target is named twice */
} shared_pass;

/* -- a part ------------------------------------------------------------------------- */

/* Write `count` numbers of one side, from number `first` on. Returns an array of only
 * these numbers, which borrows the memory of the whole one. */
static cm_kernel_numbers
write_some(shared_pass *pass, cm_side side, uint64_t first, uint64_t count)
{
    cm_kernel_numbers some = *pass->sides[side].to;
    cm_integers from = pass->sides[side].from;
    some.at = (char *)some.at + first * some.nbytes;
    some.count = count;
    from.first += (int64_t)first * from.stride;
    if (!cm_kernel_numbers_write(&some, from, pass->sides[side].row_count)) {
        atomic_store(&pass->has_outside, true);
    }
    if (some.has_negative) {
        atomic_store(&pass->has_negative[side], true);
    }
    return some;
}

/* Take a bitmap that no other thread has. There always is one, since there are as many
 * bitmaps as threads. The lowest one is taken, so that few bitmaps have to be cleared
 * and joined if few threads help. */
static uint32_t
take_bitmap(shared_pass *pass)
{
    uint32_t unused = atomic_load(&pass->unused);
    while (
        !atomic_compare_exchange_weak(&pass->unused, &unused, unused & (unused - 1))) {
    }
    return (uint32_t)__builtin_ctz(unused);
}

/* Mark numbers that have been written, none of which is negative or outside. */
static void
mark_some(shared_pass *pass, const cm_kernel_numbers *some)
{
    uint32_t index = take_bitmap(pass);
    uint32_t bit = UINT32_C(1) << index;
    uint64_t *bitmap = pass->bitmaps + index * pass->words;
    if ((atomic_fetch_or(&pass->begun, bit) & bit) == 0) {
        memset(bitmap, 0, pass->words * sizeof(*bitmap));
    }
    if (cm_numbers_mark_32(bitmap, some->at, some->count)) {
        atomic_store(&pass->is_twice, true);
    }
    atomic_fetch_or(&pass->unused, bit);
}

/* True if numbers of the target can be marked and it is of use to do so. It is of no
 * use once a number names no row. A negative number cannot be marked, since it counts
 * from the end and would first have to be turned into the number of its row. */
static bool
do_marks_help(const shared_pass *pass)
{
    return pass->bitmaps != NULL && !atomic_load(&pass->has_outside)
           && !atomic_load(&pass->has_negative[CM_DST]);
}

/* Do a part of the task that writes and marks the numbers. A task is measured in bytes,
 * and this one counts 8 bytes for each number. */
static void
do_part(const void *context, const cm_layout *part, void *dst CM_UNUSED,
        const void *src CM_UNUSED, bool wide CM_UNUSED)
{
    shared_pass *pass = (shared_pass *)(uintptr_t)context;
    uint64_t first = (uint64_t)part->offset[CM_SRC] / sizeof(int64_t);
    uint64_t count = part->run_nbytes / sizeof(int64_t);
    for (int side = CM_SRC; side >= CM_DST; side--) {
        if (pass->sides[side].to == NULL || atomic_load(&pass->has_outside)) {
            continue;
        }
        cm_kernel_numbers some = write_some(pass, (cm_side)side, first, count);
        if (side == CM_DST && do_marks_help(pass)) {
            mark_some(pass, &some);
        }
    }
}

/* Do a part of the task that joins the bitmaps. The part has the same words of each
 * bitmap. */
static void
join_part(const void *context, const cm_layout *part, void *dst CM_UNUSED,
          const void *src CM_UNUSED, bool wide CM_UNUSED)
{
    shared_pass *pass = (shared_pass *)(uintptr_t)context;
    size_t at = (size_t)part->offset[CM_SRC] / sizeof(uint64_t);
    uint64_t count = part->run_nbytes / sizeof(uint64_t);
    uint64_t *first = NULL;
    for (uint32_t left = atomic_load(&pass->begun); left != 0; left &= left - 1) {
        uint64_t *next =
            pass->bitmaps + (uint32_t)__builtin_ctz(left) * pass->words + at;
        if (first == NULL) {
            first = next;
        }
        else if (cm_numbers_join_marks(first, next, count)) {
            atomic_store(&pass->is_twice, true);
        }
    }
}

/* -- all parts ---------------------------------------------------------------------- */

static cm_numbers_finding
find(const shared_pass *pass)
{
    if (atomic_load(&pass->has_outside) || atomic_load(&pass->is_twice)) {
        return CM_NUMBERS_WRONG;
    }
    if (pass->sides[CM_DST].to == NULL) {
        return CM_NUMBERS_RIGHT;
    }
    return do_marks_help(pass) ? CM_NUMBERS_RIGHT : CM_NUMBERS_IN_RANGE;
}

/* Let threads take the parts of a task. The task is so short that all threads are woken
 * at once. */
static void
share_out(cm_task_group *group, uint64_t nbytes, uint64_t part_nbytes,
          cm_move_part do_one)
{
    cm_copy_task task = {.next = 0};
    cm_layout all = {.run_nbytes = nbytes};
    group->part_nbytes = part_nbytes;
    group->move = do_one;
    cm_task_group_post(group, &task, &all, NULL, NULL, CM_COPY_PLAIN_ALL);
    cm_task_group_wait(group, &task);
    cm_task_group_close(group);
}

/* Let threads write and mark all numbers, and then join the bitmaps. */
static cm_status
write_by_threads(cm_engine *engine, shared_pass *pass, uint64_t count)
{
    cm_tuning tuning;
    cm_task_group group;
    CM_TRY(cm_engine_begin_call(engine, &tuning));
    cm_task_group_open(&group, &engine->workers, &tuning);
    group.crew = MOST_THREADS;
    group.context = pass;
    share_out(&group, count * sizeof(int64_t), PART_NBYTES, do_part);
    if (do_marks_help(pass)) {
        share_out(&group, pass->words * sizeof(uint64_t), JOIN_NBYTES, join_part);
    }
    cm_engine_end_call(engine);
    return cm_ok();
}

/* Make the bitmaps, one for each thread, if the numbers of the target can be marked in
 * them. If no bitmaps are made, the caller of cm_numbers_write_both() has to find out
 * whether a row is named twice. */
static void
make_bitmaps(shared_pass *pass)
{
    const cm_numbers_side *dst = &pass->sides[CM_DST];
    if (dst->to == NULL || dst->to->nbytes != sizeof(int32_t)
        || (uint64_t)dst->row_count / BITS_A_NUMBER > dst->to->count) {
        return;
    }
    pass->words = (size_t)dst->row_count / WORD_BITS + 1;
    pass->bitmaps = malloc(MOST_THREADS * pass->words * sizeof(*pass->bitmaps));
}

/* -- the call ----------------------------------------------------------------------- */

/* Return what the work on one number of this side costs. */
static uint64_t
cost_of(const cm_numbers_side *one, cm_side side)
{
    if (one->to->nbytes != sizeof(int32_t)) {
        return WIDE_COST; /* such numbers are not marked */
    }
    return side == CM_DST ? 1 + MARK_COST : 1;
}

/* True if the work is worth more than one thread. */
static bool
is_shared(const cm_numbers_side sides[2])
{
    uint64_t costs = 0;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        const cm_numbers_side *one = &sides[side];
        if (one->to != NULL) {
            costs += one->to->count * cost_of(one, (cm_side)side);
        }
    }
    return costs >= LEAST_COST;
}

/* Write the numbers in the calling thread. */
static cm_numbers_finding
write_here(const cm_numbers_side sides[2])
{
    for (int side = CM_DST; side <= CM_SRC; side++) {
        const cm_numbers_side *one = &sides[side];
        if (one->to != NULL
            && !cm_kernel_numbers_write(one->to, one->from, one->row_count)) {
            return CM_NUMBERS_WRONG;
        }
    }
    return sides[CM_DST].to == NULL ? CM_NUMBERS_RIGHT : CM_NUMBERS_IN_RANGE;
}

cm_status
cm_numbers_write_both(cm_engine *engine, const cm_numbers_side sides[2],
                      cm_numbers_finding *out)
{
    if (!is_shared(sides)) {
        *out = write_here(sides);
        return cm_ok();
    }
    cm_side any = sides[CM_DST].to != NULL ? CM_DST : CM_SRC;
    shared_pass pass = {.sides = sides, .unused = (1U << MOST_THREADS) - 1};
    make_bitmaps(&pass);
    cm_status status = write_by_threads(engine, &pass, sides[any].to->count);
    for (int side = CM_DST; side <= CM_SRC; side++) {
        if (sides[side].to != NULL) {
            sides[side].to->has_negative = atomic_load(&pass.has_negative[side]);
        }
    }
    *out = find(&pass);
    free(pass.bitmaps);
    return status;
}
