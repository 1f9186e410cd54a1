#include "server-blocks-file.h"

#include "gguf.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <thread>

#if !defined(_WIN32)
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

static constexpr char     MAGIC[8] = { 'e', 'v', 'o', 'k', 'e', 'K', 'V', 'B' };
static constexpr uint32_t VERSION  = 3;          // 1: without key bounds, 2: without the origin of rows
static constexpr uint64_t ID_SEED  = 3;          // of server_blocks_model_id()
static constexpr uint32_t ORDER    = 0x01020304; // byte order of numbers
static constexpr size_t   ALIGN    = 64;         // of the offset of the rows
static constexpr size_t   HEAD_MAX = size_t(64) << 20;

namespace {

// The first bytes of every file, in the layout of this machine.
struct fixed_head {
    char     magic[8];
    uint32_t version;
    uint32_t order;
    uint64_t n_head;   // bytes before the rows
    uint64_t n_data;   // bytes of the rows
    uint64_t sum_data; // checksum of the rows
    uint64_t sum_head; // checksum of everything before the rows, with this number taken as 0
};

[[noreturn]] void damaged(const std::string & what) {
    throw server_blocks_file_error(server_blocks_file_error::DAMAGED, what);
}

uint64_t rotated(uint64_t x, int r) {
    return (x << r) | (x >> (64 - r));
}

size_t aligned(size_t n) {
    return (n + ALIGN - 1)/ALIGN*ALIGN;
}

// Serialises numbers, strings and lists, one after the other.
struct packer {
    std::vector<uint8_t> bytes;

    template <typename T> void number(T value) { raw(&value, sizeof(value)); }

    void raw(const void * p, size_t n) {
        bytes.insert(bytes.end(), (const uint8_t *) p, (const uint8_t *) p + n);
    }

    void text(const std::string & s) {
        number<uint64_t>(s.size());
        raw(s.data(), s.size());
    }

    template <typename T> void list(const std::vector<T> & values) {
        number<uint64_t>(values.size());
        raw(values.data(), values.size()*sizeof(T));
    }
};

// Reads what packer wrote. Throws DAMAGED when the bytes end early.
struct unpacker {
    const uint8_t * at;
    const uint8_t * end;

    void raw(void * p, size_t n) {
        if ((size_t) (end - at) < n) {
            damaged("the head ends early");
        }
        if (n > 0) { // an empty list has no memory to copy to
            memcpy(p, at, n);
        }
        at += n;
    }

    template <typename T> T number() {
        T value;
        raw(&value, sizeof(value));
        return value;
    }

    // Reads a number of items of `size` bytes each. Throws when the remaining bytes are too few for them.
    size_t count(size_t size) {
        const uint64_t n = number<uint64_t>();
        if (n > (uint64_t) (end - at)/size) {
            damaged("the head is shorter than the lists it announces");
        }
        return n;
    }

    std::string text() {
        std::string s(count(1), '\0');
        raw(&s[0], s.size());
        return s;
    }

    template <typename T> std::vector<T> list() {
        std::vector<T> values(count(sizeof(T)));
        raw(values.data(), values.size()*sizeof(T));
        return values;
    }
};

std::vector<uint8_t> packed(const server_blocks_head & head, uint64_t sum_data) {
    packer p;
    p.bytes.resize(sizeof(fixed_head));
    p.number(head.model);
    p.number(head.kv.layout);
    p.number(head.prefix_hash);
    p.number(head.hash);
    p.number(head.kv.p0);
    p.number(head.kv.p1);
    p.text(head.tenant);
    p.number<uint64_t>(head.labels.size());
    for (const auto & label : head.labels) {
        p.text(label.name);
        p.text(label.session);
    }
    p.list(head.tokens);
    p.list(head.kv.pos);
    p.list(head.kv.cells);
    p.list(head.kv.tok);
    p.list(head.kv.x);
    p.list(head.kv.y);
    p.list(head.bounds.layers);
    p.list(head.bounds.values);
    p.list(head.rows);
    p.bytes.resize(aligned(p.bytes.size()));

    fixed_head fixed {};
    memcpy(fixed.magic, MAGIC, sizeof(MAGIC));
    fixed.version  = VERSION;
    fixed.order    = ORDER;
    fixed.n_head   = p.bytes.size();
    fixed.n_data   = head.kv.size;
    fixed.sum_data = sum_data;
    memcpy(p.bytes.data(), &fixed, sizeof(fixed));
    fixed.sum_head = server_blocks_checksum(p.bytes.data(), p.bytes.size());
    memcpy(p.bytes.data(), &fixed, sizeof(fixed));
    return p.bytes;
}

server_blocks_head unpacked(std::vector<uint8_t> bytes, fixed_head fixed) {
    const uint64_t sum_head = fixed.sum_head;
    fixed.sum_head = 0;
    memcpy(bytes.data(), &fixed, sizeof(fixed));
    if (server_blocks_checksum(bytes.data(), bytes.size()) != sum_head) {
        damaged("the checksum of the head differs");
    }
    unpacker u { bytes.data() + sizeof(fixed), bytes.data() + bytes.size() };
    server_blocks_head head;
    head.version     = fixed.version;
    head.model       = u.number<uint64_t>();
    head.kv.layout   = u.number<uint64_t>();
    head.prefix_hash = u.number<uint64_t>();
    head.hash        = u.number<uint64_t>();
    head.kv.p0       = u.number<llama_pos>();
    head.kv.p1       = u.number<llama_pos>();
    head.tenant      = u.text();
    for (uint64_t n = u.count(sizeof(uint64_t)); n > 0; --n) {
        head.labels.push_back({ u.text(), "" });
        if (fixed.version >= 3) {
            head.labels.back().session = u.text();
        }
    }
    head.tokens   = u.list<llama_token>();
    head.kv.pos   = u.list<llama_pos>();
    head.kv.cells = u.list<uint32_t>();
    head.kv.tok   = u.list<llama_token>();
    head.kv.x     = u.list<llama_pos>();
    head.kv.y     = u.list<llama_pos>();
    head.kv.size  = fixed.n_data;
    if (fixed.version >= 2) {
        head.bounds.layers = u.list<int32_t>();
        head.bounds.values = u.list<float>();
    }
    if (fixed.version >= 3) {
        head.rows = u.list<server_blocks_rows>();
    }

    const size_t n = head.tokens.size();
    bool valid = head.kv.p0 >= 0 && head.kv.p1 > head.kv.p0 && n == (size_t) head.kv.p1 - head.kv.p0 && !head.labels.empty();
    for (const size_t other : { head.kv.pos.size(), head.kv.cells.size(), head.kv.tok.size(), head.kv.x.size(), head.kv.y.size() }) {
        valid = valid && other == n;
    }
    for (size_t i = 0; valid && i < n; ++i) {
        // Some models find rows by their token. Rows from a slot file, which has no tokens, have 0.
        const bool same = head.kv.tok[i] == head.tokens[i] || head.kv.tok[i] == LLAMA_TOKEN_NULL || head.kv.tok[i] == 0;
        valid = head.kv.pos[i] == head.kv.p0 + (llama_pos) i && same;
    }
    llama_pos end = head.kv.p0;
    for (const auto & r : head.rows) {
        valid = valid && r.p0 == end && r.p1 > r.p0;
        end = r.p1;
    }
    valid = valid && (fixed.version < 3 || end == head.kv.p1);
    if (!valid) {
        damaged("the head contradicts itself");
    }
    return head;
}

#if !defined(_WIN32)

[[noreturn]] void failed(const std::string & what) {
    const int error = errno;
    const bool full = error == ENOSPC || error == EDQUOT;
    const auto kind = error == ENOENT ? server_blocks_file_error::MISSING
        : full ? server_blocks_file_error::FULL : server_blocks_file_error::FAILED;
    throw server_blocks_file_error(kind, what + ": " + strerror(error));
}

struct descriptor {
    const int fd;

    descriptor(const std::string & path, int flags) : fd(open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {
        if (fd < 0) {
            failed("open");
        }
    }
    ~descriptor() { close(fd); }
};

void write_all(int fd, const uint8_t * p, size_t n) {
    while (n > 0) {
        const ssize_t done = write(fd, p, std::min(n, size_t(1) << 26));
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            failed("write");
        }
        p += done;
        n -= done;
    }
}

void read_all(int fd, uint8_t * p, size_t n, size_t offset) {
    while (n > 0) {
        const ssize_t done = pread(fd, p, n, offset);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done < 0) {
            failed("read");
        }
        if (done == 0) {
            damaged("the file ends early");
        }
        p += done;
        n -= done;
        offset += done;
    }
}

size_t size_of(int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0) {
        failed("stat");
    }
    if (!S_ISREG(st.st_mode)) {
        damaged("not a file");
    }
    return st.st_size;
}

server_blocks_head peek(int fd, fixed_head & fixed) {
    const size_t size = size_of(fd);
    if (size < sizeof(fixed)) {
        damaged("the file is too short");
    }
    read_all(fd, (uint8_t *) &fixed, sizeof(fixed), 0);
    if (memcmp(fixed.magic, MAGIC, sizeof(MAGIC)) != 0) {
        damaged("not a block file");
    }
    if (fixed.version < 1 || fixed.version > VERSION || fixed.order != ORDER) {
        throw server_blocks_file_error(server_blocks_file_error::OTHER_VERSION, "a block file of another version");
    }
    if (fixed.n_head < sizeof(fixed) || fixed.n_head > std::min(HEAD_MAX, size) || fixed.n_data != size - fixed.n_head) {
        damaged("the size of the file differs from its head");
    }
    std::vector<uint8_t> bytes(fixed.n_head);
    read_all(fd, bytes.data(), bytes.size(), 0);
    return unpacked(std::move(bytes), fixed);
}

// A range of a file.
struct file_range {
    size_t offset;
    size_t size;
};

// Returns the checksum of a range of the file, or of less where the file ends. Reads it in parts.
uint64_t checksum_of(int fd, const file_range & range, uint64_t seed) {
    static constexpr size_t PART = 1024*1024;
    std::vector<uint8_t> bytes(std::min(PART, range.size));
    for (size_t at = 0; at < range.size; at += PART) {
        const ssize_t done = pread(fd, bytes.data(), std::min(PART, range.size - at), range.offset + at);
        seed = server_blocks_checksum(bytes.data(), std::max<ssize_t>(done, 0), seed);
    }
    return seed;
}

// Returns the checksums of the ranges. Several threads read: a model may have many gigabytes.
std::vector<uint64_t> checksums_of(int fd, const std::vector<file_range> & ranges, uint64_t seed) {
    static constexpr size_t N_THREADS = 8;
    std::vector<uint64_t> sums(ranges.size());
    std::atomic<size_t> next { 0 };
    const auto work = [&] {
        for (size_t i = next++; i < ranges.size(); i = next++) {
            sums[i] = checksum_of(fd, ranges[i], seed);
        }
    };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < std::min<size_t>(N_THREADS, std::thread::hardware_concurrency()); ++i) {
        threads.emplace_back(work);
    }
    work();
    for (auto & thread : threads) {
        thread.join();
    }
    return sums;
}

// Hashes the metadata and every tensor, whole. Sets `n_files` to the number of files that the model is split into.
// Returns 0 if the file cannot be read.
uint64_t gguf_id(const std::string & path, uint64_t h, int & n_files) {
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_from_file(path.c_str(), { true, nullptr }), gguf_free);
    if (!file) {
        return 0;
    }
    const int64_t split = gguf_find_key(file.get(), "split.count");
    n_files = split >= 0 && gguf_get_kv_type(file.get(), split) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(file.get(), split) : 1;
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    const size_t base = gguf_get_data_offset(file.get());
    std::vector<file_range> ranges { { 0, base } };
    for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); ++i) {
        ranges.push_back({ base + gguf_get_tensor_offset(file.get(), i), gguf_get_tensor_size(file.get(), i) });
    }
    const std::vector<uint64_t> sums = checksums_of(fd, ranges, h);
    close(fd);
    return server_blocks_checksum(sums.data(), sums.size()*sizeof(sums[0]), h);
}

#endif

} // namespace

// The rounds of XXH64 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): one pass at memory speed.
uint64_t server_blocks_checksum(const void * data, size_t n, uint64_t seed) {
    static constexpr uint64_t P1 = 0x9E3779B185EBCA87ull, P2 = 0xC2B2AE3D27D4EB4Full, P3 = 0x165667B19E3779F9ull,
                              P4 = 0x85EBCA77C2B2AE63ull, P5 = 0x27D4EB2F165667C5ull;
    const auto round = [](uint64_t acc, uint64_t lane) { return rotated(acc + lane*P2, 31)*P1; };
    const auto lane  = [](const uint8_t * p) { uint64_t v; memcpy(&v, p, 8); return v; };
    const uint8_t * p   = (const uint8_t *) data;
    const uint8_t * end = p + n;
    uint64_t h = seed + P5;
    if (n >= 32) {
        uint64_t a[4] = { seed + P1 + P2, seed + P2, seed, seed - P1 };
        for (; end - p >= 32; p += 32) {
            for (int i = 0; i < 4; ++i) {
                a[i] = round(a[i], lane(p + 8*i));
            }
        }
        h = rotated(a[0], 1) + rotated(a[1], 7) + rotated(a[2], 12) + rotated(a[3], 18);
        for (const uint64_t acc : a) {
            h = (h ^ round(0, acc))*P1 + P4;
        }
    }
    h += n;
    for (; end - p >= 8; p += 8) {
        h = rotated(h ^ round(0, lane(p)), 27)*P1 + P4;
    }
    for (; p < end; ++p) {
        h = rotated(h ^ (*p*P5), 11)*P1;
    }
    h = (h ^ (h >> 33))*P2;
    h = (h ^ (h >> 29))*P3;
    return h ^ (h >> 32);
}

std::string server_blocks_file_name(const server_blocks_head & head) {
    packer p;
    p.number(head.model);
    p.number(head.kv.layout);
    p.number(head.hash);
    p.number(head.kv.p0);
    p.number(head.kv.p1);
    p.number(server_blocks_visibility_of(head.rows));
    p.text(head.tenant);
    return string_format("evoke-%016" PRIx64 "%016" PRIx64 ".kvb", server_blocks_checksum(p.bytes.data(), p.bytes.size(), 1),
        server_blocks_checksum(p.bytes.data(), p.bytes.size(), 2));
}

size_t server_blocks_file_size(const server_blocks_head & head) {
    return packed(head, 0).size() + head.kv.size;
}

#if defined(_WIN32)

// Not supported on this system: server_blocks_disk::open() refuses.
uint64_t server_blocks_model_id(const common_params &) { return 0; }
uint64_t server_blocks_projector_id(const common_params &) { return 0; }
void server_blocks_file_remove_abandoned(const std::string &) {}
server_blocks_head server_blocks_file_peek(const std::string &) { damaged("not on this system"); }
server_blocks_head server_blocks_file_read(const std::string &, const server_blocks_head &, uint8_t *) { damaged("not on this system"); }
void server_blocks_file_write(const std::string &, const server_blocks_head &, const uint8_t *) { damaged("not on this system"); }

#else

uint64_t server_blocks_model_id(const common_params & params) {
    int n_files = 1;
    uint64_t h = gguf_id(params.model.path, ID_SEED, n_files);
    std::vector<char> prefix(params.model.path.size() + 1), path(params.model.path.size() + 64);
    for (int i = 1; h != 0 && i < n_files; ++i) {
        int ignored = 0;
        const bool named = llama_split_prefix(prefix.data(), prefix.size(), params.model.path.c_str(), 0, n_files) > 0;
        llama_split_path(path.data(), path.size(), prefix.data(), i, n_files);
        h = named ? gguf_id(path.data(), h, ignored) : 0;
    }
    packer p;
    for (const auto & item : params.kv_overrides) {
        const std::string key(item.key, strnlen(item.key, sizeof(item.key)));
        if (key.empty()) { // the end of the list
            continue;
        }
        p.text(key);
        p.number<uint64_t>(item.tag);
        switch (item.tag) {
            case LLAMA_KV_OVERRIDE_TYPE_INT:   p.number(item.val_i64); break;
            case LLAMA_KV_OVERRIDE_TYPE_FLOAT: p.number(item.val_f64); break;
            case LLAMA_KV_OVERRIDE_TYPE_BOOL:  p.number<uint64_t>(item.val_bool); break;
            case LLAMA_KV_OVERRIDE_TYPE_STR:   p.text(std::string(item.val_str, strnlen(item.val_str, sizeof(item.val_str)))); break;
        }
    }
    if (!params.control_vectors.empty()) {
        const auto vectors = common_control_vector_load(params.control_vectors); // the scaled sum
        if (vectors.n_embd <= 0) {
            return 0;
        }
        p.number(vectors.n_embd);
        p.list(vectors.data);
        p.number(params.control_vector_layer_start);
        p.number(params.control_vector_layer_end);
    }
    return h == 0 ? 0 : server_blocks_checksum(p.bytes.data(), p.bytes.size(), h);
}

uint64_t server_blocks_projector_id(const common_params & params) {
    int n_files = 1;
    const uint64_t h = gguf_id(params.mmproj.path, ID_SEED, n_files);
    packer p;
    p.number(params.image_min_tokens);
    p.number(params.image_max_tokens);
    return h == 0 ? 0 : server_blocks_checksum(p.bytes.data(), p.bytes.size(), h);
}

namespace {

// Creates and locks a temporary file for `path`; sets `temp` to its path. A scan for abandoned files may delete the file
// before it is locked. Then its link count is 0, and another file is created.
std::unique_ptr<descriptor> locked_file(const std::string & path, std::string & temp) {
    for (int attempt = 0; ; ++attempt) {
        temp = path + "." + std::to_string(getpid()) + "-" + std::to_string(ggml_time_us()) + "-" + std::to_string(attempt) + ".tmp";
        auto file = std::make_unique<descriptor>(temp, O_WRONLY | O_CREAT | O_EXCL);
        while (flock(file->fd, LOCK_EX) != 0 && errno == EINTR) {
        }
        struct stat st;
        if (attempt == 100 || (fstat(file->fd, &st) == 0 && st.st_nlink > 0)) {
            return file;
        }
    }
}

// Copies n bytes of rows from one file to another.
void copy_rows(int from, size_t offset, int to, size_t n) {
    std::vector<uint8_t> part(std::min(n, size_t(1) << 20));
    while (n > 0) {
        const size_t size = std::min(n, part.size());
        read_all(from, part.data(), size, offset);
        write_all(to, part.data(), size);
        offset += size;
        n      -= size;
    }
}

} // namespace

void server_blocks_file_write(const std::string & folder, const server_blocks_head & head, const uint8_t * data) {
    const std::string path = folder + "/" + server_blocks_file_name(head);
    fixed_head before {};
    std::unique_ptr<descriptor> rows; // without data: the file that is replaced
    if (!data) {
        rows = std::make_unique<descriptor>(path, O_RDONLY);
        const auto found = peek(rows->fd, before);
        if (found.kv.size != head.kv.size || !(found.rows == head.rows)) {
            damaged("the file is of another block");
        }
    }
    const auto bytes = packed(head, data ? server_blocks_checksum(data, head.kv.size) : before.sum_data);
    std::string temp;
    const auto file = locked_file(path, temp);
    try {
        write_all(file->fd, bytes.data(), bytes.size());
        data ? write_all(file->fd, data, head.kv.size) : copy_rows(rows->fd, before.n_head, file->fd, head.kv.size);
        if (fsync(file->fd) != 0) {
            failed("fsync");
        }
        if (rename(temp.c_str(), path.c_str()) != 0) {
            failed("rename");
        }
    } catch (...) {
        unlink(temp.c_str());
        throw;
    }
    const int dir = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); // makes the new name durable
    if (dir >= 0) {
        fsync(dir);
        close(dir);
    }
}

server_blocks_head server_blocks_file_peek(const std::string & path) {
    const descriptor file(path, O_RDONLY);
    fixed_head fixed;
    return peek(file.fd, fixed);
}

server_blocks_head server_blocks_file_read(const std::string & path, const server_blocks_head & head, uint8_t * data) {
    const descriptor file(path, O_RDONLY);
    fixed_head fixed;
    auto found = peek(file.fd, fixed);
    if (server_blocks_file_name(found) != server_blocks_file_name(head) || found.kv.size != head.kv.size) {
        damaged("the file is of another block");
    }
    read_all(file.fd, data, found.kv.size, fixed.n_head);
    if (server_blocks_checksum(data, found.kv.size) != fixed.sum_data) {
        damaged("the checksum of the rows differs");
    }
    return found;
}

// Deletes the file while it holds the lock: a writer that opened the file before waits for the lock, then finds it
// deleted.
void server_blocks_file_remove_abandoned(const std::string & path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        if (errno == ELOOP || errno == EACCES) { // a link, or a file of another user: no server of ours wrote it
            unlink(path.c_str());
        }
        return;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        unlink(path.c_str());
    }
    close(fd);
}

#endif
