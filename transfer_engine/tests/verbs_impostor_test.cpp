// VerbsDomain against a peer that sends what it likes, over real devices.
#include "verbs_fixture.hpp"

#include "verbs_peer.hpp"

#include <cstring>

namespace transfer_engine
{

// It has an adapter and its datagrams.
class Impostor
{
public:
    Impostor()
    {
        Status status = adapter.open(devices()[0], -1);
        if (status.ok()) status = datagrams.open(adapter);
        EXPECT_TRUE(status.ok()) << status.message;
    }
    NetAddr address() const { return net_addr_of(datagrams.address()); }

    Handshake hello(uint64_t incarnation, uint64_t attempt) const
    {
        Handshake message;
        message.from = address();
        message.incarnation = incarnation;
        message.attempt = attempt;
        message.data.number = message.messages.number = 0xfffffe; // nobody's
        message.mtu = 1;
        message.rd_atomic = 1;
        return message;
    }
    // Lost, at times.
    void send(const Side &to, std::span<const uint8_t> bytes)
    {
        VerbsAddress place;
        ASSERT_TRUE(parse(to.domain->address(), &place).ok());
        datagrams.send(place, bytes);
    }
    void send(const Side &to, const Handshake &message) { send(to, encode(message)); }

    void poll()
    {
        ibv_wc completion{};
        while (ibv_poll_cq(adapter.sends.get(), 1, &completion) == 1)
            datagrams.sent(completion.status == IBV_WC_SUCCESS);
        while (ibv_poll_cq(adapter.receives.get(), 1, &completion) == 1) {
            if (RequestName::of(completion.wr_id).kind == RequestName::immediate) {
                immediates.push_back(completion);
                continue;
            }
            const auto bytes = datagrams.received(completion);
            heard.emplace_back(bytes.begin(), bytes.end());
            datagrams.give_back(completion);
        }
    }
    // The last that it has heard.
    Handshake last() const
    {
        Handshake message;
        const Status status = decode(heard.back(), &message);
        EXPECT_TRUE(status.ok()) << status.message;
        return message;
    }

    std::vector<std::vector<uint8_t>> heard;
    std::vector<ibv_wc> immediates;
    VerbsAdapter adapter;

private:
    Datagrams datagrams;
};

class VerbsImpostorTest : public VerbsDomainTest
{
protected:
    // Sends to `a`, again and again.
    bool send_until(Impostor *peer, const std::vector<uint8_t> &bytes, const std::function<bool()> &is_so,
                    Clock::duration limit = seconds(30))
    {
        const auto poll = [&] {
            peer->poll();
            return is_so();
        };
        for (const auto end = Clock::now() + limit; Clock::now() < end;) {
            peer->send(a, bytes);
            if (poll_until(poll, milliseconds(50))) return true;
        }
        return false;
    }
};

TEST_F(VerbsImpostorTest, APeerWithANewIncarnationUnderItsAddressReplacesTheOld)
{
    Impostor peer;
    ASSERT_TRUE(send_until(&peer, encode(peer.hello(1, 1)), [&] { return !peer.heard.empty(); }));
    const Handshake answer = peer.last();
    EXPECT_EQ(answer.kind, Handshake::hello);
    EXPECT_EQ(answer.peer_incarnation, 1u);
    EXPECT_EQ(answer.peer_attempt, 1u);
    Handshake confirmation = peer.hello(1, 1);
    confirmation.peer_incarnation = answer.incarnation;
    confirmation.peer_attempt = answer.attempt;
    peer.send(a, confirmation);

    uint32_t number = 0;
    ASSERT_TRUE(a.domain->find_peer(peer.address(), &number).ok());
    post(a, number, std::array{write(a, 0, b, 0, 10, 3)}); // taken: it is ready

    peer.send(a, peer.hello(2, 1));
    ASSERT_TRUE(poll_until([&] { return a.count(Event::peer_down) == 1; }));
    ASSERT_EQ(a.events.size(), 2u);
    EXPECT_EQ(a.events[0].kind, Event::retired);
    EXPECT_EQ(a.events[0].code, Code::peer_down);
    EXPECT_EQ(a.events[0].context, 3u);
    EXPECT_EQ(a.events[1].peer, number);

    peer.poll();
    peer.heard.clear();
    ASSERT_TRUE(send_until(&peer, encode(peer.hello(2, 1)), [&] { return !peer.heard.empty(); }));
    EXPECT_EQ(peer.last().peer_incarnation, 2u);
    EXPECT_GT(peer.last().attempt, answer.attempt);
    uint32_t again = 0;
    ASSERT_TRUE(a.domain->find_peer(peer.address(), &again).ok());
    EXPECT_NE(again, number);
}

TEST_F(VerbsImpostorTest, TheImmediateIsInNetworkOrderOnTheWire)
{
    Impostor peer;
    VerbsAddress place;
    ASSERT_TRUE(parse(a.domain->address(), &place).ok());
    VerbsPeer to_a(a.domain->address(), place, 1, Dialogue(1, 1, Clock::now()));
    ASSERT_TRUE(to_a.open(peer.adapter).ok());
    ibv_recv_wr receive{}, *refused = nullptr;
    receive.wr_id = RequestName{.kind = RequestName::immediate}.id();
    ASSERT_EQ(ibv_post_srq_recv(peer.adapter.immediates.get(), &receive, &refused), 0);

    const auto say = [&] {
        Handshake message = peer.hello(1, 1);
        const Handshake next = to_a.dialogue.next(Clock::now());
        message.peer_incarnation = next.peer_incarnation;
        message.peer_attempt = next.peer_attempt;
        message.data = to_a.data.number();
        message.messages = to_a.messages.number();
        return encode(message);
    };
    ASSERT_TRUE(send_until(&peer, say(), [&] { return !peer.heard.empty(); }));
    ASSERT_EQ(to_a.dialogue.hear(peer.last()), Dialogue::Step::connect);
    ASSERT_TRUE(to_a.connect(peer.adapter, peer.last()).ok());
    peer.send(a, say());

    uint32_t number = 0;
    ASSERT_TRUE(a.domain->find_peer(peer.address(), &number).ok());
    post_and_wait(a, number, write(a, 0, b, 0, 0, 1, 0x01020304));
    ASSERT_TRUE(poll_until([&] {
        peer.poll();
        return peer.immediates.size() == 1;
    }));
    EXPECT_EQ(memcmp(&peer.immediates[0].imm_data, "\x01\x02\x03\x04", 4), 0);
}

TEST_F(VerbsImpostorTest, APeerOfAnotherVersionIsRefusedAndToldSo)
{
    Impostor peer;
    std::vector<uint8_t> bytes = encode(peer.hello(1, 1));
    bytes[4] = 99;
    ASSERT_TRUE(send_until(&peer, bytes, [&] { return !peer.heard.empty(); }));
    EXPECT_EQ(peer.heard[0][4], 1) << "this version";
    EXPECT_EQ(peer.heard[0][6], Handshake::reply);

    uint32_t number = 0;
    ASSERT_TRUE(a.domain->find_peer(peer.address(), &number).ok());
    bytes[6] = Handshake::reply;
    ASSERT_TRUE(send_until(
        &peer, bytes, [&] { return a.count(Event::peer_down) == 1; }, seconds(4)));
    EXPECT_EQ(a.events.back().code, Code::unsupported);
    const std::string why = a.events.back().why;
    EXPECT_NE(why.find("99"), std::string::npos) << why;
    EXPECT_NE(why.find("1 here"), std::string::npos) << why;
}

TEST_F(VerbsImpostorTest, WhatIsNoHandshakeOrSpeaksForAnotherIsIgnored)
{
    check_connection(a, b);
    Impostor peer;
    std::mt19937 random(3);
    const std::vector<uint8_t> hello = encode(peer.hello(1, 1));
    for (size_t i = 0; i < 300; ++i) {
        std::vector<uint8_t> bytes = hello;
        bytes.resize(random() % Datagrams::longest, static_cast<uint8_t>(random()));
        if (bytes.size() == hello.size()) continue;
        const size_t at = random() % (bytes.size() + 1);
        if (at < bytes.size() && at != 4 && at != 5) bytes[at] ^= 0x55; // not the version: that is answered
        peer.send(a, bytes);
        poll_for(milliseconds(1));
        peer.poll();
    }
    Handshake message = peer.hello(5, 5);
    message.from = b.domain->address();
    peer.send(a, message);
    poll_for(milliseconds(200));
    peer.poll();
    EXPECT_TRUE(peer.heard.empty());
    EXPECT_EQ(a.count(Event::peer_down), 0u);
    check_connection(a, b);
}

} // namespace transfer_engine
