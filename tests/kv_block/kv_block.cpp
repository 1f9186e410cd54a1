// Tests llama-kv-block without a server: rows are equal after save, evict and load.
// usage: kv_block MODEL; prints one line per check; exit status 1 after the first that fails

#include "decode.h"

#include "llama-kv-block.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static void expect(bool fact, const char * what) {
    printf("%s: %s\n", fact ? "ok" : "NOT SO", what);
    if (!fact) {
        exit(1);
    }
}

static std::vector<float> decode(llama_context * ctx, const std::vector<llama_token> & tokens, llama_pos p0) {
    expect(decode_tokens(ctx, tokens, p0), "a batch is decoded");
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    const float * logits = llama_get_logits_ith(ctx, -1);
    return { logits, logits + n_vocab };
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    expect(model, "the model is loaded");
    auto params = llama_context_default_params();
    params.n_ctx     = 512;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * ctx = llama_init_from_model(model, params);
    expect(ctx && !llama_kv_block_unsupported(ctx), "its memory has rows");
    expect(std::string(llama_kv_block_kind(ctx).name) == "dense", "its memory is dense");

    std::vector<llama_token> prompt(100);
    for (size_t i = 0; i < prompt.size(); ++i) {
        prompt[i] = (llama_token) (100 + i*7 % 500);
    }
    decode(ctx, prompt, 0);
    const std::vector<float> baseline = decode(ctx, { 7 }, 100);
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 100, -1);

    const llama_kv_ranges all { { 0, 100 } }, holed { { 0, 20 }, { 60, 100 } };
    const size_t row = llama_kv_block_row_size(ctx);
    const uint32_t n_cells = llama_kv_block_n_cells(ctx, 0);
    expect(row > 0 && n_cells >= 512, "rows have a size and sequences have cells");
    expect(llama_kv_block_resident(ctx, 0) == all, "all rows are resident");

    std::vector<uint8_t> saved(40*row), reloaded(40*row);
    llama_kv_block block, other;
    expect(!llama_kv_block_save(ctx, 0, { 80, 120 }, saved.data(), block), "rows that are missing are not saved");
    expect(llama_kv_block_save(ctx, 0, { 20, 60 }, saved.data(), block) && block.n_rows() == 40, "rows are saved");
    expect(llama_kv_block_evict(ctx, 0, 20, 60) == 40, "rows are evicted");
    expect(llama_kv_block_resident(ctx, 0) == holed, "no other position moves");
    expect(llama_kv_block_n_free(ctx, 0) == n_cells - 60, "their cells are free");
    const std::vector<float> without = decode(ctx, { 7 }, 100);
    expect(without != baseline, "evicted rows have no influence");
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 100, -1);

    expect(llama_kv_block_load(ctx, 0, block, true) == 40, "rows are back in their cells");
    expect(llama_kv_block_resident(ctx, 0) == all, "at their positions");
    expect(decode(ctx, { 7 }, 100) == baseline, "and the next token has the same logits");
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 100, -1);
    expect(llama_kv_block_save(ctx, 0, { 20, 60 }, reloaded.data(), other) && saved == reloaded, "byte for byte");

    llama_kv_block_evict(ctx, 0, 20, 60);
    block.layout++;
    expect(llama_kv_block_load(ctx, 0, block, true) == -1, "rows of another cache are refused");
    expect(llama_kv_block_resident(ctx, 0) == holed, "and nothing changes");
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
