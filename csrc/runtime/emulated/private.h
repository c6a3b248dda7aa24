/* SPDX-License-Identifier: Apache-2.0 */
/* The files of the emulated device share this header. It has the device's struct, the
 * types of its members, and one body for each operation of ops.h. A body returns a bare
 * code (0, a cudaError_t or one of CM_E…). emulated.c generates a wrapper around each
 * body. The wrapper checks the driver's version, prepares for the body as entries[]
 * there says, and adds the operation and its most telling argument to a failure.
 * Locks: one, `lock`. The wrappers take it, so every body and every function declared
 *        here is called with it held. Threads that wait do so on `changed`. The thread
 *        of a stream gives the lock back while it moves bytes. */
#pragma once

#include <sys/types.h>

#include "base/list.h"
#include "base/thread.h"
#include "runtime/emulated/emulated.h"
#include "runtime/emulated/pages.h"
#include "runtime/emulated/table.h"

typedef struct cm_emulated cm_emulated;

/* -- threads and streams ----------------------------------------------------------------- */

/* The state of one host thread in the runtime that it called last. */
typedef struct cm_emulated_thread {
    uint64_t runtime; /* the runtime's number */
    uint64_t number;  /* the thread's number, which no other thread ever gets */
    pid_t id;         /* the kernel's number, which another thread may get later */
    int device;       /* the device whose context is current; -1 if there is none */
    int capture_mode;
} cm_emulated_thread;

enum { CM_EMULATED_ANY = -1, CM_EMULATED_HANDLE_STEP = 16 };

/* The memory at one end of a copy, which work touches. It has 0 bytes if the work has
 * no such end. */
typedef struct cm_emulated_end {
    cm_address address;
    uint64_t nbytes;
    /* It is ordinary memory, so no range has to be found. */
    bool is_plain;
    /* The range that a queued copy holds, or NULL if it holds none. */
    struct cm_emulated_range *held;
} cm_emulated_end;

/* A piece of work. It is the first member of a struct that has what the work needs. The
 * stream's thread calls `run` with the lock held; cm_emulated_touch() calls `touch`
 * without it. */
typedef struct cm_emulated_job {
    int32_t (*run)(cm_emulated *emulated, struct cm_emulated_job *job);
    void (*touch)(struct cm_emulated_job *job, unsigned char *dst,
                  const unsigned char *src);
    cm_emulated_end dst;
    cm_emulated_end src;
    void *owned; /* from malloc, freed with the job; may be NULL */
    int device;  /* the device that touches the memory, or CM_EMULATED_ANY */
    /* The serial of the memory (cm_emulated_memory) when cm_emulated_submit() queued
     * the job. */
    uint64_t stamp;
} cm_emulated_job;

/* The streams, their events and their order. stream.c explains the idea. */
typedef struct cm_emulated_streams {
    cm_list queues; /* all streams */
    cm_emulated_table by_handle;
    cm_emulated_table events;
    /* For each device the code of a job that failed. It stays until the device is
     * reset. */
    int32_t faults[CM_MAX_DEVICES];
    uint64_t reused_handle; /* of the stream that was destroyed last, or 0 */
    uint64_t opened;        /* streams that were ever opened */
    uint64_t queued_jobs;   /* jobs that have not run yet */
    bool begin_shut;        /* new streams begin with their gate shut, for tests */
} cm_emulated_streams;

/* -- memory ------------------------------------------------------------------------------ */

typedef enum cm_emulated_kind {
    CM_EMULATED_DEVICE = CM_KIND_DEVICE,
    CM_EMULATED_MANAGED = CM_KIND_MANAGED,
    CM_EMULATED_HOST = CM_KIND_PINNED,
    CM_EMULATED_REGISTERED = CM_KIND_COUNT,
    CM_EMULATED_VIRTUAL, /* addresses alone; memory that is mapped there is of kind
                            DEVICE */
    /* The range is freed, or about to be. It is kept for a while, so that work which
     * still uses it is caught. */
    CM_EMULATED_FREED,
} cm_emulated_kind;

/* Memory that is mapped on demand. */
typedef struct cm_emulated_physical cm_emulated_physical;

/* A page of managed memory. */
typedef struct cm_emulated_page {
    signed char resident;      /* the location where the page is */
    signed char last_prefetch; /* where the page was sent last, or CM_NO_LOCATION */
    signed char preferred;     /* where advice says that the page should be, or
                                  CM_NO_LOCATION */
    bool read_mostly;
    uint64_t accessed_by; /* bit 0: by the host, bit d + 1: by device d */
} cm_emulated_page;

/* A range is memory that the driver knows. memory.c explains the idea. */
typedef struct cm_emulated_range {
    int device; /* comes first, as tables expect; -1 if the range is of no device */
    cm_emulated_kind kind;
    cm_list node; /* in the list of freed ranges */
    unsigned flags;
    unsigned user_count; /* how many pieces of executing work use it */
    unsigned waiting;    /* how many queued copies use it, if it is registered */
    cm_address address;  /* its start for devices */
    /* Its start for the host, or NULL if the host may not touch it. */
    unsigned char *host;
    unsigned char *bytes;  /* its start for the emulator */
    uint64_t nbytes;       /* its length, from each of the three starts */
    uint64_t *used_nbytes; /* the counter that includes it, or NULL */
    /* The address that was registered, which may be inside a page. */
    uint64_t registered;
    cm_emulated_pages user;         /* owned: addresses without bytes */
    cm_emulated_pages alias;        /* owned: the bytes */
    struct cm_emulated_page *pages; /* only for managed memory; owned */
    cm_emulated_physical *physical; /* the memory that is mapped here, or NULL */
    uint64_t access;                /* the devices that may touch it, as bits */
    uint64_t serial;                /* number of its mapping; see cm_emulated_memory */
} cm_emulated_range;

/* The memory of all devices. used_nbytes[d] is the sum of nbytes over all ranges and
 * physical memory of device d, and host_used_nbytes is the sum over host and managed
 * ranges. `serial` numbers the mappings. Each piece of work notes the newest number
 * when it is queued, so that memory which is mapped later at the same addresses is not
 * mistaken for the memory that the work was meant for. */
typedef struct cm_emulated_memory {
    uint64_t used_nbytes[CM_MAX_DEVICES];
    /* For each device, bits of other devices that may use what it allocated. */
    uint64_t peers[CM_MAX_DEVICES];
    uint64_t host_used_nbytes;
    uint64_t counts[CM_EMULATED_FREED + 1]; /* ranges of each cm_emulated_kind */
    uint64_t physical_count;
    /* Owned. All ranges, by the address behind their last byte. A range that has
     * another address for devices than for the host is entered under both. */
    cm_emulated_table ranges;
    /* Owned. The mappings inside virtual ranges, by the address behind their last
     * byte. */
    cm_emulated_table mapped;
    cm_list freed; /* oldest first */
    uint64_t freed_nbytes;
    cm_emulated_table physicals; /* by handle; owned */
    uint64_t serial;             /* of the newest mapping */
} cm_emulated_memory;

/* -- all of it --------------------------------------------------------------------------- */

struct cm_emulated {
    cm_runtime base; /* first, so that a cm_runtime pointer can be cast to this */
    cm_emulated_config config;
    cm_mutex lock;
    cm_cond changed; /* signalled when a job is done, or has let go of memory */
    uint64_t number; /* unique, whereas another runtime may get the same address */
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

/* Codes that only the emulated device uses. The others are in runtime.h. */
enum {
    CM_CUDA_INITIALIZATION = 3,
    CM_CUDA_INVALID_CONFIGURATION = 9,
    CM_CUDA_INVALID_PITCH = 12,
    CM_CUDA_PEER_UNSUPPORTED = 217,
    CM_CUDA_INVALID_PTX = 218,
    CM_CUDA_SYMBOL_NOT_FOUND = 500,
    CM_CUDA_ILLEGAL_ADDRESS = 700, /* the fault of late or misplaced work */
    CM_CUDA_MISALIGNED_ADDRESS = 716,
    CM_CUDA_CAPTURE_INVALIDATED = 901,
    CM_CUDA_CAPTURE_MERGE = 902,
    CM_CUDA_CAPTURE_ISOLATION = 905,
    CM_CUDA_CAPTURED_EVENT = 907,
};

/* Return the emulated device under all fault wrappers. */
static inline cm_emulated *
cm_emulated_of(const cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return (cm_emulated *)(uintptr_t)rt;
}

/* Return a handle that no object of any kind has ever had. The 15 numbers after it are
 * for the functions of a module. */
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

/* A handle of a stream is one that stream_create gave, or 0 or 1 for the legacy stream
 * of the thread's current device, or 2 for the thread's own stream on that device.
 * stream.c does not know what a job does. */

/* Return the state of the calling thread. */
cm_emulated_thread *cm_emulated_self(cm_emulated *emulated);
/* True if a capture forbids the thread to make calls that may synchronise. If so, this
 * also breaks the capture, as CUDA does. */
bool cm_emulated_is_forbidden(const cm_emulated *emulated,
                              const cm_emulated_thread *thread);

/* Open every gate, and wait until all work is done and all threads have ended. No other
 * thread may be in a call. */
void cm_emulated_streams_end(cm_emulated *emulated);

/* Queue a copy of the job, which is a struct of `nbytes`. After a failure the job has
 * been dropped. With `wait` the call returns when the job has run. On a capturing
 * stream the job becomes a part of the graph, which means here that it never runs. */
int32_t cm_emulated_submit(cm_emulated *emulated, uint64_t stream, cm_emulated_job *job,
                           size_t nbytes, bool wait);
/* Find the device of a stream, even of one that captures. */
int32_t cm_emulated_device_of(cm_emulated *emulated, uint64_t stream, int *out);
/* Drop a job that was not submitted: free what it owns, and let go of the ranges that
 * its ends hold. */
void cm_emulated_job_drop(cm_emulated *emulated, const cm_emulated_job *job);

/* Destroy the streams and events of a device, whose work is over, and forget its
 * fault. */
void cm_emulated_streams_reset(cm_emulated *emulated, int device);

/* -- memory.c -------------------------------------------------------------------------- */

/* The granularity of memory that is mapped on demand. */
#define CM_EMULATED_GRANULARITY (UINT64_C(2) << 20)

/* The page at the top of memory.c explains the idea of ranges. */

/* Free all ranges, in use or not, and the addresses that are kept. The caller has reset
 * every device. */
void cm_emulated_memory_fini(cm_emulated *emulated);
/* Free all that `device` still has, and forget that it may use memory of other
 * devices. */
void cm_emulated_memory_reset(cm_emulated *emulated, int device);

/* Where [address, address + nbytes) lies in relation to the known ranges. */
typedef enum cm_emulated_found {
    CM_EMULATED_UNKNOWN, /* it touches none, so it is ordinary host memory */
    /* It is inside one range, or inside several that are mapped side by side. */
    CM_EMULATED_INSIDE,
    CM_EMULATED_BROKEN /* it crosses an edge, or was freed */
} cm_emulated_found;

/* What is known about a place that is INSIDE. */
typedef struct cm_emulated_place {
    /* The first range; borrowed until the lock is given back. */
    cm_emulated_range *range;
    const cm_emulated_table *table; /* the table in which the ranges are */
    uint64_t nbytes;
    cm_emulated_kind kind;
    int device;
    uint64_t access;      /* bits of the devices that may touch the whole place */
    uint64_t serial;      /* of the newest range; see cm_emulated_memory */
    cm_address address;   /* the first byte of the place, by devices' addresses */
    void *host;           /* that byte for the host; NULL for device memory */
    unsigned char *bytes; /* that byte for the emulator */
    bool by_device;       /* the address that was looked up is one for devices */
} cm_emulated_place;

/* Find where a stretch of addresses lies. *out is valid only if it is INSIDE. */
cm_emulated_found cm_emulated_find(const cm_emulated *emulated, uint64_t address,
                                   uint64_t nbytes, cm_emulated_place *out);

/* Call the job's `touch` without the lock, while both its ends are kept alive. A job of
 * a device must use addresses that this device may use, of memory that was mapped
 * before the job was queued. Managed memory moves to the device.
 * Fails: CM_CUDA_ILLEGAL_ADDRESS, before the touch, or because the memory was unmapped
 * under it. */
int32_t cm_emulated_touch(cm_emulated *emulated, cm_emulated_job *job);
