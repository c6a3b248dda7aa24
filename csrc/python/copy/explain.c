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
    return Py_BuildValue("(siii)", cm_kinds[region->kind].text, facts.locked,
                         facts.whole, region->device);
}

/* A dict of all that is known; cumem.explain makes sentences of it. */
static PyObject *
describe(const cm_explanation *e, const cm_copy_request *request)
{
    const cm_plan *plan = &e->plan;
    return Py_BuildValue(
        "{s:s,s:s,s:K,s:i,s:i,s:K,s:K,s:i,s:I,s:I,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K,"
        "s:i,"
        "s:K,s:K,s:N,s:N}",
        "route", cm_routes[plan->route].text, "how", cm_routes[plan->route].words,
        "nbytes", (unsigned long long)plan->nbytes, "device", plan->device,
        "src_device", plan->src_device, "pieces", (unsigned long long)plan->piece_count,
        "piece_nbytes", (unsigned long long)e->piece_nbytes, "axis", e->axis, "threads",
        (unsigned)plan->thread_count, "chunks",
        cm_routes[plan->route].uses_ring ? plan->slot_count : 0, "quick", e->is_short,
        "bounced", e->is_bounced, "broadcast", e->is_broadcast, "overlaps", e->overlaps,
        "turned", plan->is_turned, "download", plan->is_download, "fresh",
        plan->is_fresh, "run_nbytes", (unsigned long long)plan->layout.run_nbytes,
        "loops", plan->layout.ndim, "staged_up_nbytes",
        (unsigned long long)e->tuning.staged_up_nbytes, "staged_down_nbytes",
        (unsigned long long)e->tuning.staged_down_nbytes, "dst",
        describe_end(&request->dst, e->dst_facts), "src",
        describe_end(&request->src, e->src_facts));
}

static PyObject *
look(cm_state *state, const cm_copy_request *request)
{
    cm_engine *engine = cm_state_engine(state, -1);
    if (engine == NULL || cm_configure_look(state, -1) < 0) {
        return NULL;
    }
    cm_explanation *explanation = PyMem_Malloc(sizeof(*explanation));
    if (explanation == NULL) {
        return PyErr_NoMemory();
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_engine_explain(engine, request, explanation);
    Py_END_ALLOW_THREADS
    PyObject *result = cm_is_ok(status)
                           ? describe(explanation, request)
                           : cm_py_raise(state, status, "while planning a copy");
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
    cm_engine *engine = cm_state_engine(cm_state_of_module(module), -1);
    cm_copy_counts counts;
    if (engine == NULL) {
        return NULL;
    }
    cm_engine_read_counts(engine, &counts);
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
