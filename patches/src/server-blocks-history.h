#pragma once

// Origin of the rows of a slot: which decode computed each row, and whether every earlier position was resident then.
// A copy of rows carries this record with it, in host memory and on disk.
//
// Owns: the list of rows of one slot, by position.
// Threads: the main loop only. The free functions are pure and may be called anywhere.
// Invariants: the list is ascending and disjoint, and equal neighbours are joined. After reconcile() it covers exactly
//             the resident positions.

#include "llama-kv-block.h"

#include <cstdint>
#include <limits>
#include <vector>

// Visibility of a row: which earlier positions were resident when the row was decoded.
//   0            complete: every earlier position was resident, and complete itself
//   bit 0 set    unknown: no position was missing, but the origin of some rows is not recorded (a slot file)
//   other        partial: a hash of what was resident; some earlier position was missing or is partial itself
using server_blocks_visibility = uint64_t;

inline bool server_blocks_is_complete(server_blocks_visibility v) { return v == 0; }
inline bool server_blocks_is_partial (server_blocks_visibility v) { return v != 0 && (v & 1) == 0; }

// Rows [p0, p1) that one decode computed, batch after batch, while the rows before them did not change.
struct server_blocks_rows {
    llama_pos p0;
    llama_pos p1;
    uint64_t  decode;                    // unique over all processes: rows of one decode and position are the same bits
    server_blocks_visibility visibility; // of each of these rows

    bool operator==(const server_blocks_rows & other) const {
        return p0 == other.p0 && p1 == other.p1 && decode == other.decode && visibility == other.visibility;
    }
};

using server_blocks_row_list = std::vector<server_blocks_rows>;

// Returns one visibility for a list of rows: 0 when all of them are complete.
server_blocks_visibility server_blocks_visibility_of(const server_blocks_row_list & rows);

// Returns `rows` as a load leaves them in a slot whose text before them is not the text they were decoded after.
server_blocks_row_list server_blocks_rows_displaced(server_blocks_row_list rows, uint64_t prefix_hash);

class server_blocks_history {
public:
    server_blocks_history() = default;

    // `has_state`: the memory has a recurrent state or a window beside these rows, which a load does not replace.
    explicit server_blocks_history(bool has_state) : has_state(has_state) {}

    // Records that rows up to `end` were decoded after the last row. `opaque`: under an adapter that is not recorded.
    void on_decoded(llama_pos end, bool opaque);

    // Records that the rows from `end` on, which the last decode added, are no longer resident. Nothing has copied them.
    void shorten(llama_pos end);

    // Records that the rows of [p0, p1) are no longer resident.
    void on_removed(llama_pos p0, llama_pos p1);

    // Records that the rows of a copy were written into the cells.
    void on_loaded(const server_blocks_row_list & rows);

    // Makes the list agree with the resident positions. Rows without a record are added as unknown.
    void reconcile(const llama_kv_ranges & resident);

    // The same after rows moved to other positions. Rows without a record are partial: they were decoded after
    // other text.
    void on_moved(const llama_kv_ranges & resident);

    // Forgets all rows.
    void clear();

    // Returns the position after the last row.
    llama_pos end() const { return rows.empty() ? 0 : rows.back().p1; }

    // Returns the end of the prefix that has no missing and no partial row, and during which the state beside the rows
    // saw every position.
    llama_pos complete_end() const;

    // Returns the rows of [p0, p1).
    server_blocks_row_list of(llama_pos p0, llama_pos p1) const;

private:
    server_blocks_row_list rows;
    bool open      = false; // the next decode extends the last entry
    bool has_state = false;
    llama_pos state_partial = std::numeric_limits<llama_pos>::max(); // first position whose state missed some rows

    void add_unrecorded(const llama_kv_ranges & resident, bool moved);
    server_blocks_visibility visibility_at(llama_pos pos) const;
};
