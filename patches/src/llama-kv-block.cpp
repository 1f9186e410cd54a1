#include "llama-kv-block.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-copy.h"
#include "llama-kv-place.h"
#include "llama-kv-range.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <typeinfo>

namespace {

uint64_t kv_block_mix(uint64_t h, uint64_t v) {
    h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
    h *= 0xff51afd7ed558ccdull;
    return h ^ (h >> 33);
}

// Returns the memory if it is exactly a T, else nullptr: a class derived from T may have rows elsewhere, too.
template <typename T> T * kv_block_exactly(llama_memory_i * mem) {
    return mem && typeid(*mem) == typeid(T) ? static_cast<T *>(mem) : nullptr;
}

// The caches that block calls work on, and the kind of memory that they are in.
struct kv_block_caches {
    llama_kv_block_memory kind  = { "", false, false, false };
    llama_kv_cache *      rows  = nullptr; // K and V of the full-attention layers; nullptr: this memory is not supported
    llama_kv_cache *      index = nullptr; // where attention is sparse: the keys that choose rows, of the same rows in the same cells
};

kv_block_caches kv_block_find(const llama_context * ctx) {
    auto * mem = ctx ? ctx->get_memory() : nullptr;
    if (auto * dense = kv_block_exactly<llama_kv_cache>(mem)) {
        return { { "dense", false, false, false }, dense, nullptr };
    }
    if (auto * iswa = kv_block_exactly<llama_kv_cache_iswa>(mem)) {
        return { { "iswa", true, false, false }, iswa->get_base(), nullptr };
    }
    if (auto * hybrid = kv_block_exactly<llama_memory_hybrid>(mem)) {
        return { { "hybrid", false, true, false }, hybrid->get_mem_attn(), nullptr };
    }
    if (auto * dsa = kv_block_exactly<llama_kv_cache_dsa>(mem)) {
        return { { "dsa", false, false, true }, dsa->get_mla(), dsa->get_lid() };
    }
    if (auto * mixed = kv_block_exactly<llama_kv_cache_dsa_iswa>(mem)) {
        return { { "dsa-iswa", true, false, true }, mixed->get_dsa()->get_mla(), mixed->get_dsa()->get_lid() };
    }
    if (auto * msa = kv_block_exactly<llama_kv_cache_msa>(mem)) {
        return { { "msa", false, false, true }, msa->get_base(), msa->get_idx() };
    }
    return {};
}

// Returns the cache with K and V, for what is equal in both caches or does not concern the index.
llama_kv_cache * kv_block_cache(const llama_context * ctx) {
    return kv_block_find(ctx).rows;
}

// Returns why a memory without such a cache is not supported.
const char * kv_block_no_cache(const llama_context * ctx) {
    auto * mem = ctx ? ctx->get_memory() : nullptr;
    if (!mem) {
        return "no memory: the model does not decode";
    }
    if (kv_block_exactly<llama_memory_recurrent>(mem)) {
        return "recurrent memory: there are no rows";
    }
    if (kv_block_exactly<llama_memory_hybrid_iswa>(mem)) {
        return "hybrid memory with sliding windows";
    }
    if (kv_block_exactly<llama_memory_hybrid_idx>(mem)) {
        return "hybrid memory with an index of pools: keys of later rows change when earlier rows leave";
    }
    if (kv_block_exactly<llama_kv_cache_dsv4>(mem)) {
        return "compressed memory (dsv4): a row is made from the rows before it";
    }
    return "this kind of memory";
}

} // namespace

// The only access to private members of llama_kv_cache, which declares it a friend.
struct llama_kv_block_access {
    static llama_kv_block_state * state(const llama_kv_cache & kv) {
        return kv.block_state.get();
    }

    static void enable(llama_kv_cache & kv) {
        kv.block_state = std::make_shared<llama_kv_block_state>();
        kv.block_state->together = kv.n_stream == 1 && kv.n_seq_max > 1;
    }

    static const char * unsupported(const llama_kv_cache & kv) {
        if (kv.other) {
            return "the cache shares the cells of another one";
        }
        if (kv.swa_type != LLAMA_SWA_TYPE_NONE) {
            return "sliding-window cache";
        }
        if (kv.layers.empty()) {
            return "no layer with full attention";
        }
        return nullptr;
    }

    // Returns the rotation of keys and values of a quantised cache: whether there is one; in later releases its size.
    template <typename Cache> static auto rotation(const Cache & kv, int) -> decltype(std::make_pair(kv.attn_rot_k, kv.attn_rot_v)) {
        return { kv.attn_rot_k, kv.attn_rot_v };
    }

    template <typename Cache> static auto rotation(const Cache & kv, long) -> decltype(std::make_pair(kv.n_rot_k, kv.n_rot_v)) {
        return { kv.n_rot_k, kv.n_rot_v };
    }

    // Files of blocks contain this value: it must not change while the rows do not.
    static uint64_t layout(const llama_kv_cache & kv) {
        uint64_t h = kv_block_mix(kv.layers.size(), kv.v_trans);
        const auto rotated = rotation(kv, 0);
        h = kv_block_mix(h, rotated.first);
        h = kv_block_mix(h, rotated.second);
        for (const auto & layer : kv.layers) {
            h = kv_block_mix(h, layer.il);
            h = kv_block_mix(h, layer.k->type);
            h = kv_block_mix(h, ggml_row_size(layer.k->type, kv.hparams.n_embd_k_gqa(layer.il)));
            h = kv_block_mix(h, layer.v ? (uint64_t) layer.v->type : ~0ull);
            h = kv_block_mix(h, layer.v ? ggml_row_size(layer.v->type, kv.hparams.n_embd_v_gqa(layer.il)) : 0);
        }
        return h;
    }

    // Does what llama_kv_cache::seq_rm() does, in as many steps as the range has rows instead of all cells.
    static uint32_t evict(llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1) {
        const uint32_t strm = kv.seq_to_stream[seq];
        auto & cells = kv.v_cells[strm];
        const auto & rows = cells.seq_pos_get(seq);
        std::vector<uint32_t> found;
        for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
            found.push_back(it->second);
        }
        for (const uint32_t cell : found) {
            if (cells.seq_rm(cell, seq)) { // the cell is empty now: the search for empty cells starts there
                kv.v_heads[strm] = std::min(kv.v_heads[strm], cell);
            }
        }
        return (uint32_t) found.size();
    }
};

// Returns how many tensors of a cache are copied. An index has keys only: where its cache has memory for V, nothing is ever
// written there.
static size_t kv_block_tensors(const kv_block_caches & caches, const llama_kv_cache & kv) {
    return &kv == caches.index ? kv.get_layer_ids().size() : LLAMA_KV_ALL_TENSORS;
}

// Returns what describes the tensors in a state of the cache.
static std::vector<uint8_t> kv_block_header(const llama_kv_cache & kv) {
    auto * state = llama_kv_block_access::state(kv);
    if (state && !state->header.empty()) {
        return state->header;
    }
    llama_kv_parts unused;
    llama_kv_save_io io(unused, 0);
    kv.state_write_range(io, 0, 0, 0); // no rows
    if (state) {
        state->header = io.header;
    }
    return std::move(io.header);
}

// Returns the tensors that have the rows of a sequence.
static llama_kv_parts kv_block_parts(const kv_block_caches & caches, llama_seq_id seq) {
    llama_kv_parts parts;
    for (const auto * kv : { caches.rows, caches.index }) {
        if (kv) {
            llama_kv_save_io io(parts, kv_block_tensors(caches, *kv));
            kv->state_write_range(io, seq, 0, 0); // no rows
        }
    }
    return parts;
}

// The rows of one sequence, and what belongs to them in an index. Reads and writes them as states of the caches.
class kv_block_sequence {
public:
    kv_block_sequence(llama_context * ctx, const kv_block_caches & caches, llama_seq_id seq) : ctx(ctx), caches(caches), seq(seq) {}

    // Starts to copy the rows of a range to block.data. Returns false, with the block unchanged, if rows are missing.
    bool save(llama_kv_range range, llama_kv_block & block) const {
        llama_kv_parts parts;
        llama_kv_save_io io(parts, LLAMA_KV_ALL_TENSORS);
        const auto [p0, p1] = range;
        if (p0 >= p1 || !caches.rows->state_write_range(io, seq, p0, p1)) {
            return false;
        }
        if (caches.index) {
            llama_kv_save_io keys(parts, kv_block_tensors(caches, *caches.index));
            if (!caches.index->state_write_range(keys, seq, p0, p1) || !are_equal(io.rows, keys.rows)) {
                return false;
            }
        }
        block.cells.reserve(io.rows.size());
        for (const auto & row : io.rows) {
            block.cells.push_back(row.cell);
        }
        block.n_runs = parts.copy(ctx, llama_kv_block_access::state(*caches.rows), block.cells, block.data, true);
        block.size   = parts.row_size()*io.rows.size();
        block.p0     = p0;
        block.p1     = p1;
        for (auto * list : { &block.x, &block.y, &block.tok, &block.pos }) { // while a device copies
            list->reserve(io.rows.size());
        }
        for (const auto & row : io.rows) {
            block.pos.push_back(row.pos);
            block.tok.push_back(row.ext.tok);
            block.x  .push_back(row.ext.x);
            block.y  .push_back(row.ext.y);
        }
        return true;
    }

    // Returns an empty cell for every row of the block, in row order; nothing if there are too few.
    std::vector<uint32_t> place(const llama_kv_block & block, bool same, int32_t & n_same) const {
        const auto * index = caches.index ? &caches.index->get_cells(seq) : nullptr;
        return llama_kv_range_cells(caches.rows->get_cells(seq), index, block.cells, same, n_same);
    }

    // Starts to copy the rows of a block into these cells, which are empty. The first gets the position p0. Returns false,
    // with nothing changed, if there are rows at these positions.
    bool load(const llama_kv_block & block, const std::vector<uint32_t> & cells, llama_pos p0) const {
        // Nothing reads these cells until they have rows; they get them while a device copies.
        kv_block_parts(caches, seq).copy(ctx, llama_kv_block_access::state(*caches.rows), cells, block.data, false);
        std::vector<llama_kv_range_row> rows(cells.size());
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i].pos     = block.pos[i];
            rows[i].cell    = cells[i];
            rows[i].ext.x   = block.x[i];
            rows[i].ext.y   = block.y[i];
            rows[i].ext.tok = block.tok[i];
        }
        bool loaded = read(*caches.rows, rows, p0);
        if (loaded && caches.index && !read(*caches.index, rows, p0)) {
            llama_kv_block_access::evict(*caches.rows, seq, p0, p0 + block.pos.back() - block.pos.front() + 1);
            loaded = false;
        }
        if (!loaded) {
            ctx->synchronize(); // the caller may now change block.data
        }
        return loaded;
    }

private:
    // Puts rows into their cells of a cache.
    bool read(llama_kv_cache & kv, const std::vector<llama_kv_range_row> & rows, llama_pos p0) const {
        llama_kv_load_io io(rows, kv_block_header(kv));
        return kv.state_read_range(io, seq, p0, LLAMA_STATE_SEQ_FLAGS_SAME_CELLS);
    }

    // Returns whether the index has the keys of all rows in the cells of these rows.
    static bool are_equal(const std::vector<llama_kv_range_row> & rows, const std::vector<llama_kv_range_row> & keys) {
        return std::equal(rows.begin(), rows.end(), keys.begin(), keys.end(), [](const auto & a, const auto & b) { return a.pos == b.pos && a.cell == b.cell; });
    }

    llama_context *    ctx;
    kv_block_caches    caches;
    const llama_seq_id seq;
};

bool llama_kv_block_place(const llama_kv_block_state * state, const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & chosen) {
    return state && state->together && llama_kv_place(cells, ubatch, chosen);
}

void llama_kv_block_enable(llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    for (auto * kv : { caches.rows, caches.index }) {
        if (kv) {
            llama_kv_block_access::enable(*kv);
        }
    }
}

llama_kv_traffic llama_kv_block_traffic(const llama_context * ctx) {
    const auto * kv = kv_block_cache(ctx);
    const auto * state = kv ? llama_kv_block_access::state(*kv) : nullptr;
    return state ? state->traffic : llama_kv_traffic();
}

const char * llama_kv_block_unsupported(const llama_context * ctx) {
    if (ctx && ctx->get_model().split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "each row is split over devices (--split-mode tensor): choose --split-mode layer, row or none";
    }
    const auto * kv = kv_block_cache(ctx);
    return kv ? llama_kv_block_access::unsupported(*kv) : kv_block_no_cache(ctx);
}

llama_kv_cache * llama_kv_block_find(const llama_context * ctx) {
    return kv_block_cache(ctx);
}

std::vector<int32_t> llama_kv_block_layers(const llama_context * ctx) {
    const auto * kv = kv_block_cache(ctx);
    const auto layers = kv ? kv->get_layer_ids() : std::vector<uint32_t>();
    return { layers.begin(), layers.end() };
}

llama_kv_block_memory llama_kv_block_kind(const llama_context * ctx) {
    return kv_block_find(ctx).kind;
}

// Hashes how positions become angles and how attention is computed: rows of another set-up cannot be used.
static uint64_t kv_block_rope(const llama_context * ctx) {
    const auto & c = ctx->get_cparams();
    uint64_t h = kv_block_mix(c.n_ctx_orig_yarn, c.n_ctx_seq > c.n_ctx_orig_yarn); // longrope depends on the latter
    h = kv_block_mix(h, (uint64_t) c.rope_scaling_type);
    h = kv_block_mix(h, c.causal_attn);
    h = kv_block_mix(h, c.flash_attn);
    for (const float value : { c.rope_freq_base, c.rope_freq_scale, c.yarn_ext_factor, c.yarn_attn_factor, c.yarn_beta_fast, c.yarn_beta_slow }) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        h = kv_block_mix(h, bits);
    }
    return h;
}

int32_t llama_kv_block_rope_limit(const llama_context * ctx) {
    const auto & model = ctx->get_model();
    const int32_t limit = (int32_t) model.hparams.n_ctx_orig_yarn;
    const bool chosen = std::any_of(model.layers.begin(), model.layers.end(), [](const auto & layer) {
        return layer.rope_long && !layer.rope_freqs; // as llama_model::get_rope_factors() chooses
    });
    return chosen && (int64_t) ctx->get_cparams().n_ctx_seq <= limit ? limit : 0;
}

uint64_t llama_kv_block_layout(const llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    if (!caches.rows) {
        return 0;
    }
    const uint64_t h = kv_block_mix(llama_kv_block_access::layout(*caches.rows), kv_block_rope(ctx));
    return caches.index ? kv_block_mix(h, llama_kv_block_access::layout(*caches.index)) : h;
}

uint64_t llama_kv_block_adapter_id(const llama_adapter_lora * adapter) {
    const std::map<std::string, llama_adapter_lora_weight> weights(adapter->ab_map.begin(), adapter->ab_map.end()); // sorted, because the hash must not depend on the order of a hash map
    uint32_t alpha;
    memcpy(&alpha, &adapter->alpha, sizeof(alpha));
    uint64_t h = kv_block_mix(weights.size(), alpha);
    const auto add = [&](const uint8_t * p, size_t n) {
        h = kv_block_mix(h, n);
        for (uint64_t word = 0; n > 0; word = 0) {
            const size_t size = std::min(n, sizeof(word));
            memcpy(&word, p, size);
            h = kv_block_mix(h, word);
            p += size;
            n -= size;
        }
    };
    for (const auto & [name, weight] : weights) {
        add((const uint8_t *) name.data(), name.size());
        for (const ggml_tensor * t : { weight.a, weight.b }) {
            std::vector<uint8_t> data(ggml_nbytes(t));
            ggml_backend_tensor_get(t, data.data(), 0, data.size());
            h = kv_block_mix(h, (uint64_t) t->type);
            for (const int64_t size : t->ne) {
                h = kv_block_mix(h, (uint64_t) size);
            }
            add(data.data(), data.size());
        }
    }
    for (const llama_token token : adapter->alora_invocation_tokens) {
        h = kv_block_mix(h, (uint32_t) token);
    }
    return h;
}

ggml_backend_buffer_type_t llama_kv_block_host_buft(const llama_context * ctx) {
    const auto * kv = kv_block_cache(ctx);
    for (const uint32_t layer : kv ? kv->get_layer_ids() : std::vector<uint32_t>()) { // the first that is not in host memory
        const auto buft = ggml_backend_buffer_get_type(kv->get_k_storage((int32_t) layer)->buffer);
        const auto dev  = ggml_backend_buft_get_device(buft);
        if (!ggml_backend_buft_is_host(buft) && dev) {
            return ggml_backend_dev_host_buffer_type(dev);
        }
    }
    return nullptr;
}

void llama_kv_block_fence(llama_context * ctx) {
    ctx->synchronize();
}

size_t llama_kv_block_row_size(const llama_context * ctx) {
    return kv_block_parts(kv_block_find(ctx), 0).row_size();
}

uint32_t llama_kv_block_n_cells(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? kv->get_cells(seq).size() : 0;
}

uint32_t llama_kv_block_n_free(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? kv->get_cells(seq).size() - kv->get_cells(seq).get_used() : 0;
}

uint32_t llama_kv_block_n_rows(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? (uint32_t) kv->get_cells(seq).seq_pos_get(seq).size() : 0;
}

llama_kv_extent llama_kv_block_extent(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    if (!kv) {
        return {};
    }
    const auto & cells = kv->get_cells(seq);
    return { (int32_t) cells.seq_pos_get(seq).size(), cells.seq_pos_min(seq), cells.seq_pos_max(seq) };
}

static llama_kv_ranges kv_block_ranges(const llama_context * ctx, llama_seq_id seq, bool shared_only) {
    llama_kv_ranges res;
    const auto * kv = kv_block_cache(ctx);
    if (!kv) {
        return res;
    }
    const auto & cells = kv->get_cells(seq);
    for (const auto & [pos, cell] : cells.seq_pos_get(seq)) {
        if (shared_only && cells.seq_count(cell) < 2) {
            continue;
        }
        if (!res.empty() && res.back().second >= pos) {
            res.back().second = pos + 1;
        } else {
            res.push_back({ pos, pos + 1 });
        }
    }
    return res;
}

llama_kv_ranges llama_kv_block_resident(const llama_context * ctx, llama_seq_id seq) {
    return kv_block_ranges(ctx, seq, false);
}

llama_kv_ranges llama_kv_block_shared_ranges(const llama_context * ctx, llama_seq_id seq) {
    return kv_block_ranges(ctx, seq, true);
}

bool llama_kv_block_shared(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto * kv = kv_block_cache(ctx);
    if (!kv) {
        return false;
    }
    const auto & cells = kv->get_cells(seq);
    const auto & rows  = cells.seq_pos_get(seq);
    for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
        if (cells.seq_count(it->second) > 1) {
            return true;
        }
    }
    return false;
}

// Rotates keys whose positions have moved, before rows are copied.
static void kv_block_apply_shift(llama_context * ctx, const llama_kv_cache & kv) {
    if (kv.get_has_shift()) {
        ctx->memory_update(false);
    }
}

bool llama_kv_block_save(llama_context * ctx, llama_seq_id seq, llama_kv_range range, uint8_t * data, llama_kv_block & out) {
    const auto caches = kv_block_find(ctx);
    if (!caches.rows) {
        return false;
    }
    kv_block_apply_shift(ctx, *caches.rows);
    llama_kv_block block;
    block.layout = llama_kv_block_layout(ctx);
    block.data   = data;
    if (!kv_block_sequence(ctx, caches, seq).save(range, block)) {
        return false;
    }
    out = std::move(block);
    return true;
}

uint32_t llama_kv_block_evict(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto caches = kv_block_find(ctx);
    if (caches.index) {
        llama_kv_block_access::evict(*caches.index, seq, p0, p1);
    }
    return caches.rows ? llama_kv_block_access::evict(*caches.rows, seq, p0, p1) : 0;
}

int32_t llama_kv_block_load(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, bool same) {
    const auto caches = kv_block_find(ctx);
    if (!caches.rows || block.layout != llama_kv_block_layout(ctx)) {
        return -1;
    }
    kv_block_apply_shift(ctx, *caches.rows);
    const kv_block_sequence sequence(ctx, caches, seq);
    int32_t n_same = 0;
    const auto target = sequence.place(block, same, n_same);
    return !target.empty() && sequence.load(block, target, block.pos.front()) ? n_same : -1;
}

bool llama_kv_block_can_shift(const llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    const auto & kind = caches.kind;
    return caches.rows && !kind.windowed && !kind.recurrent && !kind.indexed && caches.rows->get_can_shift();
}

uint32_t llama_kv_block_compact(llama_context * ctx, llama_seq_id seq) {
    auto * kv = kv_block_cache(ctx);
    if (!kv || !llama_kv_block_can_shift(ctx)) {
        return 0;
    }
    uint32_t  n_moved = 0;
    llama_pos end     = 0; // of the rows that are contiguous already
    for (const auto & [p0, p1] : llama_kv_block_resident(ctx, seq)) {
        if (p0 > end) {
            kv->seq_add(seq, p0, p1, end - p0);
            n_moved += p1 - p0;
        }
        end += p1 - p0;
    }
    return n_moved;
}

int32_t llama_kv_block_insert(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, llama_pos at) {
    auto * kv = kv_block_cache(ctx);
    if (!kv || !llama_kv_block_can_shift(ctx) || at < 0 || block.layout != llama_kv_block_layout(ctx)) {
        return -1;
    }
    kv_block_apply_shift(ctx, *kv);
    const kv_block_sequence sequence(ctx, kv_block_find(ctx), seq);
    int32_t n_same = 0;
    const auto target = sequence.place(block, true, n_same);
    if (target.empty()) {
        return -1;
    }
    kv->seq_add(seq, at, -1, block.p1 - block.p0);
    return sequence.load(block, target, at + block.pos.front() - block.p0) ? n_same : -1;
}

llama_cparams llama_kv_block_unscaled(const llama_cparams & cparams, float freq_scale) {
    llama_cparams res = cparams;
    // inverts the factor of the interpolated part, see rope_yarn() in ggml
    res.yarn_attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)) : 1.0f;
    return res;
}
