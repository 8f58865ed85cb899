// After warm-up an operation allocates nothing: counted in operator new, over a real transport (libfabric's own
// memory comes from malloc and is not counted).
#include "../transfer_engine.hpp"

#include <cstdlib>
#include <gtest/gtest.h>
#include <new>
#include <thread>

static std::atomic<uint64_t> allocations{0};

void *operator new(size_t size)
{
    allocations.fetch_add(1, std::memory_order_relaxed);
    void *const memory = malloc(size);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void *memory) noexcept { free(memory); }
void operator delete(void *memory, size_t) noexcept { free(memory); }

using namespace transfer_engine;

namespace
{

struct Side {
    Side() : memory(1 << 20)
    {
        Options options;
        options.groups.resize(1);
        options.groups[0].nics = {ofi_nic("shm"), ofi_nic("shm")};
        options.spin = false;
        Status status;
        engine = TransferEngine::open(std::move(options), &status);
        EXPECT_TRUE(status.ok()) << status.message;
        EXPECT_TRUE(engine->reg_mr(memory.data(), memory.size(), host, &handle, &region).ok());
    }
    std::vector<uint8_t> memory;
    std::unique_ptr<TransferEngine> engine;
    MrHandle handle;
    MrDesc region;
};

// Many writes with an immediate, and messages, sixteen of each under way at a time.
void exchange(Side *a, Side *b, int rounds)
{
    const std::vector<uint8_t> message(100);
    std::array<Flag, 16> written, sent;
    for (int round = 0; round < rounds; ++round) {
        for (size_t i = 0; i < written.size(); ++i) {
            written[i].done = sent[i].done = false;
            ASSERT_TRUE(a->engine->submit_single_write(10000, 7, a->handle, 0, b->region, 0, &written[i]).ok());
            ASSERT_TRUE(a->engine->submit_send(b->engine->main_address(), message, &sent[i]).ok());
        }
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        for (size_t i = 0; i < written.size();)
            if (written[i].done && sent[i].done) {
                ++i;
            } else {
                ASSERT_LT(std::chrono::steady_clock::now(), deadline);
                std::this_thread::yield();
            }
    }
}

TEST(EngineMemory, NothingIsAllocatedForAnOperation)
{
    Side a, b;
    std::atomic<uint64_t> messages{0};
    ASSERT_TRUE(b.engine->submit_recvs(128, 64, [&](auto) { ++messages; }).ok());
    exchange(&a, &b, 100);
    const uint64_t before = allocations;
    exchange(&a, &b, 50);
    // The queues may take some blocks of 32 entries more, when a thread was held up for longer than before.
    EXPECT_LT(allocations - before, 100U) << "for 1,600 operations";
    EXPECT_GT(messages, 0U);
}

} // namespace
