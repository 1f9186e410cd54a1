#include "server-blocks-draft.h"

#include "server-blocks-ranges.h"

#include "common.h"
#include "llama-ext.h"

const char * server_blocks_draft::unsupported(const common_params & params, llama_context * ctx) {
    for (const auto type : params.speculative.types) {
        switch (type) {
            case COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3:
                return "speculative decoding with EAGLE-3 heads (--spec-type draft-eagle3)";
            case COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH:
            case COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK:
                return "speculative decoding with a model that reads hidden states (--spec-type draft-dflash, draft-dspark)";
            default:
                break;
        }
    }
    if (!ctx) {
        return nullptr;
    }
    if (llama_get_ctx_other(ctx)) {
        return "speculative decoding with a draft model that shares the cells of the model";
    }
    if (llama_kv_block_unsupported(ctx) || llama_kv_block_kind(ctx).recurrent) {
        return "speculative decoding with a draft model that has a recurrent state or another memory without rows";
    }
    return nullptr;
}

void server_blocks_draft::init(llama_context * target, llama_context * ctx, int32_t n_max, int n_shared_slots) {
    this->target = target;
    this->ctx    = ctx;
    this->n_max  = n_max;
    this->n_shared_slots = n_shared_slots;
}

void server_blocks_draft::prepare(int id, llama_pos next) const {
    if (!ctx) {
        return;
    }
    // A decode must continue after the last row. The draft has another last row where the text was replaced, or where the
    // slot continues after a row that the draft does not have.
    const llama_pos end = llama_memory_seq_pos_max(llama_get_memory(ctx), id) + 1;
    if (end > 0 && end != next) {
        clear(id);
    }
}

void server_blocks_draft::drop_evicted(int id) const {
    if (!ctx) {
        return;
    }
    for (const auto & r : server_ranges_without(llama_kv_block_resident(ctx, id), llama_kv_block_resident(target, id))) {
        llama_kv_block_evict(ctx, id, r.first, r.second);
    }
}

void server_blocks_draft::clear(int id) const {
    if (ctx) {
        llama_memory_seq_rm(llama_get_memory(ctx), id, -1, -1);
    }
}
