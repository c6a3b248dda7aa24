/* SPDX-License-Identifier: Apache-2.0 */
/* Turns values that a user writes into buffers into elements of a dtype. Numbers are
 * read here; lists, text, times and records are read by cumem/buffers/values.py. The
 * GIL is held throughout. */
#pragma once

#include "python/python.h"

/* the size of the widest number, complex128 */
enum { CM_ELEMENT_NBYTES = 16 };

/* Write a number, Python's or a scalar of NumPy, as one element of `dtype`: the same
 * number or, if `dtype` has floats, the nearest one. Bools count as integers.
 *
 * False, without an exception and with nothing written: `object` is not such a number;
 * `dtype` is none of the engine's numbers (CM_NUMBERS in base/convert.h); or the number
 * would change its kind (1.5 in an int32) or does not fit (300 in a uint8).
 * cm_value_array() then reads it by the package, or raises why it cannot be written. */
bool cm_value_write_number(PyObject *object, PyObject *dtype,
                           unsigned char element[CM_ELEMENT_NBYTES]);

/* Make an array of `dtype` that holds the same as a value, or as a list or array of
 * values. A new reference. TypeError if the kind would change (1.5 to an integer, a
 * number to text), OverflowError or ValueError if a value does not fit. An array that
 * has the dtype already is returned as it is. May run Python code. */
PyObject *cm_value_array(PyObject *object, PyObject *dtype);
