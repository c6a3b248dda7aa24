/* SPDX-License-Identifier: Apache-2.0 */
/* Copies whose source is a file mapped into memory: reading the file takes fewer page
 * faults than reading the memory. */
#ifndef CM_PYTHON_FILE_MAPPING_H
#define CM_PYTHON_FILE_MAPPING_H

#include "python/objects.h"
#include "transfer/file.h"

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
/* EOFError where `region` is memory of a shared mapping whose file is too short for it
 * by now: reading that would be a SIGBUS. Looks at long ones only. 0 or -1. GIL held.
 */
int cm_mapped_check(PyObject *array, const cm_region *region);
/* The exception where the file was what failed: NULL, with or without one. GIL held. */
PyObject *cm_mapped_raise(const cm_mapped *mapped, PyObject *array);
void cm_mapped_close(cm_mapped *mapped);

#endif
