/* SPDX-License-Identifier: Apache-2.0 */
/* Ordinary memory that nobody has touched yet: its pages come into being when they are
 * first written, which for huge ones goes several times as fast. No locks. */
#ifndef CM_BASE_FRESH_PAGES_H
#define CM_BASE_FRESH_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#define CM_HUGE_PAGE_NBYTES ((uintptr_t)2 << 20)

/* Ask that the pages of a range about to be written become huge ones. False: the range
 * is short, or by a look at a few of them most are there already; nothing is changed.
 */
bool cm_pages_prepare(void *p, uint64_t nbytes);

#endif
