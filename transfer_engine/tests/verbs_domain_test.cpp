// VerbsDomain over real devices: operations, connecting and failures.
#include "verbs_fixture.hpp"

#include "verbs_adapter.hpp"

#include <cstring>
#include <map>
#include <set>

namespace transfer_engine
{

// ------------------------------------------------------------------------------------------- opening

TEST(VerbsNic, ThatIsNotThereIsToldWithThoseThatAre)
{
    Status status;
    EXPECT_EQ(verbs_nic("no_such_device")(&status), nullptr);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message.find("no_such_device"), std::string::npos) << status.message;
    for (const std::string &name : devices())
        EXPECT_NE(status.message.find(name), std::string::npos) << status.message;
}

TEST_F(VerbsDomainTest, OpensWithTheGidThatIsAskedForOrSaysThatThereIsNone)
{
    Status status;
    EXPECT_EQ(verbs_nic(devices()[0], 255)(&status), nullptr);
    EXPECT_NE(status.message.find("255"), std::string::npos) << status.message;
    VerbsAddress found;
    ASSERT_TRUE(parse(a.domain->address(), &found).ok());
    EXPECT_EQ(found.gid.raw[10], 0xff) << "not an IPv4 address as IPv6";
}

TEST_F(VerbsDomainTest, RefusesMemoryOfAGpuAndAddressesOfOthers)
{
    MemoryKeys keys;
    EXPECT_FALSE(a.domain->register_memory(a.memory.data(), 1, 0, &keys).ok()); // no GPU, or not its memory
    NetAddr address = b.domain->address();
    uint32_t peer = 0;
    address.bytes[0] = 'X';
    EXPECT_EQ(a.domain->find_peer(address, &peer).code, Code::invalid);
    address = b.domain->address();
    --address.length;
    EXPECT_EQ(a.domain->find_peer(address, &peer).code, Code::invalid);
    EXPECT_EQ(a.domain->find_peer({}, &peer).code, Code::invalid);
}

// ---------------------------------------------------------------------------------------- operations

TEST_F(VerbsDomainTest, TakesNothingUntilItIsConnected)
{
    const WorkRequest one = write(a, 0, b, 0, 1);
    const uint32_t peer = find(a, b);
    EXPECT_EQ(find(a, b), peer);
    EXPECT_EQ(a.domain->post(peer, {&one, 1}), 0u);
    EXPECT_EQ(a.domain->post(peer + 77, {&one, 1}), 0u) << "an unknown peer";
    a.domain->abort(peer + 77);
    post_and_wait(a, peer, one);
}

TEST_F(VerbsDomainTest, WritesManyPacketsAndTheImmediateComesAfterThem)
{
    constexpr uint32_t length = 300001;
    const uint32_t peer = find(a, b);
    post(a, peer, std::array{write(a, 11, b, 77, length, 42, 0x01020304)});
    ASSERT_TRUE(poll_until([&] { return b.count(Event::immediate) == 1; }));
    EXPECT_EQ(b.first(Event::immediate)->imm, 0x01020304u);
    EXPECT_EQ(memcmp(b.memory.data() + 77, a.memory.data() + 11, length), 0);
    ASSERT_TRUE(poll_until([&] { return a.count(Event::retired) == 1; }));
    EXPECT_EQ(a.first(Event::retired)->code, Code::ok);
    EXPECT_EQ(a.first(Event::retired)->context, 42u);
}

TEST_F(VerbsDomainTest, WritesNoBytesWithAnImmediate)
{
    const std::vector<uint8_t> before = b.memory;
    post_and_wait(a, find(a, b), write(a, 0, b, 0, 0, 1, UINT32_MAX));
    ASSERT_TRUE(poll_until([&] { return b.count(Event::immediate) == 1; }));
    EXPECT_EQ(b.first(Event::immediate)->imm, UINT32_MAX);
    EXPECT_EQ(b.memory, before);
}

TEST_F(VerbsDomainTest, Reads)
{
    constexpr uint32_t length = 200003;
    post_and_wait(a, find(a, b), request(Operation::read, a, 5, b, 600, length, 9));
    EXPECT_EQ(a.first(Event::retired)->code, Code::ok) << a.first(Event::retired)->why;
    EXPECT_EQ(memcmp(a.memory.data() + 5, b.memory.data() + 600, length), 0);
    EXPECT_TRUE(b.events.empty()) << "the peer is not told";
}

TEST_F(VerbsDomainTest, SendsToTheReceivesOfThePeerInTheirOrder)
{
    constexpr size_t length = 9000, count = 5;
    for (size_t i = 0; i < count; ++i)
        ASSERT_TRUE(b.domain->post_receive(b.memory.data() + i * 10000, 10000, b.keys.local, 100 + i));
    std::vector<WorkRequest> sends;
    for (size_t i = 0; i < count; ++i)
        sends.push_back(
            request(Operation::send, a, i * 20000, b, 0, static_cast<uint32_t>(i == 3 ? 0 : length - i), i));
    post_and_wait(a, find(a, b), sends);
    ASSERT_TRUE(poll_until([&] { return b.count(Event::received) == count; }));
    for (size_t i = 0; i < count; ++i) {
        const Event &event = b.events[i];
        EXPECT_EQ(event.code, Code::ok);
        EXPECT_EQ(event.context, 100 + i);
        ASSERT_EQ(event.length, i == 3 ? 0 : length - i);
        EXPECT_EQ(memcmp(b.memory.data() + i * 10000, a.memory.data() + i * 20000, event.length), 0);
    }
}

TEST_F(VerbsDomainTest, KeepsAMessageWaitingUntilThereIsAReceive)
{
    const uint32_t peer = find(a, b);
    post(a, peer, std::array{request(Operation::send, a, 0, b, 0, 100, 1)});
    poll_for(milliseconds(300));
    EXPECT_EQ(a.count(Event::retired), 0u);
    ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 100, b.keys.local, 7));
    ASSERT_TRUE(poll_until([&] { return a.count(Event::retired) == 1 && b.count(Event::received) == 1; }));
    EXPECT_EQ(a.first(Event::retired)->code, Code::ok);
}

TEST_F(VerbsDomainTest, TakesOnlySoManyReceives)
{
    size_t taken = 0;
    while (taken < 100000 && b.domain->post_receive(b.memory.data(), 1, b.keys.local, taken))
        ++taken;
    EXPECT_GT(taken, 10u);
    EXPECT_LT(taken, 100000u);
}

TEST_F(VerbsDomainTest, RetiresEachOfMoreThanItsQueueHolds)
{
    constexpr size_t count = 3000;
    ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 100, b.keys.local, 0));
    std::vector<WorkRequest> requests;
    for (size_t i = 0; i < count; ++i) // of all kinds, in no order
        requests.push_back(i % 5 == 3 ? request(Operation::read, a, i * 100, b, i * 100, 100, i)
                                      : write(a, i * 100, b, i * 100, 100, i,
                                              i % 3 == 0 ? std::optional(static_cast<uint32_t>(i)) : std::nullopt));
    requests[1000].operation = Operation::send;
    requests[1000].has_imm = false;
    const auto immediates = static_cast<size_t>(std::ranges::count(requests, true, &WorkRequest::has_imm));

    const uint32_t peer = find(a, b);
    ASSERT_TRUE(poll_until([&] { return a.domain->post(peer, {&requests.front(), 1}) == 1; }));
    const size_t taken = a.domain->post(peer, std::span(requests).subspan(1));
    EXPECT_LT(taken, count - 1) << "there is no end to the queue";
    post(a, peer, std::span(requests).subspan(1 + taken));
    ASSERT_TRUE(
        poll_until([&] { return a.count(Event::retired) == count && b.count(Event::immediate) == immediates; }));

    std::vector<unsigned> retired(count);
    for (const Event &event : a.events) {
        ASSERT_EQ(event.kind, Event::retired);
        ASSERT_EQ(event.code, Code::ok) << event.why;
        ++retired[event.context];
    }
    EXPECT_EQ(std::ranges::count(retired, 1u), static_cast<std::ptrdiff_t>(count)) << "each once";
    uint64_t sum = 0, expected = 0;
    for (const Event &event : b.events)
        sum += event.kind == Event::immediate ? event.imm : 0;
    for (const WorkRequest &each : requests)
        expected += each.has_imm ? each.imm : 0;
    EXPECT_EQ(sum, expected);
}

// ---------------------------------------------------------------------------------------- connecting

TEST_F(VerbsDomainTest, ConnectsWhenBothBeginAtATime)
{
    const uint32_t to_b = find(a, b), to_a = find(b, a);
    post_and_wait(a, to_b, write(a, 0, b, 0, 1000, 1));
    post_and_wait(b, to_a, write(b, 2000, a, 2000, 1000, 2));
    EXPECT_EQ(a.first(Event::retired)->code, Code::ok);
    EXPECT_EQ(b.first(Event::retired)->code, Code::ok);
    EXPECT_EQ(a.count(Event::peer_down) + b.count(Event::peer_down), 0u);
}

TEST_F(VerbsDomainTest, ConnectsAllToAllAndEachToItself)
{
    for (Side &from : sides)
        for (Side &to : sides)
            find(from, to);
    for (Side &from : sides)
        for (Side &to : sides)
            post_and_wait(from, find(from, to), write(from, 100, to, 100, 1000, 1));
    for (const Side &side : sides) {
        EXPECT_EQ(side.count(Event::retired), sides.size());
        EXPECT_TRUE(std::ranges::all_of(side.events, [](const Event &event) { return event.code == Code::ok; }));
    }
}

static size_t handshakes = 0, lost_handshake = 0; // the number of the message that is lost

TEST_F(VerbsDomainTest, ConnectsWhicheverDatagramIsLost)
{
    for (lost_handshake = 0; lost_handshake < 4; ++lost_handshake) {
        handshakes = 0;
        loses_handshake = [](const Handshake &) { return handshakes++ == lost_handshake; };
        const auto begin = Clock::now();
        check_connection(a, b);
        check_connection(b, a);
        EXPECT_LT(Clock::now() - begin, seconds(5)) << "datagram " << lost_handshake;
        for (const size_t side : {size_t{0}, size_t{1}})
            close(side);
        for (const size_t side : {size_t{0}, size_t{1}})
            open(side);
    }
}

TEST_F(VerbsDomainTest, GivesUpWithoutAnAnswer)
{
    loses_handshake = [](const Handshake &) { return true; };
    const auto begin = Clock::now();
    const uint32_t peer = find(a, b);
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    EXPECT_GE(Clock::now() - begin, seconds(5));
    EXPECT_LT(Clock::now() - begin, seconds(10));
    EXPECT_EQ(a.events.back().code, Code::peer_down);
    EXPECT_EQ(a.events.back().peer, peer);
    EXPECT_STREQ(a.events.back().why, "no answer to the handshake");

    loses_handshake = nullptr;
    EXPECT_NE(find(a, b), peer);
    check_connection(a, b);
}

// ------------------------------------------------------------------------------------------- failures

TEST_F(VerbsDomainTest, AWrongKeyBreaksThatConnectionAndNoOther)
{
    check_connection(a, b);
    check_connection(a, c);
    const uint32_t peer = find(a, b);
    a.events.clear();
    std::vector<WorkRequest> requests;
    for (uint64_t i = 0; i < 40; ++i)
        requests.push_back(write(a, 0, b, 1000 + i, 1, i));
    requests[2].remote_key ^= 0xffff00;
    post(a, peer, std::span(requests).first(4)); // one chain: the third fails
    for (std::span<const WorkRequest> rest = std::span(requests).subspan(4); !rest.empty();) {
        const size_t taken = a.domain->post(peer, rest);
        if (taken == 0) break; // broken already
        rest = rest.subspan(taken);
    }
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    EXPECT_EQ(a.events.back().kind, Event::peer_down) << "before the last has retired";
    EXPECT_EQ(a.events.back().peer, peer);
    ASSERT_GE(a.count(Event::retired), 4u);
    EXPECT_EQ(a.events[0].code, Code::ok) << a.events[0].why;
    EXPECT_EQ(a.events[1].code, Code::ok) << a.events[1].why;
    EXPECT_EQ(a.events[2].code, Code::failed);
    EXPECT_STREQ(a.events[2].why, ibv_wc_status_str(IBV_WC_REM_ACCESS_ERR));
    for (size_t i = 3; i < a.count(Event::retired); ++i)
        EXPECT_EQ(a.events[i].code, Code::peer_down) << i;

    EXPECT_EQ(a.domain->post(peer, requests), 0u) << "its number is void";
    check_connection(a, c);
    EXPECT_EQ(c.count(Event::peer_down), 0u);
    check_connection(a, b); // anew
    check_connection(b, a);
    EXPECT_EQ(a.count(Event::peer_down), 1u);
    EXPECT_EQ(b.count(Event::peer_down), 1u) << "the peer learns of it when the new connection is made";
}

TEST_F(VerbsDomainTest, AReadOutOfItsRegionFailsAlike)
{
    post_and_wait(a, find(a, b), request(Operation::read, a, 0, b, memory_bytes - 10, 11, 1));
    EXPECT_EQ(a.first(Event::retired)->code, Code::failed);
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    check_connection(a, b);
}

TEST_F(VerbsDomainTest, AMessageLongerThanItsReceiveBreaksTheConnectionAndFreesTheReceive)
{
    ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 10, b.keys.local, 5));
    post_and_wait(a, find(a, b), request(Operation::send, a, 0, b, 0, 11, 1));
    EXPECT_EQ(a.first(Event::retired)->code, Code::failed);
    ASSERT_TRUE(poll_until([&] { return b.count(Event::received) == 1 && b.count(Event::peer_down) == 1; }));
    EXPECT_EQ(b.first(Event::received)->code, Code::failed);
    EXPECT_EQ(b.first(Event::received)->context, 5u);
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    check_connection(b, a);
}

TEST_F(VerbsDomainTest, AbortRetiresWhatWaitsForThePeer)
{
    const uint32_t peer = find(a, b);
    std::vector<WorkRequest> requests(10, request(Operation::send, a, 0, b, 0, 100, 1)); // b has no receive
    post(a, peer, requests);
    requests.assign(10, write(a, 0, b, 0, 100, 2));
    post(a, peer, requests);
    const auto begin = Clock::now();
    a.domain->abort(peer);
    a.domain->abort(peer);
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    EXPECT_LT(Clock::now() - begin, seconds(2));
    EXPECT_EQ(a.count(Event::retired), 20u);
    EXPECT_EQ(a.events.back().kind, Event::peer_down);
    for (const Event &event : a.events)
        EXPECT_TRUE(event.code == Code::peer_down || (event.code == Code::ok && event.context == 2));
    check_connection(a, b);
}

TEST_F(VerbsDomainTest, APeerThatIsGoneIsNoticed)
{
    check_connection(a, b);
    const uint32_t peer = find(a, b);
    const WorkRequest one = write(a, 0, b, 0, 1000, 1);
    const NetAddr address = b.domain->address();
    close(1);
    a.events.clear();
    const auto begin = Clock::now();
    post(a, peer, {&one, 1});
    check_connection(a, c); // is not held up
    EXPECT_LT(Clock::now() - begin, seconds(2));
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    EXPECT_LT(Clock::now() - begin, seconds(20));
    EXPECT_EQ(a.events.back().code, Code::peer_down);
    EXPECT_STREQ(a.events.back().why, ibv_wc_status_str(IBV_WC_RETRY_EXC_ERR));

    uint32_t again = 0; // and nobody answers there
    ASSERT_TRUE(a.domain->find_peer(address, &again).ok());
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 2; }));
    EXPECT_STREQ(a.events.back().why, "no answer to the handshake");

    open(1); // under another address
    check_connection(a, b);
}

TEST_F(VerbsDomainTest, ClosesWithWorkUnderWay)
{
    std::vector<WorkRequest> requests(64, request(Operation::send, a, 0, b, 0, 100, 1));
    post(a, find(a, b), requests);
    post(b, find(b, a), std::array{write(b, 0, a, 0, memory_bytes, 1)});
}

// What a side has posted: by peer, the contexts that have not retired.
using Posted = std::map<uint32_t, std::set<uint64_t>>;

static void check_events(Side &side, Posted *posted)
{
    for (const Event &event : side.events) {
        std::set<uint64_t> &left = (*posted)[event.peer];
        const bool known = event.kind != Event::retired || left.erase(event.context) == 1;
        ASSERT_TRUE(known) << "retired twice, or never posted";
        ASSERT_TRUE(event.kind != Event::peer_down || left.empty()) << "peer_down, and not all has retired";
    }
    side.events.clear();
}

TEST_F(VerbsDomainTest, RetiresEachOnceWhateverBreaks)
{
    std::mt19937_64 random(11);
    std::array<Posted, 3> posted;
    uint64_t context = 0;
    std::array<WorkRequest, 7> requests;
    for (const auto end = Clock::now() + seconds(4); Clock::now() < end;) {
        const size_t from = random() % sides.size(), to = random() % sides.size();
        const uint32_t peer = find(sides[from], sides[to]);
        for (WorkRequest &each : requests) {
            each = write(sides[from], random() % 1000, sides[to], random() % 1000,
                         static_cast<uint32_t>(random() % 20000), context++);
            each.operation = random() % 4 == 0 ? Operation::read : Operation::write;
            each.length += each.operation == Operation::read ? 1 : 0;
            each.has_imm = each.operation == Operation::write && random() % 3 == 0;
            if (random() % 700 == 0) each.remote_key ^= 0xffff00;
        }
        const size_t taken = sides[from].domain->post(peer, requests);
        for (const WorkRequest &each : std::span(requests).first(taken))
            posted[from][peer].insert(each.context);
        if (random() % 2000 == 0) sides[from].domain->abort(peer);
        for (size_t i = 0; i < sides.size(); ++i) {
            sides[i].poll();
            check_events(sides[i], &posted[i]);
        }
    }
    const auto all_retired = [&] {
        bool none = true;
        for (size_t i = 0; i < sides.size(); ++i) {
            check_events(sides[i], &posted[i]);
            none = none && std::ranges::all_of(posted[i], [](const auto &each) { return each.second.empty(); });
        }
        return none;
    };
    EXPECT_TRUE(poll_until(all_retired));

    // And each reaches each, at the latest when what is still broken has been made anew.
    for (Side &from : sides)
        for (const Side &to : sides) {
            bool under_way = false, reached = false;
            EXPECT_TRUE(poll_until([&] {
                for (const Event &event : std::exchange(from.events, {}))
                    if (event.kind == Event::retired) {
                        under_way = false;
                        reached = event.code == Code::ok;
                    }
                const WorkRequest one = write(from, 0, to, 0, 1);
                under_way = under_way || from.domain->post(find(from, to), {&one, 1}) == 1;
                return reached;
            }));
        }
}

} // namespace transfer_engine
