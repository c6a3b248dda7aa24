/* SPDX-License-Identifier: Apache-2.0 */
/* The extension as a whole: how its devices are opened and closed, and the tables that
 * are put together of what the other folders have. GIL held. */
#pragma once

#include "python/core/state.h"

/* open.c: cm_state.when_closed, when_forked. */
int cm_state_leave_parent(cm_state *state);
int cm_state_open(cm_state *state);

extern PyMethodDef cm_shutdown_methods[]; /* shutdown, _at_exit, _after_fork */
/* The module's m_free. */
void cm_state_fini(cm_state *state);

/* Makes the types; 0 or -1. */
int cm_register_buffer_types(PyObject *module, cm_state *state);

/* dtype_rows.c: _read_dtype, and what adds the list of dtypes; 0 or -1. */
extern PyMethodDef cm_dtype_methods[];
int cm_add_dtypes(PyObject *module);

/* testing.c: the hooks of the tests. Only the extension for tests is linked with that
 * file; in the wheel's the symbol is NULL. */
extern PyMethodDef cm_testing_methods[] __attribute__((weak));
