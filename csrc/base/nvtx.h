/* SPDX-License-Identifier: Apache-2.0 */
/* Marks ranges of time, which show in the timeline of a profiler what the calling
 * thread was doing. At most one tool in the process listens to them, and it stays once
 * it is attached. */
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

extern _Atomic(const cm_nvtx_tool *) cm_nvtx_tool_now; /* NULL if nobody listens */

/* Load the library `path` as the tool to which ranges are reported. Returns false, with
 * a text in `reason`, if the library cannot be loaded, lacks the entry point of a tool,
 * or refuses. In each of these cases the library is unloaded, and a later call tries
 * again. If a tool is already attached, or another thread is attaching one, the call
 * does nothing and returns true. Blocks while the tool starts, so the caller must not
 * hold the GIL. */
bool cm_nvtx_attach(const char *path, char *reason, size_t capacity);

/* Begin a range, as CM_NVTX() says. A tool must be attached. Returns the tool for
 * cm_nvtx_pop(), which ends the range. If the pointer to the tool is NULL,
 * cm_nvtx_pop() does nothing. */
const cm_nvtx_tool *cm_nvtx_push(const char *what, uint64_t nbytes);
void cm_nvtx_pop(const cm_nvtx_tool *const *tool);

/* True if somebody listens. A call that needs some work just to begin a range can ask
 * this first. */
#define CM_NVTX_IS_ON() (atomic_load(&cm_nvtx_tool_now) != NULL)

/* Show a range from here to the end of the enclosing block, such as "copy 64 MiB". If
 * `nbytes` is 0, the text names no size. */
#define CM_NVTX(what, nbytes)                                                          \
    __attribute__((cleanup(cm_nvtx_pop))) const cm_nvtx_tool *const range_ =           \
        atomic_load(&cm_nvtx_tool_now) ? cm_nvtx_push(what, nbytes) : NULL
