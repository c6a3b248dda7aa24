/* SPDX-License-Identifier: Apache-2.0 */
/* One call of a function of NumPy's, told by where it stands on the C stack.
 *
 * numpy.array(buf) asks a buffer for a view, copies the bytes and gives the view back.
 * The memory never left us then, and need not wait for what the GPUs are doing. But
 * cupy.asarray(buf) looks just the same to Python: its compiled code asks NumPy for an
 * array over the view, starts a copy to the GPU that nobody waits for, and lets go of
 * the array, all within one call. So does `list(map(upload, map(numpy.asarray,
 * bufs)))`, whose functions run within one call of list().
 *
 * Only the C stack tells them apart. When the view is asked for, the functions between
 * NumPy's code and ours are Python's, which only passes the question on: NumPy is the
 * one that asks. Of NumPy's functions that called each other we remember the outermost,
 * which is numpy.array() itself, by the address of its frame. If the view comes back
 * while that frame is still on the stack, then numpy.array() has not returned, and
 * nobody but NumPy can have had the memory; NumPy has no work on any GPU. In CuPy's
 * case the frame is gone when the view comes back.
 *
 * A frame of a later call may lie at the same address. Therefore the two must be of one
 * function and at one moment (cm_moment), so of the same instruction of the same Python
 * code with no collection of garbage in between. */
#pragma once

#include "python/core/recording.h"

typedef struct cm_numpy_call {
    uintptr_t frame;    /* of NumPy's outermost function; 0: NumPy has not asked */
    uintptr_t function; /* its first instruction */
    cm_moment moment;
} cm_numpy_call;

/* The call of NumPy's that this code was called by. GIL; keeps the exception, runs no
 * Python code. */
cm_numpy_call cm_numpy_call_now(void);
/* Has it not returned yet? False where that is not certain. GIL. */
bool cm_numpy_call_lasts(const cm_numpy_call *call);
