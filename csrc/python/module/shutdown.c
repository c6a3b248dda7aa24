/* SPDX-License-Identifier: Apache-2.0 */
/* Ends a generation, that is, everything that was opened since the first use or since
 * the last shutdown. All of it is waited for, given back and closed.
 *
 * shutdown() goes in three phases. First it waits, as far as it can, for work under
 * way. It does so in short slices, between which Ctrl-C can end the wait with nothing
 * changed yet. Next it takes everything out of the state with the GIL held (collect()).
 * From that moment each buffer, stream, event and pool of the generation is closed, and
 * a thread that uses cumem opens a new generation. Last it takes the old one apart,
 * with the GIL released: the engine, then memory, then streams and events, then the
 * runtime. If a call is under way or memory is exported, shutdown() refuses before
 * anything has been taken.
 *
 * At exit only transfers are waited for, since the system frees everything else. In a
 * forked child nothing of the parent's is given back. */
#include <stdlib.h>
#include <string.h>

#include "base/backoff.h"
#include "docstrings.h"
#include "python/copy/call.h"
#include "python/copy/configure.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"
#include "python/module/module.h"
#include "python/pool/lending.h"
#include "python/pool/pool_object.h"

/* -- waits before anything is taken apart, so that Ctrl-C may end them ------------- */

/* Wait for unfinished transfers, at most for `most_ns`. Returns false if some are left.
 * Called without the GIL. */
static bool
transfers_end(cm_engine *engine, uint64_t most_ns)
{
    uint64_t start = cm_now_ns();
    while (cm_engine_count_pending(engine) > 0) {
        uint64_t elapsed = cm_now_ns() - start;
        if (elapsed >= most_ns) {
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
        done = CM_WITHOUT_GIL(transfers_end(state->engine, CM_SIGNAL_SLICE_NS));
        if (!done && PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

/* True if the stream may be asked whether it is idle. It may not if it is being
 * captured, or if nobody keeps its handle alive. */
static bool
may_ask(const cm_stream *stream)
{
    bool capturing = true;
    cm_device_guard guard;
    if ((cm_stream_is_legacy(stream) || stream->owns_handle || stream->owner != NULL)
        && cm_stream_is_of_this_thread(stream)
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
    if (!may_ask(stream)) {
        return 0;
    }
    bool is_over = cm_wait_polling(state->runtime, stream->device, cm_rt_stream_query,
                                   stream->handle, true, &ignored);
    return is_over ? 0 : -1;
}

/* Wait for all streams on which any buffer is used. */
static int
wait_for_uses(cm_state *state)
{
    /* No call is made here: the struct serves as a list of streams without duplicates,
     * which it holds. */
    cm_call all = {.state = state};
    int result = 0;
    const cm_list *storages = &state->storages;
    for (const cm_list *n = storages->next; n != storages; n = n->next) {
        const cm_storage *storage = CM_LIST_ENTRY(n, cm_storage, node);
        for (uint32_t i = 0; i < storage->use_count && result == 0; i++) {
            result = cm_call_come_after_stream(&all, storage->uses[i]);
        }
    }
    for (uint32_t i = 0; i < all.after_count && result == 0; i++) {
        result = wait_for_stream(state, all.after[i]);
    }
    cm_call_fini(&all);
    return result;
}

/* Wait for all devices in use if any memory was exported. Anybody may use such memory
 * on any device, so giving it back would wait for all of them. */
static int
wait_for_exports(cm_state *state)
{
    bool any = false;
    const cm_list *storages = &state->storages;
    for (const cm_list *n = storages->next; n != storages && !any; n = n->next) {
        any = CM_LIST_ENTRY(n, cm_storage, node)->was_exported;
    }
    cm_runtime *rt = state->runtime;
    uint64_t devices = any ? cm_devices_in_use(rt, true) : 0;
    for (int device = 0; device < rt->device_count; device++) {
        cm_status ignored;
        if ((devices >> device & 1) != 0
            && !cm_wait_for_device(state, rt, device, &ignored)) {
            return -1;
        }
    }
    return 0;
}

/* Wait until nothing that shutdown() ends is at work any more, as far as that can be
 * asked without touching what others may have destroyed. Failures are left to
 * shutdown() itself. In a thread that sees no signals this does nothing. Returns 0, or
 * -1 with the exception that a signal handler raised; then nothing has changed. */
static int
wait_for_work(cm_state *state)
{
    if (!cm_sees_signals()) {
        return 0;
    }
    cm_state_enter(state);
    int result = wait_for_transfers(state);
    result = result == 0 ? wait_for_uses(state) : result;
    result = result == 0 ? wait_for_exports(state) : result;
    /* This only waits for the pools. Memory that becomes free stays in them for now. */
    cm_trim_request r = {.device = -1, .keep_nbytes = INT64_MAX};
    result = result == 0 ? cm_state_trim(state, &r, true) : result;
    cm_state_leave(state);
    return result;
}

/* -- taking it apart --------------------------------------------------------------- */

/* Everything that a generation leaves behind. It is taken out of the state before the
 * GIL is released, so that a thread that comes meanwhile opens a new one. */
typedef struct detached_state {
    cm_runtime *runtime;
    cm_registry *registry;
    cm_engine *engine;
    cm_pool **pools; /* default pools and those of Pool objects */
    size_t pool_count;
    cm_storage *storages; /* detached */
    size_t storage_count;
    cm_stream **streams; /* including the default and the joining streams */
    size_t stream_count;
    cm_detached_event *events;
    size_t event_count;
    PyObject *legacy_streams[CM_MAX_DEVICES];
} detached_state;

static int
check_no_exports(const cm_state *state)
{
    for (cm_list *node = state->storages.next; node != &state->storages;
         node = node->next) {
        const cm_storage *storage = CM_LIST_ENTRY(node, cm_storage, node);
        bool exported = cm_storage_count_exports(storage) > 0;
        if (exported || (storage->view_count > 0 && storage->nbytes > 0)) {
            return cm_package_refuse(
                "buffers.texts", "refuse_shutdown",
                Py_BuildValue("(sKi)", cm_kinds[storage->kind].text,
                              (unsigned long long)storage->nbytes, exported));
        }
    }
    return 0;
}

/* Make room, in one piece of memory, for everything that there is now. Returns NULL
 * with MemoryError if that fails. */
static detached_state *
detached_create(const cm_state *state)
{
    size_t storages = cm_list_count(&state->storages);
    size_t events = cm_list_count(&state->events);
    size_t streams = cm_list_count(&state->streams) + 2 * CM_MAX_DEVICES;
    size_t pools = cm_list_count(&state->pool_objects) + CM_DEFAULT_POOL_COUNT
                   + CM_LENT_POOL_COUNT;
    detached_state *old =
        calloc(1, sizeof(*old) + storages * sizeof(*old->storages)
                      + events * sizeof(*old->events) + streams * sizeof(*old->streams)
                      + pools * sizeof(*old->pools));
    if (old == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    old->storages = (cm_storage *)(void *)(old + 1);
    old->events = (cm_detached_event *)(void *)(old->storages + storages);
    old->streams = (cm_stream **)(void *)(old->events + events);
    old->pools = (cm_pool **)(void *)(old->streams + streams);
    return old;
}

/* Close every storage, Stream and Event. Their contents are given back later, once the
 * engine has ended. The GIL is not released, so no thread sees half of it gone. */
static void
collect(cm_state *state, detached_state *out)
{
    out->runtime = state->runtime;
    out->registry = state->registry;
    out->engine = state->engine;
    state->runtime = NULL;
    state->has_several = false;
    state->registry = NULL;
    state->engine = NULL;
    cm_state_set_last_save(state, NULL);
    cm_configure_close(state);
    state->generation++;
    while (!cm_list_is_empty(&state->storages)) {
        cm_storage *storage = CM_LIST_ENTRY(state->storages.next, cm_storage, node);
        cm_list_remove(&storage->node);
        storage->closed = true;
        cm_storage_detach(storage, &out->storages[out->storage_count++]);
    }
    out->stream_count = cm_streams_collect(state, out->streams);
    out->event_count = cm_events_collect(state, out->events);
    out->pool_count += cm_pool_objects_collect(state, out->pools + out->pool_count);
    for (int i = 0; i < CM_DEFAULT_POOL_COUNT; i++) {
        if (state->pools[i] != NULL) {
            out->pools[out->pool_count++] = state->pools[i];
            state->pools[i] = NULL;
        }
    }
    memcpy(out->legacy_streams, state->legacy_streams, sizeof(out->legacy_streams));
    memset(state->legacy_streams, 0, sizeof(state->legacy_streams));
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (state->default_streams[device] != NULL) {
            out->streams[out->stream_count++] = state->default_streams[device];
            state->default_streams[device] = NULL;
        }
        if (state->joining_streams[device] != NULL) {
            out->streams[out->stream_count++] = state->joining_streams[device];
            state->joining_streams[device] = NULL;
        }
    }
}

static cm_status
reset_used_devices(cm_runtime *runtime)
{
    cm_status first = cm_ok();
    for (int device = 0; device < runtime->device_count; device++) {
        if (atomic_load(&runtime->primary[device]) == 0) {
            continue; /* it was never entered, and a reset would first create a
                         context */
        }
        first = cm_first_failure(
            first, CM_ON_DEVICE(runtime, device, cm_rt_device_reset(runtime)));
    }
    return first;
}

/* Give all memory back. The engine is closed first, since it may still touch the memory
 * until then. Called without the GIL. */
static cm_status
give_memory_back(detached_state *old)
{
    const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    cm_status first = cm_engine_close(old->engine);
    for (size_t i = 0; i < old->storage_count; i++) {
        first = cm_first_failure(first, cm_storage_free_parts(&old->storages[i], NULL));
    }
    for (size_t i = 0; i < old->pool_count; i++) {
        uint64_t released;
        /* The release would free this memory too, but cannot say what failed. */
        first = cm_first_failure(
            first, cm_pool_trim(old->pools[i], 0, &uninterrupted, &released));
        cm_pool_release(old->pools[i]);
    }
    return first;
}

/* Close the streams and events that are left, and the runtime last. Called without the
 * GIL. */
static cm_status
close_runtime(detached_state *old, bool reset_devices)
{
    cm_status first = cm_ok();
    for (size_t i = 0; i < old->stream_count; i++) {
        cm_stream_release(old->streams[i]);
    }
    for (size_t i = 0; i < old->event_count; i++) {
        first = cm_first_failure(first, cm_detached_event_free(&old->events[i]));
    }
    first = cm_first_failure(first, cm_registry_close(old->registry));
    if (reset_devices) {
        first = cm_first_failure(first, reset_used_devices(old->runtime));
    }
    old->runtime->close(old->runtime);
    return first;
}

/* Give back and close everything. The GIL is held, and released for whatever waits. */
static cm_status
dismantle(cm_state *state, detached_state *old, bool reset_devices)
{
    cm_status first = CM_WITHOUT_GIL(give_memory_back(old));
    for (size_t i = 0; i < old->storage_count; i++) {
        cm_storage_drop_foreign(&old->storages[i]);
    }
    cm_state_drop_deferred(state);
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        Py_CLEAR(old->legacy_streams[device]);
    }
    first = CM_WITHOUT_GIL(cm_first_failure(first, close_runtime(old, reset_devices)));
    return first;
}

/* Check that nobody uses cumem. Returns 0 if so, or -1 with the exception by which
 * shutdown() refuses. */
static int
check_unused(const cm_state *state)
{
    if (state->call_count > 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "shutdown: a call of cumem is under way, in another thread or "
                        "below this one");
        return -1;
    }
    return check_no_exports(state);
}

/* Wait until nobody uses cumem. Returns 1 if shutdown() may go on, 0 if another thread
 * has shut cumem down meanwhile, or -1 with an exception. */
static int
wait_until_unused(cm_state *state)
{
    if (cm_device_waits_join(state) < 0) {
        return -1;
    }
    cm_state_drop_deferred(state); /* this may run Python code, so look again */
    if (state->runtime == NULL) {
        return 0;
    }
    if (check_unused(state) < 0 || wait_for_work(state) < 0) {
        return -1;
    }
    while (!CM_WITHOUT_GIL(cm_lending_wait(CM_SIGNAL_SLICE_NS))) {
        if (PyErr_CheckSignals() < 0) { /* only in a thread that sees signals */
            return -1;
        }
    }
    cm_state_drop_deferred(state); /* drops what work that has finished kept alive */
    if (state->runtime == NULL || state->engine == NULL) {
        return 0;
    }
    return check_unused(state) < 0 ? -1 : 1;
}

static int
shut_down(cm_state *state, bool reset_devices)
{
    if (state->runtime == NULL) {
        return 0;
    }
    if (cm_runtime_is_forked(state->runtime) || state->runtime->is_host_only) {
        return cm_py_raise_int(state, cm_fail(CM_EFORKED, 0), "while shutting down");
    }
    if (state->engine == NULL) {
        return 0; /* the atexit handler has run, and the system frees the rest */
    }
    detached_state *old = NULL;
    do {
        free(old);
        int ready = wait_until_unused(state);
        if (ready <= 0) {
            return ready;
        }
        old = detached_create(state);
        if (old == NULL) {
            return -1;
        }
    } while (!cm_lending_try_end(old->pools, &old->pool_count));
    collect(state, old);
    cm_status status = dismantle(state, old, reset_devices);
    free(old);
    return cm_py_check(state, status, "while shutting down");
}

/* Does the work of the package's shutdown(), which passes its argument reset_devices,
 * read as True or False. */
static PyObject *
shutdown(PyObject *module, PyObject *reset_devices)
{
    cm_state *state = cm_state_of_module(module);
    return shut_down(state, reset_devices == Py_True) < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- at exit ---------------------------------------------------------------------------- */

/* This is the atexit handler. It waits for transfers, and joins the workers unless
 * daemon threads may be using them. It frees nothing, as the system does that. */
static PyObject *
at_exit(PyObject *module, PyObject *others_run)
{
    cm_state *state = cm_state_of_module(module);
    cm_engine *engine = state->engine;
    bool shared = others_run == Py_True || state->call_count > 0;
    state->exiting = !shared;
    cm_lending_leak();
    if (state->runtime == NULL || engine == NULL
        || cm_runtime_is_forked(state->runtime)) {
        Py_RETURN_NONE;
    }
    cm_status status = cm_ok();
    state->engine = shared ? engine : NULL;
    Py_BEGIN_ALLOW_THREADS
    /* Daemon threads may start transfers for ever, so this waits at most a second. */
    if (shared) {
        (void)transfers_end(engine, UINT64_C(1000000000));
    }
    else {
        status = cm_engine_close(engine);
    }
    Py_END_ALLOW_THREADS
    cm_py_report(state, status, NULL);
    cm_state_drop_deferred(state);
    Py_RETURN_NONE;
}

/* -- after a fork -------------------------------------------------------------------------- */

/* Called in a forked child at once, so that the child finds a state that works,
 * whichever part of cumem it uses first. */
static PyObject *
after_fork(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime != NULL && cm_runtime_is_forked(state->runtime)
        && state->leave_parent(state) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- the module's end --------------------------------------------------------------------- */

/* Close pools, streams and events that are still open. The interpreter's last
 * collection frees objects in any order, and these use the state when they die, so they
 * are closed while it is there. A closed one does not use the state when it dies. A
 * list is still all zero if the module failed before the list was set up. */
static void
close_objects(cm_state *state)
{
    while (state->pool_objects.next != NULL
           && !cm_list_is_empty(&state->pool_objects)) {
        cm_pool_object_close(
            CM_LIST_ENTRY(state->pool_objects.next, cm_pool_object, node));
    }
    while (state->streams.next != NULL && !cm_list_is_empty(&state->streams)) {
        cm_stream_object_close(
            CM_LIST_ENTRY(state->streams.next, cm_stream_object, node));
    }
    size_t event_count = state->events.next == NULL ? 0 : cm_list_count(&state->events);
    cm_detached_event *events =
        event_count == 0 ? NULL : calloc(event_count, sizeof(*events));
    if (events != NULL) {
        size_t count = cm_events_collect(state, events);
        for (size_t i = 0; i < count; i++) {
            (void)CM_WITHOUT_GIL(cm_detached_event_free(&events[i]));
        }
        free(events);
    }
}

void
cm_state_fini(cm_state *state)
{
    close_objects(state);
    /* Storages may outlive the module if C consumers hold them, and must not look for a
     * state that is gone. */
    while (!cm_list_is_empty(&state->storages)) {
        cm_storage *storage = CM_LIST_ENTRY(state->storages.next, cm_storage, node);
        cm_list_remove(&storage->node);
        storage->state = NULL;
        storage->deferred.state = NULL;
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (state->default_streams[device] != NULL) {
            cm_stream_release(state->default_streams[device]);
        }
        if (state->joining_streams[device] != NULL) {
            cm_stream_release(state->joining_streams[device]);
        }
    }
}

/* -- table ------------------------------------------------------------------------------- */

PyMethodDef cm_shutdown_methods[] = {
    {"_shutdown", shutdown, METH_O, CM_DOC__shutdown},
    {"_at_exit", at_exit, METH_O, CM_DOC__at_exit},
    {"_after_fork", after_fork, METH_NOARGS, CM_DOC__after_fork},
    {NULL, NULL, 0, NULL},
};
