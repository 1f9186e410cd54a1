#pragma once

// Hashes that identify text and rows.

#include "common.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// Mixes one more value into a hash. Values in block files and in replies depend on it: it must not change.
inline uint64_t server_blocks_mix(uint64_t h, uint64_t v) {
    h = (h ^ (v + 0x9e3779b97f4a7c15ull))*0xbf58476d1ce4e5b9ull;
    h ^= h >> 29;
    h *= 0x94d049bb133111ebull;
    return h ^ (h >> 32);
}

// Tokens and their prefix hashes: hashes[k] identifies the first k tokens, computed under `adapters` (0: none).
struct server_blocks_hashed {
    llama_tokens          tokens;
    std::vector<uint64_t> hashes; // one more than tokens

    explicit server_blocks_hashed(uint64_t adapters) : hashes({ seed(adapters) }) {}

    bool is_under(uint64_t adapters) const { return hashes[0] == seed(adapters); }

    // Changes the tokens to others. Those that both have at the beginning keep their hashes.
    void set(llama_tokens other) {
        const auto end = tokens.begin() + std::min(tokens.size(), other.size());
        size_t i = std::mismatch(tokens.begin(), end, other.begin()).first - tokens.begin();
        tokens = std::move(other);
        for (hashes.resize(tokens.size() + 1); i < tokens.size(); ++i) {
            hashes[i + 1] = server_blocks_mix(hashes[i], (uint32_t) tokens[i]);
        }
    }

private:
    static uint64_t seed(uint64_t adapters) { return 0x6576686b65ull ^ adapters; }
};
