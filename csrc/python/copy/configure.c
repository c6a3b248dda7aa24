/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/configure.h"

#include <string.h>

#include "base/machine.h"
#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/package.h"

/* -- the layers; what they are called, and what may stand in them, is the package's ------ */

int
cm_configure_open(cm_state *state)
{
    if (!state->tuning.is_open && cm_package_has_variables("CUMEM_TRANSFER_")) {
        PyObject *done = cm_package_call("tuning", "read_environment", PyTuple_New(0));
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    state->tuning.is_open = true;
    return 0;
}

void
cm_configure_close(cm_state *state)
{
    cm_tuning_layers *layers = &state->tuning;
    memset(&layers->layers[CM_LAYER_CALIBRATION], 0, sizeof(cm_tuning_layer));
    memset(&layers->layers[CM_LAYER_ENVIRONMENT], 0, sizeof(cm_tuning_layer));
    layers->is_open = false;
    layers->has_looked = false;
    layers->as_real = false;
}

/* from[i]: the layer that a value is of, or -1. */
static void
get_tuning(const cm_state *state, unsigned cpu_count, cm_tuning *out, int *from)
{
    bool is_emulated =
        state->runtime != NULL && state->runtime->backend == CM_BACKEND_EMULATED;
    /* There all is as on the default machine, so that tests find the same anywhere. */
    cm_tuning_init_for(out, is_emulated ? CM_THREAD_MAX : cpu_count);
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        from[i] = -1;
        for (int k = 0; k < CM_LAYER_COUNT; k++) {
            const cm_tuning_layer *layer = &state->tuning.layers[k];
            if (layer->is_set[i]) {
                *cm_tuning_at(out, i) = layer->values[i];
                from[i] = k;
            }
        }
    }
    if (from[CM_TUNING_thread_count] >= CM_LAYER_ENVIRONMENT) {
        /* few threads asked for: no more here either */
        out->fresh_thread_count = out->thread_count;
    }
}

int
cm_configure_apply(cm_state *state)
{
    cm_tuning tuning;
    int from[CM_TUNING_COUNT];
    if (state->engine == NULL) {
        return 0;
    }
    get_tuning(state, cm_usable_cpu_count(NULL), &tuning, from);
    cm_status status = cm_engine_set_tuning(state->engine, &tuning);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, "while configuring");
}

/* -- figures that calibrate() has kept: the package does the rest ------------------------ */

enum { LOOK_NBYTES = 64 << 10 }; /* shorter copies do not notice */

int
cm_configure_look(cm_state *state, int device)
{
    if (state->tuning.has_looked
        || state->runtime == NULL
        /* In a forked child nothing that is found could be put to use. */
        || cm_runtime_is_forked(state->runtime)
        || (state->runtime->backend == CM_BACKEND_EMULATED && !state->tuning.as_real)) {
        return 0;
    }
    state->tuning.has_looked = true;
    cm_state_enter(state);
    PyObject *done = cm_package_call(
        "calibration", "take_kept",
        Py_BuildValue("(i)", device < 0 ? state->current_device : device));
    cm_state_leave(state);
    if (done != NULL) {
        Py_DECREF(done);
        return 0;
    }
    /* Exceptions that are no errors, KeyboardInterrupt for one, end what is done. */
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_WriteUnraisable(NULL);
    return 0;
}

int
cm_configure_look_for(cm_state *state, const cm_copy_request *request)
{
    int64_t count;
    if (CM_LIKELY(state->tuning.has_looked)
        || !cm_is_ok(cm_region_count(&request->dst, &count))
        || count < LOOK_NBYTES / request->dst.itemsize) {
        return 0;
    }
    int there = request->dst.device;
    return cm_configure_look(state, there < 0 ? request->src.device : there);
}

/* -- functions --------------------------------------------------------------------------- */

/* 0, or -1 with an exception; None takes a value out of the layer. */
static int
put(cm_tuning_layer *layer, int index, PyObject *value)
{
    const cm_tuning_row *row = &cm_tuning_rows[index];
    uint64_t number = value == Py_None ? 0 : PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (value != Py_None && (number < row->least || number > row->most)) {
        PyErr_Format(PyExc_ValueError, "%s: %R", row->name, value);
        return -1;
    }
    layer->is_set[index] = value != Py_None;
    layer->values[index] = number;
    return 0;
}

static PyObject *
set_tuning(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    int which;
    PyObject *changes;
    if (!PyArg_ParseTuple(args, "iO!", &which, &PyDict_Type, &changes)) {
        return NULL;
    }
    if (which < 0 || which >= CM_LAYER_COUNT) {
        PyErr_Format(PyExc_ValueError, "there is no layer %d", which);
        return NULL;
    }
    const cm_tuning_layers before = state->tuning;
    cm_tuning_layer layer = before.layers[which];
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        PyObject *value = PyDict_GetItemString(changes, cm_tuning_rows[i].name);
        if (value != NULL && put(&layer, i, value) < 0) {
            return NULL;
        }
    }
    state->tuning.layers[which] = layer;
    state->tuning.is_open |= which == CM_LAYER_ENVIRONMENT;
    /* What is kept does not take the place of what was measured now. */
    state->tuning.has_looked |= which == CM_LAYER_CALIBRATION;
    if (cm_configure_apply(state) < 0) {
        state->tuning = before;
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
read_tuning(PyObject *module, PyObject *look)
{
    cm_state *state = cm_state_of_module(module);
    cm_tuning tuning;
    int from[CM_TUNING_COUNT];
    if (look == Py_True
        && (cm_configure_open(state) < 0 || cm_configure_look(state, -1) < 0)) {
        return NULL;
    }
    unsigned cpu_count = cm_usable_cpu_count(NULL);
    get_tuning(state, cpu_count, &tuning, from);
    cm_tuning_resolve(&tuning, cpu_count);
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < CM_TUNING_COUNT; i++) {
        const cm_tuning_row *row = &cm_tuning_rows[i];
        PyObject *value = Py_BuildValue(
            "(KiKK)", (unsigned long long)*cm_tuning_at(&tuning, i), from[i],
            (unsigned long long)row->least, (unsigned long long)row->most);
        if (value == NULL || PyDict_SetItemString(dict, row->name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
cpu_count(PyObject *module CM_UNUSED, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(cm_usable_cpu_count(NULL));
}

PyMethodDef cm_configure_methods[] = {
    {"_set_tuning", set_tuning, METH_VARARGS, CM_DOC__set_tuning},
    {"_read_tuning", read_tuning, METH_O, CM_DOC__read_tuning},
    {"_cpu_count", cpu_count, METH_NOARGS, CM_DOC__cpu_count},
    {NULL, NULL, 0, NULL},
};
