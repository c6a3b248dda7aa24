/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the emulated device's memory: what the host may touch, limits, frees,
 * attributes of addresses, registrations of host memory, and resets. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "open_emulated.h"
#include "runtime/emulated/private.h"
#include "wait.h"

enum { MIB = 1 << 20 };

/* A text that the emulated device takes for a kernel. */
static const char ptx[] =
    ".version 7.0\n.target sm_50\n.visible .entry cm_strided_copy()";

/* Return the address of host memory as a number. */
static cm_address
of(const void *host)
{
    return (cm_address)(uintptr_t)host;
}

/* Map fresh pages, or return NULL. */
static unsigned char *
pages(size_t nbytes)
{
    void *at =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* Touching device memory by its address must crash, and reading it through the host's
 * mapping must not. Touching that mapping behind the end of the memory, or after a
 * free, must crash too. */
static void
test_device_memory_crashes_the_host(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address address, other;
    CHECK_OK(cm_rt_device_alloc(rt, 1000, &address));
    CHECK_EQ(address % 256, 0);
    CHECK(touch_crashes((void *)(uintptr_t)address));
    unsigned char *alias = cm_runtime_host_alias(rt, address, 1000);
    CHECK(alias != NULL);
    CHECK(of(alias) != address);
    CHECK(!touch_crashes(alias));
    CHECK(touch_crashes(alias + 1024)); /* the guard behind the memory */
    CHECK_PTR_EQ(cm_runtime_host_alias(rt, address + 10, 990), alias + 10);
    CHECK_PTR_EQ(cm_runtime_host_alias(rt, address, 1001), NULL);
    CHECK_OK(cm_rt_device_free(rt, address));
    CHECK_PTR_EQ(cm_runtime_host_alias(rt, address, 1), NULL);
    CHECK(touch_crashes(alias));
    /* A copy refuses both of these addresses instead of touching them. */
    CHECK_OK(cm_rt_device_alloc(rt, 1000, &other));
    CHECK_CODE(cm_rt_copy_async(rt, other, of(alias), 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(rt, other, address, 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_device_free(rt, other));
    close_emulated(rt);
}

/* Fresh memory has a pattern, so that code which counts on zeros fails. */
static void
test_device_memory_fresh_is_not_zero(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address address;
    CHECK_OK(cm_rt_device_alloc(rt, 1000, &address));
    CHECK_FILLED(cm_runtime_host_alias(rt, address, 1000), 0xA5, 1000);
    CHECK_OK(cm_rt_device_free(rt, address));
    close_emulated(rt);
}

/* An allocation that does not fit must fail with its size and leave the output alone.
 * Each device has its own memory. */
static void
test_device_memory_ends_at_its_size(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    cm_address all = 0, more = 5;
    uint64_t free_nbytes, total_nbytes;
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(cm_rt_device_alloc(rt, MIB - 256, &all));
    CHECK_OK(cm_rt_memory_info(rt, &free_nbytes, &total_nbytes));
    CHECK_EQ(total_nbytes, MIB);
    CHECK_EQ(free_nbytes, 256);
    cm_status status = cm_rt_device_alloc(rt, 257, &more);
    CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_device_alloc);
    CHECK_EQ(status.arg, 257);
    CHECK_EQ(more, 5);
    CHECK_CODE(cm_rt_device_alloc(rt, UINT64_MAX, &more), CM_CUDA_OUT_OF_MEMORY);
    CHECK_OK(cm_rt_device_set(rt, 1)); /* device 1 has its own memory */
    CHECK_OK(cm_rt_device_alloc(rt, MIB, &more));
    CHECK_OK(cm_rt_device_free(rt, more));
    /* It is freed while another device is current. */
    CHECK_OK(cm_rt_device_free(rt, all));
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(cm_rt_memory_info(rt, &free_nbytes, &total_nbytes));
    CHECK_EQ(free_nbytes, MIB);
    close_emulated(rt);
}

/* Host and managed memory share a limit of four times a device's memory. */
static void
test_host_memory_has_a_limit_too(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    void *host = NULL;
    cm_address managed = 0;
    CHECK_CODE(cm_rt_host_alloc(rt, 4 * MIB + 1, 0, &host), CM_CUDA_OUT_OF_MEMORY);
    CHECK_OK(cm_rt_host_alloc(rt, 3 * MIB, 0, &host));
    CHECK_CODE(cm_rt_managed_alloc(rt, 2 * MIB, CM_MANAGED_GLOBAL, &managed),
               CM_CUDA_OUT_OF_MEMORY);
    CHECK_OK(cm_rt_host_free(rt, host));
    CHECK_OK(cm_rt_managed_alloc(rt, 2 * MIB, CM_MANAGED_GLOBAL, &managed));
    CHECK_OK(cm_rt_device_free(rt, managed));
    close_emulated(rt);
}

/* A free must get the beginning of live memory of its own kind. NULL and 0 are
 * accepted. */
static void
test_free_of_wrong_addresses_is_refused(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address device, managed;
    void *host;
    int local = 0;
    CHECK_OK(cm_rt_device_alloc(rt, 1000, &device));
    CHECK_OK(cm_rt_managed_alloc(rt, 1000, CM_MANAGED_HOST, &managed));
    CHECK_OK(cm_rt_host_alloc(rt, 1000, 0, &host));
    CHECK_CODE(cm_rt_device_free(rt, device + 1), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_device_free(rt, of(host)), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_free(rt, (void *)(uintptr_t)device), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_free(rt, (void *)(uintptr_t)managed), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_free(rt, &local), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_device_free(rt, 0));
    CHECK_OK(cm_rt_host_free(rt, NULL));
    CHECK_OK(cm_rt_device_free(rt, device));
    CHECK_OK(cm_rt_device_free(rt, managed));
    CHECK_OK(cm_rt_host_free(rt, host));
    CHECK_CODE(cm_rt_device_free(rt, device), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_free(rt, host), CM_CUDA_INVALID_VALUE);
    close_emulated(rt);
}

static void
test_allocation_arguments_are_checked(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    void *host = NULL;
    cm_address address = 7;
    CHECK_CODE(cm_rt_host_alloc(rt, 0, 0, &host), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_alloc(rt, 10, 8, &host), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_managed_alloc(rt, 0, 1, &address), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_managed_alloc(rt, 10, 0, &address), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_managed_alloc(rt, 10, 3, &address), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_device_alloc(rt, 0, &address));
    CHECK_EQ(address, 0);
    close_emulated(rt);
}

/* The attributes of an address must say which kind of memory it is in, on which device,
 * and its addresses for host and device. */
static void
test_attributes_tell_each_kind(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    cm_address device, managed, wc_address;
    void *pinned, *wc;
    cm_pointer_info info;
    int local = 0;
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_rt_device_alloc(rt, 1000, &device));
    CHECK_OK(cm_rt_managed_alloc(rt, 1000, 1, &managed));
    CHECK_OK(cm_rt_host_alloc(rt, 1000, CM_HOST_ALLOC_MAPPED, &pinned));
    CHECK_OK(cm_rt_host_alloc(rt, 1000, CM_HOST_ALLOC_WRITE_COMBINED, &wc));
    CHECK_OK(cm_rt_host_device_address(rt, wc, &wc_address));
    CHECK_NE(wc_address, of(wc));

    CHECK_OK(cm_rt_pointer_attributes(rt, device + 3, &info));
    CHECK_EQ(info.kind, CM_KIND_DEVICE);
    CHECK_EQ(info.device, 1);
    CHECK_EQ(info.device_address, device + 3);
    CHECK_PTR_EQ(info.host_address, NULL);
    CHECK_OK(cm_rt_pointer_attributes(rt, managed, &info));
    CHECK_EQ(info.kind, CM_KIND_MANAGED);
    CHECK_EQ(of(info.host_address), managed);
    CHECK_OK(cm_rt_pointer_attributes(rt, of(pinned) + 999, &info));
    CHECK_EQ(info.kind, CM_KIND_PINNED);
    CHECK_EQ(info.device_address, of(pinned) + 999);
    CHECK_OK(cm_rt_pointer_attributes(rt, of(pinned) + 1000, &info));
    CHECK_EQ(info.kind, CM_KIND_PAGEABLE);
    CHECK_OK(cm_rt_pointer_attributes(rt, wc_address + 5, &info));
    CHECK_EQ(info.kind, CM_KIND_PINNED);
    CHECK_PTR_EQ(info.host_address, (char *)wc + 5);
    CHECK_OK(cm_rt_pointer_attributes(rt, of(&local), &info));
    CHECK_EQ(info.kind, CM_KIND_PAGEABLE);
    CHECK_EQ(info.device, -1);
    CHECK_PTR_EQ(info.host_address, &local);
    CHECK_CODE(cm_rt_host_device_address(rt, &local, &wc_address),
               CM_CUDA_INVALID_VALUE);

    CHECK_OK(cm_rt_device_free(rt, device));
    CHECK_OK(cm_rt_device_free(rt, managed));
    CHECK_OK(cm_rt_host_free(rt, pinned));
    CHECK_OK(cm_rt_host_free(rt, wc));
    close_emulated(rt);
}

/* Memory that overlaps a registration or an allocation cannot be registered again, and
 * a registration ends only by its first address. The device has another address for it
 * than the host. */
static void
test_registration_is_whole_and_once(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    unsigned char *host = pages(4 * page);
    void *pinned;
    cm_address address;
    cm_pointer_info info;
    CHECK(host != NULL);
    CHECK_OK(cm_rt_host_alloc(rt, 1000, 0, &pinned));
    CHECK_OK(cm_rt_host_register(rt, host + 100, page + 904, CM_REGISTER_MAPPED));
    CHECK_CODE(cm_rt_host_register(rt, host + 100, page + 904, 0),
               CM_CUDA_ALREADY_REGISTERED);
    CHECK_CODE(cm_rt_host_register(rt, host, 4 * page, 0), CM_CUDA_ALREADY_REGISTERED);
    CHECK_CODE(cm_rt_host_register(rt, host + page + 1904, 10, 0),
               CM_CUDA_ALREADY_REGISTERED);
    CHECK_CODE(cm_rt_host_register(rt, pinned, 100, 0), CM_CUDA_ALREADY_REGISTERED);
    CHECK_OK(cm_rt_host_register(rt, host + 2 * page, 100, 0));
    CHECK_OK(cm_rt_host_device_address(rt, host + 200, &address));
    CHECK_NE(address, of(host + 200));
    CHECK_OK(cm_rt_pointer_attributes(rt, address, &info));
    CHECK_EQ(info.kind, CM_KIND_PINNED);
    CHECK_PTR_EQ(info.host_address, host + 200);
    CHECK_PTR_EQ(cm_runtime_host_alias(rt, address, 10), host + 200);
    CHECK_CODE(cm_rt_host_unregister(rt, host), CM_CUDA_NOT_REGISTERED);
    CHECK_CODE(cm_rt_host_unregister(rt, host + 200), CM_CUDA_NOT_REGISTERED);
    CHECK_CODE(cm_rt_host_unregister(rt, pinned), CM_CUDA_NOT_REGISTERED);
    CHECK_OK(cm_rt_host_unregister(rt, host + 100));
    CHECK_CODE(cm_rt_host_unregister(rt, host + 100), CM_CUDA_NOT_REGISTERED);
    CHECK_OK(cm_rt_host_unregister(rt, host + 2 * page));
    CHECK_OK(cm_rt_host_free(rt, pinned));
    close_emulated(rt);
    (void)munmap(host, 4 * page);
}

static void
test_registration_arguments_are_checked(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    unsigned char *host = pages(4 * page);
    CHECK(host != NULL);
    CHECK_CODE(cm_rt_host_register(rt, NULL, 10, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_register(rt, host, 0, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_register(rt, host, UINT64_MAX, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_register(rt, host, 10, 16), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_host_unregister(rt, NULL), CM_CUDA_INVALID_VALUE);
    /* Pages that are not mapped and pages that may not be written are refused. */
    CHECK_EQ(munmap(host + 3 * page, page), 0);
    CHECK_CODE(cm_rt_host_register(rt, host, 4 * page, 0), CM_CUDA_INVALID_VALUE);
    CHECK_EQ(mprotect(host, page, PROT_READ), 0);
    CHECK_CODE(cm_rt_host_register(rt, host, 2 * page, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_host_register(rt, host, 2 * page, CM_REGISTER_READ_ONLY));
    CHECK_OK(cm_rt_host_unregister(rt, host));
    close_emulated(rt);
    (void)munmap(host, 3 * page);
}

/* Memory that was registered as read-only can be the source of a copy, but a copy or
 * fill into it is refused. */
static void
test_registration_read_only_is_never_written(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    unsigned char *host = pages(page);
    cm_address device, mapped;
    CHECK(host != NULL);
    memset(host, 3, page);
    CHECK_OK(cm_rt_device_alloc(rt, page, &device));
    CHECK_OK(cm_rt_host_register(rt, host, page, CM_REGISTER_READ_ONLY));
    CHECK_OK(cm_rt_host_device_address(rt, host, &mapped));
    CHECK_OK(cm_rt_copy_async(rt, device, of(host), page, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_FILLED(cm_runtime_host_alias(rt, device, page), 3, page);
    CHECK_CODE(cm_rt_copy_async(rt, of(host), device, 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_8_async(rt, mapped, 0, 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_host_unregister(rt, host));
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
    (void)munmap(host, page);
}

/* The owner unmaps registered memory without ending the registration. If the kernel
 * then puts an allocation of ours there, the old registration must not be in its
 * way. */
static void
test_registration_of_memory_gone_yields_to_new_memory(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 16 * MIB);
    cm_emulated_counts counts;
    void *host;
    unsigned char *lost = pages(4 * MIB);
    CHECK(lost != NULL);
    CHECK_OK(cm_rt_host_register(rt, lost, 4 * MIB, 0));
    /* The owner should have unregistered it first. */
    (void)munmap(lost, 4 * MIB);
    CHECK_OK(cm_rt_host_alloc(rt, 4 * MIB - 4 * 4096, 0, &host));
    CHECK(cm_runtime_host_alias(rt, of(host), 4 * MIB - 4 * 4096) == host);
    CHECK_OK(cm_rt_host_free(rt, host));
    cm_emulated_read_counts(rt, &counts);
    if (counts.registrations != 0) { /* the kernel has put the new memory elsewhere */
        CHECK_OK(cm_rt_host_unregister(rt, lost));
    }
    close_emulated(rt);
}

/* A reset frees the memory, streams, events and modules of the current device, and
 * nothing of another device. */
static void
test_reset_frees_one_device_only(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    cm_address zero, one, module;
    uint64_t stream, event, context;
    void *host;
    cm_emulated_counts counts;
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_rt_device_alloc(rt, 100, &one));
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(cm_rt_device_alloc(rt, 100, &zero));
    CHECK_OK(cm_rt_host_alloc(rt, 100, CM_HOST_ALLOC_WRITE_COMBINED, &host));
    CHECK_OK(cm_rt_stream_create(rt, 0, 0, &stream));
    CHECK_OK(cm_rt_event_create(rt, 0, &event));
    CHECK_OK(cm_rt_module_load(rt, ptx, &module));
    CHECK_OK(cm_rt_device_reset(rt));
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0);
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.device_allocs, 1);
    CHECK_EQ(counts.host_allocs, 0);
    CHECK_EQ(counts.streams, 0);
    CHECK_EQ(counts.events, 0);
    CHECK_EQ(counts.modules, 0);
    CHECK_EQ(counts.live_nbytes, 100);
    CHECK_CODE(cm_rt_stream_synchronize(rt, stream), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_event_synchronize(rt, event), CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_device_free(rt, one));
    close_emulated(rt);
}

static void
test_device_description_and_attributes(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    cm_device_info zero, one;
    int value;
    uint64_t context;
    CHECK_OK(cm_rt_device_describe(rt, 0, &zero));
    CHECK_OK(cm_rt_device_describe(rt, 1, &one));
    CHECK_STR_EQ(zero.name, "cumem emulated device");
    CHECK_EQ(zero.total_nbytes, MIB);
    CHECK(memcmp(zero.uuid, one.uuid, 16) != 0);
    CHECK_STR_EQ(one.pci_bus_id, "0000:02:00.0");
    CHECK_CODE(cm_rt_device_describe(rt, 2, &one), CM_CUDA_INVALID_DEVICE);
#define READ_ATTRIBUTE(name, number, cuda)                                             \
    CHECK_OK(cm_rt_device_attribute(rt, number, 0, &value));                           \
    CHECK_GE(value, 0);
    CM_DEVICE_ATTRIBUTES(READ_ATTRIBUTE)
#undef READ_ATTRIBUTE
    CHECK_CODE(cm_rt_device_attribute(rt, 9999, 0, &value), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_device_attribute(rt, 75, -1, &value), CM_CUDA_INVALID_DEVICE);
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0); /* asking must not make a context */
    close_emulated(rt);
}

/* With a driver that has no device, each call about devices must fail with
 * CM_CUDA_NO_DEVICE. */
static void
test_no_devices_answers_no_device(void)
{
    cm_runtime *rt = open_emulated(13000, 0, MIB);
    int value;
    cm_address address;
    CHECK_CODE(cm_rt_device_count(rt, &value), CM_CUDA_NO_DEVICE);
    CHECK_CODE(cm_rt_device_set(rt, 0), CM_CUDA_NO_DEVICE);
    CHECK_CODE(cm_rt_device_alloc(rt, 1, &address), CM_CUDA_NO_DEVICE);
    CHECK_OK(cm_rt_driver_version(rt, &value));
    CHECK_EQ(value, 13000);
    CHECK_CODE(cm_emulated_gate_close(rt, 0), CM_CUDA_NO_DEVICE);
    close_emulated(rt);
}

/* Work that runs while its memory is being freed. */
typedef struct executing {
    /* This member is first, since the job is converted back to this struct. */
    cm_emulated_job job;
    cm_runtime *rt;
    cm_address address;
    cm_thread thread;
    cm_status freed;
} executing;

/* The body of a thread that frees the memory. */
static void *
free_it(void *arg)
{
    executing *what = arg;
    what->freed = cm_rt_device_free(what->rt, what->address);
    return NULL;
}

/* The work itself. It starts the free in another thread, waits until the memory is no
 * longer found, and writes to the memory. */
static void
write_while_it_is_freed(cm_emulated_job *job, unsigned char *dst,
                        const unsigned char *src CM_UNUSED)
{
    executing *what = (executing *)job;
    CHECK_OK(cm_thread_start(&what->thread, free_it, what));
    while (cm_runtime_host_alias(what->rt, what->address, 1) != NULL) {
        let_others_run();
    }
    dst[0] = 1; /* the memory must still be there */
}

/* A free that begins while work runs on the memory must wait until that work is
 * done. */
static void
test_free_waits_for_executing_work(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_emulated *emulated = cm_emulated_of(rt->inner);
    executing what = {.rt = rt, .freed = {.code = -99}};
    CHECK_OK(cm_rt_device_alloc(rt, 100, &what.address));
    what.job.touch = write_while_it_is_freed;
    what.job.dst = (cm_emulated_end){.address = what.address, .nbytes = 100};
    cm_mutex_lock(&emulated->lock);
    int32_t code = cm_emulated_touch(emulated, &what.job);
    cm_mutex_unlock(&emulated->lock);
    cm_thread_join(what.thread);
    CHECK_EQ(code, 0);
    CHECK_OK(what.freed);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_device_memory_crashes_the_host)
     RUN(test_device_memory_fresh_is_not_zero)
     RUN(test_device_memory_ends_at_its_size)
     RUN(test_free_waits_for_executing_work)
     RUN(test_host_memory_has_a_limit_too)
     RUN(test_free_of_wrong_addresses_is_refused)
     RUN(test_allocation_arguments_are_checked)
     RUN(test_attributes_tell_each_kind)
     RUN(test_registration_is_whole_and_once)
     RUN(test_registration_arguments_are_checked)
     RUN(test_registration_read_only_is_never_written)
     RUN(test_registration_of_memory_gone_yields_to_new_memory)
     RUN(test_reset_frees_one_device_only)
     RUN(test_device_description_and_attributes)
     RUN(test_no_devices_answers_no_device))
/* clang-format on */
