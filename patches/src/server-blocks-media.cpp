#include "server-blocks-media.h"

#include "server-blocks-file.h"
#include "server-blocks-hash.h"

#include "common.h"
#include "mtmd.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace {

std::atomic<uint64_t> projector { 0 };     // identifies it where copies outlive the process
std::atomic<bool>     supported { false };

// Appends the ids of all rows of one image or sound.
void append_ids(const mtmd_input_chunk * chunk, llama_tokens & out) {
    const char * id = mtmd_input_chunk_get_id(chunk); // a hash of the file
    uint64_t h = server_blocks_mix(0x6d65646961ull, projector);
    for (const char * c = id ? id : ""; *c; ++c) {
        h = server_blocks_mix(h, (uint8_t) *c);
    }
    const size_t n = mtmd_input_chunk_get_n_tokens(chunk);
    h = server_blocks_mix(h, n);
    for (size_t i = 0; i < n; ++i) {
        h = server_blocks_mix(h, i);
        out.push_back(LLAMA_TOKEN_NULL - 1 - (llama_token) (h & 0x3fffffff));
    }
}

// Calls text(i) for each text token and media(i, chunk) for each image or sound of a text, until one returns false.
template <typename Text, typename Media> void for_each_part(const server_tokens & tokens, Text text, Media media) {
    for (size_t i = 0; i < tokens.size(); ) {
        if (tokens[i] != LLAMA_TOKEN_NULL) {
            if (!text(i)) {
                return;
            }
            ++i;
            continue;
        }
        const auto & chunk = tokens.find_chunk(i);
        if (!media(i, chunk.get())) {
            return;
        }
        i += mtmd_input_chunk_get_n_tokens(chunk.get());
    }
}

} // namespace

void server_blocks_set_projector(const llama_context * ctx, const common_params & params, bool keeps_copies) {
    const auto rope = llama_model_rope_type(llama_get_model(ctx));
    supported = !params.mmproj.path.empty() && rope != LLAMA_ROPE_TYPE_MROPE && rope != LLAMA_ROPE_TYPE_IMROPE;
    projector = keeps_copies && supported ? server_blocks_projector_id(params) : 0;
}

bool server_blocks_media_supported() {
    return supported;
}

llama_tokens server_blocks_ids(const server_tokens & tokens) {
    if (!tokens.has_mtmd) {
        return tokens.get_tokens();
    }
    llama_tokens res;
    res.reserve(tokens.size());
    for_each_part(tokens,
        [&](size_t i) { res.push_back(tokens[i]); return true; },
        [&](size_t, const mtmd_input_chunk * chunk) { append_ids(chunk, res); return true; });
    return res;
}

llama_kv_ranges server_blocks_media(const server_tokens & tokens) {
    llama_kv_ranges res;
    if (!tokens.has_mtmd) {
        return res;
    }
    for_each_part(tokens,
        [](size_t) { return true; },
        [&](size_t i, const mtmd_input_chunk * chunk) {
            res.push_back({ (llama_pos) i, (llama_pos) (i + mtmd_input_chunk_get_n_tokens(chunk)) });
            return true;
        });
    return res;
}

int32_t server_blocks_common_prefix(const server_tokens & tokens, const llama_tokens & ids, size_t from) {
    size_t n = 0;
    llama_tokens media;
    for_each_part(tokens,
        [&](size_t i) {
            const bool same = i < from || (i - from < ids.size() && ids[i - from] == tokens[i]);
            n += same;
            return same;
        },
        [&](size_t i, const mtmd_input_chunk * chunk) {
            media.clear();
            append_ids(chunk, media);
            const bool same = i + media.size() <= from ||
                (i >= from && i - from + media.size() <= ids.size() && std::equal(media.begin(), media.end(), ids.begin() + (i - from)));
            n += same ? media.size() : 0;
            return same;
        });
    return (int32_t) n;
}

int32_t server_blocks_before_media(const server_tokens & tokens, int32_t n) {
    if (n <= 0 || n >= (int32_t) tokens.size() || tokens[n] != LLAMA_TOKEN_NULL) {
        return n;
    }
    const auto media = server_blocks_media(tokens);
    const auto * cut = server_blocks_cut_by(media, n);
    return cut ? cut->first : n;
}

const llama_kv_range * server_blocks_cut_by(const llama_kv_ranges & media, llama_pos pos) {
    const auto it = std::upper_bound(media.begin(), media.end(), pos, [](llama_pos p, const auto & r) { return p < r.second; });
    return it != media.end() && it->first < pos ? &*it : nullptr;
}
