#pragma once

// reading the body of a block call: what is not as it should be ends the call with an error

#include "server-blocks.h"

#include "common.h"

#include <string>
#include <utility>

[[noreturn]] inline void fail(int code, const std::string & type, const std::string & message, const json & extra = json::object()) {
    throw server_blocks_error { code, type, message, extra };
}

[[noreturn]] inline void fail_request(const std::string & message) {
    fail(400, "invalid_request_error", message);
}

inline int32_t get_int(const json & op, const char * key, int32_t lo, int32_t hi, const int32_t * def = nullptr) {
    if (!op.contains(key) && def) {
        return *def;
    }
    if (!op.contains(key) || !op.at(key).is_number_integer()) {
        fail_request(string_format("\"%s\" must be an integer", key));
    }
    const int64_t value = op.at(key).get<int64_t>(); // negative where it only fits 64 bits without a sign
    if (value < lo || value > hi) {
        fail_request(string_format("\"%s\" must be between %d and %d", key, lo, hi));
    }
    return (int32_t) value;
}

// positions are below this
constexpr int32_t SERVER_BLOCKS_MAX_POS = 1 << 30;

// [from, to] with 0 <= from <= to
inline std::pair<llama_pos, llama_pos> get_range(const json & value, const char * key) {
    const bool pair = value.is_array() && value.size() == 2 && value.at(0).is_number_integer() && value.at(1).is_number_integer();
    const int64_t p0 = pair ? value.at(0).get<int64_t>() : -1;
    const int64_t p1 = pair ? value.at(1).get<int64_t>() : -1;
    if (p0 < 0 || p1 < p0 || p1 > SERVER_BLOCKS_MAX_POS) {
        fail_request(string_format("each of \"%s\" must be [from, to] with 0 <= from <= to <= %d", key, SERVER_BLOCKS_MAX_POS));
    }
    return { (llama_pos) p0, (llama_pos) p1 };
}

// an array of the body, or nothing where there is none; its size was checked by server_blocks_check()
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
