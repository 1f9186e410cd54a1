#pragma once

// Checks that several block calls share. Every function throws server_blocks_error when its check fails.
// Threads: the main loop only.

#include "server-blocks-capture.h"
#include "server-blocks-context.h"
#include "server-blocks-eviction.h"
#include "server-blocks-json.h"
#include "server-blocks-store.h"
#include "server-blocks-transfer.h"

#include <string>

// What block calls work on. All of it outlives every call.
struct server_blocks_parts {
    server_blocks_context       & context;
    server_blocks_store         & store;
    server_blocks_transfer      & transfer;
    const server_blocks_capture & capture;
    server_blocks_eviction      & eviction;
};

// Fails with 404, or with 409 where a file has the name but cannot be used here.
[[noreturn]] void fail_unknown_block(const server_blocks_store & store, const std::string & tenant, const std::string & name);

// Returns the key of a copy that can be loaded now: the thread of the call has read it if it was on disk.
server_blocks_key require_in_ram(const server_blocks_store & store, const std::string & tenant, const std::string & name);

// Fails unless the call of a session may load a copy. Rows that were decoded while text before them was missing are not
// what another history would have there: only the session that saved them loads them, unless the call asks for complete
// copies only.
void check_visibility(const json & body, const server_blocks_copy & copy, const std::string & name, const std::string & session);

// Fails unless the copy's rows can be written into the cells of this context.
void check_layout(const server_blocks_context & context, const server_blocks_copy & copy, const std::string & name);

// Fails unless the body names the present epoch of the slot.
void check_epoch(const json & body, const server_blocks_slot_state & slot);

// Returns whether the copy was made of the tokens of `text`; `any_prefix`: whatever stands before it.
bool matches(const server_blocks_copy & copy, const server_blocks_text & text, bool any_prefix);
