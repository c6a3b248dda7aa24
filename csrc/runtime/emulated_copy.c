/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and fills of the emulated device. Ranges are checked when the call is made and
 * looked up again when its time comes, so that memory freed in between is an error;
 * registered memory cannot end in between. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated_private.h"

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
    cm_emulated_memory *memory;
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
        cm_emulated_memory_let_go(job->memory, job->held[i]);
    }
    free(job->staged);
    free(job);
}

static void
fill_drop(cm_emulated_job *job)
{
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
move_run(void *context, cm_emulated_job *base)
{
    cm_emulated_memory *memory = ((cm_emulated *)context)->memory;
    const move *job = (const move *)base;
    cm_emulated_place to = {.bytes = plain(job->dst)};
    cm_emulated_place from = {.bytes = plain(job->src)};
    cm_emulated_pin dst = {.range = NULL};
    cm_emulated_pin src = {.range = NULL};
    int32_t code = 0;
    if (!job->dst_is_plain) {
        uint64_t nbytes = extent(job->dst_pitch, job->width, job->height);
        code = cm_emulated_memory_pin(memory, job->dst, nbytes, CM_EMULATED_ANY,
                                      job->stamp, &to, &dst);
    }
    if (code == 0 && !job->src_is_plain) {
        uint64_t nbytes = extent(job->src_pitch, job->width, job->height);
        code = cm_emulated_memory_pin(memory, job->src, nbytes, CM_EMULATED_ANY,
                                      job->stamp, &from, &src);
    }
    if (code == 0) {
        move_rows(job, to.bytes, from.bytes);
    }
    int32_t dst_code = cm_emulated_memory_unpin(memory, &dst);
    int32_t src_code = cm_emulated_memory_unpin(memory, &src);
    code = code != 0 ? code : dst_code;
    return code != 0 ? code : src_code;
}

/* Where the end is; a registration is held, or was gone and is none. */
static cm_emulated_reach
find_end(cm_emulated *emulated, cm_address address, uint64_t nbytes,
         cm_emulated_place *place, cm_emulated_range **held)
{
    cm_emulated_reach reach;
    do {
        reach = cm_emulated_memory_find(emulated->memory, address, nbytes, place);
        *held = reach == CM_EMULATED_INSIDE
                    ? cm_emulated_memory_hold(emulated->memory, place)
                    : NULL;
    } while (reach == CM_EMULATED_INSIDE && place->kind == CM_EMULATED_REGISTERED
             && *held == NULL);
    return reach;
}

/* One end of a copy: inside one range, or plain memory. `device` < 0: any. */
static int32_t
check_end(cm_emulated *emulated, cm_address address, uint64_t nbytes, bool written,
          int device, cm_emulated_place *place, bool *is_plain,
          cm_emulated_range **held)
{
    switch (find_end(emulated, address, nbytes, place, held)) {
    case CM_EMULATED_UNKNOWN:
        *is_plain = true;
        place->kind = CM_EMULATED_HOST;
        return device < 0 ? 0 : CM_CUDA_INVALID_VALUE;
    case CM_EMULATED_INSIDE:
        *is_plain = false;
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
check_ends(cm_emulated *emulated, move *job, uint64_t dst_nbytes, uint64_t src_nbytes,
           const int *devices)
{
    cm_emulated_place dst, src;
    int32_t code =
        check_end(emulated, job->dst, dst_nbytes, true, devices ? devices[0] : -1, &dst,
                  &job->dst_is_plain, &job->held[0]);
    if (code == 0) {
        code =
            check_end(emulated, job->src, src_nbytes, false, devices ? devices[1] : -1,
                      &src, &job->src_is_plain, &job->held[1]);
    }
    if (code == 0 && devices == NULL && are_apart(&dst, &src)) {
        code = CM_CUDA_INVALID_VALUE;
    }
    return code;
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
move_submit(cm_emulated *emulated, const move *what, const int *devices,
            uint64_t stream)
{
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter(emulated, &self);
    cm_emulated_stream_info info;
    if (code == 0) {
        code = cm_emulated_streams_read(emulated->streams, self, stream, &info);
    }
    if (code != 0 || what->width == 0 || what->height == 0) {
        return code;
    }
    uint64_t dst_nbytes, src_nbytes;
    code = check_extent(what->dst_pitch, what, &dst_nbytes);
    if (code == 0) {
        code = check_extent(what->src_pitch, what, &src_nbytes);
    }
    if (code != 0) {
        return code;
    }
    move *job = malloc(sizeof(*job));
    if (job == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *job = *what;
    job->base = (cm_emulated_job){move_run, move_drop};
    job->memory = emulated->memory;
    job->stamp = cm_emulated_memory_stamp(emulated->memory);
    code = check_ends(emulated, job, dst_nbytes, src_nbytes, devices);
    if (code == 0 && job->src_is_plain && !job->dst_is_plain) {
        code = stage(job);
    }
    if (code != 0) {
        move_drop(&job->base);
        return code;
    }
    bool wait = job->dst_is_plain;
    return cm_emulated_streams_submit(emulated->streams, self, stream, &job->base,
                                      wait);
}

int32_t
cm_emulated_op_copy_async(cm_runtime *rt, cm_address dst, cm_address src,
                          uint64_t nbytes, uint64_t stream)
{
    move what = {.dst = dst,
                 .src = src,
                 .dst_pitch = nbytes,
                 .src_pitch = nbytes,
                 .width = nbytes,
                 .height = 1};
    return move_submit(cm_emulated_of(rt), &what, NULL, stream);
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
    return move_submit(cm_emulated_of(rt), &what, NULL, stream);
}

int32_t
cm_emulated_op_copy_peer_async(cm_runtime *rt, cm_address dst, int dst_device,
                               cm_address src, int src_device, uint64_t nbytes,
                               uint64_t stream)
{
    int count = rt->device_count;
    if (dst_device < 0 || dst_device >= count || src_device < 0
        || src_device >= count) {
        return CM_CUDA_INVALID_DEVICE;
    }
    move what = {.dst = dst,
                 .src = src,
                 .dst_pitch = nbytes,
                 .src_pitch = nbytes,
                 .width = nbytes,
                 .height = 1};
    const int devices[2] = {dst_device, src_device};
    return move_submit(cm_emulated_of(rt), &what, devices, stream);
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
        int32_t code =
            cm_emulated_op_copy_async(rt, dsts[i], srcs[i], nbytes[i], stream);
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

static int32_t
fill_run(void *context, cm_emulated_job *base)
{
    cm_emulated_memory *memory = ((cm_emulated *)context)->memory;
    const fill *job = (const fill *)base;
    cm_emulated_place place;
    cm_emulated_pin pin;
    int32_t code = cm_emulated_memory_pin(memory, job->dst, job->count * job->unit,
                                          job->device, job->stamp, &place, &pin);
    if (code != 0) {
        return code;
    }
    uint16_t half = (uint16_t)job->value;
    for (uint64_t i = 0; job->unit == 2 && i < job->count; i++) {
        memcpy(place.bytes + 2 * i, &half, 2);
    }
    for (uint64_t i = 0; job->unit == 4 && i < job->count; i++) {
        memcpy(place.bytes + 4 * i, &job->value, 4);
    }
    if (job->unit == 1) {
        memset(place.bytes, (int)job->value, job->count);
    }
    return cm_emulated_memory_unpin(memory, &pin);
}

static int32_t
fill_submit(cm_runtime *rt, cm_address dst, uint32_t unit, uint32_t value,
            uint64_t count, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    cm_emulated_stream_info info;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code == 0) {
        code = cm_emulated_streams_read(emulated->streams, self, stream, &info);
    }
    if (code != 0 || count == 0) {
        return code;
    }
    if (info.device != self->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    uint64_t nbytes;
    uint64_t stamp = cm_emulated_memory_stamp(emulated->memory);
    cm_emulated_place place;
    if (dst % unit != 0 || !cm_mul_u64(count, unit, &nbytes)
        || cm_emulated_memory_find(emulated->memory, dst, nbytes, &place)
               != CM_EMULATED_INSIDE
        || !place.by_device || (place.access >> info.device & 1) == 0
        || (place.kind == CM_EMULATED_REGISTERED
            && (place.flags & CM_REGISTER_READ_ONLY) != 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    fill *job = malloc(sizeof(*job));
    if (job == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *job = (fill){
        .base = {fill_run, fill_drop},
        .dst = dst,
        .count = count,
        .unit = unit,
        .value = value,
        .device = info.device,
        .stamp = stamp,
    };
    return cm_emulated_streams_submit(emulated->streams, self, stream, &job->base,
                                      false);
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
