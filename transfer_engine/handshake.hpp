// handshake.hpp: how two adapters agree on a pair of connections, by datagrams that may be lost, doubled, late or out
// of order. Pure: bytes and times go in, decisions come out; verbs_domain.cpp carries them out.
//
// Each side makes its queue pairs first and tells their numbers, so that it does not matter who begins, or whether both
// do at a time: there is one set of queue pairs on each side, whoever asks.
//   hello  here are my queue pairs; I am not ready yet, answer me. Sent again until the sender is ready
//   reply  the same from a side that is ready. Nobody answers it
// Both say to which of the receiver's attempts the sender's queue pairs are connected already, if to any. A side is
// ready, and may post, when its own are connected and the peer has said that the peer's are: nothing it sends can find
// queue pairs that do not listen yet, which would cost a retransmit timeout.
#pragma once

#include "transfer_engine.hpp"

namespace transfer_engine
{

constexpr std::string_view handshake_magic = "TEHS";

// As the peer connects to it. Both of 24 bits.
struct QueuePairNumber {
    uint32_t number = 0;
    uint32_t psn = 0; // of the first packet that it sends

    bool operator==(const QueuePairNumber &) const = default;
};

struct Handshake {
    enum Kind : uint8_t { hello = 1, reply = 2 };

    Kind kind = hello;
    NetAddr from;             // the sender
    uint64_t incarnation = 0; // of the sender: random, drawn when its adapter was opened; never 0
    uint64_t attempt = 0;     // of the sender: counts the connections it has made, from 1
    uint64_t peer_incarnation = 0, peer_attempt = 0; // what the sender's queue pairs are connected to; 0: nothing yet
    QueuePairNumber data;                            // for writes and reads
    QueuePairNumber messages;                        // for sends
    uint8_t mtu = 0;                                 // of the sender's port: an ibv_mtu, 1 to 5
    uint8_t rd_atomic = 0;                           // reads under way that the sender's adapter can begin, and serve

    bool operator==(const Handshake &) const = default;
};

// As wire.hpp: magic "TEHS", version, then in this order u8 kind, NetAddr, the four u64, each queue pair's u32 number
// and u32 psn, u8 mtu, u8 rd_atomic.
std::vector<uint8_t> encode(const Handshake &message);
// Invalid, and *message untouched, when the bytes are no handshake. Unsupported when they are one of another version:
// kind and from are set then, which stand at the same place in every version, so that the sender can be told.
Status decode(std::span<const uint8_t> bytes, Handshake *message);

// One side's part in it, for one attempt to connect to one peer.
class Dialogue
{
public:
    using Clock = std::chrono::steady_clock;

    static constexpr auto first_interval = std::chrono::milliseconds(20); // doubled each time
    static constexpr auto longest_interval = std::chrono::milliseconds(500);
    static constexpr auto patience = std::chrono::seconds(5);

    enum class Step : uint8_t {
        ignore,  // it is late, or tells nothing new
        answer,  // send what next() says
        connect, // connect the queue pairs to those of the message; then as `answer`
        replaced // the peer has given this connection up, or was started anew, and makes another
    };

    Dialogue(uint64_t incarnation, uint64_t attempt, Clock::time_point now);

    Step hear(const Handshake &message);
    // The message to send now, but for what a Dialogue does not know. The next hello is due an interval later.
    Handshake next(Clock::time_point now);

    bool ready() const { return peer_listens; }
    bool due(Clock::time_point now) const { return !peer_listens && now >= next_hello; }
    // Not ready, and the peer has had its time.
    bool late(Clock::time_point now) const { return !peer_listens && now >= give_up; }

private:
    uint64_t own_incarnation, own_attempt;
    uint64_t peer_incarnation = 0, peer_attempt = 0; // what the queue pairs are connected to
    bool peer_listens = false;                       // its queue pairs are connected to these
    Clock::time_point next_hello, give_up;
    Clock::duration interval = first_interval;
};

// A seam for tests: a message of which it says so is lost on its way. Null: none is.
inline bool (*loses_handshake)(const Handshake &message) = nullptr;

} // namespace transfer_engine
