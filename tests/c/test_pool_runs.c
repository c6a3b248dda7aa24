/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the counters and the listing of a pool's free memory. Both count free
 * neighbours that could join as one piece, whether or not they have been joined
 * already. */
#include "pool_world.h"

/* Check that the counters and the listing both show `nbytes` of free memory in one
 * piece. */
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

/* Many small blocks, which were used on three streams or on none, are given back. When
 * all work on them has ended, the pool must show them as one free piece, even where
 * some spans are still kept apart for the next request of their size. */
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
        /* In the pool of device memory every other block was used on a stream, whose
         * work has ended. */
        for (int i = 0; i < BLOCKS; i++) {
            give(pool, blocks[i], k == 1 && i % 2 ? streams[i % 3] : NULL, 0);
        }
        uint64_t released = 0;
        /* The trim keeps everything, but it makes the pool see that the work has
         * ended. */
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

/* Two blocks are given back while work on two streams may still run on them. They must
 * not count as part of the free memory beside them until that work has ended. Then
 * everything must be one piece. */
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
