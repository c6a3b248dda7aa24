/* SPDX-License-Identifier: Apache-2.0 */
/* The registry: which ordinary memory we have page-locked, by cudaHostRegister, and for
 * whom.
 *
 * Memory is locked in pieces, which are counted. Requests that overlap share pieces,
 * and a piece is unregistered as a whole when its last user goes. Copies hold shares
 * too, so that no piece is unlocked under a copy that takes it for locked. Memory that
 * somebody else locked is left alone and counts as locked. What we lock is charged to a
 * budget before it is locked, by pages, and once however many share it; the charge is
 * refunded when it is unlocked. The registry knows nothing of Python.
 *
 * Example with pages of 4 KiB: A locks [0, 12 KiB), then B locks [8 KiB, 20 KiB).
 *
 *   A       [ piece 1: 0 - 12 KiB ]
 *   A + B   [ piece 1: 0 - 12 KiB ][ piece 2: 12 - 20 KiB ]   B has a share of both
 *   B       the same: piece 1 stays locked until B goes as well
 *
 * A copy that reads [4 KiB, 16 KiB) crosses the edge of a registration, which the
 * driver does not allow in one call. cm_registry_run() says how far one call may go.
 * Locks: one mutex. Registering happens outside it, guarded by a "busy" mark on the
 * piece. Where nothing is registered, no lock is taken to say so. */
#pragma once

#include "pool/budget.h"
#include "runtime/runtime.h"

typedef struct cm_registry cm_registry;
typedef struct cm_registration cm_registration; /* one request's shares of its pieces */

/* Shares of pieces, in no particular order; all zero: none. */
typedef struct cm_page_shares {
    struct cm_page_piece **pieces; /* owned; NULL: the only one is in `one` */
    struct cm_page_piece *one;
    uint32_t count;
    uint32_t room;
} cm_page_shares;

/* The largest piece: cudaHostRegister is not called for more than this at once. */
#define CM_REGISTER_MAX_NBYTES (UINT64_C(64) << 30)

/* Make a registry. `budget` is borrowed and is charged with what is locked; NULL: there
 * is no limit. */
CM_NODISCARD cm_status cm_registry_create(cm_runtime *rt, cm_budget *budget,
                                          cm_registry **out);
/* Unregister whatever is left. A registration that still exists then only frees itself
 * later. No other thread may be in a call of this header.
 * Fails: the first host_unregister that failed. */
CM_NODISCARD cm_status cm_registry_close(cm_registry *registry);

/* Page-lock every page of [host, host + nbytes), nbytes > 0, in the context of
 * `device`, always as portable and mapped. With `read_only`, pieces whose mapping may
 * not be written are locked for reading only. Where the range is locked already, or a
 * part of it, it shares those pieces. After a failure nothing of this request stays
 * registered.
 * Blocks: in the runtime.
 * Fails:  host_register, pointer_attributes; CM_EFORKED; CM_ELIMIT where the budget has
 *         no room, with the bytes that were to be locked next; CM_EBUSY where the
 *         request wants pages that devices may write and they are locked for reading
 *         only; CM_ECLOSED. */
CM_NODISCARD cm_status cm_registry_register(cm_registry *registry, int device,
                                            void *host, uint64_t nbytes, bool read_only,
                                            cm_registration **out);
/* Give the shares of a registration back, and free it.
 * Fails: host_unregister. The share is gone all the same; a piece that the runtime
 * refused to unregister is tried again when it is next met, and at close. */
CM_NODISCARD cm_status cm_registration_release(cm_registration *registration);

/* True if a piece of it is locked for reading only. */
bool cm_registration_is_read_only(const cm_registration *registration);

/* The address by which devices reach the range.
 * Fails: host_device_address; CM_ENOTSUP, with the host address, where the device
 * address of a piece does not follow that of the piece before. */
CM_NODISCARD cm_status cm_registration_device_address(cm_registration *registration,
                                                      cm_address *out);

/* True if there is any piece. If not, we have locked no bytes and none are part of a
 * registration. */
bool cm_registry_has_pieces(const cm_registry *registry);

/* How many bytes from `host` on, at most `nbytes`, one call of the runtime may copy: a
 * copy must not cross the edge of a registration. *locked says whether we have locked
 * those bytes on request; bytes that merely share a page with such bytes do not
 * count. */
uint64_t cm_registry_run(cm_registry *registry, const void *host, uint64_t nbytes,
                         bool *locked);

/* Add a share of each piece that we have locked and that has bytes of [host, host +
 * nbytes); a piece whose share was the last added is not added again. The pieces stay
 * locked until cm_registry_unshare(). `waits`: wait for pieces that somebody is locking
 * or unlocking, which are otherwise left out.
 * Fails: CM_ENOMEM, and then nothing was added. */
CM_NODISCARD cm_status cm_registry_share(cm_registry *registry, const void *host,
                                         uint64_t nbytes, bool waits,
                                         cm_page_shares *shares);
/* True while somebody is locking or unlocking anything. */
bool cm_registry_is_busy(const cm_registry *registry);
/* Ask the driver what is at both ends of [address, address + nbytes), nbytes > 0, in
 * the current device's context. Shares of what we have locked of it are added first, so
 * that the answer holds until they are given back. `last` is PAGEABLE where requests
 * left out some of the range; `first` has no device address where the range is in
 * pieces that devices do not reach by consecutive addresses.
 * Blocks: while somebody is locking or unlocking a part of it.
 * Fails:  pointer_attributes, CM_ENOMEM. */
CM_NODISCARD cm_status cm_registry_probe(cm_registry *registry, cm_address address,
                                         uint64_t nbytes, cm_page_shares *shares,
                                         cm_pointer_info *first, cm_pointer_info *last);
/* Give shares back, from any thread. A piece that the runtime refuses to unregister is
 * tried again later.
 * Blocks: in the runtime, where a share is the last of its piece. */
void cm_registry_unshare(cm_registry *registry, cm_page_shares *shares);
/* Give shares back as long as none is the last of its piece, so that no runtime call is
 * made. False: some are left to be given back. */
bool cm_registry_try_unshare(cm_registry *registry, cm_page_shares *shares);
/* Forget shares without a look at their pieces: the registry is closed, or being
 * closed. */
void cm_registry_abandon(cm_registry *registry, cm_page_shares *shares);

/* How many pieces are registered by us now; for leak checks. */
uint64_t cm_registry_count(cm_registry *registry);

/* What is locked by us, without what others had locked before. */
typedef struct cm_registry_counters {
    uint64_t nbytes; /* in whole pages */
    uint64_t peak_nbytes;
    uint64_t count; /* pieces */
    /* Pieces that ever were; those unlocked are the difference to `count`. */
    uint64_t locked_count;
} cm_registry_counters;

/* Read a consistent snapshot. With `window` the peak is that since the last call with
 * `window`, and the ordinary peak is not disturbed. */
void cm_registry_read(cm_registry *registry, bool window, cm_registry_counters *out);
