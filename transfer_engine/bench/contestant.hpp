// contestant.hpp: the processes of one contestant. They run only while it is its turn: both kinds spin.
#pragma once

#include "side.hpp"

#include <functional>
#include <sys/types.h>

namespace bench
{

class Contestant
{
public:
    // A side for a process that has so many peers; called in the process that is to have it. `core`: for its thread
    // that polls, apart from those of the other processes as far as there are cores.
    using OpenSide = std::function<std::unique_ptr<Side>(std::span<uint8_t> memory, size_t peers, int core)>;

    // Starts the processes, before this one has opened anything: adapters do not survive a fork.
    Contestant(const OpenSide &open, size_t peers);
    ~Contestant();
    Contestant(const Contestant &) = delete;
    Contestant &operator=(const Contestant &) = delete;

    // Throws std::runtime_error when they do not answer.
    Result run(const Task &task);

private:
    void signal_those_of(const Task &task, int signal) const;

    std::vector<pid_t> processes; // the one that begins the operations, then its peers
    int control = -1;
};

} // namespace bench
