/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that only the driver has: contexts, all device attributes, fills wider
 * than a byte, modules. The runtime hands out the driver's functions by name and
 * version, so nothing is linked against the driver and a function that it lacks is
 * found missing here, not at load. */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/cuda_driver.h"

/* The driver's error numbers are the runtime's for everything these calls answer. */
#define SAME_NUMBER(driver, runtime)                                                   \
    _Static_assert((int)(driver) == (int)(runtime), #driver " must be " #runtime)
SAME_NUMBER(CUDA_SUCCESS, cudaSuccess);
SAME_NUMBER(CUDA_ERROR_INVALID_VALUE, cudaErrorInvalidValue);
SAME_NUMBER(CUDA_ERROR_OUT_OF_MEMORY, cudaErrorMemoryAllocation);
SAME_NUMBER(CUDA_ERROR_NOT_INITIALIZED, cudaErrorInitializationError);
SAME_NUMBER(CUDA_ERROR_DEINITIALIZED, cudaErrorCudartUnloading);
SAME_NUMBER(CUDA_ERROR_NO_DEVICE, cudaErrorNoDevice);
SAME_NUMBER(CUDA_ERROR_INVALID_DEVICE, cudaErrorInvalidDevice);
SAME_NUMBER(CUDA_ERROR_INVALID_IMAGE, cudaErrorInvalidKernelImage);
SAME_NUMBER(CUDA_ERROR_INVALID_CONTEXT, cudaErrorDeviceUninitialized);
SAME_NUMBER(CUDA_ERROR_NO_BINARY_FOR_GPU, cudaErrorNoKernelImageForDevice);
SAME_NUMBER(CUDA_ERROR_ECC_UNCORRECTABLE, cudaErrorECCUncorrectable);
SAME_NUMBER(CUDA_ERROR_INVALID_PTX, cudaErrorInvalidPtx);
SAME_NUMBER(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cudaErrorUnsupportedPtxVersion);
SAME_NUMBER(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, cudaErrorJitCompilerNotFound);
SAME_NUMBER(CUDA_ERROR_INVALID_HANDLE, cudaErrorInvalidResourceHandle);
SAME_NUMBER(CUDA_ERROR_NOT_FOUND, cudaErrorSymbolNotFound);
SAME_NUMBER(CUDA_ERROR_NOT_READY, cudaErrorNotReady);
SAME_NUMBER(CUDA_ERROR_ILLEGAL_ADDRESS, cudaErrorIllegalAddress);
SAME_NUMBER(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cudaErrorLaunchOutOfResources);
SAME_NUMBER(CUDA_ERROR_LAUNCH_TIMEOUT, cudaErrorLaunchTimeout);
SAME_NUMBER(CUDA_ERROR_CONTEXT_IS_DESTROYED, cudaErrorContextIsDestroyed);
SAME_NUMBER(CUDA_ERROR_ASSERT, cudaErrorAssert);
SAME_NUMBER(CUDA_ERROR_HARDWARE_STACK_ERROR, cudaErrorHardwareStackError);
SAME_NUMBER(CUDA_ERROR_ILLEGAL_INSTRUCTION, cudaErrorIllegalInstruction);
SAME_NUMBER(CUDA_ERROR_MISALIGNED_ADDRESS, cudaErrorMisalignedAddress);
SAME_NUMBER(CUDA_ERROR_INVALID_ADDRESS_SPACE, cudaErrorInvalidAddressSpace);
SAME_NUMBER(CUDA_ERROR_INVALID_PC, cudaErrorInvalidPc);
SAME_NUMBER(CUDA_ERROR_LAUNCH_FAILED, cudaErrorLaunchFailure);
SAME_NUMBER(CUDA_ERROR_NOT_PERMITTED, cudaErrorNotPermitted);
SAME_NUMBER(CUDA_ERROR_NOT_SUPPORTED, cudaErrorNotSupported);
SAME_NUMBER(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported);
SAME_NUMBER(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cudaErrorStreamCaptureInvalidated);
SAME_NUMBER(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cudaErrorStreamCaptureImplicit);
SAME_NUMBER(CUDA_ERROR_UNKNOWN, cudaErrorUnknown);

/* The attributes of runtime.h are the driver's. */
#define SAME_ATTRIBUTE(ours, theirs)                                                   \
    SAME_NUMBER(ATTRIBUTE_##ours, CU_DEVICE_ATTRIBUTE_##theirs)
#define ATTRIBUTE_ENUM(name, number) ATTRIBUTE_##name = (number),
enum { CM_DEVICE_ATTRIBUTES(ATTRIBUTE_ENUM) };
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

int32_t
cm_cuda_driver_open(int driver_version, cm_cuda_driver **out)
{
    cm_cuda_driver *driver = calloc(1, sizeof(*driver));
    if (driver == NULL) {
        return CM_ENOMEM;
    }
    /* ISO C has no cast from an object pointer to a function; POSIX gives both one
     * size. */
#define FIND_FUNCTION(name, version)                                                   \
    {                                                                                  \
        void *address = find_function(#name, version, driver_version);                 \
        memcpy(&driver->name, &address, sizeof(address));                              \
    }
    CM_DRIVER_FUNCTIONS(FIND_FUNCTION)
#undef FIND_FUNCTION
    *out = driver;
    return CM_OK;
}

void
cm_cuda_driver_close(cm_cuda_driver *driver)
{
    free(driver);
}

/* ---- contexts -------------------------------------------------------------------- */

int32_t
cm_cuda_context_get(cm_runtime *rt, uint64_t *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuCtxGetCurrent == NULL) {
        return CM_ENOTSUP;
    }
    CUcontext context = NULL;
    int32_t code = cm_cuda_from_driver(driver->cuCtxGetCurrent(&context));
    if (code == CM_OK) {
        *out = cm_cuda_integer(context);
    }
    return code;
}

int32_t
cm_cuda_context_set(cm_runtime *rt, uint64_t context)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuCtxSetCurrent == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_from_driver(driver->cuCtxSetCurrent(cm_cuda_pointer(context)));
}

int32_t
cm_cuda_context_record_event(cm_runtime *rt, uint64_t event)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuCtxRecordEvent == NULL) {
        return CM_ENOTSUP;
    }
    uint64_t context;
    int32_t code = cm_cuda_context_get(rt, &context);
    if (code != CM_OK) {
        return code;
    }
    return cm_cuda_from_driver(
        driver->cuCtxRecordEvent(cm_cuda_pointer(context), cm_cuda_pointer(event)));
}

/* ---- devices --------------------------------------------------------------------- */

/* The runtime has the same numbers but does not list all of the driver's. An index of
 * the runtime is the driver's CUdevice. */
int32_t
cm_cuda_device_attribute(cm_runtime *rt, int attribute, int device, int *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuDeviceGetAttribute == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_from_driver(
        driver->cuDeviceGetAttribute(out, (CUdevice_attribute)attribute, device));
}

/* ---- memory of other devices ----------------------------------------------------- */

SAME_NUMBER(CM_ACCESS_READ, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ);
SAME_NUMBER(CM_ACCESS_READ | CM_ACCESS_WRITE,
            CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE);

int32_t
cm_cuda_pointer_access(cm_runtime *rt, cm_address address, int *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuPointerGetAttribute == NULL) {
        return CM_ENOTSUP;
    }
    CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS access = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE;
    int32_t code = cm_cuda_from_driver(driver->cuPointerGetAttribute(
        &access, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, address));
    if (code == CM_OK) {
        *out = (int)access;
    }
    return code;
}

/* ---- fills wider than a byte ----------------------------------------------------- */

int32_t
cm_cuda_fill_16_async(cm_runtime *rt, cm_address dst, uint16_t value, uint64_t count,
                      uint64_t stream)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemsetD16Async == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_from_driver(
        driver->cuMemsetD16Async(dst, value, count, cm_cuda_pointer(stream)));
}

int32_t
cm_cuda_fill_32_async(cm_runtime *rt, cm_address dst, uint32_t value, uint64_t count,
                      uint64_t stream)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemsetD32Async == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_from_driver(
        driver->cuMemsetD32Async(dst, value, count, cm_cuda_pointer(stream)));
}

/* ---- modules and kernels --------------------------------------------------------- */

int32_t
cm_cuda_module_load(cm_runtime *rt, const char *ptx, uint64_t *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuModuleLoadData == NULL) {
        return CM_ENOTSUP;
    }
    CUmodule module = NULL;
    int32_t code = cm_cuda_from_driver(driver->cuModuleLoadData(&module, ptx));
    if (code == CM_OK) {
        *out = cm_cuda_integer(module);
    }
    return code;
}

int32_t
cm_cuda_module_unload(cm_runtime *rt, uint64_t module)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuModuleUnload == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_freed(
        cm_cuda_from_driver(driver->cuModuleUnload(cm_cuda_pointer(module))));
}

int32_t
cm_cuda_module_function(cm_runtime *rt, uint64_t module, const char *name,
                        uint64_t *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuModuleGetFunction == NULL) {
        return CM_ENOTSUP;
    }
    CUfunction function = NULL;
    int32_t code = cm_cuda_from_driver(
        driver->cuModuleGetFunction(&function, cm_cuda_pointer(module), name));
    if (code == CM_OK) {
        *out = cm_cuda_integer(function);
    }
    return code;
}

int32_t
cm_cuda_kernel_launch(cm_runtime *rt, uint64_t function, uint32_t block_count,
                      uint32_t threads_per_block, const void *params,
                      uint64_t params_nbytes CM_UNUSED, uint64_t stream)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuLaunchKernel == NULL) {
        return CM_ENOTSUP;
    }
    /* One parameter: the struct. CUDA takes its size from the kernel and only reads. */
    void *arguments[1] = {cm_cuda_pointer(cm_cuda_integer(params))};
    return cm_cuda_from_driver(driver->cuLaunchKernel(
        cm_cuda_pointer(function), block_count, 1, 1, threads_per_block, 1, 1, 0,
        cm_cuda_pointer(stream), arguments, NULL));
}
