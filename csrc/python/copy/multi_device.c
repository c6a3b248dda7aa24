/* SPDX-License-Identifier: Apache-2.0 */
/* Of broadcast(), scatter() and gather() what cumem/multi_device.py leaves to the core:
 * where ends lie, and each of the copies. */
#include "docstrings.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/errors.h"
#include "transfer/plan/overlap.h"

/* -- ends --------------------------------------------------------------------------------- */

static PyObject *
describe_end(cm_state *state, const cm_operand *end)
{
    int64_t low, high;
    const cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = cm_region_bounds(&end->region, &low, &high);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, NULL);
    }
    uint64_t begin = cm_overlap_span(state->runtime, &end->region).begin;
    return Py_BuildValue("(OK)", end->keep,
                         (unsigned long long)(begin - (uint64_t)low));
}

static PyObject *
is_memory(PyObject *module, PyObject *object)
{
    return PyBool_FromLong(cm_operand_is_memory(cm_state_of_module(module), object));
}

static PyObject *
read_end(PyObject *module, PyObject *args)
{
    PyObject *object, *dtype, *stream;
    if (!PyArg_ParseTuple(args, "OOO", &object, &dtype, &stream)) {
        return NULL;
    }
    cm_call_frame frame;
    PyObject *answer = NULL;
    cm_state *state = cm_state_of_module(module);
    dtype = dtype == Py_None ? NULL : dtype;
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0
        && cm_state_runtime(state) != NULL) {
        cm_operand end;
        if (cm_operand_init(state, &end, object, dtype, frame.stream, false) == 0) {
            answer = describe_end(state, &end);
        }
        cm_operand_fini(&end);
    }
    return cm_call_leave(&frame, answer);
}

/* -- copies that begin together ------------------------------------------------------- */

static PyObject *
begin_parts(PyObject *module, PyObject *stream)
{
    cm_call_frame frame;
    PyObject *answer = NULL;
    cm_state *state = cm_state_of_module(module);
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0) {
        bool captures;
        cm_status status = cm_call_ask_capturing(frame.stream, &captures);
        answer =
            cm_py_answer(state, status, "while copying",
                         Py_BuildValue("(KKO)", (unsigned long long)++state->many_count,
                                       (unsigned long long)state->writer_total,
                                       captures ? Py_True : Py_False));
    }
    return cm_call_leave(&frame, answer);
}

static PyObject *
copy_part(PyObject *module, PyObject *args)
{
    PyObject *dsts, *src, *stream, *after;
    int beside;
    unsigned long long number, before;
    if (!PyArg_ParseTuple(args, "O!OOpOKK", &PyTuple_Type, &dsts, &src, &stream,
                          &beside, &after, &number, &before)) {
        return NULL;
    }
    cm_call_frame frame;
    cm_stream_list later_than;
    PyObject *transfers = NULL;
    cm_state *state = cm_state_of_module(module);
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0) {
        if (cm_stream_list_take(state, after, "after", -1, &later_than) == 0) {
            cm_copy_how how = {frame.stream,     .after = &later_than,
                               .targets = dsts,  .before = before,
                               .number = number, .beside = beside};
            transfers = cm_copy_objects(state, PyTuple_GetItem(dsts, 0), src, how);
        }
        cm_stream_list_give(state, &later_than);
    }
    return cm_call_leave(&frame, transfers);
}

static PyObject *
end_parts(PyObject *module, PyObject *args)
{
    unsigned long long number;
    PyObject *stream, *ends;
    cm_call_frame frame;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "KOO!", &number, &stream, &PyTuple_Type, &ends)) {
        return NULL;
    }
    bool entered = cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0;
    if (entered) {
        cm_call_end_parts(state, number, frame.stream, ends);
    }
    return cm_call_leave(&frame, entered ? Py_NewRef(Py_None) : NULL);
}

PyMethodDef cm_multi_device_methods[] = {
    {"_is_memory", is_memory, METH_O, CM_DOC__is_memory},
    {"_read_end", read_end, METH_VARARGS, CM_DOC__read_end},
    {"_begin_parts", begin_parts, METH_O, CM_DOC__begin_parts},
    {"_copy_part", copy_part, METH_VARARGS, CM_DOC__copy_part},
    {"_end_parts", end_parts, METH_VARARGS, CM_DOC__end_parts},
    {NULL, NULL, 0, NULL},
};
