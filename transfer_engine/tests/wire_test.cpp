// What goes from process to process, as bytes; and what a process makes of bytes that are not that.
#include "wire.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace transfer_engine
{

using Bytes = std::vector<uint8_t>;

static NetAddr random_address(std::mt19937_64 &random)
{
    NetAddr address;
    address.length = static_cast<uint8_t>(random() % (most_address_bytes + 1));
    for (uint8_t &byte : std::span(address.bytes).first(address.length))
        byte = static_cast<uint8_t>(random());
    return address;
}

// Every magnitude is as likely.
static uint64_t random_number(std::mt19937_64 &random, uint64_t most)
{
    return std::min(random() >> (random() % 64), most);
}

static MrDesc random_region(std::mt19937_64 &random)
{
    MrDesc region;
    region.ptr = random_number(random, UINT64_MAX);
    region.length = random_number(random, UINT64_MAX - region.ptr);
    region.nics = static_cast<uint32_t>(1 + random() % most_nics);
    for (RemoteKey &each : std::span(region.rkeys).first(region.nics))
        each = {random_address(random), random_number(random, UINT64_MAX - region.length), random()};
    return region;
}

// Some value that no bytes of a test stand for.
static void mark(NetAddr *value) { value->length = 255; }
static void mark(MrDesc *value) { value->nics = 77; }

// Parses; whatever comes of it has to be right. `bytes` end where their memory does, for the address sanitizer.
template <typename Value> static Status parse_and_check(const Bytes &bytes)
{
    Value marked;
    mark(&marked);
    Value value = marked;
    Status status = parse(bytes, &value);
    if (status.ok()) {
        EXPECT_EQ(serialize(value), bytes);
    } else {
        EXPECT_EQ(status.code, Code::invalid);
        EXPECT_NE(status.message, "");
        EXPECT_EQ(value, marked) << "changed, though refused: " << status.message;
    }
    return status;
}

template <typename Value> static void check_round_trip(const Value &value)
{
    Value parsed;
    mark(&parsed);
    const Status status = parse(serialize(value), &parsed);
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(parsed, value);
}

template <typename Value> static void check_damage(const Value &value)
{
    const Bytes whole = serialize(value);
    for (size_t length = 0; length < whole.size(); ++length) {
        const Bytes cut(whole.data(), whole.data() + length);
        EXPECT_FALSE(parse_and_check<Value>(cut).ok()) << "cut to " << length;
    }
    for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
        Bytes flipped = whole;
        flipped[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
        const Status status = parse_and_check<Value>(flipped);
        EXPECT_FALSE(status.ok() && bit < 48) << "magic or version, bit " << bit;
    }
    Bytes longer = whole;
    longer.push_back(0);
    EXPECT_FALSE(parse_and_check<Value>(longer).ok());
}

TEST(Wire, AnyValueComesBack)
{
    for (uint64_t seed = 0; seed < 5000 && !testing::Test::HasFailure(); ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        check_round_trip(random_address(random));
        check_round_trip(random_region(random));
    }
}

TEST(Wire, DamageIsRefusedOrMeansSomethingElse)
{
    for (uint64_t seed = 0; seed < 30 && !testing::Test::HasFailure(); ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        check_damage(random_address(random));
        check_damage(random_region(random));
    }
}

TEST(Wire, NoiseIsRefusedOrMeansSomethingElse)
{
    for (uint64_t seed = 0; seed < 10000 && !testing::Test::HasFailure(); ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        Bytes bytes = random() % 2 == 0 ? serialize(random_region(random)) : serialize(random_address(random));
        for (size_t i = 6 + random() % 32; i < bytes.size(); ++i)
            bytes[i] = static_cast<uint8_t>(random() >> (random() % 64)); // small ones, too
        parse_and_check<NetAddr>(bytes);
        parse_and_check<MrDesc>(bytes);
    }
}

TEST(Wire, TheEdgesComeBack)
{
    NetAddr longest;
    longest.length = most_address_bytes;
    longest.bytes.fill(0xFF);
    check_round_trip(NetAddr{});
    check_round_trip(longest);

    MrDesc region;
    region.nics = most_nics;
    region.ptr = UINT64_MAX - 1;
    region.length = 1;
    for (RemoteKey &each : region.rkeys)
        each = {longest, UINT64_MAX - 1, UINT64_MAX};
    check_round_trip(region);
    region.ptr = 0;
    region.length = UINT64_MAX;
    for (RemoteKey &each : region.rkeys)
        each.base = 0;
    check_round_trip(region);
}

TEST(Wire, TheLayoutIsThis)
{
    NetAddr address;
    address.length = 2;
    address.bytes = {0xAA, 0xBB};
    EXPECT_EQ(serialize(address), (Bytes{'T', 'E', 'N', 'A', 1, 0, 2, 0xAA, 0xBB}));

    MrDesc region;
    region.ptr = 0x0102030405060708;
    region.length = 0x1112131415161718;
    region.nics = 1;
    region.rkeys[0] = {address, 0x2122232425262728, 0x3132333435363738};
    EXPECT_EQ(serialize(region), (Bytes{
                                     'T',  'E',  'M',  'R',  1,    0,                //
                                     0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, // ptr
                                     0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, // length
                                     1,    0,    0,    0,    2,    0xAA, 0xBB,       // nics, address
                                     0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, // base
                                     0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, // key
                                 }));
}

// The bytes of a region with one adapter, whose address has two bytes.
static Bytes small_region()
{
    MrDesc region;
    region.ptr = 4096;
    region.length = 100;
    region.nics = 1;
    region.rkeys[0].address.length = 2;
    region.rkeys[0].base = 4096;
    return serialize(region);
}

TEST(Wire, RefusalsSayWhy)
{
    struct Row {
        size_t at;
        uint8_t byte;
        std::string why;
    };
    const Bytes good = small_region();
    ASSERT_EQ(good.size(), 45U);
    for (const Row &row : std::vector<Row>{
             {3, 'X', "does not begin with TEMR"},
             {4, 2, "version 2 there, 1 here"},
             {5, 1, "version 257 there, 1 here"},
             {22, 0, "0 adapters, must be 1 to 4"},
             {22, 5, "5 adapters, must be 1 to 4"},
             {25, 1, "16777217 adapters, must be 1 to 4"},
             {26, 96, "address of 96 bytes, at most 95"},
             {26, 255, "address of 255 bytes, at most 95"},
             {26, 3, "ends too early: 8 bytes wanted at 38, 7 left"},
             {26, 1, "1 bytes too many"},
         }) {
        Bytes bytes = good;
        bytes[row.at] = row.byte;
        EXPECT_EQ(parse_and_check<MrDesc>(bytes).message, "parse(MrDesc, 45 bytes): " + row.why);
    }
    EXPECT_EQ(parse_and_check<MrDesc>({}).message,
              "parse(MrDesc, 0 bytes): ends too early: 4 bytes wanted at 0, 0 left");
    EXPECT_EQ(parse_and_check<NetAddr>(good).message, "parse(NetAddr, 45 bytes): does not begin with TENA");
}

TEST(Wire, EndsBeyond64BitsAreRefused)
{
    MrDesc region;
    region.ptr = UINT64_MAX - 9;
    region.length = 10;
    region.nics = 1;
    EXPECT_EQ(parse_and_check<MrDesc>(serialize(region)).message,
              "parse(MrDesc, 43 bytes): ptr 18446744073709551606 + length 10 is beyond 64 bits");
    region.ptr = 0;
    region.rkeys[0].base = UINT64_MAX;
    EXPECT_EQ(parse_and_check<MrDesc>(serialize(region)).message,
              "parse(MrDesc, 43 bytes): base 18446744073709551615 + length 10 is beyond 64 bits");
}

// A program can make values that are none. They must not make serialize() read what it should not.
TEST(Wire, WhatIsNoValueIsRefusedByThePeer)
{
    NetAddr address;
    address.length = 255;
    EXPECT_FALSE(parse_and_check<NetAddr>(serialize(address)).ok());
    MrDesc region;
    region.nics = 5;
    EXPECT_FALSE(parse_and_check<MrDesc>(serialize(region)).ok());
    region.nics = UINT32_MAX;
    EXPECT_FALSE(parse_and_check<MrDesc>(serialize(region)).ok());
}

TEST(Status, EveryCodeHasAName)
{
    EXPECT_STREQ(name_of(Code::ok), "ok");
    EXPECT_STREQ(name_of(Code::stopped), "stopped");
    for (auto code = static_cast<uint8_t>(Code::ok); code <= static_cast<uint8_t>(Code::stopped); ++code)
        EXPECT_STRNE(name_of(static_cast<Code>(code)), "unknown") << int{code};
}

} // namespace transfer_engine
