#include "server-blocks.h"

#include "server-blocks-flags.h"
#include "server-blocks-hash.h"
#include "server-blocks-media.h"
#include "server-blocks-upstream.h"

#include "common.h"
#include "log.h"
#include "mtmd.h"

#include <algorithm>
#include <cstring>

//
// set-up
//

void server_blocks::adjust(common_params & params) {
    if (server_blocks_flags::of(params).ram_mib <= 0) {
        return;
    }
    if (params.cache_ram_mib != 0 || params.cache_idle_slots || params.ctx_shift) {
        LOG_INF("evoke: --evoke-ram implies --cache-ram 0, --no-cache-idle-slots and no context shift\n");
    }
    // The RAM cache would copy slots with missing rows to other slots, and a context shift would renumber positions.
    params.cache_ram_mib    = 0;
    params.cache_idle_slots = false;
    params.ctx_shift        = false;
}

void server_blocks::init(llama_context * ctx, const common_params & params, llama_context * ctx_dft, int32_t n_draft_max) {
    const int n_slots = params.n_parallel;
    active = false;
    context.ctx = ctx;
    context.slots.clear();
    eviction.reset();
    renderings.clear();
    this->unsupported = nullptr;
    const auto & flags = server_blocks_flags::of(params);
    if (flags.ram_mib <= 0) {
        return;
    }
    this->unsupported = llama_kv_block_unsupported(ctx);
    if (!this->unsupported && n_draft_max > 0) {
        this->unsupported = server_blocks_draft::unsupported(params, ctx_dft);
    }
    if (server_blocks_is_decision_model(llama_get_model(ctx), 0)) {
        this->unsupported = "the model answers decisions: their outputs must be in one batch, and slots share a prompt";
    }
    if (!this->unsupported) {
        llama_kv_block_enable(ctx);
        context.memory = llama_kv_block_kind(ctx);
        context.draft.init(ctx, ctx_dft, n_draft_max, params.kv_unified ? n_slots : 1);
        server_blocks_set_projector(ctx, params, !flags.disk.empty());
        fence.reset(ctx);
        adapter_ids.clear();
        server_blocks_store::options options;
        options.ram_bytes = (size_t) flags.ram_mib*1024*1024;
        options.row_bytes = llama_kv_block_row_size(ctx);
        options.model     = server_blocks_model_id(params);
        options.layout    = llama_kv_block_layout(ctx);
        options.host_buft = llama_kv_block_host_buft(ctx);
        options.disk      = flags.disk;
        if (!llama_attn_capture_unsupported(ctx)) {
            options.key_channels = server_blocks_capture::key_channels(ctx);
        }
        this->unsupported = store.configure(options) ? nullptr : "the host refuses the memory for --evoke-ram: start with fewer MiB";
    }
    if (this->unsupported) {
        LOG_WRN("evoke: block calls do not work on this server: %s\n", this->unsupported);
        return;
    }
    // Epochs start at the time, so that a later process does not accept those of an earlier one, and stay below 2^53, so
    // that they are exact in JSON.
    context.last_epoch = std::max(context.last_epoch, ggml_time_us() & ((int64_t(1) << 52) - 1));
    const uint64_t adapters = adapters_hash(params.lora_adapters); // reads their contents now, not at the first request
    context.slots.reserve(n_slots);
    for (int id = 0; id < n_slots; ++id) {
        context.slots.emplace_back(ctx, id, !context.is_dense(), context.last_epoch);
        context.slots.back().set_adapters(adapters);
    }
    eviction.reset();
    active = true;
}

json server_blocks::props() const {
    if (!enabled()) {
        return unsupported ? json { {"version", 1}, {"instance", server_blocks_calls::instance()}, {"features", json::array()}, {"unsupported", unsupported} } : json();
    }
    const auto * ctx = context.ctx;
    json features = json::array({ "blocks", "plan", "render", "reuse", "stream", "find", "behind", "runs" });
    if (context.is_dense()) {
        features.push_back("adopt");
        features.push_back("share");
        features.push_back("probe");
    }
    if (llama_kv_block_can_shift(ctx)) {
        features.push_back("compact");
    }
    if (!llama_attn_capture_unsupported(ctx)) {
        features.push_back("attention");
    }
    if (store.disk().is_open()) {
        features.push_back("disk");
    }
    if (server_blocks_media_supported()) {
        features.push_back("media");
    }
    return json {
        {"version",  1},
        {"instance", server_blocks_calls::instance()},
        {"features", features},
        {"memory",   context.memory.name},
        {"limits",   json {
            {"ram_bytes", store.budget()},
            {"pinned",    store.pinned()},
            {"disk_bytes", store.disk().is_open() ? store.disk().limit() : 0},
            {"n_cells",   llama_kv_block_n_cells(ctx, 0)},
            {"n_slot_cells", eviction.n_slot_cells()},
            {"row_bytes", store.row_bytes()},
            {"n_slots",   context.n_slots()},
            {"n_ctx_logical", eviction.modes().n_ctx},
            {"attention", capture.props()},
        }},
        {"kv_eviction", eviction.modes().to_json()},
    };
}

//
// hooks
//

void server_blocks::on_task(server_task & task, const json & data) const {
    if (!enabled()) {
        return;
    }
    task.params.n_cache_reuse = 0; // renumbers positions and counts missing rows as reused
    if (data.contains("evoke") && data.at("evoke").is_object() && task.params.n_cmpl == 1) {
        task.evoke_epoch  = std::max<int64_t>(0, json_value(data.at("evoke"), "epoch", int64_t(0)));
        task.evoke_reused = json_value(data.at("evoke"), "reused", false);
    }
}

// Returns a hash of the adapters with their scales, 0 without one: rows cannot be used under other adapters or scales.
uint64_t server_blocks::adapters_hash(const std::vector<common_adapter_lora_info> & adapters) {
    uint64_t res = 0;
    for (const auto & adapter : adapters) {
        if (adapter.scale == 0.0f) {
            continue;
        }
        auto id = adapter_ids.find(adapter.ptr);
        if (id == adapter_ids.end()) {
            id = adapter_ids.emplace(adapter.ptr, llama_kv_block_adapter_id(adapter.ptr)).first;
        }
        uint32_t scale;
        memcpy(&scale, &adapter.scale, sizeof(scale));
        res = server_blocks_mix(server_blocks_mix(res, id->second), scale);
    }
    return res;
}

int32_t server_blocks::on_prompt(int id, const server_task & task, int32_t n_past, const std::vector<common_adapter_lora_info> & adapters) {
    if (!enabled()) {
        return n_past;
    }
    server_blocks_turn turn;
    turn.epoch     = task.evoke_epoch;
    turn.n_tokens  = task.n_tokens();
    turn.n_common  = n_past;
    turn.reused    = task.evoke_reused;
    turn.adapters  = adapters_hash(adapters);
    turn.opaque    = std::any_of(adapters.begin(), adapters.end(), [](const auto & adapter) {
        return adapter.scale != 0.0f && llama_adapter_get_alora_n_invocation_tokens(adapter.ptr) > 0;
    });
    turn.oversized = eviction.modes().on() && task.n_tokens() > eviction.modes().n_rows;
    turn.irregular = !server_blocks_media_supported() && !server_blocks_media(task.tokens).empty();
    return server_blocks_before_media(task.tokens, context.slots[id].begin_turn(turn));
}

void server_blocks::on_start(int id, int32_t n_past, server_slot_stats & stats) {
    if (enabled()) {
        stats.n_prompt_cached = context.slots[id].on_decode_start(n_past);
    }
}

void server_blocks::on_media(int id, const server_prompt & prompt, const mtmd_input_chunk * chunk) {
    const int32_t n = (int32_t) mtmd_input_chunk_get_n_tokens(chunk);
    if (enabled()) {
        eviction.make_room_for_all(id, prompt, n);
        prepare_draft(id, prompt);
    }
}

void server_blocks::prepare_draft(int id, const server_prompt & prompt) {
    if (!context.draft.on()) {
        return;
    }
    for (int slot = 0; slot < context.n_slots(); ++slot) { // others may have lost rows because this one needed cells
        if (context.slots[slot].take_evicted()) {
            context.draft.drop_evicted(slot);
        }
    }
    context.draft.prepare(id, prompt.tokens.pos_next());
}

void server_blocks::on_decoded() {
    for (int id = 0; id < context.n_slots(); ++id) {
        context.slots[id].on_decoded();
        eviction.on_decoded(id);
    }
}

void server_blocks::on_first_token(int id, const server_task & task, const server_slot_stats & stats) {
    if (enabled()) {
        context.slots[id].on_first_token(task.n_tokens(), stats.n_prompt_processed);
    }
}

void server_blocks::on_final(int id, server_slot_stats & stats) {
    if (!enabled()) {
        return;
    }
    fence.wait();
    if (auto accounting = context.slots[id].end_turn()) {
        stats.evoke = std::move(accounting);
    }
}

void server_blocks::on_clear(int id) {
    if (enabled()) {
        context.slots[id].on_clear();
        context.draft.clear(id);
    }
}

void server_blocks::on_copy(int from, int id) {
    if (enabled()) {
        context.slots[id].on_copy(context.slots[from]);
    }
}
