#include "server-blocks-history.h"

#include "server-blocks-hash.h"

#include <algorithm>
#include <random>

namespace {

// Returns a number that no other decode of any process has.
uint64_t next_decode() {
    static uint64_t seed = []() {
        std::random_device device;
        return (uint64_t(device()) << 32) ^ device();
    }();
    static uint64_t count = 0;
    return server_blocks_mix(seed, ++count);
}

// Makes a hash a visibility of the kind "partial": even and not 0.
server_blocks_visibility partial(uint64_t h) {
    h &= ~uint64_t(1);
    return h == 0 ? 2 : h;
}

// Makes a hash a visibility of the kind "unknown": odd.
server_blocks_visibility unknown(uint64_t h) {
    return h | 1;
}

// A range of rows that have one visibility, from one or several decodes.
struct visible_range {
    llama_pos p0;
    llama_pos p1;
    server_blocks_visibility visibility;
};

// Joins neighbours of one visibility, up to position `end`.
std::vector<visible_range> visible_ranges(const server_blocks_row_list & rows, llama_pos end) {
    std::vector<visible_range> res;
    for (const auto & r : rows) {
        if (r.p0 >= end) {
            break;
        }
        const llama_pos p1 = std::min(r.p1, end);
        if (!res.empty() && res.back().p1 == r.p0 && res.back().visibility == r.visibility) {
            res.back().p1 = p1;
        } else {
            res.push_back({ r.p0, p1, r.visibility });
        }
    }
    return res;
}

// Returns the visibility that a row at `pos` has if it is decoded after the first n of these ranges.
server_blocks_visibility visibility_after(const std::vector<visible_range> & ranges, size_t n, llama_pos pos) {
    bool      complete = true;
    bool      no_partial = true;
    llama_pos end   = 0;
    uint64_t  h     = server_blocks_mix(0x76697369626c65ull, n);
    for (size_t i = 0; i < n; ++i) {
        const auto & r = ranges[i];
        complete = complete && r.p0 == end && server_blocks_is_complete(r.visibility);
        no_partial = no_partial && r.p0 == end && !server_blocks_is_partial(r.visibility);
        end   = r.p1;
        h = server_blocks_mix(server_blocks_mix(server_blocks_mix(h, (uint32_t) r.p0), (uint32_t) r.p1), r.visibility);
    }
    if (end != pos) { // the row immediately before it is missing
        complete = no_partial = false;
        h = server_blocks_mix(h, (uint32_t) pos);
    }
    return complete ? 0 : no_partial ? unknown(h) : partial(h);
}

// Appends rows; joins them with the last entry where both are of one decode.
void append(server_blocks_row_list & list, const server_blocks_rows & rows) {
    if (rows.p0 >= rows.p1) {
        return;
    }
    if (!list.empty() && list.back().p1 == rows.p0 && list.back().decode == rows.decode && list.back().visibility == rows.visibility) {
        list.back().p1 = rows.p1;
    } else {
        list.push_back(rows);
    }
}

} // namespace

server_blocks_visibility server_blocks_visibility_of(const server_blocks_row_list & rows) {
    bool     complete   = true;
    bool     no_partial = true;
    uint64_t h = 0x636f7079ull;
    for (const auto & r : visible_ranges(rows, rows.empty() ? 0 : rows.back().p1)) {
        complete = complete && server_blocks_is_complete(r.visibility);
        no_partial = no_partial && !server_blocks_is_partial(r.visibility);
        h = server_blocks_mix(server_blocks_mix(server_blocks_mix(h, (uint32_t) r.p0), (uint32_t) r.p1), r.visibility);
    }
    return complete ? 0 : no_partial ? unknown(h) : partial(h);
}

server_blocks_row_list server_blocks_rows_displaced(server_blocks_row_list rows, uint64_t prefix_hash) {
    for (auto & r : rows) {
        r.visibility = partial(server_blocks_mix(prefix_hash, r.visibility));
    }
    return rows;
}

server_blocks_visibility server_blocks_history::visibility_at(llama_pos pos) const {
    const auto ranges = visible_ranges(rows, pos);
    const size_t n = ranges.size();
    // A row that continues rows of one visibility sees those rows and what they saw, so its visibility is the same.
    if (n > 0 && ranges[n - 1].p1 == pos && ranges[n - 1].visibility != 0
            && ranges[n - 1].visibility == visibility_after(ranges, n - 1, ranges[n - 1].p0)) {
        return ranges[n - 1].visibility;
    }
    return visibility_after(ranges, n, pos);
}

void server_blocks_history::on_decoded(llama_pos end, bool opaque) {
    const llama_pos begin = this->end();
    if (end <= begin) {
        return;
    }
    if (open && !rows.empty()) {
        rows.back().p1 = end;
        return;
    }
    const uint64_t decode = next_decode();
    auto visibility = opaque ? unknown(decode) : visibility_at(begin);
    if (has_state && state_partial <= begin && !server_blocks_is_partial(visibility)) {
        visibility = partial(server_blocks_mix(visibility, (uint32_t) state_partial)); // the state has missed rows, even if all rows are complete now
    }
    if (server_blocks_is_partial(visibility)) {
        state_partial = std::min(state_partial, begin);
    }
    rows.push_back({ begin, end, decode, visibility });
    open = true;
}

void server_blocks_history::shorten(llama_pos end) {
    if (open && !rows.empty() && rows.back().p0 < end) {
        rows.back().p1 = std::min(rows.back().p1, end); // the next decode extends it, as if these rows had not been there
    } else {
        on_removed(end, std::numeric_limits<llama_pos>::max());
    }
}

void server_blocks_history::on_removed(llama_pos p0, llama_pos p1) {
    open = false;
    if (p0 <= state_partial && p1 == std::numeric_limits<llama_pos>::max()) {
        state_partial = p1; // every row that the partial state produced is removed
    }
    const auto first = std::lower_bound(rows.begin(), rows.end(), p0, [](const auto & r, llama_pos p) { return r.p1 <= p; });
    auto last = first;
    server_blocks_row_list rest;
    for (; last != rows.end() && last->p0 < p1; ++last) {
        if (last->p0 < p0) {
            rest.push_back({ last->p0, p0, last->decode, last->visibility });
        }
        if (p1 < last->p1) {
            rest.push_back({ p1, last->p1, last->decode, last->visibility });
        }
    }
    rows.insert(rows.erase(first, last), rest.begin(), rest.end());
}

void server_blocks_history::on_loaded(const server_blocks_row_list & copy) {
    open = false;
    if (copy.empty()) {
        return;
    }
    on_removed(copy.front().p0, copy.back().p1);
    server_blocks_row_list all;
    auto next = rows.begin();
    for (; next != rows.end() && next->p0 < copy.front().p0; ++next) {
        append(all, *next);
    }
    for (const auto & r : copy) {
        append(all, r);
    }
    for (; next != rows.end(); ++next) {
        append(all, *next);
    }
    rows = std::move(all);
}

void server_blocks_history::reconcile(const llama_kv_ranges & resident) {
    add_unrecorded(resident, false);
}

void server_blocks_history::on_moved(const llama_kv_ranges & resident) {
    add_unrecorded(resident, true);
}

void server_blocks_history::add_unrecorded(const llama_kv_ranges & resident, bool moved) {
    server_blocks_row_list all;
    auto next = rows.begin();
    uint64_t decode = 0;
    const auto add_unknown = [&](llama_pos p0, llama_pos p1) {
        if (p0 < p1) {
            decode = decode == 0 ? next_decode() : decode;
            const bool gapless = !moved && p0 == (all.empty() ? 0 : all.back().p1);
            append(all, { p0, p1, decode, gapless ? unknown(decode) : partial(decode) });
            state_partial = gapless ? state_partial : std::min(state_partial, p0);
        }
    };
    for (const auto & [p0, p1] : resident) {
        llama_pos at = p0;
        while (next != rows.end() && next->p1 <= at) {
            ++next;
        }
        for (; next != rows.end() && next->p0 < p1; ++next) {
            add_unknown(at, std::max(at, next->p0));
            const llama_pos from = std::max(at, next->p0), to = std::min(p1, next->p1);
            append(all, { from, to, next->decode, next->visibility });
            at = to;
            if (next->p1 > p1) {
                break; // the rest of it may be in the next range
            }
        }
        add_unknown(at, p1);
    }
    if (all != rows) {
        rows = std::move(all);
        open = false;
    }
}

void server_blocks_history::clear() {
    rows.clear();
    open = false;
    state_partial = std::numeric_limits<llama_pos>::max();
}

llama_pos server_blocks_history::complete_end() const {
    llama_pos end = 0;
    for (const auto & r : rows) {
        if (r.p0 != end || server_blocks_is_partial(r.visibility)) {
            break;
        }
        end = r.p1;
    }
    return has_state ? std::min(end, state_partial) : end;
}

server_blocks_row_list server_blocks_history::of(llama_pos p0, llama_pos p1) const {
    server_blocks_row_list res;
    auto it = std::lower_bound(rows.begin(), rows.end(), p0, [](const auto & r, llama_pos p) { return r.p1 <= p; });
    for (; it != rows.end() && it->p0 < p1; ++it) {
        append(res, { std::max(p0, it->p0), std::min(p1, it->p1), it->decode, it->visibility });
    }
    return res;
}
