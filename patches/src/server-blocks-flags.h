#pragma once

// Our options of llama-server: values, and how they are given. common/arg.cpp includes this and calls
// server_blocks_add_flags. common_params has one pointer to all of them: a new option compiles arg.cpp and
// the server anew, nothing else.

#include "arg.h"
#include "common.h"

#include <memory>
#include <stdexcept>
#include <string>

struct server_blocks_flags {
    int32_t     ram_mib = 0; // host memory for saved blocks, 0 = blocks are off
    std::string disk;        // DIR[:MiB] for those it has no room for, "" = none

    // what the engine evicts by itself; -1 = as the mode says
    int32_t ctx_logical      = 0; // context of a slot, 0 = its cells
    int32_t eviction         = 0; // server_blocks_mode
    int32_t sink_tokens      = -1;
    int32_t protected_tokens = 0;
    int32_t evictable_tokens = -1;
    int32_t recent_tokens    = -1;
    int32_t block_size       = 64;
    bool    norm_sum         = false;

    bool evicts() const { return ctx_logical > 0 || eviction > 0; }

    static const server_blocks_flags & of(const common_params & params) {
        static const server_blocks_flags none;
        return params.evoke ? *params.evoke : none;
    }

    static server_blocks_flags & in(common_params & params) {
        if (!params.evoke) {
            params.evoke = std::make_shared<server_blocks_flags>();
        }
        return *params.evoke;
    }
};

template <typename Add> void server_blocks_add_flags(Add add) {
    add(common_arg(
        {"--evoke-ram"}, "N",
        "host memory in MiB for saved KV blocks, enables the block calls (default: 0 - disabled)",
        [](common_params & params, int value) { server_blocks_flags::in(params).ram_mib = value; }
    ).set_env("LLAMA_ARG_EVOKE_RAM").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--evoke-disk"}, "DIR[:MiB]",
        "private folder for saved KV blocks that --evoke-ram has no room for, and how much it may hold (default: none; 4096 MiB)",
        [](common_params & params, const std::string & value) { server_blocks_flags::in(params).disk = value; }
    ).set_env("LLAMA_ARG_EVOKE_DISK").set_examples({LLAMA_EXAMPLE_SERVER}));
}

// a number in its range, or the parser's error that names the option
inline int32_t server_blocks_flag(int32_t value, int32_t lo, int32_t hi) {
    if (value < lo || value > hi) {
        throw std::invalid_argument("must be between " + std::to_string(lo) + " and " + std::to_string(hi));
    }
    return value;
}

template <typename Add> void server_blocks_add_mode_flags(Add add) {
    add(common_arg(
        {"--ctx-logical"}, "N",
        "context of each slot, which may be more than its cells: what does not fit is saved, then evicted (default: 0 - the cells)",
        [](common_params & params, int value) { server_blocks_flags::in(params).ctx_logical = server_blocks_flag(value, 0, 1 << 30); }
    ).set_env("LLAMA_ARG_CTX_LOGICAL").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-eviction"}, "MODE",
        "what leaves when no cell is free: 0 = nothing, 1 = streaming: the oldest, 2 = scored: what was longest not decoded or loaded, "
        "3 = attention: what got least of it (default: 0; 1 with --ctx-logical)",
        [](common_params & params, int value) { server_blocks_flags::in(params).eviction = server_blocks_flag(value, 0, 3); }
    ).set_env("LLAMA_ARG_KV_EVICTION").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-sink-tokens"}, "N",
        "first tokens that are never evicted (default: 4; 32 with --kv-eviction 3)",
        [](common_params & params, int value) { server_blocks_flags::in(params).sink_tokens = server_blocks_flag(value, 0, 256); }
    ).set_env("LLAMA_ARG_KV_SINK_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-protected-tokens"}, "N",
        "length of a beginning that is never evicted, as of a system prompt (default: 0)",
        [](common_params & params, int value) { server_blocks_flags::in(params).protected_tokens = server_blocks_flag(value, 0, 1 << 30); }
    ).set_env("LLAMA_ARG_KV_PROTECTED_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-evictable-tokens"}, "N",
        "most tokens between the first and the recent ones while generating, 0 = what the cells leave (default: 0; 512 with --kv-eviction 3)",
        [](common_params & params, int value) { server_blocks_flags::in(params).evictable_tokens = server_blocks_flag(value, 0, 1 << 30); }
    ).set_env("LLAMA_ARG_KV_EVICTABLE_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-recent-tokens"}, "N",
        "last tokens that are never evicted (default: a quarter of the resident ones, at least 32; 128 with --kv-eviction 3)",
        [](common_params & params, int value) { server_blocks_flags::in(params).recent_tokens = server_blocks_flag(value, 1, 1 << 30); }
    ).set_env("LLAMA_ARG_KV_RECENT_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-block-size"}, "N",
        "tokens that are evicted together (default: 64)",
        [](common_params & params, int value) { server_blocks_flags::in(params).block_size = server_blocks_flag(value, 1, 4096); }
    ).set_env("LLAMA_ARG_KV_BLOCK_SIZE").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-aggregation"}, "HOW",
        "what attention is to --kv-eviction 3: sum = all that a token got, norm_sum = by the time it was there (default: sum)",
        [](common_params & params, const std::string & value) {
            if (value != "sum" && value != "norm_sum") {
                throw std::invalid_argument("must be sum or norm_sum");
            }
            server_blocks_flags::in(params).norm_sum = value == "norm_sum";
        }
    ).set_env("LLAMA_ARG_KV_AGGREGATION").set_examples({LLAMA_EXAMPLE_SERVER}));
}
