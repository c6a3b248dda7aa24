/* SPDX-License-Identifier: Apache-2.0 */
/* Row numbers as arguments: lists, ranges, arrays and buffers of integers. Those that
 * the host reaches are copied, so that the caller may change them once the call has
 * returned. Those in memory of a device stay there, and the copy reads them in its own
 * order. The GIL is held, and released for as long as unfinished work is still writing
 * the numbers. */
#pragma once

#include "python/core/state.h"
#include "transfer/rows/chosen_rows.h"

/* Read the argument `name`, which is not None. cm_chosen_rows_fini() may be called in
 * any case. If the memory is that of a device, `out` gets only the count, and
 * *on_device a new reference to a buffer of the numbers, which is ready on `stream`
 * (NULL: on the current stream of its device); else it becomes NULL. Returns 0; or -1
 * with TypeError (these are no integers), ValueError (they do not have exactly one
 * dimension), IndexError (an int that no array has as a row), or the failure of a
 * transfer that was to write them. */
int cm_chosen_rows_from(cm_state *state, PyObject *object, const char *name,
                        cm_stream *stream, cm_chosen_rows *out, PyObject **on_device);
/* Copy numbers from a buffer in memory of a device, after the work that cumem knows of
 * on it and that of the streams of `after`, a tuple. Blocks. Returns 0, or -1 with an
 * exception; cm_chosen_rows_fini() may be called in any case. */
int cm_chosen_rows_fetch(cm_state *state, PyObject *buffer, const char *name,
                         PyObject *after, cm_chosen_rows *out);
