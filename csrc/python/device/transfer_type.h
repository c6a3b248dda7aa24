/* SPDX-License-Identifier: Apache-2.0 */
/* What the copy functions and event loops ask of transfers. GIL held throughout. */
#ifndef CM_PYTHON_DEVICE_TRANSFER_TYPE_H
#define CM_PYTHON_DEVICE_TRANSFER_TYPE_H

#include "python/device/objects.h"

/* A new Transfer. Takes over `ticket`, also on failure; holds dst and src. */
PyObject *cm_transfer_object_new(cm_state *state, cm_ticket *ticket, PyObject *dst,
                                 PyObject *src);

/* Wait for a ticket that nobody could wait for later, GIL released, and let go of it.
 */
void cm_transfer_end_ticket(cm_ticket *ticket);

/* Let `stream` wait for it. Blocks as cm_ticket_order does, GIL released; Ctrl-C ends the
 * waiting. 0, or -1 with an exception. */
int cm_transfer_order(const cm_transfer_object *transfer, cm_stream *stream);

/* Transfer.wait(). */
PyObject *cm_transfer_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
/* What was freed meanwhile by threads without the GIL goes back now. */
void cm_transfer_defer(const cm_transfer_object *self);

/* The iterator behind `await`: of a future of the running event loop, or an empty one
 * when the transfer is done. NULL with RuntimeError (no running loop) or the failure.
 */
PyObject *cm_notifier_await(cm_state *state, cm_ticket *ticket);
int cm_register_notifier_type(PyObject *module, cm_state *state);

#endif
