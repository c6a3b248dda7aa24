/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the part that copy_many() and copy_rows() have in common. Both move
 * many runs of bytes at once. The runs of copy_many() come as pairs, and copy_rows()
 * cuts them out of arrays by row numbers.
 *
 * The idea
 * --------
 * Thousands of runs mostly lie in very few storages. So each storage is held, kept
 * open, ordered after earlier work, and kept alive only once, however many of the runs
 * lie in it. Everything else is a cm_call (call.h).
 *
 *     cm_many_call_init(&many, state, blocking, stream, progress)
 *     ... for each end: cm_many_call_add_end()
 *     ... fill in many.request: pieces and others
 *     if (cm_many_call_take_ends(&many, "copy_many") == 0
 *         && cm_many_call_run(&many, "copy_many", &ticket) == 0) {
 *         cm_many_call_answer(), or some other use of the ticket
 *     }
 *     cm_many_call_fini(&many)
 *
 * Locks: none; the GIL is held, and released while the engine works. */
#pragma once

#include "python/copy/call.h"
#include "transfer/batch/batch.h"
#include "transfer/rows/kernel_numbers.h"

/* A storage that is at an end of at least one run. */
typedef struct cm_many_storage {
    cm_storage *storage; /* held and kept open */
    bool written;
} cm_many_storage;

/* The runs of most calls lie in no more storages than this. */
enum { CM_MANY_STORAGES = 4 };

/* One call. The struct must not be moved: `storages` and the arrays of `call` may point
 * into it. */
typedef struct cm_many_call {
    cm_call call;
    /* The caller fills in one of three things: the arrays `pieces` and `others`, which
     * the caller owns, common.rows with the two regions that go with it, or
     * common.many. The call owns common.rows and common.many from then on. */
    cm_many_request request;
    cm_state *state;   /* borrowed */
    cm_stream *stream; /* borrowed: the argument stream=; may be NULL */
    uint64_t number;   /* the number of the call, by which a storage finds its entry */
    cm_many_storage *storages; /* points to first_storages as long as that has room */
    uint32_t storage_count;
    uint32_t storage_room;
    PyObject *owners;     /* owned list of all objects that keep memory alive */
    uint64_t devices;     /* the devices of ends on a device, as a set of indices */
    uint64_t any_devices; /* the devices of ends that are not ordinary memory, as such a
                             set */
    int first_device; /* the device of the first end on a device; -1 if there is none */
    cm_many_storage first_storages[CM_MANY_STORAGES];
} cm_many_call;

/* Begin a call. The struct is all zero before. cm_many_call_fini() has to be called in
 * any case. Returns 0, or -1 with an exception. */
int cm_many_call_init(cm_many_call *self, cm_state *state, bool blocking,
                      cm_stream *stream, const cm_progress *progress);
/* Add an end, whose memory is `region`: note its device, and keep its memory alive. The
 * storage of the end is taken once for all ends that lie in it. Returns 0, or -1 with
 * an exception. */
int cm_many_call_add_end(cm_many_call *self, const cm_operand *end,
                         const cm_region *region, bool written);
/* Choose the stream, order the call after the earlier work on its ends, and keep their
 * memory alive. If the stream is of the wrong device, the message of the exception
 * begins with `function`. Returns 0, or -1 with an exception. */
int cm_many_call_take_ends(cm_many_call *self, const char *function);
/* Give the request to the engine. If the engine fails, `doing` becomes the note of the
 * exception. Returns 0 with a ticket that the caller owns, or -1 with an exception. */
int cm_many_call_run(cm_many_call *self, const char *doing, cm_ticket **out);
/* Make the answer of the call: None, or a Transfer of `dst` and `src`. Takes the ticket
 * over. Returns NULL with an exception if it fails. */
PyObject *cm_many_call_answer(cm_many_call *self, cm_ticket *ticket, PyObject *dst,
                              PyObject *src);
void cm_many_call_fini(cm_many_call *self);

/* Make a buffer of `count` elements in page-locked memory that `device` reaches too,
 * and describe it. `letter` is NumPy's character for the dtype of the elements. Returns
 * a new reference, or NULL with an exception. */
PyObject *cm_many_allocate_mapped(cm_state *state, int device, char letter,
                                  uint64_t count, cm_region *out);
/* Make one buffer of that kind for the numbers of both sides, by cm_side, and set where
 * each begins: `at` for the host and addresses[] for the device. A side whose numbers
 * have 0 bytes each takes no memory, and nothing is set for it. Returns a new
 * reference, or NULL with an exception. */
PyObject *cm_many_allocate_sheet(cm_state *state, int device,
                                 cm_kernel_numbers numbers[2], cm_address addresses[2],
                                 cm_region *out);
