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

cm_storage *
cm_storage_new(cm_state *state, cm_kind kind, int device)
{
    cm_storage *storage = calloc(1, sizeof(*storage));
    if (storage == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    atomic_init(&storage->refs, 1);
    storage->state = state;
    storage->generation = state->generation;
    storage->kind = kind;
    storage->residency = kind;
    storage->device = device;
    cm_list_init(&storage->grave.node);
    storage->grave.state = state;
    storage->grave.then = storage_bury;
    storage->grave.argument = storage;
    storage->grave.embedded = true;
    cm_list_push_back(&state->storages, &storage->node);
    return storage;
}

cm_storage *
cm_storage_alloc(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    cm_storage *storage = cm_storage_new(state, config->kind, config->device);
    if (storage == NULL) {
        return NULL;
    }
    storage->flags = config->flags;
    storage->nbytes = nbytes;
    storage->pool = cm_pool_hold(pool);
    if (nbytes == 0) {
        return storage;
    }
    cm_block *block = cm_pool_try_alloc(pool, nbytes, stream);
    if (CM_UNLIKELY(block == NULL)) {
        block = cm_block_alloc(state, pool, nbytes, stream);
    }
    if (block == NULL) {
        cm_storage_release(storage, true);
        return NULL;
    }
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    if (stream != NULL && cm_storage_add_use(storage, stream) < 0) {
        cm_storage_release(storage, true);
        return NULL;
    }
    return storage;
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
        .device = storage->device,
    };
    storage->pool = NULL;
    storage->block = NULL;
    storage->registration = NULL;
    storage->foreign = NULL;
    storage->foreign_drop = NULL;
    storage->uses = NULL;
    storage->use_count = storage->use_capacity = 0;
    storage->writers = NULL;
    storage->writer_count = storage->writer_capacity = 0;
    storage->host = NULL;
    storage->address = 0;
}

bool
cm_storage_remains_may_wait(const cm_storage_remains *remains)
{
    bool pooled = remains->block != NULL && (remains->use_count > 0 || remains->fence);
    return pooled || remains->registration != NULL || remains->use_count > 0;
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
            unsigned flags = remains->fence ? CM_POOL_FREE_FENCE : 0u;
            flags |= remains->captured ? CM_POOL_FREE_CAPTURED : 0u;
            cm_pool_free(remains->pool, remains->block, remains->uses,
                         remains->use_count, flags);
        }
        if (remains->registration != NULL) {
            status = settle(remains);
            cm_status released = cm_registration_release(remains->registration);
            status = cm_is_ok(status) ? released : status;
        }
        for (uint32_t i = 0; i < remains->use_count; i++) {
            cm_stream_release(remains->uses[i]);
        }
        for (uint32_t i = 0; i < remains->writer_count; i++) {
            cm_ticket_release(remains->writers[i]);
        }
        if (remains->pool != NULL) {
            cm_pool_release(remains->pool);
        }
    }
    free(remains->uses);
    free(remains->writers);
    return status;
}

void
cm_storage_remains_bury(cm_storage_remains *remains)
{
    if (remains->foreign_drop != NULL) {
        remains->foreign_drop(remains->foreign_argument);
    }
    Py_XDECREF(remains->foreign);
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

void
cm_storage_give_back(cm_storage *storage)
{
    cm_state *state = storage->state;
    cm_storage_remains remains;
    cm_storage_detach(storage, &remains);
    cm_status status = cm_storage_remains_give(state, &remains);
    if (!cm_is_ok(status)) {
        cm_py_report(state, status, (PyObject *)state->buffer_type);
    }
}

static void
storage_destroy(cm_storage *storage)
{
    if (storage->state != NULL) {
        cm_list_remove(&storage->node);
        cm_storage_give_back(storage);
    }
    free(storage);
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
    if (atomic_fetch_sub_explicit(&storage->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (have_gil) {
        storage_destroy(storage);
    }
    else {
        cm_grave_bury(&storage->grave);
    }
}
