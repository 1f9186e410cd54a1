#include "server-blocks-copy-files.h"

#include "log.h"

#include <algorithm>

static constexpr int64_t RETRY_MS = 2000; // pause after a failed write

bool server_blocks_copy_files::open(const std::string & option, uint64_t model, uint64_t layout) {
    open_error  = folder.open(option, model, layout);
    this->model = model;
    if (!open_error.empty()) {
        LOG_WRN("evoke: saved blocks stay in host memory; --evoke-disk cannot be used: %s\n", open_error.c_str());
    }
    return open_error.empty();
}

//
// the table
//

server_blocks_head server_blocks_copy_files::head_of(const server_blocks_key & key, const server_blocks_copy & copy) const {
    server_blocks_head head;
    head.model  = model;
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

std::string server_blocks_copy_files::name_of(const server_blocks_key & key, const server_blocks_copy & copy) const {
    server_blocks_head head;
    head.model  = model;
    head.tenant = key.tenant;
    head.rows   = copy.rows;
    head.hash   = copy.hash;
    head.kv.layout = copy.kv.layout;
    head.kv.p0  = copy.kv.p0;
    head.kv.p1  = copy.kv.p1;
    return server_blocks_file_name(head);
}

const server_blocks_key * server_blocks_copy_files::owner_of(const std::string & file) const {
    const auto it = owners.find(file);
    return it == owners.end() ? nullptr : &it->second;
}

void server_blocks_copy_files::add(const server_blocks_key & key, server_blocks_copy & copy, const std::string & file) {
    copy.on_disk = true;
    owners[file] = key;
}

void server_blocks_copy_files::forget(server_blocks_copy & copy, const std::string & file) {
    copy.on_disk = false;
    owners.erase(file);
}

bool server_blocks_copy_files::is_missing(const server_blocks_key & key, const server_blocks_copy & copy) const {
    return !copy.in_ram() && !copy.reading && !folder.contains(name_of(key, copy));
}

void server_blocks_copy_files::remove(const server_blocks_key & key, server_blocks_copy & copy) {
    if (copy.on_disk) {
        const auto file = name_of(key, copy);
        forget(copy, file);
        folder.remove(file);
    }
    outdated_keys.erase(key);
}

void server_blocks_copy_files::mark_used(const server_blocks_key & key, const server_blocks_copy & copy) {
    if (copy.on_disk) {
        folder.mark_used(name_of(key, copy));
    }
}

//
// writes and reads
//

void server_blocks_copy_files::update_active(const server_blocks_key & key, const server_blocks_copy & copy) {
    if (copy.writing || copy.reading) {
        active.insert(key);
    } else {
        active.erase(key);
    }
}

void server_blocks_copy_files::write(const server_blocks_key & key, server_blocks_copy & copy, bool insist) {
    const bool paused = !insist && ggml_time_ms() < std::max(retry_ms, copy.retry_ms);
    const bool absent = !copy.in_ram() && (!copy.on_disk || copy.reading); // of a copy on disk the names can be written
    if (!folder.is_open() || paused || copy.writing || copy.is_file_current() || absent) {
        return;
    }
    fence.wait();
    copy.writing = folder.write(head_of(key, copy), copy.kv.data);
    update_active(key, copy);
}

void server_blocks_copy_files::poll_write(const server_blocks_key & key, server_blocks_copy & copy) {
    if (!copy.writing) {
        return;
    }
    const auto state = folder.state(*copy.writing);
    if (state == server_blocks_write::QUEUED || state == server_blocks_write::RUNNING) {
        return;
    }
    const auto & head = copy.writing->head;
    if (state == server_blocks_write::DONE) {
        std::map<std::string, std::string> names;
        for (const auto & label : head.labels) {
            names[label.name] = label.session;
        }
        copy.labels_stale = copy.labels != names || copy.bounds.layers != head.bounds.layers;
        copy.rows_stale   = !(copy.rows == head.rows);
        add(key, copy, server_blocks_file_name(head));
    } else if (state == server_blocks_write::FAILED) {
        retry_ms = copy.retry_ms = ggml_time_ms() + RETRY_MS;
    }
    copy.writing.reset();
    update_active(key, copy);
}

std::shared_ptr<server_blocks_write> server_blocks_copy_files::cancel_write(const server_blocks_key & key, server_blocks_copy & copy) {
    std::shared_ptr<server_blocks_write> running;
    if (copy.writing && !folder.cancel(*copy.writing)) {
        running = std::move(copy.writing);
    } else {
        poll_write(key, copy); // the write may have ended just now
    }
    copy.writing.reset();
    update_active(key, copy);
    return running;
}

void server_blocks_copy_files::begin_read(const server_blocks_key & key, server_blocks_copy & copy, uint8_t * data) {
    copy.reading = std::make_shared<server_blocks_read>();
    copy.reading->head = head_of(key, copy);
    copy.reading->file = server_blocks_file_name(copy.reading->head);
    copy.reading->data = data;
    update_active(key, copy);
}

std::shared_ptr<server_blocks_read> server_blocks_copy_files::end_read(const server_blocks_key & key, server_blocks_copy & copy) {
    auto read = std::move(copy.reading);
    copy.reading.reset();
    update_active(key, copy);
    return read;
}
