/* SPDX-License-Identifier: Apache-2.0 */
/* Sorts many copies into groups. Each group is made by one job, and copies that fit
 * into no group are made by jobs of their own. If there are several jobs, each is
 * started as an asynchronous copy and is a part of one ticket. That ticket, the whole,
 * keeps both ends of all copies and is done with the last part. */
#include "transfer/batch/batch.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "base/file_maps.h"
#include "transfer/batch/via_host.h"
#include "transfer/run/run.h"

enum {
    GROUP_MAX = 200,
    /* How many parts may be under way before the next one is started. A device never
     * has nearly as many in its queues, so it does not run dry. */
    AHEAD_MAX = 256,
};

/* One call. Piece i belongs to group groups[i], and is made alone if that is 0. Group g
 * has the shape shapes[g]. */
typedef struct batch {
    cm_engine *engine;
    cm_many_request whole; /* the caller's request, as cm_via_host_expand() has changed
                              it */
    const cm_many_request *request; /* points to `whole` */
    /* Owned; NULL if cm_via_host_expand() had nothing to replace. */
    cm_piece_regions *expanded;
    cm_tuning tuning; /* as cm_tuning_resolve() left it */
    /* Copies touch each other and are made one after the other. */
    bool in_order;
    bool has_begun;  /* the jobs drop the keeps from now on */
    uint8_t *groups; /* owned */
    uint32_t group_count;
    uint64_t alone_count; /* how many pieces are made alone */
    cm_copy_request part; /* the request for the next part */
    cm_ticket **parts;    /* owned array, held */
    uint64_t part_count;
    cm_wait_hooks hooks;
    uint64_t asked_ns; /* when the hooks were last asked whether to go on */
    cm_many shapes[GROUP_MAX];
} batch;

/* -- which ends touch ----------------------------------------------------------------- */

static cm_byte_span
span_of_end(cm_runtime *rt, const cm_piece_end *end, uint64_t nbytes)
{
    uint64_t begin = cm_overlap_place(rt, end->address, end->host, nbytes);
    return (cm_byte_span){begin, begin + nbytes};
}

/* Widen `files` by the span of an end that is a mapping of a file. `files` reaches from
 * the first such end to the last. */
static void
extend(cm_file_span *files, bool is_file, cm_byte_span span)
{
    if (!is_file) {
        return;
    }
    files->begin = cm_least(files->begin, span.begin);
    if (span.end > files->end) {
        files->end = span.end;
    }
}

cm_status
cm_many_find_conflicts(cm_runtime *rt, const cm_many_request *request, bool *out)
{
    uint64_t count = request->piece_count + request->other_count;
    cm_byte_span *spans = malloc((size_t)(count + 1) * 2 * sizeof(*spans));
    CM_TRY(cm_allocated(spans != NULL, count * 2 * sizeof(*spans)));
    cm_byte_span *dst = spans;
    cm_byte_span *src = spans + count;
    cm_file_span dst_files = {.begin = UINT64_MAX};
    cm_file_span src_files = {.begin = UINT64_MAX};
    for (uint64_t i = 0; i < request->piece_count; i++, dst++, src++) {
        const cm_piece *piece = &request->pieces[i];
        *dst = span_of_end(rt, &piece->dst, piece->nbytes);
        *src = span_of_end(rt, &piece->src, piece->nbytes);
        extend(&dst_files, piece->dst.is_file, *dst);
        extend(&src_files, piece->src.is_file, *src);
    }
    for (uint64_t i = 0; i < request->other_count; i++, dst++, src++) {
        const cm_piece_regions *other = &request->others[i];
        *dst = cm_overlap_span(rt, &other->dst);
        *src = cm_overlap_span(rt, &other->src);
        extend(&dst_files, other->dst.is_file, *dst);
        extend(&src_files, other->src.is_file, *src);
    }
    *out = cm_byte_spans_touch(spans, spans + count, count);
    free(spans);
    if (*out || dst_files.end == 0 || src_files.end == 0) {
        return cm_ok();
    }
    return cm_file_maps_meet(dst_files, src_files, out);
}

/* -- groups ------------------------------------------------------------------------------- */

/* Find the group for copies that go this way between these devices, or make it. Returns
 * its number, or 0 if there are too many groups. */
static uint8_t
find_group(batch *b, cm_many_way way, int device, int src_device)
{
    for (uint32_t g = 1; g < b->group_count; g++) {
        const cm_many *shape = &b->shapes[g];
        if (shape->way == way && shape->device == device
            && shape->src_device == src_device) {
            return (uint8_t)g;
        }
    }
    if (b->group_count == GROUP_MAX) {
        return 0;
    }
    b->shapes[b->group_count] =
        (cm_many){.way = way, .device = device, .src_device = src_device};
    return (uint8_t)b->group_count++;
}

/* Find the facts about an end. While nothing is registered they follow from its kind,
 * which saves a call of the engine for each. */
static cm_end_facts
facts_of(batch *b, const cm_piece_end *end, uint64_t nbytes, bool looks)
{
    return looks ? cm_engine_facts_of_end(b->engine, end, nbytes)
                 : (cm_end_facts){.locked = !cm_kind_is_pageable(end->kind),
                                  .whole = true};
}

static cm_status
choose_groups(batch *b)
{
    const cm_many_request *request = b->request;
    bool on_stream = request->common.stream != NULL && !request->common.blocking;
    bool looks = cm_registry_has_pieces(b->engine->registry);
    b->group_count = 1;
    b->groups = calloc((size_t)request->piece_count + 1, 1);
    CM_TRY(cm_allocated(b->groups != NULL, request->piece_count));
    for (uint64_t i = 0; i < request->piece_count; i++) {
        const cm_piece *piece = &request->pieces[i];
        int device, src_device;
        cm_many_way way = CM_MANY_ALONE;
        if (!b->in_order) {
            way = cm_piece_choose_way(piece,
                                      facts_of(b, &piece->dst, piece->nbytes, looks),
                                      facts_of(b, &piece->src, piece->nbytes, looks),
                                      on_stream, &device, &src_device);
        }
        if (way != CM_MANY_ALONE) {
            b->groups[i] = find_group(b, way, device, src_device);
        }
        b->alone_count += b->groups[i] == 0;
    }
    return cm_ok();
}

/* -- what the next part is ---------------------------------------------------------------- */

static void
set_piece(batch *b, const cm_piece *piece)
{
    b->part.dst = cm_piece_end_region(&piece->dst, piece->nbytes);
    b->part.src = cm_piece_end_region(&piece->src, piece->nbytes);
    b->part.convert = NULL;
}

static void
set_other(batch *b, const cm_piece_regions *other)
{
    b->part.dst = other->dst;
    b->part.src = other->src;
    b->part.convert = cm_convert_is_on(&other->convert) ? &other->convert : NULL;
}

/* Make a group the next part. If its pieces have been joined into one, or form rows, it
 * is made as an ordinary copy. */
static cm_status
set_group(batch *b, uint32_t group)
{
    cm_many *many;
    CM_TRY(cm_many_create(b->request->pieces, b->groups, b->request->piece_count,
                          (uint8_t)group, &b->shapes[group], &many));
    cm_region dst, src;
    bool is_rows = cm_many_is_rows(many, &dst, &src)
                   && !cm_overlap_is_possible(b->engine->rt, &dst, &src);
    if (many->count > 1 && !is_rows) {
        b->part.dst = b->request->common.dst;
        b->part.src = b->request->common.src;
        b->part.convert = NULL;
        b->part.many = many;
        return cm_ok();
    }
    set_piece(b, &many->pieces[0]);
    if (is_rows) {
        b->part.dst = dst;
        b->part.src = src;
    }
    cm_many_destroy(many);
    return cm_ok();
}

/* -- several parts ------------------------------------------------------------------------ */

/* Wait until the part is done. If the call does not block, wait only until all
 * work of the part has been queued on the device. */
static cm_status
wait_for_part(batch *b, uint64_t index)
{
    bool timed_out;
    do {
        cm_status status = b->request->common.blocking
                               ? cm_ticket_depend(b->parts[index], NULL, CM_ASK_NS)
                               : cm_ticket_wait_submitted(b->parts[index], CM_ASK_NS);
        timed_out = status.code == CM_ETIMEOUT;
        CM_TRY(cm_wait_check_interrupted(&b->hooks, &b->asked_ns));
    } while (timed_out);
    return cm_ok();
}

/* Wait until so little is queued that it would soon be over if the caller were
 * interrupted, since queued work cannot be called back. This matters only to a caller
 * that waits anyway. */
static cm_status
make_way(batch *b)
{
    if (b->request->common.blocking && b->part_count >= AHEAD_MAX) {
        return wait_for_part(b, b->part_count - AHEAD_MAX);
    }
    /* A part may be too short to ask the hooks itself, so they are asked here. */
    return cm_wait_check_interrupted(&b->hooks, &b->asked_ns);
}

/* Start the next part. If the copies touch each other, it comes after the part before
 * it and is made only if that succeeds. If that has failed, this part fails as well,
 * possibly before earlier ones are done. */
static cm_status
start_part(batch *b)
{
    cm_copy_request *part = &b->part;
    cm_ticket *ticket = NULL;
    cm_ticket_info info;
    cm_status status = make_way(b);
    if (!cm_is_ok(status)) {
        cm_many_destroy(part->many);
        return status;
    }
    status = cm_request_start(b->engine, part, &b->tuning, &ticket);
    part->many = NULL; /* it belongs to the engine now */
    if (ticket == NULL) {
        return status;
    }
    /* It counts as a part even if it failed, since some of it may be under way. */
    b->parts[b->part_count++] = ticket;
    cm_ticket_peek(ticket, &info);
    part->part_of->captured |= info.captured;
    /* A part without work is done at once, even before the part that it was to follow.
     * So the next part is not chained to it. */
    if (b->in_order && info.row != NULL) {
        part->chained_to = ticket;
    }
    return status;
}

/* Start the copies that are made alone, in the order of their indices. */
static cm_status
start_those_alone(batch *b)
{
    const cm_many_request *request = b->request;
    uint64_t other = 0;
    for (uint64_t i = 0; i <= request->piece_count; i++) {
        bool ends = i == request->piece_count;
        if (!ends && b->groups[i] != 0) {
            continue;
        }
        for (; other < request->other_count
               && (ends || request->others[other].index < request->pieces[i].index);
             other++) {
            set_other(b, &request->others[other]);
            CM_TRY(start_part(b));
        }
        if (!ends) {
            set_piece(b, &request->pieces[i]);
            CM_TRY(start_part(b));
        }
    }
    return cm_ok();
}

static cm_status
start_parts(batch *b)
{
    for (int way = CM_MANY_ALONE + 1; way < CM_MANY_WAY_COUNT; way++) {
        for (uint32_t g = 1; g < b->group_count; g++) {
            if ((int)b->shapes[g].way == way) {
                CM_TRY(set_group(b, g));
                CM_TRY(start_part(b));
            }
        }
    }
    return start_those_alone(b);
}

/* Join the parts into the ticket. A call that waits may be interrupted here. If the
 * call fails, what is under way goes on behind the ticket, and nobody asks that ticket
 * how it ended. */
static cm_status
join_parts(batch *b, cm_ticket *ticket, cm_status started)
{
    bool blocking = b->request->common.blocking;
    bool waits = cm_request_waits(&b->request->common);
    cm_status status = started;
    for (uint64_t i = 0; waits && status.code != CM_ECANCELLED && i < b->part_count;
         i++) {
        cm_status waited = wait_for_part(b, i);
        status = cm_is_ok(waited) ? status : waited;
    }
    /* Cancel what has not begun, beginning with the last, so that no part comes after
     * one that was not made. */
    for (uint64_t i = b->part_count; status.code == CM_ECANCELLED && i > 0; i--) {
        (void)cm_ticket_cancel(b->parts[i - 1]);
    }
    bool failed = !cm_is_ok(status);
    cm_ticket_finish_after_parts(ticket, b->parts, b->part_count,
                                 failed ? cm_fail(CM_ECANCELLED, 0) : cm_ok(),
                                 /* Otherwise the ticket reports the failure. */
                                 failed || blocking);
    /* They belong to the ticket now. */
    b->parts = NULL;
    if (waits && status.code == CM_ECANCELLED) {
        cm_ticket_drain(ticket);
    }
    return blocking && !failed ? cm_ticket_outcome(ticket, false) : status;
}

/* Return the bytes of all sources. Elements that a broadcast repeats count once. */
static uint64_t
count_nbytes(const cm_many_request *request)
{
    uint64_t nbytes = 0;
    for (uint64_t i = 0; i < request->piece_count; i++) {
        nbytes += request->pieces[i].nbytes;
    }
    for (uint64_t i = 0; i < request->other_count; i++) {
        const cm_region *src = &request->others[i].src;
        uint64_t own = (uint64_t)src->itemsize;
        for (int axis = 0; axis < src->ndim; axis++) {
            own *= src->strides[axis] == 0 ? 1 : (uint64_t)src->shape[axis];
        }
        nbytes += own;
    }
    return nbytes;
}

static cm_status
start_several(batch *b, uint64_t count, cm_ticket **out)
{
    const cm_copy_request *common = &b->request->common;
    b->parts = calloc((size_t)count, sizeof(cm_ticket *));
    cm_ticket *ticket = b->parts == NULL ? NULL : cm_ticket_create(b->engine, common);
    CM_TRY(cm_allocated(ticket != NULL, count * sizeof(cm_ticket *)));
    b->has_begun = true;
    if (common->ticket_out != NULL) {
        *common->ticket_out = ticket;
    }
    ticket->nbytes = count_nbytes(b->request);
    ticket->row = &cm_routes[CM_ROUTE_SEVERAL];
    b->part.part_of = ticket;
    b->part.keep_count = 0; /* the whole keeps the ends */
    b->part.blocking = false;
    b->part.ticket_out = NULL;
    b->hooks = cm_request_hooks(common);
    b->asked_ns = cm_now_ns();
    cm_status status = join_parts(b, ticket, start_parts(b));
    if (!cm_is_ok(status) && out != NULL && !cm_ticket_update(ticket)) {
        *out = ticket; /* others can come after it */
        return status;
    }
    return cm_ticket_hand_over(ticket, status, out);
}

/* -- the call ----------------------------------------------------------------------------- */

/* Start a batch that is one group, one copy or nothing: its only job is the whole. */
static cm_status
start_single(batch *b, cm_ticket **out)
{
    static const cm_piece nothing = {.dst = {.kind = CM_KIND_PAGEABLE, .device = -1},
                                     .src = {.kind = CM_KIND_PAGEABLE, .device = -1}};
    const cm_many_request *request = b->request;
    if (b->group_count == 2) {
        CM_TRY(set_group(b, 1));
    }
    else if (request->other_count == 1) {
        set_other(b, &request->others[0]);
    }
    else {
        set_piece(b, request->piece_count == 1 ? &request->pieces[0] : &nothing);
    }
    b->has_begun = true;
    return cm_request_start(b->engine, &b->part, &b->tuning, out);
}

static cm_status
start(batch *b, cm_ticket **out)
{
    if (b->request->other_count > 0) { /* pieces are never converted */
        CM_TRY(cm_via_host_expand(b->engine->rt, &b->whole, &b->expanded));
    }
    /* Copies that touch each other are made one after the other. A copy between two
     * mappings of one file is made as one whose ends overlap. */
    if (!b->request->is_apart) {
        CM_TRY(cm_many_find_conflicts(b->engine->rt, b->request, &b->in_order));
    }
    CM_TRY(choose_groups(b));
    uint64_t count = b->group_count - 1 + b->alone_count + b->request->other_count;
    b->part = b->request->common;
    if (b->part.stream == NULL && (count > 1 || !b->part.blocking)) {
        b->part.interrupted = NULL; /* it runs in the background */
    }
    return count > 1 ? start_several(b, count, out) : start_single(b, out);
}

cm_status
cm_engine_copy_many(cm_engine *engine, const cm_many_request *request, cm_ticket **out)
{
    batch *b = calloc(1, sizeof(*b));
    cm_status status = b == NULL ? cm_fail(CM_ENOMEM, sizeof(*b))
                                 : cm_engine_begin_call(engine, &b->tuning);
    if (!cm_is_ok(status)) {
        free(b);
        cm_request_drop_keeps(&request->common);
        return status;
    }
    b->engine = engine;
    b->whole = *request;
    b->request = &b->whole;
    status = start(b, out);
    if (!b->has_begun) {
        cm_request_drop_keeps(&b->whole.common);
    }
    for (uint64_t i = 0; b->parts != NULL && i < b->part_count; i++) {
        cm_ticket_release(b->parts[i]);
    }
    free(b->parts);
    free(b->groups);
    free(b->expanded);
    free(b);
    cm_engine_end_call(engine);
    return status;
}
