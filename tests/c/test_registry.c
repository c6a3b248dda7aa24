/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of pool/registry, which page-locks ordinary memory in pieces of whole pages and
 * counts the users of each piece. They test pages, shares, gaps and pages that others
 * have locked. Then random changes are compared with a model, and threads and failing
 * calls come last. */
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "open_emulated.h"
#include "pool/registry.h"

enum { PAGE_COUNT = 16 };

static char *
map_pages(uint64_t count)
{
    void *memory = mmap(NULL, count * page_nbytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        exit(2);
    }
    return memory;
}

static cm_registry *
open_registry(cm_runtime *rt)
{
    cm_registry *registry = NULL;
    MUST(cm_registry_create(rt, NULL, &registry));
    return registry;
}

/* Register memory for reading and writing. */
static cm_registration *
lock(cm_registry *registry, void *host, uint64_t nbytes)
{
    cm_registration *registration = NULL;
    MUST(cm_registry_register(registry, 0, host, nbytes, false, &registration));
    return registration;
}

/* True if the runtime takes this address for page-locked memory. */
static bool
is_locked(cm_runtime *rt, const void *host)
{
    cm_pointer_info info;
    MUST(cm_rt_pointer_attributes(rt, (cm_address)(uintptr_t)host, &info));
    return info.kind == CM_KIND_PINNED;
}

/* The pages that the range touches are locked. cm_registry_run_nbytes() must tell how
 * far one copy may go from each place, and only bytes that somebody has asked for count
 * as locked. */
static void
test_registry_unaligned_range_locks_its_pages(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(PAGE_COUNT);
    cm_registration *r = lock(registry, memory + page + 100, page);
    CHECK_EQ(cm_registry_count(registry), 1);
    CHECK(!is_locked(rt, memory + page - 1));
    CHECK(is_locked(rt, memory + page));
    CHECK(is_locked(rt, memory + 3 * page - 1));
    CHECK(!is_locked(rt, memory + 3 * page));
    bool locked = true;
    CHECK_EQ(cm_registry_run_nbytes(registry, memory, 10 * page, &locked), page);
    CHECK(!locked);
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + page + 8, 16, &locked), 16);
    CHECK(!locked); /* nobody has registered the bytes before the range */
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + page, 10 * page, &locked), 100);
    CHECK(!locked);
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + page + 100, 10 * page, &locked),
             page);
    CHECK(locked);
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + 2 * page + 100, page, &locked),
             page - 100);
    CHECK(!locked);
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + 3 * page, 5 * page, &locked),
             5 * page);
    CHECK(!locked);
    CHECK_OK(cm_registration_release(r));
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK(!is_locked(rt, memory + page));
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, PAGE_COUNT * page);
}

/* A request over two pieces must share these and register the gaps. Each piece must
 * stay locked until its last user lets go of it. */
static void
test_registry_overlapping_requests_share_pieces(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(PAGE_COUNT);
    cm_registration *a = lock(registry, memory + 2 * page, 2 * page);
    cm_registration *b = lock(registry, memory + 6 * page, 2 * page);
    cm_registration *c = lock(registry, memory, 10 * page); /* fills the three gaps */
    CHECK_EQ(cm_registry_count(registry), 5);
    /* This lies inside a piece, so it shares that piece. */
    cm_registration *d = lock(registry, memory + 3 * page, 1);
    CHECK_EQ(cm_registry_count(registry), 5);
    bool locked = false;
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + 3 * page, 9 * page, &locked),
             page);
    CHECK(locked);
    CHECK_OK(cm_registration_release(c));
    CHECK_EQ(cm_registry_count(registry), 2);
    CHECK_OK(cm_registration_release(a));
    CHECK_EQ(cm_registry_count(registry), 2); /* d still holds the piece */
    CHECK(is_locked(rt, memory + 2 * page));
    CHECK_OK(cm_registration_release(d));
    CHECK(!is_locked(rt, memory + 2 * page));
    CHECK_OK(cm_registration_release(b));
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, PAGE_COUNT * page);
}

static void
test_registry_wrong_arguments_are_refused(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(1);
    cm_registration *r = NULL;
    CHECK_CODE(cm_registry_register(registry, 0, memory, 0, false, &r), CM_EINVALID);
    CHECK_CODE(cm_registry_register(registry, 0, NULL, 8, false, &r), CM_EINVALID);
    CHECK_CODE(cm_registry_register(registry, 0, memory, UINT64_MAX, false, &r),
               CM_EOVERFLOW);
    CHECK_CODE(cm_registry_register(registry, 9, memory, 8, false, &r),
               CM_CUDA_INVALID_DEVICE);
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, page_nbytes());
}

/* A request for writing cannot share pages that are locked for reading only, but a
 * request for reading can share any. */
static void
test_registry_read_only_pages_are_not_shared_for_writing(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(4);
    CHECK_EQ(mprotect(memory + page, page, PROT_READ), 0);
    cm_registration *a = NULL;
    cm_registration *b = NULL;
    CHECK_OK(cm_registry_register(registry, 0, memory + page, page, true, &a));
    CHECK_OK(cm_registry_register(registry, 0, memory + page, 10, true, &b));
    CHECK_OK(cm_registration_release(b));
    CHECK_CODE(cm_registry_register(registry, 0, memory, 4 * page, false, &b),
               CM_EBUSY);
    /* Whatever that request had locked must be unlocked again. */
    CHECK_EQ(cm_registry_count(registry), 1);
    CHECK_OK(cm_registration_release(a));
    cm_registration *c = lock(registry, memory + 2 * page, page);
    CHECK_OK(cm_registry_register(registry, 0, memory + 2 * page, page, true, &b));
    CHECK_OK(cm_registration_release(c));
    CHECK_OK(cm_registration_release(b));
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, 4 * page);
}

/* Somebody else has locked pages in the middle of a range. A request must lock what is
 * missing around them, and never unlock them. */
static void
test_registry_foreign_pages_are_shared_and_left_alone(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(PAGE_COUNT);
    unsigned flags = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED;
    cm_device_guard guard;
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    CHECK_OK(cm_rt_host_register(rt, memory + 4 * page, 2 * page, flags));
    CHECK_OK(cm_rt_host_register(rt, memory + 9 * page, page, flags));
    cm_registration *whole = lock(registry, memory, 12 * page);
    /* Our pieces are the pages [0,4), [6,9) and [10,12). */
    CHECK_EQ(cm_registry_count(registry), 3);
    for (uint64_t i = 0; i < 12; i++) {
        CHECK(is_locked(rt, memory + i * page));
    }
    bool locked = true;
    CHECK_EQ(cm_registry_run_nbytes(registry, memory, 12 * page, &locked), 4 * page);
    CHECK(locked);
    CHECK_EQ(cm_registry_run_nbytes(registry, memory + 4 * page, 8 * page, &locked),
             2 * page);
    CHECK(!locked);
    cm_registration *inside = lock(registry, memory + 5 * page, 10);
    CHECK_OK(cm_registration_release(whole));
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK_OK(cm_registration_release(inside));
    CHECK(is_locked(rt, memory + 4 * page)); /* this one is not ours to unlock */
    CHECK_OK(cm_rt_host_unregister(rt, memory + 4 * page));
    CHECK_OK(cm_rt_host_unregister(rt, memory + 9 * page));
    cm_device_leave(rt, &guard);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, PAGE_COUNT * page);
}

/* Memory that cudaHostAlloc made can be registered. Nothing has to be locked, and the
 * memory has a device address. */
static void
test_registry_memory_that_is_pinned_already_is_no_error(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    cm_device_guard guard;
    void *pinned = NULL;
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    CHECK_OK(cm_rt_host_alloc(rt, 1 << 16, CM_HOST_ALLOC_PORTABLE, &pinned));
    cm_device_leave(rt, &guard);
    cm_registration *r = lock(registry, pinned, 1 << 16);
    CHECK_EQ(cm_registry_count(registry), 0);
    cm_address address = 0;
    CHECK_OK(cm_registration_device_address(r, &address));
    CHECK_NE(address, 0);
    CHECK_OK(cm_registration_release(r));
    CHECK_OK(cm_rt_host_free(rt, pinned));
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
}

/* A part of a registration has the device address that belongs to its offset. */
static void
test_registry_device_address_of_a_range(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(4);
    cm_registration *a = lock(registry, memory, 4 * page);
    cm_registration *b = lock(registry, memory + page + 24, 100);
    cm_address whole = 0;
    cm_address part = 0;
    CHECK_OK(cm_registration_device_address(a, &whole));
    CHECK_OK(cm_registration_device_address(b, &part));
    CHECK_EQ(part, whole + page + 24);
    CHECK_OK(cm_registration_release(a));
    CHECK_OK(cm_registration_release(b));
    /* If the range lies over two pieces, it either has one address or the call says
     * that it has none. */
    a = lock(registry, memory, page);
    b = lock(registry, memory, 2 * page);
    cm_status status = cm_registration_device_address(b, &whole);
    CHECK(cm_is_ok(status) || status.code == CM_ENOTSUP);
    CHECK_OK(cm_registration_release(a));
    CHECK_OK(cm_registration_release(b));
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, 4 * page);
}

/* The registry is closed before a registration is released. Closing must unlock the
 * registration's pages. */
static void
test_registry_close_unregisters_what_is_left(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(4);
    cm_registration *r = lock(registry, memory, 4 * page_nbytes());
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    CHECK_OK(cm_registration_release(r)); /* only its own memory is left to free */
    munmap(memory, 4 * page_nbytes());
}

/* The driver refuses to unregister a piece. The release must report that, and the piece
 * must be unlocked by the next request or when the registry is closed. */
static void
test_registry_refused_unregister_is_reported_and_tried_again(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(4);
    cm_registration *r = lock(registry, memory, 4 * page_nbytes());
    cm_faults_plan(rt, CM_OP_host_unregister, 1, 999, false);
    CHECK_CODE(cm_registration_release(r), 999);
    CHECK_EQ(cm_registry_count(registry), 1);
    r = lock(registry, memory, page_nbytes()); /* this first unlocks the old piece */
    CHECK_EQ(cm_registry_count(registry), 1);
    CHECK(!is_locked(rt, memory + page_nbytes()));
    cm_faults_plan(rt, CM_OP_host_unregister, 1, 999, false);
    CHECK_CODE(cm_registration_release(r), 999);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, 4 * page_nbytes());
}

/* In a child a request must fail, all memory counts as ordinary, and releasing and
 * closing must do nothing. */
static void
test_registry_forked_child_touches_nothing(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(4);
    cm_registration *r = lock(registry, memory, 100);
    pid_t child = fork();
    if (child == 0) {
        cm_registration *none = NULL;
        bool locked = true;
        int wrong = cm_registry_register(registry, 0, memory, 8, false, &none).code
                    != CM_EFORKED;
        wrong |= cm_registry_run_nbytes(registry, memory, 77, &locked) != 77 || locked;
        wrong |= !cm_is_ok(cm_registration_release(r));
        wrong |= !cm_is_ok(cm_registry_close(registry));
        _exit(wrong);
    }
    int result = -1;
    CHECK_EQ(waitpid(child, &result, 0), child);
    CHECK_EQ(result, 0);
    CHECK_OK(cm_registration_release(r));
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, 4 * page_nbytes());
}

/* -- shares of copies -------------------------------------------------------------- */

/* A copy takes shares of the pieces that its memory touches. Those pieces must stay
 * locked after their registrations were released, until the copy gives its shares
 * back. */
static void
test_registry_shares_keep_pieces_after_their_registration(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(PAGE_COUNT);
    cm_page_shares shares = {.count = 0};
    CHECK_OK(cm_registry_share(registry, memory, 16 * page, false, &shares));
    CHECK_EQ(shares.count, 0); /* nothing is locked yet */
    cm_registration *a = lock(registry, memory + 2 * page, 2 * page);
    cm_registration *b = lock(registry, memory + 5 * page, page);
    cm_registration *c = lock(registry, memory + 9 * page, page);
    CHECK_OK(cm_registry_share(registry, memory, 2 * page, false, &shares));
    CHECK_EQ(shares.count, 0); /* the range ends where the first piece begins */
    CHECK_OK(cm_registry_share(registry, memory + page, 5 * page, false, &shares));
    CHECK_EQ(shares.count, 2); /* the pieces of a and b, with gaps around them */
    CHECK_OK(cm_registry_share(registry, memory + 5 * page, 10, false, &shares));
    CHECK_EQ(shares.count, 2); /* the piece of b is counted once more */
    cm_page_shares other = {.count = 0};
    CHECK_OK(cm_registry_share(registry, memory + 5 * page + 100, 10, false, &other));
    CHECK_EQ(other.count, 1);
    /* This lies in the gap before b. */
    cm_registration *again = lock(registry, memory + 4 * page, page);
    CHECK_OK(cm_registration_release(a));
    CHECK_OK(cm_registration_release(b));
    CHECK_OK(cm_registration_release(c));
    CHECK_EQ(cm_registry_count(registry), 3);
    CHECK(is_locked(rt, memory + 2 * page));
    CHECK(is_locked(rt, memory + 5 * page));
    CHECK(!is_locked(rt, memory + 9 * page));
    cm_registry_unshare(registry, &shares);
    CHECK(!is_locked(rt, memory + 2 * page));
    CHECK(is_locked(rt, memory + 4 * page)); /* a registration holds this one */
    CHECK(is_locked(rt, memory + 5 * page)); /* other shares hold this one */
    cm_registry_unshare(registry, &other);
    CHECK(!is_locked(rt, memory + 5 * page));
    cm_registry_unshare(registry, &other); /* no shares are left */
    CHECK_OK(cm_registration_release(again));
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, PAGE_COUNT * page);
}

/* The registry is closed while a copy has a share. The piece must be unlocked then, and
 * giving the share back afterwards must do no harm. */
static void
test_registry_shares_may_outlive_it(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(4);
    cm_page_shares shares = {.count = 0};
    cm_registration *r = lock(registry, memory, page_nbytes());
    CHECK_OK(cm_registry_share(registry, memory, 1, false, &shares));
    CHECK_OK(cm_registration_release(r));
    CHECK_OK(cm_registry_close(registry));
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.registrations, 0);
    close_emulated(rt);
    cm_registry_unshare(registry, &shares);
    munmap(memory, 4 * page_nbytes());
}

/* A piece that the driver refused to unlock can be shared by a copy, and must be
 * unlocked when that share is given back. */
static void
test_registry_piece_that_was_not_unlocked_may_be_shared(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(4);
    cm_page_shares shares = {.count = 0};
    cm_registration *r = lock(registry, memory, page_nbytes());
    cm_faults_plan(rt, CM_OP_host_unregister, 1, 999, false);
    CHECK_CODE(cm_registration_release(r), 999);
    CHECK_OK(cm_registry_share(registry, memory, 1, false, &shares));
    CHECK_EQ(shares.count, 1);
    cm_registry_unshare(registry, &shares);
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, 4 * page_nbytes());
}

/* -- look-ups against a model that walks all pages -------------------------------------- */

enum { MODEL_PAGES = 64, MODEL_HELD = 24 };

typedef struct model {
    int piece[MODEL_PAGES]; /* the number of each page's piece, or 0 */
    int shares[4096];       /* how many shares each piece has */
    int pieces;             /* how many pieces there ever were */
} model;

/* Note a registration: each gap becomes a piece, and each piece that the range touches
 * gets a share. */
static void
model_register(model *m, uint64_t first, uint64_t count)
{
    for (uint64_t i = first; i < first + count; i++) {
        bool begins = i == first || m->piece[i - 1] != m->piece[i];
        if (m->piece[i] == 0) { /* a gap up to the next piece or the end */
            m->pieces++;
            for (uint64_t k = i; k < first + count && m->piece[k] == 0; k++) {
                m->piece[k] = m->pieces;
            }
            begins = true;
        }
        m->shares[m->piece[i]] += begins;
    }
}

/* Give shares of these pieces back. */
static void
model_release(model *m, const int *pieces, int count)
{
    for (int i = 0; i < count; i++) {
        if (--m->shares[pieces[i]] == 0) {
            for (int k = 0; k < MODEL_PAGES; k++) {
                m->piece[k] = m->piece[k] == pieces[i] ? 0 : m->piece[k];
            }
        }
    }
}

/* List the pieces that these pages touch, and return how many there are. */
static int
model_list(const model *m, uint64_t first, uint64_t count, int *pieces)
{
    int found = 0;
    for (uint64_t i = first; i < first + count; i++) {
        bool is_new = found == 0 || pieces[found - 1] != m->piece[i];
        if (m->piece[i] != 0 && is_new) {
            pieces[found++] = m->piece[i];
        }
    }
    return found;
}

/* Return what cm_registry_run_nbytes() must answer, by a walk over the pages. */
static uint64_t
model_run(const model *m, uint64_t page, uint64_t at, uint64_t nbytes, bool *locked)
{
    uint64_t end = at;
    *locked = m->piece[at / page] != 0;
    while (end - at < nbytes && m->piece[end / page] == m->piece[at / page]) {
        end = (end / page + 1) * page;
    }
    return end - at < nbytes ? end - at : nbytes;
}

/* A registration, or the shares of a copy, with the pieces that the model has for
 * it. */
typedef struct held {
    cm_registration *registration;
    cm_page_shares shares;
    int pieces[MODEL_PAGES];
    int count;
} held;

/* Release what `h` holds. If it holds nothing, make a random registration or take
 * shares for a copy. */
static void
change(cm_registry *registry, char *memory, model *m, held *h, unsigned *seed)
{
    uint64_t page = page_nbytes();
    uint64_t first = (uint64_t)rand_r(seed) % MODEL_PAGES;
    uint64_t count = 1 + (uint64_t)rand_r(seed) % 4;
    count = count > MODEL_PAGES - first ? MODEL_PAGES - first : count;
    char *at = memory + first * page;
    if (h->registration != NULL) {
        CHECK_OK(cm_registration_release(h->registration));
        model_release(m, h->pieces, h->count);
        h->registration = NULL;
        h->count = 0;
    }
    else if (h->count > 0) {
        cm_registry_unshare(registry, &h->shares);
        model_release(m, h->pieces, h->count);
        h->count = 0;
    }
    else if (rand_r(seed) % 2 == 0) {
        h->registration = lock(registry, at, count * page);
        model_register(m, first, count);
        h->count = model_list(m, first, count, h->pieces);
    }
    else {
        CHECK_OK(
            cm_registry_share(registry, at + 1, count * page - 2, false, &h->shares));
        h->count = model_list(m, first, count, h->pieces);
        CHECK_EQ(h->shares.count, (uint32_t)h->count);
        for (int i = 0; i < h->count; i++) {
            m->shares[h->pieces[i]]++;
        }
    }
}

/* Check the number of pieces and the answers for many places. */
static void
compare(cm_registry *registry, const char *memory, const model *m)
{
    uint64_t page = page_nbytes();
    int pieces[MODEL_PAGES];
    int count = model_list(m, 0, MODEL_PAGES, pieces);
    CHECK_EQ(cm_registry_count(registry), (uint64_t)count);
    for (uint64_t at = 0; at < MODEL_PAGES * page; at += page / 2 - 1) {
        uint64_t left = MODEL_PAGES * page - at;
        bool locked, expected;
        uint64_t run = cm_registry_run_nbytes(registry, memory + at, left, &locked);
        CHECK_EQ(run, model_run(m, page, at, left, &expected));
        CHECK_EQ(locked, expected);
    }
}

/* Random registrations and shares come and go. After each step the registry must agree
 * with the model. */
static void
test_registry_finds_what_a_walk_over_all_pages_finds(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    uint64_t page = page_nbytes();
    char *memory = map_pages(MODEL_PAGES);
    static model m;
    static held all[MODEL_HELD];
    unsigned seed = 7;
    for (int step = 0; step < 1500; step++) {
        change(registry, memory, &m, &all[rand_r(&seed) % MODEL_HELD], &seed);
        compare(registry, memory, &m);
    }
    for (int i = 0; i < MODEL_HELD; i++) {
        if (all[i].count > 0) {
            change(registry, memory, &m, &all[i], &seed);
        }
    }
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, MODEL_PAGES * page);
}

/* -- faults ----------------------------------------------------------------------------- */

/* Register ranges that overlap, with a gap and with foreign pages in them, and release
 * them. Returns the first failure. */
static cm_status
run_scenario(cm_runtime *rt, char *memory)
{
    cm_registry *registry = NULL;
    uint64_t page = page_nbytes();
    cm_registration *all[3] = {NULL, NULL, NULL};
    static const uint64_t spans[3][2] = {{2, 2}, {0, 8}, {6, 6}};
    cm_status first = cm_registry_create(rt, NULL, &registry);
    for (int i = 0; i < 3; i++) {
        cm_status status =
            cm_registry_register(registry, 0, memory + spans[i][0] * page + 5,
                                 spans[i][1] * page - 10, false, &all[i]);
        cm_address address = 0;
        if (!cm_is_ok(status)) {
            all[i] = NULL;
        }
        else if (i == 0) {
            status = cm_registration_device_address(all[i], &address);
        }
        first = cm_is_ok(first) ? status : first;
    }
    for (int i = 0; i < 3; i++) {
        if (all[i] != NULL) {
            cm_status status = cm_registration_release(all[i]);
            first = cm_is_ok(first) ? status : first;
        }
    }
    cm_status status = cm_registry_close(registry);
    return cm_is_ok(first) ? status : first;
}

/* Each runtime call of the scenario fails once, with several codes. The failure must be
 * reported, only the foreign pages may stay locked, and the next run must succeed. */
static void
test_registry_any_call_may_fail_and_nothing_stays_locked(void)
{
    static const int32_t codes[] = {999, CM_CUDA_OUT_OF_MEMORY, CM_CUDA_INVALID_VALUE};
    cm_runtime *rt = open_emulated(13000, 2, UINT64_C(1) << 28);
    char *memory = map_pages(PAGE_COUNT);
    uint64_t page = page_nbytes();
    cm_device_guard guard;
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    CHECK_OK(cm_rt_host_register(rt, memory + 9 * page, page, CM_REGISTER_PORTABLE));
    cm_device_leave(rt, &guard);
    for (int c = 0; c < 3; c++) {
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK_OK(run_scenario(rt, memory));
        uint64_t total = cm_faults_count(rt, CM_OP_none);
        CHECK_GT(total, 20);
        for (uint64_t nth = 1; nth <= total; nth++) {
            cm_faults_plan(rt, CM_OP_none, nth, codes[c], false);
            cm_status status = run_scenario(rt, memory);
            cm_op injected = cm_faults_last_injected(rt);
            cm_faults_plan(rt, CM_OP_none, 0, 0, false);
            CHECK(cm_is_ok(status)
                  || (status.code == codes[c] && status.op == (uint16_t)injected));
            cm_emulated_counts counts;
            cm_emulated_read_counts(rt, &counts);
            CHECK_EQ(counts.registrations, 1); /* that of the foreign pages */
            CHECK_OK(run_scenario(rt, memory));
        }
    }
    CHECK_OK(cm_rt_host_unregister(rt, memory + 9 * page));
    close_emulated(rt);
    munmap(memory, PAGE_COUNT * page);
}

/* -- threads ---------------------------------------------------------------------------- */

typedef struct share_job {
    cm_registry *registry;
    cm_runtime *rt;
    char *memory;
    unsigned seed;
} share_job;

/* The body of a thread: register random pages, check that they are locked, and keep a
 * share for a copy after the release. */
static void *
share_pages(void *arg)
{
    share_job *job = arg;
    uint64_t page = page_nbytes();
    for (int i = 0; i < 400; i++) {
        uint64_t first = (uint64_t)rand_r(&job->seed) % PAGE_COUNT;
        uint64_t count = 1 + (uint64_t)rand_r(&job->seed) % (PAGE_COUNT - first);
        cm_registration *r = NULL;
        bool locked = false;
        MUST(cm_registry_register(job->registry, 0, job->memory + first * page,
                                  count * page, false, &r));
        for (uint64_t k = first; k < first + count; k++) {
            uint64_t run = cm_registry_run_nbytes(job->registry, job->memory + k * page,
                                                  PAGE_COUNT * page, &locked);
            if (run == 0 || !locked || !is_locked(job->rt, job->memory + k * page)) {
                CHECK_FAIL_("page %llu is not locked", (unsigned long long)k);
            }
        }
        cm_page_shares shares = {.count = 0};
        char *at = job->memory + first * page;
        MUST(cm_registry_share(job->registry, at, count * page, false, &shares));
        MUST(cm_registration_release(r));
        if (!is_locked(job->rt, at)) {
            CHECK_FAIL_("page %llu is not locked", (unsigned long long)first);
        }
        cm_registry_unshare(job->registry, &shares);
    }
    return NULL;
}

/* Four threads register and release the same pages. No page may be unlocked while any
 * of them needs it. */
static void
test_registry_threads_share_pages(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 28);
    cm_registry *registry = open_registry(rt);
    char *memory = map_pages(PAGE_COUNT);
    cm_thread threads[4];
    share_job jobs[4];
    for (unsigned i = 0; i < 4; i++) {
        jobs[i] = (share_job){registry, rt, memory, i + 1};
        MUST(cm_thread_start(&threads[i], share_pages, &jobs[i]));
    }
    for (int i = 0; i < 4; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK_EQ(cm_registry_count(registry), 0);
    CHECK_OK(cm_registry_close(registry));
    close_emulated(rt);
    munmap(memory, PAGE_COUNT * page_nbytes());
}

/* clang-format off */
MAIN(RUN(test_registry_unaligned_range_locks_its_pages)
     RUN(test_registry_overlapping_requests_share_pieces)
     RUN(test_registry_wrong_arguments_are_refused)
     RUN(test_registry_read_only_pages_are_not_shared_for_writing)
     RUN(test_registry_foreign_pages_are_shared_and_left_alone)
     RUN(test_registry_memory_that_is_pinned_already_is_no_error)
     RUN(test_registry_device_address_of_a_range)
     RUN(test_registry_close_unregisters_what_is_left)
     RUN(test_registry_refused_unregister_is_reported_and_tried_again)
     RUN(test_registry_forked_child_touches_nothing)
     RUN(test_registry_shares_keep_pieces_after_their_registration)
     RUN(test_registry_shares_may_outlive_it)
     RUN(test_registry_piece_that_was_not_unlocked_may_be_shared)
     RUN(test_registry_finds_what_a_walk_over_all_pages_finds)
     RUN(test_registry_any_call_may_fail_and_nothing_stays_locked)
     RUN(test_registry_threads_share_pages))
/* clang-format on */
