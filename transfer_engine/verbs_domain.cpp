// verbs_domain.cpp: an adapter driven by libibverbs, with reliable connections (RC) to each peer (T13). Any adapter of
// InfiniBand or RoCE, SoftRoCE included; there is no rdma_cm in it.
//
// A queue pair for datagrams (UD) has the address that peers know. By it two sides tell each other the numbers of their
// RC queue pairs (handshake.hpp); all else goes over those. One completion that is not success breaks the connection to
// its peer, and no other: RC knows no way back from an error. The queue pairs go to the error state, what is posted to
// them retires, they are destroyed, and who needs the peer again connects anew.
//
// Invariants: what is posted to a queue pair <= its depth; to all of them, and not polled yet, <= the depth of the
// queue of completions, for sends by counting (send_room), for receives by the depths of the receive queues.
//
// Connecting takes some system calls, which the worker makes: to create queue pairs, and to connect them once the peer
// has been heard.
#include "verbs_peer.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <bit>
#include <filesystem>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>

namespace transfer_engine
{

using Clock = Dialogue::Clock;

constexpr size_t batch = 16;           // completions polled at once
constexpr uint64_t longest = 1 << 30;  // bytes of one work request
constexpr unsigned look_around = 1024; // polls between two looks at what is rare

// The same text with static lifetime, for Event::why. There are few: each is kept once, for good.
static const char *kept_for_good(const std::string &text)
{
    static std::mutex lock;
    static std::set<std::string> texts; // its elements never move
    const std::scoped_lock hold(lock);
    return texts.insert(text).first->c_str();
}

class VerbsDomain final : public Domain
{
public:
    Status open(const std::string &device, int gid_index);

    NetAddr address() const override { return own_address; }
    uint64_t longest_request() const override { return std::min<uint64_t>(adapter.port.max_msg_sz, longest); }
    std::string pci_address() const override;
    Status register_memory(void *start, uint64_t length, int device, MemoryKeys *keys) override;
    void deregister_memory(const MemoryKeys &keys) override;
    Status find_peer(const NetAddr &address, uint32_t *peer) override;
    size_t post(uint32_t peer, std::span<const WorkRequest> requests) override;
    bool post_receive(void *start, uint64_t length, uint64_t local_key, uint64_t context) override;
    size_t poll(std::span<Event> events) override;
    void abort(uint32_t peer) override;

private:
    struct Receive {
        uint64_t context = 0;
        uint32_t length = 0;
    };
    struct HashAddress {
        size_t operator()(const NetAddr &address) const
        {
            return std::hash<std::string_view>()(
                {reinterpret_cast<const char *>(address.bytes.data()), address.length});
        }
    };

    // The handshake
    void hear(std::span<const uint8_t> bytes, uint32_t from_queue_pair);
    void refuse(const Handshake &head, const Status &status);
    void speak_to(VerbsPeer *peer);
    void send(const VerbsAddress &place, Handshake message);

    // Peers
    VerbsPeer *peer_of(uint32_t number);
    VerbsPeer *make_peer(const NetAddr &address, Status *status);
    void watch(VerbsPeer *peer);
    bool look_after(VerbsPeer *peer, Clock::time_point now);
    void break_connection(VerbsPeer *peer, Code code, const char *why);
    void end(VerbsPeer *peer);
    void look_around_for_peers();
    void take_device_events();

    // Completions
    void emit(const Event &event);
    size_t poll_sends();
    size_t poll_receives();
    void complete_send(const ibv_wc &completion);
    void complete_receive(const ibv_wc &completion);
    void break_owner(const ibv_wc &completion);
    void refill_immediates();

    VerbsAdapter adapter;
    Datagrams datagrams;
    NetAddr own_address;
    uint64_t incarnation = 0;
    uint64_t attempts = 0; // to connect, ever

    std::unordered_map<uint32_t, std::unique_ptr<VerbsPeer>> peers; // by number
    std::unordered_map<NetAddr, VerbsPeer *, HashAddress> peers_by_address;
    uint32_t last_number = 0;
    std::vector<VerbsPeer *> watched;        // connecting or broken
    std::vector<std::future<void>> closings; // of queue pairs whose peer has ended
    size_t send_room = 0;                    // completions that the queue has room for

    std::array<ibv_recv_wr, batch> immediate_receives{}; // a chain; they have no buffers
    size_t immediates_missing = 0;
    std::vector<Receive> receives;
    std::vector<uint32_t> unused_receives;

    std::span<Event> room; // of the poll() that runs
    size_t filled = 0;
    std::vector<Event> waiting; // events that found no room; those from next_waiting on
    size_t next_waiting = 0;
    bool receives_emptied = false; // by the poll() that runs
    unsigned polls = 0;
};

// -------------------------------------------------------------------------------------------- opening

Status VerbsDomain::open(const std::string &device, int gid_index)
{
    Status status = adapter.open(device, gid_index);
    if (status.ok()) status = datagrams.open(adapter);
    if (!status.ok()) {
        status.message = "verbs_nic(" + device + "): " + status.message;
        return status;
    }
    own_address = net_addr_of(datagrams.address());
    incarnation = random_number();
    send_room = adapter.most_sends - Datagrams::under_way;

    receives.resize(adapter.most_messages);
    for (uint32_t slot = adapter.most_messages; slot-- > 0;)
        unused_receives.push_back(slot);
    for (ibv_recv_wr &receive : immediate_receives)
        receive.wr_id = RequestName{.kind = RequestName::immediate}.id();
    immediates_missing = adapter.most_immediates;
    refill_immediates();
    waiting.reserve(1024);
    return status;
}

// What its link to a device ends with; SoftRoCE has none.
std::string VerbsDomain::pci_address() const
{
    std::error_code none;
    return std::filesystem::read_symlink(std::string(adapter.context->device->ibdev_path) + "/device", none).filename();
}

// ------------------------------------------------------------------------------------------- memory

Status VerbsDomain::register_memory(void *start, uint64_t length, int device, MemoryKeys *keys)
{
    MemoryRegion region;
    if (Status status = adapter.register_memory(start, length, device, &region); !status.ok()) return status;
    *keys = {.local = region->lkey, .remote = region->rkey, .base = std::bit_cast<uint64_t>(start), .handle = 0};
    keys->handle = std::bit_cast<uint64_t>(region.release());
    return {};
}

void VerbsDomain::deregister_memory(const MemoryKeys &keys)
{
    ibv_dereg_mr(std::bit_cast<ibv_mr *>(keys.handle)); // as register_memory() gave it
}

// ----------------------------------------------------------------------------------------- handshake

void VerbsDomain::speak_to(VerbsPeer *peer)
{
    Handshake message = peer->dialogue.next(Clock::now());
    message.data = peer->data.number();
    message.messages = peer->messages.number();
    message.mtu = static_cast<uint8_t>(adapter.port.active_mtu);
    message.rd_atomic = adapter.rd_atomic();
    send(peer->place, message);
}

void VerbsDomain::send(const VerbsAddress &place, Handshake message)
{
    message.from = own_address;
    if (loses_handshake != nullptr && loses_handshake(message)) return;
    datagrams.send(place, encode(message));
}

// Who speaks another version is told by an answer in this one, and gives up as this side does.
void VerbsDomain::refuse(const Handshake &head, const Status &status)
{
    VerbsAddress place;
    if (head.kind == Handshake::hello && parse(head.from, &place).ok()) {
        Handshake answer;
        answer.kind = Handshake::reply;
        send(place, answer);
    }
    if (const auto known = peers_by_address.find(head.from); known != peers_by_address.end())
        break_connection(known->second, Code::unsupported, kept_for_good(status.message));
}

void VerbsDomain::hear(std::span<const uint8_t> bytes, uint32_t from_queue_pair)
{
    Handshake message;
    VerbsAddress place;
    Status status = decode(bytes, &message);
    if (status.code == Code::invalid) return;
    // Nobody speaks for another.
    if (!parse(message.from, &place).ok() || place.queue_pair != from_queue_pair) return;
    if (!status.ok()) return refuse(message, status);

    const auto known = peers_by_address.find(message.from);
    if (known == peers_by_address.end() && message.kind == Handshake::reply) return; // late
    VerbsPeer *const peer = known != peers_by_address.end() ? known->second : make_peer(message.from, &status);
    if (peer == nullptr || peer->broken) return; // it asks again, and then there may be room, or a new one
    const Dialogue::Step step = peer->dialogue.hear(message);
    if (step == Dialogue::Step::ignore) return;
    if (step == Dialogue::Step::replaced)
        return break_connection(peer, Code::peer_down, "the peer has begun anew, as after an error or its restart");
    if (step == Dialogue::Step::connect)
        if (const Status connected = peer->connect(adapter, message); !connected.ok())
            return break_connection(peer, connected.code, kept_for_good(connected.message));
    speak_to(peer);
}

// --------------------------------------------------------------------------------------------- peers

VerbsPeer *VerbsDomain::peer_of(uint32_t number)
{
    const auto known = peers.find(number);
    return known != peers.end() ? known->second.get() : nullptr;
}

// Null, and *status set, when it cannot.
VerbsPeer *VerbsDomain::make_peer(const NetAddr &address, Status *status)
{
    VerbsAddress place;
    *status = parse(address, &place);
    if (!status->ok()) return nullptr;
    auto peer =
        std::make_unique<VerbsPeer>(address, place, ++last_number, Dialogue(incarnation, ++attempts, Clock::now()));
    *status = peer->open(adapter);
    if (!status->ok()) return nullptr;
    VerbsPeer *const made = peer.get();
    watch(made);
    peers_by_address.emplace(address, made);
    peers.emplace(made->number, std::move(peer));
    return made;
}

// A number that is on its way down is given out, too: who uses it is told by the peer_down that comes.
Status VerbsDomain::find_peer(const NetAddr &address, uint32_t *peer)
{
    Status status;
    const auto known = peers_by_address.find(address);
    const VerbsPeer *const found = known != peers_by_address.end() ? known->second : make_peer(address, &status);
    if (found != nullptr) *peer = found->number;
    return status;
}

void VerbsDomain::watch(VerbsPeer *peer)
{
    if (!peer->watched) watched.push_back(peer);
    peer->watched = true;
}

void VerbsDomain::break_connection(VerbsPeer *peer, Code code, const char *why)
{
    if (peer->broken) return;
    peer->broken = true;
    peer->code = code;
    peer->why = why;
    peer->since = Clock::now();
    peer->data.break_off();
    peer->messages.break_off();
    watch(peer);
}

void VerbsDomain::abort(uint32_t peer)
{
    if (VerbsPeer *const found = peer_of(peer); found != nullptr)
        break_connection(found, Code::peer_down, "the connection was given up");
}

static bool is_over(const std::future<void> &closing)
{
    return closing.wait_for(std::chrono::seconds(0)) != std::future_status::timeout;
}

// False when it need not be watched any more: it is connected, or has ended.
bool VerbsDomain::look_after(VerbsPeer *peer, Clock::time_point now)
{
    if (peer->ready()) {
        peer->watched = false;
        return false;
    }
    if (peer->broken) {
        if (!peer->closing.valid() && receives_emptied && peer->drained(now)) peer->close();
        // What has not retired ends when the adapter lets go of its memory, and not before.
        const bool over = peer->closing.valid() && (peer->under_way() == 0 || is_over(peer->closing));
        if (over) end(peer);
        return !over;
    }
    if (peer->dialogue.late(now)) {
        break_connection(peer, Code::peer_down, "no answer to the handshake");
        datagrams.forget_path(peer->place);
    } else if (peer->dialogue.due(now)) {
        speak_to(peer);
    }
    return true;
}

void VerbsDomain::end(VerbsPeer *peer)
{
    if (peer->under_way() > 0)
        peer->closing.get(); // it is over; or is done here, where there was no thread to be had
    else
        closings.push_back(std::move(peer->closing));
    for (VerbsQueue *queue : {&peer->data, &peer->messages})
        for (; queue->under_way() > 0; ++send_room)
            emit({.kind = Event::retired,
                  .code = Code::peer_down,
                  .peer = peer->number,
                  .context = queue->retire_oldest(),
                  .why = peer->why});
    emit({.kind = Event::peer_down, .code = peer->code, .peer = peer->number, .why = peer->why});
    peers_by_address.erase(peer->address);
    peers.erase(peer->number);
}

void VerbsDomain::look_around_for_peers()
{
    if (++polls % look_around != 0 && watched.empty()) return;
    const auto now = Clock::now();
    const bool some_broken = std::ranges::any_of(watched, &VerbsPeer::broken);
    std::erase_if(watched, [&](VerbsPeer *peer) { return !look_after(peer, now); });
    std::erase_if(closings, is_over);
    // After that: what an event says of receives is true of those that the next poll() finds.
    if (some_broken || polls % look_around == 0) take_device_events();
}

void VerbsDomain::take_device_events()
{
    for (ibv_async_event event{}; ibv_get_async_event(adapter.context.get(), &event) == 0;
         ibv_ack_async_event(&event)) {
        const bool all = event.event_type == IBV_EVENT_DEVICE_FATAL;
        const bool last = event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED;
        const bool one = last || event.event_type == IBV_EVENT_QP_FATAL || event.event_type == IBV_EVENT_QP_REQ_ERR ||
                         event.event_type == IBV_EVENT_QP_ACCESS_ERR;
        for (const auto &[number, peer] : peers) {
            const bool concerned = all || (one && peer->owns(event.element.qp));
            if (concerned && last) ++peer->quiet_queues;
            if (concerned) break_connection(peer.get(), Code::peer_down, ibv_event_type_str(event.event_type));
        }
    }
}

// --------------------------------------------------------------------------------------- work requests

size_t VerbsDomain::post(uint32_t peer, std::span<const WorkRequest> requests)
{
    VerbsPeer *const to = peer_of(peer);
    size_t taken = 0;
    while (to != nullptr && to->ready() && taken < requests.size()) {
        int error = 0;
        const size_t posted = to->post(requests.subspan(taken), send_room, &error);
        send_room -= posted;
        taken += posted;
        if (error != 0)
            break_connection(to, Code::failed, kept_for_good(verbs_failed("ibv_post_send()", std::abs(error)).message));
        else if (posted == 0)
            break;
    }
    return taken;
}

bool VerbsDomain::post_receive(void *start, uint64_t length, uint64_t local_key, uint64_t context)
{
    if (unused_receives.empty()) return false;
    const uint32_t slot = unused_receives.back();
    receives[slot] = {.context = context, .length = static_cast<uint32_t>(std::min(length, longest))};
    ibv_sge element{.addr = reinterpret_cast<uintptr_t>(start),
                    .length = receives[slot].length,
                    .lkey = static_cast<uint32_t>(local_key)};
    ibv_recv_wr receive{}, *refused = nullptr;
    receive.wr_id = RequestName{.kind = RequestName::message, .number = slot}.id();
    receive.sg_list = &element;
    receive.num_sge = 1;
    if (ibv_post_srq_recv(adapter.messages.get(), &receive, &refused) != 0) return false;
    unused_receives.pop_back();
    return true;
}

// Their templates are one chain, linked here for as many as are missing.
void VerbsDomain::refill_immediates()
{
    while (immediates_missing > 0) {
        const size_t count = std::min(immediates_missing, immediate_receives.size());
        for (size_t i = 0; i < count; ++i)
            immediate_receives[i].next = i + 1 < count ? &immediate_receives[i + 1] : nullptr;
        ibv_recv_wr *refused = nullptr;
        const int error = ibv_post_srq_recv(adapter.immediates.get(), immediate_receives.data(), &refused);
        immediates_missing -= error == 0 ? count : static_cast<size_t>(refused - immediate_receives.data());
        if (error != 0) return; // the next poll() tries again
    }
}

// ----------------------------------------------------------------------------------------- completions

void VerbsDomain::emit(const Event &event)
{
    if (filled < room.size()) // then none waits
        room[filled++] = event;
    else
        waiting.push_back(event);
}

size_t VerbsDomain::poll(std::span<Event> events)
{
    filled = std::min(events.size(), waiting.size() - next_waiting);
    std::copy_n(waiting.begin() + static_cast<std::ptrdiff_t>(next_waiting), filled, events.begin());
    next_waiting += filled;
    if (next_waiting < waiting.size()) return filled; // no room for more
    waiting.clear();
    next_waiting = 0;

    room = events;
    size_t sends = batch, arrivals = batch;
    while ((sends == batch || arrivals == batch) && filled < room.size()) {
        sends = poll_sends();
        arrivals = poll_receives();
    }
    receives_emptied = arrivals < batch;
    look_around_for_peers();
    room = {};
    return filled;
}

size_t VerbsDomain::poll_sends()
{
    std::array<ibv_wc, batch> completions;
    const int count = ibv_poll_cq(adapter.sends.get(), static_cast<int>(batch), completions.data());
    for (int i = 0; i < count; ++i)
        complete_send(completions[static_cast<size_t>(i)]);
    return static_cast<size_t>(std::max(count, 0));
}

size_t VerbsDomain::poll_receives()
{
    std::array<ibv_wc, batch> completions;
    const int count = ibv_poll_cq(adapter.receives.get(), static_cast<int>(batch), completions.data());
    for (int i = 0; i < count; ++i)
        complete_receive(completions[static_cast<size_t>(i)]);
    if (immediates_missing > 0) refill_immediates();
    return static_cast<size_t>(std::max(count, 0));
}

// Of a failed completion only wr_id, status and qp_num mean anything.
void VerbsDomain::complete_send(const ibv_wc &completion)
{
    const RequestName name = RequestName::of(completion.wr_id);
    if (name.kind == RequestName::datagram) {
        datagrams.sent(completion.status == IBV_WC_SUCCESS);
        return;
    }
    VerbsPeer *const peer = peer_of(name.number);
    if (peer == nullptr) return; // it was destroyed by force, and all of it has retired

    // After the first failure all fail by being flushed, which is none of their fault: the connection is down.
    const bool ok = completion.status == IBV_WC_SUCCESS;
    const bool first = !ok && !peer->broken && completion.status != IBV_WC_WR_FLUSH_ERR;
    const bool unreachable = completion.status == IBV_WC_RETRY_EXC_ERR;
    const Code code = ok ? Code::ok : first && !unreachable ? Code::failed : Code::peer_down;
    const char *const why = ok ? "" : first || !peer->broken ? ibv_wc_status_str(completion.status) : peer->why;
    // A wrong key or address, too: the peer's queue pair is in the error state after it, as is this one.
    if (!ok) break_connection(peer, code, why);

    VerbsQueue &queue = peer->queue_of(name.kind);
    const uint32_t retiring = queue.retiring(name.sequence);
    for (uint32_t i = 1; i <= retiring; ++i) {
        // Those before the one that failed were done, unsignalled. Not so before one that was flushed.
        const bool done = ok || (first && i < retiring);
        emit({.kind = Event::retired,
              .code = done ? Code::ok : code,
              .peer = peer->number,
              .context = queue.retire_oldest(),
              .why = done ? "" : why});
    }
    send_room += retiring;
}

void VerbsDomain::complete_receive(const ibv_wc &completion)
{
    const RequestName name = RequestName::of(completion.wr_id);
    const bool ok = completion.status == IBV_WC_SUCCESS;
    switch (name.kind) {
    case RequestName::datagram:
        if (const auto bytes = datagrams.received(completion); !bytes.empty()) hear(bytes, completion.src_qp);
        datagrams.give_back(completion);
        return; // broken or not, it has no peer
    case RequestName::immediate:
        ++immediates_missing;
        if (ok && (completion.wc_flags & IBV_WC_WITH_IMM) != 0)
            emit({.kind = Event::immediate, .imm = ntohl(completion.imm_data)});
        break;
    default: {
        const Receive &receive = receives[name.number];
        // A peer may write to its message queue pair, too; the length is not one of a message then.
        const bool whole = ok && completion.opcode == IBV_WC_RECV && completion.byte_len <= receive.length;
        emit({.kind = Event::received,
              .code = whole ? Code::ok : Code::failed,
              .context = receive.context,
              .length = whole ? completion.byte_len : 0,
              .why = whole ? ""
                     : ok  ? "not a message"
                           : ibv_wc_status_str(completion.status)});
        unused_receives.push_back(name.number);
    }
    }
    if (!ok) break_owner(completion);
}

// A receive failed: too short for its message, say. Its queue pair is in the error state.
void VerbsDomain::break_owner(const ibv_wc &completion)
{
    for (const auto &[number, peer] : peers)
        if (peer->data.number().number == completion.qp_num || peer->messages.number().number == completion.qp_num)
            break_connection(peer.get(), completion.status == IBV_WC_WR_FLUSH_ERR ? Code::peer_down : Code::failed,
                             ibv_wc_status_str(completion.status));
}

// ---------------------------------------------------------------------------------------------- public

OpenDomain verbs_nic(std::string device, int gid_index)
{
    return [name = std::move(device), gid_index](Status *status) -> std::unique_ptr<Domain> {
        auto domain = std::make_unique<VerbsDomain>();
        *status = domain->open(name, gid_index);
        if (!status->ok()) return nullptr;
        return domain;
    };
}

} // namespace transfer_engine
