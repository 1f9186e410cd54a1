#include "llama-kv-block.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-place.h"
#include "llama-kv-staging.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <typeinfo>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

// Contiguous cells: rows [row, row + n) of a block are in cells [cell, cell + n).
struct kv_block_run {
    uint32_t row;
    uint32_t cell;
    uint32_t n;
};

std::vector<kv_block_run> kv_block_runs(const std::vector<uint32_t> & cells) {
    std::vector<kv_block_run> runs;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!runs.empty() && runs.back().cell + runs.back().n == cells[i]) {
            runs.back().n++;
        } else {
            runs.push_back({ i, cells[i], 1 });
        }
    }
    return runs;
}

uint64_t kv_block_mix(uint64_t h, uint64_t v) {
    h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
    h *= 0xff51afd7ed558ccdull;
    return h ^ (h >> 33);
}

// Copies without the processor's caches. A saved block is not read soon: its lines need not be fetched before they are
// overwritten, and must not displace what the next decode reads.
void kv_block_stream(uint8_t * dst, const uint8_t * src, size_t size) {
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

// Makes copies of kv_block_stream() visible to other threads.
void kv_block_stream_end() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Copies a few bytes without a function call, as two copies that may overlap.
template <typename T> void kv_block_few(uint8_t * dst, const uint8_t * src, size_t size) {
    T a, b;
    memcpy(&a, src, sizeof(T));
    memcpy(&b, src + size - sizeof(T), sizeof(T));
    memcpy(dst, &a, sizeof(T));
    memcpy(dst + size - sizeof(T), &b, sizeof(T));
}

// One side of a copy of columns: the first byte, and the bytes from one column to the next.
template <typename Byte> struct kv_block_side {
    Byte * data;
    size_t stride;
};

// Copies `size` bytes of each of n columns.
template <typename T> void kv_block_few_columns(kv_block_side<uint8_t> dst, kv_block_side<const uint8_t> src, size_t size, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        kv_block_few<T>(dst.data + i*dst.stride, src.data + i*src.stride, size);
    }
}

struct kv_block_16 {
    uint64_t v[2];
};

// As above, for each size with the copy that takes least time.
void kv_block_columns(kv_block_side<uint8_t> dst, kv_block_side<const uint8_t> src, size_t size, uint32_t n) {
    if (size > 32) {
        for (uint32_t i = 0; i < n; ++i) {
            memcpy(dst.data + i*dst.stride, src.data + i*src.stride, size);
        }
    } else if (size >= 16) {
        kv_block_few_columns<kv_block_16>(dst, src, size, n);
    } else if (size >= 8) {
        kv_block_few_columns<uint64_t>(dst, src, size, n);
    } else if (size >= 4) {
        kv_block_few_columns<uint32_t>(dst, src, size, n);
    } else {
        kv_block_few_columns<uint16_t>(dst, src, size, n);
    }
}

// Rows in more runs than this are copied through llama_kv_staging where they are on a device.
constexpr size_t KV_BLOCK_FEW_RUNS = 2;

// Blocks larger than this are loaded with kv_block_stream().
constexpr size_t KV_BLOCK_STREAMED = size_t(4) << 20;

// Returns the memory if it is exactly a T, else nullptr: a class derived from T may have rows elsewhere, too.
template <typename T> T * kv_block_exactly(llama_memory_i * mem) {
    return mem && typeid(*mem) == typeid(T) ? static_cast<T *>(mem) : nullptr;
}

// The caches that block calls work on, and the kind of memory that they are in.
struct kv_block_caches {
    llama_kv_block_memory kind  = { "", false, false, false };
    llama_kv_cache *      rows  = nullptr; // K and V of the full-attention layers; nullptr: this memory is not supported
    llama_kv_cache *      index = nullptr; // where attention is sparse: the keys that choose rows, of the same rows in the same cells
};

kv_block_caches kv_block_find(const llama_context * ctx) {
    auto * mem = ctx ? ctx->get_memory() : nullptr;
    if (auto * dense = kv_block_exactly<llama_kv_cache>(mem)) {
        return { { "dense", false, false, false }, dense, nullptr };
    }
    if (auto * iswa = kv_block_exactly<llama_kv_cache_iswa>(mem)) {
        return { { "iswa", true, false, false }, iswa->get_base(), nullptr };
    }
    if (auto * hybrid = kv_block_exactly<llama_memory_hybrid>(mem)) {
        return { { "hybrid", false, true, false }, hybrid->get_mem_attn(), nullptr };
    }
    if (auto * dsa = kv_block_exactly<llama_kv_cache_dsa>(mem)) {
        return { { "dsa", false, false, true }, dsa->get_mla(), dsa->get_lid() };
    }
    if (auto * mixed = kv_block_exactly<llama_kv_cache_dsa_iswa>(mem)) {
        return { { "dsa-iswa", true, false, true }, mixed->get_dsa()->get_mla(), mixed->get_dsa()->get_lid() };
    }
    if (auto * msa = kv_block_exactly<llama_kv_cache_msa>(mem)) {
        return { { "msa", false, false, true }, msa->get_base(), msa->get_idx() };
    }
    return {};
}

// Returns the cache with K and V, for what is equal in both caches or does not concern the index.
llama_kv_cache * kv_block_cache(const llama_context * ctx) {
    return kv_block_find(ctx).rows;
}

// Returns why a memory without such a cache is not supported.
const char * kv_block_no_cache(const llama_context * ctx) {
    auto * mem = ctx ? ctx->get_memory() : nullptr;
    if (!mem) {
        return "no memory: the model does not decode";
    }
    if (kv_block_exactly<llama_memory_recurrent>(mem)) {
        return "recurrent memory: there are no rows";
    }
    if (kv_block_exactly<llama_memory_hybrid_iswa>(mem)) {
        return "hybrid memory with sliding windows";
    }
    if (kv_block_exactly<llama_memory_hybrid_idx>(mem)) {
        return "hybrid memory with an index of pools: keys of later rows change when earlier rows leave";
    }
    if (kv_block_exactly<llama_kv_cache_dsv4>(mem)) {
        return "compressed memory (dsv4): a row is made from the rows before it";
    }
    return "this kind of memory";
}

} // namespace

// What a cache has for block calls, from llama_kv_block_enable() on.
struct llama_kv_block_state {
    bool             together = false; // sequences share the cells, and their rows are kept together
    llama_kv_traffic traffic;
    std::map<ggml_backend_t, llama_kv_staging> staging;

    llama_kv_staging & staging_of(ggml_backend_t backend) {
        return staging.try_emplace(backend, backend, traffic).first->second;
    }
};

// The only access to private members of llama_kv_cache, which declares it a friend.
struct llama_kv_block_access {
    llama_context *    ctx;
    llama_kv_cache &   kv;
    llama_kv_cache *   index; // nullptr: there is none
    const llama_seq_id seq;
    const uint32_t     strm;

    llama_kv_block_access(llama_context * ctx, const kv_block_caches & caches, llama_seq_id seq)
        : ctx(ctx), kv(*caches.rows), index(caches.index), seq(seq), strm(kv.seq_to_stream[seq]) {}

    llama_kv_cells & cells() { return kv.v_cells[strm]; }

    bool is_empty(uint32_t cell) const {
        return kv.v_cells[strm].is_empty(cell) && (!index || index->v_cells[strm].is_empty(cell));
    }

    // Returns whether the index has the keys of all rows of [p0, p1) in the cells of these rows.
    bool indexed(llama_pos p0, llama_pos p1) const {
        if (!index) {
            return true;
        }
        const auto & rows = kv.v_cells[strm].seq_pos_get(seq), & keys = index->v_cells[strm].seq_pos_get(seq);
        return std::equal(rows.lower_bound({ p0, 0 }), rows.lower_bound({ p1, 0 }), keys.lower_bound({ p0, 0 }), keys.lower_bound({ p1, 0 }));
    }

    static const char * unsupported(const llama_kv_cache & kv) {
        if (kv.other) {
            return "the cache shares the cells of another one";
        }
        if (kv.swa_type != LLAMA_SWA_TYPE_NONE) {
            return "sliding-window cache";
        }
        if (kv.layers.empty()) {
            return "no layer with full attention";
        }
        return nullptr;
    }

    static void enable(llama_kv_cache & kv) {
        kv.block_state = std::make_shared<llama_kv_block_state>();
        kv.block_state->together = kv.n_stream == 1 && kv.n_seq_max > 1;
    }

    static llama_kv_traffic traffic(const llama_kv_cache & kv) {
        return kv.block_state ? kv.block_state->traffic : llama_kv_traffic();
    }

    static std::vector<int32_t> layers(const llama_kv_cache & kv) {
        std::vector<int32_t> res;
        for (const auto & layer : kv.layers) {
            res.push_back((int32_t) layer.il);
        }
        return res;
    }

    // Returns the rotation of keys and values of a quantised cache: whether there is one; in later releases its size.
    template <typename Cache> static auto rotation(const Cache & kv, int) -> decltype(std::make_pair(kv.attn_rot_k, kv.attn_rot_v)) {
        return { kv.attn_rot_k, kv.attn_rot_v };
    }

    template <typename Cache> static auto rotation(const Cache & kv, long) -> decltype(std::make_pair(kv.n_rot_k, kv.n_rot_v)) {
        return { kv.n_rot_k, kv.n_rot_v };
    }

    static uint64_t layout(const llama_kv_cache & kv) {
        uint64_t h = kv_block_mix(kv.layers.size(), kv.v_trans);
        const auto rotated = rotation(kv, 0);
        h = kv_block_mix(h, rotated.first);
        h = kv_block_mix(h, rotated.second);
        for (const auto & layer : kv.layers) {
            h = kv_block_mix(h, layer.il);
            h = kv_block_mix(h, layer.k->type);
            h = kv_block_mix(h, k_row(kv, layer));
            h = kv_block_mix(h, layer.v ? (uint64_t) layer.v->type : ~0ull);
            h = kv_block_mix(h, v_row(kv, layer));
        }
        return h;
    }

    template <typename Layer> static size_t k_row(const llama_kv_cache & kv, const Layer & layer) {
        return ggml_row_size(layer.k->type, kv.hparams.n_embd_k_gqa(layer.il));
    }

    template <typename Layer> static size_t v_row(const llama_kv_cache & kv, const Layer & layer) {
        return layer.v ? ggml_row_size(layer.v->type, kv.hparams.n_embd_v_gqa(layer.il)) : 0;
    }

    // Returns the host memory type for the first layer that is not in host memory, nullptr when there is none.
    static ggml_backend_buffer_type_t host_buft(const llama_kv_cache & kv) {
        for (const auto & layer : kv.layers) {
            const auto buft = ggml_backend_buffer_get_type(buffer_of(layer.k));
            const auto dev  = ggml_backend_buft_get_device(buft);
            if (!is_host(layer.k) && dev) {
                return ggml_backend_dev_host_buffer_type(dev);
            }
        }
        return nullptr;
    }

    // An index has keys only: where its cache has memory for V, nothing is ever written there.
    static size_t row_size(const kv_block_caches & caches) {
        size_t size = 0;
        for (const auto & layer : caches.rows->layers) {
            size += k_row(*caches.rows, layer) + v_row(*caches.rows, layer);
        }
        if (caches.index) {
            for (const auto & layer : caches.index->layers) {
                size += k_row(*caches.index, layer);
            }
        }
        return size;
    }

    // How a block is copied. set_tensor() sets the fields that depend on the tensor.
    struct copy_params {
        ggml_backend_sched_t sched;
        bool                 to_host;
        bool                 streamed; // with kv_block_stream()
        llama_kv_traffic *   traffic;  // nullptr: not counted
        ggml_backend_t       backend = nullptr; // of the tensor; nullptr when none of the graph's backends has its memory
        bool                 in_host = true;    // the tensor is in host memory
    };

    // Rows of some layers, or transposed rows of one, and their place in host memory.
    struct copy_part {
        llama_kv_band      band;
        uint32_t           n_columns; // transposed: channels of a row; 0: contiguous
        uint8_t *          data;
        llama_kv_staging * staging = nullptr; // nullptr: each run is copied by itself
    };

    static ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
        return t->view_src ? t->view_src->buffer : t->buffer;
    }

    static bool is_host(const ggml_tensor * t) {
        return ggml_backend_buffer_is_host(buffer_of(t));
    }

    // Waits for the graph where the host copies the rows of some layer itself.
    void synchronize_host(const std::vector<copy_part> & parts) const {
        if (std::any_of(parts.begin(), parts.end(), [](const copy_part & part) { return is_host(part.band.tensor); })) {
            ctx->synchronize();
        }
    }

    // Finds the backend whose queue has the graph's work on this tensor: copies in that queue need no fence.
    static void set_tensor(copy_params & params, const ggml_tensor * t) {
        const auto buft = ggml_backend_buffer_get_type(buffer_of(t));
        params.in_host = is_host(t);
        params.backend = nullptr;
        for (int i = 0; !params.in_host && params.sched && i < ggml_backend_sched_get_n_backends(params.sched); ++i) {
            const auto backend = ggml_backend_sched_get_backend(params.sched, i);
            if (ggml_backend_get_default_buffer_type(backend) == buft) {
                params.backend = backend;
            }
        }
    }

    // Copies all rows of all layers between the cells and `data`, whose layout does not depend on the cells.
    void copy(const std::vector<uint32_t> & cells_of_rows, uint8_t * data, bool to_host) {
        const uint32_t n_rows = (uint32_t) cells_of_rows.size();
        auto parts = parts_of(n_rows, data);
        synchronize_host(parts);
        auto runs = kv_block_runs(cells_of_rows);
        // in the order of the cells, so that memory is accessed in one direction
        std::sort(runs.begin(), runs.end(), [](const kv_block_run & a, const kv_block_run & b) { return a.cell < b.cell; });
        auto * state = kv.block_state.get();
        copy_params params { ctx->get_sched(), to_host, to_host || n_rows*row_size({ {}, &kv, index }) >= KV_BLOCK_STREAMED, state ? &state->traffic : nullptr };
        parts = joined(params, parts, n_rows);
        for (auto & part : parts) {
            set_tensor(params, part.band.tensor);
            if (state && params.backend && runs.size() > KV_BLOCK_FEW_RUNS) {
                auto & staging = state->staging_of(params.backend);
                const bool exact = part.n_columns > 0 ? staging.copies_columns(n_rows, part.band.tensor->type) : staging.copies_rows(n_rows*part.band.n, part.band.row);
                part.staging = exact ? &staging : nullptr;
            }
        }
        llama_kv_staging * current = nullptr; // a device's layers follow each other
        for (const auto & part : parts) {
            set_tensor(params, part.band.tensor);
            if (current && current != part.staging) {
                current->end();
            }
            if (part.staging && current != part.staging) {
                part.staging->begin(cells_of_rows, to_host);
            }
            current = part.staging;
            if (current && part.n_columns > 0) {
                current->columns(part.band.tensor, part.n_columns, cells().size(), part.data);
            } else if (current) {
                current->rows(part.band, part.data);
            } else if (part.n_columns > 0) {
                const size_t el = ggml_type_size(part.band.tensor->type);
                copy_columns(params, part.band.tensor, runs, { part.n_columns, el, cells().size()*el, n_rows*el }, part.data);
            } else {
                copy_rows(params, part.band, runs, n_rows, part.data);
            }
        }
        if (current) {
            current->end();
        }
        kv_block_stream_end();
    }

    // Returns K of all layers, then V of all layers, then the keys of the index.
    std::vector<copy_part> parts_of(uint32_t n_rows, uint8_t * data) const {
        std::vector<copy_part> parts;
        for (const auto & layer : kv.layers) {
            parts.push_back({ { layer.k_stream[strm], k_row(kv, layer) }, 0, data });
            data += parts.back().band.row*n_rows;
        }
        for (const auto & layer : kv.layers) {
            if (layer.v) {
                const uint32_t n_columns = kv.v_trans ? kv.hparams.n_embd_v_gqa(layer.il) : 0;
                parts.push_back({ { layer.v_stream[strm], v_row(kv, layer) }, n_columns, data });
                data += parts.back().band.row*n_rows;
            }
        }
        for (size_t i = 0; index && i < index->layers.size(); ++i) {
            const auto & layer = index->layers[i];
            parts.push_back({ { layer.k_stream[strm], k_row(*index, layer) }, 0, data });
            data += parts.back().band.row*n_rows;
        }
        return parts;
    }

    // Joins layers whose rows are at equal distances in one buffer of a device: one strided copy has the rows of all of them.
    static std::vector<copy_part> joined(copy_params & params, const std::vector<copy_part> & parts, uint32_t n_rows) {
        std::vector<copy_part> res;
        for (const auto & part : parts) {
            set_tensor(params, part.band.tensor);
            if (res.empty() || part.n_columns > 0 || !params.backend || !extend(res.back(), part, llama_kv_staging::max_extent(params.backend), n_rows)) {
                res.push_back(part);
            }
        }
        return res;
    }

    // Adds one more layer to a band if it is where the next one has to be.
    static bool extend(copy_part & part, const copy_part & next, size_t max_extent, uint32_t n_rows) {
        auto & band = part.band;
        const auto * last = (const uint8_t *) band.tensor->data + (band.n - 1)*band.distance;
        const auto * data = (const uint8_t *) next.band.tensor->data;
        if (part.n_columns > 0 || next.band.row != band.row || buffer_of(next.band.tensor) != buffer_of(band.tensor) || data <= last) {
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

    static void copy_rows(const copy_params & params, const llama_kv_band & band, const std::vector<kv_block_run> & runs, uint32_t n_rows, uint8_t * data) {
        const size_t row = band.row;
        ggml_context * ctx = band.n > 1 ? ggml_init({ ggml_tensor_overhead(), nullptr, true }) : nullptr;
        ggml_tensor  * t   = tensor_of(ctx, band);
        for (const auto & r : runs) {
            const size_t offset = r.cell*row, size = r.n*row;
            uint8_t * host = data + r.row*row;
            GGML_ASSERT(offset + size + (band.n - 1)*band.distance <= ggml_nbytes(t));
            if (params.in_host) {
                uint8_t * cell = (uint8_t *) t->data + offset;
                uint8_t * dst  = params.to_host ? host : cell;
                uint8_t * src  = params.to_host ? cell : host;
                params.streamed ? kv_block_stream(dst, src, size) : (void) memcpy(dst, src, size);
                continue;
            }
            count(params, size*band.n);
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

    // Returns a tensor with the memory from the first tensor of a band to its last one.
    static ggml_tensor * tensor_of(ggml_context * ctx, const llama_kv_band & band) {
        if (band.n == 1) {
            return band.tensor;
        }
        ggml_tensor * res = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (band.n - 1)*band.distance + ggml_nbytes(band.tensor));
        const auto status = ggml_backend_tensor_alloc(buffer_of(band.tensor), res, band.tensor->data);
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);
        return res;
    }

    static void count(const copy_params & params, size_t size) {
        if (params.traffic) {
            params.traffic->add(size);
        }
    }

    // Transposed V: a column has one element of each row.
    struct columns_layout {
        uint32_t n;        // columns: channels of a row
        size_t   el;       // bytes of one element
        size_t   stride_t; // bytes from a column to the next one in the tensor
        size_t   stride_d; // bytes from a column to the next one in the copy
    };

    // Copies transposed V with one strided copy for each run.
    static void copy_columns(const copy_params & params, ggml_tensor * t, const std::vector<kv_block_run> & runs, const columns_layout & layout, uint8_t * data) {
        if (params.in_host) {
            copy_columns_host(params.to_host, (uint8_t *) t->data, runs, layout, data);
            return;
        }
        for (const auto & r : runs) {
            const size_t offset = r.cell*layout.el, size = r.n*layout.el;
            uint8_t * host = data + r.row*layout.el;
            count(params, size*layout.n);
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

    // Copies a few columns at a time: more of them would not stay in the processor's first cache, with fewer the time per
    // run is most of the time.
    static void copy_columns_host(bool to_host, uint8_t * columns, const std::vector<kv_block_run> & runs, const columns_layout & layout, uint8_t * data) {
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
                to_host ? kv_block_columns({ a, stride_d }, { b, stride_t }, r.n*el, n) : kv_block_columns({ b, stride_t }, { a, stride_d }, r.n*el, n);
            }
        }
    }

    uint32_t evict(llama_pos p0, llama_pos p1) {
        if (index) {
            evict(*index, p0, p1);
        }
        return evict(kv, p0, p1);
    }

    // Does what llama_kv_cache::seq_rm() does, in as many steps as the range has rows instead of all cells.
    uint32_t evict(llama_kv_cache & cache, llama_pos p0, llama_pos p1) const {
        auto & c = cache.v_cells[strm];
        const auto & rows = c.seq_pos_get(seq);
        std::vector<uint32_t> found;
        for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
            found.push_back(it->second);
        }
        for (const uint32_t cell : found) {
            if (c.seq_rm(cell, seq)) { // the cell is empty now: the search for empty cells starts there
                cache.v_heads[strm] = std::min(cache.v_heads[strm], cell);
            }
        }
        return (uint32_t) found.size();
    }

    // Returns an empty cell for every row of the block, in row order; nothing if there are too few.
    std::vector<uint32_t> place(const llama_kv_block & block, bool same, int32_t & n_same) {
        auto & c = cells();
        const uint32_t none = std::numeric_limits<uint32_t>::max();
        std::vector<uint32_t> res(block.n_rows(), none);
        std::vector<bool> taken(c.size(), false);
        n_same = 0;
        for (uint32_t i = 0; same && i < res.size(); ++i) {
            const uint32_t cell = block.cells[i];
            if (cell < c.size() && is_empty(cell) && !taken[cell]) {
                res[i] = cell;
                taken[cell] = true;
                n_same++;
            }
        }
        const auto free = free_cells(taken, (uint32_t) res.size() - n_same);
        uint32_t next = 0;
        for (auto & cell : res) {
            if (cell != none) {
                continue;
            }
            if (next == free.size()) {
                return {};
            }
            cell = free[next++];
        }
        return res;
    }

    // Returns the first contiguous run of n empty cells, or else the n lowest empty cells, fewer if there are fewer.
    std::vector<uint32_t> free_cells(const std::vector<bool> & taken, uint32_t n) {
        auto & c = cells();
        std::vector<uint32_t> lowest;
        uint32_t run = 0;
        for (uint32_t i = 0; n > 0 && i < c.size(); ++i) {
            const bool ok = is_empty(i) && !taken[i];
            run = ok ? run + 1 : 0;
            if (ok && lowest.size() < n) {
                lowest.push_back(i);
            }
            if (run == n) {
                for (uint32_t j = 0; j < n; ++j) {
                    lowest[j] = i + 1 - n + j;
                }
                return lowest;
            }
        }
        return lowest;
    }

    // Writes the rows of a block into these cells, each row `shift` positions after the position it was saved from.
    void write(const llama_kv_block & block, const std::vector<uint32_t> & target, llama_pos shift) {
        copy(target, block.data, false);
        occupy(cells(), block, target, shift);
        if (index) {
            occupy(index->v_cells[strm], block, target, shift);
        }
    }

    void occupy(llama_kv_cells & c, const llama_kv_block & block, const std::vector<uint32_t> & target, llama_pos shift) const {
        for (uint32_t i = 0; i < block.n_rows(); ++i) {
            c.pos_set(target[i], block.pos[i]);
            llama_kv_cell_ext ext;
            ext.x   = block.x[i];
            ext.y   = block.y[i];
            ext.tok = block.tok[i];
            c.ext_set(target[i], ext);
            c.seq_add(target[i], seq);
            if (shift != 0) {
                c.pos_add(target[i], shift);
            }
        }
    }
};

bool llama_kv_block_place(const llama_kv_block_state * state, const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & chosen) {
    return state && state->together && llama_kv_place(cells, ubatch, chosen);
}

void llama_kv_block_enable(llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    for (auto * kv : { caches.rows, caches.index }) {
        if (kv) {
            llama_kv_block_access::enable(*kv);
        }
    }
}

llama_kv_traffic llama_kv_block_traffic(const llama_context * ctx) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? llama_kv_block_access::traffic(*kv) : llama_kv_traffic();
}

const char * llama_kv_block_unsupported(const llama_context * ctx) {
    if (ctx && ctx->get_model().split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "each row is split over devices (--split-mode tensor): choose --split-mode layer, row or none";
    }
    const auto * kv = kv_block_cache(ctx);
    return kv ? llama_kv_block_access::unsupported(*kv) : kv_block_no_cache(ctx);
}

llama_kv_cache * llama_kv_block_find(const llama_context * ctx) {
    return kv_block_cache(ctx);
}

std::vector<int32_t> llama_kv_block_layers(const llama_context * ctx) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? llama_kv_block_access::layers(*kv) : std::vector<int32_t>();
}

llama_kv_block_memory llama_kv_block_kind(const llama_context * ctx) {
    return kv_block_find(ctx).kind;
}

// Hashes how positions become angles and how attention is computed: rows of another set-up cannot be used.
static uint64_t kv_block_rope(const llama_context * ctx) {
    const auto & c = ctx->get_cparams();
    uint64_t h = kv_block_mix(c.n_ctx_orig_yarn, c.n_ctx_seq > c.n_ctx_orig_yarn); // longrope depends on the latter
    h = kv_block_mix(h, (uint64_t) c.rope_scaling_type);
    h = kv_block_mix(h, c.causal_attn);
    h = kv_block_mix(h, c.flash_attn);
    for (const float value : { c.rope_freq_base, c.rope_freq_scale, c.yarn_ext_factor, c.yarn_attn_factor, c.yarn_beta_fast, c.yarn_beta_slow }) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        h = kv_block_mix(h, bits);
    }
    return h;
}

int32_t llama_kv_block_rope_limit(const llama_context * ctx) {
    const auto & model = ctx->get_model();
    const int32_t limit = (int32_t) model.hparams.n_ctx_orig_yarn;
    const bool chosen = std::any_of(model.layers.begin(), model.layers.end(), [](const auto & layer) {
        return layer.rope_long && !layer.rope_freqs; // as llama_model::get_rope_factors() chooses
    });
    return chosen && (int64_t) ctx->get_cparams().n_ctx_seq <= limit ? limit : 0;
}

uint64_t llama_kv_block_layout(const llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    if (!caches.rows) {
        return 0;
    }
    const uint64_t h = kv_block_mix(llama_kv_block_access::layout(*caches.rows), kv_block_rope(ctx));
    return caches.index ? kv_block_mix(h, llama_kv_block_access::layout(*caches.index)) : h;
}

uint64_t llama_kv_block_adapter_id(const llama_adapter_lora * adapter) {
    const std::map<std::string, llama_adapter_lora_weight> weights(adapter->ab_map.begin(), adapter->ab_map.end()); // sorted, because the hash must not depend on the order of a hash map
    uint32_t alpha;
    memcpy(&alpha, &adapter->alpha, sizeof(alpha));
    uint64_t h = kv_block_mix(weights.size(), alpha);
    const auto add = [&](const uint8_t * p, size_t n) {
        h = kv_block_mix(h, n);
        for (uint64_t word = 0; n > 0; word = 0) {
            const size_t size = std::min(n, sizeof(word));
            memcpy(&word, p, size);
            h = kv_block_mix(h, word);
            p += size;
            n -= size;
        }
    };
    for (const auto & [name, weight] : weights) {
        add((const uint8_t *) name.data(), name.size());
        for (const ggml_tensor * t : { weight.a, weight.b }) {
            std::vector<uint8_t> data(ggml_nbytes(t));
            ggml_backend_tensor_get(t, data.data(), 0, data.size());
            h = kv_block_mix(h, (uint64_t) t->type);
            for (const int64_t size : t->ne) {
                h = kv_block_mix(h, (uint64_t) size);
            }
            add(data.data(), data.size());
        }
    }
    for (const llama_token token : adapter->alora_invocation_tokens) {
        h = kv_block_mix(h, (uint32_t) token);
    }
    return h;
}

ggml_backend_buffer_type_t llama_kv_block_host_buft(const llama_context * ctx) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? llama_kv_block_access::host_buft(*kv) : nullptr;
}

void llama_kv_block_fence(llama_context * ctx) {
    ctx->synchronize();
}

size_t llama_kv_block_row_size(const llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    return caches.rows ? llama_kv_block_access::row_size(caches) : 0;
}

uint32_t llama_kv_block_n_cells(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? kv->get_cells(seq).size() : 0;
}

uint32_t llama_kv_block_n_free(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? kv->get_cells(seq).size() - kv->get_cells(seq).get_used() : 0;
}

uint32_t llama_kv_block_n_rows(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    return kv ? (uint32_t) kv->get_cells(seq).seq_pos_get(seq).size() : 0;
}

llama_kv_extent llama_kv_block_extent(const llama_context * ctx, llama_seq_id seq) {
    const auto * kv = kv_block_cache(ctx);
    if (!kv) {
        return {};
    }
    const auto & cells = kv->get_cells(seq);
    return { (int32_t) cells.seq_pos_get(seq).size(), cells.seq_pos_min(seq), cells.seq_pos_max(seq) };
}

static llama_kv_ranges kv_block_ranges(const llama_context * ctx, llama_seq_id seq, bool shared_only) {
    llama_kv_ranges res;
    const auto * kv = kv_block_cache(ctx);
    if (!kv) {
        return res;
    }
    const auto & cells = kv->get_cells(seq);
    for (const auto & [pos, cell] : cells.seq_pos_get(seq)) {
        if (shared_only && cells.seq_count(cell) < 2) {
            continue;
        }
        if (!res.empty() && res.back().second >= pos) {
            res.back().second = pos + 1;
        } else {
            res.push_back({ pos, pos + 1 });
        }
    }
    return res;
}

llama_kv_ranges llama_kv_block_resident(const llama_context * ctx, llama_seq_id seq) {
    return kv_block_ranges(ctx, seq, false);
}

llama_kv_ranges llama_kv_block_shared_ranges(const llama_context * ctx, llama_seq_id seq) {
    return kv_block_ranges(ctx, seq, true);
}

bool llama_kv_block_shared(const llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto * kv = kv_block_cache(ctx);
    if (!kv) {
        return false;
    }
    const auto & cells = kv->get_cells(seq);
    const auto & rows  = cells.seq_pos_get(seq);
    for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
        if (cells.seq_count(it->second) > 1) {
            return true;
        }
    }
    return false;
}

// Rotates keys whose positions have moved, before rows are copied.
static void kv_block_apply_shift(llama_context * ctx, const llama_kv_cache & kv) {
    if (kv.get_has_shift()) {
        ctx->memory_update(false);
    }
}

bool llama_kv_block_save(llama_context * ctx, llama_seq_id seq, llama_kv_range range, uint8_t * data, llama_kv_block & out) {
    const auto caches = kv_block_find(ctx);
    if (!caches.rows) {
        return false;
    }
    kv_block_apply_shift(ctx, *caches.rows);
    llama_kv_block_access access(ctx, caches, seq);
    const auto & cells = access.cells();
    const auto & rows  = cells.seq_pos_get(seq);
    const auto [p0, p1] = range;

    llama_kv_block block;
    for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
        block.pos  .push_back(it->first);
        block.cells.push_back(it->second);
        const auto & ext = cells.ext_get(it->second);
        block.tok  .push_back(ext.tok);
        block.x    .push_back(ext.x);
        block.y    .push_back(ext.y);
    }
    if (block.pos.empty() || (llama_pos) block.pos.size() != p1 - p0 || !access.indexed(p0, p1)) {
        return false;
    }
    block.p0     = p0;
    block.p1     = p1;
    block.layout = llama_kv_block_layout(ctx);
    block.size   = llama_kv_block_access::row_size(caches)*block.n_rows();
    block.data   = data;

    block.n_runs = (uint32_t) kv_block_runs(block.cells).size();
    access.copy(block.cells, block.data, true);
    out = std::move(block);
    return true;
}

uint32_t llama_kv_block_evict(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto caches = kv_block_find(ctx);
    return caches.rows ? llama_kv_block_access(ctx, caches, seq).evict(p0, p1) : 0;
}

int32_t llama_kv_block_load(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, bool same) {
    const auto caches = kv_block_find(ctx);
    if (!caches.rows || block.layout != llama_kv_block_layout(ctx)) {
        return -1;
    }
    kv_block_apply_shift(ctx, *caches.rows);
    llama_kv_block_access access(ctx, caches, seq);
    int32_t n_same = 0;
    const auto target = access.place(block, same, n_same);
    if (target.empty()) {
        return -1;
    }
    access.write(block, target, 0);
    return n_same;
}

bool llama_kv_block_can_shift(const llama_context * ctx) {
    const auto caches = kv_block_find(ctx);
    const auto & kind = caches.kind;
    return caches.rows && !kind.windowed && !kind.recurrent && !kind.indexed && caches.rows->get_can_shift();
}

uint32_t llama_kv_block_compact(llama_context * ctx, llama_seq_id seq) {
    auto * kv = kv_block_cache(ctx);
    if (!kv || !llama_kv_block_can_shift(ctx)) {
        return 0;
    }
    uint32_t  n_moved = 0;
    llama_pos end     = 0; // of the rows that are contiguous already
    for (const auto & [p0, p1] : llama_kv_block_resident(ctx, seq)) {
        if (p0 > end) {
            kv->seq_add(seq, p0, p1, end - p0);
            n_moved += p1 - p0;
        }
        end += p1 - p0;
    }
    return n_moved;
}

int32_t llama_kv_block_insert(llama_context * ctx, llama_seq_id seq, const llama_kv_block & block, llama_pos at) {
    auto * kv = kv_block_cache(ctx);
    if (!kv || !llama_kv_block_can_shift(ctx) || at < 0 || block.layout != llama_kv_block_layout(ctx)) {
        return -1;
    }
    kv_block_apply_shift(ctx, *kv);
    llama_kv_block_access access(ctx, kv_block_find(ctx), seq);
    int32_t n_same = 0;
    const auto target = access.place(block, true, n_same);
    if (target.empty()) {
        return -1;
    }
    kv->seq_add(seq, at, -1, block.p1 - block.p0);
    access.write(block, target, at - block.p0);
    return n_same;
}

llama_cparams llama_kv_block_unscaled(const llama_cparams & cparams, float freq_scale) {
    llama_cparams res = cparams;
    // inverts the factor of the interpolated part, see rope_yarn() in ggml
    res.yarn_attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)) : 1.0f;
    return res;
}
