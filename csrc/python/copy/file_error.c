/* SPDX-License-Identifier: Apache-2.0 */
/* What was wrong with a file, as an exception. */
#include <string.h>

#include "python/copy/file_functions.h"

static PyObject *
make_end_error(const cm_file_failure *failure, const cm_file_range *range,
               PyObject *filename)
{
    uint64_t there =
        failure->offset > range->offset ? failure->offset - range->offset : 0;
    PyObject *text = PyUnicode_FromFormat(
        "%R ends early: %llu of the %llu bytes at offset %llu are there", filename,
        (unsigned long long)there, (unsigned long long)range->nbytes,
        (unsigned long long)range->offset);
    if (text == NULL) {
        return NULL;
    }
    PyObject *exception = PyObject_CallFunctionObjArgs(PyExc_EOFError, text, NULL);
    Py_DECREF(text);
    if (exception != NULL
        && PyObject_SetAttrString(exception, "filename", filename) < 0) {
        Py_CLEAR(exception);
    }
    return exception;
}

static PyObject *
make_system_error(const cm_file_failure *failure, bool writes, PyObject *filename)
{
    PyObject *exception = PyObject_CallFunction(PyExc_OSError, "isO", failure->error,
                                                strerror(failure->error), filename);
    PyObject *note =
        PyUnicode_FromFormat("while %s at offset %llu", writes ? "writing" : "reading",
                             (unsigned long long)failure->offset);
    PyObject *done = exception == NULL || note == NULL
                         ? NULL
                         : PyObject_CallMethod(exception, "add_note", "O", note);
    Py_XDECREF(note);
    if (done == NULL) {
        Py_CLEAR(exception);
    }
    Py_XDECREF(done);
    return exception;
}

PyObject *
cm_file_raise(const cm_file_failure *failure, const cm_file_range *ranges, bool writes,
              PyObject *filename)
{
    PyObject *exception =
        failure->at_end
            ? make_end_error(failure, &ranges[failure->range_index], filename)
            : make_system_error(failure, writes, filename);
    PyObject *offset =
        exception == NULL ? NULL : PyLong_FromUnsignedLongLong(failure->offset);
    if (offset != NULL && PyObject_SetAttrString(exception, "offset", offset) == 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    }
    Py_XDECREF(offset);
    Py_XDECREF(exception);
    return NULL;
}
