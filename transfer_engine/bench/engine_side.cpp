// engine_side.cpp: the operations by the engine.
#include "side.hpp"

#include "../transfer_engine.hpp"

#include <algorithm>
#include <thread>

namespace bench
{

using namespace transfer_engine;

namespace
{

void require(const Status &status, const char *call)
{
    if (!status.ok()) throw std::runtime_error(std::string(call) + ": " + name_of(status.code) + ": " + status.message);
}

// `spin`: looks again and again, else asleep.
void wait_for(const Flag &flag, bool spin)
{
    while (spin && !flag.done.load(std::memory_order_acquire))
        std::this_thread::yield();
    flag.done.wait(false, std::memory_order_acquire);
    require(flag.status, "an operation");
}

class EngineSide final : public Side
{
public:
    EngineSide(const std::string &nic, std::span<uint8_t> memory, size_t most_peers, int core) : peers(most_peers)
    {
        Options options;
        options.groups.resize(1);
        options.groups[0].core = core;
        // A peer on libfabric moves only when it is polled. By verbs its adapter does, and a spinning worker takes the
        // processor that SoftRoCE is to have.
        options.spin = nic.starts_with("ofi:");
        require(nic_from_text(nic, &options.groups[0].nics.emplace_back()), "nic_from_text()");
        Status status;
        engine = TransferEngine::open(std::move(options), &status);
        require(status, "TransferEngine::open()");
        require(engine->reg_mr(memory.data(), memory.size(), host, &handle, &own), "reg_mr()");
    }

    Bytes describe(size_t /*peer*/) override { return serialize(own); }
    void connect(size_t peer, const Bytes &description) override
    {
        require(parse(description, &peers[peer]), "parse()");
    }
    Result run(const Task &task) override;

private:
    void begin(const Task &task, uint64_t i, Flag *flag);

    // Two processors are taken: by the worker, and by the peer's or by SoftRoCE.
    const bool caller_spins = cores_allowed().size() > 2;
    std::vector<MrDesc> peers;
    std::vector<Flag> flags; // before the engine: it may tell to its end
    std::unique_ptr<TransferEngine> engine;
    MrHandle handle;
    MrDesc own;
};

// Operation i of a task, whatever one is.
void EngineSide::begin(const Task &task, uint64_t i, Flag *flag)
{
    switch (task.kind) {
    case Task::pages: {
        Pages pages{.indices = std::vector<uint32_t>(task.count), .stride = task.length};
        for (uint64_t page = 0; page < task.count; ++page)
            pages.indices[page] = static_cast<uint32_t>(task.offset(page) / task.length);
        Pages same = pages;
        if (task.read)
            require(engine->submit_paged_reads(task.length, handle, std::move(same), peers[0], std::move(pages), flag),
                    "submit_paged_reads()");
        else
            require(
                engine->submit_paged_writes(task.length, {}, handle, std::move(pages), peers[0], std::move(same), flag),
                "submit_paged_writes()");
        return;
    }
    case Task::scatter: {
        std::vector<ScatterDst> slices;
        slices.reserve(task.depth);
        for (uint64_t slice = 0; slice < task.depth; ++slice)
            slices.push_back({.length = task.length,
                              .src = task.offset(slice),
                              .dst = peers[slice % peers.size()],
                              .dst_offset = task.offset(slice)});
        return require(engine->submit_scatter({}, {}, handle, std::move(slices), flag), "submit_scatter()");
    }
    case Task::barrier: return require(engine->submit_barrier({}, 1, peers, flag), "submit_barrier()");
    default:
        const uint64_t offset = task.offset(i);
        if (task.read)
            require(engine->submit_single_read(task.length, handle, offset, peers[0], offset, flag),
                    "submit_single_read()");
        else
            require(engine->submit_single_write(task.length, {}, handle, offset, peers[0], offset, flag),
                    "submit_single_write()");
    }
}

Result EngineSide::run(const Task &task)
{
    const bool many_under_way = task.kind == Task::window || task.kind == Task::submit;
    const uint64_t depth = many_under_way ? task.depth : 1;
    const uint64_t half = std::max<uint64_t>(depth / 2, 1); // is begun when so many have ended: a wake-up costs, too
    const uint64_t count = task.kind == Task::pages ? 1 : task.count;
    flags = std::vector<Flag>(depth);
    for (Flag &flag : flags)
        flag.done = true; // nothing has been begun with it
    std::vector<double> each;
    each.reserve(count);
    const Stopwatch watch;
    for (uint64_t i = 0; i < count; ++i) {
        Flag &flag = flags[i % depth];
        if (i % half == 0) wait_for(flags[(i + half - 1) % depth], caller_spins);
        wait_for(flag, caller_spins);
        flag.done = false;
        const double start = now_seconds();
        begin(task, i, &flag);
        if (depth == 1) wait_for(flag, caller_spins);
        each.push_back(now_seconds() - start);
    }
    for (const Flag &flag : flags)
        wait_for(flag, caller_spins);
    Result result = watch.result();
    result.percentiles = percentiles(&each);
    return result;
}

} // namespace

std::unique_ptr<Side> engine_side(const std::string &nic, std::span<uint8_t> memory, size_t peers, int core)
{
    return std::make_unique<EngineSide>(nic, memory, peers, core);
}

} // namespace bench
