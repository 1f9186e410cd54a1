#pragma once

// Attention of the model: starts and stops capturing for a slot, and reports what was captured.
//
// Owns: nothing. libllama keeps what is captured (llama-attn-capture.h); copies keep the bounds of their keys.
// Threads: the main loop only, between two decodes.
// Invariants: one call computes at most a fixed number of values, checked before any of them is computed. Capturing
//             never takes more memory than its limits; where the device has less, it refuses and nothing changes.

#include "llama-attn-capture.h"
#include "server-blocks-context.h"
#include "server-blocks-store.h"

#include <map>
#include <string>

class server_blocks_capture {
public:
    // Both must outlive this object.
    server_blocks_capture(const server_blocks_context & context, const server_blocks_store & store) : context(context), store(store) {}

    // Returns the layers and limits for /props.
    json props() const;

    // Op attn-capture: starts, changes or stops the capture of a slot. `dry`: only checks the op and reserves memory of
    // the device. Throws server_blocks_error.
    json run_op(const json & op, const server_blocks_slot & slot, bool dry) const;

    // Call attention: returns the masses of ranges, and query rows, bounds and products where the body asks for them.
    // Throws server_blocks_error.
    json report(const json & body, const server_blocks_slot & slot) const;

    // Starts a capture unless the slot has one. Returns whether the slot has one: false where the memory does not suffice.
    // Never throws server_blocks_error, because the main loop calls it while it decodes.
    bool start(int id, llama_attn_params params) const;

    // Returns the bounds of the resident keys of [p0, p1), or nothing unless query rows are captured in the slot. A copy
    // contains them, so that a client can score a block that is not resident.
    server_blocks_bounds key_bounds(int id, llama_pos p0, llama_pos p1) const;

    // Returns the bytes of key_bounds() of one block.
    size_t key_bounds_bytes(int id) const;

    // Returns whether a copy lacks the bounds that key_bounds() would give it now.
    bool lacks_bounds(int id, const server_blocks_copy & copy) const;

    // Returns layer -> channels of its keys, for all layers that can be captured.
    static std::map<int32_t, int32_t> key_channels(const llama_context * ctx);

private:
    bool fit(llama_attn_params & params, int id) const;
    void check_work(const json & body, const server_blocks_slot & slot) const;
    json queries_json (const server_blocks_slot & slot) const;
    json bounds_json  (const json & body, const server_blocks_slot & slot) const;
    json products_json(const json & body, const server_blocks_slot & slot) const;
    server_blocks_text text_of(const server_blocks_slot & slot) const;
    const server_blocks_copy * find_copy(const std::string & tenant, const server_blocks_text & text, llama_pos p0, llama_pos p1) const;

    const server_blocks_context & context;
    const server_blocks_store   & store;
};
