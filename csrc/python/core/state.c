/* SPDX-License-Identifier: Apache-2.0 */
/* Hands the process's runtime, engine and default pools out to the rest of python/, and
 * opens each of them when it is first asked for. It also finds the current device. */
#include "python/core/state.h"

#include "python/core/errors.h"

/* How many structs of ended buffers are kept for new ones. On a build without the GIL
 * their list would need a lock, which costs more than the list saves. */
#ifdef Py_GIL_DISABLED
enum { FREE_ROOT_COUNT = 0 };
#else
enum { FREE_ROOT_COUNT = 64 };
#endif

void
cm_state_init(cm_state *state)
{
    cm_list_init(&state->storages);
    cm_list_init(&state->device_waits);
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        state->free_inline[kind].room = FREE_ROOT_COUNT;
    }
    state->transfer_total = 1;
    cm_list_init(&state->deferred);
}

/* -- the current device ------------------------------------------------------------------ */

/* The device that set_current_device() chose in this thread, with the module and the
 * generation for which it counts, so that a shutdown ends the choice in all threads at
 * once. */
typedef struct device_choice {
    const cm_state *state; /* only compared; NULL if there is no choice */
    uint64_t generation;
    int device;
} device_choice;

static _Thread_local device_choice choice_of_thread;

void
cm_state_choose_device(const cm_state *state, int device)
{
    choice_of_thread =
        (device_choice){device < 0 ? NULL : state, state->generation, device};
}

/* Return the device of the innermost block of this context, or -1 if there is no block,
 * or if this runtime lacks the device, which may be so after a shutdown. */
static int
find_entered(const cm_state *state)
{
    PyObject *chain = cm_override_read(&state->entered_device);
    PyObject *at = chain;
    if (chain == NULL) {
        PyErr_Clear(); /* there is no memory to look it up */
    }
    PyObject *index = cm_override_step(&at);
    long device = index == NULL ? -1 : PyLong_AsLong(index);
    if (device < 0) {
        PyErr_Clear(); /* it is not the number of a device */
    }
    Py_XDECREF(chain);
    bool exists = state->runtime != NULL && device < state->runtime->device_count;
    return exists ? (int)device : -1;
}

int
cm_state_own_device(const cm_state *state)
{
    int device = -1;
    if (cm_state_has_blocks(state) && !cm_override_is_empty(&state->entered_device)) {
        device = find_entered(state);
    }
    const device_choice *choice = &choice_of_thread;
    if (device < 0 && choice->state == state
        && choice->generation == state->generation) {
        device = choice->device;
    }
    return device;
}

/* This asks CUDA each time, since any library may change the answer at any time. A
 * failure is ignored, since the caller's next call will fail in the same way and report
 * it. */
int
cm_state_ask_device(const cm_state *state)
{
    int device = cm_state_own_device(state);
    if (device < 0 && state->runtime != NULL && !cm_runtime_is_forked(state->runtime)
        && cm_runtime_wake_if_started(state->runtime)) {
        cm_ignore(cm_rt_context_device(state->runtime, &device));
    }
    return device < 0 ? 0 : device;
}

/* Report failures of transfers to the unraisable hook, if nobody has seen them through
 * the transfers' handles. */
static void
report_unread(cm_state *state)
{
    while (state->engine != NULL) {
        cm_status status = cm_engine_take_unread(state->engine);
        if (cm_is_ok(status)) {
            return;
        }
        cm_py_report(state, status, (PyObject *)state->transfer_type);
    }
}

cm_runtime *
cm_state_runtime(cm_state *state)
{
    CM_NEEDS_GIL();
    while (CM_UNLIKELY(state->runtime == NULL)) {
        if (state->exiting) {
            PyErr_SetString(
                PyExc_RuntimeError,
                "cumem cannot be used any more: the interpreter is exiting");
            return NULL;
        }
        if (state->open_runtime(state) < 0) {
            return NULL;
        }
    }
    if (CM_UNLIKELY(cm_runtime_is_forked(state->runtime))) {
        if (state->leave_parent(state) < 0) {
            return NULL;
        }
        /* leave_parent() may have left no runtime, and then this opens another one. */
        return cm_state_runtime(state);
    }
    if (CM_UNLIKELY(!cm_state_is_quiet(state))) {
        cm_state_enter(state); /* what is dropped or reported may be Python code */
        cm_state_drop_deferred(state);
        report_unread(state);
        cm_state_leave(state);
    }
    uint64_t contexts =
        atomic_load_explicit(&state->runtime->context_count, memory_order_relaxed);
    if (CM_UNLIKELY(contexts != state->context_count)) {
        cm_state_enter(state);
        state->admit_peers(state);
        cm_state_leave(state);
    }
    return state->runtime;
}

static cm_pool *
get_pool(cm_state *state, cm_pool **slot, cm_kind kind, unsigned flags, int device)
{
    state->wakes = true; /* asking for memory counts as use */
    cm_runtime *runtime = cm_state_runtime(state);
    state->wakes = false;
    if (runtime == NULL) {
        return NULL;
    }
    if (CM_UNLIKELY(*slot == NULL)) {
        bool is_staging = slot >= state->pools + CM_STAGING_POOLS;
        cm_pool_config config = {.kind = kind,
                                 .device = device,
                                 .flags = flags,
                                 .fence_limit_nbytes = CM_FENCE_LIMIT_NBYTES,
                                 .numa_node = -1,
                                 .serial = ++state->pool_serial,
                                 .number = is_staging ? CM_NUMBER_STAGING : 0,
                                 .is_staging = is_staging,
                                 .budget = cm_limits_budget(state, kind, device)};
        cm_pool *pool = NULL;
        cm_status status = cm_pool_create(runtime, &config, &pool);
        if (!cm_is_ok(status)) {
            cm_py_raise(state, status, "while making a pool");
            return NULL;
        }
        *slot = pool;
    }
    return *slot;
}

cm_pool *
cm_state_pool(cm_state *state, cm_kind kind, unsigned flags, int device)
{
    return get_pool(state, cm_state_pool_slot(state, kind, flags, device), kind, flags,
                    device);
}

/* Give the engine its pool of one kind, at `place` among its pools. The engine has
 * pools of its own, so that memory which copies hold is counted separately. Returns
 * false with an exception if it fails. */
static bool
set_engine_pool(cm_state *state, int place, cm_kind kind, unsigned flags, int device)
{
    bool *has = &state->engine_has_pool[place + 1];
    if (CM_LIKELY(*has)) {
        return true;
    }
    cm_pool **slot = &state->pools[CM_STAGING_POOLS + 1 + place];
    cm_pool *lender = cm_state_pool(state, kind, flags, device);
    cm_pool *pool = lender == NULL ? NULL : get_pool(state, slot, kind, flags, device);
    if (pool != NULL) {
        cm_engine_set_pool(state->engine, place, pool, lender);
        *has = true;
    }
    return pool != NULL;
}

cm_engine *
cm_state_engine(cm_state *state, int device)
{
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    if (state->engine == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "cumem cannot copy any more: the interpreter is exiting");
        return NULL;
    }
    cm_runtime_bind(state->runtime); /* its threads belong to this process */
    /* Portable memory is pinned for every device, so one pool stages for all. It
     * belongs to the first device that is used, since perhaps no other device will ever
     * get a context. */
    bool has_pools =
        device < 0 || device >= CM_MAX_DEVICES
        || (set_engine_pool(state, -1, CM_KIND_PINNED, CM_HOST_ALLOC_PORTABLE, device)
            && set_engine_pool(state, device, CM_KIND_DEVICE, 0, device));
    return has_pools ? state->engine : NULL;
}

void
cm_state_set_last_save(cm_state *state, cm_ticket *ticket)
{
    cm_ticket *before = state->last_save;
    state->last_save = ticket == NULL ? NULL : cm_ticket_hold(ticket);
    if (before != NULL) {
        cm_ticket_release(before);
    }
}
