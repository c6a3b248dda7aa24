/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes and strides as Python shows them. GIL held. */
#ifndef CM_PYTHON_CORE_TUPLES_H
#define CM_PYTHON_CORE_TUPLES_H

#include <stdint.h>

#include "python/python.h"

/* A new tuple of ints, or NULL with an exception. */
PyObject *cm_tuple_from(const int64_t *values, int count);

#endif
