// ofi_engine_test.cpp: whole engines between processes, over libfabric. All write to all, and every byte is compared;
// then one is killed and started anew, one is stopped.
//
// Each process has a role. The test's own process starts them, and opens nothing of libfabric: it may fork at any time.
#include "../sharding.hpp"
#include "engine_fixture.hpp"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace transfer_engine;
using namespace transfer_engine::testing;

namespace
{

struct Setting {
    const char *provider;
    size_t processes, nics; // nics: of each
};

using Clock = std::chrono::steady_clock;
using Roles = std::vector<size_t>;

constexpr size_t most_processes = 4;
constexpr size_t victim = 0; // of the faults; started first, so that the others know its number
constexpr auto bounded = 6s; // what ends by a deadline of less than a second

// A kind of transfer; its immediate, too. Memory is in zones: what is written from here, then what comes from each peer
// in each kind.
enum Kind : uint8_t { single, paged, scattered, barrier, single_read, paged_read, kinds };
constexpr uint64_t zone = 128 << 10; // bytes
constexpr uint8_t untouched = 0xee;
constexpr uint64_t page_length = 3000, page_stride = 3072;
constexpr uint32_t page_count = 40;

uint64_t zone_of(Kind kind, size_t peer) { return zone * (1 + kind * most_processes + peer); }

// The byte at an offset of what this role writes.
uint8_t byte_of(size_t role, uint64_t offset)
{
    return static_cast<uint8_t>(((offset + 1) * 0x9e3779b97f4a7c15u + role * 0xbf58476d1ce4e5b9u) >> 40);
}

// Page i is page first + i * step.
std::vector<uint32_t> every(size_t step, size_t first = 0)
{
    std::vector<uint32_t> indices;
    for (size_t i = 0; i < page_count; ++i)
        indices.push_back(static_cast<uint32_t>((first + i * step) % page_count));
    return indices;
}

// What one writes to another in transfers of a kind: from an offset there to one in the zone here.
struct Piece {
    uint64_t src, dst, length;
};
std::vector<Piece> pieces_of(Kind kind, size_t from, size_t to)
{
    if (kind == single) // long; with fewer shares than adapters; of no bytes
        return {{5 + from, 1, 100001}, {77, 100100, 65}, {0, 100200, 0}};
    if (kind == scattered) return {{1000 * to, 9, 20000 + to}};
    std::vector<Piece> pieces;
    for (size_t i = 0; kind == paged && i < page_count; ++i)
        pieces.push_back({3 + every(7, to)[i] * page_length, every(11)[i] * page_stride, page_length});
    return pieces;
}

std::vector<uint8_t> message_of(size_t from, size_t number)
{
    std::vector<uint8_t> message(2 + 10 * number, static_cast<uint8_t>(number));
    message[0] = static_cast<uint8_t>(from);
    return message;
}

// R, S, T ...: of a process or of one of its threads, by its folder in /proc.
char state_of(const std::string &task)
{
    std::string number, name;
    char state = '?';
    std::ifstream("/proc/" + task + "/stat") >> number >> name >> state;
    return state;
}

void expect_taken(const Status &status) { EXPECT_TRUE(status.ok()) << status.message; }

void expect_ok(const Outcome &ended, size_t count)
{
    for (size_t i = 0; i < count; ++i)
        EXPECT_EQ(ended.code(i), Code::ok) << ended.status(i).message;
}

using Sockets = std::array<int, most_processes>; // to the others, by role

// This process: its role, its engine, the regions of the others.
class Process
{
public:
    Process(const Setting &given, size_t own_role, const Sockets &to, pid_t first)
        : setting(given), role(own_role), sockets(to), victim_pid(first),
          memory(zone * (1 + kinds * most_processes), untouched)
    {
        for (uint64_t i = 0; i < zone; ++i)
            memory[i] = byte_of(role, i);
        for (size_t peer = 0; peer < setting.processes; ++peer)
            all.push_back(peer);
        others = without_me(all);
        Options options = options_with([](Options &o) { o.spin = false, o.abort_after = 200ms; });
        options.groups.resize(1);
        options.groups[0].nics.assign(setting.nics, [this](Status *status) {
            worker = gettid();
            return ofi_nic(setting.provider)(status);
        });
        Status status;
        engine = TransferEngine::open(std::move(options), &status);
        if (engine != nullptr) status = engine->reg_mr(memory.data(), memory.size(), host, &handle, &region);
        if (!status.ok()) give_up(status.message);
    }

    // shm tells of nothing that went wrong at the peer.
    bool tells_of_failures() const { return setting.provider != std::string("shm"); }
    Roles without_me(Roles roles) const
    {
        std::erase(roles, role);
        return roles;
    }

    // Waits for these, and learns their regions as they are now.
    void meet(const Roles &roles)
    {
        const std::vector<uint8_t> own = serialize(region);
        for (const size_t peer : without_me(roles))
            EXPECT_EQ(send(sockets[peer], own.data(), own.size(), 0), static_cast<ssize_t>(own.size()));
        for (const size_t peer : without_me(roles)) {
            std::array<uint8_t, 1024> bytes{};
            const ssize_t length = recv(sockets[peer], bytes.data(), bytes.size(), 0);
            if (length < 0 || !parse(std::span(bytes).first(static_cast<size_t>(length)), &peers[peer]).ok())
                give_up("nothing from process " + std::to_string(peer));
        }
    }

    // While its worker naps: shm has locks in memory that the processes share, and one that is taken by a process that
    // does not run holds up whoever writes to it.
    void stop_itself() const
    {
        EXPECT_TRUE(soon([&] { return state_of("self/task/" + std::to_string(worker)) == 'S'; }));
        kill(getpid(), SIGSTOP);
    }
    bool sees_stopped_victim() const
    {
        return soon([&] { return state_of(std::to_string(victim_pid)) == 'T'; });
    }

    // That the zone from `begin` on has what one has written to the other in this kind, and nothing else.
    void check(uint64_t begin, Kind kind, size_t from, size_t to) const
    {
        std::vector<uint8_t> expected(zone, untouched);
        for (const Piece &piece : pieces_of(kind, from, to))
            for (uint64_t i = 0; i < piece.length; ++i)
                expected[piece.dst + i] = byte_of(from, piece.src + i);
        const auto right = std::mismatch(expected.begin(), expected.end(), &memory[begin]).first;
        EXPECT_EQ(right - expected.begin(), zone) << "kind " << int{kind} << ", " << from << " to " << to;
    }
    void write(const Piece &piece, Kind kind, std::optional<uint32_t> imm, size_t peer, const Outcome &ended,
               std::chrono::nanoseconds timeout = default_timeout)
    {
        const uint64_t to = zone_of(kind, role) + piece.dst;
        expect_taken(engine->submit_single_write(piece.length, imm, handle, piece.src, peers[peer], to,
                                                 ended.callback(), timeout));
    }
    // Single writes to each of these, and from each. Returns the immediates that came.
    uint64_t greet(const Roles &roles, uint32_t imm)
    {
        const Roles to = without_me(roles);
        const uint64_t immediates = to.size() * 3 * imm_count(Transfer::single_write, 1, setting.nics);
        Outcome arrived, written;
        for (const size_t peer : to)
            std::fill_n(&memory[zone_of(single, peer)], zone, untouched);
        expect_taken(engine->expect_imm_count(imm, immediates, arrived.callback()));
        meet(roles);
        for (const size_t peer : to)
            for (const Piece &piece : pieces_of(single, role, peer))
                write(piece, single, imm, peer, written);
        expect_ok(arrived, 1);
        for (const size_t peer : to)
            check(zone_of(single, peer), single, peer, role);
        expect_ok(written, 3 * to.size());
        meet(roles);
        return immediates;
    }

    [[noreturn]] static void give_up(const std::string &why)
    {
        ADD_FAILURE() << why;
        exit(EXIT_FAILURE);
    }

    const Setting setting;
    const size_t role;
    Roles all, others;
    const Sockets sockets;
    const pid_t victim_pid;
    std::vector<uint8_t> memory;
    std::array<MrDesc, most_processes> peers; // by role
    pid_t worker = 0;                         // the thread
    MrHandle handle;
    MrDesc region;
    std::unique_ptr<TransferEngine> engine;
};

class OfiEngine : public ::testing::TestWithParam<Setting>
{
protected:
    using Body = void (*)(Process &me);

    OfiEngine()
    {
        const timeval limit{.tv_sec = 20, .tv_usec = 0};
        for (size_t a = 0; a < most_processes; ++a)
            for (size_t b = a + 1; b < most_processes; ++b) {
                Sockets pair{};
                EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair.data()), 0);
                sockets[a][b] = pair[0];
                sockets[b][a] = pair[1];
                for (const int socket : {pair[0], pair[1]})
                    EXPECT_EQ(setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
            }
    }
    ~OfiEngine() override
    {
        for (const Sockets &some : sockets)
            for (const int socket : some)
                if (socket > 0) close(socket);
    }

    void start(size_t role, Body body, Setting setting = GetParam())
    {
        fflush(stdout);
        pids[role] = fork();
        if (pids[role] < 0) Process::give_up("fork()"); // kill() would take that number for all processes
        if (pids[role] > 0) return;
        {
            Process process(setting, role, sockets[role], pids[victim]);
            body(process);
        }
        exit(HasFailure() ? EXIT_FAILURE : EXIT_SUCCESS);
    }
    // That it ends by itself and without a failure, or by this signal.
    void expect_end(size_t role, int signal = 0) const
    {
        int status = 0;
        const pid_t pid = pids[role];
        while (waitpid(pid, &status, WNOHANG) == 0) {
            if (Clock::now() > deadline) kill(pid, SIGKILL);
            usleep(1000);
        }
        EXPECT_TRUE(signal == 0 ? status == 0 : WIFSIGNALED(status) && WTERMSIG(status) == signal)
            << "process " << role << ": wait status " << status;
        std::error_code error; // what shm leaves of a process that was killed
        for (const auto &left : std::filesystem::directory_iterator("/dev/shm", error))
            if (left.path().filename().string().starts_with(std::to_string(pid) + ":"))
                std::filesystem::remove(left, error);
    }
    void run(Body body)
    {
        for (size_t role = 0; role < GetParam().processes; ++role)
            start(role, body);
        for (size_t role = 0; role < GetParam().processes; ++role)
            expect_end(role);
    }

    std::array<Sockets, most_processes> sockets{};
    std::array<pid_t, most_processes> pids{};
    const Clock::time_point deadline = Clock::now() + 40s; // of all processes
};

class OfiEngineFault : public OfiEngine
{
};

std::string name_of_setting(const ::testing::TestParamInfo<Setting> &test)
{
    return (test.param.provider == std::string("shm") ? "shm_" : "tcp_") + std::to_string(test.param.processes) +
           "_processes_" + std::to_string(test.param.nics) + "_adapters";
}
constexpr const char *tcp = "tcp;ofi_rxm", *shm = "shm";
INSTANTIATE_TEST_SUITE_P(Settings, OfiEngine,
                         ::testing::Values(Setting{tcp, 2, 2}, Setting{tcp, 2, 3}, Setting{tcp, 4, 1},
                                           Setting{tcp, 4, 4}, Setting{shm, 2, 2}, Setting{shm, 2, 3},
                                           Setting{shm, 4, 1}, Setting{shm, 4, 4}),
                         name_of_setting);
INSTANTIATE_TEST_SUITE_P(Settings, OfiEngineFault,
                         ::testing::Values(Setting{tcp, 4, 1}, Setting{tcp, 4, 4}, Setting{shm, 4, 1},
                                           Setting{shm, 4, 4}),
                         name_of_setting);

// All kinds to all others but single writes, which greet() does. Returns how many operations that were.
size_t write_to_all(Process &me, size_t messages, const Outcome &ended)
{
    std::vector<NetAddr> addresses;
    std::vector<ScatterDst> slices;
    std::vector<MrDesc> targets;
    for (const size_t peer : me.others) {
        const MrDesc &there = me.peers[peer];
        const Piece slice = pieces_of(scattered, me.role, peer)[0];
        addresses.push_back(there.rkeys[0].address);
        targets.push_back(there);
        slices.push_back({slice.length, slice.src, there, zone_of(scattered, me.role) + slice.dst});
        expect_taken(
            me.engine->submit_paged_writes(page_length, paged, me.handle, pages(every(7, peer), page_length, 3), there,
                                           pages(every(11), page_stride, zone_of(paged, me.role)), ended.callback()));
        for (size_t i = 0; i < messages; ++i)
            EXPECT_TRUE(soon([&] {
                return me.engine->submit_send(addresses.back(), message_of(me.role, i), ended.callback()).ok();
            }));
    }
    PeerGroupHandle group;
    expect_taken(me.engine->add_peer_group(addresses, &group));
    expect_taken(me.engine->submit_scatter(group, scattered, me.handle, slices, ended.callback()));
    expect_taken(me.engine->submit_barrier(group, barrier, targets, ended.callback()));
    return me.others.size() * (1 + messages) + 2;
}

// What it has written to the others, from there. Returns how many operations that were.
size_t read_back(Process &me, const Outcome &ended)
{
    for (const size_t peer : me.others) {
        expect_taken(me.engine->submit_single_read(zone, me.handle, zone_of(single_read, peer), me.peers[peer],
                                                   zone_of(single, me.role), ended.callback()));
        expect_taken(me.engine->submit_paged_reads(
            page_length, me.handle, pages(every(11), page_stride, zone_of(paged_read, peer)), me.peers[peer],
            pages(every(11), page_stride, zone_of(paged, me.role)), ended.callback()));
    }
    return 2 * me.others.size();
}

TEST_P(OfiEngine, all_write_to_all)
{
    run([](Process &me) {
        constexpr size_t messages = 20; // to each
        std::mutex mutex;
        std::multiset<std::vector<uint8_t>> got, sent;
        for (const size_t peer : me.others)
            for (size_t i = 0; i < messages; ++i)
                sent.insert(message_of(peer, i));
        const auto take = [&](std::span<const uint8_t> bytes) {
            const std::lock_guard lock(mutex);
            got.emplace(bytes.begin(), bytes.end());
        };
        expect_taken(me.engine->submit_recvs(message_of(0, messages).size(), 8, take));
        me.meet(me.all);
        Outcome ended;
        size_t operations = write_to_all(me, messages, ended);
        uint64_t immediates = me.greet(me.all, single); // meanwhile
        for (const auto &[kind, count] : {std::pair(barrier, imm_count(Transfer::barrier, 1, me.setting.nics)),
                                          std::pair(scattered, imm_count(Transfer::scatter, 1, me.setting.nics)),
                                          std::pair(paged, imm_count(Transfer::paged_writes, page_count, 1))}) {
            Outcome arrived;
            expect_taken(me.engine->expect_imm_count(kind, me.others.size() * count, arrived.callback()));
            expect_ok(arrived, 1);
            for (const size_t peer : me.others)
                me.check(zone_of(kind, peer), kind, peer, me.role);
            immediates += me.others.size() * count;
        }
        EXPECT_TRUE(soon([&] {
            const std::lock_guard lock(mutex);
            return got == sent;
        }));
        expect_ok(ended, operations);
        operations += read_back(me, ended);
        expect_ok(ended, operations);
        for (const size_t peer : me.others) {
            me.check(zone_of(single_read, peer), single, me.role, peer);
            me.check(zone_of(paged_read, peer), paged, me.role, peer);
        }
        me.meet(me.all); // nothing is under way any more
        const Metrics metrics = me.engine->metrics();
        EXPECT_EQ(metrics.submitted, operations + 3 * me.others.size());
        EXPECT_EQ(metrics.succeeded, metrics.submitted);
        EXPECT_EQ(metrics.immediates, immediates);
        EXPECT_EQ(metrics.work_requests_failed + metrics.peers_down, 0U);
        EXPECT_TRUE(me.engine->stop(true).ok());
    });
}

TEST_P(OfiEngineFault, other_number_of_adapters_is_refused)
{
    const Body is_refused = [](Process &me) {
        me.meet({0, 1});
        const MrDesc &there = me.peers[1 - me.role];
        const Pages one = pages({0}, 8);
        EXPECT_NE(there.nics, me.setting.nics);
        for (const Status &status : {me.engine->submit_single_write(1, 7, me.handle, 0, there, 0),
                                     me.engine->submit_single_read(1, me.handle, 0, there, 0),
                                     me.engine->submit_paged_writes(8, 7, me.handle, one, there, one),
                                     me.engine->submit_paged_reads(8, me.handle, one, there, one),
                                     me.engine->submit_scatter({}, 7, me.handle, {{1, 0, there, 0}}),
                                     me.engine->submit_barrier({}, 7, {there})}) {
            EXPECT_EQ(status.code, Code::invalid);
            EXPECT_EQ(status.message, "the peer has " + std::to_string(there.nics) +
                                          " adapters for its region, this side " + std::to_string(me.setting.nics) +
                                          ": they have to be as many");
        }
        me.meet({0, 1});
        EXPECT_EQ(me.engine->metrics().submitted + me.engine->metrics().immediates, 0U);
    };
    Setting other = GetParam();
    other.nics = other.nics % most_nics + 1;
    start(0, is_refused);
    start(1, is_refused, other);
    expect_end(0);
    expect_end(1);
}

constexpr size_t writes = 8;
constexpr Piece much{0, 0, zone};

// The victim is killed while the others write to it and to each other.
void survive(Process &me)
{
    const Roles survivors{1, 2, 3};
    std::vector<NetAddr> down; // the callback's until stop()
    me.engine->on_peer_down([&](const NetAddr &address, const Status &) { down.push_back(address); });
    me.greet(me.all, 1);
    const MrDesc lost = me.peers[victim];
    EXPECT_TRUE(me.sees_stopped_victim());
    Outcome to_victim, to_others;
    for (size_t i = 0; i < writes; ++i)
        for (const size_t peer : me.others)
            if (peer == victim)
                me.write(much, scattered, {}, peer, to_victim, me.tells_of_failures() ? 30s : 500ms);
            else
                me.write(much, scattered, {}, peer, to_others);
    me.meet(survivors); // all of it is under way
    if (me.role == survivors[0]) kill(me.victim_pid, SIGKILL);
    const auto start = Clock::now();
    for (size_t i = 0; i < writes; ++i)
        EXPECT_EQ(to_victim.code(i), me.tells_of_failures() ? Code::peer_down : Code::timed_out)
            << to_victim.status(i).message;
    for (size_t i = 0; i < 2 * writes; ++i) {
        const Status status = to_others.status(i);
        EXPECT_TRUE(status.ok() || status.message == "the endpoint was reset for another peer") << status.message;
    }
    EXPECT_LT(Clock::now() - start, bounded);
    me.greet(survivors, 2);
    me.greet(me.all, 3); // with its successor
    EXPECT_NE(me.peers[victim], lost);
    EXPECT_TRUE(me.engine->stop(true).ok());
    EXPECT_EQ(down.size(), lost.nics); // and nobody else
    for (const RemoteKey &way : std::span(lost.rkeys).first(lost.nics))
        EXPECT_EQ(std::count(down.begin(), down.end(), way.address), 1);
}

TEST_P(OfiEngineFault, killed_peer_ends_its_operations_and_comes_again)
{
    start(victim, [](Process &me) {
        me.greet(me.all, 1);
        me.stop_itself();
        ADD_FAILURE() << "goes on";
    });
    for (const size_t survivor : {1, 2, 3})
        start(survivor, survive);
    expect_end(victim, SIGKILL);
    start(victim, [](Process &me) { me.greet(me.all, 3); });
    for (size_t role = 0; role < most_processes; ++role)
        expect_end(role);
}

// The others write to a process that is stopped: one waits for its deadline, one is stopped, one is drained. The first
// writes to it again when it goes on.
TEST_P(OfiEngineFault, stopped_peer_holds_up_neither_deadline_nor_stop)
{
    run([](Process &me) {
        constexpr size_t waits = 1, cancels = 2, drains = 3;
        me.greet(me.all, 1);
        if (me.role == victim) {
            me.stop_itself();
            me.greet({waits, victim}, 2);
            return;
        }
        EXPECT_TRUE(me.sees_stopped_victim());
        Outcome ended;
        for (size_t i = 0; i < writes; ++i)
            me.write(much, scattered, {}, victim, ended, me.role == cancels ? no_timeout : 300ms);
        const auto start = Clock::now();
        EXPECT_TRUE(me.role == waits || me.engine->stop(me.role == drains).ok());
        EXPECT_TRUE(me.role == waits || ended.count() == writes);
        for (size_t i = 0; i < writes; ++i)
            EXPECT_EQ(ended.code(i), me.role == cancels ? Code::cancelled : Code::timed_out);
        EXPECT_LT(Clock::now() - start, bounded);
        EXPECT_TRUE(ended.status().remote_may_have_changed);
        if (me.role != waits) return;
        kill(me.victim_pid, SIGCONT);
        me.greet({waits, victim}, 2);
    });
}

} // namespace
