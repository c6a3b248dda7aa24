/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of the driver for the pages of managed memory. A call is for the span of a
 * buffer: the bytes from its lowest element to the end of its highest, with whatever
 * lies between them; the driver rounds that to whole pages. The GIL is held; the calls
 * of the driver are made without it. */
#pragma once

#include "python/buffer/buffer_object.h"

typedef enum cm_page_work {
    CM_PAGES_PREFETCH,
    CM_PAGES_DISCARD,
    CM_PAGES_ADVISE,
} cm_page_work;

typedef struct cm_page_call {
    cm_page_work work;
    int location;      /* for a prefetch or an advice */
    int advice;        /* one of CM_ADVISE_…, for an advice */
    cm_stream *stream; /* on loan; an advice has none */
    /* On loan, or NULL. The memory remembers this stream in place of `stream`, since
     * the caller makes it come after `stream` before the memory may be freed. */
    cm_stream *follower;
    /* The call is not for the one span of the buffer, but for the spans of those of its
     * parts that have nothing of others between their elements. */
    bool by_rows;
} cm_page_call;

/* Make the call for all of the buffers, which are kept open meanwhile: free() of
 * another thread has to fail, since the pages could belong to the pool's next owner
 * then, whose bytes a discard would take. A discard leaves out pages that lie only
 * partly in the buffer, and comes after all work on the buffer. Nothing is done for
 * buffers without bytes. Returns 0, or -1 with ValueError where a buffer is closed, CudaError
 * (some
 * pages may be moving by then), or MemoryError. */
int cm_pages_submit(cm_state *state, const cm_page_call *call,
                    cm_buffer *const *buffers, Py_ssize_t buffer_count);

/* The address and the size of the span. Returns 0, or -1 with ValueError where the
 * buffer is closed. */
int cm_pages_find_span(const cm_buffer *self, cm_address *address, uint64_t *nbytes);

/* Ask the driver about the bytes of the span from `begin` to `end`: `count` numbers for
 * one of CM_RANGE_…. Without bytes nobody is asked, and `out` stays as it is. Returns
 * 0, or -1 with ValueError or CudaError. */
int cm_pages_ask(const cm_buffer *self, uint64_t begin, uint64_t end, int attribute,
                 int *out, int count);
