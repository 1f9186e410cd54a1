#pragma once

// What the engine evicts by itself where nobody gave a slot a budget: --ctx-logical and --kv-eviction as values.

#include "llama.h"

#include <cstdint>
#include <string>

struct common_params;

enum server_blocks_mode {
    SERVER_BLOCKS_MODE_OFF,
    SERVER_BLOCKS_MODE_STREAMING, // the oldest blocks go first
    SERVER_BLOCKS_MODE_SCORED,    // those that were longest not decoded or loaded go first
    SERVER_BLOCKS_MODE_ATTENTION, // those that got least attention go first
};

struct server_blocks_modes {
    server_blocks_mode mode = SERVER_BLOCKS_MODE_OFF;

    int32_t n_ctx     = 0; // tokens of a slot, resident or not
    int32_t n_rows    = 0; // most rows of one slot
    int32_t first     = 0; // first tokens, never evicted
    int32_t evictable = 0; // rows between first and recent ones while generating, 0 = what n_rows leaves
    int32_t recent    = 0; // last rows, never evicted, 0 = by how many there are
    int32_t block     = 64;
    bool    norm_sum  = false; // attention by the time a row was there, not all of it

    bool on() const { return mode != SERVER_BLOCKS_MODE_OFF; }

    // last rows that stay where n are resident
    int32_t recent_of(int32_t n) const;

    // rows a slot may have
    int32_t limit(bool generating) const;

    // rows to make room for at once in a prompt: more in one batch is faster, fewer hide less of the prompt
    int32_t chunk(int32_t n_ubatch) const;

    // from the options, for slots of n_ctx tokens and n_rows cells; throws std::invalid_argument with a reason for a person
    static server_blocks_modes read(const common_params & params, const llama_model * model, int32_t n_ctx, int32_t n_rows);
};
