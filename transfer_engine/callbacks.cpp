#include "callbacks.hpp"

#include "receives.hpp"
#include "watcher.hpp"

namespace transfer_engine
{

CallbackThread::CallbackThread(size_t most) : most_waiting(most), queue(most), thread([this] { run(); }) {}

bool CallbackThread::try_push(Notice &notice)
{
    if (waiting.fetch_add(1, std::memory_order_relaxed) >= most_waiting) {
        waiting.fetch_sub(1, std::memory_order_relaxed);
        return false;
    }
    queue.enqueue(std::move(notice));
    return true;
}

void CallbackThread::call(Notice &notice)
{
    try {
        if (auto *ended = std::get_if<Ended>(&notice))
            ended->callback(ended->status);
        else if (auto *arrived = std::get_if<Arrived>(&notice))
            arrived->receives->call(arrived->slot, arrived->length);
        else if (auto *changed = std::get_if<Changed>(&notice))
            changed->watch->call(changed->before, changed->now);
        else if (auto *down = std::get_if<WentDown>(&notice))
            (*down->callback)(down->address, down->status);
    } catch (...) {
        thrown.fetch_add(1, std::memory_order_relaxed);
    }
    calls.fetch_add(1, std::memory_order_relaxed);
}

void CallbackThread::run()
{
    constexpr int64_t look_again_us = 100000;
    Notice notice;
    for (;;) {
        const bool last = stopping.load(std::memory_order_acquire); // nothing is pushed after that was set
        if (queue.wait_dequeue_timed(notice, last ? 0 : look_again_us)) {
            call(notice);
            notice = std::monostate(); // what it captured goes now
            waiting.fetch_sub(1, std::memory_order_relaxed);
        } else if (last) {
            return;
        }
    }
}

void CallbackThread::stop()
{
    if (!thread.joinable()) return;
    stopping.store(true, std::memory_order_release);
    thread.join();
}

} // namespace transfer_engine
