/* SPDX-License-Identifier: Apache-2.0 */
/* How copies are made: what cumem/transfers/tuning.py has put together of what
 * configure() and the environment say, and defaults for the rest. GIL held. */
#pragma once

#include "python/core/state.h"

/* _set_tuning, _read_tuning; ends with an empty row. */
extern PyMethodDef cm_configure_methods[];

/* Ask the package unless that was done since the last shutdown(). 0, or -1 with a
 * ValueError that names a variable of the environment. */
int cm_configure_open(cm_state *state);
/* Have the engine, if there is one, work as all of that says. 0, or -1 with
 * RuntimeError in a forked child. */
int cm_configure_apply(cm_state *state);
/* Variables are read anew at the next opening. */
void cm_configure_close(cm_state *state);
