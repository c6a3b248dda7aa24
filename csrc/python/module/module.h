/* SPDX-License-Identifier: Apache-2.0 */
/* The extension as a whole: how its devices are opened and closed, and the tables that
 * are put together of what the other folders have. GIL held. */
#ifndef CM_PYTHON_MODULE_MODULE_H
#define CM_PYTHON_MODULE_MODULE_H

#include "python/core/state.h"

/* -- environment.c: CUMEM_BACKEND and CUMEM_EMULATED_* -- */

typedef enum cm_choice { CM_CHOICE_ANY, CM_CHOICE_CUDA, CM_CHOICE_EMULATED } cm_choice;

/* CUMEM_BACKEND: "cuda", "emulated"; unset or empty is ANY. 0, or -1 with ValueError.
 */
int cm_config_read_backend(cm_choice *out);

/* Defaults changed by CUMEM_EMULATED_DEVICES (count), _MEMORY (bytes, or a number with
 * KiB, MiB, GiB, TiB or kB, MB, GB, TB), _DRIVER ("12.4"), _DELAY_US and _SEED. 0, or
 * -1 with a ValueError that names the variable. */
int cm_config_read_emulated(cm_emulated_config *out);

/* open.c: cm_state.when_closed. */
int cm_state_open(cm_state *state);

extern PyMethodDef cm_shutdown_methods[]; /* shutdown, _at_exit */
/* The module's m_free. */
void cm_state_fini(cm_state *state);

/* Each makes its types or module; 0 or -1. */
int cm_register_buffer_types(PyObject *module, cm_state *state);
int cm_register_testing(PyObject *module, cm_state *state);

#endif
