#include "worker.hpp"

#include "idle.hpp"
#include "topology.hpp"

#include <cstring>
#include <pthread.h>
#include <utility>

namespace transfer_engine
{

Worker::Worker(Shared *parts, size_t group_number)
    : shared(parts), number(group_number), unused(parts->options.most_operations),
      submitted(parts->options.most_operations), unused_sends(parts->options.most_sends)
{
}

Worker::~Worker() { stop(false); }

// ------------------------------------------------------------------------------ any thread

Status Worker::start()
{
    std::promise<Status> promise;
    std::future<Status> opened = promise.get_future();
    thread = std::thread([this, result = std::move(promise)]() mutable {
        const Status opening = open();
        result.set_value(opening);
        if (opening.ok()) run();
    });
    Status status = opened.get();
    if (!status.ok()) thread.join();
    return status;
}

Submission *Worker::take()
{
    Submission *submission = nullptr;
    return unused.try_dequeue(submission) ? submission : nullptr;
}

void Worker::give_back(Submission *submission) { unused.enqueue(submission); }

void Worker::submit(Submission *submission)
{
    counted.submitted.fetch_add(1, std::memory_order_relaxed);
    submitted.enqueue(submission);
}

bool Worker::copy_message(std::span<const uint8_t> message, Submission *submission)
{
    if (!unused_sends.try_dequeue(submission->local_offset)) return false;
    if (!message.empty()) memcpy(own.start + submission->local_offset, message.data(), message.size());
    return true;
}

void Worker::stop(bool drain)
{
    if (!thread.joinable()) return;
    stopping.store(drain ? draining : cancelling, std::memory_order_release);
    thread.join();
}

void Worker::close()
{
    if (group == nullptr) return;
    for (size_t nic = 0; nic < nics(); ++nic)
        if (own.start != nullptr) group->nic(nic).deregister_memory(own.keys[nic]);
    group->close();
    for (; !waiting.empty(); std::this_thread::yield())
        flush();
}

void Worker::add_to(Metrics *m) const
{
    m->submitted += counted.submitted;
    m->succeeded += counted.succeeded;
    m->failed += counted.failed;
    m->timed_out += counted.timed_out;
    m->cancelled += counted.cancelled;
    m->bytes_read += counted.bytes_read;
    m->bytes_written += counted.bytes_written;
    m->immediates += counted.immediates;
    m->peers_down += counted.peers_down;
    m->work_requests += group->work_requests;
    m->work_requests_failed += group->work_requests_failed;
    if (const Receives *pool = receives.load(); pool != nullptr) m->messages += pool->messages;
}

// ------------------------------------------------------------------------------ the worker's thread

static Status bind_thread(const cpu_set_t &cores, const std::string &which)
{
    const int error = pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
    if (error == 0) return {};
    return {.code = Code::invalid, .message = "pthread_setaffinity_np(" + which + "): " + strerror(error)};
}

// Binds the thread first, so that what it touches first is near (T9); the queues to it are of the constructor's thread.
// An adapter says where it is only once it is open: where that binds the thread, it is opened again, near.
Status Worker::open()
{
    const GroupOptions &options = shared->options.groups[number];
    Status status;
    if (options.core >= 0) {
        cpu_set_t core;
        CPU_ZERO(&core);
        CPU_SET(static_cast<unsigned>(options.core), &core);
        status = bind_thread(core, "core " + std::to_string(options.core));
        if (!status.ok()) return status;
    }
    std::unique_ptr<Domain> far; // closed last: what it has touched is not allocated again here
    std::vector<std::unique_ptr<Domain>> nics;
    for (const OpenDomain &open_nic : options.nics) {
        nics.push_back(open_nic(&status));
        if (nics.back() == nullptr) return status;
        if (options.core >= 0 || nics.size() > 1) continue;
        const std::string place = nics[0]->pci_address();
        const auto cores = cores_near(place);
        if (!cores.has_value()) continue;
        status = bind_thread(*cores, "cores near " + place);
        if (!status.ok()) return status;
        far = std::exchange(nics[0], open_nic(&status));
        if (nics[0] == nullptr) return status;
    }
    group =
        std::make_unique<DomainGroup>(std::move(nics), static_cast<GroupEvents *>(this), shared->options.abort_after);

    const uint64_t longest = shared->options.longest_message, count = shared->options.most_sends;
    send_memory = std::make_unique<uint8_t[]>(count * longest + 1); // zeroed: touched
    own.length = count * longest + 1;
    for (size_t nic = 0; nic < group->nics(); ++nic) {
        status = group->nic(nic).register_memory(send_memory.get(), own.length, host, &own.keys[nic]);
        if (status.ok()) continue;
        while (nic-- > 0)
            group->nic(nic).deregister_memory(own.keys[nic]);
        return status;
    }
    own.start = send_memory.get();
    for (uint64_t slot = 0; slot < count; ++slot)
        unused_sends.enqueue(slot * longest);
    submissions = std::vector<Submission>(shared->options.most_operations);
    for (Submission &submission : submissions)
        unused.enqueue(&submission);
    return status;
}

bool Worker::take_new()
{
    constexpr size_t most = 16;
    std::array<Submission *, most> batch{};
    const size_t count = submitted.try_dequeue_bulk(batch.begin(), most);
    for (size_t i = 0; i < count; ++i)
        group->start(batch[i]);
    NetAddr address;
    while (to_connect.try_dequeue(address))
        if (const Status status = group->connect(address); !status.ok()) peer_is_down(address, status);
    Ended notice;
    while (from_outside.try_dequeue(notice))
        tell(std::move(notice));
    return count > 0;
}

void Worker::run()
{
    constexpr auto check_interval = std::chrono::milliseconds(1);
    Idle idle(shared->options.spin);
    auto next_check = Clock::now();
    for (;;) {
        // Read before what was submitted before it was set is taken.
        const Stop stop = stopping.load(std::memory_order_acquire);
        bool any = take_new();
        any |= group->progress();
        if (Receives *const pool = receives.load(std::memory_order_acquire); pool != nullptr) pool->post(group->nic(0));
        flush();
        if (const auto now = Clock::now(); now >= next_check) {
            next_check = now + check_interval;
            group->check_deadlines(now);
            if (number == 0) shared->immediates.expire(now, &reached);
            tell_reached();
            if (stop == cancelling) group->cancel_all({.code = Code::cancelled, .message = "the engine was stopped"});
            if (stop != running && group->is_deaf(now)) break; // close() ends the rest
        }
        if (stop != running && !any && group->idle()) break;
        idle.after(any, group->idle());
    }
    for (; !waiting.empty(); std::this_thread::yield())
        flush();
}

// In their order: none overtakes one that waits.
void Worker::tell(Notice notice)
{
    if (!waiting.empty() || !shared->callbacks.try_push(notice)) waiting.push_back(std::move(notice));
}

void Worker::flush()
{
    while (!waiting.empty() && shared->callbacks.try_push(waiting.front()))
        waiting.pop_front();
}

void Worker::tell_reached()
{
    for (Reached &one : reached)
        tell(Ended{std::move(one.callback), std::move(one.status)});
    reached.clear();
}

void Worker::ended(Submission *submission)
{
    Submission &s = *submission;
    const auto count = [](std::atomic<uint64_t> &counter, uint64_t n = 1) {
        counter.fetch_add(n, std::memory_order_relaxed);
    };
    switch (s.status.code) {
    case Code::ok:
        count(counted.succeeded);
        count(s.operation == Operation::read ? counted.bytes_read : counted.bytes_written, s.bytes);
        break;
    case Code::timed_out: count(counted.timed_out); break;
    case Code::cancelled: count(counted.cancelled); break;
    default: count(counted.failed);
    }
    if (s.kind == Submission::send) unused_sends.enqueue(s.local_offset);
    if (s.region != &own) s.region->release();

    OnDone done = std::move(s.done);
    Status status = std::move(s.status);
    // As new, but for the room in `shares`.
    auto shares = std::move(s.shares);
    shares.clear();
    s = Submission{};
    s.shares = std::move(shares);
    unused.enqueue(submission);

    if (auto *callback = std::get_if<Callback>(&done); callback != nullptr && *callback)
        tell(Ended{std::move(*callback), std::move(status)});
    else if (auto *const *flag = std::get_if<Flag *>(&done); flag != nullptr && *flag != nullptr) {
        (*flag)->status = std::move(status);
        std::atomic<bool> &is_done = (*flag)->done;
        is_done.store(true, std::memory_order_release);
        // The flag may be gone from here on: its address, which is all that this looks at, names those that wait.
        is_done.notify_all();
    }
}

void Worker::immediate(uint32_t imm)
{
    counted.immediates.fetch_add(1, std::memory_order_relaxed);
    shared->immediates.add(imm, 1, &reached);
    if (!reached.empty()) tell_reached();
}

void Worker::received(uint64_t context, uint64_t length, Code code)
{
    Receives *const pool = receives.load(std::memory_order_relaxed);
    if (code == Code::ok)
        tell(Arrived{pool, context, length});
    else
        pool->give_back(context);
}

void Worker::peer_is_down(const NetAddr &address, const Status &status)
{
    counted.peers_down.fetch_add(1, std::memory_order_relaxed);
    if (auto callback = shared->peer_down.load(); callback != nullptr && *callback)
        tell(WentDown{std::move(callback), address, status});
}

} // namespace transfer_engine
