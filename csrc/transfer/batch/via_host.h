/* SPDX-License-Identifier: Apache-2.0 */
/* Takes apart copies between memory of devices if their elements are converted on the
 * way and no device can do that (cm_plan_goes_via_host()). Then the elements come to
 * the host, which converts them, and go on from there. They go piece by piece through
 * one stage of ordinary memory, so that the host never holds the whole array. Each such
 * copy becomes pairs of copies that the engine can make:
 *
 *     stage <- piece 0 of the source, converted as it arrives
 *     piece 0 of the target <- stage
 *     stage <- piece 1 of the source
 *     ...
 *
 * All of these copies touch the stage, so a batch makes them one after the other. Ends
 * that may overlap go in one piece, since the source has to be read as a whole first.
 * Locks: none. */
#pragma once

#include "transfer/batch/batch.h"

/* Replace the copies in `request->others` for which cm_plan_goes_via_host() is true by
 * the pairs that they become. If there are any, `request->others` and *others are a new
 * array, which the caller has to free(). The stage takes the place of the request's
 * keeps, and drops them when it is dropped itself. If there are none, *others is NULL.
 * Fails: CM_ENOMEM, CM_EOVERFLOW; nothing has changed then. */
CM_NODISCARD cm_status cm_via_host_expand(cm_runtime *rt, cm_many_request *request,
                                          cm_piece_regions **others);
