/* SPDX-License-Identifier: Apache-2.0 */
/* The address ranges of the emulated device: what is allocated, registered or freed,
 * where its bytes really are, and who may touch them. Device memory is a reservation
 * that nobody may touch plus the bytes somewhere else, between guard pages; freed
 * memory becomes untouchable and its addresses stay taken for a while, so that late
 * work is caught. Knows nothing of streams. Answers bare codes: 0 or a cudaError_t.
 * Locks: one mutex; freeing waits for executing work that has pinned the range, and
 * unregistering for copies that are queued. */
#ifndef CM_RUNTIME_EMULATED_MEMORY_H
#define CM_RUNTIME_EMULATED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/emulated.h"
#include "runtime/runtime.h"

typedef struct cm_emulated_memory cm_emulated_memory;

typedef enum cm_emulated_kind {
    CM_EMULATED_DEVICE,
    CM_EMULATED_MANAGED,
    CM_EMULATED_HOST,
    CM_EMULATED_REGISTERED,
    CM_EMULATED_VIRTUAL, /* addresses only; what is mapped there is DEVICE to callers */
} cm_emulated_kind;

/* How [address, address + nbytes) lies to the known ranges. */
typedef enum cm_emulated_reach {
    CM_EMULATED_UNKNOWN, /* touches none: ordinary host memory */
    CM_EMULATED_INSIDE,  /* inside exactly one */
    CM_EMULATED_BROKEN   /* over an edge, or freed */
} cm_emulated_reach;

/* A snapshot of where an address lies. */
typedef struct cm_emulated_place {
    cm_emulated_kind kind;
    int device;
    unsigned flags;
    uint64_t access;      /* by device index: who may touch all of it */
    cm_address address;   /* the same byte for devices */
    void *host;           /* the same byte for the host; NULL for device memory */
    unsigned char *bytes; /* the same byte for the emulator */
    bool by_device;       /* the address asked for is one that a device may use */
    bool is_mapped;       /* on demand, with an access of its own */
} cm_emulated_place;

/* Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_emulated_memory_create(int device_count,
                                                 uint64_t memory_nbytes,
                                                 cm_emulated_memory **out);
/* Unmaps everything; nothing may be executing any more. */
void cm_emulated_memory_destroy(cm_emulated_memory *memory);

int32_t cm_emulated_memory_alloc(cm_emulated_memory *memory, cm_emulated_kind kind,
                                 int device, unsigned flags, uint64_t nbytes,
                                 cm_emulated_place *out);
/* `address` must be the start of a range of one of the kinds in the mask 1 << kind.
 * Blocks: while work executes on it. Fails: CM_CUDA_INVALID_VALUE. */
int32_t cm_emulated_memory_free(cm_emulated_memory *memory, uint64_t address,
                                unsigned kinds);
int32_t cm_emulated_memory_register(cm_emulated_memory *memory, int device, void *host,
                                    uint64_t nbytes, unsigned flags);
/* Blocks: while copies of it are queued. */
int32_t cm_emulated_memory_unregister(cm_emulated_memory *memory, const void *host);
/* Free whatever `device` still has, and let it use no other's memory. */
void cm_emulated_memory_reset(cm_emulated_memory *memory, int device);

/* From now on `device` may use what was allocated on `peer`, but for what is mapped
 * there. False: it may already. */
bool cm_emulated_memory_enable_peer(cm_emulated_memory *memory, int device, int peer);

cm_emulated_reach cm_emulated_memory_find(cm_emulated_memory *memory, uint64_t address,
                                          uint64_t nbytes, cm_emulated_place *out);

/* What late or misplaced work comes to; the rest is in runtime.h. */
enum { CM_CUDA_ILLEGAL_ADDRESS = 700 };

/* What executing work holds; all zero: nothing. */
typedef struct cm_emulated_range cm_emulated_range;
typedef struct cm_emulated_pin {
    cm_emulated_range *range; /* borrowed; NULL: nothing */
    uint64_t offset;
    uint64_t nbytes;
} cm_emulated_pin;

enum { CM_EMULATED_ANY = -1 };

/* When work is queued: what is mapped later at the same addresses is not what it meant.
 */
uint64_t cm_emulated_memory_stamp(cm_emulated_memory *memory);
/* As find, and keep the range from going away until unpin. `device`: only an address
 * that this device may use will do; CM_EMULATED_ANY: any. `stamp`: of when the work was
 * queued. Fails: CM_CUDA_ILLEGAL_ADDRESS. */
int32_t cm_emulated_memory_pin(cm_emulated_memory *memory, uint64_t address,
                               uint64_t nbytes, int device, uint64_t stamp,
                               cm_emulated_place *out, cm_emulated_pin *pin);
/* Fails: CM_CUDA_ILLEGAL_ADDRESS when the memory was unmapped under the work. */
int32_t cm_emulated_memory_unpin(cm_emulated_memory *memory,
                                 const cm_emulated_pin *pin);

/* A copy that is queued holds the registered memory it is about, of which that is the
 * place: unregistering waits for it, as the driver does. NULL: not registered. */
cm_emulated_range *cm_emulated_memory_hold(cm_emulated_memory *memory,
                                           const cm_emulated_place *place);
void cm_emulated_memory_let_go(cm_emulated_memory *memory, cm_emulated_range *range);

/* -- emulated_virtual.c, emulated_physical.c: as ops.h says ------------------------- */

#define CM_EMULATED_GRANULARITY (UINT64_C(2) << 20)

int32_t cm_emulated_memory_reserve(cm_emulated_memory *memory, uint64_t nbytes,
                                   cm_address *out);
int32_t cm_emulated_memory_unreserve(cm_emulated_memory *memory, cm_address address,
                                     uint64_t nbytes);
int32_t cm_emulated_memory_create_physical(cm_emulated_memory *memory, uint64_t nbytes,
                                           int device, uint64_t *out);
int32_t cm_emulated_memory_release_physical(cm_emulated_memory *memory,
                                            uint64_t handle);
int32_t cm_emulated_memory_map(cm_emulated_memory *memory, cm_address address,
                               uint64_t nbytes, uint64_t handle);
/* Work that executes there is waited for and fails. */
int32_t cm_emulated_memory_unmap(cm_emulated_memory *memory, cm_address address,
                                 uint64_t nbytes);
int32_t cm_emulated_memory_set_access(cm_emulated_memory *memory, cm_address address,
                                      uint64_t nbytes, uint64_t devices);

/* Managed pages. `prefetch` notes the wish, `migrate` moves the pages; the range must
 * lie
 * inside one managed allocation. Fails: CM_CUDA_INVALID_VALUE. */
int32_t cm_emulated_memory_prefetch(cm_emulated_memory *memory, cm_address address,
                                    uint64_t nbytes, int location);
int32_t cm_emulated_memory_migrate(cm_emulated_memory *memory, cm_address address,
                                   uint64_t nbytes, int location);
int32_t cm_emulated_memory_prefetched(cm_emulated_memory *memory, cm_address address,
                                      uint64_t nbytes, int *location);
int32_t cm_emulated_memory_host_pages(cm_emulated_memory *memory, cm_address address,
                                      uint64_t nbytes, uint64_t *out);

uint64_t cm_emulated_memory_used(cm_emulated_memory *memory, int device);
void cm_emulated_memory_read(cm_emulated_memory *memory, cm_emulated_counts *out);

#endif
