/* SPDX-License-Identifier: Apache-2.0 */
/* Makes calls of the driver for the pages of managed memory. A call is for the span of
 * a buffer, which is all bytes from its lowest element to the end of its highest. The
 * driver rounds the span to whole pages. These functions need the GIL, and give it up
 * while they call the driver. */
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
    /* The stream that the memory remembers in place of `stream`, on loan, or NULL. The
     * caller makes it come after `stream` before the memory may be freed. */
    cm_stream *follower;
    /* The buffer is cut into parts that have no bytes of others between their elements,
     * and the call is for the spans of these parts instead of the one span of the
     * buffer. */
    bool by_rows;
} cm_page_call;

/* Make the call for all of the buffers. They are kept open meanwhile, so that free() in
 * another thread fails: otherwise the pool could give the pages to somebody else, and a
 * discard would take that owner's bytes. A discard leaves out pages that lie only
 * partly in the buffer, and comes after all work on the buffer. Nothing is done for
 * buffers without bytes. Returns 0, or -1 with an exception: ValueError if a buffer is
 * closed, CudaError (some pages may be moving by then), or MemoryError. */
int cm_pages_submit(cm_state *state, const cm_page_call *call,
                    cm_buffer *const *buffers, Py_ssize_t buffer_count);

/* Find the address and the size of the span. Returns 0, or -1 with ValueError if the
 * buffer is closed. */
int cm_pages_find_span(const cm_buffer *self, cm_address *address, uint64_t *nbytes);

/* Ask the driver for an attribute (CM_RANGE_…) of the bytes of the span from `begin` to
 * `end`, and write the `count` numbers of the answer to `out`. If there are no bytes,
 * the driver is not asked, and `out` stays as it is. Returns 0, or -1 with ValueError
 * or CudaError. */
int cm_pages_ask(const cm_buffer *self, uint64_t begin, uint64_t end, int attribute,
                 int *out, int count);
