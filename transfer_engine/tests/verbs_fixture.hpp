// verbs_fixture.hpp: several VerbsDomains in this process, on the devices that TE_DEVICES names ("rxe0 rxe1", or
// "rxe0": a device connects to itself as well). The tests are skipped where it names none.
#pragma once

#include "domain.hpp"
#include "handshake.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <sstream>

namespace transfer_engine
{

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline std::vector<std::string> devices()
{
    const char *const names = getenv("TE_DEVICES");
    std::istringstream list(names != nullptr ? names : "");
    return {std::istream_iterator<std::string>(list), {}};
}

// A domain with some registered memory, and all that it has told.
struct Side {
    std::unique_ptr<Domain> domain;
    std::vector<uint8_t> memory;
    MemoryKeys keys;
    std::vector<Event> events;

    void poll()
    {
        std::array<Event, 8> some; // fewer than a chain of completions may bring
        const size_t count = domain->poll(some);
        events.insert(events.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
    }
    size_t count(Event::Kind kind) const { return static_cast<size_t>(std::ranges::count(events, kind, &Event::kind)); }
    const Event *first(Event::Kind kind) const
    {
        const auto found = std::ranges::find(events, kind, &Event::kind);
        return found != events.end() ? &*found : nullptr;
    }
};

class VerbsDomainTest : public testing::Test
{
protected:
    static constexpr size_t memory_bytes = 1 << 20;

    void SetUp() override
    {
        if (devices().empty()) GTEST_SKIP() << "TE_DEVICES names no RDMA device";
        for (size_t i = 0; i < sides.size(); ++i)
            open(i);
    }
    void TearDown() override
    {
        loses_handshake = nullptr;
        for (size_t i = 0; i < sides.size(); ++i)
            close(i);
    }

    void open(size_t index)
    {
        Status status;
        Side &side = sides[index];
        const auto names = devices();
        side.domain = verbs_nic(names[index % names.size()])(&status);
        ASSERT_NE(side.domain, nullptr) << status.message;
        std::mt19937 random(static_cast<unsigned>(index));
        side.memory.resize(memory_bytes);
        std::ranges::generate(side.memory, [&] { return static_cast<uint8_t>(random()); });
        status = side.domain->register_memory(side.memory.data(), side.memory.size(), host, &side.keys);
        ASSERT_TRUE(status.ok()) << status.message;
        side.events.clear();
    }
    void close(size_t index)
    {
        Side &side = sides[index];
        if (side.domain != nullptr) side.domain->deregister_memory(side.keys);
        side.domain.reset();
    }

    // Polls all until it is so. False when it does not come so far.
    bool poll_until(const std::function<bool()> &is_so, Clock::duration limit = seconds(30))
    {
        for (const auto end = Clock::now() + limit; Clock::now() < end;) {
            for (Side &side : sides)
                if (side.domain != nullptr) side.poll();
            if (is_so()) return true;
        }
        return false;
    }
    void poll_for(Clock::duration span)
    {
        poll_until([] { return false; }, span);
    }

    static uint32_t find(Side &from, const Side &to)
    {
        uint32_t peer = 0;
        const Status status = from.domain->find_peer(to.domain->address(), &peer);
        EXPECT_TRUE(status.ok()) << status.message;
        return peer;
    }

    static WorkRequest request(Operation operation, Side &here, size_t at, const Side &there, size_t there_at,
                               uint32_t length, uint64_t context)
    {
        return {.operation = operation,
                .length = length,
                .local = here.memory.data() + at,
                .local_key = here.keys.local,
                .remote = there.keys.base + there_at,
                .remote_key = there.keys.remote,
                .context = context};
    }
    static WorkRequest write(Side &here, size_t at, const Side &there, size_t there_at, uint32_t length,
                             uint64_t context = 0, std::optional<uint32_t> imm = {})
    {
        WorkRequest made = request(Operation::write, here, at, there, there_at, length, context);
        made.has_imm = imm.has_value();
        made.imm = imm.value_or(0);
        return made;
    }

    // Posts them all, as there is room.
    void post(Side &from, uint32_t peer, std::span<const WorkRequest> requests)
    {
        ASSERT_TRUE(poll_until([&] {
            requests = requests.subspan(from.domain->post(peer, requests));
            return requests.empty();
        })) << requests.size()
            << " work requests not taken";
    }
    void post_and_wait(Side &from, uint32_t peer, std::span<const WorkRequest> requests)
    {
        const size_t before = from.count(Event::retired);
        post(from, peer, requests);
        ASSERT_TRUE(poll_until([&] { return from.count(Event::retired) == before + requests.size(); }));
    }
    void post_and_wait(Side &from, uint32_t peer, const WorkRequest &one) { post_and_wait(from, peer, {&one, 1}); }

    // A write that has to arrive.
    void check_connection(Side &from, Side &to)
    {
        const size_t before = from.events.size();
        from.memory[0] = static_cast<uint8_t>(to.memory[0] + 1);
        post_and_wait(from, find(from, to), write(from, 0, to, 0, 1, 4711));
        const auto retired = std::find_if(from.events.begin() + static_cast<std::ptrdiff_t>(before), from.events.end(),
                                          [](const Event &event) { return event.kind == Event::retired; });
        ASSERT_NE(retired, from.events.end());
        EXPECT_EQ(retired->code, Code::ok) << retired->why;
        EXPECT_EQ(retired->context, 4711u);
        EXPECT_EQ(to.memory[0], from.memory[0]);
    }

    std::array<Side, 3> sides;
    Side &a = sides[0], &b = sides[1], &c = sides[2];
};

} // namespace transfer_engine
