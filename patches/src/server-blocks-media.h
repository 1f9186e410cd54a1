#pragma once

// Media in a text: images and sounds, whose rows come from a projector and not from tokens.
//
// Block calls see a text as a list of ids, one for each row. The ids of media are negative numbers that are derived from
// their content, so that hashes and comparisons of texts cover media, too. A block has all rows of an image or none.
// Threads: set_projector() is called while the model is loaded; the others may be called anywhere.

#include "llama-kv-block.h"
#include "server-common.h"

#include <cstdint>

struct common_params;

// Records the projector that the server has loaded. `keeps_copies`: copies of rows outlive this process.
void server_blocks_set_projector(const llama_context * ctx, const common_params & params, bool keeps_copies);

// Returns whether each row of an image has a position of its own. With M-RoPE it has not, and blocks of a text with media
// do not work.
bool server_blocks_media_supported();

// Returns the ids of a text: tokens, and for each row of media a number below LLAMA_TOKEN_NULL.
llama_tokens server_blocks_ids(const server_tokens & tokens);

// Returns the ranges of the media of a text, one for each.
llama_kv_ranges server_blocks_media(const server_tokens & tokens);

// Returns how many leading ids of a text and of a list are equal. It never ends inside media. The list is compared with the
// text behind its first `from` ids, which count as equal, except media that they would cut.
int32_t server_blocks_common_prefix(const server_tokens & tokens, const llama_tokens & ids, size_t from = 0);

// Returns `n`, or the start of the media that the first n tokens would cut.
int32_t server_blocks_before_media(const server_tokens & tokens, int32_t n);

// Returns the range that a position inside of would cut, or nullptr. The first position of a range cuts nothing.
const llama_kv_range * server_blocks_cut_by(const llama_kv_ranges & media, llama_pos pos);
