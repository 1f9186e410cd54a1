#include "server-blocks-arena.h"

#include <algorithm>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else // without AddressSanitizer nothing checks accesses to bytes that are not allocated
#define ASAN_POISON_MEMORY_REGION(p, size)   ((void) (p), (void) (size))
#define ASAN_UNPOISON_MEMORY_REGION(p, size) ((void) (p), (void) (size))
#endif

static constexpr size_t ALIGNMENT = 64;

static size_t aligned(size_t size) {
    return (std::max<size_t>(size, 1) + ALIGNMENT - 1)/ALIGNMENT*ALIGNMENT;
}

static uint8_t * region_new(size_t size) {
#if defined(__linux__)
    void * p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        return nullptr;
    }
    madvise(p, size, MADV_HUGEPAGE);
    return (uint8_t *) p;
#else
    return (uint8_t *) malloc(size);
#endif
}

static void region_free(uint8_t * p, size_t size) {
#if defined(__linux__)
    munmap(p, size);
#else
    (void) size;
    free(p);
#endif
}

bool server_blocks_arena::reset(size_t size, ggml_backend_buffer_type_t host_buft) {
    if (prefault_thread.joinable()) {
        stop = true;
        prefault_thread.join();
        stop = false;
    }
    ASAN_UNPOISON_MEMORY_REGION(base, total);
    if (buffer) {
        ggml_backend_buffer_free(buffer);
    } else if (base) {
        region_free(base, total);
    }
    buffer = nullptr;
    gaps.clear();
    allocations.clear();
    total = 0;
    if (size > 0 && host_buft) {
        buffer = ggml_backend_buft_alloc_buffer(host_buft, size);
        if (buffer && ggml_backend_buffer_get_type(buffer) != host_buft) { // the device refused and returned ordinary memory
            ggml_backend_buffer_free(buffer);
            buffer = nullptr;
        }
    }
    base = buffer ? (uint8_t *) ggml_backend_buffer_get_base(buffer) : size > 0 ? region_new(size) : nullptr;
    if (!base) {
        return size == 0;
    }
    total = size;
    gaps[0] = size;
    ASAN_POISON_MEMORY_REGION(base, total);
    if (buffer) {
        return true; // pinned pages are present
    }
#if defined(__linux__)
    static constexpr size_t STEP = size_t(16) << 20;
    prefault_thread = std::thread([this]() {
        for (size_t at = 0; at < total && !stop; at += STEP) {
            // Safe while others write: pages become present, bytes do not change. An older kernel returns EINVAL.
            if (madvise(base + at, std::min(STEP, total - at), MADV_POPULATE_WRITE) != 0) {
                return;
            }
        }
    });
#endif
    return true;
}

uint8_t * server_blocks_arena::allocate(size_t size) {
    const size_t requested = size;
    size = aligned(size);
    for (auto it = gaps.begin(); it != gaps.end(); ++it) {
        if (it->second < size) {
            continue;
        }
        const auto [offset, bytes] = *it;
        gaps.erase(it);
        if (bytes > size) {
            gaps[offset + size] = bytes - size;
        }
        allocations[offset] = size;
        ASAN_UNPOISON_MEMORY_REGION(base + offset, requested);
        return base + offset;
    }
    return nullptr;
}

bool server_blocks_arena::fits(const std::vector<size_t> & sizes, const std::set<const uint8_t *> & freeable) const {
    std::vector<size_t> room; // bytes of each gap after the releases, by offset
    size_t at = 0;
    for (const auto & [offset, bytes] : allocations) {
        if (!freeable.count(base + offset)) {
            room.push_back(offset - at);
            at = offset + bytes;
        }
    }
    room.push_back(total - at);
    return std::all_of(sizes.begin(), sizes.end(), [&](size_t size) {
        size = aligned(size);
        const auto gap = std::find_if(room.begin(), room.end(), [size](size_t n) { return n >= size; });
        if (gap == room.end()) {
            return false;
        }
        *gap -= size;
        return true;
    });
}

void server_blocks_arena::release(uint8_t * p) {
    const auto it = allocations.find(p - base);
    if (it == allocations.end()) {
        return;
    }
    size_t offset = it->first;
    size_t bytes  = it->second;
    allocations.erase(it);
    ASAN_POISON_MEMORY_REGION(p, bytes);
    auto next = gaps.lower_bound(offset);
    if (next != gaps.end() && next->first == offset + bytes) {
        bytes += next->second;
        next = gaps.erase(next);
    }
    if (next != gaps.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == offset) {
            before->second += bytes;
            return;
        }
    }
    gaps[offset] = bytes;
}
