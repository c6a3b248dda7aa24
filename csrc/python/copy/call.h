/* SPDX-License-Identifier: Apache-2.0 */
/* A call is the part that all functions that copy have in common, whatever kind of
 * memory they copy from and to (their ends).
 *
 * The idea
 * --------
 * The engine copies bytes and knows nothing of Python. A cm_call stands between Python
 * and the engine for as long as one function runs. It collects the streams and
 * unfinished transfers that the copy must come after, keeps the memory of both ends
 * alive until the engine is done, releases the GIL, and looks for signals. A storage is
 * the memory that buffers share (buffer/storage.h). At the end the call lets the
 * storages remember how they were used.
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
 * If the function has the arguments stream= and progress=, it also has a cm_call_frame,
 * which reads them. The frame begins with cm_call_enter() before the call, and ends
 * with cm_call_leave() after it. `buf[index] = value` has no such arguments and no
 * frame.
 *
 * Example: a copy in the background from X to Y on stream A, where stream B used Y
 * before. cm_call_come_after() puts B into `after` if B's use is in the way of the
 * bytes that are written. cm_call_prepare() notes on both storages that A uses them. If
 * the transfer is not finished yet, cm_call_remember() makes it a transfer of Y, but
 * not of X, because A's use of X already says that X is being read. If the caller has
 * set `is_ordered` and `moves_bytes`, cm_call_fini() asks the storages to forget B. Y
 * forgets B only under three conditions: whoever waits for A's work thereby waits for
 * all of B's work on Y, nobody else has used Y meanwhile, and no graph has captured Y.
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
    uint64_t use_calls; /* the storage's own `use_calls` when this entry was made; later
                           add_uses() (call.c) makes another count of it */
    bool after_all;     /* the call comes after all streams of the storage, and not only
                           after streams whose work conflicts with it */
} cm_call_use;

/* Something that stays alive until the engine is done. */
typedef struct cm_call_keep_entry {
    cm_keep keep;
    cm_deferred *deferred; /* a share of a reference that a thread without the GIL may
                              drop (core/state.h); `keep` has another share of it; NULL
                              if `keep` is a storage */
} cm_call_keep_entry;

enum { CM_CALL_USES = 2, CM_CALL_STREAMS = 4, CM_CALL_TICKETS = 4, CM_CALL_KEEPS = 4 };

/* The caller fills in the members before `uses`; the others begin as zero. */
typedef struct cm_call {
    cm_state *state;
    /* On loan, which means that the call counts as a user and gives the stream back, or
     * merely borrowed (see `stream_is_lent`). May be NULL. */
    cm_stream *stream;
    bool blocking;
    /* The engine makes a ticket for this call. If a copy has a ticket and names a
     * transfer in `after_tickets`, it also waits for the work that came before this
     * transfer, even if the transfer is cancelled. So the copy need not name a transfer
     * that a later one covers (storage_use.c says when a transfer is covered). */
    bool has_ticket;
    /* The call copies at least one byte. A copy of no bytes waits for nothing, so
     * storages must not forget the work that came before it. The caller may set this
     * after the other members. */
    bool moves_bytes;
    const cm_progress *progress; /* borrowed; NULL if there is no progress= */
    /* Set if the call is one of several copies that begin together. The call then comes
     * after transfers whose numbers are lower than `before`, but not after the others
     * of the group. If `before` is 0, the call comes after all transfers. */
    uint64_t before;

    /* Each of these arrays is NULL while it has no items. Its first items are stored in
     * a member at the end of this struct, such as `first_uses`. Once this member is
     * full, the items move to an allocated array, which the call owns. */
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
    const cm_operand *deferred_ends[2]; /* borrowed; the ends that the call keeps only
                                           when the engine asks for that */
    uint32_t deferred_count;
    cm_copy_request *request; /* borrowed; the request to which these keeps are added */
    cm_ticket *ticket;     /* borrowed from the engine while the engine asks whether the
                              call is interrupted */
    PyThreadState *thread; /* the state of this thread while it has released the GIL, or
                              else NULL */
    bool has_short_turns; /* the call asked for short turns of the interpreter (turns.h)
                             when it released the GIL */
    PyObject *watched;    /* owned list, which the handle needs: the ends whose memory
                             can be moved by its owner (memory_watch.h); NULL if there
                             is none */
    /* `stream` is a default one and is only borrowed. The module holds the default
     * streams until shutdown(), and shutdown() cannot begin while a call runs. */
    bool stream_is_lent;
    bool is_ordered; /* set by the caller: the work is done, or is queued on `stream`
                        after everything that the call must come after */
    cm_call_use first_uses[CM_CALL_USES];
    cm_stream *first_after[CM_CALL_STREAMS];
    cm_ticket *first_tickets[CM_CALL_TICKETS];
    cm_call_keep_entry first_keeps[CM_CALL_KEEPS];
} cm_call;

/* -- ends, as they were read -------------------------------------------------------------- */

/* Check that a copy may write the target. Returns 0, or -1 with ValueError if the
 * target is read-only, or if some of its elements share memory, since several threads
 * or a kernel would write these elements in any order. The message begins with
 * `before`. */
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
/* casting.c: find out whether and how the elements of a copy are converted. If casting=
 * is not given, the dtypes of the ends must be equal, and nothing is converted. The
 * call keeps the object that converts, if there is one. Returns 1 if elements are
 * converted, 0 if not, or -1 with TypeError or ValueError. */
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
/* Guess the device of the argument `stream`. A stream of another library may not tell
 * its device: the handle of a default stream, for example, is the same number on all
 * devices. The first memory on a device that is found decides. If `depth` is 0, only
 * `object` itself is looked at. If it is 1, `object` may be a tuple or list, whose
 * items are looked at, and if it is 2, these items may be tuples or lists, too. Returns
 * -1 if no such memory is found, or if no guess is needed because `stream` is not given
 * or is a Stream. */
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

/* Read the arguments stream= and progress=. NULL and None mean that an argument is not
 * given. If the stream does not tell its device, it is taken to be on `device`. From
 * now on shutdown() is refused until cm_call_leave(), which must be called even if this
 * function fails. Returns 0, or -1 with an exception. */
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
/* Choose the call's stream. If `given` is not NULL, the call gets the stream `given`,
 * whose device must be one of `devices`, a set of indices. If `devices` is empty, a
 * stream of any device will do. If `given` is NULL, a blocking call gets the current
 * stream of `device`, or no stream if `device` is -1, and any other call gets no
 * stream. Returns 0, or -1 with ValueError. */
int cm_call_choose_stream(cm_call *call, const char *function, cm_stream *given,
                          uint64_t devices, int device);
/* Let the call come after earlier work that streams and unfinished transfers do on the
 * storage, as far as this work conflicts with work on `extent`. Returns 0, or -1 with
 * MemoryError. */
int cm_call_come_after(cm_call *call, cm_storage *storage, cm_extent extent);
/* Do the same as cm_call_come_after() for the bytes of an end, which the call reads or
 * writes. If the memory of the end is not a storage of ours, this does nothing. */
int cm_call_come_after_end(cm_call *call, const cm_operand *end, bool writes);
int cm_call_come_after_stream(cm_call *call, cm_stream *stream);
/* Let the call come after a transfer, even if the transfer fails or is cancelled.
 * Returns 0, or -1 with MemoryError. */
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
/* Note an end of a blocking call, so that cm_call_take_keeps() can keep the end later.
 * The caller holds the end until the call returns, so the end is kept only if the
 * engine needs it after that. A blocking call has at most two ends. */
void cm_call_keep_on_request(cm_call *call, const cm_operand *end);
/* The request's hook `take_keeps`, whose argument is the call. It keeps the ends that
 * cm_call_keep_on_request() has noted, and adds the keeps to the request. Returns true
 * at once if no end was noted, and false if there is no memory. */
bool cm_call_take_keeps(void *call);
/* Make the Transfer of a copy in the background (cm_transfer_object_new()). When the
 * copy has ended, the Transfer checks whether the owner of an end has moved the memory
 * meanwhile. */
PyObject *cm_call_handle(const cm_call *call, cm_ticket *ticket, PyObject *dst,
                         PyObject *src, int device);

/* Set *out to whether the stream is being captured. If `stream` is NULL, *out is false.
 * The GIL is released only if the runtime has to be asked. */
cm_status cm_call_ask_capturing(const cm_stream *stream, bool *out);

/* Return the engine, once it has the pools of all `devices` (a set of indices). Returns
 * NULL with an exception if it fails. */
cm_engine *cm_call_engine(cm_state *state, uint64_t devices);
/* Fill in all of the request except the ends and the keeps, for example to explain
 * it. */
void cm_call_fill_request(cm_call *call, cm_copy_request *request);
/* Fill in the request, and hand over to it the references that the call has taken (the
 * keeps). If cm_call_keep_on_request() has noted ends, the keeps are handed over only
 * by cm_call_take_keeps(). The engine drops the keeps of a request when the transfer is
 * done, so the request must be given to the engine after this. The storages remember
 * the call's stream from now on. Returns 0, or -1 with MemoryError. */
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

/* Page-lock the memory of an end if this was put off until the first copy to or from a
 * device (protocols/shared.c). Call this after both ends were read, and before anything
 * looks at their kinds. Returns 0, or -1 with an exception. */
int cm_operands_lock(cm_state *state, cm_operand *dst, cm_operand *src);
