/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/rows_chosen.h"

#include "python/buffer/buffer_object.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/protocols.h"

static const char expected[] = "integers: a list, a range or a one-dimensional array";

static int
make_room(cm_state *state, cm_chosen_rows *out, uint64_t count)
{
    return cm_py_check(state, cm_chosen_rows_init(out, count), "while reading rows");
}

/* -- lists -------------------------------------------------------------------------- */

/* Read one number, which may be any object with __index__() but a bool: True and False
 * are most likely a mask, which is another way of choosing rows. */
static int
read_number(PyObject *item, const char *name, int64_t *out)
{
    if (PyBool_Check(item) || cm_numpy_is_bool(item)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be integers, not bools: pass numpy.flatnonzero(mask)",
                     name);
        return -1;
    }
    if (!PyIndex_Check(item)) {
        return cm_arg_refuse(item, name, expected);
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

static int
read_items(cm_state *state, PyObject *object, const char *name, cm_chosen_rows *out)
{
    PyObject *items = PySequence_Tuple(object); /* __index__() may change a list */
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(items);
    int result = make_room(state, out, (uint64_t)count);
    for (Py_ssize_t i = 0; result == 0 && i < count; i++) {
        result = read_number(PyTuple_GetItem(items, i), name, &out->given[i]);
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

/* Read an array that nobody else writes now. */
static int
read_array(cm_state *state, PyObject *array, const char *name, cm_chosen_rows *out)
{
    PyObject *dtype = cm_numpy_dtype_of(array);
    if (check_dtype(dtype, name) < 0 || check_ndim(cm_numpy_ndim(array), name) < 0) {
        return -1;
    }
    bool is_signed = cm_numpy_letter(dtype) == 'i';
    PyObject *plain;
    if (cm_numpy_plain_kind(dtype) != 0) {
        plain = Py_NewRef(array);
    }
    else { /* bytes in the other order are rare enough for a copy by NumPy */
        plain = cm_numpy_cast_array(array, is_signed ? 'q' : 'Q');
    }
    if (plain == NULL) {
        return -1;
    }
    cm_region layout;
    cm_numpy_layout(plain, &layout);
    int result = make_room(state, out, (uint64_t)layout.shape[0]);
    if (result == 0) {
        cm_chosen_rows_read(out, (cm_integers){.first = cm_numpy_data(plain),
                                               .stride = layout.strides[0],
                                               .nbytes = (int)layout.itemsize,
                                               .is_signed = is_signed});
    }
    Py_DECREF(plain);
    return result;
}

/* Read memory that transfers and streams may still be writing, by a copy that waits for
 * them, and for those of `after`; or only hand over memory of a device. */
static int
read_buffer(cm_state *state, PyObject *memory, const char *name, PyObject *after,
            cm_chosen_rows *out, PyObject **on_device)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)memory;
    if (check_dtype(buffer->dtype, name) < 0 || check_ndim(buffer->ndim, name) < 0) {
        return -1;
    }
    if (on_device != NULL && cm_kind_is_on_device(buffer->storage->copy_kind)) {
        cm_chosen_rows_init_all(out, (uint64_t)cm_buffer_shape(buffer)[0]);
        *on_device = Py_NewRef(memory);
        return 0;
    }
    PyObject *array =
        cm_numpy_empty(buffer->dtype, buffer->ndim, cm_buffer_shape(buffer));
    if (array == NULL) {
        return -1;
    }
    int result = after == NULL ? cm_copy_now(state, array, memory, NULL, NULL)
                               : cm_copy_behind(state, array, memory, after, NULL);
    if (result == 0) {
        result = read_array(state, array, name, out);
    }
    Py_DECREF(array);
    return result;
}

int
cm_chosen_rows_fetch(cm_state *state, PyObject *buffer, const char *name,
                     PyObject *after, cm_chosen_rows *out)
{
    return read_buffer(state, buffer, name, after, out, NULL);
}

int
cm_chosen_rows_from(cm_state *state, PyObject *object, const char *name,
                    cm_stream *stream, cm_chosen_rows *out, PyObject **on_device)
{
    *on_device = NULL;
    cm_chosen_rows_init_all(out, 0);
    if (PyList_Check(object) || PyTuple_Check(object) || PyRange_Check(object)) {
        return read_items(state, object, name, out);
    }
    bool is_array = cm_numpy_is_array(object);
    if (is_array && cm_check_unmasked(object) < 0) {
        return -1;
    }
    if (is_array && cm_operand_storage_of(state, object) == NULL) {
        return read_array(state, object, name, out);
    }
    if (!cm_operand_is_memory(state, object)) {
        return cm_arg_refuse(object, name, expected);
    }
    PyObject *buffer = cm_asbuffer(state, object, stream);
    if (buffer == NULL) {
        return -1;
    }
    int result = read_buffer(state, buffer, name, NULL, out, on_device);
    Py_DECREF(buffer);
    return result;
}
