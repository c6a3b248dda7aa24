/* SPDX-License-Identifier: Apache-2.0 */
/* When a device has got a context, the memory of all pools is opened to it. */
#include "python/core/errors.h"
#include "python/pool/pool_object.h"

void
cm_pools_admit_peers(cm_state *state)
{
    cm_pool_entry *entries;
    size_t count;
    state->context_count = atomic_load(&state->runtime->context_count);
    if (state->runtime->device_count < 2) {
        return;
    }
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        PyErr_WriteUnraisable(NULL);
        return;
    }
    cm_status first = cm_ok();
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count; i++) {
        cm_status status = cm_pool_admit_peers(entries[i].pool);
        first = cm_is_ok(first) ? status : first;
    }
    Py_END_ALLOW_THREADS
    cm_pools_give_all(state, entries, count);
    if (!cm_is_ok(first)) {
        cm_py_report(state, first, NULL); /* the call that noticed is about another
                                             thing */
    }
}
