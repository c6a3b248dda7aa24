/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that begin together and end each by itself: what broadcast(), scatter() and
 * gather() come to once cumem/multi_device.py has read and checked their ends. */
#include <stdlib.h>

#include "docstrings.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/errors.h"
#include "python/device/objects.h"
#include "python/device/wait.h"
#include "transfer/plan/overlap.h"
#include "transfer/routes/broadcast.h"

/* -- ends --------------------------------------------------------------------------------- */

static PyObject *
describe_end(cm_state *state, const cm_operand *end)
{
    int64_t low, high;
    const cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = cm_region_bounds(&end->region, &low, &high);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, NULL);
    }
    uint64_t begin = cm_overlap_span(state->runtime, &end->region).begin;
    return Py_BuildValue("(OK)", end->keep,
                         (unsigned long long)(begin - (uint64_t)low));
}

static PyObject *
is_memory(PyObject *module, PyObject *object)
{
    return PyBool_FromLong(cm_operand_is_memory(cm_state_of_module(module), object));
}

static PyObject *
read_end(PyObject *module, PyObject *args)
{
    PyObject *object, *dtype, *stream;
    if (!PyArg_ParseTuple(args, "OOO", &object, &dtype, &stream)) {
        return NULL;
    }
    cm_call_frame frame;
    PyObject *answer = NULL;
    cm_state *state = cm_state_of_module(module);
    dtype = dtype == Py_None ? NULL : dtype;
    if (cm_call_enter(&frame, state, stream, -1, NULL, NULL) == 0
        && cm_state_runtime(state) != NULL) {
        cm_operand end;
        if (cm_operand_init(state, &end, object, dtype, frame.stream) == 0) {
            answer = describe_end(state, &end);
        }
        cm_operand_fini(&end);
    }
    return cm_call_leave(&frame, answer);
}

/* -- parts -------------------------------------------------------------------------------- */

/* One pair. Those with the same lead are one copy of the engine, which that one makes.
 */
typedef struct part {
    cm_operand dst;
    cm_operand src;
    cm_copy_request request;
    uint32_t lead;
    cm_call call; /* of a lead, as are the next */
    cm_broadcast broadcast;
    cm_region *more;   /* owned: further targets */
    cm_ticket *ticket; /* held; NULL: it has not begun */
} part;

typedef struct apart_call {
    cm_state *state;
    PyObject *pairs;             /* borrowed tuple */
    cm_stream *stream;           /* borrowed; NULL: none was given */
    const cm_progress *progress; /* borrowed */
    cm_stream_list after;        /* on loan: streams that come first as well */
    bool is_broadcast;
    bool blocking;
    bool captures; /* `stream` does: all goes into its graph, on it */
    uint32_t count;
    part *parts; /* owned */
} apart_call;

static bool
is_lead(const apart_call *self, uint32_t i)
{
    return self->parts[i].lead == i;
}

static int
read_part(const apart_call *self, part *each, PyObject *pair)
{
    PyObject *dst, *src;
    if (!PyArg_ParseTuple(pair, "OO", &dst, &src)
        || cm_operand_init(self->state, &each->dst, dst, NULL, self->stream) < 0
        || cm_check_target("", &each->dst, dst) < 0
        || cm_operand_init(self->state, &each->src, src, NULL, self->stream) < 0) {
        return -1;
    }
    each->request.dst = each->dst.region;
    return cm_check_pair("", &each->dst, &each->src, &each->request.src);
}

static int
read_parts(apart_call *self)
{
    Py_ssize_t count = PyTuple_Size(self->pairs);
    self->parts =
        count > INT32_MAX ? NULL : PyMem_Calloc((size_t)count + 1, sizeof(part));
    if (self->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->count = (uint32_t)count;
    for (uint32_t i = 0; i < self->count; i++) {
        self->parts[i].lead = i;
        if (read_part(self, &self->parts[i], PyTuple_GetItem(self->pairs, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Which targets of a broadcast one copy makes all at once. */
static int
group_parts(apart_call *self, cm_engine *engine)
{
    uint32_t count = self->count;
    if (!self->is_broadcast || self->captures || count == 0) {
        return 0;
    }
    const cm_region **dsts = PyMem_Malloc(count * sizeof(*dsts));
    uint32_t *leads = PyMem_Malloc(count * sizeof(*leads));
    bool has_room = dsts != NULL && leads != NULL;
    if (has_room) {
        for (uint32_t i = 0; i < count; i++) {
            dsts[i] = &self->parts[i].request.dst;
        }
        cm_engine_group_targets(engine, dsts, count, &self->parts[0].request.src,
                                leads);
        for (uint32_t i = 0; i < count; i++) {
            self->parts[i].lead = leads[i];
        }
    }
    PyMem_Free((void *)dsts);
    PyMem_Free(leads);
    return has_room ? 0 : (PyErr_NoMemory(), -1);
}

/* -- the copies of the engine ------------------------------------------------------------- */

static int
add_end(cm_call *call, const cm_operand *end, bool writes)
{
    return (end->storage != NULL
            && cm_call_come_after(call, end->storage, CM_EXTENT_ALL(writes)) < 0)
                   || cm_call_keep(call, end) < 0
               ? -1
               : 0;
}

static int
init_lead(const apart_call *self, part *lead)
{
    cm_call *call = &lead->call;
    *call = (cm_call){.state = self->state,
                      .stream = self->stream,
                      .blocking = self->blocking,
                      .has_ticket = true,
                      .moves_bytes =
                          cm_call_moves_bytes(&lead->request.dst, &lead->request.src)};
    for (uint32_t i = 0; i < self->after.count; i++) {
        if (cm_call_come_after_stream(call, self->after.streams[i]) < 0) {
            return -1;
        }
    }
    return (self->stream != NULL && cm_call_come_after_stream(call, self->stream) < 0)
                   || add_end(call, &lead->src, false) < 0
               ? -1
               : 0;
}

static int
add_target(const apart_call *self, const part *each)
{
    part *lead = &self->parts[each->lead];
    if (each != lead) {
        if (lead->more == NULL) {
            lead->more = PyMem_Malloc(self->count * sizeof(*lead->more));
        }
        if (lead->more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        lead->more[lead->broadcast.dst_count++] = each->request.dst;
        lead->broadcast.dsts = lead->more;
        lead->request.broadcast = &lead->broadcast;
    }
    return add_end(&lead->call, &each->dst, true);
}

/* Side by side, each on a stream of the engine's own. */
static int
prepare(const apart_call *self, part *lead)
{
    cm_copy_request *request = &lead->request;
    if (cm_call_prepare(&lead->call, request) < 0) {
        return -1;
    }
    request->interrupted = NULL;
    request->let_go = NULL;
    request->ticket_seen = NULL;
    if (!self->captures) {
        request->stream = NULL;
        request->blocking = false;
    }
    return 0;
}

static int
prepare_all(const apart_call *self)
{
    for (uint32_t i = 0; i < self->count; i++) {
        if (is_lead(self, i) && init_lead(self, &self->parts[i]) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < self->count; i++) {
        if (add_target(self, &self->parts[i]) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < self->count; i++) {
        if (is_lead(self, i) && prepare(self, &self->parts[i]) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < self->count; i++) {
        cm_call_join(&self->parts[i].call);
    }
    return 0;
}

/* And remembers them. Those that could not be begun have no ticket. */
static int
start_all(const apart_call *self, cm_engine *engine)
{
    cm_status status = cm_ok();
    if (prepare_all(self) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t i = 0; i < self->count && cm_is_ok(status); i++) {
        part *each = &self->parts[i];
        if (is_lead(self, i)) {
            cm_call_hand_over(&each->call);
            status = cm_engine_copy(engine, &each->request, &each->ticket);
        }
    }
    Py_END_ALLOW_THREADS
    for (uint32_t i = 0; i < self->count; i++) {
        part *each = &self->parts[i];
        if (each->ticket != NULL && cm_call_remember(&each->call, each->ticket) < 0) {
            each->ticket = NULL;
            return -1;
        }
    }
    return cm_py_check(self->state, status, "while copying");
}

/* -- their end ---------------------------------------------------------------------------- */

static int
tell_progress(const apart_call *self)
{
    uint64_t moved = 0;
    uint64_t nbytes = 0;
    for (uint32_t i = 0; self->progress->tell != NULL && i < self->count; i++) {
        cm_ticket_info info;
        if (self->parts[i].ticket != NULL) {
            cm_ticket_look(self->parts[i].ticket, &info);
            moved += cm_ticket_count_moved(self->parts[i].ticket);
            nbytes += info.nbytes;
        }
    }
    return cm_progress_tell(self->progress, moved, nbytes);
}

/* False with what a signal handler or the progress callback raised. */
static bool
wait_for(const apart_call *self, cm_ticket *ticket, cm_status *status)
{
    do {
        if (!cm_wait_for_ticket(ticket, cm_ticket_wait, CM_SIGNAL_SLICE_NS, NULL, 0,
                                status)) {
            return false;
        }
    } while (status->code == CM_ETIMEOUT && tell_progress(self) == 0);
    return status->code != CM_ETIMEOUT;
}

/* Until all are done. 0, or -1 with the first failure. *signalled: with what a signal
 * handler or the progress callback raised, and some are not done. */
static int
wait_for_all(const apart_call *self, bool *signalled)
{
    cm_status first = cm_ok();
    *signalled = false;
    for (uint32_t i = 0; i < self->count && !*signalled; i++) {
        cm_status status = cm_ok();
        if (self->parts[i].ticket != NULL) {
            *signalled = !wait_for(self, self->parts[i].ticket, &status);
        }
        first = cm_is_ok(first) ? status : first;
    }
    return *signalled ? -1 : cm_py_check(self->state, first, "while copying");
}

static void
stop_all(const apart_call *self)
{
    for (uint32_t i = 0; i < self->count; i++) {
        if (self->parts[i].ticket != NULL) {
            cm_ticket_stop(self->parts[i].ticket);
        }
    }
}

/* A call that failed waits for what it has begun; its exception stays, unless a signal
 * handler raises another meanwhile. */
static void
stop_and_wait(const apart_call *self)
{
    static const cm_progress nobody = {.tell = NULL};
    apart_call quiet = *self;
    bool signalled;
    cm_kept_error error = cm_error_keep();
    quiet.progress = &nobody;
    stop_all(self);
    (void)wait_for_all(&quiet, &signalled);
    if (signalled) {
        cm_kept_error says_more = cm_error_keep();
        cm_error_restore(error);
        error = says_more;
    }
    cm_error_restore(error);
}

static PyObject *
make_transfers(const apart_call *self)
{
    PyObject *list = PyList_New((Py_ssize_t)self->count);
    for (uint32_t i = 0; list != NULL && i < self->count; i++) {
        const part *each = &self->parts[i];
        PyObject *transfer = cm_transfer_object_new(
            self->state, cm_ticket_share(self->parts[each->lead].ticket),
            each->dst.keep, each->src.keep);
        if (transfer == NULL || PyList_SetItem(list, (Py_ssize_t)i, transfer) < 0
            || (self->stream != NULL && !self->captures && is_lead(self, i)
                && cm_transfer_order((cm_transfer_object *)(void *)transfer,
                                     self->stream)
                       < 0)) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* The engine with all pools it may need. */
static cm_engine *
get_engine(const apart_call *self)
{
    uint64_t devices = 0;
    for (uint32_t i = 0; i < self->count; i++) {
        devices |= cm_devices_of(&self->parts[i].dst.region)
                   | cm_devices_of(&self->parts[i].src.region);
    }
    cm_engine *engine = cm_call_engine(self->state, devices);
    /* once more, so that pools let in the devices that came into use just now */
    return cm_state_runtime(self->state) == NULL ? NULL : engine;
}

/* A list of Transfers, or None when blocking; NULL with an exception. */
static PyObject *
run(apart_call *self)
{
    PyObject *result = NULL;
    bool signalled = false;
    if (cm_state_runtime(self->state) == NULL || read_parts(self) < 0) {
        return NULL;
    }
    cm_status status = cm_call_ask_capturing(self->stream, &self->captures);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, "while copying");
    }
    cm_engine *engine = get_engine(self);
    if (engine == NULL || group_parts(self, engine) < 0) {
        return NULL;
    }
    if (start_all(self, engine) < 0) {
        stop_and_wait(self);
    }
    else if (!self->blocking) {
        result = make_transfers(self);
    }
    else if (wait_for_all(self, &signalled) == 0 && tell_progress(self) == 0) {
        result = Py_NewRef(Py_None);
    }
    if (result == NULL) {
        stop_all(self);
    }
    for (uint32_t i = 0; i < self->count; i++) {
        self->parts[i].call.is_ordered = result != NULL;
    }
    return result;
}

static void
free_parts(apart_call *self)
{
    for (uint32_t i = 0; i < self->count; i++) {
        part *each = &self->parts[i];
        if (each->ticket != NULL) {
            cm_py_report(self->state, cm_ticket_abandon(each->ticket), NULL);
        }
        if (each->call.state != NULL) {
            cm_call_fini(&each->call);
        }
        PyMem_Free(each->more);
        cm_operand_fini(&each->dst);
        cm_operand_fini(&each->src);
    }
    PyMem_Free(self->parts);
}

static PyObject *
copy_apart(PyObject *module, PyObject *args)
{
    PyObject *pairs, *stream, *after, *told;
    int is_broadcast, blocking;
    if (!PyArg_ParseTuple(args, "O!OOppO", &PyTuple_Type, &pairs, &stream, &after,
                          &is_broadcast, &blocking, &told)) {
        return NULL;
    }
    cm_call_frame frame;
    PyObject *result = NULL;
    cm_state *state = cm_state_of_module(module);
    if (cm_call_enter(&frame, state, stream, -1, told, "copy") == 0) {
        apart_call self = {.state = state,
                           .pairs = pairs,
                           .stream = frame.stream,
                           .progress = &frame.progress,
                           .is_broadcast = is_broadcast,
                           .blocking = blocking};
        if (cm_stream_list_take(state, after, "after", -1, &self.after) == 0) {
            result = run(&self);
            cm_state_drop_own(state);
            free_parts(&self);
        }
        cm_stream_list_give(state, &self.after);
    }
    return cm_call_leave(&frame, result);
}

PyMethodDef cm_copy_apart_methods[] = {
    {"_is_memory", is_memory, METH_O, CM_DOC__is_memory},
    {"_read_end", read_end, METH_VARARGS, CM_DOC__read_end},
    {"_copy_apart", copy_apart, METH_VARARGS, CM_DOC__copy_apart},
    {NULL, NULL, 0, NULL},
};
