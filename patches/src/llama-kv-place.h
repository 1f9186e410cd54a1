#pragma once

// Chooses the cells of new rows so that the rows of each sequence are together, where several sequences share the cells.
// Upstream gives the next empty cells to the tokens of a batch in their order: while four slots generate, every row of a
// slot has rows of three others beside it, and each of its blocks has as many runs of cells as rows.
//
// Owns: nothing.
// Threads: the thread that owns the context.
// Invariant: the cells of a batch are empty and different.

#include <cstdint>
#include <vector>

class llama_kv_cells;
struct llama_ubatch;

// While it can, a sequence leaves this many empty cells after the last row of every other one.
constexpr uint32_t LLAMA_KV_PLACE_ROOM = 64;

// The search for a run of cells takes as many steps as there are cells. A batch that needs more searches than this goes
// where upstream puts it: then the empty cells are in small pieces in any case.
constexpr uint32_t LLAMA_KV_PLACE_SEARCHES = 64;

// Chooses a cell for each token of the batch: the one after the last row of its sequence if it is empty, else the first
// of the lowest LLAMA_KV_PLACE_ROOM contiguous ones that no other sequence is about to fill, else the first of the longest
// run of such cells, else the middle of the longest run of empty ones. Returns false, with `chosen` unchanged, if there
// are fewer empty cells than tokens, or the batch needs too many searches.
bool llama_kv_place(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & chosen);
