#pragma once

// The store of saved copies: in host memory, on disk, or both.
//
// Owns: the copies and their names; through its parts the host memory (memory), the files (copy-files) and the
//       accounting by tenant (shares).
// Threads: the main loop only, except refresh_disk() and disk(), which are for any thread. The main loop never accesses
//          the file system: it allocates memory for a block and lets the thread of a call read into it; it queues
//          writes, and poll_disk() applies their results.
// Invariants: every copy has a name, and every name has a copy. All host memory counts against the budget: rows,
//             entries, and memory that a read or a write still uses. Between two calls the sum does not exceed the
//             budget, except for memory that the disk has not released yet. A copy whose file another process deletes
//             is erased unless it is in host memory.

#include "server-blocks-copy-files.h"
#include "server-blocks-copy.h"
#include "server-blocks-disk.h"
#include "server-blocks-fence.h"
#include "server-blocks-memory.h"
#include "server-blocks-shares.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

class server_blocks_store {
public:
    struct options {
        size_t      ram_bytes = 0; // host memory for everything
        size_t      row_bytes = 0; // of one row, K and V of all layers
        uint64_t    model  = 0;    // server_blocks_model_id(), 0: not available
        uint64_t    layout = 0;    // llama_kv_block_layout()
        ggml_backend_buffer_type_t host_buft = nullptr; // pinned memory of the device, or nullptr
        std::map<int32_t, int32_t> key_channels; // layer -> channels of its keys; files with other bounds are refused
        std::string disk;          // --evoke-disk, "" = none
    };

    // `fence`: of the copies between cells and host memory; must outlive the store.
    explicit server_blocks_store(server_blocks_fence & fence) : fence(fence), files(fence) {}

    // Writes what is not on disk yet, for a few seconds at most. The context may be gone.
    ~server_blocks_store();

    // Prepares the store for a model. Copies of another model are forgotten; their files stay. Returns false if the
    // host refuses the memory. May be called again, after the server slept.
    bool configure(const options & options);

    // ---- names

    // Returns the copy of a name, or nullptr.
    const server_blocks_copy * find(const std::string & tenant, const std::string & name) const;

    // Returns the key of a name, or nullptr.
    const server_blocks_key * find_key(const std::string & tenant, const std::string & name) const;

    std::vector<std::string> names_of(const std::string & tenant) const;

    // Gives a copy one more name; the name of another copy moves. Erases a copy that has no name left.
    void label(const server_blocks_owner & owner, const server_blocks_key & key);

    // Removes a name. Erases the copy and its file if it was the last one. Returns the number of names removed, 0 or 1.
    size_t drop(const std::string & tenant, const std::string & name);

    // ---- copies

    // Returns the copy of a key, or nullptr.
    const server_blocks_copy * find(const server_blocks_key & key) const;

    // Returns the latest copy of a range of a text, whatever its rows saw, or nullptr.
    const server_blocks_copy * find_latest(const std::string & tenant, uint64_t hash, llama_pos p0, llama_pos p1) const;

    // Calls `visit(key, copy)` for each copy of a tenant.
    template <typename Visit> void for_each(const std::string & tenant, Visit visit) const {
        for (auto it = copies.lower_bound({ tenant, 0, 0, 0, 0 }); it != copies.end() && it->first.tenant == tenant; ++it) {
            visit(it->first, it->second);
        }
    }

    // Returns whether a copy of exactly these rows exists.
    bool has_rows(const server_blocks_key & key, const server_blocks_row_list & rows) const;

    // Returns whether the copy of a key is only on disk and another process has deleted its file.
    bool is_file_missing(const server_blocks_key & key) const;

    // Erases the copy of a key if its file is missing.
    void erase_if_file_missing(const server_blocks_key & key);

    // Makes a copy the most recently used one.
    void mark_used(const server_blocks_key & key);

    // Adds a copy in memory of allocate(), or replaces the rows of the copy of its key, and gives it the owner's name.
    void insert(const server_blocks_owner & owner, const server_blocks_key & key, server_blocks_copy copy);

    // Replaces the key bounds of a copy, if there is memory for them.
    void set_bounds(const server_blocks_key & key, server_blocks_bounds bounds);

    // Returns the version of the reports of a tenant's copies, after `changed_in` of each is brought up to date.
    uint64_t update_versions(const std::string & tenant);

    // Returns the bytes of host memory that the rows of [p0, p1) take, with their tokens, positions and cells.
    size_t rows_bytes(llama_pos p0, llama_pos p1) const;

    size_t row_bytes() const { return config.row_bytes; }

    // ---- room

    // Allows the calls below to wait for the disk: for 100 ms from now.
    void begin_call();

    // Returns `row_bytes` of memory for a copy of `tenant` that takes `bytes` in all, or nullptr. Gives up copies for it,
    // the least recently used first of each of shares.donors(), but none of `keep`.
    uint8_t * allocate(const std::string & tenant, size_t row_bytes, size_t bytes, const server_blocks_key_set & keep);

    // Takes back memory of allocate() that no copy was made in.
    void release(uint8_t * data) { memory.release(data); }

    // Reserves memory for the copies of a plan, all or none: `row_sizes` are the bytes of the rows of each, `bytes` what
    // all take. allocate() hands the memory out until cancel_reservation(). Returns false when there is not enough, and
    // then gives up no copy if it can tell so in advance.
    bool reserve(const std::string & tenant, const std::vector<size_t> & row_sizes, size_t bytes, const server_blocks_key_set & keep);
    void cancel_reservation() { memory.cancel_reservation(); }

    size_t used()   const { return shares.bytes() + memory.pending_bytes(); }
    size_t budget() const { return config.ram_bytes; }

    // Returns how many copies were given up since the process started because there was no room for them.
    uint64_t dropped() const { return n_dropped; }

    bool   pinned() const { return memory.pinned(); }

    // ---- disk

    // Applies what the disk has done since the last call: writes, reads, files that appeared or disappeared.
    void poll_disk();

    // Any thread, except the main loop: finds files that other processes wrote or deleted.
    void refresh_disk();

    // Any thread: the folder. For reads, waits and scans that a call executes in its own thread.
    server_blocks_disk & disk() { return files.disk(); }
    const server_blocks_disk & disk() const { return files.disk(); }

    // Returns why there is no disk although --evoke-disk names one, or "".
    const std::string & disk_error() const { return files.error(); }

    // Returns the state of the disk for replies, null without --evoke-disk.
    json disk_json() const;

    // Returns the pending read of a copy that is only on disk, which the caller's thread must execute. Starts one if
    // there is none. Returns nullptr if the copy needs none or its file is missing, and sets `no_memory` if host memory
    // has no room.
    std::shared_ptr<server_blocks_read> begin_read(const server_blocks_key & key, const server_blocks_key_set & keep, bool & no_memory);

    // Queues a write of a copy whose file is missing or stale, and returns the write in progress, or nullptr.
    // `insist`: even if the disk failed a moment ago.
    std::shared_ptr<server_blocks_write> begin_write(const server_blocks_key & key, bool insist);

    // Releases the memory of copies whose files are current, as far as no write needs it.
    void release_rows(const server_blocks_key_set & keys);

    // Makes the entries of copies that are only on disk fit their part of the budget: drops the key bounds of the oldest
    // copies of the largest share first, then erases such copies with their files.
    void trim_index();

private:
    using copy_map = std::map<server_blocks_key, server_blocks_copy>;
    using copy_it  = copy_map::iterator;
    using share    = server_blocks_shares::share;

    // server-blocks-store.cpp
    void   erase(copy_it it);
    void   discard_rows(copy_it it);
    void   on_labels_changed(copy_it it);
    size_t rows_bytes(const llama_kv_block & kv) const { return rows_bytes(kv.p0, kv.p1); }
    size_t free_bytes() const { return config.ram_bytes - std::min(config.ram_bytes, used()); }
    bool   may_fit(const std::string & tenant, const std::vector<size_t> & row_sizes, size_t bytes, const server_blocks_key_set & keep) const;
    bool   make_space(const std::string & tenant, size_t bytes, const server_blocks_key_set & keep);
    bool   free_one(const std::string & tenant, size_t bytes, const server_blocks_key_set & keep);
    uint8_t * allocate_rows(const std::string & tenant, size_t bytes, const server_blocks_key_set & keep);

    // server-blocks-tiers.cpp
    void open_disk();
    void forget_all();
    void poll_read(copy_it it);
    void poll_lost_files();
    void poll_memory();
    void add_new_files();
    void add_new_file(const server_blocks_head & head, uint64_t last_used);
    bool is_valid(const server_blocks_head & head) const;
    bool are_valid(const server_blocks_bounds & bounds) const;
    void write(copy_it it, bool insist = false) { files.write(it->first, it->second, insist); }
    void write_ahead();
    void release_rows(copy_it it);
    bool release_one(const std::vector<const share *> & from, const server_blocks_key_set & keep);
    bool wait_for_write(const std::vector<const share *> & from, const server_blocks_key_set & keep);

    server_blocks_fence    & fence;
    options                  config;
    server_blocks_memory     memory;
    server_blocks_copy_files files;
    server_blocks_shares     shares;
    copy_map                 copies;
    std::map<std::pair<std::string, std::string>, server_blocks_key> keys; // (tenant, name) -> key
    uint64_t clock     = 0; // last value of last_used
    uint64_t version   = 0; // of the reports of copies
    uint64_t n_dropped = 0; // copies given up because memory was short
    int64_t  deadline_ms = 0; // until when a call may wait for the disk
};
