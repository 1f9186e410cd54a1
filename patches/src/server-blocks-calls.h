#pragma once

// The block calls: checks each HTTP call completely, then executes it.
//
// Owns: nothing; a call owns what it waits for.
// Threads: run() is for the main loop, between two decodes; do_disk_work() and is_action() for the thread of a call.
// Invariants: run() never accesses the file system. Where a call needs files it sets `waits`; the thread of the call then
//             does the disk work and calls run() once more, a few times at most.

#include "server-blocks-checks.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

// One HTTP call, carried to the main loop by a task.
struct server_blocks_call {
    std::string  action;
    int          id_slot = -1;
    json         body;
    llama_tokens tokens; // of action "view": the ids of the rendered prompt, see server-blocks-media.h
    int32_t      behind = 0; // of action "view": how many ids precede these, and count as those of each slot

    // disk work that the thread of the call does before run() is called once more
    bool waits   = false;
    int  n_waits = 0;     // how many times it has done so
    bool scan    = false; // search the folder for files that other processes wrote
    std::vector<std::pair<std::string, std::shared_ptr<server_blocks_read>>> reads; // block name, read
    std::vector<std::shared_ptr<server_blocks_write>> writes; // to wait for
};

class server_blocks_calls {
public:
    explicit server_blocks_calls(const server_blocks_parts & parts) : parts(parts) {}

    // Executes a call. Returns the reply, or {"error": {...}}. When it sets `call.waits`, the result is not a reply: the
    // caller executes do_disk_work() in the thread of the call, then run() once more.
    json run(server_blocks_call & call, const std::vector<server_blocks_slot> & slots);

    // Does the disk work of a call, in the thread of the call.
    void do_disk_work(server_blocks_call & call);

    // Returns whether POST /slots/{id}?action=... is a block call.
    static bool is_action(const std::string & action);

    // Returns 16 hexadecimal digits that name this process: copies and epochs do not outlive it.
    static const std::string & instance();

private:
    json dispatch(server_blocks_call & call, const std::vector<server_blocks_slot> & slots);
    json view     (const server_blocks_call & call, const std::vector<server_blocks_slot> & slots) const;
    json info     (const json & body, const server_blocks_slot & slot);
    json plan     (const json & body, const server_blocks_slot & slot);
    json single_op(const server_blocks_call & call, const server_blocks_slot & slot);
    json adopt    (const json & body, const server_blocks_slot & slot);
    json insert   (const json & body, const server_blocks_slot & slot);
    json compact  (const json & body, const server_blocks_slot & slot);
    json find     (const json & body, const server_blocks_slot & slot) const;
    json share    (const json & body, const server_blocks_slot & slot, const std::vector<server_blocks_slot> & slots);
    json drop     (const json & body);
    json spill    (server_blocks_call & call);
    json row_sums (const json & body, const server_blocks_slot & slot) const;

    json slot_json(const server_blocks_slot & slot) const;
    json copies_json(const std::string & tenant, const server_blocks_text & text, const llama_kv_ranges & resident, uint64_t after) const;
    server_blocks_slot_state & state_of(const server_blocks_slot & slot) const { return parts.context.slots[slot.id]; }
    llama_tokens adopted_tokens(const json & body, const server_blocks_slot & slot, bool with_media) const;
    std::map<llama_pos, server_blocks_key> adopted_copies(const json & body, const server_blocks_text & text, json & incomplete) const;
    int32_t load_adopted(const server_blocks_slot & slot, const server_blocks_text & text, const std::map<llama_pos, server_blocks_key> & copies);
    server_blocks_key_set spilled_keys(const json & body) const;
    void check_shift(const json & body, const server_blocks_slot & slot) const;
    bool prepare_reads(server_blocks_call & call);

    server_blocks_parts parts;
};
