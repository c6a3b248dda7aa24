/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between memory of devices whose elements are converted on the way. No device
 * does that, so they come to the host, which converts them, and go on from there: piece
 * by piece through one stage of ordinary memory, so that no second array of the whole
 * is made. Of such a copy this makes pairs of copies, each of which the engine can
 * make:
 *
 *     stage <- piece 0 of the source, converted as it arrives
 *     piece 0 of the target <- stage
 *     stage <- piece 1 of the source
 *     ...
 *
 * All of them touch the stage, so a batch makes them one after the other. Ends that may
 * overlap go in one piece, as the source is to be read whole first.
 * Locks: none. */
#pragma once

#include "transfer/batch/batch.h"

/* Replace those of `request->others` that cm_plan_is_far(), if there are any, by what
 * they are made of: *others, which is the caller's to free() and has a place in
 * `request`, or NULL. The stage is among the request's keeps then, instead of those
 * that
 * were there, which go with it. Fails: CM_ENOMEM, CM_EOVERFLOW; nothing has changed. */
CM_NODISCARD cm_status cm_far_expand(cm_runtime *rt, cm_many_request *request,
                                     cm_piece_regions **others);
