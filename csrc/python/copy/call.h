/* SPDX-License-Identifier: Apache-2.0 */
/* The call: what all functions that copy have in common, whatever their ends look like.
 *
 * The idea
 * --------
 * The engine copies bytes and knows nothing of Python. A cm_call stands between the two
 * for as long as one function runs. It collects what the copy must come after (streams
 * and unfinished transfers), keeps the memory of both ends alive until the engine is
 * done, releases the GIL, asks whether a signal came, and tells the storages afterwards
 * what happened to them.
 *
 *     cm_call call = {.state = state, ...};
 *     cm_call_init(&call);
 *     ... for each end: cm_call_come_after(), cm_call_keep()
 *     if (cm_call_prepare(&call, &request) == 0) {
 *         ... the engine's call; batches and files call cm_call_let_go() before it, a
 *         ... single copy leaves that to the engine (request.let_go)
 *         cm_call_take_back(&call);
 *         ... cm_call_remember() with its ticket
 *     }
 *     cm_call_fini(&call);
 *
 * Example: a copy in the background from X to Y on stream A, where stream B used Y
 * before. cm_call_come_after() puts B into `after` if B's use is in the way of the
 * bytes that are written. cm_call_prepare() notes on both storages that A uses them.
 * If the transfer is not finished yet, cm_call_remember() makes its ticket a writer of
 * Y, but not of X, because A's use of X already says that X is being read. If the
 * caller has set `is_ordered` and `moves_bytes`, cm_call_fini() asks the storages to
 * forget B. Y does so only where A now stands for all of B's use, where nobody else has
 * used Y meanwhile, and where no graph has captured it.
 *
 * Edges
 * -----
 * The arrays begin as the first items inside the struct, so a cm_call must not be moved
 * after cm_call_init(). Every function here needs the GIL, except where its own comment
 * says otherwise. */
#pragma once

#include "python/core/progress.h"
#include "python/protocols/protocols.h"

/* A storage at an end. */
typedef struct cm_call_use {
    cm_storage *storage; /* borrowed: pinned by what was read of the end */
    cm_extent extent;
    uint64_t seen;      /* it comes after writers of lower numbers */
    uint64_t use_calls; /* the storage's, when it was added */
    bool after_all;     /* it comes after all its streams, not those in the way alone */
} cm_call_use;

/* What stays alive until the engine is done. */
typedef struct cm_kept {
    cm_keep keep;
    cm_deferred *deferred; /* counted, the engine has it too; NULL: a storage */
} cm_kept;

enum { CM_CALL_USES = 2, CM_CALL_STREAMS = 4, CM_CALL_TICKETS = 4, CM_CALL_KEEPS = 4 };

/* All zero but for the first group, which the caller fills in, and what cm_call_init()
 * has set. */
typedef struct cm_call {
    cm_state *state;
    cm_stream *stream; /* on loan; NULL: none */
    bool blocking;
    bool has_ticket; /* the engine's, which hears of what a cancelled transfer has left:
                        those that others come after need not be named */
    bool moves_bytes;            /* else it waits for nothing; may be set later */
    const cm_progress *progress; /* borrowed; NULL: nobody is told */
    uint64_t before; /* of one of several that begin together: it comes after transfers
                        of lower numbers than this, not after the others; 0: all */

    cm_call_use *uses; /* arrays: owned, or the first items below */
    uint32_t use_count;
    uint32_t use_room;
    cm_stream **after; /* on loan */
    uint32_t after_count;
    uint32_t after_room;
    cm_ticket **after_tickets; /* held */
    uint32_t ticket_count;
    uint32_t ticket_room;
    cm_kept *keeps;
    uint32_t keep_count;
    uint32_t keep_room;
    const cm_operand *late[2]; /* borrowed: ends that are kept when that is asked for */
    uint32_t late_count;
    cm_copy_request *request; /* borrowed, the same: what is to have the keeps */
    cm_ticket *seen;          /* borrowed from the engine while it asks */
    PyThreadState *thread;    /* while the GIL is released */
    PyObject *watched; /* owned list of what ends are in that their owners can move, for
                          the handle (memory_watch.h); NULL: nothing such */
    bool is_ordered;   /* set by the caller: done, or queued on `stream`, after all that
                          came before */
    cm_call_use first_uses[CM_CALL_USES];
    cm_stream *first_after[CM_CALL_STREAMS];
    cm_ticket *first_tickets[CM_CALL_TICKETS];
    cm_kept first_keeps[CM_CALL_KEEPS];
} cm_call;

/* -- ends, as they were read -------------------------------------------------------------- */

/* 0; or -1 with ValueError "{before}the target (…) is read-only", or where elements of
 * it share memory, and several threads or a kernel would write there in any order. */
int cm_check_target(const char *before, const cm_operand *dst, PyObject *object);
/* casting.c: 0, or -1 with TypeError where the dtypes differ. */
int cm_check_dtypes(const char *before, const cm_operand *dst, const cm_operand *src);
/* casting.c: 0 if `casting`, which must name a rule of NumPy's, allows that elements of
 * the dtype `from` become those of `to`; or -1 with TypeError or ValueError. */
int cm_check_rule(const char *before, PyObject *from, PyObject *to, PyObject *casting);
/* casting.c: what `casting`, `scale` and `offset` (NULL, None: not given) ask for where
 * those are given or the dtypes differ. The call keeps what converts. 0, -1 with
 * TypeError or ValueError, or 1 where elements are converted. */
typedef struct cm_casting {
    PyObject *casting; /* all borrowed */
    PyObject *scale;
    PyObject *offset;
} cm_casting;
int cm_check_casting(cm_call *call, const char *before, const cm_operand *dst,
                     const cm_operand *src, cm_casting how, cm_convert *out);
/* The source as it is stretched to the target's shape. 0, or -1 with ValueError. */
int cm_check_shapes(const char *before, const cm_operand *dst, const cm_operand *src,
                    cm_region *stretched);
/* The device that has something to do with the memory, as a set of indices. */
static inline uint64_t
cm_devices_of(const cm_region *region)
{
    bool has_one = !cm_kind_is_pageable(region->kind) && region->device >= 0
                   && region->device < CM_MAX_DEVICES;
    return has_one ? UINT64_C(1) << region->device : 0;
}
/* The device of `stream`, an argument, where it does not say that itself, as the handle
 * of a default stream does not: that of the first memory on a device among `object`, or
 * the items of a tuple or list, or, at `depth` 2, theirs. -1: there is none, or
 * `stream` is not given or is a Stream, which needs no hint. */
int cm_device_hint(const cm_state *state, PyObject *object, PyObject *stream,
                   int depth);
/* The same of a copy. */
int cm_device_hint_of(const cm_state *state, PyObject *dst, PyObject *src,
                      PyObject *stream);

/* -- what a call is given beside its ends ------------------------------------------------- */

typedef struct cm_call_frame {
    cm_state *state;
    cm_stream *stream; /* on loan; NULL: none was given */
    cm_progress progress;
} cm_call_frame;

/* Read `stream` and `told`, the arguments stream= and progress= (NULL or None: not
 * given), and keep shutdown() away. `device` is that of a stream that does not say its
 * own. 0 or -1; cm_call_leave() either way. */
int cm_call_enter(cm_call_frame *frame, cm_state *state, PyObject *stream, int device,
                  PyObject *told, const char *title);
/* `result`, which it takes over, or NULL with an exception, of a bar perhaps. */
PyObject *cm_call_leave(cm_call_frame *frame, PyObject *result);

/* -- the call ----------------------------------------------------------------------------- */

/* The arrays begin as the first items, so that most calls have room for all. */
void cm_call_init(cm_call *call);
static inline bool
cm_call_tells(const cm_call *call)
{
    return call->progress != NULL && call->progress->tell != NULL;
}
/* Choose the call's stream: `given`, which must be one of `devices` (a set of indices;
 * empty: any), else for a blocking call the current one of `device` (-1: none). 0, or
 * -1 with ValueError. */
int cm_call_choose_stream(cm_call *call, const char *function, cm_stream *given,
                          uint64_t devices, int device);
/* Come after the streams that used the storage, and after its unfinished transfers that
 * are in the way of one of `extent`. 0, or -1 with MemoryError. */
int cm_call_come_after(cm_call *call, cm_storage *storage, cm_extent extent);
/* The same of an end, which reads or writes what it has of the storage; of memory that
 * is no storage of ours there is nothing to come after. */
int cm_call_come_after_end(cm_call *call, const cm_operand *end, bool writes);
int cm_call_come_after_stream(cm_call *call, cm_stream *stream);
/* Keep an end's memory: a storage as a transfer does, or else an object. 0 or -1. */
int cm_call_keep_storage(cm_call *call, cm_storage *storage);
int cm_call_keep_object(cm_call *call, PyObject *object);
int cm_call_keep(cm_call *call, const cm_operand *end);
/* The same of one of two ends that the caller of a blocking call holds until it
 * returns: only when the engine needs them for longer. */
void cm_call_keep_late(cm_call *call, const cm_operand *end);
/* The request's hook, which takes the call itself. True at once where all is kept. */
bool cm_call_take_keeps(void *call);
/* The Transfer of a copy in the background, as cm_transfer_object_new() makes it, which
 * looks at the end whether the memory of the ends was moved meanwhile. */
PyObject *cm_call_handle(const cm_call *call, cm_ticket *ticket, PyObject *dst,
                         PyObject *src, int device);

/* Does the stream capture? NULL does not. Keeps the GIL where nothing need be waited
 * for to tell. */
cm_status cm_call_ask_capturing(const cm_stream *stream, bool *out);

/* The engine with the pools of all `devices` (by index); NULL with an exception. */
cm_engine *cm_call_engine(cm_state *state, uint64_t devices);
/* Fill in all of the request but the ends and the keeps: for a look at it. */
void cm_call_fill(cm_call *call, cm_copy_request *request);
/* With the keeps, which are the engine's from now on, but for late ones: its function
 * must be called.
 * Storages remember the stream from now on. 0, or -1 with MemoryError. */
int cm_call_prepare(cm_call *call, cm_copy_request *request);
/* Release the GIL, unless that is done; take it again, if it was released. */
void cm_call_let_go(void *call);
void cm_call_take_back(cm_call *call);
/* The request's hook, which takes the call itself. */
bool cm_call_is_interrupted(void *call);

/* A copy of nothing waits for nothing, nor does one into its own place. */
bool cm_call_moves_bytes(const cm_region *dst, const cm_region *src);
/* Remember an unfinished transfer, for the next use of its ends. 0; -1 with
 * MemoryError: nobody could wait for it later, so that was done now, and the ticket is
 * let go of. */
int cm_call_remember(cm_call *call, cm_ticket *ticket);
/* The call is one of several of that number (0: of none), after all of which
 * _end_parts() lets its storages forget the streams that came before. */
void cm_call_join(const cm_call *call, uint64_t number);
/* A graph may use the memory from now on. */
void cm_call_mark_captured(const cm_call *call);
/* A blocking call is done: tell its progress, let go of the ticket. None, or NULL. */
PyObject *cm_call_tell_end(const cm_call *call, cm_ticket *ticket);
/* Lets go of everything. Where the call went well (is_ordered) its storages forget the
 * streams that came before it: else a buffer would remember each that it ever met, and
 * each copy wait for all of them. */
void cm_call_fini(cm_call *call);
