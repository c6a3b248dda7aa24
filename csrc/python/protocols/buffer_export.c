/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the buffer protocol for the types of buffers whose memory the host may
 * use. Shape and strides of a view are the buffer's own arrays, which live as long as
 * the buffer that the view keeps. `internal` of a view holds the format. */
#include "python/buffer/methods.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/protocols.h"

_Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "cumem needs a 64-bit platform");

/* Smaller exports are not watched: they keep next to no memory alive, and looking at
 * the stack takes longer than copying the bytes. */
enum { LEAST_WATCHED_NBYTES = 4096 };

static bool
has_all(int flags, int wanted)
{
    return (flags & wanted) == wanted;
}

/* Check that a view can have the form that `flags` ask for. Returns 0, or -1 with
 * BufferError. */
static int
check_request(const cm_buffer *buffer, const cm_region *region, int flags)
{
    bool c_order = cm_region_is_c_contiguous(region);
    bool f_order = cm_region_is_f_contiguous(region);
    const char *why = NULL;
    if (has_all(flags, PyBUF_WRITABLE) && buffer->readonly) {
        why = "read-only, and a writable view was asked for";
    }
    else if (has_all(flags, PyBUF_C_CONTIGUOUS) && !c_order) {
        why = "not C-contiguous, and the consumer needs that";
    }
    else if (has_all(flags, PyBUF_F_CONTIGUOUS) && !f_order) {
        why = "not Fortran-contiguous, and the consumer needs that";
    }
    else if (has_all(flags, PyBUF_ANY_CONTIGUOUS) && !c_order && !f_order) {
        why = "not contiguous, and the consumer needs that";
    }
    else if (!has_all(flags, PyBUF_STRIDES) && !c_order) {
        why = "not C-contiguous, and the consumer asked for a view without strides";
    }
    if (why != NULL) {
        PyErr_Format(PyExc_BufferError, "the buffer is %s", why);
    }
    return why == NULL ? 0 : -1;
}

static void
fill_view(const cm_buffer *buffer, const cm_region *region, Py_buffer *view, int flags)
{
    static char nothing[1]; /* a valid address for views without bytes */
    view->buf = region->host == NULL ? nothing : region->host;
    view->len = (Py_ssize_t)cm_buffer_nbytes(buffer);
    view->itemsize = (Py_ssize_t)buffer->itemsize;
    view->readonly = buffer->readonly;
    view->ndim = buffer->ndim;
    view->shape = NULL;
    view->strides = NULL;
    view->suboffsets = NULL;
    if (!has_all(flags, PyBUF_ND)) {
        view->ndim = 1; /* then it is one run of bytes */
    }
    else if (buffer->ndim > 0) {
        view->shape = (Py_ssize_t *)(void *)cm_buffer_shape(buffer);
        if (has_all(flags, PyBUF_STRIDES)) {
            view->strides = (Py_ssize_t *)(void *)cm_buffer_strides(buffer);
        }
    }
}

int
cm_buffer_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    PyObject *format = NULL;
    cm_region region;
    view->obj = NULL;
    view->format = NULL;
    if (cm_buffer_check_open(buffer) < 0 || cm_buffer_check_inherited(buffer) < 0) {
        return -1;
    }
    cm_buffer_region(buffer, &region);
    if (check_request(buffer, &region, flags) < 0) {
        return -1;
    }
    if (has_all(flags, PyBUF_FORMAT)) {
        format = cm_numpy_format(buffer->dtype);
        if (format == NULL) {
            return -1;
        }
        /* The type is `char *`, but consumers do not write to it. */
        view->format = (char *)(uintptr_t)PyUnicode_AsUTF8AndSize(format, NULL);
        if (view->format == NULL) {
            Py_DECREF(format);
            return -1;
        }
    }
    /* The export is counted before the wait, so that free() refuses meanwhile. */
    bool is_first = !buffer->storage->was_exported
                    && buffer->storage->nbytes >= LEAST_WATCHED_NBYTES;
    Py_ssize_t refs = Py_REFCNT(self);
    cm_storage_begin_export(buffer->storage);
    /* This is counted as well, since torch.frombuffer() gives its view back at once but
     * goes on using the memory. */
    buffer->storage->view_count++;
    if (cm_storage_wait(buffer->storage, false) < 0
        || cm_buffer_note_side(buffer, false) < 0
        || cm_buffer_check_open(buffer) < 0) { /* it was closed meanwhile */
        buffer->storage->view_count--;
        cm_storage_end_export(buffer->storage);
        Py_XDECREF(format);
        return -1;
    }
    fill_view(buffer, &region, view, flags);
    if (is_first && flags == PyBUF_FULL_RO) { /* memoryviews and NumPy ask for this */
        cm_storage_watch_view(buffer->storage, view, refs);
    }
    view->internal = format;
    view->obj = Py_NewRef(self);
    return 0;
}

void
cm_buffer_releasebuffer(PyObject *self, Py_buffer *view)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    Py_XDECREF((PyObject *)view->internal);
    view->internal = NULL;
    if (cm_storage_unwatch_view(buffer->storage, view, Py_REFCNT(self) - 1)) {
        buffer->storage->view_count--;
    }
    cm_storage_end_export(buffer->storage);
}

/* -- read-only buffers -------------------------------------------------------------------- */

void
cm_buffer_freeze(cm_buffer *buffer)
{
    buffer->readonly = true;
    buffer->storage->readonly = true;
}

PyObject *
cm_freeze(PyObject *module, PyObject *object)
{
    if (!cm_buffer_check(cm_state_of_module(module), object)) {
        cm_arg_refuse(object, "buffer", "a Buffer");
        return NULL;
    }
    cm_buffer_freeze((cm_buffer *)(void *)object);
    return Py_NewRef(Py_None);
}
