// engine_fixture.hpp: engines over adapters inside this process, for engine_test.cpp and engine_threads_test.cpp.
#pragma once

#include "test_domain.hpp"

#include <condition_variable>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>

namespace transfer_engine::testing
{

using namespace std::chrono_literals;

// Waits for something that another thread does, 10 s at most: they are slow with sanitizers on a busy machine.
template <typename Condition> bool soon(Condition condition)
{
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (!condition())
        if (std::chrono::steady_clock::now() > deadline)
            return false;
        else
            std::this_thread::sleep_for(100us);
    return true;
}

// What a callback was given. It may be called when the test is over already: what it writes to lives on.
class Outcome
{
public:
    Callback callback() const
    {
        return [to = told](const Status &status) {
            const std::lock_guard lock(to->mutex);
            to->all.push_back(status);
        };
    }
    size_t count() const
    {
        const std::lock_guard lock(told->mutex);
        return told->all.size();
    }
    // Of the call of this index; waits for it.
    Status status(size_t index = 0) const
    {
        EXPECT_TRUE(soon([&] { return count() > index; })) << "never told";
        const std::lock_guard lock(told->mutex);
        return index < told->all.size() ? told->all[index] : Status{.code = Code::failed, .message = "never told"};
    }
    Code code(size_t index = 0) const { return status(index).code; }

private:
    struct Told {
        std::mutex mutex;
        std::vector<Status> all;
    };
    std::shared_ptr<Told> told = std::make_shared<Told>();
};

// An engine and registered memory of it.
struct Side {
    explicit Side(Wire *wire, size_t nics = 2, Options options = {}, size_t bytes = 1 << 20,
                  TestDomainOptions domain = {})
        : memory(bytes)
    {
        domains.resize(nics);
        options.groups.resize(1);
        options.spin = false;
        for (size_t nic = 0; nic < nics; ++nic)
            options.groups[0].nics.push_back(test_nic(wire, domain, &domains[nic]));
        Status status;
        engine = TransferEngine::open(std::move(options), &status);
        EXPECT_TRUE(status.ok()) << status.message;
        status = engine->reg_mr(memory.data(), memory.size(), host, &handle, &region);
        EXPECT_TRUE(status.ok()) << status.message;
    }

    std::vector<TestDomain *> domains;
    std::vector<uint8_t> memory;
    std::unique_ptr<TransferEngine> engine;
    MrHandle handle;
    MrDesc region;
};

class Engine : public ::testing::Test
{
protected:
    void fill(Side *side) { std::iota(side->memory.begin(), side->memory.end(), uint8_t{1}); }
    void TearDown() override { EXPECT_EQ(wire.violations, std::vector<std::string>()); }

    Wire wire{1};
};

// Options that differ from the defaults in this.
template <typename Change> Options options_with(Change change)
{
    Options options;
    change(options);
    return options;
}

inline Pages pages(std::vector<uint32_t> indices, uint64_t stride, uint64_t offset = 0)
{
    return {.indices = std::move(indices), .stride = stride, .offset = offset};
}

} // namespace transfer_engine::testing
