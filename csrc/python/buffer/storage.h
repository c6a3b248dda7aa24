/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that buffers share. A view holds its storage, the storage holds its pool
 * block, registration or foreign owner: every pointer keeps the memory. */
#pragma once

#include <stdatomic.h>

#include "python/core/numpy_call.h"
#include "python/core/recording.h"
#include "python/device/objects.h"
#include "transfer/engine/handle.h"

/* -- transfers of it ---------------------------------------------------------------------- */

/* What a transfer does to a storage: bytes from its first on, gaps included. */
typedef struct cm_extent {
    uint64_t low;
    uint64_t high;
    bool writes;
} cm_extent;

#define CM_EXTENT_ALL(writes) ((cm_extent){0, UINT64_MAX, (writes)})

/* A transfer that a storage remembers, finished perhaps. */
typedef struct cm_writer {
    cm_ticket *ticket; /* held */
    cm_extent extent;
    uint64_t number; /* in the order in which they came */
    bool covered;    /* what would have to wait for it waits for a later one, which
                        waits for it */
} cm_writer;

/* Must what does that come after it? */
static inline bool
cm_writer_is_in_the_way(const cm_writer *writer, cm_extent extent)
{
    return (writer->extent.writes || extent.writes) && writer->extent.low < extent.high
           && extent.low < writer->extent.high;
}

/* -- what streams do to it ------------------------------------------------------------------ */

/* What one stream was given to do with a storage, beside the stream itself in `uses`.
 *
 * Work of two streams need not be ordered if neither writes what the other touches:
 * four GPUs that read rows of one page-locked batch, or write rows of their own to it,
 * do so at the same time. So a copy of ours says which bytes it reads and writes, and a
 * later one comes only after the streams that are in its way. Of each stream the first
 * and the last byte that it reads, and that it writes, are kept, which may be more than
 * it touches but never less. All zero is a stream of which nothing is known, as others
 * queue what they like on it: it may write everything.
 *
 * A stream that was come after is forgotten where every later call that it would be in
 * the way of has to come after the one that came after it. It is not where such a call
 * only read: a second reader has to wait for the writer too, but not for the first.
 * That the first need not ask the writer's stream again is what `followed` remembers.
 */
typedef struct cm_use_span {
    cm_extent reads; /* `writes` of the first two says nothing; empty: low == high */
    cm_extent writes;
    bool is_known;
    uint64_t named_at;    /* the storage's use_calls, when it was last given work */
    cm_extent followed;   /* it came after what was in the way of this … */
    uint64_t followed_at; /* … and was named by then; 0: after nothing */
} cm_use_span;

/* -- itself ------------------------------------------------------------------------------- */

/* Counted in one number, so that one of them sees that it was the last. */
#define CM_HOLD_EXPORT UINT64_C(1)
#define CM_HOLD_TRANSFER (UINT64_C(1) << 32)

/* One piece of memory, shared by all buffers that look at it. Counted atomically:
 * DLPack deleters drop it from threads without the GIL. Everything else needs the GIL.
 * Exactly one of block, registration+view, foreign is what keeps the bytes. */
typedef struct cm_storage {
    atomic_size_t refs;
    atomic_uint_least64_t holds; /* CM_HOLD_*: what its bytes must outlive */
    cm_list node;                /* in state->storages while open */
    cm_state *state;             /* borrowed */
    cm_kind kind;                /* what consumers may do with it */
    cm_kind residency;           /* where the planner thinks the bytes are */
    int device;                  /* index; 0 for pageable memory that has none */
    unsigned flags;     /* of cudaHostAlloc / cudaMallocManaged / cudaHostRegister */
    void *host;         /* first byte for the host; NULL for device memory */
    cm_address address; /* first byte for the device; 0 if it cannot reach it */
    uint64_t nbytes;
    bool readonly;
    atomic_bool closed; /* by free(), a with block or shutdown(): the bytes are gone, or
                           go with the last hold */
    bool was_exported;  /* someone may work on it that we cannot see: fence on free */
    bool is_file;       /* foreign, and known to be a mapped file's */
    bool was_named; /* __cuda_array_interface__ gave the address away: its consumers may
                       have kept no more than the object */
    bool unlocks;   /* an import whose pages stay locked until then */
    bool is_advised;   /* managed memory, which goes back without what it was told */
    bool is_lost;      /* a forked child does not have its bytes; closed as well */
    bool is_traced;    /* tracemalloc knows of the block */
    bool was_captured; /* a graph may use it at any time: the pool keeps the block */
    /* Of managed memory, for thrashing.c: who used which bytes last, and how often that
     * changed since when. */
    bool side_is_device;
    bool side_was_told; /* the warning was given; this and what follows means nothing
                           while side_high is 0 */
    uint32_t side_turns;
    uint64_t side_since_ns;
    int64_t side_low;
    int64_t side_high;   /* 0: nobody used any */
    uint64_t late_count; /* fills left to streams: writes that no ticket tells of */
    uint64_t seen_count; /* so many of them were waited for */
    size_t view_count;   /* exports through the buffer protocol, ever; each consumer may
                             have kept no more than the object, so the bytes then go with
                             the last reference. Our own arrays take theirs back. GIL */
    /* Of the view that is the only export there ever was, while it may turn out to have
     * been none (cm_storage_watch_view()): */
    const void *only_view;   /* where its consumer keeps it; NULL: there is none */
    uint64_t only_number;    /* state->export_total when it was given */
    Py_ssize_t only_refs;    /* of the buffer, before */
    cm_numpy_call only_call; /* within which it was asked for */
    cm_pool *pool;   /* kept by the block, held if there is none; NULL for foreign
                        memory */
    cm_block *block; /* owned, of pool */
    cm_registration *registration; /* owned; NULL unless register() made it */
    PyObject *foreign; /* owned: keeps foreign memory alive (object, memoryview,
                          capsule) */
    PyObject *memory;  /* owned: what foreign bytes are in, where their owner can put
                          others in their place (memory_watch.h); NULL: nothing such */
    uint64_t memory_address; /* its first byte and size, where is_watched */
    uint64_t memory_nbytes;
    bool is_watched; /* each use compares them with what they are */
    void (*foreign_drop)(void *argument); /* instead of, beside `foreign`: C clean-up */
    void *foreign_argument;
    cm_stream **uses;       /* held streams that worked on it, no duplicates; GIL */
    uint32_t lasting_count; /* so many of them, the first, are others' as well: what is
                               queued there may use it for as long as it lives */
    uint64_t use_calls;     /* times that one was named */
    cm_stream *first_use;   /* uses points here while one is enough */
    uint32_t use_count;
    uint32_t use_capacity;
    cm_use_span *spans;  /* of as many uses, or NULL: nothing is known of any */
    uint32_t span_count; /* use_count or 0 */
    uint32_t prune_at;   /* so many uses: look again which streams are idle */
    uint32_t span_capacity;
    bool first_is_lent; /* uses[0] is the state's own record, not held */
    void (*free_struct)(struct cm_storage *storage); /* at the end of all */
    cm_writer *pending; /* unfinished transfers of it, and some finished; GIL */
    uint32_t writer_count;
    uint32_t writer_capacity;
    uint32_t forget_at;    /* so many of them: look again which have finished */
    uint64_t failed_total; /* the engine's count when it last looked */
    uint64_t many_call; /* the last copy_many() that named it, and which it was there */
    size_t many_index;
    cm_use_span first_span; /* spans points here while one is enough */
    cm_deferred deferred;   /* so that what is let go without the GIL cannot fail */
    atomic_bool deferring;  /* it waits, with a reference, for the bytes to go */
} cm_storage;

/* What tracemalloc knows the block by. */
static inline uintptr_t
cm_storage_place(const cm_storage *storage)
{
    uintptr_t place = (uintptr_t)storage->host;
    return place != 0 ? place : (uintptr_t)storage->address;
}

/* Tell tracemalloc of the block. GIL. */
static inline void
cm_storage_trace(cm_storage *storage)
{
    storage->is_traced =
        cm_tracing.track != NULL
        && cm_tracing.track(CM_TRACE_DOMAIN, cm_storage_place(storage), storage->nbytes)
               == 0;
}

/* A new storage with refs 1, in state->storages, nothing filled in but what is given.
 * NULL with MemoryError. */
cm_storage *cm_storage_new(cm_state *state, cm_kind kind, int device);
/* The same in place; `fresh`: never initialised before. */
void cm_storage_init(cm_storage *storage, cm_state *state, cm_kind kind, int device,
                     bool fresh);
cm_storage *cm_storage_hold(cm_storage *storage);
/* Any thread. With no GIL, Python references are let go later. */
void cm_storage_release(cm_storage *storage, bool have_gil);
/* Close it. The bytes go now, or when the last transfer that uses it is done; what went
 * through the buffer protocol, with the last reference. BufferError while exported,
 * then nothing is done; CudaError where giving back failed. 0 or -1. */
int cm_storage_close(cm_storage *storage);
/* The same for the end of a `with` block: exports put it off too. Failures go to the
 * unraisable hook. */
void cm_storage_retire(cm_storage *storage);
/* Close it and unlock registered pages now, once the streams that use them are done
 * (GIL released). Nothing else may use it. 0, or -1 with CudaError. */
int cm_storage_unlock(cm_storage *storage);
/* "cannot <what> with 2 live exports": 0, or -1 with BufferError. */
int cm_storage_check_not_exported(const cm_storage *storage, const char *what);
/* In a forked child, before anything else of the parent's is left: the host's bytes are
 * ordinary memory from now on, and those that the child has not got are lost to it.
 * GIL. */
void cm_storage_inherit(cm_storage *storage);
/* cm_storage_check_open() where there is more to look at than two flags. */
int cm_storage_look_closer(const cm_storage *storage);

/* 0, or -1 with ValueError "… is closed", with BufferError where the owner of foreign
 * memory moved it, RuntimeError in a child that lost it. It is inline because a batch
 * asks it of both ends of each of its many thousand pairs. */
static inline int
cm_storage_check_open(const cm_storage *storage)
{
    if (CM_UNLIKELY(storage->closed || storage->is_watched)) {
        return cm_storage_look_closer(storage);
    }
    return 0;
}

/* Remember that `stream` works on it. Its index, or -1 with MemoryError. GIL held. */
int64_t cm_storage_add_use(cm_storage *storage, cm_stream *stream);
/* The same where the work is ours, and touches no more than `extent`. */
int64_t cm_storage_add_use_of(cm_storage *storage, cm_stream *stream, cm_extent extent);
/* Must work of `extent` on `stream` (NULL: on none that it remembers) come after what
 * was given to uses[index]? Not what is its own, nor what it came after before. */
bool cm_storage_is_in_the_way(const cm_storage *storage, uint32_t index,
                              cm_extent extent, const cm_stream *stream);
/* The same of a stream on which others work on it, now or later. 0 or -1. */
int cm_storage_add_lasting_use(cm_storage *storage, cm_stream *stream);
/* A call of ours of `extent` is done or, if `by` is not NULL, queued there, and came
 * after what was in its way when `use_calls` was read; `all`: after everything. Forget
 * what no later call can have to wait for any more, but for `by` and lasting ones.
 * Nothing happens where another was named since. GIL, released for streams that end. */
void cm_storage_forget_uses(cm_storage *storage, const cm_stream *by, cm_extent extent,
                            bool all, uint64_t use_calls);
/* Forget streams that are idle, where so many have gathered that it is worth asking:
 * each of them need not have been in the way of another. GIL, released for streams that
 * end. */
void cm_storage_prune_uses(cm_storage *storage);
/* Uses beyond which a call comes after all of them, so that it may forget them: busy
 * streams that live for one copy would gather otherwise. */
enum { CM_MOST_USES = 64 };
/* Wait (GIL released) for unfinished transfers into it, so that the host reads what was
 * written; with `streams` for its streams' work too. 0, or -1 with the failure. */
int cm_storage_wait(cm_storage *storage, bool streams);
/* The transfers alone, not what fill() queued: for work that comes after it anyway. */
int cm_storage_wait_pending(cm_storage *storage);
/* Keep free() and shutdown() of other threads away (BufferError) while a call of ours
 * works on it without the GIL. */
void cm_storage_pin(cm_storage *storage);
void cm_storage_unpin(cm_storage *storage);
/* Count an export, which ends as a pin does; was_exported is set for good. */
void cm_storage_begin_export(cm_storage *storage);
/* Between begin and end: `view` is given to a memoryview, and nothing was exported
 * before. Where NumPy asked for it and gives it back within the same call
 * (numpy_call.h), as in numpy.array(buf), nobody kept the buffer and nothing else was
 * exported meanwhile, the bytes were read by the processor and never left us. Other
 * consumers may ask for a view, start a copy of the device and give the view back at
 * once. GIL. */
void cm_storage_watch_view(cm_storage *storage, const void *view, Py_ssize_t refs);
/* It comes back: true, and was_exported is unset, if it was none. */
bool cm_storage_unwatch_view(cm_storage *storage, const void *view, Py_ssize_t refs);
/* Without the GIL, and a reference as well. */
void cm_storage_drop_export(cm_storage *storage);
/* A reference of a transfer, and its end, which fits cm_keep.drop. */
cm_storage *cm_storage_hold_transfer(cm_storage *storage);
void cm_storage_drop_transfer(void *storage);

/* Live Py_buffer exports, DLPack capsules and tensors, and pins. */
static inline size_t
cm_storage_count_exports(const cm_storage *storage)
{
    return atomic_load(&storage->holds) % CM_HOLD_TRANSFER;
}

/* A stream that it remembers was given work that writes it: is it waited for? GIL. */
static inline bool
cm_storage_is_late(const cm_storage *storage)
{
    return storage->seen_count != storage->late_count;
}

/* Is a transfer of it not done? */
static inline bool
cm_storage_is_in_transfer(const cm_storage *storage)
{
    return atomic_load(&storage->holds) >= CM_HOLD_TRANSFER;
}

/* Where `region`, of its memory, lies in it. */
cm_extent cm_storage_extent(const cm_storage *storage, const cm_region *region,
                            bool writes);
/* Remember an unfinished transfer of it, which came after all that were in the way of
 * those with numbers below `seen` (0: none). 0, or -1. GIL held. */
int cm_storage_add_writer(cm_storage *storage, cm_ticket *ticket, cm_extent extent,
                          uint64_t seen);
/* A transfer into it ended well before it could be remembered: failures of earlier ones
 * are no longer told to whoever uses the memory. GIL. */
void cm_storage_note_written(cm_storage *storage);
/* Wait (GIL released) until no transfer of anybody uses it. 0, or -1 with
 * what a signal handler raised. */
int cm_storage_wait_transfers(cm_storage *storage);

/* A new storage's first stream, which needs no memory. */
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

/* -- its end ------------------------------------------------------------------------------ */

/* Move what `storage` gives back into another that nobody else knows, so that giving it
 * back may wait without the GIL; it may not be moved. GIL. */
void cm_storage_detach(cm_storage *storage, cm_storage *out);
/* Give back what needs no Python; must not hold the GIL where it may wait. In a forked
 * child all of it is leaked. Waits for the streams that use registered memory, and for
 * the device where others may (`runtime` NULL: that was done). Fails: host_unregister or
 * such a wait (everything is gone all the same). */
CM_NODISCARD cm_status cm_storage_free_parts(cm_storage *detached, cm_runtime *runtime);
/* Tell the recorder of pages of others that were locked, or are let go. */
void cm_storage_note_registered(const cm_storage *storage, uint8_t op);
/* Then, with the GIL, let go of the foreign owner. */
void cm_storage_drop_foreign(cm_storage *detached);

/* -- work that still goes on in it, and how a stream comes after that ----------------- */

/* A snapshot: held streams that worked on a storage, held transfers of it. */
typedef struct cm_pending {
    cm_state *state; /* borrowed; NULL: nothing was taken */
    cm_stream **streams;
    uint32_t stream_count;
    cm_ticket **tickets;
    uint32_t ticket_count;
    uint64_t use_calls; /* the storage's */
    bool captured;      /* prune found a stream that is being captured */
} cm_pending;

/* 0, or -1 with MemoryError. From here to the give shutdown() is refused. GIL held. */
int cm_pending_take(const cm_storage *storage, cm_pending *out);
void cm_pending_give(cm_pending *pending);

/* Forget what has finished, and what `consumer`, a stream's handle on `device` (-1: it
 * is not known yet), was itself given. A stream that is being captured may not be
 * asked; nothing that was captured runs now, so that only a consumer, which may join
 * the capture, has to know of it. Fails: stream_is_capturing, stream_query. */
CM_NODISCARD cm_status cm_pending_prune(cm_pending *pending, int device,
                                        uint64_t consumer);

/* Make `consumer` wait, on the device, for everything that is left; what runs on
 * `consumer` itself needs nothing. Blocks as cm_ticket_order does.
 * Fails: event_create, event_record, stream_wait_event, a transfer's own failure. */
CM_NODISCARD cm_status cm_pending_order(const cm_pending *pending, cm_stream *consumer);

/* take, prune and order, GIL released; `handle` is a consumer's stream on `device`, not
 * touched after the call. Where it is being captured the storage is the graph's from
 * now on. 0, or -1 with an exception. */
int cm_storage_order_handle(cm_storage *storage, int device, uint64_t handle);
