/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory mapped on demand: what the emulated memory asks of mappings. The
 * operations on them are as ops.h says. */
#ifndef CM_RUNTIME_EMULATED_VIRTUAL_H
#define CM_RUNTIME_EMULATED_VIRTUAL_H

#include "runtime/emulated/private.h"

#define CM_EMULATED_GRANULARITY (UINT64_C(2) << 20)

/* The mappings [*first, *end) of `range` under [offset, offset + nbytes); false when
 * part of it is not mapped. */
bool cm_emulated_mappings_find(const cm_emulated_range *range, uint64_t offset,
                               uint64_t nbytes, size_t *first, size_t *end);
/* Keep those from going away, which are all mapped; false when one came after `stamp`.
 */
bool cm_emulated_mappings_pin(cm_emulated_range *range, uint64_t offset,
                              uint64_t nbytes, uint64_t stamp);
/* False when one was unmapped meanwhile. */
bool cm_emulated_mappings_unpin(cm_emulated_range *range, uint64_t offset,
                                uint64_t nbytes);
/* Drop what `device` has, wherever it is mapped. */
void cm_emulated_virtual_reset(cm_emulated *emulated, int device);
/* Drop everything but the ranges themselves; nothing may be executing. */
void cm_emulated_virtual_fini(cm_emulated *emulated);

#endif
