/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device as a runtime: its table, opening and closing it, and what only
 * tests may do with it. */
#include "runtime/emulated/emulated.h"

#include <stdlib.h>

#include "runtime/emulated/memory.h"
#include "runtime/emulated/stream.h"

enum { RUNTIME_VERSION = 12090 };

/* One wrapper per operation: the driver's age, and which operation failed with what. */
#define EMULATED_WRAPPER(name, cuda, driver, arg, params, args)                        \
    static cm_status emulated_##name params                                            \
    {                                                                                  \
        int32_t code = CM_ENOTSUP;                                                     \
        if (cm_runtime_is_forked(rt)) {                                                \
            code = CM_CUDA_INITIALIZATION;                                             \
        }                                                                              \
        else if (rt->driver_version >= (driver)) {                                     \
            cm_mutex_lock(&cm_emulated_of(rt)->lock);                                  \
            code = cm_emulated_op_##name args;                                         \
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

void
cm_emulated_default_config(cm_emulated_config *config)
{
    *config = (cm_emulated_config){
        .device_count = 1,
        .memory_nbytes = UINT64_C(1) << 30,
        .driver_version = 13000,
        .max_delay_us = 200,
        .reason = "",
    };
}

static void
emulated_close(cm_runtime *rt)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    if (cm_runtime_is_forked(rt)) {
        return; /* leaked: its threads are not in this process */
    }
    cm_emulated_streams_fini(emulated);
    cm_emulated_memory_fini(emulated);
    cm_emulated_modules_reset(emulated, -1);
    cm_emulated_handles_fini(&emulated->modules);
    cm_emulated_handles_fini(&emulated->functions);
    (void)pthread_key_delete(emulated->key);
    cm_cond_fini(&emulated->changed);
    cm_mutex_fini(&emulated->lock);
    cm_alive_page_destroy(emulated->base.alive);
    while (emulated->threads != NULL) {
        cm_emulated_thread *next = emulated->threads->next;
        free(emulated->threads);
        emulated->threads = next;
    }
    free(emulated);
}

/* What may fail; undone in the other order. */
static cm_status
open_parts(cm_emulated *emulated)
{
    CM_TRY(cm_alive_page_create(&emulated->base.alive));
    cm_status status = cm_mutex_init(&emulated->lock);
    if (!cm_is_ok(status)) {
        goto fail;
    }
    status = cm_cond_init(&emulated->changed);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&emulated->lock);
        goto fail;
    }
    int error = pthread_key_create(&emulated->key, NULL);
    if (error == 0) {
        return cm_ok();
    }
    status = cm_fail(CM_ESYSTEM, (uint64_t)error);
    cm_cond_fini(&emulated->changed);
    cm_mutex_fini(&emulated->lock);
fail:
    cm_alive_page_destroy(emulated->base.alive);
    return status;
}

/* The emulated device under any fault wrappers. */
static cm_emulated *
unwrap(const cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return (cm_emulated *)(uintptr_t)rt;
}

static void *
host_alias(const cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated *emulated = unwrap(rt);
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
    if (config->device_count < 0 || config->device_count > CM_MAX_DEVICES) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)config->device_count);
    }
    cm_emulated *emulated = calloc(1, sizeof(*emulated));
    if (emulated == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*emulated));
    }
    emulated->config = *config;
    emulated->base.ops = &emulated_ops;
    emulated->base.backend = CM_BACKEND_EMULATED;
    emulated->base.driver_version = config->driver_version;
    emulated->base.runtime_version = RUNTIME_VERSION;
    emulated->base.device_count = config->device_count;
    emulated->base.reason = config->reason != NULL ? config->reason : "";
    emulated->base.close = emulated_close;
    emulated->base.host_alias = host_alias;
    cm_status status = open_parts(emulated);
    if (!cm_is_ok(status)) {
        free(emulated);
        return status;
    }
    cm_emulated_streams_init(emulated);
    cm_emulated_memory_init(emulated);
    *out = &emulated->base;
    return cm_ok();
}

/* Test hooks make no context: a thread without one speaks of device 0. */
static cm_status
with_stream(cm_runtime *rt, uint64_t stream, bool on,
            int32_t (*act)(cm_emulated *, cm_emulated_thread *, uint64_t, bool))
{
    cm_emulated *emulated = unwrap(rt);
    cm_emulated_thread *self;
    cm_mutex_lock(&emulated->lock);
    int32_t code = emulated->base.device_count == 0
                       ? CM_CUDA_NO_DEVICE
                       : cm_emulated_self(&emulated->base, &self);
    if (code == 0) {
        int device = self->device;
        self->device = device < 0 ? 0 : device;
        code = act(emulated, self, stream, on);
        self->device = device;
    }
    cm_mutex_unlock(&emulated->lock);
    return cm_fail(code, stream);
}

cm_status
cm_emulated_gate_close(cm_runtime *rt, uint64_t stream)
{
    return with_stream(rt, stream, true, cm_emulated_gate);
}

cm_status
cm_emulated_gate_open(cm_runtime *rt, uint64_t stream)
{
    return with_stream(rt, stream, false, cm_emulated_gate);
}

cm_status
cm_emulated_set_capturing(cm_runtime *rt, uint64_t stream, bool on)
{
    return with_stream(rt, stream, on, cm_emulated_capture);
}

cm_status
cm_emulated_host_pages(cm_runtime *rt, cm_address address, uint64_t nbytes,
                       uint64_t *out)
{
    cm_emulated *emulated = unwrap(rt);
    cm_mutex_lock(&emulated->lock);
    int32_t code = cm_emulated_count_host_pages(emulated, address, nbytes, out);
    cm_mutex_unlock(&emulated->lock);
    return cm_fail(code, address);
}

void
cm_emulated_read_counts(cm_runtime *rt, cm_emulated_counts *out)
{
    cm_emulated *emulated = unwrap(rt);
    const cm_emulated_memory *memory = &emulated->memory;
    cm_mutex_lock(&emulated->lock);
    *out = (cm_emulated_counts){
        .host_allocs = memory->counts[CM_EMULATED_HOST],
        .registrations = memory->counts[CM_EMULATED_REGISTERED],
        .device_allocs = memory->counts[CM_EMULATED_DEVICE],
        .managed_allocs = memory->counts[CM_EMULATED_MANAGED],
        .physical_allocs = memory->physical_count,
        .address_ranges = memory->counts[CM_EMULATED_VIRTUAL],
        .mappings = memory->mapping_count,
        .live_nbytes = memory->live_nbytes,
        .streams = emulated->streams.by_handle.count,
        .events = emulated->streams.events.count,
        .modules = emulated->modules.count,
        .queued = emulated->streams.queued,
    };
    cm_mutex_unlock(&emulated->lock);
}

uint32_t
cm_emulated_max_delay_us(const cm_runtime *rt)
{
    return unwrap(rt)->config.max_delay_us;
}
