/* SPDX-License-Identifier: Apache-2.0 */
/* copy() and copy_async() as Python sees them. */
#include "python/copy/copy_functions.h"

#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/progress.h"

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

/* On loan; NULL without an exception: none was given. */
static cm_stream *
take_stream(cm_state *state, PyObject *const *values)
{
    return values[2] == NULL || values[2] == Py_None
               ? NULL
               : cm_copy_stream(state, values[0], values[1], values[2]);
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
"OSError\n"
"    If an end is a mapped file that is shorter by now, or cannot be read.\n\n"
"Notes\n-----\n"
"**Blocks** until done, GIL released. Ctrl-C ends it within a few pieces, and nothing is\n"
"read or written afterwards; what the driver was given is waited for, for a second at most\n"
"(should that not do, it goes on and both ends are kept alive). **Ordered after** all work\n"
"that cumem knows of on either end, but for other bytes of it copied in the background.\n"
"Overlapping ends behave as if `src` were read whole first; bytes between the elements of a\n"
"strided target are never written.");

PyDoc_STRVAR(copy_async_doc,
"copy_async($module, /, dst, src, *, stream=None, after=None)\n--\n\n"
"Start a copy between any two pieces of memory.\n\n"
"Parameters\n----------\n"
"dst, src : Buffer, array, exporter\n    As for `copy`.\n"
"stream : stream, optional\n"
"    Copy in the order of this stream: once it is done, whoever waits for it and however,\n"
"    the bytes are at `dst`. Where device memory is an end, a stream of a device of either\n"
"    end. Without one the copy runs in the background: only its handle tells of its end,\n"
"    and no stream, event or device that is waited for.\n"
"after : stream, or tuple or list of streams, optional\n"
"    What these streams were given so far comes first as well. With it, and without\n"
"    `stream`, a copy of ordinary memory keeps its order and makes nobody wait.\n\n"
"Returns\n-------\n"
"Transfer\n    Its handle; it keeps both ends alive.\n\n"
"Raises\n------\n"
"TypeError\n    If an end is no memory, `after` no stream, or the dtypes differ.\n"
"ValueError\n"
"    If the shapes do not fit, `dst` is read-only, a buffer is closed or `stream` is of\n"
"    another device.\n"
"OSError\n    If an end is a mapped file that is cut short, or cannot be read.\n"
"CudaError\n"
"    If the copy failed before the call returned, or `stream` is being captured and the\n"
"    copy is not one that a graph can hold: a graph holds nothing that the host does.\n\n"
"Notes\n-----\n"
"Without a stream it never waits for other work. With one it **blocks**, GIL released, just\n"
"where CUDA's own call does, because the processor takes part: until an ordinary source has\n"
"been read, so that it may be changed, and until an ordinary target has been written (also\n"
"page-locked memory whose elements lie apart, where no kernel reaches it). So it waits for\n"
"the stream's earlier work where the target is ordinary memory, and where more than 12 MiB\n"
"of an ordinary source wait. Ctrl-C ends the waiting; what is queued by then still runs.\n"
"Page-locked and device memory must not be changed before the copy is done.\n"
"**Ordered after** `after`, and all work that cumem knows of on either end, but for other\n"
"bytes of it copied in the background.\n\n"
"Examples\n--------\n"
">>> transfer = cumem.copy_async(array, buffer, after=stream)  # Python goes on\n"
">>> transfer.wait()");

static PyObject *
copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"dst", "src", "stream", "progress", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4];
    cm_progress progress;
    if (cm_args_parse("copy", args, nargs, kwnames, names, 2, 2, values) < 0) {
        return NULL;
    }
    cm_stream *stream = take_stream(state, values);
    if (stream == NULL && PyErr_Occurred()) {
        return NULL;
    }
    PyObject *result = NULL;
    if (cm_progress_open(values[3], "copy", &progress) == 0) {
        result = progress.tell == NULL
                     ? cm_copy_objects(state, values[0], values[1], stream, true)
                     : cm_copy_and_tell(state, values[0], values[1], stream, &progress);
        if (cm_progress_close(&progress) < 0) {
            Py_CLEAR(result);
        }
    }
    cm_stream_give(state, stream);
    return result;
}

static PyObject *
copy_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    static const char *const names[] = {"dst", "src", "stream", "after", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4];
    cm_stream_list after;
    if (cm_args_parse("copy_async", args, nargs, kwnames, names, 2, 2, values) < 0) {
        return NULL;
    }
    cm_stream *stream = take_stream(state, values);
    if (stream == NULL && PyErr_Occurred()) {
        return NULL;
    }
    PyObject *result = NULL;
    int device = device_hint(state, values[0], values[1]);
    if (cm_stream_list_take(state, values[3], "after", device, &after) == 0) {
        result = cm_copy_async_after(state, values[0], values[1], stream, &after);
    }
    cm_stream_list_give(state, &after);
    cm_stream_give(state, stream);
    return result;
}

PyMethodDef cm_copy_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))copy_function, METH_FASTCALL | METH_KEYWORDS,
     copy_doc},
    {"copy_async", (PyCFunction)(void (*)(void))copy_async_function,
     METH_FASTCALL | METH_KEYWORDS, copy_async_doc},
    {NULL, NULL, 0, NULL},
};
