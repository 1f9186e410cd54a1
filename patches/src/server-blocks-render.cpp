// rendering: where the messages of a chat lie in the tokens the server would decode

#include "server-blocks.h"

#include "base64.hpp"
#include "common.h"

#include <algorithm>
#include <cinttypes>
#include <limits>
#include <stdexcept>

namespace {

// text a template may print for a message, in the order it would
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

// the message's first token: the control token that opens it, or else the token its text begins in
int32_t first_token(const llama_vocab * vocab, const llama_tokens & tokens, int32_t from, int32_t at) {
    int32_t res = at;
    for (int32_t i = at - 1; i >= from; --i) {
        if (llama_vocab_is_eog(vocab, tokens[i])) {
            break;
        }
        if (llama_vocab_is_control(vocab, tokens[i])) {
            res = i;
        }
    }
    return res;
}

std::string base64_of(const std::vector<uint8_t> & bytes) {
    std::string res(base64::required_encode_size(bytes.size()), '=');
    base64::encode(bytes.begin(), bytes.end(), res.begin());
    return res;
}

constexpr size_t EDGES_MAX = 64, EDGES_TOLD = 8;

server_blocks_edges edges_in(const llama_tokens & tokens, const json & spans, const std::vector<int32_t> & stops) {
    server_blocks_edges res;
    uint64_t h  = 0x65646765ull;
    size_t   at = 0, stop = 0;
    for (const auto & span : spans) {
        const auto end = span.at("p1").get<int32_t>();
        for (; at < (size_t) end; ++at) {
            h = server_blocks::mix(h, (uint32_t) tokens[at]);
        }
        for (; stop < stops.size() && stops[stop] < end; ++stop) {
            h = server_blocks::mix(h, (uint32_t) stops[stop]);
        }
        for (const char c : span.at("role").get<std::string>()) {
            h = server_blocks::mix(h, (uint8_t) c);
        }
        h = server_blocks::mix(h, span.at("index").get<uint64_t>());
        h = server_blocks::mix(h, (uint32_t) end);
        res.emplace_back(end, string_format("%016" PRIx64, h));
    }
    return res;
}

// whether a character of a script without white space has just ended a sentence
bool ends_full_width(const std::string & text, size_t end) {
    for (const std::string mark : { "\u3002", "\uff01", "\uff1f" }) {
        if (end >= mark.size() && text.compare(end - mark.size(), mark.size(), mark) == 0) {
            return true;
        }
    }
    return false;
}

} // namespace

server_blocks_text::server_blocks_text(const llama_vocab * vocab, const llama_tokens & tokens) {
    start.reserve(tokens.size());
    for (const auto token : tokens) {
        start.push_back(text.size());
        text += common_token_to_piece(vocab, token, true);
    }
}

std::vector<int32_t> server_blocks_text::stops(const std::vector<std::pair<size_t, size_t>> & within) const {
    std::vector<int32_t> res;
    size_t i = 0; // the token that holds a character
    for (const auto & [first, last] : within) {
        bool ended = false; // since the last visible character a sentence or a line has ended
        bool mark  = false; // that character ends a sentence, if white space follows
        for (size_t pos = first; pos < last; ++pos) {
            const char c = text[pos];
            while (i + 1 < start.size() && start[i + 1] <= pos) {
                ++i;
            }
            if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
                ended = ended || mark || c == '\n';
                continue;
            }
            // white space before it in its token goes with it; one that begins later in a token cannot be cut there
            if (ended && text.find_first_not_of(" \t\r\n", start[i]) == pos) {
                res.push_back((int32_t) i);
            }
            mark  = c == '.' || c == '!' || c == '?' || c == ';';
            ended = (uint8_t) c >= 0x80 && ends_full_width(text, pos + 1);
        }
    }
    return res;
}

json server_blocks_spans(const llama_vocab * vocab, const llama_tokens & tokens, const server_blocks_text & rendered,
                         const std::string & prompt, const json & messages, const std::string & generation_prompt,
                         int32_t & n_generation, std::vector<int32_t> & stops) {
    json spans = json::array();
    n_generation = (int32_t) tokens.size();

    const auto & text  = rendered.text;
    const auto & start = rendered.start;
    if (text.size() < prompt.size() || text.compare(text.size() - prompt.size(), prompt.size(), prompt) != 0) {
        stops = rendered.stops({ { 0, text.size() } });
        return spans; // a tokenizer that does not give the text back: no spans rather than wrong ones
    }
    const auto token_at = [&](size_t pos) { // the token that holds this character
        return (int32_t) (std::upper_bound(start.begin(), start.end(), pos) - start.begin()) - 1;
    };

    size_t end = text.size();
    if (!generation_prompt.empty() && string_ends_with(text, generation_prompt)) {
        end -= generation_prompt.size();
        n_generation = (int32_t) (std::lower_bound(start.begin(), start.end(), end) - start.begin());
    }

    struct located { size_t index; std::string role; int32_t p0; };
    std::vector<located> found;
    std::vector<std::pair<size_t, size_t>> said;
    size_t  cursor = text.size() - prompt.size();
    int32_t from   = 0;
    for (size_t i = 0; i < messages.size(); ++i) {
        size_t first = std::string::npos;
        for (const auto & part : message_texts(messages.at(i))) {
            const size_t pos = text.find(part, cursor);
            if (pos == std::string::npos || pos + part.size() > end) {
                continue;
            }
            first  = std::min(first, pos);
            cursor = pos + part.size();
            said.emplace_back(pos, cursor);
        }
        if (first == std::string::npos) {
            continue;
        }
        const int32_t p0 = found.empty() ? 0 : first_token(vocab, tokens, from, token_at(first));
        found.push_back({ i, role_of(messages.at(i)), std::max(p0, from) });
        from = std::min(token_at(cursor - 1) + 1, n_generation);
    }
    for (size_t i = 0; i < found.size(); ++i) {
        const int32_t p1 = i + 1 < found.size() ? found[i + 1].p0 : n_generation;
        if (found[i].p0 < p1) {
            spans.push_back(json { {"index", found[i].index}, {"role", found[i].role}, {"p0", found[i].p0}, {"p1", p1} });
        }
    }
    if (said.empty()) {
        said.emplace_back(0, end);
    }
    stops = rendered.stops(said); // not those of what the template puts around the messages
    return spans;
}

server_blocks_edges server_blocks_edges_of(const json & value) {
    server_blocks_edges res;
    if (!value.is_array() || value.size() > EDGES_MAX) {
        throw std::invalid_argument("\"known\" must be an array of at most 64 edges");
    }
    for (const auto & edge : value) {
        if (!edge.is_array() || edge.size() != 2 || !edge[0].is_number_integer() || !edge[1].is_string()) {
            throw std::invalid_argument("each of \"known\" must be [end, hash], as a reply has it in \"edges\"");
        }
        const auto end = edge[0].get<int64_t>();
        if (end < 0 || end > std::numeric_limits<int32_t>::max()) {
            throw std::invalid_argument("each of \"known\" must be [end, hash], with an end of at least 0");
        }
        res.emplace_back((int32_t) end, edge[1].get<std::string>());
    }
    return res;
}

std::string server_blocks_compact(json reply, const llama_tokens & tokens, const json & spans,
                                  const std::vector<int32_t> & stops, const server_blocks_edges & known) {
    const auto edges = edges_in(tokens, spans, stops);
    int32_t from = 0;
    for (const auto & edge : known) {
        const auto it = std::lower_bound(edges.begin(), edges.end(), edge, [](const auto & a, const auto & b) { return a.first < b.first; });
        if (it != edges.end() && *it == edge) {
            from = std::max(from, edge.first);
        }
    }
    json last = json::array();
    for (size_t i = edges.size() - std::min(edges.size(), EDGES_TOLD); i < edges.size(); ++i) {
        last.push_back(json::array({ edges[i].first, edges[i].second }));
    }
    reply["edges"] = std::move(last);
    reply["from"]  = from;

    json columns { {"index", json::array()}, {"role", json::array()}, {"end", json::array()} };
    for (const auto & span : spans) {
        if (span.at("p1").get<int32_t>() <= from) {
            continue;
        }
        columns["index"].push_back(span.at("index"));
        columns["role"] .push_back(span.at("role"));
        columns["end"]  .push_back(span.at("p1"));
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
    for (auto it = std::lower_bound(stops.begin(), stops.end(), from); it != stops.end(); ++it) {
        bits[(*it - from)/8] |= (uint8_t) (1u << (*it - from)%8);
    }

    // put in as text: the JSON writer would look at every character of it for what needs an escape
    std::string res = safe_json_to_str(reply);
    res.insert(res.size() - 1, ",\"tokens_b64\":\"" + base64_of(bytes) + "\",\"stops_b64\":\"" + base64_of(bits) + "\"");
    return res;
}

void server_blocks_carry(const json & from, json & to) {
    for (const auto * key : { "id_slot", "cache_prompt", "evoke" }) {
        if (from.contains(key)) {
            to[key] = from.at(key);
        }
    }
}
