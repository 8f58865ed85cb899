// transfer_engine.hpp: point-to-point transfers by RDMA between the processes of an LLM service. This is the
// whole of what a user includes; docs/TRANSFER_ENGINE.md explains the model, with an example.
//
// A process has one TransferEngine. It drives, for each GPU, a group of one to four adapters (NICs), and
// cuts each transfer over them. The peer takes no part in a transfer: it says where its memory is (MrDesc)
// and is told by immediates what has arrived. Nothing is assumed of the order in which anything arrives (T2).
//
// Rules for all of it:
//   - Every function may be called by any thread at any time, callbacks included, but for what says otherwise.
//   - A function that submits returns at once. Is what it returns not ok, then nothing was submitted and its
//     OnDone is never called. Else the operation ends exactly once, and OnDone tells how.
//   - An operation ends only when no adapter uses its memory any more, whatever way it ends.
//   - Callbacks run one at a time, on a thread of the engine's. One that blocks delays other callbacks, and no
//     transfer. One that throws is counted (Metrics) and otherwise ignored.
//   - Sizes and offsets are in bytes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace transfer_engine
{

enum class Code : uint8_t {
    ok,
    invalid,     // the arguments; nothing was done
    full,        // too many operations under way: submit again when one has ended
    unsupported, // not with this adapter or build
    timed_out,   // its deadline came
    cancelled,   // by stop()
    peer_down,   // the peer does not answer, has ended or was started anew
    failed,      // anything else that an adapter or the system reports
    stopped,     // the engine has been told to stop
};

const char *name_of(Code code);

struct Status {
    Code code = Code::ok;
    bool remote_may_have_changed = false; // when not ok: a part of the peer's memory may have been written
    std::string message;                  // for a person; empty when ok

    bool ok() const { return code == Code::ok; }
};

constexpr size_t most_nics = 4;           // of a group (T10)
constexpr size_t most_address_bytes = 95; // of a NetAddr

// Where an adapter of a peer is reached (T3). Its bytes are the transport's own; they are compared, and nothing else.
struct NetAddr {
    uint8_t length = 0;
    std::array<uint8_t, most_address_bytes> bytes{}; // zero beyond length

    bool operator==(const NetAddr &) const = default;
};

// How one adapter reaches a region of a peer.
struct RemoteKey {
    NetAddr address;
    uint64_t base = 0; // what the first byte of the region is called: its address, or 0 where offsets count
    uint64_t key = 0;

    bool operator==(const RemoteKey &) const = default;
};

// A registered region as a peer needs it (T3). Send it there by what way you like, as serialize() makes it.
struct MrDesc {
    uint64_t ptr = 0; // in its owner's process
    uint64_t length = 0;
    uint32_t nics = 0;
    std::array<RemoteKey, most_nics> rkeys{}; // for each adapter of its owner's group

    bool operator==(const MrDesc &) const = default;
};

// Versioned bytes, the same on every machine; wire.hpp has the format.
std::vector<uint8_t> serialize(const NetAddr &address);
std::vector<uint8_t> serialize(const MrDesc &region);
// Invalid, and *value untouched, when the bytes are not exactly one of these, of this version.
Status parse(std::span<const uint8_t> bytes, NetAddr *value);
Status parse(std::span<const uint8_t> bytes, MrDesc *value);

class Region; // what the engine knows of registered memory

// A registered region of this process: source of writes, destination of reads. Void after dereg_mr().
struct MrHandle {
    Region *region = nullptr;
    uint64_t generation = 0; // tells a void handle from a later one
};

// Page i begins at offset + indices[i] * stride in its region (T5).
struct Pages {
    std::vector<uint32_t> indices;
    uint64_t stride = 0;
    uint64_t offset = 0;
};

// One peer's slice of a scatter: length bytes at offset `src` of the source, to `dst_offset` of the region `dst` (T6).
struct ScatterDst {
    uint64_t length = 0;
    uint64_t src = 0;
    MrDesc dst;
    uint64_t dst_offset = 0;
};

struct PeerGroupHandle {
    uint64_t number = 0; // 0: none
};

using Callback = std::function<void(const Status &)>;
using MessageCallback = std::function<void(std::span<const uint8_t>)>;
using WatcherCallback = std::function<void(uint64_t before, uint64_t now)>;
using PeerDownCallback = std::function<void(const NetAddr &, const Status &)>;

// Set when an operation has ended: `status` may be read once done is true (acquire). It has to live until then.
// done.wait(false) sleeps until it is.
struct Flag {
    std::atomic<bool> done{false};
    Status status;
};

// Whom to tell that an operation has ended: a callback, a Flag, or nobody (T5).
using OnDone = std::variant<std::monostate, Callback, Flag *>;

constexpr auto default_timeout = std::chrono::nanoseconds::zero(); // Options::timeout
constexpr auto no_timeout = std::chrono::nanoseconds::max();

class Domain; // one adapter; domain.hpp
// Opens an adapter: called on the worker's thread; once more for the first of a group, when that has bound the thread
// (T9). Null, and *status set, when it cannot.
using OpenDomain = std::function<std::unique_ptr<Domain>(Status *status)>;

// An adapter by libfabric (T12): provider such as "efa", "tcp;ofi_rxm", "shm"; `domain` as fi_info names it, "" for
// the first that fits.
OpenDomain ofi_nic(std::string provider, std::string domain = "");
// An adapter by libibverbs, RC (T13): a device such as "mlx5_0", "rxe0". gid_index -1: the first RoCE v2 one.
OpenDomain verbs_nic(std::string device, int gid_index = -1);

// One of these from a text of a user's: "verbs:DEVICE", "ofi:PROVIDER" or "ofi:PROVIDER,DOMAIN". Invalid, with a
// message for the user, when it is none.
Status nic_from_text(const std::string &text, OpenDomain *nic);

constexpr int host = -1; // a `device`: memory of the host; else the number of a GPU

// The adapters that serve a GPU, or the host, by one worker thread (T9).
struct GroupOptions {
    int device = host;
    std::vector<OpenDomain> nics; // one to most_nics; as many as every peer has (T10)
    // Where the worker runs. -1: on the cores of the first adapter's NUMA node, as far as the thread that opens the
    // engine may run there; not bound when that adapter is no PCI device (SoftRoCE, tcp, shm) or there is one node.
    int core = -1;
};

struct Options {
    std::vector<GroupOptions> groups;                               // the first serves the host, too
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);    // of operations that name none
    std::chrono::nanoseconds abort_after = std::chrono::seconds(2); // see submit_single_write
    size_t most_operations = 1024;                                  // under way, for each group
    size_t most_sends = 64;                                         // messages under way
    uint64_t longest_message = 64 << 10;                            // of submit_send
    size_t most_callbacks = 4096;                                   // waiting for the callback thread
    bool spin = true; // threads with nothing to do look again at once, and nap some 20 us otherwise
};

// Counted since the engine was opened.
struct Metrics {
    uint64_t submitted, succeeded, failed, timed_out, cancelled; // operations
    uint64_t work_requests, work_requests_failed;
    uint64_t bytes_read, bytes_written; // by this side, of operations that succeeded
    uint64_t immediates, messages;      // received
    uint64_t pushed_back;               // submits that returned `full`
    uint64_t callbacks, callbacks_thrown;
    uint64_t peers_down;
};

class TransferEngine
{
public:
    // Opens the adapters and starts the threads. Null, and *status set, when it cannot.
    static std::unique_ptr<TransferEngine> open(Options options, Status *status);
    // As stop(false).
    ~TransferEngine();
    TransferEngine(const TransferEngine &) = delete;
    TransferEngine &operator=(const TransferEngine &) = delete;

    // The address that stands for this process: of the first group's first adapter (T3).
    NetAddr main_address() const;

    // Registers memory with every adapter of the device's group, for local use and for peers to read and
    // write (T3). It takes time (pages are pinned), on the caller's thread. Each call registers anew, whatever
    // was registered before. `region` may be null. `device`: host, or a GPU that a group is for, by the number that
    // CUDA gives it. Memory of a GPU that is managed, or of another one, is invalid; unsupported, with the reason,
    // where there is no CUDA driver or an adapter cannot reach the GPU.
    Status reg_mr(void *start, uint64_t length, int device, MrHandle *handle, MrDesc *region);
    // Invalid while operations use it: they still read or write it. Peers that use it fail from then on.
    Status dereg_mr(MrHandle handle);

    // Sends a message, of up to Options::longest_message, to the main address of a peer (T4). It is copied before
    // this returns. A peer without a buffer for it keeps it waiting.
    Status submit_send(const NetAddr &to, std::span<const uint8_t> message, OnDone done = {},
                       std::chrono::nanoseconds timeout = default_timeout);
    // Adds `count` buffers for messages of up to `length` bytes (T4); called once. `arrived` is called for each
    // message; its bytes are valid until it returns, then the buffer takes the next.
    Status submit_recvs(uint64_t length, size_t count, MessageCallback arrived);

    // Writes `length` bytes from offset `src` of a region here to offset `dst_offset` of a peer's (T5), cut over all
    // adapters of the group. An immediate arrives once for each of them: imm_count() of sharding.hpp.
    // A timeout that passes stops what was not posted yet. What was posted ends by itself; where it has not
    // after Options::abort_after more, the connection to that peer is given up, and with it all that uses it.
    Status submit_single_write(uint64_t length, std::optional<uint32_t> imm, MrHandle source, uint64_t src,
                               const MrDesc &dst, uint64_t dst_offset, OnDone done = {},
                               std::chrono::nanoseconds timeout = default_timeout);
    // Writes page i of `src` to page i of `dst` (T5). Both have as many indices. An immediate arrives once for each
    // page.
    Status submit_paged_writes(uint64_t page_length, std::optional<uint32_t> imm, MrHandle source, Pages src,
                               const MrDesc &dst, Pages dst_pages, OnDone done = {},
                               std::chrono::nanoseconds timeout = default_timeout);
    // The same in the other direction: into a region here from a peer's. The peer is not told.
    Status submit_single_read(uint64_t length, MrHandle destination, uint64_t dst, const MrDesc &src,
                              uint64_t src_offset, OnDone done = {},
                              std::chrono::nanoseconds timeout = default_timeout);
    Status submit_paged_reads(uint64_t page_length, MrHandle destination, Pages dst, const MrDesc &src, Pages src_pages,
                              OnDone done = {}, std::chrono::nanoseconds timeout = default_timeout);

    // Makes the peers known, by their main addresses, and begins to connect to them (T6).
    Status add_peer_group(std::span<const NetAddr> peers, PeerGroupHandle *group);
    // Writes to each target its slice (T6). A target gets the immediate once. With a group, target i is its peer i.
    Status submit_scatter(std::optional<PeerGroupHandle> group, std::optional<uint32_t> imm, MrHandle source,
                          std::vector<ScatterDst> targets, OnDone done = {},
                          std::chrono::nanoseconds timeout = default_timeout);
    // Sends each target the immediate, once, and no bytes (T6).
    Status submit_barrier(std::optional<PeerGroupHandle> group, uint32_t imm, std::vector<MrDesc> targets,
                          OnDone done = {}, std::chrono::nanoseconds timeout = default_timeout);

    // Calls back once when `count` immediates of this value have arrived, with the data of each visible here,
    // and takes so many off (T7). What came before this call counts. What is left over stays for the next
    // expectation of this value; they are served in the order of the calls. Ends with `timed_out` or, by stop(),
    // `cancelled`, too, and then takes nothing off.
    Status expect_imm_count(uint32_t imm, uint64_t count, Callback reached,
                            std::chrono::nanoseconds timeout = no_timeout);

    // A word for a producer, a CPU or a GPU, to increase (T8). `changed` is called with its last and its
    // present value; changes in quick succession are one call. Null when there is no memory for it. Where there is a
    // GPU, all of them reach the word at this address; one releases in system scope what it wrote before. For that,
    // the first word takes the primary context of the first GPU that a group is for, else of GPU 0.
    uint64_t *alloc_uvm_watcher(WatcherCallback changed);
    // `changed` is not called any more when this returns, unless it is called by `changed`. The word is void; a later
    // watcher may get it.
    void free_uvm_watcher(uint64_t *word);

    // Called for each connection to a peer's adapter that is lost. Set it before the first operation.
    void on_peer_down(PeerDownCallback down);

    // Ends everything: new operations are refused (stopped); those under way run on until they end or their
    // deadline comes (drain), or are cancelled. Returns when each has told, the threads have ended and the
    // adapters are closed. Invalid from a callback. A second call does nothing.
    Status stop(bool drain);

    Metrics metrics() const;

private:
    class Engine;
    explicit TransferEngine(std::unique_ptr<Engine> parts);
    std::unique_ptr<Engine> engine;
};

} // namespace transfer_engine
