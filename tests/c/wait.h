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

enum { THREADS_MAX = 256 };

/* For each other thread, how often it had begun to wait when others_have_waited() first
 * looked at it. */
typedef struct threads_at_first {
    long thread[THREADS_MAX];
    long waits[THREADS_MAX];
    int count;
} threads_at_first;

/* Read a file of the kernel about a thread of this process. Returns whether the thread
 * still exists. */
CM_UNUSED static bool
read_about_thread(long thread, const char *what, char *text, size_t size)
{
    char path[64];
    (void)snprintf(path, sizeof(path), "/proc/self/task/%ld/%s", thread, what);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return false;
    }
    text[fread(text, 1, size - 1, file)] = '\0';
    (void)fclose(file);
    return true;
}

/* Return how often the thread has begun to wait since it was first looked at. */
CM_UNUSED static long
waits_since_first(threads_at_first *first, long thread)
{
    static const char label[] = "\nvoluntary_ctxt_switches:";
    char text[4096] = "";
    (void)read_about_thread(thread, "status", text, sizeof(text));
    const char *line = strstr(text, label);
    long waits = line != NULL ? atol(line + sizeof(label) - 1) : 0;
    int i = 0;
    while (i < first->count && first->thread[i] != thread) {
        i++;
    }
    if (i == THREADS_MAX) {
        return 0;
    }
    if (i == first->count) {
        first->thread[i] = thread;
        first->waits[i] = waits;
        first->count++;
    }
    return waits - first->waits[i];
}

/* Look at the threads of this process except the caller. Returns whether each of them
 * waits now, or has begun to wait since it was first looked at. */
CM_UNUSED static bool
others_have_waited(threads_at_first *first)
{
    DIR *tasks = opendir("/proc/self/task");
    bool all = tasks != NULL;
    long self = syscall(SYS_gettid);
    struct dirent *entry;
    while (tasks != NULL && (entry = readdir(tasks)) != NULL) {
        char text[256] = "";
        long thread = atol(entry->d_name);
        if (entry->d_name[0] == '.' || thread == self
            || !read_about_thread(thread, "stat", text, sizeof(text))) {
            continue;
        }
        const char *state = strrchr(text, ')');
        bool runs = state != NULL && state[1] != '\0' && state[2] == 'R';
        if (waits_since_first(first, thread) == 0 && runs) {
            all = false;
        }
    }
    if (tasks != NULL) {
        (void)closedir(tasks);
    }
    return all;
}

/* Wait until the other threads have done everything that they can do for now. This is
 * taken to be so when each of them has waited in each of many rounds. A thread that
 * asks again and again whether something has ended naps in between, so it passes, even
 * on a machine so busy that it is ready to run whenever it is looked at. */
CM_UNUSED static void
let_others_run(void)
{
    enum { ROUNDS = 25 };
    uint64_t begun_ns = cm_now_ns();
    for (int i = 0; i < ROUNDS; i++) {
        threads_at_first first = {.count = 0};
        do {
            wait_nap(begun_ns, "a moment in which every other thread has waited");
        } while (!others_have_waited(&first));
    }
}
