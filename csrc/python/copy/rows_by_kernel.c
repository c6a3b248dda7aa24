/* SPDX-License-Identifier: Apache-2.0 */
/* Rows whose numbers lie in memory of a device.
 *
 * The idea
 * --------
 * The numbers are computed there, and to read them here the host would have to wait for
 * the stream. So the host only describes the arrays, and a kernel of a device that
 * reaches all of them reads the numbers in the order of the stream
 * (routes/kernel_rows.h). The buffer of the numbers is an end of the call like the
 * source. If only one of two lists of numbers is on the device, the other is checked as
 * always, and put into page-locked memory, where the kernel finds it.
 *
 * Whether a number names a row is seen by the kernel alone. It leaves such a row out
 * and says so in a word of page-locked memory, which the ticket of the copy reads. A
 * graph has no such word, since its ticket is done before it runs.
 *
 * Nobody knows which rows will be written, so ends whose arrays touch count as ends
 * that overlap. They are copied by two kernels, through packed memory. The first one
 * reads the rows of the source. The second one is given the numbers of the source
 * again, so that it leaves out the rows that the first one could not read.
 *
 * If no device reaches all ends, as where ordinary memory is one of them, the host
 * fetches the numbers and waits for them (cm_rows_fetch_numbers()). The same happens if
 * the target touches the numbers themselves, or if the kernel cannot read them because
 * they are not aligned or in the other byte order. */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/copy/rows_call.h"
#include "python/copy/rows_chosen.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/allocate.h"

/* -- which device ------------------------------------------------------------------- */

static cm_buffer *
numbers_of(const cm_rows_end *end)
{
    return (cm_buffer *)(void *)end->on_device;
}

int
cm_rows_device_of_numbers(const cm_rows_end *end)
{
    return numbers_of(end)->storage->device;
}

/* True if a kernel can read the numbers: they are aligned and in this byte order. */
static bool
are_readable(const cm_rows_end *end)
{
    cm_region region;
    if (end->on_device == NULL) {
        return true;
    }
    cm_buffer_region(numbers_of(end), &region);
    return cm_numpy_plain_kind(numbers_of(end)->dtype) != 0
           && region.address % (uint64_t)region.itemsize == 0
           && region.strides[0] % region.itemsize == 0;
}

/* The region `index` of the call: first the arrays of the target, then those of the
 * source, then the numbers. False if there is none. */
static bool
region_at(const cm_row_copy *self, Py_ssize_t index, cm_region *out)
{
    Py_ssize_t count = self->layer_count;
    if (index < 2 * count) {
        const cm_rows_end *end = &self->ends[index < count ? CM_DST : CM_SRC];
        *out = end->operands[index % count].region;
        return true;
    }
    const cm_rows_end *end = &self->ends[index == 2 * count ? CM_DST : CM_SRC];
    if (end->on_device != NULL) {
        cm_buffer_region(numbers_of(end), out);
    }
    return end->on_device != NULL;
}

/* Does a kernel of the device reach everything? Needs no GIL. */
static bool
reaches_all(const cm_row_copy *self, cm_engine *engine, int device)
{
    cm_region region, beside;
    bool has_beside = false;
    Py_ssize_t count = 2 * self->layer_count + 2;
    for (Py_ssize_t i = 0; i < count && !has_beside; i++) {
        has_beside = region_at(self, i, &beside) && cm_region_is_on_device(&beside)
                     && beside.device == device;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (region_at(self, i, &region)
            && !cm_kernel_reaches(engine, device, &region,
                                  has_beside ? &beside : NULL)) {
            return false;
        }
    }
    return true;
}

/* May a row that is written touch the numbers? Needs no GIL. */
static bool
writes_numbers(const cm_row_copy *self)
{
    cm_region numbers;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        if (!region_at(self, 2 * self->layer_count + side, &numbers)) {
            continue;
        }
        for (Py_ssize_t i = 0; i < self->layer_count; i++) {
            if (cm_overlap_is_possible(self->state->runtime,
                                       &self->ends[CM_DST].operands[i].region,
                                       &numbers)) {
                return true;
            }
        }
    }
    return false;
}

/* Find the first device, beginning with that of the stream, that has a part in the call
 * and reaches everything; -1 if none does. Needs no GIL. */
static int
find_reaching(const cm_row_copy *self, cm_engine *engine)
{
    cm_region region;
    uint64_t asked = 0;
    if (writes_numbers(self)) {
        return -1;
    }
    if (self->stream != NULL && reaches_all(self, engine, self->stream->device)) {
        return self->stream->device;
    }
    for (Py_ssize_t i = 0; i < 2 * self->layer_count + 2; i++) {
        if (!region_at(self, i, &region) || !cm_region_is_on_device(&region)
            || (asked & UINT64_C(1) << region.device) != 0) {
            continue;
        }
        asked |= UINT64_C(1) << region.device;
        if (reaches_all(self, engine, region.device)) {
            return region.device;
        }
    }
    return -1;
}

int
cm_rows_find_device(cm_row_copy *self, int *device)
{
    *device = -1;
    if (!are_readable(&self->ends[CM_DST]) || !are_readable(&self->ends[CM_SRC])) {
        return 0;
    }
    cm_engine *engine = cm_state_engine(self->state, -1);
    if (engine == NULL) {
        return -1;
    }
    *device = CM_WITHOUT_GIL(find_reaching(self, engine));
    return *device >= 0;
}

/* -- by the host after all ---------------------------------------------------------- */

/* Make a tuple of the streams that the numbers come after: that of the call and those
 * of after=. *out is NULL if there are none. */
static int
streams_before(const cm_row_copy *self, PyObject **out)
{
    *out = NULL;
    bool has_stream = cm_arg_is_given(self->stream_argument);
    bool has_after = cm_arg_is_given(self->after);
    if (!has_stream && !has_after) {
        return 0;
    }
    PyObject *streams = PyList_New(0);
    int result = streams == NULL ? -1 : 0;
    if (result == 0 && has_stream) {
        result = PyList_Append(streams, self->stream_argument);
    }
    if (result == 0 && has_after) {
        bool is_list = PyTuple_Check(self->after) || PyList_Check(self->after);
        PyObject *more =
            is_list ? PySequence_Tuple(self->after) : PyTuple_Pack(1, self->after);
        Py_ssize_t end = PyList_Size(streams);
        result = more == NULL ? -1 : PyList_SetSlice(streams, end, end, more);
        Py_XDECREF(more);
    }
    if (result == 0) {
        *out = PyList_AsTuple(streams);
        result = *out == NULL ? -1 : 0;
    }
    Py_XDECREF(streams);
    return result;
}

static int
check_not_captured(const cm_row_copy *self)
{
    bool capturing = false;
    cm_status status = cm_call_ask_capturing(self->stream, &capturing);
    if (cm_is_ok(status) && capturing) {
        status = cm_fail(CM_ECAPTURING, self->stream->handle);
    }
    return cm_py_check(self->state, status,
                       "while fetching numbers of rows from a device, which the host "
                       "needs unless the device reaches both ends: pass buffers of "
                       "empty_pinned() or empty_device(), or numbers in memory of the "
                       "host");
}

int
cm_rows_fetch_numbers(cm_row_copy *self)
{
    PyObject *before;
    if (check_not_captured(self) < 0 || streams_before(self, &before) < 0) {
        return -1;
    }
    int result = 0;
    for (int side = CM_DST; result == 0 && side <= CM_SRC; side++) {
        cm_rows_end *end = &self->ends[side];
        if (end->on_device != NULL) {
            result = cm_chosen_rows_fetch(self->state, end->on_device,
                                          end->numbers_name, before, &end->numbers);
            Py_CLEAR(end->on_device);
        }
    }
    Py_XDECREF(before);
    return result;
}

/* -- numbers and the word for wrong ones -------------------------------------------- */

/* What both passes of a call share. It is not moved. */
typedef struct kernel_call {
    cm_row_copy *copy; /* borrowed */
    int device;
    cm_operand numbers[2]; /* by cm_side; those that the kernel reads */
    bool has_numbers[2];
    PyObject *flag; /* owned buffer of one uint32; NULL: wrong numbers are not noted */
} kernel_call;

/* Make a buffer of page-locked memory that the device reaches too. */
static PyObject *
allocate_mapped(const kernel_call *self, char letter, uint64_t count, cm_region *out)
{
    cm_region layout = {.ndim = 1, .shape = {(int64_t)count}};
    PyObject *dtype = cm_numpy_dtype_of_letter(letter);
    if (dtype == NULL) {
        return NULL;
    }
    PyObject *buffer = cm_buffer_allocate_kind(self->copy->state, CM_KIND_MAPPED,
                                               cm_kinds[CM_KIND_MAPPED].flags,
                                               self->device, dtype, &layout, 'C');
    Py_DECREF(dtype);
    if (buffer != NULL) {
        cm_buffer_region((cm_buffer *)(void *)buffer, out);
    }
    return buffer;
}

/* Put numbers that the host has where the kernel reads them. */
static PyObject *
upload_numbers(const kernel_call *self, const cm_chosen_rows *numbers)
{
    cm_region region;
    PyObject *buffer = allocate_mapped(self, 'q', numbers->count, &region);
    if (buffer != NULL && numbers->count > 0) {
        memcpy(region.host, numbers->given, (size_t)numbers->count * sizeof(int64_t));
    }
    return buffer;
}

/* Check the numbers that the host has, for the arrays of all layers. */
static int
check_known_numbers(const kernel_call *self, cm_side side)
{
    cm_rows_end *end = &self->copy->ends[side];
    for (Py_ssize_t layer = 0; layer < self->copy->layer_count; layer++) {
        int64_t row_count = end->operands[layer].region.shape[0];
        cm_row_fault fault = {.kind = CM_ROWS_RIGHT};
        cm_status status = CM_WITHOUT_GIL(
            cm_chosen_rows_settle(&end->numbers, row_count, side == CM_DST, &fault));
        if (!cm_is_ok(status)) {
            return cm_py_raise_int(self->copy->state, status, "while reading rows");
        }
        if (fault.kind != CM_ROWS_RIGHT) {
            return cm_rows_refuse_number(self->copy, layer, side, fault);
        }
    }
    return 0;
}

/* Read the numbers of an end as memory that the kernel reads. */
static int
begin_numbers(kernel_call *self, cm_side side)
{
    const cm_rows_end *end = &self->copy->ends[side];
    PyObject *buffer = NULL;
    if (end->on_device != NULL) {
        buffer = Py_NewRef(end->on_device);
    }
    else if (check_known_numbers(self, side) < 0) {
        return -1;
    }
    else if (end->numbers.given == NULL) {
        return 0;
    }
    else {
        buffer = upload_numbers(self, &end->numbers);
    }
    if (buffer == NULL) {
        return -1;
    }
    int result = cm_operand_init(self->copy->state, &self->numbers[side], buffer, NULL,
                                 self->copy->stream, CM_ASK);
    self->has_numbers[side] = result == 0;
    Py_DECREF(buffer);
    return result;
}

/* Make the word into which the kernel writes, unless nobody would read it. */
static int
begin_flag(kernel_call *self)
{
    cm_region region;
    bool capturing = false;
    const cm_rows_end *ends = self->copy->ends;
    if (ends[CM_DST].on_device == NULL && ends[CM_SRC].on_device == NULL) {
        return 0; /* all numbers have been checked */
    }
    cm_status status = cm_call_ask_capturing(self->copy->stream, &capturing);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->copy->state, status, "while copying rows");
    }
    if (capturing) {
        return 0;
    }
    self->flag = allocate_mapped(self, 'I', 1, &region);
    if (self->flag == NULL) {
        return -1;
    }
    memset(region.host, 0, sizeof(uint32_t));
    return 0;
}

/* -- a pass ------------------------------------------------------------------------- */

/* One launch of the kernel for all layers, which is not moved. */
typedef struct kernel_pass {
    cm_many_call many;
    cm_rows_end *ends[2]; /* borrowed, by cm_side */
    bool reads_dst_rows;  /* else the rows of the target are 0, 1, … */
    bool is_packed;       /* the source has been gathered by the pass before */
    bool is_last;         /* it shows progress, and notes wrong numbers */
    bool in_order;
} kernel_pass;

/* Describe the numbers of one end to the kernel, and make them an end of the call. */
static int
add_numbers(const kernel_call *self, kernel_pass *pass, cm_side side)
{
    const cm_operand *operand = &self->numbers[side];
    const cm_region *region = &operand->region;
    if (!self->has_numbers[side] || (side == CM_DST && !pass->reads_dst_rows)) {
        return 0;
    }
    pass->many.request.common.rows->move.numbers[side] =
        (cm_row_numbers){.address = region->address,
                         .stride = region->strides[0],
                         .nbytes = (uint32_t)region->itemsize,
                         .is_signed = cm_numpy_letter(operand->dtype) == 'i'};
    return cm_many_call_add_end(&pass->many, operand, region, false);
}

/* Let the kernel note wrong numbers, and the ticket look for them. */
static int
add_flag(const kernel_call *self, kernel_pass *pass)
{
    cm_region region;
    cm_kernel_rows *rows = pass->many.request.common.rows;
    bool is_taken = strcmp(self->copy->ends[CM_SRC].numbers_name, "rows") == 0;
    if (self->flag == NULL || !pass->is_last) {
        return 0;
    }
    cm_buffer_region((cm_buffer *)(void *)self->flag, &region);
    rows->move.flag = region.address;
    rows->flag = region.host;
    rows->flag_bits = is_taken ? CM_ROWS_WRONG_TAKEN : 0;
    return PyList_Append(pass->many.owners, self->flag);
}

/* Add the arrays of a layer. The numbers of a source that has been gathered are those
 * of the array that it was gathered from. */
static int
add_layer(const kernel_call *self, kernel_pass *pass, Py_ssize_t index)
{
    cm_layer layer;
    cm_kernel_rows *rows = pass->many.request.common.rows;
    const cm_operand *real = &self->copy->ends[CM_SRC].operands[index];
    for (int side = CM_DST; side <= CM_SRC; side++) {
        const cm_operand *operand = &pass->ends[side]->operands[index];
        layer.array[side] = operand->region;
        layer.owner[side] = operand->storage;
        if (cm_many_call_add_end(&pass->many, operand, &operand->region, side == CM_DST)
            < 0) {
            return -1;
        }
    }
    if (index == 0) {
        pass->many.request.common.dst = layer.array[CM_DST];
        pass->many.request.common.src = layer.array[CM_SRC];
    }
    uint64_t first = rows->layer_count;
    cm_status status = cm_kernel_rows_add(rows, &layer);
    for (uint64_t i = first; pass->is_packed && i < rows->layer_count; i++) {
        rows->layers[i].row_count[CM_SRC] = (uint64_t)real->region.shape[0];
    }
    return cm_py_check(self->copy->state, status, "while reading rows");
}

/* Make the request of a pass. */
static int
begin_pass(const kernel_call *self, kernel_pass *pass)
{
    cm_row_copy *copy = self->copy;
    cm_many_call *many = &pass->many;
    if (cm_many_call_init(many, copy->state, copy->blocking, copy->stream,
                          pass->is_last ? copy->progress : NULL)
        < 0) {
        return -1;
    }
    cm_kernel_rows *rows = cm_kernel_rows_create();
    many->request.common.rows = rows;
    if (rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    rows->device = self->device;
    rows->in_order = pass->in_order;
    rows->move.count = copy->ends[CM_SRC].numbers.count;
    rows->move.is_packed = pass->is_packed;
    rows->move.max_sms = copy->max_sms;
    for (Py_ssize_t layer = 0; layer < copy->layer_count; layer++) {
        if (add_layer(self, pass, layer) < 0) {
            return -1;
        }
    }
    if (add_numbers(self, pass, CM_DST) < 0 || add_numbers(self, pass, CM_SRC) < 0
        || add_flag(self, pass) < 0) {
        return -1;
    }
    many->first_device = self->device; /* whose current stream is taken, and which the
                                          Transfer names */
    return cm_call_come_after_given(&many->call, copy->after, copy->ends[CM_DST].object,
                                    copy->ends[CM_SRC].object, 1);
}

static int
run_pass(const kernel_call *self, kernel_pass *pass, cm_ticket **out)
{
    if (begin_pass(self, pass) < 0
        || cm_many_call_take_ends(&pass->many, self->copy->function) < 0) {
        return -1;
    }
    return cm_many_call_run(&pass->many, "while copying rows", out);
}

/* Gather the rows of the source into the packed memory. *out is the ticket of that,
 * which the caller owns, or NULL if all is there. */
static int
gather(const kernel_call *self, kernel_pass *pass, cm_ticket **out)
{
    cm_ticket *ticket;
    pass->ends[CM_DST] = &self->copy->between;
    pass->ends[CM_SRC] = &self->copy->ends[CM_SRC];
    *out = NULL;
    if (run_pass(self, pass, &ticket) < 0) {
        return -1;
    }
    if (self->copy->blocking) {
        cm_ticket_release(ticket);
        return 0;
    }
    if (cm_call_remember(&pass->many.call, ticket) < 0) {
        return -1;
    }
    *out = ticket;
    return 0;
}

/* Make the last pass, from `src`, and the answer. */
static PyObject *
finish(const kernel_call *self, kernel_pass *pass, cm_rows_end *src)
{
    cm_ticket *ticket;
    pass->ends[CM_DST] = &self->copy->ends[CM_DST];
    pass->ends[CM_SRC] = src;
    pass->reads_dst_rows = true;
    pass->is_last = true;
    if (run_pass(self, pass, &ticket) < 0) {
        return NULL;
    }
    return cm_many_call_answer(&pass->many, ticket, self->copy->ends[CM_DST].object,
                               self->copy->ends[CM_SRC].object);
}

/* Copy in one pass, or in two through packed memory if the ends touch. */
static PyObject *
copy_in_passes(const kernel_call *self, kernel_pass passes[2], bool touches)
{
    cm_ticket *gathered = NULL;
    if (!touches) {
        return finish(self, &passes[0], &self->copy->ends[CM_SRC]);
    }
    if (cm_rows_begin_between(self->copy, self->device) < 0
        || gather(self, &passes[0], &gathered) < 0) {
        return NULL;
    }
    passes[1].is_packed = true;
    passes[1].in_order = true;
    passes[1].many.request.common.chained_to = gathered;
    PyObject *answer = finish(self, &passes[1], &self->copy->between);
    if (gathered != NULL) {
        cm_ticket_release(gathered); /* whoever has the second asks about both */
    }
    return answer;
}

static PyObject *
copy_by_kernel(const kernel_call *self)
{
    bool touches = false;
    cm_rows_end *const ends[2] = {&self->copy->ends[CM_DST], &self->copy->ends[CM_SRC]};
    cm_status status = CM_WITHOUT_GIL(cm_rows_find_meeting_arrays(
        self->copy->state->runtime, ends, self->copy->layer_count, &touches));
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->copy->state, status, "while comparing rows");
    }
    kernel_pass *passes = PyMem_Calloc(2, sizeof(*passes));
    if (passes == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *answer = copy_in_passes(self, passes, touches);
    for (int i = 0; i < 2; i++) {
        cm_many_call_fini(&passes[i].many);
    }
    PyMem_Free(passes);
    return answer;
}

PyObject *
cm_rows_copy_by_kernel(cm_row_copy *copy, int device)
{
    kernel_call self = {.copy = copy, .device = device};
    PyObject *answer = NULL;
    if (begin_numbers(&self, CM_DST) == 0 && begin_numbers(&self, CM_SRC) == 0
        && begin_flag(&self) == 0) {
        answer = copy_by_kernel(&self);
    }
    for (int side = CM_DST; side <= CM_SRC; side++) {
        if (self.has_numbers[side]) {
            cm_operand_fini(&self.numbers[side]);
        }
    }
    Py_XDECREF(self.flag);
    return answer;
}
