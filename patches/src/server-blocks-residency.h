#pragma once

// Which positions of a slot have a row, without reading all cells of the slot for each question.
//
// Owns: what it has read last. The cells stay the truth: before it answers, it compares how many rows there are, the first
//       and the last with those of the cells, and reads the cells again where they differ.
// Threads: the main loop only, between two decodes.
// Invariant: whoever changes rows before the last ones reports it. Everything else in llama-server only removes the last
//            rows and decodes others right after those that are left. After such changes the positions are those of before
//            if there are as many rows and the last one is the same, and the next k positions have rows, too, if there are
//            k rows more and the last one is k later.

#include "llama-kv-block.h"

class server_blocks_residency {
public:
    server_blocks_residency(const llama_context * ctx, int id) : ctx(ctx), id(id) {}

    // Return the positions that have a row; read() reads the cells in any case, for a text whose positions are not the
    // indices of its tokens. The reference is valid until the next call.
    const llama_kv_ranges & ranges() const;
    const llama_kv_ranges & read() const;

    // Record that rows of [p0, p1) were removed, or loaded. ranges() must have been called right before that.
    void on_evicted(llama_pos p0, llama_pos p1);
    void on_loaded(llama_pos p0, llama_pos p1);

    // Makes the next call read the cells.
    void forget() { valid = false; }

private:
    void check();

    const llama_context *   ctx;
    int                     id;
    mutable bool            valid = false;
    mutable llama_kv_ranges present;
    mutable llama_kv_extent extent; // of the cells when `present` was right
};
