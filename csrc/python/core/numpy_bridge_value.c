/* SPDX-License-Identifier: Apache-2.0 */
/* From values to arrays: scalars, lists and what may become elements of a buffer. */
#include "python/core/numpy_bridge.h"

#define NO_IMPORT_ARRAY
#include "python/core/numpy_bridge_private.h"

static PyArray_Descr *
descr_of(PyObject *array)
{
    return PyArray_DESCR((PyArrayObject *)array);
}

static int
refuse_objects(PyObject *object)
{
    PyErr_Format(PyExc_TypeError, "an object of type %R holds no plain values",
                 (PyObject *)Py_TYPE(object));
    return -1;
}

/* -- what NumPy makes of it --------------------------------------------------------- */

/* `dtype` may be NULL. The result may hold objects. */
static PyObject *
read_as(PyObject *object, PyArray_Descr *dtype)
{
    Py_XINCREF((PyObject *)dtype); /* stolen */
    return PyArray_FromAny(object, dtype, 0, 0, NPY_ARRAY_FORCECAST, NULL);
}

static PyObject *
read_as_number(PyObject *object, int type_number)
{
    return PyArray_FromAny(object, PyArray_DescrFromType(type_number), 0, 0,
                           NPY_ARRAY_FORCECAST, NULL);
}

PyObject *
cm_numpy_as_array(PyObject *object, PyObject *dtype)
{
    PyObject *array = read_as(object, (PyArray_Descr *)dtype);
    if (array != NULL && PyDataType_FLAGCHK(descr_of(array), NPY_ITEM_REFCOUNT)) {
        Py_CLEAR(array);
        (void)refuse_objects(object);
    }
    return array;
}

/* -- Python's own values ------------------------------------------------------------ */

static cm_value_class
class_of_object(PyObject *item)
{
    if (PyLong_Check(item) || PyArray_IsScalar(item, Integer)
        || PyArray_IsScalar(item, Bool)) {
        return CM_VALUE_INTEGER;
    }
    if (PyFloat_Check(item) || PyArray_IsScalar(item, Floating)) {
        return CM_VALUE_REAL;
    }
    if (PyComplex_Check(item) || PyArray_IsScalar(item, ComplexFloating)) {
        return CM_VALUE_COMPLEX;
    }
    return PyUnicode_Check(item) || PyBytes_Check(item) ? CM_VALUE_TEXT
                                                        : CM_VALUE_OTHER;
}

/* One class for all of them: of numbers the widest; OTHER where they have none in
 * common. */
static cm_value_class
join_classes(cm_value_class a, cm_value_class b)
{
    if (a <= CM_VALUE_COMPLEX && b <= CM_VALUE_COMPLEX) {
        return a > b ? a : b;
    }
    return a == b ? a : CM_VALUE_OTHER;
}

/* What the items of a list are, one by one: NumPy makes text of numbers beside text,
 * and floats of integers that no 64 bits hold together. -1 with an exception. */
static int
class_of_items(PyObject *object)
{
    PyObject *items = read_as_number(object, NPY_OBJECT);
    if (items == NULL) {
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)items; /* fresh, or an array of objects */
    npy_intp size = PyArray_SIZE(array);
    PyObject *flat = PyArray_Flatten(array, NPY_CORDER);
    Py_DECREF(items);
    if (flat == NULL) {
        return -1;
    }
    PyObject **item = PyArray_DATA((PyArrayObject *)flat);
    cm_value_class found = size > 0 ? class_of_object(item[0]) : CM_VALUE_INTEGER;
    for (npy_intp i = 1; i < size && found != CM_VALUE_OTHER; i++) {
        found = join_classes(found, class_of_object(item[i]));
    }
    Py_DECREF(flat);
    return (int)found;
}

/* NULL with an exception. */
static PyObject *
refuse_numbers(PyObject *dtype)
{
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Format(PyExc_OverflowError,
                     "an integer among the values does not fit into dtype %S; use a "
                     "wider dtype",
                     dtype);
    }
    return NULL;
}

static PyObject *
read_integers(PyObject *object, PyObject *dtype)
{
    PyObject *array = read_as_number(object, NPY_INT64);
    if (array == NULL && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        array = read_as_number(object, NPY_UINT64);
    }
    return array == NULL ? refuse_numbers(dtype) : array;
}

/* Numbers that NumPy by itself would not read, in a dtype that has room for them. */
static PyObject *
read_numbers(PyObject *object, cm_value_class found, PyObject *dtype)
{
    cm_value_class to = cm_numpy_value_class(dtype);
    if (found == CM_VALUE_INTEGER && to != CM_VALUE_REAL && to != CM_VALUE_COMPLEX) {
        return read_integers(object, dtype);
    }
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(dtype, &traits);
    int number = traits.extended ? NPY_LONGDOUBLE : NPY_DOUBLE;
    if (found == CM_VALUE_COMPLEX) {
        number = traits.extended ? NPY_CLONGDOUBLE : NPY_CDOUBLE;
    }
    PyObject *array = read_as_number(object, number);
    return array == NULL ? refuse_numbers(dtype) : array;
}

/* Dates and spans of Python, in a unit that NumPy chooses for them. */
static PyObject *
read_times(PyObject *object, cm_value_class to)
{
    return read_as_number(object, to == CM_VALUE_TIME ? NPY_DATETIME : NPY_TIMEDELTA);
}

static bool
is_time(cm_value_class found)
{
    return found == CM_VALUE_TIME || found == CM_VALUE_SPAN;
}

/* May NumPy's reading of this have changed what was meant? */
static bool
must_look(PyObject *object, PyObject *natural, cm_value_class to)
{
    if (PyDataType_FLAGCHK(descr_of(natural), NPY_ITEM_REFCOUNT)) {
        return !PyArray_Check(object);
    }
    cm_value_class found = cm_numpy_value_class((PyObject *)descr_of(natural));
    return (PyList_Check(object) || PyTuple_Check(object))
           && (found == CM_VALUE_TEXT
               || (found == CM_VALUE_REAL && to == CM_VALUE_INTEGER));
}

/* `natural` is stolen. */
static PyObject *
look_again(PyObject *object, PyObject *natural, PyObject *dtype)
{
    cm_value_class to = cm_numpy_value_class(dtype);
    bool holds_objects = PyDataType_FLAGCHK(descr_of(natural), NPY_ITEM_REFCOUNT);
    if (holds_objects && is_time(to)) {
        Py_DECREF(natural);
        return read_times(object, to);
    }
    int found = class_of_items(object);
    if (found >= 0 && found <= (int)CM_VALUE_COMPLEX) {
        Py_DECREF(natural);
        return read_numbers(object, (cm_value_class)found, dtype);
    }
    if (found < 0 || found == (int)CM_VALUE_OTHER || holds_objects) {
        Py_CLEAR(natural);
        if (found >= 0) {
            (void)refuse_objects(object);
        }
    }
    return natural;
}

/* An array of the dtype that the value itself has, large enough to hold it exactly. */
static PyObject *
read_naturally(PyObject *object, PyObject *dtype)
{
    cm_value_class to = cm_numpy_value_class(dtype);
    PyObject *natural = read_as(object, NULL);
    if (natural != NULL && must_look(object, natural, to)) {
        natural = look_again(object, natural, dtype);
    }
    if (natural == NULL) {
        return NULL;
    }
    PyArray_Descr *from = descr_of(natural);
    if (PyDataType_FLAGCHK(from, NPY_ITEM_REFCOUNT)) {
        Py_DECREF(natural);
        (void)refuse_objects(object);
        return NULL;
    }
    if (is_time(to) && cm_numpy_value_class((PyObject *)from) == CM_VALUE_TEXT) {
        PyObject *text = natural; /* "2020-01-01" */
        natural = read_times(text, to);
        Py_DECREF(text);
    }
    return natural;
}

/* -- the whole ---------------------------------------------------------------------- */

/* -- structured dtypes, field by field, each as a value of its own ------------------- */

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

/* cm_numpy_as_value for structured dtypes. */
static PyObject *
as_record(PyObject *object, PyObject *dtype)
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

/* -- all of it ------------------------------------------------------------------------ */

PyObject *
cm_numpy_as_value(PyObject *object, PyObject *dtype)
{
    if (object == Py_None) {
        PyErr_SetString(PyExc_TypeError, "None is no value to write");
        return NULL;
    }
    if (cm_numpy_value_class(dtype) == CM_VALUE_RECORD) {
        return as_record(object, dtype);
    }
    PyObject *natural = read_naturally(object, dtype);
    if (natural == NULL) {
        return NULL;
    }
    bool is_empty_list = PyArray_SIZE((PyArrayObject *)natural) == 0
                         && (PyList_Check(object) || PyTuple_Check(object));
    PyObject *converted = is_empty_list ? cm_numpy_as_array(object, dtype)
                                        : cm_numpy_convert_value(natural, dtype);
    Py_DECREF(natural);
    return converted;
}
