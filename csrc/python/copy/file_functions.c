/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a file and objects in memory: from them to a request of the engine, with
 * what must come first and what must stay alive. */
#include "base/checked_math.h"
#include "base/file_maps.h"
#include "base/nvtx.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/progress.h"
#include "transfer/file/file.h"

typedef struct file_call {
    cm_call call;
    PyObject *open;   /* borrowed: called for the descriptor when all ends are good */
    cm_stream *given; /* borrowed; NULL: the current streams */
    uint64_t nbytes;  /* of all ends */
    uint64_t devices; /* whose memory is an end, by index */
    bool cuts;        /* the file is to end with the last range */
    bool looks;       /* for maps of the file among the ends, and nothing else */
    Py_ssize_t count;
    Py_ssize_t end_count;  /* ends that are initialised */
    cm_operand *ends;      /* owned, as are the next */
    cm_file_range *ranges; /* their regions are those of `ends` */
    cm_file_request request;
} file_call;

/* -- ends --------------------------------------------------------------------------------- */

static int
read_pair(file_call *call, PyObject *pair)
{
    cm_state *state = call->call.state;
    cm_operand *end = &call->ends[call->end_count];
    cm_file_range *range = &call->ranges[call->end_count];
    unsigned long long offset;
    PyObject *object;
    if (!PyArg_ParseTuple(pair, "KO", &offset, &object)) {
        return -1;
    }
    call->end_count++;
    if (cm_operand_init(state, end, object, NULL, call->given, CM_ASK) < 0) {
        return -1;
    }
    cm_status status = cm_file_range_init(range, offset, &end->region);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, NULL);
}

static int
read_pairs(file_call *call, PyObject *pairs)
{
    size_t room = (size_t)call->count + 1;
    call->ends = PyMem_Calloc(room, sizeof(*call->ends));
    call->ranges = PyMem_Calloc(room, sizeof(*call->ranges));
    if (call->ends == NULL || call->ranges == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < call->count; i++) {
        if (read_pair(call, PyTuple_GetItem(pairs, i)) < 0) {
            return -1;
        }
        call->nbytes += call->ranges[i].nbytes;
    }
    return 0;
}

/* -- order and lifetime ------------------------------------------------------------------- */

static int
take_ends(file_call *call)
{
    for (Py_ssize_t i = 0; i < call->end_count; i++) {
        const cm_operand *end = &call->ends[i];
        if ((end->storage != NULL
             && cm_call_come_after(&call->call, end->storage, CM_EXTENT_ALL(true)) < 0)
            || cm_call_keep(&call->call, end) < 0) {
            return -1;
        }
    }
    return call->given == NULL ? 0
                               : cm_call_come_after_stream(&call->call, call->given);
}

/* One for each device whose memory is an end. */
static int
choose_streams(file_call *call)
{
    cm_stream **streams = call->request.streams;
    for (Py_ssize_t i = 0; i < call->count; i++) {
        int device = cm_file_range_device(&call->ranges[i]);
        if (call->ranges[i].nbytes == 0 || device < 0 || streams[device] != NULL) {
            continue;
        }
        if (call->given != NULL && call->given->device != device) {
            PyErr_Format(PyExc_ValueError,
                         "stream is of device %d, but the memory is of device %d",
                         call->given->device, device);
            return -1;
        }
        streams[device] =
            call->given != NULL
                ? cm_stream_take(call->call.state, call->given)
                : cm_stream_from_object(call->call.state, Py_None, device);
        if (streams[device] == NULL) {
            return -1;
        }
        call->devices |= UINT64_C(1) << device;
    }
    return 0;
}

/* -- the call ----------------------------------------------------------------------------- */

static int
init_call(file_call *call, PyObject *pairs)
{
    if (cm_state_runtime(call->call.state) == NULL || read_pairs(call, pairs) < 0
        || choose_streams(call) < 0 || take_ends(call) < 0) {
        return -1;
    }
    call->request.ranges = call->ranges;
    call->request.range_count = (uint64_t)call->count;
    return 0;
}

static void
fini_call(file_call *call)
{
    cm_call_fini(&call->call);
    for (Py_ssize_t i = 0; i < call->end_count; i++) {
        cm_operand_fini(&call->ends[i]);
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_stream_give(call->call.state, call->request.streams[device]);
    }
    PyMem_Free(call->ends);
    PyMem_Free(call->ranges);
}

/* A file that is written need not exist before: what is wrong with the ends must be
 * told by now. */
static int
open_file(file_call *call)
{
    int64_t fd = -1;
    PyObject *number = PyObject_CallNoArgs(call->open);
    int result = number == NULL ? -1 : cm_arg_int64(number, "fd", &fd);
    Py_XDECREF(number);
    call->request.fd = (int)fd;
    return result;
}

/* So many ends at most are asked about one by one. */
enum { SPANS_MAX = 32 };

/* -- maps of the file itself -------------------------------------------------------------- */

/* May the memory be a mapping of a file? Not what an allocator or a pool of ours made.
 */
static bool
may_be_map(const file_call *call, Py_ssize_t i)
{
    const cm_operand *end = &call->ends[i];
    return call->ranges[i].nbytes > 0 && end->region.host != NULL
           && !end->region.is_heap && cm_file_range_device(&call->ranges[i]) < 0
           && (end->storage == NULL || end->storage->pool == NULL);
}

/* The bytes of the file that the call changes or reads, from the first to the last.
 * What is cut off behind them counts as changed. */
static cm_file_span
touched_span(const file_call *call)
{
    cm_file_span span = {.begin = UINT64_MAX};
    for (Py_ssize_t i = 0; i < call->count; i++) {
        const cm_file_range *range = &call->ranges[i];
        uint64_t end = range->offset + range->nbytes;
        if (range->nbytes > 0) {
            span.begin = cm_least(span.begin, range->offset);
            span.end = end > span.end ? end : span.end;
        }
    }
    if (call->cuts) {
        span.end = UINT64_MAX;
    }
    return span;
}

/* The memory of an end that may be a map, from its lowest byte to its highest. False:
 * it is none. */
static bool
map_span(const file_call *call, Py_ssize_t i, cm_file_span *out)
{
    int64_t low, high;
    const cm_region *region = &call->ends[i].region;
    if (!may_be_map(call, i) || !cm_is_ok(cm_region_bounds(region, &low, &high))) {
        return false;
    }
    uint64_t first = (uintptr_t)region->host;
    *out = (cm_file_span){first + (uint64_t)low, first + (uint64_t)high};
    return true;
}

/* Append the numbers of the ends that show bytes which the call touches. */
static int
list_shown(const file_call *call, const cm_file_maps *maps, PyObject *shown)
{
    cm_file_span touched = touched_span(call);
    for (Py_ssize_t i = 0; i < call->count; i++) {
        cm_file_span memory;
        if (!map_span(call, i, &memory) || !cm_file_maps_show(maps, memory, touched)) {
            continue;
        }
        PyObject *index = PyLong_FromSsize_t(i);
        int result = index == NULL ? -1 : PyList_Append(shown, index);
        Py_XDECREF(index);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* Bytes that are read from a file into a map of the same bytes, or written to it from
 * one, change under the call: pieces move in any order. Nothing has been moved yet when
 * this lists the numbers of such ends, so that the caller can go by way of memory of
 * its own; an empty list: there are none. */
static PyObject *
find_own_maps(file_call *call)
{
    PyObject *shown = PyList_New(0);
    cm_file_span spans[SPANS_MAX];
    size_t span_count = 0;
    bool is_few = true;
    for (Py_ssize_t i = 0; i < call->count && is_few; i++) {
        cm_file_span span;
        if (!map_span(call, i, &span)) {
            continue;
        }
        is_few = span_count < SPANS_MAX;
        if (is_few) {
            spans[span_count++] = span;
        }
    }
    if (shown == NULL || span_count == 0) {
        return shown;
    }
    cm_file_maps maps;
    cm_status status;
    int fd = call->request.fd;
    Py_BEGIN_ALLOW_THREADS
    status = is_few ? cm_file_maps_read(fd, spans, span_count, &maps)
                    : cm_file_maps_read_text(fd, &maps);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        Py_DECREF(shown);
        return cm_py_raise(call->call.state, status,
                           "while looking for maps of a file");
    }
    if (list_shown(call, &maps, shown) < 0) {
        Py_CLEAR(shown);
    }
    cm_file_maps_fini(&maps);
    return shown;
}

static PyObject *
run_call(file_call *call)
{
    cm_state *state = call->call.state;
    /* Ranges of the host alone need no page-locked chunks, so no device to lock them.
     */
    cm_engine *engine = cm_call_engine(state, call->devices);
    if (engine == NULL || open_file(call) < 0) {
        return NULL;
    }
    PyObject *shown = find_own_maps(call);
    if (shown == NULL || call->looks || PyList_Size(shown) > 0) {
        return shown;
    }
    Py_DECREF(shown);
    if (cm_call_prepare(&call->call, &call->request.copy) < 0) {
        return NULL;
    }
    cm_file_failure failure;
    CM_NVTX(call->request.writes ? "write file" : "read file", call->nbytes);
    cm_call_let_go(&call->call);
    cm_status status = cm_engine_transfer_file(engine, &call->request, &failure);
    cm_call_take_back(&call->call);
    bool writes = call->request.writes;
    if (PyErr_Occurred()) {
        return NULL; /* Ctrl-C, or the progress callback's */
    }
    if (failure.at_end || failure.error != 0) {
        return Py_BuildValue("(iKK)", failure.at_end ? 0 : failure.error,
                             (unsigned long long)failure.offset,
                             (unsigned long long)failure.range_index);
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status,
                           writes ? "while writing a file" : "while reading a file");
    }
    call->call.is_ordered = true;
    call->call.moves_bytes = call->nbytes > 0;
    return cm_progress_tell(call->call.progress, call->nbytes, call->nbytes) < 0
               ? NULL
               : PyLong_FromUnsignedLongLong(call->nbytes);
}

PyObject *
cm_transfer_file(PyObject *module, PyObject *args)
{
    PyObject *open, *ends, *stream, *told;
    int writes, cuts, direct, looks;
    if (!PyArg_ParseTuple(args, "OO!ppOiOp", &open, &PyTuple_Type, &ends, &writes,
                          &cuts, &stream, &direct, &told, &looks)) {
        return NULL;
    }
    file_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    cm_state *state = cm_state_of_module(module);
    cm_call_frame frame;
    PyObject *result = NULL;
    if (cm_call_enter(&frame, state, stream, cm_device_hint(state, ends, stream, 2),
                      told, writes ? "write" : "read")
        == 0) {
        call->call =
            (cm_call){.state = state, .blocking = true, .progress = &frame.progress};
        call->open = open;
        call->cuts = cuts;
        call->looks = looks;
        call->given = frame.stream;
        call->count = PyTuple_Size(ends);
        call->request.writes = writes;
        call->request.direct = (cm_file_direct)direct;
        call->request.faults = &state->file_faults;
        result = init_call(call, ends) < 0 ? NULL : run_call(call);
        cm_state_drop_own(state);
        fini_call(call);
    }
    PyMem_Free(call);
    return cm_call_leave(&frame, result);
}
