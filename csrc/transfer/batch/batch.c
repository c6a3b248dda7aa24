/* SPDX-License-Identifier: Apache-2.0 */
/* The entry for many copies: sorted into groups that go together, each a job; what is
 * left goes as copies of their own. */
#include "transfer/batch/batch.h"

#include <stdlib.h>

#include "transfer/batch/call.h"
#include "transfer/plan/overlap.h"

/* -- what touches what -------------------------------------------------------------------- */

static cm_byte_span
span_of_end(cm_runtime *rt, const cm_piece_end *end, uint64_t nbytes)
{
    uint64_t begin = cm_overlap_place(rt, end->address, end->host,
                                      cm_piece_end_is_on_device(end), nbytes);
    return (cm_byte_span){begin, begin + nbytes};
}

static cm_status
look_whether_they_touch(cm_many_call *c)
{
    cm_runtime *rt = c->engine->rt;
    const cm_many_request *request = c->request;
    uint64_t count = request->piece_count + request->other_count;
    cm_byte_span *spans = malloc((size_t)(count + 1) * 3 * sizeof(*spans));
    if (spans == NULL) {
        return cm_fail(CM_ENOMEM, count * 3 * sizeof(*spans));
    }
    cm_byte_span *dst = spans;
    cm_byte_span *src = spans + count;
    for (uint64_t i = 0; i < request->piece_count; i++) {
        const cm_piece *piece = &request->pieces[i];
        *dst++ = span_of_end(rt, &piece->dst, piece->nbytes);
        *src++ = span_of_end(rt, &piece->src, piece->nbytes);
    }
    for (uint64_t i = 0; i < request->other_count; i++) {
        *dst++ = cm_overlap_span(rt, &request->others[i].dst);
        *src++ = cm_overlap_span(rt, &request->others[i].src);
    }
    c->in_order = cm_byte_spans_touch(spans, spans + count, count, spans + 2 * count);
    free(spans);
    return cm_ok();
}

/* -- groups ------------------------------------------------------------------------------- */

/* What is page-locked may be so in several pieces, at addresses that do not follow on.
 */
static cm_end_facts
facts_of(cm_engine *engine, const cm_piece_end *end, uint64_t nbytes)
{
    cm_end_facts facts = {.locked = end->kind != CM_KIND_PAGEABLE, .whole = true};
    if (cm_piece_end_is_on_device(end) || engine->registry == NULL) {
        return facts;
    }
    bool locked = false;
    facts.whole =
        cm_registry_run(engine->registry, end->host, nbytes, &locked) == nbytes;
    facts.locked = facts.locked || (facts.whole && locked);
    return facts;
}

/* The group of that shape, made if there is none; ALONE: there are too many. */
static uint8_t
find_group(cm_many_call *c, cm_many_way way, int device, int src_device)
{
    if (way == CM_MANY_ALONE) {
        return 0;
    }
    for (uint32_t g = 1; g < c->group_count; g++) {
        const cm_many *shape = &c->shapes[g];
        if (shape->way == way && shape->device == device
            && shape->src_device == src_device) {
            return (uint8_t)g;
        }
    }
    if (c->group_count == CM_MANY_GROUP_MAX) {
        return 0;
    }
    c->shapes[c->group_count] =
        (cm_many){.way = way, .device = device, .src_device = src_device};
    return (uint8_t)c->group_count++;
}

static cm_status
choose_groups(cm_many_call *c)
{
    const cm_many_request *request = c->request;
    uint64_t count = request->piece_count;
    bool on_stream = request->common.stream != NULL && !request->common.blocking;
    c->group_count = 1; /* the first is of those that go alone */
    c->groups = malloc((size_t)count + 1);
    if (c->groups == NULL) {
        return cm_fail(CM_ENOMEM, count);
    }
    for (uint64_t i = 0; i < count; i++) {
        const cm_piece *piece = &request->pieces[i];
        int device, src_device;
        cm_many_way way = CM_MANY_ALONE;
        if (!c->in_order) {
            way = cm_piece_choose_way(piece,
                                      facts_of(c->engine, &piece->dst, piece->nbytes),
                                      facts_of(c->engine, &piece->src, piece->nbytes),
                                      on_stream, &device, &src_device);
        }
        c->groups[i] =
            way == CM_MANY_ALONE ? 0 : find_group(c, way, device, src_device);
        c->alone_count += c->groups[i] == 0;
    }
    return cm_ok();
}

/* -- the call ----------------------------------------------------------------------------- */

/* All in one group, or but one copy: no parts. */
static cm_status
start(cm_many_call *c, cm_ticket **out)
{
    const cm_many_request *request = c->request;
    cm_many *many;
    bool one_group = c->group_count == 2 && c->alone_count + request->other_count == 0;
    c->common = request->common;
    if (c->common.stream == NULL && !c->common.blocking) {
        c->common.interrupted = NULL; /* it runs in the background */
    }
    if (one_group) {
        cm_status status = cm_many_create(
            request->pieces, c->groups, request->piece_count, 1, &c->shapes[1], &many);
        if (!cm_is_ok(status)) {
            cm_request_drop_keeps(&request->common);
            return status;
        }
        if (many->count > 1) {
            return cm_many_start_group(c, &c->common, many, out);
        }
        cm_many_set_ends(&c->common, &many->pieces[0]);
        cm_many_destroy(many);
        return cm_request_start(c->engine, &c->common, &c->tuning, out);
    }
    if (request->piece_count + request->other_count > 1) {
        return cm_many_start_several(c, out);
    }
    if (request->piece_count == 1) {
        cm_many_set_ends(&c->common, &request->pieces[0]);
    }
    else if (request->other_count == 1) {
        c->common.dst = request->others[0].dst;
        c->common.src = request->others[0].src;
    }
    else {
        c->common.dst = (cm_region){
            .kind = CM_KIND_PAGEABLE, .device = -1, .ndim = 1, .itemsize = 1};
        c->common.src = c->common.dst; /* of no bytes: nothing to do */
    }
    return cm_request_start(c->engine, &c->common, &c->tuning, out);
}

static void
fini_call(cm_many_call *c)
{
    cm_many_end_several(c);
    free(c->groups);
    free(c);
}

cm_status
cm_engine_copy_many(cm_engine *engine, const cm_many_request *request, cm_ticket **out)
{
    cm_many_call *c = cm_engine_is_forked(engine) ? NULL : calloc(1, sizeof(*c));
    if (c == NULL) {
        cm_request_drop_keeps(&request->common);
        return cm_engine_is_forked(engine) ? cm_fail(CM_EFORKED, 0)
                                           : cm_fail(CM_ENOMEM, sizeof(*c));
    }
    c->engine = engine;
    c->request = request;
    cm_mutex_lock(&engine->lock);
    bool closed = engine->closed;
    c->tuning = engine->tuning;
    engine->caller_count += !closed;
    cm_mutex_unlock(&engine->lock);
    cm_status status = closed ? cm_fail(CM_ECLOSED, 0) : look_whether_they_touch(c);
    if (cm_is_ok(status)) {
        status = choose_groups(c);
    }
    if (cm_is_ok(status)) {
        status = start(c, out);
    }
    else {
        cm_request_drop_keeps(&request->common);
    }
    fini_call(c);
    if (!closed) {
        cm_engine_end_call(engine);
    }
    return status;
}
