/* SPDX-License-Identifier: Apache-2.0 */
/* The pool that is current in a context, and from a request to the pool that serves it.
 */
#include "python/buffer/buffer_object.h"
#include "python/pool/pool_object.h"

static bool
can_serve(const cm_pool_object *self, cm_kind kind, unsigned flags, int device)
{
    const cm_pool_config *config = &self->config;
    return self->pool != NULL && config->kind == kind && config->device == device
           && (flags == config->flags || flags == cm_buffer_default_flags(kind));
}

cm_pool *
cm_pool_find_current(cm_state *state, cm_kind kind, unsigned flags, int device)
{
    PyObject *chain = cm_override_read(&state->current_pool);
    cm_pool *found = NULL;
    PyObject *object;
    PyObject *at = chain;
    while (found == NULL && (object = cm_override_step(&at)) != NULL) {
        const cm_pool_object *self = (const cm_pool_object *)(const void *)object;
        if (can_serve(self, kind, flags, device)) {
            found = cm_pool_hold(self->pool);
        }
    }
    Py_XDECREF(chain);
    return found;
}

cm_pool *
cm_pool_choose(cm_state *state, cm_pool_object *wanted, cm_kind kind, unsigned flags,
               int device)
{
    if (wanted != NULL) {
        if (cm_pool_object_check(wanted, kind, flags, device) < 0) {
            return NULL;
        }
        if (wanted->pool != NULL && cm_state_runtime(state) == NULL) {
            return NULL;
        }
        if (wanted->pool == NULL) { /* also when what was deferred just now closed it */
            PyErr_SetString(PyExc_ValueError, "the pool is closed");
            return NULL;
        }
        return cm_pool_hold(wanted->pool);
    }
    if (CM_UNLIKELY(!cm_override_is_empty(&state->current_pool))) {
        cm_pool *current = cm_pool_find_current(state, kind, flags, device);
        if (current != NULL || PyErr_Occurred()) {
            return current;
        }
    }
    cm_pool *pool = cm_state_pool(state, kind, flags, device);
    return pool == NULL ? NULL : cm_pool_hold(pool);
}
