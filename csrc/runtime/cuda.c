/* SPDX-License-Identifier: Apache-2.0 */
/* The runtime over a real CUDA driver: opening it, its table of operations, and the
 * operations on versions and devices. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/cuda_errors.h"
#include "runtime/cuda_private.h"

#if CUDART_VERSION < 12080
#    error "cumem needs the headers of CUDA 12.8 or newer (the driver may be older)"
#endif

/* The numbers of runtime.h are CUDA's own. */
#define SAME(ours, theirs)                                                             \
    _Static_assert((int)(ours) == (int)(theirs), #ours " must be " #theirs)
SAME(CM_HOST_ALLOC_PORTABLE, cudaHostAllocPortable);
SAME(CM_HOST_ALLOC_MAPPED, cudaHostAllocMapped);
SAME(CM_HOST_ALLOC_WRITE_COMBINED, cudaHostAllocWriteCombined);
SAME(CM_REGISTER_PORTABLE, cudaHostRegisterPortable);
SAME(CM_REGISTER_MAPPED, cudaHostRegisterMapped);
SAME(CM_REGISTER_IO_MEMORY, cudaHostRegisterIoMemory);
SAME(CM_REGISTER_READ_ONLY, cudaHostRegisterReadOnly);
SAME(CM_MANAGED_GLOBAL, cudaMemAttachGlobal);
SAME(CM_MANAGED_HOST, cudaMemAttachHost);
SAME(CM_STREAM_NON_BLOCKING, cudaStreamNonBlocking);
SAME(CM_EVENT_BLOCKING_SYNC, cudaEventBlockingSync);
SAME(CM_EVENT_DISABLE_TIMING, cudaEventDisableTiming);
SAME(CM_CAPTURE_RELAXED, cudaStreamCaptureModeRelaxed);
SAME(CM_HOST_LOCATION, cudaCpuDeviceId);
SAME(CM_NO_LOCATION, cudaInvalidDeviceId);
SAME(CM_CUDA_INVALID_VALUE, cudaErrorInvalidValue);
SAME(CM_CUDA_OUT_OF_MEMORY, cudaErrorMemoryAllocation);
SAME(CM_CUDA_UNLOADING, cudaErrorCudartUnloading);
SAME(CM_CUDA_INSUFFICIENT_DRIVER, cudaErrorInsufficientDriver);
SAME(CM_CUDA_NO_DEVICE, cudaErrorNoDevice);
SAME(CM_CUDA_INVALID_DEVICE, cudaErrorInvalidDevice);
SAME(CM_CUDA_DEVICE_UNINITIALIZED, cudaErrorDeviceUninitialized);
SAME(CM_CUDA_PEER_ENABLED, cudaErrorPeerAccessAlreadyEnabled);
SAME(CM_CUDA_INVALID_HANDLE, cudaErrorInvalidResourceHandle);
SAME(CM_CUDA_NOT_READY, cudaErrorNotReady);
SAME(CM_CUDA_CONTEXT_DESTROYED, cudaErrorContextIsDestroyed);
SAME(CM_CUDA_ALREADY_REGISTERED, cudaErrorHostMemoryAlreadyRegistered);
SAME(CM_CUDA_NOT_REGISTERED, cudaErrorHostMemoryNotRegistered);
SAME(CM_CUDA_NOT_SUPPORTED, cudaErrorNotSupported);
SAME(CM_CUDA_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported);
#define SAME_ERROR(code, name, text) SAME(code, name);
CM_CUDA_ERRORS(SAME_ERROR)

/* ---- the table ------------------------------------------------------------------- */

/* CUDA keeps the last error of each thread until somebody asks; a failure that we
 * report must not turn up again in somebody else's next cudaGetLastError(). */
static cm_status
failed(int32_t code, cm_op op, uint64_t arg)
{
    if (code > 0) {
        (void)cudaGetLastError();
    }
    return (cm_status){.code = code, .op = (uint16_t)op, .arg = arg};
}

#define CALL(name, cuda, oldest, arg, params, args)                                    \
    static cm_status call_##name params                                                \
    {                                                                                  \
        if (CM_UNLIKELY(rt->driver_version < (oldest))) {                              \
            return failed(CM_ENOTSUP, CM_OP_##name, (uint64_t)CM_ARGUMENT_VALUE arg);  \
        }                                                                              \
        int32_t code = cm_cuda_##name args;                                            \
        if (CM_LIKELY(code == CM_OK)) {                                                \
            return cm_ok();                                                            \
        }                                                                              \
        return failed(code, CM_OP_##name, (uint64_t)CM_ARGUMENT_VALUE arg);            \
    }
CM_OPS(CALL)
#undef CALL

static const cm_ops_table cuda_ops = {
#define ENTRY(name, cuda, oldest, arg, params, args) .name = call_##name,
    CM_OPS(ENTRY)
#undef ENTRY
};

/* ---- open and close -------------------------------------------------------------- */

static void
close_runtime(cm_runtime *rt)
{
    cm_cuda *cuda = (cm_cuda *)rt;
    if (cuda->driver != NULL) {
        cm_cuda_driver_close(cuda->driver);
    }
    if (rt->alive != NULL) {
        cm_alive_page_destroy(rt->alive);
    }
    free(cuda);
}

/* The questions that need no context. A missing driver answers version 0. */
static cm_status
identify(cm_runtime *rt)
{
    int32_t code = cm_cuda_driver_version(rt, &rt->driver_version);
    if (code == CM_OK && rt->driver_version == 0) {
        code = CM_CUDA_INSUFFICIENT_DRIVER;
    }
    if (code != CM_OK) {
        return failed(code, CM_OP_driver_version, 0);
    }
    code = cm_cuda_runtime_version(rt, &rt->runtime_version);
    if (code != CM_OK) {
        return failed(code, CM_OP_runtime_version, 0);
    }
    int count = 0;
    code = cm_cuda_device_count(rt, &count);
    if (code == CM_OK && count == 0) {
        code = CM_CUDA_NO_DEVICE;
    }
    if (code != CM_OK) {
        return failed(code, CM_OP_device_count, 0);
    }
    rt->device_count = count < CM_MAX_DEVICES ? count : CM_MAX_DEVICES;
    return cm_ok();
}

cm_status
cm_cuda_open(cm_runtime **out)
{
    cm_cuda *cuda = calloc(1, sizeof(*cuda));
    if (cuda == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*cuda));
    }
    cm_runtime *rt = &cuda->base;
    rt->ops = &cuda_ops;
    rt->backend = CM_BACKEND_CUDA;
    rt->reason = "";
    rt->close = close_runtime;
    cm_status status = identify(rt);
    if (!cm_is_ok(status)) {
        goto fail;
    }
    int32_t code = cm_cuda_driver_open(rt->driver_version, &cuda->driver);
    if (code != CM_OK) {
        status = cm_fail(code, 0);
        goto fail;
    }
    status = cm_alive_page_create(&rt->alive);
    if (!cm_is_ok(status)) {
        goto fail;
    }
    *out = rt;
    return cm_ok();

fail:
    close_runtime(rt);
    return status;
}

/* ---- versions and devices -------------------------------------------------------- */

int32_t
cm_cuda_driver_version(cm_runtime *rt CM_UNUSED, int *out)
{
    return (int32_t)cudaDriverGetVersion(out);
}

int32_t
cm_cuda_runtime_version(cm_runtime *rt CM_UNUSED, int *out)
{
    return (int32_t)cudaRuntimeGetVersion(out);
}

int32_t
cm_cuda_device_count(cm_runtime *rt CM_UNUSED, int *out)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess) {
        *out = count;
    }
    return (int32_t)error;
}

int32_t
cm_cuda_device_set(cm_runtime *rt CM_UNUSED, int device)
{
    return (int32_t)cudaSetDevice(device);
}

int32_t
cm_cuda_device_describe(cm_runtime *rt CM_UNUSED, int device, cm_device_info *out)
{
    struct cudaDeviceProp found;
    cudaError_t error = cudaGetDeviceProperties(&found, device);
    if (error != cudaSuccess) {
        return (int32_t)error;
    }
    *out = (cm_device_info){.total_nbytes = found.totalGlobalMem};
    (void)snprintf(out->name, sizeof(out->name), "%s", found.name);
    _Static_assert(sizeof(out->uuid) == sizeof(found.uuid), "a UUID has 16 bytes");
    memcpy(out->uuid, &found.uuid, sizeof(out->uuid));
    (void)snprintf(out->pci_bus_id, sizeof(out->pci_bus_id), "%04x:%02x:%02x.0",
                   (unsigned)found.pciDomainID, (unsigned)found.pciBusID,
                   (unsigned)found.pciDeviceID);
    return CM_OK;
}

int32_t
cm_cuda_device_synchronize(cm_runtime *rt CM_UNUSED)
{
    return (int32_t)cudaDeviceSynchronize();
}

int32_t
cm_cuda_device_reset(cm_runtime *rt CM_UNUSED)
{
    return (int32_t)cudaDeviceReset();
}

int32_t
cm_cuda_memory_info(cm_runtime *rt CM_UNUSED, uint64_t *free_nbytes,
                    uint64_t *total_nbytes)
{
    size_t free_now;
    size_t total;
    cudaError_t error = cudaMemGetInfo(&free_now, &total);
    if (error == cudaSuccess) {
        *free_nbytes = free_now;
        *total_nbytes = total;
    }
    return (int32_t)error;
}

int32_t
cm_cuda_peer_can_access(cm_runtime *rt CM_UNUSED, int device, int peer, int *out)
{
    return (int32_t)cudaDeviceCanAccessPeer(out, device, peer);
}

int32_t
cm_cuda_peer_enable(cm_runtime *rt CM_UNUSED, int peer)
{
    return (int32_t)cudaDeviceEnablePeerAccess(peer, 0);
}
