#include "server-blocks-capture.h"

#include "server-blocks-hash.h"
#include "server-blocks-json.h"

#include "base64.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <set>

namespace {

// Limits of memory: host memory for one slot, device memory for all slots together.
constexpr size_t MAX_CAPTURE_BYTES        = size_t(512)*1024*1024;
constexpr size_t MAX_CAPTURE_DEVICE_BYTES = size_t(1024)*1024*1024;

// How many times the ranges of one call may cover the slot's tokens.
constexpr int64_t OVERLAP = 16;

// How many values one call may compute: comparisons of keys, and products of keys with query rows.
constexpr int64_t MAX_WORK = int64_t(1) << 28;

// How many masses one reply may have, of all heads together.
constexpr int64_t MAX_MASSES = int64_t(1) << 18;

const char * mode_names[] = { "ewma", "sum", "snapkv" };

llama_attn_mode get_mode(const json & op) {
    const std::string name = op.contains("mode") && op.at("mode").is_string() ? op.at("mode").get<std::string>() : "";
    for (int i = 0; i < 3; ++i) {
        if (name == mode_names[i] || (i == 0 && !op.contains("mode"))) {
            return (llama_attn_mode) i;
        }
    }
    fail_request("\"mode\" must be ewma, sum or snapkv");
}

bool get_flag(const json & op, const char * key) {
    if (!op.contains(key)) {
        return false;
    }
    const json & value = op.at(key);
    if (value.is_string()) { // from a query string
        return value.get<std::string>() == "1" || value.get<std::string>() == "true";
    }
    if (!value.is_boolean()) {
        fail_request(string_format("\"%s\" must be true or false", key));
    }
    return value.get<bool>();
}

std::vector<int32_t> get_layers(const json & op, const std::vector<int32_t> & possible) {
    if (!op.contains("layers") || !op.at("layers").is_array()) {
        fail_request("\"layers\" must be an array of layer numbers; [] turns capturing off");
    }
    std::vector<int32_t> res;
    for (const auto & value : op.at("layers")) {
        const int64_t layer = value.is_number_integer() ? value.get<int64_t>() : -1;
        if (std::find(possible.begin(), possible.end(), layer) == possible.end()) {
            fail_request("\"layers\": " + value.dump() + " is not a layer that can be captured; /props lists those that can be");
        }
        res.push_back((int32_t) layer);
    }
    std::sort(res.begin(), res.end());
    res.erase(std::unique(res.begin(), res.end()), res.end());
    if ((int32_t) res.size() > LLAMA_ATTN_MAX_LAYERS) {
        fail_request(string_format("at most %d layers can be captured", LLAMA_ATTN_MAX_LAYERS));
    }
    return res;
}

llama_attn_params get_params(const json & op, const std::vector<int32_t> & possible) {
    llama_attn_params res;
    res.layers   = get_layers(op, possible);
    res.mode     = get_mode(op);
    res.window   = get_int(op, "window",  1, LLAMA_ATTN_MAX_WINDOW, &res.window);
    res.queries  = get_int(op, "queries", 0, LLAMA_ATTN_MAX_WINDOW, &res.queries);
    res.per_head = get_flag(op, "per_head");
    if (op.contains("decay")) {
        const double decay = op.at("decay").is_number() ? op.at("decay").get<double>() : -1.0;
        if (!(decay >= 0.0 && decay < 1.0)) {
            fail_request("\"decay\" must be a number from 0 to below 1");
        }
        res.decay = (float) decay;
    }
    return res;
}

json params_json(const llama_attn_params & params) {
    return json {
        {"layers", params.layers}, {"mode", mode_names[params.mode]}, {"decay", params.decay}, {"window", params.window},
        {"queries", params.queries}, {"per_head", params.per_head},
    };
}

// Returns the ranges of a field: "0-64,64-128" or [[0, 64], [64, 128]]; one range of all tokens when it is missing.
std::vector<std::pair<llama_pos, llama_pos>> get_ranges(const json & body, const char * key, llama_pos n_tokens) {
    std::vector<std::pair<llama_pos, llama_pos>> res;
    int64_t n_left = OVERLAP*std::max<int64_t>(n_tokens, OVERLAP); // positions that the ranges may still cover
    const auto add = [&](int64_t p0, int64_t p1) {
        if (p0 < 0 || p1 < p0 || p1 > std::numeric_limits<llama_pos>::max()) {
            fail_request(string_format("\"%s\" must be from-to with 0 <= from <= to", key));
        }
        n_left -= 1 + std::max<int64_t>(0, std::min<int64_t>(p1, n_tokens) - p0);
        if (n_left < 0) {
            fail_request(string_format("\"%s\" has too many ranges, or ranges that overlap too much: ask for fewer in one call", key));
        }
        res.push_back({ (llama_pos) p0, (llama_pos) p1 });
    };
    if (!body.contains(key)) {
        add(0, n_tokens);
        return res;
    }
    if (body.at(key).is_string()) {
        for (const auto & text : string_split<std::string>(body.at(key).get<std::string>(), ',')) {
            int n = 0;
            long long p0 = -1, p1 = -1;
            if (text.size() > 24 || sscanf(text.c_str(), "%lld-%lld%n", &p0, &p1, &n) != 2 || n != (int) text.size()) {
                fail_request(string_format("\"%s\" must look like 0-64,64-128", key));
            }
            add(p0, p1);
        }
        return res;
    }
    if (!body.at(key).is_array()) {
        fail_request(string_format("\"%s\" must be an array of [from, to]", key));
    }
    for (const auto & r : body.at(key)) {
        if (!r.is_array() || r.size() != 2 || !r.at(0).is_number_integer() || !r.at(1).is_number_integer()) {
            fail_request(string_format("\"%s\" must be an array of [from, to]", key));
        }
        add(r.at(0).get<int64_t>(), r.at(1).get<int64_t>());
    }
    return res;
}

void check_limit(const char * key, int64_t needed, int64_t allowed, const char * advice) {
    if (needed > allowed) {
        fail(400, "too_much_work", string_format("\"%s\" needs %" PRId64 " values, and one call may compute %" PRId64 ": %s",
            key, needed, allowed, advice), json { {"needed", needed}, {"allowed", allowed} });
    }
}

// Returns values as padded base64 of little-endian float32.
std::string encoded(const std::vector<float> & values) {
    std::vector<uint8_t> bytes;
    bytes.reserve(4*values.size());
    for (const float value : values) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        for (int shift = 0; shift < 32; shift += 8) {
            bytes.push_back((uint8_t) (bits >> shift));
        }
    }
    std::string res(base64::required_encode_size(bytes.size()), '=');
    base64::encode(bytes.begin(), bytes.end(), res.begin());
    return res;
}

} // namespace

json server_blocks_capture::props() const {
    return json {
        {"layers",     llama_attn_capture_layers(context.ctx)},
        {"max_layers", LLAMA_ATTN_MAX_LAYERS},
        {"max_window", LLAMA_ATTN_MAX_WINDOW},
    };
}

json server_blocks_capture::run_op(const json & op, const server_blocks_slot & slot, bool dry) const {
    if (const char * reason = llama_attn_capture_unsupported(context.ctx)) {
        fail(501, "not_supported_error", string_format("attention cannot be captured: %s", reason));
    }
    auto params = get_params(op, llama_attn_capture_layers(context.ctx));
    if (!fit(params, slot.id)) {
        fail_request(string_format("this capture needs %zu MiB of device memory, and %zu are allowed for all slots: choose fewer layers, or no per_head",
            llama_attn_capture_device_bytes(context.ctx, slot.id, params) >> 20, MAX_CAPTURE_DEVICE_BYTES >> 20));
    }
    const size_t bytes = llama_attn_capture_bytes(context.ctx, params, slot.n_ctx);
    if (bytes > MAX_CAPTURE_BYTES) {
        fail_request(string_format("this capture needs %zu MiB of host memory, and %zu are allowed: choose fewer layers, no per_head, or a smaller window",
            bytes >> 20, MAX_CAPTURE_BYTES >> 20));
    }
    if (!dry) {
        llama_attn_capture_set(context.ctx, slot.id, params);
        return params_json(params);
    }
    std::set<int32_t> all(params.layers.begin(), params.layers.end());
    for (int id = 0; id < context.n_slots(); ++id) {
        if (const auto * other = llama_attn_capture_get(context.ctx, id); other && id != slot.id) {
            all.insert(other->layers.begin(), other->layers.end());
        }
    }
    if ((int32_t) all.size() > LLAMA_ATTN_MAX_LAYERS) {
        fail_request(string_format("at most %d layers can be captured in all slots together", LLAMA_ATTN_MAX_LAYERS));
    }
    const auto * present = llama_attn_capture_get(context.ctx, slot.id);
    if (!(present && *present == params) && !llama_attn_capture_reserve(context.ctx, slot.id, params)) {
        fail(503, "no_memory", "the device has no memory for this capture: choose fewer layers, no per_head, or a smaller window", json { {"needed", llama_attn_capture_device_bytes(context.ctx, slot.id, params)} });
    }
    return {};
}

bool server_blocks_capture::start(int id, llama_attn_params params) const {
    if (llama_attn_capture_get(context.ctx, id)) {
        return true;
    }
    return fit(params, id) && llama_attn_capture_reserve(context.ctx, id, params) && llama_attn_capture_set(context.ctx, id, params);
}

// Reduces the rows of `params` until they fit the limit of device memory. Returns false when even one row does not.
bool server_blocks_capture::fit(llama_attn_params & params, int id) const {
    while (!params.layers.empty() && llama_attn_capture_device_bytes(context.ctx, id, params) > MAX_CAPTURE_DEVICE_BYTES) {
        if (params.window <= 1 && params.queries <= 1) {
            return false;
        }
        params.window  = std::max(1, params.window/2);
        params.queries = std::min(params.queries, std::max(1, params.queries/2));
    }
    return true;
}

json server_blocks_capture::report(const json & body, const server_blocks_slot & slot) const {
    if (const char * reason = llama_attn_capture_unsupported(context.ctx)) {
        fail(501, "not_supported_error", string_format("attention cannot be captured: %s", reason));
    }
    const llama_pos n_tokens = slot.prompt->n_tokens();
    const auto ranges   = get_ranges(body, "ranges", n_tokens);
    const auto * params = llama_attn_capture_get(context.ctx, slot.id);
    const bool per_head = get_flag(body, "per_head");
    if (per_head && params && !params->per_head) {
        fail_request("the capture of this slot has no heads: start it with \"per_head\"");
    }
    const auto masses = [&](const llama_attn_sums & sums, json & to, bool with_life) {
        json mass = json::array();
        json life = json::array();
        for (const auto & r : ranges) {
            const auto m = sums.of(r.first, r.second);
            mass.push_back(m.mass);
            if (with_life) {
                life.push_back(m.life);
            }
        }
        to["total"] = sums.of(0, n_tokens).mass;
        to["mass"]  = std::move(mass);
        if (with_life) {
            to["life"] = std::move(life);
        }
    };
    int64_t n_heads = 0;
    for (size_t i = 0; per_head && params && i < params->layers.size(); ++i) {
        n_heads += llama_attn_capture_n_head(context.ctx, params->layers[i]);
    }
    check_limit("ranges", (n_heads + 2)*(int64_t) ranges.size(), MAX_MASSES, "ask for fewer ranges in one call, or without per_head");
    check_work(body, slot);
    json res = params_json(params ? *params : llama_attn_params());
    res["id"]    = slot.id;
    res["epoch"] = context.slots[slot.id].epoch();
    llama_attn_sums all;
    if (n_heads == 0) {
        all = llama_attn_capture_sums(context.ctx, slot.id);
    } else { // the mean of the heads is computed from their sums, so that each value is read once
        json heads = json::array();
        int32_t channel = 0;
        for (const int32_t layer : params->layers) {
            for (int32_t head = 0; head < llama_attn_capture_n_head(context.ctx, layer); ++head) {
                auto sums = llama_attn_capture_sums(context.ctx, slot.id, channel++);
                json one { {"layer", layer}, {"head", head} };
                masses(sums, one, false);
                heads.push_back(std::move(one));
                all.mass.resize(std::max(all.mass.size(), sums.mass.size()));
                for (size_t i = 0; i < sums.mass.size(); ++i) {
                    all.mass[i] += sums.mass[i]/n_heads;
                }
                all.life  = std::move(sums.life);
                all.n_obs = sums.n_obs;
            }
        }
        res["heads"] = std::move(heads);
    }
    res["n_obs"] = all.n_obs;
    masses(all, res, true);
    if (get_flag(body, "with_queries")) {
        res["query_rows"] = queries_json(slot);
    }
    if (body.contains("bounds")) {
        res["key_bounds"] = bounds_json(body, slot);
    }
    if (body.contains("products")) {
        res["key_products"] = products_json(body, slot);
    }
    return res;
}

// Checks how many values "bounds" and "products" of a call need, before any of them is computed.
void server_blocks_capture::check_work(const json & body, const server_blocks_slot & slot) const {
    const auto * params = llama_attn_capture_get(context.ctx, slot.id);
    int64_t n = 0;
    for (const char * key : { "bounds", "products" }) {
        if (!params || !body.contains(key)) {
            continue;
        }
        int64_t n_rows = 0;
        for (const auto & r : get_ranges(body, key, slot.prompt->n_tokens())) {
            n_rows += std::max(0, std::min<llama_pos>(r.second, slot.prompt->n_tokens()) - r.first);
        }
        n += n_rows*(key[0] == 'b' ? llama_attn_capture_bounds_work(context.ctx, params->layers) : llama_attn_capture_products_work(context.ctx, slot.id));
        check_limit(key, n, MAX_WORK, "ask for fewer ranges in one call");
    }
}

json server_blocks_capture::queries_json(const server_blocks_slot & slot) const {
    json res { {"pos", json::array()}, {"n_head", 0}, {"n_embd", 0}, {"data", ""} };
    const auto * queries = llama_attn_capture_queries(context.ctx, slot.id);
    if (queries && !queries->pos.empty()) {
        std::vector<float> all;
        for (const auto & rows : queries->layers) {
            all.insert(all.end(), rows.begin(), rows.end());
        }
        res = json { {"pos", queries->pos}, {"n_head", queries->n_head}, {"n_embd", queries->n_embd}, {"data", encoded(all)} };
    }
    return res;
}

server_blocks_text server_blocks_capture::text_of(const server_blocks_slot & slot) const {
    return server_blocks_text(*slot.prompt, context.slots[slot.id]);
}

// Returns the latest copy of exactly this range of the slot's text, or nullptr.
const server_blocks_copy * server_blocks_capture::find_copy(const std::string & tenant, const server_blocks_text & text, llama_pos p0, llama_pos p1) const {
    return p1 < (llama_pos) text.hashes.size() ? store.find_latest(tenant, text.hashes[p1], p0, p1) : nullptr;
}

// Returns the bounds of ranges: of resident ranges from their rows, of others from their copy.
json server_blocks_capture::bounds_json(const json & body, const server_blocks_slot & slot) const {
    const auto * params = llama_attn_capture_get(context.ctx, slot.id);
    const auto   layers = params ? params->layers : std::vector<int32_t>();
    const auto   ranges = get_ranges(body, "bounds", slot.prompt->n_tokens());
    const auto   text   = text_of(slot);
    json available = json::array();
    json n_key     = json::array();
    for (const int32_t layer : layers) {
        n_key.push_back(llama_attn_capture_n_key(context.ctx, layer));
    }
    std::vector<float> all;
    for (const auto & r : ranges) {
        auto values = llama_attn_capture_bounds(context.ctx, slot.id, r.first, r.second, layers);
        const auto * copy = values.empty() ? find_copy(get_tenant(body), text, r.first, r.second) : nullptr;
        if (copy && copy->bounds.layers == layers) {
            values = copy->bounds.values;
        }
        available.push_back(!values.empty());
        all.insert(all.end(), values.begin(), values.end());
    }
    return json { {"layers", layers}, {"n_key", n_key}, {"known", available}, {"data", encoded(all)} };
}

// Returns the greatest product of each query row with a key of each range. Reads resident rows and copies in host memory.
json server_blocks_capture::products_json(const json & body, const server_blocks_slot & slot) const {
    const auto ranges = get_ranges(body, "products", slot.prompt->n_tokens());
    const auto text   = text_of(slot);
    json available = json::array();
    std::vector<float> all;
    for (const auto & r : ranges) {
        const auto * copy = find_copy(get_tenant(body), text, r.first, r.second);
        const bool in_ram = copy && copy->in_ram() && !copy->reading;
        const auto values = llama_attn_capture_products(context.ctx, slot.id, r.first, r.second, in_ram ? &copy->kv : nullptr);
        available.push_back(!values.empty());
        all.insert(all.end(), values.begin(), values.end());
    }
    const auto * params  = llama_attn_capture_get(context.ctx, slot.id);
    const auto * queries = llama_attn_capture_queries(context.ctx, slot.id);
    return json {
        {"layers", params ? params->layers : std::vector<int32_t>()}, {"pos", queries ? queries->pos : std::vector<llama_pos>()},
        {"n_head", queries ? queries->n_head : 0}, {"n_embd", queries ? queries->n_embd : 0}, {"known", available}, {"data", encoded(all)},
    };
}

server_blocks_bounds server_blocks_capture::key_bounds(int id, llama_pos p0, llama_pos p1) const {
    const auto * params = llama_attn_capture_get(context.ctx, id);
    if (!params || params->queries == 0) {
        return {};
    }
    return { params->layers, llama_attn_capture_bounds(context.ctx, id, p0, p1, params->layers) };
}

bool server_blocks_capture::lacks_bounds(int id, const server_blocks_copy & copy) const {
    const auto * params = llama_attn_capture_get(context.ctx, id);
    return copy.in_ram() && params && params->queries > 0 && copy.bounds.layers != params->layers;
}

size_t server_blocks_capture::key_bounds_bytes(int id) const {
    const auto * params = llama_attn_capture_get(context.ctx, id);
    size_t n = 0;
    if (params && params->queries > 0) {
        for (const int32_t layer : params->layers) {
            n += sizeof(int32_t) + 2*sizeof(float)*llama_attn_capture_n_key(context.ctx, layer);
        }
    }
    return n;
}

std::map<int32_t, int32_t> server_blocks_capture::key_channels(const llama_context * ctx) {
    std::map<int32_t, int32_t> res;
    for (const int32_t layer : llama_attn_capture_layers(ctx)) {
        res[layer] = llama_attn_capture_n_key(ctx, layer);
    }
    return res;
}
