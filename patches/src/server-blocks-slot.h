#pragma once

// State of one slot: the epoch of its rows, their origin, its budget, and the turn in progress.
//
// Owns: the history of the slot's rows, the budget, and the token accounting of the turn. It reads from the cells
//       of the context which rows are resident, and frees cells in evict(); it owns no cells.
// Threads: the main loop only, between two decodes.
// Invariants: epochs are unique over all slots and grow. Each change of the rows that is not made by a call with the
//             present epoch, or by a request that names it, renews the epoch. A turn begins with begin_turn() and ends
//             with end_turn(), but for a probe: its turn ends with that of the next marked request.

#include "llama-kv-block.h"
#include "server-blocks-copy.h"
#include "server-blocks-hash.h"
#include "server-blocks-history.h"
#include "server-blocks-ranges.h"
#include "server-blocks-residency.h"
#include "server-task.h"

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// How many rows of a slot may be resident, and which are evicted first.
struct server_blocks_budget {
    struct entry {
        std::string name; // "" = derived from the content
        llama_pos   p0;
        llama_pos   p1;
    };

    int32_t n_rows = 0;  // most resident rows, 0 = no budget
    int32_t sink   = 0;  // first tokens, never evicted
    int32_t recent = 0;  // last tokens, never evicted
    int32_t block  = 64; // tokens that are evicted together
    int32_t align  = 0;  // position at which a block begins; the others begin at multiples of `block` from there
    std::string        tenant;
    std::string        session; // copies are saved for this session
    llama_kv_ranges    protect; // never evicted
    std::vector<entry> order;   // evicted first, in this order; then others as --kv-eviction says, or the oldest first
};

// What is known of a request when its prompt begins.
struct server_blocks_turn {
    int64_t  epoch      = -1;    // of its marker, -1: it has none
    int32_t  n_tokens   = 0;     // of its prompt
    int32_t  n_common   = 0;     // of these the first that equal the slot's text
    bool     reused     = false; // its marker named its rendering, which was reused
    uint64_t adapters   = 0;     // hash of the active adapters and their scales, 0: none
    bool     opaque     = false; // an adapter is active in a part of the text only, and nothing records in which
    bool     oversized  = false; // the prompt does not fit the cells: the engine evicts some of it in any case
    bool     irregular  = false; // it has media with M-RoPE, so that its tokens have other positions than their indices
};

// For whom a slot has its rows.
struct server_blocks_slot_owner {
    std::string tenant;
    std::string session;
};

class server_blocks_slot_state {
public:
    // `has_state`: see server_blocks_history. `last_epoch`: the counter that all slots share.
    server_blocks_slot_state(llama_context * ctx, int id, bool has_state, int64_t & last_epoch);

    // Sets which records the engine's own eviction needs: the last use of each position; the accounting of every turn.
    void set_records(bool uses, bool every_turn) {
        record_uses      = uses;
        report_all_turns = every_turn;
    }

    // ---- cells

    // Returns the positions that have a row.
    const llama_kv_ranges & resident() const { return turn.irregular ? cells.read() : cells.ranges(); }
    bool     is_resident(llama_pos pos) const { return server_ranges_count(resident(), pos, pos + 1) == 1; }
    int32_t  n_rows() const { return (int32_t) llama_kv_block_n_rows(ctx, id); }
    int32_t  n_free() const { return (int32_t) llama_kv_block_n_free(ctx, id); }

    // Returns the position after the last row.
    llama_pos end() const { return llama_memory_seq_pos_max(llama_get_memory(ctx), id) + 1; }

    // Returns n_past, reduced to the end of a resident range.
    int32_t clip(int32_t n_past) const;

    // Returns whether the text has other positions than the indices of its tokens. Nothing is evicted from it.
    bool is_irregular() const { return turn.irregular; }

    // Returns the text with these tokens under the slot's adapters; what the last text had in common with it is not hashed
    // again.
    std::shared_ptr<const server_blocks_hashed> hashed(llama_tokens tokens) const;

    // Frees the cells of [p0, p1); returns the number of rows.
    uint32_t evict(llama_pos p0, llama_pos p1);

    // Returns whether rows were evicted since the last call.
    bool take_evicted() { return std::exchange(evicted, false); }

    // ---- identity

    int64_t  epoch() const { return current_epoch; }
    uint64_t adapters() const { return turn.adapters; }

    // Sets the adapters of requests that name none, for a slot that has had no request.
    void set_adapters(uint64_t adapters) { turn.adapters = adapters; }
    const server_blocks_history & history() const { return rows; }

    // Gives the slot a new epoch: calls that name the old one are refused. Ends reservation, budget and capture.
    void renew_epoch();

    // Names who ran the latest plan or adopt of this epoch; empty before the first.
    const server_blocks_slot_owner & owner() const { return slot_owner; }
    void set_owner(server_blocks_slot_owner owner) { slot_owner = std::move(owner); }

    // Returns for whom the engine saves what it evicts: who set the budget, else the owner.
    server_blocks_slot_owner saver() const {
        return budget_rules.n_rows > 0 ? server_blocks_slot_owner { budget_rules.tenant, budget_rules.session } : slot_owner;
    }

    // A reserved slot has rows that a client comes back for: other requests get another slot where there is one.
    bool is_reserved() const { return reserved; }
    void reserve() { reserved = true; }

    // Makes the history agree with the cells.
    void reconcile() { rows.reconcile(resident()); }

    // ---- settings of block calls

    const server_blocks_budget & budget() const { return budget_rules; }
    void set_budget(server_blocks_budget budget);

    // Limits how many tokens the next marked request reuses, and how many of them /evoke/render reports until then.
    void limit_reuse(int32_t n_tokens) { reuse_limit = n_tokens; }
    int32_t reuse() const { return reuse_limit; }

    // Makes the next marked request a probe: its rows are removed before the request after it is decoded, and both are
    // one turn in the accounting.
    void expect_probe() { probe_expected = true; }

    // ---- turn

    // Begins a turn. Returns how many tokens of the prompt are reused.
    int32_t begin_turn(const server_blocks_turn & request);

    // Records that decoding starts at n_past. Returns how many of the tokens before it are resident.
    int32_t on_decode_start(int32_t n_past);

    // Records that a batch was decoded.
    void on_decoded();

    // Records that rows at the end were removed, which the last decode has added: tokens of a draft that were refused.
    void on_draft_refused();

    // Records that the first token of the reply was generated; `n_decoded` tokens of the prompt were decoded.
    void on_first_token(int32_t n_prompt, int32_t n_decoded);

    // Ends the turn. Returns its accounting for the reply, or nullptr where the reply has none.
    std::shared_ptr<json> end_turn();

    bool is_generating() const { return first_token; }

    // ---- changes of rows

    // Records that the rows of a copy were loaded; resident() must have been called right before that. `prefix_hash`: of
    // the slot's tokens before it.
    void on_loaded(const server_blocks_copy & copy, uint64_t prefix_hash);

    // Records that the engine evicted a range, saved under `name` (null: it is not saved).
    void on_auto_evicted(llama_pos p0, llama_pos p1, const json & name);

    // Records that a token was decoded although the budget or the cells had no room for it.
    void on_breach() { n_breaches++; }

    // Records that the cells were emptied or replaced by others.
    void on_clear();

    // Records that the rows of another slot are about to be copied into this one.
    void on_copy(const server_blocks_slot_state & from);

    // Records that block-adopt has removed all rows and is about to load those of another text.
    void on_adopt();

    // Records that rows from `pos` on are about to move to other positions, and that they have.
    void on_move_start(llama_pos pos);
    void on_moved();

    // Records the rows [p0, p1) as recovered in this turn.
    void on_recovered(llama_pos p0, llama_pos p1) { server_ranges_add(recovered, p0, p1); }

    void forget_uses() { last_uses.clear(); }
    void update_peak();

    // ---- uses

    // Records that rows were decoded, loaded or attended to now.
    void mark_used(llama_pos p0, llama_pos p1);

    // Returns when a row of [p0, p1) was last used, as a count of the uses in this slot; 0: never.
    uint64_t used_at(llama_pos p0, llama_pos p1) const;

    // Where attention is captured: marks those blocks of `block` positions as used that got at least the mean attention
    // since the last time. Does nothing until the attention of `block` more tokens was captured.
    void mark_attended(int32_t block);

private:
    static constexpr int32_t UNLIMITED = std::numeric_limits<int32_t>::max();

    bool reports_turn() const { return marker != NO_MARKER || report_all_turns; }

    llama_context * ctx;
    int             id;
    int64_t *       last_epoch; // of all slots
    int64_t         current_epoch = 0;
    bool            reserved = false;
    server_blocks_history rows;
    server_blocks_residency cells;
    mutable std::shared_ptr<server_blocks_hashed> last_text; // see hashed()
    server_blocks_budget  budget_rules;
    server_blocks_slot_owner slot_owner;
    bool            evicted          = false; // see take_evicted()
    bool            all_rows         = true;  // nothing was evicted since the cells were emptied
    bool            record_uses      = false;
    bool            report_all_turns = false;

    // the turn: everything since the reply before it
    enum { NO_MARKER, STALE_MARKER, VALID_MARKER } marker = NO_MARKER;
    server_blocks_turn turn;
    int32_t n_past      = 0;         // tokens that decoding started after
    int32_t n_batches   = 0;         // batches since then that had tokens of this slot
    llama_pos batch_end = 0;         // end of the rows after the last of them
    int32_t reuse_limit = UNLIMITED; // most tokens that are reused
    int32_t peak        = 0;         // most rows that were resident
    int32_t n_hidden    = 0;         // tokens of the prompt that were decoded and evicted before the reply began
    int32_t n_breaches  = 0;         // tokens decoded beyond the budget
    bool    first_token    = false;  // the reply has begun
    bool    probe_expected = false;  // the next marked request is a probe
    bool    probing        = false;  // the present request is one
    bool    probed         = false;  // the request before this one was a probe: its turn continues
    llama_kv_ranges recovered;       // rows loaded
    json    auto_evicted = json::array();
    json    accounting;              // object, from the first output token on

    uint64_t              clock = 0;
    std::vector<uint64_t> last_uses;               // by position
    std::map<llama_pos, double> attention;         // of each block, when mark_attended() last ran
    int64_t               n_observed = 0;          // tokens whose attention was captured until then
};
