/* SPDX-License-Identifier: Apache-2.0 */
/* Ordinary memory that nobody has touched yet: its pages come into being when they are
 * first written, which for huge ones goes several times as fast. No locks. */
#ifndef CM_BASE_FRESH_PAGES_H
#define CM_BASE_FRESH_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#define CM_HUGE_PAGE_NBYTES ((uintptr_t)2 << 20)

/* The range is long enough for huge pages, and by a look at a few of them most pages
 * are not there yet. */
bool cm_pages_are_fresh(const void *p, uint64_t nbytes);
/* That the pages of a range about to be written become huge ones, where whole ones lie
 * in it; a refusal changes nothing. */
void cm_pages_ask_huge(void *p, uint64_t nbytes);

#endif
