/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of the emulated device: what is allocated or registered, where its bytes
 * really are, and who may touch them. Device memory is a reservation that nobody may
 * touch plus the bytes somewhere else, between guard pages. Knows nothing of streams:
 * freeing waits for executing work that has pinned the range, and unregistering for
 * copies that are queued. */
#ifndef CM_RUNTIME_EMULATED_MEMORY_H
#define CM_RUNTIME_EMULATED_MEMORY_H

#include "runtime/emulated/private.h"

/* How [address, address + nbytes) lies to the known ranges. */
typedef enum cm_emulated_peer_access {
    CM_EMULATED_UNKNOWN, /* touches none: ordinary host memory */
    CM_EMULATED_INSIDE,  /* inside exactly one */
    CM_EMULATED_BROKEN   /* over an edge, or freed */
} cm_emulated_peer_access;

/* A snapshot of where an address lies. */
typedef struct cm_emulated_place {
    cm_emulated_range *range; /* borrowed: until the lock is let go */
    uint64_t offset;          /* in the range */
    cm_emulated_kind kind;
    int device;
    unsigned flags;
    uint64_t access;      /* by device index: which may touch all of it */
    cm_address address;   /* the same byte for devices */
    void *host;           /* the same byte for the host; NULL for device memory */
    unsigned char *bytes; /* the same byte for the emulator */
    bool by_device;       /* the address asked for is one that a device may use */
    bool is_mapped;       /* on demand, with an access of its own */
} cm_emulated_place;

void cm_emulated_memory_init(cm_emulated *emulated);
/* Unmaps everything; nothing may be executing any more. */
void cm_emulated_memory_fini(cm_emulated *emulated);
/* Free whatever `device` still has, and let it use no other's memory. */
void cm_emulated_memory_reset(cm_emulated *emulated, int device);

/* *out is written when it is inside. */
cm_emulated_peer_access cm_emulated_find(const cm_emulated *emulated, uint64_t address,
                                         uint64_t nbytes, cm_emulated_place *out);

enum { CM_EMULATED_ANY = -1 };

/* What executing work holds of a range; all zero: nothing. */
typedef struct cm_emulated_pin {
    cm_emulated_range *range; /* borrowed; NULL: nothing */
    uint64_t offset;
    uint64_t nbytes;
    unsigned char *bytes; /* for the emulator */
} cm_emulated_pin;

/* As find, and keep the range from going away until unpin. `device`: only an address
 * that this device may use will do, and managed memory comes to it; CM_EMULATED_ANY:
 * any.
 * `stamp`: the memory's serial when the work was queued. Fails: CM_CUDA_ILLEGAL_ADDRESS. */
int32_t cm_emulated_pin_range(cm_emulated *emulated, uint64_t address, uint64_t nbytes,
                              int device, uint64_t stamp, cm_emulated_pin *pin);
/* `code`, or if that is 0 CM_CUDA_ILLEGAL_ADDRESS when the memory was unmapped under
 * the work. */
int32_t cm_emulated_unpin(cm_emulated *emulated, const cm_emulated_pin *pin,
                          int32_t code);

/* A copy that is queued holds the registered memory it is about, of which that is the
 * place: unregistering waits for it, as the driver does. NULL: not registered. */
cm_emulated_range *cm_emulated_hold(const cm_emulated_place *place);
void cm_emulated_let_go(cm_emulated *emulated, cm_emulated_range *range);

/* Managed pages of a range that are on the host. Fails: CM_CUDA_INVALID_VALUE. */
int32_t cm_emulated_count_host_pages(const cm_emulated *emulated, cm_address address,
                                     uint64_t nbytes, uint64_t *out);

#endif
