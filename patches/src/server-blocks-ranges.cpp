#include "server-blocks-ranges.h"

#include <algorithm>

// Returns the first range that ends after a position.
static llama_kv_ranges::const_iterator first_ending_after(const llama_kv_ranges & set, llama_pos pos) {
    return std::upper_bound(set.begin(), set.end(), pos, [](llama_pos p, const auto & r) { return p < r.second; });
}

void server_ranges_add(llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    if (p0 >= p1) {
        return;
    }
    const auto first = std::lower_bound(set.begin(), set.end(), p0, [](const auto & r, llama_pos p) { return r.second < p; });
    auto last = first; // one past the ranges that the new one overlaps or touches
    for (; last != set.end() && last->first <= p1; ++last) {
        p0 = std::min(p0, last->first);
        p1 = std::max(p1, last->second);
    }
    set.insert(set.erase(first, last), { p0, p1 });
}

void server_ranges_remove(llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    if (p0 >= p1) {
        return;
    }
    const auto first = set.begin() + (first_ending_after(set, p0) - set.begin());
    auto last = first; // one past the ranges that the removed one overlaps
    llama_kv_ranges rest;
    for (; last != set.end() && last->first < p1; ++last) {
        if (last->first < p0) {
            rest.push_back({ last->first, p0 });
        }
        if (p1 < last->second) {
            rest.push_back({ p1, last->second });
        }
    }
    const auto at = set.erase(first, last);
    set.insert(at, rest.begin(), rest.end());
}

int32_t server_ranges_count(const llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    int32_t n = 0;
    for (const auto & r : set) {
        n += std::max(0, std::min(r.second, p1) - std::max(r.first, p0));
    }
    return n;
}

int32_t server_ranges_size(const llama_kv_ranges & set) {
    int32_t n = 0;
    for (const auto & r : set) {
        n += r.second - r.first;
    }
    return n;
}

llama_kv_ranges server_ranges_normalized(llama_kv_ranges ranges) {
    std::sort(ranges.begin(), ranges.end());
    llama_kv_ranges res;
    for (const auto & r : ranges) {
        if (r.first >= r.second) {
            continue;
        }
        if (!res.empty() && r.first <= res.back().second) {
            res.back().second = std::max(res.back().second, r.second);
        } else {
            res.push_back(r);
        }
    }
    return res;
}

llama_kv_ranges server_ranges_without(const llama_kv_ranges & set, const llama_kv_ranges & other) {
    llama_kv_ranges res;
    auto o = other.begin();
    for (const auto & r : set) {
        llama_pos from = r.first;
        while (o != other.end() && o->second <= from) {
            ++o;
        }
        for (auto next = o; next != other.end() && next->first < r.second; ++next) {
            if (from < next->first) {
                res.push_back({ from, next->first });
            }
            from = std::max(from, next->second);
            o = next; // the last one may extend into the next range
        }
        if (from < r.second) {
            res.push_back({ from, r.second });
        }
    }
    return res;
}

bool server_ranges_contain(const llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    const auto it = first_ending_after(set, p0);
    return p0 >= p1 || (it != set.end() && it->first <= p0 && p1 <= it->second);
}

bool server_ranges_overlap(const llama_kv_ranges & set, llama_pos p0, llama_pos p1) {
    const auto it = first_ending_after(set, p0);
    return p0 < p1 && it != set.end() && it->first < p1;
}
