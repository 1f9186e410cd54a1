#include "llama-kv-copy.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

// Contiguous cells: rows [row, row + n) of a block are in cells [cell, cell + n).
struct kv_copy_run {
    uint32_t row;
    uint32_t cell;
    uint32_t n;
};

std::vector<kv_copy_run> kv_copy_runs(const std::vector<uint32_t> & cells) {
    std::vector<kv_copy_run> runs;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!runs.empty() && runs.back().cell + runs.back().n == cells[i]) {
            runs.back().n++;
        } else {
            runs.push_back({ i, cells[i], 1 });
        }
    }
    return runs;
}

// Copies without the processor's caches. A saved block is not read soon: its lines need not be fetched before they are
// overwritten, and must not displace what the next decode reads.
void kv_copy_stream(uint8_t * dst, const uint8_t * src, size_t size) {
    size_t i = 0;
#if defined(__SSE2__)
    if (size >= 4096) { // a shorter copy fills few whole lines
        i = (16 - (uintptr_t) dst % 16) % 16;
        memcpy(dst, src, i);
        for (; i + 64 <= size; i += 64) {
            const auto * from = (const __m128i *) (src + i);
            auto       * to   = (__m128i *) (dst + i);
            const __m128i a = _mm_loadu_si128(from + 0);
            const __m128i b = _mm_loadu_si128(from + 1);
            const __m128i c = _mm_loadu_si128(from + 2);
            const __m128i d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to + 0, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
    }
#endif
    memcpy(dst + i, src + i, size - i);
}

// Makes copies of kv_copy_stream() visible to other threads.
void kv_copy_stream_end() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Copies a few bytes without a function call, as two copies that may overlap.
template <typename T> void kv_copy_few(uint8_t * dst, const uint8_t * src, size_t size) {
    T a, b;
    memcpy(&a, src, sizeof(T));
    memcpy(&b, src + size - sizeof(T), sizeof(T));
    memcpy(dst, &a, sizeof(T));
    memcpy(dst + size - sizeof(T), &b, sizeof(T));
}

// One side of a copy of columns: the first byte, and the bytes from one column to the next.
template <typename Byte> struct kv_copy_side {
    Byte * data;
    size_t stride;
};

// Copies `size` bytes of each of n columns.
template <typename T> void kv_copy_few_columns(kv_copy_side<uint8_t> dst, kv_copy_side<const uint8_t> src, size_t size, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        kv_copy_few<T>(dst.data + i*dst.stride, src.data + i*src.stride, size);
    }
}

struct kv_copy_16 {
    uint64_t v[2];
};

// As above, for each size with the copy that takes least time.
void kv_copy_columns(kv_copy_side<uint8_t> dst, kv_copy_side<const uint8_t> src, size_t size, uint32_t n) {
    if (size > 32) {
        for (uint32_t i = 0; i < n; ++i) {
            memcpy(dst.data + i*dst.stride, src.data + i*src.stride, size);
        }
    } else if (size >= 16) {
        kv_copy_few_columns<kv_copy_16>(dst, src, size, n);
    } else if (size >= 8) {
        kv_copy_few_columns<uint64_t>(dst, src, size, n);
    } else if (size >= 4) {
        kv_copy_few_columns<uint32_t>(dst, src, size, n);
    } else {
        kv_copy_few_columns<uint16_t>(dst, src, size, n);
    }
}

// Rows in more runs than this are copied through llama_kv_staging where they are on a device.
constexpr size_t KV_COPY_FEW_RUNS = 2;

// Blocks larger than this are loaded with kv_copy_stream().
constexpr size_t KV_COPY_STREAMED = size_t(4) << 20;

// How a block is copied. kv_copy_kv_copy_set_tensor() sets the fields that depend on the tensor.
struct kv_copy_params {
    ggml_backend_sched_t sched;
    bool                 to_host;
    bool                 streamed; // with kv_copy_stream()
    llama_kv_traffic *   traffic;  // nullptr: not counted
    ggml_backend_t       backend = nullptr; // of the tensor; nullptr when none of the graph's backends has its memory
    bool                 in_host = true;    // the tensor is in host memory
};

ggml_backend_buffer_t kv_copy_buffer(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

bool kv_copy_is_host(const ggml_tensor * t) {
    return ggml_backend_buffer_is_host(kv_copy_buffer(t));
}

// Finds the backend whose queue has the graph's work on this tensor: copies in that queue need no fence.
void kv_copy_set_tensor(kv_copy_params & params, const ggml_tensor * t) {
    const auto buft = ggml_backend_buffer_get_type(kv_copy_buffer(t));
    params.in_host = kv_copy_is_host(t);
    params.backend = nullptr;
    for (int i = 0; !params.in_host && params.sched && i < ggml_backend_sched_get_n_backends(params.sched); ++i) {
        const auto backend = ggml_backend_sched_get_backend(params.sched, i);
        if (ggml_backend_get_default_buffer_type(backend) == buft) {
            params.backend = backend;
        }
    }
}

// Adds one more layer to a band if it is where the next one has to be.
bool kv_copy_extend(llama_kv_part & part, const llama_kv_part & next, size_t max_extent, uint32_t n_rows) {
    auto & band = part.band;
    const auto * last = (const uint8_t *) band.tensor->data + (band.n - 1)*band.distance;
    const auto * data = (const uint8_t *) next.band.tensor->data;
    if (part.n_columns > 0 || next.band.row != band.row || kv_copy_buffer(next.band.tensor) != kv_copy_buffer(band.tensor) || data <= last) {
        return false;
    }
    const size_t distance = data - last, extent = band.n*distance + ggml_nbytes(next.band.tensor);
    const bool   in_place = band.n == 1 ? distance % band.row == 0 && distance >= ggml_nbytes(band.tensor) : distance == band.distance;
    if (!in_place || extent > max_extent || (band.n + 1)*(size_t) n_rows > llama_kv_staging::MAX_IDS) {
        return false;
    }
    band.n++;
    band.distance = distance;
    return true;
}

// Joins layers whose rows are at equal distances in one buffer of a device: one strided copy has the rows of all of them.
std::vector<llama_kv_part> kv_copy_joined(kv_copy_params & params, const std::vector<llama_kv_part> & parts, uint32_t n_rows) {
    std::vector<llama_kv_part> res;
    for (const auto & part : parts) {
        kv_copy_set_tensor(params, part.band.tensor);
        if (res.empty() || part.n_columns > 0 || !params.backend || !kv_copy_extend(res.back(), part, llama_kv_staging::max_extent(params.backend), n_rows)) {
            res.push_back(part);
        }
    }
    return res;
}

// Returns a tensor with the memory from the first tensor of a band to its last one.
ggml_tensor * kv_copy_tensor_of(ggml_context * ctx, const llama_kv_band & band) {
    if (band.n == 1) {
        return band.tensor;
    }
    ggml_tensor * res = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (band.n - 1)*band.distance + ggml_nbytes(band.tensor));
    const auto status = ggml_backend_tensor_alloc(kv_copy_buffer(band.tensor), res, band.tensor->data);
    GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    return res;
}

void kv_copy_count(const kv_copy_params & params, size_t size) {
    if (params.traffic) {
        params.traffic->add(size);
    }
}

void kv_copy_rows(const kv_copy_params & params, const llama_kv_band & band, const std::vector<kv_copy_run> & runs, uint32_t n_rows, uint8_t * data) {
    const size_t row = band.row;
    ggml_context * ctx = band.n > 1 ? ggml_init({ ggml_tensor_overhead(), nullptr, true }) : nullptr;
    ggml_tensor  * t   = kv_copy_tensor_of(ctx, band);
    for (const auto & r : runs) {
        const size_t offset = r.cell*row, size = r.n*row;
        uint8_t * host = data + r.row*row;
        GGML_ASSERT(offset + size + (band.n - 1)*band.distance <= ggml_nbytes(t));
        if (params.in_host) {
            uint8_t * cell = (uint8_t *) t->data + offset;
            uint8_t * dst  = params.to_host ? host : cell;
            uint8_t * src  = params.to_host ? cell : host;
            params.streamed ? kv_copy_stream(dst, src, size) : (void) memcpy(dst, src, size);
            continue;
        }
        kv_copy_count(params, size*band.n);
        if (params.backend && params.to_host) {
            ggml_backend_tensor_get_2d_async(params.backend, t, host, offset, size, band.n, band.distance, n_rows*row);
        } else if (params.backend) {
            ggml_backend_tensor_set_2d_async(params.backend, t, host, offset, size, band.n, band.distance, n_rows*row);
        } else {
            params.to_host ? ggml_backend_tensor_get(t, host, offset, size) : ggml_backend_tensor_set(t, host, offset, size);
        }
    }
    ggml_free(ctx);
}

// Transposed V: a column has one element of each row.
struct kv_copy_layout {
    uint32_t n;        // columns: channels of a row
    size_t   el;       // bytes of one element
    size_t   stride_t; // bytes from a column to the next one in the tensor
    size_t   stride_d; // bytes from a column to the next one in the copy
};

// Copies a few columns at a time: more of them would not stay in the processor's first cache, with fewer the time per
// run is most of the time.
void kv_copy_column_runs_host(bool to_host, uint8_t * columns, const std::vector<kv_copy_run> & runs, const kv_copy_layout & layout, uint8_t * data) {
    constexpr uint32_t N_COLUMNS = 8;
    const size_t el = layout.el, stride_t = layout.stride_t, stride_d = layout.stride_d; // in registers: the loops store bytes, which could be these fields
    for (uint32_t first = 0; first < layout.n; first += N_COLUMNS) {
        const uint32_t n = std::min(N_COLUMNS, layout.n - first);
        uint8_t * column = columns + first*stride_t;
        uint8_t * host   = data    + first*stride_d;
        for (const auto & r : runs) {
            uint8_t * a = host   + r.row*el;
            uint8_t * b = column + r.cell*el;
#if defined(__GNUC__)
            for (uint32_t i = n; first + i < layout.n && i < 2*n; ++i) { // the next columns are in other pages, where the hardware does not prefetch
                to_host ? __builtin_prefetch(b + i*stride_t, 0) : __builtin_prefetch(b + i*stride_t, 1);
            }
#endif
            to_host ? kv_copy_columns({ a, stride_d }, { b, stride_t }, r.n*el, n) : kv_copy_columns({ b, stride_t }, { a, stride_d }, r.n*el, n);
        }
    }
}

// Copies transposed V with one strided copy for each run.
void kv_copy_column_runs(const kv_copy_params & params, ggml_tensor * t, const std::vector<kv_copy_run> & runs, const kv_copy_layout & layout, uint8_t * data) {
    if (params.in_host) {
        kv_copy_column_runs_host(params.to_host, (uint8_t *) t->data, runs, layout, data);
        return;
    }
    for (const auto & r : runs) {
        const size_t offset = r.cell*layout.el, size = r.n*layout.el;
        uint8_t * host = data + r.row*layout.el;
        kv_copy_count(params, size*layout.n);
        if (params.backend && params.to_host) {
            ggml_backend_tensor_get_2d_async(params.backend, t, host, offset, size, layout.n, layout.stride_t, layout.stride_d);
        } else if (params.backend) {
            ggml_backend_tensor_set_2d_async(params.backend, t, host, offset, size, layout.n, layout.stride_t, layout.stride_d);
        } else if (params.to_host) {
            ggml_backend_tensor_get_2d(t, host, offset, size, layout.n, layout.stride_t, layout.stride_d);
        } else {
            ggml_backend_tensor_set_2d(t, host, offset, size, layout.n, layout.stride_t, layout.stride_d);
        }
    }
}

} // namespace

void llama_kv_parts::add(ggml_tensor * tensor, size_t size, uint32_t n, size_t stride) {
    parts.push_back({ { tensor, n*size }, n > 1 ? n : 0, stride });
}

size_t llama_kv_parts::row_size() const {
    size_t size = 0;
    for (const auto & part : parts) {
        size += part.band.row;
    }
    return size;
}

uint32_t llama_kv_parts::copy(llama_context * ctx, llama_kv_block_state * state, const std::vector<uint32_t> & cells, uint8_t * data, bool to_host) {
    const uint32_t n_rows = (uint32_t) cells.size();
    const size_t   size   = n_rows*row_size();
    for (auto & part : parts) {
        part.data = data;
        data += n_rows*part.band.row;
    }
    if (std::any_of(parts.begin(), parts.end(), [](const llama_kv_part & part) { return kv_copy_is_host(part.band.tensor); })) {
        ctx->synchronize(); // the host copies these rows itself
    }
    auto runs = kv_copy_runs(cells);
    // in the order of the cells, so that memory is accessed in one direction
    std::sort(runs.begin(), runs.end(), [](const kv_copy_run & a, const kv_copy_run & b) { return a.cell < b.cell; });
    kv_copy_params params { ctx->get_sched(), to_host, to_host || size >= KV_COPY_STREAMED, state ? &state->traffic : nullptr };
    auto bands = kv_copy_joined(params, parts, n_rows);
    for (auto & part : bands) {
        kv_copy_set_tensor(params, part.band.tensor);
        if (state && params.backend && runs.size() > KV_COPY_FEW_RUNS) {
            auto & staging = state->staging_of(params.backend);
            const bool exact = part.n_columns > 0 ? staging.copies_columns(n_rows, part.band.tensor->type) : staging.copies_rows(n_rows*part.band.n, part.band.row);
            part.staging = exact ? &staging : nullptr;
        }
    }
    llama_kv_staging * current = nullptr; // a device's layers follow each other
    for (const auto & part : bands) {
        kv_copy_set_tensor(params, part.band.tensor);
        if (current && current != part.staging) {
            current->end();
        }
        if (part.staging && current != part.staging) {
            part.staging->begin(cells, to_host);
        }
        current = part.staging;
        const size_t el = part.n_columns > 0 ? part.band.row/part.n_columns : 0;
        if (current && part.n_columns > 0) {
            current->columns(part.band.tensor, part.n_columns, (uint32_t) (part.stride/el), part.data);
        } else if (current) {
            current->rows(part.band, part.data);
        } else if (part.n_columns > 0) {
            kv_copy_column_runs(params, part.band.tensor, runs, { part.n_columns, el, part.stride, n_rows*el }, part.data);
        } else {
            kv_copy_rows(params, part.band, runs, n_rows, part.data);
        }
    }
    if (current) {
        current->end();
    }
    kv_copy_stream_end();
    return (uint32_t) runs.size();
}

void llama_kv_save_io::write(const void * src, size_t size) {
    if (n_written == 0) {
        memcpy(&n_rows, src, sizeof(n_rows));
    } else if (n_written == sizeof(n_rows) && rows.size() < n_rows) {
        const auto * first = (const llama_kv_range_row *) src;
        rows.assign(first, first + n_rows);
    } else {
        header.insert(header.end(), (const uint8_t *) src, (const uint8_t *) src + size);
    }
    n_written += size;
}

void llama_kv_save_io::write_tensor(ggml_tensor *, size_t, size_t) {
    throw std::logic_error("all tensors are collected by write_cells()");
}

bool llama_kv_save_io::write_cells(ggml_tensor * tensor, size_t size, uint32_t n, size_t stride) {
    if (n_tensors > 0) {
        parts.add(tensor, size, n, stride);
        n_tensors--;
    }
    return true;
}

llama_kv_load_io::llama_kv_load_io(const std::vector<llama_kv_range_row> & rows, const std::vector<uint8_t> & header) {
    const uint32_t n_rows = (uint32_t) rows.size();
    const size_t   size   = n_rows*sizeof(llama_kv_range_row);
    bytes.resize(sizeof(n_rows) + size + header.size());
    memcpy(bytes.data(), &n_rows, sizeof(n_rows));
    memcpy(bytes.data() + sizeof(n_rows), rows.data(), size);
    memcpy(bytes.data() + sizeof(n_rows) + size, header.data(), header.size());
}

void llama_kv_load_io::read(void * dst, size_t size) {
    if (size > bytes.size() - n_read) {
        throw std::logic_error("the state has another header");
    }
    memcpy(dst, bytes.data() + n_read, size);
    n_read += size;
}

void llama_kv_load_io::read_tensor(ggml_tensor *, size_t, size_t) {
    throw std::logic_error("no tensor is read: see read_cells()");
}

bool llama_kv_load_io::read_cells(ggml_tensor *, size_t, uint32_t, size_t) {
    return true;
}
