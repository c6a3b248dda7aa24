/* SPDX-License-Identifier: Apache-2.0 */
/* The runtime over a real CUDA driver, and all that knows CUDA's headers. What only the
 * driver has is found by name and version when the runtime is opened, so nothing is
 * linked against the driver, and a function that it lacks is found missing there, not
 * at load. Locks: none; nothing changes after opening. */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"

#if CUDART_VERSION < 12080
#    error "cumem needs the headers of CUDA 12.8 or newer (the driver may be older)"
#endif

/* ---- our numbers are CUDA's own, and the driver's are the runtime's -------------- */

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
SAME(CM_ACCESS_READ, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ);
SAME(CM_ACCESS_READ | CM_ACCESS_WRITE, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE);
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
SAME(CM_CUDA_CAPTURE_IMPLICIT, cudaErrorStreamCaptureImplicit);

/* The driver's, as far as what is called here answers them. */
SAME(CUDA_SUCCESS, cudaSuccess);
SAME(CUDA_ERROR_INVALID_VALUE, cudaErrorInvalidValue);
SAME(CUDA_ERROR_OUT_OF_MEMORY, cudaErrorMemoryAllocation);
SAME(CUDA_ERROR_NOT_INITIALIZED, cudaErrorInitializationError);
SAME(CUDA_ERROR_DEINITIALIZED, cudaErrorCudartUnloading);
SAME(CUDA_ERROR_NO_DEVICE, cudaErrorNoDevice);
SAME(CUDA_ERROR_INVALID_DEVICE, cudaErrorInvalidDevice);
SAME(CUDA_ERROR_INVALID_IMAGE, cudaErrorInvalidKernelImage);
SAME(CUDA_ERROR_INVALID_CONTEXT, cudaErrorDeviceUninitialized);
SAME(CUDA_ERROR_NO_BINARY_FOR_GPU, cudaErrorNoKernelImageForDevice);
SAME(CUDA_ERROR_ECC_UNCORRECTABLE, cudaErrorECCUncorrectable);
SAME(CUDA_ERROR_INVALID_PTX, cudaErrorInvalidPtx);
SAME(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cudaErrorUnsupportedPtxVersion);
SAME(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, cudaErrorJitCompilerNotFound);
SAME(CUDA_ERROR_INVALID_HANDLE, cudaErrorInvalidResourceHandle);
SAME(CUDA_ERROR_NOT_FOUND, cudaErrorSymbolNotFound);
SAME(CUDA_ERROR_NOT_READY, cudaErrorNotReady);
SAME(CUDA_ERROR_ILLEGAL_ADDRESS, cudaErrorIllegalAddress);
SAME(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cudaErrorLaunchOutOfResources);
SAME(CUDA_ERROR_LAUNCH_TIMEOUT, cudaErrorLaunchTimeout);
SAME(CUDA_ERROR_CONTEXT_IS_DESTROYED, cudaErrorContextIsDestroyed);
SAME(CUDA_ERROR_ASSERT, cudaErrorAssert);
SAME(CUDA_ERROR_HARDWARE_STACK_ERROR, cudaErrorHardwareStackError);
SAME(CUDA_ERROR_ILLEGAL_INSTRUCTION, cudaErrorIllegalInstruction);
SAME(CUDA_ERROR_MISALIGNED_ADDRESS, cudaErrorMisalignedAddress);
SAME(CUDA_ERROR_INVALID_ADDRESS_SPACE, cudaErrorInvalidAddressSpace);
SAME(CUDA_ERROR_INVALID_PC, cudaErrorInvalidPc);
SAME(CUDA_ERROR_LAUNCH_FAILED, cudaErrorLaunchFailure);
SAME(CUDA_ERROR_NOT_PERMITTED, cudaErrorNotPermitted);
SAME(CUDA_ERROR_NOT_SUPPORTED, cudaErrorNotSupported);
SAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported);
SAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cudaErrorStreamCaptureInvalidated);
SAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cudaErrorStreamCaptureImplicit);
SAME(CUDA_ERROR_UNKNOWN, cudaErrorUnknown);

/* The attributes of runtime.h are the driver's. */
#define SAME_ATTRIBUTE(ours, theirs)                                                   \
    SAME(CM_ATTRIBUTE_##ours, CU_DEVICE_ATTRIBUTE_##theirs)
SAME_ATTRIBUTE(compute_major, COMPUTE_CAPABILITY_MAJOR);
SAME_ATTRIBUTE(compute_minor, COMPUTE_CAPABILITY_MINOR);
SAME_ATTRIBUTE(multiprocessor_count, MULTIPROCESSOR_COUNT);
SAME_ATTRIBUTE(copy_engine_count, ASYNC_ENGINE_COUNT);
SAME_ATTRIBUTE(unified_addressing, UNIFIED_ADDRESSING);
SAME_ATTRIBUTE(can_map_host_memory, CAN_MAP_HOST_MEMORY);
SAME_ATTRIBUTE(managed_memory, MANAGED_MEMORY);
SAME_ATTRIBUTE(concurrent_managed_access, CONCURRENT_MANAGED_ACCESS);
SAME_ATTRIBUTE(pageable_memory_access, PAGEABLE_MEMORY_ACCESS);
SAME_ATTRIBUTE(direct_managed_from_host, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST);
SAME_ATTRIBUTE(host_register_supported, HOST_REGISTER_SUPPORTED);
SAME_ATTRIBUTE(host_register_read_only, READ_ONLY_HOST_REGISTER_SUPPORTED);
SAME_ATTRIBUTE(memory_pools_supported, MEMORY_POOLS_SUPPORTED);
SAME_ATTRIBUTE(l2_cache_nbytes, L2_CACHE_SIZE);
SAME_ATTRIBUTE(integrated, INTEGRATED);
SAME_ATTRIBUTE(virtual_memory_management, VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_ATTRIBUTE(virtual_memory_shareable, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME_ATTRIBUTE(virtual_memory_rdma, GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME_ATTRIBUTE(host_numa_id, HOST_NUMA_ID);

/* ---- the driver's functions ------------------------------------------------------ */

/* X(function, the CUDA version of the signature asked for). */
#define DRIVER_FUNCTIONS(X)                                                            \
    X(cuDeviceGetAttribute, 2000)                                                      \
    X(cuCtxGetCurrent, 4000)                                                           \
    X(cuCtxSetCurrent, 4000)                                                           \
    X(cuCtxRecordEvent, 12050)                                                         \
    X(cuPointerGetAttribute, 4000)                                                     \
    X(cuMemsetD16Async, 3020)                                                          \
    X(cuMemsetD32Async, 3020)                                                          \
    X(cuModuleLoadData, 2000)                                                          \
    X(cuModuleUnload, 2000)                                                            \
    X(cuModuleGetFunction, 2000)                                                       \
    X(cuLaunchKernel, 4000)                                                            \
    X(cuMemGetAllocationGranularity, 10020)                                            \
    X(cuMemCreate, 10020)                                                              \
    X(cuMemRelease, 10020)                                                             \
    X(cuMemAddressReserve, 10020)                                                      \
    X(cuMemAddressFree, 10020)                                                         \
    X(cuMemMap, 10020)                                                                 \
    X(cuMemUnmap, 10020)                                                               \
    X(cuMemSetAccess, 10020)

typedef struct cm_cuda {
    cm_runtime base; /* first: a cm_runtime * is a cm_cuda * */
    struct {         /* NULL: the driver lacks it */
#define FUNCTION_FIELD(name, version) PFN_##name##_v##version name;
        DRIVER_FUNCTIONS(FUNCTION_FIELD)
#undef FUNCTION_FIELD
    } driver;
} cm_cuda;

/* The address of `name` as of CUDA `version`, or NULL. A version above the driver's own
 * would be refused as an invalid value. Makes no context. */
static void *
find_function(const char *name, int version, int driver_version)
{
    if (version > driver_version) {
        return NULL;
    }
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error = cudaGetDriverEntryPointByVersion(
        name, &function, (unsigned)version, cudaEnableLegacyStream, &found);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    return found == cudaDriverEntryPointSuccess ? function : NULL;
}

static void
find_functions(cm_cuda *cuda)
{
    /* ISO C has no cast from an object pointer to a function; POSIX gives both one
     * size. */
#define FIND_FUNCTION(name, version)                                                   \
    {                                                                                  \
        void *address = find_function(#name, version, cuda->base.driver_version);      \
        memcpy(&cuda->driver.name, &address, sizeof(address));                         \
    }
    DRIVER_FUNCTIONS(FIND_FUNCTION)
#undef FIND_FUNCTION
}

/* A newer driver's new codes pass unchanged; the one number that only the driver uses
 * has no name among the runtime's. */
static int32_t
from_driver(CUresult result)
{
    return result == CUDA_ERROR_CONTEXT_ALREADY_CURRENT ? (int32_t)cudaErrorUnknown
                                                        : (int32_t)result;
}

/* Call a function of the driver of `rt`: its code, CM_ENOTSUP where it lacks it. */
#define DRIVER(function, ...)                                                          \
    (((const cm_cuda *)rt)->driver.function == NULL                                    \
         ? CM_ENOTSUP                                                                  \
         : from_driver(((const cm_cuda *)rt)->driver.function(__VA_ARGS__)))

/* ---- operations that take more than a call --------------------------------------- */

/* Handles and addresses travel as integers; here they become pointers again. */
static void *
pointer(uint64_t value)
{
    return (void *)(uintptr_t)value;
}

static uint64_t
integer(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

/* Giving something back while the process, the context or the driver goes away is no
 * failure: it is gone already. */
static int32_t
freed(int32_t code)
{
    switch (code) {
    case CM_CUDA_UNLOADING:
    case CM_CUDA_CONTEXT_DESTROYED:
    case CM_CUDA_INSUFFICIENT_DRIVER:
        return CM_OK;
    default:
        return code;
    }
}

/* ---- versions, devices and contexts ---------------------------------------------- */

static int32_t
device_count(int *out)
{
    int count = 0;
    CM_TRY_CODE(cudaGetDeviceCount(&count));
    *out = count;
    return CM_OK;
}

static int32_t
device_describe(int device, cm_device_info *out)
{
    struct cudaDeviceProp found;
    CM_TRY_CODE(cudaGetDeviceProperties(&found, device));
    *out = (cm_device_info){.total_nbytes = found.totalGlobalMem};
    (void)snprintf(out->name, sizeof(out->name), "%s", found.name);
    _Static_assert(sizeof(out->uuid) == sizeof(found.uuid), "a UUID has 16 bytes");
    memcpy(out->uuid, &found.uuid, sizeof(out->uuid));
    (void)snprintf(out->pci_bus_id, sizeof(out->pci_bus_id), "%04x:%02x:%02x.0",
                   (unsigned)found.pciDomainID, (unsigned)found.pciBusID,
                   (unsigned)found.pciDeviceID);
    return CM_OK;
}

static int32_t
memory_info(uint64_t *free_nbytes, uint64_t *total_nbytes)
{
    size_t free_now;
    size_t total;
    CM_TRY_CODE(cudaMemGetInfo(&free_now, &total));
    *free_nbytes = free_now;
    *total_nbytes = total;
    return CM_OK;
}

static int32_t
context_get(cm_runtime *rt, uint64_t *out)
{
    CUcontext context = NULL;
    CM_TRY_CODE(DRIVER(cuCtxGetCurrent, &context));
    *out = integer(context);
    return CM_OK;
}

static int32_t
context_record_event(cm_runtime *rt, uint64_t event)
{
    uint64_t context;
    CM_TRY_CODE(context_get(rt, &context));
    return DRIVER(cuCtxRecordEvent, pointer(context), pointer(event));
}

static int32_t
pointer_access(cm_runtime *rt, cm_address address, int *out)
{
    CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS access = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE;
    CM_TRY_CODE(DRIVER(cuPointerGetAttribute, &access,
                       CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, address));
    *out = (int)access;
    return CM_OK;
}

/* ---- memory ----------------------------------------------------------------------- */

static int32_t
host_alloc(uint64_t nbytes, unsigned flags, void **out)
{
    void *host;
    CM_TRY_CODE(cudaHostAlloc(&host, nbytes, flags));
    *out = host;
    return CM_OK;
}

static int32_t
host_device_address(void *host, cm_address *out)
{
    void *device;
    CM_TRY_CODE(cudaHostGetDevicePointer(&device, host, 0));
    *out = integer(device);
    return CM_OK;
}

static int32_t
device_alloc(uint64_t nbytes, cm_address *out)
{
    void *device;
    CM_TRY_CODE(cudaMalloc(&device, nbytes));
    *out = integer(device);
    return CM_OK;
}

static int32_t
managed_alloc(uint64_t nbytes, unsigned flags, cm_address *out)
{
    void *managed;
    CM_TRY_CODE(cudaMallocManaged(&managed, nbytes, flags));
    *out = integer(managed);
    return CM_OK;
}

static int32_t
pointer_attributes(cm_address address, cm_pointer_info *out)
{
    struct cudaPointerAttributes found;
    CM_TRY_CODE(cudaPointerGetAttributes(&found, pointer(address)));
    cm_pointer_info info = {
        .device = found.device,
        .device_address = integer(found.devicePointer),
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
            .host_address = pointer(address),
        };
        break;
    }
    *out = info;
    return CM_OK;
}

/* `device` is an index or cudaCpuDeviceId. CUDA 13 gave the plain name the signature
 * with a location that CUDA 12.2 had brought as _v2; drivers before that know only an
 * index. */
static cudaError_t
prefetch_async(const cm_runtime *rt CM_UNUSED, const void *memory, size_t nbytes,
               int device, cudaStream_t stream)
{
    struct cudaMemLocation where = {
        .type = device == cudaCpuDeviceId ? cudaMemLocationTypeHost
                                          : cudaMemLocationTypeDevice,
        .id = device == cudaCpuDeviceId ? 0 : device,
    };
#if CUDART_VERSION >= 13000
    return cudaMemPrefetchAsync(memory, nbytes, where, 0, stream);
#else
    if (rt->driver_version < 12020) {
        return cudaMemPrefetchAsync(memory, nbytes, device, stream);
    }
    return cudaMemPrefetchAsync_v2(memory, nbytes, where, 0, stream);
#endif
}

static int32_t
prefetch_location(cm_address address, uint64_t nbytes, int *out)
{
    int where = cudaInvalidDeviceId;
    CM_TRY_CODE(cudaMemRangeGetAttribute(&where, sizeof(where),
                                         cudaMemRangeAttributeLastPrefetchLocation,
                                         pointer(address), nbytes));
    *out = where;
    return CM_OK;
}

/* CUDA 12.8 brought it with an index of what failed, which CUDA 13 left out again. */
static int32_t
copy_batch_async(const cm_address *dsts, const cm_address *srcs, const uint64_t *nbytes,
                 uint64_t count, cudaStream_t stream)
{
    struct cudaMemcpyAttributes attributes = {
        .srcAccessOrder = cudaMemcpySrcAccessOrderStream,
    };
    size_t first = 0;
    _Static_assert(sizeof(cm_address) == sizeof(void *),
                   "arrays are passed as they are");
    _Static_assert(sizeof(uint64_t) == sizeof(size_t), "the same");
    /* CUDA only reads them. */
    void *to = pointer(integer(dsts));
    void *from = pointer(integer(srcs));
    void *sizes = pointer(integer(nbytes));
#if CUDART_VERSION >= 13000
    return (int32_t)cudaMemcpyBatchAsync(to, from, sizes, count, &attributes, &first, 1,
                                         stream);
#else
    size_t failed = 0;
    return (int32_t)cudaMemcpyBatchAsync(to, from, sizes, count, &attributes, &first, 1,
                                         &failed, stream);
#endif
}

/* ---- device memory mapped on demand ----------------------------------------------- */

/* Memory of the device, as `flags` wants it. */
static CUmemAllocationProp
properties(int device, unsigned flags)
{
    CUmemAllocationProp wanted = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = (flags & CM_PHYSICAL_SHAREABLE) != 0
                                    ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                    : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
    wanted.allocFlags.gpuDirectRDMACapable = (flags & CM_PHYSICAL_RDMA) != 0;
    return wanted;
}

static int32_t
physical_granularity(cm_runtime *rt, int device, unsigned flags, uint64_t *out)
{
    CUmemAllocationProp wanted = properties(device, flags);
    size_t granularity;
    CM_TRY_CODE(DRIVER(cuMemGetAllocationGranularity, &granularity, &wanted,
                       CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    *out = granularity;
    return CM_OK;
}

static int32_t
physical_create(cm_runtime *rt, uint64_t nbytes, int device, unsigned flags,
                uint64_t *out)
{
    CUmemAllocationProp wanted = properties(device, flags);
    CUmemGenericAllocationHandle handle;
    CM_TRY_CODE(DRIVER(cuMemCreate, &handle, nbytes, &wanted, 0));
    *out = handle;
    return CM_OK;
}

static int32_t
address_reserve(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    CUdeviceptr start;
    CM_TRY_CODE(DRIVER(cuMemAddressReserve, &start, nbytes, 0, 0, 0));
    *out = start;
    return CM_OK;
}

static int32_t
address_set_access(cm_runtime *rt, cm_address address, uint64_t nbytes,
                   const int *devices, int device_count)
{
    if (device_count < 0 || device_count > CM_MAX_DEVICES) {
        return CM_CUDA_INVALID_VALUE;
    }
    CUmemAccessDesc wanted[CM_MAX_DEVICES];
    for (int i = 0; i < device_count; i++) {
        wanted[i] = (CUmemAccessDesc){
            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = devices[i]},
            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
    }
    return DRIVER(cuMemSetAccess, address, nbytes, wanted, (size_t)device_count);
}

/* ---- kernels, streams and events --------------------------------------------------- */

static int32_t
module_load(cm_runtime *rt, const char *ptx, uint64_t *out)
{
    CUmodule module = NULL;
    CM_TRY_CODE(DRIVER(cuModuleLoadData, &module, ptx));
    *out = integer(module);
    return CM_OK;
}

static int32_t
module_function(cm_runtime *rt, uint64_t module, const char *name, uint64_t *out)
{
    CUfunction function = NULL;
    CM_TRY_CODE(DRIVER(cuModuleGetFunction, &function, pointer(module), name));
    *out = integer(function);
    return CM_OK;
}

static int32_t
kernel_launch(cm_runtime *rt, uint64_t function, uint32_t block_count,
              uint32_t threads_per_block, const void *params,
              uint64_t params_nbytes CM_UNUSED, uint64_t stream)
{
    /* One parameter: the struct. CUDA takes its size from the kernel and only reads. */
    void *arguments[1] = {pointer(integer(params))};
    return DRIVER(cuLaunchKernel, pointer(function), block_count, 1, 1,
                  threads_per_block, 1, 1, 0, pointer(stream), arguments, NULL);
}

/* "Not ready" is an answer, not a failure, but CUDA remembers it as one: clear it, or a
 * later cudaGetLastError() of this thread reports it. */
static int32_t
answer_query(cudaError_t error, bool *done)
{
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        *done = false;
        return CM_OK;
    }
    if (error == cudaSuccess) {
        *done = true;
    }
    return (int32_t)error;
}

static int32_t
stream_create(unsigned flags, int priority, uint64_t *out)
{
    cudaStream_t stream;
    CM_TRY_CODE(cudaStreamCreateWithPriority(&stream, flags, priority));
    *out = integer(stream);
    return CM_OK;
}

static int32_t
stream_get_id(uint64_t stream, uint64_t *out)
{
    unsigned long long id;
    CM_TRY_CODE(cudaStreamGetId(pointer(stream), &id));
    *out = id;
    return CM_OK;
}

static int32_t
stream_is_capturing(uint64_t stream, bool *out)
{
    enum cudaStreamCaptureStatus state;
    CM_TRY_CODE(cudaStreamIsCapturing(pointer(stream), &state));
    *out = state != cudaStreamCaptureStatusNone;
    return CM_OK;
}

static int32_t
capture_mode_exchange(int *mode)
{
    enum cudaStreamCaptureMode exchanged = (enum cudaStreamCaptureMode) * mode;
    CM_TRY_CODE(cudaThreadExchangeStreamCaptureMode(&exchanged));
    *mode = (int)exchanged;
    return CM_OK;
}

static int32_t
event_create(unsigned flags, uint64_t *out)
{
    cudaEvent_t event;
    CM_TRY_CODE(cudaEventCreateWithFlags(&event, flags));
    *out = integer(event);
    return CM_OK;
}

static int32_t
event_elapsed(uint64_t start, uint64_t end, float *milliseconds)
{
    float elapsed;
    CM_TRY_CODE(cudaEventElapsedTime(&elapsed, pointer(start), pointer(end)));
    *milliseconds = elapsed;
    return CM_OK;
}

/* ---- the table --------------------------------------------------------------------- */

/* What each operation does, in the words of its row in ops.h: a call, or a function
 * above. */
#define DO_driver_version cudaDriverGetVersion(out)
#define DO_runtime_version cudaRuntimeGetVersion(out)
#define DO_device_count device_count(out)
#define DO_device_set cudaSetDevice(device)
#define DO_context_get context_get(rt, out)
#define DO_context_set DRIVER(cuCtxSetCurrent, pointer(context))
#define DO_context_record_event context_record_event(rt, event)
#define DO_device_describe device_describe(device, out)
/* The runtime has the same numbers but does not list all of the driver's. An index of
 * the runtime is the driver's CUdevice. */
#define DO_device_attribute                                                            \
    DRIVER(cuDeviceGetAttribute, out, (CUdevice_attribute)attribute, device)
#define DO_device_synchronize cudaDeviceSynchronize()
#define DO_device_reset cudaDeviceReset()
#define DO_memory_info memory_info(free_nbytes, total_nbytes)
#define DO_peer_can_access cudaDeviceCanAccessPeer(out, device, peer)
#define DO_peer_enable cudaDeviceEnablePeerAccess(peer, 0)
#define DO_host_alloc host_alloc(nbytes, flags, out)
#define DO_host_free freed(cudaFreeHost(host))
#define DO_host_register cudaHostRegister(host, nbytes, flags)
#define DO_host_unregister freed(cudaHostUnregister(host))
#define DO_host_device_address host_device_address(host, out)
#define DO_device_alloc device_alloc(nbytes, out)
#define DO_managed_alloc managed_alloc(nbytes, flags, out)
#define DO_device_free freed(cudaFree(pointer(address)))
#define DO_pointer_attributes pointer_attributes(address, out)
#define DO_pointer_access pointer_access(rt, address, out)
#define DO_prefetch_async                                                              \
    prefetch_async(rt, pointer(address), nbytes, device, pointer(stream))
#define DO_prefetch_location prefetch_location(address, nbytes, out)
#define DO_physical_granularity physical_granularity(rt, device, flags, out)
#define DO_physical_create physical_create(rt, nbytes, device, flags, out)
#define DO_physical_release freed(DRIVER(cuMemRelease, handle))
#define DO_address_reserve address_reserve(rt, nbytes, out)
#define DO_address_free freed(DRIVER(cuMemAddressFree, address, nbytes))
#define DO_address_map DRIVER(cuMemMap, address, nbytes, 0, handle, 0)
#define DO_address_unmap freed(DRIVER(cuMemUnmap, address, nbytes))
#define DO_address_set_access                                                          \
    address_set_access(rt, address, nbytes, devices, device_count)
#define DO_copy_async                                                                  \
    cudaMemcpyAsync(pointer(dst), pointer(src), nbytes, cudaMemcpyDefault,             \
                    pointer(stream))
#define DO_copy_2d_async                                                               \
    cudaMemcpy2DAsync(pointer(dst), dst_pitch, pointer(src), src_pitch, width, height, \
                      cudaMemcpyDefault, pointer(stream))
#define DO_copy_peer_async                                                             \
    cudaMemcpyPeerAsync(pointer(dst), dst_device, pointer(src), src_device, nbytes,    \
                        pointer(stream))
#define DO_copy_batch_async copy_batch_async(dsts, srcs, nbytes, count, pointer(stream))
#define DO_fill_8_async cudaMemsetAsync(pointer(dst), value, count, pointer(stream))
#define DO_fill_16_async DRIVER(cuMemsetD16Async, dst, value, count, pointer(stream))
#define DO_fill_32_async DRIVER(cuMemsetD32Async, dst, value, count, pointer(stream))
#define DO_module_load module_load(rt, ptx, out)
#define DO_module_unload freed(DRIVER(cuModuleUnload, pointer(module)))
#define DO_module_function module_function(rt, module, name, out)
#define DO_kernel_launch                                                               \
    kernel_launch(rt, function, block_count, threads_per_block, params, params_nbytes, \
                  stream)
#define DO_stream_priority_range cudaDeviceGetStreamPriorityRange(least, greatest)
#define DO_stream_create stream_create(flags, priority, out)
#define DO_stream_destroy freed(cudaStreamDestroy(pointer(stream)))
#define DO_stream_query answer_query(cudaStreamQuery(pointer(stream)), done)
#define DO_stream_synchronize cudaStreamSynchronize(pointer(stream))
#define DO_stream_wait_event                                                           \
    cudaStreamWaitEvent(pointer(stream), pointer(event), cudaEventWaitDefault)
#define DO_stream_get_id stream_get_id(stream, out)
#define DO_stream_get_device cudaStreamGetDevice(pointer(stream), out)
#define DO_stream_get_priority cudaStreamGetPriority(pointer(stream), out)
#define DO_stream_is_capturing stream_is_capturing(stream, out)
#define DO_capture_mode_exchange capture_mode_exchange(mode)
#define DO_event_create event_create(flags, out)
#define DO_event_destroy freed(cudaEventDestroy(pointer(event)))
#define DO_event_record cudaEventRecord(pointer(event), pointer(stream))
#define DO_event_query answer_query(cudaEventQuery(pointer(event)), done)
#define DO_event_synchronize cudaEventSynchronize(pointer(event))
#define DO_event_elapsed event_elapsed(start, end, milliseconds)

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
        int32_t code = (int32_t)(DO_##name);                                           \
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
    cm_alive_page_destroy(rt->alive);
    free(rt);
}

/* The questions that need no context. A missing driver answers version 0. */
static cm_status
identify(cm_runtime *rt)
{
    int32_t code = (int32_t)cudaDriverGetVersion(&rt->driver_version);
    if (code == CM_OK && rt->driver_version == 0) {
        code = CM_CUDA_INSUFFICIENT_DRIVER;
    }
    if (code != CM_OK) {
        return failed(code, CM_OP_driver_version, 0);
    }
    code = (int32_t)cudaRuntimeGetVersion(&rt->runtime_version);
    if (code != CM_OK) {
        return failed(code, CM_OP_runtime_version, 0);
    }
    int count = 0;
    code = device_count(&count);
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
    find_functions(cuda);
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

int
cm_cuda_built_version(void)
{
    return CUDART_VERSION;
}
