// imm_counter.hpp: how many immediates of each value have come, and who waits for them (T7).
#pragma once

#include "transfer_engine.hpp"

#include <deque>
#include <mutex>
#include <unordered_map>

namespace transfer_engine
{

// An expectation that has ended, and how.
struct Reached {
    Callback callback;
    Status status;
};

// Thread-safe. Callbacks are handed out, not called: `reached` gets them, in the order in which they were met.
class ImmCounter
{
public:
    using Clock = std::chrono::steady_clock;

    // `count` more have arrived. What their data is was made visible before (release; expect acquires).
    void add(uint32_t imm, uint64_t count, std::vector<Reached> *reached);
    // Takes `count` off once they have come, after all earlier expectations of this value. Zero: at once, in turn.
    void expect(uint32_t imm, uint64_t count, Callback callback, Clock::time_point deadline,
                std::vector<Reached> *reached);
    // Ends those whose deadline has come with timed_out; they take nothing off, and those behind them move up.
    void expire(Clock::time_point now, std::vector<Reached> *reached);
    // Ends all with this status. The counts stay.
    void end_all(const Status &status, std::vector<Reached> *reached);
    // What has arrived and was not taken off.
    uint64_t count(uint32_t imm) const;

private:
    struct Expectation {
        uint64_t count;
        Callback callback;
        Clock::time_point deadline;
    };
    struct Counter {
        uint64_t arrived = 0;            // and not taken off
        std::deque<Expectation> waiting; // in the order of the calls. Invariant: the first wants more than `arrived`
    };
    using Counters = std::unordered_map<uint32_t, Counter>;

    Counters::iterator counter_of(uint32_t imm);
    void settle(Counters::iterator counter, std::vector<Reached> *reached);

    mutable std::mutex mutex; // of all below
    Counters counters;        // of the values of which something has arrived or that somebody waits for
    // Emptied counters, for the next values: no allocation once there are as many as are in use at a time.
    std::vector<Counters::node_type> spare;
    Clock::time_point earliest = Clock::time_point::max(); // no deadline comes before
};

} // namespace transfer_engine
