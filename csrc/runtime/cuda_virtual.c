/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory mapped on demand: ranges of addresses, physical memory, and the one put
 * at the other, over the driver. */
#include "runtime/cuda_driver.h"

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

int32_t
cm_cuda_physical_granularity(cm_runtime *rt, int device, unsigned flags, uint64_t *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemGetAllocationGranularity == NULL) {
        return CM_ENOTSUP;
    }
    CUmemAllocationProp wanted = properties(device, flags);
    size_t granularity;
    int32_t code = cm_cuda_from_driver(driver->cuMemGetAllocationGranularity(
        &granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    if (code == CM_OK) {
        *out = granularity;
    }
    return code;
}

int32_t
cm_cuda_physical_create(cm_runtime *rt, uint64_t nbytes, int device, unsigned flags,
                        uint64_t *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemCreate == NULL) {
        return CM_ENOTSUP;
    }
    CUmemAllocationProp wanted = properties(device, flags);
    CUmemGenericAllocationHandle handle;
    int32_t code =
        cm_cuda_from_driver(driver->cuMemCreate(&handle, nbytes, &wanted, 0));
    if (code == CM_OK) {
        *out = handle;
    }
    return code;
}

int32_t
cm_cuda_physical_release(cm_runtime *rt, uint64_t handle)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemRelease == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_freed(cm_cuda_from_driver(driver->cuMemRelease(handle)));
}

int32_t
cm_cuda_address_reserve(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemAddressReserve == NULL) {
        return CM_ENOTSUP;
    }
    CUdeviceptr start;
    int32_t code =
        cm_cuda_from_driver(driver->cuMemAddressReserve(&start, nbytes, 0, 0, 0));
    if (code == CM_OK) {
        *out = start;
    }
    return code;
}

int32_t
cm_cuda_address_free(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemAddressFree == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_freed(
        cm_cuda_from_driver(driver->cuMemAddressFree(address, nbytes)));
}

int32_t
cm_cuda_address_map(cm_runtime *rt, cm_address address, uint64_t nbytes,
                    uint64_t handle)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemMap == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_from_driver(driver->cuMemMap(address, nbytes, 0, handle, 0));
}

int32_t
cm_cuda_address_unmap(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemUnmap == NULL) {
        return CM_ENOTSUP;
    }
    return cm_cuda_freed(cm_cuda_from_driver(driver->cuMemUnmap(address, nbytes)));
}

int32_t
cm_cuda_address_set_access(cm_runtime *rt, cm_address address, uint64_t nbytes,
                           const int *devices, int device_count)
{
    const cm_cuda_driver *driver = cm_cuda_driver_of(rt);
    if (driver->cuMemSetAccess == NULL) {
        return CM_ENOTSUP;
    }
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
    return cm_cuda_from_driver(
        driver->cuMemSetAccess(address, nbytes, wanted, (size_t)device_count));
}
