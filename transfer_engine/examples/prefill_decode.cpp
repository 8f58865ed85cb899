// prefill_decode: a paged KV cache goes from a prefill process to a decode process, layer by layer, while the layers
// that follow are still being computed.
//
//   prefill                                    decode
//                                              registers its pages, expects an immediate for each page of a layer
//                    <- its region, which pages (a socket) -
//   computes layer 0, bumps the watcher
//   the watcher's callback writes the layer's pages  ->  they arrive, with the layer's number as the immediate
//   computes layer 1 ...                       all layers have come: compares every page
//
// Computing is a given time here (--layer-us); the pages have their content before. The time that counts is the
// exposed one: from the end of the last layer's computing until everything is written. Afterwards the whole
// cache is written at once, for comparison.
//
// Both processes are on this machine, the second a fork of the first; or each is started by itself, on two machines.
#include "../transfer_engine.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <getopt.h>
#include <mutex>
#include <netdb.h>
#include <numeric>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace transfer_engine;
using Clock = std::chrono::steady_clock;

namespace
{

// The shapes of public models' configurations, bf16, blocks of 16 tokens.
struct Model {
    const char *name;
    uint64_t layers, tensors; // tensors of a layer: K and V, or the one of MLA
    uint64_t block_bytes;     // of 16 tokens of one tensor
};
constexpr uint64_t block_tokens = 16;
constexpr std::array models{
    Model{"llama-3.1-8b", 32, 2, 32768},     // 8 KV heads x 128 x 2 bytes x 16 tokens
    Model{"llama-3.1-70b-tp8", 80, 2, 4096}, // one of them a rank
    Model{"deepseek-v3-mla", 61, 1, 18432},  // (512 + 64) x 2 bytes x 16 tokens
};

struct Arguments {
    Model model = models[0];
    uint64_t tokens = 512;
    uint64_t layer_us = 2000;
    std::vector<std::string> nics;
    std::string decode_at, prefill_to; // ADDRESS:PORT; both empty: both processes are here
    const char *json = nullptr;
};

constexpr auto patience = std::chrono::seconds(60);        // for anything that the other process does
constexpr auto start_patience = std::chrono::seconds(600); // for someone to start it

[[noreturn]] void give_up(const std::string &what)
{
    fprintf(stderr, "prefill_decode: %s\n", what.c_str());
    exit(EXIT_FAILURE);
}

void require(const Status &status, const char *call)
{
    if (!status.ok()) give_up(std::string(call) + ": " + name_of(status.code) + ": " + status.message);
}

void print_usage(FILE *stream)
{
    fputs("usage: prefill_decode [options]\n"
          "Moves a paged KV cache from a prefill to a decode process, layer by layer.\n\n"
          "  --model NAME   llama-3.1-8b (default), llama-3.1-70b-tp8, deepseek-v3-mla\n"
          "  --tokens N     of the prompt (default 512)\n"
          "  --layer-us N   what a layer takes to compute, in microseconds (default 2000)\n"
          "  --nic NIC      ofi:tcp;ofi_rxm (default), ofi:shm, verbs:rxe0, ...; may be repeated, up to four\n"
          "  --json FILE    the figures of the run\n"
          "  --help         this text\n\n"
          "Both processes are started here, or each by itself, with the same model and tokens:\n"
          "  --decode ADDRESS:PORT    be decode, and wait there (TCP) for a prefill\n"
          "  --prefill ADDRESS:PORT   be prefill, for the decode that waits there\n",
          stream);
}

uint64_t number(const char *option, const char *text)
{
    char *end = nullptr;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || *text == '-' || value == 0 || value > 1000000000)
        give_up(std::string(option) + " " + text + ": not a number of 1 to 1000000000");
    return value;
}

Arguments parse_arguments(int argc, char **argv)
{
    static const option options[] = {{"model", required_argument, nullptr, 'm'},
                                     {"tokens", required_argument, nullptr, 't'},
                                     {"layer-us", required_argument, nullptr, 'l'},
                                     {"nic", required_argument, nullptr, 'n'},
                                     {"decode", required_argument, nullptr, 'd'},
                                     {"prefill", required_argument, nullptr, 'p'},
                                     {"json", required_argument, nullptr, 'j'},
                                     {"help", no_argument, nullptr, 'h'},
                                     {nullptr, 0, nullptr, 0}};
    Arguments arguments;
    for (int letter; (letter = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
        switch (letter) {
        case 'm': {
            const auto *const found = std::find_if(models.begin(), models.end(),
                                                   [](const Model &model) { return strcmp(model.name, optarg) == 0; });
            if (found == models.end()) give_up(std::string("--model ") + optarg + ": not known; see --help");
            arguments.model = *found;
            break;
        }
        case 't': arguments.tokens = number("--tokens", optarg); break;
        case 'l': arguments.layer_us = number("--layer-us", optarg); break;
        case 'n': arguments.nics.emplace_back(optarg); break;
        case 'd': arguments.decode_at = optarg; break;
        case 'p': arguments.prefill_to = optarg; break;
        case 'j': arguments.json = optarg; break;
        case 'h': print_usage(stdout); exit(EXIT_SUCCESS);
        default: print_usage(stderr); exit(2);
        }
    }
    if (optind < argc) give_up(std::string("unexpected argument '") + argv[optind] + "'");
    if (!arguments.decode_at.empty() && !arguments.prefill_to.empty()) give_up("--decode or --prefill, not both");
    if (arguments.nics.empty()) arguments.nics.emplace_back("ofi:tcp;ofi_rxm");
    return arguments;
}

// ------------------------------------------------------------------------------------ the cache

struct Cache {
    explicit Cache(const Arguments &arguments)
        : model(arguments.model), blocks((arguments.tokens + block_tokens - 1) / block_tokens)
    {
    }

    Model model;
    uint64_t blocks; // of one tensor

    std::array<uint64_t, 4> shape() const { return {model.layers, model.tensors, model.block_bytes, blocks}; }
    uint64_t pages_of_layer() const { return model.tensors * blocks; }
    uint64_t pages() const { return model.layers * pages_of_layer(); }
    uint64_t bytes() const { return pages() * model.block_bytes; }
};

// Word `index` of a page: a page or a word in the wrong place cannot pass for the right one.
uint64_t word_of(uint64_t page, uint64_t index)
{
    uint64_t word = (page << 32 | index) * 0x9e3779b97f4a7c15u + 1;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    return word ^ (word >> 27);
}

void fill_page(uint8_t *at, uint64_t page, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
        const uint64_t word = word_of(page, i);
        memcpy(at + i * sizeof word, &word, sizeof word);
    }
}

bool page_is_right(const uint8_t *at, uint64_t page, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
        uint64_t word = 0;
        memcpy(&word, at + i * sizeof word, sizeof word);
        if (word != word_of(page, i)) return false;
    }
    return true;
}

// As an allocator of blocks leaves it after a while: the pages are anywhere in a pool of twice as many.
std::vector<uint32_t> scattered(uint64_t pages, uint32_t seed)
{
    std::vector<uint32_t> all(2 * pages);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), std::mt19937(seed));
    all.resize(pages);
    return all;
}

// ------------------------------------------------------------------------- what the processes say

struct FreeAddress {
    void operator()(addrinfo *address) const { freeaddrinfo(address); }
};

// `place`: ADDRESS:PORT, for TCP; an IPv6 address in brackets, none for all that this machine has.
std::unique_ptr<addrinfo, FreeAddress> resolve(const std::string &place, int flags)
{
    const size_t colon = place.rfind(':');
    if (colon == std::string::npos) give_up(place + ": not ADDRESS:PORT");
    std::string address = place.substr(0, colon);
    if (address.starts_with('[') && address.ends_with(']')) address = address.substr(1, address.size() - 2);
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    const int error =
        getaddrinfo(address.empty() ? nullptr : address.c_str(), place.c_str() + colon + 1, &hints, &found);
    if (error != 0) give_up("getaddrinfo(" + place + "): " + gai_strerror(error));
    return std::unique_ptr<addrinfo, FreeAddress>(found);
}

// Sending, and connect(), end after `patience`, with EAGAIN or EINPROGRESS: socket(7).
void limit_waits(int socket)
{
    const timeval limit{.tv_sec = patience.count(), .tv_usec = 0};
    if (setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0)
        give_up(std::string("setsockopt(SO_SNDTIMEO): ") + strerror(errno));
}

bool has_input(int socket, std::chrono::milliseconds limit)
{
    pollfd ready{.fd = socket, .events = POLLIN, .revents = 0};
    return poll(&ready, 1, static_cast<int>(limit.count())) == 1;
}

int accept_prefill(const std::string &place)
{
    const auto address = resolve(place, AI_PASSIVE);
    // Not blocking: who has come may be gone again at accept4().
    const int listener = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), reuse = 1;
    if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) != 0 ||
        bind(listener, address->ai_addr, address->ai_addrlen) != 0 || listen(listener, 1) != 0)
        give_up("--decode " + place + ": " + strerror(errno));
    printf("waiting for prefill on %s\n", place.c_str());
    fflush(stdout);
    if (!has_input(listener, start_patience)) give_up("--decode " + place + ": nobody has come in ten minutes");
    const int accepted = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted < 0) give_up(std::string("accept4(): ") + strerror(errno));
    close(listener);
    limit_waits(accepted);
    return accepted;
}

int connect_to_decode(const std::string &place)
{
    const auto address = resolve(place, 0);
    const int connected = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connected < 0) give_up(std::string("socket(): ") + strerror(errno));
    limit_waits(connected);
    if (connect(connected, address->ai_addr, address->ai_addrlen) != 0)
        give_up("--prefill " + place + ": " + strerror(errno) + "\n  hint: decode is started first");
    return connected;
}

void send_all(int socket, const void *data, size_t length)
{
    for (size_t done = 0; done < length;) {
        const ssize_t sent = send(socket, static_cast<const char *>(data) + done, length - done, MSG_NOSIGNAL);
        if (sent <= 0) give_up(std::string("send(): ") + strerror(errno));
        done += static_cast<size_t>(sent);
    }
}

void receive_all(int socket, void *data, size_t length)
{
    for (size_t done = 0; done < length;) {
        if (!has_input(socket, patience)) give_up("nothing from the other process in a minute");
        const ssize_t got = recv(socket, static_cast<char *>(data) + done, length - done, 0);
        if (got <= 0) give_up("the other process has ended");
        done += static_cast<size_t>(got);
    }
}

// Both processes do.
void compare_shapes(int socket, const Cache &cache)
{
    const auto here = cache.shape();
    auto there = here;
    send_all(socket, here.data(), sizeof here);
    receive_all(socket, there.data(), sizeof there);
    if (there != here) give_up("the other process has another --model or other --tokens");
}

std::unique_ptr<TransferEngine> open_engine(const Arguments &arguments)
{
    Options options;
    options.groups.resize(1);
    options.spin = false; // two engines share this machine
    for (const std::string &text : arguments.nics)
        require(nic_from_text(text, &options.groups[0].nics.emplace_back()), "--nic");
    Status status;
    auto engine = TransferEngine::open(std::move(options), &status);
    require(status, "TransferEngine::open()");
    return engine;
}

// Counts what is to happen, by any thread, and waits for it.
class Countdown
{
public:
    explicit Countdown(uint64_t count) : left(count) {}
    void one_less()
    {
        const std::lock_guard lock(mutex);
        if (--left == 0) changed.notify_all();
    }
    void wait(const char *what)
    {
        std::unique_lock lock(mutex);
        if (!changed.wait_for(lock, patience, [this] { return left == 0; }))
            give_up(std::string(what) + ": not within a minute");
    }

private:
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t left;
};

Callback succeeds(Countdown *countdown, const char *what)
{
    return [=](const Status &status) {
        require(status, what);
        countdown->one_less();
    };
}

// ----------------------------------------------------------------------------------------- decode

// Twice: layer by layer, then the whole. Returns whether every page was right.
bool decode(const Arguments &arguments, int socket)
{
    const Cache cache(arguments);
    std::vector<uint8_t> pool(2 * cache.bytes());
    const auto engine = open_engine(arguments);
    MrHandle handle;
    MrDesc region;
    require(engine->reg_mr(pool.data(), pool.size(), host, &handle, &region), "reg_mr()");

    compare_shapes(socket, cache);
    bool right = true;
    for (uint32_t turn = 0; turn < 2; ++turn) {
        std::fill(pool.begin(), pool.end(), uint8_t{0});
        const std::vector<uint32_t> pages = scattered(cache.pages(), turn + 1);
        Countdown layers(cache.model.layers);
        for (uint32_t layer = 0; layer < cache.model.layers; ++layer)
            require(engine->expect_imm_count(layer, cache.pages_of_layer(), succeeds(&layers, "a layer"), patience),
                    "expect_imm_count()");
        const std::vector<uint8_t> description = serialize(region);
        const uint64_t length = description.size();
        send_all(socket, &length, sizeof length);
        send_all(socket, description.data(), description.size());
        send_all(socket, pages.data(), pages.size() * sizeof(uint32_t));
        layers.wait("all layers");
        for (uint64_t page = 0; page < cache.pages(); ++page)
            right = right && page_is_right(&pool[pages[page] * cache.model.block_bytes], page, cache.model.block_bytes);
        send_all(socket, &right, sizeof right);
    }
    char last = 0; // the other side has closed its adapters
    receive_all(socket, &last, sizeof last);
    return right;
}

// ---------------------------------------------------------------------------------------- prefill

struct Figures {
    std::vector<double> layer_ms; // of each layer, from its submission until all its pages are written
    double computing_s = 0, exposed_s = 0, whole_s = 0;
};

class Prefill
{
public:
    Prefill(const Arguments &given, int to_decode)
        : arguments(given), cache(given), socket(to_decode), memory(cache.bytes()), engine(open_engine(given))
    {
        for (uint64_t page = 0; page < cache.pages(); ++page)
            fill_page(&memory[page * cache.model.block_bytes], page, cache.model.block_bytes);
        require(engine->reg_mr(memory.data(), memory.size(), host, &handle, nullptr), "reg_mr()");
    }

    Figures run();

private:
    void learn_pages();
    void write_layer(uint64_t layer, Callback done);
    void wait_for_verdict() const;

    const Arguments &arguments;
    Cache cache;
    int socket;
    std::vector<uint8_t> memory;
    std::unique_ptr<TransferEngine> engine;
    MrHandle handle;
    MrDesc there;
    std::vector<uint32_t> pages_there;
};

void Prefill::learn_pages()
{
    uint64_t length = 0;
    receive_all(socket, &length, sizeof length);
    if (length > 4096) give_up("decode's region: too long");
    std::vector<uint8_t> description(length);
    receive_all(socket, description.data(), description.size());
    require(parse(description, &there), "parse()");
    pages_there.resize(cache.pages());
    receive_all(socket, pages_there.data(), pages_there.size() * sizeof(uint32_t));
}

void Prefill::write_layer(uint64_t layer, Callback done)
{
    const uint64_t first = layer * cache.pages_of_layer();
    Pages here{.indices = std::vector<uint32_t>(cache.pages_of_layer()), .stride = cache.model.block_bytes};
    std::iota(here.indices.begin(), here.indices.end(), static_cast<uint32_t>(first));
    const auto begin = pages_there.begin() + static_cast<ptrdiff_t>(first);
    Pages to{.indices = {begin, begin + static_cast<ptrdiff_t>(cache.pages_of_layer())},
             .stride = cache.model.block_bytes};
    require(engine->submit_paged_writes(cache.model.block_bytes, static_cast<uint32_t>(layer), handle, std::move(here),
                                        there, std::move(to), std::move(done)),
            "submit_paged_writes()");
}

void Prefill::wait_for_verdict() const
{
    uint8_t right = 0; // a bool of theirs, which could be any byte
    receive_all(socket, &right, sizeof right);
    if (right != 1) give_up("decode: a page is not what was sent");
}

Figures Prefill::run()
{
    const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
    Figures figures;
    figures.layer_ms.resize(cache.model.layers);

    compare_shapes(socket, cache);

    // Layer by layer, behind the watcher.
    learn_pages();
    Countdown layers(cache.model.layers);
    uint64_t *const computed = engine->alloc_uvm_watcher([&](uint64_t before, uint64_t now) {
        for (uint64_t layer = before; layer < now; ++layer)
            write_layer(layer, [&, layer, start = Clock::now()](const Status &status) {
                require(status, "a layer");
                figures.layer_ms[layer] = seconds(Clock::now() - start) * 1e3;
                layers.one_less();
            });
    });
    if (computed == nullptr) give_up("alloc_uvm_watcher(): no memory");
    const auto start = Clock::now();
    for (uint64_t layer = 1; layer <= cache.model.layers; ++layer) {
        std::this_thread::sleep_until(start + layer * std::chrono::microseconds(arguments.layer_us));
        std::atomic_ref(*computed).store(layer, std::memory_order_release); // what a kernel does on a GPU
    }
    const auto end = Clock::now();
    figures.computing_s = seconds(end - start);
    layers.wait("all layers");
    figures.exposed_s = seconds(Clock::now() - end);
    engine->free_uvm_watcher(computed);
    wait_for_verdict();

    // The same cache at once, after everything has been computed.
    learn_pages();
    Countdown whole(cache.model.layers);
    const auto whole_start = Clock::now();
    for (uint64_t layer = 0; layer < cache.model.layers; ++layer)
        write_layer(layer, succeeds(&whole, "the whole cache"));
    whole.wait("the whole cache");
    figures.whole_s = seconds(Clock::now() - whole_start);
    wait_for_verdict();

    engine->stop(true);
    const char last = 0;
    send_all(socket, &last, sizeof last);
    return figures;
}

void report(const Arguments &arguments, const Figures &figures)
{
    const Cache cache(arguments);
    const double gigabytes = static_cast<double>(cache.bytes()) / 1e9;
    std::vector<double> sorted = figures.layer_ms;
    std::sort(sorted.begin(), sorted.end());
    const double median = sorted[sorted.size() / 2], most = sorted.back();
    printf("model    %s, %zu tokens: %zu layers, %zu pages of %zu bytes, %zu bytes\n", cache.model.name,
           arguments.tokens, cache.model.layers, cache.pages(), cache.model.block_bytes, cache.bytes());
    printf("layers   computed in %.3f s, each %zu us; written in %.3f ms (median), %.3f ms (most)\n",
           figures.computing_s, arguments.layer_us, median, most);
    printf("exposed  %.3f ms after the last layer, layer by layer\n", figures.exposed_s * 1e3);
    printf("whole    %.3f ms when written afterwards, %.3f GB/s (10^9 bytes a second)\n", figures.whole_s * 1e3,
           gigabytes / figures.whole_s);
    printf("ratio    %.3f exposed / whole\n", figures.exposed_s / figures.whole_s);
    printf("pages    every one compared, twice: right\n");
    if (arguments.json == nullptr) return;
    FILE *const file = fopen(arguments.json, "we");
    if (file == nullptr) give_up(std::string("--json ") + arguments.json + ": " + strerror(errno));
    fprintf(file,
            "{\"model\": \"%s\", \"tokens\": %zu, \"nics\": %zu, \"bytes\": %zu, \"pages\": %zu, \"page_bytes\": %zu, "
            "\"layer_us\": %zu, \"layer_ms_median\": %.6f, \"layer_ms_most\": %.6f, \"exposed_s\": %.9f, \"whole_s\": "
            "%.9f}\n",
            cache.model.name, arguments.tokens, arguments.nics.size(), cache.bytes(), cache.pages(),
            cache.model.block_bytes, arguments.layer_us, median, most, figures.exposed_s, figures.whole_s);
    if (fclose(file) != 0) give_up(std::string("--json ") + arguments.json + ": " + strerror(errno));
}

} // namespace

int main(int argc, char **argv)
{
    const Arguments arguments = parse_arguments(argc, argv);
    if (!arguments.decode_at.empty()) {
        const bool right = decode(arguments, accept_prefill(arguments.decode_at));
        puts(right ? "pages    every one compared, twice: right" : "pages    not all are right");
        return right ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    if (!arguments.prefill_to.empty()) {
        report(arguments, Prefill(arguments, connect_to_decode(arguments.prefill_to)).run());
        return EXIT_SUCCESS;
    }

    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        give_up(std::string("socketpair(): ") + strerror(errno));
    for (const int end : sockets)
        limit_waits(end);
    // Before anything is opened: adapters do not survive a fork.
    const pid_t child = fork();
    if (child < 0) give_up(std::string("fork(): ") + strerror(errno));
    close(sockets[child == 0 ? 0 : 1]);
    if (child == 0) return decode(arguments, sockets[1]) ? EXIT_SUCCESS : EXIT_FAILURE;
    const Figures figures = Prefill(arguments, sockets[0]).run();
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) give_up("the decode process failed");
    report(arguments, figures);
    return EXIT_SUCCESS;
}
