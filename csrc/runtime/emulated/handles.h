/* SPDX-License-Identifier: Apache-2.0 */
/* From handles, as callers know them, to objects: a sorted array. A handle that is not
 * in it is stale or made up. Knows nothing of what the objects are. No locks of its
 * own. */
#ifndef CM_RUNTIME_EMULATED_HANDLES_H
#define CM_RUNTIME_EMULATED_HANDLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_emulated_handle {
    uint64_t handle;
    void *object; /* borrowed */
} cm_emulated_handle;

typedef struct cm_emulated_handles {
    cm_emulated_handle *items; /* owned; sorted by handle */
    size_t count;
    size_t capacity;
} cm_emulated_handles;

/* False when out of memory. The handle must be new. */
bool cm_emulated_handles_add(cm_emulated_handles *handles, uint64_t handle,
                             void *object);
/* NULL for a handle that is not there. */
void *cm_emulated_handles_find(const cm_emulated_handles *handles, uint64_t handle);
void *cm_emulated_handles_remove(cm_emulated_handles *handles, uint64_t handle);
void cm_emulated_handles_fini(cm_emulated_handles *handles);

#endif
