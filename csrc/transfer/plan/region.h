/* SPDX-License-Identifier: Apache-2.0 */
/* A strided view of memory anywhere, as plain data: what a copy reads or writes. Pure:
 * no runtime call, no allocation. */
#pragma once

#include "runtime/runtime.h"

enum { CM_MAX_NDIM = 64 };

typedef struct cm_region {
    void *host; /* address of element 0 for the host; NULL if it may not touch it */
    cm_address address; /* the same for the device; 0 if it cannot reach it */
    cm_kind kind;       /* what the memory is: PINNED also for registered memory */
    int device;         /* where it lies or whose context made it; -1 for PAGEABLE */
    int ndim;
    bool is_heap;                 /* an allocator's memory, surely no file's */
    bool is_file;                 /* a mapped file's: its pages may be gone */
    int64_t itemsize;             /* bytes, >= 1 */
    int64_t shape[CM_MAX_NDIM];   /* elements, >= 0 */
    int64_t strides[CM_MAX_NDIM]; /* bytes, may be negative or 0 */
} cm_region;

/* A run of addresses. */
typedef struct cm_byte_span {
    uint64_t begin;
    uint64_t end;
} cm_byte_span;

/* Neither is empty. */
static inline bool
cm_byte_spans_meet(cm_byte_span a, cm_byte_span b)
{
    return a.begin < b.end && b.begin < a.end;
}

/* Do two runs of `nbytes`, which begin at these addresses of a device, share bytes? */
static inline bool
cm_runs_meet(cm_address a, cm_address b, uint64_t nbytes)
{
    return cm_byte_spans_meet((cm_byte_span){a, a + nbytes},
                              (cm_byte_span){b, b + nbytes});
}

/* The bytes of as many elements of `itemsize` bytes as both regions have. It is 0 where
 * their shapes differ, and where these are empty or come to more than `most` bytes. */
uint64_t cm_region_common_nbytes(const cm_region *a, const cm_region *b,
                                 uint64_t itemsize, uint64_t most);

/* Elements in the region (0 if any length is 0). Fails: CM_EOVERFLOW past 63 bits. */
CM_NODISCARD cm_status cm_region_count(const cm_region *region, int64_t *out);

/* Lowest and one-past-highest byte relative to element 0; both 0 when empty.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_region_bounds(const cm_region *region, int64_t *low,
                                        int64_t *high);

/* Do elements certainly share bytes, as in windows that slide and where a stride is 0?
 * False where only arithmetic with three strides or more would tell. */
bool cm_region_shares_bytes(const cm_region *region);
bool cm_region_is_c_contiguous(const cm_region *region);
bool cm_region_is_f_contiguous(const cm_region *region);

/* C-contiguous strides for `region`'s shape and itemsize. Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_region_set_c_strides(cm_region *region);

/* Stretch `src` to `dst`'s shape as NumPy broadcasts (new strides of 0).
 * Fails: CM_ESHAPE. */
CM_NODISCARD cm_status cm_region_broadcast(const cm_region *dst, cm_region *src);

/* Where `nbytes` of memory lie, one number for all views of the same byte: emulated
 * memory of the device has a second mapping, exported as memory of the host, and what
 * is page-locked has addresses of the device's own. */
uint64_t cm_overlap_place(cm_runtime *rt, cm_address address, const void *host,
                          uint64_t nbytes);
/* From the lowest byte of the region to its highest. */
cm_byte_span cm_overlap_span(cm_runtime *rt, const cm_region *region);

/* May the two have bytes in common, by whatever view of them? */
bool cm_overlap_is_possible(cm_runtime *rt, const cm_region *a, const cm_region *b);

/* Along each axis that is longer than 1; the shapes are the same. */
bool cm_region_has_strides_of(const cm_region *a, const cm_region *b);
/* True when the two are the same elements. */
bool cm_region_is_same(const cm_region *a, const cm_region *b);

/* True when only a device may touch the bytes, or ought to. */
bool cm_region_is_on_device(const cm_region *region);
/* The address that the runtime's copies take: the host's own for host memory. */
cm_address cm_region_copy_address(const cm_region *region);
