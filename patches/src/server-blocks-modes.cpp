// eviction by the engine: how many rows a slot may have, and which of them leave

#include "server-blocks-modes.h"
#include "server-blocks-flags.h"
#include "server-blocks.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <cinttypes>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>

// layers whose attention --kv-eviction 3 goes by: what each costs a decoded token is in bench/results/capture.json
static constexpr size_t SERVER_BLOCKS_MODE_LAYERS = 4;

//
// options
//

int32_t server_blocks_modes::recent_of(int32_t n) const {
    return recent > 0 ? recent : std::max(32, n/4);
}

int32_t server_blocks_modes::limit(bool generating) const {
    return generating && evictable > 0 ? std::min(n_rows, first + evictable + recent_of(n_rows)) : n_rows;
}

int32_t server_blocks_modes::chunk(int32_t n_ubatch) const {
    return std::max(block, std::min(n_ubatch, (n_rows - first - recent_of(n_rows))/4));
}

// positions the model was trained for, times what RoPE scaling stretches them by
static int64_t server_blocks_trained(const common_params & params, const llama_model * model) {
    const int64_t n = llama_model_n_ctx_train(model); // upstream has put YaRN's factor into it
    const bool linear = params.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_LINEAR;
    return linear && params.rope_freq_scale > 0.0f ? (int64_t) (n/params.rope_freq_scale + 0.5f) : n;
}

server_blocks_modes server_blocks_modes::read(const common_params & params, const llama_model * model, int32_t n_ctx, int32_t n_rows) {
    const auto & flags = server_blocks_flags::of(params);
    server_blocks_modes res;
    res.n_ctx  = n_ctx;
    res.n_rows = n_rows;
    if (!flags.evicts()) {
        return res;
    }
    const int64_t trained = server_blocks_trained(params, model);
    if (flags.ctx_logical > trained) {
        throw std::invalid_argument(string_format("--ctx-logical %d is more than the %" PRId64 " tokens the model was trained for; "
            "more needs RoPE scaling (--rope-scaling, --rope-scale)", flags.ctx_logical, trained));
    }
    if (params.embedding) {
        throw std::invalid_argument("embeddings are of a whole text: there is nothing that --ctx-logical and --kv-eviction could evict");
    }
    const bool attention = flags.eviction == SERVER_BLOCKS_MODE_ATTENTION;
    res.mode      = flags.eviction > 0 ? (server_blocks_mode) flags.eviction : SERVER_BLOCKS_MODE_STREAMING;
    res.n_ctx     = flags.ctx_logical > 0 ? flags.ctx_logical : (int32_t) trained;
    res.first     = std::max(flags.protected_tokens, flags.sink_tokens >= 0 ? flags.sink_tokens : attention ? 32 : 4);
    res.recent    = std::max(0, flags.recent_tokens >= 0 ? flags.recent_tokens : attention ? 128 : 0);
    res.evictable = std::max(0, flags.evictable_tokens >= 0 ? flags.evictable_tokens : attention ? 512 : 0);
    res.block     = flags.block_size;
    res.norm_sum  = flags.norm_sum;
    const int32_t needed = res.first + res.recent_of(n_rows) + res.block;
    if (needed > n_rows) {
        throw std::invalid_argument(string_format("%d cells of a slot cannot hold the first %d and last %d tokens and one block of %d",
            n_rows, res.first, res.recent_of(n_rows), res.block));
    }
    if (res.evictable > 0 && res.evictable < res.block) {
        throw std::invalid_argument(string_format("--kv-evictable-tokens %d cannot hold one block of %d", res.evictable, res.block));
    }
    return res;
}

bool server_blocks::set_modes(const common_params & params, int32_t n_ctx) {
    const auto & flags = server_blocks_flags::of(params);
    try {
        if (flags.evicts() && !enabled()) {
            throw std::invalid_argument(why_not ? why_not : "what --ctx-logical and --kv-eviction evict is saved first: they need --evoke-ram");
        }
        const char * blind = flags.eviction == SERVER_BLOCKS_MODE_ATTENTION ? llama_attn_capture_unsupported(ctx) : nullptr;
        if (blind) {
            throw std::invalid_argument(string_format("--kv-eviction 3 needs attention, which cannot be captured: %s", blind));
        }
        const int32_t n_cells = enabled() ? (int32_t) llama_kv_block_n_cells(ctx, 0) : 0;
        const int32_t n_rows  = params.kv_unified_per_slot > 0 ? std::min(n_cells, params.kv_unified_per_slot) : n_cells;
        unified = params.kv_unified;
        modes   = server_blocks_modes::read(params, llama_get_model(ctx), n_ctx, n_rows);
        const int32_t limit = modes.on() ? llama_kv_block_rope_limit(ctx) : 0;
        if (limit > 0 && modes.n_ctx > limit) {
            throw std::invalid_argument(string_format("a context of %d tokens needs the model's RoPE factors for long texts, which are "
                "chosen only where a slot has more than %d cells (-c): give it more, or --ctx-logical %d or less", modes.n_ctx, limit, limit));
        }
        for (int id = 0; modes.mode == SERVER_BLOCKS_MODE_ATTENTION && id < n_slots; ++id) {
            attend(id);
            if (!llama_attn_capture_get(ctx, id)) {
                throw std::invalid_argument("--kv-eviction 3: there is no memory for the attention of all slots where the model is computed: "
                    "fewer cells (-c) or slots (-np), or another mode");
            }
        }
    } catch (const std::exception & e) {
        LOG_ERR("evoke: %s\n", e.what());
        return false;
    } catch (const server_blocks_error & e) {
        LOG_ERR("evoke: %s\n", e.message.c_str());
        return false;
    }
    if (modes.on()) {
        LOG_INF("evoke: a slot has a context of %d tokens in %d cells; first %d and last %d stay, blocks of %d leave\n",
            modes.n_ctx, modes.n_rows, modes.first, modes.recent_of(modes.n_rows), modes.block);
    }
    return true;
}

json server_blocks::modes_json() const {
    static const char * names[] = { "off", "streaming", "scored", "attention" };
    return json {
        {"mode",      names[modes.mode]},
        {"first",     modes.first},
        {"evictable", modes.evictable},
        {"recent",    modes.recent},
        {"block",     modes.block},
        {"aggregation", modes.norm_sum ? "norm_sum" : "sum"},
    };
}

//
// how many rows
//

int32_t server_blocks::n_rows(int id) const {
    return (int32_t) llama_kv_block_n_rows(ctx, id);
}

int32_t server_blocks::limit(int id) const {
    const auto & s = state[id];
    if (s.stream.budget > 0) {
        return modes.on() ? std::min(s.stream.budget, modes.n_rows) : s.stream.budget;
    }
    return modes.limit(s.first_token);
}

// cells that nobody has, and that no token of the batch being filled is going to take
int32_t server_blocks::cells_left(int id) const {
    int32_t n = llama_kv_block_n_free(ctx, id);
    for (int other = 0; other < n_slots; ++other) {
        const auto * prompt = state[other].prompt;
        if (prompt && (unified || other == id)) {
            n -= std::max(0, prompt->n_tokens() - (llama_memory_seq_pos_max(llama_get_memory(ctx), other) + 1));
        }
    }
    return n;
}

int32_t server_blocks::room(int id, const server_prompt & prompt, int32_t n_want, bool others_decode) {
    if (!enabled() || n_want <= 0) {
        return n_want;
    }
    auto & s = state[id];
    s.prompt = &prompt;
    if (s.stream.budget == 0 && !modes.on()) {
        return n_want;
    }
    attend(id);
    patience_ms = ggml_time_ms() + PATIENCE_MS;
    const int32_t n_chunk = std::min(n_want, s.stream.budget > 0 ? s.stream.block : modes.chunk(llama_n_ubatch(ctx)));
    const int64_t until_ms = ggml_time_ms() + EVICT_MS;
    evictions begun;
    while (limit(id) - n_rows(id) < n_chunk && evict_next(id, begun)) {
        if (others_decode && limit(id) < n_rows(id) && ggml_time_ms() >= until_ms) {
            return -1; // nothing of this slot is decoded until its rows are within the limit
        }
    }
    while (modes.on() && cells_left(id) < n_chunk && evict_somewhere(id, begun)) {
    }
    int32_t n = limit(id) - n_rows(id);
    if (modes.on()) {
        n = std::min(n, cells_left(id));
    }
    if (n <= 0) {
        s.breach++;
        return 1;
    }
    return std::min(n_want, n);
}

//
// which rows
//

uint32_t server_blocks::evict_rows(int id, llama_pos p0, llama_pos p1) {
    server_ranges_remove(state[id].loaded, p0, p1);
    state[id].history.removed(p0, p1);
    return llama_kv_block_evict(ctx, id, p0, p1);
}

// a checkpoint is of the recurrent state only; going back to it goes on from the row before it
llama_kv_ranges server_blocks::held(const server_prompt & prompt) const {
    llama_kv_ranges res;
    for (const auto & checkpoint : prompt.checkpoints) {
        if (kind.recurrent && checkpoint.n_tokens > 0) {
            server_ranges_add(res, checkpoint.n_tokens - 1, checkpoint.n_tokens);
        }
    }
    return res;
}

// the slot's budget, or what the options say where it has none
server_blocks_stream server_blocks::rules(int id) const {
    const auto & s = state[id];
    if (s.stream.budget > 0) {
        return s.stream;
    }
    server_blocks_stream res;
    res.sink   = modes.first;
    res.recent = modes.recent_of(n_rows(id));
    res.block  = modes.block;
    res.align  = modes.first;
    return res;
}

// What evictions from a slot between two decodes depend on, gathered once: what leaves is taken out of it.
struct server_blocks::eviction {
    server_blocks_stream  rules;
    llama_tokens          tokens;
    std::vector<uint64_t> hashes;
    llama_kv_ranges       open;  // resident, of this slot alone, and neither sink, nor protected, nor held
    llama_attn_sums       sums;  // attention, where blocks leave by it
    size_t                next_in_order = 0;
    llama_pos             edge = -1;     // where the last rows begin that stay, when `blocks` were listed
    std::vector<server_blocks_stream::entry> blocks; // in the order in which they leave
    size_t                next_block = 0;
};

server_blocks::eviction server_blocks::begin_eviction(int id) const {
    eviction res;
    res.rules  = rules(id);
    res.tokens = state[id].prompt->tokens.get_text_tokens();
    res.hashes = prefix_hashes(res.tokens, state[id].adapters);
    res.open   = llama_kv_block_resident(ctx, id);
    server_ranges_remove(res.open, 0, res.rules.sink);
    res.open = server_ranges_without(res.open, res.rules.protect);
    res.open = server_ranges_without(res.open, held(*state[id].prompt));
    if (unified && n_slots > 1) {
        res.open = server_ranges_without(res.open, llama_kv_block_shared_ranges(ctx, id));
    }
    if (modes.mode == SERVER_BLOCKS_MODE_ATTENTION && llama_attn_capture_get(ctx, id)) {
        res.sums = llama_attn_capture_sums(ctx, id);
    }
    return res;
}

// where the last rows begin that stay; the last row does in any case
llama_pos server_blocks::recent_edge(int id, const server_blocks_stream & rules) const {
    const int32_t recent = state[id].stream.budget > 0 ? rules.recent : modes.recent_of(n_rows(id));
    return llama_memory_seq_pos_max(llama_get_memory(ctx), id) + 1 - std::max(1, recent);
}

// what leaves next: the order that was given, then whole blocks by mode, then what is left of one
bool server_blocks::next_out(int id, eviction & from, server_blocks_stream::entry & out) const {
    const llama_pos edge = recent_edge(id, from.rules);
    const auto & order = from.rules.order;
    while (from.next_in_order < order.size()) {
        const auto & e = order[from.next_in_order++];
        if (e.p1 <= edge && server_ranges_hold(from.open, e.p0, e.p1)) {
            out = e;
            return true;
        }
    }
    if (from.edge != edge) {
        from.edge = edge;
        list_blocks(id, from);
    }
    if (from.next_block == from.blocks.size()) {
        return false;
    }
    out = from.blocks[from.next_block++];
    return true;
}

void server_blocks::list_blocks(int id, eviction & from) const {
    std::vector<std::pair<double, server_blocks_stream::entry>> found;
    const auto & rules = from.rules;
    for (const auto & r : from.open) {
        const llama_pos end = std::min(r.second, from.edge);
        for (llama_pos p0 = r.first, p1; p0 < end; p0 = p1) {
            // aligned, so that what was generated is cut at the same places by everybody
            p1 = std::min(end, p0 + rules.block - (p0 - rules.align)%rules.block);
            const bool growing = p1 == from.edge && (p1 - rules.align)%rules.block != 0;
            const double worth = growing ? std::numeric_limits<double>::max() : score(id, from, p0, p1);
            found.push_back({ worth, { "", p0, p1 } });
        }
    }
    std::stable_sort(found.begin(), found.end(), [](const auto & a, const auto & b) { return a.first < b.first; });
    from.blocks.clear();
    from.next_block = 0;
    for (auto & block : found) {
        from.blocks.push_back(std::move(block.second));
    }
}

// how much a block is worth keeping; of equal ones the older goes first
double server_blocks::score(int id, const eviction & from, llama_pos p0, llama_pos p1) const {
    if (modes.mode == SERVER_BLOCKS_MODE_ATTENTION) {
        // attention that a row of these got, on average: since the slot's text began, or for each row that could see it
        const auto got = from.sums.of(p0, p1);
        return from.sums.mass.empty() ? p0 : got.mass/(modes.norm_sum ? std::max(1.0, got.life) : p1 - p0);
    }
    if (modes.mode != SERVER_BLOCKS_MODE_SCORED) {
        return p0;
    }
    const auto & used = state[id].used;
    uint64_t last = 0;
    for (llama_pos p = p0; p < std::min(p1, (llama_pos) used.size()); ++p) {
        last = std::max(last, used[p]);
    }
    return (double) last;
}

// the attention that eviction goes by, unless the slot has another capture already
void server_blocks::attend(int id) {
    if (modes.mode != SERVER_BLOCKS_MODE_ATTENTION || llama_attn_capture_get(ctx, id)) {
        return;
    }
    const auto possible = llama_attn_capture_layers(ctx);
    const size_t n = std::min<size_t>(possible.size(), SERVER_BLOCKS_MODE_LAYERS);
    llama_attn_params params;
    params.mode = LLAMA_ATTN_SUM;
    for (size_t i = 0; i < n; ++i) {
        params.layers.push_back(possible[(2*i + 1)*possible.size()/(2*n)]); // the middle of each n-th part
    }
    fit_capture(params, id);
    if (llama_attn_capture_reserve(ctx, id, params)) {
        llama_attn_capture_set(ctx, id, params);
    }
}

// where attention is captured, what got its share of it since the last look was accessed
void server_blocks::look(int id) {
    const auto * params = modes.mode == SERVER_BLOCKS_MODE_SCORED ? llama_attn_capture_get(ctx, id) : nullptr;
    const int64_t n_obs = params ? llama_attn_capture_mass(ctx, id, 0, 0).n_obs : 0;
    auto & s = state[id];
    if (n_obs < s.n_obs) { // begun anew
        s.n_obs = 0;
        s.seen.clear();
    }
    if (!params || n_obs - s.n_obs < modes.block) {
        return;
    }
    std::map<llama_pos, double> seen;
    const auto   sums = llama_attn_capture_sums(ctx, id);
    const double n = n_rows(id);
    for (const auto & r : llama_kv_block_resident(ctx, id)) {
        for (llama_pos p0 = r.first, p1; p0 < r.second; p0 = p1) {
            p1 = std::min(r.second, (p0/modes.block + 1)*modes.block);
            double got = sums.of(p0, p1).mass;
            if (params->mode == LLAMA_ATTN_SUM) { // what is new of it, by row
                seen[p0] = got;
                got = (got - s.seen[p0])/(n_obs - s.n_obs);
            }
            if (got >= (p1 - p0)/n) {
                touch(id, p0, p1);
            }
        }
    }
    s.seen  = std::move(seen);
    s.n_obs = n_obs;
}

// by content, and by visibility where text was missing: the same rows evicted again have the same name
std::string server_blocks::auto_name(int id, const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1) const {
    const auto & session = state[id].stream.session;
    const auto   seen    = std::get<4>(key_of("", id, hashes, p0, p1));
    const auto   h       = seen == 0 ? hashes[p1] : mix(mix(hashes[p1], seen), server_blocks_checksum(session.data(), session.size()));
    return string_format("auto/%016" PRIx64 "/%d-%d", h, p0, p1);
}

// one block of the slot, saved first
bool server_blocks::evict_next(int id, evictions & begun) {
    if (!state[id].prompt) {
        return false;
    }
    if (!begun.count(id)) {
        begun.emplace(id, begin_eviction(id));
    }
    auto & from = begun.at(id);
    server_blocks_stream::entry out;
    if (!next_out(id, from, out)) {
        return false;
    }
    server_ranges_remove(from.open, out.p0, out.p1);
    if (out.p1 > (llama_pos) from.tokens.size()) {
        return evict_rows(id, out.p0, out.p1) > 0; // of a text that was given up: its next request empties the slot
    }
    if (out.name.empty()) {
        out.name = auto_name(id, from.hashes, out.p0, out.p1);
    }
    auto & s = state[id];
    const bool kept = put({ s.stream.tenant, s.stream.session, out.name }, id, from.tokens, from.hashes, out.p0, out.p1);
    if (!s.first_token) {
        s.hidden += std::max(0, out.p1 - std::max<llama_pos>(out.p0, s.n_past));
    }
    s.auto_evicted.push_back(json::array({ out.p0, out.p1, kept ? json(out.name) : json() }));
    return evict_rows(id, out.p0, out.p1) > 0;
}

// the rows of an idle slot that is about to be emptied for others, in blocks whose names say what they are
void server_blocks::save_rows(int id, const server_prompt & prompt) {
    const auto & stream = state[id].stream;
    const int32_t size  = std::max(64, stream.budget > 0 ? stream.block : modes.block);
    const llama_tokens tokens = prompt.tokens.get_text_tokens();
    const auto         hashes = prefix_hashes(tokens, state[id].adapters);
    patience_ms = ggml_time_ms() + PATIENCE_MS;
    for (const auto & r : llama_kv_block_resident(ctx, id)) {
        for (llama_pos p0 = r.first, p1; p0 < std::min<llama_pos>(r.second, tokens.size()); p0 = p1) {
            p1 = std::min<llama_pos>({ r.second, (p0/size + 1)*size, (llama_pos) tokens.size() });
            put({ stream.tenant, stream.session, auto_name(id, hashes, p0, p1) }, id, tokens, hashes, p0, p1);
        }
    }
    fence();
}

// a block of the slot that has most rows, where slots share the cells
bool server_blocks::evict_somewhere(int id, evictions & begun) {
    std::vector<int> ids = { id };
    for (int other = 0; unified && other < n_slots; ++other) {
        if (other != id) {
            ids.push_back(other);
        }
    }
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return n_rows(a) > n_rows(b); });
    return std::any_of(ids.begin(), ids.end(), [&](int other) { return evict_next(other, begun); });
}

// rows of these positions were decoded or loaded now
void server_blocks::touch(int id, llama_pos p0, llama_pos p1) {
    if (modes.mode == SERVER_BLOCKS_MODE_SCORED) {
        auto & used = state[id].used;
        used.resize(std::max(used.size(), (size_t) p1));
        std::fill(used.begin() + p0, used.begin() + p1, ++clock);
    }
}
