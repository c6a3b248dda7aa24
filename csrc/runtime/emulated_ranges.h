/* SPDX-License-Identifier: Apache-2.0 */
/* The table under emulated_memory.c: which range an address belongs to. A range that
 * devices see elsewhere than the host does has two spans in it. Private to the emulated
 * memory. Locks: the caller holds memory->lock for everything ending in _locked. */
#ifndef CM_RUNTIME_EMULATED_RANGES_H
#define CM_RUNTIME_EMULATED_RANGES_H

#include "base/thread.h"
#include "runtime/emulated_handles.h"
#include "runtime/emulated_memory.h"
#include "runtime/emulated_pages.h"

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
    uint64_t serial; /* of when it was made; see stamp */
    uint64_t access; /* by device index */
    unsigned pins;   /* executing work */
    bool is_leaving; /* being unmapped: not there for anyone else */
} cm_emulated_mapping;

struct cm_emulated_range {
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
};

typedef struct cm_emulated_span {
    uint64_t start;
    uint64_t end;
    cm_emulated_range *range;
    bool is_first;  /* the span by which the range is freed */
    bool by_device; /* devices may use these addresses */
    bool by_host;
} cm_emulated_span;

enum { CM_EMULATED_FREED_COUNT = 256 };

/* used_nbytes[d] = sum of budget_nbytes of device ranges of d; host_used_nbytes
 * likewise of host and managed ranges. spans is sorted and without overlaps. */
struct cm_emulated_memory {
    cm_mutex lock;
    cm_cond unpinned;
    int device_count;
    uint64_t limit_nbytes;
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
};

/* False when out of memory. */
bool cm_emulated_ranges_insert_locked(cm_emulated_memory *memory,
                                      cm_emulated_range *range);
void cm_emulated_ranges_remove_locked(cm_emulated_memory *memory,
                                      const cm_emulated_range *range);
/* The span that holds the address, or NULL. */
cm_emulated_span *cm_emulated_ranges_find_locked(cm_emulated_memory *memory,
                                                 uint64_t address);
/* True when some range has a byte in [address, address + nbytes). */
bool cm_emulated_ranges_touch_locked(cm_emulated_memory *memory, uint64_t address,
                                     uint64_t nbytes);
void cm_emulated_ranges_place(const cm_emulated_range *range, uint64_t offset,
                              bool by_device, cm_emulated_place *out);

/* Forget registrations that lie where fresh memory was just mapped. */
void cm_emulated_ranges_drop_stale_locked(cm_emulated_memory *memory,
                                          const cm_emulated_range *fresh);
/* Take the range out, wait for executing work, kill its bytes and free it. */
void cm_emulated_ranges_retire_locked(cm_emulated_memory *memory,
                                      cm_emulated_range *range);

/* -- emulated_virtual.c -------------------------------------------------------------- */

/* Fill in what only the mappings know; false when part of it is not mapped. */
bool cm_emulated_virtual_place_locked(const cm_emulated_range *range, uint64_t offset,
                                      uint64_t nbytes, cm_emulated_place *out);
/* False when a mapping came after `stamp`. The bytes are all mapped. */
bool cm_emulated_virtual_pin_locked(const cm_emulated_pin *pin, uint64_t stamp);
/* False when it was unmapped meanwhile; *idle: nobody else is there. */
bool cm_emulated_virtual_unpin_locked(const cm_emulated_pin *pin, bool *idle);
/* Drop what `device` has, wherever it is mapped. */
void cm_emulated_virtual_reset_locked(cm_emulated_memory *memory, int device);
/* Drop everything but the ranges themselves; nothing may be executing. */
void cm_emulated_virtual_fini(cm_emulated_memory *memory);

/* -- emulated_physical.c ------------------------------------------------------------- */

/* Free it if neither a handle nor a place is left. */
void cm_emulated_physical_settle_locked(cm_emulated_memory *memory,
                                        cm_emulated_physical *physical);
/* Release every handle of the device; nothing of it is mapped any more. */
void cm_emulated_physical_reset_locked(cm_emulated_memory *memory, int device);

static inline bool
cm_emulated_is_granular(uint64_t n)
{
    return (n & (CM_EMULATED_GRANULARITY - 1)) == 0;
}

#endif
