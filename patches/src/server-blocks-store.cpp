// the store: copies by what they are, their names, and which of them go when memory is short

#include "server-blocks.h"

#include <algorithm>

uint64_t server_blocks::mix(uint64_t h, uint64_t v) {
    h = (h ^ (v + 0x9e3779b97f4a7c15ull))*0xbf58476d1ce4e5b9ull;
    h ^= h >> 29;
    h *= 0x94d049bb133111ebull;
    return h ^ (h >> 32);
}

std::vector<uint64_t> server_blocks::prefix_hashes(const llama_tokens & tokens, uint64_t adapters) {
    std::vector<uint64_t> res(tokens.size() + 1);
    res[0] = 0x6576686b65ull ^ adapters;
    for (size_t i = 0; i < tokens.size(); ++i) {
        res[i + 1] = mix(res[i], (uint32_t) tokens[i]);
    }
    return res;
}

// host memory the rows of a block take, with their tokens, positions, places and cells
size_t server_blocks::rows_cost(const llama_kv_block & kv) const {
    return (kv.p1 - kv.p0)*(row_size + 2*sizeof(llama_token) + 3*sizeof(llama_pos) + sizeof(uint32_t));
}

// all that a new copy of [p0, p1) of a slot takes
size_t server_blocks::cost(int id, llama_pos p0, llama_pos p1) const {
    llama_kv_block kv;
    kv.p0 = p0;
    kv.p1 = p1;
    return rows_cost(kv) + key_bounds_size(id) + META + state[id].history.of(p0, p1).size()*sizeof(server_blocks_rows);
}

// where the rows of [p0, p1) of a slot are kept, with what they were made from
server_blocks::key_t server_blocks::key_of(const std::string & tenant, int id, const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1) const {
    return { tenant, hashes[p1], p0, p1, server_blocks_visibility_of(state[id].history.of(p0, p1)) };
}

bool server_blocks::has_copy(const key_t & key, int id) const {
    const auto it = store.find(key);
    return it != store.end() && it->second.rows == state[id].history.of(std::get<2>(key), std::get<3>(key));
}

//
// who has what
//

void server_blocks::enter(block_it it) {
    const auto & block = it->second;
    auto & share = shares[std::get<0>(it->first)];
    share.lru[block.in_ram()][block.used] = it->first;
    share.bytes[block.in_ram()] += block.bytes;
    ram_used   += block.bytes;
    index_used += block.in_ram() ? 0 : block.bytes;
}

void server_blocks::leave(block_it it) {
    const auto & block = it->second;
    const auto   found = shares.find(std::get<0>(it->first));
    auto & share = found->second;
    share.lru[block.in_ram()].erase(block.used);
    share.bytes[block.in_ram()] -= block.bytes;
    ram_used   -= block.bytes;
    index_used -= block.in_ram() ? 0 : block.bytes;
    if (share.lru[0].empty() && share.lru[1].empty()) {
        shares.erase(found);
    }
}

// it was used just now
void server_blocks::use(const key_t & key, saved & block) {
    auto & lru = shares.at(std::get<0>(key)).lru[block.in_ram()];
    auto node = lru.extract(block.used);
    node.key() = block.used = ++clock;
    lru.insert(std::move(node));
    if (block.on_disk) {
        disk.touch(file_of(key, block));
    }
}

// tenants by what they have in host memory, or by what is kept there of blocks that are only on disk
std::vector<server_blocks::tenant_share *> server_blocks::largest_first(bool in_ram) {
    std::vector<tenant_share *> res;
    for (auto & [tenant, share] : shares) {
        res.push_back(&share);
    }
    std::sort(res.begin(), res.end(), [&](const auto * a, const auto * b) { return a->bytes[in_ram] > b->bytes[in_ram]; });
    return res;
}

// Those whose copies may go when a tenant wants this much more, the largest first: itself, and who has more than it
// would have. No tenant takes anything from one that has less.
std::vector<server_blocks::tenant_share *> server_blocks::must_give(const std::string & tenant, size_t bytes) {
    const auto total = [](const tenant_share & share) { return share.bytes[0] + share.bytes[1]; };
    const auto own   = shares.find(tenant);
    const size_t wanted = bytes + (own == shares.end() ? 0 : total(own->second));
    std::vector<tenant_share *> res;
    for (auto it = shares.begin(); it != shares.end(); ++it) {
        if (it != own && total(it->second) > wanted) {
            res.push_back(&it->second);
        }
    }
    std::sort(res.begin(), res.end(), [&](const auto * a, const auto * b) { return total(*a) > total(*b); });
    if (own != shares.end()) {
        res.push_back(&own->second);
    }
    return res;
}

//
// names
//

server_blocks::saved * server_blocks::find(const std::string & tenant, const std::string & name) {
    const auto it = labels.find({ tenant, name });
    return it == labels.end() ? nullptr : &store.at(it->second);
}

bool server_blocks::matches(const saved & block, const llama_tokens & tokens, const std::vector<uint64_t> & hashes, bool force) const {
    const auto p0 = (size_t) block.kv.p0;
    const auto p1 = (size_t) block.kv.p1;
    if (p1 > tokens.size() || (!force && block.prefix_hash != hashes[p0])) {
        return false;
    }
    return block.in_ram() ? std::equal(block.tokens.begin(), block.tokens.end(), tokens.begin() + p0) : block.hash == hashes[p1];
}

// its names are others than before: the file has to be told
void server_blocks::rename(block_it it) {
    auto & block = it->second;
    block.renamed = true;
    block.told    = -1;
    if (block.on_disk && !block.in_ram()) {
        mislabelled.insert(it->first);
        write(it);
    }
}

void server_blocks::label(const saver & by, const key_t & key) {
    const auto it = labels.find({ by.tenant, by.name });
    if (it != labels.end() && it->second != key) {
        drop(by.tenant, by.name); // a name moves; what nothing names any more is gone
    }
    labels[{ by.tenant, by.name }] = key;
    const auto block = store.find(key);
    const auto found = block->second.labels.find(by.name);
    if (found == block->second.labels.end() || found->second != by.session) {
        block->second.labels[by.name] = by.session;
        rename(block);
    }
}

size_t server_blocks::drop(const std::string & tenant, const std::string & name) {
    const auto it = labels.find({ tenant, name });
    if (it == labels.end()) {
        return 0;
    }
    const auto block = store.find(it->second);
    labels.erase(it);
    block->second.labels.erase(name);
    if (block->second.labels.empty()) {
        erase(block);
    } else {
        rename(block);
    }
    return 1;
}

// its memory goes, and it leaves its tenant's share; a file stays
void server_blocks::give_up_rows(block_it it) {
    fence();
    settle_write(it);
    auto & block = it->second;
    leave(it);
    const bool running = block.writing && !disk.cancel(*block.writing);
    if (block.writing && !running) {
        settle_write(it);
    }
    if (block.reading) { // what was set aside for it is counted until the disk is done with it
        limbo.push_back({ nullptr, block.reading, block.reading->data, rows_cost(block.kv) });
    }
    if (running) {
        const size_t bytes = block.in_ram() ? rows_cost(block.kv) : 0;
        limbo.push_back({ block.writing, nullptr, block.kv.data, bytes });
        ram_used += bytes;
    } else if (block.in_ram()) {
        arena.give(block.kv.data);
    }
    block.kv.data = nullptr;
    block.writing.reset();
    block.reading.reset();
    busy.erase(it->first);
}

// the copy is no more, on disk neither
void server_blocks::erase(block_it it) {
    auto & block = it->second;
    for (const auto & [name, session] : block.labels) {
        labels.erase({ std::get<0>(it->first), name });
    }
    give_up_rows(it);
    if (block.on_disk) {
        const auto file = file_of(it->first, block);
        files.erase(file);
        disk.remove(file);
    }
    mislabelled.erase(it->first);
    store.erase(it);
}

//
// room
//

// Copies go until `bytes` fit, those of must_give(), least recently used first. False if they never will (nothing
// changed), or if they do not because the disk still reads or writes what would have to go.
bool server_blocks::make_space(const std::string & tenant, size_t bytes, const std::set<key_t> & keep) {
    if (!aside.empty()) {
        return true; // of a plan, which has it already
    }
    settle();
    size_t fixed = 0;
    for (const auto & key : keep) {
        const auto it = store.find(key);
        fixed += it == store.end() ? 0 : it->second.bytes;
    }
    // the tenant can have what is free, what it has and does not need now, and what others have beyond what it would have
    const auto   own    = shares.find(tenant);
    const size_t before = own == shares.end() ? 0 : own->second.bytes[0] + own->second.bytes[1];
    size_t possible = ram_left() + before - std::min(before, fixed);
    for (const auto * share : must_give(tenant, bytes)) {
        const size_t has = share->bytes[0] + share->bytes[1];
        possible += has > before + bytes ? has - before - bytes : 0;
    }
    if (bytes > possible) {
        return false;
    }
    while (ram_used + bytes > ram_budget) {
        if (!free_some(tenant, bytes, keep)) {
            return false;
        }
    }
    return true;
}

// memory of a copy that is on disk too; else of one the disk takes now; else of one that is lost
bool server_blocks::free_some(const std::string & tenant, size_t bytes, const std::set<key_t> & keep) {
    const auto from = must_give(tenant, bytes);
    if (release_one(from, keep) || wait_for_write(from, keep)) {
        return true;
    }
    for (const auto * share : must_give(tenant, bytes)) {
        for (const auto & [used, key] : share->lru[1]) {
            const auto it = store.find(key);
            if (!keep.count(key) && (!it->second.on_disk || it->second.redone)) { // others are only being written anew
                n_dropped++;
                erase(it);
                return true;
            }
        }
    }
    return false;
}

// contiguous memory, if need be at the cost of old copies; nullptr if that does not help either
uint8_t * server_blocks::take(const std::string & tenant, size_t bytes, const std::set<key_t> & keep) {
    const auto promised = aside.find(bytes);
    if (promised != aside.end() && bytes_aside > 0) {
        uint8_t * p = promised->second;
        aside.erase(promised);
        return p;
    }
    uint8_t * p = arena.take(bytes);
    while (!p && free_some(tenant, bytes, keep)) {
        p = arena.take(bytes);
    }
    return p;
}

// Save [p0, p1) under a name. The rows of one decode are copied once; rows that were decoded again replace a copy of
// the same tokens and visibility. `hashes` are the prefix_hashes of `tokens`.
bool server_blocks::put(const saver & by, int id, const llama_tokens & tokens, const std::vector<uint64_t> & hashes,
                        llama_pos p0, llama_pos p1, std::set<key_t> keep) {
    const key_t key = key_of(by.tenant, id, hashes, p0, p1);
    keep.insert(key);
    auto it = store.find(key);
    if (it != store.end() && !it->second.in_ram() && !it->second.reading && !disk.holds(file_of(key, it->second))) {
        erase(it); // somebody deleted its file: these rows have no copy any more
    }
    if (has_copy(key, id)) {
        it = store.find(key);
        use(key, it->second);
        keep_bounds(it, id);
        label(by, key);
        return true;
    }
    saved block;
    block.rows = state[id].history.of(p0, p1);
    const size_t bytes = cost(id, p0, p1);
    uint8_t * data = make_space(by.tenant, bytes, keep) ? take(by.tenant, (p1 - p0)*row_size, keep) : nullptr;
    if (!data || !llama_kv_block_save(ctx, id, p0, p1, data, block.kv)) {
        if (data) {
            arena.give(data);
        }
        return false;
    }
    copying = true;
    block.tokens.assign(tokens.begin() + p0, tokens.begin() + p1);
    block.prefix_hash = hashes[p0];
    block.hash   = hashes[p1];
    block.bounds = key_bounds(id, p0, p1);
    block.bytes  = rows_cost(block.kv) + block.index_bytes();
    block.used   = ++clock;
    it = store.find(key);
    if (it != store.end()) {
        give_up_rows(it);
        block.labels  = std::move(it->second.labels);
        block.on_disk = it->second.on_disk;
        block.redone  = it->second.on_disk;
        block.renamed = it->second.renamed;
        it->second = std::move(block);
    } else {
        it = store.emplace(key, std::move(block)).first;
    }
    enter(it);
    label(by, key);
    write_ahead();
    return true;
}
