/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring a machine: what the links, the copy engines and the threads of the host do.
 * Takes a tenth of a second and less than 64 MiB, on a stream and with threads of its
 * own; what it finds depends on nobody else using the device meanwhile. */
#ifndef CM_TRANSFER_RUN_CALIBRATE_H
#define CM_TRANSFER_RUN_CALIBRATE_H

#include "transfer/engine/engine.h"
#include "transfer/plan/tuning.h"

#define CM_CALIBRATE_NS (UINT64_C(250) * 1000 * 1000) /* a machine needs half of it */

/* What is not found out within `budget_ns` keeps its default. The engine has its pools.
 * Blocks. Fails: any runtime call, CM_ENOMEM, CM_EINVALID (no pool of the
 * device), CM_ECLOSED, CM_EFORKED. */
CM_NODISCARD cm_status cm_engine_calibrate(cm_engine *engine, int device,
                                           uint64_t budget_ns, cm_measured *out);

#endif
