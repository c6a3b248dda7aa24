/* SPDX-License-Identifier: Apache-2.0 */
/* Spills buffers of a pool with spill="pinned". pool/spill.c does the part that needs
 * no Python.
 *
 * The idea
 * --------
 * When an allocation from such a pool fails for lack of memory, buffers that nobody has
 * used for the longest time go to sleep: their bytes are copied to page-locked memory,
 * and the whole chunks inside them go back to the driver. The next use of such a buffer
 * wakes it at the same addresses. That may make other buffers sleep.
 *
 * Which buffers
 * -------------
 * Only memory that cumem alone knows may sleep. A buffer that was exported, whose
 * address was read, or that a graph has captured, may be used by others at any time. So
 * it stays. A buffer on which a call or a transfer works stays as well, and so do a
 * buffer for which keep() was called and a buffer without a whole chunk. Each use of a
 * buffer goes through cm_storage_check_open(), which for these pools stamps the storage
 * with a number that rises with each use. The storages with the lowest numbers have
 * been idle longest.
 *
 * Turns
 * -----
 * One thread at a time moves buffers of a pool. It has the pool's spill turn, which it
 * takes and gives back with the GIL held, and keeps while it copies without the GIL.
 * It chooses and marks the storages with the GIL held (`is_moving`). A thread that uses
 * a marked storage waits for the turn. So whether a buffer sleeps is always decided
 * with the GIL held, and a call that works on a buffer without the GIL has said so
 * before (`holds`).
 *
 * Example: a pool may hold 2 GiB and has the buffers A and B of 1 GiB each. A was used
 * last.
 *
 *   C = allocate   The pool meets its limit. B is marked, copied and put to sleep, and
 *                  the allocation succeeds at the second attempt.
 *   B.fill(0)      B is marked. The limit refuses it memory, so A is marked, copied and
 *                  put to sleep. B gets memory and its bytes, and is filled.
 *
 * Order
 * -----
 * The copy to the host comes after all streams that a storage remembers, and the thread
 * waits for nothing but these streams and this copy. Bytes come back before anybody can
 * queue work on them.
 *
 * Edges
 * -----
 *   - free() of a buffer that moves only closes it, because the move holds it as a
 *     transfer does. A buffer that sleeps is freed without waking.
 *   - A signal handler or a callback may run during a move and use a buffer that moves.
 *     Such a use gets an error, since waiting would never end.
 *   - Nothing moves while a stream that is known is being captured.
 *   - A request and the users of what it spills could take the memory from each other
 *     for ever. So a request gives up once it has spilled CONTENDED_TIMES as much as
 *     lives in the pool. If nobody else used these buffers, the request would spill
 *     each of them once.
 *   - If a copy or a call fails, the buffers that it was for stay as they were. */
#include "python/pool/spilling.h"

#include <stdlib.h>

#include "base/backoff.h"
#include "python/core/errors.h"
#include "python/core/package.h"
#include "python/device/wait.h"
#include "python/pool/handover.h"
#include "python/pool/limits.h"
#include "runtime/stream.h"

/* A request may spill this many times the memory that lives in the pool. */
enum { CONTENDED_TIMES = 16 };

/* A storage that moves. */
typedef struct mover {
    cm_storage *storage; /* held as by a transfer */
    cm_address address;  /* of the bytes that move */
    uint64_t nbytes;
    cm_block *host; /* where the bytes are, or go; NULL if there is no room */
    bool is_asleep;
} mover;

/* One move, of several storages of one pool in one direction. */
typedef struct spill_move {
    cm_state *state;
    cm_pool *pool;
    cm_engine *engine;
    mover *movers; /* owned */
    uint32_t count;
    cm_stream **after; /* owned, and on loan: the copy comes after these */
    uint32_t after_count;
    uint32_t after_room;
} spill_move;

/* -- the turn ------------------------------------------------------------------------------ */

/* Take the pool's turn. *waited says whether another thread had it. Returns 0, or -1
 * with what a signal handler raised, or RuntimeError if this thread has it already. */
static int
take_turn(cm_pool *pool, bool *waited)
{
    uint64_t begin_ns = cm_now_ns();
    *waited = false;
    while (!cm_pool_take_spill_turn(pool)) {
        if (cm_pool_has_spill_turn(pool)) {
            PyErr_SetString(PyExc_RuntimeError,
                            "the buffer is being moved by a call of this thread, which "
                            "a signal handler or a callback has interrupted");
            return -1;
        }
        *waited = true;
        PyThreadState *thread = cm_gil_give();
        cm_nap_after(cm_now_ns() - begin_ns);
        cm_gil_take(thread);
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

/* -- who may sleep ------------------------------------------------------------------------- */

static bool
is_busy(const cm_storage *s)
{
    return s->closed || s->is_moving || atomic_load(&s->holds) != 0;
}

/* Find out whether a storage may sleep, and count the reason if it may not. */
static bool
may_sleep(const cm_storage *s, uint64_t nbytes, cm_spill_report *report)
{
    uint64_t *reason = NULL;
    if (cm_storage_has_left(s)) {
        reason = &report->gone_count;
    }
    else if (s->is_kept) {
        reason = &report->kept_count;
    }
    else if (is_busy(s)) {
        reason = &report->busy_count;
    }
    else if (nbytes == 0) {
        reason = &report->small_count;
    }
    if (reason != NULL) {
        (*reason)++;
    }
    return reason == NULL;
}

/* Compare by the last use. Storages that have never been used come in the order in
 * which they were made. */
static int
compare_uses(const void *a, const void *b)
{
    uint64_t x = ((const mover *)a)->storage->touched;
    uint64_t y = ((const mover *)b)->storage->touched;
    return (x > y) - (x < y);
}

/* List all storages that may sleep, those that have been idle longest first. Nothing is
 * held yet. Returns 0, or -1 with MemoryError. */
static int
list_idle(spill_move *self, cm_spill_report *report)
{
    const cm_list *all = &self->state->storages;
    self->movers = calloc(cm_list_count(all) + 1, sizeof(*self->movers));
    if (self->movers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    report->gone_count = report->kept_count = report->busy_count = 0;
    report->small_count = 0;
    for (const cm_list *n = all->next; n != all; n = n->next) {
        cm_storage *s = CM_LIST_ENTRY(n, cm_storage, node);
        if (s->pool != self->pool || s->block == NULL || s->spilled != NULL) {
            continue;
        }
        mover one = {.storage = s};
        one.nbytes = cm_block_inside(self->pool, s->block, &one.address);
        if (may_sleep(s, one.nbytes, report)) {
            self->movers[self->count++] = one;
        }
    }
    qsort(self->movers, self->count, sizeof(*self->movers), compare_uses);
    return 0;
}

/* -- marking ------------------------------------------------------------------------------- */

/* Let the copy come after the streams of a storage. Returns 0, or -1 with MemoryError.
 */
static int
come_after(spill_move *self, const cm_storage *s)
{
    for (uint32_t i = 0; i < s->use_count; i++) {
        bool is_known = false;
        for (uint32_t k = 0; k < self->after_count && !is_known; k++) {
            is_known = cm_stream_same(self->after[k], s->uses[i]);
        }
        if (is_known) {
            continue;
        }
        if (cm_reserve(&self->after, sizeof(*self->after), NULL, 0, self->after_count,
                       &self->after_room)
            < 0) {
            return -1;
        }
        self->after[self->after_count++] = cm_stream_take(self->state, s->uses[i]);
    }
    return 0;
}

/* Mark the first storages of the list, until they have `nbytes` together, and shorten
 * the list to them. Returns 0, or -1 with MemoryError. */
static int
mark_first(spill_move *self, uint64_t nbytes)
{
    uint32_t count = 0;
    uint64_t found = 0;
    while (count < self->count && (count == 0 || found < nbytes)) {
        found += self->movers[count++].nbytes;
    }
    self->count = 0;
    for (uint32_t i = 0; i < count; i++) {
        cm_storage *s = self->movers[i].storage;
        if (come_after(self, s) < 0) {
            return -1;
        }
        /* A transfer may have dropped the last reference in the meantime. */
        if (cm_storage_try_hold_transfer(s)) {
            s->is_moving = true;
            self->movers[self->count++] = self->movers[i];
        }
    }
    return 0;
}

/* End a move: take the marks away, and release everything. Storages that were closed
 * meanwhile give their memory back now. */
static void
end_move(spill_move *self)
{
    for (uint32_t i = 0; i < self->count; i++) {
        cm_storage *s = self->movers[i].storage;
        s->is_moving = false;
        cm_storage_drop_transfer(s);
    }
    while (self->after_count > 0) {
        cm_stream_give(self->state, self->after[--self->after_count]);
    }
    free((void *)self->after);
    free(self->movers);
}

/* -- bytes --------------------------------------------------------------------------------- */

/* Describe the copies of all movers that have a place on the host. Returns an array
 * that the caller frees, or NULL if there is no memory. */
static cm_piece *
make_pieces(const spill_move *self, bool to_host, uint64_t *count)
{
    int16_t device = (int16_t)cm_pool_get_config(self->pool)->device;
    cm_piece *pieces = calloc((size_t)self->count + 1, sizeof(*pieces));
    *count = 0;
    for (uint32_t i = 0; pieces != NULL && i < self->count; i++) {
        const mover *m = &self->movers[i];
        if (m->host == NULL) {
            continue;
        }
        const cm_piece_end far = {.address = m->address,
                                  .owner = m->storage->block,
                                  .kind = CM_KIND_DEVICE,
                                  .device = device};
        const cm_piece_end near = {.host = m->host->host,
                                   .address = m->host->address,
                                   .owner = m->host,
                                   .kind = CM_KIND_PINNED,
                                   .device = device};
        pieces[*count] = (cm_piece){.dst = to_host ? near : far,
                                    .src = to_host ? far : near,
                                    .nbytes = m->nbytes,
                                    .index = *count};
        (*count)++;
    }
    return pieces;
}

/* Make copies on a stream that has nothing else to do, after the work that comes first.
 */
static cm_status
copy_on_stream(const spill_move *self, cm_stream *stream, cm_piece *pieces,
               uint64_t count, const cm_wait_hooks *hooks)
{
    cm_ticket *ticket;
    CM_TRY(cm_handover_come_after(stream, self->after, self->after_count, hooks));
    CM_TRY(cm_handover_begin(self->engine, stream, pieces, count, hooks, &ticket));
    return cm_handover_end(stream, ticket, hooks);
}

/* Copy the bytes of all movers that have a place on the host, in one batch, and return
 * when they are copied. Even if the call is interrupted or fails, nothing is under way
 * when it returns. Called without the GIL. */
static cm_status
copy_bytes(const spill_move *self, bool to_host, const cm_wait_hooks *hooks)
{
    cm_stream *stream = NULL;
    uint64_t count;
    cm_piece *pieces = make_pieces(self, to_host, &count);
    cm_status status = cm_allocated(pieces != NULL, sizeof(*pieces));
    if (!cm_is_ok(status) || count == 0) {
        goto done;
    }
    status =
        cm_stream_create(self->state->runtime, cm_pool_get_config(self->pool)->device,
                         CM_STREAM_NON_BLOCKING, 0, &stream);
    if (cm_is_ok(status)) {
        status = copy_on_stream(self, stream, pieces, count, hooks);
        cm_stream_release(stream);
    }
done:
    free(pieces);
    return status;
}

/* Find page-locked memory for each mover, as far as there is any. If there is none,
 * other pools give back what they have cached, and it is tried once more. Called
 * without the GIL.
 * Fails: as cm_pool_alloc(); the movers behind the first that failed have no memory. */
static cm_status
find_host(const spill_move *self, cm_pool *host_pool, const cm_wait_hooks *hooks)
{
    bool has_trimmed = false;
    for (uint32_t i = 0; i < self->count; i++) {
        mover *m = &self->movers[i];
        cm_status status = cm_pool_alloc(host_pool, m->nbytes, NULL, hooks, &m->host);
        if (cm_pool_is_short(status) && !has_trimmed) {
            has_trimmed = true;
            cm_trim_request r = {.kind = CM_KIND_PINNED, .device = -1};
            CM_TRY(cm_pools_trim(self->state->runtime, &r, hooks));
            status = cm_pool_alloc(host_pool, m->nbytes, NULL, hooks, &m->host);
        }
        if (!cm_is_ok(status)) {
            m->host = NULL;
            return status;
        }
    }
    return cm_ok();
}

/* Copy the marked storages to the host, and give their memory back. If something fails,
 * each of them either sleeps or is unchanged. Called without the GIL.
 * Fails: the first failure; some of them may sleep all the same. */
static cm_status
put_to_sleep(const spill_move *self, cm_pool *host_pool, const cm_wait_hooks *hooks)
{
    cm_status first = find_host(self, host_pool, hooks);
    cm_status copied = first;
    if (first.code != CM_ECANCELLED) {
        copied = copy_bytes(self, true, hooks);
        first = cm_first_failure(first, copied);
    }
    for (uint32_t i = 0; i < self->count; i++) {
        mover *m = &self->movers[i];
        if (m->host == NULL) {
            continue;
        }
        if (cm_is_ok(copied)) {
            cm_status status =
                cm_block_fall_asleep(self->pool, m->storage->block, &m->is_asleep);
            first = cm_first_failure(first, status);
        }
        if (!m->is_asleep) {
            cm_pool_free(host_pool, m->host, NULL, 0, 0);
            m->host = NULL;
        }
    }
    return first;
}

/* -- spilling -------------------------------------------------------------------------------- */

/* Return how many bytes are missing for a request of `nbytes`, as far as that can be
 * told; at least 1. Called without the GIL. */
static uint64_t
find_missing(const spill_move *self, uint64_t nbytes, cm_status shortage)
{
    cm_runtime *rt = self->state->runtime;
    int device = cm_pool_get_config(self->pool)->device;
    uint64_t have = 0;
    if (shortage.code == CM_ELIMIT) {
        have = cm_pool_room(self->pool);
    }
    else {
        uint64_t total;
        cm_pool_counters counters;
        cm_pool_read(self->pool, &counters);
        cm_status status =
            CM_ON_DEVICE(rt, device, cm_rt_memory_info(rt, &have, &total));
        have = cm_is_ok(status) ? have + counters.cached_nbytes : 0;
    }
    return nbytes > have ? nbytes - have : 1;
}

/* Spill, with the turn. Returns as cm_spill() does. */
static int
spill_some(spill_move *self, uint64_t nbytes, cm_status shortage,
           cm_spill_report *report)
{
    cm_state *state = self->state;
    report->is_capturing = cm_streams_capture(state->runtime) || cm_library_captures();
    report->failure = cm_ok();
    if (list_idle(self, report) < 0) {
        self->count = 0;
        return -1;
    }
    if (report->is_capturing || self->count == 0) {
        self->count = 0;
        return 0;
    }
    uint64_t most = cm_pool_get_config(self->pool)->spill_limit_nbytes;
    cm_pool *host_pool =
        cm_pool_find_host(state, self->pool, most, "while spilling buffers");
    uint64_t missing = 0;
    if (host_pool != NULL) {
        missing = CM_WITHOUT_GIL(find_missing(self, nbytes, shortage));
    }
    /* The GIL was released, so the list is made anew. */
    free(self->movers);
    self->movers = NULL;
    self->count = 0;
    if (host_pool == NULL || list_idle(self, report) < 0
        || mark_first(self, missing) < 0) {
        return -1;
    }
    cm_pool_waiter waiter = {state, cm_gil_give()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status status = put_to_sleep(self, host_pool, &hooks);
    cm_pool_waiter_end(&waiter, status);
    report->failure = status;
    int result = 0;
    for (uint32_t i = 0; i < self->count; i++) {
        const mover *m = &self->movers[i];
        if (m->is_asleep) {
            m->storage->spilled = m->host;
            report->spilled_count++;
            report->spilled_nbytes += m->nbytes;
            result = 1;
        }
    }
    bool is_raised = status.code == CM_ECANCELLED && PyErr_Occurred();
    return is_raised ? -1 : result;
}

/* Find out whether a request has spilled so much that others must have woken buffers
 * that it had spilled. */
static bool
is_contended(cm_pool *pool, const cm_spill_report *report)
{
    cm_pool_counters counters;
    cm_pool_read(pool, &counters);
    return report->spilled_nbytes / CONTENDED_TIMES > counters.live_nbytes;
}

/* Spill for the thread that has the turn. */
static int
spill_in_turn(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_status shortage,
              cm_spill_report *report)
{
    report->is_contended = is_contended(pool, report);
    if (report->is_contended) {
        return 0;
    }
    spill_move self = {.state = state, .pool = pool};
    self.engine = cm_state_engine(state, cm_pool_get_config(pool)->device);
    int result = -1;
    if (self.engine != NULL) {
        result = spill_some(&self, nbytes, shortage, report);
        cm_kept_error kept = cm_error_keep();
        end_move(&self);
        cm_state_drop_deferred(state);
        cm_error_restore(kept);
    }
    return result;
}

int
cm_spill(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_status shortage,
         cm_spill_report *report)
{
    bool waited;
    if (cm_pool_has_spill_turn(pool)) {
        return 0; /* this request was made by a signal handler during a move */
    }
    if (take_turn(pool, &waited) < 0) {
        return -1;
    }
    /* If another thread had the turn, there may be memory now. If there is none, this
     * thread spills the next time, however long it waits for the turn. */
    report->has_waited = waited && !report->has_waited;
    int result = 1;
    if (!report->has_waited) {
        result = spill_in_turn(state, pool, nbytes, shortage, report);
    }
    cm_pool_give_spill_turn(pool);
    return result;
}

cm_status
cm_spill_reason(cm_status shortage, const cm_spill_report *report)
{
    bool is_other = !cm_is_ok(report->failure) && !cm_pool_is_short(report->failure);
    return is_other ? report->failure : shortage;
}

PyObject *
cm_spill_describe(cm_state *state, const cm_spill_report *report)
{
    PyObject *failure = Py_None;
    if (cm_is_ok(report->failure)) {
        Py_INCREF(failure);
    }
    else {
        failure = cm_py_exception_new(state, report->failure, NULL);
    }
    return cm_package_call(
        "pools.out_of_memory", "describe_spill",
        failure == NULL
            ? NULL
            : Py_BuildValue("(KKKKKKiiN)", (unsigned long long)report->spilled_count,
                            (unsigned long long)report->spilled_nbytes,
                            (unsigned long long)report->gone_count,
                            (unsigned long long)report->kept_count,
                            (unsigned long long)report->busy_count,
                            (unsigned long long)report->small_count,
                            (int)report->is_capturing, (int)report->is_contended,
                            failure));
}

/* -- waking ---------------------------------------------------------------------------------- */

/* Get memory and copy the bytes to it. After a failure the block sleeps. Called without
 * the GIL. */
static cm_status
bring_back(const spill_move *self, bool trims, const cm_wait_hooks *hooks)
{
    const cm_block *block = self->movers[0].storage->block;
    cm_status status = cm_block_bring_back(self->pool, block);
    if (cm_pool_is_short(status) && trims) {
        uint64_t released_nbytes;
        cm_trim_request r = {0};
        cm_status trimmed = cm_pool_trim(self->pool, 0, hooks, &released_nbytes);
        if (trimmed.code == CM_ECANCELLED) {
            return trimmed;
        }
        CM_TRY(cm_pool_trim_others(self->pool, status, hooks, &r));
        status = cm_block_bring_back(self->pool, block);
    }
    CM_TRY(status);
    status = copy_bytes(self, false, hooks);
    if (!cm_is_ok(status)) {
        bool asleep;
        /* Memory that the driver does not take back stays with the block, which wakes
         * with it the next time. */
        cm_ignore(cm_block_fall_asleep(self->pool, block, &asleep));
    }
    return status;
}

/* Raise the error of a storage that does not wake. */
static void
refuse(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_status status,
       const cm_spill_report *report)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    PyObject *error = cm_py_exception_new(state, status, "while waking a buffer");
    if (error == NULL) {
        return;
    }
    PyObject *text = cm_spill_describe(state, report);
    PyObject *answer =
        text == NULL
            ? NULL
            : cm_package_call("pools.out_of_memory", "explain",
                              Py_BuildValue("(OKsiKN[N])", error,
                                            (unsigned long long)(uintptr_t)pool,
                                            cm_kinds[config->kind].text, config->device,
                                            (unsigned long long)nbytes,
                                            cm_limits_list(config->budget), text));
    if (answer != NULL || cm_error_forgive() == 0) {
        PyErr_SetObject((PyObject *)(void *)Py_TYPE(error), error);
    }
    Py_XDECREF(answer);
    Py_DECREF(error);
}

/* Wake the storage that the move is about. If memory is short, others go to sleep.
 * Returns 0, or -1 with an exception. */
static int
wake_in_turn(spill_move *self, cm_storage *storage)
{
    cm_state *state = self->state;
    cm_spill_report report = {.failure = cm_ok()};
    uint64_t nbytes = self->movers[0].nbytes;
    cm_status status;
    for (bool trims = true;; trims = false) {
        cm_pool_waiter waiter = {state, cm_gil_give()};
        cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
        status = bring_back(self, trims, &hooks);
        cm_pool_waiter_end(&waiter, status);
        if (!cm_pool_is_short(status)) {
            break;
        }
        int spilled = spill_in_turn(state, self->pool, nbytes, status, &report);
        if (spilled < 0) {
            return -1;
        }
        if (spilled == 0) {
            break;
        }
    }
    if (cm_is_ok(status)) {
        cm_block *host = storage->spilled;
        storage->spilled = NULL;
        cm_pool_free(cm_block_pool(host), host, NULL, 0, 0);
        return 0;
    }
    if (!PyErr_Occurred()) {
        status = cm_spill_reason(status, &report);
        refuse(state, self->pool, nbytes, status, &report);
    }
    return -1;
}

int
cm_spill_wake(cm_storage *storage)
{
    cm_state *state = storage->state;
    cm_pool *pool = storage->pool;
    bool waited;
    mover one = {.storage = cm_storage_hold_transfer(storage)};
    spill_move self = {.state = state, .pool = pool, .movers = &one, .count = 1};
    cm_state_enter(state);
    int result = take_turn(pool, &waited);
    if (result == 0) {
        if (storage->spilled != NULL) {
            one.nbytes = cm_block_inside(pool, storage->block, &one.address);
            one.host = storage->spilled;
            storage->is_moving = true;
            self.engine = cm_state_engine(state, cm_pool_get_config(pool)->device);
            result = self.engine == NULL ? -1 : wake_in_turn(&self, storage);
            storage->is_moving = false;
        }
        cm_pool_give_spill_turn(pool);
    }
    cm_state_leave(state);
    cm_storage_drop_transfer(storage);
    return result;
}
