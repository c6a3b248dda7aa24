/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/many.h"

#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/buffer/memory_watch.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/pool/allocate.h"
#include "transfer/routes/kernel_rows.h"

int
cm_many_call_init(cm_many_call *self, cm_state *state, bool blocking, cm_stream *stream,
                  const cm_progress *progress)
{
    self->call = (cm_call){
        .state = state, .blocking = blocking, .has_ticket = true, .progress = progress};
    self->state = state;
    self->stream = stream;
    self->number = ++state->many_count;
    self->first_device = -1;
    self->owners = PyList_New(0);
    return self->owners == NULL ? -1 : 0;
}

/* -- ends --------------------------------------------------------------------------- */

/* Add the storage of an end, once for all ends that lie in it. Returns 0, or -1 with an
 * exception. */
static int
add_storage(cm_many_call *self, cm_storage *storage, bool written)
{
    if (storage->many_call != self->number) {
        if (cm_reserve(&self->storages, sizeof(*self->storages), self->first_storages,
                       CM_MANY_STORAGES, self->storage_count, &self->storage_room)
            < 0) {
            return -1;
        }
        cm_storage_hold(storage);
        cm_storage_keep_open(storage);
        storage->many_call = self->number;
        storage->many_index = self->storage_count;
        self->storages[self->storage_count++] = (cm_many_storage){.storage = storage};
    }
    cm_many_storage *entry = &self->storages[storage->many_index];
    entry->written = entry->written || written;
    return 0;
}

/* Keep the memory of an end alive. Returns 0, or -1 with an exception. */
static int
keep_end(cm_many_call *self, const cm_operand *end, bool written)
{
    if (end->locked != NULL && PyList_Append(self->owners, end->locked) < 0) {
        return -1;
    }
    if (end->storage != NULL) {
        return add_storage(self, end->storage, written);
    }
    PyObject *under =
        self->call.blocking ? NULL : cm_memory_under(self->state, end->keep);
    int result = under == NULL ? 0 : PyList_Append(self->owners, under);
    Py_XDECREF(under);
    return result < 0 ? -1 : PyList_Append(self->owners, end->keep);
}

static void
note_device(cm_many_call *self, const cm_region *region)
{
    uint64_t device = cm_devices_of(region);
    self->any_devices |= device;
    if (device != 0 && cm_kind_is_on_device(region->kind)) {
        self->devices |= device;
        self->first_device =
            self->first_device < 0 ? region->device : self->first_device;
    }
}

int
cm_many_call_add_end(cm_many_call *self, const cm_operand *end, const cm_region *region,
                     bool written)
{
    note_device(self, region);
    return keep_end(self, end, written);
}

int
cm_many_call_take_ends(cm_many_call *self, const char *function)
{
    if (cm_call_choose_stream(&self->call, function, self->stream, self->devices,
                              self->first_device)
        < 0) {
        return -1;
    }
    for (uint32_t i = 0; i < self->storage_count; i++) {
        const cm_many_storage *entry = &self->storages[i];
        cm_extent all = CM_EXTENT_ALL(entry->written);
        if (cm_call_come_after(&self->call, entry->storage, all) < 0
            || cm_call_keep_storage(&self->call, entry->storage) < 0) {
            return -1;
        }
    }
    if (PyList_Size(self->owners) == 0) {
        return 0;
    }
    return cm_call_keep_object(&self->call, self->owners);
}

void
cm_many_call_fini(cm_many_call *self)
{
    cm_call_fini(&self->call);
    for (uint32_t i = 0; i < self->storage_count; i++) {
        cm_storage_allow_close(self->storages[i].storage);
        cm_storage_release(self->storages[i].storage, true);
    }
    cm_many_destroy(self->request.common.many);
    if (self->request.common.rows != NULL) {
        cm_kernel_rows_destroy(self->request.common.rows);
    }
    if (self->storages != self->first_storages) {
        free(self->storages);
    }
    Py_XDECREF(self->owners);
}

/* -- the call ----------------------------------------------------------------------- */

/* True if any run moves bytes. Such a run waits for the work that comes before it, and
 * so does the whole batch. */
static bool
moves_bytes(const cm_many_request *request)
{
    if (request->common.rows != NULL) { /* targets and sources of rows never overlap */
        return request->common.rows->layer_count > 0;
    }
    if (request->common.many != NULL) { /* nor do those of such runs, of which there is
                                           at least one */
        return true;
    }
    for (uint64_t i = 0; i < request->piece_count; i++) {
        const cm_piece *piece = &request->pieces[i];
        if (piece->dst.host != piece->src.host
            || piece->dst.address != piece->src.address) {
            return true;
        }
    }
    for (uint64_t i = 0; i < request->other_count; i++) {
        if (cm_call_moves_bytes(&request->others[i].dst, &request->others[i].src)) {
            return true;
        }
    }
    return false;
}

/* After a failed call on a stream that captures, some copies may be in the graph, and
 * nobody knows which. So all storages count as captured. */
static void
mark_if_capturing(const cm_call *call)
{
    bool capturing;
    cm_status status = cm_call_ask_capturing(call->stream, &capturing);
    if (capturing || !cm_is_ok(status)) {
        cm_call_mark_captured(call);
    }
}

/* Remember what a failed call has left under way, so that the next use of the memory
 * comes after it. */
static void
remember_rest(cm_call *call, cm_ticket *ticket)
{
    cm_kept_error error = cm_error_keep();
    if (cm_call_remember(call, ticket) == 0) {
        cm_ticket_release(ticket);
    }
    PyErr_Clear();
    cm_error_restore(error);
}

int
cm_many_call_run(cm_many_call *self, const char *doing, cm_ticket **out)
{
    cm_call *call = &self->call;
    cm_ticket *ticket = NULL;
    cm_engine *engine = cm_call_engine(self->state, self->any_devices);
    if (engine == NULL || cm_call_prepare(call, &self->request.common) < 0) {
        return -1;
    }
    /* Beginning many copies may take so long that Ctrl-C has to be able to end it, even
     * if they are made in the background. */
    self->request.common.interrupted = cm_call_is_interrupted;
    call->moves_bytes = moves_bytes(&self->request); /* before the engine sorts them */
    cm_copy_request *common = &self->request.common;
    bool is_one_job = common->rows != NULL || common->many != NULL;
    cm_call_let_go(call);
    cm_status status = is_one_job
                           ? cm_engine_copy(engine, common, &ticket)
                           : cm_engine_copy_many(engine, &self->request, &ticket);
    common->rows = NULL; /* the engine owns them now */
    common->many = NULL;
    cm_call_take_back(call);
    if (!cm_is_ok(status)) {
        mark_if_capturing(call);
    }
    if (ticket != NULL && (PyErr_Occurred() || !cm_is_ok(status))) {
        remember_rest(call, ticket);
    }
    if (PyErr_Occurred()) {
        return -1; /* a signal handler or the progress bar has raised, even if all
                      copies have ended */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, doing);
    }
    call->is_ordered = true;
    *out = ticket;
    return 0;
}

PyObject *
cm_many_call_answer(cm_many_call *self, cm_ticket *ticket, PyObject *dst, PyObject *src)
{
    if (self->call.blocking) {
        return cm_call_report_end(&self->call, ticket);
    }
    if (cm_call_remember(&self->call, ticket) < 0) {
        return NULL;
    }
    return cm_call_handle(&self->call, ticket, dst, src, self->first_device);
}

/* -- memory that a kernel reads ----------------------------------------------------- */

PyObject *
cm_many_allocate_mapped(cm_state *state, int device, char letter, uint64_t count,
                        cm_region *out)
{
    cm_region layout = {.ndim = 1, .shape = {(int64_t)count}};
    PyObject *dtype = cm_numpy_dtype_of_letter(letter);
    if (dtype == NULL) {
        return NULL;
    }
    PyObject *buffer =
        cm_buffer_allocate_kind(state, CM_KIND_MAPPED, cm_kinds[CM_KIND_MAPPED].flags,
                                device, dtype, &layout, 'C');
    Py_DECREF(dtype);
    if (buffer != NULL) {
        cm_buffer_region((cm_buffer *)(void *)buffer, out);
    }
    return buffer;
}

PyObject *
cm_many_allocate_sheet(cm_state *state, int device, cm_kernel_numbers numbers[2],
                       cm_address addresses[2], cm_region *out)
{
    enum {
        ALIGNMENT = 128
    }; /* the numbers of each side begin at a line of the caches */
    uint64_t begin[2];
    uint64_t nbytes = 0;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        begin[side] = nbytes;
        nbytes += numbers[side].count * numbers[side].nbytes + ALIGNMENT - 1;
        nbytes -= nbytes % ALIGNMENT;
    }
    PyObject *sheet = cm_many_allocate_mapped(state, device, 'B', nbytes, out);
    for (int side = CM_DST; sheet != NULL && side <= CM_SRC; side++) {
        if (numbers[side].nbytes > 0) {
            numbers[side].at = (char *)out->host + begin[side];
            addresses[side] = out->address + begin[side];
        }
    }
    return sheet;
}
