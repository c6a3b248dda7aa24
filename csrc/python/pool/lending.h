/* SPDX-License-Identifier: Apache-2.0 */
/* Lending gives device memory to the allocator of another library, PyTorch, which calls
 * functions of ours by their addresses, from any thread, with or without the GIL, until
 * the process ends.
 *
 * A thread with the GIL may wait for a lock that the caller of these functions holds,
 * or until no thread is inside them. So of these functions only cumem_lend() may take
 * the GIL, to read the caller's Python stack while a recorder is on, and it does so
 * before it counts as inside. After shutdown(), and in a forked child, nothing is lent,
 * and blocks that come back are leaked. `stream` is a cudaStream_t.
 *
 * There are two uses (cumem/integrations/torch.py). replace_allocator() puts cumem in
 * the place of PyTorch's allocator: a tensor of 1 MB calls cumem_lend(1000000, 0,
 * stream), which allocates a block of the pool that was lent for device 0, in the order
 * of that stream. Or PyTorch keeps its own allocator and takes whole segments from
 * here, which it then cuts up: a torch.cuda.MemPool calls the function of a desk,
 * cumem_desk_00 and so on, which lends segments of one pool. lending.c says more about
 * desks. */
#pragma once

#include "python/pool/pool_object.h"

/* Apply X to each desk. The two digits are its number in the octal system. */
#define CM_EIGHT_DESKS(X, tens)                                                        \
    X(tens, 0)                                                                         \
    X(tens, 1) X(tens, 2) X(tens, 3) X(tens, 4) X(tens, 5) X(tens, 6) X(tens, 7)
#define CM_DESKS(X)                                                                    \
    CM_EIGHT_DESKS(X, 0)                                                               \
    CM_EIGHT_DESKS(X, 1)                                                               \
    CM_EIGHT_DESKS(X, 2)                                                               \
    CM_EIGHT_DESKS(X, 3)                                                               \
    CM_EIGHT_DESKS(X, 4)                                                               \
    CM_EIGHT_DESKS(X, 5)                                                               \
    CM_EIGHT_DESKS(X, 6)                                                               \
    CM_EIGHT_DESKS(X, 7)

enum {
    CM_DESK_COUNT = 64,
    CM_LENT_POOL_COUNT = CM_MAX_DEVICES + CM_DESK_COUNT,
};

/* The Python function _lend(pool), for cumem/integrations. */
PyObject *cm_lend_pool(PyObject *module, PyObject *pool);
/* The Python functions _open_desk(pool) and _close_desk(number). */
PyObject *cm_open_desk(PyObject *module, PyObject *pool);
PyObject *cm_close_desk(PyObject *module, PyObject *number);

/* Wait until no thread is inside these functions. Such a thread may be waiting for the
 * device, but never for the GIL. Returns false if a thread is still inside after
 * `most_ns`. */
bool cm_lending_wait(uint64_t most_ns);
/* End all lending: nothing is lent or taken back until something is lent anew, and
 * blocks on loan keep their pools for ever. The pools that were lent move to `out`,
 * which has room for CM_LENT_POOL_COUNT of them. They are still held, and *count is how
 * many there are. Returns false, and changes nothing, if a thread is inside. */
bool cm_lending_try_end(cm_pool **out, size_t *count);
/* Called at exit. Blocks that come back from now on are leaked, since the driver may be
 * gone. */
void cm_lending_leak(void);

#define CM_EXPORT __attribute__((visibility("default")))

/* Allocate a block of the pool that was lent for the device. Returns NULL if there is
 * no such pool or no memory. A segment is for an allocator that cuts it up itself and
 * relies on cudaFree to wait for all work of the device. Only idle memory is taken for
 * it, since no stream's order says when it is used. */
CM_EXPORT void *cumem_lend(size_t nbytes, int device, void *stream);
CM_EXPORT void *cumem_lend_segment(size_t nbytes, int device, void *stream);
/* Do the same as cumem_lend_segment() with the pool of one desk. */
#define CM_DESK(tens, ones)                                                            \
    CM_EXPORT void *cumem_desk_##tens##ones(size_t nbytes, int device, void *stream);
CM_DESKS(CM_DESK)
#undef CM_DESK
/* Take a block back. It was used on the stream for which it was allocated, and on those
 * that cumem_note_stream() has named since. */
CM_EXPORT void cumem_take_back(void *address, size_t nbytes, int device, void *stream);
CM_EXPORT void cumem_note_stream(void *address, void *stream);
