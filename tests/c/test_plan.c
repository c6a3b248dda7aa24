/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of plans and layouts. A plan chooses the route of a copy and cuts the copy into
 * pieces. Tables say which route is expected for which ends. A layout describes a copy
 * as nested loops, and random layouts are compared with a plain loop. Nothing here
 * calls a runtime. */
#include <stdlib.h>

#include "check.h"
#include "route_of.h"
#include "transfer/device/kernel.h"
#include "transfer/host/host_copy.h"
#include "transfer/plan/ring_policy.h"

enum { ARENA = 1 << 14 };

static uint64_t random_state;

/* The defaults of a machine with 4 processors, set by tune(). */
static cm_tuning tuning;

static uint64_t
next_random(uint64_t below)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % below;
}

static uint64_t
least_of(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* -- the routes, as a table -------------------------------------------------------------- */

typedef struct route_case {
    const char *what;
    cm_kind dst;
    cm_kind src;
    int shape; /* one of the shapes below */
    bool blocking;
    int src_device;
    cm_route expected;
} route_case;

/* The shapes of the two ends: which of them has gaps between its elements, rows with
 * gaps between them, one row that is repeated, or no elements. */
enum { PACKED, ROWS, DST_STRIDED, SRC_STRIDED, BOTH_STRIDED, REPEATED, EMPTY };

static const route_case cases[] = {
    {"empty", CM_KIND_DEVICE, CM_KIND_DEVICE, EMPTY, true, 0, CM_ROUTE_NOTHING},
    {"host", CM_KIND_PAGEABLE, CM_KIND_PINNED, PACKED, true, 0, CM_ROUTE_HOST},
    {"managed", CM_KIND_MANAGED, CM_KIND_MAPPED, SRC_STRIDED, true, 0, CM_ROUTE_HOST},
    {"locked", CM_KIND_PINNED, CM_KIND_MAPPED, PACKED, false, 0, CM_ROUTE_KERNEL},
    {"locked to not", CM_KIND_PAGEABLE, CM_KIND_MANAGED, PACKED, false, 0,
     CM_ROUTE_STAGED_KERNEL},
    {"not locked", CM_KIND_PAGEABLE, CM_KIND_PAGEABLE, PACKED, false, 0, CM_ROUTE_HOST},
    {"on device", CM_KIND_DEVICE, CM_KIND_DEVICE, PACKED, false, 0, CM_ROUTE_DIRECT},
    {"up pinned", CM_KIND_DEVICE, CM_KIND_PINNED, PACKED, false, 0, CM_ROUTE_DIRECT},
    {"down managed", CM_KIND_MANAGED, CM_KIND_DEVICE, PACKED, false, 0,
     CM_ROUTE_DIRECT},
    {"up and wait", CM_KIND_DEVICE, CM_KIND_PAGEABLE, PACKED, true, 0, CM_ROUTE_DIRECT},
    {"up later", CM_KIND_DEVICE, CM_KIND_PAGEABLE, PACKED, false, 0, CM_ROUTE_STAGED},
    {"rows", CM_KIND_DEVICE, CM_KIND_PINNED, ROWS, false, 0, CM_ROUTE_DIRECT_2D},
    {"rows up", CM_KIND_DEVICE, CM_KIND_PAGEABLE, ROWS, true, 0,
     CM_ROUTE_STAGED_KERNEL},
    {"strided", CM_KIND_DEVICE, CM_KIND_DEVICE, BOTH_STRIDED, false, 0,
     CM_ROUTE_KERNEL},
    {"mapped", CM_KIND_MAPPED, CM_KIND_DEVICE, DST_STRIDED, false, 0, CM_ROUTE_KERNEL},
    {"pack", CM_KIND_DEVICE, CM_KIND_PAGEABLE, SRC_STRIDED, true, 0, CM_ROUTE_STAGED},
    {"unpack", CM_KIND_PAGEABLE, CM_KIND_DEVICE, DST_STRIDED, true, 0, CM_ROUTE_STAGED},
    {"gather", CM_KIND_PAGEABLE, CM_KIND_DEVICE, SRC_STRIDED, true, 0,
     CM_ROUTE_STAGED_KERNEL},
    {"expand", CM_KIND_DEVICE, CM_KIND_PAGEABLE, REPEATED, true, 0,
     CM_ROUTE_STAGED_KERNEL},
    {"peer", CM_KIND_DEVICE, CM_KIND_DEVICE, PACKED, false, 1, CM_ROUTE_PEER},
    {"peer strided", CM_KIND_DEVICE, CM_KIND_DEVICE, DST_STRIDED, true, 1,
     CM_ROUTE_PEER},
};

/* Give two regions the strides of this shape. */
static void
set_strides(cm_region *dst, cm_region *src, int shape)
{
    dst->ndim = src->ndim = 2;
    dst->itemsize = src->itemsize = 4;
    dst->shape[0] = src->shape[0] = shape == EMPTY ? 0 : 6;
    dst->shape[1] = src->shape[1] = 10;
    bool dst_strided = shape == DST_STRIDED || shape == BOTH_STRIDED;
    bool src_strided = shape == SRC_STRIDED || shape == BOTH_STRIDED;
    int64_t row = shape == ROWS ? 64 : 40;
    dst->strides[1] = dst_strided ? 8 : 4;
    dst->strides[0] = dst_strided ? 80 : row;
    src->strides[1] = src_strided ? 12 : 4;
    src->strides[0] = src_strided ? 120 : shape == REPEATED ? 0 : row;
}

/* Each case must get the route in its row. */
static void
test_plan_route_table(void)
{
    static char dst_memory[ARENA], src_memory[ARENA];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const route_case *c = &cases[i];
        cm_region dst = {.kind = c->dst, .device = 0, .address = 0x10000};
        cm_region src = {.kind = c->src, .device = c->src_device, .address = 0x20000};
        dst.host = c->dst == CM_KIND_DEVICE ? NULL : dst_memory;
        src.host = c->src == CM_KIND_DEVICE ? NULL : src_memory;
        dst.address = c->dst == CM_KIND_PAGEABLE ? 0 : dst.address;
        src.address = c->src == CM_KIND_PAGEABLE ? 0 : src.address;
        set_strides(&dst, &src, c->shape);
        cm_end_facts dst_facts = {.locked = c->dst != CM_KIND_PAGEABLE, .whole = true};
        cm_end_facts src_facts = {.locked = c->src != CM_KIND_PAGEABLE, .whole = true};
        cm_plan plan;
        cm_plan_options options = {
            .may_wait = c->blocking, .on_stream = !c->blocking, .tuning = &tuning};
        CHECK_OK(cm_plan_init(&plan, &dst, &src, dst_facts, src_facts, options));
        if (route_of(plan.row) != c->expected) {
            CHECK_FAIL_("case '%s' gets the route %s instead of %s", c->what,
                        cm_routes[route_of(plan.row)].text,
                        cm_routes[c->expected].text);
        }
    }
}

/* -- between two devices ----------------------------------------------------------------- */

typedef struct peer_case {
    int shape;
    cm_peer_facts peers;
    cm_route expected;
    int device; /* the device that works; device 0 has the target and 1 the source */
} peer_case;

static const peer_case peer_cases[] = {
    {PACKED, {true, true, false}, CM_ROUTE_PEER, 0},
    {PACKED, {false, false, true}, CM_ROUTE_PEER, 0}, /* too short to be staged */
    {DST_STRIDED, {true, true, false}, CM_ROUTE_KERNEL, 0},
    {DST_STRIDED, {true, false, false}, CM_ROUTE_KERNEL, 0},
    {DST_STRIDED, {false, true, false}, CM_ROUTE_PEER, 0},
    {SRC_STRIDED, {true, true, false}, CM_ROUTE_KERNEL, 1},
    {SRC_STRIDED, {true, false, false}, CM_ROUTE_PEER, 0},
    {BOTH_STRIDED, {true, true, false}, CM_ROUTE_PEER, 0},
    {ROWS, {true, true, false}, CM_ROUTE_PEER, 0}, /* rows of 40 bytes */
    {REPEATED, {true, true, false}, CM_ROUTE_PEER, 0},
};

/* Which route a copy between two devices takes, and which of them does the work,
 * depends on what each can reach. */
static void
test_plan_between_devices(void)
{
    cm_end_facts facts = {.locked = true, .whole = true};
    cm_plan plan;
    for (size_t i = 0; i < sizeof(peer_cases) / sizeof(peer_cases[0]); i++) {
        const peer_case *c = &peer_cases[i];
        cm_region dst = {.kind = CM_KIND_DEVICE, .device = 0, .address = 0x10000};
        cm_region src = {.kind = CM_KIND_DEVICE, .device = 1, .address = 0x20000};
        cm_plan_options options = {.peers = c->peers, .tuning = &tuning};
        set_strides(&dst, &src, c->shape);
        CHECK_OK(cm_plan_init(&plan, &dst, &src, facts, facts, options));
        CHECK_EQ(plan.device, c->device);
        if (route_of(plan.row) != c->expected) {
            CHECK_FAIL_("case %zu gets the route %s instead of %s", i,
                        cm_routes[route_of(plan.row)].text,
                        cm_routes[c->expected].text);
        }
        CHECK_EQ(plan.src_device,
                 route_of(plan.row) == CM_ROUTE_KERNEL ? c->device : 1);
    }
    cm_region dst = {.kind = CM_KIND_DEVICE, .address = 0x10000, .ndim = 1};
    dst.itemsize = 1;
    dst.shape[0] = 64 << 20;
    dst.strides[0] = 1;
    cm_region src = dst;
    src.device = 1;
    src.address = 0x20000000;
    cm_plan_options apart = {.peers = {.apart = true}, .tuning = &tuning};
    CHECK_OK(cm_plan_init(&plan, &dst, &src, facts, facts, apart));
    CHECK_EQ(route_of(plan.row), CM_ROUTE_PEER_STAGED);
    cm_cut cut;
    cm_ring_policy_cut(&plan, &tuning, &plan.layout, &cut);
    CHECK_EQ(plan.piece_count, cm_cut_count(&cut));
    CHECK_GE(plan.piece_count, (64 << 20) / plan.piece_nbytes);
    src.strides[0] = 300;
    src.itemsize = dst.itemsize = dst.strides[0] = 256;
    src.shape[0] = dst.shape[0] = 1000;
    cm_plan_options pulls = {.peers = {.pulls = true}, .tuning = &tuning};
    dst.strides[0] = 512;
    CHECK_OK(cm_plan_init(&plan, &dst, &src, facts, facts, pulls));
    CHECK_EQ(route_of(plan.row), CM_ROUTE_KERNEL);
    CHECK_EQ(plan.device, 0);
}

/* The runtime copies short runs of ordinary memory faster, and several threads copy
 * long ones faster. The lengths from which copies are staged differ for the two
 * directions. */
static void
test_plan_long_runs_of_ordinary_memory_are_staged(void)
{
    static char memory[ARENA];
    cm_end_facts host = {.locked = false, .whole = true};
    cm_end_facts device = {.locked = true, .whole = true};
    cm_plan_options wait = {.may_wait = true, .tuning = &tuning};
    cm_plan plan;
    cm_region up = {.kind = CM_KIND_DEVICE, .address = 0x10000, .ndim = 1};
    up.itemsize = 1;
    up.strides[0] = 1;
    cm_region src = up;
    src.kind = CM_KIND_PAGEABLE;
    src.address = 0;
    src.device = -1;
    src.host = memory;
    for (int64_t nbytes = 1; nbytes <= INT64_C(1) << 40; nbytes *= 2) {
        up.shape[0] = src.shape[0] = nbytes;
        cm_route expected = nbytes < 4 << 20 ? CM_ROUTE_DIRECT : CM_ROUTE_STAGED;
        CHECK_OK(cm_plan_init(&plan, &up, &src, device, host, wait));
        CHECK_EQ(route_of(plan.row), expected);
        CHECK(!plan.is_download);
        expected = nbytes < 1 << 20 ? CM_ROUTE_DIRECT : CM_ROUTE_STAGED;
        CHECK_OK(cm_plan_init(&plan, &src, &up, host, device, wait));
        CHECK_EQ(route_of(plan.row), expected);
        CHECK_EQ(plan.is_download, expected == CM_ROUTE_STAGED);
        CHECK(!plan.is_fresh);
    }
}

/* The target's pages do not exist yet. Several threads make pages faster than one, each
 * of them one huge page at a time. So the copy must be staged even where the settings
 * say never, but not with a single thread. */
static void
test_plan_new_pages_are_filled_by_several_threads(void)
{
    static char memory[64];
    cm_end_facts fresh = {.whole = true, .fresh = true};
    cm_end_facts device = {.locked = true, .whole = true};
    cm_tuning slow = tuning;
    cm_plan_options wait = {.may_wait = true, .tuning = &slow};
    cm_plan plan;
    cm_region src = {.kind = CM_KIND_DEVICE, .address = 0x10000, .ndim = 1};
    src.itemsize = 1;
    src.strides[0] = 1;
    src.shape[0] = 8 << 20;
    cm_region dst = src;
    dst.kind = CM_KIND_PAGEABLE;
    dst.address = 0;
    dst.device = -1;
    dst.host = memory;
    slow.staged_down_nbytes = UINT64_MAX;
    CHECK_OK(cm_plan_init(&plan, &dst, &src, fresh, device, wait));
    CHECK_EQ(route_of(plan.row), CM_ROUTE_STAGED);
    CHECK(plan.is_fresh);
    CHECK_EQ(plan.piece_nbytes, 2 << 20);
    /* The copy begins within a huge page, so its first pieces are shorter. */
    CHECK_LE(5, plan.piece_count);
    /* Pieces of the length of a huge page must not exceed what the user has set. */
    slow.ring_nbytes = 5 << 20;
    CHECK_OK(cm_plan_init(&plan, &dst, &src, fresh, device, wait));
    CHECK(plan.is_fresh);
    CHECK_EQ(plan.piece_nbytes, 1 << 20);
    slow.ring_nbytes = 6 << 20;
    slow.chunk_nbytes = 512 << 10;
    CHECK_OK(cm_plan_init(&plan, &dst, &src, fresh, device, wait));
    CHECK_EQ(plan.piece_nbytes, 512 << 10);
    slow.thread_count = 1;
    CHECK_OK(cm_plan_init(&plan, &dst, &src, fresh, device, wait));
    CHECK_EQ(route_of(plan.row), CM_ROUTE_DIRECT);
    CHECK(!plan.is_fresh);
}

/* The number of pieces that the plan tells must be the number that the cut makes. */
static void
test_plan_pieces_are_those_of_the_cut(void)
{
    static char memory[64];
    cm_end_facts facts = {.locked = false, .whole = true};
    cm_plan_options later = {.tuning = &tuning};
    cm_plan plan;
    cm_region dst = {.kind = CM_KIND_DEVICE, .address = 0x10000, .ndim = 2};
    cm_region src = {.kind = CM_KIND_PAGEABLE, .host = memory, .device = -1, .ndim = 2};
    for (int64_t rows = 1; rows < 300; rows = rows * 3 / 2 + 1) {
        for (int64_t pitch = 100000; pitch <= 100003; pitch += 3) {
            dst.itemsize = src.itemsize = 4;
            dst.shape[0] = src.shape[0] = rows;
            dst.shape[1] = src.shape[1] = 25000;
            CHECK_OK(cm_region_set_c_strides(&dst));
            CHECK_OK(cm_region_set_c_strides(&src));
            src.strides[0] = pitch;
            CHECK_OK(cm_plan_init(&plan, &dst, &src, facts, facts, later));
            CHECK_EQ(route_of(plan.row), CM_ROUTE_STAGED);
            CHECK_EQ(cm_ring_policy_thread_count(&plan, &tuning), 4);
            uint64_t eighth = (uint64_t)rows * 100000 / 8;
            eighth = eighth > 512 << 10 ? eighth : 512 << 10;
            CHECK_EQ(plan.piece_nbytes, least_of((uint64_t)rows * 100000, eighth));
            cm_cut cut;
            cm_layout piece;
            uint64_t count = 0;
            cm_ring_policy_cut(&plan, &tuning, &plan.layout, &cut);
            while (cm_cut_next(&cut, &piece)) {
                CHECK_LE(cm_layout_nbytes(&piece), plan.piece_nbytes);
                count++;
            }
            CHECK_EQ(plan.piece_count, count);
        }
    }
    CHECK_GT(plan.piece_count, 1);
}

/* Long uploads that at least eight threads pack go through few slots, which then stay
 * in the processor's caches. No other copy does. */
static void
test_plan_long_uploads_stay_in_the_caches(void)
{
    static char memory[64];
    cm_end_facts facts = {.locked = false, .whole = true};
    cm_tuning many = tuning;
    cm_plan_options later = {.tuning = &many};
    cm_region device = {.kind = CM_KIND_DEVICE, .address = 0x10000, .ndim = 1};
    cm_region host = {
        .kind = CM_KIND_PAGEABLE, .host = memory, .device = -1, .ndim = 1};
    device.itemsize = host.itemsize = 1;
    device.strides[0] = host.strides[0] = 1;
    for (uint64_t threads = 1; threads <= CM_THREAD_MAX; threads++) {
        many.thread_count = threads;
        for (uint64_t nbytes = 1 << 20; nbytes <= UINT64_C(1) << 33; nbytes *= 2) {
            cm_plan up, down;
            device.shape[0] = host.shape[0] = (int64_t)nbytes;
            CHECK_OK(cm_plan_init(&up, &device, &host, facts, facts, later));
            CHECK_OK(cm_plan_init(&down, &host, &device, facts, facts, later));
            bool cached = nbytes >= many.cached_nbytes && threads >= 8;
            CHECK_EQ(up.is_cached, cached);
            CHECK(!down.is_cached);
            CHECK_EQ(up.slot_count, least_of(up.piece_count, cached ? 4 : 8));
            CHECK_EQ(down.slot_count, least_of(down.piece_count, 8));
        }
    }
    many.thread_count = 16;
    many.chunk_nbytes = 32 << 20;
    device.shape[0] = host.shape[0] = INT64_C(1) << 30;
    cm_plan plan;
    CHECK_OK(cm_plan_init(&plan, &device, &host, facts, facts, later));
    CHECK_EQ(plan.slot_count, 3); /* with fewer slots the pipeline would stand still */
    many.slot_count = 2;
    CHECK_OK(cm_plan_init(&plan, &device, &host, facts, facts, later));
    CHECK_EQ(plan.slot_count, 2); /* fewer are used if the user asks for that */
    many.ring_nbytes = 32 << 20;
    CHECK_OK(cm_plan_init(&plan, &device, &host, facts, facts, later));
    CHECK_EQ(plan.slot_count, 1); /* one is used if the ring has no room for more */
}

/* Long uploads of many runs must stay in the caches too. */
static void
test_plan_long_uploads_of_batches_stay_in_the_caches(void)
{
    cm_tuning many = tuning;
    many.thread_count = 8;
    for (int is_long = 0; is_long < 2; is_long++) {
        uint64_t nbytes = many.cached_nbytes - !is_long;
        cm_plan plan = {.row = &cm_routes[CM_ROUTE_STAGED_TABLE],
                        .nbytes = nbytes,
                        .layout = {.run_nbytes = nbytes}};
        cm_ring_policy_init(&plan, &many);
        CHECK_EQ(plan.is_cached, is_long != 0);
        CHECK_EQ(plan.slot_count, is_long != 0 ? 4 : 8);
        plan.is_download = true;
        cm_ring_policy_init(&plan, &many);
        CHECK(!plan.is_cached);
    }
}

/* The ring of a transfer that writes files must be small, so that it stays in the
 * caches, and even smaller for a single file. It must have at least two slots for each
 * file. The ring of a transfer that reads must keep the chunks that the tuning asks
 * for. */
static void
test_plan_ring_of_writers_is_small(void)
{
    enum { PAGE = 4096, MOST = 32 << 20 };
    for (uint32_t writers = 0; writers <= CM_THREAD_MAX; writers++) {
        cm_tuning t = tuning;
        cm_plan plan = {.row = &cm_routes[CM_ROUTE_FILE], .nbytes = UINT64_C(1) << 32};
        cm_ring_policy_init_file(&plan, &t, PAGE, writers);
        uint64_t ring = plan.slot_count * t.file_chunk_nbytes;
        CHECK_EQ(plan.piece_nbytes, t.file_chunk_nbytes + 2 * PAGE);
        CHECK_EQ(t.file_chunk_nbytes == tuning.file_chunk_nbytes, writers == 0);
        CHECK(writers == 0 || ring <= MOST);
        CHECK(writers != 1 || ring <= MOST / 8);
        CHECK(plan.slot_count >= 2 * writers);
        CHECK(plan.slot_count <= CM_SLOT_MAX);
    }
}

/* Check the values that follow from the number of processors. No thread may spin if
 * that would keep others from working. */
static void
test_tuning_follows_the_processors(void)
{
    for (unsigned cpus = 1; cpus < 64; cpus++) {
        cm_tuning t;
        cm_tuning_init(&t);
        cm_tuning_resolve(&t, cpus);
        CHECK_EQ(t.thread_count, cpus < 8 ? cpus : 8);
        CHECK_EQ(t.fresh_thread_count, cpus < CM_THREAD_MAX ? cpus : CM_THREAD_MAX);
        CHECK_EQ(t.links_thread_count,
                 cpus < CM_LINKS_THREAD_MAX ? cpus : CM_LINKS_THREAD_MAX);
        CHECK_EQ(t.spin_ns > 0, cpus > 2);
        CHECK_EQ(t.wait_spin_ns > 0, cpus > 2);
        t.thread_count = 3;
        cm_tuning_resolve(&t, cpus);
        CHECK_EQ(t.thread_count, 3);
        cm_tuning_init(&t);
        t.thread_count = 3;
        cm_tuning_resolve(&t, cpus);
        /* A user who asks for few threads gets few here too. */
        CHECK_EQ(t.fresh_thread_count, 3);
        CHECK_EQ(t.links_thread_count, 3);
    }
}

/* These regions are refused: two that do not fit each other, one that neither the host
 * nor a device can reach, and one whose bounds overflow. A copy of memory to itself
 * moves nothing. */
static void
test_plan_wrong_ends_are_refused(void)
{
    static char memory[64];
    cm_plan plan;
    cm_end_facts facts = {.locked = true, .whole = true};
    cm_plan_options wait = {.may_wait = true, .tuning = &tuning};
    cm_region dst = {.host = memory, .ndim = 1, .itemsize = 4, .shape = {4}};
    cm_region src = dst;
    dst.strides[0] = src.strides[0] = 4;
    src.itemsize = 8;
    CHECK_CODE(cm_plan_init(&plan, &dst, &src, facts, facts, wait), CM_EINVALID);
    src.itemsize = 4;
    src.shape[0] = 5;
    CHECK_CODE(cm_plan_init(&plan, &dst, &src, facts, facts, wait), CM_ESHAPE);
    src.shape[0] = 4;
    src.host = NULL;
    CHECK_CODE(cm_plan_init(&plan, &dst, &src, facts, facts, wait), CM_EINVALID);
    src.address = 4096;
    src.device = CM_MAX_DEVICES;
    CHECK_CODE(cm_plan_init(&plan, &dst, &src, facts, facts, wait), CM_EINVALID);
    src.strides[0] = INT64_MAX;
    CHECK_CODE(cm_plan_init(&plan, &dst, &src, facts, facts, wait), CM_EOVERFLOW);
    src = dst;
    CHECK_OK(cm_plan_init(&plan, &dst, &src, facts, facts, wait));
    CHECK_EQ(route_of(plan.row), CM_ROUTE_NOTHING);
}

/* -- layouts against a plain loop -------------------------------------------------- */

/* The bytes of the source, those that the target must get, those that it got, and a
 * slot. */
static unsigned char source[ARENA], wanted[ARENA], got[ARENA], packed[ARENA];

/* Make two random regions of one shape, such that no two elements of the target share a
 * byte. The last two arguments get the offsets of element 0 in the arena. Returns false
 * if a region is too large. */
static bool
make_random_pair(cm_region *dst, cm_region *src, int64_t *dst_at, int64_t *src_at)
{
    int ndim = (int)next_random(12);
    int order[12];
    *dst = (cm_region){.ndim = ndim, .itemsize = (int64_t)next_random(20) + 1};
    for (int axis = 0; axis < ndim; axis++) {
        order[axis] = axis;
        dst->shape[axis] =
            ndim > 6 ? 1 + (int64_t)next_random(2) : 1 + (int64_t)next_random(4);
    }
    *src = *dst;
    cm_region *ends[2] = {dst, src};
    for (int end = 0; end < 2; end++) {
        for (int axis = ndim - 1; axis > 0 && next_random(2) == 0; axis--) {
            int other = (int)next_random((uint64_t)axis + 1);
            int swapped = order[axis];
            order[axis] = order[other];
            order[other] = swapped;
        }
        int64_t stride = dst->itemsize;
        for (int i = ndim - 1; i >= 0; i--) {
            int axis = order[i];
            if (next_random(4) == 0) {
                stride += (int64_t)next_random(5);
            }
            ends[end]->strides[axis] = next_random(4) == 0 ? -stride : stride;
            if (end == 1 && next_random(5) == 0) {
                ends[end]->strides[axis] = 0;
            }
            stride *= dst->shape[axis];
        }
    }
    int64_t low, high;
    int64_t *at[2] = {dst_at, src_at};
    for (int end = 0; end < 2; end++) {
        if (!cm_is_ok(cm_region_bounds(ends[end], &low, &high))
            || high - low > ARENA - 64) {
            return false;
        }
        *at[end] = (int64_t)next_random(64) - low;
    }
    return true;
}

/* Make the copy by a plain loop, from `axis` on. */
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

/* Check what layout.h promises about axes. */
static void
check_invariants(const cm_layout *layout)
{
    for (int axis = 0; axis < layout->ndim; axis++) {
        CHECK_GT(layout->axes[axis].length, 1);
        CHECK_GT(layout->axes[axis].stride[CM_DST], 0);
        CHECK(axis == 0
              || layout->axes[axis].stride[CM_DST]
                     <= layout->axes[axis - 1].stride[CM_DST]);
    }
}

/* Copy in pieces of at most `limit` bytes. With `staged` each piece goes through a
 * slot, as in staged copies. The slot has only one of the elements that a broadcast
 * repeats. `written` counts the bytes. */
static void
copy_in_pieces(const cm_layout *whole, unsigned char *dst, const unsigned char *src,
               uint64_t limit, bool staged, uint64_t *written)
{
    cm_layout core = *whole;
    cm_layout repeats = {.run_nbytes = 0};
    cm_cut cut;
    cm_layout piece;
    if (staged) {
        cm_layout_take_repeats(&core, &repeats);
    }
    cm_cut_init(&cut, &core, limit);
    while (cm_cut_next(&cut, &piece)) {
        CHECK_LE(cm_layout_nbytes(&piece), limit);
        if (!staged) {
            cm_host_copy(&piece, dst, src, false);
            *written += cm_layout_nbytes(&piece);
            continue;
        }
        cm_layout pack = piece;
        cm_layout_pack(&pack, CM_DST);
        CHECK(cm_layout_is_packed(&pack, CM_DST));
        memset(packed, 0xEE, sizeof(packed));
        cm_host_copy(&pack, packed, src, false);
        cm_layout_pack(&piece, CM_SRC);
        CHECK(cm_layout_is_packed(&piece, CM_SRC));
        cm_layout_put_repeats(&piece, &repeats);
        cm_host_copy(&piece, dst, packed, false);
        *written += cm_layout_nbytes(&piece);
    }
}

/* Do what the kernel would do with the parameters that it gets. */
static void
run_strided_jobs(const cm_layout *layout, unsigned char *dst, const unsigned char *src)
{
    int64_t index[CM_MAX_NDIM] = {0};
    cm_strided_job job;
    int outer = cm_strided_job_init(&job, layout, (uintptr_t)dst, (uintptr_t)src);
    for (;;) {
        cm_address to = job.dst, from = job.src;
        for (int axis = 0; axis < outer; axis++) {
            to += (uint64_t)(index[axis] * layout->axes[axis].stride[CM_DST]);
            from += (uint64_t)(index[axis] * layout->axes[axis].stride[CM_SRC]);
        }
        CHECK_EQ((to | from) % job.itemsize, 0);
        for (uint64_t i = 0; i < job.count; i++) {
            uint64_t rest = i;
            cm_address d = to, s = from;
            for (uint32_t axis = job.ndim; axis-- > 0;) {
                d += rest % job.shape[axis] * (uint64_t)job.dst_strides[axis];
                s += rest % job.shape[axis] * (uint64_t)job.src_strides[axis];
                rest /= job.shape[axis];
            }
            memcpy((void *)(uintptr_t)d, (const void *)(uintptr_t)s, job.itemsize);
        }
        int axis = outer - 1;
        while (axis >= 0 && ++index[axis] == layout->axes[axis].length) {
            index[axis--] = 0;
        }
        if (axis < 0) {
            return;
        }
    }
}

/* Compare all ways to make one random copy with the plain loop. */
static void
check_random_pair(void)
{
    cm_region dst, src;
    cm_layout layout;
    int64_t dst_at, src_at, count;
    if (!make_random_pair(&dst, &src, &dst_at, &src_at)) {
        return;
    }
    memset(wanted, 0xCC, sizeof(wanted));
    copy_naively(&dst, &src, wanted + dst_at, source + src_at, 0);
    CHECK_OK(cm_layout_init(&dst, &src, &layout));
    CHECK_OK(cm_region_count(&dst, &count));
    uint64_t nbytes = (uint64_t)(count * dst.itemsize);
    CHECK_EQ(cm_layout_nbytes(&layout), nbytes);
    check_invariants(&layout);

    memset(got, 0xCC, sizeof(got));
    cm_host_copy(&layout, got + dst_at, source + src_at, false);
    CHECK_BYTES_EQ(got, wanted, sizeof(wanted));

    memset(got, 0xCC, sizeof(got));
    cm_host_copy(&layout, got + dst_at, source + src_at, true);
    CHECK_BYTES_EQ(got, wanted, sizeof(wanted));

    memset(got, 0xCC, sizeof(got));
    run_strided_jobs(&layout, got + dst_at, source + src_at);
    CHECK_BYTES_EQ(got, wanted, sizeof(wanted));

    for (int staged = 0; staged < 2; staged++) {
        uint64_t written = 0;
        memset(got, 0xCC, sizeof(got));
        copy_in_pieces(&layout, got + dst_at, source + src_at, 1 + next_random(200),
                       staged != 0, &written);
        /* The bytes are equal, and as many were written as there are, so each was
         * written exactly once. */
        CHECK_EQ(written, nbytes);
        CHECK_BYTES_EQ(got, wanted, sizeof(wanted));
    }
}

static void
test_plan_random_layouts_copy_as_the_plainest_loop(void)
{
    for (size_t i = 0; i < sizeof(source); i++) {
        source[i] = (unsigned char)next_random(251);
    }
    for (int round = 0; round < 20000 / CHECK_EVERY(20); round++) {
        random_state = (uint64_t)round * 977 + 1;
        int before = atomic_load(&check_failures);
        check_random_pair();
        if (atomic_load(&check_failures) != before) {
            CHECK_FAIL_("this was round %d", round);
            return;
        }
    }
}

/* Elements that lie together on both sides must become one run. */
static void
test_layout_joins_what_lies_together(void)
{
    cm_layout layout;
    cm_region dst = {.ndim = 4, .itemsize = 2, .shape = {3, 1, 4, 5}};
    CHECK_OK(cm_region_set_c_strides(&dst));
    cm_region src = dst;
    CHECK_OK(cm_layout_init(&dst, &src, &layout));
    CHECK_EQ(layout.ndim, 0);
    CHECK_EQ(layout.run_nbytes, 120);
    /* Fortran's order on both sides is also one run, even if both run backwards. */
    dst = src =
        (cm_region){.ndim = 2, .itemsize = 2, .shape = {3, 4}, .strides = {-2, -6}};
    CHECK_OK(cm_layout_init(&dst, &src, &layout));
    CHECK_EQ(layout.ndim, 0);
    CHECK_EQ(layout.offset[CM_DST], -22);
    CHECK_EQ(layout.offset[CM_SRC], -22);
    /* If all elements of a target axis share one place, only the last one is kept. */
    dst = (cm_region){.ndim = 1, .itemsize = 2, .shape = {4}, .strides = {0}};
    src = (cm_region){.ndim = 1, .itemsize = 2, .shape = {4}, .strides = {2}};
    CHECK_OK(cm_layout_init(&dst, &src, &layout));
    CHECK_EQ(layout.offset[CM_SRC], 6);
    CHECK_EQ(cm_layout_nbytes(&layout), 2);
}

/* Elements that are converted are the runs of their layout. A cut must never go through
 * one, and it ignores the alignment at which other pieces would end. */
static void
test_layout_of_items_is_never_cut_within_one(void)
{
    cm_region dst = {.ndim = 2, .itemsize = 4, .shape = {5, 7}};
    cm_region src = {.ndim = 2, .itemsize = 4, .shape = {5, 7}};
    cm_layout layout, piece;
    cm_cut cut;
    CHECK_OK(cm_region_set_c_strides(&dst));
    CHECK_OK(cm_region_set_c_strides(&src));
    CHECK_OK(cm_layout_init_items(&dst, &src, 4, &layout));
    CHECK_EQ(layout.ndim, 1);
    CHECK_EQ(layout.run_nbytes, 4);
    CHECK_EQ(cm_layout_nbytes(&layout), 140);
    for (uint64_t piece_nbytes = 0; piece_nbytes < 30; piece_nbytes++) {
        int64_t at = 0;
        cm_cut_init(&cut, &layout, piece_nbytes);
        cm_cut_align(&cut, (void *)1, 8);
        while (cm_cut_next(&cut, &piece)) {
            CHECK_EQ(piece.run_nbytes, 4);
            CHECK_EQ(piece.item_nbytes[CM_DST], 4);
            CHECK_EQ(piece.offset[CM_DST], at);
            at += (int64_t)cm_layout_nbytes(&piece);
        }
        CHECK_EQ(at, 140);
    }
    layout.ndim = 0; /* a single element that lies over such an edge */
    cm_cut_init(&cut, &layout, 100);
    cm_cut_align(&cut, (void *)6, 8);
    CHECK_EQ(cm_cut_count(&cut), 1);
    /* If the sizes differ, each side has its own strides, and the number of bytes is
     * that of the link. */
    dst.itemsize = 2;
    CHECK_OK(cm_region_set_c_strides(&dst));
    CHECK_OK(cm_layout_init_items(&dst, &src, 2, &layout));
    CHECK_EQ(layout.axes[0].stride[CM_DST], 2);
    CHECK_EQ(layout.axes[0].stride[CM_SRC], 4);
    CHECK_EQ(cm_layout_nbytes(&layout), 70);
    cm_layout_pack(&layout, CM_SRC);
    cm_layout_drop_items(&layout);
    CHECK_EQ(layout.ndim, 0);
    CHECK_EQ(layout.run_nbytes, 70);
    cm_plan plan;
    cm_plan_options converts = {.converts = true, .tuning = &tuning};
    dst.kind = src.kind = CM_KIND_DEVICE;
    dst.address = src.address = 1 << 20;
    cm_end_facts facts = {.locked = true, .whole = true};
    CHECK_CODE(cm_plan_init(&plan, &dst, &src, facts, facts, converts), CM_EINVALID);
}

/* A region with the largest number of axes. Eleven of them are longer than 1, and their
 * order in memory is opposite on the two sides. */
static void
test_layout_of_64_axes(void)
{
    cm_region dst = {.ndim = CM_MAX_NDIM, .itemsize = 3};
    for (int axis = 0; axis < CM_MAX_NDIM; axis++) {
        dst.shape[axis] = axis % 6 == 0 ? 2 : 1;
    }
    cm_region src = dst;
    cm_layout layout;
    CHECK_OK(cm_region_set_c_strides(&dst));
    int64_t stride = 3;
    for (int axis = 0; axis < CM_MAX_NDIM; axis++) {
        src.strides[axis] = stride;
        stride *= src.shape[axis];
    }
    CHECK_OK(cm_layout_init(&dst, &src, &layout));
    CHECK_EQ(layout.ndim, 11);
    memset(wanted, 0, sizeof(wanted));
    memset(got, 0, sizeof(got));
    copy_naively(&dst, &src, wanted, source, 0);
    run_strided_jobs(&layout, got, source);
    CHECK_BYTES_EQ(got, wanted, sizeof(wanted));
}

/* Set `tuning`. */
static void
tune(void)
{
    cm_tuning_init(&tuning);
    cm_tuning_resolve(&tuning, 4);
}

/* clang-format off */
MAIN(tune(); RUN(test_plan_route_table) RUN(test_plan_between_devices)
     RUN(test_plan_long_runs_of_ordinary_memory_are_staged)
     RUN(test_plan_new_pages_are_filled_by_several_threads)
     RUN(test_plan_pieces_are_those_of_the_cut) RUN(test_plan_wrong_ends_are_refused)
     RUN(test_plan_long_uploads_stay_in_the_caches) RUN(test_plan_long_uploads_of_batches_stay_in_the_caches)
     RUN(test_plan_ring_of_writers_is_small) RUN(test_tuning_follows_the_processors)
     RUN(test_plan_random_layouts_copy_as_the_plainest_loop)
     RUN(test_layout_joins_what_lies_together)
     RUN(test_layout_of_items_is_never_cut_within_one) RUN(test_layout_of_64_axes))
/* clang-format on */
