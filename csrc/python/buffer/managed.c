/* SPDX-License-Identifier: Apache-2.0 */
/* What only managed memory does: its pages move ahead of use, are advised, asked about
 * and given up. The package has the words for it (cumem/managed.py); here are the
 * calls, of whole spans: from the lowest to the highest element of a buffer. */
#include "python/buffer/methods.h"

#include <limits.h>
#include <stdlib.h>

#include "base/checked_math.h"
#include "base/machine.h"
#include "base/nvtx.h"
#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"

/* -- calls of the driver for the spans of buffers ------------------------------------------ */

typedef struct page_call {
    enum { PREFETCH, DISCARD, ADVISE } work;
    int location;
    int advice;        /* CM_ADVISE_…; PREFETCH: is it a turn of one of the sides? */
    cm_stream *stream; /* on loan; ADVISE: NULL */
} page_call;

static cm_status
submit(cm_runtime *rt, const page_call *wanted, const cm_address *addresses,
       const uint64_t *nbytes, uint64_t count)
{
    uint64_t stream = wanted->stream == NULL ? 0 : wanted->stream->handle;
    if (wanted->work == DISCARD) {
        return cm_rt_discard_batch_async(rt, addresses, nbytes, count, stream);
    }
    if (wanted->work == PREFETCH && count > 1 && stream > CM_STREAM_LEGACY
        && cm_runtime_has(rt, CM_OP_prefetch_batch_async)) {
        return cm_rt_prefetch_batch_async(rt, addresses, nbytes, count,
                                          wanted->location, stream);
    }
    for (uint64_t i = 0; i < count; i++) {
        CM_TRY(wanted->work == ADVISE
                   ? cm_rt_advise(rt, addresses[i], nbytes[i], wanted->advice,
                                  wanted->location)
                   : cm_rt_prefetch_async(rt, addresses[i], nbytes[i], wanted->location,
                                          stream));
    }
    return cm_ok();
}

/* The driver's "invalid device" says nothing of the reason. */
static cm_status
explained(cm_runtime *rt, int device, cm_status status)
{
    int concurrent = 1;
    bool refused =
        status.code == CM_CUDA_INVALID_DEVICE || status.code == CM_CUDA_NOT_SUPPORTED;
    if (refused
        && cm_is_ok(cm_rt_device_attribute(rt, CM_ATTRIBUTE_concurrent_managed_access,
                                           device, &concurrent))
        && concurrent == 0) {
        status.code = CM_EMANAGED;
    }
    return status;
}

/* Where the buffer's bytes are; of a discard the whole pages of them, so that what else
 * lies on the first and the last stays. 0, or -1 with an exception. */
static int
find_span(const cm_buffer *self, bool inside, cm_address *address, uint64_t *nbytes)
{
    int64_t low, high;
    if (cm_buffer_check_open(self) < 0 || cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    cm_address begin = cm_buffer_address(self) + (uint64_t)low;
    cm_address end = begin + (uint64_t)(high - low);
    if (inside) {
        uint64_t page = cm_page_nbytes();
        begin = cm_round_up_to(begin, page);
        end &= ~(page - 1);
    }
    *address = begin;
    *nbytes = begin < end ? end - begin : 0;
    return 0;
}

/* Find one of the buffers, which is pinned. 0, or -1 with an exception. */
static int
add(const page_call *wanted, const cm_buffer *buffer, cm_address *address,
    uint64_t *nbytes)
{
    cm_storage *storage = buffer->storage;
    cm_stream *stream = wanted->stream;
    bool discards = wanted->work == DISCARD; /* and so comes after all that reads */
    if ((discards
         && cm_storage_order_handle(storage, stream->device, stream->handle) < 0)
        || find_span(buffer, discards, address, nbytes) < 0
        || (stream != NULL && *nbytes > 0 && cm_storage_add_use(storage, stream) < 0)) {
        return -1;
    }
    storage->is_advised = storage->is_advised || wanted->work == ADVISE;
    return 0;
}

static cm_buffer *
buffer_at(PyObject *tuple, Py_ssize_t i)
{
    return (cm_buffer *)(void *)PyTuple_GetItem(tuple, i);
}

/* Pin all of them, or none: -1 with TypeError. What is done before the call lets other
 * threads in, and one that frees a buffer then must not have its pages taken for the
 * next owner's, which a discard would empty. */
static int
pin_all(const cm_state *state, PyObject *tuple)
{
    Py_ssize_t count = PyTuple_Size(tuple);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyTuple_GetItem(tuple, i);
        if (!cm_buffer_check(state, object)
            || cm_buffer_kind(buffer_at(tuple, i)) != CM_KIND_MANAGED) {
            return cm_arg_refuse(object, "buffers", "ManagedBuffers");
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        cm_storage_pin(buffer_at(tuple, i)->storage);
    }
    return 0;
}

static void
unpin_all(PyObject *tuple)
{
    Py_ssize_t count = PyTuple_Size(tuple);
    for (Py_ssize_t i = 0; i < count; i++) {
        cm_storage_unpin(buffer_at(tuple, i)->storage);
    }
}

/* Of a tuple of buffers, which are pinned. 0, or -1 with an exception. */
static int
run(cm_state *state, const page_call *wanted, PyObject *tuple)
{
    static const char *const doing[] = {"while prefetching managed memory",
                                        "while discarding managed memory",
                                        "while advising managed memory"};
    uint64_t count = 0; /* of those that have bytes */
    Py_ssize_t most = PyTuple_Size(tuple);
    uint64_t *nbytes = calloc((size_t)most + 1, 2 * sizeof(*nbytes));
    if (nbytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    cm_address *addresses = nbytes + most;
    int result = 0;
    for (Py_ssize_t i = 0; i < most && result == 0; i++) {
        result = add(wanted, buffer_at(tuple, i), &addresses[count], &nbytes[count]);
        count += nbytes[count] > 0;
    }
    if (result == 0 && count > 0) {
        int home = wanted->stream != NULL ? wanted->stream->device
                                          : buffer_at(tuple, 0)->storage->device;
        cm_runtime *rt = state->runtime;
        uint64_t total = 0;
        for (uint64_t i = 0; i < count; i++) {
            total += nbytes[i];
        }
        CM_NVTX(doing[wanted->work] + sizeof("while"), total);
        cm_state_enter(state);
        cm_status status = CM_WITHOUT_GIL(
            CM_ON_DEVICE(rt, home, submit(rt, wanted, addresses, nbytes, count)));
        for (uint64_t i = 0; wanted->work == PREFETCH && cm_is_ok(status) && i < count
                             && cm_recorder_is_on();
             i++) {
            uint8_t kind = cm_kind_in_event(CM_KIND_MANAGED);
            int device = wanted->location < 0 ? -1 : wanted->location;
            cm_event event = {.op = CM_EVENT_PREFETCH,
                              .address = addresses[i],
                              .nbytes = nbytes[i],
                              .stream = wanted->stream->handle,
                              .kind = kind,
                              .source_kind = kind,
                              .device = (int8_t)device};
            cm_recorder_note_here(event);
        }
        status = explained(rt, wanted->location >= 0 ? wanted->location : home, status);
        cm_state_leave(state);
        result = cm_py_check(state, status, doing[wanted->work]);
    }
    free(nbytes);
    return result;
}

/* -- what the package asks for ------------------------------------------------------------- */

/* _managed(work, buffers, advice, location, stream, home) */
static PyObject *
managed(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *tuple, *stream;
    int work, home = -1;
    page_call wanted = {.stream = NULL};
    if (!PyArg_ParseTuple(args, "iO!iiO|i", &work, &PyTuple_Type, &tuple,
                          &wanted.advice, &wanted.location, &stream, &home)
        || cm_arg_check_range(work, "work", PREFETCH, ADVISE + 1) < 0
        || cm_arg_check_range(home, "home", -1, CM_MAX_DEVICES) < 0
        || cm_state_runtime(state) == NULL) {
        return NULL;
    }
    wanted.work = work;
    cm_state_enter(state); /* looking at the buffers may run Python code */
    if (work != ADVISE) {
        wanted.stream = cm_stream_from_object(state, stream, home);
    }
    int result = -1;
    bool has_stream = work == ADVISE || wanted.stream != NULL;
    if (has_stream && pin_all(state, tuple) == 0) {
        result = run(state, &wanted, tuple);
        unpin_all(tuple);
    }
    cm_stream_give(state, wanted.stream);
    cm_state_leave(state);
    if (result == 0 && work == PREFETCH && wanted.advice != 0
        && PyTuple_Size(tuple) > 0) {
        cm_buffer *buffer = (cm_buffer *)(void *)PyTuple_GetItem(tuple, 0);
        result = cm_buffer_note_side(buffer, wanted.location >= 0);
    }
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* Of the bytes from `begin` to `end` of the span. */
static int
read_range(const cm_buffer *self, uint64_t begin, uint64_t end, int attribute, int *out,
           int count)
{
    cm_storage *storage = self->storage;
    cm_runtime *rt = cm_state_runtime(self->state);
    cm_address address;
    uint64_t nbytes;
    if (rt == NULL) {
        return -1;
    }
    cm_state_enter(self->state); /* looking at the buffer may run Python code */
    int found = find_span(self, false, &address, &nbytes);
    cm_state_leave(self->state);
    if (found < 0) {
        return -1;
    }
    end = end < nbytes ? end : nbytes;
    if (begin >= end) {
        return 0;
    }
    cm_storage_pin(storage);
    cm_state_enter(self->state);
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(rt, storage->device,
                     cm_rt_range_attribute(rt, address + begin, end - begin, attribute,
                                           out, count)));
    cm_state_leave(self->state);
    cm_storage_unpin(storage);
    return cm_py_check(self->state, status, "while asking about managed memory");
}

int
cm_buffer_read_prefetch_location(const cm_buffer *self, int *out)
{
    *out = CM_NO_LOCATION;
    return read_range(self, 0, UINT64_MAX, CM_RANGE_PREFETCHED, out, 1);
}

/* _managed_ask(buffer, attribute, begin, end, count): so many C ints */
static PyObject *
managed_ask(PyObject *module, PyObject *args)
{
    PyObject *buffer;
    int attribute, count;
    unsigned long long begin, end;
    int found[CM_MAX_DEVICES + 1];
    if (!PyArg_ParseTuple(args, "O!iKKi",
                          cm_state_of_module(module)->buffer_types[CM_KIND_MANAGED],
                          &buffer, &attribute, &begin, &end, &count)
        || cm_arg_check_range(count, "count", 1, INT_MAX) < 0) {
        return NULL;
    }
    count = count <= CM_MAX_DEVICES ? count : CM_MAX_DEVICES + 1;
    for (int i = 0; i < count; i++) { /* of no bytes */
        found[i] = attribute == CM_RANGE_READ_MOSTLY ? 0 : CM_NO_LOCATION;
    }
    if (read_range((cm_buffer *)(void *)buffer, begin, end, attribute, found, count)
        < 0) {
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)found,
                                     count * (Py_ssize_t)sizeof(*found));
}

PyMethodDef cm_managed_methods[] = {
    {"_managed", managed, METH_VARARGS, CM_DOC__managed},
    {"_managed_ask", managed_ask, METH_VARARGS, CM_DOC__managed_ask},
    {NULL, NULL, 0, NULL},
};

/* -- thrashing ------------------------------------------------------------------------------ */

int
cm_buffer_note_side(cm_buffer *self, bool on_device)
{
    int64_t low, high;
    if (!cm_kind_migrates(self->storage->kind)) {
        return 0;
    }
    if (cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    low += self->offset;
    high += self->offset;
    cm_storage *storage = self->storage;
    if (storage->side_is_device == on_device && low < storage->side_high
        && storage->side_low < high) {
        return 0; /* as most uses are */
    }
    storage->side_low = low;
    storage->side_high = high;
    storage->side_is_device = on_device;
    return cm_package_do("managed", "note_side",
                         Py_BuildValue("(OLLO)", self, (long long)low, (long long)high,
                                       on_device ? Py_True : Py_False));
}
