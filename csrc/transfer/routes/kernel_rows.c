/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/kernel_rows.h"

#include <stdlib.h>

#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

/* -- rows --------------------------------------------------------------------------- */

cm_kernel_rows *
cm_kernel_rows_create(void)
{
    return calloc(1, sizeof(cm_kernel_rows));
}

void
cm_kernel_rows_destroy(cm_kernel_rows *rows)
{
    if (rows == NULL) {
        return;
    }
    free(rows->layers);
    free(rows->spans);
    free(rows);
}

/* Make room for one more item in an owned array.
 * Fails: CM_ENOMEM. */
static cm_status
make_room(void **items, size_t item_nbytes, uint64_t count, uint64_t *room)
{
    enum { FIRST_ROOM = 16 };
    if (count < *room) {
        return cm_ok();
    }
    uint64_t more = *room == 0 ? FIRST_ROOM : *room * 2;
    if (more > SIZE_MAX / item_nbytes) {
        return cm_fail(CM_ENOMEM, UINT64_MAX);
    }
    void *grown = realloc(*items, (size_t)more * item_nbytes);
    CM_TRY(cm_allocated(grown != NULL, more * item_nbytes));
    *items = grown;
    *room = more;
    return cm_ok();
}

cm_status
cm_kernel_rows_add_layer(cm_kernel_rows *rows, const cm_rows_layer *layer)
{
    void *layers = rows->layers;
    cm_status status =
        make_room(&layers, sizeof(*layer), rows->layer_count, &rows->layer_room);
    rows->layers = layers;
    CM_TRY(status);
    rows->layers[rows->layer_count++] = *layer;
    return cm_ok();
}

cm_status
cm_kernel_rows_add_span(cm_kernel_rows *rows, const char *begin, uint64_t nbytes)
{
    void *spans = rows->spans;
    cm_status status =
        make_room(&spans, sizeof(*rows->spans), rows->span_count, &rows->span_room);
    rows->spans = spans;
    CM_TRY(status);
    rows->spans[rows->span_count++] = (cm_locked_span){begin, nbytes};
    return cm_ok();
}

/* -- what a kernel reaches ---------------------------------------------------------- */

bool
cm_kernel_reaches(cm_engine *engine, int device, const cm_region *region,
                  const cm_region *beside)
{
    if (cm_region_is_empty(region)) {
        return true;
    }
    if (region->address == 0) {
        return false;
    }
    if (!cm_region_is_on_device(region)) {
        cm_end_facts facts = cm_engine_facts_of(engine, region);
        return facts.locked && facts.whole;
    }
    if (region->device == device) {
        return true;
    }
    if (beside == NULL) {
        return false;
    }
    return cm_peer_access_find(&engine->peers, beside, region, true).pulls;
}

bool
cm_kernel_rows_can_load(cm_engine *engine, int device)
{
    uint64_t function;
    cm_status status =
        cm_kernels_find(&engine->kernels, CM_KERNEL_ROWS, device, &function);
    return !cm_kernels_lack_compiler(status);
}

/* -- the route ---------------------------------------------------------------------- */

/* If there are fewer bytes of numbers than this, they are not copied to the device. The
 * kernel reads so few bytes over the bus faster than a copy of them could begin. */
enum { LEAST_SHEET_NBYTES = 1 << 10 };

/* The host has written numbers to page-locked memory. Copy these numbers to the memory
 * of the device, and let `move` read them there. If the kernel read the numbers over
 * the bus instead, each number would have to wait behind the rows that are on their way
 * over the bus, and a block of the kernel would wait for the number. The numbers stay
 * on the host if the device has no room for them. They also stay there if the copy is
 * captured, because a graph could not free the room again. */
static cm_status
bring_numbers(cm_job *job, cm_rows_move *move)
{
    const cm_kernel_rows *rows = job->rows;
    if (rows->sheet_nbytes < LEAST_SHEET_NBYTES || job->capturing
        || job->engine->device_pools[rows->device] == NULL) {
        return cm_ok();
    }
    cm_status status = cm_job_alloc_block(job, rows->sheet_nbytes, job->stream, false,
                                          &job->row_numbers);
    if (cm_pool_is_short(status)) {
        return cm_ok();
    }
    CM_TRY(status);
    CM_TRY(cm_rt_copy_async(job->engine->rt, job->row_numbers->address, rows->sheet,
                            rows->sheet_nbytes, job->stream->handle));
    for (int side = CM_DST; side <= CM_SRC; side++) {
        cm_address *numbers = &move->numbers[side].address;
        if (*numbers >= rows->sheet && *numbers - rows->sheet < rows->sheet_nbytes) {
            *numbers += job->row_numbers->address - rows->sheet;
        }
    }
    return cm_ok();
}

cm_status
cm_job_copy_rows(cm_job *job)
{
    const cm_kernel_rows *rows = job->rows;
    cm_rows_move move = rows->move;
    uint64_t at_once = rows->in_order ? 1 : rows->layer_count;
    CM_TRY(bring_numbers(job, &move));
    move.has_far_numbers = rows->sheet_nbytes > 0 && job->row_numbers == NULL;
    for (uint64_t i = 0; i < rows->layer_count; i += at_once) {
        CM_TRY(cm_rows_launch(&job->engine->kernels, rows->device, &move,
                              &rows->layers[i], at_once, job->stream->handle));
    }
    if (!job->capturing) {
        job->ticket->wrong_rows = rows->flag;
        job->ticket->wrong_rows_bits = rows->flag_bits;
        job->ticket->wrong_rows_of_all = rows->flag_of_all;
    }
    return cm_ok();
}
