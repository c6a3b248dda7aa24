/* SPDX-License-Identifier: Apache-2.0 */
/* A copy's source that is a mapped file, read by calls instead of through its pages:
 * faster, since no page has to be mapped first, and a file that was cut short is a
 * failure of the copy instead of a signal. Counted; any thread. */
#ifndef CM_TRANSFER_FILE_SOURCE_H
#define CM_TRANSFER_FILE_SOURCE_H

#include "transfer/file.h"
#include "transfer/layout.h"

typedef struct cm_file_source cm_file_source;

/* The bytes from `low` on are those of `fd` from `offset` on. Takes `fd` over, also on
 * failure. `calls` NULL: the system's. NULL: no memory. */
cm_file_source *cm_file_source_create(int fd, const void *low, uint64_t offset,
                                      const cm_file_calls *calls);
void cm_file_source_release(cm_file_source *source);
/* How many there are: each has a descriptor open. */
uint32_t cm_file_source_count(void);

/* One copy's reading of a source: fails by itself, whatever others read of it. Holds
 * the source. NULL: no memory. */
typedef struct cm_file_reader cm_file_reader;
cm_file_reader *cm_file_reader_create(cm_file_source *source);
/* No thread reads any more. NULL is allowed. */
void cm_file_reader_destroy(cm_file_reader *reader);

/* A cm_move_part; `context` is the reader. What lies so far apart that most of what a
 * call reads would be in vain is read through its pages after all. */
void cm_file_reader_move(const void *context, const cm_layout *part, void *dst,
                         const void *src, bool wide);
/* The first failure of all parts so far. Fails: CM_EENDED (where the file ends),
 * CM_ESYSTEM (errno), CM_EFAULT (what was read through its pages). */
CM_NODISCARD cm_status cm_file_reader_status(const cm_file_reader *reader);

#endif
