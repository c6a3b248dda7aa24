/* SPDX-License-Identifier: Apache-2.0 */
/* A stress of the pool: four threads make random operations on shared pools and
 * streams, in rounds. For each block that is handed out the oracle says whose work may
 * still run there (order_oracle.h). Between the rounds, while no thread runs, the
 * counters are compared with the model (pool_model.h), and streams are made and
 * dropped. Arguments: seconds (4), first seed (1), rounds of a seed (8). */
#include <stdlib.h>
#include <string.h>

#include "pool_random.h"
#include "pool_world.h"

enum { THREADS = 4, OWN_BLOCKS = RANDOM_BLOCKS / THREADS, ROUND_OPERATIONS = 120 };

static double seconds = 4;
static uint64_t first_seed = 1;
static uint64_t seed_rounds = 8;
static uint64_t seed_count, ordered_count;
static _Atomic uint64_t operation_count, refused_count;
static atomic_int running;

typedef struct worker {
    cm_thread thread;
    uint32_t index;
    uint64_t seed;
} worker;

/* Return a stream that threads can share. The handle of the per-thread stream means
 * another stream on each thread, so neither model can know it. */
static cm_stream *
shared_stream(int device)
{
    for (;;) {
        cm_stream *stream = random_stream_for(device);
        if (stream->handle != CM_STREAM_PER_THREAD) {
            return stream;
        }
    }
}

/* Allocate a block for this place, and perhaps use it. */
static void
take_one(uint32_t place)
{
    model_pool *of = random_pool();
    uint64_t nbytes = random_size();
    cm_stream *stream = dice(5) == 0 ? NULL : shared_stream(of->config.device);
    cm_block *block = NULL;
    if (dice(4) == 0) {
        block = cm_pool_try_alloc(of->pool, nbytes, stream, 0);
    }
    else if (!cm_is_ok(pool_alloc(of->pool, nbytes, stream, &block))) {
        /* A limit or an injected fault made it fail. */
        atomic_fetch_add(&refused_count, 1);
        block = NULL;
    }
    if (block != NULL) {
        model_take(&world.model, of, place, block, nbytes, stream);
        if (stream != NULL && dice(2) == 0) {
            random_use(&world.blocks[place], stream);
        }
        else if (dice(2) == 0) {
            random_use_more(&world.blocks[place]);
        }
    }
}

/* Give the block of this place back. With a fence only some of its streams are named,
 * and the fence has to cover the others. */
static void
give_one(uint32_t place)
{
    model_block b = model_give(&world.model, place);
    cm_pool *pool = b.of->pool;
    bool fence = b.use_count > 0 && dice(8) == 0;
    uint32_t announced = fence ? (uint32_t)dice(b.use_count) : b.use_count;
    bool given = false;
    if (!fence && dice(2) == 0) {
        given = cm_pool_quick_free(pool, b.block, b.uses, b.use_count);
    }
    if (!given) {
        cm_pool_free(pool, b.block, b.uses, announced, fence ? CM_POOL_FREE_FENCE : 0);
    }
    for (uint32_t i = 0; i < b.use_count; i++) {
        cm_stream_release(b.uses[i]);
    }
}

/* Trim a pool, change a limit, plan a fault, read or check a pool, or move a gate. */
static void
disturb(void)
{
    model_pool *of = random_pool();
    uint64_t released = 0;
    switch (dice(8)) {
    case 0: {
        cm_status ignored =
            pool_trim(of->pool, dice(2) * dice(8 * MIB), dice(2) == 0, &released);
        (void)ignored; /* an injected fault may have made it fail */
        break;
    }
    case 1:
        atomic_store(&world.model.kinds[dice(MODEL_KINDS)].limit_nbytes,
                     (2 + dice(24)) * MIB);
        break;
    case 2:
        random_plan_fault(true);
        break;
    case 3:
        (void)read_counters(of->pool);
        break;
    case 4:
        if (!cm_pool_check(of->pool)) {
            CHECK_FAIL_("the pool's invariants do not hold");
        }
        break;
    default:
        oracle_gate(&world.oracle, model_line(&world.model, shared_stream(0)),
                    dice(2) == 0);
    }
}

/* Make one random operation on this place. */
static void
step(uint32_t place)
{
    random_step();
    model_block *b = &world.blocks[place];
    uint64_t r = dice(100);
    if (r < 12) {
        disturb();
    }
    else if (r < 15) {
        random_wait();
    }
    else if (b->block == NULL) {
        take_one(place);
    }
    else if (r < 55) {
        give_one(place);
    }
    else {
        random_use_more(b);
    }
    atomic_fetch_add(&operation_count, 1);
}

/* The body of a thread: one round of operations, all on places that only this thread
 * uses. */
static void *
run_round(void *arg)
{
    const worker *self = arg;
    MUST(cm_rt_device_set(world.inner, (int)self->index % 2));
    random_seed(self->seed);
    for (int i = 0; i < ROUND_OPERATIONS && random_wrong() == NULL; i++) {
        step(self->index * OWN_BLOCKS + (uint32_t)dice(OWN_BLOCKS));
    }
    atomic_fetch_sub(&running, 1);
    return NULL;
}

/* Wait until all threads have ended their round. A thread may wait behind a shut gate,
 * and others for that thread, so the gates are opened again and again. */
static void
join_round(const worker *workers)
{
    while (atomic_load(&running) > 0) {
        struct timespec nap = {0, 1000 * 1000};
        (void)nanosleep(&nap, NULL);
        oracle_open_gates(&world.oracle);
    }
    for (int i = 0; i < THREADS; i++) {
        cm_thread_join(workers[i].thread);
    }
    oracle_drain(&world.oracle);
}

/* Compare pools and model while no thread uses a pool. The model takes two figures over
 * from the pool, since it cannot know them: how often the pool refused, and its peaks,
 * which another thread may change between a call and the moment when the model learns
 * of it. */
static void
compare_round(void)
{
    for (int i = 0; i < MODEL_POOLS; i++) {
        model_pool *of = &world.model.pools[i];
        cm_pool_counters c = read_counters(of->pool);
        if (c.peak_live_nbytes < of->peak_live_nbytes
            || c.peak_requested_nbytes < of->peak_requested_nbytes
            || c.peak_waste_nbytes < of->peak_waste_nbytes) {
            model_fail(&world.model, "a peak was missed", c.peak_live_nbytes,
                       of->peak_live_nbytes);
        }
        of->peak_live_nbytes = c.peak_live_nbytes;
        of->peak_requested_nbytes = c.peak_requested_nbytes;
        of->peak_waste_nbytes = c.peak_waste_nbytes;
        of->refused_count = c.out_of_memory_count;
        of->reserved_nbytes = UINT64_MAX; /* the limits were changed during the round */
        memset(world.model.kind_nbytes, 0xff, sizeof(world.model.kind_nbytes));
        model_compare(&world.model, of);
        model_compare_list(&world.model, of);
    }
    model_compare_all(&world.model);
}

/* Make and drop some of the streams. */
static void
change_streams(void)
{
    for (int i = RANDOM_FIXED_STREAMS; i < RANDOM_STREAMS; i++) {
        random_stream *s = &world.streams[i];
        if (dice(3) == 0) {
            if (s->origin == RANDOM_NO_STREAM) {
                random_make_stream(s);
            }
            else {
                random_drop_stream(s);
            }
        }
    }
}

/* Run some rounds with one seed. The program ends at the first mistake. */
static void
run_seed(uint64_t seed)
{
    static worker workers[THREADS];
    random_open(seed, false);
    for (int i = 0; i < MODEL_POOLS; i++) {
        random_make_pool(i);
    }
    for (uint64_t round = 0; round < seed_rounds && random_wrong() == NULL; round++) {
        atomic_store(&running, THREADS);
        for (uint32_t i = 0; i < THREADS; i++) {
            workers[i].index = i;
            workers[i].seed = dice(UINT64_C(1) << 40) + 1;
            MUST(cm_thread_start(&workers[i].thread, run_round, &workers[i]));
        }
        join_round(workers);
        cm_faults_plan(world.rt, CM_OP_none, 0, 0, false);
        compare_round();
        change_streams();
    }
    for (uint32_t i = 0; i < RANDOM_BLOCKS && random_wrong() == NULL; i++) {
        if (world.blocks[i].block != NULL) {
            give_one(i);
        }
    }
    ordered_count += world.oracle.ordered_count;
    if (random_wrong() == NULL) {
        random_close();
    }
    if (random_wrong() != NULL || atomic_load(&check_failures) != 0) {
        fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed,
                random_wrong() != NULL ? random_wrong() : "an invariant does not hold");
        exit(1); /* after a mistake, closing everything could hang */
    }
    seed_count++;
}

int
main(int argc, char **argv)
{
    seconds = argc > 1 ? atof(argv[1]) : seconds;
    first_seed = argc > 2 ? strtoull(argv[2], NULL, 10) : first_seed;
    seed_rounds = argc > 3 ? strtoull(argv[3], NULL, 10) : seed_rounds;
    uint64_t begin_ns = cm_now_ns();
    for (uint64_t seed = first_seed; (double)(cm_now_ns() - begin_ns) < seconds * 1e9;
         seed++) {
        run_seed(seed);
    }
    printf("%llu operations, %llu seeds: %llu refused, %llu times memory handed out in "
           "order behind work on it\n",
           (unsigned long long)atomic_load(&operation_count),
           (unsigned long long)seed_count,
           (unsigned long long)atomic_load(&refused_count),
           (unsigned long long)ordered_count);
    return seed_count > 0 ? 0 : 1;
}
