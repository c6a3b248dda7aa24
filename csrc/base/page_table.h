/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out from the page table of the process (/proc/self/pagemap) which pages of a
 * range it can touch without a page fault. No locks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* At most CM_PAGES_LOOKED_AT pages are looked at. If a range has more pages than this,
 * a sample of CM_PAGES_LOOKED_AT pages is chosen, in runs of CM_PAGES_IN_A_RUN
 * neighbours. */
enum { CM_PAGES_LOOKED_AT = 1 << 16, CM_PAGES_IN_A_RUN = 256 };

/* Find how many bytes of the range lie on pages that are present. If only a sample of
 * the pages was looked at, *sampled is true, and the result is computed from the share
 * of present pages in the sample. Returns false if the kernel does not tell. This reads
 * files, so it may take milliseconds. */
bool cm_page_table_count(uint64_t address, uint64_t nbytes, uint64_t *out,
                         bool *sampled);
