/* SPDX-License-Identifier: Apache-2.0 */
/* Which pages of a range this process can touch without a page fault, as the kernel's
 * page table of the process tells (/proc/self/pagemap). No locks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* So many pages are looked at; of larger ranges this many of them, in runs of so many
 * that lie side by side. */
enum { CM_PAGES_LOOKED_AT = 1 << 16, CM_PAGES_IN_A_RUN = 256 };

/* How many bytes of the range lie on pages that are there, by the share of the pages
 * that were looked at; `*sampled` says whether these were only some of them. False
 * where the kernel does not tell. Reads files, and so may take milliseconds. */
bool cm_page_table_count(uint64_t address, uint64_t nbytes, uint64_t *out,
                         bool *sampled);
