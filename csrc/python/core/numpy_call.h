/* SPDX-License-Identifier: Apache-2.0 */
/* Tells one call of a function of NumPy's from another, by where it is on the C stack.
 *
 * The question
 * ------------
 * numpy.array(buf) asks a buffer for a view, copies the bytes and gives the view back.
 * The memory never left us then, and need not wait for what the GPUs are doing. But
 * cupy.asarray(buf) looks just the same to Python: its compiled code asks NumPy for an
 * array over the view, starts a copy to the GPU that nobody waits for, and drops the
 * array, all within one call. So does `list(map(upload, map(numpy.asarray, bufs)))`,
 * whose functions run within one call of list().
 *
 * The answer
 * ----------
 * Only the C stack tells the two cases apart. When the view is asked for, the functions
 * between NumPy's code and ours are Python's, which only pass the question on: it is
 * NumPy that asks. Several functions of NumPy's may be on the stack, each called by the
 * one before. We remember the outermost, which is numpy.array() itself, by the address
 * of its frame. If the view comes back while that frame is still on the stack,
 * numpy.array() has not returned, and nobody but NumPy can have had the memory; and
 * NumPy has no work on any GPU. In CuPy's case the frame is gone when the view comes
 * back.
 *
 *   numpy.array(buf)                    cupy.asarray(buf)
 *
 *   numpy.array()  <- remembered        cupy's code
 *     Python: get a buffer                numpy.asarray()  <- remembered
 *       ours: the view is asked for         Python: get a buffer
 *     memcpy                                  ours: the view is asked for
 *     Python: release the buffer          (numpy.asarray() has returned)
 *       ours: its frame is there          start a copy, drop the array
 *                                           ours: its frame is gone
 *
 * A frame of a later call may lie at the same address. So the frame that is found must
 * also be of the same function as the one that was remembered, and be found at the same
 * moment (cm_moment): at the same instruction of the same Python code, with no garbage
 * collection in between. */
#pragma once

#include "python/core/recording.h"

typedef struct cm_numpy_call {
    /* The frame of NumPy's outermost function, or 0 if it was not NumPy that asked. */
    uintptr_t frame;
    uintptr_t function; /* the first instruction of that function */
    cm_moment moment;
} cm_numpy_call;

/* Return the call of NumPy's that this code runs in. Needs the GIL, keeps the exception
 * and runs no Python code. */
cm_numpy_call cm_numpy_call_now(void);
/* True if that call has certainly not returned yet. Needs the GIL. */
bool cm_numpy_call_lasts(const cm_numpy_call *call);
