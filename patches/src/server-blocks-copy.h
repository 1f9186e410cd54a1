#pragma once

// One saved copy of the rows of a position range, and the key under which the store keeps it.

#include "llama-kv-block.h"
#include "server-blocks-disk.h"
#include "server-blocks-file.h"
#include "server-blocks-history.h"

#include "common.h"

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>

// Identity of a copy. Two copies of one key were made from the same tokens with the same positions visible.
struct server_blocks_key {
    std::string tenant;
    uint64_t    hash = 0; // of the tokens up to p1, and of the adapters
    llama_pos   p0   = 0;
    llama_pos   p1   = 0;
    server_blocks_visibility visibility = 0; // of its rows

    bool operator<(const server_blocks_key & o) const {
        return std::tie(tenant, hash, p0, p1, visibility) < std::tie(o.tenant, o.hash, o.p0, o.p1, o.visibility);
    }
    bool operator==(const server_blocks_key & o) const {
        return std::tie(tenant, hash, p0, p1, visibility) == std::tie(o.tenant, o.hash, o.p0, o.p1, o.visibility);
    }
    bool operator!=(const server_blocks_key & o) const { return !(*this == o); }
};

using server_blocks_key_set = std::set<server_blocks_key>;

// Who saves a block, and the name of the block.
struct server_blocks_owner {
    const std::string & tenant;
    const std::string & session;
    const std::string & name;
};

struct server_blocks_copy {
    llama_kv_block        kv;              // without data and lists when the copy is only on disk
    llama_tokens          tokens;          // of [p0, p1); empty when the copy is only on disk
    uint64_t              prefix_hash = 0; // of the tokens before p0
    uint64_t              hash        = 0; // of the tokens up to p1
    std::map<std::string, std::string> labels; // name -> the session that saved the block under it
    server_blocks_row_list rows;           // origin of the rows
    server_blocks_bounds  bounds;          // of the keys; empty where attention was not captured
    uint64_t              last_used = 0;   // value of the store's clock
    size_t                bytes     = 0;   // of host memory, all of this included

    uint64_t changed_in    = 0;  // version of the store in which a reply would first report the present tier and names
    int      reported_tier = -1; // 2*in_ram + on_disk as last reported, -1: the names have changed since

    bool    on_disk      = false; // a file of this copy exists
    bool    labels_stale = false; // the file has other names, or other key bounds
    bool    rows_stale   = false; // the file has rows of an earlier decode
    int64_t retry_ms     = 0;     // no write before this time: the last one failed
    std::shared_ptr<server_blocks_write> writing; // nullptr unless a write is queued or runs
    std::shared_ptr<server_blocks_read>  reading; // nullptr unless a read is pending

    static constexpr size_t OVERHEAD = 512; // bytes of the entry itself, an estimate

    bool in_ram()      const { return kv.data != nullptr; }
    bool is_complete() const { return server_blocks_is_complete(server_blocks_visibility_of(rows)); }

    // Returns whether the file has the rows and the names of this copy.
    bool is_file_current() const { return on_disk && !labels_stale && !rows_stale; }

    // Returns the bytes that the copy takes without its rows.
    size_t index_bytes() const { return OVERHEAD + bounds.size() + rows.size()*sizeof(server_blocks_rows); }
};
