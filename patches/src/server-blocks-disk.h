#pragma once

// The folder of --evoke-disk: block files under a size limit, written by a thread of this class.
//
// Owns: the table of the files in the folder, the queue of writes, and the thread that executes it. Several servers may
//       share a folder, so that files appear and disappear at any time.
// Threads: open() and close() are for the main loop. scan(), refresh() and read() access the file system and are for any
//          thread except the main loop. All other calls are for any thread and return without waiting for the file
//          system; only wait() waits, until its timeout.
// Invariants: `table_mutex` protects the table, which may be traversed as a whole. `queue_mutex` protects what the main
//             loop reads and writes, and is held for a few steps only, however much is queued, never during file system
//             calls. A thread that holds `table_mutex` may lock `queue_mutex`, never the other way round. A file is
//             deleted only while `table_mutex` is held, so that a concurrent scan cannot list it again.

#include "server-blocks-file.h"
#include "server-common.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// A queued write of one block. `data` must stay valid until the write is over. Without `data` only the labels of the
// existing file are replaced, by those of `head`.
struct server_blocks_write {
    enum state_t { QUEUED, RUNNING, DONE, FAILED, CANCELLED };

    server_blocks_head head;
    const uint8_t *    data = nullptr;

    // protected by the disk's queue_mutex: read them with state(), or after wait()
    state_t     state = QUEUED;
    std::string error;

    bool over() const { return state != QUEUED && state != RUNNING; }
};

// A read of one block into memory that the main loop has allocated for it.
struct server_blocks_read {
    enum state_t { PENDING, DONE, MISSING, DAMAGED, FAILED };

    std::string        file;
    server_blocks_head head; // of the block to read; after DONE the head of the file
    uint8_t *          data = nullptr;

    std::mutex  mutex; // protects state and error, and is held during the read
    state_t     state = PENDING;
    std::string error;
};

class server_blocks_disk {
public:
    ~server_blocks_disk() { close(); }

    // Opens the folder of `option`, "DIR" or "DIR:MiB", for blocks of a model and a layout, and starts the thread.
    // Returns "", or the reason why the folder cannot be used.
    std::string open(const std::string & option, uint64_t model, uint64_t layout);

    bool   is_open() const { return !folder.empty(); }

    // Returns the size limit in bytes.
    size_t limit() const { return max_bytes; }

    // Stops the thread and forgets the folder. Writes that are still queued are cancelled.
    void close();

    // Searches the folder for files that are not in the table; those of this model and layout are queued for
    // take_new_heads().
    void scan();

    // Calls scan() if the folder has changed since the last scan.
    void refresh();

    // Returns the heads of files of this model and layout that appeared since the last call, the newest first.
    std::vector<server_blocks_head> take_new_heads();

    // Returns the names of files that disappeared since the last call.
    std::vector<std::string> take_lost_files();

    // Returns why the block of a name, whose file is in the folder, cannot be loaded here; "" if there is no such file.
    std::string unusable_reason(const std::string & tenant, const std::string & label) const;

    // Returns whether a file is in the table.
    bool contains(const std::string & file) const;

    // Queues a write.
    std::shared_ptr<server_blocks_write> write(server_blocks_head head, const uint8_t * data);

    // Cancels a write. Returns false if it is running at the moment.
    bool cancel(server_blocks_write & job);

    // Waits until all `jobs` are over, for `timeout_ms` at most. Returns whether all are over.
    bool wait(const std::vector<std::shared_ptr<server_blocks_write>> & jobs, int timeout_ms);

    server_blocks_write::state_t state(const server_blocks_write & job) const;

    // Reads and verifies a block in the calling thread. Does nothing for a job that has been executed. Renames a damaged
    // file to .bad.
    void read(server_blocks_read & job);

    // Records that a file is used now: files are deleted in the order of their last use.
    void mark_used(const std::string & file);

    // Queues the deletion of a file.
    void remove(const std::string & file);

    // Returns the counters of the folder for replies.
    json stats() const;

private:
    struct entry {
        size_t      bytes = 0;
        uint64_t    used  = 0; // last use in ns of the wall clock, the file's modification time; 0: damaged (.bad)
        std::string tenant;
        std::string unusable;  // why the file cannot be loaded here, or ""
        std::set<std::pair<std::string, std::string>> names; // (tenant, label), of unusable files only
    };

    // one item of the queue: a write, or the deletion of a file
    struct queue_item {
        std::shared_ptr<server_blocks_write> write;
        std::string file;
    };

    // a file that needs room in the folder
    struct room_request {
        const std::string & file;
        const std::string & tenant;
        size_t              bytes;
        bool                replaces; // it replaces a file of the same name, from which its rows are read
    };

    using file_table = std::map<std::string, entry>;

    std::string path(const std::string & file) const { return folder + "/" + file; }

    // executed by the thread
    void run_queue();
    void run_write(server_blocks_write & job);
    void write_file(const server_blocks_write & job, const std::string & file);
    void set_file_times();

    // The caller of these holds table_mutex, except of scan_file(), quarantine() and folder_time().
    void take_uses();
    void make_room(const room_request & request, std::unique_lock<std::mutex> & lock);
    bool free_bytes(const room_request & request);
    bool delete_one(const room_request & request);
    file_table::iterator next_to_delete(const room_request & request);
    void add_entry(const std::string & file, entry e);
    void remove_entry(const std::string & file);
    void delete_file(const std::string & file);
    void report_lost(const std::string & file);
    void scan_file(const std::string & file);
    void quarantine(const std::string & file);
    uint64_t folder_time() const;

    std::string folder;
    size_t      max_bytes = 0;
    uint64_t    model  = 0;
    uint64_t    layout = 0;

    mutable std::mutex table_mutex;
    file_table  files;
    size_t      n_used = 0;           // bytes of `files`
    size_t      n_older = 0;          // files of earlier versions of the format
    size_t      n_older_logged = 0;   // value of n_older when it was last logged
    int64_t     scanned_ms = 0;       // time of the last scan
    bool        full_by_others = false; // the disk is full and deleting a file of this folder did not help

    mutable std::mutex      queue_mutex;
    std::condition_variable changed;
    std::set<std::string>   file_names; // keys of `files`
    std::map<std::pair<std::string, std::string>, std::string> unusable_names; // (tenant, label) -> reason
    std::vector<std::pair<uint64_t, server_blocks_head>> new_heads; // with the time of last use
    std::vector<std::string> lost_files;
    std::deque<queue_item>  queue;
    size_t                  n_queued_writes = 0; // writes in `queue`
    std::map<std::string, uint64_t> uses;        // file -> time of last use, not yet in `files`
    std::string last_error;
    uint64_t    n_written = 0, n_failed = 0, n_damaged = 0, n_deleted = 0, n_read = 0; // since the process started
    size_t      n_used_snapshot = 0; // n_used, for stats()
    uint64_t    scanned_folder_time = 0; // folder_time() at the last scan, 0: not usable
    bool        stopping = false;

    // for the thread only
    std::map<std::string, uint64_t> file_times; // file -> time of last use, not yet its modification time
    std::thread worker;
};
