/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for streams, events, transfers and devices so that Ctrl-C is seen: by asking
 * again and again or, where the driver knows only how to wait, in a thread for it. */
#pragma once

#include "python/core/progress.h"

#define CM_SIGNAL_SLICE_NS UINT64_C(50000000) /* how soon Ctrl-C is seen */

/* Whether signal handlers may run in the calling thread: in Python's main one alone,
 * which need not be the process's. Where it is not known which that is, every thread
 * counts. No GIL needed. */
bool cm_sees_signals(void);
/* At import: is the calling thread the main one? */
void cm_signals_init(void);

typedef cm_status (*cm_wait_query)(cm_runtime *rt, uint64_t handle, bool *done);

/* Wait until `query` says that it is done or fails; `naps`: rather sleeping than
 * spinning. False with the exception of a signal handler. GIL, released meanwhile. */
bool cm_wait_polling(cm_runtime *rt, int device, cm_wait_query query, uint64_t handle,
                     bool naps, cm_status *out);

/* The same until `synchronize` says so too, to which it is left in a thread that sees
 * no signals. */
bool cm_wait_for(cm_runtime *rt, int device, cm_wait_query query,
                 cm_status (*synchronize)(cm_runtime *rt, uint64_t handle),
                 uint64_t handle, bool naps, cm_status *out);

/* Wait for a transfer by `wait`, cm_ticket_wait or cm_ticket_settle, and tell of its
 * progress (NULL: nobody). False with the exception of a signal handler, or of the
 * progress callback. GIL held, released meanwhile. */
bool cm_wait_for_ticket(cm_ticket *ticket,
                        cm_status (*wait)(cm_ticket *ticket, uint64_t timeout_ns),
                        uint64_t timeout_ns, const cm_progress *progress,
                        uint64_t nbytes, cm_status *out);

/* Wait for all work of a device. As above; what a signal ended is waited for by
 * cm_device_waits_join. */
bool cm_wait_for_device(cm_state *state, cm_runtime *rt, int device, cm_status *out);

/* Wait, GIL released, for what uses the runtime behind the back of interrupted calls.
 * -1 with the exception of a signal handler: what is left can be waited for again. */
int cm_device_waits_join(cm_state *state);

/* For waits in a pool, by a caller that has entered the state. `thread` is what
 * PyEval_SaveThread() gave: Python's signal handlers run there. After CM_ECANCELLED
 * their exception is set. */
typedef struct cm_pool_waiter {
    cm_state *state;
    PyThreadState *thread;
} cm_pool_waiter;

cm_wait_hooks cm_wait_hooks_of(cm_pool_waiter *waiter);
/* Takes the GIL back after the wait, which had this status. An exception of a signal's
 * handler that did not end the wait is raised by the next instruction of Python's: the
 * result of the call stands. */
void cm_pool_waiter_end(const cm_pool_waiter *waiter, cm_status status);
/* Does the current stream that PyTorch or CuPy have in this thread capture? Of streams
 * that cumem was told of the runtime knows. GIL. What a signal's handler raises
 * meanwhile is raised by the next instruction of Python's. */
bool cm_library_captures(void);
