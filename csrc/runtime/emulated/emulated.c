/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a runtime of the emulated device. Here are its table of operations, opening and
 * closing, and the hooks for tests. */
#include "runtime/emulated/private.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { RUNTIME_VERSION = 12090 };

/* Flags for what the wrapper does before an operation. Unless an operation is BARE or
 * A_DEVICE, a thread that has no context gets one on device 0. CUDA's runtime does the
 * same, even before operations that only take a handle. */
enum {
    BARE = 1,       /* does nothing: makes no context and needs no device */
    A_DEVICE = 2,   /* there must be a device at all; makes no context */
    NO_CAPTURE = 4, /* a capture forbids it */
    HEALTHY = 8,    /* a device that has failed refuses it */
};

static const unsigned char entries[CM_OP_COUNT] = {
    [CM_OP_driver_version] = BARE,
    [CM_OP_runtime_version] = BARE,
    [CM_OP_device_count] = BARE,
    [CM_OP_device_describe] = BARE,
    [CM_OP_device_attribute] = BARE,
    [CM_OP_peer_can_access] = BARE,
    [CM_OP_device_set] = BARE,
    [CM_OP_context_get] = BARE,
    [CM_OP_context_device] = BARE,
    [CM_OP_context_set] = BARE,
    [CM_OP_context_is_active] = BARE,
    [CM_OP_context_record_event] = BARE,
    [CM_OP_capture_mode_exchange] = BARE,
    [CM_OP_physical_granularity] = A_DEVICE,
    [CM_OP_physical_create] = A_DEVICE | NO_CAPTURE,
    [CM_OP_physical_release] = A_DEVICE | NO_CAPTURE,
    [CM_OP_address_reserve] = A_DEVICE | NO_CAPTURE,
    [CM_OP_address_free] = A_DEVICE | NO_CAPTURE,
    [CM_OP_address_map] = A_DEVICE | NO_CAPTURE,
    [CM_OP_address_unmap] = A_DEVICE | NO_CAPTURE,
    [CM_OP_address_set_access] = A_DEVICE | NO_CAPTURE,
    [CM_OP_device_synchronize] = NO_CAPTURE,
    [CM_OP_device_reset] = NO_CAPTURE,
    [CM_OP_peer_enable] = NO_CAPTURE,
    [CM_OP_host_free] = NO_CAPTURE,
    [CM_OP_device_free] = NO_CAPTURE,
    [CM_OP_host_unregister] = NO_CAPTURE,
    [CM_OP_module_load] = NO_CAPTURE,
    [CM_OP_module_unload] = NO_CAPTURE,
    [CM_OP_host_alloc] = NO_CAPTURE | HEALTHY,
    [CM_OP_device_alloc] = NO_CAPTURE | HEALTHY,
    [CM_OP_managed_alloc] = NO_CAPTURE | HEALTHY,
    [CM_OP_host_register] = NO_CAPTURE | HEALTHY,
    [CM_OP_stream_query] = NO_CAPTURE,
    [CM_OP_stream_synchronize] = NO_CAPTURE,
    [CM_OP_event_query] = NO_CAPTURE,
    [CM_OP_event_synchronize] = NO_CAPTURE,
    [CM_OP_stream_create] = HEALTHY,
    [CM_OP_event_create] = HEALTHY,
};

/* Make a device current for the thread; it has a context from then on. */
static void
use_device(cm_emulated *emulated, int device)
{
    cm_emulated_self(emulated)->device = device;
    emulated->contexts |= UINT64_C(1) << device;
}

/* Do what comes before an operation. Returns 0, or the code to fail with. */
static int32_t
enter(cm_emulated *emulated, unsigned entry)
{
    if (entry == BARE) {
        return 0;
    }
    if (emulated->base.device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    cm_emulated_thread *self = cm_emulated_self(emulated);
    if ((entry & A_DEVICE) == 0 && self->device < 0) {
        use_device(emulated, 0);
    }
    if ((entry & NO_CAPTURE) != 0 && cm_emulated_is_forbidden(emulated, self)) {
        return CM_CUDA_CAPTURE_UNSUPPORTED;
    }
    return (entry & HEALTHY) != 0 ? emulated->streams.faults[self->device] : 0;
}

/* True for operations that a driver answers even before it is started. */
static inline bool
asks_of_all(cm_op op)
{
    return op == CM_OP_driver_version || op == CM_OP_runtime_version
           || op == CM_OP_device_count;
}

/* Nothing has to be started, since the thread of a stream begins when the stream is
 * made. */
static cm_status
emulated_wake(cm_runtime *rt CM_UNUSED)
{
    return cm_ok();
}

/* The wrapper of an operation: it checks the driver's version, does what comes before
 * the operation, and says which operation failed with which argument. */
#define BODY_ARGS(...) (cm_emulated_of(rt) __VA_OPT__(, ) __VA_ARGS__)
#define EMULATED_WRAPPER(name, cuda, driver, arg, params, args)                        \
    static cm_status emulated_##name CM_OP_PARAMS params                               \
    {                                                                                  \
        int32_t code = CM_ENOTSUP;                                                     \
        if (cm_runtime_is_forked(rt)) {                                                \
            code = CM_CUDA_INITIALIZATION;                                             \
        }                                                                              \
        else if (!asks_of_all(CM_OP_##name) && !cm_runtime_is_awake(rt)                \
                 && !cm_is_ok(cm_runtime_wake(rt))) {                                  \
            code = CM_CUDA_INITIALIZATION;                                             \
        }                                                                              \
        else if (rt->driver_version >= (driver)) {                                     \
            cm_mutex_lock(&cm_emulated_of(rt)->lock);                                  \
            code = enter(cm_emulated_of(rt), entries[CM_OP_##name]);                   \
            if (CM_LIKELY(code == 0)) {                                                \
                code = cm_emulated_op_##name BODY_ARGS args;                           \
            }                                                                          \
            cm_mutex_unlock(&cm_emulated_of(rt)->lock);                                \
        }                                                                              \
        if (CM_LIKELY(code == 0)) {                                                    \
            return cm_ok();                                                            \
        }                                                                              \
        return (cm_status){code, CM_OP_##name, 0, (uint64_t)CM_ARGUMENT_VALUE arg};    \
    }
CM_OPS(EMULATED_WRAPPER)
#undef EMULATED_WRAPPER

static const cm_ops_table emulated_ops = {
#define EMULATED_FIELD(name, cuda, driver, arg, params, args) .name = emulated_##name,
    CM_OPS(EMULATED_FIELD)
#undef EMULATED_FIELD
};

/* Reset a device whose work has ended. */
static void
reset(cm_emulated *emulated, int device)
{
    cm_emulated_table *modules = &emulated->modules;
    const cm_emulated_entry *left;
    cm_emulated_streams_reset(emulated, device);
    while ((left = cm_emulated_table_of_device(modules, device)) != NULL) {
        free(cm_emulated_table_remove(modules, left->key));
    }
    cm_emulated_memory_reset(emulated, device);
}

static void
emulated_close(cm_runtime *rt)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    if (cm_runtime_is_forked(rt)) {
        return; /* leaked: its threads do not exist in this process */
    }
    cm_mutex_lock(&emulated->lock);
    cm_emulated_streams_end(emulated);
    for (int device = 0; device < rt->device_count; device++) {
        reset(emulated, device);
    }
    cm_mutex_unlock(&emulated->lock);
    cm_emulated_memory_fini(emulated);
    free(emulated->streams.by_handle.entries);
    free(emulated->streams.events.entries);
    free(emulated->modules.entries);
    cm_alive_page_destroy(emulated->base.alive);
    free(emulated);
}

static void *
host_alias(const cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_place place;
    cm_mutex_lock(&emulated->lock);
    bool found =
        cm_emulated_find(emulated, address, nbytes, &place) == CM_EMULATED_INSIDE;
    cm_mutex_unlock(&emulated->lock);
    return found && place.access != 0 ? place.bytes : NULL;
}

cm_status
cm_emulated_open(const cm_emulated_config *config, cm_runtime **out)
{
    static _Atomic uint64_t opened;
    if (config->device_count < 0 || config->device_count > CM_MAX_DEVICES) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)config->device_count);
    }
    cm_emulated *emulated = calloc(1, sizeof(*emulated));
    CM_TRY(cm_allocated(emulated != NULL, sizeof(*emulated)));
    emulated->config = *config;
    emulated->base.ops = &emulated_ops;
    emulated->base.backend = CM_BACKEND_EMULATED;
    emulated->base.driver_version = config->driver_version;
    emulated->base.runtime_version = RUNTIME_VERSION;
    emulated->base.device_count = config->device_count;
    emulated->base.reason = config->reason != NULL ? config->reason : "";
    emulated->base.wake = emulated_wake;
    emulated->base.close = emulated_close;
    emulated->base.host_alias = host_alias;
    emulated->number = atomic_fetch_add(&opened, 1) + 1;
    cm_status status = cm_alive_page_create(&emulated->base.alive);
    if (!cm_is_ok(status)) {
        free(emulated);
        return status;
    }
    cm_cond_init(&emulated->changed);
    cm_list_init(&emulated->streams.queues);
    cm_list_init(&emulated->memory.freed);
    *out = &emulated->base;
    return cm_ok();
}

void
cm_emulated_read_counts(cm_runtime *rt, cm_emulated_counts *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    const cm_emulated_memory *memory = &emulated->memory;
    cm_mutex_lock(&emulated->lock);
    uint64_t live_nbytes = memory->host_used_nbytes;
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        live_nbytes += memory->used_nbytes[device];
    }
    *out = (cm_emulated_counts){
        .host_allocs = memory->counts[CM_EMULATED_HOST],
        .registrations = memory->counts[CM_EMULATED_REGISTERED],
        .device_allocs = memory->counts[CM_EMULATED_DEVICE],
        .managed_allocs = memory->counts[CM_EMULATED_MANAGED],
        .physical_allocs = memory->physical_count,
        .address_ranges = memory->counts[CM_EMULATED_VIRTUAL],
        .mappings = memory->mapped.count,
        .live_nbytes = live_nbytes,
        .streams = emulated->streams.by_handle.count,
        .events = emulated->streams.events.count,
        .modules = emulated->modules.count,
        .queued = emulated->streams.queued_jobs,
    };
    cm_mutex_unlock(&emulated->lock);
}

/* ---- versions, devices and contexts ---------------------------------------------- */

int32_t
cm_emulated_op_driver_version(cm_emulated *emulated, int *out)
{
    *out = emulated->base.driver_version;
    return 0;
}

int32_t
cm_emulated_op_runtime_version(cm_emulated *emulated, int *out)
{
    *out = emulated->base.runtime_version;
    return 0;
}

int32_t
cm_emulated_op_device_count(cm_emulated *emulated, int *out)
{
    if (emulated->base.device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    *out = emulated->base.device_count;
    return 0;
}

int32_t
cm_emulated_op_device_set(cm_emulated *emulated, int device)
{
    if (!cm_emulated_is_device(emulated, device)) {
        return emulated->base.device_count == 0 ? CM_CUDA_NO_DEVICE
                                                : CM_CUDA_INVALID_DEVICE;
    }
    use_device(emulated, device);
    return 0;
}

int32_t
cm_emulated_op_context_get(cm_emulated *emulated, uint64_t *out)
{
    *out = (uint64_t)(cm_emulated_self(emulated)->device + 1);
    return 0;
}

int32_t
cm_emulated_op_context_device(cm_emulated *emulated, int *out)
{
    *out = cm_emulated_self(emulated)->device;
    return 0;
}

int32_t
cm_emulated_op_context_set(cm_emulated *emulated, uint64_t context)
{
    if (context > (uint64_t)emulated->base.device_count) {
        return CM_CUDA_DEVICE_UNINITIALIZED;
    }
    cm_emulated_self(emulated)->device = (int)context - 1;
    return 0;
}

int32_t
cm_emulated_op_context_is_active(cm_emulated *emulated, int device, bool *out)
{
    *out = (emulated->contexts >> device & 1) != 0;
    return 0;
}

int32_t
cm_emulated_op_device_describe(cm_emulated *emulated, int device, cm_device_info *out)
{
    if (!cm_emulated_is_device(emulated, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    cm_device_info info = {
        .name = "cumem emulated device",
        .uuid = "cumem-emulated",
        .total_nbytes = emulated->config.memory_nbytes,
    };
    int configured = emulated->config.numbers[device];
    int number = configured == 0 ? device : configured - 1;
    info.uuid[15] = (unsigned char)number;
    (void)snprintf(info.pci_bus_id, sizeof(info.pci_bus_id), "0000:%02x:00.0",
                   number + 1);
    *out = info;
    return 0;
}

/* The attributes of a recent data-centre GPU, except for features that are not
 * emulated. Attributes that are not listed are 0. */
static const int attributes[] = {
    [CM_ATTRIBUTE_compute_major] = 9,
    [CM_ATTRIBUTE_multiprocessor_count] = 8,
    [CM_ATTRIBUTE_copy_engine_count] = 2,
    [CM_ATTRIBUTE_unified_addressing] = 1,
    [CM_ATTRIBUTE_can_map_host_memory] = 1,
    [CM_ATTRIBUTE_managed_memory] = 1,
    [CM_ATTRIBUTE_concurrent_managed_access] = 1,
    [CM_ATTRIBUTE_host_register_supported] = 1,
    [CM_ATTRIBUTE_host_register_read_only] = 1,
    [CM_ATTRIBUTE_memory_pools_supported] = 1,
    [CM_ATTRIBUTE_l2_cache_nbytes] = 4 << 20,
    [CM_ATTRIBUTE_virtual_memory_management] = 1,
    [CM_ATTRIBUTE_virtual_memory_shareable] = 1,
    [CM_ATTRIBUTE_virtual_memory_rdma] = 1,
    [CM_ATTRIBUTE_host_numa_id] = 0,
};

int32_t
cm_emulated_op_device_attribute(cm_emulated *emulated, int attribute, int device,
                                int *out)
{
    if (!cm_emulated_is_device(emulated, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
#define IS_ATTRIBUTE(name, number, cuda) || attribute == (number)
    if (!(false CM_DEVICE_ATTRIBUTES(IS_ATTRIBUTE))) {
        return CM_CUDA_INVALID_VALUE;
    }
#undef IS_ATTRIBUTE
    bool in_turn = emulated->config.in_turn;
    *out = in_turn && attribute == CM_ATTRIBUTE_concurrent_managed_access
               ? 0
               : attributes[attribute];
    return 0;
}

int32_t
cm_emulated_op_device_reset(cm_emulated *emulated)
{
    cm_emulated_thread *self = cm_emulated_self(emulated);
    /* A reset is meant for a device that has failed, so a failure here does not
     * matter. */
    (void)cm_emulated_op_device_synchronize(emulated);
    reset(emulated, self->device);
    self->device = -1;
    return 0;
}
