/* SPDX-License-Identifier: Apache-2.0 */
/* NumPy's headers for the files of the bridge: numpy_bridge.c imports the API, the
 * others define NO_IMPORT_ARRAY first. */
#ifndef CM_PYTHON_NUMPY_BRIDGE_PRIVATE_H
#define CM_PYTHON_NUMPY_BRIDGE_PRIVATE_H

#include "python/python.h"

#define PY_ARRAY_UNIQUE_SYMBOL cm_numpy_api
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wundef"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#pragma GCC diagnostic ignored "-Wunused-function"
#include <numpy/arrayobject.h>
#pragma GCC diagnostic pop

#endif
