// SPDX-License-Identifier: Apache-2.0
// What PyTorch's pluggable allocator needs in C++: an exception of its own where memory
// is short, and the memory of CUDA graphs. cumem/integrations/torch.py compiles it
// against the PyTorch that is there, of which it takes no more than the exceptions. The
// rest is functions of cumem, and of Python by ctypes, which takes the GIL for them:
// PyTorch holds no lock while it calls its pluggable allocator, nor is one held here.
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

struct CUstream_st;
using Stream = CUstream_st *;
using PoolId = std::pair<unsigned long long, unsigned long long>; // c10::MempoolId_t
using Filter = std::function<bool(Stream)>;

namespace {

using Lend = void *(size_t nbytes, int device, void *stream);

struct Functions {
    Lend *lend;
    Lend *lend_segment;
    void (*take_back)(void *address, size_t nbytes, int device, void *stream);
    void (*note_stream)(void *address, void *stream);
    // Make room: true means to ask again. Else `text` says what was tried.
    int (*relieve)(size_t nbytes, int device, int captures, char *text, size_t room);
};

Functions functions;
std::atomic<bool> has_python{false};

void *
alloc(Lend *lend, size_t nbytes, int device, Stream stream, bool captures)
{
    char text[4096] = "";
    for (int attempt = 0; nbytes > 0; attempt++) {
        if (void *address = lend(nbytes, device, stream)) {
            return address;
        }
        if (!has_python || attempt == 3
            || !functions.relieve(nbytes, device, captures, text, sizeof(text))) {
            break;
        }
    }
    if (nbytes > 0) { // no stream formats it: their locales crash where libstdc++ is
                      // linked in twice
        std::string told = "CUDA out of memory. Tried to allocate "
                           + std::to_string(nbytes) + " bytes on GPU "
                           + std::to_string(device) + " from cumem's pool. " + text;
        C10_THROW_ERROR(OutOfMemoryError, told);
    }
    return nullptr;
}

// -- graphs ---------------------------------------------------------------------------
// What a graph uses when it is replayed may serve nothing else as long as it can be,
// though it was freed while the graph was captured. Inside the capture of one stream
// what was freed is free at once.

constexpr size_t kAlign = 512;
constexpr size_t kLeast = size_t{2} << 20; // small blocks share such a segment

struct Piece {
    size_t nbytes;
    char *segment;
    bool is_free;
    bool is_shared; // another stream used it: not free before the end
};

struct Arena {
    int device;
    bool is_ended;
    size_t used_count;
    std::map<char *, Piece> pieces; // by address
};

struct Capture {
    int device;
    PoolId id;
    Filter filter;
};

using Key = std::tuple<int, PoolId, Stream>;

// Never destroyed: tensors may end after the destructors of a library have run.
template <class T> T &forever = *new T;
std::mutex &mutex = forever<std::mutex>;
auto &captures = forever<std::vector<Capture>>; // the youngest that applies counts
auto &graph_counts = forever<std::map<std::pair<int, PoolId>, int>>; // replayable ones
auto &arenas = forever<std::map<Key, Arena *>>;
auto &arena_of = forever<std::unordered_map<void *, Arena *>>; // of pieces in use
std::atomic<size_t> capture_count{0};
std::atomic<size_t> piece_count{0}; // in use

bool
find_key(int device, Stream stream, Key *key)
{
    std::lock_guard<std::mutex> guard(mutex);
    auto found = std::find_if(captures.rbegin(), captures.rend(), [&](auto &each) {
        return each.device == device && each.filter(stream);
    });
    if (found != captures.rend()) {
        *key = {device, found->id, stream};
    }
    return found != captures.rend();
}

void *
take_locked(Arena *arena, size_t nbytes)
{
    auto best = arena->pieces.end();
    for (auto each = arena->pieces.begin(); each != arena->pieces.end(); ++each) {
        const Piece &piece = each->second;
        if (piece.is_free && piece.nbytes >= nbytes
            && (best == arena->pieces.end() || piece.nbytes < best->second.nbytes)) {
            best = each;
        }
    }
    if (best == arena->pieces.end()) {
        return nullptr;
    }
    Piece &piece = best->second;
    if (piece.nbytes > nbytes) {
        arena->pieces[best->first + nbytes] = {piece.nbytes - nbytes, piece.segment, true,
                                               false};
        piece.nbytes = nbytes;
    }
    piece.is_free = false;
    arena->used_count++;
    arena_of[best->first] = arena;
    piece_count = arena_of.size();
    return best->first;
}

void *
alloc_for_graph(const Key &key, size_t nbytes)
{
    int device = std::get<0>(key);
    size_t size = (nbytes + kAlign - 1) / kAlign * kAlign;
    {
        std::lock_guard<std::mutex> guard(mutex);
        auto known = arenas.find(key);
        if (known != arenas.end()) {
            if (void *address = take_locked(known->second, size)) {
                return address;
            }
        }
    }
    size_t whole = std::max(size, kLeast);
    char *segment = static_cast<char *>(
        alloc(functions.lend_segment, whole, device, std::get<2>(key), true));
    std::lock_guard<std::mutex> guard(mutex);
    Arena *&arena = arenas[key];
    if (arena == nullptr) {
        arena = new Arena{device, false, 0, {}};
    }
    arena->pieces[segment] = {whole, segment, true, false};
    return take_locked(arena, size);
}

void
join_next(Arena *arena, std::map<char *, Piece>::iterator piece)
{
    auto next = std::next(piece);
    if (next != arena->pieces.end() && piece->second.is_free && next->second.is_free
        && next->second.segment == piece->second.segment) {
        piece->second.nbytes += next->second.nbytes;
        arena->pieces.erase(next);
    }
}

// Give back what an arena has once its graphs and its tensors are gone. cumem waits for
// all that the device does before the memory serves others.
void
end_if_unused_locked(Arena *arena)
{
    if (!arena->is_ended || arena->used_count > 0) {
        return;
    }
    for (auto &[address, piece] : arena->pieces) {
        if (address == piece.segment) {
            functions.take_back(address, 0, arena->device, nullptr);
        }
    }
    delete arena;
}

// False: it is none of a graph.
bool
free_of_graph(void *address)
{
    if (piece_count == 0) {
        return false;
    }
    std::lock_guard<std::mutex> guard(mutex);
    auto known = arena_of.find(address);
    if (known == arena_of.end()) {
        return false;
    }
    Arena *arena = known->second;
    arena_of.erase(known);
    piece_count = arena_of.size();
    arena->used_count--;
    auto piece = arena->pieces.find(static_cast<char *>(address));
    piece->second.is_free = !piece->second.is_shared;
    join_next(arena, piece);
    if (piece != arena->pieces.begin()) {
        join_next(arena, std::prev(piece));
    }
    end_if_unused_locked(arena);
    return true;
}

} // namespace

extern "C" {

void
cumem_torch_begin(const Functions *given)
{
    functions = *given;
    has_python = true;
}

// Python is about to end, and not called any more.
void
cumem_torch_end()
{
    has_python = false;
}

void *
cumem_torch_alloc(size_t nbytes, int device, Stream stream)
{
    Key key;
    if (nbytes > 0 && capture_count > 0 && find_key(device, stream, &key)) {
        return alloc_for_graph(key, nbytes);
    }
    return alloc(functions.lend, nbytes, device, stream, false);
}

void
cumem_torch_free(void *address, size_t nbytes, int device, Stream stream)
{
    if (!free_of_graph(address)) {
        functions.take_back(address, nbytes, device, stream);
    }
}

void
cumem_torch_record_stream(void *address, Stream stream)
{
    if (piece_count > 0) {
        std::lock_guard<std::mutex> guard(mutex);
        auto known = arena_of.find(address);
        if (known != arena_of.end()) {
            known->second->pieces[static_cast<char *>(address)].is_shared = true;
            return;
        }
    }
    functions.note_stream(address, stream);
}

void
cumem_torch_begin_pool(int device, PoolId id, Filter filter)
{
    std::lock_guard<std::mutex> guard(mutex);
    captures.push_back({device, id, std::move(filter)});
    capture_count = captures.size();
    ++graph_counts[{device, id}];
}

void
cumem_torch_end_pool(int device, PoolId id)
{
    std::lock_guard<std::mutex> guard(mutex);
    auto found = std::find_if(captures.rbegin(), captures.rend(), [&](auto &each) {
        return each.device == device && each.id == id;
    });
    if (found != captures.rend()) {
        captures.erase(std::next(found).base());
    }
    capture_count = captures.size();
}

void
cumem_torch_release_pool(int device, PoolId id)
{
    std::lock_guard<std::mutex> guard(mutex);
    auto count = graph_counts.find({device, id});
    if (count == graph_counts.end() || --count->second > 0) {
        return;
    }
    graph_counts.erase(count);
    for (auto each = arenas.begin(); each != arenas.end();) {
        if (std::get<0>(each->first) == device && std::get<1>(each->first) == id) {
            each->second->is_ended = true;
            end_if_unused_locked(each->second);
            each = arenas.erase(each);
        }
        else {
            ++each;
        }
    }
}

} // extern "C"
