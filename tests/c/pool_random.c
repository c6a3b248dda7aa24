/* SPDX-License-Identifier: Apache-2.0 */
/* Makes random numbers, streams, pools and blocks for the random tests of pools.
 * pool_random.h explains what they are for. */
#include "pool_random.h"

#include <stdlib.h>

#include "pool_world.h"

random_world world;

/* The state of this thread's dice. */
static _Thread_local uint64_t state;
/* While `left` is not 0, most operations are about one pool, one size and two
 * streams. */
static _Thread_local struct {
    int left, pool, streams[2];
    uint64_t nbytes;
} focus;

void
random_seed(uint64_t seed)
{
    state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    focus.left = 0;
    (void)dice(2);
}

uint64_t
dice(uint64_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % n;
}

void
random_plan_fault(bool may_repeat)
{
    static const cm_op often[] = {
        CM_OP_event_create,         CM_OP_event_record,      CM_OP_event_query,
        CM_OP_event_synchronize,    CM_OP_stream_query,      CM_OP_stream_synchronize,
        CM_OP_stream_wait_event,    CM_OP_physical_create,   CM_OP_address_map,
        CM_OP_address_set_access,   CM_OP_host_register,     CM_OP_managed_alloc,
        CM_OP_device_alloc,         CM_OP_host_alloc,        CM_OP_stream_is_capturing,
        CM_OP_context_record_event, CM_OP_device_synchronize};
    static const int32_t codes[] = {999, CM_CUDA_OUT_OF_MEMORY, 1};
    int32_t code = codes[dice(3)];
    if (!world.with_faults || dice(4) != 0) {
        cm_faults_plan(world.rt, CM_OP_none, 0, 0, false);
    }
    else if (dice(2) == 0) {
        cm_op op = often[dice(sizeof(often) / sizeof(often[0]))];
        cm_faults_plan(world.rt, op, 1 + dice(3), code, may_repeat && dice(2) == 0);
    }
    else {
        cm_faults_plan(world.rt, CM_OP_none, 1 + dice(dice(2) == 0 ? 6 : 40), code,
                       false);
    }
}

void
random_step(void)
{
    focus.left--;
    if (focus.left < -40) {
        focus.left = 0;
        focus.pool = (int)dice(MODEL_POOLS);
        focus.nbytes = random_size();
        for (int i = 0; i < 2; i++) {
            focus.streams[i] = (int)dice(RANDOM_STREAMS);
        }
        focus.left = 20;
    }
}

/* True if the next choice is to follow the focus. */
static bool
is_focused(void)
{
    return focus.left > 0 && dice(8) != 0;
}

/* -- streams ---------------------------------------------------------------------------- */

static void
drop_owner(void *owner)
{
    (void)owner;
    atomic_fetch_add(&world.owners_dropped, 1);
}

void
random_make_stream(random_stream *h)
{
    int device = (int)dice(2);
    unsigned flags = dice(2) == 0 ? CM_STREAM_NON_BLOCKING : 0;
    uint64_t raw = 0;
    h->origin = (random_origin)(RANDOM_OWN + dice(3));
    if (h->origin == RANDOM_OWN) {
        MUST(cm_stream_create(world.rt, device, flags, 0, &h->stream));
        return;
    }
    cm_device_guard guard;
    MUST(cm_device_enter(world.inner, device, &guard));
    MUST(cm_rt_stream_create(world.inner, flags, 0, &raw));
    cm_device_leave(world.inner, &guard);
    bool kept = h->origin == RANDOM_KEPT;
    world.owners_made += kept;
    MUST(cm_stream_wrap(world.rt, device, raw, kept ? &world.owners_made : NULL,
                        drop_owner, &h->stream));
}

static bool
is_used(const cm_stream *stream)
{
    for (int i = 0; i < RANDOM_BLOCKS; i++) {
        for (uint32_t j = 0; world.blocks[i].block && j < world.blocks[i].use_count;
             j++) {
            if (world.blocks[i].uses[j] == stream) {
                return true;
            }
        }
    }
    return false;
}

/* A stream of ours may go at any time, and another library's only if no live block was
 * used on it. The pool may still remember either. */
void
random_drop_stream(random_stream *h)
{
    cm_stream *stream = h->stream;
    if (h->origin == RANDOM_OWN || h->origin == RANDOM_DEFAULT) {
        cm_stream_release(stream);
        h->origin = RANDOM_NO_STREAM;
    }
    else if (!is_used(stream)) {
        uint64_t raw = stream->handle;
        cm_device_guard guard;
        MUST(cm_device_enter(world.inner, stream->device, &guard));
        cm_stream_release(stream);
        MUST(cm_rt_stream_destroy(world.inner, raw));
        cm_device_leave(world.inner, &guard);
        h->origin = RANDOM_NO_STREAM;
    }
}

cm_stream *
random_any_stream(void)
{
    for (;;) {
        const random_stream *h = &world.streams[dice(RANDOM_STREAMS)];
        if (h->origin != RANDOM_NO_STREAM) {
            return h->stream;
        }
    }
}

cm_stream *
random_stream_for(int device)
{
    const random_stream *one = &world.streams[focus.streams[dice(2)]];
    if (is_focused() && one->origin != RANDOM_NO_STREAM) {
        return one->stream;
    }
    cm_stream *stream = random_any_stream();
    for (int i = 0; i < 3 && stream->device != device; i++) {
        stream = random_any_stream();
    }
    return stream;
}

void
random_wait(void)
{
    cm_stream *stream = random_any_stream();
    cm_device_guard guard;
    MUST(cm_device_enter(world.inner, stream->device, &guard));
    if (dice(8) == 0) {
        MUST(cm_rt_stream_synchronize(world.inner, stream->handle));
    }
    else {
        bool done = false;
        MUST(cm_rt_stream_query(world.inner, stream->handle, &done));
    }
    cm_device_leave(world.inner, &guard);
}

/* -- pools and blocks ------------------------------------------------------------------- */

uint64_t
random_size(void)
{
    static const uint64_t few[] = {512, 5000, 64 * KIB, 300 * KIB, MIB, 2 * MIB};
    uint64_t kind = dice(32);
    return is_focused() ? focus.nbytes
           : kind < 16  ? few[dice(6)]
           : kind < 20  ? 1 + dice(512)
           : kind < 27  ? 1 + dice(64 * KIB)
           : kind < 31  ? 1 + dice(MIB)
                        : 1 + dice(5 * MIB);
}

void
random_make_pool(int index)
{
    static const cm_pool_config configs[MODEL_POOLS] = {
        CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE),
        CONFIG(CM_KIND_MAPPED, 0, 0),
        CONFIG(CM_KIND_MANAGED, 1, CM_MANAGED_GLOBAL),
        CONFIG(CM_KIND_DEVICE, 0, 0),
        CONFIG(CM_KIND_DEVICE, 1, 0),
        CONFIG(CM_KIND_DEVICE, 0, 0),
        CONFIG(CM_KIND_PINNED, 1, CM_HOST_ALLOC_WRITE_COMBINED)};
    model_pool *of = &world.model.pools[index];
    *of = (model_pool){.config = configs[index]};
    cm_pool_config config = configs[index];
    config.budget = &world.model.kinds[config.kind - CM_KIND_PINNED];
    config.fence_limit_nbytes = dice(2) * 256 * KIB;
    config.segments = index == 5 ? CM_SEGMENTS_PLAIN : CM_SEGMENTS_AUTO;
    config.idle_trim_ns = dice(4) == 0 ? dice(2000000) : 0;
    of->pool = open_pool(world.rt, config);
}

model_pool *
random_pool(void)
{
    for (bool focused = is_focused();; focused = false) {
        int index = focused ? focus.pool : (int)dice(MODEL_POOLS);
        model_pool *of = &world.model.pools[index];
        if (of->pool != NULL && !of->is_closing) {
            return of;
        }
    }
}

uint32_t
random_place(bool taken)
{
    uint32_t first = (uint32_t)dice(RANDOM_BLOCKS);
    for (uint32_t i = 0; i < RANDOM_BLOCKS; i++) {
        uint32_t place = (first + i) % RANDOM_BLOCKS;
        if ((world.blocks[place].block != NULL) == taken) {
            return place;
        }
    }
    return RANDOM_BLOCKS;
}

/* Queue work that touches no memory, to stand for a use that was reported to the
 * oracle. Without it that use would be over sooner than the oracle believes. */
static void
queue_mark(const cm_stream *stream)
{
    uint64_t event = 0;
    MUST(cm_rt_event_create(world.inner, CM_EVENT_DISABLE_TIMING, &event));
    MUST(cm_rt_event_record(world.inner, event, stream->handle));
    MUST(cm_rt_event_destroy(world.inner, event));
}

void
random_use(model_block *b, cm_stream *stream)
{
    uint32_t i = 0;
    while (i < b->use_count && b->uses[i] != stream) {
        i++;
    }
    if (i == MODEL_USES) {
        return;
    }
    if (i == b->use_count) {
        b->uses[b->use_count++] = cm_stream_hold(stream);
    }
    oracle_use_range(&world.oracle, model_line(&world.model, stream), b->begin,
                     b->block->nbytes);
    cm_device_guard guard;
    MUST(cm_device_enter(world.inner, stream->device, &guard));
    if (b->behind != NULL && b->behind != stream) {
        /* The block was handed out only in the order of stream `behind`. A user who
         * takes it to another stream has to order the two streams. If the test wrote
         * without doing so, it would make a race of its own. */
        queue_mark(stream);
    }
    else {
        /* Nothing orders the streams of one block, so each of them writes to its own
         * part. If a race is found, it is then the pool's. */
        uint64_t part = b->block->nbytes / MODEL_USES;
        uint64_t nbytes = part < 256 ? part : 256;
        uint64_t offset = i * part + dice(2) * (part - nbytes);
        MUST(cm_rt_fill_8_async(world.inner, b->block->address + offset, 7, nbytes,
                                stream->handle));
    }
    cm_device_leave(world.inner, &guard);
}

void
random_use_more(model_block *block)
{
    int device = block->of->config.device;
    bool same = block->use_count > 0 && dice(4) != 0;
    cm_stream *stream = same ? block->uses[0] : random_stream_for(device);
    while (!world.oracle.is_alone && stream->handle == CM_STREAM_PER_THREAD) {
        stream = random_stream_for(device);
    }
    random_use(block, stream);
}

/* -- the whole -------------------------------------------------------------------------- */

void
random_open(uint64_t seed, bool is_alone)
{
    static const int drivers[] = {12000, 12040, 12080, 13000};
    memset(&world, 0, sizeof(world));
    random_seed(seed);
    world.rt = open_emulated(drivers[dice(4)], 2, UINT64_C(1) << 28);
    world.inner = world.rt->inner;
    world.with_faults = dice(2) == 0;
    oracle_open(&world.oracle, world.inner, is_alone);
    world.model.oracle = &world.oracle;
    world.model.blocks = world.blocks;
    world.model.block_count = RANDOM_BLOCKS;
    for (int d = 0; d < 2; d++) {
        cm_device_guard guard;
        MUST(cm_device_enter(world.rt, d, &guard));
        /* Streams of the other device also use memory that cudaMalloc made. */
        MUST(cm_rt_peer_enable(world.inner, 1 - d));
        cm_device_leave(world.rt, &guard);
        random_stream *to = &world.streams[d];
        MUST(cm_stream_wrap(world.rt, d, (uint64_t)d, NULL, NULL, &to->stream));
        to->origin = RANDOM_DEFAULT;
    }
    random_stream *own = &world.streams[2];
    MUST(cm_stream_wrap(world.rt, 0, CM_STREAM_PER_THREAD, NULL, NULL, &own->stream));
    own->origin = RANDOM_DEFAULT;
    for (int i = RANDOM_FIXED_STREAMS; i < RANDOM_STREAMS - 2; i++) {
        random_make_stream(&world.streams[i]);
    }
    for (int i = 0; i < MODEL_KINDS; i++) {
        cm_budget_init(&world.model.kinds[i], (6 + dice(26)) * MIB, NULL);
    }
    MUST(cm_rt_device_set(world.inner, 0));
}

const char *
random_wrong(void)
{
    return world.model.wrong[0] != '\0'    ? world.model.wrong
           : world.oracle.wrong[0] != '\0' ? world.oracle.wrong
                                           : NULL;
}

static void
check_counts(void)
{
    cm_emulated_counts counts;
    cm_emulated_read_counts(world.rt, &counts);
    counts.streams -= world.lost_stream_count;
#define CHECK_NONE(name)                                                               \
    if (counts.name != 0) {                                                            \
        model_fail(&world.model, "some are left of " #name, counts.name, 0);           \
    }
    CM_EMULATED_COUNTS(CHECK_NONE)
#undef CHECK_NONE
    if (world.owners_made != atomic_load(&world.owners_dropped)) {
        model_fail(&world.model, "owners of streams are kept", world.owners_made,
                   atomic_load(&world.owners_dropped));
    }
}

void
random_close(void)
{
    for (int i = 0; i < RANDOM_STREAMS; i++) {
        if (world.streams[i].origin != RANDOM_NO_STREAM) {
            random_drop_stream(&world.streams[i]);
        }
    }
    for (int i = 0; i < MODEL_POOLS; i++) {
        if (world.model.pools[i].pool != NULL) {
            cm_pool_release(world.model.pools[i].pool);
            world.model.pools[i].pool = NULL;
        }
    }
    model_compare_all(&world.model);
    oracle_drain(&world.oracle);
    check_counts();
    if (random_wrong() == NULL) {
        oracle_close(&world.oracle);
        world.rt->close(world.rt);
    }
}
