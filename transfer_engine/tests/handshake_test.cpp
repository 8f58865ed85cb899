// The handshake of two adapters: its bytes, and its course when datagrams are lost, doubled, late or out of order.
#include "handshake.hpp"
#include "wire.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>

namespace transfer_engine
{

using std::chrono::milliseconds;
using Clock = Dialogue::Clock;
using Step = Dialogue::Step;
using Bytes = std::vector<uint8_t>;

static NetAddr address_of(uint8_t number, size_t length = 28)
{
    NetAddr address;
    address.length = static_cast<uint8_t>(length);
    for (uint8_t &byte : std::span(address.bytes).first(length))
        byte = number++;
    return address;
}

static Handshake some_message()
{
    Handshake message;
    message.kind = Handshake::reply;
    message.from = address_of(7);
    message.incarnation = 0x0123456789abcdef;
    message.attempt = 3;
    message.peer_incarnation = UINT64_MAX;
    message.peer_attempt = 1;
    message.data = {.number = 0xffffff, .psn = 0};
    message.messages = {.number = 17, .psn = 0xabcdef};
    message.mtu = 5;
    message.rd_atomic = 16;
    return message;
}

// ------------------------------------------------------------------------------------------- bytes

TEST(HandshakeBytes, AreAsTheHeaderSays)
{
    const Bytes bytes = encode(some_message());
    Bytes expected = {'T', 'E', 'H', 'S', 1, 0, 2, 28};
    const auto add = [&](const Bytes &more) { expected.insert(expected.end(), more.begin(), more.end()); };
    for (uint8_t byte = 7; byte < 7 + 28; ++byte)
        expected.push_back(byte);
    add({0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01, 3, 0, 0, 0, 0, 0, 0, 0});
    add(Bytes(8, 0xff));
    add({1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0xef, 0xcd, 0xab, 0, 5, 16});
    EXPECT_EQ(bytes, expected);
}

TEST(HandshakeBytes, ComeBackAsTheyWere)
{
    std::mt19937_64 random(1);
    const auto number = [&] { return static_cast<uint32_t>(random() & 0xffffff); };
    for (int round = 0; round < 1000; ++round) {
        Handshake message;
        message.kind = random() % 2 == 0 ? Handshake::hello : Handshake::reply;
        message.from = address_of(static_cast<uint8_t>(random()), random() % (most_address_bytes + 1));
        message.incarnation = random() | 1;
        message.attempt = random() | 1;
        message.peer_incarnation = random();
        message.peer_attempt = random();
        message.data = {.number = number(), .psn = number()};
        message.messages = {.number = number(), .psn = number()};
        message.mtu = static_cast<uint8_t>(1 + random() % 5);
        message.rd_atomic = static_cast<uint8_t>(random());
        Handshake read;
        const Status status = decode(encode(message), &read);
        ASSERT_TRUE(status.ok()) << status.message;
        ASSERT_EQ(read, message);
    }
}

// `bytes` end where their memory does, for the address sanitizer.
static void expect_invalid(const Bytes &bytes)
{
    Handshake read = some_message();
    const Status status = decode(bytes, &read);
    EXPECT_EQ(status.code, Code::invalid) << bytes.size() << " bytes: " << status.message;
    EXPECT_NE(status.message, "");
    EXPECT_EQ(read, some_message()) << "changed, though refused: " << status.message;
}

TEST(HandshakeBytes, AreRefusedWhenTruncatedAnywhereOrTooLong)
{
    Bytes bytes = encode(some_message());
    for (size_t length = 0; length < bytes.size(); ++length)
        expect_invalid({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length)});
    bytes.push_back(0);
    expect_invalid(bytes);
}

TEST(HandshakeBytes, AreRefusedWithAnyFieldOutOfItsRange)
{
    const Bytes good = encode(some_message());
    constexpr size_t kind = 6, length = 7, incarnation = 36, attempt = 44, data = 68, mtu = 84;
    const std::multimap<size_t, uint8_t> wrong = {{0, 'X'},     {kind, 0},     {kind, 3},     {length, 96},
                                                  {length, 27}, {data + 3, 1}, {data + 7, 1}, {data + 11, 1},
                                                  {mtu, 0},     {mtu, 6}};
    for (const auto &[at, value] : wrong) {
        Bytes bytes = good;
        bytes[at] = value;
        expect_invalid(bytes);
    }
    for (const size_t at : {incarnation, attempt}) {
        Bytes bytes = good;
        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), 8, uint8_t{0});
        expect_invalid(bytes);
    }
}

TEST(HandshakeBytes, OfAnotherVersionAreRefusedWithBothVersionsAndTellWhoSentThem)
{
    Bytes bytes = encode(some_message());
    bytes[4] = 0x34;
    bytes[5] = 0x12;
    bytes.resize(bytes.size() + 9); // what else such a version may have
    Handshake read;
    const Status status = decode(bytes, &read);
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_NE(status.message.find(std::to_string(0x1234)), std::string::npos) << status.message;
    EXPECT_NE(status.message.find(std::to_string(wire_version)), std::string::npos) << status.message;
    EXPECT_EQ(read.kind, Handshake::reply);
    EXPECT_EQ(read.from, some_message().from);

    for (size_t length = 0; length < 8 + 28; ++length)
        expect_invalid({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length)});
}

TEST(HandshakeBytes, OfChanceAreRefusedOrRightButDoNoHarm)
{
    std::mt19937_64 random(2);
    const Bytes good = encode(some_message());
    for (int round = 0; round < 20000; ++round) {
        Bytes bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(random() % (good.size() + 1)));
        for (uint64_t changes = random() % 4; changes > 0 && !bytes.empty(); --changes)
            bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
        Handshake read;
        const bool read_well = decode(bytes, &read).ok();
        ASSERT_TRUE(!read_well || encode(read) == bytes);
    }
}

// ------------------------------------------------------------------------------------------ dialogue

static const Clock::time_point start{std::chrono::hours(1)};

TEST(Dialogue, EndsWithBothReadyWhenOneSideBegins)
{
    Dialogue a(100, 1, start), b(200, 1, start);
    const Handshake hello = a.next(start);
    EXPECT_EQ(hello.kind, Handshake::hello);
    EXPECT_EQ(hello.peer_attempt, 0u);

    EXPECT_EQ(b.hear(hello), Step::connect);
    EXPECT_FALSE(b.ready()) << "a does not listen to b yet";
    const Handshake answer = b.next(start);
    EXPECT_EQ(answer.kind, Handshake::hello);
    EXPECT_EQ(answer.peer_incarnation, 100u);
    EXPECT_EQ(answer.peer_attempt, 1u);

    EXPECT_EQ(a.hear(answer), Step::connect);
    EXPECT_TRUE(a.ready());
    const Handshake confirmation = a.next(start);
    EXPECT_EQ(confirmation.kind, Handshake::reply);
    EXPECT_EQ(b.hear(confirmation), Step::ignore) << "nobody answers a reply";
    EXPECT_TRUE(b.ready());
}

TEST(Dialogue, EndsWithBothReadyWhenBothBegin)
{
    Dialogue a(100, 4, start), b(200, 9, start);
    const Handshake from_a = a.next(start), from_b = b.next(start);
    EXPECT_EQ(a.hear(from_b), Step::connect);
    EXPECT_EQ(b.hear(from_a), Step::connect);
    EXPECT_FALSE(a.ready());
    EXPECT_FALSE(b.ready());
    const Handshake again_a = a.next(start), again_b = b.next(start);
    EXPECT_EQ(a.hear(again_b), Step::answer);
    EXPECT_EQ(b.hear(again_a), Step::answer);
    EXPECT_TRUE(a.ready());
    EXPECT_TRUE(b.ready());
}

TEST(Dialogue, ConnectsAnAdapterToItself)
{
    Dialogue a(100, 1, start);
    EXPECT_EQ(a.hear(a.next(start)), Step::connect);
    EXPECT_EQ(a.hear(a.next(start)), Step::answer);
    EXPECT_TRUE(a.ready());
    EXPECT_EQ(a.hear(a.next(start)), Step::ignore);
}

TEST(Dialogue, SaysItsHelloAgainAtGrowingIntervalsAndGivesUp)
{
    Dialogue a(100, 1, start);
    std::vector<int64_t> times;
    for (auto now = start; !a.late(now); now += milliseconds(1))
        if (a.due(now)) {
            a.next(now);
            times.push_back(std::chrono::duration_cast<milliseconds>(now - start).count());
        }
    const std::vector<int64_t> first = {0, 20, 60, 140, 300, 620, 1120, 1620};
    ASSERT_GE(times.size(), first.size());
    EXPECT_TRUE(std::equal(first.begin(), first.end(), times.begin()));
    EXPECT_EQ(times.back(), 4620);
    EXPECT_TRUE(a.late(start + std::chrono::seconds(5)));
}

TEST(Dialogue, IsSilentAndNeverLateOnceReady)
{
    Dialogue a(100, 1, start), b(200, 1, start);
    b.hear(a.next(start));
    a.hear(b.next(start));
    EXPECT_TRUE(a.ready());
    EXPECT_FALSE(a.due(start + std::chrono::hours(1)));
    EXPECT_FALSE(a.late(start + std::chrono::hours(1)));
}

TEST(Dialogue, AnswersADoubledHelloAgain)
{
    Dialogue a(100, 1, start), b(200, 1, start);
    const Handshake hello = a.next(start);
    EXPECT_EQ(b.hear(hello), Step::connect);
    EXPECT_EQ(b.hear(hello), Step::answer) << "the first answer may have been lost";
    EXPECT_EQ(a.hear(b.next(start)), Step::connect);
    EXPECT_EQ(b.hear(a.next(start)), Step::ignore);
    EXPECT_TRUE(b.ready());
    EXPECT_EQ(b.hear(hello), Step::answer);
    EXPECT_EQ(b.next(start).kind, Handshake::reply);
}

TEST(Dialogue, NoticesThatThePeerHasBegunAnew)
{
    Dialogue a(100, 2, start), b(200, 1, start);
    b.hear(a.next(start));
    a.hear(b.next(start));
    b.hear(a.next(start));
    ASSERT_TRUE(a.ready() && b.ready());

    Dialogue before(100, 1, start), after(100, 3, start), restarted(101, 1, start);
    EXPECT_EQ(b.hear(before.next(start)), Step::ignore) << "it was under way for long";
    EXPECT_TRUE(b.ready());
    EXPECT_EQ(b.hear(after.next(start)), Step::replaced);
    EXPECT_EQ(b.hear(restarted.next(start)), Step::replaced) << "another incarnation counts from 1 again";
}

TEST(Dialogue, IgnoresWhatIsMeantForAnotherUnderItsAddress)
{
    Dialogue a(100, 1, start), old_b(200, 1, start), b(201, 1, start), later_a(100, 2, start);
    a.hear(old_b.next(start));
    EXPECT_EQ(b.hear(a.next(start)), Step::ignore) << "the incarnation before";
    EXPECT_EQ(b.next(start).peer_attempt, 0u);

    Dialogue first_a(100, 1, start), c(300, 1, start);
    c.hear(first_a.next(start));
    EXPECT_EQ(later_a.hear(c.next(start)), Step::ignore) << "the attempt before";
    EXPECT_EQ(later_a.next(start).peer_attempt, 0u);
}

// ----------------------------------------------------------------- whole courses, by chance and a seed

// Two sides as VerbsDomain is one: a connection for each attempt; one that is replaced is taken down, which takes a
// while in which nothing is heard.
class Course
{
public:
    explicit Course(uint64_t seed) : random(seed) {}

    void run(milliseconds span, bool lossy, bool breaking)
    {
        for (const auto end = now + span; now < end; now += milliseconds(1)) {
            for (const size_t side : both) {
                if (breaking && random() % 400 == 0) take_down(side);
                if (random() % 300 == 0 && breaking) sides[side].incarnation = 0; // restarted
                tend(side);
            }
            deliver(lossy);
        }
    }

    // Both ready, and connected to each other's present attempt.
    bool agreed() const
    {
        return std::ranges::all_of(both, [&](size_t side) {
            const Side &here = sides[side], &there = sides[1 - side];
            return here.dialogue && here.dialogue->ready() &&
                   here.connected_to == std::pair(there.incarnation, there.attempts);
        });
    }
    size_t replaced = 0, messages = 0;

private:
    static constexpr std::array<size_t, 2> both = {0, 1};

    struct Side {
        uint64_t incarnation = 0, attempts = 0;
        std::optional<Dialogue> dialogue;
        std::pair<uint64_t, uint64_t> connected_to;
        Clock::time_point deaf_until{};
    };

    void take_down(size_t side)
    {
        sides[side].dialogue.reset();
        sides[side].deaf_until = now + milliseconds(random() % 100);
    }

    void begin(size_t side)
    {
        Side &here = sides[side];
        here.dialogue.emplace(here.incarnation, ++here.attempts, now);
        here.connected_to = {};
    }

    void tend(size_t side)
    {
        Side &here = sides[side];
        if (here.incarnation == 0) {
            here = {.incarnation = random() | 1, .attempts = 0, .dialogue = {}, .connected_to = {}, .deaf_until = {}};
        }
        if (now < here.deaf_until) return;
        if (!here.dialogue && random() % 50 == 0) begin(side); // somebody wants the peer
        if (!here.dialogue) return;
        if (here.dialogue->late(now)) return take_down(side);
        if (here.dialogue->due(now)) send(side);
    }

    void send(size_t side)
    {
        ++messages;
        const Handshake message = sides[side].dialogue->next(now);
        under_way.emplace(now + milliseconds(random() % 4), std::pair(1 - side, message));
        if (random() % 10 == 0) under_way.emplace(now + milliseconds(random() % 30), std::pair(1 - side, message));
    }

    void deliver(bool lossy)
    {
        while (!under_way.empty() && under_way.begin()->first <= now) {
            const auto [side, message] = under_way.begin()->second;
            under_way.erase(under_way.begin());
            if (!lossy || random() % 10 < 6) hear(side, message);
        }
    }

    void hear(size_t side, const Handshake &message)
    {
        Side &here = sides[side];
        if (now < here.deaf_until || here.incarnation == 0) return;
        if (!here.dialogue && message.kind == Handshake::reply) return;
        if (!here.dialogue) begin(side);
        switch (here.dialogue->hear(message)) {
        case Step::ignore: break;
        case Step::replaced:
            ++replaced;
            take_down(side);
            break;
        case Step::connect: here.connected_to = {message.incarnation, message.attempt}; [[fallthrough]];
        case Step::answer: send(side);
        }
    }

    std::mt19937_64 random;
    Clock::time_point now = start;
    std::array<Side, 2> sides;
    std::multimap<Clock::time_point, std::pair<size_t, Handshake>> under_way;
};

TEST(DialogueCourse, AgreesThroughLossDoublesAndDisorder)
{
    for (uint64_t seed = 0; seed < 200; ++seed) {
        Course course(seed);
        course.run(std::chrono::seconds(8), true, false);
        EXPECT_TRUE(course.agreed()) << "seed " << seed;
        EXPECT_LE(course.messages, 100u) << "seed " << seed << ": a storm";
    }
}

TEST(DialogueCourse, AgreesAfterBrokenConnectionsAndRestarts)
{
    size_t replaced = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        Course course(seed);
        course.run(std::chrono::seconds(3), true, true);
        course.run(std::chrono::seconds(12), true, false);
        EXPECT_TRUE(course.agreed()) << "seed " << seed;
        replaced += course.replaced;
    }
    EXPECT_GT(replaced, 0u);
}

} // namespace transfer_engine
