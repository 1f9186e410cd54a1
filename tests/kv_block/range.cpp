// Tests the C API of llama-kv-range without a server: rows of a position range leave the cache and return.
// usage: range MODEL; prints one line per check; exit status 1 after the first that fails

#include "decode.h"

#include "llama-kv-range.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void expect(bool fact, const char * what) {
    printf("%s: %s\n", fact ? "ok" : "NOT SO", what);
    if (!fact) {
        exit(1);
    }
}

using logits_t = std::vector<float>;
using bytes_t  = std::vector<uint8_t>;

// The kind of cache of a context.
struct cache_kind {
    const char *               name;
    llama_flash_attn_type      flash_attn;
    ggml_type                  type_k;
    uint32_t                   n_seq_max;
};

static llama_context * make_context(llama_model * model, const cache_kind & kind) {
    auto params = llama_context_default_params();
    params.n_ctx           = 256*kind.n_seq_max;
    params.n_seq_max       = kind.n_seq_max;
    params.n_threads       = params.n_threads_batch = 1;
    params.flash_attn_type = kind.flash_attn;
    params.type_k          = kind.type_k;
    llama_context * ctx = llama_init_from_model(model, params);
    expect(ctx, kind.name);
    return ctx;
}

static std::vector<llama_token> prompt(size_t n) {
    std::vector<llama_token> res(n);
    for (size_t i = 0; i < n; ++i) {
        res[i] = (llama_token) (100 + i*7 % 500);
    }
    return res;
}

// Returns the logits of the token after the prompt, whose row is removed.
static logits_t next_logits(llama_context * ctx, llama_pos p0) {
    expect(decode_tokens(ctx, { 7 }, p0), "a token is decoded");
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    const float * logits = llama_get_logits_ith(ctx, -1);
    const logits_t res(logits, logits + n_vocab);
    llama_memory_seq_rm(llama_get_memory(ctx), 0, p0, p0 + 1);
    return res;
}

static bytes_t get_range(llama_context * ctx, llama_pos p0, llama_pos p1) {
    bytes_t res(llama_state_seq_get_range(ctx, 0, p0, p1, nullptr, 0));
    expect(!res.empty(), "a range has a size");
    expect(llama_state_seq_get_range(ctx, 0, p0, p1, res.data(), res.size()) == res.size(), "a range is copied");
    return res;
}

static size_t set_range(llama_context * ctx, const bytes_t & bytes, llama_pos p0, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_SAME_CELLS) {
    return llama_state_seq_set_range(ctx, 0, bytes.data(), bytes.size(), p0, flags);
}

static float difference(const logits_t & a, const logits_t & b) {
    float res = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) {
        res = std::max(res, std::fabs(a[i] - b[i]));
    }
    return res;
}

static void test_round_trip(llama_model * model, const cache_kind & kind) {
    llama_context * ctx = make_context(model, kind);
    llama_memory_t  mem = llama_get_memory(ctx);
    expect(decode_tokens(ctx, prompt(100), 0), "a prompt is decoded");
    const logits_t baseline = next_logits(ctx, 100);

    const bytes_t bytes = get_range(ctx, 20, 60);
    expect(set_range(ctx, bytes, 20) == 0 && next_logits(ctx, 100) == baseline, "rows that are present are not replaced");
    llama_memory_seq_rm(mem, 0, 20, 60);
    const logits_t without = next_logits(ctx, 100);
    expect(without != baseline, "removed rows have no influence");

    const bytes_t before = get_range(ctx, 5, 20);
    llama_memory_seq_rm(mem, 0, 5, 20);
    expect(set_range(ctx, bytes, 20) == bytes.size(), "rows return to their cells although others before them are empty");
    expect(set_range(ctx, before, 5) == before.size(), "as do those before them");
    expect(next_logits(ctx, 100) == baseline, "and the next token has the same logits");
    expect(get_range(ctx, 20, 60) == bytes, "and a copy is equal byte for byte");

    llama_memory_seq_rm(mem, 0, 20, 60);
    expect(decode_tokens(ctx, prompt(10), 100), "other rows take some of the cells");
    llama_memory_seq_rm(mem, 0, 100, 105);
    expect(set_range(ctx, bytes, 20) == bytes.size(), "rows return to other cells, too");
    llama_memory_seq_rm(mem, 0, 105, 110);
    expect(difference(next_logits(ctx, 100), baseline) < 1e-2f, "and the logits differ by rounding only");

    llama_memory_seq_rm(mem, 0, 5, 60);
    expect(set_range(ctx, bytes, 20, LLAMA_STATE_SEQ_FLAGS_NONE) == bytes.size(), "rows return to any cells");
    expect(set_range(ctx, before, 5, LLAMA_STATE_SEQ_FLAGS_NONE) == before.size(), "as do those before them");
    expect(get_range(ctx, 20, 60) != bytes, "which are others");
    expect(difference(next_logits(ctx, 100), baseline) < 1e-2f, "and the logits differ by rounding only");
    llama_free(ctx);
}

static void test_refusals(llama_model * model, const cache_kind & kind) {
    llama_context * ctx = make_context(model, kind);
    llama_memory_t  mem = llama_get_memory(ctx);
    expect(decode_tokens(ctx, prompt(100), 0), "a prompt is decoded");
    bytes_t bytes = get_range(ctx, 20, 60);

    expect(llama_state_seq_get_range(ctx, 0, 90, 101, nullptr, 0) == 0, "a range with a missing row has no size");
    expect(llama_state_seq_get_range(ctx, 0, 60, 20, nullptr, 0) == 0, "nor has one that ends before it begins");
    expect(llama_state_seq_get_range(ctx, 0, -1, 20, nullptr, 0) == 0, "nor has one of negative positions");
    expect(llama_state_seq_get_range(ctx, 9, 20, 60, nullptr, 0) == 0, "nor has one of no sequence");
    expect(llama_state_seq_get_range(ctx, 0, 20, 60, bytes.data(), bytes.size() - 1) == 0, "a buffer that is too small is refused");
    bytes = get_range(ctx, 20, 60);

    llama_memory_seq_rm(mem, 0, 20, 60);
    const logits_t without = next_logits(ctx, 100);
    const auto unchanged = [&] {
        return next_logits(ctx, 100) == without && llama_state_seq_get_range(ctx, 0, 20, 21, nullptr, 0) == 0;
    };
    for (const size_t size : { bytes.size() - 1, bytes.size()/2, (size_t) 900, (size_t) 5, (size_t) 3, (size_t) 0 }) {
        expect(llama_state_seq_set_range(ctx, 0, bytes.data(), size, 20, LLAMA_STATE_SEQ_FLAGS_SAME_CELLS) == 0, "a copy that ends early is refused");
    }
    expect(unchanged(), "and nothing changes");
    expect(llama_state_seq_set_range(ctx, 9, bytes.data(), bytes.size(), 20, 0) == 0, "no sequence is refused");
    expect(set_range(ctx, bytes, -5) == 0, "a negative position is refused");
    bytes_t forged = bytes;
    std::fill(forged.begin(), forged.begin() + 4, 0xff);
    expect(set_range(ctx, forged, 20) == 0, "more rows than cells are refused");
    expect(unchanged(), "and nothing changes");

    cache_kind other = kind;
    other.type_k = kind.type_k == GGML_TYPE_F16 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    llama_context * second = make_context(model, other);
    expect(decode_tokens(second, prompt(100), 0), "a prompt is decoded");
    expect(set_range(ctx, get_range(second, 20, 60), 20) == 0, "rows of another type are refused");
    expect(unchanged(), "and nothing changes");
    llama_free(second);

    const int32_t n_free = (int32_t) llama_n_ctx_seq(ctx) - 60;
    expect(decode_tokens(ctx, prompt(n_free - 39), 100), "39 cells remain empty");
    expect(set_range(ctx, bytes, 20) == 0, "40 rows do not fit");
    llama_memory_seq_rm(mem, 0, 100, -1);
    expect(unchanged(), "and nothing changes");
    expect(set_range(ctx, bytes, 20) == bytes.size(), "then they fit");
    llama_free(ctx);
}

// Rows at other positions are equal to rows that were shifted there in the cache.
static void test_positions(llama_model * model, const cache_kind & kind) {
    llama_context * ctx = make_context(model, kind);
    llama_memory_t  mem = llama_get_memory(ctx);
    expect(llama_memory_can_shift(mem) && decode_tokens(ctx, prompt(100), 0), "a prompt is decoded");
    const bytes_t bytes = get_range(ctx, 80, 100);
    llama_memory_seq_add(mem, 0, 80, 100, 30);
    const logits_t shifted = next_logits(ctx, 130);
    llama_memory_seq_rm(mem, 0, 110, 130);
    expect(llama_state_seq_get_range(ctx, 0, 110, 130, nullptr, 0) == 0, "rows are removed");
    expect(set_range(ctx, bytes, 110) == bytes.size(), "rows return to other positions");
    expect(next_logits(ctx, 130) == shifted, "and the next token has the logits that a shift gives");
    llama_free(ctx);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    expect(model, "the model is loaded");
    const cache_kind kinds[] = {
        { "flash attention",             LLAMA_FLASH_ATTN_TYPE_ENABLED,  GGML_TYPE_F16,  1 },
        { "no flash attention",          LLAMA_FLASH_ATTN_TYPE_DISABLED, GGML_TYPE_F16,  1 },
        { "quantised keys",              LLAMA_FLASH_ATTN_TYPE_ENABLED,  GGML_TYPE_Q8_0, 1 },
        { "two sequences",               LLAMA_FLASH_ATTN_TYPE_DISABLED, GGML_TYPE_F16,  2 },
    };
    for (const auto & kind : kinds) {
        test_round_trip(model, kind);
        test_refusals(model, kind);
        test_positions(model, kind);
    }
    llama_model_free(model);
    return 0;
}
