// Where a worker runs (T9). hwloc is shown machines that are written down here, instead of the one that it runs on.
#include "../domain.hpp"
#include "../topology.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sstream>
#include <unistd.h>

namespace transfer_engine
{
namespace
{

using Cores = std::vector<int>;

// An object in the form of hwloc's XML, of these cores and NUMA nodes (bits).
std::string object(const std::string &type, int number, int cores, int nodes, const std::string &content = "")
{
    static int objects = 0;
    std::ostringstream text;
    text << "<object type=\"" << type << "\" os_index=\"" << number << "\" gp_index=\"" << ++objects << std::hex
         << "\" cpuset=\"0x" << cores << "\" complete_cpuset=\"0x" << cores << "\" nodeset=\"0x" << nodes
         << "\" complete_nodeset=\"0x" << nodes << "\">\n"
         << content << "</object>\n";
    return text.str();
}

// Two processors: the first has core 0; the second has the cores 1 and 2, and a PCI device. Each is a NUMA node, or
// both are one.
std::string machine_of(int nodes)
{
    const bool two = nodes == 2;
    const int second = two ? 0b10 : 0b01; // the node of the second one
    const std::string device = "<object type=\"PCIDev\" gp_index=\"1000\" pci_busid=\"0000:3b:00.0\" "
                               "pci_type=\"0200 [15b3:101d] [15b3:0001] 00\" pci_link_speed=\"0\"/>\n";
    return "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n"
           "<topology version=\"2.0\">\n" +
           object("Machine", 0, 0b111, 0b01 | second,
                  (two ? "" : object("NUMANode", 0, 0b111, 0b01)) +
                      object("Package", 0, 0b001, 0b01,
                             (two ? object("NUMANode", 0, 0b001, 0b01) : "") + object("PU", 0, 0b001, 0b01)) +
                      object("Package", 1, 0b110, second,
                             (two ? object("NUMANode", 1, 0b110, 0b10) : "") + object("PU", 1, 0b010, second) +
                                 object("PU", 2, 0b100, second) + device)) +
           "</topology>\n";
}

class Topology : public testing::Test
{
protected:
    // `is_this`: it is taken for the machine that the test runs on; else this thread may run on all of its cores.
    void show(const std::string &machine, bool is_this = false)
    {
        std::ofstream(file) << machine;
        setenv("HWLOC_XMLFILE", file.c_str(), 1);
        setenv("HWLOC_THISSYSTEM", is_this ? "1" : "0", 1);
    }
    void TearDown() override
    {
        unsetenv("HWLOC_XMLFILE");
        unsetenv("HWLOC_THISSYSTEM");
        std::filesystem::remove(file);
    }

    const std::string file = testing::TempDir() + "topology_test." + std::to_string(getpid()) + ".xml";
};

Cores numbers(const cpu_set_t &set)
{
    Cores cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &set)) cores.push_back(core);
    return cores;
}

Cores near(const std::string &pci_address)
{
    const auto set = cores_near(pci_address);
    return set.has_value() ? numbers(*set) : Cores();
}

// Those that this thread is bound to.
Cores bound()
{
    cpu_set_t set;
    EXPECT_EQ(pthread_getaffinity_np(pthread_self(), sizeof set, &set), 0);
    return numbers(set);
}

TEST_F(Topology, ADeviceIsNearAllCoresOfItsNode)
{
    show(machine_of(2));
    EXPECT_EQ(near("0000:3b:00.0"), Cores({1, 2}));
}

TEST_F(Topology, AMachineOfOneNodeHasNothingToBindTo)
{
    show(machine_of(1));
    EXPECT_EQ(near("0000:3b:00.0"), Cores());
}

TEST_F(Topology, OtherAddressesAreNearNothing)
{
    show(machine_of(2));
    for (const char *address :
         {"", "0000:3b:00.1", "0001:3b:00.0", "virtio3", "0000:3b", ":::", "%s%n", "mlx5_core.sf.2"})
        EXPECT_EQ(near(address), Cores()) << address;
}

TEST_F(Topology, AMachineThatCannotBeReadHasNothingToBindTo)
{
    show("<topology");
    EXPECT_EQ(near("0000:3b:00.0"), Cores());
}

// An adapter that says where it is, and can do nothing.
class PlacedDomain final : public Domain
{
public:
    PlacedDomain(std::string where, int *counter) : place(std::move(where)), open(counter) { ++*open; }
    ~PlacedDomain() override { --*open; }
    NetAddr address() const override { return {}; }
    uint64_t longest_request() const override { return 1; }
    std::string pci_address() const override { return place; }
    Status register_memory(void *, uint64_t, int, MemoryKeys *) override { return {}; }
    void deregister_memory(const MemoryKeys &) override {}
    Status find_peer(const NetAddr &, uint32_t *) override { return {.code = Code::unsupported, .message = {}}; }
    size_t post(uint32_t, std::span<const WorkRequest>) override { return 0; }
    bool post_receive(void *, uint64_t, uint64_t, uint64_t) override { return false; }
    size_t poll(std::span<Event>) override { return 0; }
    void abort(uint32_t) override {}

private:
    const std::string place;
    int *const open;
};

// An engine of two adapters at that place, on cores 0 and 1 of this machine.
class Binding : public Topology
{
protected:
    void SetUp() override
    {
        cpu_set_t two;
        CPU_ZERO(&two);
        CPU_SET(0, &two);
        CPU_SET(1, &two);
        pthread_getaffinity_np(pthread_self(), sizeof before, &before);
        pthread_setaffinity_np(pthread_self(), sizeof two, &two);
        if (bound() != Cores({0, 1})) GTEST_SKIP() << "this machine has no cores 0 and 1 for it";
        show(machine_of(2), true);
    }
    void TearDown() override
    {
        pthread_setaffinity_np(pthread_self(), sizeof before, &before);
        Topology::TearDown();
    }
    Status open_engine(const std::string &place, int core)
    {
        Options options;
        options.spin = false;
        const OpenDomain nic = [this, place](Status *status) -> std::unique_ptr<Domain> {
            openings.push_back(bound());
            if (openings.size() == fails_at) *status = {.code = Code::failed, .message = "refused for the test"};
            if (!status->ok()) return nullptr;
            return std::make_unique<PlacedDomain>(place, &open);
        };
        options.groups.push_back({.nics = {nic, nic}, .core = core});
        Status status;
        const auto engine = TransferEngine::open(std::move(options), &status);
        EXPECT_EQ(open, engine != nullptr ? 2 : 0);
        return status;
    }

    cpu_set_t before{};
    std::vector<Cores> openings; // where the thread was bound, each time
    size_t fails_at = 0;         // the first is 1
    int open = 0;
};

TEST_F(Binding, TheFirstAdapterIsOpenedAgainNearItself)
{
    EXPECT_TRUE(open_engine("0000:3b:00.0", -1).ok());
    EXPECT_EQ(openings, std::vector<Cores>({{0, 1}, {1}, {1}}));
}

TEST_F(Binding, NothingIsBoundWithoutAPciDevice)
{
    EXPECT_TRUE(open_engine("", -1).ok());
    EXPECT_EQ(openings, std::vector<Cores>({{0, 1}, {0, 1}}));
}

TEST_F(Binding, ACoreThatIsGivenStands)
{
    EXPECT_TRUE(open_engine("0000:3b:00.0", 0).ok());
    EXPECT_EQ(openings, std::vector<Cores>({{0}, {0}}));
}

TEST_F(Binding, AnAdapterThatDoesNotOpenAgainIsAnError)
{
    fails_at = 2;
    EXPECT_EQ(open_engine("0000:3b:00.0", -1).message, "refused for the test");
    EXPECT_EQ(openings.size(), 2U);
}

TEST_F(Binding, AThreadThatMayNotRunThereStaysWhereItIs)
{
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    ASSERT_EQ(pthread_setaffinity_np(pthread_self(), sizeof first, &first), 0);
    EXPECT_TRUE(open_engine("0000:3b:00.0", -1).ok());
    EXPECT_EQ(openings, std::vector<Cores>({{0}, {0}}));
}

TEST(Place, TcpIsNoPciDevice)
{
    Status status;
    const auto nic = ofi_nic("tcp;ofi_rxm")(&status);
    if (nic == nullptr) GTEST_SKIP() << status.message;
    EXPECT_EQ(nic->pci_address(), "");
}

} // namespace
} // namespace transfer_engine
