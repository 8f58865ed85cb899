// verbs_adapter.hpp: an opened adapter of libibverbs: device, port and GID, the queues that all its peers share, and
// the datagrams by which it and its peers find each other (T13).
#pragma once

#include "transfer_engine.hpp"

#include <future>
#include <infiniband/verbs.h>
#include <map>

namespace transfer_engine
{

// Owners of what libibverbs hands out. Members are destroyed last to first, so what others use is declared first.
template <auto destroy> struct Destroy {
    template <typename Thing> void operator()(Thing *thing) const { destroy(thing); }
};
template <typename Thing, auto destroy> using Owned = std::unique_ptr<Thing, Destroy<destroy>>;
using DeviceContext = Owned<ibv_context, ibv_close_device>;
using ProtectionDomain = Owned<ibv_pd, ibv_dealloc_pd>;
using MemoryRegion = Owned<ibv_mr, ibv_dereg_mr>;
using CompletionQueue = Owned<ibv_cq, ibv_destroy_cq>;
using SharedReceives = Owned<ibv_srq, ibv_destroy_srq>;
using AddressHandle = Owned<ibv_ah, ibv_destroy_ah>;
using QueuePair = Owned<ibv_qp, ibv_destroy_qp>;

// `error`: an errno.
Status verbs_failed(const std::string &call, int error);
uint64_t random_number(); // not 0

// What a NetAddr says: the adapter, and its queue pair for datagrams.
struct VerbsAddress {
    ibv_gid gid{};
    uint16_t lid = 0; // 0 on Ethernet
    uint32_t queue_pair = 0;
    uint32_t qkey = 0;
};
NetAddr net_addr_of(const VerbsAddress &address);
Status parse(const NetAddr &net, VerbsAddress *address);

// A work request as its completion names it, by wr_id: of one that failed nothing else tells what it was.
struct RequestName {
    enum Kind : uint8_t { datagram, data, message, immediate };

    Kind kind = datagram;
    uint32_t number = 0;   // the peer's; of a receive: its slot
    uint32_t sequence = 0; // of a send to a peer: counts in its queue, modulo 2^24

    static constexpr uint32_t sequence_mask = (1 << 24) - 1;

    uint64_t id() const { return uint64_t{number} << 32 | uint64_t{kind} << 24 | (sequence & sequence_mask); }
    static RequestName of(uint64_t id)
    {
        return {.kind = static_cast<Kind>(id >> 24 & 3),
                .number = static_cast<uint32_t>(id >> 32),
                .sequence = static_cast<uint32_t>(id & sequence_mask)};
    }
};

struct VerbsAdapter {
    DeviceContext context;
    ibv_device_attr limits{};
    ibv_port_attr port{};
    uint8_t port_number = 0;
    uint8_t gid_index = 0;
    ibv_gid gid{};
    ProtectionDomain pd;
    CompletionQueue sends, receives;     // apart: a failed completion does not say which it is
    SharedReceives immediates, messages; // of all peers
    // Their depths: what may be posted, for there is a place for the completion of each.
    uint32_t most_sends = 0, most_immediates = 0, most_messages = 0, most_datagrams = 0;

    // gid_index -1: the first of RoCE v2 that is routable.
    Status open(const std::string &device, int wanted_gid);

    // Any thread.
    Status register_memory(void *start, uint64_t length, int device, MemoryRegion *region) const;

    uint8_t rd_atomic() const; // reads under way that it can begin, and serve
    ibv_ah_attr path_to(const VerbsAddress &place) const;

private:
    Status open_device(const std::string &device);
    Status choose_port();
    Status choose_gid(int wanted);
    Status make_queues();
};

// The unreliable datagram queue pair (UD). What it sends or is sent may be lost. A datagram that cannot leave breaks it
// (on SoftRoCE: this side's link is down); when all that was posted has come back it begins anew, with the same number.
class Datagrams
{
public:
    static constexpr uint32_t under_way = 64; // sent, at most
    static constexpr size_t longest = 256;    // bytes of one that is sent

    Status open(const VerbsAdapter &opened);
    const VerbsAddress &address() const { return own; }

    // Lost, as datagrams may be, when too many are under way and as long as the way to a new host is looked for.
    void send(const VerbsAddress &place, std::span<const uint8_t> bytes);
    // Looks for the way anew next time: the host may have another MAC address by now.
    void forget_path(const VerbsAddress &place);

    void sent(bool ok); // for each completion
    // What has arrived; empty when it failed. Valid until give_back() of the same completion.
    std::span<const uint8_t> received(const ibv_wc &completion) const;
    void give_back(const ibv_wc &completion);

private:
    using Host = std::pair<std::array<uint8_t, sizeof(ibv_gid)>, uint16_t>; // GID and LID

    struct Path {
        AddressHandle handle;
        std::future<AddressHandle> coming; // valid while it is looked for
    };

    ibv_ah *path_to(const VerbsAddress &place);
    int begin(); // from RESET on; 0, or the error number
    void break_off();
    void begin_anew_if_empty();
    void post_receive(uint32_t slot);

    const VerbsAdapter *adapter = nullptr;
    VerbsAddress own;
    std::vector<uint8_t> memory; // of those received, then of those sent
    MemoryRegion region;
    std::map<Host, Path> paths; // few: they stay
    QueuePair pair;
    size_t slots = 0, room = 0;    // received at a time; bytes of one
    uint64_t posted = 0, done = 0; // sent, ever
    size_t receiving = 0;          // receives that are posted
    bool broken = false;
};

} // namespace transfer_engine
