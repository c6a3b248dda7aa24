/* SPDX-License-Identifier: Apache-2.0 */
/* _explain() and _copy_counts(): what copy() would do, and what copies have done. */
#include "transfer/run/explain.h"

#include "python/copy/configure.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/protocols/protocols.h"

static PyObject *
describe_end(const cm_region *region, cm_end_facts facts)
{
    return Py_BuildValue("(sOOi)", cm_kinds[region->kind].text,
                         facts.locked ? Py_True : Py_False,
                         facts.whole ? Py_True : Py_False, region->device);
}

/* A dict of all that is known; cumem.explain makes sentences of it. */
static PyObject *
describe(const cm_explanation *e, const cm_copy_request *request)
{
    const cm_plan *plan = &e->plan;
    return Py_BuildValue(
        "{s:s,s:K,s:i,s:i,s:K,s:K,s:i,s:I,s:K,s:O,s:O,s:O,s:O,s:O,s:O,s:O,s:O,s:K,s:i,"
        "s:K,"
        "s:K,s:N,s:N}",
        "route", cm_routes[plan->route].text, "nbytes",
        (unsigned long long)plan->nbytes, "device", plan->device, "src_device",
        plan->src_device, "pieces", (unsigned long long)plan->piece_count,
        "piece_nbytes", (unsigned long long)e->piece_nbytes, "axis", e->axis, "threads",
        (unsigned)plan->thread_count, "chunks", (unsigned long long)e->chunk_count,
        "quick", e->is_short ? Py_True : Py_False, "bounced",
        e->is_bounced ? Py_True : Py_False, "broadcast",
        e->is_broadcast ? Py_True : Py_False, "overlaps",
        e->overlaps ? Py_True : Py_False, "same_place",
        e->same_place ? Py_True : Py_False, "turned",
        plan->is_turned ? Py_True : Py_False, "download",
        plan->is_download ? Py_True : Py_False, "fresh",
        plan->is_fresh ? Py_True : Py_False, "run_nbytes",
        (unsigned long long)plan->layout.run_nbytes, "loops", plan->layout.ndim,
        "staged_up_nbytes", (unsigned long long)e->tuning.staged_up_nbytes,
        "staged_down_nbytes", (unsigned long long)e->tuning.staged_down_nbytes, "dst",
        describe_end(&request->dst, e->dst_facts), "src",
        describe_end(&request->src, e->src_facts));
}

static PyObject *
look(cm_state *state, const cm_copy_request *request)
{
    cm_explanation *explanation = PyMem_Malloc(sizeof(*explanation));
    PyObject *result = NULL;
    if (explanation == NULL) {
        return PyErr_NoMemory();
    }
    if (state->engine == NULL) {
        PyMem_Free(explanation);
        PyErr_SetString(PyExc_RuntimeError,
                        "cumem cannot copy any more: the interpreter is exiting");
        return NULL;
    }
    if (cm_configure_look(state, -1) < 0) {
        PyMem_Free(explanation);
        return NULL;
    }
    cm_engine *engine = state->engine;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_engine_explain(engine, request, explanation);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        (void)cm_py_raise(state, status, "while planning a copy");
    }
    else {
        result = describe(explanation, request);
    }
    PyMem_Free(explanation);
    return result;
}

PyDoc_STRVAR(explain_doc,
"_explain($module, /, dst, src, stream, blocking)\n--\n\n"
"What copy() or copy_async() would do, as a dict.");

static PyObject *
explain(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dst", "src", "stream", "blocking", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4];
    bool blocking = true;
    if (cm_args_parse("_explain", args, nargs, kwnames, names, 4, 4, values) < 0
        || cm_arg_bool(values[3], "blocking", &blocking) < 0) {
        return NULL;
    }
    cm_stream *stream;
    if (cm_copy_take_stream(state, values[0], values[1], values[2], &stream) < 0) {
        return NULL;
    }
    cm_copy_how how = {stream, .blocking = blocking};
    PyObject *result = cm_copy_look(state, values[0], values[1], how, look);
    cm_stream_give(state, stream);
    return result;
}

PyDoc_STRVAR(copy_counts_doc,
"_copy_counts($module, /)\n--\n\n"
"Copies by route since the driver was opened, and pieces; quick ones by themselves.");

static PyObject *
copy_counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_copy_counts counts;
    if (cm_state_engine(state, -1) == NULL) {
        return NULL;
    }
    cm_engine_read_counts(state->engine, &counts);
    PyObject *result =
        Py_BuildValue("{s:K,s:K,s:K}", "quick", (unsigned long long)counts.quick,
                      "bounced", (unsigned long long)counts.bounced, "pieces",
                      (unsigned long long)counts.pieces);
    for (int route = 0; result != NULL && route < CM_ROUTE_COUNT; route++) {
        PyObject *count = PyLong_FromUnsignedLongLong(counts.routes[route]);
        if (count == NULL
            || PyDict_SetItemString(result, cm_routes[route].text, count) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(count);
    }
    return result;
}

PyMethodDef cm_explain_methods[] = {
    {"_explain", (PyCFunction)(void (*)(void))explain, METH_FASTCALL | METH_KEYWORDS,
     explain_doc},
    {"_copy_counts", copy_counts, METH_NOARGS, copy_counts_doc},
    {NULL, NULL, 0, NULL},
};
