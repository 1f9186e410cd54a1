#include "server-blocks-json.h"

#include <stdexcept>

namespace {

// Limits of one body: the main loop executes a whole call before it decodes again. The thread of the call checks them.
constexpr size_t MAX_PROTECT = 4096;
constexpr size_t MAX_ORDER   = 16384;
constexpr size_t MAX_NAMES   = 16384; // of all ops together
constexpr size_t MAX_RANGES  = 16384;
constexpr size_t MAX_NAME    = 200;   // bytes
constexpr size_t MAX_TENANT  = 1024;  // bytes

void check_list(const json & body, const char * key, size_t limit) {
    if (body.contains(key) && body.at(key).is_array() && body.at(key).size() > limit) {
        throw std::invalid_argument(string_format("\"%s\" may have at most %zu entries, this has %zu", key, limit, body.at(key).size()));
    }
}

void check_text(const json & body, const char * key, size_t limit) {
    if (body.contains(key) && body.at(key).is_string() && body.at(key).get<std::string>().size() > limit) {
        throw std::invalid_argument(string_format("\"%s\" may have at most %zu bytes", key, limit));
    }
}

} // namespace

void server_blocks_check(const json & body) {
    check_text(body, "tenant",   MAX_TENANT);
    check_text(body, "ranges",   MAX_RANGES*24);
    check_text(body, "bounds",   MAX_RANGES*24);
    check_text(body, "products", MAX_RANGES*24);
    check_list(body, "ops",      SERVER_BLOCKS_MAX_OPS);
    check_list(body, "blocks",   MAX_ORDER);
    check_list(body, "ranges",   MAX_RANGES);
    check_list(body, "bounds",   MAX_RANGES);
    check_list(body, "products", MAX_RANGES);
    size_t n_names = 0;
    const auto check_op = [&](const json & op) {
        if (!op.is_object()) {
            return;
        }
        check_list(op, "protect", MAX_PROTECT);
        check_list(op, "order",   MAX_ORDER);
        for (const char * key : { "name", "save", "place", "mode", "op" }) {
            check_text(op, key, MAX_NAME);
        }
        n_names += op.contains("names") && op.at("names").is_array() ? op.at("names").size() : 0;
        if (n_names > MAX_NAMES) {
            throw std::invalid_argument(string_format("\"names\" may have at most %zu entries in one call", MAX_NAMES));
        }
    };
    check_op(body);
    if (body.contains("ops") && body.at("ops").is_array()) {
        for (const auto & op : body.at("ops")) {
            check_op(op);
        }
    }
}

std::string get_block_name(const json & value) {
    if (!value.is_string()) {
        fail_request("a block name must be a string");
    }
    const std::string name = value.get<std::string>();
    if (name.empty() || name.size() > MAX_NAME) {
        fail_request(string_format("a block name must have 1 to %zu bytes", MAX_NAME));
    }
    return name;
}

std::vector<std::string> get_block_names(const json & op) {
    std::vector<std::string> res;
    if (op.contains("name") && !op.contains("names")) {
        res.push_back(get_block_name(op.at("name")));
        return res;
    }
    if (!op.contains("names") || !op.at("names").is_array() || op.at("names").empty()) {
        fail_request("\"names\" must be a non-empty array of block names");
    }
    for (const auto & value : op.at("names")) {
        res.push_back(get_block_name(value));
    }
    return res;
}

std::string get_session(const json & body) {
    if (!body.contains("session")) {
        return "";
    }
    if (!body.at("session").is_string() || body.at("session").get<std::string>().size() > MAX_NAME) {
        fail_request(string_format("\"session\" must be a string of at most %zu bytes", MAX_NAME));
    }
    return body.at("session").get<std::string>();
}

json server_blocks_parse(const std::string & text) {
    static const size_t max_depth = 200;
    static const size_t max_keys  = 16384; // of one object: the parser compares each key with all before it
    std::vector<std::pair<char, size_t>> brackets; // open brackets, and the commas in each
    bool quoted = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (quoted) {
            i += c == '\\';
            quoted = c != '"';
        } else if (c == '"') {
            quoted = true;
        } else if (c == '[' || c == '{') {
            brackets.push_back({ c, 0 });
            if (brackets.size() > max_depth) {
                throw std::invalid_argument(string_format("the body is nested more than %zu levels deep", max_depth));
            }
        } else if ((c == ']' || c == '}') && !brackets.empty()) {
            brackets.pop_back();
        } else if (c == ',' && !brackets.empty() && brackets.back().first == '{' && ++brackets.back().second >= max_keys) {
            throw std::invalid_argument(string_format("an object of the body has more than %zu keys", max_keys));
        }
    }
    json body;
    try {
        body = json::parse(text);
    } catch (const std::exception & e) {
        throw std::invalid_argument(std::string("the body is not JSON: ") + e.what());
    }
    if (!body.is_object()) {
        throw std::invalid_argument("the body must be a JSON object");
    }
    return body;
}
