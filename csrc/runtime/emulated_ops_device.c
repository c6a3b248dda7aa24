/* SPDX-License-Identifier: Apache-2.0 */
/* Versions, devices, contexts and the state of the calling thread on the emulated
 * device. A context is its device's index + 1. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/emulated_private.h"

/* A record of a thread that has gone, out of the list; NULL: none. The key has no
 * destructor for it, which could run while the device is closed. */
static cm_emulated_thread *
take_left(cm_emulated *emulated, pid_t self)
{
    pid_t process = getpid();
    cm_mutex_lock(&emulated->lock);
    cm_emulated_thread **at = &emulated->threads;
    while (*at != NULL && (*at)->id != self /* who had the number before has gone */
           && (syscall(SYS_tgkill, process, (*at)->id, 0) == 0 || errno != ESRCH)) {
        at = &(*at)->next;
    }
    cm_emulated_thread *left = *at;
    if (left != NULL) {
        *at = left->next;
    }
    cm_mutex_unlock(&emulated->lock);
    return left;
}

/* Last, so that the next search finds others before it. */
static void
put_last(cm_emulated *emulated, cm_emulated_thread *thread)
{
    thread->next = NULL;
    cm_mutex_lock(&emulated->lock);
    cm_emulated_thread **at = &emulated->threads;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = thread;
    cm_mutex_unlock(&emulated->lock);
}

/* Called once by each thread. */
CM_COLD static int32_t
make_record(cm_emulated *emulated, cm_emulated_thread **out)
{
    pid_t id = (pid_t)syscall(SYS_gettid);
    cm_emulated_thread *self = take_left(emulated, id);
    if (self != NULL && !cm_emulated_streams_leave(emulated->streams, self)) {
        put_last(emulated, self);
        self = NULL;
    }
    if (self == NULL) {
        self = calloc(1, sizeof(*self));
    }
    if (self == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    if (pthread_setspecific(emulated->key, self) != 0) {
        free(self);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    self->id = id;
    self->device = -1;
    self->capture_mode = 0;
    put_last(emulated, self);
    *out = self;
    return 0;
}

int32_t
cm_emulated_self(cm_emulated *emulated, cm_emulated_thread **out)
{
    cm_emulated_thread *self = pthread_getspecific(emulated->key);
    if (CM_UNLIKELY(self == NULL)) {
        return make_record(emulated, out);
    }
    *out = self;
    return 0;
}

int32_t
cm_emulated_enter(cm_emulated *emulated, cm_emulated_thread **out)
{
    if (emulated->base.device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    int32_t code = cm_emulated_self(emulated, out);
    if (code == 0 && (*out)->device < 0) {
        (*out)->device = 0;
    }
    return code;
}

int32_t
cm_emulated_enter_unsafe(cm_emulated *emulated, cm_emulated_thread **out)
{
    int32_t code = cm_emulated_enter(emulated, out);
    if (code == 0 && cm_emulated_streams_forbid(emulated->streams, *out)) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    return code;
}

int32_t
cm_emulated_enter_healthy(cm_emulated *emulated, cm_emulated_thread **out)
{
    int32_t code = cm_emulated_enter_unsafe(emulated, out);
    return code != 0 ? code
                     : cm_emulated_streams_fault(emulated->streams, (*out)->device);
}

static bool
is_device(const cm_runtime *rt, int device)
{
    return device >= 0 && device < rt->device_count;
}

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
    if (!is_device(rt, device)) {
        return rt->device_count == 0 ? CM_CUDA_NO_DEVICE : CM_CUDA_INVALID_DEVICE;
    }
    cm_emulated_thread *self;
    int32_t code = cm_emulated_self(cm_emulated_of(rt), &self);
    if (code == 0) {
        self->device = device;
    }
    return code;
}

int32_t
cm_emulated_op_context_get(cm_runtime *rt, uint64_t *out)
{
    cm_emulated_thread *self;
    int32_t code = cm_emulated_self(cm_emulated_of(rt), &self);
    if (code == 0) {
        *out = (uint64_t)(self->device + 1);
    }
    return code;
}

int32_t
cm_emulated_op_context_set(cm_runtime *rt, uint64_t context)
{
    if (context > (uint64_t)rt->device_count) {
        return CM_CUDA_DEVICE_UNINITIALIZED;
    }
    cm_emulated_thread *self;
    int32_t code = cm_emulated_self(cm_emulated_of(rt), &self);
    if (code == 0) {
        self->device = (int)context - 1;
    }
    return code;
}

int32_t
cm_emulated_op_context_record_event(cm_runtime *rt, uint64_t event)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_self(emulated, &self);
    if (code != 0) {
        return code;
    }
    if (self->device < 0) {
        return CM_CUDA_DEVICE_UNINITIALIZED; /* a driver call: makes no context by
                                                itself */
    }
    return cm_emulated_events_record_device(emulated->streams, self->device, event);
}

int32_t
cm_emulated_op_device_describe(cm_runtime *rt, int device, cm_device_info *out)
{
    if (!is_device(rt, device)) {
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
    if (!is_device(rt, device)) {
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
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    return code != 0 ? code
                     : cm_emulated_streams_wait_device(emulated->streams, self->device);
}

int32_t
cm_emulated_op_device_reset(cm_runtime *rt)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    if (code != 0) {
        return code;
    }
    int device = self->device;
    int32_t fault = cm_emulated_streams_wait_device(emulated->streams, device);
    (void)fault; /* a failed device is just what a reset is for */
    cm_emulated_streams_reset(emulated->streams, device);
    cm_emulated_modules_reset(emulated, device);
    cm_emulated_memory_reset(emulated->memory, device);
    self->device = -1;
    return 0;
}

int32_t
cm_emulated_op_memory_info(cm_runtime *rt, uint64_t *free_nbytes,
                           uint64_t *total_nbytes)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code == 0) {
        uint64_t used = cm_emulated_memory_used(emulated->memory, self->device);
        *total_nbytes = emulated->config.memory_nbytes;
        *free_nbytes = *total_nbytes - used;
    }
    return code;
}

int32_t
cm_emulated_op_peer_can_access(cm_runtime *rt, int device, int peer, int *out)
{
    if (!is_device(rt, device) || !is_device(rt, peer)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    *out = device != peer && !cm_emulated_of(rt)->config.apart;
    return 0;
}

int32_t
cm_emulated_op_peer_enable(cm_runtime *rt, int peer)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    if (code != 0) {
        return code;
    }
    if (!is_device(rt, peer) || peer == self->device) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if (emulated->config.apart) {
        return CM_CUDA_PEER_UNSUPPORTED;
    }
    return cm_emulated_memory_enable_peer(emulated->memory, self->device, peer)
               ? 0
               : CM_CUDA_PEER_ENABLED;
}

int32_t
cm_emulated_op_capture_mode_exchange(cm_runtime *rt, int *mode)
{
    if (*mode < 0 || *mode > CM_CAPTURE_RELAXED) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_thread *self;
    int32_t code = cm_emulated_self(cm_emulated_of(rt), &self);
    if (code == 0) {
        int before = self->capture_mode;
        self->capture_mode = *mode;
        *mode = before;
    }
    return code;
}
