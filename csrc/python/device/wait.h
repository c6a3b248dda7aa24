/* SPDX-License-Identifier: Apache-2.0 */
/* Waits for streams, events, transfers and devices so that Ctrl-C is seen.
 *
 * Python runs signal handlers only between instructions of its main thread. A call that
 * sits in cudaStreamSynchronize() for a minute would not notice Ctrl-C for that minute.
 * So a wait in the main thread goes in slices of 50 ms: it asks the driver again and
 * again within a slice, with the GIL released, then takes the GIL and lets handlers
 * run. A whole device cannot be asked whether it is done. For that a thread of its own
 * sits in cudaDeviceSynchronize(), and the caller waits for that thread in slices. In
 * other threads, which see no signals, a wait is simply left to the driver. */
#pragma once

#include "python/core/progress.h"

/* The longest time for which a wait may leave Ctrl-C unnoticed. */
#define CM_SIGNAL_SLICE_NS UINT64_C(50000000)

/* True if signal handlers may run in the calling thread. They run in Python's main
 * thread alone, which need not be the main thread of the process. If it is not known
 * which thread that is, every thread counts. Needs no GIL. */
bool cm_sees_signals(void);
/* Find out, at import, whether the calling thread is the main one. */
void cm_signals_init(void);

/* Asks whether something is done, as cm_rt_stream_query() does. */
typedef cm_status (*cm_wait_query)(cm_runtime *rt, uint64_t handle, bool *done);

/* Wait until `query` says that the stream or event `handle` is done, or fails, and
 * write the outcome to *out.
 * With `naps` the thread sleeps rather than spins. Returns false if a signal handler
 * has raised an exception. Needs the GIL, and releases it meanwhile. */
bool cm_wait_polling(cm_runtime *rt, int device, cm_wait_query query, uint64_t handle,
                     bool naps, cm_status *out);

/* Do the same as cm_wait_polling(), and then wait until `synchronize` returns as well.
 * In a thread that sees no signals the whole wait is left to `synchronize`. */
bool cm_wait_for(cm_runtime *rt, int device, cm_wait_query query,
                 cm_status (*synchronize)(cm_runtime *rt, uint64_t handle),
                 uint64_t handle, bool naps, cm_status *out);

/* Wait for a transfer by `wait`, which is cm_ticket_wait or cm_ticket_wait_submitted,
 * and report its progress unless `progress` is NULL. Returns false if a signal handler
 * or the progress callback has raised an exception. Needs the GIL, and releases it
 * meanwhile. */
bool cm_wait_for_ticket(cm_ticket *ticket,
                        cm_status (*wait)(cm_ticket *ticket, uint64_t timeout_ns),
                        uint64_t timeout_ns, const cm_progress *progress,
                        uint64_t nbytes, cm_status *out);

/* Wait for all work of a device, and write the outcome to *out. Returns false if a
 * signal handler has raised an exception. The wait then goes on in its thread, for
 * which cm_device_waits_join() waits. */
bool cm_wait_for_device(cm_state *state, cm_runtime *rt, int device, cm_status *out);

/* Wait for the threads of device waits whose calls a signal ended, since these threads
 * still use the runtime. Releases the GIL meanwhile. Returns 0, or -1 if a signal
 * handler has raised an exception; another call then waits for the threads that are
 * left. */
int cm_device_waits_join(cm_state *state);

/* What the hooks of a wait in a pool need. The caller has entered the state. `thread`
 * is what PyEval_SaveThread() returned: the hooks take the GIL with it, so that
 * Python's signal handlers run. If the wait ends with CM_ECANCELLED, the exception of a
 * handler is set. */
typedef struct cm_pool_waiter {
    cm_state *state;
    PyThreadState *thread;
} cm_pool_waiter;

cm_wait_hooks cm_wait_hooks_of(cm_pool_waiter *waiter);
/* Take the GIL back after a wait that returned `status`. If a signal handler raised an
 * exception without ending the wait, the call still returns its result, and Python's
 * next instruction raises the exception. */
void cm_pool_waiter_end(const cm_pool_waiter *waiter, cm_status status);
/* True if PyTorch or CuPy is capturing on its current stream in this thread. (The
 * runtime itself knows about streams that were passed to cumem.) Also true if asking
 * them raises an exception, such as that of a signal handler, which Python's next
 * instruction then raises. Needs the GIL. */
bool cm_library_captures(void);
