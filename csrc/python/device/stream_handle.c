/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the handle of another library's stream, in whichever way that library gives it.
 *
 * Libraries do not agree on one way to give it:
 *
 *   __cuda_stream__()   newer objects answer a tuple (0, handle), where 0 is a version
 *   .cuda_stream        PyTorch
 *   an int              whoever has nothing but the handle
 *   .ptr                CuPy
 *   .handle             Numba, where it is a pointer of ctypes
 *
 * The ways are tried in this order. .ptr and .handle are common names: events, arrays
 * and buffers have them as well, and the driver may crash on a handle of something
 * else. So .ptr and .handle count only on objects that do not look like an event, an
 * array or a buffer. */
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/device/objects.h"

/* -- numbers ------------------------------------------------------------------------ */

/* Read a handle from an int. Returns 0, or -1 with ValueError, which calls the number
 * `name`. */
static int
from_int(PyObject *number, const char *name, uint64_t *out)
{
    *out = PyLong_AsUnsignedLongLong(number);
    if (*out != UINT64_MAX || PyErr_Occurred() == NULL) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Clear();
    return cm_package_refuse("interchange.foreign_stream", "refuse_number",
                             Py_BuildValue("(Os)", number, name));
}

/* Return 1 if int() may make a handle of the value, or 0 if not. int() reads texts and
 * floats as well, but nobody means these as handles. Returns -1 with an exception that
 * reading an attribute of the value raised. */
static int
may_be_number(PyObject *value)
{
    if (PyBool_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value)
        || PyBytes_Check(value) || PyByteArray_Check(value)) {
        return 0;
    }
    PyObject *method;
    int found = cm_arg_find_attribute(value, "__index__", &method);
    if (found == 0) {
        found = cm_arg_find_attribute(value, "__int__", &method);
    }
    if (found == 1) {
        Py_DECREF(method);
    }
    return found;
}

static int
from_number(PyObject *value, const char *name, uint64_t *out)
{
    int is_number = may_be_number(value);
    if (is_number < 0) {
        return -1;
    }
    if (is_number == 0) {
        return cm_arg_refuse(value, name, "an int");
    }
    PyObject *number = PyNumber_Long(value);
    if (number == NULL) {
        return -1;
    }
    int result = from_int(number, name, out);
    Py_DECREF(number);
    return result;
}

/* Read a handle from an int, from what turns into one, or from a pointer of ctypes,
 * whose .value is None for 0. Returns 0, or -1 with an exception. */
static int
from_value(PyObject *value, const char *name, uint64_t *out)
{
    if (PyLong_CheckExact(value)) {
        return from_int(value, name, out);
    }
    if (PyLong_Check(value)) {
        return from_number(value, name, out);
    }
    PyObject *inner;
    int found = cm_arg_find_attribute(value, "value", &inner);
    if (found < 0) {
        return -1;
    }
    if (found == 0) {
        return from_number(value, name, out);
    }
    int result = 0;
    *out = 0;
    if (inner != Py_None) {
        result = from_number(inner, name, out);
    }
    Py_DECREF(inner);
    return result;
}

/* -- ways to say it ----------------------------------------------------------------- */

/* Read a handle from the answer of __cuda_stream__(). Returns 0, or -1 with an
 * exception. */
static int
from_answer(PyObject *answer, uint64_t *out)
{
    if (!PyTuple_Check(answer)) {
        return cm_arg_refuse(answer, "the answer of __cuda_stream__()",
                             "a tuple (0, handle)");
    }
    if (PyTuple_Size(answer) != 2) {
        PyErr_Format(PyExc_ValueError,
                     "__cuda_stream__() must answer a tuple (0, handle), not %zd items",
                     PyTuple_Size(answer));
        return -1;
    }
    uint64_t version;
    if (from_value(PyTuple_GetItem(answer, 0), "the version __cuda_stream__() answers",
                   &version)
        < 0) {
        return -1;
    }
    if (version != 0) {
        PyErr_Format(PyExc_ValueError,
                     "__cuda_stream__() speaks version %llu: only version 0 is known",
                     (unsigned long long)version);
        return -1;
    }
    return from_value(PyTuple_GetItem(answer, 1),
                      "the handle __cuda_stream__() answers", out);
}

/* Each of the next functions tries one way. It returns 1 and the handle, or 0 if the
 * object does not offer this way, or -1 with an exception. */

static int
try_protocol(PyObject *object, uint64_t *out)
{
    PyObject *method;
    int found = cm_arg_find_attribute(object, "__cuda_stream__", &method);
    if (found <= 0) {
        return found;
    }
    int result = -1;
    if (!PyCallable_Check(method)) {
        (void)cm_arg_refuse(method, "__cuda_stream__", "a method");
    }
    else {
        PyObject *answer = PyObject_CallNoArgs(method);
        result = answer == NULL ? -1 : from_answer(answer, out);
        Py_XDECREF(answer);
    }
    Py_DECREF(method);
    return result < 0 ? -1 : 1;
}

/* `attribute` begins with a dot, as errors show it. */
static int
try_attribute(PyObject *object, const char *attribute, uint64_t *out)
{
    PyObject *value;
    int found = cm_arg_find_attribute(object, attribute + 1, &value);
    if (found <= 0) {
        return found;
    }
    int result = from_value(value, attribute, out);
    Py_DECREF(value);
    return result < 0 ? -1 : 1;
}

/* True if an integer may be meant as a handle. A Device has an index too, and so have
 * elements of buffers, and NumPy's bools before 2.3, but none of them is meant as a
 * handle. */
static bool
may_be_handle(const cm_state *state, PyObject *object)
{
    if (!PyIndex_Check(object) || cm_numpy_is_bool(object)
        || PyObject_TypeCheck(object, state->buffer_type)) {
        return false;
    }
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        if (state->devices[i] != NULL) { /* all Devices have the same type */
            return Py_TYPE(object) != Py_TYPE(state->devices[i]);
        }
    }
    return true;
}

/* Tries NumPy's integers, and all other objects that are integers by __index__(). */
static int
try_index(const cm_state *state, PyObject *object, const char *argument, uint64_t *out)
{
    if (!may_be_handle(state, object)) {
        return 0;
    }
    PyObject *number = PyNumber_Index(object);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        /* An array of two elements, for example, has __index__(), which raises
         * TypeError. */
        PyErr_Clear();
        return 0;
    }
    int result = from_int(number, argument, out);
    Py_DECREF(number);
    return result < 0 ? -1 : 1;
}

/* Return 1 if .ptr and .handle of this object may be those of a stream, 0 if not, or -1
 * with an exception. */
static int
may_be_stream(const cm_state *state, PyObject *object)
{
    static const char *const array_marks[] = {"__dlpack__", "__cuda_array_interface__",
                                              "__array_interface__"};
    if (PyObject_TypeCheck(object, state->buffer_type)
        || Py_TYPE(object) == state->event_type) {
        return 0;
    }
    for (size_t i = 0; i < sizeof(array_marks) / sizeof(array_marks[0]); i++) {
        PyObject *value;
        int found = cm_arg_find_attribute(object, array_marks[i], &value);
        if (found < 0) {
            return -1;
        }
        if (found == 1) {
            Py_DECREF(value);
            return 0;
        }
    }
    PyObject *name = PyType_GetName(Py_TYPE(object));
    if (name == NULL) {
        return -1;
    }
    Py_ssize_t nbytes;
    const char *text = PyUnicode_AsUTF8AndSize(name, &nbytes);
    bool is_event = text != NULL && strstr(text, "Event") != NULL;
    PyErr_Clear(); /* the name may hold a surrogate, which UTF-8 cannot express */
    Py_DECREF(name);
    return is_event ? 0 : 1;
}

static int
try_common_names(const cm_state *state, PyObject *object, uint64_t *out)
{
    int found = may_be_stream(state, object);
    if (found == 1) {
        found = try_attribute(object, ".ptr", out);
        if (found == 0) {
            found = try_attribute(object, ".handle", out);
        }
    }
    return found;
}

/* -- any of them -------------------------------------------------------------------- */

int
cm_stream_read_handle(const cm_state *state, PyObject *object, const char *argument,
                      uint64_t *handle, bool *keep)
{
    *keep = false;
    if (PyLong_Check(object) && !PyBool_Check(object)) {
        return from_int(object, argument, handle);
    }
    int found = 0;
    if (!PyBool_Check(object) && !PyUnicode_Check(object) && !PyFloat_Check(object)) {
        *keep = true;
        found = try_protocol(object, handle);
        if (found == 0) {
            found = try_attribute(object, ".cuda_stream", handle);
        }
        if (found == 0) {
            found = try_index(state, object, argument, handle);
            *keep = found == 0;
        }
        if (found == 0) {
            found = try_common_names(state, object, handle);
        }
    }
    if (found == 0) {
        return cm_package_refuse("interchange.foreign_stream", "refuse_stream",
                                 Py_BuildValue("(Os)", object, argument));
    }
    return found < 0 ? -1 : 0;
}
