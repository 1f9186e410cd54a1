// Tests server_blocks_disk: writes, reads, damaged, deleted and unusable files, the size limit by tenant, two servers.
// usage: disk FOLDER; prints one line per check; exit status 1 after the first that fails.

#include "server-blocks-disk.h"

#include "check.h"

#include "log.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <thread>

static constexpr uint64_t MODEL = 17, LAYOUT = 3;
static constexpr size_t   N_BYTES = 300 << 10; // rows of one block: three fit 1 MiB

static std::string root;

// an empty folder that only its owner can access
static std::string make_folder(const std::string & name) {
    const auto path = root + "/" + name;
    mkdir(path.c_str(), 0700);
    return path;
}

static server_blocks_head make_head(const std::string & tenant, const std::string & name, uint64_t hash) {
    server_blocks_head head;
    head.model  = MODEL;
    head.tenant = tenant;
    head.labels = { { name, "" } };
    head.hash   = hash;
    head.tokens = { 5 };
    head.kv.pos = { 0 };
    head.kv.cells = { 0 };
    head.kv.tok = { 5 };
    head.kv.x   = { 0 };
    head.kv.y   = { 0 };
    head.kv.p1  = 1;
    head.kv.layout = LAYOUT;
    head.kv.size = N_BYTES;
    head.rows   = { { 0, 1, hash, 0 } };
    return head;
}

static const std::vector<uint8_t> & rows() {
    static const std::vector<uint8_t> res(N_BYTES, 9);
    return res;
}

static bool write(server_blocks_disk & disk, const server_blocks_head & head) {
    const auto job = disk.write(head, rows().data());
    return disk.wait({ job }, 20000) && disk.state(*job) == server_blocks_write::DONE;
}

static server_blocks_read::state_t read(server_blocks_disk & disk, const server_blocks_head & head) {
    std::vector<uint8_t> data(N_BYTES);
    server_blocks_read job;
    job.head = head;
    job.file = server_blocks_file_name(head);
    job.data = data.data();
    disk.read(job);
    if (job.state == server_blocks_read::DONE && data != rows()) {
        check(false, "a read returns the rows that were written");
    }
    return job.state;
}

// waits until a condition holds, 20 s at most
static bool eventually(const std::function<bool()> & condition) {
    for (int i = 0; i < 2000 && !condition(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return condition();
}

static void test_options() {
    server_blocks_disk disk;
    check(!disk.open("", MODEL, LAYOUT).empty() && !disk.open(root + "/x:0", MODEL, LAYOUT).empty(), "an option without folder or size is refused");
    check(!disk.open(root + "/x", 0, LAYOUT).empty(), "a model without identity is refused");
    check(!disk.open(root + "/missing/x", MODEL, LAYOUT).empty(), "a folder that cannot be created is refused");
    const auto shared = make_folder("shared");
    chmod(shared.c_str(), 0755);
    check(!disk.open(shared, MODEL, LAYOUT).empty() && !disk.is_open(), "a folder that others can read is refused");
    check(disk.open(root + "/options:5", MODEL, LAYOUT).empty() && disk.is_open() && disk.limit() == 5u << 20, "DIR:MiB creates the folder and sets the limit");
    disk.close();
    check(!disk.is_open(), "close() forgets the folder");
    disk.close();
}

static void test_write_and_read() {
    const auto folder = make_folder("write");
    const auto head = make_head("a", "n", 1);
    const auto file = server_blocks_file_name(head);
    server_blocks_disk disk;
    check(disk.open(folder, MODEL, LAYOUT).empty(), "an empty folder is opened");
    check(disk.take_new_heads().empty() && !disk.contains(file), "it has no files");
    check(read(disk, head) == server_blocks_read::MISSING, "a missing file is reported");
    check(write(disk, head) && disk.contains(file), "a block is written");
    check(read(disk, head) == server_blocks_read::DONE, "and read");
    auto relabelled = head;
    relabelled.labels = { { "other", "s" } };
    const auto job = disk.write(relabelled, nullptr);
    check(disk.wait({ job }, 20000) && disk.state(*job) == server_blocks_write::DONE, "labels are replaced");
    check(server_blocks_file_peek(folder + "/" + file).labels[0].name == "other", "in the file");
    disk.remove(file);
    check(eventually([&] { return access((folder + "/" + file).c_str(), F_OK) != 0; }) && !disk.contains(file), "a file is removed");
    const auto failed = disk.write(relabelled, nullptr);
    disk.wait({ failed }, 20000);
    check(disk.state(*failed) == server_blocks_write::FAILED && !failed->error.empty(), "labels of a missing file cannot be written");
    check(disk.take_lost_files() == std::vector<std::string> { file }, "and the file is reported as lost");
    const json stats = disk.stats();
    check(stats.at("n_written") == 2 && stats.at("n_failed") == 1 && stats.at("n_files") == 0 && stats.at("used") == 0, "the statistics agree");
}

static void test_restart() {
    const auto folder = make_folder("restart");
    {
        server_blocks_disk disk;
        disk.open(folder, MODEL, LAYOUT);
        write(disk, make_head("a", "first", 1));
        write(disk, make_head("a", "second", 2));
        auto other = make_head("a", "third", 3);
        other.model = MODEL + 1;
        write(disk, other);
    }
    server_blocks_disk disk;
    disk.open(folder, MODEL, LAYOUT);
    const auto heads = disk.take_new_heads();
    check(heads.size() == 2 && heads[0].labels[0].name == "second" && heads[1].labels[0].name == "first", "files are found, the newest first");
    check(disk.take_new_heads().empty(), "each is reported once");
    check(!disk.unusable_reason("a", "third").empty() && disk.unusable_reason("a", "first").empty(), "files of another model are not usable");
    check(disk.unusable_reason("b", "third").empty(), "the reason is for the tenant only");
}

static void test_damage() {
    const auto folder = make_folder("damage");
    const auto head = make_head("a", "n", 1), broken = make_head("a", "m", 2);
    server_blocks_disk disk;
    disk.open(folder, MODEL, LAYOUT);
    write(disk, head);
    const auto path = folder + "/" + server_blocks_file_name(head);
    {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(-1, std::ios::end);
        file.put(1);
    }
    check(read(disk, head) == server_blocks_read::DAMAGED, "a changed row is detected");
    check(access(path.c_str(), F_OK) != 0 && access((path.substr(0, path.size() - 4) + ".bad").c_str(), F_OK) == 0, "the file is quarantined");
    std::ofstream(folder + "/" + server_blocks_file_name(broken)) << "not a block";
    std::ofstream(folder + "/evoke-1.kvb.1-2-3.tmp") << "abandoned";
    std::ofstream(folder + "/other.kvb") << "a file of the user";
    disk.scan();
    check(disk.take_new_heads().empty() && !disk.contains(server_blocks_file_name(broken)), "a file that is no block is quarantined");
    check(access((folder + "/evoke-1.kvb.1-2-3.tmp").c_str(), F_OK) != 0, "an abandoned temporary file is deleted");
    check(access((folder + "/other.kvb").c_str(), F_OK) == 0, "other files stay");
    check(disk.stats().at("n_damaged") == 2, "both are counted");
}

static void test_two_servers() {
    const auto folder = make_folder("two");
    const auto head = make_head("a", "n", 1);
    const auto file = server_blocks_file_name(head);
    server_blocks_disk first, second;
    first.open(folder, MODEL, LAYOUT);
    second.open(folder, MODEL, LAYOUT);
    write(first, head);
    second.refresh();
    const auto heads = second.take_new_heads();
    check(heads.size() == 1 && second.contains(file), "a file of another server is found");
    check(read(second, heads[0]) == server_blocks_read::DONE, "and read");
    unlink((folder + "/" + file).c_str());
    second.scan();
    check(!second.contains(file) && second.take_lost_files() == std::vector<std::string> { file }, "a deleted file is reported as lost");
    check(read(first, head) == server_blocks_read::MISSING && !first.contains(file), "a read notices it, too");
}

static void test_limit() {
    server_blocks_disk disk;
    disk.open(make_folder("limit") + ":1", MODEL, LAYOUT);
    const auto a1 = make_head("a", "1", 1), a2 = make_head("a", "2", 2), a3 = make_head("a", "3", 3), b1 = make_head("b", "1", 4), b2 = make_head("b", "2", 5);
    const auto contains = [&](const server_blocks_head & head) { return disk.contains(server_blocks_file_name(head)); };
    check(write(disk, a1) && write(disk, a2) && write(disk, a3), "three blocks fit the limit");
    disk.mark_used(server_blocks_file_name(a1));
    check(write(disk, b1) && contains(a1) && !contains(a2) && contains(a3) && contains(b1), "the oldest file of the largest tenant is deleted");
    check(write(disk, b2) && !contains(b1) && contains(a1) && contains(a3), "a tenant takes nothing from one that would have no more than itself");
    check(disk.take_lost_files().size() == 2, "deleted files are reported");
    const auto a4 = make_head("a", "4", 6);
    check(write(disk, a4) && contains(b2) && contains(a1) && !contains(a3), "the file that was used latest stays");
    auto huge = make_head("a", "5", 7);
    huge.kv.size = 2 << 20;
    const std::vector<uint8_t> data(huge.kv.size);
    const auto job = disk.write(huge, data.data());
    disk.wait({ job }, 20000);
    check(disk.state(*job) == server_blocks_write::FAILED && contains(a4), "a block beyond the limit is refused, and nothing is deleted for it");
    check(disk.stats().at("used").get<size_t>() <= disk.limit(), "the limit holds");
}

// How often the system took the processor away from this thread; waiting for a lock does not count.
static long n_preemptions() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
}

// The main loop calls contains(), and mark_used() for each block of a request. How many of these calls are pending must not
// matter to it while the thread looks for the file that was used least recently.
static void test_pending_uses_do_not_hold_up_the_main_loop() {
    using clock = std::chrono::steady_clock;
    server_blocks_disk disk;
    disk.open(make_folder("uses") + ":512", MODEL, LAYOUT);
    auto large = make_head("a", "large", 1);
    large.kv.size = 64 << 20;
    const std::vector<uint8_t> data(large.kv.size);
    const auto small = make_head("a", "small", 2);
    const auto name = server_blocks_file_name(small);
    bool bounded = false;
    for (int attempt = 0; attempt < 24 && !bounded; ++attempt) { // the machine may be busy
        check(write(disk, small), "a block is written");
        const auto first = disk.write(large, data.data()); // while it runs, uses are recorded and are not processed
        const auto next  = disk.write(small, rows().data());
        const auto start = clock::now();
        while (disk.state(*first) != server_blocks_write::DONE) {
            disk.mark_used(name);
        }
        const auto duration = clock::now() - start;
        auto longest = clock::duration::zero();
        auto n_before = n_preemptions();
        for (auto before = clock::now(); disk.state(*next) != server_blocks_write::DONE; ) {
            disk.contains(name);
            const auto now   = clock::now();
            const auto n_now = n_preemptions();
            if (n_now == n_before) {
                longest = std::max(longest, now - before);
            }
            before   = now;
            n_before = n_now;
        }
        bounded = longest < duration/400;
    }
    check(bounded, "recorded uses do not hold up the main loop");
}

static void test_cancel() {
    server_blocks_disk disk;
    disk.open(make_folder("cancel"), MODEL, LAYOUT);
    std::vector<std::shared_ptr<server_blocks_write>> jobs;
    for (uint64_t i = 1; i <= 20; ++i) {
        jobs.push_back(disk.write(make_head("a", std::to_string(i), i), rows().data()));
    }
    size_t n_cancelled = 0;
    for (const auto & job : jobs) {
        const bool cancelled = disk.cancel(*job);
        const auto state = disk.state(*job);
        n_cancelled += state == server_blocks_write::CANCELLED;
        if (cancelled == (state == server_blocks_write::RUNNING) && state != server_blocks_write::DONE) {
            check(false, "cancel() reports a running write only");
        }
    }
    check(n_cancelled > 0 && disk.wait(jobs, 20000), "queued writes are cancelled, running ones end");
    jobs.clear();
    for (uint64_t i = 1; i <= 20; ++i) {
        jobs.push_back(disk.write(make_head("a", std::to_string(i), i), rows().data()));
    }
    disk.close();
    bool over = true;
    for (const auto & job : jobs) {
        over = over && job->over();
    }
    check(over, "close() ends all writes");
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    root = argv[1];
    common_log_set_verbosity_thold(-1);
    test_options();
    test_write_and_read();
    test_restart();
    test_damage();
    test_two_servers();
    test_limit();
    test_pending_uses_do_not_hold_up_the_main_loop();
    test_cancel();
    return 0;
}
