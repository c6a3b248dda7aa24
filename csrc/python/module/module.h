/* SPDX-License-Identifier: Apache-2.0 */
/* The extension as a whole: how its devices are opened and closed, and the tables that
 * are put together of what the other folders have. GIL held. */
#ifndef CM_PYTHON_MODULE_MODULE_H
#define CM_PYTHON_MODULE_MODULE_H

#include "python/core/state.h"

/* open.c: cm_state.when_closed. */
int cm_state_open(cm_state *state);

extern PyMethodDef cm_shutdown_methods[]; /* shutdown, _at_exit */
/* shutdown_wait.c: wait until nothing that shutdown() ends is at work any more, as far
 * as it can be asked about without touching what others may have destroyed; failures
 * are left to it. In a thread that sees no signals it does nothing. 0, or -1 with the
 * exception of a signal handler: nothing was changed. */
int cm_state_wait_for_work(cm_state *state);
/* The module's m_free. */
void cm_state_fini(cm_state *state);

/* The attributes of buffers and their repr. */
extern PyGetSetDef cm_buffer_getters[];        /* of Buffer, inherited by all */
extern PyGetSetDef cm_mapped_buffer_getters[]; /* beyond those */
extern PyGetSetDef cm_managed_buffer_getters[];
extern PyGetSetDef cm_device_buffer_getters[];
PyObject *cm_buffer_repr(PyObject *self);

/* Each makes its types or module; 0 or -1. */
int cm_register_buffer_types(PyObject *module, cm_state *state);
int cm_register_testing(PyObject *module, cm_state *state);

#endif
