/* SPDX-License-Identifier: Apache-2.0 */
/* The registry is a list of pieces of page-locked memory, sorted by address, and
 * requests hold shares of the pieces. A request walks from its first page to its last.
 * It takes a share of each piece that is there, and fills each gap with a new piece.
 * registry.h has an example. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/checked_math.h"
#include "base/machine.h"
#include "base/thread.h"
#include "pool/registry.h"
#include "runtime/scope.h"

/* A piece. Invariants, under the lock:
 *
 *   - Pieces are sorted, do not overlap, and begin and end at pages.
 *   - share_count is the number of cm_page_shares that hold the piece.
 *   - A busy piece is being registered or unregistered by one thread, which alone may
 *     change it.
 *   - If a piece that is not busy has share_count 0, the runtime has refused to
 *     unregister it. It is still locked, and the next request for its pages tries to
 *     unregister it again. */
typedef struct cm_page_piece {
    uintptr_t base;
    uintptr_t end;
    /* The bytes that requests asked for are [asked, asked_end); the rest of the first
     * and the last page may belong to somebody else. asked_end is 0 before any
     * request. */
    uintptr_t asked;
    uintptr_t asked_end;
    uint64_t share_count;
    /* What was charged to the budget: the length of the piece, or 0 if it is
     * foreign. */
    uint64_t charged_nbytes;
    int device; /* the device whose context registered it */
    bool busy;
    bool foreign; /* locked by somebody else, and never unregistered by us */
    /* Devices may not write to this piece. While the piece is busy, this says only what
     * was asked for, and may still become false. */
    bool read_only;
} cm_page_piece;

struct cm_registry {
    /* One reference is for the opener, and one for each registration and each set of
     * shares that is not empty. */
    atomic_uint refs;
    cm_runtime *rt;    /* borrowed */
    cm_budget *budget; /* borrowed; NULL if there is no limit */
    uintptr_t page_nbytes;
    cm_mutex lock;
    cm_cond busy_changed; /* signalled when a piece becomes busy or is no longer busy */
    cm_page_piece **pieces; /* owned, as are the pieces themselves */
    uint32_t room;
    /* How many pieces were ever inserted. Raised before a new piece is registered. */
    _Atomic uint64_t arrivals;
    /* How many pieces there are. Read without the lock to find out that there are
     * none. */
    _Atomic size_t count;
    atomic_int busy_count; /* how many pieces are busy */
    atomic_bool closed;
    cm_registry_counters counters; /* guarded by `lock` */
    uint64_t window_peak_nbytes;   /* guarded by `lock` */
};

/* A request. Its pieces are sorted by address and have no gaps between them. */
struct cm_registration {
    cm_registry *registry; /* held */
    cm_page_shares shares;
    uintptr_t host;
    uint64_t nbytes;
    int device; /* the device whose context registers new pieces */
    /* Devices will only read, so pages that the process may not write can be locked
     * too. */
    bool asks_read_only;
    bool read_only; /* we locked a piece for reading only */
};

cm_status
cm_registry_create(cm_runtime *rt, cm_budget *budget, cm_registry **out)
{
    cm_registry *registry = calloc(1, sizeof(*registry));
    CM_TRY(cm_allocated(registry != NULL, sizeof(*registry)));
    cm_cond_init(&registry->busy_changed);
    atomic_init(&registry->refs, 1);
    registry->rt = rt;
    registry->budget = budget;
    registry->page_nbytes = cm_page_nbytes();
    *out = registry;
    return cm_ok();
}

static void
registry_release(cm_registry *registry)
{
    if (atomic_fetch_sub_explicit(&registry->refs, 1, memory_order_acq_rel) == 1) {
        free(registry->pieces);
        free(registry);
    }
}

/* -- locking one piece, also where somebody else was there first --------------------------- */

/* Call the driver to lock the pages of a piece, with the flags `extra` besides the
 * usual ones. */
static cm_status
register_pages(const cm_registry *registry, const cm_page_piece *p, unsigned extra)
{
    unsigned flags = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED | extra;
    return CM_IN_SCOPE(
        registry->rt, p->device,
        cm_rt_host_register(registry->rt, (void *)p->base, p->end - p->base, flags));
}

/* Register the pages of a piece. Many objects that are read-only in Python lie on pages
 * that the process may write, such as those of the heap. These are locked as ordinary
 * pages, so that a later request for writing can share them. */
static cm_status
call_register(const cm_registry *registry, cm_page_piece *p)
{
    cm_status status = register_pages(registry, p, 0);
    if (!p->read_only || status.code == CM_CUDA_ALREADY_REGISTERED) {
        return status;
    }
    if (cm_is_ok(status)) {
        p->read_only = false;
        return status;
    }
    return register_pages(registry, p, CM_REGISTER_READ_ONLY);
}

/* Undo lock_piece(). Called without the lock.
 * Fails: host_unregister. */
static cm_status
unlock_piece(const cm_registry *registry, const cm_page_piece *p)
{
    return p->foreign ? cm_ok()
                      : cm_scope_accept_gone(CM_IN_SCOPE(
                            registry->rt, p->device,
                            cm_rt_host_unregister(registry->rt, (void *)p->base)));
}

/* Find the longest run of pages from `p->base` on that are all foreign or all not
 * foreign. Sets *run_end and *foreign. A page is foreign if its first or last byte is
 * locked by somebody else. Called inside a cm_scope. */
static cm_status
find_run(const cm_registry *registry, const cm_page_piece *p, uintptr_t *run_end,
         bool *foreign)
{
    uintptr_t page = p->base;
    for (; page < p->end; page += registry->page_nbytes) {
        cm_pointer_info info;
        CM_TRY(cm_rt_pointer_attributes(registry->rt, page, &info));
        if (cm_kind_is_pageable(info.kind)) {
            CM_TRY(cm_rt_pointer_attributes(registry->rt,
                                            page + registry->page_nbytes - 1, &info));
        }
        bool other = !cm_kind_is_pageable(info.kind);
        if (page > p->base && other != *foreign) {
            break;
        }
        *foreign = other;
    }
    *run_end = page;
    return cm_ok();
}

/* True if a registration may have failed because somebody else has locked some of the
 * pages. */
static bool
may_be_foreign(cm_status status)
{
    return status.op == CM_OP_host_register
           && (status.code == CM_CUDA_ALREADY_REGISTERED
               || status.code == CM_CUDA_INVALID_VALUE);
}

/* Page-lock a busy piece. Called without the lock. If somebody else has already locked
 * a part of it, the piece is cut down to its first run of pages (find_run()), and is
 * foreign if that run is. The caller makes other pieces for the rest.
 * Fails: host_register, pointer_attributes. */
static cm_status
lock_piece(cm_registry *registry, cm_page_piece *p)
{
    for (bool foreign = false; !foreign;) {
        cm_status status = call_register(registry, p);
        if (!may_be_foreign(status)) {
            return status;
        }
        uintptr_t run_end = p->end;
        CM_TRY(CM_IN_SCOPE(registry->rt, p->device,
                           find_run(registry, p, &run_end, &foreign)));
        if (run_end == p->end && !foreign) {
            if (status.code == CM_CUDA_INVALID_VALUE) {
                return status; /* nobody has locked it, so the range itself is wrong */
            }
            /* Somebody has locked bytes in the middle of a page. Halve the range until
             * only that page is left. */
            uintptr_t page_count = (p->end - p->base) / registry->page_nbytes;
            run_end -= page_count / 2 * registry->page_nbytes;
            foreign = page_count == 1;
        }
        cm_mutex_lock(&registry->lock);
        p->end = run_end;
        p->foreign = foreign;
        cm_mutex_unlock(&registry->lock);
    }
    return cm_ok();
}

/* -- the pieces --------------------------------------------------------------------------- */

/* Return the number of pieces. A relaxed load is enough: if the caller knows that
 * memory is registered, it learnt this by some synchronization, which also made the
 * number visible to it. */
static size_t
count_pieces(const cm_registry *registry)
{
    return atomic_load_explicit(&registry->count, memory_order_relaxed);
}

bool
cm_registry_has_pieces(const cm_registry *registry)
{
    return count_pieces(registry) > 0 && !cm_runtime_is_forked(registry->rt);
}

/* Return the index of the first piece that ends after `address`, or the number of
 * pieces if none does. */
static size_t
find_index_locked(const cm_registry *registry, uintptr_t address)
{
    size_t low = 0;
    size_t high = count_pieces(registry);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (registry->pieces[middle]->end <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

/* Return piece `i` if it begins below base + nbytes, else NULL. */
static cm_page_piece *
piece_in_locked(const cm_registry *registry, size_t i, uintptr_t base, uint64_t nbytes)
{
    cm_page_piece *p = i < count_pieces(registry) ? registry->pieces[i] : NULL;
    return p != NULL && (p->base <= base || p->base - base < nbytes) ? p : NULL;
}

/* Insert a piece at its place. Returns false if there is no memory. */
static bool
insert_locked(cm_registry *registry, cm_page_piece *p)
{
    size_t count = count_pieces(registry);
    uint32_t room = cm_array_reserve(&registry->pieces, sizeof(*registry->pieces), NULL,
                                     (uint32_t)count, registry->room);
    if (room == 0) {
        return false;
    }
    registry->room = room;
    size_t index = find_index_locked(registry, p->base);
    atomic_fetch_add(&registry->arrivals, 1);
    memmove(&registry->pieces[index + 1], &registry->pieces[index],
            (count - index) * sizeof(cm_page_piece *));
    registry->pieces[index] = p;
    atomic_store_explicit(&registry->count, count + 1, memory_order_relaxed);
    return true;
}

static void
drop_locked(cm_registry *registry, cm_page_piece *p)
{
    size_t index = find_index_locked(registry, p->base);
    size_t count = count_pieces(registry) - 1;
    memmove(&registry->pieces[index], &registry->pieces[index + 1],
            (count - index) * sizeof(cm_page_piece *));
    atomic_store_explicit(&registry->count, count, memory_order_relaxed);
    free(p);
}

/* -- what is counted ---------------------------------------------------------------------- */

/* Charge the length of a piece to the budget. Returns false, with nothing charged, if
 * that would exceed a limit. */
static bool
try_charge(const cm_registry *registry, cm_page_piece *p)
{
    uint64_t nbytes = p->end - p->base;
    if (registry->budget != NULL && !cm_budget_try_charge(registry->budget, nbytes)) {
        return false;
    }
    p->charged_nbytes = nbytes;
    return true;
}

/* Refund the part of a piece's charge that is above `nbytes`. */
static void
refund_beyond(const cm_registry *registry, cm_page_piece *p, uint64_t nbytes)
{
    if (registry->budget != NULL) {
        cm_budget_refund(registry->budget, p->charged_nbytes - nbytes);
    }
    p->charged_nbytes = nbytes;
}

/* Count a piece that was locked. lock_piece() may have made it shorter, or foreign. */
static void
count_locked(cm_registry *registry, cm_page_piece *p)
{
    cm_registry_counters *c = &registry->counters;
    refund_beyond(registry, p, p->foreign ? 0 : p->end - p->base);
    if (p->foreign) {
        return;
    }
    c->nbytes += p->charged_nbytes;
    c->count++;
    c->locked_count++;
    c->peak_nbytes = c->nbytes > c->peak_nbytes ? c->nbytes : c->peak_nbytes;
    if (c->nbytes > registry->window_peak_nbytes) {
        registry->window_peak_nbytes = c->nbytes;
    }
}

static void
count_unlocked(cm_registry *registry, cm_page_piece *p)
{
    if (!p->foreign) {
        registry->counters.nbytes -= p->charged_nbytes;
        registry->counters.count--;
    }
    refund_beyond(registry, p, 0);
}

void
cm_registry_read(cm_registry *registry, bool window, cm_registry_counters *out)
{
    *out = (cm_registry_counters){0};
    if (cm_runtime_is_forked(registry->rt)) {
        return;
    }
    cm_mutex_lock(&registry->lock);
    *out = registry->counters;
    if (window) {
        out->peak_nbytes = registry->window_peak_nbytes;
        registry->window_peak_nbytes = registry->counters.nbytes;
    }
    cm_mutex_unlock(&registry->lock);
}

/* -- pieces under work ------------------------------------------------------------------- */

/* Mark a piece as busy or not busy, and wake the threads that wait for this change.
 * They continue once the caller gives the lock back. */
static void
set_busy_locked(cm_registry *registry, cm_page_piece *p, bool busy)
{
    p->busy = busy;
    atomic_fetch_add(&registry->busy_count, busy ? 1 : -1);
    cm_cond_signal_all(&registry->busy_changed);
}

/* Unregister a piece that is not busy, and remove it. With `at_last` it is removed even
 * if unregistering fails. The lock is given back meanwhile.
 * Fails: host_unregister. If the code is CM_CUDA_NOT_REGISTERED the piece was
 *        removed. */
static cm_status
remove_locked(cm_registry *registry, cm_page_piece *p, bool at_last)
{
    set_busy_locked(registry, p, true);
    cm_mutex_unlock(&registry->lock);
    cm_status status = unlock_piece(registry, p);
    bool gone = cm_is_ok(status) || status.code == CM_CUDA_NOT_REGISTERED;
    if (!gone && at_last) {
        cm_ignore(unlock_piece(registry, p)); /* the caller reports the first failure */
    }
    cm_mutex_lock(&registry->lock);
    set_busy_locked(registry, p, false);
    if (gone || at_last) {
        count_unlocked(registry, p);
        drop_locked(registry, p);
    }
    return status;
}

/* -- shares ------------------------------------------------------------------------------- */

/* Return the array of pieces in which there are shares. While there is at most one,
 * that is the member `one`. */
static cm_page_piece **
list_of(cm_page_shares *shares)
{
    return shares->pieces != NULL ? shares->pieces : &shares->one;
}

/* Make room for one more share. Returns false if there is no memory. */
static bool
reserve(cm_page_shares *shares)
{
    cm_page_piece **pieces = list_of(shares);
    uint32_t room =
        cm_array_reserve(&pieces, sizeof(cm_page_piece *), &shares->one, shares->count,
                         shares->pieces == NULL ? 1 : shares->room);
    if (room != 0 && pieces != &shares->one) {
        shares->pieces = pieces;
        shares->room = room;
    }
    return room != 0;
}

/* Add a share; reserve() has made room for it. */
static void
add_share_locked(cm_page_shares *shares, cm_page_piece *p)
{
    p->share_count++;
    list_of(shares)[shares->count++] = p;
}

cm_status
cm_registry_share(cm_registry *registry, const void *host, uint64_t nbytes, bool waits,
                  cm_page_shares *shares)
{
    uintptr_t base = (uintptr_t)host;
    uint32_t before = shares->count;
    bool good = true;
    cm_page_piece *p;
    if (!cm_registry_has_pieces(registry)) {
        return cm_ok();
    }
    cm_mutex_lock(&registry->lock);
    for (size_t i = find_index_locked(registry, base);
         good && (p = piece_in_locked(registry, i, base, nbytes)) != NULL; i++) {
        if (p->busy && waits) {
            cm_cond_wait(&registry->busy_changed, &registry->lock);
            /* The list may have changed, so start again from the first piece. */
            i = find_index_locked(registry, base) - 1;
            continue;
        }
        bool is_last = shares->count > 0 && list_of(shares)[shares->count - 1] == p;
        if (!p->busy && !p->foreign && !is_last) {
            good = reserve(shares);
            if (good) {
                add_share_locked(shares, p);
            }
        }
    }
    for (uint32_t i = before; !good && i < shares->count; i++) {
        /* Each piece had other shares before, so nothing has to be unlocked. */
        list_of(shares)[i]->share_count--;
    }
    shares->count = good ? shares->count : before;
    if (before == 0 && shares->count > 0) {
        atomic_fetch_add_explicit(&registry->refs, 1, memory_order_relaxed);
    }
    cm_mutex_unlock(&registry->lock);
    return good ? cm_ok() : cm_fail(CM_ENOMEM, nbytes);
}

bool
cm_registry_is_busy(const cm_registry *registry)
{
    return atomic_load(&registry->busy_count) > 0;
}

/* Correct what the driver says about memory whose first and last page are locked. If
 * some bytes between the two were not asked for by any request, *last becomes pageable.
 * If the device addresses may not be consecutive, that of *first becomes 0. */
static void
look_between(cm_registry *registry, cm_address address, uint64_t nbytes,
             cm_pointer_info *first, cm_pointer_info *last)
{
    if (!cm_registry_has_pieces(registry)) {
        return;
    }
    const cm_page_piece *p;
    uint64_t count = 0;
    bool any_ours = false;
    uintptr_t covered = address;
    cm_mutex_lock(&registry->lock);
    for (size_t i = find_index_locked(registry, address);
         (p = piece_in_locked(registry, i, address, nbytes)) != NULL; i++) {
        count++;
        any_ours = any_ours || !p->foreign;
        covered = p->asked <= covered && !p->busy ? p->asked_end : covered;
    }
    cm_mutex_unlock(&registry->lock);
    if (any_ours && covered < address + nbytes) {
        *last = (cm_pointer_info){CM_KIND_PAGEABLE, -1, 0, NULL};
    }
    else if (count > 1 && first->device_address != address) {
        /* The host addresses are consecutive, but the device addresses may not be. */
        first->device_address = 0;
    }
}

cm_status
cm_registry_probe(cm_registry *registry, cm_address address, uint64_t nbytes,
                  cm_page_shares *shares, cm_pointer_info *first, cm_pointer_info *last)
{
    cm_address end = address + nbytes - 1;
    uint64_t arrivals;
    do {
        arrivals = atomic_load(&registry->arrivals);
        CM_TRY(cm_registry_share(registry, (const void *)(uintptr_t)address, nbytes,
                                 true, shares));
        CM_TRY(cm_rt_pointer_attributes(registry->rt, address, first));
        *last = *first; /* the driver's answer is the same for a whole page */
        if (address / registry->page_nbytes != end / registry->page_nbytes) {
            CM_TRY(cm_rt_pointer_attributes(registry->rt, end, last));
        }
    } while ((!cm_kind_is_pageable(first->kind) || !cm_kind_is_pageable(last->kind))
             && arrivals != atomic_load(&registry->arrivals));
    if (cm_kind_is_page_locked(first->kind) && cm_kind_is_page_locked(last->kind)) {
        look_between(registry, address, nbytes, first, last);
    }
    return cm_ok();
}

void
cm_registry_abandon(cm_registry *registry, cm_page_shares *shares)
{
    free(shares->pieces);
    *shares = (cm_page_shares){.count = 0};
    registry_release(registry);
}

/* Give shares back. Without `may_unlock` this stops at a share that is the last of its
 * piece.
 * Fails: the first host_unregister that failed. */
static cm_status
return_shares(cm_registry *registry, cm_page_shares *shares, bool may_unlock)
{
    cm_status first = cm_ok();
    /* After closing, the runtime may be gone as well. */
    if (!atomic_load(&registry->closed) && cm_runtime_is_forked(registry->rt)) {
        return first; /* the parent has locked the pages, so the shares are leaked */
    }
    cm_mutex_lock(&registry->lock);
    /* remove_locked() gives the lock back meanwhile. If the registry was closed in that
     * time, the other pieces are gone. */
    while (shares->count > 0 && !atomic_load(&registry->closed)) {
        cm_page_piece *p = list_of(shares)[shares->count - 1];
        if (p->share_count == 1 && !may_unlock) {
            break;
        }
        shares->count--;
        if (--p->share_count == 0) {
            first = cm_first_failure(first, remove_locked(registry, p, false));
        }
    }
    bool is_done = shares->count == 0 || atomic_load(&registry->closed);
    cm_mutex_unlock(&registry->lock);
    if (is_done) {
        cm_registry_abandon(registry, shares);
    }
    return first;
}

void
cm_registry_unshare(cm_registry *registry, cm_page_shares *shares)
{
    /* If the runtime refuses, the next use of the pages tries again, and so does
     * closing. */
    if (shares->count > 0) {
        cm_ignore(return_shares(registry, shares, true));
    }
}

bool
cm_registry_try_unshare(cm_registry *registry, cm_page_shares *shares)
{
    if (shares->count > 0) {
        /* This unlocks nothing, so it cannot fail. */
        cm_ignore(return_shares(registry, shares, false));
    }
    return shares->count == 0;
}

/* -- requests ----------------------------------------------------------------------------- */

/* Note which bytes of a piece a request asked for. A foreign piece counts as asked for
 * as a whole, since only the driver knows which of its bytes somebody else locked. */
static void
note_asked_locked(const cm_registration *r, cm_page_piece *p)
{
    uintptr_t end = r->host + r->nbytes;
    uintptr_t asked = p->foreign || r->host < p->base ? p->base : r->host;
    uintptr_t asked_end = p->foreign || end > p->end ? p->end : end;
    if (p->asked_end == 0 || asked < p->asked) {
        p->asked = asked;
    }
    if (asked_end > p->asked_end) {
        p->asked_end = asked_end;
    }
}

/* Fill the gap [base, end) with a new piece, lock its pages, and take a share of it.
 * The lock is given back meanwhile. */
static cm_status
add_piece_locked(cm_registration *r, uintptr_t base, uintptr_t end, cm_page_piece **out)
{
    cm_registry *registry = r->registry;
    cm_page_piece *p = calloc(1, sizeof(*p));
    CM_TRY(cm_allocated(p != NULL, sizeof(*p)));
    p->base = base;
    p->end = end;
    p->device = r->device;
    p->read_only = r->asks_read_only;
    if (!try_charge(registry, p)) {
        free(p);
        return cm_fail(CM_ELIMIT, end - base);
    }
    if (!insert_locked(registry, p)) {
        refund_beyond(registry, p, 0);
        free(p);
        return cm_fail(CM_ENOMEM, sizeof(*p));
    }
    set_busy_locked(registry, p, true);
    cm_mutex_unlock(&registry->lock);
    cm_status status = lock_piece(registry, p);
    cm_mutex_lock(&registry->lock);
    set_busy_locked(registry, p, false);
    if (cm_is_ok(status)) {
        count_locked(registry, p);
        add_share_locked(&r->shares, p);
        *out = p;
    }
    else {
        refund_beyond(registry, p, 0);
        drop_locked(registry, p);
    }
    return status;
}

/* Take a share of each piece in [cursor, end), and fill the gaps with new pieces. The
 * lock is given back meanwhile. Waits for busy pieces.
 * Fails: CM_ENOMEM, CM_EBUSY; as add_piece_locked() and remove_locked(). */
static cm_status
share_range_locked(cm_registration *r, uintptr_t cursor, uintptr_t end)
{
    cm_registry *registry = r->registry;
    while (cursor < end) {
        if (!reserve(&r->shares)) {
            return cm_fail(CM_ENOMEM, r->shares.count);
        }
        size_t i = find_index_locked(registry, cursor);
        cm_page_piece *p = piece_in_locked(registry, i, cursor, end - cursor);
        if (p == NULL || p->base > cursor) {
            uintptr_t gap_end = p != NULL ? p->base : end;
            if (gap_end - cursor > CM_REGISTER_MAX_NBYTES) {
                gap_end = cursor + CM_REGISTER_MAX_NBYTES;
            }
            CM_TRY(add_piece_locked(r, cursor, gap_end, &p));
        }
        else if (p->busy) {
            cm_cond_wait(&registry->busy_changed, &registry->lock);
            continue;
        }
        else if (p->share_count == 0) {
            cm_status status = remove_locked(registry, p, false);
            CM_TRY(status.code == CM_CUDA_NOT_REGISTERED ? cm_ok() : status);
            continue;
        }
        else if (p->read_only && !p->foreign && !r->asks_read_only) {
            /* Devices may not write there. */
            return cm_fail(CM_EBUSY, (uint64_t)cursor);
        }
        else {
            add_share_locked(&r->shares, p);
        }
        note_asked_locked(r, p);
        r->read_only = r->read_only || (p->read_only && !p->foreign);
        cursor = p->end;
    }
    return cm_ok();
}

cm_status
cm_registry_register(cm_registry *registry, int device, void *host, uint64_t nbytes,
                     bool read_only, cm_registration **out)
{
    uint64_t end = 0;
    if (cm_runtime_is_forked(registry->rt)) {
        return cm_fail(CM_EFORKED, nbytes);
    }
    if (nbytes == 0 || host == NULL) {
        return cm_fail(CM_EINVALID, nbytes);
    }
    if (!cm_add_u64((uintptr_t)host, nbytes, &end)
        || !cm_round_up_u64(end, registry->page_nbytes, &end)) {
        return cm_fail(CM_EOVERFLOW, nbytes);
    }
    cm_registration *r = calloc(1, sizeof(*r));
    CM_TRY(cm_allocated(r != NULL, sizeof(*r)));
    *r = (cm_registration){.registry = registry,
                           .host = (uintptr_t)host,
                           .nbytes = nbytes,
                           .device = device,
                           .asks_read_only = read_only};
    atomic_fetch_add_explicit(&registry->refs, 1, memory_order_relaxed);
    uintptr_t base = (uintptr_t)host & ~(registry->page_nbytes - 1);
    cm_mutex_lock(&registry->lock);
    cm_status status = cm_fail(CM_ECLOSED, 0);
    if (!atomic_load(&registry->closed)) {
        status = share_range_locked(r, base, (uintptr_t)end);
    }
    cm_mutex_unlock(&registry->lock);
    if (!cm_is_ok(status)) {
        /* The caller reports the first failure. Pieces that stay locked are tried again
         * later. */
        cm_ignore(cm_registration_release(r));
        return status;
    }
    *out = r;
    return cm_ok();
}

cm_status
cm_registration_release(cm_registration *registration)
{
    cm_status status =
        return_shares(registration->registry, &registration->shares, true);
    free(registration);
    return status;
}

cm_status
cm_registry_close(cm_registry *registry)
{
    cm_status first = cm_ok();
    if (cm_runtime_is_forked(registry->rt)) {
        return first;
    }
    cm_mutex_lock(&registry->lock);
    atomic_store(&registry->closed, true);
    while (count_pieces(registry) > 0) {
        cm_page_piece *p = registry->pieces[0];
        if (p->busy) {
            cm_cond_wait(&registry->busy_changed, &registry->lock);
            continue;
        }
        first = cm_first_failure(first, remove_locked(registry, p, true));
    }
    cm_mutex_unlock(&registry->lock);
    registry_release(registry);
    return first;
}

bool
cm_registration_is_read_only(const cm_registration *registration)
{
    return registration->read_only;
}

cm_status
cm_registration_device_address(cm_registration *registration, cm_address *out)
{
    cm_registry *registry = registration->registry;
    cm_address result = 0;
    uintptr_t from = registration->host;
    uintptr_t end = registration->host + registration->nbytes;
    if (cm_runtime_is_forked(registry->rt)) {
        return cm_fail(CM_EFORKED, registration->nbytes);
    }
    /* Our shares keep the pieces, so no lock is needed. */
    cm_page_piece **pieces = list_of(&registration->shares);
    for (uint32_t i = 0; i < registration->shares.count && from < end; i++) {
        cm_address address = 0;
        CM_TRY(CM_IN_SCOPE(
            registry->rt, pieces[i]->device,
            cm_rt_host_device_address(registry->rt, (void *)from, &address)));
        if (from == registration->host) {
            result = address;
        }
        else if (address - result != from - registration->host) {
            return cm_fail(CM_ENOTSUP, (uint64_t)from);
        }
        from = pieces[i]->end;
    }
    *out = result;
    return cm_ok();
}

uint64_t
cm_registry_run_nbytes(cm_registry *registry, const void *host, uint64_t nbytes,
                       bool *locked)
{
    uintptr_t address = (uintptr_t)host;
    uint64_t run = nbytes;
    *locked = false;
    if (!cm_registry_has_pieces(registry)) {
        return run;
    }
    cm_mutex_lock(&registry->lock);
    size_t i = find_index_locked(registry, address);
    const cm_page_piece *p = piece_in_locked(registry, i, address, nbytes);
    if (p != NULL) {
        bool is_asked = p->asked <= address && address < p->asked_end;
        *locked = is_asked && !p->foreign && !p->busy;
        uint64_t edge = p->end;
        if (address < p->base) {
            edge = p->base;
        }
        else if (address < p->asked) {
            edge = p->asked;
        }
        else if (is_asked) {
            edge = p->asked_end;
        }
        edge -= address;
        run = edge < nbytes ? edge : nbytes;
    }
    cm_mutex_unlock(&registry->lock);
    return run;
}

uint64_t
cm_registry_count(cm_registry *registry)
{
    uint64_t count = 0;
    if (cm_runtime_is_forked(registry->rt)) {
        return 0;
    }
    cm_mutex_lock(&registry->lock);
    for (size_t i = 0; i < count_pieces(registry); i++) {
        count += registry->pieces[i]->foreign ? 0 : 1;
    }
    cm_mutex_unlock(&registry->lock);
    return count;
}
