/* SPDX-License-Identifier: Apache-2.0 */
/* Modules and kernels of the emulated device: the PTX text is kept and asked for names,
 * and the kernels that cumem has are run in C, by the same steps as
 * their text. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated/memory.h"
#include "runtime/emulated/stream.h"
#include "runtime/strided_job.h"
#include "runtime/table_job.h"

/* A function's handle is its module's and one of two offsets, by the kernel. */
enum {
    THREADS_PER_BLOCK_MAX = 1024,
    STRIDED_OFFSET = 4,
    TABLE_OFFSET = 8,
    MODULE_STEP = 16,
};

typedef struct module {
    int device;
    char *ptx; /* owned */
} module;

typedef struct launch {
    cm_emulated_job base; /* first */
    int device;
    uint64_t stamp;
    union {
        cm_strided_job strided;
        cm_table_job table;
    } job;
} launch;

static void
module_free(module *gone)
{
    if (gone != NULL) {
        free(gone->ptx);
        free(gone);
    }
}

int32_t
cm_emulated_op_module_load(cm_runtime *rt, const char *ptx, uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    if (ptx == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (strstr(ptx, ".version") == NULL || strstr(ptx, ".target") == NULL) {
        return CM_CUDA_INVALID_PTX;
    }
    module *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->device = self->device;
    made->ptx = strdup(ptx);
    uint64_t handle = 0x40000000 + MODULE_STEP * emulated->next_module;
    if (made->ptx == NULL
        || !cm_emulated_handles_add(&emulated->modules, handle, made)) {
        module_free(made);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    emulated->next_module++;
    *out = handle;
    return 0;
}

static void
forget_functions(cm_emulated *emulated, uint64_t handle)
{
    (void)cm_emulated_handles_remove(&emulated->functions, handle + STRIDED_OFFSET);
    (void)cm_emulated_handles_remove(&emulated->functions, handle + TABLE_OFFSET);
}

int32_t
cm_emulated_op_module_unload(cm_runtime *rt, uint64_t handle)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    module *gone = cm_emulated_handles_remove(&emulated->modules, handle);
    forget_functions(emulated, handle);
    module_free(gone);
    return gone != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

int32_t
cm_emulated_op_module_function(cm_runtime *rt, uint64_t handle, const char *name,
                               uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    if (name == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    module *from = cm_emulated_handles_find(&emulated->modules, handle);
    if (from == NULL) {
        return CM_CUDA_INVALID_HANDLE;
    }
    bool strided = strcmp(name, CM_STRIDED_KERNEL_NAME) == 0;
    bool table = strcmp(name, CM_TABLE_KERNEL_NAME) == 0;
    if ((!strided && !table) || strstr(from->ptx, name) == NULL) {
        return CM_CUDA_SYMBOL_NOT_FOUND;
    }
    uint64_t function = handle + (uint64_t)(table ? TABLE_OFFSET : STRIDED_OFFSET);
    if (cm_emulated_handles_find(&emulated->functions, function) == NULL
        && !cm_emulated_handles_add(&emulated->functions, function, from)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *out = function;
    return 0;
}

void
cm_emulated_modules_reset(cm_emulated *emulated, int device)
{
    size_t kept = 0;
    for (size_t i = 0; i < emulated->modules.count; i++) {
        cm_emulated_handle each = emulated->modules.items[i];
        module *loaded = each.object;
        if (device < 0 || loaded->device == device) {
            forget_functions(emulated, each.handle);
            module_free(loaded);
        }
        else {
            emulated->modules.items[kept++] = each;
        }
    }
    emulated->modules.count = kept;
}

/* ---- cm_strided_copy ------------------------------------------------------------------- */

/* Lowest byte and one past the highest that one end of the job touches, from its start.
 */
static bool
end_bounds(const cm_strided_job *job, const int64_t *strides, int64_t *low,
           int64_t *high)
{
    *low = 0;
    *high = job->itemsize;
    for (uint32_t k = 0; k < job->ndim; k++) {
        int64_t reach;
        if (!cm_mul_i64((int64_t)job->shape[k] - 1, strides[k], &reach)
            || !cm_add_i64(reach < 0 ? *low : *high, reach, reach < 0 ? low : high)) {
            return false;
        }
    }
    return true;
}

/* Pin what one end touches; its bytes are then those of element 0. */
static int32_t
end_pin(cm_emulated *emulated, const launch *what, cm_address start,
        const int64_t *strides, cm_emulated_pin *pin)
{
    int64_t low, high;
    if (!end_bounds(&what->job.strided, strides, &low, &high)) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    CM_TRY_CODE(cm_emulated_pin_range(emulated, start + (uint64_t)low,
                                      (uint64_t)high - (uint64_t)low, what->device,
                                      what->stamp, pin));
    pin->bytes -= low;
    return 0;
}

static void
run_elements(const cm_strided_job *job, unsigned char *dst, const unsigned char *src)
{
    uint64_t index[CM_STRIDED_MAX_NDIM] = {0};
    int64_t to = 0;
    int64_t from = 0;
    for (uint64_t i = 0; i < job->count; i++) {
        memcpy(dst + to, src + from, job->itemsize);
        for (uint32_t k = job->ndim; k-- > 0;) {
            to += job->dst_strides[k];
            from += job->src_strides[k];
            if (++index[k] < job->shape[k]) {
                break;
            }
            to -= (int64_t)job->shape[k] * job->dst_strides[k];
            from -= (int64_t)job->shape[k] * job->src_strides[k];
            index[k] = 0;
        }
    }
}

static bool
is_misaligned(const cm_strided_job *job)
{
    uint64_t bits = job->dst | job->src;
    for (uint32_t k = 0; k < job->ndim; k++) {
        bits |= (uint64_t)job->dst_strides[k] | (uint64_t)job->src_strides[k];
    }
    return (bits & (job->itemsize - 1)) != 0;
}

static int32_t
strided_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const launch *what = (const launch *)base;
    const cm_strided_job *job = &what->job.strided;
    if (job->count == 0) {
        return 0;
    }
    if (is_misaligned(job)) {
        return CM_CUDA_MISALIGNED_ADDRESS;
    }
    cm_emulated_pin dst = {.range = NULL};
    cm_emulated_pin src = {.range = NULL};
    int32_t code = end_pin(emulated, what, job->dst, job->dst_strides, &dst);
    if (code == 0) {
        code = end_pin(emulated, what, job->src, job->src_strides, &src);
    }
    if (code == 0) {
        cm_mutex_unlock(&emulated->lock);
        run_elements(job, dst.bytes, src.bytes);
        cm_mutex_lock(&emulated->lock);
    }
    code = cm_emulated_unpin(emulated, &dst, code);
    return cm_emulated_unpin(emulated, &src, code);
}

/* What a GPU would read as nonsense is refused here, where the test sees it. */
static bool
strided_is_sane(const cm_strided_job *job)
{
    if (job->ndim > CM_STRIDED_MAX_NDIM || job->itemsize > 16
        || !cm_is_power_of_two(job->itemsize)) {
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

/* What a GPU would read as nonsense, or would copy in part only, is refused here, where
 * the test sees it. */
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

/* What the team's threads do together; `to` and `from` are where the bytes are, of
 * which only the addresses of the device say how they are aligned. */
static void
copy_piece(const cm_table_job *job, uint32_t i, unsigned char *to,
           const unsigned char *from)
{
    uint32_t bits = (uint32_t)(job->dst[i] ^ job->src[i]) | 16;
    uint32_t unit = bits & (0 - bits);
    uint32_t head = (0 - (uint32_t)job->dst[i]) & (unit - 1);
    uint32_t left = job->nbytes[i];
    uint32_t team = 1u << job->team_shift;
    head = head < left ? head : left;
    left -= head;
    uint32_t tail = left & (unit - 1);
    uint32_t body = left - tail;
    for (uint32_t lane = 0; lane < team; lane++) {
        if (lane < head) {
            to[lane] = from[lane];
        }
        if (lane < tail) {
            to[head + body + lane] = from[head + body + lane];
        }
        for (uint32_t k = lane * unit; k < body; k += team * unit) {
            memcpy(to + head + k, from + head + k, unit);
        }
    }
}

static int32_t
run_piece(cm_emulated *emulated, const launch *what, uint32_t i)
{
    const cm_table_job *job = &what->job.table;
    uint64_t nbytes = job->nbytes[i];
    cm_emulated_pin dst = {.range = NULL};
    cm_emulated_pin src = {.range = NULL};
    if (nbytes == 0) {
        return 0;
    }
    int32_t code = cm_emulated_pin_range(emulated, job->dst[i], nbytes, what->device,
                                         what->stamp, &dst);
    if (code == 0) {
        code = cm_emulated_pin_range(emulated, job->src[i], nbytes, what->device,
                                     what->stamp, &src);
    }
    if (code == 0) {
        cm_mutex_unlock(&emulated->lock);
        copy_piece(job, i, dst.bytes, src.bytes);
        cm_mutex_lock(&emulated->lock);
    }
    code = cm_emulated_unpin(emulated, &dst, code);
    return cm_emulated_unpin(emulated, &src, code);
}

static int32_t
table_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const launch *what = (const launch *)base;
    int32_t code = 0;
    for (uint32_t i = 0; code == 0 && i < what->job.table.count; i++) {
        code = run_piece(emulated, what, i);
    }
    return code;
}

/* ---- launching ------------------------------------------------------------------------- */

static int32_t
launch_submit(cm_emulated *emulated, cm_emulated_thread *self, bool is_table,
              uint64_t thread_count, const void *params, uint64_t params_nbytes,
              uint64_t stream)
{
    if (params == NULL
        || params_nbytes
               != (is_table ? sizeof(cm_table_job) : sizeof(cm_strided_job))) {
        return CM_CUDA_INVALID_VALUE;
    }
    launch *what = malloc(sizeof(*what));
    if (what == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    what->base =
        (cm_emulated_job){is_table ? table_run : strided_run, cm_emulated_job_free};
    what->device = self->device;
    what->stamp = emulated->memory.serial;
    memcpy(&what->job, params, params_nbytes);
    if (is_table ? !table_is_sane(&what->job.table, thread_count)
                 : !strided_is_sane(&what->job.strided)) {
        free(what);
        return CM_CUDA_INVALID_VALUE;
    }
    return cm_emulated_submit(emulated, self, stream, &what->base, false);
}

int32_t
cm_emulated_op_kernel_launch(cm_runtime *rt, uint64_t function, uint32_t block_count,
                             uint32_t threads_per_block, const void *params,
                             uint64_t params_nbytes, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int device;
    CM_TRY_CODE(cm_emulated_enter_stream(rt, stream, &self, &device));
    const module *from = cm_emulated_handles_find(&emulated->functions, function);
    if (from == NULL || from->device != device || device != self->device) {
        return CM_CUDA_INVALID_HANDLE;
    }
    if (block_count == 0 || block_count > INT32_MAX || threads_per_block == 0
        || threads_per_block > THREADS_PER_BLOCK_MAX) {
        return CM_CUDA_INVALID_CONFIGURATION;
    }
    return launch_submit(emulated, self, function % MODULE_STEP == TABLE_OFFSET,
                         (uint64_t)block_count * threads_per_block, params,
                         params_nbytes, stream);
}
