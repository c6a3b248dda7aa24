/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts ranges of a file into chunks, each of which is moved as one (job.h). A long
 * range becomes several chunks. Short ranges that come one after the other in the
 * request share a chunk if the memory of all of them is on the same device, or on the
 * host. */
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
                             .device = region->device,
                             .is_file = region->is_file};
    range->region = cm_region_is_c_contiguous(region) ? NULL : region;
    return (uint64_t)INT64_MAX - range->nbytes < offset ? cm_fail(CM_EOVERFLOW, offset)
                                                        : cm_ok();
}

/* Find where a piece may begin in a chunk whose bytes are used up to `at`. `offset` is
 * where the piece begins in the file. The place and `offset` must be equally far from
 * the beginning of a page, for the reason that `at` of cm_file_piece gives. */
static uint64_t
place_of(uint64_t at, uint64_t offset)
{
    uint64_t mask = CM_FILE_PAGE_NBYTES - 1;
    return at + ((offset - at) & mask);
}

/* Move the cursor of a file to its next range that has bytes and is to be cut now.
 * Ranges of device memory are cut while `at_host` of the job is not set, and ranges of
 * host memory once it is set. Returns false if no such range is left. */
static bool
find_in(const cm_file_job *file, cm_file_state *state)
{
    for (; state->cursor.range < state->end_range; state->cursor.range++) {
        const cm_file_range *range = &file->request->ranges[state->cursor.range];
        bool at_host = cm_file_range_device(range) < 0;
        if (range->nbytes > 0 && at_host == file->at_host) {
            return true;
        }
    }
    return false;
}

/* All ranges of device memory come before the ranges of host memory. Only chunks of
 * device memory need page-locked memory in their slots. So once the first chunk of host
 * memory is cut, the ring needs no more page-locked memory. */
bool
cm_file_find_next(cm_file_job *file)
{
    uint32_t count = file->request->file_count;
    for (;;) {
        for (uint32_t i = 0; i < count; i++) {
            uint32_t index = (file->turn + i) % count;
            if (find_in(file, &file->files[index])) {
                file->turn = index;
                return true;
            }
        }
        if (file->at_host) {
            return false;
        }
        file->at_host = true;
        for (uint32_t i = 0; i < count; i++) {
            file->files[i].cursor.range = file->files[i].first_range;
        }
    }
}

/* Return how many bytes a chunk may have at most. Its memory is on `device`, or on the
 * host if `device` is -1. Chunks of host memory in one run may be long, since they are
 * moved in place and need no page-locked memory. But if they are written to the file
 * they are shorter. A chunk that is written is a single part, and the call looks for
 * Ctrl-C only between parts. */
static uint64_t
limit_of(const cm_file_job *file, int device, bool is_strided)
{
    if (device >= 0 || is_strided) {
        return file->job->tuning.file_chunk_nbytes;
    }
    return file->request->writes ? CM_FILE_WRITE_NBYTES : CM_FILE_SPAN_NBYTES;
}

/* -- past the page cache or not ----------------------------------------------------- */

/* Bytes that are in the page cache are read through the cache, and so is every short
 * read. A long read of bytes that are not in the cache goes past the cache if the file
 * system allows that. Otherwise the read is announced to the kernel. */
enum { DIRECT_LEAST_RUN = 256 << 10, PROBE_NBYTES = 64 << 10 };

/* Set is_direct and is_cold of a chunk. The chunk begins at `offset` of the file, and
 * `nbytes` bytes of its range are left from there on. */
static void
choose_direct(cm_file_job *file, cm_file_chunk *chunk, uint64_t offset, uint64_t nbytes)
{
    const cm_file_request *request = file->request;
    cm_file_state *state = &file->files[file->turn];
    bool pays = request->direct == CM_FILE_DIRECT_ALWAYS;
    chunk->is_cold = false;
    if (!request->writes && !pays) {
        /* The middle of the chunk is probed and not its beginning, since the kernel may
         * have read the beginning ahead when it read the chunk before. */
        uint64_t length = cm_least(nbytes, limit_of(file, chunk->device, false));
        uint64_t probe = cm_least(length, PROBE_NBYTES);
        chunk->is_cold =
            !cm_file_is_cached(file, file->turn, offset + (length - probe) / 2, probe);
        pays = chunk->is_cold && request->direct == CM_FILE_DIRECT_AUTO
               && file->nbytes >= file->job->tuning.direct_nbytes
               && nbytes >= DIRECT_LEAST_RUN;
    }
    if (pays && state->direct_fd == CM_FILE_NOT_TRIED) {
        state->direct_fd = cm_file_open_direct(file, file->turn);
    }
    chunk->is_direct =
        pays && state->direct_fd >= 0 && !atomic_load(&state->direct_refused);
}

/* -- chunks ------------------------------------------------------------------------------- */

/* Begin to cut a range. The layout of the range describes a copy from the memory to the
 * file, in which the file is a region of the same shape in C order. If the memory is a
 * single run, it is cut where pages of the file end. */
static cm_status
begin_range(cm_file_job *file, const cm_file_range *range)
{
    cm_file_cursor *cursor = &file->files[file->turn].cursor;
    cm_layout *layout = &cursor->layout;
    *layout = (cm_layout){.run_nbytes = range->nbytes};
    if (range->region != NULL) {
        cm_region packed = *range->region;
        CM_TRY(cm_region_set_c_strides(&packed));
        CM_TRY(cm_layout_init(&packed, range->region, layout));
    }
    for (int axis = 0; axis < layout->ndim; axis++) {
        if (!file->request->writes && layout->axes[axis].stride[CM_SRC] == 0) {
            return cm_fail(CM_EINVALID, cursor->range);
        }
    }
    cm_cut_init(&cursor->cut, layout,
                limit_of(file, cm_file_range_device(range), layout->ndim > 0));
    cm_cut_align(&cursor->cut, (const void *)(uintptr_t)range->offset,
                 CM_FILE_PAGE_NBYTES);
    cursor->has_begun = true;
    return cm_ok();
}

/* Swap the two sides of a layout. */
static void
swap_sides(cm_layout *layout)
{
    for (int i = -1; i < layout->ndim; i++) {
        int64_t *sides = i < 0 ? layout->offset : layout->axes[i].stride;
        int64_t dst = sides[CM_DST];
        sides[CM_DST] = sides[CM_SRC];
        sides[CM_SRC] = dst;
    }
}

static void
take_piece(cm_file_job *file, const cm_file_range *range, cm_file_chunk *chunk)
{
    cm_file_cursor *cursor = &file->files[file->turn].cursor;
    cm_layout *layout = &chunk->layout;
    cm_file_piece *piece = &chunk->pieces[chunk->piece_count++];
    (void)cm_cut_next(&cursor->cut, layout);
    *piece = (cm_file_piece){.nbytes = cm_layout_nbytes(layout),
                             .offset = range->offset + (uint64_t)layout->offset[CM_DST],
                             .range_index = cursor->range};
    piece->at = place_of(chunk->nbytes, piece->offset);
    chunk->nbytes = piece->at + piece->nbytes;
    cm_layout_pack(layout, CM_DST);
    chunk->is_strided = layout->ndim > 0;
    int64_t at = chunk->is_strided ? 0 : layout->offset[CM_SRC];
    if (chunk->device < 0) {
        piece->host = (char *)range->host + at;
    }
    else {
        piece->address = range->address + (uint64_t)at;
    }
    if (!file->request->writes) {
        swap_sides(layout);
    }
    if (cursor->cut.done) {
        cursor->has_begun = false;
        cursor->range++;
    }
}

/* Return the next range of the same file if the chunk has room for all of this range,
 * too, and may take it. Otherwise return NULL. */
static const cm_file_range *
find_neighbour(cm_file_job *file, const cm_file_chunk *chunk)
{
    cm_file_state *state = &file->files[file->turn];
    if (chunk->is_strided || chunk->is_direct
        || chunk->piece_count == CM_FILE_PIECE_COUNT || state->cursor.has_begun
        || !find_in(file, state)) {
        return NULL;
    }
    const cm_file_range *range = &file->request->ranges[state->cursor.range];
    uint64_t limit = limit_of(file, chunk->device, false);
    uint64_t at = place_of(chunk->nbytes, range->offset);
    bool fits = range->region == NULL && cm_file_range_device(range) == chunk->device
                && at < limit && range->nbytes <= limit - at;
    return fits ? range : NULL;
}

cm_status
cm_file_cut_next(cm_file_job *file, cm_file_chunk *chunk)
{
    cm_file_cursor *cursor = &file->files[file->turn].cursor;
    const cm_file_range *range = &file->request->ranges[cursor->range];
    if (!cursor->has_begun) {
        CM_TRY(begin_range(file, range));
    }
    chunk->device = cm_file_range_device(range);
    chunk->piece_count = 0;
    chunk->nbytes = 0;
    choose_direct(file, chunk, range->offset + cursor->cut.done_nbytes,
                  cursor->cut.left_nbytes);
    take_piece(file, range, chunk);
    const cm_file_piece *first = &chunk->pieces[0];
    chunk->bounces =
        chunk->is_direct && chunk->device < 0 && !chunk->is_strided
        && ((uintptr_t)first->host - first->offset) % CM_FILE_PAGE_NBYTES != 0;
    while ((range = find_neighbour(file, chunk)) != NULL) {
        CM_TRY(begin_range(file, range));
        take_piece(file, range, chunk);
    }
    file->turn = (file->turn + 1) % file->request->file_count;
    return cm_ok();
}
