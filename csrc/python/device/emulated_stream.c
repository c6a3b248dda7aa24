/* SPDX-License-Identifier: Apache-2.0 */
/* Shuts and opens the gates of emulated streams. While the gate of a stream is shut,
 * everything that is queued on it waits. So a test, or the replay of a trace, can make
 * work as late as it likes without looking at a clock. */
#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/objects.h"
#include "runtime/emulated/emulated.h"

static cm_status
act_on(cm_stream *stream, cm_status (*act)(cm_runtime *rt, uint64_t handle))
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(stream->rt, stream->device, &guard));
    cm_status status = act(stream->rt, cm_stream_export_handle(stream));
    cm_device_leave(stream->rt, &guard);
    return status;
}

PyObject *
cm_emulated_stream_act(cm_state *state, PyObject *object,
                       cm_status (*act)(cm_runtime *rt, uint64_t handle))
{
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    if (!cm_state_is_emulated(state)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this needs a stream of the emulated device: set "
                        "CUMEM_BACKEND=emulated");
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, object, -1);
    if (stream == NULL) {
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(act_on(stream, act));
    cm_stream_give(state, stream);
    return cm_py_answer(state, status, NULL, Py_NewRef(Py_None));
}

static PyObject *
hold_stream(PyObject *module, PyObject *stream)
{
    return cm_emulated_stream_act(cm_state_of_module(module), stream,
                                  cm_emulated_gate_close);
}

static PyObject *
release_stream(PyObject *module, PyObject *stream)
{
    return cm_emulated_stream_act(cm_state_of_module(module), stream,
                                  cm_emulated_gate_open);
}

PyMethodDef cm_emulated_stream_methods[] = {
    {"_hold_stream", hold_stream, METH_O, CM_DOC__hold_stream},
    {"_release_stream", release_stream, METH_O, CM_DOC__release_stream},
    {NULL, NULL, 0, NULL},
};
