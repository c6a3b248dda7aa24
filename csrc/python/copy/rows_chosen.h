/* SPDX-License-Identifier: Apache-2.0 */
/* Reads arguments that are row numbers: lists, ranges, arrays and buffers of integers.
 * Numbers that the host reaches are read once it is known how the rows are copied. That
 * is before the call returns, so the caller may change them afterwards. Numbers in
 * memory of a device stay there, and the copy reads them in its own order. The GIL is
 * held, and released for as long as unfinished work is still writing the numbers. */
#pragma once

#include "python/core/state.h"
#include "transfer/rows/chosen_rows.h"

/* Numbers that were given, and have not been read. */
typedef struct cm_given_rows {
    uint64_t count;
    PyObject *array;     /* owned: a NumPy array of integers in this byte order; NULL if
                            they lie on a device, or none were given */
    PyObject *on_device; /* owned buffer of numbers that lie on a device, or NULL */
} cm_given_rows;

/* Take the argument `name`, which is not None. cm_given_rows_fini() may be called in
 * any case. A buffer in memory of a device is ready on `stream` or, if that is NULL, on
 * the current stream of its device. Returns 0, or -1 with an exception: TypeError if
 * these are not integers, ValueError if they do not have exactly one dimension,
 * IndexError for an int that no array has as a row, or the failure of a transfer that
 * was to write the numbers. */
int cm_given_rows_init(cm_given_rows *self, cm_state *state, PyObject *object,
                       const char *name, cm_stream *stream);
void cm_given_rows_fini(cm_given_rows *self);
/* Replace numbers that lie on a device by an array of them, after the work that cumem
 * knows of on their buffer and that of the streams of `after`, a tuple. Blocks. Returns
 * 0, or -1 with an exception. */
int cm_given_rows_fetch(cm_given_rows *self, cm_state *state, const char *name,
                        PyObject *after);
/* Return where the numbers of `array` lie. Others may change the array while the GIL is
 * released. */
cm_integers cm_given_rows_integers(const cm_given_rows *self);
