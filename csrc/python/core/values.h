/* SPDX-License-Identifier: Apache-2.0 */
/* Values that a user writes into buffers, as elements of a dtype. Numbers are read
 * here, lists, text, times and records by cumem/extension/values.py. GIL held
 * throughout. */
#pragma once

#include "python/python.h"

/* Of the widest number, complex128. */
enum { CM_ELEMENT_NBYTES = 16 };

/* Write a number, of Python or a scalar of NumPy, as one element of `dtype`: the same
 * number, or where that has floats the nearest of them. Bools count as integers.
 * False, without an exception and with nothing written: `object` is no such number,
 * `dtype` holds none that the engine knows (CM_NUMBERS in base/convert.h), or the
 * number would change its kind (1.5 in an int32) or does not fit (300 in a uint8).
 * cm_value_array() then reads it by the package, or raises why it cannot be written. */
bool cm_value_write_number(PyObject *object, PyObject *dtype,
                           unsigned char element[CM_ELEMENT_NBYTES]);

/* A value, or a list or array of them, as an array of `dtype` that holds the same: new
 * reference. TypeError where its kind would change (1.5 to an integer, a number to
 * text), OverflowError or ValueError where it does not fit. An array that has the dtype
 * already is returned as it is. May run Python code. */
PyObject *cm_value_array(PyObject *object, PyObject *dtype);
