#include "server-blocks-calls.h"

#include "server-blocks-media.h"
#include "server-blocks-plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <random>
#include <set>

static constexpr int MAX_WAITS = 4;     // how many times a call may wait for the disk
static constexpr int SPILL_MS  = 60000; // how long a call waits for its writes each time
static constexpr int32_t DEFAULT_MAX_COPIED = 2048; // rows that one block-share copies: all slots wait while it does

const std::string & server_blocks_calls::instance() {
    static const std::string id = [] {
        std::random_device device;
        std::string digits;
        for (int i = 0; i < 16; ++i) {
            digits += "0123456789abcdef"[device() % 16];
        }
        return digits;
    }();
    return id;
}

bool server_blocks_calls::is_action(const std::string & action) {
    static const std::set<std::string> actions = {
        "block-save", "block-evict", "block-load", "block-adopt", "block-find", "block-share", "block-drop", "block-plan", "block-compact", "block-spill", "stream",
        "attn-capture", "attention", "block-rows",
    };
    return actions.count(action) > 0;
}

static const server_blocks_slot & find_slot(int id, const std::vector<server_blocks_slot> & slots) {
    for (const auto & slot : slots) {
        if (slot.id == id) {
            return slot;
        }
    }
    fail(404, "not_found_error", string_format("there is no slot %d", id));
}

json server_blocks_calls::run(server_blocks_call & call, const std::vector<server_blocks_slot> & slots) {
    const int64_t t_start = ggml_time_us();
    parts.store.begin_call();
    json res;
    try {
        parts.store.poll_disk();
        res = dispatch(call, slots);
    } catch (const server_blocks_error & e) {
        json error = e.extra;
        error["code"]    = e.code;
        error["type"]    = e.type;
        error["message"] = e.message;
        return json { {"error", error} };
    } catch (const std::exception & e) {
        return json { {"error", json { {"code", 400}, {"type", "invalid_request_error"}, {"message", e.what()} }} };
    }
    const bool is_report = call.action == "view" || call.action == "info";
    if (!call.waits && !is_report) {
        res["t_ms"] = (ggml_time_us() - t_start)/1000.0;
    }
    return res;
}

json server_blocks_calls::dispatch(server_blocks_call & call, const std::vector<server_blocks_slot> & slots) {
    if (call.action == "view") {
        return view(call, slots);
    }
    const auto & slot = find_slot(call.id_slot, slots);
    if (call.action == "info")      { return info(call.body, slot); }
    if (call.action == "attention") { return parts.capture.report(call.body, slot); }
    if (prepare_reads(call)) {
        return json();
    }
    if (call.action == "block-spill")   { return spill(call); }
    if (call.action == "block-drop")    { return drop(call.body); }
    if (call.action == "block-find")    { return find(call.body, slot); }
    if (call.action == "block-share")   { return share(call.body, slot, slots); }
    if (call.action == "block-adopt")   { return adopt(call.body, slot); }
    if (call.action == "block-rows")    { return row_sums(call.body, slot); }
    if (call.action == "block-compact") { return compact(call.body, slot); }
    if (call.action == "block-plan")    { return plan(call.body, slot); }
    if (call.action == "block-load" && call.body.contains("at")) {
        return insert(call.body, slot);
    }
    return single_op(call, slot);
}

//
// reports
//

json server_blocks_calls::slot_json(const server_blocks_slot & slot) const {
    const auto & state = state_of(slot);
    return json {
        {"id",            slot.id},
        {"epoch",         state.epoch()},
        {"n_tokens",      slot.prompt->n_tokens()},
        {"resident",      ranges_json(state.resident())},
        {"n_resident",    state.n_rows()},
        {"held",          ranges_json(parts.eviction.checkpoint_rows(*slot.prompt))},
        {"n_reusable",    state.history().complete_end()},
        {"n_free",        state.n_free()},
        {"is_processing", slot.busy},
        {"reserved",      state.is_reserved()},
        {"tenant",        state.owner().tenant},
        {"session",       state.owner().session},
    };
}

// Returns for a rendered prompt, or for the end of one, how many of its tokens each slot has.
json server_blocks_calls::view(const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) const {
    json res = json::array();
    for (const auto & slot : slots) {
        json one = slot_json(slot);
        const auto & tokens = slot.prompt->tokens;
        one["n_common"] = server_blocks_before_media(tokens, std::min(server_blocks_common_prefix(tokens, call.tokens, call.behind), state_of(slot).reuse()));
        res.push_back(one);
    }
    return json { {"slots", res}, {"instance", instance()} };
}

namespace {

// A saved copy as it relates to the text of a slot.
struct reported_copy {
    const server_blocks_key &  key;
    const server_blocks_copy & copy;
    bool                       stale;    // the text differs from that of the copy
    bool                       resident; // the slot has all of its rows
};

} // namespace

// Returns the description of one name of a copy for replies.
static json label_json(const reported_copy & of, const std::string & name, const std::string & session) {
    const auto & [key, copy, stale, resident] = of;
    return json {
        {"name", name}, {"p0", key.p0}, {"p1", key.p1}, {"n_tokens", key.p1 - key.p0}, {"n_bytes", copy.kv.size},
        {"tier", copy.in_ram() ? "ram" : "disk"}, {"on_disk", copy.on_disk},
        {"resident", resident},
        {"stale",    stale},
        {"whole",    server_blocks_is_complete(key.visibility)}, {"visibility", hex(key.visibility)}, {"session", session},
    };
}

json server_blocks_calls::copies_json(const std::string & tenant, const server_blocks_text & text, const llama_kv_ranges & resident, uint64_t after) const {
    json res = json::array();
    parts.store.for_each(tenant, [&](const server_blocks_key & key, const server_blocks_copy & copy) {
        if (copy.changed_in <= after) {
            return;
        }
        const bool stale = !matches(copy, text, false);
        const reported_copy reported { key, copy, stale, !stale && server_ranges_count(resident, key.p0, key.p1) == key.p1 - key.p0 };
        for (const auto & [name, session] : copy.labels) {
            res.push_back(label_json(reported, name, session));
        }
    });
    return res;
}

json server_blocks_calls::info(const json & body, const server_blocks_slot & slot) {
    const std::string tenant  = get_tenant(body);
    const uint64_t    version = parts.store.update_versions(tenant);
    const std::string since   = json_value(body, "since", std::string());
    if (since.find_first_not_of("0123456789") != std::string::npos && since != "latest") {
        fail_request("\"since\" must be the \"version\" of an earlier reply, or \"latest\"");
    }
    uint64_t after = since.empty() ? 0 : since == "latest" ? version : std::strtoull(since.c_str(), nullptr, 10);
    after = after > version ? 0 : after; // another server has given this version

    const auto & state  = state_of(slot);
    const auto & budget = state.budget();
    json res = slot_json(slot);
    res["n_ctx_logical"] = slot.n_ctx;
    res["n_cells"]       = llama_kv_block_n_cells(parts.context.ctx, slot.id);
    const server_blocks_text text(*slot.prompt, state);
    res["tokens_hash"]   = hex(text.hashes.back());
    res["stream"]        = json { {"budget", budget.n_rows}, {"sink", budget.sink}, {"recent", budget.recent}, {"block", budget.block},
        {"protect", ranges_json(budget.protect)} };
    res["ram"]           = json { {"used", parts.store.used()}, {"budget", parts.store.budget()}, {"n_dropped", parts.store.dropped()} };
    res["disk"]          = parts.store.disk_json();
    const auto traffic = llama_kv_block_traffic(parts.context.ctx);
    res["device"]        = json { {"n_copies", traffic.n_copies}, {"n_bytes", traffic.n_bytes} };
    res["row_bytes"]     = parts.store.row_bytes();
    res["version"]       = version;
    res["blocks"]        = copies_json(tenant, text, state.resident(), after);
    return res;
}

// Returns the copies of one session that fit a text, whatever the slot holds. A tenant may have very many others: nothing
// is made of these.
json server_blocks_calls::find(const json & body, const server_blocks_slot & slot) const {
    const server_blocks_text text(adopted_tokens(body, slot, true), state_of(slot).adapters());
    const std::string session = get_session(body);
    json res = json::array();
    parts.store.for_each(get_tenant(body), [&](const server_blocks_key & key, const server_blocks_copy & copy) {
        if (!matches(copy, text, false)) {
            return;
        }
        for (const auto & [name, owner] : copy.labels) {
            if (owner == session) {
                res.push_back(label_json({ key, copy, false, false }, name, owner));
            }
        }
    });
    return json { {"blocks", res} };
}

// Gives blocks of a text, as far as the tenant has their rows, to the calling session: as a copy that any session has saved,
// or as rows of any slot, which are copied. Only complete rows count: they do not depend on who decoded them.
json server_blocks_calls::share(const json & body, const server_blocks_slot & slot, const std::vector<server_blocks_slot> & slots) {
    const std::string tenant  = get_tenant(body);
    const std::string session = get_session(body);
    const int32_t     most    = get_int(body, "max_copied", 0, SERVER_BLOCKS_MAX_POS, &DEFAULT_MAX_COPIED);
    const server_blocks_text text(adopted_tokens(body, slot, false), state_of(slot).adapters());
    const int32_t n_tokens = text.tokens.size();
    std::vector<std::pair<int, server_blocks_text>> others; // slots of the tenant, and their texts
    for (const auto & other : slots) {
        if (state_of(other).owner().tenant == tenant && other.prompt->n_tokens() > 0) {
            others.push_back({ other.id, server_blocks_text(*other.prompt, state_of(other)) });
        }
    }
    json    found    = json::array();
    int32_t n_copied = 0;
    bool    more     = false;
    for (const auto & block : get_list(body, "blocks")) {
        const llama_pos p1 = get_int(block, "p1", 1, n_tokens);
        const llama_pos p0 = get_int(block, "p0", 0, p1 - 1);
        const std::string name = block.contains("name") ? get_block_name(block.at("name")) : get_block_name(json());
        const server_blocks_owner owner { tenant, session, name };
        const server_blocks_key   key   { tenant, text.hashes[p1], p0, p1, 0 };
        const auto * copy = parts.store.find(key);
        if (copy && matches(*copy, text, false) && !parts.store.is_file_missing(key)) {
            parts.store.mark_used(key);
            parts.store.label(owner, key);
            found.push_back(json { {"name", name}, {"p0", p0}, {"p1", p1}, {"from", "copy"} });
            continue;
        }
        for (const auto & [id, other] : others) {
            const auto & state = parts.context.slots[id];
            const bool has_rows = p1 <= (llama_pos) other.tokens.size() && other.hashes[p1] == key.hash && std::equal(text.tokens.begin() + p0, text.tokens.begin() + p1, other.tokens.begin() + p0)
                && server_ranges_count(state.resident(), p0, p1) == p1 - p0 && server_blocks_is_complete(parts.transfer.key_of(tenant, { id, other, p0, p1 }).visibility);
            if (!has_rows) {
                continue;
            }
            more = n_copied + p1 - p0 > most;
            if (!more && parts.transfer.save(owner, { id, other, p0, p1 })) {
                n_copied += p1 - p0;
                found.push_back(json { {"name", name}, {"p0", p0}, {"p1", p1}, {"from", "slot"} });
            }
            break;
        }
        if (more) {
            break;
        }
    }
    parts.transfer.wait();
    return json { {"blocks", found}, {"n_copied", n_copied}, {"more", more} };
}

// Returns a checksum of each row of a range, for tests that compare loaded rows with saved ones.
json server_blocks_calls::row_sums(const json & body, const server_blocks_slot & slot) const {
    if (!getenv("LLAMA_EVOKE_ROW_SUMS")) {
        fail(501, "not_supported_error", "row checksums are for tests: start the server with LLAMA_EVOKE_ROW_SUMS=1 in its environment");
    }
    const int32_t n_tokens = slot.prompt->n_tokens();
    const llama_pos p0 = get_int(body, "p0", 0, n_tokens);
    const llama_pos p1 = get_int(body, "p1", 0, n_tokens);
    auto * ctx = parts.context.ctx;
    std::vector<uint8_t> data(parts.store.row_bytes());
    json sums = json::array();
    for (llama_pos p = p0; p < p1; ++p) {
        llama_kv_block row;
        if (!state_of(slot).is_resident(p) || !llama_kv_block_save(ctx, slot.id, { p, p + 1 }, data.data(), row)) {
            sums.push_back(nullptr);
            continue;
        }
        llama_kv_block_fence(ctx);
        sums.push_back(hex(server_blocks_checksum(data.data(), data.size())));
    }
    return json { {"p0", p0}, {"sums", sums} };
}

//
// plans
//

json server_blocks_calls::plan(const json & body, const server_blocks_slot & slot) {
    if (!body.contains("ops") || !body.at("ops").is_array()) {
        fail_request("\"ops\" must be an array");
    }
    std::vector<server_blocks_op> ops;
    for (size_t i = 0; i < body.at("ops").size(); ++i) {
        const json & op = body.at("ops").at(i);
        server_blocks_op::expand(json_value(op, "op", std::string()), op, i, ops);
    }
    return server_blocks_plan(parts, slot, body).run(ops);
}

// Executes an action that is one op of a plan.
json server_blocks_calls::single_op(const server_blocks_call & call, const server_blocks_slot & slot) {
    std::vector<server_blocks_op> ops;
    server_blocks_op::expand(call.action.rfind("block-", 0) == 0 ? call.action.substr(6) : call.action, call.body, 0, ops);
    const json reply = server_blocks_plan(parts, slot, call.body).run(ops);
    json res = reply.at("results").at(0);
    res["epoch"]  = reply.at("epoch");
    res["n_free"] = reply.at("n_free");
    return res;
}

//
// names and the disk
//

json server_blocks_calls::drop(const json & body) {
    const std::string tenant = get_tenant(body);
    size_t n = 0;
    for (const auto & name : json_value(body, "all", false) ? parts.store.names_of(tenant) : get_block_names(body)) {
        n += parts.store.drop(tenant, name);
    }
    return json { {"n_dropped", n} };
}

server_blocks_key_set server_blocks_calls::spilled_keys(const json & body) const {
    const std::string tenant = get_tenant(body);
    server_blocks_key_set res;
    for (const auto & name : json_value(body, "all", false) ? parts.store.names_of(tenant) : get_block_names(body)) {
        const auto * key = parts.store.find_key(tenant, name);
        if (!key) {
            fail_unknown_block(parts.store, tenant, name);
        }
        res.insert(*key);
    }
    return res;
}

// Writes copies to disk and waits for the writes.
json server_blocks_calls::spill(server_blocks_call & call) {
    auto & store = parts.store;
    if (!store.disk().is_open()) {
        fail(501, "not_supported_error", store.disk_error().empty() ? "the server has no folder for blocks: start it with --evoke-disk" : "--evoke-disk cannot be used: " + store.disk_error());
    }
    const auto keys = spilled_keys(call.body);
    for (const auto & write : call.writes) {
        if (store.disk().state(*write) == server_blocks_write::FAILED) {
            fail(503, "unavailable_error", "a block could not be written to disk: " + write->error);
        }
    }
    call.writes.clear();
    if (call.n_waits < MAX_WAITS) { // once more where the file that was being written has older names
        for (const auto & key : keys) {
            if (auto write = store.begin_write(key, true)) {
                call.writes.push_back(std::move(write));
            }
        }
        call.waits = !call.writes.empty();
        if (call.waits) {
            return json();
        }
    }
    size_t n_spilled = 0, n_bytes = 0;
    for (const auto & key : keys) {
        const auto & copy = *store.find(key);
        n_spilled += copy.is_file_current();
        n_bytes   += copy.is_file_current() ? copy.kv.size : 0;
    }
    if (json_value(call.body, "release", false)) {
        store.release_rows(keys);
    }
    store.trim_index();
    return json { {"n_spilled", n_spilled}, {"n_bytes", n_bytes} };
}

// Returns the names of the blocks that a call is about to load.
static std::vector<std::string> loaded_names(const server_blocks_call & call) {
    std::vector<std::string> res;
    const auto add = [&](const json & op) {
        if (op.is_object() && op.contains("names") && op.at("names").is_array()) {
            for (const auto & name : op.at("names")) {
                if (name.is_string()) {
                    res.push_back(name.get<std::string>());
                }
            }
        } else if (op.is_object() && op.contains("name") && op.at("name").is_string()) {
            res.push_back(op.at("name").get<std::string>());
        }
    };
    if (call.action == "block-load" || call.action == "block-adopt") {
        add(call.body);
    } else if (call.action == "block-plan" && call.body.contains("ops") && call.body.at("ops").is_array()) {
        for (const auto & op : call.body.at("ops")) {
            if (op.is_object() && json_value(op, "op", std::string()) == "load") {
                add(op);
            }
        }
    }
    return res;
}

// Fails unless every read of the call has succeeded.
static void check_reads(const server_blocks_call & call) {
    for (const auto & [name, read] : call.reads) {
        const std::lock_guard<std::mutex> lock(read->mutex);
        if (read->state == server_blocks_read::FAILED) {
            fail(503, "unavailable_error", "the block cannot be read from disk now: " + read->error, json { {"name", name} });
        }
        if (read->state != server_blocks_read::DONE) {
            const char * reason = read->state == server_blocks_read::MISSING ? "file_gone" : "file_damaged";
            fail(404, "unknown_block", "the file of the block cannot be used: " + read->error, json { {"name", name}, {"reason", reason} });
        }
    }
}

// Starts the reads that a call needs. Returns whether the call must wait for the disk.
bool server_blocks_calls::prepare_reads(server_blocks_call & call) {
    call.waits = call.scan = false;
    if (!parts.store.disk().is_open()) {
        return false;
    }
    check_reads(call);
    call.reads.clear();
    if (call.n_waits >= MAX_WAITS) {
        return false;
    }
    const std::string tenant = get_tenant(call.body);
    server_blocks_key_set keep;
    std::map<std::string, server_blocks_key> found;
    for (const auto & name : loaded_names(call)) {
        const auto * key = parts.store.find_key(tenant, name);
        call.scan = call.scan || (!key && call.n_waits == 0);
        if (key) {
            found[name] = *key;
            keep.insert(*key);
        }
    }
    for (const auto & [name, key] : found) {
        bool no_memory = false;
        if (auto read = parts.store.begin_read(key, keep, no_memory)) {
            call.reads.push_back({ name, std::move(read) });
        } else if (no_memory) {
            fail(413, "ram_budget", "host memory has no room for the block that must be read from disk: start the server with a larger --evoke-ram",
                json { {"needed", parts.store.rows_bytes(key.p0, key.p1)}, {"budget", parts.store.budget()} });
        }
    }
    call.waits = call.scan || !call.reads.empty();
    return call.waits;
}

void server_blocks_calls::do_disk_work(server_blocks_call & call) {
    auto & disk = parts.store.disk();
    if (call.scan) {
        disk.scan();
    }
    for (const auto & read : call.reads) {
        disk.read(*read.second);
    }
    disk.wait(call.writes, SPILL_MS);
    call.n_waits++;
}

//
// adopt: gives an idle slot a text and the saved rows of it, at least those of the block that ends with the text
//

// `with_media`: accepts the ids of media, too.
llama_tokens server_blocks_calls::adopted_tokens(const json & body, const server_blocks_slot & slot, bool with_media) const {
    const json & values = get_list(body, "tokens");
    if (values.empty()) {
        fail_request("\"tokens\" must be a non-empty array of token ids");
    }
    if (values.size() >= (size_t) slot.n_ctx) {
        fail_request(string_format("%zu tokens do not fit the slot's context of %d", values.size(), slot.n_ctx));
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(parts.context.ctx)));
    llama_tokens res;
    for (const auto & value : values) {
        const int64_t token = value.is_number_integer() ? value.get<int64_t>() : LLAMA_TOKEN_NULL;
        const bool    media = with_media && token < LLAMA_TOKEN_NULL && token >= std::numeric_limits<llama_token>::min();
        if (!media && (token < 0 || token >= n_vocab)) {
            fail_request("\"tokens\" must be token ids; " + value.dump() + " is not in the vocabulary");
        }
        res.push_back((llama_token) token);
    }
    return res;
}

// Returns the copies to load by their first position; adds the names of those that are not complete to `incomplete`.
std::map<llama_pos, server_blocks_key> server_blocks_calls::adopted_copies(const json & body, const server_blocks_text & text, json & incomplete) const {
    const std::string tenant  = get_tenant(body);
    const std::string session = get_session(body);
    std::map<llama_pos, server_blocks_key> res;
    llama_kv_ranges covered;
    for (const auto & name : get_block_names(body)) {
        const auto   key  = require_in_ram(parts.store, tenant, name);
        const auto & copy = *parts.store.find(key);
        if (!matches(copy, text, json_value(body, "force", false))) {
            fail(409, "stale_block", "the block was saved from other tokens than these", json { {"name", name} });
        }
        check_visibility(body, copy, name, session);
        if (!copy.is_complete()) {
            incomplete.push_back(name);
        }
        const auto same = res.find(key.p0);
        const bool repeated = same != res.end() && same->second == key;
        if (!repeated && server_ranges_overlap(covered, key.p0, key.p1)) {
            fail_request("blocks overlap: " + name);
        }
        check_layout(parts.context, copy, name);
        res[key.p0] = key;
        server_ranges_add(covered, key.p0, key.p1);
    }
    if (covered.back().second != (llama_pos) text.tokens.size()) {
        fail_request("\"names\" must contain the block that ends at the last token, because decoding continues after its last row");
    }
    return res;
}

// Loads the copies into the emptied slot. Returns how many rows got their old cell.
int32_t server_blocks_calls::load_adopted(const server_blocks_slot & slot, const server_blocks_text & text, const std::map<llama_pos, server_blocks_key> & copies) {
    int32_t n_same = 0;
    for (const auto & [p0, key] : copies) {
        const int32_t n = parts.transfer.load(slot.id, key, text.hashes[p0], true);
        if (n < 0) { // the checks exclude it; an empty slot is better than one with a part of its text
            parts.transfer.wait();
            llama_memory_seq_rm(llama_get_memory(parts.context.ctx), slot.id, -1, -1);
            slot.prompt->clear();
            state_of(slot).on_clear();
            fail(503, "no_free_cells", "a block could not be loaded, and the slot is empty now: decode the text again");
        }
        n_same += n;
    }
    parts.transfer.wait();
    return n_same;
}

json server_blocks_calls::adopt(const json & body, const server_blocks_slot & slot) {
    auto * ctx   = parts.context.ctx;
    auto & state = state_of(slot);
    if (!parts.context.is_dense()) {
        fail(501, "not_supported_error", string_format("blocks are only a part of the state of a sequence in this kind of memory (%s), so that a text cannot be adopted", parts.context.memory.name));
    }
    check_idle(slot);
    if (body.contains("epoch")) {
        check_epoch(body, state);
    }
    const server_blocks_text text(adopted_tokens(body, slot, false), state.adapters());
    json incomplete = json::array();
    const auto copies = adopted_copies(body, text, incomplete);
    int32_t n_needed = 0;
    for (const auto & item : copies) {
        n_needed += item.second.p1 - item.second.p0;
    }
    const int32_t n_shared = server_ranges_count(llama_kv_block_shared_ranges(ctx, slot.id), 0, slot.n_ctx); // these cells stay in use when the slot is emptied
    const int32_t room     = state.n_free() + state.n_rows() - n_shared;
    if (n_needed > room) {
        fail(503, "no_free_cells", "not enough cells", json { {"needed", n_needed}, {"free", room} });
    }

    llama_memory_seq_rm(llama_get_memory(ctx), slot.id, -1, -1);
    slot.prompt->clear();
    slot.prompt->tokens.insert(text.tokens);
    parts.context.draft.clear(slot.id);
    state.on_adopt();
    state.set_owner({ get_tenant(body), get_session(body) });
    const int32_t n_same = load_adopted(slot, text, copies);
    state.update_peak();
    return json {
        {"epoch",     state.epoch()},
        {"n_tokens",  text.tokens.size()},
        {"n_loaded",  n_needed},
        {"same_cells", n_same == n_needed},
        {"whole",     incomplete.empty()},
        {"not_whole", incomplete},
        {"n_free",    state.n_free()},
    };
}

//
// shifts: rows of an idle slot move to other positions, and their keys are rotated
//

void server_blocks_calls::check_shift(const json & body, const server_blocks_slot & slot) const {
    if (!llama_kv_block_can_shift(parts.context.ctx)) {
        fail(501, "not_supported_error", string_format("positions of this model cannot be shifted (memory: %s)", parts.context.memory.name));
    }
    check_idle(slot);
    check_epoch(body, state_of(slot));
    if (!server_blocks_media(slot.prompt->tokens).empty()) {
        fail(501, "not_supported_error", "positions of a text with images or sounds cannot be shifted");
    }
    if (llama_kv_block_shared(parts.context.ctx, slot.id, 0, std::numeric_limits<llama_pos>::max())) {
        fail(409, "shared_cells", "rows of this slot belong to another slot too");
    }
}

// Removes all tokens that are not resident from the slot's text.
json server_blocks_calls::compact(const json & body, const server_blocks_slot & slot) {
    check_shift(body, slot);
    auto & state = state_of(slot);
    const llama_tokens tokens   = slot.prompt->tokens.get_text_tokens();
    const auto         resident = state.resident();
    llama_tokens remaining;
    for (const auto & r : resident) {
        remaining.insert(remaining.end(), tokens.begin() + std::min<size_t>(r.first, tokens.size()), tokens.begin() + std::min<size_t>(r.second, tokens.size()));
    }
    state.on_move_start(!resident.empty() && resident[0].first == 0 ? resident[0].second : 0);
    const uint32_t n_moved = llama_kv_block_compact(parts.context.ctx, slot.id);
    state.on_moved();
    parts.context.draft.clear(slot.id);
    slot.prompt->clear();
    slot.prompt->tokens.insert(remaining);
    state.renew_epoch();
    state.forget_uses();
    state.reserve();
    return json {
        {"epoch",    state.epoch()},
        {"n_tokens", remaining.size()},
        {"n_closed", tokens.size() - remaining.size()},
        {"n_moved",  n_moved},
    };
}

// Loads a block at other positions than those it was saved from, and inserts its tokens into the slot's text there.
json server_blocks_calls::insert(const json & body, const server_blocks_slot & slot) {
    check_shift(body, slot);
    auto & state = state_of(slot);
    llama_tokens    tokens = slot.prompt->tokens.get_text_tokens();
    const llama_pos at     = get_int(body, "at", 0, (int32_t) tokens.size());
    const auto      names  = get_block_names(body);
    if (names.size() != 1) {
        fail_request("\"names\" must have one block when \"at\" is given");
    }
    const auto   key  = require_in_ram(parts.store, get_tenant(body), names[0]);
    const auto & copy = *parts.store.find(key);
    check_visibility(body, copy, names[0], get_session(body));
    const int32_t n = key.p1 - key.p0;
    if ((int64_t) tokens.size() + n >= slot.n_ctx) {
        fail_request(string_format("%zu + %d tokens do not fit the slot's context of %d", tokens.size(), n, slot.n_ctx));
    }
    if (n > state.n_free()) {
        fail(503, "no_free_cells", "not enough free cells", json { {"needed", n}, {"free", state.n_free()}, {"name", names[0]} });
    }
    const int32_t n_same = parts.transfer.insert(slot.id, key, at);
    if (n_same < 0) {
        fail(409, "other_model", "the block was saved with other KV types or options", json { {"name", names[0]} });
    }
    state.on_move_start(at);
    state.on_moved();
    parts.context.draft.clear(slot.id);
    tokens.insert(tokens.begin() + at, copy.tokens.begin(), copy.tokens.end());
    slot.prompt->clear();
    slot.prompt->tokens.insert(tokens);
    state.renew_epoch();
    state.reserve();
    state.on_recovered(at, at + n);
    return json {
        {"epoch",        state.epoch()},
        {"n_tokens",     tokens.size()},
        {"n_loaded",     n},
        {"n_same_cells", n_same},
        {"turned",       at - key.p0},
    };
}
