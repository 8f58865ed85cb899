// hostile_reader: a client that does to rdma_kv_server what it should not. Each case is one misdeed on
// connections of its own; its details are drawn from the seed and the case's number, so that
// `--seed S --case N` repeats it alone.
//
// The server has to run with --size, at most 1M: the bytes of its synthetic cache are known then.
// Exit status: 0 when the server did to every case what it has to, 1 otherwise, 2 usage.
#include <getopt.h>

#include <map>
#include <utility>

#include "peer.hpp"

struct options {
    const char *server = nullptr, *only = nullptr;
    uint16_t port = 12345;
    uint64_t seed = 1, cases = 100, only_case = 0; // cases count from 1
    uint64_t flood = 0, patience = 10;             // patience: seconds for which a flood waits for answers
    uint32_t stale_key = 0;
    bool isolated = false, offered = false;
};

constexpr size_t most_cache = 1 << 20, buffer_size = 2 * most_cache; // a READ may be longer than the cache
constexpr int answer_ms = 10000;                                     // for every answer: it is under 1 s as a rule

// What all cases share.
struct hostile {
    options opt;
    sockaddr_storage address;
    random_bits dice;
    uint64_t number; // of the case
    ibv_pd *pd;
    uint8_t *buffer;
    ibv_mr *mr;
    uint64_t length; // of the cache
};

struct result {
    bool expected;
    std::string seen;
};

// Something of this side went wrong: nothing is known about the server then.
[[noreturn]] static void give_up(const hostile *h, const char *call, int error)
{
    failed(call, error);
    fprintf(stderr, "  hint: seed %zu, case %zu\n", h->opt.seed, h->number);
    exit(exit_failure);
}

// The byte of the server's synthetic cache at this place: splitmix64 of the place of its word.
static uint8_t cache_byte(uint64_t at)
{
    uint64_t word = (at / 8 * 8 + 1) * 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint8_t>((word ^ (word >> 31)) >> (at % 8 * 8));
}

// ------------------------------------------------------------------------------------ connections

// Address, route, and a queue pair: all that comes before the connect request.
static void prepare(hostile *h, connection *c)
{
    c->channel = rdma_create_event_channel();
    if (c->channel == nullptr) give_up(h, "rdma_create_event_channel()", errno);
    if (rdma_create_id(c->channel, &c->id, nullptr, RDMA_PS_TCP) != 0) give_up(h, "rdma_create_id()", errno);
    if (rdma_resolve_addr(c->id, nullptr, reinterpret_cast<sockaddr *>(&h->address), answer_ms) != 0 ||
        !is(wait_for_event(c->channel, answer_ms), RDMA_CM_EVENT_ADDR_RESOLVED))
        give_up(h, "rdma_resolve_addr()", errno);
    if (rdma_resolve_route(c->id, answer_ms) != 0 ||
        !is(wait_for_event(c->channel, answer_ms), RDMA_CM_EVENT_ROUTE_RESOLVED))
        give_up(h, "rdma_resolve_route()", errno);

    ibv_context *const context = c->id->verbs; // librdmacm has one for each device
    if (h->pd == nullptr) {
        h->pd = ibv_alloc_pd(context);
        if (h->pd == nullptr) give_up(h, "ibv_alloc_pd()", errno);
        const int access = IBV_ACCESS_LOCAL_WRITE;
        h->mr = ibv_reg_mr(h->pd, h->buffer, buffer_size, access);
        if (h->mr == nullptr) give_up(h, "ibv_reg_mr()", errno);
    }
    c->cq = ibv_create_cq(context, 4, nullptr, nullptr, 0);
    if (c->cq == nullptr) give_up(h, "ibv_create_cq()", errno);
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = c->cq;
    attributes.recv_cq = c->cq;
    attributes.cap = {.max_send_wr = 2, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    if (rdma_create_qp(c->id, h->pd, &attributes) != 0) give_up(h, "rdma_create_qp()", errno);
}

static void request_connection(hostile *h, connection *c, const void *data, size_t length, uint8_t depth = 16,
                               uint32_t qp_num = 0)
{
    rdma_conn_param request{};
    request.private_data = data;
    request.private_data_len = static_cast<uint8_t>(length);
    request.initiator_depth = depth;
    request.responder_resources = 1;
    request.retry_count = 7;
    request.qp_num = qp_num; // of a queue pair that librdmacm does not know
    if (rdma_connect(c->id, &request) != 0) give_up(h, "rdma_connect()", errno);
}

static const hello greeting = encode(hello{.magic = hello_magic, .version = handshake_version});

// Connects as a reader does. Returns what is wrong, "" when the cache is offered.
static std::string visit(hostile *h, connection *c, const void *data = &greeting, size_t length = sizeof greeting)
{
    prepare(h, c);
    request_connection(h, c, data, length);
    const event answer = wait_for_event(c->channel, answer_ms);
    if (!is(answer, RDMA_CM_EVENT_ESTABLISHED)) return "honest request: " + text_of(answer);
    const std::string wrong = decode(answer.data, answer.length, offer_magic, &c->cache);
    if (!wrong.empty()) return "offer: " + wrong;
    return c->cache.length <= most_cache ? "" : "the cache is larger than 1M";
}

// Disconnects; returns what is wrong when the server does not answer that.
static std::string leave(connection *c)
{
    if (rdma_disconnect(c->id) != 0) return text("rdma_disconnect(): %s", strerror(errno));
    const event answer = wait_for_event(c->channel, answer_ms);
    const bool gone = is(answer, RDMA_CM_EVENT_DISCONNECTED);
    c->vanish();
    return gone ? "" : "disconnect: " + text_of(answer);
}

// ---------------------------------------------------------------------------------- work requests

// What of the server's memory a work request is aimed at.
struct target {
    uint64_t address;
    uint32_t length, rkey;
};

static void post(hostile *h, connection *c, ibv_wr_opcode opcode, const target &t)
{
    ibv_sge piece{.addr = reinterpret_cast<uintptr_t>(h->buffer), .length = t.length, .lkey = h->mr->lkey};
    ibv_send_wr wr{};
    wr.sg_list = &piece;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
        uint64_t there = 0; // the right guess: a swap that is carried out changes something
        for (size_t i = 0; i < sizeof there; ++i)
            reinterpret_cast<uint8_t *>(&there)[i] = cache_byte(t.address - c->cache.address + i);
        wr.wr.atomic = {.remote_addr = t.address, .compare_add = there, .swap = ~there, .rkey = t.rkey};
    } else if (opcode != IBV_WR_SEND) {
        wr.wr.rdma = {.remote_addr = t.address, .rkey = t.rkey};
    }
    ibv_send_wr *refused = nullptr;
    const int error = ibv_post_send(c->id->qp, &wr, &refused);
    if (error != 0) give_up(h, "ibv_post_send()", error);
}

constexpr int no_completion = -1;

// The status of the next completion, or no_completion.
static int wait_for_completion(connection *c, int milliseconds)
{
    const uint64_t deadline = now_ns() + static_cast<uint64_t>(milliseconds) * 1000000;
    for (ibv_wc completion{}; now_ns() < deadline; sleep_us(100))
        if (ibv_poll_cq(c->cq, 1, &completion) > 0) return completion.status;
    return no_completion;
}

static std::string status_text(int status)
{
    return status == no_completion ? "no completion" : ibv_wc_status_str(static_cast<ibv_wc_status>(status));
}

// Reads a part of the cache with a key, and compares. Returns what is wrong with it.
static std::string read_part(hostile *h, connection *c, uint64_t at, uint32_t length, uint32_t rkey)
{
    memset(h->buffer, 0, length);
    post(h, c, IBV_WR_RDMA_READ, {.address = c->cache.address + at, .length = length, .rkey = rkey});
    const int status = wait_for_completion(c, answer_ms);
    if (status != IBV_WC_SUCCESS) return status_text(status);
    for (uint32_t i = 0; i < length; ++i)
        if (h->buffer[i] != cache_byte(at + i)) return text("byte %zu of the cache is wrong", at + i);
    return "";
}

// An honest reader of a part, on a new connection. Returns what is wrong.
static std::string read_honestly(hostile *h, uint64_t at, uint64_t length)
{
    connection c;
    std::string wrong = visit(h, &c);
    if (wrong.empty()) wrong = read_part(h, &c, at, static_cast<uint32_t>(length), c.cache.rkey);
    if (wrong.empty()) wrong = leave(&c);
    return wrong.empty() ? "" : "honest READ: " + wrong;
}

// A place in the cache with so many bytes behind it.
static uint64_t place_for(hostile *h, uint64_t length) { return below(&h->dice, h->length - length + 1); }

// ---------------------------------------------------------------------------------- the handshake

// Such a connect request has to be refused, with a reason.
static result is_refused(hostile *h, const void *data, size_t length, uint8_t depth = 16)
{
    connection c;
    prepare(h, &c);
    request_connection(h, &c, data, length, depth);
    const event answer = wait_for_event(c.channel, answer_ms);
    refusal message{};
    if (!is(answer, RDMA_CM_EVENT_REJECTED)) return {false, text_of(answer)};
    const std::string wrong = decode(answer.data, answer.length, refusal_magic, &message);
    if (!wrong.empty()) return {false, "rejected without a reason: " + wrong};
    const size_t letters = strnlen(message.reason, sizeof message.reason);
    return {letters > 0 && letters < sizeof message.reason, "refused with a reason"};
}

constexpr size_t most_hello = 56; // of private data in a connect request

static result hello_none(hostile *h) { return is_refused(h, nullptr, 0); }

static result hello_random(hostile *h)
{
    uint8_t data[most_hello];
    fill(&h->dice, data, sizeof data);
    return is_refused(h, data, below(&h->dice, sizeof data + 1));
}

// What is missing arrives as zeros: a version of 0.
static result hello_short(hostile *h) { return is_refused(h, &greeting, below(&h->dice, sizeof greeting)); }

static result hello_magic_wrong(hostile *h)
{
    const uint32_t others[] = {offer_magic, refusal_magic, closing_magic, hello_magic ^ (1u << below(&h->dice, 32))};
    const hello message = encode(hello{.magic = others[below(&h->dice, 4)], .version = handshake_version});
    return is_refused(h, &message, sizeof message);
}

static result hello_version_wrong(hostile *h)
{
    const hello message =
        encode(hello{.magic = hello_magic, .version = handshake_version ^ (1u << below(&h->dice, 32))});
    return is_refused(h, &message, sizeof message);
}

static result hello_depth_0(hostile *h) { return is_refused(h, &greeting, sizeof greeting, 0); }

// Bytes behind the message are not looked at: the CM pads, and later versions may add.
static result hello_long(hostile *h)
{
    uint8_t data[most_hello];
    fill(&h->dice, data, sizeof data);
    memcpy(data, &greeting, sizeof greeting);
    connection c;
    const std::string wrong = visit(h, &c, data, sizeof greeting + below(&h->dice, sizeof data - sizeof greeting + 1));
    return {wrong.empty(), wrong.empty() ? "accepted" : wrong};
}

// ------------------------------------------------------------------------ connections that break

// Says nothing for a while, then is gone.
static result silent(hostile *h)
{
    connection c;
    const std::string wrong = visit(h, &c);
    sleep_us(below(&h->dice, 50000));
    return {wrong.empty(), wrong.empty() ? "accepted, then gone" : wrong};
}

// Is gone before the answer to its request, or about when it comes.
static result abandoned(hostile *h)
{
    connection c;
    prepare(h, &c);
    request_connection(h, &c, &greeting, sizeof greeting);
    sleep_us(below(&h->dice, 2) * below(&h->dice, 20000));
    return {true, "gone"};
}

// Gets the answer and does not confirm it: librdmacm leaves that to a caller whose queue pair it does not know.
static result unconfirmed(hostile *h)
{
    connection c;
    prepare(h, &c);
    ibv_qp *const queue_pair = std::exchange(c.id->qp, nullptr);
    request_connection(h, &c, &greeting, sizeof greeting, 16, queue_pair->qp_num);
    const event answer = wait_for_event(c.channel, answer_ms);
    c.id->qp = queue_pair;
    sleep_us(below(&h->dice, 20000));
    return {is(answer, RDMA_CM_EVENT_CONNECT_RESPONSE), text_of(answer)};
}

static result left_at_once(hostile *h)
{
    connection c;
    std::string wrong = visit(h, &c);
    if (wrong.empty()) wrong = leave(&c);
    return {wrong.empty(), wrong.empty() ? "left" : wrong};
}

// ------------------------------------------------------------------------------- closing messages

// Sends so many bytes of the buffer as the closing message. The server has a receive of its exact length:
// what is longer is an invalid request (IB specification, 9.7.5.2), to rxe a remote operation error.
static result send_closing(hostile *h, size_t length)
{
    connection c;
    const std::string wrong = visit(h, &c);
    if (!wrong.empty()) return {false, wrong};
    post(h, &c, IBV_WR_SEND, {.address = 0, .length = static_cast<uint32_t>(length), .rkey = 0});
    const int status = wait_for_completion(&c, answer_ms);
    if (below(&h->dice, 2) == 0) leave(&c); // fails where the send has ended the connection
    const bool refused = status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR;
    return {length <= sizeof(closing) ? status == IBV_WC_SUCCESS : refused, status_text(status)};
}

static result closing_length(hostile *h)
{
    static const size_t lengths[] = {0, 1, sizeof(hello), sizeof(closing) - 1, sizeof(closing) + 1, 4096, buffer_size};
    fill(&h->dice, h->buffer, 4096);
    return send_closing(h, lengths[below(&h->dice, std::size(lengths))]);
}

static result closing_wrong(hostile *h)
{
    closing message{};
    fill(&h->dice, &message, sizeof message);
    if (below(&h->dice, 3) != 0) message.magic = closing_magic; // else all of it is random
    if (below(&h->dice, 2) != 0) message.version = handshake_version;
    message = encode(message);
    memcpy(h->buffer, &message, sizeof message);
    return send_closing(h, sizeof message);
}

// The second finds no receive, and the server's accept says: try again without end.
static result closing_twice(hostile *h)
{
    connection c;
    const std::string wrong = visit(h, &c);
    if (!wrong.empty()) return {false, wrong};
    const target message{.address = 0, .length = sizeof(closing), .rkey = 0};
    post(h, &c, IBV_WR_SEND, message);
    const int first = wait_for_completion(&c, answer_ms);
    post(h, &c, IBV_WR_SEND, message);
    const int second = wait_for_completion(&c, 100);
    return {first == IBV_WC_SUCCESS && second == no_completion, status_text(first) + ", then " + status_text(second)};
}

// --------------------------------------------------------------------- READ, WRITE, atomics, keys

// Carries out a work request that the server's adapter has to refuse. Then an honest reader has to find
// the cache as it was where it was aimed.
static result is_denied(hostile *h, ibv_wr_opcode opcode, target (*aim)(hostile *, const offer &))
{
    connection c;
    std::string wrong = visit(h, &c);
    if (!wrong.empty()) return {false, wrong};
    const target t = aim(h, c.cache);
    if (opcode == IBV_WR_RDMA_WRITE) fill(&h->dice, h->buffer, t.length);
    post(h, &c, opcode, t);
    const int status = wait_for_completion(&c, answer_ms);
    // A key, range or permission that does not fit is a remote access error. A queue pair that does not do
    // WRITEs or atomics at all may call them an invalid request (IB specification, 9.7.5.2).
    const bool denied =
        status == IBV_WC_REM_ACCESS_ERR ||
        (opcode != IBV_WR_RDMA_READ && (status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR));
    if (below(&h->dice, 2) == 0) c.vanish(); // else while the honest one reads

    const uint64_t offset = t.address - c.cache.address; // beyond the cache: of the wrapped kind, too
    wrong = offset <= h->length - t.length && t.length <= h->length ? read_honestly(h, offset, t.length)
                                                                    : read_honestly(h, place_for(h, 4096), 4096);
    return {denied && wrong.empty(), status_text(status) + (wrong.empty() ? "" : ", then " + wrong)};
}

static uint32_t some_bytes(hostile *h) { return static_cast<uint32_t>(1 + below(&h->dice, 4096)); }

static target before_cache(hostile *h, const offer &o)
{
    return {
        .address = o.address - 1 - below(&h->dice, 1 << below(&h->dice, 20)), .length = some_bytes(h), .rkey = o.rkey};
}

static target behind_cache(hostile *h, const offer &o)
{
    return {.address = o.address + o.length + below(&h->dice, 1 << below(&h->dice, 20)),
            .length = some_bytes(h),
            .rkey = o.rkey};
}

static target across_end(hostile *h, const offer &o)
{
    const uint32_t inside = some_bytes(h);
    return {.address = o.address + o.length - inside, .length = inside + some_bytes(h), .rkey = o.rkey};
}

static target longer_than_cache(hostile *h, const offer &o)
{
    const uint64_t length = o.length + 1 + below(&h->dice, buffer_size - o.length);
    return {.address = o.address, .length = static_cast<uint32_t>(length), .rkey = o.rkey};
}

// Past 2^64, and from 0.
static target across_zero(hostile *h, const offer &o)
{
    return {
        .address = below(&h->dice, 4096) - below(&h->dice, 2) * 4096, .length = 4096 + some_bytes(h), .rkey = o.rkey};
}

static target with_key(hostile *h, const offer &o, uint32_t key)
{
    const uint32_t length = some_bytes(h);
    return {.address = o.address + place_for(h, length), .length = length, .rkey = key};
}

static target with_wrong_key(hostile *h, const offer &o)
{
    const uint32_t keys[] = {o.rkey + 1, o.rkey - 1,     o.rkey ^ (1u << below(&h->dice, 32)), 0, ~0u,
                             ~o.rkey,    htobe32(o.rkey)};
    const uint32_t key = keys[below(&h->dice, std::size(keys))];
    return with_key(h, o, key != o.rkey ? key : o.rkey + 1);
}

static target with_stale_key(hostile *h, const offer &o) { return with_key(h, o, h->opt.stale_key); }
static target inside(hostile *h, const offer &o) { return with_key(h, o, o.rkey); }

static target one_word(hostile *h, const offer &o)
{
    return {.address = o.address + below(&h->dice, o.length / 8) * 8, .length = 8, .rkey = o.rkey};
}

static result read_before(hostile *h) { return is_denied(h, IBV_WR_RDMA_READ, before_cache); }
static result read_behind(hostile *h) { return is_denied(h, IBV_WR_RDMA_READ, behind_cache); }
static result read_across_end(hostile *h) { return is_denied(h, IBV_WR_RDMA_READ, across_end); }
static result read_too_long(hostile *h) { return is_denied(h, IBV_WR_RDMA_READ, longer_than_cache); }
static result read_across_zero(hostile *h) { return is_denied(h, IBV_WR_RDMA_READ, across_zero); }
static result read_wrong_key(hostile *h) { return is_denied(h, IBV_WR_RDMA_READ, with_wrong_key); }
static result read_stale_key(hostile *h)
{
    if (h->opt.stale_key == 0) return {true, "not done: no --stale-key"};
    return is_denied(h, IBV_WR_RDMA_READ, with_stale_key);
}
static result write_inside(hostile *h) { return is_denied(h, IBV_WR_RDMA_WRITE, inside); }
static result fetch_and_add(hostile *h) { return is_denied(h, IBV_WR_ATOMIC_FETCH_AND_ADD, one_word); }
static result compare_and_swap(hostile *h) { return is_denied(h, IBV_WR_ATOMIC_CMP_AND_SWP, one_word); }

// The key of another reader that is there, and of one that has left. With --isolate it is worth nothing; without,
// all have the key of one memory region.
static result borrowed_key(hostile *h)
{
    connection first, second, third;
    std::string wrong = visit(h, &first);
    if (wrong.empty()) wrong = visit(h, &second);
    if (!wrong.empty()) return {false, wrong};
    if ((first.cache.rkey != second.cache.rkey) != h->opt.isolated)
        return {false, "the keys are not as they should be"};
    const uint64_t at = place_for(h, 4096);
    for (connection *c : {&first, &second}) {
        wrong = read_part(h, c, at, 4096, c->cache.rkey);
        if (!wrong.empty()) return {false, "own key: " + wrong};
    }
    const std::string expected = h->opt.isolated ? status_text(IBV_WC_REM_ACCESS_ERR) : "";
    const uint32_t key = first.cache.rkey;
    const std::string of_present = read_part(h, &second, at, 4096, key);
    wrong = leave(&first);
    if (wrong.empty()) wrong = visit(h, &third);
    if (!wrong.empty()) return {false, wrong};
    const std::string of_gone = read_part(h, &third, at, 4096, key);
    return {of_present == expected && of_gone == expected,
            "of one that is there: " + (of_present.empty() ? "read" : of_present) +
                ", of one that has left: " + (of_gone.empty() ? "read" : of_gone)};
}

static result honest(hostile *h)
{
    const uint64_t length = 1 + below(&h->dice, h->length);
    const std::string wrong = read_honestly(h, place_for(h, length), length);
    return {wrong.empty(), wrong.empty() ? "read" : wrong};
}

// ------------------------------------------------------------------------------------------ cases

static const struct {
    const char *name;
    result (*run)(hostile *);
} kinds[] = {
    {"hello-none", hello_none},
    {"hello-random", hello_random},
    {"hello-short", hello_short},
    {"hello-magic", hello_magic_wrong},
    {"hello-version", hello_version_wrong},
    {"hello-depth-0", hello_depth_0},
    {"hello-long", hello_long},
    {"silent", silent},
    {"abandoned", abandoned},
    {"unconfirmed", unconfirmed},
    {"left-at-once", left_at_once},
    {"closing-length", closing_length},
    {"closing-wrong", closing_wrong},
    {"closing-twice", closing_twice},
    {"read-before", read_before},
    {"read-behind", read_behind},
    {"read-across-end", read_across_end},
    {"read-too-long", read_too_long},
    {"read-across-zero", read_across_zero},
    {"read-wrong-key", read_wrong_key},
    {"read-stale-key", read_stale_key},
    {"write", write_inside},
    {"fetch-and-add", fetch_and_add},
    {"compare-and-swap", compare_and_swap},
    {"borrowed-key", borrowed_key},
    {"honest", honest},
};

// Runs the cases and counts what was seen. Each kind has its turn; a case's details come from seed and number.
static bool run_cases(hostile *h)
{
    std::map<std::string, std::map<std::string, uint64_t>> seen;
    bool ok = true;
    for (h->number = 1; ok && h->number <= h->opt.cases; ++h->number) {
        const auto &kind = kinds[h->number % std::size(kinds)];
        if (h->opt.only_case != 0 && h->number != h->opt.only_case) continue;
        if (h->opt.only != nullptr && strcmp(h->opt.only, kind.name) != 0) continue;
        h->dice = dice_of(h->opt.seed, h->number);
        const result r = kind.run(h);
        ++seen[kind.name][r.seen];
        ok = r.expected || failed(text("seed %zu, case %zu, %s", h->opt.seed, h->number, kind.name), r.seen);
    }
    for (const auto &[name, counts] : seen)
        for (const auto &[what, count] : counts)
            printf("%-17s %5zu  %s\n", name.c_str(), count, what.c_str());
    return ok;
}

// Many connect requests at once, as to a server whose queue of them is full. Waits for the answers as long as
// the patience lasts; what is not answered then is abandoned.
static bool flood(hostile *h)
{
    std::vector<connection> connections(h->opt.flood);
    std::map<std::string, uint64_t> seen;
    for (connection &c : connections)
        prepare(h, &c);
    for (connection &c : connections)
        request_connection(h, &c, &greeting, sizeof greeting);
    printf("%zu requests sent\n", connections.size());
    const uint64_t deadline = now_ns() + h->opt.patience * 1000000000;
    for (connection &c : connections) {
        const uint64_t now = now_ns();
        const event answer =
            wait_for_event(c.channel, now < deadline ? static_cast<int>((deadline - now) / 1000000) : 0);
        ++seen[text_of(answer)];
    }
    for (const auto &[what, count] : seen)
        printf("%5zu  %s\n", count, what.c_str());
    return true;
}

static void print_usage(FILE *stream)
{
    fputs("usage: hostile_reader -s SERVER [-p PORT] [--seed N] [--cases N] [--only KIND] [--case N]\n"
          "                      [--isolated] [--stale-key KEY] | --offer | --flood N [--patience SECONDS]\n"
          "Does to an rdma_kv_server --size N what a reader should not. The kinds:\n",
          stream);
    for (const auto &kind : kinds)
        fprintf(stream, "  %s\n", kind.name);
}

static options parse_arguments(int argc, char **argv)
{
    // clang-format off
    static const option long_options[] = {
        {"server", required_argument, nullptr, 's'},    {"port", required_argument, nullptr, 'p'},
        {"seed", required_argument, nullptr, 'S'},      {"cases", required_argument, nullptr, 'C'},
        {"case", required_argument, nullptr, 'c'},      {"only", required_argument, nullptr, 'o'},
        {"isolated", no_argument, nullptr, 'i'},        {"stale-key", required_argument, nullptr, 'k'},
        {"offer", no_argument, nullptr, 'O'},           {"flood", required_argument, nullptr, 'f'},
        {"patience", required_argument, nullptr, 'P'},  {"help", no_argument, nullptr, 'h'},
        {nullptr, 0, nullptr, 0}};
    // clang-format on
    options opt;
    for (int letter; (letter = getopt_long(argc, argv, "s:p:h", long_options, nullptr)) != -1;) {
        switch (letter) {
        case 's': opt.server = optarg; break;
        case 'p': number_option("--port", optarg, 1, 65535, &opt.port); break;
        case 'S': number_option("--seed", optarg, 0, UINT32_MAX, &opt.seed); break;
        case 'C': number_option("--cases", optarg, 1, UINT32_MAX, &opt.cases); break;
        case 'c': number_option("--case", optarg, 1, UINT32_MAX, &opt.only_case); break;
        case 'o': opt.only = optarg; break;
        case 'i': opt.isolated = true; break;
        case 'k': number_option("--stale-key", optarg, 1, UINT32_MAX, &opt.stale_key); break;
        case 'O': opt.offered = true; break;
        case 'f': number_option("--flood", optarg, 1, 10000, &opt.flood); break;
        case 'P': number_option("--patience", optarg, 0, 3600, &opt.patience); break;
        case 'h': print_usage(stdout); exit(exit_success);
        default: print_usage(stderr); exit(exit_usage);
        }
    }
    const auto is_only = [&](const auto &kind) { return opt.only == nullptr || strcmp(opt.only, kind.name) == 0; };
    if (std::none_of(std::begin(kinds), std::end(kinds), is_only))
        usage_error(text("--only %s: no such kind", opt.only));
    if (optind < argc || opt.server == nullptr) usage_error("the server is missing: -s HOST");
    return opt;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    hostile h{};
    h.opt = parse_arguments(argc, argv);
    if (!find_address(h.opt.server, h.opt.port, AF_UNSPEC, &h.address)) return exit_failure;
    h.buffer = allocate_buffer(buffer_size);
    if (h.buffer == nullptr) return exit_failure;
    bool ok;
    if (h.opt.flood != 0) {
        ok = flood(&h);
    } else {
        connection c;
        const std::string wrong = visit(&h, &c);
        h.length = c.cache.length;
        if (wrong.empty() && h.opt.offered)
            printf("address %zu length %zu key %u\n", c.cache.address, c.cache.length, c.cache.rkey);
        c.vanish();
        ok = wrong.empty() ? h.opt.offered || run_cases(&h) : failed("first visit", wrong);
    }
    if (h.mr != nullptr) ibv_dereg_mr(h.mr);
    if (h.pd != nullptr) ibv_dealloc_pd(h.pd);
    munmap(h.buffer, buffer_size);
    return ok ? exit_success : exit_failure;
}
