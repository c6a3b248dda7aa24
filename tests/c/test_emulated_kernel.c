/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the strided kernel and of managed pages on the emulated device. Assertions
 * at the top also check the layout of the structs that the PTX texts of the strided and
 * the table kernel read. */
#include <assert.h>
#include <stddef.h>

#include "open_emulated.h"
#include "runtime/kernel_jobs.h"

/* The PTX texts read the members at these offsets. */
static_assert(offsetof(cm_strided_job, dst) == 0, "ptx");
static_assert(offsetof(cm_strided_job, src) == 8, "ptx");
static_assert(offsetof(cm_strided_job, count) == 16, "ptx");
static_assert(offsetof(cm_strided_job, ndim) == 24, "ptx");
static_assert(offsetof(cm_strided_job, itemsize) == 28, "ptx");
static_assert(offsetof(cm_strided_job, from) == 32, "ptx");
static_assert(offsetof(cm_strided_job, scales) == 36, "ptx");
static_assert(offsetof(cm_strided_job, shape) == 40, "ptx");
static_assert(offsetof(cm_strided_job, dst_strides) == 104, "ptx");
static_assert(offsetof(cm_strided_job, src_strides) == 168, "ptx");
static_assert(offsetof(cm_strided_job, scale) == 232, "ptx");
static_assert(offsetof(cm_strided_job, offset) == 236, "ptx");
static_assert(sizeof(cm_strided_job) == 240, "ptx");
static_assert(offsetof(cm_table_job, count) == 0, "ptx");
static_assert(offsetof(cm_table_job, team_shift) == 4, "ptx");
static_assert(offsetof(cm_table_job, dst) == 16, "ptx");
static_assert(offsetof(cm_table_job, src) == 1648, "ptx");
static_assert(offsetof(cm_table_job, nbytes) == 3280, "ptx");
static_assert(sizeof(cm_table_job) == 4096, "what a kernel's parameters may take");

enum { MIB = 1 << 20 };

/* A text that the emulated device takes for the strided kernel. */
static const char ptx[] =
    ".version 7.0\n.target sm_50\n.visible .entry cm_strided_copy()";

static cm_address
of(const void *host)
{
    return (cm_address)(uintptr_t)host;
}

/* Load the strided kernel, run `job` on the legacy stream and wait for it. */
static cm_status
run_kernel(cm_runtime *rt, const cm_strided_job *job)
{
    uint64_t module, function;
    CM_TRY(cm_rt_module_load(rt, ptx, &module));
    CM_TRY(cm_rt_module_function(rt, module, "cm_strided_copy", &function));
    cm_status status = cm_rt_kernel_launch(rt, function, 2, 128, job, sizeof(*job), 0);
    CM_TRY(cm_rt_module_unload(rt, module));
    CM_TRY(status);
    return cm_rt_stream_synchronize(rt, 0);
}

/* Find out where managed memory was last sent by a prefetch. */
static cm_status
ask(cm_runtime *rt, cm_address address, uint64_t nbytes, int *out)
{
    return cm_rt_range_attribute(rt, address, nbytes, CM_RANGE_PREFETCHED, out, 1);
}

/* A prefetch behind a gate must not move pages before it runs, although the location
 * that was asked for is known at once. Wrong locations and ranges must be refused. */
static void
test_managed_pages_move_when_prefetch_runs(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    uint64_t page = page_nbytes(), nbytes = 8 * page;
    cm_address managed, device;
    uint64_t stream, on_host;
    int where;
    CHECK_OK(cm_rt_managed_alloc(rt, nbytes, CM_MANAGED_GLOBAL, &managed));
    CHECK_OK(cm_rt_device_alloc(rt, nbytes, &device));
    CHECK_OK(cm_rt_stream_create(rt, 0, 0, &stream));
    CHECK_OK(cm_emulated_host_pages(rt, managed, nbytes, &on_host));
    CHECK_EQ(on_host, 8);
    CHECK_OK(ask(rt, managed, nbytes, &where));
    CHECK_EQ(where, CM_NO_LOCATION);
    CHECK_OK(cm_emulated_gate_close(rt, stream));
    CHECK_OK(cm_rt_prefetch_async(rt, managed, nbytes, 1, stream));
    CHECK_OK(ask(rt, managed, nbytes, &where));
    CHECK_EQ(where, 1);
    CHECK_OK(cm_emulated_host_pages(rt, managed, nbytes, &on_host));
    CHECK_EQ(on_host, 8);
    CHECK_OK(cm_emulated_gate_open(rt, stream));
    CHECK_OK(cm_rt_stream_synchronize(rt, stream));
    CHECK_OK(cm_emulated_host_pages(rt, managed, nbytes, &on_host));
    CHECK_EQ(on_host, 0);
    CHECK_OK(cm_rt_prefetch_async(rt, managed + page, page, CM_HOST_LOCATION, stream));
    CHECK_OK(cm_rt_stream_synchronize(rt, stream));
    CHECK_OK(cm_emulated_host_pages(rt, managed, nbytes, &on_host));
    CHECK_EQ(on_host, 1);
    CHECK_OK(ask(rt, managed, nbytes, &where));
    CHECK_EQ(where, CM_NO_LOCATION);
    CHECK_OK(ask(rt, managed + page, page, &where));
    CHECK_EQ(where, CM_HOST_LOCATION);
    CHECK_CODE(cm_rt_prefetch_async(rt, managed, nbytes, 2, stream),
               CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_prefetch_async(rt, managed, nbytes, -2, stream),
               CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_prefetch_async(rt, managed, nbytes + 1, 0, stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_prefetch_async(rt, managed, 0, 0, stream), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_prefetch_async(rt, device, nbytes, 0, stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(ask(rt, device, nbytes, &where), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_stream_destroy(rt, stream));
    CHECK_OK(cm_rt_device_free(rt, managed));
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
}

/* Batches of prefetches and discards are refused on a default stream. On another stream
 * they must act on each of their ranges, in whole pages. */
static void
test_managed_batches_need_a_stream_of_their_own(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    uint64_t page = page_nbytes(), stream, on_host;
    cm_address managed;
    CHECK_OK(cm_rt_managed_alloc(rt, 4 * page, CM_MANAGED_GLOBAL, &managed));
    CHECK_OK(cm_rt_stream_create(rt, 0, 0, &stream));
    const cm_address at[2] = {managed, managed + 2 * page};
    const uint64_t sizes[2] = {page, 2 * page};
    unsigned char *bytes = cm_runtime_host_alias(rt, managed, 4 * page);
    memset(bytes, 7, 4 * page);
    CHECK_CODE(cm_rt_prefetch_batch_async(rt, at, sizes, 2, 1, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_discard_batch_async(rt, at, sizes, 2, CM_STREAM_LEGACY),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_discard_batch_async(rt, at, sizes, 0, stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_prefetch_batch_async(rt, at, sizes, 2, 1, stream));
    CHECK_OK(cm_rt_stream_synchronize(rt, stream));
    CHECK_OK(cm_emulated_host_pages(rt, managed, 4 * page, &on_host));
    CHECK_EQ(on_host, 1);
    /* The range begins inside a page. All pages that it touches are discarded. */
    const cm_address inside = managed + 1;
    CHECK_OK(cm_rt_discard_batch_async(rt, &inside, sizes, 1, stream));
    CHECK_OK(cm_rt_stream_synchronize(rt, stream));
    CHECK(bytes[0] != 7);
    CHECK(bytes[2 * page - 1] != 7);
    CHECK_EQ(bytes[2 * page], 7);
    CHECK_OK(cm_rt_stream_destroy(rt, stream));
    CHECK_OK(cm_rt_device_free(rt, managed));
    close_emulated(rt);
}

/* Advice is kept for each page, and is reported for a range only if it holds for all of
 * its pages. Wrong advice, ranges and devices must be refused. */
static void
test_managed_advice_is_kept_by_page(void)
{
    cm_runtime *rt = open_emulated(12000, 2, MIB);
    uint64_t page = page_nbytes(), nbytes = 4 * page;
    cm_address managed;
    int found[3];
    CHECK_OK(cm_rt_managed_alloc(rt, nbytes, CM_MANAGED_GLOBAL, &managed));
    CHECK_OK(cm_rt_advise(rt, managed, page, CM_ADVISE_READ_MOSTLY, 0));
    CHECK_OK(cm_rt_range_attribute(rt, managed, page, CM_RANGE_READ_MOSTLY, found, 1));
    CHECK_EQ(found[0], 1);
    CHECK_OK(
        cm_rt_range_attribute(rt, managed, nbytes, CM_RANGE_READ_MOSTLY, found, 1));
    CHECK_EQ(found[0], 0);
    CHECK_OK(cm_rt_advise(rt, managed, nbytes, CM_ADVISE_PREFERRED, 1));
    CHECK_OK(cm_rt_range_attribute(rt, managed, nbytes, CM_RANGE_PREFERRED, found, 1));
    CHECK_EQ(found[0], 1);
    CHECK_OK(cm_rt_advise(rt, managed, nbytes, CM_ADVISE_ACCESSED_BY, 1));
    CHECK_OK(
        cm_rt_advise(rt, managed, nbytes, CM_ADVISE_ACCESSED_BY, CM_HOST_LOCATION));
    CHECK_OK(
        cm_rt_range_attribute(rt, managed, nbytes, CM_RANGE_ACCESSED_BY, found, 3));
    CHECK_EQ(found[0], CM_HOST_LOCATION);
    CHECK_EQ(found[1], 1);
    CHECK_EQ(found[2], CM_NO_LOCATION);
    CHECK_CODE(cm_rt_advise(rt, managed, nbytes, CM_ADVISE_ACCESSED_BY, 2),
               CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(
        cm_rt_advise(rt, managed, nbytes, CM_ADVISE_PREFERRED, CM_NUMA_LOCATION(0)),
        CM_CUDA_NOT_SUPPORTED);
    CHECK_CODE(cm_rt_advise(rt, managed, nbytes, 7, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_advise(rt, managed, nbytes + 1, CM_ADVISE_READ_MOSTLY, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_range_attribute(rt, managed, nbytes, 5, found, 1),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_prefetch_batch_async(rt, &managed, &nbytes, 1, 0, 2), CM_ENOTSUP);
    CHECK_CODE(cm_rt_discard_batch_async(rt, &managed, &nbytes, 1, 2), CM_ENOTSUP);
    CHECK_OK(cm_rt_device_free(rt, managed));
    close_emulated(rt);
}

/* On a device without concurrent managed access, prefetches and advice about places are
 * refused. */
static void
test_managed_memory_used_in_turn_cannot_be_sent(void)
{
    cm_emulated_config config;
    cm_runtime *rt = NULL;
    default_config(&config);
    config.in_turn = true;
    CHECK_OK(cm_emulated_open(&config, &rt));
    cm_address managed;
    uint64_t nbytes = page_nbytes();
    int found = 1;
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(
        cm_rt_device_attribute(rt, CM_ATTRIBUTE_concurrent_managed_access, 0, &found));
    CHECK_EQ(found, 0);
    CHECK_OK(cm_rt_managed_alloc(rt, nbytes, CM_MANAGED_GLOBAL, &managed));
    CHECK_CODE(cm_rt_prefetch_async(rt, managed, nbytes, 0, 0), CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_prefetch_async(rt, managed, nbytes, CM_HOST_LOCATION, 0),
               CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_advise(rt, managed, nbytes, CM_ADVISE_PREFERRED, 0),
               CM_CUDA_INVALID_DEVICE);
    CHECK_OK(cm_rt_advise(rt, managed, nbytes, CM_ADVISE_READ_MOSTLY, 0));
    CHECK_OK(cm_rt_device_free(rt, managed));
    rt->close(rt);
}

/* The kernel copies a view with reversed columns to its transpose. Elements outside
 * must stay as they were, and the managed pages must have moved to the device. */
static void
test_kernel_copies_strided_elements(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address src, managed;
    uint16_t *at;
    CHECK_OK(cm_rt_device_alloc(rt, 200, &src));
    CHECK_OK(cm_rt_managed_alloc(rt, 200, 1, &managed));
    at = cm_runtime_host_alias(rt, src, 200);
    for (uint16_t i = 0; i < 100; i++) {
        at[i] = (uint16_t)(1000 + i);
    }
    CHECK_OK(cm_rt_fill_8_async(rt, managed, 0, 200, 0));
    /* The source is a view of 3 rows and 4 columns of a matrix with 10 columns, with
     * the columns reversed. The target gets its transpose. */
    cm_strided_job job = {.dst = managed,
                          .src = src + 2 * 13,
                          .count = 12,
                          .ndim = 2,
                          .itemsize = 2,
                          .shape = {3, 4},
                          .dst_strides = {2, 6},
                          .src_strides = {20, -2}};
    CHECK_OK(run_kernel(rt, &job));
    const uint16_t *got = (const uint16_t *)(uintptr_t)managed;
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 4; j++) {
            CHECK_EQ(got[i + 3 * j], 1000 + 13 + 10 * i - j);
        }
    }
    CHECK_FILLED(got + 12, 0, 200 - 24);
    uint64_t on_host;
    CHECK_OK(cm_emulated_host_pages(rt, managed, 24, &on_host));
    CHECK_EQ(on_host, 0);
    CHECK_OK(cm_rt_device_free(rt, src));
    CHECK_OK(cm_rt_device_free(rt, managed));
    close_emulated(rt);
}

/* Texts, names, sizes and jobs that make no sense must be refused, each with the
 * driver's code. */
static void
test_kernel_jobs_without_sense_are_refused(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address device;
    uint64_t module, function, none;
    CHECK_OK(cm_rt_device_alloc(rt, 256, &device));
    CHECK_CODE(cm_rt_module_load(rt, NULL, &module), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_module_load(rt, "int main", &module), 218);
    CHECK_OK(cm_rt_module_load(rt, ptx, &module));
    CHECK_CODE(cm_rt_module_function(rt, module, "other", &function), 500);
    CHECK_CODE(cm_rt_module_function(rt, module + 1, "cm_strided_copy", &function),
               CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_module_function(rt, module, "cm_strided_copy", &function));
    CHECK_OK(cm_rt_module_function(rt, module, "cm_strided_copy", &none));
    CHECK_EQ(none, function);
    cm_strided_job job = {.dst = device,
                          .src = device + 128,
                          .count = 8,
                          .ndim = 1,
                          .itemsize = 4,
                          .shape = {8},
                          .dst_strides = {4},
                          .src_strides = {4}};
    CHECK_CODE(cm_rt_kernel_launch(rt, function, 0, 32, &job, sizeof(job), 0), 9);
    CHECK_CODE(cm_rt_kernel_launch(rt, function, 1, 1025, &job, sizeof(job), 0), 9);
    CHECK_CODE(cm_rt_kernel_launch(rt, function, 1, 32, &job, sizeof(job) - 8, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_kernel_launch(rt, function + 1, 1, 32, &job, sizeof(job), 0),
               CM_CUDA_INVALID_HANDLE);
    job.count = 7;
    CHECK_CODE(cm_rt_kernel_launch(rt, function, 1, 32, &job, sizeof(job), 0),
               CM_CUDA_INVALID_VALUE);
    job.count = 8;
    job.itemsize = 3;
    CHECK_CODE(cm_rt_kernel_launch(rt, function, 1, 32, &job, sizeof(job), 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_module_unload(rt, module));
    CHECK_CODE(cm_rt_module_unload(rt, module), CM_CUDA_INVALID_HANDLE);
    job.itemsize = 4;
    CHECK_CODE(cm_rt_kernel_launch(rt, function, 1, 32, &job, sizeof(job), 0),
               CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
}

/* A kernel with a misaligned address must fail with code 716. A kernel that leaves its
 * memory, or that uses the host's address of write-combined memory, must fail with code
 * 700. */
static void
test_kernel_bad_addresses_are_faults(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address device;
    void *wc;
    cm_strided_job job = {.count = 8,
                          .ndim = 1,
                          .itemsize = 4,
                          .shape = {8},
                          .dst_strides = {4},
                          .src_strides = {4}};
    CHECK_OK(cm_rt_device_alloc(rt, 256, &device));
    job.dst = device;
    job.src = device + 2;
    CHECK_CODE(run_kernel(rt, &job), 716);
    CHECK_OK(cm_rt_device_reset(rt));
    CHECK_OK(cm_rt_device_alloc(rt, 256, &device));
    job.dst = device;
    job.src = device + 256 - 28; /* four bytes too far */
    CHECK_CODE(run_kernel(rt, &job), 700);
    CHECK_OK(cm_rt_device_reset(rt));
    CHECK_OK(cm_rt_device_alloc(rt, 256, &device));
    CHECK_OK(cm_rt_host_alloc(rt, 256, CM_HOST_ALLOC_WRITE_COMBINED, &wc));
    job.dst = device;
    job.src = of(wc); /* the host's address, which the device cannot use */
    CHECK_CODE(run_kernel(rt, &job), 700);
    CHECK_OK(cm_rt_device_reset(rt));
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_managed_pages_move_when_prefetch_runs)
     RUN(test_managed_batches_need_a_stream_of_their_own)
     RUN(test_managed_advice_is_kept_by_page)
     RUN(test_managed_memory_used_in_turn_cannot_be_sent)
     RUN(test_kernel_copies_strided_elements)
     RUN(test_kernel_jobs_without_sense_are_refused)
     RUN(test_kernel_bad_addresses_are_faults))
/* clang-format on */
