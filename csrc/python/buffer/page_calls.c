/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the spans of buffers, or one span for each row, and makes the calls of the
 * driver for them. */
#include "python/buffer/page_calls.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "base/machine.h"
#include "base/nvtx.h"
#include "python/core/errors.h"

/* -- spans --------------------------------------------------------------------------------- */

enum { FEW_SPANS = 4 };

/* The spans that a call is for. The driver takes their addresses and their sizes as two
 * arrays. */
typedef struct span_list {
    cm_address *addresses; /* `few`, or owned beyond FEW_SPANS */
    uint64_t *nbytes;      /* behind the addresses, in the same memory */
    uint64_t count;
    uint64_t total; /* bytes of all spans together */
    uint64_t few[2 * FEW_SPANS];
} span_list;

/* Prepare a list for `most` spans. Returns 0, or -1 with MemoryError. */
static int
span_list_init(span_list *spans, uint64_t most)
{
    spans->count = spans->total = 0;
    spans->addresses = spans->few;
    if (most > FEW_SPANS) {
        spans->addresses = calloc(most, 2 * sizeof(*spans->nbytes));
    }
    if (spans->addresses == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    spans->nbytes = spans->addresses + (most > FEW_SPANS ? most : FEW_SPANS);
    return 0;
}

static void
span_list_fini(span_list *spans)
{
    if (spans->addresses != spans->few) {
        free(spans->addresses);
    }
}

static void
span_list_add(span_list *spans, cm_address address, uint64_t nbytes)
{
    if (nbytes > 0) {
        spans->addresses[spans->count] = address;
        spans->nbytes[spans->count] = nbytes;
        spans->count++;
        spans->total += nbytes;
    }
}

int
cm_pages_find_span(const cm_buffer *self, cm_address *address, uint64_t *nbytes)
{
    int64_t low, high;
    if (cm_buffer_check_open(self) < 0 || cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    *address = cm_buffer_address(self) + (uint64_t)low;
    *nbytes = (uint64_t)(high - low);
    return 0;
}

/* Shrink a span to its whole pages, because other memory may lie on its first and its
 * last page. */
static void
keep_whole_pages(cm_address *address, uint64_t *nbytes)
{
    uint64_t page = cm_page_nbytes();
    cm_address begin = cm_round_up_to(*address, page);
    cm_address end = (*address + *nbytes) & ~(page - 1);
    *address = begin;
    *nbytes = begin < end ? end - begin : 0;
}

/* -- parts without gaps -------------------------------------------------------------------- */

/* Says how a buffer is cut into parts that have no other bytes between their elements.
 * All parts look the same, and there is one for each index of the first axes. */
typedef struct row_cut {
    /* How many of the first axes are stepped through; 0 if there is only one part. */
    int axis_count;
    uint64_t count; /* how many parts there are */
    int64_t low;    /* the lowest byte of a part, from its first element */
    uint64_t nbytes;
} row_cut;

/* Measure the part that the axes from `axis` on form. The buffer must have elements. */
static void
measure_part(const cm_buffer *self, int axis, row_cut *cut, uint64_t *element_nbytes)
{
    int64_t high = self->itemsize;
    cut->low = 0;
    *element_nbytes = (uint64_t)self->itemsize;
    for (int i = axis; i < self->ndim; i++) {
        int64_t length = cm_buffer_shape(self)[i];
        int64_t reach = (length - 1) * cm_buffer_strides(self)[i];
        *element_nbytes *= (uint64_t)length;
        if (reach < 0) {
            cut->low += reach;
        }
        else {
            high += reach;
        }
    }
    cut->nbytes = (uint64_t)(high - cut->low);
}

static row_cut
cut_into_rows(const cm_buffer *self)
{
    row_cut cut = {.count = 1};
    uint64_t element_nbytes;
    measure_part(self, 0, &cut, &element_nbytes);
    while (cut.nbytes != element_nbytes && self->ndim - cut.axis_count >= 2) {
        cut.count *= (uint64_t)cm_buffer_shape(self)[cut.axis_count];
        cut.axis_count++;
        measure_part(self, cut.axis_count, &cut, &element_nbytes);
    }
    return cut;
}

/* Add the span of each part, in the order of C arrays. */
static void
add_rows(span_list *spans, const cm_buffer *self, const row_cut *cut)
{
    int64_t index[CM_MAX_NDIM] = {0};
    cm_address place = cm_buffer_address(self) + (uint64_t)cut->low;
    for (uint64_t i = 0; i < cut->count; i++) {
        span_list_add(spans, place, cut->nbytes);
        for (int axis = cut->axis_count - 1; axis >= 0; axis--) {
            int64_t stride = cm_buffer_strides(self)[axis];
            int64_t length = cm_buffer_shape(self)[axis];
            if (++index[axis] < length) {
                place += (uint64_t)stride;
                break;
            }
            index[axis] = 0;
            place -= (uint64_t)((length - 1) * stride);
        }
    }
}

/* -- the calls ----------------------------------------------------------------------------- */

static cm_status
submit(cm_runtime *rt, const cm_page_call *call, const span_list *spans)
{
    uint64_t stream = call->stream == NULL ? 0 : call->stream->handle;
    if (call->work == CM_PAGES_DISCARD) {
        return cm_rt_discard_batch_async(rt, spans->addresses, spans->nbytes,
                                         spans->count, stream);
    }
    if (call->work == CM_PAGES_PREFETCH && spans->count > 1 && stream > CM_STREAM_LEGACY
        && cm_runtime_has(rt, CM_OP_prefetch_batch_async)) {
        return cm_rt_prefetch_batch_async(rt, spans->addresses, spans->nbytes,
                                          spans->count, call->location, stream);
    }
    for (uint64_t i = 0; i < spans->count; i++) {
        cm_address address = spans->addresses[i];
        uint64_t nbytes = spans->nbytes[i];
        CM_TRY(call->work == CM_PAGES_ADVISE
                   ? cm_rt_advise(rt, address, nbytes, call->advice, call->location)
                   : cm_rt_prefetch_async(rt, address, nbytes, call->location, stream));
    }
    return cm_ok();
}

/* Replace a refusal by CM_EMANAGED if the reason is that the device cannot share
 * managed memory with the host. The driver only says "invalid device". */
static cm_status
explained(cm_runtime *rt, int device, cm_status status)
{
    int concurrent = 1;
    bool refused =
        status.code == CM_CUDA_INVALID_DEVICE || status.code == CM_CUDA_NOT_SUPPORTED;
    if (refused
        && cm_is_ok(cm_rt_device_attribute(rt, CM_ATTRIBUTE_concurrent_managed_access,
                                           device, &concurrent))
        && concurrent == 0) {
        status.code = CM_EMANAGED;
    }
    return status;
}

static void
record_prefetch(const cm_page_call *call, const span_list *spans)
{
    uint8_t kind = cm_kind_in_event(CM_KIND_MANAGED);
    int device = call->location < 0 ? -1 : call->location;
    for (uint64_t i = 0; i < spans->count; i++) {
        cm_event event = {.op = CM_EVENT_PREFETCH,
                          .address = spans->addresses[i],
                          .nbytes = spans->nbytes[i],
                          .stream = call->stream->handle,
                          .kind = kind,
                          .source_kind = kind,
                          .device = (int8_t)device};
        cm_recorder_note_here(event);
    }
}

/* Let one of the buffers, which is kept open, join the call. Returns 0, or -1 with an
 * exception. */
static int
add_buffer(const cm_page_call *call, cm_buffer *buffer, span_list *spans)
{
    cm_storage *storage = buffer->storage;
    cm_stream *stream = call->stream;
    cm_stream *user = call->follower != NULL ? call->follower : stream;
    uint64_t before = spans->count;
    cm_address address;
    uint64_t nbytes;
    if (call->work == CM_PAGES_DISCARD
        && cm_storage_order_handle(storage, stream->device, stream->handle) < 0) {
        return -1;
    }
    if (cm_pages_find_span(buffer, &address, &nbytes) < 0) {
        return -1;
    }
    if (call->by_rows && nbytes > 0) {
        row_cut cut = cut_into_rows(buffer);
        add_rows(spans, buffer, &cut);
    }
    else {
        if (call->work == CM_PAGES_DISCARD) {
            keep_whole_pages(&address, &nbytes);
        }
        span_list_add(spans, address, nbytes);
    }
    if (user != NULL && spans->count > before
        && cm_storage_add_use(storage, user) < 0) {
        return -1;
    }
    if (call->work == CM_PAGES_ADVISE) {
        storage->is_advised = true;
        storage->side_turns = 0; /* what thrashing.c asks the driver may now have
                                    another answer */
    }
    return 0;
}

/* Make the call itself. Returns 0, or -1 with CudaError. */
static int
run(cm_state *state, const cm_page_call *call, int home, const span_list *spans)
{
    static const char *const doing[] = {
        [CM_PAGES_PREFETCH] = "while prefetching managed memory",
        [CM_PAGES_DISCARD] = "while discarding managed memory",
        [CM_PAGES_ADVISE] = "while advising managed memory",
    };
    cm_runtime *rt = state->runtime;
    CM_NVTX(doing[call->work] + sizeof("while"), spans->total);
    cm_status status = CM_WITHOUT_GIL(CM_ON_DEVICE(rt, home, submit(rt, call, spans)));
    if (call->work == CM_PAGES_PREFETCH && cm_is_ok(status) && cm_recorder_is_on()) {
        record_prefetch(call, spans);
    }
    status = explained(rt, call->location >= 0 ? call->location : home, status);
    return cm_py_check(state, status, doing[call->work]);
}

/* Submit the call for buffers that are kept open. Returns 0, or -1 with an
 * exception. */
static int
submit_pinned(cm_state *state, const cm_page_call *call, cm_buffer *const *buffers,
              Py_ssize_t buffer_count)
{
    uint64_t most = (uint64_t)buffer_count;
    if (call->by_rows && cm_buffer_nbytes(buffers[0]) > 0) {
        most = cut_into_rows(buffers[0]).count;
    }
    span_list spans;
    if (span_list_init(&spans, most) < 0) {
        return -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; i < buffer_count && result == 0; i++) {
        result = add_buffer(call, buffers[i], &spans);
    }
    if (result == 0 && spans.count > 0) {
        int home =
            call->stream != NULL ? call->stream->device : buffers[0]->storage->device;
        result = run(state, call, home, &spans);
    }
    span_list_fini(&spans);
    return result;
}

int
cm_pages_submit(cm_state *state, const cm_page_call *call, cm_buffer *const *buffers,
                Py_ssize_t buffer_count)
{
    if (cm_state_runtime(state) == NULL) {
        return -1;
    }
    cm_state_enter(state); /* looking at the buffers may run Python code */
    for (Py_ssize_t i = 0; i < buffer_count; i++) {
        cm_storage_keep_open(buffers[i]->storage);
    }
    int result = submit_pinned(state, call, buffers, buffer_count);
    for (Py_ssize_t i = 0; i < buffer_count; i++) {
        cm_storage_allow_close(buffers[i]->storage);
    }
    cm_state_leave(state);
    return result;
}

int
cm_pages_ask(const cm_buffer *self, uint64_t begin, uint64_t end, int attribute,
             int *out, int count)
{
    cm_state *state = self->state;
    cm_storage *storage = self->storage;
    cm_runtime *rt = cm_state_runtime(state);
    cm_address address;
    uint64_t nbytes;
    if (rt == NULL) {
        return -1;
    }
    cm_state_enter(state); /* looking at the buffer may run Python code */
    int result = cm_pages_find_span(self, &address, &nbytes);
    end = result == 0 && end > nbytes ? nbytes : end;
    if (result == 0 && begin < end) {
        cm_storage_keep_open(storage);
        cm_status status = CM_WITHOUT_GIL(
            CM_ON_DEVICE(rt, storage->device,
                         cm_rt_range_attribute(rt, address + begin, end - begin,
                                               attribute, out, count)));
        cm_storage_allow_close(storage);
        result = cm_py_check(state, status, "while asking about managed memory");
    }
    cm_state_leave(state);
    return result;
}
