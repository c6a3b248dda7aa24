/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/host/short_task.h"

#include <sched.h>
#include <string.h>

#include "base/thread.h"
#include "base/wide_copy.h"

enum {
    PART_EDGE = 4096,
    TURNS = 2000 /* before the processor is given up to a thread that copies */
};

/* The `turn`th look in vain. */
static void
let_pass(unsigned turn)
{
    if (turn % TURNS == TURNS - 1) {
        (void)sched_yield();
    }
    else {
        cm_relax();
    }
}

void
cm_short_task_init(cm_short_task *short_task)
{
    *short_task = (cm_short_task){.next = CM_SHORT_TASK_CLOSED};
}

bool
cm_short_task_begin(cm_short_task *short_task, void *dst, const void *src,
                    uint64_t nbytes, uint64_t piece_nbytes, uint32_t thread_limit,
                    bool packs)
{
    if (atomic_exchange(&short_task->taken, true)) {
        return false;
    }
    /* A part of each piece for each thread and for the owner. */
    uint64_t part = piece_nbytes / (thread_limit + 1) + 1;
    part = (part + PART_EDGE - 1) / PART_EDGE * PART_EDGE;
    part = part < piece_nbytes ? part : piece_nbytes;
    short_task->dst = dst;
    short_task->src = src;
    short_task->nbytes = nbytes;
    short_task->piece_nbytes = piece_nbytes;
    short_task->part_nbytes = part;
    short_task->piece_parts = (uint32_t)((piece_nbytes + part - 1) / part);
    short_task->part_count = 0;
    short_task->packs = packs;
    for (uint32_t i = 0; i < CM_SHORT_TASK_PIECES; i++) {
        uint32_t count = i * piece_nbytes < nbytes ? short_task->piece_parts : 0;
        atomic_store(&short_task->left[i], count);
        short_task->part_count += count;
    }
    atomic_store(&short_task->copied_count, 0);
    atomic_store(&short_task->ready, packs ? short_task->part_count : 0);
    uint64_t number = atomic_load(&short_task->next) >> 32;
    atomic_store(&short_task->open, thread_limit); /* before the last part can be taken
                                                    */
    atomic_store(&short_task->next, (number + 1) << 32);
    return true;
}

void
cm_short_task_make_ready(cm_short_task *short_task, uint32_t piece_count)
{
    uint32_t count = piece_count * short_task->piece_parts;
    atomic_store(&short_task->ready,
                 count < short_task->part_count ? count : short_task->part_count);
}

static bool
take_part(cm_short_task *short_task, uint32_t *out)
{
    uint64_t next = atomic_load(&short_task->next);
    do {
        /* read after `next`: where it is of a later one, `next` is another by now */
        if ((uint32_t)next >= atomic_load(&short_task->ready)) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&short_task->next, &next, next + 1));
    *out = (uint32_t)next;
    if (*out + 1 == short_task->part_count) {
        atomic_store(&short_task->open, 0); /* nobody else needs to come */
    }
    return true;
}

static void
copy_part(cm_short_task *short_task, uint32_t part)
{
    uint32_t piece = part / short_task->piece_parts;
    uint64_t begin = (part % short_task->piece_parts) * short_task->part_nbytes;
    uint64_t end = begin + short_task->part_nbytes;
    end = end < short_task->piece_nbytes ? end : short_task->piece_nbytes;
    begin += piece * short_task->piece_nbytes;
    end += piece * short_task->piece_nbytes;
    end = end < short_task->nbytes ? end : short_task->nbytes;
    size_t length = begin < end ? (size_t)(end - begin) : 0;
    if (short_task->packs) {
        cm_wide_copy(short_task->dst + begin, short_task->src + begin, length);
    }
    else {
        memcpy(short_task->dst + begin, short_task->src + begin, length);
    }
    atomic_fetch_sub(&short_task->left[piece], 1);
    atomic_fetch_add(&short_task->copied_count, 1); /* from here on all may change */
}

void
cm_short_task_finish_piece(cm_short_task *short_task, uint32_t piece)
{
    uint32_t part;
    for (unsigned turn = 0; atomic_load(&short_task->left[piece]) > 0; turn++) {
        if (take_part(short_task, &part)) {
            copy_part(short_task, part);
        }
        else {
            let_pass(turn);
        }
    }
}

void
cm_short_task_end(cm_short_task *short_task)
{
    atomic_store(&short_task->open, 0);
    uint64_t next = atomic_fetch_or(&short_task->next, CM_SHORT_TASK_CLOSED);
    for (unsigned turn = 0; atomic_load(&short_task->copied_count) < (uint32_t)next;
         turn++) {
        let_pass(turn);
    }
    atomic_store(&short_task->taken, false);
}

void
cm_short_task_join(cm_short_task *short_task, uint32_t thread_index)
{
    uint32_t part;
    for (unsigned turn = 0; cm_short_task_is_open(short_task, thread_index); turn++) {
        if (take_part(short_task, &part)) {
            copy_part(short_task, part);
        }
        else {
            let_pass(turn);
        }
    }
}
