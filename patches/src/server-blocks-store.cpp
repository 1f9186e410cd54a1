// The store: copies by key, their names, and which of them are given up when memory is short.

#include "server-blocks-store.h"

#include <algorithm>

static constexpr int64_t WAIT_MS = 100; // how long the main loop may wait for a write before a copy is given up

size_t server_blocks_store::rows_bytes(llama_pos p0, llama_pos p1) const {
    return (p1 - p0)*(config.row_bytes + 2*sizeof(llama_token) + 3*sizeof(llama_pos) + sizeof(uint32_t));
}

//
// names
//

const server_blocks_key * server_blocks_store::find_key(const std::string & tenant, const std::string & name) const {
    const auto it = keys.find({ tenant, name });
    return it == keys.end() ? nullptr : &it->second;
}

const server_blocks_copy * server_blocks_store::find(const std::string & tenant, const std::string & name) const {
    const auto * key = find_key(tenant, name);
    return key ? &copies.at(*key) : nullptr;
}

std::vector<std::string> server_blocks_store::names_of(const std::string & tenant) const {
    std::vector<std::string> res;
    for (auto it = keys.lower_bound({ tenant, "" }); it != keys.end() && it->first.first == tenant; ++it) {
        res.push_back(it->first.second);
    }
    return res;
}

void server_blocks_store::label(const server_blocks_owner & owner, const server_blocks_key & key) {
    const auto it = keys.find({ owner.tenant, owner.name });
    if (it != keys.end() && it->second != key) {
        drop(owner.tenant, owner.name);
    }
    keys[{ owner.tenant, owner.name }] = key;
    const auto copy  = copies.find(key);
    const auto label = copy->second.labels.find(owner.name);
    if (label == copy->second.labels.end() || label->second != owner.session) {
        copy->second.labels[owner.name] = owner.session;
        on_labels_changed(copy);
    }
}

size_t server_blocks_store::drop(const std::string & tenant, const std::string & name) {
    const auto it = keys.find({ tenant, name });
    if (it == keys.end()) {
        return 0;
    }
    const auto copy = copies.find(it->second);
    keys.erase(it);
    copy->second.labels.erase(name);
    if (copy->second.labels.empty()) {
        erase(copy);
    } else {
        on_labels_changed(copy);
    }
    return 1;
}

// Has the new names written into the file of the copy.
void server_blocks_store::on_labels_changed(copy_it it) {
    auto & copy = it->second;
    copy.labels_stale  = true;
    copy.reported_tier = -1;
    if (copy.on_disk && !copy.in_ram()) {
        files.mark_outdated(it->first);
        write(it);
    }
}

//
// copies
//

const server_blocks_copy * server_blocks_store::find(const server_blocks_key & key) const {
    const auto it = copies.find(key);
    return it == copies.end() ? nullptr : &it->second;
}

const server_blocks_copy * server_blocks_store::find_latest(const std::string & tenant, uint64_t hash, llama_pos p0, llama_pos p1) const {
    const server_blocks_copy * res = nullptr;
    for (auto it = copies.lower_bound({ tenant, hash, p0, p1, 0 }); it != copies.end(); ++it) {
        const auto & key = it->first;
        if (key.tenant != tenant || key.hash != hash || key.p0 != p0 || key.p1 != p1) {
            break;
        }
        res = !res || res->last_used < it->second.last_used ? &it->second : res;
    }
    return res;
}

bool server_blocks_store::has_rows(const server_blocks_key & key, const server_blocks_row_list & rows) const {
    const auto * copy = find(key);
    return copy && copy->rows == rows;
}

bool server_blocks_store::is_file_missing(const server_blocks_key & key) const {
    const auto * copy = find(key);
    return copy && files.is_missing(key, *copy);
}

void server_blocks_store::erase_if_file_missing(const server_blocks_key & key) {
    if (is_file_missing(key)) {
        erase(copies.find(key));
    }
}

void server_blocks_store::mark_used(const server_blocks_key & key) {
    auto & copy = copies.at(key);
    shares.mark_used(key, copy, ++clock);
    files.mark_used(key, copy);
}

void server_blocks_store::insert(const server_blocks_owner & owner, const server_blocks_key & key, server_blocks_copy copy) {
    copy.bytes     = rows_bytes(copy.kv) + copy.index_bytes();
    copy.last_used = ++clock;
    auto it = copies.find(key);
    if (it == copies.end()) {
        it = copies.emplace(key, std::move(copy)).first;
    } else {
        discard_rows(it);
        copy.labels       = std::move(it->second.labels);
        copy.on_disk      = it->second.on_disk;
        copy.rows_stale   = it->second.on_disk;
        copy.labels_stale = it->second.labels_stale;
        it->second = std::move(copy);
    }
    shares.add(key, it->second);
    label(owner, key);
    write_ahead();
}

void server_blocks_store::set_bounds(const server_blocks_key & key, server_blocks_bounds bounds) {
    auto & copy = copies.at(key);
    if (used() + memory.reserved_bytes() - copy.bounds.size() + bounds.size() > config.ram_bytes) {
        return;
    }
    shares.remove(key, copy);
    copy.bytes += bounds.size() - copy.bounds.size();
    copy.bounds = std::move(bounds);
    copy.labels_stale = true;
    shares.add(key, copy);
}

uint64_t server_blocks_store::update_versions(const std::string & tenant) {
    const uint64_t next = version + 1;
    for (auto it = copies.lower_bound({ tenant, 0, 0, 0, 0 }); it != copies.end() && it->first.tenant == tenant; ++it) {
        auto & copy = it->second;
        const int tier = 2*copy.in_ram() + copy.on_disk;
        if (tier != copy.reported_tier) {
            copy.reported_tier = tier;
            copy.changed_in    = version = next;
        }
    }
    return version;
}

// Removes the copy from its tenant's share and releases the memory of its rows, as soon as the disk no longer uses it.
// The file stays.
void server_blocks_store::discard_rows(copy_it it) {
    fence.wait();
    const auto & key  = it->first;
    auto &       copy = it->second;
    files.poll_write(key, copy);
    shares.remove(key, copy);
    if (copy.reading) {
        auto read = files.end_read(key, copy);
        uint8_t * data = read->data;
        memory.remove_pending(rows_bytes(copy.kv)); // begin_read() has counted it
        memory.release_after(std::move(read), data, rows_bytes(copy.kv));
    }
    if (auto running = files.cancel_write(key, copy)) {
        memory.release_after(std::move(running), copy.kv.data, copy.in_ram() ? rows_bytes(copy.kv) : 0);
    } else if (copy.in_ram()) {
        memory.release(copy.kv.data);
    }
    copy.kv.data = nullptr;
}

// Removes the copy, its names and its file.
void server_blocks_store::erase(copy_it it) {
    auto & copy = it->second;
    for (const auto & label : copy.labels) {
        keys.erase({ it->first.tenant, label.first });
    }
    discard_rows(it);
    files.remove(it->first, copy);
    copies.erase(it);
}

//
// room
//

void server_blocks_store::begin_call() {
    deadline_ms = ggml_time_ms() + WAIT_MS;
}

uint8_t * server_blocks_store::allocate(const std::string & tenant, size_t row_bytes, size_t bytes, const server_blocks_key_set & keep) {
    return make_space(tenant, bytes, keep) ? allocate_rows(tenant, row_bytes, keep) : nullptr;
}

bool server_blocks_store::reserve(const std::string & tenant, const std::vector<size_t> & row_sizes, size_t bytes, const server_blocks_key_set & keep) {
    if (!may_fit(tenant, row_sizes, bytes, keep) || !make_space(tenant, bytes, keep)) {
        return false;
    }
    std::vector<std::pair<size_t, uint8_t *>> parts;
    for (const size_t size : row_sizes) {
        uint8_t * data = allocate_rows(tenant, size, keep);
        if (!data) {
            for (const auto & part : parts) {
                memory.release(part.second);
            }
            return false;
        }
        parts.push_back({ size, data });
    }
    memory.reserve(parts, bytes);
    return true;
}

// Returns whether there would be contiguous memory for these rows if every copy that may be given up were released. If
// not, giving up copies would be in vain.
bool server_blocks_store::may_fit(const std::string & tenant, const std::vector<size_t> & row_sizes, size_t bytes, const server_blocks_key_set & keep) const {
    if (row_sizes.empty()) {
        return true;
    }
    std::set<const uint8_t *> freeable;
    for (const auto * share : shares.donors(tenant, bytes)) {
        for (const auto & item : share->by_age[server_blocks_shares::IN_RAM]) {
            const auto & copy = copies.at(item.second);
            if (!copy.writing && !copy.reading && !keep.count(item.second)) {
                freeable.insert(copy.kv.data);
            }
        }
    }
    return memory.fits(row_sizes, freeable);
}

// Gives up copies of donors(), the least recently used first, until `bytes` fit the budget. Returns false if they never
// will (then nothing has changed), or if they do not because the disk still uses memory that would have to be freed.
bool server_blocks_store::make_space(const std::string & tenant, size_t bytes, const server_blocks_key_set & keep) {
    if (memory.has_reservation()) {
        return true; // the reservation contains these bytes
    }
    poll_disk();
    size_t kept_bytes = 0;
    for (const auto & key : keep) {
        const auto * copy = find(key);
        kept_bytes += copy ? copy->bytes : 0;
    }
    // Available are the free bytes, the tenant's own bytes except those of `keep`, and of each larger share the bytes by
    // which it exceeds what the tenant would have.
    const size_t own = shares.bytes_of(tenant);
    size_t possible  = free_bytes() + own - std::min(own, kept_bytes);
    for (const auto * share : shares.donors(tenant, bytes)) {
        possible += share->total() > own + bytes ? share->total() - own - bytes : 0;
    }
    if (bytes > possible) {
        return false;
    }
    while (used() + bytes > config.ram_bytes) {
        if (!free_one(tenant, bytes, keep)) {
            return false;
        }
    }
    return true;
}

// Frees the memory of one copy: of one that is on disk too, else of one that is written to disk now, else of one that is
// given up. Returns false if there is none.
bool server_blocks_store::free_one(const std::string & tenant, size_t bytes, const server_blocks_key_set & keep) {
    const auto donors = shares.donors(tenant, bytes);
    if (release_one(donors, keep) || wait_for_write(donors, keep)) {
        return true;
    }
    for (const auto * share : shares.donors(tenant, bytes)) {
        for (const auto & item : share->by_age[server_blocks_shares::IN_RAM]) {
            const auto it = copies.find(item.second);
            if (!keep.count(item.second) && (!it->second.on_disk || it->second.rows_stale)) { // others only wait for a write of their names
                n_dropped++;
                erase(it);
                return true;
            }
        }
    }
    return false;
}

// Returns contiguous memory, and gives up old copies until there is some. Returns nullptr if that is not enough.
uint8_t * server_blocks_store::allocate_rows(const std::string & tenant, size_t bytes, const server_blocks_key_set & keep) {
    uint8_t * data = memory.allocate(bytes);
    while (!data && free_one(tenant, bytes, keep)) {
        data = memory.allocate(bytes);
    }
    return data;
}
