/* SPDX-License-Identifier: Apache-2.0 */
/* Short copies of one run that somebody waits for, and that nothing comes before. They
 * are made without a job and without a ticket, which together take longer than the
 * copy. Between two ends of the host the calling thread moves the bytes. To, from or
 * between devices, on a stream with nothing to do, it makes a few runtime copies, and
 * looks at their events until they are through. */
#include <string.h>

#include "base/backoff.h"
#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "runtime/scope.h"
#include "transfer/engine/job.h"
#include "transfer/routes/routes.h"

enum {
    PIECES_MAX = 8,
    PAGE_NBYTES = 4096,
    CONVERTED_NBYTES = 256 << 10, /* of either end; more is worth a job with threads */
    HOST_NBYTES = 64 << 10,       /* between ends of the host; what is longer notices
                                     neither a job nor that the GIL is given back */
    LOOK_NS = 30 * 1000,          /* as long as most of them take there is no pause */
    HELD_NS = 200 * 1000,         /* the caller holds on for so long, */
    HELD_NBYTES = 4 << 20         /* which is enough for these */
};

/* Nothing is queued on another stream, on whichever device. Those of others are left to
 * a job, which has their events. */
static bool
is_idle(const cm_stream *stream)
{
    bool done = false;
    return !cm_stream_is_foreign(stream)
           && cm_device_was_entered(stream->rt, stream->device)
           && cm_is_ok(cm_stream_check_not_capturing(stream))
           && cm_is_ok(cm_stream_query(stream, &done)) && done;
}

/* Nothing has to be waited for but the stream. */
static bool
comes_first(const cm_copy_request *request)
{
    const cm_stream *own = request->stream;
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *stream = request->after[i];
        if ((own == NULL || !cm_stream_same(stream, own)) && !is_idle(stream)) {
            return false;
        }
    }
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        if (!cm_ticket_update(request->after_tickets[i])) {
            return false;
        }
    }
    return true;
}

static cm_status
wait_for_event(cm_engine *engine, const cm_copy_request *request, uint64_t event)
{
    const cm_wait_hooks hooks = cm_request_hooks(request);
    uint64_t begin_ns = cm_now_ns();
    uint64_t asked_ns = begin_ns;
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        uint64_t waited_ns = cm_now_ns() - begin_ns;
        if (waited_ns < LOOK_NS) {
            continue; /* the question is a pause */
        }
        if (waited_ns >= HELD_NS) {
            cm_request_let_go(request); /* what is ahead may need what it holds */
            CM_TRY(cm_wait_ask(&hooks, &asked_ns));
        }
        cm_pause_after(waited_ns);
    }
}

/* The user goes away; what is queued keeps its ends by a ticket. False: none. */
static bool
leave_to_ticket(cm_engine *engine, const cm_copy_request *request, cm_status status)
{
    cm_ticket *ticket =
        cm_request_take_keeps(request) ? cm_ticket_create(engine, request) : NULL;
    if (ticket == NULL) {
        return false;
    }
    bool left = cm_is_ok(cm_engine_need_watcher(engine))
                && cm_is_ok(cm_ticket_submit(ticket, request->stream, NULL, 0, NULL,
                                             NULL, status));
    if (left) {
        cm_ticket_drain(ticket);
    }
    else {
        ticket->keep_count = 0; /* they stay the caller's */
        cm_ticket_finish(ticket, status, true);
    }
    cm_ignore(cm_ticket_abandon(ticket)); /* nothing: the call tells */
    return left;
}

/* -- between two ends of the host ----------------------------------------------------- */

/* Memory that the calling thread may read or write as it is: pages of a mapped file may
 * be gone, and those of managed memory may be anywhere. */
static bool
is_plain_host_end(const cm_region *end)
{
    return end->host != NULL && !cm_region_is_on_device(end)
           && !cm_kind_migrates(end->kind) && !end->is_file
           && cm_region_is_c_contiguous(end);
}

/* The bytes of a copy that the calling thread can make by itself; 0: it cannot. Ends
 * that may overlap are left to a job, which knows of memory with two addresses. */
static uint64_t
host_copy_nbytes(const cm_engine *engine, const cm_copy_request *request,
                 const cm_tuning *tuning)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    uint64_t most = cm_least(tuning->quick_nbytes, HOST_NBYTES);
    if (!request->blocking || request->stream != NULL || request->convert != NULL
        || dst->itemsize != src->itemsize || !is_plain_host_end(dst)
        || !is_plain_host_end(src)) {
        return 0;
    }
    /* Where the shapes differ the job says what is wrong. */
    uint64_t total = cm_region_common_nbytes(dst, src, (uint64_t)dst->itemsize, most);
    bool is_short = total > 0 && !cm_overlap_is_possible(engine->rt, dst, src)
                    && comes_first(request); /* which asks the runtime */
    return is_short ? total : 0;
}

/* -- to, from and between devices ----------------------------------------------------- */

/* One copy under way, inside the stream's device. */
typedef struct short_copy {
    cm_engine *engine;
    const cm_copy_request *request;
    const cm_tuning *tuning;
    cm_stream *stream;
    uint64_t nbytes;
    bool down;
    bool between;            /* both ends are on devices */
    int64_t converted_count; /* of elements, if they become others; else 0 */
    bool has_given_up;       /* nothing was begun, and a job is to do it */
    bool locked;             /* the host memory is registered */
    cm_block *block;         /* page-locked, on the way from or to ordinary memory */
    unsigned piece_count;
    uint64_t piece_nbytes;
    uint64_t events[PIECES_MAX]; /* lent */
    char *to;                    /* within the host */
    const char *from;
    cm_task_group *group; /* the workers help; NULL: they do not */
    cm_copy_task *tasks;  /* up: for each piece; down: one for all */
    bool wakes;           /* there are, and sleeping ones help too */
    bool flying;          /* the copy may still be in flight at the end */
    bool kept;            /* ... and a ticket has the keeps */
} short_copy;

/* Within a device, or between two that reach each other: the runtime's way is best. */
static bool
is_open_between(const cm_engine *engine, const cm_region *dst, const cm_region *src,
                uint64_t nbytes)
{
    if (dst->device != src->device) {
        return cm_peer_access_is_enabled(&engine->peers, dst->device, src->device);
    }
    return !cm_runs_meet(dst->address, src->address, nbytes);
}

/* Numbers that the calling thread converts, between the host and a device. What others
 * convert may take long, or need the GIL. */
static bool
is_converted_here(const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    const cm_region *host = cm_region_is_on_device(dst) ? src : dst;
    return request->convert->cast == NULL && host->host != NULL
           && cm_region_is_on_device(dst) != cm_region_is_on_device(src);
}

/* Both ends in one run each, one of them at least on the stream's device. */
static bool
is_short(const cm_engine *engine, const cm_copy_request *request,
         const cm_tuning *tuning, short_copy *out)
{
    uint64_t most = tuning->quick_nbytes < tuning->ring_nbytes ? tuning->quick_nbytes
                                                               : tuning->ring_nbytes;
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    bool converts = request->convert != NULL;
    if (!request->blocking || request->stream == NULL
        || (converts && !is_converted_here(request))) {
        return false;
    }
    bool up = cm_region_is_on_device(dst);
    bool between = up && cm_region_is_on_device(src);
    bool is_from = !up || (between && src->device == request->stream->device);
    const cm_region *device = is_from ? src : dst;
    if (!cm_kind_is_on_device(device->kind) || device->device != request->stream->device
        || (!converts && dst->itemsize != src->itemsize)
        || !cm_region_is_c_contiguous(dst) || !cm_region_is_c_contiguous(src)
        || cm_kind_migrates(src->kind) || cm_kind_migrates(dst->kind)) {
        return false;
    }
    int64_t wider = dst->itemsize > src->itemsize ? dst->itemsize : src->itemsize;
    if (converts && most > CONVERTED_NBYTES) {
        most = CONVERTED_NBYTES;
    }
    /* Where the shapes differ the job says what is wrong. */
    uint64_t total = cm_region_common_nbytes(dst, src, (uint64_t)wider, most);
    *out = (short_copy){.request = request,
                        .tuning = tuning,
                        .stream = request->stream,
                        .nbytes = total / (uint64_t)wider * (uint64_t)device->itemsize,
                        .down = !up,
                        .between = between,
                        .converted_count =
                            converts ? (int64_t)(total / (uint64_t)wider) : 0};
    return total > 0 && (!between || is_open_between(engine, dst, src, total))
           && comes_first(request); /* which asks the runtime */
}

static const cm_region *
host_end(const short_copy *c)
{
    return c->down ? &c->request->dst : &c->request->src;
}

/* What the host's end comes to, which may have other elements than the device's. */
static uint64_t
host_nbytes(const short_copy *c)
{
    return c->converted_count > 0
               ? (uint64_t)c->converted_count * (uint64_t)host_end(c)->itemsize
               : c->nbytes;
}

/* Nothing is before us on the stream, nothing captures it and no edge of a registration
 * is in the way. */
static bool
is_free(short_copy *c)
{
    cm_runtime *rt = c->engine->rt;
    bool idle = false;
    bool capturing = false;
    return (c->between
            || cm_registry_run(c->engine->registry, host_end(c)->host, host_nbytes(c),
                               &c->locked)
                   == host_nbytes(c))
           && cm_is_ok(cm_rt_stream_is_capturing(rt, c->stream->handle, &capturing))
           && !capturing && cm_is_ok(cm_rt_stream_query(rt, c->stream->handle, &idle))
           && idle;
}

static uint64_t
length_of_piece(const short_copy *c, unsigned index)
{
    uint64_t begin = index * c->piece_nbytes;
    return c->nbytes - begin < c->piece_nbytes ? c->nbytes - begin : c->piece_nbytes;
}

/* Pieces overlap what the host and what the device does; each costs a call, which up is
 * made while others wait for it: there are four until they are twice as long. */
static void
cut_into_pieces(short_copy *c)
{
    uint64_t least = c->tuning->quick_piece_nbytes;
    if (c->converted_count > 0) {
        c->piece_nbytes = c->nbytes;
        c->piece_count = 1;
        return;
    }
    if (!c->down && c->nbytes > 4 * least) {
        least = c->nbytes < 8 * least ? c->nbytes / 4 : 2 * least;
    }
    uint64_t count = c->nbytes / least;
    if (count < 1) {
        count = 1;
    }
    else if (count > PIECES_MAX) {
        count = PIECES_MAX;
    }
    uint64_t pages = (c->nbytes + PAGE_NBYTES - 1) / PAGE_NBYTES;
    c->piece_nbytes = (pages + count - 1) / count * PAGE_NBYTES;
    c->piece_count = (unsigned)((c->nbytes + c->piece_nbytes - 1) / c->piece_nbytes);
}

/* Wait until the device has come to the event; a user who gives up leaves what is
 * queued to a ticket. */
static cm_status
wait_or_leave(short_copy *c, unsigned index)
{
    cm_status status = wait_for_event(c->engine, c->request, c->events[index]);
    if (status.code == CM_ECANCELLED
        && leave_to_ticket(c->engine, c->request, status)) {
        c->flying = true;
        c->kept = true;
    }
    return status;
}

static cm_status
record_event(short_copy *c, unsigned index)
{
    uint64_t *event = &c->events[index];
    CM_TRY(cm_cache_take_event(c->engine, c->stream->device, CM_POLLED, event));
    return cm_rt_event_record(c->engine->rt, *event, c->stream->handle);
}

static cm_status
copy_whole(short_copy *c)
{
    const cm_copy_request *request = c->request;
    cm_runtime *rt = c->engine->rt;
    cm_address to = cm_region_copy_address(&request->dst);
    cm_address from = cm_region_copy_address(&request->src);
    bool crosses = c->between && request->dst.device != request->src.device;
    CM_TRY(crosses ? cm_rt_copy_peer_async(rt, to, request->dst.device, from,
                                           request->src.device, c->nbytes,
                                           c->stream->handle)
                   : cm_rt_copy_async(rt, to, from, c->nbytes, c->stream->handle));
    CM_TRY(record_event(c, 0));
    return wait_or_leave(c, 0);
}

/* -- by way of a page-locked block --------------------------------------------------- */

/* Up it is a device that reads the target, which is written past the caches: those of
 * others had its lines before. */
static void
share(short_copy *c, unsigned index, uint64_t offset, uint64_t nbytes)
{
    if (c->group != NULL) {
        cm_layout piece = {.run_nbytes = nbytes,
                           .offset[CM_DST] = (int64_t)offset,
                           .offset[CM_SRC] = (int64_t)offset};
        cm_task_group_post(c->group, &c->tasks[index], &piece, c->to, c->from,
                           c->down ? CM_COPY_PLAIN : CM_COPY_WIDE);
    }
}

static void
finish(short_copy *c, unsigned index, uint64_t offset, uint64_t nbytes)
{
    if (c->group != NULL) {
        cm_task_group_wait(c->group, &c->tasks[index]);
    }
    else if (c->converted_count > 0) { /* in one piece */
        cm_convert_run(c->request->convert, c->to, c->request->dst.itemsize, c->from,
                       c->request->src.itemsize, c->converted_count);
    }
    else {
        memcpy(c->to + offset, c->from + offset, (size_t)nbytes);
    }
}

/* All pieces are packed in turn by the threads that are awake, and sent when ready. */
static cm_status
send_pieces(short_copy *c)
{
    cm_runtime *rt = c->engine->rt;
    const cm_copy_request *request = c->request;
    for (unsigned i = 0; i < c->piece_count; i++) {
        share(c, i, i * c->piece_nbytes, length_of_piece(c, i));
        if (i == 0 && c->wakes) {
            cm_task_group_wake(c->group);
        }
    }
    for (unsigned i = 0; i < c->piece_count; i++) {
        uint64_t offset = i * c->piece_nbytes;
        finish(c, i, offset, length_of_piece(c, i));
        CM_TRY(cm_rt_copy_async(rt, request->dst.address + offset,
                                (uintptr_t)c->block->host + offset,
                                length_of_piece(c, i), c->stream->handle));
    }
    CM_TRY(record_event(c, 0));
    return wait_or_leave(c, 0);
}

/* One task, so that the threads that are awake stand ready when a piece is there. */
static cm_status
fetch_pieces(short_copy *c)
{
    cm_runtime *rt = c->engine->rt;
    const cm_copy_request *request = c->request;
    share(c, 0, 0, c->nbytes);
    for (unsigned i = 0; i < c->piece_count; i++) {
        uint64_t offset = i * c->piece_nbytes;
        CM_TRY(cm_rt_copy_async(rt, (uintptr_t)c->block->host + offset,
                                request->src.address + offset, length_of_piece(c, i),
                                c->stream->handle));
        CM_TRY(record_event(c, i));
    }
    if (c->wakes) { /* while the first piece is on its way */
        cm_task_group_wake(c->group);
    }
    for (unsigned i = 0; i < c->piece_count; i++) {
        CM_TRY(wait_or_leave(c, i));
        if (c->group != NULL) {
            cm_copy_task_set_ready(c->tasks, (i + 1) * c->piece_nbytes);
        }
    }
    finish(c, 0, 0, c->nbytes);
    return cm_ok();
}

static cm_status
move_pieces(short_copy *c)
{
    char *block = c->block->host;
    char *user = host_end(c)->host;
    cm_task_group group;
    cm_copy_task tasks[PIECES_MAX];
    cm_tuning tuning = *c->tuning;
    /* Threads beside this one, each with so much to do that it is worth telling it. */
    uint64_t shares = c->nbytes / tuning.part_min_nbytes / 2;
    uint64_t helpers = cm_least(shares > 0 ? shares - 1 : 0, tuning.quick_thread_count);
    c->to = c->down ? user : block;
    c->from = c->down ? block : user;
    if (helpers > 0 && c->converted_count == 0) {
        /* A part of each piece for each thread. */
        tuning.part_min_nbytes = PAGE_NBYTES;
        tuning.thread_count = cm_least(helpers + 1, tuning.thread_count);
        cm_task_group_open(&group, &c->engine->workers, &tuning);
        group.lets_sleep = true;
        group.is_early = c->down;
        group.part_nbytes =
            cm_round_up_to(c->piece_nbytes / tuning.thread_count, PAGE_NBYTES);
        /* So soon after another that threads which were awake then still are: once they
         * are, they stay. */
        uint64_t end_ns =
            atomic_load_explicit(&c->engine->short_end_ns, memory_order_relaxed);
        c->wakes = c->nbytes >= tuning.wake_nbytes
                   || cm_now_ns() - end_ns < atomic_load(&c->engine->workers.spin_ns);
        for (unsigned i = 0; i < c->piece_count; i++) {
            tasks[i].node.next = NULL; /* posted for the first time */
        }
        c->group = &group;
        c->tasks = tasks;
    }
    cm_status status = c->down ? fetch_pieces(c) : send_pieces(c);
    if (c->group != NULL) {
        cm_task_group_close(&group); /* nobody is at the user's memory any more */
        atomic_store_explicit(&c->engine->short_end_ns, cm_now_ns(),
                              memory_order_relaxed);
    }
    return status;
}

/* Ordinary memory goes by a page-locked block unless the runtime is no slower, and any
 * memory whose elements become others. */
static bool
is_worth_a_block(const short_copy *c)
{
    if (c->converted_count > 0) {
        return true;
    }
    return !c->locked && cm_kind_is_pageable(host_end(c)->kind)
           && (c->down || c->nbytes >= c->tuning->bounce_nbytes);
}

/* Before the host or the runtime touches it. All of a mapped file's, which costs more
 * than a look at the end. */
static cm_status
look(const short_copy *c)
{
    const cm_region *host = host_end(c);
    if (!cm_kind_is_pageable(host->kind) || host->is_heap || c->locked
        || (host_nbytes(c) < CM_LOOK_NBYTES && !host->is_file)) {
        return cm_ok();
    }
    cm_request_let_go(c->request); /* the pages may come from a disk */
    if (host->is_file) {
        return cm_pages_populate(host->host, host_nbytes(c), c->down);
    }
    return cm_pages_look(host->host, host_nbytes(c), c->down);
}

/* Where there is no block to be had the runtime takes the ordinary memory. Returns the
 * pool whose share of the ring is to be given back; NULL: none. */
static cm_pool *
take_block(short_copy *c)
{
    cm_pool *pool = cm_cache_enter_ring(c->engine, c->nbytes, c->tuning->ring_nbytes);
    if (pool == NULL) {
        return NULL;
    }
    c->block = cm_pool_try_alloc(pool, c->nbytes, NULL, 0);
    if (c->block == NULL) {
        cm_request_let_go(c->request); /* the pool grows */
        if (!cm_is_ok(
                cm_engine_alloc(c->engine, -1, c->nbytes, NULL, NULL, &c->block))) {
            c->block = NULL;
            cm_cache_leave_ring(c->engine, c->nbytes);
            return NULL;
        }
    }
    atomic_fetch_add_explicit(&c->engine->counts.bounced, 1, memory_order_relaxed);
    cut_into_pieces(c);
    return pool;
}

static cm_status
copy(short_copy *c)
{
    CM_TRY(look(c));
    cm_pool *pool = is_worth_a_block(c) ? take_block(c) : NULL;
    if (pool == NULL && c->converted_count > 0) {
        c->has_given_up = true;
        return cm_ok();
    }
    cm_status status = pool != NULL ? move_pieces(c) : copy_whole(c);
    if (!cm_is_ok(status) && !c->flying) { /* no more once the caller hears of it */
        cm_request_let_go(c->request);
        c->flying =
            !cm_is_ok(cm_rt_stream_synchronize(c->engine->rt, c->stream->handle));
    }
    for (unsigned i = 0; i < PIECES_MAX && c->events[i] != 0; i++) {
        cm_cache_give_event(c->engine, c->stream->device, CM_POLLED, c->events[i]);
    }
    if (pool != NULL) {
        bool lost = c->flying && !c->kept;
        cm_pool_free(cm_block_pool(c->block), c->block, &c->stream, c->flying ? 1 : 0,
                     lost ? CM_POOL_FREE_FENCE : 0u);
        cm_cache_leave_ring(c->engine, c->nbytes);
    }
    return status;
}

bool
cm_engine_is_short_copy(cm_engine *engine, const cm_copy_request *request,
                        const cm_tuning *tuning, bool *bounced, cm_plan *plan)
{
    short_copy c;
    cm_scope scope;
    uint64_t host_nbytes = host_copy_nbytes(engine, request, tuning);
    if (host_nbytes > 0) {
        *bounced = false;
        plan->piece_count = 1;
        plan->piece_nbytes = host_nbytes;
        return true;
    }
    if (!is_short(engine, request, tuning, &c)
        || !cm_is_ok(cm_scope_enter(engine->rt, c.stream->device,
                                    CM_CAPTURE_THREAD_LOCAL, &scope))) {
        return false;
    }
    c.engine = engine;
    bool free = is_free(&c);
    cut_into_pieces(&c);
    *bounced = free && is_worth_a_block(&c);
    if (free) {
        plan->piece_count = *bounced ? c.piece_count : 1;
        plan->piece_nbytes = *bounced ? c.piece_nbytes : c.nbytes;
    }
    cm_scope_leave(&scope);
    return free;
}

/* What is page-locked stays so while the copy takes it for that; once more for what
 * came between the first time and the look. */
static bool
share_ends(cm_engine *engine, const cm_copy_request *request, cm_page_shares *shares)
{
    if (!cm_registry_has_pieces(engine->registry)) {
        return true;
    }
    return cm_is_ok(cm_engine_share_locked(engine, &request->dst, shares))
           && cm_is_ok(cm_engine_share_locked(engine, &request->src, shares));
}

/* It was made, and was begun at `begin_ns` if anybody is to be told of it. */
static void
note_short_copy(cm_engine *engine, const cm_copy_request *request, uint64_t nbytes,
                uint64_t begin_ns)
{
    atomic_fetch_add_explicit(&engine->counts.quick, 1, memory_order_relaxed);
    if (begin_ns != 0) {
        cm_event event = cm_request_event(request);
        event.time_ns = begin_ns;
        event.nbytes = nbytes;
        event.value = cm_now_ns() - begin_ns;
        cm_recorder_note(event);
    }
}

bool
cm_engine_try_short_copy(cm_engine *engine, const cm_copy_request *request,
                         const cm_tuning *tuning, cm_status *out, bool *kept)
{
    short_copy c;
    cm_scope scope;
    *kept = false;
    if (request->after_ticket_count > 0) {
        cm_request_let_go(request); /* their events are asked for */
    }
    uint64_t host_nbytes = host_copy_nbytes(engine, request, tuning);
    if (host_nbytes > 0) {
        uint64_t begin_ns = cm_recorder_is_on() ? cm_now_ns() : 0;
        memcpy(request->dst.host, request->src.host, (size_t)host_nbytes);
        note_short_copy(engine, request, host_nbytes, begin_ns);
        *out = cm_ok();
        return true;
    }
    if (!is_short(engine, request, tuning, &c)) {
        return false;
    }
    if (!cm_device_was_entered(engine->rt, c.stream->device)) {
        cm_request_let_go(request); /* a context may have to be made */
    }
    if (!cm_is_ok(cm_scope_enter(engine->rt, c.stream->device, CM_CAPTURE_THREAD_LOCAL,
                                 &scope))) {
        return false;
    }
    c.engine = engine;
    cm_page_shares shares = {.count = 0};
    if (c.nbytes > HELD_NBYTES) {
        cm_request_let_go(request);
    }
    bool is_made = share_ends(engine, request, &shares) && is_free(&c)
                   && (!c.locked || share_ends(engine, request, &shares));
    if (is_made) {
        uint64_t begin_ns = cm_recorder_is_on() ? cm_now_ns() : 0;
        *out = copy(&c);
        *kept = c.kept;
        is_made = !c.has_given_up;
        if (is_made) {
            note_short_copy(engine, request, c.nbytes, cm_is_ok(*out) ? begin_ns : 0);
        }
    }
    if (!cm_registry_try_unshare(engine->registry, &shares)) {
        cm_request_let_go(request); /* a ticket has its own */
        cm_registry_unshare(engine->registry, &shares);
    }
    cm_scope_leave(&scope);
    return is_made;
}
