/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime as a value: the table of operations and what its driver and devices can do.
 * Callers see handles as integers and never a CUDA type; whether a real GPU, the
 * emulated device or the fault wrapper answers is not theirs to know.
 * Threads: every operation may be called from any thread without a lock of ours held. */
#ifndef CM_RUNTIME_RUNTIME_H
#define CM_RUNTIME_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "runtime/ops.h"

/* An address that the host may not be allowed to touch. */
typedef uint64_t cm_address;

typedef enum cm_backend { CM_BACKEND_CUDA, CM_BACKEND_EMULATED } cm_backend;

/* Numbers of CUDA's own, static-asserted equal in cuda.c. */
enum {
    CM_HOST_ALLOC_PORTABLE = 1,
    CM_HOST_ALLOC_MAPPED = 2,
    CM_HOST_ALLOC_WRITE_COMBINED = 4,
    CM_REGISTER_PORTABLE = 1,
    CM_REGISTER_MAPPED = 2,
    CM_REGISTER_IO_MEMORY = 4,
    CM_REGISTER_READ_ONLY = 8,
    CM_MANAGED_GLOBAL = 1,
    CM_MANAGED_HOST = 2,
    CM_STREAM_NON_BLOCKING = 1,
    CM_EVENT_BLOCKING_SYNC = 1,
    CM_EVENT_DISABLE_TIMING = 2,
    CM_CAPTURE_RELAXED = 2,
    CM_STREAM_LEGACY = 1, /* 0 means the same */
    CM_STREAM_PER_THREAD = 2,
    CM_HOST_LOCATION = -1,
    CM_NO_LOCATION = -2,
    CM_ACCESS_READ = 1,
    CM_ACCESS_WRITE = 2,
    /* error codes that the core looks at */
    CM_CUDA_INVALID_VALUE = 1,
    CM_CUDA_OUT_OF_MEMORY = 2,
    CM_CUDA_UNLOADING = 4,
    CM_CUDA_INSUFFICIENT_DRIVER = 35,
    CM_CUDA_NO_DEVICE = 100,
    CM_CUDA_INVALID_DEVICE = 101,
    CM_CUDA_DEVICE_UNINITIALIZED = 201, /* or a context that is none */
    CM_CUDA_INVALID_HANDLE = 400,
    CM_CUDA_NOT_READY = 600,
    CM_CUDA_PEER_ENABLED = 704, /* already */
    CM_CUDA_CONTEXT_DESTROYED = 709,
    CM_CUDA_ALREADY_REGISTERED = 712,
    CM_CUDA_NOT_REGISTERED = 713,
    CM_CUDA_NOT_SUPPORTED = 801,
    CM_CUDA_CAPTURE_UNSUPPORTED = 900,
    CM_CUDA_CAPTURE_IMPLICIT = 906,
};

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

/* Of no pool: the driver does not know it. */
static inline bool
cm_kind_is_pageable(cm_kind kind)
{
    return kind == CM_KIND_PAGEABLE;
}

static inline bool
cm_kind_is_page_locked(cm_kind kind)
{
    return (cm_kinds[kind].traits & CM_MEMORY_PAGE_LOCKED) != 0;
}

static inline bool
cm_kind_is_shared(cm_kind kind)
{
    return (cm_kinds[kind].traits & CM_MEMORY_SHARED) != 0;
}

static inline bool
cm_kind_migrates(cm_kind kind)
{
    return (cm_kinds[kind].traits & CM_MEMORY_MIGRATES) != 0;
}

static inline bool
cm_kind_is_on_device(cm_kind kind)
{
    return (cm_kinds[kind].traits & CM_MEMORY_ON_DEVICE) != 0;
}

static inline bool
cm_kind_is_ordered(cm_kind kind)
{
    return (cm_kinds[kind].traits & CM_MEMORY_ORDERED) != 0;
}

/* The flags that host memory of the kind must have beside `flags`. */
static inline unsigned
cm_kind_host_flags(cm_kind kind, unsigned flags)
{
    bool is_mapped = cm_kind_is_page_locked(kind) && cm_kind_is_shared(kind);
    return is_mapped ? flags | CM_HOST_ALLOC_MAPPED : flags;
}

/* What physical_create may be asked for; ours alone. */
enum {
    CM_PHYSICAL_RDMA = 1,      /* other devices of the bus may reach it */
    CM_PHYSICAL_SHAREABLE = 2, /* by other processes, as a file descriptor */
};

/* Device attributes that cumem reads: X(name, CUdevice_attribute number). */
#define CM_DEVICE_ATTRIBUTES(X)                                                        \
    X(compute_major, 75)                                                               \
    X(compute_minor, 76)                                                               \
    X(multiprocessor_count, 16)                                                        \
    X(copy_engine_count, 40)                                                           \
    X(unified_addressing, 41)                                                          \
    X(can_map_host_memory, 19)                                                         \
    X(managed_memory, 83)                                                              \
    X(concurrent_managed_access, 89)                                                   \
    X(pageable_memory_access, 88)                                                      \
    X(direct_managed_from_host, 101)                                                   \
    X(host_register_supported, 99)                                                     \
    X(host_register_read_only, 113)                                                    \
    X(memory_pools_supported, 115)                                                     \
    X(l2_cache_nbytes, 38)                                                             \
    X(integrated, 18)                                                                  \
    X(virtual_memory_management, 102)                                                  \
    X(virtual_memory_shareable, 103)                                                   \
    X(virtual_memory_rdma, 110)                                                        \
    X(host_numa_id, 134)

#define CM_ATTRIBUTE_ENUM(name, number) CM_ATTRIBUTE_##name = (number),
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
#define CM_OP_FIELD(name, cuda, driver, arg, params, args) cm_status(*name) params;
    CM_OPS(CM_OP_FIELD)
#undef CM_OP_FIELD
} cm_ops_table;

enum { CM_MAX_DEVICES = 64 };

/* Embedded first in each implementation's own struct. Set once by the implementation's
 * open(), read-only afterwards, except what cm_device_enter() notes. */
struct cm_runtime {
    const cm_ops_table *ops; /* borrowed, static */
    cm_backend backend;
    int driver_version;  /* CUDA version the driver serves, e.g. 13000 */
    int runtime_version; /* CUDA runtime built in, e.g. 12090 */
    int device_count;
    const char *reason; /* emulated only: why there is no GPU; borrowed, "" if asked for
                         */
    const volatile uint32_t *alive; /* one page with MADV_WIPEONFORK: 0 in a forked
                                       child */
    cm_runtime *inner;              /* fault wrapper only: borrowed; else NULL */
    void (*close)(cm_runtime *rt);  /* frees the runtime; every object of it is gone */
    /* Emulated only: see cm_runtime_host_alias(). */
    void *(*host_alias)(const cm_runtime *rt, cm_address address, uint64_t nbytes);
    _Atomic uint64_t primary[CM_MAX_DEVICES]; /* each device's context; 0: none known */
    _Atomic uint64_t context_count; /* of those that were found there so far */
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

/* True in a child made by fork(): no operation may be called any more. */
static inline bool
cm_runtime_is_forked(const cm_runtime *rt)
{
    return *rt->alive == 0;
}

/* The callers: cm_rt_host_alloc(rt, nbytes, flags, &out) and so on, one for each row.
 */
#define CM_OP_CALLER(name, cuda, driver, arg, params, args)                            \
    CM_NODISCARD static inline cm_status cm_rt_##name params                           \
    {                                                                                  \
        return rt->ops->name args;                                                     \
    }
CM_OPS(CM_OP_CALLER)
#undef CM_OP_CALLER

/* Make `device` current for the calling thread and remember what was current before;
 * leave puts it back (also "no context", so that nothing is created on device 0).
 * A failed enter needs no leave. A failing leave is ignored: there is nothing to undo.
 */
typedef struct cm_device_guard {
    uint64_t previous;
    bool switched;
} cm_device_guard;

CM_NODISCARD cm_status cm_device_enter(cm_runtime *rt, int device,
                                       cm_device_guard *guard);
void cm_device_leave(cm_runtime *rt, const cm_device_guard *guard);
/* To enter it takes no time: its context is known. */
bool cm_device_was_entered(const cm_runtime *rt, int device);

/* Between the two: the cm_status `status` becomes that of `call`, or why the device
 * could not be made current. */
#define CM_ON_DEVICE(status, rt, device, call)                                         \
    do {                                                                               \
        cm_device_guard cm_guard_;                                                     \
        (status) = cm_device_enter((rt), (device), &cm_guard_);                        \
        if (cm_is_ok(status)) {                                                        \
            (status) = (call);                                                         \
            cm_device_leave((rt), &cm_guard_);                                         \
        }                                                                              \
    } while (0)

/* Map the page behind `alive`, holding 1. Fails: CM_ESYSTEM. */
CM_NODISCARD cm_status cm_alive_page_create(const volatile uint32_t **out);
void cm_alive_page_destroy(const volatile uint32_t *page);

/* Open the runtime over the CUDA driver. Makes the first driver call of the process but
 * creates no context. Fails: driver_version, device_count; CM_CUDA_INSUFFICIENT_DRIVER,
 * CM_CUDA_NO_DEVICE mean "no GPU here", anything else a broken installation. */
CM_NODISCARD cm_status cm_cuda_open(cm_runtime **out);

/* The CUDA runtime compiled in, e.g. 12090. Makes no call. */
int cm_cuda_built_version(void);

#endif
