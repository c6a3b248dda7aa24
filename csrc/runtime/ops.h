/* SPDX-License-Identifier: Apache-2.0 */
/* The one list of every CUDA call cumem can make. From it come the operation enum, the
 * name table, the table type, the callers cm_rt_… and the whole fault wrapper. A new
 * operation is one row here and two bodies (cuda.c, emulated/); nothing else names it.
 *
 * X(name, CUDA function, oldest driver, (what the telling argument is, as in
 *   cumem/errors.py; the argument), (parameters), (arguments))
 *
 * The oldest driver is 12000 unless the function came later; on an older driver the
 * call answers CM_ENOTSUP and `what is done without` stands in the row's comment.
 * Streams, events, contexts, modules and kernels are handles as integers (0 = none, for
 * a stream the legacy default). Operations that act on "the current device" need
 * cm_device_enter() around them. Out-parameters are last and written only on success.
 */
#ifndef CM_RUNTIME_OPS_H
#define CM_RUNTIME_OPS_H

/* clang-format off */
#define CM_OPS(X)                                                                        \
    /* -- versions, devices, contexts ------------------------------------------------ */ \
    X(driver_version, cudaDriverGetVersion, 12000, (NOTHING, 0),                         \
      (cm_runtime *rt, int *out), (rt, out))                                             \
    X(runtime_version, cudaRuntimeGetVersion, 12000, (NOTHING, 0),                       \
      (cm_runtime *rt, int *out), (rt, out))                                             \
    X(device_count, cudaGetDeviceCount, 12000, (NOTHING, 0),                             \
      (cm_runtime *rt, int *out), (rt, out))                                             \
    X(device_set, cudaSetDevice, 12000, (DEVICE, device),                                \
      (cm_runtime *rt, int device), (rt, device))                                        \
    /* The calling thread's context; 0 when it has none. Creates nothing. */             \
    X(context_get, cuCtxGetCurrent, 12000, (NOTHING, 0),                                 \
      (cm_runtime *rt, uint64_t *out), (rt, out))                                        \
    X(context_set, cuCtxSetCurrent, 12000, (CONTEXT, context),                           \
      (cm_runtime *rt, uint64_t context), (rt, context))                                 \
    /* Record all work of the current context so far; without it: device_synchronize. */ \
    X(context_record_event, cuCtxRecordEvent, 12050, (EVENT, event),                     \
      (cm_runtime *rt, uint64_t event), (rt, event))                                     \
    X(device_describe, cudaGetDeviceProperties, 12000, (DEVICE, device),                 \
      (cm_runtime *rt, int device, cm_device_info *out), (rt, device, out))              \
    X(device_attribute, cuDeviceGetAttribute, 12000, (ATTRIBUTE, attribute),             \
      (cm_runtime *rt, int attribute, int device, int *out),                             \
      (rt, attribute, device, out))                                                      \
    X(device_synchronize, cudaDeviceSynchronize, 12000, (NOTHING, 0),                    \
      (cm_runtime *rt), (rt))                                                            \
    X(device_reset, cudaDeviceReset, 12000, (NOTHING, 0),                                \
      (cm_runtime *rt), (rt))                                                            \
    X(memory_info, cudaMemGetInfo, 12000, (NOTHING, 0),                                  \
      (cm_runtime *rt, uint64_t *free_nbytes, uint64_t *total_nbytes),                   \
      (rt, free_nbytes, total_nbytes))                                                   \
    X(peer_can_access, cudaDeviceCanAccessPeer, 12000, (PEER, peer),                     \
      (cm_runtime *rt, int device, int peer, int *out), (rt, device, peer, out))         \
    /* Let the current device use what cudaMalloc gives on `peer`, now and later. */     \
    X(peer_enable, cudaDeviceEnablePeerAccess, 12000, (PEER, peer),                      \
      (cm_runtime *rt, int peer), (rt, peer))                                            \
    /* -- memory --------------------------------------------------------------------- */ \
    X(host_alloc, cudaHostAlloc, 12000, (NBYTES, nbytes),                                \
      (cm_runtime *rt, uint64_t nbytes, unsigned flags, void **out),                     \
      (rt, nbytes, flags, out))                                                          \
    X(host_free, cudaFreeHost, 12000, (ADDRESS, (uintptr_t)host),                        \
      (cm_runtime *rt, void *host), (rt, host))                                          \
    X(host_register, cudaHostRegister, 12000, (NBYTES, nbytes),                          \
      (cm_runtime *rt, void *host, uint64_t nbytes, unsigned flags),                     \
      (rt, host, nbytes, flags))                                                         \
    X(host_unregister, cudaHostUnregister, 12000, (ADDRESS, (uintptr_t)host),            \
      (cm_runtime *rt, void *host), (rt, host))                                          \
    X(host_device_address, cudaHostGetDevicePointer, 12000, (ADDRESS, (uintptr_t)host),  \
      (cm_runtime *rt, void *host, cm_address *out), (rt, host, out))                    \
    X(device_alloc, cudaMalloc, 12000, (NBYTES, nbytes),                                 \
      (cm_runtime *rt, uint64_t nbytes, cm_address *out), (rt, nbytes, out))             \
    X(managed_alloc, cudaMallocManaged, 12000, (NBYTES, nbytes),                         \
      (cm_runtime *rt, uint64_t nbytes, unsigned flags, cm_address *out),                \
      (rt, nbytes, flags, out))                                                          \
    /* Frees device and managed memory. */                                               \
    X(device_free, cudaFree, 12000, (ADDRESS, address),                                  \
      (cm_runtime *rt, cm_address address), (rt, address))                               \
    X(pointer_attributes, cudaPointerGetAttributes, 12000, (ADDRESS, address),           \
      (cm_runtime *rt, cm_address address, cm_pointer_info *out), (rt, address, out))    \
    /* What the current device may do with memory of a device: one of CM_ACCESS_…. */ \
    X(pointer_access, cuPointerGetAttribute, 12000, (ADDRESS, address),                  \
      (cm_runtime *rt, cm_address address, int *out), (rt, address, out))                \
    /* -- managed memory; a location is a device's index, CM_HOST_LOCATION or            \
     * CM_NUMA_LOCATION(node), which no driver before 12.2 knows (refused as not         \
     * supported). */                                                                    \
    X(prefetch_async, cudaMemPrefetchAsync, 12000, (NBYTES, nbytes),                     \
      (cm_runtime *rt, cm_address address, uint64_t nbytes, int location,                \
       uint64_t stream),                                                                 \
      (rt, address, nbytes, location, stream))                                           \
    /* In any order among themselves. Not on the legacy default stream (refused).        \
     * Without it: one prefetch_async each. */                                           \
    X(prefetch_batch_async, cuMemPrefetchBatchAsync, 13000, (ELEMENTS, count),           \
      (cm_runtime *rt, const cm_address *addresses, const uint64_t *nbytes,              \
       uint64_t count, int location, uint64_t stream),                                   \
      (rt, addresses, nbytes, count, location, stream))                                  \
    /* The bytes are of no use any more. Not on the legacy default stream (refused).     \
     * Without it: the caller is told. */                                                \
    X(discard_batch_async, cuMemDiscardBatchAsync, 13000, (ELEMENTS, count),             \
      (cm_runtime *rt, const cm_address *addresses, const uint64_t *nbytes,              \
       uint64_t count, uint64_t stream),                                                 \
      (rt, addresses, nbytes, count, stream))                                            \
    /* `advice`: CM_ADVISE_…; some say nothing of a location. */                         \
    X(advise, cudaMemAdvise, 12000, (NBYTES, nbytes),                                    \
      (cm_runtime *rt, cm_address address, uint64_t nbytes, int advice, int location),   \
      (rt, address, nbytes, advice, location))                                           \
    /* CM_RANGE_…: `count` numbers or locations. CM_NO_LOCATION: there is none, or not   \
     * one of all pages. */                                                              \
    X(range_attribute, cudaMemRangeGetAttribute, 12000, (ADDRESS, address),              \
      (cm_runtime *rt, cm_address address, uint64_t nbytes, int attribute, int *out,     \
       int count),                                                                       \
      (rt, address, nbytes, attribute, out, count))                                      \
    /* -- device memory mapped on demand: a range of addresses, physical memory, and     \
     * the one put at the other. None needs a current device; addresses and sizes are    \
     * multiples of the granularity. `flags`: CM_PHYSICAL_… */                           \
    X(physical_granularity, cuMemGetAllocationGranularity, 12000, (DEVICE, device),      \
      (cm_runtime *rt, int device, unsigned flags, uint64_t *out),                       \
      (rt, device, flags, out))                                                          \
    X(physical_create, cuMemCreate, 12000, (NBYTES, nbytes),                             \
      (cm_runtime *rt, uint64_t nbytes, int device, unsigned flags, uint64_t *out),      \
      (rt, nbytes, device, flags, out))                                                  \
    /* The memory itself goes with the last place where it is mapped. */                 \
    X(physical_release, cuMemRelease, 12000, (HANDLE, handle),                           \
      (cm_runtime *rt, uint64_t handle), (rt, handle))                                   \
    X(address_reserve, cuMemAddressReserve, 12000, (NBYTES, nbytes),                     \
      (cm_runtime *rt, uint64_t nbytes, cm_address *out), (rt, nbytes, out))             \
    /* The whole range as it was reserved, with nothing mapped in it. */                 \
    X(address_free, cuMemAddressFree, 12000, (ADDRESS, address),                         \
      (cm_runtime *rt, cm_address address, uint64_t nbytes), (rt, address, nbytes))      \
    /* All of `handle`; it may be mapped at several places. Nobody may touch it yet. */  \
    X(address_map, cuMemMap, 12000, (ADDRESS, address),                                  \
      (cm_runtime *rt, cm_address address, uint64_t nbytes, uint64_t handle),            \
      (rt, address, nbytes, handle))                                                     \
    /* Whole mappings. Does not wait: work that may touch them must be done. */          \
    X(address_unmap, cuMemUnmap, 12000, (ADDRESS, address),                              \
      (cm_runtime *rt, cm_address address, uint64_t nbytes), (rt, address, nbytes))      \
    /* Let `devices` read and write whole mappings; the others keep what they had. */    \
    X(address_set_access, cuMemSetAccess, 12000, (ADDRESS, address),                     \
      (cm_runtime *rt, cm_address address, uint64_t nbytes, const int *devices,          \
       int device_count),                                                                \
      (rt, address, nbytes, devices, device_count))                                      \
    /* -- copies and fills; host addresses are passed as cm_address ------------------ */ \
    X(copy_async, cudaMemcpyAsync, 12000, (NBYTES, nbytes),                              \
      (cm_runtime *rt, cm_address dst, cm_address src, uint64_t nbytes,                  \
       uint64_t stream),                                                                 \
      (rt, dst, src, nbytes, stream))                                                    \
    X(copy_2d_async, cudaMemcpy2DAsync, 12000, (NBYTES, width),                          \
      (cm_runtime *rt, cm_address dst, uint64_t dst_pitch, cm_address src,               \
       uint64_t src_pitch, uint64_t width, uint64_t height, uint64_t stream),            \
      (rt, dst, dst_pitch, src, src_pitch, width, height, stream))                       \
    X(copy_peer_async, cudaMemcpyPeerAsync, 12000, (NBYTES, nbytes),                     \
      (cm_runtime *rt, cm_address dst, int dst_device, cm_address src, int src_device,   \
       uint64_t nbytes, uint64_t stream),                                                \
      (rt, dst, dst_device, src, src_device, nbytes, stream))                            \
    /* In any order among themselves. Not on the legacy default stream (refused).        \
     * Without it: one copy_async or copy_peer_async each. */                            \
    X(copy_batch_async, cudaMemcpyBatchAsync, 12080, (ELEMENTS, count),                  \
      (cm_runtime *rt, const cm_address *dsts, const cm_address *srcs,                   \
       const uint64_t *nbytes, uint64_t count, uint64_t stream),                         \
      (rt, dsts, srcs, nbytes, count, stream))                                           \
    X(fill_8_async, cudaMemsetAsync, 12000, (ELEMENTS, count),                           \
      (cm_runtime *rt, cm_address dst, uint8_t value, uint64_t count, uint64_t stream),  \
      (rt, dst, value, count, stream))                                                   \
    X(fill_16_async, cuMemsetD16Async, 12000, (ELEMENTS, count),                         \
      (cm_runtime *rt, cm_address dst, uint16_t value, uint64_t count,                   \
       uint64_t stream),                                                                 \
      (rt, dst, value, count, stream))                                                   \
    X(fill_32_async, cuMemsetD32Async, 12000, (ELEMENTS, count),                         \
      (cm_runtime *rt, cm_address dst, uint32_t value, uint64_t count,                   \
       uint64_t stream),                                                                 \
      (rt, dst, value, count, stream))                                                   \
    /* -- kernels (strided device memory) -------------------------------------------- */ \
    X(module_load, cuModuleLoadData, 12000, (NOTHING, 0),                                \
      (cm_runtime *rt, const char *ptx, uint64_t *out), (rt, ptx, out))                  \
    X(module_unload, cuModuleUnload, 12000, (MODULE, module),                            \
      (cm_runtime *rt, uint64_t module), (rt, module))                                   \
    X(module_function, cuModuleGetFunction, 12000, (MODULE, module),                     \
      (cm_runtime *rt, uint64_t module, const char *name, uint64_t *out),                \
      (rt, module, name, out))                                                           \
    /* One-dimensional launch; `params` is the kernel's single parameter, a struct of    \
     * `params_nbytes`, read before the call returns. */                                 \
    X(kernel_launch, cuLaunchKernel, 12000, (BLOCKS, block_count),                       \
      (cm_runtime *rt, uint64_t function, uint32_t block_count,                          \
       uint32_t threads_per_block, const void *params, uint64_t params_nbytes,           \
       uint64_t stream),                                                                 \
      (rt, function, block_count, threads_per_block, params, params_nbytes, stream))     \
    /* -- streams -------------------------------------------------------------------- */ \
    X(stream_priority_range, cudaDeviceGetStreamPriorityRange, 12000, (NOTHING, 0),      \
      (cm_runtime *rt, int *least, int *greatest), (rt, least, greatest))                \
    X(stream_create, cudaStreamCreateWithPriority, 12000,                                \
      (PRIORITY, (uint64_t)(int64_t)priority),                                           \
      (cm_runtime *rt, unsigned flags, int priority, uint64_t *out),                     \
      (rt, flags, priority, out))                                                        \
    X(stream_destroy, cudaStreamDestroy, 12000, (STREAM, stream),                        \
      (cm_runtime *rt, uint64_t stream), (rt, stream))                                   \
    /* *done: false while work is pending (not a failure). */                            \
    X(stream_query, cudaStreamQuery, 12000, (STREAM, stream),                            \
      (cm_runtime *rt, uint64_t stream, bool *done), (rt, stream, done))                 \
    X(stream_synchronize, cudaStreamSynchronize, 12000, (STREAM, stream),                \
      (cm_runtime *rt, uint64_t stream), (rt, stream))                                   \
    X(stream_wait_event, cudaStreamWaitEvent, 12000, (STREAM, stream),                   \
      (cm_runtime *rt, uint64_t stream, uint64_t event), (rt, stream, event))            \
    /* Unique in the process; handles are recycled, ids are not. */                      \
    X(stream_get_id, cudaStreamGetId, 12000, (STREAM, stream),                           \
      (cm_runtime *rt, uint64_t stream, uint64_t *out), (rt, stream, out))               \
    /* Without it: the device the caller named, or cumem's current one. */               \
    X(stream_get_device, cudaStreamGetDevice, 12080, (STREAM, stream),                   \
      (cm_runtime *rt, uint64_t stream, int *out), (rt, stream, out))                    \
    X(stream_get_priority, cudaStreamGetPriority, 12000, (STREAM, stream),               \
      (cm_runtime *rt, uint64_t stream, int *out), (rt, stream, out))                    \
    X(stream_is_capturing, cudaStreamIsCapturing, 12000, (STREAM, stream),               \
      (cm_runtime *rt, uint64_t stream, bool *out), (rt, stream, out))                   \
    /* *mode is exchanged with the calling thread's capture mode. */                     \
    X(capture_mode_exchange, cuThreadExchangeStreamCaptureMode, 12000, (NOTHING, 0),     \
      (cm_runtime *rt, int *mode), (rt, mode))                                           \
    /* -- events --------------------------------------------------------------------- */ \
    X(event_create, cudaEventCreateWithFlags, 12000, (FLAGS, flags),                     \
      (cm_runtime *rt, unsigned flags, uint64_t *out), (rt, flags, out))                 \
    X(event_destroy, cudaEventDestroy, 12000, (EVENT, event),                            \
      (cm_runtime *rt, uint64_t event), (rt, event))                                     \
    X(event_record, cudaEventRecord, 12000, (EVENT, event),                              \
      (cm_runtime *rt, uint64_t event, uint64_t stream), (rt, event, stream))            \
    /* *done: false while work is pending (not a failure). */                            \
    X(event_query, cudaEventQuery, 12000, (EVENT, event),                                \
      (cm_runtime *rt, uint64_t event, bool *done), (rt, event, done))                   \
    X(event_synchronize, cudaEventSynchronize, 12000, (EVENT, event),                    \
      (cm_runtime *rt, uint64_t event), (rt, event))                                     \
    X(event_elapsed, cudaEventElapsedTime, 12000, (EVENT, end),                          \
      (cm_runtime *rt, uint64_t start, uint64_t end, float *milliseconds),               \
      (rt, start, end, milliseconds))
/* clang-format on */

#endif
