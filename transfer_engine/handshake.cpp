// handshake.cpp: see handshake.hpp.
#include "handshake.hpp"

#include "wire.hpp"

#include <algorithm>

namespace transfer_engine
{

constexpr uint32_t most_24_bits = (1 << 24) - 1;
constexpr uint8_t most_mtu = 5; // IBV_MTU_4096

static void write(Writer *writer, const QueuePairNumber &pair)
{
    writer->number(pair.number);
    writer->number(pair.psn);
}

static QueuePairNumber read_queue_pair(Reader *reader)
{
    QueuePairNumber pair;
    pair.number = reader->number<uint32_t>();
    pair.psn = reader->number<uint32_t>();
    if (pair.number > most_24_bits || pair.psn > most_24_bits)
        reader->refuse("queue pair " + std::to_string(pair.number) + ", packet " + std::to_string(pair.psn) +
                       ": more than 24 bits");
    return pair;
}

std::vector<uint8_t> encode(const Handshake &message)
{
    Writer writer(handshake_magic);
    writer.number(static_cast<uint8_t>(message.kind));
    writer.address(message.from);
    writer.number(message.incarnation);
    writer.number(message.attempt);
    writer.number(message.peer_incarnation);
    writer.number(message.peer_attempt);
    write(&writer, message.data);
    write(&writer, message.messages);
    writer.number(message.mtu);
    writer.number(message.rd_atomic);
    return writer.end();
}

// Kind and sender, whatever version the message is of: its own bytes with this version in their place.
static bool decode_head(std::span<const uint8_t> bytes, uint16_t *version, Handshake *head)
{
    constexpr size_t version_at = handshake_magic.size(), head_at = version_at + sizeof(uint16_t);
    if (bytes.size() < head_at + 2 || !std::ranges::equal(bytes.first(version_at), handshake_magic)) return false;
    const size_t length = bytes[head_at + 1];
    const auto address = bytes.subspan(head_at + 2);
    if (length > most_address_bytes || length > address.size()) return false;
    *version = static_cast<uint16_t>(bytes[version_at] | bytes[version_at + 1] << 8);
    head->kind = static_cast<Handshake::Kind>(bytes[head_at]);
    head->from.length = static_cast<uint8_t>(length);
    std::ranges::copy(address.first(length), head->from.bytes.begin());
    return true;
}

Status decode(std::span<const uint8_t> bytes, Handshake *message)
{
    Reader reader(bytes, handshake_magic);
    Handshake read;
    const auto kind = reader.number<uint8_t>();
    if (kind != Handshake::hello && kind != Handshake::reply) reader.refuse("kind " + std::to_string(kind));
    read.kind = static_cast<Handshake::Kind>(kind);
    read.from = reader.address();
    read.incarnation = reader.number<uint64_t>();
    read.attempt = reader.number<uint64_t>();
    if (read.incarnation == 0 || read.attempt == 0) reader.refuse("incarnation or attempt 0");
    read.peer_incarnation = reader.number<uint64_t>();
    read.peer_attempt = reader.number<uint64_t>();
    read.data = read_queue_pair(&reader);
    read.messages = read_queue_pair(&reader);
    read.mtu = reader.number<uint8_t>();
    if (read.mtu < 1 || read.mtu > most_mtu) reader.refuse("MTU " + std::to_string(read.mtu) + ", must be 1 to 5");
    read.rd_atomic = reader.number<uint8_t>();
    Status status = reader.end("Handshake");

    Handshake head;
    uint16_t version = 0;
    if (status.ok()) {
        *message = read;
    } else if (decode_head(bytes, &version, &head) && version != wire_version) {
        message->kind = head.kind;
        message->from = head.from;
        status.code = Code::unsupported;
    }
    return status;
}

Dialogue::Dialogue(uint64_t incarnation, uint64_t attempt, Clock::time_point now)
    : own_incarnation(incarnation), own_attempt(attempt), next_hello(now), give_up(now + patience)
{
}

Dialogue::Step Dialogue::hear(const Handshake &message)
{
    const bool to_this = message.peer_incarnation == own_incarnation && message.peer_attempt == own_attempt;
    // To one who had this address before.
    if (message.peer_incarnation != 0 && message.peer_incarnation != own_incarnation) return Step::ignore;

    if (peer_attempt == 0) {
        // It is connected to an attempt before this one; the next hello tells it better.
        if (message.peer_attempt != 0 && !to_this) return Step::ignore;
        peer_incarnation = message.incarnation;
        peer_attempt = message.attempt;
        peer_listens = to_this;
        return Step::connect;
    }
    if (message.incarnation != peer_incarnation) return Step::replaced;
    if (message.attempt > peer_attempt) return Step::replaced;
    if (message.attempt < peer_attempt) return Step::ignore; // it has been under way for long
    peer_listens = peer_listens || to_this;
    return message.kind == Handshake::hello ? Step::answer : Step::ignore;
}

Handshake Dialogue::next(Clock::time_point now)
{
    next_hello = now + interval;
    interval = std::min<Clock::duration>(2 * interval, longest_interval);
    Handshake message;
    message.kind = ready() ? Handshake::reply : Handshake::hello;
    message.incarnation = own_incarnation;
    message.attempt = own_attempt;
    message.peer_incarnation = peer_incarnation;
    message.peer_attempt = peer_attempt;
    return message;
}

} // namespace transfer_engine
