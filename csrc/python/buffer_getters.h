/* SPDX-License-Identifier: Apache-2.0 */
/* The attributes of buffers and their repr, for the tables in buffer_type.c. GIL held.
 */
#ifndef CM_PYTHON_BUFFER_GETTERS_H
#define CM_PYTHON_BUFFER_GETTERS_H

#include "python/objects.h"

extern PyGetSetDef cm_buffer_getters[];        /* of Buffer, inherited by all */
extern PyGetSetDef cm_mapped_buffer_getters[]; /* beyond those */
extern PyGetSetDef cm_managed_buffer_getters[];
extern PyGetSetDef cm_device_buffer_getters[];

PyObject *cm_buffer_repr(PyObject *self);

#endif
