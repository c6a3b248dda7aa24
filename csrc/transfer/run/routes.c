/* SPDX-License-Identifier: Apache-2.0 */
/* One row for each way that a copy can go. */
#include "transfer/routes/routes.h"

#include "transfer/file/job.h"
#include "transfer/routes/pieces.h"

const cm_route_row cm_routes[CM_ROUTE_COUNT] = {
    [CM_ROUTE_NOTHING] = {.text = "nothing"},
    [CM_ROUTE_HOST] = {.text = "host", .uses_host = true, .move = cm_job_run_on_host},
    [CM_ROUTE_DIRECT] = {.text = "direct",
                         .fits_graph = true,
                         .move = cm_job_copy_direct},
    [CM_ROUTE_DIRECT_2D] = {.text = "direct-2d",
                            .fits_graph = true,
                            .move = cm_job_copy_2d},
    [CM_ROUTE_PEER] = {.text = "peer",
                       .crosses = true,
                       .fits_graph = true,
                       .move = cm_job_copy_peer},
    /* in a graph the runtime's own way is taken */
    [CM_ROUTE_PEER_STAGED] = {.text = "peer-staged",
                              .uses_ring = true,
                              .crosses = true,
                              .fits_graph = true,
                              .move = cm_job_copy_peer},
    [CM_ROUTE_KERNEL] = {.text = "kernel",
                         .fits_graph = true,
                         .move = cm_job_copy_by_kernel},
    [CM_ROUTE_STAGED] = {.text = "staged",
                         .uses_host = true,
                         .uses_ring = true,
                         .packs = true,
                         .move = cm_job_copy_staged},
    [CM_ROUTE_STAGED_KERNEL] = {.text = "staged-kernel",
                                .uses_host = true,
                                .uses_ring = true,
                                .packs = true,
                                .move = cm_job_copy_staged},
    [CM_ROUTE_FILL] = {.text = "fill", .fits_graph = true, .move = cm_job_fill},
    [CM_ROUTE_TABLE] = {.text = "table",
                        .fits_graph = true,
                        .move = cm_many_copy_by_table},
    [CM_ROUTE_BATCH] = {.text = "batch",
                        .needs_stream = true,
                        .move = cm_many_copy_in_batches},
    [CM_ROUTE_STAGED_TABLE] = {.text = "staged-table",
                               .uses_host = true,
                               .uses_ring = true,
                               .move = cm_job_copy_staged},
    [CM_ROUTE_SEVERAL] = {.text = "several"}, /* its parts are waited for */
    [CM_ROUTE_FILE] = {.text = "file",
                       .uses_host = true,
                       .uses_ring = true,
                       .move = cm_job_copy_file},
};
