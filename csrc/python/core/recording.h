/* SPDX-License-Identifier: Apache-2.0 */
/* This is the part of the recorder that knows Python. It has the tag of the context,
 * and the stacks. Each different stack is kept once, as code objects and places in
 * their code. The rest of a record is made in cumem/recording. All functions need the
 * GIL unless they say otherwise. */
#pragma once

#include "base/recorder.h"
#include "python/python.h"

/* Find the stack and tag of the Python code that this thread runs, and lend them to the
 * thread, so that events which it notes without the GIL have them too. The thread may
 * have the GIL or not. Reading the two takes the GIL, so they are read only if `may` is
 * true. The caller later puts the answer back by cm_recorder_lend_origin(). */
cm_event_origin cm_recording_lend_caller(bool may);

/* A moment consists of the instruction of the frame that this thread is at, and of a
 * measure of how much garbage there can be. Two things that happen at the same moment
 * happen in the same call from Python code. */
typedef struct cm_moment {
    /* The frame of the innermost Python code, not held; NULL if it is not known. */
    const void *frame;
    int place;  /* the instruction's place in the bytes of its code */
    long young; /* containers that were made since the last collection */
} cm_moment;

/* Return the present moment. Needs the GIL, keeps the exception and runs no Python
 * code. */
cm_moment cm_moment_now(void);
/* True if the present moment is still the moment `then`. False if a collection has run
 * in between, since that ends objects in the middle of any call. */
bool cm_moment_lasts(const cm_moment *then);

/* The C functions of tracemalloc, which are NULL if this Python has none, and the
 * domain in which cumem's memory shows. track() returns 0 if tracemalloc is tracing and
 * has noted the memory, with the present stack. */
enum { CM_TRACE_DOMAIN = 0x63754D };
typedef struct cm_tracemalloc {
    int (*track)(unsigned domain, uintptr_t address, size_t nbytes);
    int (*untrack)(unsigned domain, uintptr_t address);
} cm_tracemalloc;
extern cm_tracemalloc cm_tracing;
void cm_tracing_init(void);

/* Let the tool of a profiler see NVTX ranges from now on. The tool is the library that
 * NVTX_INJECTION64_PATH names, which profilers set; without it there are no ranges.
 * Only the first call has an effect. If the tool cannot be used, the user gets a
 * RuntimeWarning. Returns 0, or -1 with an exception. Releases the GIL. */
int cm_attach_profiler(void);

extern PyMethodDef cm_recording_methods[];
