// side.hpp: what te_bench compares. A contestant is two or more processes: one that begins the operations, and the
// peers whose memory they write and read. Both kinds are a Side: by the engine, or by a bare loop on libfabric or
// verbs.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench
{

using Bytes = std::vector<uint8_t>;

constexpr uint64_t memory_bytes = 64 << 20; // of each side

// What to measure; the same for every contestant. Between two processes, but for scatter and barrier.
struct Task {
    enum Kind : uint32_t {
        end,           // of the process
        one_at_a_time, // `count` operations, each begun when the last one has ended
        window,        // `count` operations, `depth` of them under way
        pages,         // `count` pages: to the engine one operation, to a bare loop a window of `depth`
        scatter,       // `count` times `depth` slices, to the peers in turn
        barrier,       // `count` times one to all peers; the engine
        submit         // `count` times what a submit takes its caller; the engine
    };
    Kind kind = end;
    bool read = false;
    uint64_t length = 0; // bytes of an operation, a page, a slice
    uint64_t count = 0;
    uint64_t depth = 1;

    // Whether it goes to all peers; else to the first.
    bool to_all() const { return kind == scatter || kind == barrier || kind == end; }

    // The piece of the memory that operation i is about, there and here: spread, not one after the other.
    uint64_t offset(uint64_t i) const
    {
        constexpr uint64_t stride = 7919; // a prime
        return i * stride % (memory_bytes / length) * length;
    }
};

struct Result {
    double seconds = 0;                  // 0: not measured by this contestant
    double cpu_seconds = 0;              // of the process that begins the operations, all its threads
    std::array<double, 3> percentiles{}; // 50, 99, 99.9: seconds of one; one_at_a_time and submit
};

// All of it throws std::runtime_error where it cannot.
class Side
{
public:
    virtual ~Side() = default;
    // What the other side has to know of this one. `peer`: as which of its peers; 0 at a peer.
    virtual Bytes describe(size_t peer) = 0;
    virtual void connect(size_t peer, const Bytes &description) = 0;
    // At a peer: moves along what has to be, until the other end of this socket is closed.
    virtual void serve(int socket);
    virtual Result run(const Task &task) = 0;
};

// `nic`: as nic_from_text() of the library has it.
std::unique_ptr<Side> engine_side(const std::string &nic, std::span<uint8_t> memory, size_t peers, int core);
std::unique_ptr<Side> bare_ofi_side(const std::string &provider, std::span<uint8_t> memory, size_t peers, int core);
std::unique_ptr<Side> bare_verbs_side(const std::string &device, std::span<uint8_t> memory, size_t peers, int core);

// A loop with nothing between it and the provider.
class BareSide : public Side
{
public:
    // Binds the thread.
    BareSide(size_t peers, int core);
    Result run(const Task &task) override;

protected:
    // False: there is no room.
    virtual bool post(size_t peer, bool read, uint64_t offset, uint64_t length) = 0;
    // Moves the provider along; how many have completed.
    virtual uint64_t poll() = 0;

    const size_t most_peers;
};

// Measures what happens between its construction and result().
class Stopwatch
{
public:
    Stopwatch();
    Result result() const;

private:
    double start, cpu_start;
};

double now_seconds();
std::vector<int> cores_allowed(); // to this thread
std::array<double, 3> percentiles(std::vector<double> *samples);

} // namespace bench
