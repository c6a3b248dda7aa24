/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel that copies rows by their numbers, which it reads when the stream gets
 * there:
 *
 *     dst[dst_rows[i]] = src[src_rows[i]]    for each i and for each layer
 *
 * A layer is a pair of arrays whose rows lie at a fixed distance. All layers of a call
 * share the numbers. A row whose bytes do not lie together is passed as several layers,
 * one for each run of bytes that it consists of.
 *
 * The device has to reach everything that a call names: device memory, page-locked
 * memory that is mapped (by its device addresses), managed memory, and memory of
 * another device that lets it in. What a launch needs is in its parameter, so that
 * nothing but the memory itself has to outlive the call or the graph that captured it.
 * Neither the call nor the kernel waits for anything.
 * Locks: none. */
#pragma once

#include "transfer/device/kernel.h"

/* An array of whole numbers that the device reads. */
typedef struct cm_row_numbers {
    cm_address address; /* of number 0, aligned to `nbytes`; 0 if the numbers are
                           0, 1, … */
    int64_t stride;     /* bytes from one number to the next; may be negative or 0 */
    uint32_t nbytes;    /* of one number: 1, 2, 4 or 8 */
    bool is_signed;     /* negative numbers count from the end */
} cm_row_numbers;

/* A pair of arrays. Members that come in pairs are indexed by cm_side. */
typedef struct cm_rows_layer {
    cm_address address[2]; /* of row 0 */
    int64_t stride[2];     /* bytes from one row to the next; may be negative or 0 */
    uint64_t row_count[2]; /* how many rows the array has, from 0 on */
    uint64_t row_nbytes;
} cm_rows_layer;

/* What all layers of a call share. */
typedef struct cm_rows_move {
    uint64_t count;            /* how many rows of each layer are copied */
    cm_row_numbers numbers[2]; /* indexed by cm_side */
    /* Row i of the source lies at place i, and its number is only checked. This is for
     * the second of two calls, where the first has gathered the rows of the source into
     * memory between the ends: both calls leave out rows with a wrong number. */
    bool is_packed;
    /* The bytes pass a bus. A few blocks are enough to fill it, so by default the
     * kernel leaves the other multiprocessors to the work beside it. */
    bool is_over_bus;
    /* The target is memory of the host, which even fewer blocks fill. */
    bool is_to_host;
    /* The numbers are read over the bus as well, and wait there behind the bytes that
     * are under way. */
    bool has_far_numbers;
    uint32_t max_sms; /* how many multiprocessors the kernel may use; 0 for as many as
                         it can use */
    /* The device address of a 32-bit word, into which the kernel stores CM_ROWS_WRONG_…
     * if a number is wrong, visibly to the host as well. The kernel stores nothing else
     * there, so whoever has read the word clears it. If the address is 0, wrong numbers
     * are not reported. */
    cm_address flag;
} cm_rows_move;

/* Queue the copy on `stream` of `device`, which is current. One launch takes up to
 * CM_ROWS_MAX_LAYERS neighbouring layers of the same strides, counts, row length and
 * alignment, so layers of the same shape should stand next to each other.
 *
 * Layers must not write what another one reads or writes. If two numbers name the same
 * row of the target, the bytes of that row may come from either source.
 * Fails: as cm_kernels_find(); device_attribute; kernel_launch; CM_EOVERFLOW (rows of
 * more than 64 GiB, or more rows than INT64_MAX). Layers before the failure may be
 * queued. */
CM_NODISCARD cm_status cm_rows_launch(cm_kernels *kernels, int device,
                                      const cm_rows_move *move,
                                      const cm_rows_layer *layers, uint64_t layer_count,
                                      uint64_t stream);

/* Describe one layer to the kernel: its geometry, the unit and the team, but neither
 * the step nor the addresses of rows. This is pure.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_rows_job_init(cm_rows_job *job, const cm_rows_move *move,
                                        const cm_rows_layer *layer);
/* Return how many blocks keep the bus busy. A copy over the bus takes no more than
 * these, unless its caller has set max_sms. This is pure. */
uint32_t cm_rows_count_bus_blocks(const cm_rows_job *job, const cm_rows_move *move);
