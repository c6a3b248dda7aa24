/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the emulated device share: its struct, the nouns in it, and one
 * body for each operation of ops.h. A body answers a bare code (0, a cudaError_t or one
 * of CM_E…); the wrappers that emulated.c generates do what stands before it (entries[]
 * there) and add the driver's age, the operation's name and the telling argument.
 * Locks: one, `lock`. The wrappers take it, so that every body and everything declared
 * here is called with it held; what waits does so on `changed`, and executing work lets
 * it go while bytes move. */
#pragma once

#include <sys/types.h>

#include "base/list.h"
#include "base/thread.h"
#include "runtime/emulated/emulated.h"
#include "runtime/emulated/pages.h"
#include "runtime/emulated/table.h"

typedef struct cm_emulated cm_emulated;

/* -- threads and streams ----------------------------------------------------------------- */

/* What one host thread has current, of the runtime that it called last. */
typedef struct cm_emulated_thread {
    uint64_t runtime; /* its number */
    uint64_t number;  /* never given twice */
    pid_t id;         /* the kernel's, which gives it again */
    int device;       /* -1: no context */
    int capture_mode;
} cm_emulated_thread;

enum { CM_EMULATED_ANY = -1, CM_EMULATED_HANDLE_STEP = 16 };

/* A stretch of memory that work touches; of no bytes: none. */
typedef struct cm_emulated_end {
    cm_address address;
    uint64_t nbytes;
    bool is_plain;                  /* ordinary memory: nothing to look up */
    struct cm_emulated_range *held; /* by a copy that is queued; NULL: nothing is */
} cm_emulated_end;

/* A piece of work: embed it first in a struct of your own. `run` is called on the
 * stream's thread with the lock held, `touch` by cm_emulated_touch() without. */
typedef struct cm_emulated_job {
    int32_t (*run)(cm_emulated *emulated, struct cm_emulated_job *job);
    void (*touch)(struct cm_emulated_job *job, unsigned char *dst,
                  const unsigned char *src);
    cm_emulated_end dst;
    cm_emulated_end src;
    void *owned;    /* malloc's; freed with the job */
    int device;     /* that touches memory, or CM_EMULATED_ANY */
    uint64_t stamp; /* the memory's serial when it was queued; submit notes it */
} cm_emulated_job;

/* The streams, their events and their order. */
typedef struct cm_emulated_streams {
    cm_list queues;
    cm_emulated_table by_handle;
    cm_emulated_table events;
    int32_t faults[CM_MAX_DEVICES]; /* of a job of the device; sticks until reset */
    uint64_t reused_handle;         /* of the stream destroyed last; 0: none */
    uint64_t opened;                /* streams so far */
    uint64_t queued_jobs;
} cm_emulated_streams;

/* -- memory ------------------------------------------------------------------------------ */

typedef enum cm_emulated_kind {
    CM_EMULATED_DEVICE = CM_KIND_DEVICE,
    CM_EMULATED_MANAGED = CM_KIND_MANAGED,
    CM_EMULATED_HOST = CM_KIND_PINNED,
    CM_EMULATED_REGISTERED = CM_KIND_COUNT,
    CM_EMULATED_VIRTUAL, /* addresses only; what is mapped there is of DEVICE */
    CM_EMULATED_FREED,   /* or about to be; kept for a while: late work is caught */
} cm_emulated_kind;

typedef struct cm_emulated_physical cm_emulated_physical; /* what is mapped on demand */

/* Of managed memory. */
typedef struct cm_emulated_page {
    signed char resident;  /* a location: where it is, */
    signed char wished;    /* where it was sent last, or CM_NO_LOCATION, */
    signed char preferred; /* and where it is to be, or CM_NO_LOCATION */
    bool read_mostly;
    uint64_t accessed_by; /* bit 0: by the host, bit d + 1: by device d */
} cm_emulated_page;

typedef struct cm_emulated_range {
    int device; /* first; -1: of none */
    cm_emulated_kind kind;
    cm_list node; /* of freed ones */
    unsigned flags;
    unsigned pins;           /* executing work */
    unsigned waiting;        /* copies that are queued; of registered memory only */
    cm_address address;      /* start for devices */
    unsigned char *host;     /* start for the host; NULL: it may not touch it */
    unsigned char *bytes;    /* start for the emulator */
    uint64_t nbytes;         /* from each of the starts */
    uint64_t *used_nbytes;   /* what it is counted in; NULL: nothing */
    uint64_t registered;     /* the address that was registered, maybe in a page */
    cm_emulated_pages user;  /* owned: addresses without bytes */
    cm_emulated_pages alias; /* owned: bytes */
    struct cm_emulated_page *pages; /* of managed memory; owned */
    cm_emulated_physical *physical; /* what is mapped here; else NULL, */
    uint64_t access;                /* who may touch it, by device index, */
    uint64_t serial;                /* and when it was; see cm_emulated_memory */
} cm_emulated_range;

/* used_nbytes[d] = sum of nbytes of ranges and physical memory of d; host_used_nbytes
 * likewise of host and managed ranges. Work notes `serial` when it is queued: what is
 * mapped later at the same addresses is not what it meant. */
typedef struct cm_emulated_memory {
    uint64_t used_nbytes[CM_MAX_DEVICES];
    uint64_t guests[CM_MAX_DEVICES]; /* others that may use what the device allocated */
    uint64_t host_used_nbytes;
    uint64_t counts[CM_EMULATED_FREED + 1];
    uint64_t physical_count;
    cm_emulated_table ranges; /* by end, for the host and for devices; owned */
    cm_emulated_table mapped; /* ranges in virtual ones, by end; owned */
    cm_list freed;            /* the oldest first */
    uint64_t freed_nbytes;
    cm_emulated_table physicals; /* by handle; owned */
    uint64_t serial;             /* of the newest mapping */
} cm_emulated_memory;

/* -- all of it --------------------------------------------------------------------------- */

struct cm_emulated {
    cm_runtime base; /* first: a cm_runtime * is a cm_emulated * */
    cm_emulated_config config;
    cm_mutex lock;
    cm_cond changed; /* an item is done, or work has let memory go */
    uint64_t number; /* unlike its address never one that was closed */
    cm_emulated_streams streams;
    cm_emulated_memory memory;
    cm_emulated_table modules; /* of struct module, owned */
    uint64_t contexts;         /* devices that ever had one, as bits */
    uint64_t last_number;      /* of a handle, a piece of work, a capture or a thread */
};

#define CM_EMULATED_PARAMS(...) (cm_emulated * emulated __VA_OPT__(, ) __VA_ARGS__)
#define CM_EMULATED_BODY(name, cuda, driver, arg, params, args)                        \
    int32_t cm_emulated_op_##name CM_EMULATED_PARAMS params;
CM_OPS(CM_EMULATED_BODY)
#undef CM_EMULATED_BODY

/* Codes that only the emulated device answers; the rest is in runtime.h. */
enum {
    CM_CUDA_INITIALIZATION = 3,
    CM_CUDA_INVALID_CONFIGURATION = 9,
    CM_CUDA_INVALID_PITCH = 12,
    CM_CUDA_PEER_UNSUPPORTED = 217,
    CM_CUDA_INVALID_PTX = 218,
    CM_CUDA_SYMBOL_NOT_FOUND = 500,
    CM_CUDA_ILLEGAL_ADDRESS = 700, /* what late or misplaced work comes to */
    CM_CUDA_MISALIGNED_ADDRESS = 716,
    CM_CUDA_CAPTURE_INVALIDATED = 901,
    CM_CUDA_CAPTURE_MERGE = 902,
    CM_CUDA_CAPTURE_ISOLATION = 905,
    CM_CUDA_CAPTURED_EVENT = 907,
};

/* Under any fault wrappers. */
static inline cm_emulated *
cm_emulated_of(const cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return (cm_emulated *)(uintptr_t)rt;
}

/* What none of its objects ever had, of any kind; 16 more are a module's functions. */
static inline uint64_t
cm_emulated_new_handle(cm_emulated *emulated)
{
    return 0x10000 + CM_EMULATED_HANDLE_STEP * ++emulated->last_number;
}

static inline bool
cm_emulated_is_device(const cm_emulated *emulated, int device)
{
    return device >= 0 && device < emulated->base.device_count;
}

/* -- stream.c -------------------------------------------------------------------------- */

/* A stream handle is one that `stream_create` gave, or 0 and 1 (the device's legacy
 * stream) or 2 (the thread's own), on the device that is current for the thread. What a
 * job does is not known here. */

/* What the calling thread has current. */
cm_emulated_thread *cm_emulated_self(cm_emulated *emulated);
/* True when a capture forbids the thread calls that may synchronise; this breaks it. */
bool cm_emulated_is_forbidden(const cm_emulated *emulated,
                              const cm_emulated_thread *thread);

/* Opens every gate, waits for all work and the threads' ends. Nobody calls any more. */
void cm_emulated_streams_end(cm_emulated *emulated);

/* Queue a copy of the job, a struct of `nbytes` (dropped on failure too); with `wait`
 * until it has run. On a capturing stream it becomes part of the graph, which here
 * means: it never runs. */
int32_t cm_emulated_submit(cm_emulated *emulated, uint64_t stream, cm_emulated_job *job,
                           size_t nbytes, bool wait);
/* The device of a stream, also of one that captures. */
int32_t cm_emulated_device_of(cm_emulated *emulated, uint64_t stream, int *out);
/* Free what a job that was not submitted owns, and let go of what its ends hold. */
void cm_emulated_job_drop(cm_emulated *emulated, const cm_emulated_job *job);

/* Destroy the device's streams and events and forget its fault; its work is over. */
void cm_emulated_streams_reset(cm_emulated *emulated, int device);

/* -- memory.c -------------------------------------------------------------------------- */

#define CM_EMULATED_GRANULARITY (UINT64_C(2) << 20) /* of memory mapped on demand */

/* Device memory is a reservation that nobody may touch plus the bytes somewhere else,
 * between guard pages. Freed memory becomes untouchable and its addresses stay taken
 * for a while, so that late work is caught. Freeing waits for executing work that has
 * pinned the range, unregistering for copies that are queued. */

/* Free all ranges, in use or not, and the addresses kept; every device was reset. */
void cm_emulated_memory_fini(cm_emulated *emulated);
/* Free whatever `device` still has, and let it use no other's memory. */
void cm_emulated_memory_reset(cm_emulated *emulated, int device);

/* How [address, address + nbytes) lies to the known ranges. */
typedef enum cm_emulated_found {
    CM_EMULATED_UNKNOWN, /* touches none: ordinary host memory */
    CM_EMULATED_INSIDE,  /* inside exactly one, or what is mapped side by side */
    CM_EMULATED_BROKEN   /* over an edge, or freed */
} cm_emulated_found;

/* A snapshot of where a stretch of addresses lies. */
typedef struct cm_emulated_place {
    cm_emulated_range *range;       /* the first; borrowed: until the lock is let go */
    const cm_emulated_table *table; /* where the ranges are */
    uint64_t nbytes;
    cm_emulated_kind kind;
    int device;
    uint64_t access;      /* by device index: which may touch all of it */
    uint64_t serial;      /* of the newest range; see cm_emulated_memory */
    cm_address address;   /* the same byte for devices */
    void *host;           /* the same byte for the host; NULL for device memory */
    unsigned char *bytes; /* the same byte for the emulator */
    bool by_device;       /* the address asked for is one that a device may use */
} cm_emulated_place;

/* *out is of use when it is inside. */
cm_emulated_found cm_emulated_find(const cm_emulated *emulated, uint64_t address,
                                   uint64_t nbytes, cm_emulated_place *out);

/* Let go of the lock for the job's touch, with both ends kept from going away
 * meanwhile: of a job of a device only an address that it may use will do, and managed
 * memory comes to it; memory mapped after the job was queued will not do. Fails:
 * CM_CUDA_ILLEGAL_ADDRESS, before the touch or because the memory was unmapped under
 * it. */
int32_t cm_emulated_touch(cm_emulated *emulated, cm_emulated_job *job);
