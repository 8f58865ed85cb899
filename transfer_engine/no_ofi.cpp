// no_ofi.cpp: instead of ofi_domain.cpp, where there is no libfabric to build it with.
#include "domain.hpp"

namespace transfer_engine
{

OpenDomain ofi_nic(std::string provider, std::string) // NOLINT(performance-unnecessary-value-param): as declared
{
    return [provider = std::move(provider)](Status *status) -> std::unique_ptr<Domain> {
        *status = {.code = Code::unsupported, .message = "ofi_nic(" + provider + "): built without libfabric"};
        return nullptr;
    };
}

} // namespace transfer_engine
