#include "llama-attn-capture.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-block.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace {

// One row of attention by position. Positions after its end have 0.
using attn_row = std::vector<float>;

// The capture of one sequence.
struct attn_seq {
    llama_attn_params  params;
    std::vector<int32_t> n_head;    // of each layer
    int32_t            n_channel = 1;
    int64_t            n_obs = 0;
    bool               prompt = false;
    std::vector<attn_row> mass;     // of each channel: EWMA, SUM
    std::vector<int64_t>  born;     // value of n_obs when each position was decoded
    std::deque<std::vector<attn_row>> last; // SNAPKV: the last rows, of each channel
    llama_attn_queries queries;
};

// The tokens of a ubatch whose rows are captured.
struct attn_want {
    std::vector<int32_t> layers;
    std::vector<int32_t> rows;     // token of each row, as many in each stream
    std::vector<bool>    take;     // false: padding, so that all streams have as many rows
    int32_t n_stream = 1;
    bool    all      = false;      // every token, in order
    bool    per_head = false;
    bool    queries  = false;

    int32_t n_rows() const { return (int32_t) rows.size()/n_stream; }

    // Returns whether the graphs for both are equal.
    bool like(const attn_want & o) const {
        return layers == o.layers && rows.size() == o.rows.size() && n_stream == o.n_stream && all == o.all
            && per_head == o.per_head && queries == o.queries;
    }
};

// A size of graphs: compute buffers that are large enough for it are large enough for all smaller graphs.
struct attn_room {
    std::set<int32_t> layers;
    int32_t n_rows   = 0; // of a stream
    bool    per_head = false;
    bool    queries  = false;

    bool holds(const attn_room & o) const {
        return std::includes(layers.begin(), layers.end(), o.layers.begin(), o.layers.end()) && n_rows >= o.n_rows
            && per_head >= o.per_head && queries >= o.queries;
    }
};

struct attn_state {
    std::map<llama_seq_id, attn_seq> seqs;

    ggml_backend_sched_t   sched = nullptr; // owner of the compute buffers that `reserved` describes
    std::vector<attn_room> reserved;

    // Returns the largest size that graphs can have if `seq` has these parameters.
    attn_room room(const llama_cparams & cparams, llama_seq_id seq, const llama_attn_params & params) const {
        attn_room res;
        const auto add = [&](const llama_attn_params & p) {
            if (p.layers.empty()) {
                return;
            }
            const int32_t n = std::max(p.window, p.queries);
            res.layers.insert(p.layers.begin(), p.layers.end());
            res.n_rows   = cparams.kv_unified ? res.n_rows + n : std::max(res.n_rows, n);
            res.per_head = res.per_head || p.per_head;
            res.queries  = res.queries || p.queries > 0;
        };
        for (const auto & [id, s] : seqs) {
            if (id != seq) {
                add(s.params);
            }
        }
        add(params);
        return res;
    }

    // Returns the layers of these sequences together, or of all sequences.
    std::vector<int32_t> layers(const std::set<llama_seq_id> * only = nullptr) const {
        std::set<int32_t> res;
        for (const auto & [id, s] : seqs) {
            if (!only || only->count(id)) {
                res.insert(s.params.layers.begin(), s.params.layers.end());
            }
        }
        return { res.begin(), res.end() };
    }
};

// This is not a member of llama_context, because the code of all models includes the header of that class: the stock and
// the patched server could not share their objects.
std::mutex                                              attn_states_mutex;
std::map<const llama_context *, std::unique_ptr<attn_state>> attn_states;
std::atomic<int>                                        attn_n_states { 0 };

attn_state * attn_find(const llama_context * ctx) {
    if (attn_n_states.load(std::memory_order_relaxed) == 0) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(attn_states_mutex);
    const auto it = attn_states.find(ctx);
    return it == attn_states.end() ? nullptr : it->second.get();
}

attn_seq * attn_find(const llama_context * ctx, llama_seq_id seq) {
    auto * state = attn_find(ctx);
    const auto it = state ? state->seqs.find(seq) : decltype(state->seqs.end())();
    return state && it != state->seqs.end() ? &it->second : nullptr;
}

// Selects the last `window` tokens of each captured sequence, stream by stream.
attn_want attn_wanted(const attn_state & state, const llama_ubatch & ubatch, int32_t n_stream) {
    attn_want res;
    res.n_stream = n_stream;
    const int32_t n_tokens = (int32_t) ubatch.n_tokens/n_stream;
    std::vector<std::vector<int32_t>> wanted(n_stream);
    std::set<llama_seq_id> present;
    size_t n_rows = 0;
    for (int32_t s = 0; s < n_stream; ++s) {
        std::map<llama_seq_id, int32_t> seen;
        for (int32_t i = (s + 1)*n_tokens - 1; i >= s*n_tokens; --i) {
            bool want = false;
            for (int32_t k = 0; k < ubatch.n_seq_id[i]; ++k) {
                const auto it = state.seqs.find(ubatch.seq_id[i][k]);
                if (it == state.seqs.end()) {
                    continue;
                }
                const auto & seq = it->second;
                present.insert(it->first);
                want         |= seen[it->first]++ < std::max(seq.params.window, seq.params.queries);
                res.per_head |= seq.params.per_head;
                res.queries  |= seq.prompt && seq.params.queries > 0;
            }
            if (want) {
                wanted[s].insert(wanted[s].begin(), i);
            }
        }
        n_rows = std::max(n_rows, wanted[s].size());
    }
    for (int32_t s = 0; s < n_stream; ++s) {
        const size_t n_fill = n_rows - wanted[s].size();
        res.rows.insert(res.rows.end(), n_fill, s*n_tokens);
        res.take.insert(res.take.end(), n_fill, false);
        res.rows.insert(res.rows.end(), wanted[s].begin(), wanted[s].end());
        res.take.insert(res.take.end(), wanted[s].size(), true);
    }
    res.all = n_rows > 0 && (int32_t) n_rows == n_tokens
        && std::all_of(res.take.begin(), res.take.end(), [](bool take) { return take; });
    res.layers = state.layers(&present);
    return res;
}

// Selects as many rows as a ubatch of this shape can have at most.
attn_want attn_largest(const attn_room & room, const llama_ubatch & ubatch, int32_t n_stream) {
    attn_want res;
    const int32_t n_tokens = (int32_t) ubatch.n_tokens/n_stream;
    const int32_t n_rows   = std::min(n_tokens, room.n_rows);
    res.layers.assign(room.layers.begin(), room.layers.end());
    res.rows.assign(n_rows*n_stream, 0);
    res.take.assign(n_rows*n_stream, false);
    res.n_stream = n_stream;
    res.all      = false; // a graph that captures all tokens has fewer tensors
    res.per_head = room.per_head;
    res.queries  = room.queries;
    return res;
}

int32_t attn_n_stream(const llama_cparams & cparams, const llama_ubatch & ubatch) {
    return cparams.kv_unified ? 1 : (int32_t) ubatch.n_seqs_unq;
}

// The captured part of a graph: which rows it selects, and the tensors that contain them after the execution.
class attn_graph_input : public llm_graph_input_i {
public:
    struct output {
        int32_t       layer;
        int32_t       n_head;
        ggml_tensor * rows; // [cell, row, head or 1, stream]
    };

    attn_graph_input(const attn_state & state, const attn_want & want) : state(state), want(want) {}

    void set_input(const llama_ubatch * ubatch) override {
        want = attn_wanted(state, *ubatch, want.n_stream);
        if (index) {
            ggml_backend_tensor_set(index, want.rows.data(), 0, want.rows.size()*sizeof(int32_t));
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        return want.like(attn_wanted(state, params.ubatch, attn_n_stream(params.cparams, params.ubatch)));
    }

    bool wants(int il) const {
        return std::binary_search(want.layers.begin(), want.layers.end(), il)
            && std::none_of(outputs.begin(), outputs.end(), [il](const output & o) { return o.layer == il; });
    }

    const attn_state &   state;
    attn_want            want;
    ggml_tensor *        index = nullptr; // I32 [row]
    std::vector<output>  outputs;
    std::vector<output>  queries; // [channel*head, row]
};

attn_graph_input * attn_input_of(const llm_graph_result & res) {
    for (const auto & input : res.inputs) {
        if (auto * ours = dynamic_cast<attn_graph_input *>(input.get())) {
            return ours;
        }
    }
    return nullptr;
}

thread_local attn_state * attn_current = nullptr; // of the context whose graph is being built
thread_local const attn_room * attn_reserving = nullptr; // set while the largest graph is built, which only reserves memory

attn_graph_input * attn_input(const llm_graph_context & g) {
    if (!attn_current) {
        return nullptr;
    }
    if (auto * input = attn_input_of(*g.res)) {
        return input;
    }
    const int32_t n_stream = attn_n_stream(g.cparams, g.ubatch);
    const auto want = attn_reserving ? attn_largest(*attn_reserving, g.ubatch, n_stream) : attn_wanted(*attn_current, g.ubatch, n_stream);
    return static_cast<attn_graph_input *>(g.res->add_input(std::make_unique<attn_graph_input>(*attn_current, want)));
}

// With --no-kv-offload the keys are in host memory, and the product with them is computed there as upstream does.
ggml_tensor * attn_pinned(const llm_graph_context & g, ggml_tensor * t) {
    if (!g.cparams.offload_kqv) {
        ggml_backend_sched_set_tensor_backend(g.sched, t, g.backend_cpu);
    }
    return t;
}

void attn_output(const llm_graph_context & g, attn_graph_input & input, ggml_tensor * kq, int il) {
    const int32_t n_head = (int32_t) kq->ne[2];
    if (!input.want.per_head) {
        // The device sums over heads, so that one row per token is copied to the host.
        kq = attn_pinned(g, ggml_repeat_back(g.ctx0, kq, ggml_new_tensor_4d(g.ctx0, GGML_TYPE_F32, kq->ne[0], kq->ne[1], 1, kq->ne[3])));
    }
    ggml_set_output(kq);
    ggml_build_forward_expand(g.gf, kq);
    input.outputs.push_back({ il, n_head, kq });
}

// Selects rows of a matrix that has one row per token.
ggml_tensor * attn_select(const llm_graph_context & g, attn_graph_input & input, ggml_tensor * rows) {
    if (!input.index) {
        input.index = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I32, (int64_t) input.want.rows.size());
        ggml_set_input(input.index);
        ggml_set_name(input.index, "attn_capture_rows");
    }
    return ggml_get_rows(g.ctx0, rows, input.index);
}

void attn_add_to(attn_row & mass, const attn_row & row, float old, float weight) {
    if (old != 1.0f) {
        for (auto & value : mass) {
            value *= old;
        }
    }
    mass.resize(std::max(mass.size(), row.size()), 0.0f);
    for (size_t i = 0; i < row.size(); ++i) {
        mass[i] += weight*row[i];
    }
}

void attn_observe(attn_seq & seq, std::vector<attn_row> rows, llama_pos pos) {
    seq.born.resize(std::max(seq.born.size(), (size_t) pos + 1), seq.n_obs);
    seq.n_obs++;
    if (seq.params.mode == LLAMA_ATTN_SNAPKV) {
        seq.last.push_back(std::move(rows));
        if ((int32_t) seq.last.size() > seq.params.window) {
            seq.last.pop_front();
        }
        return;
    }
    const bool  sum   = seq.params.mode == LLAMA_ATTN_SUM;
    const float decay = seq.params.decay;
    for (size_t c = 0; c < rows.size(); ++c) {
        attn_add_to(seq.mass[c], rows[c], sum ? 1.0f : decay, sum ? 1.0f : 1.0f - decay);
    }
}

// One token of a ubatch whose rows were captured.
struct attn_token {
    int32_t   index; // in attn_want::rows
    llama_pos pos;
};

// Converts the rows of one token, of all outputs, from cells to positions. `data` has the values of input.outputs.
std::vector<attn_row> attn_by_position(const attn_seq & seq, const attn_graph_input & input, const std::vector<const float *> & data,
                                       const llama_kv_cells & cells, attn_token token) {
    const auto &    outputs = input.outputs;
    const llama_pos pos     = token.pos;
    const int32_t   n_rows  = input.want.n_rows();
    const int32_t   stream  = token.index/n_rows;
    const int32_t   r       = token.index%n_rows;
    std::vector<attn_row> res(seq.n_channel, attn_row(pos + 1, 0.0f));
    std::vector<float> sum;
    int32_t channel = 0;
    float   scale   = 0.0f;
    const auto scatter = [&](const float * row, size_t n, float factor, attn_row & to) {
        for (size_t c = 0; c < n; ++c) {
            if (row[c] > 0.0f) { // a masked cell has exactly 0
                to[std::min(cells.pos_get((uint32_t) c), pos)] += factor*row[c];
            }
        }
    };
    for (size_t o = 0; o < outputs.size(); ++o) {
        if (!std::binary_search(seq.params.layers.begin(), seq.params.layers.end(), outputs[o].layer)) {
            continue;
        }
        const auto * t = outputs[o].rows;
        const size_t n = t->ne[0];
        sum.resize(std::max(sum.size(), n), 0.0f);
        for (int64_t h = 0; h < t->ne[2]; ++h) {
            const float * row = data[o] + ((stream*t->ne[2] + h)*n_rows + r)*n;
            if (seq.params.per_head) {
                scatter(row, n, 1.0f, res[channel++]);
                continue;
            }
            for (size_t c = 0; c < n; ++c) {
                sum[c] += row[c];
            }
        }
        scale += outputs[o].n_head;
    }
    if (!seq.params.per_head && scale > 0.0f) {
        scatter(sum.data(), sum.size(), 1.0f/scale, res[0]);
    }
    return res;
}

// Appends the query rows of one token to those of the sequence, and drops the first when they are too many. `data` has
// the values of input.queries.
void attn_keep_queries(attn_seq & seq, const attn_graph_input & input, const std::vector<const float *> & data, attn_token token) {
    auto & kept = seq.queries;
    if (!kept.pos.empty() && kept.pos.back() >= token.pos) {
        kept = {}; // of an earlier prompt
    }
    kept.layers.resize(seq.params.layers.size());
    kept.pos.push_back(token.pos);
    const bool full = (int32_t) kept.pos.size() > seq.params.queries;
    if (full) {
        kept.pos.erase(kept.pos.begin());
    }
    size_t layer = 0;
    for (size_t o = 0; o < input.queries.size(); ++o) {
        const auto & out = input.queries[o];
        if (!std::binary_search(seq.params.layers.begin(), seq.params.layers.end(), out.layer)) {
            continue;
        }
        const size_t n = out.rows->ne[0];
        auto & rows = kept.layers[layer++];
        rows.insert(rows.end(), data[o] + token.index*n, data[o] + (token.index + 1)*n);
        if (full) {
            rows.erase(rows.begin(), rows.begin() + n);
        }
        kept.n_head = out.n_head;
        kept.n_embd = (int32_t) n/out.n_head;
    }
}

// The values of tensors: in place where the host can read them, else as copies.
struct attn_values {
    std::vector<std::vector<float>> copies;
    std::vector<const float *>      data;

    explicit attn_values(const std::vector<attn_graph_input::output> & outputs) {
        copies.reserve(outputs.size());
        for (const auto & o : outputs) {
            if (ggml_backend_buffer_is_host(o.rows->buffer)) {
                data.push_back((const float *) o.rows->data);
                continue;
            }
            copies.emplace_back(ggml_nelements(o.rows));
            ggml_backend_tensor_get(o.rows, copies.back().data(), 0, ggml_nbytes(o.rows));
            data.push_back(copies.back().data());
        }
    }
};

} // namespace

//
// captures
//

const char * llama_attn_capture_unsupported(const llama_context * ctx) {
    if (const char * reason = llama_kv_block_unsupported(ctx)) {
        return reason;
    }
    if (ctx->get_model().hparams.is_mla()) {
        return "multi-head latent attention";
    }
    if (llama_kv_block_kind(ctx).indexed) {
        return "sparse attention";
    }
    return ctx->get_model().arch == LLM_ARCH_GROK ? "an attention scale of its own" : nullptr;
}

std::vector<int32_t> llama_attn_capture_layers(const llama_context * ctx) {
    auto res = llama_attn_capture_unsupported(ctx) ? std::vector<int32_t>() : llama_kv_block_layers(ctx);
    std::sort(res.begin(), res.end());
    return res;
}

int32_t llama_attn_capture_n_head(const llama_context * ctx, int32_t layer) {
    return (int32_t) ctx->get_model().hparams.n_head(layer);
}

size_t llama_attn_capture_bytes(const llama_context * ctx, const llama_attn_params & params, int64_t n_pos) {
    size_t n_channel = params.per_head ? 0 : 1;
    for (const int32_t layer : params.layers) {
        n_channel += params.per_head ? llama_attn_capture_n_head(ctx, layer) : 0;
    }
    const size_t n_rows = params.mode == LLAMA_ATTN_SNAPKV ? params.window : 1;
    return n_pos*(n_channel*n_rows*sizeof(float) + sizeof(int64_t));
}

size_t llama_attn_capture_device_bytes(const llama_context * ctx, llama_seq_id seq, const llama_attn_params & params) {
    const auto * state = attn_find(ctx);
    const auto   room  = (state ? *state : attn_state()).room(ctx->get_cparams(), seq, params);
    const auto & cparams = ctx->get_cparams();
    // the product and the softmax of the largest layer, and the outputs of all layers
    size_t n = 0, n_head_max = 0;
    for (const int32_t layer : room.layers) {
        const size_t n_head = llama_attn_capture_n_head(ctx, layer);
        n_head_max = std::max(n_head_max, n_head);
        n += room.per_head ? n_head : 1;
    }
    const size_t n_cells = cparams.kv_unified ? cparams.n_ctx : (size_t) cparams.n_ctx_seq*cparams.n_seq_max;
    const size_t n_rows  = std::min<size_t>(room.n_rows, cparams.n_ubatch);
    return (n + 2*n_head_max)*n_rows*n_cells*sizeof(float);
}

// Makes the compute buffers large enough for graphs with `room`. Returns false where there is no memory.
static bool attn_reserve_graph(llama_context * ctx, attn_state & state, const attn_room * room) {
    const auto & cparams  = ctx->get_cparams();
    const uint32_t n_seqs   = cparams.n_seq_max;
    const uint32_t n_tokens = std::min(cparams.n_ctx, cparams.n_ubatch);
    const auto     mctx     = ctx->get_memory()->init_full();
    auto * const current = attn_current;
    attn_current   = room ? &state : nullptr;
    attn_reserving = room;
    bool ok = mctx != nullptr;
    const uint32_t n_outputs = std::max<uint32_t>(1, std::min(n_tokens, cparams.n_outputs_max));
    ok = ok && ctx->graph_reserve(n_tokens, n_seqs, n_outputs, mctx.get()) != nullptr;
    attn_current   = current;
    attn_reserving = nullptr;
    return ok;
}

bool llama_attn_capture_reserve(llama_context * ctx, llama_seq_id seq, const llama_attn_params & params) {
    if (params.layers.empty()) {
        return true;
    }
    attn_state none;
    auto * found = attn_find(ctx);
    const auto room = (found ? *found : none).room(ctx->get_cparams(), seq, params);
    const bool same = found && found->sched == ctx->get_sched();
    if (same && std::any_of(found->reserved.begin(), found->reserved.end(), [&](const auto & has) { return has.holds(room); })) {
        return true;
    }
    ctx->synchronize();
    attn_state graph; // without sequences: the graph has the rows of `room`
    if (!attn_reserve_graph(ctx, graph, &room)) {
        if (!attn_reserve_graph(ctx, graph, nullptr)) {
            LLAMA_LOG_ERROR("%s: the compute buffers could not be restored\n", __func__);
        }
        return false;
    }
    const std::lock_guard<std::mutex> lock(attn_states_mutex);
    auto & state = attn_states[ctx];
    if (!state) {
        state = std::make_unique<attn_state>();
        attn_n_states++;
    }
    if (state->sched != ctx->get_sched()) {
        state->sched = ctx->get_sched();
        state->reserved.clear();
    }
    state->reserved.push_back(room);
    return true;
}

bool llama_attn_capture_set(llama_context * ctx, llama_seq_id seq, const llama_attn_params & params) {
    const auto possible = llama_attn_capture_layers(ctx);
    if (!std::includes(possible.begin(), possible.end(), params.layers.begin(), params.layers.end())) {
        return false;
    }
    if (const auto * now = attn_find(ctx, seq); now ? now->params == params : params.layers.empty()) {
        return true;
    }
    const std::lock_guard<std::mutex> lock(attn_states_mutex);
    auto & state = attn_states[ctx];
    if (!state) {
        state = std::make_unique<attn_state>();
        attn_n_states++;
    }
    attn_state next;
    for (const auto & [id, s] : state->seqs) {
        if (id != seq) {
            next.seqs[id].params = s.params;
        }
    }
    next.seqs[seq].params = params;
    if ((int32_t) next.layers().size() > LLAMA_ATTN_MAX_LAYERS) {
        return false;
    }
    state->seqs.erase(seq);
    if (params.layers.empty()) {
        return true;
    }
    auto & s = state->seqs[seq];
    s.params    = params;
    s.n_channel = params.per_head ? 0 : 1;
    for (const int32_t layer : params.layers) {
        s.n_head.push_back(llama_attn_capture_n_head(ctx, layer));
        s.n_channel += params.per_head ? s.n_head.back() : 0;
    }
    s.mass.resize(s.n_channel);
    return true;
}

const llama_attn_params * llama_attn_capture_get(const llama_context * ctx, llama_seq_id seq) {
    const auto * s = attn_find(ctx, seq);
    return s ? &s->params : nullptr;
}

void llama_attn_capture_forget(llama_context * ctx, llama_seq_id seq, llama_pos p0) {
    auto * s = attn_find(ctx, seq);
    if (!s || (llama_pos) s->born.size() <= p0) {
        return;
    }
    const auto truncate = [p0](std::vector<attn_row> & rows) {
        for (auto & row : rows) {
            row.resize(std::min(row.size(), (size_t) p0));
        }
    };
    s->born.resize(p0);
    truncate(s->mass);
    // drops the rows of removed tokens
    while (!s->last.empty() && (llama_pos) s->last.back().front().size() > p0) {
        s->last.pop_back();
    }
}

void llama_attn_capture_prompt(llama_context * ctx, llama_seq_id seq, bool begins) {
    auto * s = attn_find(ctx, seq);
    if (!s) {
        return;
    }
    s->prompt = begins;
    if (begins) {
        s->queries = {};
    }
}

llama_attn_mass llama_attn_capture_mass(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, int32_t channel) {
    const auto * s = attn_find(ctx, seq);
    if (!s || p0 < 0 || channel >= s->n_channel || (channel >= 0 && !s->params.per_head)) {
        return { 0.0, 0.0, s ? s->n_obs : 0 };
    }
    const auto over = [&](const attn_row & row) {
        const size_t end = std::min(row.size(), (size_t) std::max(p0, p1));
        double sum = 0.0;
        for (size_t i = p0; i < end; ++i) {
            sum += row[i];
        }
        return sum;
    };
    const auto of = [&](int32_t c) {
        if (s->params.mode != LLAMA_ATTN_SNAPKV) {
            return over(s->mass[c]);
        }
        double sum = 0.0;
        for (const auto & rows : s->last) {
            sum += over(rows[c]);
        }
        return s->last.empty() ? 0.0 : sum/s->last.size();
    };
    llama_attn_mass res { 0.0, 0.0, s->n_obs };
    for (int32_t c = std::max(0, channel); c < (channel < 0 ? s->n_channel : channel + 1); ++c) {
        res.mass += of(c)/(channel < 0 ? s->n_channel : 1);
    }
    for (size_t i = p0; i < std::min(s->born.size(), (size_t) std::max(p0, p1)); ++i) {
        res.life += s->n_obs - s->born[i];
    }
    return res;
}

llama_attn_sums llama_attn_capture_sums(const llama_context * ctx, llama_seq_id seq, int32_t channel) {
    const auto * s = attn_find(ctx, seq);
    llama_attn_sums res;
    if (!s || channel >= s->n_channel || (channel >= 0 && !s->params.per_head)) {
        res.n_obs = s ? s->n_obs : 0;
        return res;
    }
    res.n_obs = s->n_obs;
    std::vector<double> values; // by position
    const auto add = [&](const attn_row & row, double scale) {
        values.resize(std::max(values.size(), row.size()));
        for (size_t i = 0; i < row.size(); ++i) {
            values[i] += scale*row[i];
        }
    };
    const double share = channel < 0 ? 1.0/s->n_channel : 1.0;
    for (int32_t c = std::max(0, channel); c < (channel < 0 ? s->n_channel : channel + 1); ++c) {
        if (s->params.mode != LLAMA_ATTN_SNAPKV) {
            add(s->mass[c], share);
        }
        for (const auto & rows : s->last) {
            if (s->params.mode == LLAMA_ATTN_SNAPKV) {
                add(rows[c], share/s->last.size());
            }
        }
    }
    res.mass.resize(values.size() + 1);
    for (size_t i = 0; i < values.size(); ++i) {
        res.mass[i + 1] = res.mass[i] + values[i];
    }
    res.life.resize(s->born.size() + 1);
    for (size_t i = 0; i < s->born.size(); ++i) {
        res.life[i + 1] = res.life[i] + (s->n_obs - s->born[i]);
    }
    return res;
}

const llama_attn_queries * llama_attn_capture_queries(const llama_context * ctx, llama_seq_id seq) {
    const auto * s = attn_find(ctx, seq);
    return s ? &s->queries : nullptr;
}

int32_t llama_attn_capture_n_key(const llama_context * ctx, int32_t layer) {
    return (int32_t) ctx->get_model().hparams.n_embd_k_gqa(layer);
}

namespace {

using attn_runs = std::vector<std::pair<uint32_t, uint32_t>>; // first cell, number of cells

// Returns the cells of the rows of [p0, p1); nothing when some of them are not resident.
attn_runs attn_resident(const llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    attn_runs res;
    llama_pos n_rows = 0;
    const auto & rows = kv.get_cells(seq).seq_pos_get(seq);
    for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it, ++n_rows) {
        if (!res.empty() && res.back().first + res.back().second == it->second) {
            res.back().second++;
        } else {
            res.push_back({ it->second, 1 });
        }
    }
    return n_rows == p1 - p0 ? res : attn_runs();
}

std::vector<uint8_t> attn_key_rows(const llama_kv_cache & kv, llama_seq_id seq, int32_t layer, const attn_runs & runs) {
    const ggml_tensor * k = kv.get_k_storage(layer);
    std::vector<uint8_t> res;
    for (const auto & [cell, count] : runs) {
        const size_t at = res.size();
        res.resize(at + count*k->nb[1]);
        ggml_backend_tensor_get(k, res.data() + at, kv.get_stream(seq)*k->nb[2] + cell*k->nb[1], res.size() - at);
    }
    return res;
}

// Calls `take` with each key of these rows of a layer, as floats.
template <typename Take> void attn_each_key(const llama_kv_cache & kv, int32_t layer, const uint8_t * rows, size_t n_rows, Take && take) {
    const ggml_tensor * k = kv.get_k_storage(layer);
    const auto to_f = ggml_get_type_traits(k->type)->to_float;
    std::vector<float> row(k->ne[0]);
    for (size_t i = 0; i < n_rows; ++i) {
        if (to_f) {
            to_f(rows + i*k->nb[1], row.data(), row.size());
        } else {
            memcpy(row.data(), rows + i*k->nb[1], row.size()*sizeof(float));
        }
        take(row);
    }
}

float attn_product(const float * a, const float * b, size_t n) {
    float sums[8] = {}; // several sums, so that additions do not depend on each other
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (size_t j = 0; j < 8; ++j) {
            sums[j] += a[i + j]*b[i + j];
        }
    }
    for (; i < n; ++i) {
        sums[0] += a[i]*b[i];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Returns the offset of the keys of a layer in a copy of n rows.
size_t attn_keys_offset(const llama_context * ctx, const llama_kv_cache & kv, int32_t layer, size_t n_rows) {
    size_t res = 0;
    for (const int32_t other : llama_kv_block_layers(ctx)) {
        if (other == layer) {
            break;
        }
        res += n_rows*kv.get_k_storage(other)->nb[1];
    }
    return res;
}

} // namespace

std::vector<float> llama_attn_capture_bounds(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                             const std::vector<int32_t> & layers) {
    const auto * kv = llama_kv_block_find(ctx);
    const auto runs = kv ? attn_resident(*kv, seq, p0, p1) : attn_runs();
    std::vector<float> res;
    if (runs.empty()) {
        return res;
    }
    ctx->synchronize();
    for (const int32_t layer : layers) {
        const size_t n = kv->get_k_storage(layer)->ne[0];
        std::vector<float> lo(n, std::numeric_limits<float>::max()), hi(n, std::numeric_limits<float>::lowest());
        const auto rows = attn_key_rows(*kv, seq, layer, runs);
        attn_each_key(*kv, layer, rows.data(), p1 - p0, [&](const std::vector<float> & key) {
            for (size_t c = 0; c < n; ++c) {
                lo[c] = std::min(lo[c], key[c]);
                hi[c] = std::max(hi[c], key[c]);
            }
        });
        res.insert(res.end(), lo.begin(), lo.end());
        res.insert(res.end(), hi.begin(), hi.end());
    }
    return res;
}

std::vector<float> llama_attn_capture_products(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                               const llama_kv_block * saved) {
    const auto * kv = llama_kv_block_find(ctx);
    const auto * s  = attn_find(ctx, seq);
    std::vector<float> res;
    if (!kv || !s || s->queries.pos.empty()) {
        return res;
    }
    const auto & queries = s->queries;
    const auto   runs    = attn_resident(*kv, seq, p0, p1);
    if (runs.empty() && !saved) {
        return res;
    }
    ctx->synchronize();
    const size_t d = queries.n_embd, n_head = queries.n_head;
    for (size_t l = 0; l < s->params.layers.size(); ++l) {
        const int32_t layer = s->params.layers[l];
        const auto &  q     = queries.layers[l];
        const size_t  n_kv  = kv->get_k_storage(layer)->ne[0]/d;
        if (n_kv == 0 || n_head % n_kv != 0 || q.size() != queries.pos.size()*n_head*d) {
            return {}; // layers with heads of different shapes are not supported
        }
        const size_t  group = n_head/n_kv; // heads that share a key
        const auto    rows  = attn_key_rows(*kv, seq, layer, runs);
        const uint8_t * keys = runs.empty() ? saved->data + attn_keys_offset(ctx, *kv, layer, p1 - p0) : rows.data();
        std::vector<float> greatest(q.size()/d, std::numeric_limits<float>::lowest()); // [row][head]
        attn_each_key(*kv, layer, keys, p1 - p0, [&](const std::vector<float> & key) {
            for (size_t i = 0; i < greatest.size(); ++i) {
                greatest[i] = std::max(greatest[i], attn_product(q.data() + i*d, key.data() + i%n_head/group*d, d));
            }
        });
        res.insert(res.end(), greatest.begin(), greatest.end());
    }
    return res;
}

int64_t llama_attn_capture_bounds_work(const llama_context * ctx, const std::vector<int32_t> & layers) {
    int64_t res = 0;
    for (const int32_t layer : layers) {
        res += llama_attn_capture_n_key(ctx, layer);
    }
    return res;
}

int64_t llama_attn_capture_products_work(const llama_context * ctx, llama_seq_id seq) {
    const auto * s = attn_find(ctx, seq);
    if (!s || s->queries.pos.empty()) {
        return 0;
    }
    int64_t res = llama_attn_capture_bounds_work(ctx, s->params.layers); // the keys are read
    for (const auto & rows : s->queries.layers) {
        res += (int64_t) rows.size();
    }
    return res;
}

//
// hooks
//

llama_attn_capture_scope::llama_attn_capture_scope(llama_context * ctx, llm_graph_result & res, llm_graph_result * & active)
    : ctx(ctx), res(res) {
    auto * state = attn_find(ctx);
    if (state && !state->seqs.empty() && state->sched != ctx->get_sched()) {
        // The context has replaced its compute buffers since, for example because another adapter was chosen.
        const auto room = state->room(ctx->get_cparams(), -1, {});
        state->sched = ctx->get_sched();
        state->reserved = { room };
        attn_state graph;
        if (!attn_reserve_graph(ctx, graph, &room)) {
            end_captures(ctx->get_sched());
            attn_reserve_graph(ctx, graph, nullptr);
        }
    }
    attn_current = attn_find(ctx);
    if (attn_current && !attn_input_of(res)) {
        active = nullptr;
    }
}

llama_attn_capture_scope::~llama_attn_capture_scope() {
    attn_current = nullptr;
}

bool llama_attn_capture_scope::end_captures(ggml_backend_sched_t sched) {
    auto * state = attn_find(ctx);
    if (!state || state->seqs.empty()) {
        return false;
    }
    LLAMA_LOG_WARN("%s: no memory for the attention of %zu sequences: capturing ends\n", __func__, state->seqs.size());
    state->seqs.clear();
    state->reserved.clear();
    attn_current = nullptr;
    res.reset();
    ggml_backend_sched_reset(sched);
    return true;
}

void llama_attn_capture_qk(const llm_graph_context & g, const llama_attn_inputs & inputs) {
    auto [q, k, kq_b, kq_mask, sinks, v_mla, kq_scale, il] = inputs;
    auto * input = attn_input(g);
    if (!input || !input->wants(il) || v_mla || !kq_mask) {
        return;
    }
    const auto &  want     = input->want;
    const int64_t d        = q->ne[0];
    const int64_t n_head   = q->ne[1];
    const int64_t n_stream = k->ne[3];
    const int64_t n_rows   = want.n_rows();
    if (n_stream != want.n_stream) {
        return; // not the attention of the cache that is captured
    }

    if (!want.all || want.queries) {
        q = ggml_reshape_2d(g.ctx0, ggml_is_contiguous(q) ? q : ggml_cont(g.ctx0, q), d*n_head, q->ne[2]);
        q = want.all ? ggml_cont(g.ctx0, q) : attn_select(g, *input, q);
    }
    if (want.queries) {
        ggml_set_output(q);
        ggml_build_forward_expand(g.gf, q);
        input->queries.push_back({ il, (int32_t) n_head, q });
    }
    if (want.all && !(g.cparams.flash_attn && kq_b == nullptr)) {
        return; // llama_attn_capture_softmax() captures it
    }
    if (kq_b) {
        return; // with a bias only upstream's own softmax, of all tokens, can be captured
    }
    if (!want.all) {
        kq_mask = attn_select(g, *input, ggml_reshape_2d(g.ctx0, kq_mask, kq_mask->ne[0], n_rows > 0 ? kq_mask->ne[1]*kq_mask->ne[3] : 0));
        kq_mask = ggml_reshape_4d(g.ctx0, kq_mask, kq_mask->ne[0], n_rows, 1, n_stream);
    }
    const size_t  row     = want.all && !want.queries ? q->nb[2] : d*n_head*ggml_element_size(q);
    const size_t  head    = want.all && !want.queries ? q->nb[1] : d*ggml_element_size(q);
    const int64_t n_group = n_head/k->ne[1]; // heads that share keys
    k = ggml_permute(g.ctx0, k, 0, 2, 1, 3);
    if (n_rows == 1) {
        // the heads of a group are rows of one product: the keys are read once
        q = ggml_view_4d(g.ctx0, q, d, n_group, n_head/n_group, n_stream, head, head*n_group, row, 0);
    } else {
        q = ggml_view_4d(g.ctx0, q, d, n_rows, n_head, n_stream, row, head, row*n_rows, 0);
    }
    ggml_tensor * kq = attn_pinned(g, ggml_mul_mat(g.ctx0, k, q));
    ggml_prec_set_acc(kq, GGML_PREC_F32);
    kq = ggml_reshape_4d(g.ctx0, kq, kq->ne[0], n_rows, n_head, n_stream);
    if (g.hparams.attn_soft_cap) {
        // in the order of flash attention: scale, then cap
        const float cap = g.hparams.f_attn_logit_softcapping;
        kq = ggml_scale(g.ctx0, ggml_tanh(g.ctx0, ggml_scale(g.ctx0, kq, kq_scale/cap)), cap);
        kq_scale = 1.0f;
    }
    kq = attn_pinned(g, ggml_soft_max_ext(g.ctx0, kq, kq_mask, kq_scale, g.hparams.f_max_alibi_bias));
    ggml_soft_max_add_sinks(kq, sinks);
    attn_output(g, *input, kq, il);
}

void llama_attn_capture_softmax(const llm_graph_context & g, ggml_tensor * kq, int il) {
    auto * input = attn_input(g);
    if (input && input->want.all && input->wants(il)) {
        attn_output(g, *input, kq, il);
    }
}

void llama_attn_capture_fetch(llama_context * ctx, const llm_graph_result & res, const llama_ubatch & ubatch) {
    auto * state = attn_find(ctx);
    auto * input = state ? attn_input_of(res) : nullptr;
    if (!input || input->outputs.empty()) {
        return;
    }
    ggml_backend_sched_synchronize(ctx->get_sched());
    const attn_values rows(input->outputs);
    const attn_values queries(input->queries);
    const auto & want = input->want;
    const auto * kv   = llama_kv_block_find(ctx);
    for (size_t index = 0; index < want.rows.size(); ++index) {
        const int32_t token = want.rows[index];
        for (int32_t k = 0; want.take[index] && k < ubatch.n_seq_id[token]; ++k) {
            const llama_seq_id id = ubatch.seq_id[token][k];
            const auto it = state->seqs.find(id);
            if (it == state->seqs.end()) {
                continue;
            }
            auto & seq = it->second;
            const attn_token captured { (int32_t) index, ubatch.pos[token] };
            attn_observe(seq, attn_by_position(seq, *input, rows.data, kv->get_cells(id), captured), captured.pos);
            if (want.queries && seq.prompt && seq.params.queries > 0) {
                attn_keep_queries(seq, *input, queries.data, captured);
            }
        }
    }
}

void llama_attn_capture_free(const llama_context * ctx) {
    if (attn_find(ctx)) {
        const std::lock_guard<std::mutex> lock(attn_states_mutex);
        attn_states.erase(ctx);
        attn_n_states--;
    }
}
