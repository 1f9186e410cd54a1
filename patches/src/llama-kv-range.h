#pragma once

// Rows of a position range of one sequence as a state: the C API, and what members of llama_kv_cache read and write.
// The C API is in a header of ours, because a change of llama.h would compile all of llama.cpp anew.
//
// Owns: nothing.
// Threads: the thread that owns the context, between two decodes.
// Invariant: a call that fails changes nothing.

#include "llama.h"
#include "llama-kv-cells.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// Puts each row into the cell that it was copied from where that cell is empty, the others into other empty cells. When
// all rows are in their cells, attention is bit-identical.
#define LLAMA_STATE_SEQ_FLAGS_SAME_CELLS 4

extern "C" {

// Copies the rows of positions [p0, p1) of a sequence, all of which must be in the cache. With dst == NULL nothing is
// copied. Returns the size of the copy in bytes, or 0 if rows are missing, the buffer is too small or the memory of the
// context is not a plain KV cache.
LLAMA_API size_t llama_state_seq_get_range(
        struct llama_context * ctx,
                llama_seq_id   seq_id,
                   llama_pos   p0,
                   llama_pos   p1,
                     uint8_t * dst,
                      size_t   size);

// Puts rows of llama_state_seq_get_range() into empty cells, the first at position p0, the others as far behind it as they
// were. Keys whose positions differ are rotated before the next decode. Returns the number of bytes read, or 0 if there are
// too few empty cells, a position has a row already, or the copy is not of such a cache; then nothing has changed.
LLAMA_API size_t llama_state_seq_set_range(
        struct llama_context * ctx,
                llama_seq_id   dest_seq_id,
               const uint8_t * src,
                      size_t   size,
                   llama_pos   p0,
       llama_state_seq_flags   flags);

}

// One row of such a state. The state has the number of rows (uint32_t), then these, then what
// llama_kv_cache::state_write_data() writes of their cells.
struct llama_kv_range_row {
    llama_pos         pos;
    uint32_t          cell;
    llama_kv_cell_ext ext;
};

// Chooses an empty cell for each of `wanted`: that one, with `same` and if it is empty. The others are in the first
// contiguous run of empty cells that is long enough, or else the lowest ones. `mirror`, if there is one, has rows in the same
// cells, and a cell must be empty there, too. Adds the number of cells that are the wanted ones to n_same. Returns nothing
// if there are too few empty cells.
std::vector<uint32_t> llama_kv_range_cells(const llama_kv_cells & cells, const llama_kv_cells * mirror, const std::vector<uint32_t> & wanted, bool same, int32_t & n_same);
