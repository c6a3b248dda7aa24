/* SPDX-License-Identifier: Apache-2.0 */
/* The method fill() stores one value in all elements of a buffer. zeros(), full(),
 * zeros_like() and full_like() also fill their new buffers here.
 *
 * Memory of a device is filled by that device, and ordinary memory by the host. For
 * memory that both the host and a device reach, the filler depends on whether a stream
 * was given. If a stream was given, managed memory is filled by the stream's device,
 * and mapped memory is filled by the device that it was made for. If no stream was
 * given, managed memory that was prefetched to a device is filled by that device, and
 * all other such memory is filled by the host. Managed memory that was made for the
 * host alone is always filled by the host.
 *
 * A fill takes a short cut if the buffer is contiguous memory of a device and if all
 * unfinished work on this memory is on the stream of the fill. try_queue() then calls
 * cm_engine_try_fill(), which calls cm_fill_try_queue() of transfer/routes/fill.c. Any
 * other fill is a request to the engine for a copy whose source is one element
 * (queue_fill()).
 *
 * While a fill runs, its thread may release the GIL. So fill_by() keeps the buffer's
 * storage open until the fill returns, and no other thread can free the memory
 * meanwhile. Most functions here expect their caller to keep the storage open in this
 * way. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/values.h"
#include "python/device/wait.h"
#include "python/protocols/protocols.h"

/* Choose the device that fills the memory, by the rules at the top of this file.
 * `named` is true if the caller gave a stream. Returns -1 for the host, or -2 with an
 * exception. */
static int
choose_filler(cm_buffer *self, const cm_stream *stream, bool named)
{
    const cm_storage *storage = self->storage;
    bool on_device = cm_kind_is_on_device(storage->copy_kind);
    bool managed = cm_kind_migrates(storage->copy_kind);
    if ((!on_device && !cm_kind_is_shared(storage->copy_kind))
        || (managed && storage->flags == CM_MANAGED_HOST)) { /* the memory was made for
                                                                the host alone */
        return -1;
    }
    if (managed && named) {
        return stream->device;
    }
    if (on_device || named) {
        return storage->device;
    }
    int location = CM_HOST_LOCATION;
    if (managed && cm_buffer_read_prefetch_location(self, &location) < 0) {
        return -2;
    }
    return location < 0 ? -1 : location;
}

/* Note on the storage that the fill is done or, unless it was `blocking`, that it is
 * queued on `stream`. The fill is ordered after all earlier work on the storage. So
 * later work need only come after the fill, and the storage forgets all streams but
 * `stream`. It forgets none if a stream was given work on the storage after `use_calls`
 * was read, because the fill is not ordered after that work. */
static void
note_filled(cm_storage *storage, const cm_stream *stream, bool blocking,
            uint64_t use_calls)
{
    /* stream_fill_count makes the host wait for a fill before it reads the memory. A
     * fill of a pool's device memory is not counted. The host cannot read such memory
     * directly, and the pool keeps the memory until the fill is done. */
    bool is_unseen = storage->pool != NULL && cm_kind_is_on_device(storage->copy_kind);
    if (!blocking && !is_unseen) {
        storage->stream_fill_count++;
    }
    cm_storage_forget_uses(storage, stream, CM_EXTENT_ALL(true), true, use_calls);
}

/* True if no stream but this one, and no transfer, is working on the memory. */
static bool
is_in_order_of(const cm_storage *storage, const cm_stream *stream)
{
    for (uint32_t i = 0; i < storage->use_count; i++) {
        if (!cm_stream_same(storage->uses[i], stream)) {
            return false;
        }
    }
    return storage->transfer_count == 0;
}

/* Try the short cut, which is only for contiguous memory of the stream's device.
 * Returns 1 if the fill is queued, 0 if it has to be made in another way, or -1 with an
 * exception. The caller keeps the storage open. */
static int
try_queue(cm_buffer *self, const void *element, cm_stream *stream)
{
    cm_storage *storage = self->storage;
    if (!cm_kind_is_on_device(storage->copy_kind) || stream->device != storage->device
        || !cm_buffer_is_contiguous(self, false) || !is_in_order_of(storage, stream)) {
        return 0;
    }
    cm_engine *engine = cm_state_engine(self->state, storage->device);
    if (engine == NULL) {
        return -1;
    }
    cm_short_fill fill = {.stream = stream,
                          .address = cm_buffer_address(self),
                          .nbytes = cm_buffer_nbytes(self),
                          .value = element,
                          .itemsize = (uint64_t)self->itemsize};
    uint64_t use_calls = storage->use_calls;
    cm_status status = cm_ok();
    cm_state_enter(self->state);
    bool is_made = CM_WITHOUT_GIL(cm_engine_try_fill(engine, &fill, &status));
    cm_state_leave(self->state);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while filling a buffer");
    }
    if (is_made) {
        note_filled(storage, stream, false, use_calls);
    }
    return is_made;
}

/* Let the engine make the fill. If `filler` is a device, the fill is queued there. If
 * it is -1, the host makes the fill, and this function waits for the fill. The caller
 * keeps the storage open. Returns 0, or -1 with an exception. */
static int
queue_fill(cm_buffer *self, const void *element, cm_stream *stream, int filler)
{
    cm_storage *storage = self->storage;
    cm_region region;
    cm_pending before;
    cm_buffer_region(self, &region);
    int user = filler < 0 ? region.device : filler;
    cm_engine *engine = cm_state_engine(self->state, stream == NULL ? -1 : user);
    if (engine == NULL || cm_pending_take(storage, &before) < 0) {
        return -1;
    }
    bool blocking = filler < 0;
    region.device = blocking ? region.device : filler;
    cm_copy_request request = {.dst = region,
                               .src = {.host = (void *)(uintptr_t)element,
                                       .kind = CM_KIND_PAGEABLE,
                                       .device = -1,
                                       .itemsize = region.itemsize},
                               .is_fill = true,
                               .stream = stream,
                               .blocking = blocking,
                               .after = before.streams,
                               .after_count = before.stream_count};
    cm_ticket_info info = {.done = false};
    cm_ticket *ticket;
    cm_pool_waiter waiter = {self->state, cm_gil_give()};
    if (blocking) { /* a fill by a device is only queued, so there is no wait to
                       interrupt */
        cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
        request.interrupted = hooks.interrupted;
        request.interrupted_argument = hooks.argument;
    }
    cm_status status = cm_region_broadcast(&region, &request.src);
    if (cm_is_ok(status)) {
        status = cm_engine_copy(engine, &request, &ticket);
    }
    if (cm_is_ok(status)) {
        cm_ticket_query(ticket, &info);
        cm_ticket_release(ticket);
    }
    cm_gil_take(waiter.thread);
    uint64_t use_calls = before.use_calls;
    cm_pending_give(&before);
    if (status.code == CM_ECANCELLED && PyErr_Occurred()) {
        return -1; /* a signal handler has raised */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while filling a buffer");
    }
    if (info.captured) {
        storage->was_captured = true; /* nothing is written until the graph runs */
    }
    else {
        note_filled(storage, stream, blocking, use_calls);
    }
    return 0;
}

/* Set *out to true if the fill need not come after the work of any stream. That is so
 * if the memory is ordinary, no stream was named, and the device of the current stream
 * has no context yet. Without a context, nothing can have been queued on that device.
 * The host then fills the memory, and no context is made just to have a stream. */
static cm_status
is_of_host_alone(const cm_buffer *self, const cm_stream *stream, bool named, bool *out)
{
    bool has_context = cm_device_was_entered(stream->rt, stream->device);
    *out = false;
    if (named || has_context || !cm_kind_is_pageable(self->storage->copy_kind)) {
        return cm_ok();
    }
    if (cm_runtime_wake_if_started(stream->rt)) {
        CM_TRY(cm_rt_context_is_active(stream->rt, stream->device, &has_context));
    }
    *out = !has_context;
    return cm_ok();
}

/* Fill a buffer whose storage the caller keeps open. The function first waits for
 * unfinished transfers of the storage, because the requests that queue_fill() makes
 * name streams to come after, but no transfers. At the end it waits for the fill if the
 * caller `named` no stream, or if others may free the memory. It never waits for a fill
 * of a pool's device memory, which the caller cannot read before the fill is done.
 * Returns 0, or -1 with an exception. */
static int
fill_pinned(cm_buffer *self, const void *element, cm_stream *stream, bool named)
{
    cm_storage *storage = self->storage;
    if (cm_storage_wait_pending(storage) < 0 || cm_buffer_check_open(self) < 0) {
        return -1;
    }
    bool is_alone;
    cm_status status = is_of_host_alone(self, stream, named, &is_alone);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while filling a buffer");
    }
    if (is_alone) {
        return queue_fill(self, element, NULL, -1);
    }
    int filler = choose_filler(self, stream, named);
    if (filler < -1 || cm_buffer_note_side(self, filler >= 0) < 0
        || cm_buffer_check_open(self) < 0 || cm_storage_add_use(storage, stream) < 0) {
        return -1;
    }
    int queued = filler < 0 ? 0 : try_queue(self, element, stream);
    if (queued < 0 || (queued == 0 && queue_fill(self, element, stream, filler) < 0)) {
        return -1;
    }
    /* Memory that is neither a pool's nor registered belongs to others, who may free it
     * as soon as this function returns, so the fill must be over by then. A fill of
     * registered memory may still run, since the end of the registration waits for the
     * fill. */
    bool foreign = storage->pool == NULL && storage->registration == NULL;
    if ((foreign || !named) && cm_storage_has_pending_fill(storage)) {
        return cm_storage_wait(storage, true);
    }
    return 0;
}

/* Return the stream of a fill, or NULL with an exception. Memory of a device needs a
 * stream of that device. Any other memory may be filled on a stream of any device. */
static cm_stream *
find_stream(const cm_buffer *self, PyObject *object)
{
    const cm_storage *storage = self->storage;
    object = object == NULL ? Py_None : object;
    return cm_kind_is_on_device(storage->copy_kind)
               ? cm_stream_for_device(self->state, object, storage->device)
               : cm_stream_from_object(self->state, object, storage->device);
}

/* -- fill() ------------------------------------------------------------------------------- */

/* Fill the buffer with `element`, which is one item of the buffer's dtype. The address
 * of the item need not be aligned. If a stream is given, the function may return as
 * soon as the fill is queued. Otherwise it returns when the memory is filled, except
 * that a fill of a pool's device memory need only be queued (see fill_pinned()). The
 * storage is kept open until the end, because other threads and Python code may run
 * during the waits. Returns 0, or -1 with an exception. */
static int
fill_by(cm_buffer *self, const void *element, PyObject *given)
{
    cm_stream *stream = find_stream(self, given);
    if (stream == NULL) {
        return -1;
    }
    int result = 0;
    if (cm_buffer_nbytes(self) > 0) {
        result = cm_buffer_check_open(self);
    }
    if (result == 0 && cm_buffer_nbytes(self) > 0) {
        cm_storage_keep_open(self->storage);
        result = fill_pinned(self, element, stream, cm_arg_is_given(given));
        cm_storage_allow_close(self->storage);
    }
    cm_stream_give(self->state, stream);
    return result;
}

/* True if the value is an array without dimensions that has the buffer's dtype, so that
 * its memory is the element. False if the array may be masked, since only Python code
 * can tell whether it is. */
static bool
is_element(const cm_buffer *self, PyObject *value)
{
    return cm_numpy_is_array_of(value, self->dtype) && cm_numpy_ndim(value) == 0
           && !cm_numpy_may_be_masked(value);
}

/* True if the value is memory of another library that NumPy cannot read, or that NumPy
 * would take for ordinary memory. Such memory is read by a protocol, so that the fill
 * comes after the exporter's work. */
bool
cm_is_exporter(const cm_state *state, PyObject *value)
{
    if (cm_buffer_check(state, value) || cm_numpy_is_array(value)
        || cm_numpy_is_scalar(value) || PyList_CheckExact(value)
        || PyTuple_CheckExact(value)) {
        return false;
    }
    PyObject *type = (PyObject *)Py_TYPE(value);
    PyObject *const *words = state->words;
    return PyObject_HasAttr(type, words[CM_WORD___dlpack__])
           || PyObject_HasAttr(type, words[CM_WORD___cuda_array_interface__]);
}

/* True if the source is a buffer that NumPy cannot read. */
static bool
is_on_device(const cm_buffer *self, PyObject *source)
{
    return cm_buffer_check(self->state, source)
           && cm_kind_is_on_device(cm_buffer_kind((cm_buffer *)(void *)source));
}

/* Copy values to the buffer. The rule `casting` is known to allow the conversion of
 * their dtype. Here and in the functions below, errors begin with `before`, the name of
 * the call. The stream `on` may belong to another device than the source. So a copy
 * from a device to memory of the host is made on a stream of the source's device, and
 * this stream first waits for `on`. Returns 0, or -1 with an exception. */
static int
copy_by_rule(cm_buffer *self, const char *before, PyObject *values, PyObject *on,
             PyObject *casting)
{
    PyObject *object = (PyObject *)self;
    bool is_behind =
        is_on_device(self, values) && !cm_kind_is_on_device(cm_buffer_kind(self));
    return is_behind ? cm_copy_behind(self->state, before, object, values, on, casting)
                     : cm_copy_now(self->state, before, object, values, on, casting);
}

/* Return the dtype, borrowed, of a source that is a buffer or an array, or NULL for any
 * other source. */
static PyObject *
dtype_of_memory(const cm_buffer *self, PyObject *source)
{
    if (cm_buffer_check(self->state, source)) {
        return ((cm_buffer *)(void *)source)->dtype;
    }
    return cm_numpy_is_array(source) ? cm_numpy_dtype_of(source) : NULL;
}

/* Read a value and copy it as the rule `casting` says. Returns 0, or -1 with an
 * exception. */
static int
fill_by_rule(cm_buffer *self, const char *before, PyObject *source, PyObject *on,
             PyObject *casting)
{
    PyObject *values = cm_buffer_check(self->state, source)
                           ? Py_NewRef(source)
                           : cm_value_read_any(source, self->dtype);
    if (values == NULL) {
        return -1;
    }
    int result =
        cm_check_rule(before, dtype_of_memory(self, values), self->dtype, casting);
    if (result == 0) {
        result = copy_by_rule(self, before, values, on, casting);
    }
    Py_DECREF(values);
    return result;
}

/* Check that the dtype of a source is the dtype of the buffer, since nothing is
 * converted without a rule. Returns 0, or -1 with an exception. */
static int
check_dtype(const cm_buffer *self, const char *before, PyObject *dtype)
{
    if (cm_numpy_dtype_equal(dtype, self->dtype)) {
        return 0;
    }
    return cm_package_refuse("buffers.casting", "refuse_dtypes",
                             Py_BuildValue("(sOO)", before, dtype, self->dtype));
}

/* Fill with an array of the buffer's dtype. An array with dimensions is copied, and one
 * without dimensions is an element. Returns 0, or -1 with an exception. */
static int
fill_by_array(cm_buffer *self, const char *before, PyObject *array, PyObject *on,
              PyObject *given)
{
    if (cm_numpy_ndim(array) > 0) {
        return cm_copy_now(self->state, before, (PyObject *)self, array, on, NULL);
    }
    return fill_by(self, cm_numpy_data(array), given);
}

/* Fill with a buffer of the same dtype. If NumPy cannot read that buffer, since it is
 * memory of a device, its elements are copied by a device. Returns 0, or -1 with an
 * exception. */
static int
fill_by_buffer(cm_buffer *self, const char *before, PyObject *source, PyObject *on,
               PyObject *given)
{
    PyObject *object = (PyObject *)self;
    if (check_dtype(self, before, ((cm_buffer *)(void *)source)->dtype) < 0) {
        return -1;
    }
    if (!is_on_device(self, source)) {
        PyObject *array = cm_buffer_numpy(source, NULL);
        int result = array == NULL ? -1 : fill_by_array(self, before, array, on, given);
        Py_XDECREF(array);
        return result;
    }
    if (!cm_kind_is_on_device(self->storage->copy_kind)) {
        return cm_copy_behind(self->state, before, object, source, on, NULL);
    }
    return cm_copy_now(self->state, before, object, source, on, NULL);
}

/* Fill with values. If they have a dtype of their own, it must be the buffer's. Returns
 * 0, or -1 with an exception. */
static int
fill_by_values(cm_buffer *self, const char *before, PyObject *source, PyObject *on,
               PyObject *given)
{
    PyObject *values;
    if (cm_value_is_array(source)) {
        values = cm_value_read_array(source);
        if (values != NULL
            && check_dtype(self, before, cm_numpy_dtype_of(values)) < 0) {
            Py_CLEAR(values);
        }
    }
    else {
        values = cm_value_array(source, self->dtype);
    }
    if (values == NULL) {
        return -1;
    }
    int result = fill_by_array(self, before, values, on, given);
    Py_DECREF(values);
    return result;
}

/* Return the object that the fill reads in place of `value`. Memory that is reached by
 * a protocol becomes a buffer. If the buffer to fill is new (`is_new`), an object with
 * __array__() becomes an array, so that its dtype is known: full() converts elements of
 * that dtype to the dtype of the new buffer. Any other value is returned as it is.
 * Returns a new reference, or NULL with an exception. */
static PyObject *
read_source(const cm_buffer *self, PyObject *value, PyObject *on, bool is_new)
{
    if (cm_is_exporter(self->state, value)) {
        return cm_asbuffer_on(self->state, value, on);
    }
    bool is_read = cm_buffer_check(self->state, value) || cm_numpy_is_array(value);
    if (is_new && !is_read && cm_value_is_array(value)) {
        return cm_value_read_array(value);
    }
    return Py_NewRef(value);
}

/* Fill with an object that is neither a number nor an element. `given` and `casting`
 * may be None. Returns 0, or -1 with an exception. */
static int
fill_by_object(cm_buffer *self, PyObject *value, PyObject *given, PyObject *casting,
               bool is_new)
{
    cm_state *state = self->state;
    const cm_storage *storage = self->storage;
    int device = cm_kind_is_pageable(storage->kind) ? 0 : storage->device;
    const char *before = is_new ? "full: " : "fill: ";
    PyObject *source = NULL;
    PyObject *rule = NULL;
    int result = -1;
    if (cm_state_runtime(state) == NULL) {
        return -1;
    }
    PyObject *on =
        cm_arg_is_given(given) ? Py_NewRef(given) : cm_current_stream(state, device);
    if (on != NULL) {
        source = read_source(self, value, on, is_new);
    }
    if (source == NULL) {
        goto leave;
    }
    rule = cm_arg_is_given(casting) ? Py_NewRef(casting) : NULL;
    PyObject *dtype = dtype_of_memory(self, source);
    if (is_new && rule == NULL && dtype != NULL
        && !cm_numpy_dtype_equal(dtype, self->dtype)) {
        rule = PyUnicode_InternFromString("same_kind");
        if (rule == NULL) {
            goto leave;
        }
    }
    if (rule != NULL) {
        result = fill_by_rule(self, before, source, on, rule);
    }
    else if (cm_buffer_check(state, source)) {
        result = fill_by_buffer(self, before, source, on, given);
    }
    else {
        result = fill_by_values(self, before, source, on, given);
    }
leave:
    Py_XDECREF(rule);
    Py_XDECREF(source);
    Py_XDECREF(on);
    return result;
}

/* Fill with any value, as fill() does, or as full() does if the buffer is new. Returns
 * 0, or -1 with an exception. */
static int
fill_with(cm_buffer *self, PyObject *value, PyObject *stream, PyObject *casting,
          bool is_new)
{
    unsigned char element[CM_ELEMENT_NBYTES];
    const void *found = NULL;
    if (!cm_arg_is_given(casting)) {
        if (cm_value_write_number(value, self->dtype, element)) {
            found = element;
        }
        else if (is_element(self, value)) {
            found = cm_numpy_data(value);
        }
    }
    if (found == NULL) {
        return fill_by_object(self, value, stream, casting, is_new);
    }
    Py_INCREF(value); /* other threads may drop the value while the fill waits */
    int result = fill_by(self, found, stream);
    Py_DECREF(value);
    return result;
}

int
cm_buffer_fill_new(PyObject *object, PyObject *value, PyObject *stream,
                   PyObject *casting)
{
    return fill_with((cm_buffer *)(void *)object, value, stream, casting, true);
}

int
cm_buffer_zero(PyObject *object, PyObject *stream)
{
    static const unsigned char zeros[64]; /* longer than any number */
    cm_buffer *self = (cm_buffer *)(void *)object;
    if ((size_t)self->itemsize <= sizeof(zeros)) {
        return fill_by(self, zeros, stream);
    }
    void *element = PyMem_Calloc(1, (size_t)self->itemsize);
    if (element == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int result = fill_by(self, element, stream);
    PyMem_Free(element);
    return result;
}

PyObject *
cm_buffer_fill(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"value", "stream", "casting", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *values[3];
    if (cm_args_parse("fill", args, nargs, kwnames, names, 1, 1, values) < 0
        || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (self->readonly) {
        PyErr_SetString(PyExc_ValueError, "the buffer is read-only");
        return NULL;
    }
    if (fill_with(self, values[0], values[1], values[2], false) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}
