/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a file cut into chunks: a long range becomes several, short ones share one
 * if their memory is of one sort. */
#include "base/checked_math.h"
#include "transfer/file/job.h"

cm_status
cm_file_range_init(cm_file_range *range, uint64_t offset, const cm_region *region)
{
    int64_t count;
    CM_TRY(cm_region_count(region, &count));
    uint64_t itemsize = (uint64_t)region->itemsize;
    if (count > 0 && (uint64_t)INT64_MAX / itemsize < (uint64_t)count) {
        return cm_fail(CM_EOVERFLOW, (uint64_t)count);
    }
    *range = (cm_file_range){.offset = offset,
                             .nbytes = (uint64_t)count * itemsize,
                             .host = region->host,
                             .address = region->address,
                             .kind = region->kind,
                             .device = region->device};
    range->region = cm_region_is_c_contiguous(region) ? NULL : region;
    return (uint64_t)INT64_MAX - range->nbytes < offset ? cm_fail(CM_EOVERFLOW, offset)
                                                        : cm_ok();
}

/* The first place from `at` on that is as far from a page's beginning as `offset`. */
static uint64_t
place_of(uint64_t at, uint64_t offset)
{
    uint64_t mask = CM_FILE_PAGE_NBYTES - 1;
    return at + ((offset - at) & mask);
}

/* Those of devices come first: from the first chunk of the host on no slot needs
 * memory. */
bool
cm_file_find_next(cm_file_job *file)
{
    const cm_file_request *request = file->request;
    cm_file_cursor *cursor = &file->cursor;
    for (;;) {
        for (; cursor->range < request->range_count; cursor->range++) {
            const cm_file_range *range = &request->ranges[cursor->range];
            bool at_host = cm_file_range_device(range) < 0;
            if (range->nbytes > 0 && at_host == cursor->at_host) {
                return true;
            }
        }
        if (cursor->at_host) {
            return false;
        }
        cursor->at_host = true;
        cursor->range = 0;
    }
}

/* -- past the page cache or not ----------------------------------------------------- */

/* What is in the page cache is read through it, and so is what is short; much that is
 * not goes past it, where the file system lets us, and else is announced. */
enum {
    DIRECT_LEAST_RUN = 256 << 10,
    STRETCH_NBYTES = 64 << 20, /* asked about at a time, */
    PROBE_COUNT = 4,           /* by so many probes of */
    PROBE_NBYTES = 64 << 10,
    SHORT_COUNT = 16, /* so many short ranges are taken to be like the first of them */
};

static bool
probe_stretch(const cm_file_job *file, uint64_t offset, uint64_t nbytes)
{
    int cached = 0;
    nbytes = nbytes < STRETCH_NBYTES ? nbytes : STRETCH_NBYTES;
    if (nbytes <= (uint64_t)PROBE_COUNT * PROBE_NBYTES) {
        return cm_file_is_cached(file, offset, nbytes);
    }
    uint64_t step = nbytes / PROBE_COUNT;
    for (uint64_t i = 0; i < PROBE_COUNT; i++) {
        cached += cm_file_is_cached(file, offset + i * step, PROBE_NBYTES);
    }
    return cached * 2 >= PROBE_COUNT;
}

/* Asked once for each stretch of a long range, and for some of the short ones. */
static bool
is_cold(cm_file_job *file, uint64_t offset, uint64_t nbytes)
{
    cm_file_cursor *cursor = &file->cursor;
    bool is_short = nbytes < DIRECT_LEAST_RUN && cursor->done == 0;
    uint64_t stretch = is_short ? cursor->range / SHORT_COUNT : offset / STRETCH_NBYTES;
    stretch = 1 + (stretch << 1 | is_short);
    if (cursor->stretch != stretch) {
        cursor->stretch = stretch;
        cursor->is_cold = !probe_stretch(file, offset, nbytes);
    }
    return cursor->is_cold;
}

static bool
can_go_direct(cm_file_job *file)
{
    if (!file->was_opened) {
        file->was_opened = true;
        file->direct_fd = cm_file_open_direct(file);
    }
    return file->direct_fd >= 0 && !atomic_load(&file->direct_refused);
}

/* Set is_direct and is_cold of a chunk that begins with `nbytes` at `offset` of the
 * file. Looks at that, or opens it again, now and then. */
static void
look_at_cache(cm_file_job *file, cm_file_chunk *chunk, uint64_t offset, uint64_t nbytes)
{
    const cm_file_request *request = file->request;
    bool pays = request->direct == CM_FILE_DIRECT_ALWAYS;
    chunk->is_cold = false;
    if (!request->writes && !pays) {
        chunk->is_cold = is_cold(file, offset, nbytes);
        pays = chunk->is_cold && request->direct == CM_FILE_DIRECT_AUTO
               && file->nbytes >= file->job->tuning.direct_nbytes
               && nbytes >= DIRECT_LEAST_RUN;
    }
    chunk->is_direct = pays && can_go_direct(file);
}

/* -- ranges in many runs ------------------------------------------------------------------ */

/* With the file as its target, a region of the same shape in C order. */
static cm_status
begin_region(cm_file_job *file, const cm_file_range *range)
{
    cm_file_cursor *cursor = &file->cursor;
    cm_region packed = *range->region;
    CM_TRY(cm_region_set_c_strides(&packed));
    CM_TRY(cm_layout_init(&packed, range->region, &cursor->layout));
    for (int axis = 0; axis < cursor->layout.ndim; axis++) {
        if (!file->request->writes && cursor->layout.axes[axis].stride[CM_SRC] == 0) {
            return cm_fail(CM_EINVALID, cursor->range);
        }
    }
    cm_cut_init(&cursor->cut, &cursor->layout, file->job->tuning.file_chunk_nbytes);
    cursor->in_region = true;
    return cm_ok();
}

/* From the memory to the packed bytes, or the other way round. */
static void
turn_layout(cm_layout *layout)
{
    for (int i = -1; i < layout->ndim; i++) {
        int64_t *sides = i < 0 ? layout->offset : layout->axes[i].stride;
        int64_t dst = sides[CM_DST];
        sides[CM_DST] = sides[CM_SRC];
        sides[CM_SRC] = dst;
    }
}

static cm_status
cut_region(cm_file_job *file, const cm_file_range *range, cm_file_chunk *chunk)
{
    cm_file_cursor *cursor = &file->cursor;
    if (!cursor->in_region) {
        CM_TRY(begin_region(file, range));
    }
    cm_layout *layout = &chunk->layout;
    (void)cm_cut_next(&cursor->cut, layout);
    cm_file_piece *piece = &chunk->pieces[0];
    *piece = (cm_file_piece){.nbytes = cm_layout_nbytes(layout),
                             .offset = range->offset + (uint64_t)layout->offset[CM_DST],
                             .range_index = cursor->range};
    piece->at = place_of(0, piece->offset);
    cm_layout_pack(layout, CM_DST);
    chunk->device = cm_file_range_device(range);
    chunk->is_strided = layout->ndim > 0;
    chunk->host = range->region->host;
    chunk->address = range->region->address;
    if (!chunk->is_strided && chunk->device < 0) {
        piece->host = chunk->host + layout->offset[CM_SRC];
    }
    else if (!chunk->is_strided) {
        piece->address = chunk->address + (uint64_t)layout->offset[CM_SRC];
    }
    if (!file->request->writes) {
        turn_layout(layout);
    }
    look_at_cache(file, chunk, piece->offset, piece->nbytes);
    chunk->is_direct = chunk->is_direct && piece->host == NULL;
    chunk->piece_count = 1;
    chunk->nbytes = piece->at + piece->nbytes;
    if (cursor->cut.done) {
        cursor->in_region = false;
        cursor->range++;
    }
    return cm_ok();
}

/* -- ranges in one run -------------------------------------------------------------------- */

/* Its end is at the end of a page of the file, unless it is the range's. */
static bool
add_piece(cm_file_job *file, const cm_file_range *range, cm_file_chunk *chunk,
          uint64_t limit)
{
    cm_file_cursor *cursor = &file->cursor;
    uint64_t offset = range->offset + cursor->done;
    uint64_t at = place_of(chunk->nbytes, offset);
    if (at >= limit) {
        return false;
    }
    uint64_t nbytes = cm_least(range->nbytes - cursor->done, limit - at);
    bool on_device = chunk->device >= 0;
    chunk->pieces[chunk->piece_count++] = (cm_file_piece){
        .at = at,
        .nbytes = nbytes,
        .offset = offset,
        .host = on_device ? NULL : (char *)range->host + cursor->done,
        .address = on_device ? range->address + cursor->done : 0,
        .range_index = cursor->range,
    };
    chunk->nbytes = at + nbytes;
    cursor->done += nbytes;
    if (cursor->done == range->nbytes) {
        cursor->done = 0;
        cursor->range++;
    }
    return true;
}

static bool
lies_as_file(const cm_file_range *range)
{
    uint64_t distance = (uintptr_t)range->host - range->offset;
    return distance % CM_FILE_PAGE_NBYTES == 0;
}

static void
cut_runs(cm_file_job *file, const cm_file_range *range, cm_file_chunk *chunk)
{
    const cm_file_request *request = file->request;
    uint64_t done = file->cursor.done;
    chunk->device = cm_file_range_device(range);
    look_at_cache(file, chunk, range->offset + done, range->nbytes - done);
    chunk->bounces = chunk->is_direct && chunk->device < 0 && !lies_as_file(range);
    uint64_t limit =
        chunk->device < 0 ? CM_FILE_SPAN_NBYTES : file->job->tuning.file_chunk_nbytes;
    uint32_t most = chunk->is_direct ? 1 : CM_FILE_PIECE_COUNT;
    while (chunk->piece_count < most && cm_file_find_next(file)) {
        range = &request->ranges[file->cursor.range];
        if (range->region != NULL || cm_file_range_device(range) != chunk->device
            || !add_piece(file, range, chunk, limit)) {
            break;
        }
    }
}

cm_status
cm_file_cut_next(cm_file_job *file, cm_file_chunk *chunk)
{
    chunk->is_strided = false;
    chunk->bounces = false;
    chunk->piece_count = 0;
    chunk->nbytes = 0;
    const cm_file_range *range = &file->request->ranges[file->cursor.range];
    if (range->region != NULL) {
        return cut_region(file, range, chunk);
    }
    cut_runs(file, range, chunk);
    return cm_ok();
}
