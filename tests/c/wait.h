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

/* True if every thread of this process except the caller is waiting for something at
 * this moment. */
CM_UNUSED static bool
do_others_rest(void)
{
    DIR *tasks = opendir("/proc/self/task");
    bool rest = tasks != NULL;
    long self = syscall(SYS_gettid);
    struct dirent *entry;
    while (rest && (entry = readdir(tasks)) != NULL) {
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
        rest = state == NULL || state[2] != 'R';
    }
    if (tasks != NULL) {
        (void)closedir(tasks);
    }
    return rest;
}

/* Wait until the other threads have done everything that they can do for now. This is
 * taken to be so when all of them were seen waiting several times in a row. */
CM_UNUSED static void
let_others_run(void)
{
    enum { LOOKS = 25 };
    uint64_t begun_ns = cm_now_ns();
    for (int looks = 0; looks < LOOKS; looks++) {
        wait_nap(begun_ns, "a moment in which nobody else runs");
        looks = do_others_rest() ? looks : -1;
    }
}
