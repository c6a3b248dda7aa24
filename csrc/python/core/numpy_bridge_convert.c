/* SPDX-License-Identifier: Apache-2.0 */
/* From one dtype to another so that the values stay the same: converted by NumPy, and
 * compared with what they were. */
#include "python/core/numpy_bridge.h"

#include <math.h>
#include <string.h>

#define NO_IMPORT_ARRAY
#include "python/core/numpy_bridge_private.h"

/* -- kinds of value ----------------------------------------------------------------- */

static PyObject *
cast(PyObject *array, PyArray_Descr *dtype)
{
    Py_INCREF((PyObject *)dtype); /* stolen */
    return PyArray_CastToType((PyArrayObject *)array, dtype, 0);
}

static PyObject *
cast_to_number(PyObject *array, int type_number)
{
    return PyArray_CastToType((PyArrayObject *)array,
                              PyArray_DescrFromType(type_number), 0);
}

/* What number comes back from a dtype of another package; NaN where none does. */
static double
echo(PyArray_Descr *dtype, double number)
{
    PyObject *given = PyFloat_FromDouble(number);
    PyObject *array =
        given == NULL ? NULL : PyArray_FromAny(given, NULL, 0, 0, 0, NULL);
    PyObject *there = array == NULL ? NULL : cast(array, dtype);
    PyObject *back = there == NULL ? NULL : cast_to_number(there, NPY_DOUBLE);
    double result = back == NULL ? NAN : *(double *)PyArray_DATA((PyArrayObject *)back);
    Py_XDECREF(back);
    Py_XDECREF(there);
    Py_XDECREF(array);
    Py_XDECREF(given);
    PyErr_Clear();
    return result;
}

/* Its kind is 'V' whatever it holds, so ask it: halves are for reals only. */
static cm_value_class
class_of_user_dtype(PyArray_Descr *dtype)
{
    if (echo(dtype, 0.5) == 0.5) {
        return CM_VALUE_REAL;
    }
    return echo(dtype, 1.0) == 1.0 ? CM_VALUE_INTEGER : CM_VALUE_OTHER;
}

cm_value_class
cm_numpy_value_class(PyObject *object)
{
    PyArray_Descr *dtype = (PyArray_Descr *)object;
    if (dtype->type_num >= NPY_USERDEF) {
        return class_of_user_dtype(dtype);
    }
    switch (dtype->kind) {
    case 'b':
    case 'i':
    case 'u':
        return CM_VALUE_INTEGER;
    case 'f':
        return CM_VALUE_REAL;
    case 'c':
        return CM_VALUE_COMPLEX;
    case 'S':
    case 'U':
        return CM_VALUE_TEXT;
    case 'M':
        return CM_VALUE_TIME;
    case 'm':
        return CM_VALUE_SPAN;
    case 'V':
        return PyDataType_HASFIELDS(dtype) ? CM_VALUE_RECORD : CM_VALUE_RAW;
    default:
        return CM_VALUE_OTHER;
    }
}

static bool
keeps_kind(PyArray_Descr *from, PyArray_Descr *to)
{
    cm_value_class a = cm_numpy_value_class((PyObject *)from);
    cm_value_class b = cm_numpy_value_class((PyObject *)to);
    if (b <= CM_VALUE_COMPLEX) {
        return a <= b;
    }
    switch (b) {
    case CM_VALUE_TIME:
    case CM_VALUE_SPAN:
        return a == b || a == CM_VALUE_INTEGER; /* so many of the dtype's units */
    case CM_VALUE_RAW:
        return a == b || from->kind == 'S';
    default:
        return a == b && b == CM_VALUE_TEXT;
    }
}

/* -- comparing ---------------------------------------------------------------------- */

/* The value at `index` of a contiguous array. */
static void
refuse_item(PyObject *error, PyObject *natural, npy_intp index, PyObject *dtype)
{
    PyArrayObject *array = (PyArrayObject *)natural;
    char *place = PyArray_BYTES(array) + index * PyArray_ITEMSIZE(array);
    PyObject *item = PyArray_ToScalar(place, array);
    if (item != NULL) {
        PyErr_Format(
            error,
            "the value %S of dtype %S does not fit into dtype %S; round, cut or "
            "convert it first",
            item, (PyObject *)PyArray_DESCR(array), dtype);
        Py_DECREF(item);
    }
}

/* Rounding keeps a number finite, infinite or no number; `limit` is the largest of a
 * dtype without infinities, which would take it for everything beyond. */
static bool
is_rounding(long double was, long double is, long double limit)
{
    if (isnan(was) || isnan(is)) {
        return isnan(was) && isnan(is);
    }
    return isinf(was) ? was == is : !isinf(is) && fabsl(was) <= limit;
}

/* The index of the first part that is another now; -1: none. A long double tells all
 * 64-bit integers apart, and even a double would tell them from what they wrap round
 * to.
 */
static npy_intp
find_changed(const long double *was, const long double *is, npy_intp count, bool exact,
             long double limit)
{
    for (npy_intp i = 0; i < count; i++) {
        if (exact ? was[i] != is[i] : !is_rounding(was[i], is[i], limit)) {
            return i;
        }
    }
    return -1;
}

static int
check_numbers(PyObject *natural, PyObject *converted)
{
    PyArray_Descr *to = PyArray_DESCR((PyArrayObject *)converted);
    cm_value_class kind = cm_numpy_value_class((PyObject *)to);
    bool exact = kind != CM_VALUE_REAL && kind != CM_VALUE_COMPLEX;
    double limit =
        !exact && to->type_num >= NPY_USERDEF ? echo(to, INFINITY) : INFINITY;
    limit = isnan(limit) ? INFINITY : limit;
    PyObject *number =
        PyArray_DESCR((PyArrayObject *)converted)->kind == 'M' || to->kind == 'm'
            ? cast_to_number(converted, NPY_INT64)
            : Py_NewRef(converted);
    bool is_complex = kind == CM_VALUE_COMPLEX;
    int type_number = is_complex ? NPY_CLONGDOUBLE : NPY_LONGDOUBLE;
    npy_intp parts = is_complex ? 2 : 1; /* real, imaginary, real, ... */
    PyObject *is = number == NULL ? NULL : cast_to_number(number, type_number);
    PyObject *was = is == NULL ? NULL : cast_to_number(natural, type_number);
    int result = -1;
    if (was != NULL) {
        npy_intp count = parts * PyArray_SIZE((PyArrayObject *)was);
        npy_intp at =
            find_changed(PyArray_DATA((PyArrayObject *)was),
                         PyArray_DATA((PyArrayObject *)is), count, exact, limit);
        if (at >= 0) {
            refuse_item(PyExc_OverflowError, natural, at / parts, (PyObject *)to);
        }
        result = at < 0 ? 0 : -1;
    }
    Py_XDECREF(was);
    Py_XDECREF(is);
    Py_XDECREF(number);
    return result;
}

/* Is the shorter of the two the beginning of the longer, and is the rest zero? */
static bool
is_same_item(const char *was, size_t was_nbytes, const char *is, size_t is_nbytes)
{
    size_t shared = was_nbytes < is_nbytes ? was_nbytes : is_nbytes;
    for (size_t i = shared; i < was_nbytes; i++) {
        if (was[i] != 0) {
            return false;
        }
    }
    return memcmp(was, is, shared) == 0;
}

/* Text, times and raw bytes: converted back, they must have the bytes they had; raw
 * bytes are never converted. */
static int
check_bytes(PyObject *natural, PyObject *converted)
{
    PyArrayObject *array = (PyArrayObject *)natural;
    PyArray_Descr *to = PyArray_DESCR((PyArrayObject *)converted);
    PyObject *back =
        to->kind == 'V' ? Py_NewRef(converted) : cast(converted, PyArray_DESCR(array));
    if (back == NULL) {
        return -1;
    }
    size_t was_nbytes = (size_t)PyArray_ITEMSIZE(array);
    size_t is_nbytes = (size_t)PyArray_ITEMSIZE((PyArrayObject *)back);
    const char *was = PyArray_BYTES(array);
    const char *is = PyArray_BYTES((PyArrayObject *)back);
    npy_intp count = PyArray_SIZE(array);
    npy_intp at = 0;
    while (at < count && is_same_item(was, was_nbytes, is, is_nbytes)) {
        was += was_nbytes;
        is += is_nbytes;
        at++;
    }
    Py_DECREF(back);
    if (at < count) {
        refuse_item(PyExc_ValueError, natural, at, (PyObject *)to);
    }
    return at < count ? -1 : 0;
}

/* -- converting --------------------------------------------------------------------- */

/* Can a number neither wrap round nor become infinite on the way? */
static bool
is_harmless(PyArray_Descr *from, PyArray_Descr *to)
{
    if (from->type_num >= NPY_USERDEF || to->type_num >= NPY_USERDEF) {
        return false;
    }
    if (strchr("biu", from->kind) != NULL && strchr("fc", to->kind) != NULL) {
        return PyDataType_ELSIZE(to) >= 4; /* float32 holds every 64-bit integer */
    }
    return strchr("biufc", from->kind) != NULL
           && PyArray_CanCastTypeTo(from, to, NPY_SAFE_CASTING);
}

static int
check_same(PyObject *natural, PyObject *converted)
{
    cm_value_class kind =
        cm_numpy_value_class((PyObject *)PyArray_DESCR((PyArrayObject *)natural));
    return kind <= CM_VALUE_COMPLEX ? check_numbers(natural, converted)
                                    : check_bytes(natural, converted);
}

/* NumPy warns of what the check refuses: `numpy.errstate(all="ignore")`, entered. */
static PyObject *
enter_quiet(void)
{
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *type = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, "errstate");
    PyObject *keywords = type == NULL ? NULL : Py_BuildValue("{ss}", "all", "ignore");
    PyObject *none = keywords == NULL ? NULL : PyTuple_New(0);
    PyObject *state = none == NULL ? NULL : PyObject_Call(type, none, keywords);
    PyObject *entered =
        state == NULL ? NULL : PyObject_CallMethod(state, "__enter__", NULL);
    if (entered == NULL) {
        Py_CLEAR(state);
    }
    Py_XDECREF(entered);
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    Py_XDECREF(type);
    Py_XDECREF(numpy);
    return state;
}

/* Keeps the exception that is set. */
static int
leave_quiet(PyObject *state)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done =
        PyObject_CallMethod(state, "__exit__", "OOO", Py_None, Py_None, Py_None);
    int result = done == NULL ? -1 : 0;
    Py_XDECREF(done);
    Py_DECREF(state);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return result;
}

/* Of the shape and the layout of `array`; its values are anything. */
static PyObject *
new_like(PyObject *array, PyArray_Descr *dtype)
{
    Py_INCREF((PyObject *)dtype); /* stolen */
    return PyArray_NewLikeArray((PyArrayObject *)array, NPY_KEEPORDER, dtype, 0);
}

/* A run of `count` elements of a contiguous array, which is borrowed. */
static PyObject *
window(PyObject *object, npy_intp first, npy_intp count)
{
    PyArrayObject *array = (PyArrayObject *)object;
    PyArray_Descr *dtype = PyArray_DESCR(array);
    char *place = PyArray_BYTES(array) + first * PyArray_ITEMSIZE(array);
    Py_INCREF((PyObject *)dtype); /* stolen */
    return PyArray_NewFromDescr(&PyArray_Type, dtype, 1, &count, NULL, place,
                                NPY_ARRAY_CARRAY, NULL);
}

/* Elements that are looked at together: what the check makes of them stays in a cache.
 */
enum { BLOCK_COUNT = 4096 };

/* Both are contiguous and as long. */
static int
fill_checked(PyObject *converted, PyObject *natural)
{
    npy_intp size = PyArray_SIZE((PyArrayObject *)natural);
    int result = 0;
    for (npy_intp first = 0; first < size && result == 0; first += BLOCK_COUNT) {
        npy_intp count = size - first < BLOCK_COUNT ? size - first : BLOCK_COUNT;
        PyObject *was = window(natural, first, count);
        PyObject *is = was == NULL ? NULL : window(converted, first, count);
        result =
            is == NULL
                    || PyArray_CopyInto((PyArrayObject *)is, (PyArrayObject *)was) < 0
                ? -1
                : check_same(was, is);
        Py_XDECREF(is);
        Py_XDECREF(was);
    }
    return result;
}

/* `natural` is contiguous. */
static PyObject *
cast_checked(PyObject *natural, PyArray_Descr *to)
{
    PyObject *state = enter_quiet();
    if (state == NULL) {
        return NULL;
    }
    PyObject *converted = new_like(natural, to);
    if (converted != NULL && fill_checked(converted, natural) < 0) {
        Py_CLEAR(converted);
    }
    if (leave_quiet(state) < 0) {
        Py_CLEAR(converted);
    }
    return converted;
}

/* What was converted in C order, laid out as `natural` is. `converted` is stolen. */
static PyObject *
lay_out(PyObject *converted, PyObject *natural)
{
    if (converted == NULL || PyArray_IS_C_CONTIGUOUS((PyArrayObject *)natural)) {
        return converted;
    }
    PyObject *laid = new_like(natural, PyArray_DESCR((PyArrayObject *)converted));
    if (laid != NULL
        && PyArray_CopyInto((PyArrayObject *)laid, (PyArrayObject *)converted) < 0) {
        Py_CLEAR(laid);
    }
    Py_DECREF(converted);
    return laid;
}

PyObject *
cm_numpy_convert_value(PyObject *natural, PyObject *dtype)
{
    PyArray_Descr *from = PyArray_DESCR((PyArrayObject *)natural);
    PyArray_Descr *to = (PyArray_Descr *)dtype;
    if (PyArray_EquivTypes(from, to)) {
        return Py_NewRef(natural);
    }
    if (!keeps_kind(from, to)) {
        PyErr_Format(
            PyExc_TypeError,
            "a value of dtype %S would change in a target of dtype %S; convert "
            "it first",
            (PyObject *)from, dtype);
        return NULL;
    }
    if (is_harmless(from, to)) {
        PyObject *converted = new_like(natural, to);
        if (converted != NULL
            && PyArray_CopyInto((PyArrayObject *)converted, (PyArrayObject *)natural)
                   < 0) {
            Py_CLEAR(converted);
        }
        return converted;
    }
    PyObject *packed =
        PyArray_FromAny(natural, NULL, 0, 0, NPY_ARRAY_C_CONTIGUOUS, NULL);
    PyObject *converted = packed == NULL ? NULL : cast_checked(packed, to);
    Py_XDECREF(packed);
    return lay_out(converted, natural);
}
