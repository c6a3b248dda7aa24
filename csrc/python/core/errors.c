/* SPDX-License-Identifier: Apache-2.0 */
/* The one switch from a status to a Python exception, and the exceptions themselves. */
#include "python/core/errors.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* -- the message ---------------------------------------------------------------------- */

/* How each operation's telling argument is written in ops.h, which says what it is. */
static const char *const argument_texts[CM_OP_COUNT] = {
#define CM_OP_ARGUMENT(name, cuda, driver, arg, params, args) [CM_OP_##name] = #arg,
    CM_OPS(CM_OP_ARGUMENT)
#undef CM_OP_ARGUMENT
};

static bool
contains(const char *text, const char *word)
{
    return strstr(text, word) != NULL;
}

/* "1073741824 bytes", "device 3", "stream 0x7f…"; "" when there is nothing to tell. */
static void
describe_argument(cm_status status, char *out, size_t out_nbytes)
{
    unsigned long long value = status.arg;
    const char *text = argument_texts[status.op];
    out[0] = '\0';
    if (text == NULL || strcmp(text, "0") == 0) {
        return;
    }
    if (contains(text, "nbytes") || contains(text, "width")) {
        (void)snprintf(out, out_nbytes, "%llu bytes", value);
    }
    else if (contains(text, "count")) {
        (void)snprintf(out, out_nbytes, "%llu %s", value,
                       contains(text, "block") ? "blocks" : "elements");
    }
    else if (contains(text, "int64_t)priority")) {
        (void)snprintf(out, out_nbytes, "priority %lld", (long long)status.arg);
    }
    else if (contains(text, "device") || contains(text, "peer")
             || contains(text, "attribute")) {
        (void)snprintf(out, out_nbytes, "%s %lld", text,
                       (long long)(int32_t)status.arg);
    }
    else if (contains(text, "host") || contains(text, "address")) {
        (void)snprintf(out, out_nbytes, "address 0x%llx", value);
    }
    else {
        (void)snprintf(out, out_nbytes, "%s 0x%llx", text, value);
    }
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
    PyObject *type = exception_type(state, status.code);
    PyObject *message = compose(status);
    if (message == NULL) {
        return NULL;
    }
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
        return; /* or the module is gone already */
    }
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    (void)cm_py_raise(state, status, NULL);
    PyErr_WriteUnraisable(where);
    PyErr_Restore(type, value, traceback);
}

/* -- registrar ------------------------------------------------------------------------ */

PyDoc_STRVAR(cuda_error_doc,
             "CudaError(*args, call=None, code=None, name=None, arg=None)\n"
             "--\n"
             "\n"
             "A call to CUDA failed.\n"
             "\n"
             "What cumem was doing at the time is in the notes of the exception.\n"
             "\n"
             "Attributes\n"
             "----------\n"
             "call : str or None\n"
             "    Name of the CUDA function, e.g. ``\"cudaHostAlloc\"``.\n"
             "code : int or None\n"
             "    The ``cudaError_t``, or a negative number of cumem's own.\n"
             "name : str or None\n"
             "    Name of the code, e.g. ``\"cudaErrorMemoryAllocation\"``.\n"
             "arg : int or None\n"
             "    The call's telling argument: a number of bytes, a device, a handle.\n"
             "\n"
             "All are None in an exception that was made without them.\n");

PyDoc_STRVAR(out_of_memory_error_doc,
             "There was not enough memory, on the device or to page-lock.\n"
             "\n"
             "Before it is raised cumem waits for freed memory that is still in use by a\n"
             "stream, gives back what its pools cache, calls the callbacks of\n"
             "`on_out_of_memory`, runs the garbage collector, and tries again after each. It\n"
             "is a `CudaError` and a `MemoryError`.\n"
             "\n"
             "Attributes\n"
             "----------\n"
             "requested : int\n"
             "    Bytes that were asked for.\n"
             "kind, device : str, int\n"
             "    Of what memory.\n"
             "limit : int or None\n"
             "    The limit that allows least, in bytes; None where there is none.\n"
             "live, cached, in_flight, largest_free : int\n"
             "    Bytes that the pool has handed out, keeps ready, waits for, and has in one\n"
             "    piece.\n"
             "others : int\n"
             "    Bytes that other pools hold, cached ones included: against the same limit,\n"
             "    or of the same kind where there is none.\n"
             "fragmentation : float\n"
             "    ``1 - largest_free / cached``; 0 if nothing is cached.\n"
             "driver_free, driver_total, outside : int or None\n"
             "    Bytes of the device that its driver has free and in all, and that are held\n"
             "    outside cumem; None for pinned and mapped memory.\n"
             "available : int or None\n"
             "    Bytes that the host can still give; None for device and managed memory.\n"
             "tried : tuple of str\n"
             "    What was done before giving up.\n"
             "advice : str\n"
             "    What to do, judged by these numbers.\n"
             "\n"
             "All are None where memory ran short in a copy instead of an allocation.\n");

PyDoc_STRVAR(cancelled_error_doc,
             "A transfer was cancelled before it began: nothing was read or written.\n"
             "\n"
             "Raised by `Transfer.wait`, `Transfer.order` and `await`. It is a\n"
             "`RuntimeError` and not ``asyncio.CancelledError``, which would say that the\n"
             "awaiting task itself is to end.\n");

PyDoc_STRVAR(emulation_warning_doc,
             "No GPU was found and cumem works on an emulated device.\n"
             "\n"
             "Given once per process, at first use, naming the reason. Set\n"
             "``CUMEM_BACKEND=emulated`` to choose emulation without it, or\n"
             "``CUMEM_BACKEND=cuda`` to get an error instead.\n");

static const char *const attributes[] = {"call", "code", "name", "arg"};
enum { ATTRIBUTE_COUNT = sizeof attributes / sizeof *attributes };

static bool
is_attribute(PyObject *name)
{
    for (int i = 0; i < ATTRIBUTE_COUNT; i++) {
        if (PyUnicode_CompareWithASCIIString(name, attributes[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* The arguments of an exception, and the attributes by keyword. */
static int
cuda_error_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    initproc base =
        (initproc)PyType_GetSlot((PyTypeObject *)PyExc_RuntimeError, Py_tp_init);
    if (base(self, args, NULL) < 0) {
        return -1;
    }
    PyObject *name;
    PyObject *value;
    Py_ssize_t at = 0;
    while (kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        if (!is_attribute(name)) {
            PyErr_Format(
                PyExc_TypeError,
                "CudaError() has no argument %R: it takes call, code, name and "
                "arg",
                name);
            return -1;
        }
        if (PyObject_SetAttr(self, name, value) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyType_Slot cuda_error_slots[] = {
    {Py_tp_doc, (void *)cuda_error_doc},
    {Py_tp_init, (void *)cuda_error_init},
    {0, NULL},
};

static PyType_Spec cuda_error_spec = {
    .name = "cumem.CudaError",
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = cuda_error_slots,
};

/* Made by hand it has no call to tell of. */
static PyObject *
make_cuda_error(PyObject *module)
{
    PyObject *type =
        PyType_FromModuleAndSpec(module, &cuda_error_spec, PyExc_RuntimeError);
    for (int i = 0; type != NULL && i < ATTRIBUTE_COUNT; i++) {
        if (PyObject_SetAttrString(type, attributes[i], Py_None) < 0) {
            Py_CLEAR(type);
        }
    }
    return type;
}

int
cm_register_errors(PyObject *module, cm_state *state)
{
    state->cuda_error = make_cuda_error(module);
    if (state->cuda_error == NULL
        || PyModule_AddObjectRef(module, "CudaError", state->cuda_error) < 0) {
        return -1;
    }
    PyObject *bases = PyTuple_Pack(2, state->cuda_error, PyExc_MemoryError);
    if (bases == NULL) {
        return -1;
    }
    state->out_of_memory_error = PyErr_NewExceptionWithDoc(
        "cumem.OutOfMemoryError", out_of_memory_error_doc, bases, NULL);
    Py_DECREF(bases);
    if (state->out_of_memory_error == NULL
        || PyModule_AddObjectRef(module, "OutOfMemoryError", state->out_of_memory_error)
               < 0) {
        return -1;
    }
    static const char *const numbers[] = {
        "requested",     "kind",        "device",       "limit",
        "live",          "cached",      "in_flight",    "largest_free",
        "fragmentation", "driver_free", "driver_total", "outside",
        "available",     "tried",       "advice",       "others",
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        if (PyObject_SetAttrString(state->out_of_memory_error, numbers[i], Py_None)
            < 0) {
            return -1;
        }
    }
    state->cancelled_error = PyErr_NewExceptionWithDoc(
        "cumem.CancelledError", cancelled_error_doc, PyExc_RuntimeError, NULL);
    if (state->cancelled_error == NULL
        || PyModule_AddObjectRef(module, "CancelledError", state->cancelled_error)
               < 0) {
        return -1;
    }
    state->emulation_warning = PyErr_NewExceptionWithDoc(
        "cumem.EmulationWarning", emulation_warning_doc, PyExc_UserWarning, NULL);
    if (state->emulation_warning == NULL) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "EmulationWarning", state->emulation_warning);
}
