/* SPDX-License-Identifier: Apache-2.0 */
/* A buffer as a collection: iterating gives the views that indexing gives, and what
 * would need its bytes (`in`, truth) reads them where the host can or says what to do.
 */
#include "python/buffer/methods.h"
#include "python/buffer/views.h"

/* map(buffer.__getitem__, range(start, stop, step)): lazy, and it holds the buffer. */
static PyObject *
iterate(PyObject *object, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t step)
{
    PyObject *range =
        PyObject_CallFunction((PyObject *)&PyRange_Type, "nnn", start, stop, step);
    PyObject *get =
        range == NULL ? NULL : PyObject_GetAttrString(object, "__getitem__");
    PyObject *views = NULL;
    if (get != NULL) {
        views = PyObject_CallFunctionObjArgs((PyObject *)&PyMap_Type, get, range, NULL);
    }
    Py_XDECREF(get);
    Py_XDECREF(range);
    return views;
}

/* The length of the first axis, or -1 with an exception. */
static Py_ssize_t
check_iterable(PyObject *object)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return -1;
    }
    if (self->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "iteration over a buffer without dimensions");
        return -1;
    }
    return (Py_ssize_t)cm_buffer_shape(self)[0];
}

PyObject *
cm_buffer_iter(PyObject *object)
{
    Py_ssize_t length = check_iterable(object);
    return length < 0 ? NULL : iterate(object, 0, length, 1);
}

const char cm_buffer_reversed_doc[] =
    "__reversed__($self, /)\n"
    "--\n"
    "\n"
    "Iterate over the views ``buf[-1]``, ``buf[-2]``, … of the first axis.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    The buffer has no dimensions.\n"
    "ValueError\n"
    "    The buffer is closed.\n";

PyObject *
cm_buffer_reversed(PyObject *object, PyObject *unused CM_UNUSED)
{
    Py_ssize_t length = check_iterable(object);
    return length < 0 ? NULL : iterate(object, length - 1, -1, -1);
}

/* Without this `in` would compare the views one by one, by identity. */
int
cm_buffer_contains(PyObject *object, PyObject *value CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (Py_TYPE(object) == self->state->device_buffer_type) {
        PyErr_SetString(PyExc_TypeError,
                        "a buffer does not search its values; copy it to the host "
                        "first, as in cumem.array(buf, kind=\"pinned\"), and use "
                        "`value in buf.numpy()` on that");
    }
    else {
        PyErr_SetString(PyExc_TypeError,
                        "a buffer does not search its values; use `value in "
                        "buf.numpy()`");
    }
    return -1;
}

/* As NumPy's arrays: that of the only element. */
int
cm_buffer_bool(PyObject *object)
{
    const cm_buffer *self = (const cm_buffer *)object;
    uint64_t nbytes = cm_buffer_nbytes(self);
    if (nbytes != (uint64_t)self->itemsize) {
        PyErr_Format(PyExc_ValueError,
                     "the truth of a buffer of %llu elements is ambiguous; use "
                     "`buf is not None`, `buf.size > 0` or buf.numpy().any()",
                     (unsigned long long)(nbytes / (uint64_t)self->itemsize));
        return -1;
    }
    PyObject *array = cm_buffer_numpy(object, NULL);
    int truth = array == NULL ? -1 : PyObject_IsTrue(array);
    Py_XDECREF(array);
    return truth;
}
