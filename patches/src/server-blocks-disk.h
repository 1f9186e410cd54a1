#pragma once

// The folder behind --evoke-disk: block files under a cap, written by a thread of our own.
//
// Several servers may share a folder. Nothing here touches the store or a context: the main loop asks,
// and looks later at what has become of it.

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

// a block on its way to its file; `data` must stay until it is over. Without `data` the file that is there gets the
// labels of `head`
struct server_blocks_write {
    enum state_t { QUEUED, RUNNING, DONE, FAILED, CANCELLED };

    server_blocks_head head;
    const uint8_t *    data = nullptr;

    // under the lock of what the main loop sees
    state_t     state = QUEUED;
    std::string error;

    bool over() const { return state != QUEUED && state != RUNNING; }
};

// a block on its way from its file into memory that the main loop has set aside for it
struct server_blocks_read {
    enum state_t { PENDING, DONE, GONE, DAMAGED, FAILED };

    std::string        file;
    server_blocks_head head;
    uint8_t *          data = nullptr;

    // under `mutex`
    std::mutex  mutex;
    state_t     state = PENDING;
    std::string error;
};

class server_blocks_disk {
public:
    ~server_blocks_disk() { close(); }

    // "DIR" or "DIR:MiB"; returns why the folder cannot be used, or ""
    std::string open(const std::string & option, uint64_t model, uint64_t layout);

    bool     is_open() const { return !folder.empty(); }
    size_t   cap() const { return n_cap; }

    // what is still to be written is lost
    void close();

    // ---- any thread

    // looks for files it does not know; those of this model and layout wait for found()
    void scan();

    // the same, if somebody else has changed the folder since; never on the main loop: it asks the file system
    void refresh();

    // the files of this model and layout seen since the last call
    std::vector<server_blocks_head> found();

    // files that are no more, since the last call
    std::vector<std::string> gone();

    // why a name that is in the folder cannot be used here, or ""
    std::string foreign(const std::string & tenant, const std::string & label) const;

    // whether a file of that name is there, as far as is known
    bool holds(const std::string & file) const;

    // queues a write
    std::shared_ptr<server_blocks_write> write(server_blocks_head head, const uint8_t * data);

    // never mind; false if it is being written just now
    bool cancel(server_blocks_write & job);

    // until all these are over, or the time is; true if all are
    bool wait(const std::vector<std::shared_ptr<server_blocks_write>> & jobs, int timeout_ms);

    server_blocks_write::state_t state(const server_blocks_write & job) const;

    // verifies and reads; only the first call for a read does anything. A damaged file is put aside.
    void read(server_blocks_read & job);

    // it was used: others go first. Or it is of no use any more
    void touch (const std::string & file);
    void remove(const std::string & file);

    json stats() const;

private:
    struct entry {
        size_t   bytes = 0;
        uint64_t used  = 0; // ns of the wall clock, the file's time of change
        std::string tenant;
        std::string why;    // not to be used here, because
        std::set<std::pair<std::string, std::string>> names; // of those
    };

    // what the thread is to do: write, touch or remove
    struct chore {
        std::shared_ptr<server_blocks_write> write;
        std::string file;
        uint64_t    touched = 0; // ns of the wall clock; 0: remove
    };

    std::string path(const std::string & file) const { return folder + "/" + file; }

    void work();
    void write_one(server_blocks_write & job);
    void write_file(const server_blocks_write & job, const std::string & file);
    void apply_touches();
    void lose(const std::string & file); // the main loop is to know
    uint64_t folder_time() const;

    // a file to be written: whose it is, and how large it will be
    struct wanted {
        const std::string & file;
        const std::string & tenant;
        size_t              bytes;
        bool                copied; // from the file that it replaces
    };

    void make_room(const wanted & want, std::unique_lock<std::mutex> & lock);
    bool free_up(const wanted & want);
    bool delete_one(const wanted & want);
    std::map<std::string, entry>::iterator next_to_delete(const wanted & want);
    void add(const std::string & file, entry e);
    void forget(const std::string & file);
    void erase(const std::string & file);
    void look_at(const std::string & file);
    void put_aside(const std::string & file);

    std::string folder;
    size_t      n_cap  = 0;
    uint64_t    model  = 0;
    uint64_t    layout = 0;

    // The table of the folder, which may be gone through as a whole: for our thread and those of calls, never for the
    // main loop. Whoever has this lock may take the other one, never the other way round.
    mutable std::mutex      table;
    std::map<std::string, entry> files;
    size_t                  n_used = 0; // bytes of `files`
    size_t      n_older = 0, n_older_said = 0; // files of earlier versions of the format, and of how many the log says so
    int64_t     scanned_ms = 0; // when the folder was last looked through
    bool        others_fill = false; // the disk is full, and deleting a file of ours did not help: no more of them go for that

    // What the main loop sees and says. This lock is only ever held for a few steps, never for all files or while the
    // file system is asked.
    mutable std::mutex      mail;
    std::condition_variable changed;
    std::set<std::string>   present; // of `files`
    std::map<std::pair<std::string, std::string>, std::string> foreigners; // names that cannot be used here, and why
    std::vector<std::pair<uint64_t, server_blocks_head>> fresh; // with when they were used
    std::vector<std::string> lost;
    std::deque<chore>       queue;
    std::string last_error;
    uint64_t    n_written = 0, n_failed = 0, n_damaged = 0, n_deleted = 0, n_read = 0;
    size_t      n_used_seen = 0; // `n_used`
    uint64_t    folder_seen = 0; // the folder's time of change as of the last scan, 0 = of no use
    bool        stopping  = false;
    std::thread worker;
};
