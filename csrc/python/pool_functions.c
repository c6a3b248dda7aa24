/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the module about the pools behind its constructors. */
#include <stddef.h>

#include "python/arguments.h"
#include "python/device_functions.h"
#include "python/errors.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(trim_doc,
"trim($module, /)\n--\n\n"
"Give memory that the pools keep for reuse back to the driver.\n\n"
"Returns\n-------\nint\n    Bytes given back.\n\n"
"Raises\n------\nCudaError\n    If the driver refuses; the rest is still given back.\n\n"
"Notes\n-----\n"
"Does not wait for work: memory that a stream may still use stays. **Blocks** while the\n"
"driver frees, GIL released.");

PyDoc_STRVAR(pool_counters_doc,
"pool_counters($module, /)\n--\n\n"
"Read what the pools hold, summed over devices and allocation flags.\n\n"
"Returns\n-------\ndict of str to dict of str to int\n"
"    For \"pinned\", \"mapped\", \"managed\" and \"device\": bytes and blocks live (handed out),\n"
"    in flight (freed while work may still run) and cached (ready for reuse);\n"
"    ``reserved_nbytes`` is their sum. ``peak_live_nbytes`` adds up the peaks of each pool.\n"
"    All 0 before the first use.");

/* -- functions --------------------------------------------------------------------- */

/* The pool of the `index`th slot of all; NULL where none was made. */
static cm_pool *
pool_at(const cm_state *state, int index, int *kind)
{
    enum { PER_KIND = CM_POOL_FLAG_SLOTS * CM_MAX_DEVICES };
    *kind = index / PER_KIND;
    return state
        ->pools[*kind][index % PER_KIND / CM_MAX_DEVICES][index % CM_MAX_DEVICES];
}

enum { POOL_SLOT_COUNT = CM_KIND_COUNT * CM_POOL_FLAG_SLOTS * CM_MAX_DEVICES };

static PyObject *
trim(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime == NULL) {
        return PyLong_FromLong(0); /* not worth opening a driver for */
    }
    if (cm_state_runtime(state) == NULL) { /* also lets go of what is done */
        return NULL;
    }
    uint64_t total = 0;
    cm_status first = cm_ok();
    cm_state_enter(state);
    for (int i = 0; i < POOL_SLOT_COUNT; i++) {
        int kind;
        cm_pool *pool = pool_at(state, i, &kind);
        if (pool == NULL) {
            continue;
        }
        uint64_t released = 0;
        cm_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cm_pool_trim(pool, 0, false, &released);
        Py_END_ALLOW_THREADS
        total += released;
        first = cm_is_ok(first) ? status : first;
    }
    cm_state_leave(state);
    if (!cm_is_ok(first)) {
        return cm_py_raise(state, first, "while trimming the pools");
    }
    return PyLong_FromUnsignedLongLong(total);
}

/* The counters by number; all of them are 64-bit. */
static const struct {
    const char *name;
    size_t offset;
} counter_list[] = {
#define COUNTER_ROW(name) {#name, offsetof(cm_pool_counters, name)},
    CM_POOL_COUNTERS(COUNTER_ROW)
#undef COUNTER_ROW
};

enum { COUNTER_COUNT = sizeof counter_list / sizeof *counter_list };

static uint64_t *
counter_at(cm_pool_counters *counters, int index)
{
    return (uint64_t *)(void *)((char *)counters + counter_list[index].offset);
}

static PyObject *
counters_to_dict(cm_pool_counters *counters)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < COUNTER_COUNT; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(*counter_at(counters, i));
        if (value == NULL
            || PyDict_SetItemString(dict, counter_list[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
pool_counters(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    cm_pool_counters sums[CM_KIND_COUNT] = {{0}};
    for (int i = 0; i < POOL_SLOT_COUNT; i++) {
        int kind;
        cm_pool *pool = pool_at(state, i, &kind);
        if (pool != NULL) {
            cm_pool_counters one;
            cm_pool_read(pool, &one);
            for (int counter = 0; counter < COUNTER_COUNT; counter++) {
                *counter_at(&sums[kind], counter) += *counter_at(&one, counter);
            }
        }
    }
    PyObject *result = PyDict_New();
    for (int kind = CM_KIND_PINNED; result != NULL && kind < CM_KIND_COUNT; kind++) {
        PyObject *dict = counters_to_dict(&sums[kind]);
        if (dict == NULL
            || PyDict_SetItemString(result, cm_kind_name((cm_kind)kind), dict) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(dict);
    }
    return result;
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_pool_methods[] = {
    {"trim", trim, METH_NOARGS, trim_doc},
    {"pool_counters", pool_counters, METH_NOARGS, pool_counters_doc},
    {NULL, NULL, 0, NULL},
};
