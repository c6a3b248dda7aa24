/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of base/file_maps, which finds mappings of a file in memory. There are two ways
 * to find them: by asking the kernel about a span, and by reading its list of all
 * mappings. Each test checks that both give the right answer. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file_maps.h"
#include "base/machine.h"
#include "check.h"

enum { PAGES = 8 };

/* Open a file of `nbytes` that has no name any more. Returns -1 if that fails. */
static int
make_file(size_t nbytes)
{
    char path[] = "/tmp/cumem-file-maps-XXXXXX";
    int fd = mkstemp(path);
    bool is_made = fd >= 0 && unlink(path) == 0 && ftruncate(fd, (off_t)nbytes) == 0;
    return is_made ? fd : -1;
}

/* Return the addresses of this memory as a span. */
static cm_file_span
span_of(const void *memory, size_t nbytes)
{
    uint64_t begin = (uintptr_t)memory;
    return (cm_file_span){begin, begin + nbytes};
}

/* Check that both ways agree on whether the memory shows any byte of this span of the
 * file. */
static void
check_shown(int fd, cm_file_span memory, cm_file_span file, bool is_shown)
{
    cm_file_maps maps;
    CHECK_OK(cm_file_maps_read(fd, &memory, 1, &maps));
    CHECK_EQ(cm_file_maps_show(&maps, memory, file), is_shown);
    cm_file_maps_fini(&maps);
    CHECK_OK(cm_file_maps_read_text(fd, &maps));
    CHECK_EQ(cm_file_maps_show(&maps, memory, file), is_shown);
    cm_file_maps_fini(&maps);
}

/* Two pages of a file are mapped. They must be found for exactly those bytes of the
 * file, and for no other file. */
static void
test_file_maps_of_a_part_show_its_bytes_alone(void)
{
    size_t page = cm_page_nbytes();
    int fd = make_file(PAGES * page);
    int other = make_file(PAGES * page);
    char *memory = mmap(NULL, 2 * page, PROT_READ, MAP_SHARED, fd, (off_t)(3 * page));
    CHECK(memory != MAP_FAILED);
    cm_file_span all = span_of(memory, 2 * page);
    check_shown(fd, all, (cm_file_span){0, PAGES * page}, true);
    check_shown(fd, all, (cm_file_span){3 * page, 3 * page + 1}, true);
    check_shown(fd, all, (cm_file_span){5 * page - 1, 5 * page}, true);
    check_shown(fd, all, (cm_file_span){0, 3 * page}, false);
    check_shown(fd, all, (cm_file_span){5 * page, PAGES * page}, false);
    cm_file_span last = span_of(memory + 2 * page - 1, 1);
    check_shown(fd, last, (cm_file_span){5 * page - 1, 5 * page}, true);
    check_shown(fd, last, (cm_file_span){3 * page, 3 * page + 1}, false);
    check_shown(other, all, (cm_file_span){0, PAGES * page}, false);
    CHECK_EQ(munmap(memory, 2 * page), 0);
    CHECK_EQ(close(fd) | close(other), 0);
}

/* Every second page of a range is a mapping of the file. Each of them must be found, by
 * a question about the whole range, about a page, and about two spans at once. */
static void
test_file_maps_beside_each_other_are_all_found(void)
{
    size_t page = cm_page_nbytes();
    int fd = make_file(PAGES * page);
    char *memory =
        mmap(NULL, PAGES * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    /* The pages between these do not map the file. */
    for (size_t i = 0; i < PAGES; i += 2) {
        void *made = mmap(memory + i * page, page, PROT_READ, MAP_SHARED | MAP_FIXED,
                          fd, (off_t)(i * page));
        CHECK_PTR_EQ(made, memory + i * page);
    }
    cm_file_span all = span_of(memory, PAGES * page);
    for (size_t i = 0; i < PAGES; i++) {
        cm_file_span file = {i * page, i * page + 1};
        check_shown(fd, all, file, i % 2 == 0);
        check_shown(fd, span_of(memory + i * page, page), file, i % 2 == 0);
    }
    cm_file_span spans[2] = {span_of(memory + page, page),
                             span_of(memory + 4 * page, 1)};
    cm_file_maps maps;
    CHECK_OK(cm_file_maps_read(fd, spans, 2, &maps));
    CHECK(maps.count >= 1);
    CHECK(cm_file_maps_show(&maps, spans[1], (cm_file_span){4 * page, 5 * page}));
    CHECK(!cm_file_maps_show(&maps, spans[0], (cm_file_span){0, PAGES * page}));
    cm_file_maps_fini(&maps);
    CHECK_EQ(munmap(memory, PAGES * page), 0);
    CHECK_EQ(close(fd), 0);
}

/* One span contains more mappings than are asked about one by one, so the list of all
 * mappings is read instead. */
static void
test_file_maps_of_many_pieces_are_found_by_the_list(void)
{
    size_t page = cm_page_nbytes();
    size_t count = 200;
    int fd = make_file(2 * count * page);
    char *memory =
        mmap(NULL, count * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    /* Every second page of the file is mapped, so that no two mappings join. */
    for (size_t i = 0; i < count; i++) {
        void *made = mmap(memory + i * page, page, PROT_READ, MAP_SHARED | MAP_FIXED,
                          fd, (off_t)(2 * i * page));
        CHECK_PTR_EQ(made, memory + i * page);
    }
    cm_file_span all = span_of(memory, count * page);
    check_shown(fd, all, (cm_file_span){2 * (count - 1) * page, 2 * count * page},
                true);
    check_shown(fd, all, (cm_file_span){page, 2 * page}, false);
    CHECK_EQ(munmap(memory, count * page), 0);
    CHECK_EQ(close(fd), 0);
}

/* An empty file, a pipe, no file at all, and a file that is not mapped are never
 * found. */
static void
test_file_maps_of_nothing_are_none(void)
{
    size_t page = cm_page_nbytes();
    void *heap = malloc(page);
    int empty = make_file(0);
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    cm_file_span memory = span_of(heap, page);
    check_shown(empty, memory, (cm_file_span){0, UINT64_MAX}, false);
    check_shown(ends[0], memory, (cm_file_span){0, UINT64_MAX}, false);
    check_shown(-1, memory, (cm_file_span){0, UINT64_MAX}, false);
    int fd = make_file(page);
    check_shown(fd, memory, (cm_file_span){0, UINT64_MAX}, false);
    free(heap);
    CHECK_EQ(close(fd) | close(empty) | close(ends[0]) | close(ends[1]), 0);
}

MAIN(RUN(test_file_maps_of_a_part_show_its_bytes_alone)
         RUN(test_file_maps_beside_each_other_are_all_found)
             RUN(test_file_maps_of_many_pieces_are_found_by_the_list)
                 RUN(test_file_maps_of_nothing_are_none))
