/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the module about pools: the default ones, and giving back from all. */
#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"
#include "python/device/wait.h"
#include "python/pool/pool_object.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(default_pool_doc,
"default_pool($module, /, kind, device=None)\n--\n\n"
"The pool that constructors take memory from when no other is asked for.\n\n"
"Parameters\n----------\n"
"kind : {'pinned', 'mapped', 'managed', 'device'}\n"
"device : Device, int or str, optional\n"
"    Whose memory, or whose context page-locks it; default: cumem's current one.\n\n"
"Returns\n-------\nPool\n    Always the same until `shutdown`. It cannot be closed.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n    If the kind or the device does not exist.\n"
"CudaError\n    If the driver cannot be opened.\n\n"
"Notes\n-----\n"
"Memory made with ``write_combined=True``, ``portable=False`` or ``attach=\"host\"`` has\n"
"default pools of its own, which `stats` lists.");

PyDoc_STRVAR(trim_doc,
"trim($module, /, kind=None, *, device=None, keep=0, wait=True)\n--\n\n"
"Give memory that the pools keep for reuse back to the driver.\n\n"
"Call it when another library runs out of memory, PyTorch for instance.\n\n"
"Parameters\n----------\n"
"kind : {'pinned', 'mapped', 'managed', 'device'}, optional\n"
"    Which pools; default: all.\n"
"device : Device, int or str, optional\n    Only pools of this device; default: all.\n"
"keep : int or str\n"
             "    So many bytes stay cached in all of them together, as ``1 << 20`` or\n"
             "    ``\"1MiB\"``: memory goes back in whole pieces while so much is left.\n"
             "wait : bool\n"
"    Wait first for work on memory that was freed, so that it goes back as well.\n\n"
"Returns\n-------\nint\n    Bytes given back.\n\n"
"Raises\n------\n"
"TypeError\n    If an argument has the wrong type.\n"
"ValueError\n    If the kind or the device does not exist or `keep` cannot be read.\n"
"CudaError\n    If the driver refuses; the rest is still given back.\n\n"
"Notes\n-----\n"
"**Blocks** while it waits and while the driver frees, GIL released. Buffers that are in\n"
"use and memory that belongs to a captured graph stay.");

/* -- functions --------------------------------------------------------------------- */

static PyObject *
default_pool(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    static const char *const names[] = {"kind", "device", NULL};
    PyObject *values[2];
    cm_state *state = cm_state_of_module(module);
    cm_kind kind;
    int device;
    if (cm_args_parse("default_pool", args, nargs, kwnames, names, 2, 1, values) < 0
        || cm_arg_kind(values[0], "kind", &kind) < 0
        || cm_arg_device(state, values[1], "device", &device) < 0) {
        return NULL;
    }
    return cm_pool_object_default(state, kind, device);
}

/* What trim() is asked for. */
typedef struct trim_request {
    cm_kind kind; /* PAGEABLE: all */
    int device;   /* -1: all */
    uint64_t keep_nbytes;
    bool wait;
} trim_request;

static int
parse(cm_state *state, PyObject *const *values, trim_request *out)
{
    *out = (trim_request){.kind = CM_KIND_PAGEABLE, .device = -1, .wait = true};
    if (values[0] != NULL && values[0] != Py_None
        && cm_arg_kind(values[0], "kind", &out->kind) < 0) {
        return -1;
    }
    if (values[1] != NULL && values[1] != Py_None
        && cm_arg_device(state, values[1], "device", &out->device) < 0) {
        return -1;
    }
    if (values[2] != NULL
        && cm_arg_size_whole(values[2], "keep", &out->keep_nbytes) < 0) {
        return -1;
    }
    return values[3] == NULL ? 0 : cm_arg_bool(values[3], "wait", &out->wait);
}

/* No GIL. Lowers what may be kept by what this pool keeps. */
static cm_status
trim_one(cm_pool *pool, trim_request *r, uint64_t *released)
{
    cm_pool_counters counters;
    *released = 0;
    cm_status status = cm_pool_trim(pool, r->keep_nbytes, r->wait, released);
    if (r->keep_nbytes > 0) {
        cm_pool_read(pool, &counters);
        uint64_t kept = counters.cached_nbytes;
        r->keep_nbytes = kept < r->keep_nbytes ? r->keep_nbytes - kept : 0;
    }
    return status;
}

static PyObject *
trim(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"kind", "device", "keep", "wait", NULL};
    PyObject *values[4];
    cm_state *state = cm_state_of_module(module);
    trim_request r;
    if (cm_args_parse("trim", args, nargs, kwnames, names, 1, 0, values) < 0
        || parse(state, values, &r) < 0) {
        return NULL;
    }
    if (state->runtime == NULL) {
        return PyLong_FromLong(0); /* not worth opening a driver for */
    }
    cm_pool_entry *entries;
    size_t count;
    if (cm_state_runtime(state) == NULL /* also lets go of what is done */
        || cm_pools_take_all(state, &entries, &count) < 0) {
        return NULL;
    }
    uint64_t total = 0;
    cm_status first = cm_ok();
    cm_status waited = cm_ok();
    cm_pool_waiter waiter = {state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    for (size_t i = 0; i < count; i++) {
        const cm_pool_config *config = cm_pool_get_config(entries[i].pool);
        if ((r.kind == CM_KIND_PAGEABLE || r.kind == config->kind)
            && (r.device < 0 || r.device == config->device)) {
            uint64_t released;
            waited = r.wait ? cm_pool_await(entries[i].pool, &hooks) : cm_ok();
            if (!cm_is_ok(waited)) {
                break;
            }
            cm_status status = trim_one(entries[i].pool, &r, &released);
            total += released;
            first = cm_is_ok(first) ? status : first;
        }
    }
    PyEval_RestoreThread(waiter.thread);
    cm_pools_give_all(state, entries, count);
    if (!cm_is_ok(waited)) {
        return NULL; /* with the exception of a signal's handler */
    }
    if (!cm_is_ok(first)) {
        return cm_py_raise(state, first, "while trimming the pools");
    }
    return PyLong_FromUnsignedLongLong(total);
}

/* -- table ------------------------------------------------------------------------- */

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

PyMethodDef cm_pool_methods[] = {
    {"default_pool", FAST(default_pool), METH_FASTCALL | METH_KEYWORDS,
     default_pool_doc},
    {"trim", FAST(trim), METH_FASTCALL | METH_KEYWORDS, trim_doc},
    {NULL, NULL, 0, NULL},
};
