#pragma once

// Blocks of a slot's KV cache, kept in host memory: save, evict, load, adopt, plans, a budget per slot.
//
// server_context_impl owns one `server_blocks` and calls its on_* functions from one-line hooks.
// Everything here runs on the main loop, between two decodes, except what is marked otherwise.
// Off unless --evoke-ram is given: then every hook returns what upstream would have used.

#include "llama-attn-capture.h"
#include "llama-kv-block.h"
#include "server-blocks-arena.h"
#include "server-blocks-disk.h"
#include "server-blocks-history.h"
#include "server-blocks-modes.h"
#include "server-task.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// what a block call may touch of a slot
struct server_blocks_slot {
    int             id;
    bool            busy;
    int             n_ctx;
    server_prompt * prompt;
};

// the slots as the block calls see them
template <typename Slots> static std::vector<server_blocks_slot> server_blocks_slots(Slots & slots) {
    std::vector<server_blocks_slot> res;
    for (auto & slot : slots) {
        res.push_back({ slot.id, slot.is_processing(), slot.n_ctx, &slot.prompt });
    }
    return res;
}

// one HTTP call, carried to the main loop by a task
struct server_blocks_call {
    std::string  action;
    int          id_slot = -1;
    json         body;
    llama_tokens tokens; // action "view": the rendered prompt

    // what the main loop leaves to the thread that asks, before it is asked again: it reads no files
    bool waits = false;
    int  visit = 0;
    bool scan  = false; // look for files that others have written
    std::vector<std::pair<std::string, std::shared_ptr<server_blocks_read>>> reads; // by block name
    std::vector<std::shared_ptr<server_blocks_write>> writes; // wait for these
};

// a request that cannot be done; becomes {"error": {...}}
struct server_blocks_error {
    int         code;
    std::string type;
    std::string message;
    json        extra = json::object();
};

// how one slot is held under its budget by the engine itself
struct server_blocks_stream {
    struct entry {
        std::string name;
        llama_pos   p0;
        llama_pos   p1;
    };

    int32_t budget = 0; // resident tokens, 0 = off
    int32_t sink   = 0; // first tokens, never evicted
    int32_t recent = 0; // last tokens, never evicted
    int32_t block  = 64;
    int32_t align  = 0; // where a block begins
    std::string        tenant;
    std::string        session; // that the copies are made for
    llama_kv_ranges    protect;
    std::vector<entry> order; // evicted first to last; then as --kv-eviction says, or the oldest first
};

class server_blocks {
public:
    ~server_blocks();

    // ---- set-up

    // reads --evoke-ram; `unsupported` is why this server cannot do it, or nullptr
    void init(llama_context * ctx, const common_params & params, int n_slots, const char * unsupported);

    // the options that blocks cannot live with are turned off before the context is made
    static void adjust(common_params & params);

    // reads --ctx-logical and --kv-eviction, for slots that would have n_ctx tokens; false, with the reason in
    // the log, where they cannot work
    bool set_modes(const common_params & params, int32_t n_ctx);

    bool enabled() const { return n_slots > 0; }

    // tokens of a slot where they may be more than its cells, else 0
    int32_t n_ctx_logical() const { return modes.on() ? modes.n_ctx : 0; }

    json props() const;

    // 16 hexadecimal digits that name this process
    static const std::string & instance();

    // ---- hooks (upstream -> here)

    // request body -> task: the marker, and what a holed cache cannot have
    void on_task(server_task & task, const json & data) const;

    template <typename Slots> bool spare(const server_task & task, const Slots & slots) const {
        for (const auto & slot : slots) {
            if (enabled() && task.id_slot == -1 && !slot.is_processing() && !reserved(slot.id)) {
                return true;
            }
        }
        return false;
    }

    bool reserved(int id) const { return enabled() && state[id].reserved; }

    // An idle slot is about to be emptied, as others find no cell. True: it stays, there is another one that nobody
    // comes back to. False: it is emptied, the rows of a reserved one saved first.
    template <typename Slots> bool keep_idle(int id, const server_prompt & prompt, const Slots & slots) {
        if (!reserved(id) || prompt.n_tokens() == 0) {
            return false;
        }
        for (const auto & slot : slots) {
            if (!slot.is_processing() && !reserved(slot.id) && slot.prompt.n_tokens() > 0) {
                return true;
            }
        }
        save_rows(id, prompt);
        return false;
    }

    // how much of a common prefix may be reused; holes are kept only for a request that names the slot's epoch
    int32_t on_prompt(int id, const server_task & task, int32_t n_past, const std::vector<common_adapter_lora_info> & adapters);

    // n_past moved down to the end of a resident range
    int32_t clip(int id, int32_t n_past) const;

    bool resident(int id, llama_pos pos) const;

    // tokens after n_past are gone; corrects the count of reused tokens
    void on_start(int id, int32_t n_past, server_slot_stats & stats);

    // How many of n_want tokens may be decoded now, at least 1; evicts when the budget or the cells say so. While others
    // decode, a slot with far more rows than its limit gives them up in several steps: -1 says that it is to decode
    // nothing now, and to come again after the others' decode.
    int32_t room(int id, const server_prompt & prompt, int32_t n_want, bool others_decode = false);

    void on_decoded();

    void on_first_token(int id, const server_task & task, const server_slot_stats & stats);

    // the turn is over: its books go into the timings of the reply
    void on_final(int id, server_slot_stats & stats);

    // the slot's cells were emptied or replaced by somebody else
    void on_clear(int id);

    // the slot's cells are about to get the rows of another slot
    void on_copy(int from, int id);

    // ---- block calls

    // when it sets `call.waits`, the caller does work(call) and comes again
    json run(server_blocks_call & call, const std::vector<server_blocks_slot> & slots);

    static uint64_t mix(uint64_t h, uint64_t v); // one more value into a hash

    // any thread
    static bool is_action(const std::string & action);
    void work(server_blocks_call & call);

    // before a call goes to the main loop, which never asks the file system: what others did to the folder
    void look_at_disk() {
        if (disk.is_open()) {
            disk.refresh();
        }
    }

private:
    // tenant, prefix hash at p1, p0, p1, visibility of the rows
    using key_t = std::tuple<std::string, uint64_t, llama_pos, llama_pos, server_blocks_visibility>;

    struct saved {
        llama_kv_block        kv; // without data: it is only on disk
        llama_tokens          tokens;
        uint64_t              prefix_hash = 0; // of the tokens before p0
        uint64_t              hash        = 0; // of the tokens up to p1
        std::map<std::string, std::string> labels; // names, and the session that saved each
        server_blocks_row_list rows; // what they were made from
        server_blocks_bounds  bounds;
        uint64_t              used = 0;
        size_t                bytes = 0; // of host memory

        uint64_t changed = 0; // as of `version`: when it was last told of as something else than before,
        int      told    = -1; // namely where it was; -1 also when its names are others since

        bool        on_disk = false; // there is a file of it
        bool        renamed = false; // which does not have its names, or its bounds
        bool        redone  = false; // which does not have its rows: they were decoded again since
        int64_t     rest_ms = 0;     // not to be written before: it has failed
        std::shared_ptr<server_blocks_write> writing;
        std::shared_ptr<server_blocks_read>  reading;

        bool in_ram() const { return kv.data != nullptr; }
        bool whole()  const { return server_blocks_is_whole(server_blocks_visibility_of(rows)); }

        // host memory of what is known of it wherever its rows are
        size_t index_bytes() const { return META + bounds.size() + rows.size()*sizeof(server_blocks_rows); }
    };

    // what one tenant has of the host memory
    struct tenant_share {
        std::map<uint64_t, key_t> lru[2]; // by last use: only on disk, in host memory
        size_t bytes[2] = { 0, 0 };       // of those
    };

    using block_it = std::map<key_t, saved>::iterator;

    // memory of a block that is no more, while the disk is still at it
    struct in_flight {
        std::shared_ptr<server_blocks_write> write;
        std::shared_ptr<server_blocks_read>  read;
        uint8_t * data;
        size_t    bytes;
    };

    struct slot_state {
        int64_t epoch    = 0;
        bool    reserved = false;
        uint64_t adapters = 0; // of the rows, 0 = none
        bool     opaque   = false; // rows are made under adapters that come and go within a text
        server_blocks_history history;
        server_blocks_stream stream;

        // the turn: everything since the last reply
        int64_t marker = -1; // -1 none, 0 stale, 1 ok
        int32_t n_common = 0; // how far the request's tokens are the slot's
        int32_t n_past = 0;
        int32_t reuse  = std::numeric_limits<int32_t>::max(); // so many tokens at most are gone on from
        int32_t peak   = 0;
        int32_t hidden = 0;
        int32_t breach = 0;
        bool    first_token = false;
        bool    probe   = false; // the next marked request only looks: its tail is decoded again
        bool    probing = false; // this one does
        bool    probed  = false; // the last one did: the turn goes on
        const server_prompt * prompt = nullptr; // since tokens were first added to it
        std::vector<uint64_t> used; // by position: when it was last decoded, loaded, or attended to
        std::map<llama_pos, double> seen; // attention that each block had at the last look,
        int64_t n_obs = 0;                // and the rows seen until then
        llama_kv_ranges loaded;
        json    auto_evicted = json::array();
        json    books; // filled at the first output token
    };

    static constexpr int64_t PATIENCE_MS = 100; // how long the main loop waits for a write before a copy is lost
    static constexpr int64_t EVICT_MS = 20; // how long the main loop evicts from one slot while others decode
    static constexpr int VISITS_MAX = 4; // how often a call may wait for the disk
    static constexpr size_t META = 512; // what knowing of a block takes, wherever its rows are

    struct plan_state;
    struct plan_op;

    llama_context * ctx = nullptr;
    int             n_slots = 0;
    const char *    why_not = nullptr;
    llama_kv_block_memory kind { "", false, false };
    size_t          ram_budget = 0;
    size_t          ram_used   = 0;
    size_t          index_used = 0; // of it, for knowing of blocks that are only on disk
    size_t          row_size   = 0;
    bool            copying    = false; // copies are under way that nobody has waited for
    uint64_t        clock      = 0;
    uint64_t        version    = 0; // of what was told of copies
    bool            unified    = false; // slots share their cells
    int64_t         next_epoch = 0;

    server_blocks_modes      modes;
    server_blocks_arena      arena; // ram_budget bytes
    std::vector<slot_state>  state;
    std::map<key_t, saved>   store;
    std::map<std::string, tenant_share> shares;
    std::set<key_t>          mislabelled; // only on disk, where the file does not have their names
    std::map<std::string, key_t> files; // on disk, by name of the file
    std::set<key_t>          busy; // being written or read
    std::vector<in_flight>   limbo;
    std::multimap<size_t, uint8_t *> aside; // memory for the copies that a plan is about to make, by size
    size_t                   bytes_aside = 0;
    server_blocks_disk       disk;
    std::string              disk_why; // why there is none, though asked for
    uint64_t                 model_id = 0; // server_blocks_model_id()
    std::map<const llama_adapter_lora *, uint64_t> adapter_ids; // by contents
    uint64_t                 n_dropped  = 0; // copies lost because memory was short
    int64_t                  patience_ms = 0; // until when a call may wait for the disk
    int64_t                  rest_ms     = 0; // until when nothing is written: the disk has failed
    std::map<std::pair<std::string, std::string>, key_t> labels; // (tenant, name)

    // server-blocks-calls.cpp
    const server_blocks_slot & find_slot(const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) const;
    void check_epoch(const json & body, int id) const;
    json run_view  (const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) const;
    json run_info  (const server_blocks_call & call, const std::vector<server_blocks_slot> & slots);
    void note_changes(const std::string & tenant);
    json run_adopt (const json & body, const server_blocks_slot & slot);
    json run_drop  (const json & body);
    json run_compact(const json & body, const server_blocks_slot & slot);
    json run_insert (const json & body, const server_blocks_slot & slot);
    void check_shift(const json & body, const server_blocks_slot & slot) const;
    json run_spill (server_blocks_call & call);
    json run_plan  (const json & body, const server_blocks_slot & slot, const std::vector<plan_op> & ops);
    json run_op    (const plan_op & what, plan_state & plan);
    bool will_copy (const key_t & key, int id) const;
    bool may_fit   (const plan_state & plan);
    bool set_aside (const plan_state & plan);
    void give_back_aside();
    json op_save   (const json & op, const json & label, plan_state & plan);
    json op_evict  (const json & op, plan_state & plan);
    json op_load   (const json & op, plan_state & plan);
    json op_stream (const json & op, plan_state & plan);
    json op_reuse  (const json & op, plan_state & plan);
    saved * in_memory(const std::string & tenant, const std::string & name);
    static void check_visible(const json & body, const saved & block, const std::string & name, const std::string & session);
    void note_loaded(int id, const saved & block, uint64_t prefix_hash);
    json run_rows  (const json & body, const server_blocks_slot & slot);
    json op_probe  (plan_state & plan);
    [[noreturn]] void unknown(const std::string & tenant, const std::string & name) const;
    static std::vector<std::string> needed(const server_blocks_call & call);
    json slot_json (const server_blocks_slot & slot) const;

    // server-blocks-attention.cpp
    json attention_props() const;
    json op_capture   (const json & op, const server_blocks_slot & slot, bool dry);
    void fit_capture  (llama_attn_params & params, int id) const;
    json run_attention(const json & body, const server_blocks_slot & slot) const;
    void check_attention_work(const json & body, const server_blocks_slot & slot) const;
    json queries_json (const server_blocks_slot & slot) const;
    json bounds_json  (const json & body, const server_blocks_slot & slot) const;
    json products_json(const json & body, const server_blocks_slot & slot) const;
    const saved * copy_of(const std::string & tenant, const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1) const;
    server_blocks_bounds key_bounds(int id, llama_pos p0, llama_pos p1) const;
    size_t key_bounds_size(int id) const; // bytes of one block's
    bool   bounds_fit(const server_blocks_bounds & bounds) const;
    void   keep_bounds(block_it it, int id);

    // server-blocks.cpp
    void     bump(int id);
    void     note_peak(int id);
    bool     told(int id) const { return state[id].marker >= 0 || modes.on(); } // its reply has the books
    void     fence();

    // server-blocks-modes.cpp
    json     modes_json() const;
    int32_t  n_rows(int id) const;
    int32_t  limit(int id) const;
    int32_t  cells_left(int id) const;
    uint32_t evict_rows(int id, llama_pos p0, llama_pos p1);
    struct eviction;
    using evictions = std::map<int, eviction>; // by slot
    eviction begin_eviction(int id) const;
    bool     evict_next(int id, evictions & begun);
    void     save_rows(int id, const server_prompt & prompt);
    std::string auto_name(int id, const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1) const;
    bool     evict_somewhere(int id, evictions & begun);
    void     touch(int id, llama_pos p0, llama_pos p1);
    double   score(int id, const eviction & from, llama_pos p0, llama_pos p1) const;
    void     list_blocks(int id, eviction & from) const;
    void     attend(int id);
    void     look(int id);
    bool     next_out(int id, eviction & from, server_blocks_stream::entry & out) const;
    server_blocks_stream rules(int id) const;
    llama_pos       recent_edge(int id, const server_blocks_stream & rules) const;
    llama_kv_ranges held(const server_prompt & prompt) const; // rows that checkpoints stand on

    // server-blocks-store.cpp
    // who saves under what name
    struct saver {
        const std::string & tenant;
        const std::string & session;
        const std::string & name;
    };

    saved *  find(const std::string & tenant, const std::string & name);
    key_t    key_of(const std::string & tenant, int id, const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1) const;
    bool     has_copy(const key_t & key, int id) const; // of the rows that the slot has
    bool     put (const saver & by, int id, const llama_tokens & tokens,
                  const std::vector<uint64_t> & hashes, llama_pos p0, llama_pos p1, std::set<key_t> keep = {});
    void     use(const key_t & key, saved & block);
    bool     make_space(const std::string & tenant, size_t bytes, const std::set<key_t> & keep);
    bool     free_some(const std::string & tenant, size_t bytes, const std::set<key_t> & keep);
    uint8_t * take(const std::string & tenant, size_t bytes, const std::set<key_t> & keep);
    void     label(const saver & by, const key_t & key);
    size_t   drop(const std::string & tenant, const std::string & name);
    void     rename(block_it it);
    void     enter(block_it it); // into its tenant's share
    void     leave(block_it it);
    void     give_up_rows(block_it it);
    void     erase(block_it it);
    std::vector<tenant_share *> largest_first(bool in_ram);
    std::vector<tenant_share *> must_give(const std::string & tenant, size_t bytes);
    bool     matches(const saved & block, const llama_tokens & tokens, const std::vector<uint64_t> & hashes, bool force) const;
    size_t   cost(int id, llama_pos p0, llama_pos p1) const;
    size_t   ram_left() const { return ram_budget - std::min(ram_budget, ram_used); } // of host memory
    size_t   rows_cost(const llama_kv_block & kv) const;

    // server-blocks-tiers.cpp: what is where, host memory or disk
    void     open_disk(const common_params & params);
    void     forget_all();
    void     settle();
    void     settle_write(block_it it);
    void     settle_read(block_it it);
    void     take_found();
    bool     stage(server_blocks_call & call);
    void     begin_read(const key_t & key, const std::set<key_t> & keep);
    void     write(block_it it, bool insist = false);
    void     write_ahead();
    void     release(block_it it);
    bool     release_one(const std::vector<tenant_share *> & from, const std::set<key_t> & keep);
    bool     wait_for_write(const std::vector<tenant_share *> & from, const std::set<key_t> & keep);
    void     sweep();
    void     trim_index();
    server_blocks_head head_of(const key_t & key, const saved & block) const;
    std::string file_of(const key_t & key, const saved & block) const;
    json     disk_json() const;

    uint64_t adapters_hash(const std::vector<common_adapter_lora_info> & adapters);

    // [k] = of the first k tokens, made under these adapters
    static std::vector<uint64_t> prefix_hashes(const llama_tokens & tokens, uint64_t adapters);
};

// the JSON object of a block call or of a request to render; std::invalid_argument when it is none. Copying and
// freeing a value is recursive: one nested deeply enough would end the process
json server_blocks_parse(const std::string & text);

// std::invalid_argument when a block call has more of something than the main loop may be kept from decoding for
void server_blocks_check(const json & body);

// range sets
void    server_ranges_add   (llama_kv_ranges & set, llama_pos p0, llama_pos p1);
void    server_ranges_remove(llama_kv_ranges & set, llama_pos p0, llama_pos p1);
int32_t server_ranges_count (const llama_kv_ranges & set, llama_pos p0, llama_pos p1);

// ranges in any order -> a set; n log n steps
llama_kv_ranges server_ranges_of(llama_kv_ranges ranges);

// a set without another one; as many steps as both have ranges
llama_kv_ranges server_ranges_without(const llama_kv_ranges & set, const llama_kv_ranges & other);

// whether all of [p0, p1) is in the set, whether any of it is; log n steps
bool server_ranges_hold   (const llama_kv_ranges & set, llama_pos p0, llama_pos p1);
bool server_ranges_overlap(const llama_kv_ranges & set, llama_pos p0, llama_pos p1);

// what tokens say, and where in it each of them begins
struct server_blocks_text {
    std::string         text;
    std::vector<size_t> start;

    server_blocks_text(const llama_vocab * vocab, const llama_tokens & tokens);

    // tokens that begin a sentence or a line, not the first, in these ranges of characters
    std::vector<int32_t> stops(const std::vector<std::pair<size_t, size_t>> & within) const;
};

// where each message of a rendered prompt lies, where the generation prompt begins, and the stops of the messages
json server_blocks_spans(const llama_vocab * vocab, const llama_tokens & tokens, const server_blocks_text & rendered,
                         const std::string & prompt, const json & messages, const std::string & generation_prompt,
                         int32_t & n_generation, std::vector<int32_t> & stops);

// where messages end, each with a hash of all that a compact reply says up to there
using server_blocks_edges = std::vector<std::pair<int32_t, std::string>>;

// as a request names them, [[end, hash], ...]; std::invalid_argument when it is nothing like that
server_blocks_edges server_blocks_edges_of(const json & value);

// `reply` as text, with the spans as columns, the tokens as base64 of little-endian int32, and the stops as base64 of
// a bit for each token, the lowest first; without what is up to the last edge of `known` that is the reply's too
std::string server_blocks_compact(json reply, const llama_tokens & tokens, const json & spans,
                                  const std::vector<int32_t> & stops, const server_blocks_edges & known);

// fields that a converter of another dialect does not know
void server_blocks_carry(const json & from, json & to);
