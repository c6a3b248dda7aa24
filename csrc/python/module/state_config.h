/* SPDX-License-Identifier: Apache-2.0 */
/* What the environment asks for: CUMEM_BACKEND and CUMEM_EMULATED_*. Read once per
 * opening, never at import. */
#ifndef CM_PYTHON_MODULE_STATE_CONFIG_H
#define CM_PYTHON_MODULE_STATE_CONFIG_H

#include "python/core/state.h"

typedef enum cm_choice { CM_CHOICE_ANY, CM_CHOICE_CUDA, CM_CHOICE_EMULATED } cm_choice;

/* CUMEM_BACKEND: "cuda", "emulated"; unset or empty is ANY. 0, or -1 with ValueError.
 */
int cm_config_read_backend(cm_choice *out);

/* Defaults changed by CUMEM_EMULATED_DEVICES (count), _MEMORY (bytes, or a number with
 * KiB, MiB, GiB, TiB or kB, MB, GB, TB), _DRIVER ("12.4"), _DELAY_US and _SEED. 0, or
 * -1 with a ValueError that names the variable. */
int cm_config_read_emulated(cm_emulated_config *out);

#endif
