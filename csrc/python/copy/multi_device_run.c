/* SPDX-License-Identifier: Apache-2.0 */
/* Running the parts of a copy between one end and several, and their handles. */
#include <stdlib.h>

#include "python/copy/multi_device.h"
#include "python/core/errors.h"
#include "python/device/objects.h"

#define SLICE_NS UINT64_C(50000000) /* how soon Ctrl-C is seen */

/* What one copy of the engine keeps alive. */
typedef struct bundle {
    cm_several_shared *shared; /* counted */
    uint32_t count;
    cm_keep keeps[];
} bundle;

/* One copy of the engine being asked for. */
typedef struct spec {
    cm_copy_request request;
    cm_spread spread;
    cm_region *more;           /* owned */
    cm_stream **after;         /* owned array, borrowed streams */
    cm_ticket **after_tickets; /* owned array, borrowed */
} spec;

/* -- what must stay alive ---------------------------------------------------------------- */

static void
drop_bundle(void *object)
{
    bundle *held = object;
    for (uint32_t i = 0; i < held->count; i++) {
        held->keeps[i].drop(held->keeps[i].object);
    }
    if (atomic_fetch_sub(&held->shared->refs, 1) == 1) {
        free(held->shared);
    }
    free(held);
}

static int
add_keep(const cm_several *several, bundle *held, const cm_operand *operand)
{
    cm_keep *keep = &held->keeps[held->count];
    if (operand->storage != NULL) {
        *keep = (cm_keep){cm_storage_hold_transfer(operand->storage),
                          cm_storage_drop_transfer};
    }
    else {
        cm_deferred *deferred = cm_deferred_new(several->state, operand->keep);
        if (deferred == NULL) {
            return -1;
        }
        *keep = (cm_keep){deferred, cm_deferred_add};
    }
    held->count++;
    return 0;
}

static int
make_bundle(const cm_several *several, uint32_t lead, cm_copy_request *request)
{
    bundle *held =
        malloc(sizeof(*held) + ((size_t)several->count + 1) * sizeof(held->keeps[0]));
    if (held == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    held->count = 0;
    held->shared = several->shared;
    atomic_fetch_add(&several->shared->refs, 1);
    request->keep[0] = (cm_keep){held, drop_bundle};
    request->keep_count = 1;
    int result = add_keep(several, held, &several->one);
    for (uint32_t i = 0; i < several->count && result == 0; i++) {
        result =
            several->lead[i] == lead ? add_keep(several, held, &several->many[i]) : 0;
    }
    return result;
}

/* -- what must come first ---------------------------------------------------------------- */

static void
add_after(spec *each, cm_stream *stream)
{
    cm_copy_request *request = &each->request;
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (cm_stream_same(each->after[i], stream)) {
            return;
        }
    }
    each->after[request->after_count++] = stream;
}

static void
add_pending(spec *each, const cm_pending *pending)
{
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        add_after(each, pending->streams[i]);
    }
    for (uint32_t i = 0; i < pending->ticket_count; i++) {
        each->after_tickets[each->request.after_ticket_count++] = pending->tickets[i];
    }
}

static int
add_order(const cm_several *several, uint32_t lead, spec *each)
{
    size_t streams =
        (size_t)several->one_pending.stream_count + several->current_count + 1;
    size_t tickets = (size_t)several->one_pending.ticket_count + 1;
    for (uint32_t i = 0; i < several->count; i++) {
        streams += several->many_pending[i].stream_count;
        tickets += several->many_pending[i].ticket_count;
    }
    each->after = PyMem_Malloc(streams * sizeof(cm_stream *));
    each->after_tickets = PyMem_Malloc(tickets * sizeof(cm_ticket *));
    if (each->after == NULL || each->after_tickets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    add_pending(each, &several->one_pending);
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->lead[i] == lead) {
            add_pending(each, &several->many_pending[i]);
        }
    }
    for (uint32_t i = 0; i < several->current_count; i++) {
        add_after(each, several->currents[i]);
    }
    if (several->stream != NULL) {
        add_after(each, several->stream);
    }
    each->request.after = each->after;
    each->request.after_tickets = each->after_tickets;
    return 0;
}

/* -- the copies of the engine ------------------------------------------------------------ */

static int
make_copy_spec(const cm_several *several, uint32_t lead, spec *each)
{
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
    return add_order(several, lead, each) < 0
               ? -1
               : make_bundle(several, lead, &each->request);
}

/* From `begun` on the engine never had them: with their keeps. */
static void
free_copy_specs(const cm_several *several, spec *specs, uint32_t begun)
{
    for (uint32_t i = 0; specs != NULL && i < several->count; i++) {
        PyMem_Free(specs[i].more);
        PyMem_Free(specs[i].after);
        PyMem_Free(specs[i].after_tickets);
        if (i >= begun && specs[i].request.keep_count > 0) {
            drop_bundle(specs[i].request.keep[0].object);
        }
    }
    PyMem_Free(specs);
}

/* What one copy makes all at once. */
static int
group_parts(cm_several *several, cm_engine *engine)
{
    if (several->kind != CM_SEVERAL_BROADCAST) {
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

/* Starts all; those that could not be begun have no ticket. */
static int
start_copies(cm_several *several, cm_engine *engine)
{
    spec *specs = PyMem_Calloc(several->count, sizeof(*specs));
    int result = specs == NULL ? -1 : 0;
    if (specs == NULL) {
        PyErr_NoMemory();
    }
    for (uint32_t i = 0; i < several->count && result == 0; i++) {
        result = several->lead[i] == i ? make_copy_spec(several, i, &specs[i]) : 0;
    }
    uint32_t begun = 0;
    cm_status status = cm_ok();
    if (result == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (; begun < several->count && cm_is_ok(status); begun++) {
            if (several->lead[begun] == begun) {
                status = cm_engine_copy(engine, &specs[begun].request,
                                        &several->tickets[begun]);
            }
        }
        Py_END_ALLOW_THREADS
    }
    free_copy_specs(several, specs, begun);
    if (!cm_is_ok(status)) {
        result = cm_py_raise_int(several->state, status, "while copying");
    }
    return result;
}

/* -- their end --------------------------------------------------------------------------- */

static int
tell_progress(const cm_several *several)
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
wait_for(const cm_several *several, cm_ticket *ticket, cm_status *status)
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
tell_to_stop(const cm_several *several)
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
wait_for_all(cm_several *several, bool *signalled)
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
stop_copies(cm_several *several)
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
release_tickets(cm_several *several)
{
    for (uint32_t i = 0; i < several->count; i++) {
        if (several->tickets[i] != NULL) {
            cm_py_report(several->state, cm_ticket_abandon(several->tickets[i]), NULL);
            several->tickets[i] = NULL;
        }
    }
}

/* An unfinished copy is remembered by its target, and by its source where no stream
 * tells of it: whoever writes that next has to wait. */
static int
remember_end(const cm_several *several, cm_storage *storage, cm_ticket *ticket,
             bool is_target, uint64_t seen)
{
    bool ordered = several->stream != NULL && !several->blocking;
    if (storage == NULL) {
        return 0;
    }
    if (ordered && cm_storage_add_use(storage, several->stream) < 0) {
        return -1;
    }
    return ordered && !is_target
               ? 0
               : cm_storage_add_writer(storage, ticket, CM_EXTENT_ALL(is_target), seen);
}

static int
remember_copies(const cm_several *several)
{
    bool gathers = several->kind == CM_SEVERAL_GATHER;
    for (uint32_t i = 0; i < several->count; i++) {
        cm_storage *each = several->many[i].storage;
        cm_ticket *ticket = several->tickets[several->lead[i]];
        bool again = several->lead[i] != i || several->one.storage == each;
        if (remember_end(several, each, ticket, !gathers, several->many_pending[i].seen)
                < 0
            || (!again
                && remember_end(several, several->one.storage, ticket, gathers,
                                several->one_pending.seen)
                       < 0)) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
make_transfers(cm_several *several)
{
    PyObject *list = PyList_New((Py_ssize_t)several->count);
    for (uint32_t i = 0; list != NULL && i < several->count; i++) {
        PyObject *object = PyTuple_GetItem(several->objects, (Py_ssize_t)i);
        bool gathers = several->kind == CM_SEVERAL_GATHER;
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
get_engine(const cm_several *several)
{
    cm_engine *engine = NULL;
    for (uint32_t i = 0; i <= several->count; i++) {
        bool last = i == several->count;
        const cm_region *region =
            last ? &several->one.region : &several->many[i].region;
        if (region->kind != CM_KIND_PAGEABLE) {
            engine = cm_state_engine(several->state, region->device);
            if (engine == NULL) {
                return NULL;
            }
        }
    }
    engine = engine == NULL ? cm_state_engine(several->state, -1) : engine;
    /* once more, so that pools let in the devices that came into use just now */
    return cm_state_runtime(several->state) == NULL ? NULL : engine;
}

PyObject *
cm_several_run(cm_several *several)
{
    cm_engine *engine = get_engine(several);
    if (engine == NULL || group_parts(several, engine) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    bool signalled;
    if (start_copies(several, engine) < 0 || remember_copies(several) < 0) {
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
    release_tickets(several);
    return result;
}
