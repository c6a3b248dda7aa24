/* SPDX-License-Identifier: Apache-2.0 */
/* Drops Python references on behalf of threads that do not have the GIL.
 *
 * A copy keeps its source and target alive. When it ends, the thread that notices is
 * one of the engine's, which does not have the GIL and must not wait for it. So the
 * thread puts the reference into a list. Whoever holds the GIL next drops it: the
 * interpreter's main thread, which Py_AddPendingCall() asks to do so, or the next call
 * into cumem, whichever comes first.
 *
 * Example: `cumem.copy(dst, np.arange(10), stream=s)`. The array has no other
 * reference. A thread of the engine sees the copy end and calls cm_deferred_add(); the
 * next call of cumem (cm_state_runtime()) frees the array. */
#include <stdlib.h>

#include "python/core/errors.h"

cm_deferred *
cm_deferred_new(cm_state *state, PyObject *object)
{
    cm_deferred *deferred = calloc(1, sizeof(*deferred));
    if (deferred == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    cm_list_init(&deferred->node);
    deferred->state = state;
    deferred->object = Py_XNewRef(object);
    atomic_init(&deferred->refs, 1);
    return deferred;
}

cm_deferred *
cm_deferred_share(cm_deferred *deferred)
{
    atomic_fetch_add_explicit(&deferred->refs, 1, memory_order_relaxed);
    return deferred;
}

static bool
is_last(cm_deferred *deferred)
{
    return deferred->then != NULL
           || atomic_fetch_sub_explicit(&deferred->refs, 1, memory_order_acq_rel) == 1;
}

static void
drop(cm_deferred *deferred)
{
    if (deferred->then != NULL) {
        deferred->then(deferred);
        return;
    }
    PyObject *object = deferred->object;
    free(deferred);
    Py_XDECREF(object);
}

void
cm_deferred_end(cm_deferred *deferred)
{
    if (is_last(deferred)) {
        cm_kept_error kept = cm_error_keep();
        drop(deferred);
        cm_error_restore(kept);
    }
}

static int
defer_pending(void *state)
{
    cm_state_drop_deferred(state);
    return 0;
}

void
cm_deferred_add(void *argument)
{
    cm_deferred *deferred = argument;
    cm_state *state = deferred->state;
    if (!is_last(deferred)) {
        return;
    }
    if (state == NULL || !Py_IsInitialized()) {
        /* The interpreter is gone, and what the reference kept belongs to the system
         * now. */
        return;
    }
    cm_mutex_lock(&state->deferred_lock);
    cm_list_push_back(&state->deferred, &deferred->node);
    atomic_store_explicit(&state->has_deferred, true, memory_order_relaxed);
    bool call = !state->call_pending;
    state->call_pending = true;
    cm_mutex_unlock(&state->deferred_lock);
    if (call && Py_AddPendingCall(defer_pending, state) < 0) {
        /* the queue is full: the next reference tries again, and the next call into
         * cumem drops them */
        cm_mutex_lock(&state->deferred_lock);
        state->call_pending = false;
        cm_mutex_unlock(&state->deferred_lock);
    }
}

void
cm_state_drop_deferred(cm_state *state)
{
    cm_list dropped;
    if (state->runtime != NULL && cm_runtime_is_forked(state->runtime)) {
        return; /* the thread that deferred them may have held the lock at the fork */
    }
    cm_list_init(&dropped);
    cm_mutex_lock(&state->deferred_lock);
    cm_list_splice_back(&dropped, &state->deferred);
    atomic_store_explicit(&state->has_deferred, false, memory_order_relaxed);
    state->call_pending = false;
    cm_mutex_unlock(&state->deferred_lock);
    cm_state_enter(state); /* dropping them may run Python code */
    for (cm_list *node = cm_list_pop_front(&dropped); node != NULL;
         node = cm_list_pop_front(&dropped)) {
        drop(CM_LIST_ENTRY(node, cm_deferred, node));
    }
    cm_state_leave(state);
}

void
cm_state_drop_own(cm_state *state)
{
    if (!atomic_load_explicit(&state->has_deferred, memory_order_relaxed)) {
        return;
    }
    cm_kept_error kept = cm_error_keep();
    cm_state_drop_deferred(state);
    cm_error_restore(kept);
}
