/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts ranges of a file into chunks. A long range becomes several chunks. Short ones
 * share a chunk if their memory is of one device, or of the host. */
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

/* Find the first place from `at` on that is as far from the beginning of a page as
 * `offset` is. */
static uint64_t
place_of(uint64_t at, uint64_t offset)
{
    uint64_t mask = CM_FILE_PAGE_NBYTES - 1;
    return at + ((offset - at) & mask);
}

/* Go on to the next range of a file that has bytes and whose memory is on a device or,
 * if the job's `at_host` is set, is the host's. Returns false if there is none left. */
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

/* Ranges of devices come first, so that no slot needs memory once the first chunk of
 * the host is cut. */
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

/* Return the most bytes of a chunk whose memory is that of `device`, or the host's if
 * that is -1. Host memory that is moved in place needs no page-locked memory, and so
 * its chunks may be long. A chunk that is written is shorter, since it is a single
 * part, and the call looks for Ctrl-C between parts. */
static uint64_t
limit_of(const cm_file_job *file, int device, bool is_strided)
{
    if (device >= 0 || is_strided) {
        return file->job->tuning.file_chunk_nbytes;
    }
    return file->request->writes ? CM_FILE_WRITE_NBYTES : CM_FILE_SPAN_NBYTES;
}

/* -- past the page cache or not ----------------------------------------------------- */

/* Bytes that are in the page cache are read through it, and so are short reads. Long
 * reads of other bytes go past the cache if the file system allows it, and are
 * announced to the kernel otherwise. */
enum { DIRECT_LEAST_RUN = 256 << 10, PROBE_NBYTES = 64 << 10 };

/* Set is_direct and is_cold of a chunk that begins at `offset`, where `nbytes` are
 * left. */
static void
choose_direct(cm_file_job *file, cm_file_chunk *chunk, uint64_t offset, uint64_t nbytes)
{
    const cm_file_request *request = file->request;
    cm_file_state *state = &file->files[file->turn];
    bool pays = request->direct == CM_FILE_DIRECT_ALWAYS;
    chunk->is_cold = false;
    if (!request->writes && !pays) {
        /* The middle of the chunk is probed, since the kernel may have read the
         * beginning ahead with the chunk before. */
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

/* Begin a range. In its layout the file is the target, and counts as a region of the
 * same shape in C order. A single run is cut where pages of the file end. */
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

/* Return the next range of the same file if all of it fits into the chunk as well, or
 * NULL. */
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
