#pragma once

// Reads fields of the body of a block call. Every function throws server_blocks_error when a field is not as required.

#include "server-blocks-ranges.h"

#include "common.h"
#include "server-common.h"

#include <cinttypes>
#include <string>
#include <utility>
#include <vector>

// A call that cannot be executed; becomes the reply {"error": {...}}.
struct server_blocks_error {
    int         code; // HTTP status
    std::string type;
    std::string message;
    json        extra = json::object(); // further fields of the error object
};

[[noreturn]] inline void fail(int code, const std::string & type, const std::string & message, const json & extra = json::object()) {
    throw server_blocks_error { code, type, message, extra };
}

[[noreturn]] inline void fail_request(const std::string & message) {
    fail(400, "invalid_request_error", message);
}

// Returns an integer in [lo, hi]; `def` when the field is missing and there is a default.
inline int32_t get_int(const json & op, const char * key, int32_t lo, int32_t hi, const int32_t * def = nullptr) {
    if (!op.contains(key) && def) {
        return *def;
    }
    if (!op.contains(key) || !op.at(key).is_number_integer()) {
        fail_request(string_format("\"%s\" must be an integer", key));
    }
    const int64_t value = op.at(key).get<int64_t>(); // negative where the number only fits 64 bits without a sign
    if (value < lo || value > hi) {
        fail_request(string_format("\"%s\" must be between %d and %d", key, lo, hi));
    }
    return (int32_t) value;
}

// positions are below this
constexpr int32_t SERVER_BLOCKS_MAX_POS = 1 << 30;

// Returns [from, to] with 0 <= from <= to.
inline std::pair<llama_pos, llama_pos> get_range(const json & value, const char * key) {
    const bool pair = value.is_array() && value.size() == 2 && value.at(0).is_number_integer() && value.at(1).is_number_integer();
    const int64_t p0 = pair ? value.at(0).get<int64_t>() : -1;
    const int64_t p1 = pair ? value.at(1).get<int64_t>() : -1;
    if (p0 < 0 || p1 < p0 || p1 > SERVER_BLOCKS_MAX_POS) {
        fail_request(string_format("each of \"%s\" must be [from, to] with 0 <= from <= to <= %d", key, SERVER_BLOCKS_MAX_POS));
    }
    return { (llama_pos) p0, (llama_pos) p1 };
}

// Returns an array of the body, empty when it is missing. server_blocks_check() has limited its size.
inline const json & get_list(const json & op, const char * key) {
    static const json none = json::array();
    if (!op.contains(key)) {
        return none;
    }
    if (!op.at(key).is_array()) {
        fail_request(string_format("\"%s\" must be an array", key));
    }
    return op.at(key);
}

// most ops of one plan
constexpr size_t SERVER_BLOCKS_MAX_OPS = 4096;

// Returns the name of a block, 1 to 200 bytes.
std::string get_block_name(const json & value);

// Returns the block names of an op: "names", or "name" alone.
std::vector<std::string> get_block_names(const json & op);

// Returns the session a call is made for, "" when it names none. It decides which partial copies the call may load.
std::string get_session(const json & body);

inline std::string get_tenant(const json & body) {
    return json_value(body, "tenant", std::string());
}

inline json ranges_json(const llama_kv_ranges & ranges) {
    json res = json::array();
    for (const auto & r : ranges) {
        res.push_back(json::array({ r.first, r.second }));
    }
    return res;
}

inline std::string hex(uint64_t h) {
    return string_format("%016" PRIx64, h);
}

// Parses a request body to a JSON object. Throws std::invalid_argument when it is none, or nested so deeply or with so
// many keys that copying or parsing it would take the process down or too long.
json server_blocks_parse(const std::string & text);

// Throws std::invalid_argument when a block call has more items than the main loop may spend time on.
void server_blocks_check(const json & body);
