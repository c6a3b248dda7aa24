/* SPDX-License-Identifier: Apache-2.0 */
/* _transfer_file() reads ranges of a file into objects in memory, or writes ranges from
 * them, and can then make checksums too. _write_files() writes several new files at the
 * same time, and _write_file_async() writes one new file in the background. As
 * copy_objects.c does for a copy, this file reads the objects, makes the request for
 * the engine, lets it come after earlier work, and keeps the memory alive.
 *
 * An end may be a map of the same file, such as a numpy.memmap. Reading bytes of a file
 * into a map of these bytes would change the file during the call. So such ends are
 * found before anything is moved (find_own_maps()), and the package then reads or
 * writes by way of other memory. _maps_file() only looks whether memory is such a map.
 */
#include "base/checked_math.h"
#include "base/crc32.h"
#include "base/file_maps.h"
#include "base/nvtx.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/progress.h"
#include "python/device/objects.h"
#include "transfer/file/file.h"

typedef struct file_call {
    cm_call call;
    PyObject *open; /* borrowed; a function that is called for the descriptor once all
                       ends are known to be good */
    PyObject *fds; /* borrowed; _write_files() has this tuple of descriptors in place of
                      `open` */
    PyObject *counts; /* borrowed; a tuple: how many ends each of these files has */
    cm_stream *given; /* borrowed; NULL for the current streams */
    uint64_t nbytes;  /* of all ends */
    uint64_t devices; /* the devices of all ends, as a set of indices */
    bool cuts;        /* the file is to end with the last range */
    bool sums;        /* checksums are asked for */
    Py_ssize_t count;
    Py_ssize_t end_count;        /* ends that are initialised */
    cm_operand *ends;            /* owned array */
    cm_file_range *ranges;       /* owned array; their regions are those of `ends` */
    _Atomic uint32_t *checksums; /* owned array; NULL unless `sums` is set */
    Py_ssize_t checksum_count;
    cm_file_request request;
    cm_file_place place; /* of _write_file_async() */
    PyObject *name;      /* borrowed; what its errors call the file */
    PyObject *new_file; /* borrowed; is_left of this object becomes True once the engine
                           has the file */
    cm_ticket *first;   /* borrowed; the transfer whose failure is this one's too, or
                           NULL */
} file_call;

/* -- ends --------------------------------------------------------------------------------- */

/* Read one end, which is some memory and its offset in the file. Returns 0, or -1 with
 * an exception. */
static int
read_end(file_call *call, PyObject *offset_object, PyObject *memory)
{
    cm_state *state = call->call.state;
    cm_operand *end = &call->ends[call->end_count];
    cm_file_range *range = &call->ranges[call->end_count];
    uint64_t offset = PyLong_AsUnsignedLongLong(offset_object);
    if (PyErr_Occurred()) {
        return -1;
    }
    call->end_count++;
    if (cm_operand_init(state, end, memory, NULL, call->given, CM_ASK) < 0) {
        return -1;
    }
    cm_status status = cm_file_range_init(range, offset, &end->region);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, NULL);
}

/* Read all ends. Returns 0, or -1 with an exception. */
static int
read_ends(file_call *call, PyObject *offsets, PyObject *memories)
{
    call->count = PyTuple_Size(memories);
    if (PyTuple_Size(offsets) != call->count) {
        PyErr_SetString(PyExc_ValueError, "there must be an offset for each memory");
        return -1;
    }
    size_t room = (size_t)call->count + 1;
    call->ends = PyMem_Calloc(room, sizeof(*call->ends));
    call->ranges = PyMem_Calloc(room, sizeof(*call->ranges));
    if (call->ends == NULL || call->ranges == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < call->count; i++) {
        if (read_end(call, PyTuple_GetItem(offsets, i), PyTuple_GetItem(memories, i))
            < 0) {
            return -1;
        }
        call->nbytes += call->ranges[i].nbytes;
    }
    return 0;
}

/* Make the checksums, if they are asked for. Ranges that follow one another in the file
 * without a gap have one checksum together, whose index is noted in each of them.
 * Returns 0, or -1 with MemoryError. */
static int
begin_checksums(file_call *call)
{
    if (!call->sums) {
        return 0;
    }
    call->checksums = PyMem_Calloc((size_t)call->count + 1, sizeof(*call->checksums));
    if (call->checksums == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < call->count;) {
        uint64_t begin = call->ranges[i].offset, end = begin;
        Py_ssize_t next = i;
        while (next < call->count && call->ranges[next].offset == end) {
            end += call->ranges[next++].nbytes;
        }
        Py_ssize_t index = call->checksum_count++;
        atomic_init(&call->checksums[index], cm_crc32_of_zeros(end - begin));
        for (; i < next; i++) {
            cm_file_range *range = &call->ranges[i];
            range->checksum_index = (uint64_t)index;
            range->nbytes_behind = end - range->offset - range->nbytes;
        }
    }
    call->request.checksums = call->checksums;
    return 0;
}

/* Return a list of the checksums, which is empty if none were asked for. */
static PyObject *
list_checksums(const file_call *call)
{
    PyObject *list = PyList_New(call->checksum_count);
    for (Py_ssize_t i = 0; i < call->checksum_count && list != NULL; i++) {
        PyObject *number = PyLong_FromUnsignedLong(atomic_load(&call->checksums[i]));
        if (number == NULL || PyList_SetItem(list, i, number) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
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

/* Choose a stream for each device that has the memory of an end. Returns 0, or -1 with
 * an exception. */
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
init_call(file_call *call, PyObject *offsets, PyObject *memories)
{
    if (cm_state_runtime(call->call.state) == NULL
        || read_ends(call, offsets, memories) < 0 || begin_checksums(call) < 0
        || choose_streams(call) < 0 || take_ends(call) < 0) {
        return -1;
    }
    call->request.file_count = 1;
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
    PyMem_Free(call->checksums);
}

/* Call for the descriptor. This may create the file that is to be written, so the ends
 * must have been checked before. Returns 0, or -1 with an exception. */
static int
open_file(file_call *call)
{
    int64_t fd = -1;
    PyObject *number = PyObject_CallNoArgs(call->open);
    int result = number == NULL ? -1 : cm_arg_int64(number, "fd", &fd);
    Py_XDECREF(number);
    call->request.fds[0] = (int)fd;
    return result;
}

/* With at most this many ends that may be maps, the system is asked about each of them.
 * With more ends, the whole list of the process's maps is read. */
enum { SPANS_MAX = 32 };

/* -- maps of the file itself -------------------------------------------------------------- */

/* True if the memory may be a map of a file. Memory that an allocator or a pool of ours
 * made is not. */
static bool
may_be_map(const file_call *call, Py_ssize_t i)
{
    const cm_operand *end = &call->ends[i];
    return call->ranges[i].nbytes > 0 && end->region.host != NULL
           && !end->region.is_heap && cm_file_range_device(&call->ranges[i]) < 0
           && (end->storage == NULL || end->storage->pool == NULL);
}

/* Return the bytes of the file that the call reads or changes, from the first to the
 * last. If the call ends the file with the last range, all bytes from there on count as
 * changed. */
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

/* Store the span of memory of an end, from its lowest byte to its highest. Returns
 * false if it cannot be a map. */
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

/* Append to `shown` the indices of those ends that are maps of bytes which the call
 * touches. Returns 0, or -1 with an exception. */
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

/* Return a list of the indices of those ends that are maps of bytes which the call
 * touches. If bytes of a file are read into a map of the same bytes, or written from
 * one, they change under the call, as pieces move in any order. Nothing has been moved
 * yet, so the caller can still use memory of its own in place of these ends. Returns
 * NULL with an exception if it fails. */
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
    int fd = call->request.fds[0];
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

/* Open the file, and return the engine. The file is opened last, when everything else
 * is known to be right. Returns NULL with an exception if it fails. */
static cm_engine *
open_call(file_call *call)
{
    /* If all ranges are in host memory, the engine needs no page-locked memory and thus
     * no device. */
    cm_engine *engine = cm_call_engine(call->call.state, call->devices);
    return engine == NULL || open_file(call) < 0 ? NULL : engine;
}

PyObject *
cm_file_failure_new(cm_state *state, const cm_file_failure *failure)
{
    PyObject *members[CM_FileFailure_COUNT] = {
        [CM_FileFailure_error] = PyLong_FromLong(failure->at_end ? 0 : failure->error),
        [CM_FileFailure_offset] = PyLong_FromUnsignedLongLong(failure->offset),
        [CM_FileFailure_index] = PyLong_FromUnsignedLongLong(failure->range_index),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_FileFailure, members);
}

/* Move the bytes. Returns None, or a _FileFailure if the file was at fault, or NULL
 * with an exception. */
static PyObject *
move_bytes(file_call *call, cm_engine *engine)
{
    cm_state *state = call->call.state;
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
        return NULL; /* a signal handler or the progress callback has raised */
    }
    if (failure.at_end || failure.error != 0) {
        return cm_file_failure_new(state, &failure);
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status,
                           writes ? "while writing a file" : "while reading a file");
    }
    call->call.is_ordered = true;
    call->call.moves_bytes = call->nbytes > 0;
    if (cm_progress_report(call->call.progress, call->nbytes, call->nbytes) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

/* Make a _FileOutcome. Takes over the references to `own_maps` and `failure`. Returns
 * NULL with an exception if it fails. */
static PyObject *
make_outcome(const file_call *call, uint64_t nbytes, PyObject *own_maps,
             PyObject *failure)
{
    cm_state *state = call->call.state;
    PyObject *members[CM_FileOutcome_COUNT] = {
        [CM_FileOutcome_nbytes] = PyLong_FromUnsignedLongLong(nbytes),
        [CM_FileOutcome_own_maps] = own_maps,
        [CM_FileOutcome_failure] = failure,
        [CM_FileOutcome_checksums] = list_checksums(call),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_FileOutcome, members);
}

/* The `run` of _transfer_file(). Moves the bytes, unless an end is a map of the file,
 * and returns a _FileOutcome, or NULL with an exception. */
static PyObject *
transfer(file_call *call)
{
    cm_engine *engine = open_call(call);
    PyObject *own_maps = engine == NULL ? NULL : find_own_maps(call);
    if (own_maps == NULL) {
        return NULL;
    }
    if (PyList_Size(own_maps) > 0) {
        return make_outcome(call, 0, own_maps, Py_NewRef(Py_None));
    }
    PyObject *failure = move_bytes(call, engine);
    if (failure == NULL) {
        Py_DECREF(own_maps);
        return NULL;
    }
    uint64_t nbytes = failure == Py_None ? call->nbytes : 0;
    return make_outcome(call, nbytes, own_maps, failure);
}

/* The `run` of _maps_file(). Returns whether an end is a map of the file, or NULL with
 * an exception. */
static PyObject *
look_for_maps(file_call *call)
{
    PyObject *own_maps = open_call(call) == NULL ? NULL : find_own_maps(call);
    if (own_maps == NULL) {
        return NULL;
    }
    PyObject *answer = PyBool_FromLong(PyList_Size(own_maps) > 0);
    Py_DECREF(own_maps);
    return answer;
}

/* Read the ends, let `run` make the answer from them, and release everything that
 * `call` has. The caller has entered the frame of the call. Returns NULL with an
 * exception if it fails. */
static PyObject *
run_call(file_call *call, PyObject *offsets, PyObject *memories,
         PyObject *(*run)(file_call *call))
{
    PyObject *result = init_call(call, offsets, memories) < 0 ? NULL : run(call);
    cm_state_drop_own(call->call.state);
    fini_call(call);
    return result;
}

PyObject *
cm_transfer_file(PyObject *module, PyObject *args)
{
    PyObject *open, *offsets, *memories, *stream, *progress;
    int writes, cuts, sums, direct;
    if (!PyArg_ParseTuple(args, "OO!O!pppOiO", &open, &PyTuple_Type, &offsets,
                          &PyTuple_Type, &memories, &writes, &cuts, &sums, &stream,
                          &direct, &progress)) {
        return NULL;
    }
    file_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    cm_state *state = cm_state_of_module(module);
    cm_call_frame frame;
    PyObject *result = NULL;
    if (cm_call_enter(&frame, state, stream, cm_device_hint(state, memories, stream, 1),
                      progress, writes ? "write" : "read")
        == 0) {
        call->call =
            (cm_call){.state = state, .blocking = true, .progress = &frame.progress};
        call->open = open;
        call->cuts = cuts;
        call->sums = sums && writes;
        call->given = frame.stream;
        call->request.writes = writes;
        call->request.direct = (cm_file_direct)direct;
        call->request.faults = &state->file_faults;
        result = run_call(call, offsets, memories, transfer);
    }
    PyMem_Free(call);
    return cm_call_leave(&frame, result);
}

/* Read the descriptors, and note for each range which file it belongs to. The ranges of
 * the first file come first, then those of the second, and so on. Returns 0, or -1 with
 * an exception. */
static int
read_files(file_call *call)
{
    Py_ssize_t file_count = PyTuple_Size(call->fds);
    Py_ssize_t at = 0;
    if (file_count > CM_FILE_MAX || PyTuple_Size(call->counts) != file_count) {
        PyErr_Format(PyExc_ValueError,
                     "there must be at most %d files with a count each",
                     (int)CM_FILE_MAX);
        return -1;
    }
    for (Py_ssize_t i = 0; i < file_count; i++) {
        int64_t fd, range_count;
        if (cm_arg_int64(PyTuple_GetItem(call->fds, i), "fd", &fd) < 0
            || cm_arg_int64(PyTuple_GetItem(call->counts, i), "count", &range_count)
                   < 0) {
            return -1;
        }
        call->request.fds[i] = (int)fd;
        for (int64_t k = 0; k < range_count && at < call->count; k++) {
            call->ranges[at++].file = (uint32_t)i;
        }
    }
    call->request.file_count = (uint32_t)file_count;
    if (at != call->count) {
        PyErr_SetString(PyExc_ValueError, "the counts must be those of all ranges");
        return -1;
    }
    return 0;
}

/* The `run` of _write_files(). It looks for no maps, since no memory can be a map of a
 * new file. Returns what move_bytes() returns. */
static PyObject *
write_files(file_call *call)
{
    cm_engine *engine =
        read_files(call) < 0 ? NULL : cm_call_engine(call->call.state, call->devices);
    return engine == NULL ? NULL : move_bytes(call, engine);
}

PyObject *
cm_write_files(PyObject *module, PyObject *args)
{
    PyObject *fds, *counts, *offsets, *memories, *progress;
    int direct;
    if (!PyArg_ParseTuple(args, "O!O!O!O!iO", &PyTuple_Type, &fds, &PyTuple_Type,
                          &counts, &PyTuple_Type, &offsets, &PyTuple_Type, &memories,
                          &direct, &progress)) {
        return NULL;
    }
    file_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    cm_state *state = cm_state_of_module(module);
    cm_call_frame frame;
    PyObject *result = NULL;
    if (cm_call_enter(&frame, state, Py_None, -1, progress, "write") == 0) {
        call->call =
            (cm_call){.state = state, .blocking = true, .progress = &frame.progress};
        call->request.writes = true;
        call->request.direct = (cm_file_direct)direct;
        call->request.faults = &state->file_faults;
        call->fds = fds;
        call->counts = counts;
        result = run_call(call, offsets, memories, write_files);
    }
    PyMem_Free(call);
    return cm_call_leave(&frame, result);
}

/* -- in the background ------------------------------------------------------------------- */

/* True if the file is complete with this call, and gets its name. */
static bool
is_last(const file_call *call)
{
    return call->place.temporary[0] != 0;
}

/* Let the call come after the work on the streams of its devices. A call that gives the
 * file its name also comes after the last file that is written in the background, so
 * that names are given in the order of the calls. The engine then uses streams of its
 * own, since the job outlives this call, which has only borrowed its streams. Returns
 * 0, or -1 with MemoryError. */
static int
come_after_streams(file_call *call)
{
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_stream *stream = call->request.streams[device];
        if (stream != NULL && cm_call_come_after_stream(&call->call, stream) < 0) {
            return -1;
        }
    }
    cm_ticket *last = call->call.state->last_save;
    if (last == NULL || !is_last(call)) {
        return 0;
    }
    return cm_call_come_after_ticket(&call->call, last);
}

/* Give the request to the engine, without the streams of the call. */
static cm_status
start_writing(file_call *call, cm_engine *engine, cm_ticket **out)
{
    cm_file_request request = call->request;
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        request.streams[device] = NULL;
    }
    request.copy.chained_to = call->first;
    return cm_engine_write_file(engine, &request, is_last(call) ? &call->place : NULL,
                                out);
}

/* Tell the caller that the engine now has the file, and removes it if need be. Python
 * code after the call could not do that in time, as Ctrl-C may come before it. Returns
 * 0, or -1 with an exception. */
static int
leave_file(const file_call *call)
{
    return is_last(call) ? PyObject_SetAttrString(call->new_file, "is_left", Py_True)
                         : 0;
}

/* The `run` of _write_file_async(). Returns a Transfer, or NULL with an exception. */
static PyObject *
begin_writing(file_call *call)
{
    cm_state *state = call->call.state;
    cm_engine *engine =
        come_after_streams(call) < 0 ? NULL : cm_call_engine(state, call->devices);
    if (engine == NULL || cm_call_prepare(&call->call, &call->request.copy) < 0) {
        return NULL;
    }
    cm_ticket *ticket = NULL;
    cm_call_let_go(&call->call);
    cm_status status = start_writing(call, engine, &ticket);
    cm_call_take_back(&call->call);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while writing a file");
    }
    call->call.is_ordered = true;
    call->call.moves_bytes = call->nbytes > 0;
    if (is_last(call)) {
        cm_state_set_last_save(state, ticket);
    }
    int left = leave_file(call);
    if (cm_call_remember(&call->call, ticket) < 0) {
        return NULL;
    }
    if (left < 0) {
        cm_ticket_release(ticket);
        return NULL;
    }
    PyObject *transfer = cm_call_handle(&call->call, ticket, Py_None, Py_None, -1);
    if (transfer != NULL) {
        cm_transfer_name_file(transfer, call->name);
    }
    return transfer;
}

PyObject *
cm_write_file_async(PyObject *module, PyObject *args)
{
    PyObject *offsets, *memories, *name, *first, *new_file;
    const char *temporary, *target;
    int fd, direct, mode;
    if (!PyArg_ParseTuple(args, "iO!O!iOyyiOO", &fd, &PyTuple_Type, &offsets,
                          &PyTuple_Type, &memories, &direct, &name, &temporary, &target,
                          &mode, &first, &new_file)) {
        return NULL;
    }
    file_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    cm_state *state = cm_state_of_module(module);
    call->call = (cm_call){.state = state, .has_ticket = true};
    call->request.writes = true;
    call->request.direct = (cm_file_direct)direct;
    call->request.faults = &state->file_faults;
    call->request.fds[0] = fd;
    call->name = name;
    call->new_file = new_file;
    if (first != Py_None) {
        call->first = ((cm_transfer_object *)(void *)first)->ticket;
    }
    call->place = (cm_file_place){
        .temporary = temporary, .target = target, .mode = (uint32_t)mode};
    cm_state_enter(state);
    PyObject *result = run_call(call, offsets, memories, begin_writing);
    cm_state_leave(state);
    PyMem_Free(call);
    return result;
}

PyObject *
cm_maps_file(PyObject *module, PyObject *args)
{
    PyObject *open, *offset, *memory;
    if (!PyArg_ParseTuple(args, "OOO", &open, &offset, &memory)) {
        return NULL;
    }
    PyObject *result = NULL;
    PyObject *offsets = PyTuple_Pack(1, offset);
    PyObject *memories = PyTuple_Pack(1, memory);
    file_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        PyErr_NoMemory();
    }
    if (offsets == NULL || memories == NULL || call == NULL) {
        goto fail;
    }
    cm_state *state = cm_state_of_module(module);
    call->call = (cm_call){.state = state, .blocking = true};
    call->open = open;
    call->cuts = true; /* so every byte behind the lowest offset counts as touched */
    cm_state_enter(state);
    result = run_call(call, offsets, memories, look_for_maps);
    cm_state_leave(state);
fail:
    PyMem_Free(call);
    Py_XDECREF(memories);
    Py_XDECREF(offsets);
    return result;
}
