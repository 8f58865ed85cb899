// Feeds parse() with bytes of libFuzzer's choice: what parses has to come back as the same bytes, what does not has
// to leave the value alone. Each input is tried as it is and behind the magic.
//
// Build:  clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/wire_fuzzer.cpp wire.cpp
#include "wire.hpp"

#include <algorithm>
#include <cstdlib>

using namespace transfer_engine;

template <typename Value> static void check(std::span<const uint8_t> bytes)
{
    Value value;
    const Status status = parse(bytes, &value);
    if (status.ok()) {
        const std::vector<uint8_t> again = serialize(value);
        if (!std::ranges::equal(again, bytes)) abort();
    } else if (value != Value{} || status.code != Code::invalid || status.message.empty()) {
        abort();
    }
}

template <typename Value> static void check_behind_magic(std::string_view magic, std::span<const uint8_t> rest)
{
    std::vector<uint8_t> bytes(magic.begin(), magic.end());
    bytes.insert(bytes.end(), rest.begin(), rest.end());
    check<Value>(bytes);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const std::span bytes(data, size);
    check<NetAddr>(bytes);
    check<MrDesc>(bytes);
    check_behind_magic<NetAddr>(address_magic, bytes);
    check_behind_magic<MrDesc>(region_magic, bytes);
    return 0;
}
