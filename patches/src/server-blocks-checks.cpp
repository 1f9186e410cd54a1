#include "server-blocks-checks.h"

#include <algorithm>

void fail_unknown_block(const server_blocks_store & store, const std::string & tenant, const std::string & name) {
    const std::string reason = store.disk().is_open() ? store.disk().unusable_reason(tenant, name) : "";
    if (!reason.empty()) {
        fail(409, "other_model", "the block is on disk but cannot be used here: " + reason, json { {"name", name} });
    }
    fail(404, "unknown_block", "there is no saved block of this name", json { {"name", name} });
}

server_blocks_key require_in_ram(const server_blocks_store & store, const std::string & tenant, const std::string & name) {
    const auto * key = store.find_key(tenant, name);
    if (!key) {
        fail_unknown_block(store, tenant, name);
    }
    if (!store.find(*key)->in_ram()) {
        fail(503, "unavailable_error", "the block was read from disk, but another block has needed its memory since: repeat the call", json { {"name", name} });
    }
    return *key;
}

void check_visibility(const json & body, const server_blocks_copy & copy, const std::string & name, const std::string & session) {
    if (copy.is_complete()) {
        return;
    }
    if (json_value(body, "whole", false)) {
        fail(409, "not_whole", "the block was decoded while text before it was missing, and the call asks for whole blocks only", json { {"name", name} });
    }
    if (copy.labels.at(name) != session) {
        fail(409, "not_whole", "the block was decoded while text before it was missing, so that only the session that saved it may load it: "
            "decode the text again", json { {"name", name} });
    }
}

void check_layout(const server_blocks_context & context, const server_blocks_copy & copy, const std::string & name) {
    if (copy.kv.layout != llama_kv_block_layout(context.ctx)) {
        fail(409, "other_model", "the block was saved with other KV types or options", json { {"name", name} });
    }
}

void check_idle(const server_blocks_slot & slot) {
    if (slot.busy) {
        fail(503, "unavailable_error", "the slot decodes a request: repeat the call after its reply");
    }
}

void check_epoch(const json & body, const server_blocks_slot_state & slot) {
    if (!body.contains("epoch") || !body.at("epoch").is_number_integer()) {
        fail_request("\"epoch\" must be the epoch of the slot, as /evoke/render and GET /slots/{id}/blocks return it");
    }
    if (body.at("epoch").get<int64_t>() != slot.epoch()) {
        fail(409, "stale_epoch", "another request or call has used the slot since", json { {"epoch", slot.epoch()} });
    }
}

bool matches(const server_blocks_copy & copy, const server_blocks_text & text, bool any_prefix) {
    const auto p0 = (size_t) copy.kv.p0;
    const auto p1 = (size_t) copy.kv.p1;
    if (p1 > text.tokens.size() || (!any_prefix && copy.prefix_hash != text.hashes[p0])) {
        return false;
    }
    return copy.in_ram() ? std::equal(copy.tokens.begin(), copy.tokens.end(), text.tokens.begin() + p0) : copy.hash == text.hashes[p1];
}
