/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory for another library's allocator, PyTorch's, which calls functions of
 * ours by address: from any thread, with or without the GIL, until the process ends.
 * They never take the GIL: the caller may hold a lock that a thread with the GIL waits
 * for. After shutdown() nothing is lent and what comes back is leaked, as in a forked
 * child. `stream` is a cudaStream_t. */
#pragma once

#include "python/pool/pool_object.h"

/* For cumem/integrations. */
PyObject *cm_lend_pool(PyObject *module, PyObject *pool);

/* Until nobody is in here, who may wait for the device, but not for the GIL. False: not
 * within `most_ns`. */
bool cm_lending_wait(uint64_t most_ns);
/* Nothing is lent or taken back until something is lent anew; blocks on loan keep their
 * pools for ever. What was lent, held, moves to `out`, which has room for that of all
 * devices, and is counted. False: somebody is in here, and nothing has changed. */
bool cm_lending_try_end(cm_pool **out, size_t *count);
/* At exit: what comes back is leaked, as the driver may be gone. */
void cm_lending_leak(void);

#define CM_EXPORT __attribute__((visibility("default")))

/* A block of the device's lent pool; NULL: there is none. A segment is for who cuts it
 * and counts on cudaFree, which waits for all that the device does; memory that idles
 * is taken for it, as no stream's order says when it is used. */
CM_EXPORT void *cumem_lend(size_t nbytes, int device, void *stream);
CM_EXPORT void *cumem_lend_segment(size_t nbytes, int device, void *stream);
/* It comes back, used on the stream it was asked for on and those noted since. */
CM_EXPORT void cumem_take_back(void *address, size_t nbytes, int device, void *stream);
CM_EXPORT void cumem_note_stream(void *address, void *stream);
