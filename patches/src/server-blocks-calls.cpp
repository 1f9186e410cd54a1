// the block calls: what arrives by HTTP, checked whole before anything changes

#include "server-blocks-json.h"

#include <algorithm>
#include <cinttypes>
#include <stdexcept>

namespace {

// How much one body may have: the main loop does all of one call before it decodes again. Checked by the thread
// of the call.
constexpr size_t MAX_OPS     = 4096;
constexpr size_t MAX_PROTECT = 4096;
constexpr size_t MAX_ORDER   = 16384;
constexpr size_t MAX_NAMES   = 16384; // of all ops together
constexpr size_t MAX_RANGES  = 16384;
constexpr size_t MAX_NAME    = 200;   // bytes
constexpr size_t MAX_TENANT  = 1024;  // bytes

// how often the ops of one plan may cover the slot's tokens
constexpr int64_t MAX_COVER  = 16;

std::string get_name(const json & value) {
    if (!value.is_string()) {
        fail_request("a block name must be a string");
    }
    const std::string name = value.get<std::string>();
    if (name.empty() || name.size() > MAX_NAME) {
        fail_request(string_format("a block name must have 1 to %zu bytes", MAX_NAME));
    }
    return name;
}

std::vector<std::string> get_names(const json & op) {
    std::vector<std::string> res;
    if (op.contains("name") && !op.contains("names")) {
        res.push_back(get_name(op.at("name")));
        return res;
    }
    if (!op.contains("names") || !op.at("names").is_array() || op.at("names").empty()) {
        fail_request("\"names\" must be a non-empty array of block names");
    }
    for (const auto & value : op.at("names")) {
        res.push_back(get_name(value));
    }
    return res;
}

json ranges_json(const llama_kv_ranges & ranges) {
    json res = json::array();
    for (const auto & r : ranges) {
        res.push_back(json::array({ r.first, r.second }));
    }
    return res;
}

std::string hex(uint64_t h) {
    return string_format("%016" PRIx64, h);
}

void check_list(const json & body, const char * key, size_t most) {
    if (body.contains(key) && body.at(key).is_array() && body.at(key).size() > most) {
        throw std::invalid_argument(string_format("\"%s\" may have at most %zu entries, this has %zu", key, most, body.at(key).size()));
    }
}

void check_text(const json & body, const char * key, size_t most) {
    if (body.contains(key) && body.at(key).is_string() && body.at(key).get<std::string>().size() > most) {
        throw std::invalid_argument(string_format("\"%s\" may have at most %zu bytes", key, most));
    }
}

} // namespace

void server_blocks_check(const json & body) {
    check_text(body, "tenant",   MAX_TENANT);
    check_text(body, "ranges",   MAX_RANGES*24);
    check_text(body, "bounds",   MAX_RANGES*24);
    check_text(body, "products", MAX_RANGES*24);
    check_list(body, "ops",      MAX_OPS);
    check_list(body, "ranges",   MAX_RANGES);
    check_list(body, "bounds",   MAX_RANGES);
    check_list(body, "products", MAX_RANGES);
    size_t n_names = 0;
    const auto check_op = [&](const json & op) {
        if (!op.is_object()) {
            return;
        }
        check_list(op, "protect", MAX_PROTECT);
        check_list(op, "order",   MAX_ORDER);
        for (const char * key : { "name", "save", "place", "mode", "op" }) {
            check_text(op, key, MAX_NAME);
        }
        n_names += op.contains("names") && op.at("names").is_array() ? op.at("names").size() : 0;
        if (n_names > MAX_NAMES) {
            throw std::invalid_argument(string_format("\"names\" may have at most %zu entries in one call", MAX_NAMES));
        }
    };
    check_op(body);
    if (body.contains("ops") && body.at("ops").is_array()) {
        for (const auto & op : body.at("ops")) {
            check_op(op);
        }
    }
}

// one op of a plan: what it does, where its fields are, and which op of the body it is of
struct server_blocks::plan_op {
    std::string  kind;
    const json * fields;
    const json * name; // of a save
    size_t       source;

    // "save, then evict" spelled as one op -> two ops
    static void expand(const std::string & kind, const json & op, size_t source, std::vector<plan_op> & out) {
        static const json none;
        const json * name = op.contains("name") ? &op.at("name") : &none;
        if (kind == "evict" && op.contains("save")) {
            out.push_back({ "save", &op, &op.at("save"), source });
        }
        out.push_back({ kind, &op, name, source });
        if (kind == "save" && json_value(op, "evict", false)) {
            out.push_back({ "evict", &op, name, source });
        }
    }
};

// the slot as it will be after the ops looked at so far
struct server_blocks::plan_state {
    const server_blocks_slot & slot;
    std::string                tenant;
    std::string                session;
    llama_tokens               tokens;
    std::vector<uint64_t>      hashes;
    llama_kv_ranges            resident;
    const llama_kv_ranges      resident_first; // before the plan
    int32_t                    n_free = 0;
    int32_t                    budget = 0;
    size_t                     bytes  = 0;     // of new copies
    std::set<key_t>            keep;           // copies the plan needs
    std::set<key_t>            fresh;          // copies the plan makes
    std::map<std::string, key_t> named;        // what each name of the plan stands for, from its first op to its last
    std::set<std::string>      dropped;
    int64_t                    cover_left = 0; // tokens that the ops may still go through
    int32_t                    n_resident = 0; // of `resident`
    bool                       dry = true;

    plan_state(const server_blocks_slot & slot, uint64_t adapters, const std::string & tenant, const llama_kv_ranges & resident)
        : slot(slot), tenant(tenant), tokens(slot.prompt->tokens.get_text_tokens()), hashes(prefix_hashes(tokens, adapters)),
          resident(resident), resident_first(resident), cover_left(MAX_COVER*std::max<int64_t>(tokens.size(), MAX_OPS)),
          n_resident(server_ranges_count(resident, 0, std::numeric_limits<llama_pos>::max())) {}

    // the main loop is about to go through so many tokens
    void cover(int64_t n) {
        cover_left -= n;
        if (cover_left < 0) {
            fail_request(string_format("the ops of one plan cover the slot's tokens more than %d times", (int) MAX_COVER));
        }
    }

    // saves run before everything else: a name that is another block's after them would mean another one to some ops
    void refer(const std::string & name, const key_t & key) {
        if (named.emplace(name, key).first->second != key) {
            fail(400, "invalid_request_error", "two blocks have this name in one plan", json { {"name", name} });
        }
    }
};

bool server_blocks::is_action(const std::string & action) {
    static const std::set<std::string> actions = {
        "block-save", "block-evict", "block-load", "block-adopt", "block-drop", "block-plan", "block-compact", "block-spill", "stream",
        "attn-capture", "attention", "block-rows",
    };
    return actions.count(action) > 0;
}

json server_blocks::run(server_blocks_call & call, const std::vector<server_blocks_slot> & slots) {
    const int64_t t_start = ggml_time_us();
    patience_ms = ggml_time_ms() + PATIENCE_MS;
    json res;
    try {
        settle();
        if (call.action == "view") {
            return run_view(call, slots);
        }
        if (call.action == "info") {
            return run_info(call, slots);
        }
        const auto & slot = find_slot(call, slots);
        if (call.action != "attention" && stage(call)) {
            return res;
        }
        if (call.action == "attention") {
            res = run_attention(call.body, slot);
        } else if (call.action == "block-spill") {
            res = run_spill(call);
            if (call.waits) {
                return res;
            }
        } else if (call.action == "block-drop") {
            res = run_drop(call.body);
        } else if (call.action == "block-adopt") {
            res = run_adopt(call.body, slot);
        } else if (call.action == "block-rows") {
            res = run_rows(call.body, slot);
        } else if (call.action == "block-compact") {
            res = run_compact(call.body, slot);
        } else if (call.action == "block-load" && call.body.contains("at")) {
            res = run_insert(call.body, slot);
        } else if (call.action == "block-plan") {
            if (!call.body.contains("ops") || !call.body.at("ops").is_array()) {
                fail_request("\"ops\" must be an array");
            }
            std::vector<plan_op> ops;
            for (size_t i = 0; i < call.body.at("ops").size(); ++i) {
                const json & op = call.body.at("ops").at(i);
                plan_op::expand(json_value(op, "op", std::string()), op, i, ops);
            }
            res = run_plan(call.body, slot, ops);
        } else {
            std::vector<plan_op> ops;
            plan_op::expand(call.action.rfind("block-", 0) == 0 ? call.action.substr(6) : call.action, call.body, 0, ops);
            res = run_plan(call.body, slot, ops);
            json first = res.at("results").at(0);
            first["epoch"]  = res.at("epoch");
            first["n_free"] = res.at("n_free");
            res = first;
        }
    } catch (const server_blocks_error & e) {
        json error = e.extra;
        error["code"]    = e.code;
        error["type"]    = e.type;
        error["message"] = e.message;
        return json { {"error", error} };
    } catch (const std::exception & e) {
        return json { {"error", json { {"code", 400}, {"type", "invalid_request_error"}, {"message", e.what()} }} };
    }
    res["t_ms"] = (ggml_time_us() - t_start)/1000.0;
    return res;
}

const server_blocks_slot & server_blocks::find_slot(const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) const {
    for (const auto & slot : slots) {
        if (slot.id == call.id_slot) {
            return slot;
        }
    }
    fail(404, "not_found_error", string_format("there is no slot %d", call.id_slot));
}

void server_blocks::check_epoch(const json & body, int id) const {
    if (!body.contains("epoch") || !body.at("epoch").is_number_integer()) {
        fail_request("\"epoch\" is missing: take it from /evoke/render or GET /slots/{id}/blocks");
    }
    if (body.at("epoch").get<int64_t>() != state[id].epoch) {
        fail(409, "stale_epoch", "the slot was used by somebody else since", json { {"epoch", state[id].epoch} });
    }
}

//
// looking
//

json server_blocks::slot_json(const server_blocks_slot & slot) const {
    const auto resident = llama_kv_block_resident(ctx, slot.id);
    return json {
        {"id",            slot.id},
        {"epoch",         state[slot.id].epoch},
        {"n_tokens",      slot.prompt->n_tokens()},
        {"resident",      ranges_json(resident)},
        {"n_resident",    llama_kv_block_n_rows(ctx, slot.id)},
        {"held",          ranges_json(held(*slot.prompt))},
        {"n_reusable",    state[slot.id].history.clean_end()},
        {"n_free",        llama_kv_block_n_free(ctx, slot.id)},
        {"is_processing", slot.busy},
        {"reserved",      state[slot.id].reserved},
    };
}

json server_blocks::run_view(const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) const {
    json res = json::array();
    const server_tokens tokens(call.tokens, false);
    for (const auto & slot : slots) {
        json one = slot_json(slot);
        one["n_common"] = std::min<int64_t>(slot.prompt->tokens.get_common_prefix(tokens), state[slot.id].reuse);
        res.push_back(one);
    }
    return json { {"slots", res}, {"instance", instance()} };
}

// which copies of a tenant are new, have other names or are elsewhere since this was last asked
void server_blocks::note_changes(const std::string & tenant) {
    const uint64_t next = version + 1;
    for (auto it = store.lower_bound(key_t { tenant, 0, 0, 0, 0 }); it != store.end() && std::get<0>(it->first) == tenant; ++it) {
        const int now = 2*it->second.in_ram() + it->second.on_disk;
        if (now != it->second.told) {
            it->second.told    = now;
            it->second.changed = version = next;
        }
    }
}

json server_blocks::run_info(const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) {
    const auto & slot   = find_slot(call, slots);
    const auto   tokens = slot.prompt->tokens.get_text_tokens();
    const auto   hashes = prefix_hashes(tokens, state[slot.id].adapters);
    const auto   resident = llama_kv_block_resident(ctx, slot.id);
    const std::string tenant = json_value(call.body, "tenant", std::string());

    note_changes(tenant);
    const std::string since = json_value(call.body, "since", std::string());
    if (since.find_first_not_of("0123456789") != std::string::npos && since != "latest") {
        fail_request("\"since\" must be a version, or latest");
    }
    uint64_t after = since.empty() ? 0 : since == "latest" ? version : std::strtoull(since.c_str(), nullptr, 10);
    after = after > version ? 0 : after; // that of another server

    json blocks = json::array();
    for (auto it = store.lower_bound(key_t { tenant, 0, 0, 0, 0 }); it != store.end() && std::get<0>(it->first) == tenant; ++it) {
        const auto & block = it->second;
        if (block.changed <= after) {
            continue;
        }
        const int32_t n = block.kv.p1 - block.kv.p0;
        const bool stale = !matches(block, tokens, hashes, false);
        const auto visibility = std::get<4>(it->first);
        for (const auto & [name, session] : block.labels) {
            blocks.push_back(json {
                {"name", name}, {"p0", block.kv.p0}, {"p1", block.kv.p1}, {"n_tokens", n}, {"n_bytes", block.kv.size},
                {"tier", block.in_ram() ? "ram" : "disk"}, {"on_disk", block.on_disk},
                {"resident", !stale && server_ranges_count(resident, block.kv.p0, block.kv.p1) == n},
                {"stale",    stale},
                {"whole",    server_blocks_is_whole(visibility)}, {"visibility", hex(visibility)}, {"session", session},
            });
        }
    }
    const auto & s = state[slot.id].stream;
    json res = slot_json(slot);
    res["n_ctx_logical"] = slot.n_ctx;
    res["n_cells"]       = llama_kv_block_n_cells(ctx, slot.id);
    res["tokens_hash"]   = hex(hashes.back());
    res["stream"]        = json { {"budget", s.budget}, {"sink", s.sink}, {"recent", s.recent}, {"block", s.block}, {"protect", ranges_json(s.protect)} };
    res["ram"]           = json { {"used", ram_used}, {"budget", ram_budget} };
    res["disk"]          = disk_json();
    res["row_bytes"]     = row_size;
    res["version"]       = version;
    res["blocks"]        = blocks;
    return res;
}

//
// doing
//

json server_blocks::run_drop(const json & body) {
    const std::string tenant = json_value(body, "tenant", std::string());
    size_t n = 0;
    if (json_value(body, "all", false)) {
        std::vector<std::string> names;
        for (const auto & [key, value] : labels) {
            if (key.first == tenant) {
                names.push_back(key.second);
            }
        }
        for (const auto & name : names) {
            n += drop(tenant, name);
        }
    } else {
        for (const auto & name : get_names(body)) {
            n += drop(tenant, name);
        }
    }
    return json { {"n_dropped", n} };
}

json server_blocks::run_spill(server_blocks_call & call) {
    if (!disk.is_open()) {
        fail(501, "not_supported_error", "there is no --evoke-disk" + (disk_why.empty() ? "" : ": " + disk_why));
    }
    const std::string tenant = json_value(call.body, "tenant", std::string());
    std::set<key_t> keys;
    for (const auto & [name, key] : labels) {
        if (name.first == tenant && json_value(call.body, "all", false)) {
            keys.insert(key);
        }
    }
    for (const auto & name : keys.empty() && !json_value(call.body, "all", false) ? get_names(call.body) : std::vector<std::string>()) {
        if (!find(tenant, name)) {
            unknown(tenant, name);
        }
        keys.insert(labels.at({ tenant, name }));
    }
    for (const auto & write : call.writes) {
        if (disk.state(*write) == server_blocks_write::FAILED) {
            fail(503, "unavailable_error", "the disk did not take a block: " + write->error);
        }
    }
    call.writes.clear();
    if (call.visit < VISITS_MAX) { // a write that was under way may have been of other names
        for (const auto & key : keys) {
            const auto it = store.find(key);
            write(it, true);
            if (it->second.writing) {
                call.writes.push_back(it->second.writing);
            }
        }
        call.waits = !call.writes.empty();
        if (call.waits) {
            return json();
        }
    }
    size_t n_spilled = 0, n_bytes = 0;
    for (const auto & key : keys) {
        const auto it = store.find(key);
        const bool current = it->second.on_disk && !it->second.renamed && !it->second.redone;
        n_spilled += current;
        n_bytes   += current ? it->second.kv.size : 0;
        if (current && !it->second.writing && it->second.in_ram() && json_value(call.body, "release", false)) {
            release(it);
        }
    }
    trim_index();
    return json { {"n_spilled", n_spilled}, {"n_bytes", n_bytes} };
}

void server_blocks::unknown(const std::string & tenant, const std::string & name) const {
    const std::string why = disk.is_open() ? disk.foreign(tenant, name) : "";
    if (!why.empty()) {
        fail(409, "other_model", "the block is on disk but cannot be used here: " + why, json { {"name", name} });
    }
    fail(404, "unknown_block", "there is no saved block of this name", json { {"name", name} });
}

// the session that a call is made for: which copies that are not whole it may load
static std::string get_session(const json & body) {
    if (!body.contains("session")) {
        return "";
    }
    const std::string session = body.at("session").is_string() ? body.at("session").get<std::string>() : std::string(201, '?');
    if (session.size() > 200) {
        fail_request("\"session\" must be a string of at most 200 bytes");
    }
    return session;
}

// Rows that were decoded while text before them was missing are not what another history would have there: only the
// session that saved them loads them, unless the call wants whole ones only.
void server_blocks::check_visible(const json & body, const saved & block, const std::string & name, const std::string & session) {
    if (block.whole()) {
        return;
    }
    if (json_value(body, "whole", false)) {
        fail(409, "not_whole", "the block was decoded while text before it was missing, and the call asks for whole ones", json { {"name", name} });
    }
    if (block.labels.at(name) != session) {
        fail(409, "not_whole", "the block was decoded while text before it was missing: only the session that saved it may load it; "
            "decode the text again", json { {"name", name} });
    }
}

// a copy that can be loaded now: what was on disk has been read by the thread of the call
server_blocks::saved * server_blocks::in_memory(const std::string & tenant, const std::string & name) {
    saved * block = find(tenant, name);
    if (!block) {
        unknown(tenant, name);
    }
    if (!block->in_ram()) {
        fail(503, "unavailable_error", "the block came from disk and had to make room for others again", json { {"name", name} });
    }
    return block;
}

// the names whose rows a call is about to load
std::vector<std::string> server_blocks::needed(const server_blocks_call & call) {
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

// a logical token list for an idle slot, with the rows of some saved blocks, the topmost one included
json server_blocks::run_adopt(const json & body, const server_blocks_slot & slot) {
    if (kind.windowed || kind.recurrent) {
        fail(501, "not_supported_error", string_format("blocks hold only a part of a sequence in this memory (%s)", kind.name));
    }
    if (slot.busy) {
        fail(503, "unavailable_error", "the slot is busy");
    }
    if (body.contains("epoch")) {
        check_epoch(body, slot.id);
    }
    const json & values = get_list(body, "tokens");
    if (values.empty()) {
        fail_request("\"tokens\" must be a non-empty array of token ids");
    }
    if (values.size() >= (size_t) slot.n_ctx) {
        fail_request(string_format("%zu tokens do not fit the slot's context of %d", values.size(), slot.n_ctx));
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    llama_tokens  list;
    for (const auto & value : values) {
        const int64_t token = value.is_number_integer() ? value.get<int64_t>() : -1;
        if (token < 0 || token >= n_vocab) {
            fail_request("\"tokens\" must be token ids; " + value.dump() + " is not one of the vocabulary");
        }
        list.push_back((llama_token) token);
    }

    const std::string tenant = json_value(body, "tenant", std::string());
    const std::string session = get_session(body);
    const auto hashes = prefix_hashes(list, state[slot.id].adapters);
    json not_whole = json::array();
    std::map<llama_pos, key_t> blocks; // by first position
    llama_kv_ranges covered;
    for (const auto & name : get_names(body)) {
        saved * block = in_memory(tenant, name);
        if (!matches(*block, list, hashes, json_value(body, "force", false))) {
            fail(409, "stale_block", "the block was made of other tokens", json { {"name", name} });
        }
        check_visible(body, *block, name, session);
        if (!block->whole()) {
            not_whole.push_back(name);
        }
        if (blocks.count(block->kv.p0) == 0 && server_ranges_overlap(covered, block->kv.p0, block->kv.p1)) {
            fail_request("blocks overlap: " + name);
        }
        if (block->kv.layout != llama_kv_block_layout(ctx)) {
            fail(409, "other_model", "the block was saved with other KV types or options", json { {"name", name} });
        }
        blocks[block->kv.p0] = labels.at({ tenant, name });
        server_ranges_add(covered, block->kv.p0, block->kv.p1);
    }
    if (covered.back().second != (llama_pos) list.size()) {
        fail_request("the block that ends at the last token must be among \"names\": decoding goes on from its last row");
    }
    const int32_t needed = server_ranges_count(covered, 0, (llama_pos) list.size());
    const int32_t kept   = server_ranges_count(llama_kv_block_shared_ranges(ctx, slot.id), 0, slot.n_ctx); // by others
    const int32_t room   = llama_kv_block_n_free(ctx, slot.id) + llama_kv_block_n_rows(ctx, slot.id) - kept;
    if (needed > room) {
        fail(503, "no_free_cells", "not enough cells", json { {"needed", needed}, {"free", room} });
    }

    llama_memory_seq_rm(llama_get_memory(ctx), slot.id, -1, -1);
    slot.prompt->clear();
    slot.prompt->tokens.insert(list);
    bump(slot.id);
    state[slot.id].reserved = true;
    state[slot.id].used.clear();
    state[slot.id].history.clear();
    int32_t n_same = 0;
    for (const auto & [p0, key] : blocks) {
        auto & block = store.at(key);
        const int32_t n = llama_kv_block_load(ctx, slot.id, block.kv, true);
        if (n < 0) { // was checked; a slot with half of a text would be worse than an empty one
            fence();
            llama_memory_seq_rm(llama_get_memory(ctx), slot.id, -1, -1);
            slot.prompt->clear();
            on_clear(slot.id);
            fail(503, "no_free_cells", "a block could not be put back: the slot is empty now");
        }
        n_same += n;
        copying = true;
        use(key, block);
        note_loaded(slot.id, block, hashes[p0]);
        touch(slot.id, p0, block.kv.p1);
    }
    fence();
    note_peak(slot.id);
    return json {
        {"epoch",     state[slot.id].epoch},
        {"n_tokens",  list.size()},
        {"n_loaded",  needed},
        {"same_cells", n_same == needed},
        {"whole",     not_whole.empty()},
        {"not_whole", not_whole},
        {"n_free",    llama_kv_block_n_free(ctx, slot.id)},
    };
}

// all ops or none: a dry run over a model of the slot, then copies out (they change nothing in the slot),
// then the ops that cannot fail any more
json server_blocks::run_plan(const json & body, const server_blocks_slot & slot, const std::vector<plan_op> & ops) {
    check_epoch(body, slot.id);
    plan_state plan(slot, state[slot.id].adapters, json_value(body, "tenant", std::string()), llama_kv_block_resident(ctx, slot.id));
    state[slot.id].history.reconcile(plan.resident);
    plan.session = get_session(body);
    plan.n_free = llama_kv_block_n_free(ctx, slot.id);
    plan.budget = state[slot.id].stream.budget;
    if (body.contains("expect")) {
        const json & expect = body.at("expect");
        const bool same = json_value(expect, "n_tokens", (int64_t) plan.tokens.size()) == (int64_t) plan.tokens.size()
            && json_value(expect, "tokens_hash", hex(plan.hashes.back())) == hex(plan.hashes.back());
        if (!same) {
            fail(409, "stale_epoch", "the slot holds other tokens than expected", json { {"n_tokens", plan.tokens.size()} });
        }
    }

    for (const auto & op : ops) {
        try {
            run_op(op, plan);
        } catch (server_blocks_error & e) {
            e.extra["op"] = op.source;
            throw;
        }
    }
    if (!may_fit(plan) || !make_space(plan.tenant, plan.bytes, plan.keep) || !set_aside(plan)) {
        fail(413, "ram_budget", "the blocks to save do not fit --evoke-ram beside what other tenants have a right to", json { {"needed", plan.bytes}, {"budget", ram_budget} });
    }

    plan.dry = false;
    std::vector<json> results(ops.size());
    for (const bool saves : { true, false }) {
        for (size_t i = 0; i < ops.size(); ++i) {
            if ((ops[i].kind == "save") == saves) {
                results[i] = run_op(ops[i], plan);
                note_peak(slot.id);
            }
        }
    }
    fence(); // one for all copies of the plan
    give_back_aside();
    json res = json::array();
    for (size_t i = 0; i < ops.size(); ++i) {
        if (i > 0 && ops[i].source == ops[i - 1].source) { // the second half of a save + evict
            for (const auto & item : results[i].items()) {
                res.at(res.size() - 1)[item.key()] = item.value();
            }
        } else {
            res.push_back(results[i]);
        }
    }
    return json {
        {"epoch",      state[slot.id].epoch},
        {"results",    res},
        {"n_free",     llama_kv_block_n_free(ctx, slot.id)},
        {"n_resident", llama_kv_block_n_rows(ctx, slot.id)},
    };
}

// whether put() makes a copy of these rows: there is none, or only in a file that somebody deleted
bool server_blocks::will_copy(const key_t & key, int id) const {
    const auto it = store.find(key);
    return !has_copy(key, id) || (!it->second.in_ram() && !it->second.reading && !disk.holds(file_of(key, it->second)));
}

// whether the new copies find contiguous memory beside those that the plan needs: if not, no copy is given up for them
bool server_blocks::may_fit(const plan_state & plan) {
    std::vector<size_t> sizes;
    for (const auto & key : plan.fresh) {
        sizes.push_back((std::get<3>(key) - std::get<2>(key))*row_size);
    }
    if (sizes.empty()) {
        return true;
    }
    std::set<const uint8_t *> freeable;
    for (const auto * share : must_give(plan.tenant, plan.bytes)) {
        for (const auto & [used, key] : share->lru[1]) {
            const auto & block = store.at(key);
            if (!block.writing && !block.reading && !plan.keep.count(key)) {
                freeable.insert(block.kv.data);
            }
        }
    }
    return arena.fits(sizes, freeable);
}

// Memory for every new copy of the plan, before any of them is made or a name moves: after this no save can fail.
bool server_blocks::set_aside(const plan_state & plan) {
    for (const auto & key : plan.fresh) {
        const size_t size = (std::get<3>(key) - std::get<2>(key))*row_size;
        uint8_t * data = take(plan.tenant, size, plan.keep);
        if (!data) {
            give_back_aside();
            return false;
        }
        aside.insert({ size, data });
    }
    bytes_aside = plan.bytes;
    return true;
}

void server_blocks::give_back_aside() {
    for (const auto & item : aside) {
        arena.give(item.second);
    }
    aside.clear();
    bytes_aside = 0;
}

json server_blocks::run_op(const plan_op & what, plan_state & plan) {
    const std::string & kind = what.kind;
    const json        & op   = *what.fields;
    if (kind == "save")   { return op_save  (op, *what.name, plan); }
    if (kind == "evict")  { return op_evict (op, plan); }
    if (kind == "load")   { return op_load  (op, plan); }
    if (kind == "stream") { return op_stream(op, plan); }
    if (kind == "reuse")  { return op_reuse (op, plan); }
    if (kind == "probe")  { return op_probe (plan); }
    if (kind == "attn-capture") { return op_capture(op, plan.slot, plan.dry); }
    if (kind == "drop") {
        const auto names = get_names(op);
        plan.dropped.insert(names.begin(), names.end());
        return plan.dry ? json() : run_drop(json { {"tenant", plan.tenant}, {"names", names} });
    }
    fail_request("unknown op \"" + kind + "\": save, evict, load, drop, stream, reuse, probe, attn-capture");
}

json server_blocks::op_save(const json & op, const json & label, plan_state & plan) {
    const std::string name = get_name(label);
    const int32_t n_tokens = (int32_t) plan.tokens.size();
    const llama_pos p0 = get_int(op, "p0", 0, n_tokens);
    const llama_pos p1 = get_int(op, "p1", 0, n_tokens);
    if (p0 >= p1) {
        fail_request("a block needs p0 < p1");
    }
    if (plan.dry) {
        plan.cover(p1 - p0);
    }
    const key_t key = key_of(plan.tenant, plan.slot.id, plan.hashes, p0, p1);
    if (plan.dry) {
        if (!server_ranges_hold(plan.resident_first, p0, p1)) {
            fail_request(string_format("[%d, %d) is not wholly resident", p0, p1));
        }
        if (plan.dropped.count(name)) {
            fail(400, "invalid_request_error", "saves run first: what the plan drops before would be dropped after", json { {"name", name} });
        }
        plan.refer(name, key);
        plan.keep.insert(key);
        if (will_copy(key, plan.slot.id) && plan.fresh.insert(key).second) {
            plan.bytes += cost(plan.slot.id, p0, p1);
        }
        return {};
    }
    if (!put({ plan.tenant, plan.session, name }, plan.slot.id, plan.tokens, plan.hashes, p0, p1, plan.keep)) {
        give_back_aside(); // there was memory for all of them: it cannot be
        fail(413, "ram_budget", "the host has no memory for this block", json { {"name", name} });
    }
    const auto & block = store.at(key);
    return json {
        {"name", name}, {"p0", p0}, {"p1", p1}, {"n_tokens", p1 - p0}, {"n_bytes", block.kv.size}, {"n_runs", block.kv.n_runs},
        {"tokens_hash", hex(plan.hashes[p1])}, {"prefix_hash", hex(block.prefix_hash)},
        {"whole", block.whole()}, {"visibility", hex(std::get<4>(key))},
    };
}

json server_blocks::op_evict(const json & op, plan_state & plan) {
    llama_kv_ranges ranges;
    if (op.contains("names")) {
        for (const auto & name : get_names(op)) {
            if (plan.dry && !plan.named.count(name)) {
                const saved * block = find(plan.tenant, name);
                if (!block || plan.dropped.count(name)) {
                    unknown(plan.tenant, name);
                }
                plan.cover(block->kv.p1 - block->kv.p0);
                if (!matches(*block, plan.tokens, plan.hashes, false)) {
                    fail(409, "stale_block", "the slot holds other tokens at this block's place", json { {"name", name} });
                }
                plan.refer(name, labels.at({ plan.tenant, name }));
            }
            const auto & key = plan.named.at(name);
            ranges.push_back({ std::get<2>(key), std::get<3>(key) });
        }
    } else {
        const int32_t n_tokens = (int32_t) plan.tokens.size();
        ranges.push_back({ get_int(op, "p0", 0, n_tokens), get_int(op, "p1", 0, n_tokens) });
        if (ranges[0].first >= ranges[0].second) {
            fail_request("a range needs p0 < p1");
        }
    }
    ranges = server_ranges_of(std::move(ranges));
    uint32_t n_evicted = 0;
    const auto held_rows = plan.dry ? held(*plan.slot.prompt) : llama_kv_ranges();
    for (const auto & r : ranges) {
        if (!plan.dry) {
            n_evicted += evict_rows(plan.slot.id, r.first, r.second);
            continue;
        }
        plan.cover(r.second - r.first);
        if (!plan.resident.empty() && r.first < plan.resident.back().second && plan.resident.back().second <= r.second) {
            fail_request(string_format("[%d, %d) holds the last resident row: the next token could not be decoded", r.first, r.second));
        }
        if (llama_kv_block_shared(ctx, plan.slot.id, r.first, r.second)) {
            fail(409, "shared_cells", "rows of this range belong to another sequence too");
        }
        for (const auto & h : held_rows) {
            if (std::max(h.first, r.first) < std::min(h.second, r.second)) {
                fail(409, "held_row", "a context checkpoint stands on a row of this range", json { {"p0", h.first}, {"p1", h.second} });
            }
        }
    }
    if (plan.dry) {
        plan.resident = server_ranges_without(plan.resident, ranges);
        const int32_t n_rows = server_ranges_count(plan.resident, 0, std::numeric_limits<llama_pos>::max());
        plan.n_free    += plan.n_resident - n_rows;
        plan.n_resident = n_rows;
    }
    return json { {"n_evicted", n_evicted} };
}

json server_blocks::op_load(const json & op, plan_state & plan) {
    const bool force = json_value(op, "force", false);
    const std::string place = json_value(op, "place", std::string("same"));
    if (place != "same" && place != "contig") {
        fail_request("\"place\" must be \"same\" or \"contig\"");
    }
    int32_t n_loaded = 0;
    int32_t n_same   = 0;
    json    not_whole = json::array();
    for (const auto & name : get_names(op)) {
        if (plan.dropped.count(name) && plan.dry) {
            unknown(plan.tenant, name);
        }
        saved * block = in_memory(plan.tenant, name);
        const llama_pos p0 = block->kv.p0;
        const llama_pos p1 = block->kv.p1;
        if (!plan.dry) {
            const int32_t n = llama_kv_block_load(ctx, plan.slot.id, block->kv, place == "same");
            if (n < 0) { // the plan was checked: it cannot be
                fail(503, "no_free_cells", "the block could not be put back", json { {"name", name} });
            }
            n_same   += n;
            copying   = true;
            n_loaded += p1 - p0;
            use(labels.at({ plan.tenant, name }), *block);
            note_loaded(plan.slot.id, *block, plan.hashes[p0]);
            touch(plan.slot.id, p0, p1);
            if (!block->whole()) {
                not_whole.push_back(name);
            }
            continue;
        }
        plan.cover(p1 - p0);
        if (!matches(*block, plan.tokens, plan.hashes, force)) {
            fail(409, "stale_block", "the slot holds other tokens before or at this block's place", json { {"name", name} });
        }
        if (block->kv.layout != llama_kv_block_layout(ctx)) {
            fail(409, "other_model", "the block was saved with other KV types or options", json { {"name", name} });
        }
        check_visible(op, *block, name, plan.session);
        if (server_ranges_overlap(plan.resident, p0, p1)) {
            fail(409, "already_resident", "rows of this block are resident", json { {"name", name} });
        }
        const int32_t room = plan.budget > 0 ? std::min(plan.n_free, plan.budget - plan.n_resident) : plan.n_free;
        if (p1 - p0 > room) {
            fail(503, "no_free_cells", "not enough free cells or budget", json { {"needed", p1 - p0}, {"free", std::max(0, room)}, {"name", name} });
        }
        plan.n_free     -= p1 - p0;
        plan.n_resident += p1 - p0;
        plan.refer(name, labels.at({ plan.tenant, name }));
        plan.keep.insert(labels.at({ plan.tenant, name }));
        server_ranges_add(plan.resident, p0, p1);
    }
    return json { {"n_loaded", n_loaded}, {"n_same_cells", n_same}, {"same_cells", n_same == n_loaded},
        {"whole", not_whole.empty()}, {"not_whole", not_whole} };
}

// rows of a copy are in the slot; behind another text than they were made behind they are not what that would make
void server_blocks::note_loaded(int id, const saved & block, uint64_t prefix_hash) {
    server_ranges_add(state[id].loaded, block.kv.p0, block.kv.p1);
    state[id].history.loaded(block.prefix_hash == prefix_hash ? block.rows : server_blocks_rows_displaced(block.rows, block.prefix_hash));
}

// a checksum of each row of some ranges: for tests that compare what comes back with what went out
json server_blocks::run_rows(const json & body, const server_blocks_slot & slot) {
    if (!getenv("LLAMA_EVOKE_ROW_SUMS")) {
        fail(501, "not_supported_error", "row checksums are for tests: start the server with LLAMA_EVOKE_ROW_SUMS=1 in its environment");
    }
    const int32_t n_tokens = slot.prompt->n_tokens();
    const llama_pos p0 = get_int(body, "p0", 0, n_tokens);
    const llama_pos p1 = get_int(body, "p1", 0, n_tokens);
    const auto resident = llama_kv_block_resident(ctx, slot.id);
    std::vector<uint8_t> data(row_size);
    json sums = json::array();
    for (llama_pos p = p0; p < p1; ++p) {
        llama_kv_block row;
        if (server_ranges_count(resident, p, p + 1) == 0 || !llama_kv_block_save(ctx, slot.id, p, p + 1, data.data(), row)) {
            sums.push_back(nullptr);
            continue;
        }
        llama_kv_block_fence(ctx);
        sums.push_back(hex(server_blocks_checksum(data.data(), data.size())));
    }
    return json { {"p0", p0}, {"sums", sums} };
}

json server_blocks::op_stream(const json & op, plan_state & plan) {
    const int32_t big = 1 << 30;
    const int32_t zero = 0, block = 64;
    server_blocks_stream stream;
    stream.tenant  = plan.tenant;
    stream.session = plan.session;
    stream.budget = get_int(op, "budget", 0, big);
    stream.sink   = get_int(op, "sink",   0, big, &zero);
    stream.recent = get_int(op, "recent", 0, big, &zero);
    stream.block  = get_int(op, "block",  1, big, &block);
    for (const auto & r : get_list(op, "protect")) {
        stream.protect.push_back(get_range(r, "protect"));
    }
    stream.protect = server_ranges_of(std::move(stream.protect));
    for (const auto & e : get_list(op, "order")) {
        if (!e.is_object() || !e.contains("name")) {
            fail_request("\"order\" must be an array of {name, p0, p1}");
        }
        stream.order.push_back({ get_name(e.at("name")), get_int(e, "p0", 0, big), get_int(e, "p1", 0, big) });
        if (stream.order.back().p0 >= stream.order.back().p1) {
            fail_request("\"order\" must be blocks with p0 < p1");
        }
    }
    const int64_t held = (int64_t) stream.sink + stream.recent + server_ranges_count(stream.protect, 0, big) + stream.block;
    if (stream.budget > 0 && held > stream.budget) {
        fail_request(string_format("a budget of %d cannot hold sink + recent + protect + one block = %d tokens", stream.budget, (int) held));
    }
    plan.budget = stream.budget;
    if (!plan.dry) {
        state[plan.slot.id].stream   = std::move(stream);
        state[plan.slot.id].reserved = true;
        if (!state[plan.slot.id].probed) {
            state[plan.slot.id].peak = 0; // what was there before nobody had to hold to this budget
        }
    }
    return json { {"budget", stream.budget}, {"sink", stream.sink}, {"recent", stream.recent}, {"block", stream.block} };
}

// for who finds a beginning in the slot that is his, and holes in it that are not
json server_blocks::op_reuse(const json & op, plan_state & plan) {
    const int32_t n = get_int(op, "n_tokens", 0, (int32_t) plan.tokens.size());
    if (!plan.dry) {
        state[plan.slot.id].reuse = n;
    }
    return json { {"n_tokens", n} };
}

// The slot's next marked request is there to see what it looks for: its rows go before the one after it is decoded,
// which goes on from where it did, and whose books have what was loaded and evicted for both.
json server_blocks::op_probe(plan_state & plan) {
    if (kind.windowed || kind.recurrent) {
        fail(501, "not_supported_error", string_format("what was decoded cannot be taken back exactly (memory: %s)", kind.name));
    }
    if (!plan.dry) {
        state[plan.slot.id].probe = true;
    }
    return json::object();
}

// positions are about to change: of an idle slot, in a memory whose keys can be turned
void server_blocks::check_shift(const json & body, const server_blocks_slot & slot) const {
    if (!llama_kv_block_can_shift(ctx)) {
        fail(501, "not_supported_error", string_format("positions of this model cannot be shifted (memory: %s)", kind.name));
    }
    if (slot.busy) {
        fail(503, "unavailable_error", "the slot is busy");
    }
    check_epoch(body, slot.id);
    if (llama_kv_block_shared(ctx, slot.id, 0, std::numeric_limits<llama_pos>::max())) {
        fail(409, "shared_cells", "rows of this slot belong to another sequence too");
    }
}

// the slot's text is from now on what was resident of it
json server_blocks::run_compact(const json & body, const server_blocks_slot & slot) {
    check_shift(body, slot);
    const llama_tokens tokens = slot.prompt->tokens.get_text_tokens();
    llama_tokens kept;
    for (const auto & r : llama_kv_block_resident(ctx, slot.id)) {
        kept.insert(kept.end(), tokens.begin() + std::min<size_t>(r.first, tokens.size()), tokens.begin() + std::min<size_t>(r.second, tokens.size()));
    }
    auto & history = state[slot.id].history;
    const auto before = llama_kv_block_resident(ctx, slot.id);
    history.removed(!before.empty() && before[0].first == 0 ? before[0].second : 0, std::numeric_limits<llama_pos>::max());
    const uint32_t n_moved = llama_kv_block_compact(ctx, slot.id);
    history.moved(llama_kv_block_resident(ctx, slot.id));
    slot.prompt->clear();
    slot.prompt->tokens.insert(kept);
    bump(slot.id);
    state[slot.id].used.clear();
    state[slot.id].reserved = true;
    return json {
        {"epoch",    state[slot.id].epoch},
        {"n_tokens", kept.size()},
        {"n_closed", tokens.size() - kept.size()},
        {"n_moved",  n_moved},
    };
}

// a block at another place than it came from: its tokens join the slot's text there
json server_blocks::run_insert(const json & body, const server_blocks_slot & slot) {
    check_shift(body, slot);
    llama_tokens tokens = slot.prompt->tokens.get_text_tokens();
    const llama_pos   at     = get_int(body, "at", 0, (int32_t) tokens.size());
    const std::string tenant = json_value(body, "tenant", std::string());
    const auto        names  = get_names(body);
    if (names.size() != 1) {
        fail_request("one block at a time can be loaded at another place");
    }
    saved * block = in_memory(tenant, names[0]);
    check_visible(body, *block, names[0], get_session(body));
    const int32_t n = block->kv.p1 - block->kv.p0;
    if ((int64_t) tokens.size() + n >= slot.n_ctx) {
        fail_request(string_format("%zu + %d tokens do not fit the slot's context of %d", tokens.size(), n, slot.n_ctx));
    }
    const int32_t n_free = llama_kv_block_n_free(ctx, slot.id);
    if (n > n_free) {
        fail(503, "no_free_cells", "not enough free cells", json { {"needed", n}, {"free", n_free}, {"name", names[0]} });
    }
    const int32_t n_same = llama_kv_block_insert(ctx, slot.id, block->kv, at);
    if (n_same < 0) {
        fail(409, "other_model", "the block was saved with other KV types or options", json { {"name", names[0]} });
    }
    copying = true;
    fence();
    use(labels.at({ tenant, names[0] }), *block);
    state[slot.id].history.removed(at, std::numeric_limits<llama_pos>::max());
    state[slot.id].history.moved(llama_kv_block_resident(ctx, slot.id));
    tokens.insert(tokens.begin() + at, block->tokens.begin(), block->tokens.end());
    slot.prompt->clear();
    slot.prompt->tokens.insert(tokens);
    bump(slot.id);
    state[slot.id].reserved = true;
    server_ranges_add(state[slot.id].loaded, at, at + n);
    return json {
        {"epoch",        state[slot.id].epoch},
        {"n_tokens",     tokens.size()},
        {"n_loaded",     n},
        {"n_same_cells", n_same},
        {"turned",       at - block->kv.p0},
    };
}

json server_blocks_parse(const std::string & text) {
    static const size_t max_depth = 200;
    static const size_t max_keys  = 16384; // of one object: the parser compares each with all before it
    std::vector<std::pair<char, size_t>> open; // what is open, and how many commas it has
    bool quoted = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (quoted) {
            i += c == '\\';
            quoted = c != '"';
        } else if (c == '"') {
            quoted = true;
        } else if (c == '[' || c == '{') {
            open.push_back({ c, 0 });
            if (open.size() > max_depth) {
                throw std::invalid_argument(string_format("the body is nested more than %zu levels deep", max_depth));
            }
        } else if ((c == ']' || c == '}') && !open.empty()) {
            open.pop_back();
        } else if (c == ',' && !open.empty() && open.back().first == '{' && ++open.back().second >= max_keys) {
            throw std::invalid_argument(string_format("an object of the body has more than %zu keys", max_keys));
        }
    }
    json body;
    try {
        body = json::parse(text);
    } catch (const std::exception & e) {
        throw std::invalid_argument(std::string("the body is not JSON: ") + e.what());
    }
    if (!body.is_object()) {
        throw std::invalid_argument("the body must be a JSON object");
    }
    return body;
}
