#include "server-blocks-eviction.h"

#include "server-blocks-flags.h"
#include "server-blocks-hash.h"
#include "server-blocks-media.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

// How many layers --kv-eviction 3 captures. bench/results/capture.json has the cost of a layer per decoded token.
static constexpr size_t N_ATTENTION_LAYERS = 4;

// How long one call may evict from a slot while others decode.
static constexpr int64_t MAX_EVICTION_MS = 20;

// Pause after a capture found no memory: an attempt takes as long as several decodes.
static constexpr int64_t CAPTURE_RETRY_MS = 10000;

//
// options
//

void server_blocks_eviction::reset() {
    options = {};
    capture_retry_ms = 0;
    prompts.assign(context.n_slots(), nullptr);
}

bool server_blocks_eviction::set_modes(const common_params & params, int32_t n_ctx, const char * unsupported) {
    const auto & flags  = server_blocks_flags::of(params);
    const bool  enabled = context.n_slots() > 0;
    try {
        if (flags.evicts() && !enabled) {
            throw std::invalid_argument(unsupported ? unsupported : "--ctx-logical and --kv-eviction save what they evict, and need memory for it: add --evoke-ram MiB");
        }
        const char * no_attention = flags.eviction == SERVER_BLOCKS_MODE_ATTENTION ? llama_attn_capture_unsupported(context.ctx) : nullptr;
        if (no_attention) {
            throw std::invalid_argument(string_format("--kv-eviction 3 needs the attention of the model, which cannot be captured: %s", no_attention));
        }
        const int32_t n_cells = enabled ? (int32_t) llama_kv_block_n_cells(context.ctx, 0) : 0;
        const int32_t n_rows  = params.kv_unified_per_slot > 0 ? std::min(n_cells, params.kv_unified_per_slot) : n_cells;
        unified = params.kv_unified;
        options = server_blocks_modes::read(params, llama_get_model(context.ctx), n_ctx, n_rows);
        const int32_t rope_limit = options.on() ? llama_kv_block_rope_limit(context.ctx) : 0;
        if (rope_limit > 0 && options.n_ctx > rope_limit) {
            throw std::invalid_argument(string_format("a context of %d tokens needs the model's RoPE factors for long texts, which the "
                "server uses only where a slot has more than %d cells: choose a larger -c, or --ctx-logical %d or less", options.n_ctx, rope_limit, rope_limit));
        }
        for (int id = 0; id < context.n_slots(); ++id) {
            context.slots[id].set_records(options.mode == SERVER_BLOCKS_MODE_SCORED, options.on());
            if (!start_capture(id)) {
                throw std::invalid_argument("--kv-eviction 3: the device has no memory for the attention of all slots: "
                    "choose a smaller -c, fewer slots (-np), or another mode");
            }
        }
    } catch (const std::exception & e) {
        LOG_ERR("evoke: %s\n", e.what());
        return false;
    }
    if (options.on()) {
        LOG_INF("evoke: each slot has a context of %d tokens in %d cells; the first %d and the last %d are never evicted, the others in blocks of %d\n",
            options.n_ctx, options.n_rows, options.first, options.n_recent(options.n_rows), options.block);
    }
    return true;
}

int32_t server_blocks_eviction::n_slot_cells() const {
    if (context.n_slots() == 0) {
        return 0;
    }
    const int32_t n_cells = (int32_t) llama_kv_block_n_cells(context.ctx, 0);
    const int32_t n_share = unified ? n_cells/context.n_slots() : n_cells;
    return options.n_rows > 0 ? std::min(options.n_rows, n_share) : n_share;
}

// Starts the capture that --kv-eviction 3 needs, unless the slot has one. Returns false if there is no memory for it.
bool server_blocks_eviction::start_capture(int id) const {
    if (options.mode != SERVER_BLOCKS_MODE_ATTENTION || llama_attn_capture_get(context.ctx, id)) {
        return true;
    }
    const auto possible = llama_attn_capture_layers(context.ctx);
    const size_t n = std::min<size_t>(possible.size(), N_ATTENTION_LAYERS);
    llama_attn_params params;
    params.mode = LLAMA_ATTN_SUM;
    for (size_t i = 0; i < n; ++i) {
        params.layers.push_back(possible[(2*i + 1)*possible.size()/(2*n)]); // the middle of each n-th part
    }
    return capture.start(id, params);
}

// Starts the capture of a slot that has lost it. Without one the slot evicts its oldest blocks.
void server_blocks_eviction::retry_capture(int id) {
    if (ggml_time_ms() >= capture_retry_ms && !start_capture(id)) {
        capture_retry_ms = ggml_time_ms() + CAPTURE_RETRY_MS;
    }
}

//
// how many rows
//

int32_t server_blocks_eviction::limit(int id) const {
    const auto & slot = context.slots[id];
    if (slot.budget().n_rows > 0) {
        return options.on() ? std::min(slot.budget().n_rows, options.n_rows) : slot.budget().n_rows;
    }
    return options.max_rows(slot.is_generating());
}

// Returns how many cells are free and will not be taken by tokens of the batch that is being prepared.
int32_t server_blocks_eviction::n_free_cells(int id) const {
    int32_t n = context.slots[id].n_free() - context.draft.n_reserved();
    for (int other = 0; other < context.n_slots(); ++other) {
        if (prompts[other] && (unified || other == id)) {
            n -= std::max(0, prompts[other]->n_tokens() - context.slots[other].end());
        }
    }
    return n;
}

int32_t server_blocks_eviction::make_room(int id, const server_prompt & prompt, int32_t n_wanted, bool others_decode) {
    auto & slot = context.slots[id];
    prompts[id] = &prompt;
    if ((slot.budget().n_rows == 0 && !options.on()) || is_irregular(prompt)) {
        return n_wanted;
    }
    retry_capture(id);
    store.begin_call();
    const bool    has_budget = slot.budget().n_rows > 0;
    const int32_t n_batch    = has_budget ? n_wanted : std::min(n_wanted, options.batch(llama_n_ubatch(context.ctx)));
    const int32_t n_least    = has_budget ? std::min(n_wanted, slot.budget().block) : n_batch;
    const int64_t until_ms   = ggml_time_ms() + MAX_EVICTION_MS;
    candidate_map found;
    for (int32_t n_room; (n_room = limit(id) - slot.n_rows()) < n_batch; ) {
        if (others_decode && ggml_time_ms() >= until_ms && (n_room < 0 || n_room >= n_least)) {
            if (n_room < 0) {
                return -1;
            }
            break; // with what has room now
        }
        if (!evict_one(id, found, n_room >= n_least)) {
            break;
        }
    }
    while (options.on() && n_free_cells(id) < std::min(n_batch, options.batch(llama_n_ubatch(context.ctx))) && evict_one_anywhere(id, found)) {
    }
    int32_t n = limit(id) - slot.n_rows();
    if (options.on()) {
        n = std::min(n, n_free_cells(id));
    }
    if (n <= 0) {
        slot.on_breach();
        return 1;
    }
    return std::min(n_wanted, n);
}

void server_blocks_eviction::make_room_for_all(int id, const server_prompt & prompt, int32_t n) {
    auto & slot = context.slots[id];
    prompts[id] = &prompt;
    if ((slot.budget().n_rows == 0 && !options.on()) || is_irregular(prompt)) {
        return;
    }
    store.begin_call();
    candidate_map found;
    while (limit(id) - slot.n_rows() < n && evict_one(id, found)) {
    }
    while (options.on() && n_free_cells(id) < n && evict_one_anywhere(id, found)) {
    }
    if (limit(id) - slot.n_rows() < n) {
        slot.on_breach();
    }
}

// Returns whether the positions of a text are not the indices of its tokens.
bool server_blocks_eviction::is_irregular(const server_prompt & prompt) const {
    return !server_blocks_media_supported() && !server_blocks_media(prompt.tokens).empty();
}

//
// which rows
//

// A checkpoint has only the recurrent state, so that decoding from it needs the row before it.
llama_kv_ranges server_blocks_eviction::checkpoint_rows(const server_prompt & prompt) const {
    llama_kv_ranges res;
    for (const auto & checkpoint : prompt.checkpoints) {
        if (context.memory.recurrent && checkpoint.n_tokens > 0) {
            server_ranges_add(res, checkpoint.n_tokens - 1, checkpoint.n_tokens);
        }
    }
    return res;
}

// Returns the slot's budget, or the options as a budget where the slot has none.
server_blocks_budget server_blocks_eviction::rules(int id) const {
    const auto & slot = context.slots[id];
    if (slot.budget().n_rows > 0) {
        return slot.budget();
    }
    server_blocks_budget res;
    res.sink   = options.first;
    res.recent = options.n_recent(slot.n_rows());
    res.block  = options.block;
    res.align  = options.first;
    return res;
}

// Collects what may be evicted from a slot.
server_blocks_eviction::candidates server_blocks_eviction::collect(int id) const {
    const auto & slot = context.slots[id];
    candidates res { rules(id), { *prompts[id], slot }, slot.resident(), {}, 0, -1, {}, 0 };
    server_ranges_remove(res.evictable, 0, res.rules.sink);
    res.evictable = server_ranges_without(res.evictable, res.rules.protect);
    res.evictable = server_ranges_without(res.evictable, checkpoint_rows(*prompts[id]));
    if (unified && context.n_slots() > 1) {
        res.evictable = server_ranges_without(res.evictable, llama_kv_block_shared_ranges(context.ctx, id));
    }
    if (is_irregular(*prompts[id])) {
        res.evictable.clear();
    }
    for (const auto & m : res.text.media) {
        if (!server_ranges_contain(res.evictable, m.first, m.second)) {
            server_ranges_remove(res.evictable, m.first, m.second); // all rows of an image are evicted, or none
        }
    }
    if (options.mode == SERVER_BLOCKS_MODE_ATTENTION && llama_attn_capture_get(context.ctx, id)) {
        res.attention = llama_attn_capture_sums(context.ctx, id);
    }
    return res;
}

// Returns the first of the recent rows, which are never evicted. The last row is one of them in any case.
llama_pos server_blocks_eviction::recent_start(int id, const candidates & from) const {
    const auto & slot = context.slots[id];
    const int32_t n_recent = slot.budget().n_rows > 0 ? from.rules.recent : options.n_recent(slot.n_rows());
    const llama_pos start = slot.end() - std::max(1, n_recent);
    const auto * cut = server_blocks_cut_by(from.text.media, start);
    return cut ? cut->first : start;
}

// Sets `out` to the block to evict next: first those of the budget's order, then blocks by their score, last the block that
// the recent rows cut short, unless `full_only`. Returns false when there is none.
bool server_blocks_eviction::next(int id, candidates & from, server_blocks_budget::entry & out, bool full_only) const {
    const llama_pos recent = recent_start(id, from);
    const auto & order = from.rules.order;
    while (from.next_in_order < order.size()) {
        const auto & e = order[from.next_in_order++];
        const bool cuts = server_blocks_cut_by(from.text.media, e.p0) || server_blocks_cut_by(from.text.media, e.p1);
        if (e.p1 <= recent && !cuts && server_ranges_contain(from.evictable, e.p0, e.p1)) {
            out = e;
            return true;
        }
    }
    if (from.recent_start != recent) {
        from.recent_start = recent;
        list_blocks(id, from);
    }
    if (from.next_block >= (full_only ? from.n_full : from.blocks.size())) {
        return false;
    }
    out = from.blocks[from.next_block++];
    return true;
}

// Lists the blocks of the evictable ranges in the order of their scores.
void server_blocks_eviction::list_blocks(int id, candidates & from) const {
    std::vector<std::pair<double, server_blocks_budget::entry>> scored;
    size_t n_full = 0;
    const auto & rules = from.rules;
    for (const auto & r : from.evictable) {
        const llama_pos end = std::min(r.second, from.recent_start);
        for (llama_pos p0 = r.first, p1; p0 < end; p0 = p1) {
            // aligned, so that every slot cuts the same text at the same positions
            p1 = std::min(end, p0 + rules.block - (p0 - rules.align)%rules.block);
            if (const auto * cut = server_blocks_cut_by(from.text.media, p1)) {
                p1 = p0 < cut->first ? cut->first : cut->second;
            }
            const bool incomplete = p1 == from.recent_start && (p1 - rules.align)%rules.block != 0;
            const double value = incomplete ? std::numeric_limits<double>::max() : score(id, from, p0, p1);
            scored.push_back({ value, { "", p0, p1 } });
            n_full += !incomplete;
        }
    }
    std::stable_sort(scored.begin(), scored.end(), [](const auto & a, const auto & b) { return a.first < b.first; });
    from.blocks.clear();
    from.next_block = 0;
    from.n_full     = n_full;
    for (auto & block : scored) {
        from.blocks.push_back(std::move(block.second));
    }
}

// Returns how much a block is worth. The least is evicted first; of equal ones the older.
double server_blocks_eviction::score(int id, const candidates & from, llama_pos p0, llama_pos p1) const {
    if (options.mode == SERVER_BLOCKS_MODE_ATTENTION) {
        // the attention of these rows: per row, or per row and token that could attend to it
        const auto got = from.attention.of(p0, p1);
        return from.attention.mass.empty() ? p0 : got.mass/(options.norm_sum ? std::max(1.0, got.life) : p1 - p0);
    }
    return options.mode == SERVER_BLOCKS_MODE_SCORED ? (double) context.slots[id].used_at(p0, p1) : p0;
}

// Returns a name derived from the text, and from visibility and session where text was missing: the same rows get the same
// name again.
std::string server_blocks_eviction::block_name(const server_blocks_range & range) const {
    const auto   session    = context.slots[range.id].saver().session;
    const auto   visibility = transfer.key_of("", range).visibility;
    const auto   hash       = range.text.hashes[range.p1];
    const auto   h = visibility == 0 ? hash
        : server_blocks_mix(server_blocks_mix(hash, visibility), server_blocks_checksum(session.data(), session.size()));
    return string_format("auto/%016" PRIx64 "/%d-%d", h, range.p0, range.p1);
}

// Saves and evicts one block of the slot, see next(). Returns false if there is none.
bool server_blocks_eviction::evict_one(int id, candidate_map & found, bool full_only) {
    if (!prompts[id]) {
        return false;
    }
    if (!found.count(id)) {
        found.emplace(id, collect(id));
    }
    auto & from = found.at(id);
    server_blocks_budget::entry out;
    if (!next(id, from, out, full_only)) {
        return false;
    }
    auto & slot = context.slots[id];
    server_ranges_remove(from.evictable, out.p0, out.p1);
    if (out.p1 > (llama_pos) from.text.tokens.size()) {
        return slot.evict(out.p0, out.p1) > 0; // rows after the end of the text: nobody will ask for them
    }
    const server_blocks_range range { id, from.text, out.p0, out.p1 };
    if (out.name.empty()) {
        out.name = block_name(range);
    }
    const auto saver = slot.saver();
    const bool saved = transfer.save({ saver.tenant, saver.session, out.name }, range);
    slot.on_auto_evicted(out.p0, out.p1, saved ? json(out.name) : json());
    return slot.evict(out.p0, out.p1) > 0;
}

// Saves and evicts one block: of the slot itself, or where slots share the cells, of the slot that has most rows.
bool server_blocks_eviction::evict_one_anywhere(int id, candidate_map & found) {
    std::vector<int> ids = { id };
    for (int other = 0; unified && other < context.n_slots(); ++other) {
        if (other != id) {
            ids.push_back(other);
        }
    }
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return context.slots[a].n_rows() > context.slots[b].n_rows(); });
    return std::any_of(ids.begin(), ids.end(), [&](int other) { return evict_one(other, found); });
}

void server_blocks_eviction::save_rows(int id, const server_prompt & prompt) {
    const auto & slot   = context.slots[id];
    const auto   saver  = slot.saver();
    const int32_t size  = std::max(64, slot.budget().n_rows > 0 ? slot.budget().block : options.block);
    const server_blocks_text text(prompt, slot);
    const llama_pos n_tokens = (llama_pos) text.tokens.size();
    if (is_irregular(prompt)) {
        return;
    }
    store.begin_call();
    for (const auto & r : slot.resident()) {
        for (llama_pos p0 = r.first, p1; p0 < std::min(r.second, n_tokens); p0 = p1) {
            p1 = std::min({ r.second, (p0/size + 1)*size, n_tokens });
            if (const auto * cut = server_blocks_cut_by(text.media, p1)) {
                p1 = p0 < cut->first ? cut->first : std::min(r.second, cut->second);
            }
            const server_blocks_range range { id, text, p0, p1 };
            transfer.save({ saver.tenant, saver.session, block_name(range) }, range);
        }
    }
    transfer.wait();
}

void server_blocks_eviction::on_decoded(int id) {
    context.slots[id].mark_attended(options.block);
}
