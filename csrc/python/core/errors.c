/* SPDX-License-Identifier: Apache-2.0 */
/* Turns a status into a Python exception, which cumem/base/errors.py makes. */
#include "python/core/errors.h"

/* -- the package's part --------------------------------------------------------------- */

int
cm_errors_load(cm_state *state)
{
    if (state->make_error == NULL) {
        PyObject *errors = cm_package_load("base.errors");
        PyObject *make = errors == NULL ? NULL : PyObject_GetAttrString(errors, "make");
        Py_XDECREF(errors);
        /* Another thread may have loaded it meanwhile. */
        cm_replace(&state->make_error, make);
    }
    return state->make_error == NULL ? -1 : 0;
}

/* -- the exception -------------------------------------------------------------------- */

PyObject *
cm_py_exception_new(cm_state *state, cm_status status, const char *doing)
{
    const cm_op_fact *op = &cm_op_facts[status.op];
    if (cm_errors_load(state) < 0) {
        return NULL;
    }
    return PyObject_CallFunction(state->make_error, "zzKiiz", op->cuda_name,
                                 op->argument_kind, (unsigned long long)status.arg,
                                 (int)status.code, op->min_driver, doing);
}

PyObject *
cm_py_raise(cm_state *state, cm_status status, const char *doing)
{
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *exception = cm_py_exception_new(state, status, doing);
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

void
cm_py_report(cm_state *state, cm_status status, PyObject *where)
{
    if (cm_is_ok(status) || cm_code_is_unloading(status.code)
        || state->make_error == NULL) {
        return; /* make_error is NULL if nothing was ever opened, or if the module is
                   gone already */
    }
    cm_kept_error kept = cm_error_keep();
    (void)cm_py_raise(state, status, NULL);
    PyErr_WriteUnraisable(where);
    cm_error_restore(kept);
}
