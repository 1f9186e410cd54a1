#include "server-blocks-shares.h"

#include <algorithm>

void server_blocks_shares::add(const server_blocks_key & key, const server_blocks_copy & copy) {
    auto & share = shares[key.tenant];
    share.by_age[copy.in_ram()][copy.last_used] = key;
    share.bytes[copy.in_ram()] += copy.bytes;
    n_bytes     += copy.bytes;
    n_disk_only += copy.in_ram() ? 0 : copy.bytes;
}

void server_blocks_shares::remove(const server_blocks_key & key, const server_blocks_copy & copy) {
    const auto it = shares.find(key.tenant);
    auto & share = it->second;
    share.by_age[copy.in_ram()].erase(copy.last_used);
    share.bytes[copy.in_ram()] -= copy.bytes;
    n_bytes     -= copy.bytes;
    n_disk_only -= copy.in_ram() ? 0 : copy.bytes;
    if (share.by_age[DISK_ONLY].empty() && share.by_age[IN_RAM].empty()) {
        shares.erase(it);
    }
}

void server_blocks_shares::mark_used(const server_blocks_key & key, server_blocks_copy & copy, uint64_t now) {
    auto & list = shares.at(key.tenant).by_age[copy.in_ram()];
    auto node = list.extract(copy.last_used);
    node.key() = copy.last_used = now;
    list.insert(std::move(node));
}

size_t server_blocks_shares::bytes_of(const std::string & tenant) const {
    const auto it = shares.find(tenant);
    return it == shares.end() ? 0 : it->second.total();
}

std::vector<const server_blocks_shares::share *> server_blocks_shares::largest_first(tier of) const {
    std::vector<const share *> res;
    for (const auto & item : shares) {
        res.push_back(&item.second);
    }
    std::sort(res.begin(), res.end(), [&](const auto * a, const auto * b) { return a->bytes[of] > b->bytes[of]; });
    return res;
}

std::vector<const server_blocks_shares::share *> server_blocks_shares::donors(const std::string & tenant, size_t bytes) const {
    const size_t wanted = bytes + bytes_of(tenant);
    const auto   own    = shares.find(tenant);
    std::vector<const share *> res;
    for (auto it = shares.begin(); it != shares.end(); ++it) {
        if (it != own && it->second.total() > wanted) {
            res.push_back(&it->second);
        }
    }
    std::sort(res.begin(), res.end(), [](const auto * a, const auto * b) { return a->total() > b->total(); });
    if (own != shares.end()) {
        res.push_back(&own->second);
    }
    return res;
}
