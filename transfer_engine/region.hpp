// region.hpp: registered memory of this process.
#pragma once

#include "domain.hpp"

namespace transfer_engine
{

// What a MrHandle points to. It is used again for another registration, but not freed while the engine lives: so a
// void handle is found out.
class Region
{
public:
    // Set while nobody else has a handle.
    uint8_t *start = nullptr;
    uint64_t length = 0;
    size_t group = 0; // whose adapters it is registered with
    std::array<MemoryKeys, most_nics> keys{};

    MrHandle handle() { return {.region = this, .generation = state.load(std::memory_order_relaxed) / users}; }

    // An operation begins to use it: false when the handle is void.
    bool acquire(uint64_t generation)
    {
        uint64_t now = state.load(std::memory_order_relaxed);
        while (now / users == generation)
            if (state.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
        return false;
    }
    void release() { state.fetch_sub(1, std::memory_order_release); }

    // Makes all handles void: false when this one is already, or operations use it.
    bool retire(uint64_t generation)
    {
        uint64_t now = generation * users;
        return state.compare_exchange_strong(now, now + users, std::memory_order_acquire);
    }
    bool is_current(uint64_t generation) const { return state.load(std::memory_order_relaxed) / users == generation; }

private:
    static constexpr uint64_t users = 1 << 24; // the low bits count the users, the high ones the generations
    std::atomic<uint64_t> state{0};
};

} // namespace transfer_engine
