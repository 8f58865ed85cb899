// te_bench: what the engine costs. Each figure is measured with the engine and with a bare loop on libfabric, in turns,
// in one run; the ratio is the median of those of the pairs. The target is a second process, which takes no part but
// for moving its provider along.
#include "../transfer_engine.hpp"
#include "bare_ofi.hpp"

#include <algorithm>
#include <cstring>
#include <getopt.h>
#include <numeric>
#include <poll.h>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace transfer_engine;
using Clock = std::chrono::steady_clock;

namespace
{

constexpr uint64_t memory_bytes = 64 << 20;

struct Arguments {
    std::string provider = "tcp;ofi_rxm";
    int pairs = 15;
    const char *csv = nullptr;
};

void print_usage(FILE *stream)
{
    fputs("usage: te_bench [--quick] [--provider NAME] [--csv FILE]\n"
          "Compares the engine with a bare loop on libfabric.\n\n"
          "  --quick          5 pairs of each instead of 15\n"
          "  --provider NAME  of libfabric: tcp;ofi_rxm (default), shm\n"
          "  --csv FILE       a row for each pair: figure, unit, engine, bare\n"
          "  --help           this text\n",
          stream);
}

[[noreturn]] void give_up(const std::string &what)
{
    fprintf(stderr, "te_bench: %s\n", what.c_str());
    exit(EXIT_FAILURE);
}

void require(const Status &status, const char *call)
{
    if (!status.ok()) give_up(std::string(call) + ": " + name_of(status.code) + ": " + status.message);
}

Arguments parse_arguments(int argc, char **argv)
{
    static const option options[] = {{"quick", no_argument, nullptr, 'q'},
                                     {"provider", required_argument, nullptr, 'p'},
                                     {"csv", required_argument, nullptr, 'c'},
                                     {"help", no_argument, nullptr, 'h'},
                                     {nullptr, 0, nullptr, 0}};
    Arguments arguments;
    for (int letter; (letter = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
        switch (letter) {
        case 'q': arguments.pairs = 5; break;
        case 'p': arguments.provider = optarg; break;
        case 'c': arguments.csv = optarg; break;
        case 'h': print_usage(stdout); exit(EXIT_SUCCESS);
        default: print_usage(stderr); exit(2);
        }
    }
    if (optind < argc) give_up(std::string("unexpected argument '") + argv[optind] + "'");
    return arguments;
}

// -------------------------------------------------------------------------------- the two processes

void send_bytes(int socket, std::span<const uint8_t> bytes)
{
    const uint64_t length = bytes.size();
    if (send(socket, &length, sizeof length, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof length) ||
        send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size()))
        give_up(std::string("send(): ") + strerror(errno));
}

std::vector<uint8_t> receive_bytes(int socket)
{
    pollfd ready{.fd = socket, .events = POLLIN, .revents = 0};
    uint64_t length = 0;
    if (poll(&ready, 1, 60000) != 1 || recv(socket, &length, sizeof length, MSG_WAITALL) != sizeof length ||
        length > 65536)
        give_up("nothing from the other process");
    std::vector<uint8_t> bytes(length);
    if (recv(socket, bytes.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length))
        give_up("the other process has ended");
    return bytes;
}

struct Side {
    explicit Side(const Arguments &arguments)
        : memory(memory_bytes, uint8_t{1}), bare(arguments.provider, memory.data(), memory.size())
    {
        Options options;
        options.groups.resize(1);
        options.groups[0].nics = {ofi_nic(arguments.provider)};
        options.spin = false; // two engines on one machine: one that has nothing to do leaves the processor to others
        Status status;
        engine = TransferEngine::open(std::move(options), &status);
        require(status, "TransferEngine::open()");
        require(engine->reg_mr(memory.data(), memory.size(), host, &handle, &region), "reg_mr()");
    }

    std::vector<uint8_t> memory;
    bare::Ofi bare;
    std::unique_ptr<TransferEngine> engine;
    MrHandle handle;
    MrDesc region;
};

void be_target(const Arguments &arguments, int socket)
{
    Side side(arguments);
    send_bytes(socket, serialize(side.region));
    const bare::Target target = side.bare.target();
    send_bytes(socket, target.address);
    const std::array<uint64_t, 2> place{target.base, target.key};
    send_bytes(socket, std::span(reinterpret_cast<const uint8_t *>(place.data()), sizeof place));
    // Until the other side closes its end. The provider only moves when it is polled; as the engine's worker does,
    // this naps when nothing has come for a while, which only bytes in the memory tell.
    pollfd closed{.fd = socket, .events = POLLIN, .revents = 0};
    for (unsigned turn = 1;; ++turn) {
        side.bare.poll();
        if (turn % 64 == 0) std::this_thread::yield();
        if (turn % 65536 == 0 && poll(&closed, 1, 0) != 0) return;
    }
}

// --------------------------------------------------------------------------------------- measuring

class Bench
{
public:
    Bench(const Arguments &given, int socket) : arguments(given), side(given)
    {
        const std::vector<uint8_t> region = receive_bytes(socket);
        require(parse(region, &there), "parse()");
        bare::Target target{.address = receive_bytes(socket)};
        const std::vector<uint8_t> place = receive_bytes(socket);
        if (place.size() != 2 * sizeof(uint64_t)) give_up("the other process speaks another language");
        memcpy(&target.base, place.data(), sizeof(uint64_t));
        memcpy(&target.key, place.data() + sizeof(uint64_t), sizeof(uint64_t));
        side.bare.connect(target);
        if (arguments.csv != nullptr) csv = fopen(arguments.csv, "we");
        if (arguments.csv != nullptr && csv == nullptr)
            give_up(std::string("--csv ") + arguments.csv + ": " + strerror(errno));
        if (csv != nullptr) fputs("figure,unit,engine,bare\n", csv);
    }
    ~Bench()
    {
        if (csv != nullptr) fclose(csv);
    }
    Bench(const Bench &) = delete;
    Bench &operator=(const Bench &) = delete;

    void run();

private:
    double engine_latency_us(uint64_t length);
    double bare_latency_us(uint64_t length);
    double engine_writes(uint64_t length, uint64_t count, size_t depth);
    double engine_pages(uint64_t length, uint64_t count);
    double bare_writes(uint64_t length, uint64_t count, uint64_t depth);
    double post_ns();
    template <typename Engine, typename Bare>
    void compare(const std::string &figure, const char *unit, Engine engine, Bare bare);

    static double seconds_since(Clock::time_point start)
    {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }
    static double gigabytes(uint64_t length, uint64_t count, double seconds)
    {
        return static_cast<double>(length * count) / 1e9 / seconds;
    }
    static void wait_for(const Flag &flag)
    {
        const auto deadline = Clock::now() + std::chrono::seconds(60);
        while (!flag.done.load(std::memory_order_acquire)) {
            std::this_thread::yield();
            if (Clock::now() > deadline) give_up("a write has not ended in a minute");
        }
        require(flag.status, "a write");
    }

    const Arguments &arguments;
    Side side;
    MrDesc there;
    FILE *csv = nullptr;
};

double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// In turns, the first of a pair alternately the one and the other.
template <typename Engine, typename Bare>
void Bench::compare(const std::string &figure, const char *unit, Engine engine, Bare bare)
{
    std::vector<double> engines, bares, ratios;
    engine(), bare(); // warm
    for (int pair = 0; pair < arguments.pairs; ++pair) {
        const double first = pair % 2 == 0 ? engine() : bare(), second = pair % 2 == 0 ? bare() : engine();
        engines.push_back(pair % 2 == 0 ? first : second);
        bares.push_back(pair % 2 == 0 ? second : first);
        ratios.push_back(engines.back() / bares.back());
        if (csv != nullptr) fprintf(csv, "%s,%s,%.6f,%.6f\n", figure.c_str(), unit, engines.back(), bares.back());
    }
    printf("%-34s %10.3f %10.3f  %-5s %8.3f\n", figure.c_str(), median(engines), median(bares), unit, median(ratios));
}

double Bench::engine_latency_us(uint64_t length)
{
    constexpr int samples = 500;
    std::vector<double> all;
    for (int i = 0; i < samples; ++i) {
        Flag flag;
        const auto start = Clock::now();
        require(side.engine->submit_single_write(length, {}, side.handle, 0, there, 0, &flag), "submit_single_write()");
        wait_for(flag);
        all.push_back(seconds_since(start) * 1e6);
    }
    return median(all);
}

double Bench::bare_latency_us(uint64_t length)
{
    constexpr int samples = 500;
    std::vector<double> all;
    for (int i = 0; i < samples; ++i) {
        const auto start = Clock::now();
        side.bare.write(1, length, 1, [](uint64_t) { return uint64_t{0}; });
        all.push_back(seconds_since(start) * 1e6);
    }
    return median(all);
}

// `depth` of them under way.
double Bench::engine_writes(uint64_t length, uint64_t count, size_t depth)
{
    std::vector<Flag> flags(depth);
    const uint64_t slots = memory_bytes / length;
    const auto start = Clock::now();
    for (uint64_t i = 0; i < count + depth; ++i) {
        Flag &flag = flags[i % depth];
        if (i >= depth) wait_for(flag);
        if (i >= count) continue;
        flag.done = false;
        const uint64_t offset = i % slots * length;
        require(side.engine->submit_single_write(length, {}, side.handle, offset, there, offset, &flag),
                "submit_single_write()");
    }
    return gigabytes(length, count, seconds_since(start));
}

// One operation.
double Bench::engine_pages(uint64_t length, uint64_t count)
{
    Pages pages{.indices = std::vector<uint32_t>(count), .stride = length};
    for (uint64_t i = 0; i < count; ++i)
        pages.indices[i] = static_cast<uint32_t>(i % (memory_bytes / length));
    Pages same = pages;
    Flag flag;
    const auto start = Clock::now();
    require(side.engine->submit_paged_writes(length, {}, side.handle, std::move(pages), there, std::move(same), &flag),
            "submit_paged_writes()");
    wait_for(flag);
    return gigabytes(length, count, seconds_since(start));
}

double Bench::bare_writes(uint64_t length, uint64_t count, uint64_t depth)
{
    const uint64_t slots = memory_bytes / length;
    const auto start = Clock::now();
    side.bare.write(count, length, depth, [=](uint64_t i) { return i % slots; });
    return gigabytes(length, count, seconds_since(start));
}

// What one submit takes on the caller's thread.
double Bench::post_ns()
{
    constexpr size_t samples = 2000, depth = 16;
    std::vector<Flag> flags(depth);
    std::vector<double> all;
    for (size_t i = 0; i < samples; ++i) {
        Flag &flag = flags[i % depth];
        if (i >= depth) wait_for(flag);
        flag.done = false;
        const auto start = Clock::now();
        const Status status = side.engine->submit_single_write(8, {}, side.handle, 0, there, 0, &flag);
        all.push_back(seconds_since(start) * 1e9);
        require(status, "submit_single_write()");
    }
    for (const Flag &flag : flags)
        wait_for(flag);
    return median(all);
}

void Bench::run()
{
    printf("provider %s, %d pairs each, target: another process here\n\n", arguments.provider.c_str(), arguments.pairs);
    printf("%-34s %10s %10s  %-5s %8s\n", "", "engine", "bare", "", "ratio");
    compare(
        "write of 8 bytes, depth 1", "us", [&] { return engine_latency_us(8); }, [&] { return bare_latency_us(8); });
    for (const uint64_t kib : {16U, 64U, 1024U, 8192U}) {
        const uint64_t length = kib << 10, count = std::max<uint64_t>((128 << 20) / length, 64);
        compare(
            "writes of " + std::to_string(kib) + " KiB, depth 16", "GB/s",
            [&] { return engine_writes(length, count, 16); }, [&] { return bare_writes(length, count, 16); });
    }
    for (const uint64_t kib : {4U, 32U})
        for (const uint64_t count : {100U, 10000U}) {
            compare(
                std::to_string(count) + " pages of " + std::to_string(kib) + " KiB", "GB/s",
                [&] { return engine_pages(kib << 10, count); }, [&] { return bare_writes(kib << 10, count, 256); });
        }
    printf("\none submit takes the caller %.0f ns (median)\n", post_ns());
}

} // namespace

int main(int argc, char **argv)
{
    const Arguments arguments = parse_arguments(argc, argv);
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        give_up(std::string("socketpair(): ") + strerror(errno));
    const pid_t child = fork(); // before anything is opened: adapters do not survive a fork
    if (child < 0) give_up(std::string("fork(): ") + strerror(errno));
    close(sockets[child == 0 ? 0 : 1]);
    try {
        if (child == 0) {
            be_target(arguments, sockets[1]);
            return EXIT_SUCCESS;
        }
        Bench(arguments, sockets[0]).run();
    } catch (const std::exception &error) {
        give_up(error.what());
    }
    close(sockets[0]);
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) give_up("the target failed");
    return EXIT_SUCCESS;
}
