/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/batch_pairs.h"

#include "base/array.h"
#include "base/checked_math.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "transfer/plan/layout.h"

/* -- growing ------------------------------------------------------------------------------ */

/* False with MemoryError. */
static bool
reserve_one(void *array_pointer, size_t item_nbytes, uint32_t count, uint32_t *room)
{
    uint32_t reserved =
        cm_array_reserve(array_pointer, item_nbytes, NULL, count, *room);
    if (reserved == 0) {
        PyErr_NoMemory();
        return false;
    }
    *room = reserved;
    return true;
}

/* Once for all pairs that it is at an end of. */
static int
add_storage(cm_many_pairs *self, cm_storage *storage, bool written)
{
    if (storage->many_call != self->call) {
        if (!reserve_one(&self->storages, sizeof(*self->storages), self->storage_count,
                         &self->storage_room)) {
            return -1;
        }
        cm_storage_hold(storage);
        cm_storage_pin(storage);
        storage->many_call = self->call;
        storage->many_index = self->storage_count;
        self->storages[self->storage_count++] = (cm_many_storage){.storage = storage};
    }
    cm_many_storage *entry = &self->storages[storage->many_index];
    entry->written = entry->written || written;
    return 0;
}

static int
keep_end(cm_many_pairs *self, const cm_operand *end, bool written)
{
    if (end->locked != NULL && PyList_Append(self->kept, end->locked) < 0) {
        return -1;
    }
    if (end->storage != NULL) {
        return add_storage(self, end->storage, written);
    }
    return PyList_Append(self->kept, end->keep);
}

/* -- checks ------------------------------------------------------------------------------- */

static int
check_target(const cm_many_pairs *self, PyObject *object)
{
    if (!self->dst.readonly) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "the target (%R) is read-only",
                 (PyObject *)Py_TYPE(object));
    return -1;
}

static int
check_dtypes(const cm_many_pairs *self)
{
    int equal = cm_numpy_dtype_equal(self->dst.dtype, self->src.dtype);
    if (equal == 0) {
        PyErr_Format(PyExc_TypeError,
                     "source has dtype %S, target has dtype %S; convert first",
                     self->src.dtype, self->dst.dtype);
    }
    return equal > 0 ? 0 : -1;
}

/* -- a pair of buffers and arrays --------------------------------------------------------- */

static void
note_device(cm_many_pairs *self, const cm_region *region)
{
    if (region->kind == CM_KIND_PAGEABLE || region->device < 0
        || region->device >= CM_MAX_DEVICES) {
        return;
    }
    self->any_devices |= UINT64_C(1) << region->device;
    if (region->kind == CM_KIND_DEVICE) {
        self->devices |= UINT64_C(1) << region->device;
        self->first_device =
            self->first_device < 0 ? region->device : self->first_device;
    }
}

/* An array within one of our buffers is what the buffer is. */
static bool
place_in_storage(cm_region *region, const cm_storage *storage, uint64_t nbytes)
{
    uint64_t from = (uintptr_t)region->host - (uintptr_t)storage->host;
    if (storage->host == NULL || storage->residency == CM_KIND_DEVICE
        || from > storage->nbytes || nbytes > storage->nbytes - from) {
        return false;
    }
    region->kind = storage->residency;
    region->device = region->kind == CM_KIND_PAGEABLE ? -1 : storage->device;
    region->address = storage->address == 0 ? 0 : storage->address + from;
    return true;
}

/* As cm_operand_init() for the usual ends, but that nothing runs foreign code and the
 * driver is not asked. 1; 0: it is none of them; -1. */
static int
read_quickly(cm_many_pairs *self, cm_operand *end, PyObject *object, bool *asks)
{
    *asks = false;
    if (cm_buffer_check(self->state, object)) {
        const cm_buffer *buffer = (const cm_buffer *)(void *)object;
        if (cm_buffer_check_open(buffer) < 0) {
            return -1;
        }
        cm_buffer_region(buffer, &end->region);
        end->dtype = Py_NewRef(buffer->dtype);
        end->storage = buffer->storage;
        end->readonly = buffer->readonly;
    }
    else if (cm_numpy_is_array(object)) {
        if (cm_numpy_region(object, &end->region, &end->dtype, &end->readonly) < 0) {
            return -1;
        }
        PyObject *owner = cm_numpy_owner(object);
        if (owner != NULL && cm_buffer_check(self->state, owner)) {
            end->storage = ((cm_buffer *)(void *)owner)->storage; /* kept by the array
                                                                   */
        }
        Py_XDECREF(owner);
        *asks = true;
    }
    else {
        return 0;
    }
    end->keep = Py_NewRef(object);
    return 1;
}

static bool
is_run(const cm_region *region, int64_t *nbytes)
{
    return cm_region_is_c_contiguous(region)
           && cm_is_ok(cm_region_count(region, nbytes))
           && cm_mul_i64(*nbytes, region->itemsize, nbytes)
           && (*nbytes == 0 || region->host != NULL || region->address != 0);
}

static bool
have_one_shape(const cm_region *a, const cm_region *b)
{
    return a->ndim == b->ndim
           && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof(a->shape[0])) == 0;
}

static void
set_end(cm_piece_end *end, const cm_operand *operand)
{
    const cm_region *region = &operand->region;
    *end = (cm_piece_end){.host = region->host,
                          .address = region->address,
                          .owner = operand->storage,
                          .kind = region->kind,
                          .device = region->device};
}

static int
add_piece(cm_many_pairs *self, uint64_t index, int64_t nbytes)
{
    cm_piece *piece = &self->pieces[self->piece_count++];
    set_end(&piece->dst, &self->dst);
    set_end(&piece->src, &self->src);
    piece->nbytes = (uint64_t)nbytes;
    piece->index = index;
    note_device(self, &self->dst.region);
    note_device(self, &self->src.region);
    return keep_end(self, &self->dst, true) < 0 || keep_end(self, &self->src, false) < 0
               ? -1
               : 0;
}

/* Put the question off until all are read, unless a buffer of ours answers it. */
static void
settle_array(cm_many_pairs *self, cm_operand *end, bool asks, bool is_dst,
             int64_t nbytes)
{
    if (asks
        && !(end->storage != NULL
             && place_in_storage(&end->region, end->storage, (uint64_t)nbytes))) {
        self->questions[self->question_count++] =
            (cm_many_question){self->piece_count, is_dst};
    }
}

/* 1; 0: this pair is none of the usual ones; -1. */
static int
try_usual(cm_many_pairs *self, PyObject *dst, PyObject *src, uint64_t index)
{
    bool dst_asks, src_asks;
    int64_t nbytes, same;
    int read = read_quickly(self, &self->dst, dst, &dst_asks);
    if (read <= 0 || check_target(self, dst) < 0) {
        return read <= 0 ? read : -1;
    }
    read = read_quickly(self, &self->src, src, &src_asks);
    if (read <= 0 || check_dtypes(self) < 0) {
        return read <= 0 ? read : -1;
    }
    if (!have_one_shape(&self->dst.region, &self->src.region)
        || !is_run(&self->dst.region, &nbytes) || !is_run(&self->src.region, &same)) {
        return 0;
    }
    if (nbytes == 0) {
        return 1;
    }
    settle_array(self, &self->dst, dst_asks, true, nbytes);
    settle_array(self, &self->src, src_asks, false, nbytes);
    /* What was read of buffers holds while they are open, and a collection on the way
     * may have run Python code. From here on nothing does. */
    if ((!dst_asks && cm_storage_check_open(self->dst.storage) < 0)
        || (!src_asks && cm_storage_check_open(self->src.storage) < 0)) {
        return -1;
    }
    return add_piece(self, index, nbytes) < 0 ? -1 : 1;
}

/* -- any other pair ----------------------------------------------------------------------- */

static int
add_other(cm_many_pairs *self, const cm_region *src, uint64_t index)
{
    if (!reserve_one(&self->others, sizeof(*self->others), self->other_count,
                     &self->other_room)) {
        return -1;
    }
    cm_piece_regions *other = &self->others[self->other_count++];
    other->dst = self->dst.region;
    other->src = *src;
    other->index = index;
    note_device(self, &other->dst);
    note_device(self, src);
    return keep_end(self, &self->dst, true) < 0 || keep_end(self, &self->src, false) < 0
               ? -1
               : 0;
}

static void
shift(cm_region *region, int64_t nbytes)
{
    region->host = region->host == NULL ? NULL : (char *)region->host + nbytes;
    region->address = region->address == 0 ? 0 : region->address + (uint64_t)nbytes;
}

/* Shapes and strides that come to one run are one, whatever they look like. */
static int
add_any(cm_many_pairs *self, uint64_t index)
{
    cm_layout layout;
    cm_region src = self->src.region;
    if (!cm_is_ok(cm_region_broadcast(&self->dst.region, &src))) {
        return cm_refuse_shapes("", &self->dst.region, &self->src.region);
    }
    cm_status status = cm_layout_init(&self->dst.region, &src, &layout);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while reading a pair");
    }
    if (layout.run_nbytes == 0) {
        return 0;
    }
    if (layout.ndim > 0) {
        return add_other(self, &src, index);
    }
    shift(&self->dst.region, layout.dst_offset);
    shift(&self->src.region, layout.src_offset);
    return add_piece(self, index, (int64_t)layout.run_nbytes);
}

/* Foreign code may run: what was read of either end before it is read again. */
static int
read_any(cm_many_pairs *self, PyObject *dst, PyObject *src, uint64_t index)
{
    if (cm_operand_init(self->state, &self->dst, dst, NULL, self->stream) < 0) {
        return -1;
    }
    int result = check_target(self, dst);
    if (result == 0) {
        result = cm_operand_init(self->state, &self->src, src, self->dst.dtype,
                                 self->stream);
        if (result == 0) {
            result = check_dtypes(self) < 0 ? -1 : add_any(self, index);
            cm_operand_fini(&self->src);
        }
    }
    cm_operand_fini(&self->dst);
    return result;
}

static void
forget_quick_end(cm_operand *end)
{
    end->storage = NULL;
    Py_CLEAR(end->dtype);
    Py_CLEAR(end->keep);
}

static int
read_pair(cm_many_pairs *self, PyObject *pair, uint64_t index)
{
    bool is_tuple = PyTuple_Check(pair);
    Py_ssize_t count = is_tuple             ? PyTuple_Size(pair)
                       : PyList_Check(pair) ? PyList_Size(pair)
                                            : -1;
    if (count != 2) {
        PyErr_Format(PyExc_TypeError,
                     "expected a tuple (dst, src), not %R of length %zd",
                     (PyObject *)Py_TYPE(pair), count);
        return -1;
    }
    PyObject *dst =
        Py_NewRef(is_tuple ? PyTuple_GetItem(pair, 0) : PyList_GetItem(pair, 0));
    PyObject *src =
        Py_NewRef(is_tuple ? PyTuple_GetItem(pair, 1) : PyList_GetItem(pair, 1));
    int result = try_usual(self, dst, src, index);
    forget_quick_end(&self->dst);
    forget_quick_end(&self->src);
    if (result == 0) {
        result = read_any(self, dst, src, index);
    }
    Py_DECREF(dst);
    Py_DECREF(src);
    return result < 0 ? -1 : 0;
}

/* -- all ---------------------------------------------------------------------------------- */

/* Which pair it was: in the message where that is ours, else as a note. */
static void
name_pair(uint64_t index)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (type == PyExc_TypeError || type == PyExc_ValueError) {
        PyErr_Format(type, "copy_many: pair %llu: %S", (unsigned long long)index,
                     value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    PyObject *note =
        PyUnicode_FromFormat("in pair %llu of copy_many", (unsigned long long)index);
    PyObject *done =
        note == NULL ? NULL : PyObject_CallMethod(value, "add_note", "O", note);
    Py_XDECREF(done);
    Py_XDECREF(note);
    PyErr_Clear(); /* the failure itself is what matters */
    PyErr_Restore(type, value, traceback);
}

int
cm_many_pairs_read(cm_many_pairs *self, PyObject *iterable)
{
    self->call = ++self->state->many_count;
    self->first_device = -1;
    self->pairs = PySequence_Tuple(iterable);
    self->kept = PyList_New(0);
    if (self->pairs == NULL || self->kept == NULL) {
        return -1;
    }
    uint64_t count = (uint64_t)PyTuple_Size(self->pairs);
    self->pieces = PyMem_Malloc((size_t)(count + 1) * sizeof(*self->pieces));
    self->questions = PyMem_Malloc((size_t)(count + 1) * 2 * sizeof(*self->questions));
    if (self->pieces == NULL || self->questions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (read_pair(self, PyTuple_GetItem(self->pairs, (Py_ssize_t)i), i) < 0) {
            name_pair(i);
            return -1;
        }
    }
    uint64_t failed = UINT64_MAX;
    if (self->question_count > 0 && cm_many_pairs_ask(self, &failed) < 0) {
        if (failed != UINT64_MAX) {
            name_pair(failed);
        }
        return -1;
    }
    return 0;
}

void
cm_many_pairs_fini(cm_many_pairs *self)
{
    for (uint32_t i = 0; i < self->storage_count; i++) {
        cm_storage_unpin(self->storages[i].storage);
        cm_storage_release(self->storages[i].storage, true);
    }
    PyMem_Free(self->pieces);
    free(self->others);
    free(self->storages);
    PyMem_Free(self->questions);
    Py_XDECREF(self->pairs);
    Py_XDECREF(self->kept);
}
