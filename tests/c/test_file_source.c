/* SPDX-License-Identifier: Apache-2.0 */
/* transfer/file_source.h: copies whose source is a mapped file. The memory itself may
 * not be touched here: whoever does dies. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fresh_pages.h"
#include "engine_world.h"
#include "transfer/engine_private.h"
#include "transfer/file_faults.h"
#include "transfer/file_source.h"

enum { NBYTES = 3 << 20, SKIPPED = 5000, PIECE = 256 << 10 };

typedef struct setup {
    world w;
    cm_file_faults faults;
    int fd;
    char *mapped;           /* no page of it may be touched */
    unsigned char *content; /* what it would be */
} setup;

static void
open_setup(setup *s)
{
    open_world(&s->w);
    MUST(cm_file_faults_init(&s->faults));
    s->content = malloc(NBYTES);
    for (uint64_t i = 0; i < NBYTES; i++) {
        s->content[i] = (unsigned char)((i * 13 + (i >> 7)) % 251);
    }
    open_file(&s->fd, s->content, NBYTES, SKIPPED);
    s->mapped = mmap(NULL, NBYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(s->mapped != MAP_FAILED);
}

static void
close_setup(setup *s)
{
    CHECK_EQ(munmap(s->mapped, NBYTES), 0);
    free(s->content);
    (void)close(s->fd);
    cm_file_faults_fini(&s->faults);
    close_world(&s->w);
}

/* Elements of the file, as rows of `columns` that begin `pitch` bytes apart. */
typedef struct view {
    int64_t itemsize, rows, columns, pitch, stride;
    int64_t at; /* of element 0 */
} view;

static const view views[] = {
    {1, 1, NBYTES, 0, 1, 0},               /* all of it */
    {4, 1, NBYTES / 12, 0, 12, 0},         /* every third */
    {2, 1, NBYTES / 2, 0, -2, NBYTES - 2}, /* backwards */
    {1, 48, 40000, 65536, 1, 77},          /* long rows */
    {4, 768, 1024, 4, 3072, 0},            /* turned */
    {8, 3000, 100, 1000, 8, 16},           /* short rows */
};
enum { VIEW_COUNT = sizeof(views) / sizeof(views[0]) };

static CHECK_NO_TSAN void
check_bytes(const setup *s, const view *v, const memory *m)
{
    const unsigned char *to = m->bytes;
    uint64_t wrong = 0;
    for (int64_t i = 0; i < v->rows; i++) {
        for (int64_t k = 0; k < v->columns; k++) {
            const unsigned char *from =
                s->content + v->at + i * v->pitch + k * v->stride;
            wrong += memcmp(to, from, (size_t)v->itemsize) != 0;
            to += v->itemsize;
        }
    }
    CHECK_EQ(wrong, 0);
}

static cm_copy_request
request_for(const setup *s, const view *v, const memory *m)
{
    cm_copy_request request = {
        .dst = {.ndim = 2, .itemsize = v->itemsize, .shape = {v->rows, v->columns}}};
    cm_region whole = region_at(m, 0);
    request.src = request.dst;
    request.dst.kind = whole.kind;
    request.dst.device = whole.device;
    request.dst.host = whole.host;
    request.dst.address = whole.address;
    MUST(cm_region_set_c_strides(&request.dst));
    request.src.kind = CM_KIND_PAGEABLE;
    request.src.device = -1;
    request.src.host = s->mapped + v->at;
    request.src.strides[0] = v->pitch;
    request.src.strides[1] = v->stride;
    return request;
}

static cm_file_source *
open_source(setup *s)
{
    return cm_file_source_create(dup(s->fd), s->mapped, SKIPPED, &s->faults.calls);
}

static void
use_small_pieces(setup *s)
{
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.staged_up_nbytes = 0;
    tuning.chunk_nbytes = PIECE;
    tuning.thread_count = 3;
    MUST(cm_engine_set_tuning(s->w.engine, &tuning));
}

/* The copy in one of three ways; its outcome. */
static cm_status
run(setup *s, const view *v, memory *m, int how)
{
    cm_copy_request request = request_for(s, v, m);
    cm_ticket *ticket;
    request.file = open_source(s);
    request.blocking = how == 0;
    request.stream = how == 2 ? NULL : s->w.streams[0];
    memset(m->bytes, 0, m->nbytes);
    cm_status status = cm_engine_copy(s->w.engine, &request, &ticket);
    cm_file_source_release(request.file);
    if (cm_is_ok(status)) {
        status = cm_ticket_wait(ticket, UINT64_MAX);
        cm_ticket_release(ticket);
    }
    return status;
}

static void
test_file_source_is_read_by_every_way(void)
{
    setup s;
    open_setup(&s);
    use_small_pieces(&s);
    for (int place = 0; place < 3; place++) {
        static const cm_kind kinds[] = {CM_KIND_DEVICE, CM_KIND_PINNED,
                                        CM_KIND_PAGEABLE};
        memory m = take_memory(&s.w, kinds[place], 0, NBYTES);
        for (int i = 0; i < VIEW_COUNT; i++) {
            bool turned = views[i].stride > views[i].pitch && views[i].rows > 1;
            if (turned && kinds[place] != CM_KIND_DEVICE) {
                continue; /* read through its pages: in vain for the most part */
            }
            for (int how = 0; how < 3; how++) {
                CHECK_OK(run(&s, &views[i], &m, how));
                check_bytes(&s, &views[i], &m);
            }
        }
        give_memory(&s.w, &m);
    }
    CHECK_GT(s.faults.count, 0);
    close_setup(&s);
}

static bool
can_look(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *map = mmap(NULL, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool can = map != MAP_FAILED && !cm_is_ok(cm_pages_look(map, page, false));
    (void)munmap(map, page);
    return can;
}

/* The nth read fails, or the file ends there, or it moves less than it was asked for.
 */
static void
test_file_source_every_read_may_fail(void)
{
    setup s;
    open_setup(&s);
    use_small_pieces(&s);
    static const cm_kind kinds[] = {CM_KIND_DEVICE, CM_KIND_PINNED};
    for (int place = 0; place < 2; place++) {
        memory m = take_memory(&s.w, kinds[place], 0, NBYTES);
        for (int i = 0; i < VIEW_COUNT; i++) {
            if (i == 4) {
                continue;
            }
            for (uint64_t nth = 1; nth < 9; nth += 2) {
                cm_file_plan plan = {.nth = nth, .error = EIO, .repeat = true};
                cm_file_faults_set(&s.faults, &plan);
                cm_status status = run(&s, &views[i], &m, (int)(nth % 3));
                bool reached = s.faults.count >= nth;
                CHECK_EQ(status.code, reached ? CM_ESYSTEM : CM_OK);
                CHECK_EQ(status.arg, reached ? EIO : 0);
                plan = (cm_file_plan){.nth = nth, .error = EINTR, .most = 1000};
                cm_file_faults_set(&s.faults, &plan);
                CHECK_OK(run(&s, &views[i], &m, (int)(nth % 3)));
                check_bytes(&s, &views[i], &m);
            }
        }
        cm_file_plan plan = {.nth = 0};
        cm_file_faults_set(&s.faults, &plan);
        CHECK_EQ(ftruncate(s.fd, SKIPPED + NBYTES / 2), 0);
        for (int how = 0; how < 3; how++) {
            cm_status status = run(&s, &views[0], &m, how);
            CHECK_EQ(status.code, CM_EENDED);
            CHECK_EQ(status.arg, SKIPPED + NBYTES / 2);
            if (kinds[place] == CM_KIND_PINNED && can_look()) { /* by its pages */
                CHECK_EQ(run(&s, &views[4], &m, how).code, CM_EFAULT);
            }
        }
        CHECK_EQ(pwrite(s.fd, s.content, NBYTES, SKIPPED), NBYTES);
        CHECK_OK(run(&s, &views[0], &m, 0));
        check_bytes(&s, &views[0], &m);
        give_memory(&s.w, &m);
    }
    close_setup(&s);
}

/* Many at once in the background share one source. */
static void
test_file_source_is_shared(void)
{
    enum { COPIES = 12 };
    setup s;
    memory targets[COPIES];
    cm_ticket *tickets[COPIES];
    open_setup(&s);
    use_small_pieces(&s);
    cm_file_source *source = open_source(&s);
    for (int i = 0; i < COPIES; i++) {
        cm_kind kind = i % 3 == 0 ? CM_KIND_PINNED : CM_KIND_DEVICE;
        targets[i] = take_memory(&s.w, kind, 0, NBYTES);
        cm_copy_request request = request_for(&s, &views[i % 4], &targets[i]);
        request.file = source;
        MUST(cm_engine_copy(s.w.engine, &request, &tickets[i]));
    }
    cm_file_source_release(source);
    for (int i = 0; i < COPIES; i++) {
        CHECK_OK(cm_ticket_wait(tickets[i], UINT64_MAX));
        cm_ticket_release(tickets[i]);
        check_bytes(&s, &views[i % 4], &targets[i]);
        give_memory(&s.w, &targets[i]);
    }
    close_setup(&s);
}

MAIN(RUN(test_file_source_is_read_by_every_way)
         RUN(test_file_source_every_read_may_fail) RUN(test_file_source_is_shared))
