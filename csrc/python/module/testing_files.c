/* SPDX-License-Identifier: Apache-2.0 */
/* Test hooks over the calls on files: make the nth fail, count them, hold one. */
#include <stdlib.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/module/testing.h"

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
    cm_status status = cm_file_faults_init(faults);
    if (!cm_is_ok(status)) {
        free(faults);
        cm_py_raise(state, status, NULL);
        return NULL;
    }
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
file_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"nth",  "error",   "repeat",    "most",
                                        "held", "is_cold", "no_direct", NULL};
    PyObject *values[7];
    int64_t nth = 0;
    int64_t error = 0;
    int64_t most = 0;
    int64_t held = 0;
    cm_file_plan plan = {.nth = 0};
    if (cm_args_parse("file_plan", args, nargs, kwnames, names, 7, 0, values) < 0
        || cm_testing_int(values[0], "nth", 0, INT64_MAX, &nth) < 0
        || cm_testing_int(values[1], "error", 0, 4095, &error) < 0
        || cm_testing_int(values[3], "most", 0, INT64_MAX, &most) < 0
        || cm_testing_int(values[4], "held", 0, INT64_MAX, &held) < 0
        || (values[2] != NULL && cm_arg_bool(values[2], "repeat", &plan.repeat) < 0)
        || (values[5] != NULL && cm_arg_bool(values[5], "is_cold", &plan.is_cold) < 0)
        || (values[6] != NULL
            && cm_arg_bool(values[6], "no_direct", &plan.no_direct) < 0)) {
        return NULL;
    }
    plan.nth = (uint64_t)nth;
    plan.error = (int)error;
    plan.most = (uint64_t)most;
    plan.held = (uint64_t)held;
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

PyMethodDef cm_testing_file_methods[] = {
    {"file_plan", CM_TESTING_FAST(file_plan), CM_TESTING_KEYWORDS, plan_doc},
    {"file_counts", file_counts, METH_NOARGS,
     "Reads and writes since the plan; those past the page cache; announcements; "
     "descriptors past the page cache that are open now."},
    {"file_await", file_await, METH_NOARGS, "Wait until the held call waits."},
    {"file_open", file_open, METH_NOARGS, "Let it go on."},
    {NULL, NULL, 0, NULL},
};
