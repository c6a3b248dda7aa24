/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/configure.h"

#include "base/machine.h"
#include "docstrings.h"
#include "python/core/errors.h"
#include "python/core/package.h"

/* -- what holds: cumem/transfers/tuning.py puts it together ---------------------------------------- */

int
cm_configure_open(cm_state *state)
{
    cm_tuning_choice *choice = &state->tuning;
    if (!choice->is_open
        && (choice->was_set || cm_package_has_variables("CUMEM_TRANSFER_"))
        && cm_package_do("transfers.tuning", "begin", PyTuple_New(0)) < 0) {
        return -1;
    }
    choice->is_open = true;
    return 0;
}

void
cm_configure_close(cm_state *state)
{
    state->tuning = (cm_tuning_choice){.was_set = state->tuning.was_set};
}

static void
get_tuning(cm_state *state, unsigned cpu_count, cm_tuning *out)
{
    /* There all is as on the default machine, so that tests find the same anywhere. */
    cm_tuning_init_for(out, cm_state_is_emulated(state) ? CM_THREAD_MAX : cpu_count);
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        if (state->tuning.is_set[i]) {
            *cm_tuning_at(out, i) = state->tuning.values[i];
        }
    }
}

int
cm_configure_apply(cm_state *state)
{
    cm_tuning tuning;
    if (state->engine == NULL) {
        return 0;
    }
    get_tuning(state, cm_usable_cpu_count(), &tuning);
    cm_status status = cm_engine_set_tuning(state->engine, &tuning);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, "while configuring");
}

/* -- figures that calibrate() has kept: the package does the rest ------------------------ */

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
    int result = cm_package_do(
        "tools.calibration", "take_kept",
        Py_BuildValue("(i)", device < 0 ? cm_state_device(state) : device));
    cm_state_leave(state);
    if (result == 0) {
        return 0;
    }
    /* Exceptions that are no errors, KeyboardInterrupt for one, end what is done. */
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_WriteUnraisable(NULL);
    return 0;
}

/* -- functions --------------------------------------------------------------------------- */

/* What the dict leaves out is as by default. */
static PyObject *
set_tuning(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    const cm_tuning_choice before = state->tuning;
    cm_tuning_choice next = before;
    PyObject *values;
    int is_measured;
    if (!PyArg_ParseTuple(args, "O!p", &PyDict_Type, &values, &is_measured)) {
        return NULL;
    }
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        const cm_tuning_row *row = &cm_tuning_rows[i];
        PyObject *value = PyDict_GetItemString(values, row->name);
        next.is_set[i] = value != NULL;
        next.values[i] = value == NULL ? row->least : PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred()) {
            return NULL;
        }
        if (next.values[i] < row->least || next.values[i] > row->most) {
            return PyErr_Format(PyExc_ValueError, "%s: %R", row->name, value);
        }
    }
    state->tuning = next;
    if (cm_configure_apply(state) < 0) {
        state->tuning = before;
        return NULL;
    }
    state->tuning.was_set = true;
    /* What is kept does not take the place of what was measured now. */
    state->tuning.has_looked |= is_measured != 0;
    Py_RETURN_NONE;
}

static PyObject *
read_tuning(PyObject *module, PyObject *look)
{
    cm_state *state = cm_state_of_module(module);
    cm_tuning tuning;
    if (look == Py_True
        && (cm_configure_open(state) < 0 || cm_configure_look(state, -1) < 0)) {
        return NULL;
    }
    unsigned cpu_count = cm_usable_cpu_count();
    get_tuning(state, cpu_count, &tuning);
    cm_tuning_resolve(&tuning, cpu_count);
    PyObject *rows = PyList_New(0);
    for (int i = 0; rows != NULL && i < CM_TUNING_COUNT; i++) {
        const cm_tuning_row *row = &cm_tuning_rows[i];
        cm_append(&rows, Py_BuildValue("(s(KKK))", row->name,
                                       (unsigned long long)*cm_tuning_at(&tuning, i),
                                       (unsigned long long)row->least,
                                       (unsigned long long)row->most));
    }
    return rows;
}

PyMethodDef cm_configure_methods[] = {
    {"_set_tuning", set_tuning, METH_VARARGS, CM_DOC__set_tuning},
    {"_read_tuning", read_tuning, METH_O, CM_DOC__read_tuning},
    {NULL, NULL, 0, NULL},
};
