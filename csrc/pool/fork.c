/* SPDX-License-Identifier: Apache-2.0 */
/* What a forked child finds in page-locked memory, in one of three ways (cm_fork).
 * COPY: a copy of its own of the blocks that live, which the parent makes before the
 * fork. The memory itself stays out of the
 * child: no kernel has to copy pages that a device writes to, and none splits the
 * parent's huge pages over it (docs/decisions/0014). Where the copy finds no room the
 * child may not touch the memory at all: wrong bytes would be worse.
 * OMIT: the addresses, without access, at no cost.
 * SHARE: the very memory, at no cost either: it is mapped as shared, so no kernel
 * copies its pages. What the child sees must stay a block's for as long as it can look,
 * so a block that lived at a fork is marked with the fork's number, and when the parent
 * gives it back it is `kept` until no child of that fork or a later one is left, which
 * their witnesses tell (base/witness.h). It counts as in flight meanwhile. Nothing
 * wakes for the end of a child: an allocation that finds nothing free looks, as does a
 * trim. Memory that goes back to the system needs no such care: a child has its own
 * mapping.
 * Locks: from before a fork to after it the forking thread holds that of the list, then
 * those of all pools, so that a child finds each free and what it guards in order: this
 * file alone holds several. */
#include <stdlib.h>
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/machine.h"
#include "base/witness.h"
#include "pool/private.h"

/* The children of one fork, and theirs. */
typedef struct family {
    cm_list node;
    uint64_t number; /* of the fork, from 1 */
    cm_witness witness;
} family;

typedef struct fork_list {
    cm_spin_lock lock;
    cm_list families; /* of forks that found shared blocks, but those that are over */
    family *next;     /* owned: of the fork under way, if it is to have one */
    bool is_numbered; /* the fork under way */
    uint64_t fork_count;  /* of those forks */
    uint64_t blind_count; /* the last of which there is no witness; 0: none */
    cm_list pools;        /* by `fork_node` */
    atomic_bool is_set;   /* what is below is called at forks */
} fork_list;

/* The one of the process: what a fork calls gets no argument and stays for ever. */
static fork_list *
the_list(void)
{
    static fork_list list = {.pools = {&list.pools, &list.pools},
                             .families = {&list.families, &list.families}};
    return &list;
}

cm_pool *
cm_pool_after(const cm_runtime *rt, const cm_pool *pool)
{
    fork_list *list = the_list();
    const cm_list *n = pool == NULL ? &list->pools : &pool->fork_node;
    cm_pool *found = NULL;
    cm_spin_lock_take(&list->lock);
    while (found == NULL && (n = n->next) != &list->pools) {
        cm_pool *next = CM_LIST_ENTRY(n, cm_pool, fork_node);
        cm_spin_lock_take(&next->lock);
        bool ends = atomic_load(&next->holds) == 0 && next->counters.live_count == 0;
        if (next->rt == rt && !ends) {
            (void)atomic_fetch_add(&next->holds, 1);
            found = next;
        }
        cm_spin_lock_give(&next->lock);
    }
    cm_spin_lock_give(&list->lock);
    return found;
}

/* -- before ----------------------------------------------------------------------------- */

static bool
copy_run(cm_arena *arena, uint64_t begin, uint64_t end, uint64_t *room_nbytes)
{
    uint64_t nbytes = end - begin;
    if (nbytes > *room_nbytes) {
        return false;
    }
    *room_nbytes -= nbytes;
    cm_populate populate = {
        .start = arena->child_copy + begin,
        .from = (const char *)arena->host + begin,
        .nbytes = nbytes,
    };
    return cm_is_ok(cm_populate_run(&populate));
}

/* Whole huge pages that a living block lies in: where pages are small it does no harm.
 * False: there is no room for all of them. */
static bool
copy_living(cm_arena *arena, uint64_t *room_nbytes)
{
    uint64_t begin = 0;
    uint64_t end = 0;
    for (const cm_heap_span *s = arena->first; s != NULL; s = s->next) {
        if (s->state != CM_SPAN_LIVE) {
            continue;
        }
        uint64_t low = s->block.address - arena->base;
        uint64_t high = cm_round_up_to(low + s->block.nbytes, CM_HUGE_PAGE_NBYTES);
        low -= low % CM_HUGE_PAGE_NBYTES;
        if (low > end) {
            if (!copy_run(arena, begin, end, room_nbytes)) {
                return false;
            }
            begin = low;
        }
        end = high < arena->nbytes ? high : arena->nbytes;
    }
    return copy_run(arena, begin, end, room_nbytes);
}

static void
drop_copy(cm_arena *arena)
{
    if (arena->child_copy != NULL) {
        cm_host_unmap(arena->child_copy, arena->nbytes);
        arena->child_copy = NULL;
    }
}

/* The living blocks are of this fork's children as well. */
static void
mark_living(cm_arena *arena, uint64_t number)
{
    for (cm_heap_span *s = arena->first; s != NULL; s = s->next) {
        if (s->state == CM_SPAN_LIVE && atomic_load(&s->first_fork) == 0) {
            atomic_store(&s->first_fork, number);
        }
    }
}

/* A fork that finds shared blocks has a number and a witness, made by the first. */
static uint64_t
number_fork(fork_list *list)
{
    if (!list->is_numbered) {
        list->is_numbered = true;
        list->fork_count++;
        list->next = calloc(1, sizeof(*list->next));
        if (list->next != NULL) {
            list->next->number = list->fork_count;
            cm_witness_create(&list->next->witness);
        }
        else {
            list->blind_count = list->fork_count;
        }
    }
    return list->fork_count;
}

static void
prepare_arena(fork_list *list, cm_fork way, cm_arena *arena, uint64_t *room_nbytes)
{
    const cm_heap_span *s = arena->first;
    while (s != NULL && s->state != CM_SPAN_LIVE) {
        s = s->next;
    }
    arena->is_living = s != NULL;
    if (!arena->is_living) {
        return; /* and it may be gone: another thread gives it back without the lock */
    }
    if (way == CM_FORK_SHARE) {
        mark_living(arena, number_fork(list));
        return;
    }
    if (way == CM_FORK_OMIT) {
        cm_host_omit(arena->host, arena->nbytes);
        return;
    }
    /* Again, since the driver may have advised otherwise when it locked the pages. */
    arena->keeps_place = cm_host_hide(arena->host, arena->nbytes);
    if (cm_is_ok(cm_host_map(arena->nbytes, &arena->child_copy))
        && !copy_living(arena, room_nbytes)) {
        drop_copy(arena);
    }
}

static void
prepare(void)
{
    fork_list *list = the_list();
    cm_spin_lock_take(&list->lock);
    cm_host_memory memory = {0};
    if (!cm_list_is_empty(&list->pools)) {
        cm_host_memory_read(NULL, &memory);
    }
    for (cm_list *n = list->pools.next; n != &list->pools; n = n->next) {
        cm_pool *pool = CM_LIST_ENTRY(n, cm_pool, fork_node);
        cm_spin_lock_take(&pool->lock);
        /* In a child all of it is ordinary memory, which the kernel copies. */
        pool->is_copied = cm_kind_is_page_locked(pool->config.kind)
                          && !cm_runtime_is_forked(pool->rt);
        cm_list *arenas = &pool->heap.arenas;
        for (cm_list *a = arenas->next; pool->is_copied && a != arenas; a = a->next) {
            prepare_arena(list, pool->config.fork, CM_LIST_ENTRY(a, cm_arena, node),
                          &memory.available_nbytes);
        }
    }
}

/* -- after ------------------------------------------------------------------------------ */

/* Put the copy where the memory was. What else may have come to lie there, since the
 * kernel kept no place, is left alone. */
static bool
move_in(const cm_arena *arena)
{
    if (arena->child_copy == NULL) {
        return false;
    }
    if (!arena->keeps_place && !cm_host_reserve(arena->host, arena->nbytes)) {
        return false;
    }
    return mremap(arena->child_copy, arena->nbytes, arena->nbytes,
                  MREMAP_MAYMOVE | MREMAP_FIXED, arena->host)
           != MAP_FAILED;
}

static void
settle_child(cm_fork way, cm_arena *arena)
{
    if (way == CM_FORK_SHARE) {
        arena->is_inherited = arena->is_living;
        return;
    }
    if (way == CM_FORK_OMIT) {
        (void)(arena->is_living && cm_host_reserve(arena->host, arena->nbytes));
        return;
    }
    arena->is_inherited = arena->is_living && move_in(arena);
    if (arena->is_inherited) {
        arena->child_copy = NULL;
    }
    else if (arena->is_living && arena->keeps_place) {
        (void)mprotect(arena->host, arena->nbytes, PROT_NONE);
    }
}

/* A child has the page of its own fork's witness for good, and tells of nobody. */
static void
settle_families(fork_list *list, bool is_child)
{
    family *made = list->next;
    list->next = NULL;
    list->is_numbered = false;
    if (made != NULL && !is_child) {
        cm_witness_leave(&made->witness);
        cm_list_push_back(&list->families, &made->node);
        return;
    }
    if (made != NULL) {
        cm_witness_inherit(&made->witness);
        free(made);
    }
    while (is_child && !cm_list_is_empty(&list->families)) {
        family *old = CM_LIST_ENTRY(list->families.next, family, node);
        cm_list_remove(&old->node);
        cm_witness_close(&old->witness);
        free(old);
    }
}

static void
settle(bool is_child)
{
    fork_list *list = the_list();
    for (cm_list *n = list->pools.next; n != &list->pools; n = n->next) {
        cm_pool *pool = CM_LIST_ENTRY(n, cm_pool, fork_node);
        cm_list *arenas = &pool->heap.arenas;
        for (cm_list *a = arenas->next; pool->is_copied && a != arenas; a = a->next) {
            cm_arena *arena = CM_LIST_ENTRY(a, cm_arena, node);
            if (is_child) {
                settle_child(pool->config.fork, arena);
            }
            drop_copy(arena);
        }
        cm_spin_lock_give(&pool->lock);
    }
    settle_families(list, is_child);
    cm_spin_lock_give(&list->lock);
}

static void
in_parent(void)
{
    settle(false);
}

static void
in_child(void)
{
    settle(true);
}

/* -- which pools take part --------------------------------------------------------------------- */

/* Here, and not with the first pool: no other thread can fork in between. */
__attribute__((constructor)) static void
begin(void)
{
    atomic_store(&the_list()->is_set,
                 pthread_atfork(prepare, in_parent, in_child) == 0);
}

cm_status
cm_pool_watch_forks(cm_pool *pool)
{
    fork_list *list = the_list();
    CM_TRY(cm_allocated(atomic_load(&list->is_set), sizeof(*list)));
    cm_spin_lock_take(&list->lock);
    cm_list_push_back(&list->pools, &pool->fork_node);
    cm_spin_lock_give(&list->lock);
    return cm_ok();
}

void
cm_pool_unwatch_forks(cm_pool *pool)
{
    fork_list *list = the_list();
    cm_spin_lock_take(&list->lock);
    cm_list_remove(&pool->fork_node);
    cm_spin_lock_give(&list->lock);
}

/* -- blocks that children share -------------------------------------------------------------- */

/* A block that was given back while children had it. */
typedef struct kept_block {
    cm_list node;
    cm_heap_span *span;
    unsigned flags; /* of its free */
} kept_block;

/* Is a child left of that fork or a later one, or one of its own? */
static bool
has_child(uint64_t first)
{
    fork_list *list = the_list();
    cm_list over;
    cm_list_init(&over);
    cm_spin_lock_take(&list->lock);
    bool found = list->blind_count >= first;
    for (cm_list *n = list->families.next; n != &list->families;) {
        family *each = CM_LIST_ENTRY(n, family, node);
        n = n->next;
        if (cm_witness_is_over(&each->witness)) {
            cm_list_remove(&each->node);
            cm_list_push_back(&over, &each->node);
        }
        else {
            found = found || each->number >= first;
        }
    }
    cm_spin_lock_give(&list->lock);
    while (!cm_list_is_empty(&over)) {
        family *each = CM_LIST_ENTRY(over.next, family, node);
        cm_list_remove(&each->node);
        cm_witness_close(&each->witness);
        free(each);
    }
    return found;
}

bool
cm_pool_try_keep(cm_pool *pool, cm_heap_span *span, unsigned flags, cm_list **out)
{
    if (!has_child(atomic_load(&span->first_fork))) {
        atomic_store(&span->first_fork, 0);
        return false;
    }
    kept_block *kept = malloc(sizeof(*kept));
    if (kept == NULL) { /* nobody looks at it again: it stays until the pool ends */
        atomic_fetch_add(&pool->lost_count, 1);
        return true;
    }
    *kept = (kept_block){.span = span, .flags = flags};
    *out = &kept->node;
    return true;
}

/* Its streams were not kept, so everything that its device was doing is waited for. */
static void
go_on(cm_pool *pool, const kept_block *kept)
{
    cm_heap_span *span = kept->span;
    atomic_store(&span->first_fork, 0);
    cm_flight *flight =
        cm_flight_create(pool, span, NULL, 0, kept->flags | CM_POOL_FREE_FENCE);
    if (flight == NULL) {
        atomic_fetch_add(&pool->lost_count, 1);
        return;
    }
    cm_spin_lock_take(&pool->lock);
    pool->unasked_nbytes += span->block.nbytes;
    cm_list_push_back(&pool->in_flight, &flight->node);
    cm_spin_lock_give(&pool->lock);
}

/* `any`: whether children are left or not. */
static void
look_at_kept(cm_pool *pool, bool any)
{
    cm_list looked_at, left;
    cm_list_init(&looked_at);
    cm_list_init(&left);
    cm_spin_lock_take(&pool->lock);
    cm_list_splice_back(&looked_at, &pool->kept);
    cm_spin_lock_give(&pool->lock);
    cm_list *node;
    while ((node = cm_list_pop_front(&looked_at)) != NULL) {
        kept_block *kept = CM_LIST_ENTRY(node, kept_block, node);
        if (any || !has_child(atomic_load(&kept->span->first_fork))) {
            go_on(pool, kept);
            free(kept);
        }
        else {
            cm_list_push_back(&left, node);
        }
    }
    cm_spin_lock_take(&pool->lock);
    cm_list_splice_back(&pool->kept, &left);
    cm_spin_lock_give(&pool->lock);
}

void
cm_pool_look_at_kept(cm_pool *pool)
{
    if (pool->config.fork == CM_FORK_SHARE) {
        look_at_kept(pool, false);
    }
}

void
cm_pool_end_kept(cm_pool *pool)
{
    look_at_kept(pool, true);
}

bool
cm_block_is_inherited(const cm_block *block)
{
    return ((const cm_heap_span *)(const void *)block)->arena->is_inherited;
}
