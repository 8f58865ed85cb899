// hostile_server: a server that does to rdma_kv_reader what it should not. Connection N gets the N-th
// misdeed of the table, round and round; its details are drawn from the seed and N. Before it comes a line
// "connection N: KIND, exit status S" says what the reader has to end with.
#include <getopt.h>

#include "peer.hpp"

struct options {
    const char *only = nullptr;
    uint16_t port = 12345;
    uint64_t seed = 1;
};

constexpr size_t small_cache = 256 << 10, large_cache = 16 << 20; // reading the large one takes a while

struct hostile {
    options opt;
    rdma_event_channel *channel;
    rdma_cm_id *listener;
    random_bits dice;
    ibv_pd *pd;
    uint8_t *cache;
    ibv_mr *mr;
    uint8_t md5[md5_size]; // of the small cache
};

[[noreturn]] static void give_up(const char *call, int error)
{
    failed(call, error);
    exit(exit_failure);
}

static offer honest_offer(const hostile *h)
{
    offer message{.magic = offer_magic,
                  .version = handshake_version,
                  .address = reinterpret_cast<uintptr_t>(h->cache),
                  .length = small_cache,
                  .md5 = {},
                  .rkey = h->mr->rkey,
                  .reserved = 0};
    memcpy(message.md5, h->md5, md5_size);
    return message;
}

// -------------------------------------------------------------------------------- ways to answer

static void reject_id(rdma_cm_id *id, const void *data, size_t length)
{
    if (rdma_reject(id, data, static_cast<uint8_t>(length)) != 0) give_up("rdma_reject()", errno);
}

// A reader that gets not a byte takes that for the kernel's, and asks once more.
static void reject(hostile *h, connection *c, const void *data, size_t length)
{
    const auto *bytes = static_cast<const uint8_t *>(data);
    reject_id(c->id, data, length);
    if (std::any_of(bytes, bytes + length, [](uint8_t byte) { return byte != 0; })) return;
    const event again = wait_for_event(h->channel, 10000);
    if (!is(again, RDMA_CM_EVENT_CONNECT_REQUEST)) give_up("the reader's second request", ETIMEDOUT);
    reject_id(again.id, data, length);
    rdma_destroy_id(again.id);
}

// Until the reader has left, or 10 s have passed.
static void wait_until_gone(connection *c)
{
    event e = wait_for_event(c->channel, 10000);
    while (e.came && e.type != RDMA_CM_EVENT_DISCONNECTED)
        e = wait_for_event(c->channel, 10000);
}

// Accepts with such bytes, and waits until the connection stands: false when that does not come.
static bool accept_with(hostile *h, connection *c, const void *data, size_t length, uint8_t responder_resources = 16)
{
    c->cq = ibv_create_cq(c->id->verbs, 4, nullptr, nullptr, 0);
    if (c->cq == nullptr) give_up("ibv_create_cq()", errno);
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = c->cq;
    attributes.recv_cq = c->cq;
    attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    if (rdma_create_qp(c->id, h->pd, &attributes) != 0) return false; // the reader has given up
    // The reader's closing message has to find a receive. Its bytes overwrite nothing that is offered.
    ibv_sge piece{.addr = reinterpret_cast<uintptr_t>(h->cache) + large_cache, .length = 4096, .lkey = h->mr->lkey};
    ibv_recv_wr receive{.wr_id = 0, .next = nullptr, .sg_list = &piece, .num_sge = 1}, *refused = nullptr;
    if (ibv_post_recv(c->id->qp, &receive, &refused) != 0) give_up("ibv_post_recv()", errno);

    rdma_conn_param answer{};
    answer.private_data = data;
    answer.private_data_len = static_cast<uint8_t>(length);
    answer.responder_resources = responder_resources;
    answer.initiator_depth = 1;
    answer.rnr_retry_count = 7;
    return rdma_accept(c->id, &answer) == 0 && is(wait_for_event(c->channel, 10000), RDMA_CM_EVENT_ESTABLISHED);
}

// Accepts with an offer, and does nothing more.
static void accept_offer(hostile *h, connection *c, const offer &message, uint8_t responder_resources = 16)
{
    const offer encoded = encode(message);
    if (accept_with(h, c, &encoded, sizeof encoded, responder_resources)) wait_until_gone(c);
}

// -------------------------------------------------------------------------------------- misdeeds

constexpr size_t most_reject = 148, most_accept = 196; // bytes of private data

static refusal refusal_with(const char *reason)
{
    refusal message{.magic = refusal_magic, .version = handshake_version, .reason = {}};
    snprintf(message.reason, sizeof message.reason, "%s", reason);
    return message;
}

static void reject_nothing(hostile *h, connection *c) { reject(h, c, nullptr, 0); }

static void reject_random(hostile *h, connection *c)
{
    uint8_t data[most_reject];
    fill(&h->dice, data, sizeof data);
    reject(h, c, data, below(&h->dice, sizeof data + 1));
}

static void reject_short(hostile *h, connection *c)
{
    const refusal message = encode(refusal_with("a reason that is cut"));
    reject(h, c, &message, below(&h->dice, 30));
}

static void reject_no_reason(hostile *h, connection *c)
{
    const refusal message = encode(refusal_with(""));
    reject(h, c, &message, sizeof message);
}

static void reject_long(hostile *h, connection *c)
{
    uint8_t data[most_reject];
    fill(&h->dice, data, sizeof data);
    const refusal message = encode(refusal_with("more follows"));
    memcpy(data, &message, sizeof message);
    reject(h, c, data, sizeof data);
}

static void reject_unterminated(hostile *h, connection *c)
{
    refusal message = refusal_with("");
    memset(message.reason, 'x', sizeof message.reason);
    message = encode(message);
    uint8_t data[most_reject];
    memset(data, 'y', sizeof data); // would follow the reason
    memcpy(data, &message, sizeof message);
    reject(h, c, data, below(&h->dice, 2) == 0 ? sizeof message : sizeof data);
}

// What a terminal would obey: colours, a title, line ends, a bell; and random bytes.
static void reject_control(hostile *h, connection *c)
{
    refusal message = refusal_with("\033[31mred\033]0;title\007\r\n\b\x7f\x9b"
                                   "2J%s%n");
    if (below(&h->dice, 2) == 0) fill(&h->dice, message.reason, sizeof message.reason);
    message = encode(message);
    reject(h, c, &message, sizeof message);
}

static void accept_nothing(hostile *h, connection *c)
{
    if (accept_with(h, c, nullptr, 0)) wait_until_gone(c);
}

static void accept_random(hostile *h, connection *c)
{
    uint8_t data[most_accept];
    fill(&h->dice, data, sizeof data);
    if (accept_with(h, c, data, below(&h->dice, sizeof data + 1))) wait_until_gone(c);
}

// What is missing arrives as zeros: at least the key, which is the end.
static void accept_truncated(hostile *h, connection *c)
{
    const offer message = encode(honest_offer(h));
    if (accept_with(h, c, &message, below(&h->dice, offsetof(offer, rkey) + 1))) wait_until_gone(c);
}

static void accept_version(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.version ^= 1u << below(&h->dice, 32);
    accept_offer(h, c, message);
}

static void accept_magic(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.magic = below(&h->dice, 2) == 0 ? refusal_magic : hello_magic;
    accept_offer(h, c, message);
}

static void length_0(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.length = 0;
    accept_offer(h, c, message);
}

// More than the reader can have: more than any machine, and all of this one.
static void length_absurd(hostile *h, connection *c)
{
    const auto memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t lengths[] = {uint64_t{1} << 63, UINT64_MAX, INT64_MAX, uint64_t{1} << 46, memory};
    offer message = honest_offer(h);
    message.length = lengths[below(&h->dice, std::size(lengths))];
    accept_offer(h, c, message);
}

static void length_beyond(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.length = large_cache + 4096 + 1 + below(&h->dice, 1 << 20);
    accept_offer(h, c, message);
}

static void address_wraps(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.address = UINT64_MAX - below(&h->dice, small_cache);
    accept_offer(h, c, message);
}

static void key_wrong(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.rkey ^= 1u << below(&h->dice, 32);
    accept_offer(h, c, message);
}

static void no_read_resources(hostile *h, connection *c) { accept_offer(h, c, honest_offer(h), 0); }

static void leave(connection *c)
{
    rdma_disconnect(c->id);
    wait_until_gone(c);
}

static void disconnect_at_once(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.length = large_cache;
    message = encode(message);
    if (accept_with(h, c, &message, sizeof message)) leave(c);
}

static void disconnect_while_read(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.length = large_cache;
    message = encode(message);
    if (!accept_with(h, c, &message, sizeof message)) return;
    sleep_us(below(&h->dice, 50000));
    leave(c);
}

// The queue pair in the error state answers nothing, and the reader is not told.
static void silent(hostile *h, connection *c)
{
    const offer message = encode(honest_offer(h));
    if (!accept_with(h, c, &message, sizeof message)) return;
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    if (ibv_modify_qp(c->id->qp, &attributes, IBV_QP_STATE) != 0) give_up("ibv_modify_qp(ERR)", errno);
    wait_until_gone(c);
}

static void no_answer(hostile *, connection *c) { wait_for_event(c->channel, 10000); }

static void md5_wrong(hostile *h, connection *c)
{
    offer message = honest_offer(h);
    message.md5[below(&h->dice, md5_size)] ^= static_cast<uint8_t>(1u << below(&h->dice, 8));
    accept_offer(h, c, message);
}

static void honest(hostile *h, connection *c) { accept_offer(h, c, honest_offer(h)); }

static const struct kind {
    const char *name;
    void (*answer)(hostile *, connection *);
    exit_status readers;
} kinds[] = {
    {"reject-nothing", reject_nothing, exit_failure},
    {"reject-random", reject_random, exit_failure},
    {"reject-short", reject_short, exit_failure},
    {"reject-no-reason", reject_no_reason, exit_failure},
    {"reject-long", reject_long, exit_failure},
    {"reject-unterminated", reject_unterminated, exit_failure},
    {"reject-control", reject_control, exit_failure},
    {"accept-nothing", accept_nothing, exit_failure},
    {"accept-random", accept_random, exit_failure},
    {"accept-truncated", accept_truncated, exit_failure},
    {"accept-version", accept_version, exit_failure},
    {"accept-magic", accept_magic, exit_failure},
    {"length-0", length_0, exit_failure},
    {"length-absurd", length_absurd, exit_failure},
    {"length-beyond", length_beyond, exit_failure},
    {"address-wraps", address_wraps, exit_failure},
    {"key-wrong", key_wrong, exit_failure},
    {"no-read-resources", no_read_resources, exit_failure},
    {"disconnect-at-once", disconnect_at_once, exit_failure},
    {"disconnect-while-read", disconnect_while_read, exit_failure},
    {"silent", silent, exit_failure},
    {"no-answer", no_answer, exit_failure},
    {"md5-wrong", md5_wrong, exit_mismatch},
    {"honest", honest, exit_success},
};

// ------------------------------------------------------------------------------------ the server

static void prepare(hostile *h)
{
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(h->opt.port);
    h->channel = rdma_create_event_channel();
    if (h->channel == nullptr) give_up("rdma_create_event_channel()", errno);
    if (rdma_create_id(h->channel, &h->listener, nullptr, RDMA_PS_TCP) != 0) give_up("rdma_create_id()", errno);
    if (rdma_bind_addr(h->listener, reinterpret_cast<sockaddr *>(&any)) != 0) give_up("rdma_bind_addr()", errno);
    h->cache = allocate_buffer(large_cache + 4096);
    if (h->cache == nullptr) exit(exit_failure);
    h->dice = dice_of(h->opt.seed, 0);
    fill(&h->dice, h->cache, small_cache);
    if (!md5_of(h->cache, small_cache, h->md5)) exit(exit_failure);
    if (rdma_listen(h->listener, 16) != 0) give_up("rdma_listen()", errno);
    printf("listening on port %u\n", h->opt.port);
}

// Memory on the device of the first connection: all come by that.
static void register_cache(hostile *h, ibv_context *context)
{
    if (h->pd != nullptr) return;
    h->pd = ibv_alloc_pd(context);
    if (h->pd == nullptr) give_up("ibv_alloc_pd()", errno);
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    h->mr = ibv_reg_mr(h->pd, h->cache, large_cache + 4096, access);
    if (h->mr == nullptr) give_up("ibv_reg_mr()", errno);
}

static const kind *kind_of(const hostile *h, uint64_t number)
{
    for (const kind &k : kinds)
        if (h->opt.only != nullptr && strcmp(h->opt.only, k.name) == 0) return &k;
    return &kinds[(number - 1) % std::size(kinds)];
}

static void serve_one(hostile *h, uint64_t number)
{
    const kind *const k = kind_of(h, number);
    printf("connection %zu: %s, exit status %d\n", number, k->name, k->readers);
    event request{};
    while (!interrupted && !is(request, RDMA_CM_EVENT_CONNECT_REQUEST))
        request = wait_for_event(h->channel, 100);
    if (interrupted) return;
    register_cache(h, request.id->verbs);
    h->dice = dice_of(h->opt.seed, number);

    connection c;
    c.id = request.id;
    c.channel = rdma_create_event_channel(); // its events come apart from the next request
    if (c.channel == nullptr || rdma_migrate_id(c.id, c.channel) != 0) give_up("rdma_migrate_id()", errno);
    k->answer(h, &c);
}

static options parse_arguments(int argc, char **argv)
{
    static const option long_options[] = {{"port", required_argument, nullptr, 'p'},
                                          {"seed", required_argument, nullptr, 'S'},
                                          {"only", required_argument, nullptr, 'o'},
                                          {nullptr, 0, nullptr, 0}};
    options opt;
    for (int letter; (letter = getopt_long(argc, argv, "p:", long_options, nullptr)) != -1;) {
        switch (letter) {
        case 'p': number_option("--port", optarg, 1, 65535, &opt.port); break;
        case 'S': number_option("--seed", optarg, 0, UINT32_MAX, &opt.seed); break;
        case 'o': opt.only = optarg; break;
        default: fputs("usage: hostile_server [-p PORT] [--seed N] [--only KIND]\n", stderr); exit(exit_usage);
        }
    }
    const auto is_only = [&](const kind &k) { return opt.only == nullptr || strcmp(opt.only, k.name) == 0; };
    if (std::none_of(std::begin(kinds), std::end(kinds), is_only))
        usage_error(text("--only %s: no such kind", opt.only));
    return opt;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    hostile h{};
    h.opt = parse_arguments(argc, argv);
    catch_signals();
    prepare(&h);
    for (uint64_t number = 1; !interrupted; ++number)
        serve_one(&h, number);
    if (h.mr != nullptr) ibv_dereg_mr(h.mr);
    if (h.pd != nullptr) ibv_dealloc_pd(h.pd);
    munmap(h.cache, large_cache + 4096);
    rdma_destroy_id(h.listener);
    rdma_destroy_event_channel(h.channel);
    return exit_success;
}
