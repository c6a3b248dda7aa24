/* SPDX-License-Identifier: Apache-2.0 */
/* Running the parts of a copy between one end and several, and their handles. */
#include <stdlib.h>

#include "python/copy/call.h"
#include "python/copy/multi_device.h"
#include "python/core/errors.h"
#include "python/device/objects.h"

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
    cm_several_shared *shared = object;
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
add_ends(const cm_several *several, uint32_t lead, cm_call *call)
{
    bool gathers = several->kind == CM_SEVERAL_GATHER;
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
make_copy_spec(const cm_several *several, uint32_t lead, spec *each)
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
free_copy_specs(const cm_several *several, spec *specs)
{
    for (uint32_t i = 0; specs != NULL && i < several->count; i++) {
        cm_call_fini(&specs[i].call);
        PyMem_Free(specs[i].more);
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

static int
make_copy_specs(const cm_several *several, spec *specs)
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
    return 0;
}

/* Starts all; those that could not be begun have no ticket. */
static int
start_copies(cm_several *several, cm_engine *engine, spec *specs)
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
remember_copies(cm_several *several, spec *specs)
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
run(cm_several *several, spec *specs)
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

PyObject *
cm_several_run(cm_several *several)
{
    spec *specs = PyMem_Calloc(several->count, sizeof(*specs));
    PyObject *result = specs == NULL ? PyErr_NoMemory() : run(several, specs);
    release_tickets(several);
    free_copy_specs(several, specs);
    return result;
}
