#include "watcher.hpp"

#include "cuda.hpp"
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

static int first_gpu(const Options &options)
{
    const auto first = std::ranges::find_if(options.groups, [](const auto &group) { return group.device != host; });
    return first != options.groups.end() ? first->device : host;
}

Watcher::Watcher(CallbackThread *callbacks, const Options &options)
    : callback_thread(callbacks), spins(options.spin), gpu(first_gpu(options))
{
}

// Reached by every GPU there is: one may be the producer even where no group is for it. Null when a group is for one,
// and it cannot be.
static std::shared_ptr<std::atomic<uint64_t>> make_word(int gpu)
{
    struct alignas(64) Line {
        std::atomic<uint64_t> word{0};
    };
    const CudaDriver &driver = CudaDriver::of_this_process();
    if (driver.status().ok()) {
        auto mapped = driver.make_word(gpu == host ? 0 : gpu);
        if (mapped != nullptr || gpu != host) return mapped;
    }
    const auto line = std::make_shared<Line>();
    return {line, &line->word};
}

uint64_t *Watcher::alloc(WatcherCallback changed)
{
    const auto watch = std::make_shared<Watch>();
    watch->changed = std::move(changed);
    std::unique_lock lock(mutex);
    if (!unused_words.empty()) {
        watch->word = std::move(unused_words.back());
        unused_words.pop_back();
        watch->word->store(0, std::memory_order_relaxed);
    } else {
        lock.unlock(); // it may take long, too, and the watcher's thread must not wait
        watch->word = make_word(gpu);
        lock.lock();
    }
    if (stopped || watch->word == nullptr) return nullptr;
    watches.push_back(watch);
    version.fetch_add(1, std::memory_order_release);
    if (!thread.joinable()) thread = std::thread([this] { run(); });
    static_assert(sizeof *watch->word == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free);
    return reinterpret_cast<uint64_t *>(watch->word.get());
}

void Watcher::free(const uint64_t *word)
{
    std::shared_ptr<Watch> watch;
    {
        const std::lock_guard lock(mutex);
        const auto found = std::find_if(watches.begin(), watches.end(), [=](const auto &one) {
            return reinterpret_cast<const uint64_t *>(one->word.get()) == word;
        });
        if (found == watches.end()) return;
        watch = *found;
        watches.erase(found);
        version.fetch_add(1, std::memory_order_release);
    }
    if (watch->caller.load() == std::this_thread::get_id()) {
        watch->freed = true; // by its own callback, which holds the lock
    } else {
        const std::lock_guard lock(watch->calling); // waits for a call under way
        watch->freed = true;
    }
    const std::lock_guard lock(mutex);
    unused_words.push_back(watch->word);
}

// True when one had changed. Where the callback thread has no room the change stays, to be told later; the last look
// waits for room.
bool Watcher::look(const std::vector<std::shared_ptr<Watch>> &all, bool last)
{
    bool any = false;
    for (const auto &watch : all) {
        const uint64_t now = watch->word->load(std::memory_order_acquire);
        if (now == watch->told) continue;
        Notice notice = Changed{watch, watch->told, now};
        bool told = callback_thread->try_push(notice);
        for (; !told && last; told = callback_thread->try_push(notice))
            std::this_thread::yield();
        if (told) watch->told = now;
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
        idle.after(look(all, last));
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
