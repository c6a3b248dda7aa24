/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of pool/heap against a model. The model knows for each unit of 64 bytes whether
 * it is free, live or a gap. It also knows for which stream each unit was last given
 * back late, that is, while work of that stream might still run there. Random
 * operations change the heap and the model, and the two must agree. Addresses are made
 * up. The program's argument is the number of operations of the long run. */
#include <stdlib.h>

#include "check.h"
#include "pool/heap.h"

#define MIB (UINT64_C(1) << 20)
#define BASE (UINT64_C(1) << 40)

enum {
    TAGS = 4,
    UNIT = 64,
    ARENAS = 4, /* the last one is a range with gaps */
    ARENA_UNITS = 8192,
    GRANULE = 64 << 10,
    LIVE_MAX = 600,
    STATE_FREE = 0,
    STATE_GAP = 1,
    STATE_HELD = 2,
};

static uint64_t run_count = 3000000 / CHECK_EVERY(20);

typedef struct unit {
    uint8_t state;
    uint8_t tag; /* the stream for which it was last given back late */
    uint32_t epoch;
} unit;

typedef struct model {
    cm_heap heap;
    unit units[ARENAS][ARENA_UNITS];
    /* For each stream the last epoch that has ended, and the present one. */
    uint64_t done[TAGS];
    uint64_t epoch[TAGS];
    cm_heap_span *live[LIVE_MAX];
    int live_count;
    uint64_t random;
    uint64_t taken_count;
    /* How many spans were compared with the best fit. */
    uint64_t judged_count;
    /* How many of the judged spans were worse than the best fit by more than 1/32. */
    uint64_t worse_count;
    const char *wrong;
} model;

/* True if the heap's invariants hold. */
static bool
is_sound(const cm_heap *heap)
{
    cm_heap_sums sums[CM_SPAN_STATE_COUNT] = {{0, 0}};
    return cm_heap_check(heap, sums);
}

static uint64_t
next_random(model *m)
{
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return m->random >> 8;
}

/* Return the units of this span. */
static unit *
units_of(model *m, const cm_heap_span *span)
{
    uint64_t arena = (span->block.address - BASE) / MIB;
    return &m->units[arena][(span->block.address - BASE) % MIB / UNIT];
}

/* Change the units of the span from one state to another, and check that they were in
 * the first. */
static void
set_units(model *m, const cm_heap_span *span, uint8_t was, uint8_t is)
{
    unit *u = units_of(m, span);
    for (uint64_t i = 0; i < span->block.nbytes / UNIT; i++) {
        if (u[i].state != was) {
            m->wrong = "a span overlaps what it must not";
        }
        u[i].state = is;
    }
}

static cm_heap_view
model_view(const model *m, uint32_t tag)
{
    return (cm_heap_view){.tag = tag, .done = m->done, .single_stream = false};
}

/* Return the length of the shortest free span that could serve the request, or 0 if
 * there is none. This walks over all spans. */
static uint64_t
best_fit(const model *m, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    uint64_t best = 0;
    const cm_list *arenas = &m->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next) {
        for (const cm_heap_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            uint64_t pad = (0 - s->block.address) & (align - 1);
            if (s->state == CM_SPAN_FREE && s->block.nbytes >= nbytes + pad
                && cm_span_is_usable(s, view)
                && (best == 0 || s->block.nbytes < best)) {
                best = s->block.nbytes;
            }
        }
    }
    return best;
}

/* Return the length of the free span from which `span` has just been cut. The rest of
 * that free span lies beside `span`, has the same tag and epoch, and has joined
 * nothing. */
static uint64_t
length_before(const cm_heap_span *span)
{
    uint64_t length = span->block.nbytes;
    const cm_heap_span *both[2] = {span->prev, span->next};
    for (int i = 0; i < 2; i++) {
        const cm_heap_span *s = both[i];
        bool was_part = s != NULL && s->state == CM_SPAN_FREE && s->tag == span->tag
                        && s->epoch == span->epoch;
        length += was_part ? s->block.nbytes : 0;
    }
    return length;
}

/* Take a random block, and check that it may be handed out. Some are also compared with
 * the best fit. */
static void
model_take(model *m)
{
    static const uint64_t aligns[] = {64, 64, 64, 512, 4096};
    uint64_t r = next_random(m);
    uint64_t nbytes = (1 + (r & 0xffff) % (UINT64_C(1) << (r >> 16) % 9)) * UNIT;
    uint64_t align = aligns[(r >> 24) % 5];
    cm_heap_view view = model_view(m, (uint32_t)((r >> 32) % TAGS));
    bool thorough = (r >> 40) % 8 == 0;
    bool checked = (r >> 44) % 64 == 0;
    if (m->live_count == LIVE_MAX) {
        return;
    }
    uint64_t best = checked ? best_fit(m, nbytes, align, &view) : 0;
    cm_heap_span *span = thorough ? cm_heap_search(&m->heap, nbytes, align, &view)
                                  : cm_heap_take(&m->heap, nbytes, align, &view);
    if (span == NULL) {
        if (thorough && best != 0) {
            m->wrong = "the thorough search missed a span";
        }
        return;
    }
    if (span->state != CM_SPAN_LIVE || span->block.nbytes != nbytes
        || span->block.address % align != 0
        || (span->arena->host != NULL
            && span->block.host != (void *)(uintptr_t)span->block.address)) {
        m->wrong = "a span is not what was asked for";
    }
    if (checked && best == 0) {
        m->wrong = "a span was found although none fits";
    }
    if (checked && align == UNIT) {
        m->judged_count++;
        m->worse_count += length_before(span) > best + best / 32 + UNIT;
    }
    const unit *u = units_of(m, span);
    for (uint64_t i = 0; i < nbytes / UNIT; i++) {
        if (u[i].epoch > m->done[u[i].tag] && u[i].tag != view.tag) {
            m->wrong = "a span was handed out while another stream's work runs on it";
        }
    }
    set_units(m, span, STATE_FREE, STATE_HELD);
    m->live[m->live_count++] = span;
    m->taken_count++;
}

/* Give a random block back for a random stream. */
static void
model_give(model *m)
{
    if (m->live_count == 0) {
        return;
    }
    uint64_t r = next_random(m);
    int i = (int)(r % (uint64_t)m->live_count);
    cm_heap_span *span = m->live[i];
    uint32_t tag = (uint32_t)((r >> 32) % TAGS);
    uint64_t epoch = tag == 0 ? 0 : m->epoch[tag];
    cm_heap_view view = model_view(m, tag);
    m->live[i] = m->live[--m->live_count];
    set_units(m, span, STATE_HELD, STATE_FREE);
    unit *u = units_of(m, span);
    for (uint64_t k = 0; k < span->block.nbytes / UNIT; k++) {
        u[k].tag = (uint8_t)tag;
        u[k].epoch = (uint32_t)epoch;
    }
    (void)cm_heap_give(&m->heap, span, tag, epoch, &view);
}

/* Return a span of the range, from a random place on, that is a GAP, or that is FREE
 * and clean. Returns NULL if there is none. */
static cm_heap_span *
pick(model *m, cm_span_state state)
{
    cm_arena *range = CM_LIST_ENTRY(m->heap.arenas.prev, cm_arena, node);
    cm_address at = range->base + next_random(m) % range->nbytes;
    cm_heap_view view = model_view(m, 0);
    for (cm_heap_span *s = range->first; s != NULL; s = s->next) {
        if (cm_span_end(s) > at && s->state == state
            && (state == CM_SPAN_GAP || cm_span_is_clean(s, &view))) {
            return s;
        }
    }
    return NULL;
}

/* Put memory into a part of a gap. */
static void
model_back(model *m)
{
    cm_heap_span *gap = pick(m, CM_SPAN_GAP);
    if (gap == NULL) {
        return;
    }
    uint64_t granules = gap->block.nbytes / GRANULE;
    uint64_t first = next_random(m) % granules;
    uint64_t count = 1 + next_random(m) % (granules - first);
    cm_heap_span *busy = cm_heap_carve(
        &m->heap, gap, gap->block.address + first * GRANULE, count * GRANULE);
    cm_heap_view view = model_view(m, 0);
    /* In half of the cases the second half of the span stays without memory. */
    if (count > 1 && next_random(m) % 2 == 0) {
        cm_heap_give_gap(&m->heap, cm_heap_cut(&m->heap, busy, count / 2 * GRANULE));
    }
    set_units(m, busy, STATE_GAP, STATE_FREE);
    (void)cm_heap_give(&m->heap, busy, 0, 0, &view);
}

/* Take the memory out of the whole granules of a free span. */
static void
model_empty(model *m)
{
    cm_heap_span *free_one = pick(m, CM_SPAN_FREE);
    if (free_one == NULL) {
        return;
    }
    cm_address begin = (free_one->block.address + GRANULE - 1) / GRANULE * GRANULE;
    cm_address end = cm_span_end(free_one) / GRANULE * GRANULE;
    if (begin >= end) {
        return;
    }
    cm_heap_span *busy = cm_heap_carve(&m->heap, free_one, begin, end - begin);
    set_units(m, busy, STATE_FREE, STATE_GAP);
    unit *u = units_of(m, busy);
    for (uint64_t i = 0; i < busy->block.nbytes / UNIT; i++) {
        u[i] = (unit){STATE_GAP, 0, 0};
    }
    cm_heap_give_gap(&m->heap, busy);
}

static void
model_step(model *m)
{
    uint64_t r = next_random(m);
    uint32_t tag = (uint32_t)(1 + (r >> 8) % (TAGS - 1));
    cm_heap_view view = model_view(m, tag);
    switch (r % 64) {
    case 0:
        m->done[tag] = m->epoch[tag]++;
        break;
    case 1:
        (void)cm_heap_join(&m->heap, &view);
        break;
    case 2:
        model_back(m);
        break;
    case 3:
        model_empty(m);
        break;
    default:
        if (r >> 16 & 1) {
            model_take(m);
        }
        else {
            model_give(m);
        }
    }
}

/* Check that every unit is in the state of its span, and that the heap's invariants
 * hold. */
static bool
agrees(model *m)
{
    const cm_list *arenas = &m->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next) {
        for (const cm_heap_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            int is = s->state == CM_SPAN_FREE  ? STATE_FREE
                     : s->state == CM_SPAN_GAP ? STATE_GAP
                                               : STATE_HELD;
            const unit *u = units_of(m, s);
            for (uint64_t i = 0; i < s->block.nbytes / UNIT; i++) {
                if (u[i].state != is) {
                    return false;
                }
            }
        }
    }
    return is_sound(&m->heap);
}

static void
init_model(model *m, uint64_t seed)
{
    *m = (model){.random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1};
    cm_heap_init(&m->heap);
    m->done[0] = UINT64_MAX;
    for (int t = 1; t < TAGS; t++) {
        m->epoch[t] = 1;
    }
    for (uint64_t i = 0; i < ARENAS - 1; i++) {
        cm_address base = BASE + i * MIB;
        cm_chunk chunk = {.host = (void *)(uintptr_t)base,
                          .address = base,
                          .nbytes = ARENA_UNITS * UNIT};
        CHECK(cm_heap_add_chunk(&m->heap, &chunk) != NULL);
    }
    CHECK(cm_heap_add_range(&m->heap, BASE + (ARENAS - 1) * MIB, ARENA_UNITS * UNIT,
                            GRANULE)
          != NULL);
    for (int i = 0; i < ARENA_UNITS; i++) {
        m->units[ARENAS - 1][i].state = STATE_GAP;
    }
}

/* Make `steps` random operations. The heap's invariants are checked every `check_every`
 * operations, and all units are compared with the spans every 256 times as many. */
static void
run_model(uint64_t seed, uint64_t steps, uint64_t check_every)
{
    static model m;
    init_model(&m, seed);
    for (uint64_t i = 0; i < steps; i++) {
        model_step(&m);
        if (i % check_every == 0 && !is_sound(&m.heap)) {
            m.wrong = "the heap's invariants do not hold";
        }
        if (i % (check_every * 256) == 0 && !agrees(&m)) {
            m.wrong = "the spans differ from the model";
        }
        if (m.wrong != NULL) {
            CHECK_FAIL_("in seed %llu, step %llu: %s", (unsigned long long)seed,
                        (unsigned long long)i, m.wrong);
            break;
        }
    }
    CHECK_GT(m.taken_count, steps / 10);
    /* The number of spans that a search looks at is limited, so late spans may hide a
     * better one. */
    CHECK(m.judged_count < 1000 || m.worse_count * 20 <= m.judged_count);
    while (m.live_count > 0) {
        model_give(&m);
    }
    for (int t = 1; t < TAGS; t++) {
        m.done[t] = m.epoch[t];
    }
    cm_heap_view view = model_view(&m, 0);
    (void)cm_heap_join(&m.heap, &view);
    CHECK(agrees(&m));
    for (cm_list *n = m.heap.arenas.next; n != m.heap.arenas.prev; n = n->next) {
        /* The arena is one free span again. */
        CHECK(CM_LIST_ENTRY(n, cm_arena, node)->first->next == NULL);
    }
    cm_heap_fini(&m.heap);
}

static void
test_heap_agrees_with_a_model_after_every_step(void)
{
    for (uint64_t seed = 1; seed <= 8; seed++) {
        run_model(seed, 4000, 1);
    }
}

static void
test_heap_agrees_with_a_model_in_the_long_run(void)
{
    run_model(99, run_count, 64);
    run_model(7, run_count, 64);
}

int
main(int argc, char **argv)
{
    const char *only = NULL;
    int ran = 0;
    if (argc > 1) {
        run_count = strtoull(argv[1], NULL, 10);
    }
    RUN(test_heap_agrees_with_a_model_after_every_step)
    RUN(test_heap_agrees_with_a_model_in_the_long_run)
    return atomic_load(&check_failures) == 0 && ran == 2 ? 0 : 1;
}
