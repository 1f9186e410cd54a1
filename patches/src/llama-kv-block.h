#pragma once

// Rows of the KV cache as values: copies the rows of a position range of one sequence to host memory, frees their cells,
// and writes them back at the same positions.
//
// Owns: nothing; rows are in the cells of the context or in the caller's memory.
// Threads: the thread that owns the context, between two decodes.
// Invariants: what llama.h does is unchanged; a program that does not call these functions is unaffected.

#include "llama.h"
#include "ggml-backend.h"
#include "llama-kv-staging.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Positions from `first` to before `second`.
using llama_kv_range = std::pair<llama_pos, llama_pos>;

// A set of positions: ascending ranges that neither overlap nor touch.
using llama_kv_ranges = std::vector<llama_kv_range>;

struct llama_kv_block {
    llama_pos p0 = 0;
    llama_pos p1 = 0;

    std::vector<llama_pos>   pos;   // position of each row, ascending
    std::vector<uint32_t>    cells; // the cell each row was copied from
    std::vector<llama_token> tok;   // the token of each row
    std::vector<llama_pos>   x, y;  // its position in an image (M-RoPE), 0 for text

    uint64_t layout = 0; // llama_kv_block_layout() of the cache the rows came from
    uint32_t n_runs = 0; // how many contiguous runs of cells the save has copied

    size_t    size = 0;       // bytes in data: n_rows * llama_kv_block_row_size()
    uint8_t * data = nullptr; // the caller's memory: K of each layer [row][k_row], then V of each layer, then keys of an index

    uint32_t n_rows() const { return (uint32_t) pos.size(); }
};

// The memory of a sequence. Block calls work on the rows of full attention; they leave windows and states alone.
struct llama_kv_block_memory {
    const char * name;      // "dense", "iswa", "hybrid", "dsa", "dsa-iswa", "msa"
    bool         windowed;  // some layers have only the last rows, in a cache of their own
    bool         recurrent; // some layers have a state that cannot return to an earlier position
    bool         indexed;   // attention is sparse: keys in a second cache, which are part of a row, choose the rows it reads
};

LLAMA_API llama_kv_block_memory llama_kv_block_kind(const llama_context * ctx);

// Returns the cache that block calls work on, or nullptr. For files inside libllama.
class llama_kv_cache;
llama_kv_cache * llama_kv_block_find(const llama_context * ctx);

// Prepares the cache of a context for block calls; without this they work too, but slower. Rows on a device are then copied
// in few transfers, whatever their cells are; and where sequences share cells, the rows of each are kept together, so that
// later rows may be in other cells than upstream would choose.
LLAMA_API void llama_kv_block_enable(llama_context * ctx);

// Returns the copies between host and device since llama_kv_block_enable(): none where rows are in host memory.
LLAMA_API llama_kv_traffic llama_kv_block_traffic(const llama_context * ctx);

// Chooses cells for a batch as llama_kv_place() does, if the cache was prepared for that. For the hook in find_slot().
struct llama_kv_block_state;
struct llama_ubatch;
class llama_kv_cells;
bool llama_kv_block_place(const llama_kv_block_state * state, const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & chosen);

// Returns the layers of the model whose rows are in that cache.
LLAMA_API std::vector<int32_t> llama_kv_block_layers(const llama_context * ctx);

// Returns nullptr if the rows of this context can be saved and loaded, else a short reason for the user.
LLAMA_API const char * llama_kv_block_unsupported(const llama_context * ctx);

// Returns the number of positions for which the RoPE factors of this context are right, 0 = no limit. A model with
// factors for long texts (longrope) uses those for short texts where the context has too few cells.
LLAMA_API int32_t llama_kv_block_rope_limit(const llama_context * ctx);

// Returns a value that is equal for two caches of one model exactly when rows of one can be written into the other.
LLAMA_API uint64_t llama_kv_block_layout(const llama_context * ctx);

// Returns a hash of the contents of a LoRA adapter, without its scale.
struct llama_adapter_lora;
LLAMA_API uint64_t llama_kv_block_adapter_id(const llama_adapter_lora * adapter);

// Returns the type of host memory that the device of the cache copies to and from fastest (pinned), or nullptr when it
// has none or the cache is in host memory itself. An allocation may be of another type: the device may refuse.
LLAMA_API ggml_backend_buffer_type_t llama_kv_block_host_buft(const llama_context * ctx);

// Returns the bytes of one row (K and V of all layers, and its keys in an index).
LLAMA_API size_t llama_kv_block_row_size(const llama_context * ctx);

// Return the cells that the sequence can use, how many of them are empty, how many have a row of the sequence.
LLAMA_API uint32_t llama_kv_block_n_cells(const llama_context * ctx, llama_seq_id seq);
LLAMA_API uint32_t llama_kv_block_n_free (const llama_context * ctx, llama_seq_id seq);
LLAMA_API uint32_t llama_kv_block_n_rows (const llama_context * ctx, llama_seq_id seq);

// How many rows a sequence has, and the positions of the first and the last (-1: there is none).
struct llama_kv_extent {
    int32_t   n_rows = 0;
    llama_pos first  = -1;
    llama_pos last   = -1;

    bool operator==(const llama_kv_extent & other) const { return n_rows == other.n_rows && first == other.first && last == other.last; }
    bool operator!=(const llama_kv_extent & other) const { return !(*this == other); }
};

// Returns that of a sequence, in constant time.
LLAMA_API llama_kv_extent llama_kv_block_extent(const llama_context * ctx, llama_seq_id seq);

// Returns the positions of the sequence that have a row, read from the cells.
LLAMA_API llama_kv_ranges llama_kv_block_resident(const llama_context * ctx, llama_seq_id seq);

// Returns the positions of the sequence whose rows belong to other sequences too.
LLAMA_API llama_kv_ranges llama_kv_block_shared_ranges(const llama_context * ctx, llama_seq_id seq);

// Returns whether a row of [p0, p1) also belongs to another sequence.
LLAMA_API bool llama_kv_block_shared(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);

// Returns whether keys of this context can be rotated to other positions: dense memory, no index, one position per row.
LLAMA_API bool llama_kv_block_can_shift(const llama_context * ctx);

// Closes all gaps of the sequence: every row moves down to the first free position; its key is rotated before the next
// decode or save. Returns the number of rows that moved.
LLAMA_API uint32_t llama_kv_block_compact(llama_context * ctx, llama_seq_id seq);

// Copies the rows of `range`, all of which must be resident, to `data`. That memory must have llama_kv_block_row_size()
// bytes for each row and stays the caller's. Returns false, with `out` unchanged, when rows are missing.
// The host must not read `data` before llama_kv_block_fence(); evicting, decoding and loading need no fence.
LLAMA_API bool llama_kv_block_save(llama_context * ctx, llama_seq_id seq, llama_kv_range range, uint8_t * data, llama_kv_block & out);

// Frees the cells of [p0, p1); every other position stays where it is. Returns the number of rows freed.
LLAMA_API uint32_t llama_kv_block_evict(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);

// Writes the rows to their positions. With `same` each row is written to the cell from which it was saved, when that cell
// is empty; when this holds for all rows, attention is bit-identical. The others are written to the first contiguous run
// of empty cells that is long enough, or else to the lowest empty cells. No position of the block may be resident. Returns
// the number of rows that are in their old cell, or -1 (nothing changed) if there are too few cells or the layout differs.
// `data` must not change before llama_kv_block_fence().
LLAMA_API int32_t llama_kv_block_load(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, bool same);

// Writes the rows to positions from `at` on. Rows at and after `at` move up first; keys are rotated before the next decode
// or save. Returns as llama_kv_block_load() does, and -1 where llama_kv_block_can_shift() is false.
LLAMA_API int32_t llama_kv_block_insert(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, llama_pos at);

// Waits for all copies.
LLAMA_API void llama_kv_block_fence(llama_context * ctx);

// Returns the parameters for upstream's K-shift with which rotated keys keep their length.
struct llama_cparams;
llama_cparams llama_kv_block_unscaled(const llama_cparams & cparams, float freq_scale);
