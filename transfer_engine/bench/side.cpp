#include "side.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>

namespace bench
{

double now_seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<int> cores_allowed()
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        throw std::runtime_error(std::string("sched_getaffinity(): ") + strerror(errno));
    std::vector<int> cores;
    for (unsigned core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &allowed)) cores.push_back(static_cast<int>(core));
    return cores;
}

static double cpu_seconds()
{
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto seconds = [](const timeval &time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
    };
    return seconds(used.ru_utime) + seconds(used.ru_stime);
}

Stopwatch::Stopwatch() : start(now_seconds()), cpu_start(cpu_seconds()) {}

Result Stopwatch::result() const
{
    return {.seconds = now_seconds() - start, .cpu_seconds = cpu_seconds() - cpu_start, .percentiles = {}};
}

std::array<double, 3> percentiles(std::vector<double> *samples)
{
    std::sort(samples->begin(), samples->end());
    const auto rank = [&](double share) {
        return (*samples)[static_cast<size_t>(share * static_cast<double>(samples->size() - 1))];
    };
    return {rank(0.5), rank(0.99), rank(0.999)};
}

void Side::serve(int socket)
{
    pollfd closed{.fd = socket, .events = POLLIN, .revents = 0};
    ::poll(&closed, 1, -1);
}

BareSide::BareSide(size_t peers, int core) : most_peers(peers)
{
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(static_cast<unsigned>(core), &only);
    if (sched_setaffinity(0, sizeof only, &only) != 0)
        throw std::runtime_error(std::string("sched_setaffinity(): ") + strerror(errno));
}

Result BareSide::run(const Task &task)
{
    if (task.kind == Task::barrier || task.kind == Task::submit) return {};
    // Operations in rounds: a round begins when the last one has ended.
    const bool rounds = task.kind == Task::scatter || task.kind == Task::one_at_a_time;
    const uint64_t in_round = task.kind == Task::scatter ? task.depth : rounds ? 1 : task.count;
    const uint64_t step = task.kind == Task::one_at_a_time ? 1 : 0; // from round to round; as the engine's side does it
    std::vector<double> each;
    each.reserve(task.count);
    const Stopwatch watch;
    for (uint64_t round = 0; round < (rounds ? task.count : 1); ++round) {
        const double begin = now_seconds();
        for (uint64_t posted = 0, completed = 0; completed < in_round; completed += poll())
            while (posted < in_round && posted - completed < task.depth &&
                   post(task.to_all() ? posted % most_peers : 0, task.read, task.offset(round * step + posted),
                        task.length))
                ++posted;
        each.push_back(now_seconds() - begin);
    }
    Result result = watch.result();
    result.percentiles = percentiles(&each);
    return result;
}

} // namespace bench
