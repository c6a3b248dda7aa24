/* SPDX-License-Identifier: Apache-2.0 */
/* Makes, counts and closes storages, and gives their memory back. Exports, calls and
 * transfers delay that until they end. */
#include "python/buffer/storage.h"

#include <stdlib.h>
#include <string.h>

#include "python/buffer/memory_watch.h"
#include "python/core/errors.h"
#include "runtime/scope.h"

/* -- making -------------------------------------------------------------------------- */

static void end_deferred(cm_deferred *deferred);

static void
free_struct(cm_storage *storage)
{
    free(storage);
}

void
cm_storage_init(cm_storage *storage, cm_state *state, cm_kind kind, int device,
                bool fresh)
{
    CM_NEEDS_GIL();
    if (fresh) { /* members that stay the same when the struct is used again */
        memset(storage, 0, sizeof(*storage));
        atomic_init(&storage->refs, 1);
        storage->state = state;
        cm_list_init(&storage->deferred.node);
        storage->deferred.state = state;
        storage->deferred.then = end_deferred;
    }
    storage->kind = kind;
    storage->copy_kind = kind;
    storage->device = device;
    cm_list_push_back(&state->storages, &storage->node);
}

cm_storage *
cm_storage_new(cm_state *state, cm_kind kind, int device)
{
    cm_storage *storage = malloc(sizeof(*storage));
    if (storage == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    cm_storage_init(storage, state, kind, device, true);
    storage->free_struct = free_struct;
    return storage;
}

/* -- giving back --------------------------------------------------------------------- */

/* Forget the block and the streams that it was used on. */
static inline void
forget_block(cm_storage *storage)
{
    if (CM_UNLIKELY(storage->is_traced)) {
        (void)cm_tracing.untrack(CM_TRACE_DOMAIN, cm_storage_place(storage));
        storage->is_traced = false;
    }
    storage->is_asleep = false;
    storage->may_spill = false;
    storage->spilled = NULL;
    storage->pool = NULL;
    storage->block = NULL;
    storage->host = NULL;
    storage->address = 0;
    storage->uses = NULL;
    storage->use_count = storage->use_capacity = storage->lasting_count = 0;
    if (CM_UNLIKELY(storage->span_capacity > 1)) {
        free(storage->spans);
    }
    storage->spans = NULL;
    storage->span_count = storage->span_capacity = storage->prune_at = 0;
    storage->first_is_lent = false;
}

void
cm_storage_detach(cm_storage *storage, cm_storage *out)
{
    CM_NEEDS_GIL();
    memcpy((void *)out, storage, sizeof(*out));
    out->spans = NULL; /* all uses are waited for, whatever bytes they use */
    out->span_count = out->span_capacity = 0;
    if (storage->uses == &storage->first_use) {
        out->uses = &out->first_use;
    }
    if (storage->first_is_lent && storage->use_count > 0) {
        (void)cm_stream_hold(out->first_use);
    }
    forget_block(storage);
    storage->registration = NULL;
    storage->foreign = NULL;
    storage->foreign_drop = NULL;
    storage->memory = NULL;
    storage->is_watched = false;
    storage->transfers = NULL;
    storage->transfer_count = storage->transfer_capacity =
        storage->forget_transfers_at = 0;
}

/* Gives nothing back, since the blocks, streams and registrations belong to the
 * parent's driver, which does not exist in this process. The unfinished transfers stay,
 * because they say that nobody knows what they have written. */
void
cm_storage_inherit(cm_storage *storage)
{
    bool is_here = storage->block == NULL ? storage->pool == NULL
                                          : cm_block_is_inherited(storage->block);
    bool has_pending_fill = cm_storage_has_pending_fill(storage);
    void *host = storage->host;
    cm_kind copy_kind = storage->copy_kind;
    forget_block(storage);
    storage->registration = NULL;
    storage->holds_locked_pages = false;
    storage->locks_late = false; /* nothing can be locked here */
    storage->is_advised = false;
    storage->was_exported = false;
    if (is_here && !has_pending_fill && host != NULL
        && (cm_kind_is_pageable(copy_kind) || cm_kind_is_page_locked(copy_kind))) {
        storage->host = host;
        storage->copy_kind = CM_KIND_PAGEABLE;
        return;
    }
    if (storage->nbytes > 0) {
        storage->was_not_inherited = true;
        storage->closed = true;
    }
}

static unsigned
free_flags(const cm_storage *detached)
{
    return (detached->was_exported ? CM_POOL_FREE_FENCE : 0u)
           | (detached->was_captured ? CM_POOL_FREE_CAPTURED : 0u);
}

static bool
unlocks(const cm_storage *detached)
{
    return detached->holds_locked_pages || detached->registration != NULL;
}

/* True if giving back may make calls of the runtime, for which the GIL is released. */
static bool
may_wait(const cm_storage *detached)
{
    if (detached->use_count > 0 || detached->is_advised || unlocks(detached)
        || detached->spilled != NULL) {
        return true;
    }
    return detached->block == NULL
               ? detached->pool != NULL
               : !cm_pool_free_is_quick(detached->pool, NULL, 0, free_flags(detached));
}

/* Wait for work on pages that are about to be unlocked. Transfers of ours hold the
 * storage, but streams that were recorded, and those of a consumer whom nobody knows,
 * do not. */
static cm_status
wait_for_uses(const cm_storage *detached, cm_runtime *runtime)
{
    cm_status first = cm_ok();
    bool fence = detached->was_exported;
    for (uint32_t i = 0; i < detached->use_count; i++) {
        cm_stream *use = detached->uses[i];
        /* This handle means the stream of the thread that uses it. The work may be on
         * that of another thread, which only a wait for whole devices includes. */
        fence |= use->handle == CM_STREAM_PER_THREAD;
        first = cm_first_failure(
            first, CM_ASKING(use->rt, use->device,
                             cm_rt_stream_synchronize(use->rt, use->handle)));
    }
    uint64_t devices = fence && runtime != NULL ? cm_devices_in_use(runtime, true) : 0;
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        if ((devices >> d & 1) != 0) {
            first = cm_first_failure(
                first, CM_ASKING(runtime, d, cm_rt_device_synchronize(runtime)));
        }
    }
    return first;
}

/* Take the advice back, since the next user of the block has not asked for it. */
static cm_status
forget_advice(const cm_storage *detached, cm_runtime *rt)
{
    static const int advices[] = {CM_ADVISE_NOT_READ_MOSTLY, CM_ADVISE_NOT_PREFERRED,
                                  CM_ADVISE_NOT_ACCESSED_BY};
    cm_status first = cm_ok();
    for (int i = 0; i < 3 + rt->device_count; i++) {
        int advice = advices[i < 2 ? i : 2];
        int location = i <= 2 ? CM_HOST_LOCATION : i - 3;
        cm_status status = CM_IN_SCOPE(
            rt, detached->device,
            cm_rt_advise(rt, detached->address, detached->nbytes, advice, location));
        /* A device that cannot access the memory has no advice to take back. */
        if (location < 0 || status.code != CM_CUDA_INVALID_DEVICE) {
            first = cm_first_failure(first, status);
        }
    }
    return first;
}

void
cm_storage_note_registered(const cm_storage *storage, uint8_t op)
{
    if (cm_recorder_is_on()) {
        cm_event event = {.op = op,
                          .address = (uintptr_t)storage->host,
                          .nbytes = storage->nbytes,
                          .value = op == CM_EVENT_ALLOCATE ? storage->nbytes : 0,
                          .kind = CM_EVENT_REGISTERED,
                          .source_kind = CM_EVENT_REGISTERED,
                          .device = (int8_t)storage->device};
        cm_recorder_note_here(event);
    }
}

cm_status
cm_storage_free_parts(cm_storage *detached, cm_runtime *runtime)
{
    cm_status status = cm_ok();
    if (runtime == NULL || !cm_runtime_is_forked(runtime)) {
        if (detached->block != NULL && detached->is_advised && runtime != NULL) {
            status = forget_advice(detached, runtime);
        }
        if (detached->spilled != NULL) {
            cm_pool_free(cm_block_pool(detached->spilled), detached->spilled, NULL, 0,
                         0);
            cm_block_free_asleep(detached->pool, detached->block);
        }
        else if (detached->block != NULL) {
            cm_pool_free(detached->pool, detached->block, detached->uses,
                         detached->use_count, free_flags(detached));
        }
        if (unlocks(detached)) {
            status = cm_first_failure(status, wait_for_uses(detached, runtime));
        }
        if (detached->registration != NULL) {
            cm_storage_note_registered(detached, CM_EVENT_FREE);
            status = cm_first_failure(status,
                                      cm_registration_release(detached->registration));
        }
        for (uint32_t i = 0; i < detached->use_count; i++) {
            cm_stream_release(detached->uses[i]);
        }
        for (uint32_t i = 0; i < detached->transfer_count; i++) {
            cm_ticket_release(detached->transfers[i].ticket);
        }
        if (detached->pool != NULL && detached->block == NULL) {
            cm_pool_release(detached->pool);
        }
    }
    if (detached->uses != &detached->first_use) {
        free(detached->uses);
    }
    free(detached->transfers);
    return status;
}

void
cm_storage_drop_foreign(cm_storage *detached)
{
    /* A deleter may be Python code, which must not see our exception. */
    cm_kept_error kept = cm_error_keep();
    /* This also unlocks pages, before they are unmapped. */
    Py_XDECREF(detached->foreign);
    if (detached->foreign_drop != NULL) {
        detached->foreign_drop(detached->foreign_argument);
    }
    /* This comes last, since dropping the others may still unlock its pages. */
    Py_XDECREF(detached->memory);
    cm_error_restore(kept);
}

/* Give everything back, with the GIL released if that may wait. */
static cm_status
give_detached(cm_storage *detached)
{
    cm_state *state = detached->state;
    cm_runtime *runtime = state->runtime;
    cm_status status;
    if (may_wait(detached)) {
        cm_state_enter(state);
        status = CM_WITHOUT_GIL(cm_storage_free_parts(detached, runtime));
        cm_state_leave(state);
    }
    else {
        status = cm_storage_free_parts(detached, runtime);
    }
    cm_storage_drop_foreign(detached);
    return status;
}

static cm_status
give_parts(cm_storage *storage)
{
    cm_storage detached;
    cm_storage_detach(storage, &detached);
    return give_detached(&detached);
}

/* Try the usual end of a storage: it has nothing to give back but its block, and the
 * block goes back without a call of the runtime. Returns false if nothing was done. */
static bool
try_give_back(cm_storage *storage)
{
    bool alone = storage->use_capacity <= 1;
    if (storage->block == NULL || !alone || storage->transfers != NULL
        || storage->was_exported || storage->was_captured || storage->is_advised
        || storage->foreign != NULL || storage->spilled != NULL
        || !cm_pool_quick_free(storage->pool, storage->block, storage->uses,
                               storage->use_count)) {
        return false;
    }
    bool holds = storage->use_count != 0 && !storage->first_is_lent;
    forget_block(storage);
    if (holds && !cm_stream_try_release(storage->first_use)) {
        cm_state_enter(storage->state);
        cm_stream_give(storage->state, storage->first_use);
    }
    return true;
}

/* Give everything back. Failures go to the unraisable hook, since there is no caller to
 * whom they could be raised. */
static void
give_back(cm_storage *storage)
{
    if (CM_UNLIKELY(!try_give_back(storage))) {
        cm_state *state = storage->state;
        cm_py_report(state, give_parts(storage), (PyObject *)state->buffer_type);
    }
}

static bool
is_idle(const cm_storage *storage)
{
    /* If there is no state, the module is gone, and the runtime with it. */
    return storage->state != NULL && storage->view_count == 0
           && atomic_load(&storage->holds) == 0;
}

static void
end_if_idle(cm_storage *storage)
{
    if (storage->closed && is_idle(storage)) {
        give_back(storage);
    }
}

static void
storage_destroy(cm_storage *storage)
{
    CM_NEEDS_GIL();
    if (storage->state != NULL) {
        cm_list_remove(&storage->node);
        give_back(storage);
    }
    storage->free_struct(storage);
}

/* Complete a drop that was made without the GIL. Either the last reference was dropped,
 * or the last hold of a closed storage; in the latter case drop_hold() has left the
 * reference that goes with it to this function. */
static void
end_deferred(cm_deferred *deferred)
{
    cm_storage *storage = CM_LIST_ENTRY(deferred, cm_storage, deferred);
    if (atomic_load(&storage->refs) == 0) {
        storage_destroy(storage);
        return;
    }
    atomic_store(&storage->deferring, false);
    end_if_idle(storage);
    cm_storage_release(storage, true);
}

cm_storage *
cm_storage_hold(cm_storage *storage)
{
    atomic_fetch_add_explicit(&storage->refs, 1, memory_order_relaxed);
    return storage;
}

bool
cm_storage_try_hold(cm_storage *storage)
{
    size_t refs = atomic_load(&storage->refs);
    while (refs > 0 && !atomic_compare_exchange_weak(&storage->refs, &refs, refs + 1)) {
    }
    return refs > 0;
}

void
cm_storage_release(cm_storage *storage, bool have_gil)
{
    /* The holder of the only reference need not count it down, since nobody else can
     * reach the count. Without the GIL it is counted down in any case, because
     * end_deferred() looks at the count. */
    bool only =
        have_gil && atomic_load_explicit(&storage->refs, memory_order_acquire) == 1;
    if (!only
        && atomic_fetch_sub_explicit(&storage->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (have_gil) {
        storage_destroy(storage);
    }
    else {
        cm_deferred_add(&storage->deferred);
    }
}

/* -- closing ------------------------------------------------------------------------- */

int
cm_storage_check_not_exported(const cm_storage *storage, const char *what)
{
    size_t exports = cm_storage_count_exports(storage);
    return exports == 0
               ? 0
               : cm_package_refuse("buffers.texts", "refuse_exported",
                                   Py_BuildValue("(sn)", what, (Py_ssize_t)exports));
}

int
cm_storage_close(cm_storage *storage)
{
    if (cm_storage_check_not_exported(storage, "free a buffer") < 0) {
        return -1;
    }
    storage->closed = true; /* set first, since a transfer that ends now looks at it */
    if (!is_idle(storage) || try_give_back(storage)) {
        return 0;
    }
    return cm_py_check(storage->state, give_parts(storage), "while freeing a buffer");
}

void
cm_storage_retire(cm_storage *storage)
{
    storage->closed = true;
    end_if_idle(storage);
}

int
cm_storage_unlock(cm_storage *storage)
{
    storage->closed = true;
    if (storage->state == NULL) {
        return 0;
    }
    cm_storage detached;
    cm_storage_detach(storage, &detached);
    /* Others may still read the bytes through views, although the pages are no longer
     * locked, so the storage keeps the object that keeps the bytes. */
    if (storage->view_count > 0) {
        storage->foreign = detached.foreign;
        storage->foreign_drop = detached.foreign_drop;
        storage->foreign_argument = detached.foreign_argument;
        storage->memory = detached.memory;
        detached.foreign = NULL;
        detached.foreign_drop = NULL;
        detached.memory = NULL;
    }
    cm_status status = give_detached(&detached);
    return cm_py_check(storage->state, status, "while unregistering host memory");
}

/* Note a use of a storage that may spill, and wake it if it did. */
static int
touch(cm_storage *storage)
{
    cm_state *state = storage->state;
    storage->touched = ++state->touch_count;
    while (storage->spilled != NULL || storage->is_moving) {
        if (state->wake_storage(storage) < 0) {
            return -1;
        }
        if (storage->closed) {
            return cm_storage_look_closer(storage);
        }
    }
    return 0;
}

int
cm_storage_check_there(cm_storage *storage)
{
    /* This comes first, since it may run Python code of another library, which may
     * close the storage. */
    if (storage->is_watched && !storage->closed && cm_memory_check(storage) < 0) {
        return -1;
    }
    if (storage->closed && storage->was_not_inherited) {
        return cm_py_raise_int(storage->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    if (storage->closed) {
        PyErr_SetString(
            PyExc_ValueError,
            "the buffer is closed: its memory was given back by free(), the "
            "end of a with block or shutdown()");
        return -1;
    }
    if (storage->is_asleep) {
        return cm_package_refuse(
            "pools.region", "refuse_use",
            Py_BuildValue(
                "(K)", (unsigned long long)cm_pool_get_config(storage->pool)->serial));
    }
    return 0;
}

int
cm_storage_look_closer(cm_storage *storage)
{
    if (cm_storage_check_there(storage) < 0) {
        return -1;
    }
    return storage->may_spill ? touch(storage) : 0;
}

/* -- holds --------------------------------------------------------------------------- */

static void
add_hold(cm_storage *storage, uint64_t hold)
{
    atomic_fetch_add_explicit(&storage->holds, hold, memory_order_relaxed);
}

/* End a hold. Returns true if this was the last hold of a closed storage. This changes
 * `holds` and then reads `closed`, while closing sets `closed` and then reads `holds`.
 * All four steps are sequentially consistent, so if two threads do these things at
 * once, at least one of them sees what the other has done, and gives the bytes back. */
static bool
end_hold(cm_storage *storage, uint64_t hold)
{
    return atomic_fetch_sub(&storage->holds, hold) == hold && storage->closed;
}

static void
drop_hold(cm_storage *storage, uint64_t hold)
{
    if (end_hold(storage, hold) && !atomic_exchange(&storage->deferring, true)) {
        cm_deferred_add(&storage->deferred); /* takes the reference over */
    }
    else {
        cm_storage_release(storage, false);
    }
}

void
cm_storage_keep_open(cm_storage *storage)
{
    CM_NEEDS_GIL();
    storage->call_count++;
    add_hold(storage, CM_HOLD_EXPORT);
}

void
cm_storage_allow_close(cm_storage *storage)
{
    CM_NEEDS_GIL();
    storage->call_count--;
    cm_storage_end_export(storage);
}

void
cm_storage_end_export(cm_storage *storage)
{
    if (CM_UNLIKELY(end_hold(storage, CM_HOLD_EXPORT))) {
        end_if_idle(storage);
    }
}

void
cm_storage_begin_export(cm_storage *storage)
{
    storage->was_exported = true;
    if (storage->state != NULL) {
        storage->state->export_total++;
    }
    add_hold(storage, CM_HOLD_EXPORT);
}

void
cm_storage_watch_view(cm_storage *storage, const void *view, Py_ssize_t refs)
{
    if (storage->state == NULL) {
        return; /* the module is gone, and nothing will be given back */
    }
    cm_numpy_call call = cm_numpy_call_now();
    storage->only_view = call.frame == 0 ? NULL : view;
    storage->only_number = storage->state->export_total;
    storage->only_refs = refs;
    storage->only_call = call;
}

bool
cm_storage_unwatch_view(cm_storage *storage, const void *view, Py_ssize_t refs)
{
    if (storage->only_view != view || view == NULL) {
        return false;
    }
    storage->only_view = NULL;
    bool was_none =
        storage->state != NULL && storage->only_number == storage->state->export_total
        && storage->only_refs == refs && cm_numpy_call_lasts(&storage->only_call);
    storage->was_exported = !was_none;
    return was_none;
}

void
cm_storage_drop_export(cm_storage *storage)
{
    drop_hold(storage, CM_HOLD_EXPORT);
}

cm_storage *
cm_storage_hold_transfer(cm_storage *storage)
{
    add_hold(storage, CM_HOLD_TRANSFER);
    return cm_storage_hold(storage);
}

bool
cm_storage_try_hold_transfer(cm_storage *storage)
{
    if (!cm_storage_try_hold(storage)) {
        return false;
    }
    add_hold(storage, CM_HOLD_TRANSFER);
    return true;
}

void
cm_storage_drop_transfer(void *storage)
{
    drop_hold(storage, CM_HOLD_TRANSFER);
}
