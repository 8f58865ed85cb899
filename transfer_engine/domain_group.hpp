// domain_group.hpp: one to four adapters as one. Cuts what is submitted into work requests, keeps every peer's queue
// filled, and tells once when all of a submission's work requests have retired.
//
// All of it belongs to the worker's thread.
#pragma once

#include "region.hpp"
#include "sharding.hpp"

#include <unordered_map>

namespace transfer_engine
{

using Clock = std::chrono::steady_clock;

struct Submission;
struct Peer;

// What one adapter does for one peer of a submission: work requests next..end-1 are to be posted.
struct Share {
    Submission *submission = nullptr;
    Peer *peer = nullptr;
    size_t nic = 0;
    uint64_t next = 0, end = 0;
    Range bytes{};          // of a write or read that is not paged
    size_t target = 0;      // of a scatter or barrier
    uint32_t in_flight = 0; // posted, not retired
    bool queued = false;
    Share *before = nullptr, *after = nullptr; // in the peer's queue
};

// An operation from its submission to its end. Made once and used again: after warm-up nothing is allocated for it.
struct Submission {
    enum Kind : uint8_t { single, paged, scatter, barrier, send };
    Kind kind = single;
    Operation operation = Operation::write;
    std::optional<uint32_t> imm;
    Region *region = nullptr; // the local memory
    uint64_t length = 0;      // of a single write or read, a page, a message
    uint64_t local_offset = 0, remote_offset = 0;
    MrDesc remote;                   // single, paged
    Pages local_pages, remote_pages; // paged
    std::vector<ScatterDst> slices;  // scatter
    std::vector<MrDesc> targets;     // barrier
    NetAddr to;                      // send
    OnDone done;
    Clock::time_point deadline;

    // How far it is.
    std::vector<Share> shares;
    size_t queued = 0;      // shares in a peer's queue
    uint64_t in_flight = 0; // work requests
    uint64_t bytes = 0;     // to be moved in all
    bool posted = false;    // any work request
    bool aborted = false;
    Status status;
    Submission *before = nullptr, *after = nullptr; // among those under way
};

// The ways of an adapter to a peer's adapter, and who waits for it.
struct Peer {
    NetAddr address;
    size_t nic = 0;
    uint32_t number = 0; // the domain's
    Share *first = nullptr, *last = nullptr;
    bool active = false; // among those with a queue
};

// What the group tells its worker.
class GroupEvents
{
public:
    virtual ~GroupEvents() = default;
    virtual void ended(Submission *submission) = 0; // its memory is free, its status says how
    virtual void immediate(uint32_t imm) = 0;
    virtual void received(uint64_t context, uint64_t length, Code code) = 0;
    virtual void peer_is_down(const NetAddr &address, const Status &status) = 0;
};

class DomainGroup
{
public:
    DomainGroup(std::vector<std::unique_ptr<Domain>> nics, GroupEvents *listener, std::chrono::nanoseconds patience);
    ~DomainGroup();
    DomainGroup(const DomainGroup &) = delete;
    DomainGroup &operator=(const DomainGroup &) = delete;

    size_t nics() const { return domains.size(); }
    Domain &nic(size_t index) { return *domains[index]; }

    // Takes a submission: checks its pages, cuts it and posts what there is room for.
    void start(Submission *submission);
    // Begins to connect to a peer's first adapter.
    Status connect(const NetAddr &address)
    {
        Peer *unused = nullptr;
        return find_peer(0, address, &unused);
    }
    // Posts what waits and there is room for; takes what has ended or come. False when there was nothing to do.
    bool progress();
    // Ends what is past its deadline; gives up connections that keep such for too long.
    void check_deadlines(Clock::time_point now);
    // Ends all that is under way as check_deadlines does at its deadline, with this status.
    void cancel_all(const Status &status);
    // Closes the adapters, whatever they do; what they still had has ended then.
    void close();
    bool idle() const { return under_way == nullptr; }
    // Whether nothing more is to be expected: all that is under way should have ended long ago, its connections given
    // up.
    bool is_deaf(Clock::time_point now) const;

    std::atomic<uint64_t> work_requests{0}, work_requests_failed{0};

private:
    struct HashAddress {
        size_t operator()(const NetAddr &address) const;
    };

    Status find_peer(size_t nic, const NetAddr &address, Peer **peer);
    Status cut(Submission *submission);
    Status add_share(Submission *submission, const NetAddr &peer, Share share);
    uint64_t pieces(size_t nic, uint64_t length, bool imm) const;
    WorkRequest work_request(const Share &share, uint64_t index) const;
    bool post(Peer *peer);
    bool post_to_all();
    void enqueue(Share *share);
    static void dequeue(Share *share);
    static void fail(Submission *submission, Status status);
    void end_if_over(Submission *submission);
    void take(size_t nic, const Event &event);
    void retire(const Event &event);
    void lose_peer(size_t nic, const Event &event);
    void leave(Submission *submission);

    std::vector<std::unique_ptr<Domain>> domains;
    GroupEvents *events;
    std::chrono::nanoseconds abort_after;
    std::vector<std::unordered_map<NetAddr, std::unique_ptr<Peer>, HashAddress>> peers; // by adapter
    std::vector<Peer *> active;                                                         // whose queues are not empty
    size_t turn = 0;                                                                    // whose turn it is among them
    size_t first_nic = 0;            // of the next scatter or barrier
    Submission *under_way = nullptr; // the last that was started
};

} // namespace transfer_engine
