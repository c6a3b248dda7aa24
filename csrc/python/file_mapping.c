/* SPDX-License-Identifier: Apache-2.0 */
#include "python/file_mapping.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/mapping.h"
#include "python/errors.h"
#include "python/file_functions.h"
#include "python/numpy_bridge.h"

/* What is shorter is copied before all that is mapped has been looked through. */
#define LEAST_NBYTES (UINT64_C(32) << 20)
enum { MOST_SOURCES = 64 }; /* descriptors that copies under way may hold */

/* NumPy's memmap keeps an mmap.mmap, as does frombuffer() of one. */
static bool
is_mmap(PyObject *array)
{
    PyObject *owner = cm_numpy_is_array(array) ? cm_numpy_owner(array) : NULL;
    PyObject *module = owner == NULL ? NULL : PyImport_ImportModule("mmap");
    PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, "mmap");
    int is = type == NULL ? 0 : PyObject_IsInstance(owner, type);
    Py_XDECREF(owner);
    Py_XDECREF(module);
    Py_XDECREF(type);
    PyErr_Clear();
    return is == 1;
}

/* The stream works on the target, or nothing does. */
static bool
has_fitting_stream(const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    bool on_device = dst->kind == CM_KIND_DEVICE || dst->host == NULL;
    return request->stream == NULL
           || (on_device && request->stream->device == dst->device);
}

void
cm_mapped_open(cm_mapped *mapped, PyObject *array, const cm_copy_request *request)
{
    mapped->fd = -1;
    mapped->moved = 0;
    uint64_t offset;
    const cm_region *src = &request->src;
    if (!request->blocking || src->kind != CM_KIND_PAGEABLE
        || !cm_is_ok(cm_file_range_init(&mapped->range, 0, &request->dst))
        || mapped->range.nbytes < LEAST_NBYTES || !cm_region_is_c_contiguous(src)
        || !has_fitting_stream(request) || cm_region_may_overlap(&request->dst, src)
        || !is_mmap(array)) {
        return;
    }
    int fd;
    char byte;
    Py_BEGIN_ALLOW_THREADS
    fd = cm_mapping_open(src->host, mapped->range.nbytes, &offset);
    Py_END_ALLOW_THREADS
    if (fd >= 0
        && (pread(fd, &byte, 1, (off_t)offset) != 1
            || !cm_is_ok(cm_file_range_init(&mapped->range, offset, &request->dst)))) {
        (void)close(fd); /* no file that can be read */
        fd = -1;
    }
    mapped->fd = fd;
}

cm_status
cm_mapped_copy(cm_mapped *mapped, cm_engine *engine, const cm_copy_request *request,
               const cm_file_calls *calls)
{
    cm_file_request read = {
        .fd = mapped->fd,
        .ranges = &mapped->range,
        .range_count = 1,
        .after = request->after,
        .after_count = request->after_count,
        .after_tickets = request->after_tickets,
        .after_ticket_count = request->after_ticket_count,
        .interrupted = request->interrupted,
        .interrupted_argument = request->interrupted_argument,
        .keep = {request->keep[0], request->keep[1]},
        .keep_count = request->keep_count,
        .moved = &mapped->moved,
        .calls = calls,
    };
    if (request->stream != NULL) {
        read.streams[request->stream->device] = request->stream;
    }
    return cm_engine_transfer_file(engine, &read, &mapped->failure);
}

static void
raise_failure(const cm_file_failure *failure, const cm_file_range *range,
              PyObject *array)
{
    PyObject *path = PyObject_GetAttrString(array, "filename");
    PyObject *name = path == NULL ? NULL : PyOS_FSPath(path);
    Py_XDECREF(path);
    if (name == NULL) {
        PyErr_Clear();
        name = PyUnicode_FromString("a mapped file");
    }
    if (name != NULL) {
        (void)cm_file_raise(failure, range, false, name);
        Py_DECREF(name);
    }
}

PyObject *
cm_mapped_raise(const cm_mapped *mapped, PyObject *array)
{
    if (mapped->fd >= 0 && (mapped->failure.at_end || mapped->failure.error != 0)) {
        raise_failure(&mapped->failure, &mapped->range, array);
    }
    return NULL;
}

int
cm_mapped_attach(cm_state *state, PyObject *array, const cm_region *region,
                 cm_file_source **out)
{
    int64_t low, high;
    cm_file_range range = {.offset = 0};
    struct stat info;
    *out = NULL;
    if (region->kind != CM_KIND_PAGEABLE
        || !cm_is_ok(cm_region_bounds(region, &low, &high))
        || (uint64_t)(high - low) < LEAST_NBYTES || !is_mmap(array)) {
        return 0;
    }
    const char *first = (const char *)region->host + low;
    range.nbytes = (uint64_t)(high - low);
    int fd;
    char byte;
    bool is_short = false;
    Py_BEGIN_ALLOW_THREADS
    fd = cm_mapping_open(first, range.nbytes, &range.offset);
    bool is_known = fd >= 0 && fstat(fd, &info) == 0;
    is_short = is_known && range.offset + range.nbytes > (uint64_t)info.st_size;
    bool is_read = is_known && !is_short && cm_file_source_count() < MOST_SOURCES
                   && pread(fd, &byte, 1, (off_t)range.offset) == 1;
    if (fd >= 0 && !is_read) {
        (void)close(fd);
        fd = -1;
    }
    Py_END_ALLOW_THREADS
    if (is_short) {
        cm_file_failure failure = {.at_end = true, .offset = (uint64_t)info.st_size};
        raise_failure(&failure, &range, array);
        return -1;
    }
    if (fd < 0) {
        return 0; /* no file that can be read, or too many are open */
    }
    const cm_file_faults *faults = state->file_faults;
    *out = cm_file_source_create(fd, first, range.offset,
                                 faults == NULL ? NULL : &faults->calls);
    if (*out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Adds the name to what is being raised. */
static void
name_file(PyObject *array)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *path = PyObject_GetAttrString(array, "filename");
    PyObject *name = path == NULL || path == Py_None ? NULL : PyOS_FSPath(path);
    Py_XDECREF(path);
    if (name != NULL) {
        (void)PyObject_SetAttrString(value, "filename", name);
        PyObject *text = PyErr_GivenExceptionMatches(type, PyExc_EOFError)
                             ? PyUnicode_FromFormat("%S: %R", value, name)
                             : NULL;
        PyObject *args = text == NULL ? NULL : PyTuple_Pack(1, text);
        if (args != NULL) {
            (void)PyObject_SetAttrString(value, "args", args);
        }
        Py_XDECREF(args);
        Py_XDECREF(text);
        Py_DECREF(name);
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

PyObject *
cm_mapped_raise_copy(cm_state *state, cm_status status, PyObject *array)
{
    (void)cm_py_raise(state, status, "while copying");
    if (array != NULL && (status.code == CM_EENDED || status.code == CM_ESYSTEM)) {
        name_file(array);
    }
    return NULL;
}

void
cm_mapped_close(cm_mapped *mapped)
{
    if (mapped->fd >= 0) {
        (void)close(mapped->fd);
        mapped->fd = -1;
    }
}
