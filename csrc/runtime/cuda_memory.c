/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation, registration, copies and byte fills over the CUDA runtime. */
#include <cuda_runtime_api.h>

#include "runtime/cuda_private.h"

/* ---- what differs between CUDA 12 and 13 ----------------------------------------- */

/* `device` is an index or cudaCpuDeviceId. CUDA 13 gave the plain name the signature
 * with a location that CUDA 12.2 had brought as _v2; drivers before that know only an
 * index. */
static cudaError_t
prefetch(const void *memory, size_t nbytes, int device, cudaStream_t stream,
         int driver_version)
{
    struct cudaMemLocation where = {
        .type = device == cudaCpuDeviceId ? cudaMemLocationTypeHost
                                          : cudaMemLocationTypeDevice,
        .id = device == cudaCpuDeviceId ? 0 : device,
    };
#if CUDART_VERSION >= 13000
    (void)driver_version;
    return cudaMemPrefetchAsync(memory, nbytes, where, 0, stream);
#else
    if (driver_version < 12020) {
        return cudaMemPrefetchAsync(memory, nbytes, device, stream);
    }
    return cudaMemPrefetchAsync_v2(memory, nbytes, where, 0, stream);
#endif
}

/* CUDA 12.8 brought it with an index of what failed, which CUDA 13 left out again. */
static int32_t
copy_batch(const cm_address *dsts, const cm_address *srcs, const uint64_t *nbytes,
           uint64_t count, cudaStream_t stream)
{
#if CUDART_VERSION >= 12080
    struct cudaMemcpyAttributes attributes = {
        .srcAccessOrder = cudaMemcpySrcAccessOrderStream,
    };
    size_t first = 0;
    _Static_assert(sizeof(cm_address) == sizeof(void *),
                   "arrays are passed as they are");
    _Static_assert(sizeof(uint64_t) == sizeof(size_t), "the same");
    /* CUDA only reads them. */
    void *to = cm_cuda_pointer(cm_cuda_integer(dsts));
    void *from = cm_cuda_pointer(cm_cuda_integer(srcs));
    void *sizes = cm_cuda_pointer(cm_cuda_integer(nbytes));
#    if CUDART_VERSION >= 13000
    return (int32_t)cudaMemcpyBatchAsync(to, from, sizes, count, &attributes, &first, 1,
                                         stream);
#    else
    size_t failed = 0;
    return (int32_t)cudaMemcpyBatchAsync(to, from, sizes, count, &attributes, &first, 1,
                                         &failed, stream);
#    endif
#else
    (void)dsts, (void)srcs, (void)nbytes, (void)count, (void)stream;
    return CM_ENOTSUP;
#endif
}

/* ---- allocation and registration ------------------------------------------------- */

int32_t
cm_cuda_host_alloc(cm_runtime *rt CM_UNUSED, uint64_t nbytes, unsigned flags,
                   void **out)
{
    void *host;
    cudaError_t error = cudaHostAlloc(&host, nbytes, flags);
    if (error == cudaSuccess) {
        *out = host;
    }
    return (int32_t)error;
}

int32_t
cm_cuda_host_free(cm_runtime *rt CM_UNUSED, void *host)
{
    return cm_cuda_freed((int32_t)cudaFreeHost(host));
}

int32_t
cm_cuda_host_register(cm_runtime *rt CM_UNUSED, void *host, uint64_t nbytes,
                      unsigned flags)
{
    return (int32_t)cudaHostRegister(host, nbytes, flags);
}

int32_t
cm_cuda_host_unregister(cm_runtime *rt CM_UNUSED, void *host)
{
    return cm_cuda_freed((int32_t)cudaHostUnregister(host));
}

int32_t
cm_cuda_host_device_address(cm_runtime *rt CM_UNUSED, void *host, cm_address *out)
{
    void *device;
    cudaError_t error = cudaHostGetDevicePointer(&device, host, 0);
    if (error == cudaSuccess) {
        *out = cm_cuda_integer(device);
    }
    return (int32_t)error;
}

int32_t
cm_cuda_device_alloc(cm_runtime *rt CM_UNUSED, uint64_t nbytes, cm_address *out)
{
    void *device;
    cudaError_t error = cudaMalloc(&device, nbytes);
    if (error == cudaSuccess) {
        *out = cm_cuda_integer(device);
    }
    return (int32_t)error;
}

int32_t
cm_cuda_managed_alloc(cm_runtime *rt CM_UNUSED, uint64_t nbytes, unsigned flags,
                      cm_address *out)
{
    void *managed;
    cudaError_t error = cudaMallocManaged(&managed, nbytes, flags);
    if (error == cudaSuccess) {
        *out = cm_cuda_integer(managed);
    }
    return (int32_t)error;
}

int32_t
cm_cuda_device_free(cm_runtime *rt CM_UNUSED, cm_address address)
{
    return cm_cuda_freed((int32_t)cudaFree(cm_cuda_pointer(address)));
}

/* ---- what the driver knows of an address ----------------------------------------- */

int32_t
cm_cuda_pointer_attributes(cm_runtime *rt CM_UNUSED, cm_address address,
                           cm_pointer_info *out)
{
    struct cudaPointerAttributes found;
    cudaError_t error = cudaPointerGetAttributes(&found, cm_cuda_pointer(address));
    if (error != cudaSuccess) {
        return (int32_t)error;
    }
    cm_pointer_info info = {
        .device = found.device,
        .device_address = cm_cuda_integer(found.devicePointer),
        .host_address = found.hostPointer,
    };
    switch (found.type) {
    case cudaMemoryTypeHost:
        info.kind = CM_KIND_PINNED;
        break;
    case cudaMemoryTypeManaged:
        info.kind = CM_KIND_MANAGED;
        break;
    case cudaMemoryTypeDevice:
        info.kind = CM_KIND_DEVICE;
        info.host_address = NULL;
        break;
    case cudaMemoryTypeUnregistered:
    default:
        info = (cm_pointer_info){
            .kind = CM_KIND_PAGEABLE,
            .device = -1,
            .host_address = cm_cuda_pointer(address),
        };
        break;
    }
    *out = info;
    return CM_OK;
}

int32_t
cm_cuda_prefetch_async(cm_runtime *rt, cm_address address, uint64_t nbytes, int device,
                       uint64_t stream)
{
    return (int32_t)prefetch(cm_cuda_pointer(address), nbytes, device,
                             cm_cuda_pointer(stream), rt->driver_version);
}

int32_t
cm_cuda_prefetch_location(cm_runtime *rt CM_UNUSED, cm_address address, uint64_t nbytes,
                          int *out)
{
    int where = cudaInvalidDeviceId;
    cudaError_t error = cudaMemRangeGetAttribute(
        &where, sizeof(where), cudaMemRangeAttributeLastPrefetchLocation,
        cm_cuda_pointer(address), nbytes);
    if (error == cudaSuccess) {
        *out = where;
    }
    return (int32_t)error;
}

/* ---- copies and fills ------------------------------------------------------------ */

int32_t
cm_cuda_copy_async(cm_runtime *rt CM_UNUSED, cm_address dst, cm_address src,
                   uint64_t nbytes, uint64_t stream)
{
    return (int32_t)cudaMemcpyAsync(cm_cuda_pointer(dst), cm_cuda_pointer(src), nbytes,
                                    cudaMemcpyDefault, cm_cuda_pointer(stream));
}

int32_t
cm_cuda_copy_2d_async(cm_runtime *rt CM_UNUSED, cm_address dst, uint64_t dst_pitch,
                      cm_address src, uint64_t src_pitch, uint64_t width,
                      uint64_t height, uint64_t stream)
{
    return (int32_t)cudaMemcpy2DAsync(cm_cuda_pointer(dst), dst_pitch,
                                      cm_cuda_pointer(src), src_pitch, width, height,
                                      cudaMemcpyDefault, cm_cuda_pointer(stream));
}

int32_t
cm_cuda_copy_peer_async(cm_runtime *rt CM_UNUSED, cm_address dst, int dst_device,
                        cm_address src, int src_device, uint64_t nbytes,
                        uint64_t stream)
{
    return (int32_t)cudaMemcpyPeerAsync(cm_cuda_pointer(dst), dst_device,
                                        cm_cuda_pointer(src), src_device, nbytes,
                                        cm_cuda_pointer(stream));
}

int32_t
cm_cuda_copy_batch_async(cm_runtime *rt CM_UNUSED, const cm_address *dsts,
                         const cm_address *srcs, const uint64_t *nbytes, uint64_t count,
                         uint64_t stream)
{
    return copy_batch(dsts, srcs, nbytes, count, cm_cuda_pointer(stream));
}

int32_t
cm_cuda_fill_8_async(cm_runtime *rt CM_UNUSED, cm_address dst, uint8_t value,
                     uint64_t count, uint64_t stream)
{
    return (int32_t)cudaMemsetAsync(cm_cuda_pointer(dst), value, count,
                                    cm_cuda_pointer(stream));
}
