/* SPDX-License-Identifier: Apache-2.0 */
/* Which pages of a range this process can touch without a page fault, as the kernel's
 * page table of the process tells (/proc/self/pagemap). No locks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* At most CM_PAGES_LOOKED_AT pages are looked at. In a larger range that many are
 * chosen, in runs of CM_PAGES_IN_A_RUN neighbours. */
enum { CM_PAGES_LOOKED_AT = 1 << 16, CM_PAGES_IN_A_RUN = 256 };

/* How many bytes of the range lie on pages that are present, computed from the share of
 * present pages among those that were looked at; `*sampled` says whether these were
 * only some of all. False where the kernel does not tell. Reads files, and so may take
 * milliseconds. */
bool cm_page_table_count(uint64_t address, uint64_t nbytes, uint64_t *out,
                         bool *sampled);
