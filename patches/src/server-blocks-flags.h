#pragma once

// The options that we add to llama-server: their values and their parsers.
//
// common/arg.cpp includes this file and registers the parsers. common_params has one pointer to all values, so that a new
// option recompiles arg.cpp and the server only.

#include "arg.h"
#include "common.h"

#include <memory>
#include <stdexcept>
#include <string>

struct server_blocks_flags {
    int32_t     ram_mib = 0; // --evoke-ram: host memory for saved blocks in MiB, 0 = no block calls
    std::string disk;        // --evoke-disk: DIR or DIR:MiB, "" = none

    // Eviction by the engine, in tokens; -1: the mode has a default of its own.
    int32_t ctx_logical      = 0;     // --ctx-logical: context of a slot, 0 = as many tokens as it has cells
    int32_t eviction         = 0;     // --kv-eviction: server_blocks_mode
    int32_t sink_tokens      = -1;    // --kv-sink-tokens
    int32_t protected_tokens = 0;     // --kv-protected-tokens
    int32_t evictable_tokens = -1;    // --kv-evictable-tokens
    int32_t recent_tokens    = -1;    // --kv-recent-tokens
    int32_t block_size       = 64;    // --kv-block-size
    bool    norm_sum         = false; // --kv-aggregation norm_sum

    // Returns whether the engine evicts from slots without a budget.
    bool evicts() const { return ctx_logical > 0 || eviction > 0; }

    // Returns the options, or the defaults when none was given.
    static const server_blocks_flags & of(const common_params & params) {
        static const server_blocks_flags none;
        return params.evoke ? *params.evoke : none;
    }

    // Returns the options for a parser to change.
    static server_blocks_flags & in(common_params & params) {
        if (!params.evoke) {
            params.evoke = std::make_shared<server_blocks_flags>();
        }
        return *params.evoke;
    }
};

// Registers the options of saved blocks with upstream's `add`.
template <typename Add> void server_blocks_add_flags(Add add) {
    add(common_arg(
        {"--evoke-ram"}, "N",
        "enable the block calls, and store saved KV blocks in at most N MiB of host memory (default: 0, block calls are disabled)",
        [](common_params & params, int value) { server_blocks_flags::in(params).ram_mib = value; }
    ).set_env("LLAMA_ARG_EVOKE_RAM").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--evoke-disk"}, "DIR[:MiB]",
        "write saved KV blocks to files in this folder as well, so that they survive a restart and may exceed --evoke-ram; "
        "the files take at most MiB (default: no folder; 4096 MiB for a folder without a number); "
        "the folder must be accessible to its owner only (mode 700)",
        [](common_params & params, const std::string & value) { server_blocks_flags::in(params).disk = value; }
    ).set_env("LLAMA_ARG_EVOKE_DISK").set_examples({LLAMA_EXAMPLE_SERVER}));
}

// Returns `value`. Throws std::invalid_argument, which the parser reports with the name of the option, when it is not in
// [lo, hi].
inline int32_t server_blocks_flag(int32_t value, int32_t lo, int32_t hi) {
    if (value < lo || value > hi) {
        throw std::invalid_argument("must be between " + std::to_string(lo) + " and " + std::to_string(hi));
    }
    return value;
}

// Registers the options of eviction by the engine with upstream's `add`.
template <typename Add> void server_blocks_add_mode_flags(Add add) {
    add(common_arg(
        {"--ctx-logical"}, "N",
        "give each slot a context of N tokens, which may be more than its KV cells: when no cell is free, the server saves rows "
        "and evicts them; needs --evoke-ram (default: 0, as many tokens as cells)",
        [](common_params & params, int value) { server_blocks_flags::in(params).ctx_logical = server_blocks_flag(value, 0, 1 << 30); }
    ).set_env("LLAMA_ARG_CTX_LOGICAL").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-eviction"}, "MODE",
        "choose which blocks the server evicts when no KV cell is free: 0 = none, the request ends; 1 = streaming, the oldest; "
        "2 = scored, those not decoded or loaded for the longest time; 3 = attention, those with the least attention of the "
        "model; needs --evoke-ram (default: 0; 1 with --ctx-logical)",
        [](common_params & params, int value) { server_blocks_flags::in(params).eviction = server_blocks_flag(value, 0, 3); }
    ).set_env("LLAMA_ARG_KV_EVICTION").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-sink-tokens"}, "N",
        "never evict the first N tokens of a slot (default: 4; 32 with --kv-eviction 3)",
        [](common_params & params, int value) { server_blocks_flags::in(params).sink_tokens = server_blocks_flag(value, 0, 256); }
    ).set_env("LLAMA_ARG_KV_SINK_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-protected-tokens"}, "N",
        "never evict the first N tokens of a slot, for a system prompt of that length; the larger of this and --kv-sink-tokens "
        "applies (default: 0)",
        [](common_params & params, int value) { server_blocks_flags::in(params).protected_tokens = server_blocks_flag(value, 0, 1 << 30); }
    ).set_env("LLAMA_ARG_KV_PROTECTED_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-evictable-tokens"}, "N",
        "while the reply is generated, keep at most N tokens between those that --kv-sink-tokens and --kv-recent-tokens protect; "
        "0 = as many as the cells have room for (default: 0; 512 with --kv-eviction 3)",
        [](common_params & params, int value) { server_blocks_flags::in(params).evictable_tokens = server_blocks_flag(value, 0, 1 << 30); }
    ).set_env("LLAMA_ARG_KV_EVICTABLE_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-recent-tokens"}, "N",
        "never evict the last N tokens of a slot (default: a quarter of its resident tokens, but at least 32; 128 with --kv-eviction 3)",
        [](common_params & params, int value) { server_blocks_flags::in(params).recent_tokens = server_blocks_flag(value, 1, 1 << 30); }
    ).set_env("LLAMA_ARG_KV_RECENT_TOKENS").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-block-size"}, "N",
        "save and evict blocks of N tokens (default: 64)",
        [](common_params & params, int value) { server_blocks_flags::in(params).block_size = server_blocks_flag(value, 1, 4096); }
    ).set_env("LLAMA_ARG_KV_BLOCK_SIZE").set_examples({LLAMA_EXAMPLE_SERVER}));
    add(common_arg(
        {"--kv-aggregation"}, "HOW",
        "choose how --kv-eviction 3 compares tokens: sum = by the attention that a token got in all, norm_sum = by that "
        "attention divided by the number of tokens decoded since (default: sum)",
        [](common_params & params, const std::string & value) {
            if (value != "sum" && value != "norm_sum") {
                throw std::invalid_argument("must be sum or norm_sum");
            }
            server_blocks_flags::in(params).norm_sum = value == "norm_sum";
        }
    ).set_env("LLAMA_ARG_KV_AGGREGATION").set_examples({LLAMA_EXAMPLE_SERVER}));
}
