/* SPDX-License-Identifier: Apache-2.0 */
/* Turns the values that a user writes to a buffer into elements of its dtype. values.c
 * reads numbers, and read_values.c reads lists, text, times and records. The GIL is
 * held throughout. */
#pragma once

#include "base/dtypes.h"
#include "python/python.h"

/* This is the size of the widest number, a complex128. */
enum { CM_ELEMENT_NBYTES = 16 };

/* Write a number, Python's or a scalar of NumPy, as one element of `dtype`: the same
 * number or, if `dtype` has floats, the nearest one. Bools count as integers.
 *
 * Returns false, without an exception and with nothing written, in three cases:
 * `object` is not such a number; `dtype` is none of the engine's numbers (CM_NUMBERS in
 * base/dtypes.h); or the number would change its kind (1.5 in an int32) or does not fit
 * (300 in a uint8). The caller then asks cm_value_array(), which either can read the
 * object or raises the reason why it cannot be written. */
bool cm_value_write_number(PyObject *object, PyObject *dtype,
                           unsigned char element[CM_ELEMENT_NBYTES]);

/* Make an array of `dtype` that holds the same as a value, or as a list or array of
 * values. An array that has the dtype already is returned as it is. Returns a new
 * reference, or NULL with an exception: TypeError if the kind would change (1.5 to an
 * integer, a number to text), OverflowError or ValueError if a value does not fit. May
 * run Python code. */
PyObject *cm_value_array(PyObject *object, PyObject *dtype);
/* Make the Python number that ndarray.item() returns for an element of one of NumPy's
 * own dtypes. The element's bytes are in the processor's order. Returns a new
 * reference, or NULL with an exception. */
PyObject *cm_value_from_element(cm_number number, const void *element);
/* Do the same as cm_value_array() for a value that is not an array of `dtype`. */
PyObject *cm_value_read(PyObject *value, PyObject *dtype);
/* Do the same as cm_value_array() for a caller who will convert the answer by a rule of
 * casting. So a value that would change in `dtype` is read in a dtype of its own, and
 * so is an object that is an array. */
PyObject *cm_value_read_any(PyObject *value, PyObject *dtype);
/* True if an object is an array, or can make one of itself, and so has a dtype. A
 * scalar of NumPy's could do so too, but it counts as a value. */
bool cm_value_is_array(PyObject *object);
/* Make an array of a value, in the dtype that NumPy gives it. Returns a new reference,
 * or NULL with an exception, which is a TypeError if the value holds other Python
 * objects or if some of its elements are masked. */
PyObject *cm_value_read_array(PyObject *value);
