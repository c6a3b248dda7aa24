/* SPDX-License-Identifier: Apache-2.0 */
/* _explain(), which tells what copy() would do with the same arguments. */
#include "transfer/run/explain.h"

#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"

static PyObject *
describe_end(const cm_region *region, cm_end_facts facts)
{
    return Py_BuildValue("(siii)", cm_kinds[region->kind].text, facts.locked,
                         facts.whole, region->device);
}

/* Return all that is known of the copy as a dict, of which cumem.explain() makes
 * sentences. */
static PyObject *
describe(const cm_explanation *e, const cm_copy_request *request)
{
    static const cm_convert none = {.from = CM_NUMBER_NONE};
    const cm_convert *convert = request->convert == NULL ? &none : request->convert;
    const cm_plan *plan = &e->plan;
    return Py_BuildValue(
        "{s:s,s:K,s:i,s:i,s:K,s:K,s:i,s:I,s:I,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K,"
        "s:i,"
        "s:K,s:K,s:N,s:N,s:s,s:s,s:i}",
        "route", cm_route_text(plan->row), "nbytes", (unsigned long long)plan->nbytes,
        "device", plan->device, "src_device", plan->src_device, "pieces",
        (unsigned long long)plan->piece_count, "piece_nbytes",
        (unsigned long long)e->piece_nbytes, "axis", e->axis, "threads",
        (unsigned)e->thread_count, "chunks",
        plan->row != NULL && plan->row->uses_ring ? plan->slot_count : 0, "quick",
        e->is_short, "bounced", e->is_bounced, "broadcast", e->is_broadcast, "overlaps",
        e->overlaps, "turned", plan->is_turned, "widens", plan->widens, "download",
        plan->is_download, "fresh", plan->is_fresh, "run_nbytes",
        (unsigned long long)plan->layout.run_nbytes, "loops", plan->layout.ndim,
        "staged_up_nbytes", (unsigned long long)e->tuning.staged_up_nbytes,
        "staged_down_nbytes", (unsigned long long)e->tuning.staged_down_nbytes, "dst",
        describe_end(&request->dst, e->dst_facts), "src",
        describe_end(&request->src, e->src_facts), "from",
        cm_dtypes[convert->from].name, "to", cm_dtypes[convert->to].name, "casts",
        convert->cast != NULL);
}

/* The cm_copy_use that explains a copy in place of making it. */
static PyObject *
look(cm_state *state, const cm_copy_request *request)
{
    cm_engine *engine = cm_state_engine(state, -1);
    if (engine == NULL) {
        return NULL;
    }
    cm_explanation *explanation = PyMem_Malloc(sizeof(*explanation));
    if (explanation == NULL) {
        return PyErr_NoMemory();
    }
    cm_status status = CM_WITHOUT_GIL(cm_engine_explain(engine, request, explanation));
    PyObject *result = cm_is_ok(status)
                           ? describe(explanation, request)
                           : cm_py_raise(state, status, "while planning a copy");
    PyMem_Free(explanation);
    return result;
}

PyObject *
cm_explain(PyObject *module, PyObject *args)
{
    PyObject *dst, *src, *stream;
    cm_casting casting = {NULL};
    int blocking;
    cm_call_frame frame;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "OOOp|OOO", &dst, &src, &stream, &blocking,
                          &casting.casting, &casting.scale, &casting.offset)) {
        return NULL;
    }
    PyObject *result = NULL;
    int device = cm_device_hint_of(state, dst, src, stream);
    if (cm_call_enter(&frame, state, stream, device, NULL, NULL) == 0) {
        cm_copy_how how = {frame.stream, .blocking = blocking != 0, .casting = casting,
                           .look = look};
        result = cm_copy_objects(state, dst, src, how);
    }
    return cm_call_leave(&frame, result);
}
