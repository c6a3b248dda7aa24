/* SPDX-License-Identifier: Apache-2.0 */
/* What Python adds to the recorder: stacks, each kept once as code objects and places
 * in them, and the tag of the context. The rest of a record is cumem/recording's. GIL.
 */
#pragma once

#include "base/recorder.h"
#include "python/python.h"

/* Lend a thread that let the GIL go, or may have it, its own stack and tag, for which
 * it takes the GIL where it `may`. To be put back: cm_recorder_lend_origin(). */
cm_event_origin cm_recording_lend_caller(bool may);

/* Which instruction of which frame this thread is at, and how much garbage there may
 * be: what happens at one moment happens in one call from Python code. */
typedef struct cm_moment {
    const void *frame; /* of the innermost Python code, not held; NULL: not known */
    int place;         /* in its bytes */
    long young;        /* containers made since the last collection */
} cm_moment;

/* GIL; keeps the exception, runs no Python code. */
cm_moment cm_moment_now(void);
/* Is it the moment that was `then`? False where a collection has run in between, since
 * that ends objects in the midst of any call. */
bool cm_moment_lasts(const cm_moment *then);

/* tracemalloc's own functions, NULL where this Python has none, and our domain. The
 * first answers 0 where it is tracing and has noted that, in the stack of now. */
enum { CM_TRACE_DOMAIN = 0x63754D };
typedef struct cm_tracemalloc {
    int (*track)(unsigned domain, uintptr_t address, size_t nbytes);
    int (*untrack)(unsigned domain, uintptr_t address);
} cm_tracemalloc;
extern cm_tracemalloc cm_tracing;
void cm_tracing_init(void);

extern PyMethodDef cm_recording_methods[];
