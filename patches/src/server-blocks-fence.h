#pragma once

// Copies between cells and host memory that a device may still be executing.
//
// Owns: whether such copies are pending.
// Threads: the main loop only.
// Invariant: host memory of a block is read, overwritten or released by the host only after wait().

#include "llama-kv-block.h"

class server_blocks_fence {
public:
    // Sets the context whose copies are meant; nullptr when it no longer exists, and its copies with it.
    void reset(llama_context * context) {
        ctx     = context;
        pending = false;
    }

    // Records that a copy has been started.
    void on_copy_started() { pending = true; }

    // Waits for all copies that have been started.
    void wait() {
        if (pending && ctx) {
            llama_kv_block_fence(ctx);
        }
        pending = false;
    }

private:
    llama_context * ctx = nullptr;
    bool pending = false;
};
