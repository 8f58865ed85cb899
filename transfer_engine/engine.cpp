// engine.cpp: checks what is submitted, hands it to a worker, and takes everything down in the end.
#include "watcher.hpp"
#include "worker.hpp"

#include <algorithm>
#include <deque>

namespace transfer_engine
{

class TransferEngine::Engine
{
public:
    explicit Engine(Options options) : shared(std::move(options)), watcher(&shared.callbacks, shared.options) {}

    Shared shared;
    Watcher watcher;
    std::vector<std::unique_ptr<Worker>> workers; // by group
    NetAddr main_address;
    std::atomic<uint64_t> pushed_back{0};

    std::mutex mutex;           // of what follows
    std::deque<Region> regions; // they stay where they are until the end
    std::vector<Region *> unused_regions;
    std::vector<std::vector<NetAddr>> peer_groups; // by number - 1
    std::unique_ptr<Receives> receives;
    MrHandle receive_memory;
    std::unique_ptr<uint8_t[]> receive_bytes;

    std::mutex stop_mutex;
    std::atomic<bool> stopping{false};
    std::atomic<uint64_t> submitters{0}; // threads within a submit

    Status stop(bool drain);
    Status submit_single(Operation operation, uint64_t length, std::optional<uint32_t> imm, MrHandle local,
                         uint64_t local_offset, const MrDesc &remote, uint64_t remote_offset, OnDone done,
                         std::chrono::nanoseconds timeout);
    Status submit_paged(Operation operation, uint64_t page_length, std::optional<uint32_t> imm, MrHandle local,
                        Pages local_pages, const MrDesc &remote, Pages remote_pages, OnDone done,
                        std::chrono::nanoseconds timeout);
    template <typename Target>
    Status check_targets(std::optional<PeerGroupHandle> group, size_t targets, size_t nics, Target target);
    template <typename Fill> Status submit(Worker *worker, OnDone done, std::chrono::nanoseconds timeout, Fill fill);
};

namespace
{

using std::to_string;

Status failure(Code code, std::string message)
{
    return {.code = code, .remote_may_have_changed = false, .message = std::move(message)};
}

Status stopped() { return failure(Code::stopped, "the engine has been stopped"); }

// Whether so many bytes from an offset on are within a region.
Status check_range(const char *side, uint64_t offset, uint64_t length, uint64_t region_length)
{
    if (offset <= region_length && length <= region_length - offset) return {};
    return failure(Code::invalid, std::string(side) + ": " + to_string(length) + " bytes at offset " +
                                      to_string(offset) + ": beyond its region of " + to_string(region_length) +
                                      " bytes");
}

// Transfers are cut alike on both sides only where both have as many adapters (T10, semantic 9).
Status check_nics(const MrDesc &remote, size_t nics)
{
    if (remote.nics == nics) return {};
    return failure(Code::invalid, "the peer has " + to_string(remote.nics) + " adapters for its region, this side " +
                                      to_string(nics) + ": they have to be as many");
}

Status first_error(std::initializer_list<Status> checks)
{
    for (const Status &check : checks)
        if (!check.ok()) return check;
    return {};
}

// Counts a thread that submits, for stop() to wait for; tells whether it still may.
class Submitting
{
public:
    Submitting(std::atomic<uint64_t> *counter, const std::atomic<bool> &stopping) : count(counter)
    {
        count->fetch_add(1);
        may = !stopping.load();
    }
    ~Submitting() { count->fetch_sub(1); }
    Submitting(const Submitting &) = delete;
    Submitting &operator=(const Submitting &) = delete;
    explicit operator bool() const { return may; }

private:
    std::atomic<uint64_t> *count;
    bool may;
};

// A region in use, until it is handed to a submission.
class Use
{
public:
    explicit Use(MrHandle handle)
        : region(handle.region != nullptr && handle.region->acquire(handle.generation) ? handle.region : nullptr)
    {
    }
    ~Use()
    {
        if (region != nullptr) region->release();
    }
    Use(const Use &) = delete;
    Use &operator=(const Use &) = delete;
    Region *operator->() const { return region; }
    Status check() const
    {
        return region != nullptr ? Status{} : failure(Code::invalid, "the handle is not that of a registered region");
    }
    Region *hand_over() { return std::exchange(region, nullptr); }

private:
    Region *region;
};

Clock::time_point deadline_after(std::chrono::nanoseconds timeout, std::chrono::nanoseconds otherwise)
{
    if (timeout == default_timeout) timeout = otherwise;
    const auto now = Clock::now();
    return timeout >= Clock::time_point::max() - now ? Clock::time_point::max() : now + timeout;
}

} // namespace

// --------------------------------------------------------------------------------- opening and stopping

TransferEngine::TransferEngine(std::unique_ptr<Engine> parts) : engine(std::move(parts)) {}
TransferEngine::~TransferEngine() { engine->stop(false); }

std::unique_ptr<TransferEngine> TransferEngine::open(Options options, Status *status)
{
    *status = {};
    if (options.groups.empty()) *status = failure(Code::invalid, "Options::groups is empty");
    for (size_t i = 0; i < options.groups.size(); ++i)
        if (const size_t nics = options.groups[i].nics.size(); nics < 1 || nics > most_nics)
            *status = failure(Code::invalid, "group " + to_string(i) + " has " + to_string(nics) +
                                                 " adapters, not 1 to " + to_string(most_nics));
    if (options.most_operations == 0 || options.most_sends == 0 || options.most_callbacks == 0)
        *status = failure(Code::invalid, "Options: most_operations, most_sends and most_callbacks are 1 at least");
    if (options.timeout <= std::chrono::nanoseconds::zero())
        *status = failure(Code::invalid, "Options::timeout is not positive");
    if (!status->ok()) return nullptr;

    auto engine = std::make_unique<Engine>(std::move(options));
    for (size_t group = 0; group < engine->shared.options.groups.size(); ++group) {
        auto worker = std::make_unique<Worker>(&engine->shared, group);
        *status = worker->start();
        engine->workers.push_back(std::move(worker));
        if (status->ok()) continue;
        engine->workers.pop_back();
        engine->stop(false);
        return nullptr;
    }
    engine->main_address = engine->workers[0]->nic(0).address();
    return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(engine)));
}

// In this order: nothing new, no changes of words, the operations, the expectations; then the memory, which from here
// on no adapter reaches, the adapters, and last the thread that has told of it all.
Status TransferEngine::Engine::stop(bool drain)
{
    if (shared.callbacks.is_this_thread())
        return failure(Code::invalid, "stop() from a callback would wait for itself");
    const std::lock_guard only_once(stop_mutex);
    if (stopping.exchange(true)) return {};
    while (submitters.load() > 0)
        std::this_thread::yield();
    watcher.stop();
    for (const auto &worker : workers)
        worker->stop(drain);
    std::vector<Reached> reached;
    shared.immediates.end_all(failure(Code::cancelled, "the engine was stopped"), &reached);
    for (Reached &one : reached) {
        Notice notice = Ended{std::move(one.callback), std::move(one.status)};
        while (!shared.callbacks.try_push(notice))
            std::this_thread::yield();
    }
    for (Region &region : regions)
        if (region.length > 0)
            for (size_t nic = 0; nic < workers[region.group]->nics(); ++nic)
                workers[region.group]->nic(nic).deregister_memory(region.keys[nic]);
    for (const auto &worker : workers)
        worker->close();
    shared.callbacks.stop();
    return {};
}

Status TransferEngine::stop(bool drain) { return engine->stop(drain); }
NetAddr TransferEngine::main_address() const { return engine->main_address; }

// --------------------------------------------------------------------------------------------- memory

Status TransferEngine::reg_mr(void *start, uint64_t length, int device, MrHandle *handle, MrDesc *region)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped();
    const std::string call = "reg_mr(" + to_string(length) + " bytes, device " + to_string(device) + "): ";
    if (start == nullptr || length == 0 || length > UINT64_MAX - reinterpret_cast<uintptr_t>(start))
        return failure(Code::invalid, call + "not a range of memory");
    const auto &groups = engine->shared.options.groups;
    const auto serving =
        std::find_if(groups.begin(), groups.end(), [=](const auto &group) { return group.device == device; });
    if (serving == groups.end() && device != host)
        return failure(Code::invalid, call + "no group of adapters is for this device");
    const size_t group = serving == groups.end() ? 0 : static_cast<size_t>(serving - groups.begin());

    Worker &worker = *engine->workers[group];
    std::array<MemoryKeys, most_nics> keys{};
    MrDesc made{.ptr = reinterpret_cast<uintptr_t>(start),
                .length = length,
                .nics = static_cast<uint32_t>(worker.nics()),
                .rkeys = {}};
    for (size_t nic = 0; nic < worker.nics(); ++nic) {
        Status status = worker.nic(nic).register_memory(start, length, device, &keys[nic]);
        if (!status.ok()) {
            while (nic-- > 0)
                worker.nic(nic).deregister_memory(keys[nic]);
            status.message = call + status.message;
            return status;
        }
        made.rkeys[nic] = {.address = worker.nic(nic).address(), .base = keys[nic].base, .key = keys[nic].remote};
    }

    const std::lock_guard lock(engine->mutex);
    if (engine->unused_regions.empty()) engine->unused_regions.push_back(&engine->regions.emplace_back());
    Region *const memory = engine->unused_regions.back();
    engine->unused_regions.pop_back();
    memory->start = static_cast<uint8_t *>(start);
    memory->length = length;
    memory->group = group;
    memory->keys = keys;
    *handle = memory->handle();
    if (region != nullptr) *region = made;
    return {};
}

Status TransferEngine::dereg_mr(MrHandle handle)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped(); // which has done it
    Region *const region = handle.region;
    if (region == nullptr || !region->is_current(handle.generation))
        return failure(Code::invalid, "dereg_mr(): the handle is not that of a registered region");
    const std::lock_guard lock(engine->mutex);
    if (!region->retire(handle.generation))
        return failure(Code::invalid, "dereg_mr(" + to_string(region->length) + " bytes): operations use it");
    Worker &worker = *engine->workers[region->group];
    for (size_t nic = 0; nic < worker.nics(); ++nic)
        worker.nic(nic).deregister_memory(region->keys[nic]);
    region->length = 0;
    engine->unused_regions.push_back(region);
    return {};
}

// --------------------------------------------------------------------------------------- operations

// What every submit does: takes a submission, has it filled in, hands it to the worker.
template <typename Fill>
Status TransferEngine::Engine::submit(Worker *worker, OnDone done, std::chrono::nanoseconds timeout, Fill fill)
{
    Submission *const submission = worker->take();
    if (submission == nullptr || !fill(submission)) {
        if (submission != nullptr) worker->give_back(submission);
        pushed_back.fetch_add(1, std::memory_order_relaxed);
        return failure(Code::full, "too many operations are under way");
    }
    submission->done = std::move(done);
    submission->deadline = deadline_after(timeout, shared.options.timeout);
    worker->submit(submission);
    return {};
}

Status TransferEngine::Engine::submit_single(Operation operation, uint64_t length, std::optional<uint32_t> imm,
                                             MrHandle local, uint64_t local_offset, const MrDesc &remote,
                                             uint64_t remote_offset, OnDone done, std::chrono::nanoseconds timeout)
{
    const Submitting submitting(&submitters, stopping);
    if (!submitting) return stopped();
    Use region(local);
    if (Status status = region.check(); !status.ok()) return status;
    Worker &worker = *workers[region->group];
    if (Status status =
            first_error({check_nics(remote, worker.nics()), check_range("local", local_offset, length, region->length),
                         check_range("remote", remote_offset, length, remote.length)});
        !status.ok())
        return status;
    return submit(&worker, std::move(done), timeout, [&](Submission *s) {
        s->kind = Submission::single;
        s->operation = operation;
        s->imm = imm;
        s->region = region.hand_over();
        s->length = length;
        s->local_offset = local_offset;
        s->remote_offset = remote_offset;
        s->remote = remote;
        return true;
    });
}

Status TransferEngine::Engine::submit_paged(Operation operation, uint64_t page_length, std::optional<uint32_t> imm,
                                            MrHandle local, Pages local_pages, const MrDesc &remote, Pages remote_pages,
                                            OnDone done, std::chrono::nanoseconds timeout)
{
    const Submitting submitting(&submitters, stopping);
    if (!submitting) return stopped();
    Use region(local);
    if (Status status = region.check(); !status.ok()) return status;
    Worker &worker = *workers[region->group];
    if (Status status = check_nics(remote, worker.nics()); !status.ok()) return status;
    if (local_pages.indices.size() != remote_pages.indices.size())
        return failure(Code::invalid, to_string(local_pages.indices.size()) + " pages here, " +
                                          to_string(remote_pages.indices.size()) +
                                          " at the peer: they have to be as many");
    return submit(&worker, std::move(done), timeout, [&](Submission *s) {
        s->kind = Submission::paged;
        s->operation = operation;
        s->imm = imm;
        s->region = region.hand_over();
        s->length = page_length;
        s->remote = remote;
        s->local_pages = std::move(local_pages);
        s->remote_pages = std::move(remote_pages);
        return true;
    });
}

Status TransferEngine::submit_single_write(uint64_t length, std::optional<uint32_t> imm, MrHandle source, uint64_t src,
                                           const MrDesc &dst, uint64_t dst_offset, OnDone done,
                                           std::chrono::nanoseconds timeout)
{
    return engine->submit_single(Operation::write, length, imm, source, src, dst, dst_offset, std::move(done), timeout);
}

Status TransferEngine::submit_single_read(uint64_t length, MrHandle destination, uint64_t dst, const MrDesc &src,
                                          uint64_t src_offset, OnDone done, std::chrono::nanoseconds timeout)
{
    return engine->submit_single(Operation::read, length, std::nullopt, destination, dst, src, src_offset,
                                 std::move(done), timeout);
}

Status TransferEngine::submit_paged_writes(uint64_t page_length, std::optional<uint32_t> imm, MrHandle source,
                                           Pages src, const MrDesc &dst, Pages dst_pages, OnDone done,
                                           std::chrono::nanoseconds timeout)
{
    return engine->submit_paged(Operation::write, page_length, imm, source, std::move(src), dst, std::move(dst_pages),
                                std::move(done), timeout);
}

Status TransferEngine::submit_paged_reads(uint64_t page_length, MrHandle destination, Pages dst, const MrDesc &src,
                                          Pages src_pages, OnDone done, std::chrono::nanoseconds timeout)
{
    return engine->submit_paged(Operation::read, page_length, std::nullopt, destination, std::move(dst), src,
                                std::move(src_pages), std::move(done), timeout);
}

// ------------------------------------------------------------------------------------- groups of peers

Status TransferEngine::add_peer_group(std::span<const NetAddr> peers, PeerGroupHandle *group)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped();
    for (const NetAddr &address : peers)
        engine->workers[0]->connect(address);
    const std::lock_guard lock(engine->mutex);
    engine->peer_groups.emplace_back(peers.begin(), peers.end());
    group->number = engine->peer_groups.size();
    return {};
}

// That target i is peer i of the group. `target(i)`: its region.
template <typename Target>
Status TransferEngine::Engine::check_targets(std::optional<PeerGroupHandle> group, size_t targets, size_t nics,
                                             Target target)
{
    for (size_t i = 0; i < targets; ++i)
        if (Status status = check_nics(target(i), nics); !status.ok()) return status;
    if (!group) return {};
    const std::lock_guard lock(mutex);
    if (group->number == 0 || group->number > peer_groups.size())
        return failure(Code::invalid, "no peer group has the number " + to_string(group->number));
    const std::vector<NetAddr> &members = peer_groups[group->number - 1];
    if (members.size() != targets)
        return failure(Code::invalid,
                       to_string(targets) + " targets, but the group has " + to_string(members.size()) + " peers");
    for (size_t i = 0; i < targets; ++i)
        if (target(i).rkeys[0].address != members[i])
            return failure(Code::invalid, "target " + to_string(i) + " is not peer " + to_string(i) + " of the group");
    return {};
}

Status TransferEngine::submit_scatter(std::optional<PeerGroupHandle> group, std::optional<uint32_t> imm,
                                      MrHandle source, std::vector<ScatterDst> targets, OnDone done,
                                      std::chrono::nanoseconds timeout)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped();
    Use region(source);
    if (Status status = region.check(); !status.ok()) return status;
    Worker &worker = *engine->workers[region->group];
    Status status = engine->check_targets(group, targets.size(), worker.nics(),
                                          [&](size_t i) -> const MrDesc & { return targets[i].dst; });
    for (size_t i = 0; i < targets.size() && status.ok(); ++i)
        status = first_error({check_range("local", targets[i].src, targets[i].length, region->length),
                              check_range("remote", targets[i].dst_offset, targets[i].length, targets[i].dst.length)});
    if (!status.ok()) return status;
    return engine->submit(&worker, std::move(done), timeout, [&](Submission *s) {
        s->kind = Submission::scatter;
        s->imm = imm;
        s->region = region.hand_over();
        s->slices = std::move(targets);
        return true;
    });
}

Status TransferEngine::submit_barrier(std::optional<PeerGroupHandle> group, uint32_t imm, std::vector<MrDesc> targets,
                                      OnDone done, std::chrono::nanoseconds timeout)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped();
    Worker &worker = *engine->workers[0];
    if (Status status = engine->check_targets(group, targets.size(), worker.nics(),
                                              [&](size_t i) -> const MrDesc & { return targets[i]; });
        !status.ok())
        return status;
    return engine->submit(&worker, std::move(done), timeout, [&](Submission *s) {
        s->kind = Submission::barrier;
        s->imm = imm;
        s->region = worker.own_memory();
        s->targets = std::move(targets);
        return true;
    });
}

// --------------------------------------------------------------------------------------------- messages

Status TransferEngine::submit_send(const NetAddr &to, std::span<const uint8_t> message, OnDone done,
                                   std::chrono::nanoseconds timeout)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped();
    const Options &options = engine->shared.options;
    if (message.size() > options.longest_message)
        return failure(Code::invalid, "submit_send(" + to_string(message.size()) + " bytes): longer than " +
                                          to_string(options.longest_message) + ", Options::longest_message");
    Worker &worker = *engine->workers[0];
    return engine->submit(&worker, std::move(done), timeout, [&](Submission *s) {
        if (!worker.copy_message(message, s)) return false;
        s->kind = Submission::send;
        s->operation = Operation::send;
        s->region = worker.own_memory();
        s->length = message.size();
        s->to = to;
        return true;
    });
}

Status TransferEngine::submit_recvs(uint64_t length, size_t count, MessageCallback arrived)
{
    const std::string call = "submit_recvs(" + to_string(length) + " bytes, " + to_string(count) + "): ";
    if (length == 0 || count == 0 || !arrived || length > UINT64_MAX / count)
        return failure(Code::invalid, call + "a length, a number and a callback are needed");
    {
        const Submitting submitting(&engine->submitters, engine->stopping);
        if (!submitting) return stopped();
        const std::lock_guard lock(engine->mutex);
        if (engine->receive_bytes != nullptr) return failure(Code::invalid, call + "there are buffers already");
        engine->receive_bytes.reset(new (std::nothrow) uint8_t[length * count]);
        if (engine->receive_bytes == nullptr) return failure(Code::failed, call + "no memory");
    }
    Status status = reg_mr(engine->receive_bytes.get(), length * count, host, &engine->receive_memory, nullptr);
    const std::lock_guard lock(engine->mutex);
    if (!status.ok()) {
        engine->receive_bytes.reset();
        return status;
    }
    engine->receives = std::make_unique<Receives>(engine->receive_memory.region, length, count, std::move(arrived));
    engine->workers[0]->set_receives(engine->receives.get());
    return {};
}

// ----------------------------------------------------------------------------- immediates, watchers, the rest

Status TransferEngine::expect_imm_count(uint32_t imm, uint64_t count, Callback reached,
                                        std::chrono::nanoseconds timeout)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    if (!submitting) return stopped();
    if (!reached) return failure(Code::invalid, "expect_imm_count(): no callback");
    std::vector<Reached> met;
    engine->shared.immediates.expect(imm, count, std::move(reached), deadline_after(timeout, no_timeout), &met);
    for (Reached &one : met)
        engine->workers[0]->tell_from_outside(Ended{std::move(one.callback), std::move(one.status)});
    return {};
}

uint64_t *TransferEngine::alloc_uvm_watcher(WatcherCallback changed)
{
    const Submitting submitting(&engine->submitters, engine->stopping);
    return submitting && changed ? engine->watcher.alloc(std::move(changed)) : nullptr;
}

void TransferEngine::free_uvm_watcher(uint64_t *word) { engine->watcher.free(word); }

void TransferEngine::on_peer_down(PeerDownCallback down)
{
    engine->shared.peer_down.store(std::make_shared<const PeerDownCallback>(std::move(down)));
}

Metrics TransferEngine::metrics() const
{
    Metrics m{};
    for (const auto &worker : engine->workers)
        worker->add_to(&m);
    m.pushed_back = engine->pushed_back;
    m.callbacks = engine->shared.callbacks.calls;
    m.callbacks_thrown = engine->shared.callbacks.thrown;
    return m;
}

} // namespace transfer_engine
