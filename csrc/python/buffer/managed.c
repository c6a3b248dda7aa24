/* SPDX-License-Identifier: Apache-2.0 */
/* What only managed memory has: moving its pages ahead of use. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"

const char cm_buffer_prefetch_doc[] =
    "prefetch($self, /, device=None, *, stream=None)\n"
    "--\n"
    "\n"
    "Move the pages to a device or to the host ahead of use.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "device : Device, int, str or 'host', optional\n"
    "    Where to; default: cumem's current device.\n"
    "stream : Stream or other stream object, optional\n"
    "    Default: the current stream of that device.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    There is no such device, or the buffer is closed.\n"
    "TypeError\n"
    "    `device` or `stream` is of another type.\n"
    "CudaError\n"
    "    The driver refused, e.g. on devices without concurrent managed access.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: no, the move is queued.\n"
    "Ordered after: work on `stream`. Pages that the view shares with its neighbours "
    "move\n"
    "whole.\n";

static bool
is_host_name(PyObject *object)
{
    return PyUnicode_Check(object)
           && (PyUnicode_CompareWithASCIIString(object, "host") == 0
               || PyUnicode_CompareWithASCIIString(object, "cpu") == 0);
}

static int
parse_location(cm_state *state, PyObject *object, int *out)
{
    if (object != NULL && is_host_name(object)) {
        *out = CM_HOST_LOCATION;
        return 0;
    }
    return cm_arg_device(state, object == NULL ? Py_None : object, "device", out);
}

/* The bytes from the lowest to the highest element. *nbytes 0 when there are none. */
static int
span(const cm_buffer *self, cm_address *address, uint64_t *nbytes)
{
    int64_t low;
    int64_t high;
    if (cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    *address = cm_buffer_address(self) + (uint64_t)low;
    *nbytes = (uint64_t)(high - low);
    return 0;
}

static cm_status
run_prefetch(cm_runtime *runtime, cm_address address, uint64_t nbytes, int location,
             const cm_stream *stream)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(runtime, stream->device, &guard));
    cm_status status =
        cm_rt_prefetch_async(runtime, address, nbytes, location, stream->handle);
    cm_device_leave(runtime, &guard);
    return status;
}

static int
prefetch(cm_buffer *self, int location, PyObject *stream_object)
{
    cm_storage *storage = self->storage;
    cm_address address;
    uint64_t nbytes;
    int home = location == CM_HOST_LOCATION ? storage->device : location;
    cm_stream *stream = cm_stream_from_object(
        self->state, stream_object == NULL ? Py_None : stream_object, home);
    if (stream == NULL) {
        return -1;
    }
    cm_runtime *runtime = cm_state_runtime(self->state);
    int result = -1;
    /* Both may have run Python code, which may have freed us. */
    if (runtime == NULL || cm_buffer_check_open(self) < 0
        || span(self, &address, &nbytes) < 0) {
        cm_stream_give(self->state, stream);
        return -1;
    }
    if (nbytes == 0) {
        result = 0;
    }
    else if (cm_storage_add_use(storage, stream) == 0) {
        cm_status status;
        cm_storage_pin(storage);
        Py_BEGIN_ALLOW_THREADS
        status = run_prefetch(runtime, address, nbytes, location, stream);
        Py_END_ALLOW_THREADS
        cm_storage_unpin(storage);
        result = cm_is_ok(status) ? 0
                                  : cm_py_raise_int(self->state, status,
                                                    "while prefetching managed memory");
    }
    cm_stream_give(self->state, stream);
    return result;
}

PyObject *
cm_buffer_prefetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    cm_buffer *self = (cm_buffer *)object;
    static const char *const names[] = {"device", "stream", NULL};
    PyObject *values[2];
    int location;
    if (cm_args_parse("prefetch", args, nargs, kwnames, names, 1, 0, values) < 0
        || cm_buffer_check_open(self) < 0
        || parse_location(self->state, values[0], &location) < 0
        || prefetch(self, location, values[1]) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static cm_status
read_location(cm_runtime *runtime, int device, cm_address address, uint64_t nbytes,
              int *location)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(runtime, device, &guard));
    cm_status status = cm_rt_prefetch_location(runtime, address, nbytes, location);
    cm_device_leave(runtime, &guard);
    return status;
}

int
cm_buffer_read_prefetch_location(const cm_buffer *self, int *out)
{
    cm_address address;
    uint64_t nbytes;
    *out = CM_NO_LOCATION;
    cm_runtime *runtime = cm_state_runtime(self->state); /* may run Python code */
    if (runtime == NULL || cm_buffer_check_open(self) < 0
        || span(self, &address, &nbytes) < 0) {
        return -1;
    }
    if (nbytes == 0) {
        return 0;
    }
    cm_status status;
    cm_storage_pin(self->storage);
    cm_state_enter(self->state);
    Py_BEGIN_ALLOW_THREADS
    status = read_location(runtime, self->storage->device, address, nbytes, out);
    Py_END_ALLOW_THREADS
    cm_state_leave(self->state);
    cm_storage_unpin(self->storage);
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(self->state, status,
                                              "while asking for the prefetch location");
}

const char cm_buffer_prefetch_location_doc[] =
    "Where the memory was last prefetched to: a `Device`, ``'host'``, or None if "
    "nowhere\n"
    "or to several places.";

PyObject *
cm_buffer_get_prefetch_location(PyObject *object, void *closure CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    int location;
    if (cm_buffer_check_open(self) < 0
        || cm_buffer_read_prefetch_location(self, &location) < 0) {
        return NULL;
    }
    if (location == CM_HOST_LOCATION) {
        return PyUnicode_FromString("host");
    }
    if (location < 0) {
        return Py_NewRef(Py_None);
    }
    return cm_device_object_new(self->state, location);
}
