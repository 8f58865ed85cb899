// What is asked of a CUDA driver: memory of a GPU registered, words that a GPU reaches. There is none here: the driver
// is counterfeit_cuda.cpp, which this program is linked with, so that libcuda.so.1 is that wherever it is looked for;
// the adapters are counterfeited here. It shows what is called and that all is given back, not that a GPU's memory
// moves.
#include "cuda.hpp"
#include "verbs_adapter.hpp"
#include "watcher.hpp"
#if __has_include(<rdma/fabric.h>)
#include "ofi_adapter.hpp"
#endif

#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

namespace counterfeit
{

extern int devices, attribute, memory_type, managed, owner;
extern std::string failing;
extern uintptr_t memory;
extern size_t memory_size;
extern std::vector<std::string> calls;
extern std::array<int, 2> retained;
extern std::vector<void *> current, pinned;
extern std::vector<int> descriptors;

} // namespace counterfeit

// The two ways to register with libibverbs.
static struct {
    int dmabuf_error = 0, error = 0; // 0: it succeeds
    unsigned refused_access = 0;
    int open_descriptors = 0; // at the call
    ibv_mr region{};
} adapter_does;

static ibv_mr *registered(int error, unsigned access)
{
    const bool refused = (access & adapter_does.refused_access) != 0;
    errno = refused ? EINVAL : error;
    return errno == 0 ? &adapter_does.region : nullptr;
}

extern "C" ibv_mr *ibv_reg_dmabuf_mr(ibv_pd *, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    using std::to_string;
    counterfeit::calls.push_back("ibv_reg_dmabuf_mr(" + to_string(offset) + ", " + to_string(length) + ", " +
                                 to_string(iova - counterfeit::memory) + ", " + to_string(access) + ")");
    if (fcntl(fd, F_GETFD) >= 0) ++adapter_does.open_descriptors;
    return registered(adapter_does.dmabuf_error, static_cast<unsigned>(access));
}

extern "C" ibv_mr *ibv_reg_mr_iova2(ibv_pd *, void *start, size_t length, uint64_t, unsigned access)
{
    counterfeit::calls.push_back("ibv_reg_mr(" +
                                 std::to_string(reinterpret_cast<uintptr_t>(start) - counterfeit::memory) + ", " +
                                 std::to_string(length) + ")");
    return registered(adapter_does.error, access);
}

extern "C" int ibv_dereg_mr(ibv_mr *)
{
    counterfeit::calls.emplace_back("ibv_dereg_mr()");
    return 0;
}

namespace transfer_engine
{

using Calls = std::vector<std::string>;

static const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
static const char *const no_such_driver = "libno_such_driver.so.1";

static bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

class CudaTest : public testing::Test
{
protected:
    CudaTest()
    {
        counterfeit::devices = 2;
        counterfeit::attribute = 1;
        counterfeit::memory_type = 2;
        counterfeit::managed = counterfeit::owner = 0;
        counterfeit::failing.clear();
        counterfeit::memory = 0x7f0000000000; // nobody reads or writes there
        counterfeit::memory_size = 16 * page;
        counterfeit::descriptors.clear();
        adapter_does = {};
        EXPECT_TRUE(CudaDriver::of_this_process().status().ok()) << CudaDriver::of_this_process().status().message;
        counterfeit::calls.clear();
    }
    // Whatever was done: the contexts, the memory and the descriptors are given back.
    ~CudaTest() override
    {
        EXPECT_EQ(counterfeit::retained, (std::array<int, 2>{}));
        EXPECT_TRUE(counterfeit::current.empty());
        EXPECT_TRUE(counterfeit::pinned.empty());
        for (const int descriptor : counterfeit::descriptors)
            EXPECT_EQ(fcntl(descriptor, F_GETFD), -1);
    }

    static void *at(uint64_t offset) { return reinterpret_cast<void *>(counterfeit::memory + offset); }
    Status export_and_close(uint64_t start, uint64_t length, uint64_t *offset)
    {
        int descriptor = -1;
        Status status = driver.export_dmabuf(0, at(start), length, &descriptor, offset);
        EXPECT_EQ(status.ok(), fcntl(descriptor, F_GETFD) >= 0);
        if (status.ok()) close(descriptor);
        return status;
    }
    // What was called since the last time.
    static Calls called() { return std::exchange(counterfeit::calls, {}); }

    const CudaDriver &driver = CudaDriver::of_this_process();
};

// ---------------------------------------------------------------------------------- whether there is one

TEST_F(CudaTest, SaysWhyThereIsNoDriver)
{
    const CudaDriver none(no_such_driver);
    EXPECT_EQ(none.status().code, Code::unsupported);
    EXPECT_TRUE(none.status().message.starts_with("no CUDA driver: libno_such_driver.so.1: ")) << none.status().message;
    int descriptor = -1;
    uint64_t offset = 0;
    EXPECT_EQ(none.check_memory(0, at(0)).message, none.status().message);
    EXPECT_EQ(none.export_dmabuf(0, at(0), 1, &descriptor, &offset).code, Code::unsupported);
    EXPECT_EQ(none.make_word(0), nullptr);

    const CudaDriver other("libm.so.6");
    EXPECT_EQ(other.status().code, Code::unsupported);
    EXPECT_TRUE(contains(other.status().message, "cuInit")) << other.status().message;
}

TEST_F(CudaTest, SaysWhyADriverIsOfNoUse)
{
    counterfeit::failing = "cuInit";
    const CudaDriver broken("libcuda.so.1");
    EXPECT_EQ(broken.status().code, Code::unsupported);
    EXPECT_EQ(broken.status().message, "no CUDA driver: cuInit(): operation not supported");
    EXPECT_EQ(called(), Calls{"cuInit(0)"});
    EXPECT_EQ(broken.check_memory(0, at(0)).code, Code::unsupported);
    EXPECT_EQ(broken.make_word(0), nullptr);
    EXPECT_EQ(called(), Calls{}) << "called in spite of that";

    counterfeit::failing = "cuDeviceGetCount";
    EXPECT_EQ(CudaDriver("libcuda.so.1").status().message,
              "no CUDA driver: cuDeviceGetCount(): operation not supported");
    counterfeit::failing.clear();
    counterfeit::devices = 0;
    const CudaDriver idle("libcuda.so.1");
    EXPECT_EQ(idle.status().code, Code::unsupported);
    EXPECT_EQ(idle.status().message, "cuDeviceGetCount(): no GPU");
    EXPECT_EQ(idle.make_word(0), nullptr);
}

// ------------------------------------------------------------------------------------- memory of a GPU

TEST_F(CudaTest, ExportsWholePagesAndSaysWhereInThem)
{
    uint64_t offset = 0;
    ASSERT_TRUE(export_and_close(page + 100, page, &offset).ok());
    EXPECT_EQ(offset, 100U);
    EXPECT_EQ(
        called(),
        (Calls{"cuDeviceGet(0)", "cuDevicePrimaryCtxRetain(0)", "cuCtxPushCurrent()", "cuDeviceGetAttribute(124, 0)",
               "cuMemGetHandleForAddressRange(" + std::to_string(page) + ", " + std::to_string(2 * page) + ", 1, 0)",
               "cuCtxPopCurrent()", "cuDevicePrimaryCtxRelease(0)"}));

    struct Range {
        uint64_t start, length, first, bytes;
    };
    for (const Range &range : {Range{0, page, 0, page}, Range{0, 1, 0, page}, Range{page - 1, 1, 0, page},
                               Range{page - 1, 2, 0, 2 * page}, Range{3 * page, 2 * page + 1, 3 * page, 3 * page}}) {
        ASSERT_TRUE(export_and_close(range.start, range.length, &offset).ok());
        EXPECT_EQ(offset, range.start - range.first);
        EXPECT_EQ(called()[4], "cuMemGetHandleForAddressRange(" + std::to_string(range.first) + ", " +
                                   std::to_string(range.bytes) + ", 1, 0)");
    }
}

TEST_F(CudaTest, ExportThatFailsSaysWhereAndLeavesNoContext)
{
    uint64_t offset = 0;
    for (const std::string function : {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
                                       "cuDeviceGetAttribute", "cuMemGetHandleForAddressRange"}) {
        counterfeit::failing = function;
        const Status status = export_and_close(0, page, &offset);
        EXPECT_FALSE(status.ok());
        EXPECT_TRUE(status.message.starts_with(function)) << status.message;
        EXPECT_TRUE(status.message.ends_with("): operation not supported")) << status.message;
        EXPECT_EQ(counterfeit::retained[0], 0) << function;
        EXPECT_TRUE(counterfeit::current.empty()) << function;
    }
    counterfeit::failing.clear();
    counterfeit::attribute = 0;
    EXPECT_EQ(export_and_close(0, page, &offset).code, Code::unsupported);
}

TEST_F(CudaTest, MemoryHasToBeOfThatGpuAndToStayThere)
{
    EXPECT_TRUE(driver.check_memory(0, at(5)).ok());
    EXPECT_EQ(called(), (Calls{"cuDeviceGet(0)", "cuDevicePrimaryCtxRetain(0)", "cuCtxPushCurrent()",
                               "cuPointerGetAttribute(2)", "cuPointerGetAttribute(8)", "cuPointerGetAttribute(9)",
                               "cuCtxPopCurrent()", "cuDevicePrimaryCtxRelease(0)"}));
    const auto refused = [&](int device, const std::string &why) {
        const Status status = driver.check_memory(device, at(0));
        EXPECT_EQ(status.code, Code::invalid);
        EXPECT_TRUE(contains(status.message, why)) << status.message;
    };
    refused(1, "of GPU 0, not of GPU 1");
    refused(2, "cuDeviceGet(2): invalid device ordinal");
    counterfeit::managed = 1;
    refused(0, "managed");
    counterfeit::managed = 0;
    counterfeit::memory_type = 1;
    refused(0, "of the host");
    int own = 0;
    const Status status = driver.check_memory(0, &own);
    EXPECT_EQ(status.code, Code::invalid);
    EXPECT_EQ(status.message, "cuPointerGetAttribute(2): invalid argument");
}

// ---------------------------------------------------------------------------------------------- words

TEST_F(CudaTest, WordLiesInMemoryThatStaysPinnedWithItsContext)
{
    auto word = driver.make_word(1);
    ASSERT_NE(word, nullptr);
    EXPECT_EQ(*word, 0U);
    EXPECT_EQ(counterfeit::pinned, std::vector<void *>{word.get()});
    EXPECT_EQ(counterfeit::retained[1], 1);
    EXPECT_TRUE(counterfeit::current.empty());
    EXPECT_EQ(called(), (Calls{"cuDeviceGet(1)", "cuDevicePrimaryCtxRetain(1)", "cuCtxPushCurrent()",
                               "cuDeviceGetAttribute(41, 1)", "cuDevicePrimaryCtxRetain(1)", "cuMemHostAlloc(64, 3)",
                               "cuCtxPopCurrent()", "cuDevicePrimaryCtxRelease(1)"}));
    word.reset();
    EXPECT_EQ(called(), (Calls{"cuDeviceGet(1)", "cuDevicePrimaryCtxRetain(1)", "cuCtxPushCurrent()", "cuMemFreeHost()",
                               "cuDevicePrimaryCtxRelease(1)", "cuCtxPopCurrent()", "cuDevicePrimaryCtxRelease(1)"}));
}

TEST_F(CudaTest, WordThatCannotBeLeavesNothing)
{
    for (const char *function :
         {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuDeviceGetAttribute", "cuMemHostAlloc"}) {
        counterfeit::failing = function;
        EXPECT_EQ(driver.make_word(0), nullptr) << function;
        EXPECT_EQ(counterfeit::retained[0], 0) << function;
    }
    counterfeit::failing.clear();
    counterfeit::attribute = 0; // no unified addressing
    EXPECT_EQ(driver.make_word(0), nullptr);
}

TEST_F(CudaTest, WatcherGivesOutSuchWordsAndUsesThemAgain)
{
    Options options;
    options.spin = false;
    options.groups.resize(2);
    options.groups[1].device = 1;
    CallbackThread callbacks(16);
    Watcher watcher(&callbacks, options);
    std::atomic<uint64_t> last{0};
    uint64_t *word = watcher.alloc([&](uint64_t, uint64_t now) { last = now; });
    ASSERT_NE(word, nullptr);
    EXPECT_EQ(counterfeit::pinned, std::vector<void *>{word});
    EXPECT_EQ(counterfeit::retained[1], 1);
    std::atomic_ref(*word).store(7);
    while (last != 7)
        std::this_thread::yield();
    watcher.free(word);
    EXPECT_EQ(watcher.alloc([](uint64_t, uint64_t) {}), word);
    EXPECT_EQ(*word, 0U);
    counterfeit::failing = "cuMemHostAlloc";
    EXPECT_EQ(watcher.alloc([](uint64_t, uint64_t) {}), nullptr) << "a word that its GPU does not reach";
    counterfeit::failing.clear();
}

TEST_F(CudaTest, WatcherOfTheHostDoesWithoutAGpu)
{
    CallbackThread callbacks(16);
    Watcher watcher(&callbacks, {});
    const uint64_t *word = watcher.alloc([](uint64_t, uint64_t) {});
    EXPECT_EQ(counterfeit::pinned, std::vector<void *>{const_cast<uint64_t *>(word)}) << "a GPU may be the producer";
    counterfeit::failing = "cuDevicePrimaryCtxRetain"; // another process has it for itself
    word = watcher.alloc([](uint64_t, uint64_t) {});
    ASSERT_NE(word, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(word) % 64, 0U);
    EXPECT_EQ(counterfeit::pinned.size(), 1U);
    counterfeit::failing.clear();
}

// ------------------------------------------------------------------------------------------- adapters

class VerbsMemory : public CudaTest
{
protected:
    // What is called of libibverbs for two pages' worth of memory, from byte 100 on.
    Calls register_it(int device = 0)
    {
        MemoryRegion region;
        status = VerbsAdapter().register_memory(at(100), 2 * page, device, &region);
        EXPECT_EQ(status.ok(), region != nullptr);
        region.reset();
        Calls of_verbs;
        for (const std::string &call : called())
            if (call.starts_with("ibv_")) of_verbs.push_back(call);
        return of_verbs;
    }

    Status status;
    const std::string bytes = std::to_string(2 * page);
    const std::string as_dmabuf = "ibv_reg_dmabuf_mr(100, " + bytes + ", 100, ";
    const std::string relaxed = std::to_string(7 | IBV_ACCESS_RELAXED_ORDERING) + ")", plain = "7)";
    const std::string by_address = "ibv_reg_mr(100, " + bytes + ")", given_back = "ibv_dereg_mr()";
};

TEST_F(VerbsMemory, IsRegisteredAsADmabuf)
{
    EXPECT_EQ(register_it(), (Calls{as_dmabuf + relaxed, given_back}));
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(adapter_does.open_descriptors, 1);
    EXPECT_EQ(counterfeit::descriptors.size(), 1U);
    adapter_does.refused_access = IBV_ACCESS_RELAXED_ORDERING;
    EXPECT_EQ(register_it(), (Calls{as_dmabuf + relaxed, as_dmabuf + plain, given_back}));
    EXPECT_TRUE(status.ok()) << status.message;
}

TEST_F(VerbsMemory, IsRegisteredByItsAddressWhereThereIsNoDmabuf)
{
    counterfeit::attribute = 0;
    EXPECT_EQ(register_it(), (Calls{by_address, given_back}));
    EXPECT_TRUE(status.ok()) << status.message;
    counterfeit::attribute = 1;
    adapter_does.dmabuf_error = EOPNOTSUPP;
    EXPECT_EQ(register_it(), (Calls{as_dmabuf + relaxed, as_dmabuf + plain, by_address, given_back}));
    EXPECT_TRUE(status.ok()) << status.message;
}

TEST_F(VerbsMemory, IsRefusedWithBothReasons)
{
    const std::string by_peermem = "; nor by nvidia-peermem: ibv_reg_mr(" + bytes + " bytes): Bad address";
    adapter_does.dmabuf_error = EOPNOTSUPP;
    adapter_does.error = EFAULT;
    register_it();
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_EQ(status.message, "ibv_reg_dmabuf_mr(" + bytes + " bytes): Operation not supported" + by_peermem);
    counterfeit::failing = "cuMemGetHandleForAddressRange";
    register_it();
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_EQ(status.message, "cuMemGetHandleForAddressRange(" + std::to_string(3 * page) +
                                  " bytes): operation not supported" + by_peermem);
}

TEST_F(VerbsMemory, IsNotTakenForTheHosts)
{
    counterfeit::owner = 1;
    EXPECT_EQ(register_it(), Calls{});
    EXPECT_EQ(status.code, Code::invalid);
    EXPECT_EQ(register_it(host), (Calls{by_address, given_back})) << "and the host's as ever";
    adapter_does.error = ENOMEM;
    EXPECT_EQ(register_it(host), Calls{by_address});
    EXPECT_EQ(status.message, "ibv_reg_mr(" + bytes + " bytes), 'ulimit -l' limits it: Cannot allocate memory");
}

#if __has_include(<rdma/fabric.h>)

// The provider's registering, in the place of its own.
static fi_mr_attr wanted_of_provider;
static int register_with_provider(fid *, const fi_mr_attr *wanted, uint64_t, fid_mr **)
{
    wanted_of_provider = *wanted;
    counterfeit::calls.push_back("fi_mr_regattr(" + std::to_string(wanted->iface) + ", " +
                                 std::to_string(wanted->device.cuda) + ")");
    return -FI_ENOSYS;
}

TEST_F(CudaTest, ProviderIsTakenAsItWasWhereItHasNoMemoryOfGpus)
{
    OfiAdapter adapter;
    Status status = adapter.open("tcp;ofi_rxm", "");
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_STREQ(adapter.info->fabric_attr->prov_name, "tcp;ofi_rxm");
    EXPECT_NE(adapter.delivery_complete, 0U);
    adapter.info->caps &= ~FI_HMEM; // 1.17 has none
    MemoryKeys keys;
    status = adapter.register_memory(at(0), 100, 0, &keys);
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_EQ(status.message, "fi_mr_regattr(100 bytes, CUDA): tcp;ofi_rxm has no FI_HMEM for memory of GPUs");
    std::vector<char> own(100);
    ASSERT_TRUE(adapter.register_memory(own.data(), own.size(), host, &keys).ok());
    adapter.deregister_memory(keys);
}

TEST_F(CudaTest, ProviderThatHasItIsToldTheGpu)
{
    OfiAdapter adapter;
    Status status = adapter.open("shm", "");
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_NE(adapter.info->caps & FI_HMEM, 0U);
    EXPECT_NE(adapter.delivery_complete, 0U);
    fi_ops_mr registers = *adapter.domain->mr, *const its_own = adapter.domain->mr;
    registers.regattr = register_with_provider;
    adapter.domain->mr = &registers;
    counterfeit::owner = 1;
    MemoryKeys keys;
    EXPECT_EQ(adapter.register_memory(at(0), 100, 0, &keys).code, Code::invalid);
    called();
    status = adapter.register_memory(at(0), 100, 1, &keys);
    EXPECT_EQ(status.message, "fi_mr_regattr(100 bytes, CUDA): Function not implemented");
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_EQ(called().back(), "fi_mr_regattr(1, 1)");
    adapter.register_memory(at(0), 100, host, &keys);
    EXPECT_EQ(called(), Calls{"fi_mr_regattr(0, 0)"});
    adapter.domain->mr = its_own;
    std::vector<char> own(100);
    ASSERT_TRUE(adapter.register_memory(own.data(), own.size(), host, &keys).ok());
    adapter.deregister_memory(keys);
}

#endif

} // namespace transfer_engine
