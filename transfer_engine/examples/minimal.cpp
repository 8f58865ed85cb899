#include "transfer_engine.hpp"
#include <cstdio>
#include <future>

using namespace transfer_engine;

static std::unique_ptr<TransferEngine> open_engine(const char *nic)
{
    Options options;
    options.groups.resize(1);
    Status status = nic_from_text(nic, &options.groups[0].nics.emplace_back());
    auto engine = status.ok() ? TransferEngine::open(std::move(options), &status) : nullptr;
    if (engine == nullptr) fprintf(stderr, "%s\n", status.message.c_str());
    return engine;
}

int main(int argc, char **argv)
{
    const char *nic = argc > 1 ? argv[1] : "ofi:tcp;ofi_rxm";
    auto here = open_engine(nic), there = open_engine(nic); // as a rule in two processes
    if (here == nullptr || there == nullptr) return 1;
    std::vector<char> from(1 << 20, 'x'), to(1 << 20);
    MrHandle source, unused;
    MrDesc destination; // the receiver sends this, serialized, to whom may write there
    if (!here->reg_mr(from.data(), from.size(), host, &source, nullptr).ok()) return 1;
    if (!there->reg_mr(to.data(), to.size(), host, &unused, &destination).ok()) return 1;

    std::promise<Status> arrived;
    there->expect_imm_count(42, 1, [&](const Status &status) { arrived.set_value(status); });
    here->submit_single_write(from.size(), 42, source, 0, destination, 0);
    const Status status = arrived.get_future().get();
    printf("%s, and the last byte is '%c'\n", name_of(status.code), to.back());
    return status.ok() && to == from ? 0 : 1;
}
