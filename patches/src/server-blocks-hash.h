#pragma once

// Hashes that identify text and rows.

#include "common.h"

#include <cstdint>
#include <vector>

// Mixes one more value into a hash. Values in block files and in replies depend on it: it must not change.
inline uint64_t server_blocks_mix(uint64_t h, uint64_t v) {
    h = (h ^ (v + 0x9e3779b97f4a7c15ull))*0xbf58476d1ce4e5b9ull;
    h ^= h >> 29;
    h *= 0x94d049bb133111ebull;
    return h ^ (h >> 32);
}

// Returns n + 1 hashes for n tokens: [k] identifies the first k tokens, computed under `adapters` (0: none).
inline std::vector<uint64_t> server_blocks_prefix_hashes(const llama_tokens & tokens, uint64_t adapters) {
    std::vector<uint64_t> res(tokens.size() + 1);
    res[0] = 0x6576686b65ull ^ adapters;
    for (size_t i = 0; i < tokens.size(); ++i) {
        res[i + 1] = server_blocks_mix(res[i], (uint32_t) tokens[i]);
    }
    return res;
}
