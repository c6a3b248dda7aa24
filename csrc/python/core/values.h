/* SPDX-License-Identifier: Apache-2.0 */
/* Turns values that a user writes into buffers into elements of a dtype: numbers in
 * values.c, lists, text, times and records in read_values.c. The GIL is held
 * throughout. */
#pragma once

#include "base/dtypes.h"
#include "python/python.h"

/* the size of the widest number, complex128 */
enum { CM_ELEMENT_NBYTES = 16 };

/* Write a number, Python's or a scalar of NumPy, as one element of `dtype`: the same
 * number or, if `dtype` has floats, the nearest one. Bools count as integers.
 *
 * False, without an exception and with nothing written: `object` is not such a number;
 * `dtype` is none of the engine's numbers (CM_NUMBERS in base/convert.h); or the number
 * would change its kind (1.5 in an int32) or does not fit (300 in a uint8).
 * cm_value_array() then reads it all the same, or raises why it cannot be written. */
bool cm_value_write_number(PyObject *object, PyObject *dtype,
                           unsigned char element[CM_ELEMENT_NBYTES]);

/* Make an array of `dtype` that holds the same as a value, or as a list or array of
 * values. A new reference. TypeError if the kind would change (1.5 to an integer, a
 * number to text), OverflowError or ValueError if a value does not fit. An array that
 * has the dtype already is returned as it is. May run Python code. */
PyObject *cm_value_array(PyObject *object, PyObject *dtype);
/* Make the number of Python's that ndarray.item() returns for an element of one of
 * NumPy's own dtypes, in the processor's byte order. Returns a new reference, or NULL
 * with an exception. */
PyObject *cm_value_from_element(cm_number number, const void *element);
/* As cm_value_array(), of any value but one that is an array of the dtype already. */
PyObject *cm_value_read(PyObject *value, PyObject *dtype);
/* As cm_value_array(), where a rule of casting says what becomes of a value that would
 * change in `dtype`: such a value, and what is an array already, is read in a dtype of
 * its own. */
PyObject *cm_value_read_any(PyObject *value, PyObject *dtype);
/* True if an object is an array, or makes one of itself, and so has a dtype. A scalar
 * of NumPy's does so too, and is a value all the same. */
bool cm_value_is_array(PyObject *object);
/* The array that NumPy makes of a value, in the dtype that NumPy gives it. A new
 * reference. TypeError if it holds Python objects, or some of its elements are
 * masked. */
PyObject *cm_value_read_array(PyObject *value);
