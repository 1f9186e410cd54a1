// Tests server_blocks_memory: the reservation of a plan, and memory that the disk still uses.
// Prints one line per check; exit status 1 after the first that fails.

#include "server-blocks-memory.h"

#include "check.h"

static constexpr size_t N_BYTES = 64;

static void test_reservation() {
    server_blocks_memory memory;
    check(memory.reset(8*N_BYTES, nullptr) && memory.size() == 8*N_BYTES, "a region is reserved");
    uint8_t * small = memory.allocate(N_BYTES);
    uint8_t * large = memory.allocate(2*N_BYTES);
    check(!memory.has_reservation() && memory.reserved_bytes() == 0, "at first nothing is reserved");
    memory.reserve({ { N_BYTES, small }, { 2*N_BYTES, large } }, 1000);
    check(memory.has_reservation() && memory.reserved_bytes() == 1000, "a reservation counts all bytes of its copies");
    check(memory.allocate(2*N_BYTES) == large, "memory of the reservation is handed out by its size");
    uint8_t * other = memory.allocate(2*N_BYTES);
    check(other != nullptr && other != large && other != small, "and only once");
    check(memory.allocate(3*N_BYTES) != nullptr, "another size comes from the region");
    check(!memory.allocate(N_BYTES + 1), "nothing else is left");
    memory.cancel_reservation();
    check(!memory.has_reservation() && memory.reserved_bytes() == 0, "the end of the plan ends the reservation");
    check(memory.allocate(N_BYTES) == small && !memory.allocate(1), "the rest of it is free, what was handed out is not");
}

static void test_memory_of_a_write() {
    server_blocks_memory memory;
    server_blocks_disk disk;
    memory.reset(N_BYTES, nullptr);
    const auto write = std::make_shared<server_blocks_write>();
    write->head.tenant = "a";
    write->state = server_blocks_write::RUNNING;
    memory.release_after(write, memory.allocate(N_BYTES), 100);
    check(memory.poll(disk).empty() && memory.pending_bytes() == 100, "memory of a write in progress counts as used");
    check(!memory.allocate(N_BYTES), "and is not handed out");
    write->state = server_blocks_write::DONE;
    const auto written = memory.poll(disk);
    check(written.size() == 1 && written[0].tenant == "a", "the file that was written is reported");
    check(memory.pending_bytes() == 0 && memory.allocate(N_BYTES), "then the memory is free");

    const auto failed = std::make_shared<server_blocks_write>();
    failed->state = server_blocks_write::FAILED;
    memory.release_after(failed, nullptr, 0);
    check(memory.poll(disk).empty(), "a write that failed reports no file");
}

static void test_memory_of_a_read() {
    server_blocks_memory memory;
    server_blocks_disk disk;
    memory.reset(N_BYTES, nullptr);
    auto read = std::make_shared<server_blocks_read>();
    memory.release_after(read, memory.allocate(N_BYTES), 100);
    memory.poll(disk);
    check(memory.pending_bytes() == 100, "a read that a call waits for keeps its memory");
    read->mutex.lock();
    read->state = server_blocks_read::DONE;
    memory.poll(disk);
    check(memory.pending_bytes() == 100, "also while it is executed");
    read->mutex.unlock();
    memory.poll(disk);
    check(memory.pending_bytes() == 0 && memory.allocate(N_BYTES), "and no longer when it is over");

    memory.reset(N_BYTES, nullptr);
    memory.release_after(std::make_shared<server_blocks_read>(), memory.allocate(N_BYTES), 100);
    memory.poll(disk);
    check(memory.pending_bytes() == 0 && memory.allocate(N_BYTES), "a read that no call waits for is over");
}

int main() {
    test_reservation();
    test_memory_of_a_write();
    test_memory_of_a_read();
    return 0;
}
