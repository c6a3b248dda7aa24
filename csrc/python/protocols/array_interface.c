/* SPDX-License-Identifier: Apache-2.0 */
/* Exports mapped, managed and device buffers by `__cuda_array_interface__` version
 * 3. */
#include "base/checked_math.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/protocols.h"

#define CAI "__cuda_array_interface__"

/* -- which stream a consumer waits for --------------------------------------------- */

/* True if a consumer may be given the handle of the stream. The handles of the
 * default streams are refused: JAX (0.11) takes the numbers 1 and 2 for "no stream"
 * and reads at once, and 2 means the default stream of whichever thread uses it. */
static bool
may_be_named(const cm_stream *stream)
{
    return stream->handle != 0 && stream->handle != CM_STREAM_LEGACY
           && stream->handle != CM_STREAM_PER_THREAD;
}

/* Return the first stream with work left that may be named, borrowed, or NULL if there
 * is none. */
static cm_stream *
find_named(const cm_pending *pending)
{
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        if (may_be_named(pending->streams[i])) {
            return pending->streams[i];
        }
    }
    return NULL;
}

/* Choose the stream that a consumer has to wait for. If a stream that has work left may
 * be named, it is that one. Otherwise it is the current stream or one of our own. The
 * caller then makes this stream wait for all the work that is left, and the storage
 * remembers the stream for as long as the storage lives. Returns a held stream, or NULL
 * with an exception. */
static cm_stream *
choose_stream(cm_storage *storage, const cm_pending *pending, cm_stream *current)
{
    cm_stream *found = find_named(pending);
    if (found != NULL) {
        return cm_stream_hold(found);
    }
    found = may_be_named(current) ? cm_stream_hold(current)
                                  : cm_joining_stream(storage->state, storage->device);
    if (found != NULL && cm_storage_add_lasting_use(storage, found) < 0) {
        cm_stream_release(found);
        return NULL;
    }
    return found;
}

/* Bring all pending work onto one stream and return its handle. Returns None if nothing
 * is pending: consumers block on every import that names a stream, so none is named
 * without need. */
static PyObject *
join(cm_storage *storage, cm_pending *pending, cm_stream *current)
{
    cm_state *state = storage->state;
    cm_status status = CM_WITHOUT_GIL(cm_pending_prune(pending, -1, 0));
    storage->was_captured = storage->was_captured || pending->captured;
    if (cm_py_check(state, status, "while looking for pending work") < 0) {
        return NULL;
    }
    if (pending->stream_count == 0 && pending->ticket_count == 0) {
        return Py_NewRef(Py_None);
    }
    cm_stream *joined = choose_stream(storage, pending, current);
    if (joined == NULL) {
        return NULL;
    }
    status = CM_WITHOUT_GIL(cm_pending_order(pending, joined));
    PyObject *entry = NULL;
    if (cm_py_check(state, status, "while ordering pending work") == 0) {
        entry = PyLong_FromUnsignedLongLong(cm_stream_export_handle(joined));
    }
    cm_stream_release(joined);
    return entry;
}

/* Make the entry "stream": the handle of the stream that a consumer must wait for, or
 * None if there is nothing to wait for. Returns a new reference, or NULL with an
 * exception. */
static PyObject *
stream_entry(cm_state *state, cm_storage *storage)
{
    if (storage->use_count == 0 && storage->transfer_count == 0) {
        return Py_NewRef(Py_None);
    }
    cm_stream *current = cm_stream_from_object(state, Py_None, storage->device);
    cm_pending pending;
    if (current == NULL || cm_pending_take(storage, &pending) < 0) {
        cm_stream_give(state, current);
        return NULL;
    }
    PyObject *entry = join(storage, &pending, current);
    cm_pending_give(&pending);
    cm_stream_give(state, current);
    return entry;
}

/* -- the entries that describe a buffer ------------------------------------------- */

/* Why the protocol cannot describe a buffer. */
typedef enum obstacle {
    NO_OBSTACLE,
    TOO_LARGE,   /* its shape alone would have more than 2**63 bytes */
    BACKWARDS,   /* it has negative strides, for which PyTorch aborts the process */
    UNKNOWN_TYPE /* its dtype was registered by another package */
} obstacle;

/* Find out whether the buffer can be described, and whether its elements lie side by
 * side, in which case the protocol needs no strides. In a buffer without elements no
 * step is ever taken, so its strides do not matter. */
static obstacle
find_obstacle(const cm_buffer *buffer, bool *is_dense)
{
    bool is_backwards = false;
    *is_dense = true;
    if (cm_buffer_size(buffer) > 0) {
        int64_t dense = buffer->itemsize;
        for (int i = buffer->ndim - 1; i >= 0; i--) {
            int64_t length = cm_buffer_shape(buffer)[i];
            int64_t step = cm_buffer_strides(buffer)[i];
            is_backwards = is_backwards || (step < 0 && length > 1);
            *is_dense = *is_dense && (length == 1 || step == dense);
            if (!cm_mul_i64(dense, length, &dense)) {
                return TOO_LARGE;
            }
        }
    }
    if (is_backwards) {
        return BACKWARDS;
    }
    return cm_numpy_is_registered(buffer->dtype) ? UNKNOWN_TYPE : NO_OBSTACLE;
}

/* Raise why there is no description. It is an AttributeError if another protocol may
 * describe the buffer: hasattr() is then false, and a consumer goes on to DLPack, which
 * says why if it cannot describe the buffer either. Always returns -1. */
static int
refuse(const cm_buffer *buffer, obstacle why)
{
    switch (why) {
    case TOO_LARGE:
        PyErr_SetString(PyExc_ValueError,
                        CAI "['shape']: the number of bytes does not fit in 63 bits");
        break;
    case BACKWARDS:
        PyErr_SetString(PyExc_AttributeError,
                        CAI ": this view has negative strides, and PyTorch ends the "
                            "process when it is given any; hand over copy() of it, or "
                            "the buffer before it is reversed");
        break;
    default:
        PyErr_Format(PyExc_AttributeError,
                     CAI ": it has no type string for dtype %S; hand the buffer over "
                         "by DLPack, or view('u1'), which carries the bytes",
                     buffer->dtype);
        break;
    }
    return -1;
}

bool
cm_buffer_has_array_interface(const cm_buffer *buffer)
{
    bool is_dense;
    return !cm_state_is_emulated(buffer->state)
           && find_obstacle(buffer, &is_dense) == NO_OBSTACLE;
}

/* Put a value into a dict, and drop the caller's reference to it. `value` may be NULL
 * if it could not be made and an exception is set. Returns 0, or -1 with an
 * exception. */
static int
put(PyObject *dict, const char *key, PyObject *value)
{
    int result = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return result;
}

/* Add the fields of a structured dtype if a list can describe them. There is no such
 * list if fields overlap or are out of order, and for a dtype of another package the
 * list holds "<f1", which NumPy cannot read. Consumers then see plain bytes. Returns 0,
 * or -1 with an exception. */
static int
put_fields(PyObject *dict, PyObject *dtype)
{
    PyObject *names = PyObject_GetAttrString(dtype, "names");
    if (names == NULL || names == Py_None) {
        Py_XDECREF(names);
        return names == NULL ? -1 : 0;
    }
    Py_DECREF(names);
    PyObject *fields = PyObject_GetAttrString(dtype, "descr");
    PyObject *again = fields == NULL ? NULL : cm_numpy_read_dtype(fields);
    int result = -1;
    if (again != NULL) {
        result = PyDict_SetItemString(dict, "descr", fields);
    }
    else if (PyErr_ExceptionMatches(PyExc_ValueError)
             || PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        result = 0;
    }
    Py_XDECREF(again);
    Py_XDECREF(fields);
    return result;
}

/* Make all entries except "stream". Returns a new dict, or NULL with an exception. */
static PyObject *
describe(const cm_buffer *buffer, cm_address address)
{
    bool is_dense;
    obstacle why = find_obstacle(buffer, &is_dense);
    if (why != NO_OBSTACLE) {
        refuse(buffer, why);
        return NULL;
    }
    PyObject *dict = PyDict_New();
    if (dict == NULL) {
        return NULL;
    }
    int ndim = buffer->ndim;
    PyObject *readonly = buffer->readonly ? Py_True : Py_False;
    if (put(dict, "shape", cm_tuple_from(cm_buffer_shape(buffer), ndim)) < 0
        || put(dict, "typestr", PyObject_GetAttrString(buffer->dtype, "str")) < 0
        || put(dict, "data",
               Py_BuildValue("(KO)", (unsigned long long)address, readonly))
               < 0
        || put(dict, "version", PyLong_FromLong(3)) < 0
        || put(dict, "strides",
               is_dense ? Py_NewRef(Py_None)
                        : cm_tuple_from(cm_buffer_strides(buffer), ndim))
               < 0
        || put_fields(dict, buffer->dtype) < 0) {
        Py_CLEAR(dict);
    }
    return dict;
}

/* -- the protocol ------------------------------------------------------------------ */

PyObject *
cm_array_interface_dict(PyObject *self)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    cm_address address = cm_buffer_address(buffer);
    PyObject *dict = describe(buffer, address);
    if (dict == NULL) {
        return NULL;
    }
    /* From here on the consumer's work cannot be seen. */
    buffer->storage->was_exported = true;
    buffer->state->export_total++;
    buffer->storage->address_was_exported = true;
    PyObject *stream = address == 0 ? Py_NewRef(Py_None)
                                    : stream_entry(buffer->state, buffer->storage);
    if (stream == NULL || PyDict_SetItemString(dict, "stream", stream) < 0
        || cm_buffer_note_side(buffer, true) < 0
        /* Another thread may have freed the buffer while the entries were made. */
        || cm_buffer_check_open(buffer) < 0) {
        Py_CLEAR(dict);
    }
    Py_XDECREF(stream);
    return dict;
}

PyObject *
cm_buffer_array_interface(PyObject *self, void *closure)
{
    (void)closure;
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    if (cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    cm_runtime *rt = cm_state_runtime(buffer->state);
    if (rt == NULL) {
        return NULL;
    }
    if (rt->backend == CM_BACKEND_EMULATED) {
        PyErr_SetString(PyExc_AttributeError,
                        CAI ": this buffer lives on the emulated "
                            "device, whose addresses no CUDA library can use");
        return NULL;
    }
    return cm_array_interface_dict(self);
}
