// sharding.hpp: how a transfer is cut over the adapters of a group, and how many immediates that makes at the
// receiver. Pure; the one place that says so (T10).
#pragma once

#include <cstdint>

namespace transfer_engine
{

// Elements begin..end-1: bytes of a write, pages, or targets.
struct Range {
    uint64_t begin = 0, end = 0;

    uint64_t size() const { return end - begin; }
    bool operator==(const Range &) const = default;
};

constexpr uint64_t share_alignment = 64; // bytes: no two adapters touch one cache line of an aligned buffer

// The share of adapter `index` of `shares`. Together the shares are 0..count-1, in order, without gap or overlap; all
// but the last that is not empty have the same size, a multiple of `unit`. Invariant: count < 2^63.
constexpr Range share_of(uint64_t count, uint64_t shares, uint64_t index, uint64_t unit = 1)
{
    if (count == 0) return {};
    const uint64_t even = count / shares + (count % shares != 0 ? 1 : 0);
    const uint64_t each = (even + unit - 1) / unit * unit;
    const auto start = [=](uint64_t i) { return i > count / each ? count : i * each; };
    return {.begin = start(index), .end = start(index + 1)};
}

enum class Transfer : uint8_t { single_write, paged_writes, scatter, barrier };

// The immediates that one transfer with an immediate makes at one receiver: what it gives expect_imm_count().
//   single_write  one for each adapter, for an empty share as well (a write of no bytes)
//   paged_writes  one for each page
//   scatter       one for each target that is of this receiver
//   barrier       the same
// `count`: the pages, or the targets of this receiver.
constexpr uint64_t imm_count(Transfer transfer, uint64_t count, uint64_t nics)
{
    return transfer == Transfer::single_write ? nics : count;
}

// The adapter that serves target `index` of a scatter or barrier: they take turns, beginning with `first`.
constexpr uint64_t nic_of_target(uint64_t index, uint64_t first, uint64_t nics) { return (first + index) % nics; }

} // namespace transfer_engine
