/* SPDX-License-Identifier: Apache-2.0 */
/* How copies are made, as the user may set it: what configure() said comes before the
 * environment, that before what was measured, that before defaults. GIL held. */
#ifndef CM_PYTHON_CONFIGURE_H
#define CM_PYTHON_CONFIGURE_H

#include "python/state.h"

/* _set_tuning, _read_tuning, _set_measured, _read_measured; ends with an empty row. */
extern PyMethodDef cm_configure_methods[];

/* Read CUMEM_TRANSFER_… unless that was done since the last shutdown(). 0, or -1 with a
 * ValueError that names the variable. */
int cm_configure_open(cm_state *state);
/* Have the engine, if there is one, work as all of that says. 0, or -1 with
 * RuntimeError in a forked child. */
int cm_configure_apply(cm_state *state);
/* The figures that count; true where they were measured, not defaults. */
bool cm_configure_measured(const cm_state *state, cm_measured *out);
/* calibrate.c: take figures of this machine that are kept somewhere, once; measure, if
 * need be, before a long copy while nothing else is under way. On a real device only.
 * 0, or -1 with KeyboardInterrupt and the like: nothing else ends a copy. */
int cm_calibrate_look(cm_state *state);
int cm_calibrate_for(cm_state *state, const cm_copy_request *request);
extern PyMethodDef cm_calibrate_methods[];
/* A new dict of all figures. NULL with MemoryError. */
PyObject *cm_measured_to_object(const cm_measured *measured);
/* Variables are read anew, and measured figures are forgotten. */
void cm_configure_close(cm_state *state);

#endif
