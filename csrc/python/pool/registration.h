/* SPDX-License-Identifier: Apache-2.0 */
/* Registration objects. GIL held throughout. */
#ifndef CM_PYTHON_POOL_REGISTRATION_H
#define CM_PYTHON_POOL_REGISTRATION_H

#include "python/buffer/buffer_object.h"

/* A new Registration around a buffer (held) whose storage has the registration. */
PyObject *cm_registration_object_new(cm_state *state, PyObject *buffer);

int cm_register_registration_type(PyObject *module, cm_state *state);

#endif
