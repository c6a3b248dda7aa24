/* SPDX-License-Identifier: Apache-2.0 */
/* Pools report what they do to the recorder. This file puts their events together. */
#include "pool/private.h"

CM_COLD void
cm_pool_note(const cm_pool *pool, uint8_t op, const cm_block *block, uint64_t nbytes,
             uint64_t value, const cm_stream *stream)
{
    const cm_pool_config *config = &pool->config;
    uint8_t kind =
        config->is_staging ? CM_EVENT_STAGING : cm_kind_in_event(config->kind);
    uint64_t address = 0;
    if (block != NULL) {
        address = block->host != NULL ? (uintptr_t)block->host : block->address;
    }
    cm_event event = {.op = op,
                      .address = address,
                      .nbytes = nbytes,
                      .value = value,
                      .stream = stream == NULL ? 0 : stream->handle,
                      .pool = (uint32_t)config->serial,
                      .kind = kind,
                      .source_kind = kind,
                      .device = (int8_t)config->device};
    cm_recorder_note_here(event);
}
