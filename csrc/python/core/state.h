/* SPDX-License-Identifier: Apache-2.0 */
/* Module state: the types, the exceptions and the process-wide defaults (runtime,
 * pools, engine). The runtime opens at first use, never at import. All of it is touched
 * with the GIL held, but for the deferred decrefs, which have a lock of their own. */
#pragma once

#include "python/core/package.h"
#include "python/python.h"

#include <sys/types.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/pool.h"
#include "pool/registry.h"
#include "python/core/override.h"
#include "transfer/engine/engine.h"
#include "transfer/file/file.h"
#include "transfer/plan/tuning.h"

enum {
    CM_POOL_FLAG_SLOTS = 8, /* host-alloc flags 0 … 7, managed flags 1 and 2 */
    /* From here on those that copies go through: the page-locked one, each device's. */
    CM_STAGING_POOLS = CM_KIND_COUNT * CM_POOL_FLAG_SLOTS * CM_MAX_DEVICES,
    CM_DEFAULT_POOL_COUNT = CM_STAGING_POOLS + 1 + CM_MAX_DEVICES,
};
/* Of pools that are not the n-th that a user made, nor (0) a default one. */
#define CM_NUMBER_STAGING (UINT64_MAX - 1)
#define CM_NUMBER_CLOSED UINT64_MAX
enum { CM_REASON_NBYTES = 512 }; /* of a text that says why devices are emulated */
#define CM_NUMBER_REGISTERED                                                           \
    (UINT64_MAX - 2) /* no pool: what register() has locked                            \
                      */
#define CM_FENCE_LIMIT_NBYTES (UINT64_C(64) << 20) /* see cm_pool_config */

/* What may be reserved of each kind: pools charge these (see limits.h). */
typedef struct cm_limits {
    cm_budget host;                                 /* page-locked kinds together */
    cm_budget kinds[CM_KIND_COUNT][CM_MAX_DEVICES]; /* of page-locked kinds [0] alone */
    uint64_t half_nbytes; /* of the memory the process may use; UINT64_MAX: unknown */
    bool was_put; /* one was, ever: cumem/limits.py has to know of a new runtime */
} cm_limits;

/* How copies are made, but for defaults (see configure.h). */
typedef struct cm_tuning_choice {
    bool is_open;    /* the package was asked for what holds */
    bool was_set;    /* ever: it may know more than the environment says */
    bool has_looked; /* for figures that are kept */
    bool as_real;    /* a test: treat the emulated device as a real one */
    bool is_set[CM_TUNING_COUNT];
    uint64_t values[CM_TUNING_COUNT];
} cm_tuning_choice;

/* What calls are written with, as the compiler of a call interns it: first the
 * parameters that all constructors share, in the order of their places. */
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
    X(resize)

enum {
#define CM_WORD(word) CM_WORD_##word,
    CM_WORDS(CM_WORD)
#undef CM_WORD
        CM_WORD_COUNT
};

/* Ended buffers kept for the next one of their type, linked by their base. GIL */
typedef struct cm_inline_list {
    struct cm_inline_buffer *first;
    uint32_t room; /* so many more may be kept */
} cm_inline_list;

typedef struct cm_state {
    /* How cm_state_runtime() opens the runtime, or waits for the thread that does: 0,
     * or -1 with an exception. */
    int (*when_closed)(struct cm_state *state);
    /* What a forked child does at its first use with what its parent had opened: leaves
     * it and opens what works there. 0, or -1 with an exception. */
    int (*when_forked)(struct cm_state *state);
    /* How all pools' memory is opened to devices that have got a context; a failure
     * goes to the unraisable hook. */
    void (*when_contexts_grow)(struct cm_state *state);
    /* Owned, as is every pointer down to `exchange_type`: module.c visits them all. */
    PyObject *devices[CM_MAX_DEVICES];        /* Device objects, made at first need */
    PyObject *legacy_streams[CM_MAX_DEVICES]; /* Stream objects of handle 0/1; lazy */
    PyObject *words[CM_WORD_COUNT];
    PyObject *kind_words[CM_KIND_COUNT]; /* their texts, interned as well */
    PyTypeObject *buffer_type;           /* base of the next ones; not constructible */
    PyTypeObject *buffer_types[CM_KIND_COUNT]; /* PinnedBuffer and so on */
    PyTypeObject *stream_type;
    PyTypeObject *event_type;
    PyTypeObject *transfer_type;
    PyTypeObject *rows_type;          /* what iterates over a buffer */
    PyTypeObject *managed_block_type; /* what `with buf.on(...)` enters */
    PyTypeObject *device_base;        /* of cumem.devices.Device */
    PyTypeObject *pool_base;
    PyTypeObject *pool_type; /* cumem.pools.Pool, over it; NULL until there is a Pool */
    PyObject *make_error;    /* cumem.errors.make; NULL until cm_errors_load() */
    PyObject *uint8_dtype;   /* numpy.dtype("uint8") */
    PyObject *known_flags;   /* dict: what Buffer.flags has answered (flags.c); lazy */
    PyObject *out_of_memory_callbacks; /* list: called in order before giving up */
    PyObject *exchange_type;           /* or NULL: the last that had such a table */
    const void *exchange_table;        /* cm_dl_exchange, of exchange_type */
    cm_override current_stream;        /* "cumem.current_stream" */
    cm_override current_pool;          /* "cumem.current_pool" */
    cm_override entered_device;        /* "cumem.current_device": ints */
    /* the process's devices, opened at first use; NULL before and after shutdown */
    cm_runtime *runtime;    /* owned */
    uint64_t context_count; /* of the runtime's contexts, those that pools know */
    cm_registry *registry;
    cm_engine *engine;
    cm_tuning_choice tuning;
    bool engine_has_pool[1 + CM_MAX_DEVICES]; /* the pinned one, those of devices */
    cm_pool *pools[CM_DEFAULT_POOL_COUNT]; /* owned, lazy: see cm_state_pool_slot() */
    cm_limits limits;                      /* outlives every pool */
    uint64_t pool_count;                   /* so many Pools were made: names them */
    uint64_t pool_serial;                  /* of the last pool, default ones too */
    cm_stream *default_streams[CM_MAX_DEVICES]; /* of legacy_streams; held as long */
    cm_inline_list free_inline[CM_KIND_COUNT];
    cm_file_faults file_faults;              /* cumem/_testing.py's */
    char emulation_reason[CM_REASON_NBYTES]; /* the runtime's, where it was fallen back
                                                to */
    bool warned;           /* EmulationWarning was given, or is being given */
    bool exiting;          /* the atexit handler ran: the engine is gone for good */
    bool wakes;            /* what is opened next is for use, not for a question */
    bool opening;          /* a thread opens the runtime without the GIL */
    pid_t opening_process; /* where that is; a forked child has no such thread */
    bool shares_managed; /* every device lets the host touch managed memory at any time;
                            false: perhaps not */
    bool has_several; /* open with several devices, so that which one is current has to
                         be found out: see cm_state_device() */
    void *_Atomic spare_call; /* owned memory: copy_objects.c's, between two calls */
    Py_ssize_t call_count;    /* see cm_state_enter() */
    uint64_t many_count;      /* calls of copy_many() so far */
    uint64_t export_total;    /* times that memory was given to others, ever */
    uint64_t writer_total;    /* the number of the next that a storage remembers; > 0 */
    uint64_t generation; /* +1 at each shutdown: objects of an older one are closed */
    cm_list storages;    /* every live cm_storage of this generation */
    cm_list streams;     /* every open cm_stream_object; initialised by its registrar */
    cm_list events;      /* every open cm_event_object; the same */
    cm_list pool_objects; /* every open cm_pool_object; the same */
    cm_list device_waits; /* that signals ended: see cm_device_waits_join() */
    /* Python references dropped by threads without the GIL, deferred later */
    cm_mutex deferred_lock;
    cm_list deferred;
    atomic_bool has_deferred; /* a look without the lock */
    bool call_pending;        /* a pending call is queued; deferred_lock */
} cm_state;

static inline bool
cm_state_is_emulated(const cm_state *state)
{
    return state->runtime != NULL && state->runtime->backend == CM_BACKEND_EMULATED;
}

/* What device=None means. Where there is one device it is that, without a look at
 * anything. Else it is cumem's own where that was chosen: the device of the innermost
 * `with device:` block of this context, else what set_current_device() chose in this
 * thread. Where nobody chose, it is CUDA's of this thread, as PyTorch, CuPy or Numba
 * may have set it; a thread without a context has device 0. Each thread has its own, as
 * in CUDA, so an answer holds for the call that asked: a call asks once, before it
 * gives the GIL away, and what it starts in other threads goes on with the answer. GIL.
 */
int cm_state_ask_device(const cm_state *state);
static inline int
cm_state_device(const cm_state *state)
{
    CM_NEEDS_GIL();
    return CM_LIKELY(!state->has_several) ? 0 : cm_state_ask_device(state);
}
/* The first two of these alone; -1: nobody chose one. */
int cm_state_own_device(const cm_state *state);
/* Choose for this thread until the shutdown; -1: nothing is chosen any more. */
void cm_state_choose_device(const cm_state *state, int device);

/* Where the default pool of a kind is kept. */
static inline cm_pool **
cm_state_pool_slot(cm_state *state, cm_kind kind, unsigned flags, int device)
{
    int row = (int)kind * CM_POOL_FLAG_SLOTS + (int)flags;
    return &state->pools[row * CM_MAX_DEVICES + device];
}

/* Around whatever uses a runtime, pool, engine, stream or event while the GIL may go to
 * another thread or Python code may run: between the two shutdown() is refused. They
 * nest. GIL held. */
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

/* What a pool of `kind` on `device` counts against. Never freed before the module. */
static inline cm_budget *
cm_limits_budget(cm_state *state, cm_kind kind, int device)
{
    return &state->limits.kinds[kind][cm_kind_is_page_locked(kind) ? 0 : device];
}

/* The open runtime, opening it first if need be (CUMEM_BACKEND, CUMEM_EMULATED_*);
 * warns EmulationWarning once when it falls back. It opens asleep, and in a child that
 * was forked from a process at work it is a runtime for the host alone, which refuses
 * what needs the driver. NULL with an exception set on failure. Also polls the engine,
 * drops what was deferred and opens the pools' memory to devices that got a context
 * since. */
cm_runtime *cm_state_runtime(cm_state *state);

/* True when cm_state_runtime() would only look. */
static inline bool
cm_state_is_quiet(const cm_state *state)
{
    return !atomic_load_explicit(&state->has_deferred, memory_order_relaxed)
           && (state->engine == NULL
               || atomic_load_explicit(&cm_engine_counts(state->engine)->unread,
                                       memory_order_relaxed)
                      == 0);
}

/* The default pool of a kind, made on first need. Borrowed; NULL with an exception. */
cm_pool *cm_state_pool(cm_state *state, cm_kind kind, unsigned flags, int device);

/* The engine with its pools set up for `device` (-1: as they are). Borrowed. */
cm_engine *cm_state_engine(cm_state *state, int device);

/* Drop a reference from a thread that may not hold the GIL: done at once where it does
 * (`have_gil`), else left to the interpreter's main thread (Py_AddPendingCall) or the
 * next call into cumem. Signature fits cm_keep.drop through cm_deferred. */
typedef struct cm_deferred {
    cm_list node;
    cm_state *state;  /* borrowed: the module outlives its objects */
    PyObject *object; /* owned; may be NULL */
    /* Or NULL: of one that is part of something else, which this ends, with the GIL. */
    void (*then)(struct cm_deferred *deferred);
    atomic_uint refs; /* of one that stands alone */
} cm_deferred;
cm_deferred *cm_deferred_new(cm_state *state, PyObject *object); /* holds object; NULL:
                                                              MemoryError */
/* One more share of it, of a call that waits: the last to let go drops it. */
cm_deferred *cm_deferred_share(cm_deferred *deferred);
void cm_deferred_add(void *deferred); /* any thread, without the GIL; takes the share */
/* The same with the GIL held: nothing is left for later. Keeps the exception. */
void cm_deferred_end(cm_deferred *deferred);
void cm_state_drop_deferred(cm_state *state); /* GIL held */
/* At the end of a call that waited: what it kept goes now, not when the main thread
 * comes to it. Keeps the exception. */
void cm_state_drop_own(cm_state *state);

/* Module exec: locks and lists. */
void cm_state_init(cm_state *state);

static inline cm_state *
cm_state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}
