/* SPDX-License-Identifier: Apache-2.0 */
/* Values of structured dtypes, field by field, each as a value of its own. */
#include "python/numpy_bridge.h"

#define NO_IMPORT_ARRAY
#include "python/numpy_bridge_private.h"

/* The dtype of the elements of field `name`, without the shape it may have. */
static PyObject *
field_dtype(PyObject *dtype, PyObject *name)
{
    PyObject *field = PyObject_GetItem(dtype, name);
    PyObject *base = field == NULL ? NULL : PyObject_GetAttrString(field, "base");
    Py_XDECREF(field);
    return base;
}

static PyObject *object_dtype(PyObject *dtype);

/* (name, objects, shape), as numpy.dtype() takes it. */
static PyObject *
object_field(PyObject *dtype, PyObject *name)
{
    PyObject *field = PyObject_GetItem(dtype, name);
    PyObject *base = field == NULL ? NULL : PyObject_GetAttrString(field, "base");
    PyObject *shape = base == NULL ? NULL : PyObject_GetAttrString(field, "shape");
    PyObject *objects = shape == NULL ? NULL : object_dtype(base);
    PyObject *entry =
        objects == NULL ? NULL : Py_BuildValue("(OOO)", name, objects, shape);
    Py_XDECREF(objects);
    Py_XDECREF(shape);
    Py_XDECREF(base);
    Py_XDECREF(field);
    return entry;
}

/* The same fields, for Python objects: NumPy puts tuples into it as they are. */
static PyObject *
object_dtype(PyObject *dtype)
{
    if (cm_numpy_value_class(dtype) != CM_VALUE_RECORD) {
        return (PyObject *)PyArray_DescrFromType(NPY_OBJECT);
    }
    PyObject *names = PyObject_GetAttrString(dtype, "names");
    Py_ssize_t count = names == NULL ? -1 : PyTuple_Size(names);
    PyObject *fields = count < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; fields != NULL && i < count; i++) {
        PyObject *entry = object_field(dtype, PyTuple_GetItem(names, i));
        if (entry == NULL || PyList_Append(fields, entry) < 0) {
            Py_CLEAR(fields);
        }
        Py_XDECREF(entry);
    }
    PyArray_Descr *descr = NULL;
    if (fields != NULL && !PyArray_DescrConverter(fields, &descr)) {
        descr = NULL;
    }
    Py_XDECREF(fields);
    Py_XDECREF(names);
    return (PyObject *)descr;
}

/* An array with what each field is to hold; *objects when as Python's own objects. */
static PyObject *
read_record(PyObject *object, PyObject *dtype, bool *objects)
{
    *objects = PyList_Check(object) || PyTuple_Check(object);
    PyObject *natural = *objects ? NULL : cm_numpy_as_array(object, NULL);
    if (natural != NULL || !*objects) {
        return natural;
    }
    PyObject *fields = object_dtype(dtype);
    return fields == NULL ? NULL
                          : PyArray_FromAny(object, (PyArray_Descr *)fields, 0, 0,
                                            NPY_ARRAY_FORCECAST, NULL);
}

/* What goes into the field: as a list, one level of which may be a sub-array's. */
static PyObject *
field_value(PyObject *natural, PyObject *name, bool objects)
{
    PyObject *value =
        name == NULL ? Py_NewRef(natural) : PyObject_GetItem(natural, name);
    if (value == NULL || !objects) {
        return value;
    }
    PyObject *list = PyObject_CallMethod(value, "tolist", NULL);
    Py_DECREF(value);
    return list;
}

static int
check_shapes(PyObject *name, PyObject *value, PyObject *field)
{
    PyArrayObject *a = (PyArrayObject *)value;
    PyArrayObject *b = (PyArrayObject *)field;
    if (PyArray_SAMESHAPE(a, b)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "a value does not have the shape of field %R", name);
    return -1;
}

static int
set_field(PyObject *result, PyObject *dtype, PyObject *name, PyObject *value)
{
    PyObject *base = field_dtype(dtype, name);
    PyObject *converted = base == NULL ? NULL : cm_numpy_as_value(value, base);
    PyObject *field = converted == NULL ? NULL : PyObject_GetItem(result, name);
    int done = -1;
    if (field != NULL && check_shapes(name, converted, field) == 0) {
        done = PyArray_CopyInto((PyArrayObject *)field, (PyArrayObject *)converted);
    }
    Py_XDECREF(field);
    Py_XDECREF(converted);
    Py_XDECREF(base);
    return done;
}

/* Records go into each other by position, as in NumPy; what has no fields goes into
 * every one. */
static int
set_fields(PyObject *result, PyObject *dtype, PyObject *natural, bool objects)
{
    PyObject *from = (PyObject *)PyArray_DESCR((PyArrayObject *)natural);
    bool by_field = cm_numpy_value_class(from) == CM_VALUE_RECORD;
    PyObject *names = PyObject_GetAttrString(dtype, "names");
    PyObject *sources = PyObject_GetAttrString(by_field ? from : dtype, "names");
    int done = names == NULL || sources == NULL ? -1 : 0;
    if (done == 0 && PyTuple_Size(names) != PyTuple_Size(sources)) {
        PyErr_Format(PyExc_TypeError,
                     "a value of dtype %S has not the fields of a target of dtype %S",
                     from, dtype);
        done = -1;
    }
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_Size(names); i++) {
        PyObject *source = by_field ? PyTuple_GetItem(sources, i) : NULL;
        PyObject *value = field_value(natural, source, objects);
        done = value == NULL
                   ? -1
                   : set_field(result, dtype, PyTuple_GetItem(names, i), value);
        Py_XDECREF(value);
    }
    Py_XDECREF(sources);
    Py_XDECREF(names);
    return done;
}

PyObject *
cm_numpy_as_record(PyObject *object, PyObject *dtype)
{
    bool objects;
    PyObject *natural = read_record(object, dtype, &objects);
    if (natural == NULL) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)natural;
    if (PyArray_EquivTypes(PyArray_DESCR(array), (PyArray_Descr *)dtype)) {
        return natural;
    }
    Py_INCREF(dtype); /* stolen */
    PyObject *result = PyArray_Zeros(PyArray_NDIM(array), PyArray_DIMS(array),
                                     (PyArray_Descr *)dtype, 0);
    if (result != NULL && PyArray_SIZE(array) > 0
        && set_fields(result, dtype, natural, objects) < 0) {
        Py_CLEAR(result);
    }
    Py_DECREF(natural);
    return result;
}
