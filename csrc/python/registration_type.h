/* SPDX-License-Identifier: Apache-2.0 */
/* Registration objects and the function that makes them. GIL held throughout. */
#ifndef CM_PYTHON_REGISTRATION_TYPE_H
#define CM_PYTHON_REGISTRATION_TYPE_H

#include "python/objects.h"

/* A new Registration around a buffer (held) whose storage has the registration. */
PyObject *cm_registration_object_new(cm_state *state, PyObject *buffer);

/* register() of the module. */
extern PyMethodDef cm_registration_methods[];

#endif
