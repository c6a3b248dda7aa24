/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation, registration, attributes and prefetch on the emulated device. */
#include <stdlib.h>

#include "runtime/emulated_private.h"

enum {
    HOST_FLAGS = CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED
        | CM_HOST_ALLOC_WRITE_COMBINED,
    REGISTER_FLAGS = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED | CM_REGISTER_IO_MEMORY
        | CM_REGISTER_READ_ONLY,
};

static int32_t
alloc(cm_runtime *rt, cm_emulated_kind kind, unsigned flags, uint64_t nbytes,
      cm_emulated_place *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_healthy(emulated, &self);
    return code != 0 ? code
                     : cm_emulated_memory_alloc(emulated->memory, kind, self->device,
                                                flags, nbytes, out);
}

static int32_t
release(cm_runtime *rt, uint64_t address, unsigned kinds)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    if (code != 0 || address == 0) {
        return code; /* freeing nothing is allowed */
    }
    return cm_emulated_memory_free(emulated->memory, address, kinds);
}

int32_t
cm_emulated_op_host_alloc(cm_runtime *rt, uint64_t nbytes, unsigned flags, void **out)
{
    if ((flags & ~(unsigned)HOST_FLAGS) != 0 || nbytes == 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_place place;
    int32_t code = alloc(rt, CM_EMULATED_HOST, flags, nbytes, &place);
    if (code == 0) {
        *out = place.host;
    }
    return code;
}

int32_t
cm_emulated_op_host_free(cm_runtime *rt, void *host)
{
    return release(rt, (uint64_t)(uintptr_t)host, 1u << CM_EMULATED_HOST);
}

int32_t
cm_emulated_op_device_alloc(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    cm_emulated_place place = {.address = 0};
    if (nbytes == 0) {
        cm_emulated_thread *self;
        int32_t code = cm_emulated_enter_healthy(cm_emulated_of(rt), &self);
        if (code == 0) {
            *out = 0;
        }
        return code;
    }
    int32_t code = alloc(rt, CM_EMULATED_DEVICE, 0, nbytes, &place);
    if (code == 0) {
        *out = place.address;
    }
    return code;
}

int32_t
cm_emulated_op_managed_alloc(cm_runtime *rt, uint64_t nbytes, unsigned flags,
                             cm_address *out)
{
    if (nbytes == 0 || (flags != CM_MANAGED_GLOBAL && flags != CM_MANAGED_HOST)) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_place place;
    int32_t code = alloc(rt, CM_EMULATED_MANAGED, flags, nbytes, &place);
    if (code == 0) {
        *out = place.address;
    }
    return code;
}

int32_t
cm_emulated_op_device_free(cm_runtime *rt, cm_address address)
{
    return release(rt, address,
                   (1u << CM_EMULATED_DEVICE) | (1u << CM_EMULATED_MANAGED));
}

int32_t
cm_emulated_op_host_register(cm_runtime *rt, void *host, uint64_t nbytes,
                             unsigned flags)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_healthy(emulated, &self);
    if (code != 0) {
        return code;
    }
    if ((flags & ~(unsigned)REGISTER_FLAGS) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    if ((flags & CM_REGISTER_IO_MEMORY) != 0) {
        return CM_CUDA_NOT_SUPPORTED; /* no memory here belongs to another device */
    }
    return cm_emulated_memory_register(emulated->memory, self->device, host, nbytes,
                                       flags);
}

int32_t
cm_emulated_op_host_unregister(cm_runtime *rt, void *host)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    if (code != 0) {
        return code;
    }
    return host == NULL ? CM_CUDA_INVALID_VALUE
                        : cm_emulated_memory_unregister(emulated->memory, host);
}

int32_t
cm_emulated_op_host_device_address(cm_runtime *rt, void *host, cm_address *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code != 0) {
        return code;
    }
    cm_emulated_place place;
    uint64_t address = (uint64_t)(uintptr_t)host;
    if (cm_emulated_memory_find(emulated->memory, address, 1, &place)
            != CM_EMULATED_INSIDE
        || place.host != host
        || (place.kind != CM_EMULATED_HOST && place.kind != CM_EMULATED_REGISTERED)) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = place.address;
    return 0;
}

int32_t
cm_emulated_op_pointer_attributes(cm_runtime *rt, cm_address address,
                                  cm_pointer_info *out)
{
    static const cm_kind kinds[] = {
        [CM_EMULATED_DEVICE] = CM_KIND_DEVICE,
        [CM_EMULATED_MANAGED] = CM_KIND_MANAGED,
        [CM_EMULATED_HOST] = CM_KIND_PINNED,
        [CM_EMULATED_REGISTERED] = CM_KIND_PINNED,
    };
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter(cm_emulated_of(rt), &self);
    if (code != 0) {
        return code;
    }
    cm_emulated_place place;
    if (cm_emulated_memory_find(cm_emulated_of(rt)->memory, address, 1, &place)
        != CM_EMULATED_INSIDE) {
        *out = (cm_pointer_info){
            .kind = CM_KIND_PAGEABLE,
            .device = -1,
            .host_address = (void *)(uintptr_t)address,
        };
        return 0;
    }
    bool in_reach =
        place.kind != CM_EMULATED_DEVICE || (place.access >> self->device & 1) != 0;
    *out = (cm_pointer_info){
        .kind = kinds[place.kind],
        .device = place.device,
        .device_address = in_reach ? place.address : 0,
        .host_address = place.host,
    };
    return 0;
}

int32_t
cm_emulated_op_pointer_access(cm_runtime *rt, cm_address address, int *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    cm_emulated_place place;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code == 0
        && cm_emulated_memory_find(emulated->memory, address, 1, &place)
               != CM_EMULATED_INSIDE) {
        code = CM_CUDA_INVALID_VALUE;
    }
    if (code == 0) {
        bool may = (place.access >> self->device & 1) != 0;
        *out = may ? CM_ACCESS_READ | CM_ACCESS_WRITE : 0;
    }
    return code;
}

typedef struct prefetch {
    cm_emulated_job base; /* first */
    cm_address address;
    uint64_t nbytes;
    int location;
} prefetch;

static int32_t
prefetch_run(void *context, cm_emulated_job *base)
{
    const prefetch *job = (const prefetch *)base;
    int32_t code = cm_emulated_memory_migrate(((cm_emulated *)context)->memory,
                                              job->address, job->nbytes, job->location);
    return code == 0 ? 0 : CM_CUDA_ILLEGAL_ADDRESS;
}

static void
prefetch_drop(cm_emulated_job *base)
{
    free(base);
}

int32_t
cm_emulated_op_prefetch_async(cm_runtime *rt, cm_address address, uint64_t nbytes,
                              int device, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    cm_emulated_stream_info info;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code == 0) {
        code = cm_emulated_streams_read(emulated->streams, self, stream, &info);
    }
    if (code == 0 && (device < CM_HOST_LOCATION || device >= rt->device_count)) {
        code = CM_CUDA_INVALID_DEVICE;
    }
    if (code == 0) {
        code = cm_emulated_memory_prefetch(emulated->memory, address, nbytes, device);
    }
    if (code != 0) {
        return code;
    }
    prefetch *job = malloc(sizeof(*job));
    if (job == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *job = (prefetch){{prefetch_run, prefetch_drop}, address, nbytes, device};
    return cm_emulated_streams_submit(emulated->streams, self, stream, &job->base,
                                      false);
}

int32_t
cm_emulated_op_prefetch_location(cm_runtime *rt, cm_address address, uint64_t nbytes,
                                 int *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter(emulated, &self);
    return code != 0
               ? code
               : cm_emulated_memory_prefetched(emulated->memory, address, nbytes, out);
}
