// Tests llama-kv-staging on the CPU backend, whose memory the test can read: what is copied is every bit of the right
// rows, in few transfers. usage: staging MODEL (not read); prints one line per check; exit status 1 after one that fails

#include "llama-kv-staging.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>

static std::mt19937 random_bits(7);

static void expect(bool fact, const std::string & what) {
    printf("%s: %s\n", fact ? "ok" : "NOT SO", what.c_str());
    if (!fact) {
        exit(1);
    }
}

static std::vector<uint8_t> random_bytes(size_t n) {
    std::vector<uint8_t> bytes(n);
    for (auto & byte : bytes) {
        byte = (uint8_t) random_bits();
    }
    return bytes;
}

// F16 without the values that are no number: widening may change their bits.
static std::vector<uint8_t> random_halves(size_t n) {
    std::vector<uint8_t> bytes = random_bytes(n*2);
    for (size_t i = 0; i < n; ++i) {
        if ((bytes[2*i + 1] & 0x7c) == 0x7c) {
            bytes[2*i + 1] &= 0x83;
        }
    }
    return bytes;
}

static std::vector<uint32_t> random_cells(uint32_t n_cells, uint32_t n_rows) {
    std::vector<uint32_t> cells(n_cells);
    std::iota(cells.begin(), cells.end(), 0);
    std::shuffle(cells.begin(), cells.end(), random_bits);
    cells.resize(n_rows);
    return cells;
}

struct cache_shape {
    ggml_type type;
    int64_t   n_channels, n_cells;
    size_t    n_layers;
    bool      transposed;
    bool      together = false; // all layers in one call
};

// Tensors of one cache, as many as layers.
struct cache : cache_shape {
    std::vector<ggml_tensor *> layers;
    ggml_context *        ctx;
    ggml_backend_buffer_t buffer;

    cache(ggml_backend_t backend, const cache_shape & shape)
        : cache_shape(shape), ctx(ggml_init({ (n_layers + 1)*ggml_tensor_overhead(), nullptr, true })) {
        for (size_t i = 0; i < n_layers; ++i) {
            layers.push_back(ggml_new_tensor_2d(ctx, type, n_channels, n_cells));
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        for (ggml_tensor * layer : layers) {
            const auto bytes = type == GGML_TYPE_F16 ? random_halves(ggml_nelements(layer)) : random_bytes(ggml_nbytes(layer));
            memcpy(layer->data, bytes.data(), bytes.size());
        }
    }

    ~cache() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    size_t row() const { return ggml_row_size(type, n_channels); }

    // Bytes from a layer to the next one.
    size_t distance() const { return (const uint8_t *) layers[1]->data - (const uint8_t *) layers[0]->data; }

    void copy(llama_kv_staging & staging, const std::vector<uint32_t> & cells, bool to_host, std::vector<uint8_t> & host) const {
        staging.begin(cells, to_host);
        if (together) {
            staging.rows({ layers[0], row(), (uint32_t) layers.size(), distance() }, host.data());
        }
        for (size_t i = 0; !together && i < layers.size(); ++i) {
            uint8_t * data = host.data() + i*cells.size()*row();
            transposed ? staging.columns(layers[i], n_channels, n_cells, data) : staging.rows({ layers[i], row() }, data);
        }
        staging.end();
    }

    // What a copy to the host should be, read from the memory of the tensors.
    std::vector<uint8_t> rows_of(const std::vector<uint32_t> & cells) const {
        std::vector<uint8_t> rows;
        const size_t el = ggml_type_size(type);
        for (const ggml_tensor * layer : layers) {
            const auto * bytes = (const uint8_t *) layer->data;
            for (int64_t column = 0; transposed && column < n_channels; ++column) {
                for (const uint32_t cell : cells) {
                    rows.insert(rows.end(), bytes + (column*n_cells + cell)*el, bytes + (column*n_cells + cell + 1)*el);
                }
            }
            for (const uint32_t cell : cells) {
                if (!transposed) {
                    rows.insert(rows.end(), bytes + cell*row(), bytes + (cell + 1)*row());
                }
            }
        }
        return rows;
    }

    std::vector<std::vector<uint8_t>> all() const {
        std::vector<std::vector<uint8_t>> res;
        for (const ggml_tensor * layer : layers) {
            const auto * bytes = (const uint8_t *) layer->data;
            res.emplace_back(bytes, bytes + ggml_nbytes(layer));
        }
        return res;
    }
};

// Saves rows, overwrites them, and loads them into other cells.
static void round_trip(ggml_backend_t backend, const std::string & name, const cache & kv, uint32_t n_rows) {
    llama_kv_traffic traffic;
    llama_kv_staging staging(backend, traffic);
    expect(kv.transposed ? staging.copies_columns(n_rows, kv.type) : staging.copies_rows(n_rows, kv.row()), name + " can be copied");
    const auto cells = random_cells(kv.n_cells, n_rows), target = random_cells(kv.n_cells, n_rows);
    const auto expected = kv.rows_of(cells);
    std::vector<uint8_t> host(expected.size());
    const auto before = traffic;
    kv.copy(staging, cells, true, host);
    ggml_backend_synchronize(backend);
    const uint64_t n_copies = traffic.n_copies - before.n_copies;
    expect(host == expected, name + ": saved bit by bit");
    // ids once, then one transfer for each 8 MiB of the area, each graph of 128 tensors, or, where the alignment leaves gaps
    // between the tensors, each tensor
    const size_t mib = host.size() >> 20, gaps = n_rows*kv.row() % 128 == 0 ? kv.layers.size()/64 : kv.layers.size();
    expect(n_copies <= 2 + mib/4 + gaps, name + ": " + std::to_string(n_copies) + " copies for " + std::to_string(mib) + " MiB");

    auto later = kv.all();
    const size_t el = ggml_type_size(kv.type);
    for (size_t layer = 0; layer < kv.layers.size(); ++layer) {
        const uint8_t * from = host.data() + layer*n_rows*kv.row();
        for (uint32_t i = 0; i < n_rows; ++i) {
            for (int64_t column = 0; kv.transposed && column < kv.n_channels; ++column) {
                memcpy(&later[layer][(column*kv.n_cells + target[i])*el], from + (column*n_rows + i)*el, el);
            }
            if (!kv.transposed) {
                memcpy(&later[layer][target[i]*kv.row()], from + i*kv.row(), kv.row());
            }
        }
    }
    kv.copy(staging, target, false, host);
    ggml_backend_synchronize(backend);
    expect(kv.all() == later, name + ": loaded bit by bit, and no other cell is changed");
}

// Columns of a cache with more elements than 32 bits can count: 2,051 columns of 2M cells are 8.6 GB of addresses, of which
// only the pages with the copied cells are in memory.
static void large_columns(ggml_backend_t backend) {
    constexpr size_t n_cells = size_t(1) << 21, n_columns = 2051, n_rows = 64, el = sizeof(uint16_t);
    constexpr size_t size = n_cells*n_columns*el;
    void * memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    expect(memory != MAP_FAILED, "columns of many cells have addresses");
    madvise(memory, size, MADV_NOHUGEPAGE);
    auto * elements = (uint8_t *) memory;
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    ggml_tensor * tensor = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_columns, n_cells);
    expect(ggml_backend_tensor_alloc(buffer, tensor, memory) == GGML_STATUS_SUCCESS, "columns of many cells are a tensor");

    const auto halves = random_halves(n_columns*n_rows);
    std::vector<uint32_t> cells;
    for (uint32_t i = 0; i < n_rows; ++i) {
        cells.push_back(n_cells - 1 - i*37 % n_rows*3);
    }
    const auto at = [&](size_t i) { return elements + (i/n_rows*n_cells + cells[i % n_rows])*el; };
    for (size_t i = 0; i < n_columns*n_rows; ++i) {
        memcpy(at(i), &halves[i*el], el);
    }
    llama_kv_traffic traffic;
    llama_kv_staging staging(backend, traffic);
    expect(staging.copies_columns(n_rows, GGML_TYPE_F16), "columns of many cells can be copied");
    std::vector<uint8_t> host(halves.size());
    staging.begin(cells, true);
    staging.columns(tensor, n_columns, n_cells, host.data());
    staging.end();
    ggml_backend_synchronize(backend);
    expect(host == halves, "columns of many cells: saved bit by bit");

    host = random_halves(n_columns*n_rows);
    staging.begin(cells, false);
    staging.columns(tensor, n_columns, n_cells, host.data());
    staging.end();
    ggml_backend_synchronize(backend);
    bool same = true;
    for (size_t i = 0; i < n_columns*n_rows; ++i) {
        same = same && memcmp(at(i), &host[i*el], el) == 0;
    }
    expect(same, "columns of many cells: loaded bit by bit");
    ggml_free(ctx);
    ggml_backend_buffer_free(buffer);
    munmap(memory, size);
}

int main() {
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 1);
    round_trip(backend, "rows of f16",          { backend, { GGML_TYPE_F16, 1024, 512, 4, false } }, 64);
    round_trip(backend, "rows of q8_0",         { backend, { GGML_TYPE_Q8_0, 1024, 512, 4, false } }, 64);
    round_trip(backend, "rows of q4_0",         { backend, { GGML_TYPE_Q4_0, 128, 300, 3, false } }, 77);
    round_trip(backend, "rows of bf16",         { backend, { GGML_TYPE_BF16, 256, 300, 3, false } }, 1);
    round_trip(backend, "many rows",            { backend, { GGML_TYPE_F32, 1024, 5000, 2, false } }, 4999);
    round_trip(backend, "many layers",          { backend, { GGML_TYPE_F16, 128, 128, 300, false } }, 33);
    round_trip(backend, "layers together",      { backend, { GGML_TYPE_F16, 1024, 512, 4, false, true } }, 64);
    round_trip(backend, "layers of q8_0 together",     { backend, { GGML_TYPE_Q8_0, 1024, 512, 7, false, true } }, 77);
    round_trip(backend, "layers of many rows together", { backend, { GGML_TYPE_F32, 1024, 2000, 3, false, true } }, 1999);
    round_trip(backend, "many layers together", { backend, { GGML_TYPE_F16, 128, 128, 300, false, true } }, 33);
    round_trip(backend, "columns of f16",       { backend, { GGML_TYPE_F16, 1024, 512, 4, true } }, 64);
    round_trip(backend, "columns of f32",       { backend, { GGML_TYPE_F32, 256, 512, 4, true } }, 100);
    round_trip(backend, "columns of many rows", { backend, { GGML_TYPE_F16, 1024, 4096, 2, true } }, 4000);
    round_trip(backend, "columns of many layers", { backend, { GGML_TYPE_F16, 64, 128, 200, true } }, 40);

    large_columns(backend);

    llama_kv_traffic traffic;
    llama_kv_staging staging(backend, traffic);
    expect(!staging.copies_rows(64, 34), "rows that are not made of words are not");
    expect(!staging.copies_columns(64, GGML_TYPE_BF16), "columns of bf16 are not");
    ggml_backend_free(backend);
    return 0;
}
