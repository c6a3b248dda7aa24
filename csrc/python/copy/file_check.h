/* SPDX-License-Identifier: Apache-2.0 */
/* What the ends of a file transfer must be; errors name the end. GIL held. All: 0, or
 * -1 with TypeError or ValueError. */
#ifndef CM_PYTHON_COPY_FILE_CHECK_H
#define CM_PYTHON_COPY_FILE_CHECK_H

#include "python/protocols/protocols.h"

/* An end as errors call it. */
typedef struct cm_file_end_name {
    PyObject *argument; /* borrowed str; None: it is ranges[index] */
    Py_ssize_t index;
    bool writes; /* to the file: it is a source */
} cm_file_end_name;

int cm_file_check_memory(const cm_state *state, const cm_file_end_name *name,
                         PyObject *object);
/* Of `object`. */
int cm_file_check_operand(const cm_file_end_name *name, PyObject *object,
                          const cm_operand *operand);
int cm_file_parse_offset(const cm_file_end_name *name, PyObject *object, uint64_t *out);

#endif
