/* SPDX-License-Identifier: Apache-2.0 */
/* This is the one list of all CUDA calls that cumem can make. These are generated from
 * it: the enum of operations, the table of names, the type of the table of functions,
 * the callers cm_rt_… and the whole fault wrapper. A new operation is one row here and
 * two bodies (in cuda.c and emulated/); nothing else names it.
 *
 * X(name, CUDA function, oldest driver, (kind, argument), (parameters), (arguments))
 *
 * `argument` is the argument that tells most about a failure, and `kind` is the name
 * under which cumem/base/errors.py has a text for such an argument. CM_OP_PARAMS and
 * CM_OP_ARGS put `cm_runtime *rt` in front of the parameters.
 *
 * Example: the row of host_alloc makes cm_rt_host_alloc(rt, nbytes, flags, &out), which
 * calls cudaHostAlloc or its emulation. If that fails, the status names the operation
 * and carries `nbytes`, and the message can say how much was asked for.
 *
 * The oldest driver is 12000 unless the function came later. On an older driver the
 * call answers CM_ENOTSUP, and the comment of the row says what is done without it.
 * Streams, events, contexts, modules and kernels are handles, which are passed as
 * integers. 0 means none, except for a stream, where it means the legacy default
 * stream. Operations that act on "the current device" need cm_device_enter() around
 * them. Out-parameters come last, and are written only on success. */
#pragma once

#define CM_OP_PARAMS(...) (cm_runtime * rt __VA_OPT__(, ) __VA_ARGS__)
#define CM_OP_ARGS(...) (rt __VA_OPT__(, ) __VA_ARGS__)

/* clang-format off */
#define CM_OPS(X)                                                                        \
    /* -- versions, devices, contexts ------------------------------------------------ */ \
    X(driver_version, cudaDriverGetVersion, 12000, (NOTHING, 0), (int *out), (out))      \
    X(runtime_version, cudaRuntimeGetVersion, 12000, (NOTHING, 0), (int *out), (out))    \
    X(device_count, cudaGetDeviceCount, 12000, (NOTHING, 0), (int *out), (out))          \
    X(device_set, cudaSetDevice, 12000, (DEVICE, device), (int device), (device))        \
    /* Get the calling thread's context, or 0 if it has none. Creates no context. */     \
    X(context_get, cuCtxGetCurrent, 12000, (NOTHING, 0), (uint64_t *out), (out))         \
    X(context_set, cuCtxSetCurrent, 12000, (CONTEXT, context),                           \
      (uint64_t context), (context))                                                     \
    /* Get the device of the calling thread's context, or -1 if it has none. Creates no  \
     * context. */                                                                       \
    X(context_device, cuCtxGetDevice, 12000, (NOTHING, 0), (int *out), (out))            \
    /* Find out if a device has a primary context, whoever made it. Creates none. */     \
    X(context_is_active, cuDevicePrimaryCtxGetState, 12000, (DEVICE, device),            \
      (int device, bool *out), (device, out))                                            \
    /* Record all work of the current context so far. Without it, device_synchronize     \
     * is called instead. */                                                             \
    X(context_record_event, cuCtxRecordEvent, 12050, (EVENT, event),                     \
      (uint64_t event), (event))                                                         \
    X(device_describe, cudaGetDeviceProperties, 12000, (DEVICE, device),                 \
      (int device, cm_device_info *out), (device, out))                                  \
    X(device_attribute, cuDeviceGetAttribute, 12000, (ATTRIBUTE, attribute),             \
      (int attribute, int device, int *out), (attribute, device, out))                   \
    X(device_synchronize, cudaDeviceSynchronize, 12000, (NOTHING, 0), (), ())            \
    X(device_reset, cudaDeviceReset, 12000, (NOTHING, 0), (), ())                        \
    X(memory_info, cudaMemGetInfo, 12000, (NOTHING, 0),                                  \
      (uint64_t *free_nbytes, uint64_t *total_nbytes), (free_nbytes, total_nbytes))      \
    X(peer_can_access, cudaDeviceCanAccessPeer, 12000, (PEER, peer),                     \
      (int device, int peer, int *out), (device, peer, out))                             \
    /* Let the current device use what cudaMalloc gives on `peer`, now and later. */     \
    X(peer_enable, cudaDeviceEnablePeerAccess, 12000, (PEER, peer), (int peer), (peer))  \
    /* -- memory --------------------------------------------------------------------- */ \
    X(host_alloc, cudaHostAlloc, 12000, (NBYTES, nbytes),                                \
      (uint64_t nbytes, unsigned flags, void **out), (nbytes, flags, out))               \
    X(host_free, cudaFreeHost, 12000, (ADDRESS, (uintptr_t)host), (void *host), (host))  \
    X(host_register, cudaHostRegister, 12000, (NBYTES, nbytes),                          \
      (void *host, uint64_t nbytes, unsigned flags), (host, nbytes, flags))              \
    X(host_unregister, cudaHostUnregister, 12000, (ADDRESS, (uintptr_t)host),            \
      (void *host), (host))                                                              \
    X(host_device_address, cudaHostGetDevicePointer, 12000, (ADDRESS, (uintptr_t)host),  \
      (void *host, cm_address *out), (host, out))                                        \
    X(device_alloc, cudaMalloc, 12000, (NBYTES, nbytes),                                 \
      (uint64_t nbytes, cm_address *out), (nbytes, out))                                 \
    X(managed_alloc, cudaMallocManaged, 12000, (NBYTES, nbytes),                         \
      (uint64_t nbytes, unsigned flags, cm_address *out), (nbytes, flags, out))          \
    /* Frees device and managed memory. */                                               \
    X(device_free, cudaFree, 12000, (ADDRESS, address), (cm_address address), (address)) \
    X(pointer_attributes, cudaPointerGetAttributes, 12000, (ADDRESS, address),           \
      (cm_address address, cm_pointer_info *out), (address, out))                        \
    /* Find out what the current device may do with device memory: CM_ACCESS_…. */       \
    X(pointer_access, cuPointerGetAttribute, 12000, (ADDRESS, address),                  \
      (cm_address address, int *out), (address, out))                                    \
    /* -- managed memory. A location is the index of a device, CM_HOST_LOCATION, or      \
     * CM_NUMA_LOCATION(node), which drivers before 12.2 refuse as not supported. */     \
    X(prefetch_async, cudaMemPrefetchAsync, 12000, (NBYTES, nbytes),                     \
      (cm_address address, uint64_t nbytes, int location, uint64_t stream),              \
      (address, nbytes, location, stream))                                               \
    /* Queue several prefetches, which may be done in any order. The legacy default      \
     * stream is refused. Without this call, each prefetch is a prefetch_async. */       \
    X(prefetch_batch_async, cuMemPrefetchBatchAsync, 13000, (ELEMENTS, count),           \
      (const cm_address *addresses, const uint64_t *nbytes, uint64_t count,              \
       int location, uint64_t stream),                                                   \
      (addresses, nbytes, count, location, stream))                                      \
    /* Tell the driver that nobody needs the bytes any more. The legacy default stream   \
     * is refused. Without it, the caller gets an error. */                              \
    X(discard_batch_async, cuMemDiscardBatchAsync, 13000, (ELEMENTS, count),             \
      (const cm_address *addresses, const uint64_t *nbytes, uint64_t count,              \
       uint64_t stream),                                                                 \
      (addresses, nbytes, count, stream))                                                \
    /* `advice` is one of CM_ADVISE_…; some of them ignore `location`. */                \
    X(advise, cudaMemAdvise, 12000, (NBYTES, nbytes),                                    \
      (cm_address address, uint64_t nbytes, int advice, int location),                   \
      (address, nbytes, advice, location))                                               \
    /* `attribute` is one of CM_RANGE_…, and the answer is `count` numbers or            \
     * locations. CM_NO_LOCATION means that there is none, or that it is not the same    \
     * for all pages. */                                                                 \
    X(range_attribute, cudaMemRangeGetAttribute, 12000, (ADDRESS, address),              \
      (cm_address address, uint64_t nbytes, int attribute, int *out, int count),         \
      (address, nbytes, attribute, out, count))                                          \
    /* -- device memory that is mapped on demand: a range of addresses, physical         \
     * memory, and mappings of such memory at such addresses. None of these needs a      \
     * current device. Addresses and sizes are multiples of the granularity; `flags` are \
     * CM_PHYSICAL_…. */                                                                 \
    X(physical_granularity, cuMemGetAllocationGranularity, 12000, (DEVICE, device),      \
      (int device, unsigned flags, uint64_t *out), (device, flags, out))                 \
    X(physical_create, cuMemCreate, 12000, (NBYTES, nbytes),                             \
      (uint64_t nbytes, int device, unsigned flags, uint64_t *out),                      \
      (nbytes, device, flags, out))                                                      \
    /* Give up the handle; the memory itself is freed with its last mapping. */          \
    X(physical_release, cuMemRelease, 12000, (HANDLE, handle),                           \
      (uint64_t handle), (handle))                                                       \
    X(address_reserve, cuMemAddressReserve, 12000, (NBYTES, nbytes),                     \
      (uint64_t nbytes, cm_address *out), (nbytes, out))                                 \
    /* Free a whole range, as it was reserved, with nothing mapped in it. */             \
    X(address_free, cuMemAddressFree, 12000, (ADDRESS, address),                         \
      (cm_address address, uint64_t nbytes), (address, nbytes))                          \
    /* Map all of the memory of `handle`, which is mapped nowhere else. Nobody may       \
     * touch it before address_set_access. */                                            \
    X(address_map, cuMemMap, 12000, (ADDRESS, address),                                  \
      (cm_address address, uint64_t nbytes, uint64_t handle), (address, nbytes, handle)) \
    /* Unmap whole mappings. This does not wait: work that may touch them must have      \
     * ended. */                                                                         \
    X(address_unmap, cuMemUnmap, 12000, (ADDRESS, address),                              \
      (cm_address address, uint64_t nbytes), (address, nbytes))                          \
    /* Let `devices` read and write whole mappings; other devices keep what access       \
     * they had. */                                                                      \
    X(address_set_access, cuMemSetAccess, 12000, (ADDRESS, address),                     \
      (cm_address address, uint64_t nbytes, const int *devices, int device_count),       \
      (address, nbytes, devices, device_count))                                          \
    /* -- copies and fills; host addresses are passed as cm_address ------------------ */ \
    X(copy_async, cudaMemcpyAsync, 12000, (NBYTES, nbytes),                              \
      (cm_address dst, cm_address src, uint64_t nbytes, uint64_t stream),                \
      (dst, src, nbytes, stream))                                                        \
    X(copy_2d_async, cudaMemcpy2DAsync, 12000, (NBYTES, width),                          \
      (cm_address dst, uint64_t dst_pitch, cm_address src, uint64_t src_pitch,           \
       uint64_t width, uint64_t height, uint64_t stream),                                \
      (dst, dst_pitch, src, src_pitch, width, height, stream))                           \
    X(copy_peer_async, cudaMemcpyPeerAsync, 12000, (NBYTES, nbytes),                     \
      (cm_address dst, int dst_device, cm_address src, int src_device, uint64_t nbytes,  \
       uint64_t stream),                                                                 \
      (dst, dst_device, src, src_device, nbytes, stream))                                \
    X(fill_8_async, cudaMemsetAsync, 12000, (ELEMENTS, count),                           \
      (cm_address dst, uint8_t value, uint64_t count, uint64_t stream),                  \
      (dst, value, count, stream))                                                       \
    X(fill_16_async, cuMemsetD16Async, 12000, (ELEMENTS, count),                         \
      (cm_address dst, uint16_t value, uint64_t count, uint64_t stream),                 \
      (dst, value, count, stream))                                                       \
    X(fill_32_async, cuMemsetD32Async, 12000, (ELEMENTS, count),                         \
      (cm_address dst, uint32_t value, uint64_t count, uint64_t stream),                 \
      (dst, value, count, stream))                                                       \
    /* -- kernels (strided device memory) -------------------------------------------- */ \
    X(module_load, cuModuleLoadData, 12000, (NOTHING, 0),                                \
      (const char *ptx, uint64_t *out), (ptx, out))                                      \
    X(module_unload, cuModuleUnload, 12000, (MODULE, module),                            \
      (uint64_t module), (module))                                                       \
    X(module_function, cuModuleGetFunction, 12000, (MODULE, module),                     \
      (uint64_t module, const char *name, uint64_t *out), (module, name, out))           \
    /* Launch a one-dimensional grid. `params` is the only parameter of the kernel, a    \
     * struct of `params_nbytes`, which is read before the call returns. */              \
    X(kernel_launch, cuLaunchKernel, 12000, (BLOCKS, block_count),                       \
      (uint64_t function, uint32_t block_count, uint32_t threads_per_block,              \
       const void *params, uint64_t params_nbytes, uint64_t stream),                     \
      (function, block_count, threads_per_block, params, params_nbytes, stream))         \
    /* -- streams -------------------------------------------------------------------- */ \
    X(stream_priority_range, cudaDeviceGetStreamPriorityRange, 12000, (NOTHING, 0),      \
      (int *least, int *greatest), (least, greatest))                                    \
    X(stream_create, cudaStreamCreateWithPriority, 12000,                                \
      (PRIORITY, (uint64_t)(int64_t)priority),                                           \
      (unsigned flags, int priority, uint64_t *out), (flags, priority, out))             \
    X(stream_destroy, cudaStreamDestroy, 12000, (STREAM, stream),                        \
      (uint64_t stream), (stream))                                                       \
    /* Pending work is not a failure: *done is then false. */                            \
    X(stream_query, cudaStreamQuery, 12000, (STREAM, stream),                            \
      (uint64_t stream, bool *done), (stream, done))                                     \
    X(stream_synchronize, cudaStreamSynchronize, 12000, (STREAM, stream),                \
      (uint64_t stream), (stream))                                                       \
    X(stream_wait_event, cudaStreamWaitEvent, 12000, (STREAM, stream),                   \
      (uint64_t stream, uint64_t event), (stream, event))                                \
    /* The id is unique in the process: handles are used again, but ids are not. */      \
    X(stream_get_id, cudaStreamGetId, 12000, (STREAM, stream),                           \
      (uint64_t stream, uint64_t *out), (stream, out))                                   \
    /* Without it, the device that the caller named is assumed, or cumem's current       \
     * one. */                                                                           \
    X(stream_get_device, cudaStreamGetDevice, 12080, (STREAM, stream),                   \
      (uint64_t stream, int *out), (stream, out))                                        \
    X(stream_get_priority, cudaStreamGetPriority, 12000, (STREAM, stream),               \
      (uint64_t stream, int *out), (stream, out))                                        \
    X(stream_is_capturing, cudaStreamIsCapturing, 12000, (STREAM, stream),               \
      (uint64_t stream, bool *out), (stream, out))                                       \
    /* Exchange *mode with the capture mode of the calling thread. */                    \
    X(capture_mode_exchange, cuThreadExchangeStreamCaptureMode, 12000, (NOTHING, 0),     \
      (int *mode), (mode))                                                               \
    /* -- events --------------------------------------------------------------------- */ \
    X(event_create, cudaEventCreateWithFlags, 12000, (FLAGS, flags),                     \
      (unsigned flags, uint64_t *out), (flags, out))                                     \
    X(event_destroy, cudaEventDestroy, 12000, (EVENT, event), (uint64_t event), (event)) \
    X(event_record, cudaEventRecord, 12000, (EVENT, event),                              \
      (uint64_t event, uint64_t stream), (event, stream))                                \
    /* Pending work is not a failure: *done is then false. */                            \
    X(event_query, cudaEventQuery, 12000, (EVENT, event),                                \
      (uint64_t event, bool *done), (event, done))                                       \
    X(event_synchronize, cudaEventSynchronize, 12000, (EVENT, event),                    \
      (uint64_t event), (event))                                                         \
    X(event_elapsed, cudaEventElapsedTime, 12000, (EVENT, end),                          \
      (uint64_t start, uint64_t end, float *milliseconds), (start, end, milliseconds))
/* clang-format on */
