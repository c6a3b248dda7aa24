/* SPDX-License-Identifier: Apache-2.0 */
/* Moves the bytes of a pool that goes to sleep or wakes (sleeping.c): to page-locked
 * memory or to files, and back.
 *
 * Page-locked memory
 * ------------------
 * Page-locking memory takes longer than copying to it, and a copy of the device needs
 * no thread. So the bytes go part by part. While the device copies one part, the thread
 * page-locks the memory of the next one, and unmaps the chunks of the part before.
 *
 * Example: the first sleep of 600 MiB, in parts of 256, 256 and 88 MiB.
 *
 *   the thread   lock 0   lock 1   unmap 0   lock 2   unmap 1   wait   unmap 2, release
 *   the device            copy 0             copy 1             copy 2
 *
 * On the way back the thread maps the chunks of one part while the device fills those
 * of the part before.
 *
 * Files
 * -----
 * The caller has opened the files, which have no names, so that nothing is left of them
 * when the process ends, however it ends. The bytes go through the ring of page-locked
 * slots that all files use (transfer/file/). One thread at a time can write to a file,
 * so the parts of the saved bytes are shared out among several files: part p lies in
 * file p % count, behind the parts of that file before it.
 *
 * A sleep ends with the process, and the page cache holds the bytes until then, so
 * nothing waits for the disk. The page cache is the system's memory, which the system
 * can use for something else once it has written the bytes to the disk.
 *
 * Locks: none. All of this is called without the GIL, by the one thread that puts the
 * pool to sleep or wakes it. */
#pragma once

#include "python/core/state.h"
#include "transfer/file/file.h"

/* The files that have the bytes, or are to get them. */
typedef struct cm_sleep_files {
    int fds[CM_FILE_MAX]; /* borrowed */
    uint32_t count;       /* 0 if the bytes go to page-locked memory */
    cm_file_failure failure;
} cm_sleep_files;

/* Copy all saved runs to page-locked memory, and return when they are copied. Even if
 * the call is interrupted or fails, nothing is under way when it returns. Chunks may be
 * unmapped then, which cm_pool_map_back() undoes.
 * Fails: as cm_pool_take_part(), cm_engine_copy_many() and cm_pool_unmap_until();
 *        stream_create. */
CM_NODISCARD cm_status cm_sleep_save(cm_state *state, cm_engine *engine, cm_pool *pool,
                                     const cm_wait_hooks *hooks);
/* Map all chunks of a pool, between cm_pool_begin_waking() and cm_pool_end_waking(),
 * and copy the saved runs to them in the same way. */
CM_NODISCARD cm_status cm_sleep_restore(cm_state *state, cm_engine *engine,
                                        cm_pool *pool, const cm_wait_hooks *hooks);
/* Write all saved runs to the files, or read them. Even if the call is interrupted or
 * fails, nothing is under way when it returns.
 * Fails: as cm_engine_transfer_file(), with files->failure set if a file is at fault;
 *        stream_create. */
CM_NODISCARD cm_status cm_sleep_transfer_files(cm_state *state, cm_engine *engine,
                                               cm_pool *pool, cm_sleep_files *files,
                                               bool writes, const cm_wait_hooks *hooks);
