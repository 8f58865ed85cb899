#include "contestant.hpp"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bench
{

namespace
{

constexpr int answer_limit_ms = 120000;
constexpr size_t longest_description = 4096;

// Sockets of SOCK_SEQPACKET: a packet is one message.
std::array<int, 2> make_sockets()
{
    std::array<int, 2> both{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, both.data()) != 0)
        throw std::runtime_error(std::string("socketpair(): ") + strerror(errno));
    return both;
}

void send_packet(int socket, const void *start, size_t length)
{
    if (send(socket, start, length, MSG_NOSIGNAL) != static_cast<ssize_t>(length))
        throw std::runtime_error("the other process has ended");
}

// The packet's length.
size_t receive_packet(int socket, void *start, size_t room, int limit_ms)
{
    pollfd ready{.fd = socket, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, limit_ms) != 1) throw std::runtime_error("no answer from the other process");
    const ssize_t length = recv(socket, start, room, 0);
    if (length <= 0) throw std::runtime_error("the other process has ended");
    return static_cast<size_t>(length);
}

// Tells the other side of this one, and the other way round.
void introduce(int socket, size_t peer, Side *side)
{
    const Bytes own = side->describe(peer);
    send_packet(socket, own.data(), own.size());
    Bytes other(longest_description);
    other.resize(receive_packet(socket, other.data(), other.size(), answer_limit_ms));
    side->connect(peer, other);
}

std::span<uint8_t> map_memory()
{
    void *const start =
        mmap(nullptr, memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (start == MAP_FAILED) throw std::runtime_error(std::string("mmap(64 MiB): ") + strerror(errno));
    return {static_cast<uint8_t *>(start), memory_bytes};
}

// They take turns.
int core_of(size_t process)
{
    const std::vector<int> cores = cores_allowed();
    return cores[process % cores.size()];
}

void be_peer(const Contestant::OpenSide &open, size_t peer, int socket)
{
    const auto side = open(map_memory(), 1, core_of(1 + peer));
    introduce(socket, 0, side.get());
    side->serve(socket);
}

// Does what it is told.
void begin_operations(const Contestant::OpenSide &open, int control, const std::vector<int> &peers)
{
    const auto side = open(map_memory(), peers.size(), core_of(0));
    for (size_t peer = 0; peer < peers.size(); ++peer)
        introduce(peers[peer], peer, side.get());
    for (Task task;;) {
        if (receive_packet(control, &task, sizeof task, -1) != sizeof task || task.kind == Task::end) return;
        const Result result = side->run(task);
        send_packet(control, &result, sizeof result);
    }
}

template <typename Do> pid_t start_process(const Do &what)
{
    fflush(nullptr);
    const pid_t process = fork();
    if (process < 0) throw std::runtime_error(std::string("fork(): ") + strerror(errno));
    if (process > 0) return process;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int status = EXIT_SUCCESS;
    try {
        what();
    } catch (const std::exception &error) {
        fprintf(stderr, "te_bench: %s\n", error.what());
        status = EXIT_FAILURE;
    }
    fflush(nullptr);
    _exit(status);
}

} // namespace

Contestant::Contestant(const OpenSide &open, size_t peers)
{
    std::vector<int> near_ends, far_ends;
    for (size_t peer = 0; peer < peers; ++peer) {
        const auto [near, far] = make_sockets();
        near_ends.push_back(near);
        far_ends.push_back(far);
    }
    const auto [own, other] = make_sockets();
    control = own;
    processes.push_back(start_process([&, commands = other] { begin_operations(open, commands, near_ends); }));
    close(other);
    for (size_t peer = 0; peer < peers; ++peer)
        processes.push_back(start_process([&, peer, far = far_ends[peer]] {
            for (const int socket : near_ends) // closed when the process that begins the operations ends
                close(socket);
            be_peer(open, peer, far);
        }));
    for (size_t peer = 0; peer < peers; ++peer) {
        close(near_ends[peer]);
        close(far_ends[peer]);
    }
    run({.kind = Task::scatter, .length = 8, .count = 1, .depth = peers}); // they are connected
}

Contestant::~Contestant()
{
    constexpr Task last{.kind = Task::end};
    signal_those_of(last, SIGCONT);
    send(control, &last, sizeof last, MSG_NOSIGNAL);
    close(control);
    constexpr int most_naps = 1000;
    constexpr useconds_t nap_us = 10000;
    for (const pid_t process : processes)
        for (int naps = 0; waitpid(process, nullptr, WNOHANG) == 0; ++naps) {
            if (naps == most_naps) kill(process, SIGKILL);
            usleep(nap_us);
        }
}

// One that has no part in it would take a processor from those that have.
void Contestant::signal_those_of(const Task &task, int signal) const
{
    for (const pid_t process : task.to_all() ? std::span(processes) : std::span(processes).first(2))
        kill(process, signal);
}

Result Contestant::run(const Task &task)
{
    Result result;
    signal_those_of(task, SIGCONT);
    send_packet(control, &task, sizeof task);
    if (receive_packet(control, &result, sizeof result, answer_limit_ms) != sizeof result)
        throw std::runtime_error("half an answer");
    signal_those_of(task, SIGSTOP);
    return result;
}

} // namespace bench
