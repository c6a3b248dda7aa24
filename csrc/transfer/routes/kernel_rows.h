/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the jobs that copy rows whose numbers a kernel reads. Such a job has
 * a cm_kernel_rows in place of two regions, and goes by the route ROWS. The kernel of
 * rows_kernel.h reads the numbers when the stream gets there. So neither the call nor a
 * job thread waits for numbers that a device computes, and a graph can hold the copy.
 *
 * Numbers that the host has are checked before there is a job. Among numbers in memory
 * of a device, only the kernel can find one that names no row. The kernel moves nothing
 * for such a number, and notes the fault in a word of page-locked memory. The ticket
 * reads the word when the copy is done, and fails with CM_EROWS. A copy in a graph has
 * no such word, since its ticket is done before the graph runs. A RowPlan, which copies
 * by the same numbers many times, has a further word for all of its copies. In a graph
 * the kernel writes into this word of the plan, and the ticket of every other copy of
 * the plan adds to it what it has found. Whoever owns the plan reads the word.
 * Locks: none; these functions belong to the thread that runs the job. */
#pragma once

#include "transfer/device/rows_kernel.h"
#include "transfer/engine/job.h"

/* Host memory at an end, which has to stay page-locked until the copy is done. */
typedef struct cm_locked_span {
    const char *begin;
    uint64_t nbytes;
} cm_locked_span;

/* All that is copied. A struct of zeros is empty. */
typedef struct cm_kernel_rows {
    int device; /* the device whose kernel copies */
    cm_rows_move move;
    /* Layers are copied one after the other, since one may write what another one
     * touches. */
    bool in_order;
    cm_rows_layer *layers; /* owned */
    uint64_t layer_count;
    uint64_t layer_room;
    cm_locked_span *spans; /* owned */
    uint64_t span_count;
    uint64_t span_room;
    uint64_t nbytes; /* the bytes of all rows together */
    /* Page-locked memory in which the host has written numbers, by the address that
     * `device` uses; `sheet_nbytes` is 0 if there is none. */
    cm_address sheet;
    uint64_t sheet_nbytes;
    /* Where the host reads the word of move.flag, or NULL if there is none. The word is
     * borrowed, and a keep of the request keeps it alive. */
    const uint32_t *flag;
    uint32_t flag_bits; /* these are added to the argument of CM_EROWS */
    /* A word to which the ticket adds what it has found in `flag`; a keep of the
     * request keeps this word alive, too. NULL if there is none. */
    _Atomic uint32_t *flag_of_all;
} cm_kernel_rows;

/* Free the rows, which cm_kernel_rows_create() has made. Does nothing with NULL. */
void cm_kernel_rows_destroy(cm_kernel_rows *rows);
/* Make empty rows. Returns NULL if there is no memory. */
cm_kernel_rows *cm_kernel_rows_create(void);
/* Add a layer, or a page-locked span of host memory.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_kernel_rows_add_layer(cm_kernel_rows *rows,
                                                const cm_rows_layer *layer);
CM_NODISCARD cm_status cm_kernel_rows_add_span(cm_kernel_rows *rows, const char *begin,
                                               uint64_t nbytes);

/* True if a kernel of `device` can use all of the memory, in the order of its streams.
 * `beside` is memory of that device, by which the driver is asked about memory of
 * another one. If it is NULL, such memory counts as out of reach. Makes calls of the
 * runtime only if it asks the driver. */
bool cm_kernel_reaches(cm_engine *engine, int device, const cm_region *region,
                       const cm_region *beside);
/* False if the driver lacks the compiler for the kernel. Otherwise the call has tried
 * to load the kernel there. If that has failed for another reason, the copy will fail
 * for the same reason. */
bool cm_kernel_rows_can_load(cm_engine *engine, int device);
/* True if the kernel has been loaded there. Makes no call of the runtime. */
static inline bool
cm_kernel_rows_are_loaded(const cm_engine *engine, int device)
{
    return cm_kernels_have(&engine->kernels, CM_KERNEL_ROWS, device);
}
