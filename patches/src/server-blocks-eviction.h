#pragma once

// Eviction by the engine: keeps each slot within its budget and within the cells while it decodes.
//
// Owns: the options of eviction (server_blocks_modes).
// Threads: the main loop only, between two decodes.
// Invariants: a block is saved before it is evicted, as long as there is memory. Sinks, protected ranges, the recent
//             rows, rows of other sequences and rows that a context checkpoint needs are never evicted. A call that
//             evicts for one slot while others decode returns after a bounded time.

#include "server-blocks-capture.h"
#include "server-blocks-context.h"
#include "server-blocks-modes.h"
#include "server-blocks-store.h"
#include "server-blocks-transfer.h"

#include <map>
#include <string>
#include <vector>

class server_blocks_eviction {
public:
    // All must outlive this object.
    server_blocks_eviction(server_blocks_context & context, server_blocks_store & store, server_blocks_transfer & transfer, const server_blocks_capture & capture)
        : context(context), store(store), transfer(transfer), capture(capture) {}

    // Reads the options for slots that would have n_ctx tokens. `unsupported`: why blocks are off, or nullptr. Returns
    // false, with the reason in the log, when they cannot work.
    bool set_modes(const common_params & params, int32_t n_ctx, const char * unsupported);

    // Turns eviction off until set_modes() is called again.
    void reset();

    const server_blocks_modes & modes() const { return options; }

    // Returns the cells that every slot can fill while all others are full: its share where slots share cells.
    int32_t n_slot_cells() const;

    // Returns how many of n_wanted tokens of a slot may be decoded now, at least 1; evicts where the budget or the cells
    // require it. Under a budget that is all of them, or as many as have room beside the rows that are never evicted. While
    // others decode, evicting takes a bounded time: the batch is smaller, but at least one block; a slot that is far beyond
    // its limit gives up its rows in several calls. Then this returns -1: the slot decodes nothing now, and calls again
    // after the others' decode.
    int32_t make_room(int id, const server_prompt & prompt, int32_t n_wanted, bool others_decode);

    // Evicts until n tokens of a slot, all of which are decoded together, have room.
    void make_room_for_all(int id, const server_prompt & prompt, int32_t n);

    // Records which blocks got attention in the last decode.
    void on_decoded(int id);

    // Saves all rows of an idle slot that is about to be emptied.
    void save_rows(int id, const server_prompt & prompt);

    // Returns the rows that context checkpoints of a slot need.
    llama_kv_ranges checkpoint_rows(const server_prompt & prompt) const;

private:
    // What evictions from one slot between two decodes depend on, collected once. Evicted ranges are removed from it.
    struct candidates {
        server_blocks_budget rules;
        server_blocks_text   text;
        llama_kv_ranges      evictable;         // resident and not excluded
        llama_attn_sums      attention;         // empty unless blocks are evicted by attention
        size_t               next_in_order = 0; // index in rules.order
        llama_pos            recent_start  = -1; // first recent row when `blocks` was made
        std::vector<server_blocks_budget::entry> blocks; // in the order in which they are evicted
        size_t               next_block = 0;    // index in `blocks`
        size_t               n_full     = 0;    // of `blocks`: all but the one, the last, that the recent rows cut short
    };
    using candidate_map = std::map<int, candidates>; // by slot

    bool    is_irregular(const server_prompt & prompt) const;
    int32_t limit(int id) const;
    int32_t n_free_cells(int id) const;
    server_blocks_budget rules(int id) const;
    llama_pos  recent_start(int id, const candidates & from) const;
    candidates collect(int id) const;
    void       list_blocks(int id, candidates & from) const;
    double     score(int id, const candidates & from, llama_pos p0, llama_pos p1) const;
    bool       next(int id, candidates & from, server_blocks_budget::entry & out, bool full_only) const;
    bool       evict_one(int id, candidate_map & found, bool full_only = false);
    bool       evict_one_anywhere(int id, candidate_map & found);
    bool       start_capture(int id) const;
    void       retry_capture(int id);
    std::string block_name(const server_blocks_range & range) const;

    server_blocks_context       & context;
    server_blocks_store         & store;
    server_blocks_transfer      & transfer;
    const server_blocks_capture & capture;
    server_blocks_modes           options;
    bool                          unified = false; // all slots share the cells
    int64_t                       capture_retry_ms = 0; // no capture is started before this time: there was no memory
    std::vector<const server_prompt *> prompts;    // by slot: its text; nullptr before its first request
};
