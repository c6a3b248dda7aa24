/* SPDX-License-Identifier: Apache-2.0 */
/* A stress of the plan: random copies are planned and then made in plain memory as the
 * plan says. The pieces of a plan, and the parts of each piece that threads take, must
 * write every byte of the target exactly once and no other byte, must read nothing but
 * the source, and must keep to their limits. Packing and unpacking must give what a
 * plain loop gives. Arguments: seconds of processor time (4), first seed (1). Prints
 * one line of JSON. */
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "route_of.h"
#include "transfer/device/kernel.h"
#include "transfer/host/host_copy.h"
#include "transfer/plan/ring_policy.h"

enum { ARENA = 1 << 15, MAX_DIMS = 8, SEED_CASES = 1000, CHUNK_MOST = 3000 };

/* One random copy and its plan. */
typedef struct fuzz_case {
    cm_region dst;
    cm_region src;
    int64_t dst_at; /* where element 0 lies in the arenas below */
    int64_t src_at;
    cm_tuning tuning;
    cm_plan plan;
} fuzz_case;

/* The bytes of the source, those that the target must get, those that it got, and a
 * slot. */
static unsigned char source[ARENA], wanted[ARENA], got[ARENA], packed[ARENA];
/* For each byte: whether the copy may read it, whether it may write it, and how often
 * it has been written. */
static unsigned char readable[ARENA], writable[ARENA], writes[ARENA];
static uint64_t random_state;
static uint64_t case_count, piece_count, part_count;
static uint64_t route_counts[CM_ROUTE_STAGED_KERNEL + 1];

static uint64_t
next_random(uint64_t below)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % below;
}

/* Return true once in `n` times. */
static bool
one_in(uint64_t n)
{
    return next_random(n) == 0;
}

/* -- cases ------------------------------------------------------------------------------ */

static void
shuffle(int *order, int count)
{
    for (int i = count - 1; i > 0; i--) {
        int other = (int)next_random((uint64_t)i + 1);
        int swapped = order[i];
        order[i] = order[other];
        order[other] = swapped;
    }
}

/* Make random strides for the region. `order` lists its axes, and the last one of them
 * gets the smallest stride. There are gaps, and some axes run backwards or are
 * repeated, which is a stride of 0. */
static void
make_strides(cm_region *region, const int *order, uint64_t repeated)
{
    int64_t stride = region->itemsize;
    for (int i = region->ndim - 1; i >= 0; i--) {
        int axis = order[i];
        stride += one_in(4) ? (int64_t)next_random(9) : 0;
        region->strides[axis] = one_in(4) ? -stride : stride;
        stride *= region->shape[axis] > 0 ? region->shape[axis] : 1;
        if (one_in(repeated)) {
            region->strides[axis] = 0;
        }
    }
}

/* Put the region into an arena, as memory of a random kind. Returns false if it is too
 * large. */
static bool
place(cm_region *region, unsigned char *arena, int64_t *at)
{
    int64_t low, high;
    if (!cm_is_ok(cm_region_bounds(region, &low, &high)) || high - low > ARENA - 64) {
        return false;
    }
    *at = (int64_t)next_random(64) - low;
    region->kind = one_in(2)   ? CM_KIND_DEVICE
                   : one_in(2) ? CM_KIND_PAGEABLE
                               : (cm_kind)next_random(CM_KIND_COUNT);
    region->device = region->kind == CM_KIND_PAGEABLE ? -1 : (int)next_random(2);
    region->host = region->kind == CM_KIND_DEVICE ? NULL : arena + *at;
    region->address =
        region->kind == CM_KIND_PAGEABLE ? 0 : (cm_address)(uintptr_t)(arena + *at);
    return true;
}

/* Make two regions of one random shape. Returns false if one is too large. */
static bool
make_ends(fuzz_case *c)
{
    static const int64_t sizes[] = {1, 2, 4, 8, 16, 3, 5, 6, 7, 9, 12, 15, 17, 20, 33};
    int ndim = (int)next_random(MAX_DIMS + 1);
    int64_t most = ndim <= 2 ? 60 : ndim <= 4 ? 9 : 4;
    int order[MAX_DIMS];
    c->dst = (cm_region){.ndim = ndim};
    c->dst.itemsize = sizes[next_random(sizeof(sizes) / sizeof(sizes[0]))];
    for (int axis = 0; axis < ndim; axis++) {
        order[axis] = axis;
        c->dst.shape[axis] = 1 + (int64_t)next_random((uint64_t)most);
        if (one_in(300)) {
            c->dst.shape[axis] = 0;
        }
    }
    c->src = c->dst;
    if (one_in(2)) {
        shuffle(order, ndim);
    }
    make_strides(&c->dst, order, 40);
    if (one_in(2)) {
        shuffle(order, ndim);
    }
    make_strides(&c->src, order, 6);
    return place(&c->dst, got, &c->dst_at) && place(&c->src, source, &c->src_at);
}

/* Choose a random tuning with small values, so that short copies have many pieces. */
static void
make_tuning(cm_tuning *t)
{
    cm_tuning_init(t);
    t->thread_count = 1 + next_random(CM_THREAD_MAX);
    t->chunk_nbytes = 1 + next_random(CHUNK_MOST);
    t->chunk_min_nbytes = 1 + next_random(CHUNK_MOST / 4);
    t->chunk_share = 1 + next_random(8);
    t->staged_up_nbytes = next_random(ARENA);
    t->staged_down_nbytes = next_random(ARENA);
    t->staged_peer_nbytes = 1 + next_random(300);
    t->row_min_nbytes = 1 + next_random(64);
    t->part_min_nbytes = 1 + next_random(300);
    t->part_max_nbytes = t->part_min_nbytes + next_random(300);
}

/* Make a random copy and plan it. Returns false if there is nothing to test. */
static bool
make_case(fuzz_case *c)
{
    if (!make_ends(c)) {
        return false;
    }
    make_tuning(&c->tuning);
    cm_end_facts facts[2];
    cm_region *ends[2] = {&c->dst, &c->src};
    for (int i = 0; i < 2; i++) {
        bool pageable = ends[i]->kind == CM_KIND_PAGEABLE;
        facts[i] = (cm_end_facts){.locked = !pageable, .whole = true};
        facts[i].fresh = pageable && i == 0 && one_in(4);
        /* Some ordinary memory is registered, as a whole or in part. */
        if (pageable && one_in(4)) {
            facts[i].whole = one_in(2);
            facts[i].locked = facts[i].whole;
            if (facts[i].locked && one_in(2)) {
                ends[i]->address = (cm_address)(uintptr_t)ends[i]->host;
                ends[i]->device = (int)next_random(2);
            }
        }
    }
    cm_plan_options options = {
        .may_wait = one_in(2), .on_stream = one_in(2), .tuning = &c->tuning};
    options.peers.apart = one_in(4);
    options.peers.pulls = !options.peers.apart && one_in(2);
    options.peers.pushes = !options.peers.apart && one_in(2);
    return cm_is_ok(
        cm_plan_init(&c->plan, &c->dst, &c->src, facts[0], facts[1], options));
}

/* -- what the copy must do --------------------------------------------------------- */

/* Make the copy with plain loops, and note which bytes may be read and written. */
static void
copy_naively(const cm_region *dst, const cm_region *src, int64_t to, int64_t from,
             int axis)
{
    if (axis == dst->ndim) {
        size_t nbytes = (size_t)dst->itemsize;
        memcpy(wanted + to, source + from, nbytes);
        memset(writable + to, 1, nbytes);
        memset(readable + from, 1, nbytes);
        return;
    }
    for (int64_t i = 0; i < dst->shape[axis]; i++) {
        copy_naively(dst, src, to + i * dst->strides[axis],
                     from + i * src->strides[axis], axis + 1);
    }
}

/* Note the writes of one part, and check that it reads and writes only what it may. A
 * side that is packed is a slot of `packed_nbytes`; the other side lies in its
 * arena. */
static void
trace(const cm_layout *part, int64_t to, int64_t from, bool dst_packed, bool src_packed,
      uint64_t packed_nbytes, int axis)
{
    if (axis < part->ndim) {
        for (int64_t i = 0; i < part->axes[axis].length; i++) {
            trace(part, to + i * part->axes[axis].stride[CM_DST],
                  from + i * part->axes[axis].stride[CM_SRC], dst_packed, src_packed,
                  packed_nbytes, axis + 1);
        }
        return;
    }
    for (uint64_t i = 0; i < part->run_nbytes; i++) {
        int64_t d = to + (int64_t)i;
        int64_t s = from + (int64_t)i;
        CHECK_GE(d, 0);
        CHECK_GE(s, 0);
        CHECK_LT(d, dst_packed ? (int64_t)packed_nbytes : ARENA);
        CHECK_LT(s, src_packed ? (int64_t)packed_nbytes : ARENA);
        CHECK(src_packed || readable[s] != 0);
        CHECK(dst_packed || writable[d] != 0);
        writes[d] = (unsigned char)(writes[d] < UINT8_MAX ? writes[d] + 1 : UINT8_MAX);
    }
}

/* Check that each byte was written as often as `expected` says, or exactly once if
 * `expected` is NULL. */
static void
check_written_once(const unsigned char *expected, uint64_t nbytes)
{
    for (uint64_t i = 0; i < nbytes; i++) {
        unsigned times = expected == NULL ? 1 : expected[i];
        if (writes[i] != times) {
            CHECK_FAIL_("byte %llu is written %u times, not %u", (unsigned long long)i,
                        writes[i], times);
            return;
        }
    }
}

/* -- what the plan does ------------------------------------------------------------ */

/* Check that cm_cut_piece() finds by its number the same part that cm_cut_next() has
 * just returned. */
static void
check_is_piece(const cm_cut *cut, uint64_t number, const cm_layout *part)
{
    cm_layout piece;
    cm_cut_piece(cut, number, &piece);
    CHECK_EQ(piece.run_nbytes, part->run_nbytes);
    CHECK_EQ(piece.offset[CM_DST], part->offset[CM_DST]);
    CHECK_EQ(piece.offset[CM_SRC], part->offset[CM_SRC]);
    CHECK_EQ(piece.ndim, part->ndim);
    CHECK(memcmp(piece.axes, part->axes, (size_t)part->ndim * sizeof(cm_axis)) == 0);
}

/* Make one copy of the host as the workers do it, in parts. */
static void
copy_in_parts(const fuzz_case *c, const cm_layout *layout, unsigned char *dst,
              int64_t dst_at, const unsigned char *src, int64_t src_at,
              uint64_t packed_nbytes)
{
    cm_cut cut;
    cm_layout part;
    uint64_t least = c->tuning.part_min_nbytes;
    uint64_t limit =
        least + next_random(c->tuning.part_max_nbytes - c->tuning.part_min_nbytes + 1);
    bool wide = one_in(2);
    uint64_t count = 0;
    bool aligns = layout->ndim == 0 && one_in(2);
    while (aligns && (limit & (limit - 1)) != 0) {
        limit &= limit - 1; /* clears bits until the highest one is left */
    }
    cm_cut_init(&cut, layout, limit);
    if (aligns) {
        cm_cut_align(&cut, dst + dst_at + layout->offset[CM_DST], (uintptr_t)limit);
    }
    uint64_t expected_count = cm_cut_count(&cut);
    while (cm_cut_next(&cut, &part)) {
        check_is_piece(&cut, count, &part);
        /* A part has at most `limit` bytes, or one element if that is more. */
        CHECK(cm_layout_nbytes(&part) <= limit);
        trace(&part, dst_at + part.offset[CM_DST], src_at + part.offset[CM_SRC],
              dst == packed, src == packed, packed_nbytes, 0);
        cm_host_copy(&part, dst + dst_at, src + src_at, wide);
        count++;
    }
    CHECK_EQ(count, expected_count);
    part_count += count;
}

/* Copy each piece into a slot and from there to the target, as staged copies and copies
 * between devices do. `traced` counts the writes to the target. */
static void
copy_in_pieces(const fuzz_case *c, unsigned char *traced)
{
    cm_layout core = c->plan.layout;
    cm_layout repeats;
    cm_layout piece;
    cm_cut cut;
    uint64_t count = 0;
    cm_layout_take_repeats(&core, &repeats);
    cm_ring_policy_cut(&c->plan, &c->tuning, &core, &cut);
    memset(traced, 0, ARENA);
    while (cm_cut_next(&cut, &piece)) {
        uint64_t nbytes = cm_layout_nbytes(&piece);
        CHECK_LE(nbytes, c->plan.piece_nbytes);
        cm_layout pack = piece;
        cm_layout_pack(&pack, CM_DST);
        memset(packed, 0xEE, sizeof(packed));
        memset(writes, 0, sizeof(writes));
        copy_in_parts(c, &pack, packed, 0, source, c->src_at, nbytes);
        check_written_once(NULL, nbytes);
        cm_layout unpack = piece;
        cm_layout_pack(&unpack, CM_SRC);
        cm_layout_put_repeats(&unpack, &repeats);
        memcpy(writes, traced, ARENA);
        copy_in_parts(c, &unpack, got, c->dst_at, packed, 0, nbytes);
        memcpy(traced, writes, ARENA);
        count++;
    }
    CHECK_EQ(count, c->plan.piece_count);
    piece_count += count;
}

/* Do what the kernel would do with the parameters that it gets. */
static void
run_kernel(const fuzz_case *c)
{
    const cm_layout *layout = &c->plan.layout;
    int64_t index[CM_MAX_NDIM] = {0};
    cm_strided_job job;
    cm_address dst = (uintptr_t)(got + c->dst_at);
    cm_address src = (uintptr_t)(source + c->src_at);
    int outer = cm_strided_job_init(&job, layout, dst, src);
    for (;;) {
        cm_address to = job.dst;
        cm_address from = job.src;
        for (int axis = 0; axis < outer; axis++) {
            to += (uint64_t)(index[axis] * layout->axes[axis].stride[CM_DST]);
            from += (uint64_t)(index[axis] * layout->axes[axis].stride[CM_SRC]);
        }
        for (uint64_t i = 0; i < job.count; i++) {
            uint64_t rest = i;
            cm_address d = to;
            cm_address s = from;
            for (uint32_t axis = job.ndim; axis-- > 0;) {
                d += rest % job.shape[axis] * (uint64_t)job.dst_strides[axis];
                s += rest % job.shape[axis] * (uint64_t)job.src_strides[axis];
                rest /= job.shape[axis];
            }
            cm_layout one = {.run_nbytes = job.itemsize};
            trace(&one, (int64_t)(d - (uintptr_t)got), (int64_t)(s - (uintptr_t)source),
                  false, false, 0, 0);
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

/* Make the copy as its route would, and check what this route promises about its
 * layout. */
static void
run_route(const fuzz_case *c)
{
    const cm_layout *layout = &c->plan.layout;
    static unsigned char traced[ARENA];
    memset(writes, 0, sizeof(writes));
    switch (route_of(c->plan.row)) {
    case CM_ROUTE_STAGED:
    case CM_ROUTE_STAGED_KERNEL:
    case CM_ROUTE_PEER:
    case CM_ROUTE_PEER_STAGED:
        if (route_of(c->plan.row) == CM_ROUTE_PEER && layout->ndim == 0) {
            break; /* the runtime makes this in one copy */
        }
        copy_in_pieces(c, traced);
        memcpy(writes, traced, sizeof(writes));
        return;
    case CM_ROUTE_KERNEL:
        run_kernel(c);
        return;
    case CM_ROUTE_DIRECT:
        CHECK_EQ(layout->ndim, 0);
        break;
    case CM_ROUTE_DIRECT_2D:
        CHECK_EQ(layout->ndim, 1);
        CHECK_GE(layout->axes[0].stride[CM_DST], (int64_t)layout->run_nbytes);
        CHECK_GE(layout->axes[0].stride[CM_SRC], (int64_t)layout->run_nbytes);
        break;
    default:
        CHECK_EQ(route_of(c->plan.row), CM_ROUTE_HOST);
    }
    CHECK_EQ(c->plan.piece_count, 1);
    copy_in_parts(c, layout, got, c->dst_at, source, c->src_at, 0);
}

/* Plan and make one random copy, and compare it with the plain loops. */
static void
run_case(void)
{
    fuzz_case c;
    if (!make_case(&c)) {
        return;
    }
    case_count++;
    route_counts[route_of(c.plan.row)]++;
    memset(wanted, 0xCC, sizeof(wanted));
    memset(got, 0xCC, sizeof(got));
    memset(readable, 0, sizeof(readable));
    memset(writable, 0, sizeof(writable));
    copy_naively(&c.dst, &c.src, c.dst_at, c.src_at, 0);
    if (route_of(c.plan.row) == CM_ROUTE_NOTHING) {
        CHECK_EQ(c.plan.nbytes, 0);
        CHECK_EQ(c.plan.piece_count, 0);
        CHECK(memchr(writable, 1, sizeof(writable)) == NULL);
        return;
    }
    run_route(&c);
    check_written_once(writable, ARENA);
    CHECK_BYTES_EQ(got, wanted, sizeof(wanted));
}

static double
cpu_seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int
main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 4;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    uint64_t seed = first;
    for (size_t i = 0; i < sizeof(source); i++) {
        source[i] = (unsigned char)next_random(251);
    }
    for (; cpu_seconds() < seconds && atomic_load(&check_failures) == 0; seed++) {
        random_state = seed * 977;
        for (int i = 0; i < SEED_CASES && atomic_load(&check_failures) == 0; i++) {
            run_case();
            if (atomic_load(&check_failures) != 0) {
                fprintf(stderr, "seed %llu, case %d\n", (unsigned long long)seed, i);
            }
        }
    }
    printf("{\"first_seed\": %llu, \"seeds\": %llu, \"cases\": %llu, \"pieces\": %llu, "
           "\"parts\": %llu, \"failures\": %d, \"cpu_seconds\": %.1f, \"routes\": {",
           (unsigned long long)first, (unsigned long long)(seed - first),
           (unsigned long long)case_count, (unsigned long long)piece_count,
           (unsigned long long)part_count, atomic_load(&check_failures), cpu_seconds());
    for (int route = 0; route <= CM_ROUTE_STAGED_KERNEL; route++) {
        printf("%s\"%s\": %llu", route == 0 ? "" : ", ", cm_routes[route].text,
               (unsigned long long)route_counts[route]);
    }
    printf("}}\n");
    return atomic_load(&check_failures) == 0 && case_count > 0 ? 0 : 1;
}
