/* SPDX-License-Identifier: Apache-2.0 */
/* Limits how much of each kind of memory may be reserved. Besides their own limits,
 * pinned and mapped memory have a joint limit for the sum of both. It is the largest of
 * three numbers, which are the limit of pinned memory, the limit of mapped memory and
 * the default limit. The default is half of the memory that the process may use. If
 * several ranks of a host use that memory, the default is half of this rank's share
 * (cumem/base/ranks.py). Pinning too much brings machines down. Device and managed
 * memory count for each device. The GIL is held here; pools charge the budgets without
 * it. */
#pragma once

#include "python/core/state.h"

/* Functions of the module for the package. The first is METH_VARARGS, the others are
 * METH_NOARGS. */
PyObject *cm_limit(PyObject *module, PyObject *args);
PyObject *cm_host_memory_info(PyObject *module, PyObject *unused);
PyObject *cm_processors(PyObject *module, PyObject *unused);

/* Set all budgets up, once, before anything else. */
void cm_limits_init(cm_state *state);
/* Find the control groups that the process is in now, for base/machine.h. Returns 0, or
 * -1 with an exception. */
int cm_limits_find_groups(void);
/* Set the limits for a runtime that was just opened: the defaults, changed by
 * CUMEM_LIMIT_PINNED, _MAPPED, _MANAGED and _DEVICE. Returns 0, or -1 with a ValueError
 * that names the variable. */
int cm_limits_open(cm_state *state, cm_runtime *runtime);
/* Make an int of a limit, or None of UINT64_MAX. Returns a new reference, or NULL with
 * an exception. */
PyObject *cm_limit_to_object(uint64_t limit_nbytes);
/* Make a list of (limit, used) for `budget` and then for its parent, the parent's
 * parent and so on, since memory that is charged to `budget` counts against all of
 * them. Returns a new reference, or NULL with an exception. */
PyObject *cm_limits_list(const cm_budget *budget);
/* Replace a limit that is a share of the device's memory (budget.h) by bytes, if the
 * driver has been started. Returns 0, or -1 with CudaError. Releases the GIL. */
int cm_limit_resolve(cm_state *state, int device, uint64_t *limit_nbytes);
/* Read a limit from an int or None. Returns 0, or -1 with an exception. */
int cm_limit_from_object(PyObject *object, uint64_t *out);
