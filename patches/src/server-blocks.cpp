#include "server-blocks.h"
#include "server-blocks-flags.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

//
// range sets
//

void server_ranges_add(llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    if (p0 >= p1) {
        return;
    }
    const auto first = std::lower_bound(set.begin(), set.end(), p0, [](const auto & r, llama_pos p) { return r.second < p; });
    auto last = first; // behind those that it overlaps or touches
    for (; last != set.end() && last->first <= p1; ++last) {
        p0 = std::min(p0, last->first);
        p1 = std::max(p1, last->second);
    }
    set.insert(set.erase(first, last), { p0, p1 });
}

// the first range that ends behind a position
static llama_kv_ranges::const_iterator ranges_at(const llama_kv_ranges & set, llama_pos pos) {
    return std::upper_bound(set.begin(), set.end(), pos, [](llama_pos p, const auto & r) { return p < r.second; });
}

void server_ranges_remove(llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    if (p0 >= p1) {
        return;
    }
    const auto first = set.begin() + (ranges_at(set, p0) - set.begin());
    auto last = first; // behind those that it overlaps
    llama_kv_ranges rest;
    for (; last != set.end() && last->first < p1; ++last) {
        if (last->first < p0) {
            rest.push_back({ last->first, p0 });
        }
        if (p1 < last->second) {
            rest.push_back({ p1, last->second });
        }
    }
    const auto at = set.erase(first, last);
    set.insert(at, rest.begin(), rest.end());
}

llama_kv_ranges server_ranges_of(llama_kv_ranges ranges) {
    std::sort(ranges.begin(), ranges.end());
    llama_kv_ranges res;
    for (const auto & r : ranges) {
        if (r.first >= r.second) {
            continue;
        }
        if (!res.empty() && r.first <= res.back().second) {
            res.back().second = std::max(res.back().second, r.second);
        } else {
            res.push_back(r);
        }
    }
    return res;
}

llama_kv_ranges server_ranges_without(const llama_kv_ranges & set, const llama_kv_ranges & other) {
    llama_kv_ranges res;
    auto o = other.begin();
    for (const auto & r : set) {
        llama_pos from = r.first;
        while (o != other.end() && o->second <= from) {
            ++o;
        }
        for (auto next = o; next != other.end() && next->first < r.second; ++next) {
            if (from < next->first) {
                res.push_back({ from, next->first });
            }
            from = std::max(from, next->second);
            o = next; // the last one may reach into the next range
        }
        if (from < r.second) {
            res.push_back({ from, r.second });
        }
    }
    return res;
}

bool server_ranges_hold(const llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    const auto it = ranges_at(set, p0);
    return p0 >= p1 || (it != set.end() && it->first <= p0 && p1 <= it->second);
}

bool server_ranges_overlap(const llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    const auto it = ranges_at(set, p0);
    return p0 < p1 && it != set.end() && it->first < p1;
}

int32_t server_ranges_count(const llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    int32_t n = 0;
    for (const auto & r : set) {
        n += std::max(0, std::min(r.second, p1) - std::max(r.first, p0));
    }
    return n;
}

//
// set-up
//

void server_blocks::adjust(common_params & params) {
    if (server_blocks_flags::of(params).ram_mib <= 0) {
        return;
    }
    if (params.cache_ram_mib != 0 || params.cache_idle_slots || params.ctx_shift) {
        LOG_INF("evoke: --cache-ram 0, --no-cache-idle-slots and no context shift are implied by --evoke-ram\n");
    }
    // the RAM cache copies slots with holes and may load one elsewhere; a shift renumbers positions
    params.cache_ram_mib    = 0;
    params.cache_idle_slots = false;
    params.ctx_shift        = false;
}

void server_blocks::init(llama_context * ctx, const common_params & params, int n_slots, const char * unsupported) {
    this->ctx = ctx;
    this->n_slots = 0;
    modes = {};
    const auto & flags = server_blocks_flags::of(params);
    if (flags.ram_mib <= 0) {
        why_not = nullptr;
        return;
    }
    why_not = unsupported ? unsupported : llama_kv_block_unsupported(ctx);
    if (why_not) {
        LOG_WRN("evoke: blocks are off: %s\n", why_not);
        return;
    }
    kind = llama_kv_block_kind(ctx);
    copying  = false;
    const uint64_t id = server_blocks_model_id(params);
    if (id != model_id || id == 0) { // after a sleep there may be another file of that name
        forget_all();
        model_id = id;
    }
    adapter_ids.clear();
    adapters_hash(params.lora_adapters); // reads them now, not when the first request comes
    row_size = llama_kv_block_row_size(ctx);
    ram_budget = (size_t) flags.ram_mib*1024*1024;
    if (arena.size() != ram_budget && !arena.reset(ram_budget, llama_kv_block_host_buft(ctx))) {
        why_not = "the host has no memory for --evoke-ram";
        LOG_WRN("evoke: blocks are off: %s\n", why_not);
        return;
    }
    open_disk(params);
    this->n_slots = n_slots;
    // a later process must not accept the epochs of an earlier one; 2^53 keeps them exact in JSON
    next_epoch = std::max(next_epoch, ggml_time_us() & ((int64_t(1) << 52) - 1));
    state.assign(n_slots, {});
    for (int id = 0; id < n_slots; ++id) {
        state[id].history = server_blocks_history(kind.windowed || kind.recurrent);
        bump(id);
    }
}

// drawn once per process: a client that sees another value knows that nothing it left here is here any more
const std::string & server_blocks::instance() {
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

json server_blocks::props() const {
    if (!enabled()) {
        return why_not ? json { {"version", 1}, {"instance", instance()}, {"features", json::array()}, {"unsupported", why_not} } : json();
    }
    json features = json::array({ "blocks", "plan", "render", "reuse", "stream" });
    if (!kind.windowed && !kind.recurrent) {
        features.push_back("adopt"); // rows are all there is to a sequence
        features.push_back("probe");
    }
    if (llama_kv_block_can_shift(ctx)) {
        features.push_back("compact");
    }
    if (!llama_attn_capture_unsupported(ctx)) {
        features.push_back("attention");
    }
    if (disk.is_open()) {
        features.push_back("disk");
    }
    return json {
        {"version",  1},
        {"instance", instance()},
        {"features", features},
        {"memory",   kind.name},
        {"limits",   json {
            {"ram_bytes", ram_budget},
            {"pinned",    arena.pinned()},
            {"disk_bytes", disk.is_open() ? disk.cap() : 0},
            {"n_cells",   llama_kv_block_n_cells(ctx, 0)},
            {"row_bytes", llama_kv_block_row_size(ctx)},
            {"n_slots",   n_slots},
            {"n_ctx_logical", modes.n_ctx},
            {"attention", attention_props()},
        }},
        {"kv_eviction", modes_json()},
    };
}

//
// hooks
//

void server_blocks::on_task(server_task & task, const json & data) const {
    if (!enabled()) {
        return;
    }
    task.params.n_cache_reuse = 0; // renumbers positions and counts holes as reused
    if (data.contains("evoke") && data.at("evoke").is_object() && task.params.n_cmpl == 1) {
        task.evoke_epoch = std::max<int64_t>(0, json_value(data.at("evoke"), "epoch", int64_t(0)));
    }
}

// rows made under an adapter are of no use under another one, or at another scale
uint64_t server_blocks::adapters_hash(const std::vector<common_adapter_lora_info> & adapters) {
    uint64_t res = 0;
    for (const auto & adapter : adapters) {
        if (adapter.scale == 0.0f) {
            continue;
        }
        auto found = adapter_ids.find(adapter.ptr);
        if (found == adapter_ids.end()) {
            found = adapter_ids.emplace(adapter.ptr, llama_kv_block_adapter_id(adapter.ptr)).first;
        }
        uint32_t scale;
        memcpy(&scale, &adapter.scale, sizeof(scale));
        res = mix(mix(res, found->second), scale);
    }
    return res;
}

int32_t server_blocks::on_prompt(int id, const server_task & task, int32_t n_past, const std::vector<common_adapter_lora_info> & adapters) {
    if (!enabled()) {
        return n_past;
    }
    auto & s = state[id];
    s.adapters = adapters_hash(adapters);
    s.opaque   = std::any_of(adapters.begin(), adapters.end(), [](const auto & adapter) {
        return adapter.scale != 0.0f && llama_adapter_get_alora_n_invocation_tokens(adapter.ptr) > 0;
    });
    s.marker = task.evoke_epoch < 0 ? -1 : task.evoke_epoch == s.epoch;
    s.first_token = false;
    s.books  = json();
    if (s.marker == 1) {
        n_past = std::min(n_past, s.reuse);
    }
    s.reuse = std::numeric_limits<int32_t>::max();
    s.probing = s.probe && s.marker == 1;
    s.probe   = false;
    s.n_common = n_past;
    if (s.marker == 1) {
        s.reserved = true;
        // one token at least is decoded; what is reused ends before it, also for windows and checkpoints
        return clip(id, std::min(n_past, task.n_tokens() - 1));
    }
    // somebody who does not know about holes: the slot is theirs now, and only a prefix is reused that has none
    // and no row that was decoded behind one
    bump(id);
    if (modes.on() && task.n_tokens() > modes.n_rows) {
        return clip(id, std::min(n_past, task.n_tokens() - 1)); // decoded again, it would have holes as well
    }
    s.history.reconcile(llama_kv_block_resident(ctx, id));
    return std::min(n_past, s.history.clean_end());
}

int32_t server_blocks::clip(int id, int32_t n_past) const {
    if (!enabled() || n_past <= 0) {
        return n_past;
    }
    int32_t res = 0;
    for (const auto & r : llama_kv_block_resident(ctx, id)) {
        if (r.first < n_past) {
            res = std::min(n_past, r.second);
        }
    }
    return res;
}

bool server_blocks::resident(int id, llama_pos pos) const {
    return !enabled() || server_ranges_count(llama_kv_block_resident(ctx, id), pos, pos + 1) == 1;
}

void server_blocks::on_start(int id, int32_t n_past, server_slot_stats & stats) {
    if (!enabled()) {
        return;
    }
    auto & s = state[id];
    const llama_pos end = std::numeric_limits<llama_pos>::max();
    const auto    resident  = llama_kv_block_resident(ctx, id);
    const int32_t n_present = server_ranges_count(resident, 0, n_past);
    // rows of a text that this one does not go on from were there all the time since the last reply,
    // unless loaded since, and are freed before anything is decoded: they are not this turn's
    // but for those of a probe, which are
    const int32_t n_cut = s.probed ? 0 : server_ranges_count(resident, s.n_common, end) - server_ranges_count(s.loaded, s.n_common, end);
    s.probed = false;
    s.peak   = std::max(s.peak - n_cut, n_present);
    s.n_past = n_past;
    if (s.probing) {
        s.reuse = n_past; // ended or broken off
    }
    server_ranges_remove(s.loaded, n_past, end);
    s.history.reconcile(resident);
    s.history.removed(n_past, end);
    s.used.resize(std::min(s.used.size(), (size_t) n_past));
    llama_attn_capture_forget(ctx, id, n_past);
    llama_attn_capture_prompt(ctx, id, true);
    stats.n_prompt_cached = n_present;
}

void server_blocks::on_decoded() {
    for (int id = 0; id < n_slots; ++id) {
        note_peak(id);
        const llama_pos end = llama_memory_seq_pos_max(llama_get_memory(ctx), id) + 1;
        state[id].history.decoded(end, state[id].opaque);
        if (end > (llama_pos) state[id].used.size()) {
            touch(id, (llama_pos) state[id].used.size(), end);
        }
        look(id);
    }
}

void server_blocks::on_first_token(int id, const server_task & task, const server_slot_stats & stats) {
    if (!enabled()) {
        return;
    }
    auto & s = state[id];
    if (!s.probing) {
        llama_attn_capture_prompt(ctx, id, false);
    }
    s.first_token = true;
    if (!told(id)) {
        return;
    }
    const auto    resident  = llama_kv_block_resident(ctx, id);
    const int32_t n_present = server_ranges_count(resident, 0, s.n_past);
    int32_t n_recovered = 0;
    for (const auto & r : s.loaded) {
        n_recovered += server_ranges_count(resident, r.first, std::min(r.second, (llama_pos) s.n_past));
    }
    s.books = json {
        {"n_prompt",        task.n_tokens()},
        {"resident_before", n_present - n_recovered},
        {"recovered",       n_recovered},
        {"decoded",         stats.n_prompt_processed},
        {"decoded_hidden",  s.hidden},
        {"omitted",         s.n_past - n_present},
    };
}

void server_blocks::on_final(int id, server_slot_stats & stats) {
    if (!enabled()) {
        return;
    }
    fence();
    auto & s = state[id];
    if (told(id)) {
        json books = s.books.is_object() ? s.books : json::object();
        books["epoch"]           = s.epoch;
        books["marker"]          = s.marker == 1 ? "ok" : s.marker == 0 ? "stale" : "none";
        books["n_resident"]      = llama_kv_block_n_rows(ctx, id);
        books["n_resident_peak"] = s.peak;
        books["budget"]          = s.stream.budget;
        books["budget_breaches"] = s.breach;
        books["auto_evicted"]    = s.auto_evicted;
        stats.evoke = std::make_shared<json>(std::move(books));
    }
    s.marker = -1;
    s.hidden = 0;
    if (s.probing) {
        // the turn is not over: what it loaded and evicted so far is in the books of its real answer
        s.probing = false;
        s.probed  = true;
        llama_attn_capture_prompt(ctx, id, false);
        return;
    }
    s.breach = 0;
    s.peak   = (int32_t) llama_kv_block_n_rows(ctx, id);
    s.loaded.clear();
    s.auto_evicted = json::array();
}

// what was copied may be read and overwritten by the host
void server_blocks::fence() {
    if (copying) {
        llama_kv_block_fence(ctx);
        copying = false;
    }
}

void server_blocks::on_clear(int id) {
    if (enabled()) {
        bump(id);
        state[id].used.clear();
        state[id].history.clear();
        state[id].history.reconcile(llama_kv_block_resident(ctx, id)); // of a slot file
    }
}

void server_blocks::on_copy(int from, int id) {
    if (enabled()) {
        on_clear(id);
        state[id].history  = state[from].history;
        state[id].adapters = state[from].adapters;
        state[id].opaque   = state[from].opaque;
    }
}

// a new epoch: whoever planned with the old one is told so
void server_blocks::bump(int id) {
    auto & s = state[id];
    s.epoch    = ++next_epoch;
    s.reserved = false;
    s.stream   = {};
    s.reuse    = std::numeric_limits<int32_t>::max();
    s.probe    = s.probing = s.probed = false;
    llama_attn_capture_set(ctx, id, {});
    s.loaded.clear();
    s.auto_evicted = json::array();
    s.hidden = 0;
    s.peak   = (int32_t) llama_kv_block_n_rows(ctx, id);
}

void server_blocks::note_peak(int id) {
    state[id].peak = std::max(state[id].peak, (int32_t) llama_kv_block_n_rows(ctx, id));
}
