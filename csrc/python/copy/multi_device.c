/* SPDX-License-Identifier: Apache-2.0 */
/* Of broadcast(), scatter() and gather() what cumem/multi_device.py leaves to the core:
 * where ends lie, which targets one copy makes, and each of the copies. */
#include "docstrings.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/errors.h"
#include "transfer/plan/overlap.h"
#include "transfer/routes/broadcast.h"

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
        if (cm_operand_init(state, &end, object, dtype, frame.stream) == 0) {
            answer = describe_end(state, &end);
        }
        cm_operand_fini(&end);
    }
    return cm_call_leave(&frame, answer);
}

/* -- copies that begin together ------------------------------------------------------- */

/* Which targets of a broadcast one copy makes: the index of its first, for each. */
static PyObject *
group_regions(cm_state *state, const cm_operand *dsts, uint32_t count,
              const cm_region *src)
{
    cm_engine *engine = cm_state_engine(state, -1);
    const cm_region **regions = PyMem_Malloc((count + 1) * sizeof(*regions));
    uint32_t *leads = PyMem_Malloc((count + 1) * sizeof(*leads));
    PyObject *list = NULL;
    if (regions == NULL || leads == NULL) {
        PyErr_NoMemory();
    }
    else if (engine != NULL && (list = PyList_New(count)) != NULL) {
        for (uint32_t i = 0; i < count; i++) {
            regions[i] = &dsts[i].region;
        }
        cm_engine_group_targets(engine, regions, count, src, leads);
        for (uint32_t i = 0; list != NULL && i < count; i++) {
            PyObject *lead = PyLong_FromUnsignedLong(leads[i]);
            if (lead == NULL || PyList_SetItem(list, i, lead) < 0) {
                Py_CLEAR(list);
            }
        }
    }
    PyMem_Free((void *)regions);
    PyMem_Free(leads);
    return list;
}

static PyObject *
group_targets(PyObject *module, PyObject *args)
{
    PyObject *dsts, *object;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &dsts, &object)) {
        return NULL;
    }
    cm_state *state = cm_state_of_module(module);
    Py_ssize_t count = PyTuple_Size(dsts);
    cm_operand *ends = PyMem_Calloc((size_t)count + 1, sizeof(*ends)); /* the source */
    if (ends == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *leads = NULL;
    Py_ssize_t read = 0;
    cm_state_enter(state);
    int result = cm_state_runtime(state) == NULL ? -1 : 0;
    while (result == 0 && read <= count) {
        PyObject *end = read < count ? PyTuple_GetItem(dsts, read) : object;
        result = cm_operand_init(state, &ends[read++], end, NULL, NULL);
    }
    cm_region src;
    if (result == 0 && cm_check_pair("", &ends[0], &ends[count], &src) == 0) {
        leads = group_regions(state, ends, (uint32_t)count, &src);
    }
    while (read > 0) {
        cm_operand_fini(&ends[--read]);
    }
    PyMem_Free(ends);
    cm_state_leave(state);
    return leads;
}

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
                         Py_BuildValue("(KO)", (unsigned long long)state->writer_total,
                                       captures ? Py_True : Py_False));
    }
    return cm_call_leave(&frame, answer);
}

static PyObject *
copy_part(PyObject *module, PyObject *args)
{
    PyObject *dsts, *src, *stream, *after;
    int beside;
    unsigned long long before;
    if (!PyArg_ParseTuple(args, "O!OOpOK", &PyTuple_Type, &dsts, &src, &stream, &beside,
                          &after, &before)) {
        return NULL;
    }
    cm_call_frame frame;
    cm_stream_list later_than;
    PyObject *transfers = NULL;
    cm_state *state = cm_state_of_module(module);
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0) {
        if (cm_stream_list_take(state, after, "after", -1, &later_than) == 0) {
            cm_copy_how how = {frame.stream, .after = &later_than, .targets = dsts,
                               .before = before, .beside = beside};
            transfers = cm_copy_objects(state, PyTuple_GetItem(dsts, 0), src, how);
        }
        cm_stream_list_give(state, &later_than);
    }
    return cm_call_leave(&frame, transfers);
}

PyMethodDef cm_multi_device_methods[] = {
    {"_is_memory", is_memory, METH_O, CM_DOC__is_memory},
    {"_read_end", read_end, METH_VARARGS, CM_DOC__read_end},
    {"_group_targets", group_targets, METH_VARARGS, CM_DOC__group_targets},
    {"_begin_parts", begin_parts, METH_O, CM_DOC__begin_parts},
    {"_copy_part", copy_part, METH_VARARGS, CM_DOC__copy_part},
    {NULL, NULL, 0, NULL},
};
