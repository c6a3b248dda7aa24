/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the kernel that copies rows by their numbers, which it reads when the stream
 * gets there. They test its host side, and its emulation, which takes the same steps as
 * the PTX text. One test makes random copies and compares whole arrays with copies that
 * the host makes row by row. */
#include <assert.h>
#include <stddef.h>

#include "open_emulated.h"
#include "transfer/device/rows_kernel.h"

/* The PTX text reads the members of the struct at these offsets. */
static_assert(offsetof(cm_rows_job, dst_rows) == 0, "ptx");
static_assert(offsetof(cm_rows_job, src_rows) == 8, "ptx");
static_assert(offsetof(cm_rows_job, dst_rows_stride) == 16, "ptx");
static_assert(offsetof(cm_rows_job, src_rows_stride) == 24, "ptx");
static_assert(offsetof(cm_rows_job, count) == 32, "ptx");
static_assert(offsetof(cm_rows_job, dst_count) == 40, "ptx");
static_assert(offsetof(cm_rows_job, src_count) == 48, "ptx");
static_assert(offsetof(cm_rows_job, dst_stride) == 56, "ptx");
static_assert(offsetof(cm_rows_job, src_stride) == 64, "ptx");
static_assert(offsetof(cm_rows_job, row_units) == 72, "ptx");
static_assert(offsetof(cm_rows_job, flag) == 80, "ptx");
static_assert(offsetof(cm_rows_job, group_count) == 88, "ptx");
static_assert(offsetof(cm_rows_job, step_groups) == 96, "ptx");
static_assert(offsetof(cm_rows_job, step_parts) == 104, "ptx");
static_assert(offsetof(cm_rows_job, step_layers) == 108, "ptx");
static_assert(offsetof(cm_rows_job, part_count) == 112, "ptx");
static_assert(offsetof(cm_rows_job, layer_count) == 116, "ptx");
static_assert(offsetof(cm_rows_job, unit) == 120, "ptx");
static_assert(offsetof(cm_rows_job, team_shift) == 124, "ptx");
static_assert(offsetof(cm_rows_job, dst_row_nbytes) == 128, "ptx");
static_assert(offsetof(cm_rows_job, src_row_nbytes) == 132, "ptx");
static_assert(offsetof(cm_rows_job, dst_row_is_signed) == 136, "ptx");
static_assert(offsetof(cm_rows_job, src_row_is_signed) == 140, "ptx");
static_assert(offsetof(cm_rows_job, src_is_packed) == 144, "ptx");
static_assert(offsetof(cm_rows_job, dst) == 160, "ptx");
static_assert(offsetof(cm_rows_job, src) == 2128, "ptx");
static_assert(sizeof(cm_rows_job) == 4096, "what a kernel's parameters may take");
static_assert(CM_ROWS_SLOTS == 4 && CM_ROWS_WARP_SHIFT == 5, "ptx");
static_assert(CM_ROWS_WRONG_DST == 1 && CM_ROWS_WRONG_SRC == 2, "ptx");

enum { MIB = 1 << 20, ROOM = 4 * MIB, MAX_ROWS = 512, MAX_LAYERS = 700 };

/* The target and the numbers are on the device. The source and the flag, which the
 * kernel sets if numbers are wrong, are page-locked and have other addresses for the
 * device than for the host. */
typedef struct world {
    cm_runtime *rt;
    cm_kernels kernels;
    uint64_t stream;
    cm_address dst, src, numbers[2];
    void *src_host;
    cm_address flag;
    uint32_t *flag_host;
    unsigned char *dst_bytes; /* where the host sees the device's memory */
    unsigned char *src_bytes;
    unsigned char *number_bytes[2];
    unsigned char *expected; /* owned */
    uint64_t random;
} world;

/* Return a random number below `limit`. */
static uint64_t
roll(world *w, uint64_t limit)
{
    w->random = w->random * UINT64_C(6364136223846793005) + 1442695040888963407U;
    return (w->random >> 33) % limit;
}

static void
world_open(world *w)
{
    *w = (world){.rt = open_emulated(13000, 1, 64 * MIB), .random = 35};
    w->kernels.rt = w->rt;
    void *flag;
    unsigned flags = CM_HOST_ALLOC_MAPPED | CM_HOST_ALLOC_WRITE_COMBINED;
    MUST(cm_rt_device_set(w->rt, 0));
    MUST(cm_rt_stream_create(w->rt, 0, 0, &w->stream));
    MUST(cm_rt_device_alloc(w->rt, ROOM, &w->dst));
    MUST(cm_rt_host_alloc(w->rt, ROOM, flags, &w->src_host));
    MUST(cm_rt_host_device_address(w->rt, w->src_host, &w->src));
    MUST(cm_rt_host_alloc(w->rt, 4, flags, &flag));
    MUST(cm_rt_host_device_address(w->rt, flag, &w->flag));
    w->flag_host = flag;
    *w->flag_host = 0;
    w->dst_bytes = cm_runtime_host_alias(w->rt, w->dst, ROOM);
    w->src_bytes = w->src_host;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        MUST(cm_rt_device_alloc(w->rt, 64 * MAX_ROWS, &w->numbers[side]));
        w->number_bytes[side] =
            cm_runtime_host_alias(w->rt, w->numbers[side], 64 * MAX_ROWS);
    }
    w->expected = malloc(ROOM);
    for (uint64_t i = 0; i < ROOM; i += 8) {
        uint64_t bits = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        memcpy(w->src_bytes + i, &bits, 8);
    }
    memset(w->dst_bytes, 0xee, ROOM);
    memset(w->expected, 0xee, ROOM);
}

static void
world_close(world *w)
{
    free(w->expected);
    MUST(cm_kernels_fini(&w->kernels));
    MUST(cm_rt_stream_destroy(w->rt, w->stream));
    MUST(cm_rt_device_free(w->rt, w->dst));
    MUST(cm_rt_device_free(w->rt, w->numbers[CM_DST]));
    MUST(cm_rt_device_free(w->rt, w->numbers[CM_SRC]));
    MUST(cm_rt_host_free(w->rt, w->src_host));
    MUST(cm_rt_host_free(w->rt, w->flag_host));
    close_emulated(w->rt);
}

/* Store number `i` of an array of numbers. */
static void
put_number(world *w, int side, const cm_row_numbers *numbers, uint64_t i,
           int64_t number)
{
    cm_address at = numbers->address + i * (uint64_t)numbers->stride;
    memcpy(w->number_bytes[side] + (at - w->numbers[side]), &number, numbers->nbytes);
}

/* Give `move` an array of numbers for that side. */
static void
put_numbers(world *w, cm_rows_move *move, int side, const int64_t *numbers)
{
    move->numbers[side] = (cm_row_numbers){
        .address = w->numbers[side], .stride = 8, .nbytes = 8, .is_signed = true};
    for (uint64_t i = 0; i < move->count; i++) {
        put_number(w, side, &move->numbers[side], i, numbers[i]);
    }
}

/* Launch the copy and wait for it. */
static cm_status
launch(world *w, const cm_rows_move *move, const cm_rows_layer *layers, uint64_t count)
{
    CM_TRY(cm_rows_launch(&w->kernels, 0, move, layers, count, w->stream));
    return cm_rt_stream_synchronize(w->rt, w->stream);
}

/* Copy one row of the layer to `expected`. */
static void
expect_row(world *w, const cm_rows_layer *layer, int64_t to, int64_t from)
{
    uint64_t dst =
        layer->address[CM_DST] - w->dst + (uint64_t)(to * layer->stride[CM_DST]);
    uint64_t src =
        layer->address[CM_SRC] - w->src + (uint64_t)(from * layer->stride[CM_SRC]);
    memcpy(w->expected + dst, w->src_bytes + src, layer->row_nbytes);
}

/* Return a layer whose rows lie together on both sides. */
static cm_rows_layer
plain_layer(const world *w, uint64_t row_count, uint64_t row_nbytes)
{
    return (cm_rows_layer){.address = {w->dst, w->src},
                           .stride = {(int64_t)row_nbytes, (int64_t)row_nbytes},
                           .row_count = {row_count, row_count},
                           .row_nbytes = row_nbytes};
}

/* -- copies of rows ---------------------------------------------------------------- */

/* Return a layer with rows of a random length, alignment and distance. It lies in the
 * lower half of the room. */
static cm_rows_layer
random_layer(world *w, uint64_t row_count)
{
    static const uint64_t sizes[] = {0,   1,   2,   3,   4,   5,    7,    8,    12,
                                     15,  16,  17,  24,  31,  32,   33,   48,   64,
                                     100, 128, 144, 255, 256, 264,  400,  512,  513,
                                     528, 640, 656, 768, 992, 1040, 2048, 3000, 4096};
    uint64_t nbytes = sizes[roll(w, sizeof(sizes) / sizeof(*sizes))];
    cm_rows_layer layer = {.row_nbytes = nbytes, .row_count = {row_count, row_count}};
    for (int side = CM_DST; side <= CM_SRC; side++) {
        uint64_t align = UINT64_C(1) << roll(w, 6);
        uint64_t gap = roll(w, 2) == 0 ? 0 : roll(w, 5) * align;
        int64_t stride = (int64_t)((nbytes + align - 1) / align * align + gap);
        uint64_t start = roll(w, 8) * align;
        if (roll(w, 4) == 0) { /* the rows run backwards */
            start += (row_count - 1) * (uint64_t)stride;
            stride = -stride;
        }
        layer.stride[side] = stride;
        layer.address[side] = (side == CM_DST ? w->dst : w->src) + start;
    }
    return layer;
}

/* Make a random array of numbers for that side. The numbers of the target are all
 * different. `chosen` gets the rows that the numbers name, counted from the front. */
static void
random_numbers(world *w, cm_rows_move *move, int side, uint64_t row_count,
               int64_t *chosen)
{
    cm_row_numbers *numbers = &move->numbers[side];
    uint32_t nbytes = 1u << roll(w, 4);
    int64_t stride = (int64_t)nbytes * (int64_t)(1 + roll(w, 2) * 3);
    *numbers = (cm_row_numbers){.address = w->numbers[side],
                                .stride = stride,
                                .nbytes = nbytes,
                                .is_signed = roll(w, 2) == 0};
    if (roll(w, 3) == 0) {
        numbers->address += (move->count - 1) * (uint64_t)stride;
        numbers->stride = -stride;
    }
    int64_t shift = (int64_t)roll(w, row_count);
    for (uint64_t i = 0; i < move->count; i++) {
        /* 7 does not divide row_count, so its multiples modulo row_count permute the
         * rows. */
        int64_t row = side == CM_DST ? ((int64_t)i * 7 + shift) % (int64_t)row_count
                                     : (int64_t)roll(w, row_count);
        chosen[i] = row;
        bool is_from_end = numbers->is_signed && roll(w, 2) == 0;
        put_number(w, side, numbers, i, is_from_end ? row - (int64_t)row_count : row);
    }
}

/* Copy rows of random layers with random numbers and settings. After each copy the
 * target must be as if its rows had been copied one by one. */
static void
test_rows_of_any_shape_move_as_one_by_one(void)
{
    world w;
    world_open(&w);
    for (int round = 0; round < 400; round++) {
        int64_t to[MAX_ROWS], from[MAX_ROWS];
        uint64_t row_count = 1 + roll(&w, 120);
        row_count += row_count % 7 == 0 ? 1 : 0;
        cm_rows_move move = {.count = 1 + roll(&w, row_count),
                             .is_over_bus = roll(&w, 2) == 0,
                             .max_sms = (uint32_t)roll(&w, 3),
                             .flag = w.flag};
        for (uint64_t i = 0; i < move.count; i++) {
            to[i] = from[i] = (int64_t)i;
        }
        if (roll(&w, 4) != 0) {
            random_numbers(&w, &move, CM_DST, row_count, to);
        }
        if (roll(&w, 4) != 0) {
            random_numbers(&w, &move, CM_SRC, row_count, from);
        }
        cm_rows_layer layer = random_layer(&w, row_count);
        for (uint64_t i = 0; i < move.count; i++) {
            expect_row(&w, &layer, to[i], from[i]);
        }
        CHECK_OK(launch(&w, &move, &layer, 1));
        CHECK_BYTES_EQ(w.dst_bytes, w.expected, MIB);
        CHECK_EQ(*w.flag_host, 0);
    }
    CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
    world_close(&w);
}

/* Copy a few very long rows, and then many rows. Every byte must be moved once, and
 * nothing behind the rows may change. */
static void
test_long_rows_and_many_slots_move_once_each(void)
{
    static const uint64_t shapes[][3] = {
        {1, ROOM, 0}, {3, MIB + 16, 1}, {MAX_ROWS, 8192 - 16, 2}, {300, 4096 + 1, 1}};
    world w;
    world_open(&w);
    for (size_t k = 0; k < sizeof(shapes) / sizeof(*shapes); k++) {
        cm_rows_move move = {.count = shapes[k][0], .max_sms = (uint32_t)shapes[k][2]};
        cm_rows_layer layer = plain_layer(&w, move.count, shapes[k][1]);
        memset(w.dst_bytes, 0xee, ROOM);
        CHECK_OK(launch(&w, &move, &layer, 1));
        uint64_t nbytes = move.count * layer.row_nbytes;
        CHECK_BYTES_EQ(w.dst_bytes, w.src_bytes, nbytes);
        CHECK_FILLED(w.dst_bytes + nbytes, 0xee, ROOM - nbytes);
    }
    world_close(&w);
}

/* Layers of one shape must share launches, as many as fit into one. Layers that
 * alternate between two shapes each need a launch. */
static void
test_layers_share_launches_if_they_are_alike(void)
{
    static const struct {
        uint64_t layer_count, launches;
        bool alternates;
    } cases[] = {{1, 1, false},
                 {CM_ROWS_MAX_LAYERS, 1, false},
                 {CM_ROWS_MAX_LAYERS + 1, 2, false},
                 {MAX_LAYERS, 3, false},
                 {6, 6, true}};
    static cm_rows_layer layers[MAX_LAYERS];
    world w;
    world_open(&w);
    for (size_t k = 0; k < sizeof(cases) / sizeof(*cases); k++) {
        cm_rows_move move = {.count = 3, .is_over_bus = true};
        put_numbers(&w, &move, CM_DST, (const int64_t[]){4, 0, -3});
        put_numbers(&w, &move, CM_SRC, (const int64_t[]){1, 1, -1});
        for (uint64_t n = 0; n < cases[k].layer_count; n++) {
            bool is_other = cases[k].alternates && n % 2 == 1;
            layers[n] = plain_layer(&w, 5, is_other ? 24 : 32);
            layers[n].address[CM_DST] += n * 5 * 32;
            layers[n].address[CM_SRC] += (MAX_LAYERS - n) * 5 * 32;
            expect_row(&w, &layers[n], 4, 1);
            expect_row(&w, &layers[n], 0, 1);
            expect_row(&w, &layers[n], 2, 4);
        }
        /* The calls are counted from here on. */
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        CHECK_OK(launch(&w, &move, layers, cases[k].layer_count));
        CHECK_EQ(cm_faults_count(w.rt, CM_OP_kernel_launch), cases[k].launches);
        CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
    }
    world_close(&w);
}

/* Without rows or without layers nothing may be launched or loaded. */
static void
test_rows_without_work_launch_nothing(void)
{
    world w;
    world_open(&w);
    cm_rows_move move = {.count = 0};
    cm_rows_layer layer = plain_layer(&w, 5, 32);
    CHECK_OK(launch(&w, &move, &layer, 1));
    move.count = 5;
    CHECK_OK(launch(&w, &move, &layer, 0));
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_kernel_launch), 0);
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_module_load), 0);
    world_close(&w);
}

/* -- numbers that name no row ------------------------------------------------------------- */

/* One number in the middle names no row of the target, of the source, or of both. That
 * row must not move, the others must, and the flag must say which side was wrong. */
static void
test_wrong_numbers_move_nothing_and_raise_the_flag(void)
{
    static const struct {
        int64_t to, from;
        uint32_t flag;
    } cases[] = {{5, 0, CM_ROWS_WRONG_DST},
                 {-6, 0, CM_ROWS_WRONG_DST},
                 {INT64_MIN, 0, CM_ROWS_WRONG_DST},
                 {INT64_MAX, 0, CM_ROWS_WRONG_DST},
                 {0, 7, CM_ROWS_WRONG_SRC},
                 {0, -8, CM_ROWS_WRONG_SRC},
                 {5, 7, CM_ROWS_WRONG_DST | CM_ROWS_WRONG_SRC},
                 {-5, -7, 0}};
    world w;
    world_open(&w);
    for (size_t k = 0; k < sizeof(cases) / sizeof(*cases); k++) {
        cm_rows_move move = {.count = 3, .flag = w.flag};
        put_numbers(&w, &move, CM_DST, (const int64_t[]){3, cases[k].to, 1});
        put_numbers(&w, &move, CM_SRC, (const int64_t[]){6, cases[k].from, 2});
        cm_rows_layer layer = plain_layer(&w, 5, 2064);
        layer.row_count[CM_SRC] = 7;
        *w.flag_host = 0;
        memset(w.dst_bytes, 0xee, ROOM);
        memset(w.expected, 0xee, ROOM);
        expect_row(&w, &layer, 3, 6);
        expect_row(&w, &layer, 1, 2);
        if (cases[k].flag == 0) {
            expect_row(&w, &layer, 0, 0);
        }
        CHECK_OK(launch(&w, &move, &layer, 1));
        CHECK_EQ(*w.flag_host, cases[k].flag);
        CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
        move.flag = 0; /* now nothing is reported, and no more is moved */
        *w.flag_host = 0;
        CHECK_OK(launch(&w, &move, &layer, 1));
        CHECK_EQ(*w.flag_host, 0);
        CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
    }
    world_close(&w);
}

/* All bits of an unsigned number are set. It must count as a number that is too large,
 * and not as -1. */
static void
test_unsigned_numbers_are_never_counted_from_the_end(void)
{
    world w;
    world_open(&w);
    for (uint32_t nbytes = 1; nbytes <= 8; nbytes *= 2) {
        cm_rows_move move = {.count = 1, .flag = w.flag};
        move.numbers[CM_SRC] = (cm_row_numbers){
            .address = w.numbers[CM_SRC], .stride = nbytes, .nbytes = nbytes};
        put_number(&w, CM_SRC, &move.numbers[CM_SRC], 0, -1);
        cm_rows_layer layer = plain_layer(&w, 5, 64);
        *w.flag_host = 0;
        CHECK_OK(launch(&w, &move, &layer, 1));
        CHECK_EQ(*w.flag_host, CM_ROWS_WRONG_SRC);
        CHECK_FILLED(w.dst_bytes, 0xee, ROOM);
        if (nbytes == 1) { /* 255 names a row if there are 256 */
            layer.row_count[CM_SRC] = 256;
            *w.flag_host = 0;
            expect_row(&w, &layer, 0, 255);
            CHECK_OK(launch(&w, &move, &layer, 1));
            CHECK_EQ(*w.flag_host, 0);
            CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
            memset(w.dst_bytes, 0xee, ROOM);
        }
    }
    world_close(&w);
}

/* Rows of no bytes move nothing, but a wrong number must still be reported. */
static void
test_empty_rows_are_checked_all_the_same(void)
{
    world w;
    world_open(&w);
    cm_rows_move move = {.count = 2, .flag = w.flag};
    put_numbers(&w, &move, CM_DST, (const int64_t[]){0, 3});
    cm_rows_layer layer = plain_layer(&w, 3, 0);
    CHECK_OK(launch(&w, &move, &layer, 1));
    CHECK_EQ(*w.flag_host, CM_ROWS_WRONG_DST);
    CHECK_FILLED(w.dst_bytes, 0xee, ROOM);
    world_close(&w);
}

/* The rows of the source are packed: row i lies at place i, and its number is only
 * checked. A row moves only if both of its numbers are right. */
static void
test_packed_rows_go_on_where_both_numbers_are_right(void)
{
    world w;
    world_open(&w);
    cm_rows_layer layer = plain_layer(&w, 6, 48);
    cm_rows_move move = {.count = 4, .is_packed = true, .flag = w.flag};
    put_numbers(&w, &move, CM_DST, (const int64_t[]){5, 0, 9, 2});
    put_numbers(&w, &move, CM_SRC, (const int64_t[]){-1, 6, 0, 3});
    expect_row(&w, &layer, 5, 0);
    expect_row(&w, &layer, 2, 3);
    CHECK_OK(launch(&w, &move, &layer, 1));
    CHECK_NE(*w.flag_host, 0);
    CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
    world_close(&w);
}

/* -- streams and captures ---------------------------------------------------------- */

/* The number is changed while the launch waits behind a gate. The copy must use the new
 * one. */
static void
test_numbers_are_read_when_the_stream_gets_there(void)
{
    world w;
    world_open(&w);
    cm_rows_layer layer = plain_layer(&w, 5, 256);
    cm_rows_move move = {.count = 1, .flag = w.flag};
    put_numbers(&w, &move, CM_SRC, (const int64_t[]){1});
    CHECK_OK(cm_emulated_gate_close(w.rt, w.stream));
    CHECK_OK(cm_rows_launch(&w.kernels, 0, &move, &layer, 1, w.stream));
    CHECK_FILLED(w.dst_bytes, 0xee, ROOM);
    put_numbers(&w, &move, CM_SRC, (const int64_t[]){3});
    CHECK_OK(cm_emulated_gate_open(w.rt, w.stream));
    CHECK_OK(cm_rt_stream_synchronize(w.rt, w.stream));
    expect_row(&w, &layer, 0, 3);
    CHECK_BYTES_EQ(w.dst_bytes, w.expected, ROOM);
    world_close(&w);
}

/* The launch must be possible on a stream that is captured. */
static void
test_rows_are_captured_without_a_call_that_waits(void)
{
    world w;
    world_open(&w);
    cm_rows_layer layer = plain_layer(&w, 5, 256);
    cm_rows_move move = {.count = 1};
    put_numbers(&w, &move, CM_SRC, (const int64_t[]){1});
    CHECK_OK(cm_emulated_set_capturing(w.rt, w.stream, true));
    CHECK_OK(cm_rows_launch(&w.kernels, 0, &move, &layer, 1, w.stream));
    CHECK_OK(cm_emulated_set_capturing(w.rt, w.stream, false));
    world_close(&w);
}

/* -- the kernel's parameters ------------------------------------------------------- */

/* The kernel moves units of up to 16 bytes, as the alignment allows, and a team of
 * threads moves each row. Each case has the unit, the team's size and the number of
 * parts that must follow from its rows. */
static void
test_unit_and_team_follow_from_rows(void)
{
    static const struct {
        uint64_t row_nbytes;
        int64_t stride;
        uint64_t offset;
        uint32_t unit, team, parts;
    } cases[] = {{0, 16, 0, 16, 1, 1},          {16, 16, 0, 16, 1, 1},
                 {48, 48, 0, 16, 4, 1},         {256, 256, 0, 16, 16, 1},
                 {512, 512, 0, 16, 32, 1},      {528, 528, 0, 16, 8, 5},
                 {2048, 2048, 0, 16, 32, 4},    {656, 656, 0, 16, 16, 3},
                 {256, 264, 0, 8, 32, 1},       {256, 256, 4, 4, 32, 2},
                 {256, 258, 0, 2, 32, 4},       {255, 256, 0, 1, 32, 8},
                 {65536, 65536, 0, 16, 32, 128}};
    for (size_t k = 0; k < sizeof(cases) / sizeof(*cases); k++) {
        cm_rows_job job;
        cm_rows_move move = {.count = 100};
        cm_rows_layer layer = {.address = {0x1000, 0x2000 + cases[k].offset},
                               .stride = {cases[k].stride, cases[k].stride},
                               .row_count = {100, 100},
                               .row_nbytes = cases[k].row_nbytes};
        CHECK_OK(cm_rows_job_init(&job, &move, &layer));
        CHECK_EQ(job.unit, cases[k].unit);
        CHECK_EQ(1 << job.team_shift, cases[k].team);
        CHECK_EQ(job.part_count, cases[k].parts);
        uint64_t rows = 32 >> job.team_shift;
        CHECK_EQ(job.group_count, (100 + rows - 1) / rows);
    }
}

/* Rows of more than 64 GiB, and numbers of rows past 63 bits, are refused. */
static void
test_sizes_that_no_kernel_counts_are_refused(void)
{
    cm_rows_job job;
    cm_rows_move move = {.count = 1};
    cm_rows_layer layer = {
        .stride = {1, 1}, .row_count = {1, 1}, .row_nbytes = UINT64_C(1) << 36};
    CHECK_OK(cm_rows_job_init(&job, &move, &layer));
    layer.row_nbytes++;
    CHECK_CODE(cm_rows_job_init(&job, &move, &layer), CM_EOVERFLOW);
    layer.row_nbytes = 1;
    layer.row_count[CM_SRC] = UINT64_C(1) << 63;
    CHECK_CODE(cm_rows_job_init(&job, &move, &layer), CM_EOVERFLOW);
}

/* The number of multiprocessors is limited, limited to more than there are, or unset.
 * The driver is asked about it only if it is unset and the bytes pass no bus. (The
 * emulated device would refuse a launch whose blocks do not fit the kernel's step.) */
static void
test_multiprocessors_are_counted_only_within_a_device(void)
{
    world w;
    world_open(&w);
    cm_rows_layer layer = plain_layer(&w, MAX_ROWS, 4096);
    cm_rows_move move = {.count = MAX_ROWS, .max_sms = UINT32_MAX};
    CHECK_OK(launch(&w, &move, &layer, 1));
    move.max_sms = 1;
    CHECK_OK(launch(&w, &move, &layer, 1));
    move.max_sms = 0;
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_device_attribute), 0);
    CHECK_OK(launch(&w, &move, &layer, 1));
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_device_attribute), 1);
    move.is_over_bus = true; /* a constant is used instead */
    CHECK_OK(launch(&w, &move, &layer, 1));
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_device_attribute), 1);
    world_close(&w);
}

/* Writes must have fewer bytes on their way than reads, or work beside the copy waits
 * for them. Narrow units take more blocks for the same bytes, up to a limit. */
static void
test_blocks_over_the_bus_follow_from_the_bytes_on_their_way(void)
{
    static const struct {
        uint64_t row_nbytes;
        uint32_t blocks[3]; /* to a device, to the host, with numbers over the bus */
    } cases[] = {{4096, {6, 6, 16}},
                 {256, {6, 6, 16}},
                 {72, {12, 12, 32}},
                 {100, {24, 12, 32}},
                 {7, {32, 32, 32}}};
    for (size_t k = 0; k < sizeof(cases) / sizeof(*cases); k++) {
        cm_rows_move move = {.count = 10, .is_over_bus = true};
        cm_rows_layer layer = {.address = {1 << 20, 1 << 21},
                               .row_nbytes = cases[k].row_nbytes,
                               .row_count = {10, 10}};
        cm_rows_job job;
        layer.stride[CM_DST] = (int64_t)layer.row_nbytes;
        layer.stride[CM_SRC] = (int64_t)layer.row_nbytes;
        CHECK_OK(cm_rows_job_init(&job, &move, &layer));
        CHECK_EQ(cm_rows_count_bus_blocks(&job, &move), cases[k].blocks[0]);
        move.has_far_numbers = true;
        CHECK_EQ(cm_rows_count_bus_blocks(&job, &move), cases[k].blocks[2]);
        move.has_far_numbers = false;
        move.is_to_host = true;
        CHECK_EQ(cm_rows_count_bus_blocks(&job, &move), cases[k].blocks[1]);
    }
}

/* -- failures ---------------------------------------------------------------------- */

/* Each operation of a launch fails once. That must be reported, nothing may have moved,
 * and the next launch must work. */
static void
test_failed_calls_of_rows_are_reported(void)
{
    static const cm_op ops[] = {CM_OP_module_load, CM_OP_module_function,
                                CM_OP_device_attribute, CM_OP_kernel_launch};
    for (size_t k = 0; k < sizeof(ops) / sizeof(*ops); k++) {
        world w;
        world_open(&w);
        cm_rows_layer layer = plain_layer(&w, 5, 256);
        cm_rows_move move = {.count = 5};
        cm_faults_plan(w.rt, ops[k], 1, CM_CUDA_OUT_OF_MEMORY, false);
        CHECK_CODE(launch(&w, &move, &layer, 1), CM_CUDA_OUT_OF_MEMORY);
        CHECK_OK(cm_rt_stream_synchronize(w.rt, w.stream));
        CHECK_FILLED(w.dst_bytes, 0xee, ROOM);
        CHECK_OK(launch(&w, &move, &layer, 1));
        world_close(&w);
    }
}

/* The emulated device must refuse parameters that a GPU would take for something
 * else. */
static void
test_rows_jobs_without_sense_are_refused(void)
{
    world w;
    world_open(&w);
    uint64_t function;
    cm_rows_job job;
    cm_rows_layer layer = plain_layer(&w, 5, 256);
    cm_rows_move move = {.count = 5};
    CHECK_OK(cm_kernels_find(&w.kernels, CM_KERNEL_ROWS, 0, &function));
    CHECK_OK(cm_rows_job_init(&job, &move, &layer));
    job.layer_count = 1;
    job.dst[0] = w.dst;
    job.src[0] = w.src;
    const cm_rows_job good = job;
/* Check that a launch works with good parameters and is refused with this change. */
#define REFUSED(change)                                                                \
    job = good;                                                                        \
    job.step_groups = 64 % job.group_count;                                            \
    job.step_layers = (uint32_t)(64 / job.group_count);                                \
    CHECK_OK(                                                                          \
        cm_rt_kernel_launch(w.rt, function, 1, 512, &job, sizeof(job), w.stream));     \
    change;                                                                            \
    CHECK_CODE(                                                                        \
        cm_rt_kernel_launch(w.rt, function, 1, 512, &job, sizeof(job), w.stream),      \
        CM_CUDA_INVALID_VALUE)
    REFUSED(job.step_groups++);
    REFUSED(job.step_layers++);
    REFUSED(job.part_count++);
    REFUSED(job.group_count++);
    REFUSED(job.unit = 3);
    REFUSED(job.team_shift = 6);
    REFUSED(job.layer_count = CM_ROWS_MAX_LAYERS + 1);
    REFUSED(job.spare[2] = 1);
    REFUSED(job.dst_row_nbytes = 8);
    REFUSED((job.src_rows = w.numbers[CM_SRC], job.src_row_nbytes = 3));
#undef REFUSED
    CHECK_CODE(
        cm_rt_kernel_launch(w.rt, function, 1, 512, &good, sizeof(good) - 8, w.stream),
        CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_stream_synchronize(w.rt, w.stream));
    world_close(&w);
}

/* Rows outside of their memory, numbers outside of theirs and misaligned numbers must
 * each fail with the code that a GPU gives. */
static void
test_rows_outside_of_memory_are_faults(void)
{
    static const int32_t codes[] = {700, 700, 716};
    for (int k = 0; k < 3; k++) {
        cm_runtime *rt = open_emulated(13000, 1, MIB);
        cm_kernels kernels = {.rt = rt};
        cm_address device, numbers;
        MUST(cm_rt_device_set(rt, 0));
        MUST(cm_rt_device_alloc(rt, 1024, &device));
        MUST(cm_rt_device_alloc(rt, 64, &numbers));
        MUST(cm_rt_fill_8_async(rt, numbers, 0, 64, 0));
        cm_rows_layer layer = {.address = {device, device + 512},
                               .stride = {128, 128},
                               .row_count = {5, 4},
                               .row_nbytes = 128};
        cm_rows_move move = {.count = 4};
        move.numbers[CM_SRC] =
            (cm_row_numbers){.address = numbers, .stride = 8, .nbytes = 8};
        if (k == 0) {
            layer.address[CM_SRC] += 1024 - 512 - 64; /* half a row too far */
        }
        else if (k == 1) {
            move.numbers[CM_SRC].stride = 24;
        }
        else {
            move.numbers[CM_SRC].address += 4;
        }
        CHECK_OK(cm_rows_launch(&kernels, 0, &move, &layer, 1, 0));
        CHECK_CODE(cm_rt_stream_synchronize(rt, 0), codes[k]);
        CHECK_OK(cm_rt_device_reset(rt));
        close_emulated(rt);
    }
}

/* clang-format off */
MAIN(RUN(test_rows_of_any_shape_move_as_one_by_one)
     RUN(test_long_rows_and_many_slots_move_once_each)
     RUN(test_layers_share_launches_if_they_are_alike)
     RUN(test_rows_without_work_launch_nothing)
     RUN(test_wrong_numbers_move_nothing_and_raise_the_flag)
     RUN(test_unsigned_numbers_are_never_counted_from_the_end)
     RUN(test_empty_rows_are_checked_all_the_same)
     RUN(test_packed_rows_go_on_where_both_numbers_are_right)
     RUN(test_numbers_are_read_when_the_stream_gets_there)
     RUN(test_rows_are_captured_without_a_call_that_waits)
     RUN(test_unit_and_team_follow_from_rows)
     RUN(test_sizes_that_no_kernel_counts_are_refused)
     RUN(test_multiprocessors_are_counted_only_within_a_device)
    RUN(test_blocks_over_the_bus_follow_from_the_bytes_on_their_way)
     RUN(test_failed_calls_of_rows_are_reported)
     RUN(test_rows_jobs_without_sense_are_refused)
     RUN(test_rows_outside_of_memory_are_faults))
/* clang-format on */
