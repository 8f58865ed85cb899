// How a transfer is cut over adapters, and how many immediates that makes.
#include "sharding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

namespace transfer_engine
{

constexpr uint64_t most_count = (uint64_t{1} << 63) - 1;

// What every cut has to be, told without the way in which it is made.
static void check_shares(uint64_t count, uint64_t shares, uint64_t unit)
{
    SCOPED_TRACE(testing::Message() << "count " << count << ", shares " << shares << ", unit " << unit);
    std::vector<Range> cut;
    uint64_t next = 0;
    for (uint64_t i = 0; i < shares; ++i) {
        cut.push_back(share_of(count, shares, i, unit));
        EXPECT_EQ(cut[i].begin, next) << "gap or overlap before share " << i;
        EXPECT_LE(cut[i].begin, cut[i].end) << "share " << i;
        next = cut[i].end;
    }
    EXPECT_EQ(next, count);

    const uint64_t each = cut[0].size();
    const uint64_t even = count / shares + (count % shares != 0 ? 1 : 0);
    EXPECT_LT(each, even + unit) << "more for one adapter than the unit asks for";
    bool last_seen = false;
    for (const Range &share : cut) {
        if (share.size() == 0) continue;
        EXPECT_FALSE(last_seen) << "a share after the one that is not whole";
        EXPECT_EQ(share.begin % unit, 0U);
        EXPECT_LE(share.size(), each);
        if (share.end == count)
            last_seen = true;
        else
            EXPECT_EQ(share.size(), each);
    }
}

TEST(Sharding, AnyCutIsWhole)
{
    for (uint64_t seed = 0; seed < 20000 && !testing::Test::HasFailure(); ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const uint64_t count = random() >> (1 + random() % 63); // every magnitude is as likely
        const uint64_t shares = 1 + random() % 8;
        const std::array<uint64_t, 4> units = {1, share_alignment, 4096, 1 + random() % (1 << 20)};
        check_shares(count, shares, units.at(random() % units.size()));
    }
}

TEST(Sharding, CutsAtTheEdgesAreWhole)
{
    constexpr uint64_t five_gib = uint64_t{5} << 30;
    for (const uint64_t count :
         {uint64_t{0}, uint64_t{1}, uint64_t{63}, uint64_t{64}, uint64_t{65}, uint64_t{16385}, (uint64_t{1} << 32) - 1,
          uint64_t{1} << 32, five_gib, five_gib + 1, most_count - 64, most_count - 1, most_count})
        for (uint64_t shares = 1; shares <= 8; ++shares)
            for (const uint64_t unit : {uint64_t{1}, share_alignment, uint64_t{4096}})
                check_shares(count, shares, unit);
}

TEST(Sharding, LastBytesAreNotLost)
{
    EXPECT_EQ(share_of(16385, 2, 0, share_alignment), (Range{0, 8256}));
    EXPECT_EQ(share_of(16385, 2, 1, share_alignment), (Range{8256, 16385}));
}

TEST(Sharding, FewBytesLeaveSharesEmpty)
{
    EXPECT_EQ(share_of(1, 4, 0, share_alignment), (Range{0, 1}));
    for (uint64_t i = 1; i < 4; ++i)
        EXPECT_EQ(share_of(1, 4, i, share_alignment), (Range{1, 1}));
    for (uint64_t i = 0; i < 4; ++i)
        EXPECT_EQ(share_of(0, 4, i, share_alignment).size(), 0U);
}

TEST(Sharding, LengthsAre64Bit)
{
    constexpr uint64_t quarter = (uint64_t{5} << 30) / 4;
    for (uint64_t i = 0; i < 4; ++i)
        EXPECT_EQ(share_of(uint64_t{5} << 30, 4, i, share_alignment), (Range{i * quarter, (i + 1) * quarter}));
}

TEST(Sharding, ImmediatesOfATransfer)
{
    struct Row {
        Transfer transfer;
        uint64_t count, nics, immediates;
    };
    constexpr std::array table = {
        Row{Transfer::single_write, 1, 1, 1}, // bytes do not matter, but for the adapters they are cut over
        Row{Transfer::single_write, 1, 2, 2},
        Row{Transfer::single_write, 0, 4, 4},
        Row{Transfer::single_write, 1000, 4, 4},
        Row{Transfer::paged_writes, 0, 4, 0},
        Row{Transfer::paged_writes, 1, 4, 1},
        Row{Transfer::paged_writes, 1000, 1, 1000},
        Row{Transfer::paged_writes, 1000, 3, 1000},
        Row{Transfer::scatter, 0, 2, 0},
        Row{Transfer::scatter, 1, 2, 1},
        Row{Transfer::scatter, 7, 4, 7},
        Row{Transfer::barrier, 0, 2, 0},
        Row{Transfer::barrier, 1, 4, 1},
        Row{Transfer::barrier, 7, 4, 7},
        Row{Transfer::paged_writes, uint64_t{1} << 40, 4, uint64_t{1} << 40},
    };
    for (const Row &row : table)
        EXPECT_EQ(imm_count(row.transfer, row.count, row.nics), row.immediates)
            << "transfer " << static_cast<int>(row.transfer) << ", count " << row.count << ", nics " << row.nics;
}

TEST(Sharding, TargetsTakeTurns)
{
    for (uint64_t seed = 0; seed < 1000 && !testing::Test::HasFailure(); ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const uint64_t nics = 1 + random() % 4;
        const uint64_t first = random() >> 1;
        const uint64_t targets = random() % 100;
        std::vector<uint64_t> load(nics);
        for (uint64_t i = 0; i < targets; ++i) {
            const uint64_t nic = nic_of_target(i, first, nics);
            ASSERT_LT(nic, nics);
            ++load[nic];
        }
        const auto [least, most] = std::ranges::minmax(load);
        EXPECT_LE(most - least, 1U);
        EXPECT_EQ(nic_of_target(0, first, nics), first % nics);
    }
}

} // namespace transfer_engine
