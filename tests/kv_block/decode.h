#pragma once

// Decoding for the test programs that run a model without a server.

#include "llama.h"

#include <vector>

// Decodes tokens of sequence 0 from position p0 on, with logits of the last one. Returns whether it succeeded.
static inline bool decode_tokens(llama_context * ctx, const std::vector<llama_token> & tokens, llama_pos p0) {
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = p0 + (llama_pos) i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = i + 1 == tokens.size();
    }
    batch.n_tokens = (int32_t) tokens.size();
    const bool decoded = llama_decode(ctx, batch) == 0;
    llama_batch_free(batch);
    return decoded;
}
