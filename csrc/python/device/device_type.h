/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of Device share. GIL held throughout. */
#ifndef CM_PYTHON_DEVICE_DEVICE_TYPE_H
#define CM_PYTHON_DEVICE_DEVICE_TYPE_H

#include "python/device/objects.h"

typedef struct cm_device_object {
    PyObject_HEAD
    cm_state *state;
    int index;
} cm_device_object;

extern PyGetSetDef cm_device_getset[];

/* The runtime, once it is certain that it has the device; shutdown() is refused until
 * the give. Borrowed; NULL with an exception, and then there is no give. */
cm_runtime *cm_device_take_runtime(const cm_device_object *self);
void cm_device_give_runtime(const cm_device_object *self);

#endif
