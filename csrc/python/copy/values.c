/* SPDX-License-Identifier: Apache-2.0 */
/* Makes Python objects of the values of a buffer: a number of a single element, or a
 * list, bytes or an array of all elements. NumPy makes the objects.
 *
 * A number that the host can read becomes a number of Python's at once. Any other
 * single element is first copied into an array of its own. So the memory of the buffer
 * is never exported for this, and the object that NumPy makes of the element may refer
 * to the array for as long as it likes.
 *
 * Memory that the host can read is read in place, once the work on it that cumem knows
 * of is done. Device memory is copied first, on the current stream. */
#include <string.h>

#include "python/buffer/methods.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/values.h"

static bool
is_on_device(const cm_buffer *self)
{
    return cm_kind_is_on_device(cm_buffer_kind(self));
}

/* Wait until the host may read the memory. This releases the GIL, and may run Python
 * code. Returns 0 if the buffer is still open afterwards, or -1 with an exception. */
static int
wait_until_readable(cm_buffer *self)
{
    if (cm_buffer_check_open(self) < 0 || cm_buffer_check_inherited(self) < 0
        || cm_storage_wait(self->storage, false) < 0
        || cm_buffer_note_side(self, false) < 0) {
        return -1;
    }
    return cm_buffer_check_open(self); /* shutdown() may have run during the wait */
}

/* -- one element -------------------------------------------------------------------------- */

/* Copy the element that lies `offset` bytes after the first one into a new array, which
 * has a single axis of length 1 or, if `ndim` is 0, no axes. Returns a new reference,
 * or NULL with an exception. */
static PyObject *
copy_element(cm_buffer *self, int64_t offset, int ndim)
{
    const int64_t one = 1;
    uint64_t address;
    uint64_t nbytes;
    if (is_on_device(self)) {
        PyObject *element =
            cm_buffer_new_view(self, NULL, self->offset + offset, self->dtype, ndim,
                               &one, &self->itemsize);
        if (element == NULL) {
            return NULL;
        }
        PyObject *copied = cm_buffer_to_numpy(element, NULL, 0, NULL);
        Py_DECREF(element);
        return copied;
    }
    PyObject *array = cm_numpy_empty(self->dtype, ndim, &one);
    if (array == NULL) {
        return NULL;
    }
    if (wait_until_readable(self) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    cm_numpy_place(array, &address, &nbytes);
    memcpy((void *)(uintptr_t)address, (char *)cm_buffer_host(self) + offset,
           (size_t)self->itemsize);
    return array;
}

/* Return the number type of the elements, if they can be read without making an array
 * of NumPy's. That is so for NumPy's own dtypes, in the processor's byte order, in
 * memory that the host can read. Returns CM_NUMBER_NONE for other elements. */
static cm_number
number_at_once(const cm_buffer *self)
{
    bool swapped;
    cm_number number = cm_numpy_number(self->dtype, &swapped);
    bool is_plain = !swapped && cm_dtypes[number].kind != 0;
    return is_plain && !is_on_device(self) ? number : CM_NUMBER_NONE;
}

/* Read the number that lies `offset` bytes after the first element. Returns a new
 * reference, or NULL with an exception. */
static PyObject *
read_number(cm_buffer *self, cm_number number, int64_t offset)
{
    unsigned char element[CM_ELEMENT_NBYTES];
    if (wait_until_readable(self) < 0) {
        return NULL;
    }
    memcpy(element, (char *)cm_buffer_host(self) + offset, (size_t)self->itemsize);
    return cm_value_from_element(number, element);
}

/* Convert a buffer of one element to a number, by calling `type` with an array of that
 * element. Returns a new reference, or NULL with an exception. */
static PyObject *
to_number(PyObject *object, PyTypeObject *type)
{
    cm_buffer *self = (cm_buffer *)object;
    int64_t size = cm_buffer_size(self);
    if (size != 1) { /* refused before anything is copied */
        PyErr_Format(PyExc_TypeError,
                     "only a buffer of one element is a number, and this has %lld",
                     (long long)size);
        return NULL;
    }
    cm_number known = number_at_once(self);
    bool is_real =
        known != CM_NUMBER_NONE && cm_number_class_of(known) <= CM_CLASS_FLOAT;
    /* NumPy converts complex numbers and elements of buffers with axes, so that its
     * warnings about these are given. */
    bool at_once = is_real && self->ndim == 0;
    PyObject *array = at_once ? read_number(self, known, 0)
                              : copy_element(self, 0, self->ndim > 0 ? 1 : 0);
    if (array == NULL || Py_TYPE(array) == type) {
        return array;
    }
    PyObject *number =
        PyObject_CallFunctionObjArgs((PyObject *)(void *)type, array, NULL);
    Py_DECREF(array);
    return number;
}

PyObject *
cm_buffer_int(PyObject *object)
{
    return to_number(object, &PyLong_Type);
}

PyObject *
cm_buffer_float(PyObject *object)
{
    return to_number(object, &PyFloat_Type);
}

PyObject *
cm_buffer_complex(PyObject *object, PyObject *unused CM_UNUSED)
{
    return to_number(object, &PyComplex_Type);
}

int
cm_buffer_bool(PyObject *object)
{
    cm_buffer *self = (cm_buffer *)object;
    int64_t size = cm_buffer_size(self);
    if (size != 1) {
        PyErr_Format(PyExc_ValueError,
                     "the truth of a buffer of %lld elements is ambiguous; use `buf is "
                     "not None`, `buf.size > 0` or %s.any()",
                     (long long)size,
                     is_on_device(self) ? "buf.to_numpy()" : "buf.numpy()");
        return -1;
    }
    PyObject *truth = to_number(object, &PyBool_Type);
    Py_XDECREF(truth);
    return truth == NULL ? -1 : truth == Py_True;
}

/* -- item() ------------------------------------------------------------------------------- */

/* Turn an index that may count from the end into one that counts from the beginning.
 * Returns -1 with IndexError if it is out of bounds. The message names the axis or, for
 * `axis` -1, the size. */
static int64_t
wrap(int64_t index, int64_t length, int axis)
{
    if (index >= -length && index < length) {
        return index < 0 ? index + length : index;
    }
    if (axis < 0) {
        PyErr_Format(PyExc_IndexError, "index %lld is out of bounds for size %lld",
                     (long long)index, (long long)length);
    }
    else {
        PyErr_Format(PyExc_IndexError,
                     "index %lld is out of bounds for axis %d with size %lld",
                     (long long)index, axis, (long long)length);
    }
    return -1;
}

/* Find the element by one index for each axis. Returns 0, or -1 with IndexError. */
static int
find_by_axes(const cm_buffer *self, const int64_t *index, int64_t *offset)
{
    for (int axis = 0; axis < self->ndim; axis++) {
        int64_t at = wrap(index[axis], cm_buffer_shape(self)[axis], axis);
        if (at < 0) {
            return -1;
        }
        *offset += at * cm_buffer_strides(self)[axis];
    }
    return 0;
}

/* Find the element by its number in C's order. Returns 0, or -1 with IndexError. */
static int
find_by_number(const cm_buffer *self, int64_t index, int64_t *offset)
{
    int64_t number = wrap(index, cm_buffer_size(self), -1);
    if (number < 0) {
        return -1;
    }
    for (int axis = self->ndim - 1; axis >= 0; axis--) {
        int64_t length = cm_buffer_shape(self)[axis];
        *offset += number % length * cm_buffer_strides(self)[axis];
        number /= length;
    }
    return 0;
}

/* Find the element that the arguments of item() name, and set *offset to the number of
 * bytes from the first element to it. Returns 0, or -1 with an exception. */
static int
find_element(const cm_buffer *self, PyObject *const *args, Py_ssize_t nargs,
             int64_t *offset)
{
    int64_t index[CM_MAX_NDIM];
    int count;
    *offset = 0;
    if (cm_arg_integers(args, nargs, "index", "ints or a sequence of ints", &count,
                        index)
        < 0) {
        return -1;
    }
    if (count == 0 && cm_buffer_size(self) == 1) {
        return 0;
    }
    if (count == 0) {
        PyErr_Format(PyExc_ValueError,
                     "item() without an index is for a buffer of size 1, and this has "
                     "%lld elements",
                     (long long)cm_buffer_size(self));
        return -1;
    }
    if (count == self->ndim) {
        return find_by_axes(self, index, offset);
    }
    if (count == 1) {
        return find_by_number(self, index[0], offset);
    }
    PyErr_Format(PyExc_ValueError,
                 "incorrect number of indices: %d for a buffer of %d dimensions", count,
                 self->ndim);
    return -1;
}

PyObject *
cm_buffer_item(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    cm_buffer *self = (cm_buffer *)object;
    int64_t offset;
    if (cm_buffer_check_open(self) < 0
        || find_element(self, args, nargs, &offset) < 0) {
        return NULL;
    }
    cm_number number = number_at_once(self);
    if (number != CM_NUMBER_NONE) {
        return read_number(self, number, offset);
    }
    PyObject *array = copy_element(self, offset, 0);
    if (array == NULL) {
        return NULL;
    }
    PyObject *item = cm_numpy_item(array);
    Py_DECREF(array);
    return item;
}

PyObject *
cm_buffer_format(PyObject *object, PyObject *spec)
{
    cm_buffer *self = (cm_buffer *)object;
    PyObject *text = NULL;
    if (!PyUnicode_Check(spec)) {
        (void)cm_arg_refuse(spec, "format_spec", "a str");
        return NULL;
    }
    if (PyUnicode_GetLength(spec) == 0) {
        return PyObject_Str(object);
    }
    if (self->ndim > 0) {
        PyErr_Format(PyExc_TypeError,
                     "the format %R is for one element, such as buf[0]; for many, "
                     "use np.array2string(buf.to_numpy())",
                     spec);
        return NULL;
    }
    PyObject *array = copy_element(self, 0, 0);
    PyObject *whole = PyTuple_New(0);
    PyObject *scalar = NULL;
    if (array != NULL && whole != NULL) {
        scalar = PyObject_GetItem(array, whole);
    }
    if (scalar != NULL) {
        text = PyObject_Format(scalar, spec);
    }
    Py_XDECREF(scalar);
    Py_XDECREF(whole);
    Py_XDECREF(array);
    return text;
}

/* -- all elements ------------------------------------------------------------------------- */

/* Return the object that `read` makes of an array of the values, or NULL with an
 * exception. `read` must not keep the array. */
static PyObject *
read_values(cm_buffer *self, cm_array_reader *read, PyObject *argument)
{
    if (!is_on_device(self)) {
        return cm_buffer_read(self, read, argument);
    }
    PyObject *array = cm_buffer_to_numpy((PyObject *)self, NULL, 0, NULL);
    if (array == NULL) {
        return NULL;
    }
    PyObject *answer = read(array, argument);
    Py_DECREF(array);
    return answer;
}

static PyObject *
read_list(PyObject *array, PyObject *argument CM_UNUSED)
{
    return PyObject_CallMethod(array, "tolist", NULL);
}

static PyObject *
read_bytes(PyObject *array, PyObject *argument CM_UNUSED)
{
    return PyObject_CallMethod(array, "tobytes", NULL);
}

static PyObject *
read_copy(PyObject *array, PyObject *argument CM_UNUSED)
{
    return PyObject_CallMethod(array, "copy", "s", "K");
}

static PyObject *
read_as(PyObject *array, PyObject *dtype)
{
    return PyObject_CallMethod(array, "astype", "O", dtype);
}

PyObject *
cm_buffer_tolist(PyObject *object, PyObject *unused CM_UNUSED)
{
    return read_values((cm_buffer *)object, read_list, NULL);
}

PyObject *
cm_buffer_bytes(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    if (is_on_device(self) || !cm_buffer_is_contiguous(self, false)) {
        return read_values(self, read_bytes, NULL);
    }
    if (wait_until_readable(self) < 0) {
        return NULL;
    }
    return PyBytes_FromStringAndSize(cm_buffer_host(self),
                                     (Py_ssize_t)cm_buffer_nbytes(self));
}

PyObject *
cm_buffer_array(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "copy", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *values[2];
    int copies = 0;
    int converts = 0;
    if (cm_args_parse("__array__", args, nargs, kwnames, names, 1, 0, values) < 0
        || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (is_on_device(self)) {
        (void)cm_package_refuse("buffers.views", "refuse_array",
                                PyTuple_Pack(1, object));
        return NULL;
    }
    if (cm_arg_is_given(values[1])) {
        copies = PyObject_IsTrue(values[1]);
    }
    if (copies >= 0 && cm_arg_is_given(values[0])) {
        converts = PyObject_RichCompareBool(self->dtype, values[0], Py_NE);
    }
    if (copies < 0 || converts < 0) {
        return NULL;
    }
    if (converts > 0 && cm_arg_is_given(values[1]) && copies == 0) {
        PyErr_SetString(PyExc_ValueError, "another dtype needs a copy");
        return NULL;
    }
    if (converts > 0) {
        return cm_buffer_read(self, read_as, values[0]);
    }
    if (copies > 0) {
        return cm_buffer_read(self, read_copy, NULL);
    }
    return cm_buffer_numpy(object, NULL);
}
