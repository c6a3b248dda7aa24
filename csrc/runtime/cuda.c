/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the runtime over a real CUDA driver. No other file knows CUDA's headers.
 * Functions that only the driver has are found by name and version when the driver is
 * started. So nothing is linked against the driver, and if a driver lacks a function,
 * only calls of that function fail. Locks: none, since the functions do not change
 * after the driver was started. */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"

#if CUDART_VERSION < 12080
#    error "cumem needs the headers of CUDA 12.8 or newer (the driver may be older)"
#endif

/* ---- our numbers are CUDA's own, and the driver's are the runtime's -------------- */

#define SAME(ours, theirs)                                                             \
    _Static_assert((int)(ours) == (int)(theirs), #ours " must be " #theirs);
#define SAME_NUMBER(name, number, cuda) SAME(name, cuda)
CM_CUDA_NUMBERS(SAME_NUMBER)
#define SAME_ATTRIBUTE(name, number, cuda)                                             \
    SAME(CM_ATTRIBUTE_##name, CU_DEVICE_ATTRIBUTE_##cuda)
CM_DEVICE_ATTRIBUTES(SAME_ATTRIBUTE)

/* The driver uses the same codes as the runtime, at least for errors that the core
 * looks at. */
SAME(CUDA_SUCCESS, CM_OK)
SAME(CUDA_ERROR_INVALID_VALUE, CM_CUDA_INVALID_VALUE)
SAME(CUDA_ERROR_OUT_OF_MEMORY, CM_CUDA_OUT_OF_MEMORY)
SAME(CUDA_ERROR_DEINITIALIZED, CM_CUDA_UNLOADING)
SAME(CUDA_ERROR_NO_DEVICE, CM_CUDA_NO_DEVICE)
SAME(CUDA_ERROR_INVALID_DEVICE, CM_CUDA_INVALID_DEVICE)
SAME(CUDA_ERROR_INVALID_CONTEXT, CM_CUDA_DEVICE_UNINITIALIZED)
SAME(CUDA_ERROR_INVALID_HANDLE, CM_CUDA_INVALID_HANDLE)
SAME(CUDA_ERROR_NOT_READY, CM_CUDA_NOT_READY)
SAME(CUDA_ERROR_CONTEXT_IS_DESTROYED, CM_CUDA_CONTEXT_DESTROYED)
SAME(CUDA_ERROR_NOT_SUPPORTED, CM_CUDA_NOT_SUPPORTED)
SAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CM_CUDA_CAPTURE_UNSUPPORTED)
SAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CM_CUDA_CAPTURE_IMPLICIT)

/* ---- the driver's functions ------------------------------------------------------ */

/* X(function, the CUDA version whose signature is used). */
#define DRIVER_FUNCTIONS(X)                                                            \
    X(cuDeviceGetAttribute, 2000)                                                      \
    X(cuCtxGetCurrent, 4000)                                                           \
    X(cuCtxGetDevice, 2000)                                                            \
    X(cuCtxSetCurrent, 4000)                                                           \
    X(cuDevicePrimaryCtxGetState, 7000)                                                \
    X(cuCtxRecordEvent, 12050)                                                         \
    X(cuPointerGetAttribute, 4000)                                                     \
    X(cuThreadExchangeStreamCaptureMode, 10010)                                        \
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
    X(cuMemSetAccess, 10020)                                                           \
    X(cuMemPrefetchBatchAsync, 13000)                                                  \
    X(cuMemDiscardBatchAsync, 13000)

#if CUDA_VERSION < 13000 /* the driver may be newer than the headers */
typedef CUresult(CUDAAPI *PFN_cuMemPrefetchBatchAsync_v13000)(
    CUdeviceptr *addresses, size_t *sizes, size_t count, CUmemLocation *locations,
    size_t *firsts, size_t location_count, unsigned long long flags, CUstream stream);
typedef CUresult(CUDAAPI *PFN_cuMemDiscardBatchAsync_v13000)(CUdeviceptr *addresses,
                                                             size_t *sizes,
                                                             size_t count,
                                                             unsigned long long flags,
                                                             CUstream stream);
#endif

typedef struct cm_cuda {
    cm_runtime base; /* first, so that a cm_runtime pointer can be cast to this */
    struct {         /* NULL if the driver lacks the function */
#define FUNCTION_FIELD(name, version) PFN_##name##_v##version name;
        DRIVER_FUNCTIONS(FUNCTION_FIELD)
#undef FUNCTION_FIELD
    } driver;
} cm_cuda;

/* Return the address of the function `name` as of CUDA `version`, or NULL. A version
 * above the driver's own gives NULL at once, since the driver would refuse it as an
 * invalid value. Makes no context. */
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
    /* ISO C does not cast an object pointer to a function pointer. POSIX gives both the
     * same size, so the bytes are copied. */
#define FIND_FUNCTION(name, version)                                                   \
    {                                                                                  \
        void *address = find_function(#name, version, cuda->base.driver_version);      \
        memcpy(&cuda->driver.name, &address, sizeof(address));                         \
    }
    DRIVER_FUNCTIONS(FIND_FUNCTION)
#undef FIND_FUNCTION
}

/* Turn a code of the driver into one of the runtime. Codes that a newer driver adds
 * pass unchanged. CUDA_ERROR_CONTEXT_ALREADY_CURRENT is the only code of the driver for
 * which the runtime has no name, so it becomes an unknown error. */
static int32_t
from_driver(CUresult result)
{
    return result == CUDA_ERROR_CONTEXT_ALREADY_CURRENT ? (int32_t)cudaErrorUnknown
                                                        : (int32_t)result;
}

/* Call a function of the driver of `rt`. The result is its code, or CM_ENOTSUP if the
 * driver lacks the function. */
#define DRIVER(function, ...)                                                          \
    (((const cm_cuda *)rt)->driver.function == NULL                                    \
         ? CM_ENOTSUP                                                                  \
         : from_driver(((const cm_cuda *)rt)->driver.function(__VA_ARGS__)))

/* ---- operations that take more than a call --------------------------------------- */

/* Callers pass handles and addresses as integers, which become pointers again here. */
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

/* Make a `call` that stores a value of `type` at &found. On success *out is set to that
 * value. */
#define FIND(type, call)                                                               \
    __extension__({                                                                    \
        type found = 0;                                                                \
        int32_t find_code = (int32_t)(call);                                           \
        if (find_code == CM_OK) {                                                      \
            *out = (__typeof__(*out))(uintptr_t)found;                                 \
        }                                                                              \
        find_code;                                                                     \
    })

/* Return the code of a call that gives something back. */
static int32_t
freed(int32_t code)
{
    return cm_code_is_unloading(code) ? CM_OK : code;
}

/* ---- versions, devices and contexts ---------------------------------------------- */

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

/* A thread without a context is not a failure: CUDA's runtime would use device 0 for
 * it. */
static int32_t
context_device(cm_runtime *rt, int *out)
{
    CUdevice device = -1;
    int32_t code = DRIVER(cuCtxGetDevice, &device);
    *out = code == CM_OK ? (int)device : -1;
    return code == CM_CUDA_DEVICE_UNINITIALIZED ? CM_OK : code;
}

static int32_t
context_record_event(cm_runtime *rt, uint64_t event)
{
    CUcontext context = NULL;
    CM_TRY_CODE(DRIVER(cuCtxGetCurrent, &context));
    return DRIVER(cuCtxRecordEvent, context, pointer(event));
}

/* ---- memory ----------------------------------------------------------------------- */

static cm_kind
kind_of_type(enum cudaMemoryType type)
{
    switch (type) {
    case cudaMemoryTypeHost:
        return CM_KIND_PINNED;
    case cudaMemoryTypeManaged:
        return CM_KIND_MANAGED;
    case cudaMemoryTypeDevice:
        return CM_KIND_DEVICE;
    default:
        return CM_KIND_PAGEABLE;
    }
}

/* Ask the driver about an address. Memory that it does not know is PAGEABLE. */
static int32_t
pointer_attributes(cm_address address, cm_pointer_info *out)
{
    struct cudaPointerAttributes found;
    CM_TRY_CODE(cudaPointerGetAttributes(&found, pointer(address)));
    cm_kind kind = kind_of_type(found.type);
    *out = (cm_pointer_info){
        .kind = kind,
        .device = found.device,
        .device_address = integer(found.devicePointer),
        .host_address = cm_kind_is_on_device(kind) ? NULL : found.hostPointer,
    };
    if (kind == CM_KIND_PAGEABLE) {
        *out = (cm_pointer_info){CM_KIND_PAGEABLE, -1, 0, pointer(address)};
    }
    return CM_OK;
}

/* ---- managed memory ---------------------------------------------------------------- */

enum { LOCATIONS = 12020 }; /* the first driver that takes a location */

static struct cudaMemLocation
location_of(int location)
{
    if (location >= 0) {
        return (struct cudaMemLocation){.type = cudaMemLocationTypeDevice,
                                        .id = location};
    }
    if (location == CM_HOST_LOCATION) {
        return (struct cudaMemLocation){.type = cudaMemLocationTypeHost};
    }
    return (struct cudaMemLocation){.type = cudaMemLocationTypeHostNuma,
                                    .id = CM_NUMA_LOCATION(location)};
}

/* cudaMemPrefetchAsync and cudaMemAdvise take a location from CUDA 12.2 on, under names
 * with _v2, and from CUDA 13 on under the plain names. Older drivers take only a device
 * index. */
static int32_t
prefetch_async(const cm_runtime *rt, const void *memory, size_t nbytes, int location,
               cudaStream_t stream)
{
    if (rt->driver_version < LOCATIONS && location < CM_HOST_LOCATION) {
        return CM_CUDA_NOT_SUPPORTED;
    }
#if CUDART_VERSION >= 13000
    return (int32_t)cudaMemPrefetchAsync(memory, nbytes, location_of(location), 0,
                                         stream);
#else
    return (int32_t)(rt->driver_version < LOCATIONS
                         ? cudaMemPrefetchAsync(memory, nbytes, location, stream)
                         : cudaMemPrefetchAsync_v2(memory, nbytes,
                                                   location_of(location), 0, stream));
#endif
}

static int32_t
advise(const cm_runtime *rt, const void *memory, size_t nbytes, int number,
       int location)
{
    enum cudaMemoryAdvise advice = (enum cudaMemoryAdvise)number;
    if (rt->driver_version < LOCATIONS && location < CM_HOST_LOCATION) {
        return CM_CUDA_NOT_SUPPORTED;
    }
#if CUDART_VERSION >= 13000
    return (int32_t)cudaMemAdvise(memory, nbytes, advice, location_of(location));
#else
    return (
        int32_t)(rt->driver_version < LOCATIONS
                     ? cudaMemAdvise(memory, nbytes, advice, location)
                     : cudaMemAdvise_v2(memory, nbytes, advice, location_of(location)));
#endif
}

static int32_t
prefetch_batch_async(cm_runtime *rt, const cm_address *addresses,
                     const uint64_t *nbytes, uint64_t count, int location,
                     uint64_t stream)
{
    struct cudaMemLocation wanted = location_of(location);
    CUmemLocation where = {.type = (CUmemLocationType)wanted.type, .id = wanted.id};
    size_t first = 0;
    return DRIVER(cuMemPrefetchBatchAsync, pointer(integer(addresses)),
                  pointer(integer(nbytes)), count, &where, &first, 1, 0,
                  pointer(stream));
}

/* For a location that is a NUMA node, the old attribute says only that it is the host,
 * or that there is no location. Newer drivers have a second attribute, which says which
 * node it is. */
static int32_t
range_attribute(const cm_runtime *rt, const void *memory, size_t nbytes, int attribute,
                int *out, int count)
{
    int type = 0, node = 0;
    CM_TRY_CODE(cudaMemRangeGetAttribute(out, (size_t)count * sizeof(*out),
                                         (enum cudaMemRangeAttribute)attribute, memory,
                                         nbytes));
    bool is_location =
        attribute == CM_RANGE_PREFERRED || attribute == CM_RANGE_PREFETCHED;
    if (!is_location || *out >= 0 || rt->driver_version < LOCATIONS) {
        return CM_OK;
    }
    bool preferred = attribute == CM_RANGE_PREFERRED;
    CM_TRY_CODE(cudaMemRangeGetAttribute(
        &type, sizeof(type),
        preferred ? cudaMemRangeAttributePreferredLocationType
                  : cudaMemRangeAttributeLastPrefetchLocationType,
        memory, nbytes));
    if (type == cudaMemLocationTypeHostNuma) {
        CM_TRY_CODE(cudaMemRangeGetAttribute(
            &node, sizeof(node),
            preferred ? cudaMemRangeAttributePreferredLocationId
                      : cudaMemRangeAttributeLastPrefetchLocationId,
            memory, nbytes));
        *out = CM_NUMA_LOCATION(node);
    }
    return CM_OK;
}

/* ---- device memory mapped on demand ----------------------------------------------- */

/* Return the properties of physical memory with these `flags`. */
static CUmemAllocationProp
properties(int device, unsigned flags)
{
    CUmemAllocationProp wanted = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
    wanted.allocFlags.gpuDirectRDMACapable = (flags & CM_PHYSICAL_RDMA) != 0;
    return wanted;
}

static int32_t
physical_granularity(cm_runtime *rt, int device, unsigned flags, uint64_t *out)
{
    CUmemAllocationProp wanted = properties(device, flags);
    return FIND(size_t, DRIVER(cuMemGetAllocationGranularity, &found, &wanted,
                               CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

static int32_t
physical_create(cm_runtime *rt, uint64_t nbytes, int device, unsigned flags,
                uint64_t *out)
{
    CUmemAllocationProp wanted = properties(device, flags);
    return FIND(CUmemGenericAllocationHandle,
                DRIVER(cuMemCreate, &found, nbytes, &wanted, 0));
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
kernel_launch(cm_runtime *rt, uint64_t function, uint32_t block_count,
              uint32_t threads_per_block, const void *params,
              uint64_t params_nbytes CM_UNUSED, uint64_t stream)
{
    /* The struct is the only parameter. CUDA knows the size of the struct from the
     * kernel, and only reads the struct. */
    void *arguments[1] = {pointer(integer(params))};
    return DRIVER(cuLaunchKernel, pointer(function), block_count, 1, 1,
                  threads_per_block, 1, 1, 0, pointer(stream), arguments, NULL);
}

/* Handle the result of a query. "Not ready" is an answer and not a failure, but CUDA
 * remembers it as a failure. So this function clears it, since otherwise a later
 * cudaGetLastError() of this thread would report it. */
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

/* This calls the driver's function, since the runtime's would make a context for a
 * thread that has none. */
static int32_t
capture_mode_exchange(cm_runtime *rt, int *mode)
{
    CUstreamCaptureMode exchanged = (CUstreamCaptureMode)*mode;
    CM_TRY_CODE(DRIVER(cuThreadExchangeStreamCaptureMode, &exchanged));
    *mode = (int)exchanged;
    return CM_OK;
}

/* Find the number of devices. While the runtime is asleep this is the number that was
 * passed to cm_cuda_open(). */
static int32_t
count_devices(const cm_runtime *rt, int *out)
{
    if (cm_runtime_is_awake(rt)) {
        return FIND(int, cudaGetDeviceCount(&found));
    }
    *out = rt->device_count;
    return CM_OK;
}

/* ---- the table --------------------------------------------------------------------- */

/* Each DO_… is what one operation does: a call of CUDA, or of one of the functions
 * above. It uses the parameters of the operation's row in ops.h. */
#define DO_driver_version (*out = rt->driver_version, CM_OK)
#define DO_runtime_version (*out = CUDART_VERSION, CM_OK)
#define DO_device_count count_devices(rt, out)
#define DO_device_set cudaSetDevice(device)
#define DO_context_get FIND(CUcontext, DRIVER(cuCtxGetCurrent, &found))
#define DO_context_device context_device(rt, out)
#define DO_context_set DRIVER(cuCtxSetCurrent, pointer(context))
#define DO_context_is_active                                                           \
    FIND(int, DRIVER(cuDevicePrimaryCtxGetState, device, &(unsigned){0}, &found))
#define DO_context_record_event context_record_event(rt, event)
#define DO_device_describe device_describe(device, out)
/* The attributes of the runtime have the same numbers, but the runtime does not list
 * all of the driver's. A device index of the runtime is the driver's CUdevice. */
#define DO_device_attribute                                                            \
    DRIVER(cuDeviceGetAttribute, out, (CUdevice_attribute)attribute, device)
#define DO_device_synchronize cudaDeviceSynchronize()
#define DO_device_reset cudaDeviceReset()
#define DO_memory_info cudaMemGetInfo(free_nbytes, total_nbytes)
#define DO_peer_can_access cudaDeviceCanAccessPeer(out, device, peer)
#define DO_peer_enable cudaDeviceEnablePeerAccess(peer, 0)
#define DO_host_alloc FIND(void *, cudaHostAlloc(&found, nbytes, flags))
#define DO_host_free freed(cudaFreeHost(host))
#define DO_host_register cudaHostRegister(host, nbytes, flags)
#define DO_host_unregister freed(cudaHostUnregister(host))
#define DO_host_device_address FIND(void *, cudaHostGetDevicePointer(&found, host, 0))
#define DO_device_alloc FIND(void *, cudaMalloc(&found, nbytes))
#define DO_managed_alloc FIND(void *, cudaMallocManaged(&found, nbytes, flags))
#define DO_device_free freed(cudaFree(pointer(address)))
#define DO_pointer_attributes pointer_attributes(address, out)
#define DO_pointer_access                                                              \
    FIND(CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS,                                          \
         DRIVER(cuPointerGetAttribute, &found, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,      \
                address))
#define DO_prefetch_async                                                              \
    prefetch_async(rt, pointer(address), nbytes, location, pointer(stream))
#define DO_prefetch_batch_async                                                        \
    prefetch_batch_async(rt, addresses, nbytes, count, location, stream)
#define DO_discard_batch_async                                                         \
    DRIVER(cuMemDiscardBatchAsync, pointer(integer(addresses)),                        \
           pointer(integer(nbytes)), count, 0, pointer(stream))
#define DO_advise advise(rt, pointer(address), nbytes, advice, location)
#define DO_range_attribute                                                             \
    range_attribute(rt, pointer(address), nbytes, attribute, out, count)
#define DO_physical_granularity physical_granularity(rt, device, flags, out)
#define DO_physical_create physical_create(rt, nbytes, device, flags, out)
#define DO_physical_release freed(DRIVER(cuMemRelease, handle))
#define DO_address_reserve                                                             \
    FIND(CUdeviceptr, DRIVER(cuMemAddressReserve, &found, nbytes, 0, 0, 0))
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
#define DO_fill_8_async cudaMemsetAsync(pointer(dst), value, count, pointer(stream))
#define DO_fill_16_async DRIVER(cuMemsetD16Async, dst, value, count, pointer(stream))
#define DO_fill_32_async DRIVER(cuMemsetD32Async, dst, value, count, pointer(stream))
#define DO_module_load FIND(CUmodule, DRIVER(cuModuleLoadData, &found, ptx))
#define DO_module_unload freed(DRIVER(cuModuleUnload, pointer(module)))
#define DO_module_function                                                             \
    FIND(CUfunction, DRIVER(cuModuleGetFunction, &found, pointer(module), name))
#define DO_kernel_launch                                                               \
    kernel_launch(rt, function, block_count, threads_per_block, params, params_nbytes, \
                  stream)
#define DO_stream_priority_range cudaDeviceGetStreamPriorityRange(least, greatest)
#define DO_stream_create                                                               \
    FIND(cudaStream_t, cudaStreamCreateWithPriority(&found, flags, priority))
#define DO_stream_destroy freed(cudaStreamDestroy(pointer(stream)))
#define DO_stream_query answer_query(cudaStreamQuery(pointer(stream)), done)
#define DO_stream_synchronize cudaStreamSynchronize(pointer(stream))
#define DO_stream_wait_event                                                           \
    cudaStreamWaitEvent(pointer(stream), pointer(event), cudaEventWaitDefault)
#define DO_stream_get_id                                                               \
    FIND(unsigned long long, cudaStreamGetId(pointer(stream), &found))
#define DO_stream_get_device cudaStreamGetDevice(pointer(stream), out)
#define DO_stream_get_priority cudaStreamGetPriority(pointer(stream), out)
#define DO_stream_is_capturing                                                         \
    FIND(enum cudaStreamCaptureStatus, cudaStreamIsCapturing(pointer(stream), &found))
#define DO_capture_mode_exchange capture_mode_exchange(rt, mode)
#define DO_event_create FIND(cudaEvent_t, cudaEventCreateWithFlags(&found, flags))
#define DO_event_destroy freed(cudaEventDestroy(pointer(event)))
#define DO_event_record cudaEventRecord(pointer(event), pointer(stream))
#define DO_event_query answer_query(cudaEventQuery(pointer(event)), done)
#define DO_event_synchronize cudaEventSynchronize(pointer(event))
#define DO_event_elapsed                                                               \
    cudaEventElapsedTime(milliseconds, pointer(start), pointer(end))

/* Make a status of a failure. CUDA keeps the last error of each thread until somebody
 * asks for it. So this function clears the error. Otherwise a failure that we report
 * would turn up again in the next cudaGetLastError() of other code. */
static cm_status
failed(int32_t code, cm_op op, uint64_t arg)
{
    if (code > 0) {
        (void)cudaGetLastError();
    }
    return (cm_status){.code = code, .op = (uint16_t)op, .arg = arg};
}

/* The first operation starts the driver, unless it only asks for facts that are known
 * without it. */
static inline cm_status
wake_for(cm_runtime *rt, cm_op op)
{
    bool asks_of_all = op == CM_OP_driver_version || op == CM_OP_runtime_version
                       || op == CM_OP_device_count;
    if (CM_LIKELY(cm_runtime_is_awake(rt)) || asks_of_all) {
        return cm_ok();
    }
    return cm_runtime_wake(rt);
}

#define CALL(name, cuda, oldest, arg, params, args)                                    \
    static cm_status call_##name CM_OP_PARAMS params                                   \
    {                                                                                  \
        CM_TRY(wake_for(rt, CM_OP_##name));                                            \
        int32_t code = CM_LIKELY(rt->driver_version >= (oldest))                       \
                           ? (int32_t)(DO_##name)                                      \
                           : CM_ENOTSUP;                                               \
        return CM_LIKELY(code == CM_OK)                                                \
                   ? cm_ok()                                                           \
                   : failed(code, CM_OP_##name, (uint64_t)CM_ARGUMENT_VALUE arg);      \
    }
CM_OPS(CALL)
#undef CALL

static const cm_ops_table cuda_ops = {
#define ENTRY(name, cuda, oldest, arg, params, args) .name = call_##name,
    CM_OPS(ENTRY)
#undef ENTRY
};

enum { OLDEST_DRIVER = 12000 }; /* the oldest that a runtime of CUDA 12 works on */

/* ---- open and close -------------------------------------------------------------- */

static void
close_runtime(cm_runtime *rt)
{
    cm_alive_page_destroy(rt->alive);
    free(rt);
}

/* Find a function in the driver's library. This does not use the CUDA runtime library,
 * because any call of the latter would start the driver, and a started driver works in
 * no forked child. The driver's library is never closed, since other code may be using
 * it. Returns NULL if there is no such library or function. */
static void *
driver_function(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library == NULL ? NULL : dlsym(library, name);
}

int
cm_cuda_find_driver(void)
{
    CUresult (*get_version)(int *);
    void *address = driver_function("cuDriverGetVersion");
    int version = 0;
    memcpy(&get_version, &address, sizeof(address));
    bool is_found = address != NULL && get_version(&version) == CUDA_SUCCESS;
    return is_found && version >= OLDEST_DRIVER ? version : 0;
}

/* True if somebody in the process has started the driver. Before that
 * cuDeviceGetCount() fails. */
static bool
is_driver_started(const cm_runtime *rt CM_UNUSED)
{
    CUresult (*get_count)(int *);
    void *address = driver_function("cuDeviceGetCount");
    int count = 0;
    memcpy(&get_count, &address, sizeof(address));
    return address != NULL && get_count(&count) == CUDA_SUCCESS;
}

/* Start the driver, and replace the assumed number of devices by the one that it
 * reports. */
static cm_status
start_driver(cm_runtime *rt)
{
    int count = 0;
    int32_t code = (int32_t)cudaGetDeviceCount(&count);
    if (code != CM_OK) {
        return failed(code, CM_OP_device_count, 0);
    }
    if (count == 0) {
        return failed(CM_CUDA_NO_DEVICE, CM_OP_device_count, 0);
    }
    rt->device_count = count < CM_MAX_DEVICES ? count : CM_MAX_DEVICES;
    find_functions((cm_cuda *)(void *)rt);
    return cm_ok();
}

cm_status
cm_cuda_open(int device_count, cm_runtime **out)
{
    int version = cm_cuda_find_driver();
    if (version == 0) {
        return failed(CM_CUDA_INSUFFICIENT_DRIVER, CM_OP_driver_version, 0);
    }
    cm_cuda *cuda = calloc(1, sizeof(*cuda));
    CM_TRY(cm_allocated(cuda != NULL, sizeof(*cuda)));
    cm_runtime *rt = &cuda->base;
    rt->ops = &cuda_ops;
    rt->backend = CM_BACKEND_CUDA;
    rt->driver_version = version;
    rt->runtime_version = CUDART_VERSION;
    rt->device_count = device_count < CM_MAX_DEVICES ? device_count : CM_MAX_DEVICES;
    rt->reason = "";
    rt->wake = start_driver;
    rt->is_started = is_driver_started;
    rt->close = close_runtime;
    cm_status status = cm_alive_page_create(&rt->alive);
    if (cm_is_ok(status) && (device_count < 0 || is_driver_started(rt))) {
        /* If other code has started the driver, asking it costs nothing more. */
        status = cm_runtime_wake(rt);
    }
    if (!cm_is_ok(status)) {
        close_runtime(rt);
        return status;
    }
    *out = rt;
    return status;
}

int
cm_cuda_built_version(void)
{
    return CUDART_VERSION;
}
