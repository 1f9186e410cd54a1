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

// all that a new block of n tokens takes
size_t server_blocks::cost(size_t n_tokens, int id) const {
    llama_kv_block kv;
    kv.p1 = (llama_pos) n_tokens;
    return rows_cost(kv) + key_bounds_size(id) + META;
}

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

// it was used just now
void server_blocks::use(saved & block) {
    auto node = lru[block.in_ram()].extract(block.used);
    const key_t key = node.mapped();
    node.key() = block.used = ++clock;
    lru[block.in_ram()].insert(std::move(node));
    if (block.on_disk) {
        disk.touch(file_of(key, block));
    }
}

void server_blocks::label(const std::string & tenant, const std::string & name, const key_t & key) {
    const auto it = labels.find({ tenant, name });
    if (it != labels.end() && it->second != key) {
        drop(tenant, name); // a name moves; what nothing names any more is gone
    }
    labels[{ tenant, name }] = key;
    auto & block = store.at(key);
    if (block.labels.insert(name).second) {
        block.renamed = true;
        block.told    = -1;
    }
}

// the copy is no more, on disk neither
void server_blocks::erase(block_it it) {
    fence();
    settle_write(it);
    auto & block = it->second;
    for (const auto & name : block.labels) {
        labels.erase({ std::get<0>(it->first), name });
    }
    lru[block.in_ram()].erase(block.used);
    index_used -= block.in_ram() ? 0 : block.bytes;
    if (block.on_disk) {
        const auto file = file_of(it->first, block);
        files.erase(file);
        disk.remove(file);
    }
    const bool running = block.writing && !disk.cancel(*block.writing);
    if (block.writing && !running && disk.state(*block.writing) == server_blocks_write::DONE) { // just now
        disk.remove(server_blocks_file_name(block.writing->head));
    }
    size_t bytes = block.bytes;
    if (block.reading || running) {
        const size_t n = block.reading ? rows_cost(block.kv) : bytes;
        limbo.push_back({ block.writing, block.reading, block.reading ? block.reading->data : block.kv.data, n });
        bytes -= block.reading ? 0 : bytes;
    } else if (block.in_ram()) {
        arena.give(block.kv.data);
    }
    ram_used -= bytes;
    busy.erase(it->first);
    store.erase(it);
}

size_t server_blocks::drop(const std::string & tenant, const std::string & name) {
    const auto it = labels.find({ tenant, name });
    if (it == labels.end()) {
        return 0;
    }
    const auto block = store.find(it->second);
    labels.erase(it);
    block->second.labels.erase(name);
    block->second.renamed = true;
    block->second.told    = -1;
    if (block->second.labels.empty()) {
        erase(block);
    }
    return 1;
}

// least recently used blocks go until `bytes` fit; false (nothing changed) if they never will, or if they
// do not because the disk still reads or writes what would have to go
bool server_blocks::make_space(size_t bytes, const std::set<key_t> & keep) {
    if (!aside.empty()) {
        return true; // of a plan, which has it already
    }
    settle();
    size_t fixed = 0;
    for (const auto & key : keep) {
        const auto it = store.find(key);
        fixed += it == store.end() ? 0 : it->second.bytes;
    }
    if (fixed + bytes > ram_budget) {
        return false;
    }
    while (ram_used + bytes > ram_budget) {
        if (!free_some(keep)) {
            return false;
        }
    }
    return true;
}

// memory of the least recently used copy that is on disk too; else of one the disk takes now; else of one that is lost
bool server_blocks::free_some(const std::set<key_t> & keep) {
    if (release_one(keep) || wait_for_write(keep)) {
        return true;
    }
    for (const auto & [used, key] : lru[1]) {
        const auto it = store.find(key);
        if (!keep.count(key) && !it->second.on_disk) { // those are only being written anew
            n_dropped++;
            erase(it);
            return true;
        }
    }
    return false;
}

// contiguous memory, if need be at the cost of old copies; nullptr if that does not help either
uint8_t * server_blocks::take(size_t bytes, const std::set<key_t> & keep) {
    const auto promised = aside.find(bytes);
    if (promised != aside.end() && bytes_aside > 0) {
        uint8_t * p = promised->second;
        aside.erase(promised);
        return p;
    }
    uint8_t * p = arena.take(bytes);
    while (!p && free_some(keep)) {
        p = arena.take(bytes);
    }
    return p;
}

// save [p0, p1) under a name; rows that already have a copy are not copied again. `hashes` are the prefix_hashes of `tokens`
bool server_blocks::put(const std::string & tenant, const std::string & name, int id, const llama_tokens & tokens,
                        const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1, const std::set<key_t> & keep) {
    const key_t key { tenant, hashes[p1], p0, p1 };
    auto it = store.find(key);
    if (it != store.end() && !it->second.in_ram() && !it->second.reading && !disk.holds(file_of(key, it->second))) {
        erase(it); // somebody deleted its file: these rows have no copy any more
        it = store.end();
    }
    if (it != store.end()) {
        use(it->second);
        keep_bounds(it->second, id);
        label(tenant, name, key);
        return true;
    }
    const size_t bytes = cost(p1 - p0, id);
    uint8_t * data = make_space(bytes, keep) ? take((p1 - p0)*row_size, keep) : nullptr;
    saved block;
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
    block.bytes = bytes;
    block.used  = ++clock;
    lru[1][block.used] = key;
    ram_used += bytes;
    store.emplace(key, std::move(block));
    label(tenant, name, key);
    write_ahead();
    return true;
}
