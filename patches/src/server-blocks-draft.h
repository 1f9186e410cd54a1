#pragma once

// Rows of the draft context of speculative decoding.
//
// A draft model only proposes tokens, which the model of the server verifies. So what its rows lack costs proposals that
// are refused, never a wrong token. Most proposals are accepted when it sees what the model sees: before a decode it loses
// the rows of text that was evicted and not loaded again. Rows that are loaded later are not computed again for the draft.
// So it never has more rows than the other context, and as many cells.
//
// Owns: nothing.
// Threads: the main loop only, between two decodes.

#include "llama-kv-block.h"

#include <cstdint>

struct common_params;

class server_blocks_draft {
public:
    // Returns why blocks do not work with this kind of speculative decoding, or nullptr. `ctx`: the draft context, or
    // nullptr where drafts are taken from the text.
    static const char * unsupported(const common_params & params, llama_context * ctx);

    // `n_max`: most tokens of a draft; 0: there are no drafts.
    void init(llama_context * target, llama_context * ctx, int32_t n_max, int n_shared_slots);

    // Returns whether requests are decoded with drafts.
    bool on() const { return n_max > 0; }

    // Returns how many cells the rows of all drafts may need beside those of the text.
    int32_t n_reserved() const { return ctx ? n_max*n_shared_slots : 0; }

    // Makes the draft context ready to decode tokens of a slot from position `next` on.
    void prepare(int id, llama_pos next) const;

    // Frees the rows of a slot that the other context does not have.
    void drop_evicted(int id) const;

    // Forgets all rows of a slot, because its text was replaced.
    void clear(int id) const;

private:
    llama_context * target = nullptr;
    llama_context * ctx    = nullptr;
    int32_t         n_max  = 0;
    int             n_shared_slots = 1; // slots that share the cells of each other
};
