/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of page-locked memory in a sorted list, and requests that share them. A
 * request walks from its first page to its last: pieces that are there it counts up,
 * gaps it fills with pieces of its own. */
#include <stdlib.h>
#include <unistd.h>

#include "base/checked_math.h"
#include "pool/registry_private.h"
#include "pool/scope.h"

/* The pieces from `first` to `last` hang together and are kept by our share of each. */
struct cm_registration {
    cm_registry *registry; /* held */
    cm_piece *first;
    cm_piece *last;
    uintptr_t host;
    uint64_t nbytes;
    bool read_only; /* a piece is, that we locked */
};

/* What a request asks for, while it walks. */
typedef struct request {
    cm_registry *registry;
    int device;
    bool read_only;
    cm_piece *first; /* NULL: none yet */
    cm_piece *last;
    bool shares_read_only;
} request;

static cm_piece *
piece_of(cm_list *node)
{
    return CM_LIST_ENTRY(node, cm_piece, node);
}

cm_status
cm_registry_create(cm_runtime *rt, cm_registry **out)
{
    cm_registry *registry = calloc(1, sizeof(*registry));
    if (registry == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*registry));
    }
    cm_status status = cm_mutex_init(&registry->lock);
    if (!cm_is_ok(status)) {
        free(registry);
        return status;
    }
    status = cm_cond_init(&registry->settled);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&registry->lock);
        free(registry);
        return status;
    }
    atomic_init(&registry->refs, 1);
    atomic_init(&registry->closed, false);
    registry->rt = rt;
    long page_nbytes = sysconf(_SC_PAGESIZE);
    registry->page_nbytes = page_nbytes > 0 ? (uintptr_t)page_nbytes : 4096;
    cm_list_init(&registry->pieces);
    *out = registry;
    return cm_ok();
}

static void
registry_release(cm_registry *registry)
{
    if (atomic_fetch_sub_explicit(&registry->refs, 1, memory_order_acq_rel) == 1) {
        cm_cond_fini(&registry->settled);
        cm_mutex_fini(&registry->lock);
        free(registry);
    }
}

/* The first piece that ends after `address`; NULL if there is none. */
static cm_piece *
find_locked(cm_registry *registry, uintptr_t address)
{
    for (cm_list *n = registry->pieces.next; n != &registry->pieces; n = n->next) {
        if (piece_of(n)->end > address) {
            return piece_of(n);
        }
    }
    return NULL;
}

/* Unregister a piece that nobody shares and is not busy. The lock is let go meanwhile.
 */
static cm_status
remove_locked(cm_registry *registry, cm_piece *p)
{
    p->busy = true;
    cm_mutex_unlock(&registry->lock);
    cm_status status = cm_piece_unlock(registry, p);
    cm_mutex_lock(&registry->lock);
    p->busy = false;
    if (cm_is_ok(status) || status.code == CM_CUDA_NOT_REGISTERED) {
        cm_list_remove(&p->node);
        free(p);
    }
    cm_cond_signal_all(&registry->settled);
    return status;
}

/* Drop one share of each piece from `first` to `last`. */
static cm_status
unshare_locked(cm_registry *registry, cm_piece *first, cm_piece *last)
{
    cm_status result = cm_ok();
    for (cm_piece *p = first;;) {
        bool is_last = p == last;
        /* kept by our share of it, even while the lock is let go below */
        cm_piece *next = is_last ? NULL : piece_of(p->node.next);
        if (--p->share_count == 0) {
            cm_status status = remove_locked(registry, p);
            result = cm_is_ok(result) ? status : result;
        }
        if (is_last) {
            return result;
        }
        p = next;
    }
}

/* Put a new piece over [base, end), a gap before `next` (NULL: at the end of the list).
 */
static cm_status
add_piece_locked(request *r, cm_piece *next, uintptr_t base, uintptr_t end,
                 cm_piece **out)
{
    cm_registry *registry = r->registry;
    cm_piece *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*p));
    }
    p->base = base;
    p->end = end;
    p->share_count = 1;
    p->device = r->device;
    p->read_only = r->read_only;
    p->busy = true;
    cm_list_push_back(next != NULL ? &next->node : &registry->pieces, &p->node);
    cm_mutex_unlock(&registry->lock);
    cm_status status = cm_piece_lock(registry, p);
    cm_mutex_lock(&registry->lock);
    p->busy = false;
    if (cm_is_ok(status)) {
        *out = p;
    }
    else {
        cm_list_remove(&p->node);
        free(p);
    }
    cm_cond_signal_all(&registry->settled);
    return status;
}

/* Get a share of the piece that covers `cursor`, making it if need be; *out NULL means
 * that things changed meanwhile and the caller should look again. */
static cm_status
share_next_locked(request *r, uintptr_t cursor, uintptr_t end, cm_piece **out)
{
    cm_registry *registry = r->registry;
    cm_piece *p = find_locked(registry, cursor);
    *out = NULL;
    if (p == NULL || p->base > cursor) {
        uintptr_t gap_end = p != NULL && p->base < end ? p->base : end;
        if (gap_end - cursor > CM_REGISTER_MAX_NBYTES) {
            gap_end = cursor + CM_REGISTER_MAX_NBYTES;
        }
        return add_piece_locked(r, p, cursor, gap_end, out);
    }
    if (p->busy) {
        cm_cond_wait(&registry->settled, &registry->lock);
        return cm_ok();
    }
    if (p->share_count == 0) {
        cm_status status = remove_locked(registry, p);
        return status.code == CM_CUDA_NOT_REGISTERED ? cm_ok() : status;
    }
    if (p->read_only && !p->foreign && !r->read_only) {
        return cm_fail(CM_EBUSY, (uint64_t)cursor); /* devices may not write there */
    }
    p->share_count++;
    *out = p;
    return cm_ok();
}

static cm_status
share_range_locked(request *r, uintptr_t base, uintptr_t end)
{
    for (uintptr_t cursor = base; cursor < end;) {
        cm_piece *p = NULL;
        CM_TRY(share_next_locked(r, cursor, end, &p));
        if (p != NULL) {
            r->first = r->first == NULL ? p : r->first;
            r->last = p;
            r->shares_read_only = r->shares_read_only || (p->read_only && !p->foreign);
            cursor = p->end;
        }
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
    cm_registration *registration = calloc(1, sizeof(*registration));
    if (registration == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*registration));
    }
    request r = {.registry = registry, .device = device, .read_only = read_only};
    uintptr_t base = (uintptr_t)host & ~(registry->page_nbytes - 1);
    cm_mutex_lock(&registry->lock);
    cm_status status = cm_fail(CM_ECLOSED, 0);
    if (!atomic_load(&registry->closed)) {
        status = share_range_locked(&r, base, (uintptr_t)end);
    }
    if (!cm_is_ok(status) && r.first != NULL) {
        cm_status undone = unshare_locked(registry, r.first, r.last);
        (void)undone; /* the first failure wins; what stayed is tried again later */
    }
    cm_mutex_unlock(&registry->lock);
    if (!cm_is_ok(status)) {
        free(registration);
        return status;
    }
    registration->registry = registry;
    atomic_fetch_add_explicit(&registry->refs, 1, memory_order_relaxed);
    registration->first = r.first;
    registration->last = r.last;
    registration->host = (uintptr_t)host;
    registration->nbytes = nbytes;
    registration->read_only = r.shares_read_only;
    *out = registration;
    return cm_ok();
}

cm_status
cm_registration_release(cm_registration *registration)
{
    cm_registry *registry = registration->registry;
    cm_status status = cm_ok();
    if (!atomic_load(&registry->closed)) { /* else the runtime may be gone as well */
        if (cm_runtime_is_forked(registry->rt)) {
            return status; /* the parent's pages; leaked here */
        }
        cm_mutex_lock(&registry->lock);
        status = unshare_locked(registry, registration->first, registration->last);
        cm_mutex_unlock(&registry->lock);
    }
    free(registration);
    registry_release(registry);
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
    while (!cm_list_is_empty(&registry->pieces)) {
        cm_piece *p = piece_of(registry->pieces.next);
        if (p->busy) {
            cm_cond_wait(&registry->settled, &registry->lock);
            continue;
        }
        cm_list_remove(&p->node);
        cm_mutex_unlock(&registry->lock);
        cm_status status = cm_piece_unlock(registry, p);
        if (!cm_is_ok(status) && status.code != CM_CUDA_NOT_REGISTERED) {
            cm_status again = cm_piece_unlock(registry, p);
            (void)again; /* the last chance; the first answer is the one to tell */
        }
        first = cm_is_ok(first) ? status : first;
        free(p);
        cm_mutex_lock(&registry->lock);
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
    cm_scope scope;
    if (cm_runtime_is_forked(registry->rt)) {
        return cm_fail(CM_EFORKED, registration->nbytes);
    }
    /* Our share keeps the pieces, so only the step from one to the next needs the lock.
     */
    for (cm_piece *p = registration->first; from < end;) {
        cm_address address = 0;
        CM_TRY(cm_scope_enter(registry->rt, p->device, &scope));
        cm_status status =
            cm_rt_host_device_address(registry->rt, (void *)from, &address);
        cm_scope_leave(&scope);
        CM_TRY(status);
        if (from == registration->host) {
            result = address;
        }
        else if (address - result != from - registration->host) {
            return cm_fail(CM_ENOTSUP, (uint64_t)from);
        }
        from = p->end;
        if (p == registration->last) {
            break;
        }
        cm_mutex_lock(&registry->lock);
        p = piece_of(p->node.next);
        cm_mutex_unlock(&registry->lock);
    }
    *out = result;
    return cm_ok();
}

uint64_t
cm_registry_run(cm_registry *registry, const void *host, uint64_t nbytes, bool *locked)
{
    uintptr_t address = (uintptr_t)host;
    uint64_t run = nbytes;
    *locked = false;
    if (cm_runtime_is_forked(registry->rt)) {
        return run;
    }
    cm_mutex_lock(&registry->lock);
    cm_piece *p = find_locked(registry, address);
    if (p != NULL) {
        bool inside = p->base <= address;
        *locked = inside && !p->foreign && !p->busy;
        uint64_t edge = (inside ? p->end : p->base) - address;
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
    for (cm_list *n = registry->pieces.next; n != &registry->pieces; n = n->next) {
        count += piece_of(n)->foreign ? 0 : 1;
    }
    cm_mutex_unlock(&registry->lock);
    return count;
}
