// The store: which copies are in host memory and which on disk.

#include "server-blocks-hash.h"
#include "server-blocks-store.h"

#include "log.h"

#include <algorithm>

static constexpr int    FLUSH_MS   = 5000; // how long a server that stops may write copies that are not on disk yet
static constexpr size_t INDEX_PART = 4;    // 1/4 of the budget at most is for entries of copies that are only on disk
static constexpr size_t AHEAD_PART = 4;    // 1/4 of the budget is kept free or has copies that are on disk too

bool server_blocks_store::configure(const options & options) {
    if (options.model != config.model || options.model == 0) { // after a sleep the file may be another one
        forget_all();
    }
    config = options;
    if (memory.size() != config.ram_bytes && !memory.reset(config.ram_bytes, config.host_buft)) {
        return false;
    }
    open_disk();
    return true;
}

void server_blocks_store::open_disk() {
    if (config.disk.empty() || files.is_open()) {
        return;
    }
    const int64_t t_start = ggml_time_ms();
    if (files.open(config.disk, config.model, config.layout)) {
        poll_disk();
        LOG_INF("evoke: found %zu saved blocks on disk in %d ms\n", files.size(), (int) (ggml_time_ms() - t_start));
    }
}

server_blocks_store::~server_blocks_store() {
    if (!files.is_open()) {
        return;
    }
    fence.reset(nullptr);
    std::map<uint64_t, copy_it> by_age; // copies only on disk, too: their files may lack names
    for (auto it = copies.begin(); it != copies.end(); ++it) {
        by_age[it->second.last_used] = it;
    }
    const int64_t until = ggml_time_ms() + FLUSH_MS;
    for (;;) { // a second time for copies that got a name while their file was written
        std::vector<std::shared_ptr<server_blocks_write>> writes;
        for (auto it = by_age.rbegin(); it != by_age.rend(); ++it) { // the newest first: time may be short
            files.poll_write(it->second->first, it->second->second);
            write(it->second);
            if (it->second->second.writing) {
                writes.push_back(it->second->second.writing);
            }
        }
        const int64_t left = until - ggml_time_ms();
        if (writes.empty() || left <= 0) {
            break;
        }
        files.disk().wait(writes, (int) left);
    }
    files.close();
}

// Forgets every copy because another model is loaded. The files stay for servers of the earlier model.
void server_blocks_store::forget_all() {
    files.close(); // ends every write: none sets on_disk again below
    while (!copies.empty()) {
        const auto first = copies.begin();
        files.poll_write(first->first, first->second);
        first->second.on_disk = false; // or erase() would delete the file
        erase(first);
    }
    files.clear();
}

void server_blocks_store::refresh_disk() {
    if (files.is_open()) {
        files.disk().refresh();
    }
}

json server_blocks_store::disk_json() const {
    if (!files.is_open()) {
        return files.error().empty() ? json() : json { {"unusable", files.error()} };
    }
    json res = files.disk().stats();
    res["n_unnamed"] = files.outdated().size();
    res["n_dropped"] = n_dropped;
    return res;
}

//
// results of the disk
//

void server_blocks_store::poll_disk() {
    if (!files.is_open()) {
        return;
    }
    for (const auto & key : files.in_progress()) {
        const auto it = copies.find(key);
        files.poll_write(key, it->second);
        poll_read(it);
    }
    for (const auto & key : files.outdated()) {
        const auto it = copies.find(key);
        if (it == copies.end() || it->second.in_ram() || !it->second.labels_stale) {
            files.unmark_outdated(key);
        } else {
            write(it);
        }
    }
    poll_memory();
    poll_lost_files();
    add_new_files();
}

// Applies that files have disappeared; erases copies that were only there.
void server_blocks_store::poll_lost_files() {
    for (const auto & file : files.disk().take_lost_files()) {
        const auto * key = files.owner_of(file);
        if (!key || files.disk().contains(file)) { // another write has replaced it meanwhile
            continue;
        }
        const auto it = copies.find(*key);
        files.forget(it->second, file);
        if (!it->second.in_ram() && !it->second.reading) {
            erase(it);
        }
    }
}

// Applies a read that is over, if there is one. Erases the copy if its file is missing or damaged.
void server_blocks_store::poll_read(copy_it it) {
    auto & copy = it->second;
    if (!copy.reading) {
        return;
    }
    const auto read = copy.reading;
    const std::unique_lock<std::mutex> lock(read->mutex, std::try_to_lock);
    const bool abandoned = read.use_count() == 2; // `read` and `copy.reading`: no call waits for it
    if (!lock.owns_lock() || (read->state == server_blocks_read::PENDING && !abandoned)) {
        return;
    }
    files.end_read(it->first, copy);
    const size_t bytes = rows_bytes(copy.kv);
    memory.remove_pending(bytes);
    if (read->state == server_blocks_read::DONE) {
        shares.remove(it->first, copy);
        copy.kv        = read->head.kv;
        copy.kv.data   = read->data;
        copy.tokens    = read->head.tokens;
        copy.rows      = read->head.rows; // another server may have replaced the file
        copy.bytes     = bytes + copy.index_bytes();
        copy.last_used = ++clock;
        shares.add(it->first, copy);
        files.disk().mark_used(read->file);
        return;
    }
    memory.release(read->data);
    if (read->state == server_blocks_read::MISSING || read->state == server_blocks_read::DAMAGED) {
        files.forget(copy, read->file);
        erase(it);
    }
}

// Releases memory of erased copies that the disk no longer uses, and deletes files that were written for such copies.
void server_blocks_store::poll_memory() {
    for (const auto & head : memory.poll(files.disk())) {
        const auto * owner = find({ head.tenant, head.hash, head.kv.p0, head.kv.p1, server_blocks_visibility_of(head.rows) });
        if (!owner || (!owner->on_disk && !owner->writing)) {
            files.disk().remove(server_blocks_file_name(head));
        }
    }
}

// Adds copies for files of this model that another or an earlier process has written. There may be no room for all: the
// newest of each tenant come first.
void server_blocks_store::add_new_files() {
    const auto heads = files.disk().take_new_heads(); // the newest first: of two files with one name it gets the name
    std::map<std::string, size_t> n_of_tenant;
    std::vector<std::pair<size_t, size_t>> order; // rank within the tenant, index
    for (size_t i = 0; i < heads.size(); ++i) {
        order.push_back({ n_of_tenant[heads[i].tenant]++, i });
    }
    std::stable_sort(order.begin(), order.end());
    clock += heads.size();
    for (size_t i = 0; i < order.size(); ++i) {
        const auto & head = heads[order[i].second];
        if (is_valid(head)) {
            add_new_file(head, clock - i);
        }
    }
}

// Returns whether the hashes and the size of a head agree with its tokens.
bool server_blocks_store::is_valid(const server_blocks_head & head) const {
    uint64_t hash = head.prefix_hash;
    for (const auto token : head.tokens) {
        hash = server_blocks_mix(hash, (uint32_t) token);
    }
    return hash == head.hash && head.kv.size == head.tokens.size()*config.row_bytes;
}

// Returns whether the layers exist, and each has as many values as it must.
bool server_blocks_store::are_valid(const server_blocks_bounds & bounds) const {
    size_t n = 0;
    for (const int32_t layer : bounds.layers) {
        const auto it = config.key_channels.find(layer);
        if (it == config.key_channels.end()) {
            return false;
        }
        n += 2*it->second;
    }
    return bounds.values.size() == n;
}

void server_blocks_store::add_new_file(const server_blocks_head & head, uint64_t last_used) {
    const server_blocks_key key { head.tenant, head.hash, head.kv.p0, head.kv.p1, server_blocks_visibility_of(head.rows) };
    std::map<std::string, std::string> names;
    for (const auto & label : head.labels) {
        if (!keys.count({ head.tenant, label.name })) { // names given since the file was written take precedence
            names[label.name] = label.session;
        }
    }
    auto it = copies.find(key);
    if (it == copies.end()) {
        server_blocks_copy copy;
        copy.rows = head.rows;
        const size_t part   = config.ram_bytes/INDEX_PART;
        const size_t room   = std::min(free_bytes(), part - std::min(shares.disk_only_bytes(), part));
        const bool   bounds = are_valid(head.bounds) && copy.index_bytes() + head.bounds.size() <= room;
        if (names.empty() || copy.index_bytes() > room) {
            return;
        }
        copy.bounds = bounds ? head.bounds : server_blocks_bounds();
        copy.kv.p0  = head.kv.p0;
        copy.kv.p1  = head.kv.p1;
        copy.kv.size   = head.kv.size;
        copy.kv.layout = head.kv.layout;
        copy.prefix_hash = head.prefix_hash;
        copy.hash      = head.hash;
        copy.bytes     = copy.index_bytes();
        copy.last_used = last_used;
        it = copies.emplace(key, std::move(copy)).first;
        shares.add(key, it->second);
    }
    auto & copy = it->second;
    files.add(key, copy, server_blocks_file_name(head));
    copy.rows_stale = !(copy.rows == head.rows);
    if (copy.rows_stale && !copy.in_ram()) { // another server has replaced the file
        shares.remove(key, copy);
        copy.rows       = head.rows;
        copy.bytes      = copy.index_bytes();
        copy.rows_stale = false;
        shares.add(key, copy);
    }
    for (const auto & [name, session] : names) {
        keys[{ head.tenant, name }] = key;
        copy.labels[name]  = session;
        copy.reported_tier = -1;
    }
    if (copy.labels.size() > head.labels.size()) {
        on_labels_changed(it);
    }
}

//
// to disk
//

std::shared_ptr<server_blocks_write> server_blocks_store::begin_write(const server_blocks_key & key, bool insist) {
    const auto it = copies.find(key);
    if (it == copies.end()) {
        return nullptr;
    }
    write(it, insist);
    return it->second.writing;
}

// Queues writes of the oldest copies, so that their memory can be released at once when it is needed.
void server_blocks_store::write_ahead() {
    size_t available = free_bytes(); // free, or on disk too
    if (!files.is_open() || available >= config.ram_bytes/AHEAD_PART) {
        return;
    }
    for (const auto * share : shares.largest_first(server_blocks_shares::IN_RAM)) {
        for (const auto & item : share->by_age[server_blocks_shares::IN_RAM]) {
            if (available >= config.ram_bytes/AHEAD_PART) {
                return;
            }
            const auto it = copies.find(item.second);
            write(it);
            available += it->second.on_disk || it->second.writing ? it->second.bytes : 0;
        }
    }
}

void server_blocks_store::release_rows(const server_blocks_key_set & keys) {
    for (const auto & key : keys) {
        const auto it = copies.find(key);
        if (it != copies.end() && it->second.is_file_current() && !it->second.writing && it->second.in_ram()) {
            release_rows(it);
        }
    }
}

// Releases the memory of the rows of a copy that has a file.
void server_blocks_store::release_rows(copy_it it) {
    fence.wait();
    auto & copy = it->second;
    shares.remove(it->first, copy);
    memory.release(copy.kv.data);
    llama_kv_block kv;
    kv.p0     = copy.kv.p0;
    kv.p1     = copy.kv.p1;
    kv.size   = copy.kv.size;
    kv.layout = copy.kv.layout;
    copy.kv   = std::move(kv);
    llama_tokens().swap(copy.tokens);
    copy.bytes = copy.index_bytes();
    shares.add(it->first, copy);
    if (copy.labels_stale) {
        files.mark_outdated(it->first);
    }
}

// Releases the memory of the oldest copy whose file has its rows. Returns false if there is none.
bool server_blocks_store::release_one(const std::vector<const share *> & from, const server_blocks_key_set & keep) {
    for (const auto * share : from) {
        for (const auto & item : share->by_age[server_blocks_shares::IN_RAM]) {
            const auto it = copies.find(item.second);
            auto & copy = it->second;
            if (!copy.on_disk || copy.rows_stale || copy.writing || keep.count(it->first)) {
                continue; // a write, of names too, reads this memory
            }
            const auto file = files.name_of(it->first, copy);
            if (files.disk().contains(file)) {
                release_rows(it);
                trim_index();
                return true;
            }
            files.forget(copy, file);
        }
    }
    return false;
}

void server_blocks_store::trim_index() {
    for (const bool bounds_only : { true, false }) {
        bool trimmed = true;
        while (trimmed && shares.disk_only_bytes() > config.ram_bytes/INDEX_PART) {
            trimmed = false;
            for (const auto * share : shares.largest_first(server_blocks_shares::DISK_ONLY)) {
                const auto & list = share->by_age[server_blocks_shares::DISK_ONLY];
                const auto next = std::find_if(list.begin(), list.end(), [&](const auto & item) {
                    const auto & copy = copies.at(item.second);
                    return bounds_only ? copy.bounds.size() > 0 : !copy.reading;
                });
                if (next == list.end()) {
                    continue;
                }
                const auto it = copies.find(next->second);
                if (bounds_only) {
                    shares.remove(it->first, it->second);
                    it->second.bounds = {};
                    it->second.bytes  = it->second.index_bytes();
                    shares.add(it->first, it->second);
                } else {
                    erase(it);
                }
                trimmed = true;
                break;
            }
        }
    }
}

// Writes the oldest copy that is not on disk and waits for the write, as long as the call may. Returns whether the copy's
// memory can be released now.
bool server_blocks_store::wait_for_write(const std::vector<const share *> & from, const server_blocks_key_set & keep) {
    const int64_t left_ms = deadline_ms - ggml_time_ms();
    if (!files.is_open() || left_ms <= 0) {
        return false;
    }
    for (const auto * share : from) {
        for (const auto & item : share->by_age[server_blocks_shares::IN_RAM]) {
            if (keep.count(item.second)) {
                continue;
            }
            const auto it = copies.find(item.second);
            write(it);
            if (it->second.writing) {
                const bool over = files.disk().wait({ it->second.writing }, (int) left_ms);
                files.poll_write(it->first, it->second);
                return over && it->second.on_disk && !it->second.rows_stale;
            }
        }
    }
    return false;
}

//
// from disk
//

std::shared_ptr<server_blocks_read> server_blocks_store::begin_read(const server_blocks_key & key, const server_blocks_key_set & keep, bool & no_memory) {
    no_memory = false;
    const auto * copy = find(key);
    if (!copy || copy->in_ram() || copy->reading) {
        return copy ? copy->reading : nullptr;
    }
    const size_t bytes = rows_bytes(copy->kv);
    uint8_t * data = allocate(key.tenant, copy->kv.size, bytes, keep);
    if (!data) {
        no_memory = true;
        return nullptr;
    }
    const auto it = copies.find(key);
    if (it == copies.end()) { // allocate() has noticed that its file is missing
        memory.release(data);
        return nullptr;
    }
    memory.add_pending(bytes);
    files.begin_read(key, it->second, data);
    return it->second.reading;
}
