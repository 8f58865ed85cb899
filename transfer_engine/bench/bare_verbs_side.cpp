// bare_verbs_side.cpp: writes and reads by libibverbs with nothing between. A reliable connection (RC) to each peer,
// one completion queue, every request signalled.
#include "side.hpp"

#include "../verbs_adapter.hpp" // the owners

#include <algorithm>
#include <cstring>

namespace bench
{

namespace
{

using transfer_engine::Owned;

void require(bool holds, const char *call, int error)
{
    if (!holds) throw std::runtime_error(std::string(call) + ": " + strerror(error));
}

struct Target {
    uint64_t base = 0;
    uint32_t key = 0, queue_pair = 0, first_psn = 0, rd_atomic = 0;
    ibv_gid gid{};
    uint16_t lid = 0;
};

class BareVerbsSide final : public BareSide
{
public:
    BareVerbsSide(const std::string &device, std::span<uint8_t> bytes, size_t peers, int core);
    Bytes describe(size_t peer) override;
    void connect(size_t peer, const Bytes &description) override;

private:
    void open(const std::string &name);
    void find_gid();
    bool post(size_t peer, bool read, uint64_t offset, uint64_t length) override;
    uint64_t poll() override;

    static constexpr uint8_t port_number = 1;
    static constexpr uint32_t depth = 256; // of a send queue
    static constexpr uint32_t first_psn = 1;

    std::span<uint8_t> memory;
    Owned<ibv_context, ibv_close_device> context;
    ibv_port_attr port{};
    ibv_device_attr limits{};
    uint8_t gid_index = 0;
    ibv_gid gid{};
    Owned<ibv_pd, ibv_dealloc_pd> domain;
    Owned<ibv_mr, ibv_dereg_mr> region;
    Owned<ibv_cq, ibv_destroy_cq> completions;
    std::vector<Owned<ibv_qp, ibv_destroy_qp>> pairs;
    std::vector<Target> targets;
    std::vector<uint32_t> under_way;
};

BareVerbsSide::BareVerbsSide(const std::string &device, std::span<uint8_t> bytes, size_t peers, int core)
    : BareSide(peers, core), memory(bytes), pairs(peers), targets(peers), under_way(peers)
{
    open(device);
    find_gid();
    domain.reset(ibv_alloc_pd(context.get()));
    require(domain != nullptr, "ibv_alloc_pd()", errno);
    constexpr int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    region.reset(ibv_reg_mr(domain.get(), memory.data(), memory.size(), access));
    require(region != nullptr, "ibv_reg_mr()", errno);
    completions.reset(ibv_create_cq(context.get(), static_cast<int>(depth * peers), nullptr, nullptr, 0));
    require(completions != nullptr, "ibv_create_cq()", errno);
    for (auto &pair : pairs) {
        ibv_qp_init_attr wanted{};
        wanted.send_cq = wanted.recv_cq = completions.get();
        wanted.cap = {
            .max_send_wr = depth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
        wanted.qp_type = IBV_QPT_RC;
        pair.reset(ibv_create_qp(domain.get(), &wanted));
        require(pair != nullptr, "ibv_create_qp()", errno);
    }
}

void BareVerbsSide::open(const std::string &name)
{
    int count = 0;
    ibv_device **const devices = ibv_get_device_list(&count);
    require(devices != nullptr, "ibv_get_device_list()", errno);
    for (ibv_device *device : std::span(devices, static_cast<size_t>(count)))
        if (name == ibv_get_device_name(device)) context.reset(ibv_open_device(device));
    ibv_free_device_list(devices);
    require(context != nullptr, ("ibv_open_device(" + name + ")").c_str(), ENODEV);
    require(ibv_query_port(context.get(), port_number, &port) == 0, "ibv_query_port(1)", errno);
    require(ibv_query_device(context.get(), &limits) == 0, "ibv_query_device()", errno);
}

// On Ethernet the first of RoCE v2 that is not link-local.
void BareVerbsSide::find_gid()
{
    for (uint32_t i = 0; i < static_cast<uint32_t>(std::min(port.gid_tbl_len, 256)); ++i) {
        ibv_gid_entry entry{};
        if (ibv_query_gid_ex(context.get(), port_number, i, &entry, 0) != 0) continue;
        const bool local = entry.gid.raw[0] == 0xfe && (entry.gid.raw[1] & 0xc0) == 0x80;
        if (port.link_layer == IBV_LINK_LAYER_ETHERNET && (entry.gid_type != IBV_GID_TYPE_ROCE_V2 || local)) continue;
        gid_index = static_cast<uint8_t>(i);
        gid = entry.gid;
        return;
    }
    throw std::runtime_error("ibv_query_gid_ex(): no GID of RoCE v2");
}

Bytes BareVerbsSide::describe(size_t peer)
{
    const Target own{.base = reinterpret_cast<uintptr_t>(memory.data()),
                     .key = region->rkey,
                     .queue_pair = pairs[peer]->qp_num,
                     .first_psn = first_psn,
                     .rd_atomic = static_cast<uint32_t>(std::min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom)),
                     .gid = gid,
                     .lid = port.lid};
    Bytes made(sizeof own);
    memcpy(made.data(), &own, sizeof own);
    return made;
}

void BareVerbsSide::connect(size_t peer, const Bytes &description)
{
    Target &target = targets[peer];
    if (description.size() != sizeof target) throw std::runtime_error("the other process speaks another language");
    memcpy(&target, description.data(), sizeof target);
    ibv_qp *const pair = pairs[peer].get();

    ibv_qp_attr init{};
    init.qp_state = IBV_QPS_INIT;
    init.port_num = port_number;
    init.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    require(ibv_modify_qp(pair, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
            "ibv_modify_qp(INIT)", errno);

    const auto reads = static_cast<uint8_t>(std::clamp<uint32_t>(target.rd_atomic, 1, UINT8_MAX));
    ibv_qp_attr receive{};
    receive.qp_state = IBV_QPS_RTR;
    receive.path_mtu = port.active_mtu;
    receive.dest_qp_num = target.queue_pair;
    receive.rq_psn = target.first_psn;
    receive.max_dest_rd_atomic = reads;
    receive.min_rnr_timer = 12; // 0.64 ms, IB specification 9.7.5.2.8; there are no receives
    receive.ah_attr.port_num = port_number;
    receive.ah_attr.dlid = target.lid;
    receive.ah_attr.is_global = 1;
    receive.ah_attr.grh.dgid = target.gid;
    receive.ah_attr.grh.sgid_index = gid_index;
    receive.ah_attr.grh.hop_limit = 64;
    require(ibv_modify_qp(pair, &receive,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
            "ibv_modify_qp(RTR)", errno);

    ibv_qp_attr send{};
    send.qp_state = IBV_QPS_RTS;
    send.timeout = 17; // 4.096 us * 2^17: half a second
    send.retry_cnt = 7;
    send.rnr_retry = 7;
    send.sq_psn = first_psn;
    send.max_rd_atomic = reads;
    require(ibv_modify_qp(pair, &send,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC) == 0,
            "ibv_modify_qp(RTS)", errno);
}

bool BareVerbsSide::post(size_t peer, bool read, uint64_t offset, uint64_t length)
{
    if (under_way[peer] == depth) return false;
    ibv_sge element{.addr = reinterpret_cast<uintptr_t>(memory.data() + offset),
                    .length = static_cast<uint32_t>(length),
                    .lkey = region->lkey};
    ibv_send_wr request{}, *refused = nullptr;
    request.wr_id = peer;
    request.sg_list = &element;
    request.num_sge = 1;
    request.opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = targets[peer].base + offset;
    request.wr.rdma.rkey = targets[peer].key;
    const int error = ibv_post_send(pairs[peer].get(), &request, &refused);
    require(error == 0, "ibv_post_send()", error);
    ++under_way[peer];
    return true;
}

uint64_t BareVerbsSide::poll()
{
    std::array<ibv_wc, 32> entries;
    const int count = ibv_poll_cq(completions.get(), static_cast<int>(entries.size()), entries.data());
    require(count >= 0, "ibv_poll_cq()", EIO);
    for (const ibv_wc &entry : std::span(entries).first(static_cast<size_t>(count))) {
        if (entry.status != IBV_WC_SUCCESS)
            throw std::runtime_error(std::string("completion: ") + ibv_wc_status_str(entry.status));
        --under_way[entry.wr_id];
    }
    return static_cast<uint64_t>(count);
}

} // namespace

std::unique_ptr<Side> bare_verbs_side(const std::string &device, std::span<uint8_t> memory, size_t peers, int core)
{
    return std::make_unique<BareVerbsSide>(device, memory, peers, core);
}

} // namespace bench
