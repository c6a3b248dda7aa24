/* SPDX-License-Identifier: Apache-2.0 */
/* What cumem/_testing.py, the hooks of the test-suite, is made of: it calls functions
 * of the core by their addresses. Not part of the public interface. */
#include <stddef.h>

#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"
#include "transfer/run/explain.h"

static PyObject *
configure(PyObject *module, PyObject *settings)
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the runtime is open: shut it down first");
        return NULL;
    }
    cm_replace(&state->settings, Py_NewRef(settings));
    if (cm_state_check_settings(state) < 0) {
        Py_CLEAR(state->settings);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- addresses ---------------------------------------------------------------------- */

/* Of each name an address, an offset or a count. */
static PyObject *
addresses(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
#define NAMED(name)                                                                    \
    {                                                                                  \
        #name, (uintptr_t)(name)                                                       \
    }
    const struct {
        const char *name;
        uintptr_t value;
    } rows[] = {
        NAMED(cm_array_interface_dict),
        NAMED(cm_deferred_add),
        NAMED(cm_deferred_new),
        NAMED(cm_emulated_host_pages),
        NAMED(cm_emulated_max_delay_us),
        NAMED(cm_emulated_read_counts),
        NAMED(cm_engine_count_pending),
        NAMED(cm_engine_deny_peers),
        NAMED(cm_engine_poll),
        NAMED(cm_engine_counts),
        NAMED(cm_faults_count),
        NAMED(cm_faults_count_held),
        NAMED(cm_faults_delay),
        NAMED(cm_faults_plan),
        NAMED(cm_faults_struck),
        NAMED(cm_is_faults),
        NAMED(cm_op_facts),
        NAMED(cm_pool_check),
        NAMED(cm_py_raise),
        NAMED(cm_registry_count),
        NAMED(cm_routes),
        NAMED(cm_runtime_host_alias),
        NAMED(cm_state_drop_deferred),
        NAMED(cm_state_engine),
        NAMED(cm_storage_order_handle),
        NAMED(state),
        {"runtime", (uintptr_t)state->runtime},
        {"registry", (uintptr_t)state->registry},
        {"engine", (uintptr_t)state->engine},
        {"storages", cm_list_count(&state->storages)},
        {"call_pending", (uintptr_t)&state->call_pending},
        {"tunes_as_real", (uintptr_t)&state->tuning.as_real},
        {"storage_of_buffer", offsetof(cm_buffer, storage)},
        {"file_faults", (uintptr_t)&state->file_faults},
        {"op_count", CM_OP_COUNT},
        {"route_count", CM_ROUTE_COUNT},
        {"route_size", sizeof(cm_route_row)}, /* begins with its name */
    };
#undef NAMED
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < sizeof(rows) / sizeof(rows[0]); i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(rows[i].value);
        if (value == NULL || PyDict_SetItemString(dict, rows[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

/* -- streams of the emulated device, which may be any argument that means one -------- */

/* Act on it with its device current. */
static PyObject *
act_on_stream(PyObject *module, PyObject *args,
              cm_status (*action)(cm_runtime *rt, uint64_t stream, bool on))
{
    cm_state *state = cm_state_of_module(module);
    PyObject *object;
    int on;
    if (!PyArg_ParseTuple(args, "Op", &object, &on)) {
        return NULL;
    }
    cm_runtime *rt = cm_state_runtime(state);
    if (rt != NULL && rt->backend != CM_BACKEND_EMULATED) {
        PyErr_SetString(PyExc_RuntimeError, "only on the emulated device");
        return NULL;
    }
    cm_stream *stream = rt == NULL ? NULL : cm_stream_from_object(state, object, -1);
    if (stream == NULL) {
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(CM_ON_DEVICE(
        rt, stream->device, action(rt, cm_stream_tell_handle(stream), on != 0)));
    cm_stream_give(state, stream);
    return cm_py_answer(state, status, NULL, Py_NewRef(Py_None));
}

static cm_status
set_gate(cm_runtime *rt, uint64_t stream, bool open)
{
    return open ? cm_emulated_gate_open(rt, stream)
                : cm_emulated_gate_close(rt, stream);
}

static PyObject *
move_gate(PyObject *module, PyObject *args)
{
    return act_on_stream(module, args, set_gate);
}

static PyObject *
set_capturing(PyObject *module, PyObject *args)
{
    return act_on_stream(module, args, cm_emulated_set_capturing);
}

/* -- table --------------------------------------------------------------------------- */

PyMethodDef cm_testing_methods[] = {
    {"_configure_opening", configure, METH_O, CM_DOC__configure_opening},
    {"_addresses", addresses, METH_NOARGS, CM_DOC__addresses},
    {"_move_gate", move_gate, METH_VARARGS, CM_DOC__move_gate},
    {"_set_capturing", set_capturing, METH_VARARGS, CM_DOC__set_capturing},
    {NULL, NULL, 0, NULL},
};
