/* SPDX-License-Identifier: Apache-2.0 */
/* The extension as a whole: how its devices are opened and closed, and the tables of
 * functions that the other folders have. The GIL is held. */
#pragma once

#include "python/core/state.h"

/* open.c: cm_state.when_forked and cm_state.when_closed call these. */
int cm_state_leave_parent(cm_state *state);
int cm_state_open(cm_state *state);

extern PyMethodDef cm_shutdown_methods[]; /* shutdown, _at_exit, _after_fork */
/* Called at the end of the module, by its m_free. */
void cm_state_fini(cm_state *state);

/* Make the types. 0, or -1 with an exception. */
int cm_register_buffer_types(PyObject *module, cm_state *state);

extern PyMethodDef cm_dtype_methods[]; /* dtype_rows.c */
/* Add the list of dtypes to the module. 0, or -1 with an exception. */
int cm_add_dtypes(PyObject *module);

/* testing.c: the hooks of the tests. Only the extension for tests is linked with that
 * file; in the wheel's the symbol is NULL. */
extern PyMethodDef cm_testing_methods[] __attribute__((weak));
