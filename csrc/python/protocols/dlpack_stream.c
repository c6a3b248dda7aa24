/* SPDX-License-Identifier: Apache-2.0 */
/* Which stream an exporter's data is wanted on, and what it waits for. */
#include "python/buffer/buffer_object.h"
#include "python/core/errors.h"
#include "python/protocols/dlpack.h"

int
cm_dlpack_follow_handle(cm_state *state, cm_stream *stream, uint64_t handle)
{
    cm_status status;
    cm_stream *theirs;
    Py_BEGIN_ALLOW_THREADS
    status =
        cm_stream_wrap(stream->rt, stream->device,
                       handle == 0 ? CM_STREAM_LEGACY : handle, NULL, NULL, &theirs);
    if (cm_is_ok(status)) {
        status = cm_stream_follow(stream, theirs);
        cm_stream_release(theirs);
    }
    Py_END_ALLOW_THREADS
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(state, status, "while importing DLPack");
}

int
cm_dlpack_choose_stream(cm_state *state, cm_dl_device device, cm_stream *given,
                        cm_stream **out)
{
    *out = NULL;
    if (device.type != CM_DL_CUDA && device.type != CM_DL_CUDA_MANAGED) {
        return 0;
    }
    int where = device.type == CM_DL_CUDA ? device.id : -1;
    if (given != NULL && (where < 0 || given->device == where)) {
        *out = cm_stream_take(state, given);
        return 0;
    }
    /* a stream of another device says nothing to the exporter: one of its own goes
     * between */
    *out = cm_stream_from_object(state, Py_None, where);
    return *out == NULL ? -1 : 0;
}

int
cm_dlpack_pass_on(cm_state *state, PyObject *buffer, cm_stream *given,
                  cm_stream *stream)
{
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_follow(given, stream);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while importing DLPack");
    }
    return cm_storage_add_lasting_use(((cm_buffer *)(void *)buffer)->storage, given);
}

int
cm_dlpack_follow(cm_state *state, PyObject *buffer, cm_dl_device device,
                 cm_stream *given, uint64_t handle)
{
    cm_stream *stream;
    if (cm_dlpack_choose_stream(state, device, given, &stream) < 0) {
        return -1;
    }
    if (stream == NULL) {
        return 0;
    }
    int result = cm_dlpack_follow_handle(state, stream, handle);
    if (result == 0) {
        result =
            cm_storage_add_lasting_use(((cm_buffer *)(void *)buffer)->storage, stream);
    }
    if (result == 0 && given != NULL && stream != given) {
        result = cm_dlpack_pass_on(state, buffer, given, stream);
    }
    cm_stream_give(state, stream);
    return result;
}
