/* SPDX-License-Identifier: Apache-2.0 */
/* Awaiting transfers. */
#ifndef CM_PYTHON_DEVICE_NOTIFIER_H
#define CM_PYTHON_DEVICE_NOTIFIER_H
#include "python/device/objects.h"
/* The iterator behind `await`: of a future of the running event loop, or an empty one
 * when the transfer is done. NULL with RuntimeError (no running loop) or the failure.
 */
PyObject *cm_notifier_await(cm_state *state, cm_ticket *ticket);
int cm_register_notifier_type(PyObject *module, cm_state *state);
#endif
