/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated/pages.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked_math.h"

enum {
    POISON_FRESH = 0xA5, /* nobody may rely on fresh memory being zero */
    ALIGNMENT = 256,
    POISON_WRITE_NBYTES = 64 << 10,
};

#define POISON_WHOLE_NBYTES (UINT64_C(8) << 20)
#define POISON_ENDS_NBYTES (UINT64_C(1) << 20)
#define SPARE_NBYTES (UINT64_C(64) << 20)

size_t
cm_emulated_page_nbytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Large memory only at its ends: touching all of it would cost its size in real memory.
 */
static void
poison(unsigned char *start, uint64_t nbytes)
{
    if (nbytes <= POISON_WHOLE_NBYTES) {
        memset(start, POISON_FRESH, nbytes);
        return;
    }
    memset(start, POISON_FRESH, POISON_ENDS_NBYTES);
    memset(start + nbytes - POISON_ENDS_NBYTES, POISON_FRESH, POISON_ENDS_NBYTES);
}

bool
cm_emulated_pages_map(uint64_t nbytes, bool usable, cm_emulated_pages *out)
{
    uint64_t page = cm_emulated_page_nbytes();
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
    /* Against the upper guard page, so that running over the end crashes at once. */
    out->start = out->base + page + inside - aligned;
    if (usable) {
        if (mprotect(out->base + page, inside, PROT_READ | PROT_WRITE) != 0) {
            (void)munmap(base, whole);
            return false;
        }
        poison(out->start, nbytes);
    }
    return true;
}

bool
cm_emulated_pages_share(const cm_emulated_pages *pages)
{
    uint64_t page = cm_emulated_page_nbytes();
    uint64_t nbytes = pages->nbytes - 2 * page;
    void *inside = mmap(pages->base + page, nbytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (inside == MAP_FAILED) {
        return false;
    }
    poison(pages->start, (uint64_t)(pages->base + page + nbytes - pages->start));
    return true;
}

void
cm_emulated_pages_leave_out(void *start, uint64_t nbytes)
{
    (void)madvise(start, nbytes, MADV_DONTFORK);
}

void
cm_emulated_pages_kill(const cm_emulated_pages *pages)
{
    if (pages->base != NULL) {
        (void)mmap(pages->base, pages->nbytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
}

void
cm_emulated_pages_unmap(const cm_emulated_pages *pages)
{
    if (pages->base != NULL) {
        (void)munmap(pages->base, pages->nbytes);
    }
}

bool
cm_emulated_pages_are_mapped(uint64_t start, uint64_t end, bool writable)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL) {
        return true; /* no way to know: believe the caller */
    }
    char *queue = NULL;
    size_t capacity = 0;
    uint64_t reached = start;
    while (reached < end && getline(&queue, &capacity, maps) > 0) {
        uint64_t low, high;
        char access[8];
        if (sscanf(queue, "%" SCNx64 "-%" SCNx64 " %7s", &low, &high, access) != 3
            || high <= reached) {
            continue;
        }
        if (low > reached || access[0] != 'r' || (writable && access[1] != 'w')) {
            break;
        }
        reached = high;
    }
    free(queue);
    (void)fclose(maps);
    return reached >= end;
}

/* ---- bytes apart from addresses -------------------------------------------------- */

static bool
try_reuse(cm_emulated_store *store, uint64_t nbytes, uint64_t *offset)
{
    for (uint32_t i = 0; i < store->spare_count; i++) {
        if (store->spares[i].nbytes == nbytes) {
            *offset = store->spares[i].offset;
            store->spares[i] = store->spares[--store->spare_count];
            store->spare_nbytes -= nbytes;
            return true;
        }
    }
    return false;
}

bool
cm_emulated_store_grow(cm_emulated_store *store, uint64_t nbytes, uint64_t *offset)
{
    uint64_t end;
    if (try_reuse(store, nbytes, offset)) {
        return true;
    }
    if (!cm_add_u64(store->end, nbytes, &end) || end > INT64_MAX) {
        return false;
    }
    if (store->fd < 0) {
        store->fd = memfd_create("cumem-emulated", MFD_CLOEXEC);
    }
    if (store->fd < 0 || ftruncate(store->fd, (off_t)end) != 0) {
        return false;
    }
    *offset = store->end;
    store->end = end;
    return true;
}

/* Written, not mapped and set: a fault for every page would cost ten times as much. */
static bool
write_poison(const cm_emulated_store *store, uint64_t offset, uint64_t nbytes)
{
    unsigned char *bytes = malloc(POISON_WRITE_NBYTES);
    if (bytes == NULL) {
        return false;
    }
    memset(bytes, POISON_FRESH, POISON_WRITE_NBYTES);
    ssize_t written = 1;
    for (uint64_t done = 0; done < nbytes && written > 0;) {
        uint64_t left = nbytes - done;
        size_t some = left < POISON_WRITE_NBYTES ? (size_t)left : POISON_WRITE_NBYTES;
        written = pwrite(store->fd, bytes, some, (off_t)(offset + done));
        done += written > 0 ? (uint64_t)written : 0;
    }
    free(bytes);
    return written > 0;
}

bool
cm_emulated_store_poison(const cm_emulated_store *store, uint64_t offset,
                         uint64_t nbytes)
{
    if (nbytes <= POISON_WHOLE_NBYTES) {
        return write_poison(store, offset, nbytes);
    }
    return write_poison(store, offset, POISON_ENDS_NBYTES)
           && write_poison(store, offset + nbytes - POISON_ENDS_NBYTES,
                           POISON_ENDS_NBYTES);
}

void
cm_emulated_store_drop(cm_emulated_store *store, uint64_t offset, uint64_t nbytes)
{
    if (store->spare_count < CM_EMULATED_SPARES
        && nbytes <= SPARE_NBYTES - store->spare_nbytes) {
        store->spares[store->spare_count++] = (cm_emulated_spare){offset, nbytes};
        store->spare_nbytes += nbytes;
        return;
    }
    (void)fallocate(store->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    (off_t)offset, (off_t)nbytes);
}

void
cm_emulated_store_close(cm_emulated_store *store)
{
    if (store->fd >= 0) {
        (void)close(store->fd);
        store->fd = -1;
    }
}

bool
cm_emulated_store_map(const cm_emulated_store *store, uint64_t offset, uint64_t nbytes,
                      unsigned char *at)
{
    if (mmap(at, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, store->fd, (off_t)offset)
        == MAP_FAILED) {
        return false;
    }
    cm_emulated_pages_leave_out(at, nbytes); /* a child would share them */
    return true;
}

bool
cm_emulated_store_show(unsigned char *at, uint64_t nbytes)
{
    return mprotect(at, nbytes, PROT_READ | PROT_WRITE) == 0;
}

void
cm_emulated_store_unmap(unsigned char *at, uint64_t nbytes)
{
    (void)mmap(at, nbytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
