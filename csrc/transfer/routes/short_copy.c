/* SPDX-License-Identifier: Apache-2.0 */
/* Makes short copies of a single run of bytes, if the caller waits for them and they
 * need not wait for other work. They are made without a job and without a ticket, since
 * it takes longer to make a job and a ticket than to make the copy.
 *
 * If both ends are on the host, the calling thread moves the bytes itself. If an end is
 * on a device and the stream is idle, the thread queues one copy or a few on the
 * stream, and asks about their events until these have passed. The bytes of ordinary
 * host memory go through a page-locked block, and other threads may help to move them
 * between the memory and the block. If only few bytes are to be sent to a device, they
 * go without a block, since the runtime's own copy is then as fast.
 *
 * The caller keeps the ends alive during its call. It may also hold the GIL during the
 * call, which pays only while the copy is short. So it is asked to give the GIL up
 * after 200 us, and before anything else that may take long (cm_request_let_go()). If
 * the user interrupts the wait, a ticket takes over the queued work and keeps the ends
 * alive. */
#include <string.h>

#include "base/backoff.h"
#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/simd_copy.h"
#include "runtime/scope.h"
#include "transfer/engine/job.h"
#include "transfer/routes/routes.h"

enum {
    PIECES_MAX = 8,
    PAGE_NBYTES = 4096,
    /* The longest copies that are made here. CONVERTED_NBYTES limits the longer end of
     * copies that convert. For more bytes a job with threads is worth its cost.
     * HOST_NBYTES limits copies between two ends of the host. Longer ones take so long
     * that the cost of a job, and of giving the GIL up, hardly matters. */
    CONVERTED_NBYTES = 256 << 10,
    HOST_NBYTES = 64 << 10,
    /* The longest copy that the calling thread makes alone. A second processor would
     * hardly make it shorter, and would keep spinning between two copies of a
     * series. */
    ALONE_NBYTES = 64 << 10,
    LOOK_NS = 30 * 1000,  /* how long a wait spins, since most copies end within that
                             time */
    HELD_NS = 200 * 1000, /* how long the caller may hold the GIL */
    HELD_NBYTES = 4 << 20 /* the longest copy that usually ends within HELD_NS */
};

/* Return whether the copy has to wait for nothing but its own stream. If another stream
 * cannot be queried, the answer is false. The copy then becomes a job, which records an
 * event on that stream. */
static bool
comes_first(const cm_copy_request *request)
{
    const cm_stream *own = request->stream;
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *stream = request->after[i];
        if ((own == NULL || !cm_stream_same(stream, own))
            && !cm_stream_is_idle(stream)) {
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

/* Ask about the event until it has passed. */
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
            continue; /* the query takes long enough by itself, so no pause is needed */
        }
        if (waited_ns >= HELD_NS) {
            cm_request_let_go(request); /* work ahead of us may end only after another
                                           thread gets the GIL */
            CM_TRY(cm_wait_check_interrupted(&hooks, &asked_ns));
        }
        cm_pause_after(waited_ns);
    }
}

/* Leave the queued work to a ticket, because the user has interrupted the wait. The
 * ticket keeps the ends of the copy alive. Returns false if no ticket can take the
 * work. */
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
        ticket->keep_count = 0; /* the keeps stay the caller's */
        cm_ticket_finish(ticket, status, true);
    }
    cm_ignore(cm_ticket_abandon(ticket)); /* returns CM_OK, since the call itself
                                             reports `status` */
    return left;
}

/* -- between two ends of the host ----------------------------------------------------- */

/* Return whether the calling thread may read or write the memory of this end at once.
 * It may not touch mapped files, whose pages may be gone, nor managed memory, whose
 * pages may be on a device. */
static bool
is_plain_host_end(const cm_region *end)
{
    return end->host != NULL && !cm_region_is_on_device(end)
           && !cm_kind_migrates(end->kind) && !end->is_file;
}

/* Return how many bytes the calling thread can copy by itself, or 0 if it cannot make
 * this copy. If the ends may overlap, the copy is left to a job, which knows how to
 * copy memory that has two addresses. */
static uint64_t
host_copy_nbytes(const cm_engine *engine, const cm_copy_request *request,
                 const cm_tuning *tuning)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    if (!request->blocking || request->stream != NULL || request->convert != NULL
        || dst->itemsize != src->itemsize || !is_plain_host_end(dst)
        || !is_plain_host_end(src) || !cm_request_is_run(request)) {
        return 0;
    }
    uint64_t most = cm_least(tuning->quick_nbytes, HOST_NBYTES);
    uint64_t total = cm_request_run_nbytes(request, (uint64_t)dst->itemsize, most);
    bool is_short = total > 0 && !cm_overlap_is_possible(engine->rt, dst, src)
                    && comes_first(request); /* asks the runtime, so it comes last */
    return is_short ? total : 0;
}

/* -- to, from and between devices ----------------------------------------------------- */

/* One copy under way. The calling thread has entered the stream's device. */
typedef struct short_copy {
    cm_engine *engine;
    const cm_copy_request *request;
    const cm_tuning *tuning;
    cm_stream *stream;
    uint64_t nbytes;
    bool down;               /* the copy goes from a device to the host */
    bool between;            /* both ends are on devices */
    int64_t converted_count; /* the number of elements if they are converted; else 0 */
    bool has_given_up;       /* nothing was begun, and a job is to make the copy */
    bool locked;             /* the host memory is page-locked, by a registration */
    cm_block *block; /* the page-locked block through which the bytes go; NULL if
                        they go without one */
    unsigned piece_count;
    uint64_t piece_nbytes;
    uint64_t events[PIECES_MAX]; /* lent by the engine's cache */
    char *to;              /* where the host writes, which is the block or, on the way
                              down, the user's memory */
    const char *from;      /* where the host reads, which is the other of these two */
    cm_task_group *group;  /* if workers help; else NULL */
    cm_copy_task *tasks;   /* one for each piece on the way up; one for all pieces on
                              the way down */
    bool wakes;            /* sleeping workers are woken to help as well */
    bool flying;           /* the copy may still be in flight at the end */
    bool ticket_has_keeps; /* the copy goes on behind a ticket, which keeps its ends */
} short_copy;

/* True if a copy between two ends on devices is best left to the runtime. That is so if
 * the ends are on one device and do not overlap, or if their two devices reach each
 * other. */
static bool
is_open_between(const cm_engine *engine, const cm_region *dst, const cm_region *src,
                uint64_t nbytes)
{
    if (dst->device != src->device) {
        return cm_peer_access_is_enabled(&engine->peers, dst->device, src->device);
    }
    return !cm_runs_meet(dst->address, src->address, nbytes);
}

/* True if the calling thread can convert the elements on their way between the host and
 * a device. It makes no conversion that is a cast of another library, since such a cast
 * may take long or need the GIL. */
static bool
is_converted_here(const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    const cm_region *host = cm_region_is_on_device(dst) ? src : dst;
    return request->convert->cast == NULL && host->host != NULL
           && cm_region_is_on_device(dst) != cm_region_is_on_device(src);
}

/* True if the copy is short, each of its ends is a single run, and at least one end is
 * on the stream's device. Fills in *out. */
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
        || (!converts && dst->itemsize != src->itemsize) || !cm_request_is_run(request)
        || cm_kind_migrates(src->kind) || cm_kind_migrates(dst->kind)) {
        return false;
    }
    int64_t wider = dst->itemsize > src->itemsize ? dst->itemsize : src->itemsize;
    if (converts && most > CONVERTED_NBYTES) {
        most = CONVERTED_NBYTES;
    }
    uint64_t total = cm_request_run_nbytes(request, (uint64_t)wider, most);
    *out = (short_copy){.request = request,
                        .tuning = tuning,
                        .stream = request->stream,
                        .nbytes = total / (uint64_t)wider * (uint64_t)device->itemsize,
                        .down = !up,
                        .between = between,
                        .converted_count =
                            converts ? (int64_t)(total / (uint64_t)wider) : 0};
    return total > 0 && (!between || is_open_between(engine, dst, src, total))
           && comes_first(request); /* asks the runtime, so it comes last */
}

static const cm_region *
host_end(const short_copy *c)
{
    return c->down ? &c->request->dst : &c->request->src;
}

/* Return the bytes of the host's end, whose elements may be of another size than the
 * device's. */
static uint64_t
host_nbytes(const short_copy *c)
{
    return c->converted_count > 0
               ? (uint64_t)c->converted_count * (uint64_t)host_end(c)->itemsize
               : c->nbytes;
}

/* True if nothing is in the way: the stream is idle, nothing captures it, and no
 * registration begins or ends within the host's end. Sets c->locked. */
static bool
is_free(short_copy *c)
{
    cm_runtime *rt = c->engine->rt;
    bool idle = false;
    bool capturing = false;
    return (c->between
            || cm_registry_run_nbytes(c->engine->registry, host_end(c)->host,
                                      host_nbytes(c), &c->locked)
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

/* Cut the copy into pieces, so that the host works on one piece while the device moves
 * another. Each piece costs a call of the runtime, and on the way up all threads wait
 * during that call. So a copy to the device has at most four pieces, unless each of the
 * four would be longer than twice quick_piece_nbytes. */
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

/* Wait for the event. If the user interrupts the wait, the queued work is left to a
 * ticket. */
static cm_status
wait_or_leave(short_copy *c, unsigned index)
{
    cm_status status = wait_for_event(c->engine, c->request, c->events[index]);
    if (status.code == CM_ECANCELLED
        && leave_to_ticket(c->engine, c->request, status)) {
        c->flying = true;
        c->ticket_has_keeps = true;
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

/* Post a part of the copy as a task for the workers, if they help. On the way up a
 * device reads the block, so the threads write the block past their caches. Then no
 * core has to fetch cache lines that other cores used last. */
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

/* Wait until the workers have moved a part or, if they do not help, move it here. */
static void
finish(short_copy *c, unsigned index, uint64_t offset, uint64_t nbytes)
{
    if (c->group != NULL) {
        cm_task_group_wait(c->group, &c->tasks[index]);
    }
    else if (c->converted_count > 0) { /* there is only one piece */
        cm_convert_run(c->request->convert, c->to, c->request->dst.itemsize, c->from,
                       c->request->src.itemsize, c->converted_count);
    }
    else if (c->down) {
        memcpy(c->to + offset, c->from + offset, (size_t)nbytes);
    }
    else {
        cm_wide_copy(c->to + offset, c->from + offset, (size_t)nbytes);
    }
}

/* Move a copy to the device: the threads that are awake pack the pieces one after the
 * other, and each piece is sent when it is packed. */
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

/* Move a copy from the device. All pieces are one task, so that the threads that are
 * awake stay ready for the next piece to arrive. */
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
    if (c->wakes) { /* they wake while the first piece is on its way */
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

/* Move the copy through its block, with the help of workers if it is long enough. */
static cm_status
move_pieces(short_copy *c)
{
    char *block = c->block->host;
    char *user = host_end(c)->host;
    cm_task_group group;
    cm_copy_task tasks[PIECES_MAX];
    cm_tuning tuning = *c->tuning;
    /* Only so many threads help that each of them has enough work to be worth
     * waking. */
    uint64_t shares = c->nbytes / tuning.part_min_nbytes / 2;
    uint64_t helpers = cm_least(shares > 0 ? shares - 1 : 0, tuning.quick_thread_count);
    if (c->nbytes <= ALONE_NBYTES) {
        helpers = 0;
    }
    c->to = c->down ? user : block;
    c->from = c->down ? block : user;
    if (helpers > 0 && c->converted_count == 0) {
        /* Each thread gets a part of each piece. */
        tuning.part_min_nbytes = PAGE_NBYTES;
        tuning.thread_count = cm_least(helpers + 1, tuning.thread_count);
        cm_task_group_open(&group, &c->engine->workers, &tuning);
        group.lets_sleep = true;
        group.is_early = c->down;
        group.part_nbytes =
            cm_round_up_to(c->piece_nbytes / tuning.thread_count, PAGE_NBYTES);
        /* Sleeping threads are woken for a long copy. They are also woken if another
         * copy has ended only a short time ago. The threads that helped with that copy
         * are still awake then, and all of them stay awake over a series of copies. */
        uint64_t end_ns =
            atomic_load_explicit(&c->engine->short_end_ns, memory_order_relaxed);
        c->wakes =
            c->nbytes >= tuning.wake_nbytes || cm_now_ns() - end_ns < tuning.spin_ns;
        for (unsigned i = 0; i < c->piece_count; i++) {
            tasks[i].node.next = NULL; /* it has not been posted before */
        }
        c->group = &group;
        c->tasks = tasks;
    }
    cm_status status = c->down ? fetch_pieces(c) : send_pieces(c);
    if (c->group != NULL) {
        cm_task_group_close(&group); /* no worker touches the user's memory any more */
        atomic_store_explicit(&c->engine->short_end_ns, cm_now_ns(),
                              memory_order_relaxed);
    }
    return status;
}

/* True if the copy goes through a page-locked block. Any copy that converts elements
 * goes through one. Other copies do if the host's end is ordinary memory, unless the
 * runtime alone is as fast. */
static bool
is_worth_a_block(const short_copy *c)
{
    if (c->converted_count > 0) {
        return true;
    }
    return !c->locked && cm_kind_is_pageable(host_end(c)->kind)
           && (c->down || c->nbytes >= c->tuning->bounce_nbytes);
}

/* Make sure that the pages at the host's end are still there, before the host or the
 * runtime touches them. If the memory is known to map a file, all of the pages are
 * populated. Other memory may map a file too, so its last page is checked, which costs
 * less. */
static cm_status
probe_pages(const short_copy *c)
{
    const cm_region *host = host_end(c);
    if (!cm_kind_is_pageable(host->kind) || host->is_heap || c->locked
        || (host_nbytes(c) < CM_PROBE_NBYTES && !host->is_file)) {
        return cm_ok();
    }
    cm_request_let_go(c->request); /* the pages may come from a disk */
    if (host->is_file) {
        return cm_pages_populate(host->host, host_nbytes(c), c->down);
    }
    return cm_pages_probe(host->host, host_nbytes(c), c->down);
}

/* Take a page-locked block. Returns its pool, or NULL if there is no block, in which
 * case the runtime copies the ordinary memory by itself. If there is a block, the call
 * has also taken room for it among the rings (cm_cache_enter_ring()), and the caller
 * has to give that room back. */
static cm_pool *
take_block(short_copy *c)
{
    cm_pool *pool = cm_cache_enter_ring(c->engine, c->nbytes, c->tuning->ring_nbytes);
    if (pool == NULL) {
        return NULL;
    }
    c->block = cm_pool_try_alloc(pool, c->nbytes, NULL, 0);
    if (c->block == NULL) {
        cm_request_let_go(c->request); /* the pool has to grow, which takes long */
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

/* Make the copy, through a block or by a single call of the runtime, and give back what
 * it has borrowed. If the elements are to be converted and there is no block,
 * c->has_given_up is set and nothing was done. */
static cm_status
copy(short_copy *c)
{
    CM_TRY(probe_pages(c));
    cm_pool *pool = is_worth_a_block(c) ? take_block(c) : NULL;
    if (pool == NULL && c->converted_count > 0) {
        c->has_given_up = true;
        return cm_ok();
    }
    cm_status status = pool != NULL ? move_pieces(c) : copy_whole(c);
    /* When the caller hears of a failure nothing may be in flight any more. */
    if (!cm_is_ok(status) && !c->flying) {
        cm_request_let_go(c->request);
        c->flying =
            !cm_is_ok(cm_rt_stream_synchronize(c->engine->rt, c->stream->handle));
    }
    for (unsigned i = 0; i < PIECES_MAX && c->events[i] != 0; i++) {
        cm_cache_give_event(c->engine, c->stream->device, CM_POLLED, c->events[i]);
    }
    if (pool != NULL) {
        bool lost = c->flying && !c->ticket_has_keeps;
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

/* Take shares of the page-locked memory at the ends, so that the memory stays
 * page-locked while the copy relies on that. The caller does this again after
 * is_free(), which may find memory that was page-locked only after the first call.
 * Returns false if there is no memory for the shares. */
static bool
share_ends(cm_engine *engine, const cm_copy_request *request, cm_page_shares *shares)
{
    if (!cm_registry_has_pieces(engine->registry)) {
        return true;
    }
    return cm_is_ok(cm_engine_share_locked(engine, &request->dst, shares))
           && cm_is_ok(cm_engine_share_locked(engine, &request->src, shares));
}

/* Count a copy that was made, and note it for the recorder unless `begin_ns` is 0. */
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
                         const cm_tuning *tuning, cm_status *out,
                         bool *ticket_has_keeps)
{
    short_copy c;
    cm_scope scope;
    *ticket_has_keeps = false;
    if (request->after_ticket_count > 0) {
        cm_request_let_go(request); /* the device is asked whether those tickets are
                                       over */
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
        *ticket_has_keeps = c.ticket_has_keeps;
        is_made = !c.has_given_up;
        if (is_made) {
            note_short_copy(engine, request, c.nbytes, cm_is_ok(*out) ? begin_ns : 0);
        }
    }
    if (!cm_registry_try_unshare(engine->registry, &shares)) {
        /* One of the shares is the last of its piece, so giving it back calls the
         * runtime. If the copy goes on behind a ticket, the ticket has shares of its
         * own. */
        cm_request_let_go(request);
        cm_registry_unshare(engine->registry, &shares);
    }
    cm_scope_leave(&scope);
    return is_made;
}
