#pragma once

// Checks that several block calls share. Functions named check, fail or require throw server_blocks_error.
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

// Fails with 404, or with 409 where a file on disk has this name but cannot be used by this server.
[[noreturn]] void fail_unknown_block(const server_blocks_store & store, const std::string & tenant, const std::string & name);

// Returns the key of the copy of a name. Fails unless the copy is in host memory: the thread of the call has read it if it
// was only on disk.
server_blocks_key require_in_ram(const server_blocks_store & store, const std::string & tenant, const std::string & name);

// Fails unless a call of this session may load the copy. Rows that were decoded while text before them was missing differ
// from the rows that another session would decode there. Only the session that saved them may load them, and not even
// that one when "whole" is set.
void check_visibility(const json & body, const server_blocks_copy & copy, const std::string & name, const std::string & session);

// Fails unless the copy's rows can be written into the cells of this context.
void check_layout(const server_blocks_context & context, const server_blocks_copy & copy, const std::string & name);

// Fails while the slot decodes a request.
void check_idle(const server_blocks_slot & slot);

// Fails unless the body names the present epoch of the slot.
void check_epoch(const json & body, const server_blocks_slot_state & slot);

// Returns whether the copy was saved from the tokens that `text` has at its positions and before; with `any_prefix` only
// at its positions.
bool matches(const server_blocks_copy & copy, const server_blocks_text & text, bool any_prefix);
