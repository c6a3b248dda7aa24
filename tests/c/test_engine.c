/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the engine's copies and fills: between all kinds of memory in every mode, in
 * many pieces, between ends that overlap, from sources that are broadcast, and over the
 * edges of registered memory. The bytes are always compared with those that a plain
 * loop or memcmp() gives. */
#include "engine_world.h"
#include "route_of.h"
#include "runtime/emulated/private.h"
#include "transfer/engine/private.h"
#include "transfer/run/run.h"

static uint64_t random_state = 1;

static uint64_t
next_random(uint64_t below)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % below;
}

/* -- every pair of kinds against a plain loop -------------------------------------- */

/* How a copy is made: in the call, on a stream whose order it takes, or in the
 * background. */
typedef enum mode { BLOCKING, ON_STREAM, BACKGROUND, MODE_COUNT } mode;

enum { ARENA = 16384 };

/* Copy a region element by element, from `axis` on. The copies of the engine are
 * compared with this. */
static void
copy_naively(const cm_region *dst, const cm_region *src, unsigned char *to,
             const unsigned char *from, int axis)
{
    if (axis == dst->ndim) {
        memcpy(to, from, (size_t)dst->itemsize);
        return;
    }
    for (int64_t i = 0; i < dst->shape[axis]; i++) {
        copy_naively(dst, src, to + i * dst->strides[axis],
                     from + i * src->strides[axis], axis + 1);
    }
}

/* Add random strides to a region that has a shape, so that it fits into an arena. With
 * `may_repeat` some strides may be 0. Returns the offset of element 0, or -1 if the
 * region is too large. */
static int64_t
add_random_strides(cm_region *region, bool may_repeat)
{
    int64_t low, high;
    int64_t stride = region->itemsize;
    int first = next_random(3) == 0 ? 0 : region->ndim - 1;
    for (int i = 0; i < region->ndim; i++) {
        int axis = first == 0 ? i : first - i;
        if (next_random(3) == 0) {
            stride +=
                (int64_t)next_random(3) * region->itemsize + (int64_t)next_random(2);
        }
        region->strides[axis] = next_random(5) == 0 ? -stride : stride;
        if (may_repeat && next_random(6) == 0) {
            region->strides[axis] = 0;
        }
        stride *= region->shape[axis];
    }
    MUST(cm_region_bounds(region, &low, &high));
    return high - low > ARENA - 64 ? -1 : (int64_t)next_random(64) - low;
}

/* Let the region begin at offset `at` of the memory. */
static void
place(cm_region *region, const memory *m, int64_t at)
{
    cm_region placed = region_at(m, (uint64_t)at);
    region->host = placed.host;
    region->address = placed.address;
    region->kind = placed.kind;
    region->device = placed.device;
}

/* Make one random copy between these memories and compare all bytes of the target's
 * memory, including those between and around its elements. */
static void
check_random_copy(world *w, memory *dst_memory, memory *src_memory, mode how)
{
    static unsigned char wanted[ARENA];
    cm_region dst = {.ndim = (int)next_random(4),
                     .itemsize = 1 + (int64_t)next_random(17)};
    for (int axis = 0; axis < dst.ndim; axis++) {
        dst.shape[axis] = (int64_t)next_random(12);
    }
    cm_region src = dst;
    int64_t dst_at = add_random_strides(&dst, false);
    int64_t src_at = add_random_strides(&src, true);
    if (dst_at < 0 || src_at < 0) {
        return;
    }
    place(&dst, dst_memory, dst_at);
    place(&src, src_memory, src_at);
    number_bytes(src_memory, 3);
    memset(dst_memory->bytes, 0xCC, ARENA);
    memset(wanted, 0xCC, ARENA);
    copy_naively(&dst, &src, wanted + dst_at, src_memory->bytes + src_at, 0);
    cm_copy_request request = {
        .dst = dst,
        .src = src,
        .stream = how == BACKGROUND ? NULL : w->streams[next_random(WORLD_DEVICES)],
        .blocking = how == BLOCKING,
    };
    cm_ticket *ticket;
    cm_ticket_info info;
    CHECK_OK(cm_engine_copy(w->engine, &request, &ticket));
    if (how == ON_STREAM && src_memory->kind == CM_KIND_PAGEABLE) {
        /* The call has read the source, so it may be overwritten. */
        memset(src_memory->bytes, 0x77, ARENA);
    }
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_query(ticket, &info);
    CHECK(info.done);
    cm_ticket_release(ticket);
    CHECK_BYTES_EQ(dst_memory->bytes, wanted, ARENA);
}

/* An empty array has no address, and belongs to no device. */
static void
test_engine_copies_an_empty_array_without_an_address(void)
{
    world w;
    open_world(&w);
    memory m = take_memory(&w, CM_KIND_DEVICE, 0, 64);
    const cm_region nothing = {
        .kind = CM_KIND_PAGEABLE, .device = -1, .ndim = 1, .itemsize = 1};
    const cm_region empty = row(&m, 0, 0, 1, 1);
    for (int up = 0; up < 2; up++) {
        cm_copy_request request = {.dst = up ? empty : nothing,
                                   .src = up ? nothing : empty,
                                   .stream = w.streams[0]};
        cm_ticket *ticket;
        CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_release(ticket);
    }
    give_memory(&w, &m);
    close_world(&w);
}

/* Make random copies from each kind of memory to each kind, and to and from the other
 * device, in each mode. */
static void
test_engine_random_copies_between_all_kinds(void)
{
    world w;
    memory dst[CM_KIND_COUNT + 1], src[CM_KIND_COUNT + 1];
    open_world(&w);
    for (int kind = 0; kind <= CM_KIND_COUNT; kind++) {
        /* The last one is memory of the other device. */
        int device = kind == CM_KIND_COUNT ? 1 : 0;
        cm_kind real = kind == CM_KIND_COUNT ? CM_KIND_DEVICE : (cm_kind)kind;
        dst[kind] = take_memory(&w, real, device, ARENA);
        src[kind] = take_memory(&w, real, device, ARENA);
    }
    for (int to = 0; to <= CM_KIND_COUNT; to++) {
        for (int from = 0; from <= CM_KIND_COUNT; from++) {
            for (int how = 0; how < MODE_COUNT; how++) {
                for (int round = 0; round < 12; round++) {
                    random_state =
                        (uint64_t)(((to * 8 + from) * 8 + how) * 100 + round);
                    int before = atomic_load(&check_failures);
                    check_random_copy(&w, &dst[to], &src[from], (mode)how);
                    if (atomic_load(&check_failures) != before) {
                        CHECK_FAIL_("this was a copy from kind %d to kind %d, mode %d, "
                                    "round %d",
                                    from, to, how, round);
                        round = 12;
                    }
                }
            }
        }
    }
    for (int kind = 0; kind <= CM_KIND_COUNT; kind++) {
        give_memory(&w, &dst[kind]);
        give_memory(&w, &src[kind]);
    }
    close_world(&w);
}

/* -- many pieces ------------------------------------------------------------------------- */

/* Copy 20 MB between these kinds of memory, from a source whose elements are `stride`
 * bytes apart. */
static void
check_large(world *w, cm_kind to, int to_device, cm_kind from, mode how, int64_t stride)
{
    enum { COUNT = 5 << 20 };
    memory dst = take_memory(w, to, to_device, (uint64_t)(COUNT * 4));
    memory src = take_memory(w, from, 0, (uint64_t)(COUNT * stride));
    number_bytes(&src, 5);
    cm_copy_request request = {
        .dst = row(&dst, 0, COUNT, 4, 4),
        .src = row(&src, 0, COUNT, stride, 4),
        .stream = how == BACKGROUND ? NULL : w->streams[0],
        .blocking = how == BLOCKING,
    };
    cm_ticket *ticket;
    CHECK_OK(cm_engine_copy(w->engine, &request, &ticket));
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_release(ticket);
    CHECK_EQ(count_equal(dst.bytes, 4, src.bytes, stride, 4, COUNT), COUNT);
    give_memory(w, &dst);
    give_memory(w, &src);
}

/* Long copies go in pieces through page-locked slots. The memory for these slots has a
 * bound that does not depend on the length of the copy. */
static void
test_engine_large_copies_go_in_pieces(void)
{
    world w;
    open_world(&w);
    for (int how = 0; how < MODE_COUNT; how++) {
        check_large(&w, CM_KIND_DEVICE, 0, CM_KIND_PAGEABLE, (mode)how, 4);
        check_large(&w, CM_KIND_DEVICE, 0, CM_KIND_PAGEABLE, (mode)how, 8);
        check_large(&w, CM_KIND_PAGEABLE, 0, CM_KIND_DEVICE, (mode)how, 4);
        check_large(&w, CM_KIND_PAGEABLE, 0, CM_KIND_DEVICE, (mode)how, 8);
        check_large(&w, CM_KIND_DEVICE, 1, CM_KIND_DEVICE, (mode)how, 8);
    }
    cm_pool_counters counters;
    cm_pool_read(w.pinned, &counters);
    /* The slots of all copies together never exceed this bound. */
    CHECK_LE(counters.reserved_nbytes, 64u << 20);
    CHECK_EQ(counters.live_nbytes, 0);
    close_world(&w);
}

/* -- overlap, broadcast, edges ----------------------------------------------------------- */

/* Copy within one memory between ends that overlap. The target must get what the source
 * had before the copy. */
static void
check_overlap(world *w, cm_kind kind, mode how)
{
    unsigned char wanted[4096], before[4096];
    memory m = take_memory(w, kind, 0, 4096);
    static const int64_t cases[][4] = {
        /* The offset and the stride of the target, and then those of the source. */
        {4, 4, 0, 4}, {0, 4, 4, 4}, {396, -4, 0, 4}, {0, 8, 400, 4}, {0, 4, 0, 8},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const int64_t *c = cases[i];
        number_bytes(&m, 1);
        memcpy(before, m.bytes, 4096);
        memcpy(wanted, m.bytes, 4096);
        cm_copy_request request = {
            .dst = row(&m, (uint64_t)c[0], 100, c[1], 4),
            .src = row(&m, (uint64_t)c[2], 100, c[3], 4),
            .stream = how == BACKGROUND ? NULL : w->streams[0],
            .blocking = how == BLOCKING,
        };
        for (int64_t k = 0; k < 100; k++) {
            memcpy(wanted + c[0] + k * c[1], before + c[2] + k * c[3], 4);
        }
        cm_ticket *ticket;
        CHECK_OK(cm_engine_copy(w->engine, &request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_release(ticket);
        CHECK_BYTES_EQ(m.bytes, wanted, 4096);
    }
    give_memory(w, &m);
}

/* If the device has finished a piece before the next one is packed, it waits for the
 * host. The engine then lets more threads pack. Here each query of an event is slow, so
 * the device is always found to have finished. */
static void
test_engine_more_threads_pack_when_the_device_waits(void)
{
    enum { NBYTES = 4 << 20, THREADS = 2, MORE = 4, LATE_US = 2000 };
    world w;
    open_world(&w);
    memory src = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory dst = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    number_bytes(&src, 5);
    memset(dst.bytes, 0, NBYTES);
    cm_copy_request request = {.dst = row(&dst, 0, NBYTES, 1, 1),
                               .src = row(&src, 0, NBYTES, 1, 1),
                               .stream = w.streams[0],
                               .blocking = true};
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.thread_count = THREADS;
    tuning.fresh_thread_count = CM_THREAD_MAX;
    tuning.links_thread_count = CM_LINKS_THREAD_MAX;
    tuning.quick_nbytes = 0;
    tuning.staged_up_nbytes = 0;
    tuning.chunk_nbytes = tuning.chunk_min_nbytes = 128 << 10;
    cm_faults_delay(w.rt, CM_OP_event_query, LATE_US);
    CHECK_OK(cm_engine_set_tuning(w.engine, &tuning));
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    cm_faults_delay(w.rt, CM_OP_event_query, 0);
    CHECK_BYTES_EQ(dst.bytes, src.bytes, NBYTES);
    CHECK_EQ(w.engine->workers.thread_count, THREADS - 1 + MORE);
    give_memory(&w, &src);
    give_memory(&w, &dst);
    close_world(&w);
}

/* A square is transposed in place. The engine has to read all of it before it writes it
 * back, and lets several threads do both. */
static void
test_engine_transposes_in_place_with_several_threads(void)
{
    enum { SIDE = 1024, NBYTES = SIDE * SIDE * 4, THREADS = 3 };
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    unsigned char *before = malloc(NBYTES);
    number_bytes(&a, 5);
    memcpy(before, a.bytes, NBYTES);
    cm_region square = region_at(&a, 0);
    square.ndim = 2;
    square.itemsize = 4;
    square.shape[0] = square.shape[1] = SIDE;
    square.strides[0] = SIDE * 4;
    square.strides[1] = 4;
    cm_copy_request request = {.dst = square, .src = square, .blocking = true};
    request.src.strides[0] = 4;
    request.src.strides[1] = SIDE * 4;
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.thread_count = tuning.fresh_thread_count = THREADS;
    CHECK_OK(cm_engine_set_tuning(w.engine, &tuning));
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    CHECK_EQ(w.engine->workers.thread_count, THREADS - 1);
    int wrong = 0;
    for (size_t i = 0; i < SIDE; i++) {
        for (size_t k = 0; k < SIDE; k++) {
            wrong +=
                memcmp(a.bytes + (i * SIDE + k) * 4, before + (k * SIDE + i) * 4, 4)
                != 0;
        }
    }
    CHECK_EQ(wrong, 0);
    free(before);
    give_memory(&w, &a);
    close_world(&w);
}

/* Copy between overlapping ends of each kind of memory, in each mode. */
static void
test_engine_overlapping_ends_read_first(void)
{
    world w;
    open_world(&w);
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        for (int how = 0; how < MODE_COUNT; how++) {
            check_overlap(&w, (cm_kind)kind, (mode)how);
        }
    }
    close_world(&w);
}

/* The host reaches device memory through a second mapping, whose addresses differ.
 * Copies between the two mappings of the same memory overlap, and the engine has to
 * notice that. */
static void
test_engine_overlap_through_the_second_mapping(void)
{
    world w;
    open_world(&w);
    memory m = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    /* This is the mapping that other libraries get when they import the memory for the
     * CPU. */
    memory alias = m;
    alias.kind = CM_KIND_PAGEABLE;
    alias.host = m.bytes;
    alias.address = 0;
    alias.device = -1;
    unsigned char before[4096];
    for (int how = 0; how < MODE_COUNT; how++) {
        for (int up = 0; up < 2; up++) {
            number_bytes(&m, 1);
            memcpy(before, m.bytes, 4096);
            cm_copy_request request = {
                .dst = row(up ? &m : &alias, 4, 1000, 4, 4),
                .src = row(up ? &alias : &m, 0, 1000, 4, 4),
                .stream = how == BACKGROUND ? NULL : w.streams[0],
                .blocking = how == BLOCKING,
            };
            cm_ticket *ticket;
            CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
            CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
            cm_ticket_release(ticket);
            CHECK_BYTES_EQ(m.bytes + 4, before, 4000);
        }
    }
    give_memory(&w, &m);
    close_world(&w);
}

/* One row is copied to 1000 rows of a device. The row must cross the link once, and a
 * kernel repeats it. */
static void
test_engine_broadcast_source_travels_once(void)
{
    world w;
    cm_ticket *ticket;
    cm_ticket_info info;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096 * 1000);
    number_bytes(&a, 2);
    cm_copy_request request = {
        .dst = region_at(&b, 0), .src = region_at(&a, 0), .stream = w.streams[0]};
    request.dst.ndim = request.src.ndim = 2;
    request.dst.shape[0] = request.src.shape[0] = 1000;
    request.dst.shape[1] = request.src.shape[1] = 4096;
    request.dst.strides[0] = 4096;
    request.dst.strides[1] = request.src.strides[1] = 1;
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_query(ticket, &info);
    CHECK_EQ(info.nbytes, 4096);
    CHECK_EQ(route_of(info.row), CM_ROUTE_STAGED_KERNEL);
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_copy_async), 1);
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_kernel_launch), 1);
    for (int i = 0; i < 1000; i++) {
        CHECK_BYTES_EQ(b.bytes + 4096 * i, a.bytes, 4096);
    }
    cm_ticket_release(ticket);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* Two registered ranges lie next to each other in ordinary memory. One copy of the
 * runtime may not cross the edge of a registration, so each of the two copies must take
 * four calls. */
static void
test_engine_copies_are_split_at_registration_edges(void)
{
    world w;
    open_world(&w);
    const size_t one = page_nbytes(), nbytes = 8 * one;
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, nbytes);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, nbytes);
    char *page = (char *)(((uintptr_t)a.host + one - 1) & ~(one - 1));
    cm_registration *shares[2];
    MUST(cm_registry_register(w.registry, 0, page + one, 2 * one, false, &shares[0]));
    MUST(cm_registry_register(w.registry, 0, page + 3 * one, 2 * one, false,
                              &shares[1]));
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    for (int up = 0; up < 2; up++) {
        number_bytes(&a, 4);
        memset(b.bytes, 0, nbytes);
        if (!up) {
            number_bytes(&b, 9);
        }
        cm_copy_request request = {
            .dst = row(up ? &b : &a, 0, (int64_t)nbytes, 1, 1),
            .src = row(up ? &a : &b, 0, (int64_t)nbytes, 1, 1),
            .blocking = true,
        };
        CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
        CHECK_BYTES_EQ(a.bytes, b.bytes, nbytes);
    }
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_copy_async), 2 * 4);
    MUST(cm_registration_release(shares[0]));
    MUST(cm_registration_release(shares[1]));
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* The device uses host addresses, as with real drivers. Two registrations next to each
 * other then look like one page-locked range, but one copy of the runtime may not cross
 * the edge between them. The ends of this copy overlap, too. */
static void
test_engine_overlap_over_a_registration_edge(void)
{
    world w;
    open_world(&w);
    const size_t one = page_nbytes(), nbytes = 2 * one;
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, nbytes + one);
    cm_registration *shares[2];
    char *page = (char *)(((uintptr_t)a.host + one - 1) & ~(one - 1));
    for (int i = 0; i < 2; i++) {
        MUST(cm_registry_register(w.registry, 0, page + (size_t)i * one, one, false,
                                  &shares[i]));
    }
    memory locked = {.kind = CM_KIND_PINNED,
                     .nbytes = nbytes,
                     .host = page,
                     .address = (uintptr_t)page,
                     .bytes = (unsigned char *)page};
    unsigned char *before = malloc(nbytes);
    number_bytes(&locked, 1);
    memcpy(before, page, nbytes);
    cm_copy_request request = {.dst = row(&locked, 8, (int64_t)nbytes - 8, 1, 1),
                               .src = row(&locked, 0, (int64_t)nbytes - 8, 1, 1),
                               .stream = w.streams[0]};
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
    CHECK_BYTES_EQ(page, before, 8);
    CHECK_BYTES_EQ(page + 8, before, nbytes - 8);
    free(before);
    for (int i = 0; i < 2; i++) {
        MUST(cm_registration_release(shares[i]));
    }
    give_memory(&w, &a);
    close_world(&w);
}

/* -- fills ------------------------------------------------------------------------------- */

/* Fill a part of the memory with elements that are `gap` bytes apart. The fill must
 * take the expected route, write each element, and leave the gaps alone. */
static void
check_fill(world *w, memory *m, int64_t itemsize, const char *value, int64_t gap,
           cm_route expected, bool blocking)
{
    cm_ticket_info info;
    int64_t stride = itemsize + gap;
    int64_t count = 600 / stride;
    cm_region dst = row(m, 16, count, stride, itemsize);
    memset(m->bytes, 0xCC, m->nbytes);
    CHECK_OK(fill(w, &dst, value, w->streams[0], blocking, &info));
    MUST(cm_rt_stream_synchronize(w->rt, w->streams[0]->handle));
    CHECK_STR_EQ(cm_routes[route_of(info.row)].text, cm_routes[expected].text);
    CHECK_FILLED(m->bytes, 0xCC, 16);
    for (int64_t i = 0; i < count; i++) {
        CHECK_BYTES_EQ(m->bytes + 16 + i * stride, value, itemsize);
        CHECK_FILLED(m->bytes + 16 + i * stride + itemsize, 0xCC, gap);
    }
}

/* A value whose bytes repeat after 1, 2 or 4 bytes is written by memset. Other values
 * and elements with gaps need the kernel. */
static void
test_engine_fill_uses_memset_where_it_can(void)
{
    world w;
    open_world(&w);
    memory d = take_memory(&w, CM_KIND_DEVICE, 0, 1024);
    for (int blocking = 0; blocking < 2; blocking++) {
        bool b = blocking != 0;
        check_fill(&w, &d, 1, "\1", 0, CM_ROUTE_FILL, b);
        check_fill(&w, &d, 2, "\1\2", 0, CM_ROUTE_FILL, b);
        check_fill(&w, &d, 4, "\1\2\3\4", 0, CM_ROUTE_FILL, b);
        check_fill(&w, &d, 8, "\0\0\0\0\0\0\0\0", 0, CM_ROUTE_FILL, b);
        check_fill(&w, &d, 8, "\1\2\3\4\1\2\3\4", 0, CM_ROUTE_FILL, b);
        check_fill(&w, &d, 6, "\1\2\1\2\1\2", 0, CM_ROUTE_FILL, b);
        check_fill(&w, &d, 8, "\1\2\3\4\5\6\7\10", 0, CM_ROUTE_STAGED_KERNEL, b);
        check_fill(&w, &d, 3, "\1\2\3", 0, CM_ROUTE_STAGED_KERNEL, b);
        check_fill(&w, &d, 4, "\0\0\0\0", 4, CM_ROUTE_STAGED_KERNEL, b);
    }
    give_memory(&w, &d);
    close_world(&w);
}

/* The device fills mapped and managed memory in the order of a stream, and a call that
 * blocks lets the host fill it. While the stream is shut nothing may change. */
static void
test_engine_fill_of_shared_memory_follows_the_stream(void)
{
    static const cm_kind kinds[] = {CM_KIND_MAPPED, CM_KIND_MANAGED};
    static const char large[600] = "one element that is all of it";
    world w;
    open_world(&w);
    for (int i = 0; i < 2; i++) {
        memory m = take_memory(&w, kinds[i], 0, 1024);
        check_fill(&w, &m, 1, "\1", 0, CM_ROUTE_FILL, false);
        check_fill(&w, &m, 6, "\1\2\1\2\1\2", 0, CM_ROUTE_FILL, false);
        check_fill(&w, &m, 8, "\1\2\3\4\5\6\7\10", 0, CM_ROUTE_STAGED_KERNEL, false);
        check_fill(&w, &m, 3, "\1\2\3", 2, CM_ROUTE_STAGED_KERNEL, false);
        check_fill(&w, &m, 600, large, 0, CM_ROUTE_STAGED_KERNEL, false);
        check_fill(&w, &m, 1, "\1", 0, CM_ROUTE_HOST, true);
        check_fill(&w, &m, 8, "\1\2\3\4\5\6\7\10", 3, CM_ROUTE_HOST, true);
        shut(&w, w.streams[0]);
        cm_region all = row(&m, 0, 1024, 1, 1);
        memset(m.bytes, 0xCC, m.nbytes);
        CHECK_OK(fill(&w, &all, "\7", w.streams[0], false, NULL));
        CHECK_FILLED(m.bytes, 0xCC, m.nbytes);
        unshut(&w, w.streams[0]);
        MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
        CHECK_FILLED(m.bytes, 7, m.nbytes);
        give_memory(&w, &m);
    }
    close_world(&w);
}

/* Memory of device 0 is mapped in three pieces, as another program may do it, and the
 * middle one is not open to device 1. A kernel of device 1 may read a region within the
 * first piece. A region over all three must be packed and copied instead. */
static void
test_engine_takes_no_kernel_to_memory_a_peer_may_use_in_part(void)
{
    enum { PIECES = 3, COUNT = PIECES * CM_EMULATED_GRANULARITY / 4 };
    static const int devices[] = {0, 1};
    world w;
    cm_address base;
    cm_ticket *ticket;
    cm_ticket_info info;
    open_world(&w);
    MUST(cm_rt_device_set(w.rt, 0));
    MUST(cm_rt_address_reserve(w.rt, PIECES * CM_EMULATED_GRANULARITY, &base));
    for (int piece = 0; piece < PIECES; piece++) {
        cm_address at = base + (uint64_t)piece * CM_EMULATED_GRANULARITY;
        uint64_t handle;
        MUST(cm_rt_physical_create(w.rt, CM_EMULATED_GRANULARITY, 0, 0, &handle));
        MUST(cm_rt_address_map(w.rt, at, CM_EMULATED_GRANULARITY, handle));
        MUST(cm_rt_physical_release(w.rt, handle));
        MUST(cm_rt_address_set_access(w.rt, at, CM_EMULATED_GRANULARITY, devices,
                                      piece == 1 ? 1 : 2));
    }
    memory dst = take_memory(&w, CM_KIND_DEVICE, 1, 8 * COUNT);
    /* First comes the piece that is open to device 1, then all three. */
    for (int part = 0; part < 2; part++) {
        int64_t count = part == 0 ? COUNT / PIECES : COUNT;
        cm_region src = {.kind = CM_KIND_DEVICE,
                         .device = 0,
                         .itemsize = 4,
                         .address = base,
                         .ndim = 1,
                         .shape = {count},
                         .strides = {4}};
        cm_copy_request request = {.dst = row(&dst, 0, count, 8, 4),
                                   .src = src,
                                   .stream = w.streams[1],
                                   .blocking = true};
        unsigned char *bytes = cm_runtime_host_alias(w.rt, base, 4);
        memset(bytes, 3 + part, CM_EMULATED_GRANULARITY);
        CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
        cm_ticket_query(ticket, &info);
        cm_ticket_release(ticket);
        CHECK_EQ(route_of(info.row), part == 0 ? CM_ROUTE_KERNEL : CM_ROUTE_PEER);
        CHECK_FILLED(dst.bytes, 3 + part, 4);
        CHECK_FILLED(dst.bytes + 8 * (COUNT / PIECES - 1), 3 + part, 4);
    }
    MUST(cm_rt_device_set(w.rt, 0));
    MUST(cm_rt_address_unmap(w.rt, base, PIECES * CM_EMULATED_GRANULARITY));
    MUST(cm_rt_address_free(w.rt, base, PIECES * CM_EMULATED_GRANULARITY));
    give_memory(&w, &dst);
    close_world(&w);
}

/* Without a pool of page-locked memory the engine packs into ordinary memory, as it
 * does if that pool has nothing left. */
static void
test_engine_packs_without_a_page_locked_pool(void)
{
    enum { NBYTES = 5 << 20, APART = 3 };
    world w;
    open_world(&w);
    memory device = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory plain = take_memory(&w, CM_KIND_PAGEABLE, 0, (uint64_t)NBYTES * APART);
    memset(plain.bytes, 0, plain.nbytes);
    memset(device.bytes, 7, NBYTES);
    cm_pool *pool = w.engine->pinned_pool;
    w.engine->pinned_pool = NULL;
    cm_copy_request request = {.dst = row(&plain, 0, NBYTES, APART, 1),
                               .src = row(&device, 0, NBYTES, 1, 1),
                               .stream = w.streams[0],
                               .blocking = true};
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < plain.nbytes; i++) {
        wrong += plain.bytes[i] != (i % APART == 0 ? 7 : 0);
    }
    CHECK_EQ(wrong, 0);
    w.engine->pinned_pool = pool;
    give_memory(&w, &device);
    give_memory(&w, &plain);
    close_world(&w);
}

/* clang-format off */
MAIN(RUN(test_engine_random_copies_between_all_kinds)
     RUN(test_engine_copies_an_empty_array_without_an_address)
     RUN(test_engine_packs_without_a_page_locked_pool)
     RUN(test_engine_large_copies_go_in_pieces)
     RUN(test_engine_more_threads_pack_when_the_device_waits)
     RUN(test_engine_transposes_in_place_with_several_threads)
RUN(test_engine_overlapping_ends_read_first)
     RUN(test_engine_overlap_through_the_second_mapping)
     RUN(test_engine_broadcast_source_travels_once)
     RUN(test_engine_copies_are_split_at_registration_edges)
     RUN(test_engine_overlap_over_a_registration_edge)
     RUN(test_engine_takes_no_kernel_to_memory_a_peer_may_use_in_part)
     RUN(test_engine_fill_uses_memset_where_it_can)
     RUN(test_engine_fill_of_shared_memory_follows_the_stream))
/* clang-format on */
