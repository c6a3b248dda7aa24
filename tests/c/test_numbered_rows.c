/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of rows that are chosen by numbers and that threads of the host copy. They
 * check the runs that such rows consist of, the copy of a part, and whole copies to the
 * device, from it and within the host. */
#include "base/numbered_copy.h"
#include "many_world.h"
#include "transfer/plan/shared_numbers.h"
#include "transfer/routes/numbered.h"
#include "transfer/rows/layers.h"

/* -- rows in memory ----------------------------------------------------------------------- */

/* Copy rows of `nbytes` bytes, which lie `gap` bytes apart, from an odd address to an
 * address at `offset`. The numbers of the source are in no order, and the target has
 * none. */
static void
check_copy(size_t nbytes, size_t offset, int64_t gap, bool wide)
{
    enum { ROWS = 21 };
    int64_t stride = (int64_t)nbytes + gap;
    size_t room = (size_t)stride * ROWS + 2 * 64;
    unsigned char *from = aligned_alloc(64, (room + 63) / 64 * 64);
    unsigned char *to = aligned_alloc(64, (room + 63) / 64 * 64);
    int64_t numbers[ROWS];
    for (size_t i = 0; i < room; i++) {
        from[i] = (unsigned char)(i * 31 % 251);
    }
    memset(to, 0xee, room);
    for (int64_t i = 0; i < ROWS; i++) {
        numbers[i] = (i * 8 + 5) % ROWS;
    }
    cm_numbered_end src = {(char *)from + 1, stride, numbers};
    cm_numbered_end dst = {(char *)to + offset, stride, NULL};
    cm_numbered_copy(&dst, &src, ROWS, nbytes, wide);
    for (int64_t i = 0; i < ROWS; i++) {
        unsigned char *got = to + offset + i * stride;
        CHECK(memcmp(got, from + 1 + numbers[i] * stride, nbytes) == 0);
        CHECK(gap == 0 || got[nbytes] == 0xee);
    }
    CHECK(offset == 0 || to[offset - 1] == 0xee);
    CHECK_EQ(to[offset + (size_t)(stride * ROWS) - (size_t)gap], 0xee);
    free(from);
    free(to);
}

static void
test_rows_of_every_length_and_alignment_are_copied(void)
{
    static const size_t sizes[] = {1,  4,   7,   8,   16,  32,   63,  64,
                                   65, 128, 200, 256, 640, 4096, 4100};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (int64_t gap = 0; gap <= 64; gap += 32) {
            check_copy(sizes[i], 0, gap, false);
            check_copy(sizes[i], 0, gap, true);
            check_copy(sizes[i], 9, gap, true);
        }
    }
}

static void
test_rows_from_a_later_one_on_are_the_same_rows(void)
{
    char bytes[100];
    const int64_t numbers[] = {3, 0, 4, 1};
    cm_numbered_end all = {bytes, 10, numbers};
    cm_numbered_end plain = {bytes, 10, NULL};
    cm_numbered_end rest = cm_numbered_from(all, 2);
    cm_numbered_end plain_rest = cm_numbered_from(plain, 2);
    CHECK(cm_numbered_at(&rest, 1) == bytes + 10);
    CHECK(cm_numbered_at(&plain_rest, 1) == bytes + 30);
}

/* -- the runs that they are --------------------------------------------------------------- */

enum { COUNT = 5 };

/* Make two layers. The first has rows of 4 bytes without gaps on both sides. The second
 * has rows of 3 bytes, which lie 7 bytes apart in the target. The numbers of the source
 * are 6, 2, 3, 4, 0. */
static cm_numbered_rows *
make_rows(char *dst, char *src)
{
    static const int64_t numbers[COUNT] = {6, 2, 3, 4, 0};
    static const uint64_t lengths[2] = {4, 3};
    static const int64_t strides[2][2] = {{4, 4}, {7, 3}};
    uint64_t span;
    cm_numbered_rows *rows = cm_numbered_rows_create(COUNT, 2);
    for (int i = 0; i < 2; i++) {
        cm_numbered_layer *layer = &rows->layers[i];
        layer->row_nbytes = lengths[i];
        for (int side = CM_DST; side <= CM_SRC; side++) {
            layer->stride[side] = strides[i][side];
            layer->end[side].host = side == CM_DST ? dst : src;
        }
    }
    rows->numbers[CM_SRC] = cm_shared_numbers_create(COUNT);
    memcpy(rows->numbers[CM_SRC], numbers, sizeof(numbers));
    MUST(cm_numbered_rows_place(rows, &span));
    return rows;
}

/* Return where byte `at` of the packed space is, counted from row 0 of its layer. */
static int64_t
place_of(const cm_numbered_rows *rows, cm_side side, uint64_t at)
{
    const cm_numbered_layer *layer = &rows->layers[at >= COUNT * 4];
    uint64_t in = at - layer->start;
    uint64_t i = in / layer->row_nbytes;
    int64_t number = side == CM_SRC ? rows->numbers[CM_SRC][i] : (int64_t)i;
    return number * layer->stride[side] + (int64_t)(in % layer->row_nbytes);
}

/* A run must go on as long as the bytes lie together and the layer has more of them. */
static void
test_run_is_found_at_each_byte_of_the_packed_space(void)
{
    enum { SPAN = COUNT * 7, FIRST = COUNT * 4 };
    char dst[64], src[64];
    cm_numbered_rows *rows = make_rows(dst, src);
    for (int side = CM_DST; side <= CM_SRC; side++) {
        for (uint64_t at = 0; at < SPAN; at++) {
            for (uint64_t end = at + 1; end <= SPAN; end++) {
                cm_numbered_run run =
                    cm_numbered_rows_run_at(rows, (cm_side)side, at, end);
                int64_t first = place_of(rows, (cm_side)side, at);
                uint64_t length = 1;
                while (at + length < end && (at >= FIRST || at + length < FIRST)
                       && place_of(rows, (cm_side)side, at + length)
                              == first + (int64_t)length) {
                    length++;
                }
                CHECK_EQ(run.offset, first);
                CHECK_EQ(run.nbytes, length);
                CHECK(run.end == &rows->layers[at >= FIRST].end[side]);
            }
        }
    }
    cm_numbered_rows_destroy(rows);
}

static void
test_runs_are_counted_up_to_the_most(void)
{
    char dst[64], src[64];
    cm_numbered_rows *rows = make_rows(dst, src);
    CHECK_EQ(cm_numbered_rows_count_runs(rows, 100), 3);
    CHECK_EQ(cm_numbered_rows_count_runs(rows, 1), 2);
    CHECK(cm_numbered_layer_is_dense(&rows->layers[0]));
    CHECK(!cm_numbered_layer_is_dense(&rows->layers[1]));
    cm_numbered_rows_destroy(rows);
}

static void
test_rows_that_are_too_many_are_refused(void)
{
    uint64_t span;
    cm_numbered_rows *rows = cm_numbered_rows_create(UINT64_MAX / 4, 1);
    rows->layers[0].row_nbytes = 5;
    CHECK_EQ(cm_numbered_rows_place(rows, &span).code, CM_EOVERFLOW);
    cm_numbered_rows_destroy(rows);
    CHECK(cm_numbered_rows_create(1, UINT64_MAX / 8) == NULL);
}

/* -- whole copies ------------------------------------------------------------------------- */

/* A copy of `count` rows between two memories that have `row_count` rows each. The rows
 * have `width` bytes and lie `pitch` bytes apart. */
typedef struct table_copy {
    memory to, from;
    uint64_t width, pitch, row_count, count;
    cm_chosen_rows numbers[2];
    cm_layer layer;
    unsigned char *expected;
} table_copy;

static cm_region
table_of(const memory *m, const table_copy *t)
{
    cm_region region = region_at(m, 0);
    region.ndim = 2;
    region.shape[0] = (int64_t)t->row_count;
    region.shape[1] = (int64_t)t->width;
    region.strides[0] = (int64_t)t->pitch;
    region.strides[1] = 1;
    return region;
}

/* Choose all rows of a side in another order. `factor` has no divisor in common with
 * their count. */
static void
choose_rows(table_copy *t, cm_side side, uint64_t factor)
{
    cm_row_fault fault;
    cm_chosen_rows *numbers = &t->numbers[side];
    if (factor == 0) {
        cm_chosen_rows_init_all(numbers, t->count);
    }
    else {
        CHECK_OK(cm_chosen_rows_init(numbers, t->count));
        for (uint64_t i = 0; i < t->count; i++) {
            numbers->given[i] = (int64_t)(i * factor % t->row_count);
        }
    }
    CHECK_OK(
        cm_chosen_rows_settle(numbers, (int64_t)t->row_count, side == CM_DST, &fault));
    CHECK_EQ(fault.kind, CM_ROWS_RIGHT);
}

static void
open_table(world *w, table_copy *t, cm_kind to, cm_kind from, bool scatters)
{
    t->to = take_memory(w, to, 0, t->pitch * t->row_count);
    t->from = take_memory(w, from, 0, t->pitch * t->row_count);
    t->expected = malloc(t->to.nbytes);
    memset(t->to.bytes, 0, t->to.nbytes);
    memset(t->expected, 0, t->to.nbytes);
    number_bytes(&t->from, 3);
    choose_rows(t, CM_DST, scatters ? 7 : 0);
    choose_rows(t, CM_SRC, 11);
    for (uint64_t i = 0; i < t->count; i++) {
        int64_t dst = cm_chosen_rows_at(&t->numbers[CM_DST], i);
        int64_t src = cm_chosen_rows_at(&t->numbers[CM_SRC], i);
        memcpy(t->expected + dst * (int64_t)t->pitch,
               t->from.bytes + src * (int64_t)t->pitch, t->width);
    }
    t->layer = (cm_layer){.array = {table_of(&t->to, t), table_of(&t->from, t)},
                          .owner = {&t->to, &t->from}};
}

static cm_many *
number_table(world *w, table_copy *t)
{
    cm_many *many;
    cm_chosen_rows *const numbers[2] = {&t->numbers[CM_DST], &t->numbers[CM_SRC]};
    MUST(
        cm_numbered_many_create(w->engine, &t->layer, 1, numbers, false, false, &many));
    return many;
}

static void
copy_table(world *w, table_copy *t, bool blocking)
{
    cm_ticket *ticket;
    cm_ticket_info info;
    cm_copy_request request = {.many = number_table(w, t), .blocking = blocking};
    CHECK(request.many != NULL);
    CHECK_OK(cm_engine_copy(w->engine, &request, &ticket));
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_query(ticket, &info);
    CHECK_EQ(info.nbytes, t->count * t->width);
    CHECK_EQ(cm_ticket_count_moved(ticket), t->count * t->width);
    cm_ticket_release(ticket);
    CHECK_BYTES_EQ(t->to.bytes, t->expected, t->to.nbytes);
}

static void
close_table(world *w, table_copy *t)
{
    cm_chosen_rows_fini(&t->numbers[CM_DST]);
    cm_chosen_rows_fini(&t->numbers[CM_SRC]);
    free(t->expected);
    give_memory(w, &t->to);
    give_memory(w, &t->from);
}

/* Cut all copies into slots of 64 KiB. */
static void
use_short_slots(world *w)
{
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.chunk_nbytes = 64 << 10;
    tuning.chunk_min_nbytes = 64 << 10;
    tuning.slot_count = 2;
    tuning.thread_count = 2;
    CHECK_OK(cm_engine_set_tuning(w->engine, &tuning));
}

static const cm_kind ways[3][2] = {{CM_KIND_DEVICE, CM_KIND_PAGEABLE},
                                   {CM_KIND_PAGEABLE, CM_KIND_DEVICE},
                                   {CM_KIND_PAGEABLE, CM_KIND_PAGEABLE}};

/* Rows are cut by the ends of slots and of parts, unless their length divides both. */
static void
test_rows_go_up_down_and_over_the_host_in_slots(void)
{
    static const uint64_t widths[] = {16, 100, 256, 5000, 70001};
    world w;
    open_world(&w);
    use_short_slots(&w);
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 5; i++) {
            for (int scatters = 0; scatters < 2; scatters++) {
                uint64_t rows = (300 << 10) / widths[i] + 13;
                table_copy t = {.width = widths[i],
                                .pitch = widths[i] + (i % 2 == 0 ? 0 : 3),
                                .row_count = rows,
                                .count = rows};
                while (t.row_count % 7 == 0 || t.row_count % 11 == 0) {
                    t.row_count++;
                }
                open_table(&w, &t, ways[k][0], ways[k][1], scatters != 0);
                copy_table(&w, &t, scatters == 0);
                close_table(&w, &t);
            }
        }
    }
    close_world(&w);
}

/* Count the launches of a copy of 10,000 rows of 32 bytes, which fills five slots. */
static uint64_t
count_launches(world *w, cm_kind to, cm_kind from, bool scatters)
{
    table_copy t = {.width = 32, .pitch = 32, .row_count = 10000, .count = 10000};
    open_table(w, &t, to, from, scatters);
    cm_faults_plan(w->rt, CM_OP_none, 0, 0, false);
    copy_table(w, &t, true);
    close_table(w, &t);
    return cm_faults_count(w->rt, CM_OP_kernel_launch);
}

static void
test_rows_without_gaps_on_the_device_need_no_kernel(void)
{
    world w;
    open_world(&w);
    use_short_slots(&w);
    CHECK_EQ(count_launches(&w, CM_KIND_DEVICE, CM_KIND_PAGEABLE, false), 0);
    close_world(&w);
}

static void
test_rows_apart_on_the_device_take_one_launch_a_slot(void)
{
    world w;
    open_world(&w);
    use_short_slots(&w);
    CHECK_EQ(count_launches(&w, CM_KIND_DEVICE, CM_KIND_PAGEABLE, true), 5);
    CHECK_EQ(count_launches(&w, CM_KIND_PAGEABLE, CM_KIND_DEVICE, true), 5);
    close_world(&w);
}

/* If the numbers name a slice of the target, its rows need not be looked up one by
 * one. */
static void
test_numbers_that_rise_by_one_are_dropped(void)
{
    enum { FIRST = 5 };
    world w;
    open_world(&w);
    table_copy t = {.width = 8, .pitch = 8, .row_count = 64, .count = 32};
    open_table(&w, &t, CM_KIND_DEVICE, CM_KIND_PAGEABLE, true);
    memset(t.expected, 0, t.to.nbytes);
    for (uint64_t i = 0; i < t.count; i++) {
        t.numbers[CM_DST].rows[i] = (int64_t)(FIRST + i);
        memcpy(t.expected + (FIRST + i) * 8,
               t.from.bytes + t.numbers[CM_SRC].rows[i] * 8, 8);
    }
    cm_many *many = number_table(&w, &t);
    CHECK(many->rows->numbers[CM_DST] == NULL);
    CHECK(many->rows->numbers[CM_SRC] != NULL);
    CHECK(many->rows->layers[0].end[CM_DST].address == t.to.address + FIRST * 8);
    cm_copy_request request = {.many = many, .blocking = true};
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    CHECK_BYTES_EQ(t.to.bytes, t.expected, t.to.nbytes);
    close_table(&w, &t);
    close_world(&w);
}

/* The limit on page-locked memory leaves room for the slots but not for so many
 * numbers. */
static void
test_numbers_without_page_locked_memory_go_by_the_table(void)
{
    enum { LIMIT = 4 << 20, ROWS = 1200001 };
    world w;
    open_world(&w);
    use_short_slots(&w);
    table_copy t = {.width = 1, .pitch = 1, .row_count = ROWS, .count = ROWS};
    open_table(&w, &t, CM_KIND_DEVICE, CM_KIND_PAGEABLE, true);
    atomic_store(&cm_pool_get_config(w.pinned)->budget->limit_nbytes, LIMIT);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    copy_table(&w, &t, true);
    CHECK(cm_faults_count(w.rt, CM_OP_kernel_launch) > ROWS / CM_TABLE_MAX_COUNT);
    atomic_store(&cm_pool_get_config(w.pinned)->budget->limit_nbytes, UINT64_MAX);
    close_table(&w, &t);
    close_world(&w);
}

/* -- what the batch keeps ----------------------------------------------------------------- */

static void
check_kept(world *w, cm_kind to, cm_kind from, uint64_t count, bool in_order,
           int64_t gap)
{
    table_copy t = {.width = 8, .pitch = 16, .row_count = 64, .count = count};
    open_table(w, &t, to, from, true);
    if (gap == 0) {
        t.layer.array[CM_DST].strides[0] = t.layer.array[CM_SRC].strides[0] = 8;
    }
    t.layer.array[CM_SRC].strides[1] = gap == 2 ? 2 : 1;
    for (uint64_t i = 0; in_order && i < count; i++) {
        t.numbers[CM_DST].rows[i] = t.numbers[CM_SRC].rows[i] = (int64_t)i;
    }
    CHECK(number_table(w, &t) == NULL);
    close_table(w, &t);
}

static void
test_batch_keeps_what_is_no_gain_by_numbers(void)
{
    world w;
    open_world(&w);
    check_kept(&w, CM_KIND_DEVICE, CM_KIND_DEVICE, 64, false, 8);
    check_kept(&w, CM_KIND_DEVICE, CM_KIND_PINNED, 64, false, 8);
    check_kept(&w, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, false, 8);
    check_kept(&w, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 1, false, 8);
    check_kept(&w, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 64, true, 0); /* a single run */
    check_kept(&w, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 64, false, 2);
    close_world(&w);
}

static void
test_layers_of_several_ways_or_lengths_are_left_to_the_batch(void)
{
    world w;
    open_world(&w);
    table_copy t = {.width = 8, .pitch = 16, .row_count = 64, .count = 64};
    open_table(&w, &t, CM_KIND_DEVICE, CM_KIND_PAGEABLE, true);
    cm_chosen_rows *const numbers[2] = {&t.numbers[CM_DST], &t.numbers[CM_SRC]};
    cm_layer turned = {.array = {t.layer.array[CM_SRC], t.layer.array[CM_DST]},
                       .owner = {&t.from, &t.to}};
    cm_layer longer = t.layer;
    longer.array[CM_SRC].shape[0]++;
    cm_layer layers[] = {t.layer, turned};
    cm_many *many;
    CHECK_OK(
        cm_numbered_many_create(w.engine, layers, 2, numbers, false, false, &many));
    CHECK(many == NULL);
    layers[1] = longer;
    CHECK_OK(
        cm_numbered_many_create(w.engine, layers, 2, numbers, false, false, &many));
    CHECK(many == NULL);
    layers[1] = t.layer;
    CHECK_OK(
        cm_numbered_many_create(w.engine, layers, 2, numbers, false, false, &many));
    CHECK(many != NULL);
    CHECK_EQ(many->nbytes, 2 * 64 * 8);
    CHECK(many->rows->numbers[CM_SRC] == t.numbers[CM_SRC].rows); /* shared */
    cm_many_destroy(many);
    close_table(&w, &t);
    close_world(&w);
}

/* A few threads gather very short rows faster than the link carries them, and rows of a
 * page or more as well. So only rows between these go up with all threads. Every other
 * copy takes all threads for its short rows. */
static void
test_threads_for_rows_follow_from_their_length(void)
{
    static const struct {
        cm_many_way way;
        uint64_t row_nbytes;
        bool takes_all;
    } cases[] = {{CM_MANY_UP, 512, false},   {CM_MANY_UP, 1024, true},
                 {CM_MANY_UP, 4095, true},   {CM_MANY_UP, 4096, false},
                 {CM_MANY_HOST, 1023, true}, {CM_MANY_HOST, 1024, false},
                 {CM_MANY_DOWN, 1023, true}, {CM_MANY_DOWN, 2048, false}};
    cm_numbered_rows *rows = cm_numbered_rows_create(1, 1);
    for (size_t k = 0; k < sizeof(cases) / sizeof(*cases); k++) {
        cm_many many = {.rows = rows, .way = cases[k].way};
        cm_job job = {.many = &many};
        rows->layers[0].row_nbytes = cases[k].row_nbytes;
        CHECK_EQ(cm_numbered_choose_way(&job, true),
                 cases[k].takes_all ? CM_COPY_WIDE_ALL : CM_COPY_WIDE);
        CHECK_EQ(cm_numbered_choose_way(&job, false),
                 cases[k].takes_all ? CM_COPY_PLAIN_ALL : CM_COPY_PLAIN);
        rows->layers[0].end[CM_SRC].is_file = true; /* its pages may have to be read */
        CHECK_EQ(cm_numbered_choose_way(&job, true), CM_COPY_WIDE_ALL);
        rows->layers[0].end[CM_SRC].is_file = false;
    }
    cm_numbered_rows_destroy(rows);
}

MAIN(
    RUN(test_threads_for_rows_follow_from_their_length)
        RUN(test_rows_of_every_length_and_alignment_are_copied) RUN(
            test_rows_from_a_later_one_on_are_the_same_rows)
            RUN(test_run_is_found_at_each_byte_of_the_packed_space) RUN(
                test_runs_are_counted_up_to_the_most)
                RUN(test_rows_that_are_too_many_are_refused) RUN(
                    test_rows_go_up_down_and_over_the_host_in_slots)
                    RUN(test_rows_without_gaps_on_the_device_need_no_kernel) RUN(
                        test_rows_apart_on_the_device_take_one_launch_a_slot)
                        RUN(test_numbers_that_rise_by_one_are_dropped) RUN(
                            test_numbers_without_page_locked_memory_go_by_the_table)
                            RUN(test_batch_keeps_what_is_no_gain_by_numbers) RUN(
                                test_layers_of_several_ways_or_lengths_are_left_to_the_batch))
