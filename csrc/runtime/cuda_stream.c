/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events over the CUDA runtime. */
#include <cuda_runtime_api.h>

#include "runtime/cuda_private.h"

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

/* ---- streams --------------------------------------------------------------------- */

int32_t
cm_cuda_stream_priority_range(cm_runtime *rt CM_UNUSED, int *least, int *greatest)
{
    return (int32_t)cudaDeviceGetStreamPriorityRange(least, greatest);
}

int32_t
cm_cuda_stream_create(cm_runtime *rt CM_UNUSED, unsigned flags, int priority,
                      uint64_t *out)
{
    cudaStream_t stream;
    cudaError_t error = cudaStreamCreateWithPriority(&stream, flags, priority);
    if (error == cudaSuccess) {
        *out = cm_cuda_integer(stream);
    }
    return (int32_t)error;
}

int32_t
cm_cuda_stream_destroy(cm_runtime *rt CM_UNUSED, uint64_t stream)
{
    return cm_cuda_freed((int32_t)cudaStreamDestroy(cm_cuda_pointer(stream)));
}

int32_t
cm_cuda_stream_query(cm_runtime *rt CM_UNUSED, uint64_t stream, bool *done)
{
    return answer_query(cudaStreamQuery(cm_cuda_pointer(stream)), done);
}

int32_t
cm_cuda_stream_synchronize(cm_runtime *rt CM_UNUSED, uint64_t stream)
{
    return (int32_t)cudaStreamSynchronize(cm_cuda_pointer(stream));
}

int32_t
cm_cuda_stream_wait_event(cm_runtime *rt CM_UNUSED, uint64_t stream, uint64_t event)
{
    return (int32_t)cudaStreamWaitEvent(cm_cuda_pointer(stream), cm_cuda_pointer(event),
                                        cudaEventWaitDefault);
}

int32_t
cm_cuda_stream_get_id(cm_runtime *rt CM_UNUSED, uint64_t stream, uint64_t *out)
{
    unsigned long long id;
    cudaError_t error = cudaStreamGetId(cm_cuda_pointer(stream), &id);
    if (error == cudaSuccess) {
        *out = id;
    }
    return (int32_t)error;
}

int32_t
cm_cuda_stream_get_device(cm_runtime *rt CM_UNUSED, uint64_t stream, int *out)
{
    return (int32_t)cudaStreamGetDevice(cm_cuda_pointer(stream), out);
}

int32_t
cm_cuda_stream_get_priority(cm_runtime *rt CM_UNUSED, uint64_t stream, int *out)
{
    return (int32_t)cudaStreamGetPriority(cm_cuda_pointer(stream), out);
}

int32_t
cm_cuda_stream_is_capturing(cm_runtime *rt CM_UNUSED, uint64_t stream, bool *out)
{
    enum cudaStreamCaptureStatus state;
    cudaError_t error = cudaStreamIsCapturing(cm_cuda_pointer(stream), &state);
    if (error == cudaSuccess) {
        *out = state != cudaStreamCaptureStatusNone;
    }
    return (int32_t)error;
}

int32_t
cm_cuda_capture_mode_exchange(cm_runtime *rt CM_UNUSED, int *mode)
{
    enum cudaStreamCaptureMode exchanged = (enum cudaStreamCaptureMode) * mode;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&exchanged);
    if (error == cudaSuccess) {
        *mode = (int)exchanged;
    }
    return (int32_t)error;
}

/* ---- events ---------------------------------------------------------------------- */

int32_t
cm_cuda_event_create(cm_runtime *rt CM_UNUSED, unsigned flags, uint64_t *out)
{
    cudaEvent_t event;
    cudaError_t error = cudaEventCreateWithFlags(&event, flags);
    if (error == cudaSuccess) {
        *out = cm_cuda_integer(event);
    }
    return (int32_t)error;
}

int32_t
cm_cuda_event_destroy(cm_runtime *rt CM_UNUSED, uint64_t event)
{
    return cm_cuda_freed((int32_t)cudaEventDestroy(cm_cuda_pointer(event)));
}

int32_t
cm_cuda_event_record(cm_runtime *rt CM_UNUSED, uint64_t event, uint64_t stream)
{
    return (int32_t)cudaEventRecord(cm_cuda_pointer(event), cm_cuda_pointer(stream));
}

int32_t
cm_cuda_event_query(cm_runtime *rt CM_UNUSED, uint64_t event, bool *done)
{
    return answer_query(cudaEventQuery(cm_cuda_pointer(event)), done);
}

int32_t
cm_cuda_event_synchronize(cm_runtime *rt CM_UNUSED, uint64_t event)
{
    return (int32_t)cudaEventSynchronize(cm_cuda_pointer(event));
}

int32_t
cm_cuda_event_elapsed(cm_runtime *rt CM_UNUSED, uint64_t start, uint64_t end,
                      float *milliseconds)
{
    float elapsed;
    cudaError_t error =
        cudaEventElapsedTime(&elapsed, cm_cuda_pointer(start), cm_cuda_pointer(end));
    if (error == cudaSuccess) {
        *milliseconds = elapsed;
    }
    return (int32_t)error;
}
