#pragma once

// Copies scattered rows between a device and host memory in few transfers: the device gathers them in one contiguous
// area of its memory, or scatters them from there.
//
// Owns: 44 MiB of device memory, allocated when they are first needed.
// Threads: the thread that owns the context, between two decodes.
// Invariant: rows are copied bit by bit. What a device did not copy exactly in a test is not copied by it.

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Copies between host and device since the start.
struct llama_kv_traffic {
    uint64_t n_copies = 0;
    uint64_t n_bytes  = 0;

    void add(size_t bytes) {
        n_copies++;
        n_bytes += bytes;
    }
};

// Tensors at equal distances in one buffer, each with a row for each cell: K of some layers, or V.
struct llama_kv_band {
    ggml_tensor * tensor;       // the first
    size_t              row;          // bytes of a row of a tensor
    uint32_t            n        = 1; // tensors
    size_t              distance = 0; // bytes from a tensor to the next, a multiple of `row`
};

class llama_kv_staging {
public:
    static constexpr size_t MAX_IDS = size_t(1) << 20; // rows of all tensors of a band, or elements of transposed rows

    // `backend` executes the copies in the order of its other work. `traffic` must live longer.
    llama_kv_staging(ggml_backend_t backend, llama_kv_traffic & traffic);
    ~llama_kv_staging();
    llama_kv_staging(const llama_kv_staging &) = delete;

    // Return whether blocks of so many rows of `row` bytes, or of transposed rows with elements of a type, can be copied.
    bool copies_rows(size_t n_rows, size_t row);
    bool copies_columns(size_t n_rows, ggml_type type);

    // Returns how many bytes from the first of its bytes to the last one the tensors of a band may extend.
    static size_t max_extent(ggml_backend_t backend);

    // Starts to copy a block: its row i is in cell cells[i].
    void begin(const std::vector<uint32_t> & cells, bool to_host);

    // Copies the rows between the tensors of a band and `data`, where they are contiguous: those of the first tensor, then
    // those of the next. copies_rows() says whether it can, for the rows of all tensors together.
    void rows(const llama_kv_band & band, uint8_t * data);

    // Copies transposed rows: the tensor has columns of `n_cells` elements, `data` has as many columns with one element
    // for each row.
    void columns(const ggml_tensor * tensor, uint32_t n_columns, uint32_t n_cells, uint8_t * data);

    // Starts what remains. The host may access `data` when the backend has been synchronized.
    void end();

private:
    struct transfer { // between the area and the host
        size_t    offset;
        uint8_t * data;
        size_t    size;
    };

    bool is_usable();
    bool supports(ggml_type type, bool transposed) const;
    bool copies_exactly(ggml_type type, bool transposed);
    void start_graph();
    void add(ggml_tensor * node);
    void flush();
    void wait();
    // What the ids select: of each of `n` tensors, or of each of `n` columns, what belongs to the cells.
    struct id_kind {
        bool     columns;
        uint32_t n;
        size_t   distance; // rows from a tensor to the next, elements from a column to the next
    };

    bool has_ids(const id_kind & kind) const;
    void upload_ids(const id_kind & kind);
    size_t reserve(uint8_t * data, size_t size);
    ggml_tensor * placed(ggml_tensor * tensor, size_t offset);
    ggml_tensor * alias(const ggml_tensor * tensor, ggml_tensor * shape, size_t offset);

    ggml_backend_t        backend;
    llama_kv_traffic &    traffic;
    ggml_backend_buffer_t buffer  = nullptr;
    bool                  refused = false; // the device has no memory for the buffer
    std::vector<std::pair<std::pair<ggml_type, bool>, bool>> tested; // types, transposed or not: whether they are copied exactly

    bool                  to_host = true;
    std::vector<uint32_t> cells;
    std::vector<int32_t>  ids;          // on the device, too
    id_kind               ids_kind = { false, 0, 0 };

    std::vector<uint8_t>  metadata; // of the tensors and the graph; allocated once
    ggml_context *        ctx   = nullptr;
    ggml_cgraph *         graph = nullptr; // that is being built
    ggml_tensor *         area  = nullptr;
    std::vector<transfer> transfers;       // of the graph
    size_t                n_staged  = 0;
    size_t                n_widened = 0;
    bool                  busy = false;    // the device may still use buffer and graph
};
