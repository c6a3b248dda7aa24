/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/configure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu_count.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"
#include "transfer/run/calibrate.h"

/* What users may set: by which names, and whether it is a number of bytes. */
typedef struct setting {
    const char *name;
    const char *variable;
    int index; /* in cm_tuning */
    bool is_size;
    uint64_t least; /* 0: as cm_tuning */
} setting;

static const setting settings[] = {
    {"threads", "CUMEM_TRANSFER_THREADS", CM_TUNING_thread_count, false, 1},
    {"chunk_nbytes", "CUMEM_TRANSFER_CHUNK", CM_TUNING_chunk_nbytes, true, 0},
    {"depth", "CUMEM_TRANSFER_DEPTH", CM_TUNING_slot_count, false, 0},
    {"ring_nbytes", "CUMEM_TRANSFER_RING", CM_TUNING_ring_nbytes, true, 0},
    {"staged_up_nbytes", "CUMEM_TRANSFER_STAGED_UP", CM_TUNING_staged_up_nbytes, true,
     0},
    {"staged_down_nbytes", "CUMEM_TRANSFER_STAGED_DOWN", CM_TUNING_staged_down_nbytes,
     true, 0},
    {"quick_nbytes", "CUMEM_TRANSFER_QUICK", CM_TUNING_quick_nbytes, true, 0},
    {"bounce_nbytes", "CUMEM_TRANSFER_BOUNCE", CM_TUNING_bounce_nbytes, true, 0},
};

enum { SETTING_COUNT = sizeof(settings) / sizeof(settings[0]) };

static const char *const sources[] = {"default", "calibration", "environment",
                                      "configure"};

static uint64_t
least_of(const setting *s)
{
    return s->least > 0 ? s->least : cm_tuning_rows[s->index].least;
}

static void
write_value(const setting *s, uint64_t value, char out[32])
{
    if (s->is_size) {
        cm_size_format(value, out);
    }
    else {
        (void)snprintf(out, 32, "%llu", (unsigned long long)value);
    }
}

/* 0, or -1 with a ValueError that calls it `name`. */
static int
check_range(const setting *s, const char *name, uint64_t value)
{
    char least[32], most[32], given[32];
    if (value >= least_of(s) && value <= cm_tuning_rows[s->index].most) {
        return 0;
    }
    write_value(s, least_of(s), least);
    write_value(s, cm_tuning_rows[s->index].most, most);
    write_value(s, value, given);
    PyErr_Format(PyExc_ValueError, "%s must be from %s to %s, not %s", name, least,
                 most, given);
    return -1;
}

/* -- the environment --------------------------------------------------------------------- */

static int
read_variable(const setting *s, cm_tuning_layer *layer)
{
    const char *text = getenv(s->variable);
    uint64_t value;
    if (text == NULL || text[0] == '\0' || strcmp(text, "auto") == 0) {
        return 0;
    }
    bool is_number = strspn(text, "0123456789") == strlen(text);
    if ((!s->is_size && !is_number) || !cm_size_parse(text, UINT64_MAX, &value)) {
        PyErr_Format(
            PyExc_ValueError, "%s must be %s or auto, not '%.100s'", s->variable,
            s->is_size ? "a number of bytes such as 4194304 or 4MiB" : "a count", text);
        return -1;
    }
    if (check_range(s, s->variable, value) < 0) {
        return -1;
    }
    *cm_tuning_at(&layer->values, s->index) = value;
    layer->is_set[s->index] = true;
    return 0;
}

int
cm_configure_open(cm_state *state)
{
    cm_tuning_layers *layers = &state->tuning;
    if (layers->is_open) {
        return 0;
    }
    cm_tuning_layer environment;
    memset(&environment, 0, sizeof(environment));
    for (int i = 0; i < SETTING_COUNT; i++) {
        if (read_variable(&settings[i], &environment) < 0) {
            return -1;
        }
    }
    layers->environment = environment;
    layers->is_open = true;
    return 0;
}

void
cm_configure_close(cm_state *state)
{
    state->tuning.is_open = false;
    state->tuning.is_measured = false;
    state->tuning.has_looked = false;
    state->tuning.as_real = false;
}

/* -- all of it together ------------------------------------------------------------------ */

static void
lay(const cm_tuning_layer *layer, int source, cm_tuning *tuning, int *from)
{
    cm_tuning values = layer->values;
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        if (layer->is_set[i]) {
            *cm_tuning_at(tuning, i) = *cm_tuning_at(&values, i);
            from[i] = source;
        }
    }
}

static void
get_tuning(const cm_state *state, unsigned cpu_count, cm_tuning *out, int *from)
{
    bool is_emulated =
        state->runtime != NULL && state->runtime->backend == CM_BACKEND_EMULATED;
    /* There all is as on the default machine, so that tests find the same anywhere. */
    unsigned count = is_emulated ? CM_THREAD_MAX : cpu_count;
    if (state->tuning.is_measured) {
        cm_tuning_derive(&state->tuning.measured, count, out);
    }
    else {
        cm_tuning_init_for(out, count);
    }
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        from[i] = state->tuning.is_measured ? 1 : 0;
    }
    lay(&state->tuning.environment, 2, out, from);
    lay(&state->tuning.chosen, 3, out, from);
    if (from[CM_TUNING_thread_count] >= 2) {
        out->fresh_thread_count = out->thread_count; /* few threads asked for: no more
                                                        here either */
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

/* What applies only once the engine has taken it; else all stays as it was `before`. */
static PyObject *
apply_or_undo(cm_state *state, const cm_tuning_layers *before)
{
    if (cm_configure_apply(state) < 0) {
        state->tuning = *before;
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- figures that are kept: the package does the rest ------------------------------------- */

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

/* "auto" takes the choice back. 0, or -1 with an exception. */
static int
choose(const setting *s, PyObject *object, cm_tuning_layer *layer)
{
    uint64_t value = 0;
    if (PyUnicode_Check(object)
        && PyUnicode_CompareWithASCIIString(object, "auto") == 0) {
        layer->is_set[s->index] = false;
        return 0;
    }
    if (s->is_size) {
        if (cm_arg_size_whole(object, s->name, &value) < 0) {
            return -1;
        }
    }
    else {
        int64_t count;
        if (PyBool_Check(object) || !PyIndex_Check(object)) {
            return cm_arg_refuse(object, s->name, "an int or \"auto\"");
        }
        if (cm_arg_int64(object, s->name, &count) < 0) {
            return -1;
        }
        value = count < 0 ? UINT64_MAX : (uint64_t)count;
        if (count < 0) {
            PyErr_Format(PyExc_ValueError, "%s must not be negative, got %lld", s->name,
                         (long long)count);
            return -1;
        }
    }
    if (check_range(s, s->name, value) < 0) {
        return -1;
    }
    *cm_tuning_at(&layer->values, s->index) = value;
    layer->is_set[s->index] = true;
    return 0;
}

PyDoc_STRVAR(set_tuning_doc,
"_set_tuning($module, changes, /)\n--\n\n"
"Change settings by name, all of them or none; \"auto\" takes a choice back.");

static PyObject *
set_tuning(PyObject *module, PyObject *changes)
{
    cm_state *state = cm_state_of_module(module);
    cm_tuning_layer chosen = state->tuning.chosen;
    if (cm_configure_open(state) < 0) {
        return NULL;
    }
    for (int i = 0; i < SETTING_COUNT; i++) {
        PyObject *value = PyMapping_GetItemString(changes, settings[i].name);
        if (value == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
                return NULL;
            }
            PyErr_Clear();
            continue;
        }
        int result = choose(&settings[i], value, &chosen);
        Py_DECREF(value);
        if (result < 0) {
            return NULL;
        }
    }
    const cm_tuning_layers before = state->tuning;
    state->tuning.chosen = chosen;
    return apply_or_undo(state, &before);
}

PyDoc_STRVAR(read_tuning_doc,
"_read_tuning($module, /)\n--\n\n"
"(name, value, source) of each setting, as copies that begin now are made.");

static PyObject *
read_tuning(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_tuning tuning;
    int from[CM_TUNING_COUNT];
    if (cm_configure_open(state) < 0 || cm_configure_look(state, -1) < 0) {
        return NULL;
    }
    unsigned cpu_count = cm_usable_cpu_count(NULL);
    get_tuning(state, cpu_count, &tuning, from);
    cm_tuning_resolve(&tuning, cpu_count);
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < SETTING_COUNT; i++) {
        const setting *s = &settings[i];
        PyObject *row = Py_BuildValue(
            "(sKs)", s->name, (unsigned long long)*cm_tuning_at(&tuning, s->index),
            sources[from[s->index]]);
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    return list;
}

PyDoc_STRVAR(set_measured_doc,
"_set_measured($module, figures, /)\n--\n\n"
"What was measured of this machine, by name; None for the defaults.");

static PyObject *
set_measured(PyObject *module, PyObject *figures)
{
    cm_state *state = cm_state_of_module(module);
    cm_measured measured;
    cm_measured_init(&measured);
    for (int i = 0; figures != Py_None && i < CM_MEASURED_COUNT; i++) {
        PyObject *value = PyMapping_GetItemString(figures, cm_measured_rows[i].name);
        double number = value == NULL ? -1.0 : PyFloat_AsDouble(value);
        Py_XDECREF(value);
        if (PyErr_Occurred()) {
            return NULL;
        }
        if (!(number >= 0 && number < 1e15)) {
            PyErr_Format(PyExc_ValueError, "%s is no such figure: %R",
                         cm_measured_rows[i].name, figures);
            return NULL;
        }
        *cm_measured_at(&measured, i) = number;
    }
    const cm_tuning_layers before = state->tuning;
    state->tuning.measured = measured;
    state->tuning.is_measured = figures != Py_None;
    state->tuning.has_looked = true; /* what is kept does not take its place */
    return apply_or_undo(state, &before);
}

static PyObject *
measured_to_object(const cm_measured *measured)
{
    cm_measured copy = *measured;
    PyObject *figures = PyDict_New();
    for (int i = 0; figures != NULL && i < CM_MEASURED_COUNT; i++) {
        PyObject *value = PyFloat_FromDouble(*cm_measured_at(&copy, i));
        if (value == NULL
            || PyDict_SetItemString(figures, cm_measured_rows[i].name, value) < 0) {
            Py_CLEAR(figures);
        }
        Py_XDECREF(value);
    }
    return figures;
}

PyDoc_STRVAR(read_measured_doc,
"_read_measured($module, /)\n--\n\n"
"Figures of this machine by name, and whether they were measured.");

static PyObject *
read_measured(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_measured measured = state->tuning.measured;
    if (!state->tuning.is_measured) {
        cm_measured_init(&measured);
    }
    PyObject *figures = measured_to_object(&measured);
    return figures == NULL
               ? NULL
               : Py_BuildValue("(NO)", figures,
                               state->tuning.is_measured ? Py_True : Py_False);
}

PyDoc_STRVAR(calibrate_doc,
"_calibrate($module, device, /)\n--\n\n"
"Measure the machine with that device; figures by name.");

static PyObject *
calibrate(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    cm_measured measured;
    int device;
    if (cm_state_runtime(state) == NULL
        || cm_arg_device(state, object, "device", &device) < 0) {
        return NULL;
    }
    cm_engine *engine = cm_state_engine(state, device);
    if (engine == NULL) {
        return NULL;
    }
    cm_status status;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = cm_engine_calibrate(engine, device, CM_CALIBRATE_NS, &measured);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
    return cm_is_ok(status) ? measured_to_object(&measured)
                            : cm_py_raise(state, status, "while measuring the machine");
}

PyDoc_STRVAR(cpu_count_doc,
"_cpu_count($module, /)\n--\n\n"
"Threads that can run at once in this process.");

static PyObject *
cpu_count(PyObject *module CM_UNUSED, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(cm_usable_cpu_count(NULL));
}

PyMethodDef cm_configure_methods[] = {
    {"_set_tuning", set_tuning, METH_O, set_tuning_doc},
    {"_read_tuning", read_tuning, METH_NOARGS, read_tuning_doc},
    {"_set_measured", set_measured, METH_O, set_measured_doc},
    {"_read_measured", read_measured, METH_NOARGS, read_measured_doc},
    {"_calibrate", calibrate, METH_O, calibrate_doc},
    {"_cpu_count", cpu_count, METH_NOARGS, cpu_count_doc},
    {NULL, NULL, 0, NULL},
};
