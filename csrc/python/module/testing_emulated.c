/* SPDX-License-Identifier: Apache-2.0 */
/* Test hooks over the emulated device: gates, capture, counts, the host's side of
 * memory. */
#include <stddef.h>
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/module/testing.h"
#include "python/protocols/protocols.h"
#include "runtime/emulated/emulated.h"

static cm_runtime *
emulated_runtime(PyObject *module)
{
    cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt != NULL && rt->backend != CM_BACKEND_EMULATED) {
        PyErr_SetString(PyExc_RuntimeError, "only on the emulated device");
        return NULL;
    }
    return rt;
}

static PyObject *
finish(PyObject *module, cm_status status)
{
    if (!cm_is_ok(status)) {
        return cm_py_raise(cm_state_of_module(module), status, NULL);
    }
    Py_RETURN_NONE;
}

typedef cm_status (*stream_action)(cm_runtime *rt, uint64_t stream, bool on);

/* Act on a stream argument with its device current. */
static PyObject *
act_on_stream(PyObject *module, PyObject *object, stream_action action, bool on)
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(cm_state_of_module(module), object, -1);
    if (stream == NULL) {
        return NULL;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    cm_device_guard guard;
    status = cm_device_enter(rt, stream->device, &guard);
    if (cm_is_ok(status)) {
        status = action(rt, cm_stream_tell_handle(stream), on);
        cm_device_leave(rt, &guard);
    }
    Py_END_ALLOW_THREADS
    cm_stream_give(cm_state_of_module(module), stream);
    return finish(module, status);
}

static cm_status
move_gate(cm_runtime *rt, uint64_t stream, bool open)
{
    return open ? cm_emulated_gate_open(rt, stream)
                : cm_emulated_gate_close(rt, stream);
}

static PyObject *
gate_close(PyObject *module, PyObject *stream)
{
    return act_on_stream(module, stream, move_gate, false);
}

static PyObject *
gate_open(PyObject *module, PyObject *stream)
{
    return act_on_stream(module, stream, move_gate, true);
}

static PyObject *
set_capturing(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"stream", "on", NULL};
    PyObject *values[2];
    bool on;
    if (cm_args_parse("set_capturing", args, nargs, kwnames, names, 2, 2, values) < 0
        || cm_arg_bool(values[1], "on", &on) < 0) {
        return NULL;
    }
    return act_on_stream(module, values[0], cm_emulated_set_capturing, on);
}

static const struct {
    const char *name;
    size_t offset;
} count_list[] = {
#define COUNT_ROW(name) {#name, offsetof(cm_emulated_counts, name)},
    CM_EMULATED_COUNTS(COUNT_ROW)
#undef COUNT_ROW
};

static PyObject *
counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_emulated_counts read;
    cm_emulated_read_counts(rt, &read);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < sizeof count_list / sizeof *count_list;
         i++) {
        uint64_t count;
        memcpy(&count, (const char *)&read + count_list[i].offset, sizeof count);
        PyObject *value = PyLong_FromUnsignedLongLong(count);
        if (value == NULL
            || PyDict_SetItemString(dict, count_list[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
host_pages(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    if (Py_TYPE(object) != state->managed_type) {
        cm_arg_refuse(object, "buffer", "a ManagedBuffer");
        return NULL;
    }
    const cm_buffer *buffer = (const cm_buffer *)(const void *)object;
    uint64_t pages = 0;
    cm_status status = cm_emulated_host_pages(rt, cm_buffer_address(buffer),
                                              cm_buffer_nbytes(buffer), &pages);
    return cm_is_ok(status) ? PyLong_FromUnsignedLongLong(pages)
                            : cm_py_raise(state, status, NULL);
}

static PyObject *
alias(PyObject *module, PyObject *args)
{
    unsigned long long address;
    unsigned long long nbytes;
    const cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL || !PyArg_ParseTuple(args, "KK:alias", &address, &nbytes)) {
        return NULL;
    }
    void *host = cm_emulated_host_alias(rt, address, nbytes);
    if (host == NULL) {
        PyErr_Format(PyExc_ValueError, "[%llu, +%llu) is inside no live allocation",
                     address, nbytes);
        return NULL;
    }
    return PyLong_FromVoidPtr(host);
}

static PyObject *
array_interface(PyObject *module, PyObject *object)
{
    if (!cm_buffer_check(cm_state_of_module(module), object)) {
        cm_arg_refuse(object, "buffer", "a Buffer");
        return NULL;
    }
    return cm_array_interface_dict(object);
}

static PyObject *
order_consumer(PyObject *module, PyObject *args)
{
    PyObject *object;
    PyObject *stream_object;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "OO:order_consumer", &object, &stream_object)) {
        return NULL;
    }
    if (!cm_buffer_check(state, object)) {
        cm_arg_refuse(object, "buffer", "a Buffer");
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, stream_object, -1);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_storage_order_handle(((cm_buffer *)(void *)object)->storage,
                                         stream->device, stream->handle);
    cm_stream_give(state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
max_delay_us(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = emulated_runtime(module);
    return rt == NULL ? NULL : PyLong_FromUnsignedLong(cm_emulated_max_delay_us(rt));
}

PyMethodDef cm_testing_emulated_methods[] = {
    {"gate_close", gate_close, METH_O, "Hold a stream shut."},
    {"gate_open", gate_open, METH_O, "Let it go on."},
    {"set_capturing", CM_TESTING_FAST(set_capturing), CM_TESTING_KEYWORDS,
     "Put a stream into capture."},
    {"counts", counts, METH_NOARGS, "Live objects of the emulated device."},
    {"host_pages", host_pages, METH_O,
     "Pages of a ManagedBuffer that are on the host."},
    {"alias", alias, METH_VARARGS, "The same bytes where the host may touch them."},
    {"array_interface", array_interface, METH_O,
     "The __cuda_array_interface__ that the buffer would have on a GPU."},
    {"order_consumer", order_consumer, METH_VARARGS,
     "Order a stream after the buffer's work, as DLPack does for a consumer's."},
    {"max_delay_us", max_delay_us, METH_NOARGS, "Longest delay of emulated work."},
    {NULL, NULL, 0, NULL},
};
