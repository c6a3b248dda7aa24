/* SPDX-License-Identifier: Apache-2.0 */
/* Makes copies whose memory changes hands once they are over. These are the copies of
 * regions that fall asleep or wake, and of buffers that spill.
 *
 * After such a copy somebody unmaps the chunks from which it read, or gives back the
 * page-locked block from which it read. An interrupted call of the engine may leave its
 * copy running, and only the ends that the copy keeps are safe then. Nobody keeps the
 * ends of the copies here. So these copies are on a stream that is made for them and
 * has nothing else to do, and a call that ends early first waits until that stream is
 * idle.
 *
 * The functions are called without the GIL. */
#pragma once

#include "pool/pool.h"
#include "transfer/batch/batch.h"

/* Let `stream` come after `count` other streams, and wait until `stream` has nothing to
 * do any more. The copies begin only after this call. So a signal that comes while the
 * others still work ends this call, and nothing has been copied by then.
 * Fails: CM_ECANCELLED; CM_ECAPTURING if one of them is captured; cm_stream_follow(),
 *        stream_query. */
CM_NODISCARD cm_status cm_handover_come_after(cm_stream *stream,
                                              cm_stream *const *after, uint32_t count,
                                              const cm_wait_hooks *hooks);
/* Wait until the device has done all that the stream was given. A device that cannot be
 * asked has failed, and does nothing any more. */
void cm_handover_wait(const cm_stream *stream);
/* Begin to copy pieces between the memory of a device and page-locked memory, in one
 * batch, on `stream`. The call may change the pieces. cm_handover_end() takes *out.
 * Fails: cm_engine_copy_many(); then the stream has nothing to do, and *out is NULL. */
CM_NODISCARD cm_status cm_handover_begin(cm_engine *engine, cm_stream *stream,
                                         cm_piece *pieces, uint64_t count,
                                         const cm_wait_hooks *hooks, cm_ticket **out);
/* Wait for what has begun, and release its ticket.
 * Fails: CM_ECANCELLED; the failure of the copy. Then the stream has nothing to do, and
 *        whatever else has begun on it is over too. */
CM_NODISCARD cm_status cm_handover_end(cm_stream *stream, cm_ticket *ticket,
                                       const cm_wait_hooks *hooks);
