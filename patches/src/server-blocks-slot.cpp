#include "server-blocks-slot.h"

#include "llama-attn-capture.h"

#include <algorithm>

static constexpr llama_pos END = std::numeric_limits<llama_pos>::max();

server_blocks_slot_state::server_blocks_slot_state(llama_context * ctx, int id, bool has_state, int64_t & last_epoch)
    : ctx(ctx), id(id), last_epoch(&last_epoch), rows(has_state), cells(ctx, id) {
    renew_epoch();
}

std::shared_ptr<const server_blocks_hashed> server_blocks_slot_state::hashed(llama_tokens tokens) const {
    if (last_text && last_text->is_under(turn.adapters) && last_text->tokens == tokens) {
        return last_text;
    }
    if (!last_text || !last_text->is_under(turn.adapters)) {
        last_text = std::make_shared<server_blocks_hashed>(turn.adapters);
    } else if (last_text.use_count() > 1) { // somebody still uses it
        last_text = std::make_shared<server_blocks_hashed>(*last_text);
    }
    last_text->set(std::move(tokens));
    return last_text;
}

int32_t server_blocks_slot_state::clip(int32_t n_past) const {
    if (n_past <= 0 || turn.irregular) {
        return n_past;
    }
    int32_t res = 0;
    for (const auto & r : resident()) {
        if (r.first < n_past) {
            res = std::min(n_past, r.second);
        }
    }
    return res;
}

uint32_t server_blocks_slot_state::evict(llama_pos p0, llama_pos p1) {
    server_ranges_remove(recovered, p0, p1);
    rows.on_removed(p0, p1);
    all_rows = false;
    evicted  = true;
    cells.ranges();
    const uint32_t n = llama_kv_block_evict(ctx, id, p0, p1);
    cells.on_evicted(p0, p1);
    return n;
}

void server_blocks_slot_state::renew_epoch() {
    current_epoch = ++*last_epoch;
    reserved      = false;
    budget_rules  = {};
    slot_owner    = {};
    reuse_limit   = UNLIMITED;
    probe_expected = probing = probed = false;
    llama_attn_capture_set(ctx, id, {});
    recovered.clear();
    auto_evicted = json::array();
    n_hidden = 0;
    peak     = n_rows();
}

void server_blocks_slot_state::set_budget(server_blocks_budget budget) {
    budget_rules = std::move(budget);
    reserved     = true;
    if (!probed) {
        peak = 0; // rows from before need not fit this budget
    }
}

//
// turn
//

int32_t server_blocks_slot_state::begin_turn(const server_blocks_turn & request) {
    // A request that names no adapters gets those of the server, and upstream reuses rows that were decoded under others.
    const bool other_rows = request.adapters != turn.adapters && !request.opaque && !turn.opaque;
    const bool was_irregular = turn.irregular;
    turn   = request;
    if (was_irregular || turn.irregular) {
        cells.forget();
    }
    turn.n_common = other_rows ? 0 : request.n_common;
    marker = request.epoch < 0 ? NO_MARKER : request.epoch == current_epoch && !request.irregular ? VALID_MARKER : STALE_MARKER;
    first_token = false;
    n_hidden    = 0; // what was evicted since the last turn was not decoded in this one
    accounting  = json();
    if (marker == VALID_MARKER) {
        turn.n_common = std::min(turn.n_common, reuse_limit);
    }
    reuse_limit    = UNLIMITED;
    probing        = probe_expected && marker == VALID_MARKER;
    probe_expected = false;
    // At least one token is decoded, so that windows and checkpoints, too, are reused up to before that token only.
    const int32_t reusable = std::min(turn.n_common, turn.n_tokens - 1);
    if (marker == VALID_MARKER) {
        reserved = true;
        return clip(reusable);
    }
    // The request does not expect missing rows. It gets the slot with a new epoch, and reuses only a prefix without missing
    // rows and without rows that were decoded after missing ones.
    renew_epoch();
    if (turn.oversized) {
        return clip(reusable); // the prefix would have missing rows as well if it were decoded once more
    }
    reconcile();
    if (turn.irregular && (was_irregular || all_rows)) {
        return turn.n_common; // nothing is evicted from such a text, but its positions have gaps
    }
    return std::min(turn.n_common, rows.complete_end());
}

int32_t server_blocks_slot_state::on_decode_start(int32_t n_past) {
    const auto    present   = resident();
    const int32_t n_present = turn.irregular ? n_past : server_ranges_count(present, 0, n_past);
    // Rows of a text that this one does not continue were resident since the last reply, unless they were loaded since,
    // and are freed before anything is decoded: they do not count for this turn. Those of a probe do.
    const int32_t n_cut = probed ? 0 : server_ranges_count(present, turn.n_common, END) - server_ranges_count(recovered, turn.n_common, END);
    probed = false;
    peak   = std::max(peak - n_cut, n_present);
    this->n_past = n_past;
    n_batches = 0;
    batch_end = n_past;
    if (probing) {
        reuse_limit = n_past; // so that the next request removes the rows of the probe, even if the probe is cancelled
    }
    server_ranges_remove(recovered, n_past, END);
    rows.reconcile(present);
    rows.on_removed(n_past, END);
    last_uses.resize(std::min(last_uses.size(), (size_t) n_past));
    llama_attn_capture_forget(ctx, id, n_past);
    llama_attn_capture_prompt(ctx, id, true);
    return n_present;
}

void server_blocks_slot_state::on_decoded() {
    update_peak();
    const llama_pos last = end();
    n_batches += last > batch_end;
    batch_end  = last;
    rows.on_decoded(last, turn.opaque);
    if (last > (llama_pos) last_uses.size()) {
        mark_used((llama_pos) last_uses.size(), last);
    }
}

void server_blocks_slot_state::on_draft_refused() {
    const llama_pos last = end();
    if (last < rows.end()) {
        rows.shorten(last);
        last_uses.resize(std::min(last_uses.size(), (size_t) last));
        llama_attn_capture_forget(ctx, id, last);
    }
}

void server_blocks_slot_state::on_first_token(int32_t n_prompt, int32_t n_decoded) {
    if (!probing) {
        llama_attn_capture_prompt(ctx, id, false);
    }
    first_token = true;
    if (!reports_turn()) {
        return;
    }
    const auto    present   = resident();
    const int32_t n_present = turn.irregular ? n_past : server_ranges_count(present, 0, n_past);
    int32_t n_recovered = 0;
    for (const auto & r : recovered) {
        n_recovered += server_ranges_count(present, r.first, std::min(r.second, (llama_pos) n_past));
    }
    accounting = json {
        {"n_prompt",        n_prompt},
        {"resident_before", n_present - n_recovered},
        {"recovered",       n_recovered},
        {"decoded",         n_decoded},
        {"decoded_hidden",  n_hidden},
        {"omitted",         n_past - n_present},
        {"n_batches",       n_batches},
        {"reused_rendering", turn.reused},
    };
}

std::shared_ptr<json> server_blocks_slot_state::end_turn() {
    std::shared_ptr<json> res;
    if (reports_turn()) {
        static const char * marker_names[] = { "none", "stale", "ok" };
        res = std::make_shared<json>(accounting.is_object() ? accounting : json::object());
        (*res)["epoch"]           = current_epoch;
        (*res)["marker"]          = marker_names[marker];
        (*res)["n_resident"]      = n_rows();
        (*res)["n_resident_peak"] = peak;
        (*res)["budget"]          = budget_rules.n_rows;
        (*res)["budget_breaches"] = n_breaches;
        (*res)["auto_evicted"]    = auto_evicted;
    }
    marker   = NO_MARKER;
    n_hidden = 0;
    if (probing) { // the accounting of the next request contains what this one loaded and evicted
        probing = false;
        probed  = true;
        llama_attn_capture_prompt(ctx, id, false);
        return res;
    }
    n_breaches = 0;
    peak       = n_rows();
    recovered.clear();
    auto_evicted = json::array();
    return res;
}

void server_blocks_slot_state::update_peak() {
    peak = std::max(peak, n_rows());
}

//
// changes of rows
//

void server_blocks_slot_state::on_loaded(const server_blocks_copy & copy, uint64_t prefix_hash) {
    server_ranges_add(recovered, copy.kv.p0, copy.kv.p1);
    cells.on_loaded(copy.kv.p0, copy.kv.p1);
    // Rows that were decoded after other text differ from the rows that the present text would give.
    rows.on_loaded(copy.prefix_hash == prefix_hash ? copy.rows : server_blocks_rows_displaced(copy.rows, copy.prefix_hash));
    mark_used(copy.kv.p0, copy.kv.p1);
}

void server_blocks_slot_state::on_auto_evicted(llama_pos p0, llama_pos p1, const json & name) {
    if (!first_token) {
        n_hidden += std::max(0, p1 - std::max<llama_pos>(p0, n_past));
    }
    auto_evicted.push_back(json::array({ p0, p1, name }));
}

void server_blocks_slot_state::on_clear() {
    renew_epoch();
    last_uses.clear();
    rows.clear();
    cells.forget();
    turn.irregular = false;
    all_rows       = true;
    reconcile(); // rows from a slot file may be there
}

void server_blocks_slot_state::on_copy(const server_blocks_slot_state & from) {
    on_clear();
    rows = from.rows;
    turn.adapters  = from.turn.adapters;
    turn.opaque    = from.turn.opaque;
    turn.irregular = from.turn.irregular;
    all_rows       = from.all_rows;
}

void server_blocks_slot_state::on_adopt() {
    renew_epoch();
    turn.irregular = false;
    all_rows       = false;
    reserved = true;
    last_uses.clear();
    rows.clear();
    cells.forget();
}

void server_blocks_slot_state::on_move_start(llama_pos pos) {
    rows.on_removed(pos, END);
}

void server_blocks_slot_state::on_moved() {
    cells.forget();
    rows.on_moved(resident());
}

//
// uses
//

void server_blocks_slot_state::mark_used(llama_pos p0, llama_pos p1) {
    if (record_uses) {
        last_uses.resize(std::max(last_uses.size(), (size_t) p1));
        std::fill(last_uses.begin() + p0, last_uses.begin() + p1, ++clock);
    }
}

uint64_t server_blocks_slot_state::used_at(llama_pos p0, llama_pos p1) const {
    uint64_t last = 0;
    for (llama_pos p = p0; p < std::min(p1, (llama_pos) last_uses.size()); ++p) {
        last = std::max(last, last_uses[p]);
    }
    return last;
}

void server_blocks_slot_state::mark_attended(int32_t block) {
    const auto * params = record_uses ? llama_attn_capture_get(ctx, id) : nullptr;
    const int64_t n = params ? llama_attn_capture_mass(ctx, id, 0, 0).n_obs : 0;
    if (n < n_observed) { // the capture was started anew
        n_observed = 0;
        attention.clear();
    }
    if (!params || n - n_observed < block) {
        return;
    }
    std::map<llama_pos, double> present;
    const auto   sums  = llama_attn_capture_sums(ctx, id);
    const double n_present = n_rows();
    for (const auto & r : resident()) {
        for (llama_pos p0 = r.first, p1; p0 < r.second; p0 = p1) {
            p1 = std::min(r.second, (p0/block + 1)*block);
            double mass = sums.of(p0, p1).mass;
            if (params->mode == LLAMA_ATTN_SUM) { // the mean per token since the last time
                present[p0] = mass;
                mass = (mass - attention[p0])/(n - n_observed);
            }
            if (mass >= (p1 - p0)/n_present) { // at least as much as if all rows got the same
                mark_used(p0, p1);
            }
        }
    }
    attention  = std::move(present);
    n_observed = n;
}
