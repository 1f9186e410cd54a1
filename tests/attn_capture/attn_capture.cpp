// Compares llama-attn-capture with the softmax that upstream computes: the tensors "kq_soft_max" that an eval callback
// gets without flash attention, and what is captured without it and with it.
// usage: attn_capture MODEL; prints one line per check; exit status 1 after the first that fails

#include "../kv_block/decode.h"

#include "llama-attn-capture.h"
#include "llama-kv-block.h"

#include "ggml-backend.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

using rows_t = std::vector<std::vector<float>>; // of each head of each layer: by cell, or by position

static void expect(bool fact, const char * what, double value) {
    printf("%s: %s: %g\n", fact ? "ok" : "NOT SO", what, value);
    if (!fact) {
        exit(1);
    }
}

// the row of the last token of the batch, of every layer
struct upstream {
    std::map<int, rows_t> layers;

    static bool callback(ggml_tensor * t, bool ask, void * data) {
        int layer = -1;
        if (sscanf(t->name, "kq_soft_max-%d", &layer) != 1) {
            return !ask;
        }
        if (!ask) {
            rows_t heads(t->ne[2], std::vector<float>(t->ne[0]));
            for (int64_t h = 0; h < t->ne[2]; ++h) {
                ggml_backend_tensor_get(t, heads[h].data(), h*t->nb[2] + (t->ne[1] - 1)*t->nb[1], t->ne[0]*sizeof(float));
            }
            static_cast<upstream *>(data)->layers[layer] = heads;
        }
        return true;
    }

    rows_t all() const {
        rows_t res;
        for (const auto & layer : layers) {
            res.insert(res.end(), layer.second.begin(), layer.second.end());
        }
        return res;
    }
};

static void decode(llama_context * ctx, const std::vector<llama_token> & tokens, llama_pos p0) {
    if (!decode_tokens(ctx, tokens, p0)) {
        expect(false, "a batch is decoded", (double) p0);
    }
}

static llama_context * context(llama_model * model, bool flash, upstream * seen) {
    auto params = llama_context_default_params();
    params.n_ctx           = 512;
    params.n_threads       = params.n_threads_batch = 1;
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.cb_eval           = seen ? upstream::callback : nullptr;
    params.cb_eval_user_data = seen;
    return llama_init_from_model(model, params);
}

// what was captured of the last token: the last row alone
static rows_t captured(const llama_context * ctx, int32_t n_channel, llama_pos n_pos) {
    rows_t res(n_channel, std::vector<float>(n_pos));
    for (int32_t c = 0; c < n_channel; ++c) {
        for (llama_pos p = 0; p < n_pos; ++p) {
            res[c][p] = (float) llama_attn_capture_mass(ctx, 0, p, p + 1, c).mass;
        }
    }
    return res;
}

// rows by cell -> by position
static rows_t placed(const rows_t & rows, const std::vector<uint32_t> & cells) {
    rows_t res;
    for (const auto & row : rows) {
        res.emplace_back();
        for (const uint32_t cell : cells) {
            res.back().push_back(cell < row.size() ? row[cell] : 0.0f);
        }
    }
    return res;
}

static double difference(const rows_t & a, const rows_t & b, size_t first, size_t last) {
    double res = a.size() == b.size() ? 0.0 : 1.0;
    for (size_t c = first; c < last && res < 1.0; ++c) {
        for (size_t p = 0; p < a[c].size(); ++p) {
            res = std::max(res, (double) std::fabs(a[c][p] - b[c][p]));
        }
    }
    return res;
}

static double off_one(const rows_t & rows) {
    double res = 0.0;
    for (const auto & row : rows) {
        double sum = 0.0;
        for (const float value : row) {
            sum += value;
        }
        res = std::max(res, std::fabs(sum - 1.0));
    }
    return res;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    upstream seen;
    llama_context * plain = context(model, false, &seen);
    llama_context * flash = context(model, true, nullptr);

    llama_attn_params params;
    params.layers   = llama_attn_capture_layers(plain);
    params.decay    = 0.0f;
    params.per_head = true;
    int32_t n_channel = 0;
    for (const int32_t layer : params.layers) {
        n_channel += llama_attn_capture_n_head(plain, layer);
    }
    const size_t n_first = llama_attn_capture_n_head(plain, params.layers[0]);

    std::vector<llama_token> prompt(100);
    for (size_t i = 0; i < prompt.size(); ++i) {
        prompt[i] = (llama_token) (100 + i*7 % 500);
    }
    std::vector<uint32_t> cells; // of each position
    for (uint32_t i = 0; i < 100; ++i) {
        cells.push_back(i);
    }
    for (llama_context * ctx : { plain, flash }) {
        expect(llama_attn_capture_set(ctx, 0, params), "all layers are captured", n_channel);
        decode(ctx, prompt, 0); // more tokens than the window: only the rows of the last ones are there
    }
    const auto compare = [&](const char * what) {
        printf("-- %s\n", what);
        const llama_pos n = (llama_pos) cells.size();
        const auto truth = placed(seen.all(), cells);
        const auto off   = captured(plain, n_channel, n);
        const auto on    = captured(flash, n_channel, n);
        expect(off_one(off) < 1e-5 && off_one(on) < 1e-5, "rows sum to 1", std::max(off_one(off), off_one(on)));
        expect(difference(off, truth, 0, n_channel) < 1e-6, "without flash attention they are upstream's softmax", difference(off, truth, 0, n_channel));
        expect(difference(on, truth, 0, n_first) < 3e-4, "with it too, in the first layer", difference(on, truth, 0, n_first));
        // deeper layers see what flash attention rounds differently
        expect(difference(on, truth, 0, n_channel) < 2e-2, "with it too, in all layers", difference(on, truth, 0, n_channel));
        expect(difference(truth, rows_t(truth.size(), std::vector<float>(n, 1.0f/n)), 0, n_channel) > 0.01, "they are not flat", 1.0/n);
    };
    compare("the end of a prompt");

    const auto generate = [&](int n) {
        for (int i = 0; i < n; ++i) {
            const llama_pos pos = (llama_pos) cells.size();
            for (llama_context * ctx : { plain, flash }) {
                decode(ctx, { (llama_token) (300 + 11*i) }, pos);
            }
            cells.push_back((uint32_t) pos);
        }
    };
    generate(5);
    compare("tokens one by one, of one graph");

    const size_t row = llama_kv_block_row_size(plain);
    std::vector<uint8_t> rows(40*row);
    for (llama_context * ctx : { plain, flash }) {
        llama_kv_block block;
        llama_kv_block_save(ctx, 0, { 20, 60 }, rows.data(), block);
        llama_kv_block_evict(ctx, 0, 20, 60);
        expect(llama_kv_block_n_rows(ctx, 0) == cells.size() - 40, "rows are evicted", 40);
    }
    const uint32_t none = 1u << 30; // a cell that no row of the softmax has
    for (uint32_t p = 20; p < 60; ++p) {
        cells[p] = none;
    }
    generate(3);
    for (size_t i = 0; i < 3; ++i) {
        cells[cells.size() - 3 + i] = 20 + (uint32_t) i; // the lowest cells that are free
    }
    compare("after rows in the middle have left, their cells in use again");
    llama_free(plain);
    llama_free(flash);
    llama_model_free(model);
    return 0;
}
