// Immediates are counted, and whoever waits for them is told: once, in order, and whatever came before counts.
#include "imm_counter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <thread>
#include <utility>

// Counts what this thread allocates.
static thread_local uint64_t allocations = 0;

[[gnu::noinline]] void *operator new(size_t size)
{
    ++allocations;
    if (void *memory = malloc(size == 0 ? 1 : size)) return memory;
    throw std::bad_alloc();
}

[[gnu::noinline]] void operator delete(void *memory) noexcept { free(memory); }
[[gnu::noinline]] void operator delete(void *memory, size_t) noexcept { free(memory); }

namespace transfer_engine
{

using Clock = ImmCounter::Clock;
using std::chrono::seconds;

constexpr auto never = Clock::time_point::max();
constexpr Clock::time_point start{}; // of the tests' time, which passes when they say so

// Calls what a counter has handed out.
static void call(std::vector<Reached> *reached)
{
    for (const Reached &each : *reached)
        each.callback(each.status);
    reached->clear();
}

using Told = std::vector<std::string>; // "name:code", in the order of the calls

class ImmCounterTest : public testing::Test
{
protected:
    Told add(uint32_t imm, uint64_t count)
    {
        counter.add(imm, count, &reached);
        return called();
    }
    Told expect(uint32_t imm, uint64_t count, const std::string &name, Clock::time_point deadline = never)
    {
        const auto callback = [this, name](const Status &status) {
            told.push_back(name + ":" + name_of(status.code));
            last = status;
        };
        counter.expect(imm, count, callback, deadline, &reached);
        return called();
    }
    Told expire(Clock::time_point now)
    {
        counter.expire(now, &reached);
        return called();
    }
    Told end_all(const Status &status)
    {
        counter.end_all(status, &reached);
        return called();
    }
    uint64_t count(uint32_t imm) { return counter.count(imm); }
    const Status &last_status() { return last; }

private:
    ImmCounter counter;
    std::vector<Reached> reached;
    Told told;
    Status last;

    Told called()
    {
        call(&reached);
        return std::exchange(told, {});
    }
};

TEST_F(ImmCounterTest, FiresOnceAndTakesOff)
{
    EXPECT_EQ(expect(7, 3, "a"), Told{});
    EXPECT_EQ(add(7, 1), Told{});
    EXPECT_EQ(add(7, 1), Told{});
    EXPECT_EQ(count(7), 2U);
    EXPECT_EQ(add(7, 1), Told{"a:ok"});
    EXPECT_EQ(count(7), 0U);
    EXPECT_EQ(add(7, 3), Told{});
    EXPECT_EQ(count(7), 3U);
}

TEST_F(ImmCounterTest, WhatCameBeforeCounts)
{
    add(7, 2);
    EXPECT_EQ(expect(7, 3, "a"), Told{});
    EXPECT_EQ(add(7, 1), Told{"a:ok"});
    add(7, 4);
    EXPECT_EQ(expect(7, 4, "b"), Told{"b:ok"});
    EXPECT_EQ(count(7), 0U);
}

TEST_F(ImmCounterTest, SurplusStays)
{
    expect(7, 2, "a");
    EXPECT_EQ(add(7, 5), Told{"a:ok"});
    EXPECT_EQ(count(7), 3U);
    EXPECT_EQ(expect(7, 3, "b"), Told{"b:ok"});
    EXPECT_EQ(expect(7, 1, "c"), Told{});
}

TEST_F(ImmCounterTest, SeveralAreServedInOrder)
{
    expect(7, 3, "a");
    expect(7, 1, "b"); // not before a, though it wants less
    expect(7, 2, "c");
    EXPECT_EQ(add(7, 2), Told{});
    EXPECT_EQ(add(7, 2), (Told{"a:ok", "b:ok"}));
    EXPECT_EQ(add(7, 2), Told{"c:ok"});
    expect(7, 1, "d");
    expect(7, 1, "e");
    EXPECT_EQ(add(7, 2), (Told{"d:ok", "e:ok"}));
}

TEST_F(ImmCounterTest, ValuesAreApart)
{
    expect(7, 1, "seven");
    expect(UINT32_MAX, 1, "last");
    EXPECT_EQ(add(0, 9), Told{});
    EXPECT_EQ(add(UINT32_MAX, 1), Told{"last:ok"});
    EXPECT_EQ(add(7, 1), Told{"seven:ok"});
    EXPECT_EQ(count(0), 9U);
}

TEST_F(ImmCounterTest, ZeroIsMetAtOnceInTurn)
{
    EXPECT_EQ(expect(7, 0, "a"), Told{"a:ok"});
    expect(7, 1, "b");
    EXPECT_EQ(expect(7, 0, "c"), Told{});
    EXPECT_EQ(add(7, 1), (Told{"b:ok", "c:ok"}));
    add(7, 1);
    EXPECT_EQ(expect(7, 0, "d"), Told{"d:ok"});
    EXPECT_EQ(count(7), 1U);
    EXPECT_EQ(add(7, 0), Told{});
}

TEST_F(ImmCounterTest, CountsAre64Bit)
{
    constexpr uint64_t many = uint64_t{1} << 40;
    expect(7, many, "a");
    EXPECT_EQ(add(7, many - 1), Told{});
    EXPECT_EQ(add(7, 2), Told{"a:ok"});
    EXPECT_EQ(count(7), 1U);
}

TEST_F(ImmCounterTest, DeadlineTakesNothingOff)
{
    expect(7, 3, "a", start + seconds(5));
    add(7, 2);
    EXPECT_EQ(expire(start + seconds(4)), Told{});
    EXPECT_EQ(expire(start + seconds(5)), Told{"a:timed_out"});
    EXPECT_EQ(last_status().message, "expect_imm_count(7, 3): its deadline came; 2 had arrived");
    EXPECT_FALSE(last_status().remote_may_have_changed);
    EXPECT_EQ(count(7), 2U);
    EXPECT_EQ(expire(start + seconds(6)), Told{});
    EXPECT_EQ(expect(7, 2, "b"), Told{"b:ok"});
}

TEST_F(ImmCounterTest, ThoseBehindAnExpiredOneMoveUp)
{
    expect(7, 5, "a", start + seconds(1));
    expect(7, 2, "b");
    expect(7, 1, "c", start + seconds(2));
    add(7, 3);
    EXPECT_EQ(expire(start + seconds(1)), (Told{"a:timed_out", "b:ok", "c:ok"}));
    EXPECT_EQ(count(7), 0U);
}

TEST_F(ImmCounterTest, ExpiryInTheMiddleKeepsTheOrder)
{
    expect(7, 2, "a");
    expect(7, 9, "b", start + seconds(1));
    expect(7, 1, "c");
    add(7, 1);
    EXPECT_EQ(expire(start + seconds(1)), Told{"b:timed_out"});
    EXPECT_EQ(last_status().message,
              "expect_imm_count(7, 9): its deadline came; 1 had arrived, 1 earlier waited for them");
    EXPECT_EQ(add(7, 2), (Told{"a:ok", "c:ok"}));
}

TEST_F(ImmCounterTest, LateOnesExpireThoughTheyWouldBeMetNow)
{
    expect(7, 5, "a", start + seconds(1));
    expect(7, 1, "b", start + seconds(1));
    add(7, 1);
    EXPECT_EQ(expire(start + seconds(1)), (Told{"a:timed_out", "b:timed_out"}));
    EXPECT_EQ(count(7), 1U);
}

TEST_F(ImmCounterTest, EveryDeadlineIsKept)
{
    expect(1, 1, "late", start + seconds(3));
    expect(2, 1, "soon", start + seconds(1));
    expect(3, 1, "ever");
    expect(4, 1, "between", start + seconds(2));
    EXPECT_EQ(expire(start + seconds(1)), Told{"soon:timed_out"});
    EXPECT_EQ(expire(start + seconds(2)), Told{"between:timed_out"});
    EXPECT_EQ(expire(start + seconds(3)), Told{"late:timed_out"});
    EXPECT_EQ(expire(start + seconds(1000)), Told{});
    expect(5, 1, "new", start + seconds(1001));
    EXPECT_EQ(expire(start + seconds(1001)), Told{"new:timed_out"});
    EXPECT_EQ(add(3, 1), Told{"ever:ok"});
}

TEST_F(ImmCounterTest, EndAllTellsAllAndKeepsTheCounts)
{
    expect(7, 3, "a", start + seconds(1));
    expect(7, 0, "b");
    expect(8, 1, "c");
    add(7, 2);
    add(9, 4);
    Told ended = end_all({Code::cancelled, false, "stop(): called"});
    std::ranges::sort(ended); // no order between the values
    EXPECT_EQ(ended, (Told{"a:cancelled", "b:cancelled", "c:cancelled"}));
    EXPECT_EQ(last_status().message, "stop(): called");
    EXPECT_EQ(count(7), 2U);
    EXPECT_EQ(count(9), 4U);
    EXPECT_EQ(end_all({Code::cancelled, false, ""}), Told{});
    EXPECT_EQ(expire(start + seconds(1)), Told{});
    EXPECT_EQ(add(8, 1), Told{});
    EXPECT_EQ(expect(7, 2, "d"), Told{"d:ok"});
}

// An expectation as the one sees it who waits.
struct Expected {
    uint64_t count;
    Clock::time_point deadline;
    int told = 0;
    Code code = Code::ok;
};

// However it goes: an expectation ends once, those of a value are met in order, nothing that arrived is lost, nobody
// waits for what is there, and nobody waits longer than its deadline.
static void check(const std::deque<Expected> &all, uint64_t arrived, uint64_t left, Clock::time_point now)
{
    uint64_t taken = 0;
    bool somebody_waits = false;
    for (const Expected &each : all) {
        ASSERT_LE(each.told, 1);
        if (each.told == 0) {
            ASSERT_GT(each.deadline, now);
            ASSERT_TRUE(somebody_waits || each.count > left) << "met and not told";
            somebody_waits = true;
        } else if (each.code == Code::ok) {
            ASSERT_FALSE(somebody_waits) << "met before an earlier one";
            taken += each.count;
        } else {
            ASSERT_EQ(each.code, Code::timed_out);
            ASSERT_LE(each.deadline, now);
        }
    }
    ASSERT_EQ(left + taken, arrived);
}

static void check_random_sequence(uint64_t seed)
{
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    constexpr uint32_t values = 4;
    std::mt19937_64 random(seed);
    ImmCounter counter;
    std::array<std::deque<Expected>, values> expected; // a deque: callbacks keep references
    std::array<uint64_t, values> arrived{};
    std::vector<Reached> reached;
    auto now = start;
    for (int step = 0; step < 200 && !testing::Test::HasFailure(); ++step) {
        const auto imm = static_cast<uint32_t>(random() % values);
        const uint64_t count = random() % 6;
        const uint64_t choice = random() % 5;
        if (choice < 2) {
            counter.add(imm, count, &reached);
            arrived.at(imm) += count;
        } else if (choice < 4) {
            const auto deadline = random() % 3 == 0 ? never : now + seconds(1 + random() % 20);
            Expected &each = expected.at(imm).emplace_back(Expected{count, deadline});
            const auto callback = [&each](const Status &status) {
                ++each.told;
                each.code = status.code;
            };
            counter.expect(imm, count, callback, deadline, &reached);
        } else {
            now += seconds(1 + random() % 4);
            counter.expire(now, &reached);
        }
        call(&reached);
        for (uint32_t value = 0; value < values; ++value)
            check(expected.at(value), arrived.at(value), counter.count(value), now);
    }
}

TEST(ImmCounter, AnySequenceAddsUp)
{
    for (uint64_t seed = 0; seed < 500 && !testing::Test::HasFailure(); ++seed)
        check_random_sequence(seed);
}

// Values that are used once and never again.
TEST(ImmCounter, NeedsNoMemoryOnceWarm)
{
    ImmCounter counter;
    std::vector<Reached> reached;
    reached.reserve(1);
    const auto use = [&](uint32_t imm) {
        counter.add(imm, 1, &reached);
        counter.expect(imm, 2, {}, never, &reached);
        for (uint32_t other = 0; other < 10; ++other) // in use at the same time, with what came early
            counter.add(imm + 1 + other, 1, &reached);
        counter.add(imm, 1, &reached);
        reached.clear();
        for (uint32_t other = 0; other < 10; ++other) {
            counter.expect(imm + 1 + other, 1, {}, never, &reached);
            reached.clear();
        }
    };
    for (uint32_t imm = 0; imm < 1000; imm += 11)
        use(imm);
    const uint64_t before = allocations;
    for (uint32_t imm = 1000; imm < 201000; imm += 11)
        use(imm);
    // A queue takes a block of memory for some ten expectations, and gives one back as often.
    EXPECT_LT(allocations - before, 200000 / 8);

    const uint64_t adds_from = allocations;
    for (int i = 0; i < 100000; ++i)
        counter.add(5, 1, &reached);
    EXPECT_LE(allocations - adds_from, 1U);
}

// Two threads add and two expect. What is written before add() is read by the callback.
class Crowd
{
public:
    void add_all(size_t number)
    {
        std::vector<Reached> reached;
        for (uint64_t round = 0; round < rounds; ++round)
            for (uint32_t value = 0; value < values; ++value) {
                data.at(number).at(round).at(value) = round + 1;
                counter.add(value, 1, &reached);
                call(&reached);
            }
    }

    // Every second value from this one on. Behind each expectation comes one that cannot be met.
    void expect_all(uint32_t from)
    {
        std::vector<Reached> reached;
        for (uint64_t number = 1; number <= expectations; ++number)
            for (uint32_t value = from; value < values; value += 2) {
                const auto callback = [this, number, value](const Status &status) { told(number, value, status); };
                counter.expect(value, of_each, callback, never, &reached);
                counter.expect(value, UINT64_MAX, callback, Clock::now(), &reached);
                counter.expire(Clock::now(), &reached);
                call(&reached);
                EXPECT_LE(counter.count(value), 2 * rounds);
            }
    }

    void check()
    {
        EXPECT_EQ(met, values * expectations);
        EXPECT_EQ(late, values * expectations);
        EXPECT_EQ(unseen, 0U);
        for (uint32_t value = 0; value < values; ++value)
            EXPECT_EQ(counter.count(value), 2 * rounds - expectations * of_each);
    }

private:
    static constexpr uint32_t values = 8;
    static constexpr uint64_t rounds = 2000;
    static constexpr uint64_t of_each = 3; // immediates that an expectation wants
    static constexpr uint64_t expectations = 2 * rounds / of_each;

    ImmCounter counter;
    std::array<std::array<std::array<uint64_t, values>, rounds>, 2> data{}; // of each thread that adds
    std::atomic<uint64_t> met{0}, late{0}, unseen{0};

    // When the n-th is met, 3n have come: at least 3n - rounds of each thread.
    void told(uint64_t number, uint32_t value, const Status &status)
    {
        ++(status.ok() ? met : late);
        for (uint64_t round = 0; status.ok() && round + rounds < number * of_each; ++round)
            for (const auto &of_thread : data)
                if (of_thread.at(round).at(value) != round + 1) ++unseen;
    }
};

TEST(ImmCounter, ThreadsShareIt)
{
    const auto crowd = std::make_unique<Crowd>();
    {
        std::vector<std::jthread> threads;
        for (uint32_t number = 0; number < 2; ++number) {
            threads.emplace_back(&Crowd::add_all, crowd.get(), number);
            threads.emplace_back(&Crowd::expect_all, crowd.get(), number);
        }
    }
    crowd->check();
}

} // namespace transfer_engine
