/* SPDX-License-Identifier: Apache-2.0 */
/* copy_rows(), copy_rows_async() and take_rows(): rows of arrays by their numbers.
 *
 * The idea
 * --------
 * A call reads both ends once, each an array or a list of arrays (layers), and the
 * numbers of the rows. A pass is one batch of the engine (many.h): from the ends and
 * the numbers it makes runs of bytes, joined where rows follow on each other, and has
 * them copied together. Nearly all calls are one pass.
 *
 * If the rows that are written touch rows that are read, the result has to be as if all
 * of the source were read first, as in NumPy's dst[d] = src[s]. Then there are two
 * passes: from the source into packed memory of the rows' size, and from there to the
 * target. The second comes after the first, and fails with it. Whether ends touch is
 * asked of whole arrays first. Only where arrays meet, as two views of one cache may,
 * are the runs compared.
 *
 * All that can be wrong with the arguments is found before the first pass begins.
 * Locks: none; the GIL is held, and released to cut the runs and to copy. */
#include <stdlib.h>

#include "base/nvtx.h"
#include "docstrings.h"
#include "python/copy/copy_functions.h"
#include "python/copy/many.h"
#include "python/copy/rows_chosen.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/pool/allocate.h"
#include "transfer/rows/layers.h"

/* One end: the arrays of all layers. */
typedef struct rows_end {
    const char *name;         /* of the argument, for errors */
    const char *numbers_name; /* of the argument with the numbers */
    PyObject *object;         /* borrowed: the argument */
    PyObject *arrays;         /* owned tuple; one item if the argument is an array */
    bool is_list;
    cm_operand *operands; /* owned array */
    Py_ssize_t read_count;
    cm_chosen_rows numbers;
} rows_end;

/* One call, which is not moved. */
typedef struct row_copy {
    cm_state *state; /* borrowed */
    const char *function;
    bool blocking;
    cm_stream *stream;           /* borrowed; may be NULL */
    const cm_progress *progress; /* borrowed; NULL if there is none */
    PyObject *after;             /* borrowed; NULL or None if there is none */
    rows_end ends[2];            /* by cm_side */
    Py_ssize_t layer_count;
    /* Owned list of packed memory, and its description, where ends touch. */
    PyObject *packed;
    rows_end between;
} row_copy;

/* -- ends --------------------------------------------------------------------------- */

/* Begin an end: an array, or a list or tuple of arrays. */
static int
begin_end(rows_end *end, PyObject *object)
{
    end->object = object;
    end->is_list = PyList_Check(object) || PyTuple_Check(object);
    end->arrays = end->is_list ? PySequence_Tuple(object) : PyTuple_Pack(1, object);
    if (end->arrays == NULL) {
        return -1;
    }
    size_t count = (size_t)PyTuple_Size(end->arrays);
    end->operands = PyMem_Calloc(count + 1, sizeof(*end->operands));
    if (end->operands == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void
fini_end(rows_end *end)
{
    for (Py_ssize_t i = 0; i < end->read_count; i++) {
        cm_operand_fini(&end->operands[i]);
    }
    PyMem_Free(end->operands);
    Py_XDECREF(end->arrays);
    cm_chosen_rows_fini(&end->numbers);
}

enum { PLACE_NBYTES = 96 };

/* Write "copy_rows: " or "copy_rows: layer 3: ", which begins messages. */
static const char *
place_of(const row_copy *self, Py_ssize_t layer, char text[PLACE_NBYTES])
{
    if (self->ends[CM_DST].is_list || self->ends[CM_SRC].is_list) {
        (void)PyOS_snprintf(text, PLACE_NBYTES, "%s: layer %zd: ", self->function,
                            layer);
    }
    else {
        (void)PyOS_snprintf(text, PLACE_NBYTES, "%s: ", self->function);
    }
    return text;
}

/* Read the array of a layer, and check what can be said about it alone. */
static int
read_array(row_copy *self, cm_side side, Py_ssize_t layer)
{
    char place[PLACE_NBYTES];
    rows_end *end = &self->ends[side];
    PyObject *array = PyTuple_GetItem(end->arrays, layer);
    cm_operand *operand = &end->operands[layer];
    (void)place_of(self, layer, place);
    if (!cm_operand_is_memory(self->state, array)) {
        PyErr_Format(PyExc_TypeError,
                     "%s%s must be a buffer, an array or a list of them, not %R", place,
                     end->name, (PyObject *)Py_TYPE(array));
        return -1;
    }
    if (cm_operand_init(self->state, operand, array, NULL, self->stream, CM_ASK) < 0) {
        return -1;
    }
    end->read_count++;
    if (side == CM_DST && cm_check_target(place, operand, array) < 0) {
        return -1;
    }
    if (operand->region.ndim == 0) {
        PyErr_Format(PyExc_ValueError, "%s%s has no rows: its shape is ()", place,
                     end->name);
        return -1;
    }
    return 0;
}

static int
read_end(row_copy *self, cm_side side)
{
    Py_ssize_t count = PyTuple_Size(self->ends[side].arrays);
    for (Py_ssize_t layer = 0; layer < count; layer++) {
        if (read_array(self, side, layer) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Check that two arrays have rows of one dtype and one shape. */
static int
check_rows(const row_copy *self, Py_ssize_t layer)
{
    char place[PLACE_NBYTES];
    const cm_operand *dst = &self->ends[CM_DST].operands[layer];
    const cm_operand *src = &self->ends[CM_SRC].operands[layer];
    const cm_region *to = &dst->region;
    const cm_region *from = &src->region;
    (void)place_of(self, layer, place);
    if (dst->dtype != src->dtype && !cm_numpy_dtype_equal(dst->dtype, src->dtype)) {
        PyErr_Format(PyExc_ValueError,
                     "%sthe rows of %s are of dtype %S and those of %s of %S: they "
                     "must be equal",
                     place, self->ends[CM_DST].name, dst->dtype,
                     self->ends[CM_SRC].name, src->dtype);
        return -1;
    }
    if (to->ndim == from->ndim
        && memcmp(to->shape + 1, from->shape + 1,
                  (size_t)(to->ndim - 1) * sizeof(to->shape[0]))
               == 0) {
        return 0;
    }
    PyObject *wanted = cm_tuple_from(to->shape + 1, to->ndim - 1);
    PyObject *given = cm_tuple_from(from->shape + 1, from->ndim - 1);
    if (wanted != NULL && given != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%sthe rows of %s have shape %S and those of %s %S: they must be "
                     "equal",
                     place, self->ends[CM_DST].name, wanted, self->ends[CM_SRC].name,
                     given);
    }
    Py_XDECREF(wanted);
    Py_XDECREF(given);
    return -1;
}

/* Check that both ends have as many layers. */
static int
check_layers(row_copy *self)
{
    const rows_end *dst = &self->ends[CM_DST];
    const rows_end *src = &self->ends[CM_SRC];
    Py_ssize_t count = PyTuple_Size(dst->arrays);
    if (dst->is_list != src->is_list) {
        PyErr_Format(PyExc_TypeError,
                     "%s: %s is a list and %s is one array: pass two arrays, or two "
                     "lists of equal length",
                     self->function, dst->is_list ? dst->name : src->name,
                     dst->is_list ? src->name : dst->name);
        return -1;
    }
    if (PyTuple_Size(src->arrays) != count) {
        PyErr_Format(PyExc_ValueError,
                     "%s: dst has %zd arrays and src has %zd: pass as many of each",
                     self->function, count, PyTuple_Size(src->arrays));
        return -1;
    }
    self->layer_count = count;
    for (Py_ssize_t layer = 0; layer < count; layer++) {
        if (check_rows(self, layer) < 0) {
            return -1;
        }
    }
    return 0;
}

/* -- the numbers of the rows -------------------------------------------------------- */

/* Read the arguments dst_rows and src_rows, of which one at most is None. */
static int
read_numbers(row_copy *self, PyObject *const given[2])
{
    rows_end *ends = self->ends;
    cm_chosen_rows *dst = &ends[CM_DST].numbers;
    cm_chosen_rows *src = &ends[CM_SRC].numbers;
    bool has_dst = cm_arg_is_given(given[CM_DST]);
    bool has_src = cm_arg_is_given(given[CM_SRC]);
    if (!has_dst && !has_src) {
        PyErr_Format(PyExc_TypeError,
                     "%s() needs dst_rows or src_rows: to copy all rows, use copy(dst, "
                     "src)",
                     self->function);
        return -1;
    }
    if (has_dst
        && cm_chosen_rows_from(self->state, given[CM_DST], ends[CM_DST].numbers_name,
                               dst)
               < 0) {
        return -1;
    }
    if (has_src
        && cm_chosen_rows_from(self->state, given[CM_SRC], ends[CM_SRC].numbers_name,
                               src)
               < 0) {
        return -1;
    }
    if (!has_dst) {
        cm_chosen_rows_init_all(dst, src->count);
    }
    if (!has_src) {
        cm_chosen_rows_init_all(src, dst->count);
    }
    if (dst->count != src->count) {
        PyErr_Format(PyExc_ValueError,
                     "%s: dst_rows has %llu numbers and src_rows has %llu: pass as "
                     "many of each",
                     self->function, (unsigned long long)dst->count,
                     (unsigned long long)src->count);
        return -1;
    }
    return 0;
}

static int
refuse_number(const row_copy *self, Py_ssize_t layer, cm_side side, cm_row_fault fault)
{
    char place[PLACE_NBYTES];
    const rows_end *end = &self->ends[side];
    long long row_count = end->operands[layer].region.shape[0];
    (void)place_of(self, layer, place);
    if (fault.kind == CM_ROWS_TWICE) {
        PyErr_Format(PyExc_ValueError,
                     "%s%s[%llu] is %lld, a row that an earlier number names: each row "
                     "may be written once",
                     place, end->numbers_name, (unsigned long long)fault.position,
                     (long long)fault.number);
    }
    else if (end->numbers.given == NULL) {
        PyErr_Format(PyExc_IndexError, "%s%s has %lld rows, and %llu are asked for",
                     place, end->name, row_count,
                     (unsigned long long)end->numbers.count);
    }
    else {
        PyErr_Format(PyExc_IndexError, "%s%s[%llu] is %lld, but %s has %lld rows",
                     place, end->numbers_name, (unsigned long long)fault.position,
                     (long long)fault.number, end->name, row_count);
    }
    return -1;
}

/* -- a pass ------------------------------------------------------------------------- */

/* One batch, which is not moved. */
typedef struct rows_pass {
    cm_many_call many;
    rows_end *ends[2]; /* borrowed, by cm_side */
    cm_row_runs runs;
} rows_pass;

/* Settle the numbers for the arrays of a layer, and cut its runs. Needs no GIL. */
static cm_status
cut_layer(rows_pass *pass, Py_ssize_t index, cm_side *side, cm_row_fault *fault)
{
    cm_layer layer;
    cm_chosen_rows *numbers[2];
    for (*side = CM_DST; *side <= CM_SRC; (*side)++) {
        const cm_operand *operand = &pass->ends[*side]->operands[index];
        numbers[*side] = &pass->ends[*side]->numbers;
        CM_TRY(cm_chosen_rows_settle(numbers[*side], operand->region.shape[0],
                                     *side == CM_DST, fault));
        if (fault->kind != CM_ROWS_RIGHT) {
            return cm_ok();
        }
        layer.array[*side] = operand->region;
        layer.owner[*side] = operand->storage;
    }
    const cm_chosen_rows settled[2] = {*numbers[CM_DST], *numbers[CM_SRC]};
    return cm_row_runs_add(&pass->runs, &layer, settled);
}

/* Make the runs of all layers. Returns 0, or -1 with an exception. */
static int
cut_runs(const row_copy *self, rows_pass *pass)
{
    for (Py_ssize_t layer = 0; layer < self->layer_count; layer++) {
        cm_side side = CM_DST;
        cm_row_fault fault = {.kind = CM_ROWS_RIGHT};
        cm_status status = CM_WITHOUT_GIL(cut_layer(pass, layer, &side, &fault));
        if (!cm_is_ok(status)) {
            return cm_py_raise_int(self->state, status, "while reading rows");
        }
        if (fault.kind != CM_ROWS_RIGHT) {
            return refuse_number(self, layer, side, fault);
        }
    }
    pass->many.request.pieces = pass->runs.pieces;
    pass->many.request.piece_count = pass->runs.count;
    return 0;
}

/* Set *out to whether two arrays of the ends have bytes in common, as far as their
 * addresses or their files can tell. Needs no GIL. */
static cm_status
find_meeting_arrays(cm_runtime *rt, const rows_pass *pass, Py_ssize_t count, bool *out)
{
    bool maps[2] = {false, false};
    size_t nbytes = ((size_t)count + 1) * 2 * sizeof(cm_byte_span);
    cm_byte_span *spans = malloc(nbytes);
    CM_TRY(cm_allocated(spans != NULL, nbytes));
    cm_byte_span *of[2] = {spans, spans + count};
    for (Py_ssize_t layer = 0; layer < count; layer++) {
        for (int side = CM_DST; side <= CM_SRC; side++) {
            const cm_region *array = &pass->ends[side]->operands[layer].region;
            of[side][layer] = cm_overlap_span(rt, array);
            maps[side] = maps[side] || array->is_file;
        }
    }
    *out = cm_byte_spans_touch(of[CM_DST], of[CM_SRC], (uint64_t)count)
           || (maps[CM_DST] && maps[CM_SRC]);
    free(spans);
    return cm_ok();
}

/* Set *out to whether a run that is written touches another end. */
static cm_status
find_touch(const row_copy *self, const rows_pass *pass, bool *out)
{
    cm_runtime *rt = self->state->runtime;
    CM_TRY(find_meeting_arrays(rt, pass, self->layer_count, out));
    return *out ? cm_many_find_conflicts(rt, &pass->many.request, out) : cm_ok();
}

/* Begin a pass: its runs, its ends, and what comes first. */
static int
begin_pass(const row_copy *self, rows_pass *pass, rows_end *dst, rows_end *src,
           const cm_progress *progress)
{
    pass->ends[CM_DST] = dst;
    pass->ends[CM_SRC] = src;
    if (cm_many_call_init(&pass->many, self->state, self->blocking, self->stream,
                          progress)
            < 0
        || cut_runs(self, pass) < 0) {
        return -1;
    }
    for (int side = CM_DST; side <= CM_SRC; side++) {
        for (Py_ssize_t layer = 0; layer < self->layer_count; layer++) {
            const cm_operand *end = &pass->ends[side]->operands[layer];
            if (cm_many_call_add_end(&pass->many, end, &end->region, side == CM_DST)
                < 0) {
                return -1;
            }
        }
    }
    return cm_call_come_after_given(&pass->many.call, self->after,
                                    self->ends[CM_DST].object,
                                    self->ends[CM_SRC].object, 1);
}

static int
run_pass(const row_copy *self, rows_pass *pass, cm_ticket **out)
{
    if (cm_many_call_take_ends(&pass->many, self->function) < 0) {
        return -1;
    }
    return cm_many_call_run(&pass->many, "while copying rows", out);
}

static void
fini_pass(rows_pass *pass)
{
    cm_many_call_fini(&pass->many);
    cm_row_runs_fini(&pass->runs);
}

/* -- through packed memory ---------------------------------------------------------- */

/* Allocate memory for the rows of an array, where the array itself lies: ordinary
 * memory, memory of its device, or else page-locked memory. Returns a new reference, or
 * NULL with an exception. */
static PyObject *
allocate_packed(const row_copy *self, const cm_operand *src, uint64_t count)
{
    const cm_region *like = &src->region;
    cm_region layout = *like;
    layout.shape[0] = (int64_t)count;
    if (cm_kind_is_pageable(like->kind)) {
        return cm_numpy_empty(src->dtype, layout.ndim, layout.shape);
    }
    bool on_device = cm_region_is_on_device(like);
    cm_kind kind = on_device ? CM_KIND_DEVICE : CM_KIND_PINNED;
    cm_stream *stream = NULL;
    if (on_device) {
        bool fits = self->stream != NULL && self->stream->device == like->device;
        stream = fits ? cm_stream_take(self->state, self->stream)
                      : cm_stream_from_object(self->state, Py_None, like->device);
        if (stream == NULL) {
            return NULL;
        }
    }
    cm_pool *pool =
        cm_pool_choose(self->state, NULL, kind, cm_kinds[kind].flags, like->device);
    PyObject *packed =
        cm_buffer_allocate(self->state, pool, src->dtype, &layout, 'C', stream);
    cm_stream_give(self->state, stream);
    return packed;
}

/* Make and describe the packed memory of all layers. */
static int
begin_between(row_copy *self)
{
    rows_end *between = &self->between;
    const rows_end *src = &self->ends[CM_SRC];
    self->packed = PyList_New(self->layer_count);
    if (self->packed == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        PyObject *packed = allocate_packed(self, &src->operands[i], src->numbers.count);
        if (packed == NULL || PyList_SetItem(self->packed, i, packed) < 0) {
            return -1;
        }
    }
    if (begin_end(between, self->packed) < 0) {
        return -1;
    }
    cm_chosen_rows_init_all(&between->numbers, src->numbers.count);
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        if (cm_operand_init(self->state, &between->operands[i],
                            PyTuple_GetItem(between->arrays, i), NULL, self->stream,
                            CM_ASK)
            < 0) {
            return -1;
        }
        between->read_count++;
    }
    return 0;
}

/* Read all rows into the packed memory. With a call in the background *out is the
 * ticket of this pass, which the caller owns; else it is NULL. */
static int
pack(const row_copy *self, rows_pass *pass, cm_ticket **out)
{
    rows_end *between = (rows_end *)&self->between;
    rows_end *src = (rows_end *)&self->ends[CM_SRC];
    cm_ticket *ticket;
    *out = NULL;
    pass->many.request.is_apart = true;
    if (begin_pass(self, pass, between, src, NULL) < 0
        || run_pass(self, pass, &ticket) < 0) {
        return -1;
    }
    if (self->blocking) {
        cm_ticket_release(ticket);
        return 0;
    }
    if (cm_call_remember(&pass->many.call, ticket) < 0) {
        return -1;
    }
    *out = ticket;
    return 0;
}

/* Write the rows from the packed memory to the target. */
static PyObject *
unpack(const row_copy *self, rows_pass *pass, cm_ticket *packed)
{
    rows_end *between = (rows_end *)&self->between;
    rows_end *dst = (rows_end *)&self->ends[CM_DST];
    cm_ticket *ticket;
    pass->many.request.common.chained_to = packed;
    if (begin_pass(self, pass, dst, between, self->progress) < 0
        || run_pass(self, pass, &ticket) < 0) {
        return NULL;
    }
    return cm_many_call_answer(&pass->many, ticket, self->ends[CM_DST].object,
                               self->ends[CM_SRC].object);
}

/* Copy rows whose ends touch each other, by two passes. */
static PyObject *
copy_through_memory(row_copy *self)
{
    PyObject *answer = NULL;
    cm_ticket *packed = NULL;
    rows_pass *passes = PyMem_Calloc(2, sizeof(*passes));
    if (passes == NULL) {
        return PyErr_NoMemory();
    }
    if (begin_between(self) == 0 && pack(self, &passes[0], &packed) == 0) {
        answer = unpack(self, &passes[1], packed);
    }
    if (packed != NULL) {
        cm_ticket_release(packed); /* whoever has the second asks about both */
    }
    fini_pass(&passes[0]);
    fini_pass(&passes[1]);
    PyMem_Free(passes);
    return answer;
}

/* -- the call ----------------------------------------------------------------------- */

/* Copy the rows, if their ends do not touch; *touches says whether they do. */
static PyObject *
copy_at_once(row_copy *self, rows_pass *pass, bool *touches)
{
    cm_ticket *ticket;
    if (begin_pass(self, pass, &self->ends[CM_DST], &self->ends[CM_SRC], self->progress)
        < 0) {
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(find_touch(self, pass, touches));
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, "while comparing rows");
    }
    pass->many.request.is_apart = true;
    if (*touches || run_pass(self, pass, &ticket) < 0) {
        return NULL;
    }
    return cm_many_call_answer(&pass->many, ticket, self->ends[CM_DST].object,
                               self->ends[CM_SRC].object);
}

/* Copy what was read and checked, and make the answer: None or a Transfer. */
static PyObject *
copy_all(row_copy *self)
{
    bool touches = false;
    CM_NVTX(self->function, 0);
    rows_pass *pass = PyMem_Calloc(1, sizeof(*pass));
    if (pass == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *answer = copy_at_once(self, pass, &touches);
    fini_pass(pass);
    PyMem_Free(pass);
    return touches ? copy_through_memory(self) : answer;
}

static void
fini_call(row_copy *self)
{
    fini_end(&self->ends[CM_DST]);
    fini_end(&self->ends[CM_SRC]);
    fini_end(&self->between);
    Py_XDECREF(self->packed);
    PyMem_Free(self);
}

/* Begin a call with its arguments, and refuse shutdown() until fini_call(). */
static row_copy *
begin_call(cm_call_frame *frame, const char *function, bool blocking)
{
    row_copy *self = PyMem_Calloc(1, sizeof(*self));
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->state = frame->state;
    self->function = function;
    self->blocking = blocking;
    self->stream = frame->stream;
    self->progress = &frame->progress;
    self->ends[CM_DST].name = "dst";
    self->ends[CM_DST].numbers_name = "dst_rows";
    self->ends[CM_SRC].name = "src";
    self->ends[CM_SRC].numbers_name = "src_rows";
    return self;
}

/* The arguments of copy_rows() and copy_rows_async(), by their places. */
enum { DST, SRC, DST_ROWS, SRC_ROWS, STREAM, LAST, ARGUMENT_COUNT };

static PyObject *
copy_given(cm_call_frame *frame, const char *function, bool blocking,
           PyObject *const *values)
{
    PyObject *const numbers[2] = {values[DST_ROWS], values[SRC_ROWS]};
    row_copy *self = begin_call(frame, function, blocking);
    if (self == NULL) {
        return NULL;
    }
    self->after = blocking ? NULL : values[LAST];
    PyObject *answer = NULL;
    if (cm_state_runtime(self->state) != NULL
        && begin_end(&self->ends[CM_DST], values[DST]) == 0
        && begin_end(&self->ends[CM_SRC], values[SRC]) == 0
        && read_end(self, CM_DST) == 0 && read_end(self, CM_SRC) == 0
        && check_layers(self) == 0 && read_numbers(self, numbers) == 0) {
        answer = copy_all(self);
    }
    fini_call(self);
    return answer;
}

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    const char *const names[] = {"dst",      "src",    "dst_rows",
                                 "src_rows", "stream", blocking ? "progress" : "after",
                                 NULL};
    PyObject *values[ARGUMENT_COUNT];
    PyObject *answer = NULL;
    cm_call_frame frame;
    cm_state *state = cm_state_of_module(module);
    if (cm_args_parse(function, args, nargs, kwnames, names, 4, 2, values) < 0) {
        return NULL;
    }
    int device = cm_device_hint_of(state, values[DST], values[SRC], values[STREAM], 1);
    PyObject *progress = blocking ? values[LAST] : NULL;
    if (cm_call_enter(&frame, state, values[STREAM], device, progress, "copy") == 0) {
        answer = copy_given(&frame, function, blocking, values);
    }
    return cm_call_leave(&frame, answer);
}

static PyObject *
copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return copy_with(module, "copy_rows", args, nargs, kwnames, true);
}

static PyObject *
copy_rows_async(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    return copy_with(module, "copy_rows_async", args, nargs, kwnames, false);
}

/* -- a new buffer ------------------------------------------------------------------- */

/* Make the target of take_rows(): memory of the device that has the source or, if none
 * has, of the stream's device or the current one. */
static PyObject *
allocate_target(const row_copy *self)
{
    const rows_end *end = &self->ends[CM_SRC];
    const cm_operand *src = &end->operands[0];
    cm_region layout = src->region;
    int device = layout.device;
    layout.shape[0] = (int64_t)end->numbers.count;
    if (!cm_region_is_on_device(&src->region)) {
        if (self->stream != NULL) {
            device = self->stream->device;
        }
        else if (cm_arg_device_about(self->state, NULL, "device", end->object, &device)
                 < 0) {
            return NULL;
        }
    }
    cm_stream *stream = self->stream != NULL && self->stream->device == device
                            ? cm_stream_take(self->state, self->stream)
                            : cm_stream_from_object(self->state, Py_None, device);
    if (stream == NULL) {
        return NULL;
    }
    cm_pool *pool = cm_pool_choose(self->state, NULL, CM_KIND_DEVICE,
                                   cm_kinds[CM_KIND_DEVICE].flags, device);
    PyObject *made =
        cm_buffer_allocate(self->state, pool, src->dtype, &layout, 'C', stream);
    cm_stream_give(self->state, stream);
    return made;
}

/* Check that out= has one row for each number. */
static int
check_out(const row_copy *self)
{
    long long rows = self->ends[CM_DST].operands[0].region.shape[0];
    unsigned long long count = self->ends[CM_SRC].numbers.count;
    if ((unsigned long long)rows == count) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: out has %lld rows, and rows has %llu numbers",
                 self->function, rows, count);
    return -1;
}

/* Read the source and the numbers of the rows. */
static int
read_taken(row_copy *self, PyObject *src, PyObject *rows)
{
    rows_end *end = &self->ends[CM_SRC];
    if (PyList_Check(src) || PyTuple_Check(src)) {
        return cm_arg_refuse(src, "src", "a buffer or an array");
    }
    if (begin_end(end, src) < 0 || read_end(self, CM_SRC) < 0
        || cm_chosen_rows_from(self->state, rows, "rows", &end->numbers) < 0) {
        return -1;
    }
    return 0;
}

/* take_rows(src, rows, out, ...): returns the target. */
static PyObject *
take_given(cm_call_frame *frame, PyObject *src, PyObject *rows, PyObject *out)
{
    row_copy *self = begin_call(frame, "take_rows", true);
    if (self == NULL) {
        return NULL;
    }
    PyObject *target = NULL;
    PyObject *done = NULL;
    self->ends[CM_DST].name = "out";
    self->ends[CM_SRC].numbers_name = "rows";
    if (cm_state_runtime(self->state) == NULL || read_taken(self, src, rows) < 0) {
        goto end;
    }
    target = cm_arg_is_given(out) ? Py_NewRef(out) : allocate_target(self);
    if (target == NULL || begin_end(&self->ends[CM_DST], target) < 0
        || read_end(self, CM_DST) < 0 || check_layers(self) < 0
        || check_out(self) < 0) {
        goto end;
    }
    cm_chosen_rows_init_all(&self->ends[CM_DST].numbers,
                            self->ends[CM_SRC].numbers.count);
    done = copy_all(self);
end:
    fini_call(self);
    if (done == NULL) {
        Py_XDECREF(target);
        return NULL;
    }
    Py_DECREF(done);
    return target;
}

static PyObject *
take_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"src",    "rows",     "out",
                                        "stream", "progress", NULL};
    PyObject *values[5];
    PyObject *answer = NULL;
    cm_call_frame frame;
    cm_state *state = cm_state_of_module(module);
    if (cm_args_parse("take_rows", args, nargs, kwnames, names, 3, 2, values) < 0) {
        return NULL;
    }
    PyObject *out = cm_arg_is_given(values[2]) ? values[2] : values[0];
    int device = cm_device_hint_of(state, out, values[0], values[3], 0);
    if (cm_call_enter(&frame, state, values[3], device, values[4], "copy") == 0) {
        answer = take_given(&frame, values[0], values[1], values[2]);
    }
    return cm_call_leave(&frame, answer);
}

PyMethodDef cm_row_methods[] = {
    {"copy_rows", CM_METHOD(copy_rows), CM_KEYWORDS, CM_DOC_copy_rows},
    {"copy_rows_async", CM_METHOD(copy_rows_async), CM_KEYWORDS,
     CM_DOC_copy_rows_async},
    {"take_rows", CM_METHOD(take_rows), CM_KEYWORDS, CM_DOC_take_rows},
    {NULL, NULL, 0, NULL},
};
