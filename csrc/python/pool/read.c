/* SPDX-License-Identifier: Apache-2.0 */
/* From pools to Python values: counters, listings and names. */
#include <stddef.h>
#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/pool/limits.h"
#include "python/pool/pool_object.h"

/* -- counters ---------------------------------------------------------------------- */

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
counters_to_tuple(cm_pool_counters *counters)
{
    PyObject *tuple = PyTuple_New(COUNTER_COUNT);
    for (int i = 0; tuple != NULL && i < COUNTER_COUNT; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(*counter_at(counters, i));
        if (value == NULL || PyTuple_SetItem(tuple, i, value) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
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

/* -- names ------------------------------------------------------------------------- */

PyObject *
cm_pool_name(const cm_pool_config *config, uint64_t number)
{
    if (number == UINT64_MAX) {
        return PyUnicode_FromString("closed pool");
    }
    if (number != 0) {
        return PyUnicode_FromFormat("pool %llu", (unsigned long long)number);
    }
    if (config->flags == cm_buffer_default_flags(config->kind)) {
        return PyUnicode_FromString("default");
    }
    if (config->kind == CM_KIND_MANAGED) {
        return PyUnicode_FromString("default, attach host");
    }
    bool portable = (config->flags & CM_HOST_ALLOC_PORTABLE) != 0;
    bool combined = (config->flags & CM_HOST_ALLOC_WRITE_COMBINED) != 0;
    return PyUnicode_FromFormat("default%s%s", portable ? "" : ", not portable",
                                combined ? ", write-combined" : "");
}

/* -- statistics -------------------------------------------------------------------- */

/* (name, kind, device, limit, counters); new reference. */
static PyObject *
describe(cm_pool *pool, uint64_t number, cm_pool_counters *counters)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    PyObject *name = cm_pool_name(config, number);
    PyObject *limit = cm_limit_to_object(atomic_load(&config->budget->limit_nbytes));
    PyObject *tuple = counters_to_tuple(counters);
    PyObject *result = NULL;
    if (name != NULL && limit != NULL && tuple != NULL) {
        result = Py_BuildValue("(OsiOO)", name, cm_kind_name(config->kind),
                               config->device, limit, tuple);
    }
    Py_XDECREF(name);
    Py_XDECREF(limit);
    Py_XDECREF(tuple);
    return result;
}

PyObject *
cm_pool_read_stats(cm_pool *pool, uint64_t number)
{
    cm_pool_counters counters;
    cm_pool_read(pool, &counters);
    return cm_package_call("pool_stats", "pool_stats",
                           describe(pool, number, &counters));
}

/* -- snapshots --------------------------------------------------------------------- */

static PyObject *
rows_to_list(const cm_block_row *rows, uint64_t count)
{
    static const char *const states[] = {
        [CM_BLOCK_LIVE] = "live",
        [CM_BLOCK_IN_FLIGHT] = "in flight",
        [CM_BLOCK_CACHED] = "cached",
        [CM_BLOCK_GAP] = "gap",
    };
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint64_t i = 0; list != NULL && i < count; i++) {
        PyObject *row = Py_BuildValue(
            "(IKKKs)", rows[i].segment, (unsigned long long)rows[i].address,
            (unsigned long long)rows[i].nbytes,
            (unsigned long long)rows[i].requested_nbytes, states[rows[i].state]);
        if (row == NULL || PyList_SetItem(list, (Py_ssize_t)i, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *
cm_pool_read_snapshot(cm_state *state, cm_pool *pool, uint64_t number)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    cm_block_row *rows = NULL;
    uint64_t count = 0;
    cm_status status = cm_pool_list(pool, &rows, &count);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while listing a pool");
    }
    PyObject *list = rows_to_list(rows, count);
    free(rows);
    PyObject *name = cm_pool_name(config, number);
    PyObject *arguments = NULL;
    if (list != NULL && name != NULL) {
        arguments = Py_BuildValue("(OsiO)", name, cm_kind_name(config->kind),
                                  config->device, list);
    }
    Py_XDECREF(list);
    Py_XDECREF(name);
    return cm_package_call("snapshot", "snapshot", arguments);
}

/* -- functions --------------------------------------------------------------------- */

PyDoc_STRVAR(pool_counters_doc,
"pool_counters($module, /)\n--\n\n"
"Read what the pools hold as plain numbers, summed over the pools of each kind.\n\n"
"Returns\n-------\ndict of str to dict of str to int\n"
"    For \"pinned\", \"mapped\", \"managed\" and \"device\" the counters of `PoolStats`. Peaks\n"
"    and ``largest_free_nbytes`` add up those of each pool. All 0 before the first use.");

static PyObject *
pool_counters(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_pool_counters sums[CM_KIND_COUNT] = {{0}};
    cm_pool_entry *entries;
    size_t count;
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        cm_pool_counters one;
        cm_pool_read(entries[i].pool, &one);
        cm_kind kind = cm_pool_get_config(entries[i].pool)->kind;
        for (int counter = 0; counter < COUNTER_COUNT; counter++) {
            *counter_at(&sums[kind], counter) += *counter_at(&one, counter);
        }
    }
    cm_pools_give_all(state, entries, count);
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

PyDoc_STRVAR(pools_doc,
"_pools($module, window=False, /)\n--\n\n"
"A list of (key, name, kind, device, limit, counters) of all pools; with `window` the\n"
"peaks are those since the last call with it.");

static PyObject *
pools(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    cm_state *state = cm_state_of_module(module);
    bool window = nargs > 0 && args[0] == Py_True;
    cm_pool_entry *entries;
    size_t count;
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        cm_pool_counters counters;
        (window ? cm_pool_read_window : cm_pool_read)(entries[i].pool, &counters);
        PyObject *one = describe(entries[i].pool, entries[i].number, &counters);
        PyObject *row =
            one == NULL
                ? NULL
                : Py_BuildValue("(KO)", (unsigned long long)(uintptr_t)entries[i].pool,
                                one);
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(one);
        Py_XDECREF(row);
    }
    cm_pools_give_all(state, entries, count);
    return list;
}

PyDoc_STRVAR(counter_names_doc,
"_counter_names($module, /)\n--\n\n"
"The names of the counters, in their order.");

static PyObject *
counter_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *tuple = PyTuple_New(COUNTER_COUNT);
    for (int i = 0; tuple != NULL && i < COUNTER_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(counter_list[i].name);
        if (name == NULL || PyTuple_SetItem(tuple, i, name) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* -- table ------------------------------------------------------------------------- */

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

PyMethodDef cm_pool_read_methods[] = {
    {"pool_counters", pool_counters, METH_NOARGS, pool_counters_doc},
    {"_pools", FAST(pools), METH_FASTCALL, pools_doc},
    {"_counter_names", counter_names, METH_NOARGS, counter_names_doc},
    {NULL, NULL, 0, NULL},
};
