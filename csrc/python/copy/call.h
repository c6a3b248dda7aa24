/* SPDX-License-Identifier: Apache-2.0 */
/* A call is the part that all functions that copy have in common, whatever their ends
 * look like.
 *
 * The idea
 * --------
 * The engine copies bytes and knows nothing of Python. A cm_call stands between Python
 * and the engine for as long as one function runs. It collects the streams and
 * unfinished transfers that the copy must come after, keeps the memory of both ends
 * alive until the engine is done, releases the GIL, looks for signals, and afterwards
 * lets the storages remember how they were used.
 *
 *     cm_call call = {.state = state, ...};
 *     ... for each end: cm_call_come_after(), cm_call_keep()
 *     if (cm_call_prepare(&call, &request) == 0) {
 *         ... the engine's call; batches and files call cm_call_let_go() before it, a
 *         ... single copy leaves that to the engine (request.let_go)
 *         cm_call_take_back(&call);
 *         ... cm_call_remember() with its ticket
 *     }
 *     cm_call_fini(&call);
 *
 * Around it is a cm_call_frame, from cm_call_enter() to cm_call_leave(), if the
 * function has the arguments stream= and progress=; `buf[index] = value` has neither.
 *
 * Example: a copy in the background from X to Y on stream A, where stream B used Y
 * before. cm_call_come_after() puts B into `after` if B's use is in the way of the
 * bytes that are written. cm_call_prepare() notes on both storages that A uses them. If
 * the transfer is not finished yet, cm_call_remember() makes it a transfer of Y, but
 * not of X, because A's use of X already says that X is being read. If the caller has
 * set `is_ordered` and `moves_bytes`, cm_call_fini() asks the storages to forget B. Y
 * does so only if A now stands for all of B's use, if nobody else has used Y meanwhile,
 * and if no graph has captured it.
 *
 * Edges
 * -----
 * The first items of each array are inside the struct, so a cm_call must not be moved
 * once one of its arrays has items. Every function here needs the GIL, except where its
 * own comment says otherwise. */
#pragma once

#include "python/core/progress.h"
#include "python/protocols/protocols.h"

/* A storage at an end of the call. */
typedef struct cm_call_use {
    cm_storage *storage; /* borrowed; the operand of the end keeps it open */
    cm_extent extent;
    uint64_t before; /* the call comes after transfers of the storage whose numbers are
                      lower than this */
    uint64_t use_calls; /* the storage's count when the use was added here; see
                           add_uses() for what it becomes */
    bool after_all;     /* the call comes after all streams of the storage, and not only
                           after those in the way */
} cm_call_use;

/* Something that stays alive until the engine is done. */
typedef struct cm_call_keep_entry {
    cm_keep keep;
    cm_deferred *deferred; /* a share of a deferred reference, of which `keep` has
                              another share; NULL for a storage */
} cm_call_keep_entry;

enum { CM_CALL_USES = 2, CM_CALL_STREAMS = 4, CM_CALL_TICKETS = 4, CM_CALL_KEEPS = 4 };

/* The caller fills in the members before `uses`; the others begin as zero. */
typedef struct cm_call {
    cm_state *state;
    cm_stream *stream; /* on loan, or lent (see `stream_is_lent`); may be NULL */
    bool blocking;
    /* The engine makes a ticket for this call. A copy with a ticket also waits for the
     * work before the transfers that it names, even if these are cancelled. So it need
     * not name a transfer that a later one covers (storage_use.c says when that is). */
    bool has_ticket;
    /* The call copies at least one byte. A copy of no bytes waits for nothing, so
     * storages must not forget the work that came before it. The caller may set this
     * after the other members. */
    bool moves_bytes;
    const cm_progress *progress; /* borrowed; NULL if there is no progress= */
    /* Set for one of several copies that begin together. It comes after transfers whose
     * numbers are lower than this, but not after the others of the group. If it is 0,
     * the call comes after all transfers. */
    uint64_t before;

    /* Each of these arrays is NULL while it has no items. After that it is the array of
     * its first items, which is a member below; once that is full, the array is
     * allocated, and the call owns it. */
    cm_call_use *uses;
    uint32_t use_count;
    uint32_t use_room;
    cm_stream **after; /* on loan */
    uint32_t after_count;
    uint32_t after_room;
    cm_ticket **after_tickets; /* held */
    uint32_t ticket_count;
    uint32_t ticket_room;
    cm_call_keep_entry *keeps;
    uint32_t keep_count;
    uint32_t keep_room;
    const cm_operand *deferred_ends[2]; /* borrowed; kept when the engine asks */
    uint32_t deferred_count;
    cm_copy_request *request; /* borrowed; the request to which these keeps are added */
    cm_ticket *ticket;     /* borrowed from the engine while it asks for interrupts */
    PyThreadState *thread; /* the state of this thread while it has released the GIL, or
                              else NULL */
    bool has_short_turns; /* the call asked for short turns of the interpreter (turns.h)
                             when it released the GIL */
    PyObject *watched;    /* owned list, for the handle, of those ends whose memory its
                             owner can move (memory_watch.h); NULL if there is none */
    /* The stream is a default one, which the module has until shutdown(). shutdown()
     * cannot begin while a call runs, so such a stream need not be counted. */
    bool stream_is_lent;
    bool is_ordered; /* set by the caller: the work is done, or queued on `stream`,
                        after all that came before */
    cm_call_use first_uses[CM_CALL_USES];
    cm_stream *first_after[CM_CALL_STREAMS];
    cm_ticket *first_tickets[CM_CALL_TICKETS];
    cm_call_keep_entry first_keeps[CM_CALL_KEEPS];
} cm_call;

/* -- ends, as they were read -------------------------------------------------------------- */

/* Check that a copy may write the target. Returns 0, or -1 with ValueError if the
 * target is read-only, or if some of its elements share memory, since several threads
 * or a kernel would write those in any order. The message begins with `before`. */
int cm_check_target(const char *before, const cm_operand *dst, PyObject *object);
/* casting.c: check that the dtypes of both ends are equal. Returns 0, or -1 with
 * TypeError. */
int cm_check_dtypes(const char *before, const cm_operand *dst, const cm_operand *src);
/* casting.c: check that `casting`, which must name a rule of NumPy's, allows elements
 * of the dtype `from` to become elements of `to`. Returns 0, or -1 with TypeError or
 * ValueError. */
int cm_check_rule(const char *before, PyObject *from, PyObject *to, PyObject *casting);
/* The arguments casting=, scale= and offset=, each of which is NULL or None if it is
 * not given. */
typedef struct cm_casting {
    PyObject *casting; /* all borrowed */
    PyObject *scale;
    PyObject *offset;
} cm_casting;
/* casting.c: find out how the elements of a copy are converted, for ends whose dtypes
 * differ or arguments that are given. The call keeps the object that converts, if there
 * is one. Returns 1 if elements are converted, 0 if not, or -1 with TypeError or
 * ValueError. */
int cm_check_casting(cm_call *call, const char *before, const cm_operand *dst,
                     const cm_operand *src, cm_casting how, cm_convert *out);
/* Stretch the source to the target's shape. Returns 0, or -1 with ValueError. */
int cm_check_shapes(const char *before, const cm_operand *dst, const cm_operand *src,
                    cm_region *stretched);
/* Return the device that the memory belongs to, as a set of indices; ordinary memory
 * belongs to none. */
static inline uint64_t
cm_devices_of(const cm_region *region)
{
    bool has_one = !cm_kind_is_pageable(region->kind) && region->device >= 0
                   && region->device < CM_MAX_DEVICES;
    return has_one ? UINT64_C(1) << region->device : 0;
}
/* Guess the device of the argument `stream`, which need not tell its device, as the
 * handle of a default stream does not. The first memory on a device decides. It is
 * looked for in `object` itself, in its items if it is a tuple or list and `depth` is
 * at least 1, and in their items if `depth` is 2. Returns -1 if there is no such
 * memory, or if `stream` is not given or is a Stream, which needs no guess. */
int cm_device_hint(const cm_state *state, PyObject *object, PyObject *stream,
                   int depth);
/* Guess the device of `stream` in the same way, for the two ends of a copy. */
int cm_device_hint_of(const cm_state *state, PyObject *dst, PyObject *src,
                      PyObject *stream, int depth);

/* -- the arguments that all calls have ---------------------------------------------------- */

typedef struct cm_call_frame {
    cm_state *state;
    cm_stream *stream; /* on loan; NULL if none was given */
    cm_progress progress;
} cm_call_frame;

/* Read the arguments stream= and progress=, for which NULL and None mean that they are
 * not given, and refuse shutdown() until cm_call_leave(), which must be called in any
 * case. `device` is the device of a stream that does not say its own. Returns 0, or -1
 * with an exception. */
int cm_call_enter(cm_call_frame *frame, cm_state *state, PyObject *stream, int device,
                  PyObject *progress, const char *title);
/* End what cm_call_enter() began. Returns `result`, whose reference it takes over, or
 * NULL with an exception, which may come from closing a progress bar. */
PyObject *cm_call_leave(cm_call_frame *frame, PyObject *result);

/* -- the call ----------------------------------------------------------------------------- */

/* True if somebody wants to know the progress of the call. */
static inline bool
cm_call_reports_progress(const cm_call *call)
{
    return call->progress != NULL && call->progress->report != NULL;
}
/* Choose the call's stream. If `given` is not NULL it is that stream, which must be of
 * one of `devices`, a set of indices. If that set is empty, a stream of any device will
 * do. Without a `given` stream, a blocking call gets the current stream of `device`, or
 * no stream if `device` is -1. Returns 0, or -1 with ValueError. */
int cm_call_choose_stream(cm_call *call, const char *function, cm_stream *given,
                          uint64_t devices, int device);
/* Let the call come after the earlier work on the storage, by streams and by unfinished
 * transfers, that conflicts with work on `extent`. Returns 0, or -1 with MemoryError.
 */
int cm_call_come_after(cm_call *call, cm_storage *storage, cm_extent extent);
/* Do the same as cm_call_come_after() for the bytes of an end, which the call reads or
 * writes. If the memory of the end is not a storage of ours, this does nothing. */
int cm_call_come_after_end(cm_call *call, const cm_operand *end, bool writes);
int cm_call_come_after_stream(cm_call *call, cm_stream *stream);
/* Let the call come after a transfer, even if that fails or is cancelled. Returns 0, or
 * -1 with MemoryError. */
int cm_call_come_after_ticket(cm_call *call, cm_ticket *ticket);
/* Let the call come after the streams of the argument after=, which is a stream, or a
 * tuple or list of streams, or NULL or None for no stream. The call copies `src` to
 * `dst`. Both are memory. If `depth` is 1, each may also be a list of memory. Returns
 * 0, or -1 with an exception. */
int cm_call_come_after_given(cm_call *call, PyObject *after, PyObject *dst,
                             PyObject *src, int depth);
/* These three keep memory alive until the engine is done. The first keeps a storage,
 * which then counts as used by a transfer, the second keeps any other object, and the
 * third keeps whichever of the two an end has. They return 0, or -1 with an
 * exception. */
int cm_call_keep_storage(cm_call *call, cm_storage *storage);
int cm_call_keep_object(cm_call *call, PyObject *object);
int cm_call_keep(cm_call *call, const cm_operand *end);
/* Note an end of a blocking call, which has at most two, so that it can be kept later.
 * It is kept only if the engine needs it after the call has returned, since the caller
 * holds it until then. */
void cm_call_keep_on_request(cm_call *call, const cm_operand *end);
/* The request's hook `take_keeps`, whose argument is the call. Returns true at once if
 * no end was left for later. */
bool cm_call_take_keeps(void *call);
/* Make the Transfer of a copy in the background (cm_transfer_object_new()). At its end
 * it checks whether the owner of an end has moved the memory meanwhile. */
PyObject *cm_call_handle(const cm_call *call, cm_ticket *ticket, PyObject *dst,
                         PyObject *src, int device);

/* Set *out to whether the stream is being captured. If it is NULL, *out is false. The
 * GIL is released only if the runtime has to be asked. */
cm_status cm_call_ask_capturing(const cm_stream *stream, bool *out);

/* Return the engine, once it has the pools of all `devices` (a set of indices). Returns
 * NULL with an exception if it fails. */
cm_engine *cm_call_engine(cm_state *state, uint64_t devices);
/* Fill in all of the request except the ends and the keeps, for example to explain
 * it. */
void cm_call_fill_request(cm_call *call, cm_copy_request *request);
/* Fill in the request with its keeps. These belong to the engine from now on, except
 * those that were left for later, so the request must now be given to the engine. The
 * storages remember the call's stream from now on. Returns 0, or -1 with
 * MemoryError. */
int cm_call_prepare(cm_call *call, cm_copy_request *request);
/* cm_call_let_go() releases the GIL, unless the call has released it already. It is the
 * request's hook `let_go`, whose argument is the call. cm_call_take_back() takes the
 * GIL again if the call has released it. */
void cm_call_let_go(void *call);
void cm_call_take_back(cm_call *call);
/* The request's hook `interrupted`, whose argument is the call. It runs signal handlers
 * and reports progress. It is called without the GIL, after cm_call_let_go(), and takes
 * the GIL only if there may be a signal to handle or progress to report. Returns true
 * if the engine is to stop, because a signal handler or the report of progress has
 * raised an exception. */
bool cm_call_is_interrupted(void *call);

/* Find out whether a copy moves bytes. A copy moves none if it has no elements or if
 * its source is its target, and then it waits for nothing. */
bool cm_call_moves_bytes(const cm_region *dst, const cm_region *src);
/* Let the storages remember an unfinished transfer, so that the next use of the ends
 * comes after it. Returns 0, or -1 with MemoryError. In that case nobody could wait for
 * the transfer later, so this function has already waited for it and released the
 * ticket. */
int cm_call_remember(cm_call *call, cm_ticket *ticket);
/* Unless `number` is 0, note on the storages that the call is one of a group that has
 * this number. After the last call of the group _end_parts() lets the storages forget
 * the streams that came before. */
void cm_call_join(const cm_call *call, uint64_t number);
/* Note on the storages that a graph may use the memory from now on. */
void cm_call_mark_captured(const cm_call *call);
/* End a blocking call: report its progress, release the ticket, and return None, or
 * NULL with an exception. */
PyObject *cm_call_report_end(const cm_call *call, cm_ticket *ticket);
/* Release everything that the call has. If the call went well (is_ordered), its
 * storages forget the streams that it came after. If storages never forgot, a buffer
 * would remember every stream that has ever used it, and each copy would wait for all
 * of them. */
void cm_call_fini(cm_call *call);

/* Page-lock the memory of those ends for which that was put off until the first copy to
 * or from a device (protocols/shared.c). Call this after both ends were read, and
 * before anything looks at their kinds. Returns 0, or -1 with an exception. */
int cm_operands_lock(cm_state *state, cm_operand *dst, cm_operand *src);
