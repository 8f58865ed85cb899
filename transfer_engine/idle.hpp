// idle.hpp: what a thread that polls does between two looks.
#pragma once

#include <chrono>
#include <thread>

namespace transfer_engine
{

class Idle
{
public:
    explicit Idle(bool spin) : spins(spin) {}

    // After each look. Who spins lets others run that want to; else, after a while with nothing to do, and nothing
    // under way, it naps.
    void after(bool had_work, bool may_nap = true)
    {
        looks_in_vain = had_work || !may_nap ? 0 : looks_in_vain + 1;
        if (had_work) return;
        if (spins || looks_in_vain < most_in_vain)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

private:
    static constexpr unsigned most_in_vain = 1000;
    const bool spins;
    unsigned looks_in_vain = 0;
};

} // namespace transfer_engine
