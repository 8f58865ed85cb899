// What common.hpp computes, against values worked out by hand.
#include "../../common.hpp"

#include <gtest/gtest.h>

namespace
{

uint64_t size_of(const char *argument)
{
    uint64_t bytes = 12345;
    return parse_size(argument, &bytes) ? bytes : UINT64_MAX - 1;
}
constexpr uint64_t refused = UINT64_MAX - 1;

TEST(Size, TakesBytesAndPowersOf1024)
{
    EXPECT_EQ(size_of("0"), 0u);
    EXPECT_EQ(size_of("4097"), 4097u);
    EXPECT_EQ(size_of("1K"), 1024u);
    EXPECT_EQ(size_of("1k"), 1024u);
    EXPECT_EQ(size_of("100M"), 104857600u);
    EXPECT_EQ(size_of("5G"), 5368709120u);
    EXPECT_EQ(size_of("3T"), 3298534883328u);
}

TEST(Size, RefusesWhatIsNone)
{
    for (const char *argument : {"", "K", "-1", "+1", " 1", "1 ", "1.5G", "0x10", "1KB", "1KK", "1B", "ten", "1G\n"})
        EXPECT_EQ(size_of(argument), refused) << "'" << argument << "'";
}

TEST(Size, RefusesWhatDoesNotFit64Bits)
{
    EXPECT_EQ(size_of("18446744073709551615"), UINT64_MAX);
    EXPECT_EQ(size_of("18446744073709551616"), refused);
    EXPECT_EQ(size_of("16777215T"), uint64_t{16777215} << 40);
    EXPECT_EQ(size_of("16777216T"), refused);
}

TEST(Number, KeepsToItsRange)
{
    uint64_t value = 0;
    EXPECT_TRUE(parse_number("1", 1, 65535, &value));
    EXPECT_TRUE(parse_number("65535", 1, 65535, &value));
    EXPECT_EQ(value, 65535u);
    EXPECT_FALSE(parse_number("0", 1, 65535, &value));
    EXPECT_FALSE(parse_number("65536", 1, 65535, &value));
    EXPECT_FALSE(parse_number("12a", 1, 65535, &value));
    EXPECT_EQ(value, 65535u) << "a refused argument changes nothing";
}

// Whether `range` has the IPv4 or IPv6 address `host`.
bool covers(const char *range, const char *host)
{
    network parsed{};
    sockaddr_storage address{};
    EXPECT_TRUE(parse_network(range, &parsed)) << range;
    EXPECT_TRUE(find_address(host, 0, AF_UNSPEC, &address)) << host;
    return contains(parsed, reinterpret_cast<sockaddr *>(&address));
}

TEST(Network, HasTheAddressesOfItsPrefix)
{
    EXPECT_TRUE(covers("192.168.77.0/24", "192.168.77.255"));
    EXPECT_FALSE(covers("192.168.77.0/24", "192.168.78.0"));
    EXPECT_TRUE(covers("192.168.77.129/25", "192.168.77.254")) << "the bits behind the prefix do not count";
    EXPECT_FALSE(covers("192.168.77.129/25", "192.168.77.127"));
    EXPECT_TRUE(covers("192.168.77.2", "192.168.77.2"));
    EXPECT_FALSE(covers("192.168.77.2", "192.168.77.3"));
    EXPECT_TRUE(covers("0.0.0.0/0", "255.255.255.255"));
    EXPECT_TRUE(covers("fd00:1::/31", "fd00:0::1"));
    EXPECT_FALSE(covers("fd00:1::/32", "fd00:0::1"));
    EXPECT_TRUE(covers("::/0", "fe80::1"));
}

TEST(Network, KeepsTheFamiliesApart)
{
    EXPECT_FALSE(covers("0.0.0.0/0", "fd00::1"));
    EXPECT_FALSE(covers("::/0", "192.168.77.1"));
    EXPECT_TRUE(covers("192.168.77.0/24", "::ffff:192.168.77.1")) << "mapped: an IPv4 address";
    EXPECT_FALSE(covers("::/0", "::ffff:192.168.77.1"));
}

TEST(Network, RefusesWhatIsNone)
{
    network parsed{};
    for (const char *argument : {"", "/", "/24", "192.168.77.0/", "192.168.77.0/33", "192.168.77.0/-1", "192.168.77/24",
                                 "fd00::/129", "node-a", "192.168.77.0/24/24", "192.168.77.0/2 4", " 192.168.77.0"})
        EXPECT_FALSE(parse_network(argument, &parsed)) << argument;
}

TEST(Memory, WhatIsAvailableIsSomeAndNotEverything)
{
    EXPECT_GT(available_memory(), 0u);
    EXPECT_LE(available_memory(),
              static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
    EXPECT_EQ(allocate_buffer(available_memory() * 4), nullptr);
}

// Nearest rank: of 10 samples, p50 is the 5th and p99 the 10th; of 200, p99 is the 198th.
TEST(Statistics, PercentilesByNearestRank)
{
    std::vector<uint64_t> sorted(200);
    std::iota(sorted.begin(), sorted.end(), 1u);
    EXPECT_EQ(percentile(sorted, 99), 198u);
    EXPECT_EQ(percentile(sorted, 50), 100u);
    EXPECT_EQ(percentile(sorted, 100), 200u);
    sorted.resize(100);
    EXPECT_EQ(percentile(sorted, 99), 99u);
    sorted.resize(99);
    EXPECT_EQ(percentile(sorted, 99), 99u);
    sorted.resize(10);
    EXPECT_EQ(percentile(sorted, 50), 5u);
    EXPECT_EQ(percentile(sorted, 99), 10u);
    sorted.resize(3);
    EXPECT_EQ(percentile(sorted, 50), 2u);
    sorted.resize(1);
    EXPECT_EQ(percentile(sorted, 0), 1u);
    EXPECT_EQ(percentile(sorted, 99), 1u);
}

// 2, 4, 4, 4, 5, 5, 7, 9: mean 5, squared deviations 32, so a sample's deviation is sqrt(32 / 7).
TEST(Statistics, OfSamplesInAnyOrder)
{
    const statistics t = statistics_of({9, 4, 5, 2, 4, 7, 5, 4});
    EXPECT_EQ(t.min, 2u);
    EXPECT_EQ(t.median, 4u);
    EXPECT_EQ(t.p99, 9u);
    EXPECT_EQ(t.max, 9u);
    EXPECT_DOUBLE_EQ(t.mean, 5);
    EXPECT_NEAR(t.stdev, 2.138089935, 1e-9);
}

TEST(Statistics, OfOneSampleAndOfHours)
{
    EXPECT_EQ(statistics_of({7}).stdev, 0);
    const uint64_t hours = 36000000000000u; // ten hours of nanoseconds
    const statistics t = statistics_of({hours, hours + 2});
    EXPECT_DOUBLE_EQ(t.mean, static_cast<double>(hours + 1));
    EXPECT_EQ(t.max, hours + 2);
}

TEST(Statistics, RateIsTenToTheNine)
{
    statistics t{};
    t.median = 1000000000; // one second
    EXPECT_DOUBLE_EQ(gigabytes_per_second(50000000000, t), 50);
    t.median = 0;
    EXPECT_DOUBLE_EQ(gigabytes_per_second(1, t), 1) << "no division by zero";
}

TEST(Chunks, CoverTheRangeOnce)
{
    for (const uint64_t length : {1u, 4095u, 4096u, 4097u, 12288u})
        for (const uint64_t chunk : {1u, 4095u, 4096u, 4097u, 100000u}) {
            uint64_t sum = 0;
            for (uint64_t i = 0; i < chunk_count(length, chunk); ++i) {
                EXPECT_EQ(i * chunk, sum) << "no gap, no overlap";
                EXPECT_GT(chunk_length(length, chunk, i), 0u);
                sum += chunk_length(length, chunk, i);
            }
            EXPECT_EQ(sum, length);
        }
}

TEST(Chunks, PastFourGiB)
{
    const uint64_t length = (uint64_t{5} << 30) + 1, chunk = 1 << 20;
    EXPECT_EQ(chunk_count(length, chunk), 5121u);
    EXPECT_EQ(chunk_length(length, chunk, 4096), chunk); // begins at 4 GiB
    EXPECT_EQ(chunk_length(length, chunk, 5120), 1u);
    EXPECT_EQ(chunk_count(UINT64_MAX, 1), UINT64_MAX);
    EXPECT_EQ(chunk_count(UINT64_MAX, UINT64_MAX), 1u);
    EXPECT_EQ(chunk_length(UINT64_MAX, 2, chunk_count(UINT64_MAX, 2) - 1), 1u);
}

const offer example{.magic = offer_magic,
                    .version = handshake_version,
                    .address = 0x0102030405060708,
                    .length = uint64_t{6} << 30,
                    .md5 = {0xd4, 0x1d, 0x8c, 0xd9},
                    .rkey = 0x0a0b0c0d,
                    .reserved = 0};

TEST(Handshake, IsBigEndianOnTheWire)
{
    const offer wire = encode(example);
    const auto *bytes = reinterpret_cast<const uint8_t *>(&wire);
    EXPECT_EQ(std::string(reinterpret_cast<const char *>(bytes), 4), "KVOF");
    EXPECT_EQ(bytes[7], handshake_version);
    for (unsigned i = 0; i < 8; ++i)
        EXPECT_EQ(bytes[8 + i], i + 1) << "address";
    EXPECT_EQ(bytes[19], 1) << "length: 6 GiB is 0x1_8000_0000";
    EXPECT_EQ(bytes[20], 0x80);
    EXPECT_EQ(bytes[24], 0xd4) << "the digest is bytes, not a number";
    EXPECT_EQ(bytes[40], 0x0a) << "rkey";
    EXPECT_EQ(bytes[43], 0x0d);
}

TEST(Handshake, ComesBackFromPaddedBytes)
{
    uint8_t padded[196] = {};
    const offer wire = encode(example);
    memcpy(padded, &wire, sizeof wire);
    offer got{};
    EXPECT_EQ(decode(padded, sizeof padded, offer_magic, &got), "");
    EXPECT_EQ(memcmp(&got, &example, sizeof got), 0);
}

TEST(Handshake, RefusesShortBytes)
{
    const offer wire = encode(example);
    offer got{};
    EXPECT_EQ(decode(&wire, sizeof wire, offer_magic, &got), "");
    EXPECT_EQ(decode(&wire, sizeof wire - 1, offer_magic, &got), "handshake of 47 bytes, 48 expected");
    for (const size_t length : {0u, 1u, 7u})
        EXPECT_EQ(decode(&wire, length, offer_magic, &got), "no handshake of this program");
    EXPECT_EQ(decode(nullptr, 0, offer_magic, &got), "no handshake of this program");
}

TEST(Handshake, RefusesAnotherProgramAndAnotherVersion)
{
    offer got{};
    const uint8_t zeros[56] = {};
    EXPECT_EQ(decode(zeros, sizeof zeros, offer_magic, &got), "no handshake of this program");
    EXPECT_EQ(decode(zeros, sizeof zeros, hello_magic, &got), "no handshake of this program");

    offer other = example;
    other.version = handshake_version + 1;
    const offer wire = encode(other);
    EXPECT_EQ(decode(&wire, sizeof wire, offer_magic, &got), "handshake version 2, not 1");
    EXPECT_EQ(decode(&wire, 8, offer_magic, &got), "handshake version 2, not 1") << "a shorter one, too";
    EXPECT_EQ(decode(&wire, sizeof wire, hello_magic, &got), "no handshake of this program");
}

TEST(Handshake, RefusalIsReadByEveryVersion)
{
    refusal message{.magic = refusal_magic, .version = handshake_version + 1, .reason = "busy"};
    message = encode(message);
    refusal got{};
    EXPECT_EQ(decode(&message, sizeof message, refusal_magic, &got), "");
    EXPECT_STREQ(got.reason, "busy");
}

TEST(Handshake, TextFromElsewhereIsSafeToPrint)
{
    const char bytes[] = {'o', 'k', '\033', '[', '2', 'J', '\n', '\xff', 'x'}; // no zero at the end
    EXPECT_EQ(printable(bytes, sizeof bytes), "ok?[2J??x");
    EXPECT_EQ(printable("cut\0off", 7), "cut");
}

TEST(Md5, OfKnownTexts) // RFC 1321, A.5
{
    uint8_t digest[md5_size];
    ASSERT_TRUE(md5_of(nullptr, 0, digest));
    EXPECT_EQ(md5_text(digest), "d41d8cd98f00b204e9800998ecf8427e");
    ASSERT_TRUE(md5_of(reinterpret_cast<const uint8_t *>("message digest"), 14, digest));
    EXPECT_EQ(md5_text(digest), "f96b697d7cb7938d525a2f31aaf161d0");
}

} // namespace
