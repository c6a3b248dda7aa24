/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the modules and runs the kernels of the emulated device. The emulated device
 * searches PTX texts only for names, and runs cumem's own kernels in C. */
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
        cm_rows_job rows;
    } job;
    /* For the strided kernel: where the lowest byte that it touches lies, counted from
     * the start of each end. */
    int64_t dst_low;
    int64_t src_low;
    uint64_t warp_count;
    void *copied;   /* for the rows kernel: where an array of numbers is copied to */
    uint32_t wrong; /* for the rows kernel: what is stored at the flag */
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

/* Find the memory that one end of the job touches. Its lowest byte lies *low bytes
 * after `start`, where *low is 0 or negative. */
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

/* Copy `count` elements that lie `dst_stride` and `src_stride` bytes apart. A sanitizer
 * looks at each call of memcpy() whose length the compiler does not know, and that
 * takes most of the time of a copy of short elements. */
static void
copy_row(unsigned char *dst, int64_t dst_stride, const unsigned char *src,
         int64_t src_stride, uint64_t itemsize, uint64_t count)
{
#define COPY_EACH(nbytes)                                                              \
    for (; count > 0; count--, dst += dst_stride, src += src_stride) {                 \
        memcpy(dst, src, nbytes);                                                      \
    }
    switch (itemsize) {
    case 1:
        COPY_EACH(1)
        break;
    case 2:
        COPY_EACH(2)
        break;
    case 4:
        COPY_EACH(4)
        break;
    case 8:
        COPY_EACH(8)
        break;
    default: /* 16 bytes, which is the longest that an element may have */
        COPY_EACH(16)
    }
#undef COPY_EACH
}

/* Convert `count` elements, each by a call of its own. */
static void
convert_row(const cm_convert *convert, unsigned char *dst, int64_t dst_stride,
            const unsigned char *src, int64_t src_stride, uint64_t count)
{
    for (; count > 0; count--, dst += dst_stride, src += src_stride) {
        cm_convert_run(convert, dst, 0, src, 0, 1);
    }
}

/* Copy the elements row by row, where a row is all that lies along the last axis. A job
 * without axes has a row of one element. */
static void
copy_elements(cm_emulated_job *base, unsigned char *dst, const unsigned char *src)
{
    const launch *what = (const launch *)base;
    const cm_strided_job *job = &what->job.strided;
    const cm_convert convert = convert_of(job);
    uint32_t last = job->ndim == 0 ? 0 : job->ndim - 1;
    uint64_t row_count = job->ndim == 0 ? 1 : job->shape[last];
    for (uint64_t i = 0; i < job->count; i += row_count) {
        int64_t to = -what->dst_low;
        int64_t from = -what->src_low;
        uint64_t left = i / row_count;
        for (uint32_t k = last; k-- > 0; left /= job->shape[k]) {
            int64_t index = (int64_t)(left % job->shape[k]);
            to += index * job->dst_strides[k];
            from += index * job->src_strides[k];
        }
        if (job->from == CM_NUMBER_NONE) {
            copy_row(dst + to, job->dst_strides[last], src + from,
                     job->src_strides[last], job->itemsize, row_count);
        }
        else {
            convert_row(&convert, dst + to, job->dst_strides[last], src + from,
                        job->src_strides[last], row_count);
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
strided_is_sane(const launch *what, uint64_t thread_count CM_UNUSED)
{
    const cm_strided_job *job = &what->job.strided;
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
table_is_sane(const launch *what, uint64_t thread_count)
{
    const cm_table_job *job = &what->job.table;
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

/* ---- cm_rows_copy ---------------------------------------------------------------------- */

/* One of the two arrays of numbers, as it was when the kernel began. */
typedef struct numbers {
    unsigned char *bytes; /* owned; NULL if the numbers are 0, 1, … */
    int64_t first;        /* where number 0 is in `bytes` */
    int64_t stride;       /* from one number to the next, in bytes */
    uint32_t nbytes;
    bool is_signed;
    uint64_t row_count;
} numbers;

/* The counters of a slot. The real kernel has the same three counters, and advances
 * them by the same steps. So if the steps leave out a slot, or come to one twice, the
 * emulation does so too. */
typedef struct slot {
    uint32_t part;
    uint64_t group;
    uint32_t layer;
} slot;

static void
copy_numbers(cm_emulated_job *base, unsigned char *dst CM_UNUSED,
             const unsigned char *src)
{
    memcpy(((const launch *)base)->copied, src, base->src.nbytes);
}

static void
raise_flag(cm_emulated_job *base, unsigned char *dst,
           const unsigned char *src CM_UNUSED)
{
    const launch *what = (const launch *)base;
    memcpy(dst, &what->wrong, sizeof(what->wrong));
}

/* Read one of the job's two arrays of numbers, which begins at `start`. The members of
 * `out` other than `bytes` and `first` are set already. */
static int32_t
numbers_read(cm_emulated *emulated, launch *what, cm_address start, numbers *out)
{
    int64_t reach;
    if (start == 0) {
        return 0;
    }
    if (!cm_mul_i64((int64_t)what->job.rows.count - 1, out->stride, &reach)) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    if ((start | (uint64_t)out->stride) % out->nbytes != 0) {
        return CM_CUDA_MISALIGNED_ADDRESS;
    }
    out->first = reach < 0 ? -reach : 0;
    uint64_t nbytes = (uint64_t)(reach < 0 ? -reach : reach) + out->nbytes;
    out->bytes = malloc(nbytes);
    if (out->bytes == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    what->copied = out->bytes;
    what->base.touch = copy_numbers;
    what->base.dst = (cm_emulated_end){.nbytes = 0};
    what->base.src =
        (cm_emulated_end){.address = start - (uint64_t)out->first, .nbytes = nbytes};
    return cm_emulated_touch(emulated, &what->base);
}

/* Find the row that the number at index i means. Returns false if there is no such
 * row. */
static bool
numbers_at(const numbers *from, uint64_t i, uint64_t *out)
{
    *out = i;
    if (from->bytes != NULL) {
        uint64_t bits = 0; /* as a little-endian machine has them */
        unsigned unused = 64 - 8 * from->nbytes;
        memcpy(&bits, from->bytes + from->first + (int64_t)i * from->stride,
               from->nbytes);
        *out = bits;
        if (from->is_signed) {
            int64_t number = (int64_t)(bits << unused) >> unused;
            *out = number < 0 ? (uint64_t)number + from->row_count : (uint64_t)number;
        }
    }
    return *out < from->row_count;
}

static int32_t
report_wrong(cm_emulated *emulated, launch *what, bool dst_is_right, bool src_is_right)
{
    cm_emulated_job *base = &what->base;
    if (what->job.rows.flag == 0) {
        return 0;
    }
    what->wrong = 0;
    if (!dst_is_right) {
        what->wrong |= CM_ROWS_WRONG_DST;
    }
    if (!src_is_right) {
        what->wrong |= CM_ROWS_WRONG_SRC;
    }
    base->touch = raise_flag;
    base->dst = (cm_emulated_end){.address = what->job.rows.flag,
                                  .nbytes = sizeof(what->wrong)};
    base->src = (cm_emulated_end){.nbytes = 0};
    return cm_emulated_touch(emulated, base);
}

/* Copy what one team copies of a slot: a part of row i. */
static int32_t
copy_part(cm_emulated *emulated, launch *what, const numbers *ends, const slot *at,
          uint64_t i)
{
    const cm_rows_job *job = &what->job.rows;
    cm_emulated_job *base = &what->base;
    uint64_t to, from;
    bool dst_is_right = numbers_at(&ends[0], i, &to);
    bool src_is_right = numbers_at(&ends[1], i, &from);
    if (!dst_is_right || !src_is_right) {
        return at->part != 0 ? 0
                             : report_wrong(emulated, what, dst_is_right, src_is_right);
    }
    uint64_t team = UINT64_C(1) << job->team_shift;
    uint64_t first = at->part * team;
    if (first >= job->row_units) {
        return 0;
    }
    uint64_t units = job->row_units - first < team ? job->row_units - first : team;
    from = job->src_is_packed != 0 ? i : from;
    base->touch = copy_piece;
    base->dst.address =
        job->dst[at->layer] + to * (uint64_t)job->dst_stride + first * job->unit;
    base->src.address =
        job->src[at->layer] + from * (uint64_t)job->src_stride + first * job->unit;
    if (base->dst.address % job->unit != 0 || base->src.address % job->unit != 0) {
        return CM_CUDA_MISALIGNED_ADDRESS;
    }
    base->dst.nbytes = base->src.nbytes = units * job->unit;
    return cm_emulated_touch(emulated, base);
}

static int32_t
copy_slot(cm_emulated *emulated, launch *what, const numbers *ends, const slot *at)
{
    const cm_rows_job *job = &what->job.rows;
    uint32_t shift = CM_ROWS_WARP_SHIFT - job->team_shift;
    uint64_t first = at->group << shift;
    for (uint64_t i = first; i < first + (UINT64_C(1) << shift) && i < job->count;
         i++) {
        CM_TRY_CODE(copy_part(emulated, what, ends, at, i));
    }
    return 0;
}

/* Advance the slot by this many parts, groups and layers, as the kernel does. */
static void
slot_advance(slot *at, const cm_rows_job *job, uint32_t parts, uint64_t groups,
             uint32_t layers)
{
    at->part += parts;
    if (at->part >= job->part_count) {
        at->part -= job->part_count;
        at->group++;
    }
    at->group += groups;
    if (at->group >= job->group_count) {
        at->group -= job->group_count;
        at->layer++;
    }
    at->layer += layers;
}

static int32_t
warp_run(cm_emulated *emulated, launch *what, const numbers *ends, uint64_t warp)
{
    const cm_rows_job *job = &what->job.rows;
    uint64_t number = warp * CM_ROWS_SLOTS;
    uint64_t group = number / job->part_count;
    slot at = {.part = (uint32_t)(number % job->part_count),
               .group = group % job->group_count,
               .layer = (uint32_t)(group / job->group_count)};
    while (at.layer < job->layer_count) {
        slot next = at;
        for (int k = 0; k < CM_ROWS_SLOTS && next.layer < job->layer_count; k++) {
            CM_TRY_CODE(copy_slot(emulated, what, ends, &next));
            slot_advance(&next, job, 1, 0, 0);
        }
        slot_advance(&at, job, job->step_parts, job->step_groups, job->step_layers);
    }
    return 0;
}

static int32_t
rows_run(cm_emulated *emulated, cm_emulated_job *base)
{
    launch *what = (launch *)base;
    const cm_rows_job *job = &what->job.rows;
    numbers ends[2] = {{.stride = job->dst_rows_stride,
                        .nbytes = job->dst_row_nbytes,
                        .is_signed = job->dst_row_is_signed != 0,
                        .row_count = job->dst_count},
                       {.stride = job->src_rows_stride,
                        .nbytes = job->src_row_nbytes,
                        .is_signed = job->src_row_is_signed != 0,
                        .row_count = job->src_count}};
    int32_t code = numbers_read(emulated, what, job->dst_rows, &ends[0]);
    if (code == 0) {
        code = numbers_read(emulated, what, job->src_rows, &ends[1]);
    }
    for (uint64_t warp = 0; code == 0 && warp < what->warp_count; warp++) {
        code = warp_run(emulated, what, ends, warp);
    }
    free(ends[0].bytes);
    free(ends[1].bytes);
    return code;
}

static bool
row_numbers_are_sane(cm_address address, uint32_t nbytes)
{
    return address == 0 ? nbytes == 0 : nbytes <= 8 && cm_is_power_of_two(nbytes);
}

/* False for a job that a GPU would misread, or would copy only in part or twice. It is
 * refused here, so that the test that launched it fails. */
static bool
rows_is_sane(const launch *what, uint64_t thread_count)
{
    const cm_rows_job *job = &what->job.rows;
    if (job->layer_count > CM_ROWS_MAX_LAYERS || job->unit > 16
        || !cm_is_power_of_two(job->unit) || job->team_shift > CM_ROWS_WARP_SHIFT
        || job->part_count == 0 || job->group_count == 0 || job->spare[0] != 0
        || job->spare[1] != 0 || job->spare[2] != 0 || job->count > INT64_MAX
        || job->dst_count > INT64_MAX || job->src_count > INT64_MAX
        || !row_numbers_are_sane(job->dst_rows, job->dst_row_nbytes)
        || !row_numbers_are_sane(job->src_rows, job->src_row_nbytes)) {
        return false;
    }
    uint64_t team = UINT64_C(1) << job->team_shift;
    uint64_t rows = UINT64_C(1) << (CM_ROWS_WARP_SHIFT - job->team_shift);
    /* Divisions round up, so that the last part and the last group are not empty. */
    uint64_t parts = job->row_units / team + (job->row_units % team != 0 ? 1 : 0);
    uint64_t groups = job->count / rows + (job->count % rows != 0 ? 1 : 0);
    uint64_t slots = (thread_count >> CM_ROWS_WARP_SHIFT) * CM_ROWS_SLOTS;
    return thread_count % (UINT64_C(1) << CM_ROWS_WARP_SHIFT) == 0
           && slots <= UINT32_MAX && job->part_count == (parts > 0 ? parts : 1)
           && job->group_count == groups && job->step_parts == slots % job->part_count
           && job->step_groups == slots / job->part_count % job->group_count
           && job->step_layers == slots / job->part_count / job->group_count;
}

/* ---- launching ------------------------------------------------------------------------- */

/* What the launch needs to know about a kernel. The table is indexed by the number in
 * the handle of the kernel's function. */
typedef struct kernel_fact {
    uint64_t nbytes; /* of its parameter */
    int32_t (*run)(cm_emulated *emulated, cm_emulated_job *base);
    void (*touch)(cm_emulated_job *base, unsigned char *dst, const unsigned char *src);
    bool (*is_sane)(const launch *what, uint64_t thread_count);
} kernel_fact;

static const kernel_fact facts[HANDLE_COUNT] = {
    [CM_KERNEL_STRIDED + 1] = {sizeof(cm_strided_job), strided_run, copy_elements,
                               strided_is_sane},
    [CM_KERNEL_TABLE + 1] = {sizeof(cm_table_job), table_run, copy_piece,
                             table_is_sane},
    [CM_KERNEL_ROWS + 1] = {sizeof(cm_rows_job), rows_run, copy_piece, rows_is_sane},
};

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
    const kernel_fact *fact = &facts[which];
    if (params == NULL || params_nbytes != fact->nbytes) {
        return CM_CUDA_INVALID_VALUE;
    }
    uint64_t thread_count = (uint64_t)block_count * threads_per_block;
    launch what = {
        .base = {.run = fact->run, .touch = fact->touch, .device = device},
        .warp_count = thread_count >> CM_ROWS_WARP_SHIFT,
    };
    memcpy(&what.job, params, params_nbytes);
    if (!fact->is_sane(&what, thread_count)) {
        return CM_CUDA_INVALID_VALUE;
    }
    return cm_emulated_submit(emulated, stream, &what.base, sizeof(what), false);
}
