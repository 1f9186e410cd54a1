// Tests the block file format: round trips, every damaged byte, truncation, forged heads, labels, links, checksums.
// usage: file FOLDER; prints one line per check; exit status 1 after the first that fails.

#include "server-blocks-file.h"
#include "server-blocks-hash.h"

#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>

static const std::string TENANT = "tenant \xff\0 \n"; // any bytes

// a block of n rows of 12 bytes
static server_blocks_head make_head(int32_t p0, int32_t n) {
    server_blocks_head head;
    head.model  = 17;
    head.tenant = TENANT;
    head.labels = { { "first", "session" }, { "second", "" } };
    head.prefix_hash = 99;
    head.hash = head.prefix_hash;
    for (int32_t i = 0; i < n; ++i) {
        head.tokens.push_back(1000 + i);
        head.kv.pos.push_back(p0 + i);
        head.kv.cells.push_back(5*i);
        head.kv.tok.push_back(1000 + i);
        head.kv.x.push_back(0);
        head.kv.y.push_back(i);
        head.hash = server_blocks_mix(head.hash, 1000 + i);
    }
    head.kv.p0 = p0;
    head.kv.p1 = p0 + n;
    head.kv.layout = 3;
    head.kv.size = 12*n;
    head.rows = { { p0, p0 + 1, 7, 0 }, { p0 + 1, p0 + n, 8, 4 } };
    head.bounds.layers = { 1, 4 };
    head.bounds.values = { 0.5f, -1.0f, 2.0f, 3.0f };
    return head;
}

static std::vector<uint8_t> make_rows(const server_blocks_head & head) {
    std::vector<uint8_t> res(head.kv.size);
    for (size_t i = 0; i < res.size(); ++i) {
        res[i] = (uint8_t) (31*i + 7);
    }
    return res;
}

static std::string read_bytes(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return { std::istreambuf_iterator<char>(file), {} };
}

static void write_bytes(const std::string & path, const std::string & bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// returns the kind of error that a function throws, -1 when it throws none
static int error_of(const std::function<void()> & function) {
    try {
        function();
    } catch (const server_blocks_file_error & error) {
        return error.kind;
    }
    return -1;
}

static bool equal(const server_blocks_head & a, const server_blocks_head & b) {
    return a.model == b.model && a.tenant == b.tenant && a.prefix_hash == b.prefix_hash && a.hash == b.hash
        && a.tokens == b.tokens && a.kv.p0 == b.kv.p0 && a.kv.p1 == b.kv.p1 && a.kv.pos == b.kv.pos && a.kv.cells == b.kv.cells
        && a.kv.tok == b.kv.tok && a.kv.x == b.kv.x && a.kv.y == b.kv.y && a.kv.layout == b.kv.layout && a.kv.size == b.kv.size
        && a.rows == b.rows && a.bounds.layers == b.bounds.layers && a.bounds.values == b.bounds.values;
}

static void test_round_trip(const std::string & folder) {
    const auto head = make_head(20, 9);
    const auto rows = make_rows(head);
    server_blocks_file_write(folder, head, rows.data());
    const auto path = folder + "/" + server_blocks_file_name(head);
    struct stat st;
    check(stat(path.c_str(), &st) == 0 && (st.st_mode & 0777) == 0600, "only the owner can read a file");
    check((size_t) st.st_size == server_blocks_file_size(head), "its size is predicted");
    const auto peeked = server_blocks_file_peek(path);
    check(equal(peeked, head) && peeked.labels.size() == 2 && peeked.labels[0].session == "session", "the head is read back");
    std::vector<uint8_t> read(rows.size());
    check(equal(server_blocks_file_read(path, head, read.data()), head) && read == rows, "the rows are read back");

    auto relabelled = head;
    relabelled.labels = { { "third", "other" } };
    server_blocks_file_write(folder, relabelled, nullptr);
    std::fill(read.begin(), read.end(), 0);
    const auto after = server_blocks_file_read(path, head, read.data());
    check(after.labels.size() == 1 && after.labels[0].name == "third" && read == rows, "labels are replaced without the rows");

    auto other = make_head(20, 9);
    other.rows[1].decode = 9;
    check(error_of([&] { server_blocks_file_write(folder, other, nullptr); }) == server_blocks_file_error::DAMAGED, "but not of rows of another decode");
    auto shorter = make_head(20, 8);
    check(error_of([&] { server_blocks_file_read(path, shorter, read.data()); }) == server_blocks_file_error::DAMAGED, "a file of another block is refused");
    unlink(path.c_str());
    check(error_of([&] { server_blocks_file_peek(path); }) == server_blocks_file_error::MISSING, "a missing file is reported");
}

static void test_names() {
    const auto head = make_head(0, 4);
    const std::vector<std::function<void(server_blocks_head &)>> changes = {
        [](auto & h) { h.model++; }, [](auto & h) { h.tenant += "x"; }, [](auto & h) { h.hash++; }, [](auto & h) { h.kv.layout++; },
        [](auto & h) { h.kv.p0++; }, [](auto & h) { h.kv.p1++; }, [](auto & h) { h.rows[1].visibility = 6; },
    };
    bool differ = true;
    for (const auto & change : changes) {
        auto other = head;
        change(other);
        differ = differ && server_blocks_file_name(other) != server_blocks_file_name(head);
    }
    check(differ, "blocks that must not be exchanged have different names");
    auto same = head;
    same.labels.clear();
    same.bounds = {};
    same.rows[1].decode = 55;
    check(server_blocks_file_name(same) == server_blocks_file_name(head), "labels, bounds and decodes do not change the name");
}

// Changes every byte, then truncates at every length: each file is refused, none crashes the reader.
static void test_damage(const std::string & folder) {
    const auto head = make_head(3, 5);
    const auto rows = make_rows(head);
    server_blocks_file_write(folder, head, rows.data());
    const auto path  = folder + "/" + server_blocks_file_name(head);
    const auto bytes = read_bytes(path);
    std::vector<uint8_t> read(rows.size());
    const auto refused = [&] {
        const int kind = error_of([&] { server_blocks_file_read(path, head, read.data()); });
        return kind == server_blocks_file_error::DAMAGED || kind == server_blocks_file_error::OTHER_VERSION;
    };
    size_t n_accepted = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
        for (const int bit : { 0, 7 }) {
            auto changed = bytes;
            changed[i] = (char) (changed[i] ^ (1 << bit));
            write_bytes(path, changed);
            n_accepted += !refused();
        }
    }
    check(n_accepted == 0, "a file with a changed bit is refused");
    for (size_t n = 0; n < bytes.size(); ++n) {
        write_bytes(path, bytes.substr(0, n));
        n_accepted += !refused();
    }
    write_bytes(path, bytes + '\0');
    n_accepted += !refused();
    check(n_accepted == 0, "a file of another length is refused");
    write_bytes(path, "");
    check(refused(), "an empty file is refused");
    unlink(path.c_str());
}

// Heads with correct checksums and contents that contradict each other.
static void test_forged_heads(const std::string & folder) {
    const std::vector<std::function<void(server_blocks_head &)>> changes = {
        [](auto & h) { h.labels.clear(); },      [](auto & h) { h.tokens.pop_back(); },  [](auto & h) { h.kv.pos[1]++; },
        [](auto & h) { h.kv.cells.clear(); },    [](auto & h) { h.kv.tok[2] = 5; },      [](auto & h) { h.kv.x.push_back(0); },
        [](auto & h) { h.kv.p0 = -1; },          [](auto & h) { h.kv.p1 = h.kv.p0; },    [](auto & h) { h.rows.clear(); },
        [](auto & h) { h.rows[0].p1++; },        [](auto & h) { h.rows[1].p1--; },       [](auto & h) { h.kv.p1 = 1 << 30; },
    };
    size_t n_accepted = 0;
    for (const auto & change : changes) {
        auto head = make_head(3, 5);
        change(head);
        const auto rows = make_rows(head);
        server_blocks_file_write(folder, head, rows.data());
        const auto path = folder + "/" + server_blocks_file_name(head);
        n_accepted += error_of([&] { server_blocks_file_peek(path); }) != server_blocks_file_error::DAMAGED;
        unlink(path.c_str());
    }
    check(n_accepted == 0, "a head that contradicts itself is refused");
    auto head = make_head(3, 5);
    head.kv.tok = { 0, 1001, LLAMA_TOKEN_NULL, 1003, 0 };
    server_blocks_file_write(folder, head, make_rows(head).data());
    const auto path = folder + "/" + server_blocks_file_name(head);
    check(error_of([&] { server_blocks_file_peek(path); }) == -1, "rows without a recorded token are accepted");
    unlink(path.c_str());
}

static void test_links_and_folders(const std::string & folder) {
    const auto head = make_head(3, 5);
    const auto rows = make_rows(head);
    server_blocks_file_write(folder, head, rows.data());
    const auto path = folder + "/" + server_blocks_file_name(head), link = folder + "/link";
    check(symlink(path.c_str(), link.c_str()) == 0 && error_of([&] { server_blocks_file_peek(link); }) >= 0, "a link is not followed");
    server_blocks_file_remove_abandoned(link);
    check(access(link.c_str(), F_OK) != 0 && access(path.c_str(), F_OK) == 0, "and is removed like an abandoned file");
    check(error_of([&] { server_blocks_file_write(folder + "/missing", head, rows.data()); }) == server_blocks_file_error::MISSING,
        "a missing folder is reported");
    check(error_of([&] { server_blocks_file_peek(folder); }) == server_blocks_file_error::DAMAGED, "a folder is no block file");
    unlink(path.c_str());
}

// xxHash's own test vectors
static void test_checksum() {
    check(server_blocks_checksum("", 0) == 0xEF46DB3751D8E999ull, "XXH64 of nothing");
    check(server_blocks_checksum("", 0, 2654435761u) == 0xAC75FDA2929B17EFull, "XXH64 of nothing with a seed");
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    test_round_trip(argv[1]);
    test_names();
    test_damage(argv[1]);
    test_forged_heads(argv[1]);
    test_links_and_folders(argv[1]);
    test_checksum();
    return 0;
}
