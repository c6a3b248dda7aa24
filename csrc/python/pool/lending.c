/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the loans, the functions that other libraries call (lending.h), and the
 * count of threads that are inside these functions.
 *
 * Desks
 * -----
 * PyTorch may take segments from several pools of one device at once: from one region
 * for weights, and from another one for a cache. Each torch.cuda.MemPool takes them
 * from one pool only. But what it calls is a plain function of a size, a device and a
 * stream, which cannot say on whose behalf it is called. So each pool that lends to
 * MemPools gets a function of its own. There is a fixed number of such functions, the
 * desks, which the macro CM_DESKS makes. They differ only in the number that they pass
 * on.
 *
 * Example: using(weights) opens desk 0 for that region, and the new MemPool has the
 * address of cumem_desk_00. using(cache) opens desk 1. A second thread in
 * using(weights) has a MemPool of its own, which shares desk 0.
 *
 * Edges
 * -----
 *   - A desk closes once all its MemPools have ended and all its segments are back. A
 *     MemPool object may end before its segments do, since tensors keep them, and CUDA
 *     graphs that were captured into it may ask for more.
 *   - After shutdown() a desk lends nothing. It opens for no other pool before its
 *     MemPools have ended, so an old MemPool never takes memory of a new region. */
#include "python/pool/lending.h"

#include <stdlib.h>

#include "base/address_map.h"
#include "base/backoff.h"
#include "python/core/errors.h"
#include "python/core/recording.h"

enum {
    USES_MAX = 4,     /* streams that a loan can note; with more it goes back behind a
                         fence */
    NO_DESK = -1,     /* stands for the pool that was lent for the whole device */
    CLOSED = 1 << 30, /* added to the callers when nobody is let in */
    GRACE_NS = 100 * 1000 /* a call that does not wait takes less */
};

typedef struct loan {
    cm_pool *pool; /* kept alive by the block */
    cm_block *block;
    int desk;       /* the desk that lent the block, or NO_DESK */
    unsigned flags; /* flags for cm_pool_free() */
    uint32_t use_count;
    cm_stream *uses[USES_MAX]; /* held; a segment has none */
} loan;

typedef struct desk {
    cm_pool *pool;       /* held; NULL if the desk is closed */
    uint32_t user_count; /* MemPools that know its function */
    uint64_t loan_count; /* segments that are on loan, or about to be */
} desk;

/* There is one for the process, since a function that another library calls gets no
 * argument by which it could choose between several. */
static struct lending {
    cm_runtime *_Atomic rt;
    atomic_int callers; /* threads inside, plus CLOSED if nobody is let in */
    atomic_bool leaks;
    cm_spin_lock lock; /* guards the pools, the desks, and what is noted in loans */
    cm_pool *pools[CM_MAX_DEVICES]; /* held; NULL if none is lent for that device */
    desk desks[CM_DESK_COUNT];
    int next_desk; /* where the search for a free desk begins */
    cm_address_map loans;
} lending = {.callers = CLOSED};

static void
leave(void)
{
    (void)atomic_fetch_sub(&lending.callers, 1);
}

/* Count this thread as one that is inside. Returns the runtime, which stays open until
 * leave(), or NULL if nothing is lent at present, in which case leave() must not be
 * called. */
static cm_runtime *
enter(void)
{
    bool is_closed = atomic_fetch_add(&lending.callers, 1) >= CLOSED;
    cm_runtime *rt = atomic_load(&lending.rt);
    if (is_closed || cm_runtime_is_forked(rt)) {
        leave();
        return NULL;
    }
    return rt;
}

/* Begin a loan from a desk or, with NO_DESK, from the pool of the whole device. Returns
 * the pool, held, or NULL if nothing is lent there. After a success end_counted() must
 * be called. */
static cm_pool *
begin_counted(int at, int device)
{
    cm_spin_lock_take(&lending.lock);
    cm_pool *pool = at == NO_DESK ? lending.pools[device] : lending.desks[at].pool;
    if (pool != NULL && cm_pool_get_config(pool)->device != device) {
        pool = NULL;
    }
    if (pool != NULL && at != NO_DESK) {
        lending.desks[at].loan_count++;
    }
    pool = pool == NULL ? NULL : cm_pool_hold(pool);
    cm_spin_lock_give(&lending.lock);
    return pool;
}

/* Close a desk that nobody can ask any more. Returns its pool, which the caller
 * releases without the lock, or NULL. */
static cm_pool *
close_unused_locked(desk *left)
{
    if (left->user_count > 0 || left->loan_count > 0) {
        return NULL;
    }
    cm_pool *pool = left->pool;
    left->pool = NULL;
    return pool;
}

/* End a loan that begin_counted() began. */
static void
end_counted(int at)
{
    if (at == NO_DESK) {
        return;
    }
    cm_spin_lock_take(&lending.lock);
    lending.desks[at].loan_count--;
    cm_pool *pool = close_unused_locked(&lending.desks[at]);
    cm_spin_lock_give(&lending.lock);
    if (pool != NULL) {
        cm_pool_release(pool);
    }
}

static void
drop_nothing(void *owner)
{
    (void)owner;
}

/* Make a record of a stream of PyTorch's. PyTorch never destroys its streams, and one
 * that a user brings in (torch.cuda.ExternalStream) has to live as long as the memory
 * that was allocated on it, so the stream counts as kept. */
static cm_status
wrap(cm_runtime *rt, int device, void *stream, cm_stream **out)
{
    static char torch;
    return cm_stream_wrap(rt, device, (uintptr_t)stream, &torch, drop_nothing, out);
}

static void
end_loan(loan *ended)
{
    while (ended->use_count > 0) {
        cm_stream_release(ended->uses[--ended->use_count]);
    }
    free(ended);
}

/* Fill a loan with a block.
 * Fails: CM_ENOMEM; as cm_stream_wrap() and cm_pool_alloc(). */
static cm_status
fill_loan(cm_runtime *rt, loan *new, uint64_t nbytes, void *stream, bool is_segment)
{
    static const cm_wait_hooks uninterrupted = {.grows_at_once = true};
    cm_stream *record;
    CM_TRY(wrap(rt, cm_pool_get_config(new->pool)->device, stream, &record));
    new->uses[new->use_count++] = record;
    cm_stream *order = is_segment ? NULL : record;
    bool captures = is_segment && !cm_is_ok(cm_stream_check_not_capturing(record));
    const cm_wait_hooks *hooks = captures ? NULL : &uninterrupted;
    cm_status status = cm_pool_alloc(new->pool, nbytes, order, hooks, &new->block);
    /* Take the steps that are taken for our own buffers, except those that run Python
     * code. */
    if (cm_pool_is_short(status)) {
        cm_trim_request r = {0};
        captures = !cm_is_ok(cm_stream_check_not_capturing(record));
        cm_ignore(cm_pool_trim_others(new->pool, status, captures ? NULL : hooks, &r));
        if (r.released_nbytes > 0) {
            status = cm_pool_alloc(new->pool, nbytes, order, hooks, &new->block);
        }
    }
    CM_TRY(status);
    if (!cm_address_map_put(&lending.loans, new->block->address, new)) {
        cm_pool_free(new->pool, new->block, NULL, 0, 0); /* nobody has used the block */
        return cm_fail(CM_ENOMEM, nbytes);
    }
    if (is_segment) {
        new->use_count = 0;
        new->flags = CM_POOL_FREE_FENCE;
        cm_stream_release(record);
    }
    return cm_ok();
}

static void *
lend(uint64_t nbytes, int device, void *stream, bool is_segment, int at)
{
    cm_address address = 0;
    bool possible = nbytes > 0 && device >= 0 && device < CM_MAX_DEVICES;
    /* The record of the allocation has the Python stack of the caller, and reading it
     * takes the GIL. The stack is not read for a segment, because the caller then holds
     * a lock for which threads with the GIL wait. The stack is read before enter(),
     * because a thread with the GIL may wait until nobody is inside. */
    cm_event_origin before = cm_recording_lend_caller(!is_segment);
    cm_runtime *rt = possible ? enter() : NULL;
    if (rt == NULL) {
        (void)cm_recorder_lend_origin(before);
        return NULL;
    }
    cm_pool *pool = begin_counted(at, device);
    loan *new = pool == NULL ? NULL : calloc(1, sizeof(*new));
    if (new != NULL) {
        *new = (loan){.pool = pool, .desk = at};
        if (cm_is_ok(fill_loan(rt, new, nbytes, stream, is_segment))) {
            address = new->block->address;
        }
        else {
            end_loan(new);
        }
    }
    if (pool != NULL) {
        if (address == 0) {
            end_counted(at);
        }
        cm_pool_release(pool);
    }
    leave();
    (void)cm_recorder_lend_origin(before);
    return (void *)(uintptr_t)address;
}

void *
cumem_lend(size_t nbytes, int device, void *stream)
{
    return lend(nbytes, device, stream, false, NO_DESK);
}

void *
cumem_lend_segment(size_t nbytes, int device, void *stream)
{
    return lend(nbytes, device, stream, true, NO_DESK);
}

#define CM_DESK(tens, ones)                                                            \
    void *cumem_desk_##tens##ones(size_t nbytes, int device, void *stream)             \
    {                                                                                  \
        return lend(nbytes, device, stream, true, tens * 8 + ones);                    \
    }
CM_DESKS(CM_DESK)
#undef CM_DESK

void
cumem_note_stream(void *address, void *stream)
{
    cm_runtime *rt = enter();
    if (rt == NULL) {
        return;
    }
    /* The caller has the block, so it does not come back meanwhile. */
    loan *used = cm_address_map_find(&lending.loans, (uintptr_t)address, false);
    cm_stream *record = NULL;
    int device = used == NULL ? 0 : cm_pool_get_config(used->pool)->device;
    if (used != NULL && cm_devices_in_use(rt, true) == UINT64_C(1) << device) {
        /* With several devices in use, the handle alone does not tell whose it is. */
        cm_ignore(wrap(rt, device, stream, &record));
    }
    if (used != NULL) {
        cm_spin_lock_take(&lending.lock);
        uint32_t i = 0;
        while (record != NULL && i < used->use_count
               && !cm_stream_same(used->uses[i], record)) {
            i++;
        }
        if (record == NULL || i == USES_MAX) {
            used->flags |= CM_POOL_FREE_FENCE;
        }
        else if (i == used->use_count) {
            used->uses[used->use_count++] = cm_stream_hold(record);
        }
        cm_spin_lock_give(&lending.lock);
    }
    if (record != NULL) {
        cm_stream_release(record);
    }
    leave();
}

void
cumem_take_back(void *address, size_t nbytes, int device, void *stream)
{
    (void)nbytes, (void)device, (void)stream;
    if (atomic_load(&lending.leaks) || enter() == NULL) {
        return;
    }
    loan *ended = cm_address_map_find(&lending.loans, (uintptr_t)address, true);
    if (ended != NULL) { /* otherwise the loan belongs to a generation that is gone */
        int at = ended->desk;
        cm_pool_free(ended->pool, ended->block, ended->uses, ended->use_count,
                     ended->flags);
        end_loan(ended);
        end_counted(at);
    }
    leave();
}

/* Lend another pool for a device. Returns the pool that was lent before, or NULL if
 * there was none. */
static cm_pool *
exchange_pool(int device, cm_pool *pool)
{
    cm_spin_lock_take(&lending.lock);
    cm_pool *old = lending.pools[device];
    lending.pools[device] = pool;
    cm_spin_lock_give(&lending.lock);
    return old;
}

/* Read a pool that is to be lent. Its device is entered, so that the context is known
 * from now on and other pools open their memory to it. Returns the pool, which the
 * caller gives back by cm_pool_object_give(), or NULL with an exception or, in a core
 * that is only half open, without one. */
static cm_pool *
take_lendable(cm_state *state, PyObject *op)
{
    cm_pool_object *self;
    int result = cm_arg_pool(state, op, &self);
    cm_pool *pool = result < 0 || self == NULL ? NULL : cm_pool_object_take(op);
    if (pool == NULL) {
        return NULL;
    }
    cm_runtime *rt = state->runtime;
    int device = self->config.device;
    cm_status status = CM_WITHOUT_GIL(CM_ON_DEVICE(rt, device, cm_ok()));
    if (cm_py_check(state, status, "while lending a pool") < 0) {
        cm_pool_object_give(op, pool);
        return NULL;
    }
    return pool;
}

static void
let_callers_in(cm_state *state)
{
    atomic_store(&lending.rt, cm_state_runtime(state));
    (void)atomic_fetch_and(&lending.callers, ~CLOSED);
}

PyObject *
cm_lend_pool(PyObject *module, PyObject *op)
{
    cm_state *state = cm_state_of_module(module);
    cm_pool *pool = take_lendable(state, op);
    if (pool != NULL) {
        int device = cm_pool_get_config(pool)->device;
        cm_pool *old = exchange_pool(device, cm_pool_hold(pool));
        let_callers_in(state);
        if (old != NULL) {
            cm_pool_let_go(state, old);
        }
        cm_pool_object_give(op, pool);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Find the desk of a pool, or open one for it. Returns its number, or NO_DESK if all
 * are taken. */
static int
open_desk(cm_pool *pool)
{
    int found = NO_DESK;
    cm_spin_lock_take(&lending.lock);
    for (int i = 0; i < CM_DESK_COUNT && found == NO_DESK; i++) {
        found = lending.desks[i].pool == pool ? i : NO_DESK;
    }
    for (int i = 0; i < CM_DESK_COUNT && found == NO_DESK; i++) {
        int at = (lending.next_desk + i) % CM_DESK_COUNT;
        desk *free_one = &lending.desks[at];
        if (free_one->pool == NULL && free_one->user_count == 0) {
            free_one->pool = cm_pool_hold(pool);
            lending.next_desk = at + 1;
            found = at;
        }
    }
    if (found != NO_DESK) {
        lending.desks[found].user_count++;
    }
    cm_spin_lock_give(&lending.lock);
    return found;
}

PyObject *
cm_open_desk(PyObject *module, PyObject *op)
{
    cm_state *state = cm_state_of_module(module);
    cm_pool *pool = take_lendable(state, op);
    int at = NO_DESK;
    if (pool != NULL) {
        at = open_desk(pool);
        let_callers_in(state);
        cm_pool_object_give(op, pool);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    return at == NO_DESK ? Py_NewRef(Py_None) : PyLong_FromLong(at);
}

PyObject *
cm_close_desk(PyObject *module, PyObject *number)
{
    cm_state *state = cm_state_of_module(module);
    long at = PyLong_AsLong(number);
    if (at == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (at < 0 || at >= CM_DESK_COUNT) {
        PyErr_SetString(PyExc_ValueError, "there is no such desk");
        return NULL;
    }
    cm_runtime *rt = atomic_load(&lending.rt);
    if (rt != NULL && cm_runtime_is_forked(rt)) {
        return Py_NewRef(Py_None); /* another thread may have had the lock at the fork
                                    */
    }
    cm_spin_lock_take(&lending.lock);
    desk *left = &lending.desks[at];
    left->user_count -= left->user_count > 0;
    cm_pool *pool = close_unused_locked(left);
    cm_spin_lock_give(&lending.lock);
    if (pool != NULL) {
        cm_pool_let_go(state, pool);
    }
    return Py_NewRef(Py_None);
}

bool
cm_lending_wait(uint64_t most_ns)
{
    uint64_t start = cm_now_ns();
    uint64_t elapsed = 0;
    while (atomic_load(&lending.callers) % CLOSED > 0 && elapsed < most_ns) {
        cm_nap_after(elapsed);
        elapsed = cm_now_ns() - start;
    }
    return elapsed < most_ns;
}

/* Let no desk lend any more, and forget what is on loan. The pools, still held, move to
 * `out`. Returns how many they are. */
static size_t
take_desks(cm_pool **out)
{
    size_t count = 0;
    cm_spin_lock_take(&lending.lock);
    for (int i = 0; i < CM_DESK_COUNT; i++) {
        desk *ended = &lending.desks[i];
        if (ended->pool != NULL) {
            out[count++] = ended->pool;
        }
        *ended = (desk){.user_count = ended->user_count};
    }
    cm_spin_lock_give(&lending.lock);
    return count;
}

bool
cm_lending_try_end(cm_pool **out, size_t *count)
{
    /* If nobody is inside, 0 becomes CLOSED. CLOSED or more means that nothing is lent,
     * and that whoever enters turns back at once. With any other value a thread is
     * inside. */
    int callers = 0;
    if (!cm_lending_wait(GRACE_NS)
        || (!atomic_compare_exchange_strong(&lending.callers, &callers, CLOSED)
            && callers < CLOSED)) {
        return false;
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_pool *old = exchange_pool(device, NULL);
        if (old != NULL) {
            out[(*count)++] = old;
        }
    }
    *count += take_desks(out + *count);
    for (uint64_t i = 0; i < lending.loans.room; i++) {
        loan *ended = lending.loans.entries[i].value;
        if (ended != NULL) {
            cm_pool_forsake(ended->pool);
            end_loan(ended);
        }
    }
    cm_address_map_fini(&lending.loans);
    atomic_store(&lending.rt, NULL); /* desks may be closed after it has ended */
    return true;
}

void
cm_lending_leak(void)
{
    atomic_store(&lending.leaks, true);
}
