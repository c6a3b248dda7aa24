/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a file in the background, and may then put it in the place of another one.
 *
 * A call that waits for its file borrows everything from its caller, and leaves it to
 * the caller to name the file. A transfer in the background outlives its call. So it
 * has copies of the request, of the ranges and of their regions, and a descriptor of
 * its own, and the thread that has written the last byte gives the file its name.
 *
 * Example: a checkpoint is written to a temporary file beside the one of last time. The
 * job thread that has written all pieces gives the file its permissions, flushes it to
 * the disk, renames it, and flushes the folder. Only then is the ticket done. If
 * anything fails before the temporary file is renamed, it is removed before the ticket
 * is done, so nobody who has waited for the ticket finds a temporary file. A process
 * that is killed leaves the temporary file behind, and the old file as it was.
 *
 * Locks: none. The thread that runs the job is the only one that uses this. */
#pragma once

#include "transfer/file/job.h"

typedef struct cm_file_save {
    cm_file_request request;
    cm_file_range *ranges; /* owned */
    cm_region *regions;    /* owned: those that the ranges refer to */
    int fd;                /* owned */
    uint32_t mode;
    char *temporary; /* owned; NULL if the file is left as it is, or has been renamed */
    char *target;    /* owned; NULL if `temporary` was NULL from the beginning */
} cm_file_save;

/* Copy everything that the request borrows, and take over the temporary file of
 * `place`, which may be NULL. After a failure the temporary file is still there.
 * Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_file_save_create(const cm_file_request *request,
                                           const cm_file_place *place,
                                           cm_file_save **out);
/* Free `save`, and remove the temporary file if that has not been renamed. */
void cm_file_save_destroy(cm_file_save *save);
/* Give the file its permissions and its name once all bytes are written. Blocks until
 * both are on the disk.
 * Fails: CM_ESYSTEM. */
CM_NODISCARD cm_status cm_file_save_place(cm_file_save *save);
