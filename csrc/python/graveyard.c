/* SPDX-License-Identifier: Apache-2.0 */
/* Python references that were dropped by threads without the GIL, buried later. */
#include <stdlib.h>

#include "python/state.h"

cm_grave *
cm_grave_new(cm_state *state, PyObject *object)
{
    cm_grave *grave = calloc(1, sizeof(*grave));
    if (grave == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    cm_list_init(&grave->node);
    grave->state = state;
    grave->object = Py_XNewRef(object);
    atomic_init(&grave->refs, 1);
    return grave;
}

cm_grave *
cm_grave_share(cm_grave *grave)
{
    atomic_fetch_add_explicit(&grave->refs, 1, memory_order_relaxed);
    return grave;
}

static bool
is_last(cm_grave *grave)
{
    return grave->embedded
           || atomic_fetch_sub_explicit(&grave->refs, 1, memory_order_acq_rel) == 1;
}

void
cm_grave_end(cm_grave *grave)
{
    if (!is_last(grave)) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(grave->object);
    free(grave);
    PyErr_Restore(type, value, traceback);
}

static int
bury_pending(void *state)
{
    cm_state_bury_dead(state);
    return 0;
}

void
cm_grave_bury(void *argument)
{
    cm_grave *grave = argument;
    cm_state *state = grave->state;
    if (!is_last(grave)) {
        return;
    }
    if (state == NULL || !Py_IsInitialized()) {
        return; /* the interpreter is gone: what it kept is the system's now */
    }
    cm_mutex_lock(&state->graveyard_lock);
    cm_list_push_back(&state->graveyard, &grave->node);
    atomic_store_explicit(&state->has_dead, true, memory_order_relaxed);
    bool call = !state->burial_pending;
    state->burial_pending = true;
    cm_mutex_unlock(&state->graveyard_lock);
    if (call && Py_AddPendingCall(bury_pending, state) < 0) {
        /* the queue is full: the next grave tries again, the next call buries */
        cm_mutex_lock(&state->graveyard_lock);
        state->burial_pending = false;
        cm_mutex_unlock(&state->graveyard_lock);
    }
}

void
cm_state_bury_dead(cm_state *state)
{
    cm_list dead;
    if (state->runtime != NULL && cm_runtime_is_forked(state->runtime)) {
        return; /* who buried them may have held the lock */
    }
    cm_list_init(&dead);
    cm_mutex_lock(&state->graveyard_lock);
    cm_list_splice_back(&dead, &state->graveyard);
    atomic_store_explicit(&state->has_dead, false, memory_order_relaxed);
    state->burial_pending = false;
    cm_mutex_unlock(&state->graveyard_lock);
    for (cm_list *node = cm_list_pop_front(&dead); node != NULL;
         node = cm_list_pop_front(&dead)) {
        cm_grave *grave = CM_LIST_ENTRY(node, cm_grave, node);
        PyObject *object = grave->object;
        void (*then)(void *) = grave->then;
        void *then_argument = grave->argument;
        if (!grave->embedded) {
            free(grave);
        }
        if (then != NULL) {
            then(then_argument);
        }
        Py_XDECREF(object);
    }
}

void
cm_state_bury_own(cm_state *state)
{
    if (!atomic_load_explicit(&state->has_dead, memory_order_relaxed)) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    cm_state_bury_dead(state);
    PyErr_Restore(type, value, traceback);
}
