#pragma once

// What all parts of server_blocks share: the context, its kind of memory, and the state of its slots.
//
// Owned by server_blocks, whose init() sets it. Between two calls of init() only the state of the slots changes.
// Threads: the main loop only.

#include "llama-kv-block.h"
#include "server-blocks-draft.h"
#include "server-blocks-slot.h"
#include "server-task.h"

#include <memory>
#include <string>
#include <vector>

struct server_blocks_context {
    llama_context *       ctx = nullptr;
    llama_kv_block_memory memory { "", false, false, false };
    std::vector<server_blocks_slot_state> slots; // by id; empty while blocks are off
    server_blocks_draft   draft;                 // of speculative decoding
    int64_t               last_epoch = 0;        // counter of the slots' epochs

    int n_slots() const { return (int) slots.size(); }

    // Returns whether the rows are all there is to a sequence: no window, no recurrent state beside them.
    bool is_dense() const { return !memory.windowed && !memory.recurrent; }
};

// What a block call may read and change of one of the server's slots.
struct server_blocks_slot {
    int             id;
    bool            busy;  // it decodes a request
    int             n_ctx;
    server_prompt * prompt;
};

// Returns the server's slots as block calls see them.
template <typename Slots> static std::vector<server_blocks_slot> server_blocks_slots(Slots & slots) {
    std::vector<server_blocks_slot> res;
    for (auto & slot : slots) {
        res.push_back({ slot.id, slot.is_processing(), slot.n_ctx, &slot.prompt });
    }
    return res;
}

// A text and its prefix hashes.
struct server_blocks_text {
    std::shared_ptr<const server_blocks_hashed> content;

    const llama_tokens &          tokens; // server_blocks_ids() of the text
    const std::vector<uint64_t> & hashes;
    llama_kv_ranges               media;  // server_blocks_media() of the text: no block begins or ends inside one of these

    // The present text of a slot.
    server_blocks_text(const server_prompt & prompt, const server_blocks_slot_state & slot);

    server_blocks_text(llama_tokens tokens, uint64_t adapters);
};

// The positions [p0, p1) of a slot that holds `text`. Lives as long as the text.
struct server_blocks_range {
    int                        id; // of the slot
    const server_blocks_text & text;
    llama_pos                  p0;
    llama_pos                  p1;
};
