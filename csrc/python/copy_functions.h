/* SPDX-License-Identifier: Apache-2.0 */
/* copy() and copy_async(), for the module's method table. */
#ifndef CM_PYTHON_COPY_FUNCTIONS_H
#define CM_PYTHON_COPY_FUNCTIONS_H

#include "python/objects.h"

extern PyMethodDef cm_copy_methods[];

#endif
