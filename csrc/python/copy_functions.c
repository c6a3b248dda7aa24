/* SPDX-License-Identifier: Apache-2.0 */
/* copy() and copy_async() as Python sees them. */
#include "python/copy_functions.h"

#include "python/arguments.h"
#include "python/progress.h"
#include "python/protocols.h"

/* A hint for a stream that does not say its device: that of a device buffer. */
static int
device_hint(const cm_state *state, PyObject *dst, PyObject *src)
{
    PyObject *ends[2] = {dst, src};
    for (int i = 0; i < 2; i++) {
        if (cm_buffer_check(state, ends[i])) {
            const cm_buffer *buffer = (const cm_buffer *)(void *)ends[i];
            if (buffer->storage->residency == CM_KIND_DEVICE) {
                return buffer->storage->device;
            }
        }
    }
    return -1;
}

cm_stream *
cm_copy_stream(cm_state *state, PyObject *dst, PyObject *src, PyObject *stream)
{
    return cm_stream_from_object(state, stream, device_hint(state, dst, src));
}

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    static const char *const names[] = {"dst", "src", "stream", "progress", NULL};
    static const char *const async_names[] = {"dst", "src", "stream", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4] = {NULL, NULL, NULL, NULL};
    cm_progress progress;
    if (cm_args_parse(function, args, nargs, kwnames, blocking ? names : async_names, 2,
                      2, values)
        < 0) {
        return NULL;
    }
    cm_stream *stream = NULL;
    if (values[2] != NULL && values[2] != Py_None) {
        stream = cm_copy_stream(state, values[0], values[1], values[2]);
        if (stream == NULL) {
            return NULL;
        }
    }
    PyObject *result = NULL;
    if (cm_progress_open(state, values[3], "copy", &progress) == 0) {
        result = progress.tell == NULL
                     ? cm_copy_objects(state, values[0], values[1], stream, blocking)
                     : cm_copy_and_tell(state, values[0], values[1], stream, &progress);
        if (cm_progress_close(&progress) < 0) {
            Py_CLEAR(result);
        }
    }
    cm_stream_give(state, stream);
    return result;
}

PyDoc_STRVAR(copy_doc,
"copy($module, /, dst, src, *, stream=None, progress=None)\n--\n\n"
"Copy between any two pieces of memory and wait until the data is there.\n\n"
"Parameters\n----------\n"
"dst : Buffer, array or exporter\n"
"    Writable memory: a Buffer, a NumPy array of any strides, or anything with DLPack,\n"
"    ``__cuda_array_interface__`` or the buffer protocol.\n"
"src : Buffer, array, exporter or scalar\n"
"    The same, or a scalar or list, whose values `dst` must hold unchanged. Its shape\n"
"    must be that of `dst` or broadcast to it as in NumPy.\n"
"stream : stream, optional\n"
"    Where to copy, of a device that is an end; by default its current stream.\n"
"progress : bool or callable, optional\n"
"    As for `Transfer.wait`; what a callable raises ends the copy as Ctrl-C does.\n\n"
"Raises\n------\n"
"TypeError\n    If an end is no memory or the dtypes differ.\n"
"ValueError\n"
"    If the shapes do not fit, `dst` is read-only, a buffer is closed or `stream` is of\n"
"    another device.\n"
"ImportError\n    If `progress` is True and there is no tqdm.\n"
"CudaError\n    If the copy failed, or `stream` is being captured.\n"
"EOFError, OSError\n"
"    If `src` is a mapped file that is shorter by now, or cannot be read.\n\n"
"Notes\n-----\n"
"**Blocks** until done, GIL released. Ctrl-C ends it within a few pieces, and nothing is\n"
"read or written afterwards; what the driver was given is waited for, for a second at most\n"
"(should that not do, it goes on and both ends are kept alive). **Ordered after** all work\n"
"that cumem knows of on either end, but for other bytes of it copied in the background.\n"
"Overlapping ends behave as if `src` were read whole first; bytes between the elements of a\n"
"strided target are never written.");

PyDoc_STRVAR(copy_async_doc,
"copy_async($module, /, dst, src, *, stream=None)\n--\n\n"
"Start a copy between any two pieces of memory.\n\n"
"Parameters\n----------\n"
"dst, src : Buffer, array, exporter\n    As for `copy`.\n"
"stream : stream, optional\n"
"    Copy in the order of this stream; where device memory is an end, the stream of a\n"
"    device of either end. Without one the copy runs in the background and\n"
"    is finished only through its handle.\n\n"
"Returns\n-------\n"
"Transfer\n    Its handle; it keeps both ends alive.\n\n"
"Raises\n------\n"
"TypeError\n    If an end is no memory or the dtypes differ.\n"
"ValueError\n"
"    If the shapes do not fit, `dst` is read-only, a buffer is closed or `stream` is of\n"
"    another device.\n"
"EOFError, OSError\n    If `src` is a long mapped file that is cut short, or cannot be read.\n"
"CudaError\n"
"    If the copy could not be started, or `stream` is being captured and the copy is not\n"
"    one that a graph can hold.\n\n"
"Notes\n-----\n"
"Without a stream it never waits for other work. With one it returns once ordinary memory\n"
"has been read, so that `src` may be changed, and **blocks**, GIL released, while more than\n"
"12 MiB of it wait for the stream or an earlier copy is not queued yet; between two ends in\n"
"ordinary memory it blocks until done. Ctrl-C ends the waiting; what is queued by then still\n"
"runs. Page-locked and device memory must not be changed before the copy is done.\n"
"**Ordered after** all work that cumem knows of on either end, but for other bytes of it\n"
"copied in the background.");

static PyObject *
copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    return copy_with(module, "copy", args, nargs, kwnames, true);
}

static PyObject *
copy_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    return copy_with(module, "copy_async", args, nargs, kwnames, false);
}

PyMethodDef cm_copy_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))copy_function, METH_FASTCALL | METH_KEYWORDS,
     copy_doc},
    {"copy_async", (PyCFunction)(void (*)(void))copy_async_function,
     METH_FASTCALL | METH_KEYWORDS, copy_async_doc},
    {NULL, NULL, 0, NULL},
};
