/* SPDX-License-Identifier: Apache-2.0 */
/* Decides what a forked child finds in page-locked memory.
 *
 * The problem
 * -----------
 * fork() gives the child the same pages as the parent, and the kernel copies a page
 * when either of them writes to it. A device knows nothing of this: it goes on writing
 * to the old physical page, which may now belong to the child alone, while the parent
 * reads stale bytes from the new one. So page-locked memory must not be shared in this
 * way. Nor may it simply be missing in the child, since a child that reads an array
 * made by its parent (a worker of a data loader, say) would crash. Device memory needs
 * no care, since a child cannot reach it at all.
 *
 * Three answers (cm_fork)
 * -----------------------
 * A pool's memory lies in arenas, which are ranges of addresses (pool/heap.h). A block
 * is live while a user has it.
 *
 * COPY: before the fork the parent copies the live blocks to an ordinary mapping, and
 * hides the page-locked memory itself from the child (cm_host_hide()). After the fork
 * the child moves this copy to the addresses of the hidden memory, and the parent
 * unmaps the copy, which it no longer needs. So the kernel never has to copy pages that
 * a device writes to, and it does not split the parent's huge pages
 * (docs/decisions/0014). Example: if 5 MiB of a 64 MiB arena are live, in two places,
 * only the huge pages around these 5 MiB are copied, not all 64 MiB. If there is no
 * room for the copy, the child cannot touch the memory, since a crash is better than
 * wrong bytes.
 *
 * OMIT: the child cannot touch the addresses. This costs nothing.
 *
 * SHARE: the child has the same memory as the parent. This costs nothing, either. The
 * memory is mapped as shared, so the kernel never copies its pages. But as long as a
 * child can read a block, the pool must not hand the block to a new user. So each block
 * that is live at a fork is marked with the fork's number. When the parent gives such a
 * block back, the pool holds the block, and counts it as in flight (pool/in_flight.c),
 * until no child of that fork or of a later fork is left. A witness for each fork tells
 * whether any of its children is left (base/witness.h). Nothing happens at the moment
 * when a child ends. The witnesses are asked by the next allocation that finds no free
 * block (a miss), or by the next trim. If the parent gives the memory back to the
 * system, the child keeps its bytes, since it has a mapping of its own.
 *
 * How a fork goes
 * ---------------
 *   prepare()     before the fork: takes all locks, makes copies, marks blocks
 *   in_parent()   after it: drops the copies, gives the locks back
 *   in_child()    after it: moves the copies in, gives the locks back
 *
 * Locks: prepare() takes the lock of the list and then the locks of all pools, and the
 *        forking thread holds them until the fork is over. So no other thread is in the
 *        middle of a change to what these locks guard when the child is made. Only this
 *        file holds several locks at a time. */
#include <stdlib.h>
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/machine.h"
#include "base/witness.h"
#include "pool/private.h"

/* The children of one fork and their descendants. */
typedef struct family {
    cm_list node;
    uint64_t number; /* the fork's number, from 1 */
    cm_witness witness;
} family;

typedef struct fork_list {
    cm_spin_lock lock;
    /* One family for each fork that found shared blocks. A family is removed once none
     * of its processes is left. */
    cm_list families;
    family *next;        /* owned; the family of the fork under way, if it has one */
    bool is_numbered;    /* the fork under way has found a shared block */
    uint64_t fork_count; /* how many forks found shared blocks */
    /* The number of the last fork for which there was no memory to make a family, or 0.
     * A block with this or a lower number is kept until the pool ends. */
    uint64_t blind_count;
    cm_list pools;      /* all pools, linked by `fork_node` */
    atomic_bool is_set; /* pthread_atfork() has taken the handlers below */
} fork_list;

/* The one list of the process. It is static because the handlers of a fork get no
 * argument and can never be unregistered. */
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

/* -- before ------------------------------------------------------------------------ */

/* Copy the bytes from offset `begin` to `end` of an arena for the child, and subtract
 * their number from *room_nbytes. Returns false if they do not fit in *room_nbytes, or
 * if copying fails. */
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

/* Copy all huge pages in which a block is live. (If pages are small this copies a
 * little more than necessary.) Returns false if there is no room for all of them, or if
 * copying fails. */
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

/* Mark the live blocks as shared by the children of this fork. A block that children of
 * an earlier fork share keeps its number, which covers later forks too. */
static void
mark_living(cm_arena *arena, uint64_t number)
{
    for (cm_heap_span *s = arena->first; s != NULL; s = s->next) {
        if (s->state == CM_SPAN_LIVE && atomic_load(&s->first_fork) == 0) {
            atomic_store(&s->first_fork, number);
        }
    }
}

/* Return the number of the fork under way. The first shared block that is found gives
 * the fork its number and its witness. */
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

/* Make an arena ready for the fork, as the pool's cm_fork demands. If its live blocks
 * are to be copied but there is no room for the copy, the child will not be able to
 * touch them. */
static void
prepare_arena(fork_list *list, cm_fork way, cm_arena *arena, uint64_t *room_nbytes)
{
    const cm_heap_span *s = arena->first;
    while (s != NULL && s->state != CM_SPAN_LIVE) {
        s = s->next;
    }
    arena->is_living = s != NULL;
    if (!arena->is_living) {
        /* Nothing is to be done for this arena. Its memory may even be gone, since
         * another thread may be giving the memory back at this moment, and a thread
         * does that without the lock. */
        return;
    }
    if (way == CM_FORK_SHARE) {
        mark_living(arena, number_fork(list));
        return;
    }
    if (way == CM_FORK_OMIT) {
        cm_host_omit(arena->host, arena->nbytes);
        return;
    }
    /* Hide the memory once more, since the driver may have set other advice when it
     * locked the pages. */
    arena->keeps_place = cm_host_hide(arena->host, arena->nbytes);
    if (cm_is_ok(cm_host_map(arena->nbytes, &arena->child_copy))
        && !copy_living(arena, room_nbytes)) {
        drop_copy(arena);
    }
}

/* The handler before a fork. It takes the locks that end_fork() gives back, and
 * prepares the page-locked memory of all pools. */
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
        /* If this process is itself a forked child, the memory of all its pools is
         * ordinary memory, which the kernel copies. */
        pool->is_copied = cm_kind_is_page_locked(pool->config.kind)
                          && !cm_runtime_is_forked(pool->rt);
        cm_list *arenas = &pool->heap.arenas;
        for (cm_list *a = arenas->next; pool->is_copied && a != arenas; a = a->next) {
            prepare_arena(list, pool->config.fork, CM_LIST_ENTRY(a, cm_arena, node),
                          &memory.available_nbytes);
        }
    }
}

/* -- after ------------------------------------------------------------------------- */

/* Move the copy to the addresses of the hidden memory. Returns false if there is no
 * copy, or if the copy cannot be moved. If the kernel did not keep the addresses for
 * the child, other memory may lie at them by now, and the copy must not replace it. */
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

/* In the child: give an arena the contents that the pool's cm_fork demands. */
static void
prepare_child_arena(cm_fork way, cm_arena *arena)
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

/* The parent adds the family of this fork to its list. The child frees all families:
 * its memory is ordinary memory, so it never has to hold a block for a child of its
 * own. In the child only the witness page of this fork stays mapped, for as long as the
 * child lives. */
static void
keep_or_drop_families(fork_list *list, bool is_child)
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

/* After a fork, in the parent or in the child: move the copies in if this is the child,
 * drop what is left of them, and give all locks back. */
static void
end_fork(bool is_child)
{
    fork_list *list = the_list();
    for (cm_list *n = list->pools.next; n != &list->pools; n = n->next) {
        cm_pool *pool = CM_LIST_ENTRY(n, cm_pool, fork_node);
        cm_list *arenas = &pool->heap.arenas;
        for (cm_list *a = arenas->next; pool->is_copied && a != arenas; a = a->next) {
            cm_arena *arena = CM_LIST_ENTRY(a, cm_arena, node);
            if (is_child) {
                prepare_child_arena(pool->config.fork, arena);
            }
            drop_copy(arena);
        }
        cm_spin_lock_give(&pool->lock);
    }
    keep_or_drop_families(list, is_child);
    cm_spin_lock_give(&list->lock);
}

static void
in_parent(void)
{
    end_fork(false);
}

static void
in_child(void)
{
    end_fork(true);
}

/* -- which pools take part --------------------------------------------------------- */

/* The handlers are set when the library is loaded. If the first pool set them, another
 * thread could fork at that moment and miss them. */
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

/* -- blocks that children share ---------------------------------------------------- */

/* A block that was given back while children still had it. */
typedef struct held_block {
    cm_list node;
    cm_heap_span *span;
    unsigned flags; /* the flags of its cm_pool_free() */
} held_block;

/* True if a process is left that descends from the fork with the number `first` or from
 * a later one. Frees the families of which no process is left. */
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
cm_pool_try_hold_for_children(cm_pool *pool, cm_heap_span *span, unsigned flags,
                              cm_list **out)
{
    if (!has_child(atomic_load(&span->first_fork))) {
        atomic_store(&span->first_fork, 0);
        return false;
    }
    held_block *held = malloc(sizeof(*held));
    /* If there is no memory for the node, nobody will look at the block again, so it
     * stays until the pool ends. */
    if (held == NULL) {
        atomic_fetch_add(&pool->lost_count, 1);
        return true;
    }
    *held = (held_block){.span = span, .flags = flags};
    *out = &held->node;
    return true;
}

/* Move a held block into flight. Its streams were not remembered, so it waits for
 * everything that the devices are doing. */
static void
move_to_flight(cm_pool *pool, const held_block *held)
{
    cm_heap_span *span = held->span;
    atomic_store(&span->first_fork, 0);
    cm_flight *flight =
        cm_flight_create(pool, span, NULL, 0, held->flags | CM_POOL_FREE_FENCE);
    if (flight == NULL) {
        atomic_fetch_add(&pool->lost_count, 1);
        return;
    }
    cm_spin_lock_take(&pool->lock);
    pool->unasked_nbytes += span->block.nbytes;
    cm_list_push_back(&pool->in_flight, &flight->node);
    cm_spin_lock_give(&pool->lock);
}

/* Look at all held blocks. If no child has a block any more, or if `any` is true, the
 * block moves into flight. */
static void
poll_held(cm_pool *pool, bool any)
{
    cm_list looked_at, left;
    cm_list_init(&looked_at);
    cm_list_init(&left);
    cm_spin_lock_take(&pool->lock);
    cm_list_splice_back(&looked_at, &pool->held_by_children);
    cm_spin_lock_give(&pool->lock);
    cm_list *node;
    while ((node = cm_list_pop_front(&looked_at)) != NULL) {
        held_block *held = CM_LIST_ENTRY(node, held_block, node);
        if (any || !has_child(atomic_load(&held->span->first_fork))) {
            move_to_flight(pool, held);
            free(held);
        }
        else {
            cm_list_push_back(&left, node);
        }
    }
    cm_spin_lock_take(&pool->lock);
    cm_list_splice_back(&pool->held_by_children, &left);
    cm_spin_lock_give(&pool->lock);
}

void
cm_pool_poll_children(cm_pool *pool)
{
    if (pool->config.fork == CM_FORK_SHARE) {
        poll_held(pool, false);
    }
}

void
cm_pool_end_children(cm_pool *pool)
{
    poll_held(pool, true);
}

bool
cm_block_is_inherited(const cm_block *block)
{
    return ((const cm_heap_span *)(const void *)block)->arena->is_inherited;
}
