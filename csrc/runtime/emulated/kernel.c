/* SPDX-License-Identifier: Apache-2.0 */
/* Modules and kernels of the emulated device. It searches PTX texts only for names, and
 * runs cumem's own kernels in C. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated/private.h"
#include "runtime/kernel_jobs.h"

enum { THREADS_PER_BLOCK_MAX = 1024 };

/* The handle of a function is that of its module plus the number of the kernel, from 1
 * on. */
enum { HANDLE_COUNT = CM_KERNEL_COUNT + 1 };

static const char *const names[HANDLE_COUNT] = {
#define KERNEL_NAME(name, text_name, ...) [CM_KERNEL_##name + 1] = text_name,
    CM_KERNELS(KERNEL_NAME)
#undef KERNEL_NAME
};

typedef struct module {
    int device; /* first */
    bool has[HANDLE_COUNT];
    bool is_named[HANDLE_COUNT]; /* the function's handle was asked for */
} module;

typedef struct launch {
    cm_emulated_job base; /* first */
    union {
        cm_strided_job strided;
        cm_table_job table;
    } job;
    int64_t dst_low; /* strided: the lowest byte that is touched, from the start */
    int64_t src_low;
} launch;

int32_t
cm_emulated_op_module_load(cm_emulated *emulated, const char *ptx, uint64_t *out)
{
    if (ptx == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (strstr(ptx, ".version") == NULL || strstr(ptx, ".target") == NULL) {
        return CM_CUDA_INVALID_PTX;
    }
    uint64_t handle = cm_emulated_new_handle(emulated);
    module *made = cm_emulated_table_new(&emulated->modules, handle, sizeof(*made));
    if (made == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->device = cm_emulated_self(emulated)->device;
    for (int k = 1; k < HANDLE_COUNT; k++) {
        made->has[k] = strstr(ptx, names[k]) != NULL;
    }
    *out = handle;
    return 0;
}

int32_t
cm_emulated_op_module_unload(cm_emulated *emulated, uint64_t handle)
{
    module *gone = cm_emulated_table_remove(&emulated->modules, handle);
    free(gone);
    return gone != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

int32_t
cm_emulated_op_module_function(cm_emulated *emulated, uint64_t handle, const char *name,
                               uint64_t *out)
{
    if (name == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    module *from = cm_emulated_table_find(&emulated->modules, handle);
    if (from == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    for (unsigned k = 1; k < HANDLE_COUNT; k++) {
        if (from->has[k] && strcmp(name, names[k]) == 0) {
            from->is_named[k] = true;
            *out = handle + k;
            return 0;
        }
    }
    return CM_CUDA_SYMBOL_NOT_FOUND;
}

/* ---- cm_strided_copy ------------------------------------------------------------------- */

static cm_convert
convert_of(const cm_strided_job *job)
{
    return (cm_convert){.from = job->from,
                        .to = CM_DEVICE_CONVERTS_TO,
                        .scales = job->scales != 0,
                        .scale = (double)job->scale,
                        .offset = (double)job->offset};
}

/* Find the memory that one end of the job touches. Its lowest byte lies *low bytes from
 * its start. */
static bool
find_end(const cm_strided_job *job, cm_address start, const int64_t *strides,
         uint64_t itemsize, int64_t *low, cm_emulated_end *end)
{
    int64_t high = (int64_t)itemsize;
    *low = 0;
    for (uint32_t k = 0; k < job->ndim; k++) {
        int64_t reach;
        if (!cm_mul_i64((int64_t)job->shape[k] - 1, strides[k], &reach)
            || !cm_add_i64(reach < 0 ? *low : high, reach, reach < 0 ? low : &high)) {
            return false;
        }
    }
    *end = (cm_emulated_end){.address = start + (uint64_t)*low,
                             .nbytes = (uint64_t)high - (uint64_t)*low};
    return true;
}

static void
copy_elements(cm_emulated_job *base, unsigned char *dst, const unsigned char *src)
{
    const launch *what = (const launch *)base;
    const cm_strided_job *job = &what->job.strided;
    for (uint64_t i = 0; i < job->count; i++) {
        int64_t to = -what->dst_low;
        int64_t from = -what->src_low;
        uint64_t left = i;
        for (uint32_t k = job->ndim; k-- > 0; left /= job->shape[k]) {
            int64_t index = (int64_t)(left % job->shape[k]);
            to += index * job->dst_strides[k];
            from += index * job->src_strides[k];
        }
        if (job->from == CM_NUMBER_NONE) {
            memcpy(dst + to, src + from, job->itemsize);
        }
        else {
            cm_convert convert = convert_of(job);
            cm_convert_run(&convert, dst + to, 0, src + from, 0, 1);
        }
    }
}

static uint64_t
dst_itemsize(const cm_strided_job *job)
{
    return job->from == CM_NUMBER_NONE ? job->itemsize
                                       : cm_number_nbytes(CM_DEVICE_CONVERTS_TO);
}

static bool
is_misaligned(const cm_strided_job *job)
{
    uint64_t dst = job->dst;
    uint64_t src = job->src;
    for (uint32_t k = 0; k < job->ndim; k++) {
        dst |= (uint64_t)job->dst_strides[k];
        src |= (uint64_t)job->src_strides[k];
    }
    return dst % dst_itemsize(job) != 0 || src % job->itemsize != 0;
}

static int32_t
strided_run(cm_emulated *emulated, cm_emulated_job *base)
{
    launch *what = (launch *)base;
    const cm_strided_job *job = &what->job.strided;
    if (job->count == 0) {
        return 0;
    }
    if (is_misaligned(job)) {
        return CM_CUDA_MISALIGNED_ADDRESS;
    }
    if (!find_end(job, job->dst, job->dst_strides, dst_itemsize(job), &what->dst_low,
                  &base->dst)
        || !find_end(job, job->src, job->src_strides, job->itemsize, &what->src_low,
                     &base->src)) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    return cm_emulated_touch(emulated, base);
}

/* False for a job that a GPU would misread. It is refused here, so that the test that
 * launched it fails. */
static bool
strided_is_sane(const cm_strided_job *job)
{
    if (job->ndim > CM_STRIDED_MAX_NDIM || job->itemsize > 16
        || !cm_is_power_of_two(job->itemsize)) {
        return false;
    }
    cm_convert convert = convert_of(job);
    if (job->from != CM_NUMBER_NONE
        && (job->from >= CM_NUMBER_COUNT || !cm_convert_has_kernel(&convert)
            || job->itemsize != cm_number_nbytes(convert.from))) {
        return false;
    }
    uint64_t count = 1;
    for (uint32_t k = 0; k < job->ndim; k++) {
        if (job->shape[k] > INT64_MAX || !cm_mul_u64(count, job->shape[k], &count)) {
            return false;
        }
    }
    return count == job->count;
}

/* ---- cm_table_copy --------------------------------------------------------------------- */

/* False for a job that a GPU would misread, or would copy only in part. It is refused
 * here, so that the test that launched it fails. */
static bool
table_is_sane(const cm_table_job *job, uint64_t thread_count)
{
    if (job->count > CM_TABLE_MAX_COUNT || job->team_shift < CM_TABLE_MIN_SHIFT
        || job->team_shift > CM_TABLE_MAX_SHIFT || job->spare[0] != 0
        || job->spare[1] != 0
        || (uint64_t)job->count << job->team_shift > thread_count) {
        return false;
    }
    for (uint32_t i = 0; i < job->count; i++) {
        if (job->nbytes[i] > CM_TABLE_MAX_NBYTES) {
            return false;
        }
    }
    return true;
}

static void
copy_piece(cm_emulated_job *base, unsigned char *to, const unsigned char *from)
{
    memcpy(to, from, base->dst.nbytes);
}

static int32_t
table_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const cm_table_job *job = &((const launch *)base)->job.table;
    for (uint32_t i = 0; i < job->count; i++) {
        base->dst = (cm_emulated_end){.address = job->dst[i], .nbytes = job->nbytes[i]};
        base->src = (cm_emulated_end){.address = job->src[i], .nbytes = job->nbytes[i]};
        CM_TRY_CODE(job->nbytes[i] == 0 ? 0 : cm_emulated_touch(emulated, base));
    }
    return 0;
}

/* ---- launching ------------------------------------------------------------------------- */

int32_t
cm_emulated_op_kernel_launch(cm_emulated *emulated, uint64_t function,
                             uint32_t block_count, uint32_t threads_per_block,
                             const void *params, uint64_t params_nbytes,
                             uint64_t stream)
{
    int device;
    CM_TRY_CODE(cm_emulated_device_of(emulated, stream, &device));
    uint64_t which = function % CM_EMULATED_HANDLE_STEP;
    const module *from = cm_emulated_table_find(&emulated->modules, function - which);
    if (from == NULL || which >= HANDLE_COUNT || !from->is_named[which]
        || from->device != device || device != cm_emulated_self(emulated)->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    if (block_count == 0 || block_count > INT32_MAX || threads_per_block == 0
        || threads_per_block > THREADS_PER_BLOCK_MAX) {
        return CM_CUDA_INVALID_CONFIGURATION;
    }
    bool is_table = which == CM_KERNEL_TABLE + 1;
    if (params == NULL
        || params_nbytes
               != (is_table ? sizeof(cm_table_job) : sizeof(cm_strided_job))) {
        return CM_CUDA_INVALID_VALUE;
    }
    launch what = {.base = {.run = is_table ? table_run : strided_run,
                            .touch = is_table ? copy_piece : copy_elements,
                            .device = device}};
    memcpy(&what.job, params, params_nbytes);
    uint64_t thread_count = (uint64_t)block_count * threads_per_block;
    if (is_table ? !table_is_sane(&what.job.table, thread_count)
                 : !strided_is_sane(&what.job.strided)) {
        return CM_CUDA_INVALID_VALUE;
    }
    return cm_emulated_submit(emulated, stream, &what.base, sizeof(what), false);
}
