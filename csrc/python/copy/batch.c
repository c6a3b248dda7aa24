/* SPDX-License-Identifier: Apache-2.0 */
/* Has the functions copy_many() and copy_many_async(). Each of them first reads all
 * pairs into one request of the engine, and then gives the request to the engine. The
 * ends of a pair may be anything that copy() takes. Reading has to be fast, since there
 * may be many thousands of pairs, and nothing is copied before all of them are read.
 *
 * Usually both ends of a pair are buffers or arrays, both have the same shape, and each
 * is a single run of bytes. try_usual() reads such a pair without running foreign code
 * and without asking the driver. The pair becomes a piece of the request: one run of
 * bytes to copy. If the driver has to be asked about arrays, it is asked about all of
 * them at the end. Any other pair is read in the way in which copy() reads its ends.
 *
 * If there are many pairs of one size, and one device reaches the ends of all of them,
 * the pairs can be described as rows of two arrays (rows/pairs.h). Then try_rows() lets
 * the kernel of copy_rows() copy the pairs by the numbers of these rows, and the engine
 * makes no batch. */
#include <stdlib.h>

#include "base/nvtx.h"
#include "docstrings.h"
#include "python/copy/copy_functions.h"
#include "python/copy/many.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"
#include "transfer/batch/batch.h"
#include "transfer/plan/layout.h"
#include "transfer/routes/kernel_rows.h"
#include "transfer/rows/pairs.h"

/* The state of one call. The struct must not be moved. */
typedef struct many_call {
    cm_many_call many;
    cm_state *state;  /* borrowed */
    PyObject *pairs;  /* owned tuple */
    cm_piece *pieces; /* owned array: the pairs that are one run of bytes */
    uint64_t piece_count;
    cm_piece_regions *others; /* owned array: all other pairs */
    uint32_t other_count;
    uint32_t other_room;
    bool asks; /* the driver must be asked what kind of memory some arrays lie in */
    PyObject *casting; /* borrowed; NULL or None if dtypes must be equal */
    /* Owned; the dtypes of the last pair whose conversion was found out. They are NULL
     * if may_convert is not set. */
    PyObject *dtypes[2];
    bool may_convert;        /* the caller gave casting=, so pairs may be converted */
    cm_convert last_convert; /* the conversion between the two `dtypes` */
    cm_convert convert;      /* the conversion of the pair that is being read */
    cm_operand dst;          /* the ends of the pair being read */
    cm_operand src;
} many_call;

/* -- a pair of buffers and arrays --------------------------------------------------------- */

/* If an array lies in one of our buffers, copy from the buffer to the array's region
 * what the buffer knows: the kind of memory, the device and the device address. */
static void
place_array(cm_operand *end, uint64_t nbytes)
{
    cm_region *region = &end->region;
    const cm_storage *storage = end->storage;
    if (storage == NULL || !cm_kind_is_pageable(region->kind)
        || cm_kind_is_on_device(storage->copy_kind) || storage->host == NULL) {
        return;
    }
    uint64_t from = (uintptr_t)region->host - (uintptr_t)storage->host;
    if (from <= storage->nbytes && nbytes <= storage->nbytes - from) {
        region->kind = storage->copy_kind;
        region->device = cm_kind_is_pageable(region->kind) ? -1 : storage->device;
        region->address = storage->address == 0 ? 0 : storage->address + from;
    }
}

/* True if the end has no elements, or if it is a single run of bytes and its address is
 * known. */
static bool
is_run_or_empty(const cm_operand *end)
{
    const cm_region *region = &end->region;
    bool is_run = end->run_nbytes > 0 && (region->host != NULL || region->address != 0);
    return is_run || cm_region_is_empty(region);
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
                          .device = (int16_t)region->device,
                          .is_file = region->is_file};
}

/* True if the driver must be asked what kind of memory the end lies in. */
static bool
is_unknown(const cm_piece_end *end)
{
    const cm_storage *storage = end->owner;
    return cm_kind_is_pageable(end->kind)
           && (storage == NULL || !cm_kind_is_pageable(storage->copy_kind));
}

/* Add both ends of the pair that is being read to the call. `src` is the region of the
 * source after it was broadcast to the shape of the target. Returns 0, or -1 with an
 * exception. */
static int
add_ends(many_call *self, const cm_region *src)
{
    if (cm_many_call_add_end(&self->many, &self->dst, &self->dst.region, true) < 0) {
        return -1;
    }
    return cm_many_call_add_end(&self->many, &self->src, src, false);
}

static int
add_piece(many_call *self, uint64_t index, uint64_t nbytes)
{
    cm_piece *piece = &self->pieces[self->piece_count++];
    set_end(&piece->dst, &self->dst);
    set_end(&piece->src, &self->src);
    self->asks = self->asks || is_unknown(&piece->dst) || is_unknown(&piece->src);
    piece->nbytes = nbytes;
    piece->index = index;
    return add_ends(self, &self->src.region);
}

static bool
is_usual(const many_call *self, PyObject *object)
{
    return cm_buffer_check(self->state, object) || cm_numpy_is_array(object);
}

/* Set self->convert to the conversion of the pair that is being read. If the caller did
 * not give casting=, no elements are converted, and self->convert says so from the
 * start. If the caller gave it, most pairs have the same dtypes as the pair before, and
 * the conversion of the earlier pair is used again. Returns 0, or -1 with an
 * exception. */
static int
check_casting(many_call *self)
{
    if (!self->may_convert) {
        bool is_same = self->dst.dtype == self->src.dtype; /* the usual case */
        return is_same ? 0 : cm_check_dtypes("", &self->dst, &self->src);
    }
    cm_casting how = {.casting = self->casting};
    PyObject *dtypes[2] = {self->dst.dtype, self->src.dtype};
    if (self->dtypes[0] == dtypes[0] && self->dtypes[1] == dtypes[1]) {
        self->convert = self->last_convert;
        return 0;
    }
    if (cm_check_casting(&self->many.call, "", &self->dst, &self->src, how,
                         &self->convert)
        < 0) {
        return -1;
    }
    self->last_convert = self->convert;
    for (int i = 0; i < 2; i++) {
        Py_INCREF(dtypes[i]);
        cm_replace(&self->dtypes[i], dtypes[i]);
    }
    return 0;
}

static int
read_ends(many_call *self, PyObject *dst, PyObject *src, cm_asking asking)
{
    cm_state *state = self->state;
    if (cm_operand_init(state, &self->dst, dst, NULL, self->many.stream, asking) < 0) {
        return -1;
    }
    if (cm_check_target("", &self->dst, dst) < 0) {
        return -1;
    }
    PyObject *dtype = self->dst.dtype;
    if (cm_operand_init(state, &self->src, src, dtype, self->many.stream, asking) < 0
        || cm_operands_lock(state, &self->dst, &self->src) < 0) {
        return -1;
    }
    return check_casting(self);
}

static void
forget_ends(many_call *self)
{
    cm_operand_fini(&self->src);
    cm_operand_fini(&self->dst);
}

/* Read the pair if it is a usual one, as the top of this file describes it, without
 * running foreign code and without asking the driver. Returns 1 if the pair was read, 0
 * if it is not a usual one, or -1 with an exception. */
static int
try_usual(many_call *self, PyObject *dst, PyObject *src, uint64_t index)
{
    if (!is_usual(self, dst) || !is_usual(self, src)) {
        return 0;
    }
    if (read_ends(self, dst, src, CM_ASK_LATER) < 0) {
        return -1;
    }
    if ((self->may_convert && cm_convert_is_on(&self->convert))
        || !have_one_shape(&self->dst.region, &self->src.region)
        || !is_run_or_empty(&self->dst) || !is_run_or_empty(&self->src)) {
        return 0;
    }
    uint64_t nbytes = self->dst.run_nbytes;
    if (nbytes == 0) {
        return 1;
    }
    place_array(&self->dst, nbytes);
    place_array(&self->src, nbytes);
    return add_piece(self, index, nbytes) < 0 ? -1 : 1;
}

/* -- any other pair ----------------------------------------------------------------------- */

static int
add_other(many_call *self, const cm_region *src, uint64_t index)
{
    if (cm_reserve(&self->others, sizeof(*self->others), NULL, 0, self->other_count,
                   &self->other_room)
        < 0) {
        return -1;
    }
    cm_piece_regions *other = &self->others[self->other_count++];
    other->dst = self->dst.region;
    other->src = *src;
    other->convert = self->convert;
    other->index = index;
    return add_ends(self, src);
}

static void
shift(cm_region *region, int64_t nbytes)
{
    region->host = region->host == NULL ? NULL : (char *)region->host + nbytes;
    region->address = region->address == 0 ? 0 : region->address + (uint64_t)nbytes;
}

/* Add the pair that was read. If the elements of both ends lie in a single run, the
 * pair becomes a piece, even if the shapes and strides differ. Returns 0, or -1 with an
 * exception. */
static int
add_any(many_call *self, uint64_t index)
{
    cm_layout layout;
    cm_region src;
    if (cm_check_shapes("", &self->dst, &self->src, &src) < 0) {
        return -1;
    }
    if (self->may_convert && cm_convert_is_on(&self->convert)) {
        int64_t count = 0;
        bool is_counted = cm_is_ok(cm_region_count(&self->dst.region, &count));
        return is_counted && count == 0 ? 0 : add_other(self, &src, index);
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
    shift(&self->dst.region, layout.offset[CM_DST]);
    shift(&self->src.region, layout.offset[CM_SRC]);
    return add_piece(self, index, layout.run_nbytes);
}

/* Read a pair, which must be a tuple or a list of two. A pair that try_usual() does not
 * take is read as copy() reads its ends. Returns 0, or -1 with an exception. */
static int
read_pair(many_call *self, PyObject *pair, uint64_t index)
{
    bool is_tuple = PyTuple_Check(pair);
    PyObject *type = (PyObject *)Py_TYPE(pair);
    Py_ssize_t count = -1;
    if (is_tuple) {
        count = PyTuple_Size(pair);
    }
    else if (PyList_Check(pair)) {
        count = PyList_Size(pair);
    }
    if (count < 0) {
        PyErr_Format(PyExc_TypeError, "expected a tuple (dst, src), not %R", type);
        return -1;
    }
    if (count != 2) {
        PyErr_Format(PyExc_TypeError,
                     "expected a tuple (dst, src), not %R of length %zd", type, count);
        return -1;
    }
    PyObject *dst =
        Py_NewRef(is_tuple ? PyTuple_GetItem(pair, 0) : PyList_GetItem(pair, 0));
    PyObject *src =
        Py_NewRef(is_tuple ? PyTuple_GetItem(pair, 1) : PyList_GetItem(pair, 1));
    int result = try_usual(self, dst, src, index);
    forget_ends(self);
    if (result == 0) {
        result = read_ends(self, dst, src, CM_ASK) < 0 ? -1 : add_any(self, index);
        forget_ends(self);
    }
    Py_DECREF(dst);
    Py_DECREF(src);
    return result < 0 ? -1 : 0;
}

/* -- asking the driver what kind of memory all arrays have -------------------------------- */

/* Ask what kind of memory the first and the last byte of an end lie in, and set the
 * kind of the end accordingly. If one of the two bytes lies in device memory, the end
 * gets the kind DEVICE, which means here that the host may not touch the memory. */
static cm_status
ask_registry(cm_registry *registry, cm_page_shares *locked, cm_piece_end *end,
             uint64_t nbytes)
{
    cm_pointer_info first, last;
    if (!is_unknown(end)) {
        return cm_ok();
    }
    CM_TRY(cm_registry_probe(registry, (uintptr_t)end->host, nbytes, locked, &first,
                             &last));
    if (cm_kind_is_on_device(first.kind) || cm_kind_is_on_device(last.kind)) {
        end->kind = CM_KIND_DEVICE;
    }
    else if (first.kind == last.kind && first.device == last.device
             && !cm_kind_is_pageable(first.kind)) {
        end->kind = first.kind;
        end->device = (int16_t)first.device;
        end->address = first.device_address;
    }
    return cm_ok();
}

static cm_status
ask_all(many_call *self, cm_registry *registry, cm_page_shares *locked)
{
    for (uint64_t i = 0; i < self->piece_count; i++) {
        cm_piece *piece = &self->pieces[i];
        CM_TRY(ask_registry(registry, locked, &piece->dst, piece->nbytes));
        CM_TRY(ask_registry(registry, locked, &piece->src, piece->nbytes));
    }
    return cm_ok();
}

/* Take over the shares in `locked`, which keep memory page-locked (registry.h). `self`
 * keeps them until the engine has taken shares of the same memory. Returns 0, or -1
 * with an exception. */
static int
keep_locked(many_call *self, cm_registry *registry, cm_page_shares *locked)
{
    PyObject *pages = cm_locked_pages_new(self->state, registry, locked);
    int result = pages == NULL ? -1 : PyList_Append(self->many.owners, pages);
    Py_XDECREF(pages);
    return result;
}

/* Let the Python package put the index of the wrong pair into the text of the
 * exception. */
static void
name_pair(uint64_t index)
{
    cm_kept_error error = cm_error_keep();
    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    PyObject *named =
        cm_package_call("buffers.texts", "name_pair",
                        Py_BuildValue("(OK)", error.value, (unsigned long long)index));
    PyErr_Clear(); /* if that failed too, only the first exception is raised */
    cm_error_restore(error);
    if (named != NULL && named != error.value) {
        PyErr_SetObject((PyObject *)Py_TYPE(named), named); /* replaces the first one */
    }
    Py_XDECREF(named);
}

/* Use the answer of ask_registry(): refuse an array over device memory, and note the
 * device of page-locked memory. Returns 0, or -1 with ValueError. */
static int
take_answer(many_call *self, const cm_piece *piece, const cm_piece_end *end)
{
    if (end->host != NULL && cm_kind_is_on_device(end->kind)) {
        PyErr_SetString(PyExc_ValueError, "array: the address is device memory, which "
                                          "the host may not touch");
        name_pair(piece->index);
        return -1;
    }
    if (!cm_kind_is_pageable(end->kind) && end->device >= 0) {
        self->many.any_devices |= UINT64_C(1) << end->device;
    }
    return 0;
}

/* Ask the driver about all arrays at once, as the last step of the reading. Returns 0,
 * or -1 with an exception. */
static int
ask_about_arrays(many_call *self)
{
    cm_runtime *rt = cm_state_runtime(self->state);
    if (rt == NULL) {
        return -1;
    }
    bool may_be_locked;
    cm_status status = cm_host_may_be_locked(rt, &may_be_locked);
    if (cm_is_ok(status) && !may_be_locked) {
        return 0; /* no context exists, so all arrays lie in ordinary memory, and asking
                     would only make a context */
    }
    int device = cm_state_device(self->state);
    cm_registry *registry = self->state->registry;
    cm_page_shares locked = {.count = 0};
    if (cm_is_ok(status)) {
        status = CM_WITHOUT_GIL(
            CM_ON_ANY_DEVICE(rt, device, ask_all(self, registry, &locked)));
    }
    if (locked.count > 0 && keep_locked(self, registry, &locked) < 0) {
        return -1;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while asking about arrays");
    }
    for (uint64_t i = 0; i < self->piece_count; i++) {
        const cm_piece *piece = &self->pieces[i];
        if (take_answer(self, piece, &piece->dst) < 0
            || take_answer(self, piece, &piece->src) < 0) {
            return -1;
        }
    }
    return 0;
}

/* -- all ---------------------------------------------------------------------------------- */

/* Read all pairs. Returns 0, or -1 with an exception. If a pair was wrong, the
 * exception names its index. */
static int
read_pairs(many_call *self, PyObject *iterable)
{
    self->convert = (cm_convert){.from = CM_NUMBER_NONE};
    self->pairs = PySequence_Tuple(iterable);
    if (self->pairs == NULL) {
        return -1;
    }
    uint64_t count = (uint64_t)PyTuple_Size(self->pairs);
    self->pieces = PyMem_Malloc((size_t)(count + 1) * sizeof(*self->pieces));
    if (self->pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (read_pair(self, PyTuple_GetItem(self->pairs, (Py_ssize_t)i), i) < 0) {
            name_pair(i);
            return -1;
        }
    }
    return self->asks ? ask_about_arrays(self) : 0;
}

/* -- pairs of one size, for a kernel ------------------------------------------------------ */

enum {
    /* If there are fewer pairs, a batch is faster: the host lists the pairs in a table
     * in less time than the kernel needs to read their row numbers over the bus. */
    FEWEST_PAIRS = 64,
    /* If there are at least this many pairs, the GIL is released while their row
     * numbers are written and compared. */
    MANY_PAIRS = 4096,
};

/* The pairs of a call, described as rows of two arrays, and the numbers of these rows.
 * The struct must not be moved. */
typedef struct paired_call {
    cm_paired_rows rows;
    cm_kernel_numbers numbers[2]; /* by cm_side */
    cm_address addresses[2];      /* where the device finds the numbers */
} paired_call;

/* Allocate one buffer, called the sheet, for the row numbers of both sides. Returns a
 * new reference, or NULL with an exception. */
static PyObject *
allocate_numbers(const many_call *self, paired_call *paired)
{
    cm_region region;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        paired->numbers[side] =
            (cm_kernel_numbers){.count = self->piece_count,
                                .nbytes = cm_kernel_numbers_nbytes(
                                    cm_paired_rows_count(&paired->rows, side))};
    }
    return cm_many_allocate_sheet(self->state, paired->rows.device, paired->numbers,
                                  paired->addresses, &region);
}

/* Write the row numbers to the sheet, and set *suits to whether the kernel should copy
 * the rows. The kernel should not if a target touches another end, or if the copy
 * engine of the device is as fast. The caller need not hold the GIL. */
static cm_status
write_numbers(many_call *self, paired_call *paired, bool *suits)
{
    bool touches = false;
    bool is_known = false;
    const cm_paired_rows *rows = &paired->rows;
    cm_many_request *request = &self->many.request;
    cm_paired_rows_write(rows, self->pieces, CM_DST, &paired->numbers[CM_DST]);
    cm_paired_rows_write(rows, self->pieces, CM_SRC, &paired->numbers[CM_SRC]);
    CM_TRY(cm_paired_rows_find_touch(rows, paired->numbers, &touches, &is_known));
    if (!is_known) {
        CM_TRY(cm_many_find_conflicts(self->state->runtime, request, &touches));
    }
    request->is_apart = !touches;
    *suits =
        !touches
        && !cm_rows_suit_engine(&rows->layer, 1, self->piece_count, paired->numbers);
    return cm_ok();
}

/* Change the request so that it asks for a copy of rows by the numbers in `sheet`.
 * Returns 0, or -1 with an exception. */
static int
set_rows(many_call *self, const paired_call *paired, PyObject *sheet)
{
    cm_operand memory;
    cm_copy_request *common = &self->many.request.common;
    cm_kernel_rows *rows = cm_kernel_rows_create();
    common->rows = rows;
    if (rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    rows->device = paired->rows.device;
    rows->move.count = self->piece_count;
    rows->move.is_over_bus = paired->rows.is_over_bus;
    rows->move.is_to_host = paired->rows.is_to_host;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        const cm_kernel_numbers *numbers = &paired->numbers[side];
        rows->move.numbers[side] = (cm_row_numbers){.address = paired->addresses[side],
                                                    .stride = (int64_t)numbers->nbytes,
                                                    .nbytes = numbers->nbytes,
                                                    .is_signed = true};
    }
    common->dst = paired->rows.layer.array[CM_DST];
    common->src = paired->rows.layer.array[CM_SRC];
    cm_status status = cm_kernel_rows_add(rows, &paired->rows.layer);
    if (cm_py_check(self->state, status, "while reading pairs") < 0
        || cm_operand_init(self->state, &memory, sheet, NULL, self->many.stream, CM_ASK)
               < 0) {
        return -1;
    }
    rows->sheet = memory.region.address;
    rows->sheet_nbytes = (uint64_t)memory.region.shape[0];
    int result = cm_many_call_add_end(&self->many, &memory, &memory.region, false);
    cm_operand_fini(&memory);
    return result;
}

/* If the pairs can be described as rows, and a kernel copies them faster than a batch
 * does, change the request so that the kernel copies them. Otherwise the request stays
 * as it is. Returns 0, or -1 with an exception. */
static int
try_rows(many_call *self)
{
    paired_call paired;
    bool suits = false;
    bool is_long = self->piece_count >= MANY_PAIRS;
    /* If the driver was asked about arrays, some of them may lie in registered memory,
     * which must stay registered until the copy is over. A batch sees to that, but a
     * copy by the kernel does not. */
    bool may_end = self->asks && cm_registry_has_pieces(self->state->registry);
    if (self->piece_count < FEWEST_PAIRS || self->other_count > 0 || may_end
        || !cm_paired_rows_init(&paired.rows, self->pieces, self->piece_count)
        || cm_rows_suit_engine(&paired.rows.layer, 1, self->piece_count, NULL)) {
        return 0;
    }
    cm_engine *engine = cm_call_engine(self->state, self->many.any_devices);
    if (engine == NULL) {
        return -1;
    }
    int device = paired.rows.device;
    if (!cm_kernel_rows_are_loaded(engine, device)
        && !CM_WITHOUT_GIL(cm_kernel_rows_can_load(engine, device))) {
        return 0;
    }
    PyObject *sheet = allocate_numbers(self, &paired);
    if (sheet == NULL) {
        return -1;
    }
    cm_status status = is_long ? CM_WITHOUT_GIL(write_numbers(self, &paired, &suits))
                               : write_numbers(self, &paired, &suits);
    int result = cm_py_check(self->state, status, "while comparing pairs");
    if (result == 0 && suits) {
        result = set_rows(self, &paired, sheet);
    }
    Py_DECREF(sheet);
    return result;
}

/* -- the call ----------------------------------------------------------------------------- */

static int
init_call(many_call *self, PyObject *iterable)
{
    if (cm_state_runtime(self->state) == NULL || read_pairs(self, iterable) < 0) {
        return -1;
    }
    cm_many_request *request = &self->many.request;
    request->pieces = self->pieces;
    request->piece_count = self->piece_count;
    request->others = self->others;
    request->other_count = self->other_count;
    if (try_rows(self) < 0) {
        return -1;
    }
    return cm_many_call_take_ends(&self->many, "copy_many");
}

static void
fini_call(many_call *self)
{
    cm_many_call_fini(&self->many);
    PyMem_Free(self->pieces);
    free(self->others);
    Py_XDECREF(self->pairs);
    Py_XDECREF(self->dtypes[0]);
    Py_XDECREF(self->dtypes[1]);
}

/* Give the request to the engine. Returns a new reference to None or to a Transfer, or
 * NULL with an exception. */
static PyObject *
run(many_call *self)
{
    cm_ticket *ticket;
    CM_NVTX("copy_many", 0);
    if (cm_many_call_run(&self->many, "while copying many pairs", &ticket) < 0) {
        return NULL;
    }
    return cm_many_call_answer(&self->many, ticket, self->pairs, self->pairs);
}

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    static const char *const names[] = {"pairs", "stream", "casting", "progress", NULL};
    static const char *const async_names[] = {"pairs", "stream", "casting", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4] = {NULL, NULL, NULL, NULL};
    if (cm_args_parse(function, args, nargs, kwnames, blocking ? names : async_names, 1,
                      1, values)
        < 0) {
        return NULL;
    }
    many_call *self = PyMem_Calloc(1, sizeof(*self));
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    cm_call_frame frame;
    PyObject *result = NULL;
    if (cm_call_enter(&frame, state, values[1],
                      cm_device_hint(state, values[0], values[1], 2), values[3], "copy")
        == 0) {
        self->state = state;
        self->casting = values[2];
        self->may_convert = cm_arg_is_given(values[2]);
        if (cm_many_call_init(&self->many, state, blocking, frame.stream,
                              &frame.progress)
                == 0
            && init_call(self, values[0]) == 0) {
            result = run(self);
        }
        fini_call(self);
    }
    PyMem_Free(self);
    return cm_call_leave(&frame, result);
}

static PyObject *
copy_many_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    return copy_with(module, "copy_many", args, nargs, kwnames, true);
}

static PyObject *
copy_many_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    return copy_with(module, "copy_many_async", args, nargs, kwnames, false);
}

PyMethodDef cm_copy_many_methods[] = {
    {"copy_many", CM_METHOD(copy_many_function), CM_KEYWORDS, CM_DOC_copy_many},
    {"copy_many_async", CM_METHOD(copy_many_async_function), CM_KEYWORDS,
     CM_DOC_copy_many_async},
    {NULL, NULL, 0, NULL},
};
