/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/rows_chosen.h"

#include "python/buffer/buffer_object.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/protocols.h"

static const char expected[] = "integers: a list, a range or a one-dimensional array";

/* -- lists -------------------------------------------------------------------------- */

/* Read one number, which may be any object with __index__() except a bool. True and
 * False are most likely a mask, which would choose rows in another way. Returns 0, or
 * -1 with an exception. */
static int
read_number(PyObject *item, const char *name, int64_t *out)
{
    if (PyBool_Check(item) || cm_numpy_is_bool(item)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be integers, not bools: pass numpy.flatnonzero(mask)",
                     name);
        return -1;
    }
    if (PyList_Check(item) || PyTuple_Check(item)) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have one dimension, not lists within a list: pass "
                     "numpy.ravel(%s)",
                     name, name);
        return -1;
    }
    if (!PyIndex_Check(item)) {
        return cm_arg_refuse(item, name, "integers");
    }
    PyObject *number = PyNumber_Index(item);
    if (number == NULL) {
        return -1;
    }
    int overflow = 0; /* the only failure, as the object is an int */
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) {
        PyErr_Format(PyExc_IndexError, "%s has %S, which is not the number of a row",
                     name, number);
    }
    Py_DECREF(number);
    *out = value;
    return overflow == 0 ? 0 : -1;
}

/* Read `count` numbers of a tuple or a range into a new array. Returns 0, or -1 with an
 * exception. */
static int
read_all(PyObject *items, Py_ssize_t count, const char *name, cm_given_rows *out)
{
    PyObject *dtype = cm_numpy_dtype_of_letter('q');
    if (dtype != NULL) {
        const int64_t shape = count;
        out->count = (uint64_t)count;
        out->array = cm_numpy_empty(dtype, 1, &shape);
    }
    Py_XDECREF(dtype);
    int result = out->array == NULL ? -1 : 0;
    int64_t *numbers = result == 0 ? cm_numpy_data(out->array) : NULL;
    for (Py_ssize_t i = 0; result == 0 && i < count; i++) {
        PyObject *item = PySequence_GetItem(items, i);
        result = item == NULL ? -1 : read_number(item, name, &numbers[i]);
        Py_XDECREF(item);
    }
    return result;
}

/* Read a list or a tuple by way of a tuple, because __index__() may change a list. A
 * range makes its numbers one by one, so only the memory for the array limits its
 * length. Returns 0, or -1 with an exception. */
static int
read_items(PyObject *object, const char *name, cm_given_rows *out)
{
    bool is_range = PyRange_Check(object);
    PyObject *items = is_range ? Py_NewRef(object) : PySequence_Tuple(object);
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t count = PySequence_Size(items);
    int result = count < 0 ? -1 : read_all(items, count, name, out);
    if (count < 0) { /* only the length of a range overflows */
        PyErr_Format(PyExc_IndexError,
                     "%s is %R, which has more numbers than any array has rows", name,
                     object);
    }
    Py_DECREF(items);
    return result;
}

/* -- arrays ------------------------------------------------------------------------- */

static int
check_dtype(PyObject *dtype, const char *name)
{
    char letter = cm_numpy_letter(dtype);
    if (letter == 'i' || letter == 'u') {
        return 0;
    }
    if (letter == 'b') {
        PyErr_Format(PyExc_TypeError,
                     "%s must be integers, not bools: pass numpy.flatnonzero(mask)",
                     name);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s must be integers, not %S", name, dtype);
    return -1;
}

static int
check_ndim(int ndim, const char *name)
{
    if (ndim == 1) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s must have one dimension, not %d: pass %s.ravel()", name, ndim,
                 name);
    return -1;
}

/* Take an array to which no unfinished work writes. Returns 0, or -1 with an exception.
 */
static int
take_array(PyObject *array, const char *name, cm_given_rows *out)
{
    PyObject *dtype = cm_numpy_dtype_of(array);
    if (check_dtype(dtype, name) < 0 || check_ndim(cm_numpy_ndim(array), name) < 0) {
        return -1;
    }
    if (cm_numpy_plain_kind(dtype) != 0) {
        out->array = Py_NewRef(array);
    }
    else { /* numbers in the other byte order are rare, so NumPy copies them */
        bool is_signed = cm_numpy_letter(dtype) == 'i';
        out->array = cm_numpy_cast_array(array, is_signed ? 'q' : 'Q');
    }
    if (out->array == NULL) {
        return -1;
    }
    cm_region layout;
    cm_numpy_layout(out->array, &layout);
    out->count = (uint64_t)layout.shape[0];
    return 0;
}

/* Copy a buffer to a new array of the host, and take that array. Transfers and streams
 * may still be writing the buffer, so the copy comes after their work. It also comes
 * after what `after` names, unless that is NULL. Returns 0, or -1 with an exception. */
static int
copy_buffer(cm_state *state, PyObject *memory, const char *name, PyObject *after,
            cm_given_rows *out)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)memory;
    PyObject *array =
        cm_numpy_empty(buffer->dtype, buffer->ndim, cm_buffer_shape(buffer));
    if (array == NULL) {
        return -1;
    }
    int result = after == NULL
                     ? cm_copy_now(state, NULL, array, memory, NULL, NULL)
                     : cm_copy_behind(state, NULL, array, memory, after, NULL);
    if (result == 0) {
        result = take_array(array, name, out);
    }
    Py_DECREF(array);
    return result;
}

static int
take_buffer(cm_state *state, PyObject *memory, const char *name, cm_given_rows *out)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)memory;
    if (check_dtype(buffer->dtype, name) < 0 || check_ndim(buffer->ndim, name) < 0) {
        return -1;
    }
    if (cm_kind_is_on_device(buffer->storage->copy_kind)) {
        out->count = (uint64_t)cm_buffer_shape(buffer)[0];
        out->on_device = Py_NewRef(memory);
        return 0;
    }
    return copy_buffer(state, memory, name, NULL, out);
}

int
cm_given_rows_init(cm_given_rows *self, cm_state *state, PyObject *object,
                   const char *name, cm_stream *stream)
{
    if (PyList_Check(object) || PyTuple_Check(object) || PyRange_Check(object)) {
        return read_items(object, name, self);
    }
    bool is_array = cm_numpy_is_array(object);
    if (is_array && cm_check_unmasked(object) < 0) {
        return -1;
    }
    if (is_array && cm_operand_storage_of(state, object) == NULL) {
        return take_array(object, name, self);
    }
    if (!cm_operand_is_memory(state, object)) {
        return cm_arg_refuse(object, name, expected);
    }
    PyObject *buffer = cm_asbuffer(state, object, stream);
    if (buffer == NULL) {
        return -1;
    }
    int result = take_buffer(state, buffer, name, self);
    Py_DECREF(buffer);
    return result;
}

void
cm_given_rows_fini(cm_given_rows *self)
{
    Py_CLEAR(self->array);
    Py_CLEAR(self->on_device);
}

int
cm_given_rows_fetch(cm_given_rows *self, cm_state *state, const char *name,
                    PyObject *after)
{
    int result = copy_buffer(state, self->on_device, name, after, self);
    Py_CLEAR(self->on_device);
    return result;
}

cm_integers
cm_given_rows_integers(const cm_given_rows *self)
{
    cm_region layout;
    cm_numpy_layout(self->array, &layout);
    return (cm_integers){
        .first = cm_numpy_data(self->array),
        .stride = layout.strides[0],
        .nbytes = (int)layout.itemsize,
        .is_signed = cm_numpy_letter(cm_numpy_dtype_of(self->array)) == 'i',
    };
}
