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

std::string server_blocks_disk::open(const std::string &, uint64_t, uint64_t) { return "not on this system"; }
void server_blocks_disk::close() {}
void server_blocks_disk::scan() {}
void server_blocks_disk::refresh() {}
std::vector<server_blocks_head> server_blocks_disk::found() { return {}; }
std::vector<std::string> server_blocks_disk::gone() { return {}; }
std::string server_blocks_disk::foreign(const std::string &, const std::string &) const { return ""; }
bool server_blocks_disk::holds(const std::string &) const { return false; }
std::shared_ptr<server_blocks_write> server_blocks_disk::write(server_blocks_head, const uint8_t *) { return nullptr; }
bool server_blocks_disk::cancel(server_blocks_write &) { return true; }
bool server_blocks_disk::wait(const std::vector<std::shared_ptr<server_blocks_write>> &, int) { return true; }
server_blocks_write::state_t server_blocks_disk::state(const server_blocks_write & job) const { return job.state; }
void server_blocks_disk::read(server_blocks_read &) {}
void server_blocks_disk::touch(const std::string &) {}
void server_blocks_disk::remove(const std::string &) {}
json server_blocks_disk::stats() const { return json(); }

#else

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr size_t  CAP_DEFAULT_MIB = 4096;
static constexpr int64_t SCAN_AGAIN_MS   = 5000; // others may write into the folder too

static constexpr const char * OLDER = "written in an earlier version of the file format, which does not say what rows were made from; "
    "the text is decoded and saved again, and these files are deleted when the folder is full";

static bool ends_with(const std::string & s, const char * end) {
    const size_t n = strlen(end);
    return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

static bool is_ours(const std::string & file, const char * end) {
    return file.compare(0, 6, "evoke-") == 0 && ends_with(file, end);
}

static std::atomic<uint64_t> latest_used { 0 };

// The time of a use, later than that of every file that is known: the system's clock may have been set back since.
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
    size_t mib = CAP_DEFAULT_MIB;
    const size_t colon = option.rfind(':');
    if (colon != std::string::npos && colon + 1 < option.size() && option.size() - colon < 12
            && option.find_first_not_of("0123456789", colon + 1) == std::string::npos) {
        dir = option.substr(0, colon);
        mib = std::stoull(option.substr(colon + 1));
    }
    if (dir.empty() || mib == 0) {
        return "--evoke-disk wants DIR or DIR:MiB";
    }
    if (model == 0) {
        return "the model's file cannot be read again, to tell it from others";
    }
    mkdir(dir.c_str(), 0700);
    struct stat st;
    if (stat(dir.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) {
        return std::string("the folder cannot be made or is something else: ") + dir;
    }
    if (st.st_uid != geteuid() || (st.st_mode & 077) != 0) {
        return "the folder must be its owner's alone (chmod 700): it will hold what was said";
    }
    this->model  = model;
    this->layout = layout;
    folder = dir;
    n_cap  = mib*1024*1024;
    scan();
    stopping = false;
    worker = std::thread([this]() { work(); });
    return "";
}

void server_blocks_disk::close() {
    if (!worker.joinable()) {
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mail);
        stopping = true;
    }
    changed.notify_all();
    worker.join();
    const std::lock_guard<std::mutex> all(table);
    const std::lock_guard<std::mutex> lock(mail);
    folder.clear();
    files.clear();
    present.clear();
    foreigners.clear();
    fresh.clear();
    lost.clear();
    queue.clear();
    n_used = n_used_seen = 0;
    folder_seen = 0;
}

//
// what is there
//

void server_blocks_disk::add(const std::string & file, entry e) {
    latest_used = std::max<uint64_t>(latest_used, e.used);
    forget(file);
    n_used += e.bytes;
    {
        const std::lock_guard<std::mutex> lock(mail);
        present.insert(file);
        for (const auto & name : e.names) {
            foreigners[name] = e.why;
        }
        n_used_seen = n_used;
    }
    files[file] = std::move(e);
}

void server_blocks_disk::forget(const std::string & file) {
    const auto it = files.find(file);
    if (it != files.end()) {
        n_used -= it->second.bytes;
        const std::lock_guard<std::mutex> lock(mail);
        present.erase(file);
        for (const auto & name : it->second.names) {
            foreigners.erase(name);
        }
        n_used_seen = n_used;
        files.erase(it);
    }
}

// Deletes a file. Under the lock of the table: otherwise a scan that goes on meanwhile would list it again.
void server_blocks_disk::erase(const std::string & file) {
    forget(file);
    unlink(path(file).c_str());
}

void server_blocks_disk::lose(const std::string & file) {
    const std::lock_guard<std::mutex> lock(mail);
    lost.push_back(file);
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

// when the folder was last changed, by whomever; 0 where the next change could still be of the same time
uint64_t server_blocks_disk::folder_time() const {
    struct stat st;
    if (stat(folder.c_str(), &st) != 0) {
        return 0;
    }
    timespec now; // of the clock that file systems go by
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
        const std::lock_guard<std::mutex> lock(mail);
        if (now != 0 && now == folder_seen) {
            return;
        }
    }
    scan();
}

void server_blocks_disk::scan() {
    std::set<std::string> known, seen, names;
    const uint64_t before = folder_time();
    {
        const std::lock_guard<std::mutex> lock(table);
        for (const auto & item : files) {
            known.insert(item.first);
        }
    }
    if (DIR * dir = opendir(folder.c_str())) {
        while (const dirent * item = readdir(dir)) {
            names.insert(item->d_name);
        }
        closedir(dir);
    }
    for (const auto & file : names) {
        if (is_ours(file, ".tmp")) {
            server_blocks_file_remove_abandoned(path(file));
        } else if (is_ours(file, ".kvb") || is_ours(file, ".bad")) {
            seen.insert(file);
            if (!known.count(file)) {
                look_at(file);
            }
        }
    }
    const std::lock_guard<std::mutex> lock(table);
    if (n_older > n_older_said) {
        LOG_WRN("evoke: %zu block files are not used: %s\n", n_older, OLDER);
        n_older_said = n_older;
    }
    scanned_ms = ggml_time_ms();
    for (const auto & file : known) {
        if (!seen.count(file) && files.count(file) && access(path(file).c_str(), F_OK) != 0) {
            forget(file); // another server deleted it, or somebody
            lose(file);
        }
    }
    const std::lock_guard<std::mutex> seen_until(mail);
    folder_seen = before;
}

// takes one file into the list, if it is new
void server_blocks_disk::look_at(const std::string & file) {
    struct stat st;
    if (lstat(path(file).c_str(), &st) != 0 || !S_ISREG(st.st_mode)) {
        return;
    }
    entry e;
    e.bytes = st.st_size;
    e.used  = changed_at(st);
    server_blocks_head head;
    if (is_ours(file, ".bad")) {
        e.used = 0;
    } else {
        try {
            head = server_blocks_file_peek(path(file));
            const bool older = head.version < SERVER_BLOCKS_FILE_FIRST_USED;
            if (!older && server_blocks_file_name(head) != file) {
                throw server_blocks_file_error(server_blocks_file_error::DAMAGED, "the file has the name of another block");
            }
            e.tenant = head.tenant;
            e.why = older ? OLDER : head.model != model ? "it was saved from another model" : head.kv.layout != layout ? "it was saved with other KV types or options" : "";
            for (const auto & label : head.labels) {
                e.names.insert({ head.tenant, label.name });
            }
        } catch (const server_blocks_file_error & error) {
            if (error.kind == server_blocks_file_error::DAMAGED) {
                LOG_WRN("evoke: %s is put aside: %s\n", file.c_str(), error.what());
                put_aside(file);
            }
            if (error.kind != server_blocks_file_error::OTHER) {
                return;
            }
            e.why = error.what();
        }
    }
    const std::lock_guard<std::mutex> lock(table);
    if (files.count(file) || access(path(file).c_str(), F_OK) != 0) {
        return; // another thread has listed it meanwhile, or deleted it: both are done under this lock
    }
    n_older += e.why == OLDER ? 1 : 0;
    if (head.model == model && e.why.empty() && e.used > 0) {
        e.names.clear();
        const std::lock_guard<std::mutex> post(mail);
        fresh.emplace_back(e.used, std::move(head));
    }
    add(file, std::move(e));
}

// a damaged file: never used, kept for a person while there is room
void server_blocks_disk::put_aside(const std::string & file) {
    const std::string bad = file.substr(0, file.size() - 4) + ".bad";
    struct stat st;
    const bool kept = rename(path(file).c_str(), path(bad).c_str()) == 0 && lstat(path(bad).c_str(), &st) == 0;
    const std::lock_guard<std::mutex> lock(table);
    {
        const std::lock_guard<std::mutex> post(mail);
        n_damaged++;
    }
    forget(file);
    if (kept) {
        entry e;
        e.bytes = st.st_size;
        add(bad, std::move(e));
    }
}

std::vector<server_blocks_head> server_blocks_disk::found() {
    std::vector<std::pair<uint64_t, server_blocks_head>> found;
    {
        const std::lock_guard<std::mutex> lock(mail);
        found.swap(fresh);
    }
    std::sort(found.begin(), found.end(), [](const auto & a, const auto & b) { return a.first > b.first; }); // the newest first
    std::vector<server_blocks_head> res;
    for (auto & item : found) {
        res.push_back(std::move(item.second));
    }
    return res;
}

std::vector<std::string> server_blocks_disk::gone() {
    const std::lock_guard<std::mutex> lock(mail);
    std::vector<std::string> res;
    res.swap(lost);
    return res;
}

std::string server_blocks_disk::foreign(const std::string & tenant, const std::string & label) const {
    const std::lock_guard<std::mutex> lock(mail);
    const auto it = foreigners.find({ tenant, label });
    return it == foreigners.end() ? "" : it->second;
}

bool server_blocks_disk::holds(const std::string & file) const {
    const std::lock_guard<std::mutex> lock(mail);
    return present.count(file) > 0;
}

json server_blocks_disk::stats() const {
    const std::lock_guard<std::mutex> lock(mail);
    const auto n_queued = std::count_if(queue.begin(), queue.end(), [](const chore & item) { return item.write != nullptr; });
    return json {
        {"used", n_used_seen}, {"budget", n_cap}, {"n_files", present.size()}, {"n_queued", (size_t) n_queued}, {"n_written", n_written},
        {"n_read", n_read}, {"n_failed", n_failed}, {"n_damaged", n_damaged}, {"n_deleted", n_deleted}, {"last_error", last_error},
    };
}

//
// reading
//

void server_blocks_disk::read(server_blocks_read & job) {
    const std::lock_guard<std::mutex> own(job.mutex);
    if (job.state != server_blocks_read::PENDING) {
        return;
    }
    try {
        job.head  = server_blocks_file_read(path(job.file), job.head, job.data);
        job.state = server_blocks_read::DONE;
        const std::lock_guard<std::mutex> lock(mail);
        n_read++;
        return;
    } catch (const server_blocks_file_error & e) {
        job.error = e.what();
        const bool damaged = e.kind == server_blocks_file_error::DAMAGED || e.kind == server_blocks_file_error::OTHER;
        job.state = damaged ? server_blocks_read::DAMAGED : e.kind == server_blocks_file_error::GONE ? server_blocks_read::GONE : server_blocks_read::FAILED;
    } catch (const std::exception & e) { // no memory
        job.error = e.what();
        job.state = server_blocks_read::FAILED;
    }
    LOG_WRN("evoke: %s is not used: %s\n", job.file.c_str(), job.error.c_str());
    if (job.state == server_blocks_read::DAMAGED) {
        put_aside(job.file);
    }
    {
        const std::lock_guard<std::mutex> lock(mail);
        last_error = job.error;
    }
    if (job.state == server_blocks_read::GONE) {
        const std::lock_guard<std::mutex> lock(table);
        forget(job.file);
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
        const std::lock_guard<std::mutex> lock(mail);
        queue.push_back({ job, "", 0 });
    }
    changed.notify_all();
    return job;
}

bool server_blocks_disk::cancel(server_blocks_write & job) {
    const std::lock_guard<std::mutex> lock(mail);
    if (job.state == server_blocks_write::QUEUED) {
        job.state = server_blocks_write::CANCELLED;
        changed.notify_all();
    }
    return job.state != server_blocks_write::RUNNING;
}

bool server_blocks_disk::wait(const std::vector<std::shared_ptr<server_blocks_write>> & jobs, int timeout_ms) {
    std::unique_lock<std::mutex> lock(mail);
    return changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&]() {
        return std::all_of(jobs.begin(), jobs.end(), [](const auto & job) { return job->over(); });
    });
}

server_blocks_write::state_t server_blocks_disk::state(const server_blocks_write & job) const {
    const std::lock_guard<std::mutex> lock(mail);
    return job.state;
}

void server_blocks_disk::touch(const std::string & file) {
    const std::lock_guard<std::mutex> lock(mail);
    if (present.count(file)) {
        queue.push_back({ nullptr, file, now_ns() });
        changed.notify_all();
    }
}

void server_blocks_disk::remove(const std::string & file) {
    const std::lock_guard<std::mutex> lock(mail);
    queue.push_back({ nullptr, file, 0 });
    changed.notify_all();
}

void server_blocks_disk::work() {
    sigset_t signals; // of the ones a write can bring, the default would end the process
    sigemptyset(&signals);
    sigaddset(&signals, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);

    for (;;) {
        chore item;
        {
            std::unique_lock<std::mutex> lock(mail);
            changed.wait(lock, [this]() { return stopping || !queue.empty(); });
            if (queue.empty()) {
                return;
            }
            item = std::move(queue.front());
            queue.pop_front();
        }
        if (item.write) {
            write_one(*item.write);
            continue;
        }
        uint64_t used = 0;
        {
            const std::lock_guard<std::mutex> lock(table);
            const auto it = files.find(item.file);
            if (item.touched == 0) {
                erase(item.file);
            } else if (it != files.end()) {
                used = it->second.used = std::max(it->second.used, item.touched);
            }
        }
        if (used > 0) {
            const timespec modified = { time_t(used/1000000000), long(used%1000000000) };
            const timespec times[2] = { modified, modified };
            utimensat(AT_FDCWD, path(item.file).c_str(), times, AT_SYMLINK_NOFOLLOW);
        }
    }
}

// what the main loop has used counts before its turn comes
void server_blocks_disk::apply_touches() {
    const std::lock_guard<std::mutex> lock(mail);
    for (const auto & item : queue) {
        const auto it = item.touched > 0 ? files.find(item.file) : files.end();
        if (it != files.end()) {
            it->second.used = std::max(it->second.used, item.touched);
        }
    }
}

void server_blocks_disk::write_one(server_blocks_write & job) {
    {
        const std::lock_guard<std::mutex> lock(mail);
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
        if (!job.data && access(path(file).c_str(), F_OK) != 0) { // it was to get other labels
            const std::lock_guard<std::mutex> lock(table);
            forget(file);
            lose(file);
        }
    }
    {
        const std::lock_guard<std::mutex> lock(mail);
        if (done) {
            n_written++;
        } else {
            if (last_error != error) {
                LOG_WRN("evoke: a block stays in host memory: %s\n", error.c_str());
            }
            n_failed++;
            last_error = job.error = error;
        }
        job.state = done ? server_blocks_write::DONE : server_blocks_write::FAILED;
    }
    changed.notify_all();
}

void server_blocks_disk::write_file(const server_blocks_write & job, const std::string & file) {
    server_blocks_head head = job.head;
    if (!job.data) {
        head = server_blocks_file_peek(path(file));
        head.labels = job.head.labels;
    }
    const size_t bytes = server_blocks_file_size(head);
    std::unique_lock<std::mutex> lock(table);
    if (bytes > n_cap) {
        throw std::runtime_error("the block is larger than --evoke-disk allows");
    }
    const wanted want { file, head.tenant, bytes, job.data == nullptr };
    make_room(want, lock);
    for (int attempt = 0; ; ++attempt) {
        try {
            lock.unlock();
            server_blocks_file_write(folder, head, job.data);
            lock.lock();
            others_fill = false;
            break;
        } catch (const server_blocks_file_error & e) {
            lock.lock();
            const bool again = attempt == 0 && (e.kind == server_blocks_file_error::GONE
                ? mkdir(folder.c_str(), 0700) == 0 // somebody removed the folder
                : e.kind == server_blocks_file_error::FULL && !others_fill && free_up(want));
            others_fill = others_fill || (attempt > 0 && e.kind == server_blocks_file_error::FULL);
            if (!again) {
                throw;
            }
        }
    }
    entry e;
    e.bytes  = bytes;
    e.used   = now_ns();
    e.tenant = head.tenant;
    add(file, std::move(e));
    const std::lock_guard<std::mutex> post(mail);
    queue.push_back({ nullptr, file, files[file].used }); // the file's time says the same
}

// as many bytes of old files go, as the disk is full; false if there are not so many that may
bool server_blocks_disk::free_up(const wanted & want) {
    const size_t before = n_used;
    while (n_used + want.bytes > before) {
        if (!delete_one(want)) {
            return false;
        }
    }
    return true;
}

// files go until the wanted one fits under the cap
void server_blocks_disk::make_room(const wanted & want, std::unique_lock<std::mutex> & lock) {
    if (ggml_time_ms() - scanned_ms > SCAN_AGAIN_MS) {
        lock.unlock();
        scan();
        lock.lock();
    }
    apply_touches();
    const auto it = files.find(want.file);
    const size_t own = it == files.end() ? 0 : it->second.bytes; // will be replaced, but is there until then
    while (n_used + want.bytes > n_cap && delete_one(want)) {
    }
    if (n_used - (want.copied ? 0 : own) + want.bytes > n_cap) {
        throw std::runtime_error("the tenant's share of --evoke-disk holds no such block beside those of others");
    }
    if (n_used + want.bytes > n_cap && own > 0) {
        erase(want.file);
    }
}

// Damaged files first. Then the oldest of the tenant that has most, the wanted file counted with its own tenant's:
// none deletes the files of a tenant that has less than itself.
std::map<std::string, server_blocks_disk::entry>::iterator server_blocks_disk::next_to_delete(const wanted & want) {
    std::map<std::string, size_t> bytes;
    for (const auto & [file, e] : files) {
        if (e.used == 0) {
            continue;
        }
        bytes[e.tenant] += file == want.file ? 0 : e.bytes;
    }
    bytes[want.tenant] += want.bytes;
    auto res = files.end();
    for (auto it = files.begin(); it != files.end(); ++it) {
        const auto & e = it->second;
        const bool damaged = e.used == 0;
        if (it->first == want.file || (!damaged && e.tenant != want.tenant && bytes[e.tenant] <= bytes[want.tenant])) {
            continue;
        }
        const auto rank = [&](const entry & of) { // the first to go has the least
            return std::make_tuple(of.used != 0, std::numeric_limits<size_t>::max() - (of.used == 0 ? 0 : bytes[of.tenant]), of.used);
        };
        if (res == files.end() || rank(e) < rank(res->second)) {
            res = it;
        }
    }
    return res;
}

bool server_blocks_disk::delete_one(const wanted & want) {
    if (access(folder.c_str(), W_OK) != 0 && errno == EROFS) { // nothing would be deleted, and the block would be forgotten
        throw std::runtime_error(string_format("an old file cannot be deleted: %s", strerror(EROFS)));
    }
    const auto next = next_to_delete(want);
    if (next == files.end()) {
        return false;
    }
    const std::string file = next->first;
    erase(file);
    lose(file);
    const std::lock_guard<std::mutex> post(mail);
    n_deleted++;
    return true;
}

#endif
