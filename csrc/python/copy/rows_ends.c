/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/rows_call.h"

#include <stdlib.h>

#include "python/buffer/memory_watch.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/allocate.h"
#include "transfer/rows/written_numbers.h"

/* -- ends --------------------------------------------------------------------------- */

int
cm_rows_end_begin(cm_rows_end *end, PyObject *object)
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

void
cm_rows_end_fini(cm_rows_end *end)
{
    for (Py_ssize_t i = 0; i < end->read_count; i++) {
        cm_operand_fini(&end->operands[i]);
    }
    PyMem_Free(end->operands);
    Py_XDECREF(end->arrays);
    cm_given_rows_fini(&end->given);
    cm_chosen_rows_fini(&end->numbers);
}

enum { PLACE_NBYTES = 96 };

/* Write the beginning of messages to `text`, and return `text`. A layer is a pair of
 * arrays, one of each end. If the ends are lists of arrays, the message names the layer
 * and begins with "copy_rows: layer 3: ", and otherwise with "copy_rows: ". */
static const char *
place_of(const cm_row_copy *self, Py_ssize_t layer, char text[PLACE_NBYTES])
{
    if (self->ends[CM_DST].is_list || self->ends[CM_SRC].is_list) {
        (void)PyOS_snprintf(text, PLACE_NBYTES, "%s: layer %zd: ", self->function,
                            self->first_layer + layer);
    }
    else {
        (void)PyOS_snprintf(text, PLACE_NBYTES, "%s: ", self->function);
    }
    return text;
}

/* Read memory that a RowPlan keeps (row_plan.c). The owner of the memory may move it
 * between two copies of the plan. So an array that is not backed by a storage is made a
 * buffer, and each copy checks whether the memory has moved (memory_watch.h). Returns
 * 0, or -1 with an exception. */
static int
read_kept_array(cm_row_copy *self, cm_operand *operand, PyObject *array)
{
    if (cm_operand_init(self->state, operand, array, NULL, self->stream, CM_ASK) < 0) {
        return -1;
    }
    bool is_buffer = operand->storage != NULL;
    if (is_buffer && cm_memory_watch(operand->storage) == 0) {
        return 0;
    }
    cm_operand_fini(operand);
    if (is_buffer) {
        return -1;
    }
    PyObject *buffer = cm_asbuffer(self->state, array, self->stream);
    int result = buffer == NULL ? -1
                                : cm_operand_init(self->state, operand, buffer, NULL,
                                                  self->stream, CM_ASK);
    Py_XDECREF(buffer);
    return result;
}

/* Read the array of a layer, and make those checks that need no other array. Returns 0,
 * or -1 with an exception. */
static int
read_array(cm_row_copy *self, cm_side side, Py_ssize_t layer)
{
    char place[PLACE_NBYTES];
    cm_rows_end *end = &self->ends[side];
    PyObject *array = PyTuple_GetItem(end->arrays, layer);
    cm_operand *operand = &end->operands[layer];
    (void)place_of(self, layer, place);
    if (!cm_operand_is_memory(self->state, array)) {
        PyErr_Format(PyExc_TypeError,
                     "%s%s must be a buffer, an array or a list of them, not %R", place,
                     end->name, (PyObject *)Py_TYPE(array));
        return -1;
    }
    int result = self->is_plan ? read_kept_array(self, operand, array)
                               : cm_operand_init(self->state, operand, array, NULL,
                                                 self->stream, CM_ASK);
    if (result < 0) {
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

int
cm_rows_read_end(cm_row_copy *self, cm_side side)
{
    Py_ssize_t count = PyTuple_Size(self->ends[side].arrays);
    for (Py_ssize_t layer = 0; layer < count; layer++) {
        if (read_array(self, side, layer) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Check that the two arrays of a layer have rows of the same dtype and shape. Returns
 * 0, or -1 with an exception. */
static int
check_rows(const cm_row_copy *self, Py_ssize_t layer)
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

int
cm_rows_check_layers(cm_row_copy *self)
{
    const cm_rows_end *dst = &self->ends[CM_DST];
    const cm_rows_end *src = &self->ends[CM_SRC];
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
                     "%s: %s has %zd arrays and %s has %zd: pass as many of each",
                     self->function, dst->name, count, src->name,
                     PyTuple_Size(src->arrays));
        return -1;
    }
    self->layer_count = count;
    for (Py_ssize_t layer = 0; layer < count; layer++) {
        if (check_rows(self, layer) < 0
            || cm_operands_lock(self->state, &self->ends[CM_DST].operands[layer],
                                &self->ends[CM_SRC].operands[layer])
                   < 0) {
            return -1;
        }
    }
    return 0;
}

/* -- the numbers of the rows -------------------------------------------------------- */

int
cm_rows_take_numbers(cm_row_copy *self, cm_side side, PyObject *argument)
{
    cm_rows_end *end = &self->ends[side];
    int result = cm_given_rows_init(&end->given, self->state, argument,
                                    end->numbers_name, self->stream);
    cm_chosen_rows_init_all(&end->numbers, end->given.count);
    return result;
}

int
cm_rows_read_numbers(cm_row_copy *self, PyObject *const given[2])
{
    cm_rows_end *ends = self->ends;
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
    if (has_dst && cm_rows_take_numbers(self, CM_DST, given[CM_DST]) < 0) {
        return -1;
    }
    if (has_src && cm_rows_take_numbers(self, CM_SRC, given[CM_SRC]) < 0) {
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

int64_t
cm_rows_shortest(const cm_row_copy *self, cm_side side)
{
    int64_t shortest = INT64_MAX;
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        int64_t rows = self->ends[side].operands[i].region.shape[0];
        shortest = rows < shortest ? rows : shortest;
    }
    return shortest;
}

/* Make room in `numbers` for the numbers of an end. Sets *to to this room and *out to
 * what cm_numbers_write_both() needs to copy the numbers into it. If the numbers have
 * been copied already, or if the host has none, out->to is NULL. */
static cm_status
begin_keeping(const cm_row_copy *self, cm_side side, cm_kernel_numbers *to,
              cm_numbers_side *out)
{
    cm_rows_end *end = (cm_rows_end *)&self->ends[side];
    *out = (cm_numbers_side){.to = NULL};
    if (end->given.array == NULL || end->numbers.given != NULL) {
        return cm_ok();
    }
    CM_TRY(cm_chosen_rows_init(&end->numbers, end->given.count));
    *to = (cm_kernel_numbers){
        .at = end->numbers.given, .count = end->given.count, .nbytes = sizeof(int64_t)};
    *out = (cm_numbers_side){to, cm_given_rows_integers(&end->given),
                             cm_rows_shortest(self, side)};
    return cm_ok();
}

/* Copy the numbers, and look at them on the way. If a number is wrong, all numbers are
 * copied once more as they were given, so that cm_rows_settle() can find the wrong one.
 * Needs no GIL. */
static cm_status
keep_numbers(cm_engine *engine, const cm_numbers_side sides[2],
             cm_chosen_rows *const kept[2])
{
    cm_numbers_finding finding;
    CM_TRY(cm_numbers_write_both(engine, sides, &finding));
    for (int side = CM_DST; side <= CM_SRC; side++) {
        const cm_numbers_side *one = &sides[side];
        if (one->to == NULL) {
            continue;
        }
        if (finding == CM_NUMBERS_WRONG) {
            cm_chosen_rows_read(kept[side], one->from);
        }
        else if (!one->to->has_negative) {
            kept[side]->bound = one->row_count;
        }
    }
    return cm_ok();
}

int
cm_rows_keep_numbers(cm_row_copy *self)
{
    cm_kernel_numbers to[2];
    cm_numbers_side sides[2];
    cm_chosen_rows *const kept[2] = {&self->ends[CM_DST].numbers,
                                     &self->ends[CM_SRC].numbers};
    cm_engine *engine = cm_state_engine(self->state, -1);
    if (engine == NULL) {
        return -1;
    }
    cm_status status = begin_keeping(self, CM_DST, &to[CM_DST], &sides[CM_DST]);
    if (cm_is_ok(status)) {
        status = begin_keeping(self, CM_SRC, &to[CM_SRC], &sides[CM_SRC]);
    }
    if (cm_is_ok(status)) {
        bool is_long = kept[CM_SRC]->count > CM_ROWS_MANY_NUMBERS;
        status = is_long ? CM_WITHOUT_GIL(keep_numbers(engine, sides, kept))
                         : keep_numbers(engine, sides, kept);
    }
    return cm_py_check(self->state, status, "while reading rows");
}

int
cm_rows_settle(cm_row_copy *self, Py_ssize_t layer, cm_side side)
{
    cm_rows_end *end = &self->ends[side];
    int64_t row_count = end->operands[layer].region.shape[0];
    cm_row_fault fault = {.kind = CM_ROWS_RIGHT};
    cm_status status = CM_WITHOUT_GIL(
        cm_chosen_rows_settle(&end->numbers, row_count, side == CM_DST, &fault));
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while reading rows");
    }
    return fault.kind == CM_ROWS_RIGHT
               ? 0
               : cm_rows_refuse_number(self, layer, side, fault);
}

/* Return the number that was refused as it stands in the argument. If fault.number is
 * INT64_MAX, the argument may have a number of 2**63 or more, so the number is read
 * from the array again. Returns a new reference, or NULL with an exception. */
static PyObject *
number_as_given(const cm_rows_end *end, cm_row_fault fault)
{
    PyObject *array = end->given.array;
    return fault.number == INT64_MAX && array != NULL
               ? PySequence_GetItem(array, (Py_ssize_t)fault.position)
               : PyLong_FromLongLong(fault.number);
}

/* Refuse a number that names no row of the array. Always returns -1, with an exception.
 */
static int
refuse_outside(const cm_rows_end *end, const char *place, long long row_count,
               cm_row_fault fault)
{
    PyObject *number = number_as_given(end, fault);
    if (number != NULL) {
        PyErr_Format(PyExc_IndexError, "%s%s[%llu] is %S, but %s has %lld rows", place,
                     end->numbers_name, (unsigned long long)fault.position, number,
                     end->name, row_count);
        Py_DECREF(number);
    }
    return -1;
}

int
cm_rows_refuse_number(const cm_row_copy *self, Py_ssize_t layer, cm_side side,
                      cm_row_fault fault)
{
    char place[PLACE_NBYTES];
    const cm_rows_end *end = &self->ends[side];
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
        (void)refuse_outside(end, place, row_count, fault);
    }
    return -1;
}

/* -- which ends touch ----------------------------------------------------------------- */

/* If there are more layers than this, the rows of two arrays are not compared. The
 * arrays then count as having bytes in common if their spans of addresses meet. */
enum { MOST_COMPARED = 256 };

/* The bytes of an array as rows of `length` bytes. The lowest row begins at span.begin,
 * and each further row begins `step` bytes after the row before it. */
typedef struct row_pattern {
    cm_byte_span span;
    uint64_t length; /* including the gaps within a row */
    uint64_t step;   /* 0 if nothing is known of the rows */
} row_pattern;

static row_pattern
pattern_of(cm_runtime *rt, const cm_region *array)
{
    int64_t low = 0;
    int64_t high = 0;
    cm_region row = *array;
    int64_t stride = array->strides[0];
    row_pattern pattern = {.span = cm_overlap_span(rt, array)};
    row.shape[0] = array->shape[0] > 0;
    if (cm_is_ok(cm_region_bounds(&row, &low, &high))) {
        pattern.length = (uint64_t)(high - low);
        pattern.step = (uint64_t)(stride < 0 ? -stride : stride);
    }
    return pattern;
}

/* True if two arrays have bytes in common. They have none if the rows of one lie in the
 * gaps between the rows of the other. The keys and the values of one cache may be
 * interleaved in this way. */
static bool
patterns_meet(const row_pattern *a, const row_pattern *b)
{
    if (!cm_byte_spans_meet(a->span, b->span)) {
        return false;
    }
    if (a->step == 0 || a->step != b->step) {
        return true;
    }
    uint64_t distance = (b->span.begin - a->span.begin) % a->step;
    if (b->span.begin < a->span.begin) {
        distance = (a->step - (a->span.begin - b->span.begin) % a->step) % a->step;
    }
    return distance < a->length || distance + b->length > a->step;
}

/* True if any array of `dst` has bytes in common with another one of `dst`, or with one
 * of `src`. */
static bool
any_patterns_meet(const row_pattern *dst, const row_pattern *src, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        for (Py_ssize_t k = 0; k < count; k++) {
            if ((k > i && patterns_meet(&dst[i], &dst[k]))
                || patterns_meet(&dst[i], &src[k])) {
                return true;
            }
        }
    }
    return false;
}

/* Set *out to whether any array of the target may have bytes in common with another
 * array of either end. The caller has found that the spans of some of these arrays
 * meet, and this function also compares their rows.
 * Fails: CM_ENOMEM. */
static cm_status
compare_patterns(cm_runtime *rt, cm_rows_end *const ends[2], Py_ssize_t count,
                 bool *out)
{
    size_t nbytes = (size_t)count * 2 * sizeof(row_pattern);
    row_pattern *patterns = malloc(nbytes);
    CM_TRY(cm_allocated(patterns != NULL, nbytes));
    for (Py_ssize_t i = 0; i < count; i++) {
        patterns[i] = pattern_of(rt, &ends[CM_DST]->operands[i].region);
        patterns[count + i] = pattern_of(rt, &ends[CM_SRC]->operands[i].region);
    }
    *out = any_patterns_meet(patterns, patterns + count, count);
    free(patterns);
    return cm_ok();
}

cm_status
cm_rows_find_meeting_arrays(cm_runtime *rt, cm_rows_end *const ends[2],
                            Py_ssize_t count, bool *out)
{
    bool maps[2] = {false, false};
    size_t nbytes = ((size_t)count + 1) * 2 * sizeof(cm_byte_span);
    cm_byte_span *spans = malloc(nbytes);
    CM_TRY(cm_allocated(spans != NULL, nbytes));
    cm_byte_span *of[2] = {spans, spans + count};
    for (Py_ssize_t layer = 0; layer < count; layer++) {
        for (int side = CM_DST; side <= CM_SRC; side++) {
            const cm_region *array = &ends[side]->operands[layer].region;
            of[side][layer] = cm_overlap_span(rt, array);
            maps[side] = maps[side] || array->is_file;
        }
    }
    bool meet = cm_byte_spans_touch(of[CM_DST], of[CM_SRC], (uint64_t)count);
    free(spans);
    *out = meet || (maps[CM_DST] && maps[CM_SRC]);
    /* Comparing the rows takes time in proportion to the square of the count, so it is
     * done only for few layers. */
    bool looks_closer =
        meet && !(maps[CM_DST] && maps[CM_SRC]) && count <= MOST_COMPARED;
    return looks_closer ? compare_patterns(rt, ends, count, out) : cm_ok();
}

/* True if both regions are the same rows of the same memory. */
static bool
are_same(const cm_region *a, const cm_region *b)
{
    size_t axes = (size_t)a->ndim;
    return a->host == b->host && a->address == b->address && a->ndim == b->ndim
           && memcmp(a->shape, b->shape, axes * sizeof(a->shape[0])) == 0
           && memcmp(a->strides, b->strides, axes * sizeof(a->strides[0])) == 0;
}

cm_status
cm_rows_are_in_place(cm_runtime *rt, cm_rows_end *const ends[2], Py_ssize_t count,
                     bool *out)
{
    *out = count <= MOST_COMPARED;
    for (Py_ssize_t i = 0; *out && i < count; i++) {
        *out = are_same(&ends[CM_DST]->operands[i].region,
                        &ends[CM_SRC]->operands[i].region);
    }
    if (!*out || count == 1) {
        return cm_ok();
    }
    size_t nbytes = (size_t)count * sizeof(row_pattern);
    row_pattern *patterns = malloc(nbytes);
    CM_TRY(cm_allocated(patterns != NULL, nbytes));
    for (Py_ssize_t i = 0; i < count; i++) {
        patterns[i] = pattern_of(rt, &ends[CM_DST]->operands[i].region);
        for (Py_ssize_t k = 0; k < i; k++) {
            *out = *out && !patterns_meet(&patterns[i], &patterns[k]);
        }
    }
    free(patterns);
    return cm_ok();
}

/* -- what the copy comes after ------------------------------------------------------ */

int
cm_rows_come_after_given(const cm_row_copy *self, cm_call *call)
{
    if (self->after_ticket != NULL
        && cm_call_come_after_ticket(call, self->after_ticket) < 0) {
        return -1;
    }
    return cm_call_come_after_given(call, self->after, self->ends[CM_DST].object,
                                    self->ends[CM_SRC].object, 1);
}

/* -- packed memory ------------------------------------------------------------------ */

/* Allocate memory in which `count` rows of the array `src` lie one behind the other
 * (packed memory). If the array is in ordinary memory, the new memory is ordinary, too.
 * If the array is on a device, the new memory is on `device` or, if `device` is -1, on
 * the array's own device. For any other array it is page-locked memory. Returns a new
 * reference, or NULL with an exception. */
static PyObject *
allocate_packed(const cm_row_copy *self, const cm_operand *src, uint64_t count,
                int device)
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
    device = device < 0 ? like->device : device;
    if (on_device) {
        bool fits = self->stream != NULL && self->stream->device == device;
        stream = fits ? cm_stream_take(self->state, self->stream)
                      : cm_stream_from_object(self->state, Py_None, device);
        if (stream == NULL) {
            return NULL;
        }
    }
    cm_pool *pool =
        cm_pool_choose(self->state, NULL, kind, cm_kinds[kind].flags, device);
    PyObject *packed =
        cm_buffer_allocate(self->state, pool, src->dtype, &layout, 'C', stream);
    cm_stream_give(self->state, stream);
    return packed;
}

int
cm_rows_begin_between(cm_row_copy *self, int device)
{
    cm_rows_end *between = &self->between;
    const cm_rows_end *src = &self->ends[CM_SRC];
    self->packed = PyList_New(self->layer_count);
    if (self->packed == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        PyObject *packed =
            allocate_packed(self, &src->operands[i], src->numbers.count, device);
        if (packed == NULL || PyList_SetItem(self->packed, i, packed) < 0) {
            return -1;
        }
    }
    if (cm_rows_end_begin(between, self->packed) < 0) {
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
