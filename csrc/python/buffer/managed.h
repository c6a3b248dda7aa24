/* SPDX-License-Identifier: Apache-2.0 */
/* Properties of ManagedBuffer for the table in module/buffer_type.c, and
 * the count of how its pages go to and fro. GIL held; what calls the driver releases
 * it. */
#ifndef CM_PYTHON_BUFFER_MANAGED_H
#define CM_PYTHON_BUFFER_MANAGED_H

#include "python/buffer/buffer_object.h"

extern PyMethodDef cm_managed_methods[]; /* of the module, for cumem/managed.py */

/* getter and setter of the property `name` */
PyObject *cm_buffer_get_advice(PyObject *self, void *name);
int cm_buffer_set_advice(PyObject *self, PyObject *value, void *name);

/* Where the buffer was last prefetched to: a device, CM_HOST_LOCATION, another location
 * or CM_NO_LOCATION. Releases the GIL. 0 or -1. */
int cm_buffer_read_prefetch_location(const cm_buffer *self, int *out);

/* The host, or a device, is about to use the buffer: warns where both keep doing so in
 * turn, once for each storage. Nothing is done for memory that does not migrate. May
 * run Python code. 0, or -1 where the warning is an error. */
int cm_buffer_note_side(cm_buffer *self, bool on_device);

#endif
