// worker.hpp: the thread of one group of adapters (T9, T11). New submissions first, then what waits to be posted,
// then what has ended; one notice for each submission. It never blocks: what the callback thread has no room for
// waits in a list here.
#pragma once

#include "callbacks.hpp"
#include "domain_group.hpp"
#include "imm_counter.hpp"
#include "receives.hpp"

#include <deque>
#include <future>

namespace transfer_engine
{

// What all threads of an engine share.
struct Shared {
    explicit Shared(Options given) : options(std::move(given)), callbacks(options.most_callbacks) {}

    const Options options;
    ImmCounter immediates;
    std::atomic<std::shared_ptr<const PeerDownCallback>> peer_down;
    CallbackThread callbacks;
};

class Worker final : private GroupEvents
{
public:
    Worker(Shared *parts, size_t group_number);
    ~Worker() override;
    Worker(const Worker &) = delete;
    Worker &operator=(const Worker &) = delete;

    // Starts the thread, which opens the adapters, and waits for that.
    Status start();
    size_t nics() const { return group->nics(); }
    Domain &nic(size_t index) { return group->nic(index); }

    // Any thread. A submission to fill in, null when too many are under way; then that it is filled in.
    Submission *take();
    void submit(Submission *submission);
    // Any thread. A copy of a message, in the memory that sends are made from; false when too many are under way.
    bool copy_message(std::span<const uint8_t> message, Submission *submission);
    void give_back(Submission *submission); // not submitted after all
    Region *own_memory() { return &own; }   // registered with every adapter: what a write of no bytes names
    // Any thread.
    void connect(const NetAddr &address) { to_connect.enqueue(address); }
    void tell_from_outside(Ended notice) { from_outside.enqueue(std::move(notice)); }
    void set_receives(Receives *pool) { receives.store(pool, std::memory_order_release); }

    // Any one thread, when nothing is submitted any more. Lets what is under way end, or cancels it; joins the thread.
    void stop(bool drain);
    // After stop(), and after all memory was deregistered: closes the adapters.
    void close();
    void add_to(Metrics *metrics) const;

private:
    void ended(Submission *submission) override;
    void immediate(uint32_t imm) override;
    void received(uint64_t context, uint64_t length, Code code) override;
    void peer_is_down(const NetAddr &address, const Status &status) override;

    Status open();
    void run();
    bool take_new();
    void tell(Notice notice);
    void tell_reached();
    void flush();

    Shared *shared;
    const size_t number;
    std::unique_ptr<DomainGroup> group;
    std::unique_ptr<uint8_t[]> send_memory;
    Region own;

    std::vector<Submission> submissions;
    moodycamel::ConcurrentQueue<Submission *> unused, submitted;
    moodycamel::ConcurrentQueue<uint64_t> unused_sends; // offsets in `own`
    moodycamel::ConcurrentQueue<NetAddr> to_connect;
    moodycamel::ConcurrentQueue<Ended> from_outside; // to be told
    std::atomic<Receives *> receives{nullptr};

    std::deque<Notice> waiting;   // for room at the callback thread
    std::vector<Reached> reached; // used again and again
    std::thread thread;
    enum Stop : uint8_t { running, draining, cancelling };
    std::atomic<Stop> stopping{running};

    struct {
        std::atomic<uint64_t> submitted, succeeded, failed, timed_out, cancelled, bytes_read, bytes_written, immediates,
            peers_down;
    } counted{};
};

} // namespace transfer_engine
