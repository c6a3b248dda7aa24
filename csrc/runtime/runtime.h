/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime as a value: the table of operations and what its driver and devices can do.
 * Callers see handles as integers and never a CUDA type; whether a real GPU, the
 * emulated device or the fault wrapper answers is not theirs to know.
 * Threads: every operation may be called from any thread without a lock of ours held. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "base/recorder.h"
#include "base/status.h"
#include "base/thread.h"
#include "runtime/ops.h"

/* An address that the host may not be allowed to touch. */
typedef uint64_t cm_address;

typedef enum cm_backend { CM_BACKEND_CUDA, CM_BACKEND_EMULATED } cm_backend;

/* Numbers of CUDA's own: X(name, number, CUDA's name); cuda.c asserts that they are. */
#define CM_CUDA_NUMBERS(X)                                                             \
    X(CM_HOST_ALLOC_PORTABLE, 1, cudaHostAllocPortable)                                \
    X(CM_HOST_ALLOC_MAPPED, 2, cudaHostAllocMapped)                                    \
    X(CM_HOST_ALLOC_WRITE_COMBINED, 4, cudaHostAllocWriteCombined)                     \
    X(CM_REGISTER_PORTABLE, 1, cudaHostRegisterPortable)                               \
    X(CM_REGISTER_MAPPED, 2, cudaHostRegisterMapped)                                   \
    X(CM_REGISTER_READ_ONLY, 8, cudaHostRegisterReadOnly)                              \
    X(CM_MANAGED_GLOBAL, 1, cudaMemAttachGlobal)                                       \
    X(CM_MANAGED_HOST, 2, cudaMemAttachHost)                                           \
    X(CM_STREAM_NON_BLOCKING, 1, cudaStreamNonBlocking)                                \
    X(CM_EVENT_BLOCKING_SYNC, 1, cudaEventBlockingSync)                                \
    X(CM_EVENT_DISABLE_TIMING, 2, cudaEventDisableTiming)                              \
    X(CM_CAPTURE_THREAD_LOCAL, 1, cudaStreamCaptureModeThreadLocal)                    \
    X(CM_CAPTURE_RELAXED, 2, cudaStreamCaptureModeRelaxed)                             \
    X(CM_HOST_LOCATION, -1, cudaCpuDeviceId)                                           \
    X(CM_NO_LOCATION, -2, cudaInvalidDeviceId)                                         \
    X(CM_ADVISE_READ_MOSTLY, 1, cudaMemAdviseSetReadMostly)                            \
    X(CM_ADVISE_NOT_READ_MOSTLY, 2, cudaMemAdviseUnsetReadMostly)                      \
    X(CM_ADVISE_PREFERRED, 3, cudaMemAdviseSetPreferredLocation)                       \
    X(CM_ADVISE_NOT_PREFERRED, 4, cudaMemAdviseUnsetPreferredLocation)                 \
    X(CM_ADVISE_ACCESSED_BY, 5, cudaMemAdviseSetAccessedBy)                            \
    X(CM_ADVISE_NOT_ACCESSED_BY, 6, cudaMemAdviseUnsetAccessedBy)                      \
    X(CM_RANGE_READ_MOSTLY, 1, cudaMemRangeAttributeReadMostly)                        \
    X(CM_RANGE_PREFERRED, 2, cudaMemRangeAttributePreferredLocation)                   \
    X(CM_RANGE_ACCESSED_BY, 3, cudaMemRangeAttributeAccessedBy)                        \
    X(CM_RANGE_PREFETCHED, 4, cudaMemRangeAttributeLastPrefetchLocation)               \
    X(CM_ACCESS_READ, 1, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ)                        \
    X(CM_ACCESS_READ_WRITE, 3, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE)             \
    /* error codes that the core looks at */                                           \
    X(CM_CUDA_INVALID_VALUE, 1, cudaErrorInvalidValue)                                 \
    X(CM_CUDA_OUT_OF_MEMORY, 2, cudaErrorMemoryAllocation)                             \
    X(CM_CUDA_UNLOADING, 4, cudaErrorCudartUnloading)                                  \
    X(CM_CUDA_INSUFFICIENT_DRIVER, 35, cudaErrorInsufficientDriver)                    \
    X(CM_CUDA_NO_DEVICE, 100, cudaErrorNoDevice)                                       \
    X(CM_CUDA_INVALID_DEVICE, 101, cudaErrorInvalidDevice)                             \
    /* or a context that is none */                                                    \
    X(CM_CUDA_DEVICE_UNINITIALIZED, 201, cudaErrorDeviceUninitialized)                 \
    X(CM_CUDA_INVALID_HANDLE, 400, cudaErrorInvalidResourceHandle)                     \
    X(CM_CUDA_NOT_READY, 600, cudaErrorNotReady)                                       \
    X(CM_CUDA_PEER_ENABLED, 704, cudaErrorPeerAccessAlreadyEnabled)                    \
    X(CM_CUDA_CONTEXT_DESTROYED, 709, cudaErrorContextIsDestroyed)                     \
    X(CM_CUDA_ALREADY_REGISTERED, 712, cudaErrorHostMemoryAlreadyRegistered)           \
    X(CM_CUDA_NOT_REGISTERED, 713, cudaErrorHostMemoryNotRegistered)                   \
    X(CM_CUDA_NOT_SUPPORTED, 801, cudaErrorNotSupported)                               \
    X(CM_CUDA_CAPTURE_UNSUPPORTED, 900, cudaErrorStreamCaptureUnsupported)             \
    X(CM_CUDA_CAPTURE_IMPLICIT, 906, cudaErrorStreamCaptureImplicit)

#define CM_NUMBER_ENUM(name, number, cuda) name = (number),
enum {
    CM_CUDA_NUMBERS(CM_NUMBER_ENUM) /* and two that it has as pointers: */
    CM_STREAM_LEGACY = 1,           /* 0 means the same */
    CM_STREAM_PER_THREAD = 2,
};
#undef CM_NUMBER_ENUM

/* A NUMA node of the host as a location, and back; ours alone. */
#define CM_NUMA_LOCATION(node) (CM_NO_LOCATION - 1 - (node))

/* What a kind of memory is. */
enum {
    CM_MEMORY_PAGE_LOCKED = 1, /* the host's, and stays where it is */
    CM_MEMORY_SHARED = 2,      /* host and devices both work on it where it is */
    CM_MEMORY_MIGRATES = 4,    /* its pages go to where they are used */
    CM_MEMORY_ON_DEVICE = 8,   /* the host may not touch it */
    CM_MEMORY_ORDERED = 16, /* streams alone use it, so their order is all it needs */
};

/* The kinds: X(name, its text, what it is, the flags that its memory is made with). */
#define CM_KINDS(X)                                                                    \
    X(PAGEABLE, pageable, 0, 0) /* ordinary memory, of no device */                    \
    X(PINNED, pinned, CM_MEMORY_PAGE_LOCKED, CM_HOST_ALLOC_PORTABLE)                   \
    X(MAPPED, mapped, CM_MEMORY_PAGE_LOCKED | CM_MEMORY_SHARED,                        \
      CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED)                                   \
    X(MANAGED, managed, CM_MEMORY_SHARED | CM_MEMORY_MIGRATES, CM_MANAGED_GLOBAL)      \
    X(DEVICE, device, CM_MEMORY_ON_DEVICE | CM_MEMORY_ORDERED, 0)

typedef enum cm_kind {
#define CM_KIND_ENUM(name, text, traits, flags) CM_KIND_##name,
    CM_KINDS(CM_KIND_ENUM)
#undef CM_KIND_ENUM
        CM_KIND_COUNT
} cm_kind;

typedef struct cm_kind_fact {
    const char *text;
    unsigned traits; /* of CM_MEMORY_… */
    unsigned flags;  /* of CM_HOST_ALLOC_… or CM_MANAGED_… */
} cm_kind_fact;

extern const cm_kind_fact cm_kinds[CM_KIND_COUNT];

/* Its number in a cm_event. */
static inline uint8_t
cm_kind_in_event(cm_kind kind)
{
    return kind == CM_KIND_PAGEABLE ? CM_EVENT_PAGEABLE : (uint8_t)(kind - 1);
}

/* Of no pool: the driver does not know it. */
static inline bool
cm_kind_is_pageable(cm_kind kind)
{
    return kind == CM_KIND_PAGEABLE;
}

#define CM_KIND_TRAIT(name, trait)                                                     \
    static inline bool name(cm_kind kind)                                              \
    {                                                                                  \
        return (cm_kinds[kind].traits & (trait)) != 0;                                 \
    }
CM_KIND_TRAIT(cm_kind_is_page_locked, CM_MEMORY_PAGE_LOCKED)
CM_KIND_TRAIT(cm_kind_is_shared, CM_MEMORY_SHARED)
CM_KIND_TRAIT(cm_kind_migrates, CM_MEMORY_MIGRATES)
CM_KIND_TRAIT(cm_kind_is_on_device, CM_MEMORY_ON_DEVICE)
CM_KIND_TRAIT(cm_kind_is_ordered, CM_MEMORY_ORDERED)
#undef CM_KIND_TRAIT

/* What physical_create may be asked for; ours alone. */
enum { CM_PHYSICAL_RDMA = 1 }; /* other devices of the bus may reach it */

/* Device attributes that cumem reads: X(name, number, CU_DEVICE_ATTRIBUTE_…). */
#define CM_DEVICE_ATTRIBUTES(X)                                                        \
    X(compute_major, 75, COMPUTE_CAPABILITY_MAJOR)                                     \
    X(compute_minor, 76, COMPUTE_CAPABILITY_MINOR)                                     \
    X(multiprocessor_count, 16, MULTIPROCESSOR_COUNT)                                  \
    X(copy_engine_count, 40, ASYNC_ENGINE_COUNT)                                       \
    X(unified_addressing, 41, UNIFIED_ADDRESSING)                                      \
    X(can_map_host_memory, 19, CAN_MAP_HOST_MEMORY)                                    \
    X(managed_memory, 83, MANAGED_MEMORY)                                              \
    X(concurrent_managed_access, 89, CONCURRENT_MANAGED_ACCESS)                        \
    X(pageable_memory_access, 88, PAGEABLE_MEMORY_ACCESS)                              \
    X(direct_managed_from_host, 101, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST)              \
    X(host_register_supported, 99, HOST_REGISTER_SUPPORTED)                            \
    X(host_register_read_only, 113, READ_ONLY_HOST_REGISTER_SUPPORTED)                 \
    X(memory_pools_supported, 115, MEMORY_POOLS_SUPPORTED)                             \
    X(l2_cache_nbytes, 38, L2_CACHE_SIZE)                                              \
    X(integrated, 18, INTEGRATED)                                                      \
    X(virtual_memory_management, 102, VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)             \
    X(virtual_memory_shareable, 103, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)      \
    X(virtual_memory_rdma, 110, GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)               \
    X(host_numa_id, 134, HOST_NUMA_ID)

#define CM_ATTRIBUTE_ENUM(name, number, cuda) CM_ATTRIBUTE_##name = (number),
enum { CM_DEVICE_ATTRIBUTES(CM_ATTRIBUTE_ENUM) };
#undef CM_ATTRIBUTE_ENUM

typedef struct cm_device_info {
    char name[256];
    unsigned char uuid[16];
    char pci_bus_id[32]; /* "0000:1b:00.0" */
    uint64_t total_nbytes;
} cm_device_info;

/* What the driver says of an address. A host pointer it does not know is PAGEABLE. */
typedef struct cm_pointer_info {
    cm_kind kind; /* PAGEABLE, PINNED (any page-locked), MANAGED or DEVICE */
    int device;   /* index; -1 for PAGEABLE */
    cm_address device_address;
    void *host_address; /* NULL where the host may not touch it */
} cm_pointer_info;

typedef struct cm_runtime cm_runtime;

/* In the body of an operation, which answers a bare code: hand a failure up. */
#define CM_TRY_CODE(expr)                                                              \
    do {                                                                               \
        int32_t try_code = (int32_t)(expr);                                            \
        if (try_code != 0) {                                                           \
            return try_code;                                                           \
        }                                                                              \
    } while (0)

typedef enum cm_op {
    CM_OP_none,
#define CM_OP_ENUM(name, cuda, driver, arg, params, args) CM_OP_##name,
    CM_OPS(CM_OP_ENUM)
#undef CM_OP_ENUM
        CM_OP_COUNT
} cm_op;

/* Of a row's fourth part, an operation's telling argument: what it is, as text, and its
 * value, which a status carries as a number. */
#define CM_ARGUMENT_KIND(kind, value) #kind
#define CM_ARGUMENT_VALUE(kind, value) (value)

typedef struct cm_ops_table {
#define CM_OP_FIELD(name, cuda, driver, arg, params, args)                             \
    cm_status(*name) CM_OP_PARAMS params;
    CM_OPS(CM_OP_FIELD)
#undef CM_OP_FIELD
} cm_ops_table;

enum { CM_MAX_DEVICES = 64 };

/* Embedded first in each implementation's own struct. Set once by the implementation's
 * open(), read-only afterwards, except what cm_device_enter() notes and how far it has
 * come from sleep.
 *
 * A runtime opens asleep: it knows its driver's version and how many devices there are,
 * and that is all that most questions need. Nothing was done in the process yet that a
 * forked child could not do for itself, so a sleeping runtime goes on in the child as
 * if it had been opened there. Two steps end that:
 *
 *   bound   something of this process stands behind it, such as threads that copy: a
 *           child must not use it, and cm_runtime_is_forked() is true there. As no
 *           driver was started, the child may open another one.
 *   awake   the driver was started (cuInit) by the first operation that needs it. It
 *           works in no child: what the child opens then is for the host alone, a
 *           runtime whose `wake` is CM_EFORKED for ever.
 *
 * So `set_limit()` or `device_count()` before a fork cost the child nothing, and an
 * array that a child copies needs no driver. */
struct cm_runtime {
    const cm_ops_table *ops; /* borrowed, static */
    cm_backend backend;
    int driver_version;  /* CUDA version the driver serves, e.g. 13000 */
    int runtime_version; /* of the library that is built in */
    int device_count;    /* asleep: what the driver is sure to say; see `wake` */
    const char *reason;  /* emulated: why there is no GPU; borrowed, "" if asked for */
    const volatile uint32_t *alive; /* one page: 0 in a child forked since bound */
    cm_runtime *inner;              /* fault wrapper only: borrowed; else NULL */
    /* Start the driver. Sets device_count anew, as only now the driver itself says it.
     * Called once at a time, by cm_runtime_wake() alone. */
    cm_status (*wake)(cm_runtime *rt);
    /* Has anybody in the process started the driver? NULL: only we could. */
    bool (*is_started)(const cm_runtime *rt);
    atomic_bool is_awake;
    atomic_bool is_bound;
    cm_mutex waking;
    bool is_host_only;             /* of cm_host_only_open(): it never wakes */
    void (*close)(cm_runtime *rt); /* frees the runtime; every object of it is gone */
    /* Emulated only: see cm_runtime_host_alias(). */
    void *(*host_alias)(const cm_runtime *rt, cm_address address, uint64_t nbytes);
    _Atomic uint64_t primary[CM_MAX_DEVICES]; /* each device's context; 0: none known */
    _Atomic uint64_t context_count; /* of those that were found there so far */
    cm_mutex capturable_lock;
    /* stream.c's: every kept stream that other code may begin to capture. All zero
     * until there is one. */
    cm_list capturable;
};

/* What ops.h says of an operation; of CM_OP_none nothing. */
typedef struct cm_op_fact {
    const char *name;          /* "host_alloc" */
    const char *cuda_name;     /* "cudaHostAlloc" */
    const char *argument_kind; /* "NBYTES" */
    int min_driver;            /* the oldest that has it, e.g. 12050 */
} cm_op_fact;

extern const cm_op_fact cm_op_facts[CM_OP_COUNT];

/* Where the host may touch what devices have at an address: for emulated device memory
 * its second mapping, for emulated host and managed memory itself. NULL: nowhere, as on
 * every GPU, or [address, address + nbytes) is not inside one live allocation or
 * registration. */
static inline void *
cm_runtime_host_alias(const cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    return rt->host_alias == NULL ? NULL : rt->host_alias(rt, address, nbytes);
}

/* True when the runtime's driver has the operation. */
static inline bool
cm_runtime_has(const cm_runtime *rt, cm_op op)
{
    return rt->driver_version >= cm_op_facts[op].min_driver;
}

/* True in a child made by fork() after the runtime was bound to its parent: no
 * operation may be called any more. */
static inline bool
cm_runtime_is_forked(const cm_runtime *rt)
{
    return *rt->alive == 0;
}

/* Was its driver started? No memory was page-locked before, no stream and no context
 * made: who asks about these knows the answer without the driver. */
static inline bool
cm_runtime_is_awake(const cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return atomic_load_explicit(&rt->is_awake, memory_order_acquire);
}

/* The same, and it wakes where somebody else in the process has started the driver:
 * their page-locked memory is known to it, and forked children have lost it anyway. */
bool cm_runtime_is_of_use(cm_runtime *rt);

/* From now on a forked child may not use it. Costs nothing from the second call on. */
void cm_runtime_bind(cm_runtime *rt);

/* Start the driver if nobody has; the body of each operation does it. Blocks: while
 * another thread does. Fails: as the driver says; CM_EFORKED where it is for the host
 * alone. */
CM_NODISCARD cm_status cm_runtime_wake(cm_runtime *rt);

/* In a forked child whose parent was bound to it and had not woken it: it is the
 * child's
 * from now on. Fails: CM_ESYSTEM. */
CM_NODISCARD cm_status cm_runtime_revive(cm_runtime *rt);

/* For a forked child whose parent had a driver at work: a runtime that looks like
 * `parent`, knows ordinary memory only and refuses every operation. Fails: CM_ENOMEM,
 * CM_ESYSTEM. */
CM_NODISCARD cm_status cm_host_only_open(const cm_runtime *parent, cm_runtime **out);

/* Is it what a call answers while the process, the context or the driver goes away?
 * Whatever was to be given back is gone already, which is no failure. */
static inline bool
cm_code_is_unloading(int32_t code)
{
    return code == CM_CUDA_UNLOADING || code == CM_CUDA_CONTEXT_DESTROYED
           || code == CM_CUDA_INSUFFICIENT_DRIVER;
}

/* The callers: cm_rt_host_alloc(rt, nbytes, flags, &out) and so on, one a row. */
#define CM_OP_CALLER(name, cuda, driver, arg, params, args)                            \
    CM_NODISCARD static inline cm_status cm_rt_##name CM_OP_PARAMS params              \
    {                                                                                  \
        return rt->ops->name CM_OP_ARGS args;                                          \
    }
CM_OPS(CM_OP_CALLER)
#undef CM_OP_CALLER

/* Make `device` current for the calling thread and remember what was current before;
 * leave puts it back (also "no context", so that nothing is created on device 0).
 * A failed enter needs no leave. A failing leave is ignored: nothing to undo. */
typedef struct cm_device_guard {
    uint64_t previous;
    bool switched;
} cm_device_guard;

CM_NODISCARD cm_status cm_device_enter(cm_runtime *rt, int device,
                                       cm_device_guard *guard);
/* The same where any will do: what is current stays, and no device gets its first
 * context while another has one. */
CM_NODISCARD cm_status cm_device_enter_any(cm_runtime *rt, int device,
                                           cm_device_guard *guard);
/* A device that has a context by now, whoever made it: `preferred` if that has one. -1:
 * none has. Creates nothing. */
int cm_device_with_context(cm_runtime *rt, int preferred);
/* False: no memory of the host is page-locked or managed, since no context is there
 * that could have made it so, and none need be made to ask. What a context of
 * cuCtxCreate's alone has locked is found where that is current for the calling thread.
 * Creates nothing.
 * Fails: context_get. */
CM_NODISCARD cm_status cm_host_may_be_locked(cm_runtime *rt, bool *out);
void cm_device_leave(cm_runtime *rt, const cm_device_guard *guard);
/* The devices, as bits, that this process has a context on, and none is made for this:
 * one that was entered, or `by_anyone`, which counts one that cannot be asked. Contexts
 * beside CUDA's own, as cuCtxCreate makes them, no driver tells of. */
uint64_t cm_devices_in_use(cm_runtime *rt, bool by_anyone);
/* To enter it takes no time: its context is known. */
bool cm_device_was_entered(const cm_runtime *rt, int device);

/* The status of `call` between the two, or why the device could not be made current. */
#define CM_ON_DEVICE(rt, device, call) CM_ENTERED(cm_device_enter, rt, device, call)
#define CM_ON_ANY_DEVICE(rt, device, call)                                             \
    CM_ENTERED(cm_device_enter_any, rt, device, call)
#define CM_ENTERED(enter, rt, device, call)                                            \
    __extension__({                                                                    \
        cm_device_guard cm_guard_;                                                     \
        cm_status cm_status_ = enter((rt), (device), &cm_guard_);                      \
        if (cm_is_ok(cm_status_)) {                                                    \
            cm_status_ = (call);                                                       \
            cm_device_leave((rt), &cm_guard_);                                         \
        }                                                                              \
        cm_status_;                                                                    \
    })

/* Did the call succeed, or a second try of it? For what must not stay half done; beyond
 * that there is nothing to undo and nobody to tell. */
#define CM_TRY_TWICE(call) (cm_is_ok(call) || cm_is_ok(call))

/* Map the page behind `alive`, holding 1. Fails: CM_ESYSTEM, CM_ENOMEM. */
CM_NODISCARD cm_status cm_alive_page_create(const volatile uint32_t **out);
/* From now on it holds 0 in children; then, in one, holds 1 again as at first. */
void cm_alive_page_arm(const volatile uint32_t *page);
CM_NODISCARD cm_status cm_alive_page_reset(const volatile uint32_t *page);
void cm_alive_page_destroy(const volatile uint32_t *page);

/* The newest CUDA version that the installed driver serves, asked without starting it:
 * 0 where there is none that is new enough. Loads the driver's library for good. */
int cm_cuda_find_driver(void);

/* Open the runtime over the CUDA driver, asleep, with the `device_count` that it is
 * sure
 * to have; -1: not known, so it is woken to say. Creates no context. Fails:
 * driver_version, device_count; CM_CUDA_INSUFFICIENT_DRIVER, CM_CUDA_NO_DEVICE mean "no
 * GPU here", anything else a broken installation. */
CM_NODISCARD cm_status cm_cuda_open(int device_count, cm_runtime **out);

/* The CUDA runtime compiled in, e.g. 12090. Makes no call. */
int cm_cuda_built_version(void);
