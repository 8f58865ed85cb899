// ofi_adapter.hpp: what libfabric opens: an adapter, the memory registered with it, its endpoints; and the names that
// the operations on an endpoint have. What a provider wants is taken from the fi_info that it returns.
#pragma once

#include "domain.hpp"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include <map>
#include <mutex>

namespace transfer_engine
{

// Owners of what libfabric hands out. Members are destroyed last to first, so what others use is declared first.
struct Close {
    template <typename Thing> void operator()(Thing *thing) const { fi_close(&thing->fid); }
};
struct FreeInfo {
    void operator()(fi_info *info) const { fi_freeinfo(info); }
};
template <typename Thing> using Closed = std::unique_ptr<Thing, Close>;
using ProviderInfo = std::unique_ptr<fi_info, FreeInfo>;

// Why, with static lifetime. `error`: of errno or of libfabric, positive.
const char *ofi_reason(int error);
// `error`: as libfabric returns it, negative.
Status ofi_failed(const std::string &call, ssize_t error);

class OfiAdapter
{
public:
    ProviderInfo info;
    Closed<fid_fabric> fabric;
    Closed<fid_domain> domain;
    uint64_t delivery_complete = 0;      // the flag, where the provider has it
    bool data_takes_receives = false;    // FI_RX_CQ_DATA
    bool removal_may_fail_posts = false; // of a peer from the address vector: see ofi_domain.cpp
    bool confirms_empty = true;          // completes what has no bytes with that flag, too

    // domain_name "": the provider's first.
    Status open(const std::string &provider, const std::string &domain_name);

    // Any thread.
    Status register_memory(void *start, uint64_t length, int device, MemoryKeys *keys);
    void deregister_memory(const MemoryKeys &keys);

    // The address of an endpoint as others get it, and whether one that came from elsewhere fits this provider.
    Status address_of(fid_ep *endpoint, NetAddr *address) const;
    Status check(const NetAddr &address, const NetAddr &own) const;
    // What the provider calls it.
    static const void *bytes_of(const NetAddr &address);

private:
    std::atomic<uint64_t> next_key{0};
    uint64_t key_mask = 0;
    std::mutex mutex;                           // of regions
    std::map<uint64_t, Closed<fid_mr>> regions; // by MemoryKeys::handle
};

// An endpoint, with a completion queue and an address vector of its own.
struct OfiEndpoint {
    Closed<fid_av> peers;
    Closed<fid_cq> completions;
    Closed<fid_ep> endpoint;

    Status open(const OfiAdapter &adapter, size_t most_completions);
    void close();
};

// One operation in the provider's hands, which calls it by its address.
struct OfiOperation {
    fi_context2 for_provider{}; // FI_CONTEXT, FI_CONTEXT2
    bool busy = false;
    bool for_data = false; // a receive that remote data is to take
    uint32_t peer = 0;
    uint64_t context = 0;  // of the work request, or the receive
    void *start = nullptr; // a receive, to post it again
    uint64_t length = 0;
    void *descriptor = nullptr;
};

// As many of them as there can be.
class OfiOperations
{
public:
    void open(size_t count);
    OfiOperation *take(); // null: none is idle
    void give_back(OfiOperation *operation);
    // That which a completion names; null when it is none of these: not every error names one.
    OfiOperation *find(void *name);
    size_t busy() const { return all.size() - idle.size(); }
    std::span<OfiOperation> each() { return all; }

private:
    std::vector<OfiOperation> all;
    std::vector<OfiOperation *> idle;
};

} // namespace transfer_engine
