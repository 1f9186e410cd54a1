#pragma once

// Rows of the KV cache as values: copy the rows of a position range of one sequence to host memory,
// free their cells, write them back at the same positions.
//
// Nothing here changes what llama.h does; a program that does not call it is unaffected.
// All calls must come from the thread that owns the context, between two decodes.

#include "llama.h"
#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// [p0, p1) ranges of positions, ascending, disjoint, never touching
using llama_kv_ranges = std::vector<std::pair<llama_pos, llama_pos>>;

struct llama_kv_block {
    llama_pos p0 = 0;
    llama_pos p1 = 0;

    std::vector<llama_pos>   pos;   // position of each row, ascending
    std::vector<uint32_t>    cells; // the cell each row was copied from
    std::vector<llama_token> tok;   // the token that made the row
    std::vector<llama_pos>   x, y;  // its place in an image (M-RoPE), 0 for text

    uint64_t layout = 0; // llama_kv_block_layout() of the cache the rows came from
    uint32_t n_runs = 0; // contiguous runs of cells copied by the save

    size_t    size = 0;       // bytes in data: n_rows * llama_kv_block_row_size()
    uint8_t * data = nullptr; // the caller's: K of each layer [row][k_row], then V of each layer

    uint32_t n_rows() const { return (uint32_t) pos.size(); }
};

// What a sequence is kept in. Block calls work on the rows of full attention; the rest is left alone.
struct llama_kv_block_memory {
    const char * name;      // "dense", "iswa", "hybrid"
    bool         windowed;  // some layers keep the last rows only, in a cache of their own
    bool         recurrent; // some layers keep a state that cannot go back
};

LLAMA_API llama_kv_block_memory llama_kv_block_kind(const llama_context * ctx);

// the cache that block calls work on, or nullptr; for our own files inside libllama
class llama_kv_cache;
llama_kv_cache * llama_kv_block_find(const llama_context * ctx);

// the layers of the model whose rows are in it
LLAMA_API std::vector<int32_t> llama_kv_block_layers(const llama_context * ctx);

// nullptr if the rows of this context can be saved and loaded, else a short reason for a person
LLAMA_API const char * llama_kv_block_unsupported(const llama_context * ctx);

// positions below which the RoPE factors of this context hold: those for short texts, where a model has others for
// long ones (longrope) and the cells are too few to choose them; 0 = no such limit
LLAMA_API int32_t llama_kv_block_rope_limit(const llama_context * ctx);

// a value that is equal for two caches of one model exactly when rows of one can be written into the other
LLAMA_API uint64_t llama_kv_block_layout(const llama_context * ctx);

// a value for the contents of a LoRA adapter, whatever file it came from; not for its scale
struct llama_adapter_lora;
LLAMA_API uint64_t llama_kv_block_adapter_id(const llama_adapter_lora * adapter);

// Memory of the host that the device of the cache copies to and from fastest (pinned), or nullptr: it has none, or
// the cache is in the host's memory itself. What is allocated may be of another type: the device may refuse.
LLAMA_API ggml_backend_buffer_type_t llama_kv_block_host_buft(const llama_context * ctx);

// bytes of one row (K and V of all layers)
LLAMA_API size_t llama_kv_block_row_size(const llama_context * ctx);

// cells the sequence can use, how many of them are empty, how many hold a row of the sequence
LLAMA_API uint32_t llama_kv_block_n_cells(const llama_context * ctx, llama_seq_id seq);
LLAMA_API uint32_t llama_kv_block_n_free (const llama_context * ctx, llama_seq_id seq);
LLAMA_API uint32_t llama_kv_block_n_rows (const llama_context * ctx, llama_seq_id seq);

// the positions of the sequence that have a row, read from the cells
LLAMA_API llama_kv_ranges llama_kv_block_resident(const llama_context * ctx, llama_seq_id seq);

// true if a row of [p0, p1) also belongs to another sequence
LLAMA_API bool llama_kv_block_shared(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);

// true if keys of this context can be turned to other positions: dense memory, one position a row
LLAMA_API bool llama_kv_block_can_shift(const llama_context * ctx);

// close all gaps of the sequence: every row moves down to the first position that is free, its key is turned
// before the next decode or save. returns the number of rows that moved
LLAMA_API uint32_t llama_kv_block_compact(llama_context * ctx, llama_seq_id seq);

// the positions of the sequence whose rows belong to other sequences too
LLAMA_API llama_kv_ranges llama_kv_block_shared_ranges(const llama_context * ctx, llama_seq_id seq);

// copy the rows of [p0, p1), all of which must be resident, to `data`, which must hold
// (p1 - p0) * llama_kv_block_row_size() bytes and stays the caller's; false (out unchanged) otherwise.
// The host must not read `data` before llama_kv_block_fence(); evicting, decoding and loading need none.
LLAMA_API bool llama_kv_block_save(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, uint8_t * data, llama_kv_block & out);

// free the cells of [p0, p1), every other position stays where it is; returns the number of rows freed
LLAMA_API uint32_t llama_kv_block_evict(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);

// write the rows back at their positions. With `same` each row goes to the cell it came from when that
// cell is empty (bit-identical attention), the others to the lowest contiguous run that holds them, or
// else to the lowest empty cells.
// returns the number of rows that got their old cell, or -1 (nothing changed) if cells are short or the
// layout differs. No position of the block may be resident. `data` must stay as it is until
// llama_kv_block_fence().
LLAMA_API int32_t llama_kv_block_load(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, bool same);

// waits for all copies
LLAMA_API void llama_kv_block_fence(llama_context * ctx);

// the same with the rows at positions from `at` on, their keys turned before the next decode or save: rows at
// `at` and behind it move up first. Where keys can be shifted only.
LLAMA_API int32_t llama_kv_block_insert(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, llama_pos at);

// for upstream's K-shift: what it is to rotate with, so that keys are turned and keep their length
struct llama_cparams;
llama_cparams llama_kv_block_unscaled(const llama_cparams & cparams, float freq_scale);
