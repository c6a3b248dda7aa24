/* SPDX-License-Identifier: Apache-2.0 */
/* From a foreign stream object or handle to a counted record. */
#include "python/device/stream_convert.h"

#include <string.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"

#define FOREIGN_STREAM                                                                 \
    "a Stream, an int or an object with __cuda_stream__, .cuda_stream, .ptr or "       \
    ".handle"

/* TypeError that says what `argument` may be; always -1. */
static int
refuse(PyObject *object, const char *argument)
{
    const char *expected = FOREIGN_STREAM;
    if (strcmp(argument, "stream") == 0) {
        expected = "None, " FOREIGN_STREAM;
    }
    else if (strcmp(argument, "other") == 0) {
        expected = "an Event, a Transfer, " FOREIGN_STREAM;
    }
    return cm_arg_refuse(object, argument, expected);
}

/* 1 and a new reference, 0 when there is no such attribute, -1 on another failure. */
static int
find_attribute(PyObject *object, const char *name, PyObject **out)
{
    *out = PyObject_GetAttrString(object, name);
    if (*out != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

static int
has_attribute(PyObject *object, const char *name)
{
    PyObject *value;
    int found = find_attribute(object, name, &value);
    Py_XDECREF(value);
    return found;
}

/* `number` is an int. */
static int
handle_from_int(PyObject *number, const char *name, uint64_t *out)
{
    unsigned long long handle = PyLong_AsUnsignedLongLong(number);
    if (handle == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError,
                         "%s: a stream handle is an int from 0 to 2**64 - 1, not %R",
                         name, number);
        }
        return -1;
    }
    *out = handle;
    return 0;
}

/* A handle as libraries keep it: an int, a ctypes pointer (.value, None for 0) or
 * something that turns into an int. `name` says whose value it is. */
static int
handle_from_value(PyObject *value, const char *name, uint64_t *out)
{
    PyObject *inner;
    int found = PyLong_Check(value) ? 0 : find_attribute(value, "value", &inner);
    if (found < 0) {
        return -1;
    }
    if (found == 0) {
        inner = value;
        Py_INCREF(inner);
    }
    int result = -1;
    if (found == 1 && inner == Py_None) {
        *out = 0;
        result = 0;
    }
    else if (PyBool_Check(inner) || PyFloat_Check(inner) || PyUnicode_Check(inner)
             || PyBytes_Check(inner) || PyByteArray_Check(inner)
             || (!PyIndex_Check(inner) && has_attribute(inner, "__int__") <= 0)) {
        if (!PyErr_Occurred()) {
            cm_arg_refuse(inner, name, "an int");
        }
    }
    else {
        PyObject *number = PyNumber_Long(inner);
        if (number != NULL) {
            result = handle_from_int(number, name, out);
            Py_DECREF(number);
        }
    }
    Py_DECREF(inner);
    return result;
}

/* `method` is the bound __cuda_stream__: call it and read (version 0, handle). */
static int
handle_from_protocol(PyObject *method, uint64_t *out)
{
    if (!PyCallable_Check(method)) {
        return cm_arg_refuse(method, "__cuda_stream__", "a method");
    }
    PyObject *pair = PyObject_CallNoArgs(method);
    if (pair == NULL) {
        return -1;
    }
    int result = -1;
    uint64_t version;
    if (!PyTuple_Check(pair)) {
        cm_arg_refuse(pair, "the answer of __cuda_stream__()", "a tuple (0, handle)");
    }
    else if (PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_ValueError,
                     "__cuda_stream__() must answer a tuple (0, handle), not %zd items",
                     PyTuple_Size(pair));
    }
    else if (handle_from_value(PyTuple_GetItem(pair, 0),
                               "the version __cuda_stream__()"
                               " answers",
                               &version)
             == 0) {
        if (version != 0) {
            PyErr_Format(
                PyExc_ValueError,
                "__cuda_stream__() speaks version %llu: only version 0 is known",
                (unsigned long long)version);
        }
        else {
            result = handle_from_value(PyTuple_GetItem(pair, 1),
                                       "the handle __cuda_stream__() answers", out);
        }
    }
    Py_DECREF(pair);
    return result;
}

/* .ptr and .handle are common names: an event, an array or a buffer has them too, and
 * the driver may crash on what is no stream. 1 when `object` may be one, 0, or -1. */
static int
may_be_stream(const cm_state *state, PyObject *object)
{
    if (PyObject_TypeCheck(object, state->buffer_type)
        || Py_TYPE(object) == state->event_type) {
        return 0;
    }
    static const char *const array_marks[] = {"__dlpack__", "__cuda_array_interface__",
                                              "__array_interface__"};
    for (size_t i = 0; i < sizeof array_marks / sizeof *array_marks; i++) {
        int found = has_attribute(object, array_marks[i]);
        if (found != 0) {
            return found < 0 ? -1 : 0;
        }
    }
    PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type == NULL) {
        return -1;
    }
    PyObject *event = PyUnicode_FromString("Event");
    int is_event = event == NULL ? -1 : PyUnicode_Contains(type, event);
    Py_XDECREF(event);
    Py_DECREF(type);
    return is_event < 0 ? -1 : !is_event;
}

static int
handle_from_attribute(const cm_state *state, PyObject *object, const char *argument,
                      uint64_t *out)
{
    static const char *const names[] = {".cuda_stream", ".ptr", ".handle"};
    int possible = has_attribute(object, names[0] + 1);
    if (possible == 0) {
        possible = may_be_stream(state, object);
    }
    for (size_t i = 0; possible == 1 && i < sizeof names / sizeof *names; i++) {
        PyObject *value;
        int found = find_attribute(object, names[i] + 1, &value);
        if (found < 0) {
            return -1;
        }
        if (found == 1) {
            int result = handle_from_value(value, names[i], out);
            Py_DECREF(value);
            return result;
        }
    }
    return possible < 0 ? -1 : refuse(object, argument);
}

/* *keep: the record must keep `object` alive (a bare int keeps nothing). */
static int
read_handle(const cm_state *state, PyObject *object, const char *argument,
            uint64_t *handle, bool *keep)
{
    *keep = false;
    if (PyBool_Check(object) || PyUnicode_Check(object) || PyFloat_Check(object)) {
        return refuse(object, argument);
    }
    if (PyLong_Check(object)) {
        return handle_from_int(object, argument, handle);
    }
    PyObject *method;
    int found = find_attribute(object, "__cuda_stream__", &method);
    if (found < 0) {
        return -1;
    }
    *keep = true;
    if (found == 1) {
        int result = handle_from_protocol(method, handle);
        Py_DECREF(method);
        return result;
    }
    if (Py_TYPE(object) != state->device_type && PyIndex_Check(object)) { /* NumPy's
                                                                             ints */
        PyObject *number = PyNumber_Index(object);
        if (number != NULL) {
            *keep = false;
            int result = handle_from_int(number, argument, handle);
            Py_DECREF(number);
            return result;
        }
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear(); /* e.g. an array of two elements */
    }
    return handle_from_attribute(state, object, argument, handle);
}

/* The device that the object itself names (torch: device_index, CuPy: device_id, where
 * -1 is "the current one"); -1 when it does not say. -2 with an exception. */
static int
named_device(const cm_runtime *rt, PyObject *object)
{
    static const char *const names[] = {"device_index", "device_id"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        PyObject *value;
        int found = find_attribute(object, names[i], &value);
        if (found < 0) {
            return -2;
        }
        if (found == 1) {
            int overflow; /* too large: not an index either */
            long long index = PyLong_Check(value)
                                  ? PyLong_AsLongLongAndOverflow(value, &overflow)
                                  : -1;
            Py_DECREF(value);
            if (index >= 0 && index < rt->device_count) {
                return (int)index;
            }
        }
    }
    return -1;
}

/* The device of a handle: what the object says, else the driver, else the caller. */
static int
resolve_device(cm_state *state, cm_runtime *rt, PyObject *object, uint64_t handle,
               int device)
{
    int named = PyLong_Check(object) ? -1 : named_device(rt, object);
    if (named != -1) {
        return named;
    }
    if (handle > CM_STREAM_PER_THREAD && cm_runtime_has(rt, CM_OP_stream_get_device)) {
        cm_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cm_rt_stream_get_device(rt, handle, &named);
        Py_END_ALLOW_THREADS
        if (!cm_is_ok(status)) {
            cm_py_raise(state, status, "looking up the device of a foreign stream");
            return -2;
        }
        return named;
    }
    return device >= 0 ? device : state->current_device;
}

static cm_stream *
wrap(cm_state *state, cm_runtime *rt, PyObject *object, const char *argument,
     int device)
{
    uint64_t handle = 0;
    bool keep;
    if (read_handle(state, object, argument, &handle, &keep) < 0) {
        return NULL;
    }
    if (handle == 0) {
        handle = CM_STREAM_LEGACY;
    }
    device = resolve_device(state, rt, object, handle, device);
    if (device < 0) {
        return NULL;
    }
    cm_deferred *owner = NULL;
    if (keep) {
        owner = cm_deferred_new(state, object);
        if (owner == NULL) {
            return NULL;
        }
    }
    cm_stream *record;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_wrap(rt, device, handle, owner, owner ? cm_deferred_add : NULL,
                            &record);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        if (owner != NULL) {
            cm_deferred_add(owner);
        }
        cm_py_raise(state, status, "looking up a foreign stream");
        return NULL;
    }
    return record;
}

cm_stream *
cm_stream_from_foreign(cm_state *state, PyObject *object, const char *argument,
                       int device)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    cm_state_enter(state); /* the object's own code runs: `rt` must outlive it */
    cm_stream *record = wrap(state, rt, object, argument, device);
    if (record == NULL) {
        cm_state_leave(state);
    }
    return record; /* on loan: the count goes with it */
}
