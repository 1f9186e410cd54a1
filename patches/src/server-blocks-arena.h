#pragma once

// Host memory for saved blocks: one region of fixed size, its pages made present ahead of use.
// A save into fresh pages costs many times the copy itself: each page is faulted in first. Where a device
// has memory of the host that it copies to and from faster (pinned), it is that.

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

    // forget everything and hold `size` bytes, pinned if `host_buft` gives them; false if the host will not
    bool reset(size_t size, ggml_backend_buffer_type_t host_buft = nullptr);

    size_t size() const { return total; }

    bool pinned() const { return buffer != nullptr; }

    // `size` contiguous bytes, or nullptr when no gap is large enough
    uint8_t * take(size_t size);

    void give(uint8_t * p);

    // whether take() would find room for all of these, one after the other, were what is at `freeable` given back first
    bool fits(const std::vector<size_t> & sizes, const std::set<const uint8_t *> & freeable) const;

private:
    uint8_t * base  = nullptr;
    size_t    total = 0;
    ggml_backend_buffer_t buffer = nullptr; // the pinned memory

    std::map<size_t, size_t> gaps; // offset -> bytes, never touching
    std::map<size_t, size_t> used; // offset -> bytes

    std::thread       toucher; // makes pages present, content untouched
    std::atomic<bool> stop { false };
};
