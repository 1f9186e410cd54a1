#include "server-blocks-modes.h"

#include "server-blocks-flags.h"

#include "common.h"

#include <algorithm>
#include <cinttypes>
#include <stdexcept>

int32_t server_blocks_modes::n_recent(int32_t n) const {
    return recent > 0 ? recent : std::max(32, n/4);
}

int32_t server_blocks_modes::max_rows(bool generating) const {
    return generating && evictable > 0 ? std::min(n_rows, first + evictable + n_recent(n_rows)) : n_rows;
}

int32_t server_blocks_modes::batch(int32_t n_ubatch) const {
    return std::max(block, std::min(n_ubatch, (n_rows - first - n_recent(n_rows))/4));
}

// Returns the positions that the model was trained for, times the factor of RoPE scaling.
static int64_t n_trained_positions(const common_params & params, const llama_model * model) {
    const int64_t n = llama_model_n_ctx_train(model); // contains the factor of YaRN
    const bool linear = params.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_LINEAR;
    return linear && params.rope_freq_scale > 0.0f ? (int64_t) (n/params.rope_freq_scale + 0.5f) : n;
}

server_blocks_modes server_blocks_modes::read(const common_params & params, const llama_model * model, int32_t n_ctx, int32_t n_rows) {
    const auto & flags = server_blocks_flags::of(params);
    server_blocks_modes res;
    res.n_ctx  = n_ctx;
    res.n_rows = n_rows;
    if (!flags.evicts()) {
        return res;
    }
    const int64_t trained = n_trained_positions(params, model);
    if (flags.ctx_logical > trained) {
        throw std::invalid_argument(string_format("--ctx-logical %d is more than the %" PRId64 " tokens that the model was trained for: "
            "choose a smaller context, or add RoPE scaling (--rope-scaling, --rope-scale)", flags.ctx_logical, trained));
    }
    if (params.embedding) {
        throw std::invalid_argument("--ctx-logical and --kv-eviction cannot be used with --embedding, because an embedding needs all of its text");
    }
    const bool attention = flags.eviction == SERVER_BLOCKS_MODE_ATTENTION;
    res.mode      = flags.eviction > 0 ? (server_blocks_mode) flags.eviction : SERVER_BLOCKS_MODE_STREAMING;
    res.n_ctx     = flags.ctx_logical > 0 ? flags.ctx_logical : (int32_t) trained;
    res.first     = std::max(flags.protected_tokens, flags.sink_tokens >= 0 ? flags.sink_tokens : attention ? 32 : 4);
    res.recent    = std::max(0, flags.recent_tokens >= 0 ? flags.recent_tokens : attention ? 128 : 0);
    res.evictable = std::max(0, flags.evictable_tokens >= 0 ? flags.evictable_tokens : attention ? 512 : 0);
    res.block     = flags.block_size;
    res.norm_sum  = flags.norm_sum;
    const int32_t needed = res.first + res.n_recent(n_rows) + res.block;
    if (needed > n_rows) {
        throw std::invalid_argument(string_format("%d cells of a slot cannot hold the first %d and last %d tokens and one block of %d",
            n_rows, res.first, res.n_recent(n_rows), res.block));
    }
    if (res.evictable > 0 && res.evictable < res.block) {
        throw std::invalid_argument(string_format("--kv-evictable-tokens %d cannot hold one block of %d", res.evictable, res.block));
    }
    return res;
}

json server_blocks_modes::to_json() const {
    static const char * names[] = { "off", "streaming", "scored", "attention" };
    return json {
        {"mode",      names[mode]},
        {"first",     first},
        {"evictable", evictable},
        {"recent",    recent},
        {"block",     block},
        {"aggregation", norm_sum ? "norm_sum" : "sum"},
    };
}
