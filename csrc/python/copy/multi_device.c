/* SPDX-License-Identifier: Apache-2.0 */
/* broadcast(), scatter() and gather(): copies between one end and several. First what
 * is asked for, checked and collected; then the copies of the engine that it comes to,
 * and their handles; then the functions. */
#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/tuples.h"
#include "python/device/objects.h"
#include "transfer/plan/overlap.h"
#include "transfer/routes/spread.h"

typedef enum several_kind {
    SEVERAL_BROADCAST,
    SEVERAL_SCATTER,
    SEVERAL_GATHER,
} several_kind;

/* Shared by the copies of one call; counted, for they may outlive it. */
typedef struct shared_state {
    atomic_uint refs;
    atomic_bool cancelled;
} shared_state;

/* Part i is from srcs[i] to dsts[i]; parts with the same lead[i] are one copy of the
 * engine, whose ticket is tickets[lead[i]]. */
typedef struct several_call {
    cm_state *state;
    several_kind kind;
    const char *name; /* of the function, for errors */
    bool blocking;
    uint32_t count;
    PyObject *one_object; /* borrowed */
    PyObject *objects;    /* owned: tuple of the others */
    cm_operand one;
    cm_operand *many; /* this and all arrays below: owned, [count] */
    cm_region *dsts;
    cm_region *srcs;
    uint32_t *lead;
    cm_ticket **tickets;  /* held */
    cm_stream *stream;    /* on loan; NULL: none was given */
    cm_stream **currents; /* on loan: current streams that come first, [count + 1] */
    uint32_t current_count;
    shared_state *shared;
    const cm_progress *progress; /* borrowed; NULL: nobody is told */
} several_call;

/* "target" or "source": what there are several of. */
static const char *
noun_of(const several_call *several)
{
    return several->kind == SEVERAL_GATHER ? "source" : "target";
}

/* -- objects ----------------------------------------------------------------------------- */

/* Memory is a sequence, too, but not one of ends. */
static int
take_objects(several_call *several, PyObject *objects)
{
    bool is_end = cm_buffer_check(several->state, objects) || cm_numpy_is_array(objects)
                  || PyUnicode_Check(objects) || PyObject_CheckBuffer(objects);
    several->objects = is_end ? NULL : PySequence_Tuple(objects);
    if (several->objects == NULL) {
        if (is_end || PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: expected a list of %ss, not %R",
                         several->name, noun_of(several), (PyObject *)Py_TYPE(objects));
        }
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(several->objects);
    if (count <= 0 || count > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: there must be at least one %s",
                     several->name, noun_of(several));
        return -1;
    }
    several->count = (uint32_t)count;
    return 0;
}

static int
make_room(several_call *several)
{
    size_t count = several->count;
    several->many = PyMem_Calloc(count, sizeof(*several->many));
    several->dsts = PyMem_Calloc(count, sizeof(*several->dsts));
    several->srcs = PyMem_Calloc(count, sizeof(*several->srcs));
    several->lead = PyMem_Calloc(count, sizeof(*several->lead));
    several->tickets = PyMem_Calloc(count, sizeof(*several->tickets));
    several->currents = PyMem_Calloc(count + 1, sizeof(*several->currents));
    several->shared = malloc(sizeof(*several->shared));
    if (several->many == NULL || several->dsts == NULL || several->srcs == NULL
        || several->lead == NULL || several->tickets == NULL
        || several->currents == NULL || several->shared == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    atomic_init(&several->shared->refs, 1);
    atomic_init(&several->shared->cancelled, false);
    return 0;
}

static int
read_one(several_call *several, PyObject *dtype)
{
    return cm_operand_init(several->state, &several->one, several->one_object, dtype,
                           several->stream);
}

static int
read_many(several_call *several, PyObject *dtype)
{
    for (uint32_t i = 0; i < several->count; i++) {
        PyObject *object = PyTuple_GetItem(several->objects, (Py_ssize_t)i);
        if (cm_operand_init(several->state, &several->many[i], object, dtype,
                            several->stream)
            < 0) {
            return -1;
        }
    }
    return 0;
}

/* Targets first: values become elements of their dtype. */
static int
read_operands(several_call *several)
{
    if (several->kind == SEVERAL_GATHER) {
        return read_one(several, NULL) < 0 ? -1
                                           : read_many(several, several->one.dtype);
    }
    return read_many(several, NULL) < 0 ? -1
                                        : read_one(several, several->many[0].dtype);
}

static int
check_operands(const several_call *several)
{
    bool gathers = several->kind == SEVERAL_GATHER;
    for (uint32_t i = 0; i < several->count; i++) {
        if ((gathers ? &several->one : &several->many[i])->readonly) {
            PyErr_Format(PyExc_ValueError, "%s: target %u is read-only", several->name,
                         gathers ? 0u : i);
            return -1;
        }
        int equal = cm_numpy_dtype_equal(several->many[i].dtype, several->one.dtype);
        if (equal < 0) {
            return -1;
        }
        if (equal == 0) {
            PyErr_Format(PyExc_TypeError,
                         "%s: %s %u has dtype %S, the %s has dtype %S; convert first",
                         several->name, noun_of(several), i, several->many[i].dtype,
                         gathers ? "target" : "source", several->one.dtype);
            return -1;
        }
    }
    return 0;
}

/* -- shapes ------------------------------------------------------------------------------ */

/* "{name}: {noun} {i} of shape (…) {why} (…)" */
static int
refuse_shape(const several_call *several, uint32_t i, const char *why,
             const cm_region *other)
{
    PyObject *mine =
        cm_tuple_from(several->many[i].region.shape, several->many[i].region.ndim);
    PyObject *theirs = cm_tuple_from(other->shape, other->ndim);
    if (mine != NULL && theirs != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: %s %u of shape %R %s %R", several->name,
                     noun_of(several), i, mine, why, theirs);
    }
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return -1;
}

static bool
is_shape_equal(const cm_region *a, const cm_region *b, int but)
{
    if (a->ndim != b->ndim) {
        return false;
    }
    for (int axis = 0; axis < a->ndim; axis++) {
        if (axis != but && a->shape[axis] != b->shape[axis]) {
            return false;
        }
    }
    return true;
}

static int
make_broadcast_parts(several_call *several)
{
    for (uint32_t i = 0; i < several->count; i++) {
        const cm_region *first = &several->many[0].region;
        several->dsts[i] = several->many[i].region;
        several->srcs[i] = several->one.region;
        if (!is_shape_equal(&several->dsts[i], first, -1)) {
            return refuse_shape(several, i, "must have the shape of target 0,", first);
        }
        if (!cm_is_ok(cm_region_broadcast(&several->dsts[i], &several->srcs[i]))) {
            return refuse_shape(several, i, "does not fit the source of shape",
                                &several->one.region);
        }
    }
    return 0;
}

/* The part of `whole` that begins at `start` along the axis and is as long as `part`.
 */
static cm_region
slice_of(const cm_region *whole, const cm_region *part, int axis, int64_t start)
{
    cm_region slice = *whole;
    /* a part of no length may begin past the end, which no stride need reach */
    int64_t offset = part->shape[axis] == 0 ? 0 : start * whole->strides[axis];
    slice.shape[axis] = part->shape[axis];
    slice.host = whole->host == NULL ? NULL : (char *)whole->host + offset;
    slice.address = whole->address == 0 ? 0 : whole->address + (uint64_t)offset;
    return slice;
}

static int
make_sliced_parts(several_call *several, int64_t axis)
{
    const cm_region *whole = &several->one.region;
    bool gathers = several->kind == SEVERAL_GATHER;
    const char *what = gathers ? "target" : "source";
    if (axis < -whole->ndim || axis >= whole->ndim) {
        PyErr_Format(PyExc_ValueError,
                     "%s: axis %lld is out of range for a %s with %d axes",
                     several->name, (long long)axis, what, whole->ndim);
        return -1;
    }
    int along = (int)(axis < 0 ? axis + whole->ndim : axis);
    if (gathers && whole->shape[along] > 1 && whole->strides[along] == 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: elements of the target share memory: stride 0 along axis %d",
                     several->name, along);
        return -1;
    }
    int64_t start = 0;
    for (uint32_t i = 0; i < several->count; i++) {
        const cm_region *part = &several->many[i].region;
        if (!is_shape_equal(part, whole, along)) {
            return refuse_shape(several, i, "does not fit a slice of shape", whole);
        }
        if (part->shape[along] > whole->shape[along] - start) {
            start = -1;
            break;
        }
        cm_region slice = slice_of(whole, part, along, start);
        several->dsts[i] = gathers ? slice : *part;
        several->srcs[i] = gathers ? *part : slice;
        start += part->shape[along];
    }
    if (start != whole->shape[along]) {
        PyErr_Format(PyExc_ValueError,
                     "%s: the lengths of the %ss along axis %d must add up to the %lld "
                     "of the %s",
                     several->name, noun_of(several), along,
                     (long long)whole->shape[along], what);
        return -1;
    }
    return 0;
}

/* Parts are copied in any order. One target twice gets the same bytes twice. */
static int
check_targets(const several_call *several)
{
    uint32_t first, second;
    bool overlap;
    bool skips_same = several->kind == SEVERAL_BROADCAST;
    cm_status status =
        cm_overlap_find(several->state->runtime, several->dsts, several->count,
                        skips_same, &first, &second, &overlap);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(several->state, status, NULL);
    }
    if (overlap) {
        PyErr_Format(PyExc_ValueError,
                     "%s: targets %u and %u overlap, and which is written last is not "
                     "defined",
                     several->name, first, second);
        return -1;
    }
    return 0;
}

static int
check_overlap(const several_call *several)
{
    if (several->kind != SEVERAL_GATHER && check_targets(several) < 0) {
        return -1;
    }
    const cm_region *one = &several->one.region;
    cm_byte_span place = cm_overlap_span(several->state->runtime, one);
    for (uint32_t i = 0; i < several->count; i++) {
        const cm_region *each = &several->many[i].region;
        cm_byte_span mine = cm_overlap_span(several->state->runtime, each);
        if (cm_overlap_is_real(each, mine.begin, one, place.begin)
            && !cm_region_is_same(&several->dsts[i], &several->srcs[i])) {
            PyErr_Format(PyExc_ValueError,
                         "%s: %s %u overlaps the %s; use copy() for that one",
                         several->name, noun_of(several), i,
                         several->kind == SEVERAL_GATHER ? "target" : "source");
            return -1;
        }
    }
    return 0;
}

/* -- order ------------------------------------------------------------------------------- */

static int
check_capture(const several_call *several, const cm_stream *stream)
{
    if (!cm_stream_may_capture(stream)) { /* the GIL stays */
        return 0;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_check_not_capturing(stream);
    Py_END_ALLOW_THREADS
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(several->state, status, "while copying");
}

/* As copy() does: a blocking call comes after the current streams of its devices. */
static int
add_current(several_call *several, const cm_region *region)
{
    if (region->kind != CM_KIND_DEVICE) {
        return 0;
    }
    for (uint32_t i = 0; i < several->current_count; i++) {
        if (several->currents[i]->device == region->device) {
            return 0;
        }
    }
    cm_stream *stream = cm_stream_from_object(several->state, Py_None, region->device);
    if (stream == NULL) {
        return -1;
    }
    several->currents[several->current_count++] = stream;
    return check_capture(several, stream);
}

static int
choose_currents(several_call *several)
{
    if (several->stream != NULL) {
        return check_capture(several, several->stream);
    }
    for (uint32_t i = 0; i < several->count && several->blocking; i++) {
        if (add_current(several, &several->many[i].region) < 0) {
            return -1;
        }
    }
    return several->blocking ? add_current(several, &several->one.region) : 0;
}

/* -- life -------------------------------------------------------------------------------- */

/* Takes `one` and the iterable `objects` in. 0, or -1 with an exception; call fini in
 * either case. */
static int
init_several(several_call *several, PyObject *objects, int64_t axis)
{
    cm_state_enter(several->state);
    if (cm_state_runtime(several->state) == NULL || take_objects(several, objects) < 0
        || make_room(several) < 0 || read_operands(several) < 0
        || check_operands(several) < 0
        || (several->kind == SEVERAL_BROADCAST ? make_broadcast_parts(several)
                                               : make_sliced_parts(several, axis))
               < 0
        || check_overlap(several) < 0) {
        return -1;
    }
    return choose_currents(several);
}

static void
fini_several(several_call *several)
{
    for (uint32_t i = 0; several->many != NULL && i < several->count; i++) {
        cm_operand_fini(&several->many[i]);
    }
    for (uint32_t i = 0; i < several->current_count; i++) {
        cm_stream_give(several->state, several->currents[i]);
    }
    cm_operand_fini(&several->one);
    PyMem_Free(several->many);
    PyMem_Free(several->dsts);
    PyMem_Free(several->srcs);
    PyMem_Free(several->lead);
    PyMem_Free(several->tickets);
    PyMem_Free(several->currents);
    if (several->shared != NULL && atomic_fetch_sub(&several->shared->refs, 1) == 1) {
        free(several->shared);
    }
    Py_CLEAR(several->objects);
    cm_state_leave(several->state);
}

#define SLICE_NS UINT64_C(50000000) /* how soon Ctrl-C is seen */

/* One copy of the engine being asked for. */
typedef struct spec {
    cm_call call;
    cm_copy_request request;
    cm_spread spread;
    cm_region *more; /* owned */
} spec;

/* -- what comes first, and what stays alive ----------------------------------------------- */

static void
drop_shared(void *object)
{
    shared_state *shared = object;
    if (atomic_fetch_sub(&shared->refs, 1) == 1) {
        free(shared);
    }
}

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
add_ends(const several_call *several, uint32_t lead, cm_call *call)
{
    bool gathers = several->kind == SEVERAL_GATHER;
    atomic_fetch_add(&several->shared->refs, 1);
    if (cm_call_keep_other(call, (cm_keep){several->shared, drop_shared}) < 0
        || add_end(call, &several->one, gathers) < 0) {
        return -1;
    }
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->lead[i] == lead
            && add_end(call, &several->many[i], !gathers) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < several->current_count; i++) {
        if (cm_call_come_after_stream(call, several->currents[i]) < 0) {
            return -1;
        }
    }
    return several->stream == NULL ? 0
                                   : cm_call_come_after_stream(call, several->stream);
}

/* -- the copies of the engine ------------------------------------------------------------ */

static int
make_copy_spec(const several_call *several, uint32_t lead, spec *each)
{
    each->call = (cm_call){
        .state = several->state,
        .stream = several->stream,
        .blocking = several->blocking,
        .has_ticket = true,
        .moves_bytes = !cm_region_is_same(&several->dsts[lead], &several->srcs[lead])};
    each->request.dst = several->dsts[lead];
    each->request.src = several->srcs[lead];
    each->more = PyMem_Malloc(several->count * sizeof(cm_region));
    if (each->more == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->lead[i] == lead && i != lead) {
            each->more[each->spread.dst_count++] = several->dsts[i];
        }
    }
    each->spread.dsts = each->more;
    each->spread.cancelled = &several->shared->cancelled;
    each->request.spread = &each->spread;
    return add_ends(several, lead, &each->call);
}

/* The engine runs them side by side, each on a stream of its own. */
static int
prepare(spec *each)
{
    if (cm_call_prepare(&each->call, &each->request) < 0) {
        return -1;
    }
    each->request.stream = NULL;
    each->request.blocking = false;
    each->request.interrupted = NULL;
    each->request.let_go = NULL;
    return 0;
}

static void
free_copy_specs(const several_call *several, spec *specs)
{
    for (uint32_t i = 0; specs != NULL && i < several->count; i++) {
        cm_call_fini(&specs[i].call);
        PyMem_Free(specs[i].more);
    }
    PyMem_Free(specs);
}

/* What one copy makes all at once. */
static int
group_parts(several_call *several, cm_engine *engine)
{
    if (several->kind != SEVERAL_BROADCAST) {
        for (uint32_t i = 0; i < several->count; i++) {
            several->lead[i] = i;
        }
        return 0;
    }
    const cm_region **dsts = PyMem_Malloc(several->count * sizeof(*dsts));
    if (dsts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < several->count; i++) {
        dsts[i] = &several->dsts[i];
    }
    cm_engine_group_targets(engine, dsts, several->count, &several->srcs[0],
                            several->lead);
    PyMem_Free((void *)dsts);
    return 0;
}

static int
make_copy_specs(const several_call *several, spec *specs)
{
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->lead[i] == i && make_copy_spec(several, i, &specs[i]) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->lead[i] == i && prepare(&specs[i]) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < several->count; i++) {
        cm_call_join(&specs[i].call);
    }
    return 0;
}

/* Starts all; those that could not be begun have no ticket. */
static int
start_copies(several_call *several, cm_engine *engine, spec *specs)
{
    cm_status status = cm_ok();
    if (make_copy_specs(several, specs) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t i = 0; i < several->count && cm_is_ok(status); i++) {
        if (several->lead[i] == i) {
            cm_call_hand_over(&specs[i].call);
            status = cm_engine_copy(engine, &specs[i].request, &several->tickets[i]);
        }
    }
    Py_END_ALLOW_THREADS
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(several->state, status, "while copying");
}

/* Unfinished ones. 0, or -1 with MemoryError. */
static int
remember_copies(several_call *several, spec *specs)
{
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->lead[i] == i
            && cm_call_remember(&specs[i].call, several->tickets[i]) < 0) {
            several->tickets[i] = NULL;
            return -1;
        }
    }
    return 0;
}

/* -- their end --------------------------------------------------------------------------- */

static int
tell_progress(const several_call *several)
{
    uint64_t moved = 0;
    uint64_t nbytes = 0;
    for (uint32_t i = 0; several->progress != NULL && i < several->count; i++) {
        cm_ticket_info info;
        if (several->tickets[i] != NULL) {
            cm_ticket_look(several->tickets[i], &info);
            moved += cm_ticket_count_moved(several->tickets[i]);
            nbytes += info.nbytes;
        }
    }
    return several->progress == NULL
               ? 0
               : cm_progress_tell(several->progress, moved, nbytes);
}

/* False with what a signal handler or the progress callback raised. */
static bool
wait_for(const several_call *several, cm_ticket *ticket, cm_status *status)
{
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        *status = cm_ticket_wait(ticket, SLICE_NS);
        Py_END_ALLOW_THREADS
        if (status->code != CM_ETIMEOUT) {
            return true;
        }
        if (PyErr_CheckSignals() < 0 || tell_progress(several) < 0) {
            return false;
        }
    }
}

static void
tell_to_stop(const several_call *several)
{
    atomic_store(&several->shared->cancelled, true);
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->tickets[i] != NULL) {
            cm_ticket_hurry(several->tickets[i]);
        }
    }
}

/* Until all are done. 0, or -1 with the first failure, or with what a signal handler,
 * or the progress callback raised: *signalled, and nothing more is begun. */
static int
wait_for_all(several_call *several, bool *signalled)
{
    *signalled = false;
    cm_status first = cm_ok();
    for (uint32_t i = 0; i < several->count; i++) {
        cm_status status = cm_ok();
        if (several->tickets[i] != NULL
            && !wait_for(several, several->tickets[i], &status)) {
            tell_to_stop(several);
            *signalled = true;
            return -1;
        }
        first = cm_is_ok(first) ? status : first;
    }
    return cm_is_ok(first) ? 0
                           : cm_py_raise_int(several->state, first, "while copying");
}

/* What has begun stops after the piece at hand; the exception stays. */
static void
stop_copies(several_call *several)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    tell_to_stop(several);
    several->progress = NULL;
    bool signalled;
    (void)wait_for_all(several, &signalled);
    if (signalled) { /* that says more */
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return;
    }
    PyErr_Restore(type, error, traceback);
}

static void
release_tickets(several_call *several)
{
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->tickets[i] != NULL) {
            cm_py_report(several->state, cm_ticket_abandon(several->tickets[i]), NULL);
            several->tickets[i] = NULL;
        }
    }
}

static PyObject *
make_transfers(several_call *several)
{
    PyObject *list = PyList_New((Py_ssize_t)several->count);
    for (uint32_t i = 0; list != NULL && i < several->count; i++) {
        PyObject *object = PyTuple_GetItem(several->objects, (Py_ssize_t)i);
        bool gathers = several->kind == SEVERAL_GATHER;
        PyObject *transfer = cm_transfer_object_new(
            several->state, cm_ticket_share(several->tickets[several->lead[i]]),
            gathers ? several->one_object : object,
            gathers ? object : several->one_object);
        if (transfer == NULL || PyList_SetItem(list, (Py_ssize_t)i, transfer) < 0) {
            Py_CLEAR(list);
            break;
        }
        if (several->stream != NULL && several->lead[i] == i
            && cm_transfer_order((cm_transfer_object *)(void *)transfer,
                                 several->stream)
                   < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* The engine with all pools it may need. */
static cm_engine *
get_engine(const several_call *several)
{
    uint64_t devices = 0;
    for (uint32_t i = 0; i <= several->count; i++) {
        const cm_region *region =
            i == several->count ? &several->one.region : &several->many[i].region;
        if (region->kind != CM_KIND_PAGEABLE) {
            devices |= UINT64_C(1) << region->device;
        }
    }
    cm_engine *engine = cm_call_engine(several->state, devices);
    /* once more, so that pools let in the devices that came into use just now */
    return cm_state_runtime(several->state) == NULL ? NULL : engine;
}

static PyObject *
run_copies(several_call *several, spec *specs)
{
    cm_engine *engine = get_engine(several);
    PyObject *result = NULL;
    bool signalled;
    if (engine == NULL || group_parts(several, engine) < 0) {
        return NULL;
    }
    if (start_copies(several, engine, specs) < 0
        || remember_copies(several, specs) < 0) {
        stop_copies(several);
    }
    else if (!several->blocking) {
        result = make_transfers(several);
        if (result == NULL) {
            tell_to_stop(several);
        }
    }
    else if (wait_for_all(several, &signalled) == 0 && tell_progress(several) == 0) {
        result = Py_NewRef(Py_None);
    }
    for (uint32_t i = 0; i < several->count; i++) {
        specs[i].call.is_ordered = result != NULL;
    }
    return result;
}

/* A list of Transfers, or None when blocking; NULL with an exception. */
static PyObject *
run_several(several_call *several)
{
    spec *specs = PyMem_Calloc(several->count, sizeof(*specs));
    PyObject *result = specs == NULL ? PyErr_NoMemory() : run_copies(several, specs);
    release_tickets(several);
    free_copy_specs(several, specs);
    return result;
}

static PyObject *
run_and_tell(several_call *several, PyObject *objects, int64_t axis, PyObject *told)
{
    cm_progress progress;
    if (cm_progress_open(told, "copy", &progress) < 0) {
        return NULL;
    }
    several->progress = progress.tell == NULL ? NULL : &progress;
    PyObject *result =
        init_several(several, objects, axis) < 0 ? NULL : run_several(several);
    cm_state_drop_own(several->state);
    fini_several(several);
    if (cm_progress_close(&progress) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *
run(PyObject *module, several_call *several, PyObject *objects, PyObject *axis_object,
    PyObject *stream_object, PyObject *told)
{
    int64_t axis = 0;
    several->state = cm_state_of_module(module);
    if (axis_object != NULL && cm_arg_int64(axis_object, "axis", &axis) < 0) {
        return NULL;
    }
    if (stream_object != NULL && stream_object != Py_None) {
        several->stream = cm_stream_from_object(several->state, stream_object, -1);
        if (several->stream == NULL) {
            return NULL;
        }
    }
    PyObject *result = run_and_tell(several, objects, axis, told);
    cm_stream_give(several->state, several->stream);
    return result;
}

static PyObject *
parse(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
      several_call *several)
{
    static const char *const heads[][3] = {
        [SEVERAL_BROADCAST] = {"src", "dsts", NULL},
        [SEVERAL_SCATTER] = {"src", "dsts", "axis"},
        [SEVERAL_GATHER] = {"srcs", "dst", "axis"},
    };
    const char *names[6] = {NULL};
    PyObject *values[5] = {NULL, NULL, NULL, NULL, NULL};
    bool gathers = several->kind == SEVERAL_GATHER;
    int head = several->kind == SEVERAL_BROADCAST ? 2 : 3;
    for (int i = 0; i < head; i++) {
        names[i] = heads[several->kind][i];
    }
    names[head] = "stream";
    names[head + 1] = several->blocking ? "progress" : NULL;
    if (cm_args_parse(several->name, args, nargs, kwnames, names, head, 2, values)
        < 0) {
        return NULL;
    }
    several->one_object = values[gathers ? 1 : 0];
    return run(module, several, values[gathers ? 0 : 1], head == 3 ? values[2] : NULL,
               values[head], values[head + 1]);
}

/* -- docstrings -------------------------------------------------------------------------- */

#define PROGRESS                                                                       \
    "progress : bool or callable, optional\n"                                          \
    "    As for `copy`, of the bytes of all parts; a source that is read once for "    \
    "several\n"                                                                        \
    "    targets counts once.\n"

#define NO_TQDM "ImportError\n    If `progress` is True and there is no tqdm.\n"

#define RAISES                                                                         \
    "Raises\n------\n"                                                                 \
    "TypeError\n    If an end is no memory or the dtypes differ.\n"                    \
    "ValueError\n"                                                                     \
    "    If the shapes do not fit, a target is read-only, a buffer is closed, or "     \
    "ends\n"                                                                           \
    "    share bytes (see Notes). Nothing has been copied then.\n"                     \
    "OSError\n"                                                                        \
    "    If an end is a mapped file that is cut short, or cannot be read.\n"           \
    "CudaError\n    If a copy failed, or `stream` is being captured.\n"

#define STREAM                                                                         \
    "stream : stream, optional\n"                                                      \
    "    Come after the work of this stream, of any device, and before what it is\n"   \
    "    given next.\n"

#define OVERLAP                                                                        \
    "Parts are copied in any order, so\n"                                              \
    "two targets, or a target and a source, that have a byte in common are refused. "  \
    "Views that\n"                                                                     \
    "only interleave, such as columns of one array, are not; a target that is its\n"   \
    "source is left alone, and one target of `broadcast` may be given twice."

#define BLOCKING                                                                       \
    "**Blocks** until all is done, GIL released; Ctrl-C ends it within a few "         \
    "pieces.\n"                                                                        \
    "**Ordered after** all work that cumem knows of on either end, and `stream` or "   \
    "the\n"                                                                            \
    "current stream of each device that has an end. " OVERLAP

#define BACKGROUND                                                                     \
    "Returns\n-------\n"                                                               \
    "list of Transfer\n"                                                               \
    "    One for each of the list, in its order; copies that are made together end\n"  \
    "    together.\n\n"

#define UNBLOCKED                                                                      \
    "Without a stream it never waits for other work. With one it **blocks**, GIL\n"    \
    "released, until the last piece is queued (for a target that the host has to "     \
    "write,\n"                                                                         \
    "until it is written). Nothing may be changed before its copy is done.\n"          \
    "**Ordered after** all work that cumem knows of on either end, and "               \
    "`stream`. " OVERLAP

PyDoc_STRVAR(broadcast_doc,
"broadcast($module, /, src, dsts, *, stream=None, progress=None)\n--\n\n"
"Copy one source to several targets, on all links at the same time.\n\n"
"A source in ordinary memory is read and packed once for all GPUs; of several targets\n"
"on one GPU the first is sent and the others are copied from it there.\n\n"
"Parameters\n----------\n"
"src : Buffer, array, exporter or scalar\n"
"    As for `copy`; its shape must be that of the targets or broadcast to it.\n"
"dsts : iterable of Buffer, array or exporter\n"
"    Writable memory of one shape, anywhere; strides may differ.\n"
STREAM PROGRESS "\n" RAISES NO_TQDM "\n"
"See Also\n--------\n"
"scatter : slices of the source to each target.\n\n"
"Notes\n-----\n"
BLOCKING);

PyDoc_STRVAR(broadcast_async_doc,
"broadcast_async($module, /, src, dsts, *, stream=None)\n--\n\n"
"Start copying one source to several targets.\n\n"
"Parameters\n----------\n"
"src, dsts\n    As for `broadcast`.\n"
STREAM "\n" BACKGROUND RAISES "\n"
"Notes\n-----\n"
UNBLOCKED);

PyDoc_STRVAR(scatter_doc,
"scatter($module, /, src, dsts, axis=0, *, stream=None, progress=None)\n--\n\n"
"Copy consecutive slices of a source to several targets, on all links at the same time.\n\n"
"Parameters\n----------\n"
"src : Buffer, array or exporter\n    As for `copy`.\n"
"dsts : iterable of Buffer, array or exporter\n"
"    Writable memory anywhere. Each has the shape of the source but along `axis`, where\n"
"    the lengths add up to the source's.\n"
"axis : int, default 0\n    Along which the source is cut; negative counts from the end.\n"
STREAM PROGRESS "\n" RAISES NO_TQDM "\n"
"See Also\n--------\n"
"gather : the way back.\n\n"
"Notes\n-----\n"
BLOCKING);

PyDoc_STRVAR(scatter_async_doc,
"scatter_async($module, /, src, dsts, axis=0, *, stream=None)\n--\n\n"
"Start copying consecutive slices of a source to several targets.\n\n"
"Parameters\n----------\n"
"src, dsts, axis\n    As for `scatter`.\n"
STREAM "\n" BACKGROUND RAISES "\n"
"Notes\n-----\n"
UNBLOCKED);

PyDoc_STRVAR(gather_doc,
"gather($module, /, srcs, dst, axis=0, *, stream=None, progress=None)\n--\n\n"
"Copy several sources one after the other into a target, on all links at the same time.\n\n"
"Parameters\n----------\n"
"srcs : iterable of Buffer, array or exporter\n"
"    As for `copy`. Each has the shape of the target but along `axis`, where the lengths\n"
"    add up to the target's.\n"
"dst : Buffer, array or exporter\n    Writable memory anywhere.\n"
"axis : int, default 0\n    Along which they lie; negative counts from the end.\n"
STREAM PROGRESS "\n" RAISES NO_TQDM "\n"
"See Also\n--------\n"
"scatter : the way there.\n\n"
"Notes\n-----\n"
BLOCKING);

PyDoc_STRVAR(gather_async_doc,
"gather_async($module, /, srcs, dst, axis=0, *, stream=None)\n--\n\n"
"Start copying several sources one after the other into a target.\n\n"
"Parameters\n----------\n"
"srcs, dst, axis\n    As for `gather`.\n"
STREAM "\n" BACKGROUND RAISES "\n"
"Notes\n-----\n"
UNBLOCKED);

/* -- table ------------------------------------------------------------------------------- */

#define FUNCTION(function, KIND, does_block)                                           \
    static PyObject *function##_function(PyObject *module, PyObject *const *args,      \
                                         Py_ssize_t nargs, PyObject *kwnames)          \
    {                                                                                  \
        several_call several = {                                                       \
            .kind = SEVERAL_##KIND, .name = #function, .blocking = (does_block)};      \
        return parse(module, args, nargs, kwnames, &several);                          \
    }

FUNCTION(broadcast, BROADCAST, true)
FUNCTION(broadcast_async, BROADCAST, false)
FUNCTION(scatter, SCATTER, true)
FUNCTION(scatter_async, SCATTER, false)
FUNCTION(gather, GATHER, true)
FUNCTION(gather_async, GATHER, false)

#define ROW(function)                                                                  \
    {#function, (PyCFunction)(void (*)(void))function##_function,                      \
     METH_FASTCALL | METH_KEYWORDS, function##_doc}

PyMethodDef cm_several_methods[] = {
    ROW(broadcast), ROW(broadcast_async), ROW(scatter),          ROW(scatter_async),
    ROW(gather),    ROW(gather_async),    {NULL, NULL, 0, NULL},
};
