/* SPDX-License-Identifier: Apache-2.0 */
/* How much of each kind of memory may be reserved. Pinned and mapped memory count
 * together against the larger of their two limits and half of the memory the process
 * may use: over-pinning brings machines down. Device and managed memory count per
 * device. GIL held; pools charge the budgets without it. */
#pragma once

#include "python/core/state.h"

/* Of the module, for the package: METH_VARARGS, and METH_NOARGS the others. */
PyObject *cm_limit(PyObject *module, PyObject *args);
PyObject *cm_host_memory_tell(PyObject *module, PyObject *unused);
PyObject *cm_processors(PyObject *module, PyObject *unused);

/* Once, before anything else. */
void cm_limits_init(cm_state *state);
/* The control groups that the process is in now, for base/machine.h. 0, or -1 with an
 * exception. */
int cm_limits_find_groups(void);
/* Limits as at first, changed by CUMEM_LIMIT_PINNED, _MAPPED, _MANAGED and _DEVICE, for
 * a runtime that was just opened. 0, or -1 with a ValueError naming the variable. */
int cm_limits_open(cm_state *state, cm_runtime *runtime);
/* An int, or None for UINT64_MAX; new reference. */
PyObject *cm_limit_to_object(uint64_t limit_nbytes);
/* A new list of (limit, used) of each budget that a charge of `budget` counts against,
 * its own first. NULL with an exception. */
PyObject *cm_limits_list(const cm_budget *budget);
/* Where it is a share of the device's memory (budget.h), and the driver was started:
 * the bytes. 0, or -1 with CudaError. GIL, released meanwhile. */
int cm_limit_settle(cm_state *state, int device, uint64_t *limit_nbytes);
/* The other way round. 0, or -1 with an exception. */
int cm_limit_from_object(PyObject *object, uint64_t *out);
