/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/brief.h"

#include <sched.h>
#include <string.h>

#include "base/thread.h"
#include "base/wide_copy.h"

enum {
    PART_EDGE = 4096,
    TURNS = 2000 /* before the processor is given up for who is at a part */
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
cm_brief_init(cm_brief *brief)
{
    *brief = (cm_brief){.next = CM_BRIEF_CLOSED};
}

bool
cm_brief_begin(cm_brief *brief, void *dst, const void *src, uint64_t nbytes,
               uint64_t piece_nbytes, uint32_t thread_limit, bool packs)
{
    if (atomic_exchange(&brief->taken, true)) {
        return false;
    }
    /* A part of each piece for each thread and for the owner. */
    uint64_t part = piece_nbytes / (thread_limit + 1) + 1;
    part = (part + PART_EDGE - 1) / PART_EDGE * PART_EDGE;
    part = part < piece_nbytes ? part : piece_nbytes;
    brief->dst = dst;
    brief->src = src;
    brief->nbytes = nbytes;
    brief->piece_nbytes = piece_nbytes;
    brief->part_nbytes = part;
    brief->piece_parts = (uint32_t)((piece_nbytes + part - 1) / part);
    brief->part_count = 0;
    brief->packs = packs;
    for (uint32_t i = 0; i < CM_BRIEF_PIECES; i++) {
        uint32_t count = i * piece_nbytes < nbytes ? brief->piece_parts : 0;
        atomic_store(&brief->left[i], count);
        brief->part_count += count;
    }
    atomic_store(&brief->copied_count, 0);
    atomic_store(&brief->ready, packs ? brief->part_count : 0);
    uint64_t number = atomic_load(&brief->next) >> 32;
    atomic_store(&brief->open, thread_limit); /* before the last part can be taken */
    atomic_store(&brief->next, (number + 1) << 32);
    return true;
}

void
cm_brief_make_ready(cm_brief *brief, uint32_t piece_count)
{
    uint32_t count = piece_count * brief->piece_parts;
    atomic_store(&brief->ready, count < brief->part_count ? count : brief->part_count);
}

static bool
take_part(cm_brief *brief, uint32_t *out)
{
    uint64_t next = atomic_load(&brief->next);
    do {
        /* read after `next`: where it is of a later one, `next` is another by now */
        if ((uint32_t)next >= atomic_load(&brief->ready)) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&brief->next, &next, next + 1));
    *out = (uint32_t)next;
    if (*out + 1 == brief->part_count) {
        atomic_store(&brief->open, 0); /* nobody else needs to come */
    }
    return true;
}

static void
copy_part(cm_brief *brief, uint32_t part)
{
    uint32_t piece = part / brief->piece_parts;
    uint64_t begin = (part % brief->piece_parts) * brief->part_nbytes;
    uint64_t end = begin + brief->part_nbytes;
    end = end < brief->piece_nbytes ? end : brief->piece_nbytes;
    begin += piece * brief->piece_nbytes;
    end += piece * brief->piece_nbytes;
    end = end < brief->nbytes ? end : brief->nbytes;
    size_t length = begin < end ? (size_t)(end - begin) : 0;
    if (brief->packs) {
        cm_wide_copy(brief->dst + begin, brief->src + begin, length);
    }
    else {
        memcpy(brief->dst + begin, brief->src + begin, length);
    }
    atomic_fetch_sub(&brief->left[piece], 1);
    atomic_fetch_add(&brief->copied_count, 1); /* from here on all may change */
}

void
cm_brief_finish_piece(cm_brief *brief, uint32_t piece)
{
    uint32_t part;
    for (unsigned turn = 0; atomic_load(&brief->left[piece]) > 0; turn++) {
        if (take_part(brief, &part)) {
            copy_part(brief, part);
        }
        else {
            let_pass(turn);
        }
    }
}

void
cm_brief_end(cm_brief *brief)
{
    atomic_store(&brief->open, 0);
    uint64_t next = atomic_fetch_or(&brief->next, CM_BRIEF_CLOSED);
    for (unsigned turn = 0; atomic_load(&brief->copied_count) < (uint32_t)next;
         turn++) {
        let_pass(turn);
    }
    atomic_store(&brief->taken, false);
}

void
cm_brief_join(cm_brief *brief, uint32_t thread_index)
{
    uint32_t part;
    for (unsigned turn = 0; cm_brief_is_open(brief, thread_index); turn++) {
        if (take_part(brief, &part)) {
            copy_part(brief, part);
        }
        else {
            let_pass(turn);
        }
    }
}
