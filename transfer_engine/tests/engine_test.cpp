// The whole engine with its threads, over adapters inside this process (test_domain.hpp): what transfer_engine.hpp
// promises of each operation, one test for each. Also run with ThreadSanitizer.
#include "engine_fixture.hpp"

using namespace transfer_engine;
using namespace transfer_engine::testing;

namespace
{

TEST_F(Engine, SingleWriteArrivesWithOneImmediateForEachAdapter)
{
    Side a(&wire), b(&wire);
    fill(&a);
    Outcome written, arrived;
    ASSERT_TRUE(b.engine->expect_imm_count(7, 2, arrived.callback()).ok());
    ASSERT_TRUE(a.engine->submit_single_write(16385, 7, a.handle, 5, b.region, 100, written.callback()).ok());
    EXPECT_EQ(written.code(), Code::ok);
    EXPECT_EQ(arrived.code(), Code::ok);
    EXPECT_TRUE(std::equal(a.memory.begin() + 5, a.memory.begin() + 5 + 16385, b.memory.begin() + 100)); // trap 2
    EXPECT_EQ(b.memory[99], 0);
    EXPECT_EQ(b.memory[100 + 16385], 0);
    EXPECT_EQ(b.engine->metrics().immediates, 2U);
    EXPECT_EQ(a.engine->metrics().bytes_written, 16385U);
}

TEST_F(Engine, WriteOfNoBytesStillBringsItsImmediates)
{
    Side a(&wire, 3), b(&wire, 3);
    Outcome written, arrived;
    ASSERT_TRUE(a.engine->submit_single_write(0, 9, a.handle, 0, b.region, 0, written.callback()).ok());
    ASSERT_TRUE(b.engine->expect_imm_count(9, 3, arrived.callback()).ok());
    EXPECT_EQ(written.code(), Code::ok);
    EXPECT_EQ(arrived.code(), Code::ok);
}

TEST_F(Engine, FewerSharesThanAdaptersUseTheRightKeys) // trap 1
{
    Side a(&wire, 4), b(&wire, 4);
    fill(&a);
    for (const uint64_t length : {1, 64, 65, 129}) {
        Outcome written;
        ASSERT_TRUE(a.engine->submit_single_write(length, {}, a.handle, 0, b.region, 0, written.callback()).ok());
        EXPECT_EQ(written.code(), Code::ok);
        EXPECT_TRUE(std::equal(a.memory.begin(), a.memory.begin() + static_cast<ptrdiff_t>(length), b.memory.begin()));
    }
}

TEST_F(Engine, PagesGoWhereTheirIndicesSay)
{
    Side a(&wire), b(&wire);
    fill(&a);
    Outcome written, arrived, read;
    ASSERT_TRUE(b.engine->expect_imm_count(1, 3, arrived.callback()).ok());
    ASSERT_TRUE(a.engine
                    ->submit_paged_writes(100, 1, a.handle, pages({4, 0, 2}, 128, 3), b.region, pages({1, 9, 5}, 256),
                                          written.callback())
                    .ok());
    EXPECT_EQ(written.code(), Code::ok);
    EXPECT_EQ(arrived.code(), Code::ok);
    const auto same = [&](size_t there, size_t here) {
        return std::equal(&b.memory[there], &b.memory[there + 100], &a.memory[here]);
    };
    EXPECT_TRUE(same(256, 4 * 128 + 3) && same(9 * 256, 3) && same(5 * 256, 2 * 128 + 3));
    ASSERT_TRUE(a.engine
                    ->submit_paged_reads(100, a.handle, pages({0, 1, 2}, 100, 500000), b.region, pages({1, 9, 5}, 256),
                                         read.callback())
                    .ok());
    EXPECT_EQ(read.code(), Code::ok);
    EXPECT_TRUE(same(256, 500000) && same(9 * 256, 500100) && same(5 * 256, 500200));
    EXPECT_EQ(a.engine->metrics().bytes_read, 300U);
    EXPECT_EQ(a.engine->metrics().bytes_written, 300U);
}

TEST_F(Engine, NothingToDoEndsAtOnce) // semantic 7, trap 10
{
    Side a(&wire), b(&wire);
    Outcome all;
    ASSERT_TRUE(a.engine->submit_single_write(0, {}, a.handle, 0, b.region, 0, all.callback()).ok());
    ASSERT_TRUE(a.engine->submit_single_read(0, a.handle, 0, b.region, 0, all.callback()).ok());
    ASSERT_TRUE(
        a.engine->submit_paged_writes(64, 5, a.handle, pages({}, 64), b.region, pages({}, 64), all.callback()).ok());
    ASSERT_TRUE(a.engine->submit_scatter({}, 5, a.handle, {}, all.callback()).ok());
    ASSERT_TRUE(a.engine->submit_barrier({}, 5, {}, all.callback()).ok());
    for (size_t i = 0; i < 5; ++i)
        EXPECT_EQ(all.code(i), Code::ok);
    EXPECT_EQ(b.engine->metrics().immediates, 0U);
}

TEST_F(Engine, ScatterAndBarrierReachEveryPeerOnce)
{
    Side a(&wire), b(&wire), c(&wire);
    fill(&a);
    const std::vector<NetAddr> peers{b.engine->main_address(), c.engine->main_address()};
    PeerGroupHandle group;
    ASSERT_TRUE(a.engine->add_peer_group(peers, &group).ok());
    Outcome scattered, barrier, at_b, at_c;
    ASSERT_TRUE(b.engine->expect_imm_count(3, 2, at_b.callback()).ok());
    ASSERT_TRUE(c.engine->expect_imm_count(3, 2, at_c.callback()).ok());
    ASSERT_TRUE(a.engine
                    ->submit_scatter(group, 3, a.handle,
                                     {{.length = 1000, .src = 0, .dst = b.region, .dst_offset = 10},
                                      {.length = 2000, .src = 1000, .dst = c.region, .dst_offset = 20}},
                                     scattered.callback())
                    .ok());
    ASSERT_TRUE(a.engine->submit_barrier(group, 3, {b.region, c.region}, barrier.callback()).ok());
    for (Outcome *one : {&scattered, &barrier, &at_b, &at_c})
        EXPECT_EQ(one->code(), Code::ok);
    EXPECT_TRUE(std::equal(&b.memory[10], &b.memory[1010], a.memory.data()));
    EXPECT_TRUE(std::equal(&c.memory[20], &c.memory[2020], &a.memory[1000]));
    EXPECT_EQ(a.engine->submit_barrier(group, 3, {c.region, b.region}).code, Code::invalid); // another order
    EXPECT_EQ(a.engine->submit_barrier(group, 3, {b.region}).code, Code::invalid);
    EXPECT_EQ(a.engine->submit_barrier(PeerGroupHandle{17}, 3, {b.region}).code, Code::invalid);
    EXPECT_EQ(a.engine->submit_barrier(PeerGroupHandle{}, 3, {}).code, Code::invalid);
    std::atomic<int> down{0};
    a.engine->on_peer_down([&](const NetAddr &address, const Status &) { down += address == NetAddr{} ? 1 : 0; });
    ASSERT_TRUE(a.engine->add_peer_group(std::vector<NetAddr>(1), &group).ok()); // one that nobody can have
    EXPECT_TRUE(soon([&] { return down == 1; }));
}

TEST_F(Engine, AdaptersTakeTurns) // T10: seen by a key that is wrong for the second
{
    Side a(&wire), b(&wire);
    MrDesc wrong = b.region;
    wrong.rkeys[1].key = 0;
    Outcome all;
    const ScatterDst first{1, 0, wrong, 0}, other{1, 0, b.region, 0};
    for (size_t i = 0; i < 4; i += 2) { // an odd number of targets: the next begins with the other adapter
        ASSERT_TRUE(a.engine->submit_scatter({}, {}, a.handle, {first, other, other}, all.callback()).ok());
        EXPECT_EQ(all.code(i), Code::ok);
        ASSERT_TRUE(a.engine->submit_barrier({}, 1, {wrong, b.region, b.region}, all.callback()).ok());
        EXPECT_EQ(all.code(i + 1), Code::failed);
    }
    const Pages two = pages({0, 1}, 8);
    ASSERT_TRUE(a.engine->submit_paged_writes(8, {}, a.handle, two, wrong, two, all.callback()).ok());
    EXPECT_EQ(all.code(4), Code::failed);
    EXPECT_EQ(a.engine->metrics().work_requests_failed, 3U);
}

TEST_F(Engine, MessagesAreCopiedAndTheirBuffersUsedAgain) // semantic 6
{
    Side a(&wire), b(&wire);
    std::mutex mutex;
    std::multiset<std::string> got;
    ASSERT_TRUE(b.engine
                    ->submit_recvs(100, 2,
                                   [&](std::span<const uint8_t> bytes) {
                                       const std::lock_guard lock(mutex);
                                       got.emplace(bytes.begin(), bytes.end());
                                   })
                    .ok());
    std::multiset<std::string> sent;
    Outcome ended;
    std::vector<uint8_t> buffer;
    for (int i = 0; i < 50; ++i) {
        const std::string message = "message " + std::to_string(i) + std::string(static_cast<size_t>(i), 'x');
        sent.insert(message);
        buffer.assign(message.begin(), message.end());
        ASSERT_TRUE(
            soon([&] { return a.engine->submit_send(b.engine->main_address(), buffer, ended.callback()).ok(); }));
        buffer.assign(buffer.size(), 0); // at once
    }
    for (size_t i = 0; i < 50; ++i)
        EXPECT_EQ(ended.code(i), Code::ok);
    EXPECT_TRUE(soon([&] {
        const std::lock_guard lock(mutex);
        return got == sent;
    }));
    const uint64_t longest = Options().longest_message;
    EXPECT_EQ(a.engine->submit_send(b.engine->main_address(), std::vector<uint8_t>(longest + 1)).code, Code::invalid);
    ASSERT_TRUE(a.engine->submit_recvs(longest, 1, [](auto) {}).ok());
    ASSERT_TRUE(b.engine->submit_send(a.engine->main_address(), std::vector<uint8_t>(longest), ended.callback()).ok());
    EXPECT_EQ(ended.code(50), Code::ok);
    EXPECT_EQ(b.engine->submit_recvs(100, 2, [](auto) {}).code, Code::invalid);
    EXPECT_EQ(b.engine->metrics().messages, 50U);
}

TEST_F(Engine, ExpectationsOfOneImmediateAreServedInTheirOrder) // semantic 3
{
    Side a(&wire, 1), b(&wire, 1);
    Outcome first, second, written;
    for (int i = 0; i < 5; ++i)
        ASSERT_TRUE(a.engine->submit_single_write(0, 4, a.handle, 0, b.region, 0, written.callback()).ok());
    EXPECT_TRUE(soon([&] { return b.engine->metrics().immediates == 5; })); // before anybody expects them
    ASSERT_TRUE(b.engine->expect_imm_count(4, 3, first.callback()).ok());
    ASSERT_TRUE(b.engine->expect_imm_count(4, 3, second.callback()).ok());
    EXPECT_EQ(first.code(), Code::ok);
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(second.count(), 0U);
    ASSERT_TRUE(a.engine->submit_single_write(0, 4, a.handle, 0, b.region, 0).ok());
    EXPECT_EQ(second.code(), Code::ok);
    Outcome late;
    ASSERT_TRUE(b.engine->expect_imm_count(4, 1, late.callback(), 10ms).ok());
    EXPECT_EQ(late.code(), Code::timed_out);
}

TEST_F(Engine, BadArgumentsAreRefusedAndNothingIsCalled)
{
    Side a(&wire, 2), b(&wire, 2), other(&wire, 3);
    Outcome never;
    const auto size = a.memory.size();
    const auto write = [&](uint64_t length, uint64_t src, const MrDesc &dst, uint64_t dst_offset) {
        return a.engine->submit_single_write(length, {}, a.handle, src, dst, dst_offset, never.callback());
    };
    EXPECT_EQ(write(size + 1, 0, b.region, 0).code, Code::invalid);
    EXPECT_EQ(write(1, size, b.region, 0).code, Code::invalid);
    EXPECT_EQ(write(UINT64_MAX, 1, b.region, 0).code, Code::invalid);
    EXPECT_EQ(write(2, 0, b.region, size - 1).code, Code::invalid);
    for (const ScatterDst &slice : {ScatterDst{2, size - 1, b.region, 0}, ScatterDst{2, 0, b.region, size - 1}})
        EXPECT_EQ(a.engine->submit_scatter({}, {}, a.handle, {slice}, never.callback()).code, Code::invalid);
    EXPECT_EQ(a.engine->expect_imm_count(1, 1, {}).code, Code::invalid);
    const Status nics = write(1, 0, other.region, 0); // semantic 9
    EXPECT_EQ(nics.code, Code::invalid);
    EXPECT_EQ(nics.message, "the peer has 3 adapters for its region, this side 2: they have to be as many");
    EXPECT_EQ(a.engine->submit_paged_writes(8, {}, a.handle, pages({1, 2}, 8), b.region, pages({1}, 8)).code,
              Code::invalid);
    EXPECT_EQ(a.engine->submit_single_write(1, {}, {}, 0, b.region, 0).code, Code::invalid);
    MrHandle handle;
    MrDesc region;
    EXPECT_EQ(a.engine->reg_mr(nullptr, 10, host, &handle, &region).code, Code::invalid);
    EXPECT_EQ(a.engine->reg_mr(a.memory.data(), 0, host, &handle, &region).code, Code::invalid);
    EXPECT_EQ(a.engine->reg_mr(a.memory.data(), UINT64_MAX, host, &handle, &region).code, Code::invalid);
    EXPECT_EQ(a.engine->reg_mr(a.memory.data(), 10, 3, &handle, &region).code, Code::invalid);
    EXPECT_EQ(never.count(), 0U);
    // Pages are looked at by the worker: the operation ends.
    ASSERT_TRUE(a.engine
                    ->submit_paged_writes(8, {}, a.handle, pages({0, 1u << 31}, 8), b.region, pages({0, 1}, 8),
                                          never.callback())
                    .ok());
    EXPECT_EQ(never.code(), Code::invalid);
    ASSERT_TRUE(a.engine
                    ->submit_paged_writes(8, {}, a.handle, pages({0, 1}, UINT64_MAX), b.region, pages({0, 1}, 8),
                                          never.callback())
                    .ok());
    EXPECT_EQ(never.code(1), Code::invalid);
    ASSERT_TRUE(a.engine
                    ->submit_paged_writes(8, {}, a.handle, pages({0, 1}, 8), b.region, pages({0, 1u << 31}, 8),
                                          never.callback())
                    .ok());
    EXPECT_EQ(never.code(2), Code::invalid);
    EXPECT_FALSE(never.status().remote_may_have_changed);
    // The last byte of a region is within it.
    Outcome last;
    ASSERT_TRUE(a.engine->submit_single_write(1, {}, a.handle, size - 1, b.region, size - 1, last.callback()).ok());
    ASSERT_TRUE(a.engine
                    ->submit_paged_writes(8, {}, a.handle, pages({0}, 8, size - 8), b.region, pages({0}, 8, size - 8),
                                          last.callback())
                    .ok());
    EXPECT_TRUE(last.code(0) == Code::ok && last.code(1) == Code::ok);
}

TEST_F(Engine, PageLongerThanAWorkRequestIsRefused)
{
    Side a(&wire, 2, {}, 1 << 20, {.longest = 64}), b(&wire);
    for (const uint64_t length : {64, 65}) {
        Outcome written;
        ASSERT_TRUE(a.engine
                        ->submit_paged_writes(length, {}, a.handle, pages({0}, 65), b.region, pages({0}, 65),
                                              written.callback())
                        .ok());
        EXPECT_EQ(written.code(), length == 64 ? Code::ok : Code::invalid);
    }
}

TEST_F(Engine, RegistrationsAreEachTheirOwn) // trap 13
{
    Side a(&wire), b(&wire);
    MrHandle shorter;
    MrDesc shorter_region;
    ASSERT_TRUE(a.engine->reg_mr(a.memory.data(), 100, host, &shorter, &shorter_region).ok());
    EXPECT_EQ(shorter_region.length, 100U);
    EXPECT_NE(shorter_region.rkeys[0].key, a.region.rkeys[0].key);
    EXPECT_EQ(a.engine->submit_single_write(101, {}, shorter, 0, b.region, 0).code, Code::invalid);
    ASSERT_TRUE(a.engine->dereg_mr(shorter).ok());
    EXPECT_EQ(a.engine->dereg_mr(shorter).code, Code::invalid); // void
    MrHandle next;
    ASSERT_TRUE(a.engine->reg_mr(a.memory.data(), 100, host, &next, &shorter_region).ok());
    EXPECT_EQ(next.region, shorter.region);
    EXPECT_EQ(a.engine->submit_single_write(1, {}, shorter, 0, b.region, 0).code, Code::invalid); // still void
    a.domains[1]->refuse_next_registration = true; // after the first adapter has taken it
    EXPECT_EQ(a.engine->reg_mr(a.memory.data(), 100, host, &shorter, &shorter_region).code, Code::failed);
}

TEST_F(Engine, MemoryInUseIsNotDeregistered)
{
    wire.faults.keeps = 1;
    Side a(&wire), b(&wire);
    Outcome written, read;
    const auto start = std::chrono::steady_clock::now();
    ASSERT_TRUE(a.engine->submit_single_write(1000, {}, a.handle, 0, b.region, 0, written.callback(), 300ms).ok());
    ASSERT_TRUE(a.engine->submit_single_read(10, a.handle, 0, b.region, 0, read.callback(), 300ms).ok());
    EXPECT_EQ(a.engine->dereg_mr(a.handle).code, Code::invalid);
    EXPECT_EQ(written.code(), Code::timed_out); // 2 s after its deadline the connection is given up
    EXPECT_EQ(read.code(), Code::timed_out);
    EXPECT_GE(std::chrono::steady_clock::now() - start, 2300ms);
    EXPECT_TRUE(a.engine->dereg_mr(a.handle).ok());
    EXPECT_TRUE(written.status().remote_may_have_changed);
    EXPECT_FALSE(read.status().remote_may_have_changed);
}

TEST_F(Engine, LostPeerEndsItsOperationsAndNoOthers)
{
    wire.faults.keeps = 1;
    Side a(&wire, 1), b(&wire, 1), c(&wire, 1);
    Outcome to_b, to_c, again;
    std::atomic<int> down{0};
    a.engine->on_peer_down([&](const NetAddr &address, const Status &status) {
        EXPECT_EQ(address, b.engine->main_address());
        EXPECT_EQ(status.code, Code::peer_down);
        ++down;
    });
    for (int i = 0; i < 100; ++i) // more than its queue takes
        ASSERT_TRUE(a.engine->submit_single_write(1000, {}, a.handle, 0, b.region, 0, to_b.callback()).ok());
    EXPECT_TRUE(soon([&] { return a.engine->metrics().work_requests == 64; }));
    {
        const std::lock_guard lock(wire.mutex);
        wire.faults.keeps = 0;
    }
    ASSERT_TRUE(a.engine->submit_single_write(1000, {}, a.handle, 0, c.region, 0, to_c.callback()).ok());
    EXPECT_EQ(to_c.code(), Code::ok); // the full queue of another does not hold it up
    a.domains[0]->lose(b.engine->main_address());
    for (size_t i = 0; i < 100; ++i)
        EXPECT_EQ(to_b.code(i), Code::peer_down);
    EXPECT_TRUE(soon([&] { return down == 1; }));
    EXPECT_EQ(a.engine->metrics().peers_down, 1U);
    ASSERT_TRUE(a.engine->submit_single_write(1000, {}, a.handle, 0, b.region, 0, again.callback()).ok());
    EXPECT_EQ(again.code(), Code::ok); // connects anew
}

TEST_F(Engine, WrongOptionsAreRefused)
{
    Status status;
    EXPECT_EQ(TransferEngine::open({}, &status), nullptr);
    EXPECT_EQ(status.code, Code::invalid);
    Options five;
    five.groups.resize(1);
    five.groups[0].nics.assign(5, test_nic(&wire));
    EXPECT_EQ(TransferEngine::open(five, &status), nullptr);
    EXPECT_EQ(status.message, "group 0 has 5 adapters, not 1 to 4");
    Options absent;
    absent.groups.resize(2);
    absent.groups[0].nics = {test_nic(&wire)};
    absent.groups[1].nics = {[](Status *why) {
        *why = {.code = Code::failed, .message = "no such device"};
        return nullptr;
    }};
    EXPECT_EQ(TransferEngine::open(absent, &status), nullptr);
    EXPECT_EQ(status.message, "no such device");
    Options no_memory; // of the second adapter; the first one's is given back
    no_memory.groups.resize(1);
    no_memory.groups[0].nics = {test_nic(&wire), [this](Status *) {
                                    auto domain = std::make_unique<TestDomain>(&wire, TestDomainOptions());
                                    domain->refuse_next_registration = true;
                                    return domain;
                                }};
    EXPECT_EQ(TransferEngine::open(no_memory, &status), nullptr);
    EXPECT_EQ(status.message, "register_memory: refused for the test");
    Options core;
    core.groups.resize(1);
    core.groups[0].nics = {test_nic(&wire)};
    core.groups[0].core = 1000;
    EXPECT_EQ(TransferEngine::open(core, &status), nullptr);
    EXPECT_EQ(status.code, Code::invalid);
}

} // namespace
