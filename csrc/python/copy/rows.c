/* SPDX-License-Identifier: Apache-2.0 */
/* copy_rows(), copy_rows_async() and take_rows(), which copy rows of arrays by their
 * numbers.
 *
 * The idea
 * --------
 * A call reads both ends and the numbers of the rows once. An end is an array or a list
 * of arrays. The arrays at one position of the two ends are a pair, which is called a
 * layer. A pass is one request to the engine (many.h), and nearly all calls make one
 * pass. If threads of the host have a part in the copy, the engine gets the arrays and
 * the numbers, and the threads make runs of bytes from them as they go
 * (plan/numbered_rows.h). Otherwise the pass makes a list of all runs, in which
 * neighbouring rows are one run, and the engine copies the list as a batch.
 *
 * If the rows that are written touch rows that are read, the result has to be as if all
 * of the source were read first, as in NumPy's dst[d] = src[s]. Then the call makes two
 * passes. The first pass copies the rows from the source into packed memory, which has
 * room for just these rows. The second pass copies them from the packed memory to the
 * target. It comes after the first pass, and it fails if the first pass fails. To find
 * out whether the ends touch, the call first compares whole arrays. If two arrays have
 * bytes in common, as two views of one cache may have, it also compares their runs.
 *
 * If one device reaches both ends, a kernel usually reads the numbers and finds the
 * rows by itself, and no runs are made (rows_by_kernel.c). rows_ends.c has the
 * functions that are needed both with runs and with the kernel.
 *
 * Every error in the arguments is found before a byte is copied.
 * Locks: none; the GIL is held, and released to cut the runs and to copy. */
#include <stdlib.h>

#include "base/nvtx.h"
#include "docstrings.h"
#include "python/copy/copy_functions.h"
#include "python/copy/rows_call.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/pool/allocate.h"
#include "transfer/rows/layers.h"

/* -- a pass ------------------------------------------------------------------------- */

/* One request to the engine. The struct must not be moved, since `many` must not be. */
typedef struct rows_pass {
    cm_many_call many;
    cm_rows_end *ends[2]; /* borrowed, by cm_side */
    bool meets; /* an array that is written may share bytes with another array */
    cm_row_runs runs;
} rows_pass;

/* Settle the numbers of both ends for the arrays of a layer (cm_chosen_rows_settle()),
 * so that negative numbers count from the end of these arrays. Stops at a wrong number,
 * which *side and *fault then describe. Needs no GIL. */
static cm_status
settle_layer(const rows_pass *pass, Py_ssize_t index, cm_side *side,
             cm_row_fault *fault)
{
    for (*side = CM_DST; *side <= CM_SRC; (*side)++) {
        cm_rows_end *end = pass->ends[*side];
        CM_TRY(cm_chosen_rows_settle(&end->numbers,
                                     end->operands[index].region.shape[0],
                                     *side == CM_DST, fault));
        if (fault->kind != CM_ROWS_RIGHT) {
            return cm_ok();
        }
    }
    return cm_ok();
}

/* Check the numbers for the arrays of all layers. Returns 0, or -1 with an
 * exception. */
static int
settle_layers(const cm_row_copy *self, const rows_pass *pass)
{
    for (Py_ssize_t layer = 0; layer < self->layer_count; layer++) {
        cm_side side = CM_DST;
        cm_row_fault fault = {.kind = CM_ROWS_RIGHT};
        cm_status status = CM_WITHOUT_GIL(settle_layer(pass, layer, &side, &fault));
        if (!cm_is_ok(status)) {
            return cm_py_raise_int(self->state, status, "while reading rows");
        }
        if (fault.kind != CM_ROWS_RIGHT) {
            return cm_rows_refuse_number(self, layer, side, fault);
        }
    }
    return 0;
}

static cm_layer
layer_at(const rows_pass *pass, Py_ssize_t index)
{
    cm_layer layer;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        layer.array[side] = pass->ends[side]->operands[index].region;
        layer.owner[side] = pass->ends[side]->operands[index].storage;
    }
    return layer;
}

/* List the runs of all layers. Needs no GIL. */
static cm_status
list_runs(const cm_row_copy *self, rows_pass *pass)
{
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        cm_side side;
        cm_row_fault fault;
        cm_layer layer = layer_at(pass, i);
        /* The numbers may still be settled for another layer, whose arrays have a
         * different number of rows, so they are settled again. They cannot be wrong
         * here, since settle_layers() has checked them for all layers. */
        CM_TRY(settle_layer(pass, i, &side, &fault));
        const cm_chosen_rows settled[2] = {pass->ends[CM_DST]->numbers,
                                           pass->ends[CM_SRC]->numbers};
        CM_TRY(cm_row_runs_add(&pass->runs, &layer, settled));
    }
    pass->many.request.pieces = pass->runs.pieces;
    pass->many.request.piece_count = pass->runs.count;
    return cm_ok();
}

/* Put the rows into the request by their numbers, so that copy threads make the runs.
 * If the copy threads cannot do so for these rows, request.common.many stays NULL.
 * Needs no GIL. */
static cm_status
number_rows(const cm_row_copy *self, rows_pass *pass, cm_engine *engine)
{
    size_t nbytes = ((size_t)self->layer_count + 1) * sizeof(cm_layer);
    bool on_stream = pass->many.call.stream != NULL && !self->blocking;
    cm_chosen_rows *const numbers[2] = {&pass->ends[CM_DST]->numbers,
                                        &pass->ends[CM_SRC]->numbers};
    cm_layer *layers = malloc(nbytes);
    CM_TRY(cm_allocated(layers != NULL, nbytes));
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        layers[i] = layer_at(pass, i);
    }
    cm_status status = cm_numbered_many_create(
        engine, layers, (uint64_t)self->layer_count, numbers, on_stream, self->gathers,
        &pass->many.request.common.many);
    free(layers);
    return status;
}

/* Fill in the request to the engine. It describes the rows by their numbers or, if copy
 * threads cannot work by these numbers, as a list of runs. Needs no GIL. */
static cm_status
describe_rows(const cm_row_copy *self, rows_pass *pass, cm_engine *engine)
{
    if (!pass->meets) {
        CM_TRY(number_rows(self, pass, engine));
    }
    return pass->many.request.common.many != NULL ? cm_ok() : list_runs(self, pass);
}

/* Set *out to whether a run that is written has bytes in common with another run. If
 * whole arrays do not decide this (pass->meets), the function lists all runs of the
 * pass and compares them. Needs no GIL. */
static cm_status
find_touch(const cm_row_copy *self, rows_pass *pass, bool *out)
{
    *out = false;
    if (!pass->meets) {
        return cm_ok();
    }
    CM_TRY(list_runs(self, pass));
    return cm_many_find_conflicts(self->state->runtime, &pass->many.request, out);
}

/* Begin a pass: settle the numbers, add the ends, and order the pass after the streams
 * and the transfer that the call was given. Returns 0, or -1 with an exception. */
static int
begin_pass(const cm_row_copy *self, rows_pass *pass, cm_rows_end *dst, cm_rows_end *src,
           const cm_progress *progress)
{
    pass->ends[CM_DST] = dst;
    pass->ends[CM_SRC] = src;
    if (cm_many_call_init(&pass->many, self->state, self->blocking, self->stream,
                          progress)
            < 0
        || settle_layers(self, pass) < 0) {
        return -1;
    }
    cm_status status = CM_WITHOUT_GIL(cm_rows_find_meeting_arrays(
        self->state->runtime, pass->ends, self->layer_count, &pass->meets));
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while comparing rows");
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
    return cm_rows_come_after_given(self, &pass->many.call);
}

static int
run_pass(const cm_row_copy *self, rows_pass *pass, cm_ticket **out)
{
    if (cm_many_call_take_ends(&pass->many, self->function) < 0) {
        return -1;
    }
    cm_engine *engine = cm_state_engine(self->state, -1);
    if (engine == NULL) {
        return -1;
    }
    if (pass->runs.count == 0) { /* otherwise find_touch() has listed the runs */
        cm_status status = CM_WITHOUT_GIL(describe_rows(self, pass, engine));
        if (cm_py_check(self->state, status, "while reading rows") < 0) {
            return -1;
        }
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

/* Read all rows into the packed memory. If the call is in the background, *out is the
 * ticket of this pass, which the caller owns. Otherwise *out is NULL. Returns 0, or -1
 * with an exception. */
static int
pack(const cm_row_copy *self, rows_pass *pass, cm_ticket **out)
{
    cm_rows_end *between = (cm_rows_end *)&self->between;
    cm_rows_end *src = (cm_rows_end *)&self->ends[CM_SRC];
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

/* Write the rows from the packed memory to the target. Returns None or a Transfer, or
 * NULL with an exception. */
static PyObject *
unpack(const cm_row_copy *self, rows_pass *pass, cm_ticket *packed)
{
    cm_rows_end *between = (cm_rows_end *)&self->between;
    cm_rows_end *dst = (cm_rows_end *)&self->ends[CM_DST];
    cm_ticket *ticket;
    pass->many.request.common.chained_to = packed;
    if (begin_pass(self, pass, dst, between, self->progress) < 0
        || run_pass(self, pass, &ticket) < 0) {
        return NULL;
    }
    return cm_many_call_answer(&pass->many, ticket, self->ends[CM_DST].object,
                               self->ends[CM_SRC].object);
}

/* Copy rows whose ends touch each other, by two passes. Returns None or a Transfer, or
 * NULL with an exception. */
static PyObject *
copy_through_memory(cm_row_copy *self)
{
    PyObject *answer = NULL;
    cm_ticket *packed = NULL;
    rows_pass *passes = PyMem_Calloc(2, sizeof(*passes));
    if (passes == NULL) {
        return PyErr_NoMemory();
    }
    if (cm_rows_begin_between(self, -1) == 0 && pack(self, &passes[0], &packed) == 0) {
        answer = unpack(self, &passes[1], packed);
    }
    if (packed != NULL) {
        cm_ticket_release(packed); /* the second ticket also tells whether the first
                                      pass failed */
    }
    fini_pass(&passes[0]);
    fini_pass(&passes[1]);
    PyMem_Free(passes);
    return answer;
}

/* -- the call ----------------------------------------------------------------------- */

/* Copy the rows in one pass, unless the ends touch, and set *touches to whether the
 * ends touch. Returns None or a Transfer. If the ends touch, it returns NULL without an
 * exception. If it fails, it returns NULL with an exception. */
static PyObject *
copy_at_once(cm_row_copy *self, rows_pass *pass, bool *touches)
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

PyObject *
cm_rows_copy_by_runs(cm_row_copy *self)
{
    bool touches = false;
    if (cm_rows_are_on_device(self) && cm_rows_fetch_numbers(self) < 0) {
        return NULL;
    }
    if (cm_rows_keep_numbers(self) < 0) {
        return NULL;
    }
    rows_pass *pass = PyMem_Calloc(1, sizeof(*pass));
    if (pass == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *answer = copy_at_once(self, pass, &touches);
    fini_pass(pass);
    PyMem_Free(pass);
    return touches ? copy_through_memory(self) : answer;
}

/* True if a kernel may copy rows whose numbers the host has. If both ends are memory of
 * the host, a kernel copies only if the call returns before the copy is made and has a
 * stream, since the processor cannot copy in the order of a stream. If the rows make
 * few or long runs, no kernel copies, since the copy engine is at least as fast. */
static bool
may_suit_kernel(const cm_row_copy *self)
{
    bool on_stream = self->stream != NULL && !self->blocking;
    if (self->layer_count == 0) {
        return false;
    }
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        bool has_device =
            cm_region_is_on_device(&self->ends[CM_DST].operands[i].region)
            || cm_region_is_on_device(&self->ends[CM_SRC].operands[i].region);
        if (!has_device && !on_stream) {
            return false;
        }
    }
    cm_layer first = cm_rows_layer_of(self, 0);
    return !cm_rows_suit_engine(&first, (uint64_t)self->layer_count,
                                self->ends[CM_SRC].numbers.count, NULL);
}

/* True if threads of the host gather the rows, although the rows lie in page-locked
 * memory that a kernel could read. The threads do so only for calls without a stream. A
 * copy from page-locked memory has to be in the order of its stream, so the threads
 * would have to wait for the stream. A RowPlan is always given a kernel, since it may
 * be used on a stream later. The threads do not gather from write-combined memory,
 * which processors read slowly. The caller has found that the rows suit a kernel and
 * that the host has all numbers. */
static bool
do_threads_gather(const cm_row_copy *self, cm_engine *engine)
{
    if (self->stream != NULL || self->is_plan) {
        return false;
    }
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        cm_layer layer = cm_rows_layer_of(self, i);
        const cm_storage *src = self->ends[CM_SRC].operands[i].storage;
        bool is_combined =
            src != NULL && (src->flags & CM_HOST_ALLOC_WRITE_COMBINED) != 0;
        if (is_combined
            || !cm_rows_suit_threads(engine, &layer, (uint64_t)self->layer_count,
                                     self->ends[CM_SRC].numbers.count)) {
            return false;
        }
    }
    return true;
}

/* If a device reaches all of the rows, its kernel may read the numbers, wherever the
 * numbers lie. If no device reaches all rows, or if copying by runs is faster, the host
 * gets the numbers and makes runs of them. If max_sms is given, the kernel copies even
 * if runs are faster, since only the kernel can keep to such a limit. */
int
cm_rows_choose(cm_row_copy *self, int *device)
{
    if (!cm_rows_are_on_device(self) && self->max_sms == 0) {
        if (!may_suit_kernel(self)) {
            return 0;
        }
        cm_engine *engine = cm_state_engine(self->state, -1);
        if (engine == NULL) {
            return -1;
        }
        self->gathers = do_threads_gather(self, engine);
        if (self->gathers) {
            return 0;
        }
    }
    return cm_rows_find_device(self, device);
}

/* Copy by the kernel of a device. Returns what cm_rows_copy_by_kernel() returns. */
static int
copy_by_kernel(cm_row_copy *self, int device, PyObject **answer)
{
    cm_rows_kernel kernel;
    int copied = cm_rows_kernel_init(&kernel, self, device);
    if (copied == 0) {
        copied = cm_rows_copy_by_kernel(&kernel, answer);
    }
    cm_rows_kernel_fini(&kernel);
    return copied;
}

/* Copy the rows, after the ends and the numbers have been read and checked. Returns
 * None or a Transfer, or NULL with an exception. */
static PyObject *
copy_all(cm_row_copy *self)
{
    int device;
    PyObject *answer = NULL;
    CM_NVTX(self->function, 0);
    int found = cm_rows_choose(self, &device);
    int copied = found <= 0 ? found : copy_by_kernel(self, device, &answer);
    return copied != 0 ? answer : cm_rows_copy_by_runs(self);
}

static void
fini_call(cm_row_copy *self)
{
    cm_rows_end_fini(&self->ends[CM_DST]);
    cm_rows_end_fini(&self->ends[CM_SRC]);
    cm_rows_end_fini(&self->between);
    Py_XDECREF(self->packed);
    PyMem_Free(self);
}

void
cm_rows_name_ends(cm_row_copy *self, const char *dst, const char *src)
{
    self->ends[CM_DST].name = dst;
    self->ends[CM_DST].numbers_name = "dst_rows";
    self->ends[CM_SRC].name = src;
    self->ends[CM_SRC].numbers_name = "src_rows";
}

/* Make the struct of a call. The caller fills in the ends and the other arguments, and
 * ends the call by fini_call(). Returns NULL with an exception if it fails. */
static cm_row_copy *
begin_call(cm_call_frame *frame, const char *function, bool blocking)
{
    cm_row_copy *self = PyMem_Calloc(1, sizeof(*self));
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->state = frame->state;
    self->function = function;
    self->blocking = blocking;
    self->stream = frame->stream;
    self->progress = &frame->progress;
    cm_rows_name_ends(self, "dst", "src");
    return self;
}

/* The arguments of copy_rows() and copy_rows_async(), by their places. */
enum { DST, SRC, DST_ROWS, SRC_ROWS, STREAM, MAX_SMS, LAST, ARGUMENT_COUNT };

int
cm_rows_read_max_sms(cm_row_copy *self, PyObject *given)
{
    int64_t value;
    if (!cm_arg_is_given(given)) {
        return 0;
    }
    if (cm_arg_int64(given, "max_sms", &value) < 0) {
        return -1;
    }
    if (value < 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s: max_sms must be at least 1, not %lld: leave it out for as "
                     "many multiprocessors as the copy needs",
                     self->function, (long long)value);
        return -1;
    }
    self->max_sms = value < UINT32_MAX ? (uint32_t)value : UINT32_MAX;
    return 0;
}

static PyObject *
copy_given(cm_call_frame *frame, const char *function, bool blocking,
           PyObject *const *values)
{
    PyObject *const numbers[2] = {values[DST_ROWS], values[SRC_ROWS]};
    cm_row_copy *self = begin_call(frame, function, blocking);
    if (self == NULL) {
        return NULL;
    }
    self->after = blocking ? NULL : values[LAST];
    self->stream_argument = values[STREAM];
    PyObject *answer = NULL;
    if (cm_state_runtime(self->state) != NULL
        && cm_rows_read_max_sms(self, values[MAX_SMS]) == 0
        && cm_rows_end_begin(&self->ends[CM_DST], values[DST]) == 0
        && cm_rows_end_begin(&self->ends[CM_SRC], values[SRC]) == 0
        && cm_rows_read_end(self, CM_DST) == 0 && cm_rows_read_end(self, CM_SRC) == 0
        && cm_rows_check_layers(self) == 0
        && cm_rows_read_numbers(self, numbers) == 0) {
        answer = copy_all(self);
    }
    fini_call(self);
    return answer;
}

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    const char *const names[] = {"dst",
                                 "src",
                                 "dst_rows",
                                 "src_rows",
                                 "stream",
                                 "max_sms",
                                 blocking ? "progress" : "after",
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

/* Make the target of take_rows() in memory of a device. If the source is memory of a
 * device, the target is on the same device. Otherwise it is on the stream's device if a
 * stream was given, else on the device that has the numbers if they lie on a device,
 * and else on the current device. Returns a new reference, or NULL with an exception.
 */
static PyObject *
allocate_target(const cm_row_copy *self)
{
    const cm_rows_end *end = &self->ends[CM_SRC];
    const cm_operand *src = &end->operands[0];
    cm_region layout = src->region;
    int device = layout.device;
    layout.shape[0] = (int64_t)end->numbers.count;
    if (!cm_region_is_on_device(&src->region)) {
        if (self->stream != NULL) {
            device = self->stream->device;
        }
        else if (end->given.on_device != NULL) {
            device = cm_rows_device_of_numbers(end);
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

/* Check that out= has one row for each number. Returns 0, or -1 with ValueError. */
static int
check_out(const cm_row_copy *self)
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

/* Read the source and the numbers of the rows. Returns 0, or -1 with an exception. */
static int
read_taken(cm_row_copy *self, PyObject *src, PyObject *rows)
{
    cm_rows_end *end = &self->ends[CM_SRC];
    if (!cm_operand_is_memory(self->state, src)) { /* a list, for example */
        return cm_arg_refuse(src, "src",
                             "a buffer or an array, such as numpy.asarray(src)");
    }
    if (cm_rows_end_begin(end, src) < 0 || cm_rows_read_end(self, CM_SRC) < 0
        || cm_rows_take_numbers(self, CM_SRC, rows) < 0) {
        return -1;
    }
    return 0;
}

/* The arguments of take_rows(), by their places. */
enum { TAKEN, ROWS, OUT, TAKE_STREAM, TAKE_MAX_SMS, TAKE_PROGRESS, TAKE_COUNT };

/* Do the work of take_rows(src, rows, out, ...). Returns the target, or NULL with an
 * exception. */
static PyObject *
take_given(cm_call_frame *frame, PyObject *const *values)
{
    PyObject *out = values[OUT];
    cm_row_copy *self = begin_call(frame, "take_rows", true);
    if (self == NULL) {
        return NULL;
    }
    PyObject *target = NULL;
    PyObject *done = NULL;
    self->ends[CM_DST].name = "out";
    self->ends[CM_SRC].numbers_name = "rows";
    self->stream_argument = values[TAKE_STREAM];
    if (cm_state_runtime(self->state) == NULL
        || cm_rows_read_max_sms(self, values[TAKE_MAX_SMS]) < 0
        || read_taken(self, values[TAKEN], values[ROWS]) < 0) {
        goto end;
    }
    target = cm_arg_is_given(out) ? Py_NewRef(out) : allocate_target(self);
    if (target == NULL || cm_rows_end_begin(&self->ends[CM_DST], target) < 0
        || cm_rows_read_end(self, CM_DST) < 0 || cm_rows_check_layers(self) < 0
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
    static const char *const names[] = {"src",     "rows",     "out", "stream",
                                        "max_sms", "progress", NULL};
    PyObject *values[TAKE_COUNT];
    PyObject *answer = NULL;
    cm_call_frame frame;
    cm_state *state = cm_state_of_module(module);
    if (cm_args_parse("take_rows", args, nargs, kwnames, names, 3, 2, values) < 0) {
        return NULL;
    }
    PyObject *out = cm_arg_is_given(values[OUT]) ? values[OUT] : values[TAKEN];
    PyObject *stream = values[TAKE_STREAM];
    int device = cm_device_hint_of(state, out, values[TAKEN], stream, 0);
    if (cm_call_enter(&frame, state, stream, device, values[TAKE_PROGRESS], "copy")
        == 0) {
        answer = take_given(&frame, values);
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
