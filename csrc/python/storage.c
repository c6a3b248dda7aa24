/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that buffers share: how it is made, counted and given back. */
#include "python/storage.h"

#include <stdlib.h>
#include <string.h>

#include "python/arguments.h"
#include "python/errors.h"
#include "python/out_of_memory.h"

/* -- making -------------------------------------------------------------------------- */

static void storage_bury(void *argument);

void
cm_storage_init(cm_storage *storage, cm_state *state, cm_kind kind, int device,
                bool fresh)
{
    if (fresh) { /* what no use changes */
        memset(storage, 0, sizeof(*storage));
        atomic_init(&storage->refs, 1);
        storage->state = state;
        cm_list_init(&storage->grave.node);
        storage->grave.state = state;
        storage->grave.then = storage_bury;
        storage->grave.argument = storage;
        storage->grave.embedded = true;
    }
    storage->generation = state->generation;
    storage->kind = kind;
    storage->residency = kind;
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
    return storage;
}

int
cm_storage_fill(cm_storage *storage, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    storage->flags = cm_pool_get_config(pool)->flags;
    storage->nbytes = nbytes;
    if (CM_UNLIKELY(nbytes == 0)) {
        storage->pool = cm_pool_hold(pool);
        return 0;
    }
    cm_block *block = cm_pool_quick_alloc(pool, nbytes, stream);
    if (CM_UNLIKELY(block == NULL)) {
        block = cm_block_alloc(storage->state, pool, nbytes, stream);
        if (block == NULL) {
            return -1;
        }
    }
    storage->pool = pool;
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    if (stream != NULL) {
        cm_storage_set_first_use(storage, stream);
    }
    return 0;
}

/* -- giving back --------------------------------------------------------------------- */

void
cm_storage_detach(cm_storage *storage, cm_storage_remains *out)
{
    *out = (cm_storage_remains){
        .runtime = storage->state == NULL ? NULL : storage->state->runtime,
        .pool = storage->pool,
        .block = storage->block,
        .registration = storage->registration,
        .foreign = storage->foreign,
        .foreign_drop = storage->foreign_drop,
        .foreign_argument = storage->foreign_argument,
        .uses = storage->uses,
        .use_count = storage->use_count,
        .writers = storage->writers,
        .writer_count = storage->writer_count,
        .fence = storage->was_exported,
        .captured = storage->was_captured,
        .unlocks = storage->unlocks || storage->registration != NULL,
        .device = storage->device,
    };
    if (storage->uses == &storage->first_use) {
        out->first_use = storage->first_use;
        out->uses = &out->first_use;
    }
    if (storage->first_is_lent && storage->use_count > 0) {
        (void)cm_stream_hold(out->uses[0]);
    }
    storage->first_is_lent = false;
    storage->pool = NULL;
    storage->block = NULL;
    storage->registration = NULL;
    storage->foreign = NULL;
    storage->foreign_drop = NULL;
    storage->uses = NULL;
    storage->use_count = storage->use_capacity = storage->lasting_count = 0;
    storage->writers = NULL;
    storage->writer_count = storage->writer_capacity = storage->forget_at = 0;
    storage->host = NULL;
    storage->address = 0;
}

static unsigned
free_flags(bool fence, bool captured)
{
    return (fence ? CM_POOL_FREE_FENCE : 0u) | (captured ? CM_POOL_FREE_CAPTURED : 0u);
}

bool
cm_storage_remains_may_wait(const cm_storage_remains *remains)
{
    unsigned flags = free_flags(remains->fence, remains->captured);
    bool quick = remains->block == NULL
                 || cm_pool_free_is_quick(remains->pool, remains->uses,
                                          remains->use_count, flags);
    bool holds_pool = remains->pool != NULL && remains->block == NULL;
    return !quick || holds_pool || remains->unlocks || remains->use_count > 0;
}

/* Pages must not be unlocked under work that uses them: our transfers hold the storage,
 * but streams that were recorded, and those of a consumer that nobody knows, do not. */
static cm_status
settle(const cm_storage_remains *remains)
{
    cm_status first = cm_ok();
    cm_device_guard guard;
    bool fence = remains->fence;
    for (uint32_t i = 0; i < remains->use_count; i++) {
        cm_stream *use = remains->uses[i];
        fence |= use->handle == CM_STREAM_PER_THREAD; /* perhaps another thread's */
        cm_status status = cm_device_enter(use->rt, use->device, &guard);
        if (cm_is_ok(status)) {
            status = cm_rt_stream_synchronize(use->rt, use->handle);
            cm_device_leave(use->rt, &guard);
        }
        first = cm_is_ok(first) ? status : first;
    }
    if (fence && remains->runtime != NULL) {
        cm_status status = cm_device_enter(remains->runtime, remains->device, &guard);
        if (cm_is_ok(status)) {
            status = cm_rt_device_synchronize(remains->runtime);
            cm_device_leave(remains->runtime, &guard);
        }
        first = cm_is_ok(first) ? status : first;
    }
    return first;
}

cm_status
cm_storage_remains_free(cm_storage_remains *remains)
{
    cm_status status = cm_ok();
    if (remains->runtime == NULL || !cm_runtime_is_forked(remains->runtime)) {
        if (remains->block != NULL) {
            cm_pool_free(remains->pool, remains->block, remains->uses,
                         remains->use_count,
                         free_flags(remains->fence, remains->captured));
        }
        if (remains->unlocks) {
            status = settle(remains);
        }
        if (remains->registration != NULL) {
            cm_status released = cm_registration_release(remains->registration);
            status = cm_is_ok(status) ? released : status;
        }
        for (uint32_t i = 0; i < remains->use_count; i++) {
            cm_stream_release(remains->uses[i]);
        }
        for (uint32_t i = 0; i < remains->writer_count; i++) {
            cm_ticket_release(remains->writers[i].ticket);
        }
        if (remains->pool != NULL && remains->block == NULL) {
            cm_pool_release(remains->pool);
        }
    }
    if (remains->uses != &remains->first_use) {
        free(remains->uses);
    }
    free(remains->writers);
    return status;
}

void
cm_storage_remains_bury(cm_storage_remains *remains)
{
    if (remains->foreign_drop == NULL && remains->foreign == NULL) {
        return;
    }
    PyObject *type; /* a deleter may be Python code, which must not see our exception */
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(remains->foreign); /* and with it locked pages, before they are unmapped
                                   */
    if (remains->foreign_drop != NULL) {
        remains->foreign_drop(remains->foreign_argument);
    }
    PyErr_Restore(type, value, traceback);
}

cm_status
cm_storage_remains_give(cm_state *state, cm_storage_remains *remains)
{
    cm_status status;
    if (cm_storage_remains_may_wait(remains)) {
        cm_state_enter(state);
        Py_BEGIN_ALLOW_THREADS
        status = cm_storage_remains_free(remains);
        Py_END_ALLOW_THREADS
        cm_state_leave(state);
    }
    else {
        status = cm_storage_remains_free(remains);
    }
    cm_storage_remains_bury(remains);
    return status;
}

bool
cm_storage_try_give_back(cm_storage *storage)
{
    bool alone = storage->use_capacity <= 1;
    if (storage->block == NULL || !alone || storage->writers != NULL
        || storage->was_exported || storage->was_captured || storage->foreign != NULL
        || !cm_pool_quick_free(storage->pool, storage->block, storage->uses,
                               storage->use_count)) {
        return false;
    }
    bool holds = storage->use_count != 0 && !storage->first_is_lent;
    storage->pool = NULL;
    storage->block = NULL;
    storage->host = NULL;
    storage->address = 0;
    storage->uses = NULL;
    storage->use_count = storage->use_capacity = storage->lasting_count = 0;
    storage->first_is_lent = false;
    if (holds && !cm_stream_try_release(storage->first_use)) {
        cm_state_enter(storage->state);
        cm_stream_give(storage->state, storage->first_use);
    }
    return true;
}

CM_COLD static void
give_back(cm_storage *storage)
{
    cm_state *state = storage->state;
    cm_storage_remains remains;
    cm_storage_detach(storage, &remains);
    cm_status status = cm_storage_remains_give(state, &remains);
    if (!cm_is_ok(status)) {
        cm_py_report(state, status, (PyObject *)state->buffer_type);
    }
}

void
cm_storage_give_back(cm_storage *storage)
{
    if (!cm_storage_try_give_back(storage)) {
        give_back(storage);
    }
}

static void
storage_destroy(cm_storage *storage)
{
    if (storage->state != NULL) {
        cm_list_remove(&storage->node);
        cm_storage_give_back(storage);
    }
    if (storage->in_root) {
        cm_root_free(CM_LIST_ENTRY(storage, cm_root, storage));
    }
    else {
        free(storage);
    }
}

/* What was let go without the GIL: the last reference, or the last hold of a closed
 * storage, which came with a reference. */
static void
storage_bury(void *argument)
{
    cm_storage *storage = argument;
    if (atomic_load(&storage->refs) == 0) {
        storage_destroy(storage);
        return;
    }
    atomic_store(&storage->burying, false);
    cm_storage_end_if_idle(storage);
    cm_storage_release(storage, true);
}

cm_storage *
cm_storage_hold(cm_storage *storage)
{
    atomic_fetch_add_explicit(&storage->refs, 1, memory_order_relaxed);
    return storage;
}

void
cm_storage_release(cm_storage *storage, bool have_gil)
{
    /* Who holds the only reference need not count it down, unless for the grave: nobody
     * else can count. */
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
        cm_grave_bury(&storage->grave);
    }
}
