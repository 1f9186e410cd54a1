// the store: which copies are in host memory and which on disk
//
// The main loop never reads or writes a file. It allocates memory for a block and lets the thread of a call read into
// it; it queues writes and applies their results later. All of that memory counts against the budget meanwhile.

#include "server-blocks-hash.h"
#include "server-blocks-store.h"

#include "log.h"

#include <algorithm>

static constexpr int64_t RETRY_MS     = 2000; // pause after a failed write
static constexpr int     FLUSH_MS     = 5000; // time for copies that are not on disk yet when the server stops
static constexpr size_t  INDEX_PART   = 4;    // 1/4 of the budget at most is for entries of copies that are only on disk
static constexpr size_t  AHEAD_PART   = 4;    // 1/4 of the budget is kept free or on disk

bool server_blocks_store::configure(const options & options) {
    if (options.model != config.model || options.model == 0) { // after a sleep the file may be another one
        forget_all();
    }
    config = options;
    if (arena.size() != config.ram_bytes && !arena.reset(config.ram_bytes, config.host_buft)) {
        return false;
    }
    open_disk();
    return true;
}

void server_blocks_store::open_disk() {
    if (config.disk.empty() || folder.is_open()) {
        return;
    }
    const int64_t t_start = ggml_time_ms();
    folder_error = folder.open(config.disk, config.model, config.layout);
    if (!folder_error.empty()) {
        LOG_WRN("evoke: saved blocks stay in host memory, --evoke-disk: %s\n", folder_error.c_str());
        return;
    }
    poll_disk();
    LOG_INF("evoke: %zu blocks found on disk, %d ms\n", files.size(), (int) (ggml_time_ms() - t_start));
}

server_blocks_store::~server_blocks_store() {
    if (!folder.is_open()) {
        return;
    }
    fence.reset(nullptr);
    std::map<uint64_t, copy_it> by_age; // copies only on disk, too: their files may lack names
    for (auto it = copies.begin(); it != copies.end(); ++it) {
        by_age[it->second.last_used] = it;
    }
    const int64_t until = ggml_time_ms() + FLUSH_MS;
    for (;;) { // twice where a copy got a name while its file was written
        std::vector<std::shared_ptr<server_blocks_write>> writes;
        for (auto it = by_age.rbegin(); it != by_age.rend(); ++it) { // the newest first: time may be short
            poll_write(it->second);
            write(it->second);
            if (it->second->second.writing) {
                writes.push_back(it->second->second.writing);
            }
        }
        const int64_t left = until - ggml_time_ms();
        if (writes.empty() || left <= 0) {
            break;
        }
        folder.wait(writes, (int) left);
    }
    folder.close();
}

// forgets every copy: another model is loaded; files stay for servers of the earlier one
void server_blocks_store::forget_all() {
    folder.close(); // ends every write: none sets on_disk again below
    while (!copies.empty()) {
        const auto first = copies.begin();
        poll_write(first);
        first->second.on_disk = false;
        erase(first);
    }
    files.clear();
}

server_blocks_head server_blocks_store::head_of(const server_blocks_key & key, const server_blocks_copy & copy) const {
    server_blocks_head head;
    head.model  = config.model;
    head.tenant = key.tenant;
    for (const auto & [name, session] : copy.labels) {
        head.labels.push_back({ name, session });
    }
    head.rows   = copy.rows;
    head.prefix_hash = copy.prefix_hash;
    head.hash   = copy.hash;
    head.tokens = copy.tokens;
    head.kv     = copy.kv;
    head.kv.data = nullptr;
    head.bounds = copy.bounds;
    return head;
}

// the name of the file of a copy
std::string server_blocks_store::file_of(const server_blocks_key & key, const server_blocks_copy & copy) const {
    server_blocks_head head;
    head.model  = config.model;
    head.tenant = key.tenant;
    head.rows   = copy.rows;
    head.hash   = copy.hash;
    head.kv.layout = copy.kv.layout;
    head.kv.p0  = copy.kv.p0;
    head.kv.p1  = copy.kv.p1;
    return server_blocks_file_name(head);
}

void server_blocks_store::refresh_disk() {
    if (folder.is_open()) {
        folder.refresh();
    }
}

json server_blocks_store::disk_json() const {
    if (!folder.is_open()) {
        return folder_error.empty() ? json() : json { {"unusable", folder_error} };
    }
    json res = folder.stats();
    res["n_unnamed"] = stale_on_disk.size();
    res["n_dropped"] = n_dropped;
    return res;
}

//
// results of the disk
//

void server_blocks_store::poll_disk() {
    if (!folder.is_open()) {
        return;
    }
    const std::vector<server_blocks_key> in_progress(busy.begin(), busy.end());
    for (const auto & key : in_progress) {
        const auto it = copies.find(key);
        poll_write(it);
        const auto & copy = it->second;
        if (copy.reading) {
            poll_read(it);
        } else if (!copy.writing) {
            busy.erase(key);
        }
    }
    const std::vector<server_blocks_key> stale(stale_on_disk.begin(), stale_on_disk.end());
    for (const auto & key : stale) {
        const auto it = copies.find(key);
        if (it == copies.end() || it->second.in_ram() || !it->second.labels_stale) {
            stale_on_disk.erase(key);
        } else {
            write(it);
        }
    }
    poll_pending_memory();
    for (const auto & file : folder.take_lost_files()) {
        const auto entry = files.find(file);
        if (entry == files.end() || folder.contains(file)) { // written once more since
            continue;
        }
        const auto it = copies.find(entry->second);
        files.erase(entry);
        it->second.on_disk = false;
        if (!it->second.in_ram() && !it->second.reading) {
            erase(it);
        }
    }
    add_new_files();
}

void server_blocks_store::poll_write(copy_it it) {
    auto & copy = it->second;
    if (!copy.writing) {
        return;
    }
    const auto state = folder.state(*copy.writing);
    if (state == server_blocks_write::DONE) {
        const auto & head = copy.writing->head;
        std::map<std::string, std::string> names;
        for (const auto & label : head.labels) {
            names[label.name] = label.session;
        }
        copy.on_disk      = true;
        copy.labels_stale = copy.labels != names || copy.bounds.layers != head.bounds.layers;
        copy.rows_stale   = !(copy.rows == head.rows);
        files[server_blocks_file_name(copy.writing->head)] = it->first;
    } else if (state == server_blocks_write::FAILED) {
        retry_ms = copy.retry_ms = ggml_time_ms() + RETRY_MS;
    }
    if (state != server_blocks_write::QUEUED && state != server_blocks_write::RUNNING) {
        copy.writing.reset();
    }
}

// applies a read that is over; may erase the copy, if its file is missing or damaged
void server_blocks_store::poll_read(copy_it it) {
    auto & copy = it->second;
    const auto read = copy.reading;
    const std::unique_lock<std::mutex> lock(read->mutex, std::try_to_lock);
    const bool abandoned = read.use_count() == 2; // `read` and `copy.reading`: no call waits for it
    if (!lock.owns_lock() || (read->state == server_blocks_read::PENDING && !abandoned)) {
        return;
    }
    copy.reading.reset();
    busy.erase(it->first);
    const size_t bytes = rows_bytes(copy.kv);
    pending_bytes -= bytes;
    if (read->state == server_blocks_read::DONE) {
        shares.remove(it->first, copy);
        copy.kv        = read->head.kv;
        copy.kv.data   = read->data;
        copy.tokens    = read->head.tokens;
        copy.rows      = read->head.rows; // another server may have replaced the file
        copy.bytes     = bytes + copy.index_bytes();
        copy.last_used = ++clock;
        shares.add(it->first, copy);
        folder.mark_used(read->file);
        return;
    }
    arena.release(read->data);
    if (read->state == server_blocks_read::MISSING || read->state == server_blocks_read::DAMAGED) {
        copy.on_disk = false;
        files.erase(read->file);
        erase(it);
    }
}

// releases memory of erased copies that the disk no longer uses
void server_blocks_store::poll_pending_memory() {
    for (size_t i = 0; i < pending.size(); ) {
        auto & item = pending[i];
        bool over = true;
        if (item.write) {
            const auto state = folder.state(*item.write);
            over = state != server_blocks_write::QUEUED && state != server_blocks_write::RUNNING;
            const auto & head  = item.write->head;
            const auto * owner = find({ head.tenant, head.hash, head.kv.p0, head.kv.p1, server_blocks_visibility_of(head.rows) });
            if (state == server_blocks_write::DONE && (!owner || (!owner->on_disk && !owner->writing))) {
                folder.remove(server_blocks_file_name(head)); // of a copy that was erased meanwhile
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
            arena.release(item.data);
        }
        pending_bytes -= item.bytes;
        pending.erase(pending.begin() + i);
    }
}

// Adds copies for files of this model that another process has written, or an earlier one. There may be no room for all:
// the newest of each tenant come first.
void server_blocks_store::add_new_files() {
    const auto heads = folder.take_new_heads(); // the newest first: of two files with one name it gets the name
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
    copy.on_disk    = true;
    copy.rows_stale = !(copy.rows == head.rows);
    if (copy.rows_stale && !copy.in_ram()) { // another server has replaced the file
        shares.remove(key, copy);
        copy.rows       = head.rows;
        copy.bytes      = copy.index_bytes();
        copy.rows_stale = false;
        shares.add(key, copy);
    }
    files[server_blocks_file_name(head)] = key;
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

// queues a write, unless one is queued, the file is current, there is nothing to write, or the disk has just failed
void server_blocks_store::write(copy_it it, bool insist) {
    auto & copy = it->second;
    const bool paused = !insist && ggml_time_ms() < std::max(retry_ms, copy.retry_ms);
    const bool absent = !copy.in_ram() && (!copy.on_disk || copy.reading); // of a copy on disk the names can be written
    if (!folder.is_open() || paused || copy.writing || copy.is_file_current() || absent) {
        return;
    }
    fence.wait();
    copy.writing = folder.write(head_of(it->first, copy), copy.kv.data);
    busy.insert(it->first);
}

// writes the oldest copies before their memory is needed
void server_blocks_store::write_ahead() {
    size_t available = free_bytes(); // free, or on disk too
    if (!folder.is_open() || available >= config.ram_bytes/AHEAD_PART) {
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

// releases the memory of a copy; its file stays
void server_blocks_store::release_rows(copy_it it) {
    fence.wait();
    auto & copy = it->second;
    shares.remove(it->first, copy);
    arena.release(copy.kv.data);
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
        stale_on_disk.insert(it->first);
    }
}

// releases the memory of the oldest copy whose file has its rows; false if there is none
bool server_blocks_store::release_one(const std::vector<const share *> & from, const server_blocks_key_set & keep) {
    for (const auto * share : from) {
        for (const auto & item : share->by_age[server_blocks_shares::IN_RAM]) {
            const auto it = copies.find(item.second);
            auto & copy = it->second;
            if (!copy.on_disk || copy.rows_stale || copy.writing || keep.count(it->first)) {
                continue; // a write, of names too, reads this memory
            }
            if (folder.contains(file_of(it->first, copy))) {
                release_rows(it);
                trim_index();
                return true;
            }
            files.erase(file_of(it->first, copy));
            copy.on_disk = false;
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

// waits until the oldest copy that is not on disk is written, as long as the main loop may wait
bool server_blocks_store::wait_for_write(const std::vector<const share *> & from, const server_blocks_key_set & keep) {
    const int64_t left_ms = deadline_ms - ggml_time_ms();
    if (!folder.is_open() || left_ms <= 0) {
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
                const bool over = folder.wait({ it->second.writing }, (int) left_ms);
                poll_write(it);
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
        arena.release(data);
        return nullptr;
    }
    auto & reading = it->second.reading;
    reading = std::make_shared<server_blocks_read>();
    reading->head = head_of(key, it->second);
    reading->file = server_blocks_file_name(reading->head);
    reading->data = data;
    pending_bytes += bytes;
    busy.insert(key);
    return reading;
}
