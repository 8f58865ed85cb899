// rdma_kv_reader: fetches a KV cache from rdma_kv_server by one-sided RDMA READ and times that.
//
// Build:  g++ -std=c++20 -Wall -Wextra -O2 rdma_kv_reader.cpp -o rdma_kv_reader -libverbs -lrdmacm -lcrypto
//
// The dialogue, by rdma_cm and one reliable connection (RC):
//   reader  connect request   magic, version
//   server  accept            magic, version, address, length, MD5, rkey     (or a reject with the reason)
//   reader  RDMA READ ...     one work request, or chunks of which several are under way
//   reader  SEND              what it read, how long that took, whether the MD5 agreed
//   reader  disconnect
//
// Left out on purpose: encryption, more than one queue pair, reconnecting (run it again).
#include <getopt.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sched.h>

#include "common.hpp"

struct options {
    const char *server = nullptr, *output = nullptr, *device = nullptr, *bind = nullptr, *csv = nullptr,
               *json = nullptr;
    uint16_t port = 12345;
    uint64_t iterations = 1;
    uint64_t offset = 0, size = 0; // size 0: to the end of the cache
    uint64_t chunk = 1 << 20;      // bytes of a work request; 0: one work request for all
    uint32_t outstanding = 16;     // work requests under way
    uint64_t timeout = 5;          // seconds
    bool events = false, verify = true, verbose = false;
};

constexpr uint8_t most_retries = 6; // of a lost packet; 7, the most there is, SoftRoCE takes for "without end"

struct reader {
    options opt;

    ibv_device **devices;
    sockaddr_storage server, source; // source: family 0 when the route decides
    rdma_event_channel *cm_channel;
    rdma_cm_id *id; // owns the queue pair
    bool connected;
    bool asks_again; // it was rejected once by the kernel there
    ibv_device_attr device;
    ibv_port_attr port;
    ibv_qp_attr qp; // as the connection has set it
    ibv_pd *pd;
    ibv_comp_channel *completion_channel;
    ibv_cq *cq;
    bool armed; // the next completion brings an event (--events)

    offer cache;          // what the server offers
    uint64_t length;      // what of it is read
    uint64_t chunk;       // bytes of a work request; at most the port's max_msg_sz
    uint32_t outstanding; // Invariant: outstanding <= SQ depth <= CQ depth <= the device's limits
    uint8_t *buffer;
    ibv_mr *mr;

    std::vector<uint64_t> starts_ns, latencies_ns;             // of each iteration
    double connect_s, allocate_s, register_s, hash_s, write_s; // what P14 does not count
    uint8_t md5[md5_size];
    uint32_t verdict;
};

static void print_usage(FILE *stream)
{
    fputs("usage: rdma_kv_reader -s SERVER [-p PORT] [-o FILE]\n"
          "Reads a KV cache from rdma_kv_server by RDMA READ, and times that.\n\n"
          "  -s, --server HOST      the server (IPv4, IPv6 or name)\n"
          "  -p, --port PORT        its port of rdma_cm (default 12345)\n"
          "  -o, --output FILE      write what was read (default: nothing is written)\n"
          "  -n, --iterations N     read N times (default 1)\n"
          "      --offset N         start at this byte of the cache (default 0)\n"
          "      --size N           read N bytes (default: to the end)\n"
          "  -c, --chunk N          bytes of a work request (default 1M; 0: one for all, if the port can)\n"
          "      --outstanding N    work requests under way (default 16)\n"
          "  -d, --device NAME      RDMA device (default: the route's)\n"
          "  -b, --bind ADDRESS     this side's address\n"
          "      --timeout SECONDS  for connecting, and for reading without progress (default 5)\n"
          "      --events           sleep on the completion channel instead of polling\n"
          "      --no-verify        do not compare MD5 sums\n"
          "      --csv FILE         a row for each iteration\n"
          "      --json FILE        every figure of the run\n"
          "  -v, --verbose          limits and what was negotiated, on stderr\n"
          "  -h, --help             this text\n"
          "      --version          the version\n\n"
          "Sizes take K, M, G, T: powers of 1024.\n"
          "Exit status: 0 success, 1 run-time error, 2 usage, 3 what arrived has another MD5.\n",
          stream);
}

static options parse_arguments(int argc, char **argv)
{
    // Capital letters: options that have a long form only.
    // clang-format off
    static const option long_options[] = {
        {"server", required_argument, nullptr, 's'},    {"port", required_argument, nullptr, 'p'},
        {"output", required_argument, nullptr, 'o'},    {"iterations", required_argument, nullptr, 'n'},
        {"offset", required_argument, nullptr, 'O'},    {"size", required_argument, nullptr, 'S'},
        {"chunk", required_argument, nullptr, 'c'},     {"outstanding", required_argument, nullptr, 'U'},
        {"device", required_argument, nullptr, 'd'},    {"bind", required_argument, nullptr, 'b'},
        {"timeout", required_argument, nullptr, 'T'},   {"events", no_argument, nullptr, 'E'},
        {"no-verify", no_argument, nullptr, 'N'},       {"csv", required_argument, nullptr, 'C'},
        {"json", required_argument, nullptr, 'J'},      {"verbose", no_argument, nullptr, 'v'},
        {"help", no_argument, nullptr, 'h'},            {"version", no_argument, nullptr, 'V'},
        {nullptr, 0, nullptr, 0}};
    // clang-format on
    options opt;
    for (int letter; (letter = getopt_long(argc, argv, "s:p:o:n:c:d:b:vh", long_options, nullptr)) != -1;) {
        switch (letter) {
        case 's': opt.server = optarg; break;
        case 'p': number_option("--port", optarg, 1, 65535, &opt.port); break;
        case 'o': opt.output = optarg; break;
        case 'n': number_option("--iterations", optarg, 1, 100000000, &opt.iterations); break;
        case 'O': size_option("--offset", optarg, 0, &opt.offset); break;
        case 'S': size_option("--size", optarg, 1, &opt.size); break;
        case 'c': size_option("--chunk", optarg, 0, &opt.chunk); break;
        case 'U': number_option("--outstanding", optarg, 1, INT32_MAX, &opt.outstanding); break;
        case 'd': opt.device = optarg; break;
        case 'b': opt.bind = optarg; break;
        case 'T': number_option("--timeout", optarg, 1, 86400, &opt.timeout); break;
        case 'E': opt.events = true; break;
        case 'N': opt.verify = false; break;
        case 'C': opt.csv = optarg; break;
        case 'J': opt.json = optarg; break;
        case 'v': opt.verbose = true; break;
        case 'h': print_usage(stdout); exit(exit_success);
        case 'V':
            printf("rdma_kv_reader %s (handshake version %u)\n", program_version, handshake_version);
            exit(exit_success);
        default: print_usage(stderr); exit(exit_usage); // getopt_long has said what is wrong
        }
    }
    if (optind < argc) usage_error(text("unexpected argument '%s'; did you mean -s %s?", argv[optind], argv[optind]));
    if (opt.server == nullptr) usage_error("the server is missing: -s HOST");
    return opt;
}

static std::string server_text(reader *r) { return address_text(reinterpret_cast<sockaddr *>(&r->server)); }

// P11: the devices there are, the server's address, and this side's where -b or -d ask for one.
static bool find_addresses(reader *r)
{
    std::string device = r->opt.device != nullptr ? r->opt.device : "";
    r->devices = ibv_get_device_list(nullptr);
    if (r->devices == nullptr || r->devices[0] == nullptr) return no_rdma_device();
    if (!device.empty() && !device_is_there(r->devices, device.c_str())) return false;

    if (!find_address(r->opt.server, r->opt.port, AF_UNSPEC, &r->server)) return false;
    if (is_loopback(&r->server)) { // rdma_resolve_route would fail with ENODEV
        if (!find_local_address(AF_UNSPEC, &device, &r->server))
            return failed(text("server %s", r->opt.server), "a loopback address, over which RDMA never connects",
                          "give the interface of an RDMA device here an IP address");
        set_port(&r->server, r->opt.port);
        remark(std::string(r->opt.server) + " is loopback, over which RDMA never connects: using " + server_text(r) +
               ", of an RDMA device here");
    }

    const int family = r->server.ss_family;
    if (r->opt.bind != nullptr) return find_address(r->opt.bind, 0, family, &r->source);
    return r->opt.device == nullptr || find_local_address(family, &device, &r->source) ||
           failed("device " + device, text("its interface has no IPv%c address", family == AF_INET ? '4' : '6'),
                  "rdma_cm connects by IP addresses: give it one");
}

// ------------------------------------------------------------------- stage 3: making the connection

static const char *const no_device_hint = "no RDMA device leads there: 'ip route get ADDRESS' names the interface";
static const char *const silence_hint =
    "is the address right, the host up, the server not stopped or overrun, UDP port 4791 (RoCE v2) open?";

// Tells what an event means that was not hoped for.
static bool failed_at_event(const rdma_cm_event *event, const std::string &call)
{
    const rdma_conn_param *data = &event->param.conn;
    refusal message{};
    switch (event->event) {
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
        return failed(call, -event->status, event->status == -ENODEV ? no_device_hint : silence_hint);
    case RDMA_CM_EVENT_REJECTED:
        if (decode(data->private_data, data->private_data_len, refusal_magic, &message).empty())
            return failed(call, message.reason[0] != '\0'
                                    ? "refused by the server: " + printable(message.reason, sizeof message.reason)
                                    : "refused by the server, without a reason");
        // 8: invalid service ID, 10: stale connection (IB specification, REJ)
        if (event->status == 8 || event->status == -ECONNREFUSED)
            return failed(call, "rejected: nobody listens on this port", "is rdma_kv_server running, with this -p?");
        return failed(call, text("rejected, with reason %d", event->status),
                      event->status == 10 ? "a connection is left from a crash (stale): run it again"
                                          : "is the peer an rdma_kv_server? was it just ending?");
    case RDMA_CM_EVENT_DISCONNECTED: return failed(call, "the server disconnected");
    case RDMA_CM_EVENT_DEVICE_REMOVAL: return failed(call, "the RDMA device was removed");
    default: return failed(call, text("%s (status %d)", rdma_event_str(event->event), event->status));
    }
}

// Whether the connect request was rejected by the kernel of the server's machine, before the server saw it:
// consumer reject (28: IB specification, REJ) and not a byte with it. So it does just after its link has come up.
static bool is_rejected_by_kernel(const rdma_cm_event *event)
{
    const auto *data = static_cast<const uint8_t *>(event->param.conn.private_data);
    return event->event == RDMA_CM_EVENT_REJECTED && event->status == 28 &&
           std::all_of(data, data + event->param.conn.private_data_len, [](uint8_t byte) { return byte == 0; });
}

enum outcome { nothing_came, expected_came, failure_came };

// Takes one event of the connection manager, if one comes in time. An accept's data goes to r->cache.
static outcome take_event(reader *r, int milliseconds, rdma_cm_event_type expected, const std::string &call)
{
    pollfd ready{.fd = r->cm_channel->fd, .events = POLLIN, .revents = 0};
    rdma_cm_event *event = nullptr;
    if (poll(&ready, 1, milliseconds) <= 0) return nothing_came;
    if (rdma_get_cm_event(r->cm_channel, &event) != 0) {
        failed("rdma_get_cm_event()", errno);
        return failure_came;
    }
    outcome result = expected_came;
    if (event->event == RDMA_CM_EVENT_ADDR_CHANGE || event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT) {
        result = nothing_came; // neither changes anything here
    } else if (!r->asks_again && is_rejected_by_kernel(event)) {
        r->asks_again = true; // connect() sees to it
        result = failure_came;
    } else if (event->event != expected) {
        failed_at_event(event, call);
        r->connected = r->connected && event->event != RDMA_CM_EVENT_DISCONNECTED;
        result = failure_came;
    } else if (expected == RDMA_CM_EVENT_ESTABLISHED) {
        const rdma_conn_param *data = &event->param.conn;
        const std::string wrong = decode(data->private_data, data->private_data_len, offer_magic, &r->cache);
        if (!wrong.empty()) {
            failed(call, "the peer is not an rdma_kv_server that this reader understands: " + wrong);
            result = failure_came;
        }
    }
    rdma_ack_cm_event(event); // its data is gone with it
    return result;
}

static uint64_t deadline_of(const reader *r) { return now_ns() + r->opt.timeout * 1000000000u; }

static bool wait_for_event(reader *r, rdma_cm_event_type expected, const std::string &call, uint64_t deadline)
{
    while (now_ns() < deadline) {
        const outcome result = take_event(r, 100, expected, call);
        if (result != nothing_came) return result == expected_came;
        if (interrupted) return failed(call, "interrupted");
    }
    return failed(call, text("no answer in %zu s", r->opt.timeout), silence_hint);
}

// The route to the server decides which device is used.
static bool resolve_route(reader *r, uint64_t deadline)
{
    r->cm_channel = rdma_create_event_channel();
    if (r->cm_channel == nullptr)
        return failed("rdma_create_event_channel()", errno, "is rdma_ucm loaded, /dev/infiniband/rdma_cm there?");
    if (rdma_create_id(r->cm_channel, &r->id, nullptr, RDMA_PS_TCP) != 0)
        return failed("rdma_create_id(RDMA_PS_TCP)", errno);

    // The transport gives up on a silent server after attempts (most_retries + 1) of 4.096 us * 2^n each:
    // the largest n for which they fit into the timeout; by default 17, for 3.8 s. An adapter may take up to
    // four times that: then the watchdog is first. Left to the CM it can take 17 s and more. Old kernels refuse.
    const double attempt_us = static_cast<double>(r->opt.timeout) * 1e6 / (most_retries + 1);
    auto n = static_cast<uint8_t>(std::min(31.0, std::log2(attempt_us / 4.096)));
    rdma_set_option(r->id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &n, sizeof n);

    const int milliseconds = static_cast<int>(r->opt.timeout * 1000);
    auto *const source = r->source.ss_family != 0 ? reinterpret_cast<sockaddr *>(&r->source) : nullptr;
    std::string call = "rdma_resolve_addr(" + server_text(r) + ")";
    if (rdma_resolve_addr(r->id, source, reinterpret_cast<sockaddr *>(&r->server), milliseconds) != 0)
        return failed(call, errno, no_device_hint);
    if (!wait_for_event(r, RDMA_CM_EVENT_ADDR_RESOLVED, call, deadline)) return false;
    call = "rdma_resolve_route(" + server_text(r) + ")";
    if (rdma_resolve_route(r->id, milliseconds) != 0) return failed(call, errno, no_device_hint);
    if (!wait_for_event(r, RDMA_CM_EVENT_ROUTE_RESOLVED, call, deadline)) return false;
    if (r->id->verbs == nullptr) return failed(call, "the route has no RDMA device", no_device_hint);
    const char *name = ibv_get_device_name(r->id->verbs->device);
    return r->opt.device == nullptr || strcmp(name, r->opt.device) == 0 ||
           failed(text("device %s", r->opt.device), "the route to " + server_text(r) + " uses device " + name);
}

// P11, as on the server: protection domain, completion channel and queue, queue pair; on the route's device.
static bool create_queue_pair(reader *r)
{
    ibv_context *const context = r->id->verbs;
    int error = ibv_query_device(context, &r->device);
    if (error == 0) error = ibv_query_port(context, r->id->port_num, &r->port);
    if (error != 0) return failed(text("ibv_query_device(), ibv_query_port(%u)", r->id->port_num), error);
    r->pd = ibv_alloc_pd(context);
    if (r->pd == nullptr) return failed("ibv_alloc_pd()", errno);
    r->completion_channel = ibv_create_comp_channel(context);
    if (r->completion_channel == nullptr) return failed("ibv_create_comp_channel()", errno);

    r->outstanding = std::min(
        {r->opt.outstanding, static_cast<uint32_t>(r->device.max_qp_wr), static_cast<uint32_t>(r->device.max_cqe)});
    r->cq = ibv_create_cq(context, static_cast<int>(r->outstanding), nullptr, r->completion_channel, 0);
    if (r->cq == nullptr)
        return failed(text("ibv_create_cq(%u entries)", r->outstanding), errno,
                      memlock_hint(errno, uint64_t{64} * r->outstanding));

    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = r->cq;
    attributes.recv_cq = r->cq;
    attributes.cap = {.max_send_wr = r->outstanding,
                      .max_recv_wr = 1,
                      .max_send_sge = 1,
                      .max_recv_sge = 1,
                      .max_inline_data = sizeof(closing)}; // the closing message needs no registered memory then
    return rdma_create_qp(r->id, r->pd, &attributes) == 0 ||
           failed(text("rdma_create_qp(RC, %u send work requests)", r->outstanding), errno,
                  "fewer, with --outstanding?");
}

// P11: connects; the accept brings address, length, rkey and MD5.
static bool connect_to_server(reader *r, uint64_t deadline)
{
    const hello greeting = encode(hello{.magic = hello_magic, .version = handshake_version});
    rdma_conn_param request{};
    request.private_data = &greeting;
    request.private_data_len = sizeof greeting;
    // How many READs the adapter keeps under way: all it can; the server takes what its own can answer.
    // At 1, each READ waits for the last one's data: a fraction of the rate.
    request.initiator_depth = RDMA_MAX_INIT_DEPTH;
    request.responder_resources = RDMA_MAX_RESP_RES; // not used: the server reads nothing
    request.retry_count = most_retries;
    const std::string call = "rdma_connect(" + server_text(r) + ")";
    if (rdma_connect(r->id, &request) != 0) return failed(call, errno);
    if (!wait_for_event(r, RDMA_CM_EVENT_ESTABLISHED, call, deadline)) return false;
    r->connected = true;

    ibv_qp_init_attr unused{};
    const int error =
        ibv_query_qp(r->id->qp, &r->qp, IBV_QP_PATH_MTU | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT, &unused);
    if (error != 0) return failed("ibv_query_qp()", error);
    if (r->id->verbs->device->transport_type == IBV_TRANSPORT_IWARP) // whose queue pairs do not tell
        return true;
    return r->qp.max_rd_atomic > 0 || failed(call, "the server answers no READs: its responder_resources are 0");
}

// P12: the local buffer, for the range that is asked for.
static bool register_buffer(reader *r)
{
    if (r->opt.offset >= r->cache.length || r->opt.size > r->cache.length - r->opt.offset)
        return failed(text("--offset %zu --size %zu", r->opt.offset, r->opt.size),
                      text("beyond the cache, which has %zu bytes", r->cache.length));
    r->length = r->opt.size != 0 ? r->opt.size : r->cache.length - r->opt.offset;
    const uint64_t most = std::min<uint64_t>(r->port.max_msg_sz, UINT32_MAX); // ibv_sge.length has 32 bits
    r->chunk = std::min({r->opt.chunk != 0 ? r->opt.chunk : r->length, r->length, most});

    const uint64_t allocate_start = now_ns();
    r->buffer = allocate_buffer(r->length);
    if (r->buffer == nullptr) return false;
    r->allocate_s = seconds_since(allocate_start);

    int access = IBV_ACCESS_LOCAL_WRITE;
    if (r->id->verbs->device->transport_type == IBV_TRANSPORT_IWARP)
        access |= IBV_ACCESS_REMOTE_WRITE; // there the peer answers a READ by writing (RFC 5040)
    const uint64_t register_start = now_ns();
    r->mr = ibv_reg_mr(r->pd, r->buffer, r->length, access);
    if (r->mr == nullptr)
        return failed(text("ibv_reg_mr(%zu bytes)", r->length), errno, memlock_hint(errno, r->length));
    r->register_s = seconds_since(register_start);
    return true;
}

// ------------------------------------------------------------------------------ stage 3: the READ

// Arms the completion queue or, when that is done, sleeps until it or the connection has something to
// tell, 100 ms at most. The caller polls after each: poll, arm, poll, or a completion would be missed.
static bool arm_or_sleep(reader *r)
{
    if (!r->armed) {
        const int error = ibv_req_notify_cq(r->cq, 0);
        r->armed = error == 0;
        return r->armed || failed("ibv_req_notify_cq()", error);
    }
    pollfd ready[] = {{r->completion_channel->fd, POLLIN, 0}, {r->cm_channel->fd, POLLIN, 0}};
    if (poll(ready, 2, 100) <= 0 || ready[0].revents == 0) return true;
    ibv_cq *cq = nullptr;
    void *context = nullptr;
    if (ibv_get_cq_event(r->completion_channel, &cq, &context) != 0) return failed("ibv_get_cq_event()", errno);
    ibv_ack_cq_events(cq, 1);
    r->armed = false;
    return true;
}

static const char *completion_hint(ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_RETRY_EXC_ERR: return "the server does not answer: it is gone, or the link is down";
    case IBV_WC_REM_ACCESS_ERR: return "the server's key, range or permission does not cover this READ";
    case IBV_WC_LOC_PROT_ERR: return "the local buffer is not registered for this";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "the server had no receive posted";
    case IBV_WC_WR_FLUSH_ERR: return "the connection broke before this was carried out";
    default: return "";
    }
}

// Waits for one completion or more, by polling (P13) or asleep, and adds how many there were to
// *completed. `bytes`: what one work request moves.
static bool wait_for_completions(reader *r, uint64_t bytes, const char *call, uint64_t *completed)
{
    // Progress shows in completions, and a large work request takes its time: it is allowed what its
    // bytes take at 8 MB/s, 125 ns each, where that is more. The clock is looked at when there is time for it.
    const uint64_t patience = std::max(r->opt.timeout * 1000000000u, bytes * 125);
    uint64_t start = 0;
    ibv_wc completions[16];
    for (unsigned polls = 1; !interrupted; ++polls) {
        const int count = ibv_poll_cq(r->cq, 16, completions);
        if (count < 0) return failed("ibv_poll_cq()", "the completion queue is broken");
        for (int i = 0; i < count; ++i)
            if (completions[i].status != IBV_WC_SUCCESS)
                return failed(
                    call,
                    text("%s (vendor error 0x%x)", ibv_wc_status_str(completions[i].status), completions[i].vendor_err),
                    completion_hint(completions[i].status));
        *completed += static_cast<uint64_t>(count);
        if (count > 0) return true;
        if (r->opt.events && !arm_or_sleep(r)) return false;
        if (!r->opt.events && polls % 1024 != 0) continue; // what follows costs a system call
        if (take_event(r, 0, RDMA_CM_EVENT_TIMEWAIT_EXIT, call) == failure_came) return false;
        if (start == 0) start = now_ns();
        if (now_ns() - start >= patience)
            return failed(call, text("no progress for %.1f s", seconds_since(start)), silence_hint);
    }
    return failed(call, "interrupted");
}

static bool post_read(reader *r, uint64_t index) // P13
{
    const uint64_t at = index * r->chunk;
    ibv_sge sge{.addr = reinterpret_cast<uintptr_t>(r->buffer + at),
                .length = static_cast<uint32_t>(chunk_length(r->length, r->chunk, index)),
                .lkey = r->mr->lkey};
    ibv_send_wr wr{};
    wr.wr_id = index;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_RDMA_READ;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = r->cache.address + r->opt.offset + at;
    wr.wr.rdma.rkey = r->cache.rkey;
    ibv_send_wr *refused = nullptr;
    const int error = ibv_post_send(r->id->qp, &wr, &refused); // returns the error number
    return error == 0 || failed(text("ibv_post_send(RDMA_READ, %u bytes)", sge.length), error);
}

// Reads the range once. Between the two looks at the clock (P14): posting and waiting. (And the bar,
// ten times a second, when stderr is a terminal.)
static bool read_once(reader *r, progress *bar)
{
    const uint64_t chunks = chunk_count(r->length, r->chunk);
    uint64_t posted = 0, completed = 0;
    const uint64_t start = now_ns();
    while (completed < chunks) {
        while (posted < chunks && posted - completed < r->outstanding)
            if (!post_read(r, posted++)) return false;
        if (!wait_for_completions(r, r->chunk, "RDMA READ", &completed))
            return failed(text("iteration %zu", r->latencies_ns.size() + 1),
                          text("%zu of %zu bytes had arrived", completed * r->chunk, r->length), "nothing was written");
        show_progress(bar, r->latencies_ns.size() * chunks + completed);
    }
    const uint64_t end = now_ns();
    r->starts_ns.push_back(start);
    r->latencies_ns.push_back(end - start);
    return true;
}

// P17: as often as asked. Each iteration starts from zeroes, so that what is verified in the end has
// come with the last one.
static bool read_cache(reader *r)
{
    // A software device works on the processor that posts and polls. When the scheduler moves the poller
    // about, it drags that work along: staying gained a tenth over SoftRoCE (docs/REPORT.md). With an adapter the
    // processor is the user's choice (taskset, numactl).
    cpu_set_t before, here;
    CPU_ZERO(&here);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &here);
    const bool stays = is_software(r->id->verbs->device) && sched_getaffinity(0, sizeof before, &before) == 0 &&
                       sched_setaffinity(0, sizeof here, &here) == 0;

    progress bar{.label = "reading", .total = r->opt.iterations * chunk_count(r->length, r->chunk)};
    bool ok = true;
    for (uint64_t i = 0; ok && i < r->opt.iterations; ++i) {
        if (i > 0) memset(r->buffer, 0, r->length);
        ok = read_once(r, &bar);
    }
    end_progress(&bar);
    if (stays) sched_setaffinity(0, sizeof before, &before);
    return ok;
}

// P15: against the MD5 of the handshake, which is that of the whole cache.
static bool verify(reader *r)
{
    if (!r->opt.verify || r->length != r->cache.length) return true;
    const uint64_t start = now_ns();
    if (!md5_of(r->buffer, r->length, r->md5)) return false;
    r->hash_s = seconds_since(start);
    r->verdict = memcmp(r->md5, r->cache.md5, md5_size) == 0 ? verdict_equal : verdict_different;
    return r->verdict == verdict_equal || failed("MD5 " + md5_text(r->md5), "the server's is " + md5_text(r->cache.md5),
                                                 "what arrived is not the cache; nothing was written");
}

// Tells the server how it went, then leaves. Whether the server's adapter took it: then the connection has
// outlived the data.
static bool close_connection(reader *r)
{
    closing message = encode(closing{.magic = closing_magic,
                                     .version = handshake_version,
                                     .bytes = r->length,
                                     .iterations = r->latencies_ns.size(),
                                     .median_ns = statistics_of(r->latencies_ns).median,
                                     .verdict = r->verdict,
                                     .reserved = 0});
    ibv_sge sge{.addr = reinterpret_cast<uintptr_t>(&message), .length = sizeof message, .lkey = 0};
    ibv_send_wr wr{};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE; // P16: small, so copied into the work request
    ibv_send_wr *refused = nullptr;
    const int error = ibv_post_send(r->id->qp, &wr, &refused);
    uint64_t completed = 0;
    const bool taken = error == 0 ? wait_for_completions(r, sizeof message, "closing message", &completed)
                                  : failed("ibv_post_send(SEND)", error);
    if (!taken) return false; // free_everything() disconnects
    if (rdma_disconnect(r->id) == 0) wait_for_event(r, RDMA_CM_EVENT_DISCONNECTED, "rdma_disconnect()", deadline_of(r));
    r->connected = false;
    return true;
}

// ------------------------------------------------------------------------------------ the results

static bool write_output(reader *r)
{
    const uint64_t start = now_ns();
    const bool ok = r->opt.output == nullptr || write_file(r->opt.output, r->buffer, r->length);
    r->write_s = seconds_since(start);
    return ok;
}

// The path's, or the port's where the queue pair does not tell. IBV_MTU_256 is 1.
static int mtu_of(const reader *r) { return 128 << (r->qp.path_mtu != 0 ? r->qp.path_mtu : r->port.active_mtu); }

static void print_head(reader *r)
{
    char gid[INET6_ADDRSTRLEN] = "?";
    inet_ntop(AF_INET6, r->id->route.addr.addr.ibaddr.sgid.raw, gid, sizeof gid);
    const int mtu = mtu_of(r);
    printf("server  %s, cache of %zu bytes\n", server_text(r).c_str(), r->cache.length);
    printf("device  %s%s, port %u, GID %s, MTU %d\n", ibv_get_device_name(r->id->verbs->device),
           is_software(r->id->verbs->device) ? " (software)" : "", r->id->port_num, gid, mtu);
    printf("reading %zu bytes at offset %zu: work requests of %zu bytes, %u outstanding, %s\n\n", r->length,
           r->opt.offset, r->chunk, r->outstanding, r->opt.events ? "completion events" : "polling");
    if (mtu < 4096 && r->port.link_layer == IBV_LINK_LAYER_ETHERNET)
        remark(text("MTU %d: 4096 takes a netdev MTU of at least 4200 on both sides (9000 is usual)", mtu));
    if (r->opt.verbose)
        remark(text("READ depth %u (device: %d), ACK timeout 4.096 us * 2^%u, max_msg_sz %u, max_qp_wr %d, max_cqe %d",
                    r->qp.max_rd_atomic, r->device.max_qp_init_rd_atom, r->qp.timeout, r->port.max_msg_sz,
                    r->device.max_qp_wr, r->device.max_cqe));
}

static void print_results(reader *r)
{
    print_statistics(r->length, r->latencies_ns.size(), statistics_of(r->latencies_ns));
    printf("\nnot in these times: connecting %.6f s, allocating %.6f s, registering %.6f s, hashing %.6f s, writing "
           "%.6f s\n",
           r->connect_s, r->allocate_s, r->register_s, r->hash_s, r->write_s);
    if (r->verdict == verdict_unchecked)
        printf("MD5 not checked: %s\n",
               r->opt.verify ? "a part cannot be compared with the MD5 of the whole cache" : "--no-verify");
    else
        printf("MD5 %s, %s the server's\n", md5_text(r->md5).c_str(),
               r->verdict == verdict_equal ? "equal to" : "DIFFERENT from");
}

static bool write_csv(const reader *r)
{
    if (r->opt.csv == nullptr) return true;
    std::string rows = "index,start_ns,latency_ns,bytes\n";
    for (size_t i = 0; i < r->latencies_ns.size(); ++i)
        rows += text("%zu,%zu,%zu,%zu\n", i, r->starts_ns[i] - r->starts_ns[0], r->latencies_ns[i], r->length);
    return write_file(r->opt.csv, rows.data(), rows.size());
}

// The most memory that was resident so far, in bytes.
static uint64_t peak_memory()
{
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

static bool write_json(const reader *r)
{
    if (r->opt.json == nullptr) return true;
    static const char *const verdicts[] = {"unchecked", "equal", "different"};
    const auto flag = [](bool value) { return value ? "true" : "false"; };
    const statistics t = statistics_of(r->latencies_ns);
    const std::string json = text(
        R"({"version": "%s", "device": "%s", "software": %s, "port": %u, "mtu": %d, "read_depth": %u,
 "cache_bytes": %zu, "offset": %zu, "bytes": %zu, "chunk": %zu, "outstanding": %u, "events": %s,
 "iterations": %zu, "min_ns": %zu, "median_ns": %zu, "mean_ns": %.1f, "p99_ns": %zu, "max_ns": %zu, "stdev_ns": %.1f,
 "gigabytes_per_second": %.6f,
 "connect_s": %.9f, "allocate_s": %.9f, "register_s": %.9f, "hash_s": %.9f, "write_s": %.9f,
 "peak_bytes": %zu, "server_md5": "%s", "verdict": "%s"}
)",
        program_version, ibv_get_device_name(r->id->verbs->device), flag(is_software(r->id->verbs->device)),
        r->id->port_num, mtu_of(r), r->qp.max_rd_atomic, r->cache.length, r->opt.offset, r->length, r->chunk,
        r->outstanding, flag(r->opt.events), r->latencies_ns.size(), t.min, t.median, t.mean, t.p99, t.max, t.stdev,
        gigabytes_per_second(r->length, t), r->connect_s, r->allocate_s, r->register_s, r->hash_s, r->write_s,
        peak_memory(), md5_text(r->cache.md5).c_str(), verdicts[r->verdict]);
    return write_file(r->opt.json, json.data(), json.size());
}

static void free_queue_pair(reader *r)
{
    if (r->id != nullptr && r->id->qp != nullptr) rdma_destroy_qp(r->id);
}

static void free_connection(reader *r)
{
    free_queue_pair(r);
    if (r->cq != nullptr) ibv_destroy_cq(r->cq);
    if (r->completion_channel != nullptr) ibv_destroy_comp_channel(r->completion_channel);
    if (r->pd != nullptr) ibv_dealloc_pd(r->pd);
    if (r->id != nullptr) rdma_destroy_id(r->id);
    if (r->cm_channel != nullptr) rdma_destroy_event_channel(r->cm_channel);
    r->cq = nullptr, r->completion_channel = nullptr, r->pd = nullptr, r->id = nullptr, r->cm_channel = nullptr;
}

// P34: what was made, in reverse order, but for the queue pair: it goes before the memory its READs write to.
static void free_everything(reader *r)
{
    if (r->connected) rdma_disconnect(r->id);
    free_queue_pair(r);
    if (r->mr != nullptr) ibv_dereg_mr(r->mr);
    if (r->buffer != nullptr) munmap(r->buffer, r->length);
    free_connection(r);
    if (r->devices != nullptr) ibv_free_device_list(r->devices);
}

static bool connect(reader *r)
{
    const uint64_t start = now_ns(), deadline = deadline_of(r);
    bool ok = find_addresses(r) && resolve_route(r, deadline) && create_queue_pair(r) && connect_to_server(r, deadline);
    if (!ok && r->asks_again) {
        free_connection(r);
        usleep(500000); // by then the kernel there has its addresses and routes again
        ok = resolve_route(r, deadline) && create_queue_pair(r) && connect_to_server(r, deadline);
    }
    r->connect_s = seconds_since(start);
    return ok;
}

// All of a run. A mismatch ends it as a failure does, but its figures are printed.
static bool run(reader *r)
{
    if (!check_output("-o", r->opt.output) || !check_output("--csv", r->opt.csv) ||
        !check_output("--json", r->opt.json) || !connect(r) || !register_buffer(r))
        return false;
    print_head(r);
    if (!read_cache(r)) return false;
    const bool verified = verify(r);
    const bool outlived = close_connection(r);
    if (!verified && r->verdict != verdict_different) return false;
    // SoftRoCE can complete a READ whose data is not there, and breaks the connection then (docs/RELIABILITY.md).
    if (!outlived && r->verdict == verdict_unchecked)
        return failed(text("%zu bytes", r->length), "not checked, and the connection broke behind them",
                      "nothing was written");
    const bool written = verified && write_output(r);
    print_results(r);
    return write_csv(r) && write_json(r) && written;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0); // a log is read while it grows
    reader r{};
    r.opt = parse_arguments(argc, argv);
    catch_signals();
    const bool ok = run(&r);
    free_everything(&r);
    return r.verdict == verdict_different ? exit_mismatch : ok ? exit_success : exit_failure;
}
