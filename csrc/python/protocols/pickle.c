/* SPDX-License-Identifier: Apache-2.0 */
/* Pickling of buffers that the host can read; with protocol 5 the bytes travel out of
 * band. */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"
#include "python/core/tuples.h"
#include "python/pool/allocate.h"
#include "python/protocols/protocols.h"

const char cm_buffer_reduce_ex_doc[] =
    "__reduce_ex__($self, protocol, /)\n"
    "--\n"
    "\n"
    "Pickle: kind, dtype, shape, flags, whether it is read-only, and bytes.\n"
    "\n"
    "With protocol 5 the bytes are a ``pickle.PickleBuffer`` over this memory, so that "
    "a\n"
    "``buffer_callback`` gets them without a copy; otherwise they are in the stream.\n"
    "Unpickling allocates memory of the same kind on the current device.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    The memory is on the device.\n"
    "ValueError\n"
    "    The buffer is closed.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished transfers into the memory are done.\n"
    "Ordered after: those transfers.\n";

PyObject *
cm_buffer_reduce_ex(PyObject *object, PyObject *protocol_object)
{
    cm_buffer *self = (cm_buffer *)object;
    const cm_storage *storage = self->storage;
    long protocol = PyLong_AsLong(protocol_object);
    if (protocol == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (Py_TYPE(object) == self->state->device_buffer_type) {
        PyErr_SetString(
            PyExc_TypeError,
            "a device buffer cannot be pickled: copy it to host memory first, "
            "e.g. to a buffer of empty_pinned()");
        return NULL;
    }
    cm_region region;
    cm_buffer_region(self, &region);
    bool is_c = cm_region_is_c_contiguous(&region);
    bool is_f = cm_region_is_f_contiguous(&region);
    const char *order = is_f && !is_c ? "F" : "C";
    unsigned flags =
        storage->pool != NULL ? storage->flags : cm_buffer_default_flags(storage->kind);
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    PyObject *rebuild =
        module == NULL ? NULL : PyObject_GetAttrString(module, "_rebuild");
    PyObject *array = rebuild == NULL ? NULL : cm_buffer_numpy(object, NULL);
    PyObject *data = array == NULL
                         ? NULL
                         : cm_package_call("pickling", "data_of",
                                           Py_BuildValue("(Ol)", array, protocol));
    PyObject *shape =
        data == NULL ? NULL : cm_tuple_from(cm_buffer_shape(self), self->ndim);
    PyObject *result = NULL;
    if (shape != NULL) {
        result = Py_BuildValue("O(sOOsIOO)", rebuild, cm_kind_name(storage->kind),
                               self->dtype, shape, order, flags, data,
                               self->readonly ? Py_True : Py_False);
    }
    Py_XDECREF(shape);
    Py_XDECREF(data);
    Py_XDECREF(array);
    Py_XDECREF(rebuild);
    return result;
}

/* -- back ----------------------------------------------------------------------------- */

PyDoc_STRVAR(rebuild_doc,
             "_rebuild($module, kind, dtype, shape, order, flags, data, readonly, /)\n"
             "--\n"
             "\n"
             "Unpickle a buffer: allocate it and copy `data`, a bytes-like object, into it.");

static int
parse_kind(PyObject *object, cm_kind *out)
{
    if (PyUnicode_Check(object)
        && PyUnicode_CompareWithASCIIString(object, "pageable") == 0) {
        *out = CM_KIND_PAGEABLE;
        return 0;
    }
    return cm_arg_kind(object, "kind", out);
}

/* Keep of the pickled flags what is one for the kind. */
static unsigned
sane_flags(cm_kind kind, int64_t flags)
{
    unsigned host = CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_WRITE_COMBINED;
    switch (kind) {
    case CM_KIND_PINNED:
        return (unsigned)flags & host;
    case CM_KIND_MAPPED:
        return ((unsigned)flags & host) | CM_HOST_ALLOC_MAPPED;
    case CM_KIND_MANAGED:
        return flags == CM_MANAGED_HOST ? CM_MANAGED_HOST : CM_MANAGED_GLOBAL;
    default:
        return 0;
    }
}

static int
fill_from_bytes(cm_buffer *buffer, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    uint64_t nbytes = cm_buffer_nbytes(buffer);
    int result = cm_buffer_check_open(buffer); /* `data` may be of Python code */
    if (result == 0 && (uint64_t)view.len != nbytes) {
        PyErr_Format(PyExc_ValueError, "data has %zd bytes, the buffer %llu", view.len,
                     (unsigned long long)nbytes);
        result = -1;
    }
    else if (result == 0 && nbytes > 0) {
        void *host = cm_buffer_host(buffer);
        cm_storage_pin(buffer->storage);
        Py_BEGIN_ALLOW_THREADS
        memcpy(host, view.buf, (size_t)nbytes);
        Py_END_ALLOW_THREADS
        cm_storage_unpin(buffer->storage);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
rebuild(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    cm_state *state = cm_state_of_module(module);
    cm_kind kind;
    int ndim;
    int64_t shape[CM_MAX_NDIM];
    char order;
    int64_t flags;
    uint64_t nbytes;
    bool readonly;
    if (nargs != 7) {
        PyErr_Format(PyExc_TypeError, "_rebuild() takes 7 arguments, not %zd", nargs);
        return NULL;
    }
    if (parse_kind(args[0], &kind) < 0
        || cm_arg_shape(args[2], "shape", &ndim, shape) < 0
        || cm_arg_order(args[3], "order", &order) < 0
        || cm_arg_int64(args[4], "flags", &flags) < 0
        || cm_arg_bool(args[6], "readonly", &readonly) < 0) {
        return NULL;
    }
    if (kind == CM_KIND_DEVICE) {
        PyErr_SetString(PyExc_ValueError,
                        "kind must be of memory that the host can read");
        return NULL;
    }
    PyObject *dtype = cm_numpy_dtype(args[1]);
    if (dtype == NULL) {
        return NULL;
    }
    PyObject *buffer = NULL;
    if (cm_arg_nbytes(ndim, shape, cm_numpy_itemsize(dtype), &nbytes) == 0) {
        buffer =
            cm_buffer_allocate(state, NULL, kind, sane_flags(kind, flags),
                               state->current_device, dtype, ndim, shape, order, NULL);
    }
    Py_DECREF(dtype);
    if (buffer != NULL && fill_from_bytes((cm_buffer *)buffer, args[5]) < 0) {
        Py_CLEAR(buffer);
    }
    if (buffer != NULL) {
        ((cm_buffer *)buffer)->readonly = readonly;
    }
    return buffer;
}

PyMethodDef cm_pickle_methods[] = {
    {"_rebuild", (PyCFunction)(void (*)(void))rebuild, METH_FASTCALL, rebuild_doc},
    {NULL, NULL, 0, NULL},
};
