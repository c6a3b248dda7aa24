/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's memory without an address: pieces of the store, counted against
 * the device's size from the handle's making until neither it nor a place is left. */
#include <stdlib.h>

#include "runtime/emulated_ranges.h"

static void
give_back_locked(cm_emulated_memory *memory, int device, uint64_t nbytes)
{
    memory->used_nbytes[device] -= nbytes;
    memory->live_nbytes -= nbytes;
    memory->physical_count--;
}

void
cm_emulated_physical_settle_locked(cm_emulated_memory *memory,
                                   cm_emulated_physical *physical)
{
    if (physical->is_released && physical->places == 0) {
        cm_emulated_store_drop(&memory->store, physical->offset, physical->nbytes);
        give_back_locked(memory, physical->device, physical->nbytes);
        free(physical);
    }
}

int32_t
cm_emulated_memory_create_physical(cm_emulated_memory *memory, uint64_t nbytes,
                                   int device, uint64_t *out)
{
    if (nbytes == 0 || !cm_emulated_is_granular(nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_physical *physical = calloc(1, sizeof(*physical));
    if (physical == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    physical->device = device;
    physical->nbytes = nbytes;
    cm_mutex_lock(&memory->lock);
    bool taken = nbytes <= memory->limit_nbytes - memory->used_nbytes[device]
                 && cm_emulated_store_grow(&memory->store, nbytes, &physical->offset);
    if (taken) {
        memory->used_nbytes[device] += nbytes;
        memory->live_nbytes += nbytes;
        memory->physical_count++;
    }
    cm_mutex_unlock(&memory->lock);
    bool good =
        taken && cm_emulated_store_poison(&memory->store, physical->offset, nbytes);
    cm_mutex_lock(&memory->lock);
    if (good) {
        uint64_t handle = 0x50000000 + 8 * memory->next_physical;
        good = cm_emulated_handles_add(&memory->physicals, handle, physical);
        memory->next_physical += good;
        *out = good ? handle : *out;
    }
    if (taken && !good) {
        cm_emulated_store_drop(&memory->store, physical->offset, nbytes);
        give_back_locked(memory, device, nbytes);
    }
    cm_mutex_unlock(&memory->lock);
    if (!good) {
        free(physical);
    }
    return good ? 0 : CM_CUDA_OUT_OF_MEMORY;
}

int32_t
cm_emulated_memory_release_physical(cm_emulated_memory *memory, uint64_t handle)
{
    cm_mutex_lock(&memory->lock);
    cm_emulated_physical *physical =
        cm_emulated_handles_remove(&memory->physicals, handle);
    if (physical != NULL) {
        physical->is_released = true;
        cm_emulated_physical_settle_locked(memory, physical);
    }
    cm_mutex_unlock(&memory->lock);
    return physical != NULL ? 0 : CM_CUDA_INVALID_VALUE;
}

void
cm_emulated_physical_reset_locked(cm_emulated_memory *memory, int device)
{
    size_t kept = 0;
    for (size_t i = 0; i < memory->physicals.count; i++) {
        cm_emulated_physical *physical = memory->physicals.items[i].object;
        if (physical->device == device) {
            physical->is_released = true;
            cm_emulated_physical_settle_locked(memory, physical);
        }
        else {
            memory->physicals.items[kept++] = memory->physicals.items[i];
        }
    }
    memory->physicals.count = kept;
}
