/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the model of pools that random tests compare with. pool_model.h explains it. */
#include "pool_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void
model_fail(pool_model *model, const char *what, uint64_t a, uint64_t b)
{
    if (model->wrong[0] == '\0') {
        (void)snprintf(model->wrong, sizeof(model->wrong), "%s: %llu against %llu",
                       what, (unsigned long long)a, (unsigned long long)b);
    }
}

uint32_t
model_line(const pool_model *model, const cm_stream *stream)
{
    return stream == NULL ? ORACLE_LINES
                          : oracle_find(model->oracle, stream->handle, stream->device);
}

/* -- blocks ----------------------------------------------------------------------------- */

static void
raise_to(uint64_t *peak, uint64_t value)
{
    *peak = value > *peak ? value : *peak;
}

void
model_reset_peaks(model_pool *of)
{
    of->peak_live_nbytes = of->live_nbytes;
    of->peak_requested_nbytes = of->requested_nbytes;
    of->peak_waste_nbytes = of->live_nbytes - of->requested_nbytes;
}

void
model_reset_window(model_pool *of)
{
    of->window_live_nbytes = of->live_nbytes;
    of->window_requested_nbytes = of->requested_nbytes;
    of->window_waste_nbytes = of->live_nbytes - of->requested_nbytes;
}

/* Check that no other live block has any of these bytes. */
static void
check_alone_locked(pool_model *model, uint32_t place, uint64_t begin, uint64_t nbytes)
{
    for (uint32_t i = 0; i < model->block_count; i++) {
        const model_block *other = &model->blocks[i];
        if (i != place && other->block != NULL && other->begin < begin + nbytes
            && begin < other->begin + other->block->nbytes) {
            model_fail(model, "two live blocks overlap", begin, other->begin);
        }
    }
}

void
model_take(pool_model *model, model_pool *of, uint32_t place, cm_block *block,
           uint64_t nbytes, const cm_stream *stream)
{
    bool is_device = of->config.kind == CM_KIND_DEVICE;
    uint64_t begin =
        block->host != NULL ? (uint64_t)(uintptr_t)block->host : block->address;
    uint32_t line = is_device ? model_line(model, stream) : ORACLE_LINES;
    bool is_behind = oracle_ask(model->oracle, line, begin, block->nbytes);
    cm_mutex_lock(&model->lock);
    check_alone_locked(model, place, begin, block->nbytes);
    if (block->nbytes < nbytes || (block->host == NULL) != is_device
        || block->address == 0) {
        model_fail(model, "a block is not what was asked for", block->nbytes, nbytes);
    }
    model->blocks[place] = (model_block){.block = block,
                                         .of = of,
                                         .begin = begin,
                                         .nbytes = nbytes,
                                         .behind = is_behind ? stream : NULL};
    of->alloc_count++;
    of->live_count++;
    of->live_nbytes += block->nbytes;
    of->requested_nbytes += nbytes;
    raise_to(&of->peak_live_nbytes, of->live_nbytes);
    raise_to(&of->peak_requested_nbytes, of->requested_nbytes);
    raise_to(&of->peak_waste_nbytes, of->live_nbytes - of->requested_nbytes);
    raise_to(&of->window_live_nbytes, of->live_nbytes);
    raise_to(&of->window_requested_nbytes, of->requested_nbytes);
    raise_to(&of->window_waste_nbytes, of->live_nbytes - of->requested_nbytes);
    cm_mutex_unlock(&model->lock);
}

model_block
model_give(pool_model *model, uint32_t place)
{
    cm_mutex_lock(&model->lock);
    model_block gone = model->blocks[place];
    model_pool *of = gone.of;
    of->free_count++;
    of->live_count--;
    of->live_nbytes -= gone.block->nbytes;
    of->requested_nbytes -= gone.nbytes;
    model->blocks[place].block = NULL;
    cm_mutex_unlock(&model->lock);
    return gone;
}

/* -- comparing -------------------------------------------------------------------------- */

/* Check each counter that the model knows, and what must hold between the others. */
static void
compare_sums(pool_model *model, const model_pool *of, const cm_pool_counters *c)
{
    const struct {
        const char *what;
        uint64_t reported, sum;
    } rows[] = {
        {"live_nbytes", c->live_nbytes, of->live_nbytes},
        {"live_count", c->live_count, of->live_count},
        {"requested_nbytes", c->requested_nbytes, of->requested_nbytes},
        {"allocation_count", c->allocation_count, of->alloc_count},
        {"free_count", c->free_count, of->free_count},
        {"hits and misses", c->hit_count + c->miss_count, of->alloc_count},
        {"out_of_memory_count", c->out_of_memory_count, of->refused_count},
        {"peak_live_nbytes", c->peak_live_nbytes, of->peak_live_nbytes},
        {"peak_requested_nbytes", c->peak_requested_nbytes, of->peak_requested_nbytes},
        {"peak_waste_nbytes", c->peak_waste_nbytes, of->peak_waste_nbytes},
        {"reserved_nbytes", c->reserved_nbytes,
         c->live_nbytes + c->in_flight_nbytes + c->cached_nbytes},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].reported != rows[i].sum) {
            model_fail(model, rows[i].what, rows[i].reported, rows[i].sum);
        }
    }
    if (c->largest_free_nbytes > c->cached_nbytes
        || c->peak_reserved_nbytes < c->reserved_nbytes
        || c->peak_in_flight_nbytes < c->in_flight_nbytes
        || c->peak_cached_nbytes < c->cached_nbytes
        || c->peak_cached_nbytes > c->peak_reserved_nbytes
        || (c->in_flight_count == 0) != (c->in_flight_nbytes == 0)
        || c->trim_count < of->trim_count) {
        model_fail(model, "the counters contradict each other", c->trim_count,
                   of->trim_count);
    }
}

/* Check that a budget is within its limit. It may exceed a limit that was lowered, but
 * then it must not have grown since the last comparison, when it was charged with
 * `before_nbytes`. */
static void
check_limit(pool_model *model, cm_budget *budget, uint64_t before_nbytes)
{
    uint64_t used = atomic_load(&budget->used_nbytes);
    uint64_t limit = atomic_load(&budget->limit_nbytes);
    if (used > limit && used > before_nbytes) {
        model_fail(model, "more is held than the limit allows", used, limit);
    }
}

void
model_compare(pool_model *model, model_pool *of)
{
    cm_pool_counters c;
    cm_budget *budget = cm_pool_get_config(of->pool)->budget;
    if (!cm_pool_check(of->pool)) {
        model_fail(model, "cm_pool_check() is false", of->alloc_count, of->free_count);
    }
    cm_pool_read(of->pool, &c);
    compare_sums(model, of, &c);
    if (atomic_load(&budget->used_nbytes) != c.reserved_nbytes) {
        model_fail(model, "the budget is not charged with what is held",
                   atomic_load(&budget->used_nbytes), c.reserved_nbytes);
    }
    check_limit(model, budget, of->reserved_nbytes);
    of->reserved_nbytes = c.reserved_nbytes;
    for (int i = 0; i < MODEL_KINDS; i++) {
        check_limit(model, &model->kinds[i], model->kind_nbytes[i]);
        model->kind_nbytes[i] = atomic_load(&model->kinds[i].used_nbytes);
    }
}

void
model_compare_list(pool_model *model, model_pool *of)
{
    cm_block_row *rows = NULL;
    uint64_t count = 0, live_count = 0, sums[4] = {0};
    uint64_t cached_count = 0, longest = 0;
    if (!cm_is_ok(cm_pool_list(of->pool, &rows, &count))) {
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        sums[rows[i].state] += rows[i].nbytes;
        if (rows[i].state == CM_BLOCK_CACHED) {
            cached_count++;
            raise_to(&longest, rows[i].nbytes);
        }
        for (uint32_t j = 0; j < model->block_count; j++) {
            const model_block *b = &model->blocks[j];
            live_count += rows[i].state == CM_BLOCK_LIVE && b->block != NULL
                          && b->of == of && b->block->address == rows[i].address
                          && b->block->nbytes == rows[i].nbytes
                          && b->nbytes == rows[i].requested_nbytes;
        }
    }
    free(rows);
    cm_pool_counters c;
    cm_pool_read(of->pool, &c);
    if (c.cached_count != cached_count || c.largest_free_nbytes != longest) {
        model_fail(model, "the listing has other free pieces", cached_count,
                   c.cached_count);
    }
    if (live_count != of->live_count || sums[CM_BLOCK_LIVE] != of->live_nbytes) {
        model_fail(model, "the listing shows other blocks", live_count, of->live_count);
    }
    uint64_t held =
        sums[CM_BLOCK_LIVE] + sums[CM_BLOCK_IN_FLIGHT] + sums[CM_BLOCK_CACHED];
    if (held != of->reserved_nbytes) {
        model_fail(model, "the listing does not add up", held, of->reserved_nbytes);
    }
}

void
model_compare_all(pool_model *model)
{
    uint64_t sum = 0, charged = 0;
    for (int i = 0; i < MODEL_POOLS; i++) {
        if (model->pools[i].pool != NULL) {
            cm_pool_counters c;
            cm_pool_read(model->pools[i].pool, &c);
            sum += c.reserved_nbytes;
        }
    }
    for (int i = 0; i < MODEL_KINDS; i++) {
        charged += atomic_load(&model->kinds[i].used_nbytes);
    }
    if (sum != charged) {
        model_fail(model, "the kinds are not charged with what is held", charged, sum);
    }
    if (sum != model->oracle->held_nbytes) {
        model_fail(model, "the runtime has given out other memory than the pools hold",
                   model->oracle->held_nbytes, sum);
    }
}
