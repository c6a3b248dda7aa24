/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that only the driver has: contexts, fills wider than a byte, modules. The
 * runtime hands out the driver's functions by name and version, so nothing is linked
 * against the driver and a function that it lacks is found missing here, not at load.
 */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/cuda_private.h"

/* X(function, the CUDA version of the signature asked for). */
#define DRIVER_FUNCTIONS(X)                                                            \
    X(cuCtxGetCurrent, 4000)                                                           \
    X(cuCtxSetCurrent, 4000)                                                           \
    X(cuCtxRecordEvent, 12050)                                                         \
    X(cuMemsetD16Async, 3020)                                                          \
    X(cuMemsetD32Async, 3020)                                                          \
    X(cuModuleLoadData, 2000)                                                          \
    X(cuModuleUnload, 2000)                                                            \
    X(cuModuleGetFunction, 2000)                                                       \
    X(cuLaunchKernel, 4000)

/* A function that the driver lacks is NULL. */
struct cm_cuda_driver {
#define FUNCTION_FIELD(name, version) PFN_##name##_v##version name;
    DRIVER_FUNCTIONS(FUNCTION_FIELD)
#undef FUNCTION_FIELD
};

/* The driver's error numbers are the runtime's for everything these calls answer. */
#define SAME(driver, runtime)                                                          \
    _Static_assert((int)(driver) == (int)(runtime), #driver " must be " #runtime)
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

/* A newer driver's new codes pass unchanged; the one number that only the driver uses
 * has no name among the runtime's. */
static int32_t
from_driver(CUresult result)
{
    return result == CUDA_ERROR_CONTEXT_ALREADY_CURRENT ? (int32_t)cudaErrorUnknown
                                                        : (int32_t)result;
}

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
    DRIVER_FUNCTIONS(FIND_FUNCTION)
#undef FIND_FUNCTION
    *out = driver;
    return CM_OK;
}

void
cm_cuda_driver_close(cm_cuda_driver *driver)
{
    free(driver);
}

static const cm_cuda_driver *
driver_of(const cm_runtime *rt)
{
    return ((const cm_cuda *)rt)->driver;
}

/* ---- contexts -------------------------------------------------------------------- */

int32_t
cm_cuda_context_get(cm_runtime *rt, uint64_t *out)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuCtxGetCurrent == NULL) {
        return CM_ENOTSUP;
    }
    CUcontext context = NULL;
    int32_t code = from_driver(driver->cuCtxGetCurrent(&context));
    if (code == CM_OK) {
        *out = cm_cuda_integer(context);
    }
    return code;
}

int32_t
cm_cuda_context_set(cm_runtime *rt, uint64_t context)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuCtxSetCurrent == NULL) {
        return CM_ENOTSUP;
    }
    return from_driver(driver->cuCtxSetCurrent(cm_cuda_pointer(context)));
}

int32_t
cm_cuda_context_record_event(cm_runtime *rt, uint64_t event)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuCtxRecordEvent == NULL) {
        return CM_ENOTSUP;
    }
    uint64_t context;
    int32_t code = cm_cuda_context_get(rt, &context);
    if (code != CM_OK) {
        return code;
    }
    return from_driver(
        driver->cuCtxRecordEvent(cm_cuda_pointer(context), cm_cuda_pointer(event)));
}

/* ---- fills wider than a byte ----------------------------------------------------- */

int32_t
cm_cuda_fill_16_async(cm_runtime *rt, cm_address dst, uint16_t value, uint64_t count,
                      uint64_t stream)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuMemsetD16Async == NULL) {
        return CM_ENOTSUP;
    }
    return from_driver(
        driver->cuMemsetD16Async(dst, value, count, cm_cuda_pointer(stream)));
}

int32_t
cm_cuda_fill_32_async(cm_runtime *rt, cm_address dst, uint32_t value, uint64_t count,
                      uint64_t stream)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuMemsetD32Async == NULL) {
        return CM_ENOTSUP;
    }
    return from_driver(
        driver->cuMemsetD32Async(dst, value, count, cm_cuda_pointer(stream)));
}

/* ---- modules and kernels --------------------------------------------------------- */

int32_t
cm_cuda_module_load(cm_runtime *rt, const char *ptx, uint64_t *out)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuModuleLoadData == NULL) {
        return CM_ENOTSUP;
    }
    CUmodule module = NULL;
    int32_t code = from_driver(driver->cuModuleLoadData(&module, ptx));
    if (code == CM_OK) {
        *out = cm_cuda_integer(module);
    }
    return code;
}

int32_t
cm_cuda_module_unload(cm_runtime *rt, uint64_t module)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuModuleUnload == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_freed(from_driver(driver->cuModuleUnload(cm_cuda_pointer(module))));
}

int32_t
cm_cuda_module_function(cm_runtime *rt, uint64_t module, const char *name,
                        uint64_t *out)
{
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuModuleGetFunction == NULL) {
        return CM_ENOTSUP;
    }
    CUfunction function = NULL;
    int32_t code = from_driver(
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
    const cm_cuda_driver *driver = driver_of(rt);
    if (driver->cuLaunchKernel == NULL) {
        return CM_ENOTSUP;
    }
    /* One parameter: the struct. CUDA takes its size from the kernel and only reads. */
    void *arguments[1] = {cm_cuda_pointer(cm_cuda_integer(params))};
    return from_driver(driver->cuLaunchKernel(
        cm_cuda_pointer(function), block_count, 1, 1, threads_per_block, 1, 1, 0,
        cm_cuda_pointer(stream), arguments, NULL));
}
