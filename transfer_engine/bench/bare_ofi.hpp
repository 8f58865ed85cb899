// bare_ofi.hpp: writes by libfabric with nothing between: what te_bench compares the engine with. One endpoint, one
// thread, a window of writes under way.
#pragma once

#include <cstdint>
#include <memory>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <string>
#include <vector>

namespace bare
{

struct Close {
    template <typename Thing> void operator()(Thing *thing) const { fi_close(&thing->fid); }
};
template <typename Thing> using Closed = std::unique_ptr<Thing, Close>;

// Where a peer's memory is.
struct Target {
    std::vector<uint8_t> address;
    uint64_t base = 0, key = 0;
};

class Ofi
{
public:
    // Opens an endpoint and registers this memory with it; throws std::runtime_error where it cannot.
    Ofi(const std::string &provider, void *start, uint64_t length);
    ~Ofi();
    Ofi(const Ofi &) = delete;
    Ofi &operator=(const Ofi &) = delete;

    Target target() const;
    void connect(const Target &to);
    // Writes `count` pieces of `length` bytes, `depth` under way, piece i from and to page_of(i) * length.
    template <typename PageOf> void write(uint64_t count, uint64_t length, uint64_t depth, PageOf page_of)
    {
        for (uint64_t posted = 0, completed = 0; completed < count;) {
            while (posted < count && posted - completed < depth && post(page_of(posted) * length, length))
                ++posted;
            completed += poll();
        }
    }
    // Moves the provider along; the writes that have completed.
    uint64_t poll();

private:
    bool post(uint64_t offset, uint64_t length); // false: full

    fi_info *info = nullptr;
    Closed<fid_fabric> fabric;
    Closed<fid_domain> domain;
    Closed<fid_av> peers;
    Closed<fid_cq> completions;
    Closed<fid_mr> memory;
    Closed<fid_ep> endpoint;
    uint8_t *start;
    fi_addr_t peer = FI_ADDR_UNSPEC;
    Target there;
    std::vector<fi_context2> contexts; // in turn: more than can be under way
    size_t next_context = 0;
};

} // namespace bare
