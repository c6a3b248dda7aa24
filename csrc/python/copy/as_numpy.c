/* SPDX-License-Identifier: Apache-2.0 */
/* Whatever copy() reads, as a new array of NumPy: asnumpy() and Buffer.to_numpy(). */
#include "python/copy/buffer_methods.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/progress.h"
#include "python/protocols/protocols.h"

static PyObject *
copy_operand(cm_state *state, const cm_operand *operand, cm_stream *stream,
             PyObject *told)
{
    const cm_region *region = &operand->region;
    cm_progress progress;
    if (cm_progress_open(told, "copy", &progress) < 0) {
        return NULL;
    }
    PyObject *array = cm_numpy_empty(operand->dtype, region->ndim, region->shape, 'C');
    PyObject *done = NULL;
    if (array != NULL) {
        done = progress.tell == NULL
                   ? cm_copy_objects(state, array, operand->keep, stream, true)
                   : cm_copy_and_tell(state, array, operand->keep, stream, &progress);
    }
    if (cm_progress_close(&progress) < 0 || done == NULL) {
        Py_CLEAR(array);
    }
    Py_XDECREF(done);
    return array;
}

/* Lists, scalars and what only NumPy can read become arrays first. */
static PyObject *
copy_out(cm_state *state, PyObject *object, PyObject *stream_object, PyObject *told)
{
    cm_stream *stream = NULL;
    PyObject *source = cm_operand_is_memory(state, object)
                           ? Py_NewRef(object)
                           : cm_numpy_as_array(object, NULL);
    if (source == NULL) {
        return NULL;
    }
    if (stream_object != NULL && stream_object != Py_None) {
        stream = cm_copy_stream(state, source, source, stream_object);
        if (stream == NULL) {
            Py_DECREF(source);
            return NULL;
        }
    }
    PyObject *array = NULL;
    cm_operand operand;
    cm_state_enter(state);
    if (cm_state_runtime(state) != NULL) {
        array = cm_operand_init(state, &operand, source, NULL, stream) < 0
                    ? NULL
                    : copy_operand(state, &operand, stream, told);
        cm_operand_fini(&operand);
    }
    cm_state_leave(state);
    cm_stream_give(state, stream);
    Py_DECREF(source);
    return array;
}

#define COMMON                                                                         \
    "stream : stream, optional\n"                                                      \
    "    Where to copy device memory, of its device; by default the current stream.\n" \
    "progress : bool or callable, optional\n"                                          \
    "    As for `copy`.\n"                                                             \
    "\n"                                                                               \
    "Returns\n"                                                                        \
    "-------\n"                                                                        \
    "numpy.ndarray\n"                                                                  \
    "    Of the same shape and dtype, C-contiguous, writable, in ordinary memory of\n" \
    "    its own.\n"                                                                   \
    "\n"                                                                               \
    "Raises\n"                                                                         \
    "------\n"
#define COMMON_RAISES                                                                  \
    "ValueError\n"                                                                     \
    "    The buffer is closed, or `stream` is of another device.\n"                    \
    "MemoryError\n"                                                                    \
    "    There is no room for the array.\n"                                            \
    "ImportError\n"                                                                    \
    "    `progress` is True and there is no tqdm.\n"                                   \
    "CudaError\n"                                                                      \
    "    The copy failed, or `stream` is being captured.\n"
#define NOTES                                                                          \
    "\n"                                                                               \
    "Notes\n"                                                                          \
    "-----\n"                                                                          \
    "Blocks: until the bytes are there (GIL released); Ctrl-C ends it as it does "     \
    "`copy`.\n"                                                                        \
    "Ordered after: work that cumem knows of on the memory, and `stream` or the "      \
    "current\n"                                                                        \
    "stream of its device.\n"

const char cm_buffer_to_numpy_doc[] =
    "to_numpy($self, /, *, stream=None, progress=None)\n"
    "--\n"
    "\n"
    "Copy into a new array of NumPy, from memory of any kind.\n"
    "\n"
    "Parameters\n"
    "----------\n" COMMON COMMON_RAISES NOTES;

PyObject *
cm_buffer_to_numpy(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    static const char *const names[] = {"stream", "progress", NULL};
    PyObject *values[2];
    if (cm_args_parse("to_numpy", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    return copy_out(((cm_buffer *)(void *)object)->state, object, values[0], values[1]);
}

static const char asnumpy_doc[] =
    "asnumpy($module, /, obj, *, stream=None, progress=None)\n"
    "--\n"
    "\n"
    "Copy anything into a new array of NumPy.\n"
    "\n"
    "Several threads make and fill the pages of long ones.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "obj : Buffer, array, exporter or value\n"
    "    Memory of any kind and strides, as `copy` reads it: buffers, tensors of "
    "PyTorch,\n"
    "    arrays of CuPy, JAX or NumPy; or what ``numpy.asarray`` takes.\n" COMMON
    "TypeError\n"
    "    NumPy would make it an array of objects.\n" COMMON_RAISES "OSError\n"
    "    `obj` is a mapped file that is shorter by now, or cannot be read.\n" NOTES;

static PyObject *
asnumpy(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", "stream", "progress", NULL};
    PyObject *values[3];
    if (cm_args_parse("asnumpy", args, nargs, kwnames, names, 1, 1, values) < 0) {
        return NULL;
    }
    return copy_out(cm_state_of_module(module), values[0], values[1], values[2]);
}

PyMethodDef cm_asnumpy_methods[] = {
    {"asnumpy", (PyCFunction)(void (*)(void))asnumpy, METH_FASTCALL | METH_KEYWORDS,
     asnumpy_doc},
    {NULL, NULL, 0, NULL},
};
