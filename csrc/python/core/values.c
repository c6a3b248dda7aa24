/* SPDX-License-Identifier: Apache-2.0 */
/* Turns numbers into elements of a dtype. A number is first held in a type of its own,
 * in which nothing is lost: a bool, int64, uint64, float64 or complex128 for a number
 * of Python's, or the type of NumPy's scalar. The engine's own conversion then makes
 * the element, so that the number becomes the same as it would in a copy of an array.
 * Then the element is compared with the given number, because the conversion wraps
 * integers round and makes infinities of floats that are too large. */
#include "python/core/values.h"

#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "python/core/numpy_bridge.h"
#include "python/core/package.h"

/* A number as it was given. */
typedef struct given_number {
    cm_number type;
    _Alignas(CM_ELEMENT_NBYTES) unsigned char bytes[CM_ELEMENT_NBYTES];
} given_number;

static void
hold(given_number *out, cm_number type, const void *value)
{
    out->type = type;
    memcpy(out->bytes, value, cm_number_nbytes(type));
}

/* Read an int of Python's. An int of more than 64 bits can go only into floats, which
 * round it anyway. So it is held as the float64 that NumPy would read. */
static bool
read_integer(PyObject *object, bool goes_into_floats, given_number *out)
{
    int overflow;
    long long integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) {
        hold(out, CM_INT64, &integer);
        return true;
    }
    if (overflow > 0) {
        unsigned long long large = PyLong_AsUnsignedLongLong(object);
        if (!PyErr_Occurred()) {
            hold(out, CM_UINT64, &large);
            return true;
        }
        PyErr_Clear();
    }
    if (!goes_into_floats) {
        return false;
    }
    double rounded = PyLong_AsDouble(object);
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* cm_value_read() says that it does not fit */
        return false;
    }
    hold(out, CM_FLOAT64, &rounded);
    return true;
}

/* Read a number. Subclasses of Python's numbers may read as something else, so they are
 * left to cm_value_read(). */
static bool
read_number(PyObject *object, bool goes_into_floats, given_number *out)
{
    if (PyBool_Check(object)) {
        unsigned char truth = object == Py_True;
        hold(out, CM_BOOL, &truth);
        return true;
    }
    if (PyLong_CheckExact(object)) {
        return read_integer(object, goes_into_floats, out);
    }
    if (PyFloat_CheckExact(object)) {
        double real = PyFloat_AsDouble(object);
        hold(out, CM_FLOAT64, &real);
        return true;
    }
    if (PyComplex_CheckExact(object)) {
        double parts[2] = {PyComplex_RealAsDouble(object),
                           PyComplex_ImagAsDouble(object)};
        hold(out, CM_COMPLEX128, parts);
        return true;
    }
    out->type = cm_numpy_is_scalar(object) ? cm_numpy_read_scalar(object, out->bytes)
                                           : CM_NUMBER_NONE;
    return out->type != CM_NUMBER_NONE;
}

/* True if an integer lies within what `to`, a type of integers, can hold. */
static bool
integer_fits(const given_number *number, cm_number to)
{
    bool is_signed =
        to == CM_INT8 || to == CM_INT16 || to == CM_INT32 || to == CM_INT64;
    uint64_t bits = to == CM_BOOL ? 1 : 8 * cm_number_nbytes(to);
    /* 127 for int8, 255 for uint8, 1 for a bool. */
    uint64_t most = UINT64_MAX >> (64 - bits + is_signed);
    int64_t integer = 0;
    if (number->type == CM_UINT64) {
        uint64_t large;
        memcpy(&large, number->bytes, sizeof(large));
        return large <= most;
    }
    cm_convert widen = {.from = number->type, .to = CM_INT64};
    cm_convert_run(&widen, &integer, 0, number->bytes, 0, 1);
    if (integer < 0) {
        return is_signed && integer >= -(int64_t)most - 1;
    }
    return (uint64_t)integer <= most;
}

/* True if no finite part of a number has become infinite. The element is in the
 * processor's byte order. */
static bool
stayed_finite(const given_number *number, cm_number to, const void *element)
{
    double before[2];
    double after[2];
    if (number->type == to || to == CM_FLOAT64 || to == CM_COMPLEX128) {
        return true; /* these types hold every number that can be given */
    }
    cm_convert widen = {.from = number->type, .to = CM_COMPLEX128};
    cm_convert_run(&widen, before, 0, number->bytes, 0, 1);
    widen.from = to;
    cm_convert_run(&widen, after, 0, element, 0, 1);
    return (isfinite(after[0]) || !isfinite(before[0]))
           && (isfinite(after[1]) || !isfinite(before[1]));
}

bool
cm_value_write_number(PyObject *object, PyObject *dtype,
                      unsigned char element[CM_ELEMENT_NBYTES])
{
    given_number number;
    bool swapped;
    cm_number to = cm_numpy_number(dtype, &swapped);
    if (to == CM_NUMBER_NONE
        || !read_number(object, cm_number_class_of(to) != CM_CLASS_INTEGER, &number)
        || cm_number_class_of(number.type) > cm_number_class_of(to)) {
        return false;
    }
    bool is_integer = cm_number_class_of(to) == CM_CLASS_INTEGER;
    if (is_integer && !integer_fits(&number, to)) {
        return false;
    }
    _Alignas(CM_ELEMENT_NBYTES) unsigned char made[CM_ELEMENT_NBYTES];
    cm_convert convert = {.from = number.type, .to = to};
    if (number.type == to) {
        memcpy(made, number.bytes, sizeof(made));
    }
    else {
        cm_convert_run(&convert, made, 0, number.bytes, 0, 1);
    }
    if (!is_integer && !stayed_finite(&number, to, made)) {
        return false;
    }
    /* The other byte order reverses the bytes within each part: of a complex64 it makes
     * 3 2 1 0 7 6 5 4. */
    size_t nbytes = (size_t)cm_number_nbytes(to);
    size_t part = cm_number_class_of(to) == CM_CLASS_COMPLEX ? nbytes / 2 : nbytes;
    for (size_t i = 0; i < nbytes; i++) {
        size_t within = i % part;
        element[i] = made[swapped ? i - within + (part - 1 - within) : i];
    }
    return true;
}

PyObject *
cm_value_from_element(cm_number number, const void *element)
{
    cm_convert widen = {.from = number};
    if (number == CM_BOOL) {
        return PyBool_FromLong(*(const unsigned char *)element != 0);
    }
    if (number == CM_UINT64) {
        uint64_t large;
        memcpy(&large, element, sizeof(large));
        return PyLong_FromUnsignedLongLong(large);
    }
    if (cm_number_class_of(number) == CM_CLASS_INTEGER) {
        int64_t integer;
        widen.to = CM_INT64;
        cm_convert_run(&widen, &integer, 0, element, 0, 1);
        return PyLong_FromLongLong(integer);
    }
    if (cm_number_class_of(number) == CM_CLASS_FLOAT) {
        double real;
        widen.to = CM_FLOAT64;
        cm_convert_run(&widen, &real, 0, element, 0, 1);
        return PyFloat_FromDouble(real);
    }
    double parts[2];
    widen.to = CM_COMPLEX128;
    cm_convert_run(&widen, parts, 0, element, 0, 1);
    return PyComplex_FromDoubles(parts[0], parts[1]);
}

bool
cm_value_is_array(PyObject *object)
{
    if (cm_numpy_is_array(object)) {
        return true;
    }
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        return false; /* these have no __array__, and looking for it is slow */
    }
    return !cm_numpy_is_scalar(object) && PyObject_HasAttrString(object, "__array__");
}

PyObject *
cm_value_read_any(PyObject *value, PyObject *dtype)
{
    if (cm_value_is_array(value)) {
        return cm_value_read_array(value);
    }
    PyObject *array = cm_value_array(value, dtype);
    if (array == NULL
        && (PyErr_ExceptionMatches(PyExc_TypeError)
            || PyErr_ExceptionMatches(PyExc_OverflowError))) {
        PyErr_Clear();
        array = cm_value_read_array(value);
    }
    return array;
}

PyObject *
cm_value_array(PyObject *object, PyObject *dtype)
{
    unsigned char element[CM_ELEMENT_NBYTES];
    if (cm_numpy_is_array_of(object, dtype)) {
        return Py_NewRef(object);
    }
    if (cm_value_write_number(object, dtype, element)) {
        PyObject *array = cm_numpy_empty(dtype, 0, NULL);
        if (array != NULL) {
            memcpy(cm_numpy_data(array), element, (size_t)cm_numpy_itemsize(dtype));
        }
        return array;
    }
    return cm_value_read(object, dtype);
}
