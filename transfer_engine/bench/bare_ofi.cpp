#include "bare_ofi.hpp"

#include <array>
#include <cstring>
#include <stdexcept>

namespace bare
{

static void require(ssize_t result, const char *call)
{
    if (result < 0) throw std::runtime_error(std::string(call) + ": " + fi_strerror(static_cast<int>(-result)));
}

// What FI_EP_RDM with RMA needs, as little as that; the memory registration modes are those that are honoured below.
static fi_info *find(const std::string &provider)
{
    fi_info *const hints = fi_allocinfo();
    if (hints == nullptr) throw std::runtime_error("fi_allocinfo(): no memory");
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_RMA | FI_MSG;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->tx_attr->op_flags = FI_COMPLETION | FI_DELIVERY_COMPLETE; // as the engine asks for
    hints->fabric_attr->prov_name = strdup(provider.c_str());
    fi_info *found = nullptr;
    const int error = fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &found);
    fi_freeinfo(hints);
    require(error, "fi_getinfo()");
    return found;
}

Ofi::Ofi(const std::string &provider, void *memory_start, uint64_t length)
    : info(find(provider)), start(static_cast<uint8_t *>(memory_start))
{
    fid_fabric *made_fabric = nullptr;
    require(fi_fabric(info->fabric_attr, &made_fabric, nullptr), "fi_fabric()");
    fabric.reset(made_fabric);
    fid_domain *made_domain = nullptr;
    require(fi_domain(fabric.get(), info, &made_domain, nullptr), "fi_domain()");
    domain.reset(made_domain);
    fid_ep *made_endpoint = nullptr;
    require(fi_endpoint(domain.get(), info, &made_endpoint, nullptr), "fi_endpoint()");
    endpoint.reset(made_endpoint);
    fi_av_attr peer_attributes{};
    peer_attributes.type = FI_AV_TABLE;
    fid_av *made_peers = nullptr;
    require(fi_av_open(domain.get(), &peer_attributes, &made_peers, nullptr), "fi_av_open()");
    peers.reset(made_peers);
    fi_cq_attr queue_attributes{};
    queue_attributes.size = info->tx_attr->size + info->rx_attr->size;
    queue_attributes.format = FI_CQ_FORMAT_CONTEXT;
    fid_cq *made_completions = nullptr;
    require(fi_cq_open(domain.get(), &queue_attributes, &made_completions, nullptr), "fi_cq_open()");
    completions.reset(made_completions);
    require(fi_ep_bind(endpoint.get(), &peers->fid, 0), "fi_ep_bind(av)");
    require(fi_ep_bind(endpoint.get(), &completions->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)");
    require(fi_enable(endpoint.get()), "fi_enable()");
    fid_mr *made_memory = nullptr;
    require(fi_mr_reg(domain.get(), memory_start, length, FI_WRITE | FI_REMOTE_WRITE, 0, 1, 0, &made_memory, nullptr),
            "fi_mr_reg()");
    memory.reset(made_memory);
    contexts.resize(2 * info->tx_attr->size);
}

// The endpoint before what is bound to it; the rest in the reverse order of its members.
Ofi::~Ofi()
{
    endpoint.reset();
    memory.reset();
    completions.reset();
    peers.reset();
    domain.reset();
    fabric.reset();
    fi_freeinfo(info);
}

Target Ofi::target() const
{
    Target made;
    size_t length = 256;
    made.address.resize(length);
    require(fi_getname(&endpoint->fid, made.address.data(), &length), "fi_getname()");
    made.address.resize(length);
    made.base = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uintptr_t>(start) : 0;
    made.key = fi_mr_key(memory.get());
    return made;
}

void Ofi::connect(const Target &to)
{
    there = to;
    if (fi_av_insert(peers.get(), to.address.data(), 1, &peer, 0, nullptr) != 1)
        throw std::runtime_error("fi_av_insert(): refused");
}

bool Ofi::post(uint64_t offset, uint64_t length)
{
    fi_context2 *const context = &contexts[next_context];
    const ssize_t result = fi_write(endpoint.get(), start + offset, length, fi_mr_desc(memory.get()), peer,
                                    there.base + offset, there.key, context);
    if (result == -FI_EAGAIN) return false;
    require(result, "fi_write()");
    next_context = (next_context + 1) % contexts.size();
    return true;
}

uint64_t Ofi::poll()
{
    std::array<fi_cq_entry, 32> entries{};
    const ssize_t count = fi_cq_read(completions.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN) return 0;
    if (count == -FI_EAVAIL) {
        fi_cq_err_entry error{};
        require(fi_cq_readerr(completions.get(), &error, 0), "fi_cq_readerr()");
        throw std::runtime_error(std::string("fi_write(): ") + fi_strerror(error.err));
    }
    require(count, "fi_cq_read()");
    return static_cast<uint64_t>(count);
}

} // namespace bare
