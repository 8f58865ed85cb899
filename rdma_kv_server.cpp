// rdma_kv_server: holds a KV cache in registered memory, for readers to fetch by one-sided RDMA READ.
//
// Build:  g++ -std=c++20 -Wall -Wextra -O2 rdma_kv_server.cpp -o rdma_kv_server -libverbs -lrdmacm -lcrypto
//
// The dialogue, by rdma_cm and one reliable connection (RC) for each reader:
//   reader  connect request   magic, version
//   server  accept            magic, version, address, length, MD5, rkey     (or a reject with the reason)
//   reader  RDMA READ ...     served by the adapter: this program does not see them
//   reader  SEND              what it read, how long that took, whether the MD5 agreed
//   reader  disconnect
//
// A reader that is gone is noticed by an RDMA WRITE of no bytes that it gets every two seconds: its
// adapter answers, or nobody does.
//
// Left out on purpose: encryption and authentication (RDMA has neither; --allow and --isolate keep
// out what they can), changes of the cache while it is served, and more than one device.
#include <fcntl.h>
#include <getopt.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/signalfd.h>
#include <sys/stat.h>

#include <csignal>
#include <map>
#include <memory>
#include <vector>

#include "common.hpp"

struct options {
    uint16_t port = 12345;
    const char *file = nullptr; // the cache, or
    uint64_t size = 0;          // the length of a synthetic one
    const char *bind = nullptr;
    const char *device = nullptr;
    uint64_t readers = 0;       // stop after so many were served; 0: never
    std::vector<network> allow; // the readers' addresses; empty: any
    bool isolate = false;       // a memory window for each reader
    bool verbose = false;
};

constexpr uint64_t second_ns = 1000000000;
constexpr uint64_t probe_interval_ns = 2 * second_ns;    // between two signs of life of a reader
constexpr uint64_t connect_deadline_ns = 10 * second_ns; // from the accept until the connection stands

// The work requests of a reader's queue pair. Each can be under way once.
enum request : uint64_t { receive_closing, bind_window, probe };

// A reader, from its connect request until it is gone.
struct reader {
    uint64_t number; // never used again
    std::string address;
    rdma_cm_id *id; // owns the queue pair
    ibv_mr *closing_mr;
    closing message; // its closing message arrives here
    bool closed;     // it has arrived
    ibv_mw *window;  // --isolate: what it may read, by its queue pair alone
    bool window_bound;
    uint32_t rkey;     // of the window, or of the cache
    bool connected;    // the connection stands
    uint64_t since_ns; // of the accept; once connected, of the last sign of life
    bool probing;      // a probe is under way
    const char *lost;  // why it is taken for gone; nullptr: it is not
};

// A connect request, whose event is gone.
struct connect_request {
    rdma_cm_id *id;
    rdma_conn_param parameters;
    uint8_t private_data[256];
};

// wr_id: whose work request, and which.
static uint64_t work_request(const reader *r, request which) { return r->number << 2 | which; }

struct server {
    options opt;

    ibv_device **devices;
    rdma_event_channel *cm_channel;
    rdma_cm_id *listener;
    ibv_context **contexts; // of librdmacm, one for each device
    ibv_context *context;
    ibv_device_attr device;
    ibv_pd *pd;

    uint8_t *cache;
    uint64_t length;
    uint8_t md5[md5_size];
    ibv_mr *cache_mr;

    ibv_comp_channel *completion_channel;
    ibv_cq *cq;
    size_t most_readers; // at a time

    int signals; // signalfd
    std::map<uint64_t, std::unique_ptr<reader>> readers;
    std::vector<connect_request> unanswered; // until their port is active again
    uint64_t readers_seen, readers_served;
    uint64_t looked_ns;    // when the readers were last looked after
    uint64_t packets_sent; // by then, on SoftRoCE
    bool stop, broken;
};

static void print_usage(FILE *stream)
{
    fputs("usage: rdma_kv_server [-p PORT] -f FILE | --size N\n"
          "Serves a KV cache to readers by RDMA READ.\n\n"
          "  -p, --port PORT      port of rdma_cm (default 12345)\n"
          "  -f, --file FILE      the cache\n"
          "      --size N         a synthetic cache of N bytes instead (K, M, G, T: powers of 1024)\n"
          "  -b, --bind ADDRESS   listen on this address (IPv4, IPv6 or name) and its device\n"
          "  -d, --device NAME    RDMA device (default: the address's, else the first active one)\n"
          "      --readers N      exit after N readers have been served, disconnecting others\n"
          "      --allow CIDR     only readers from this network, as 192.168.77.0/24; may be repeated\n"
          "      --isolate        each reader gets a key of its own, worthless to others and once it has left\n"
          "  -v, --verbose        connections and limits on stderr\n"
          "  -h, --help           this text\n"
          "      --version        the version\n\n"
          "Exit status: 0 after SIGINT, SIGTERM or --readers, 1 run-time error, 2 usage.\n",
          stream);
}

static options parse_arguments(int argc, char **argv)
{
    // Capital letters: options that have a long form only.
    // clang-format off
    static const option long_options[] = {
        {"port", required_argument, nullptr, 'p'},      {"file", required_argument, nullptr, 'f'},
        {"size", required_argument, nullptr, 'S'},      {"bind", required_argument, nullptr, 'b'},
        {"device", required_argument, nullptr, 'd'},    {"readers", required_argument, nullptr, 'R'},
        {"allow", required_argument, nullptr, 'A'},     {"isolate", no_argument, nullptr, 'I'},
        {"verbose", no_argument, nullptr, 'v'},         {"help", no_argument, nullptr, 'h'},
        {"version", no_argument, nullptr, 'V'},         {nullptr, 0, nullptr, 0}};
    // clang-format on
    options opt;
    for (int letter; (letter = getopt_long(argc, argv, "p:f:b:d:vh", long_options, nullptr)) != -1;) {
        switch (letter) {
        case 'p': number_option("--port", optarg, 1, 65535, &opt.port); break;
        case 'f': opt.file = optarg; break;
        case 'S': size_option("--size", optarg, 1, &opt.size); break;
        case 'b': opt.bind = optarg; break;
        case 'd': opt.device = optarg; break;
        case 'R': number_option("--readers", optarg, 1, UINT64_MAX, &opt.readers); break;
        case 'A': opt.allow.push_back(network_option("--allow", optarg)); break;
        case 'I': opt.isolate = true; break;
        case 'v': opt.verbose = true; break;
        case 'h': print_usage(stdout); exit(exit_success);
        case 'V':
            printf("rdma_kv_server %s (handshake version %u)\n", program_version, handshake_version);
            exit(exit_success);
        default: print_usage(stderr); exit(exit_usage); // getopt_long has said what is wrong
        }
    }
    if (optind < argc) usage_error(text("unexpected argument '%s'; did you mean -f %s?", argv[optind], argv[optind]));
    if ((opt.file != nullptr) == (opt.size != 0)) usage_error("give the cache as one of -f FILE and --size N");
    return opt;
}

// --------------------------------------------------------------------------------------- stage 2

// P4, first half: what RDMA devices are there?
static bool list_devices(server *s)
{
    int count = 0;
    s->devices = ibv_get_device_list(&count);
    return (s->devices != nullptr && count > 0) || no_rdma_device();
}

// Takes the address and the port before anything expensive: "port in use" is told at once. An
// address given by -b also decides the device.
static bool claim_port(server *s)
{
    s->cm_channel = rdma_create_event_channel();
    if (s->cm_channel == nullptr)
        return failed("rdma_create_event_channel()", errno, "is rdma_ucm loaded, /dev/infiniband/rdma_cm there?");
    if (rdma_create_id(s->cm_channel, &s->listener, nullptr, RDMA_PS_TCP) != 0)
        return failed("rdma_create_id(RDMA_PS_TCP)", errno);

    // Any address, IPv4 too whatever net.ipv6.bindv6only says; or the one that is asked for.
    sockaddr_storage address{};
    int ipv6_only = 0;
    address.ss_family = access("/proc/net/if_inet6", F_OK) == 0 ? AF_INET6 : AF_INET;
    rdma_set_option(s->listener, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &ipv6_only, sizeof ipv6_only);
    set_port(&address, s->opt.port);
    if (s->opt.bind != nullptr && !find_address(s->opt.bind, s->opt.port, AF_UNSPEC, &address)) return false;

    auto *const socket_address = reinterpret_cast<sockaddr *>(&address);
    const std::string call = "rdma_bind_addr(" + address_text(socket_address) + ")";
    if (is_loopback(&address))
        return failed(call, "a loopback address, over which RDMA never connects",
                      "leave -b out, or give it the address of an RDMA device");
    if (rdma_bind_addr(s->listener, socket_address) == 0) return true;
    // EADDRNOTAVAIL is an address from elsewhere, or a port in use when a wildcard is involved.
    const int error = errno;
    std::string device;
    set_port(&address, 0);
    if (error == EADDRINUSE || (error == EADDRNOTAVAIL && can_bind(socket_address, &device)))
        return failed(call, "the port is in use by another program",
                      "choose another with -p; 'rdma resource show cm_id' shows who has it");
    return failed(call, error,
                  error == EACCES ? "ports below 1024 are for root" : "no RDMA device here has this address");
}

static bool port_is_active(ibv_context *context, uint8_t port)
{
    ibv_port_attr attributes{};
    return ibv_query_port(context, port, &attributes) == 0 && attributes.state == IBV_PORT_ACTIVE;
}

static bool has_active_port(ibv_context *context)
{
    ibv_device_attr device{};
    if (ibv_query_device(context, &device) != 0) return false;
    for (uint8_t port = 1; port <= device.phys_port_cnt; ++port)
        if (port_is_active(context, port)) return true;
    return false;
}

// P4, second half: the device, its context and a protection domain on it. The context is librdmacm's:
// a connection's queue pair and its PD must belong to the same one (rdma_create_qp(3)).
static bool open_device(server *s)
{
    std::string wanted = s->opt.device != nullptr ? s->opt.device : "";
    if (!wanted.empty() && !device_is_there(s->devices, wanted.c_str())) return false;
    if (s->listener->verbs != nullptr) {
        const std::string bound = ibv_get_device_name(s->listener->verbs->device);
        if (!wanted.empty() && bound != wanted)
            return failed(text("-b %s -d %s", s->opt.bind, s->opt.device), "that address belongs to device " + bound);
        wanted = bound;
    }
    sockaddr_storage unused{};
    if (wanted.empty()) // the one that a reader on this machine finds, too
        find_local_address(AF_UNSPEC, &wanted, &unused);

    s->contexts = rdma_get_devices(nullptr);
    if (s->contexts == nullptr) return failed("rdma_get_devices()", errno);
    for (ibv_context **context = s->contexts; *context != nullptr && s->context == nullptr; ++context)
        if (wanted.empty() ? has_active_port(*context) : wanted == ibv_get_device_name((*context)->device))
            s->context = *context;
    if (s->context == nullptr)
        return failed("rdma_get_devices()", wanted.empty() ? "none has an active port" : "no device " + wanted,
                      "is the link up? ibv_devinfo shows the state");
    if (!has_active_port(s->context)) remark("device " + wanted + " has no active port: no reader can reach it now");
    const int error = ibv_query_device(s->context, &s->device);
    if (error != 0) return failed("ibv_query_device()", error);
    if (s->opt.isolate &&
        (s->device.device_cap_flags & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)) == 0)
        return failed("--isolate",
                      text("device %s has no type 2 memory windows", ibv_get_device_name(s->context->device)),
                      "without it readers share one key, as README.md says under Security");

    s->pd = ibv_alloc_pd(s->context);
    return s->pd != nullptr || failed("ibv_alloc_pd()", errno);
}

static bool read_cache_file(server *s)
{
    const int file = open(s->opt.file, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return failed(text("open(%s)", s->opt.file), errno,
                      errno == ENOENT ? "scripts/make_kv_cache.sh makes a test cache" : "");
    struct stat status = {};
    bool ok = fstat(file, &status) == 0 || failed(text("fstat(%s)", s->opt.file), errno);
    if (ok && !S_ISREG(status.st_mode)) ok = failed(text("open(%s)", s->opt.file), "not a regular file");
    if (ok && status.st_size == 0)
        ok = failed(text("open(%s)", s->opt.file), "the file is empty: there is nothing to serve");
    if (ok) {
        s->length = static_cast<uint64_t>(status.st_size);
        s->cache = allocate_buffer(s->length);
        ok = s->cache != nullptr;
    }
    progress bar{.label = "loading", .total = s->length};
    for (uint64_t done = 0; ok && done < s->length; show_progress(&bar, done)) {
        const ssize_t got = read(file, s->cache + done, std::min(io_piece, s->length - done));
        if (interrupted)
            ok = failed(text("read(%s)", s->opt.file), "interrupted");
        else if (got <= 0)
            ok = got < 0 ? failed(text("read(%s)", s->opt.file), errno)
                         : failed(text("read(%s)", s->opt.file), "the file became shorter while it was loaded");
        else
            done += static_cast<uint64_t>(got);
    }
    end_progress(&bar);
    close(file);
    return ok;
}

// A synthetic cache: every 8-byte word depends on its position (the mixing steps of splitmix64), so
// that a byte from elsewhere cannot pass for the right one.
static bool make_cache(server *s)
{
    s->length = s->opt.size;
    s->cache = allocate_buffer(s->length);
    if (s->cache == nullptr) return false;
    progress bar{.label = "filling", .total = s->length};
    for (uint64_t at = 0; at < s->length && !interrupted; at += sizeof(uint64_t)) {
        uint64_t word = (at + 1) * 0x9e3779b97f4a7c15u;
        word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
        word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
        word = htole64(word ^ (word >> 31));
        memcpy(s->cache + at, &word, std::min(sizeof word, s->length - at));
        if (at % io_piece == 0) show_progress(&bar, at);
    }
    end_progress(&bar);
    return interrupted == 0 || failed("filling", "interrupted");
}

// P5: the cache in memory, and that memory registered for remote reading.
static bool load_and_register_cache(server *s)
{
    const uint64_t load_start = now_ns();
    if (!(s->opt.file != nullptr ? read_cache_file(s) : make_cache(s))) return false;
    const double loading = seconds_since(load_start);

    const uint64_t hash_start = now_ns();
    if (!md5_of(s->cache, s->length, s->md5)) return false;
    const double hashing = seconds_since(hash_start);

    // With --isolate nobody can reach it but through a window.
    const int access = IBV_ACCESS_LOCAL_WRITE | (s->opt.isolate ? IBV_ACCESS_MW_BIND : IBV_ACCESS_REMOTE_READ);
    const uint64_t register_start = now_ns();
    s->cache_mr = ibv_reg_mr(s->pd, s->cache, s->length, access);
    if (s->cache_mr == nullptr)
        return failed(text("ibv_reg_mr(%zu bytes)", s->length), errno, memlock_hint(errno, s->length));

    printf("cache     %zu bytes, MD5 %s\n", s->length, md5_text(s->md5).c_str());
    printf("prepared  loading %.3f s, hashing %.3f s, registering %.3f s\n", loading, hashing,
           seconds_since(register_start));
    return true;
}

// P6: one completion queue for all readers. Invariant: a reader has at most two completions here, of
// its receive and of a probe or bind; so may one that has left. So four times most_readers fit.
static bool create_completion_queue(server *s)
{
    s->completion_channel = ibv_create_comp_channel(s->context);
    if (s->completion_channel == nullptr) return failed("ibv_create_comp_channel()", errno);
    const int depth = std::min(4096, s->device.max_cqe);
    s->cq = ibv_create_cq(s->context, depth, nullptr, s->completion_channel, 0);
    if (s->cq == nullptr) return failed(text("ibv_create_cq(%d entries)", depth), errno);
    s->most_readers = static_cast<size_t>(s->opt.isolate ? std::min(depth / 4, s->device.max_mw) : depth / 4);
    const int error = ibv_req_notify_cq(s->cq, 0);
    return error == 0 || failed("ibv_req_notify_cq()", error);
}

// P8: from here on readers may connect.
static bool listen_for_readers(server *s)
{
    if (rdma_listen(s->listener, 128) != 0)
        return failed("rdma_listen(" + address_text(rdma_get_local_addr(s->listener)) + ")", errno);
    printf("listening on %s, device %s\n", address_text(rdma_get_local_addr(s->listener)).c_str(),
           ibv_get_device_name(s->context->device));
    return true;
}

// ------------------------------------------------------------------------------ one reader's visit

static void refuse(rdma_cm_id *id, const std::string &reason)
{
    remark("reader " + address_text(rdma_get_peer_addr(id)) + " refused: " + reason);
    refusal message{.magic = refusal_magic, .version = handshake_version, .reason = {}};
    snprintf(message.reason, sizeof message.reason, "%s", reason.c_str());
    message = encode(message);
    if (rdma_reject(id, &message, sizeof message) != 0) failed("rdma_reject()", errno);
}

// Why this connect request cannot be served; "" when it can. READs are refused by the transport when
// their requester may have none outstanding: a depth of 0 is better told here.
static std::string objection(const server *s, const rdma_cm_id *id, const rdma_conn_param *request)
{
    const sockaddr *const address = &id->route.addr.dst_addr;
    const auto covers = [=](const network &allowed) { return contains(allowed, address); };
    if (!s->opt.allow.empty() && std::none_of(s->opt.allow.begin(), s->opt.allow.end(), covers))
        return "your address, " + address_text(address) + ", is not allowed here (--allow)";
    hello greeting{};
    std::string wrong = decode(request->private_data, request->private_data_len, hello_magic, &greeting);
    if (!wrong.empty()) return wrong;
    if (id->verbs != s->context)
        return text("the cache is on device %s, this connection arrives on %s; -d or -b choose the server's",
                    ibv_get_device_name(s->context->device),
                    id->verbs != nullptr ? ibv_get_device_name(id->verbs->device) : "none");
    if (request->responder_resources == 0 && id->verbs->device->transport_type != IBV_TRANSPORT_IWARP)
        return "initiator depth 0: such a reader cannot read";
    if (s->readers.size() >= s->most_readers)
        return text("busy: %zu readers are connected, the most this server takes", s->most_readers);
    return "";
}

// P7: the reader's queue pair, and the one receive for its closing message.
static bool create_queue_pair(server *s, reader *r)
{
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = s->cq;
    attributes.recv_cq = s->cq;
    attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    if (rdma_create_qp(r->id, s->pd, &attributes) != 0)
        return failed("rdma_create_qp(RC)", errno, errno == EINVAL ? "has the reader given up meanwhile?" : "");

    const int access = IBV_ACCESS_LOCAL_WRITE; // a variable: clang dislikes what the macro does with an enumerator
    r->closing_mr = ibv_reg_mr(s->pd, &r->message, sizeof r->message, access);
    if (r->closing_mr == nullptr)
        return failed(text("ibv_reg_mr(%zu bytes)", sizeof r->message), errno, memlock_hint(errno, sizeof r->message));
    ibv_sge piece{
        .addr = reinterpret_cast<uintptr_t>(&r->message), .length = sizeof r->message, .lkey = r->closing_mr->lkey};
    ibv_recv_wr receive{.wr_id = work_request(r, receive_closing), .next = nullptr, .sg_list = &piece, .num_sge = 1};
    ibv_recv_wr *refused = nullptr;
    const int error = ibv_post_recv(r->id->qp, &receive, &refused);
    return error == 0 || failed("ibv_post_recv()", error);
}

static bool move_queue_pair(reader *r, ibv_qp_state state)
{
    ibv_qp_attr attributes{};
    int mask = 0;
    attributes.qp_state = state;
    if (rdma_init_qp_attr(r->id, &attributes, &mask) != 0) return failed("rdma_init_qp_attr()", errno);
    const int error = ibv_modify_qp(r->id->qp, &attributes, mask);
    return error == 0 || failed(text("ibv_modify_qp(state %d)", state), error);
}

static void poll_completions(server *s);

// --isolate: a type 2 window over the cache, for READ by this queue pair alone. It has to stand before
// the reader is told of it, and a bind can be posted from RTS on only: so the queue pair is taken there
// here, before rdma_accept.
static bool give_window(server *s, reader *r)
{
    if (!move_queue_pair(r, IBV_QPS_INIT) || !move_queue_pair(r, IBV_QPS_RTR) || !move_queue_pair(r, IBV_QPS_RTS))
        return false;
    r->window = ibv_alloc_mw(s->pd, IBV_MW_TYPE_2);
    if (r->window == nullptr) return failed("ibv_alloc_mw(type 2)", errno);
    r->rkey = ibv_inc_rkey(r->window->rkey); // a bind of type 2 brings its key along
    ibv_send_wr wr{};
    wr.wr_id = work_request(r, bind_window);
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw.mw = r->window;
    wr.bind_mw.rkey = r->rkey;
    wr.bind_mw.bind_info = {.mr = s->cache_mr,
                            .addr = reinterpret_cast<uintptr_t>(s->cache),
                            .length = s->length,
                            .mw_access_flags = IBV_ACCESS_REMOTE_READ};
    ibv_send_wr *refused = nullptr;
    const int error = ibv_post_send(r->id->qp, &wr, &refused);
    if (error != 0) return failed("ibv_post_send(BIND_MW)", error);
    const uint64_t deadline = now_ns() + second_ns; // it is local: microseconds
    while (!r->window_bound && r->lost == nullptr && now_ns() < deadline)
        poll_completions(s);
    return r->window_bound || failed("BIND_MW", r->lost != nullptr ? r->lost : "no completion within a second");
}

static void free_reader(server *s, reader *r)
{
    if (r->window != nullptr) ibv_dealloc_mw(r->window); // its key is void from here on
    if (r->id->qp != nullptr) rdma_destroy_qp(r->id);
    if (r->closing_mr != nullptr) ibv_dereg_mr(r->closing_mr);
    rdma_destroy_id(r->id);
    s->readers.erase(r->number); // deletes r
}

// While it is down nobody is answered, and no visit ends: on SoftRoCE a connection message that cannot leave makes
// this node deaf to all others (docs/RELIABILITY.md).
static bool link_is_up(const rdma_cm_id *id) { return id->verbs == nullptr || port_is_active(id->verbs, id->port_num); }

// P8, P9: takes a connection and tells the reader where the cache is.
static void accept_reader(server *s, rdma_cm_id *id, const rdma_conn_param *request)
{
    const std::string reason = objection(s, id, request);
    if (!reason.empty()) {
        refuse(id, reason);
        rdma_destroy_id(id);
        return;
    }
    const uint64_t number = ++s->readers_seen;
    reader *const r = (s->readers[number] = std::make_unique<reader>()).get();
    r->number = number;
    r->address = address_text(rdma_get_peer_addr(id));
    r->id = id;
    r->since_ns = now_ns();
    r->rkey = s->cache_mr->rkey;
    id->context = r;
    // A lost probe is repeated after 4.096 us * 2^17, 0.5 s. Without this it would be the reader's choice, as
    // the number of times is (rdma_accept(3)). Old kernels refuse.
    uint8_t ack_timeout = 17;
    rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &ack_timeout, sizeof ack_timeout);
    if (!create_queue_pair(s, r) || (s->opt.isolate && !give_window(s, r))) {
        refuse(id, "the server could not make its side of the connection");
        free_reader(s, r);
        return;
    }

    offer message{.magic = offer_magic,
                  .version = handshake_version,
                  .address = reinterpret_cast<uintptr_t>(s->cache),
                  .length = s->length,
                  .md5 = {},
                  .rkey = r->rkey,
                  .reserved = 0};
    memcpy(message.md5, s->md5, md5_size);
    message = encode(message);

    rdma_conn_param answer{};
    answer.private_data = &message;
    answer.private_data_len = sizeof message;
    // How many READs of the reader this side answers at a time: what it asks for, as far as the device
    // can. librdmacm takes the smaller of the two for RDMA_MAX_RESP_RES.
    answer.responder_resources = RDMA_MAX_RESP_RES;
    answer.initiator_depth = RDMA_MAX_INIT_DEPTH; // not used: this side reads nothing
    answer.rnr_retry_count = 7; // of the reader's SEND, without end: its watchdog ends it (rdma_accept(3))
    ibv_qp *const queue_pair = id->qp;
    answer.qp_num = queue_pair->qp_num;
    if (s->opt.isolate) id->qp = nullptr; // rdma_accept would take it to RTR and RTS, where it is already
    const int result = rdma_accept(id, &answer);
    id->qp = queue_pair;
    if (result != 0) {
        failed("rdma_accept(" + r->address + ")", errno);
        refuse(id, "the server could not accept");
        free_reader(s, r);
        return;
    }
    if (s->opt.verbose) remark("reader " + r->address + " accepted");
}

static void answer_requests(server *s)
{
    std::erase_if(s->unanswered, [s](connect_request &request) {
        if (!link_is_up(request.id)) return false;
        request.parameters.private_data = request.private_data;
        accept_reader(s, request.id, &request.parameters);
        return true;
    });
}

// Logs what a reader says of its visit, in a message of so many bytes.
static void take_closing_message(reader *r, size_t length)
{
    static const char *const verdicts[] = {"not checked", "equal", "DIFFERENT"};
    closing message{};
    std::string wrong = decode(&r->message, length, closing_magic, &message);
    if (wrong.empty() && message.verdict > verdict_different) wrong = text("verdict %u", message.verdict);
    r->closed = wrong.empty();
    if (r->closed)
        printf("reader %s: %zu bytes x %zu, median %.3f us, MD5 %s\n", r->address.c_str(), message.bytes,
               message.iterations, static_cast<double>(message.median_ns) / 1e3, verdicts[message.verdict]);
    else
        remark("reader " + r->address + ": closing message not understood: " + wrong);
}

// For a channel that poll() called ready: it may have been woken for nothing, or the device is gone.
static void give_up_on_error(server *s, const char *call)
{
    if (errno == EAGAIN || errno == EINTR) return;
    failed(call, errno, "was the device removed?");
    s->stop = s->broken = true;
}

// Of a failed completion only wr_id, status, qp_num and vendor_err are valid (ibv_poll_cq(3)).
static void take_completion(reader *r, request which, const ibv_wc *completion)
{
    const bool ok = completion->status == IBV_WC_SUCCESS;
    switch (which) {
    case receive_closing: // flushed when the queue pair broke: the next probe tells
        if (ok)
            take_closing_message(r, completion->byte_len);
        else if (completion->status != IBV_WC_WR_FLUSH_ERR)
            remark("reader " + r->address + ": receive failed: " + ibv_wc_status_str(completion->status));
        break;
    case bind_window:
        r->window_bound = ok;
        if (!ok) r->lost = ibv_wc_status_str(completion->status);
        break;
    case probe:
        r->probing = false;
        r->since_ns = now_ns();
        if (!ok) r->lost = completion->status == IBV_WC_WR_FLUSH_ERR ? "broke its connection" : "no longer answers,";
        break;
    }
}

// P10: takes what the completion queue has.
static void poll_completions(server *s)
{
    ibv_wc completions[16];
    for (int count; (count = ibv_poll_cq(s->cq, 16, completions)) != 0;) {
        if (count < 0) {
            s->stop = s->broken = true;
            failed("ibv_poll_cq()", "the completion queue is broken");
            return;
        }
        for (int i = 0; i < count; ++i) {
            const auto found = s->readers.find(completions[i].wr_id >> 2);
            if (found != s->readers.end()) // else of a reader that has left
                take_completion(found->second.get(), static_cast<request>(completions[i].wr_id & 3), &completions[i]);
        }
    }
}

// After an event on the channel: poll, arm, poll again, or a completion in between would be missed.
static void handle_completions(server *s)
{
    ibv_cq *cq = nullptr;
    void *context = nullptr;
    if (ibv_get_cq_event(s->completion_channel, &cq, &context) != 0) {
        give_up_on_error(s, "ibv_get_cq_event()");
        return;
    }
    ibv_ack_cq_events(cq, 1);
    poll_completions(s);
    const int error = ibv_req_notify_cq(s->cq, 0);
    if (error != 0) {
        s->stop = s->broken = true;
        failed("ibv_req_notify_cq()", error);
    }
    poll_completions(s);
}

// The reader has left, or is to leave: now, or when it can be told (look_after_readers). Its queue pair goes to
// the error state.
static void end_visit(server *s, reader *r, const char *how)
{
    r->lost = how;
    if (!s->stop && !link_is_up(r->id)) return;
    rdma_disconnect(r->id); // fails when the connection never stood
    poll_completions(s);    // the closing message may be there already
    if (!r->closed)
        printf("reader %s: %s without a closing message\n", r->address.c_str(), how);
    else
        ++s->readers_served;
    free_reader(s, r);
    if (s->opt.readers != 0 && s->readers_served >= s->opt.readers) s->stop = true;
}

// An RDMA WRITE of no bytes: the other side's adapter checks neither address nor key (IB specification,
// C9-88) and acknowledges it, without the program there.
static void post_probe(reader *r)
{
    ibv_send_wr wr{};
    wr.wr_id = work_request(r, probe);
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr *refused = nullptr;
    r->probing = ibv_post_send(r->id->qp, &wr, &refused) == 0;
    if (!r->probing) r->lost = "broke its connection";
}

// SoftRoCE sends a probe only behind the READs' data that is under way, and when the link goes down
// meanwhile it breaks the connection, which would have outlived that. While it sends more than 1,000
// packets a second its readers are alive anyhow.
static bool is_busy_in_software(server *s)
{
    uint64_t packets = 0;
    const std::string path = std::string(s->context->device->ibdev_path) + "/ports/1/hw_counters/sent_pkts";
    FILE *file = is_software(s->context->device) ? fopen(path.c_str(), "re") : nullptr;
    if (file == nullptr) return false;
    if (fscanf(file, "%zu", &packets) != 1) packets = 0;
    fclose(file);
    const bool busy = packets - s->packets_sent > 1000;
    s->packets_sent = packets;
    return busy;
}

// Each second: answers who had to wait for that, ends the visits of readers that are gone, and asks the others for a
// sign of life.
static void look_after_readers(server *s)
{
    const uint64_t now = now_ns();
    if (now - s->looked_ns < second_ns * 9 / 10) return;
    s->looked_ns = now;
    answer_requests(s);
    const bool may_probe = !is_busy_in_software(s);
    for (auto next = s->readers.begin(); next != s->readers.end();) {
        reader *const r = (next++)->second.get(); // end_visit takes it out of the map
        const uint64_t age = now_ns() - r->since_ns;
        if (!r->connected && age >= connect_deadline_ns) r->lost = "did not finish connecting,";
        // While this side's own link is down a probe says nothing of the reader, and on SoftRoCE it would end a
        // connection that outlives the outage. When one fails, the transport has tried for some seconds: a deadline
        // of its own it does not need.
        if (may_probe && r->connected && !r->probing && r->lost == nullptr && age >= probe_interval_ns &&
            link_is_up(r->id))
            post_probe(r);
        if (r->lost != nullptr) end_visit(s, r, r->lost);
    }
}

// An event belongs to librdmacm until it is acknowledged, and rdma_destroy_id waits for that: what is
// needed of it is copied first.
static void handle_cm_event(server *s)
{
    rdma_cm_event *event = nullptr;
    if (rdma_get_cm_event(s->cm_channel, &event) != 0) {
        give_up_on_error(s, "rdma_get_cm_event()");
        return;
    }
    const rdma_cm_event_type type = event->event;
    const int status = event->status;
    rdma_cm_id *const id = event->id;
    connect_request request{.id = id, .parameters = event->param.conn, .private_data = {}};
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST && request.parameters.private_data != nullptr)
        memcpy(request.private_data, request.parameters.private_data, request.parameters.private_data_len);
    rdma_ack_cm_event(event);

    reader *const r =
        id != s->listener && type != RDMA_CM_EVENT_CONNECT_REQUEST ? static_cast<reader *>(id->context) : nullptr;
    switch (type) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        s->unanswered.push_back(request);
        answer_requests(s);
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        if (r == nullptr) break;
        r->connected = true;
        r->since_ns = now_ns();
        if (s->opt.verbose) remark(text("reader %s connected, %zu now", r->address.c_str(), s->readers.size()));
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        if (r != nullptr) end_visit(s, r, "left");
        break;
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
        if (r != nullptr) end_visit(s, r, "gave up while connecting,");
        break;
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
        failed(text("device %s", ibv_get_device_name(s->context->device)), "was removed");
        s->stop = s->broken = true;
        break;
    default: // TIMEWAIT_EXIT after every visit, ADDR_CHANGE; they change nothing here
        if (s->opt.verbose) remark(text("%s (status %d)", rdma_event_str(type), status));
    }
}

// The signals, the connections and the completions, in one loop. An idle server waits for as long as
// it takes: this is the one wait without a deadline.
static bool serve(server *s)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    s->signals = signalfd(-1, &signals, SFD_CLOEXEC);
    if (s->signals < 0) return failed("signalfd(SIGINT, SIGTERM)", errno);
    s->stop = interrupted != 0; // it came before it was blocked
    for (const int channel : {s->cm_channel->fd, s->completion_channel->fd})
        if (fcntl(channel, F_SETFL, fcntl(channel, F_GETFL) | O_NONBLOCK) != 0)
            return failed("fcntl(O_NONBLOCK)", errno);

    while (!s->stop) {
        pollfd ready[] = {
            {s->signals, POLLIN, 0}, {s->completion_channel->fd, POLLIN, 0}, {s->cm_channel->fd, POLLIN, 0}};
        // Woken each second, to look after the readers, as long as there are any.
        if (poll(ready, 3, s->readers.empty() && s->unanswered.empty() ? -1 : 1000) < 0) {
            if (errno == EINTR) // stopped and continued
                continue;
            failed("poll()", errno);
            s->stop = s->broken = true;
            break;
        }
        if (ready[0].revents != 0) s->stop = true;
        if (ready[1].revents != 0) handle_completions(s);
        if (ready[2].revents != 0)
            handle_cm_event(s);
        else // only now: an event may have waited while this process was stopped
            look_after_readers(s);
    }
    for (const connect_request &request : s->unanswered)
        rdma_destroy_id(request.id); // which rejects it
    while (!s->readers.empty())
        end_visit(s, s->readers.begin()->second.get(), "was disconnected");
    printf("served %zu of %zu readers\n", s->readers_served, s->readers_seen);
    return !s->broken;
}

// P34: what was made, in reverse order.
static void free_everything(server *s)
{
    if (s->signals >= 0) close(s->signals);
    if (s->cq != nullptr) ibv_destroy_cq(s->cq);
    if (s->completion_channel != nullptr) ibv_destroy_comp_channel(s->completion_channel);
    if (s->cache_mr != nullptr) ibv_dereg_mr(s->cache_mr);
    if (s->cache != nullptr) munmap(s->cache, s->length);
    if (s->pd != nullptr) ibv_dealloc_pd(s->pd);
    if (s->contexts != nullptr) rdma_free_devices(s->contexts); // the contexts themselves are librdmacm's
    if (s->listener != nullptr) rdma_destroy_id(s->listener);
    if (s->cm_channel != nullptr) rdma_destroy_event_channel(s->cm_channel);
    if (s->devices != nullptr) ibv_free_device_list(s->devices);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0); // a log is read while it grows
    server s{};
    s.signals = -1;
    s.opt = parse_arguments(argc, argv);
    catch_signals(); // serve() takes them over
    const bool ok = list_devices(&s) && claim_port(&s) && open_device(&s) && load_and_register_cache(&s) &&
                    create_completion_queue(&s) && listen_for_readers(&s) && serve(&s);
    free_everything(&s);
    return ok || interrupted ? exit_success : exit_failure;
}
