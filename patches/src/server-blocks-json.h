#pragma once

// reading the body of a block call: what is not as it should be ends the call with an error

#include "server-blocks.h"

#include "common.h"

#include <string>

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
    const int64_t value = op.at(key).get<int64_t>();
    if (value < lo || value > hi) {
        fail_request(string_format("\"%s\" must be between %d and %d", key, lo, hi));
    }
    return (int32_t) value;
}
