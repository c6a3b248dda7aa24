/* SPDX-License-Identifier: Apache-2.0 */
/* Where the pages of managed memory are, and where they were asked to be. */
#include "runtime/emulated_ranges.h"

typedef struct page_run {
    cm_emulated_range *range;
    size_t first;
    size_t last; /* inclusive */
} page_run;

/* The pages under [address, address + nbytes), which must be inside one managed range.
 */
static bool
find_run_locked(cm_emulated_memory *memory, cm_address address, uint64_t nbytes,
                page_run *out)
{
    cm_emulated_span *span = cm_emulated_ranges_find_locked(memory, address);
    if (nbytes == 0 || span == NULL || span->range->kind != CM_EMULATED_MANAGED
        || nbytes > span->end - address) {
        return false;
    }
    uint64_t offset = address - (uint64_t)(uintptr_t)span->range->alias.base;
    uint64_t page = cm_emulated_page_nbytes();
    *out = (page_run){span->range, offset / page, (offset + nbytes - 1) / page};
    return true;
}

static int32_t
set_pages(cm_emulated_memory *memory, cm_address address, uint64_t nbytes, int location,
          bool wish)
{
    page_run run;
    cm_mutex_lock(&memory->lock);
    bool good = find_run_locked(memory, address, nbytes, &run);
    if (good) {
        signed char *pages = wish ? run.range->wished : run.range->resident;
        for (size_t i = run.first; i <= run.last; i++) {
            pages[i] = (signed char)location;
        }
    }
    cm_mutex_unlock(&memory->lock);
    return good ? 0 : CM_CUDA_INVALID_VALUE;
}

int32_t
cm_emulated_memory_prefetch(cm_emulated_memory *memory, cm_address address,
                            uint64_t nbytes, int location)
{
    return set_pages(memory, address, nbytes, location, true);
}

int32_t
cm_emulated_memory_migrate(cm_emulated_memory *memory, cm_address address,
                           uint64_t nbytes, int location)
{
    return set_pages(memory, address, nbytes, location, false);
}

int32_t
cm_emulated_memory_prefetched(cm_emulated_memory *memory, cm_address address,
                              uint64_t nbytes, int *location)
{
    page_run run;
    cm_mutex_lock(&memory->lock);
    bool good = find_run_locked(memory, address, nbytes, &run);
    if (good) {
        *location = run.range->wished[run.first];
        for (size_t i = run.first; i <= run.last; i++) {
            if (run.range->wished[i] != *location) {
                *location = CM_NO_LOCATION;
            }
        }
    }
    cm_mutex_unlock(&memory->lock);
    return good ? 0 : CM_CUDA_INVALID_VALUE;
}

int32_t
cm_emulated_memory_host_pages(cm_emulated_memory *memory, cm_address address,
                              uint64_t nbytes, uint64_t *out)
{
    page_run run;
    cm_mutex_lock(&memory->lock);
    bool good = find_run_locked(memory, address, nbytes, &run);
    if (good) {
        *out = 0;
        for (size_t i = run.first; i <= run.last; i++) {
            *out += run.range->resident[i] == CM_HOST_LOCATION;
        }
    }
    cm_mutex_unlock(&memory->lock);
    return good ? 0 : CM_CUDA_INVALID_VALUE;
}
