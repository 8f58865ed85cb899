// ofi_side.hpp: for the tests of the libfabric backend: a domain with memory, and what happens on it.
#pragma once

#include "../domain.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace transfer_engine::testing
{

using Clock = std::chrono::steady_clock;

constexpr auto soon = std::chrono::seconds(20); // deadline of what ought to take milliseconds
constexpr size_t memory_size = 4 << 20;

inline uint8_t byte_at(size_t position, uint8_t salt)
{
    return static_cast<uint8_t>(position * 131 + (position >> 8) * 17 + (position >> 16) * 7 + salt);
}

// What a peer is told to reach a side.
struct Contact {
    NetAddr address;
    MemoryKeys keys;
};

// A domain with registered memory, and what has happened on it.
struct Side {
    std::vector<uint8_t> memory = std::vector<uint8_t>(memory_size);
    std::unique_ptr<Domain> domain;
    MemoryKeys keys;
    std::map<uint64_t, Event> retired; // by context
    std::vector<Event> immediates, received, down;
    size_t retired_twice = 0;
    uint64_t posted = 0; // the last context, where a test counts them

    explicit Side(const std::string &provider)
    {
        Status status;
        domain = ofi_nic(provider)(&status);
        EXPECT_TRUE(status.ok()) << status.message;
        if (domain == nullptr) return;
        status = domain->register_memory(memory.data(), memory.size(), host, &keys);
        EXPECT_TRUE(status.ok()) << status.message;
    }
    ~Side()
    {
        if (domain != nullptr) domain->deregister_memory(keys);
    }
    Side(const Side &) = delete;
    Side &operator=(const Side &) = delete;

    Contact contact() const { return {.address = domain->address(), .keys = keys}; }

    uint32_t find(const Contact &peer) const
    {
        uint32_t number = UINT32_MAX;
        const Status status = domain->find_peer(peer.address, &number);
        EXPECT_TRUE(status.ok()) << status.message;
        return number;
    }

    void poll()
    {
        std::array<Event, 24> events;
        const size_t count = domain->poll(events);
        for (size_t i = 0; i < count; ++i) {
            const Event &event = events[i];
            switch (event.kind) {
            case Event::retired: retired_twice += retired.emplace(event.context, event).second ? 0 : 1; break;
            case Event::immediate: immediates.push_back(event); break;
            case Event::received: received.push_back(event); break;
            case Event::peer_down: down.push_back(event); break;
            }
        }
    }

    Code code_of(uint64_t context) const
    {
        const auto found = retired.find(context);
        return found == retired.end() ? Code::timed_out : found->second.code;
    }

    // `length` bytes from offset `from` of this memory to offset `to` of the peer's, or for a read the other way round.
    WorkRequest request(Operation operation, const Contact &peer, size_t from, size_t to, size_t length,
                        uint64_t context)
    {
        WorkRequest made;
        made.operation = operation;
        made.length = static_cast<uint32_t>(length);
        made.local = &memory[from];
        made.local_key = keys.local;
        made.remote = peer.keys.base + to;
        made.remote_key = peer.keys.remote;
        made.context = context;
        return made;
    }
};

inline void poll_all(std::initializer_list<Side *> sides)
{
    for (Side *side : sides)
        side->poll();
}

template <typename Done>
bool wait_until(std::initializer_list<Side *> sides, const Done &done, Clock::duration limit = soon)
{
    const auto deadline = Clock::now() + limit;
    bool is_done = done();
    for (; !is_done && Clock::now() < deadline; is_done = done())
        poll_all(sides);
    return is_done;
}

// Posts it as soon as there is room.
inline bool post(Side *side, uint32_t peer, const WorkRequest &request, std::initializer_list<Side *> sides,
                 Clock::duration limit = soon)
{
    return wait_until(
        sides,
        [&] {
            return side->domain->post(peer, {&request, 1}) == 1;
        },
        limit);
}

// The parameter: a provider.
class OfiTest : public ::testing::TestWithParam<const char *>
{
protected:
    // shm tells of nothing that went wrong at the peer; see ofi_domain.cpp.
    static bool tells_of_failures() { return std::string(GetParam()) != "shm"; }

    // Waits until what is posted to this peer has failed and the peer is down: by itself, or given up.
    static void expect_down(Side *side, uint32_t peer, std::initializer_list<Side *> sides)
    {
        const size_t before = side->down.size();
        if (!tells_of_failures()) {
            EXPECT_FALSE(wait_until(
                sides, [&] { return side->down.size() > before; }, std::chrono::milliseconds(200)));
            side->domain->abort(peer);
        }
        ASSERT_TRUE(wait_until(sides, [&] { return side->down.size() > before; }));
        EXPECT_EQ(side->down.back().peer, peer);
        EXPECT_EQ(side->down.back().code, Code::peer_down);
        EXPECT_STRNE(side->down.back().why, "");
    }
};

inline const auto ofi_providers = ::testing::Values("tcp;ofi_rxm", "shm");
inline std::string name_of_provider(const ::testing::TestParamInfo<const char *> &test)
{
    return std::string(test.param) == "shm" ? "shm" : "tcp";
}

} // namespace transfer_engine::testing
