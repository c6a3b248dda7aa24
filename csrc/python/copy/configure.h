/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the settings of copies. cumem/transfers/tuning.py collects the settings that
 * configure() or the environment sets, and stores them here. All others have defaults.
 * The GIL is held. */
#pragma once

#include "python/core/state.h"

/* The Python functions _set_tuning() and _read_tuning(). The table ends with an empty
 * row. */
extern PyMethodDef cm_configure_methods[];

/* Let the package read the settings, unless it has done so since the last shutdown().
 * Returns 0, or -1 with a ValueError that names a variable of the environment. */
int cm_configure_open(cm_state *state);
/* Give the settings to the engine, if there is one. Returns 0, or -1 with RuntimeError
 * in a forked child. */
int cm_configure_apply(cm_state *state);
/* Forget the settings, so that the variables are read again at the next opening. */
void cm_configure_close(cm_state *state);
