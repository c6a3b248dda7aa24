/* SPDX-License-Identifier: Apache-2.0 */
/* A buffer as a NumPy array, and what follows from that: numbers. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"

const char cm_buffer_numpy_doc[] =
    "numpy($self, /)\n"
    "--\n"
    "\n"
    "View the buffer as a NumPy array, without a copy.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "numpy.ndarray\n"
    "    Same shape, strides and dtype, read-only if the buffer is. The array keeps "
    "the\n"
    "    memory alive, and `free` is refused while it lives.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    The memory is on the device: copy it with `to_numpy`, or use a managed "
    "buffer,\n"
    "    which both sides can read.\n"
    "ValueError\n"
    "    The buffer is closed.\n"
    "CudaError\n"
    "    A transfer into the buffer failed.\n"
    "RuntimeError\n"
    "    In a child made by ``fork``: of managed memory, where a transfer was writing, "
    "or\n"
    "    where there was no room for a copy.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished transfers into the memory are done (GIL released, "
    "Ctrl-C\n"
    "works).\n"
    "Ordered after: those transfers; not after kernels of other libraries on managed "
    "or\n"
    "mapped memory, for which a stream must be synchronised.\n";

static int
refuse_device(cm_buffer *self, const char *what)
{
    if (Py_TYPE((PyObject *)self) != self->state->device_buffer_type) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "%s: the host cannot read device memory; copy it first, with "
                 "buf.to_numpy() or cumem.asnumpy(buf), or use a managed buffer",
                 what);
    return -1;
}

/* The bytes that the buffer spans, as a flat buffer of the same storage: what can
 * export dtypes that have no buffer format. */
static PyObject *
flat_span(cm_buffer *self)
{
    int64_t low;
    int64_t high;
    if (cm_buffer_bounds(self, &low, &high) < 0) {
        return NULL;
    }
    int64_t shape[1] = {high - low};
    return cm_buffer_new_view(self, NULL, self->offset + low, self->state->uint8_dtype,
                              1, shape, NULL);
}

/* A memoryview counts as an export until the last array over it is gone; through it the
 * owner of the array can be found. */
static PyObject *
export_for_numpy(cm_buffer *self)
{
    PyObject *owner = PyMemoryView_FromObject((PyObject *)self);
    if (owner == NULL
        && (PyErr_ExceptionMatches(PyExc_ValueError)
            || PyErr_ExceptionMatches(PyExc_BufferError))) {
        PyErr_Clear();
        PyObject *span = flat_span(self);
        if (span != NULL) {
            owner = PyMemoryView_FromObject(span);
            Py_DECREF(span);
        }
    }
    if (owner != NULL) {
        self->storage->view_count--; /* counted while it lives, not merely remembered */
    }
    return owner;
}

PyObject *
cm_buffer_numpy(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0 || refuse_device(self, "numpy()") < 0
        || cm_buffer_check_inherited(self) < 0
        || cm_storage_wait(self->storage, false) < 0
        || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    PyObject *owner = export_for_numpy(self);
    if (owner == NULL) {
        return NULL;
    }
    PyObject *array =
        cm_numpy_view(owner, cm_buffer_host(self), self->dtype, self->ndim,
                      cm_buffer_shape(self), cm_buffer_strides(self), self->readonly);
    Py_DECREF(owner);
    return array;
}

const char cm_buffer_array_doc[] =
    "__array__($self, /, dtype=None, *, copy=None)\n"
    "--\n"
    "\n"
    "NumPy's protocol: the array of `numpy`, or a copy of it.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dtype : dtype_like, optional\n"
    "    Converts, which copies, if it differs.\n"
    "copy : bool, optional\n"
    "    True always copies, False never does.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    A copy is needed and `copy` is False, or the buffer is closed.\n"
    "TypeError\n"
    "    The memory is a device's: NumPy cannot read it in place.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished transfers into the memory are done.\n"
    "Ordered after: those transfers.\n";

static PyObject *
convert_array(PyObject *array, PyObject *dtype, PyObject *copy)
{
    bool wanted_copy = false;
    bool is_asked = copy != NULL && copy != Py_None;
    if (is_asked && cm_arg_bool(copy, "copy", &wanted_copy) < 0) {
        return NULL;
    }
    if (dtype != NULL && dtype != Py_None) {
        PyObject *wanted = cm_numpy_dtype(dtype);
        if (wanted == NULL) {
            return NULL;
        }
        PyObject *has = PyObject_GetAttrString(array, "dtype");
        int same = has == NULL ? -1 : PyObject_RichCompareBool(has, wanted, Py_EQ);
        Py_XDECREF(has);
        PyObject *converted = NULL;
        if (same == 0 && is_asked && !wanted_copy) {
            PyErr_SetString(PyExc_ValueError, "another dtype needs a copy");
        }
        else if (same == 0) {
            converted = PyObject_CallMethod(array, "astype", "O", wanted);
        }
        Py_DECREF(wanted);
        if (same != 1) {
            return converted;
        }
    }
    if (wanted_copy) {
        return PyObject_CallMethod(array, "copy", NULL);
    }
    return Py_NewRef(array);
}

PyObject *
cm_buffer_array(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "copy", NULL};
    PyObject *values[2];
    if (cm_args_parse("__array__", args, nargs, kwnames, names, 1, 0, values) < 0) {
        return NULL;
    }
    PyObject *array = cm_buffer_numpy(object, NULL);
    if (array == NULL) {
        return NULL;
    }
    PyObject *result = convert_array(array, values[0], values[1]);
    Py_DECREF(array);
    return result;
}

/* Without these Python would read the bytes of a buffer as digits. */
static PyObject *
as_number(PyObject *object, PyObject *(*convert)(PyObject *))
{
    PyObject *array = cm_buffer_numpy(object, NULL);
    PyObject *result = array == NULL ? NULL : convert(array);
    Py_XDECREF(array);
    return result;
}

PyObject *
cm_buffer_int(PyObject *object)
{
    return as_number(object, PyNumber_Long);
}

PyObject *
cm_buffer_float(PyObject *object)
{
    return as_number(object, PyNumber_Float);
}

const char cm_buffer_complex_doc[] =
    "__complex__($self, /)\n"
    "--\n"
    "\n"
    "The only element, for ``complex(buf)``.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    There is not one element, it is no number, or the memory is a device's.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished transfers into the memory are done.\n"
    "Ordered after: those transfers.\n";

static PyObject *
to_complex(PyObject *array)
{
    return PyObject_CallFunctionObjArgs((PyObject *)&PyComplex_Type, array, NULL);
}

PyObject *
cm_buffer_complex(PyObject *object, PyObject *unused CM_UNUSED)
{
    return as_number(object, to_complex);
}
