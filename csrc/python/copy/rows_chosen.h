/* SPDX-License-Identifier: Apache-2.0 */
/* Row numbers as arguments: lists, ranges, arrays and buffers of integers, which are
 * copied, so that the caller may change them once the call has returned. The GIL is
 * held, and released for as long as unfinished work is still writing the numbers. */
#pragma once

#include "python/core/state.h"
#include "transfer/rows/chosen_rows.h"

/* Read the argument `name`, which is not None. cm_chosen_rows_fini() may be called in
 * any case. Returns 0; or -1 with TypeError (these are no integers, or they are memory
 * that the host may not touch), ValueError (they do not have exactly one dimension),
 * IndexError (an int that no array has as a row), or the failure of a transfer that was
 * to write them. */
int cm_chosen_rows_from(cm_state *state, PyObject *object, const char *name,
                        cm_chosen_rows *out);
