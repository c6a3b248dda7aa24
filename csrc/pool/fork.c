/* SPDX-License-Identifier: Apache-2.0 */
/* What a forked child finds in page-locked memory: a copy of its own of the blocks that
 * live, which the parent makes before the fork. The memory itself stays out of the
 * child: no kernel has to copy pages that a device writes to, and none splits the
 * parent's huge pages over it (docs/decisions/0014). Where the copy finds no room the
 * child may not touch the memory at all: wrong bytes would be worse.
 * Locks: from before a fork to after it the forking thread holds that of the list, then
 * those of all pools, so that a child finds each free and what it guards in order: this
 * file alone holds several. */
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/machine.h"
#include "pool/private.h"

#ifndef MAP_FIXED_NOREPLACE
#    define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif

typedef struct fork_list {
    cm_spin_lock lock;
    cm_list pools;      /* by `fork_node` */
    atomic_bool is_set; /* what is below is called at forks */
} fork_list;

/* The one of the process: what a fork calls gets no argument and stays for ever. */
static fork_list *
the_list(void)
{
    static fork_list list = {.pools = {&list.pools, &list.pools}};
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

static void
prepare_arena(cm_arena *arena, uint64_t *room_nbytes)
{
    const cm_heap_span *s = arena->first;
    while (s != NULL && s->state != CM_SPAN_LIVE) {
        s = s->next;
    }
    arena->is_living = s != NULL;
    if (!arena->is_living) {
        return; /* and it may be gone: another thread gives it back without the lock */
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
            prepare_arena(CM_LIST_ENTRY(a, cm_arena, node), &memory.available_nbytes);
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
    if (!arena->keeps_place) {
        void *at = mmap(
            arena->host, arena->nbytes, PROT_NONE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != arena->host) {
            if (at != MAP_FAILED) { /* a kernel before 4.17 takes it for a hint */
                (void)munmap(at, arena->nbytes);
            }
            return false;
        }
    }
    return mremap(arena->child_copy, arena->nbytes, arena->nbytes,
                  MREMAP_MAYMOVE | MREMAP_FIXED, arena->host)
           != MAP_FAILED;
}

static void
settle_child(cm_arena *arena)
{
    arena->is_inherited = arena->is_living && move_in(arena);
    if (arena->is_inherited) {
        arena->child_copy = NULL;
    }
    else if (arena->is_living && arena->keeps_place) {
        (void)mprotect(arena->host, arena->nbytes, PROT_NONE);
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
                settle_child(arena);
            }
            drop_copy(arena);
        }
        cm_spin_lock_give(&pool->lock);
    }
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

bool
cm_block_is_inherited(const cm_block *block)
{
    return ((const cm_heap_span *)(const void *)block)->arena->is_inherited;
}
