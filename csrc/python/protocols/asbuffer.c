/* SPDX-License-Identifier: Apache-2.0 */
/* Any exporter to a Buffer: the order in which protocols are tried. */
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

bool
cm_object_is_exporter(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    return !cm_numpy_is_array(object) && !cm_numpy_is_scalar(object)
           && (PyObject_HasAttrString(type, "__dlpack__")
               || PyObject_HasAttrString(type, "__cuda_array_interface__"));
}

PyObject *
cm_import_object(cm_state *state, PyObject *object, cm_stream *stream)
{
    return cm_import_object_short(state, object, stream, 0);
}

static PyObject *
import_any(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    if (cm_buffer_check(state, object)) {
        return cm_buffer_check_open((cm_buffer *)(void *)object) < 0
                   ? NULL
                   : Py_NewRef(object);
    }
    /* NumPy's own arrays: datetimes and structures too, which DLPack cannot describe */
    if (cm_numpy_is_array(object)) {
        return cm_import_array(state, object);
    }
    PyObject *buffer = cm_import_dlpack(state, object, stream, unasked);
    if (buffer == Py_NotImplemented) {
        Py_DECREF(buffer);
        buffer = cm_import_array_interface(state, object, stream);
    }
    if (buffer == Py_NotImplemented) {
        Py_DECREF(buffer);
        buffer = cm_import_buffer(state, object);
    }
    if (buffer == Py_NotImplemented) {
        Py_DECREF(buffer);
        PyErr_Format(
            PyExc_TypeError,
            "an object of type %R exports no memory: expected a Buffer, a NumPy "
            "array, or an object with DLPack, __cuda_array_interface__ or the "
            "buffer protocol",
            (PyObject *)Py_TYPE(object));
        return NULL;
    }
    return buffer;
}

PyObject *
cm_import_object_short(cm_state *state, PyObject *object, cm_stream *stream,
                       uint64_t unasked)
{
    cm_state_enter(state); /* what one protocol said of the memory must hold to the end
                            */
    PyObject *buffer = import_any(state, object, stream, unasked);
    cm_state_leave(state);
    return buffer;
}

PyDoc_STRVAR(asbuffer_doc,
             "asbuffer(obj, *, stream=None)\n--\n\n"
             "View the memory of any exporter as a Buffer, without a copy.\n\n"
             "Parameters\n----------\n"
             "obj : object\n"
             "    A Buffer (returned as it is), a NumPy array, a DLPack exporter or capsule,\n"
             "    an object with ``__cuda_array_interface__``, or anything with the buffer\n"
             "    protocol; tried in this order.\n"
             "stream : stream, optional\n"
             "    Where device memory will be used first; default: the current stream of\n"
             "    its device.\n\n"
             "Returns\n-------\n"
             "Buffer\n"
             "    Of the type that tells where the memory is: HostBuffer for ordinary memory,\n"
             "    PinnedBuffer for page-locked memory, and so on. It keeps `obj`, or what\n"
             "    `obj` handed out, alive.\n\n"
             "Raises\n------\n"
             "TypeError\n"
             "    `obj` exports no memory, or elements that are Python objects.\n"
             "ValueError\n"
             "    The description contradicts itself or what the driver knows of the address.\n"
             "BufferError\n"
             "    A DLPack version, device or element type that cumem cannot use.\n\n"
             "**Ordered after** the exporter's pending work: `stream` waits for it.\n");

static PyObject *
import_with(cm_state *state, PyObject *object, PyObject *stream_object)
{
    cm_stream *stream = NULL;
    if (stream_object != NULL && stream_object != Py_None) {
        stream = cm_stream_from_object(state, stream_object, -1);
        if (stream == NULL) {
            return NULL;
        }
    }
    PyObject *buffer = cm_import_object(state, object, stream);
    cm_stream_give(state, stream);
    return buffer;
}

static PyObject *
asbuffer(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", "stream", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[2];
    if (cm_args_parse("asbuffer", args, nargs, kwnames, names, 1, 1, values) < 0
        || cm_state_runtime(state) == NULL) {
        return NULL;
    }
    return import_with(state, values[0], values[1]);
}

PyMethodDef cm_asbuffer_methods[] = {
    {"asbuffer", (PyCFunction)(void (*)(void))asbuffer, METH_FASTCALL | METH_KEYWORDS,
     asbuffer_doc},
    {NULL, NULL, 0, NULL},
};
