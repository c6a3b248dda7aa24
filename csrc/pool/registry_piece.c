/* SPDX-License-Identifier: Apache-2.0 */
/* Page-locking one piece, also where somebody else was there first. */
#include "pool/registry_private.h"
#include "pool/scope.h"

static cm_status
register_pages(const cm_registry *registry, const cm_page_piece *p, unsigned extra)
{
    unsigned flags = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED | extra;
    cm_scope scope;
    CM_TRY(cm_scope_enter(registry->rt, p->device, &scope));
    cm_status status =
        cm_rt_host_register(registry->rt, (void *)p->base, p->end - p->base, flags);
    cm_scope_leave(&scope);
    return status;
}

/* Many pages of read-only objects may be written all the same, as those of the heap.
 * They are locked as ordinary ones, so that a later request for writing can share them.
 */
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

cm_status
cm_piece_unlock(const cm_registry *registry, const cm_page_piece *p)
{
    cm_scope scope;
    if (p->foreign) {
        return cm_ok();
    }
    CM_TRY(cm_scope_settle(cm_scope_enter(registry->rt, p->device, &scope)));
    cm_status status =
        cm_scope_settle(cm_rt_host_unregister(registry->rt, (void *)p->base));
    cm_scope_leave(&scope);
    return status;
}

/* Is a byte at either end of the page at `page` locked by somebody else? */
static cm_status
is_page_foreign(const cm_registry *registry, uintptr_t page, bool *out)
{
    cm_pointer_info info;
    uintptr_t ends[2] = {page, page + registry->page_nbytes - 1};
    *out = false;
    for (int i = 0; i < 2 && !*out; i++) {
        CM_TRY(cm_rt_pointer_attributes(registry->rt, (cm_address)ends[i], &info));
        *out = info.kind != CM_KIND_PAGEABLE;
    }
    return cm_ok();
}

/* Find how far the pages from `p->base` on are alike, foreign or not. */
static cm_status
find_run(const cm_registry *registry, const cm_page_piece *p, uintptr_t *run_end,
         bool *foreign)
{
    cm_scope scope;
    CM_TRY(cm_scope_enter(registry->rt, p->device, &scope));
    cm_status status = is_page_foreign(registry, p->base, foreign);
    uintptr_t page = p->base + registry->page_nbytes;
    for (; cm_is_ok(status) && page < p->end; page += registry->page_nbytes) {
        bool other = false;
        status = is_page_foreign(registry, page, &other);
        if (cm_is_ok(status) && other != *foreign) {
            break;
        }
    }
    cm_scope_leave(&scope);
    *run_end = page;
    return status;
}

static bool
may_be_foreign(cm_status status)
{
    return status.op == CM_OP_host_register
           && (status.code == CM_CUDA_ALREADY_REGISTERED
               || status.code == CM_CUDA_INVALID_VALUE);
}

/* Shorten a busy piece, so that others may fill what follows. */
static void
shorten(cm_registry *registry, cm_page_piece *p, uintptr_t end)
{
    cm_mutex_lock(&registry->lock);
    p->end = end;
    cm_mutex_unlock(&registry->lock);
}

cm_status
cm_piece_lock(cm_registry *registry, cm_page_piece *p)
{
    cm_status status = call_register(registry, p);
    if (!may_be_foreign(status)) {
        return status;
    }
    bool foreign = false;
    uintptr_t run_end = p->end;
    CM_TRY(find_run(registry, p, &run_end, &foreign));
    if (!foreign && run_end == p->end && status.code == CM_CUDA_INVALID_VALUE) {
        return status; /* nobody locked it: the range itself is wrong */
    }
    if (run_end != p->end) {
        shorten(registry, p, run_end);
        status = foreign ? cm_ok() : call_register(registry, p);
    }
    else if (foreign) {
        status = cm_ok();
    }
    /* Still refused: somebody locked bytes in the midst of a page. Close in on that
     * page. */
    while (status.code == CM_CUDA_ALREADY_REGISTERED && may_be_foreign(status)) {
        uintptr_t page_count = (p->end - p->base) / registry->page_nbytes;
        if (page_count == 1) {
            foreign = true;
            status = cm_ok();
        }
        else {
            shorten(registry, p, p->base + page_count / 2 * registry->page_nbytes);
            status = call_register(registry, p);
        }
    }
    if (cm_is_ok(status) && foreign) {
        cm_mutex_lock(&registry->lock);
        p->foreign = true;
        cm_mutex_unlock(&registry->lock);
    }
    return status;
}
