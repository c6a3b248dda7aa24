/* SPDX-License-Identifier: Apache-2.0 */
/* The state of the module has its types and exceptions, and the process's default
 * runtime, pools and engine.
 *
 * The runtime is opened at first use, never at import, and is asleep at first
 * (runtime.h). shutdown() closes it, and the next use opens another. Objects outlive a
 * shutdown; each remembers the `generation` in which it was made, and one of an older
 * generation counts as closed.
 *
 * Everything here is touched with the GIL held, except the deferred decrefs, which have
 * a lock of their own. */
#pragma once

#include "python/core/package.h"
#include "python/python.h"

#include <sys/types.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/pool.h"
#include "pool/registry.h"
#include "python/core/override.h"
#include "python/core/structseq.h"
#include "python/core/turns.h"
#include "transfer/engine/engine.h"
#include "transfer/file/file.h"
#include "transfer/plan/tuning.h"

enum {
    CM_POOL_FLAG_SLOTS = 8, /* host-alloc flags 0 … 7, managed flags 1 and 2 */
    /* The index of the first staging pool, through which copies pass. The staging pool
     * of page-locked memory comes first, followed by one for each device. */
    CM_STAGING_POOLS = CM_KIND_COUNT * CM_POOL_FLAG_SLOTS * CM_MAX_DEVICES,
    CM_DEFAULT_POOL_COUNT = CM_STAGING_POOLS + 1 + CM_MAX_DEVICES,
};
/* The pools that users make are numbered from 1, and default pools have the number 0.
 * All other pools have one of these special numbers. */
#define CM_NUMBER_STAGING (UINT64_MAX - 1)
#define CM_NUMBER_CLOSED UINT64_MAX
/* The size of the buffer for the text that says why devices are emulated. */
enum { CM_REASON_NBYTES = 512 };
/* Stands for the memory that register() has locked. That memory is in no pool. */
#define CM_NUMBER_REGISTERED (UINT64_MAX - 2)
#define CM_FENCE_LIMIT_NBYTES (UINT64_C(64) << 20) /* see cm_pool_config */

/* The limits of each kind of memory. Whatever pools reserve counts against them (see
 * limits.h). */
typedef struct cm_limits {
    /* The limit of all page-locked kinds together. */
    cm_budget host;
    /* Page-locked kinds use only [0], since they belong to no device. */
    cm_budget kinds[CM_KIND_COUNT][CM_MAX_DEVICES];
    /* The limit of page-locked memory that holds unless users set one. It is half of
     * the memory that the process may use, or half of a rank's share of that memory
     * (see cumem/base/ranks.py); UINT64_MAX if that is not known. */
    uint64_t default_nbytes;
    /* The user has set a limit at some time, so cumem/pools/limits.py must be asked
     * again whenever a runtime opens. */
    bool was_put;
} cm_limits;

/* The settings of copies that are not the defaults (see configure.h). */
typedef struct cm_tuning_choice {
    /* The values for this runtime are in place: the package has been asked for them, or
     * there was nothing to ask for. */
    bool is_open;
    /* The user has set a value at some time, so the package has to be asked even if the
     * environment sets none. */
    bool was_set;
    bool is_set[CM_TUNING_COUNT];
    uint64_t values[CM_TUNING_COUNT]; /* of the settings for which is_set[] is true */
} cm_tuning_choice;

/* Words that users write in calls, interned, as Python's compiler interns them too, so
 * that they can be compared by their addresses. First come the parameters that all
 * constructors share, in the order of their positions. */
#define CM_WORDS(X)                                                                    \
    X(shape)                                                                           \
    X(dtype)                                                                           \
    X(kind)                                                                            \
    X(order)                                                                           \
    X(device)                                                                          \
    X(stream)                                                                          \
    X(pool)                                                                            \
    X(C)                                                                               \
    X(F)                                                                               \
    X(requires_grad)                                                                   \
    X(untyped_storage)                                                                 \
    X(resizable)                                                                       \
    X(data_ptr)                                                                        \
    X(nbytes)                                                                          \
    X(address)                                                                         \
    X(size)                                                                            \
    X(resize)                                                                          \
    X(__dlpack__)                                                                      \
    X(__dlpack_device__)                                                               \
    X(__cuda_array_interface__)

enum {
#define CM_WORD(word) CM_WORD_##word,
    CM_WORDS(CM_WORD)
#undef CM_WORD
        CM_WORD_COUNT
};

/* Structs of buffers that have ended, which are kept for new buffers of the same kind.
 * They are linked by their member `base`. Guarded by the GIL. */
typedef struct cm_inline_list {
    struct cm_inline_buffer *first;
    uint32_t room; /* how many more may be kept */
} cm_inline_list;

struct cm_storage;

typedef struct cm_state {
    /* Opens the runtime for cm_state_runtime(), or waits for the thread that does.
     * Returns 0, or -1 with an exception. */
    int (*open_runtime)(struct cm_state *state);
    /* Called in a forked child when it first uses something that its parent had opened.
     * It abandons what belongs to the parent, and puts a runtime in place that works in
     * the child. Returns 0, or -1 with an exception. */
    int (*leave_parent)(struct cm_state *state);
    /* Gives devices that now have a context access to the memory of all pools. A
     * failure goes to the unraisable hook. */
    void (*admit_peers)(struct cm_state *state);
    /* The pointers from here down to `exchange_type` are owned, and module.c visits all
     * of them. */
    /* Device objects, made when first needed. */
    PyObject *devices[CM_MAX_DEVICES];
    /* Stream objects of handle 0 or 1; made when first needed. */
    PyObject *legacy_streams[CM_MAX_DEVICES];
    PyObject *words[CM_WORD_COUNT];
    PyObject *kind_words[CM_KIND_COUNT]; /* the texts of kinds, interned too */
    PyTypeObject *buffer_type;           /* base of the next ones; not constructible */
    PyTypeObject *buffer_types[CM_KIND_COUNT]; /* PinnedBuffer and so on */
    PyTypeObject *stream_type;
    PyTypeObject *event_type;
    PyTypeObject *transfer_type;
    PyTypeObject *row_plan_type;
    PyTypeObject *rows_type;          /* the type of iterators over a buffer */
    PyTypeObject *managed_block_type; /* the type of the blocks that `with buf.on(...)`
                                         enters */
    PyTypeObject *device_base;        /* the base of cumem.devices.device.Device */
    PyTypeObject *structseq_types[CM_STRUCTSEQ_COUNT]; /* by cm_structseq */
    PyTypeObject *pool_base;
    /* cumem.pools.pool.Pool, over pool_base; NULL until there is a Pool. */
    PyTypeObject *pool_type;
    PyObject *make_error;  /* cumem.base.errors.make; NULL until cm_errors_load() */
    PyObject *uint8_dtype; /* numpy.dtype("uint8") */
    /* A dict of the answers that Buffer.flags has given (flags.c), made when first
     * needed. */
    PyObject *known_flags;
    /* A list of callables, which are called in order before an allocation gives up. */
    PyObject *out_of_memory_callbacks;
    /* The last type that was found to have DLPack's table of C functions, or NULL. */
    PyObject *exchange_type;
    const void *exchange_table; /* the cm_dl_exchange of exchange_type */
    cm_override current_stream; /* "cumem.current_stream" */
    cm_override current_pool;   /* "cumem.current_pool" */
    cm_override entered_device; /* "cumem.current_device": ints */
    /* The number of `with` blocks of these three overrides that may be active in some
     * context. */
    uint32_t block_count;
    /* The devices of the process, opened at first use. NULL before that and after a
     * shutdown. */
    cm_runtime *runtime;    /* owned */
    uint64_t context_count; /* how many of the runtime's contexts the pools know */
    cm_registry *registry;
    cm_engine *engine;
    /* Held: the ticket of the last file that was given to the engine to be written in
     * the background. The next such file is written after it. NULL if there is none. */
    cm_ticket *last_save;
    cm_tuning_choice tuning;
    /* Whether the engine has been given its pinned pool (index 0) and its pool of
     * device d (index 1 + d). */
    bool engine_has_pool[1 + CM_MAX_DEVICES];
    /* Owned, made when first needed: see cm_state_pool_slot(). */
    cm_pool *pools[CM_DEFAULT_POOL_COUNT];
    cm_limits limits; /* outlives every pool */
    /* How many Pools have been made, which is also the number of the latest one. */
    uint64_t pool_count;
    /* The serial of the newest pool, default ones included. */
    uint64_t pool_serial;
    /* The record of the default stream of each device. One of `legacy_streams` holds
     * this record. */
    cm_stream *default_streams[CM_MAX_DEVICES];
    /* Owned, made when first needed: see cm_joining_stream(). */
    cm_stream *joining_streams[CM_MAX_DEVICES];
    cm_inline_list free_inline[CM_KIND_COUNT];
    cm_file_faults file_faults; /* set by module/testing.c */
    /* Why the runtime fell back to emulation, if it did. */
    char emulation_reason[CM_REASON_NBYTES];
    bool warned; /* EmulationWarning has been given, or is being given */
    /* The atexit handler has run, and the engine is gone for good. */
    bool exiting;
    /* The runtime is being opened in order to use memory, and not just to answer a
     * question, so the driver may be started. */
    bool wakes;
    bool opening; /* a thread is opening the runtime without the GIL */
    /* The process in which a thread is opening the runtime; its forked children have no
     * such thread. */
    pid_t opening_process;
    /* Every device is known to let the host touch managed memory at any time. */
    bool shares_managed;
    /* The runtime is open and has several devices, so that cm_state_device() has to
     * find out which one is current. */
    bool has_several;
    /* Owned memory that copy_objects.c keeps between two calls. */
    void *_Atomic spare_call;
    cm_turns turns;        /* of the interpreter, which calls that wait may shorten */
    Py_ssize_t call_count; /* see cm_state_enter() */
    uint64_t many_count;   /* calls of copy_many() so far */
    uint64_t export_total; /* how many times memory has been exported */
    /* How many times a buffer of a pool that spills was used. */
    uint64_t touch_count;
    /* Wakes a storage of a pool that spills (cm_spill_wake() in pool/spilling.h). The
     * pointer is set when the first such pool is made. */
    int (*wake_storage)(struct cm_storage *storage);
    /* The number of the next transfer that a storage remembers; > 0. */
    uint64_t transfer_total;
    /* Each shutdown adds one. Objects of an older generation are closed. */
    uint64_t generation;
    cm_list storages; /* every live cm_storage of this generation */
    /* Every open cm_stream_object; initialised where its type is made. */
    cm_list streams;
    cm_list events;       /* every open cm_event_object; also initialised there */
    cm_list pool_objects; /* every open cm_pool_object; also initialised there */
    /* Waits that a signal handler interrupted and whose threads may still be waiting;
     * see cm_device_waits_join(). */
    cm_list device_waits;
    /* Python references that threads without the GIL have dropped: see
     * deferred_decref.c. */
    cm_mutex deferred_lock;
    cm_list deferred;
    atomic_bool has_deferred; /* read without the lock */
    bool call_pending;        /* a pending call is queued; guarded by deferred_lock */
} cm_state;

static inline bool
cm_state_is_emulated(const cm_state *state)
{
    return state->runtime != NULL && state->runtime->backend == CM_BACKEND_EMULATED;
}

/* False if no context is in a `with` block of a stream, a pool or a device. In that
 * case only the defaults are current, and the overrides need not be looked up. */
static inline bool
cm_state_has_blocks(const cm_state *state)
{
    return CM_UNLIKELY(state->block_count > 0);
}

/* Return the device that device=None means. If there is only one device, it is that
 * one. Otherwise the first of these that exists is used: the device of the innermost
 * `with device:` block of this context; the device that set_current_device() chose in
 * this thread; and CUDA's current device of this thread, which PyTorch, CuPy or Numba
 * may have set. A thread without a CUDA context gets device 0.
 *
 * As in CUDA, each thread has its own current device. So a call looks it up once,
 * before it releases the GIL, and passes the result on to any other threads that work
 * for it. Needs the GIL. */
int cm_state_ask_device(const cm_state *state);
static inline int
cm_state_device(const cm_state *state)
{
    CM_NEEDS_GIL();
    return CM_LIKELY(!state->has_several) ? 0 : cm_state_ask_device(state);
}
/* Return the device that was chosen for cumem, by a `with device:` block or by
 * set_current_device(), or -1 if there is no such choice. */
int cm_state_own_device(const cm_state *state);
/* Choose a device for this thread until the shutdown. -1 takes the choice back. */
void cm_state_choose_device(const cm_state *state, int device);

/* Return the place where the default pool of a kind is kept. */
static inline cm_pool **
cm_state_pool_slot(cm_state *state, cm_kind kind, unsigned flags, int device)
{
    int row = (int)kind * CM_POOL_FLAG_SLOTS + (int)flags;
    return &state->pools[row * CM_MAX_DEVICES + device];
}

/* Code that uses a runtime, pool, engine, stream or event must enter the state first
 * and leave it afterwards, if it may release the GIL or run Python code in between.
 * shutdown() is refused meanwhile. The calls nest, and both need the GIL. */
static inline void
cm_state_enter(cm_state *state)
{
    CM_NEEDS_GIL();
    state->call_count++;
}

static inline void
cm_state_leave(cm_state *state)
{
    CM_NEEDS_GIL();
    state->call_count--;
}

/* Return the budget against which a pool of `kind` on `device` counts. The budget lives
 * as long as the module. */
static inline cm_budget *
cm_limits_budget(cm_state *state, cm_kind kind, int device)
{
    return &state->limits.kinds[kind][cm_kind_is_page_locked(kind) ? 0 : device];
}

/* Return the open runtime, borrowed. If it is not open, this opens it as CUMEM_BACKEND
 * and CUMEM_EMULATED_* say, and gives one EmulationWarning if it falls back to
 * emulation. The runtime opens asleep. In a child that was forked after the parent had
 * started the driver, it is a runtime for the host alone, which refuses whatever needs
 * the driver. Returns NULL with an exception if it fails. The call also polls the
 * engine, drops deferred references, and gives devices that have a context by now
 * access to the memory of pools. */
cm_runtime *cm_state_runtime(cm_state *state);

/* True if cm_state_runtime() would find that there is nothing to do. */
static inline bool
cm_state_is_quiet(const cm_state *state)
{
    return !atomic_load_explicit(&state->has_deferred, memory_order_relaxed)
           && (state->engine == NULL
               || atomic_load_explicit(&cm_engine_counts(state->engine)->unread,
                                       memory_order_relaxed)
                      == 0);
}

/* Return the default pool of a kind, which is made when it is first needed. Returns it
 * borrowed, or NULL with an exception. */
cm_pool *cm_state_pool(cm_state *state, cm_kind kind, unsigned flags, int device);

/* Return the engine, borrowed, after giving it the pools that copies on `device` use.
 * With `device` -1 it keeps the pools that it has. This opens the runtime if need be.
 * Returns NULL with an exception if it fails. */
cm_engine *cm_state_engine(cm_state *state, int device);
/* Let `ticket` be `last_save`, in place of the ticket that was there. With NULL there
 * is none any more. */
void cm_state_set_last_save(cm_state *state, cm_ticket *ticket);

/* A reference to a Python object that a thread without the GIL may drop (see
 * deferred_decref.c). cm_deferred_add() has the signature of cm_keep.drop. */
typedef struct cm_deferred {
    cm_list node;
    cm_state *state;  /* borrowed: the module outlives its objects */
    PyObject *object; /* owned; may be NULL */
    /* Called with the GIL to end a deferred reference that is part of something else,
     * such as a storage. NULL for one that cm_deferred_new() has made. */
    void (*then)(struct cm_deferred *deferred);
    atomic_uint refs; /* shares, if it was made by cm_deferred_new() */
} cm_deferred;
/* Make a deferred reference, which holds `object`. Returns NULL with MemoryError if
 * there is no memory. */
cm_deferred *cm_deferred_new(cm_state *state, PyObject *object);
/* Add a share, for a call that waits. The last share that is given up drops the
 * reference. */
cm_deferred *cm_deferred_share(cm_deferred *deferred);
/* Give a share up. Any thread may call this, without the GIL. */
void cm_deferred_add(void *deferred);
/* Give a share up in a thread that has the GIL, so that nothing is left for later.
 * Keeps the exception. */
void cm_deferred_end(cm_deferred *deferred);
/* Drop all deferred references. Needs the GIL. */
void cm_state_drop_deferred(cm_state *state);
/* Do the same as cm_state_drop_deferred() at the end of a call that waited, so that the
 * objects which the call kept do not linger until the main thread drops them. Keeps the
 * exception. */
void cm_state_drop_own(cm_state *state);

/* Initialise locks and lists, when the module is executed. */
void cm_state_init(cm_state *state);

static inline cm_state *
cm_state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}
