#pragma once

// What the rows of a slot were made from: which decode computed each row, and whether every earlier position was
// resident then. A copy of rows keeps this with it, in host memory and on disk.

#include "llama-kv-block.h"

#include <cstdint>
#include <limits>
#include <vector>

// Visibility of a row: what was resident before it when it was decoded.
//   0            whole: every earlier position was resident, and whole itself
//   bit 0 set    unknown: no position was missing, but where some of the rows came from is not known (a slot file)
//   other        partial: a hash of what was resident; some earlier position was missing or is partial itself
using server_blocks_visibility = uint64_t;

inline bool server_blocks_is_whole  (server_blocks_visibility v) { return v == 0; }
inline bool server_blocks_is_partial(server_blocks_visibility v) { return v != 0 && (v & 1) == 0; }

// rows [p0, p1) that one decode computed, batch after batch, without a change of the rows before them
struct server_blocks_rows {
    llama_pos p0;
    llama_pos p1;
    uint64_t  decode; // never used twice, by no process: two rows of one decode and position are the same bits
    server_blocks_visibility visibility;

    bool operator==(const server_blocks_rows & other) const {
        return p0 == other.p0 && p1 == other.p1 && decode == other.decode && visibility == other.visibility;
    }
};

using server_blocks_row_list = std::vector<server_blocks_rows>; // ascending, disjoint, equal neighbours joined

// one value for a list of rows: 0 when all of them are whole
server_blocks_visibility server_blocks_visibility_of(const server_blocks_row_list & rows);

// The rows of one slot. All calls come from the main loop.
class server_blocks_history {
public:
    server_blocks_history() = default;

    // `has_state`: the memory has a recurrent state or a window beside these rows, which a load does not replace
    explicit server_blocks_history(bool has_state) : has_state(has_state) {}

    // rows up to `end` were decoded behind those that are there; `opaque`: nobody can tell with what adapter
    void decoded(llama_pos end, bool opaque);

    // rows of [p0, p1) are not resident any more
    void removed(llama_pos p0, llama_pos p1);

    // rows of a copy were written into the cells
    void loaded(const server_blocks_row_list & rows);

    // makes the list agree with what is resident: rows of unknown origin are added as such
    void reconcile(const llama_kv_ranges & resident);

    // the same where rows were moved to other positions: those that are new to the list are partial, they saw other text
    void moved(const llama_kv_ranges & resident);

    void clear();

    // end of the last row
    llama_pos end() const { return rows.empty() ? 0 : rows.back().p1; }

    // end of the beginning that has no missing and no partial row, and that the state beside the rows saw whole
    llama_pos clean_end() const;

    // those of [p0, p1)
    server_blocks_row_list of(llama_pos p0, llama_pos p1) const;

private:
    server_blocks_row_list rows;
    bool open = false; // the next decode goes on with the last entry
    bool has_state = false;
    llama_pos state_partial = std::numeric_limits<llama_pos>::max(); // from here on the state was made behind missing rows

    void add_missing(const llama_kv_ranges & resident, bool moved);
    server_blocks_visibility visible_at(llama_pos pos) const;
};

// `rows` as a load leaves them in a slot whose text before them is not the text they were decoded behind
server_blocks_row_list server_blocks_rows_displaced(server_blocks_row_list rows, uint64_t prefix_hash);
