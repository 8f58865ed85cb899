// ofi_domain.cpp: an adapter driven by libfabric (T12): messages and RMA on reliable datagrams (FI_EP_RDM), over
// whatever provider has them.
//
// A domain has two endpoints. The receiver has the address that peers know; all that they do ends there. The sender
// begins all that this side does. libfabric cannot take back what is posted to one peer: it can only close the
// endpoint. So, to give a peer up for good, the sender is closed and another one opened, while the receiver, its
// address, its receives and the immediates on their way to it stay as they are.
//
// What the providers of libfabric 1.17 do, from their source and from trying it with two processes:
//   tcp;ofi_rxm  connects by itself at the first post; until then, and while it cannot, every post gets FI_EAGAIN. When
//                the peer has ended, or has closed its endpoint, what is posted fails, mostly with FI_ECANCELED. It
//                does so, too, when the peer is shown a wrong key: it closes the connection. From a peer that is
//                stopped, nothing comes, ever. With FI_AV_REMOVE_CLEANUP=1 in the environment, removing a peer from the
//                address vector closes the connection to it, and what was posted fails; then other peers are not
//                disturbed. A message of up to 16 KiB is delivered when libfabric has it at the peer, in a receive or
//                not.
//   shm          never tells that a peer has ended, has been killed or is stopped, or that a key was wrong: what is
//                posted stays. Because requests complete in the order of their posts, those to all other peers stay
//                as well, until abort(). A peer that goes on after it was given up may still read what was written to
//                it from where it was. One that is killed inside of libfabric may leave a lock taken for which post()
//                then waits. A domain in the same process must not be closed while another one here uses it.
// fi_cancel() takes nothing back on these two and on efa but receives.
#include "ofi_adapter.hpp"

#include <rdma/fi_rma.h>

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

namespace transfer_engine
{
namespace
{

using Clock = std::chrono::steady_clock;

constexpr uint64_t longest = 1 << 30;                        // bytes of a request, whatever the provider allows
constexpr size_t batch = 32;                                 // completions read at once
constexpr size_t most_data_receives = 256;                   // FI_RX_CQ_DATA
constexpr auto abort_grace = std::chrono::milliseconds(100); // for what is posted to a peer that is given up
constexpr auto lost_grace = std::chrono::seconds(1);         // for what is posted to one whose connection is lost
constexpr auto connect_limit = std::chrono::seconds(4);      // for a peer that takes nothing
constexpr auto connect_pause = std::chrono::seconds(2);      // without a post to it: the limit begins anew

// Whether an error of a request says that the peer does not answer any more.
bool means_peer_down(int error)
{
    switch (error) {
    case FI_ECANCELED: // its connection was closed under it
    case FI_ENOTCONN:
    case FI_ECONNRESET:
    case FI_ECONNREFUSED:
    case FI_ECONNABORTED:
    case FI_ESHUTDOWN:
    case FI_ETIMEDOUT:
    case FI_EHOSTUNREACH:
    case FI_EHOSTDOWN:
    case FI_ENETUNREACH:
    case FI_ENETDOWN:
    case EPIPE: return true;
    default: return false;
    }
}

// From find_peer() until Event::peer_down.
struct Peer {
    NetAddr address;                               // of length 0: the number is void
    fi_addr_t place = FI_ADDR_UNSPEC;              // in the sender's address vector, when it is there
    size_t posted = 0;                             // requests in the provider's hands
    bool lost = false;                             // nothing more is posted
    const char *why = "";                          // it is lost
    Clock::time_point give_up;                     // when it is lost: closes the sender for what is still posted
    Clock::time_point refused_since, refused_last; // posts, with nothing posted
};

// The events of one poll.
struct Events {
    std::span<Event> space;
    size_t count = 0;

    size_t room() const { return space.size() - count; }
    void add(const Event &event) { space[count++] = event; }
};

// Reads what has completed, as far as there is room for an event of each.
template <typename Completed, typename Failed>
void read_completions(fid_cq *completions, const Events &events, const Completed &completed, const Failed &failed)
{
    std::array<fi_cq_data_entry, batch> entries;
    for (size_t room = events.room(); room > 0;) {
        const ssize_t count = fi_cq_read(completions, entries.data(), std::min(batch, room));
        if (count == -FI_EAVAIL) {
            fi_cq_err_entry error{};
            if (fi_cq_readerr(completions, &error, 0) != 1) return;
            failed(error);
            --room;
        } else {
            if (count <= 0) return;
            for (size_t i = 0; i < static_cast<size_t>(count); ++i)
                completed(entries[i]);
            room -= static_cast<size_t>(count);
        }
    }
}

class OfiDomain : public Domain
{
public:
    Status open(const std::string &provider, const std::string &domain_name);

    NetAddr address() const override { return own_address; }
    uint64_t longest_request() const override
    {
        return std::min<uint64_t>(adapter.info->ep_attr->max_msg_size, longest);
    }
    std::string pci_address() const override;
    Status register_memory(void *start, uint64_t length, int device, MemoryKeys *keys) override
    {
        return adapter.register_memory(start, length, device, keys);
    }
    void deregister_memory(const MemoryKeys &keys) override { adapter.deregister_memory(keys); }
    Status find_peer(const NetAddr &address, uint32_t *peer) override;
    size_t post(uint32_t number, std::span<const WorkRequest> wanted) override;
    bool post_receive(void *start, uint64_t length, uint64_t local_key, uint64_t context) override;
    size_t poll(std::span<Event> space) override;
    void abort(uint32_t number) override;

private:
    bool known(uint32_t number) const { return number < peers.size() && peers[number].address.length != 0; }
    Status insert(Peer *peer) const;
    void remove(Peer *peer) const;
    ssize_t submit(const Peer &peer, const WorkRequest &request, OfiOperation *operation);
    ssize_t receive(OfiOperation *operation) const;
    void refused(uint32_t number);
    void lose(uint32_t number, const char *why, Clock::duration grace);
    Event retire(OfiOperation *operation, Code code, const char *why);
    void request_failed(const fi_cq_err_entry &error, Events *events);
    void arrived(const fi_cq_data_entry &entry, Events *events);
    void receive_failed(const fi_cq_err_entry &error, Events *events);
    void tell_of_lost_peers(Events *events);
    void renew_sender();

    OfiAdapter adapter;
    OfiEndpoint receiver, sender;
    NetAddr own_address;

    // Invariant: as many requests as the sender has room for, and as many receives as the receiver has.
    OfiOperations requests, receives;
    size_t most_posted_to_one = 0;
    std::vector<OfiOperation *> to_receive_again;
    bool connecting = false; // the sender has something to do, though nothing is posted

    std::vector<Peer> peers; // by number
    std::vector<uint32_t> void_numbers;
    std::map<std::pair<uint8_t, std::array<uint8_t, most_address_bytes>>, uint32_t> numbers;
    std::vector<uint32_t> lost; // of which Event::peer_down is still to tell
    std::vector<Event> retired; // not by a completion

    // The template of all requests: submit() sets what they point at, the operation, the peer and the data.
    iovec local{};
    void *descriptor = nullptr;
    fi_rma_iov remote{};
    fi_msg_rma rma{};
    fi_msg message{};
};

Status OfiDomain::open(const std::string &provider, const std::string &domain_name)
{
    Status status = adapter.open(provider, domain_name);
    if (!status.ok()) return status;
    const size_t most_requests = adapter.info->tx_attr->size, most_receives = adapter.info->rx_attr->size;
    status = receiver.open(adapter, most_receives);
    if (status.ok()) status = sender.open(adapter, most_requests);
    if (status.ok()) status = adapter.address_of(receiver.endpoint.get(), &own_address);
    if (!status.ok()) return status;

    requests.open(most_requests);
    receives.open(most_receives);
    most_posted_to_one = (most_requests + 1) / 2; // one that hangs leaves room for the others
    retired.reserve(most_requests);
    rma = {.msg_iov = &local,
           .desc = &descriptor,
           .iov_count = 1,
           .addr = 0,
           .rma_iov = &remote,
           .rma_iov_count = 1,
           .context = nullptr,
           .data = 0};
    message = {.msg_iov = &local, .desc = &descriptor, .iov_count = 1, .addr = 0, .context = nullptr, .data = 0};

    const size_t data_receives = adapter.data_takes_receives ? std::min(most_data_receives, most_receives / 2) : 0;
    for (size_t i = 0; i < data_receives; ++i) {
        OfiOperation *const operation = receives.take();
        operation->for_data = true;
        const ssize_t error = receive(operation);
        if (error != 0) return ofi_failed("fi_recv(for remote data)", error);
    }
    return {};
}

std::string OfiDomain::pci_address() const
{
    const fi_bus_attr *const bus = adapter.info->nic != nullptr ? adapter.info->nic->bus_attr : nullptr;
    if (bus == nullptr || bus->bus_type != FI_BUS_PCI) return {};
    const fi_pci_attr &pci = bus->attr.pci;
    std::array<char, 16> text{};
    snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id);
    return text.data();
}

Status OfiDomain::insert(Peer *peer) const
{
    const int count =
        fi_av_insert(sender.peers.get(), OfiAdapter::bytes_of(peer->address), 1, &peer->place, 0, nullptr);
    if (count == 1) return {};
    peer->place = FI_ADDR_UNSPEC;
    if (count < 0) return ofi_failed("fi_av_insert()", count);
    return {.code = Code::invalid, .message = "fi_av_insert(): the provider refuses the address"};
}

void OfiDomain::remove(Peer *peer) const
{
    if (peer->place != FI_ADDR_UNSPEC) fi_av_remove(sender.peers.get(), &peer->place, 1, 0);
    peer->place = FI_ADDR_UNSPEC;
}

Status OfiDomain::find_peer(const NetAddr &address, uint32_t *peer)
{
    Status status = adapter.check(address, own_address);
    if (!status.ok()) return status;
    const auto found = numbers.find({address.length, address.bytes});
    if (found != numbers.end()) {
        *peer = found->second;
        return {};
    }
    if (sender.endpoint == nullptr) return {.code = Code::failed, .message = "find_peer(): the endpoint is lost"};
    Peer fresh;
    fresh.address = address;
    status = insert(&fresh);
    if (!status.ok()) return status;
    if (void_numbers.empty()) {
        void_numbers.push_back(static_cast<uint32_t>(peers.size()));
        peers.emplace_back();
    }
    *peer = void_numbers.back();
    void_numbers.pop_back();
    peers[*peer] = fresh;
    numbers[{address.length, address.bytes}] = *peer;
    return {};
}

// Gives a request to the provider: 0, or an error of libfabric.
ssize_t OfiDomain::submit(const Peer &peer, const WorkRequest &request, OfiOperation *operation)
{
    local = {.iov_base = request.local, .iov_len = request.length};
    descriptor = std::bit_cast<void *>(request.local_key);
    const bool confirmed = request.length > 0 || adapter.confirms_empty;
    uint64_t flags = FI_COMPLETION | (confirmed ? adapter.delivery_complete : 0);
    if (request.operation == Operation::send) {
        // The peer's receives are there for remote data, and whether a message meets one of these nobody knows.
        if (adapter.data_takes_receives) return -FI_EOPNOTSUPP;
        message.addr = peer.place;
        message.context = operation;
        return fi_sendmsg(sender.endpoint.get(), &message, flags);
    }
    remote = {.addr = request.remote, .len = request.length, .key = request.remote_key};
    rma.addr = peer.place;
    rma.context = operation;
    rma.data = request.imm;
    if (request.operation == Operation::read) return fi_readmsg(sender.endpoint.get(), &rma, flags);
    if (request.has_imm) flags |= FI_REMOTE_CQ_DATA;
    return fi_writemsg(sender.endpoint.get(), &rma, flags);
}

size_t OfiDomain::post(uint32_t number, std::span<const WorkRequest> wanted)
{
    if (!known(number)) return 0;
    Peer &peer = peers[number];
    size_t taken = 0;
    while (taken < wanted.size() && !peer.lost && peer.posted < most_posted_to_one) {
        OfiOperation *const operation = requests.take();
        if (operation == nullptr) break;
        operation->peer = number;
        operation->context = wanted[taken].context;
        const ssize_t result = submit(peer, wanted[taken], operation);
        if (result == -FI_EAGAIN) {
            requests.give_back(operation);
            refused(number);
            break;
        }
        ++taken;
        ++peer.posted;
        peer.refused_last = {};
        if (result == 0) continue;
        const int error = static_cast<int>(-result);
        if (means_peer_down(error)) lose(number, ofi_reason(error), lost_grace);
        retired.push_back(retire(operation, peer.lost ? Code::peer_down : Code::failed, ofi_reason(error)));
    }
    return taken;
}

// Full, or not connected yet: a provider that does not get through to a peer says so for ever.
void OfiDomain::refused(uint32_t number)
{
    Peer &peer = peers[number];
    connecting = true;
    if (peer.posted > 0) return;
    const auto now = Clock::now();
    if (now - peer.refused_last > connect_pause) peer.refused_since = now;
    peer.refused_last = now;
    if (now - peer.refused_since > connect_limit) lose(number, "no connection to it comes about", lost_grace);
}

// Nothing more is posted to it, and what is has that time to end by itself.
void OfiDomain::lose(uint32_t number, const char *why, Clock::duration grace)
{
    Peer &peer = peers[number];
    const auto give_up = Clock::now() + grace;
    peer.give_up = peer.lost ? std::min(peer.give_up, give_up) : give_up;
    if (!peer.lost) {
        peer.lost = true;
        peer.why = why;
        lost.push_back(number);
    }
    // fi_av(3) leaves it to the provider what becomes of that then; it is known of the one.
    if (adapter.removal_may_fail_posts) remove(&peer);
}

void OfiDomain::abort(uint32_t number)
{
    if (known(number)) lose(number, "the connection was given up", abort_grace);
}

ssize_t OfiDomain::receive(OfiOperation *operation) const
{
    return fi_recv(receiver.endpoint.get(), operation->start, operation->length, operation->descriptor, FI_ADDR_UNSPEC,
                   operation);
}

bool OfiDomain::post_receive(void *start, uint64_t length, uint64_t local_key, uint64_t context)
{
    OfiOperation *const operation = receives.take();
    if (operation == nullptr) return false;
    operation->context = context;
    operation->start = start;
    operation->length = length;
    operation->descriptor = std::bit_cast<void *>(local_key);
    if (receive(operation) == 0) return true;
    receives.give_back(operation);
    return false;
}

size_t OfiDomain::poll(std::span<Event> space)
{
    Events events{.space = space};
    for (; !retired.empty() && events.room() > 0; retired.pop_back())
        events.add(retired.back());
    if (sender.endpoint != nullptr && (connecting || requests.busy() > 0)) {
        connecting = false;
        const auto completed = [&](const fi_cq_data_entry &entry) {
            OfiOperation *const operation = requests.find(entry.op_context);
            if (operation != nullptr) events.add(retire(operation, Code::ok, ""));
        };
        read_completions(sender.completions.get(), events, completed,
                         [&](const fi_cq_err_entry &error) { request_failed(error, &events); });
    }
    read_completions(
        receiver.completions.get(), events, [&](const fi_cq_data_entry &entry) { arrived(entry, &events); },
        [&](const fi_cq_err_entry &error) { receive_failed(error, &events); });
    while (!to_receive_again.empty() && receive(to_receive_again.back()) == 0)
        to_receive_again.pop_back();
    if (!lost.empty()) tell_of_lost_peers(&events);
    return events.count;
}

Event OfiDomain::retire(OfiOperation *operation, Code code, const char *why)
{
    --peers[operation->peer].posted;
    requests.give_back(operation);
    return {.kind = Event::retired, .code = code, .peer = operation->peer, .context = operation->context, .why = why};
}

// Of an entry for an error only `err` and, if it is one of ours, `op_context` are read: the others need not be valid.
void OfiDomain::request_failed(const fi_cq_err_entry &error, Events *events)
{
    OfiOperation *const operation = requests.find(error.op_context);
    if (operation == nullptr) return;
    const Peer &peer = peers[operation->peer];
    if (!peer.lost && means_peer_down(error.err)) lose(operation->peer, ofi_reason(error.err), lost_grace);
    events->add(peer.lost ? retire(operation, Code::peer_down, peer.why)
                          : retire(operation, Code::failed, ofi_reason(error.err)));
}

void OfiDomain::arrived(const fi_cq_data_entry &entry, Events *events)
{
    const bool is_write = (entry.flags & (FI_RMA | FI_REMOTE_WRITE)) != 0;
    if (is_write && (entry.flags & FI_REMOTE_CQ_DATA) != 0)
        events->add({.kind = Event::immediate, .imm = static_cast<uint32_t>(entry.data)});
    if (is_write && !adapter.data_takes_receives) return; // there, op_context names no receive
    OfiOperation *const operation = receives.find(entry.op_context);
    if (operation == nullptr) return;
    if (is_write) {
        to_receive_again.push_back(operation);
        return;
    }
    events->add({.kind = Event::received, .context = operation->context, .length = entry.len});
    receives.give_back(operation);
}

void OfiDomain::receive_failed(const fi_cq_err_entry &error, Events *events)
{
    OfiOperation *const operation = receives.find(error.op_context);
    if (operation == nullptr) return;
    if (operation->for_data) {
        to_receive_again.push_back(operation);
        return;
    }
    const char *const why = ofi_reason(error.err);
    events->add({.kind = Event::received, .code = Code::failed, .context = operation->context, .why = why});
    receives.give_back(operation);
}

// Event::peer_down for those that have nothing posted any more.
void OfiDomain::tell_of_lost_peers(Events *events)
{
    const auto now = Clock::now();
    bool overdue = false;
    for (size_t i = 0; i < lost.size();) {
        const uint32_t number = lost[i];
        Peer &peer = peers[number];
        overdue = overdue || (peer.posted > 0 && now >= peer.give_up);
        if (peer.posted > 0 || !retired.empty() || events->room() == 0) {
            ++i;
            continue;
        }
        events->add({.kind = Event::peer_down, .code = Code::peer_down, .peer = number, .why = peer.why});
        remove(&peer);
        numbers.erase({peer.address.length, peer.address.bytes});
        peer = {};
        void_numbers.push_back(number);
        lost[i] = lost.back();
        lost.pop_back();
    }
    if (overdue && events->room() > 0) renew_sender(); // with room, all that had completed was read
}

// Closes the sender, which ends all that is posted, and opens another one.
void OfiDomain::renew_sender()
{
    sender.close();
    for (OfiOperation &operation : requests.each()) {
        if (!operation.busy) continue;
        const Peer &peer = peers[operation.peer];
        retired.push_back(peer.lost ? retire(&operation, Code::peer_down, peer.why)
                                    : retire(&operation, Code::failed, "the endpoint was reset for another peer"));
    }
    if (!sender.open(adapter, adapter.info->tx_attr->size).ok()) sender.close();
    for (const auto &[address, number] : numbers) {
        Peer &peer = peers[number];
        peer.place = FI_ADDR_UNSPEC;
        if (!peer.lost && (sender.endpoint == nullptr || !insert(&peer).ok()))
            lose(number, "the endpoint could not be opened anew", abort_grace);
    }
}

} // namespace

OpenDomain ofi_nic(std::string provider, std::string domain)
{
    return [provider = std::move(provider), domain = std::move(domain)](Status *status) -> std::unique_ptr<Domain> {
        auto opened = std::make_unique<OfiDomain>();
        *status = opened->open(provider, domain);
        if (!status->ok()) return nullptr;
        return opened;
    };
}

} // namespace transfer_engine
