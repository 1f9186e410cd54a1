#include "llama-kv-place.h"

#include "llama-batch.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <limits>

namespace {

class kv_placement {
public:
    explicit kv_placement(const llama_kv_cells & cells) : cells(cells), taken(cells.size(), false) {
        for (llama_seq_id seq = 0; seq < (llama_seq_id) LLAMA_MAX_SEQ; ++seq) {
            const auto & rows = cells.seq_pos_get(seq);
            next.push_back(rows.empty() ? NONE : rows.rbegin()->second + 1);
        }
    }

    // Returns the cell of the next row of a sequence; NONE if no cell is empty, and after LLAMA_KV_PLACE_SEARCHES.
    uint32_t take(llama_seq_id seq) {
        const uint32_t after = next[seq];
        const uint32_t cell  = after < cells.size() && is_free(after) ? after : first_of_run(seq);
        if (cell != NONE) {
            taken[cell] = true;
            next[seq]   = cell + 1;
        }
        return cell;
    }

    static constexpr uint32_t NONE = std::numeric_limits<uint32_t>::max();

private:
    bool is_free(uint32_t cell) const { return cells.is_empty(cell) && !taken[cell]; }

    // Contiguous empty cells.
    struct free_run {
        uint32_t first = NONE;
        uint32_t n     = 0;

        // Adds the next cell; remembers the longest run in `longest`.
        void add(uint32_t cell, bool is_free, free_run & longest) {
            first = is_free && n > 0 ? first : cell;
            n     = is_free ? n + 1 : 0;
            if (n > longest.n) {
                longest = *this;
            }
        }
    };

    // Returns where a sequence continues whose next cell is not empty.
    uint32_t first_of_run(llama_seq_id seq) {
        if (n_searches++ >= LLAMA_KV_PLACE_SEARCHES) {
            return NONE;
        }
        const auto reserved = reserved_by_others(seq);
        free_run run, longest, shared_run, longest_shared;
        for (uint32_t cell = 0; cell < cells.size() && longest.n < LLAMA_KV_PLACE_ROOM; ++cell) {
            const bool free = is_free(cell);
            run.add(cell, free && !reserved[cell], longest);
            shared_run.add(cell, free, longest_shared);
        }
        // where others are about to fill all empty cells, one of them is left half of the longest run
        return longest.n > 0 ? longest.first : longest_shared.n > 0 ? longest_shared.first + longest_shared.n/2 : NONE;
    }

    // Returns for each cell whether another sequence is about to fill it.
    std::vector<bool> reserved_by_others(llama_seq_id seq) const {
        std::vector<bool> reserved(cells.size(), false);
        for (llama_seq_id other = 0; other < (llama_seq_id) next.size(); ++other) {
            if (other == seq || next[other] == NONE) {
                continue;
            }
            const uint32_t end = std::min(cells.size(), next[other] + LLAMA_KV_PLACE_ROOM);
            for (uint32_t cell = next[other]; cell < end && is_free(cell); ++cell) {
                reserved[cell] = true;
            }
        }
        return reserved;
    }

    const llama_kv_cells & cells;
    std::vector<bool>      taken; // by this batch
    std::vector<uint32_t>  next;  // the cell after the last row of each sequence
    uint32_t               n_searches = 0;
};

} // namespace

bool llama_kv_place(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & chosen) {
    if (ubatch.n_tokens > cells.size() - cells.get_used()) {
        return false;
    }
    kv_placement placement(cells);
    std::vector<uint32_t> found;
    found.reserve(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        found.push_back(placement.take(ubatch.seq_id[i][0]));
        if (found.back() == kv_placement::NONE) {
            return false;
        }
    }
    chosen = std::move(found);
    return true;
}
