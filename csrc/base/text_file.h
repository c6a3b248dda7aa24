/* SPDX-License-Identifier: Apache-2.0 */
/* The small text files that the kernel describes machine and process in, under a root
 * that tests may replace. Whatever is missing or makes no sense is "not known" and
 * never a failure. Knows nothing of what the files mean. No locks. */
#ifndef CM_BASE_TEXT_FILE_H
#define CM_BASE_TEXT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Read the file at root + path into `out`, ended by a zero, cut after nbytes - 1 bytes.
 * `root` NULL: "". False when it cannot be read; *out is then "". */
bool cm_text_read(const char *root, const char *path, char *out, size_t nbytes);

/* The same as a whole, which the caller frees; NULL when it cannot be read. Long files
 * are not for the stack of a thread that may have little of it. */
char *cm_text_load(const char *root, const char *path);

/* The decimal number that `text` begins with, which white space or the end must follow.
 * False for anything else, "max" and "-1" too, and for what does not fit. */
bool cm_text_parse_u64(const char *text, uint64_t *out);

/* The number after `key`, which stands at the beginning of a line. */
bool cm_text_find_u64(const char *text, const char *key, uint64_t *out);

/* Of a list like "0-3,8": call `visit` for each run; ends at what makes no sense. */
void cm_text_visit_list(const char *text,
                        void (*visit)(void *context, uint64_t first, uint64_t last),
                        void *context);

#endif
