#pragma once

// One saved block as a file: a head that describes the block, then its rows, both with checksums.
//
// Owns: nothing. Every function opens the files it needs and closes them.
// Threads: any. No function here needs a context.
// Invariants: a file appears under its name complete or not at all, and is used only if all its checksums hold.
//             Checksums detect damage, not forgery: the folder is private to its owner.

#include "llama-kv-block.h"
#include "server-blocks-history.h"

#include "common.h"

#include <stdexcept>
#include <string>
#include <vector>

// The least and the greatest value of each channel of a block's keys, for some layers: llama_attn_capture_bounds().
struct server_blocks_bounds {
    std::vector<int32_t> layers;
    std::vector<float>   values; // of each layer the least values, then the greatest

    size_t size() const { return layers.size()*sizeof(int32_t) + values.size()*sizeof(float); }
};

// A name of a block, and the session that saved the block under this name.
struct server_blocks_label {
    std::string name;
    std::string session;
};

// Everything that the file of a block has beside the rows.
struct server_blocks_head {
    uint32_t    version = 0;     // of the format; set by peek and read
    uint64_t    model   = 0;     // server_blocks_model_id() of the server that wrote it
    std::string tenant;
    std::vector<server_blocks_label> labels;
    uint64_t    prefix_hash = 0; // of the tokens before p0
    uint64_t    hash        = 0; // of the tokens up to p1
    llama_tokens   tokens;       // of [p0, p1)
    llama_kv_block kv;           // without data
    server_blocks_row_list rows; // origin of the rows; files before version 3 do not have it
    server_blocks_bounds bounds; // empty where attention was not captured
};

struct server_blocks_file_error : std::runtime_error {
    enum kind_t {
        MISSING,       // there is no such file
        DAMAGED,       // the content is not what was written, or the file is not a block file
        OTHER_VERSION, // the file has another version of this format, as far as its first bytes show
        FAILED,        // the system refused: the folder cannot be written, an I/O error, ...
        FULL,          // the system refused: no space
    } kind;

    server_blocks_file_error(kind_t kind, const std::string & what) : std::runtime_error(what), kind(kind) {}
};

// Returns a value that separates rows of one model from rows of another: metadata and samples of every tensor of the
// model's files, the values of --override-kv, contents, scales and layers of control vectors. 0 if a file cannot be
// read. LoRA adapters differ by request: the hashes of the tokens contain them.
uint64_t server_blocks_model_id(const common_params & params);

// Returns the same for the projector of images and sounds and the options that change its rows; 0 if it cannot be read.
uint64_t server_blocks_projector_id(const common_params & params);

// The first version of the format that records the origin of rows. Files of earlier versions are not used.
constexpr uint32_t SERVER_BLOCKS_FILE_FIRST_USED = 3;

// Returns a 64-bit checksum of n bytes.
uint64_t server_blocks_checksum(const void * data, size_t n, uint64_t seed = 0);

// Returns the name of the file of a block, the same for every server that would accept the file.
std::string server_blocks_file_name(const server_blocks_head & head);

// Returns the bytes of the file of a block.
size_t server_blocks_file_size(const server_blocks_head & head);

// Writes the file atomically, readable by the owner only; replaces a file of that name. Temporary files end in ".tmp"
// and are locked while they are written. Without `data` the rows are copied from the file that is replaced: `head` must
// describe that file, except for the labels. Throws server_blocks_file_error.
void server_blocks_file_write(const std::string & folder, const server_blocks_head & head, const uint8_t * data);

// Reads and checks the head, and compares the size of the file with it; does not read the rows.
// Throws server_blocks_file_error.
server_blocks_head server_blocks_file_peek(const std::string & path);

// Reads and checks the rows into `data` (head.kv.size bytes) and returns the head of the file, which must describe the
// same block as `head`. Throws server_blocks_file_error.
server_blocks_head server_blocks_file_read(const std::string & path, const server_blocks_head & head, uint8_t * data);

// Deletes a temporary file unless a process is still writing it.
void server_blocks_file_remove_abandoned(const std::string & path);
