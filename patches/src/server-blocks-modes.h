#pragma once

// The options --ctx-logical and --kv-eviction as values: what the engine evicts from a slot without a budget.
//
// Threads: any may read them; the main loop sets them when a model is loaded.

#include "llama.h"
#include "server-common.h"

#include <cstdint>

struct common_params;

enum server_blocks_mode {
    SERVER_BLOCKS_MODE_OFF,
    SERVER_BLOCKS_MODE_STREAMING, // evicts the oldest blocks first
    SERVER_BLOCKS_MODE_SCORED,    // evicts those first whose last use (decode, load, attention) is longest ago
    SERVER_BLOCKS_MODE_ATTENTION, // evicts those first that got least attention
};

struct server_blocks_modes {
    server_blocks_mode mode = SERVER_BLOCKS_MODE_OFF;

    int32_t n_ctx     = 0;  // tokens of a slot, resident or not
    int32_t n_rows    = 0;  // most rows of one slot
    int32_t first     = 0;  // first tokens, never evicted
    int32_t evictable = 0;  // most rows between the first and the recent ones while generating, 0 = no limit but n_rows
    int32_t recent    = 0;  // last rows, never evicted; 0 = a part of the resident ones
    int32_t block     = 64; // tokens that are evicted together
    bool    norm_sum  = false; // attention divided by the time a row was resident, instead of its sum

    bool on() const { return mode != SERVER_BLOCKS_MODE_OFF; }

    // Returns the number of last rows that are never evicted while n are resident.
    int32_t n_recent(int32_t n) const;

    // Returns how many rows a slot may have.
    int32_t max_rows(bool generating) const;

    // Returns for how many tokens of a prompt room is made at once. With more, a prompt is decoded faster; with fewer, less
    // of it is evicted before the reply begins.
    int32_t batch(int32_t n_ubatch) const;

    json to_json() const;

    // Reads the options, for slots of n_ctx tokens and n_rows cells. Throws std::invalid_argument with the reason when
    // they cannot work.
    static server_blocks_modes read(const common_params & params, const llama_model * model, int32_t n_ctx, int32_t n_rows);
};
