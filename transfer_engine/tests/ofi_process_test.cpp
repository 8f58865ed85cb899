// ofi_process_test.cpp: the libfabric backend between processes: peers that end, are killed, are stopped.
#include "ofi_side.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>

using namespace transfer_engine;
using namespace transfer_engine::testing;

namespace
{

const char *const role = "OFI_TEST_PEER_OF_PROVIDER"; // in the environment of a peer: it is one

// This program again, as a domain that does what it is told by its standard input: nothing, or 'c', to close it.
class PeerProcess
{
public:
    explicit PeerProcess(const char *provider)
    {
        std::array<int, 2> to{}, from{};
        EXPECT_EQ(pipe(to.data()), 0);
        EXPECT_EQ(pipe(from.data()), 0);
        pid = fork();
        if (pid == 0) {
            setenv(role, provider, 1);
            dup2(to[0], 0);
            dup2(from[1], 3);
            dup2(::open("/dev/null", O_WRONLY), 1);
            for (int fd = 4; fd < 64; ++fd)
                close(fd);
            execl("/proc/self/exe", "peer", "--gtest_also_run_disabled_tests", "--gtest_brief=1",
                  "--gtest_filter=PeerProcess.DISABLED_serves", nullptr);
            _exit(127);
        }
        close(to[0]);
        close(from[1]);
        commands = to[1];
        EXPECT_EQ(read(from[0], &reached, sizeof reached), static_cast<ssize_t>(sizeof reached));
        close(from[0]);
    }
    ~PeerProcess()
    {
        close(commands); // which ends it, if it is there and goes on
        signal(SIGCONT);
        bool ended = false;
        for (const auto deadline = Clock::now() + soon; !ended && Clock::now() < deadline; usleep(1000))
            ended = waitpid(pid, nullptr, WNOHANG) == pid;
        EXPECT_TRUE(ended);
        if (!ended) signal(SIGKILL);
        if (!ended) waitpid(pid, nullptr, 0);
        // What shm leaves of a process that was killed.
        std::error_code error;
        for (const auto &left : std::filesystem::directory_iterator("/dev/shm", error))
            if (left.path().filename().string().starts_with(std::to_string(pid) + ":"))
                std::filesystem::remove(left, error);
    }
    PeerProcess(const PeerProcess &) = delete;
    PeerProcess &operator=(const PeerProcess &) = delete;

    const Contact &contact() const { return reached; }
    void signal(int number) const { kill(pid, number); }
    void close_domain() const
    {
        EXPECT_EQ(write(commands, "c", 1), 1);
        usleep(300000);
    }

private:
    pid_t pid = -1;
    int commands = -1;
    Contact reached;
};

TEST(PeerProcess, DISABLED_serves)
{
    const char *const provider = getenv(role);
    if (provider == nullptr) GTEST_SKIP() << "a part of other tests";
    auto side = std::make_unique<Side>(provider);
    for (uint64_t i = 0; i < 16; ++i)
        side->domain->post_receive(&side->memory[i * 4096], 4096, side->keys.local, i);
    const Contact contact = side->contact();
    ASSERT_EQ(write(3, &contact, sizeof contact), static_cast<ssize_t>(sizeof contact));
    const auto poll_commands = [] {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(0, &set);
        timeval now{};
        char command = 0;
        if (select(1, &set, nullptr, nullptr, &now) != 1) return '.';
        return read(0, &command, 1) == 1 ? command : 'q';
    };
    for (char command = '.'; command != 'q'; command = poll_commands()) {
        if (command == 'c') side.reset();
        if (side != nullptr) side->poll();
        usleep(50);
    }
}

class OfiProcessTest : public OfiTest
{
};

INSTANTIATE_TEST_SUITE_P(Providers, OfiProcessTest, ofi_providers, name_of_provider);

TEST_P(OfiProcessTest, other_process)
{
    const PeerProcess process(GetParam());
    Side a(GetParam());
    const Contact &b = process.contact();
    const uint32_t peer = a.find(b);
    for (size_t i = 0; i < memory_size; ++i)
        a.memory[i] = byte_at(i, 50);
    const size_t half = memory_size / 2;
    for (size_t i = 0; i < 64; ++i)
        ASSERT_TRUE(post(&a, peer, a.request(Operation::write, b, i * 10007, 65536 + i * 10007, 10007, i), {&a}));
    ASSERT_TRUE(wait_until({&a}, [&] { return a.retired.size() == 64; }));
    ASSERT_TRUE(post(&a, peer, a.request(Operation::read, b, half, 65536, size_t{64} * 10007, 64), {&a})); // back again
    ASSERT_TRUE(post(&a, peer, a.request(Operation::send, b, 0, 0, 100, 65), {&a}));
    ASSERT_TRUE(wait_until({&a}, [&] { return a.retired.size() == 66; }));
    for (const auto &[context, event] : a.retired)
        EXPECT_EQ(event.code, Code::ok) << context << ": " << event.why;
    EXPECT_EQ(memcmp(&a.memory[half], a.memory.data(), size_t{64} * 10007), 0);
}

enum class End : uint8_t { closed, killed, killed_meanwhile };

class PeerEnd : public OfiTest
{
protected:
    static void run(End end)
    {
        const PeerProcess b(GetParam()), c(GetParam());
        Side a(GetParam());
        const uint32_t to_b = a.find(b.contact()), to_c = a.find(c.contact());
        ASSERT_TRUE(post(&a, to_b, a.request(Operation::write, b.contact(), 0, 0, 8, 1), {&a}));
        ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 0, 8, 2), {&a}));
        ASSERT_TRUE(wait_until({&a}, [&] { return a.retired.size() == 2; }));
        if (end == End::closed) b.close_domain();
        if (end == End::killed) b.signal(SIGKILL);
        if (end == End::killed) usleep(300000);
        size_t posted = 0;
        for (uint64_t i = 0; i < 50; ++i) {
            const WorkRequest request = a.request(Operation::write, b.contact(), 0, 0, 50000, 100 + i);
            posted += a.domain->post(to_b, {&request, 1});
        }
        if (end == End::killed_meanwhile) b.signal(SIGKILL);
        EXPECT_GT(posted, 0u);
        expect_down(&a, to_b, {&a});
        EXPECT_EQ(a.retired.size(), 2 + posted); // all of them before it is down
        EXPECT_EQ(a.retired_twice, 0u);
        for (const auto &[context, event] : a.retired)
            EXPECT_TRUE(event.code == Code::peer_down || end == End::killed_meanwhile || context < 3) << context;

        ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 0, 8, 3), {&a}));
        ASSERT_TRUE(wait_until({&a}, [&] { return a.code_of(3) == Code::ok; })) << "the other one lives";
        // It is found again, but not there: it goes down once more.
        const uint32_t again = a.find(b.contact());
        const WorkRequest request = a.request(Operation::write, b.contact(), 0, 0, 8, 4);
        bool taken = false;
        ASSERT_TRUE(wait_until({&a}, [&] {
            taken = taken || a.domain->post(again, {&request, 1}) == 1;
            return a.down.size() == 2;
        }));
        EXPECT_NE(a.code_of(4), Code::ok);
    }
};

INSTANTIATE_TEST_SUITE_P(Providers, PeerEnd, ofi_providers, name_of_provider);

TEST_P(PeerEnd, closed) { run(End::closed); }
TEST_P(PeerEnd, killed) { run(End::killed); }
TEST_P(PeerEnd, killed_meanwhile) { run(End::killed_meanwhile); }

// A stopped process: nothing fails by itself, abort() ends it. The others live, and it can be found once it goes on.
TEST_P(OfiProcessTest, stopped_peer_is_given_up)
{
    const PeerProcess b(GetParam()), c(GetParam());
    Side a(GetParam());
    ASSERT_TRUE(a.domain->post_receive(a.memory.data(), 64, a.keys.local, 1));
    const uint32_t to_b = a.find(b.contact()), to_c = a.find(c.contact());
    ASSERT_TRUE(post(&a, to_b, a.request(Operation::write, b.contact(), 0, 0, 8, 1), {&a}));
    ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 0, 8, 2), {&a}));
    ASSERT_TRUE(wait_until({&a}, [&] { return a.retired.size() == 2; }));
    b.signal(SIGSTOP);
    usleep(100000);
    std::vector<WorkRequest> requests;
    for (uint64_t i = 0; i < 5000; ++i)
        requests.push_back(a.request(Operation::write, b.contact(), 0, 0, 5000, 100 + i));
    const size_t posted = a.domain->post(to_b, requests);
    EXPECT_GT(posted, 0u);
    EXPECT_LT(posted, 5000u);
    EXPECT_FALSE(wait_until(
        {&a}, [&] { return !a.down.empty(); }, std::chrono::milliseconds(300)));
    ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 0, 8, 3), {&a})) << "there is room";

    const auto start = Clock::now();
    a.domain->abort(to_b);
    ASSERT_TRUE(wait_until({&a}, [&] { return !a.down.empty() && a.retired.contains(3); }));
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
    EXPECT_EQ(a.retired.size(), 3 + posted);
    if (tells_of_failures()) {
        EXPECT_EQ(a.code_of(3), Code::ok);
    } else {
        EXPECT_EQ(a.code_of(3), Code::failed); // its completion was held up, and the endpoint reset
    }

    b.signal(SIGCONT);
    ASSERT_TRUE(post(&a, to_c, a.request(Operation::write, c.contact(), 0, 0, 8, 4), {&a}));
    ASSERT_TRUE(post(&a, a.find(b.contact()), a.request(Operation::write, b.contact(), 0, 0, 8, 5), {&a}));
    ASSERT_TRUE(wait_until({&a}, [&] { return a.code_of(4) == Code::ok && a.code_of(5) == Code::ok; }));
    EXPECT_EQ(a.retired_twice, 0u);
}

// A long message that nobody takes: tcp;ofi_rxm can only end it by a new endpoint. What others send here meanwhile
// arrives.
TEST_P(OfiProcessTest, reset_loses_nothing_that_comes_in)
{
    const PeerProcess b(GetParam());
    Side a(GetParam()), c(GetParam());
    ASSERT_TRUE(a.domain->post_receive(a.memory.data(), 64, a.keys.local, 7));
    const NetAddr address = a.domain->address();
    const uint32_t to_b = a.find(b.contact()), to_a = c.find(a.contact());
    for (uint64_t i = 0; i < 16; ++i) // as many as it has receives
        ASSERT_TRUE(post(&a, to_b, a.request(Operation::send, b.contact(), 0, 0, 4000, i), {&a, &c}));
    ASSERT_TRUE(wait_until({&a, &c}, [&] { return a.retired.size() == 16; }));
    ASSERT_TRUE(post(&a, to_b, a.request(Operation::send, b.contact(), 0, 0, 100000, 99), {&a, &c}));
    uint64_t written = 0;
    const auto write_one = [&] {
        WorkRequest request = c.request(Operation::write, a.contact(), 0, 4096, 3000, written);
        request.has_imm = true;
        written += c.domain->post(to_a, {&request, 1});
    };
    a.domain->abort(to_b);
    ASSERT_TRUE(wait_until({&a, &c},
                           [&] {
                               if (written < 2000) write_one();
                               return !a.down.empty() && written == 2000 && a.immediates.size() == 2000;
                           }))
        << written << " written, " << a.immediates.size() << " arrived, " << a.down.size() << " down";
    EXPECT_EQ(a.retired.size(), 17u);
    EXPECT_EQ(a.code_of(99), Code::peer_down);
    EXPECT_EQ(a.domain->address(), address);
    ASSERT_TRUE(post(&c, to_a, c.request(Operation::send, a.contact(), 0, 0, 10, 5000), {&a, &c}));
    ASSERT_TRUE(wait_until({&a, &c}, [&] { return a.received.size() == 1 && c.code_of(5000) == Code::ok; }));
    EXPECT_EQ(a.received.back().context, 7u);
}

} // namespace
