#include "server-blocks-disk.h"

#include "log.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <tuple>

#if defined(_WIN32)

std::string server_blocks_disk::open(const std::string &, uint64_t, uint64_t) { return "it is not supported on this system"; }
void server_blocks_disk::close() {}
void server_blocks_disk::scan() {}
void server_blocks_disk::refresh() {}
std::vector<server_blocks_head> server_blocks_disk::take_new_heads() { return {}; }
std::vector<std::string> server_blocks_disk::take_lost_files() { return {}; }
std::string server_blocks_disk::unusable_reason(const std::string &, const std::string &) const { return ""; }
bool server_blocks_disk::contains(const std::string &) const { return false; }
std::shared_ptr<server_blocks_write> server_blocks_disk::write(server_blocks_head, const uint8_t *) { return nullptr; }
bool server_blocks_disk::cancel(server_blocks_write &) { return true; }
bool server_blocks_disk::wait(const std::vector<std::shared_ptr<server_blocks_write>> &, int) { return true; }
server_blocks_write::state_t server_blocks_disk::state(const server_blocks_write & job) const { return job.state; }
void server_blocks_disk::read(server_blocks_read &) {}
void server_blocks_disk::mark_used(const std::string &) {}
void server_blocks_disk::remove(const std::string &) {}
json server_blocks_disk::stats() const { return json(); }

#else

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr size_t  DEFAULT_MIB = 4096;
static constexpr int64_t RESCAN_MS   = 5000; // other servers may write into the folder

static constexpr const char * OLDER = "an earlier version of the file format does not record the origin of rows; "
    "the server decodes and saves the text again, and deletes these files when the folder is full";

static bool ends_with(const std::string & s, const char * end) {
    const size_t n = strlen(end);
    return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

static bool is_block_file(const std::string & file, const char * end) {
    return file.compare(0, 6, "evoke-") == 0 && ends_with(file, end);
}

static std::atomic<uint64_t> latest_used { 0 };

// Returns the present time, or a later time where the system's clock has been set back: always later than the last use of
// every file in the table.
static uint64_t now_ns() {
    using namespace std::chrono;
    const uint64_t wall = duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
    uint64_t before = latest_used;
    uint64_t now;
    do {
        now = std::max(wall, before + 1);
    } while (!latest_used.compare_exchange_weak(before, now));
    return now;
}

std::string server_blocks_disk::open(const std::string & option, uint64_t model, uint64_t layout) {
    std::string dir = option;
    size_t mib = DEFAULT_MIB;
    const size_t colon = option.rfind(':');
    if (colon != std::string::npos && colon + 1 < option.size() && option.size() - colon < 12
            && option.find_first_not_of("0123456789", colon + 1) == std::string::npos) {
        dir = option.substr(0, colon);
        mib = std::stoull(option.substr(colon + 1));
    }
    if (dir.empty() || mib == 0) {
        return "the option must be DIR or DIR:MiB, with a MiB of at least 1";
    }
    if (model == 0) {
        return "the file of the model cannot be read, and blocks are stored for one model only";
    }
    mkdir(dir.c_str(), 0700);
    struct stat st;
    if (stat(dir.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) {
        return "the folder does not exist and cannot be created, or the path is not a folder: " + dir;
    }
    if (st.st_uid != geteuid() || (st.st_mode & 077) != 0) {
        return "the folder will contain text of conversations, and others than the user of the server have access to it: run chmod 700 " + dir + " as that user";
    }
    this->model  = model;
    this->layout = layout;
    folder = dir;
    max_bytes  = mib*1024*1024;
    scan();
    stopping = false;
    worker = std::thread([this]() { run_queue(); });
    return "";
}

void server_blocks_disk::close() {
    if (!worker.joinable()) {
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        stopping = true;
    }
    changed.notify_all();
    worker.join();
    const std::lock_guard<std::mutex> table_lock(table_mutex);
    const std::lock_guard<std::mutex> lock(queue_mutex);
    folder.clear();
    files.clear();
    file_names.clear();
    unusable_names.clear();
    new_heads.clear();
    lost_files.clear();
    queue.clear();
    uses.clear();
    n_queued_writes = 0;
    file_times.clear();
    n_used = n_used_snapshot = 0;
    scanned_folder_time = 0;
}

//
// the table
//

void server_blocks_disk::add_entry(const std::string & file, entry e) {
    latest_used = std::max<uint64_t>(latest_used, e.used);
    remove_entry(file);
    n_used += e.bytes;
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        file_names.insert(file);
        for (const auto & name : e.names) {
            unusable_names[name] = e.unusable;
        }
        n_used_snapshot = n_used;
    }
    files[file] = std::move(e);
}

void server_blocks_disk::remove_entry(const std::string & file) {
    const auto it = files.find(file);
    if (it != files.end()) {
        n_used -= it->second.bytes;
        const std::lock_guard<std::mutex> lock(queue_mutex);
        file_names.erase(file);
        for (const auto & name : it->second.names) {
            unusable_names.erase(name);
        }
        n_used_snapshot = n_used;
        files.erase(it);
    }
}

void server_blocks_disk::delete_file(const std::string & file) {
    remove_entry(file);
    unlink(path(file).c_str());
}

void server_blocks_disk::report_lost(const std::string & file) {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    lost_files.push_back(file);
}

static uint64_t ns_of(const timespec & t) {
    return uint64_t(t.tv_sec)*1000000000 + t.tv_nsec;
}

static uint64_t changed_at(const struct stat & st) {
#if defined(__APPLE__)
    return ns_of(st.st_mtimespec);
#else
    return ns_of(st.st_mtim);
#endif
}

// Returns when the folder was last changed, by any process; 0 while the next change could get the same time.
uint64_t server_blocks_disk::folder_time() const {
    struct stat st;
    if (stat(folder.c_str(), &st) != 0) {
        return 0;
    }
    timespec now; // of the clock that file systems take times from
#if defined(CLOCK_REALTIME_COARSE)
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
#else
    clock_gettime(CLOCK_REALTIME, &now);
#endif
    return ns_of(now) > changed_at(st) ? changed_at(st) : 0;
}

void server_blocks_disk::refresh() {
    const uint64_t now = folder_time();
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        if (now != 0 && now == scanned_folder_time) {
            return;
        }
    }
    scan();
}

void server_blocks_disk::scan() {
    std::set<std::string> listed, present, names;
    const uint64_t before = folder_time();
    {
        const std::lock_guard<std::mutex> lock(table_mutex);
        for (const auto & item : files) {
            listed.insert(item.first);
        }
    }
    if (DIR * dir = opendir(folder.c_str())) {
        while (const dirent * item = readdir(dir)) {
            names.insert(item->d_name);
        }
        closedir(dir);
    }
    for (const auto & file : names) {
        if (is_block_file(file, ".tmp")) {
            server_blocks_file_remove_abandoned(path(file));
        } else if (is_block_file(file, ".kvb") || is_block_file(file, ".bad")) {
            present.insert(file);
            if (!listed.count(file)) {
                scan_file(file);
            }
        }
    }
    const std::lock_guard<std::mutex> lock(table_mutex);
    if (n_older > n_older_logged) {
        LOG_WRN("evoke: %zu block files cannot be used: %s\n", n_older, OLDER);
        n_older_logged = n_older;
    }
    scanned_ms = ggml_time_ms();
    for (const auto & file : listed) {
        if (!present.count(file) && files.count(file) && access(path(file).c_str(), F_OK) != 0) {
            remove_entry(file); // another process deleted it
            report_lost(file);
        }
    }
    const std::lock_guard<std::mutex> queue_lock(queue_mutex);
    scanned_folder_time = before;
}

// Adds one file to the table, if it is not there.
void server_blocks_disk::scan_file(const std::string & file) {
    struct stat st;
    if (lstat(path(file).c_str(), &st) != 0 || !S_ISREG(st.st_mode)) {
        return;
    }
    entry e;
    e.bytes = st.st_size;
    e.used  = changed_at(st);
    server_blocks_head head;
    if (is_block_file(file, ".bad")) {
        e.used = 0;
    } else {
        try {
            head = server_blocks_file_peek(path(file));
            const bool older = head.version < SERVER_BLOCKS_FILE_FIRST_USED;
            if (!older && server_blocks_file_name(head) != file) {
                throw server_blocks_file_error(server_blocks_file_error::DAMAGED, "the file has the name of another block");
            }
            e.tenant = head.tenant;
            e.unusable = older ? OLDER : head.model != model ? "it was saved from another model" : head.kv.layout != layout ? "it was saved with other KV types or options" : "";
            for (const auto & label : head.labels) {
                e.names.insert({ head.tenant, label.name });
            }
        } catch (const server_blocks_file_error & error) {
            if (error.kind == server_blocks_file_error::DAMAGED) {
                LOG_WRN("evoke: %s is damaged and gets the suffix .bad: %s\n", file.c_str(), error.what());
                quarantine(file);
            }
            if (error.kind != server_blocks_file_error::OTHER_VERSION) {
                return;
            }
            e.unusable = error.what();
        }
    }
    const std::lock_guard<std::mutex> lock(table_mutex);
    if (files.count(file) || access(path(file).c_str(), F_OK) != 0) {
        return; // another thread, which held this lock, has added or deleted it meanwhile
    }
    n_older += e.unusable == OLDER ? 1 : 0;
    if (head.model == model && e.unusable.empty() && e.used > 0) {
        e.names.clear();
        const std::lock_guard<std::mutex> queue_lock(queue_mutex);
        new_heads.emplace_back(e.used, std::move(head));
    }
    add_entry(file, std::move(e));
}

// Renames a damaged file to .bad: it is never loaded, and stays for inspection while there is room.
void server_blocks_disk::quarantine(const std::string & file) {
    const std::string bad = file.substr(0, file.size() - 4) + ".bad";
    struct stat st;
    const bool renamed = rename(path(file).c_str(), path(bad).c_str()) == 0 && lstat(path(bad).c_str(), &st) == 0;
    const std::lock_guard<std::mutex> lock(table_mutex);
    {
        const std::lock_guard<std::mutex> queue_lock(queue_mutex);
        n_damaged++;
    }
    remove_entry(file);
    if (renamed) {
        entry e;
        e.bytes = st.st_size;
        add_entry(bad, std::move(e));
    }
}

std::vector<server_blocks_head> server_blocks_disk::take_new_heads() {
    std::vector<std::pair<uint64_t, server_blocks_head>> heads;
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        heads.swap(new_heads);
    }
    std::sort(heads.begin(), heads.end(), [](const auto & a, const auto & b) { return a.first > b.first; });
    std::vector<server_blocks_head> res;
    for (auto & item : heads) {
        res.push_back(std::move(item.second));
    }
    return res;
}

std::vector<std::string> server_blocks_disk::take_lost_files() {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    std::vector<std::string> res;
    res.swap(lost_files);
    return res;
}

std::string server_blocks_disk::unusable_reason(const std::string & tenant, const std::string & label) const {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    const auto it = unusable_names.find({ tenant, label });
    return it == unusable_names.end() ? "" : it->second;
}

bool server_blocks_disk::contains(const std::string & file) const {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    return file_names.count(file) > 0;
}

json server_blocks_disk::stats() const {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    return json {
        {"used", n_used_snapshot}, {"budget", max_bytes}, {"n_files", file_names.size()}, {"n_queued", n_queued_writes}, {"n_written", n_written},
        {"n_read", n_read}, {"n_failed", n_failed}, {"n_damaged", n_damaged}, {"n_deleted", n_deleted}, {"last_error", last_error},
    };
}

//
// reading
//

void server_blocks_disk::read(server_blocks_read & job) {
    const std::lock_guard<std::mutex> job_lock(job.mutex);
    if (job.state != server_blocks_read::PENDING) {
        return;
    }
    try {
        job.head  = server_blocks_file_read(path(job.file), job.head, job.data);
        job.state = server_blocks_read::DONE;
        const std::lock_guard<std::mutex> lock(queue_mutex);
        n_read++;
        return;
    } catch (const server_blocks_file_error & e) {
        job.error = e.what();
        const bool damaged = e.kind == server_blocks_file_error::DAMAGED || e.kind == server_blocks_file_error::OTHER_VERSION;
        job.state = damaged ? server_blocks_read::DAMAGED : e.kind == server_blocks_file_error::MISSING ? server_blocks_read::MISSING : server_blocks_read::FAILED;
    } catch (const std::exception & e) { // out of memory
        job.error = e.what();
        job.state = server_blocks_read::FAILED;
    }
    LOG_WRN("evoke: %s could not be read: %s\n", job.file.c_str(), job.error.c_str());
    if (job.state == server_blocks_read::DAMAGED) {
        quarantine(job.file);
    }
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        last_error = job.error;
    }
    if (job.state == server_blocks_read::MISSING) {
        const std::lock_guard<std::mutex> lock(table_mutex);
        remove_entry(job.file);
    }
}

//
// writing
//

std::shared_ptr<server_blocks_write> server_blocks_disk::write(server_blocks_head head, const uint8_t * data) {
    auto job = std::make_shared<server_blocks_write>();
    job->head = std::move(head);
    job->data = data;
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        queue.push_back({ job, "" });
        n_queued_writes++;
    }
    changed.notify_all();
    return job;
}

bool server_blocks_disk::cancel(server_blocks_write & job) {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    if (job.state == server_blocks_write::QUEUED) {
        job.state = server_blocks_write::CANCELLED;
        changed.notify_all();
    }
    return job.state != server_blocks_write::RUNNING;
}

bool server_blocks_disk::wait(const std::vector<std::shared_ptr<server_blocks_write>> & jobs, int timeout_ms) {
    std::unique_lock<std::mutex> lock(queue_mutex);
    return changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&]() {
        return std::all_of(jobs.begin(), jobs.end(), [](const auto & job) { return job->over(); });
    });
}

server_blocks_write::state_t server_blocks_disk::state(const server_blocks_write & job) const {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    return job.state;
}

void server_blocks_disk::mark_used(const std::string & file) {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    if (file_names.count(file)) {
        uses[file] = now_ns();
        changed.notify_all();
    }
}

void server_blocks_disk::remove(const std::string & file) {
    const std::lock_guard<std::mutex> lock(queue_mutex);
    queue.push_back({ nullptr, file });
    changed.notify_all();
}

void server_blocks_disk::run_queue() {
    sigset_t signals; // without this a write beyond a file size limit ends the process with SIGXFSZ
    sigemptyset(&signals);
    sigaddset(&signals, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);

    for (;;) {
        queue_item item;
        {
            std::unique_lock<std::mutex> lock(queue_mutex);
            changed.wait(lock, [this]() { return stopping || !queue.empty() || !uses.empty(); });
            if (queue.empty() && uses.empty()) {
                return;
            }
            if (!queue.empty()) {
                item = std::move(queue.front());
                queue.pop_front();
                n_queued_writes -= item.write ? 1 : 0;
            }
        }
        if (item.write) {
            run_write(*item.write);
        } else {
            const std::lock_guard<std::mutex> lock(table_mutex);
            take_uses();
            if (!item.file.empty()) {
                delete_file(item.file);
            }
        }
        set_file_times();
    }
}

// Moves the times of use from mark_used() into the table, because next_to_delete() goes by them. The main loop may add
// any number of them, so that queue_mutex is held only to take them over.
void server_blocks_disk::take_uses() {
    std::map<std::string, uint64_t> taken;
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        taken.swap(uses);
    }
    for (const auto & [file, used] : taken) {
        const auto it = files.find(file);
        if (it != files.end() && used > it->second.used) {
            file_times[file] = it->second.used = used;
        }
    }
}

// Writes the times of use to the files: other servers that share the folder, and the next process, read them there.
void server_blocks_disk::set_file_times() {
    for (const auto & [file, used] : file_times) {
        const timespec modified = { time_t(used/1000000000), long(used%1000000000) };
        const timespec times[2] = { modified, modified };
        utimensat(AT_FDCWD, path(file).c_str(), times, AT_SYMLINK_NOFOLLOW);
    }
    file_times.clear();
}

void server_blocks_disk::run_write(server_blocks_write & job) {
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        if (job.state == server_blocks_write::QUEUED && stopping) {
            job.state = server_blocks_write::CANCELLED;
        }
        if (job.state != server_blocks_write::QUEUED) {
            return;
        }
        job.state = server_blocks_write::RUNNING;
    }
    const std::string file = server_blocks_file_name(job.head);
    std::string error;
    bool done = false;
    try {
        write_file(job, file);
        done = true;
    } catch (const std::exception & e) {
        error = e.what();
        if (!job.data && access(path(file).c_str(), F_OK) != 0) { // the file whose labels were to be replaced is missing
            const std::lock_guard<std::mutex> lock(table_mutex);
            remove_entry(file);
            report_lost(file);
        }
    }
    bool reported = done;
    {
        const std::lock_guard<std::mutex> lock(queue_mutex);
        if (done) {
            n_written++;
        } else {
            reported = last_error == error;
            n_failed++;
            last_error = job.error = error;
        }
        job.state = done ? server_blocks_write::DONE : server_blocks_write::FAILED;
    }
    changed.notify_all();
    if (!reported) {
        LOG_WRN("evoke: a block could not be written to disk and stays in host memory: %s\n", error.c_str());
    }
}

void server_blocks_disk::write_file(const server_blocks_write & job, const std::string & file) {
    server_blocks_head head = job.head;
    if (!job.data) {
        head = server_blocks_file_peek(path(file));
        head.labels = job.head.labels;
    }
    const size_t bytes = server_blocks_file_size(head);
    std::unique_lock<std::mutex> lock(table_mutex);
    if (bytes > max_bytes) {
        throw std::runtime_error("the block is larger than --evoke-disk allows");
    }
    const room_request request { file, head.tenant, bytes, job.data == nullptr };
    make_room(request, lock);
    for (int attempt = 0; ; ++attempt) {
        try {
            lock.unlock();
            server_blocks_file_write(folder, head, job.data);
            lock.lock();
            full_by_others = false;
            break;
        } catch (const server_blocks_file_error & e) {
            lock.lock();
            const bool retry = attempt == 0 && (e.kind == server_blocks_file_error::MISSING
                ? mkdir(folder.c_str(), 0700) == 0 // another process removed the folder
                : e.kind == server_blocks_file_error::FULL && !full_by_others && free_bytes(request));
            full_by_others = full_by_others || (attempt > 0 && e.kind == server_blocks_file_error::FULL);
            if (!retry) {
                throw;
            }
        }
    }
    entry e;
    e.bytes  = bytes;
    e.used   = now_ns();
    e.tenant = head.tenant;
    file_times[file] = e.used;
    add_entry(file, std::move(e));
}

// Called when the disk is full: deletes old files with at least as many bytes as the requested file has. Returns false if
// not so many may be deleted.
bool server_blocks_disk::free_bytes(const room_request & request) {
    const size_t before = n_used;
    while (n_used + request.bytes > before) {
        if (!delete_one(request)) {
            return false;
        }
    }
    return true;
}

// Deletes files until the requested one fits under the limit. Throws if it cannot.
void server_blocks_disk::make_room(const room_request & request, std::unique_lock<std::mutex> & lock) {
    if (ggml_time_ms() - scanned_ms > RESCAN_MS) {
        lock.unlock();
        scan();
        lock.lock();
    }
    take_uses();
    const auto it = files.find(request.file);
    const size_t own = it == files.end() ? 0 : it->second.bytes; // counts until it is replaced
    while (n_used + request.bytes > max_bytes && delete_one(request)) {
    }
    if (n_used - (request.replaces ? 0 : own) + request.bytes > max_bytes) {
        throw std::runtime_error("--evoke-disk is full: files of other tenants stay until this tenant has fewer bytes than they have");
    }
    if (n_used + request.bytes > max_bytes && own > 0) {
        delete_file(request.file);
    }
}

// Returns the file to delete next, or end(): quarantined files first, then the oldest file of the tenant that has most
// bytes, the requested file included. A tenant never deletes files of a tenant that has fewer bytes than itself.
server_blocks_disk::file_table::iterator server_blocks_disk::next_to_delete(const room_request & request) {
    std::map<std::string, size_t> bytes;
    for (const auto & [file, e] : files) {
        if (e.used == 0) {
            continue;
        }
        bytes[e.tenant] += file == request.file ? 0 : e.bytes;
    }
    bytes[request.tenant] += request.bytes;
    auto res = files.end();
    for (auto it = files.begin(); it != files.end(); ++it) {
        const auto & e = it->second;
        const bool damaged = e.used == 0;
        if (it->first == request.file || (!damaged && e.tenant != request.tenant && bytes[e.tenant] <= bytes[request.tenant])) {
            continue;
        }
        const auto rank = [&](const entry & of) { // the least is deleted first
            return std::make_tuple(of.used != 0, std::numeric_limits<size_t>::max() - (of.used == 0 ? 0 : bytes[of.tenant]), of.used);
        };
        if (res == files.end() || rank(e) < rank(res->second)) {
            res = it;
        }
    }
    return res;
}

bool server_blocks_disk::delete_one(const room_request & request) {
    if (access(folder.c_str(), W_OK) != 0 && errno == EROFS) { // else the entry would be removed while the file stays
        throw std::runtime_error(string_format("an old file cannot be deleted to make room: %s", strerror(EROFS)));
    }
    const auto next = next_to_delete(request);
    if (next == files.end()) {
        return false;
    }
    const std::string file = next->first;
    delete_file(file);
    report_lost(file);
    const std::lock_guard<std::mutex> queue_lock(queue_mutex);
    n_deleted++;
    return true;
}

#endif
