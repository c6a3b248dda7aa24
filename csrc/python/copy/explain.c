/* SPDX-License-Identifier: Apache-2.0 */
/* Implements _core._explain(), which says what copy() would do with the same arguments,
 * and makes no copy. */
#include "transfer/run/explain.h"

#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"

static PyObject *
describe_end(cm_state *state, const cm_region *region, cm_end_facts facts)
{
    PyObject *members[CM_EndFacts_COUNT] = {
        [CM_EndFacts_kind] = Py_NewRef(state->kind_words[region->kind]),
        [CM_EndFacts_is_locked] = PyBool_FromLong(facts.locked),
        [CM_EndFacts_is_whole] = PyBool_FromLong(facts.whole),
        [CM_EndFacts_device] = PyLong_FromLong(region->device),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_EndFacts, members);
}

static PyObject *
name_or_none(cm_dtype dtype)
{
    const char *name = cm_dtypes[dtype].name;
    return name == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(name);
}

/* Make a _CopyFacts, which has all facts that are known about the copy. cumem.explain()
 * turns them into sentences. Returns a new reference, or NULL with an exception. */
static PyObject *
describe(cm_state *state, const cm_explanation *e, const cm_copy_request *request)
{
    static const cm_convert none = {.from = CM_NUMBER_NONE};
    const cm_convert *convert = request->convert == NULL ? &none : request->convert;
    const cm_plan *plan = &e->plan;
    bool uses_ring = plan->row != NULL && plan->row->uses_ring;
    PyObject *members[CM_CopyFacts_COUNT] = {
        [CM_CopyFacts_route] = PyUnicode_FromString(cm_route_text(plan->row)),
        [CM_CopyFacts_nbytes] = PyLong_FromUnsignedLongLong(plan->nbytes),
        [CM_CopyFacts_dst] = describe_end(state, &request->dst, e->dst_facts),
        [CM_CopyFacts_src] = describe_end(state, &request->src, e->src_facts),
        [CM_CopyFacts_device] = PyLong_FromLong(plan->device),
        [CM_CopyFacts_src_device] = PyLong_FromLong(plan->src_device),
        [CM_CopyFacts_pieces] = PyLong_FromUnsignedLongLong(plan->piece_count),
        [CM_CopyFacts_piece_nbytes] = PyLong_FromUnsignedLongLong(e->piece_nbytes),
        [CM_CopyFacts_axis] = PyLong_FromLong(e->axis),
        [CM_CopyFacts_threads] = PyLong_FromUnsignedLong(e->thread_count),
        [CM_CopyFacts_chunks] =
            PyLong_FromUnsignedLong(uses_ring ? plan->slot_count : 0),
        [CM_CopyFacts_run_nbytes] =
            PyLong_FromUnsignedLongLong(plan->layout.run_nbytes),
        [CM_CopyFacts_loops] = PyLong_FromLong(plan->layout.ndim),
        [CM_CopyFacts_is_quick] = PyBool_FromLong(e->is_short),
        [CM_CopyFacts_is_bounced] = PyBool_FromLong(e->is_bounced),
        [CM_CopyFacts_is_broadcast] = PyBool_FromLong(e->is_broadcast),
        [CM_CopyFacts_rearranges_on_device] =
            PyBool_FromLong(plan->rearranges_on_device),
        [CM_CopyFacts_is_download] = PyBool_FromLong(plan->is_download),
        [CM_CopyFacts_is_fresh] = PyBool_FromLong(plan->is_fresh),
        [CM_CopyFacts_overlaps] = PyBool_FromLong(e->overlaps),
        [CM_CopyFacts_converts_on_device] = PyBool_FromLong(plan->converts_on_device),
        [CM_CopyFacts_casts] = PyBool_FromLong(convert->cast != NULL),
        [CM_CopyFacts_from_dtype] = name_or_none(convert->from),
        [CM_CopyFacts_to_dtype] = name_or_none(convert->to),
        [CM_CopyFacts_staged_up_nbytes] =
            PyLong_FromUnsignedLongLong(e->tuning.staged_up_nbytes),
        [CM_CopyFacts_staged_down_nbytes] =
            PyLong_FromUnsignedLongLong(e->tuning.staged_down_nbytes),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_CopyFacts, members);
}

/* Describe the copy that `request` asks for. cm_copy_objects() calls this instead of
 * making the copy. */
static PyObject *
explain_request(cm_state *state, const cm_copy_request *request)
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
                           ? describe(state, explanation, request)
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
    int device = cm_device_hint_of(state, dst, src, stream, 0);
    if (cm_call_enter(&frame, state, stream, device, NULL, NULL) == 0) {
        cm_copy_how how = {frame.stream, .blocking = blocking != 0, .casting = casting,
                           .explain = explain_request};
        result = cm_copy_objects(state, dst, src, how);
    }
    return cm_call_leave(&frame, result);
}
