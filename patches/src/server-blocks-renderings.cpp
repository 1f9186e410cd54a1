#include "server-blocks-renderings.h"

#include "ggml.h"

#include <algorithm>
#include <random>
#include <utility>

namespace {

constexpr size_t  MAX_BYTES  = size_t(64) << 20;
constexpr size_t  MAX_COUNT  = 256;
constexpr int64_t MAX_AGE_MS = 120*1000;
constexpr size_t  MAX_MARKER = 512; // bytes before the end of the name of a rendering
constexpr const char * SPACE = " \t\r\n";

std::string random_id() {
    std::random_device device;
    std::string digits;
    for (int i = 0; i < 32; ++i) {
        digits += "0123456789abcdef"[device() % 16];
    }
    return digits;
}

// Returns about how many bytes of memory a value takes.
size_t bytes_of(const json & value) {
    size_t n = sizeof(json) + 16;
    if (value.is_string()) {
        return n + value.get<std::string>().size();
    }
    if (value.is_object()) {
        for (const auto & item : value.items()) {
            n += item.key().size() + 48 + bytes_of(item.value());
        }
    } else if (value.is_array()) {
        for (const auto & item : value) {
            n += item.is_number() ? sizeof(json) + 16 : bytes_of(item); // tokens are many
        }
    }
    return n;
}

// The parser in a session has the schemas of the tools and of the reply as trees, which take about so many times the bytes of
// their text.
constexpr size_t BYTES_OF_SCHEMA = 16;

// Returns how many bytes of a request may be schemas: all but its messages. The members with schemas are not looked up by
// their names, because they differ between dialects and a client may write them with escapes.
size_t schema_bytes(const std::string & body) {
    size_t n = body.size();
    for (const char * key : { "messages", "input", "system", "instructions" }) {
        n -= server_blocks_member_text(body, key).size();
    }
    return n;
}

// Returns about how many bytes of memory a rendering takes.
size_t bytes_of(const server_blocks_rendering & rendering) {
    const size_t n       = rendering.body.size() + bytes_of(rendering.parsed);
    const size_t session = server_blocks_session_bytes(rendering.session);
    return session == 0 ? n : n + session + BYTES_OF_SCHEMA*schema_bytes(rendering.body);
}

std::string_view trimmed(std::string_view text) {
    const size_t first = text.find_first_not_of(SPACE);
    return first == std::string_view::npos ? std::string_view() : text.substr(first, text.find_last_not_of(SPACE) + 1 - first);
}

// A request whose first members are the marker.
struct request_with_marker {
    json             marker; // null: it has none
    std::string      id;     // of the rendering that the marker names
    std::string_view rest;   // the text after the marker
};

request_with_marker read_marker(std::string_view request) {
    request_with_marker res;
    const auto text = trimmed(request);
    const size_t named = text.substr(0, MAX_MARKER).find("\"rendering\"");
    const size_t end   = named == std::string_view::npos ? named : text.find('}', named);
    const size_t comma = end   == std::string_view::npos ? end   : text.find_first_not_of(SPACE, end + 1);
    if (comma == std::string_view::npos || end > MAX_MARKER || text[comma] != ',') {
        return res;
    }
    json marker = json::parse_no_throw(std::string(text.substr(0, end + 1)) + "}");
    if (!marker.is_object() || !marker.contains("evoke") || !marker.at("evoke").is_object()) {
        return res;
    }
    for (const auto & item : marker.items()) {
        if (item.key() != "id_slot" && item.key() != "cache_prompt" && item.key() != "evoke") {
            return res;
        }
    }
    const auto & evoke = marker.at("evoke");
    if (evoke.contains("rendering") && evoke.at("rendering").is_string()) {
        res.id     = evoke.at("rendering").get<std::string>();
        res.rest   = text.substr(comma + 1);
        res.marker = std::move(marker);
    }
    return res;
}

// Returns the end of the JSON string that begins at `at`.
size_t string_end(std::string_view text, size_t at) {
    for (++at; at < text.size() && text[at] != '"'; ++at) {
        at += text[at] == '\\';
    }
    return std::min(text.size(), at + 1);
}

// Returns the end of the JSON value that begins at `at`.
size_t value_end(std::string_view text, size_t at) {
    int depth = 0;
    for (; at < text.size(); ++at) {
        const char c = text[at];
        if (c == '"') {
            at = string_end(text, at) - 1;
        } else if (c == '{' || c == '[') {
            ++depth;
        } else if (c == '}' || c == ']') {
            if (depth == 0) {
                break;
            }
            --depth;
        } else if (c == ',' && depth == 0) {
            break;
        }
    }
    return at;
}

} // namespace

std::string_view server_blocks_member_text(std::string_view text, std::string_view key) {
    size_t at = text.find('{');
    std::string_view res; // of equal keys the last one counts
    while (at != std::string_view::npos && at + 1 < text.size() && text[at] != '}') {
        const size_t name = text.find('"', at + 1);
        if (name == std::string_view::npos) {
            break;
        }
        const size_t name_end = string_end(text, name);
        const size_t colon    = text.find(':', name_end);
        if (colon == std::string_view::npos) {
            break;
        }
        at = value_end(text, colon + 1);
        if (text.substr(name + 1, name_end - name - 2) == key) {
            res = trimmed(text.substr(colon + 1, at - colon - 1));
        }
    }
    return res;
}

std::string server_blocks_renderings::keep(server_blocks_rendering rendering) {
    entry kept { std::move(rendering), 0, ggml_time_ms(), 0 };
    kept.n_bytes = bytes_of(kept.rendering);
    if (kept.n_bytes > MAX_BYTES/4) {
        return "";
    }
    const std::string id = random_id();
    const std::lock_guard<std::mutex> lock(mutex);
    n_bytes += kept.n_bytes;
    tenant_bytes[kept.rendering.tenant] += kept.n_bytes;
    kept.number = ++n_kept;
    entries.emplace(id, std::move(kept));
    remove_old();
    make_room();
    return entries.count(id) ? id : "";
}

bool server_blocks_renderings::take(const std::string & request, const std::string & dialect, server_blocks_rendering & rendering) {
    auto parts = read_marker(request);
    if (parts.id.empty()) {
        return false;
    }
    server_blocks_rendering found;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        remove_old();
        const auto it = entries.find(parts.id);
        if (it == entries.end()) {
            return false;
        }
        found = std::move(it->second.rendering);
        it->second.rendering.tenant = found.tenant;
        remove(it);
    }
    const std::string_view body = found.body;
    if (found.dialect != dialect || body.empty() || body.substr(1) != parts.rest) {
        return false;
    }
    for (const char * key : { "id_slot", "cache_prompt", "evoke" }) {
        if (found.parsed.contains(key)) { // the body repeats a member of the marker
            return false;
        }
    }
    rendering = std::move(found);
    for (const auto & item : parts.marker.items()) {
        rendering.parsed[item.key()] = item.value();
    }
    rendering.parsed["evoke"]["reused"] = true;
    return true;
}

void server_blocks_renderings::clear() {
    const std::lock_guard<std::mutex> lock(mutex);
    entries.clear();
    tenant_bytes.clear();
    n_bytes = 0;
}

void server_blocks_renderings::remove(entry_map::iterator it) {
    n_bytes -= it->second.n_bytes;
    auto & of_tenant = tenant_bytes[it->second.rendering.tenant];
    of_tenant -= it->second.n_bytes;
    if (of_tenant == 0) {
        tenant_bytes.erase(it->second.rendering.tenant);
    }
    entries.erase(it);
}

void server_blocks_renderings::remove_old() {
    const int64_t before = ggml_time_ms() - MAX_AGE_MS;
    for (auto it = entries.begin(); it != entries.end(); ) {
        const auto next = std::next(it);
        if (it->second.kept_ms < before) {
            remove(it);
        }
        it = next;
    }
}

void server_blocks_renderings::make_room() {
    while (n_bytes > MAX_BYTES || entries.size() > MAX_COUNT) {
        const auto largest = std::max_element(tenant_bytes.begin(), tenant_bytes.end(), [](const auto & a, const auto & b) { return a.second < b.second; });
        auto oldest = entries.end();
        for (auto it = entries.begin(); it != entries.end(); ++it) {
            if (it->second.rendering.tenant == largest->first && (oldest == entries.end() || it->second.number < oldest->second.number)) {
                oldest = it;
            }
        }
        remove(oldest);
    }
}
