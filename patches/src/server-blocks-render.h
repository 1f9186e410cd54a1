#pragma once

// A rendered prompt: where the messages of a chat are in the tokens that the server would decode.
//
// Owns: the tokens, their text, and what locate_messages() found in it.
// Threads: any; one object belongs to one thread.
// Invariants: message spans are ascending and disjoint and end before the generation prompt. Where the tokenizer does not
//             reproduce the prompt there are no spans instead of wrong ones.

#include "llama-kv-block.h"
#include "server-common.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// Ends of messages in tokens, each with a hash of everything that a compact reply contains up to there.
using server_blocks_edges = std::vector<std::pair<int32_t, std::string>>;

class server_blocks_render {
public:
    // `tokens`: the ids of the prompt, see server-blocks-media.h. `media`: the ranges of images and sounds among them.
    server_blocks_render(const llama_vocab * vocab, llama_tokens tokens, llama_kv_ranges media = {});

    // Finds the spans of `messages` and of `generation_prompt` in the tokens of `prompt`, and the tokens that begin a
    // sentence or a line in the messages. In both, get_media_marker() stands for each image or sound.
    void locate_messages(const std::string & prompt, const json & messages, const std::string & generation_prompt);

    // Returns `reply` with the fields generation, tokens, spans, stops and media.
    json expanded(json reply) const;

    // Returns `reply` as text, with the spans as columns, the tokens as base64 of little-endian int32, and the sentence
    // starts as base64 of one bit per token, the lowest bit first. Leaves out everything up to the last edge that this
    // prompt and `previous` have in common.
    std::string compact(json reply, const server_blocks_edges & previous) const;

    // Returns the first token of message `n`; 0 when not each message before it was located.
    int32_t end_of(size_t n) const;

    // Returns the member "behind" of a request: a number of tokens, and one of messages. Both are 0 when there is none.
    // Throws std::invalid_argument when it is not like that.
    static std::pair<int32_t, size_t> parse_behind(const json & request);

    // Returns the edges of a request, [[end, hash], ...]. Throws std::invalid_argument when the value is not like that.
    static server_blocks_edges parse_edges(const json & value);

private:
    struct span {
        size_t      index; // of the message
        std::string role;
        int32_t     p0;
        int32_t     p1;
    };

    using char_ranges = std::vector<std::pair<size_t, size_t>>;

    bool    reproduces(const std::string & prompt, size_t & first) const;
    json    media_json() const;
    int32_t token_at(size_t pos) const;
    int32_t first_token_of(int32_t from, int32_t at) const;
    std::vector<int32_t> sentence_starts_in(const char_ranges & ranges) const;
    server_blocks_edges edges() const;

    const llama_vocab *  vocab;
    llama_tokens         tokens;
    llama_kv_ranges      media;
    std::string          text;   // of all tokens
    std::vector<size_t>  starts; // first character of each token
    int32_t              n_generation; // first token of the generation prompt
    std::vector<span>    spans;
    std::vector<int32_t> sentence_starts; // tokens, ascending
};

// Copies the fields of a request that a converter of another dialect drops.
void server_blocks_copy_fields(const json & from, json & to);
