/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the emulated device share: its struct, the nouns in it, and one
 * body for each operation of ops.h. A body answers a bare code (0, a cudaError_t or one
 * of CM_E…); the wrappers that emulated.c generates add the driver's age, the
 * operation's name and the telling argument.
 * Locks: one, `lock`. The wrappers take it, so that every body and everything declared
 * here is called with it held; what waits does so on `changed`, and executing work lets
 * it go while bytes move. */
#ifndef CM_RUNTIME_EMULATED_PRIVATE_H
#define CM_RUNTIME_EMULATED_PRIVATE_H

#include <pthread.h>
#include <sys/types.h>

#include "base/list.h"
#include "base/thread.h"
#include "runtime/emulated/emulated.h"
#include "runtime/emulated/handles.h"
#include "runtime/emulated/pages.h"

typedef struct cm_emulated cm_emulated;

/* -- threads and streams ----------------------------------------------------------------- */

/* What one host thread has current. */
typedef struct cm_emulated_thread {
    struct cm_emulated_thread *next; /* owned by the runtime */
    pid_t id;                        /* the kernel's */
    int device;                      /* -1: no context */
    int capture_mode;
    struct cm_stream_thread *own[CM_MAX_DEVICES]; /* per-thread streams; borrowed */
} cm_emulated_thread;

/* A piece of work: embed it first in a struct of your own. Both are called with the
 * lock held; `run`, on the stream's thread, lets it go while it does what takes long.
 */
typedef struct cm_emulated_job {
    int32_t (*run)(cm_emulated *emulated, struct cm_emulated_job *job);
    void (*drop)(struct cm_emulated_job *job); /* once, whatever happened */
} cm_emulated_job;

/* The streams, their events and their order. */
typedef struct cm_emulated_streams {
    cm_list queues;
    cm_emulated_handles by_handle;
    cm_emulated_handles events;
    struct cm_stream_thread *legacy[CM_MAX_DEVICES]; /* borrowed; NULL: not made yet */
    struct cm_stream_thread *fence[CM_MAX_DEVICES];
    int32_t faults[CM_MAX_DEVICES]; /* of a job of the device; sticks until reset */
    uint64_t next_handle;
    uint64_t reused_handle; /* of the stream destroyed last; 0: none */
    uint64_t next_id;
    uint64_t next_event;
    uint64_t next_capture;
    uint64_t queued;
    uint32_t capturing;
} cm_emulated_streams;

/* -- memory ------------------------------------------------------------------------------ */

typedef enum cm_emulated_kind {
    CM_EMULATED_DEVICE,
    CM_EMULATED_MANAGED,
    CM_EMULATED_HOST,
    CM_EMULATED_REGISTERED,
    CM_EMULATED_VIRTUAL, /* addresses only; what is mapped there is DEVICE to callers */
} cm_emulated_kind;

/* Device memory without an address of its own. */
typedef struct cm_emulated_physical {
    int device;
    bool is_released; /* the handle is gone; freed with the last place */
    bool is_closed;   /* was in two places and left one: no device is let in later, as
                         memory for RDMA behaves on a real device (driver 580) */
    unsigned places;  /* mappings of it */
    uint64_t nbytes;
    uint64_t offset; /* in the store */
} cm_emulated_physical;

typedef struct cm_emulated_mapping {
    uint64_t offset; /* from the start of the range */
    uint64_t nbytes;
    cm_emulated_physical *physical;
    uint64_t serial; /* of when it was made; see cm_emulated_memory */
    uint64_t access; /* by device index */
    unsigned pins;   /* executing work */
    bool is_leaving; /* being unmapped: not there for anyone else */
} cm_emulated_mapping;

typedef struct cm_emulated_range {
    cm_emulated_kind kind;
    int device; /* -1: of none */
    unsigned flags;
    unsigned pins;           /* executing work */
    unsigned waiting;        /* copies that are queued; of registered memory only */
    bool is_gone;            /* freed with the last of them */
    cm_address address;      /* start for devices */
    unsigned char *host;     /* start for the host; NULL: it may not touch it */
    unsigned char *bytes;    /* start for the emulator */
    uint64_t nbytes;         /* from each of the starts */
    uint64_t budget_nbytes;  /* taken from the budget */
    uint64_t registered;     /* the address that was registered, maybe inside a page */
    cm_emulated_pages user;  /* owned: addresses without bytes */
    cm_emulated_pages alias; /* owned: bytes */
    cm_emulated_mapping *mappings; /* owned; sorted; virtual only */
    size_t mapping_count;
    size_t mapping_capacity;
    size_t page_count;     /* of alias; managed only */
    signed char *resident; /* by page: device index or CM_HOST_LOCATION; owned */
    signed char *wished;   /* by page: … or CM_NO_LOCATION; owned */
} cm_emulated_range;

typedef struct cm_emulated_span {
    uint64_t start;
    uint64_t end;
    cm_emulated_range *range;
    bool is_first;  /* the span by which the range is freed */
    bool by_device; /* devices may use these addresses */
} cm_emulated_span;

enum { CM_EMULATED_FREED_COUNT = 256 };

/* used_nbytes[d] = sum of budget_nbytes of device ranges of d; host_used_nbytes
 * likewise of host and managed ranges. spans is sorted and without overlaps. Work notes
 * `serial` when it is queued: what is mapped later at the same addresses is not what it
 * meant. */
typedef struct cm_emulated_memory {
    uint64_t host_limit_nbytes;
    uint64_t used_nbytes[CM_MAX_DEVICES];
    uint64_t guests[CM_MAX_DEVICES]; /* others that may use what the device allocated */
    uint64_t host_used_nbytes;
    uint64_t live_nbytes;
    uint64_t counts[CM_EMULATED_VIRTUAL + 1];
    uint64_t physical_count;
    uint64_t mapping_count;
    cm_emulated_span *spans; /* owned */
    size_t span_count;
    size_t span_capacity;
    cm_emulated_pages freed[CM_EMULATED_FREED_COUNT]; /* a ring */
    unsigned freed_index;
    uint64_t freed_nbytes;
    cm_emulated_store store;
    cm_emulated_handles physicals; /* of cm_emulated_physical, owned */
    uint64_t next_physical;
    uint64_t serial; /* of the newest mapping */
} cm_emulated_memory;

/* -- all of it --------------------------------------------------------------------------- */

struct cm_emulated {
    cm_runtime base; /* first: a cm_runtime * is a cm_emulated * */
    cm_emulated_config config;
    cm_mutex lock;
    cm_cond changed;             /* an item is done, or work has let memory go */
    pthread_key_t key;           /* the thread's cm_emulated_thread */
    cm_emulated_thread *threads; /* owned; some of threads that have gone */
    cm_emulated_streams streams;
    cm_emulated_memory memory;
    cm_emulated_handles modules;   /* of struct module, owned */
    cm_emulated_handles functions; /* of struct module too: the one it is from */
    uint64_t next_module;
};

#define CM_EMULATED_BODY(name, cuda, driver, arg, params, args)                        \
    CM_NODISCARD int32_t cm_emulated_op_##name params;
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
    CM_CUDA_CAPTURE_ISOLATION = 905,
    CM_CUDA_CAPTURED_EVENT = 907,
};

/* Hand a failure up. */
#define CM_TRY_CODE(expr)                                                              \
    do {                                                                               \
        int32_t try_code = (expr);                                                     \
        if (try_code != 0) {                                                           \
            return try_code;                                                           \
        }                                                                              \
    } while (0)

static inline cm_emulated *
cm_emulated_of(cm_runtime *rt)
{
    return (cm_emulated *)rt;
}

static inline bool
cm_emulated_is_device(const cm_runtime *rt, int device)
{
    return device >= 0 && device < rt->device_count;
}

/* kernel.c: forget the modules of the device; of all with -1. */
void cm_emulated_modules_reset(cm_emulated *emulated, int device);

#endif
