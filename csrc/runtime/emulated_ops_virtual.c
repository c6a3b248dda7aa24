/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory mapped on demand: the operations. As on a real device none of them
 * makes or needs a context. */
#include "runtime/emulated_private.h"

enum { PHYSICAL_FLAGS = CM_PHYSICAL_RDMA | CM_PHYSICAL_SHAREABLE };

/* What stands before every call: a device at all, and no capture that forbids it. */
static int32_t
enter(cm_emulated *emulated)
{
    if (emulated->base.device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    cm_emulated_thread *self;
    int32_t code = cm_emulated_self(emulated, &self);
    if (code == 0 && cm_emulated_streams_forbid(emulated->streams, self)) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    return code;
}

static bool
is_device(const cm_runtime *rt, int device)
{
    return device >= 0 && device < rt->device_count;
}

int32_t
cm_emulated_op_physical_granularity(cm_runtime *rt, int device, unsigned flags,
                                    uint64_t *out)
{
    if (rt->device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    if (!is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if ((flags & ~(unsigned)PHYSICAL_FLAGS) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = CM_EMULATED_GRANULARITY;
    return 0;
}

int32_t
cm_emulated_op_physical_create(cm_runtime *rt, uint64_t nbytes, int device,
                               unsigned flags, uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    if (code == 0) {
        code = !is_device(rt, device)
                   ? CM_CUDA_INVALID_DEVICE
                   : cm_emulated_streams_fault(emulated->streams, device);
    }
    if (code == 0 && (flags & ~(unsigned)PHYSICAL_FLAGS) != 0) {
        code = CM_CUDA_INVALID_VALUE;
    }
    return code != 0 ? code
                     : cm_emulated_memory_create_physical(emulated->memory, nbytes,
                                                          device, out);
}

int32_t
cm_emulated_op_physical_release(cm_runtime *rt, uint64_t handle)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    return code != 0 ? code
                     : cm_emulated_memory_release_physical(emulated->memory, handle);
}

int32_t
cm_emulated_op_address_reserve(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    return code != 0 ? code : cm_emulated_memory_reserve(emulated->memory, nbytes, out);
}

int32_t
cm_emulated_op_address_free(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    return code != 0 ? code
                     : cm_emulated_memory_unreserve(emulated->memory, address, nbytes);
}

int32_t
cm_emulated_op_address_map(cm_runtime *rt, cm_address address, uint64_t nbytes,
                           uint64_t handle)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    return code != 0
               ? code
               : cm_emulated_memory_map(emulated->memory, address, nbytes, handle);
}

int32_t
cm_emulated_op_address_unmap(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    return code != 0 ? code
                     : cm_emulated_memory_unmap(emulated->memory, address, nbytes);
}

int32_t
cm_emulated_op_address_set_access(cm_runtime *rt, cm_address address, uint64_t nbytes,
                                  const int *devices, int device_count)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    int32_t code = enter(emulated);
    if (code == 0 && (devices == NULL || device_count <= 0)) {
        code = CM_CUDA_INVALID_VALUE;
    }
    uint64_t mask = 0;
    for (int i = 0; code == 0 && i < device_count; i++) {
        code = is_device(rt, devices[i]) ? 0 : CM_CUDA_INVALID_DEVICE;
        mask |= code == 0 ? UINT64_C(1) << devices[i] : 0;
    }
    return code != 0
               ? code
               : cm_emulated_memory_set_access(emulated->memory, address, nbytes, mask);
}
