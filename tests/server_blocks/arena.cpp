// Tests server_blocks_arena: allocation, release, fragmentation, the prediction of fits(), pinned memory.
// Prints one line per check; exit status 1 after the first that fails.

#include "server-blocks-arena.h"

#include "check.h"

#include "ggml-backend.h"

#include <cstring>
#include <iterator>
#include <map>
#include <random>

// Allocates and releases at random, and compares with a model: allocations are disjoint, aligned, and keep their bytes.
static void test_random_allocations() {
    server_blocks_arena arena;
    check(arena.reset(1 << 16), "a region is reserved");
    std::mt19937 random(1);
    std::map<uint8_t *, std::pair<size_t, uint8_t>> model; // start -> bytes, value
    size_t n_refused = 0;
    for (int i = 0; i < 20000; ++i) {
        const size_t size = 1 + random() % 3000;
        if (random() % 2 == 0) {
            const bool predicted = arena.fits({ size }, {});
            uint8_t * p = arena.allocate(size);
            if ((p != nullptr) != predicted) {
                check(false, "fits() predicts allocate()");
            }
            n_refused += p == nullptr;
            if (p) {
                const auto next = model.lower_bound(p);
                const bool after  = next == model.end() || p + size <= next->first;
                const bool before = next == model.begin() || std::prev(next)->first + std::prev(next)->second.first <= p;
                if (!after || !before || (uintptr_t) p % 64 != 0) {
                    check(false, "allocations are disjoint and aligned");
                }
                memset(p, i, size);
                model[p] = { size, (uint8_t) i };
            }
        } else if (!model.empty()) {
            auto it = std::next(model.begin(), random() % model.size());
            for (size_t k = 0; k < it->second.first; ++k) {
                if (it->first[k] != it->second.second) {
                    check(false, "bytes stay as they were written");
                }
            }
            arena.release(it->first);
            model.erase(it);
        }
    }
    check(n_refused > 0, "a full region refuses");
    for (const auto & item : model) {
        arena.release(item.first);
    }
    uint8_t * all = arena.allocate(1 << 16);
    check(all != nullptr, "released memory becomes one gap");
    memset(all, 1, 1 << 16);
    arena.release(all);
}

static void test_limits() {
    server_blocks_arena arena;
    check(arena.size() == 0 && arena.allocate(1) == nullptr, "an empty arena has no memory");
    check(arena.reset(1024) && arena.size() == 1024 && !arena.pinned(), "ordinary memory is not pinned");
    check(arena.allocate(1025) == nullptr, "more than the region is refused");
    uint8_t * a = arena.allocate(0);
    uint8_t * b = arena.allocate(1024 - 64);
    check(a && b && a != b && !arena.allocate(1), "an allocation of 0 bytes takes the smallest unit");
    uint8_t foreign = 0;
    arena.release(&foreign);
    arena.release(b + 64);
    check(!arena.allocate(1), "a pointer that is no allocation is ignored");
    arena.release(a);
    arena.release(a);
    check(arena.allocate(64) == a && !arena.allocate(64), "a second release does nothing");
    check(arena.reset(2048) && arena.allocate(2048), "reset() frees everything");
    check(arena.reset(0) && arena.size() == 0, "reset(0) returns the memory");
    check(!arena.reset(size_t(1) << 62) && arena.size() == 0, "memory that the host refuses is reported");
}

static void test_fits() {
    server_blocks_arena arena;
    arena.reset(64*8);
    uint8_t * blocks[8];
    for (auto & block : blocks) {
        block = arena.allocate(64);
    }
    arena.release(blocks[1]);
    arena.release(blocks[3]);
    check(arena.fits({ 64, 64 }, {}), "two gaps hold one allocation each");
    check(!arena.fits({ 128 }, {}), "separate gaps do not hold a larger one");
    check(arena.fits({ 192 }, { blocks[2] }), "a release joins the gaps on both sides");
    check(!arena.fits({ 192, 64 }, { blocks[2] }), "the joined gap is used once");
    check(arena.fits({ 192, 64 }, { blocks[2], blocks[7] }), "the last allocation joins the end");
    check(!arena.allocate(128), "fits() changes nothing");
}

static void test_pinned() {
    const auto type = ggml_backend_cpu_buffer_type();
    server_blocks_arena arena;
    check(arena.reset(4096, type) && arena.pinned(), "memory of a buffer type is pinned");
    uint8_t * p = arena.allocate(4096);
    check(p != nullptr, "and can be allocated");
    memset(p, 7, 4096);
    check(arena.reset(4096) && !arena.pinned(), "reset() changes the kind of memory");
}

int main() {
    test_random_allocations();
    test_limits();
    test_fits();
    test_pinned();
    return 0;
}
