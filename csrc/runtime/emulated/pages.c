/* SPDX-License-Identifier: Apache-2.0 */
/* Makes mappings by mmap and mremap, and poisons fresh memory. */
#include "runtime/emulated/pages.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"

enum {
    POISON_FRESH = 0xA5, /* nobody may rely on fresh memory being zero */
    ALIGNMENT = 256,
};

#define POISON_WHOLE_NBYTES (UINT64_C(8) << 20)
#define POISON_ENDS_NBYTES (UINT64_C(1) << 20)

/* Poison fresh memory. Large memory is poisoned only at its ends, since touching all of
 * it would cost its size in real memory. Pages are brought in all at once, because a
 * fault for each takes several times as long. */
static void
poison(unsigned char *start, uint64_t nbytes)
{
    uint64_t part = nbytes <= POISON_WHOLE_NBYTES ? nbytes : POISON_ENDS_NBYTES;
    unsigned char *parts[] = {start, start + nbytes - part};
    for (int i = 0; i < (part == nbytes ? 1 : 2); i++) {
        (void)!cm_is_ok(cm_pages_populate(parts[i], part, true));
        memset(parts[i], POISON_FRESH, part);
    }
}

bool
cm_emulated_pages_map(uint64_t nbytes, int sharing, cm_emulated_pages *out)
{
    uint64_t page = cm_page_nbytes();
    uint64_t inside, whole, aligned;
    if (!cm_round_up_u64(nbytes, ALIGNMENT, &aligned)
        || !cm_round_up_u64(nbytes, page, &inside)
        || !cm_add_u64(inside, 2 * page, &whole)) {
        return false;
    }
    void *base = mmap(NULL, whole, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return false;
    }
    out->base = base;
    out->nbytes = whole;
    /* The inside ends at the upper guard page, so that running over the end crashes at
     * once. */
    out->start = out->base + page + inside - aligned;
    if (sharing == 0) {
        return true;
    }
    if (mmap(out->base + page, inside, PROT_READ | PROT_WRITE,
             sharing | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
        == MAP_FAILED) {
        return false;
    }
    poison(out->start, aligned);
    return true;
}

void
cm_emulated_pages_kill(void *start, uint64_t nbytes)
{
    (void)mmap(start, nbytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

bool
cm_emulated_pages_are_mapped(uint64_t start, uint64_t end, bool writable)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL) {
        return true; /* without /proc nobody can know, so believe the caller */
    }
    uint64_t reached = start;
    uint64_t low, high;
    char access[8];
    while (reached < end
           && fscanf(maps, "%" SCNx64 "-%" SCNx64 " %7s%*[^\n]", &low, &high, access)
                  == 3) {
        if (high > reached) {
            if (low > reached || access[0] != 'r' || (writable && access[1] != 'w')) {
                break;
            }
            reached = high;
        }
    }
    (void)fclose(maps);
    return reached >= end;
}

/* ---- bytes at more than one place ------------------------------------------------ */

unsigned char *
cm_emulated_bytes_new(uint64_t nbytes)
{
    void *bytes = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bytes == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(bytes, nbytes, MADV_DONTFORK); /* a child would share the bytes */
    poison(bytes, nbytes);
    return bytes;
}

bool
cm_emulated_bytes_map(unsigned char *bytes, uint64_t nbytes, unsigned char *at)
{
    /* For shared memory, an old size of 0 asks for a second mapping of it. */
    if (mremap(bytes, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
        return false;
    }
    (void)mprotect(at, nbytes, PROT_NONE);
    (void)madvise(at, nbytes, MADV_DONTFORK);
    return true;
}
