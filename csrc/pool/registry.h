/* SPDX-License-Identifier: Apache-2.0 */
/* The registry knows which ordinary memory we have page-locked, by cudaHostRegister,
 * and for whom.
 *
 * Memory is locked in pieces. A piece is a range of whole pages that one call
 * registered, together with a count of its users. Requests that overlap share pieces,
 * and a piece is unregistered as a whole when its last share is given back. Copies hold
 * shares too, so that nobody unlocks a piece while a copy relies on it. Memory that
 * somebody else locked is left alone and counts as locked. The pages of a piece are
 * charged to a budget before they are locked, and refunded when they are unlocked. They
 * are charged once, however many requests share the piece. The registry knows nothing
 * of Python.
 *
 * Example with pages of 4 KiB: A locks [0, 12 KiB), then B locks [8 KiB, 20 KiB).
 *
 *   A       [ piece 1: 0 - 12 KiB ]
 *   A + B   [ piece 1: 0 - 12 KiB ][ piece 2: 12 - 20 KiB ]   B has a share of both
 *   B       the same: piece 1 stays locked until B goes as well
 *
 * A copy that reads [4 KiB, 16 KiB) crosses the edge of a registration, which the
 * driver does not allow in one call. cm_registry_run_nbytes() says how far one call may
 * go.
 * Locks: one mutex. It is not held while a piece is registered or unregistered; the
 * piece has the mark "busy" meanwhile. While there are no pieces, questions are
 * answered without the mutex. */
#pragma once

#include "pool/budget.h"
#include "runtime/runtime.h"

typedef struct cm_registry cm_registry;
typedef struct cm_registration cm_registration; /* what one request has locked */

/* Shares of pieces, in no particular order. A struct of zeros holds none. */
typedef struct cm_page_shares {
    struct cm_page_piece **pieces; /* owned; NULL while `one` is enough */
    struct cm_page_piece *one;     /* the only piece, while `pieces` is NULL */
    uint32_t count;
    uint32_t room;
} cm_page_shares;

/* The length of the largest piece. Longer ranges are registered by several calls. */
#define CM_REGISTER_MAX_NBYTES (UINT64_C(64) << 30)

/* Make a registry. `budget` is borrowed, and all that is locked is charged to it. With
 * NULL there is no limit. */
CM_NODISCARD cm_status cm_registry_create(cm_runtime *rt, cm_budget *budget,
                                          cm_registry **out);
/* Unregister whatever is still locked. A registration that still exists after this has
 * nothing left to unlock, and is just freed when it is released. No other thread may be
 * in a function of this header.
 * Fails: the first host_unregister that failed. */
CM_NODISCARD cm_status cm_registry_close(cm_registry *registry);

/* Page-lock every page of [host, host + nbytes), nbytes > 0, in the context of
 * `device`, always as portable and mapped. With `read_only`, pages that the process may
 * not write are locked for reading only. If a part of the range is already locked, the
 * registration shares those pieces. After a failure nothing of this request stays
 * registered.
 * Blocks: in the runtime.
 * Fails:  host_register, pointer_attributes; CM_EFORKED; CM_ELIMIT if the budget has no
 *         room, with the bytes that were to be locked next; CM_EBUSY if pages are
 *         already locked for reading only and this request is to write to them;
 *         CM_ECLOSED. */
CM_NODISCARD cm_status cm_registry_register(cm_registry *registry, int device,
                                            void *host, uint64_t nbytes, bool read_only,
                                            cm_registration **out);
/* Give the shares of a registration back, and free it.
 * Fails: host_unregister. The registration is freed all the same. If the runtime
 *        refused to unregister a piece, the next request for its pages tries again, and
 *        so does closing. */
CM_NODISCARD cm_status cm_registration_release(cm_registration *registration);

/* True if we locked any piece of the registration for reading only. */
bool cm_registration_is_read_only(const cm_registration *registration);

/* Find the address by which devices reach the range.
 * Fails: host_device_address; CM_ENOTSUP, with the host address, if the device
 *        addresses of two neighbouring pieces are not consecutive. */
CM_NODISCARD cm_status cm_registration_device_address(cm_registration *registration,
                                                      cm_address *out);

/* True if there is any piece. If there is none, no memory is locked by us or shared by
 * a registration. */
bool cm_registry_has_pieces(const cm_registry *registry);

/* Return how many bytes from `host` on, at most `nbytes`, one call of the runtime may
 * copy, since a copy must not cross the edge of a registration. *locked says whether we
 * have locked these bytes because a request asked for them. Bytes that merely lie on
 * the same page as requested bytes do not count. */
uint64_t cm_registry_run_nbytes(cm_registry *registry, const void *host,
                                uint64_t nbytes, bool *locked);

/* Add to `shares` a share of each piece that we have locked and that has bytes of
 * [host, host + nbytes). If the last share in `shares` is of such a piece, no second
 * share of the piece is added. The pieces stay locked until cm_registry_unshare(). With
 * `waits` the call waits for pieces that somebody is locking or unlocking. Without
 * `waits` such pieces are left out. Fails: CM_ENOMEM; then it has added nothing. */
CM_NODISCARD cm_status cm_registry_share(cm_registry *registry, const void *host,
                                         uint64_t nbytes, bool waits,
                                         cm_page_shares *shares);
/* True while somebody is locking or unlocking any piece. */
bool cm_registry_is_busy(const cm_registry *registry);
/* Ask the driver what memory is at both ends of [address, address + nbytes), nbytes >
 * 0, in the current device's context. First adds to `shares` what we have locked of the
 * range, so that the answer holds until these shares are given back. `last` is PAGEABLE
 * if there are bytes in the middle that no request asked for. `first` has no device
 * address if the range lies in several pieces whose device addresses are not
 * consecutive.
 * Blocks: while somebody is locking or unlocking a part of it.
 * Fails:  pointer_attributes, CM_ENOMEM. */
CM_NODISCARD cm_status cm_registry_probe(cm_registry *registry, cm_address address,
                                         uint64_t nbytes, cm_page_shares *shares,
                                         cm_pointer_info *first, cm_pointer_info *last);
/* Give shares back, from any thread. If the runtime refuses to unregister a piece, a
 * later request for its pages tries again.
 * Blocks: in the runtime, if a share is the last of its piece. */
void cm_registry_unshare(cm_registry *registry, cm_page_shares *shares);
/* Give shares back until one is the last of its piece, so that this makes no runtime
 * call. Returns false if some are left to be given back. */
bool cm_registry_try_unshare(cm_registry *registry, cm_page_shares *shares);
/* Forget shares without touching their pieces, which are gone or going because the
 * registry is closed. */
void cm_registry_abandon(cm_registry *registry, cm_page_shares *shares);

/* Return how many pieces we have registered now. Checks for leaks use this. */
uint64_t cm_registry_count(cm_registry *registry);

/* Counters of what we have locked. Memory that others had locked does not count. */
typedef struct cm_registry_counters {
    uint64_t nbytes; /* in whole pages */
    uint64_t peak_nbytes;
    uint64_t count; /* pieces */
    /* How many pieces were ever locked. Of these, `locked_count` - `count` were
     * unlocked again. */
    uint64_t locked_count;
} cm_registry_counters;

/* Read all counters at one moment. Without `window` the peak is that of the registry's
 * whole life. With `window` it is the peak since the last call with `window`. */
void cm_registry_read(cm_registry *registry, bool window, cm_registry_counters *out);
