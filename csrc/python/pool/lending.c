/* SPDX-License-Identifier: Apache-2.0 */
#include "python/pool/lending.h"

#include <stdlib.h>

#include "base/address_map.h"
#include "base/backoff.h"
#include "python/core/errors.h"

enum { USES_MAX = 4 }; /* streams that are told apart; more turn into a fence */

typedef struct loan {
    cm_pool *pool; /* kept by the block */
    cm_block *block;
    unsigned flags; /* of cm_pool_free() */
    uint32_t use_count;
    cm_stream *uses[USES_MAX]; /* held; none of segments */
} loan;

/* The one of the process: what others call gets no argument of ours. */
static struct lending {
    cm_runtime *_Atomic rt; /* NULL: closed */
    atomic_uint callers;    /* who may be using it */
    atomic_bool leaks;
    cm_spin_lock lock;              /* pools, and what is noted in loans */
    cm_pool *pools[CM_MAX_DEVICES]; /* held; NULL: none is lent */
    cm_address_map loans;
} lending;

static void
leave(void)
{
    (void)atomic_fetch_sub(&lending.callers, 1);
}

/* The runtime, which stays until leave(); NULL: nothing may be touched, nor left. */
static cm_runtime *
enter(void)
{
    (void)atomic_fetch_add(&lending.callers, 1);
    cm_runtime *rt = atomic_load(&lending.rt);
    if (rt == NULL || cm_runtime_is_forked(rt)) {
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

/* PyTorch's streams are never destroyed, and one that a user brings in has to live as
 * long as what was allocated on it (torch.cuda.ExternalStream): it counts as kept.
 * NULL: it cannot be known. */
static cm_stream *
wrap(cm_runtime *rt, int device, void *stream)
{
    static char torch;
    cm_stream *record = NULL;
    bool known = device >= 0
                 && cm_is_ok(cm_stream_wrap(rt, device, (uintptr_t)stream, &torch,
                                            drop_nothing, &record));
    return known ? record : NULL;
}

/* -1: it is not known. A default stream's handle does not tell. */
static int
device_of(cm_runtime *rt, void *stream)
{
    int device = -1;
    int used_count = 0;
    for (int i = 0; i < rt->device_count; i++) {
        bool used = cm_device_was_entered(rt, i);
        used_count += used;
        device = used ? i : device;
    }
    if (used_count == 1) {
        return device;
    }
    bool answered =
        (uintptr_t)stream > CM_STREAM_PER_THREAD
        && cm_runtime_has(rt, CM_OP_stream_get_device)
        && cm_is_ok(cm_rt_stream_get_device(rt, (uintptr_t)stream, &device));
    return answered ? device : -1;
}

static void
end_loan(loan *ended)
{
    while (ended != NULL && ended->use_count > 0) {
        cm_stream_release(ended->uses[--ended->use_count]);
    }
    free(ended);
}

/* Takes over `stream`. NULL: there is no memory. */
static void *
begin_loan(cm_pool *pool, uint64_t nbytes, cm_stream *stream, bool is_segment)
{
    static const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    loan *new = calloc(1, sizeof(*new));
    if (new == NULL) {
        cm_stream_release(stream);
        return NULL;
    }
    *new = (loan){.pool = pool,
                  .flags = is_segment ? CM_POOL_FREE_FENCE : 0,
                  .use_count = 1,
                  .uses = {stream}};
    bool may_wait = !is_segment || cm_is_ok(cm_stream_check_not_capturing(stream));
    cm_status status = cm_pool_alloc(pool, nbytes, is_segment ? NULL : stream,
                                     may_wait ? &uninterrupted : NULL, &new->block);
    if (cm_is_ok(status)
        && cm_address_map_put(&lending.loans, new->block->address, new)) {
        if (is_segment) {
            new->use_count = 0;
            cm_stream_release(stream);
        }
        return (void *)(uintptr_t)new->block->address;
    }
    if (cm_is_ok(status)) {
        cm_pool_free(pool, new->block, NULL, 0, 0); /* nobody has used it */
    }
    end_loan(new);
    return NULL;
}

static void *
lend(uint64_t nbytes, int device, void *stream, bool is_segment)
{
    void *address = NULL;
    bool possible = nbytes > 0 && device >= 0 && device < CM_MAX_DEVICES;
    cm_runtime *rt = possible ? enter() : NULL;
    if (rt == NULL) {
        return NULL;
    }
    cm_spin_lock_take(&lending.lock);
    cm_pool *pool = lending.pools[device];
    if (pool != NULL) {
        (void)cm_pool_hold(pool);
    }
    cm_spin_lock_give(&lending.lock);
    if (pool != NULL) {
        cm_stream *record = wrap(rt, device, stream);
        if (record != NULL) {
            address = begin_loan(pool, nbytes, record, is_segment);
        }
        cm_pool_release(pool);
    }
    leave();
    return address;
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

static void
note_locked(loan *used, cm_stream *stream)
{
    for (uint32_t i = 0; stream != NULL && i < used->use_count; i++) {
        if (cm_stream_same(used->uses[i], stream)) {
            return;
        }
    }
    if (stream != NULL && used->use_count < USES_MAX) {
        used->uses[used->use_count++] = cm_stream_hold(stream);
    }
    else {
        used->flags |= CM_POOL_FREE_FENCE;
    }
}

void
cumem_note_stream(void *address, void *stream)
{
    cm_runtime *rt = enter();
    if (rt == NULL) {
        return;
    }
    cm_stream *record = wrap(rt, device_of(rt, stream), stream);
    /* The caller has the block: it does not come back meanwhile. */
    loan *used = cm_address_map_find(&lending.loans, (uintptr_t)address, false);
    if (used != NULL) {
        cm_spin_lock_take(&lending.lock);
        note_locked(used, record);
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
    if (ended != NULL) { /* else of a generation that is gone */
        cm_pool_free(ended->pool, ended->block, ended->uses, ended->use_count,
                     ended->flags);
    }
    end_loan(ended);
    leave();
}

/* What was lent before; NULL: nothing. */
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
    /* Its context is known from now on: others' memory is opened to it. */
    cm_runtime *rt = state->runtime;
    int device = self->config.device;
    cm_status status = CM_WITHOUT_GIL(CM_ON_DEVICE(rt, device, cm_ok()));
    if (cm_is_ok(status)) {
        cm_pool *old = exchange_pool(device, cm_pool_hold(pool));
        atomic_store(&lending.rt, cm_state_runtime(state));
        if (old != NULL) {
            cm_pool_let_go(state, old);
        }
    }
    cm_pool_object_give(op, pool);
    return cm_py_answer(state, status, "while lending a pool", Py_NewRef(Py_None));
}

size_t
cm_lending_end(cm_pool **out)
{
    size_t count = 0;
    atomic_store(&lending.rt, NULL);
    uint64_t start = cm_now_ns();
    while (atomic_load(&lending.callers) > 0) {
        cm_nap_after(cm_now_ns() - start);
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_pool *old = exchange_pool(device, NULL);
        if (old != NULL) {
            out[count++] = old;
        }
    }
    for (uint64_t i = 0; i < lending.loans.room; i++) {
        end_loan(lending.loans.entries[i].value);
    }
    cm_address_map_fini(&lending.loans);
    return count;
}

void
cm_lending_leak(void)
{
    atomic_store(&lending.leaks, true);
}
