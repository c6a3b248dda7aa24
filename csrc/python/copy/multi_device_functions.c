/* SPDX-License-Identifier: Apache-2.0 */
/* broadcast(), scatter(), gather() and their asynchronous forms as Python sees them. */
#include "python/copy/multi_device.h"
#include "python/core/arguments.h"

static PyObject *
run_and_tell(cm_several *several, PyObject *objects, int64_t axis, PyObject *told)
{
    cm_progress progress;
    if (cm_progress_open(told, "copy", &progress) < 0) {
        return NULL;
    }
    several->progress = progress.tell == NULL ? NULL : &progress;
    PyObject *result =
        cm_several_init(several, objects, axis) < 0 ? NULL : cm_several_run(several);
    cm_state_drop_own(several->state);
    cm_several_fini(several);
    if (cm_progress_close(&progress) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *
run(PyObject *module, cm_several *several, PyObject *objects, PyObject *axis_object,
    PyObject *stream_object, PyObject *told)
{
    int64_t axis = 0;
    several->state = cm_state_of_module(module);
    if (axis_object != NULL && cm_arg_int64(axis_object, "axis", &axis) < 0) {
        return NULL;
    }
    if (stream_object != NULL && stream_object != Py_None) {
        several->stream = cm_stream_from_object(several->state, stream_object, -1);
        if (several->stream == NULL) {
            return NULL;
        }
    }
    PyObject *result = run_and_tell(several, objects, axis, told);
    cm_stream_give(several->state, several->stream);
    return result;
}

static PyObject *
parse(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
      cm_several *several)
{
    static const char *const heads[][3] = {
        [CM_SEVERAL_BROADCAST] = {"src", "dsts", NULL},
        [CM_SEVERAL_SCATTER] = {"src", "dsts", "axis"},
        [CM_SEVERAL_GATHER] = {"srcs", "dst", "axis"},
    };
    const char *names[6] = {NULL};
    PyObject *values[5] = {NULL, NULL, NULL, NULL, NULL};
    bool gathers = several->kind == CM_SEVERAL_GATHER;
    int head = several->kind == CM_SEVERAL_BROADCAST ? 2 : 3;
    for (int i = 0; i < head; i++) {
        names[i] = heads[several->kind][i];
    }
    names[head] = "stream";
    names[head + 1] = several->blocking ? "progress" : NULL;
    if (cm_args_parse(several->name, args, nargs, kwnames, names, head, 2, values)
        < 0) {
        return NULL;
    }
    several->one_object = values[gathers ? 1 : 0];
    return run(module, several, values[gathers ? 0 : 1], head == 3 ? values[2] : NULL,
               values[head], values[head + 1]);
}

/* -- docstrings -------------------------------------------------------------------------- */

#define PROGRESS                                                                       \
    "progress : bool or callable, optional\n"                                          \
    "    As for `copy`, of the bytes of all parts; a source that is read once for "    \
    "several\n"                                                                        \
    "    targets counts once.\n"

#define NO_TQDM "ImportError\n    If `progress` is True and there is no tqdm.\n"

#define RAISES                                                                         \
    "Raises\n------\n"                                                                 \
    "TypeError\n    If an end is no memory or the dtypes differ.\n"                    \
    "ValueError\n"                                                                     \
    "    If the shapes do not fit, a target is read-only, a buffer is closed, or "     \
    "ends\n"                                                                           \
    "    share bytes (see Notes). Nothing has been copied then.\n"                     \
    "OSError\n"                                                                        \
    "    If an end is a mapped file that is cut short, or cannot be read.\n"           \
    "CudaError\n    If a copy failed, or `stream` is being captured.\n"

#define STREAM                                                                         \
    "stream : stream, optional\n"                                                      \
    "    Come after the work of this stream, of any device, and before what it is\n"   \
    "    given next.\n"

#define OVERLAP                                                                        \
    "Parts are copied in any order, so\n"                                              \
    "two targets, or a target and a source, that have a byte in common are refused. "  \
    "Views that\n"                                                                     \
    "only interleave, such as columns of one array, are not; a target that is its\n"   \
    "source is left alone, and one target of `broadcast` may be given twice."

#define BLOCKING                                                                       \
    "**Blocks** until all is done, GIL released; Ctrl-C ends it within a few "         \
    "pieces.\n"                                                                        \
    "**Ordered after** all work that cumem knows of on either end, and `stream` or "   \
    "the\n"                                                                            \
    "current stream of each device that has an end. " OVERLAP

#define BACKGROUND                                                                     \
    "Returns\n-------\n"                                                               \
    "list of Transfer\n"                                                               \
    "    One for each of the list, in its order; copies that are made together end\n"  \
    "    together.\n\n"

#define UNBLOCKED                                                                      \
    "Without a stream it never waits for other work. With one it **blocks**, GIL\n"    \
    "released, until the last piece is queued (for a target that the host has to "     \
    "write,\n"                                                                         \
    "until it is written). Nothing may be changed before its copy is done.\n"          \
    "**Ordered after** all work that cumem knows of on either end, and "               \
    "`stream`. " OVERLAP

PyDoc_STRVAR(broadcast_doc,
"broadcast($module, /, src, dsts, *, stream=None, progress=None)\n--\n\n"
"Copy one source to several targets, on all links at the same time.\n\n"
"A source in ordinary memory is read and packed once for all GPUs; of several targets\n"
"on one GPU the first is sent and the others are copied from it there.\n\n"
"Parameters\n----------\n"
"src : Buffer, array, exporter or scalar\n"
"    As for `copy`; its shape must be that of the targets or broadcast to it.\n"
"dsts : iterable of Buffer, array or exporter\n"
"    Writable memory of one shape, anywhere; strides may differ.\n"
STREAM PROGRESS "\n" RAISES NO_TQDM "\n"
"See Also\n--------\n"
"scatter : slices of the source to each target.\n\n"
"Notes\n-----\n"
BLOCKING);

PyDoc_STRVAR(broadcast_async_doc,
"broadcast_async($module, /, src, dsts, *, stream=None)\n--\n\n"
"Start copying one source to several targets.\n\n"
"Parameters\n----------\n"
"src, dsts\n    As for `broadcast`.\n"
STREAM "\n" BACKGROUND RAISES "\n"
"Notes\n-----\n"
UNBLOCKED);

PyDoc_STRVAR(scatter_doc,
"scatter($module, /, src, dsts, axis=0, *, stream=None, progress=None)\n--\n\n"
"Copy consecutive slices of a source to several targets, on all links at the same time.\n\n"
"Parameters\n----------\n"
"src : Buffer, array or exporter\n    As for `copy`.\n"
"dsts : iterable of Buffer, array or exporter\n"
"    Writable memory anywhere. Each has the shape of the source but along `axis`, where\n"
"    the lengths add up to the source's.\n"
"axis : int, default 0\n    Along which the source is cut; negative counts from the end.\n"
STREAM PROGRESS "\n" RAISES NO_TQDM "\n"
"See Also\n--------\n"
"gather : the way back.\n\n"
"Notes\n-----\n"
BLOCKING);

PyDoc_STRVAR(scatter_async_doc,
"scatter_async($module, /, src, dsts, axis=0, *, stream=None)\n--\n\n"
"Start copying consecutive slices of a source to several targets.\n\n"
"Parameters\n----------\n"
"src, dsts, axis\n    As for `scatter`.\n"
STREAM "\n" BACKGROUND RAISES "\n"
"Notes\n-----\n"
UNBLOCKED);

PyDoc_STRVAR(gather_doc,
"gather($module, /, srcs, dst, axis=0, *, stream=None, progress=None)\n--\n\n"
"Copy several sources one after the other into a target, on all links at the same time.\n\n"
"Parameters\n----------\n"
"srcs : iterable of Buffer, array or exporter\n"
"    As for `copy`. Each has the shape of the target but along `axis`, where the lengths\n"
"    add up to the target's.\n"
"dst : Buffer, array or exporter\n    Writable memory anywhere.\n"
"axis : int, default 0\n    Along which they lie; negative counts from the end.\n"
STREAM PROGRESS "\n" RAISES NO_TQDM "\n"
"See Also\n--------\n"
"scatter : the way there.\n\n"
"Notes\n-----\n"
BLOCKING);

PyDoc_STRVAR(gather_async_doc,
"gather_async($module, /, srcs, dst, axis=0, *, stream=None)\n--\n\n"
"Start copying several sources one after the other into a target.\n\n"
"Parameters\n----------\n"
"srcs, dst, axis\n    As for `gather`.\n"
STREAM "\n" BACKGROUND RAISES "\n"
"Notes\n-----\n"
UNBLOCKED);

/* -- table ------------------------------------------------------------------------------- */

#define FUNCTION(function, KIND, does_block)                                           \
    static PyObject *function##_function(PyObject *module, PyObject *const *args,      \
                                         Py_ssize_t nargs, PyObject *kwnames)          \
    {                                                                                  \
        cm_several several = {                                                         \
            .kind = CM_SEVERAL_##KIND, .name = #function, .blocking = (does_block)};   \
        return parse(module, args, nargs, kwnames, &several);                          \
    }

FUNCTION(broadcast, BROADCAST, true)
FUNCTION(broadcast_async, BROADCAST, false)
FUNCTION(scatter, SCATTER, true)
FUNCTION(scatter_async, SCATTER, false)
FUNCTION(gather, GATHER, true)
FUNCTION(gather_async, GATHER, false)

#define ROW(function)                                                                  \
    {#function, (PyCFunction)(void (*)(void))function##_function,                      \
     METH_FASTCALL | METH_KEYWORDS, function##_doc}

PyMethodDef cm_several_methods[] = {
    ROW(broadcast), ROW(broadcast_async), ROW(scatter),          ROW(scatter_async),
    ROW(gather),    ROW(gather_async),    {NULL, NULL, 0, NULL},
};
