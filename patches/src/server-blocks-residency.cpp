#include "server-blocks-residency.h"

#include "server-blocks-ranges.h"

#include "ggml.h"

#include <cstdlib>

// Tests compare every answer with the cells.
static bool is_tested() {
    static const bool tested = getenv("LLAMA_EVOKE_ROW_SUMS") != nullptr;
    return tested;
}

const llama_kv_ranges & server_blocks_residency::ranges() const {
    const auto    now    = llama_kv_block_extent(ctx, id);
    const int32_t n_more = now.n_rows - extent.n_rows;
    if (valid && n_more > 0 && now.first == extent.first && now.last == extent.last + n_more) {
        server_ranges_add(present, extent.last + 1, now.last + 1); // decoded since the last call
        extent = now;
    }
    if (!valid || now != extent) {
        return read();
    }
    GGML_ASSERT(!is_tested() || present == llama_kv_block_resident(ctx, id));
    return present;
}

const llama_kv_ranges & server_blocks_residency::read() const {
    present = llama_kv_block_resident(ctx, id);
    extent  = llama_kv_block_extent(ctx, id);
    valid   = server_ranges_size(present) == extent.n_rows; // else rows share positions (M-RoPE): how many there are says less
    return present;
}

void server_blocks_residency::on_evicted(llama_pos p0, llama_pos p1) {
    server_ranges_remove(present, p0, p1);
    check();
}

void server_blocks_residency::on_loaded(llama_pos p0, llama_pos p1) {
    server_ranges_add(present, p0, p1);
    check();
}

void server_blocks_residency::check() {
    extent = llama_kv_block_extent(ctx, id);
    valid  = valid && server_ranges_size(present) == extent.n_rows;
}
