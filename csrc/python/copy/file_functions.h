/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a file and objects in memory, for cumem/files.py. */
#ifndef CM_PYTHON_COPY_FILE_FUNCTIONS_H
#define CM_PYTHON_COPY_FILE_FUNCTIONS_H

#include "python/buffer/buffer_object.h"
#include "transfer/file/file.h"

/* OSError or EOFError for what was wrong with the file, with the attributes `filename`
 * and `offset`. `ranges` are those of the request. NULL. */
PyObject *cm_file_raise(const cm_file_failure *failure, const cm_file_range *ranges,
                        bool writes, PyObject *filename);

extern PyMethodDef cm_file_methods[];

#endif
