/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's functions, found by name and version when the runtime is opened, for the
 * files whose operations call them. Private to cuda_*.c. Locks: none; read-only. */
#ifndef CM_RUNTIME_CUDA_DRIVER_H
#define CM_RUNTIME_CUDA_DRIVER_H

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "runtime/cuda_private.h"

/* X(function, the CUDA version of the signature asked for). */
#define CM_DRIVER_FUNCTIONS(X)                                                         \
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

/* A function that the driver lacks is NULL. */
struct cm_cuda_driver {
#define CM_FUNCTION_FIELD(name, version) PFN_##name##_v##version name;
    CM_DRIVER_FUNCTIONS(CM_FUNCTION_FIELD)
#undef CM_FUNCTION_FIELD
};

/* A newer driver's new codes pass unchanged; the one number that only the driver uses
 * has no name among the runtime's. */
static inline int32_t
cm_cuda_from_driver(CUresult result)
{
    return result == CUDA_ERROR_CONTEXT_ALREADY_CURRENT ? (int32_t)cudaErrorUnknown
                                                        : (int32_t)result;
}

static inline const cm_cuda_driver *
cm_cuda_driver_of(const cm_runtime *rt)
{
    return ((const cm_cuda *)rt)->driver;
}

#endif
