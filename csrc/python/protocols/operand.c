/* SPDX-License-Identifier: Apache-2.0 */
/* Takes any object as memory. This file tries the protocols in their order, and
 * contains asbuffer(). It makes a region of each object that copy() is given, and keeps
 * what keeps the object's memory alive. */
#include "docstrings.h"
#include "python/buffer/memory_watch.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/core/values.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

/* -- arrays with a mask ------------------------------------------------------------- */

/* The mask of a numpy.ma.MaskedArray lies in memory of its own, which nothing here
 * reads. So the array's elements would be copied as if none were masked, and such an
 * array is refused. */
int
cm_check_unmasked(PyObject *array)
{
    if (!cm_numpy_may_be_masked(array)) {
        return 0;
    }
    return cm_package_do("buffers.values", "refuse_masked", PyTuple_Pack(1, array));
}

/* -- any exporter to a buffer ------------------------------------------------------- */

/* Make an array over the memory that the buffer protocol gives, since NumPy knows every
 * format. Returns a new reference, or NULL with an exception. */
static PyObject *
read_view(PyObject *exporter)
{
    PyObject *view = PyMemoryView_FromObject(exporter);
    if (view == NULL) {
        return NULL;
    }
    PyObject *array = NULL;
    PyObject *suboffsets = PyObject_GetAttrString(view, "suboffsets");
    int is_indirect = suboffsets == NULL ? -1 : PyObject_IsTrue(suboffsets);
    if (is_indirect > 0) { /* PIL exports memory behind pointers */
        PyErr_SetString(PyExc_BufferError,
                        "a buffer with suboffsets is not one piece of memory");
    }
    if (is_indirect == 0) {
        array = cm_numpy_from_any(view, NULL, false);
    }
    if (array != NULL && cm_numpy_has_objects(array)) {
        PyErr_Format(PyExc_TypeError, "an object of type %R holds no plain values",
                     Py_TYPE(view));
        Py_CLEAR(array);
    }
    Py_XDECREF(suboffsets);
    Py_DECREF(view);
    return array;
}

/* Import an object that has only the buffer protocol. The array holds a view, and so
 * the export. The memory is watched, since its owner may be able to replace it. */
static PyObject *
import_view(cm_state *state, PyObject *exporter)
{
    PyObject *array = read_view(exporter);
    if (array == NULL) {
        return NULL;
    }
    PyObject *buffer = cm_import_array(state, array);
    if (buffer != NULL) {
        cm_storage *storage = ((cm_buffer *)(void *)buffer)->storage;
        if (cm_memory_keep(storage, array) < 0 || cm_memory_watch(storage) < 0) {
            Py_CLEAR(buffer);
        }
    }
    Py_DECREF(array);
    return buffer;
}

static PyObject *
import_any(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    if (cm_buffer_check(state, object)) {
        return cm_buffer_check_open((cm_buffer *)(void *)object) < 0
                   ? NULL
                   : Py_NewRef(object);
    }
    /* NumPy's arrays are read directly, since DLPack cannot describe datetimes and
     * structures. */
    if (cm_numpy_is_array(object)) {
        return cm_check_unmasked(object) < 0 ? NULL : cm_import_array(state, object);
    }
    PyObject *buffer = cm_import_dlpack(state, object, stream, unasked);
    if (buffer != Py_NotImplemented) {
        return buffer;
    }
    Py_DECREF(buffer);
    bool has_buffer = PyObject_CheckBuffer(object) != 0;
    /* A type has the methods of these protocols too, but they are for its objects. */
    if (!PyType_Check(object)) {
        buffer = cm_import_by_dlpack(state, object, stream, has_buffer);
        if (buffer != Py_NotImplemented) {
            return buffer;
        }
        Py_DECREF(buffer);
        buffer = cm_import_by_array_interface(state, object, stream);
        if (buffer != Py_NotImplemented) {
            return buffer;
        }
        Py_DECREF(buffer);
    }
    if (has_buffer) {
        return import_view(state, object);
    }
    (void)cm_package_refuse("interchange.foreign_memory", "refuse_object",
                            Py_BuildValue("(Os)", object, "exports no memory"));
    return NULL;
}

/* After a failed import, find out whether the object is a tensor of PyTorch's that has
 * no memory of its own, or whose values are not those in its memory. The error then
 * says so, instead of naming the step of the import that failed. */
static void
explain_tensor(cm_state *state, PyObject *object)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return;
    }
    cm_kept_error kept = cm_error_keep();
    if (PyObject_HasAttr((PyObject *)Py_TYPE(object),
                         state->words[CM_WORD_untyped_storage])
        && cm_package_do("interchange.foreign_memory", "refuse_tensor",
                         PyTuple_Pack(1, object))
               < 0) {
        Py_XDECREF(kept.type);
        Py_XDECREF(kept.value);
        Py_XDECREF(kept.traceback);
        return;
    }
    cm_error_restore(kept);
}

/* Make a new Buffer of any exporter, without a copy. This tries, in this order, a
 * Buffer itself, DLPack (with `stream`, which may be NULL), the CUDA array interface,
 * and the buffer protocol. Host memory that comes by DLPack's C functions is looked
 * up with the driver only if it has more than `unasked` bytes. An object that has none
 * of these protocols raises a TypeError, which names its type. */
static PyObject *
import_object(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    cm_state_enter(state); /* no shutdown() may come between what a protocol says and
                              its use */
    PyObject *buffer = import_any(state, object, stream, unasked);
    if (buffer == NULL) {
        explain_tensor(state, object);
    }
    if (buffer != NULL && buffer != object
        && cm_memory_keep(((cm_buffer *)(void *)buffer)->storage, object) < 0) {
        Py_CLEAR(buffer);
    }
    cm_state_leave(state);
    return buffer;
}

PyObject *
cm_asbuffer(cm_state *state, PyObject *object, cm_stream *stream)
{
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    PyObject *buffer = import_object(state, object, stream, 0);
    if (buffer != NULL && cm_memory_watch(((cm_buffer *)(void *)buffer)->storage) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

PyObject *
cm_asbuffer_on(cm_state *state, PyObject *object, PyObject *given)
{
    if (!cm_arg_is_given(given)) {
        return cm_asbuffer(state, object, NULL);
    }
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    int device = PyLong_Check(given) ? cm_exporter_device(state, object) : -1;
    cm_stream *stream = cm_stream_from_object(state, given, device);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *buffer = cm_asbuffer(state, object, stream);
    cm_stream_give(state, stream);
    return buffer;
}

static PyObject *
asbuffer(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", "stream", NULL};
    PyObject *values[2];
    if (cm_args_parse("asbuffer", args, nargs, kwnames, names, 1, 1, values) < 0) {
        return NULL;
    }
    return cm_asbuffer_on(cm_state_of_module(module), values[0], values[1]);
}

/* Answer a call of the package that passes a value and a dtype: return what `read`
 * makes of the two. */
static PyObject *
read_by(PyObject *args, PyObject *(*read)(PyObject *value, PyObject *dtype))
{
    PyObject *value;
    PyObject *dtype;
    if (!PyArg_ParseTuple(args, "OO", &value, &dtype)) {
        return NULL;
    }
    if (!cm_numpy_is_dtype(dtype)) {
        (void)cm_arg_refuse(dtype, "dtype", "a numpy.dtype");
        return NULL;
    }
    return read(value, dtype);
}

static PyObject *
read_value(PyObject *module CM_UNUSED, PyObject *args)
{
    return read_by(args, cm_value_array);
}

static PyObject *
read_array_of(PyObject *module CM_UNUSED, PyObject *value)
{
    return cm_value_read_array(value);
}

static PyObject *
read_any_value(PyObject *module CM_UNUSED, PyObject *args)
{
    return read_by(args, cm_value_read_any);
}

PyMethodDef cm_protocol_methods[] = {
    {"asbuffer", CM_METHOD(asbuffer), CM_KEYWORDS, CM_DOC_asbuffer},
    {"_freeze", cm_freeze, METH_O, CM_DOC__freeze},
    {"_read_value", read_value, METH_VARARGS, CM_DOC__read_value},
    {"_read_any_value", read_any_value, METH_VARARGS, CM_DOC__read_any_value},
    {"_read_array", read_array_of, METH_O, CM_DOC__read_array},
    {"_register", cm_register_memory, METH_VARARGS, CM_DOC__register},
    {"_shared_pinned", cm_shared_pinned, METH_VARARGS, CM_DOC__shared_pinned},
    {"_unregister", cm_unregister_memory, METH_VARARGS, CM_DOC__unregister},
    {NULL, NULL, 0, NULL},
};

/* -- an end of a copy --------------------------------------------------------------- */

static int
init_buffer(cm_operand *operand, PyObject *object)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)object;
    if (cm_buffer_check_open(buffer) < 0) {
        return -1;
    }
    cm_buffer_region(buffer, &operand->region);
    operand->dtype = Py_NewRef(buffer->dtype);
    operand->keep = Py_NewRef(object);
    operand->storage = buffer->storage;
    operand->run_nbytes =
        cm_buffer_is_contiguous(buffer, false) ? cm_buffer_nbytes(buffer) : 0;
    operand->readonly = buffer->readonly;
    cm_storage_keep_open(operand->storage);
    return 0;
}

cm_storage *
cm_operand_storage_of(const cm_state *state, PyObject *array)
{
    PyObject *owner = cm_numpy_owner(array);
    cm_storage *storage = NULL;
    if (owner != NULL && cm_buffer_check(state, owner)) {
        storage = ((cm_buffer *)(void *)owner)->storage; /* borrowed: the array keeps it
                                                          */
    }
    Py_XDECREF(owner);
    return storage;
}

enum { SHORT_NBYTES = 64 << 10 };

/* True if the array is one run of at most `most` bytes. Then nothing has to be found
 * out about its memory, which counts as ordinary. */
static bool
is_short_run(const cm_operand *operand, uint64_t most)
{
    const void *host = operand->region.host;
    return operand->run_nbytes > 0 && operand->run_nbytes <= most && host != NULL
           && (uintptr_t)host <= UINTPTR_MAX - most;
}

/* Describe the memory of `array`, which is kept. The driver is asked whether the
 * memory is page-locked or managed, because the planner should know. It is not asked
 * if the memory is not ours and has at most `unasked` bytes, and never if `unasked` is
 * UINT64_MAX. */
static int
read_array(cm_state *state, cm_operand *operand, PyObject *array, uint64_t unasked)
{
    cm_import import;
    uint64_t most = operand->storage == NULL ? unasked : 0;
    if (cm_numpy_region(array, &operand->region, &operand->dtype, &operand->readonly)
        < 0) {
        return -1;
    }
    operand->run_nbytes = cm_numpy_run_nbytes(array);
    if (unasked == UINT64_MAX || is_short_run(operand, most)) {
        return 0;
    }
    if (cm_import_ask_about(state, array, &operand->region, most, &import) < 0) {
        return -1;
    }
    operand->region = import.region;
    operand->locked = import.locked;
    return 0;
}

static int
init_array(cm_state *state, cm_operand *operand, PyObject *array, uint64_t unasked)
{
    if (cm_check_unmasked(array) < 0) {
        return -1;
    }
    operand->keep = Py_NewRef(array);
    operand->storage = cm_operand_storage_of(state, array);
    if (operand->storage != NULL) {
        cm_storage_keep_open(operand->storage);
    }
    int result = read_array(state, operand, array, unasked);
    if (result < 0) {
        cm_operand_fini(operand);
    }
    return result;
}

/* True for a scalar of Python's or NumPy's, for a list or tuple of values, and for a
 * range. */
static bool
is_plain_value(PyObject *object)
{
    return PyLong_Check(object) || PyFloat_Check(object) || PyComplex_Check(object)
           || PyUnicode_Check(object) || PyList_Check(object) || PyTuple_Check(object)
           || PyRange_Check(object) || cm_numpy_is_scalar(object);
}

/* True if a bytes object is one value for the target. That is so if the target's dtype
 * is one of bytes or void. For other dtypes the object is a run of uint8. */
static bool
is_bytes_value(PyObject *object, PyObject *target_dtype)
{
    if (!PyBytes_Check(object) || target_dtype == NULL) {
        return false;
    }
    char kind = cm_numpy_plain_kind(target_dtype);
    return kind == 'S' || kind == 'V';
}

/* Read an object that is neither memory nor a scalar nor a list. If only NumPy can read
 * it, it counts as an array, whose dtype is compared and not converted. Bytes count as
 * a value here, and so do Python's dates and spans of time, which NumPy would read as
 * objects. */
static PyObject *
read_other(PyObject *object, PyObject *target_dtype)
{
    char letter = cm_numpy_letter(target_dtype);
    bool is_time = (letter == 'M' || letter == 'm')
                   && !PyObject_HasAttrString(object, "__array__")
                   && !PyObject_HasAttrString(object, "__array_interface__");
    if (is_time || object == Py_None || PyBytes_Check(object)) {
        return cm_value_read(object, target_dtype);
    }
    return cm_value_read_array(object);
}

/* Read a Python value, or a list of values, into an array of the target's dtype. A
 * value that the dtype cannot hold unchanged is refused. What only NumPy can read keeps
 * its own dtype (read_other()). Returns 0, or -1 with an exception. */
static int
init_value(cm_state *state, cm_operand *operand, PyObject *object,
           PyObject *target_dtype)
{
    if (target_dtype == NULL) {
        return cm_package_refuse("interchange.foreign_memory", "refuse_object",
                                 Py_BuildValue("(Os)", object, "cannot be written to"));
    }
    bool plain = is_plain_value(object);
    PyObject *array =
        plain ? cm_value_array(object, target_dtype) : read_other(object, target_dtype);
    if (array == NULL) {
        return -1;
    }
    /* The array that was just made of a value is ordinary memory. */
    int result = init_array(state, operand, array, plain ? UINT64_MAX : 0);
    Py_DECREF(array);
    return result;
}

/* True if the object has a protocol that import_object() reads. */
static bool
is_exporter(PyObject *object)
{
    static const char *const names[] = {"__dlpack__", "__cuda_array_interface__",
                                        "__dlpack_c_exchange_api__"};
    if (PyObject_CheckBuffer(object) || PyCapsule_CheckExact(object)) {
        return true;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        /* The type is asked as well: an object whose property raises is still an
         * exporter, and the import says why it failed. */
        if (PyObject_HasAttrString((PyObject *)Py_TYPE(object), names[i])
            || PyObject_HasAttrString(object, names[i])) {
            return true;
        }
    }
    return false;
}

bool
cm_operand_is_memory(const cm_state *state, PyObject *object)
{
    if (cm_buffer_check(state, object) || cm_numpy_is_array(object)) {
        return true;
    }
    /* For a tensor of the type seen last, looking for protocols would take longer than
     * importing it. */
    bool is_known = state->exchange_type == (PyObject *)Py_TYPE(object);
    return is_known || (!is_plain_value(object) && is_exporter(object));
}

/* True if the host can read managed memory of all devices at any time. Only then may
 * memory of another library, which may be managed, be treated as ordinary without
 * asking the driver. */
static bool
shares_managed(cm_state *state)
{
    cm_runtime *rt = cm_state_runtime(state);
    bool all = state->shares_managed;
    if (all || rt == NULL) {
        return all;
    }
    all = true;
    for (int device = 0; device < rt->device_count && all; device++) {
        int concurrent = 0;
        all = cm_is_ok(cm_rt_device_attribute(
                  rt, CM_ATTRIBUTE_concurrent_managed_access, device, &concurrent))
              && concurrent == 1;
    }
    state->shares_managed = all;
    return all;
}

int
cm_operand_init(cm_state *state, cm_operand *operand, PyObject *object,
                PyObject *target_dtype, cm_stream *stream, cm_asking asking)
{
    operand->dtype = NULL;
    operand->keep = NULL;
    operand->locked = NULL;
    operand->storage = NULL;
    operand->run_nbytes = 0;
    operand->readonly = false;
    if (cm_buffer_check(state, object)) {
        return init_buffer(operand, object);
    }
    bool skips = asking == CM_ASK_UNLESS_SHORT && shares_managed(state);
    uint64_t unasked = skips ? SHORT_NBYTES : 0;
    if (cm_numpy_is_array(object)) {
        return init_array(state, operand, object,
                          asking == CM_ASK_LATER ? UINT64_MAX : unasked);
    }
    if (is_bytes_value(object, target_dtype) || !cm_operand_is_memory(state, object)) {
        return init_value(state, operand, object, target_dtype);
    }
    PyObject *buffer = import_object(state, object, stream, unasked);
    if (buffer == NULL) {
        return -1;
    }
    int result = init_buffer(operand, buffer);
    Py_DECREF(buffer);
    return result;
}

void
cm_operand_fini(cm_operand *operand)
{
    if (operand->storage != NULL) {
        cm_storage_allow_close(operand->storage); /* `keep` still holds the storage */
    }
    operand->storage = NULL;
    Py_CLEAR(operand->dtype);
    Py_CLEAR(operand->locked);
    Py_CLEAR(operand->keep);
}
