/* SPDX-License-Identifier: Apache-2.0 */
/* Reads /proc/self/pagemap. */
#include "base/page_table.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/machine.h"

/* The file has a number of 64 bits for each page. The highest bit says whether the
 * page is in memory. */
#define IS_PRESENT (UINT64_C(1) << 63)
enum { ENTRIES_READ_AT_ONCE = 1024 };

/* Read a part of the file completely. Returns false if that fails. */
static bool
read_entries(int file, uint64_t first, uint64_t *entries, uint64_t count)
{
    char *target = (char *)entries;
    uint64_t wanted = count * sizeof(*entries);
    uint64_t place = first * sizeof(*entries);
    uint64_t done = 0;
    while (done < wanted) {
        ssize_t got =
            pread(file, target + done, (size_t)(wanted - done), (off_t)(place + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return false;
        }
        done += (uint64_t)got;
    }
    return true;
}

/* Add to `*present` how many of `count` pages, from the page `first` on, are in
 * memory. */
static bool
count_run(int file, uint64_t first, uint64_t count, uint64_t *present)
{
    uint64_t entries[ENTRIES_READ_AT_ONCE];
    while (count > 0) {
        uint64_t some = count < ENTRIES_READ_AT_ONCE ? count : ENTRIES_READ_AT_ONCE;
        if (!read_entries(file, first, entries, some)) {
            return false;
        }
        for (uint64_t i = 0; i < some; i++) {
            *present += (entries[i] & IS_PRESENT) != 0;
        }
        first += some;
        count -= some;
    }
    return true;
}

/* Count in runs that are spread evenly from the first page to the last, because reading
 * the entries of all pages would take too long. */
static bool
count_samples(int file, uint64_t first, uint64_t count, uint64_t *present)
{
    uint64_t runs = CM_PAGES_LOOKED_AT / CM_PAGES_IN_A_RUN;
    uint64_t last = count - CM_PAGES_IN_A_RUN;
    for (uint64_t i = 0; i < runs; i++) {
        uint64_t begin = first + i * last / (runs - 1);
        if (!count_run(file, begin, CM_PAGES_IN_A_RUN, present)) {
            return false;
        }
    }
    return true;
}

bool
cm_page_table_count(uint64_t address, uint64_t nbytes, uint64_t *out, bool *sampled)
{
    *out = 0;
    *sampled = false;
    uint64_t page = cm_page_nbytes();
    uint64_t first = address / page;
    uint64_t count = nbytes == 0 ? 0 : (address + nbytes - 1) / page + 1 - first;
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return false;
    }
    uint64_t present = 0;
    bool has_many = count > CM_PAGES_LOOKED_AT;
    bool known = has_many ? count_samples(file, first, count, &present)
                          : count_run(file, first, count, &present);
    (void)close(file);
    if (!known) {
        return false;
    }
    uint64_t there = present * page;
    if (has_many) {
        there = present * count / CM_PAGES_LOOKED_AT * page;
    }
    *out = there < nbytes ? there : nbytes;
    *sampled = has_many;
    return true;
}
