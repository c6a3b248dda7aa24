/* SPDX-License-Identifier: Apache-2.0 */
/* A storage is the memory that buffers share. A view holds its storage, and the storage
 * holds its pool block, its registration or its foreign owner. So the memory stays
 * alive as long as any view of it.
 *
 * References and holds
 * --------------------
 * A storage is counted twice. `refs` keeps the struct: each buffer, export and transfer
 * has one. `holds` keeps the bytes: it counts exports (views of other libraries, and
 * calls of our own) and transfers that are still running. free() and the end of a
 * `with` block close a storage. The bytes then go at once if there is no hold, or with
 * the last hold.
 *
 * Example: `t = cumem.copy(dst, src, stream=s)`, `src.free()`. The transfer holds the
 * storage of `src`, so free() only closes it: each further use of `src` raises
 * ValueError, but the bytes stay. When the copy ends, the thread of the engine that
 * sees it drops the hold. It does not have the GIL, so the storage is handed to the
 * deferred decrefs, and the next call into cumem gives the block back to its pool.
 *
 * Sleep
 * -----
 * The pool of a storage may sleep (pool/sleep.c). Then the storage has its address but
 * no bytes, and each use raises RuntimeError until the pool wakes. Exports stay as they
 * are, since the addresses come back. Calls that work on a storage without the GIL are
 * counted apart from exports (`call_count`), because the pool cannot go to sleep while
 * such a call works.
 *
 * In a pool with spill="pinned", single storages sleep when memory is short
 * (pool/spilling.c). Each use of such a storage is noted, and wakes it.
 *
 * What works on it
 * ----------------
 * A storage remembers the streams that worked on it and the transfers of it that have
 * not ended, so that its block goes back to the pool with these streams, and so that
 * later work waits for the earlier (storage_use.c). */
#pragma once

#include <stdatomic.h>

#include "python/core/numpy_call.h"
#include "python/core/recording.h"
#include "python/device/objects.h"
#include "transfer/engine/handle.h"

/* -- transfers of it ---------------------------------------------------------------------- */

/* The range of bytes in a storage that a transfer touches, from the lowest to the
 * highest with all gaps between them, and whether it writes them. Both ends are counted
 * from the storage's first byte. */
typedef struct cm_extent {
    uint64_t low;
    uint64_t high;
    bool writes;
} cm_extent;

#define CM_EXTENT_ALL(writes) ((cm_extent){0, UINT64_MAX, (writes)})

/* A transfer that a storage remembers; it may have finished. */
typedef struct cm_storage_transfer {
    cm_ticket *ticket; /* held */
    cm_extent extent;
    uint64_t number; /* transfers are numbered in the order in which they came */
    /* A later transfer came after this one, and whatever has to wait for this one has
     * to wait for the later one anyway. */
    bool covered;
} cm_storage_transfer;

/* True if work on `extent` must come after the transfer. */
static inline bool
cm_storage_transfer_is_in_the_way(const cm_storage_transfer *transfer, cm_extent extent)
{
    return (transfer->extent.writes || extent.writes)
           && transfer->extent.low < extent.high && extent.low < transfer->extent.high;
}

/* -- what streams do to it ------------------------------------------------------------------ */

/* What one stream was given to do with a storage. The stream itself is in `uses`; the
 * page at the top of storage_use.c tells how both are used. For each stream the first
 * and the last byte that it reads, and that it writes, are kept: that may be more than
 * it touches, but never less. A struct of zeros means that nothing is known, since
 * other code queues work on the stream as it likes. Such a stream may write
 * everything. */
typedef struct cm_use_span {
    cm_extent reads; /* an empty extent has low == high; the member `writes` of these
                        two is not used */
    cm_extent writes;
    bool is_known;
    /* The storage's use_calls when the stream was last given work. */
    uint64_t named_at;
    /* The stream has come after all work that was given to streams by the time
     * use_calls was `followed_at`, as far as that work conflicts with `followed`. If
     * the stream has come after nothing, `followed_at` is 0. */
    cm_extent followed;
    uint64_t followed_at;
} cm_use_span;

/* -- itself ------------------------------------------------------------------------------- */

/* Exports and transfers are counted in one number, so that whichever ends last sees
 * that it is the last. */
#define CM_HOLD_EXPORT UINT64_C(1)
#define CM_HOLD_TRANSFER (UINT64_C(1) << 32)

/* A piece of memory, shared by all buffers over it. Its references are counted
 * atomically, since DLPack deleters drop them in threads without the GIL. Everything
 * else needs the GIL. The bytes are kept by exactly one of these: a block, a
 * registration together with a view, or a foreign owner. */
typedef struct cm_storage {
    atomic_size_t refs;
    /* Counts the exports and transfers that the bytes must outlive, in units of
     * CM_HOLD_…. */
    atomic_uint_least64_t holds;
    cm_list node;      /* in state->storages while open */
    cm_state *state;   /* borrowed */
    cm_kind kind;      /* what consumers may do with it */
    cm_kind copy_kind; /* where the planner assumes that the bytes are */
    int device;        /* index; 0 for pageable memory, which has none */
    /* Flags of cudaHostAlloc, cudaMallocManaged or cudaHostRegister. */
    unsigned flags;
    void *host;         /* first byte for the host; NULL for device memory */
    cm_address address; /* first byte for the device; 0 if the device cannot reach the
                           memory */
    uint64_t nbytes;
    bool readonly;
    /* Closed by free(), the end of a with block or shutdown(): the bytes are gone, or
     * go with the last hold. */
    atomic_bool closed;
    /* Work that we cannot see may run on the memory, so its block goes back behind a
     * fence. */
    bool was_exported;
    bool is_file; /* the memory is foreign, and known to map a file */
    /* __cuda_array_interface__ gave the address away. Its consumers may keep only the
     * object alive. */
    bool address_was_exported;
    /* The user has asked for its address. Whoever has the address may work on the
     * memory, until the user says with record_stream() on which stream, or gives the
     * buffer back after that work. */
    bool address_was_read;
    bool holds_locked_pages; /* made of foreign memory whose pages stay locked until it
                                ends */
    /* Managed memory that was advised; the advice is taken back before the memory
     * goes. */
    bool is_advised;
    /* This process is a forked child, which did not get the bytes. The storage is then
     * closed as well. */
    bool was_not_inherited;
    bool is_asleep; /* its pool sleeps, or is on its way to sleep or awake */
    bool may_spill; /* its pool spills, so each use has to be noted */
    bool is_moving; /* its bytes are on their way to page-locked memory or back */
    bool is_kept;   /* keep() was called, so it never spills */
    /* Shared by name, and not page-locked yet: the first copy to or from a device does
     * that (protocols/shared.c). */
    bool locks_late;
    bool is_traced;    /* tracemalloc knows of the block */
    bool was_captured; /* a graph may use the block at any time, so the pool keeps it */
    /* These members are for thrashing.c, about managed memory. They say which side used
     * which bytes last, how often that changed, and since when. */
    bool side_is_device;
    /* The warning was given. This and the members after it mean nothing while side_high
     * is 0. */
    bool thrashing_was_warned;
    uint32_t side_turns;
    uint64_t side_since_ns;
    int64_t side_low;
    int64_t side_high; /* 0 if nobody has used any */
    /* How many fills were left to streams. No ticket stands for these writes. */
    uint64_t stream_fill_count;
    uint64_t awaited_fill_count; /* how many of these fills were waited for */
    /* How often the storage was ever exported through the buffer protocol. Each
     * consumer may keep only the object alive, so after such an export the bytes go
     * with the last reference. Arrays of our own take their export back. */
    size_t view_count;
    /* These members describe the only export so far. It is a view that may still turn
     * out not to count as an export (cm_storage_watch_view()). */
    const void *only_view;   /* where its consumer keeps it; NULL if there is none */
    uint64_t only_number;    /* state->export_total when the view was given */
    Py_ssize_t only_refs;    /* references of the buffer before that */
    cm_numpy_call only_call; /* the call within which the view was asked for */
    /* If there is a block, it keeps the pool alive. If there is none, the pool is held.
     * NULL for foreign memory. */
    cm_pool *pool;
    cm_block *block;   /* owned, a block of `pool` */
    cm_block *spilled; /* owned: page-locked memory with its bytes; NULL if awake */
    uint64_t touched;  /* state->touch_count at its last use, if it may spill */
    cm_registration *registration; /* owned; NULL if we have not locked foreign memory
                                    */
    /* Owned: an object, memoryview or capsule that keeps foreign memory alive. */
    PyObject *foreign;
    /* Owned: the object that has the foreign bytes, if its owner can put other bytes in
     * their place (memory_watch.h); else NULL. */
    PyObject *memory;
    uint64_t memory_address; /* its first byte, if is_watched */
    uint64_t memory_nbytes;
    bool is_watched; /* each use checks that its address and size have not changed */
    /* A function of C that cleans up, instead of `foreign` or beside it. */
    void (*foreign_drop)(void *argument);
    void *foreign_argument;
    /* Streams that worked on it, held, without duplicates; guarded by the GIL. */
    cm_stream **uses;
    /* Other code works on this many of the streams too. They are the first in `uses`.
     * As long as the memory lives, any work that is queued on them may use it. */
    uint32_t lasting_count;
    uint64_t use_calls;   /* how often a stream was given work */
    cm_stream *first_use; /* uses points here while one is enough */
    uint32_t use_count;
    uint32_t use_capacity;
    cm_use_span *spans;  /* one for each use; NULL if nothing is known of any */
    uint32_t span_count; /* use_count, or 0 */
    uint32_t prune_at;   /* with this many uses, idle streams are looked for again */
    uint32_t span_capacity;
    bool first_is_lent; /* uses[0] is the state's own record, and is not held */
    void (*free_struct)(struct cm_storage *storage); /* called at the very end */
    /* Transfers of it that have not finished, and some that have; guarded by the
     * GIL. */
    cm_storage_transfer *transfers;
    uint32_t transfer_count;
    uint32_t transfer_capacity;
    /* with this many transfers, finished ones are looked for again */
    uint32_t forget_transfers_at;
    /* The engine's count of failures when it was last looked at. */
    uint64_t failed_total;
    /* Calls of ours that are counted as exports in `holds`. */
    uint64_t call_count;
    uint64_t many_call; /* the last copy_many() that named it, and its index there */
    size_t many_index;
    cm_use_span first_span; /* spans points here while one is enough */
    /* Part of the storage, so that dropping it without the GIL cannot fail. */
    cm_deferred deferred;
    atomic_bool deferring; /* it waits for a thread with the GIL to free its bytes, and
                              has a reference for that */
} cm_storage;

/* True if anybody but cumem may use the memory, on a stream that cumem does not know: a
 * library that it was exported to, whoever read its address, or a captured graph. */
static inline bool
cm_storage_has_left(const cm_storage *storage)
{
    return storage->was_exported || storage->address_was_exported
           || storage->address_was_read || storage->was_captured;
}

/* Return the address by which tracemalloc knows the block. */
static inline uintptr_t
cm_storage_place(const cm_storage *storage)
{
    uintptr_t place = (uintptr_t)storage->host;
    return place != 0 ? place : (uintptr_t)storage->address;
}

/* Let tracemalloc know of the block. Needs the GIL. */
static inline void
cm_storage_trace(cm_storage *storage)
{
    storage->is_traced =
        cm_tracing.track != NULL
        && cm_tracing.track(CM_TRACE_DOMAIN, cm_storage_place(storage), storage->nbytes)
               == 0;
}

/* Make a storage with one reference, and put it into state->storages. Only the members
 * that the arguments name are filled in. Returns NULL with MemoryError if there is no
 * memory. */
cm_storage *cm_storage_new(cm_state *state, cm_kind kind, int device);
/* Initialise a storage in place. `fresh` says that it was never initialised before. */
void cm_storage_init(cm_storage *storage, cm_state *state, cm_kind kind, int device,
                     bool fresh);
cm_storage *cm_storage_hold(cm_storage *storage);
/* Hold a storage of state->storages. Returns false if nobody has the storage any more,
 * and it only waits for a thread with the GIL that gives it back. */
bool cm_storage_try_hold(cm_storage *storage);
/* Drop a reference, from any thread. Without the GIL, Python references are dropped
 * later. */
void cm_storage_release(cm_storage *storage, bool have_gil);
/* Close a storage. The bytes go now, or when the last transfer that uses the storage is
 * done. If the storage was exported through the buffer protocol, the bytes go with the
 * last reference. Returns 0, or -1 with an exception: BufferError while the storage is
 * exported, and then nothing was done, or CudaError if giving the memory back
 * failed. */
int cm_storage_close(cm_storage *storage);
/* Close a storage at the end of a `with` block. Here exports do not make the call fail:
 * the bytes go when the last export ends. Failures go to the unraisable hook. */
void cm_storage_retire(cm_storage *storage);
/* Close a storage and unlock its registered pages now, after the streams that use them
 * are done (with the GIL released). Nothing else may use the storage. Returns 0, or -1
 * with CudaError. */
int cm_storage_unlock(cm_storage *storage);
/* Check that the storage is not exported. Returns 0, or -1 with BufferError "cannot
 * <what> with 2 live exports". */
int cm_storage_check_not_exported(const cm_storage *storage, const char *what);
/* Called in a forked child, before it forgets anything else of the parent's. Bytes of
 * the host are ordinary memory from now on, and bytes that the child did not get are
 * lost to it. Needs the GIL. */
void cm_storage_inherit(cm_storage *storage);
/* The rest of cm_storage_check_open(), called if one of its flags is set. */
int cm_storage_look_closer(cm_storage *storage);
/* Check what cm_storage_check_open() does, but do not wake memory that was spilled, and
 * do not note a use. */
int cm_storage_check_there(cm_storage *storage);

/* Check that the memory can be used, and wake it if it was spilled. Returns 0, or -1
 * with an exception: ValueError "… is closed", BufferError if the owner of foreign
 * memory moved it, or RuntimeError if its pool sleeps or if this is a forked child that
 * does not have it. This is inline because a batch calls it for both ends of each of
 * its thousands of pairs. */
static inline int
cm_storage_check_open(cm_storage *storage)
{
    if (CM_UNLIKELY(storage->closed || storage->is_watched || storage->is_asleep
                    || storage->may_spill)) {
        return cm_storage_look_closer(storage);
    }
    return 0;
}

/* Remember that `stream` works on the storage. Returns the index of the use, or -1 with
 * MemoryError. Needs the GIL. */
int64_t cm_storage_add_use(cm_storage *storage, cm_stream *stream);
/* Do the same as cm_storage_add_use() for work of ours, which touches no more than
 * `extent`. */
int64_t cm_storage_add_use_of(cm_storage *storage, cm_stream *stream, cm_extent extent);
/* True if work on `extent` must come after the work that was given to uses[index].
 * `stream` is the stream that the work will be on, or NULL for a stream that the
 * storage does not remember. False if `stream` has already come after the work of
 * uses[index]. */
bool cm_storage_is_in_the_way(const cm_storage *storage, uint32_t index,
                              cm_extent extent, const cm_stream *stream);
/* Do the same as cm_storage_add_use() for a stream on which other code works on the
 * storage, now or later. Returns 0, or -1 with MemoryError. */
int cm_storage_add_lasting_use(cm_storage *storage, cm_stream *stream);
/* Forget uses for which no later call will have to wait, except `by` and lasting ones.
 * This is called on behalf of a call of ours that touches `extent`. The call has ended
 * or, if `by` is not NULL, is queued on `by`. It came after all work that was in its
 * way when `use_calls` was read or, with `all`, after all work that there was then.
 * Nothing happens if a stream was given work since `use_calls` was read. Needs the GIL,
 * and releases it for streams that end. */
void cm_storage_forget_uses(cm_storage *storage, const cm_stream *by, cm_extent extent,
                            bool all, uint64_t use_calls);
/* Forget streams that are idle, once enough streams have gathered to make it worth
 * asking. Streams that are in nobody's way would otherwise never be forgotten. Needs
 * the GIL, and releases it for streams that end. */
void cm_storage_prune_uses(cm_storage *storage);
/* With more uses than this, a call comes after all of them, so that it may forget them;
 * otherwise busy streams that live for one copy would gather. */
enum { CM_MOST_USES = 64 };
/* Wait for unfinished transfers into the storage, with the GIL released, so that the
 * host reads the bytes that they write. With `streams` this also waits for the work of
 * the storage's streams. Returns 0, or -1 with the failure. */
int cm_storage_wait(cm_storage *storage, bool streams);
/* Do the same as cm_storage_wait(), but wait only for transfers and not for fills that
 * were queued. This is for callers whose work comes after the fills anyway. */
int cm_storage_wait_pending(cm_storage *storage);
/* Keep free() and shutdown() of other threads away (with BufferError) while a call of
 * ours works on the storage without the GIL. */
void cm_storage_keep_open(cm_storage *storage);
void cm_storage_allow_close(cm_storage *storage);
/* Count the beginning or the end of a call of ours that works on a storage which
 * something else keeps open for longer than the call. `storage` may be NULL. */
static inline void
cm_storage_count_call(cm_storage *storage, bool begins)
{
    if (storage != NULL) {
        storage->call_count += begins ? 1u : UINT64_MAX;
    }
}
/* Count an export, until cm_storage_end_export(). was_exported is set for good. */
void cm_storage_begin_export(cm_storage *storage);
void cm_storage_end_export(cm_storage *storage);
/* Called between the beginning and the end of an export: `view` is given to a
 * memoryview, and nothing was exported before. If NumPy asked for the view and gives it
 * back within the same call (numpy_call.h), as in numpy.array(buf), and if nobody kept
 * the buffer and nothing else was exported meanwhile, then the processor read the bytes
 * and they never left us. Other consumers may ask for a view, start a copy on the
 * device and give the view back at once. Needs the GIL. */
void cm_storage_watch_view(cm_storage *storage, const void *view, Py_ssize_t refs);
/* Called when the view comes back. Returns true if the view turned out not to have been
 * an export, and then unsets was_exported. */
bool cm_storage_unwatch_view(cm_storage *storage, const void *view, Py_ssize_t refs);
/* End an export without the GIL, and drop a reference as well. */
void cm_storage_drop_export(cm_storage *storage);
/* Hold a storage for a transfer. cm_storage_drop_transfer() ends that hold, and has the
 * signature of cm_keep.drop. */
cm_storage *cm_storage_hold_transfer(cm_storage *storage);
/* Do the same as cm_storage_hold_transfer() for a storage of state->storages. Returns
 * false if cm_storage_try_hold() would. */
bool cm_storage_try_hold_transfer(cm_storage *storage);
void cm_storage_drop_transfer(void *storage);

/* Return the number of live Py_buffer exports, of DLPack capsules and tensors, and of
 * calls that keep the storage open. */
static inline size_t
cm_storage_count_exports(const cm_storage *storage)
{
    return atomic_load(&storage->holds) % CM_HOLD_TRANSFER;
}

/* True if a stream that the storage remembers was given a fill of the storage, and
 * nobody has waited for this fill. Needs the GIL. */
static inline bool
cm_storage_has_pending_fill(const cm_storage *storage)
{
    return storage->awaited_fill_count != storage->stream_fill_count;
}

/* True if some transfer of the storage is not done. */
static inline bool
cm_storage_is_in_transfer(const cm_storage *storage)
{
    return atomic_load(&storage->holds) >= CM_HOLD_TRANSFER;
}

/* False if the storage remembers nothing but its lasting streams. Every call comes
 * after those, whatever bytes it uses, and none of them is ever forgotten. */
static inline bool
cm_storage_has_past(const cm_storage *storage)
{
    return storage->use_count > storage->lasting_count || storage->transfer_count > 0;
}

/* Return the place of `region` in the storage, of whose memory it is a part. */
cm_extent cm_storage_extent(const cm_storage *storage, const cm_region *region,
                            bool writes);
/* Remember an unfinished transfer of the storage. The transfer came after all transfers
 * in its way whose numbers are below `seen`. With `seen` 0 it came after none. Returns
 * 0, or -1 with MemoryError. Needs the GIL. */
int cm_storage_add_transfer(cm_storage *storage, cm_ticket *ticket, cm_extent extent,
                            uint64_t seen);
/* Called when a transfer into the storage has succeeded before it could be remembered.
 * Failures of earlier transfers are from then on not reported to later users of the
 * memory. Needs the GIL. */
void cm_storage_note_written(cm_storage *storage);
/* Wait, with the GIL released, until no transfer uses the storage. Returns 0, or -1
 * with what a signal handler raised. */
int cm_storage_wait_transfers(cm_storage *storage);

/* Set the first stream of a new storage, which needs no memory. */
static inline void
cm_storage_set_first_use(cm_storage *storage, cm_stream *stream)
{
    bool lent = stream == storage->state->default_streams[stream->device];
    storage->first_use = lent ? stream : cm_stream_hold(stream);
    storage->first_is_lent = lent;
    storage->uses = &storage->first_use;
    storage->use_count = storage->use_capacity = 1;
    storage->lasting_count = 1;
}

/* Let a new storage spill if its pool, which has this config, does. */
static inline void
cm_storage_enrol(cm_storage *storage, const cm_pool_config *config)
{
    if (CM_UNLIKELY(config->spills)) {
        storage->may_spill = true;
        storage->touched = ++storage->state->touch_count;
    }
}

/* -- its end ------------------------------------------------------------------------------ */

/* Take the members that have to be given back out of `storage`, and put them into
 * `out`. Nobody else knows `out`, so giving them back may wait without the GIL. `out`
 * must not be moved in memory. Needs the GIL. */
void cm_storage_detach(cm_storage *storage, cm_storage *out);
/* Give back everything that needs no Python. The GIL must not be held if this may wait.
 * In a forked child all of it is leaked. Waits for the streams that use registered
 * memory, and for the device if others may use it, unless `runtime` is NULL because the
 * caller has already waited.
 * Fails: host_unregister; such a wait. Everything is gone all the same. */
CM_NODISCARD cm_status cm_storage_free_parts(cm_storage *detached, cm_runtime *runtime);
/* Note for the recorder that pages of other owners were locked or are unlocked. */
void cm_storage_note_registered(const cm_storage *storage, uint8_t op);
/* Drop the foreign owner, after the other parts. Needs the GIL. */
void cm_storage_drop_foreign(cm_storage *detached);

/* -- work that still goes on in it, and how a stream comes after that ----------------- */

/* A snapshot of the streams that worked on a storage and of its transfers, all held. */
typedef struct cm_pending {
    cm_state *state; /* borrowed; NULL if nothing was taken */
    cm_stream **streams;
    uint32_t stream_count;
    cm_ticket **tickets; /* first those that write to the storage */
    uint32_t ticket_count;
    uint32_t writer_count; /* how many of them write */
    uint64_t use_calls;    /* use_calls of the storage */
    bool captured; /* cm_pending_prune() found a stream that is being captured */
} cm_pending;

/* Take a snapshot. Returns 0, or -1 with MemoryError. Until cm_pending_give()
 * shutdown() is refused. Needs the GIL. */
int cm_pending_take(const cm_storage *storage, cm_pending *out);
void cm_pending_give(cm_pending *pending);

/* Remove work that has finished, and work that was given to the consumer's own stream.
 * `consumer` is the handle of that stream, on `device`, which is -1 if the consumer is
 * not known yet. A stream that is being captured must not be asked. Nothing that was
 * captured runs now, so only a consumer, who may join the capture, has to know of such
 * a stream.
 * Fails: stream_is_capturing, stream_query. */
CM_NODISCARD cm_status cm_pending_prune(cm_pending *pending, int device,
                                        uint64_t consumer);

/* Make `consumer` wait, on the device, for everything that is left. Work on `consumer`
 * itself is left out.
 * Blocks: as cm_ticket_order().
 * Fails:  event_create, event_record, stream_wait_event; as a transfer that failed and
 *         writes to the storage. The failure of a transfer that only reads the storage
 *         does not count, since the bytes are whole. */
CM_NODISCARD cm_status cm_pending_order(const cm_pending *pending, cm_stream *consumer);

/* Take a snapshot, prune it and order a consumer after it, with the GIL released.
 * `handle` is the consumer's stream on `device` and is not touched after the call. If
 * it is being captured, the storage belongs to the graph from now on. Returns 0, or -1
 * with an exception. */
int cm_storage_order_handle(cm_storage *storage, int device, uint64_t handle);
