// verbs_adapter.cpp: see verbs_adapter.hpp.
#include "verbs_adapter.hpp"

#include "cuda.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

namespace transfer_engine
{

// What is asked for, as far as the device has it.
constexpr int wanted_sends = 16384;     // under way to all peers
constexpr int wanted_immediates = 4096; // arrived and not polled; a peer that comes with more waits
constexpr int wanted_messages = 1024;   // receives of post_receive()
constexpr int wanted_datagrams = 256;   // arrived and not polled; more are lost

constexpr int most_searches = 8; // for the ways to new hosts, at a time
constexpr size_t grh_bytes = 40; // before each datagram that arrives, whether or not it had such a header

Status verbs_failed(const std::string &call, int error)
{
    const char *reason = strerrordesc_np(error);
    const bool unsupported = error == EOPNOTSUPP || error == ENOSYS;
    return {.code = unsupported ? Code::unsupported : Code::failed,
            .message = call + ": " + (reason != nullptr ? reason : "error " + std::to_string(error))};
}

uint64_t random_number()
{
    uint64_t number = 0;
    while (getrandom(&number, sizeof number, 0) != sizeof number || number == 0) {
    }
    return number;
}

// ------------------------------------------------------------------------------------- addresses

// In a NetAddr: u8 kind 'V', u8 version 1, the GID's 16 bytes; little-endian u16 LID, u32 queue pair, u32 qkey.
constexpr uint8_t address_kind = 'V', address_version = 1;
constexpr size_t gid_at = 2, lid_at = gid_at + sizeof(ibv_gid), queue_pair_at = lid_at + 2, qkey_at = queue_pair_at + 4,
                 address_bytes = qkey_at + 4;

static void put(uint8_t *at, size_t bytes, uint32_t value)
{
    for (size_t i = 0; i < bytes; ++i)
        at[i] = static_cast<uint8_t>(value >> (8 * i));
}

static uint32_t get(const uint8_t *at, size_t bytes)
{
    uint32_t value = 0;
    for (size_t i = 0; i < bytes; ++i)
        value |= uint32_t{at[i]} << (8 * i);
    return value;
}

NetAddr net_addr_of(const VerbsAddress &address)
{
    static_assert(address_bytes <= most_address_bytes);
    NetAddr net;
    net.length = address_bytes;
    uint8_t *const bytes = net.bytes.data();
    bytes[0] = address_kind;
    bytes[1] = address_version;
    memcpy(bytes + gid_at, address.gid.raw, sizeof address.gid.raw);
    put(bytes + lid_at, 2, address.lid);
    put(bytes + queue_pair_at, 4, address.queue_pair);
    put(bytes + qkey_at, 4, address.qkey);
    return net;
}

Status parse(const NetAddr &net, VerbsAddress *address)
{
    const uint8_t *const bytes = net.bytes.data();
    const std::string call = "find_peer(address of " + std::to_string(net.length) + " bytes): ";
    if (net.length < 2 || bytes[0] != address_kind)
        return {.code = Code::invalid, .message = call + "not that of an adapter by libibverbs"};
    if (bytes[1] != address_version || net.length != address_bytes)
        return {.code = Code::invalid,
                .message = call + "version " + std::to_string(bytes[1]) + " there; here version " +
                           std::to_string(address_version) + ", of " + std::to_string(address_bytes) + " bytes"};
    memcpy(address->gid.raw, bytes + gid_at, sizeof address->gid.raw);
    address->lid = static_cast<uint16_t>(get(bytes + lid_at, 2));
    address->queue_pair = get(bytes + queue_pair_at, 4);
    address->qkey = get(bytes + qkey_at, 4);
    return {};
}

// ------------------------------------------------------------------------------------- the adapter

Status VerbsAdapter::open(const std::string &device, int wanted_gid)
{
    Status status = open_device(device);
    if (status.ok()) status = choose_port();
    if (status.ok()) status = choose_gid(wanted_gid);
    if (status.ok()) status = make_queues();
    return status;
}

Status VerbsAdapter::open_device(const std::string &device)
{
    int count = 0;
    ibv_device **const devices = ibv_get_device_list(&count);
    if (devices == nullptr) return verbs_failed("ibv_get_device_list()", errno);
    std::string there;
    ibv_device *wanted = nullptr;
    for (ibv_device *each : std::span(devices, static_cast<size_t>(count))) {
        const std::string name = ibv_get_device_name(each);
        there += (there.empty() ? "" : ", ") + name;
        if (device == name) wanted = each;
    }
    Status status;
    if (wanted == nullptr) {
        status = {.code = Code::failed,
                  .message = "ibv_get_device_list(): no such device; there " +
                             (count == 0 ? "is none at all" : (count == 1 ? "is " : "are ") + there)};
    } else {
        context.reset(ibv_open_device(wanted));
        if (context == nullptr) status = verbs_failed("ibv_open_device()", errno);
    }
    ibv_free_device_list(devices);
    if (!status.ok()) return status;

    // Events of the device are looked for now and then; nobody waits for them.
    const int flags = fcntl(context->async_fd, F_GETFL);
    if (flags < 0 || fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK) != 0)
        return verbs_failed("fcntl(async_fd, O_NONBLOCK)", errno);
    const int error = ibv_query_device(context.get(), &limits);
    return error == 0 ? Status() : verbs_failed("ibv_query_device()", error);
}

// The first active one.
Status VerbsAdapter::choose_port()
{
    std::string states;
    for (uint8_t each = 1; each <= limits.phys_port_cnt; ++each) {
        const int error = ibv_query_port(context.get(), each, &port);
        if (error != 0) return verbs_failed("ibv_query_port(" + std::to_string(each) + ")", error);
        port_number = each;
        if (port.state == IBV_PORT_ACTIVE) return {};
        states += (states.empty() ? "" : ", ") + std::string(ibv_port_state_str(port.state));
    }
    return {.code = Code::failed, .message = "ibv_query_port(): no active port (" + states + ")"};
}

// Reachable beyond its own link: an IPv4 address in the form of IPv6, or one of IPv6 that is not link-local.
static bool is_routable(const ibv_gid &gid)
{
    static constexpr ibv_gid none{};
    const bool link_local = gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
    return !link_local && memcmp(gid.raw, none.raw, sizeof gid.raw) != 0;
}

Status VerbsAdapter::choose_gid(int wanted)
{
    const int entries = std::min(port.gid_tbl_len, 256); // the index is a byte in an ibv_ah_attr
    const int first = wanted >= 0 ? wanted : 0, end = wanted >= 0 ? std::min(wanted + 1, entries) : entries;
    for (int i = first; i < end; ++i) {
        ibv_gid_entry entry{};
        // Most places of the table are empty: ENODATA.
        if (ibv_query_gid_ex(context.get(), port_number, static_cast<uint32_t>(i), &entry, 0) != 0) continue;
        const bool fits = port.link_layer != IBV_LINK_LAYER_ETHERNET ||
                          (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && is_routable(entry.gid));
        if (!fits && wanted < 0) continue;
        gid_index = static_cast<uint8_t>(i);
        gid = entry.gid;
        return {};
    }
    const std::string call = "ibv_query_gid_ex(port " + std::to_string(port_number) + ", ";
    if (wanted >= 0)
        return {.code = Code::failed, .message = call + std::to_string(wanted) + "): there is no such GID"};
    return {.code = Code::failed,
            .message = call + "0 to " + std::to_string(entries - 1) +
                       "): no GID of RoCE v2 with an IPv4 or a global IPv6 address; has its interface one?"};
}

static uint32_t at_most(int wanted, int limit) { return static_cast<uint32_t>(std::clamp(limit, 1, wanted)); }

Status VerbsAdapter::make_queues()
{
    most_sends = at_most(wanted_sends, limits.max_cqe);
    most_immediates = at_most(wanted_immediates, std::min(limits.max_srq_wr, limits.max_cqe / 2));
    most_messages = at_most(wanted_messages, std::min(limits.max_srq_wr, limits.max_cqe / 4));
    most_datagrams = at_most(wanted_datagrams, std::min(limits.max_qp_wr, limits.max_cqe / 4));
    if (most_datagrams < Datagrams::under_way)
        return {.code = Code::unsupported,
                .message = "ibv_query_device(): " + std::to_string(limits.max_cqe) + " completions, " +
                           std::to_string(limits.max_qp_wr) + " work requests: too few"};

    pd.reset(ibv_alloc_pd(context.get()));
    if (pd == nullptr) return verbs_failed("ibv_alloc_pd()", errno);
    const uint32_t arrivals = most_immediates + most_messages + most_datagrams;
    for (const auto &[queue, depth] : {std::pair(&sends, most_sends), std::pair(&receives, arrivals)}) {
        queue->reset(ibv_create_cq(context.get(), static_cast<int>(depth), nullptr, nullptr, 0));
        if (*queue == nullptr) return verbs_failed("ibv_create_cq(" + std::to_string(depth) + ")", errno);
    }
    for (const auto &[queue, depth] : {std::pair(&immediates, most_immediates), std::pair(&messages, most_messages)}) {
        ibv_srq_init_attr wanted{.srq_context = nullptr, .attr = {.max_wr = depth, .max_sge = 1, .srq_limit = 0}};
        queue->reset(ibv_create_srq(pd.get(), &wanted));
        if (*queue == nullptr) return verbs_failed("ibv_create_srq(" + std::to_string(depth) + ")", errno);
    }
    return {};
}

// Relaxed ordering lets the writes of the adapter overtake each other, which is faster, but not their completion: that
// is a write without it. A device that does not know it may refuse.
template <typename Register> static MemoryRegion with_access(Register register_it)
{
    constexpr unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    MemoryRegion region(register_it(access | IBV_ACCESS_RELAXED_ORDERING));
    if (region == nullptr && errno != ENOMEM) region.reset(register_it(access));
    return region;
}

// Memory of a GPU as a dmabuf, where its driver and the adapter's have that; else by its address, which means something
// to the kernel where nvidia-peermem is loaded.
Status VerbsAdapter::register_memory(void *start, uint64_t length, int device, MemoryRegion *region) const
{
    const std::string bytes = std::to_string(length) + " bytes", call = "ibv_reg_mr(" + bytes + ")";
    Status status;
    if (device != host) {
        const CudaDriver &driver = CudaDriver::of_this_process();
        int dmabuf = -1;
        uint64_t offset = 0;
        status = driver.check_memory(device, start);
        if (!status.ok()) return status;
        status = driver.export_dmabuf(device, start, length, &dmabuf, &offset);
        if (status.ok()) {
            *region = with_access([&](unsigned access) {
                return ibv_reg_dmabuf_mr(pd.get(), offset, length, std::bit_cast<uintptr_t>(start), dmabuf,
                                         static_cast<int>(access));
            });
            const int error = errno;
            close(dmabuf); // the region keeps the buffer
            if (*region != nullptr) return {};
            status = verbs_failed("ibv_reg_dmabuf_mr(" + bytes + ")", error);
        }
    }
    *region = with_access([&](unsigned access) { return ibv_reg_mr(pd.get(), start, length, access); });
    if (*region != nullptr) return {};
    const int error = errno;
    if (device == host) return verbs_failed(call + (error == ENOMEM ? ", 'ulimit -l' limits it" : ""), error);
    return {.code = Code::unsupported,
            .message = status.message + "; nor by nvidia-peermem: " + verbs_failed(call, error).message};
}

uint8_t VerbsAdapter::rd_atomic() const
{
    return static_cast<uint8_t>(std::clamp(std::min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom), 0, 255));
}

ibv_ah_attr VerbsAdapter::path_to(const VerbsAddress &place) const
{
    ibv_ah_attr path{};
    path.port_num = port_number;
    path.dlid = place.lid;
    path.is_global = port.link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 0;
    path.grh.dgid = place.gid;
    path.grh.sgid_index = gid_index;
    path.grh.hop_limit = 64;
    return path;
}

// --------------------------------------------------------------------------------------- datagrams

Status Datagrams::open(const VerbsAdapter &opened)
{
    constexpr uint32_t qkey_mask = 0x7fffffff; // the highest bit would stand for the queue pair's own
    adapter = &opened;
    slots = opened.most_datagrams;
    ibv_qp_init_attr wanted{};
    wanted.send_cq = opened.sends.get();
    wanted.recv_cq = opened.receives.get();
    wanted.cap.max_send_wr = under_way;
    wanted.cap.max_recv_wr = opened.most_datagrams;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    wanted.qp_type = IBV_QPT_UD;
    wanted.sq_sig_all = 1;
    pair.reset(ibv_create_qp(opened.pd.get(), &wanted));
    if (pair == nullptr) return verbs_failed("ibv_create_qp(UD)", errno);

    own = {.gid = opened.gid,
           .lid = opened.port.lid,
           .queue_pair = pair->qp_num,
           .qkey = static_cast<uint32_t>(random_number()) & qkey_mask};
    // Room for the longest datagram there can be: one too long for its receive might break the queue pair.
    room = grh_bytes + (size_t{128} << opened.port.active_mtu);
    memory.resize(slots * room + under_way * longest);
    region.reset(ibv_reg_mr(opened.pd.get(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE));
    if (region == nullptr) return verbs_failed("ibv_reg_mr(" + std::to_string(memory.size()) + " bytes)", errno);
    const int error = begin();
    return error == 0 ? Status() : verbs_failed("ibv_modify_qp(UD)", error);
}

int Datagrams::begin()
{
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = adapter->port_number;
    attributes.qkey = own.qkey;
    int error = ibv_modify_qp(pair.get(), &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    attributes.qp_state = IBV_QPS_RTR;
    if (error == 0) error = ibv_modify_qp(pair.get(), &attributes, IBV_QP_STATE);
    attributes.qp_state = IBV_QPS_RTS;
    if (error == 0) error = ibv_modify_qp(pair.get(), &attributes, IBV_QP_STATE | IBV_QP_SQ_PSN);
    for (uint32_t slot = 0; error == 0 && slot < slots; ++slot)
        post_receive(slot);
    return error;
}

// All that is posted is flushed then, on every device: where a failed send only stops sends (SQE), receives, too.
void Datagrams::break_off()
{
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    if (!broken) ibv_modify_qp(pair.get(), &attributes, IBV_QP_STATE);
    broken = true;
}

// Where it fails it stays broken: the handshakes that need it end at their deadlines.
void Datagrams::begin_anew_if_empty()
{
    if (!broken || posted != done || receiving > 0) return;
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RESET;
    broken = ibv_modify_qp(pair.get(), &attributes, IBV_QP_STATE) != 0 || begin() != 0;
}

static auto host_of(const VerbsAddress &place) { return std::pair(std::to_array(place.gid.raw), place.lid); }

// Null until it is known. A thread of its own asks for the MAC address of a new host: that takes seconds where there is
// nobody. It fails without a word; the next datagram looks again.
ibv_ah *Datagrams::path_to(const VerbsAddress &place)
{
    constexpr auto no_time = std::chrono::seconds(0);
    Path &path = paths[host_of(place)];
    if (path.coming.valid() && path.coming.wait_for(no_time) != std::future_status::timeout)
        path.handle = path.coming.get();
    if (path.handle != nullptr || path.coming.valid()) return path.handle.get();

    const auto searches = std::ranges::count_if(paths, [&](const auto &each) {
        const auto &coming = each.second.coming;
        return coming.valid() && coming.wait_for(no_time) == std::future_status::timeout;
    });
    const auto search = [pd = adapter->pd.get(), attributes = adapter->path_to(place)]() mutable {
        return AddressHandle(ibv_create_ah(pd, &attributes));
    };
    // Deferred, until the next datagram, where there cannot be another thread.
    if (searches < most_searches) path.coming = std::async(std::launch::async | std::launch::deferred, search);
    return nullptr;
}

void Datagrams::forget_path(const VerbsAddress &place)
{
    if (posted == done) paths[host_of(place)].handle.reset(); // else it may be in use
}

void Datagrams::send(const VerbsAddress &place, std::span<const uint8_t> bytes)
{
    ibv_ah *const path = path_to(place);
    if (broken || path == nullptr || posted - done == under_way || bytes.size() > longest) return;
    uint8_t *const copy = memory.data() + slots * room + posted % under_way * longest;
    std::ranges::copy(bytes, copy);

    ibv_sge element{
        .addr = reinterpret_cast<uintptr_t>(copy), .length = static_cast<uint32_t>(bytes.size()), .lkey = region->lkey};
    ibv_send_wr request{}, *refused = nullptr;
    request.wr_id = RequestName{.kind = RequestName::datagram}.id();
    request.sg_list = &element;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    request.wr.ud.ah = path;
    request.wr.ud.remote_qpn = place.queue_pair;
    request.wr.ud.remote_qkey = place.qkey;
    if (ibv_post_send(pair.get(), &request, &refused) == 0) ++posted;
}

void Datagrams::post_receive(uint32_t slot)
{
    ibv_sge element{.addr = reinterpret_cast<uintptr_t>(memory.data() + slot * room),
                    .length = static_cast<uint32_t>(room),
                    .lkey = region->lkey};
    ibv_recv_wr receive{}, *refused = nullptr;
    receive.wr_id = RequestName{.kind = RequestName::datagram, .number = slot}.id();
    receive.sg_list = &element;
    receive.num_sge = 1;
    if (ibv_post_recv(pair.get(), &receive, &refused) == 0) ++receiving;
}

void Datagrams::sent(bool ok)
{
    ++done;
    if (!ok) break_off();
    begin_anew_if_empty();
}

std::span<const uint8_t> Datagrams::received(const ibv_wc &completion) const
{
    const size_t start = RequestName::of(completion.wr_id).number * room;
    if (completion.status != IBV_WC_SUCCESS || completion.byte_len < grh_bytes || completion.byte_len > room) return {};
    return std::span(memory).subspan(start + grh_bytes, completion.byte_len - grh_bytes);
}

void Datagrams::give_back(const ibv_wc &completion)
{
    --receiving;
    if (completion.status != IBV_WC_SUCCESS) break_off();
    if (!broken) post_receive(RequestName::of(completion.wr_id).number);
    begin_anew_if_empty();
}

} // namespace transfer_engine
