#pragma once

// What the model attends to: rows of the softmax of chosen layers, added up by position.
//
// Hooks in llama-graph.cpp put a second, small softmax(QK) beside flash attention, or take the one
// that is there without it, for the tokens that matter: each generated token, and the last `window`
// tokens of every piece of prompt. A hook in llama_context::decode maps the rows from cells to
// positions at once, before any cell can change its owner; so what is read is by position, whatever
// was evicted or loaded since.
//
// A context that nobody captures on builds the graphs it would have built without this file.
// All calls must come from the thread that owns the context, between two decodes.
//
// The server's own eviction by accumulated mass needs two calls: llama_attn_capture_set() once with
// mode SUM, and llama_attn_capture_mass() for each position range. Rows in cells that are not
// resident have mass 0 from then on and keep what they had.

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
    std::vector<int32_t> layers;             // of llama_attn_capture_layers(), ascending
    llama_attn_mode      mode     = LLAMA_ATTN_EWMA;
    float                decay    = 0.95f;   // EWMA; 0: the last row alone
    int32_t              window   = 32;      // tokens at the end of each piece of prompt; rows of SNAPKV
    int32_t              queries  = 0;       // query rows kept of the end of the prompt
    bool                 per_head = false;

    bool operator==(const llama_attn_params & other) const {
        return layers == other.layers && mode == other.mode && decay == other.decay && window == other.window
            && queries == other.queries && per_head == other.per_head;
    }
};

struct llama_attn_mass {
    double  mass;  // what the mode says, of all positions of the range together
    double  life;  // rows seen since the position was there, summed over the range (SUM / life: mean)
    int64_t n_obs; // rows seen at all
};

// the query rows of the last prompt tokens, as the attention of the cache sees them
struct llama_attn_queries {
    std::vector<llama_pos>          pos;    // ascending
    std::vector<std::vector<float>> layers; // of each layer captured: [row][head][channel]
    int32_t                         n_head  = 0;
    int32_t                         n_embd  = 0;
};

constexpr int32_t LLAMA_ATTN_MAX_LAYERS = 16; // of all sequences together
constexpr int32_t LLAMA_ATTN_MAX_WINDOW = 64;

// nullptr if attention can be captured on this context, else a short reason for a person
LLAMA_API const char * llama_attn_capture_unsupported(const llama_context * ctx);

// the layers that can be captured: those of full attention whose rows block calls work on
LLAMA_API std::vector<int32_t> llama_attn_capture_layers(const llama_context * ctx);

// begin with nothing for a sequence, or stop (no layers). The same parameters again change nothing.
// false (nothing changed) where a layer cannot be captured or all sequences together want too many
LLAMA_API bool llama_attn_capture_set(llama_context * ctx, llama_seq_id seq, const llama_attn_params & params);

// what was set, or nullptr
LLAMA_API const llama_attn_params * llama_attn_capture_get(const llama_context * ctx, llama_seq_id seq);

// bytes of host memory that a sequence of n_pos positions takes with these parameters
LLAMA_API size_t llama_attn_capture_bytes(const llama_context * ctx, const llama_attn_params & params, int64_t n_pos);

// bytes that the graphs of all sequences captured now and of this one take at most where the model is computed
LLAMA_API size_t llama_attn_capture_device_bytes(const llama_context * ctx, llama_seq_id seq, const llama_attn_params & params);

// Makes the compute buffers as large as the graphs need at most when these are set, so that no decode asks for more.
// A failure must be found here: that of a decode ends the requests of all sequences. False where there is no memory:
// nothing has changed then. Call it before llama_attn_capture_set(), whose own sequence keeps its present parameters.
LLAMA_API bool llama_attn_capture_reserve(llama_context * ctx, llama_seq_id seq, const llama_attn_params & params);

// positions from p0 on were taken back: their mass is forgotten
LLAMA_API void llama_attn_capture_forget(llama_context * ctx, llama_seq_id seq, llama_pos p0);

// query rows are kept only while a prompt is decoded
LLAMA_API void llama_attn_capture_prompt(llama_context * ctx, llama_seq_id seq, bool begins);

// mass of positions [p0, p1), mean of all layers and heads; `channel` 0.. is one head of one layer,
// layer by layer, where per_head was set
LLAMA_API llama_attn_mass llama_attn_capture_mass(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, int32_t channel = -1);

// The same for many ranges: what all positions before each position have together, from position 0 to the last one with
// a value. Takes as many steps as there are values of the channel (-1: of all channels).
struct llama_attn_sums {
    std::vector<double> mass;
    std::vector<double> life;
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

// values computed with for llama_attn_capture_bounds() and llama_attn_capture_products() of one position
LLAMA_API int64_t llama_attn_capture_bounds_work  (const llama_context * ctx, const std::vector<int32_t> & layers);
LLAMA_API int64_t llama_attn_capture_products_work(const llama_context * ctx, llama_seq_id seq);

// heads of a layer: channels of layer i come after those of the layers before it
LLAMA_API int32_t llama_attn_capture_n_head(const llama_context * ctx, int32_t layer);

LLAMA_API const llama_attn_queries * llama_attn_capture_queries(const llama_context * ctx, llama_seq_id seq);

// the least and the greatest value of each channel of the keys of [p0, p1), all of which must be resident:
// of each layer the least, then the greatest; empty otherwise
LLAMA_API std::vector<float> llama_attn_capture_bounds(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                                       const std::vector<int32_t> & layers);

// of each layer, kept query row and head: the greatest product with a key of [p0, p1), all of which must be resident
// or else in `saved`, a copy of exactly these rows (nullptr: there is none); empty otherwise
struct llama_kv_block;
LLAMA_API std::vector<float> llama_attn_capture_products(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                                         const llama_kv_block * saved);

// channels of the keys of a layer: heads that keys are kept of x their size
LLAMA_API int32_t llama_attn_capture_n_key(const llama_context * ctx, int32_t layer);

// ---- hooks

// around the building and running of one graph; a graph that was built without us is not reused
struct llama_attn_capture_scope {
    llama_attn_capture_scope(llama_context * ctx, llm_graph_result & res, llm_graph_result * & active);
    ~llama_attn_capture_scope();
    llama_attn_capture_scope(const llama_attn_capture_scope &) = delete;

    // ggml_backend_sched_alloc_graph() for a graph that `build` makes. Where there is no memory for it all capturing
    // ends and the graph is built without: the decode does not fail for what is only looked at.
    template <typename Build> auto allocator(Build build) {
        return [this, build](ggml_backend_sched_t sched, ggml_cgraph * & graph) {
            if (ggml_backend_sched_alloc_graph(sched, graph)) {
                return true;
            }
            graph = give_up(sched) ? build() : nullptr;
            return graph && ggml_backend_sched_alloc_graph(sched, graph);
        };
    }

private:
    bool give_up(ggml_backend_sched_t sched);

    const llama_context * ctx;
    llm_graph_result    & res;
};

// q [d, head, token], k [d, kv_head, cell, stream], before either is permuted
void llama_attn_capture_qk(const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_b, ggml_tensor * kq_mask,
                           ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);

// the softmax that upstream computes itself without flash attention: [cell, token, head, stream]
void llama_attn_capture_softmax(const llm_graph_context & g, ggml_tensor * kq, int il);

// after a graph was run: rows -> positions
void llama_attn_capture_fetch(llama_context * ctx, const llm_graph_result & res, const llama_ubatch & ubatch);

// the context is going
void llama_attn_capture_free(const llama_context * ctx);
