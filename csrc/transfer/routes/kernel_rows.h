/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the jobs that copy rows whose numbers a kernel reads. Such a job has
 * a cm_kernel_rows in place of two regions, and goes by the route ROWS. The kernel of
 * rows_kernel.h reads the numbers when the stream gets to the copy. So neither the call
 * nor a job thread waits for numbers that a device computes, and a graph can hold the
 * copy.
 *
 * Numbers that the host has are checked before there is a job. If the numbers are in
 * memory of a device, only the kernel can find out that one of them names no row. The
 * kernel moves nothing for such a number, and notes the fault in a word of page-locked
 * memory. The ticket reads the word when the copy is done, and fails with CM_EROWS. A
 * copy in a graph has no such word, since its ticket is done before the graph runs. A
 * RowPlan, which copies by the same numbers many times, has a further word for all of
 * its copies. If such a copy is in a graph, its kernel notes faults in the word of the
 * plan. Every other copy of the plan has a word of its own, and its ticket adds what
 * that word says to the word of the plan. Whoever owns the plan reads the word of the
 * plan.
 * Locks: none; these functions belong to the thread that runs the job. */
#pragma once

#include "transfer/device/rows_kernel.h"
#include "transfer/engine/job.h"

/* Host memory at an end, which has to stay page-locked until the copy is done. */
typedef struct cm_locked_span {
    const char *begin;
    uint64_t nbytes;
} cm_locked_span;

/* The rows that one job copies. A struct of zeros has no rows. A layer is a pair of
 * arrays (rows_kernel.h), and all layers have the same row numbers. */
typedef struct cm_kernel_rows {
    int device; /* the device whose kernel copies */
    cm_rows_move move;
    /* Set if layers have to be copied one after the other, since one of them may write
     * what another one reads or writes. */
    bool in_order;
    cm_rows_layer *layers; /* owned */
    uint64_t layer_count;
    uint64_t layer_room;
    cm_locked_span *spans; /* owned */
    uint64_t span_count;
    uint64_t span_room;
    uint64_t nbytes; /* the bytes of all rows together */
    /* The address by which `device` reaches page-locked memory into which the host has
     * written numbers. If there is no such memory, `sheet_nbytes` is 0. */
    cm_address sheet;
    uint64_t sheet_nbytes;
    /* The address at which the host reads the word that move.flag refers to, or NULL if
     * there is no such word. The word is borrowed, and one of the keeps of the request
     * (cm_keep) keeps it alive. */
    const uint32_t *flag;
    uint32_t flag_bits; /* these are added to the argument of CM_EROWS */
    /* The word of a RowPlan, to which the ticket adds what it has found in `flag`, or
     * NULL if there is none. A keep of the request keeps this word alive, too. */
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

/* True if a kernel of `device` can use all memory of `region` in the order of the
 * device's streams. If `region` is on another device, the driver is asked whether that
 * memory can be reached from `beside`, which is memory of `device`. If `beside` is
 * NULL, memory of another device counts as out of reach. The call uses the runtime only
 * to ask the driver. */
bool cm_kernel_reaches(cm_engine *engine, int device, const cm_region *region,
                       const cm_region *beside);
/* Try to load the kernel on `device`. Returns false if the driver lacks the compiler
 * for it. Returns true even if the kernel cannot be loaded for another reason, since
 * the copy will then fail and report that reason. */
bool cm_kernel_rows_can_load(cm_engine *engine, int device);
/* True if the kernel has been loaded on `device`. Makes no call of the runtime. */
static inline bool
cm_kernel_rows_are_loaded(const cm_engine *engine, int device)
{
    return cm_kernels_have(&engine->kernels, CM_KERNEL_ROWS, device);
}
