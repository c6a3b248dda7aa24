/* SPDX-License-Identifier: Apache-2.0 */
/* Read the arguments of __dlpack__(). */
#include "python/protocols/dlpack_request.h"

#include "python/core/arguments.h"

static int
read_pair(PyObject *object, const char *name, int64_t *first, int64_t *second)
{
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 2) {
        PyErr_Format(PyExc_TypeError, "%s must be None or a tuple of two ints, not %R",
                     name, object);
        return -1;
    }
    if (cm_arg_int64(PyTuple_GetItem(object, 0), name, first) < 0) {
        return -1;
    }
    return cm_arg_int64(PyTuple_GetItem(object, 1), name, second);
}

static int
read_max_version(PyObject *object, cm_dlpack_request *out)
{
    int64_t major;
    int64_t minor;
    out->versioned = false;
    out->minor = 0;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (read_pair(object, "max_version", &major, &minor) < 0) {
        return -1;
    }
    out->versioned = major >= CM_DL_MAJOR;
    bool newest = major > CM_DL_MAJOR || minor > CM_DL_MINOR;
    out->minor = newest ? (uint32_t)CM_DL_MINOR : (uint32_t)(minor < 0 ? 0 : minor);
    return 0;
}

static int
read_device(PyObject *object, cm_dlpack_request *out)
{
    int64_t type;
    int64_t id;
    out->has_device = object != NULL && object != Py_None;
    if (!out->has_device) {
        return 0;
    }
    if (read_pair(object, "dl_device", &type, &id) < 0) {
        return -1;
    }
    if (type < 0 || type > INT32_MAX || id < 0 || id > INT32_MAX) {
        PyErr_Format(PyExc_BufferError, "dl_device %R is no device", object);
        return -1;
    }
    out->device = (cm_dl_device){(int32_t)type, (int32_t)id};
    return 0;
}

int
cm_dlpack_refuse_stream(int64_t stream)
{
    PyErr_Format(PyExc_ValueError,
                 "stream=%lld: CUDA streams are None, -1 (do not wait), 1 (legacy "
                 "default), 2 (per-thread default) or a handle; 0 is ambiguous",
                 (long long)stream);
    return -1;
}

int
cm_dlpack_read_request(PyObject *const *values, cm_dlpack_request *out)
{
    PyObject *stream = values[0];
    PyObject *copy = values[3];
    out->has_stream = stream != NULL && stream != Py_None;
    out->stream = 0;
    out->copy = -1;
    if (out->has_stream && cm_arg_int64(stream, "stream", &out->stream) < 0) {
        return -1;
    }
    if (out->stream < -1) {
        return cm_dlpack_refuse_stream(out->stream);
    }
    if (read_max_version(values[1], out) < 0 || read_device(values[2], out) < 0) {
        return -1;
    }
    if (copy != NULL && copy != Py_None) {
        bool wanted;
        if (cm_arg_bool(copy, "copy", &wanted) < 0) {
            return -1;
        }
        out->copy = wanted ? 1 : 0;
    }
    return 0;
}
