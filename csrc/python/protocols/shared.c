/* SPDX-License-Identifier: Apache-2.0 */
/* Makes buffers over memory that other processes open by its name
 * (base/shared_memory.h), and page-locks that memory when the first copy needs it.
 *
 * A storage over such memory is of the kind "pinned", but the planner takes it for
 * ordinary memory (`copy_kind`) as long as this process has not locked it. Locking
 * makes a context on a device, and takes long for a large memory. So it is left to the
 * first copy to or from a device, which also says on which device, and a process that
 * only fills the memory never opens the driver. */
#include <string.h>

#include "base/shared_memory.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/structseq.h"
#include "python/protocols/protocols.h"

/* The `foreign_drop` of such a storage. Giving many pages back takes long. */
static void
drop_memory(void *argument)
{
    Py_BEGIN_ALLOW_THREADS
    cm_shared_release(argument);
    Py_END_ALLOW_THREADS
}

/* Return the memory of a storage, or NULL if it is not shared by name. */
static cm_shared_memory *
memory_of(const cm_storage *storage)
{
    return storage->foreign_drop == drop_memory ? storage->foreign_argument : NULL;
}

/* Hold the memory of this name if the process has it already. One mapping for all of
 * its buffers is enough, and its pages are locked and counted once. Returns NULL if
 * there is none. */
static cm_shared_memory *
find_here(const cm_state *state, const char *name)
{
    const cm_list *storages = &state->storages;
    for (const cm_list *n = storages->next; n != storages; n = n->next) {
        cm_shared_memory *memory = memory_of(CM_LIST_ENTRY(n, cm_storage, node));
        if (memory != NULL && strcmp(cm_shared_name(memory), name) == 0) {
            return cm_shared_hold(memory);
        }
    }
    return NULL;
}

/* Check that memory which the process has already is the memory that is asked for.
 * cm_shared_open() checks the same when it opens memory.
 * Fails: CM_ECLOSED if its token is another one; CM_ESHAPE if its size or form is, and
 *        then its form is written to `found_form`. */
static cm_status
check_here(const cm_shared_memory *memory, const cm_shared_request *request,
           char found_form[CM_SHARED_FORM_NBYTES])
{
    cm_shared_token token = cm_shared_token_of(memory);
    if (request->token != NULL && memcmp(request->token, &token, sizeof(token)) != 0) {
        return cm_fail(CM_ECLOSED, 0);
    }
    if (cm_shared_nbytes(memory) != request->nbytes
        || strcmp(cm_shared_form(memory), request->form) != 0) {
        memcpy(found_form, cm_shared_form(memory), strlen(cm_shared_form(memory)) + 1);
        return cm_fail(CM_ESHAPE, cm_shared_nbytes(memory));
    }
    return cm_ok();
}

/* Raise the error of memory that could not be opened. Always returns NULL. */
static cm_shared_memory *
refuse(cm_state *state, const cm_shared_request *request, cm_status status,
       const char *found_form)
{
    const char *name = request->name;
    switch (status.code) {
    case CM_ESHAPE:
        (void)cm_package_refuse(
            "pools.sharing", "refuse_form",
            Py_BuildValue("(sss)", name, request->form, found_form));
        break;
    case CM_ECLOSED:
        (void)cm_package_refuse("pools.sharing", "refuse_gone",
                                Py_BuildValue("(s)", name));
        break;
    case CM_EBUSY:
        (void)cm_package_refuse("pools.sharing", "refuse_unreachable",
                                Py_BuildValue("(s)", name));
        break;
    default:
        (void)cm_py_raise(state, status, "while opening shared page-locked memory");
    }
    return NULL;
}

/* Open the memory, or hold it if the process has it. Ctrl-C ends the wait for another
 * process. Returns NULL with an exception if it fails. */
static cm_shared_memory *
open_memory(cm_state *state, const cm_shared_request *request)
{
    char found_form[CM_SHARED_FORM_NBYTES] = "";
    for (;;) {
        cm_shared_memory *memory = find_here(state, request->name);
        cm_status status =
            memory == NULL ? cm_ok() : check_here(memory, request, found_form);
        if (memory == NULL) {
            status = CM_WITHOUT_GIL(cm_shared_open(request, found_form, &memory));
        }
        else if (!cm_is_ok(status)) {
            drop_memory(memory);
        }
        if (cm_is_ok(status)) {
            return memory;
        }
        if (status.code != CM_ECANCELLED) {
            return refuse(state, request, status, found_form);
        }
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
    }
}

/* What a buffer over the memory looks like. */
typedef struct view_of_memory {
    int64_t offset;
    PyObject *dtype; /* owned by the caller */
    int ndim;
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    bool readonly;
} view_of_memory;

/* Make the buffer, and check that it lies in the memory, since a pickle may say
 * anything. Takes the memory over. */
static PyObject *
make_buffer(cm_state *state, cm_shared_memory *memory, const view_of_memory *view)
{
    int64_t low, high;
    cm_storage *storage = cm_storage_new(state, CM_KIND_PINNED, 0);
    if (storage == NULL) {
        drop_memory(memory);
        return NULL;
    }
    storage->copy_kind = CM_KIND_PAGEABLE;
    storage->host = cm_shared_host(memory);
    storage->nbytes = cm_shared_nbytes(memory);
    storage->flags = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED;
    storage->locks_late = true;
    storage->foreign_drop = drop_memory;
    storage->foreign_argument = memory;
    PyObject *buffer = cm_buffer_new(state, state->buffer_types[CM_KIND_PINNED],
                                     storage, view->offset, view->dtype, view->ndim,
                                     view->shape, view->strides, view->readonly, NULL);
    cm_storage_release(storage, true);
    if (buffer == NULL) {
        return NULL;
    }
    if (cm_buffer_bounds((cm_buffer *)(void *)buffer, &low, &high) < 0) {
        Py_DECREF(buffer);
        return NULL;
    }
    int64_t room = (int64_t)storage->nbytes - view->offset;
    if (view->offset < 0 || low < -view->offset || high > room) {
        PyErr_SetString(PyExc_ValueError, "the view does not lie in the shared memory");
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* Read the shape and the strides, which are tuples of one length. */
static int
read_view(PyObject *shape, PyObject *strides, view_of_memory *out)
{
    if (cm_arg_shape(shape, "shape", &out->ndim, out->shape) < 0) {
        return -1;
    }
    if (PyTuple_Size(strides) != out->ndim) {
        PyErr_SetString(PyExc_ValueError, "shape and strides differ in length");
        return -1;
    }
    for (int axis = 0; axis < out->ndim; axis++) {
        out->strides[axis] = PyLong_AsLongLong(PyTuple_GetItem(strides, axis));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Read 16 bytes, or None. Returns 1 if there is a token, 0 if not, or -1. */
static int
read_token(PyObject *object, cm_shared_token *out)
{
    char *bytes;
    Py_ssize_t nbytes;
    if (object == Py_None) {
        return 0;
    }
    if (PyBytes_AsStringAndSize(object, &bytes, &nbytes) < 0) {
        return -1;
    }
    if (nbytes != (Py_ssize_t)sizeof(*out)) {
        PyErr_SetString(PyExc_ValueError, "the token must have 16 bytes");
        return -1;
    }
    memcpy(out, bytes, sizeof(*out));
    return 1;
}

PyObject *
cm_shared_pinned(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    cm_shared_request request = {.name = NULL};
    view_of_memory view = {.ndim = 0};
    PyObject *dtype, *shape, *strides, *token_object;
    unsigned long long nbytes;
    long long offset;
    int readonly;
    cm_shared_token token;
    if (!PyArg_ParseTuple(args, "ssKOiOO!O!Lp:_shared_pinned", &request.name,
                          &request.form, &nbytes, &token_object, &request.numa_node,
                          &dtype, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &offset, &readonly)
        || read_view(shape, strides, &view) < 0) {
        return NULL;
    }
    int has_token = read_token(token_object, &token);
    if (has_token < 0) {
        return NULL;
    }
    view.dtype = cm_numpy_dtype(dtype);
    if (view.dtype == NULL) {
        return NULL;
    }
    request.token = has_token > 0 ? &token : NULL;
    request.nbytes = nbytes;
    view.offset = offset;
    view.readonly = readonly != 0;
    cm_state_enter(state);
    cm_shared_memory *memory = open_memory(state, &request);
    PyObject *buffer = memory == NULL ? NULL : make_buffer(state, memory, &view);
    cm_state_leave(state);
    Py_DECREF(view.dtype);
    return buffer;
}

PyObject *
cm_shared_facts(const cm_buffer *buffer)
{
    const cm_shared_memory *memory = memory_of(buffer->storage);
    if (memory == NULL) {
        return Py_NewRef(Py_None);
    }
    cm_shared_token token = cm_shared_token_of(memory);
    PyObject *members[CM_SharedFacts_COUNT] = {
        [CM_SharedFacts_name] = PyUnicode_FromString(cm_shared_name(memory)),
        [CM_SharedFacts_form] = PyUnicode_FromString(cm_shared_form(memory)),
        [CM_SharedFacts_nbytes] = PyLong_FromUnsignedLongLong(cm_shared_nbytes(memory)),
        [CM_SharedFacts_token] =
            PyBytes_FromStringAndSize((const char *)&token, sizeof(token)),
        [CM_SharedFacts_offset] = PyLong_FromLongLong(buffer->offset),
    };
    return cm_structseq_new(buffer->state, CM_STRUCTSEQ_SharedFacts, members);
}

/* -- page-locking --------------------------------------------------------------------- */

/* Copy the kind, device and address of the storage to the end, since locking the pages
 * has changed them. */
static void
place_again(cm_operand *end)
{
    cm_region *region = &end->region;
    const cm_storage *storage = end->storage;
    if (region->host == NULL) { /* it has no elements */
        return;
    }
    uint64_t from = (uintptr_t)region->host - (uintptr_t)storage->host;
    region->kind = storage->copy_kind;
    region->device = storage->device;
    region->address = storage->address == 0 ? 0 : storage->address + from;
}

/* Lock the memory of `end` if the other end of the copy is on a device. Returns 0, or
 * -1 with an exception. */
static int
lock_for(cm_state *state, cm_operand *end, const cm_region *other)
{
    cm_storage *storage = end->storage;
    bool is_host =
        cm_kind_is_pageable(other->kind) || cm_kind_is_page_locked(other->kind);
    if (storage == NULL || !storage->locks_late || is_host || storage->nbytes == 0) {
        return 0;
    }
    if (cm_storage_lock_pages(state, storage, other->device) < 0) {
        return -1;
    }
    place_again(end);
    return 0;
}

int
cm_operands_lock_late(cm_state *state, cm_operand *dst, cm_operand *src)
{
    if (lock_for(state, dst, &src->region) < 0) {
        return -1;
    }
    return lock_for(state, src, &dst->region);
}
