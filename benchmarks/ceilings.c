/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the raw figures that cumem's copies are held against. The program calls
 * cudaMemcpyAsync from and to pinned memory, cudaMemcpy from and to ordinary memory,
 * and copies in both directions at once on two streams. It prints one JSON line for
 * each case, with the median of n runs, and verifies every case with fresh random
 * bytes.
 *
 *   cc -O2 -std=c17 -D_GNU_SOURCE -I$CUDA_HOME/include benchmarks/ceilings.c \
 *      -L$CUDA_HOME/lib64 -lcudart -o ceilings && ./ceilings [repeats] [device]
 */
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEFAULT_REPEATS = 30, MAX_REPEATS = 10000, SIZE_COUNT = 9 };

static const size_t LARGEST = (size_t)256 << 20;

#define CHECK(call) check((call), #call, __LINE__)

static void
check(cudaError_t error, const char *call, int line)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "ceilings.c:%d: %s: %s (%d)\n", line, call,
                cudaGetErrorName(error), (int)error);
        exit(1);
    }
}

/* Everything that the cases share. */
typedef struct bench {
    void *host[2]; /* the case's kind of memory */
    void *device[2];
    unsigned char *expected; /* ordinary memory with random bytes */
    unsigned char *found;
    cudaStream_t streams[2];
    int repeats;
    uint64_t random;
} bench;

typedef struct bench_case {
    const char *what; /* "h2d", "d2h", "both" */
    const char *kind;
    void (*run)(bench *b, size_t nbytes);
    bool in;  /* host[0] to device[0] */
    bool out; /* device[1] to host[1] */
} bench_case;

static uint64_t
now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *
allocate(size_t nbytes)
{
    void *memory = malloc(nbytes);
    if (memory == NULL) {
        fprintf(stderr, "ceilings.c: out of memory\n");
        exit(1);
    }
    memset(memory, 1, nbytes);
    return memory;
}

/* xorshift64*: enough to tell fresh bytes from stale ones. */
static void
fill_random(bench *b, unsigned char *memory, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i += sizeof(uint64_t)) {
        b->random ^= b->random >> 12;
        b->random ^= b->random << 25;
        b->random ^= b->random >> 27;
        uint64_t word = b->random * UINT64_C(0x2545F4914F6CDD1D);
        memcpy(memory + i, &word, sizeof(word));
    }
}

static void
run_pinned_in(bench *b, size_t nbytes)
{
    CHECK(cudaMemcpyAsync(b->device[0], b->host[0], nbytes, cudaMemcpyHostToDevice,
                          b->streams[0]));
    CHECK(cudaStreamSynchronize(b->streams[0]));
}

static void
run_pinned_out(bench *b, size_t nbytes)
{
    CHECK(cudaMemcpyAsync(b->host[1], b->device[1], nbytes, cudaMemcpyDeviceToHost,
                          b->streams[1]));
    CHECK(cudaStreamSynchronize(b->streams[1]));
}

static void
run_pinned_both(bench *b, size_t nbytes)
{
    CHECK(cudaMemcpyAsync(b->device[0], b->host[0], nbytes, cudaMemcpyHostToDevice,
                          b->streams[0]));
    CHECK(cudaMemcpyAsync(b->host[1], b->device[1], nbytes, cudaMemcpyDeviceToHost,
                          b->streams[1]));
    CHECK(cudaStreamSynchronize(b->streams[0]));
    CHECK(cudaStreamSynchronize(b->streams[1]));
}

static void
run_pageable_in(bench *b, size_t nbytes)
{
    /* the call may return before the bytes have arrived: wait as copy() does */
    CHECK(cudaMemcpy(b->device[0], b->host[0], nbytes, cudaMemcpyHostToDevice));
    CHECK(cudaStreamSynchronize(NULL));
}

static void
run_pageable_out(bench *b, size_t nbytes)
{
    CHECK(cudaMemcpy(b->host[1], b->device[1], nbytes, cudaMemcpyDeviceToHost));
}

/* Move fresh random bytes once more and compare. */
static bool
verify(bench *b, const bench_case *one, size_t nbytes)
{
    bool good = true;
    fill_random(b, b->expected, nbytes);
    if (one->in) {
        memcpy(b->host[0], b->expected, nbytes);
    }
    if (one->out) {
        CHECK(cudaMemcpy(b->device[1], b->expected, nbytes, cudaMemcpyHostToDevice));
        memset(b->host[1], 0, nbytes);
        /* A pageable copy may return before the device has it, and the streams of the
         * cases do not wait for the default one. */
        CHECK(cudaDeviceSynchronize());
    }
    one->run(b, nbytes);
    if (one->in) {
        CHECK(cudaMemcpy(b->found, b->device[0], nbytes, cudaMemcpyDeviceToHost));
        good = memcmp(b->found, b->expected, nbytes) == 0;
    }
    if (one->out) {
        good = good && memcmp(b->host[1], b->expected, nbytes) == 0;
    }
    return good;
}

static int
compare_times(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

static bool
measure(bench *b, const bench_case *one, size_t nbytes)
{
    static uint64_t times[MAX_REPEATS];
    for (int i = -2; i < b->repeats; i++) { /* two before the clock counts */
        uint64_t start = now_ns();
        one->run(b, nbytes);
        if (i >= 0) {
            times[i] = now_ns() - start;
        }
    }
    qsort(times, (size_t)b->repeats, sizeof(times[0]), compare_times);
    bool good = verify(b, one, nbytes);
    double seconds = (double)times[b->repeats / 2] / 1e9;
    double moved = (double)nbytes * (one->in && one->out ? 2.0 : 1.0);
    printf("{\"what\": \"%s\", \"kind\": \"%s\", \"nbytes\": %zu, \"seconds\": %.9f, "
           "\"low\": %.9f, \"high\": %.9f, \"gbps\": %.4f, \"repeats\": %d, "
           "\"verified\": %s}\n",
           one->what, one->kind, nbytes, seconds, (double)times[b->repeats / 4] / 1e9,
           (double)times[b->repeats * 3 / 4] / 1e9, moved / seconds / 1e9, b->repeats,
           good ? "true" : "false");
    fflush(stdout);
    return good;
}

static bool
measure_all(bench *b, const bench_case *cases, size_t case_count)
{
    bool good = true;
    for (size_t i = 0; i < case_count; i++) {
        size_t nbytes = 4096;
        for (int step = 0; step < SIZE_COUNT; step++, nbytes *= 4) {
            good = measure(b, &cases[i], nbytes) && good;
        }
    }
    return good;
}

static void
print_machine(int device)
{
    struct cudaDeviceProp properties;
    int driver = 0;
    int runtime = 0;
    CHECK(cudaGetDeviceProperties(&properties, device));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    char started[32];
    time_t now = time(NULL);
    struct tm utc;
    const char *commit = getenv("CUMEM_COMMIT"); /* as for the other benchmarks */
    (void)strftime(started, sizeof(started), "%Y-%m-%dT%H:%M:%S+00:00",
                   gmtime_r(&now, &utc));
    printf("{\"commit\": \"%s\", \"started\": \"%s\", \"machine\": \"%s\", "
           "\"device\": \"%s\", \"driver\": %d, \"runtime\": %d, "
           "\"copy_engines\": %d}\n",
           commit == NULL ? "" : commit, started, properties.name, properties.name,
           driver, runtime, properties.asyncEngineCount);
}

int
main(int argc, char **argv)
{
    static const bench_case pinned[] = {
        {"h2d", "pinned", run_pinned_in, true, false},
        {"d2h", "pinned", run_pinned_out, false, true},
        {"both", "pinned", run_pinned_both, true, true},
    };
    static const bench_case pageable[] = {
        {"h2d", "pageable", run_pageable_in, true, false},
        {"d2h", "pageable", run_pageable_out, false, true},
    };
    bench b = {.repeats = argc > 1 ? atoi(argv[1]) : DEFAULT_REPEATS};
    int device = argc > 2 ? atoi(argv[2]) : 0;
    if (b.repeats < 1 || b.repeats > MAX_REPEATS) {
        fprintf(stderr, "usage: %s [repeats, 1 to %d] [device]\n", argv[0],
                MAX_REPEATS);
        return 2;
    }
    b.random = now_ns() | 1;
    CHECK(cudaSetDevice(device));
    print_machine(device);
    b.expected = allocate(LARGEST);
    b.found = allocate(LARGEST);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamCreateWithFlags(&b.streams[i], cudaStreamNonBlocking));
        CHECK(cudaMalloc(&b.device[i], LARGEST));
        CHECK(cudaHostAlloc(&b.host[i], LARGEST, cudaHostAllocPortable));
        memset(b.host[i], 0, LARGEST);
    }
    bool good = measure_all(&b, pinned, sizeof(pinned) / sizeof(pinned[0]));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaFreeHost(b.host[i]));
        b.host[i] = allocate(LARGEST);
    }
    good = measure_all(&b, pageable, sizeof(pageable) / sizeof(pageable[0])) && good;
    for (int i = 0; i < 2; i++) {
        free(b.host[i]);
        CHECK(cudaFree(b.device[i]));
        CHECK(cudaStreamDestroy(b.streams[i]));
    }
    free(b.expected);
    free(b.found);
    return good ? 0 : 1;
}
