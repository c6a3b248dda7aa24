/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/configure.h"

#include "base/machine.h"
#include "docstrings.h"
#include "python/core/errors.h"
#include "python/core/package.h"

/* -- the settings, which cumem/transfers/tuning.py puts together --------------------------- */

void
cm_configure_close(cm_state *state)
{
    state->tuning = (cm_tuning_choice){.was_set = state->tuning.was_set};
}

/* Fill in the tuning with the settings that somebody has set, and with defaults for all
 * others. */
static void
get_tuning(cm_state *state, unsigned cpu_count, cm_tuning *out)
{
    /* If the device is the emulated one, the defaults are chosen as on a machine that
     * has CM_THREAD_MAX processors, so that tests find the same values everywhere. */
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

/* Set the settings that the dict `values` names, and give all others their defaults.
 * Returns 0, or -1 with an exception, and then nothing is changed. */
static int
put_tuning(cm_state *state, PyObject *values)
{
    const cm_tuning_choice before = state->tuning;
    cm_tuning_choice next = before;
    if (!PyDict_Check(values)) {
        PyErr_SetString(PyExc_TypeError, "values must be a dict");
        return -1;
    }
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        const cm_tuning_row *row = &cm_tuning_rows[i];
        PyObject *value = PyDict_GetItemString(values, row->name);
        next.is_set[i] = value != NULL;
        next.values[i] = value == NULL ? row->least : PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred()) {
            return -1;
        }
        if (next.values[i] < row->least || next.values[i] > row->most) {
            PyErr_Format(PyExc_ValueError, "%s: %R", row->name, value);
            return -1;
        }
    }
    state->tuning = next;
    if (cm_configure_apply(state) < 0) {
        state->tuning = before;
        return -1;
    }
    state->tuning.was_set = true;
    return 0;
}

/* Make a dict that has a TuningValue under the name of each setting: its present value,
 * and the least and the greatest value that it may have. Returns a new reference, or
 * NULL with an exception. */
static PyObject *
make_tuning_dict(cm_state *state)
{
    cm_tuning tuning;
    unsigned cpu_count = cm_usable_cpu_count();
    get_tuning(state, cpu_count, &tuning);
    cm_tuning_resolve(&tuning, cpu_count);
    PyObject *found = PyDict_New();
    for (int i = 0; found != NULL && i < CM_TUNING_COUNT; i++) {
        const cm_tuning_row *row = &cm_tuning_rows[i];
        PyObject *members[CM_TuningValue_COUNT] = {
            [CM_TuningValue_now] =
                PyLong_FromUnsignedLongLong(*cm_tuning_at(&tuning, i)),
            [CM_TuningValue_least] = PyLong_FromUnsignedLongLong(row->least),
            [CM_TuningValue_most] = PyLong_FromUnsignedLongLong(row->most),
        };
        PyObject *value = cm_structseq_new(state, CM_STRUCTSEQ_TuningValue, members);
        if (value == NULL || PyDict_SetItemString(found, row->name, value) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(value);
    }
    return found;
}

/* Let the package read the environment, and set the values that it finds there. Returns
 * 0, or -1 with an exception. */
static int
begin_tuning(cm_state *state)
{
    PyObject *now = make_tuning_dict(state);
    if (now == NULL) {
        return -1;
    }
    PyObject *values =
        cm_package_call("transfers.tuning", "begin", PyTuple_Pack(1, now));
    Py_DECREF(now);
    int result = values == NULL ? -1 : put_tuning(state, values);
    Py_XDECREF(values);
    return result;
}

int
cm_configure_open(cm_state *state)
{
    cm_tuning_choice *choice = &state->tuning;
    if (!choice->is_open
        && (choice->was_set || cm_package_has_variables("CUMEM_TRANSFER_"))
        && begin_tuning(state) < 0) {
        return -1;
    }
    choice->is_open = true;
    return 0;
}

/* -- functions --------------------------------------------------------------------------- */

static PyObject *
set_tuning(PyObject *module, PyObject *values)
{
    if (put_tuning(cm_state_of_module(module), values) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
read_tuning(PyObject *module, PyObject *opens)
{
    cm_state *state = cm_state_of_module(module);
    if (opens == Py_True && cm_configure_open(state) < 0) {
        return NULL;
    }
    return make_tuning_dict(state);
}

PyMethodDef cm_configure_methods[] = {
    {"_set_tuning", set_tuning, METH_O, CM_DOC__set_tuning},
    {"_read_tuning", read_tuning, METH_O, CM_DOC__read_tuning},
    {NULL, NULL, 0, NULL},
};
