/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges that show in a profiler's timeline what the calling thread is doing. There is
 * one tool for the process: once attached it stays. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_nvtx_tool {
    int (*push)(void *domain, const void *attributes);
    int (*pop)(void *domain);
    void *domain;
} cm_nvtx_tool;

extern _Atomic(const cm_nvtx_tool *) cm_nvtx_tool_now; /* NULL: nobody listens */

/* Load the library `path` as a tool and listen to it. Returns false with a text in
 * `reason` if it cannot be loaded, lacks the entry point of a tool, or refuses. A
 * library that could be loaded is asked once: later calls return true and do nothing.
 * Blocks for as long as the tool starts, so the GIL is not to be held. */
bool cm_nvtx_attach(const char *path, char *reason, size_t capacity);

const cm_nvtx_tool *cm_nvtx_push(const char *what, uint64_t nbytes);
void cm_nvtx_pop(const cm_nvtx_tool *const *tool);

/* Somebody listens: a call that would have to begin a range only to say so may look. */
#define CM_NVTX_IS_ON() (atomic_load(&cm_nvtx_tool_now) != NULL)

/* Show a range from here to the end of the block, such as "copy 64 MiB"; without a size
 * where `nbytes` is 0. */
#define CM_NVTX(what, nbytes)                                                          \
    __attribute__((cleanup(cm_nvtx_pop))) const cm_nvtx_tool *const range_ =           \
        atomic_load(&cm_nvtx_tool_now) ? cm_nvtx_push(what, nbytes) : NULL
