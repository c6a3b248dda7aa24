/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of ordinary memory. Those that nobody has touched yet come into being when they
 * are first written, which for huge ones goes several times as fast; those of a mapped
 * file that was cut short are no more, and touching them ends the process. No locks. */
#ifndef CM_BASE_FRESH_PAGES_H
#define CM_BASE_FRESH_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define CM_HUGE_PAGE_NBYTES ((uintptr_t)2 << 20)

/* The range is long enough for huge pages, and by a look at a few of them most pages
 * are not there yet. */
bool cm_pages_are_fresh(const void *p, uint64_t nbytes);
/* That the pages of a range about to be written become huge ones, where whole ones lie
 * in it; a refusal changes nothing. */
void cm_pages_ask_huge(void *p, uint64_t nbytes);
/* Bring in the pages of memory that is about to be read, or written, and may be a
 * mapped file's: what is not in the file any more, or cannot be read from the disk, is
 * a failure here and a signal to whoever touches it. Takes time for each page, also
 * where it is
 * there. Kernels before 5.14, and memory of devices, cannot tell: no failure. Fails:
 * CM_EFAULT (errno). */
CM_NODISCARD cm_status cm_pages_populate(const void *p, uint64_t nbytes, bool writes);
/* The same for the page of the last byte, which tells for all of a file that was cut
 * short and costs the same whatever memory it is. */
CM_NODISCARD cm_status cm_pages_look(const void *p, uint64_t nbytes, bool writes);

#endif
