#pragma once

// Blocks of a slot's KV cache, saved in host memory: save, evict, load, adopt, plans, a budget per slot.
//
// server_context_impl owns one `server_blocks` and calls its on_* functions from one-line hooks. This class wires the
// parts that do the work:
//
//   server_blocks_context     the context and the state of its slots        server-blocks-context.h, -slot.h, -history.h
//   server_blocks_store       saved copies in host memory and on disk       server-blocks-store.h, -memory.h, -copy-files.h, ...
//   server_blocks_capture     attention of the model                        server-blocks-capture.h
//   server_blocks_transfer    rows between cells and the store              server-blocks-transfer.h
//   server_blocks_draft       draft context of speculative decoding         server-blocks-draft.h
//   server_blocks_eviction    budgets, --ctx-logical, --kv-eviction         server-blocks-eviction.h, -modes.h
//   server_blocks_calls       the block calls and plans                     server-blocks-calls.h, -plan.h
//   server_blocks_render      messages in a rendered prompt                 server-blocks-render.h
//   (functions)               images and sounds in a text                   server-blocks-media.h
//   server_blocks_renderings  rendered requests that are forwarded soon     server-blocks-renderings.h
//
// Owns: all of these. Each is declared after those it uses.
// Threads: the main loop, between two decodes, except the functions marked "any thread".
// Invariant: without --evoke-ram every hook returns what upstream would have used.

#include "server-blocks-calls.h"
#include "server-blocks-capture.h"
#include "server-blocks-context.h"
#include "server-blocks-eviction.h"
#include "server-blocks-fence.h"
#include "server-blocks-json.h"
#include "server-blocks-media.h"
#include "server-blocks-render.h"
#include "server-blocks-renderings.h"
#include "server-blocks-store.h"
#include "server-blocks-transfer.h"
#include "server-task.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

class server_blocks {
public:
    // ---- set-up

    // Turns off options that cannot be combined with blocks, before the context is created.
    static void adjust(common_params & params);

    // Reads --evoke-ram and prepares all parts. `ctx_dft`: the draft context of speculative decoding, or nullptr.
    // `n_draft_max`: most tokens of a draft, 0 without speculative decoding.
    void init(llama_context * ctx, const common_params & params, llama_context * ctx_dft, int32_t n_draft_max);

    // Reads --ctx-logical and --kv-eviction, for slots that would have n_ctx tokens. Returns false, with the reason in
    // the log, when they cannot work.
    bool set_modes(const common_params & params, int32_t n_ctx) { return eviction.set_modes(params, n_ctx, unsupported); }

    // Any thread: whether blocks are on.
    bool enabled() const { return active; }

    // Returns the tokens of a slot where they may be more than its cells, else 0.
    int32_t n_ctx_logical() const { return eviction.modes().on() ? eviction.modes().n_ctx : 0; }

    // Returns the part of /props that describes block calls, null without --evoke-ram.
    json props() const;

    // ---- hooks: choice of a slot

    // Returns whether some idle slot is not reserved, for a request that names no slot.
    template <typename Slots> bool has_unreserved(const server_task & task, const Slots & slots) const {
        for (const auto & slot : slots) {
            if (enabled() && task.id_slot == -1 && !slot.is_processing() && !is_reserved(slot.id)) {
                return true;
            }
        }
        return false;
    }

    bool is_reserved(int id) const { return enabled() && context.slots[id].is_reserved(); }

    // Called before an idle slot is emptied because others need its cells. Returns true if the caller must empty another
    // slot instead, because this one is reserved and that one is not. Else saves the rows of a reserved slot.
    template <typename Slots> bool keep_idle(int id, const server_prompt & prompt, const Slots & slots) {
        if (!is_reserved(id) || prompt.n_tokens() == 0) {
            return false;
        }
        for (const auto & slot : slots) {
            if (!slot.is_processing() && !is_reserved(slot.id) && slot.prompt.n_tokens() > 0) {
                return true;
            }
        }
        eviction.save_rows(id, prompt);
        return false;
    }

    // ---- hooks: a request

    // Any thread: returns `convert`, which converts request bodies, with the fields that block calls use kept.
    template <typename Convert> auto keeping_fields(Convert convert) const {
        return [this, convert](const json & from) {
            json to = convert(from);
            if (enabled()) {
                server_blocks_copy_fields(from, to);
            }
            return to;
        };
    }

    // Any thread: reads the marker of a request body, and turns off options of the request that need all rows.
    void on_task(server_task & task, const json & data) const;

    // Returns how many of the n_past tokens of the common prefix are reused. Only a request that names the slot's epoch
    // reuses a prefix with missing rows.
    int32_t on_prompt(int id, const server_task & task, int32_t n_past, const std::vector<common_adapter_lora_info> & adapters);

    // Returns n_past, reduced to the end of a resident range.
    int32_t clip(int id, int32_t n_past) const { return enabled() ? context.slots[id].clip(n_past) : n_past; }

    bool is_resident(int id, llama_pos pos) const {
        return !enabled() || context.slots[id].is_irregular() || context.slots[id].is_resident(pos);
    }

    // Called when the tokens from n_past on are removed; corrects the count of reused tokens in `stats`.
    void on_start(int id, int32_t n_past, server_slot_stats & stats);

    // See server_blocks_eviction::make_room(). Makes the draft context ready for as many tokens as it returns.
    int32_t make_room(int id, const server_prompt & prompt, int32_t n_wanted, bool others_decode = false) {
        if (!enabled() || n_wanted <= 0) {
            return n_wanted;
        }
        if (context.draft.on()) {
            context.slots[id].on_draft_refused();
        }
        const int32_t n = eviction.make_room(id, prompt, n_wanted, others_decode);
        if (n > 0) {
            prepare_draft(id, prompt);
        }
        return n;
    }

    // Returns how many tokens of a draft may be decoded together with the last token of the slot's text.
    int32_t draft_room(int id, const server_prompt & prompt, size_t n_draft) { return make_room(id, prompt, 1 + (int32_t) n_draft) - 1; }

    // Called before the rows of an image or a sound are decoded, all of them together.
    void on_media(int id, const server_prompt & prompt, const mtmd_input_chunk * chunk);

    void on_decoded();
    void on_first_token(int id, const server_task & task, const server_slot_stats & stats);

    // Called when the turn is over: puts its token accounting into the timings of the reply.
    void on_final(int id, server_slot_stats & stats);

    // ---- hooks: cells

    // Called when the slot's cells were emptied or replaced.
    void on_clear(int id);

    // Called before the rows of a slot are copied into slot `id`.
    void on_copy(int from, int id);

    // ---- block calls

    // See server_blocks_calls::run().
    json run(server_blocks_call & call, const std::vector<server_blocks_slot> & slots) { return calls.run(call, slots); }

    // Any thread except the main loop.
    void do_disk_work(server_blocks_call & call) { calls.do_disk_work(call); }
    void refresh_disk() { store.refresh_disk(); }

    // Any thread: rendered requests that are forwarded soon.
    server_blocks_renderings renderings;

private:
    void prepare_draft(int id, const server_prompt & prompt);
    uint64_t adapters_hash(const std::vector<common_adapter_lora_info> & adapters);

    std::atomic<bool>      active { false };      // block calls work
    const char *           unsupported = nullptr; // why they do not although there is --evoke-ram
    server_blocks_fence    fence;
    server_blocks_context  context;
    server_blocks_store    store    { fence };
    server_blocks_capture  capture  { context, store };
    server_blocks_transfer transfer { context, store, capture, fence };
    server_blocks_eviction eviction { context, store, transfer, capture };
    server_blocks_calls    calls    { { context, store, transfer, capture, eviction } };
    std::map<const llama_adapter_lora *, uint64_t> adapter_ids; // llama_kv_block_adapter_id() of each
};
