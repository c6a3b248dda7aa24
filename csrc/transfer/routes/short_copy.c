/* SPDX-License-Identifier: Apache-2.0 */
/* Short copies between a device and the host that somebody waits for, on a stream with
 * nothing to do: a few runtime copies, and a look at their events until they are
 * through. No job and no ticket, which together take longer than the copy. */
#include <string.h>

#include "base/fresh_pages.h"
#include "transfer/engine/job.h"
#include "transfer/host/backoff.h"
#include "transfer/routes/routes.h"

enum {
    QUICK_PIECES = CM_SHORT_TASK_PIECES,
    PAGE_NBYTES = 4096,
    LOOK_NS = 30 * 1000,  /* as long as most of them take there is no pause */
    HELD_NS = 200 * 1000, /* the caller holds on for so long, */
    HELD_NBYTES = 4 << 20 /* which is enough for these */
};

/* Nothing has to be waited for but the stream. */
static bool
comes_first(const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (!cm_stream_same(request->after[i], request->stream)) {
            return false;
        }
    }
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        if (!cm_ticket_is_all_over(request->after_tickets[i])) {
            return false;
        }
    }
    return true;
}

/* Both ends in one run each, on the way between the host and the stream's device. */
static bool
is_quick(const cm_copy_request *request, const cm_tuning *tuning, uint64_t *nbytes)
{
    uint64_t most = tuning->quick_nbytes < tuning->ring_nbytes ? tuning->quick_nbytes
                                                               : tuning->ring_nbytes;
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    const cm_region *device = cm_region_is_on_device(dst) ? dst : src;
    if (!request->blocking || request->stream == NULL || !comes_first(request)
        || cm_region_is_on_device(dst) == cm_region_is_on_device(src)
        || device->kind != CM_KIND_DEVICE || device->device != request->stream->device
        || dst->itemsize != src->itemsize || !cm_region_is_c_contiguous(dst)
        || !cm_region_is_c_contiguous(src) || dst->ndim != src->ndim) {
        return false;
    }
    uint64_t total = (uint64_t)dst->itemsize;
    for (int axis = 0; axis < dst->ndim && total <= most; axis++) {
        uint64_t length = (uint64_t)dst->shape[axis];
        if (src->shape[axis] != dst->shape[axis]) {
            return false; /* the job says what is wrong */
        }
        total = length <= most ? total * length : most + 1;
    }
    *nbytes = total;
    return total > 0 && total <= most && src->kind != CM_KIND_MANAGED
           && dst->kind != CM_KIND_MANAGED;
}

/* Nothing is before us on the stream, nothing captures it and no edge of a registration
 * is in the way. `locked`: the host memory is registered. */
static bool
is_free(cm_engine *engine, const cm_copy_request *request, uint64_t nbytes,
        bool *locked)
{
    const cm_region *host =
        cm_region_is_on_device(&request->dst) ? &request->src : &request->dst;
    bool idle = false;
    bool capturing = false;
    *locked = false;
    return (engine->registry == NULL
            || cm_registry_run(engine->registry, host->host, nbytes, locked) == nbytes)
           && cm_is_ok(cm_rt_stream_is_capturing(engine->rt, request->stream->handle,
                                                 &capturing))
           && !capturing
           && cm_is_ok(cm_rt_stream_query(engine->rt, request->stream->handle, &idle))
           && idle;
}

static cm_status
wait_for_event(cm_engine *engine, const cm_copy_request *request, uint64_t event)
{
    uint64_t begin_ns = cm_now_ns();
    uint64_t asked_ns = begin_ns;
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        uint64_t now_ns = cm_now_ns();
        if (now_ns - begin_ns < LOOK_NS) {
            continue; /* the question is a pause */
        }
        if (now_ns - begin_ns >= HELD_NS) {
            cm_request_let_go(request); /* what is ahead may need what it holds */
        }
        if (now_ns - asked_ns >= CM_ASK_NS && request->interrupted != NULL) {
            if (request->interrupted(request->interrupted_argument)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked_ns = cm_now_ns();
        }
        cm_pause_until(now_ns + cm_backoff_ns(now_ns - begin_ns));
    }
}

/* The user goes away; what is queued keeps its ends behind a ticket. False: there can
 * be none. */
static bool
leave_to_ticket(cm_engine *engine, const cm_copy_request *request, cm_status status)
{
    int device = request->stream->device;
    uint64_t event;
    if (!cm_is_ok(cm_engine_need_watcher(engine))
        || !cm_is_ok(cm_cache_take_event(engine, device, &event))) {
        return false;
    }
    cm_ticket *ticket = NULL;
    if (cm_is_ok(cm_rt_event_record(engine->rt, event, request->stream->handle))) {
        ticket = cm_ticket_create(engine, request);
    }
    if (ticket == NULL) {
        cm_cache_give_event(engine, device, event);
        return false;
    }
    cm_ticket_submit(ticket, device, 0, event, NULL, NULL, status);
    cm_ticket_drain(ticket);
    cm_status untold = cm_ticket_abandon(ticket);
    (void)untold; /* nothing: the call tells */
    return true;
}

/* How it ended beside the status. */
typedef struct quick_end {
    bool flying; /* the copy may still be in flight */
    bool kept;   /* a ticket has the keeps */
} quick_end;

/* One copy under way, inside the stream's device. */
typedef struct quick {
    cm_engine *engine;
    const cm_copy_request *request;
    const cm_tuning *tuning;
    cm_stream *stream;
    uint64_t nbytes;
    cm_block *block; /* page-locked, on the way from or to ordinary memory */
    unsigned piece_count;
    uint64_t piece_nbytes;
    uint64_t events[QUICK_PIECES]; /* lent */
    char *to;                      /* within the host */
    const char *from;
    bool shared; /* the workers help */
    bool wakes;  /* sleeping ones too */
    quick_end end;
} quick;

static uint64_t
length_of_piece(const quick *q, unsigned index)
{
    uint64_t begin = index * q->piece_nbytes;
    return q->nbytes - begin < q->piece_nbytes ? q->nbytes - begin : q->piece_nbytes;
}

/* Pieces overlap what the host and what the device does; each costs a call, which up is
 * made while others wait for it: there are four until they are twice as long. */
static void
cut_into_pieces(quick *q, bool down)
{
    uint64_t least = q->tuning->quick_piece_nbytes;
    if (!down && q->nbytes > 4 * least) {
        least = q->nbytes < 8 * least ? q->nbytes / 4 : 2 * least;
    }
    uint64_t count = q->nbytes / least;
    count = count < 1 ? 1 : count > QUICK_PIECES ? QUICK_PIECES : count;
    uint64_t pages = (q->nbytes + PAGE_NBYTES - 1) / PAGE_NBYTES;
    q->piece_nbytes = (pages + count - 1) / count * PAGE_NBYTES;
    q->piece_count = (unsigned)((q->nbytes + q->piece_nbytes - 1) / q->piece_nbytes);
}

/* Wait until the device has come to the event; a user who gives up leaves what is
 * queued to a ticket. */
static cm_status
wait_or_leave(quick *q, unsigned index)
{
    cm_status status = wait_for_event(q->engine, q->request, q->events[index]);
    if (status.code == CM_ECANCELLED
        && leave_to_ticket(q->engine, q->request, status)) {
        q->end = (quick_end){.flying = true, .kept = true};
    }
    return status;
}

/* Nothing may be in flight once the caller hears of a failure. */
static void
settle(quick *q)
{
    if (!q->end.flying) {
        cm_request_let_go(q->request);
        q->end.flying =
            !cm_is_ok(cm_rt_stream_synchronize(q->engine->rt, q->stream->handle));
    }
}

static cm_status
take_events(quick *q, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        CM_TRY(
            cm_cache_take_untimed_event(q->engine, q->stream->device, &q->events[i]));
    }
    return cm_ok();
}

static void
give_events(quick *q)
{
    for (unsigned i = 0; i < QUICK_PIECES; i++) {
        cm_cache_give_untimed_event(q->engine, q->stream->device, q->events[i]);
    }
}

static cm_status
copy_whole(quick *q)
{
    const cm_copy_request *request = q->request;
    cm_runtime *rt = q->engine->rt;
    CM_TRY(take_events(q, 1));
    cm_status status = cm_rt_copy_async(rt, cm_region_copy_address(&request->dst),
                                        cm_region_copy_address(&request->src),
                                        q->nbytes, q->stream->handle);
    if (!cm_is_ok(status)) {
        return status;
    }
    status = cm_rt_event_record(rt, q->events[0], q->stream->handle);
    if (cm_is_ok(status)) {
        status = wait_or_leave(q, 0);
    }
    if (!cm_is_ok(status)) {
        settle(q);
    }
    return status;
}

/* -- by way of a page-locked block --------------------------------------------------- */

static void
finish_piece(quick *q, unsigned index)
{
    uint64_t offset = index * q->piece_nbytes;
    if (q->shared) {
        cm_short_task_finish_piece(&q->engine->workers.short_task, index);
    }
    else {
        memcpy(q->to + offset, q->from + offset, (size_t)length_of_piece(q, index));
    }
}

static void
wake_helpers(const quick *q)
{
    if (q->shared && q->wakes) {
        cm_workers_wake(&q->engine->workers);
    }
}

/* All pieces are packed in turn by whoever is awake, and sent as they are ready. */
static cm_status
send_pieces(quick *q)
{
    cm_runtime *rt = q->engine->rt;
    const cm_copy_request *request = q->request;
    wake_helpers(q);
    for (unsigned i = 0; i < q->piece_count; i++) {
        uint64_t offset = i * q->piece_nbytes;
        finish_piece(q, i);
        CM_TRY(cm_rt_copy_async(rt, request->dst.address + offset,
                                (uintptr_t)q->block->host + offset,
                                length_of_piece(q, i), q->stream->handle));
    }
    CM_TRY(cm_rt_event_record(rt, q->events[0], q->stream->handle));
    return wait_or_leave(q, 0);
}

static cm_status
fetch_pieces(quick *q)
{
    cm_runtime *rt = q->engine->rt;
    const cm_copy_request *request = q->request;
    for (unsigned i = 0; i < q->piece_count; i++) {
        uint64_t offset = i * q->piece_nbytes;
        CM_TRY(cm_rt_copy_async(rt, (uintptr_t)q->block->host + offset,
                                request->src.address + offset, length_of_piece(q, i),
                                q->stream->handle));
        CM_TRY(cm_rt_event_record(rt, q->events[i], q->stream->handle));
    }
    wake_helpers(q); /* while the first piece is on its way */
    for (unsigned i = 0; i < q->piece_count; i++) {
        CM_TRY(wait_or_leave(q, i));
        if (q->shared) {
            cm_short_task_make_ready(&q->engine->workers.short_task, i + 1);
        }
    }
    for (unsigned i = 0; i < q->piece_count; i++) {
        finish_piece(q, i);
    }
    return cm_ok();
}

/* Threads beside this one, each with so much to do that it is worth telling it. */
static uint32_t
count_helpers(const cm_tuning *tuning, uint64_t nbytes)
{
    uint64_t shares = nbytes / tuning->part_min_nbytes / 2;
    uint64_t others = shares > 0 ? shares - 1 : 0;
    uint64_t most = tuning->quick_thread_count;
    return (uint32_t)(others < most ? others : most);
}

/* So soon that threads which were awake then still were: once they are, they stay. */
static bool
follows_another(const cm_engine *engine)
{
    uint64_t end_ns = atomic_load_explicit(&engine->brief_end_ns, memory_order_relaxed);
    return cm_now_ns() - end_ns < atomic_load(&engine->workers.spin_ns);
}

static cm_status
move_pieces(quick *q, bool down)
{
    cm_workers *workers = &q->engine->workers;
    char *block = q->block->host;
    char *user = down ? q->request->dst.host : q->request->src.host;
    cm_tuning tuning = *q->tuning;
    uint32_t threads = count_helpers(&tuning, q->nbytes);
    if (threads > 0) {
        cm_engine_resolve_tuning(q->engine, &tuning);
        threads = cm_workers_muster(workers, &tuning, threads);
    }
    q->to = down ? user : block;
    q->from = down ? block : user;
    q->shared = threads > 0
                && cm_short_task_begin(&workers->short_task, q->to, q->from, q->nbytes,
                                       q->piece_nbytes, threads, !down);
    q->wakes = q->nbytes >= tuning.wake_nbytes || follows_another(q->engine);
    cm_status status = down ? fetch_pieces(q) : send_pieces(q);
    if (q->shared) {
        cm_short_task_end(&workers->short_task); /* nobody is at the user's memory any
                                                    more */
        atomic_store_explicit(&q->engine->brief_end_ns, cm_now_ns(),
                              memory_order_relaxed);
    }
    return status;
}

static cm_status
copy_through(quick *q, cm_pool *pool)
{
    bool down = q->request->dst.kind == CM_KIND_PAGEABLE;
    cut_into_pieces(q, down);
    cm_status status = take_events(q, down ? q->piece_count : 1);
    if (cm_is_ok(status)) {
        status = move_pieces(q, down);
        if (!cm_is_ok(status)) {
            settle(q);
        }
    }
    bool lost = q->end.flying && !q->end.kept;
    cm_pool_free(pool, q->block, &q->stream, q->end.flying ? 1 : 0,
                 lost ? CM_POOL_FREE_FENCE : 0u);
    return status;
}

/* Ordinary memory goes by way of a page-locked block, unless the runtime's own way is
 * no slower. */
static bool
is_worth_a_block(const cm_copy_request *request, const cm_tuning *tuning,
                 uint64_t nbytes, bool locked)
{
    if (locked) {
        return false;
    }
    return request->dst.kind == CM_KIND_PAGEABLE
           || (request->src.kind == CM_KIND_PAGEABLE
               && nbytes >= tuning->bounce_nbytes);
}

/* Before the host or the runtime touches it. */
static cm_status
look(const quick *q, bool locked)
{
    bool down = !cm_region_is_on_device(&q->request->dst);
    const cm_region *host = down ? &q->request->dst : &q->request->src;
    bool looks = host->kind == CM_KIND_PAGEABLE && !host->is_heap && !locked
                 && q->nbytes >= CM_LOOK_NBYTES;
    if (!looks) {
        return cm_ok();
    }
    cm_request_let_go(q->request); /* the pages may come from a disk */
    return cm_pages_look(host->host, q->nbytes, down);
}

/* Where there is no block to be had the runtime takes the ordinary memory. */
static cm_status
copy(quick *q, bool locked)
{
    CM_TRY(look(q, locked));
    if (!is_worth_a_block(q->request, q->tuning, q->nbytes, locked)) {
        return copy_whole(q);
    }
    cm_pool *pool = cm_cache_enter_ring(q->engine, q->nbytes, q->tuning->ring_nbytes);
    if (pool == NULL) {
        return copy_whole(q);
    }
    q->block = cm_pool_try_alloc(pool, q->nbytes, NULL);
    if (q->block == NULL) {
        cm_request_let_go(q->request); /* the pool grows */
    }
    bool there = q->block != NULL
                 || cm_is_ok(cm_pool_alloc_now(pool, q->nbytes, NULL, &q->block));
    if (there) {
        atomic_fetch_add_explicit(&q->engine->bounced_count, 1, memory_order_relaxed);
    }
    cm_status status = there ? copy_through(q, pool) : copy_whole(q);
    cm_cache_leave_ring(q->engine, q->nbytes);
    return status;
}

bool
cm_engine_is_quick(cm_engine *engine, const cm_copy_request *request,
                   const cm_tuning *tuning, bool *bounced, cm_plan *plan)
{
    uint64_t nbytes;
    bool locked;
    cm_device_guard guard;
    if (!is_quick(request, tuning, &nbytes)
        || !cm_is_ok(cm_device_enter(engine->rt, request->stream->device, &guard))) {
        return false;
    }
    bool free = is_free(engine, request, nbytes, &locked);
    quick q = {.tuning = tuning, .nbytes = nbytes};
    cut_into_pieces(&q, request->dst.kind == CM_KIND_PAGEABLE);
    *bounced = free && is_worth_a_block(request, tuning, nbytes, locked);
    if (free) {
        plan->piece_count = *bounced ? q.piece_count : 1;
        plan->piece_nbytes = *bounced ? q.piece_nbytes : nbytes;
    }
    cm_device_leave(engine->rt, &guard);
    return free;
}

/* What is page-locked stays so while the copy takes it for that; once more for what
 * came between the first time and the look. */
static bool
share_ends(cm_engine *engine, const cm_copy_request *request, cm_page_shares *shares)
{
    return cm_is_ok(cm_engine_share_locked(engine, &request->dst, shares))
           && cm_is_ok(cm_engine_share_locked(engine, &request->src, shares));
}

bool
cm_engine_try_quick(cm_engine *engine, const cm_copy_request *request,
                    const cm_tuning *tuning, cm_status *out, bool *kept)
{
    uint64_t nbytes;
    bool locked;
    cm_device_guard guard;
    if (request->after_ticket_count > 0) {
        cm_request_let_go(request); /* their events are asked for */
    }
    if (!is_quick(request, tuning, &nbytes)
        || !cm_is_ok(cm_device_enter(engine->rt, request->stream->device, &guard))) {
        return false;
    }
    cm_page_shares shares = {.count = 0};
    if (nbytes > HELD_NBYTES) {
        cm_request_let_go(request);
    }
    bool is_quick = share_ends(engine, request, &shares)
                    && is_free(engine, request, nbytes, &locked)
                    && (!locked || share_ends(engine, request, &shares));
    if (is_quick) {
        atomic_fetch_add_explicit(&engine->quick_count, 1, memory_order_relaxed);
        quick q = {.engine = engine,
                   .request = request,
                   .tuning = tuning,
                   .stream = request->stream,
                   .nbytes = nbytes};
        *out = copy(&q, locked);
        *kept = q.end.kept;
        give_events(&q);
    }
    if (!cm_registry_try_unshare(engine->registry, &shares)) { /* a ticket has its own
                                                                */
        cm_request_let_go(request);
        cm_registry_unshare(engine->registry, &shares);
    }
    cm_device_leave(engine->rt, &guard);
    return is_quick;
}
