/* SPDX-License-Identifier: Apache-2.0 */
/* copy_many() and copy_many_async(). First pairs of whatever copy() takes, read into a
 * request of the engine: fast, for there may be many thousands, and complete before
 * anything is copied. Then the call. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "docstrings.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"
#include "transfer/batch/batch.h"
#include "transfer/plan/layout.h"

/* A storage at an end of at least one pair. */
typedef struct many_storage {
    cm_storage *storage; /* held and pinned */
    bool written;
} many_storage;

/* Where the driver must say what kind of memory an array has. */
typedef struct many_question {
    uint64_t piece;
    bool is_dst;
} many_question;

typedef struct many_pairs {
    cm_state *state;   /* borrowed */
    cm_stream *stream; /* borrowed; may be NULL: given to exporters of DLPack */
    PyObject *pairs;   /* owned tuple */
    uint64_t call;     /* its number */
    cm_piece *pieces;  /* owned arrays */
    uint64_t piece_count;
    cm_piece_regions *others;
    uint32_t other_count;
    uint32_t other_room;
    many_storage *storages;
    uint32_t storage_count;
    uint32_t storage_room;
    many_question *questions;
    uint64_t question_count;
    PyObject *kept;       /* owned list: whatever else keeps memory alive */
    uint64_t devices;     /* of ends that are a device's, by index */
    uint64_t any_devices; /* of ends that are not ordinary memory */
    int first_device;     /* of the first end that is a device's; -1: there is none */
    cm_operand dst;       /* of the pair being read */
    cm_operand src;
} many_pairs;

/* -- growing ------------------------------------------------------------------------------ */

/* Once for all pairs that it is at an end of. */
static int
add_storage(many_pairs *self, cm_storage *storage, bool written)
{
    if (storage->many_call != self->call) {
        if (cm_reserve(&self->storages, sizeof(*self->storages), NULL, 0,
                       self->storage_count, &self->storage_room)
            < 0) {
            return -1;
        }
        cm_storage_hold(storage);
        cm_storage_pin(storage);
        storage->many_call = self->call;
        storage->many_index = self->storage_count;
        self->storages[self->storage_count++] = (many_storage){.storage = storage};
    }
    many_storage *entry = &self->storages[storage->many_index];
    entry->written = entry->written || written;
    return 0;
}

static int
keep_end(many_pairs *self, const cm_operand *end, bool written)
{
    if (end->locked != NULL && PyList_Append(self->kept, end->locked) < 0) {
        return -1;
    }
    if (end->storage != NULL) {
        return add_storage(self, end->storage, written);
    }
    return PyList_Append(self->kept, end->keep);
}

/* -- a pair of buffers and arrays --------------------------------------------------------- */

static void
note_device(many_pairs *self, const cm_region *region)
{
    uint64_t device = cm_devices_of(region);
    self->any_devices |= device;
    if (device != 0 && cm_kind_is_on_device(region->kind)) {
        self->devices |= device;
        self->first_device =
            self->first_device < 0 ? region->device : self->first_device;
    }
}

/* An array within one of our buffers is what the buffer is. */
static bool
place_in_storage(cm_region *region, const cm_storage *storage, uint64_t nbytes)
{
    uint64_t from = (uintptr_t)region->host - (uintptr_t)storage->host;
    if (storage->host == NULL || cm_kind_is_on_device(storage->residency)
        || from > storage->nbytes || nbytes > storage->nbytes - from) {
        return false;
    }
    region->kind = storage->residency;
    region->device = cm_kind_is_pageable(region->kind) ? -1 : storage->device;
    region->address = storage->address == 0 ? 0 : storage->address + from;
    return true;
}

/* As cm_operand_init() for the usual ends, but that nothing runs foreign code and the
 * driver is not asked. 1; 0: it is none of them; -1. */
static int
read_quickly(many_pairs *self, cm_operand *end, PyObject *object, bool *asks)
{
    *asks = false;
    if (cm_buffer_check(self->state, object)) {
        const cm_buffer *buffer = (const cm_buffer *)(void *)object;
        if (cm_buffer_check_open(buffer) < 0) {
            return -1;
        }
        cm_buffer_region(buffer, &end->region);
        end->dtype = Py_NewRef(buffer->dtype);
        end->storage = buffer->storage;
        end->readonly = buffer->readonly;
    }
    else if (cm_numpy_is_array(object)) {
        if (cm_numpy_region(object, &end->region, &end->dtype, &end->readonly) < 0) {
            return -1;
        }
        end->storage = cm_operand_storage_of(self->state, object);
        *asks = true;
    }
    else {
        return 0;
    }
    end->keep = Py_NewRef(object);
    return 1;
}

static bool
is_run(const cm_region *region, int64_t *nbytes)
{
    return cm_region_is_c_contiguous(region)
           && cm_is_ok(cm_region_count(region, nbytes))
           && cm_mul_i64(*nbytes, region->itemsize, nbytes)
           && (*nbytes == 0 || region->host != NULL || region->address != 0);
}

static bool
have_one_shape(const cm_region *a, const cm_region *b)
{
    return a->ndim == b->ndim
           && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof(a->shape[0])) == 0;
}

static void
set_end(cm_piece_end *end, const cm_operand *operand)
{
    const cm_region *region = &operand->region;
    *end = (cm_piece_end){.host = region->host,
                          .address = region->address,
                          .owner = operand->storage,
                          .kind = region->kind,
                          .device = region->device};
}

/* What is kept of the pair being read, whose source is stretched to `src`. */
static int
note_ends(many_pairs *self, const cm_region *src)
{
    note_device(self, &self->dst.region);
    note_device(self, src);
    return keep_end(self, &self->dst, true) < 0 || keep_end(self, &self->src, false) < 0
               ? -1
               : 0;
}

static int
add_piece(many_pairs *self, uint64_t index, int64_t nbytes)
{
    cm_piece *piece = &self->pieces[self->piece_count++];
    set_end(&piece->dst, &self->dst);
    set_end(&piece->src, &self->src);
    piece->nbytes = (uint64_t)nbytes;
    piece->index = index;
    return note_ends(self, &self->src.region);
}

/* Put the question off until all are read, unless a buffer of ours answers it. */
static void
settle_array(many_pairs *self, cm_operand *end, bool asks, bool is_dst, int64_t nbytes)
{
    if (asks
        && !(end->storage != NULL
             && place_in_storage(&end->region, end->storage, (uint64_t)nbytes))) {
        self->questions[self->question_count++] =
            (many_question){self->piece_count, is_dst};
    }
}

/* 1; 0: this pair is none of the usual ones; -1. */
static int
try_usual(many_pairs *self, PyObject *dst, PyObject *src, uint64_t index)
{
    bool dst_asks, src_asks;
    int64_t nbytes, same;
    int read = read_quickly(self, &self->dst, dst, &dst_asks);
    if (read <= 0 || cm_check_target("", &self->dst, dst) < 0) {
        return read <= 0 ? read : -1;
    }
    read = read_quickly(self, &self->src, src, &src_asks);
    if (read <= 0 || cm_check_dtypes("", &self->dst, &self->src) < 0) {
        return read <= 0 ? read : -1;
    }
    if (!have_one_shape(&self->dst.region, &self->src.region)
        || !is_run(&self->dst.region, &nbytes) || !is_run(&self->src.region, &same)) {
        return 0;
    }
    if (nbytes == 0) {
        return 1;
    }
    settle_array(self, &self->dst, dst_asks, true, nbytes);
    settle_array(self, &self->src, src_asks, false, nbytes);
    /* What was read of buffers holds while they are open, and a collection on the way
     * may have run Python code. From here on nothing does. */
    if ((!dst_asks && cm_storage_check_open(self->dst.storage) < 0)
        || (!src_asks && cm_storage_check_open(self->src.storage) < 0)) {
        return -1;
    }
    return add_piece(self, index, nbytes) < 0 ? -1 : 1;
}

/* -- any other pair ----------------------------------------------------------------------- */

static int
add_other(many_pairs *self, const cm_region *src, uint64_t index)
{
    if (cm_reserve(&self->others, sizeof(*self->others), NULL, 0, self->other_count,
                   &self->other_room)
        < 0) {
        return -1;
    }
    cm_piece_regions *other = &self->others[self->other_count++];
    other->dst = self->dst.region;
    other->src = *src;
    other->index = index;
    return note_ends(self, src);
}

static void
shift(cm_region *region, int64_t nbytes)
{
    region->host = region->host == NULL ? NULL : (char *)region->host + nbytes;
    region->address = region->address == 0 ? 0 : region->address + (uint64_t)nbytes;
}

/* Shapes and strides that come to one run are one, whatever they look like. */
static int
add_any(many_pairs *self, uint64_t index)
{
    cm_layout layout;
    cm_region src;
    if (cm_check_pair("", &self->dst, &self->src, &src) < 0) {
        return -1;
    }
    cm_status status = cm_layout_init(&self->dst.region, &src, &layout);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while reading a pair");
    }
    if (layout.run_nbytes == 0) {
        return 0;
    }
    if (layout.ndim > 0) {
        return add_other(self, &src, index);
    }
    shift(&self->dst.region, layout.offset[CM_DST]);
    shift(&self->src.region, layout.offset[CM_SRC]);
    return add_piece(self, index, (int64_t)layout.run_nbytes);
}

/* Foreign code may run: what was read of either end before it is read again. */
static int
read_any(many_pairs *self, PyObject *dst, PyObject *src, uint64_t index)
{
    if (cm_operand_init(self->state, &self->dst, dst, NULL, self->stream, false) < 0) {
        return -1;
    }
    int result = cm_check_target("", &self->dst, dst);
    if (result == 0) {
        result = cm_operand_init(self->state, &self->src, src, self->dst.dtype,
                                 self->stream, false);
        if (result == 0) {
            result = add_any(self, index);
            cm_operand_fini(&self->src);
        }
    }
    cm_operand_fini(&self->dst);
    return result;
}

static void
forget_quick_end(cm_operand *end)
{
    end->storage = NULL;
    Py_CLEAR(end->dtype);
    Py_CLEAR(end->keep);
}

static int
read_pair(many_pairs *self, PyObject *pair, uint64_t index)
{
    bool is_tuple = PyTuple_Check(pair);
    Py_ssize_t count = is_tuple             ? PyTuple_Size(pair)
                       : PyList_Check(pair) ? PyList_Size(pair)
                                            : -1;
    if (count != 2) {
        PyErr_Format(PyExc_TypeError,
                     "expected a tuple (dst, src), not %R of length %zd",
                     (PyObject *)Py_TYPE(pair), count);
        return -1;
    }
    PyObject *dst =
        Py_NewRef(is_tuple ? PyTuple_GetItem(pair, 0) : PyList_GetItem(pair, 0));
    PyObject *src =
        Py_NewRef(is_tuple ? PyTuple_GetItem(pair, 1) : PyList_GetItem(pair, 1));
    int result = try_usual(self, dst, src, index);
    forget_quick_end(&self->dst);
    forget_quick_end(&self->src);
    if (result == 0) {
        result = read_any(self, dst, src, index);
    }
    Py_DECREF(dst);
    Py_DECREF(src);
    return result < 0 ? -1 : 0;
}

/* -- what kind of memory arrays have, asked of the driver for all at once ----------------- */

static cm_piece_end *
end_of(many_pairs *self, const many_question *question)
{
    cm_piece *piece = &self->pieces[question->piece];
    return question->is_dst ? &piece->dst : &piece->src;
}

/* The kind of the end from those of its first and last byte; DEVICE: not the host's. */
static cm_status
ask_registry(cm_registry *registry, cm_page_shares *locked, cm_piece_end *end,
             uint64_t nbytes)
{
    cm_pointer_info first, last;
    CM_TRY(cm_registry_probe(registry, (uintptr_t)end->host, nbytes, locked, &first,
                             &last));
    if (cm_kind_is_on_device(first.kind) || cm_kind_is_on_device(last.kind)) {
        end->kind = CM_KIND_DEVICE;
    }
    else if (first.kind == last.kind && first.device == last.device
             && !cm_kind_is_pageable(first.kind)) {
        end->kind = first.kind;
        end->device = first.device;
        end->address = first.device_address;
    }
    return cm_ok();
}

static cm_status
ask_all(many_pairs *self, cm_registry *registry, cm_page_shares *locked)
{
    for (uint64_t i = 0; i < self->question_count; i++) {
        const many_question *question = &self->questions[i];
        CM_TRY(ask_registry(registry, locked, end_of(self, question),
                            self->pieces[question->piece].nbytes));
    }
    return cm_ok();
}

/* Until the engine has shares of its own. Takes them over. */
static int
keep_locked(many_pairs *self, cm_registry *registry, cm_page_shares *locked)
{
    PyObject *pages = cm_locked_pages_new(self->state, registry, locked);
    int result = pages == NULL ? -1 : PyList_Append(self->kept, pages);
    Py_XDECREF(pages);
    return result;
}

/* The last step of the reading. 0, or -1; *failed is the pair, if it is one. */
static int
ask_about_arrays(many_pairs *self, uint64_t *failed)
{
    cm_runtime *rt = cm_state_runtime(self->state);
    if (rt == NULL) {
        return -1;
    }
    int device = self->state->current_device;
    cm_registry *registry = self->state->registry;
    cm_page_shares locked = {.count = 0};
    cm_status status =
        CM_WITHOUT_GIL(CM_ON_ANY_DEVICE(rt, device, ask_all(self, registry, &locked)));
    if (locked.count > 0 && keep_locked(self, registry, &locked) < 0) {
        return -1;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while asking about arrays");
    }
    for (uint64_t i = 0; i < self->question_count; i++) {
        const cm_piece_end *end = end_of(self, &self->questions[i]);
        if (cm_kind_is_on_device(end->kind)) {
            *failed = self->pieces[self->questions[i].piece].index;
            PyErr_SetString(PyExc_ValueError, "array: the address is device memory, "
                                              "which the host may not touch");
            return -1;
        }
        if (!cm_kind_is_pageable(end->kind) && end->device >= 0) {
            self->any_devices |= UINT64_C(1) << end->device;
        }
    }
    return 0;
}

/* -- all ---------------------------------------------------------------------------------- */

/* The exception says which pair it was, as the package has it say. */
static void
name_pair(uint64_t index)
{
    cm_kept_error error = cm_error_keep();
    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    PyObject *named =
        cm_package_call("extension.texts", "name_pair",
                        Py_BuildValue("(OK)", error.value, (unsigned long long)index));
    PyErr_Clear(); /* the failure itself is what matters */
    cm_error_restore(error);
    if (named != NULL && named != error.value) {
        PyErr_SetObject((PyObject *)Py_TYPE(named), named); /* in its place */
    }
    Py_XDECREF(named);
}

/* Read all of `iterable`; the struct is all zero but for `state` and `stream`. 0, or -1
 * with an exception that names the pair; fini_pairs either way. */
static int
read_pairs(many_pairs *self, PyObject *iterable)
{
    self->call = ++self->state->many_count;
    self->first_device = -1;
    self->pairs = PySequence_Tuple(iterable);
    self->kept = PyList_New(0);
    if (self->pairs == NULL || self->kept == NULL) {
        return -1;
    }
    uint64_t count = (uint64_t)PyTuple_Size(self->pairs);
    self->pieces = PyMem_Malloc((size_t)(count + 1) * sizeof(*self->pieces));
    self->questions = PyMem_Malloc((size_t)(count + 1) * 2 * sizeof(*self->questions));
    if (self->pieces == NULL || self->questions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (read_pair(self, PyTuple_GetItem(self->pairs, (Py_ssize_t)i), i) < 0) {
            name_pair(i);
            return -1;
        }
    }
    uint64_t failed = UINT64_MAX;
    if (self->question_count > 0 && ask_about_arrays(self, &failed) < 0) {
        if (failed != UINT64_MAX) {
            name_pair(failed);
        }
        return -1;
    }
    return 0;
}

static void
fini_pairs(many_pairs *self)
{
    for (uint32_t i = 0; i < self->storage_count; i++) {
        cm_storage_unpin(self->storages[i].storage);
        cm_storage_release(self->storages[i].storage, true);
    }
    PyMem_Free(self->pieces);
    free(self->others);
    free(self->storages);
    PyMem_Free(self->questions);
    Py_XDECREF(self->pairs);
    Py_XDECREF(self->kept);
}

/* One call. */
typedef struct many_call {
    cm_call call;
    many_pairs pairs;
    cm_many_request request;
} many_call;

/* -- the call ----------------------------------------------------------------------------- */

static int
init_call(many_call *call, PyObject *iterable, cm_stream *given)
{
    many_pairs *pairs = &call->pairs;
    pairs->state = call->call.state;
    pairs->stream = given;
    if (cm_state_runtime(pairs->state) == NULL || read_pairs(pairs, iterable) < 0
        || cm_call_choose_stream(&call->call, "copy_many", given, pairs->devices,
                                 pairs->first_device)
               < 0) {
        return -1;
    }
    for (size_t i = 0; i < pairs->storage_count; i++) {
        const many_storage *entry = &pairs->storages[i];
        cm_extent all = CM_EXTENT_ALL(entry->written);
        if (cm_call_come_after(&call->call, entry->storage, all) < 0
            || cm_call_keep_storage(&call->call, entry->storage) < 0) {
            return -1;
        }
    }
    if (PyList_Size(pairs->kept) > 0
        && cm_call_keep_object(&call->call, pairs->kept) < 0) {
        return -1;
    }
    cm_many_request *request = &call->request;
    request->pieces = pairs->pieces;
    request->piece_count = pairs->piece_count;
    request->others = pairs->others;
    request->other_count = pairs->other_count;
    return 0;
}

/* One that does waits for what came first, and with it the whole. */
static bool
moves_bytes(const many_pairs *pairs)
{
    for (uint64_t i = 0; i < pairs->piece_count; i++) {
        const cm_piece *piece = &pairs->pieces[i];
        if (piece->dst.host != piece->src.host
            || piece->dst.address != piece->src.address) {
            return true;
        }
    }
    for (uint32_t i = 0; i < pairs->other_count; i++) {
        if (cm_call_moves_bytes(&pairs->others[i].dst, &pairs->others[i].src)) {
            return true;
        }
    }
    return false;
}

static cm_status
run_call(many_call *call, cm_engine *engine, cm_ticket **ticket)
{
    cm_copy_request *common = &call->request.common;
    /* to begin many takes long enough to be interrupted, in the background too */
    common->interrupted = cm_call_is_interrupted;
    call->call.moves_bytes = moves_bytes(&call->pairs); /* the engine sorts them */
    cm_call_let_go(&call->call);
    cm_status status = cm_engine_copy_many(engine, &call->request, ticket);
    cm_call_take_back(&call->call);
    return status;
}

/* Of a call that failed some copies may be in a graph: nobody knows which. */
static void
mark_if_capturing(const many_call *call)
{
    bool capturing;
    cm_status status = cm_call_ask_capturing(call->call.stream, &capturing);
    if (capturing || !cm_is_ok(status)) {
        cm_call_mark_captured(&call->call);
    }
}

/* What a failed call has left under way comes before what uses the same memory next. */
static void
remember_rest(many_call *call, cm_ticket *ticket)
{
    cm_kept_error error = cm_error_keep();
    if (cm_call_remember(&call->call, ticket) == 0) {
        cm_ticket_release(ticket);
    }
    PyErr_Clear();
    cm_error_restore(error);
}

static PyObject *
run(many_call *call)
{
    cm_state *state = call->call.state;
    cm_ticket *ticket = NULL;
    cm_engine *engine = cm_call_engine(state, call->pairs.any_devices);
    if (engine == NULL || cm_call_prepare(&call->call, &call->request.common) < 0) {
        return NULL;
    }
    cm_status status = run_call(call, engine, &ticket);
    if (!cm_is_ok(status)) {
        mark_if_capturing(call);
    }
    if (ticket != NULL && (PyErr_Occurred() || !cm_is_ok(status))) {
        remember_rest(call, ticket);
    }
    if (PyErr_Occurred()) {
        return NULL; /* Ctrl-C, even where the copies were done at the same time */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while copying many pairs");
    }
    call->call.is_ordered = true;
    if (call->call.blocking) {
        return cm_call_tell_end(&call->call, ticket);
    }
    return cm_call_remember(&call->call, ticket) < 0
               ? NULL
               : cm_transfer_object_new(state, ticket, call->pairs.pairs,
                                        call->pairs.pairs);
}

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    static const char *const names[] = {"pairs", "stream", "progress", NULL};
    static const char *const async_names[] = {"pairs", "stream", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[3] = {NULL, NULL, NULL};
    if (cm_args_parse(function, args, nargs, kwnames, blocking ? names : async_names, 1,
                      1, values)
        < 0) {
        return NULL;
    }
    many_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    cm_call_frame frame;
    PyObject *result = NULL;
    if (cm_call_enter(&frame, state, values[1], cm_device_hint(state, values[0], 2),
                      values[2], "copy")
        == 0) {
        call->call = (cm_call){.state = state,
                               .blocking = blocking,
                               .has_ticket = true,
                               .progress = &frame.progress};
        result = init_call(call, values[0], frame.stream) < 0 ? NULL : run(call);
        cm_call_fini(&call->call);
        fini_pairs(&call->pairs);
    }
    PyMem_Free(call);
    return cm_call_leave(&frame, result);
}

static PyObject *
copy_many_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    return copy_with(module, "copy_many", args, nargs, kwnames, true);
}

static PyObject *
copy_many_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    return copy_with(module, "copy_many_async", args, nargs, kwnames, false);
}

PyMethodDef cm_copy_many_methods[] = {
    {"copy_many", CM_METHOD(copy_many_function), CM_KEYWORDS, CM_DOC_copy_many},
    {"copy_many_async", CM_METHOD(copy_many_async_function), CM_KEYWORDS,
     CM_DOC_copy_many_async},
    {NULL, NULL, 0, NULL},
};
