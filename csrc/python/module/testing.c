/* SPDX-License-Identifier: Apache-2.0 */
/* Has the hooks of the tests, which are functions that only builds of the extension for
 * tests have.
 *
 * The wheel's extension is linked without this file. The extension for tests is linked
 * from the same objects and this one (setup.py), so a test sees the code that users
 * run. Everything that a hook does is typed and checked like any other function, and no
 * hook hands out an address. Tests call them through tests/support/testing.py. */
#include <string.h>

#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/storage.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/objects.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"
#include "runtime/scope.h"
#include "transfer/device/rows_kernel.h"

/* Set found[name] = value. *found may be NULL, and becomes NULL on failure. */
static void
put(PyObject **found, const char *name, uint64_t value)
{
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    if (*found == NULL || number == NULL
        || PyDict_SetItemString(*found, name, number) < 0) {
        Py_CLEAR(*found);
    }
    Py_XDECREF(number);
}

static bool
is_buffer(PyObject *module, PyObject *object)
{
    if (PyObject_TypeCheck(object, cm_state_of_module(module)->buffer_type)) {
        return true;
    }
    (void)cm_arg_refuse(object, "buffer", "a Buffer");
    return false;
}

/* -- what is alive ------------------------------------------------------------------------ */

static PyObject *
is_open(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(cm_state_of_module(module)->runtime != NULL);
}

static PyObject *
check_pools(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    for (int i = 0; i < CM_DEFAULT_POOL_COUNT; i++) {
        if (state->pools[i] != NULL && !cm_pool_check(state->pools[i])) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyObject *
count_storages(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromSize_t(cm_list_count(&cm_state_of_module(module)->storages));
}

static PyObject *
count_registrations(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_registry *registry = cm_state_of_module(module)->registry;
    return PyLong_FromUnsignedLongLong(registry == NULL ? 0
                                                        : cm_registry_count(registry));
}

static PyObject *
count_transfers(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_engine *engine = cm_state_of_module(module)->engine;
    return PyLong_FromUnsignedLongLong(
        engine == NULL ? 0 : cm_engine_count_pending(engine));
}

static PyObject *
poll_transfers(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime == NULL) {
        cm_state_drop_deferred(state);
        Py_RETURN_NONE;
    }
    if (state->engine != NULL) {
        cm_state_enter(state);
        PyThreadState *thread = cm_gil_give();
        cm_engine_poll(state->engine);
        cm_gil_take(thread);
        cm_state_leave(state);
    }
    if (cm_state_runtime(state) == NULL) { /* this drops what was deferred */
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The state is made to look as if a pending call were queued already. Otherwise the
 * interpreter would drop the reference as soon as the main thread runs Python, while
 * the test is about a call of the core that drops it. */
static PyObject *
defer(PyObject *module, PyObject *value)
{
    cm_state *state = cm_state_of_module(module);
    cm_deferred *deferred = cm_deferred_new(state, value);
    if (deferred == NULL) {
        return NULL;
    }
    cm_mutex_lock(&state->deferred_lock);
    state->call_pending = true;
    cm_mutex_unlock(&state->deferred_lock);
    cm_deferred_add(deferred);
    Py_RETURN_NONE;
}

/* -- copies ------------------------------------------------------------------------------- */

/* Return the engine of the open runtime, or of one that this opens, or NULL with an
 * exception. */
static cm_engine *
open_engine(PyObject *module)
{
    cm_state *state = cm_state_of_module(module);
    return cm_state_runtime(state) == NULL ? NULL : cm_state_engine(state, -1);
}

static PyObject *
copy_counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_engine *engine = open_engine(module);
    if (engine == NULL) {
        return NULL;
    }
    const cm_copy_counts *counts = cm_engine_counts(engine);
    PyObject *found = PyDict_New();
    for (int i = 0; i < CM_ROUTE_COUNT; i++) {
        const char *text = cm_routes[i].text;
        put(&found, text == NULL ? "" : text, atomic_load(&counts->routes.of[i]));
    }
    put(&found, "quick", atomic_load(&counts->quick));
    put(&found, "bounced", atomic_load(&counts->bounced));
    put(&found, "pieces", atomic_load(&counts->pieces));
    return found;
}

static PyObject *
deny_peers(PyObject *module, PyObject *denied)
{
    cm_engine *engine = open_engine(module);
    int is_denied = PyObject_IsTrue(denied);
    if (engine == NULL || is_denied < 0) {
        return NULL;
    }
    cm_engine_deny_peers(engine, is_denied != 0);
    Py_RETURN_NONE;
}

/* What copy_rows() asks of the kernel. */
typedef struct rows_call {
    cm_rows_move move;
    cm_rows_layer *layers; /* owned */
    Py_ssize_t layer_count;
    int device; /* -1 until a buffer of a device is seen */
    int repeat;
    float milliseconds;
} rows_call;

/* Describe a buffer of any kind that a device reaches. Returns false with an exception
 * if it fails. */
static bool
read_rows_end(PyObject *module, PyObject *object, rows_call *call, cm_region *region)
{
    if (!is_buffer(module, object)) {
        return false;
    }
    cm_buffer_region((cm_buffer *)(void *)object, region);
    if (region->address == 0 || region->ndim == 0) {
        PyErr_SetString(PyExc_ValueError, "a device reaches no rows of this buffer");
        return false;
    }
    if (cm_kind_is_on_device(region->kind)) {
        call->device = region->device;
    }
    return true;
}

static bool
read_layer_end(PyObject *module, PyObject *object, rows_call *call, int side,
               cm_rows_layer *layer)
{
    cm_region region, row;
    int64_t count;
    if (!read_rows_end(module, object, call, &region)) {
        return false;
    }
    bool is_locked = cm_kind_is_page_locked(region.kind);
    call->move.is_over_bus = call->move.is_over_bus || is_locked;
    call->move.is_to_host = call->move.is_to_host || (is_locked && side == CM_DST);
    row = region;
    row.ndim--;
    memmove(row.shape, row.shape + 1, sizeof(row.shape) - sizeof(*row.shape));
    memmove(row.strides, row.strides + 1, sizeof(row.strides) - sizeof(*row.strides));
    if (!cm_is_ok(cm_region_count(&row, &count)) || !cm_region_is_c_contiguous(&row)) {
        PyErr_SetString(PyExc_ValueError, "the rows have gaps");
        return false;
    }
    layer->address[side] = region.address;
    layer->stride[side] = region.strides[0];
    layer->row_count[side] = (uint64_t)region.shape[0];
    layer->row_nbytes = (uint64_t)(count * region.itemsize);
    return true;
}

/* Read an array of numbers, whose length says how many rows are copied, or None. */
static bool
read_numbers(PyObject *module, PyObject *object, rows_call *call, int side)
{
    cm_region region;
    if (object == Py_None) {
        return true;
    }
    if (!read_rows_end(module, object, call, &region)) {
        return false;
    }
    call->move.count = (uint64_t)region.shape[0];
    PyObject *dtype = ((cm_buffer *)(void *)object)->dtype;
    call->move.numbers[side] =
        (cm_row_numbers){.address = region.address,
                         .stride = region.strides[0],
                         .nbytes = (uint32_t)region.itemsize,
                         .is_signed = cm_numpy_letter(dtype) == 'i'};
    return true;
}

/* Queue all launches on a stream of their own, and time all but the first. */
static cm_status
time_rows(cm_kernels *kernels, rows_call *call, uint64_t stream, uint64_t start,
          uint64_t end)
{
    cm_runtime *rt = kernels->rt;
    uint64_t count = (uint64_t)call->layer_count;
    CM_TRY(cm_rt_device_synchronize(rt));
    for (int i = 0; i < call->repeat; i++) {
        CM_TRY(cm_rows_launch(kernels, call->device, &call->move, call->layers, count,
                              stream));
        if (i == 0) {
            CM_TRY(cm_rt_event_record(rt, start, stream));
        }
    }
    CM_TRY(cm_rt_event_record(rt, end, stream));
    CM_TRY(cm_rt_stream_synchronize(rt, stream));
    return cm_rt_event_elapsed(rt, start, end, &call->milliseconds);
}

static cm_status
run_rows(cm_runtime *rt, rows_call *call)
{
    cm_kernels kernels = {.rt = rt};
    uint64_t stream = 0, start = 0, end = 0;
    cm_status status = cm_rt_stream_create(rt, CM_STREAM_NON_BLOCKING, 0, &stream);
    if (cm_is_ok(status)) {
        status = cm_rt_event_create(rt, 0, &start);
    }
    if (cm_is_ok(status)) {
        status = cm_rt_event_create(rt, 0, &end);
    }
    if (cm_is_ok(status)) {
        status = time_rows(&kernels, call, stream, start, end);
    }
    if (end != 0) {
        status = cm_first_failure(status, cm_rt_event_destroy(rt, end));
    }
    if (start != 0) {
        status = cm_first_failure(status, cm_rt_event_destroy(rt, start));
    }
    if (stream != 0) {
        status = cm_first_failure(status, cm_rt_stream_destroy(rt, stream));
    }
    return cm_first_failure(status, cm_kernels_fini(&kernels));
}

/* Read both lists of layers. Returns false with an exception if it fails. */
static bool
read_layers(PyObject *module, PyObject *dsts, PyObject *srcs, rows_call *call)
{
    call->layer_count = PyList_Size(dsts);
    if (call->layer_count == 0) {
        PyErr_SetString(PyExc_ValueError, "there are no layers");
        return false;
    }
    call->layers = PyMem_Calloc((size_t)call->layer_count, sizeof(*call->layers));
    if (call->layers == NULL) {
        (void)PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < call->layer_count; i++) {
        PyObject *dst = PyList_GetItem(dsts, i);
        PyObject *src = PyList_GetItem(srcs, i); /* IndexError if there are fewer */
        if (src == NULL || !read_layer_end(module, dst, call, CM_DST, &call->layers[i])
            || !read_layer_end(module, src, call, CM_SRC, &call->layers[i])) {
            return false;
        }
    }
    call->move.count = call->layers[0].row_count[CM_DST];
    return true;
}

/* Read the arguments. Returns false with an exception if it fails. In either case the
 * caller frees the layers. */
static bool
read_rows_call(PyObject *module, PyObject *args, rows_call *call)
{
    PyObject *dsts, *srcs, *dst_rows, *src_rows, *flag;
    cm_region flagged;
    if (!PyArg_ParseTuple(args, "O!O!OOOIi:_test_copy_rows", &PyList_Type, &dsts,
                          &PyList_Type, &srcs, &dst_rows, &src_rows, &flag,
                          &call->move.max_sms, &call->repeat)
        || !read_layers(module, dsts, srcs, call)
        || !read_numbers(module, dst_rows, call, CM_DST)
        || !read_numbers(module, src_rows, call, CM_SRC)) {
        return false;
    }
    if (!read_rows_end(module, flag, call, &flagged)) {
        return false;
    }
    call->move.flag = flagged.address;
    call->device = call->device < 0 ? 0 : call->device;
    return true;
}

static PyObject *
copy_rows(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    rows_call call = {.device = -1};
    PyObject *result = NULL;
    if (read_rows_call(module, args, &call)) {
        cm_runtime *rt = state->runtime;
        cm_status status =
            CM_WITHOUT_GIL(CM_IN_SCOPE(rt, call.device, run_rows(rt, &call)));
        result = cm_py_answer(state, status, NULL,
                              PyFloat_FromDouble((double)call.milliseconds));
    }
    PyMem_Free(call.layers);
    return result;
}

/* -- calls of the runtime: counted, failed, delayed --------------------------------------- */

/* Make the types of all struct sequences, and list them. */
static PyObject *
answer_types(PyObject *module, PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int which = 0; list != NULL && which < CM_STRUCTSEQ_COUNT; which++) {
        PyTypeObject *type = cm_structseq_type(cm_state_of_module(module), which);
        cm_append(&list, Py_XNewRef((PyObject *)type));
    }
    return list;
}

static PyObject *
operations(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int op = CM_OP_none + 1; list != NULL && op < CM_OP_COUNT; op++) {
        const cm_op_fact *fact = &cm_op_facts[op];
        cm_append(&list, Py_BuildValue("(ssi)", fact->name, fact->cuda_name,
                                       fact->min_driver));
    }
    return list;
}

/* Find an operation by either of its names. NULL means any operation. Returns false
 * with ValueError if there is no such operation. */
static bool
find_op(const char *name, cm_op *out)
{
    *out = CM_OP_none;
    if (name == NULL) {
        return true;
    }
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        if (strcmp(name, cm_op_facts[op].name) == 0
            || strcmp(name, cm_op_facts[op].cuda_name) == 0) {
            *out = (cm_op)op;
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "op: there is no operation '%s'", name);
    return false;
}

/* Return the open runtime, which can make calls fail, or NULL with an exception. */
static cm_runtime *
faulty_runtime(PyObject *module)
{
    cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt != NULL && rt->inner == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "opened without configure(faults=True)");
        return NULL;
    }
    return rt;
}

static PyObject *
plan_fault(PyObject *module, PyObject *args)
{
    const char *name;
    unsigned long long nth;
    int code, repeat;
    cm_op op;
    if (!PyArg_ParseTuple(args, "zKip:_test_plan_fault", &name, &nth, &code, &repeat)
        || !find_op(name, &op)) {
        return NULL;
    }
    cm_runtime *rt = faulty_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_plan(rt, op, nth, code, repeat != 0);
    Py_RETURN_NONE;
}

static PyObject *
fault_count(PyObject *module, PyObject *args)
{
    const char *name;
    cm_op op;
    if (!PyArg_ParseTuple(args, "z:_test_fault_count", &name) || !find_op(name, &op)) {
        return NULL;
    }
    cm_runtime *rt = faulty_runtime(module);
    return rt == NULL ? NULL : PyLong_FromUnsignedLongLong(cm_faults_count(rt, op));
}

static PyObject *
last_injected_fault(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = faulty_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_op op = cm_faults_last_injected(rt);
    if (op == CM_OP_none) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(cm_op_facts[op].name);
}

static PyObject *
delay_op(PyObject *module, PyObject *args)
{
    const char *name;
    unsigned delay_us;
    cm_op op;
    if (!PyArg_ParseTuple(args, "zI:_test_delay_op", &name, &delay_us)
        || !find_op(name, &op)) {
        return NULL;
    }
    cm_runtime *rt = faulty_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_delay(rt, op, delay_us);
    Py_RETURN_NONE;
}

static PyObject *
calls_with_gil(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = faulty_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    PyObject *found = PyDict_New();
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        uint64_t count = cm_faults_count_held(rt, (cm_op)op);
        if (count > 0) {
            put(&found, cm_op_facts[op].name, count);
        }
    }
    return found;
}

/* -- the emulated device ------------------------------------------------------------------ */

/* Return the emulated runtime, or NULL with an exception if no emulated device is open
 * or can be opened. */
static cm_runtime *
emulated_runtime(PyObject *module)
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = cm_state_runtime(state);
    if (rt != NULL && !cm_state_is_emulated(state)) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "this hook needs the emulated device: set CUMEM_BACKEND=emulated");
        return NULL;
    }
    return rt;
}

static cm_status
begin_capture(cm_runtime *rt, uint64_t stream)
{
    return cm_emulated_set_capturing(rt, stream, true);
}

static cm_status
end_capture(cm_runtime *rt, uint64_t stream)
{
    return cm_emulated_set_capturing(rt, stream, false);
}

static PyObject *
set_capturing(PyObject *module, PyObject *args)
{
    PyObject *stream;
    int on;
    if (!PyArg_ParseTuple(args, "Op:_test_set_capturing", &stream, &on)) {
        return NULL;
    }
    return cm_emulated_stream_act(cm_state_of_module(module), stream,
                                  on != 0 ? begin_capture : end_capture);
}

static PyObject *
shut_new_streams(PyObject *module, PyObject *on)
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_emulated_shut_new(rt, on == Py_True);
    Py_RETURN_NONE;
}

static PyObject *
emulated_counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    PyObject *found = PyDict_New();
#define PUT(name) put(&found, #name, counts.name);
    CM_EMULATED_COUNTS(PUT)
#undef PUT
    return found;
}

static PyObject *
contexts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(CM_WITHOUT_GIL(cm_devices_in_use(rt, true)));
}

/* The devices that enter_device() has entered in this thread, the innermost last. */
static _Thread_local struct {
    cm_device_guard guards[8];
    int count;
} entered;

static PyObject *
enter_device(PyObject *module, PyObject *args)
{
    int device;
    if (!PyArg_ParseTuple(args, "i:_test_enter_device", &device)) {
        return NULL;
    }
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    if (device < 0 || device >= rt->device_count || entered.count == 8) {
        PyErr_Format(PyExc_ValueError, "device %d does not exist, or 8 are entered",
                     device);
        return NULL;
    }
    cm_device_guard *guard = &entered.guards[entered.count];
    if (cm_py_check(cm_state_of_module(module),
                    CM_WITHOUT_GIL(cm_device_enter(rt, device, guard)), NULL)
        < 0) {
        return NULL;
    }
    entered.count++;
    Py_RETURN_NONE;
}

static PyObject *
leave_device(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    if (entered.count == 0) {
        PyErr_SetString(PyExc_RuntimeError, "no device was entered in this thread");
        return NULL;
    }
    const cm_device_guard *guard = &entered.guards[--entered.count];
    PyThreadState *thread = cm_gil_give();
    cm_device_leave(rt, guard);
    cm_gil_take(thread);
    Py_RETURN_NONE;
}

static PyObject *
host_pages(PyObject *module, PyObject *args)
{
    unsigned long long address, nbytes;
    uint64_t pages = 0;
    if (!PyArg_ParseTuple(args, "KK:_test_host_pages", &address, &nbytes)) {
        return NULL;
    }
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = cm_emulated_host_pages(rt, address, nbytes, &pages);
    return cm_py_answer(cm_state_of_module(module), status, NULL,
                        PyLong_FromUnsignedLongLong(pages));
}

static PyObject *
host_bytes(PyObject *module, PyObject *args)
{
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "KK:_test_host_bytes", &address, &nbytes)) {
        return NULL;
    }
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    void *host = cm_runtime_host_alias(rt, address, nbytes);
    if (host == NULL) {
        PyErr_Format(PyExc_ValueError, "[%llu, +%llu) is inside no live allocation",
                     address, nbytes);
        return NULL;
    }
    return PyMemoryView_FromMemory(host, (Py_ssize_t)nbytes, PyBUF_WRITE);
}

/* -- buffers ------------------------------------------------------------------------------ */

static PyObject *
array_interface(PyObject *module, PyObject *buffer)
{
    return is_buffer(module, buffer) ? cm_array_interface_dict(buffer) : NULL;
}

static PyObject *
order_consumer(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *buffer, *object;
    if (!PyArg_ParseTuple(args, "OO:_test_order_consumer", &buffer, &object)
        || !is_buffer(module, buffer)) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, object, -1);
    if (stream == NULL) {
        return NULL;
    }
    cm_storage *storage = ((cm_buffer *)(void *)buffer)->storage;
    int result = cm_storage_order_handle(storage, stream->device,
                                         cm_stream_export_handle(stream));
    cm_stream_give(state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- calls on files: counted, held, or made to fail -------------------------------- */

static PyObject *
file_plan(PyObject *module, PyObject *args)
{
    cm_file_faults *faults = &cm_state_of_module(module)->file_faults;
    unsigned long long nth, most, held;
    int error, repeat, is_cold, no_direct;
    if (!PyArg_ParseTuple(args, "KKKippp:_test_file_plan", &nth, &most, &held, &error,
                          &repeat, &is_cold, &no_direct)) {
        return NULL;
    }
    faults->nth = nth;
    faults->most = most;
    faults->held = held;
    atomic_store(&faults->count, 0);
    atomic_store(&faults->direct_count, 0);
    atomic_store(&faults->advised_count, 0);
    faults->error = error;
    faults->repeat = repeat != 0;
    faults->is_cold = is_cold != 0;
    faults->no_direct = no_direct != 0;
    atomic_store(&faults->is_shut, true);
    faults->is_on = true;
    Py_RETURN_NONE;
}

static PyObject *
file_counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_file_faults *faults = &cm_state_of_module(module)->file_faults;
    PyObject *found = PyDict_New();
    put(&found, "held", faults->held);
    put(&found, "count", atomic_load(&faults->count));
    put(&found, "direct", atomic_load(&faults->direct_count));
    put(&found, "advised", atomic_load(&faults->advised_count));
    return found;
}

static PyObject *
file_open(PyObject *module, PyObject *Py_UNUSED(unused))
{
    atomic_store(&cm_state_of_module(module)->file_faults.is_shut, false);
    Py_RETURN_NONE;
}

/* -- table -------------------------------------------------------------------------------- */

PyMethodDef cm_testing_methods[] = {
    {"_test_is_open", is_open, METH_NOARGS, CM_DOC__test_is_open},
    {"_test_check_pools", check_pools, METH_NOARGS, CM_DOC__test_check_pools},
    {"_test_count_storages", count_storages, METH_NOARGS, CM_DOC__test_count_storages},
    {"_test_count_registrations", count_registrations, METH_NOARGS,
     CM_DOC__test_count_registrations},
    {"_test_count_transfers", count_transfers, METH_NOARGS,
     CM_DOC__test_count_transfers},
    {"_test_poll", poll_transfers, METH_NOARGS, CM_DOC__test_poll},
    {"_test_defer", defer, METH_O, CM_DOC__test_defer},
    {"_test_copy_counts", copy_counts, METH_NOARGS, CM_DOC__test_copy_counts},
    {"_test_deny_peers", deny_peers, METH_O, CM_DOC__test_deny_peers},
    {"_test_copy_rows", copy_rows, METH_VARARGS, CM_DOC__test_copy_rows},
    {"_test_answer_types", answer_types, METH_NOARGS, CM_DOC__test_answer_types},
    {"_test_operations", operations, METH_NOARGS, CM_DOC__test_operations},
    {"_test_plan_fault", plan_fault, METH_VARARGS, CM_DOC__test_plan_fault},
    {"_test_fault_count", fault_count, METH_VARARGS, CM_DOC__test_fault_count},
    {"_test_last_injected_fault", last_injected_fault, METH_NOARGS,
     CM_DOC__test_last_injected_fault},
    {"_test_delay_op", delay_op, METH_VARARGS, CM_DOC__test_delay_op},
    {"_test_calls_with_gil", calls_with_gil, METH_NOARGS, CM_DOC__test_calls_with_gil},
    {"_test_set_capturing", set_capturing, METH_VARARGS, CM_DOC__test_set_capturing},
    {"_test_shut_new_streams", shut_new_streams, METH_O, CM_DOC__test_shut_new_streams},
    {"_test_emulated_counts", emulated_counts, METH_NOARGS,
     CM_DOC__test_emulated_counts},
    {"_test_contexts", contexts, METH_NOARGS, CM_DOC__test_contexts},
    {"_test_enter_device", enter_device, METH_VARARGS, CM_DOC__test_enter_device},
    {"_test_leave_device", leave_device, METH_NOARGS, CM_DOC__test_leave_device},
    {"_test_host_pages", host_pages, METH_VARARGS, CM_DOC__test_host_pages},
    {"_test_host_bytes", host_bytes, METH_VARARGS, CM_DOC__test_host_bytes},
    {"_test_array_interface", array_interface, METH_O, CM_DOC__test_array_interface},
    {"_test_order_consumer", order_consumer, METH_VARARGS, CM_DOC__test_order_consumer},
    {"_test_file_plan", file_plan, METH_VARARGS, CM_DOC__test_file_plan},
    {"_test_file_counts", file_counts, METH_NOARGS, CM_DOC__test_file_counts},
    {"_test_file_open", file_open, METH_NOARGS, CM_DOC__test_file_open},
    {NULL, NULL, 0, NULL},
};
