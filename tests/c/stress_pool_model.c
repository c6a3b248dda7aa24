/* SPDX-License-Identifier: Apache-2.0 */
/* A stress of the pool: one thread makes random operations on pools of all kinds, on
 * two devices and on streams of every sort. After each operation two models are
 * compared: what the counters must add up to (pool_model.h), and whose work may still
 * run on which memory (order_oracle.h). Arguments: seconds (4), first seed (1),
 * operations of a seed (3000). */
#include <stdlib.h>

#include "pool_random.h"
#include "pool_world.h"

static int device;    /* the device that is current for this thread */
static bool injected; /* an injected fault made a call of the present operation fail */
static model_pool *touched; /* the pool that the present operation used */
static double seconds = 4;
static uint64_t first_seed = 1;
static uint64_t seed_operations = 3000;
static uint64_t operation_count, refused_count, injected_count, seed_count,
    ordered_count;

/* -- faults ----------------------------------------------------------------------------- */

/* Stop injecting faults after an operation, and note whether a fault made one of its
 * runtime calls fail. A pool may have refused a block because of such a fault, which
 * the model cannot foresee, so the model takes over the pools' counts of refusals. */
static void
settle_fault(void)
{
    injected = injected || cm_faults_last_injected(world.rt) != CM_OP_none;
    world.lost_stream_count +=
        cm_faults_last_injected(world.rt) == CM_OP_stream_destroy;
    cm_faults_plan(world.rt, CM_OP_none, 0, 0, false);
    injected_count += injected;
    for (int i = 0; i < MODEL_POOLS && injected; i++) {
        if (world.model.pools[i].pool != NULL) {
            world.model.pools[i].refused_count =
                read_counters(world.model.pools[i].pool).out_of_memory_count;
        }
    }
}

/* -- streams ---------------------------------------------------------------------------- */

/* Shut or open the gate of a stream. */
static void
op_gate(bool shut)
{
    oracle_gate(&world.oracle,
                model_line(&world.model, random_stream_for((int)dice(2))), shut);
}

/* Make or drop a stream. */
static void
op_stream(void)
{
    random_stream *h = &world.streams[RANDOM_FIXED_STREAMS
                                      + dice(RANDOM_STREAMS - RANDOM_FIXED_STREAMS)];
    if (h->origin == RANDOM_NO_STREAM) {
        if (world.oracle.line_count > ORACLE_LINES - RANDOM_STREAMS) {
            oracle_drain(&world.oracle);
        }
        random_make_stream(h);
    }
    else {
        random_drop_stream(h);
    }
}

/* -- blocks ----------------------------------------------------------------------------- */

/* Let a stream work on a live block. */
static void
op_use(void)
{
    model_block *b = &world.blocks[dice(RANDOM_BLOCKS)];
    if (b->block != NULL && !b->of->is_closing) {
        random_use_more(b);
    }
}

/* True if nothing of the pool is live and all limits leave room for the block. Then the
 * pool has no reason to refuse it. */
static bool
has_room(const model_pool *of, uint64_t nbytes)
{
    const cm_budget *budget = cm_pool_get_config(of->pool)->budget;
    uint64_t need = (nbytes + CHUNK) / CHUNK * CHUNK;
    uint64_t others = atomic_load(&budget->parent->used_nbytes) - of->reserved_nbytes;
    return of->live_count == 0 && need <= atomic_load(&budget->limit_nbytes)
           && need + others <= atomic_load(&budget->parent->limit_nbytes);
}

/* Allocate a block while runtime calls may be made to fail. Check that no runtime call
 * was made if the pool counted a hit, which is a block that it took from its cache, or
 * if cm_pool_try_alloc() was asked. */
static cm_status
take_block(model_pool *of, uint64_t nbytes, cm_stream *stream, cm_block **block)
{
    cm_pool_counters before = read_counters(of->pool);
    random_plan_fault(true);
    cm_status status = cm_ok();
    bool may_call = dice(4) != 0;
    *block = may_call ? NULL : cm_pool_try_alloc(of->pool, nbytes, stream, 0);
    if (may_call) {
        status = pool_alloc(of->pool, nbytes, stream, block);
    }
    cm_pool_counters after = read_counters(of->pool);
    bool called = cm_faults_count(world.rt, CM_OP_none) != 0;
    settle_fault();
    if (called && (!may_call || after.hit_count != before.hit_count)) {
        model_fail(&world.model, "a hit made a runtime call", may_call,
                   after.hit_count);
    }
    return status;
}

/* Allocate a block, and note it at this place of the table `world.blocks`. The pool may
 * refuse only for a reason that the model knows. Returns true if there is a block. */
static bool
take_at(uint32_t place, model_pool *of, uint64_t nbytes, cm_stream *stream)
{
    bool room = has_room(of, nbytes);
    cm_block *block = NULL;
    touched = of;
    cm_status status = take_block(of, nbytes, stream, &block);
    if (block != NULL) {
        model_take(&world.model, of, place, block, nbytes, stream);
    }
    if (!cm_is_ok(status)) {
        refused_count++;
        bool short_of =
            status.code == CM_CUDA_OUT_OF_MEMORY || status.code == CM_ELIMIT;
        of->refused_count += short_of && !injected;
        if (!injected && (!short_of || room)) {
            model_fail(&world.model, "a block was refused without a reason",
                       (uint64_t)status.code, nbytes);
        }
    }
    return block != NULL;
}

static void
op_alloc(void)
{
    model_pool *of = random_pool();
    uint32_t place = random_place(false);
    uint64_t nbytes = random_size();
    cm_stream *stream = dice(5) == 0 ? NULL : random_stream_for(of->config.device);
    if (place == RANDOM_BLOCKS || !take_at(place, of, nbytes, stream)) {
        return;
    }
    if (stream != NULL && dice(2) == 0) {
        random_use(&world.blocks[place], stream);
    }
    else if (dice(2) == 0) {
        random_use_more(&world.blocks[place]);
    }
}

/* Give the block of this place back under a plan of faults. With a fence only some of
 * its streams are named, and the fence has to cover the others. */
static void
free_block(uint32_t place)
{
    model_block b = model_give(&world.model, place);
    cm_pool *pool = b.of->pool;
    touched = b.of;
    bool fence = b.use_count > 0 && dice(8) == 0;
    uint32_t announced = fence ? (uint32_t)dice(b.use_count) : b.use_count;
    if (b.of->is_closing && b.of->live_count == 0) {
        b.of->pool = NULL; /* the pool ends with its last block */
    }
    random_plan_fault(b.of->pool != NULL);
    if (fence || dice(3) != 0
        || !cm_pool_quick_free(pool, b.block, b.uses, b.use_count)) {
        cm_pool_free(pool, b.block, b.uses, announced, fence ? CM_POOL_FREE_FENCE : 0);
    }
    settle_fault();
    for (uint32_t i = 0; i < b.use_count; i++) {
        cm_stream_release(b.uses[i]);
    }
}

static void
op_free(void)
{
    uint32_t place = random_place(true);
    if (place != RANDOM_BLOCKS) {
        free_block(place);
    }
}

/* Take and free a block three times for the same stream. The stream's work on the first
 * block is held behind a gate, and any stream may work on the later two. */
static void
op_relay(void)
{
    model_pool *of = random_pool();
    uint32_t place = random_place(false);
    uint64_t nbytes = random_size();
    cm_stream *first = random_stream_for(of->config.device);
    if (place == RANDOM_BLOCKS || !take_at(place, of, nbytes, first)) {
        return;
    }
    oracle_gate(&world.oracle, model_line(&world.model, first), true);
    random_use(&world.blocks[place], first);
    free_block(place);
    for (int i = 0; i < 2; i++) {
        if (take_at(place, of, nbytes, first)) {
            random_use(&world.blocks[place], random_stream_for(of->config.device));
            free_block(place);
        }
    }
}

/* -- pools ------------------------------------------------------------------------------ */

/* Choose one of the pools at random: make it if it is not open, or else sometimes
 * release it. If no pool is open any more, give all blocks back and make one. */
static void
op_close(void)
{
    int index = (int)dice(MODEL_POOLS);
    model_pool *of = touched = &world.model.pools[index];
    if (of->pool == NULL) {
        random_make_pool(index);
    }
    else if (!of->is_closing && dice(8) == 0) {
        cm_pool *pool = of->pool;
        bool last = of->live_count == 0;
        of->is_closing = !last;
        of->pool = last ? NULL : pool;
        /* Closing tries twice and no more, so a fault must not repeat. */
        random_plan_fault(false);
        cm_pool_release(pool);
        settle_fault();
    }
    int open = 0;
    for (int i = 0; i < MODEL_POOLS; i++) {
        open += world.model.pools[i].pool != NULL && !world.model.pools[i].is_closing;
    }
    if (open == 0) {
        for (uint32_t i = 0; i < RANDOM_BLOCKS; i++) {
            if (world.blocks[i].block != NULL) {
                free_block(i);
            }
        }
        random_make_pool(0);
    }
}

/* Trim a pool, and check that its counters say what was given back. */
static void
op_trim(void)
{
    model_pool *of = touched = random_pool();
    bool wait = dice(2) == 0;
    uint64_t keep = dice(2) * dice(16 * MIB);
    uint64_t released = 0;
    cm_pool_counters before = read_counters(of->pool);
    random_plan_fault(true);
    cm_status status = pool_trim(of->pool, keep, wait, &released);
    settle_fault();
    cm_pool_counters c = read_counters(of->pool);
    of->trim_count = before.trim_count + 1;
    if (c.trim_count != of->trim_count
        || c.trimmed_nbytes != before.trimmed_nbytes + released
        || c.reserved_nbytes != before.reserved_nbytes - released) {
        model_fail(&world.model, "a trim does not add up", released, c.trimmed_nbytes);
    }
    if (!injected && (!cm_is_ok(status) || (wait && c.in_flight_count != 0))) {
        model_fail(&world.model, "a trim left what it waited for",
                   (uint64_t)(int64_t)status.code, c.in_flight_count);
    }
}

/* Change a limit of a pool or of a kind. */
static void
op_limit(void)
{
    static const uint64_t none = UINT64_MAX;
    cm_budget *budget = cm_pool_get_config(random_pool()->pool)->budget;
    bool own = dice(2) == 0;
    budget = own ? budget : budget->parent;
    uint64_t limit = own && dice(2) == 0 ? none : (2 + dice(own ? 12 : 24)) * MIB;
    atomic_store(&budget->limit_nbytes, limit);
}

/* Reset the peaks, read the peaks of the window, or compare everything. */
static void
op_read(void)
{
    model_pool *of = touched = random_pool();
    cm_pool_counters c;
    switch (dice(3)) {
    case 0:
        cm_pool_reset_peaks(of->pool);
        model_reset_peaks(of);
        break;
    case 1:
        cm_pool_read_window(of->pool, &c);
        if (c.peak_live_nbytes != of->window_live_nbytes
            || c.peak_requested_nbytes != of->window_requested_nbytes
            || c.peak_waste_nbytes != of->window_waste_nbytes) {
            model_fail(&world.model, "the peaks of a window differ", c.peak_live_nbytes,
                       of->window_live_nbytes);
        }
        model_reset_window(of);
        break;
    default:
        model_compare(&world.model, of);
        model_compare_list(&world.model, of);
    }
}

/* -- one operation, one seed ------------------------------------------------------------ */

/* Check that no call has changed the thread's current device or its capture mode,
 * unless a fault prevented the call from restoring them. Now and then go on with the
 * other device. */
static void
check_thread(void)
{
    uint64_t context = 0;
    int mode = 0;
    MUST(cm_rt_context_get(world.inner, &context));
    MUST(cm_rt_capture_mode_exchange(world.inner, &mode));
    if (!injected && (context != (uint64_t)device + 1 || mode != 0)) {
        model_fail(&world.model, "the thread's device was changed", context,
                   (uint64_t)device + 1);
    }
    device = dice(64) == 0 ? (int)dice(2) : device;
    MUST(cm_rt_device_set(world.inner, device));
}

/* Compare pools and models. Pools that the operation did not use are compared only
 * every 16th time. */
static void
compare(void)
{
    bool all = operation_count % 16 == 0;
    for (int i = 0; i < MODEL_POOLS; i++) {
        model_pool *of = &world.model.pools[i];
        if (of->pool != NULL && (all || of == touched)) {
            model_compare(&world.model, of);
        }
    }
    if (all) {
        model_compare_all(&world.model);
    }
}

static void
step(void)
{
    random_step();
    injected = false;
    touched = NULL;
    uint64_t r = dice(1000);
    if (r < 300) {
        op_alloc();
    }
    else if (r < 590) {
        op_free();
    }
    else if (r < 760) {
        op_use();
    }
    else if (r < 840) {
        op_gate(r < 820);
    }
    else if (r < 880) {
        MUST(cm_stream_follow(random_any_stream(), random_any_stream()));
    }
    else if (r < 895) {
        random_wait();
    }
    else if (r < 910) {
        op_stream();
    }
    else if (r < 920) {
        op_trim();
    }
    else if (r < 935) {
        op_limit();
    }
    else if (r < 970) {
        op_read();
    }
    else if (r < 975) {
        op_close();
    }
    else if (r < 990) {
        op_relay();
    }
    compare();
    check_thread();
    operation_count++;
}

/* Make some operations with one seed. The program ends at the first mistake. */
static void
run_seed(uint64_t seed)
{
    uint64_t n = 0;
    random_open(seed, true);
    device = 0;
    for (int i = 0; i < MODEL_POOLS; i++) {
        random_make_pool(i);
    }
    for (; n < seed_operations && random_wrong() == NULL; n++) {
        step();
    }
    for (uint32_t i = 0; i < RANDOM_BLOCKS && random_wrong() == NULL; i++) {
        if (world.blocks[i].block != NULL) {
            free_block(i);
        }
    }
    ordered_count += world.oracle.ordered_count;
    if (random_wrong() == NULL) {
        random_close();
    }
    if (random_wrong() != NULL) {
        fprintf(stderr, "seed %llu, operation %llu: %s\n", (unsigned long long)seed,
                (unsigned long long)n, random_wrong());
        exit(1); /* after a mistake, closing everything could hang */
    }
    seed_count++;
}

int
main(int argc, char **argv)
{
    seconds = argc > 1 ? atof(argv[1]) : seconds;
    first_seed = argc > 2 ? strtoull(argv[2], NULL, 10) : first_seed;
    seed_operations = argc > 3 ? strtoull(argv[3], NULL, 10) : seed_operations;
    uint64_t begin_ns = cm_now_ns();
    for (uint64_t seed = first_seed; (double)(cm_now_ns() - begin_ns) < seconds * 1e9;
         seed++) {
        run_seed(seed);
    }
    printf("%llu operations, %llu seeds: %llu refused, %llu injected by faults, %llu "
           "times "
           "memory handed out in order behind work on it\n",
           (unsigned long long)operation_count, (unsigned long long)seed_count,
           (unsigned long long)refused_count, (unsigned long long)injected_count,
           (unsigned long long)ordered_count);
    return seed_count > 0 ? 0 : 1;
}
