// verbs_peer.cpp: see verbs_peer.hpp.
#include "verbs_peer.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <bit>

namespace transfer_engine
{

// Retransmission. 4.096 us * 2^17 = 0.54 s for an answer (adapters may take up to four times that), the first try and
// six more: a peer that is gone is noticed after some 4 s. SoftRoCE takes 7 retries for endless ones.
constexpr uint8_t ack_timeout = 17, ack_retries = 6;
// A peer without a receive is waited for without end: the operations have deadlines of their own.
constexpr uint8_t receive_retries = 7;
constexpr uint8_t receive_wait = 12; // 0.64 ms until the next try

constexpr uint32_t most_data = 256, most_messages = 64; // work requests under way to a peer

// For a device that does not say that a broken queue pair takes no more receives, as SoftRoCE.
constexpr auto quiet_after = std::chrono::milliseconds(50);
constexpr auto forced_after = std::chrono::seconds(1); // for what never retires

// ---------------------------------------------------------------------------------- a queue pair

static Status modify(ibv_qp *pair, ibv_qp_attr *attributes, int mask, const char *state)
{
    const int error = ibv_modify_qp(pair, attributes, mask | IBV_QP_STATE);
    if (error == 0) return {};
    return verbs_failed("ibv_modify_qp(RC, " + std::string(state) + ")", error);
}

Status VerbsQueue::open(const VerbsAdapter &adapter, ibv_srq *receives, RequestName::Kind kind, uint32_t peer,
                        uint32_t most)
{
    depth = std::bit_floor(std::min(most, static_cast<uint32_t>(adapter.limits.max_qp_wr)));
    ibv_qp_init_attr wanted{};
    wanted.send_cq = adapter.sends.get();
    wanted.recv_cq = adapter.receives.get();
    wanted.srq = receives;
    wanted.cap.max_send_wr = depth;
    wanted.cap.max_send_sge = 1;
    wanted.qp_type = IBV_QPT_RC;
    pair.reset(ibv_create_qp(adapter.pd.get(), &wanted));
    if (pair == nullptr) return verbs_failed("ibv_create_qp(RC, " + std::to_string(depth) + " deep)", errno);

    pair_number = pair->qp_num;
    name = {.kind = kind, .number = peer};
    psn = static_cast<uint32_t>(random_number() & 0xffffff);
    contexts.resize(depth);
    for (size_t i = 0; i < longest_chain; ++i) {
        chain[i].sg_list = &elements[i];
        chain[i].next = i + 1 < longest_chain ? &chain[i + 1] : nullptr;
    }
    ibv_qp_attr init{};
    init.qp_state = IBV_QPS_INIT;
    init.port_num = adapter.port_number;
    init.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    return modify(pair.get(), &init, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
}

Status VerbsQueue::connect(ibv_ah_attr path, const QueuePairNumber &remote, ibv_mtu mtu, uint8_t rd_atomic)
{
    ibv_qp_attr receive{};
    receive.qp_state = IBV_QPS_RTR;
    receive.ah_attr = path;
    receive.path_mtu = mtu;
    receive.dest_qp_num = remote.number;
    receive.rq_psn = remote.psn;
    receive.max_dest_rd_atomic = rd_atomic;
    receive.min_rnr_timer = receive_wait;
    Status status = modify(pair.get(), &receive,
                           IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                               IBV_QP_MIN_RNR_TIMER,
                           "RTR");
    if (!status.ok()) return status;

    ibv_qp_attr send{};
    send.qp_state = IBV_QPS_RTS;
    send.sq_psn = psn;
    send.max_rd_atomic = rd_atomic;
    send.timeout = ack_timeout;
    send.retry_cnt = ack_retries;
    send.rnr_retry = receive_retries;
    return modify(pair.get(), &send,
                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY,
                  "RTS");
}

void VerbsQueue::break_off()
{
    // Where this fails the device is gone, and VerbsPeer::close() ends what is posted.
    ibv_qp_attr error{};
    error.qp_state = IBV_QPS_ERR;
    if (pair != nullptr) ibv_modify_qp(pair.get(), &error, IBV_QP_STATE);
}

static ibv_wr_opcode opcode_of(const WorkRequest &request)
{
    switch (request.operation) {
    case Operation::read: return IBV_WR_RDMA_READ;
    case Operation::send: return IBV_WR_SEND;
    case Operation::write: break;
    }
    return request.has_imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
}

size_t VerbsQueue::post(std::span<const WorkRequest> requests, size_t most, int *error)
{
    const size_t count = std::min({requests.size(), most, longest_chain, size_t{depth} - under_way()});
    *error = 0;
    if (count == 0) return 0;
    for (size_t i = 0; i < count; ++i) {
        const WorkRequest &request = requests[i];
        ibv_send_wr &next = chain[i];
        elements[i].addr = reinterpret_cast<uintptr_t>(request.local);
        elements[i].length = request.length;
        elements[i].lkey = static_cast<uint32_t>(request.local_key);
        name.sequence = posted + static_cast<uint32_t>(i);
        next.wr_id = name.id();
        next.num_sge = request.length > 0 ? 1 : 0; // to some adapters an element of length 0 is one of 2^31 bytes
        next.opcode = opcode_of(request);
        next.imm_data = htonl(request.imm);
        next.wr.rdma.remote_addr = request.remote;
        next.wr.rdma.rkey = static_cast<uint32_t>(request.remote_key);
        contexts[name.sequence & (depth - 1)] = request.context;
    }
    // One completion for a chain: that of its last tells of all. A failed request has one of its own in any case.
    ibv_send_wr &last = chain[count - 1], *const after = last.next, *refused = nullptr;
    last.next = nullptr;
    last.send_flags = IBV_SEND_SIGNALED;
    *error = ibv_post_send(pair.get(), chain.data(), &refused);
    last.next = after;
    last.send_flags = 0;
    // Without a `refused` the doorbell failed, and all are in the queue.
    const bool all = *error == 0 || refused == nullptr;
    const size_t taken = all ? count : static_cast<size_t>(refused - chain.data());
    posted += static_cast<uint32_t>(taken);
    return taken;
}

uint32_t VerbsQueue::retiring(uint32_t sequence) const
{
    const uint32_t count = ((sequence - retired) & RequestName::sequence_mask) + 1;
    return count <= under_way() ? count : 0;
}

// ------------------------------------------------------------------------------------ both of them

Status VerbsPeer::open(const VerbsAdapter &adapter)
{
    Status status = data.open(adapter, adapter.immediates.get(), RequestName::data, number, most_data);
    if (status.ok())
        status = messages.open(adapter, adapter.messages.get(), RequestName::message, number, most_messages);
    return status;
}

Status VerbsPeer::connect(const VerbsAdapter &adapter, const Handshake &message)
{
    const ibv_ah_attr path = adapter.path_to(place);
    const auto mtu = static_cast<ibv_mtu>(std::min<int>(adapter.port.active_mtu, message.mtu));
    const uint8_t rd_atomic = std::min(adapter.rd_atomic(), message.rd_atomic);
    Status status = data.connect(path, message.data, mtu, rd_atomic);
    if (status.ok()) status = messages.connect(path, message.messages, mtu, rd_atomic);
    return status;
}

size_t VerbsPeer::post(std::span<const WorkRequest> requests, size_t most, int *error)
{
    const auto is_message = [&](size_t i) { return requests[i].operation == Operation::send; };
    size_t count = 1;
    while (count < std::min(requests.size(), VerbsQueue::longest_chain) && is_message(count) == is_message(0))
        ++count;
    return (is_message(0) ? messages : data).post(requests.first(count), most, error);
}

bool VerbsPeer::drained(Clock::time_point now) const
{
    if (now - since >= forced_after) return true;
    return under_way() == 0 && (quiet_queues == 2 || now - since >= quiet_after);
}

void VerbsPeer::close()
{
    closing = std::async(std::launch::async | std::launch::deferred,
                         [first = data.take_away(), second = messages.take_away()]() mutable {
                             first.reset();
                             second.reset();
                         });
}

} // namespace transfer_engine
