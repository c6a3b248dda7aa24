/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the module about devices, the current stream and versions. */
#ifndef CM_PYTHON_DEVICE_DEVICE_FUNCTIONS_H
#define CM_PYTHON_DEVICE_DEVICE_FUNCTIONS_H

#include "python/python.h"

/* current_stream … runtime_version; ends with an empty row. */
extern PyMethodDef cm_device_methods[];

#endif
