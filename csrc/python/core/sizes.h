/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes as people write them: an int, "4GiB", "50%". The same words as cumem.units. */
#ifndef CM_PYTHON_CORE_SIZES_H
#define CM_PYTHON_CORE_SIZES_H

#include <stdbool.h>
#include <stdint.h>

#include "python/python.h"

#define CM_SIZE_EXPECTED                                                               \
    "a number of bytes, or a text such as '4096', '512 KiB', '1.5GB' or '50%'"
#define CM_SIZE_EXPECTED_WHOLE                                                         \
    "a number of bytes, or a text such as '4096', '512 KiB' or '1.5GB'"

/* Bytes from `text`, rounded down; a share is one of `whole_nbytes`. False: not a size,
 * or more than 63 bits. */
bool cm_size_parse(const char *text, uint64_t whole_nbytes, uint64_t *out);
/* True when the text is a share, so that the caller must know the whole. */
bool cm_size_is_share(const char *text);
/* "512 B", "1.5 GiB". */
void cm_size_format(uint64_t nbytes, char out[32]);
/* An int or a str. 0, or -1 with TypeError or ValueError that names the argument. */
int cm_arg_size(PyObject *object, const char *name, uint64_t whole_nbytes,
                uint64_t *out);
/* The same where a share makes no sense. */
int cm_arg_size_whole(PyObject *object, const char *name, uint64_t *out);
/* True when cm_arg_size() will look at the whole. Never fails. */
bool cm_arg_size_is_share(PyObject *object);

#endif
