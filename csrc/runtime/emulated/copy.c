/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and fills of the emulated device. Ranges are checked when the call is made and
 * looked up again when its time comes, so that memory freed in between is an error;
 * registered memory cannot end in between. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated/memory.h"
#include "runtime/emulated/stream.h"

typedef struct move {
    cm_emulated_job base; /* first */
    cm_address dst;
    cm_address src;
    uint64_t dst_pitch;
    uint64_t src_pitch;
    uint64_t width;
    uint64_t height;
    bool dst_is_plain; /* ordinary memory: nothing to look up */
    bool src_is_plain;
    uint64_t stamp;
    cm_emulated *emulated;
    cm_emulated_range *held[2]; /* registered memory at the ends; NULL: it is not */
    unsigned char *staged;      /* owned: what a pageable source held; NULL: none */
} move;

typedef struct fill {
    cm_emulated_job base; /* first */
    cm_address dst;
    uint64_t count;
    uint32_t unit; /* bytes */
    uint32_t value;
    int device;
    uint64_t stamp;
} fill;

static void
move_drop(cm_emulated_job *base)
{
    move *job = (move *)base;
    for (int i = 0; i < 2; i++) {
        cm_emulated_let_go(job->emulated, job->held[i]);
    }
    free(job->staged);
    free(job);
}

static unsigned char *
plain(cm_address address)
{
    return (unsigned char *)(uintptr_t)address;
}

/* Bytes from the first to the last row's end; checked when the call was made. */
static uint64_t
extent(uint64_t pitch, uint64_t width, uint64_t height)
{
    return (height - 1) * pitch + width;
}

static void
move_rows(const move *job, unsigned char *dst, const unsigned char *src)
{
    uint64_t src_pitch = job->src_pitch;
    if (job->staged != NULL) {
        src = job->staged;
        src_pitch = job->width;
    }
    for (uint64_t row = 0; row < job->height; row++) {
        memmove(dst + row * job->dst_pitch, src + row * src_pitch, job->width);
    }
}

static int32_t
move_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const move *job = (const move *)base;
    cm_emulated_pin dst = {.bytes = plain(job->dst)};
    cm_emulated_pin src = {.bytes = plain(job->src)};
    int32_t code = 0;
    if (!job->dst_is_plain) {
        uint64_t nbytes = extent(job->dst_pitch, job->width, job->height);
        code = cm_emulated_pin_range(emulated, job->dst, nbytes, CM_EMULATED_ANY,
                                     job->stamp, &dst);
    }
    if (code == 0 && !job->src_is_plain) {
        uint64_t nbytes = extent(job->src_pitch, job->width, job->height);
        code = cm_emulated_pin_range(emulated, job->src, nbytes, CM_EMULATED_ANY,
                                     job->stamp, &src);
    }
    if (code == 0) {
        cm_mutex_unlock(&emulated->lock);
        move_rows(job, dst.bytes, src.bytes);
        cm_mutex_lock(&emulated->lock);
    }
    code = cm_emulated_unpin(emulated, &dst, code);
    return cm_emulated_unpin(emulated, &src, code);
}

/* One end of a copy: inside one range, whose registration is then held, or plain
 * memory. `device` < 0: any. */
static int32_t
check_end(const cm_emulated *emulated, cm_address address, uint64_t nbytes,
          bool written, int device, cm_emulated_place *place, bool *is_plain,
          cm_emulated_range **held)
{
    switch (cm_emulated_find(emulated, address, nbytes, place)) {
    case CM_EMULATED_UNKNOWN:
        *is_plain = true;
        place->kind = CM_EMULATED_HOST;
        return device < 0 ? 0 : CM_CUDA_INVALID_VALUE;
    case CM_EMULATED_INSIDE:
        *is_plain = false;
        *held = cm_emulated_hold(place);
        break;
    default:
        return CM_CUDA_INVALID_VALUE;
    }
    if (place->access == 0
        || (written && place->kind == CM_EMULATED_REGISTERED
            && (place->flags & CM_REGISTER_READ_ONLY) != 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (device >= 0 && place->kind == CM_EMULATED_DEVICE && place->device != device) {
        return CM_CUDA_INVALID_VALUE;
    }
    return 0;
}

static bool
is_shut(const cm_emulated_place *place, int device)
{
    return place->is_mapped && (place->access >> device & 1) == 0;
}

/* Only cudaMemcpyPeerAsync knows its way between devices that may not touch each
 * other's mapped memory; a plain copy needs it mapped for both. */
static bool
are_apart(const cm_emulated_place *dst, const cm_emulated_place *src)
{
    return dst->kind == CM_EMULATED_DEVICE && src->kind == CM_EMULATED_DEVICE
           && (is_shut(dst, src->device) || is_shut(src, dst->device));
}

static int32_t
check_ends(const cm_emulated *emulated, move *job, uint64_t dst_nbytes,
           uint64_t src_nbytes, const int *devices)
{
    cm_emulated_place dst, src;
    CM_TRY_CODE(check_end(emulated, job->dst, dst_nbytes, true,
                          devices ? devices[0] : -1, &dst, &job->dst_is_plain,
                          &job->held[0]));
    CM_TRY_CODE(check_end(emulated, job->src, src_nbytes, false,
                          devices ? devices[1] : -1, &src, &job->src_is_plain,
                          &job->held[1]));
    return devices == NULL && are_apart(&dst, &src) ? CM_CUDA_INVALID_VALUE : 0;
}

/* A pageable source is read before the call returns. */
static int32_t
stage(move *job)
{
    uint64_t nbytes;
    if (!cm_mul_u64(job->width, job->height, &nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    job->staged = malloc(nbytes);
    if (job->staged == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    for (uint64_t row = 0; row < job->height; row++) {
        memcpy(job->staged + row * job->width, plain(job->src) + row * job->src_pitch,
               job->width);
    }
    return 0;
}

static int32_t
check_extent(uint64_t pitch, const move *what, uint64_t *out)
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

/* Check, stage and queue; `devices` are those the ends must belong to, or NULL. */
static int32_t
move_submit(cm_runtime *rt, const move *what, const int *devices, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int device;
    CM_TRY_CODE(cm_emulated_enter_stream(rt, stream, &self, &device));
    if (what->width == 0 || what->height == 0) {
        return 0;
    }
    uint64_t dst_nbytes, src_nbytes;
    CM_TRY_CODE(check_extent(what->dst_pitch, what, &dst_nbytes));
    CM_TRY_CODE(check_extent(what->src_pitch, what, &src_nbytes));
    move *job = malloc(sizeof(*job));
    if (job == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *job = *what;
    job->base = (cm_emulated_job){move_run, move_drop};
    job->emulated = emulated;
    job->stamp = emulated->memory.serial;
    int32_t code = check_ends(emulated, job, dst_nbytes, src_nbytes, devices);
    if (code == 0 && job->src_is_plain && !job->dst_is_plain) {
        code = stage(job);
    }
    if (code != 0) {
        move_drop(&job->base);
        return code;
    }
    bool wait = job->dst_is_plain;
    return cm_emulated_submit(emulated, self, stream, &job->base, wait);
}

int32_t
cm_emulated_op_copy_async(cm_runtime *rt, cm_address dst, cm_address src,
                          uint64_t nbytes, uint64_t stream)
{
    move what = {.dst = dst, .src = src, .width = nbytes, .height = 1};
    what.dst_pitch = what.src_pitch = nbytes;
    return move_submit(rt, &what, NULL, stream);
}

int32_t
cm_emulated_op_copy_2d_async(cm_runtime *rt, cm_address dst, uint64_t dst_pitch,
                             cm_address src, uint64_t src_pitch, uint64_t width,
                             uint64_t height, uint64_t stream)
{
    move what = {.dst = dst,
                 .src = src,
                 .dst_pitch = dst_pitch,
                 .src_pitch = src_pitch,
                 .width = width,
                 .height = height};
    return move_submit(rt, &what, NULL, stream);
}

int32_t
cm_emulated_op_copy_peer_async(cm_runtime *rt, cm_address dst, int dst_device,
                               cm_address src, int src_device, uint64_t nbytes,
                               uint64_t stream)
{
    if (!cm_emulated_is_device(rt, dst_device)
        || !cm_emulated_is_device(rt, src_device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    move what = {.dst = dst, .src = src, .width = nbytes, .height = 1};
    what.dst_pitch = what.src_pitch = nbytes;
    const int devices[2] = {dst_device, src_device};
    return move_submit(rt, &what, devices, stream);
}

/* One after the other; what came before one that is refused is queued. */
int32_t
cm_emulated_op_copy_batch_async(cm_runtime *rt, const cm_address *dsts,
                                const cm_address *srcs, const uint64_t *nbytes,
                                uint64_t count, uint64_t stream)
{
    if (stream <= CM_STREAM_LEGACY || count == 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (nbytes[i] == 0) {
            return CM_CUDA_INVALID_VALUE;
        }
        CM_TRY_CODE(cm_emulated_op_copy_async(rt, dsts[i], srcs[i], nbytes[i], stream));
    }
    return 0;
}

static void
fill_bytes(const fill *job, unsigned char *bytes)
{
    uint16_t half = (uint16_t)job->value;
    for (uint64_t i = 0; job->unit == 2 && i < job->count; i++) {
        memcpy(bytes + 2 * i, &half, 2);
    }
    for (uint64_t i = 0; job->unit == 4 && i < job->count; i++) {
        memcpy(bytes + 4 * i, &job->value, 4);
    }
    if (job->unit == 1) {
        memset(bytes, (int)job->value, job->count);
    }
}

static int32_t
fill_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const fill *job = (const fill *)base;
    cm_emulated_pin pin;
    CM_TRY_CODE(cm_emulated_pin_range(emulated, job->dst, job->count * job->unit,
                                      job->device, job->stamp, &pin));
    cm_mutex_unlock(&emulated->lock);
    fill_bytes(job, pin.bytes);
    cm_mutex_lock(&emulated->lock);
    return cm_emulated_unpin(emulated, &pin, 0);
}

static int32_t
fill_submit(cm_runtime *rt, cm_address dst, uint32_t unit, uint32_t value,
            uint64_t count, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int device;
    CM_TRY_CODE(cm_emulated_enter_stream(rt, stream, &self, &device));
    if (count == 0) {
        return 0;
    }
    if (device != self->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    uint64_t nbytes;
    cm_emulated_place place;
    if (dst % unit != 0 || !cm_mul_u64(count, unit, &nbytes)
        || cm_emulated_find(emulated, dst, nbytes, &place) != CM_EMULATED_INSIDE
        || !place.by_device || (place.access >> device & 1) == 0
        || (place.kind == CM_EMULATED_REGISTERED
            && (place.flags & CM_REGISTER_READ_ONLY) != 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    fill *job = malloc(sizeof(*job));
    if (job == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *job = (fill){
        .base = {fill_run, cm_emulated_job_free},
        .dst = dst,
        .count = count,
        .unit = unit,
        .value = value,
        .device = device,
        .stamp = emulated->memory.serial,
    };
    return cm_emulated_submit(emulated, self, stream, &job->base, false);
}

int32_t
cm_emulated_op_fill_8_async(cm_runtime *rt, cm_address dst, uint8_t value,
                            uint64_t count, uint64_t stream)
{
    return fill_submit(rt, dst, 1, value, count, stream);
}

int32_t
cm_emulated_op_fill_16_async(cm_runtime *rt, cm_address dst, uint16_t value,
                             uint64_t count, uint64_t stream)
{
    return fill_submit(rt, dst, 2, value, count, stream);
}

int32_t
cm_emulated_op_fill_32_async(cm_runtime *rt, cm_address dst, uint32_t value,
                             uint64_t count, uint64_t stream)
{
    return fill_submit(rt, dst, 4, value, count, stream);
}
