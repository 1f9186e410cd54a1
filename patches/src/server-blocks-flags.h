#pragma once

// Our options of llama-server: values, and how they are given. common/arg.cpp includes this and calls
// server_blocks_add_flags. common_params has one pointer to all of them: a new option compiles arg.cpp and
// the server anew, nothing else.

#include "arg.h"
#include "common.h"

#include <memory>

struct server_blocks_flags {
    int32_t ram_mib = 0; // host memory for saved blocks, 0 = blocks are off

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
}
