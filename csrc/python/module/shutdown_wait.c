/* SPDX-License-Identifier: Apache-2.0 */
/* What shutdown() waits for, waited for before anything is taken apart, so that Ctrl-C
 * may end it. */
#include "python/buffer/buffer_object.h"
#include "python/device/wait.h"
#include "python/module/module.h"
#include "python/pool/pool_object.h"
#include "transfer/host/backoff.h"

/* At most a slice. False: there is more. No GIL. */
static bool
transfers_end(cm_engine *engine)
{
    uint64_t start = cm_now_ns();
    while (cm_engine_count_pending(engine) > 0) {
        uint64_t elapsed = cm_now_ns() - start;
        if (elapsed >= CM_SIGNAL_SLICE_NS) {
            return false;
        }
        cm_nap_after(elapsed);
        cm_engine_poll(engine);
    }
    return true;
}

static int
wait_for_transfers(const cm_state *state)
{
    bool done = false;
    while (!done && state->engine != NULL) {
        Py_BEGIN_ALLOW_THREADS
        done = transfers_end(state->engine);
        Py_END_ALLOW_THREADS
        if (!done && PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

/* May it be asked? Not what captures, nor a handle that nobody keeps alive. */
static bool
may_ask(const cm_stream *stream)
{
    bool capturing = true;
    cm_device_guard guard;
    if ((cm_stream_is_legacy(stream) || stream->owns_handle || stream->owner != NULL)
        && cm_stream_is_here(stream)
        && cm_is_ok(cm_device_enter(stream->rt, stream->device, &guard))) {
        cm_status asked =
            cm_rt_stream_is_capturing(stream->rt, stream->handle, &capturing);
        capturing |= !cm_is_ok(asked);
        cm_device_leave(stream->rt, &guard);
    }
    return !capturing;
}

static int
wait_for_stream(const cm_state *state, const cm_stream *stream)
{
    cm_status ignored;
    return !may_ask(stream)
                   || cm_wait_polling(state->runtime, stream->device,
                                      cm_rt_stream_query, stream->handle, true,
                                      &ignored)
               ? 0
               : -1;
}

/* The next stream that work on a buffer is on, other than those seen: taken, or NULL.
 */
static cm_stream *
find_use(cm_state *state, cm_stream *const *seen, uint32_t seen_count)
{
    const cm_list *storages = &state->storages;
    for (const cm_list *n = storages->next; n != storages; n = n->next) {
        const cm_storage *storage = CM_LIST_ENTRY(n, cm_storage, node);
        for (uint32_t i = 0; i < storage->use_count; i++) {
            uint32_t j = 0;
            while (j < seen_count && seen[j] != storage->uses[i]) {
                j++;
            }
            if (j == seen_count) {
                return cm_stream_take(state, storage->uses[i]);
            }
        }
    }
    return NULL;
}

enum { STREAMS_MAX = 256 };

static int
wait_for_uses(cm_state *state)
{
    cm_stream *seen[STREAMS_MAX];
    uint32_t count = 0;
    int result = 0;
    cm_stream *next;
    while (result == 0 && count < STREAMS_MAX
           && (next = find_use(state, seen, count)) != NULL) {
        seen[count++] = next;
        result = wait_for_stream(state, next);
    }
    for (uint32_t i = 0; i < count; i++) {
        cm_stream_give(state, seen[i]);
    }
    return result;
}

/* What was exported may be used by anyone, on any device: it waits for all of them when
 * it is given back. */
static int
wait_for_exports(cm_state *state)
{
    bool any = false;
    const cm_list *storages = &state->storages;
    for (const cm_list *n = storages->next; n != storages && !any; n = n->next) {
        any = CM_LIST_ENTRY(n, cm_storage, node)->was_exported;
    }
    cm_runtime *rt = state->runtime;
    for (int device = 0; any && device < rt->device_count; device++) {
        cm_status ignored;
        if (atomic_load(&rt->primary[device]) != 0
            && !cm_wait_for_device(state, rt, device, &ignored)) {
            return -1;
        }
    }
    return 0;
}

static int
wait_for_pools(cm_state *state)
{
    cm_pool_entry *entries;
    size_t count;
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        return -1;
    }
    cm_status status = cm_ok();
    cm_pool_waiter waiter = {state, PyEval_SaveThread()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    for (size_t i = 0; i < count && cm_is_ok(status); i++) {
        status = cm_pool_await(entries[i].pool, &hooks);
    }
    PyEval_RestoreThread(waiter.thread);
    cm_pools_give_all(state, entries, count);
    return cm_is_ok(status) ? 0 : -1;
}

int
cm_state_wait_for_work(cm_state *state)
{
    if (!cm_sees_signals()) {
        return 0;
    }
    cm_state_enter(state);
    int result = wait_for_transfers(state);
    result = result == 0 ? wait_for_uses(state) : result;
    result = result == 0 ? wait_for_exports(state) : result;
    result = result == 0 ? wait_for_pools(state) : result;
    cm_state_leave(state);
    return result;
}
