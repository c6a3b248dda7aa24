/* SPDX-License-Identifier: Apache-2.0 */
/* The loans, the exported functions, and the count of threads that are inside them. */
#include "python/pool/lending.h"

#include <stdlib.h>

#include "base/address_map.h"
#include "base/backoff.h"
#include "python/core/errors.h"
#include "python/core/recording.h"

enum {
    USES_MAX = 4,     /* streams that a loan can note; with more it goes back behind a
                         fence */
    CLOSED = 1 << 30, /* added to the callers when nobody is let in */
    GRACE_NS = 100 * 1000 /* a call that does not wait takes less */
};

typedef struct loan {
    cm_pool *pool; /* kept alive by the block */
    cm_block *block;
    unsigned flags; /* flags for cm_pool_free() */
    uint32_t use_count;
    cm_stream *uses[USES_MAX]; /* held; a segment has none */
} loan;

/* There is one for the process, since a function that another library calls gets no
 * argument by which it could find another. */
static struct lending {
    cm_runtime *_Atomic rt;
    atomic_int callers; /* threads inside, plus CLOSED if nobody is let in */
    atomic_bool leaks;
    cm_spin_lock lock;              /* guards the pools, and what is noted in loans */
    cm_pool *pools[CM_MAX_DEVICES]; /* held; NULL if none is lent for that device */
    cm_address_map loans;
} lending = {.callers = CLOSED};

static void
leave(void)
{
    (void)atomic_fetch_sub(&lending.callers, 1);
}

/* Come in. Returns the runtime, which stays until leave(). Returns NULL if nothing may
 * be touched, and then leave() must not be called. */
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
lend(uint64_t nbytes, int device, void *stream, bool is_segment)
{
    cm_address address = 0;
    bool possible = nbytes > 0 && device >= 0 && device < CM_MAX_DEVICES;
    /* For a segment the caller's Python code is not looked at, since the caller then
     * holds a lock that threads with the GIL wait for. Otherwise it is looked at before
     * enter(), since a thread with the GIL may wait until nobody is inside. */
    cm_event_origin before = cm_recording_lend_caller(!is_segment);
    cm_runtime *rt = possible ? enter() : NULL;
    if (rt == NULL) {
        (void)cm_recorder_lend_origin(before);
        return NULL;
    }
    cm_spin_lock_take(&lending.lock);
    cm_pool *pool = lending.pools[device];
    pool = pool == NULL ? NULL : cm_pool_hold(pool);
    cm_spin_lock_give(&lending.lock);
    loan *new = pool == NULL ? NULL : calloc(1, sizeof(*new));
    if (new != NULL) {
        *new = (loan){.pool = pool};
        if (cm_is_ok(fill_loan(rt, new, nbytes, stream, is_segment))) {
            address = new->block->address;
        }
        else {
            end_loan(new);
        }
    }
    if (pool != NULL) {
        cm_pool_release(pool);
    }
    leave();
    (void)cm_recorder_lend_origin(before);
    return (void *)(uintptr_t)address;
}

void *
cumem_lend(size_t nbytes, int device, void *stream)
{
    return lend(nbytes, device, stream, false);
}

void *
cumem_lend_segment(size_t nbytes, int device, void *stream)
{
    return lend(nbytes, device, stream, true);
}

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
        cm_pool_free(ended->pool, ended->block, ended->uses, ended->use_count,
                     ended->flags);
        end_loan(ended);
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

PyObject *
cm_lend_pool(PyObject *module, PyObject *op)
{
    cm_state *state = cm_state_of_module(module);
    cm_pool_object *self;
    int result = cm_arg_pool(state, op, &self);
    cm_pool *pool = result < 0 || self == NULL ? NULL : cm_pool_object_take(op);
    if (pool == NULL) {
        return self == NULL && result == 0 ? Py_NewRef(Py_None) : NULL;
    }
    /* Enter the device, so that its context is known from now on and other pools open
     * their memory to it. */
    cm_runtime *rt = state->runtime;
    int device = self->config.device;
    cm_status status = CM_WITHOUT_GIL(CM_ON_DEVICE(rt, device, cm_ok()));
    if (cm_is_ok(status)) {
        cm_pool *old = exchange_pool(device, cm_pool_hold(pool));
        atomic_store(&lending.rt, cm_state_runtime(state));
        (void)atomic_fetch_and(&lending.callers, ~CLOSED);
        if (old != NULL) {
            cm_pool_let_go(state, old);
        }
    }
    cm_pool_object_give(op, pool);
    return cm_py_answer(state, status, "while lending a pool", Py_NewRef(Py_None));
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
    for (uint64_t i = 0; i < lending.loans.room; i++) {
        loan *ended = lending.loans.entries[i].value;
        if (ended != NULL) {
            cm_pool_forsake(ended->pool);
            end_loan(ended);
        }
    }
    cm_address_map_fini(&lending.loans);
    return true;
}

void
cm_lending_leak(void)
{
    atomic_store(&lending.leaks, true);
}
