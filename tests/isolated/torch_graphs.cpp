// SPDX-License-Identifier: Apache-2.0
// The memory of graphs in cumem/integrations/torch_allocator.cpp, with a pool that keeps
// count and no GPU. Prints "good".
#include SOURCE

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);               \
            std::exit(1);                                                              \
        }                                                                              \
    } while (0)

static std::mutex pool_mutex;
static std::map<void *, size_t> blocks, segments; // on loan
static std::set<void *> noted;
static size_t limit = size_t{1} << 30;
static int relieved;

static void *
lend_from(std::map<void *, size_t> &loans, size_t nbytes)
{
    std::lock_guard<std::mutex> guard(pool_mutex);
    if (nbytes > limit) {
        return nullptr;
    }
    void *address = std::aligned_alloc(kAlign, (nbytes + kAlign - 1) / kAlign * kAlign);
    loans[address] = nbytes;
    return address;
}

static void *
lend(size_t nbytes, int, void *)
{
    return lend_from(blocks, nbytes);
}

static void *
lend_segment(size_t nbytes, int, void *)
{
    return lend_from(segments, nbytes);
}

static void
take_back(void *address, size_t, int, void *)
{
    std::lock_guard<std::mutex> guard(pool_mutex);
    CHECK(blocks.erase(address) + segments.erase(address) == 1);
    std::free(address);
}

static void
note_stream(void *address, void *)
{
    noted.insert(address);
}

static int
relieve(size_t nbytes, int, int captures, char *text, size_t room)
{
    relieved++;
    if (nbytes == 7777) {
        limit = size_t{1} << 30; // now there is
        return 1;
    }
    std::snprintf(text, room, "tried all, capturing %d", captures);
    return 0;
}

static Stream
stream(uintptr_t number)
{
    return reinterpret_cast<Stream>(number);
}

static void
begin(PoolId id, uintptr_t low, uintptr_t high)
{
    cumem_torch_begin_pool(0, id, [=](Stream s) {
        return reinterpret_cast<uintptr_t>(s) >= low
               && reinterpret_cast<uintptr_t>(s) <= high;
    });
}

static std::string
refusal(size_t nbytes, Stream s)
{
    try {
        (void)cumem_torch_alloc(nbytes, 0, s);
    }
    catch (const c10::OutOfMemoryError &error) {
        return error.what_without_backtrace();
    }
    return "";
}

static void
check_eager()
{
    CHECK(cumem_torch_alloc(0, 0, nullptr) == nullptr && relieved == 0);
    void *a = cumem_torch_alloc(1000, 0, stream(1));
    CHECK(blocks.at(a) == 1000);
    cumem_torch_record_stream(a, stream(2));
    CHECK(noted.count(a) == 1);
    cumem_torch_free(a, 1000, 0, stream(1));
    CHECK(blocks.empty());
    limit = 5000;
    CHECK(refusal(6000, stream(1)).find("tried all, capturing 0") != std::string::npos);
    CHECK(relieved == 1);
    a = cumem_torch_alloc(7777, 0, stream(1));
    CHECK(a != nullptr && relieved == 2 && limit > 5000);
    cumem_torch_free(a, 7777, 0, stream(1));
}

static void
check_reuse_inside()
{
    PoolId id{0, 1};
    begin(id, 10, 11);
    void *eager = cumem_torch_alloc(1000, 0, stream(1)); // does not capture
    CHECK(blocks.count(eager) == 1);
    void *other_device = cumem_torch_alloc(1000, 1, stream(10));
    CHECK(blocks.count(other_device) == 1);
    char *a = static_cast<char *>(cumem_torch_alloc(1000, 0, stream(10)));
    char *b = static_cast<char *>(cumem_torch_alloc(1000, 0, stream(10)));
    CHECK(segments.size() == 1 && b == a + 1024);
    cumem_torch_free(a, 1000, 0, stream(10));
    CHECK(cumem_torch_alloc(900, 0, stream(10)) == a); // at once
    void *side = cumem_torch_alloc(1000, 0, stream(11));
    CHECK(segments.size() == 2); // another stream's order is another one
    cumem_torch_free(a, 900, 0, stream(10));
    cumem_torch_free(b, 1000, 0, stream(10));
    CHECK(cumem_torch_alloc(kLeast, 0, stream(10)) == a); // pieces join
    void *large = cumem_torch_alloc(3 * kLeast + 1, 0, stream(10));
    CHECK(segments.at(large) == 3 * kLeast + kAlign);
    cumem_torch_end_pool(0, id);
    CHECK(blocks.count(cumem_torch_alloc(10, 0, stream(10))) == 1);
    // A graph may be replayed: all stays, whatever is freed.
    cumem_torch_free(a, 0, 0, nullptr);
    cumem_torch_free(large, 0, 0, nullptr);
    CHECK(segments.size() == 3);
    begin(id, 10, 10); // a second graph shares it
    CHECK(cumem_torch_alloc(3 * kLeast, 0, stream(10)) == large);
    cumem_torch_end_pool(0, id);
    cumem_torch_release_pool(0, id);
    CHECK(segments.size() == 3);
    cumem_torch_release_pool(0, id);
    CHECK(segments.size() == 3); // a tensor of either stream lives on
    cumem_torch_free(side, 0, 0, nullptr);
    CHECK(segments.size() == 2);
    cumem_torch_free(large, 0, 0, nullptr);
    CHECK(segments.empty());
    cumem_torch_free(eager, 0, 0, nullptr);
    cumem_torch_free(other_device, 0, 1, nullptr);
}

static void
check_shared_and_nested()
{
    PoolId outer{0, 2}, inner{0, 3};
    begin(outer, 0, 100);
    begin(inner, 0, 100);
    void *a = cumem_torch_alloc(1000, 0, stream(5));
    cumem_torch_record_stream(a, stream(6));
    CHECK(noted.count(a) == 0);
    cumem_torch_free(a, 1000, 0, stream(5));
    void *b = cumem_torch_alloc(1000, 0, stream(5));
    CHECK(b != a); // the other stream may be at it when the graph is replayed
    cumem_torch_end_pool(0, inner);
    CHECK(segments.size() == 1);
    void *c = cumem_torch_alloc(1000, 0, stream(5));
    CHECK(segments.size() == 2);
    cumem_torch_end_pool(0, outer);
    cumem_torch_free(b, 0, 0, nullptr);
    cumem_torch_release_pool(0, inner);
    CHECK(segments.size() == 1);
    cumem_torch_free(c, 0, 0, nullptr);
    cumem_torch_release_pool(0, outer);
    CHECK(segments.empty());
    cumem_torch_release_pool(0, outer); // of nothing
    cumem_torch_end_pool(0, outer);
}

static void
check_shortage_inside()
{
    PoolId id{0, 4};
    begin(id, 7, 7);
    limit = 1000;
    CHECK(refusal(500, stream(7)).find("capturing 1") != std::string::npos);
    limit = size_t{1} << 30;
    cumem_torch_end();
    limit = 1000;
    int before = relieved;
    CHECK(refusal(5000, stream(1)).find("CUDA out of memory") == 0);
    CHECK(relieved == before); // Python is gone
    limit = size_t{1} << 30;
    cumem_torch_free(cumem_torch_alloc(500, 0, stream(7)), 0, 0, nullptr);
    cumem_torch_end_pool(0, id);
    cumem_torch_release_pool(0, id);
    CHECK(segments.empty());
}

static void
check_threads()
{
    auto work = [](uintptr_t number) {
        PoolId id{0, 100 + number};
        for (int round = 0; round < 50; round++) {
            begin(id, number, number);
            std::vector<char *> held;
            for (size_t i = 1; i < 40; i++) {
                auto *at = static_cast<char *>(
                    cumem_torch_alloc(i * 100000, 0, stream(number)));
                at[0] = static_cast<char>(number);
                held.push_back(at);
                if (i % 3 == 0) {
                    CHECK(held[i / 3]
                              == nullptr
                          || held[i / 3][0] == static_cast<char>(number));
                    cumem_torch_free(held[i / 3], 0, 0, nullptr);
                    held[i / 3] = nullptr;
                }
            }
            cumem_torch_end_pool(0, id);
            cumem_torch_release_pool(0, id);
            for (char *at : held) {
                if (at != nullptr) {
                    cumem_torch_free(at, 0, 0, nullptr);
                }
            }
        }
    };
    std::vector<std::thread> threads;
    for (uintptr_t number = 20; number < 24; number++) {
        threads.emplace_back(work, number);
    }
    for (std::thread &each : threads) {
        each.join();
    }
    CHECK(segments.empty());
}

int
main()
{
    Functions given{lend, lend_segment, take_back, note_stream, relieve};
    cumem_torch_begin(&given);
    check_eager();
    check_reuse_inside();
    check_shared_and_nested();
    check_threads();
    check_shortage_inside();
    std::puts("good");
    return 0;
}
