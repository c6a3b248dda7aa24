/* SPDX-License-Identifier: Apache-2.0 */
/* Ordinary memory that nobody has touched yet: its pages come into being when they are
 * first written, which for huge ones goes several times as fast. No locks. */
#ifndef CM_BASE_FRESH_PAGES_H
#define CM_BASE_FRESH_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#define CM_HUGE_PAGE_NBYTES ((uintptr_t)2 << 20)

/* Most pages of the range are not there yet, by a look at a few of them. */
bool cm_pages_are_fresh(const void *p, uint64_t nbytes);
/* Ask for huge pages where whole ones lie in the range; a refusal changes nothing. */
void cm_pages_ask_huge(void *p, uint64_t nbytes);

#endif
