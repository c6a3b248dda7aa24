/* SPDX-License-Identifier: Apache-2.0 */
/* Which ordinary memory is page-locked by us, piece by piece, counted: overlapping
 * requests share pieces, and a piece is unregistered whole when its last user goes.
 * Transfers have shares too, so that no piece goes under a copy that takes it for
 * locked. Memory that somebody else locked is left alone and counts as locked. What we
 * lock is charged to a budget before it is locked, page by page and once however many
 * share it, and refunded when it is unlocked. Knows nothing of Python.
 * Locks: one mutex; registering happens outside it, guarded by a "busy" slot per piece.
 * Where nothing is registered no lock is taken to say so. */
#pragma once

#include "pool/budget.h"
#include "runtime/runtime.h"

typedef struct cm_registry cm_registry;
typedef struct cm_registration cm_registration; /* one request's share of its pieces */

/* Shares of pieces, in no order; all zero: none. */
typedef struct cm_page_shares {
    struct cm_page_piece **pieces; /* owned; NULL: `one` */
    struct cm_page_piece *one;
    uint32_t count;
    uint32_t room;
} cm_page_shares;

/* Largest piece: cudaHostRegister is called on at most this much at once. */
#define CM_REGISTER_MAX_NBYTES (UINT64_C(64) << 30)

/* `budget`: borrowed, charged with what is locked; NULL: there is no limit. */
CM_NODISCARD cm_status cm_registry_create(cm_runtime *rt, cm_budget *budget,
                                          cm_registry **out);
/* Unregisters whatever is left; a registration that still exists only frees itself
 * later.
 * Not while another thread is in a call of this header. Fails: the first host_unregister
 * that failed. */
CM_NODISCARD cm_status cm_registry_close(cm_registry *registry);

/* Page-lock every page of [host, host + nbytes), nbytes > 0, in `device`'s context;
 * always portable and mapped; with `read_only` pieces whose mapping may not be written
 * are locked for reading only. A range that is (partly) locked already shares those
 * pieces.
 * Blocks: in the runtime. Fails: host_register, pointer_attributes; CM_EFORKED; CM_ELIMIT
 * where the budget has no room, with the bytes that were to be locked next; CM_EBUSY
 * when pages that devices may write are asked for and they are locked read-only;
 * nothing of this request stays registered then. */
CM_NODISCARD cm_status cm_registry_register(cm_registry *registry, int device,
                                            void *host, uint64_t nbytes, bool read_only,
                                            cm_registration **out);
/* Fails: host_unregister (the share is gone all the same; a piece that the runtime refused
 * to unregister is tried again when it is next met and at close). */
CM_NODISCARD cm_status cm_registration_release(cm_registration *registration);

/* Is a piece of it locked for reading only? */
bool cm_registration_is_read_only(const cm_registration *registration);

/* The address devices reach the range by. Fails: host_device_address; CM_ENOTSUP, with
 * the host address, where a piece's device address does not follow the one before. */
CM_NODISCARD cm_status cm_registration_device_address(cm_registration *registration,
                                                      cm_address *out);

/* Is there anything to look for? If not, no bytes are locked by us, and none are part
 * of a registration. */
bool cm_registry_has_pieces(const cm_registry *registry);

/* How many bytes from `host` on, at most `nbytes`, one runtime copy may cover: it must
 * not cross the edge of a registration. Also says whether those bytes are locked by us:
 * not what only has a page in common with bytes that are. */
uint64_t cm_registry_run(cm_registry *registry, const void *host, uint64_t nbytes,
                         bool *locked);

/* Add to `shares` one of each piece with bytes of [host, host + nbytes) that we have
 * locked, unless it was the last added. They stay locked until cm_registry_unshare().
 * `waits`: for pieces that somebody locks or unlocks just now, which are left out
 * otherwise. Fails: CM_ENOMEM (nothing was added). */
CM_NODISCARD cm_status cm_registry_share(cm_registry *registry, const void *host,
                                         uint64_t nbytes, bool waits,
                                         cm_page_shares *shares);
/* Whether somebody locks or unlocks anything just now. */
bool cm_registry_is_busy(const cm_registry *registry);
/* What the driver says of the memory at both ends of [address, address + nbytes),
 * nbytes > 0, in the current device's context; shares of what we have locked of it are
 * added before, so that the answer holds until they are given back. Where what was
 * asked of us leaves some of it out, `last` is PAGEABLE; where it is in pieces that
 * devices do not reach by addresses in a row, `first` has no device address.
 * Blocks: while somebody locks or unlocks it. Fails: pointer_attributes, CM_ENOMEM. */
CM_NODISCARD cm_status cm_registry_probe(cm_registry *registry, cm_address address,
                                         uint64_t nbytes, cm_page_shares *shares,
                                         cm_pointer_info *first, cm_pointer_info *last);
/* Give them back; from any thread. Blocks: in the runtime, where a share is the last of
 * its piece. A piece that the runtime refused to unregister is tried again later. */
void cm_registry_unshare(cm_registry *registry, cm_page_shares *shares);
/* The same as long as nothing is unlocked by it; makes no runtime call. False: some are
 * left to be given back. */
bool cm_registry_try_unshare(cm_registry *registry, cm_page_shares *shares);
/* Let go of them without a look at the pieces: the registry is closed, or being. */
void cm_registry_abandon(cm_registry *registry, cm_page_shares *shares);

/* Pieces now registered by us, for leak checks. */
uint64_t cm_registry_count(cm_registry *registry);

/* What is locked by us, without what others had locked before. */
typedef struct cm_registry_counters {
    uint64_t nbytes; /* of whole pages */
    uint64_t peak_nbytes;
    uint64_t count;        /* pieces */
    uint64_t locked_count; /* pieces that ever were; those unlocked are the others */
} cm_registry_counters;

/* A consistent snapshot. `window`: the peak is that since the last call with it, which
 * leaves the other peak alone. */
void cm_registry_read(cm_registry *registry, bool window, cm_registry_counters *out);
