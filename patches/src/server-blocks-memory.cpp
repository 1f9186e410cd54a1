#include "server-blocks-memory.h"

uint8_t * server_blocks_memory::allocate(size_t size) {
    const auto it = reserved.find(size);
    if (it == reserved.end()) {
        return arena.allocate(size);
    }
    uint8_t * data = it->second;
    reserved.erase(it);
    return data;
}

void server_blocks_memory::reserve(const std::vector<std::pair<size_t, uint8_t *>> & parts, size_t bytes) {
    reserved.insert(parts.begin(), parts.end());
    n_reserved = bytes;
}

void server_blocks_memory::cancel_reservation() {
    for (const auto & item : reserved) {
        arena.release(item.second);
    }
    reserved.clear();
    n_reserved = 0;
}

void server_blocks_memory::release_after(std::shared_ptr<server_blocks_write> write, uint8_t * data, size_t bytes) {
    n_pending += bytes;
    pending.push_back({ std::move(write), nullptr, data, bytes });
}

void server_blocks_memory::release_after(std::shared_ptr<server_blocks_read> read, uint8_t * data, size_t bytes) {
    n_pending += bytes;
    pending.push_back({ nullptr, std::move(read), data, bytes });
}

std::vector<server_blocks_head> server_blocks_memory::poll(const server_blocks_disk & disk) {
    std::vector<server_blocks_head> written;
    std::vector<pending_item> rest;
    for (auto & item : pending) {
        const auto state = item.write ? disk.state(*item.write) : server_blocks_write::DONE;
        const bool over  = item.write ? state != server_blocks_write::QUEUED && state != server_blocks_write::RUNNING
                                      : is_over(*item.read, item.read.use_count() == 1);
        if (!over) {
            rest.push_back(std::move(item));
            continue;
        }
        if (item.write && state == server_blocks_write::DONE) {
            written.push_back(item.write->head);
        }
        if (item.data) {
            arena.release(item.data);
        }
        n_pending -= item.bytes;
    }
    pending = std::move(rest);
    return written;
}

// `abandoned`: no call waits for the read any more, so that nobody will execute it.
bool server_blocks_memory::is_over(server_blocks_read & read, bool abandoned) {
    const std::unique_lock<std::mutex> lock(read.mutex, std::try_to_lock);
    return lock.owns_lock() && (read.state != server_blocks_read::PENDING || abandoned);
}
