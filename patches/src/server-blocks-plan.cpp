#include "server-blocks-plan.h"

#include "server-blocks-media.h"

#include <algorithm>
#include <limits>

// How many times the ops of one plan may cover the slot's tokens.
static constexpr int64_t MAX_COVERAGE = 16;

static constexpr int32_t MAX_COUNT = 1 << 30;

void server_blocks_op::expand(const std::string & kind, const json & op, size_t source, std::vector<server_blocks_op> & out) {
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

server_blocks_plan::server_blocks_plan(const server_blocks_parts & parts, const server_blocks_slot & slot, const json & body)
    : parts(parts), slot(slot), state(parts.context.slots[slot.id]), tenant(get_tenant(body)), text(*slot.prompt, state),
      resident(state.resident()), resident_before(resident), n_resident(server_ranges_size(resident)) {
    check_epoch(body, state);
    if (!text.media.empty() && !server_blocks_media_supported()) {
        fail(501, "not_supported_error", "the text of the slot has images whose rows share positions (M-RoPE): blocks work on text only with this model");
    }
    state.reconcile();
    session     = get_session(body);
    n_free      = state.n_free();
    max_rows    = state.budget().n_rows;
    tokens_left = MAX_COVERAGE*std::max<int64_t>(text.tokens.size(), SERVER_BLOCKS_MAX_OPS);
    check_expectations(body);
}

server_blocks_plan::~server_blocks_plan() {
    parts.store.cancel_reservation();
}

// Fails if a range begins or ends inside an image or a sound.
void server_blocks_plan::check_media(llama_pos p0, llama_pos p1) const {
    for (const llama_pos pos : { p0, p1 }) {
        if (const auto * cut = server_blocks_cut_by(text.media, pos)) {
            fail(400, "invalid_request_error", string_format("[%d, %d) cuts the image or sound at [%d, %d)", p0, p1, cut->first, cut->second));
        }
    }
}

void server_blocks_plan::check_expectations(const json & body) const {
    if (!body.contains("expect")) {
        return;
    }
    const json & expect = body.at("expect");
    const auto   n_tokens = (int64_t) text.tokens.size();
    const bool same = json_value(expect, "n_tokens", n_tokens) == n_tokens
        && json_value(expect, "tokens_hash", hex(text.hashes.back())) == hex(text.hashes.back());
    if (!same) {
        fail(409, "stale_epoch", "the slot has other tokens than the call expects", json { {"n_tokens", n_tokens} });
    }
}

json server_blocks_plan::run(const std::vector<server_blocks_op> & ops) {
    check_ops(ops);
    reserve();
    return execute(ops);
}

void server_blocks_plan::check_ops(const std::vector<server_blocks_op> & ops) {
    for (const auto & op : ops) {
        try {
            run_op(op);
        } catch (server_blocks_error & e) {
            e.extra["op"] = op.source;
            throw;
        }
    }
}

void server_blocks_plan::reserve() {
    std::vector<size_t> row_sizes;
    for (const auto & key : new_keys) {
        row_sizes.push_back((key.p1 - key.p0)*parts.store.row_bytes());
    }
    if (!parts.store.reserve(tenant, row_sizes, new_bytes, needed)) {
        fail(413, "ram_budget", "--evoke-ram has no room for the new blocks beside the shares of other tenants: save fewer, or start the server with more",
            json { {"needed", new_bytes}, {"budget", parts.store.budget()} });
    }
}

json server_blocks_plan::execute(const std::vector<server_blocks_op> & ops) {
    dry = false;
    state.set_owner({ tenant, session });
    std::vector<json> results(ops.size());
    for (const bool saves : { true, false }) {
        for (size_t i = 0; i < ops.size(); ++i) {
            if ((ops[i].kind == "save") == saves) {
                results[i] = run_op(ops[i]);
                state.update_peak();
            }
        }
    }
    parts.transfer.wait(); // once for all copies of the plan
    parts.store.cancel_reservation();
    json merged = json::array();
    for (size_t i = 0; i < ops.size(); ++i) {
        if (i > 0 && ops[i].source == ops[i - 1].source) { // the second half of "save, then evict"
            for (const auto & item : results[i].items()) {
                merged.at(merged.size() - 1)[item.key()] = item.value();
            }
        } else {
            merged.push_back(results[i]);
        }
    }
    return json {
        {"epoch",      state.epoch()},
        {"results",    merged},
        {"n_free",     state.n_free()},
        {"n_resident", state.n_rows()},
    };
}

// Checks the op while `dry`, else executes it.
json server_blocks_plan::run_op(const server_blocks_op & op) {
    const json & fields = *op.fields;
    if (op.kind == "save")         { return save(fields, *op.name); }
    if (op.kind == "evict")        { return evict(fields); }
    if (op.kind == "load")         { return load(fields); }
    if (op.kind == "stream")       { return set_budget(fields); }
    if (op.kind == "reuse")        { return limit_reuse(fields); }
    if (op.kind == "probe")        { return probe(); }
    if (op.kind == "drop")         { return drop(fields); }
    if (op.kind == "attn-capture") { return parts.capture.run_op(fields, slot, dry); }
    fail_request("unknown op \"" + op.kind + "\": save, evict, load, drop, stream, reuse, probe, attn-capture");
}

// Counts tokens that the main loop is about to process. Fails when they are too many.
void server_blocks_plan::count_tokens(int64_t n) {
    tokens_left -= n;
    if (tokens_left < 0) {
        fail_request(string_format("the ops of one plan cover the slot's tokens more than %d times", (int) MAX_COVERAGE));
    }
}

// Records which block a name means in this plan. Fails when it would mean two: saves are executed first, so that an op
// before a save would get the new block.
void server_blocks_plan::bind_name(const std::string & name, const server_blocks_key & key) {
    if (names.emplace(name, key).first->second != key) {
        fail(400, "invalid_request_error", "the name means two blocks in this plan: use two plans", json { {"name", name} });
    }
}

json server_blocks_plan::save(const json & op, const json & label) {
    const std::string name = get_block_name(label);
    const int32_t n_tokens = (int32_t) text.tokens.size();
    const llama_pos p0 = get_int(op, "p0", 0, n_tokens);
    const llama_pos p1 = get_int(op, "p1", 0, n_tokens);
    if (p0 >= p1) {
        fail_request("a block needs p0 < p1");
    }
    if (dry) {
        count_tokens(p1 - p0);
    }
    const server_blocks_range range { slot.id, text, p0, p1 };
    const auto key = parts.transfer.key_of(tenant, range);
    if (dry) {
        check_media(p0, p1);
        if (!server_ranges_contain(resident_before, p0, p1)) {
            fail_request(string_format("some rows of [%d, %d) are not resident", p0, p1));
        }
        if (dropped.count(name)) {
            fail(400, "invalid_request_error", "an op before this one drops the name; saves are executed first, so that it would drop the new block: use two plans", json { {"name", name} });
        }
        bind_name(name, key);
        needed.insert(key);
        if (parts.transfer.needs_copy(slot.id, key) && new_keys.insert(key).second) {
            new_bytes += parts.transfer.bytes_of(range);
        }
        return {};
    }
    if (!parts.transfer.save({ tenant, session, name }, range, needed)) { // reserve() excludes it
        fail(413, "ram_budget", "there is no host memory for this block", json { {"name", name} });
    }
    const auto & copy = *parts.store.find(key);
    return json {
        {"name", name}, {"p0", p0}, {"p1", p1}, {"n_tokens", p1 - p0}, {"n_bytes", copy.kv.size}, {"n_runs", copy.kv.n_runs},
        {"tokens_hash", hex(text.hashes[p1])}, {"prefix_hash", hex(copy.prefix_hash)},
        {"whole", copy.is_complete()}, {"visibility", hex(key.visibility)},
    };
}

// Returns the ranges that an op evicts, given as blocks or as positions.
llama_kv_ranges server_blocks_plan::evicted_ranges(const json & op) {
    if (!op.contains("names")) {
        const int32_t n_tokens = (int32_t) text.tokens.size();
        const llama_pos p0 = get_int(op, "p0", 0, n_tokens);
        const llama_pos p1 = get_int(op, "p1", 0, n_tokens);
        if (p0 >= p1) {
            fail_request("a range needs p0 < p1");
        }
        return { { p0, p1 } };
    }
    llama_kv_ranges res;
    for (const auto & name : get_block_names(op)) {
        if (dry && !names.count(name)) {
            const auto * key = parts.store.find_key(tenant, name);
            if (!key || dropped.count(name)) {
                fail_unknown_block(parts.store, tenant, name);
            }
            count_tokens(key->p1 - key->p0);
            if (!matches(*parts.store.find(*key), text, false)) {
                fail(409, "stale_block", "the slot has other tokens at the positions of this block", json { {"name", name} });
            }
            bind_name(name, *key);
        }
        const auto & key = names.at(name);
        res.push_back({ key.p0, key.p1 });
    }
    return server_ranges_normalized(std::move(res));
}

void server_blocks_plan::check_eviction(const llama_kv_ranges & ranges) {
    const auto checkpoints = parts.eviction.checkpoint_rows(*slot.prompt);
    for (const auto & r : ranges) {
        count_tokens(r.second - r.first);
        check_media(r.first, r.second);
        if (!resident.empty() && r.first < resident.back().second && resident.back().second <= r.second) {
            fail_request(string_format("[%d, %d) contains the last resident row, without which the next token cannot be decoded", r.first, r.second));
        }
        if (llama_kv_block_shared(parts.context.ctx, slot.id, r.first, r.second)) {
            fail(409, "shared_cells", "rows of this range belong to another slot too");
        }
        for (const auto & c : checkpoints) {
            if (std::max(c.first, r.first) < std::min(c.second, r.second)) {
                fail(409, "held_row", "a context checkpoint needs a row of this range", json { {"p0", c.first}, {"p1", c.second} });
            }
        }
    }
}

json server_blocks_plan::evict(const json & op) {
    const auto ranges = evicted_ranges(op);
    uint32_t n_evicted = 0;
    if (dry) {
        check_eviction(ranges);
        resident = server_ranges_without(resident, ranges);
        const int32_t n_left = server_ranges_size(resident);
        n_free    += n_resident - n_left;
        n_resident = n_left;
    } else {
        for (const auto & r : ranges) {
            n_evicted += state.evict(r.first, r.second);
        }
    }
    return json { {"n_evicted", n_evicted} };
}

void server_blocks_plan::check_load(const json & op, const std::string & name, const server_blocks_key & key) {
    const auto & copy = *parts.store.find(key);
    count_tokens(key.p1 - key.p0);
    if (!matches(copy, text, json_value(op, "force", false))) {
        fail(409, "stale_block", "the slot has other tokens before or at the positions of this block", json { {"name", name} });
    }
    check_layout(parts.context, copy, name);
    check_visibility(op, copy, name, session);
    if (server_ranges_overlap(resident, key.p0, key.p1)) {
        fail(409, "already_resident", "some rows of this block are resident already", json { {"name", name} });
    }
    const int32_t n    = key.p1 - key.p0;
    const int32_t room = max_rows > 0 ? std::min(n_free, max_rows - n_resident) : n_free;
    if (n > room) {
        fail(503, "no_free_cells", "not enough free cells or budget", json { {"needed", n}, {"free", std::max(0, room)}, {"name", name} });
    }
    n_free     -= n;
    n_resident += n;
    bind_name(name, key);
    needed.insert(key);
    server_ranges_add(resident, key.p0, key.p1);
}

json server_blocks_plan::load(const json & op) {
    const std::string place = json_value(op, "place", std::string("same"));
    if (place != "same" && place != "contig") {
        fail_request("\"place\" must be \"same\" or \"contig\"");
    }
    int32_t n_loaded = 0;
    int32_t n_same   = 0;
    json    incomplete = json::array();
    for (const auto & name : get_block_names(op)) {
        if (dropped.count(name) && dry) {
            fail_unknown_block(parts.store, tenant, name);
        }
        const auto key = require_in_ram(parts.store, tenant, name);
        if (dry) {
            check_load(op, name, key);
            continue;
        }
        const int32_t n = parts.transfer.load(slot.id, key, text.hashes[key.p0], place == "same");
        if (n < 0) { // check_load() excludes it
            fail(503, "no_free_cells", "the block could not be loaded", json { {"name", name} });
        }
        n_same   += n;
        n_loaded += key.p1 - key.p0;
        if (!parts.store.find(key)->is_complete()) {
            incomplete.push_back(name);
        }
    }
    return json { {"n_loaded", n_loaded}, {"n_same_cells", n_same}, {"same_cells", n_same == n_loaded},
        {"whole", incomplete.empty()}, {"not_whole", incomplete} };
}

json server_blocks_plan::set_budget(const json & op) {
    const int32_t zero = 0, block = 64;
    server_blocks_budget budget;
    budget.tenant  = tenant;
    budget.session = session;
    budget.n_rows = get_int(op, "budget", 0, MAX_COUNT);
    budget.sink   = get_int(op, "sink",   0, MAX_COUNT, &zero);
    budget.recent = get_int(op, "recent", 0, MAX_COUNT, &zero);
    budget.block  = get_int(op, "block",  1, MAX_COUNT, &block);
    for (const auto & r : get_list(op, "protect")) {
        budget.protect.push_back(get_range(r, "protect"));
    }
    budget.protect = server_ranges_normalized(std::move(budget.protect));
    for (const auto & e : get_list(op, "order")) {
        if (!e.is_object() || !e.contains("name")) {
            fail_request("\"order\" must be an array of {name, p0, p1}");
        }
        budget.order.push_back({ get_block_name(e.at("name")), get_int(e, "p0", 0, MAX_COUNT), get_int(e, "p1", 0, MAX_COUNT) });
        if (budget.order.back().p0 >= budget.order.back().p1) {
            fail_request("each block of \"order\" must have p0 < p1");
        }
    }
    const int64_t n_required = (int64_t) budget.sink + budget.recent + server_ranges_count(budget.protect, 0, MAX_COUNT) + budget.block;
    if (budget.n_rows > 0 && n_required > budget.n_rows) {
        fail_request(string_format("the budget of %d tokens is less than sink + recent + protect + one block = %d tokens", budget.n_rows, (int) n_required));
    }
    max_rows = budget.n_rows;
    json res { {"budget", budget.n_rows}, {"sink", budget.sink}, {"recent", budget.recent}, {"block", budget.block} };
    if (!dry) {
        state.set_budget(std::move(budget));
    }
    return res;
}

// Limits how much of the slot's text the next marked request reuses: for a client whose prompt has a prefix in common with
// the slot, of which another client has evicted rows.
json server_blocks_plan::limit_reuse(const json & op) {
    const int32_t n = get_int(op, "n_tokens", 0, (int32_t) text.tokens.size());
    if (!dry) {
        state.limit_reuse(n);
    }
    return json { {"n_tokens", n} };
}

// Makes the next marked request a probe: it shows what the model attends to, and its rows are removed afterwards.
json server_blocks_plan::probe() {
    if (!parts.context.is_dense()) {
        fail(501, "not_supported_error", string_format("the effects of a probe on this kind of memory (%s) cannot be undone", parts.context.memory.name));
    }
    if (!dry) {
        state.expect_probe();
    }
    return json::object();
}

json server_blocks_plan::drop(const json & op) {
    const auto op_names = get_block_names(op);
    dropped.insert(op_names.begin(), op_names.end());
    if (dry) {
        return json();
    }
    size_t n = 0;
    for (const auto & name : op_names) {
        n += parts.store.drop(tenant, name);
    }
    return json { {"n_dropped", n} };
}
