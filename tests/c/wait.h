/* SPDX-License-Identifier: Apache-2.0 */
/* Waits for other threads, for C tests in which no event or lock says how far another
 * thread has come. The deadline only ends a program that hangs; no test measures time
 * with it. */
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/attributes.h"
#include "base/thread.h"
#include "check.h"

enum { WAIT_SECONDS = 120, WAIT_NAP_NS = 200 * 1000 };

/* Sleep for a moment so that other threads can run. A waiting loop calls this whenever
 * its condition does not hold yet. `begun_ns` is the time at which the loop began, and
 * `what` is the text of the condition. After WAIT_SECONDS the whole program ends as
 * failed. */
CM_UNUSED static void
wait_nap(uint64_t begun_ns, const char *what)
{
    struct timespec nap = {.tv_nsec = WAIT_NAP_NS};
    if (cm_now_ns() - begun_ns > WAIT_SECONDS * UINT64_C(1000000000)) {
        fprintf(stderr, "waited in vain for: %s\n", what);
        printf("FAILED: waited in vain for: %s\n", what);
        fflush(stdout);
        _exit(1);
    }
    (void)nanosleep(&nap, NULL);
}

/* Wait until the condition holds. It is evaluated again and again. */
#define WAIT_UNTIL(condition)                                                          \
    do {                                                                               \
        uint64_t wait_begun_ = cm_now_ns();                                            \
        while (!(condition)) {                                                         \
            wait_nap(wait_begun_, #condition);                                         \
        }                                                                              \
    } while (0)

enum { THREADS_MAX = 256, LOOKS = 25 };

/* How often another thread was running, or ready to run, when it was looked at. */
typedef struct thread_looks {
    long thread[THREADS_MAX];
    int count[THREADS_MAX];
    int thread_count;
} thread_looks;

CM_UNUSED static void
note_running_thread(thread_looks *looks, long thread)
{
    int i = 0;
    while (i < looks->thread_count && looks->thread[i] != thread) {
        i++;
    }
    if (i < THREADS_MAX) {
        looks->thread_count += i == looks->thread_count;
        looks->thread[i] = thread;
        looks->count[i]++;
    }
}

/* Look at the threads of this process except the caller, and note those that are not
 * waiting for something at this moment. Returns whether there were any. */
CM_UNUSED static bool
look_at_others(thread_looks *looks)
{
    DIR *tasks = opendir("/proc/self/task");
    bool any = tasks == NULL;
    long self = syscall(SYS_gettid);
    struct dirent *entry;
    while (tasks != NULL && (entry = readdir(tasks)) != NULL) {
        char path[320];
        char text[256] = "";
        if (entry->d_name[0] == '.' || atol(entry->d_name) == self) {
            continue;
        }
        (void)snprintf(path, sizeof(path), "/proc/self/task/%s/stat", entry->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL) {
            continue; /* this thread has ended meanwhile */
        }
        size_t count = fread(text, 1, sizeof(text) - 1, file);
        (void)fclose(file);
        const char *state = count > 0 ? strrchr(text, ')') : NULL;
        if (state != NULL && state[2] == 'R') {
            note_running_thread(looks, atol(entry->d_name));
            any = true;
        }
    }
    if (tasks != NULL) {
        (void)closedir(tasks);
    }
    return any;
}

/* Return how often the busiest of the other threads was running in a series of looks,
 * or LOOKS if any was running in the last few of them. */
CM_UNUSED static int
watch_others(uint64_t begun_ns)
{
    enum { LAST = 5 };
    thread_looks looks = {.thread_count = 0};
    int most = 0;
    for (int i = 0; i < LOOKS; i++) {
        wait_nap(begun_ns, "a moment in which nobody else runs");
        if (look_at_others(&looks) && i >= LOOKS - LAST) {
            return LOOKS;
        }
    }
    for (int i = 0; i < looks.thread_count; i++) {
        most = looks.count[i] > most ? looks.count[i] : most;
    }
    return most;
}

/* Wait until the other threads have done everything that they can do for now. This is
 * taken to be so when each of them was seen waiting nearly always. Some of them ask at
 * times whether something has ended, and on a busy machine many such threads are hardly
 * ever all waiting. */
CM_UNUSED static void
let_others_run(void)
{
    enum { FEW = 3 };
    uint64_t begun_ns = cm_now_ns();
    while (watch_others(begun_ns) > FEW) {
    }
}
