/* SPDX-License-Identifier: Apache-2.0 */
/* Modules and kernels of the emulated device: the PTX text is kept and asked for names,
 * and the kernels that cumem has are run in C: the strided one here. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated_private.h"
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
    cm_strided_job job;
} launch;

static void
module_free(module *gone)
{
    if (gone != NULL) {
        free(gone->ptx);
        free(gone);
    }
}

static int32_t
module_new(cm_emulated *emulated, int device, const char *ptx, uint64_t *out)
{
    module *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->device = device;
    made->ptx = strdup(ptx);
    cm_mutex_lock(&emulated->lock);
    uint64_t handle = 0x40000000 + MODULE_STEP * emulated->next_module;
    bool good =
        made->ptx != NULL && cm_emulated_handles_add(&emulated->modules, handle, made);
    if (good) {
        emulated->next_module++;
        *out = handle;
    }
    cm_mutex_unlock(&emulated->lock);
    if (!good) {
        module_free(made);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    return 0;
}

int32_t
cm_emulated_op_module_load(cm_runtime *rt, const char *ptx, uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    if (code != 0) {
        return code;
    }
    if (ptx == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (strstr(ptx, ".version") == NULL || strstr(ptx, ".target") == NULL) {
        return CM_CUDA_INVALID_PTX;
    }
    return module_new(emulated, self->device, ptx, out);
}

int32_t
cm_emulated_op_module_unload(cm_runtime *rt, uint64_t handle)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter_unsafe(emulated, &self);
    if (code != 0) {
        return code;
    }
    cm_mutex_lock(&emulated->lock);
    module *gone = cm_emulated_handles_remove(&emulated->modules, handle);
    (void)cm_emulated_handles_remove(&emulated->functions, handle + STRIDED_OFFSET);
    (void)cm_emulated_handles_remove(&emulated->functions, handle + TABLE_OFFSET);
    cm_mutex_unlock(&emulated->lock);
    module_free(gone);
    return gone != NULL ? 0 : CM_CUDA_INVALID_HANDLE;
}

static int32_t
function_find_locked(cm_emulated *emulated, uint64_t handle, const char *name,
                     uint64_t *out)
{
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

int32_t
cm_emulated_op_module_function(cm_runtime *rt, uint64_t handle, const char *name,
                               uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code != 0) {
        return code;
    }
    if (name == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_mutex_lock(&emulated->lock);
    code = function_find_locked(emulated, handle, name, out);
    cm_mutex_unlock(&emulated->lock);
    return code;
}

void
cm_emulated_modules_reset(cm_emulated *emulated, int device)
{
    cm_mutex_lock(&emulated->lock);
    size_t kept = 0;
    for (size_t i = 0; i < emulated->modules.count; i++) {
        cm_emulated_handle each = emulated->modules.items[i];
        module *loaded = each.object;
        if (device < 0 || loaded->device == device) {
            (void)cm_emulated_handles_remove(&emulated->functions,
                                             each.handle + STRIDED_OFFSET);
            (void)cm_emulated_handles_remove(&emulated->functions,
                                             each.handle + TABLE_OFFSET);
            module_free(loaded);
        }
        else {
            emulated->modules.items[kept++] = each;
        }
    }
    emulated->modules.count = kept;
    cm_mutex_unlock(&emulated->lock);
}

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

/* Pin what one end touches; the bytes of its element 0 on success. */
static int32_t
end_pin(cm_emulated *emulated, const launch *what, cm_address start,
        const int64_t *strides, unsigned char **out, cm_emulated_pin *pin)
{
    int64_t low, high;
    if (!end_bounds(&what->job, strides, &low, &high)) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    uint64_t first = start + (uint64_t)low;
    uint64_t nbytes = (uint64_t)high - (uint64_t)low;
    cm_emulated_place place;
    int32_t code = cm_emulated_memory_pin(emulated->memory, first, nbytes, what->device,
                                          what->stamp, &place, pin);
    if (code != 0) {
        return code;
    }
    if (place.kind == CM_EMULATED_MANAGED) { /* touching it brings it here */
        int32_t ignored =
            cm_emulated_memory_migrate(emulated->memory, first, nbytes, what->device);
        (void)ignored;
    }
    *out = place.bytes - low;
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
launch_run(void *context, cm_emulated_job *base)
{
    cm_emulated *emulated = context;
    const launch *what = (const launch *)base;
    const cm_strided_job *job = &what->job;
    if (job->count == 0) {
        return 0;
    }
    if (is_misaligned(job)) {
        return CM_CUDA_MISALIGNED_ADDRESS;
    }
    unsigned char *to = NULL;
    unsigned char *from = NULL;
    cm_emulated_pin dst = {.range = NULL};
    cm_emulated_pin src = {.range = NULL};
    int32_t code = end_pin(emulated, what, job->dst, job->dst_strides, &to, &dst);
    if (code == 0) {
        code = end_pin(emulated, what, job->src, job->src_strides, &from, &src);
    }
    if (code == 0) {
        run_elements(job, to, from);
    }
    int32_t dst_code = cm_emulated_memory_unpin(emulated->memory, &dst);
    int32_t src_code = cm_emulated_memory_unpin(emulated->memory, &src);
    code = code != 0 ? code : dst_code;
    return code != 0 ? code : src_code;
}

/* What a GPU would read as nonsense is refused here, where the test sees it. */
static bool
job_is_sane(const cm_strided_job *job)
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

static void
launch_drop(cm_emulated_job *base)
{
    free(base);
}

static int32_t
strided_launch(cm_emulated *emulated, cm_emulated_thread *self, const void *params,
               uint64_t params_nbytes, uint64_t stream)
{
    if (params == NULL || params_nbytes != sizeof(cm_strided_job)) {
        return CM_CUDA_INVALID_VALUE;
    }
    launch *what = malloc(sizeof(*what));
    if (what == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    what->base = (cm_emulated_job){launch_run, launch_drop};
    what->device = self->device;
    what->stamp = cm_emulated_memory_stamp(emulated->memory);
    memcpy(&what->job, params, sizeof(what->job));
    if (!job_is_sane(&what->job)) {
        free(what);
        return CM_CUDA_INVALID_VALUE;
    }
    return cm_emulated_streams_submit(emulated->streams, self, stream, &what->base,
                                      false);
}

int32_t
cm_emulated_op_kernel_launch(cm_runtime *rt, uint64_t function, uint32_t block_count,
                             uint32_t threads_per_block, const void *params,
                             uint64_t params_nbytes, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    cm_emulated_stream_info info;
    int32_t code = cm_emulated_enter(emulated, &self);
    if (code == 0) {
        code = cm_emulated_streams_read(emulated->streams, self, stream, &info);
    }
    if (code != 0) {
        return code;
    }
    cm_mutex_lock(&emulated->lock);
    const module *from = cm_emulated_handles_find(&emulated->functions, function);
    bool right =
        from != NULL && from->device == info.device && info.device == self->device;
    cm_mutex_unlock(&emulated->lock);
    if (!right) {
        return CM_CUDA_INVALID_HANDLE;
    }
    if (block_count == 0 || block_count > INT32_MAX || threads_per_block == 0
        || threads_per_block > THREADS_PER_BLOCK_MAX) {
        return CM_CUDA_INVALID_CONFIGURATION;
    }
    if (function % MODULE_STEP == TABLE_OFFSET) {
        return cm_emulated_table_launch(emulated, self,
                                        (uint64_t)block_count * threads_per_block,
                                        params, params_nbytes, stream);
    }
    return strided_launch(emulated, self, params, params_nbytes, stream);
}
