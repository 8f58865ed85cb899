#include "transfer_engine.hpp"

namespace transfer_engine
{

Status nic_from_text(const std::string &text, OpenDomain *nic)
{
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon), name = colon == std::string::npos ? "" : text.substr(colon + 1);
    const size_t comma = name.find(',');
    if (kind == "verbs" && !name.empty())
        *nic = verbs_nic(name);
    else if (kind == "ofi" && !name.empty())
        *nic = ofi_nic(name.substr(0, comma), comma == std::string::npos ? "" : name.substr(comma + 1));
    else
        return {.code = Code::invalid,
                .message = "adapter '" + text + "': not verbs:DEVICE, ofi:PROVIDER or ofi:PROVIDER,DOMAIN"};
    return {};
}

} // namespace transfer_engine
