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
#include <fcntl.h>
#include <getopt.h>
#include <ifaddrs.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/stat.h>

#include <csignal>

#include "common.hpp"

struct options {
    const char *server = nullptr;
    uint16_t port = 12345;
    const char *output = nullptr;
    uint64_t iterations = 1;
    uint64_t offset = 0, size = 0; // size 0: to the end of the cache
    uint64_t chunk = 1 << 20;      // bytes of a work request; 0: one work request for all
    uint32_t outstanding = 16;     // work requests under way
    const char *device = nullptr;
    const char *bind = nullptr;
    uint64_t timeout = 10; // seconds
    bool events = false, verify = true, verbose = false;
    const char *csv = nullptr, *json = nullptr;
};

// Where the time goes that P14 does not count, in seconds.
struct overheads {
    double connect, allocate, registering, hashing, writing;
};

struct reader {
    options opt;

    ibv_device **devices;
    sockaddr_storage server, source; // source: family 0 when the route decides
    rdma_event_channel *cm_channel;
    rdma_cm_id *id; // owns the queue pair
    bool connected;
    ibv_device_attr device;
    ibv_port_attr port;
    ibv_qp_attr qp; // as the connection has set it
    ibv_pd *pd;
    ibv_comp_channel *completion_channel;
    ibv_cq *cq;

    offer cache;          // what the server offers
    uint64_t length;      // what of it is read
    uint64_t chunk;       // bytes of a work request: never above the port's max_msg_sz
    uint32_t outstanding; // Invariant: outstanding <= SQ depth <= CQ depth <= the device's limits
    uint8_t *buffer;
    ibv_mr *mr;
    bool armed; // an event will come with the next completion (--events)

    std::vector<uint64_t> starts_ns, latencies_ns; // of each iteration
    uint8_t md5[md5_size];
    enum verdict verdict;
    overheads spent;
};

static volatile sig_atomic_t interrupted; // by SIGINT or SIGTERM: every wait looks at it

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
          "      --timeout SECONDS  for connecting, and for reading without progress (default 10)\n"
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
    enum {
        offset_only = 256,
        size_only,
        outstanding_only,
        timeout_only,
        events_only,
        no_verify_only,
        csv_only,
        json_only,
        version_only
    };
    static const option long_options[] = {{"server", required_argument, nullptr, 's'},
                                          {"port", required_argument, nullptr, 'p'},
                                          {"output", required_argument, nullptr, 'o'},
                                          {"iterations", required_argument, nullptr, 'n'},
                                          {"offset", required_argument, nullptr, offset_only},
                                          {"size", required_argument, nullptr, size_only},
                                          {"chunk", required_argument, nullptr, 'c'},
                                          {"outstanding", required_argument, nullptr, outstanding_only},
                                          {"device", required_argument, nullptr, 'd'},
                                          {"bind", required_argument, nullptr, 'b'},
                                          {"timeout", required_argument, nullptr, timeout_only},
                                          {"events", no_argument, nullptr, events_only},
                                          {"no-verify", no_argument, nullptr, no_verify_only},
                                          {"csv", required_argument, nullptr, csv_only},
                                          {"json", required_argument, nullptr, json_only},
                                          {"verbose", no_argument, nullptr, 'v'},
                                          {"help", no_argument, nullptr, 'h'},
                                          {"version", no_argument, nullptr, version_only},
                                          {nullptr, 0, nullptr, 0}};
    options opt;
    for (int letter; (letter = getopt_long(argc, argv, "s:p:o:n:c:d:b:vh", long_options, nullptr)) != -1;) {
        switch (letter) {
        case 's': opt.server = optarg; break;
        case 'p': opt.port = static_cast<uint16_t>(number_option("--port", optarg, 1, 65535)); break;
        case 'o': opt.output = optarg; break;
        case 'n': opt.iterations = number_option("--iterations", optarg, 1, 100000000); break;
        case offset_only: opt.offset = size_option("--offset", optarg, 0); break;
        case size_only: opt.size = size_option("--size", optarg, 1); break;
        case 'c': opt.chunk = size_option("--chunk", optarg, 0); break;
        case outstanding_only:
            opt.outstanding = static_cast<uint32_t>(number_option("--outstanding", optarg, 1, INT32_MAX));
            break;
        case 'd': opt.device = optarg; break;
        case 'b': opt.bind = optarg; break;
        case timeout_only: opt.timeout = number_option("--timeout", optarg, 1, 86400); break;
        case events_only: opt.events = true; break;
        case no_verify_only: opt.verify = false; break;
        case csv_only: opt.csv = optarg; break;
        case json_only: opt.json = optarg; break;
        case 'v': opt.verbose = true; break;
        case 'h': print_usage(stdout); exit(exit_success);
        case version_only:
            printf("rdma_kv_reader %s (handshake version %u)\n", program_version, handshake_version);
            exit(exit_success);
        default: print_usage(stderr); exit(exit_usage); // getopt_long has said what is wrong
        }
    }
    if (optind < argc)
        usage_error(text("unexpected argument '%s'; did you mean -s %s?", argv[optind], argv[optind]));
    if (opt.server == nullptr)
        usage_error("the server is missing: -s HOST");
    return opt;
}

// ------------------------------------------------------------------------- addresses and devices

// The RDMA device that an address of this machine belongs to, "" when there is none: rdma_bind_addr
// knows, for InfiniBand, RoCE and iWARP alike.
static std::string device_of(const sockaddr *address)
{
    rdma_cm_id *id = nullptr;
    if (rdma_create_id(nullptr, &id, nullptr, RDMA_PS_TCP) != 0)
        return "";
    std::string name;
    if (rdma_bind_addr(id, const_cast<sockaddr *>(address)) == 0 && id->verbs != nullptr)
        name = ibv_get_device_name(id->verbs->device);
    rdma_destroy_id(id);
    return name;
}

// An address of this machine on an RDMA device: of `device`, or of any when that is nullptr. IPv4
// before IPv6, and link-local ones not at all.
static bool find_local_address(const char *device, sockaddr_storage *address)
{
    ifaddrs *interfaces = nullptr;
    if (getifaddrs(&interfaces) != 0)
        return false;
    bool found = false;
    for (const int family : {AF_INET, AF_INET6}) {
        for (const ifaddrs *i = interfaces; i != nullptr && !found; i = i->ifa_next) {
            if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family || (i->ifa_flags & IFF_LOOPBACK) != 0)
                continue;
            if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6 *>(i->ifa_addr)->sin6_addr))
                continue;
            const std::string name = device_of(i->ifa_addr);
            if (name.empty() || (device != nullptr && name != device))
                continue;
            memcpy(address, i->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
            found = true;
        }
    }
    freeifaddrs(interfaces);
    return found;
}

static bool is_loopback(const sockaddr_storage *address)
{
    if (address->ss_family == AF_INET)
        return ntohl(reinterpret_cast<const sockaddr_in *>(address)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6 *>(address)->sin6_addr);
}

// P11: the devices there are, the server's address, and this side's where -b or -d ask for one.
static bool find_addresses(reader *r)
{
    int count = 0;
    r->devices = ibv_get_device_list(&count);
    if (r->devices == nullptr || count == 0)
        return no_rdma_device();
    const char *device = r->opt.device;
    if (device != nullptr) {
        std::string names;
        bool found = false;
        for (int i = 0; i < count; ++i) {
            const char *name = ibv_get_device_name(r->devices[i]);
            names += std::string(i > 0 ? ", " : "") + name;
            found = found || strcmp(name, device) == 0;
        }
        if (!found)
            return failed(text("device %s", device), "not on this machine", "there are: " + names);
    }

    if (!find_address(r->opt.server, r->opt.port, 0, &r->server))
        return false;
    if (is_loopback(&r->server)) {
        if (!find_local_address(device, &r->server))
            return failed(text("server %s", r->opt.server),
                          "a loopback address, and no RDMA device here has an IP address",
                          "rdma_cm never connects over loopback: give an interface with an RDMA device an address");
        // Both families have the port at the same place.
        reinterpret_cast<sockaddr_in *>(&r->server)->sin_port = htons(r->opt.port);
        remark(text("%s does not work over RDMA: using ", r->opt.server) +
               address_text(reinterpret_cast<sockaddr *>(&r->server)) + ", an RDMA address of this machine");
    }

    if (r->opt.bind != nullptr)
        return find_address(r->opt.bind, 0, AI_PASSIVE, &r->source);
    if (device != nullptr && !find_local_address(device, &r->source))
        return failed(text("device %s", device), "its interface has no IP address",
                      "rdma_cm connects by IP addresses: give it one");
    return true;
}

// ------------------------------------------------------------------------- stage 3: the connection

static std::string server_text(reader *r) { return address_text(reinterpret_cast<sockaddr *>(&r->server)); }

static bool failed_at_event(reader *r, const std::string &call, const rdma_cm_event *event)
{
    const int status = event->status;
    switch (event->event) {
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
        return failed(call, -status,
                      status == -ENODEV ? "no RDMA device leads there; 'ip route get' names the interface"
                                        : "is the address right, and the host up?");
    case RDMA_CM_EVENT_UNREACHABLE:
        return failed(call, -status, "nobody answered: is the host up, is UDP port 4791 (RoCE v2) open on the way?");
    case RDMA_CM_EVENT_REJECTED: {
        refusal message{};
        const std::string wrong =
            decode(event->param.conn.private_data, event->param.conn.private_data_len, refusal_magic, &message);
        message.reason[sizeof message.reason - 1] = '\0';
        for (char *letter = message.reason; *letter != '\0'; ++letter)
            if (!isprint(static_cast<unsigned char>(*letter)))
                *letter = '?'; // it goes to a terminal
        if (wrong.empty())
            return failed(call, std::string("refused by the server: ") + message.reason);
        constexpr int invalid_service_id = 8; // IB specification, CM REJ reasons
        if (status == invalid_service_id || status == -ECONNREFUSED)
            return failed(call, "rejected: no server listens on this port", "is rdma_kv_server running, with this -p?");
        return failed(call, text("rejected (reason %d)", status), "the peer is no rdma_kv_server, or " + wrong);
    }
    case RDMA_CM_EVENT_DISCONNECTED: return failed(call, "the server disconnected");
    case RDMA_CM_EVENT_DEVICE_REMOVAL: return failed(call, "the RDMA device was removed");
    default:
        if (r->opt.verbose)
            remark(text("unexpected event, status %d", status));
        return failed(call, text("%s", rdma_event_str(event->event)));
    }
}

// Waits until the connection manager reports `expected`, the timeout at most. Anything else ends the
// wait with a message, but for events that change nothing. Takes the offer out of the accept's data.
static bool wait_for_event(reader *r, rdma_cm_event_type expected, const std::string &call, offer *data = nullptr)
{
    const uint64_t deadline = now_ns() + r->opt.timeout * 1000000000u;
    for (;;) {
        pollfd ready{.fd = r->cm_channel->fd, .events = POLLIN, .revents = 0};
        const uint64_t now = now_ns();
        const int count = now >= deadline ? 0 : poll(&ready, 1, static_cast<int>((deadline - now) / 1000000u) + 1);
        if (interrupted)
            return failed(call, "interrupted");
        if (count == 0)
            return failed(call, text("no answer in %zu s", r->opt.timeout),
                          "is the host up, is UDP port 4791 (RoCE v2) open on the way? --timeout gives it longer");
        rdma_cm_event *event = nullptr;
        if (count < 0 || rdma_get_cm_event(r->cm_channel, &event) != 0) {
            if (errno == EINTR)
                continue;
            return failed("rdma_get_cm_event()", errno);
        }
        bool done = true, ok = true;
        if (event->event == expected && event->status == 0) {
            const std::string wrong = data == nullptr ? ""
                                                      : decode(event->param.conn.private_data,
                                                               event->param.conn.private_data_len, offer_magic, data);
            if (!wrong.empty())
                ok = failed(call, "the peer is no rdma_kv_server of this version: " + wrong);
        } else if (event->event == RDMA_CM_EVENT_ADDR_CHANGE || event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT) {
            done = false;
        } else {
            ok = failed_at_event(r, call, event);
        }
        rdma_ack_cm_event(event); // frees its private data
        if (done)
            return ok;
    }
}

// The route decides which device is used.
static bool resolve_route(reader *r)
{
    const uint64_t start = now_ns();
    r->cm_channel = rdma_create_event_channel();
    if (r->cm_channel == nullptr)
        return failed("rdma_create_event_channel()", errno, "is rdma_ucm loaded, /dev/infiniband/rdma_cm there?");
    if (rdma_create_id(r->cm_channel, &r->id, nullptr, RDMA_PS_TCP) != 0)
        return failed("rdma_create_id(RDMA_PS_TCP)", errno);

    // How soon the transport gives up on a silent server: 8 attempts (retry_count 7) of
    // 4.096 us * 2^n each, in half the timeout. The CM's own choice can be 17 s and more.
    uint8_t ack_timeout = 1;
    while (ack_timeout < 31 &&
           8 * 4.096e-6 * static_cast<double>(uint64_t{2} << ack_timeout) <= static_cast<double>(r->opt.timeout) / 2)
        ++ack_timeout;
    if (rdma_set_option(r->id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &ack_timeout, sizeof ack_timeout) != 0 &&
        r->opt.verbose)
        remark(text("ACK timeout: left to the kernel (%s)", strerror(errno)));

    const int milliseconds = static_cast<int>(r->opt.timeout * 1000);
    auto *const source = r->source.ss_family != 0 ? reinterpret_cast<sockaddr *>(&r->source) : nullptr;
    std::string call = "rdma_resolve_addr(" + server_text(r) + ")";
    if (rdma_resolve_addr(r->id, source, reinterpret_cast<sockaddr *>(&r->server), milliseconds) != 0)
        return failed(call, errno,
                      errno == ENODEV ? "no RDMA device leads there; 'ip route get' names the interface" : "");
    if (!wait_for_event(r, RDMA_CM_EVENT_ADDR_RESOLVED, call))
        return false;
    call = "rdma_resolve_route(" + server_text(r) + ")";
    if (rdma_resolve_route(r->id, milliseconds) != 0)
        return failed(call, errno,
                      errno == ENODEV ? "no RDMA device leads there; 'ip route get' names the interface" : "");
    if (!wait_for_event(r, RDMA_CM_EVENT_ROUTE_RESOLVED, call))
        return false;
    if (r->id->verbs == nullptr)
        return failed(call, "the route has no RDMA device");
    const char *name = ibv_get_device_name(r->id->verbs->device);
    if (r->opt.device != nullptr && strcmp(name, r->opt.device) != 0)
        return failed(text("device %s", r->opt.device), text("the route to %s uses %s", r->opt.server, name));
    r->spent.connect = seconds_since(start);
    return true;
}

// P11: protection domain, completion channel and queue, and the queue pair, on the route's device.
static bool create_queue_pair(reader *r)
{
    ibv_context *const context = r->id->verbs;
    if (ibv_query_device(context, &r->device) != 0 || ibv_query_port(context, r->id->port_num, &r->port) != 0)
        return failed(text("ibv_query_port(%u)", r->id->port_num), errno);
    r->pd = ibv_alloc_pd(context);
    if (r->pd == nullptr)
        return failed("ibv_alloc_pd()", errno);
    r->completion_channel = ibv_create_comp_channel(context);
    if (r->completion_channel == nullptr)
        return failed("ibv_create_comp_channel()", errno);

    r->outstanding =
        static_cast<uint32_t>(std::min<int64_t>({r->opt.outstanding, r->device.max_qp_wr, r->device.max_cqe}));
    r->cq = ibv_create_cq(context, static_cast<int>(r->outstanding), nullptr, r->completion_channel, 0);
    if (r->cq == nullptr)
        return failed(text("ibv_create_cq(%u entries)", r->outstanding), errno,
                      memlock_hint(errno, r->outstanding * 64));

    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = r->cq;
    attributes.recv_cq = r->cq;
    attributes.cap = {.max_send_wr = r->outstanding,
                      .max_recv_wr = 1,
                      .max_send_sge = 1,
                      .max_recv_sge = 1,
                      .max_inline_data = sizeof(closing)}; // the closing message needs no registered memory
    if (rdma_create_qp(r->id, r->pd, &attributes) != 0)
        return failed(text("rdma_create_qp(RC, %u send work requests)", r->outstanding), errno,
                      "fewer, with --outstanding?");
    return true;
}

// P11: connects; the accept brings address, length, rkey and MD5.
static bool connect_to_server(reader *r)
{
    const uint64_t start = now_ns();
    const hello greeting = encode(hello{.magic = hello_magic, .version = handshake_version});
    rdma_conn_param request{};
    request.private_data = &greeting;
    request.private_data_len = sizeof greeting;
    // How many READs may be under way in the adapter: all it can. The server takes what its own can
    // answer. Left at 1, each READ waits for the last one's data: an eighth of the rate.
    request.initiator_depth = static_cast<uint8_t>(std::min(r->device.max_qp_init_rd_atom, 255));
    request.responder_resources = 0; // the server reads nothing here
    request.retry_count = 7;
    request.rnr_retry_count = 7; // for ever; the watchdog has a deadline
    const std::string call = "rdma_connect(" + server_text(r) + ")";
    if (rdma_connect(r->id, &request) != 0)
        return failed(call, errno);
    if (!wait_for_event(r, RDMA_CM_EVENT_ESTABLISHED, call, &r->cache))
        return false;
    r->connected = true;

    ibv_qp_init_attr unused{};
    const int error =
        ibv_query_qp(r->id->qp, &r->qp, IBV_QP_PATH_MTU | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT, &unused);
    if (error != 0)
        return failed("ibv_query_qp()", error);
    if (r->qp.max_rd_atomic == 0)
        return failed(call, "the server accepts no outstanding READ", "its responder_resources must be 1 at least");
    r->spent.connect += seconds_since(start);
    return true;
}

// P12: the local buffer, for the range that is asked for.
static bool register_buffer(reader *r)
{
    const auto cache_length = r->cache.length;
    if (r->opt.offset >= r->cache.length || r->opt.size > r->cache.length - r->opt.offset)
        return failed(text("--offset %zu --size %zu", r->opt.offset, r->opt.size),
                      text("beyond the cache, which has %zu bytes", cache_length));
    r->length = r->opt.size != 0 ? r->opt.size : r->cache.length - r->opt.offset;

    const uint64_t largest = std::min<uint64_t>(r->port.max_msg_sz, UINT32_MAX); // ibv_sge.length has 32 bits
    r->chunk = std::min({r->opt.chunk != 0 ? r->opt.chunk : r->length, r->length, largest});

    const uint64_t allocate_start = now_ns();
    r->buffer = allocate_buffer(r->length);
    if (r->buffer == nullptr)
        return false;
    memset(r->buffer, 0, r->length); // the pages have to exist before they are registered
    r->spent.allocate = seconds_since(allocate_start);

    int access = IBV_ACCESS_LOCAL_WRITE;
    if (r->id->verbs->device->transport_type == IBV_TRANSPORT_IWARP)
        access |= IBV_ACCESS_REMOTE_WRITE; // there the peer answers a READ by writing (RFC 5040)
    const uint64_t register_start = now_ns();
    r->mr = ibv_reg_mr(r->pd, r->buffer, r->length, access);
    if (r->mr == nullptr)
        return failed(text("ibv_reg_mr(%zu bytes)", r->length), errno, memlock_hint(errno, r->length));
    r->spent.registering = seconds_since(register_start);
    return true;
}

// ------------------------------------------------------------------------------ stage 3: the READ

// What the connection manager says meanwhile. False when the connection is over.
static bool still_connected(reader *r, const std::string &call)
{
    for (;;) {
        pollfd ready{.fd = r->cm_channel->fd, .events = POLLIN, .revents = 0};
        if (poll(&ready, 1, 0) <= 0)
            return true;
        rdma_cm_event *event = nullptr;
        if (rdma_get_cm_event(r->cm_channel, &event) != 0)
            return failed("rdma_get_cm_event()", errno);
        const bool over = event->event == RDMA_CM_EVENT_DISCONNECTED || event->event == RDMA_CM_EVENT_DEVICE_REMOVAL;
        if (over)
            failed_at_event(r, call, event);
        rdma_ack_cm_event(event);
        if (over) {
            r->connected = false;
            return false;
        }
    }
}

// Sleeps until the completion channel or the connection manager has something, 100 ms at most.
static bool sleep_on_channels(reader *r)
{
    if (!r->armed) { // poll, arm, poll again: a completion in between would be missed
        const int error = ibv_req_notify_cq(r->cq, 0);
        r->armed = error == 0;
        return r->armed || failed("ibv_req_notify_cq()", error);
    }
    pollfd ready[] = {{r->completion_channel->fd, POLLIN, 0}, {r->cm_channel->fd, POLLIN, 0}};
    if (poll(ready, 2, 100) < 0 && errno != EINTR)
        return failed("poll()", errno);
    if (ready[0].revents != 0) {
        ibv_cq *cq = nullptr;
        void *context = nullptr;
        if (ibv_get_cq_event(r->completion_channel, &cq, &context) != 0)
            return failed("ibv_get_cq_event()", errno);
        ibv_ack_cq_events(cq, 1);
        r->armed = false;
    }
    return true;
}

static const char *completion_hint(ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_RETRY_EXC_ERR: return "the server does not answer: it is gone, or the link is down";
    case IBV_WC_REM_ACCESS_ERR: return "the server's key, range or permission does not cover this READ";
    case IBV_WC_LOC_PROT_ERR: return "the local buffer is not registered for this";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "the server had no receive posted";
    case IBV_WC_WR_FLUSH_ERR: return "the connection broke before this one was carried out";
    default: return "";
    }
}

// Waits for at least one completion: by polling (P13), or asleep. Returns how many, 0 after an error.
static int wait_for_completions(reader *r, ibv_wc *completions, int capacity, uint64_t deadline,
                                const std::string &call)
{
    for (unsigned polls = 1;; ++polls) {
        const int count = ibv_poll_cq(r->cq, capacity, completions);
        if (count < 0) {
            failed("ibv_poll_cq()", "the completion queue is broken");
            return 0;
        }
        for (int i = 0; i < count; ++i) {
            if (completions[i].status == IBV_WC_SUCCESS)
                continue;
            failed(call,
                   text("%s (vendor error 0x%x)", ibv_wc_status_str(completions[i].status), completions[i].vendor_err),
                   completion_hint(completions[i].status));
            return 0;
        }
        if (count > 0)
            return count;
        if (r->opt.events && !sleep_on_channels(r))
            return 0;
        if (!r->opt.events && polls % 1024 != 0)
            continue; // the rest costs system calls
        if (interrupted) {
            failed(call, "interrupted");
            return 0;
        }
        if (!still_connected(r, call))
            return 0;
        if (now_ns() >= deadline) {
            failed(call, text("no progress for %zu s", r->opt.timeout),
                   "is the server alive, the link up? --timeout gives it longer");
            return 0;
        }
    }
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

// Reads the range once. Between the two looks at the clock (P14): posting, waiting, nothing else.
static bool read_once(reader *r, progress *bar)
{
    const uint64_t chunks = chunk_count(r->length, r->chunk);
    // Progress shows in completions, and a large work request takes its time: it gets an allowance
    // for its bytes, at a rate below that of any link.
    constexpr uint64_t slowest_bytes_per_second = 16 << 20;
    const uint64_t patience = r->opt.timeout * 1000000000u +
                              static_cast<uint64_t>(static_cast<double>(r->chunk) * 1e9 / slowest_bytes_per_second);
    ibv_wc completions[16];
    uint64_t posted = 0, completed = 0;

    const uint64_t start = now_ns();
    while (completed < chunks) {
        while (posted < chunks && posted - completed < r->outstanding)
            if (!post_read(r, posted++))
                return false;
        const int count = wait_for_completions(r, completions, 16, now_ns() + patience, "RDMA READ");
        if (count == 0)
            return failed(text("iteration %zu", r->latencies_ns.size() + 1),
                          text("%zu of %zu bytes had arrived", std::min(completed * r->chunk, r->length), r->length));
        completed += static_cast<unsigned>(count);
        show_progress(bar, r->latencies_ns.size() * chunks + completed);
    }
    const uint64_t end = now_ns();

    r->starts_ns.push_back(start);
    r->latencies_ns.push_back(end - start);
    return true;
}

// P17: as often as asked. Each iteration starts from zeroes, so what is verified in the end has come
// with the last one.
static bool read_cache(reader *r)
{
    progress bar{.label = "reading", .total = r->opt.iterations * chunk_count(r->length, r->chunk)};
    bool ok = true;
    for (uint64_t i = 0; ok && i < r->opt.iterations; ++i) {
        if (i > 0)
            memset(r->buffer, 0, r->length);
        ok = read_once(r, &bar);
    }
    end_progress(&bar);
    return ok;
}

// P15: against the MD5 that came in the handshake. The server's is that of the whole cache.
static bool verify(reader *r)
{
    r->verdict = verdict_unchecked;
    if (!r->opt.verify || r->length != r->cache.length)
        return true;
    const uint64_t start = now_ns();
    if (!md5_of(r->buffer, r->length, r->md5))
        return false;
    r->spent.hashing = seconds_since(start);
    r->verdict = memcmp(r->md5, r->cache.md5, md5_size) == 0 ? verdict_equal : verdict_different;
    return r->verdict == verdict_equal || failed("MD5 " + md5_text(r->md5), "the server's is " + md5_text(r->cache.md5),
                                                 "what arrived is not the cache; no output was written");
}

// Tells the server how it went, then leaves. The data is here and verified: if this fails, nothing is
// lost but a line in the server's log.
static void close_connection(reader *r)
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
    wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE; // P16: small, so without registered memory
    ibv_send_wr *refused = nullptr;
    const int error = ibv_post_send(r->id->qp, &wr, &refused);
    ibv_wc completion{};
    if (error != 0)
        failed("ibv_post_send(SEND)", error);
    else
        wait_for_completions(r, &completion, 1, now_ns() + r->opt.timeout * 1000000000u, "closing message");
    if (r->connected && rdma_disconnect(r->id) == 0)
        wait_for_event(r, RDMA_CM_EVENT_DISCONNECTED, "rdma_disconnect()");
    r->connected = false;
}

// ------------------------------------------------------------------------------ what is left of it

// Tells before the transfer what would fail after it.
static bool check_output(const char *option, const char *path)
{
    struct stat status {
    };
    if (path == nullptr)
        return true;
    const std::string call = text("%s %s", option, path);
    if (stat(path, &status) == 0) {
        if (!S_ISREG(status.st_mode))
            return failed(call, std::string(S_ISDIR(status.st_mode) ? "a folder" : "not a regular file"),
                          "leave the option out to write nothing");
        if (access(path, W_OK) != 0)
            return failed(call, errno);
    }
    const char *slash = strrchr(path, '/');
    const std::string folder = slash == nullptr ? "." : std::string(path, static_cast<size_t>(slash - path + 1));
    return access(folder.c_str(), W_OK | X_OK) == 0 || failed(call, errno);
}

// Under a temporary name in the same folder, renamed when it is complete: no file that looks right
// and is not.
static bool write_output(reader *r)
{
    if (r->opt.output == nullptr)
        return true;
    const uint64_t start = now_ns();
    char *resolved = realpath(r->opt.output, nullptr); // a symbolic link stays one
    const std::string path = resolved != nullptr ? resolved : r->opt.output;
    free(resolved);
    const std::string temporary = path + text(".%d.part", getpid());
    const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0)
        return failed("open(" + temporary + ")", errno);
    bool ok = true;
    progress bar{.label = "writing", .total = r->length};
    for (uint64_t done = 0; ok && done < r->length; show_progress(&bar, done)) {
        const ssize_t put = interrupted ? 0 : write(file, r->buffer + done, std::min(io_piece, r->length - done));
        if (interrupted)
            ok = failed("write(" + temporary + ")", "interrupted");
        else if (put < 0)
            ok = failed("write(" + temporary + ")", errno);
        else
            done += static_cast<uint64_t>(put);
    }
    end_progress(&bar);
    if (close(file) != 0 && ok)
        ok = failed("close(" + temporary + ")", errno);
    if (ok && rename(temporary.c_str(), path.c_str()) != 0)
        ok = failed("rename(" + temporary + ", " + path + ")", errno);
    if (!ok)
        unlink(temporary.c_str());
    r->spent.writing = seconds_since(start);
    return ok;
}

static void print_head(reader *r)
{
    char gid[INET6_ADDRSTRLEN] = "?";
    inet_ntop(AF_INET6, r->id->route.addr.addr.ibaddr.sgid.raw, gid, sizeof gid);
    const int mtu = 128 << r->qp.path_mtu; // IBV_MTU_256 is 1
    printf("server  %s, cache of %zu bytes\n", server_text(r).c_str(), r->cache.length);
    printf("device  %s, port %u, GID %s, MTU %d\n", ibv_get_device_name(r->id->verbs->device), r->id->port_num, gid,
           mtu);
    printf("reading %zu bytes at offset %zu: work requests of %zu bytes, %u outstanding, %s\n", r->length,
           r->opt.offset, r->chunk, r->outstanding, r->opt.events ? "completion events" : "polling");
    if (mtu < 4096 && r->port.link_layer == IBV_LINK_LAYER_ETHERNET)
        remark(text("MTU %d: 4096 needs a netdev MTU of 4200 at least on both sides (9000 is usual)", mtu));
    if (r->opt.verbose)
        remark(text("READ depth %u (device %d), ACK timeout 4.096 us * 2^%u, retries 7, max_msg_sz %u, max_qp_wr %d, "
                    "max_cqe %d",
                    r->qp.max_rd_atomic, r->device.max_qp_init_rd_atom, r->qp.timeout, r->port.max_msg_sz,
                    r->device.max_qp_wr, r->device.max_cqe));
}

static double gigabytes_per_second(const reader *r, const statistics &latency)
{
    return static_cast<double>(r->length) /
           static_cast<double>(std::max<uint64_t>(latency.median, 1)); // bytes/ns = 10^9 bytes/s
}

static void print_results(reader *r)
{
    const statistics t = statistics_of(r->latencies_ns);
    const double rate = gigabytes_per_second(r, t);
    printf("\n%12s %12s %14s %16s %14s %14s %14s %14s %9s %9s\n", "#bytes", "#iterations", "t_min[usec]",
           "t_median[usec]", "t_avg[usec]", "t_p99[usec]", "t_max[usec]", "t_stdev[usec]", "GB/s", "Gb/s");
    const auto us = [](uint64_t ns) { return static_cast<double>(ns) / 1e3; };
    printf("%12zu %12zu %14.3f %16.3f %14.3f %14.3f %14.3f %14.3f %9.3f %9.3f\n", r->length, r->latencies_ns.size(),
           us(t.min), us(t.median), t.mean / 1e3, us(t.p99), us(t.max), t.stdev / 1e3, rate, rate * 8);
    if (r->latencies_ns.size() < 100)
        printf("(fewer than 100 samples: t_p99 is t_max)\n");
    printf("(GB = 10^9 bytes, Gb = 10^9 bits; rates of the median)\n");
    printf("\nnot in these times: connecting %.6f s, allocating %.6f s, registering %.6f s, hashing %.6f s, writing "
           "%.6f s\n",
           r->spent.connect, r->spent.allocate, r->spent.registering, r->spent.hashing, r->spent.writing);
    if (r->verdict == verdict_equal)
        printf("MD5     %s, equal to the server's\n", md5_text(r->md5).c_str());
    else if (!r->opt.verify)
        printf("MD5     not checked (--no-verify)\n");
    else
        printf("MD5     not checked: a part cannot be compared with the MD5 of the whole cache\n");
}

static bool close_report(FILE *file, const char *option, const char *path)
{
    const bool bad = ferror(file) != 0;
    return (fclose(file) == 0 && !bad) || failed(text("%s %s", option, path), errno);
}

static bool write_csv(const reader *r)
{
    if (r->opt.csv == nullptr)
        return true;
    FILE *file = fopen(r->opt.csv, "w");
    if (file == nullptr)
        return failed(text("--csv %s", r->opt.csv), errno);
    fputs("index,start_ns,latency_ns,bytes\n", file);
    for (size_t i = 0; i < r->latencies_ns.size(); ++i)
        fprintf(file, "%zu,%zu,%zu,%zu\n", i, r->starts_ns[i] - r->starts_ns[0], r->latencies_ns[i], r->length);
    return close_report(file, "--csv", r->opt.csv);
}

static bool write_json(const reader *r)
{
    if (r->opt.json == nullptr)
        return true;
    FILE *file = fopen(r->opt.json, "w");
    if (file == nullptr)
        return failed(text("--json %s", r->opt.json), errno);
    const statistics t = statistics_of(r->latencies_ns);
    static const char *const verdicts[] = {"unchecked", "equal", "different"};
    fprintf(file, "{\"version\": \"%s\", \"device\": \"%s\", \"port\": %u, \"mtu\": %d, \"read_depth\": %u,\n",
            program_version, ibv_get_device_name(r->id->verbs->device), r->id->port_num, 128 << r->qp.path_mtu,
            r->qp.max_rd_atomic);
    fprintf(file,
            " \"cache_bytes\": %zu, \"offset\": %zu, \"bytes\": %zu, \"chunk\": %zu, \"outstanding\": %u, \"events\": "
            "%s,\n",
            r->cache.length, r->opt.offset, r->length, r->chunk, r->outstanding, r->opt.events ? "true" : "false");
    fprintf(file,
            " \"iterations\": %zu, \"min_ns\": %zu, \"median_ns\": %zu, \"mean_ns\": %.1f, \"p99_ns\": %zu, "
            "\"max_ns\": %zu, \"stdev_ns\": %.1f,\n",
            r->latencies_ns.size(), t.min, t.median, t.mean, t.p99, t.max, t.stdev);
    fprintf(file,
            " \"gigabytes_per_second\": %.6f, \"connect_s\": %.9f, \"allocate_s\": %.9f, \"register_s\": %.9f, "
            "\"hash_s\": %.9f, \"write_s\": %.9f,\n",
            gigabytes_per_second(r, t), r->spent.connect, r->spent.allocate, r->spent.registering, r->spent.hashing,
            r->spent.writing);
    fprintf(file, " \"md5\": \"%s\", \"server_md5\": \"%s\", \"verdict\": \"%s\"}\n",
            r->verdict != verdict_unchecked ? md5_text(r->md5).c_str() : "", md5_text(r->cache.md5).c_str(),
            verdicts[r->verdict]);
    return close_report(file, "--json", r->opt.json);
}

// P34: what was made, in reverse order.
static void free_everything(reader *r)
{
    if (r->connected)
        rdma_disconnect(r->id);
    if (r->mr != nullptr)
        ibv_dereg_mr(r->mr);
    if (r->buffer != nullptr)
        munmap(r->buffer, r->length);
    if (r->id != nullptr && r->id->qp != nullptr)
        rdma_destroy_qp(r->id);
    if (r->cq != nullptr)
        ibv_destroy_cq(r->cq);
    if (r->completion_channel != nullptr)
        ibv_destroy_comp_channel(r->completion_channel);
    if (r->pd != nullptr)
        ibv_dealloc_pd(r->pd);
    if (r->id != nullptr)
        rdma_destroy_id(r->id);
    if (r->cm_channel != nullptr)
        rdma_destroy_event_channel(r->cm_channel);
    if (r->devices != nullptr)
        ibv_free_device_list(r->devices);
}

int main(int argc, char **argv)
{
    reader r{};
    r.opt = parse_arguments(argc, argv);
    struct sigaction action {
    }; // without SA_RESTART: waits end with EINTR
    action.sa_handler = [](int) { interrupted = 1; };
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);

    bool ok = check_output("-o", r.opt.output) && check_output("--csv", r.opt.csv) &&
              check_output("--json", r.opt.json) && find_addresses(&r) && resolve_route(&r) && create_queue_pair(&r) &&
              connect_to_server(&r) && register_buffer(&r);
    if (ok) {
        print_head(&r);
        ok = read_cache(&r);
    }
    if (ok) {
        ok = verify(&r);
        close_connection(&r);
        ok = ok && write_output(&r);
        if (ok || r.verdict == verdict_different) {
            print_results(&r);
            const bool csv = write_csv(&r), json = write_json(&r);
            ok = ok && csv && json;
        }
    }
    free_everything(&r);
    return r.verdict == verdict_different ? exit_mismatch : ok ? exit_success : exit_failure;
}
