#pragma once

// The files of copies: which copy has which file, and what has to be written.
//
// Owns: the folder (disk), the table from file names to copies, and the lists of copies that wait for the disk.
// Threads: the main loop only, except disk(), which is for any thread. The main loop never accesses the file system: it
//          queues writes, and poll_write() applies their results.
// Invariants: the table has exactly the files of copies with `on_disk`. A copy with a read or a write is in
//             in_progress().

#include "server-blocks-copy.h"
#include "server-blocks-disk.h"
#include "server-blocks-fence.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

class server_blocks_copy_files {
public:
    // `fence`: of the copies between cells and host memory; must outlive this object.
    explicit server_blocks_copy_files(server_blocks_fence & fence) : fence(fence) {}

    // Opens the folder of an --evoke-disk option for blocks of a model and a layout. Returns false, with the reason in
    // error() and in the log, when the folder cannot be used.
    bool open(const std::string & option, uint64_t model, uint64_t layout);
    bool is_open() const { return folder.is_open(); }

    // Ends every write, and forgets the folder.
    void close() { folder.close(); }

    // Forgets which copies have files. The files stay.
    void clear() { owners.clear(); }

    // Returns why the folder cannot be used, or "".
    const std::string & error() const { return open_error; }

    server_blocks_disk & disk() { return folder; }
    const server_blocks_disk & disk() const { return folder; }

    // ---- the table

    // Returns the number of copies that have a file.
    size_t size() const { return owners.size(); }

    // Returns the name of the file of a copy, whether the file exists or not.
    std::string name_of(const server_blocks_key & key, const server_blocks_copy & copy) const;

    // Returns the key of the copy that has a file, or nullptr.
    const server_blocks_key * owner_of(const std::string & file) const;

    // Records that a copy has a file.
    void add(const server_blocks_key & key, server_blocks_copy & copy, const std::string & file);

    // Records that a copy no longer has a file.
    void forget(server_blocks_copy & copy, const std::string & file);

    // Returns whether the copy is only on disk and another process has deleted its file.
    bool is_missing(const server_blocks_key & key, const server_blocks_copy & copy) const;

    // Forgets a copy that is about to be erased, and queues the deletion of its file.
    void remove(const server_blocks_key & key, server_blocks_copy & copy);

    // Queues an update of the time of last use of the copy's file.
    void mark_used(const server_blocks_key & key, const server_blocks_copy & copy);

    // ---- writes and reads

    // Queues a write of a copy whose file is missing or not current. Does nothing while a write is queued, while the copy
    // has nothing to write, and for a moment after a failure unless `insist`.
    void write(const server_blocks_key & key, server_blocks_copy & copy, bool insist = false);

    // Applies the result of a write that is over.
    void poll_write(const server_blocks_key & key, server_blocks_copy & copy);

    // Gives up a write. Returns the write if it is running: then it still reads the copy's memory; else nullptr.
    std::shared_ptr<server_blocks_write> cancel_write(const server_blocks_key & key, server_blocks_copy & copy);

    // Makes a pending read of a copy into `data`, which the thread of a call executes.
    void begin_read(const server_blocks_key & key, server_blocks_copy & copy, uint8_t * data);

    // Ends the read of a copy, whatever its result. Returns it.
    std::shared_ptr<server_blocks_read> end_read(const server_blocks_key & key, server_blocks_copy & copy);

    // Returns the keys of copies that are read or written.
    std::vector<server_blocks_key> in_progress() const { return { active.begin(), active.end() }; }

    // Lists a copy that is only on disk and whose file has other names. The list is empty but for writes that fail.
    void mark_outdated(const server_blocks_key & key) { outdated_keys.insert(key); }
    void unmark_outdated(const server_blocks_key & key) { outdated_keys.erase(key); }
    std::vector<server_blocks_key> outdated() const { return { outdated_keys.begin(), outdated_keys.end() }; }

private:
    server_blocks_head head_of(const server_blocks_key & key, const server_blocks_copy & copy) const;
    void update_active(const server_blocks_key & key, const server_blocks_copy & copy);

    server_blocks_fence & fence;
    server_blocks_disk    folder;
    std::string           open_error;
    uint64_t              model    = 0;
    int64_t               retry_ms = 0;    // no write before this time: the disk has failed
    std::map<std::string, server_blocks_key> owners; // file name -> key
    server_blocks_key_set active;          // copies with a read or a write
    server_blocks_key_set outdated_keys;
};
