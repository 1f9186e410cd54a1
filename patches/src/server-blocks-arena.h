#pragma once

// Host memory for saved blocks: one region of fixed size, divided by a first-fit allocator.
//
// Owns: the region, the table of its gaps and allocations, and a thread that makes its pages present ahead of use: a save
//       into fresh pages takes many times as long as the copy itself, because each page faults first. Where a device
//       copies faster to host memory of its own kind (pinned memory), the region is of that kind.
// Threads: all calls come from one thread, the main loop. Any thread may read and write allocated bytes.
// Invariants: gaps and allocations are disjoint, cover the region, and two gaps never touch. Under AddressSanitizer
//             bytes that are not allocated are poisoned.

#include "ggml-backend.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <thread>
#include <vector>

class server_blocks_arena {
public:
    server_blocks_arena() = default;
    ~server_blocks_arena() { reset(0); }

    server_blocks_arena(const server_blocks_arena &) = delete;
    server_blocks_arena & operator=(const server_blocks_arena &) = delete;

    // Frees everything and reserves `size` bytes, pinned if `host_buft` provides them. Returns false and stays empty
    // if the host refuses the memory. All earlier allocations become invalid.
    bool reset(size_t size, ggml_backend_buffer_type_t host_buft = nullptr);

    // Returns the bytes of the region, allocated or not.
    size_t size() const { return total; }

    // Returns whether the region is pinned memory of a device.
    bool pinned() const { return buffer != nullptr; }

    // Returns `size` contiguous bytes, aligned to 64, or nullptr when no gap is large enough.
    uint8_t * allocate(size_t size);

    // Returns an allocation to the gaps. Ignores a pointer that is not one.
    void release(uint8_t * p);

    // Returns whether allocate() would succeed for all `sizes`, one after the other, if the allocations at `freeable`
    // were released first.
    bool fits(const std::vector<size_t> & sizes, const std::set<const uint8_t *> & freeable) const;

private:
    uint8_t * base  = nullptr;
    size_t    total = 0;
    ggml_backend_buffer_t buffer = nullptr; // the pinned memory, nullptr when the region is ordinary memory

    std::map<size_t, size_t> gaps;        // offset -> bytes
    std::map<size_t, size_t> allocations; // offset -> bytes

    std::thread       prefault_thread; // makes pages present and leaves their content alone
    std::atomic<bool> stop { false };
};
