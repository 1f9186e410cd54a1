#pragma once

// One saved block as a file: a head that says what it is, then its rows, both under checksums.
// A file is used only if every byte of it is as it was written. Checksums find damage, not forgery:
// the folder is private to its owner.
//
// No call here knows a context; all may be made on any thread.

#include "llama-kv-block.h"
#include "server-blocks-history.h"

#include "common.h"

#include <stdexcept>
#include <string>
#include <vector>

// the least and the greatest value of each channel of a block's keys, of some layers (llama_attn_capture_bounds)
struct server_blocks_bounds {
    std::vector<int32_t> layers;
    std::vector<float>   values;

    size_t size() const { return layers.size()*sizeof(int32_t) + values.size()*sizeof(float); }
};

// a name of a block, and the session that saved the block under it
struct server_blocks_label {
    std::string name;
    std::string session;
};

// everything but the rows
struct server_blocks_head {
    uint32_t    version = 0; // of the format; set by peek and read
    uint64_t    model   = 0; // server_blocks_model_id() of the server that wrote it
    std::string tenant;
    std::vector<server_blocks_label> labels;
    uint64_t    prefix_hash = 0; // of the tokens before p0
    uint64_t    hash        = 0; // of the tokens up to p1
    llama_tokens   tokens;       // of [p0, p1)
    llama_kv_block kv;           // without data
    server_blocks_row_list rows; // what they were made from; files before version 3 do not say it
    server_blocks_bounds bounds; // where attention was captured; what is there is as long as its layers say
};

struct server_blocks_file_error : std::runtime_error {
    enum kind_t {
        GONE,    // there is no such file
        DAMAGED, // it is not what was written, or not ours
        OTHER,   // of another version of this format, as far as can be told
        FAILED,  // the system says so: the disk is full, the folder cannot be written, ...
        FULL,    // of these: no space
    } kind;

    server_blocks_file_error(kind_t kind, const std::string & what) : std::runtime_error(what), kind(kind) {}
};

// What keeps the rows of one model from being taken for those of another: metadata and samples of every tensor of the
// model's files, the values of --override-kv, contents, scales and layers of control vectors; 0 if a file cannot be read.
// LoRA adapters differ by request: they are in the hashes of the tokens.
uint64_t server_blocks_model_id(const common_params & params);

// the first version of the format that says what rows were made from; files of earlier ones are not used
constexpr uint32_t SERVER_BLOCKS_FILE_FIRST_USED = 3;

// 64 bits over n bytes
uint64_t server_blocks_checksum(const void * data, size_t n, uint64_t seed = 0);

// the name of the file of a block: the same for every server that would accept it
std::string server_blocks_file_name(const server_blocks_head & head);

// bytes of the file of a block
size_t server_blocks_file_size(const server_blocks_head & head);

// Writes the file whole or not at all, readable by the owner only; a file of that name is replaced.
// Temporary files end in ".tmp" and are locked while they are written.
// Without `data` the rows are those of the file that is replaced: `head` must be what it says, but for the labels.
void server_blocks_file_write(const std::string & folder, const server_blocks_head & head, const uint8_t * data);

// what the file says of itself, its size checked, its rows not
server_blocks_head server_blocks_file_peek(const std::string & path);

// the rows into `data` (head.kv.size bytes), and the places they had; the file must be of the block that `head` says
server_blocks_head server_blocks_file_read(const std::string & path, const server_blocks_head & head, uint8_t * data);

// deletes a temporary file unless somebody is still writing it
void server_blocks_file_remove_abandoned(const std::string & path);
