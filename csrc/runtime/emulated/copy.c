/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the copies and fills of the emulated device. Ranges are checked when the call
 * is made and looked up again when the work is done, so that memory which was freed in
 * between is an error. Registered memory cannot be unregistered in between. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated/private.h"

typedef struct move {
    cm_emulated_job base; /* comes first; owns the staged bytes of a pageable source */
    uint64_t dst_pitch;
    uint64_t src_pitch;
    uint64_t width;
    uint64_t height;
} move;

typedef struct fill {
    cm_emulated_job base; /* first */
    uint32_t unit;        /* in bytes */
    uint32_t value;
} fill;

static void
move_rows(cm_emulated_job *base, unsigned char *dst, const unsigned char *src)
{
    const move *job = (const move *)base;
    src = base->owned != NULL ? base->owned : src;
    for (uint64_t row = 0; row < job->height; row++) {
        memmove(dst + row * job->dst_pitch, src + row * job->src_pitch, job->width);
    }
}

static bool
is_read_only(const cm_emulated_place *place)
{
    return place->kind == CM_EMULATED_REGISTERED
           && (place->range->flags & CM_REGISTER_READ_ONLY) != 0;
}

/* Check one end of a copy, which must be inside one range or plain memory. With
 * `device` < 0 the memory may belong to any device. A queued copy holds registered
 * memory, so that unregistering waits for the copy, as the driver does. */
static int32_t
check_end(const cm_emulated *emulated, cm_emulated_end *end, bool written, int device,
          cm_emulated_place *place)
{
    switch (cm_emulated_find(emulated, end->address, end->nbytes, place)) {
    case CM_EMULATED_UNKNOWN:
        end->is_plain = true;
        place->kind = CM_EMULATED_HOST;
        return device < 0 ? 0 : CM_CUDA_INVALID_VALUE;
    case CM_EMULATED_INSIDE:
        if (place->kind == CM_EMULATED_REGISTERED) {
            end->held = place->range;
            end->held->waiting++;
        }
        break;
    default:
        return CM_CUDA_INVALID_VALUE;
    }
    bool is_elsewhere =
        device >= 0 && place->kind == CM_EMULATED_DEVICE && place->device != device;
    return place->access == 0 || (written && is_read_only(place)) || is_elsewhere
               ? CM_CUDA_INVALID_VALUE
               : 0;
}

/* True if the place is mapped memory that `device` may not touch. */
static bool
is_shut(const cm_emulated_place *place, int device)
{
    return place->range->physical != NULL && (place->access >> device & 1) == 0;
}

/* True if the ends lie on devices that may not touch each other's mapped memory. Only
 * cudaMemcpyPeerAsync knows a way between such devices; a plain copy needs the memory
 * mapped for both. */
static bool
are_apart(const cm_emulated_place *dst, const cm_emulated_place *src)
{
    return dst->kind == CM_EMULATED_DEVICE && src->kind == CM_EMULATED_DEVICE
           && (is_shut(dst, src->device) || is_shut(src, dst->device));
}

static int32_t
check_ends(const cm_emulated *emulated, cm_emulated_job *job, const int *devices)
{
    cm_emulated_place dst, src;
    CM_TRY_CODE(check_end(emulated, &job->dst, true, devices ? devices[0] : -1, &dst));
    CM_TRY_CODE(check_end(emulated, &job->src, false, devices ? devices[1] : -1, &src));
    return devices == NULL && are_apart(&dst, &src) ? CM_CUDA_INVALID_VALUE : 0;
}

/* Read a pageable source before the call returns, as CUDA does. */
static int32_t
stage(move *job)
{
    uint64_t nbytes;
    if (!cm_mul_u64(job->width, job->height, &nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    unsigned char *staged = malloc(nbytes);
    if (staged == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    const unsigned char *src = (const unsigned char *)(uintptr_t)job->base.src.address;
    for (uint64_t row = 0; row < job->height; row++) {
        memcpy(staged + row * job->width, src + row * job->src_pitch, job->width);
    }
    job->src_pitch = job->width;
    job->base.owned = staged;
    return 0;
}

/* Return the bytes from the start of the first row to the end of the last one. */
static int32_t
find_extent(uint64_t pitch, const move *what, uint64_t *out)
{
    if (pitch < what->width) {
        return CM_CUDA_INVALID_PITCH;
    }
    uint64_t before;
    if (!cm_mul_u64(what->height - 1, pitch, &before)
        || !cm_add_u64(before, what->width, out)) {
        return CM_CUDA_INVALID_VALUE;
    }
    return 0;
}

/* Check, stage and queue a copy. If `devices` is not NULL, it holds the devices of the
 * target and the source, to which the ends must belong. */
static int32_t
move_submit(cm_emulated *emulated, move what, const int *devices, uint64_t stream)
{
    int device;
    cm_emulated_job *job = &what.base;
    CM_TRY_CODE(cm_emulated_device_of(emulated, stream, &device));
    if (what.width == 0 || what.height == 0) {
        return 0;
    }
    CM_TRY_CODE(find_extent(what.dst_pitch, &what, &job->dst.nbytes));
    CM_TRY_CODE(find_extent(what.src_pitch, &what, &job->src.nbytes));
    job->run = cm_emulated_touch;
    job->touch = move_rows;
    job->device = CM_EMULATED_ANY;
    int32_t code = check_ends(emulated, job, devices);
    if (code == 0 && job->src.is_plain && !job->dst.is_plain) {
        code = stage(&what);
    }
    if (code != 0) {
        cm_emulated_job_drop(emulated, job);
        return code;
    }
    return cm_emulated_submit(emulated, stream, job, sizeof(what), job->dst.is_plain);
}

int32_t
cm_emulated_op_copy_2d_async(cm_emulated *emulated, cm_address dst, uint64_t dst_pitch,
                             cm_address src, uint64_t src_pitch, uint64_t width,
                             uint64_t height, uint64_t stream)
{
    const move what = {.base = {.dst.address = dst, .src.address = src},
                       .dst_pitch = dst_pitch,
                       .src_pitch = src_pitch,
                       .width = width,
                       .height = height};
    return move_submit(emulated, what, NULL, stream);
}

int32_t
cm_emulated_op_copy_async(cm_emulated *emulated, cm_address dst, cm_address src,
                          uint64_t nbytes, uint64_t stream)
{
    return cm_emulated_op_copy_2d_async(emulated, dst, nbytes, src, nbytes, nbytes, 1,
                                        stream);
}

int32_t
cm_emulated_op_copy_peer_async(cm_emulated *emulated, cm_address dst, int dst_device,
                               cm_address src, int src_device, uint64_t nbytes,
                               uint64_t stream)
{
    if (!cm_emulated_is_device(emulated, dst_device)
        || !cm_emulated_is_device(emulated, src_device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    const move what = {.base = {.dst.address = dst, .src.address = src},
                       .dst_pitch = nbytes,
                       .src_pitch = nbytes,
                       .width = nbytes,
                       .height = 1};
    const int devices[2] = {dst_device, src_device};
    return move_submit(emulated, what, devices, stream);
}

/* The pattern is in the first bytes of `value`, since every host is little-endian. */
static void
fill_bytes(cm_emulated_job *base, unsigned char *dst,
           const unsigned char *src CM_UNUSED)
{
    const fill *job = (const fill *)base;
    if (job->unit == 1) {
        memset(dst, (int)job->value, base->dst.nbytes);
        return;
    }
    for (uint64_t i = 0; i < base->dst.nbytes; i += job->unit) {
        memcpy(dst + i, &job->value, job->unit);
    }
}

static int32_t
fill_submit(cm_emulated *emulated, cm_address dst, uint32_t unit, uint32_t value,
            uint64_t count, uint64_t stream)
{
    int device;
    CM_TRY_CODE(cm_emulated_device_of(emulated, stream, &device));
    if (count == 0) {
        return 0;
    }
    if (device != cm_emulated_self(emulated)->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    uint64_t nbytes;
    cm_emulated_place place;
    if (dst % unit != 0 || !cm_mul_u64(count, unit, &nbytes)
        || cm_emulated_find(emulated, dst, nbytes, &place) != CM_EMULATED_INSIDE
        || !place.by_device || (place.access >> device & 1) == 0
        || is_read_only(&place)) {
        return CM_CUDA_INVALID_VALUE;
    }
    fill job = {
        .base = {.run = cm_emulated_touch,
                 .touch = fill_bytes,
                 .dst = {.address = dst, .nbytes = nbytes},
                 .device = device},
        .unit = unit,
        .value = value,
    };
    return cm_emulated_submit(emulated, stream, &job.base, sizeof(job), false);
}

#define FILL(bits)                                                                     \
    int32_t cm_emulated_op_fill_##bits##_async(cm_emulated *emulated, cm_address dst,  \
                                               uint##bits##_t value, uint64_t count,   \
                                               uint64_t stream)                        \
    {                                                                                  \
        return fill_submit(emulated, dst, (bits) / 8, value, count, stream);           \
    }
FILL(8)
FILL(16)
FILL(32)
