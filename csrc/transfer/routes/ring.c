/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/ring.h"

#include <stdlib.h>

#include "base/backoff.h"
#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/machine.h"
#include "transfer/plan/ring_policy.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

/* ring.h tells what a ring, a piece and a slot are.
 *
 * As a rule the threads pack pieces faster than the link to the device carries them, so
 * the threads wait for a slot after each piece. A thread that waits spins before it
 * sleeps, because it takes time to wake. If pieces are long, the pieces that are packed
 * already keep the link busy while a thread wakes. So if pieces have LONG_PIECE_NBYTES
 * or more, a thread spins for no longer than LONG_PIECE_SPIN_NS and then sleeps, which
 * leaves its processor to others. */
enum { LONG_PIECE_NBYTES = 4 << 20, LONG_PIECE_SPIN_NS = 3 * 1000 };

/* Add `change` to the number of rings that work for the job's device. It is 1 when a
 * ring begins its work and -1 when the ring has ended it. */
static void
count_ring(const cm_job *job, int change)
{
    if (job->plan.device >= 0) {
        atomic_fetch_add(&job->engine->ring_counts[job->plan.device], (unsigned)change);
    }
}

cm_status
cm_ring_create_for(cm_job *job, cm_status (*cut_next)(cm_job *job, cm_slot *s))
{
    size_t nbytes = sizeof(cm_ring) + job->plan.slot_count * sizeof(cm_slot);
    cm_ring *ring = calloc(1, nbytes);
    CM_TRY(cm_allocated(ring != NULL, nbytes));
    ring->cut_next = cut_next;
    ring->needs_host = job->plan.row->uses_ring && !job->capturing;
    ring->slot_count = job->plan.slot_count;
    ring->asked_ns = cm_now_ns();
    cm_job_open_group(job, &ring->group);
    if (job->plan.piece_nbytes >= LONG_PIECE_NBYTES) {
        ring->group.spin_ns = cm_least(ring->group.spin_ns, LONG_PIECE_SPIN_NS);
    }
    count_ring(job, 1);
    job->ring = ring;
    return cm_ok();
}

static cm_status
cut_layout(cm_job *job, cm_slot *s)
{
    cm_ring *ring = job->ring;
    (void)cm_cut_next(&ring->cut, &s->piece);
    ring->all_cut = ring->cut.done;
    return cm_ok();
}

cm_status
cm_ring_create(cm_job *job)
{
    cm_layout *layout = &job->plan.layout;
    if (job->ring != NULL) {
        return cm_ok();
    }
    CM_TRY(cm_job_probe_pages(job, layout));
    CM_TRY(cm_ring_create_for(job, cut_layout));
    cm_ring *ring = job->ring;
    cm_layout_take_repeats(layout, &ring->repeats);
    cm_ring_policy_cut(&job->plan, &job->tuning, layout, &ring->cut);
    ring->all_cut = ring->cut.done;
    if (job->plan.is_fresh) {
        cm_pages_ask_huge((char *)job->dst.host + layout->offset[CM_DST],
                          layout->run_nbytes);
    }
    return cm_ok();
}

void
cm_ring_stop(cm_job *job)
{
    if (job->ring != NULL) {
        cm_task_group_close(&job->ring->group);
    }
}

/* Give back the page-locked block of a slot, if it has one, so that other rings can use
 * the memory. */
static void
give_block_back(cm_job *job, cm_slot *s)
{
    if (s->pinned != NULL) {
        cm_job_free_block(job, s->pinned);
        s->pinned = NULL;
        s->host = NULL;
        cm_cache_leave_ring(job->engine, job->plan.piece_nbytes);
        cm_job_count_slot(job, -(int64_t)job->plan.piece_nbytes);
    }
}

void
cm_ring_destroy(cm_job *job)
{
    cm_engine *engine = job->engine;
    cm_ring *ring = job->ring;
    if (ring == NULL) {
        return;
    }
    cm_ring_stop(job);
    atomic_fetch_add_explicit(&engine->counts.pieces, ring->begun,
                              memory_order_relaxed);
    for (uint32_t i = 0; i < job->plan.slot_count; i++) {
        cm_slot *s = &ring->slots[i];
        give_block_back(job, s);
        cm_job_free_block(job, s->blocks[0]);
        cm_job_free_block(job, s->blocks[1]);
        /* No stream still uses this memory, because the runtime copies ordinary memory
         * before its call returns. */
        free(s->plain);
        cm_cache_give_event(engine, s->device, CM_WAITED, s->event);
    }
    count_ring(job, -1);
    free(ring);
    job->ring = NULL;
}

/* -- slots -------------------------------------------------------------------------- */

/* Go on although a slot could not get page-locked memory. `refused` says why it could
 * not. If the slot is not the first one, the ring does without this slot and all slots
 * after it. The first slot gets ordinary memory instead, unless the copy is between
 * devices. */
static cm_status
go_without_block(cm_job *job, cm_slot *s, cm_status refused)
{
    cm_ring *ring = job->ring;
    if (s != ring->slots) {
        /* A slot can lack memory only when it is used for the first time. Until then
         * piece i lies in slot i, so a smaller count changes nothing for the pieces
         * that have begun. */
        ring->slot_count = (uint32_t)(s - ring->slots);
        return cm_ok();
    }
    if (!cm_pool_is_short(refused) && refused.code != CM_EINVALID) {
        return refused; /* the failure is not a lack of memory */
    }
    if (job->plan.row->crosses) {
        return refused; /* the caller chooses another route */
    }
    ring->refused = refused;
    ring->slot_count = 1;
    /* The memory has whole pages of its own. If it shared a page with page-locked
     * memory, the runtime might treat it as page-locked too, and copy it after the call
     * has returned. */
    s->plain =
        aligned_alloc(cm_page_nbytes(),
                      (size_t)cm_round_up_to(job->plan.piece_nbytes, cm_page_nbytes()));
    s->host = s->plain;
    return s->plain == NULL ? refused : cm_ok();
}

/* Give a free slot its event and its memory. If there is no page-locked block for the
 * slot, ring->slot_count may become so small that the ring no longer has this slot. */
static cm_status
equip_slot(cm_job *job, cm_slot *s)
{
    cm_engine *engine = job->engine;
    cm_ring *ring = job->ring;
    if (s->event == 0 && job->stream != NULL) {
        s->device = job->stream->device;
        CM_TRY(cm_cache_take_event(engine, s->device, CM_WAITED, &s->event));
    }
    if (s->host != NULL || !ring->needs_host) {
        return cm_ok();
    }
    /* The limit ring_nbytes on the memory of all rings does not hold for the first slot
     * of a copy, so that every copy advances. */
    uint64_t most = s == ring->slots ? UINT64_MAX : job->tuning.ring_nbytes;
    uint64_t nbytes = job->plan.piece_nbytes;
    if (cm_cache_enter_ring(engine, nbytes, most) == NULL) {
        return go_without_block(job, s, cm_fail(CM_EINVALID, 0));
    }
    cm_status status = cm_engine_alloc(engine, -1, nbytes, NULL, NULL, &s->pinned);
    if (!cm_is_ok(status)) {
        s->pinned = NULL;
        cm_cache_leave_ring(engine, nbytes);
        return go_without_block(job, s, status);
    }
    cm_job_count_slot(job, (int64_t)nbytes);
    s->host = s->pinned->host;
    return cm_ok();
}

cm_status
cm_ring_equip(cm_job *job)
{
    return equip_slot(job, job->ring->slots);
}

/* Let more threads work on the tasks of this ring if rings of other devices are at
 * work. Each device has its own link, and the same threads serve all links, so each
 * further link that is in use brings about as many threads as the first link has. In an
 * upload the threads read ordinary memory, and the more threads read it, the slower
 * each of them is. So in an upload each further link brings one and a half times as
 * many threads. */
static void
ask_for_threads(cm_job *job)
{
    const cm_engine *engine = job->engine;
    uint32_t threads = (uint32_t)job->tuning.thread_count;
    uint32_t for_link = (job->plan.is_download ? threads : threads + threads / 2) - 1;
    uint32_t more = 0;
    for (int device = 0; device < engine->rt->device_count; device++) {
        bool is_other =
            device != job->plan.device && atomic_load(&engine->ring_counts[device]) > 0;
        more += is_other ? for_link : 0;
    }
    if (job->ring->group.more < more) {
        job->ring->group.more = more;
    }
}

/* Return whether the slot has no memory yet, and has to wait until another job of the
 * lane frees a slot. A job that has no piece under way does not wait, so that no two
 * jobs can wait for each other. */
static bool
lacks_slot(const cm_job *job, const cm_slot *s)
{
    const cm_ring *ring = job->ring;
    bool wants_block = s->host == NULL && ring->needs_host;
    return wants_block && ring->ended < ring->begun
           && !cm_job_may_take_slot(job, job->plan.piece_nbytes);
}

/* Cut the next piece, and store its slot in *out, or NULL if no slot is free at present
 * or all is cut. */
static cm_status
begin_piece(cm_job *job, cm_slot **out)
{
    cm_ring *ring = job->ring;
    cm_slot *s;
    *out = NULL;
    do {
        if (ring->all_cut || ring->begun - ring->ended >= ring->slot_count) {
            return cm_ok();
        }
        s = cm_slot_at(ring, ring->begun);
        ring->lacks_slot = lacks_slot(job, s);
        if (ring->lacks_slot) {
            return cm_ok();
        }
        CM_TRY(equip_slot(job, s));
    } while (s != cm_slot_at(ring, ring->begun));
    if (s->plain != NULL && ring->needs_host) {
        /* When the runtime copies ordinary memory, its call waits for the stream, and
         * nobody can end that wait early. So this thread waits for the stream first, by
         * a call that ends early if the job is cancelled. */
        CM_TRY(cm_job_wait_stream(job));
    }
    if (job->in_background && !job->plan.row->crosses) {
        CM_TRY(cm_job_take_turn(job, job->plan.piece_nbytes));
    }
    CM_TRY(ring->cut_next(job, s));
    ask_for_threads(job);
    ring->begun++;
    *out = s;
    return cm_ok();
}

void
cm_slot_pack(const cm_slot *s, cm_layout *out)
{
    *out = s->piece;
    cm_layout_pack(out, CM_DST);
}

void
cm_slot_unpack(const cm_job *job, const cm_slot *s, cm_layout *out)
{
    *out = s->piece;
    cm_layout_pack(out, CM_SRC);
    /* In an upload, the host has converted the elements when it packed them, unless the
     * device is to convert them. */
    if (!job->plan.is_download && !job->plan.converts_on_device) {
        cm_layout_drop_items(out);
    }
    cm_layout_put_repeats(out, &job->ring->repeats);
}

cm_status
cm_slot_set_device(const cm_job *job, cm_slot *s, int device)
{
    uint64_t event;
    if (s->device == device) {
        return cm_ok();
    }
    CM_TRY(cm_cache_take_event(job->engine, device, CM_WAITED, &event));
    cm_cache_give_event(job->engine, s->device, CM_WAITED, s->event);
    s->event = event;
    s->device = device;
    return cm_ok();
}

cm_status
cm_slot_query(const cm_job *job, const cm_slot *s, bool *out)
{
    return CM_ON_DEVICE(job->engine->rt, s->device,
                        cm_rt_event_query(job->engine->rt, s->event, out));
}

/* -- the loop ----------------------------------------------------------------------- */

/* Return the slot of the oldest piece whose first half is under way or, if `second` is
 * set, of the oldest piece whose second half is. Returns NULL if there is none. */
static cm_slot *
oldest_in(cm_ring *ring, bool second)
{
    uint64_t at = second ? ring->ended : ring->passed;
    uint64_t end = second ? ring->passed : ring->begun;
    return at < end ? cm_slot_at(ring, at) : NULL;
}

/* Find the piece of oldest_in(). If its half is over, count the half as over, start the
 * second half if this was the first, and set *out to true. Otherwise *out is false. If
 * `waits` is set and the device makes the half, the call waits until the half is over,
 * and may suspend the job. */
static cm_status
end_oldest(cm_job *job, const cm_ring_way *way, bool second, bool waits, bool *out)
{
    cm_ring *ring = job->ring;
    cm_slot *s = oldest_in(ring, second);
    bool at_host = second != way->host_first;
    *out = s != NULL && (at_host ? cm_copy_task_is_done(&s->task) : s->skips_device);
    if (s != NULL && !at_host && !*out) {
        CM_TRY(waits ? cm_job_wait_event(job, s->device, s->event)
                     : cm_slot_query(job, s, out));
        *out = *out || waits;
    }
    if (!*out) {
        return cm_ok();
    }
    if (at_host) {
        CM_TRY(cm_job_moved_status(job));
    }
    if (second) {
        ring->ended++;
        cm_job_count_moved(job, cm_layout_nbytes(&s->piece));
        if (ring->all_cut && job->lane != NULL) {
            give_block_back(job, s);
        }
        return cm_ok();
    }
    CM_TRY(way->pass(job, s));
    ring->passed++;
    return cm_ok();
}

/* Help with the tasks (the halves at the host), or wait for the oldest task. This is
 * called when no piece can begin. While this thread helps, it queues nothing for the
 * device. So it helps only if the device has more than one piece to do, which takes the
 * device longer than this thread takes for its part of a task. If the host is slow, the
 * device has to wait anyway, and the thread always helps. */
static void
wait_for_tasks(cm_ring *ring, const cm_ring_way *way, cm_slot *at_host)
{
    cm_copy_task *task = at_host == NULL ? NULL : &at_host->task;
    uint64_t on_device =
        way->host_first ? ring->passed - ring->ended : ring->begun - ring->passed;
    if ((way->host_is_slow || on_device > 1) && cm_task_group_help(&ring->group)) {
        return;
    }
    if (!way->host_is_slow) {
        cm_task_group_pause(&ring->group, task);
    }
    else if (task != NULL) {
        cm_task_group_wait(&ring->group, task);
    }
}

/* In each round the thread first takes the pieces whose half at the host is over to
 * their next state. Then it begins a piece, if a slot is free. If no piece can begin,
 * the thread asks whether the oldest half of the device is over, or waits for it, or
 * helps with the tasks. The loop ends when all pieces are cut and the counter *last has
 * reached `begun`. */
cm_status
cm_ring_run(cm_job *job, const cm_ring_way *way, bool drain)
{
    cm_ring *ring = job->ring;
    const uint64_t *last = way->host_first ? &ring->passed : &ring->begun;
    if (drain) {
        last = &ring->ended;
    }
    for (;;) {
        cm_slot *s;
        bool over;
        CM_TRY(cm_job_check_cancelled(job, &ring->asked_ns));
        do { /* until the host has finished no further piece */
            CM_TRY(end_oldest(job, way, !way->host_first, false, &over));
        } while (over);
        CM_TRY(begin_piece(job, &s));
        if (s != NULL) {
            CM_TRY(way->begin(job, s));
            if (way->pass == NULL) {
                ring->passed = ring->begun;
                ring->ended = ring->begun;
            }
            continue;
        }
        if (ring->all_cut && *last == ring->begun) {
            return cm_ok();
        }
        cm_slot *at_host = oldest_in(ring, !way->host_first);
        /* If the device's half comes second, all pieces are cut and `drain` is not set,
         * nobody needs to know when that half ends: no further piece needs a slot. */
        if (!way->host_first || !ring->all_cut || drain) {
            bool is_idle = at_host == NULL && !ring->lacks_slot;
            bool waits = is_idle || way->device_comes_first;
            CM_TRY(end_oldest(job, way, way->host_first, waits, &over));
        }
        if (!over && at_host == NULL && ring->lacks_slot) {
            /* Another job gives a slot back as soon as one of its pieces has passed the
             * link. */
            cm_sleep_ns(CM_BACKOFF_NAP_NS);
        }
        else if (!over) {
            wait_for_tasks(ring, way, at_host);
        }
    }
}
