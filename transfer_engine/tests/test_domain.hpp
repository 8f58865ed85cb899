// test_domain.hpp: adapters inside this process, which do to work requests what real ones may do: take few at a time,
// carry them out in any order and late, fail some, keep some for ever, lose a peer. By a seed (T2).
//
// A Wire joins TestDomains; all that they do is under its lock. What an engine must never do (a length beyond
// the longest, memory that is not registered, a peer that is down) is counted in Wire::violations.
#pragma once

#include "../domain.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace transfer_engine::testing
{

// Probabilities, 0 to 1, and counts of polls.
struct Faults {
    double takes_few = 0.3;   // post() takes some, not all
    double out_of_order = 1;  // carries out any, not the first
    double idle = 0.5;        // a poll does nothing
    unsigned connecting = 3;  // at most so many polls before a peer is reached
    double fails = 0;         // a work request fails, its bytes written or not
    double breaks = 0;        // and that breaks the connection, as with RC
    double keeps = 0;         // a work request stays until its peer is given up
    double loses_message = 0; // a receive reports an error
};

class TestDomain;

class Wire
{
public:
    explicit Wire(uint64_t seed, Faults given = {}) : random(seed), faults(given) {}

    std::recursive_mutex mutex; // of all below
    std::mt19937_64 random;
    Faults faults;
    std::map<std::string, TestDomain *> domains;
    uint64_t next_number = 1; // of addresses and keys
    std::vector<std::string> violations;
    uint64_t posted = 0, most_posted_at_once = 0;

    bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(random) < p; }
    uint64_t below(uint64_t n) { return n == 0 ? 0 : random() % n; }
    void violated(std::string what) { violations.push_back(std::move(what)); }
};

inline std::string key_of(const NetAddr &address)
{
    return {reinterpret_cast<const char *>(address.bytes.data()), address.length};
}

struct TestDomainOptions {
    uint64_t longest = 1 << 20;
    size_t depth = 64; // work requests under way to one peer
    size_t receives = 64;
    bool virtual_addresses = true; // RemoteKey::base is the address, not 0
};

class TestDomain final : public Domain
{
public:
    TestDomain(Wire *medium, TestDomainOptions given) : wire(medium), options(given)
    {
        const std::lock_guard lock(wire->mutex);
        const std::string name = "test:" + std::to_string(wire->next_number++);
        own.length = static_cast<uint8_t>(name.size());
        memcpy(own.bytes.data(), name.data(), name.size());
        wire->domains[name] = this;
    }
    ~TestDomain() override
    {
        const std::lock_guard lock(wire->mutex);
        if (!regions.empty()) wire->violated("closed with registered memory");
        wire->domains.erase(key_of(own));
    }

    NetAddr address() const override { return own; }
    uint64_t longest_request() const override { return options.longest; }

    Status register_memory(void *start, uint64_t length, int device, MemoryKeys *keys) override
    {
        const std::lock_guard lock(wire->mutex);
        if (device != host)
            return {.code = Code::unsupported, .message = "device " + std::to_string(device) + ": host memory only"};
        if (refuse_next_registration) {
            refuse_next_registration = false;
            return {.code = Code::failed, .message = "register_memory: refused for the test"};
        }
        const uint64_t key = wire->next_number++;
        regions[key] = {static_cast<uint8_t *>(start), length};
        *keys = {.local = key,
                 .remote = key,
                 .base = options.virtual_addresses ? reinterpret_cast<uintptr_t>(start) : 0,
                 .handle = key};
        return {};
    }
    void deregister_memory(const MemoryKeys &keys) override
    {
        const std::lock_guard lock(wire->mutex);
        if (regions.erase(keys.handle) != 1) wire->violated("deregistered what is not registered");
    }

    Status find_peer(const NetAddr &address, uint32_t *number) override
    {
        const std::lock_guard lock(wire->mutex);
        if (key_of(address).rfind("test:", 0) != 0) return {.code = Code::invalid, .message = "not a test address"};
        for (auto &[known, peer] : peers)
            if (peer.address == address) {
                *number = known;
                return {};
            }
        *number = next_peer++;
        peers[*number] = {.address = address, .polls_to_connect = wire->below(wire->faults.connecting + 1)};
        return {};
    }

    size_t post(uint32_t number, std::span<const WorkRequest> requests) override
    {
        const std::lock_guard lock(wire->mutex);
        const auto found = peers.find(number);
        if (found == peers.end()) {
            wire->violated("posted to a peer that is down");
            return 0;
        }
        Peer &peer = found->second;
        if (peer.polls_to_connect > 0 || peer.broken) return 0;
        size_t count = std::min(requests.size(), options.depth - peer.under_way);
        if (wire->chance(wire->faults.takes_few)) count = wire->below(count + 1);
        for (const WorkRequest &request : requests.first(count)) {
            check(request);
            under_way.push_back({request, number, wire->chance(wire->faults.keeps)});
        }
        peer.under_way += count;
        wire->posted += count;
        wire->most_posted_at_once = std::max<uint64_t>(wire->most_posted_at_once, peer.under_way);
        return count;
    }

    bool post_receive(void *start, uint64_t length, uint64_t local_key, uint64_t context) override
    {
        const std::lock_guard lock(wire->mutex);
        if (receives.size() >= options.receives) return false;
        if (!is_registered(start, length, local_key)) wire->violated("receive into memory that is not registered");
        receives.push_back({static_cast<uint8_t *>(start), length, context});
        return true;
    }

    size_t poll(std::span<Event> events) override
    {
        const std::lock_guard lock(wire->mutex);
        if (wire->chance(wire->faults.idle)) return 0;
        for (auto &[number, peer] : peers)
            if (peer.polls_to_connect > 0) --peer.polls_to_connect;
        for (uint64_t steps = wire->below(8) + 1; steps > 0 && !under_way.empty(); --steps)
            carry_out(wire->chance(wire->faults.out_of_order) ? wire->below(under_way.size()) : 0);
        size_t count = 0;
        for (; count < events.size() && !told.empty(); ++count) {
            events[count] = told.front();
            told.pop_front();
            if (events[count].kind == Event::peer_down) peers.erase(events[count].peer);
        }
        return count;
    }

    void abort(uint32_t number) override
    {
        const std::lock_guard lock(wire->mutex);
        const auto found = peers.find(number);
        if (found == peers.end())
            wire->violated("gave up a peer that is down");
        else
            break_peer(number, "given up");
    }

    // What goes wrong on purpose.
    void lose(const NetAddr &address)
    {
        const std::lock_guard lock(wire->mutex);
        for (auto &[number, peer] : peers)
            if (peer.address == address) return break_peer(number, "lost for the test");
    }
    std::atomic<bool> refuse_next_registration{false};

private:
    struct Bytes {
        uint8_t *start;
        uint64_t length;
    };
    struct Peer {
        NetAddr address;
        uint64_t polls_to_connect = 0;
        size_t under_way = 0;
        bool broken = false;
    };
    struct UnderWay {
        WorkRequest request;
        uint32_t peer;
        bool kept;
    };
    struct Receive {
        uint8_t *start;
        uint64_t length, context;
    };

    bool is_registered(const void *start, uint64_t length, uint64_t key) const
    {
        const auto found = regions.find(key);
        if (found == regions.end()) return false;
        const auto at = reinterpret_cast<uintptr_t>(start), begin = reinterpret_cast<uintptr_t>(found->second.start);
        return at >= begin && length <= found->second.length && at - begin <= found->second.length - length;
    }

    void check(const WorkRequest &request)
    {
        if (request.length > options.longest) wire->violated("a work request beyond the longest");
        if (!is_registered(request.local, request.length, request.local_key))
            wire->violated("local memory that is not registered with this adapter");
        if (request.has_imm && request.operation != Operation::write) wire->violated("an immediate without a write");
    }

    void retire(const UnderWay &one, Code code = Code::ok, const char *why = "")
    {
        told.push_back({.kind = Event::retired, .code = code, .context = one.request.context, .why = why});
        --peers[one.peer].under_way;
    }

    void break_peer(uint32_t number, const char *why)
    {
        if (peers[number].broken) return;
        peers[number].broken = true;
        for (size_t i = 0; i < under_way.size();)
            if (under_way[i].peer == number) {
                retire(under_way[i], Code::peer_down, why);
                under_way.erase(under_way.begin() + static_cast<ptrdiff_t>(i));
            } else {
                ++i;
            }
        told.push_back({.kind = Event::peer_down, .code = Code::peer_down, .peer = number, .why = why});
    }

    // Whether it could be; else it stays.
    void carry_out(uint64_t index)
    {
        const UnderWay one = under_way[index];
        if (one.kept) return;
        const auto found = wire->domains.find(key_of(peers[one.peer].address));
        TestDomain *const target = found == wire->domains.end() ? nullptr : found->second;
        const bool fails = wire->chance(wire->faults.fails);
        const char *why = "failed for the test";
        bool done = !fails || wire->chance(0.5); // a failed one may have written all the same
        if (target == nullptr) {
            done = false;
            why = "nobody has this address";
        } else if (done) {
            switch (move_bytes(one.request, target, !fails)) {
            case moved: break;
            case no_receive: return;
            case refused: done = false; why = "remote access error";
            }
        }
        under_way.erase(under_way.begin() + static_cast<ptrdiff_t>(index));
        if (done && !fails) return retire(one);
        retire(one, target == nullptr ? Code::peer_down : Code::failed, why);
        if (target == nullptr || wire->chance(wire->faults.breaks)) break_peer(one.peer, why);
    }

    enum Result { moved, refused, no_receive };
    Result move_bytes(const WorkRequest &request, TestDomain *target, bool tell)
    {
        if (request.operation == Operation::send) {
            if (target->receives.empty()) return no_receive;
            const Receive receive = target->receives.front();
            if (request.length > receive.length) return refused;
            target->receives.pop_front();
            if (request.length > 0) memcpy(receive.start, request.local, request.length);
            const bool lost = !tell || wire->chance(wire->faults.loses_message);
            target->told.push_back({.kind = Event::received,
                                    .code = lost ? Code::failed : Code::ok,
                                    .context = receive.context,
                                    .length = request.length});
            return moved;
        }
        const auto found = target->regions.find(request.remote_key);
        if (found == target->regions.end()) return refused;
        const Bytes region = found->second;
        const uint64_t base = target->options.virtual_addresses ? reinterpret_cast<uintptr_t>(region.start) : 0;
        if (request.remote < base || request.remote - base > region.length ||
            request.length > region.length - (request.remote - base))
            return refused;
        uint8_t *const remote = region.start + (request.remote - base);
        if (request.length > 0 && request.operation == Operation::write) memcpy(remote, request.local, request.length);
        if (request.length > 0 && request.operation == Operation::read) memcpy(request.local, remote, request.length);
        if (request.has_imm && tell) {
            const Event event{.kind = Event::immediate, .imm = request.imm};
            const auto place = target->told.begin() + static_cast<ptrdiff_t>(wire->below(target->told.size() + 1));
            target->told.insert(place, event);
        }
        return moved;
    }

    Wire *wire;
    TestDomainOptions options;
    NetAddr own;
    std::map<uint64_t, Bytes> regions;
    std::map<uint32_t, Peer> peers;
    uint32_t next_peer = 1;
    std::vector<UnderWay> under_way;
    std::deque<Receive> receives;
    std::deque<Event> told;
};

inline OpenDomain test_nic(Wire *wire, TestDomainOptions options = {}, TestDomain **made = nullptr)
{
    return [=](Status *) {
        auto domain = std::make_unique<TestDomain>(wire, options);
        if (made != nullptr) *made = domain.get();
        return domain;
    };
}

} // namespace transfer_engine::testing
