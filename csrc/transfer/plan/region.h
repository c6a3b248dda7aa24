/* SPDX-License-Identifier: Apache-2.0 */
/* A region describes what a copy reads or writes. It is a strided view of memory of any
 * kind, as plain data. The functions that take a runtime ask the runtime where memory
 * is mapped, and all others are pure. Nothing here allocates. */
#pragma once

#include "runtime/runtime.h"

enum { CM_MAX_NDIM = 64 };

typedef struct cm_region {
    /* The address of element 0 for the host; NULL if the host may not touch it. */
    void *host;
    cm_address address; /* the address for the device; 0 if the device cannot reach the
                           memory */
    cm_kind kind;       /* PINNED for registered memory, too */
    int device; /* the device where the memory lies or, for memory of the host, the
                   device whose context made it; -1 for PAGEABLE */
    int ndim;
    bool is_heap; /* an allocator made the memory, so it is certainly no mapping of a
                     file */
    /* A mapping of a file: reading it may fault if the file has become shorter. */
    bool is_file;
    int64_t itemsize;             /* bytes, >= 1 */
    int64_t shape[CM_MAX_NDIM];   /* elements, >= 0 */
    int64_t strides[CM_MAX_NDIM]; /* bytes, may be negative or 0 */
} cm_region;

/* The addresses from `begin` up to, but not including, `end`. */
typedef struct cm_byte_span {
    uint64_t begin;
    uint64_t end;
} cm_byte_span;

/* True if the two spans have an address in common. Neither span may be empty. */
static inline bool
cm_byte_spans_meet(cm_byte_span a, cm_byte_span b)
{
    return a.begin < b.end && b.begin < a.end;
}

/* True if two runs of `nbytes`, which begin at these addresses of a device, share
 * bytes. */
static inline bool
cm_runs_meet(cm_address a, cm_address b, uint64_t nbytes)
{
    return cm_byte_spans_meet((cm_byte_span){a, a + nbytes},
                              (cm_byte_span){b, b + nbytes});
}

/* If two regions have the same shape, return how many bytes the elements of one of them
 * would take if each element had `itemsize` bytes. Returns 0 if the shapes differ, if
 * the regions are empty, or if the result would exceed `most`. */
uint64_t cm_region_common_nbytes(const cm_region *a, const cm_region *b,
                                 uint64_t itemsize, uint64_t most);

/* True if any length is 0, however large the others are. */
bool cm_region_is_empty(const cm_region *region);

/* Count the elements of the region; 0 if any length is 0.
 * Fails: CM_EOVERFLOW past 63 bits. */
CM_NODISCARD cm_status cm_region_count(const cm_region *region, int64_t *out);

/* Set `low` to the offset of the lowest byte of the region, and `high` to the offset of
 * the byte after its highest. Both offsets count from element 0, and both are 0 if the
 * region is empty.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_region_bounds(const cm_region *region, int64_t *low,
                                        int64_t *high);

/* True if two elements of the region certainly share bytes, as elements do in sliding
 * windows and if a stride is 0. Only one or two strides at a time are looked at. So the
 * answer is false for elements that share bytes only because of how three or more
 * strides add up. */
bool cm_region_shares_bytes(const cm_region *region);
bool cm_region_is_c_contiguous(const cm_region *region);
bool cm_region_is_f_contiguous(const cm_region *region);

/* Set the strides of `region` to those of C order for its shape and itemsize.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_region_set_c_strides(cm_region *region);

/* Stretch `src` to the shape of `dst` as NumPy broadcasts. The axes along which `src`
 * is repeated get the stride 0.
 * Fails: CM_ESHAPE. */
CM_NODISCARD cm_status cm_region_broadcast(const cm_region *dst, cm_region *src);

/* Return a number for a run of `nbytes` of memory. All views of that memory get the
 * same number, so that overlaps are found by comparing numbers. The addresses
 * themselves would not do, since views of the same memory may have different addresses.
 * For example, memory of an emulated device has a second mapping, which is exported as
 * memory of the host, and the device may use another address for page-locked memory
 * than the host does. */
uint64_t cm_overlap_place(cm_runtime *rt, cm_address address, const void *host,
                          uint64_t nbytes);
/* Return the span of the numbers that cm_overlap_place() gives to the bytes from the
 * region's lowest to its highest. */
cm_byte_span cm_overlap_span(cm_runtime *rt, const cm_region *region);

/* True if the two regions may have bytes in common, even if they are views of the same
 * memory at different addresses. */
bool cm_overlap_is_possible(cm_runtime *rt, const cm_region *a, const cm_region *b);

/* True if the strides are equal along each axis that is longer than 1. Both regions
 * must have the same shape. */
bool cm_region_has_strides_of(const cm_region *a, const cm_region *b);
/* True if the two regions describe the same elements in the same order. */
bool cm_region_is_same(const cm_region *a, const cm_region *b);

/* True if a device, and not the host, should touch the bytes. That is so for device
 * memory, even if the host could reach it, and for all memory that has no address for
 * the host. */
bool cm_region_is_on_device(const cm_region *region);
/* Return the address that the runtime's copies take. It is `address` if
 * cm_region_is_on_device() is true, and otherwise `host`. */
cm_address cm_region_copy_address(const cm_region *region);
