/* SPDX-License-Identifier: Apache-2.0 */
/* cumem._core._testing: hooks for the test-suite. Not part of the public interface. The
 * functions get the extension itself as their module, where the state is. */
#include <stddef.h>
#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"

enum { KEYWORDS = METH_VARARGS | METH_KEYWORDS };

/* -- what is opened ---------------------------------------------------------------- */

static PyObject *
configure(PyObject *module, PyObject *Py_UNUSED(args), PyObject *kwargs)
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the runtime is open: shut it down first");
        return NULL;
    }
    cm_replace(&state->settings, Py_XNewRef(kwargs));
    if (cm_state_check_settings(state) < 0) {
        Py_CLEAR(state->settings);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
opened(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(cm_state_of_module(module)->runtime != NULL);
}

/* -- what is alive ----------------------------------------------------------------- */

static PyObject *
check_pools(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    bool good = true;
    for (int i = 0; i < CM_POOL_SLOT_COUNT; i++) {
        good = good && (state->pools[i] == NULL || cm_pool_check(state->pools[i]));
    }
    return PyBool_FromLong(good);
}

static PyObject *
live_storages(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    return PyLong_FromSize_t(cm_list_count(&state->storages));
}

static PyObject *
registrations(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    uint64_t count = state->registry == NULL ? 0 : cm_registry_count(state->registry);
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *
pending_transfers(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    uint64_t count = state->engine == NULL ? 0 : cm_engine_count_pending(state->engine);
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *
poll(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime == NULL) {
        cm_state_drop_deferred(state);
        Py_RETURN_NONE;
    }
    if (state->engine != NULL) {
        Py_BEGIN_ALLOW_THREADS
        cm_engine_poll(state->engine);
        Py_END_ALLOW_THREADS
    }
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
defer(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    cm_deferred *deferred = cm_deferred_new(state, object);
    if (deferred == NULL) {
        return NULL;
    }
    /* As if the interpreter were to do it later: the main thread would do it whenever
     * it runs Python, and a test is about a call that does. */
    cm_mutex_lock(&state->deferred_lock);
    state->call_pending = true;
    cm_mutex_unlock(&state->deferred_lock);
    cm_deferred_add(deferred);
    Py_RETURN_NONE;
}

static PyObject *
deny_peers(PyObject *module, PyObject *object)
{
    bool denied;
    cm_engine *engine = cm_state_engine(cm_state_of_module(module), -1);
    if (engine == NULL || cm_arg_bool(object, "denied", &denied) < 0) {
        return NULL;
    }
    cm_engine_deny_peers(engine, denied);
    Py_RETURN_NONE;
}

static PyObject *
calibrate_emulated(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state_of_module(module)->tuning.as_real = true;
    Py_RETURN_NONE;
}

/* -- calls of the runtime: counted, failed, delayed -- */

/* For "O&": an operation by either of its names; None is any. */
static int
read_op(PyObject *object, void *out)
{
    for (int op = CM_OP_none + 1; PyUnicode_Check(object) && op < CM_OP_COUNT; op++) {
        if (PyUnicode_CompareWithASCIIString(object, cm_op_facts[op].name) == 0
            || PyUnicode_CompareWithASCIIString(object, cm_op_facts[op].cuda_name)
                   == 0) {
            *(cm_op *)out = (cm_op)op;
            return 1;
        }
    }
    *(cm_op *)out = CM_OP_none;
    if (object != Py_None) {
        PyErr_Format(PyExc_ValueError, "op: there is no operation %R", object);
    }
    return object == Py_None;
}

static PyObject *
op_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int op = CM_OP_none + 1; list != NULL && op < CM_OP_COUNT; op++) {
        cm_append(&list,
                  Py_BuildValue("ssi", cm_op_facts[op].name, cm_op_facts[op].cuda_name,
                                cm_op_facts[op].min_driver));
    }
    return list;
}

static cm_runtime *
faults_runtime(PyObject *module)
{
    cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt != NULL && !cm_is_faults(rt)) {
        PyErr_SetString(PyExc_RuntimeError, "opened without configure(faults=True)");
        return NULL;
    }
    return rt;
}

PyDoc_STRVAR(plan_fault_doc,
"plan_fault($module, /, op, nth, code=2, repeat=False)\n--\n\n"
"Let the `nth` call (1 is the next) of an operation fail; 0 ends it. Resets the counts.");

static PyObject *
plan_fault(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", "nth", "code", "repeat", NULL};
    unsigned long long nth;
    int code = CM_CUDA_OUT_OF_MEMORY;
    int repeat = 0;
    cm_op op;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&K|ip:plan_fault", names, read_op,
                                     &op, &nth, &code, &repeat)) {
        return NULL;
    }
    cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_plan(rt, op, nth, code, repeat != 0);
    Py_RETURN_NONE;
}

static PyObject *
fault_count(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", NULL};
    cm_op op = CM_OP_none;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&:fault_count", names, read_op,
                                     &op)) {
        return NULL;
    }
    const cm_runtime *rt = faults_runtime(module);
    return rt == NULL ? NULL : PyLong_FromUnsignedLongLong(cm_faults_count(rt, op));
}

static PyObject *
fault_struck(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_op op = cm_faults_struck(rt);
    if (op == CM_OP_none) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(cm_op_facts[op].name);
}

static PyObject *
delay_op(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", "us", NULL};
    unsigned delay;
    cm_op op;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&I:delay_op", names, read_op, &op,
                                     &delay)) {
        return NULL;
    }
    cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_delay(rt, op, delay);
    Py_RETURN_NONE;
}

static PyObject *
calls_with_gil(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = faults_runtime(module);
    PyObject *counts = rt == NULL ? NULL : PyDict_New();
    for (int op = 1; counts != NULL && op < CM_OP_COUNT; op++) {
        uint64_t count = cm_faults_count_held(rt, (cm_op)op);
        PyObject *number = count == 0 ? NULL : PyLong_FromUnsignedLongLong(count);
        if (count != 0
            && (number == NULL
                || PyDict_SetItemString(counts, cm_op_facts[op].name, number) < 0)) {
            Py_CLEAR(counts);
        }
        Py_XDECREF(number);
    }
    return counts;
}

/* -- the emulated device: gates, capture, counts, the host's side of memory -- */

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

typedef cm_status (*stream_action)(cm_runtime *rt, uint64_t stream, bool on);

/* Act on a stream argument with its device current. */
static PyObject *
act_on_stream(PyObject *module, PyObject *object, stream_action action, bool on)
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = emulated_runtime(module);
    cm_stream *stream = rt == NULL ? NULL : cm_stream_from_object(state, object, -1);
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
    cm_stream_give(state, stream);
    return cm_py_answer(state, status, NULL, Py_NewRef(Py_None));
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
set_capturing(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "on", NULL};
    PyObject *stream;
    int on;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Op:set_capturing", names, &stream,
                                     &on)) {
        return NULL;
    }
    return act_on_stream(module, stream, cm_emulated_set_capturing, on != 0);
}

static PyObject *
counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_emulated_counts read;
    cm_emulated_read_counts(rt, &read);
#define COUNT_FORMAT(name) "sK"
#define COUNT_VALUE(name) , #name, (unsigned long long)read.name
    return Py_BuildValue(
        "{" CM_EMULATED_COUNTS(COUNT_FORMAT) "}" CM_EMULATED_COUNTS(COUNT_VALUE));
#undef COUNT_VALUE
#undef COUNT_FORMAT
}

static PyObject *
host_pages(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    if (!cm_buffer_check(state, object)
        || !cm_kind_migrates(cm_buffer_kind((const cm_buffer *)(void *)object))) {
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
    void *host = cm_runtime_host_alias(rt, address, nbytes);
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

/* -- calls on files: the nth fails, counted, held -- */

static cm_file_faults *
get_faults(cm_state *state)
{
    if (state->file_faults != NULL) {
        return state->file_faults;
    }
    cm_file_faults *faults = malloc(sizeof(*faults));
    if (faults == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    cm_file_faults_init(faults);
    state->file_faults = faults;
    return faults;
}

PyDoc_STRVAR(plan_doc,
             "file_plan($module, /, nth=0, error=0, repeat=False, most=0, held=0, "
             "is_cold=False, no_direct=False)\n--\n\n"
             "The nth read or write from now on fails with errno `error` (0: it moves\n"
             "nothing); each moves at most `most` bytes; from number `held` on\n"
             "they wait.");

static PyObject *
file_plan(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nth",  "error",   "repeat",    "most",
                            "held", "is_cold", "no_direct", NULL};
    unsigned long long nth = 0, most = 0, held = 0;
    int error = 0, repeat = 0, is_cold = 0, no_direct = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|KipKKpp:file_plan", names, &nth,
                                     &error, &repeat, &most, &held, &is_cold,
                                     &no_direct)) {
        return NULL;
    }
    const cm_file_plan plan = {
        .nth = nth,
        .error = error,
        .repeat = repeat != 0,
        .most = most,
        .held = held,
        .is_cold = is_cold != 0,
        .no_direct = no_direct != 0,
    };
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    cm_file_faults_set(faults, &plan);
    Py_RETURN_NONE;
}

static PyObject *
file_counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    cm_mutex_lock(&faults->lock);
    unsigned long long count = faults->count;
    unsigned long long direct = faults->direct_count;
    unsigned long long advised = faults->advised_count;
    int opened = faults->open_count;
    cm_mutex_unlock(&faults->lock);
    return Py_BuildValue("(KKKi)", count, direct, advised, opened);
}

static PyObject *
file_await(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    cm_file_faults_await(faults);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
file_open(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    cm_file_faults_open(faults);
    Py_RETURN_NONE;
}

/* -- the module -- */

static PyMethodDef testing_methods[] = {
    {"configure", CM_METHOD(configure), KEYWORDS,
     "What is opened at the next first use, of cumem/devices.py's read_settings()."},
    {"opened", opened, METH_NOARGS, "True while a runtime is open."},
    {"check_pools", check_pools, METH_NOARGS, "True when the pools' equations hold."},
    {"live_storages", live_storages, METH_NOARGS, "Storages that are not given back."},
    {"registrations", registrations, METH_NOARGS, "Pieces that we page-locked."},
    {"pending_transfers", pending_transfers, METH_NOARGS, "Unfinished transfers."},
    {"deny_peers", deny_peers, METH_O, "Copy as if no device reached another, or not."},
    {"poll", poll, METH_NOARGS, "Let go of what is done."},
    {"defer", defer, METH_O,
     "Drop a reference at the next use, as a finished copy does."},
    {"calibrate_emulated", calibrate_emulated, METH_NOARGS,
     "Copies ask for figures as on a real device, until shutdown()."},
    {"op_names", op_names, METH_NOARGS, "(name, CUDA's name, oldest driver) of each."},
    {"plan_fault", CM_METHOD(plan_fault), KEYWORDS, plan_fault_doc},
    {"fault_count", CM_METHOD(fault_count), KEYWORDS,
     "Calls since the last plan_fault()."},
    {"fault_struck", fault_struck, METH_NOARGS, "The operation made to fail, or None."},
    {"delay_op", CM_METHOD(delay_op), KEYWORDS,
     "Delay each call by so many microseconds."},
    {"calls_with_gil", calls_with_gil, METH_NOARGS,
     "Runtime calls made with the GIL held, by operation."},
    {"gate_close", gate_close, METH_O, "Hold a stream shut."},
    {"gate_open", gate_open, METH_O, "Let it go on."},
    {"set_capturing", CM_METHOD(set_capturing), KEYWORDS, "Put a stream into capture."},
    {"counts", counts, METH_NOARGS, "Live objects of the emulated device."},
    {"host_pages", host_pages, METH_O,
     "Pages of a ManagedBuffer that are on the host."},
    {"alias", alias, METH_VARARGS, "The same bytes where the host may touch them."},
    {"array_interface", array_interface, METH_O,
     "The __cuda_array_interface__ that the buffer would have on a GPU."},
    {"order_consumer", order_consumer, METH_VARARGS,
     "Order a stream after the buffer's work, as DLPack does for a consumer's."},
    {"max_delay_us", max_delay_us, METH_NOARGS, "Longest delay of emulated work."},
    {"file_plan", CM_METHOD(file_plan), KEYWORDS, plan_doc},
    {"file_counts", file_counts, METH_NOARGS,
     "Reads and writes since the plan; those past the page cache; announcements; "
     "descriptors past the page cache that are open now."},
    {"file_await", file_await, METH_NOARGS, "Wait until the held call waits."},
    {"file_open", file_open, METH_NOARGS, "Let it go on."},
    {NULL, NULL, 0, NULL},
};

/* Put the functions of one table into the submodule. */
static int
add_functions(PyObject *module, PyObject *testing, PyMethodDef *methods)
{
    for (PyMethodDef *def = methods; def->ml_name != NULL; def++) {
        PyObject *function = PyCFunction_NewEx(def, module, NULL);
        int result = function == NULL
                         ? -1
                         : PyObject_SetAttrString(testing, def->ml_name, function);
        Py_XDECREF(function);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

int
cm_register_testing(PyObject *module, cm_state *Py_UNUSED(state))
{
    PyObject *testing = PyModule_New("cumem._core._testing");
    if (testing == NULL) {
        return -1;
    }
    int result = PyModule_SetDocString(testing, "Hooks for the test-suite.");
    if (result == 0) {
        result = add_functions(module, testing, testing_methods);
    }
    if (result == 0) {
        result = PyModule_AddObjectRef(module, "_testing", testing);
    }
    Py_DECREF(testing);
    return result;
}
