#pragma once

// Attention of the model: rows of the softmax of chosen layers, accumulated by position.
//
// Hooks in llama-graph.cpp add a second, small softmax(QK) beside flash attention, or take the one that exists without
// it, for each generated token and for the last `window` tokens of every batch of a prompt. A hook in
// llama_context::decode maps the rows from cells to positions before any cell can change its owner: everything is
// reported by position, whatever is evicted or loaded later.
//
// Owns: for each context the captured sequences, their parameters and what was accumulated (until
//       llama_attn_capture_free()).
// Threads: the thread that owns the context, between two decodes.
// Invariants: a context without captures builds the graphs that it would build without this file. Captures never make a
//             decode fail: without memory they end instead.
//
// Eviction by accumulated attention needs two calls: llama_attn_capture_set() once with mode SUM, and
// llama_attn_capture_mass() for each range. A position that is not resident gets no more attention and keeps its sum.

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct ggml_tensor;
struct llama_ubatch;
struct llm_graph_context;
class  llm_graph_result;

enum llama_attn_mode {
    LLAMA_ATTN_EWMA,   // s = decay*s + (1 - decay)*row
    LLAMA_ATTN_SUM,    // s = s + row
    LLAMA_ATTN_SNAPKV, // mean of the last `window` rows
};

struct llama_attn_params {
    std::vector<int32_t> layers;             // some of llama_attn_capture_layers(), ascending
    llama_attn_mode      mode     = LLAMA_ATTN_EWMA;
    float                decay    = 0.95f;   // EWMA; 0: the last row alone
    int32_t              window   = 32;      // captured tokens at the end of each batch of a prompt; rows of SNAPKV
    int32_t              queries  = 0;       // query rows that are kept of the end of the prompt
    bool                 per_head = false;

    bool operator==(const llama_attn_params & other) const {
        return layers == other.layers && mode == other.mode && decay == other.decay && window == other.window
            && queries == other.queries && per_head == other.per_head;
    }
};

struct llama_attn_mass {
    double  mass;  // accumulated by the mode, of all positions of the range together
    double  life;  // rows since each position was decoded, summed over the range (SUM / life: mean)
    int64_t n_obs; // rows captured so far
};

// the query rows of the last prompt tokens, as the attention of the cache gets them
struct llama_attn_queries {
    std::vector<llama_pos>          pos;    // ascending
    std::vector<std::vector<float>> layers; // of each captured layer: [row][head][channel]
    int32_t                         n_head  = 0;
    int32_t                         n_embd  = 0;
};

constexpr int32_t LLAMA_ATTN_MAX_LAYERS = 16; // captured in all sequences together
constexpr int32_t LLAMA_ATTN_MAX_WINDOW = 64;

// Returns nullptr if attention can be captured on this context, else a short reason for the user.
LLAMA_API const char * llama_attn_capture_unsupported(const llama_context * ctx);

// Returns the layers that can be captured: those of full attention whose rows block calls work on.
LLAMA_API std::vector<int32_t> llama_attn_capture_layers(const llama_context * ctx);

// Starts the capture of a sequence from nothing, or stops it (no layers). The parameters it has already change nothing.
// Returns false (nothing changed) where a layer cannot be captured or all sequences together have too many.
LLAMA_API bool llama_attn_capture_set(llama_context * ctx, llama_seq_id seq, const llama_attn_params & params);

// Returns the parameters of a sequence, or nullptr when it is not captured.
LLAMA_API const llama_attn_params * llama_attn_capture_get(const llama_context * ctx, llama_seq_id seq);

// Returns the bytes of host memory that a sequence of n_pos positions takes with these parameters.
LLAMA_API size_t llama_attn_capture_bytes(const llama_context * ctx, const llama_attn_params & params, int64_t n_pos);

// Returns the most bytes of device memory that the graphs of all captured sequences and of this one take.
LLAMA_API size_t llama_attn_capture_device_bytes(const llama_context * ctx, llama_seq_id seq, const llama_attn_params & params);

// Makes the compute buffers as large as the graphs with these parameters need at most, so that no decode allocates. A
// failure must occur here: that of a decode ends the requests of all sequences. Returns false (nothing changed) where
// there is no memory. Call it before llama_attn_capture_set().
LLAMA_API bool llama_attn_capture_reserve(llama_context * ctx, llama_seq_id seq, const llama_attn_params & params);

// Forgets the mass of positions from p0 on: their tokens were removed.
LLAMA_API void llama_attn_capture_forget(llama_context * ctx, llama_seq_id seq, llama_pos p0);

// Records that a prompt begins or ends: query rows are kept only while it is decoded.
LLAMA_API void llama_attn_capture_prompt(llama_context * ctx, llama_seq_id seq, bool begins);

// Returns the mass of positions [p0, p1), the mean of all layers and heads; with per_head `channel` >= 0 selects one head
// of one layer, counted layer by layer.
LLAMA_API llama_attn_mass llama_attn_capture_mass(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, int32_t channel = -1);

// The same for many ranges: prefix sums over positions. Takes as many steps as the channel has values (-1: as all
// channels have).
struct llama_attn_sums {
    std::vector<double> mass; // [k] = of the first k positions
    std::vector<double> life; // likewise
    int64_t             n_obs = 0;

    llama_attn_mass of(llama_pos p0, llama_pos p1) const {
        return { between(mass, p0, p1), between(life, p0, p1), n_obs };
    }

    static double between(const std::vector<double> & sums, llama_pos p0, llama_pos p1) {
        const auto at = [&](llama_pos p) { return sums.empty() ? 0.0 : sums[std::min<size_t>(std::max(0, p), sums.size() - 1)]; };
        return p1 > p0 ? at(p1) - at(p0) : 0.0;
    }
};
LLAMA_API llama_attn_sums llama_attn_capture_sums(const llama_context * ctx, llama_seq_id seq, int32_t channel = -1);

// Return how many values llama_attn_capture_bounds() and llama_attn_capture_products() process per position.
LLAMA_API int64_t llama_attn_capture_bounds_work  (const llama_context * ctx, const std::vector<int32_t> & layers);
LLAMA_API int64_t llama_attn_capture_products_work(const llama_context * ctx, llama_seq_id seq);

// Returns the heads of a layer. Channels of a layer come after those of the layers before it.
LLAMA_API int32_t llama_attn_capture_n_head(const llama_context * ctx, int32_t layer);

// Returns the kept query rows of a sequence, or nullptr when it is not captured.
LLAMA_API const llama_attn_queries * llama_attn_capture_queries(const llama_context * ctx, llama_seq_id seq);

// Returns the least and the greatest value of each channel of the keys of [p0, p1): of each layer the least, then the
// greatest. Empty when some of these rows are not resident.
LLAMA_API std::vector<float> llama_attn_capture_bounds(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                                       const std::vector<int32_t> & layers);

// Returns, of each layer, kept query row and head, the greatest product with a key of [p0, p1). Where some of these rows
// are not resident, reads `saved`, a copy of exactly these rows; empty when that is nullptr.
struct llama_kv_block;
LLAMA_API std::vector<float> llama_attn_capture_products(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                                         const llama_kv_block * saved);

// Returns the channels of the keys of a layer: KV heads times their size.
LLAMA_API int32_t llama_attn_capture_n_key(const llama_context * ctx, int32_t layer);

// ---- hooks

// Surrounds the construction and the execution of one graph. A graph that was built without captures is not reused.
struct llama_attn_capture_scope {
    llama_attn_capture_scope(llama_context * ctx, llm_graph_result & res, llm_graph_result * & active);
    ~llama_attn_capture_scope();
    llama_attn_capture_scope(const llama_attn_capture_scope &) = delete;

    // Returns a function like ggml_backend_sched_alloc_graph(), for a graph that `build` makes. Where there is no memory
    // for the graph, all captures end and the graph is built without them.
    template <typename Build> auto allocator(Build build) {
        return [this, build](ggml_backend_sched_t sched, ggml_cgraph * & graph) {
            if (ggml_backend_sched_alloc_graph(sched, graph)) {
                return true;
            }
            graph = end_captures(sched) ? build() : nullptr;
            return graph && ggml_backend_sched_alloc_graph(sched, graph);
        };
    }

private:
    bool end_captures(ggml_backend_sched_t sched);

    const llama_context * ctx;
    llm_graph_result    & res;
};

// What the attention of one layer is computed from, before q and k are permuted.
struct llama_attn_inputs {
    ggml_tensor * q;        // [d, head, token]
    ggml_tensor * k;        // [d, kv_head, cell, stream]
    ggml_tensor * kq_b;     // bias of each token and cell, or nullptr
    ggml_tensor * kq_mask;  // or nullptr
    ggml_tensor * sinks;    // or nullptr
    ggml_tensor * v_mla;    // not nullptr: multi-head latent attention, which is not captured
    float         kq_scale;
    int           il;       // number of the layer
};

// Adds the tensors that capture the attention of one layer to the graph, where the layer is captured.
void llama_attn_capture_qk(const llm_graph_context & g, const llama_attn_inputs & inputs);

// Captures the softmax that upstream computes without flash attention: [cell, token, head, stream].
void llama_attn_capture_softmax(const llm_graph_context & g, ggml_tensor * kq, int il);

// Accumulates the rows of a graph that was executed, by position.
void llama_attn_capture_fetch(llama_context * ctx, const llm_graph_result & res, const llama_ubatch & ubatch);

// Frees what is captured of a context. Called by its destructor.
void llama_attn_capture_free(const llama_context * ctx);
