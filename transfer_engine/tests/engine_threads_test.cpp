// What transfer_engine.hpp promises of threads: full queues, callbacks that block or throw, stopping, watchers, and
// many operations of all kinds at a time. Also run with ThreadSanitizer.
#include "engine_fixture.hpp"

using namespace transfer_engine;
using namespace transfer_engine::testing;

namespace
{

TEST_F(Engine, TooManyOperationsArePushedBack)
{
    wire.faults.keeps = 1;
    Side a(&wire, 1, options_with([](Options &options) {
        options.abort_after = 10ms;
        options.most_operations = 8;
    }));
    Side b(&wire, 1);
    Outcome all;
    for (int i = 0; i < 8; ++i)
        ASSERT_TRUE(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, all.callback(), 100ms).ok());
    EXPECT_EQ(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, all.callback()).code, Code::full);
    EXPECT_EQ(a.engine->metrics().pushed_back, 1U);
    for (size_t i = 0; i < 8; ++i)
        EXPECT_EQ(all.code(i), Code::timed_out);
    {
        const std::lock_guard lock(wire.mutex);
        wire.faults.keeps = 0;
    }
    ASSERT_TRUE(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, all.callback()).ok());
    EXPECT_EQ(all.code(8), Code::ok);
}

TEST_F(Engine, BlockedCallbackHoldsUpNoTransfer) // semantic 10, trap 12
{
    Side a(&wire, 1, options_with([](Options &options) { options.most_callbacks = 2; }));
    Side b(&wire, 1);
    std::mutex mutex;
    std::condition_variable changed;
    bool go = false;
    std::atomic<bool> blocked{false};
    std::atomic<int> called{0};
    ASSERT_TRUE(a.engine
                    ->submit_single_write(10, {}, a.handle, 0, b.region, 0, Callback([&](const Status &) {
                                              std::unique_lock lock(mutex);
                                              blocked = true;
                                              changed.wait_for(lock, 10s, [&] { return go; });
                                              ++called;
                                          }))
                    .ok());
    EXPECT_TRUE(soon([&] { return blocked.load(); }));
    for (int i = 0; i < 200; ++i)
        ASSERT_TRUE(
            a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, Callback([&](const Status &) { ++called; }))
                .ok());
    Flag flag;
    ASSERT_TRUE(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, &flag).ok());
    EXPECT_TRUE(soon([&] { return flag.done.load(); }));
    EXPECT_TRUE(soon([&] { return a.engine->metrics().succeeded == 202; }));
    EXPECT_EQ(called, 0);
    {
        const std::lock_guard lock(mutex);
        go = true;
    }
    changed.notify_all();
    EXPECT_TRUE(soon([&] { return called == 201; }));
}

TEST_F(Engine, CallbackThatThrowsIsCounted)
{
    Side a(&wire, 1), b(&wire, 1);
    Outcome next;
    ASSERT_TRUE(
        a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, Callback([](const Status &) { throw 1; }))
            .ok());
    ASSERT_TRUE(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, next.callback()).ok());
    EXPECT_EQ(next.code(), Code::ok);
    EXPECT_TRUE(soon([&] { return a.engine->metrics().callbacks_thrown == 1; }));
}

TEST_F(Engine, CallbackMaySubmit)
{
    Side a(&wire, 1), b(&wire, 1);
    std::atomic<int> left{100};
    std::function<void(const Status &)> again = [&](const Status &) {
        if (--left == 0) return;
        EXPECT_TRUE(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, Callback(again)).ok());
    };
    again({});
    EXPECT_TRUE(soon([&] { return left == 0; }));
    std::atomic<bool> refused{false};
    ASSERT_TRUE(a.engine
                    ->submit_barrier({}, 1, {}, Callback([&](const Status &) {
                                         refused = a.engine->stop(false).code == Code::invalid;
                                     }))
                    .ok());
    EXPECT_TRUE(soon([&] { return refused.load(); }));
}

TEST_F(Engine, StopDrains)
{
    Side a(&wire), b(&wire);
    fill(&a);
    Outcome all;
    for (int i = 0; i < 200; ++i)
        ASSERT_TRUE(a.engine->submit_single_write(5000, {}, a.handle, 0, b.region, 0, all.callback()).ok());
    EXPECT_TRUE(a.engine->stop(true).ok());
    ASSERT_EQ(all.count(), 200U);
    for (size_t i = 0; i < 200; ++i)
        EXPECT_EQ(all.code(i), Code::ok);
    EXPECT_EQ(a.engine->submit_single_write(1, {}, a.handle, 0, b.region, 0).code, Code::stopped);
    EXPECT_TRUE(a.engine->stop(true).ok());
}

TEST_F(Engine, StopCancels) // semantic 12: every callback is delivered
{
    wire.faults.keeps = 0.5;
    Side a(&wire, 2, options_with([](Options &options) { options.abort_after = 50ms; }));
    Side b(&wire);
    Outcome all, expected;
    for (int i = 0; i < 200; ++i)
        ASSERT_TRUE(a.engine->submit_single_write(5000, {}, a.handle, 0, b.region, 0, all.callback()).ok());
    ASSERT_TRUE(a.engine->expect_imm_count(1, 1, expected.callback()).ok());
    EXPECT_TRUE(a.engine->stop(false).ok());
    ASSERT_EQ(all.count(), 200U);
    EXPECT_EQ(expected.code(), Code::cancelled);
    size_t cancelled = 0;
    for (size_t i = 0; i < 200; ++i)
        cancelled += all.code(i) == Code::cancelled ? 1 : 0;
    EXPECT_GE(cancelled, 1U);
}

TEST_F(Engine, StopWhileOthersSubmit)
{
    Side a(&wire), b(&wire);
    std::atomic<uint64_t> taken{0}, ended{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
            for (;;) {
                const Status status = a.engine->submit_single_write(100, {}, a.handle, 0, b.region, 0,
                                                                    Callback([&](const Status &) { ++ended; }));
                if (status.code == Code::stopped) return;
                taken += status.ok() ? 1 : 0;
            }
        });
    std::this_thread::sleep_for(20ms);
    EXPECT_TRUE(a.engine->stop(true).ok());
    for (std::thread &thread : threads)
        thread.join();
    EXPECT_EQ(ended, taken);
}

// Three engines, all kinds of operations from two threads each, in every weather: each operation ends once.
TEST_F(Engine, ManyOfAllKindsByManyThreads)
{
    for (const Faults weather : {Faults{}, Faults{.fails = 0.05}, Faults{.fails = 0.05, .breaks = 0.3},
                                 Faults{.keeps = 0.02}, Faults{.breaks = 0.1, .keeps = 0.02, .loses_message = 0.1}}) {
        wire.faults = weather;
        std::atomic<uint64_t> taken{0}, ended{0};
        {
            const auto patience = options_with([](Options &options) {
                options.timeout = 50ms;
                options.abort_after = 20ms;
            });
            std::vector<std::unique_ptr<Side>> sides;
            for (int i = 0; i < 3; ++i)
                sides.push_back(std::make_unique<Side>(&wire, 2, patience, 64 << 10));
            for (const auto &side : sides)
                ASSERT_TRUE(side->engine->submit_recvs(100, 4, [](auto) {}).ok());
            std::vector<std::thread> threads;
            for (size_t i = 0; i < 6; ++i)
                threads.emplace_back([&, i] {
                    std::mt19937_64 random(i);
                    Side &from = *sides[i % 3];
                    const std::vector<uint8_t> message(50);
                    for (int n = 0; n < 100; ++n) {
                        const Side &to = *sides[random() % 3];
                        const auto imm = static_cast<uint32_t>(random() % 4);
                        const Callback count = [&](const Status &) { ++ended; };
                        Status status;
                        switch (random() % 6) {
                        case 0:
                            status = from.engine->submit_single_write(random() % 4000, imm, from.handle, 0, to.region,
                                                                      30000, count);
                            break;
                        case 1:
                            status = from.engine->submit_single_read(random() % 4000, from.handle,
                                                                     40000 + 5000 * (i / 3), to.region, 0, count);
                            break;
                        case 2:
                            status = from.engine->submit_paged_writes(64, imm, from.handle, pages({1, 2, 3}, 64),
                                                                      to.region, pages({0, 1, 2}, 64, 35000), count);
                            break;
                        case 3: status = from.engine->submit_barrier({}, imm, {to.region, from.region}, count); break;
                        case 4: status = from.engine->submit_send(to.engine->main_address(), message, count); break;
                        default: status = to.engine->expect_imm_count(imm, random() % 4, count, 30ms);
                        }
                        taken += status.ok() ? 1 : 0;
                    }
                });
            for (std::thread &thread : threads)
                thread.join();
            EXPECT_TRUE(soon([&] { return ended == taken; })) << ended << " of " << taken;
            for (const auto &side : sides)
                EXPECT_TRUE(side->engine->stop(false).ok());
        }
        EXPECT_EQ(ended, taken);
        EXPECT_GT(taken, 100U);
    }
}

TEST_F(Engine, WatcherTellsEveryChangeOrTheSumOfSeveral) // T8
{
    Side a(&wire, 1);
    std::mutex mutex;
    std::vector<std::pair<uint64_t, uint64_t>> seen;
    uint64_t *const word = a.engine->alloc_uvm_watcher([&](uint64_t before, uint64_t now) {
        const std::lock_guard lock(mutex);
        seen.emplace_back(before, now);
    });
    ASSERT_NE(word, nullptr);
    for (uint64_t value = 1; value <= 1000; ++value)
        std::atomic_ref(*word).store(value, std::memory_order_release);
    EXPECT_TRUE(soon([&] {
        const std::lock_guard lock(mutex);
        return !seen.empty() && seen.back().second == 1000;
    }));
    const std::lock_guard lock(mutex);
    uint64_t last = 0;
    for (const auto &[before, now] : seen) { // no gap, no step back
        EXPECT_EQ(before, last);
        EXPECT_GT(now, before);
        last = now;
    }
}

TEST_F(Engine, FreedWatcherIsNotCalledAnyMore)
{
    Side a(&wire, 1);
    std::atomic<int> calls{0};
    uint64_t *word = a.engine->alloc_uvm_watcher([&](uint64_t, uint64_t) { ++calls; });
    std::atomic_ref(*word).store(1);
    EXPECT_TRUE(soon([&] { return calls == 1; }));
    a.engine->free_uvm_watcher(word);
    a.engine->free_uvm_watcher(word); // of no effect
    uint64_t *itself = nullptr;
    std::atomic<uint64_t **> whose{nullptr};
    itself = a.engine->alloc_uvm_watcher([&](uint64_t, uint64_t) {
        a.engine->free_uvm_watcher(*whose.load());
        ++calls;
    });
    whose = &itself;
    std::atomic_ref(*itself).store(5);
    EXPECT_TRUE(soon([&] { return calls == 2; }));
}

} // namespace
