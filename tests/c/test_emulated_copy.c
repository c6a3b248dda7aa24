/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of copies and fills on the emulated device: between all kinds of memory, over
 * the edges of memory, between devices, and with memory that is freed or unregistered
 * while a copy is queued. */
#include <sys/mman.h>
#include <unistd.h>

#include "base/thread.h"
#include "open_emulated.h"

enum { MIB = 1 << 20 };

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

/* A copy or fill must be refused if one end leaves the memory in which it begins. That
 * memory is an allocation, a registration, or ordinary memory beside a registration.
 * The copy must be refused even if the next registration follows without a gap. */
static void
test_copy_over_an_edge_is_refused(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    unsigned char *host = pages(3 * page);
    cm_address device;
    CHECK(host != NULL);
    CHECK_OK(cm_rt_device_alloc(rt, 1000, &device));
    CHECK_OK(cm_rt_host_register(rt, host, page, 0));
    CHECK_OK(cm_rt_host_register(rt, host + page, page, 0));
    CHECK_CODE(cm_rt_copy_async(rt, device, of(host), 1001, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(rt, device + 1, of(host), 1000, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(rt, device - 1, of(host), 2, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(rt, device, of(host) + page - 96, 200, 0),
               CM_CUDA_INVALID_VALUE); /* over the edge of two adjacent registrations */
    CHECK_CODE(cm_rt_copy_async(rt, device, of(host) + 2 * page - 192, 500, 0),
               CM_CUDA_INVALID_VALUE); /* from registered into ordinary memory */
    CHECK_CODE(cm_rt_copy_async(rt, 0, of(host), 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_async(rt, device, UINT64_MAX - 5, 100, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_8_async(rt, device, 0, 1001, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_8_async(rt, of(host + 2 * page), 0, 1, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_16_async(rt, device + 1, 0, 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_32_async(rt, device + 2, 0, 1, 0), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_fill_32_async(rt, device, 0, UINT64_MAX / 2, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_copy_async(rt, device + 1000, of(host), 0, 0));
    CHECK_OK(cm_rt_host_unregister(rt, host));
    CHECK_CODE(cm_rt_copy_async(rt, device, of(host) + page - 96, 200, 0),
               CM_CUDA_INVALID_VALUE); /* from ordinary into registered memory */
    CHECK_CODE(cm_rt_copy_async(rt, of(host) + page - 96, device, 200, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_copy_async(rt, device, of(host) + page - 200, 200, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_OK(cm_rt_host_unregister(rt, host + page));
    CHECK_OK(cm_rt_device_free(rt, device));
    CHECK_CODE(cm_rt_copy_async(rt, device, of(host), 10, 0), CM_CUDA_INVALID_VALUE);
    close_emulated(rt);
    (void)munmap(host, 3 * page);
}

/* Copy a pattern from each kind of memory to each other kind and back to ordinary
 * memory. */
static void
test_copy_moves_between_all_kinds(void)
{
    enum { N = 3000, KINDS = 6 };
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    unsigned char *registered = pages(page);
    unsigned char plain[N];
    unsigned char pattern[N];
    cm_address ends[KINDS];
    void *pinned, *wc;
    CHECK(registered != NULL);
    CHECK_OK(cm_rt_host_alloc(rt, N, 0, &pinned));
    CHECK_OK(cm_rt_host_alloc(rt, N, CM_HOST_ALLOC_WRITE_COMBINED, &wc));
    CHECK_OK(cm_rt_host_register(rt, registered, page, 0));
    CHECK_OK(cm_rt_device_alloc(rt, N, &ends[0]));
    CHECK_OK(cm_rt_managed_alloc(rt, N, 1, &ends[1]));
    ends[2] = of(pinned);
    CHECK_OK(cm_rt_host_device_address(rt, wc, &ends[3]));
    ends[4] = of(registered);
    ends[5] = of(plain);
    for (int to = 0; to < KINDS; to++) {
        for (int from = 0; from < KINDS; from++) {
            if (to == from) {
                continue;
            }
            for (int i = 0; i < N; i++) {
                pattern[i] = (unsigned char)(i * 7 + to * 31 + from * 11);
            }
            CHECK_OK(cm_rt_copy_async(rt, ends[from], of(pattern), N, 0));
            CHECK_OK(cm_rt_copy_async(rt, ends[to], ends[from], N, 0));
            /* The call has read ordinary memory when it returns. */
            memset(pattern, 0, N);
            CHECK_OK(cm_rt_copy_async(rt, of(pattern), ends[to], N, 0));
            for (int i = 0; i < N; i++) {
                CHECK_EQ(pattern[i], (unsigned char)(i * 7 + to * 31 + from * 11));
            }
        }
    }
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_OK(cm_rt_device_free(rt, ends[0]));
    CHECK_OK(cm_rt_device_free(rt, ends[1]));
    CHECK_OK(cm_rt_host_free(rt, pinned));
    CHECK_OK(cm_rt_host_free(rt, wc));
    CHECK_OK(cm_rt_host_unregister(rt, registered));
    close_emulated(rt);
    (void)munmap(registered, page);
}

/* A pitched copy must write each row and leave the bytes between rows alone, and must
 * be refused if a row is longer than its pitch or leaves the memory. */
static void
test_copy_2d_leaves_the_gaps(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address device;
    unsigned char src[40], dst[40];
    CHECK_OK(cm_rt_device_alloc(rt, 100, &device));
    CHECK_OK(cm_rt_fill_8_async(rt, device, 9, 100, 0));
    for (int i = 0; i < 40; i++) {
        src[i] = (unsigned char)(100 + i);
    }
    CHECK_OK(cm_rt_copy_2d_async(rt, device, 25, of(src), 10, 7, 4, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    const unsigned char *alias = cm_runtime_host_alias(rt, device, 100);
    for (int row = 0; row < 4; row++) {
        CHECK_BYTES_EQ(alias + 25 * row, src + 10 * row, 7);
        CHECK_FILLED(alias + 25 * row + 7, 9, 18);
    }
    memset(dst, 1, sizeof(dst));
    CHECK_OK(cm_rt_copy_2d_async(rt, of(dst), 10, device, 25, 7, 4, 0));
    for (int row = 0; row < 4; row++) {
        CHECK_BYTES_EQ(dst + 10 * row, src + 10 * row, 7);
        CHECK_FILLED(dst + 10 * row + 7, 1, 3);
    }
    CHECK_CODE(cm_rt_copy_2d_async(rt, device, 6, of(src), 10, 7, 4, 0), 12);
    CHECK_CODE(cm_rt_copy_2d_async(rt, device, 7, of(src), 6, 7, 4, 0), 12);
    CHECK_CODE(cm_rt_copy_2d_async(rt, device, 32, of(src), 7, 7, 4, 0),
               CM_CUDA_INVALID_VALUE); /* 3 * 32 + 7 > 100 */
    CHECK_CODE(cm_rt_copy_2d_async(rt, device, UINT64_MAX, of(src), 7, 7, 4, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_copy_2d_async(rt, device, 7, of(src), 7, 7, 0, 0));
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
}

/* A copy between devices must name the devices on which the two ends really lie. */
static void
test_copy_peer_checks_its_devices(void)
{
    cm_runtime *rt = open_emulated(13000, 2, MIB);
    cm_address zero, one;
    int can;
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_rt_device_alloc(rt, 100, &one));
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(cm_rt_device_alloc(rt, 100, &zero));
    CHECK_OK(cm_rt_fill_8_async(rt, zero, 42, 100, 0));
    CHECK_OK(cm_rt_copy_peer_async(rt, one, 1, zero, 0, 100, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_FILLED(cm_runtime_host_alias(rt, one, 100), 42, 100);
    CHECK_CODE(cm_rt_copy_peer_async(rt, one, 0, zero, 1, 100, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_copy_peer_async(rt, one, 2, zero, 0, 100, 0),
               CM_CUDA_INVALID_DEVICE);
    CHECK_OK(cm_rt_peer_can_access(rt, 0, 1, &can));
    CHECK_EQ(can, 1);
    CHECK_OK(cm_rt_peer_can_access(rt, 1, 1, &can));
    CHECK_EQ(can, 0);
    CHECK_CODE(cm_rt_peer_can_access(rt, 0, 2, &can), CM_CUDA_INVALID_DEVICE);
    CHECK_OK(cm_rt_device_free(rt, zero));
    CHECK_OK(cm_rt_device_free(rt, one));
    close_emulated(rt);
}

/* Device 1 may use memory of device 0 only once peer access is enabled, and device 2
 * still may not. */
static void
test_peers_use_what_was_allocated_once_it_is_enabled(void)
{
    cm_runtime *rt = open_emulated(13000, 3, MIB);
    cm_address zero;
    int access;
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(cm_rt_device_alloc(rt, 100, &zero));
    CHECK_OK(cm_rt_pointer_access(rt, zero + 99, &access));
    CHECK_EQ(access, CM_ACCESS_READ_WRITE);
    CHECK_CODE(cm_rt_pointer_access(rt, 64, &access), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_peer_enable(rt, 0), CM_CUDA_INVALID_DEVICE);
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_rt_pointer_access(rt, zero, &access));
    CHECK_EQ(access, 0);
    CHECK_CODE(cm_rt_fill_8_async(rt, zero, 1, 100, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_peer_enable(rt, 0));
    CHECK_CODE(cm_rt_peer_enable(rt, 0), CM_CUDA_PEER_ENABLED);
    CHECK_OK(cm_rt_pointer_access(rt, zero, &access));
    CHECK_EQ(access, CM_ACCESS_READ_WRITE);
    CHECK_OK(cm_rt_fill_8_async(rt, zero, 1, 100, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_OK(cm_rt_device_set(rt, 2));
    CHECK_OK(cm_rt_pointer_access(rt, zero, &access));
    CHECK_EQ(access, 0);
    CHECK_OK(cm_rt_device_set(rt, 0));
    CHECK_OK(cm_rt_device_free(rt, zero));
    close_emulated(rt);
}

/* Fills of 1, 2 and 4 bytes must write their value in the order of the machine's
 * bytes. */
static void
test_fill_writes_its_pattern(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address device;
    CHECK_OK(cm_rt_device_alloc(rt, 64, &device));
    CHECK_OK(cm_rt_fill_8_async(rt, device, 0x11, 64, 0));
    CHECK_OK(cm_rt_fill_16_async(rt, device + 8, 0x3322, 4, 0));
    CHECK_OK(cm_rt_fill_32_async(rt, device + 32, 0x77665544, 2, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    unsigned char want[64];
    memset(want, 0x11, 64);
    for (int i = 0; i < 4; i++) {
        memcpy(want + 8 + 2 * i, "\x22\x33", 2);
    }
    memcpy(want + 32, "\x44\x55\x66\x77\x44\x55\x66\x77", 8);
    CHECK_BYTES_EQ(cm_runtime_host_alias(rt, device, 64), want, 64);
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
}

/* Memory is freed while a fill of it is queued. The fill and every later call for the
 * device must fail with code 700, until a reset makes the device usable again. */
static void
test_freed_while_queued_is_an_illegal_address(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_address device, other;
    uint64_t stream;
    CHECK_OK(cm_rt_device_alloc(rt, 100, &device));
    CHECK_OK(cm_rt_stream_create(rt, CM_STREAM_NON_BLOCKING, 0, &stream));
    CHECK_OK(cm_emulated_gate_close(rt, stream));
    CHECK_OK(cm_rt_fill_8_async(rt, device, 1, 100, stream));
    CHECK_OK(cm_rt_device_free(rt, device));
    /* The fresh memory must not get that address. */
    CHECK_OK(cm_rt_device_alloc(rt, 100, &other));
    CHECK_NE(other, device);
    CHECK_OK(cm_emulated_gate_open(rt, stream));
    CHECK_CODE(cm_rt_stream_synchronize(rt, stream), 700);
    CHECK_CODE(cm_rt_device_alloc(rt, 1, &device), 700); /* the error sticks */
    CHECK_CODE(cm_rt_device_synchronize(rt), 700);
    CHECK_OK(cm_rt_device_reset(rt));
    CHECK_OK(cm_rt_device_alloc(rt, 1, &device));
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
}

typedef struct opener {
    cm_runtime *rt;
    uint64_t stream;
} opener;

/* The body of a thread that opens the gate once everybody else waits. */
static void *
open_gate_soon(void *argument)
{
    opener *o = argument;
    let_others_run(); /* until the main thread waits in its call */
    MUST(cm_emulated_gate_open(o->rt, o->stream));
    return NULL;
}

/* Two copies of a registered page are queued behind a gate. Unregistering that page
 * must wait for them, as the driver does, and unregistering another page must not. */
static void
test_unregistering_waits_for_queued_copies(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    unsigned char *host = pages(2 * page);
    cm_address device;
    opener o = {.rt = rt};
    cm_thread thread;
    CHECK_OK(cm_rt_device_alloc(rt, page, &device));
    CHECK_OK(cm_rt_stream_create(rt, CM_STREAM_NON_BLOCKING, 0, &o.stream));
    CHECK_OK(cm_rt_host_register(rt, host, page, 0));
    CHECK_OK(cm_rt_host_register(rt, host + page, page, 0));
    CHECK_OK(cm_emulated_gate_close(rt, o.stream));
    memset(host, 7, page);
    CHECK_OK(cm_rt_copy_async(rt, device, of(host), page, o.stream));
    CHECK_OK(cm_rt_copy_2d_async(rt, of(host), 8, device + 64, 8, 4, 8, o.stream));
    CHECK_OK(cm_rt_host_unregister(rt, host + page)); /* no copy uses this page */
    CHECK_OK(cm_thread_start(&thread, open_gate_soon, &o));
    CHECK_OK(cm_rt_host_unregister(rt, host));
    CHECK_EQ(((const unsigned char *)cm_runtime_host_alias(rt, device, 1))[0], 7);
    CHECK_OK(cm_rt_stream_synchronize(rt, o.stream));
    cm_thread_join(thread);
    CHECK_CODE(cm_rt_host_unregister(rt, host), CM_CUDA_NOT_REGISTERED);
    CHECK_OK(cm_rt_stream_destroy(rt, o.stream));
    CHECK_OK(cm_rt_device_free(rt, device));
    close_emulated(rt);
    (void)munmap(host, 2 * page);
}

/* A reset must wait for a queued copy of registered memory, and must then end the
 * registration. */
static void
test_reset_ends_registrations_with_their_copies(void)
{
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    size_t page = page_nbytes();
    cm_address device;
    opener o = {.rt = rt};
    cm_thread thread;
    CHECK_OK(cm_rt_device_alloc(rt, page, &device));
    CHECK_OK(cm_rt_stream_create(rt, CM_STREAM_NON_BLOCKING, 0, &o.stream));
    unsigned char *host = pages(page);
    CHECK_OK(cm_rt_host_register(rt, host, page, 0));
    CHECK_OK(cm_emulated_gate_close(rt, o.stream));
    CHECK_OK(cm_rt_copy_async(rt, device, of(host), page, o.stream));
    CHECK_OK(cm_thread_start(&thread, open_gate_soon, &o));
    /* This waits for the copy, and ends the registration too. */
    CHECK_OK(cm_rt_device_reset(rt));
    cm_thread_join(thread);
    CHECK_CODE(cm_rt_host_unregister(rt, host), CM_CUDA_NOT_REGISTERED);
    close_emulated(rt);
    (void)munmap(host, page);
}

/* clang-format off */
MAIN(RUN(test_copy_over_an_edge_is_refused)
     RUN(test_copy_moves_between_all_kinds)
     RUN(test_copy_2d_leaves_the_gaps)
     RUN(test_copy_peer_checks_its_devices)
     RUN(test_peers_use_what_was_allocated_once_it_is_enabled)
     RUN(test_fill_writes_its_pattern)
     RUN(test_freed_while_queued_is_an_illegal_address)
     RUN(test_unregistering_waits_for_queued_copies)
     RUN(test_reset_ends_registrations_with_their_copies))
/* clang-format on */
