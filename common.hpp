// common.hpp: what rdma_kv_server and rdma_kv_reader share: error messages, arguments, timing and
// statistics, MD5, and the bytes that cross in the handshake. Both programs are single-threaded, and
// so is everything here but for touch_pages.
#pragma once

#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>
#include <glob.h>
#include <ifaddrs.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <rdma/rdma_cma.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

inline const char *const program_version = "1.0";

static_assert(sizeof(size_t) == sizeof(uint64_t)); // 64-bit throughout: one type for lengths, printed by %zu

enum exit_status { exit_success = 0, exit_failure = 1, exit_usage = 2, exit_mismatch = 3 };

// ---------------------------------------------------------------------------------------------
// Error messages: "program: call(arguments that matter): reason", then one line of hint.

// printf into a string.
[[gnu::format(printf, 1, 2)]] inline std::string text(const char *format, ...)
{
    char buffer[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

// Tells that a call failed. Returns false, so that a stage can end with `return failed(...)`.
inline bool failed(const std::string &call, const std::string &reason, const std::string &hint = "")
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, call.c_str(), reason.c_str());
    if (!hint.empty()) fprintf(stderr, "  hint: %s\n", hint.c_str());
    return false;
}

inline bool failed(const std::string &call, int error, const std::string &hint = "")
{
    return failed(call, std::string(strerror(error)), hint);
}

// Bytes from elsewhere, up to a zero, on their way to a terminal.
inline std::string printable(const char *bytes, size_t length)
{
    std::string safe(bytes, strnlen(bytes, length));
    for (char &letter : safe)
        letter = isprint(static_cast<unsigned char>(letter)) != 0 ? letter : '?';
    return safe;
}

// A remark on stderr that stops nothing.
inline void remark(const std::string &line)
{
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, line.c_str());
}

// Set by SIGINT and SIGTERM. Whatever takes long looks at it; no SA_RESTART, so that a wait ends.
inline volatile sig_atomic_t interrupted = 0;

inline void catch_signals()
{
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
}

[[noreturn]] inline void usage_error(const std::string &what)
{
    fprintf(stderr, "%s: %s\n  hint: %s --help lists the options\n", program_invocation_short_name, what.c_str(),
            program_invocation_short_name);
    exit(exit_usage);
}

inline bool no_rdma_device()
{
    glob_t in_kernel{}; // there may be devices that this process cannot reach
    const bool unreachable = glob("/sys/class/infiniband/*", 0, nullptr, &in_kernel) == 0;
    globfree(&in_kernel);
    if (unreachable)
        return failed("ibv_get_device_list()", "the kernel has an RDMA device, but /dev/infiniband is incomplete",
                      "load ib_uverbs and rdma_ucm; for a container: --device=/dev/infiniband --ulimit memlock=-1");
    return failed("ibv_get_device_list()", "no RDMA device on this machine",
                  "SoftRoCE on this kernel: sudo scripts/softroce.sh up; without kernel support: scripts/lab.sh");
}

// Whether a list of ibv_get_device_list has a device of that name; a message when it has not.
inline bool device_is_there(ibv_device **list, const char *name)
{
    std::string names;
    for (; *list != nullptr; ++list) {
        if (strcmp(ibv_get_device_name(*list), name) == 0) return true;
        names += std::string(names.empty() ? "" : ", ") + ibv_get_device_name(*list);
    }
    return failed(text("device %s", name), "not on this machine", "there are: " + names);
}

// Whether the kernel does the work of this device in software (SoftRoCE, siw): only these have a parent,
// the network interface they were made on.
inline bool is_software(ibv_device *device)
{
    return access((std::string(device->ibdev_path) + "/parent").c_str(), F_OK) == 0;
}

// Why pinning memory may have failed with ENOMEM: RLIMIT_MEMLOCK is the usual cause.
inline std::string memlock_hint(int error, uint64_t bytes)
{
    rlimit limit{};
    if (error != ENOMEM || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
    return text("%zu bytes have to be locked in memory, the limit is %zu: 'ulimit -l unlimited', "
                "LimitMEMLOCK= of a service, --ulimit memlock=-1 of a container",
                bytes, limit.rlim_cur);
}

// ---------------------------------------------------------------------------------------------
// Arguments

// Reads a decimal number of `least`..`most`. False when it is anything else.
inline bool parse_number(const char *argument, uint64_t least, uint64_t most, uint64_t *value)
{
    if (!isdigit(static_cast<unsigned char>(*argument))) // strtoull takes blanks and signs
        return false;
    char *end = nullptr;
    errno = 0;
    const unsigned long long number = strtoull(argument, &end, 10);
    if (errno != 0 || *end != '\0' || number < least || number > most) return false;
    *value = number;
    return true;
}

// Reads a number of bytes, with at most one suffix K, M, G or T: powers of 1024.
inline bool parse_size(const char *argument, uint64_t *bytes)
{
    static const char suffixes[] = "KMGT";
    std::string digits = argument;
    uint64_t unit = 1;
    if (!digits.empty()) {
        const char *suffix = strchr(suffixes, toupper(static_cast<unsigned char>(digits.back())));
        if (suffix != nullptr && *suffix != '\0') {
            unit = uint64_t{1} << (10 * (suffix - suffixes + 1));
            digits.pop_back();
        }
    }
    uint64_t number = 0;
    if (!parse_number(digits.c_str(), 0, UINT64_MAX / unit, &number)) return false;
    *bytes = number * unit;
    return true;
}

// The same, for an option of the command line: they do not return when the argument is wrong.
template <typename integer>
void number_option(const char *option, const char *argument, uint64_t least, uint64_t most, integer *value)
{
    uint64_t number = 0;
    if (!parse_number(argument, least, most, &number))
        usage_error(text("%s %s: not a number of %zu to %zu", option, argument, least, most));
    *value = static_cast<integer>(number);
}

inline void size_option(const char *option, const char *argument, uint64_t least, uint64_t *bytes)
{
    if (!parse_size(argument, bytes) || *bytes < least)
        usage_error(
            text("%s %s: not a size of %zu bytes or more (K, M, G, T: powers of 1024)", option, argument, least));
}

// A network of IPv4 or IPv6 addresses: those that share its first so many bits.
struct network {
    sa_family_t family;
    uint8_t address[sizeof(in6_addr)];
    uint64_t bits;
};

// Reads ADDRESS/BITS, or an ADDRESS alone. False when it is neither.
inline bool parse_network(const char *argument, network *value)
{
    const std::string whole = argument, address = whole.substr(0, whole.find('/'));
    value->family = address.find(':') == std::string::npos ? AF_INET : AF_INET6;
    const uint64_t most = value->family == AF_INET ? 32 : 128;
    value->bits = most;
    return inet_pton(value->family, address.c_str(), value->address) == 1 &&
           (address.size() == whole.size() || parse_number(argument + address.size() + 1, 0, most, &value->bits));
}

inline network network_option(const char *option, const char *argument)
{
    network value{};
    if (!parse_network(argument, &value))
        usage_error(text("%s %s: not a network such as 192.168.77.0/24 or fd00::/64", option, argument));
    return value;
}

// Whether an address is of that network. An IPv4 address mapped to IPv6 is an IPv4 address.
inline bool contains(const network &range, const sockaddr *address)
{
    sa_family_t family = address->sa_family;
    const auto *ipv6 = reinterpret_cast<const sockaddr_in6 *>(address)->sin6_addr.s6_addr;
    const auto *bytes = reinterpret_cast<const uint8_t *>(&reinterpret_cast<const sockaddr_in *>(address)->sin_addr);
    if (family == AF_INET6) {
        const bool mapped = IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<const sockaddr_in6 *>(address)->sin6_addr);
        family = mapped ? AF_INET : AF_INET6;
        bytes = mapped ? ipv6 + 12 : ipv6;
    }
    if (family != range.family) return false;
    for (uint64_t bit = 0; bit < range.bits; ++bit)
        if (((bytes[bit / 8] ^ range.address[bit / 8]) >> (7 - bit % 8) & 1) != 0) return false;
    return true;
}

// Finds the address of a host (name, IPv4 or IPv6, with a scope where one is needed) and a port.
// family: AF_INET, AF_INET6 or AF_UNSPEC.
inline bool find_address(const char *host, uint16_t port, int family, sockaddr_storage *address)
{
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = family;
    hints.ai_socktype = SOCK_STREAM;
    const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
    if (error != 0) return failed(text("getaddrinfo(%s)", host), std::string(gai_strerror(error)));
    memcpy(address, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return true;
}

// "192.168.77.1:12345", "[fd00::1]:12345"
inline std::string address_text(const sockaddr *address)
{
    char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
    const bool ipv6 = address->sa_family == AF_INET6;
    const socklen_t length = ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    return std::string(ipv6 ? "[" : "") + host + (ipv6 ? "]:" : ":") + port;
}

// Whether rdma_cm can bind to an address of this machine, and the RDMA device it belongs to: "" for a
// wildcard. So asked, it is the same for InfiniBand, RoCE and iWARP. Wants a port of 0.
inline bool can_bind(sockaddr *address, std::string *device)
{
    rdma_cm_id *id = nullptr;
    if (rdma_create_id(nullptr, &id, nullptr, RDMA_PS_TCP) != 0) return false;
    const bool ok = rdma_bind_addr(id, address) == 0;
    *device = ok && id->verbs != nullptr ? ibv_get_device_name(id->verbs->device) : "";
    rdma_destroy_id(id);
    return ok;
}

// An address of this machine on an RDMA device, and that device: the first in use, or *device where
// that is not "". family: AF_INET, AF_INET6, or AF_UNSPEC for IPv4 before IPv6. Neither loopback nor
// link-local.
inline bool find_local_address(int family, std::string *device, sockaddr_storage *address)
{
    ifaddrs *interfaces = nullptr;
    if (getifaddrs(&interfaces) != 0) return false;
    const std::string wanted = *device;
    bool found = false;
    for (const int tried : {AF_INET, AF_INET6}) {
        for (const ifaddrs *i = interfaces; i != nullptr && !found; i = i->ifa_next) {
            if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != tried || (family != AF_UNSPEC && family != tried))
                continue;
            if ((i->ifa_flags & (IFF_LOOPBACK | IFF_UP | IFF_RUNNING)) != (IFF_UP | IFF_RUNNING)) continue;
            if (tried == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6 *>(i->ifa_addr)->sin6_addr))
                continue;
            std::string name;
            found = can_bind(i->ifa_addr, &name) && !name.empty() && (wanted.empty() || name == wanted);
            if (found) {
                *device = name;
                memcpy(address, i->ifa_addr, tried == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
            }
        }
    }
    freeifaddrs(interfaces);
    return found;
}

// Sets the port of an IPv4 or IPv6 address: both have it at the same place.
inline void set_port(sockaddr_storage *address, uint16_t port)
{
    reinterpret_cast<sockaddr_in *>(address)->sin_port = htons(port);
}

inline bool is_loopback(const sockaddr_storage *address)
{
    sockaddr_in ipv4{};
    sockaddr_in6 ipv6{};
    memcpy(&ipv4, address, sizeof ipv4);
    memcpy(&ipv6, address, sizeof ipv6);
    if (address->ss_family == AF_INET) return ntohl(ipv4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&ipv6.sin6_addr);
}

// ---------------------------------------------------------------------------------------------
// Timing and statistics

inline uint64_t now_ns() // P14
{
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

inline double seconds_since(uint64_t start_ns) { return static_cast<double>(now_ns() - start_ns) / 1e9; }

struct statistics {
    uint64_t min, median, p99, max; // of the samples, by nearest rank
    double mean, stdev;             // stdev of a sample (n - 1); 0 for one
};

// The p-th percentile by nearest rank: the smallest sample that at least p % of all are not above.
inline uint64_t percentile(const std::vector<uint64_t> &sorted, unsigned p)
{
    const size_t rank = (sorted.size() * p + 99) / 100;
    return sorted[rank > 0 ? rank - 1 : 0];
}

// Of at least one sample. Every one counts: none is dropped as an outlier.
inline statistics statistics_of(std::vector<uint64_t> samples)
{
    std::sort(samples.begin(), samples.end());
    const auto count = static_cast<double>(samples.size());
    const double mean = std::accumulate(samples.begin(), samples.end(), 0.0) / count;
    double squares = 0;
    for (const uint64_t sample : samples)
        squares += (static_cast<double>(sample) - mean) * (static_cast<double>(sample) - mean);
    return {.min = samples.front(),
            .median = percentile(samples, 50),
            .p99 = percentile(samples, 99),
            .max = samples.back(),
            .mean = mean,
            .stdev = samples.size() > 1 ? std::sqrt(squares / (count - 1)) : 0};
}

// Rate at the median, in GB/s: bytes per ns are 10^9 bytes per second.
inline double gigabytes_per_second(uint64_t bytes, const statistics &latency)
{
    return static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(latency.median, 1));
}

// perftest's columns: microseconds, with the nanoseconds behind the point.
inline void print_statistics(uint64_t bytes, size_t iterations, const statistics &t)
{
    const auto us = [](auto ns) { return static_cast<double>(ns) / 1e3; };
    printf("%12s %12s %14s %15s %14s %14s %14s %14s %8s %8s\n", "#bytes", "#iterations", "t_min[usec]",
           "t_median[usec]", "t_avg[usec]", "t_p99[usec]", "t_max[usec]", "t_stdev[usec]", "GB/s", "Gb/s");
    printf("%12zu %12zu %14.3f %15.3f %14.3f %14.3f %14.3f %14.3f %8.3f %8.3f\n", bytes, iterations, us(t.min),
           us(t.median), us(t.mean), us(t.p99), us(t.max), us(t.stdev), gigabytes_per_second(bytes, t),
           gigabytes_per_second(bytes, t) * 8);
    printf("(GB/s, Gb/s: 10^9 bytes and bits per second, at the median)\n");
    if (iterations < 100) printf("(fewer than 100 samples: t_p99 is t_max)\n");
}

// How a range is cut into work requests: chunk_count of them, the last one perhaps shorter.
inline uint64_t chunk_count(uint64_t length, uint64_t chunk) { return length / chunk + (length % chunk != 0 ? 1 : 0); }
inline uint64_t chunk_length(uint64_t length, uint64_t chunk, uint64_t index)
{
    return std::min(chunk, length - index * chunk); // no overflow: index < chunk_count
}

// A bar on stderr, when that is a terminal, for work that lasts longer than half a second.
struct progress {
    const char *label;
    uint64_t total;
    bool terminal = isatty(STDERR_FILENO) == 1;
    uint64_t next_ns = now_ns() + 500000000;
    bool shown = false;
};

inline void show_progress(progress *bar, uint64_t done)
{
    if (!bar->terminal || now_ns() < bar->next_ns) return;
    static const char marks[] = "##############################";
    const double share = static_cast<double>(done) / static_cast<double>(bar->total);
    fprintf(stderr, "\r%-9s [%-30.*s] %3.0f %%", bar->label, static_cast<int>(share * 30), marks, share * 100);
    bar->next_ns = now_ns() + 100000000;
    bar->shown = true;
}

inline void end_progress(const progress *bar)
{
    if (bar->shown) fputs("\r\033[K", stderr);
}

// ---------------------------------------------------------------------------------------------
// Memory and MD5

constexpr uint64_t io_piece = 16 << 20; // bytes per read, write or digest step: a step of the bar

// Brings the pages of fresh memory, with as many threads as there are processors, 8 at most: left to
// ibv_reg_mr one thread brings them all, one by one.
inline void touch_pages(uint8_t *memory, uint64_t bytes)
{
    const uint64_t share = std::max(io_piece, bytes / std::clamp(std::thread::hardware_concurrency(), 1u, 8u) + 1);
    std::vector<std::thread> threads;
    for (uint64_t at = 0; at < bytes; at += share)
        threads.emplace_back([=] { memset(memory + at, 0, std::min(share, bytes - at)); });
    for (std::thread &thread : threads)
        thread.join();
}

// The bytes that can be taken into use before the machine swaps (proc(5), MemAvailable) or the kernel
// kills for the limit of a container.
inline uint64_t available_memory()
{
    uint64_t bytes = UINT64_MAX, number = 0;
    char line[128];
    if (FILE *file = fopen("/proc/meminfo", "re"); file != nullptr) {
        while (fgets(line, sizeof line, file) != nullptr)
            if (sscanf(line, "MemAvailable: %zu kB", &number) == 1) bytes = number * 1024;
        fclose(file);
    }
    if (FILE *file = fopen("/sys/fs/cgroup/memory.max", "re"); file != nullptr) {
        if (fscanf(file, "%zu", &number) == 1) bytes = std::min(bytes, number);
        fclose(file);
    }
    return bytes;
}

// Zeroed memory of its own, in huge pages where the kernel has transparent ones: ibv_reg_mr refuses many
// file mappings, and a long-term pin of one is trouble. nullptr, after a message, when there is none.
inline uint8_t *allocate_buffer(uint64_t bytes)
{
    const uint64_t available = available_memory();
    if (bytes > available) {
        failed(text("mmap(%zu bytes)", bytes), text("only %zu bytes of memory are available here", available),
               "the cache has to fit into memory");
        return nullptr;
    }
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        failed(text("mmap(%zu bytes)", bytes), errno);
        return nullptr;
    }
    if (madvise(memory, bytes, MADV_HUGEPAGE) != 0 && bytes >= (64u << 20))
        remark(text("no transparent huge pages (%s): pages of 4 KiB, slower to register", strerror(errno)));
    touch_pages(static_cast<uint8_t *>(memory), bytes);
    return static_cast<uint8_t *>(memory);
}

constexpr size_t md5_size = 16;

// MD5 (P15), with a bar. False, after a message, when OpenSSL has none (as in FIPS mode).
inline bool md5_of(const uint8_t *data, uint64_t length, uint8_t digest[md5_size])
{
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool ok = context != nullptr && EVP_DigestInit_ex(context, EVP_md5(), nullptr) == 1;
    progress bar{.label = "hashing", .total = length};
    for (uint64_t done = 0; ok && done < length && !interrupted; show_progress(&bar, done)) {
        const uint64_t piece = std::min(io_piece, length - done);
        ok = EVP_DigestUpdate(context, data + done, piece) == 1;
        done += piece;
    }
    end_progress(&bar);
    ok = ok && EVP_DigestFinal_ex(context, digest, nullptr) == 1;
    EVP_MD_CTX_free(context);
    if (interrupted) return failed("hashing", "interrupted");
    return ok || failed("EVP_DigestInit_ex(MD5)", "OpenSSL refuses", "is OpenSSL in FIPS mode? it has no MD5 then");
}

inline std::string md5_text(const uint8_t digest[md5_size])
{
    std::string hex;
    for (size_t i = 0; i < md5_size; ++i)
        hex += text("%02x", digest[i]);
    return hex;
}

// ---------------------------------------------------------------------------------------------
// Output files

// Tells before the work what would fail after it. nullptr: no such file is asked for.
inline bool check_output(const char *option, const char *path)
{
    struct stat status = {};
    if (path == nullptr) return true;
    const std::string call = std::string(option) + " " + path;
    const bool exists = stat(path, &status) == 0;
    if (exists && !S_ISREG(status.st_mode))
        return failed(call, S_ISDIR(status.st_mode) ? "is a folder" : "is not a regular file",
                      "leave the option out to write nothing");
    if (exists && access(path, W_OK) != 0) return failed(call, errno);
    const char *slash = strrchr(path, '/');
    const std::string folder = slash == nullptr ? "." : std::string(path, static_cast<size_t>(slash - path + 1));
    return access(folder.c_str(), W_OK | X_OK) == 0 || failed(call, errno);
}

// Writes a file under a temporary name in the same folder and renames it when it is complete: no file
// that looks right and is not.
inline bool write_file(const char *name, const void *data, uint64_t length)
{
    char *resolved = realpath(name, nullptr); // a symbolic link stays one
    const std::string path = resolved != nullptr ? resolved : name;
    free(resolved);
    const std::string temporary = path + text(".%d.part", getpid());
    const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return failed("open(" + temporary + ")", errno);
    bool ok = true;
    progress bar{.label = "writing", .total = length};
    for (uint64_t done = 0; ok && done < length; show_progress(&bar, done)) {
        const ssize_t put = write(file, static_cast<const uint8_t *>(data) + done, std::min(io_piece, length - done));
        if (put > 0) done += static_cast<uint64_t>(put);
        if (interrupted)
            ok = failed("write(" + temporary + ")", "interrupted");
        else if (put <= 0)
            ok = failed("write(" + temporary + ")", put < 0 ? errno : ENOSPC);
    }
    end_progress(&bar);
    if (close(file) != 0 && ok) ok = failed("close(" + temporary + ")", errno);
    if (ok && rename(temporary.c_str(), path.c_str()) != 0)
        ok = failed("rename(" + temporary + ", " + path + ")", errno);
    if (!ok) unlink(temporary.c_str());
    return ok;
}

// ---------------------------------------------------------------------------------------------
// What crosses besides the cache (P9). Every message begins with magic and version, is big-endian,
// and has no padding. In memory the fields are in host order; encode and decode convert.

#ifndef HANDSHAKE_VERSION
#define HANDSHAKE_VERSION 1 // the tests build a reader of another version
#endif
constexpr uint32_t handshake_version = HANDSHAKE_VERSION;
constexpr uint32_t hello_magic = 0x4b56484c, offer_magic = 0x4b564f46, refusal_magic = 0x4b565246,
                   closing_magic = 0x4b56434c;

struct hello { // reader to server, in the connect request
    uint32_t magic, version;
};
struct offer { // server to reader, in the accept: where the cache is
    uint32_t magic, version;
    uint64_t address, length;
    uint8_t md5[md5_size];
    uint32_t rkey, reserved;
};
struct refusal { // server to reader, in the reject
    uint32_t magic, version;
    char reason[128]; // ends with a zero
};
struct closing { // reader to server, the one SEND that ends a visit
    uint32_t magic, version;
    uint64_t bytes, iterations, median_ns;
    uint32_t verdict, reserved; // enum verdict
};
enum verdict : uint32_t { verdict_unchecked = 0, verdict_equal = 1, verdict_different = 2 };

// What the CM's messages carry of private data: 56 bytes in a connect request, 196 in an accept (of the
// man pages rdma_connect(3) and rdma_accept(3)), 148 in a reject (IB specification, REJ).
static_assert(sizeof(hello) == 8 && sizeof(hello) <= 56);
static_assert(sizeof(offer) == 48 && sizeof(offer) <= 196);
static_assert(sizeof(refusal) == 136 && sizeof(refusal) <= 148);
static_assert(sizeof(closing) == 40);

inline void swap_fields(hello *) {}
inline void swap_fields(refusal *) {}
inline void swap_fields(offer *message)
{
    message->address = htobe64(message->address);
    message->length = htobe64(message->length);
    message->rkey = htobe32(message->rkey);
}
inline void swap_fields(closing *message)
{
    message->bytes = htobe64(message->bytes);
    message->iterations = htobe64(message->iterations);
    message->median_ns = htobe64(message->median_ns);
    message->verdict = htobe32(message->verdict);
}

// Host order to network order; the swap is its own inverse.
template <typename message_type> message_type encode(message_type message)
{
    message.magic = htobe32(message.magic);
    message.version = htobe32(message.version);
    swap_fields(&message);
    return message;
}

// Takes a message out of bytes that came from elsewhere: perhaps short, perhaps padded (private data
// arrives padded with zeros). Returns what is wrong with it, "" when nothing is.
template <typename message_type>
std::string decode(const void *bytes, size_t length, uint32_t magic, message_type *message)
{
    hello head{};
    if (bytes == nullptr || length < sizeof head) return "no handshake of this program";
    memcpy(&head, bytes, sizeof head);
    head = encode(head);
    if (head.magic != magic) return "no handshake of this program";
    if (head.version != handshake_version && magic != refusal_magic) // a refusal tells every version why
        return text("handshake version %u, not %u", head.version, handshake_version);
    if (length < sizeof *message) return text("handshake of %zu bytes, %zu expected", length, sizeof *message);
    memcpy(message, bytes, sizeof *message);
    *message = encode(*message);
    return "";
}
