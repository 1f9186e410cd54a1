#pragma once

// Host memory by tenant, and the order in which copies are given up.
//
// Owns: for each tenant, its copies in the order of their last use, and the bytes they take.
// Threads: the main loop only.
// Invariants: a copy is in exactly one list, of its tenant and tier, and `last_used` of the copy is its place there.
//             A tenant without copies has no share.

#include "server-blocks-copy.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

class server_blocks_shares {
public:
    enum tier { DISK_ONLY = 0, IN_RAM = 1 };

    struct share {
        std::map<uint64_t, server_blocks_key> by_age[2]; // of each tier, the oldest first
        size_t bytes[2] = { 0, 0 };                      // of each tier

        size_t total() const { return bytes[DISK_ONLY] + bytes[IN_RAM]; }
    };

    // Adds a copy to its tenant's share. To change `bytes`, `last_used` or the tier of a copy: remove, change, add.
    void add(const server_blocks_key & key, const server_blocks_copy & copy);

    // Removes a copy from its tenant's share. Pointers to shares become invalid.
    void remove(const server_blocks_key & key, const server_blocks_copy & copy);

    // Makes a copy the most recently used one; `now` is later than the last use of all others.
    void mark_used(const server_blocks_key & key, server_blocks_copy & copy, uint64_t now);

    // Returns the bytes of all copies.
    size_t bytes() const { return n_bytes; }

    // Returns the bytes of all copies that are only on disk.
    size_t disk_only_bytes() const { return n_disk_only; }

    // Returns the bytes of a tenant.
    size_t bytes_of(const std::string & tenant) const;

    // Returns all shares, those with most bytes of a tier first.
    std::vector<const share *> largest_first(tier of) const;

    // Returns the shares from which copies may be given up when a tenant needs `bytes` more: first those that have more
    // than the tenant would have, the largest first, then its own. So no tenant takes memory from one that has less.
    std::vector<const share *> donors(const std::string & tenant, size_t bytes) const;

private:
    std::map<std::string, share> shares;
    size_t n_bytes     = 0;
    size_t n_disk_only = 0;
};
