#pragma once

// Moves rows between the cells of a slot and the store.
//
// Owns: nothing.
// Threads: the main loop only, between two decodes.
// Invariants: every copy that it starts is recorded in the fence. A copy in the store has the history of the rows that it
//             was made from, and a slot to which a copy is loaded gets the history of the copy.

#include "server-blocks-capture.h"
#include "server-blocks-context.h"
#include "server-blocks-fence.h"
#include "server-blocks-store.h"

class server_blocks_transfer {
public:
    // All must outlive this object.
    server_blocks_transfer(server_blocks_context & context, server_blocks_store & store, const server_blocks_capture & capture, server_blocks_fence & fence)
        : context(context), store(store), capture(capture), fence(fence) {}

    // Returns the key that a copy of these rows has.
    server_blocks_key key_of(const std::string & tenant, const server_blocks_range & range) const;

    // Returns the bytes of host memory that a new copy of these rows takes.
    size_t bytes_of(const server_blocks_range & range) const;

    // Returns whether save() would make a new copy for this key: there is none, or its file was deleted.
    bool needs_copy(int id, const server_blocks_key & key) const;

    // Saves resident rows under the owner's name. Rows of one decode are copied once; rows that were decoded again replace
    // a copy of the same tokens and visibility. Returns false when there is no memory: then the store has no new copy, but
    // may have given up others, never one of `keep`.
    bool save(const server_blocks_owner & owner, const server_blocks_range & range, const server_blocks_key_set & keep = {});

    // Writes a copy that is in host memory to its positions. `prefix_hash`: of the slot's text before these. `same_cells`:
    // writes each row into the cell from which it was saved, where that cell is empty. Returns the number of rows that are
    // in their old cell, or -1 when there is no room or the layout differs; then nothing has changed.
    int32_t load(int id, const server_blocks_key & key, uint64_t prefix_hash, bool same_cells);

    // Writes a copy at other positions, from `at` on; rows at and after `at` move up. Returns as load() does. Waits for
    // the copies.
    int32_t insert(int id, const server_blocks_key & key, llama_pos at);

    // Waits for all copies.
    void wait() { fence.wait(); }

private:
    server_blocks_context       & context;
    server_blocks_store         & store;
    const server_blocks_capture & capture;
    server_blocks_fence         & fence;
};
