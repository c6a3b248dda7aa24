/* SPDX-License-Identifier: Apache-2.0 */
/* From values to arrays: scalars, lists and what may become elements of a buffer. */
#include "python/numpy_bridge.h"

#include <string.h>

#define NO_IMPORT_ARRAY
#include "python/numpy_bridge_private.h"

static bool
is_number(const PyArray_Descr *descr)
{
    return strchr("biufc", descr->kind) != NULL;
}

static bool
is_integer(const PyArray_Descr *descr)
{
    return strchr("biu", descr->kind) != NULL;
}

/* May numbers of this dtype become elements of the other: 1, 0 or -1 with TypeError. */
static int
check_value_cast(PyArray_Descr *from, PyArray_Descr *to)
{
    if (is_number(from) ? (is_integer(from) && is_integer(to))
                              || PyArray_CanCastTypeTo(from, to, NPY_SAME_KIND_CASTING)
                        : PyArray_EquivTypes(from, to)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "a value of dtype %S would change in a target of dtype %S; convert it "
                 "first",
                 (PyObject *)from, (PyObject *)to);
    return -1;
}

/* Integers out of range would wrap round. */
static int
check_same_values(PyObject *natural, PyObject *converted)
{
    PyObject *same = PyObject_RichCompare(natural, converted, Py_EQ);
    PyObject *all = same == NULL ? NULL : PyObject_CallMethod(same, "all", NULL);
    int yes = all == NULL ? -1 : PyObject_IsTrue(all);
    Py_XDECREF(all);
    Py_XDECREF(same);
    if (yes == 0) {
        PyErr_Format(PyExc_OverflowError, "a value does not fit into dtype %S",
                     (PyObject *)PyArray_DESCR((PyArrayObject *)converted));
    }
    return yes > 0 ? 0 : -1;
}

PyObject *
cm_numpy_as_value(PyObject *object, PyObject *dtype)
{
    PyArray_Descr *to = (PyArray_Descr *)dtype;
    if (object == Py_None) {
        PyErr_SetString(PyExc_TypeError, "None is no value to write");
        return NULL;
    }
    if (!is_number(to)) {
        return cm_numpy_as_array(object, dtype); /* NumPy's own rules */
    }
    PyObject *natural = cm_numpy_as_array(object, NULL);
    if (natural == NULL) {
        return NULL;
    }
    PyArray_Descr *from = PyArray_DESCR((PyArrayObject *)natural);
    PyObject *converted = NULL;
    if (check_value_cast(from, to) == 0) {
        converted = cm_numpy_as_array(object, dtype);
    }
    if (converted != NULL && is_integer(to)
        && check_same_values(natural, converted) < 0) {
        Py_CLEAR(converted);
    }
    Py_DECREF(natural);
    return converted;
}

PyObject *
cm_numpy_as_array(PyObject *object, PyObject *dtype)
{
    Py_XINCREF(dtype); /* stolen */
    PyObject *array = PyArray_FromAny(object, (PyArray_Descr *)dtype, 0, 0,
                                      NPY_ARRAY_FORCECAST, NULL);
    if (array == NULL) {
        return NULL;
    }
    if (PyDataType_FLAGCHK(PyArray_DESCR((PyArrayObject *)array), NPY_ITEM_REFCOUNT)) {
        Py_DECREF(array);
        PyErr_Format(PyExc_TypeError, "an object of type %R holds no plain values",
                     (PyObject *)Py_TYPE(object));
        return NULL;
    }
    return array;
}
