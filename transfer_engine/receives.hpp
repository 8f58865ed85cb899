// receives.hpp: the pool of buffers for messages (T4).
#pragma once

#include "region.hpp"

#include <concurrentqueue/concurrentqueue.h>

namespace transfer_engine
{

// A slot is at one place at a time: posted to the adapter, at the callback thread with a message, or free.
class Receives
{
public:
    Receives(Region *memory, uint64_t slot_length, size_t count, MessageCallback callback)
        : region(memory), length(slot_length), arrived(std::move(callback)), free(count)
    {
        for (uint64_t slot = 0; slot < count; ++slot)
            free.enqueue(slot);
    }

    // Posts free slots until there is none or no room. The worker's thread.
    void post(Domain &nic)
    {
        uint64_t slot = 0;
        while (held || free.try_dequeue(slot)) {
            if (held) slot = *held;
            held.reset();
            if (!nic.post_receive(at(slot), length, region->keys[0].local, slot)) {
                held = slot; // first again
                return;
            }
        }
    }
    void give_back(uint64_t slot) { free.enqueue(slot); }

    // The callback thread. The slot is free again whatever the callback does.
    void call(uint64_t slot, uint64_t bytes)
    {
        struct GiveBack {
            Receives *receives;
            uint64_t slot;
            ~GiveBack() { receives->give_back(slot); }
        } const whatever_happens{this, slot};
        messages.fetch_add(1, std::memory_order_relaxed);
        arrived(std::span<const uint8_t>(at(slot), std::min(bytes, length)));
    }

    std::atomic<uint64_t> messages{0};

private:
    uint8_t *at(uint64_t slot) const { return region->start + slot * length; }

    Region *region;
    uint64_t length;
    MessageCallback arrived;
    moodycamel::ConcurrentQueue<uint64_t> free;
    std::optional<uint64_t> held;
};

} // namespace transfer_engine
