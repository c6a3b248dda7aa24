/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers for C tests in which one call makes many copies. They describe single pieces
 * of such a call. */
#pragma once

#include "engine_world.h"
#include "transfer/batch/batch.h"

/* Describe the place `offset` bytes into the memory as one end of a piece. */
CM_UNUSED static cm_piece_end
end_at(const memory *m, uint64_t offset)
{
    return (cm_piece_end){.host = m->host == NULL ? NULL : (char *)m->host + offset,
                          .address = m->address == 0 ? 0 : m->address + offset,
                          .owner = m,
                          .kind = m->kind,
                          .device = (int16_t)m->device};
}

/* Describe a piece that copies `nbytes` bytes from offset `src` of one memory to offset
 * `dst` of another. `index` is its position in the caller's list. */
CM_UNUSED static cm_piece
piece_between(const memory *to, uint64_t dst, const memory *from, uint64_t src,
              uint64_t nbytes, uint64_t index)
{
    return (cm_piece){.dst = end_at(to, dst),
                      .src = end_at(from, src),
                      .nbytes = nbytes,
                      .index = index};
}
