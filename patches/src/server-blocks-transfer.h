#pragma once

// Moves rows between the cells of a slot and the store.
//
// Owns: nothing.
// Threads: the main loop only, between two decodes.
// Invariants: every copy that it starts is recorded in the fence. A copy in the store has the origin (history) of the
//             rows it was made from, and a slot has that of the rows it got.

#include "server-blocks-capture.h"
#include "server-blocks-context.h"
#include "server-blocks-fence.h"
#include "server-blocks-store.h"

class server_blocks_transfer {
public:
    // All must outlive this object.
    server_blocks_transfer(server_blocks_context & context, server_blocks_store & store, const server_blocks_capture & capture, server_blocks_fence & fence)
        : context(context), store(store), capture(capture), fence(fence) {}

    // Returns the key of the rows of [p0, p1) of a slot whose text is `text`.
    server_blocks_key key_of(const std::string & tenant, int id, const server_blocks_text & text, llama_pos p0, llama_pos p1) const;

    // Returns the bytes that a new copy of [p0, p1) of a slot takes.
    size_t bytes_of(int id, llama_pos p0, llama_pos p1) const;

    // Returns whether save() would make a new copy for this key: there is none, or its file was deleted.
    bool needs_copy(int id, const server_blocks_key & key) const;

    // Saves resident rows of a slot under a name. Rows of one decode are copied once; rows that were decoded again replace
    // a copy of the same tokens and visibility. Returns false, and changes nothing but what was given up for room, if
    // there is no memory; never gives up a copy of `keep`.
    bool save(const server_blocks_owner & owner, int id, const server_blocks_text & text, llama_pos p0, llama_pos p1,
              server_blocks_key_set keep = {});

    // Writes a copy that is in host memory back at its positions. `prefix_hash`: of the slot's text before it. `same_cells`:
    // each row into the cell it came from, where that is empty. Returns the number of rows that got their old cell, or
    // -1 when there is no room or the layout differs; then nothing has changed.
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
