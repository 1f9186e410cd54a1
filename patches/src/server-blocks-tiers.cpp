// what of the store is in host memory and what on disk; the files themselves are server-blocks-disk's
//
// The main loop never reads or writes a file. It sets memory aside for a block and lets the thread of
// the call read into it; it queues a write and looks later what has become of it. All of that memory
// counts against the budget meanwhile.

#include "server-blocks-flags.h"
#include "server-blocks-json.h"

#include "log.h"

#include <algorithm>

static constexpr int64_t REST_MS      = 2000;  // after a failed write
static constexpr int     FLUSH_MS     = 5000;  // for what is not on disk yet when the server stops
static constexpr int     SPILL_MS     = 60000; // for what a client wants on disk
static constexpr size_t  INDEX_SHARE  = 4;     // 1/4 of the budget at most is for knowing what is on disk
static constexpr size_t  AHEAD_SHARE  = 4;     // 1/4 of the budget is kept free or on disk

void server_blocks::open_disk(const common_params & params) {
    const std::string & option = server_blocks_flags::of(params).disk;
    if (option.empty() || disk.is_open()) {
        return;
    }
    const int64_t t_start = ggml_time_ms();
    disk_why = disk.open(option, model_id, llama_kv_block_layout(ctx));
    if (!disk_why.empty()) {
        LOG_WRN("evoke: saved blocks stay in host memory, --evoke-disk: %s\n", disk_why.c_str());
        return;
    }
    settle();
    LOG_INF("evoke: %zu blocks found on disk, %d ms\n", files.size(), (int) (ggml_time_ms() - t_start));
}

server_blocks::~server_blocks() {
    if (!disk.is_open()) {
        return;
    }
    copying = false; // the context is gone, and its copies are over
    std::map<uint64_t, block_it> newest; // by last use, in memory or not: the file may not have the names
    for (auto it = store.begin(); it != store.end(); ++it) {
        newest[it->second.used] = it;
    }
    const int64_t until = ggml_time_ms() + FLUSH_MS;
    for (;;) { // a file that was being written when its block got another name is written once more
        std::vector<std::shared_ptr<server_blocks_write>> writes;
        for (auto it = newest.rbegin(); it != newest.rend(); ++it) { // the newest first: time may be short
            settle_write(it->second);
            write(it->second);
            if (it->second->second.writing) {
                writes.push_back(it->second->second.writing);
            }
        }
        const int64_t left = until - ggml_time_ms();
        if (writes.empty() || left <= 0) {
            break;
        }
        disk.wait(writes, (int) left);
    }
    disk.close();
}

// no copy that was made so far is of any use: another model has been loaded. Files stay, for servers of that one
void server_blocks::forget_all() {
    disk.close(); // ends every write, so that none makes a copy be on disk again below
    while (!store.empty()) {
        const auto first = store.begin();
        settle_write(first);
        first->second.on_disk = false;
        erase(first);
    }
    files.clear();
}

server_blocks_head server_blocks::head_of(const key_t & key, const saved & block) const {
    server_blocks_head head;
    head.model  = model_id;
    head.tenant = std::get<0>(key);
    for (const auto & [name, session] : block.labels) {
        head.labels.push_back({ name, session });
    }
    head.rows   = block.rows;
    head.prefix_hash = block.prefix_hash;
    head.hash   = block.hash;
    head.tokens = block.tokens;
    head.kv     = block.kv;
    head.kv.data = nullptr;
    head.bounds = block.bounds;
    return head;
}

// the name of its file
std::string server_blocks::file_of(const key_t & key, const saved & block) const {
    server_blocks_head head;
    head.model  = model_id;
    head.tenant = std::get<0>(key);
    head.rows   = block.rows;
    head.hash   = block.hash;
    head.kv.layout = block.kv.layout;
    head.kv.p0  = block.kv.p0;
    head.kv.p1  = block.kv.p1;
    return server_blocks_file_name(head);
}

//
// what has become of it
//

void server_blocks::settle() {
    if (!disk.is_open()) {
        return;
    }
    const std::vector<key_t> keys(busy.begin(), busy.end());
    for (const auto & key : keys) {
        const auto it = store.find(key);
        settle_write(it);
        const auto & block = it->second;
        if (block.reading) {
            settle_read(it);
        } else if (!block.writing) {
            busy.erase(key);
        }
    }
    const std::vector<key_t> unnamed(mislabelled.begin(), mislabelled.end());
    for (const auto & key : unnamed) {
        const auto it = store.find(key);
        if (it == store.end() || it->second.in_ram() || !it->second.renamed) {
            mislabelled.erase(key);
        } else {
            write(it);
        }
    }
    sweep();
    for (const auto & file : disk.gone()) {
        const auto known = files.find(file);
        if (known == files.end() || disk.holds(file)) { // written again since
            continue;
        }
        const auto it = store.find(known->second);
        files.erase(known);
        it->second.on_disk = false;
        if (!it->second.in_ram() && !it->second.reading) {
            erase(it);
        }
    }
    take_found();
}

void server_blocks::settle_write(block_it it) {
    auto & block = it->second;
    if (!block.writing) {
        return;
    }
    const auto state = disk.state(*block.writing);
    if (state == server_blocks_write::DONE) {
        const auto & head = block.writing->head;
        std::map<std::string, std::string> names;
        for (const auto & label : head.labels) {
            names[label.name] = label.session;
        }
        block.on_disk = true;
        block.renamed = block.labels != names || block.bounds.layers != head.bounds.layers;
        block.redone  = !(block.rows == head.rows);
        files[server_blocks_file_name(block.writing->head)] = it->first;
    } else if (state == server_blocks_write::FAILED) {
        rest_ms = block.rest_ms = ggml_time_ms() + REST_MS;
    }
    if (state != server_blocks_write::QUEUED && state != server_blocks_write::RUNNING) {
        block.writing.reset();
    }
}

// may erase the block: its file was of no use
void server_blocks::settle_read(block_it it) {
    auto & block = it->second;
    const auto read = block.reading;
    const std::unique_lock<std::mutex> lock(read->mutex, std::try_to_lock);
    const bool abandoned = read.use_count() == 2; // here and in the block
    if (!lock.owns_lock() || (read->state == server_blocks_read::PENDING && !abandoned)) {
        return;
    }
    block.reading.reset();
    busy.erase(it->first);
    const size_t bytes = rows_cost(block.kv);
    ram_used -= bytes; // was set aside for it
    if (read->state == server_blocks_read::DONE) {
        leave(it);
        block.kv      = read->head.kv;
        block.kv.data = read->data;
        block.tokens  = read->head.tokens;
        block.rows    = read->head.rows; // another server may have written the file since
        block.bytes   = bytes + block.index_bytes();
        block.used    = ++clock;
        enter(it);
        disk.touch(read->file);
        return;
    }
    arena.give(read->data);
    if (read->state == server_blocks_read::GONE || read->state == server_blocks_read::DAMAGED) {
        block.on_disk = false;
        files.erase(read->file);
        erase(it);
    }
}

// memory that waited for the disk
void server_blocks::sweep() {
    for (size_t i = 0; i < limbo.size(); ) {
        auto & item = limbo[i];
        bool over = true;
        if (item.write) {
            const auto state = disk.state(*item.write);
            over = state != server_blocks_write::QUEUED && state != server_blocks_write::RUNNING;
            const auto & head  = item.write->head;
            const auto   owner = store.find({ head.tenant, head.hash, head.kv.p0, head.kv.p1, server_blocks_visibility_of(head.rows) });
            if (state == server_blocks_write::DONE && (owner == store.end() || (!owner->second.on_disk && !owner->second.writing))) {
                disk.remove(server_blocks_file_name(head));
            }
        }
        if (item.read) {
            const std::unique_lock<std::mutex> lock(item.read->mutex, std::try_to_lock);
            over = over && lock.owns_lock() && (item.read->state != server_blocks_read::PENDING || item.read.use_count() == 1);
        }
        if (!over) {
            ++i;
            continue;
        }
        if (item.data) {
            arena.give(item.data);
        }
        ram_used -= item.bytes;
        limbo.erase(limbo.begin() + i);
    }
}

// files of this model that another process has written, or an earlier one
void server_blocks::take_found() {
    auto found = disk.found(); // the newest first: of two with one name it has it
    std::map<std::string, size_t> ranks;
    std::vector<std::pair<size_t, size_t>> order; // the newest of each tenant first: there may be no room for all
    for (size_t i = 0; i < found.size(); ++i) {
        order.push_back({ ranks[found[i].tenant]++, i });
    }
    std::stable_sort(order.begin(), order.end());
    std::vector<server_blocks_head> sorted;
    for (const auto & item : order) {
        sorted.push_back(std::move(found[item.second]));
    }
    found = std::move(sorted);
    clock += found.size();
    for (size_t i = 0; i < found.size(); ++i) {
        const auto & head = found[i];
        uint64_t hash = head.prefix_hash;
        for (const auto token : head.tokens) {
            hash = mix(hash, (uint32_t) token);
        }
        if (hash != head.hash || head.kv.size != head.tokens.size()*row_size) {
            continue;
        }
        const key_t key { head.tenant, head.hash, head.kv.p0, head.kv.p1, server_blocks_visibility_of(head.rows) };
        std::map<std::string, std::string> names;
        for (const auto & label : head.labels) {
            if (!labels.count({ head.tenant, label.name })) { // what has been said since the file was written counts more
                names[label.name] = label.session;
            }
        }
        auto it = store.find(key);
        if (it == store.end()) {
            saved block;
            block.rows = head.rows;
            const size_t room   = std::min(ram_left(), ram_budget/INDEX_SHARE - std::min(index_used, ram_budget/INDEX_SHARE));
            const bool   bounds = bounds_fit(head.bounds) && block.index_bytes() + head.bounds.size() <= room;
            if (names.empty() || block.index_bytes() > room) {
                continue;
            }
            block.bounds = bounds ? head.bounds : server_blocks_bounds();
            block.kv.p0  = head.kv.p0;
            block.kv.p1  = head.kv.p1;
            block.kv.size   = head.kv.size;
            block.kv.layout = head.kv.layout;
            block.prefix_hash = head.prefix_hash;
            block.hash   = head.hash;
            block.bytes  = block.index_bytes();
            block.used   = clock - i;
            it = store.emplace(key, std::move(block)).first;
            enter(it);
        }
        auto & block = it->second;
        block.on_disk = true;
        block.redone  = !(block.rows == head.rows);
        if (block.redone && !block.in_ram()) { // another server has written the file anew
            leave(it);
            block.rows   = head.rows;
            block.bytes  = block.index_bytes();
            block.redone = false;
            enter(it);
        }
        files[server_blocks_file_name(head)] = key;
        for (const auto & [name, session] : names) {
            labels[{ head.tenant, name }] = key;
            block.labels[name] = session;
            block.told = -1;
        }
        if (block.labels.size() > head.labels.size()) {
            rename(it);
        }
    }
}

//
// to disk
//

void server_blocks::write(block_it it, bool insist) {
    auto & block = it->second;
    const bool resting = !insist && ggml_time_ms() < std::max(rest_ms, block.rest_ms);
    const bool current = block.on_disk && !block.renamed && !block.redone;
    const bool absent  = !block.in_ram() && (!block.on_disk || block.reading); // the rows; its file can get other names
    if (!disk.is_open() || resting || block.writing || current || absent) {
        return;
    }
    fence();
    block.writing = disk.write(head_of(it->first, block), block.kv.data);
    busy.insert(it->first);
}

// the oldest are written before their memory is asked for
void server_blocks::write_ahead() {
    size_t safe = ram_left(); // free, or on disk too
    if (!disk.is_open() || safe >= ram_budget/AHEAD_SHARE) {
        return;
    }
    for (const auto * share : largest_first(true)) {
        for (const auto & [used, key] : share->lru[1]) {
            if (safe >= ram_budget/AHEAD_SHARE) {
                return;
            }
            const auto it = store.find(key);
            write(it);
            safe += it->second.on_disk || it->second.writing ? it->second.bytes : 0;
        }
    }
}

// the memory of a copy is given up, its file stays
void server_blocks::release(block_it it) {
    fence();
    auto & block = it->second;
    leave(it);
    arena.give(block.kv.data);
    llama_kv_block kv;
    kv.p0     = block.kv.p0;
    kv.p1     = block.kv.p1;
    kv.size   = block.kv.size;
    kv.layout = block.kv.layout;
    block.kv  = std::move(kv);
    llama_tokens().swap(block.tokens);
    block.bytes = block.index_bytes();
    enter(it);
    if (block.renamed) {
        mislabelled.insert(it->first);
    }
}

bool server_blocks::release_one(const std::vector<tenant_share *> & from, const std::set<key_t> & keep) {
    for (const auto * share : from) {
        for (const auto & [used, key] : share->lru[1]) {
            const auto it = store.find(key);
            auto & block = it->second;
            if (!block.on_disk || block.redone || block.writing || keep.count(key)) {
                continue; // a file that gets other names is being written from this memory
            }
            if (disk.holds(file_of(key, block))) {
                release(it);
                trim_index();
                return true;
            }
            files.erase(file_of(key, block));
            block.on_disk = false;
        }
    }
    return false;
}

// knowing of blocks on disk must not take all the memory: of the oldest of the tenant that has most the bounds are
// forgotten, then that they are there
void server_blocks::trim_index() {
    for (const bool bounds_only : { true, false }) {
        bool found = true;
        while (found && index_used > ram_budget/INDEX_SHARE) {
            found = false;
            for (const auto * share : largest_first(false)) {
                const auto next = std::find_if(share->lru[0].begin(), share->lru[0].end(), [&](const auto & item) {
                    const auto & block = store.at(item.second);
                    return bounds_only ? block.bounds.size() > 0 : !block.reading;
                });
                if (next == share->lru[0].end()) {
                    continue;
                }
                const auto it = store.find(next->second);
                if (bounds_only) {
                    leave(it);
                    it->second.bounds = {};
                    it->second.bytes  = it->second.index_bytes();
                    enter(it);
                } else {
                    erase(it);
                }
                found = true;
                break;
            }
        }
    }
}

// the oldest copy that is not on disk gets there, if that takes no longer than the main loop may wait
bool server_blocks::wait_for_write(const std::vector<tenant_share *> & from, const std::set<key_t> & keep) {
    const int64_t left_ms = patience_ms - ggml_time_ms();
    for (const auto * share : from) {
        for (auto at = share->lru[1].begin(); disk.is_open() && left_ms > 0 && at != share->lru[1].end(); ++at) {
            const auto it = store.find(at->second);
            if (keep.count(at->second)) {
                continue;
            }
            write(it);
            if (it->second.writing) {
                const bool over = disk.wait({ it->second.writing }, (int) left_ms);
                settle_write(it);
                return over && it->second.on_disk && !it->second.redone;
            }
        }
    }
    return false;
}

json server_blocks::disk_json() const {
    if (!disk.is_open()) {
        return disk_why.empty() ? json() : json { {"unusable", disk_why} };
    }
    json res = disk.stats();
    res["n_unnamed"] = mislabelled.size();
    res["n_dropped"] = n_dropped;
    return res;
}

//
// from disk
//

// what a call needs of the disk is set in motion; true if it has to come again
bool server_blocks::stage(server_blocks_call & call) {
    call.waits = call.scan = false;
    if (!disk.is_open()) {
        return false;
    }
    for (const auto & [name, read] : call.reads) {
        const std::lock_guard<std::mutex> lock(read->mutex);
        if (read->state == server_blocks_read::FAILED) {
            fail(503, "unavailable_error", "the block cannot be read now: " + read->error, json { {"name", name} });
        }
        if (read->state != server_blocks_read::DONE) {
            const char * reason = read->state == server_blocks_read::GONE ? "file_gone" : "file_damaged";
            fail(404, "unknown_block", "the file of the block is of no use: " + read->error, json { {"name", name}, {"reason", reason} });
        }
    }
    call.reads.clear();
    if (call.visit >= VISITS_MAX) {
        return false;
    }
    const std::string tenant = json_value(call.body, "tenant", std::string());
    std::set<key_t> keep;
    std::map<std::string, key_t> named;
    for (const auto & name : needed(call)) {
        const auto it = labels.find({ tenant, name });
        call.scan = call.scan || (it == labels.end() && call.visit == 0);
        if (it != labels.end()) {
            named[name] = it->second;
            keep.insert(it->second);
        }
    }
    for (const auto & [name, key] : named) {
        auto it = store.find(key);
        if (it != store.end() && !it->second.in_ram() && !it->second.reading) {
            begin_read(key, keep);
            it = store.find(key);
        }
        if (it != store.end() && it->second.reading) {
            call.reads.push_back({ name, it->second.reading });
        }
    }
    call.waits = call.scan || !call.reads.empty();
    return call.waits;
}

void server_blocks::begin_read(const key_t & key, const std::set<key_t> & keep) {
    const size_t size  = store.at(key).kv.size;
    const size_t bytes = rows_cost(store.at(key).kv);
    const std::string & tenant = std::get<0>(key);
    uint8_t * data = make_space(tenant, bytes, keep) ? take(tenant, size, keep) : nullptr;
    if (!data) {
        fail(413, "ram_budget", "host memory has no room for what is to come from disk", json { {"needed", bytes}, {"budget", ram_budget} });
    }
    const auto it = store.find(key);
    if (it == store.end()) { // its file went meanwhile
        arena.give(data);
        return;
    }
    auto & block = it->second;
    block.reading = std::make_shared<server_blocks_read>();
    block.reading->head = head_of(key, block);
    block.reading->file = server_blocks_file_name(block.reading->head);
    block.reading->data = data;
    ram_used += bytes;
    busy.insert(key);
}

void server_blocks::work(server_blocks_call & call) {
    if (call.scan) {
        disk.scan();
    }
    for (const auto & read : call.reads) {
        disk.read(*read.second);
    }
    disk.wait(call.writes, SPILL_MS);
    call.visit++;
}
