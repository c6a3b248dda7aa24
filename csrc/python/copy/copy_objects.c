/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a copy between two objects. This file reads both objects and makes the request
 * for the engine. It lets the copy come after earlier work, keeps the memory alive, and
 * lets the storages remember the copy afterwards (call.h). */
#include <stdlib.h>
#include <string.h>

#include "base/nvtx.h"
#include "python/buffer/buffer_object.h"
#include "python/copy/call.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/values.h"
#include "python/device/objects.h"
#include "python/protocols/protocols.h"
#include "transfer/batch/batch.h"
#include "transfer/routes/broadcast.h"

/* One call that copies. */
typedef struct copy_call {
    cm_call call;
    PyObject *dst_object; /* borrowed */
    PyObject *src_object;
    cm_operand dst;
    cm_operand src;
    cm_copy_how how;
    uint32_t more_count;
    cm_operand *more;   /* owned array: the targets beside the first */
    cm_region *regions; /* owned array: their regions */
    cm_broadcast broadcast;
    uint64_t devices;   /* the devices of all ends, as a set of indices */
    cm_convert convert; /* how elements are converted, if they are */
    cm_copy_request request;
} copy_call;

/* -- streams and order -------------------------------------------------------------------- */

/* Return the device on which the target lies or, if the target is host memory, the
 * device on which the source lies. Returns -1 if both ends are host memory. */
static int
device_of(const copy_call *call)
{
    if (cm_kind_is_on_device(call->dst.region.kind)) {
        return call->dst.region.device;
    }
    return cm_kind_is_on_device(call->src.region.kind) ? call->src.region.device : -1;
}

/* Return the device that the handle of the copy to `dst`, a Transfer, names. This is
 * the device of the target, of the source or of the stream, in this order: the first of
 * the three that has a device decides. Returns -1 if none of them has one. */
static int
home_of(const copy_call *call, const cm_operand *dst)
{
    const cm_stream *stream = call->how.stream;
    if (cm_kind_is_on_device(dst->region.kind)) {
        return dst->region.device;
    }
    if (cm_kind_is_on_device(call->src.region.kind)) {
        return call->src.region.device;
    }
    return stream == NULL ? -1 : stream->device;
}

/* Choose the stream. If an end is device memory, a stream of a device that has neither
 * end is refused, unless the copy is one of several that begin together on that stream.
 * Returns 0, or -1 with an exception. */
static int
choose_stream(copy_call *call)
{
    int device = device_of(call);
    bool is_any = call->call.before != 0 || device < 0;
    call->devices = cm_devices_of(&call->dst.region) | cm_devices_of(&call->src.region);
    return cm_call_choose_stream(&call->call, "copy", call->how.stream,
                                 is_any ? 0 : call->devices, device);
}

/* Let the call come after earlier work on this end, and keep the end alive. The
 * operands hold the ends until the call returns. So a blocking call gives the engine
 * references of its own (keeps) only if Ctrl-C ends the call while the copy is still
 * running. Returns 0, or -1 with an exception. */
static int
take_end(copy_call *call, const cm_operand *end, bool writes)
{
    call->devices |= cm_devices_of(&end->region);
    if (cm_call_come_after_end(&call->call, end, writes) < 0) {
        return -1;
    }
    if (call->call.blocking) {
        cm_call_keep_on_request(&call->call, end);
        return 0;
    }
    return cm_call_keep(&call->call, end);
}

static int
take_ends(copy_call *call)
{
    int result = take_end(call, &call->dst, true);
    if (result == 0) {
        result = take_end(call, &call->src, false);
    }
    for (uint32_t i = 0; result == 0 && i < call->more_count; i++) {
        result = take_end(call, &call->more[i], true);
    }
    return result;
}

/* -- the call ---------------------------------------------------------------------------- */

/* Return the text with which errors about the two ends begin. */
static const char *
error_prefix(const copy_call *call)
{
    return call->how.prefix == NULL ? "copy: " : call->how.prefix;
}

/* Return whether the driver is asked what kind of memory an end is. `other` is the kind
 * of the other end. If the other end is on a device and the caller waits for the copy,
 * the driver is not asked about a short end, since asking takes longer than all other
 * work before a short copy. */
static cm_asking
asking(const copy_call *call, cm_kind other)
{
    return call->how.blocking && cm_kind_is_on_device(other) ? CM_ASK_UNLESS_SHORT
                                                             : CM_ASK;
}

/* Read the source. A value that is not memory, such as a number, is read in the
 * target's dtype. If casting= is given and the value would change in that dtype, the
 * value is read in a dtype of its own instead. The rule that casting= names then
 * decides whether the value may be converted. Returns 0, or -1 with an exception. */
static int
init_source(copy_call *call)
{
    cm_state *state = call->call.state;
    bool is_memory = !cm_arg_is_given(call->how.casting.casting)
                     || cm_operand_is_memory(state, call->src_object);
    PyObject *source = is_memory ? Py_NewRef(call->src_object)
                                 : cm_value_read_any(call->src_object, call->dst.dtype);
    int result = source == NULL ? -1
                                : cm_operand_init(state, &call->src, source,
                                                  call->dst.dtype, call->how.stream,
                                                  asking(call, call->dst.region.kind));
    Py_XDECREF(source);
    return result;
}

static int
init_ends(copy_call *call)
{
    cm_state *state = call->call.state;
    cm_stream *stream = call->how.stream;
    cm_kind src = cm_buffer_check(state, call->src_object)
                      ? ((cm_buffer *)(void *)call->src_object)->storage->kind
                      : CM_KIND_PAGEABLE;
    cm_asking asks = asking(call, src);
    if (cm_operand_init(state, &call->dst, call->dst_object, NULL, stream, asks) < 0) {
        return -1;
    }
    if (cm_check_target(error_prefix(call), &call->dst, call->dst_object) < 0) {
        return -1;
    }
    if (init_source(call) < 0) {
        return -1;
    }
    return cm_operands_lock(state, &call->dst, &call->src);
}

/* Read and check the targets beside the first. Returns 0, or -1 with an exception. */
static int
init_more(copy_call *call)
{
    uint32_t count =
        call->how.targets == NULL ? 0 : (uint32_t)PyTuple_Size(call->how.targets) - 1;
    if (count == 0) {
        return 0;
    }
    call->more = PyMem_Calloc(count, sizeof(*call->more));
    call->regions = PyMem_Calloc(count, sizeof(*call->regions));
    if (call->more == NULL || call->regions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < count; i++) {
        PyObject *object = PyTuple_GetItem(call->how.targets, i + 1);
        cm_operand *end = &call->more[call->more_count++];
        cm_region stretched;
        if (cm_operand_init(call->call.state, end, object, NULL, NULL, CM_ASK) < 0
            || cm_check_target(error_prefix(call), end, object) < 0
            || cm_operands_lock(call->call.state, end, &call->src) < 0
            || cm_check_dtypes(error_prefix(call), end, &call->dst) < 0
            || cm_check_shapes(error_prefix(call), end, &call->src, &stretched) < 0) {
            return -1;
        }
        call->regions[i] = end->region;
    }
    call->broadcast = (cm_broadcast){call->regions, count};
    call->request.broadcast = &call->broadcast;
    return 0;
}

/* Find out whether elements are converted. Most copies have ends of one dtype and ask
 * for no conversion. Returns 1 if elements are converted, 0 if not, or -1 with an
 * exception. */
static int
check_dtypes(copy_call *call)
{
    const cm_casting *how = &call->how.casting;
    bool asks = cm_arg_is_given(how->casting) || cm_arg_is_given(how->scale)
                || cm_arg_is_given(how->offset);
    if (!asks && call->dst.dtype == call->src.dtype) {
        return 0;
    }
    return cm_check_casting(&call->call, error_prefix(call), &call->dst, &call->src,
                            *how, &call->convert);
}

/* Return the number of bytes of the copy if each end is one run and no element changes,
 * or else 0. If the source is stretched to the target's shape, its run is shorter than
 * the target's, so the answer is 0 for such a copy, too. */
static uint64_t
run_nbytes_of(const copy_call *call)
{
    const cm_operand *dst = &call->dst;
    const cm_operand *src = &call->src;
    bool are_runs = call->request.convert == NULL && dst->run_nbytes == src->run_nbytes
                    && dst->region.itemsize == src->region.itemsize;
    return are_runs ? dst->run_nbytes : 0;
}

/* Read and check everything that the call needs, in the order in which it is needed.
 * Returns 0, or -1 with an exception. */
static int
init_call(copy_call *call)
{
    cm_state_enter(call->call.state);
    /* The argument after= is read before the ends. Asking another library for its
     * stream runs that library's code, which may still change the ends here. */
    if (cm_state_runtime(call->call.state) == NULL
        || cm_call_come_after_given(&call->call, call->how.after, call->dst_object,
                                    call->src_object, 0)
               < 0
        || init_ends(call) < 0) {
        return -1;
    }
    int converts = check_dtypes(call);
    if (converts < 0
        || cm_check_shapes(error_prefix(call), &call->dst, &call->src,
                           &call->request.src)
               < 0
        || init_more(call) < 0) {
        return -1;
    }
    call->request.dst = call->dst.region;
    call->request.convert = converts > 0 ? &call->convert : NULL;
    call->request.run_nbytes = run_nbytes_of(call);
    if (choose_stream(call) < 0) {
        return -1;
    }
    return take_ends(call);
}

static void
fini_call(copy_call *call)
{
    cm_call_fini(&call->call);
    cm_operand_fini(&call->dst);
    cm_operand_fini(&call->src);
    for (uint32_t i = 0; i < call->more_count; i++) {
        cm_operand_fini(&call->more[i]);
    }
    PyMem_Free(call->more);
    PyMem_Free(call->regions);
    cm_state_leave(call->call.state);
}

/* Make a Transfer for each target of a copy. Takes the ticket over. Returns a list, or
 * NULL with an exception. */
static PyObject *
make_transfers(const copy_call *call, cm_ticket *ticket)
{
    cm_state *state = call->call.state;
    Py_ssize_t count = PyTuple_Size(call->how.targets);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        const cm_operand *end = i == 0 ? &call->dst : &call->more[i - 1];
        PyObject *transfer = cm_call_handle(&call->call, cm_ticket_share(ticket),
                                            PyTuple_GetItem(call->how.targets, i),
                                            call->src_object, home_of(call, end));
        if (transfer == NULL || PyList_SetItem(list, i, transfer) < 0) {
            Py_CLEAR(list);
        }
    }
    cm_py_report(state, cm_ticket_abandon(ticket), NULL);
    return list;
}

static PyObject *
make_transfer(copy_call *call, cm_ticket *ticket)
{
    if (cm_call_remember(&call->call, ticket) < 0) {
        return NULL;
    }
    if (call->how.targets != NULL) {
        return make_transfers(call, ticket);
    }
    return cm_call_handle(&call->call, ticket, call->dst_object, call->src_object,
                          home_of(call, &call->dst));
}

static bool
goes_via_host(const copy_call *call)
{
    const cm_copy_request *request = &call->request;
    int64_t count = 0;
    if (request->convert == NULL) {
        return false;
    }
    return cm_is_ok(cm_region_count(&request->dst, &count)) && count > 0
           && cm_plan_goes_via_host(call->call.state->runtime, &request->dst,
                                    &request->src, request->convert);
}

/* Copy between two devices and convert the elements. This takes several copies by way
 * of the host. Such a copy has only one target, as cumem/transfers/multi_device.py
 * makes sure. */
static cm_status
copy_via_host(copy_call *call, cm_engine *engine, cm_ticket **out)
{
    cm_copy_request *request = &call->request;
    if (!cm_call_take_keeps(&call->call)) {
        return cm_fail(CM_ENOMEM, 0);
    }
    request->take_keeps = NULL;
    cm_piece_regions *copy = malloc(sizeof(*copy));
    if (copy == NULL) {
        for (uint32_t i = 0; i < request->keep_count; i++) {
            request->keep[i].drop(request->keep[i].object);
        }
        return cm_fail(CM_ENOMEM, sizeof(*copy));
    }
    *copy = (cm_piece_regions){
        .dst = request->dst, .src = request->src, .convert = *request->convert};
    cm_many_request many = {.common = *request, .others = copy, .other_count = 1};
    many.common.convert = NULL;
    cm_request_let_go(request);
    cm_status status = cm_engine_copy_many(engine, &many, out);
    free(copy);
    return status;
}

/* Return the bytes of the target, or 0 if there are too many to be counted. */
static uint64_t
nbytes_of(const copy_call *call)
{
    const cm_region *to = &call->dst.region;
    int64_t count;
    return cm_is_ok(cm_region_count(to, &count))
               ? (uint64_t)count * (uint64_t)to->itemsize
               : 0;
}

/* Give the request to the engine, and make the answer, which is None, a Transfer or a
 * list of Transfers. Returns NULL with an exception if it fails. */
static PyObject *
run(copy_call *call)
{
    cm_state *state = call->call.state;
    bool blocking = call->call.blocking;
    /* Only a blocking call reports progress. */
    bool reports_progress = cm_call_reports_progress(&call->call);
    cm_ticket *ticket = NULL;
    cm_engine *engine = cm_call_engine(state, call->devices);
    if (engine == NULL || cm_call_prepare(&call->call, &call->request) < 0) {
        return NULL;
    }
    /* A job thread makes a copy on a stream of the engine's. The thread may still be at
     * work after this call has returned, so it must not ask the call for interrupts. */
    if (call->how.on_engine_stream) {
        call->request.stream = NULL;
        call->request.interrupted = NULL;
    }
    cm_ticket **out = blocking && !reports_progress ? NULL : &ticket;
    cm_status status = goes_via_host(call)
                           ? copy_via_host(call, engine, out)
                           : cm_engine_copy(engine, &call->request, out);
    cm_call_take_back(&call->call);
    if (PyErr_Occurred()) {
        if (ticket != NULL) {
            cm_ignore(cm_ticket_abandon(ticket)); /* this cannot fail, since the engine
                                                     is open */
        }
        return NULL; /* a signal handler or the progress bar has raised this exception,
                        perhaps only after the copy had ended */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while copying");
    }
    call->call.is_ordered = !call->how.on_engine_stream;
    call->call.moves_bytes = cm_call_moves_bytes(&call->dst.region, &call->src.region);
    cm_call_join(&call->call, call->how.number);
    if (reports_progress) {
        return cm_call_report_end(&call->call, ticket);
    }
    if (blocking) {
        Py_RETURN_NONE;
    }
    return make_transfer(call, ticket);
}

/* Do the same as run(), within a range that a profiler shows. */
static PyObject *
run_in_range(copy_call *call)
{
    CM_NVTX(call->call.blocking ? "copy" : "copy_async", nbytes_of(call));
    return run(call);
}

PyObject *
cm_copy_objects(cm_state *state, PyObject *dst, PyObject *src, cm_copy_how how)
{
    /* The struct is too large for a thread that has a small stack. One spare struct is
     * kept, so that most calls allocate nothing. */
    copy_call *call = atomic_exchange(&state->spare_call, NULL);
    if (call == NULL && (call = PyMem_Malloc(sizeof(*call))) == NULL) {
        return PyErr_NoMemory();
    }
    memset(call, 0, sizeof(*call));
    call->call.state = state;
    call->call.blocking = how.blocking;
    /* A copy that has no ticket must also name transfers that later ones cover (see
     * cm_call). A blocking copy may be a short one, which has no ticket. A copy that
     * begins together with others has a ticket, but it ignores some transfers, and one
     * of these may cover a transfer that the copy has to come after. So this copy names
     * covered transfers, too. */
    call->call.has_ticket = !how.blocking && how.before == 0;
    call->call.progress = how.progress;
    call->call.before = how.before;
    call->dst_object = dst;
    call->src_object = src;
    call->how = how;
    PyObject *result = NULL;
    if (init_call(call) < 0) {
        result = NULL;
    }
    else if (how.explain != NULL) {
        cm_call_fill_request(&call->call, &call->request);
        result = how.explain(state, &call->request);
    }
    else {
        result = CM_NVTX_IS_ON() ? run_in_range(call) : run(call);
    }
    fini_call(call);
    PyMem_Free(atomic_exchange(&state->spare_call, call));
    return result;
}
