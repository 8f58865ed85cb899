#include "watcher.hpp"

#include "idle.hpp"

#include <algorithm>

namespace transfer_engine
{

void Watch::call(uint64_t before, uint64_t now)
{
    const std::lock_guard lock(calling);
    if (freed) return;
    caller = std::this_thread::get_id();
    struct NobodyCalls {
        Watch *watch;
        ~NobodyCalls() { watch->caller = std::thread::id(); }
    } const whatever_happens{this};
    changed(before, now);
}

uint64_t *Watcher::alloc(WatcherCallback changed)
{
    const std::lock_guard lock(mutex);
    if (stopped) return nullptr;
    const auto watch = std::make_shared<Watch>();
    watch->changed = std::move(changed);
    watches.push_back(watch);
    version.fetch_add(1, std::memory_order_release);
    if (!thread.joinable()) thread = std::thread([this] { run(); });
    static_assert(sizeof watch->word == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free);
    return reinterpret_cast<uint64_t *>(&watch->word);
}

void Watcher::free(const uint64_t *word)
{
    std::shared_ptr<Watch> watch;
    {
        const std::lock_guard lock(mutex);
        const auto found = std::find_if(watches.begin(), watches.end(), [=](const auto &one) {
            return reinterpret_cast<const uint64_t *>(&one->word) == word;
        });
        if (found == watches.end()) return;
        watch = *found;
        watches.erase(found);
        version.fetch_add(1, std::memory_order_release);
    }
    if (watch->caller.load() == std::this_thread::get_id()) {
        watch->freed = true; // by its own callback, which holds the lock
        return;
    }
    const std::lock_guard lock(watch->calling); // waits for a call under way
    watch->freed = true;
}

// True when one had changed. Where the callback thread has no room the change stays, to be told later.
bool Watcher::look(const std::vector<std::shared_ptr<Watch>> &all)
{
    bool any = false;
    for (const auto &watch : all) {
        const uint64_t now = watch->word.load(std::memory_order_acquire);
        if (now == watch->told) continue;
        Notice notice = Changed{watch, watch->told, now};
        if (callback_thread->try_push(notice)) watch->told = now;
        any = true;
    }
    return any;
}

void Watcher::run()
{
    std::vector<std::shared_ptr<Watch>> all;
    uint64_t seen = 0;
    Idle idle(spins);
    for (bool last = false; !last;) {
        last = stopping.load(std::memory_order_acquire);
        if (const uint64_t now = version.load(std::memory_order_acquire); now != seen) {
            const std::lock_guard lock(mutex);
            all = watches;
            seen = version.load(std::memory_order_relaxed);
        }
        idle.after(look(all));
    }
}

void Watcher::stop()
{
    {
        const std::lock_guard lock(mutex);
        stopped = true;
    }
    stopping.store(true, std::memory_order_release);
    if (thread.joinable()) thread.join();
}

} // namespace transfer_engine
