// domain.hpp: what one adapter (NIC) can do, whatever it is driven by. The backends (verbs_domain.cpp,
// ofi_domain.cpp, and the tests' own) implement this; domain_group.cpp uses it.
//
// Only register_memory and deregister_memory may be called by any thread; all else by the group's worker.
// No function waits: what cannot be done now says so, and is tried again.
#pragma once

#include "transfer_engine.hpp"

namespace transfer_engine
{

enum class Operation : uint8_t { write, read, send };

// The keys of a region, for one adapter.
struct MemoryKeys {
    uint64_t local = 0;  // the backend's own: WorkRequest::local_key
    uint64_t remote = 0; // RemoteKey::key
    uint64_t base = 0;   // RemoteKey::base
    uint64_t handle = 0; // the backend's own, to deregister by
};

// One work request to one peer. Invariant: length <= Domain::longest_request().
struct WorkRequest {
    Operation operation = Operation::write;
    bool has_imm = false; // write: the peer gets `imm`, after the bytes
    uint32_t imm = 0;     // in the byte order of this machine, at both ends
    uint32_t length = 0;  // 0: `local` and `remote` still name registered memory (T12)
    void *local = nullptr;
    uint64_t local_key = 0;
    uint64_t remote = 0; // RemoteKey::base + offset
    uint64_t remote_key = 0;
    uint64_t context = 0; // comes back in its Event
};

struct Event {
    enum Kind : uint8_t {
        retired,   // a work request: `context`, `status` (a message with static lifetime: `why`)
        immediate, // a peer's write has arrived, its bytes are visible: `imm`
        received,  // a message: `context` of its receive, `length`. Code not ok: it is lost, the buffer is free
        peer_down  // `peer`: the connection is lost. All its work requests have retired before this; its
                   // number is void from here on
    };
    Kind kind = retired;
    Code code = Code::ok;
    uint32_t peer = 0;
    uint32_t imm = 0;
    uint64_t context = 0;
    uint64_t length = 0;
    const char *why = ""; // when not ok; static lifetime
};

class Domain
{
public:
    Domain() = default;
    virtual ~Domain() = default; // everything under way is given up; nothing is told of it
    Domain(const Domain &) = delete;
    Domain &operator=(const Domain &) = delete;

    virtual NetAddr address() const = 0;
    virtual uint64_t longest_request() const = 0; // bytes of one work request
    // "0000:3b:00.0"; "" when it is no PCI device.
    virtual std::string pci_address() const { return {}; }

    // For local use, and for peers to read and write. Any thread.
    virtual Status register_memory(void *start, uint64_t length, int device, MemoryKeys *keys) = 0;
    virtual void deregister_memory(const MemoryKeys &keys) = 0;

    // A number for the peer at this address, the same as long as it is not down. Begins to connect, where the
    // transport has connections.
    virtual Status find_peer(const NetAddr &address, uint32_t *peer) = 0;

    // Posts the first so many of the requests to a peer and returns how many: fewer when its queue is full or its
    // connection does not stand yet. Each that is taken brings one Event::retired, failed ones too; their order
    // is any.
    virtual size_t post(uint32_t peer, std::span<const WorkRequest> requests) = 0;

    // A buffer for one message. False when there is no room for more.
    virtual bool post_receive(void *start, uint64_t length, uint64_t local_key, uint64_t context) = 0;

    // Moves everything along (connections, deadlines of its own, completions); fills events from the first on and
    // returns how many.
    virtual size_t poll(std::span<Event> events) = 0;

    // Gives the connection to a peer up: what is posted to it retires soon, then comes Event::peer_down.
    virtual void abort(uint32_t peer) = 0;
};

} // namespace transfer_engine
