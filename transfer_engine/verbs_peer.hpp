// verbs_peer.hpp: the connection to one peer by libibverbs (T13): two reliable queue pairs (RC), one for writes and
// reads, one for messages, because immediates and messages both consume receives in the order of posting.
#pragma once

#include "domain.hpp"
#include "handshake.hpp"
#include "verbs_adapter.hpp"

namespace transfer_engine
{

// One RC queue pair, and what is posted to it.
// Invariant: under_way() <= its depth, a power of two <= 2^23, so that sequences tell positions apart.
class VerbsQueue
{
public:
    VerbsQueue() = default;
    VerbsQueue(const VerbsQueue &) = delete; // its templates point at each other
    VerbsQueue &operator=(const VerbsQueue &) = delete;

    // Its receives are those of `receives`. Listens to nothing yet (INIT).
    Status open(const VerbsAdapter &adapter, ibv_srq *receives, RequestName::Kind kind, uint32_t peer, uint32_t most);
    // Receives from then on, and sends (RTR, RTS).
    Status connect(ibv_ah_attr path, const QueuePairNumber &remote, ibv_mtu mtu, uint8_t rd_atomic);
    // Moves it to the error state: what is posted retires with an error, in the queue of completions.
    void break_off();
    // To be destroyed: from then on the adapter uses no memory of what was posted. Its completions may be lost.
    QueuePair take_away() { return std::move(pair); }

    static constexpr size_t longest_chain = 4; // T13

    // Posts the first of the requests as one chain, `most` at most; how many. *error: of ibv_post_send.
    size_t post(std::span<const WorkRequest> requests, size_t most, int *error);
    // How many retire with the completion of this sequence: itself and all before it, which were not signalled.
    uint32_t retiring(uint32_t sequence) const;
    // The context of the oldest that has not retired; it has now. Invariant: under_way() > 0.
    uint64_t retire_oldest() { return contexts[retired++ & (depth - 1)]; }
    uint32_t under_way() const { return posted - retired; }

    QueuePairNumber number() const { return {.number = pair_number, .psn = psn}; }
    const ibv_qp *get() const { return pair.get(); }

private:
    QueuePair pair;
    RequestName name; // of the next
    uint32_t pair_number = 0, psn = 0, depth = 0;
    uint32_t posted = 0, retired = 0; // ever, modulo 2^32
    std::vector<uint64_t> contexts;   // of what is under way, a ring of `depth`
    // The templates: what is the same in every request is filled once.
    std::array<ibv_send_wr, longest_chain> chain{};
    std::array<ibv_sge, longest_chain> elements{};
};

// The connection to a peer, from its first hello until its last work request has retired.
struct VerbsPeer {
    using Clock = Dialogue::Clock;

    const NetAddr address;
    const VerbsAddress place; // the same, taken apart
    const uint32_t number;    // never used again
    Dialogue dialogue;
    VerbsQueue data, messages;

    bool broken = false;
    Code code = Code::ok; // why it is broken
    const char *why = "";
    Clock::time_point since;   // when it broke
    unsigned quiet_queues = 0; // that take no more receives (IBV_EVENT_QP_LAST_WQE_REACHED)
    bool watched = false;      // in VerbsDomain's list of those that time matters to
    std::future<void> closing; // valid from close() on

    VerbsPeer(const NetAddr &net_address, const VerbsAddress &parsed, uint32_t peer_number, const Dialogue &begun)
        : address(net_address), place(parsed), number(peer_number), dialogue(begun)
    {
    }

    bool ready() const { return !broken && dialogue.ready(); }
    bool owns(const ibv_qp *pair) const { return pair == data.get() || pair == messages.get(); }
    uint32_t under_way() const { return data.under_way() + messages.under_way(); }
    VerbsQueue &queue_of(RequestName::Kind kind) { return kind == RequestName::data ? data : messages; }

    Status open(const VerbsAdapter &adapter);
    // Connects the queue pairs to those of its message.
    Status connect(const VerbsAdapter &adapter, const Handshake &message);
    // Posts a chain of the first of the requests to the queue that they are for, as VerbsQueue::post().
    size_t post(std::span<const WorkRequest> requests, size_t most, int *error);
    // Both queue pairs take nothing any more, and all there was to tell of them has been told.
    bool drained(Clock::time_point now) const;
    // Destroys both queue pairs, on a thread of its own: SoftRoCE waits there for frames that its interface still has,
    // which is for ever on a link that is down.
    void close();
};

} // namespace transfer_engine
