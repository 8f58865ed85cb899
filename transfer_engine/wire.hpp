// wire.hpp: what goes from process to process, as bytes of a fixed layout (T3). Everything that comes in is checked
// for its length first, then magic and version, then each field.
#pragma once

#include "transfer_engine.hpp"

#include <concepts>
#include <string_view>
#include <utility>

namespace transfer_engine
{

constexpr uint16_t wire_version = 1;

// Little-endian throughout. Every one of them begins with
//   magic    4 bytes: "TENA" (NetAddr), "TEMR" (MrDesc)
//   version  u16
// and goes on with its fields in their order, and nothing after them:
//   NetAddr  u8 length, 0 to 95; so many bytes
//   MrDesc   u64 ptr; u64 length; u32 nics, 1 to 4; so many times NetAddr's fields, u64 base, u64 key.
//            ptr + length and base + length are less than 2^64
constexpr std::string_view address_magic = "TENA";
constexpr std::string_view region_magic = "TEMR";

// Makes one of them.
class Writer
{
public:
    explicit Writer(std::string_view magic);

    template <std::unsigned_integral Number> void number(Number value)
    {
        for (size_t i = 0; i < sizeof value; ++i)
            bytes.push_back(static_cast<uint8_t>(uint64_t{value} >> (8 * i)));
    }
    void address(const NetAddr &address);
    std::vector<uint8_t> end() { return std::move(bytes); }

private:
    std::vector<uint8_t> bytes; // so far
};

// Takes one of them apart, from the front. After the first thing that is missing or wrong it gives zeros only; end()
// tells what that was.
class Reader
{
public:
    Reader(std::span<const uint8_t> all, std::string_view magic);

    template <std::unsigned_integral Number> Number number()
    {
        uint64_t value = 0;
        unsigned shift = 0;
        for (const uint8_t byte : take(sizeof(Number))) {
            value |= uint64_t{byte} << shift;
            shift += 8;
        }
        return static_cast<Number>(value);
    }
    NetAddr address();
    // The next `length` bytes, or none when there are fewer.
    std::span<const uint8_t> take(size_t length);
    // Says that what was read last is wrong, unless something was before.
    void refuse(const std::string &reason);
    // Invalid when anything was wrong or bytes are left over. `what`: MrDesc, ...
    Status end(const std::string &what);

private:
    std::span<const uint8_t> bytes; // all
    size_t taken = 0;
    std::string wrong; // empty: nothing
};

} // namespace transfer_engine
