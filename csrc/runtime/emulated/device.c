/* SPDX-License-Identifier: Apache-2.0 */
/* Versions, devices and contexts of the emulated device. A context is its device's
 * index
 * + 1. Even calls that name a handle make a context for a thread that has none, as
 * CUDA's do. */
#include <stdio.h>

#include "runtime/emulated/memory.h"
#include "runtime/emulated/stream.h"

int32_t
cm_emulated_op_driver_version(cm_runtime *rt, int *out)
{
    *out = rt->driver_version;
    return 0;
}

int32_t
cm_emulated_op_runtime_version(cm_runtime *rt, int *out)
{
    *out = rt->runtime_version;
    return 0;
}

int32_t
cm_emulated_op_device_count(cm_runtime *rt, int *out)
{
    if (rt->device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    *out = rt->device_count;
    return 0;
}

int32_t
cm_emulated_op_device_set(cm_runtime *rt, int device)
{
    if (!cm_emulated_is_device(rt, device)) {
        return rt->device_count == 0 ? CM_CUDA_NO_DEVICE : CM_CUDA_INVALID_DEVICE;
    }
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_self(rt, &self));
    self->device = device;
    return 0;
}

int32_t
cm_emulated_op_context_get(cm_runtime *rt, uint64_t *out)
{
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_self(rt, &self));
    *out = (uint64_t)(self->device + 1);
    return 0;
}

int32_t
cm_emulated_op_context_set(cm_runtime *rt, uint64_t context)
{
    if (context > (uint64_t)rt->device_count) {
        return CM_CUDA_DEVICE_UNINITIALIZED;
    }
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_self(rt, &self));
    self->device = (int)context - 1;
    return 0;
}

int32_t
cm_emulated_op_device_describe(cm_runtime *rt, int device, cm_device_info *out)
{
    if (!cm_emulated_is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    cm_device_info info = {
        .name = "cumem emulated device",
        .uuid = "cumem-emulated",
        .total_nbytes = cm_emulated_of(rt)->config.memory_nbytes,
    };
    info.uuid[15] = (unsigned char)device;
    (void)snprintf(info.pci_bus_id, sizeof(info.pci_bus_id), "0000:%02x:00.0",
                   device + 1);
    *out = info;
    return 0;
}

/* By CUDA's number; what a recent data-centre GPU says, but for what is not emulated.
 */
static const struct {
    int number;
    int value;
} attributes[] = {
    {75, 9},       /* compute_major */
    {76, 0},       /* compute_minor */
    {16, 8},       /* multiprocessor_count */
    {40, 2},       /* copy_engine_count */
    {41, 1},       /* unified_addressing */
    {19, 1},       /* can_map_host_memory */
    {83, 1},       /* managed_memory */
    {89, 1},       /* concurrent_managed_access */
    {88, 0},       /* pageable_memory_access */
    {101, 0},      /* direct_managed_from_host */
    {99, 1},       /* host_register_supported */
    {113, 1},      /* host_register_read_only */
    {115, 1},      /* memory_pools_supported */
    {38, 4 << 20}, /* l2_cache_nbytes */
    {18, 0},       /* integrated */
    {102, 1},      /* virtual_memory_management */
    {103, 1},      /* virtual_memory_shareable */
    {110, 1},      /* virtual_memory_rdma */
    {134, 0},      /* host_numa_id */
};

int32_t
cm_emulated_op_device_attribute(cm_runtime *rt, int attribute, int device, int *out)
{
    if (!cm_emulated_is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
        if (attributes[i].number == attribute) {
            *out = attributes[i].value;
            return 0;
        }
    }
    return CM_CUDA_INVALID_VALUE;
}

int32_t
cm_emulated_op_device_synchronize(cm_runtime *rt)
{
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    return cm_emulated_wait_device(cm_emulated_of(rt), self->device);
}

int32_t
cm_emulated_op_device_reset(cm_runtime *rt)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    int device = self->device;
    int32_t fault = cm_emulated_wait_device(emulated, device);
    (void)fault; /* a failed device is just what a reset is for */
    cm_emulated_streams_reset(emulated, device);
    cm_emulated_modules_reset(emulated, device);
    cm_emulated_memory_reset(emulated, device);
    self->device = -1;
    return 0;
}
