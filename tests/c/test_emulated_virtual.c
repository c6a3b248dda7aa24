/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of device memory that is mapped on demand, on the emulated device. A range of
 * addresses is reserved, physical memory is created under a handle, the handle is
 * mapped at some place in the range, and devices get access to it there. The tests
 * check what may be mapped where, who may touch it, and that work which comes too late
 * for it fails. */
#include <unistd.h>

#include "emulated_bench.h"
#include "runtime/emulated/private.h"
#include "runtime/kernel_jobs.h"

#define G CM_EMULATED_GRANULARITY

enum { RANGE = 16, BUDGET = 8 }; /* granules */

static const char ptx[] =
    ".version 7.0\n.target sm_50\n.visible .entry cm_strided_copy()";

/* A runtime whose devices have BUDGET granules of memory each. */
typedef struct world {
    cm_runtime *rt;
    cm_address base; /* a range of RANGE granules */
    uint64_t stream;
} world;

/* Open a world with a reserved range and without memory. */
static world
begin(void)
{
    world w = {.rt = open_emulated(13000, 2, BUDGET * G)};
    MUST(cm_rt_device_set(w.rt, 0));
    MUST(cm_rt_address_reserve(w.rt, RANGE * G, &w.base));
    MUST(cm_rt_stream_create(w.rt, CM_STREAM_NON_BLOCKING, 0, &w.stream));
    return w;
}

/* Close a world in which nothing is mapped any more. */
static void
end(const world *w)
{
    MUST(cm_rt_stream_synchronize(w->rt, w->stream));
    MUST(cm_rt_stream_destroy(w->rt, w->stream));
    MUST(cm_rt_address_free(w->rt, w->base, RANGE * G));
    close_emulated(w->rt);
}

/* Create physical memory and return its handle. */
static uint64_t
create(const world *w, uint64_t granules)
{
    uint64_t handle = 0;
    MUST(cm_rt_physical_create(w->rt, granules * G, 0, 0, &handle));
    return handle;
}

/* Map the handle at granule `at` and give device 0 access. The handle stays valid. */
static void
put(const world *w, uint64_t at, uint64_t granules, uint64_t handle)
{
    const int device = 0;
    MUST(cm_rt_address_map(w->rt, w->base + at * G, granules * G, handle));
    MUST(cm_rt_address_set_access(w->rt, w->base + at * G, granules * G, &device, 1));
}

/* Map fresh memory at granule `at`. Its handle is released, so the memory lives as long
 * as the mapping. */
static void
open_at(const world *w, uint64_t at, uint64_t granules)
{
    uint64_t handle = create(w, granules);
    put(w, at, granules, handle);
    MUST(cm_rt_physical_release(w->rt, handle));
}

static cm_status
unmap(const world *w, uint64_t at, uint64_t granules)
{
    return cm_rt_address_unmap(w->rt, w->base + at * G, granules * G);
}

/* Return how many granules the device has free. */
static uint64_t
free_granules(const world *w)
{
    uint64_t free_nbytes, total_nbytes;
    MUST(cm_rt_memory_info(w->rt, &free_nbytes, &total_nbytes));
    return free_nbytes / G;
}

/* Copy `count` bytes with the strided kernel on the current device. */
static cm_status
run_kernel(cm_runtime *rt, cm_address dst, cm_address src, uint64_t count)
{
    uint64_t module, function;
    cm_strided_job job = {.dst = dst,
                          .src = src,
                          .count = count,
                          .ndim = 1,
                          .itemsize = 1,
                          .shape = {count},
                          .dst_strides = {1},
                          .src_strides = {1}};
    CM_TRY(cm_rt_module_load(rt, ptx, &module));
    CM_TRY(cm_rt_module_function(rt, module, "cm_strided_copy", &function));
    cm_status status = cm_rt_kernel_launch(rt, function, 1, 32, &job, sizeof(job), 0);
    CM_TRY(cm_rt_module_unload(rt, module));
    CM_TRY(status);
    return cm_rt_stream_synchronize(rt, 0);
}

/* Mapped memory must behave like an allocation of the device: fresh, seen by its
 * attributes, and closed to the host. Beside the mapping, and once it is unmapped,
 * there must be no memory. */
static void
test_mapped_memory_is_device_memory(void)
{
    world w = begin();
    cm_pointer_info info;
    open_at(&w, 1, 2);
    CHECK_EQ(w.base % G, 0);
    CHECK_OK(cm_rt_pointer_attributes(w.rt, w.base + G + 5, &info));
    CHECK_EQ(info.kind, CM_KIND_DEVICE);
    CHECK_EQ(info.device, 0);
    CHECK_EQ(info.device_address, w.base + G + 5);
    CHECK_PTR_EQ(info.host_address, NULL);
    /* Nothing is mapped there. */
    CHECK_OK(cm_rt_pointer_attributes(w.rt, w.base, &info));
    CHECK_EQ(info.kind, CM_KIND_PAGEABLE);
    unsigned char *alias = cm_runtime_host_alias(w.rt, w.base + G, 2 * G);
    CHECK(alias != NULL);
    CHECK_FILLED(alias, 0xA5, 2 * G);
    CHECK(touch_crashes((void *)(uintptr_t)(w.base + G)));
    CHECK(!touch_crashes(alias));
    CHECK(touch_crashes(alias + 2 * G)); /* this is not mapped either */
    CHECK_PTR_EQ(cm_runtime_host_alias(w.rt, w.base + G, 2 * G + 1), NULL);
    CHECK_CODE(cm_rt_device_free(w.rt, w.base + G), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_device_free(w.rt, w.base), CM_CUDA_INVALID_VALUE);
    CHECK_OK(unmap(&w, 1, 2));
    CHECK(touch_crashes(alias));
    CHECK_PTR_EQ(cm_runtime_host_alias(w.rt, w.base + G, 1), NULL);
    end(&w);
}

/* Memory that is mapped but to which no device has access cannot be filled or copied,
 * and a kernel that touches it fails. */
static void
test_memory_without_access_is_not_touched(void)
{
    world w = begin();
    const int device = 0;
    char host[16] = {0};
    uint64_t handle = create(&w, 1);
    CHECK_CODE(cm_rt_fill_8_async(w.rt, w.base, 1, 16, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_address_map(w.rt, w.base, G, handle));
    CHECK_CODE(cm_rt_fill_8_async(w.rt, w.base, 1, 16, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(w.rt, of(host), w.base, 16, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(w.rt, w.base, of(host), 16, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_PTR_EQ(cm_runtime_host_alias(w.rt, w.base, 16), NULL);
    CHECK_OK(cm_rt_address_set_access(w.rt, w.base, G, &device, 1));
    CHECK_OK(cm_rt_fill_8_async(w.rt, w.base, 1, 16, w.stream));
    CHECK_OK(cm_rt_copy_async(w.rt, of(host), w.base, 16, w.stream));
    CHECK_FILLED(host, 1, 16);
    CHECK_OK(unmap(&w, 0, 1));
    /* When it is mapped again it needs access again, and a kernel that touches it
     * before fails. */
    CHECK_OK(cm_rt_address_map(w.rt, w.base, G, handle));
    CHECK_CODE(run_kernel(w.rt, w.base, w.base + 64, 16), CM_CUDA_ILLEGAL_ADDRESS);
    CHECK_OK(unmap(&w, 0, 1));
    CHECK_OK(cm_rt_physical_release(w.rt, handle));
    CHECK_OK(cm_rt_device_reset(w.rt));
    CHECK_OK(cm_rt_address_free(w.rt, w.base, RANGE * G));
    close_emulated(w.rt);
}

/* Mappings beside each other act as one piece of memory for copies, fills and kernels,
 * until one between them is unmapped. */
static void
test_neighbours_are_one_range(void)
{
    world w = begin();
    enum { SIDE = 100 };
    unsigned char host[2 * SIDE];
    for (int i = 0; i < 2 * SIDE; i++) {
        host[i] = (unsigned char)i;
    }
    open_at(&w, 1, 1); /* the second granule is mapped first */
    open_at(&w, 0, 1);
    open_at(&w, 2, 1);
    cm_address border = w.base + G - SIDE;
    unsigned char *alias = cm_runtime_host_alias(w.rt, border, 2 * SIDE);
    CHECK(alias != NULL);
    CHECK_OK(cm_rt_copy_async(w.rt, border, of(host), 2 * SIDE, w.stream));
    CHECK_OK(cm_rt_stream_synchronize(w.rt, w.stream));
    CHECK_BYTES_EQ(alias, host, 2 * SIDE);
    CHECK_OK(run_kernel(w.rt, border + G, border, 2 * SIDE));
    CHECK_BYTES_EQ(cm_runtime_host_alias(w.rt, border + G, 2 * SIDE), host, 2 * SIDE);
    CHECK_OK(cm_rt_fill_16_async(w.rt, border, 0x0707, SIDE, w.stream));
    CHECK_OK(cm_rt_stream_synchronize(w.rt, w.stream));
    CHECK_FILLED(alias, 7, 2 * SIDE);
    CHECK_CODE(cm_rt_fill_8_async(w.rt, w.base + 3 * G - 1, 1, 2, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(unmap(&w, 1, 1)); /* now there is a hole in the range */
    CHECK_CODE(cm_rt_fill_8_async(w.rt, border, 1, 2 * SIDE, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_8_async(w.rt, w.base, 1, 3 * G, w.stream),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(unmap(&w, 0, 1));
    CHECK_OK(unmap(&w, 2, 1));
    end(&w);
}

/* A handle cannot be mapped at two places at once. Its bytes move with it, and once the
 * handle is released the memory lives as long as its mapping. */
static void
test_one_handle_is_mapped_at_one_place(void)
{
    world w = begin();
    uint64_t handle = create(&w, 1);
    put(&w, 0, 1, handle);
    CHECK_CODE(cm_rt_address_map(w.rt, w.base + 5 * G, G, handle),
               CM_CUDA_NOT_SUPPORTED);
    CHECK_OK(cm_rt_fill_8_async(w.rt, w.base, 0x31, G, w.stream));
    CHECK_OK(cm_rt_stream_synchronize(w.rt, w.stream));
    CHECK_OK(unmap(&w, 0, 1));
    put(&w, 5, 1, handle);
    CHECK_FILLED(cm_runtime_host_alias(w.rt, w.base + 5 * G, G), 0x31, G);
    CHECK_OK(cm_rt_physical_release(w.rt, handle));
    CHECK_EQ(free_granules(&w), BUDGET - 1); /* the mapping keeps the memory */
    CHECK_OK(unmap(&w, 5, 1));
    CHECK_EQ(free_granules(&w), BUDGET);
    end(&w);
}

/* A part of a handle, an odd address, a place outside the range or one that is taken,
 * and a handle that was released must all be refused. A range with mappings cannot be
 * given back. */
static void
test_map_refuses_what_does_not_fit(void)
{
    world w = begin();
    uint64_t two = create(&w, 2);
    uint64_t one = create(&w, 1);
    cm_runtime *rt = w.rt;
    CHECK_CODE(cm_rt_address_map(rt, w.base, G, two), CM_CUDA_NOT_SUPPORTED);
    CHECK_CODE(cm_rt_address_map(rt, w.base, 4 * G, two), CM_CUDA_NOT_SUPPORTED);
    CHECK_CODE(cm_rt_address_map(rt, w.base + 1, G, one), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_map(rt, w.base, 0, one), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_map(rt, w.base, G, one + 1), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_map(rt, w.base + (RANGE - 1) * G, 2 * G, two),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_map(rt, w.base + RANGE * G, G, one),
               CM_CUDA_INVALID_VALUE);
    put(&w, 3, 2, two);
    for (uint64_t at = 2; at <= 4; at++) {
        CHECK_CODE(cm_rt_address_map(rt, w.base + at * G, 2 * G, two),
                   CM_CUDA_INVALID_VALUE);
    }
    CHECK_CODE(cm_rt_address_map(rt, w.base + 4 * G, G, one), CM_CUDA_INVALID_VALUE);
    put(&w, 2, 1, one);
    CHECK_CODE(cm_rt_address_free(rt, w.base, RANGE * G), CM_CUDA_INVALID_VALUE);
    CHECK_OK(unmap(&w, 2, 3));
    CHECK_OK(cm_rt_physical_release(rt, one));
    CHECK_OK(cm_rt_physical_release(rt, two));
    CHECK_CODE(cm_rt_address_map(rt, w.base, G, one), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_free(rt, w.base, G), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_free(rt, w.base + G, RANGE * G), CM_CUDA_INVALID_VALUE);
    end(&w);
}

/* Unmapping and giving access take one or several whole mappings that lie side by side,
 * and nothing else. */
static void
test_unmap_and_access_take_whole_mappings(void)
{
    world w = begin();
    const int devices[] = {0, 1, 2};
    cm_runtime *rt = w.rt;
    open_at(&w, 0, 2);
    open_at(&w, 2, 1);
    open_at(&w, 4, 1);
    CHECK_CODE(unmap(&w, 0, 1), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(unmap(&w, 1, 1), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(unmap(&w, 1, 2), CM_CUDA_INVALID_VALUE);
    /* There is a hole between them. */
    CHECK_CODE(unmap(&w, 2, 3), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(unmap(&w, 0, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(unmap(&w, 8, 1), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_set_access(rt, w.base, G, devices, 1),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_set_access(rt, w.base + 2 * G, 3 * G, devices, 1),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_set_access(rt, w.base, 2 * G, devices, 3),
               CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_address_set_access(rt, w.base, 2 * G, devices, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_address_set_access(rt, w.base, 3 * G, devices, 2));
    CHECK_OK(unmap(&w, 0, 3));
    CHECK_CODE(unmap(&w, 0, 3), CM_CUDA_INVALID_VALUE);
    CHECK_OK(unmap(&w, 4, 1));
    end(&w);
}

/* Physical memory counts against its device from its creation on, and addresses do not
 * count. Wrong sizes, flags and devices must be refused. */
static void
test_physical_memory_is_counted(void)
{
    world w = begin();
    cm_emulated_counts counts;
    uint64_t handle, none = 77;
    cm_runtime *rt = w.rt;
    CHECK_EQ(free_granules(&w), BUDGET); /* addresses take no memory */
    CHECK_OK(cm_rt_physical_create(rt, (BUDGET - 1) * G, 0, CM_PHYSICAL_RDMA, &handle));
    CHECK_EQ(free_granules(&w), 1);
    cm_status status = cm_rt_physical_create(rt, 2 * G, 0, 0, &none);
    CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.arg, 2 * G);
    CHECK_EQ(none, 77);
    CHECK_CODE(cm_rt_device_alloc(rt, 2 * G, &none), CM_CUDA_OUT_OF_MEMORY);
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.physical_allocs, 1);
    CHECK_EQ(counts.address_ranges, 1);
    CHECK_EQ(counts.live_nbytes, (BUDGET - 1) * G);
    CHECK_OK(cm_rt_physical_release(rt, handle));
    CHECK_CODE(cm_rt_physical_release(rt, handle), CM_CUDA_INVALID_VALUE);
    CHECK_EQ(free_granules(&w), BUDGET);
    CHECK_OK(cm_rt_physical_create(rt, BUDGET * G, 1, CM_PHYSICAL_RDMA, &handle));
    CHECK_EQ(free_granules(&w), BUDGET); /* it is memory of the other device */
    CHECK_OK(cm_rt_physical_release(rt, handle));
    CHECK_CODE(cm_rt_physical_create(rt, G + 1, 0, 0, &none), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_physical_create(rt, 0, 0, 0, &none), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_physical_create(rt, G, 0, 8, &none), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_physical_create(rt, G, 2, 0, &none), CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_address_reserve(rt, G / 2, &none), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_address_reserve(rt, 0, &none), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_physical_granularity(rt, 2, 0, &none), CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_rt_physical_granularity(rt, 0, 8, &none), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_physical_granularity(rt, 1, CM_PHYSICAL_RDMA, &none));
    CHECK_EQ(none, G);
    end(&w);
}

/* Queue a fill over the edge of two granules behind a gate, call `meanwhile`, open the
 * gate, and return what the fill ended with. */
static cm_status
late_fill(const world *w, void (*meanwhile)(const world *w))
{
    MUST(cm_emulated_gate_close(w->rt, w->stream));
    MUST(cm_rt_fill_8_async(w->rt, w->base + G - 8, 0x11, 16, w->stream));
    meanwhile(w);
    MUST(cm_emulated_gate_open(w->rt, w->stream));
    return cm_rt_stream_synchronize(w->rt, w->stream);
}

/* Unmap the first granule of the fill. */
static void
unmap_first(const world *w)
{
    MUST(unmap(w, 0, 1));
}

/* Map other memory in the place of the first granule. */
static void
put_another(const world *w)
{
    MUST(unmap(w, 0, 1));
    open_at(w, 0, 1);
}

/* Map memory behind the fill, which must not matter. */
static void
put_a_neighbour(const world *w)
{
    open_at(w, 2, 1);
}

/* If the memory of a queued fill is unmapped, the fill must fail, even if other memory
 * is in its place by then. That memory must stay untouched. */
static void
test_work_queued_before_unmapping_fails(void)
{
    void (*const bugs[])(const world *) = {unmap_first, put_another};
    for (int i = 0; i < 2; i++) {
        world w = begin();
        open_at(&w, 0, 1);
        open_at(&w, 1, 1);
        CHECK_OK(late_fill(&w, put_a_neighbour));
        CHECK_CODE(late_fill(&w, bugs[i]), CM_CUDA_ILLEGAL_ADDRESS);
        unsigned char *rest = cm_runtime_host_alias(w.rt, w.base + 2 * G, 8);
        CHECK_FILLED(rest, 0xA5, 8);
        if (i == 1) { /* the memory that was put there instead is untouched */
            CHECK_FILLED(cm_runtime_host_alias(w.rt, w.base + G - 8, 8), 0xA5, 8);
        }
        uint64_t handle;
        CHECK_CODE(cm_rt_physical_create(w.rt, G, 0, 0, &handle),
                   CM_CUDA_ILLEGAL_ADDRESS);
        CHECK_OK(cm_rt_device_reset(w.rt));
        CHECK_OK(cm_rt_address_free(w.rt, w.base, RANGE * G));
        close_emulated(w.rt);
    }
}

/* Work of device 0 that runs while its memory is unmapped. */
typedef struct executing {
    /* This member is first, since the job is converted back to this struct. */
    cm_emulated_job job;
    cm_runtime *rt;
    cm_address base;
    cm_thread thread;
    cm_status unmapped;
} executing;

/* The body of a thread that unmaps the first two granules. */
static void *
unmap_there(void *arg)
{
    executing *what = arg;
    what->unmapped = cm_rt_address_unmap(what->rt, what->base, 2 * G);
    return NULL;
}

/* Run work on this memory as a stream does, and return the code with which it ends. */
static int32_t
execute(executing *what, cm_address address, uint64_t nbytes,
        void (*touch)(cm_emulated_job *, unsigned char *, const unsigned char *))
{
    cm_emulated *emulated = cm_emulated_of(what->rt->inner);
    what->job.touch = touch;
    what->job.dst = (cm_emulated_end){.address = address, .nbytes = nbytes};
    cm_mutex_lock(&emulated->lock);
    what->job.stamp = emulated->memory.serial;
    int32_t code = cm_emulated_touch(emulated, &what->job);
    cm_mutex_unlock(&emulated->lock);
    return code;
}

/* Work on the second granule and the first byte of the third. It unmaps the first two
 * granules in another thread, and returns once they are no longer found. */
static void
begin_to_unmap(cm_emulated_job *job, unsigned char *dst CM_UNUSED,
               const unsigned char *src CM_UNUSED)
{
    executing *what = (executing *)job;
    MUST(cm_thread_start(&what->thread, unmap_there, what));
    while (cm_runtime_host_alias(what->rt, what->base + G, 1) != NULL) {
        let_run();
    }
    /* That thread waits now, and nobody else can unmap the granule meanwhile. */
    CHECK_CODE(cm_rt_address_unmap(what->rt, what->base + G, G), CM_CUDA_INVALID_VALUE);
}

/* Work on the third granule, which stays mapped. While it runs, it starts work on the
 * second granule, which is unmapped meanwhile and so has to fail. */
static void
touch_what_goes(cm_emulated_job *job, unsigned char *dst CM_UNUSED,
                const unsigned char *src CM_UNUSED)
{
    executing *what = (executing *)job;
    CHECK_EQ(execute(what, what->base + G, G + 1, begin_to_unmap),
             CM_CUDA_ILLEGAL_ADDRESS);
    cm_thread_join(what->thread);
    CHECK_OK(what->unmapped);
}

/* Return how much memory of the device is in use. */
static uint64_t
used_nbytes(cm_runtime *rt)
{
    uint64_t free_nbytes, total_nbytes;
    MUST(cm_rt_memory_info(rt, &free_nbytes, &total_nbytes));
    return total_nbytes - free_nbytes;
}

/* Memory is unmapped while work runs on it and on its neighbour. That work must fail,
 * work on the neighbour alone must succeed, and the memory must come back. */
static void
test_work_that_executes_while_unmapping_fails(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 8 * G);
    const int device = 0;
    cm_address base;
    uint64_t handle;
    CHECK_OK(cm_rt_address_reserve(rt, 4 * G, &base));
    for (uint64_t i = 0; i < 3; i++) {
        CHECK_OK(cm_rt_physical_create(rt, G, 0, 0, &handle));
        CHECK_OK(cm_rt_address_map(rt, base + i * G, G, handle));
        CHECK_OK(cm_rt_physical_release(rt, handle));
    }
    CHECK_OK(cm_rt_address_set_access(rt, base, 3 * G, &device, 1));
    executing what = {.rt = rt, .base = base, .unmapped = {.code = -99}};
    CHECK_EQ(execute(&what, base + 2 * G, G, touch_what_goes), 0);
    CHECK_EQ(used_nbytes(rt), G);
    CHECK_OK(cm_rt_address_unmap(rt, base + 2 * G, G));
    CHECK_EQ(used_nbytes(rt), 0);
    CHECK_OK(cm_rt_address_free(rt, base, 4 * G));
    close_emulated(rt);
}

/* Device 1 can use memory of device 0 only if it was given access to that mapping. A
 * copy between the two devices needs none. */
static void
test_peers_need_access_of_their_own(void)
{
    world w = begin();
    const int both[] = {0, 1};
    cm_runtime *rt = w.rt;
    cm_address far;
    open_at(&w, 0, 1);
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_rt_device_alloc(rt, 64, &far));
    CHECK_CODE(cm_rt_copy_async(rt, far, w.base, 64, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(rt, w.base, far, 64, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_copy_peer_async(rt, far, 1, w.base, 0, 64, 0));
    CHECK_CODE(cm_rt_fill_8_async(rt, w.base, 3, 64, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_address_set_access(rt, w.base, G, &both[1], 1));
    CHECK_OK(cm_rt_fill_8_async(rt, w.base, 3, 64, 0));
    CHECK_OK(run_kernel(rt, w.base + 64, w.base, 64));
    CHECK_OK(cm_rt_copy_async(rt, far, w.base + 64, 64, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_FILLED(cm_runtime_host_alias(rt, far, 64), 3, 64);
    CHECK_OK(unmap(&w, 0, 1));
    open_at(&w, 0, 1);
    CHECK_CODE(run_kernel(rt, far, w.base, 64), CM_CUDA_ILLEGAL_ADDRESS);
    CHECK_OK(cm_rt_device_reset(rt));
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(run_kernel(rt, w.base + 64, w.base, 64)); /* only device 1 had failed */
    CHECK_OK(unmap(&w, 0, 1));
    end(&w);
}

/* A reset of device 0 removes its memory from every range, and leaves memory of device
 * 1 that is mapped in the same range. */
static void
test_reset_takes_the_devices_memory_from_every_range(void)
{
    world w = begin();
    uint64_t far, handle;
    cm_emulated_counts counts;
    open_at(&w, 0, 2);
    handle = create(&w, 1);
    put(&w, 6, 1, handle);
    CHECK_OK(cm_rt_physical_create(w.rt, G, 1, 0, &far));
    CHECK_OK(cm_rt_address_map(w.rt, w.base + 3 * G, G, far));
    CHECK_OK(cm_rt_device_reset(w.rt));
    cm_emulated_read_counts(w.rt, &counts);
    CHECK_EQ(counts.physical_allocs, 1);
    CHECK_EQ(counts.mappings, 1);
    CHECK_EQ(counts.live_nbytes, G);
    CHECK_CODE(unmap(&w, 0, 2), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_physical_release(w.rt, handle), CM_CUDA_INVALID_VALUE);
    CHECK_OK(unmap(&w, 3, 1));
    CHECK_OK(cm_rt_physical_release(w.rt, far));
    CHECK_OK(cm_rt_address_free(w.rt, w.base, RANGE * G));
    close_emulated(w.rt);
}

/* The calls that reserve, create and map memory need no current context and make none.
 * During a capture they are refused. */
static void
test_calls_make_no_context_and_respect_captures(void)
{
    cm_runtime *rt = open_emulated(12000, 1, BUDGET * G);
    const int device = 0;
    cm_address base;
    uint64_t handle, context, stream;
    CHECK_OK(cm_rt_address_reserve(rt, G, &base));
    CHECK_OK(cm_rt_physical_create(rt, G, 0, 0, &handle));
    CHECK_OK(cm_rt_address_map(rt, base, G, handle));
    CHECK_OK(cm_rt_address_set_access(rt, base, G, &device, 1));
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0);
    CHECK_OK(cm_rt_stream_create(rt, 0, 0, &stream));
    CHECK_OK(cm_emulated_set_capturing(rt, stream, true));
    CHECK_CODE(cm_rt_address_unmap(rt, base, G), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_physical_create(rt, G, 0, 0, &context),
               CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_emulated_set_capturing(rt, stream, false), 901);
    CHECK_OK(cm_rt_stream_destroy(rt, stream));
    CHECK_OK(cm_rt_address_unmap(rt, base, G));
    CHECK_OK(cm_rt_physical_release(rt, handle));
    CHECK_OK(cm_rt_address_free(rt, base, G));
    close_emulated(rt);
}

/* A range that was given back keeps its addresses for a while, so that a late use of
 * them is noticed. Nevertheless many large ranges can be reserved one after another. */
static void
test_ranges_come_and_go(void)
{
    cm_runtime *rt = open_emulated(13000, 1, BUDGET * G);
    /* ThreadSanitizer leaves few addresses. */
    const uint64_t nbytes = CHECK_TSAN ? UINT64_C(8) << 30 : UINT64_C(1) << 40;
    cm_address before = 0, base;
    for (int i = 0; i < 150; i++) {
        CHECK_OK(cm_rt_address_reserve(rt, nbytes, &base));
        CHECK_NE(base, before);
        before = base;
        CHECK_OK(cm_rt_address_free(rt, base, nbytes));
        CHECK_CODE(cm_rt_fill_8_async(rt, base, 1, 1, 0), CM_CUDA_INVALID_VALUE);
    }
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_mapped_memory_is_device_memory)
     RUN(test_memory_without_access_is_not_touched)
     RUN(test_neighbours_are_one_range)
     RUN(test_one_handle_is_mapped_at_one_place)
     RUN(test_map_refuses_what_does_not_fit)
     RUN(test_unmap_and_access_take_whole_mappings)
     RUN(test_physical_memory_is_counted)
     RUN(test_work_queued_before_unmapping_fails)
     RUN(test_work_that_executes_while_unmapping_fails)
     RUN(test_peers_need_access_of_their_own)
     RUN(test_reset_takes_the_devices_memory_from_every_range)
     RUN(test_calls_make_no_context_and_respect_captures)
     RUN(test_ranges_come_and_go))
/* clang-format on */
