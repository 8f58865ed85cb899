// callbacks.hpp: the thread that calls what users have given to be called (T9), one call after the other.
#pragma once

#include "transfer_engine.hpp"

#include <concurrentqueue/blockingconcurrentqueue.h>
#include <thread>

namespace transfer_engine
{

class Receives;
struct Watch;

// Something to call, and with what.
struct Ended {
    Callback callback;
    Status status;
};
struct Arrived { // a message, in a buffer that takes the next one afterwards
    Receives *receives;
    uint64_t slot, length;
};
struct Changed { // a watched word
    std::shared_ptr<Watch> watch;
    uint64_t before, now;
};
struct WentDown {
    std::shared_ptr<const PeerDownCallback> callback;
    NetAddr address;
    Status status;
};
using Notice = std::variant<std::monostate, Ended, Arrived, Changed, WentDown>;

class CallbackThread
{
public:
    explicit CallbackThread(size_t most_waiting);
    ~CallbackThread() { stop(); }
    CallbackThread(const CallbackThread &) = delete;
    CallbackThread &operator=(const CallbackThread &) = delete;

    // Any thread. False, and the notice untouched, when too many wait: nobody is ever held up here.
    bool try_push(Notice &notice);
    // Calls what waits, then ends the thread.
    void stop();
    bool is_this_thread() const { return std::this_thread::get_id() == thread.get_id(); }

    std::atomic<uint64_t> calls{0}, thrown{0};

private:
    void run();
    void call(Notice &notice);

    const size_t most_waiting;
    moodycamel::BlockingConcurrentQueue<Notice> queue;
    std::atomic<size_t> waiting{0};
    std::atomic<bool> stopping{false};
    std::thread thread;
};

} // namespace transfer_engine
