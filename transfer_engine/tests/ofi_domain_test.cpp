// ofi_domain_test.cpp: the libfabric backend, by the Domain interface, with the providers that need no adapter; all
// domains in this process. ofi_process_test.cpp has those between processes.
#include "ofi_side.hpp"

#include <cstring>
#include <thread>

using namespace transfer_engine;
using namespace transfer_engine::testing;

namespace
{

class OfiDomainTest : public OfiTest
{
};

INSTANTIATE_TEST_SUITE_P(Providers, OfiDomainTest, ofi_providers, name_of_provider);

TEST(OfiNic, says_what_there_is_not)
{
    Status status;
    EXPECT_EQ(ofi_nic("carrier_pigeon")(&status), nullptr);
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_NE(status.message.find("fi_getinfo(carrier_pigeon)"), std::string::npos) << status.message;

    EXPECT_EQ(ofi_nic("shm", "moon")(&status), nullptr);
    EXPECT_EQ(status.code, Code::invalid);
    EXPECT_NE(status.message.find("there are: shm"), std::string::npos) << status.message;
}

TEST_P(OfiDomainTest, registers_memory)
{
    Side a(GetParam());
    std::vector<uint8_t> more(8192);
    MemoryKeys first, second;
    ASSERT_TRUE(a.domain->register_memory(more.data(), 4096, host, &first).ok());
    ASSERT_TRUE(a.domain->register_memory(more.data(), 8192, host, &second).ok()); // anew: another length
    EXPECT_NE(first.remote, second.remote);
    EXPECT_NE(first.remote, a.keys.remote);
    a.domain->deregister_memory(first);
    a.domain->deregister_memory(second);

    EXPECT_FALSE(a.domain->register_memory(more.data(), 8192, 0, &first).ok()); // no GPU, or not its memory
    EXPECT_EQ(a.domain->register_memory(more.data(), 0, host, &first).code, Code::invalid);
    EXPECT_EQ(a.domain->register_memory(nullptr, 1, host, &first).code, Code::invalid);
}

TEST_P(OfiDomainTest, registers_by_any_thread)
{
    Side a(GetParam()), b(GetParam());
    const uint32_t peer = a.find(b.contact());
    std::atomic<bool> stop{false};
    std::atomic<int> registered{0};
    std::array<std::vector<uint64_t>, 2> seen; // keys
    const auto work = [&](std::vector<uint64_t> *keys_seen) {
        std::vector<uint8_t> memory(4096);
        MemoryKeys keys;
        while (!stop && a.domain->register_memory(memory.data(), memory.size(), host, &keys).ok()) {
            keys_seen->push_back(keys.remote);
            a.domain->deregister_memory(keys);
            ++registered;
        }
    };
    std::array<std::thread, 2> threads{std::thread(work, seen.data()), std::thread(work, &seen[1])};
    uint64_t writes = 0;
    EXPECT_TRUE(wait_until({&a, &b}, [&] {
        const WorkRequest request = a.request(Operation::write, b.contact(), 0, 0, 5000, writes);
        if (writes < 1000 || registered < 200) writes += a.domain->post(peer, {&request, 1});
        return writes >= 1000 && registered >= 200 && a.retired.size() == writes;
    }));
    stop = true;
    for (std::thread &thread : threads)
        thread.join();
    for (const uint64_t key : seen[0])
        ASSERT_NE(key, a.keys.remote); // nor is a live one given out again
    for (const auto &[context, event] : a.retired)
        ASSERT_EQ(event.code, Code::ok) << context;
}

TEST_P(OfiDomainTest, writes_these_bytes_and_no_others)
{
    for (const size_t length : {size_t{1}, size_t{64}, size_t{4096}, size_t{4097}, size_t{100000}, size_t{1 << 20}}) {
        Side a(GetParam()), b(GetParam());
        for (size_t i = 0; i < memory_size; ++i)
            a.memory[i] = byte_at(i, 1);
        const uint32_t peer = a.find(b.contact());
        ASSERT_TRUE(post(&a, peer, a.request(Operation::write, b.contact(), 777, 12345, length, 5), {&a, &b}));
        ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.retired.size() == 1; }));
        EXPECT_EQ(a.code_of(5), Code::ok);
        for (size_t i = 0; i < memory_size; ++i) {
            const bool written = i >= 12345 && i < 12345 + length;
            ASSERT_EQ(b.memory[i], written ? a.memory[777 + i - 12345] : 0) << "length " << length << ", byte " << i;
        }
        EXPECT_TRUE(b.immediates.empty());
    }
}

TEST_P(OfiDomainTest, immediate_comes_once_after_its_bytes)
{
    Side a(GetParam()), b(GetParam());
    const uint32_t peer = a.find(b.contact());
    for (size_t i = 0; i < 100; ++i) {
        const size_t length = 1 + i * 997;
        std::fill_n(a.memory.begin(), length, static_cast<uint8_t>(i + 1));
        WorkRequest request = a.request(Operation::write, b.contact(), 0, 64, length, i);
        request.has_imm = true;
        request.imm = 0xdeadbe00u + static_cast<uint32_t>(i);
        ASSERT_TRUE(post(&a, peer, request, {&a, &b}));
        ASSERT_TRUE(wait_until({&a, &b}, [&] { return b.immediates.size() == i + 1; }));
        EXPECT_EQ(b.immediates.back().imm, request.imm);
        ASSERT_EQ(std::count(b.memory.begin() + 64, b.memory.begin() + 64 + static_cast<ptrdiff_t>(length), i + 1),
                  static_cast<ptrdiff_t>(length));
        ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.retired.size() == i + 1; }));
    }
    EXPECT_FALSE(wait_until(
        {&a, &b}, [&] { return b.immediates.size() > 100; }, std::chrono::milliseconds(50)));
}

TEST_P(OfiDomainTest, no_bytes)
{
    Side a(GetParam()), b(GetParam());
    const uint32_t peer = a.find(b.contact());
    for (uint64_t i = 0; i < 3000; ++i) { // more than any queue has room for
        WorkRequest request = a.request(i % 8 == 7 ? Operation::read : Operation::write, b.contact(), 0, 0, 0, i);
        request.has_imm = i % 2 == 0;
        request.imm = static_cast<uint32_t>(i);
        ASSERT_TRUE(post(&a, peer, request, {&a, &b})) << i;
    }
    ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.retired.size() == 3000 && b.immediates.size() == 1500; }))
        << a.retired.size() << " retired, " << b.immediates.size() << " immediates";
    for (const auto &[context, event] : a.retired)
        ASSERT_EQ(event.code, Code::ok) << context << ": " << event.why;
    uint64_t sum = 0;
    for (const Event &event : b.immediates)
        sum += event.imm;
    EXPECT_EQ(sum, uint64_t{1500} * 1499);
}

TEST_P(OfiDomainTest, reads)
{
    Side a(GetParam()), b(GetParam());
    for (size_t i = 0; i < memory_size; ++i)
        b.memory[i] = byte_at(i, 9);
    const uint32_t peer = a.find(b.contact());
    for (const size_t length : {size_t{1}, size_t{5000}, size_t{300000}}) {
        ASSERT_TRUE(post(&a, peer, a.request(Operation::read, b.contact(), 100, 54321, length, length), {&a, &b}));
        ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.retired.contains(length); }));
        EXPECT_EQ(a.code_of(length), Code::ok);
        EXPECT_EQ(memcmp(&a.memory[100], &b.memory[54321], length), 0);
        EXPECT_EQ(a.memory[99], 0);
        EXPECT_EQ(a.memory[100 + length], 0);
    }
    EXPECT_TRUE(b.immediates.empty());
}

TEST_P(OfiDomainTest, messages)
{
    constexpr size_t room = 70000;
    Side a(GetParam()), b(GetParam());
    for (uint64_t i = 0; i < 4; ++i)
        ASSERT_TRUE(b.domain->post_receive(&b.memory[i * room], room, b.keys.local, 100 + i));
    for (size_t i = 0; i < memory_size; ++i)
        a.memory[i] = byte_at(i, 3);
    const uint32_t peer = a.find(b.contact());
    const std::array<size_t, 6> lengths = {1, 0, 4096, 65536, 17, room};
    for (size_t i = 0; i < lengths.size(); ++i) {
        const WorkRequest request = a.request(Operation::send, b.contact(), i * 11, 0, lengths[i], i);
        ASSERT_TRUE(post(&a, peer, request, {&a, &b}));
        ASSERT_TRUE(wait_until({&a, &b}, [&] { return b.received.size() == i + 1 && a.retired.size() == i + 1; }));
        const Event &event = b.received.back();
        EXPECT_EQ(event.code, Code::ok);
        EXPECT_EQ(event.length, lengths[i]);
        ASSERT_GE(event.context, 100u);
        const size_t slot = event.context - 100;
        EXPECT_EQ(memcmp(&b.memory[slot * room], &a.memory[i * 11], lengths[i]), 0);
        ASSERT_TRUE(b.domain->post_receive(&b.memory[slot * room], room, b.keys.local, event.context));
    }
}

TEST_P(OfiDomainTest, receives_serve_again_and_again)
{
    constexpr uint64_t count = 5000; // more than there can be receives
    Side a(GetParam()), b(GetParam());
    ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 64, b.keys.local, 0));
    const uint32_t peer = a.find(b.contact());
    for (uint64_t i = 1; i <= count; ++i) {
        ASSERT_TRUE(post(&a, peer, a.request(Operation::send, b.contact(), 0, 0, 8, i), {&a, &b}));
        ASSERT_TRUE(wait_until({&a, &b}, [&] { return b.received.size() == i; })) << i;
        ASSERT_EQ(b.received.back().context, i - 1);
        ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 64, b.keys.local, i)) << i;
    }
}

TEST_P(OfiDomainTest, message_longer_than_its_buffer_is_lost_and_told)
{
    if (!tells_of_failures()) GTEST_SKIP() << "shm neither delivers it nor tells";
    Side a(GetParam()), b(GetParam());
    ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 100, b.keys.local, 1));
    const uint32_t peer = a.find(b.contact());
    ASSERT_TRUE(post(&a, peer, a.request(Operation::send, b.contact(), 0, 0, 3000, 1), {&a, &b}));
    ASSERT_TRUE(wait_until({&a, &b}, [&] { return b.received.size() == 1; }));
    EXPECT_NE(b.received.back().code, Code::ok);
    EXPECT_EQ(b.received.back().context, 1u);
    EXPECT_EQ(b.memory[100], 0);
}

TEST_P(OfiDomainTest, receives_are_limited)
{
    Side a(GetParam());
    size_t posted = 0;
    while (posted < 100000 && a.domain->post_receive(a.memory.data(), 64, a.keys.local, posted))
        ++posted;
    EXPECT_GT(posted, 100u);
    EXPECT_LT(posted, 100000u);
}

TEST_P(OfiDomainTest, takes_what_there_is_room_for)
{
    constexpr size_t count = 6000, each = 600;
    Side a(GetParam()), b(GetParam());
    for (size_t i = 0; i < memory_size; ++i)
        a.memory[i] = byte_at(i, 5);
    const uint32_t peer = a.find(b.contact());
    std::vector<WorkRequest> requests;
    for (uint64_t i = 0; i < count; ++i) {
        requests.push_back(a.request(Operation::write, b.contact(), i * each, (count - 1 - i) * each, each, i));
        requests.back().has_imm = i % 3 == 0;
        requests.back().imm = static_cast<uint32_t>(i);
    }
    std::span<const WorkRequest> rest = requests;
    bool was_full = false;
    const auto step = [&] {
        const size_t taken = a.domain->post(peer, rest);
        EXPECT_LE(taken, rest.size());
        was_full |= taken < rest.size();
        rest = rest.subspan(taken);
        return rest.empty();
    };
    ASSERT_TRUE(wait_until({&a, &b}, step)) << rest.size() << " left";
    EXPECT_TRUE(was_full);
    ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.retired.size() == count && b.immediates.size() == count / 3; }));
    EXPECT_EQ(a.retired_twice, 0u);
    for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(a.code_of(i), Code::ok) << i;
        ASSERT_EQ(memcmp(&b.memory[(count - 1 - i) * each], &a.memory[i * each], each), 0) << i;
    }
}

// Writes, reads and messages both ways at a time; each page ends where it belongs.
TEST_P(OfiDomainTest, much_at_a_time_both_ways)
{
    constexpr size_t page = 5000, count = 200, half = memory_size / 2;
    Side a(GetParam()), b(GetParam());
    for (size_t i = 0; i < half; ++i) {
        a.memory[i] = byte_at(i, 20);
        b.memory[i] = byte_at(i, 40);
    }
    const uint32_t to_b = a.find(b.contact()), to_a = b.find(a.contact());
    for (uint64_t i = 0; i < count; ++i) {
        const size_t from = i * page, to = half + (i * 77 % count) * page;
        WorkRequest write = a.request(Operation::write, b.contact(), from, to, page, i);
        write.has_imm = true;
        write.imm = static_cast<uint32_t>(i);
        ASSERT_TRUE(post(&a, to_b, write, {&a, &b}));
        const WorkRequest read =
            b.request(i % 2 == 0 ? Operation::read : Operation::write, a.contact(),
                      i % 2 == 0 ? half + count * page + from : from, i % 2 == 0 ? from : half + from, page, i);
        ASSERT_TRUE(post(&b, to_a, read, {&a, &b}));
    }
    ASSERT_TRUE(wait_until({&a, &b}, [&] {
        return a.retired.size() == count && b.retired.size() == count && b.immediates.size() == count;
    }));
    for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(a.code_of(i), Code::ok);
        ASSERT_EQ(b.code_of(i), Code::ok);
        ASSERT_EQ(memcmp(&b.memory[half + (i * 77 % count) * page], &a.memory[i * page], page), 0) << i;
        const uint8_t *const there =
            i % 2 == 0 ? &b.memory[half + count * page + i * page] : &a.memory[half + i * page];
        const uint8_t *const here = i % 2 == 0 ? &a.memory[i * page] : &b.memory[i * page];
        ASSERT_EQ(memcmp(there, here, page), 0) << i;
    }
}

TEST_P(OfiDomainTest, addresses)
{
    Side a(GetParam()), b(GetParam()), c(GetParam());
    const NetAddr address = b.domain->address();
    EXPECT_EQ(address, b.domain->address());
    EXPECT_FALSE(address == a.domain->address());
    for (size_t i = address.length; i < most_address_bytes; ++i)
        EXPECT_EQ(address.bytes[i], 0);
    EXPECT_EQ(a.find(b.contact()), a.find(b.contact()));
    EXPECT_NE(a.find(b.contact()), a.find(c.contact()));

    uint32_t number = 0;
    const auto refused = [&](const NetAddr &bad) { return a.domain->find_peer(bad, &number).code == Code::invalid; };
    EXPECT_TRUE(refused({}));
    NetAddr other = address;
    other.bytes[0] = 'X';
    EXPECT_TRUE(refused(other)) << "another transport";
    other = address;
    other.bytes[3] ^= 1;
    EXPECT_TRUE(refused(other)) << "another address format";
    other = address;
    other.bytes[4] ^= 0x40;
    EXPECT_TRUE(refused(other)) << "another family, or scheme";
    for (uint8_t length = 0; length < address.length; ++length) {
        other = {};
        other.length = length;
        std::copy_n(address.bytes.begin(), length, other.bytes.begin());
        EXPECT_TRUE(refused(other)) << "cut to " << int{length};
    }
    other = address;
    other.length = 255;
    EXPECT_TRUE(refused(other)) << "longer than it can be";
    other.length = static_cast<uint8_t>(address.length + 1);
    EXPECT_TRUE(refused(other)) << "with a byte more";
    const Status status = a.domain->find_peer(other, &number);
    EXPECT_NE(status.message.find("find_peer()"), std::string::npos) << status.message;
}

TEST_P(OfiDomainTest, wrong_key_fails_and_others_live)
{
    Side a(GetParam()), b(GetParam()), c(GetParam());
    const uint32_t to_b = a.find(b.contact()), to_c = a.find(c.contact());
    a.memory[0] = 1;
    ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 0, 8, 1), {&a, &b, &c}));
    ASSERT_TRUE(wait_until({&a, &b, &c}, [&] { return a.code_of(1) == Code::ok; }));
    WorkRequest wrong = a.request(Operation::write, b.contact(), 0, 0, 8, 2);
    wrong.remote_key += 77;
    ASSERT_TRUE(post(&a, to_b, wrong, {&a, &b, &c}));
    expect_down(&a, to_b, {&a, &b, &c});
    EXPECT_EQ(a.code_of(2), Code::peer_down);
    EXPECT_EQ(b.memory[0], 0);

    EXPECT_EQ(a.find(c.contact()), to_c);
    ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 1, 8, 3), {&a, &b, &c}));
    ASSERT_TRUE(wait_until({&a, &b, &c}, [&] { return a.code_of(3) == Code::ok; }));
    EXPECT_EQ(c.memory[1], 1);
    // And the one that refused the key takes a right one; the end of the old connection may still cost a new one.
    uint64_t attempt = 10;
    ASSERT_TRUE(wait_until({&a, &b, &c}, [&] {
        if (a.code_of(attempt) == Code::ok) return true;
        if (a.retired.contains(attempt)) ++attempt;
        const WorkRequest right = a.request(Operation::write, b.contact(), 0, 0, 8, attempt);
        if (a.posted < attempt && a.domain->post(a.find(b.contact()), {&right, 1}) == 1) a.posted = attempt;
        return false;
    }));
    EXPECT_EQ(b.memory[0], 1);
}

TEST_P(OfiDomainTest, number_of_a_peer_that_is_given_up_is_void)
{
    Side a(GetParam()), b(GetParam());
    const uint32_t peer = a.find(b.contact());
    const WorkRequest request = a.request(Operation::write, b.contact(), 0, 0, 8, 1);
    a.domain->abort(peer);
    EXPECT_EQ(a.domain->post(peer, {&request, 1}), 0u);
    ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.down.size() == 1; }));
    EXPECT_EQ(a.domain->post(peer, {&request, 1}), 0u);
    EXPECT_EQ(a.domain->post(12345, {&request, 1}), 0u);
    a.domain->abort(peer);
    a.domain->abort(12345);
    ASSERT_TRUE(post(&a, a.find(b.contact()), request, {&a, &b}));
    ASSERT_TRUE(wait_until({&a, &b}, [&] { return a.code_of(1) == Code::ok; }));
    EXPECT_EQ(a.down.size(), 1u);
}

TEST_P(OfiDomainTest, closes_with_everything_under_way)
{
    Side b(GetParam());
    ASSERT_TRUE(b.domain->post_receive(b.memory.data(), 64, b.keys.local, 1));
    Side a(GetParam());
    const uint32_t peer = a.find(b.contact());
    ASSERT_TRUE(post(&a, peer, a.request(Operation::write, b.contact(), 0, 0, 100000, 0), {&a, &b}));
    for (uint64_t i = 1; i < 10; ++i) {
        const WorkRequest request = a.request(Operation::write, b.contact(), 0, 0, 100000, i);
        a.domain->post(peer, {&request, 1});
    }
}

} // namespace
