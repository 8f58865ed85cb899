// ofi_adapter.cpp: opens adapters and endpoints of libfabric, registers memory, checks addresses.
#include "ofi_adapter.hpp"

#include "cuda.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <string_view>

namespace transfer_engine
{

namespace
{

// A NetAddr: "OFI", the address format of libfabric, then the provider's bytes.
constexpr std::string_view address_magic = "OFI";
constexpr size_t address_start = address_magic.size() + 1;

Status unsupported(std::string message) { return {.code = Code::unsupported, .message = std::move(message)}; }
Status invalid(std::string message) { return {.code = Code::invalid, .message = std::move(message)}; }

// Puts what an open function of libfabric makes into its owner.
template <typename Thing, typename Open> int open_into(Closed<Thing> *owner, const Open &open)
{
    Thing *made = nullptr;
    const int error = open(&made);
    if (error == 0) owner->reset(made);
    return error;
}

// What this backend asks for. Whatever modes it offers, it serves; what it does not, FI_MR_ENDPOINT among them, is of
// no provider that is found.
ProviderInfo make_hints(const std::string &provider)
{
    ProviderInfo hints(fi_allocinfo());
    if (hints == nullptr) return nullptr;
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->threading = FI_THREAD_SAFE; // register_memory()
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->fabric_attr->prov_name = strdup(provider.c_str());
    return hints;
}

// The provider's first domain of that name. What it may do without is left out by and by: memory of GPUs first. That is
// asked for only where there is a GPU: shm gives up its fastest way between processes (CMA) for it.
Status find_info(const std::string &provider, const std::string &domain_name, ProviderInfo *info)
{
    constexpr uint32_t api_version = FI_VERSION(1, 17);
    const std::string call = "fi_getinfo(" + provider + (domain_name.empty() ? "" : ", " + domain_name) + ")";
    const ProviderInfo hints = make_hints(provider);
    if (hints == nullptr) return ofi_failed("fi_allocinfo()", -FI_ENOMEM);
    const bool have_gpus = CudaDriver::of_this_process().status().ok();
    std::string names;
    for (const auto &[op_flags, gpus] : {std::pair(FI_DELIVERY_COMPLETE, true), std::pair(FI_DELIVERY_COMPLETE, false),
                                         std::pair(0ULL, true), std::pair(0ULL, false)}) {
        if (*info != nullptr || (gpus && !have_gpus)) continue;
        hints->caps = FI_MSG | FI_RMA | (gpus ? FI_HMEM : 0);
        hints->domain_attr->mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | (gpus ? FI_MR_HMEM : 0);
        hints->tx_attr->op_flags = op_flags;
        fi_info *list = nullptr;
        const int error = fi_getinfo(api_version, nullptr, nullptr, 0, hints.get(), &list);
        if (error != 0 && error != -FI_ENODATA) return ofi_failed(call, error);
        const ProviderInfo found(list);
        for (const fi_info *each = list; each != nullptr && *info == nullptr; each = each->next) {
            const std::string name = each->domain_attr->name; // given as a hint, not every provider would look at it
            if (domain_name.empty() || name == domain_name) info->reset(fi_dupinfo(each));
            if (names.find(name) == std::string::npos) names += (names.empty() ? "" : ", ") + name;
        }
    }
    if (names.empty()) return unsupported(call + ": no such provider, or none with messages and RMA");
    if (*info == nullptr) return invalid(call + ": no such domain; there are: " + names);
    const size_t data_size = (*info)->domain_attr->cq_data_size;
    if (data_size >= sizeof(uint32_t)) return {};
    return unsupported(call + ": " + std::to_string(data_size) + " bytes of remote data, an immediate has 4");
}

} // namespace

const char *ofi_reason(int error)
{
    // strerror() may return what its next call overwrites.
    const char *reason = error < FI_ERRNO_OFFSET ? strerrordesc_np(error) : fi_strerror(error);
    return reason != nullptr ? reason : "unknown error";
}

Status ofi_failed(const std::string &call, ssize_t error)
{
    const int number = static_cast<int>(-error);
    const Code code = number == FI_ENOSYS || number == FI_EOPNOTSUPP ? Code::unsupported : Code::failed;
    return {.code = code, .message = call + ": " + ofi_reason(number)};
}

Status OfiAdapter::open(const std::string &provider, const std::string &domain_name)
{
    Status status = find_info(provider, domain_name, &info);
    if (!status.ok()) return status;
    delivery_complete = info->tx_attr->op_flags & FI_DELIVERY_COMPLETE;
    info->tx_attr->op_flags = 0; // asked for with each request
    data_takes_receives = (info->mode & FI_RX_CQ_DATA) != 0;
    removal_may_fail_posts = info->ep_attr->protocol == FI_PROTO_RXM;
    confirms_empty = info->ep_attr->protocol != FI_PROTO_SHM; // 1.17 does not complete it

    int error = open_into(&fabric, [&](auto **made) { return fi_fabric(info->fabric_attr, made, nullptr); });
    if (error != 0) return ofi_failed(std::string("fi_fabric(") + info->fabric_attr->name + ")", error);
    error = open_into(&domain, [&](auto **made) { return fi_domain(fabric.get(), info.get(), made, nullptr); });
    if (error != 0) return ofi_failed(std::string("fi_domain(") + info->domain_attr->name + ")", error);

    // A key that peers of an earlier process at this address still have must not fit a region of this one.
    const size_t key_size = std::min(info->domain_attr->mr_key_size, sizeof(uint64_t));
    key_mask = key_size == sizeof(uint64_t) ? UINT64_MAX : (uint64_t{1} << (8 * key_size)) - 1;
    std::random_device random;
    next_key = uint64_t{random()} << 32 | random();
    return {};
}

Status OfiAdapter::register_memory(void *start, uint64_t length, int device, MemoryKeys *keys)
{
    const std::string call = "fi_mr_regattr(" + std::to_string(length) + " bytes" + (device == host ? ")" : ", CUDA)");
    if (start == nullptr || length == 0) return invalid(call + ": nothing to register");
    if (device != host) {
        if (Status status = CudaDriver::of_this_process().check_memory(device, start); !status.ok()) return status;
        // Without it libfabric would take the memory for the host's.
        if ((info->caps & FI_HMEM) == 0)
            return unsupported(call + ": " + info->fabric_attr->prov_name + " has no FI_HMEM for memory of GPUs");
    }
    const iovec range{.iov_base = start, .iov_len = length};
    fi_mr_attr wanted{};
    wanted.mr_iov = &range;
    wanted.iov_count = 1;
    wanted.access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    wanted.iface = device == host ? FI_HMEM_SYSTEM : FI_HMEM_CUDA;
    if (device != host) wanted.device.cuda = device;
    constexpr int most_tries = 1000;
    Closed<fid_mr> region;
    uint64_t handle = 0;
    int error = -FI_ENOKEY; // in use: few bytes of key come round again
    for (int tries = 0; error == -FI_ENOKEY && tries < most_tries; ++tries) {
        handle = next_key.fetch_add(1);
        wanted.requested_key = handle & key_mask;
        error = open_into(&region, [&](auto **made) { return fi_mr_regattr(domain.get(), &wanted, 0, made); });
    }
    if (error != 0) return ofi_failed(call, error);
    keys->local = std::bit_cast<uint64_t>(fi_mr_desc(region.get()));
    keys->remote = fi_mr_key(region.get()); // ours, or with FI_MR_PROV_KEY the provider's
    keys->base = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? std::bit_cast<uint64_t>(start) : 0;
    keys->handle = handle;
    const std::lock_guard lock(mutex);
    regions[handle] = std::move(region);
    return {};
}

void OfiAdapter::deregister_memory(const MemoryKeys &keys)
{
    const std::lock_guard lock(mutex);
    regions.erase(keys.handle);
}

Status OfiAdapter::address_of(fid_ep *endpoint, NetAddr *address) const
{
    *address = {};
    std::copy(address_magic.begin(), address_magic.end(), address->bytes.begin());
    address->bytes[address_magic.size()] = static_cast<uint8_t>(info->addr_format);
    size_t length = most_address_bytes - address_start;
    const int error = fi_getname(&endpoint->fid, &address->bytes[address_start], &length);
    if (error == -FI_ETOOSMALL)
        return unsupported("fi_getname(): an address of " + std::to_string(length) + " bytes, too long for a NetAddr");
    if (error != 0) return ofi_failed("fi_getname()", error);
    address->length = static_cast<uint8_t>(address_start + length);
    return {};
}

Status OfiAdapter::check(const NetAddr &address, const NetAddr &own) const
{
    const auto begins_alike = [&](size_t count) { return memcmp(address.bytes.data(), own.bytes.data(), count) == 0; };
    const std::string provider = info->fabric_attr->prov_name;
    if (address.length <= address_start || address.length > most_address_bytes || !begins_alike(address_start))
        return invalid("find_peer(): the address is of another transport than " + provider);

    const size_t length = address.length - address_start;
    const auto *const text = static_cast<const char *>(bytes_of(address));
    bool fits = false;
    if (info->addr_format == FI_ADDR_STR) { // ends with its only zero; a scheme, as fi_shm://, before the name
        const std::string_view own_text = static_cast<const char *>(bytes_of(own));
        const size_t scheme = own_text.find("://") == std::string_view::npos ? 0 : own_text.find("://");
        fits = strnlen(text, length) == length - 1 && begins_alike(address_start + scheme);
    } else {
        const bool of_sockets = info->addr_format == FI_SOCKADDR_IN || info->addr_format == FI_SOCKADDR_IN6;
        fits = address.length == own.length && begins_alike(address_start + (of_sockets ? sizeof(sa_family_t) : 0));
    }
    return fits ? Status{} : invalid("find_peer(): " + std::to_string(length) + " bytes, no address of " + provider);
}

const void *OfiAdapter::bytes_of(const NetAddr &address) { return &address.bytes[address_start]; }

Status OfiEndpoint::open(const OfiAdapter &adapter, size_t most_completions)
{
    fid_domain *const domain = adapter.domain.get();
    fi_av_attr peers_attr{};
    peers_attr.type = adapter.info->domain_attr->av_type;
    fi_cq_attr completions_attr{};
    completions_attr.size = most_completions;
    completions_attr.format = FI_CQ_FORMAT_DATA;
    completions_attr.wait_obj = FI_WAIT_NONE;
    int error = open_into(&peers, [&](auto **made) { return fi_av_open(domain, &peers_attr, made, nullptr); });
    if (error != 0) return ofi_failed("fi_av_open()", error);
    error = open_into(&completions, [&](auto **made) { return fi_cq_open(domain, &completions_attr, made, nullptr); });
    if (error != 0) return ofi_failed("fi_cq_open(" + std::to_string(most_completions) + " entries)", error);
    error = open_into(&endpoint, [&](auto **made) { return fi_endpoint(domain, adapter.info.get(), made, nullptr); });
    if (error != 0) return ofi_failed("fi_endpoint(FI_EP_RDM)", error);
    error = fi_ep_bind(endpoint.get(), &peers->fid, 0);
    if (error == 0) error = fi_ep_bind(endpoint.get(), &completions->fid, FI_TRANSMIT | FI_RECV);
    if (error != 0) return ofi_failed("fi_ep_bind()", error);
    error = fi_enable(endpoint.get());
    return error == 0 ? Status{} : ofi_failed("fi_enable()", error);
}

void OfiEndpoint::close()
{
    endpoint.reset();
    completions.reset();
    peers.reset();
}

void OfiOperations::open(size_t count)
{
    all.resize(count); // they stay where they are from here on
    for (OfiOperation &operation : all)
        idle.push_back(&operation);
}

OfiOperation *OfiOperations::take()
{
    if (idle.empty()) return nullptr;
    OfiOperation *const operation = idle.back();
    idle.pop_back();
    operation->busy = true;
    return operation;
}

void OfiOperations::give_back(OfiOperation *operation)
{
    operation->busy = false;
    idle.push_back(operation);
}

OfiOperation *OfiOperations::find(void *name)
{
    const uintptr_t offset = std::bit_cast<uintptr_t>(name) - std::bit_cast<uintptr_t>(all.data());
    const size_t index = offset / sizeof(OfiOperation);
    if (offset % sizeof(OfiOperation) != 0 || index >= all.size() || !all[index].busy) return nullptr;
    return &all[index];
}

} // namespace transfer_engine
