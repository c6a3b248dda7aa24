/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of what a pool says about its free memory: it shows the runs that joining would
 * leave, whether or not they are joined. */
#include "pool_world.h"

/* Check that the pool shows one free run, as joining would leave it. */
static void
check_one_piece(cm_pool *pool, uint64_t nbytes)
{
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.cached_nbytes, nbytes);
    CHECK_EQ(c.largest_free_nbytes, nbytes);
    CHECK_EQ(c.cached_count, 1);
    cm_block_row *rows = NULL;
    uint64_t count = 0;
    MUST(cm_pool_list(pool, &rows, &count));
    uint64_t longest = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (rows[i].state == CM_BLOCK_CACHED && rows[i].nbytes > longest) {
            longest = rows[i].nbytes;
        }
    }
    free(rows);
    CHECK_EQ(longest, nbytes);
}

static void
test_pool_counts_free_runs_as_if_joined(void)
{
    enum { BLOCKS = 512 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    const cm_pool_config configs[] = {PINNED, DEVICE};
    for (int k = 0; k < 2; k++) {
        cm_pool *pool = open_pool(rt, configs[k]);
        cm_stream *streams[3];
        for (int i = 0; i < 3; i++) {
            streams[i] = open_stream(rt, 0);
        }
        cm_block *blocks[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) {
            blocks[i] = take(pool, 4 * KIB, streams[i % 3]);
        }
        uint64_t reserved = read_counters(pool).reserved_nbytes;
        /* Some are short, some were used on streams, and all are idle. */
        for (int i = 0; i < BLOCKS; i++) {
            give(pool, blocks[i], k == 1 && i % 2 ? streams[i % 3] : NULL, 0);
        }
        uint64_t released = 0;
        /* This sees that they are idle. */
        MUST(pool_trim(pool, UINT64_MAX / 2, true, &released));
        CHECK_EQ(released, 0);
        for (int i = 0; i < 8; i++) {
            blocks[i] = take(pool, (uint64_t)(1 + i) * 4 * KIB, streams[i % 3]);
        }
        for (int i = 0; i < 8; i++) {
            give(pool, blocks[i], NULL, 0);
        }
        CHECK_EQ(read_counters(pool).reserved_nbytes, reserved);
        check_one_piece(pool, reserved);
        cm_pool_release(pool);
        for (int i = 0; i < 3; i++) {
            cm_stream_release(streams[i]);
        }
    }
    close_emulated(rt);
}

static void
test_pool_counts_pending_runs_apart(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *streams[2] = {open_stream(rt, 0), open_stream(rt, 0)};
    cm_block *blocks[2];
    for (int i = 0; i < 2; i++) {
        blocks[i] = take(pool, MIB, streams[i]);
        hold_work(rt, streams[i], blocks[i]);
    }
    for (int i = 0; i < 2; i++) {
        give(pool, blocks[i], streams[i], 0);
    }
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.largest_free_nbytes, c.cached_nbytes - MIB);
    CHECK_EQ(c.cached_count, 2);
    for (int i = 0; i < 2; i++) {
        MUST(cm_emulated_gate_open(rt, streams[i]->handle));
        synchronize(rt, streams[i]);
    }
    uint64_t released = 0;
    MUST(pool_trim(pool, UINT64_MAX / 2, true, &released));
    check_one_piece(pool, c.reserved_nbytes);
    cm_pool_release(pool);
    cm_stream_release(streams[0]);
    cm_stream_release(streams[1]);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_counts_free_runs_as_if_joined)
     RUN(test_pool_counts_pending_runs_apart))
/* clang-format on */
