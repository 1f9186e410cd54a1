#include "server-blocks-render.h"

#include "server-blocks-hash.h"
#include "server-blocks-media.h"

#include "base64.hpp"
#include "common.h"

#include <algorithm>
#include <cinttypes>
#include <limits>
#include <stdexcept>

namespace {

constexpr size_t MAX_EDGES      = 64; // of a request
constexpr size_t MAX_SENT_EDGES = 8;  // of a reply
constexpr size_t MAX_PIECE      = 64; // bytes of a token that are written to the text at once
constexpr size_t MAX_COMPARED   = 1 << 28; // characters that one text_search compares at most: a third of a second
constexpr size_t SKIPPED        = 32; // characters that a search skips in the time of one comparison

// Finds texts in the text of a prompt. A text that the template has changed is not in it, and the search reads the rest of
// the prompt in vain: with many such texts, or with texts of one repeated character, for hours. So after MAX_COMPARED
// characters nothing more is found.
class text_search {
public:
    explicit text_search(const std::string & text) : text(text) {}

    // Returns where `part` begins, at `from` or later; npos if it does not, or if too much has been compared.
    size_t find(const std::string & part, size_t from) {
        if (part.empty()) {
            return from;
        }
        while (n_left > 0 && from + part.size() <= text.size()) {
            const size_t at   = std::min(text.find(part.front(), from), text.size());
            const size_t most = std::min(part.size(), text.size() - at);
            const size_t n    = std::mismatch(part.begin(), part.begin() + most, text.begin() + at).first - part.begin();
            if (n == part.size()) {
                return at;
            }
            n_left -= std::min(n_left, 1 + n + (at - from) / SKIPPED);
            from    = at + 1;
        }
        return std::string::npos;
    }

private:
    const std::string & text;
    size_t n_left = MAX_COMPARED;
};

// Returns the texts that a template may print for a message, in the order in which it prints them.
std::vector<std::string> message_texts(const json & message) {
    std::vector<std::string> res;
    const auto add = [&](const json & value) {
        if (value.is_string()) {
            res.push_back(string_strip(value.get<std::string>()));
        }
    };
    if (message.contains("content") && message.at("content").is_array()) {
        for (const auto & part : message.at("content")) {
            if (part.is_object() && part.contains("text")) {
                add(part.at("text"));
            }
        }
    } else if (message.contains("content")) {
        add(message.at("content"));
    }
    if (message.contains("tool_calls") && message.at("tool_calls").is_array()) {
        for (const auto & call : message.at("tool_calls")) {
            if (call.is_object() && call.contains("function") && call.at("function").contains("name")) {
                add(call.at("function").at("name"));
            }
        }
    }
    res.erase(std::remove(res.begin(), res.end(), std::string()), res.end());
    return res;
}

std::string role_of(const json & message) {
    const std::string role = json_value(message, "role", std::string("user"));
    return role == "developer" ? "system" : role == "function" ? "tool" : role;
}

std::string base64_of(const std::vector<uint8_t> & bytes) {
    std::string res(base64::required_encode_size(bytes.size()), '=');
    base64::encode(bytes.begin(), bytes.end(), res.begin());
    return res;
}

// Returns whether the character before `end` ends a sentence in a script without white space.
bool ends_full_width(const std::string & text, size_t end) {
    for (const std::string mark : { "\u3002", "\uff01", "\uff1f" }) {
        if (end >= mark.size() && text.compare(end - mark.size(), mark.size(), mark) == 0) {
            return true;
        }
    }
    return false;
}

} // namespace

server_blocks_render::server_blocks_render(const llama_vocab * vocab, llama_tokens tokens, llama_kv_ranges media)
    : vocab(vocab), tokens(std::move(tokens)), media(std::move(media)), n_generation((int32_t) this->tokens.size()) {
    starts.reserve(this->tokens.size());
    text.resize(8*this->tokens.size() + MAX_PIECE);
    size_t size = 0;
    const auto append = [&](const std::string & piece) {
        text.resize(size);
        text += piece;
        size = text.size();
    };
    auto next = this->media.begin();
    for (size_t i = 0; i < this->tokens.size(); ++i) {
        const auto token = this->tokens[i];
        starts.push_back(size);
        if (token < 0) {
            if (next != this->media.end() && next->first == (llama_pos) i) {
                append(get_media_marker());
                ++next;
            }
            continue;
        }
        if (text.size() < size + MAX_PIECE) {
            text.resize(2*size + MAX_PIECE);
        }
        // into the text at once: a string for each token takes several times as long
        const int32_t n = llama_token_to_piece(vocab, token, &text[size], MAX_PIECE, 0, true);
        if (n >= 0) {
            size += n;
        } else {
            append(common_token_to_piece(vocab, token, true));
        }
    }
    text.resize(size);
}

// Returns whether the text is that of the prompt, and sets `begin` to where the prompt begins in it. Around media the
// projector may have added tokens.
bool server_blocks_render::reproduces(const std::string & prompt, size_t & begin) const {
    if (media.empty()) {
        begin = text.size() - std::min(text.size(), prompt.size());
        return text.size() >= prompt.size() && text.compare(begin, prompt.size(), prompt) == 0;
    }
    const auto parts = string_split(prompt, std::string(get_media_marker()));
    text_search search(text);
    size_t at = begin = search.find(parts.front(), 0);
    for (const auto & part : parts) {
        at = at == std::string::npos ? at : search.find(part, at);
        if (at == std::string::npos) {
            return false;
        }
        at += part.size();
    }
    return true;
}

json server_blocks_render::media_json() const {
    json res = json::array();
    for (const auto & m : media) {
        res.push_back(json::array({ m.first, m.second }));
    }
    return res;
}

// Returns the token that contains the character at `pos`.
int32_t server_blocks_render::token_at(size_t pos) const {
    return (int32_t) (std::upper_bound(starts.begin(), starts.end(), pos) - starts.begin()) - 1;
}

// Returns the first token of a message whose text begins in token `at`: the control token that opens it, or `at`. Does not
// search before token `from`.
int32_t server_blocks_render::first_token_of(int32_t from, int32_t at) const {
    int32_t res = at;
    for (int32_t i = at - 1; i >= from; --i) {
        if (tokens[i] < 0) {
            continue;
        }
        if (llama_vocab_is_eog(vocab, tokens[i])) {
            break;
        }
        if (llama_vocab_is_control(vocab, tokens[i])) {
            res = i;
        }
    }
    return res;
}

// Returns the tokens that begin a sentence or a line, except the first of each range of characters.
std::vector<int32_t> server_blocks_render::sentence_starts_in(const char_ranges & ranges) const {
    std::vector<int32_t> res;
    size_t i = 0; // the token that contains the character at `pos`
    for (const auto & [first, last] : ranges) {
        bool ended = false; // a sentence or a line has ended since the last visible character
        bool mark  = false; // that character ends a sentence if white space follows
        for (size_t pos = first; pos < last; ++pos) {
            const char c = text[pos];
            while (i + 1 < starts.size() && starts[i + 1] <= pos) {
                ++i;
            }
            if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
                ended = ended || mark || c == '\n';
                continue;
            }
            // White space may precede the sentence in its token. A sentence that begins after other text of a token is left
            // out, because a block cannot begin there.
            if (ended && text.find_first_not_of(" \t\r\n", starts[i]) == pos) {
                res.push_back((int32_t) i);
            }
            mark  = c == '.' || c == '!' || c == '?' || c == ';';
            ended = (uint8_t) c >= 0x80 && ends_full_width(text, pos + 1);
        }
    }
    return res;
}

void server_blocks_render::locate_messages(const std::string & prompt, const json & messages, const std::string & generation_prompt) {
    size_t cursor = 0;
    if (!reproduces(prompt, cursor)) {
        sentence_starts = sentence_starts_in({ { 0, text.size() } });
        return;
    }
    size_t end = text.size();
    if (!generation_prompt.empty() && string_ends_with(text, generation_prompt)) {
        end -= generation_prompt.size();
        n_generation = (int32_t) (std::lower_bound(starts.begin(), starts.end(), end) - starts.begin());
    }

    std::vector<span> found; // p1 is set below
    char_ranges content;     // the texts of the messages, without what the template adds
    text_search search(text);
    int32_t from   = 0;
    for (size_t i = 0; i < messages.size(); ++i) {
        size_t first = std::string::npos;
        for (const auto & part : message_texts(messages.at(i))) {
            const size_t pos = search.find(part, cursor);
            if (pos == std::string::npos || pos + part.size() > end) {
                continue;
            }
            first  = std::min(first, pos);
            cursor = pos + part.size();
            if (part != get_media_marker()) {
                content.emplace_back(pos, cursor);
            }
        }
        if (first == std::string::npos) {
            continue;
        }
        const int32_t p0 = found.empty() ? 0 : first_token_of(from, token_at(first));
        found.push_back({ i, role_of(messages.at(i)), std::max(p0, from), 0 });
        from = token_at(cursor - 1) + 1;
        if (const auto * cut = server_blocks_cut_by(media, from)) { // the marker is the text of the first row
            from = cut->second;
        }
        from = std::min(from, n_generation);
    }
    for (size_t i = 0; i < found.size(); ++i) {
        found[i].p1 = i + 1 < found.size() ? found[i + 1].p0 : n_generation;
        if (found[i].p0 < found[i].p1) {
            spans.push_back(found[i]);
        }
    }
    if (content.empty()) {
        content.emplace_back(0, end);
    }
    sentence_starts = sentence_starts_in(content);
}

json server_blocks_render::expanded(json reply) const {
    json list = json::array();
    for (const auto & s : spans) {
        list.push_back(json { {"index", s.index}, {"role", s.role}, {"p0", s.p0}, {"p1", s.p1} });
    }
    reply["generation"] = n_generation;
    reply["tokens"]     = tokens;
    reply["spans"]      = std::move(list);
    reply["stops"]      = sentence_starts;
    reply["media"]      = media_json();
    return reply;
}

// Clients send these hashes back to later versions of the server: they must not change.
server_blocks_edges server_blocks_render::edges() const {
    server_blocks_edges res;
    uint64_t h  = 0x65646765ull;
    size_t   at = 0, next_start = 0;
    for (const auto & s : spans) {
        for (; at < (size_t) s.p1; ++at) {
            h = server_blocks_mix(h, (uint32_t) tokens[at]);
        }
        for (; next_start < sentence_starts.size() && sentence_starts[next_start] < s.p1; ++next_start) {
            h = server_blocks_mix(h, (uint32_t) sentence_starts[next_start]);
        }
        for (const char c : s.role) {
            h = server_blocks_mix(h, (uint8_t) c);
        }
        h = server_blocks_mix(h, s.index);
        h = server_blocks_mix(h, (uint32_t) s.p1);
        res.emplace_back(s.p1, string_format("%016" PRIx64, h));
    }
    return res;
}

server_blocks_edges server_blocks_render::parse_edges(const json & value) {
    server_blocks_edges res;
    if (!value.is_array() || value.size() > MAX_EDGES) {
        throw std::invalid_argument("\"known\" must be an array of at most 64 edges");
    }
    for (const auto & edge : value) {
        if (!edge.is_array() || edge.size() != 2 || !edge[0].is_number_integer() || !edge[1].is_string()) {
            throw std::invalid_argument("each of \"known\" must be [end, hash], as in the \"edges\" of an earlier reply");
        }
        const auto end = edge[0].get<int64_t>();
        if (end < 0 || end > std::numeric_limits<int32_t>::max()) {
            throw std::invalid_argument("each of \"known\" must be [end, hash], with an end of at least 0");
        }
        res.emplace_back((int32_t) end, edge[1].get<std::string>());
    }
    return res;
}

int32_t server_blocks_render::end_of(size_t n) const {
    return n > 0 && n <= spans.size() && spans[n - 1].index == n - 1 ? spans[n - 1].p1 : 0;
}

std::pair<int32_t, size_t> server_blocks_render::parse_behind(const json & request) {
    if (!request.contains("behind")) {
        return { 0, 0 };
    }
    const auto & value = request.at("behind");
    if (!value.is_array() || value.size() != 2 || !value[0].is_number_integer() || !value[1].is_number_integer()) {
        throw std::invalid_argument("\"behind\" must be [tokens, messages]");
    }
    const auto n_tokens = value[0].get<int64_t>(), n_messages = value[1].get<int64_t>();
    if (n_tokens < 1 || n_tokens > std::numeric_limits<int32_t>::max() || n_messages < 1) {
        throw std::invalid_argument("\"behind\" must be [tokens, messages], each at least 1");
    }
    return { (int32_t) n_tokens, (size_t) n_messages };
}

std::string server_blocks_render::compact(json reply, const server_blocks_edges & previous) const {
    const auto own = edges();
    int32_t from = 0;
    for (const auto & edge : previous) {
        const auto it = std::lower_bound(own.begin(), own.end(), edge, [](const auto & a, const auto & b) { return a.first < b.first; });
        if (it != own.end() && *it == edge) {
            from = std::max(from, edge.first);
        }
    }
    json last = json::array();
    for (size_t i = own.size() - std::min(own.size(), MAX_SENT_EDGES); i < own.size(); ++i) {
        last.push_back(json::array({ own[i].first, own[i].second }));
    }
    reply["generation"] = n_generation;
    reply["edges"]      = std::move(last);
    reply["from"]       = from;
    reply["media"]      = media_json();

    json columns { {"index", json::array()}, {"role", json::array()}, {"end", json::array()} };
    for (const auto & s : spans) {
        if (s.p1 > from) {
            columns["index"].push_back(s.index);
            columns["role"] .push_back(s.role);
            columns["end"]  .push_back(s.p1);
        }
    }
    reply["spans"] = std::move(columns);

    std::vector<uint8_t> bytes;
    bytes.reserve(4*(tokens.size() - from));
    for (size_t i = from; i < tokens.size(); ++i) {
        for (int shift = 0; shift < 32; shift += 8) {
            bytes.push_back((uint8_t) ((uint32_t) tokens[i] >> shift));
        }
    }
    std::vector<uint8_t> bits((tokens.size() - from + 7)/8);
    for (auto it = std::lower_bound(sentence_starts.begin(), sentence_starts.end(), from); it != sentence_starts.end(); ++it) {
        bits[(*it - from)/8] |= (uint8_t) (1u << (*it - from)%8);
    }

    // appended as text: the JSON writer would check each of its characters for escapes
    std::string res = safe_json_to_str(reply);
    res.insert(res.size() - 1, ",\"tokens_b64\":\"" + base64_of(bytes) + "\",\"stops_b64\":\"" + base64_of(bits) + "\"");
    return res;
}

void server_blocks_copy_fields(const json & from, json & to) {
    for (const auto * key : { "id_slot", "cache_prompt", "evoke" }) {
        if (from.contains(key)) {
            to[key] = from.at(key);
        }
    }
}
