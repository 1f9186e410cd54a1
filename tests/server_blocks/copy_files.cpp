// Tests server_blocks_copy_files: writes and their results, names that change, reads, deleted files.
// usage: copy_files FOLDER; prints one line per check; exit status 1 after the first that fails.

#include "server-blocks-copy-files.h"

#include "check.h"

#include <chrono>
#include <functional>
#include <thread>

static constexpr uint64_t MODEL = 17, LAYOUT = 3;

static std::vector<uint8_t> rows(4096, 9);

static server_blocks_copy make_copy(uint64_t hash) {
    server_blocks_copy copy;
    copy.kv.pos    = { 0 };
    copy.kv.cells  = { 0 };
    copy.kv.tok    = { 5 };
    copy.kv.x      = { 0 };
    copy.kv.y      = { 0 };
    copy.kv.p1     = 1;
    copy.kv.layout = LAYOUT;
    copy.kv.size   = rows.size();
    copy.kv.data   = rows.data();
    copy.tokens    = { 5 };
    copy.hash      = hash;
    copy.labels    = { { "a name", "a session" } };
    copy.rows      = { { 0, 1, hash, 0 } };
    return copy;
}

// applies the results of writes until there is none in progress, 20 s at most
static bool wait_for_write(server_blocks_copy_files & files, const server_blocks_key & key, server_blocks_copy & copy) {
    for (int i = 0; i < 2000 && copy.writing; ++i) {
        files.poll_write(key, copy);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return !copy.writing;
}

static void test_errors() {
    server_blocks_fence fence;
    server_blocks_copy_files files(fence);
    check(!files.open(":1", MODEL, LAYOUT) && !files.error().empty() && !files.is_open(), "an option without a folder is refused with a reason");
    auto copy = make_copy(1);
    files.write({ "", 1, 0, 1, 0 }, copy);
    check(!copy.writing && files.in_progress().empty(), "without a folder nothing is written");
}

static void test_write(const std::string & folder) {
    server_blocks_fence fence;
    server_blocks_copy_files files(fence);
    check(files.open(folder, MODEL, LAYOUT) && files.error().empty(), "a folder is opened");
    const server_blocks_key key { "", 1, 0, 1, 0 };
    auto copy = make_copy(1);
    files.write(key, copy);
    const auto first = copy.writing;
    files.write(key, copy);
    check(first && copy.writing == first, "a copy is written once at a time");
    check(files.in_progress() == std::vector<server_blocks_key> { key }, "a copy that is written is in progress");
    check(wait_for_write(files, key, copy) && copy.is_file_current(), "then its file is current");
    check(files.in_progress().empty() && files.size() == 1, "and it is no longer in progress");
    const auto file = files.name_of(key, copy);
    check(files.owner_of(file) && *files.owner_of(file) == key && !files.owner_of("another"), "the table finds the copy of a file");
    files.write(key, copy);
    check(!copy.writing, "a current file is not written again");

    copy.labels["another name"] = "";
    copy.labels_stale = true;
    files.write(key, copy);
    copy.labels.erase("another name"); // while the file with both names is written
    check(wait_for_write(files, key, copy) && copy.on_disk && copy.labels_stale, "a name that changes during the write makes the file stale");

    copy.kv.data = nullptr; // only on disk
    check(!files.is_missing(key, copy), "the file of a copy exists");
    files.write(key, copy);
    const auto labels_only = copy.writing;
    files.begin_read(key, copy, rows.data());
    check(labels_only && copy.reading && copy.reading->file == file, "a copy can be read while its names are written");
    files.end_read(key, copy);
    check(files.in_progress() == std::vector<server_blocks_key> { key }, "the end of the read leaves the write in progress");
    check(wait_for_write(files, key, copy) && files.in_progress().empty() && copy.is_file_current(), "and its result is applied");

    files.remove(key, copy);
    check(!copy.on_disk && files.size() == 0, "a removed copy has no file");
    for (int i = 0; i < 2000 && files.disk().contains(file); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    check(files.is_missing(key, copy), "the file is deleted");
}

static void test_cancel(const std::string & folder) {
    server_blocks_fence fence;
    server_blocks_copy_files files(fence);
    files.open(folder, MODEL, LAYOUT);
    const server_blocks_key key { "", 2, 0, 1, 0 };
    auto copy = make_copy(2);
    files.write(key, copy);
    const auto running = files.cancel_write(key, copy);
    check(!copy.writing && files.in_progress().empty(), "a write is given up");
    if (running) {
        files.disk().wait({ running }, 20000);
    }
    files.close();
    files.clear();
    check(!files.is_open() && files.size() == 0, "close() and clear() forget the folder and its files");
}

static void test_failure(const std::string & folder) {
    server_blocks_fence fence;
    server_blocks_copy_files files(fence);
    files.open(folder + ":1", MODEL, LAYOUT);
    const server_blocks_key key { "", 3, 0, 1, 0 };
    auto copy = make_copy(3);
    rows.resize(2 << 20); // more than the folder may have
    copy.kv.size = rows.size();
    copy.kv.data = rows.data();
    files.write(key, copy);
    check(wait_for_write(files, key, copy) && !copy.on_disk, "a block that is too large is not written");
    files.write(key, copy);
    check(!copy.writing, "after a failure writes pause");
    files.write(key, copy, true);
    check(copy.writing != nullptr, "unless the caller insists");
    wait_for_write(files, key, copy);
    files.close();
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    test_errors();
    test_write(argv[1]);
    test_cancel(argv[1]);
    test_failure(argv[1]);
    return 0;
}
