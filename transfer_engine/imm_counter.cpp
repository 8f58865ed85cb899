// imm_counter.cpp: see imm_counter.hpp. One mutex: what came before an add() is seen by whoever it lets through.
#include "imm_counter.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace transfer_engine
{

static Status timed_out(uint32_t imm, uint64_t count, uint64_t arrived, uint64_t before)
{
    std::string message = "expect_imm_count(" + std::to_string(imm) + ", " + std::to_string(count) +
                          "): its deadline came; " + std::to_string(arrived) + " had arrived";
    if (before != 0) message += ", " + std::to_string(before) + " earlier waited for them";
    return {Code::timed_out, false, std::move(message)};
}

void ImmCounter::add(uint32_t imm, uint64_t count, std::vector<Reached> *reached)
{
    const std::lock_guard lock(mutex);
    const auto counter = counter_of(imm);
    counter->second.arrived += count;
    settle(counter, reached);
}

void ImmCounter::expect(uint32_t imm, uint64_t count, Callback callback, Clock::time_point deadline,
                        std::vector<Reached> *reached)
{
    const std::lock_guard lock(mutex);
    const auto counter = counter_of(imm);
    counter->second.waiting.push_back({count, std::move(callback), deadline});
    earliest = std::min(earliest, deadline);
    settle(counter, reached);
}

void ImmCounter::expire(Clock::time_point now, std::vector<Reached> *reached)
{
    const std::lock_guard lock(mutex);
    if (now < earliest) return;
    earliest = Clock::time_point::max();
    for (auto counter = counters.begin(), next = counter; counter != counters.end(); counter = next) {
        next = std::next(counter); // settle may take this one away
        auto &[arrived, waiting] = counter->second;
        uint64_t before = 0;
        for (Expectation &each : waiting) {
            if (each.deadline <= now)
                reached->push_back({std::move(each.callback), timed_out(counter->first, each.count, arrived, before)});
            else
                earliest = std::min(earliest, each.deadline);
            ++before;
        }
        std::erase_if(waiting, [now](const Expectation &each) { return each.deadline <= now; });
        settle(counter, reached);
    }
}

void ImmCounter::end_all(const Status &status, std::vector<Reached> *reached)
{
    const std::lock_guard lock(mutex);
    for (auto counter = counters.begin(), next = counter; counter != counters.end(); counter = next) {
        next = std::next(counter);
        for (Expectation &each : counter->second.waiting)
            reached->push_back({std::move(each.callback), status});
        counter->second.waiting.clear();
        settle(counter, reached);
    }
    earliest = Clock::time_point::max();
}

uint64_t ImmCounter::count(uint32_t imm) const
{
    const std::lock_guard lock(mutex);
    const auto counter = counters.find(imm);
    return counter == counters.end() ? 0 : counter->second.arrived;
}

ImmCounter::Counters::iterator ImmCounter::counter_of(uint32_t imm)
{
    if (const auto counter = counters.find(imm); counter != counters.end()) return counter;
    if (spare.empty()) return counters.try_emplace(imm).first;
    Counters::node_type node = std::move(spare.back());
    spare.pop_back();
    node.key() = imm;
    return counters.insert(std::move(node)).position;
}

// Serves whom the arrived suffice for, in order, and puts the counter aside when it says nothing any more.
void ImmCounter::settle(Counters::iterator counter, std::vector<Reached> *reached)
{
    auto &[arrived, waiting] = counter->second;
    while (!waiting.empty() && waiting.front().count <= arrived) {
        arrived -= waiting.front().count;
        reached->push_back({std::move(waiting.front().callback), {}});
        waiting.pop_front();
    }
    if (arrived == 0 && waiting.empty()) spare.push_back(counters.extract(counter));
}

} // namespace transfer_engine
