/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the part of broadcast(), scatter() and gather() that
 * cumem/transfers/multi_device.py leaves to C. This file says where ends lie, and makes
 * each of the copies.
 *
 * Several copies that begin together are a group. _begin_parts() gives the group a
 * number, holds the memory of all ends, and notes how many transfers there were so far
 * (`before`). _copy_part() makes one copy, which comes after those transfers but not
 * after the others of the group. _end_parts() lets the storages forget the streams that
 * came before the whole group. A single copy could not let them do so, since the other
 * copies still had to come after these streams. */
#include <stdlib.h>

#include "docstrings.h"
#include "python/buffer/memory_watch.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "transfer/engine/engine.h"

/* -- ends --------------------------------------------------------------------------------- */

/* Make a _CopyEnd, which says what object keeps the memory of an end, at which place
 * its element 0 lies, and whether all of it is page-locked in one piece or on a device.
 * The place is a number. Two views of the same bytes give the same number, even if the
 * bytes have different addresses in them. Returns NULL with an exception if it fails.
 */
static PyObject *
describe_end(cm_state *state, const cm_operand *end)
{
    int64_t low, high;
    const cm_region *region = &end->region;
    cm_engine *engine = cm_state_engine(state, -1);
    if (engine == NULL) {
        return NULL;
    }
    cm_status status = cm_region_bounds(region, &low, &high);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, NULL);
    }
    uint64_t begin = cm_overlap_span(state->runtime, region).begin;
    cm_end_facts facts = cm_engine_facts_of(engine, region);
    PyObject *members[CM_CopyEnd_COUNT] = {
        [CM_CopyEnd_memory] = Py_NewRef(end->keep),
        [CM_CopyEnd_place] = PyLong_FromUnsignedLongLong(begin - (uint64_t)low),
        [CM_CopyEnd_is_locked] = PyBool_FromLong(facts.locked && facts.whole),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_CopyEnd, members);
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
    if (dtype != Py_None && !cm_numpy_is_dtype(dtype)) {
        (void)cm_arg_refuse(dtype, "dtype", "a numpy.dtype or None");
        return NULL;
    }
    dtype = dtype == Py_None ? NULL : dtype;
    int device = cm_device_hint(state, object, stream, 0);
    if (cm_call_enter(&frame, state, stream, device, NULL, NULL) == 0
        && cm_state_runtime(state) != NULL) {
        cm_operand end;
        if (cm_operand_init(state, &end, object, dtype, frame.stream, CM_ASK) == 0
            && (end.storage == NULL || cm_memory_watch(end.storage) == 0)) {
            answer = describe_end(state, &end);
        }
        cm_operand_fini(&end);
    }
    return cm_call_leave(&frame, answer);
}

/* -- copies that begin together ------------------------------------------------------- */

/* The ends of a group. While this lives nobody can free their memory, and shutdown() is
 * refused. */
typedef struct held_ends {
    cm_state *state;
    PyObject *module; /* held: keeps the state */
    Py_ssize_t count;
    cm_storage *storages[]; /* held and kept open */
} held_ends;

static const char held_name[] = "cumem.held_ends";

static void
let_go(PyObject *capsule)
{
    held_ends *self = PyCapsule_GetPointer(capsule, held_name);
    cm_kept_error kept = cm_error_keep();
    for (Py_ssize_t i = 0; i < self->count; i++) {
        cm_storage_allow_close(self->storages[i]);
        cm_storage_release(self->storages[i], true);
    }
    cm_state_leave(self->state);
    Py_DECREF(self->module);
    free(self);
    cm_error_restore(kept);
}

/* Return the storage of an end, borrowed, or NULL if the memory is not cumem's. */
static cm_storage *
storage_of(const cm_state *state, PyObject *end)
{
    if (cm_buffer_check(state, end)) {
        return ((cm_buffer *)(void *)end)->storage;
    }
    return cm_numpy_is_array(end) ? cm_operand_storage_of(state, end) : NULL;
}

/* Make a capsule that holds the storages of all ends. Returns a new reference, or NULL
 * with an exception. */
static PyObject *
hold_ends(cm_state *state, PyObject *module, PyObject *ends)
{
    Py_ssize_t room = PyTuple_Size(ends);
    held_ends *self = malloc(sizeof(*self) + (size_t)room * sizeof(self->storages[0]));
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *capsule = PyCapsule_New(self, held_name, let_go);
    if (capsule == NULL) {
        free(self);
        return NULL;
    }
    self->state = state;
    self->module = Py_NewRef(module);
    self->count = 0;
    cm_state_enter(state);
    for (Py_ssize_t i = 0; i < room; i++) {
        cm_storage *storage = storage_of(state, PyTuple_GetItem(ends, i));
        if (storage != NULL && cm_storage_check_open(storage) < 0) {
            Py_DECREF(capsule);
            return NULL;
        }
        if (storage != NULL) {
            cm_storage_keep_open(storage);
            self->storages[self->count++] = cm_storage_hold(storage);
        }
    }
    return capsule;
}

/* Give the group a number, hold its ends, and return both as a _CopyParts, or NULL with
 * an exception. */
static PyObject *
make_parts(cm_state *state, PyObject *module, PyObject *ends, bool captures)
{
    PyObject *held = hold_ends(state, module, ends);
    if (held == NULL) {
        return NULL;
    }
    PyObject *members[CM_CopyParts_COUNT] = {
        [CM_CopyParts_number] = PyLong_FromUnsignedLongLong(++state->many_count),
        [CM_CopyParts_before] = PyLong_FromUnsignedLongLong(state->transfer_total),
        [CM_CopyParts_is_captured] = PyBool_FromLong(captures),
        [CM_CopyParts_held] = held,
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_CopyParts, members);
}

static PyObject *
begin_parts(PyObject *module, PyObject *args)
{
    cm_call_frame frame;
    PyObject *stream, *ends;
    PyObject *answer = NULL;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "OO!", &stream, &PyTuple_Type, &ends)) {
        return NULL;
    }
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0) {
        bool captures;
        cm_status status = cm_call_ask_capturing(frame.stream, &captures);
        answer = cm_py_answer(state, status, "while copying",
                              make_parts(state, module, ends, captures));
    }
    return cm_call_leave(&frame, answer);
}

static PyObject *
copy_part(PyObject *module, PyObject *args)
{
    PyObject *dsts, *src, *stream, *after, *casting;
    int on_engine_stream;
    unsigned long long number, before;
    if (!PyArg_ParseTuple(args, "O!OOpOKKO", &PyTuple_Type, &dsts, &src, &stream,
                          &on_engine_stream, &after, &number, &before, &casting)) {
        return NULL;
    }
    if (PyTuple_Size(dsts) == 0) {
        PyErr_SetString(PyExc_ValueError, "dsts must not be empty");
        return NULL;
    }
    cm_call_frame frame;
    PyObject *transfers = NULL;
    cm_state *state = cm_state_of_module(module);
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0) {
        cm_copy_how how = {frame.stream,
                           .after = after,
                           .targets = dsts,
                           .before = before,
                           .number = number,
                           .on_engine_stream = on_engine_stream,
                           .casting = {.casting = casting}};
        transfers = cm_copy_objects(state, PyTuple_GetItem(dsts, 0), src, how);
    }
    return cm_call_leave(&frame, transfers);
}

/* This is the Python function _end_parts(number, stream, capsule). If anybody else has
 * used a storage since the group copied to or from it, that storage forgets nothing. */
static PyObject *
end_parts(PyObject *module, PyObject *args)
{
    unsigned long long number;
    PyObject *stream, *capsule;
    cm_call_frame frame;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "KOO", &number, &stream, &capsule)) {
        return NULL;
    }
    const held_ends *held = PyCapsule_GetPointer(capsule, held_name);
    if (held == NULL) {
        return NULL;
    }
    bool entered = cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0;
    for (Py_ssize_t i = 0; entered && i < held->count; i++) {
        cm_storage *storage = held->storages[i];
        if (storage->many_call == number) {
            cm_storage_forget_uses(storage, frame.stream, CM_EXTENT_ALL(true), true,
                                   storage->many_index);
        }
    }
    return cm_call_leave(&frame, entered ? Py_NewRef(Py_None) : NULL);
}

PyMethodDef cm_multi_device_methods[] = {
    {"_is_memory", is_memory, METH_O, CM_DOC__is_memory},
    {"_read_end", read_end, METH_VARARGS, CM_DOC__read_end},
    {"_begin_parts", begin_parts, METH_VARARGS, CM_DOC__begin_parts},
    {"_copy_part", copy_part, METH_VARARGS, CM_DOC__copy_part},
    {"_end_parts", end_parts, METH_VARARGS, CM_DOC__end_parts},
    {NULL, NULL, 0, NULL},
};
