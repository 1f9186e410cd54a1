#pragma once

// One block-plan: a list of ops on a slot, executed as a whole or not at all.
//
// Owns: a model of the slot as it will be after the ops checked so far. Lives as long as one call.
// Threads: the main loop only, between two decodes.
// Invariants: run() first checks every op on the model (dry run), then reserves memory for all new copies, then executes:
//             saves first, because they change nothing in the slot, then the other ops in their order. After the
//             reservation no op can fail. The ops may cover the slot's tokens a fixed number of times at most.

#include "server-blocks-checks.h"

#include <map>
#include <set>
#include <string>
#include <vector>

// One op of a plan. An op of the body that saves and evicts becomes two of these.
struct server_blocks_op {
    std::string  kind;   // "save", "evict", ...
    const json * fields; // the op of the body
    const json * name;   // of a save: the name of the new block
    size_t       source; // index of the op in the body

    // Appends the ops that one op of the body stands for.
    static void expand(const std::string & kind, const json & op, size_t source, std::vector<server_blocks_op> & out);
};

class server_blocks_plan {
public:
    // `body`: of the call; tenant, session, epoch and expectations are read from it. Throws server_blocks_error when the
    // slot is not as expected. `parts`, `slot` and `body` must outlive the plan.
    server_blocks_plan(const server_blocks_parts & parts, const server_blocks_slot & slot, const json & body);
    ~server_blocks_plan();

    // Executes the ops. Returns the reply; throws server_blocks_error, and then nothing has changed.
    json run(const std::vector<server_blocks_op> & ops);

private:
    void check_media(llama_pos p0, llama_pos p1) const;
    void check_expectations(const json & body) const;
    void check_ops(const std::vector<server_blocks_op> & ops);
    void reserve();
    json execute(const std::vector<server_blocks_op> & ops);

    json run_op(const server_blocks_op & op);
    json save  (const json & op, const json & label);
    json evict (const json & op);
    json load  (const json & op);
    json set_budget(const json & op);
    json limit_reuse(const json & op);
    json probe ();
    json drop  (const json & op);

    llama_kv_ranges evicted_ranges(const json & op);
    void check_eviction(const llama_kv_ranges & ranges);
    void check_load(const json & op, const std::string & name, const server_blocks_key & key);
    void count_tokens(int64_t n);
    void bind_name(const std::string & name, const server_blocks_key & key);

    server_blocks_parts        parts;
    const server_blocks_slot & slot;
    server_blocks_slot_state & state;
    std::string                tenant;
    std::string                session;
    server_blocks_text         text;
    bool                       dry = true;

    // the model of the slot
    llama_kv_ranges            resident;
    const llama_kv_ranges      resident_before; // the plan
    int32_t                    n_resident = 0;
    int32_t                    n_free = 0;
    int32_t                    max_rows = 0;    // of the budget, 0: none

    server_blocks_key_set      needed;          // copies that the plan makes or loads
    server_blocks_key_set      new_keys;        // copies that the plan makes
    size_t                     new_bytes = 0;   // of those
    std::map<std::string, server_blocks_key> names; // the block of each name, the same in all ops
    std::set<std::string>      dropped;         // names
    int64_t                    tokens_left = 0; // how many tokens the ops may still cover
};
