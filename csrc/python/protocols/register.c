/* SPDX-License-Identifier: Apache-2.0 */
/* Page-locks memory that somebody else made, for register(), and unlocks it at the end
 * of the Registration. */
#include "python/buffer/memory_watch.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/limits.h"
#include "python/pool/pool_object.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

/* This is the `foreign_drop` of a storage over another storage's memory. */
static void
drop_storage(void *argument)
{
    cm_storage_end_export(argument);
    cm_storage_release(argument, true);
}

/* Let `storage` keep `object`, one of our buffers or an array, and describe its memory.
 * The caller owns bytes->dtype. Returns 0, or -1 with an exception. */
static int
keep_memory(cm_state *state, PyObject *object, cm_storage *storage, cm_import *bytes)
{
    cm_region *region = &bytes->region;
    if (!cm_buffer_check(state, object)) {
        storage->foreign = Py_NewRef(object);
        if (cm_check_unmasked(object) < 0 || cm_memory_keep(storage, object) < 0) {
            return -1;
        }
        return cm_numpy_region(object, region, &bytes->dtype, &bytes->readonly);
    }
    cm_buffer *buffer = (cm_buffer *)(void *)object;
    if (cm_buffer_check_open(buffer) < 0) {
        return -1;
    }
    cm_buffer_region(buffer, region);
    bytes->dtype = Py_NewRef(buffer->dtype);
    cm_memory_share(storage, buffer->storage);
    storage->foreign_drop = drop_storage;
    storage->foreign_argument = cm_storage_hold(buffer->storage);
    /* While this export is counted, free() of that buffer refuses. */
    cm_storage_begin_export(buffer->storage);
    return 0;
}

/* Raise the reason why mapping the memory failed, since the driver's own error does not
 * name it. */
static int
refuse_mapping(cm_state *state, const cm_storage *storage, cm_status status)
{
    unsigned long long offset = status.arg - (uint64_t)(uintptr_t)storage->host;
    return cm_package_refuse("pools.registering", "refuse_mapping",
                             Py_BuildValue("(NiK)",
                                           cm_py_exception_new(state, status, NULL),
                                           status.code == CM_ENOTSUP, offset));
}

/* Lock the pages. If a limit or the driver has no room for them, the pools of
 * page-locked memory first give back the memory that they keep for reuse, and the pages
 * are tried again. */
static cm_status
lock_with_room(cm_state *state, const cm_storage *storage, bool read_only,
               cm_registration **out)
{
    cm_registry *registry = state->registry;
    cm_status status = CM_WITHOUT_GIL(cm_registry_register(
        registry, storage->device, storage->host, storage->nbytes, read_only, out));
    for (int kind = 0; kind < CM_KIND_COUNT && cm_pool_is_short(status); kind++) {
        cm_trim_request r = {.kind = (cm_kind)kind, .device = -1};
        if (!cm_kind_is_page_locked((cm_kind)kind)) {
            continue;
        }
        if (cm_state_trim(state, &r, true) < 0) {
            return cm_fail(CM_ECANCELLED, 0);
        }
        if (r.released_nbytes > 0) {
            status = CM_WITHOUT_GIL(cm_registry_register(registry, storage->device,
                                                         storage->host, storage->nbytes,
                                                         read_only, out));
        }
    }
    return status;
}

/* Raise the failure to lock pages. If there was no room for them, or the system does
 * not lock pages, the package adds the request and advice. */
static int
refuse_locking(cm_state *state, const cm_storage *storage, cm_status status)
{
    if (!cm_pool_is_short(status) && status.code != CM_CUDA_NOT_SUPPORTED) {
        return cm_py_raise_int(state, status, "while registering host memory");
    }
    const cm_budget *budget = cm_limits_budget(state, CM_KIND_PINNED, 0);
    return cm_package_refuse(
        "pools.out_of_memory", "refuse_locking",
        Py_BuildValue(
            "(NsiKN)",
            cm_py_exception_new(state, status, "while registering host memory"),
            cm_kinds[storage->kind].text, storage->device,
            (unsigned long long)storage->nbytes, cm_limits_list(budget)));
}

/* True if the pages are locked, but devices cannot reach all of them by one address. */
static bool
has_no_address(cm_status status)
{
    return status.code == CM_ENOTSUP || status.code == CM_CUDA_INVALID_VALUE;
}

int
cm_storage_lock_pages(cm_state *state, cm_storage *storage, int device)
{
    cm_registration *registration = NULL;
    cm_address address = 0;
    if (cm_state_runtime(state) == NULL) {
        return -1;
    }
    storage->device = device;
    cm_status status = lock_with_room(state, storage, false, &registration);
    if (status.code == CM_ECANCELLED) {
        return -1; /* a signal's handler has raised */
    }
    if (!cm_is_ok(status)) {
        return refuse_locking(state, storage, status);
    }
    status = CM_WITHOUT_GIL(cm_registration_device_address(registration, &address));
    if (has_no_address(status)) {
        status = cm_ok(); /* copies need no address */
        address = 0;
    }
    if (!cm_is_ok(status) || !storage->locks_late) { /* another thread was first */
        cm_status released = CM_WITHOUT_GIL(cm_registration_release(registration));
        return cm_py_check(state, cm_first_failure(status, released),
                           "while registering host memory");
    }
    storage->registration = registration;
    storage->address = address;
    storage->copy_kind = CM_KIND_PINNED;
    storage->locks_late = false;
    cm_storage_note_registered(storage, CM_EVENT_ALLOCATE);
    return 0;
}

/* Lock the memory that `bytes` describes, and fill in `storage`. */
static int
lock_pages(cm_state *state, cm_storage *storage, const cm_import *bytes,
           bool lock_read_only, bool mapped)
{
    storage->host = (void *)(uintptr_t)bytes->first;
    storage->nbytes = bytes->nbytes;
    storage->flags = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED;
    cm_registration *registration = NULL;
    cm_address address = 0;
    cm_status status = lock_with_room(state, storage, lock_read_only, &registration);
    if (status.code == CM_ECANCELLED) {
        return -1; /* a signal's handler has raised */
    }
    if (cm_is_ok(status)) {
        status = CM_WITHOUT_GIL(cm_registration_device_address(registration, &address));
    }
    storage->registration = registration; /* the storage owns it */
    if (registration != NULL) {
        cm_storage_note_registered(storage, CM_EVENT_ALLOCATE);
    }
    if (registration != NULL && cm_registration_is_read_only(registration)) {
        storage->flags |= CM_REGISTER_READ_ONLY;
    }
    if (registration != NULL && has_no_address(status)) {
        if (mapped) {
            return refuse_mapping(state, storage, status);
        }
        /* Other code has locked it without mapping it. Copies need no device
         * address. */
        status = cm_ok();
        address = 0;
    }
    if (!cm_is_ok(status)) {
        return refuse_locking(state, storage, status);
    }
    storage->address = address;
    return 0;
}

PyObject *
cm_register_memory(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *object;
    int device, mapped, read_only, lock_read_only;
    if (!PyArg_ParseTuple(args, "Oippp:_register", &object, &device, &mapped,
                          &read_only, &lock_read_only)
        || cm_arg_check_range(device, "device", 0, CM_MAX_DEVICES) < 0
        || cm_state_runtime(state) == NULL) {
        return NULL;
    }
    if (!cm_buffer_check(state, object) && !cm_numpy_is_array(object)) {
        (void)cm_arg_refuse(object, "memory", "a Buffer or an array");
        return NULL;
    }
    cm_storage *storage =
        cm_storage_new(state, mapped ? CM_KIND_MAPPED : CM_KIND_PINNED, device);
    if (storage == NULL) {
        return NULL;
    }
    cm_import bytes = {.dtype = NULL};
    cm_region *region = &bytes.region;
    PyObject *buffer = NULL;
    storage->readonly = read_only;
    cm_state_enter(state);
    if (keep_memory(state, object, storage, &bytes) == 0) {
        bytes.data = (uint64_t)(uintptr_t)region->host;
        if (cm_import_measure(&bytes, "obj") == 0
            && (bytes.nbytes == 0
                || (lock_pages(state, storage, &bytes, lock_read_only, mapped) == 0
                    && cm_memory_watch(storage) == 0))) {
            buffer = cm_buffer_new(state, state->buffer_types[storage->kind], storage,
                                   -bytes.low, bytes.dtype, region->ndim, region->shape,
                                   region->strides, read_only, NULL);
        }
    }
    Py_XDECREF(bytes.dtype);
    cm_storage_release(storage, true);
    cm_state_leave(state);
    if (buffer == NULL) {
        return NULL;
    }
    PyObject *members[CM_LockedPages_COUNT] = {
        [CM_LockedPages_buffer] = buffer,
        [CM_LockedPages_nbytes] = PyLong_FromUnsignedLongLong(bytes.nbytes),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_LockedPages, members);
}

/* -- the end of a registration ------------------------------------------------------- */

/* Wait until only buffers use the memory. The GIL is released in between. Returns 0, or
 * -1 with BufferError, the failure of a transfer, or what a signal handler raised. */
static int
wait_until_unused(cm_storage *storage)
{
    static const char what[] = "unregister memory";
    do {
        if (cm_storage_check_not_exported(storage, what) < 0
            || cm_storage_wait(storage, true) < 0
            || cm_storage_wait_transfers(storage) < 0
            || cm_storage_check_not_exported(storage, what) < 0) {
            return -1;
        }
    } while (storage->state->engine != NULL && cm_storage_is_in_transfer(storage));
    return 0;
}

PyObject *
cm_unregister_memory(PyObject *module, PyObject *args)
{
    PyObject *object;
    int defers;
    if (!PyArg_ParseTuple(args, "O!p:_unregister",
                          cm_state_of_module(module)->buffer_type, &object, &defers)) {
        return NULL;
    }
    cm_buffer *buffer = (cm_buffer *)(void *)object;
    cm_storage *storage = cm_storage_hold(buffer->storage);
    /* free() may have closed the storage and left the pages locked for a transfer. */
    bool open = !storage->closed || storage->registration != NULL;
    int result = 0;
    if (!open) {
        result = cm_storage_wait_transfers(storage);
    }
    else if (defers != 0 && cm_storage_count_exports(storage) > 0) {
        buffer->with_ended = true;
        cm_storage_retire(storage);
    }
    else if ((result = wait_until_unused(storage)) == 0
             && !cm_storage_is_in_transfer(storage)) {
        result = cm_storage_unlock(storage);
    }
    cm_storage_release(storage, true);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}
