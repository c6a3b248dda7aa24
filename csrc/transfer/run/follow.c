/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a ticket that is done when an event of the user's is reached. */
#include "runtime/scope.h"
#include "transfer/engine/ticket.h"

/* Submit the ticket on a stream that does nothing but wait for the user's event. A
 * ticket already has everything that a thread needs to sleep until a device has
 * finished. The watcher queries its event and rings its bells, and shutdown() and
 * forked children take care of it. So those who wait for an event wait for such a
 * ticket. */
static cm_status
submit_behind(cm_ticket *ticket, int device, uint64_t event)
{
    cm_engine *engine = ticket->engine;
    cm_stream *stream;
    CM_TRY(cm_engine_need_watcher(engine));
    CM_TRY(cm_cache_take_stream(engine, device, &stream));
    cm_status status = cm_stream_wait_event(stream, event);
    if (cm_is_ok(status)) {
        status = cm_ticket_submit(ticket, stream, NULL, 0, stream, NULL, cm_ok());
    }
    if (cm_is_ok(status)) {
        cm_stream_release(stream); /* the ticket holds it, and gives it back */
    }
    else {
        cm_cache_give_stream(engine, stream);
    }
    return status;
}

cm_status
cm_engine_follow_event(cm_engine *engine, int device, uint64_t event, cm_ticket **out)
{
    cm_tuning tuning;
    CM_TRY(cm_engine_begin_call(engine, &tuning));
    cm_copy_request nothing = {.is_fill = false};
    cm_ticket *ticket = cm_ticket_create(engine, &nothing);
    cm_status status = cm_allocated(ticket != NULL, sizeof(*ticket));
    if (cm_is_ok(status)) {
        ticket->started = true; /* what was recorded cannot be cancelled */
        status = CM_IN_SCOPE(engine->rt, device, submit_behind(ticket, device, event));
        if (!cm_is_ok(status)) {
            cm_ticket_finish(ticket, status, true);
        }
        status = cm_ticket_hand_over(ticket, status, out);
    }
    cm_engine_end_call(engine);
    return status;
}
