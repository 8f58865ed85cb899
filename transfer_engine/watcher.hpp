// watcher.hpp: looks at 64-bit words that producers increase, and calls back when one has changed (T8).
#pragma once

#include "callbacks.hpp"

#include <mutex>

namespace transfer_engine
{

// One watched word.
struct Watch {
    std::shared_ptr<std::atomic<uint64_t>> word; // in a cache line of its own
    uint64_t told = 0;                           // what the callback was last given; the watcher's thread
    WatcherCallback changed;
    std::mutex calling; // held while it is called
    bool freed = false; // under `calling`
    std::atomic<std::thread::id> caller{};

    void call(uint64_t before, uint64_t now);
};

class Watcher
{
public:
    Watcher(CallbackThread *callbacks, const Options &options);
    ~Watcher() { stop(); }
    Watcher(const Watcher &) = delete;
    Watcher &operator=(const Watcher &) = delete;

    // Its thread starts with the first. Null after stop(), and when there is no memory that a GPU of the engine's
    // reaches.
    uint64_t *alloc(WatcherCallback changed);
    void free(const uint64_t *word);
    // What has changed by now is told first.
    void stop();

private:
    void run();
    bool look(const std::vector<std::shared_ptr<Watch>> &all, bool last);

    CallbackThread *callback_thread;
    const bool spins;
    const int gpu;    // the first that the engine serves; or host
    std::mutex mutex; // of what follows
    std::vector<std::shared_ptr<Watch>> watches;
    // Of watches that were freed, for the next. To free memory that a GPU reaches may take until its kernels have ended
    // (CUDA Programming Guide, "Implicit Synchronization"), and they may wait for a call.
    std::vector<std::shared_ptr<std::atomic<uint64_t>>> unused_words;
    bool stopped = false;
    std::atomic<uint64_t> version{0}; // of `watches`
    std::atomic<bool> stopping{false};
    std::thread thread;
};

} // namespace transfer_engine
