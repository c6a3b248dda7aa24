/* SPDX-License-Identifier: Apache-2.0 */
/* The other files of this folder offer these functions to module.c, which puts the
 * extension module together. The functions open and close the devices, make types, and
 * have tables of functions. All of them need the GIL. */
#pragma once

#include "python/core/state.h"

/* open.c: the functions to which cm_state.leave_parent and cm_state.open_runtime
 * point. */
int cm_state_leave_parent(cm_state *state);
int cm_state_open(cm_state *state);

extern PyMethodDef cm_shutdown_methods[]; /* shutdown, _at_exit, _after_fork */
/* shutdown.c: close what is still open when the module is freed (m_free). */
void cm_state_fini(cm_state *state);

/* Make the types. Returns 0, or -1 with an exception. */
int cm_register_buffer_types(PyObject *module, cm_state *state);

extern PyMethodDef cm_dtype_methods[]; /* dtype_rows.c */
/* Add the list of dtypes to the module. Returns 0, or -1 with an exception. */
int cm_add_dtypes(PyObject *module);

/* testing.c: the hooks of the tests. Only the extension that is built for tests
 * contains that file. In the extension of a wheel the address of this symbol is
 * NULL. */
extern PyMethodDef cm_testing_methods[] __attribute__((weak));
