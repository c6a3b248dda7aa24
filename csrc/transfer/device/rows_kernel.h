/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel that copies rows by their numbers. It reads the numbers only when the
 * stream has come to the kernel, and copies:
 *
 *     dst[dst_rows[i]] = src[src_rows[i]]    for each i and for each layer
 *
 * A layer is a pair of arrays. In each of the two arrays the distance from one row to
 * the next is always the same. All layers of a call share the numbers. If the bytes of
 * a row do not lie together, the pair of arrays is passed as several layers, one for
 * each run of bytes that a row consists of.
 *
 * The device has to reach all memory that a call names. This may be device memory,
 * page-locked memory that is mapped (by its device addresses), managed memory, or
 * memory of another device that lets this device in. Everything else that a launch
 * needs is in its parameter. So the caller has to keep only the memory itself alive
 * until the kernel has ended or, if a graph has captured the launch, as long as the
 * graph may run. Neither the call nor the kernel waits for anything.
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
    /* Row i of the source lies at place i, and its number is only checked. This is set
     * in the second of two calls, after the first call has gathered the rows of the
     * source into memory between the ends. The second call checks the numbers again,
     * since it has to leave out each row that the first call has left out because of a
     * wrong number. */
    bool is_packed;
    /* The bytes pass a bus. A few blocks of threads are enough to keep the bus busy, so
     * by default the kernel leaves the other multiprocessors to other work. */
    bool is_over_bus;
    /* The target is memory of the host. On the way to the host even fewer blocks are
     * enough to keep the bus busy. */
    bool is_to_host;
    /* The numbers are read over the same bus as the rows. So a number has to wait until
     * the bytes of rows that are already on the bus have passed. */
    bool has_far_numbers;
    uint32_t max_sms; /* how many multiprocessors the kernel may use; 0 for as many as
                         it can use */
    /* The device address of a 32-bit word. If a number is wrong, the kernel stores
     * CM_ROWS_WRONG_… in the word, so that the host can see it, too. The kernel never
     * clears the word, so whoever has read it has to do that. If the address is 0,
     * wrong numbers are not reported. */
    cm_address flag;
} cm_rows_move;

/* Queue the copy on `stream` of `device`, which is current. One launch takes up to
 * CM_ROWS_MAX_LAYERS neighbouring layers of the same strides, counts, row length and
 * alignment, so layers of the same shape should stand next to each other.
 *
 * A layer must not write memory that another layer reads or writes. If two numbers name
 * the same row of the target, the bytes of that row may come from either source.
 * Fails: as cm_kernels_find(); device_attribute; kernel_launch; CM_EOVERFLOW (rows of
 * more than 64 GiB, or more rows than INT64_MAX). Layers before the failure may be
 * queued. */
CM_NODISCARD cm_status cm_rows_launch(cm_kernels *kernels, int device,
                                      const cm_rows_move *move,
                                      const cm_rows_layer *layers, uint64_t layer_count,
                                      uint64_t stream);

/* Fill in `job`, the parameter of the kernel, for one layer. runtime/kernel_jobs.h
 * tells what its members mean. This sets the sizes and distances of rows, the unit in
 * which they are copied, and the team of threads that copies a row. It sets neither the
 * step of the warps nor the addresses of the rows. This is pure.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_rows_job_init(cm_rows_job *job, const cm_rows_move *move,
                                        const cm_rows_layer *layer);
/* Return how many blocks keep the bus busy. A copy over the bus takes no more than
 * these, unless its caller has set max_sms. This is pure. */
uint32_t cm_rows_count_bus_blocks(const cm_rows_job *job, const cm_rows_move *move);
