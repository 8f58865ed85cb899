// two_nodes.cpp: the two sides of tests/nodes/engine.bats, on one node or on two.
//   two_nodes target NIC FILE      registers memory, leaves its description in FILE; in the end says what has arrived
//   two_nodes source NIC FILE...   writes to each target and reads it back, again and again
// Until SIGTERM, and then until nothing is under way. NIC as in nic_from_text().
//
// A target's memory is slots. In each an operation follows the other: a write of its pages, a read of it all, which is
// compared, the next write. One that does not end well is a line of the source's, and nothing more is done in its slot
// until the target's FILE is one of another time: then all slots begin anew.
#include "../sharding.hpp"
#include "../transfer_engine.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

using namespace transfer_engine;
using Clock = std::chrono::steady_clock;

namespace
{

constexpr uint64_t slots = 8, pages = 8, page_bytes = 32 << 10, slot_bytes = pages * page_bytes;
constexpr uint64_t page_words = page_bytes / sizeof(uint64_t), slot_words = pages * page_words;
constexpr uint64_t immediates_of_write = imm_count(Transfer::paged_writes, pages, 1);
constexpr auto nap = std::chrono::milliseconds(10);

std::atomic<bool> told_to_end{false};

void require(bool is_so, const std::string &what)
{
    if (is_so) return;
    fprintf(stderr, "two_nodes: %s\n", what.c_str());
    exit(EXIT_FAILURE);
}

void require(const Status &status) { require(status.ok(), name_of(status.code) + (": " + status.message)); }

std::unique_ptr<TransferEngine> open_engine(const char *nic)
{
    Options options;
    options.groups.resize(1);
    options.spin = false; // a node has few processors
    Status status;
    require(nic_from_text(nic, &options.groups[0].nics.emplace_back()));
    auto engine = TransferEngine::open(std::move(options), &status);
    require(status);
    return engine;
}

// Registered memory of so many slots. A write leaves words there that say which write it was, and their place.
struct Memory {
    std::vector<uint64_t> words = std::vector<uint64_t>(slots * slot_words);
    MrHandle handle;
    MrDesc region;

    explicit Memory(TransferEngine *engine)
    {
        require(engine->reg_mr(words.data(), slots * slot_bytes, host, &handle, &region));
    }
    static uint64_t word_of(uint64_t write, uint64_t place) { return write << 32 | place; }
    bool has(uint64_t slot, uint64_t write) const
    {
        bool all = true;
        for (uint64_t place = 0; place < slot_words; ++place)
            all = all && words[slot * slot_words + place] == word_of(write, place);
        return all;
    }
};

void be_target(const char *nic, const std::string &file)
{
    const auto engine = open_engine(nic);
    const Memory memory(engine.get());
    std::atomic<uint64_t> writes{0};
    const std::function<void(uint32_t)> expect = [&](uint32_t slot) {
        engine->expect_imm_count(slot, immediates_of_write, [&, slot](const Status &status) {
            if (!status.ok()) return; // the end
            ++writes;
            expect(slot);
        });
    };
    for (uint32_t slot = 0; slot < slots; ++slot)
        expect(slot);
    const std::vector<uint8_t> description = serialize(memory.region);
    std::ofstream(file + ".new").write(reinterpret_cast<const char *>(description.data()), std::ssize(description));
    std::filesystem::rename(file + ".new", file); // so that it is never seen half-written

    while (!told_to_end)
        std::this_thread::sleep_for(nap);
    engine->stop(true);
    uint64_t right = 0;
    for (uint64_t slot = 0; slot < slots; ++slot) {
        const uint64_t write = memory.words[slot * slot_words] >> 32;
        right += write % slots == slot && memory.has(slot, write) ? 1 : 0;
    }
    printf("%zu writes, %zu immediates, %zu slots right\n", writes.load(), engine->metrics().immediates, right);
}

// What the source does with one target. Only the engine's callbacks touch it while anything is under way.
class Stream
{
public:
    Stream(TransferEngine *opened, const char *described) : engine(opened), file(described)
    {
        std::iota(next.begin(), next.end(), 0);
    }

    bool is_idle() const { return under_way == 0; }
    void begin_if_described_anew();
    bool say_all() const;

private:
    void write(uint64_t slot);
    void read_back(uint64_t slot, uint64_t number);
    bool ended_well(const char *what, uint64_t number, const Status &status);

    TransferEngine *engine;
    const std::filesystem::path file;
    const std::string name = file.filename().string();
    Memory from{engine}, back{engine};
    MrDesc there;
    std::filesystem::file_time_type time{}; // of the file
    std::atomic<uint64_t> under_way{0};     // operations
    std::array<uint64_t, slots> next{};     // the number of a slot's next write: the slot's, then every slots-th
    uint64_t right = 0, wrong = 0, failed = 0, right_before = 0;
    Clock::time_point last;     // when an operation ended well, or all began
    double longest_seconds = 0; // from one that ended well to the next
};

void Stream::begin_if_described_anew()
{
    std::error_code absent;
    const auto now = last_write_time(file, absent);
    if (!is_idle() || absent || now == time) return;
    time = now;
    std::ifstream stream(file);
    const std::string bytes(std::istreambuf_iterator<char>(stream), {});
    require(parse({reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size()}, &there));
    right_before = right;
    last = Clock::now();
    under_way = slots;
    for (uint64_t slot = 0; slot < slots; ++slot)
        write(slot);
}

// The pages are here in the opposite order.
void Stream::write(uint64_t slot)
{
    const uint64_t number = next[slot];
    next[slot] += slots;
    Pages to{.indices = std::vector<uint32_t>(pages), .stride = page_bytes, .offset = slot * slot_bytes};
    std::iota(to.indices.begin(), to.indices.end(), 0);
    Pages of = to;
    std::reverse(of.indices.begin(), of.indices.end());
    for (uint64_t place = 0; place < slot_words; ++place)
        from.words[slot * slot_words + of.indices[place / page_words] * page_words + place % page_words] =
            Memory::word_of(number, place);
    require(engine->submit_paged_writes(page_bytes, static_cast<uint32_t>(slot), from.handle, std::move(of), there,
                                        std::move(to), [=, this](const Status &status) {
                                            if (ended_well("write", number, status)) read_back(slot, number);
                                        }));
}

void Stream::read_back(uint64_t slot, uint64_t number)
{
    const uint64_t offset = slot * slot_bytes;
    require(engine->submit_single_read(slot_bytes, back.handle, offset, there, offset, [=, this](const Status &status) {
        if (!ended_well("read", number, status)) return;
        const bool is_right = back.has(slot, number);
        ++(is_right ? right : wrong);
        if (!is_right) printf("%s: write %zu: other bytes are read back\n", name.c_str(), number);
        if (right - right_before == slots) printf("%s: under way\n", name.c_str());
        if (is_right && !told_to_end)
            write(slot);
        else
            --under_way;
    }));
}

bool Stream::ended_well(const char *what, uint64_t number, const Status &status)
{
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last).count();
    if (status.ok()) {
        longest_seconds = std::max(longest_seconds, seconds);
        last = now;
        return true;
    }
    printf("%s: %s %zu: %s, %.2f s after the last that ended well: %s\n", name.c_str(), what, number,
           name_of(status.code), seconds, status.message.c_str());
    ++failed;
    --under_way;
    return false;
}

bool Stream::say_all() const
{
    printf("%s: %zu writes, %zu immediates; %zu wrong, %zu failed, longest wait %.2f s\n", name.c_str(), right,
           right * immediates_of_write, wrong, failed, longest_seconds);
    return wrong == 0;
}

bool be_source(const char *nic, std::span<char *const> files)
{
    const auto engine = open_engine(nic);
    engine->on_peer_down([](const NetAddr &, const Status &status) {
        printf("on_peer_down: %s: %s\n", name_of(status.code), status.message.c_str());
    });
    std::deque<Stream> streams;
    for (const char *file : files)
        streams.emplace_back(engine.get(), file);
    for (; !told_to_end || !std::ranges::all_of(streams, &Stream::is_idle); std::this_thread::sleep_for(nap))
        for (Stream &stream : streams)
            if (!told_to_end) stream.begin_if_described_anew();
    engine->stop(true);
    return std::ranges::count_if(streams, &Stream::say_all) == std::ssize(streams);
}

} // namespace

int main(int argc, char **argv)
{
    const std::string side = argc > 1 ? argv[1] : "";
    require((side == "target" && argc == 4) || (side == "source" && argc >= 4),
            "target NIC FILE, or source NIC FILE...");
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    std::signal(SIGTERM, [](int) { told_to_end = true; });
    if (side == "source") return be_source(argv[2], std::span(argv, static_cast<size_t>(argc)).subspan(3)) ? 0 : 1;
    be_target(argv[2], argv[3]);
}
