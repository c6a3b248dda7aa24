/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime is a value, which consists of the table of operations and of facts about
 * its driver and devices. Callers see handles as integers and never a CUDA type. They
 * need not know whether a real GPU, the emulated device or the fault wrapper answers.
 * Threads: any thread may call every operation, while it holds no lock of ours. */
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

/* Numbers that CUDA defines: X(name, number, CUDA's name). cuda.c asserts that they are
 * the same. */
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
    /* also says that a context does not exist */                                      \
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
    CM_CUDA_NUMBERS(CM_NUMBER_ENUM) /* and two numbers that CUDA writes as pointers: */
    CM_STREAM_LEGACY = 1,           /* 0 means the same stream */
    CM_STREAM_PER_THREAD = 2,
};
#undef CM_NUMBER_ENUM

/* Turn the number of a NUMA node of the host into a location, or such a location back
 * into its node: the formula is its own inverse. CUDA itself has no numbers for these
 * locations. */
#define CM_NUMA_LOCATION(node) (CM_NO_LOCATION - 1 - (node))

/* Properties of a kind of memory. */
enum {
    CM_MEMORY_PAGE_LOCKED = 1, /* host memory that stays where it is */
    CM_MEMORY_SHARED = 2,      /* both host and devices can use it */
    CM_MEMORY_MIGRATES = 4,    /* its pages move to where they are used */
    CM_MEMORY_ON_DEVICE = 8,   /* the host may not touch it */
    /* Only work on streams uses it, so the order of that work is all the protection
     * that it needs. */
    CM_MEMORY_ORDERED = 16,
};

/* The kinds of memory: X(name, its text, its properties, the flags with which it is
 * allocated). */
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

/* Return the number that stands for a kind in a cm_event. Events have numbers of their
 * own for kinds, which base/recorder.h lists by name: a new row of CM_KINDS compiles
 * only after its name has been added at the end of that list. */
static inline uint8_t
cm_kind_in_event(cm_kind kind)
{
    switch (kind) {
#define CM_KIND_NUMBER(name, text, traits, flags)                                      \
    case CM_KIND_##name:                                                               \
        return CM_EVENT_##name;
        CM_KINDS(CM_KIND_NUMBER)
#undef CM_KIND_NUMBER
    case CM_KIND_COUNT:
        break;
    }
    return 0;
}

/* True for ordinary memory, which the driver does not know and no pool has. */
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

/* Flags for physical_create. They are our own, not CUDA's. */
enum { CM_PHYSICAL_RDMA = 1 }; /* other devices on the bus may reach it */

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

/* What the driver says about an address. Host memory that the driver does not know is
 * PAGEABLE. */
typedef struct cm_pointer_info {
    cm_kind kind; /* PAGEABLE, PINNED (for all page-locked memory), MANAGED or DEVICE */
    int device;   /* index; -1 for PAGEABLE */
    cm_address device_address;
    void *host_address; /* NULL if the host may not touch it */
} cm_pointer_info;

typedef struct cm_runtime cm_runtime;

/* Return the code of `expr` if it is a failure. Bodies of operations, which return bare
 * codes, use this. */
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

/* The fourth part of a row of CM_OPS is a pair about the argument that tells most about
 * a failure. The first macro returns its kind, as text, and the second its value, which
 * a status carries as a number. */
#define CM_ARGUMENT_KIND(kind, value) #kind
#define CM_ARGUMENT_VALUE(kind, value) (value)

typedef struct cm_ops_table {
#define CM_OP_FIELD(name, cuda, driver, arg, params, args)                             \
    cm_status(*name) CM_OP_PARAMS params;
    CM_OPS(CM_OP_FIELD)
#undef CM_OP_FIELD
} cm_ops_table;

enum { CM_MAX_DEVICES = 64 };

/* The common part of a runtime, which each implementation has as the first member of
 * its own struct. The function that opens the runtime sets it once. What changes
 * afterwards is how far the runtime has come from sleep to work, the contexts that
 * cm_device_enter() notes, and the list of capturable streams.
 *
 * From sleep to work
 * ------------------
 * A runtime opens asleep. It then knows the version of its driver and how many devices
 * there are, which is enough for many calls. Nothing has been done in the process that
 * a forked child could not do for itself. So a child goes on with a sleeping runtime as
 * if the child had opened it itself. A runtime leaves this state in two steps:
 *
 *   - bound: something in this process depends on the runtime, such as threads that
 *     copy. A child must not use the runtime as it is, and cm_runtime_is_forked() is
 *     true there. But no driver has been started, so the child may take the runtime
 *     over (cm_runtime_revive()).
 *   - awake: the first operation that needed the driver has started it (cuInit). A
 *     started driver does not work in a child. The child can only open a runtime for
 *     the host alone (cm_host_only_open()), whose `wake` always fails with CM_EFORKED.
 *
 * Example: `set_limit()` or `device_count()` before a fork cost the child nothing.
 * After `empty_pinned()` in the parent, a child still copies between ordinary arrays,
 * and `empty_pinned()` fails in it with CM_EFORKED. */
struct cm_runtime {
    const cm_ops_table *ops; /* borrowed, static */
    cm_backend backend;
    int driver_version;  /* the CUDA version that the driver serves, e.g. 13000 */
    int runtime_version; /* the version of the library that is built in */
    /* While the runtime is asleep, the number that the driver is expected to report;
     * see `wake`. */
    int device_count;
    /* Why the emulated device was chosen, such as that there is no GPU, or "" if the
     * user asked for it. Borrowed. */
    const char *reason;
    /* A page that holds 1 here, and 0 in a child that was forked after the runtime was
     * bound. */
    const volatile uint32_t *alive;
    /* In the fault wrapper, the runtime under it, borrowed. Else NULL. */
    cm_runtime *inner;
    /* Start the driver, and set device_count to what it reports. Only cm_runtime_wake()
     * calls this, from one thread at a time. */
    cm_status (*wake)(cm_runtime *rt);
    /* True if anybody in the process has started the driver. The pointer is NULL if
     * only this runtime could start it. */
    bool (*is_started)(const cm_runtime *rt);
    atomic_bool is_awake;
    atomic_bool is_bound;
    cm_mutex waking;   /* held by the thread that wakes the runtime */
    bool is_host_only; /* made by cm_host_only_open(): it never wakes */
    /* Free the runtime. All its objects are gone by then. */
    void (*close)(cm_runtime *rt);
    /* Set in the emulated device only; see cm_runtime_host_alias(). */
    void *(*host_alias)(const cm_runtime *rt, cm_address address, uint64_t nbytes);
    /* The primary context of each device; 0 if the context is not known. */
    _Atomic uint64_t primary[CM_MAX_DEVICES];
    _Atomic uint64_t context_count; /* how often `primary` has changed */
    cm_mutex capturable_lock;
    /* All kept streams that other code may begin to capture. Only stream.c uses this
     * list. It is all zero until there is such a stream. */
    cm_list capturable;
};

/* What ops.h says about an operation. The entry of CM_OP_none is empty. */
typedef struct cm_op_fact {
    const char *name;          /* "host_alloc" */
    const char *cuda_name;     /* "cudaHostAlloc" */
    const char *argument_kind; /* "NBYTES" */
    int min_driver;            /* the oldest driver that has it, e.g. 12050 */
} cm_op_fact;

extern const cm_op_fact cm_op_facts[CM_OP_COUNT];

/* Return where the host can touch what devices have at `address`: for emulated device
 * memory that is its second mapping, and for other emulated memory the address that the
 * host uses. Returns NULL on a real GPU, and if [address, address + nbytes) is not
 * inside one live allocation or registration. */
static inline void *
cm_runtime_host_alias(const cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    return rt->host_alias == NULL ? NULL : rt->host_alias(rt, address, nbytes);
}

/* True if the runtime's driver has the operation. */
static inline bool
cm_runtime_has(const cm_runtime *rt, cm_op op)
{
    return rt->driver_version >= cm_op_facts[op].min_driver;
}

/* True in a child that was forked after the runtime was bound to the parent. No
 * operation may be called there. */
static inline bool
cm_runtime_is_forked(const cm_runtime *rt)
{
    return *rt->alive == 0;
}

/* True if the runtime has started its driver. Until then we have locked no memory and
 * made no stream or context, so a caller that wants to know about these need not ask
 * the driver. */
static inline bool
cm_runtime_is_awake(const cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return atomic_load_explicit(&rt->is_awake, memory_order_acquire);
}

/* True if the runtime is awake. Until then the driver knows of no memory or context, so
 * it need not be asked. If other code in the process has started the driver, this wakes
 * the runtime, since the driver knows the memory that such code has page-locked.
 * Nothing is lost by that: a driver that has been started does not work in children,
 * whoever started it. */
bool cm_runtime_wake_if_started(cm_runtime *rt);

/* Bind the runtime to this process, so that children which are forked from now on may
 * not use it. From the second call on this costs nothing. */
void cm_runtime_bind(cm_runtime *rt);

/* Start the driver if the runtime is asleep. Each operation that needs the driver does
 * so.
 * Blocks: while the driver starts, or another thread starts it.
 * Fails: as the driver; CM_EFORKED if the runtime is for the host alone. */
CM_NODISCARD cm_status cm_runtime_wake(cm_runtime *rt);

/* Take the runtime over in a forked child. The parent had bound it, but had not woken
 * it.
 * Fails: CM_ESYSTEM. */
CM_NODISCARD cm_status cm_runtime_revive(cm_runtime *rt);

/* Open a runtime for the host alone, in a forked child whose parent had started a
 * driver. It reports what `parent` knew about driver and devices, but it knows ordinary
 * memory only, and refuses to make or use any other.
 * Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_host_only_open(const cm_runtime *parent, cm_runtime **out);

/* True for the codes with which calls fail while the process, the context or the driver
 * goes away. Whatever such a call was meant to give back is gone already, so callers do
 * not count this as a failure. */
static inline bool
cm_code_is_unloading(int32_t code)
{
    return code == CM_CUDA_UNLOADING || code == CM_CUDA_CONTEXT_DESTROYED
           || code == CM_CUDA_INSUFFICIENT_DRIVER;
}

/* The callers, one for each row: cm_rt_host_alloc(rt, nbytes, flags, &out) and so
 * on. */
#define CM_OP_CALLER(name, cuda, driver, arg, params, args)                            \
    CM_NODISCARD static inline cm_status cm_rt_##name CM_OP_PARAMS params              \
    {                                                                                  \
        return rt->ops->name CM_OP_ARGS args;                                          \
    }
CM_OPS(CM_OP_CALLER)
#undef CM_OP_CALLER

/* Make `device` current for the calling thread, and remember the context that was
 * current before. cm_device_leave() makes that context current again, or none if there
 * was none, so that nothing is created on device 0 by accident. A failed enter needs no
 * leave. A failure to leave is ignored, since the caller could do nothing about it.
 * Fails: context_get, device_set, context_set. */
typedef struct cm_device_guard {
    uint64_t previous; /* the context that was current before; 0 if there was none */
    bool switched;     /* another context was made current */
} cm_device_guard;

CM_NODISCARD cm_status cm_device_enter(cm_runtime *rt, int device,
                                       cm_device_guard *guard);
/* Do the same as cm_device_enter() for a call for which any device will do. If a
 * context is current it stays so; else a device that already has a context is entered,
 * and `device` only if none has. */
CM_NODISCARD cm_status cm_device_enter_any(cm_runtime *rt, int device,
                                           cm_device_guard *guard);
/* Return a device that has a context by now, whoever made it: `preferred` if it has
 * one, else another, or -1 if none has. Creates no context. */
int cm_device_with_context(cm_runtime *rt, int preferred);
/* Set *out to false if no host memory can be page-locked or managed yet, because there
 * is no context that could have made it so. The caller then need not ask the driver
 * about an address, which would make a context. A context that cuCtxCreate made is
 * noticed only while it is current for the calling thread. Creates no context.
 * Fails: context_get. */
CM_NODISCARD cm_status cm_host_may_be_locked(cm_runtime *rt, bool *out);
void cm_device_leave(cm_runtime *rt, const cm_device_guard *guard);
/* Return the devices, as bits, on which this process has a context, without making any.
 * These are the devices that we entered and, with `by_anyone`, those on which other
 * code made the primary context. With `by_anyone` a device that cannot be asked counts
 * too. The driver does not report other contexts, which cuCtxCreate makes. */
uint64_t cm_devices_in_use(cm_runtime *rt, bool by_anyone);
/* True if the primary context of the device is known, so that entering it makes no
 * context. */
bool cm_device_was_entered(const cm_runtime *rt, int device);

/* Make `call` between enter and leave, and give its status, or the status of the enter
 * if the enter failed. */
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

/* Make a call, and make it again if it fails. True if either succeeded. This is for
 * calls that give something back or restore something: if both fail, nothing can be
 * done, and nobody needs to know. */
#define CM_TRY_TWICE(call) (cm_is_ok(call) || cm_is_ok(call))

/* Map a page for `alive`, which holds 1.
 * Fails: CM_ESYSTEM, CM_ENOMEM. */
CM_NODISCARD cm_status cm_alive_page_create(const volatile uint32_t **out);
/* cm_alive_page_arm() makes the page hold 0 in children that are forked from now on.
 * cm_alive_page_reset() is for such a child: it makes the page hold 1 again, as at
 * first. */
void cm_alive_page_arm(const volatile uint32_t *page);
CM_NODISCARD cm_status cm_alive_page_reset(const volatile uint32_t *page);
void cm_alive_page_destroy(const volatile uint32_t *page);

/* Return the newest CUDA version that the installed driver serves, without starting it,
 * or 0 if there is no driver or it is too old. Loads the driver's library for good. */
int cm_cuda_find_driver(void);

/* Open the runtime over the CUDA driver. It opens asleep, with the `device_count` that
 * the caller expects the driver to report. If `device_count` is -1, the driver is
 * started to find out the number. Creates no context.
 * Fails: driver_version, device_count. CM_CUDA_INSUFFICIENT_DRIVER and
 * CM_CUDA_NO_DEVICE mean that there is no GPU here. Any other code means a broken
 * installation. */
CM_NODISCARD cm_status cm_cuda_open(int device_count, cm_runtime **out);

/* Return the version of the CUDA runtime that is compiled in, such as 12090. Makes no
 * call. */
int cm_cuda_built_version(void);
