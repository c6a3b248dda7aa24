/* SPDX-License-Identifier: Apache-2.0 */
/* Ask an object for a DLPack capsule, ready on our stream, and import it. */
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/protocols.h"

/* 1 and a new reference, 0 without, -1 with an exception. */
static int
find_method(PyObject *object, const char *name, PyObject **out)
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
ask_device(PyObject *method, cm_dl_device *out)
{
    int64_t type;
    int64_t id;
    PyObject *pair = PyObject_CallNoArgs(method);
    if (pair == NULL) {
        return -1;
    }
    int result = -1;
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "__dlpack_device__() answered %R, not (type, id)",
                     pair);
    }
    else if (cm_arg_int64(PyTuple_GetItem(pair, 0), "__dlpack_device__()[0]", &type)
                 == 0
             && cm_arg_int64(PyTuple_GetItem(pair, 1), "__dlpack_device__()[1]", &id)
                    == 0) {
        if (type < INT32_MIN || type > INT32_MAX || id < INT32_MIN || id > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "__dlpack_device__() answered %R", pair);
        }
        else {
            *out = (cm_dl_device){(int32_t)type, (int32_t)id};
            result = 0;
        }
    }
    Py_DECREF(pair);
    return result;
}

/* __dlpack__(stream=…, max_version=(1, 0)) with what is wanted of them. */
static PyObject *
call_dlpack(PyObject *method, cm_stream *stream, bool with_version)
{
    PyObject *result = NULL;
    PyObject *value = NULL;
    PyObject *none = PyTuple_New(0);
    PyObject *keywords = PyDict_New();
    int failed = none == NULL || keywords == NULL;
    if (!failed && stream != NULL) {
        uint64_t handle = cm_stream_tell_handle(stream);
        handle = handle == 0 ? CM_STREAM_LEGACY : handle;
        value = PyLong_FromUnsignedLongLong(handle);
        failed = value == NULL || PyDict_SetItemString(keywords, "stream", value) < 0;
        Py_CLEAR(value);
    }
    if (!failed && with_version) {
        value = Py_BuildValue("ii", CM_DL_MAJOR, 0);
        failed =
            value == NULL || PyDict_SetItemString(keywords, "max_version", value) < 0;
        Py_CLEAR(value);
    }
    if (!failed) {
        result = PyObject_Call(method, none, keywords);
    }
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    return result;
}

/* Older exporters do not know max_version, the oldest not even stream. */
static PyObject *
ask_capsule(cm_state *state, PyObject *method, cm_stream *stream)
{
    PyObject *capsule = call_dlpack(method, stream, true);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = call_dlpack(method, stream, false);
    }
    if (stream != NULL && capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = call_dlpack(method, NULL, false);
        /* an exporter that takes no stream has made the legacy default stream wait */
        if (capsule != NULL
            && cm_dlpack_follow_handle(state, stream, CM_STREAM_LEGACY) < 0) {
            Py_CLEAR(capsule);
        }
    }
    return capsule;
}

/* With the memory's device current: PyTorch refuses to export that of another one. */
static PyObject *
ask_on_device(cm_state *state, PyObject *method, cm_dl_device device, cm_stream *stream)
{
    if (device.type != CM_DL_CUDA) {
        return ask_capsule(state, method, stream);
    }
    cm_runtime *rt = cm_state_runtime(state); /* the object's own code was run before */
    if (rt == NULL) {
        return NULL;
    }
    cm_device_guard guard;
    cm_status status;
    PyObject *capsule = NULL;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = cm_device_enter(rt, device.id, &guard);
    Py_END_ALLOW_THREADS
    if (cm_is_ok(status)) {
        capsule = ask_capsule(state, method, stream);
        Py_BEGIN_ALLOW_THREADS
        cm_device_leave(rt, &guard);
        Py_END_ALLOW_THREADS
    }
    else {
        cm_py_raise(state, status, "while importing DLPack");
    }
    cm_state_leave(state);
    return capsule;
}

/* -- who may write ------------------------------------------------------------------------ */

/* A capsule of before 1.0 does not say. What else the object tells is asked in turn. */
typedef enum writing {
    WRITING_FAILED = -1,
    WRITING_ALLOWED,
    WRITING_DENIED,
    WRITING_UNSAID
} writing;

/* An object that cannot answer has said nothing. */
static writing
forgive(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return WRITING_FAILED;
    }
    PyErr_Clear();
    return WRITING_UNSAID;
}

static writing
ask_buffer(PyObject *object)
{
    Py_buffer view;
    if (!PyObject_CheckBuffer(object)
        || PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) < 0) {
        return forgive();
    }
    writing found = view.readonly ? WRITING_DENIED : WRITING_ALLOWED;
    PyBuffer_Release(&view);
    return found;
}

static writing
ask_array_interface(PyObject *object)
{
    PyObject *dict = PyObject_GetAttrString(object, "__cuda_array_interface__");
    PyObject *data = dict == NULL ? NULL : PyMapping_GetItemString(dict, "data");
    PyObject *flag = data == NULL ? NULL : PySequence_GetItem(data, 1);
    int denied = flag == NULL ? -1 : PyObject_IsTrue(flag);
    Py_XDECREF(flag);
    Py_XDECREF(data);
    Py_XDECREF(dict);
    return denied < 0 ? forgive() : denied ? WRITING_DENIED : WRITING_ALLOWED;
}

/* JAX's arrays never change, and on a GPU or in bfloat16 nothing but their type says
 * so. */
static writing
ask_type(PyObject *object)
{
    static const char *const names[] = {"jax", "jax.", "jaxlib", "jaxlib."};
    PyObject *module =
        PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    const char *text = module != NULL && PyUnicode_Check(module)
                           ? PyUnicode_AsUTF8AndSize(module, NULL)
                           : NULL;
    writing found = WRITING_UNSAID;
    for (size_t i = 0; text != NULL && i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i]);
        bool is_package = names[i][length - 1] == '.';
        if (is_package ? strncmp(text, names[i], length) == 0
                       : strcmp(text, names[i]) == 0) {
            found = WRITING_DENIED;
        }
    }
    Py_XDECREF(module);
    return found == WRITING_UNSAID ? forgive() : found;
}

static writing
ask_who_writes(PyObject *object)
{
    writing found = ask_buffer(object);
    found = found == WRITING_UNSAID ? ask_array_interface(object) : found;
    return found == WRITING_UNSAID ? ask_type(object) : found;
}

/* -- the capsule -------------------------------------------------------------------------- */

static PyObject *
import_asked(cm_state *state, PyObject *object, PyObject *capsule,
             cm_dl_device advertised, cm_stream *stream)
{
    PyObject *buffer = Py_NewRef(Py_NotImplemented);
    if (PyCapsule_CheckExact(capsule)) {
        bool is_old = PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME);
        Py_DECREF(buffer);
        buffer = cm_dlpack_import(state, capsule, &advertised);
        writing found = is_old && buffer != NULL && buffer != Py_NotImplemented
                            ? ask_who_writes(object)
                            : WRITING_UNSAID;
        if (found == WRITING_FAILED) {
            Py_CLEAR(buffer);
        }
        else if (found == WRITING_DENIED) {
            ((cm_buffer *)(void *)buffer)->readonly = true;
            ((cm_buffer *)(void *)buffer)->storage->readonly = true;
        }
    }
    if (buffer == Py_NotImplemented) {
        Py_DECREF(buffer);
        PyErr_Format(PyExc_TypeError,
                     "__dlpack__() answered %R, not a fresh DLPack capsule", capsule);
        return NULL;
    }
    if (buffer != NULL && stream != NULL
        && cm_storage_add_lasting_use(((cm_buffer *)(void *)buffer)->storage, stream)
               < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* Its destructor may be Python code, which must not see our exception. */
static void
drop_capsule(PyObject *capsule)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_DECREF(capsule);
    PyErr_Restore(type, value, traceback);
}

static PyObject *
import_from(cm_state *state, PyObject *object, PyObject *method,
            PyObject *device_method, cm_stream *given)
{
    cm_dl_device advertised;
    cm_stream *stream;
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL || ask_device(device_method, &advertised) < 0
        || cm_dlpack_check_device(rt, advertised) < 0
        || cm_dlpack_choose_stream(state, advertised, given, &stream) < 0) {
        return NULL;
    }
    PyObject *buffer = NULL;
    PyObject *capsule = ask_on_device(state, method, advertised, stream);
    if (capsule != NULL) {
        buffer = import_asked(state, object, capsule, advertised, stream);
        drop_capsule(capsule);
        if (buffer != NULL && given != NULL && stream != NULL && stream != given
            && cm_dlpack_pass_on(state, buffer, given, stream) < 0) {
            Py_CLEAR(buffer);
        }
    }
    else if (PyErr_ExceptionMatches(PyExc_BufferError)
             && PyObject_CheckBuffer(object)) {
        PyErr_Clear(); /* what DLPack cannot say, the buffer protocol may */
        buffer = Py_NewRef(Py_NotImplemented);
    }
    cm_stream_give(state, stream);
    return buffer;
}

static PyObject *
import_bare_capsule(cm_state *state, PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_USED)
        || PyCapsule_IsValid(capsule, CM_DL_LEGACY_USED)) {
        PyErr_SetString(PyExc_ValueError, "this DLPack capsule was consumed before");
        return NULL;
    }
    return cm_dlpack_import(state, capsule, NULL);
}

/* The imaginary part of a conjugated tensor of PyTorch's has the other sign when it is
 * read, of which DLPack cannot tell. Such parts lie apart, so that only those are
 * asked. 0, or -1 with an exception. */
static int
check_sign(PyObject *object, PyObject *buffer)
{
    cm_region region;
    PyObject *method;
    cm_buffer_region((cm_buffer *)(void *)buffer, &region);
    int64_t count;
    if (cm_region_is_c_contiguous(&region)
        && !(cm_is_ok(cm_region_count(&region, &count)) && count == 1)) {
        return 0;
    }
    int found = find_method(object, "is_neg", &method);
    if (found <= 0) {
        return found;
    }
    PyObject *answer = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    bool is_negative = answer == Py_True;
    Py_XDECREF(answer);
    if (is_negative) {
        PyErr_SetString(PyExc_BufferError,
                        "a tensor with the negative bit set has other values than its "
                        "memory: take tensor.resolve_neg()");
    }
    return answer == NULL || is_negative ? -1 : 0;
}

static PyObject *
import_object(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    PyObject *buffer = cm_import_exchange(state, object, stream, unasked);
    if (buffer != Py_NotImplemented) {
        return buffer;
    }
    Py_DECREF(buffer);
    buffer = NULL;
    PyObject *method = NULL;
    PyObject *device_method = NULL;
    int found = PyType_Check(object) ? 0 : find_method(object, "__dlpack__", &method);
    if (found == 1) {
        found = find_method(object, "__dlpack_device__", &device_method);
    }
    if (found == 1) {
        buffer = import_from(state, object, method, device_method, stream);
    }
    else if (found == 0) {
        buffer = Py_NewRef(Py_NotImplemented);
    }
    Py_XDECREF(method);
    Py_XDECREF(device_method);
    return buffer;
}

PyObject *
cm_import_dlpack(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    if (PyCapsule_CheckExact(object)) {
        return import_bare_capsule(state, object);
    }
    PyObject *buffer = import_object(state, object, stream, unasked);
    if (buffer != NULL && buffer != Py_NotImplemented
        && check_sign(object, buffer) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}
