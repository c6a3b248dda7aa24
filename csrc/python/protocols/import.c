/* SPDX-License-Identifier: Apache-2.0 */
#include "python/protocols/import.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/protocols.h"

/* -- checks ------------------------------------------------------------------------------- */

static int
refuse(const char *what, const char *why)
{
    PyErr_Format(PyExc_ValueError, "%s: %s", what, why);
    return -1;
}

int
cm_import_measure(cm_import *import, const char *what)
{
    int64_t count;
    int64_t high;
    int64_t payload;
    import->first = 0;
    import->nbytes = 0;
    import->low = 0;
    if (!cm_is_ok(cm_region_count(&import->region, &count))
        || !cm_mul_i64(count, import->region.itemsize, &payload)) {
        return refuse(what, "the number of bytes does not fit in 63 bits");
    }
    if (count == 0) {
        return 0;
    }
    if (!cm_is_ok(cm_region_bounds(&import->region, &import->low, &high))) {
        return refuse(what, "shape and strides reach further than 63 bits");
    }
    if (import->data == 0) {
        return refuse(what, "the data pointer is NULL, but the shape has elements");
    }
    uint64_t below = 0 - (uint64_t)import->low; /* low <= 0 */
    uint64_t end;
    if (import->data <= below || !cm_add_u64(import->data, (uint64_t)high, &end)) {
        return refuse(what, "data pointer, shape and strides leave the address space");
    }
    import->first = import->data - below;
    if (end - import->first > INT64_MAX) {
        return refuse(what, "shape and strides reach further than 63 bits");
    }
    import->nbytes = end - import->first;
    return 0;
}

/* -- pages that stay locked --------------------------------------------------------------- */

static const char locked_name[] = "cumem.locked_pages";

typedef struct locked_pages {
    cm_state *state;
    PyObject *type;        /* owned: keeps the state */
    cm_registry *registry; /* the shares keep it alive */
    cm_page_shares shares;
} locked_pages;

/* Give the shares back, with the GIL released, since the last share unlocks the pages.
 * If the registry's runtime has been shut down, or is being shut down, there is nothing
 * to unlock. */
static void
give_back(cm_state *state, cm_registry *registry, cm_page_shares *shares)
{
    if (shares->count > 0 && state->registry != registry) {
        cm_registry_abandon(registry, shares);
    }
    else if (shares->count > 0) {
        cm_state_enter(state);
        Py_BEGIN_ALLOW_THREADS
        cm_registry_unshare(registry, shares);
        Py_END_ALLOW_THREADS
        cm_state_leave(state);
    }
}

static void
locked_pages_destroy(PyObject *capsule)
{
    locked_pages *self = PyCapsule_GetPointer(capsule, locked_name);
    /* The code that drops the capsule may have set an exception, which is kept. */
    cm_kept_error kept = cm_error_keep();
    give_back(self->state, self->registry, &self->shares);
    Py_DECREF(self->type);
    free(self);
    cm_error_restore(kept);
}

PyObject *
cm_locked_pages_new(cm_state *state, cm_registry *registry, cm_page_shares *shares)
{
    locked_pages *self = malloc(sizeof(*self));
    PyObject *capsule = NULL;
    if (self == NULL) {
        PyErr_NoMemory();
    }
    else {
        *self =
            (locked_pages){state, (PyObject *)state->buffer_type, registry, *shares};
        capsule = PyCapsule_New(self, locked_name, locked_pages_destroy);
    }
    if (capsule == NULL) {
        free(self);
        give_back(state, registry, shares);
    }
    else {
        Py_INCREF(self->type);
    }
    *shares = (cm_page_shares){.count = 0};
    return capsule;
}

/* True if all bytes lie in memory that the emulated device knows. With a real driver
 * this is always true, since there the hardware faults on any other address. */
static bool
is_inside_emulated(const cm_runtime *rt, const cm_import *import)
{
    return rt->host_alias == NULL
           || cm_runtime_host_alias(rt, import->first, import->nbytes) != NULL;
}

/* Set *out to whether the memory is certainly ordinary, so that the driver need not be
 * asked. Host memory is ordinary as long as no context exists that could have
 * page-locked it, and no context should be created only to ask. The driver always has
 * to be asked about an address of a device. */
static cm_status
is_surely_ordinary(cm_runtime *rt, const cm_import *import, bool *out)
{
    bool may_be_locked = true;
    cm_status status =
        import->host ? cm_host_may_be_locked(rt, &may_be_locked) : cm_ok();
    *out = !may_be_locked;
    return status;
}

/* Do the work of cm_import_probe(). The open runtime is `rt`, and it stays open because
 * the caller has entered the state. */
static int
probe(cm_state *state, cm_runtime *rt, cm_import *import, const char *what,
      cm_pointer_info *info)
{
    cm_registry *registry = state->registry;
    cm_page_shares shares = {.count = 0};
    cm_pointer_info last;
    /* No driver is in use, so none has locked memory. */
    if (!cm_runtime_wake_if_started(rt)) {
        *info = (cm_pointer_info){CM_KIND_PAGEABLE, -1, 0, NULL};
        return 0;
    }
    bool is_ordinary;
    cm_status status = is_surely_ordinary(rt, import, &is_ordinary);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while asking about a foreign pointer");
    }
    if (is_ordinary) {
        *info = (cm_pointer_info){CM_KIND_PAGEABLE, -1, 0, NULL};
        return 0;
    }
    int device = cm_state_device(state); /* this needs the GIL */
    /* The GIL is kept while the driver is asked, unless that may take long. If we gave
     * the GIL up, a thread that is busy with Python code could keep it for longer than
     * the driver takes to answer. */
    bool waits = state->context_count == 0 || cm_registry_is_busy(registry);
    PyThreadState *thread = waits ? cm_gil_give() : NULL;
    /* The driver knows no pointers on a thread without a context. */
    status = CM_ON_ANY_DEVICE(rt, device,
                              cm_registry_probe(registry, import->first, import->nbytes,
                                                &shares, info, &last));
    if (thread != NULL) {
        cm_gil_take(thread);
    }
    bool same =
        cm_is_ok(status) && info->kind == last.kind && info->device == last.device;
    bool keeps = same && !cm_kind_is_pageable(info->kind) && shares.count > 0;
    if (keeps) {
        import->locked = cm_locked_pages_new(state, registry, &shares);
    }
    else {
        give_back(state, registry, &shares);
    }
    if (keeps && import->locked == NULL) {
        return -1;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while asking about a foreign pointer");
    }
    if (import->host) { /* its exporter says that it is the host's */
        if (cm_kind_is_on_device(info->kind) || cm_kind_is_on_device(last.kind)) {
            return refuse(what,
                          "the address is device memory, which the host may not touch");
        }
        if (!same) {
            *info = (cm_pointer_info){CM_KIND_PAGEABLE, -1, 0, NULL};
        }
        return 0;
    }
    if (!same) {
        return refuse(what, "the first and the last byte are not in one allocation");
    }
    if (!cm_kind_is_pageable(info->kind) && !is_inside_emulated(rt, import)) {
        return refuse(what, "the bytes are not all inside one allocation");
    }
    return 0;
}

int
cm_import_probe(cm_state *state, cm_import *import, const char *what,
                cm_pointer_info *info)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return -1;
    }
    cm_state_enter(state); /* since reading the current device may run Python code */
    int result = probe(state, rt, import, what, info);
    cm_state_leave(state);
    return result;
}

/* Turn an address of the lowest byte into that of element 0. */
static uint64_t
element_zero(const cm_import *import, uint64_t first)
{
    return first == 0 ? 0 : first + (0 - (uint64_t)import->low);
}

void
cm_import_place(cm_import *import, const cm_pointer_info *info, int device)
{
    cm_region *region = &import->region;
    region->host = NULL;
    region->address = 0;
    region->kind = import->kind;
    region->device = device;
    if (import->nbytes == 0) {
        return;
    }
    if (info == NULL || cm_kind_is_pageable(info->kind)) {
        region->host = (void *)(uintptr_t)import->data;
        region->kind = CM_KIND_PAGEABLE;
        return;
    }
    region->kind = info->kind;
    region->device = info->device < 0 ? device : info->device;
    /* If the current device does not reach the memory of another, the driver gives no
     * address. */
    region->address =
        element_zero(import, cm_kind_is_on_device(info->kind) ? import->first
                                                              : info->device_address);
    if (import->host) {
        /* The host's address is the exporter's; a device may reach the bytes by another
         * one. */
        region->host = (void *)(uintptr_t)import->data;
    }
    else if (!cm_kind_is_on_device(info->kind)) {
        region->host = (void *)(uintptr_t)element_zero(
            import, (uint64_t)(uintptr_t)info->host_address);
    }
}

/* -- order -------------------------------------------------------------------------------- */

int
cm_import_follow(cm_state *state, cm_stream *stream, int device, uint64_t handle)
{
    cm_stream *theirs;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_wrap(stream->rt, device, handle == 0 ? CM_STREAM_LEGACY : handle,
                            NULL, NULL, &theirs);
    if (cm_is_ok(status)) {
        status = cm_stream_follow(stream, theirs);
        cm_stream_release(theirs);
    }
    Py_END_ALLOW_THREADS
    return cm_py_check(state, status, "while waiting for the exporter's stream");
}

int
cm_import_order(cm_state *state, PyObject *buffer, cm_stream *given, int device,
                uint64_t handle)
{
    cm_storage *storage = ((cm_buffer *)(void *)buffer)->storage;
    cm_stream *stream = given != NULL
                            ? cm_stream_take(state, given)
                            : cm_stream_from_object(state, Py_None, storage->device);
    if (stream == NULL) {
        return -1;
    }
    int result = cm_stream_is_handle(stream, device, handle)
                     ? 0
                     : cm_import_follow(state, stream, device, handle);
    if (result == 0) {
        result = cm_storage_add_lasting_use(storage, stream);
    }
    cm_stream_give(state, stream);
    return result;
}

/* -- the buffer --------------------------------------------------------------------------- */

PyObject *
cm_import_finish(cm_state *state, const cm_import *import)
{
    const cm_region *region = &import->region;
    int device = region->device < 0 ? 0 : region->device;
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    cm_storage *storage = cm_storage_new(state, import->kind, device);
    if (storage == NULL) {
        return NULL;
    }
    PyObject *kept =
        import->locked != NULL && import->foreign != NULL
            ? PyTuple_Pack(2, import->foreign, import->locked)
            : Py_XNewRef(import->locked != NULL ? import->locked : import->foreign);
    if (kept == NULL && import->locked != NULL) {
        cm_storage_release(storage, true);
        return NULL;
    }
    uint64_t below = 0 - (uint64_t)import->low;
    storage->copy_kind = region->kind;
    storage->nbytes = import->nbytes;
    storage->readonly = import->readonly;
    storage->is_file = region->is_file;
    if (region->host != NULL) {
        storage->host = (char *)region->host - below;
    }
    if (region->address != 0) {
        storage->address = region->address - below;
    }
    PyObject *buffer = cm_buffer_new(
        state, state->buffer_types[import->kind], storage, -import->low, import->dtype,
        region->ndim, region->shape, region->strides, import->readonly, NULL);
    if (buffer != NULL) {
        storage->foreign = Py_XNewRef(kept);
        storage->holds_locked_pages = import->locked != NULL;
        storage->foreign_drop = import->drop;
        storage->foreign_argument = import->argument;
    }
    cm_storage_release(storage, true);
    Py_XDECREF(kept);
    return buffer;
}

/* -- NumPy arrays ------------------------------------------------------------------------- */

int
cm_import_ask_about(cm_state *state, PyObject *array, const cm_region *region,
                    uint64_t unasked, cm_import *out)
{
    static const char what[] = "array";
    cm_pointer_info info = {.kind = CM_KIND_PAGEABLE};
    *out = (cm_import){.region = *region,
                       .kind = CM_KIND_PAGEABLE,
                       .data = (uint64_t)(uintptr_t)region->host,
                       .host = true,
                       .foreign = array};
    if (cm_import_measure(out, what) < 0) {
        return -1;
    }
    bool asks = out->nbytes > unasked;
    if (asks && cm_import_probe(state, out, what, &info) < 0) {
        Py_CLEAR(out->locked);
        return -1;
    }
    out->kind = info.kind;
    cm_import_place(out, asks ? &info : NULL, -1);
    return 0;
}

PyObject *
cm_import_array(cm_state *state, PyObject *array)
{
    cm_region region;
    cm_import import;
    PyObject *dtype;
    PyObject *buffer = NULL;
    bool readonly;
    if (cm_numpy_region(array, &region, &dtype, &readonly) < 0) {
        return NULL;
    }
    if (cm_import_ask_about(state, array, &region, 0, &import) == 0) {
        import.dtype = dtype;
        import.readonly = readonly;
        buffer = cm_import_finish(state, &import);
        Py_XDECREF(import.locked);
    }
    Py_DECREF(dtype);
    return buffer;
}
