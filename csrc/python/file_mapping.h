/* SPDX-License-Identifier: Apache-2.0 */
/* Copies whose source is a file mapped into memory: reading the file takes fewer page
 * faults than reading the memory. */
#ifndef CM_PYTHON_FILE_MAPPING_H
#define CM_PYTHON_FILE_MAPPING_H

#include "python/objects.h"
#include "python/state.h"
#include "transfer/file_source.h"

typedef struct cm_mapped {
    int fd; /* owned; -1: the source is no such thing */
    cm_file_range range;
    uint64_t moved; /* bytes so far, for who is told while cm_mapped_copy runs */
    cm_file_failure failure;
} cm_mapped;

/* Is the request's source, kept by `array`, one run of a shared mapping of a file, and
 * does reading that do the same? Looks at long ones only. GIL held. */
void cm_mapped_open(cm_mapped *mapped, PyObject *array, const cm_copy_request *request);
/* cm_engine_copy() for a blocking request. Blocks. */
CM_NODISCARD cm_status cm_mapped_copy(cm_mapped *mapped, cm_engine *engine,
                                      const cm_copy_request *request,
                                      const cm_file_calls *calls);
/* The file that `region`, kept by `array`, is a shared mapping of, to be released;
 * NULL: none, or what is mapped is short. EOFError where the file is too short for it
 * by now. 0 or -1. GIL held. */
int cm_mapped_attach(cm_state *state, PyObject *array, const cm_region *region,
                     cm_file_source **out);
/* The exception for a copy that failed so; with the name of the file if it was that,
 * and `array` knows it. NULL always. GIL held. */
PyObject *cm_mapped_raise_copy(cm_state *state, cm_status status, PyObject *array);
/* The exception where the file was what failed: NULL, with or without one. GIL held. */
PyObject *cm_mapped_raise(const cm_mapped *mapped, PyObject *array);
void cm_mapped_close(cm_mapped *mapped);

#endif
