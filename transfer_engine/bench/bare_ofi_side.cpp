// bare_ofi_side.cpp: writes and reads by libfabric with nothing between. One endpoint, one thread.
#include "side.hpp"

#include "../ofi_adapter.hpp" // the owners

#include <cstring>
#include <poll.h>
#include <rdma/fi_rma.h>
#include <thread>

namespace bench
{

namespace
{

using transfer_engine::Closed;
using transfer_engine::ProviderInfo;

void require(ssize_t result, const char *call)
{
    if (result < 0) throw std::runtime_error(std::string(call) + ": " + fi_strerror(static_cast<int>(-result)));
}

template <typename Thing, typename Open> void open_into(Closed<Thing> *owner, const char *call, const Open &open)
{
    Thing *made = nullptr;
    require(open(&made), call);
    owner->reset(made);
}

// As little as FI_EP_RDM with RMA needs; the modes of memory registration are those that are honoured below.
ProviderInfo find(const std::string &provider)
{
    const ProviderInfo hints(fi_allocinfo());
    if (hints == nullptr) throw std::runtime_error("fi_allocinfo(): no memory");
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_RMA | FI_MSG;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE; // that the provider has it
    hints->fabric_attr->prov_name = strdup(provider.c_str());
    fi_info *found = nullptr;
    require(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints.get(), &found), "fi_getinfo()");
    return ProviderInfo(found);
}

struct Target { // followed by the provider's address
    uint64_t base = 0, key = 0;
};

class BareOfiSide final : public BareSide
{
public:
    BareOfiSide(const std::string &provider, std::span<uint8_t> bytes, size_t peers, int core);
    Bytes describe(size_t peer) override;
    void connect(size_t peer, const Bytes &description) override;
    void serve(int socket) override;

private:
    bool post(size_t peer, bool read, uint64_t offset, uint64_t length) override;
    uint64_t poll() override;

    std::span<uint8_t> memory;
    ProviderInfo info;
    Closed<fid_fabric> fabric;
    Closed<fid_domain> domain;
    Closed<fid_mr> region;
    Closed<fid_av> addresses;
    Closed<fid_cq> completions;
    Closed<fid_ep> endpoint; // closed before what is bound to it
    std::vector<fi_addr_t> places;
    std::vector<Target> targets;
    std::vector<fi_context2> contexts; // in turn: more than can be under way
    size_t next_context = 0;
    uint64_t polls = 0;
};

BareOfiSide::BareOfiSide(const std::string &provider, std::span<uint8_t> bytes, size_t peers, int core)
    : BareSide(peers, core), memory(bytes), info(find(provider)), places(peers), targets(peers)
{
    open_into(&fabric, "fi_fabric()", [&](auto **made) { return fi_fabric(info->fabric_attr, made, nullptr); });
    open_into(&domain, "fi_domain()", [&](auto **made) { return fi_domain(fabric.get(), info.get(), made, nullptr); });
    fi_av_attr addresses_attr{};
    addresses_attr.type = FI_AV_TABLE;
    open_into(&addresses, "fi_av_open()",
              [&](auto **made) { return fi_av_open(domain.get(), &addresses_attr, made, nullptr); });
    fi_cq_attr completions_attr{};
    completions_attr.size = info->tx_attr->size + info->rx_attr->size;
    completions_attr.format = FI_CQ_FORMAT_CONTEXT;
    open_into(&completions, "fi_cq_open()",
              [&](auto **made) { return fi_cq_open(domain.get(), &completions_attr, made, nullptr); });
    open_into(&endpoint, "fi_endpoint()",
              [&](auto **made) { return fi_endpoint(domain.get(), info.get(), made, nullptr); });
    require(fi_ep_bind(endpoint.get(), &addresses->fid, 0), "fi_ep_bind(av)");
    require(fi_ep_bind(endpoint.get(), &completions->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)");
    require(fi_enable(endpoint.get()), "fi_enable()");
    constexpr uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    open_into(&region, "fi_mr_reg()", [&](auto **made) {
        return fi_mr_reg(domain.get(), memory.data(), memory.size(), access, 0, 1, 0, made, nullptr);
    });
    contexts.resize(2 * info->tx_attr->size);
}

Bytes BareOfiSide::describe(size_t /*peer*/)
{
    const bool by_address = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    const Target own{.base = by_address ? reinterpret_cast<uintptr_t>(memory.data()) : 0,
                     .key = fi_mr_key(region.get())};
    constexpr size_t longest = 256;
    Bytes made(sizeof own + longest);
    memcpy(made.data(), &own, sizeof own);
    size_t length = longest;
    require(fi_getname(&endpoint->fid, made.data() + sizeof own, &length), "fi_getname()");
    made.resize(sizeof own + length);
    return made;
}

void BareOfiSide::connect(size_t peer, const Bytes &description)
{
    if (description.size() <= sizeof(Target)) throw std::runtime_error("the other process speaks another language");
    memcpy(&targets[peer], description.data(), sizeof(Target));
    if (fi_av_insert(addresses.get(), description.data() + sizeof(Target), 1, &places[peer], 0, nullptr) != 1)
        throw std::runtime_error("fi_av_insert(): refused");
}

// The providers that stand in for adapters move only when they are polled.
void BareOfiSide::serve(int socket)
{
    pollfd closed{.fd = socket, .events = POLLIN, .revents = 0};
    for (unsigned turn = 1; turn % 65536 != 0 || ::poll(&closed, 1, 0) == 0; ++turn)
        poll();
}

// By the same calls and with the same flags as the engine.
bool BareOfiSide::post(size_t peer, bool read, uint64_t offset, uint64_t length)
{
    const iovec local{.iov_base = memory.data() + offset, .iov_len = length};
    void *descriptor = fi_mr_desc(region.get());
    const fi_rma_iov remote{.addr = targets[peer].base + offset, .len = length, .key = targets[peer].key};
    const fi_msg_rma message{.msg_iov = &local,
                             .desc = &descriptor,
                             .iov_count = 1,
                             .addr = places[peer],
                             .rma_iov = &remote,
                             .rma_iov_count = 1,
                             .context = &contexts[next_context],
                             .data = 0};
    constexpr uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE;
    const ssize_t result =
        read ? fi_readmsg(endpoint.get(), &message, flags) : fi_writemsg(endpoint.get(), &message, flags);
    if (result == -FI_EAGAIN) return false;
    require(result, read ? "fi_readmsg()" : "fi_writemsg()");
    next_context = (next_context + 1) % contexts.size();
    return true;
}

// With a pause now and then: who polls shm without one hardly lets go of the lock that the other process wants
// (measured: a hundredth of the bandwidth).
uint64_t BareOfiSide::poll()
{
    if (++polls % 64 == 0) std::this_thread::yield();
    std::array<fi_cq_entry, 32> entries;
    const ssize_t count = fi_cq_read(completions.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN) return 0;
    if (count == -FI_EAVAIL) {
        fi_cq_err_entry error{};
        require(fi_cq_readerr(completions.get(), &error, 0), "fi_cq_readerr()");
        throw std::runtime_error(std::string("completion: ") + fi_strerror(error.err));
    }
    require(count, "fi_cq_read()");
    return static_cast<uint64_t>(count);
}

} // namespace

std::unique_ptr<Side> bare_ofi_side(const std::string &provider, std::span<uint8_t> memory, size_t peers, int core)
{
    return std::make_unique<BareOfiSide>(provider, memory, peers, core);
}

} // namespace bench
