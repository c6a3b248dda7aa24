/* SPDX-License-Identifier: Apache-2.0 */
/* The one switch from a status to a Python exception; the classes are cumem/errors.py.
 */
#include "python/core/errors.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* -- the message ---------------------------------------------------------------------- */

static const cm_op_argument argument_kinds[CM_OP_COUNT] = {
#define CM_OP_ARGUMENT(name, cuda, driver, arg, params, args)                          \
    [CM_OP_##name] = CM_ARGUMENT_KIND arg,
    CM_OPS(CM_OP_ARGUMENT)
#undef CM_OP_ARGUMENT
};

/* Each takes one long long. */
static const char *const argument_formats[] = {
    [CM_ARGUMENT_NOTHING] = "",
    [CM_ARGUMENT_NBYTES] = "%llu bytes",
    [CM_ARGUMENT_ELEMENTS] = "%llu elements",
    [CM_ARGUMENT_BLOCKS] = "%llu blocks",
    [CM_ARGUMENT_PRIORITY] = "priority %lld",
    [CM_ARGUMENT_DEVICE] = "device %lld",
    [CM_ARGUMENT_PEER] = "peer %lld",
    [CM_ARGUMENT_ATTRIBUTE] = "attribute %lld",
    [CM_ARGUMENT_ADDRESS] = "address 0x%llx",
    [CM_ARGUMENT_CONTEXT] = "context 0x%llx",
    [CM_ARGUMENT_EVENT] = "event 0x%llx",
    [CM_ARGUMENT_FLAGS] = "flags 0x%llx",
    [CM_ARGUMENT_HANDLE] = "handle 0x%llx",
    [CM_ARGUMENT_MODULE] = "module 0x%llx",
    [CM_ARGUMENT_STREAM] = "stream 0x%llx",
};

/* "1073741824 bytes", "device 3", "stream 0x7f…"; "" when there is nothing to tell. */
static void
describe_argument(cm_status status, char *out, size_t out_nbytes)
{
    cm_op_argument kind = argument_kinds[status.op];
    bool is_int = kind == CM_ARGUMENT_DEVICE || kind == CM_ARGUMENT_PEER
                  || kind == CM_ARGUMENT_ATTRIBUTE;
    long long value = is_int ? (int32_t)status.arg : (long long)status.arg;
    (void)snprintf(out, out_nbytes, argument_formats[kind], value);
}

static const char *
code_name(cm_status status)
{
    const char *name =
        status.code > 0 ? cm_cuda_error_name(status.code) : cm_error_name(status.code);
    return name == NULL ? "unknown error" : name;
}

static const char *
code_text(cm_status status)
{
    const char *text =
        status.code > 0 ? cm_cuda_error_text(status.code) : cm_error_text(status.code);
    return text == NULL ? "unknown error" : text;
}

/* "cudaHostAlloc(1073741824 bytes): cudaErrorMemoryAllocation (2): out of memory" */
static PyObject *
compose(cm_status status)
{
    if (status.op == CM_OP_none || status.op >= CM_OP_COUNT) {
        if (status.code > 0) {
            return PyUnicode_FromFormat("%s (%d): %s", code_name(status),
                                        (int)status.code, code_text(status));
        }
        return PyUnicode_FromFormat("cumem: %s", code_text(status));
    }
    char argument[80];
    describe_argument(status, argument, sizeof(argument));
    const char *call = cm_op_cuda_name((cm_op)status.op);
    if (status.code > 0) {
        return PyUnicode_FromFormat("%s(%s): %s (%d): %s", call, argument,
                                    code_name(status), (int)status.code,
                                    code_text(status));
    }
    if (status.code == CM_ENOTSUP) {
        int oldest = cm_op_min_driver((cm_op)status.op);
        return PyUnicode_FromFormat("%s(%s): %s; it came with CUDA %d.%d", call,
                                    argument, code_text(status), oldest / 1000,
                                    oldest % 1000 / 10);
    }
    return PyUnicode_FromFormat("%s(%s): %s", call, argument, code_text(status));
}

/* -- the classes ---------------------------------------------------------------------- */

int
cm_errors_load(cm_state *state)
{
    const struct {
        const char *name;
        PyObject **out;
    } table[] = {
        {"CancelledError", &state->cancelled_error},
        {"EmulationWarning", &state->emulation_warning},
        {"OutOfMemoryError", &state->out_of_memory_error},
        {"CudaError", &state->cuda_error}, /* last: says that all are there */
    };
    if (state->cuda_error != NULL) {
        return 0;
    }
    PyObject *errors = cm_package_load("errors");
    int result = errors == NULL ? -1 : 0;
    for (size_t i = 0; result == 0 && i < sizeof table / sizeof *table; i++) {
        PyObject *old = *table[i].out; /* another thread may load them meanwhile */
        *table[i].out = PyObject_GetAttrString(errors, table[i].name);
        result = *table[i].out == NULL ? -1 : 0;
        Py_XDECREF(old);
    }
    Py_XDECREF(errors);
    return result;
}

/* -- the exception -------------------------------------------------------------------- */

/* Borrowed: the one place that says which exception a code is. */
static PyObject *
exception_type(const cm_state *state, int32_t code)
{
    switch (code) {
    case CM_CUDA_OUT_OF_MEMORY:
    case CM_ELIMIT:
    case CM_EHOSTMEMORY:
        return state->out_of_memory_error;
    case CM_EINVALID:
    case CM_ESHAPE:
    case CM_ECLOSED:
    case CM_EOVERFLOW:
        return PyExc_ValueError;
    case CM_ENOMEM:
        return PyExc_MemoryError;
    case CM_EBUSY:
        return PyExc_BufferError;
    case CM_ESYSTEM:
    case CM_EFAULT:
        return PyExc_OSError;
    case CM_ETIMEOUT:
        return PyExc_TimeoutError;
    case CM_ECANCELLED:
        return state->cancelled_error;
    case CM_EFORKED:
    case CM_ETHREAD:
    case CM_ENUMA:
        return PyExc_RuntimeError;
    default: /* CM_ENOTSUP and every other code of CUDA's own */
        return state->cuda_error;
    }
}

/* Steals `value`. */
static int
set_attribute(PyObject *exception, const char *name, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    int failed = PyObject_SetAttrString(exception, name, value);
    Py_DECREF(value);
    return failed;
}

static PyObject *
call_name(cm_status status)
{
    const char *call = cm_op_cuda_name((cm_op)status.op);
    if (status.op == CM_OP_none || call == NULL) {
        return Py_NewRef(Py_None);
    }
    return PyUnicode_FromString(call);
}

/* A new exception object for the status, with its attributes and its note (which may be
 * NULL); NULL on failure. */
static PyObject *
make_exception(cm_state *state, cm_status status, const char *doing)
{
    PyObject *message = cm_errors_load(state) < 0 ? NULL : compose(status);
    if (message == NULL) {
        return NULL;
    }
    PyObject *type = exception_type(state, status.code);
    PyObject *exception = NULL;
    if (type == PyExc_OSError && status.arg > 0 && status.arg < 4096) {
        exception = status.code == CM_ESYSTEM
                        ? PyObject_CallFunction(type, "is", (int)status.arg,
                                                strerror((int)status.arg))
                        : PyObject_CallFunction(type, "iO", (int)status.arg, message);
    }
    else {
        exception = PyObject_CallFunctionObjArgs(type, message, NULL);
    }
    Py_DECREF(message);
    if (exception == NULL) {
        return NULL;
    }
    if (set_attribute(exception, "call", call_name(status)) < 0
        || set_attribute(exception, "code", PyLong_FromLong(status.code)) < 0
        || set_attribute(exception, "name", PyUnicode_FromString(code_name(status))) < 0
        || set_attribute(exception, "arg", PyLong_FromUnsignedLongLong(status.arg))
               < 0) {
        Py_DECREF(exception);
        return NULL;
    }
    if (doing != NULL) {
        PyObject *done = PyObject_CallMethod(exception, "add_note", "s", doing);
        if (done == NULL) {
            Py_DECREF(exception);
            return NULL;
        }
        Py_DECREF(done);
    }
    return exception;
}

PyObject *
cm_py_exception_new(cm_state *state, cm_status status)
{
    return make_exception(state, status, NULL);
}

PyObject *
cm_py_raise(cm_state *state, cm_status status, const char *doing)
{
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *exception = make_exception(state, status, doing);
    if (exception != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
    return NULL;
}

int
cm_py_raise_int(cm_state *state, cm_status status, const char *doing)
{
    (void)cm_py_raise(state, status, doing);
    return -1;
}

PyObject *
cm_py_answer(cm_state *state, cm_status status, const char *doing, PyObject *answer)
{
    if (cm_is_ok(status)) {
        return answer;
    }
    Py_XDECREF(answer);
    return cm_py_raise(state, status, doing);
}

static bool
is_unloading(int32_t code)
{
    return code == CM_CUDA_UNLOADING || code == CM_CUDA_CONTEXT_DESTROYED
           || code == CM_CUDA_INSUFFICIENT_DRIVER;
}

void
cm_py_report(cm_state *state, cm_status status, PyObject *where)
{
    if (cm_is_ok(status) || is_unloading(status.code) || state->cuda_error == NULL) {
        return; /* or nothing was opened, or the module is gone already */
    }
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    (void)cm_py_raise(state, status, NULL);
    PyErr_WriteUnraisable(where);
    PyErr_Restore(type, value, traceback);
}
