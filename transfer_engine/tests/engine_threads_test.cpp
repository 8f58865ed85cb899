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

TEST_F(Engine, TooManyMessagesArePushedBack)
{
    Side a(&wire, 1, options_with([](Options &options) {
        options.most_operations = 8;
        options.most_sends = 2;
    }));
    Side b(&wire, 1);
    Outcome all;
    const auto send = [&] { return a.engine->submit_send(b.engine->main_address(), {}, all.callback()).code; };
    for (int i = 0; i < 20; ++i) // nobody receives; a refused one takes nothing away
        EXPECT_EQ(send(), i < 2 ? Code::ok : Code::full);
    ASSERT_TRUE(a.engine->submit_barrier({}, 1, {}, all.callback()).ok());
    EXPECT_EQ(all.code(), Code::ok);
    ASSERT_TRUE(b.engine->submit_recvs(8, 1, [](auto) {}).ok());
    EXPECT_TRUE(all.code(1) == Code::ok && all.code(2) == Code::ok);
    EXPECT_EQ(send(), Code::ok);
    EXPECT_EQ(all.code(3), Code::ok);
}

TEST_F(Engine, BufferOfALostMessageServesAgain)
{
    wire.faults.loses_message = 1;
    Side a(&wire, 1), b(&wire, 1);
    ASSERT_TRUE(b.engine->submit_recvs(8, 1, [](auto) {}).ok());
    Outcome sent;
    for (size_t i = 0; i < 3; ++i) {
        ASSERT_TRUE(a.engine->submit_send(b.engine->main_address(), {}, sent.callback()).ok());
        EXPECT_EQ(sent.code(i), Code::ok);
    }
    EXPECT_EQ(b.engine->metrics().messages, 0U);
}

TEST_F(Engine, BuffersWaitForRoomAtTheAdapter)
{
    Side a(&wire, 1), b(&wire, 1, {}, 1 << 20, {.receives = 1});
    std::atomic<bool> go{false};
    ASSERT_TRUE(b.engine->submit_recvs(8, 2, [&](auto) { soon([&] { return go.load(); }); }).ok());
    Outcome sent; // the second buffer is posted while the callback has the first
    for (int i = 0; i < 2; ++i)
        ASSERT_TRUE(a.engine->submit_send(b.engine->main_address(), {}, sent.callback()).ok());
    EXPECT_EQ(sent.code(1), Code::ok);
    EXPECT_LE(b.engine->metrics().messages, 1U);
    go = true;
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
    std::vector<int> order;
    const auto submit_numbered = [&](int begin, int end) { // they end at once
        for (int i = begin; i < end; ++i)
            ASSERT_TRUE(
                a.engine->submit_barrier({}, 1, {}, Callback([&, i](const Status &) { order.push_back(i); })).ok());
    };
    submit_numbered(0, 50);
    Flag flag, refused;
    ASSERT_TRUE(a.engine->submit_single_write(10, {}, a.handle, 0, b.region, 0, &flag).ok());
    ASSERT_TRUE(
        a.engine->submit_paged_writes(10, {}, a.handle, pages({0}, 0, UINT64_MAX), b.region, pages({0}, 0), &refused)
            .ok());
    EXPECT_TRUE(soon([&] { return flag.done.load() && refused.done.load(); }));
    EXPECT_TRUE(flag.status.ok());
    EXPECT_EQ(refused.status.code, Code::invalid);
    EXPECT_TRUE(soon([&] { return a.engine->metrics().succeeded == 252; }));
    EXPECT_EQ(called, 0);
    {
        const std::lock_guard lock(mutex);
        go = true;
    }
    changed.notify_all();
    submit_numbered(50, 500);
    EXPECT_TRUE(soon([&] { return called == 201; }));
    EXPECT_TRUE(a.engine->stop(true).ok());
    EXPECT_EQ(order.size(), 500U);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end())); // none has overtaken one that waited
}

TEST_F(Engine, CallbackThatThrowsIsCounted)
{
    Side a(&wire, 1), b(&wire, 1);
    Outcome next;
    const auto captured = std::make_shared<int>(0);
    ASSERT_TRUE(a.engine->submit_barrier({}, 1, {}, Callback([captured](const Status &) {})).ok());
    EXPECT_TRUE(soon([&] { return captured.use_count() == 1; })); // not kept for longer
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
    wire.faults.idle = 0.9; // slow
    Side a(&wire), b(&wire);
    fill(&a);
    Outcome all;
    {
        const std::lock_guard lock(wire.mutex); // the worker waits: all of it is still to be done when stop() comes
        for (int i = 0; i < 200; ++i)
            ASSERT_TRUE(a.engine->submit_single_write(5000, {}, a.handle, 0, b.region, 0, all.callback()).ok());
    }
    EXPECT_TRUE(a.engine->stop(true).ok());
    ASSERT_EQ(all.count(), 200U);
    for (size_t i = 0; i < 200; ++i)
        EXPECT_EQ(all.code(i), Code::ok);
    EXPECT_EQ(a.engine->alloc_uvm_watcher([](uint64_t, uint64_t) {}), nullptr);
    EXPECT_EQ(a.engine->submit_single_write(1, {}, a.handle, 0, b.region, 0).code, Code::stopped);
    EXPECT_TRUE(a.engine->stop(true).ok());

    Outcome at_once; // more are queued than are taken at a time
    {
        const std::lock_guard lock(wire.mutex);
        for (int i = 0; i < 800; ++i)
            ASSERT_TRUE(b.engine->submit_barrier({}, 1, {}, at_once.callback()).ok());
    }
    EXPECT_TRUE(b.engine->stop(true).ok());
    EXPECT_EQ(at_once.count(), 800U);
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
    EXPECT_GE(a.engine->metrics().peers_down, 1U); // given up, not only closed
}

// An adapter that takes everything and never tells of anything.
class DeafDomain final : public Domain
{
    NetAddr address() const override { return {.length = 1}; }
    uint64_t longest_request() const override { return 100; }
    Status register_memory(void *, uint64_t, int, MemoryKeys *) override { return {}; }
    void deregister_memory(const MemoryKeys &) override {}
    Status find_peer(const NetAddr &, uint32_t *) override { return {}; }
    size_t post(uint32_t, std::span<const WorkRequest> requests) override { return requests.size(); }
    bool post_receive(void *, uint64_t, uint64_t, uint64_t) override { return false; }
    size_t poll(std::span<Event>) override { return 0; }
    void abort(uint32_t) override {}
};

class DeafAdapter : public Engine, public ::testing::WithParamInterface<bool>
{
};

TEST_P(DeafAdapter, IsClosedByStop) // semantic 8
{
    const bool drain = GetParam();
    Options options = options_with([](Options &o) { o.abort_after = 1ms, o.timeout = 50ms, o.most_callbacks = 1; });
    options.groups.resize(1);
    options.groups[0].nics = {[](Status *) { return std::make_unique<DeafDomain>(); }};
    Status status;
    const auto engine = TransferEngine::open(std::move(options), &status);
    std::array<uint8_t, 100> memory{};
    MrHandle handle;
    MrDesc region;
    ASSERT_TRUE(engine->reg_mr(memory.data(), memory.size(), host, &handle, &region).ok());
    Outcome all;
    for (int i = 0; i < 3; ++i)
        ASSERT_TRUE(engine->submit_single_write(100, {}, handle, 0, region, 0, all.callback()).ok());
    EXPECT_TRUE(engine->stop(drain).ok());
    ASSERT_EQ(all.count(), 3U);
    for (size_t i = 0; i < 3; ++i)
        EXPECT_EQ(all.code(i), drain ? Code::timed_out : Code::cancelled);
}
INSTANTIATE_TEST_SUITE_P(Engine, DeafAdapter, ::testing::Bool());

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
    // Neither while it is called nor when that waits to be.
    std::atomic<bool> inside{false}, go{false};
    uint64_t *slow = a.engine->alloc_uvm_watcher([&](uint64_t, uint64_t) {
        inside = true;
        soon([&] { return go.load(); });
        std::this_thread::sleep_for(20ms);
        ++calls;
    });
    word = a.engine->alloc_uvm_watcher([&](uint64_t, uint64_t) { ++calls; });
    std::atomic_ref(*slow).store(1);
    EXPECT_TRUE(soon([&] { return inside.load(); }));
    std::atomic_ref(*word).store(1);
    std::this_thread::sleep_for(20ms);
    a.engine->free_uvm_watcher(word);
    go = true;
    a.engine->free_uvm_watcher(slow);
    EXPECT_EQ(calls, 3);
    EXPECT_TRUE(a.engine->stop(true).ok());
    EXPECT_EQ(calls, 3);
}

TEST_F(Engine, LastChangeOfAWordIsTold)
{
    for (int turn = 0; turn < 5; ++turn) {
        Side a(&wire, 1, options_with([](Options &options) { options.most_callbacks = 1; }));
        std::atomic<uint64_t> sum{0};
        std::atomic<bool> go{false};
        uint64_t *const word = a.engine->alloc_uvm_watcher([&](uint64_t before, uint64_t now) {
            soon([&] { return go.load(); });
            sum += now - before;
        });
        for (uint64_t value = 1; value <= 3; ++value) { // the callbacks' queue is full
            std::atomic_ref(*word).store(value);
            std::this_thread::sleep_for(2ms);
        }
        go = true;
        EXPECT_TRUE(soon([&] { return sum == 3; }));
        std::atomic_ref(*word).store(4);
        EXPECT_TRUE(a.engine->stop(true).ok());
        EXPECT_EQ(sum, 4U);
    }
}

TEST_F(Engine, ChangeBeforeStopIsToldWhenTheCallbackThreadHasRoom)
{
    Side a(&wire, 1, options_with([](Options &options) { options.most_callbacks = 1; }));
    std::atomic<bool> inside{false};
    std::atomic<uint64_t> sum{0};
    const auto slow = [&](const Status &) {
        inside = true;
        std::this_thread::sleep_for(300ms);
    };
    ASSERT_TRUE(a.engine->submit_barrier({}, 1, {}, Callback(slow)).ok());
    uint64_t *const word = a.engine->alloc_uvm_watcher([&](uint64_t before, uint64_t now) { sum += now - before; });
    EXPECT_TRUE(soon([&] { return inside.load(); }));
    std::atomic_ref(*word).store(7);
    EXPECT_TRUE(a.engine->stop(true).ok());
    EXPECT_EQ(sum, 7U);
}

} // namespace
