#include "llama-kv-range.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <typeinfo>

namespace {

// Returns the first contiguous run of n empty cells, or else the n lowest empty cells, fewer if there are fewer.
template <typename IsEmpty> std::vector<uint32_t> kv_range_empty(uint32_t n_cells, uint32_t n, IsEmpty is_empty) {
    std::vector<uint32_t> lowest;
    uint32_t run = 0;
    for (uint32_t i = 0; n > 0 && i < n_cells; ++i) {
        const bool ok = is_empty(i);
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

// Writes a state to a buffer; without one it only counts.
class kv_range_write : public llama_io_write_i {
public:
    kv_range_write(uint8_t * dst, size_t size) : dst(dst), size(size) {}

    void write(const void * src, size_t n) override {
        if (uint8_t * to = next(n)) {
            memcpy(to, src, n);
        }
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        if (uint8_t * to = next(n)) {
            ggml_backend_tensor_get(tensor, to, offset, n);
        }
    }

    size_t n_bytes() override { return written; }

private:
    uint8_t * next(size_t n) {
        written += n;
        if (dst && written > size) {
            throw std::runtime_error("the buffer is too small");
        }
        return dst ? dst + written - n : nullptr;
    }

    uint8_t * dst;
    size_t    size;
    size_t    written = 0;
};

// Reads a state from a buffer. Writes to tensors when all of the state has been read.
class kv_range_read : public llama_io_read_i {
public:
    kv_range_read(const uint8_t * src, size_t size) : src(src), size(size) {}

    void read(void * dst, size_t n) override { memcpy(dst, next(n), n); }
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t n) override { parts.push_back({ tensor, next(n), offset, n }); }
    size_t n_bytes() override { return n_read; }

    void apply() const {
        for (const auto & part : parts) {
            ggml_backend_tensor_set(part.tensor, part.data, part.offset, part.size);
        }
    }

private:
    struct tensor_part {
        ggml_tensor *   tensor;
        const uint8_t * data;
        size_t          offset;
        size_t          size;
    };

    const uint8_t * next(size_t n) {
        if (n > size - n_read) {
            throw std::runtime_error("the buffer ends early");
        }
        n_read += n;
        return src + n_read - n;
    }

    const uint8_t *          src;
    size_t                   size;
    size_t                   n_read = 0;
    std::vector<tensor_part> parts;
};

// Returns the cache of a context whose sequences have all their rows in one cache, else nullptr. Pending rotations of keys
// and copies of sequences are done, and no decode is in progress, when it returns.
llama_kv_cache * kv_range_cache(llama_context * ctx, llama_seq_id seq_id) {
    auto * mem = ctx->get_memory();
    auto * kv  = mem && typeid(*mem) == typeid(llama_kv_cache) ? static_cast<llama_kv_cache *>(mem) : nullptr;
    if (!kv || seq_id < 0 || (uint32_t) seq_id >= kv->get_n_seq_max()) {
        return nullptr;
    }
    ctx->memory_update(false);
    ctx->synchronize();
    return kv;
}

} // namespace

std::vector<uint32_t> llama_kv_range_cells(const llama_kv_cells & cells, const llama_kv_cells * mirror, const std::vector<uint32_t> & wanted, bool same, int32_t & n_same) {
    bool all = same; // the usual case: all wanted cells are empty, and ascending, so that they differ
    for (uint32_t i = 0; all && i < wanted.size(); ++i) {
        const uint32_t cell = wanted[i];
        all = cell < cells.size() && (i == 0 || cell > wanted[i - 1]) && cells.is_empty(cell) && (!mirror || mirror->is_empty(cell));
    }
    if (all) {
        n_same += (int32_t) wanted.size();
        return wanted;
    }
    const uint32_t none = std::numeric_limits<uint32_t>::max();
    std::vector<uint32_t> res(wanted.size(), none);
    std::vector<bool> taken(cells.size(), false);
    const auto is_empty = [&](uint32_t i) { return cells.is_empty(i) && (!mirror || mirror->is_empty(i)) && !taken[i]; };
    uint32_t n_other = (uint32_t) wanted.size();
    for (uint32_t i = 0; same && i < wanted.size(); ++i) {
        const uint32_t cell = wanted[i];
        if (cell < cells.size() && is_empty(cell)) {
            res[i] = cell;
            taken[cell] = true;
            n_other--;
            n_same++;
        }
    }
    const auto other = kv_range_empty(cells.size(), n_other, is_empty);
    if (other.size() < n_other) {
        return {};
    }
    auto next = other.begin();
    for (auto & cell : res) {
        cell = cell == none ? *next++ : cell;
    }
    return res;
}

bool llama_kv_cache::state_write_range(llama_io_write_i & io, llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    if (other || p0 < 0 || p1 < p0) {
        return false;
    }
    const auto & cells = get_cells(seq_id);
    const auto & found = cells.seq_pos_get(seq_id);
    std::vector<llama_kv_range_row> rows;
    cell_ranges_t runs { get_stream(seq_id), {} };
    rows.reserve(std::min((size_t) (p1 - p0), found.size()));
    for (auto it = found.lower_bound({ p0, 0 }); it != found.end() && it->first < p1; ++it) {
        const uint32_t cell = it->second;
        rows.push_back({ it->first, cell, cells.ext_get(cell) });
        if (!runs.data.empty() && runs.data.back().second == cell) {
            runs.data.back().second++;
        } else {
            runs.data.emplace_back(cell, cell + 1);
        }
    }
    if (rows.size() != (size_t) (p1 - p0)) {
        return false;
    }
    const uint32_t n_rows = (uint32_t) rows.size();
    io.write(&n_rows, sizeof(n_rows));
    io.write(rows.data(), n_rows*sizeof(llama_kv_range_row));
    state_write_data(io, runs);
    return true;
}

bool llama_kv_cache::state_read_range(llama_io_read_i & io, llama_seq_id seq_id, llama_pos p0, llama_state_seq_flags flags) {
    const uint32_t strm = get_stream(seq_id);
    auto & cells = v_cells[strm];
    uint32_t n_rows;
    io.read(&n_rows, sizeof(n_rows));
    if (other || n_rows == 0 || n_rows > cells.size()) {
        return false;
    }
    std::vector<llama_kv_range_row> rows(n_rows);
    io.read(rows.data(), n_rows*sizeof(llama_kv_range_row));

    std::vector<uint32_t> wanted(n_rows);
    for (uint32_t i = 0; i < n_rows; ++i) {
        if (rows[i].pos < 0 || (i > 0 && rows[i].pos < rows[i - 1].pos)) {
            return false;
        }
        wanted[i] = rows[i].cell;
    }
    const int64_t shift = (int64_t) p0 - rows.front().pos;
    const int64_t last  = rows.back().pos + shift;
    if (p0 < 0 || last > std::numeric_limits<llama_pos>::max() || (shift != 0 && !get_can_shift())) {
        return false;
    }
    const auto & present = cells.seq_pos_get(seq_id);
    const auto   behind  = present.lower_bound({ p0, 0 });
    if (behind != present.end() && behind->first <= last) {
        return false;
    }
    int32_t n_same = 0;
    slot_info sinfo;
    sinfo.s0 = sinfo.s1 = strm;
    sinfo.strm = { (llama_seq_id) strm };
    sinfo.idxs = { llama_kv_range_cells(cells, nullptr, wanted, flags & LLAMA_STATE_SEQ_FLAGS_SAME_CELLS, n_same) };
    const auto & target = sinfo.idxs[0];
    if (target.empty() || !state_read_data(io, strm, n_rows, sinfo)) {
        return false;
    }
    for (uint32_t i = 0; i < n_rows; ++i) {
        cells.pos_set(target[i], rows[i].pos);
        cells.ext_set(target[i], rows[i].ext);
        cells.seq_add(target[i], seq_id);
        if (shift != 0) {
            cells.pos_add(target[i], (llama_pos) shift);
        }
    }
    return true;
}

size_t llama_state_seq_get_range(llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1, uint8_t * dst, size_t size) {
    const auto * kv = kv_range_cache(ctx, seq_id);
    kv_range_write io(dst, size);
    try {
        return kv && p0 < p1 && kv->state_write_range(io, seq_id, p0, p1) ? io.n_bytes() : 0;
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: error saving rows: %s\n", __func__, err.what());
        return 0;
    }
}

size_t llama_state_seq_set_range(llama_context * ctx, llama_seq_id dest_seq_id, const uint8_t * src, size_t size, llama_pos p0, llama_state_seq_flags flags) {
    auto * kv = kv_range_cache(ctx, dest_seq_id);
    kv_range_read io(src, size);
    try {
        if (!kv || !kv->state_read_range(io, dest_seq_id, p0, flags)) {
            return 0;
        }
        io.apply();
        return io.n_bytes();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: error loading rows: %s\n", __func__, err.what());
        return 0;
    }
}
