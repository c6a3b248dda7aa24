/* SPDX-License-Identifier: Apache-2.0 */
/* Copies rows by a kernel. A call names the rows by their numbers, and the kernel reads
 * these numbers itself.
 *
 * The idea
 * --------
 * The kernel runs on a device that reaches all arrays, and reads the numbers in the
 * order of the stream (routes/kernel_rows.h). The host only describes the arrays. If
 * the numbers lie on a device, the host could not read them here without waiting for
 * the stream. So their buffer becomes an end of the call, which means that the call
 * keeps the buffer alive and comes after earlier work on it, as it does for the source.
 * If the host has the numbers, it checks them and writes them to page-locked memory,
 * where the kernel finds them (rows/kernel_numbers.h). This memory is an end of the
 * call, too. So it stays allocated until the copy is done or, if a graph has captured
 * the copy, as long as the graph exists.
 *
 * Only the kernel sees whether a number on a device names a row. If a number names no
 * row, the kernel leaves that row out and says so in a word of page-locked memory,
 * which the ticket of the copy reads. A copy in a graph has no such word, since its
 * ticket is done before the graph runs. But if the copy belongs to a RowPlan, the plan
 * has a word of its own, and in a graph the kernel writes to this word (row_plan.c).
 *
 * If the numbers lie on a device, the host does not know which rows will be written. So
 * if arrays of the source and of the target have bytes in common, the rows count as
 * overlapping, and two kernels copy them. The first kernel gathers the rows of the
 * source in packed memory, where they lie one after the other. The second kernel writes
 * them to the target. The second kernel is given the numbers of the source as well, so
 * that it leaves out the rows whose numbers were wrong, which the first kernel has not
 * gathered.
 *
 * If the host has the numbers and source and target are the same array, the numbers
 * tell whether a row is both read and written. If the arrays have bytes in common in
 * another way, the numbers do not tell, and rows.c copies the rows as runs of bytes,
 * which it compares.
 *
 * If no device reaches all ends, for example because one of them is ordinary memory,
 * the host fetches the numbers and waits for them (cm_rows_fetch_numbers()). The same
 * happens if the copy may write to the memory of the numbers themselves, or if the
 * kernel cannot read the numbers because they are not aligned or are in the other byte
 * order. */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/copy/rows_call.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "transfer/rows/written_numbers.h"

/* -- which device ------------------------------------------------------------------- */

static cm_buffer *
numbers_of(const cm_rows_end *end)
{
    return (cm_buffer *)(void *)end->given.on_device;
}

int
cm_rows_device_of_numbers(const cm_rows_end *end)
{
    return numbers_of(end)->storage->device;
}

/* True if a kernel can read the numbers of an end. It can if they are aligned and in
 * the processor's byte order. */
static bool
are_readable(const cm_rows_end *end)
{
    cm_region region;
    if (end->given.on_device == NULL) {
        return true;
    }
    cm_buffer_region(numbers_of(end), &region);
    return cm_numpy_plain_kind(numbers_of(end)->dtype) != 0
           && region.address % (uint64_t)region.itemsize == 0
           && region.strides[0] % region.itemsize == 0;
}

/* Set *out to region `index` of the call. First come the arrays of the target, then
 * those of the source, then the numbers. Returns false if there is no such region. */
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
    if (end->given.on_device != NULL) {
        cm_buffer_region(numbers_of(end), out);
    }
    return end->given.on_device != NULL;
}

/* True if a kernel of the device reaches all arrays and all numbers that lie on a
 * device. Needs no GIL. */
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

/* True if a row that is written may touch the numbers. Needs no GIL. */
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

/* Return a device that reaches all arrays and numbers, or -1 if there is none. The
 * device of the stream is tried first, and then each device that has an array or
 * numbers of the call. Needs no GIL. */
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

/* Do the same as find_reaching(), but return -1 if the device cannot load the kernel
 * and the host has all numbers, since the copy engine then copies the rows. Numbers on
 * a device leave no such choice, so the device is returned all the same. Needs no GIL.
 */
static int
find_able(const cm_row_copy *self, cm_engine *engine)
{
    int device = find_reaching(self, engine);
    bool is_able =
        device >= 0
        && (cm_rows_are_on_device(self) || cm_kernel_rows_can_load(engine, device));
    return is_able ? device : -1;
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
    *device = CM_WITHOUT_GIL(find_able(self, engine));
    return *device >= 0;
}

/* -- by the host after all ---------------------------------------------------------- */

/* Make a tuple of the streams whose work may still write the numbers. They are the
 * stream that was given as stream= and those that were given as after=. *out is NULL if
 * none was given. Returns 0, or -1 with an exception. */
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
        if (end->given.on_device != NULL) {
            result = cm_given_rows_fetch(&end->given, self->state, end->numbers_name,
                                         before);
        }
    }
    Py_XDECREF(before);
    return result;
}

/* -- what is prepared ---------------------------------------------------------------- */

/* This file calls a cm_rows_kernel a kernel_call. A plan has one such struct, which
 * says what is prepared for all of its copies. Each copy works on a copy of the struct
 * (rows_call.h). */
typedef cm_rows_kernel kernel_call;

/* If a call has more layers than this, or more numbers than CM_ROWS_MANY_NUMBERS, the
 * GIL is released while the layers and the numbers are compared. A layer is one pair of
 * arrays (rows/layers.h). */
enum { MANY_LAYERS = 16 };

static bool
are_of_host(const kernel_call *self, cm_side side)
{
    return self->copy->ends[side].given.array != NULL;
}

/* Make the sheet, which is one buffer for the numbers of both ends. It has room for the
 * numbers that the host has. *sheet is a new reference to this buffer, or NULL if the
 * host has no numbers. Returns 0, or -1 with an exception. */
static int
begin_sheet(kernel_call *self, PyObject **sheet)
{
    cm_region region;
    cm_address addresses[2] = {0, 0};
    *sheet = NULL;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        cm_kernel_numbers *known = &self->known[side];
        *known = (cm_kernel_numbers){.count = self->copy->ends[side].numbers.count};
        if (are_of_host(self, side)) {
            known->nbytes =
                cm_kernel_numbers_nbytes(cm_rows_shortest(self->copy, side));
        }
    }
    if (self->known[CM_DST].count * self->known[CM_DST].nbytes == 0
        && self->known[CM_SRC].count * self->known[CM_SRC].nbytes == 0) {
        return 0;
    }
    *sheet = cm_many_allocate_sheet(self->copy->state, self->device, self->known,
                                    addresses, &region);
    if (*sheet == NULL) {
        return -1;
    }
    self->sheet = region.address;
    self->sheet_nbytes = (uint64_t)region.shape[0];
    for (int side = CM_DST; side <= CM_SRC; side++) {
        uint32_t nbytes = self->known[side].nbytes;
        if (are_of_host(self, side)) {
            self->read[side] = (cm_row_numbers){.address = addresses[side],
                                                .stride = (int64_t)nbytes,
                                                .nbytes = nbytes,
                                                .is_signed = true};
        }
    }
    return 0;
}

/* Set *out to whether a row of the target is named twice. A negative number counts from
 * the end of an array, so it means different rows in arrays of different lengths. If
 * there are such numbers, the check is made for each length. */
static cm_status
find_twice(const kernel_call *self, bool *out)
{
    int64_t before = -1;
    const cm_kernel_numbers *known = &self->known[CM_DST];
    *out = false;
    for (Py_ssize_t i = 0; i < self->copy->layer_count && !*out; i++) {
        int64_t rows = self->copy->ends[CM_DST].operands[i].region.shape[0];
        if (rows != before && (before < 0 || known->has_negative)) {
            CM_TRY(cm_kernel_numbers_find_twice(known, rows, out));
        }
        before = rows;
    }
    return cm_ok();
}

/* True if no numbers were given for an end, so that its rows are 0, 1, …, and the copy
 * has more rows than the shortest array of the end. Returns false for an end with
 * numbers of its own, because write_numbers() checks those that the host has, and the
 * kernel checks those on a device. */
static bool
are_too_many(const kernel_call *self, cm_side side)
{
    const cm_rows_end *end = &self->copy->ends[side];
    return !are_of_host(self, side) && end->given.on_device == NULL
           && end->numbers.count > (uint64_t)cm_rows_shortest(self->copy, side);
}

/* Describe the numbers of an end to cm_numbers_write_both(). */
static cm_numbers_side
side_of(kernel_call *self, cm_side side)
{
    const cm_rows_end *end = &self->copy->ends[side];
    if (!are_of_host(self, side)) {
        return (cm_numbers_side){.to = NULL};
    }
    cm_integers from = cm_given_rows_integers(&end->given);
    if (end->numbers.given != NULL) {
        from = (cm_integers){.first = (const char *)end->numbers.given,
                             .stride = sizeof(int64_t),
                             .nbytes = sizeof(int64_t),
                             .is_signed = true};
    }
    return (cm_numbers_side){&self->known[side], from,
                             cm_rows_shortest(self->copy, side)};
}

/* Write the numbers of both sides to the sheet. Sets *right to whether each of them
 * names a row, and no two of them name the same row of the target. Needs no GIL. */
static cm_status
write_and_check(const kernel_call *self, cm_engine *engine,
                const cm_numbers_side sides[2], bool *right)
{
    cm_numbers_finding finding;
    bool is_twice = false;
    CM_TRY(cm_numbers_write_both(engine, sides, &finding));
    if (finding == CM_NUMBERS_IN_RANGE) {
        CM_TRY(find_twice(self, &is_twice));
    }
    *right = finding != CM_NUMBERS_WRONG && !is_twice;
    return cm_ok();
}

/* Write the numbers that the host has to the sheet. Returns 1, 0 if any of them is
 * wrong, or -1 with an exception. */
static int
write_numbers(kernel_call *self)
{
    bool right = false;
    if (are_too_many(self, CM_DST) || are_too_many(self, CM_SRC)) {
        return 0;
    }
    const cm_numbers_side sides[2] = {side_of(self, CM_DST), side_of(self, CM_SRC)};
    cm_engine *engine = cm_state_engine(self->copy->state, -1);
    if (engine == NULL) {
        return -1;
    }
    bool is_long = self->copy->ends[CM_SRC].numbers.count > CM_ROWS_MANY_NUMBERS;
    cm_status status =
        is_long ? CM_WITHOUT_GIL(write_and_check(self, engine, sides, &right))
                : write_and_check(self, engine, sides, &right);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->copy->state, status, "while reading rows");
    }
    return right;
}

/* Look for the number that is wrong, layer by layer, and refuse it. The numbers are
 * copied before the search, since somebody may be changing them. If none of the copied
 * numbers is wrong, the copied numbers are written to the sheet. Returns 0, or -1 with
 * an exception. */
static int
refuse_numbers(kernel_call *self)
{
    cm_row_copy *copy = self->copy;
    if (cm_rows_keep_numbers(copy) < 0) {
        return -1;
    }
    for (Py_ssize_t layer = 0; layer < copy->layer_count; layer++) {
        for (int side = CM_DST; side <= CM_SRC; side++) {
            if (copy->ends[side].given.on_device == NULL
                && cm_rows_settle(copy, layer, side) < 0) {
                return -1;
            }
        }
    }
    return write_numbers(self) < 0 ? -1 : 0;
}

/* Make an operand of the memory in which the kernel finds the numbers of one end, so
 * that each pass can add this memory to the ends of its request. Returns 0, or -1 with
 * an exception. */
static int
add_memory(kernel_call *self, cm_side side, PyObject *sheet)
{
    const cm_rows_end *end = &self->copy->ends[side];
    cm_operand *memory = &self->memory[side];
    PyObject *buffer = are_of_host(self, side) ? sheet : end->given.on_device;
    if (buffer == NULL) {
        return 0;
    }
    if (cm_operand_init(self->copy->state, memory, buffer, NULL, self->copy->stream,
                        CM_ASK)
        < 0) {
        return -1;
    }
    self->has_memory[side] = true;
    if (end->given.on_device != NULL) {
        self->read[side] =
            (cm_row_numbers){.address = memory->region.address,
                             .stride = memory->region.strides[0],
                             .nbytes = (uint32_t)memory->region.itemsize,
                             .is_signed = cm_numpy_letter(memory->dtype) == 'i'};
    }
    return 0;
}

/* Put the numbers of both ends where the kernel reads them, and check those that the
 * host has. Returns 0, or -1 with an exception. */
static int
begin_numbers(kernel_call *self)
{
    PyObject *sheet;
    if (begin_sheet(self, &sheet) < 0) {
        return -1;
    }
    int right = write_numbers(self);
    int result = right == 0 ? refuse_numbers(self) : right;
    if (result >= 0 && add_memory(self, CM_DST, sheet) == 0) {
        result = add_memory(self, CM_SRC, sheet);
    }
    else {
        result = -1;
    }
    Py_XDECREF(sheet);
    return result;
}

int
cm_rows_kernel_init(cm_rows_kernel *self, cm_row_copy *copy, int device)
{
    *self = (cm_rows_kernel){.copy = copy, .device = device};
    return begin_numbers(self);
}

void
cm_rows_kernel_fini(cm_rows_kernel *self)
{
    for (int side = CM_DST; side <= CM_SRC; side++) {
        if (self->has_memory[side]) {
            cm_operand_fini(&self->memory[side]);
        }
    }
    if (self->word != NULL) {
        cm_operand_fini(self->word);
        PyMem_Free(self->word);
    }
}

/* Make a word of page-locked memory that both the kernel and the host write. Returns a
 * new reference to its buffer, or NULL with an exception. */
static PyObject *
allocate_word(const kernel_call *self)
{
    cm_region region;
    PyObject *buffer =
        cm_many_allocate_mapped(self->copy->state, self->device, 'I', 1, &region);
    if (buffer != NULL) {
        memset(region.host, 0, sizeof(uint32_t));
    }
    return buffer;
}

int
cm_rows_kernel_add_word(cm_rows_kernel *self)
{
    if (!cm_rows_are_on_device(self->copy)) {
        return 0;
    }
    cm_operand *word = PyMem_Malloc(sizeof(*word));
    PyObject *buffer = word == NULL ? PyErr_NoMemory() : allocate_word(self);
    if (buffer != NULL
        && cm_operand_init(self->copy->state, word, buffer, NULL, NULL, CM_ASK) == 0) {
        self->word = word;
        word = NULL;
    }
    Py_XDECREF(buffer);
    PyMem_Free(word);
    return self->word == NULL ? -1 : 0;
}

/* -- one copy ----------------------------------------------------------------------- */

/* Make the word into which the kernel writes whether a number was wrong, unless nobody
 * would read it. Returns 0, or -1 with an exception. */
static int
begin_flag(kernel_call *self)
{
    bool capturing = false;
    if (!cm_rows_are_on_device(self->copy)) {
        return 0; /* all numbers have been checked */
    }
    cm_status status = cm_call_ask_capturing(self->copy->stream, &capturing);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->copy->state, status, "while copying rows");
    }
    if (capturing) {
        return 0;
    }
    self->flag = allocate_word(self);
    return self->flag == NULL ? -1 : 0;
}

/* -- a pass ------------------------------------------------------------------------- */

/* One pass copies all layers by one request to the engine. The struct must not be
 * moved, since `many` must not be (many.h). */
typedef struct kernel_pass {
    cm_many_call many;
    cm_rows_end *ends[2]; /* borrowed, by cm_side */
    bool reads_dst_rows;  /* otherwise the rows of the target are 0, 1, … */
    bool is_packed;       /* the source is what the first pass has gathered */
    bool is_last;         /* this pass shows progress, and notes wrong numbers */
    bool in_order;
} kernel_pass;

/* Tell the kernel where the numbers of one end are, and make their memory an end of the
 * call. Returns 0, or -1 with an exception. */
static int
add_numbers(const kernel_call *self, kernel_pass *pass, cm_side side)
{
    const cm_operand *memory = &self->memory[side];
    if (!self->has_memory[side] || (side == CM_DST && !pass->reads_dst_rows)) {
        return 0;
    }
    pass->many.request.common.rows->move.numbers[side] = self->read[side];
    return cm_many_call_add_end(&pass->many, memory, &memory->region, false);
}

/* Arrange for wrong numbers to be noted in the word of a plan. Usually the ticket
 * writes the word. In a graph the kernel writes it, since the ticket is done before the
 * graph runs. The word is an end of the call, so the graph keeps it alive. Returns 0,
 * or -1 with an exception. */
static int
add_word(const kernel_call *self, kernel_pass *pass)
{
    cm_kernel_rows *rows = pass->many.request.common.rows;
    const cm_operand *word = self->word;
    rows->flag_of_all = (_Atomic uint32_t *)(void *)word->region.host;
    if (self->flag == NULL) {
        rows->move.flag = word->region.address;
    }
    return cm_many_call_add_end(&pass->many, word, &word->region, false);
}

/* Let the kernel of the last pass write to the flag if a number is wrong, and let the
 * ticket read the flag. Returns 0, or -1 with an exception. */
static int
add_flag(const kernel_call *self, kernel_pass *pass)
{
    cm_region region;
    cm_kernel_rows *rows = pass->many.request.common.rows;
    bool is_taken = strcmp(self->copy->ends[CM_SRC].numbers_name, "rows") == 0;
    if (!pass->is_last) {
        return 0;
    }
    if (self->word != NULL && add_word(self, pass) < 0) {
        return -1;
    }
    if (self->flag == NULL) {
        return 0;
    }
    cm_buffer_region((cm_buffer *)(void *)self->flag, &region);
    rows->move.flag = region.address;
    rows->flag = region.host;
    rows->flag_bits = is_taken ? CM_ROWS_WRONG_TAKEN : 0;
    return PyList_Append(pass->many.owners, self->flag);
}

/* Add the arrays of a layer. If the source is packed memory, the numbers still name
 * rows of the array from which the packed rows were gathered. So the kernel is told how
 * many rows that array has. Returns 0, or -1 with an exception. */
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

/* Make the request of a pass. Returns 0, or -1 with an exception. */
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
    rows->sheet = self->sheet;
    rows->sheet_nbytes = self->sheet_nbytes;
    for (Py_ssize_t layer = 0; layer < copy->layer_count; layer++) {
        if (add_layer(self, pass, layer) < 0) {
            return -1;
        }
    }
    if (add_numbers(self, pass, CM_DST) < 0 || add_numbers(self, pass, CM_SRC) < 0
        || add_flag(self, pass) < 0) {
        return -1;
    }
    many->first_device = self->device; /* the call takes the current stream of this
                                          device, and the Transfer names it */
    return cm_rows_come_after_given(copy, &many->call);
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

/* Gather the rows of the source into the packed memory. *out is the ticket of this
 * pass, which the caller owns. It is NULL if the call is blocking, since the rows are
 * then in the packed memory already. Returns 0, or -1 with an exception. */
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

/* Make the last pass, which reads `src`. Returns None or a Transfer, or NULL with an
 * exception. */
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

/* Copy in one pass, or in two through packed memory if the ends touch. Returns None or
 * a Transfer, or NULL with an exception. */
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
        cm_ticket_release(gathered); /* the second ticket also tells whether the first
                                        pass failed */
    }
    return answer;
}

/* True if negative numbers that the host has mean different rows in different layers.
 */
static bool
differ_by_layer(const kernel_call *self)
{
    const cm_row_copy *copy = self->copy;
    int64_t rows = copy->ends[CM_DST].operands[0].region.shape[0];
    bool do_differ = false;
    for (Py_ssize_t i = 1; i < copy->layer_count; i++) {
        do_differ = do_differ || copy->ends[CM_DST].operands[i].region.shape[0] != rows;
    }
    return do_differ
           && (self->known[CM_DST].has_negative || self->known[CM_SRC].has_negative);
}

/* Compare the numbers of the rows that are read with the numbers of the rows that are
 * written, for arrays that have bytes in common. Sets *out to whether the numbers can
 * tell whether such rows touch. If they can, sets *touches to the answer. Needs no GIL.
 */
static cm_status
compare_rows(const kernel_call *self, cm_rows_end *const ends[2], bool *touches,
             bool *out)
{
    const cm_row_copy *copy = self->copy;
    *out = false;
    if (cm_rows_are_on_device(copy) || differ_by_layer(self)) {
        return cm_ok();
    }
    CM_TRY(cm_rows_are_in_place(copy->state->runtime, ends, copy->layer_count, out));
    if (!*out) {
        return cm_ok();
    }
    int64_t rows = ends[CM_DST]->operands[0].region.shape[0];
    return cm_kernel_numbers_find_shared(&self->known[CM_DST], &self->known[CM_SRC],
                                         rows, touches);
}

/* Set *touches to whether rows that are written may touch rows that are read, and
 * *is_known to false if the arrays have bytes in common but the numbers cannot tell.
 * The rows then count as touching. Needs no GIL. */
static cm_status
find_touch(const kernel_call *self, bool *touches, bool *is_known)
{
    const cm_row_copy *copy = self->copy;
    cm_rows_end *const ends[2] = {&self->copy->ends[CM_DST], &self->copy->ends[CM_SRC]};
    *is_known = true;
    CM_TRY(cm_rows_find_meeting_arrays(copy->state->runtime, ends, copy->layer_count,
                                       touches));
    return *touches ? compare_rows(self, ends, touches, is_known) : cm_ok();
}

/* Copy in one pass or in two. Returns what cm_rows_copy_by_kernel() returns. */
static int
copy_by_kernel(const kernel_call *self, PyObject **answer)
{
    bool touches = false;
    bool is_known = true;
    cm_row_copy *copy = self->copy;
    bool is_long = copy->ends[CM_SRC].numbers.count > CM_ROWS_MANY_NUMBERS
                   || copy->layer_count > MANY_LAYERS;
    cm_status status = is_long ? CM_WITHOUT_GIL(find_touch(self, &touches, &is_known))
                               : find_touch(self, &touches, &is_known);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(copy->state, status, "while comparing rows");
    }
    if (!is_known && !cm_rows_are_on_device(copy) && copy->max_sms == 0) {
        return 0;
    }
    kernel_pass *passes = PyMem_Calloc(2, sizeof(*passes));
    if (passes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *answer = copy_in_passes(self, passes, touches);
    for (int i = 0; i < 2; i++) {
        cm_many_call_fini(&passes[i].many);
    }
    PyMem_Free(passes);
    return *answer == NULL ? -1 : 1;
}

/* True if the numbers show that the copy engine moves the rows at least as fast as the
 * kernel would. Needs no GIL. */
static bool
suits_engine(const kernel_call *self)
{
    const cm_row_copy *copy = self->copy;
    if (cm_rows_are_on_device(copy) || copy->max_sms != 0) {
        return false;
    }
    cm_layer first = cm_rows_layer_of(copy, 0);
    return cm_rows_suit_engine(&first, (uint64_t)copy->layer_count,
                               copy->ends[CM_SRC].numbers.count, self->known);
}

int
cm_rows_copy_by_kernel(cm_rows_kernel *self, PyObject **answer)
{
    if (suits_engine(self)) {
        return 0;
    }
    int result = begin_flag(self) < 0 ? -1 : copy_by_kernel(self, answer);
    Py_CLEAR(self->flag);
    return result;
}
