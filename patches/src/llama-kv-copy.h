#pragma once

// Copies rows between the cells of a cache and host memory: those of all layers at once, in few transfers.
// A cache reads and writes states with rows (llama-kv-range.h); llama_kv_save_io and llama_kv_load_io collect their tensors.
//
// Owns: nothing; rows are in the cells of the context or in the caller's memory.
// Threads: the thread that owns the context, between two decodes.
// Invariant: rows are copied bit by bit, and where they are in host memory does not depend on their cells.

#include "llama-io.h"
#include "llama-kv-range.h"
#include "llama-kv-staging.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

// What a cache has for block calls, from llama_kv_block_enable() on.
struct llama_kv_block_state {
    bool                 together = false; // sequences share the cells, and their rows are kept together
    llama_kv_traffic     traffic;
    std::vector<uint8_t> header;           // llama_kv_save_io::header of a state of this cache; empty: not needed yet
    std::map<ggml_backend_t, llama_kv_staging> staging;

    llama_kv_staging & staging_of(ggml_backend_t backend) {
        return staging.try_emplace(backend, backend, traffic).first->second;
    }
};

// Rows of some layers, or transposed rows of one, and where they are in host memory.
struct llama_kv_part {
    llama_kv_band      band;
    uint32_t           n_columns; // transposed: channels of a row; 0: contiguous
    size_t             stride;    // transposed: bytes from a column to the next one in the tensor
    uint8_t *          data = nullptr;
    llama_kv_staging * staging = nullptr; // nullptr: each run is copied by itself
};

// The tensors of one or more states with the same rows.
class llama_kv_parts {
public:
    // Adds a tensor with n columns, `stride` bytes apart, of which a row has `size` bytes each.
    void add(ggml_tensor * tensor, size_t size, uint32_t n, size_t stride);

    // Returns the bytes of a row in all tensors.
    size_t row_size() const;

    // Starts to copy all rows between their cells and `data`, where those of a tensor follow those of the one before it. The
    // host may access `data` when the context has been synchronized. `state` may be nullptr. Returns
    // the number of contiguous runs of cells.
    uint32_t copy(llama_context * ctx, llama_kv_block_state * state, const std::vector<uint32_t> & cells, uint8_t * data, bool to_host);

private:
    std::vector<llama_kv_part> parts;
};

constexpr size_t LLAMA_KV_ALL_TENSORS = std::numeric_limits<size_t>::max();

// Receives a state of llama_kv_cache::state_write_range(): copies its rows later.
class llama_kv_save_io : public llama_io_write_i {
public:
    // Adds the first `n_tensors` tensors to `parts`.
    llama_kv_save_io(llama_kv_parts & parts, size_t n_tensors) : parts(parts), n_tensors(n_tensors) {}

    std::vector<llama_kv_range_row> rows;
    std::vector<uint8_t>            header; // what describes the tensors: equal for all states of a cache

    void   write(const void * src, size_t size) override;
    void   write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    bool   write_cells(ggml_tensor * tensor, size_t size, uint32_t n, size_t stride) override;
    size_t n_bytes() override { return n_written; }

private:
    llama_kv_parts & parts;
    size_t           n_tensors;
    size_t           n_written = 0;
    uint32_t         n_rows    = 0;
};

// Provides a state to llama_kv_cache::state_read_range(), but for what is in tensors: llama_kv_parts copies that.
class llama_kv_load_io : public llama_io_read_i {
public:
    // `header` is that of the cache which reads the state.
    llama_kv_load_io(const std::vector<llama_kv_range_row> & rows, const std::vector<uint8_t> & header);

    void   read(void * dst, size_t size) override;
    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    bool   read_cells(ggml_tensor * tensor, size_t size, uint32_t n, size_t stride) override;
    size_t n_bytes() override { return n_read; }

private:
    std::vector<uint8_t> bytes; // of the state, without what is in tensors
    size_t               n_read = 0;
};
