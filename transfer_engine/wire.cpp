// wire.cpp: see wire.hpp.
#include "wire.hpp"

#include <algorithm>

namespace transfer_engine
{

Writer::Writer(std::string_view magic) : bytes(magic.begin(), magic.end()) { number(wire_version); }

// One that says it is longer than it can be is written as such, for the reader to refuse.
void Writer::address(const NetAddr &address)
{
    number(address.length);
    const auto meant = std::span(address.bytes).first(std::min<size_t>(address.length, most_address_bytes));
    bytes.insert(bytes.end(), meant.begin(), meant.end());
}

Reader::Reader(std::span<const uint8_t> all, std::string_view magic) : bytes(all)
{
    if (!std::ranges::equal(take(magic.size()), magic)) refuse("does not begin with " + std::string(magic));
    const auto version = number<uint16_t>();
    if (version != wire_version)
        refuse("version " + std::to_string(version) + " there, " + std::to_string(wire_version) + " here");
}

NetAddr Reader::address()
{
    NetAddr address;
    address.length = number<uint8_t>();
    if (address.length > most_address_bytes)
        refuse("address of " + std::to_string(address.length) + " bytes, at most " +
               std::to_string(most_address_bytes));
    std::ranges::copy(take(address.length), address.bytes.begin());
    return address;
}

std::span<const uint8_t> Reader::take(size_t length)
{
    const size_t left = bytes.size() - taken;
    if (length > left)
        refuse("ends too early: " + std::to_string(length) + " bytes wanted at " + std::to_string(taken) + ", " +
               std::to_string(left) + " left");
    if (!wrong.empty()) return {};
    taken += length;
    return bytes.subspan(taken - length, length);
}

void Reader::refuse(const std::string &reason)
{
    if (wrong.empty()) wrong = reason;
}

Status Reader::end(const std::string &what)
{
    if (taken != bytes.size()) refuse(std::to_string(bytes.size() - taken) + " bytes too many");
    if (wrong.empty()) return {};
    return {Code::invalid, false, "parse(" + what + ", " + std::to_string(bytes.size()) + " bytes): " + wrong};
}

std::vector<uint8_t> serialize(const NetAddr &address)
{
    Writer writer(address_magic);
    writer.address(address);
    return writer.end();
}

std::vector<uint8_t> serialize(const MrDesc &region)
{
    Writer writer(region_magic);
    writer.number(region.ptr);
    writer.number(region.length);
    writer.number(region.nics);
    for (const RemoteKey &each : std::span(region.rkeys).first(std::min<size_t>(region.nics, most_nics))) {
        writer.address(each.address);
        writer.number(each.base);
        writer.number(each.key);
    }
    return writer.end();
}

Status parse(std::span<const uint8_t> bytes, NetAddr *value)
{
    Reader reader(bytes, address_magic);
    const NetAddr address = reader.address();
    Status status = reader.end("NetAddr");
    if (status.ok()) *value = address;
    return status;
}

Status parse(std::span<const uint8_t> bytes, MrDesc *value)
{
    Reader reader(bytes, region_magic);
    MrDesc region;
    region.ptr = reader.number<uint64_t>();
    region.length = reader.number<uint64_t>();
    if (region.length > UINT64_MAX - region.ptr)
        reader.refuse("ptr " + std::to_string(region.ptr) + " + length " + std::to_string(region.length) +
                      " is beyond 64 bits");
    region.nics = reader.number<uint32_t>();
    if (region.nics < 1 || region.nics > most_nics)
        reader.refuse(std::to_string(region.nics) + " adapters, must be 1 to " + std::to_string(most_nics));
    for (RemoteKey &each : std::span(region.rkeys).first(std::min<size_t>(region.nics, most_nics))) {
        each.address = reader.address();
        each.base = reader.number<uint64_t>();
        each.key = reader.number<uint64_t>();
        if (region.length > UINT64_MAX - each.base)
            reader.refuse("base " + std::to_string(each.base) + " + length " + std::to_string(region.length) +
                          " is beyond 64 bits");
    }
    Status status = reader.end("MrDesc");
    if (status.ok()) *value = region;
    return status;
}

} // namespace transfer_engine
