#include "llama-kv-staging.h"

#include "ggml.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <limits>

// The buffer: ids of rows, then elements that were widened to F32, then the area.
constexpr size_t KV_STAGING_MIB     = size_t(1) << 20;
constexpr size_t KV_STAGING_IDS     = llama_kv_staging::MAX_IDS*sizeof(int32_t);
constexpr size_t KV_STAGING_WIDENED = 8*KV_STAGING_MIB;
constexpr size_t KV_STAGING_AREA    = 32*KV_STAGING_MIB; // a block of 160 tokens of an 8B model: each part more costs a wait

constexpr int    KV_STAGING_N_NODES = 256;
constexpr size_t KV_STAGING_ROWS    = 64; // rows are divided at multiples of this, so that their ids are aligned

llama_kv_staging::llama_kv_staging(ggml_backend_t backend, llama_kv_traffic & traffic) : backend(backend), traffic(traffic) {}

llama_kv_staging::~llama_kv_staging() {
    ggml_free(ctx); // the backend may not exist any more; what it did is complete then
    ggml_backend_buffer_free(buffer);
}

bool llama_kv_staging::is_usable() {
    if (!buffer && !refused) {
        buffer  = ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(backend), KV_STAGING_IDS + KV_STAGING_WIDENED + KV_STAGING_AREA);
        refused = !buffer;
    }
    return buffer;
}

bool llama_kv_staging::copies_rows(size_t n_rows, size_t row) {
    return row % sizeof(int32_t) == 0 && row*KV_STAGING_ROWS <= KV_STAGING_AREA && n_rows <= MAX_IDS && copies_exactly(GGML_TYPE_F32, false);
}

// Nothing says how much of a buffer an operation can address. CUDA and HIP use 64 bits; a Vulkan driver may end at 128 MiB.
size_t llama_kv_staging::max_extent(ggml_backend_t backend) {
    const char * name = ggml_backend_name(backend);
    const bool is_cuda = std::strncmp(name, "CUDA", 4) == 0 || std::strncmp(name, "ROCm", 4) == 0;
    return is_cuda ? std::numeric_limits<size_t>::max() : 128*KV_STAGING_MIB;
}

bool llama_kv_staging::copies_columns(size_t n_rows, ggml_type type) {
    return n_rows <= MAX_IDS && copies_exactly(type, true);
}

// Returns whether the device has the operations for rows of words, or for transposed elements of a type.
bool llama_kv_staging::supports(ggml_type type, bool transposed) const {
    // With transposed elements Mesa's software driver for Vulkan ends in corrupted memory of its own, though what it copied
    // is right: no Vulkan device is used for them until somebody has found out why.
    const bool is_vulkan = std::strncmp(ggml_backend_name(backend), "Vulkan", 6) == 0;
    if (transposed && (is_vulkan || (type != GGML_TYPE_F16 && type != GGML_TYPE_F32))) {
        return false;
    }
    ggml_context * meta = ggml_init({ 16*ggml_tensor_overhead(), nullptr, true });
    const int64_t width = transposed ? 1 : 64;
    ggml_tensor * rows   = ggml_new_tensor_1d(meta, GGML_TYPE_I32, 64);
    ggml_tensor * found  = ggml_get_rows(meta, ggml_new_tensor_2d(meta, type, width, 64), rows);
    ggml_tensor * narrow = ggml_cpy(meta, found, ggml_new_tensor_2d(meta, type, width, 64));
    ggml_tensor * set    = ggml_set_rows(meta, ggml_new_tensor_2d(meta, type, width, 64), ggml_new_tensor_2d(meta, type, width, 64), rows);
    const bool all = ggml_backend_supports_op(backend, found) && ggml_backend_supports_op(backend, set)
        && (found->type == type || ggml_backend_supports_op(backend, narrow));
    ggml_free(meta);
    return all;
}

// Copies a test pattern there and back, once for each kind. Words are all kinds of bits. Elements of F16 are all values but
// those that are no number: a device may change their bits when it widens them, and the K/V of a model have none.
bool llama_kv_staging::copies_exactly(ggml_type type, bool transposed) {
    const auto kind = std::make_pair(type, transposed);
    for (const auto & [tested_kind, is_exact] : tested) {
        if (tested_kind == kind) {
            return is_exact;
        }
    }
    if (!is_usable() || !supports(type, transposed)) {
        tested.push_back({ kind, false });
        return false;
    }
    constexpr uint32_t n_cells = 64, width = 1024;
    const size_t el = ggml_type_size(type), size = n_cells*width*el;
    std::vector<uint8_t> pattern(size), expected(size), copied(size), zeros(size);
    uint32_t word = 0x7f800000; // infinity, and the patterns around it
    for (uint32_t i = 0; i < n_cells*width; ++i) {
        if (type == GGML_TYPE_F16) {
            const uint16_t half = (i & 0x7c00) == 0x7c00 ? i & 0xfc00 : i;
            memcpy(&pattern[i*el], &half, el);
        } else {
            word = i < 1024 ? i - 512 + 0x7f800000*(i % 2) : word*1664525 + 1013904223; // first very small numbers, and no numbers
            memcpy(&pattern[i*el], &word, el);
        }
    }
    std::vector<uint32_t> shuffled(n_cells);
    for (uint32_t i = 0; i < n_cells; ++i) {
        shuffled[i] = i*37 % n_cells;
        for (uint32_t j = 0; j < width; ++j) {
            const size_t from = transposed ? j*n_cells + shuffled[i] : shuffled[i]*width + j;
            const size_t to   = transposed ? j*n_cells + i           : i*width + j;
            memcpy(&expected[to*el], &pattern[from*el], el);
        }
    }
    ggml_context * meta = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    ggml_tensor * tensor = placed(ggml_new_tensor_2d(meta, type, transposed ? n_cells : width, transposed ? width : n_cells), KV_STAGING_IDS + KV_STAGING_WIDENED/2);
    const auto copy = [&](bool to_host, std::vector<uint8_t> & host) {
        begin(shuffled, to_host);
        transposed ? columns(tensor, width, n_cells, host.data()) : rows({ tensor, width*el }, host.data());
        end();
        wait();
    };
    ggml_backend_tensor_set(tensor, pattern.data(), 0, size);
    copy(true, copied);
    bool exact = copied == expected;
    ggml_backend_tensor_set(tensor, zeros.data(), 0, size);
    copy(false, expected);
    ggml_backend_tensor_get(tensor, copied.data(), 0, size);
    exact = exact && copied == pattern;
    ggml_free(meta);
    if (!exact) {
        LLAMA_LOG_WARN("%s: %s does not copy %s exactly: rows in scattered cells are copied one by one\n", __func__, ggml_backend_name(backend), ggml_type_name(type));
    }
    tested.push_back({ kind, exact });
    return exact;
}

void llama_kv_staging::begin(const std::vector<uint32_t> & cells, bool to_host) {
    flush();
    this->cells   = cells;
    this->to_host = to_host;
    ids.clear();
}

void llama_kv_staging::end() {
    flush();
}

void llama_kv_staging::rows(const llama_kv_band & band, uint8_t * data) {
    const id_kind kind = { false, band.n, band.distance/band.row };
    if (!has_ids(kind)) {
        upload_ids(kind);
    }
    const auto type = GGML_TYPE_F32; // words: Vulkan gathers only the first half of a wide row of I32
    const int64_t n_words = band.row/sizeof(int32_t), n_cells = ((band.n - 1)*band.distance + ggml_nbytes(band.tensor))/band.row;
    const size_t n_all = cells.size()*band.n, n_most = KV_STAGING_AREA/band.row/KV_STAGING_ROWS*KV_STAGING_ROWS;
    for (size_t first = 0; first < n_all; first += n_most) {
        const int64_t n = std::min(n_most, n_all - first);
        const size_t offset = reserve(data + first*band.row, n*band.row);
        ggml_tensor * cache  = alias(band.tensor, ggml_new_tensor_2d(ctx, type, n_words, n_cells), 0);
        ggml_tensor * chosen = placed(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n), first*sizeof(int32_t));
        if (to_host) {
            add(placed(ggml_get_rows(ctx, cache, chosen), offset));
        } else {
            add(ggml_set_rows(ctx, cache, placed(ggml_new_tensor_2d(ctx, type, n_words, n), offset), chosen));
        }
    }
}

void llama_kv_staging::columns(const ggml_tensor * tensor, uint32_t n_columns, uint32_t n_cells, uint8_t * data) {
    const size_t el = ggml_type_size(tensor->type), n_rows = cells.size();
    const size_t n_ids = std::max<size_t>(1, std::numeric_limits<int32_t>::max()/n_cells); // columns whose elements have an id
    const uint32_t n_most = (uint32_t) std::min({ (size_t) n_columns, MAX_IDS/n_rows, n_ids });
    if (!has_ids({ true, n_most, n_cells })) {
        upload_ids({ true, n_most, n_cells });
    }
    const bool widened = to_host && tensor->type != GGML_TYPE_F32;
    for (uint32_t first = 0; first < n_columns; first += n_most) {
        const int64_t n = (int64_t) std::min(n_most, n_columns - first)*n_rows;
        if (widened && n_widened + n*sizeof(float) > KV_STAGING_WIDENED) {
            flush();
        }
        const size_t offset = reserve(data + first*n_rows*el, n*el);
        ggml_tensor * cache  = alias(tensor, ggml_new_tensor_2d(ctx, tensor->type, 1, n/n_rows*n_cells), (size_t) first*n_cells*el);
        ggml_tensor * chosen = placed(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n), 0);
        if (!to_host) {
            add(ggml_set_rows(ctx, cache, placed(ggml_new_tensor_2d(ctx, tensor->type, 1, n), offset), chosen));
        } else if (!widened) {
            add(placed(ggml_get_rows(ctx, cache, chosen), offset));
        } else {
            ggml_tensor * wide = placed(ggml_get_rows(ctx, cache, chosen), KV_STAGING_IDS + n_widened);
            n_widened += (n*sizeof(float) + 4095)/4096*4096;
            add(wide);
            add(ggml_cpy(ctx, wide, placed(ggml_new_tensor_2d(ctx, tensor->type, 1, n), offset)));
        }
    }
}

// The ids of fewer tensors or columns are the first ones of those of more.
bool llama_kv_staging::has_ids(const id_kind & kind) const {
    return !ids.empty() && ids_kind.columns == kind.columns && ids_kind.n >= kind.n && (kind.n == 1 || ids_kind.distance == kind.distance);
}

// Writes ids for the nodes that follow.
void llama_kv_staging::upload_ids(const id_kind & kind) {
    flush();
    wait();
    start_graph();
    ids.resize(kind.n*cells.size());
    auto id = ids.begin();
    for (size_t i = 0; i < kind.n; ++i) {
        id = std::transform(cells.begin(), cells.end(), id, [&](uint32_t cell) { return (int32_t) (i*kind.distance + cell); });
    }
    ids_kind = kind;
    ggml_tensor * tensor = placed(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, ids.size()), 0);
    ggml_backend_tensor_set_async(backend, tensor, ids.data(), 0, ggml_nbytes(tensor));
    traffic.add(ggml_nbytes(tensor));
}

// Returns where in the buffer `size` bytes of `data` are placed. What follows them in host memory follows them in the
// area, too, where the alignment of the device allows that: one transfer then copies both.
size_t llama_kv_staging::reserve(uint8_t * data, size_t size) {
    const size_t alignment = ggml_backend_buffer_get_alignment(buffer);
    if ((n_staged + alignment - 1)/alignment*alignment + size > KV_STAGING_AREA || (graph && ggml_graph_n_nodes(graph) + 2 > KV_STAGING_N_NODES)) {
        flush();
    }
    start_graph();
    const bool aligned = n_staged % alignment == 0;
    n_staged = (n_staged + alignment - 1)/alignment*alignment;
    if (aligned && !transfers.empty() && transfers.back().data + transfers.back().size == data) {
        transfers.back().size += size;
    } else {
        transfers.push_back({ n_staged, data, size });
    }
    const size_t offset = KV_STAGING_IDS + KV_STAGING_WIDENED + n_staged;
    n_staged += size;
    return offset;
}

// Gives a tensor its memory in the buffer.
ggml_tensor * llama_kv_staging::placed(ggml_tensor * tensor, size_t offset) {
    const auto status = ggml_backend_tensor_alloc(buffer, tensor, (uint8_t *) ggml_backend_buffer_get_base(buffer) + offset);
    GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    return tensor;
}

// Gives a tensor of another shape the memory of a tensor of the cache, from an offset on.
ggml_tensor * llama_kv_staging::alias(const ggml_tensor * tensor, ggml_tensor * shape, size_t offset) {
    const auto status = ggml_backend_tensor_alloc(tensor->view_src ? tensor->view_src->buffer : tensor->buffer, shape, (uint8_t *) tensor->data + offset);
    GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    return shape;
}

void llama_kv_staging::start_graph() {
    if (graph) {
        return;
    }
    wait();
    const size_t n_tensors = 4*KV_STAGING_N_NODES; // at most so many for each node
    metadata.resize(n_tensors*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false));
    ctx   = ggml_init({ metadata.size(), metadata.data(), true });
    graph = ggml_new_graph_custom(ctx, n_tensors, false);
    area  = placed(ggml_new_tensor_1d(ctx, GGML_TYPE_I8, KV_STAGING_AREA), KV_STAGING_IDS + KV_STAGING_WIDENED);
}

void llama_kv_staging::add(ggml_tensor * node) {
    if (node->view_src && !node->buffer) {
        const auto status = ggml_backend_view_init(node);
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    }
    ggml_build_forward_expand(graph, node);
}

// Executes the graph and its transfers.
void llama_kv_staging::flush() {
    if (!graph) {
        return;
    }
    for (const auto & t : transfers) {
        if (!to_host) {
            ggml_backend_tensor_set_async(backend, area, t.data, t.offset, t.size);
        }
    }
    if (!transfers.empty()) {
        const auto status = ggml_backend_graph_compute_async(backend, graph);
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    }
    for (const auto & t : transfers) {
        if (to_host) {
            ggml_backend_tensor_get_async(backend, area, t.data, t.offset, t.size);
        }
        traffic.add(t.size);
    }
    transfers.clear();
    n_staged = n_widened = 0;
    graph = nullptr;
    busy  = true;
}

// Waits until the device uses neither the buffer nor the graph.
void llama_kv_staging::wait() {
    if (busy) {
        ggml_backend_synchronize(backend);
        ggml_free(ctx);
        ctx  = nullptr;
        busy = false;
    }
}
