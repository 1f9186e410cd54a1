#pragma once

// Host memory for the rows of copies: which bytes are free, reserved for a plan, or still in use by the disk.
//
// Owns: the region (arena), the reservation of the plan that runs, and the memory of erased copies until the disk no
//       longer reads or writes it.
// Threads: the main loop only.
// Invariant: memory goes back to the arena only after every read and write that uses it is over.

#include "server-blocks-arena.h"
#include "server-blocks-disk.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

class server_blocks_memory {
public:
    // ---- the region, see server_blocks_arena

    bool   reset(size_t size, ggml_backend_buffer_type_t host_buft) { return arena.reset(size, host_buft); }
    size_t size()   const { return arena.size(); }
    bool   pinned() const { return arena.pinned(); }

    bool fits(const std::vector<size_t> & sizes, const std::set<const uint8_t *> & freeable) const {
        return arena.fits(sizes, freeable);
    }

    // Returns `size` contiguous bytes, or nullptr when there are none. Takes them from the reservation where it has
    // memory of exactly this size.
    uint8_t * allocate(size_t size);

    // Returns memory of allocate() to the arena.
    void release(uint8_t * data) { arena.release(data); }

    // ---- the reservation of a plan

    // Makes allocate() hand out this memory, each part (size, data) once. `bytes`: what all copies of the plan take,
    // their entries included.
    void reserve(const std::vector<std::pair<size_t, uint8_t *>> & parts, size_t bytes);

    // Returns the rest of the reservation to the arena.
    void cancel_reservation();

    // Returns whether some memory of the reservation has not been handed out.
    bool   has_reservation() const { return !reserved.empty(); }
    size_t reserved_bytes()  const { return n_reserved; }

    // ---- memory that the disk uses

    // Counts `bytes` as in use by the disk, or no longer.
    void   add_pending(size_t bytes)    { n_pending += bytes; }
    void   remove_pending(size_t bytes) { n_pending -= bytes; }
    size_t pending_bytes() const { return n_pending; }

    // Releases `data`, which may be nullptr, when the write or the read is over; counts `bytes` as pending until then.
    void release_after(std::shared_ptr<server_blocks_write> write, uint8_t * data, size_t bytes);
    void release_after(std::shared_ptr<server_blocks_read> read, uint8_t * data, size_t bytes);

    // Releases the memory of reads and writes that are over. Returns the heads of the files that were written meanwhile,
    // although their copies had been erased.
    std::vector<server_blocks_head> poll(const server_blocks_disk & disk);

private:
    struct pending_item {
        std::shared_ptr<server_blocks_write> write; // one of these two
        std::shared_ptr<server_blocks_read>  read;
        uint8_t * data;
        size_t    bytes;
    };

    static bool is_over(server_blocks_read & read, bool abandoned);

    server_blocks_arena arena;
    std::multimap<size_t, uint8_t *> reserved; // size -> memory not handed out yet
    size_t n_reserved = 0;
    std::vector<pending_item> pending;
    size_t n_pending  = 0; // bytes of `pending` and of reads of copies that exist
};
