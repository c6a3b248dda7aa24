/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/file_source.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "transfer/host_copy.h"

enum {
    RUN_NBYTES = 4096, /* shorter ones cost more calls than bytes in between */
    MOST_IN_VAIN = 8,  /* bytes read for one that is wanted */
};

struct cm_file_source {
    _Atomic uint32_t refs;
    int fd; /* owned */
    const char *low;
    uint64_t offset;
    const cm_file_calls *calls; /* borrowed */
};

struct cm_file_reader {
    cm_file_source *source; /* held */
    atomic_bool is_failing; /* somebody writes `status`, once */
    atomic_bool failed;     /* `status` is there */
    cm_status status;
};

static _Atomic uint32_t source_count;

cm_file_source *
cm_file_source_create(int fd, const void *low, uint64_t offset,
                      const cm_file_calls *calls)
{
    cm_file_source *source = calloc(1, sizeof(*source));
    if (source == NULL) {
        cm_file_system_calls.close(NULL, fd);
        return NULL;
    }
    atomic_init(&source->refs, 1);
    atomic_fetch_add(&source_count, 1);
    source->fd = fd;
    source->low = low;
    source->offset = offset;
    source->calls = calls == NULL ? &cm_file_system_calls : calls;
    return source;
}

void
cm_file_source_release(cm_file_source *source)
{
    if (source != NULL && atomic_fetch_sub(&source->refs, 1) == 1) {
        cm_file_system_calls.close(NULL, source->fd);
        atomic_fetch_sub(&source_count, 1);
        free(source);
    }
}

uint32_t
cm_file_source_count(void)
{
    return atomic_load(&source_count);
}

cm_file_reader *
cm_file_reader_create(cm_file_source *source)
{
    cm_file_reader *reader = calloc(1, sizeof(*reader));
    if (reader != NULL) {
        atomic_fetch_add(&source->refs, 1);
        reader->source = source;
    }
    return reader;
}

void
cm_file_reader_destroy(cm_file_reader *reader)
{
    if (reader != NULL) {
        cm_file_source_release(reader->source);
        free(reader);
    }
}

cm_status
cm_file_reader_status(const cm_file_reader *reader)
{
    return atomic_load(&reader->failed) ? reader->status : cm_ok();
}

static void
fail(cm_file_reader *reader, cm_status status)
{
    if (!atomic_exchange(&reader->is_failing, true)) {
        reader->status = status;
        atomic_store(&reader->failed, true);
    }
}

/* The file ends at `offset`, or before it by now. One that had a size when it was
 * opened and says none any more has nothing in it. */
static void
fail_at_end(cm_file_reader *reader, uint64_t offset)
{
    const cm_file_calls *calls = reader->source->calls;
    uint64_t size = calls->size(calls->context, reader->source->fd);
    size = size == UINT64_MAX ? 0 : size;
    fail(reader, cm_fail(CM_EENDED, size < offset ? size : offset));
}

/* False: it has failed. */
static bool
read_run(cm_file_reader *reader, char *to, const char *from, uint64_t nbytes)
{
    const cm_file_source *source = reader->source;
    const cm_file_calls *calls = source->calls;
    uint64_t offset = source->offset + (uint64_t)(from - source->low);
    while (nbytes > 0) {
        int64_t count = calls->read(calls->context, source->fd, to, nbytes, offset);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            fail(reader, cm_fail(CM_ESYSTEM, (uint64_t)errno));
            return false;
        }
        if (count == 0) {
            fail_at_end(reader, offset);
            return false;
        }
        to += count;
        offset += (uint64_t)count;
        nbytes -= (uint64_t)count;
    }
    return true;
}

/* Run by run. */
static void
read_runs(cm_file_reader *reader, const cm_layout *part, char *to, const char *from)
{
    int64_t index[CM_MAX_NDIM] = {0};
    int axis = 0;
    while (axis >= 0 && read_run(reader, to, from, part->run_nbytes)) {
        for (axis = part->ndim - 1; axis >= 0; axis--) {
            to += part->dst_strides[axis];
            from += part->src_strides[axis];
            if (++index[axis] < part->shape[axis]) {
                break;
            }
            to -= part->dst_strides[axis] * part->shape[axis];
            from -= part->src_strides[axis] * part->shape[axis];
            index[axis] = 0;
        }
    }
}

/* All from the first byte to the last at once, from where the elements are gathered.
 * False: too much of it would be in vain. */
static bool
read_span(cm_file_reader *reader, const cm_layout *part, void *dst, const char *src)
{
    int64_t low = part->src_offset;
    int64_t high = part->src_offset + (int64_t)part->run_nbytes;
    for (int axis = 0; axis < part->ndim; axis++) {
        int64_t reach = part->src_strides[axis] * (part->shape[axis] - 1);
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    uint64_t nbytes = (uint64_t)(high - low);
    char *span =
        nbytes / MOST_IN_VAIN > cm_layout_nbytes(part) ? NULL : malloc((size_t)nbytes);
    if (span == NULL) {
        return false;
    }
    if (read_run(reader, span, src + low, nbytes)) {
        cm_layout gathered = *part;
        gathered.src_offset = part->src_offset - low;
        cm_host_copy(&gathered, dst, span);
    }
    free(span);
    return true;
}

void
cm_file_reader_move(const void *context, const cm_layout *part, void *dst,
                    const void *src, bool wide CM_UNUSED)
{
    cm_file_reader *reader = (cm_file_reader *)(uintptr_t)context;
    if (atomic_load(&reader->failed) || part->run_nbytes == 0) {
        return;
    }
    if (part->ndim == 0 || part->run_nbytes >= RUN_NBYTES) {
        read_runs(reader, part, (char *)dst + part->dst_offset,
                  (const char *)src + part->src_offset);
    }
    else if (!read_span(reader, part, dst, src)) {
        cm_status status = cm_host_look(part, NULL, src, 0);
        if (cm_is_ok(status)) {
            cm_host_copy(part, dst, src);
        }
        else {
            fail(reader, status);
        }
    }
}
