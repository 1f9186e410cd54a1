#include "server-blocks-transfer.h"

#include "server-blocks-hash.h"
#include "server-blocks-media.h"

server_blocks_text::server_blocks_text(const server_prompt & prompt, const server_blocks_slot_state & slot)
    : content(slot.hashed(server_blocks_ids(prompt.tokens))), tokens(content->tokens), hashes(content->hashes), media(server_blocks_media(prompt.tokens)) {}

static std::shared_ptr<const server_blocks_hashed> hashed(llama_tokens tokens, uint64_t adapters) {
    auto res = std::make_shared<server_blocks_hashed>(adapters);
    res->set(std::move(tokens));
    return res;
}

server_blocks_text::server_blocks_text(llama_tokens tokens, uint64_t adapters)
    : content(hashed(std::move(tokens), adapters)), tokens(content->tokens), hashes(content->hashes) {}

server_blocks_key server_blocks_transfer::key_of(const std::string & tenant, const server_blocks_range & range) const {
    const auto rows = context.slots[range.id].history().of(range.p0, range.p1);
    return { tenant, range.text.hashes[range.p1], range.p0, range.p1, server_blocks_visibility_of(rows) };
}

size_t server_blocks_transfer::bytes_of(const server_blocks_range & range) const {
    server_blocks_copy copy;
    copy.rows = context.slots[range.id].history().of(range.p0, range.p1);
    return store.rows_bytes(range.p0, range.p1) + capture.key_bounds_bytes(range.id) + copy.index_bytes();
}

bool server_blocks_transfer::needs_copy(int id, const server_blocks_key & key) const {
    return !store.has_rows(key, context.slots[id].history().of(key.p0, key.p1)) || store.is_file_missing(key);
}

bool server_blocks_transfer::save(const server_blocks_owner & owner, const server_blocks_range & range, const server_blocks_key_set & keep) {
    const auto & [id, text, p0, p1] = range;
    const auto key = key_of(owner.tenant, range);
    server_blocks_copy copy;
    copy.rows = context.slots[id].history().of(p0, p1);
    store.erase_if_file_missing(key);
    if (store.has_rows(key, copy.rows)) {
        store.mark_used(key);
        if (capture.lacks_bounds(id, *store.find(key))) { // the copy was made before these layers were captured
            store.set_bounds(key, capture.key_bounds(id, p0, p1));
        }
        store.label(owner, key);
        return true;
    }
    // a plan keeps all of its blocks: their set is not copied for each of them
    const bool has_key = keep.count(key) > 0;
    server_blocks_key_set with_key;
    if (!has_key) {
        with_key = keep;
        with_key.insert(key);
    }
    uint8_t * data = store.allocate(owner.tenant, (p1 - p0)*store.row_bytes(), bytes_of(range), has_key ? keep : with_key);
    if (!data || !llama_kv_block_save(context.ctx, id, { p0, p1 }, data, copy.kv)) {
        if (data) {
            store.release(data);
        }
        return false;
    }
    fence.on_copy_started();
    copy.tokens.assign(text.tokens.begin() + p0, text.tokens.begin() + p1);
    copy.prefix_hash = text.hashes[p0];
    copy.hash        = text.hashes[p1];
    copy.bounds      = capture.key_bounds(id, p0, p1);
    store.insert(owner, key, std::move(copy));
    return true;
}

int32_t server_blocks_transfer::load(int id, const server_blocks_key & key, uint64_t prefix_hash, bool same_cells) {
    const auto & copy = *store.find(key);
    auto &       slot = context.slots[id];
    slot.resident();
    const int32_t n_same = llama_kv_block_load(context.ctx, id, copy.kv, same_cells);
    if (n_same >= 0) {
        fence.on_copy_started();
        store.mark_used(key);
        slot.on_loaded(copy, prefix_hash);
    }
    return n_same;
}

int32_t server_blocks_transfer::insert(int id, const server_blocks_key & key, llama_pos at) {
    const int32_t n_same = llama_kv_block_insert(context.ctx, id, store.find(key)->kv, at);
    if (n_same >= 0) {
        fence.on_copy_started();
        fence.wait();
        store.mark_used(key);
    }
    return n_same;
}
