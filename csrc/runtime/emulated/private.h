/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the emulated device share: its struct, the nouns in it, and one
 * body for each operation of ops.h. A body answers a bare code (0, a cudaError_t or one
 * of CM_E…). The wrappers that emulated.c generates do what comes before a body
 * (entries[] there says what), and add the check of the driver's version, the name of
 * the operation and its most telling argument.
 * Locks: one, `lock`. The wrappers take it, so every body and everything declared here
 * is called with it held. Whoever waits does so on `changed`; executing work gives the
 * lock back while bytes move. */
#pragma once

#include <sys/types.h>

#include "base/list.h"
#include "base/thread.h"
#include "runtime/emulated/emulated.h"
#include "runtime/emulated/pages.h"
#include "runtime/emulated/table.h"

typedef struct cm_emulated cm_emulated;

/* -- threads and streams ----------------------------------------------------------------- */

/* What is current for one host thread, in the runtime that it called last. */
typedef struct cm_emulated_thread {
    uint64_t runtime; /* the runtime's number */
    uint64_t number;  /* the thread's number, which is never given twice */
    pid_t id;         /* the kernel's number, which it gives again later */
    int device;       /* -1: no context */
    int capture_mode;
} cm_emulated_thread;

enum { CM_EMULATED_ANY = -1, CM_EMULATED_HANDLE_STEP = 16 };

/* A stretch of memory that work touches, at one end of a copy. Of 0 bytes: there is
 * none. */
typedef struct cm_emulated_end {
    cm_address address;
    uint64_t nbytes;
    /* Ordinary memory, so there is no range to look up. */
    bool is_plain;
    /* The range that a queued copy holds; NULL: it holds none. */
    struct cm_emulated_range *held;
} cm_emulated_end;

/* A piece of work, embedded first in a struct with what it needs. `run` is called on
 * the stream's thread with the lock held; `touch` is called by cm_emulated_touch(),
 * without it. */
typedef struct cm_emulated_job {
    int32_t (*run)(cm_emulated *emulated, struct cm_emulated_job *job);
    void (*touch)(struct cm_emulated_job *job, unsigned char *dst,
                  const unsigned char *src);
    cm_emulated_end dst;
    cm_emulated_end src;
    void *owned; /* from malloc, freed with the job; may be NULL */
    int device;  /* the device that touches the memory, or CM_EMULATED_ANY */
    /* The serial of the memory when the job was queued; noted by
     * cm_emulated_submit(). */
    uint64_t stamp;
} cm_emulated_job;

/* The streams, their events and their order; stream.c tells the idea. */
typedef struct cm_emulated_streams {
    cm_list queues;
    cm_emulated_table by_handle;
    cm_emulated_table events;
    /* The code of a job of the device that failed; it stays until a reset. */
    int32_t faults[CM_MAX_DEVICES];
    uint64_t reused_handle; /* of the stream that was destroyed last; 0: none */
    uint64_t opened;        /* streams that were ever opened */
    uint64_t queued_jobs;
} cm_emulated_streams;

/* -- memory ------------------------------------------------------------------------------ */

typedef enum cm_emulated_kind {
    CM_EMULATED_DEVICE = CM_KIND_DEVICE,
    CM_EMULATED_MANAGED = CM_KIND_MANAGED,
    CM_EMULATED_HOST = CM_KIND_PINNED,
    CM_EMULATED_REGISTERED = CM_KIND_COUNT,
    CM_EMULATED_VIRTUAL, /* addresses alone; what is mapped there is of DEVICE */
    /* Freed, or about to be; kept for a while so that late work is caught. */
    CM_EMULATED_FREED,
} cm_emulated_kind;

/* Memory that is mapped on demand. */
typedef struct cm_emulated_physical cm_emulated_physical;

/* A page of managed memory. */
typedef struct cm_emulated_page {
    signed char resident;  /* the location where it is, */
    signed char wished;    /* where it was sent last, or CM_NO_LOCATION, */
    signed char preferred; /* and where it should be, or CM_NO_LOCATION */
    bool read_mostly;
    uint64_t accessed_by; /* bit 0: by the host, bit d + 1: by device d */
} cm_emulated_page;

/* A stretch of memory that the driver knows; memory.c tells the idea. */
typedef struct cm_emulated_range {
    int device; /* first in the struct, as tables expect; -1: of no device */
    cm_emulated_kind kind;
    cm_list node; /* in the list of freed ranges */
    unsigned flags;
    unsigned pins;      /* pieces of executing work that use it */
    unsigned waiting;   /* queued copies that use it; only for registered memory */
    cm_address address; /* its start for devices */
    /* Its start for the host; NULL: the host may not touch it. */
    unsigned char *host;
    unsigned char *bytes;  /* its start for the emulator */
    uint64_t nbytes;       /* its length from each of the starts */
    uint64_t *used_nbytes; /* the counter that includes it; NULL: none does */
    /* The address that was registered, which may be inside a page. */
    uint64_t registered;
    cm_emulated_pages user;         /* owned: addresses without bytes */
    cm_emulated_pages alias;        /* owned: the bytes */
    struct cm_emulated_page *pages; /* only for managed memory; owned */
    cm_emulated_physical *physical; /* what is mapped here, or NULL; */
    uint64_t access;                /* who may touch it, as bits by device index; */
    uint64_t serial;                /* and when it was mapped: see cm_emulated_memory */
} cm_emulated_range;

/* The memory of all devices. used_nbytes[d] is the sum of nbytes of all ranges and
 * physical memory of d, and host_used_nbytes that of host and managed ranges. `serial`
 * numbers mappings: work notes it when it is queued, so that memory which is mapped
 * later at the same addresses is not taken for what the work meant. */
typedef struct cm_emulated_memory {
    uint64_t used_nbytes[CM_MAX_DEVICES];
    /* Bits of other devices that may use what the device allocated. */
    uint64_t guests[CM_MAX_DEVICES];
    uint64_t host_used_nbytes;
    uint64_t counts[CM_EMULATED_FREED + 1];
    uint64_t physical_count;
    /* By their ends, both for the host and for devices; owned. */
    cm_emulated_table ranges;
    cm_emulated_table mapped; /* ranges in virtual ones, by their ends; owned */
    cm_list freed;            /* oldest first */
    uint64_t freed_nbytes;
    cm_emulated_table physicals; /* by handle; owned */
    uint64_t serial;             /* of the newest mapping */
} cm_emulated_memory;

/* -- all of it --------------------------------------------------------------------------- */

struct cm_emulated {
    cm_runtime base; /* first, so that a cm_runtime pointer is one to this */
    cm_emulated_config config;
    cm_mutex lock;
    cm_cond changed; /* an item is done, or work has given memory back */
    uint64_t number; /* a number that no other runtime had, as an address might have */
    cm_emulated_streams streams;
    cm_emulated_memory memory;
    cm_emulated_table modules; /* of struct module; owned */
    uint64_t contexts;         /* bits of devices that ever had a context */
    /* The last number given to a handle, a piece of work, a capture or a thread. */
    uint64_t last_number;
};

#define CM_EMULATED_PARAMS(...) (cm_emulated * emulated __VA_OPT__(, ) __VA_ARGS__)
#define CM_EMULATED_BODY(name, cuda, driver, arg, params, args)                        \
    int32_t cm_emulated_op_##name CM_EMULATED_PARAMS params;
CM_OPS(CM_EMULATED_BODY)
#undef CM_EMULATED_BODY

/* Codes that only the emulated device answers; the others are in runtime.h. */
enum {
    CM_CUDA_INITIALIZATION = 3,
    CM_CUDA_INVALID_CONFIGURATION = 9,
    CM_CUDA_INVALID_PITCH = 12,
    CM_CUDA_PEER_UNSUPPORTED = 217,
    CM_CUDA_INVALID_PTX = 218,
    CM_CUDA_SYMBOL_NOT_FOUND = 500,
    CM_CUDA_ILLEGAL_ADDRESS = 700, /* what late or misplaced work ends with */
    CM_CUDA_MISALIGNED_ADDRESS = 716,
    CM_CUDA_CAPTURE_INVALIDATED = 901,
    CM_CUDA_CAPTURE_MERGE = 902,
    CM_CUDA_CAPTURE_ISOLATION = 905,
    CM_CUDA_CAPTURED_EVENT = 907,
};

/* The emulated device under all fault wrappers. */
static inline cm_emulated *
cm_emulated_of(const cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return (cm_emulated *)(uintptr_t)rt;
}

/* A handle that no object ever had, of any kind. The 15 numbers after it are for the
 * functions of a module. */
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

/* A handle of a stream is one that stream_create gave; or 0 or 1, the legacy stream of
 * the device that is current for the thread; or 2, the thread's own stream on that
 * device. stream.c does not know what a job does. */

/* The state of the calling thread. */
cm_emulated_thread *cm_emulated_self(cm_emulated *emulated);
/* True when a capture forbids the thread calls that may synchronise; this breaks the
 * capture. */
bool cm_emulated_is_forbidden(const cm_emulated *emulated,
                              const cm_emulated_thread *thread);

/* Open every gate, and wait until all work is done and all threads have ended. Nobody
 * makes calls any more. */
void cm_emulated_streams_end(cm_emulated *emulated);

/* Queue a copy of the job, which is a struct of `nbytes`; the job is dropped on failure
 * too. With `wait` the call returns when it has run. On a capturing stream the job
 * becomes a part of the graph, which means here that it never runs. */
int32_t cm_emulated_submit(cm_emulated *emulated, uint64_t stream, cm_emulated_job *job,
                           size_t nbytes, bool wait);
/* The device of a stream, even of one that captures. */
int32_t cm_emulated_device_of(cm_emulated *emulated, uint64_t stream, int *out);
/* Free what a job owns that was not submitted, and give back what its ends hold. */
void cm_emulated_job_drop(cm_emulated *emulated, const cm_emulated_job *job);

/* Destroy the streams and events of a device and forget its fault. Its work is over. */
void cm_emulated_streams_reset(cm_emulated *emulated, int device);

/* -- memory.c -------------------------------------------------------------------------- */

/* Of memory that is mapped on demand. */
#define CM_EMULATED_GRANULARITY (UINT64_C(2) << 20)

/* Ranges of memory; the page at the top of memory.c tells the idea. */

/* Free all ranges, in use or not, and the addresses that are kept. Every device has
 * been reset before. */
void cm_emulated_memory_fini(cm_emulated *emulated);
/* Free all that `device` still has, and let it use no other device's memory. */
void cm_emulated_memory_reset(cm_emulated *emulated, int device);

/* How [address, address + nbytes) lies relative to the known ranges. */
typedef enum cm_emulated_found {
    CM_EMULATED_UNKNOWN, /* it touches none, so it is ordinary host memory */
    /* It is inside exactly one, or inside what is mapped side by side. */
    CM_EMULATED_INSIDE,
    CM_EMULATED_BROKEN /* it crosses an edge, or was freed */
} cm_emulated_found;

/* Where a stretch of addresses lies. */
typedef struct cm_emulated_place {
    /* The first range; borrowed until the lock is given back. */
    cm_emulated_range *range;
    const cm_emulated_table *table; /* the table in which the ranges are */
    uint64_t nbytes;
    cm_emulated_kind kind;
    int device;
    uint64_t access;      /* bits by device index: those that may touch all of it */
    uint64_t serial;      /* of the newest range; see cm_emulated_memory */
    cm_address address;   /* the same byte for devices */
    void *host;           /* the same byte for the host; NULL for device memory */
    unsigned char *bytes; /* the same byte for the emulator */
    bool by_device;       /* the address asked for is one that a device may use */
} cm_emulated_place;

/* Find where a stretch of addresses lies. *out is valid only if it is INSIDE. */
cm_emulated_found cm_emulated_find(const cm_emulated *emulated, uint64_t address,
                                   uint64_t nbytes, cm_emulated_place *out);

/* Call the job's `touch` without the lock, while both its ends are kept from going
 * away. A job of a device must use an address that this device may use, and managed
 * memory moves to the device; memory that was mapped after the job was queued will not
 * do.
 * Fails: CM_CUDA_ILLEGAL_ADDRESS, before the touch, or because the memory was unmapped
 * under it. */
int32_t cm_emulated_touch(cm_emulated *emulated, cm_emulated_job *job);
