/* SPDX-License-Identifier: Apache-2.0 */
#include "python/pool/handover.h"

#include "base/backoff.h"
#include "runtime/scope.h"
#include "runtime/stream.h"

void
cm_handover_wait(const cm_stream *stream)
{
    cm_ignore(CM_ON_DEVICE(stream->rt, stream->device,
                           cm_rt_stream_synchronize(stream->rt, stream->handle)));
}

cm_status
cm_handover_come_after(cm_stream *stream, cm_stream *const *after, uint32_t count,
                       const cm_wait_hooks *hooks)
{
    bool is_idle = true;
    for (uint32_t i = 0; i < count; i++) {
        if (!cm_stream_is_idle(after[i])) {
            CM_TRY(cm_stream_check_not_capturing(after[i]));
            CM_TRY(cm_stream_follow(stream, after[i]));
            is_idle = false;
        }
    }
    uint64_t begin_ns = cm_now_ns();
    uint64_t asked_ns = begin_ns;
    while (!is_idle) {
        CM_TRY(cm_stream_query(stream, &is_idle));
        if (!is_idle) {
            CM_TRY(cm_wait_check_interrupted(hooks, &asked_ns));
            cm_nap_after(cm_now_ns() - begin_ns);
        }
    }
    return cm_ok();
}

cm_status
cm_handover_begin(cm_engine *engine, cm_stream *stream, cm_piece *pieces,
                  uint64_t count, const cm_wait_hooks *hooks, cm_ticket **out)
{
    const cm_many_request request = {
        .common = {.stream = stream,
                   .interrupted = hooks->interrupted,
                   .interrupted_argument = hooks->argument},
        .pieces = pieces,
        .piece_count = count,
        .is_apart = true,
    };
    *out = NULL;
    cm_status status = cm_engine_copy_many(engine, &request, out);
    if (!cm_is_ok(status)) {
        cm_handover_wait(stream);
        if (*out != NULL) { /* some of the copies had begun */
            cm_ignore(cm_ticket_wait(*out, UINT64_MAX));
            cm_ticket_release(*out);
            *out = NULL;
        }
    }
    return status;
}

/* Wait until a copy is over, and ask every 50 ms whether to go on. */
static cm_status
wait_for_ticket(cm_ticket *ticket, const cm_wait_hooks *hooks)
{
    uint64_t asked_ns = cm_now_ns();
    cm_status status = cm_ticket_wait(ticket, CM_ASK_NS);
    while (status.code == CM_ETIMEOUT) {
        CM_TRY(cm_wait_check_interrupted(hooks, &asked_ns));
        status = cm_ticket_wait(ticket, CM_ASK_NS);
    }
    return status;
}

cm_status
cm_handover_end(cm_stream *stream, cm_ticket *ticket, const cm_wait_hooks *hooks)
{
    cm_status status = wait_for_ticket(ticket, hooks);
    if (!cm_is_ok(status)) {
        cm_handover_wait(stream);
        cm_ignore(cm_ticket_wait(ticket, UINT64_MAX));
    }
    cm_ticket_release(ticket);
    return status;
}
